"""How a question about a network is asked, and how it is answered with banks of one size (`early`: of growing ones)."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from plot_ot.abstract.admission import FILTERS, Admission
from plot_ot.abstract.banks import Bank, Splits
from plot_ot.abstract.causal_model import CausalModel
from plot_ot.abstract.holding_out import HoldOut
from plot_ot.abstract.hypothesis import Hypothesis
from plot_ot.abstract.pairs import PairTable, read_pairs
from plot_ot.abstract.positions import NamedTokens
from plot_ot.abstract.splitting import SPLITS, Made, Pairs, from_inputs, from_pairs
from plot_ot.engine import Engine
from plot_ot.engine.watching import announce
from plot_ot.errors import PlotError, unknown
from plot_ot.handles import Handle
from plot_ot.judging.judges import Sparing, check_controls
from plot_ot.judging.verdict import Verdict
from plot_ot.methods import Method, MethodKind, layered, progressive, random_like, random_progressive
from plot_ot.result import Result
from plot_ot.signatures import Readout, SignatureSpec
from plot_ot.stages.choose import TrainDas
from plot_ot.studies.identity import method_digest, unit_of
from plot_ot.studies.prepared import Prepared, Wording
from plot_ot.studies.showing import shown
from plot_ot.studies.study import Recorder, Study
from plot_ot.subjects import BankRecording, Place, Store, Subject
from plot_ot.subjects.decoder.subject import DecoderSubject
from plot_ot.subjects.protocol import require_finite

METHODS = ("plot", "plot-das", "plot-layered", "das")
OTHER_STEPS = 5
"""Steps besides the stages of a method: the network's answers, recording, tests, random handles."""
Given = Splits | Pairs | Int[Tensor, "rows inputs"]
"""What a user brings: banks, pairs or input rows."""


