"""Compare rival hypotheses about one network: one recording, a search for each, one ranking."""

from __future__ import annotations

import time
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from plot_ot.abstract.admission import FILTERS, LEAST_ROWS
from plot_ot.abstract.banks import Bank
from plot_ot.abstract.causal_model import CausalModel
from plot_ot.abstract.holding_out import HoldOut
from plot_ot.abstract.hypothesis import Hypothesis
from plot_ot.abstract.splitting import SPLITS, balanced_bank
from plot_ot.api import Network, as_subject, bind
from plot_ot.comparing.drawing import Counts, Drawn, draw_banks
from plot_ot.comparing.quick import QUICK, quick_verdict
from plot_ot.comparing.regions import Region, find_region
from plot_ot.comparing.rivals import Field, Rival, gather
from plot_ot.comparing.standings import Comparison, Stand, Standing
from plot_ot.comparing.swaps import Resampled, Scored, all_else, linear, predicted, sets_of, unmentioned_pairs
from plot_ot.comparing.telling import telling
from plot_ot.edits import respond
from plot_ot.engine.watching import announce
from plot_ot.errors import CouplingWarning, PlotError
from plot_ot.handles import Handle
from plot_ot.judging import gates as g
from plot_ot.judging.intervals import Interval
from plot_ot.judging.judges import Judge
from plot_ot.judging.status import Status
from plot_ot.judging.verdict import Verdict
from plot_ot.localizing import Question, chosen_filter, filters_of, often_said, prompt_notes, size_or
from plot_ot.methods import Method
from plot_ot.models.named import LanguageModel
from plot_ot.signatures import Readout, SignatureSpec, as_readout
from plot_ot.stages.problem import Problem
from plot_ot.studies.running import check_seed
from plot_ot.studies.showing import shown
from plot_ot.subjects import BankRecording, Recording, Subject, record, record_pairs
from plot_ot.subjects.threads import enough_threads

BEHIND = 0.15
"""A hypothesis is left after a quick look when its weakest variable is so far behind the leader's, on calibration."""
JUDGED = 2
"""Steps of a finalist besides the stages of the method: its beginning, and the controls."""
FINALISTS = 2
"""How many hypotheses are searched for by the whole method, unless told otherwise."""


def compare(
    subject: Network,
    hypotheses: Sequence[CausalModel | Hypothesis] | Mapping[str, CausalModel | Hypothesis],
    inputs: Any,
    *,
    method: str | Method = "plot",
    readout: str | Readout | None = None,
    size: int | None = None,
    filter: Literal["vocabulary", "candidates", "none"] | None = None,
    hold_out: str | Sequence[str] | None = None,
    seed: int = 0,
    finalists: int | None = FINALISTS,
    progress: bool = True,
    **options: Any,
) -> Comparison:
    """Which of several hypotheses does the network implement? "None of them" is an answer.

    The hypotheses (a list, or a dict by name) have the same inputs and answers, and `inputs` are inputs alone, as
    `localize` takes them. They are recorded once and split once: half to fit, a quarter to calibrate, a quarter to
    test. Every hypothesis gets a quick search by closed forms. The best `finalists` of them (None: all) that are not
    far behind get the whole `method` and all controls of a verdict. Then every hypothesis predicts what swaps of one or
    several of its variables do, on the same held-out pairs, and its handles are to make that come true. A hypothesis
    holds when all its variables are placed and at least 80 % of its predictions come true, beyond doubt. Only the whole
    search says that one fails; what a quick look does not find is left behind. Banks have `size` pairs.

    `filter` and `hold_out` are those of `localize`: an input counts for a hypothesis where the network answers it so,
    as its own next token (`vocabulary`, the default of a language model) or among the `candidates`, or always (`none`);
    values of the inputs that `hold_out` names stand in one split only. For a `LanguageModel`, `options` choose the
    places: layers, kinds, memory. Terminals and notebooks show the step it is at, unless `progress` is False;
    `plot_ot.plan_comparison` estimates the cost.
    """
    begun = time.perf_counter()
    if finalists is not None and finalists < 1:
        raise PlotError(f"`finalists` must be at least 1, or None for all; found {finalists}.")
    field, question = asked(subject, hypotheses, inputs, method, readout, filter, hold_out, seed, options)
    searched = max((about(question, r).method for r in field.rivals), key=lambda m: m.steps)
    most = len(field.rivals) if finalists is None else min(finalists, len(field.rivals))
    steps = 1 + len(field.rivals) * (1 + QUICK.steps) + most * (searched.steps + JUDGED)
    with warnings.catch_warnings(), shown(progress, steps), enough_threads(question.subject):
        warnings.simplefilter("ignore", CouplingWarning)  # of hypotheses that are not there
        announce(f"recording {len(field.rows)} inputs")
        return Contest.of(question, field, pairs_of(question.subject, size)).run(finalists, begun)


