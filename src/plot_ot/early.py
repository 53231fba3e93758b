"""How a question about a network is answered early: banks grow, and each look asks only what is still open."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from plot_ot.abstract.banks import Splits
from plot_ot.abstract.growing import GrowingBanks
from plot_ot.abstract.splitting import Made
from plot_ot.engine import InProcess
from plot_ot.engine.growing import GrowingRecording
from plot_ot.engine.watching import announce, tell
from plot_ot.errors import PlotError
from plot_ot.files.writing import Json
from plot_ot.handles import Handle
from plot_ot.judging.intervals import missing_at_most
from plot_ot.judging.judges import Sparing
from plot_ot.judging.status import Status
from plot_ot.judging.verdict import Verdict
from plot_ot.localizing import OTHER_STEPS, Given, Looked, Question, judged
from plot_ot.result import Result
from plot_ot.studies.identity import method_digest
from plot_ot.studies.looks import Look, looks, settled, waits_for_pairs
from plot_ot.studies.showing import shown

OF_ALL_PLACES = ("couplings", "profile", "surfaces")
"""What only a search of all places tells."""


def answer_early(
    question: Question,
    given: Given,
    most: int,
    waited: Mapping[str, float],
    begun: float,
    progress: bool | Callable[[Result], None],
) -> Result:
    """The answer from banks that grow, up to so many pairs, until every variable has its answer (`studies.looks`).

    `progress`, where it is a function, is given the result of every look that is not the last.
    """
    if not isinstance(given, Tensor):
        raise PlotError(
            "budget='auto' draws pairs itself, more of them from look to look: it needs inputs, and found "
            f"{'banks' if isinstance(given, Splits) else 'pairs'}. Give inputs, or leave the budget out."
        )
    if question.engine is not None and not isinstance(question.engine, InProcess):
        raise PlotError(
            "budget='auto' works in this process: what was recorded for one look is kept for the next. Leave out the "
            "engine, or give `budget` a number."
        )
    recording = GrowingRecording(question.subject, InProcess().crew(question.subject), len(given))
    generator = torch.Generator().manual_seed(question.seed)
    banks = GrowingBanks(question.causal, given, question.admission(recording.add), generator, question.hold_out)
    course = _Course(question, recording, question.causal.variables)
    with shown(bool(progress), question.method.steps + OTHER_STEPS):
        for look in looks(most):
            if banks.exhausted and not look.last:
                continue  # with no further inputs, all pairs are drawn from these at once
            announce(f"answers of the network, for {look.size} pairs")
            banks.grow(look.rows)
            try:
                splits = banks.draw(look.sizes)
            except PlotError:  # these inputs offer no pairs of some kind
                if look.last or banks.exhausted:
                    raise
                continue  # what it took is part of the next look
            waited = {**waited, "filtering": 0.0, "recording": time.perf_counter() - begun}
            course.take(look, Made(splits, banks.notes, *banks.pass_rate), waited, begun)
            waited, begun = {}, time.perf_counter()
            if look.last or not course.open:
                break
            tell(f"provisional, from {look.size} pairs: " + "; ".join(map(_short, course.verdicts)))
            if callable(progress):
                progress(course.result())
    return course.result()


@dataclass
class _Course:
    """What was found look by look, and what is still open."""

    question: Question
    recording: GrowingRecording
    open: tuple[str, ...]
    """The variables that have no answer yet."""
    searches: list[Result] = field(default_factory=list)
    """In their order; each of the variables that were open."""
    said: dict[str, Status] = field(default_factory=dict)
    """By variable, what the last search of all places came to."""
    found: dict[str, tuple[Handle, Looked]] = field(default_factory=dict)
    """By variable, the handle that the last search of all places ended with, and that search."""

    def take(self, look: Look, made: Made, waited: dict[str, float], begun: float) -> None:
        """One look: where handles only wait for pairs at their places; else, or if that gives no answer, everywhere.

        A first look goes the cheap ways, a last one all ways.
        """
        closer = len(self.searches) > 0 and all(waits_for_pairs(self._last(v).verdicts[v]) for v in self.open)
        if closer:
            for variable in self.open:
                handle, looked = self.found[variable]
                places = {variable: tuple(e.place for e in handle.edits)}
                sparing = Sparing("yes", sampled=True, random=looked.sparing.random.only(variable))
                again = Looked(looked.method.retraced([handle]), (variable,), places, sparing)
                self._search(look, made, waited, begun, again)
                waited, begun = {}, time.perf_counter()
        if self.open and (look.last or not closer):
            method = self.question.method
            quick = not self.searches and not look.last
            sparing = Sparing(look.answers, sampled=True)
            everywhere = Looked(method.quick() if quick else method, self.open, sparing=sparing)
            self._search(look, made, waited, begun, everywhere)

    def _search(self, look: Look, made: Made, waited: dict[str, float], begun: float, looked: Looked) -> None:
        with missing_at_most(look.error):
            found = judged(self.question, made, look.size, waited, begun, self.recording.recordings, looked)
        statuses = {v: verdict.status for v, verdict in found.verdicts.items()}
        where = {"pairs": look.size, "error": look.error, "places": "all" if looked.places is None else "the last"}
        told = {v: str(status) for v, status in statuses.items()}
        found.unit["runtimes"][0]["looks"] = [{**where, "seconds": found.seconds, "verdicts": told}]
        self.searches.append(found)
        if looked.places is None:
            answered = {v for v, status in statuses.items() if settled(status, self.said.get(v))}
            self.said |= statuses
            self.found |= {v: (handle, looked) for v, handle in found.handles.items()}
        else:
            answered = {v for v, status in statuses.items() if settled(status, None)}
        self.open = tuple(v for v in self.open if v not in answered)

    def _last(self, variable: str, everywhere: bool = False) -> Result:
        """The last search for a variable, or the last one of all places."""
        return next(
            r
            for r in reversed(self.searches)
            if variable in r.handles and (not everywhere or r.looks[0]["places"] == "all")
        )

    @property
    def verdicts(self) -> Iterator[Verdict]:
        """The last verdict on every variable."""
        return (self._last(v).verdicts[v] for v in self.question.causal.variables)

    def result(self) -> Result:
        """Every variable as its last search left it, the maps of all places, and what all searches took."""
        variables, last = self.question.causal.variables, self.searches[-1]
        everywhere = [r for r in self.searches if r.looks[0]["places"] == "all"][-1]
        unit: Json = {}
        for part, rows in last.unit.items():
            whole = part in OF_ALL_PLACES
            if part == "couplings":
                unit[part] = everywhere.unit[part]
            elif part != "runtimes" and isinstance(rows, list):
                own = [(v, self._last(v, whole).unit.get(part, [])) for v in variables]
                unit[part] = [r for v, some in own for r in some if r.get("variable", r.get("handle")) == v]
        unit["runtimes"] = [self._took()]
        controls = {part: _of_each(part, variables, self._last) for part in last.controls}
        size_notes = [self._told(), *last.notes]
        return replace(
            last,
            handles={v: self._last(v).handles[v] for v in variables},
            verdicts={v: self._last(v).verdicts[v] for v in variables},
            records=unit["records"],
            unit=unit,
            controls=controls,
            seconds=sum(unit["runtimes"][0]["waited"].values()),
            of={**last.of, "settings": method_digest(self.question.method)},
            notes=size_notes,
        )

    def _took(self) -> Json:
        """What all searches took together."""
        each = [r.unit["runtimes"][0] for r in self.searches]
        added = {key: _added([one[key] for one in each]) for key in ("parts", "waited")}
        sums = {key: sum(one.get(key, 0.0) for one in each) for key in ("seconds", "controls")}
        return {**each[-1], **added, **sums, "looks": [look for one in each for look in one["looks"]]}

    def _told(self) -> str:
        taken = self._took()["looks"]
        sizes = list(dict.fromkeys(look["pairs"] for look in taken))
        looked = "one look" if len(sizes) == 1 else f"{len(sizes)} looks"
        return (
            f"{looked} with {', '.join(map(str, sizes))} pairs per bank, the last with "
            f"{1 - taken[-1]['error']:.2%} intervals"
        )


def _of_each(part: str, variables: Sequence[str], last: Callable[[str], Result]) -> list[Json]:
    """The rows of a part of the controls: of every variable from its last search, the others as they were last."""
    rows = [r for v in variables for r in last(v).controls[part] if r.get("variable") == v]
    return rows + [r for r in last(variables[-1]).controls[part] if "variable" not in r]


def _added(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for some in parts for name in some)
    return {name: sum(some.get(name, 0.0) for some in parts) for name in names}


def _short(verdict: Verdict) -> str:
    reached = "" if verdict.accuracy is None else f" ({verdict.accuracy:.2f})"
    return f"{verdict.variable} {verdict.status}{reached}"