@dataclass(frozen=True)
class Question:
    """Where in this network do the variables of this hypothesis live? And how that is to be found out."""

    subject: Subject
    hypothesis: CausalModel | Hypothesis
    asked: str | Method
    readout: Readout
    spec: SignatureSpec
    name: str
    """What the network is called."""
    seed: int = 0
    controls: str = "standard"
    engine: Engine | None = None
    tokenizer: Any = None
    """Where the network answers in words: its answer is then its next token, of the whole vocabulary."""
    sources: Mapping[str, str] = field(default_factory=dict)
    filter: str = "candidates"
    """What an input must pass to count; see `abstract.admission.FILTERS`."""
    hold_out: HoldOut | None = None
    notes: tuple[str, ...] = ()
    """What was decided about prompts and positions before any of them ran."""

    def __post_init__(self) -> None:
        check_controls(self.controls)
        if not isinstance(self.hypothesis, (CausalModel, Hypothesis)):
            found = self.hypothesis.__name__ if isinstance(self.hypothesis, type) else type(self.hypothesis).__name__
            made = ", a class: make one of it" if isinstance(self.hypothesis, type) else ""
            raise PlotError(f"A hypothesis is a plot_ot.CausalModel or a plot_ot.Hypothesis; found {found}{made}.")
        if not self.causal.variables:
            raise PlotError("The hypothesis has no variable to look for: give at least one besides its output.")
        _ = self.method  # a name that is not known is refused before anything runs
        if self.readout.numbers and isinstance(self.hypothesis, Hypothesis):
            raise PlotError(
                f"'{self.readout.name}' compares outputs with numbers, and the label of a Hypothesis says which of its "
                f"answers it is. Give nearest_value(h.answers) where these are numbers; or write a CausalModel that "
                f"answers in numbers, over the same input rows, for the subject that load_subject(model, hypothesis) "
                f"makes (docs/outputs.md)."
            )

    @property
    def causal(self) -> CausalModel:
        """The hypothesis as a causal model, which takes for right what the readout does."""
        causal = self.hypothesis.causal if isinstance(self.hypothesis, Hypothesis) else self.hypothesis
        return causal.accepting(self.readout.accepts)

    @property
    def task(self) -> str:
        """What the question is called in files."""
        return self.hypothesis.name if isinstance(self.hypothesis, Hypothesis) else "localize"

    @property
    def method(self) -> Method:
        """The method that was asked for, by name or as it is."""
        if isinstance(self.asked, Method):
            return self.asked
        if self.asked in ("plot", "plot-das"):
            variables = len(self.causal.variables)
            return progressive(self.subject.places, variables, self.spec, das=self.asked == "plot-das")
        if self.asked == "plot-layered":
            return layered()
        if self.asked == "das":
            return Method("das", "DAS at every place, every subspace size", (TrainDas(),), kind=MethodKind.DAS)
        unknown("method", self.asked, METHODS)

    def at_random(self, draw: int) -> Method:
        """The same search over a random ranking of sites."""
        if isinstance(self.asked, Method):
            return random_like(self.asked, draw, self.subject.places)
        return random_progressive(draw, self.subject.places)

    @property
    def wording(self) -> Wording | None:
        """Prompts and answers in words, of a language model."""
        if self.tokenizer is None or not isinstance(self.hypothesis, Hypothesis):
            return None
        assert isinstance(self.subject, DecoderSubject)  # noqa: S101
        render = partial(self.hypothesis.render, tokenizer=self.tokenizer)
        strict = self.subject.watching(rest=True) if self.readout.one_answer else self.subject
        return Wording(render, self.hypothesis.answers, strict)

    def run(self, rows: Int[Tensor, "rows inputs"]) -> Store:
        """Run inputs to see how they are answered; of a language model this is their recording."""
        if isinstance(self.subject, DecoderSubject):
            return self.subject.record(rows, remember=True)
        return self.subject.record(rows, torch.zeros(0, dtype=torch.long))

    def admission(self, run: Callable[[Tensor], Store]) -> Admission:
        """The filter, of inputs that are run by `run`."""
        spoken: Counter[str] = Counter()

        def right(rows: Int[Tensor, "rows inputs"]) -> Bool[Tensor, " rows"]:
            labels = self.causal.answer(rows)  # rows that do not fit the hypothesis are refused before any runs
            store = run(rows)
            if self.tokenizer is not None:
                tokens = store.top_token.tolist()  # type: ignore[attr-defined]
                spoken.update(self.tokenizer.decode([t]) for t in tokens)
            found = self.answered(store, labels)
            self.readout.refuse_outside(labels, self.subject.outputs_of(store).shape[-1])
            return found

        return Admission(right, self.filter, filters_of(self.tokenizer, self.readout), heard=lambda: often_said(spoken))

    def answered(self, store: Store, labels: Tensor) -> Bool[Tensor, " rows"]:
        """Which recorded inputs are answered by these labels."""
        outputs = self.subject.outputs_of(store)
        if not bool(outputs.isfinite().all()):
            require_finite(store)
        self.readout.refuse_others(labels, outputs.shape[-1])
        if self.filter == "vocabulary" and isinstance(self.hypothesis, Hypothesis):
            said: Tensor = self.hypothesis.says(self.tokenizer, store.top_token.cpu(), labels)  # type: ignore[attr-defined]
            return said
        return self.readout.correct(outputs.unsqueeze(0), labels.to(outputs.device))[0].cpu()


def prompt_notes(hypothesis: Hypothesis, named: NamedTokens) -> tuple[str, ...]:
    """What is decided about prompts and positions before any of them runs, in words."""
    return *named.notes, *(["the tokenizer's chat template writes the prompts"] if hypothesis.has_chats else [])


def often_said(spoken: Counter[str]) -> str:
    """What a network says most often, in words; nothing where it does not speak."""
    often = ", ".join(f"{word!r} ({count} times)" for word, count in spoken.most_common(3))
    return f"Most often its next token is {often}." if often else ""


def filters_of(tokenizer: Any, readout: Readout | None = None) -> tuple[str, ...]:
    """The filters that a network can have: only one that answers in words has a vocabulary, and says one word of it."""
    spoken = tokenizer is not None and (readout is None or readout.one_answer)
    return tuple(name for name in FILTERS if spoken or name != "vocabulary")