def asked(
    network: Network,
    hypotheses: Sequence[CausalModel | Hypothesis] | Mapping[str, CausalModel | Hypothesis],
    inputs: Any,
    method: str | Method,
    readout: str | Readout | None,
    filter: str | None,
    hold_out: str | Sequence[str] | None,
    seed: int,
    options: Mapping[str, Any],
) -> tuple[Field, Question]:
    """The rivals, and the question about the first of them: where in the network are its variables?"""
    subject = as_subject(network)
    tokenizer = subject.tokenizer if isinstance(subject, LanguageModel) else None
    field = gather(hypotheses, inputs)
    first = field.rivals[0].hypothesis
    held = HoldOut.by(first, hold_out)
    bound, notes = _bound(subject, first, options)
    look = as_readout(readout or ("logits" if bound.language else "softmax"))
    spec = SignatureSpec(normalise="unit", centre=True) if bound.language else SignatureSpec()
    question = Question(
        bound,
        first,
        method,
        look,
        spec,
        type(bound).__name__,
        check_seed(seed),
        tokenizer=tokenizer,
        filter=chosen_filter(filter, tokenizer, look),
        hold_out=held,
        notes=notes,
    )
    return field.accepting(look.accepts), question


def _bound(
    subject: Subject | LanguageModel, first: CausalModel | Hypothesis, options: Mapping[str, Any]
) -> tuple[Subject, tuple[str, ...]]:
    """The network as a subject, and what was decided about prompts; a language model is looked at through these."""
    if isinstance(subject, Subject):
        if options:
            name = next(iter(options))
            raise PlotError(
                f"compare takes no option '{name}' here (for language models it takes layers, kinds and memory)."
            )
        return subject, ()
    if not isinstance(first, Hypothesis):
        raise PlotError("A language model needs hypotheses with a template and answers, not bare CausalModels.")
    named = first.named_tokens(subject.tokenizer)
    return bind(subject, first, named, **options), prompt_notes(first, named)


def about(question: Question, rival: Rival) -> Question:
    """The same question about another rival's variables."""
    return replace(question, hypothesis=rival.causal)


def pairs_of(subject: Subject, size: int | None) -> int:
    """Pairs per bank."""
    return size_or(200 if subject.language else 400, size)


@dataclass(frozen=True)
class Entrant:
    """A rival whose variables can be searched for: its banks over the one recording."""

    rival: Rival
    problem: Problem
    tests: Mapping[tuple[str, str], BankRecording]
    test: BankRecording