def chosen_filter(name: str | None, tokenizer: Any, readout: Readout | None = None) -> str:
    """The filter that was asked for, or the strictest that the network can have."""
    known = filters_of(tokenizer, readout)
    if name is None:
        return known[0]
    if name == "vocabulary" and name not in known and tokenizer is not None and readout is not None:
        raise PlotError(
            f"filter='vocabulary' asks for one right next token, and '{readout.name}' has no such thing: choose "
            f"'candidates' (right by the readout) or 'none'."
        )
    if name == "vocabulary" and name not in known:
        raise PlotError(
            "filter='vocabulary' asks for a language model's own next token: give the model itself (what "
            "`load_subject` makes without a hypothesis), or choose 'candidates' or 'none'."
        )
    if name not in known:
        unknown("filter", name, known)
    return name


def pairs_per_bank(budget: int | Literal["auto"] | None, size: int | None, usual: int) -> tuple[bool, int]:
    """Whether banks grow, and how many pairs each has, or has at most."""
    each = size_or(usual, size)
    if budget == "auto" or budget is None:
        return budget == "auto", each
    if isinstance(budget, bool) or not isinstance(budget, int) or budget < 1:
        raise PlotError(f"`budget` is 'auto', or a number of pairs per bank; found {budget!r}.")
    if size is not None and size != budget:
        raise PlotError(f"Give `budget` or `size`, not both: found {budget} and {size} pairs per bank.")
    return False, budget


def size_or(usual: int, size: int | None) -> int:
    """Pairs per bank as they were asked for, or the usual number."""
    if size is None:
        return usual
    if isinstance(size, bool) or not isinstance(size, int) or size < 2:
        raise PlotError(f"`size` is a number of pairs per bank, 2 or more; found {size!r}.")
    return size


def as_rows(given: Any) -> Any:
    """An array of numbers as a tensor; anything else as it is."""
    numeric = isinstance(given, np.ndarray) and given.dtype.kind in "biuf"
    return torch.from_numpy(given) if numeric else given


def usual_size(subject: Subject) -> int:
    """Pairs per bank, unless told otherwise."""
    return 200 if subject.language else 1000


def read_given(hypothesis: CausalModel | Hypothesis, pairs: Any) -> Given:
    """Banks, pairs or input rows, from all that a user may bring."""
    if isinstance(pairs, tuple) and any(isinstance(p, np.ndarray) for p in pairs):
        pairs = tuple(map(as_rows, pairs))
    pairs = as_rows(pairs)
    if isinstance(pairs, Tensor) and pairs.ndim < 2:
        raise PlotError(f"Inputs are rows, a tensor of shape [rows, inputs]; found shape {tuple(pairs.shape)}.")
    if isinstance(pairs, (Splits, Pairs, Tensor)):
        return pairs
    if isinstance(pairs, Bank):
        families = [pairs.families[f] for f in pairs.family.tolist()]
        return Pairs(pairs.base, pairs.source, families)
    if isinstance(pairs, tuple) and len(pairs) == 2 and all(isinstance(p, Tensor) for p in pairs):
        return Pairs(*pairs)
    if not isinstance(hypothesis, Hypothesis):
        raise PlotError(
            f"A CausalModel takes inputs as tensors or arrays of numbers: rows, or (base, source); found "
            f"{type(pairs).__name__}. Write the hypothesis as a Hypothesis to give dicts, files or tables."
        )
    table = pairs if isinstance(pairs, PairTable) else read_pairs(pairs)
    base, source = table.rows(hypothesis)
    return Pairs(base, source, table.family, table.split) if table.source else base


# -- banks of one size --------------------------------------------------------------------------------------------


def answer(
    question: Question, given: Given, size: int, waited: dict[str, float], begun: float, progress: bool
) -> Result:
    """The answer from banks of one size; what came before `begun` has been `waited` for already."""
    with shown(progress, question.method.steps + OTHER_STEPS):
        if not isinstance(given, Splits):
            announce("answers of the network")
        made = make_banks(question, given, size, question.admission(question.run))
        waited["filtering"] = time.perf_counter() - begun
        return judged(question, made, size, waited, begun)


def make_banks(question: Question, given: Given, size: int, admission: Admission) -> Made:
    """Banks of what a user brings: as they are, of the pairs that count, or drawn from the inputs that do."""
    generator = torch.Generator().manual_seed(question.seed)
    if isinstance(given, Splits):
        return as_given(given, question.hold_out)
    if isinstance(given, Pairs):
        return from_pairs(question.causal, given, admission, generator, question.hold_out)
    return from_inputs(question.causal, given, admission, size, generator, question.hold_out)


def as_given(splits: Splits, hold_out: HoldOut | None) -> Made:
    """Banks of a user's own; refused where they share what is to be held out."""
    notes = ["the banks are as given"]
    if hold_out is not None:
        banks = [splits.fit], [splits.calibration], splits.test.values()
        rows = [torch.cat([side for b in some for side in (b.base, b.source)]) for some in banks]
        notes.append(hold_out.refuse_shared(dict(zip(SPLITS, rows, strict=True))))
    return Made(splits, tuple(notes))


@dataclass(frozen=True)
class Looked:
    """What a search looks for, how, and where."""

    method: Method
    variables: tuple[str, ...] | None = None
    """Some of the variables; None for all."""
    places: Mapping[str, tuple[Place, ...]] | None = None
    """The places open to each; None for all."""
    sparing: Sparing = field(default_factory=Sparing)


def judged(
    question: Question,
    made: Made,
    size: int,
    waited: dict[str, float],
    begun: float,
    recorder: Recorder | None = None,
    looked: Looked | None = None,
) -> Result:
    """Search, test and judge on these banks; `waited` already knows what was waited for since `begun`."""
    q, looked = question, looked or Looked(question.method)
    method = looked.method
    held = list(q.hold_out.names) if q.hold_out else []
    of_inputs = {"filter": q.filter if made.asked else "as given", "hold_out": held}
    notes = [*q.notes, *made.notes]
    prepared = Prepared(
        q.task,
        q.name,
        q.seed,
        q.subject,
        made.splits,
        q.readout,
        notes={**of_inputs, "right": made.right, "asked": made.asked, "inputs": notes},
        wording=q.wording,
        sources=q.sources,
        controls=q.controls,
    )
    study = Study(
        prepared,
        q.engine,
        recorder=recorder,
        variables=looked.variables,
        sparing=looked.sparing,
    )
    unit, found = study.run(method, q.at_random, looked.places)
    handles = {v: _settable(h, study.problem.fit, q.hypothesis) for v, h in found.items()}
    flags = sorted({f["kind"] for c in unit["couplings"] for f in c["flags"]})
    notes = [*notes, *([f"coupling warnings: {', '.join(flags)}"] if flags else [])]
    verdicts = {v["variable"]: Verdict.from_row(v) for v in unit.get("verdicts", [])}
    config = {"task": q.task, "subject": q.name, "methods": [method.name], "seeds": [q.seed], "size": size}
    # methods that differ in these are not one table
    config |= {"readout": q.readout.name, "controls": q.controls, **of_inputs}
    took = unit["runtimes"][0]
    waited |= {
        "recording": waited.get("recording", 0.0) + study.recording_seconds,
        "search": took["seconds"] - study.recording_seconds,
        "controls": took.get("controls", 0.0),
    }
    waited["tables"] = time.perf_counter() - begun - sum(s for part, s in waited.items() if part != "loading")
    took["waited"] = waited
    of = {**unit_of(prepared), "settings": method_digest(method)}
    config["identity"] = of["subject"]["identity"]
    return Result(
        handles, verdicts, unit["records"], sum(waited.values()), unit, study.control_unit(), config, of, notes
    )


def _settable(handle: Handle, fit: BankRecording, hypothesis: CausalModel | Hypothesis) -> Handle:
    """The handle with stand-ins for every value, under the names that the hypothesis gives them."""
    handle = handle.with_values(fit)
    if not isinstance(hypothesis, Hypothesis):
        return handle
    names = hypothesis.values(handle.variable)
    return replace(handle, values={names[code]: at for code, at in handle.values.items() if isinstance(code, int)})