@dataclass(frozen=True)
class Contest:
    """Rivals on one recording, with the inputs split once for all."""

    question: Question
    field: Field
    size: int
    recording: Recording
    """Row k of the field's inputs is base and source of pair k."""
    agrees: Mapping[str, Bool[Tensor, " rows"]]
    """By rival: which inputs it answers as the network does."""
    counts: Counts
    """By rival: which inputs count, by the filter."""
    drawn: Drawn

    @classmethod
    def of(cls, question: Question, field: Field, size: int) -> Contest:
        """Record all inputs, once, and draw every rival's banks."""
        rows = field.rows
        if len(rows) < LEAST_ROWS:
            raise PlotError(f"There are {len(rows)} distinct inputs; at least {LEAST_ROWS} are needed to compare on.")
        [recording] = record_pairs(question.subject, (rows, rows))
        store, order = recording.store, recording.base_rows.cpu()
        agrees = {r.name: question.answered(store, r.causal.answer(store.inputs))[order] for r in field.rivals}
        unasked = question.filter == "none"
        counts = {name: torch.ones_like(right) if unasked else right for name, right in agrees.items()}
        drawn = draw_banks(field, counts, size, question.seed, question.hold_out)
        return cls(question, field, size, recording, agrees, counts, drawn)

    @property
    def subject(self) -> Subject:
        """The network."""
        return self.question.subject

    @property
    def readout(self) -> Readout:
        """How its outputs are looked at."""
        return self.question.readout

    @property
    def seed(self) -> int:
        """The seed of all that is drawn."""
        return self.question.seed

    def run(self, finalists: int | None, begun: float) -> Comparison:
        """Search, judge, predict, rank."""
        entrants, standings = [], []
        for rival in self.field.rivals:
            entrant = self._entrant(rival)
            share = float(self.agrees[rival.name].double().mean())
            if isinstance(entrant, str):
                standings.append(Standing(rival.name, Stand.FAILS, entrant, share))
            else:
                entrants.append(entrant)
        quick = {}
        for e in entrants:
            announce(f"a quick look at {e.rival.name}")
            quick[e.rival.name] = QUICK.run(e.problem)[0]
        weakest = {n: min(h.chosen["calibration_score"] for h in s.handles.values()) for n, s in quick.items()}
        chosen = finalists_of(weakest, finalists)
        common, scored = self._common(entrants), {}
        for entrant in entrants:
            name = entrant.rival.name
            if name in chosen:
                announce(f"the whole search for {name}")
                handles, verdicts = self._searched(entrant)
            else:
                handles = dict(quick[name].handles)
                verdicts = {v: quick_verdict(h, entrant.tests, self.readout) for v, h in handles.items()}
            explained = faithful = None
            if all(map(linear, handles.values())):
                scored[name] = self._predictions(entrant.rival, handles, *common)
                explained, faithful = common_share(scored[name], common[0]), self._faithful(entrant, handles)
            stand, why = standing_of(verdicts, explained, whole=name in chosen)
            share = float(self.agrees[name].double().mean())
            searched = "full" if name in chosen else "quick"
            standings.append(Standing(name, stand, why, share, verdicts, handles, explained, faithful, searched))
        standings.sort(key=lambda s: (s.stand is not Stand.HOLDS, -(s.explained.value if s.explained else -1)))
        differences = self._differences(standings, scored, common[0])
        first, *rest = standings
        level = [
            s
            for s in rest
            if not {first.stand, s.stand} & {Stand.FAILS, Stand.BEHIND} and differences[first.name, s.name].low <= 0
        ]
        tied = [s.name for s in level if first.stand is Stand.HOLDS and s.stand is Stand.HOLDS]
        by_name = {r.name: r for r in self.field.rivals}
        tells = [telling(self.field, by_name[first.name], by_name[s.name], self.seed) for s in level]
        region = next((self._region(e, first.handles) for e in entrants if e.rival.name == first.name), None)
        left = [s.name for s in standings if s.searched == "quick"]
        only = f"the whole method did not search for {', '.join(left)}, only a quick look (finalists=None: all)"
        notes = [only] if left else []
        held = self.question.hold_out
        return Comparison(
            tuple(standings),
            differences,
            tuple(tied),
            tuple(tells),
            region,
            len(self.field.rows),
            time.perf_counter() - begun,
            [*self._notes(), *notes],
            self.question.filter,
            held.names if held else (),
        )

    def _notes(self) -> list[str]:
        """What was decided about the inputs, in words."""
        asked, q = FILTERS[self.question.filter], self.question
        notes = [*q.notes, f"which inputs count for a hypothesis (filter '{q.filter}'): {asked}"]
        if not any(int(counted.sum()) >= LEAST_ROWS for counted in self.counts.values()) and q.tokenizer is not None:
            spoken = Counter(q.tokenizer.decode([t]) for t in self.recording.store.top_token.tolist())  # type: ignore[attr-defined]
            others = [f"filter='{n}' ({FILTERS[n]})" for n in filters_of(q.tokenizer, q.readout) if n != q.filter]
            notes.append(f"{often_said(spoken)} To ask less: {' or '.join(others)}")
        return [*notes, *([self.drawn.note] if self.drawn.note else [])]

    # -- a rival's banks ---------------------------------------------------------------------------------

    def _entrant(self, rival: Rival) -> Entrant | str:
        """The rival with its banks, or why it cannot be searched for."""
        banks = self.drawn.banks[rival.name]
        if isinstance(banks, str):
            return banks
        fit, calibration, test = map(self._recorded, (banks.splits.fit, banks.splits.calibration, banks.test))
        tests = {key: self._recorded(bank) for key, bank in banks.splits.test.items()}
        problem = Problem(self.subject, fit, calibration, rival.causal.variables, self.readout, self.seed)
        return Entrant(rival, problem, tests, test)

    def _rows(self, rival: Rival, part: int) -> Int[Tensor, "some inputs"]:
        """The inputs of a part that count for a rival."""
        return self.field.rows[self.counts[rival.name] & (self.drawn.part == part)]

    @cached_property
    def _place_of(self) -> dict[tuple[int, ...], int]:
        return {tuple(row): k for k, row in enumerate(self.field.rows.tolist())}

    def _index(self, rows: Int[Tensor, "pairs inputs"]) -> Int[Tensor, " pairs"]:
        """Where given rows stand in the recording."""
        at = torch.tensor([self._place_of[tuple(row)] for row in rows.tolist()], dtype=torch.long)
        return self.recording.base_rows[at.to(self.recording.base_rows.device)]

    def _pairs(self, base: Tensor, source: Tensor) -> Recording:
        return Recording(self.subject, self.recording.store, self._index(base), self._index(source))

    def _recorded(self, bank: Bank) -> BankRecording:
        pairs = self._pairs(bank.base, bank.source)
        return BankRecording(self.subject, pairs.store, pairs.base_rows, pairs.source_rows, bank)

    # -- the search --------------------------------------------------------------------------------------

    def _searched(self, entrant: Entrant) -> tuple[dict[str, Handle], dict[str, Verdict]]:
        """The handles and verdicts of the whole method, as `localize` finds them."""
        question = about(self.question, entrant.rival)
        state, _ = question.method.run(entrant.problem)
        announce(f"controls for {entrant.rival.name}")
        judge = Judge(entrant.problem, entrant.tests, lambda subject, banks: record(subject, *banks))
        found = judge.verdicts(question.method, state, question.at_random)
        return dict(state.handles), {v.variable: v for v in found}

    # -- predictions -------------------------------------------------------------------------------------

    def _common(self, entrants: Sequence[Entrant]) -> tuple[Recording, Tensor, Tensor]:
        """Held-out pairs that all rivals predict: an equal share of those drawn for each."""
        each = max(1, 2 * self.size // max(1, len(entrants)))
        base = torch.cat([e.test.bank.base[:each] for e in entrants]) if entrants else self.field.rows[:1]
        source = torch.cat([e.test.bank.source[:each] for e in entrants]) if entrants else self.field.rows[:1]
        return self._pairs(base, source), base, source

    def _predictions(
        self, rival: Rival, handles: Mapping[str, Handle], pairs: Recording, base: Tensor, source: Tensor
    ) -> Scored:
        sets = sets_of(rival.causal.variables, torch.Generator().manual_seed(self.seed))
        return predicted(pairs, base, source, rival.causal, handles, sets, self.readout)

    def _differences(
        self, standings: Sequence[Standing], scored: Mapping[str, Scored], pairs: Recording
    ) -> dict[tuple[str, str], Interval]:
        drawn = Resampled(pairs.base_rows)
        names = [s.name for s in standings if s.name in scored]
        found = {n: drawn.share(scored[n]) for n in names}
        return {
            (a, b): Interval.of(found[a][0].value - found[b][0].value, found[a][1] - found[b][1], drawn.bases)
            for k, a in enumerate(names)
            for b in names[k + 1 :]
        }

    def _faithful(self, entrant: Entrant, handles: Mapping[str, Handle]) -> Interval | None:
        """How often all that is not mentioned can be swapped without harm, over all variables."""
        causal, rows = entrant.rival.causal, self._rows(entrant.rival, 2)
        kept, bases = [], []
        for v, handle in handles.items():
            generator = torch.Generator().manual_seed(self.seed)
            base, source = unmentioned_pairs(causal, rows, v, max(20, self.size // 2), generator)
            if not len(base):
                continue
            pairs = self._pairs(rows[base], rows[source])
            outputs = respond(pairs, all_else(handle))
            kept.append(self.readout.correct(outputs, causal.answer(rows[base]).to(outputs.device))[0].cpu())
            bases.append(base)
        if not kept:
            return None
        drawn = Resampled(torch.cat(bases))
        flat = torch.cat(kept).unsqueeze(0)
        nothing = torch.zeros_like(flat)
        return drawn.share(Scored((tuple(handles),), flat, nothing, nothing))[0]

    # -- where it fails ----------------------------------------------------------------------------------

    def _region(self, entrant: Entrant, handles: Mapping[str, Handle]) -> Region | None:
        """A rule for the base inputs on which the rival's telling predictions do not come true."""
        if not all(map(linear, handles.values())):
            return None
        try:
            (base, wrong), (test_base, test_wrong) = (self._failures(entrant, handles, part) for part in (1, 2))
        except PlotError:  # too few inputs to draw pairs from
            return None
        if not len(base) or not len(test_base):
            return None
        group = torch.unique(test_base, dim=0, return_inverse=True)[1].numpy()
        held_out = self._columns(entrant.rival, test_base), test_wrong, group
        return find_region(
            self._columns(entrant.rival, base), wrong, held_out, self._columns(entrant.rival, self.field.rows)
        )

    def _failures(self, entrant: Entrant, handles: Mapping[str, Handle], part: int) -> tuple[Tensor, np.ndarray]:
        """Base inputs of predictions that something changes, among fresh pairs of a part, and which were wrong."""
        rival, generator = entrant.rival, torch.Generator().manual_seed(self.seed + 1)
        bank = balanced_bank(rival.causal, self._rows(rival, part), SPLITS[part], 3 * self.size, generator)
        pairs = self._pairs(bank.base, bank.source)
        scored = self._predictions(rival, handles, pairs, bank.base, bank.source)
        base = bank.base.unsqueeze(0).expand(len(scored.sets), -1, -1)[scored.moved]
        return base, (~scored.right[scored.moved]).double().numpy()

    def _columns(self, rival: Rival, rows: Tensor) -> dict[str, list[Any]]:
        """Inputs and variables of rows, in plain values."""
        values = rival.causal.run(rows)
        columns = {name: self.field.shown(name, values[name]) for name in self.field.inputs}
        return columns | {v: rival.shown(v, values[v]) for v in rival.causal.variables}


def finalists_of(weakest: Mapping[str, float], most: int | None) -> set[str]:
    """Who is searched for by the whole method: the best few that are not far behind, and all that already do well."""
    if most is None or not weakest:
        return set(weakest)
    close = sorted((n for n in weakest if weakest[n] >= max(weakest.values()) - BEHIND), key=lambda n: -weakest[n])
    return {*close[:most], *(n for n in close if weakest[n] >= g.KEEPS)}


def common_share(scored: Scored, pairs: Recording) -> Interval:
    """The share of predictions that came true."""
    return Resampled(pairs.base_rows).share(scored)[0]


def standing_of(verdicts: Mapping[str, Verdict], explained: Interval | None, whole: bool = True) -> tuple[Stand, str]:
    """Whether a hypothesis holds, by its verdicts and its predictions; and what stands against it.

    Only the whole search says that one fails: what a quick look does not find may be there.
    """
    lost = [v for v in verdicts.values() if v.status in (Status.ABSENT, Status.IN_PART)]
    against, by = (Stand.FAILS, "") if whole else (Stand.BEHIND, " by a quick look")
    if lost:
        return against, ", ".join(f"{v.variable} {v.status}" for v in lost) + by
    unused = [v.variable for v in verdicts.values() if v.status is Status.DECODABLE]
    if unused:  # it may be used where nothing looked
        return Stand.UNDECIDED, f"{', '.join(unused)} decodable where found, not used there"
    if explained is not None and explained.high < g.WORKS:
        return against, f"its variables are there, but joint swaps come true on {explained.value:.0%} only{by}"
    if all(v.status is Status.OUTPUT for v in verdicts.values()):
        return Stand.UNDECIDED, "none of its variables can be told from the output with these inputs"
    open_ones = [v.variable for v in verdicts.values() if v.status is Status.UNDECIDED]
    if open_ones:
        return Stand.UNDECIDED, f"{', '.join(open_ones)} undecided"
    if explained is None or explained.low < g.WORKS:
        return Stand.UNDECIDED, "whether its joint swaps come true is open"
    return Stand.HOLDS, ""
