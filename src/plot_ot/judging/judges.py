"""The judge of one seed: puts a method's handles before the gates, and finds the controls that need a search."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

import torch

from plot_ot.abstract.banks import Bank
from plot_ot.engine.watching import announce, watched_by
from plot_ot.errors import unknown
from plot_ot.handles import Handle
from plot_ot.judging.bench import Bench
from plot_ot.judging.controls import Score, score, with_shuffled_values
from plot_ot.judging.notes import notes_on, unread, untried
from plot_ot.judging.status import Status
from plot_ot.judging.verdict import Case, Opponents, Verdict, stand
from plot_ot.methods import Method
from plot_ot.stages.problem import Problem, State
from plot_ot.subjects import BankRecording, Place, Subject

CONTROLS = ("standard", "full")
"""`standard`: random handles and shuffled values. `full`: also a re-initialised network, which is recorded anew."""

ANSWERS = ("any", "yes or no", "yes")
"""Which answers end the looking: `any`, whatever it is (the last look); a yes or a no; or a yes alone, of which a no
must be said again. Controls that could not lead to such an answer are not asked."""

Tests = Mapping[tuple[str, str], BankRecording]
Record = Callable[[Subject, Sequence[Bank]], Sequence[BankRecording]]


def check_controls(name: str) -> None:
    """Refuse a choice of controls that is not known."""
    if name not in CONTROLS:
        unknown("choice of controls", name, CONTROLS)


@dataclass
class RandomHandles:
    """Random handles by variable, as many as were asked for so far, and the banks they are found on."""

    found: dict[str, list[Handle]] = field(default_factory=dict)
    banks: tuple[Bank, Bank] | None = None
    """For fitting and calibration; None until a study has found any."""

    def only(self, variable: str) -> RandomHandles:
        """Those of one variable; more of them are found for it alone."""
        return RandomHandles({variable: self.found.setdefault(variable, [])}, self.banks)


@dataclass(frozen=True)
class Sparing:
    """What is spared where a question is asked several times, with more and more pairs (`early`)."""

    answers: str = "any"
    """Which answers end the looking (`ANSWERS`)."""
    sampled: bool = False
    """Whether controls are asked about a sample of the pairs first (`judging.samples`)."""
    random: RandomHandles = field(default_factory=RandomHandles)
    """Random handles that are known already; the judge adds those it finds."""


@dataclass
class Judge:
    """Judges the handles of methods on one problem; controls that methods share are found once."""

    problem: Problem
    tests: Tests
    record: Record
    """Records banks on another network of the same shape, for the re-initialised control."""
    controls: str = "standard"
    seconds: float = 0.0
    """What the controls took so far."""
    capacity: dict[str, Mapping[int, float]] = field(default_factory=dict)
    """By variable: what the last method reached on shuffled values with each number of directions (calibration)."""
    sparing: Sparing = field(default_factory=Sparing)
    random_problem: Problem | None = None
    """The problem that random handles are found on, where it is another one."""
    _stands: dict[str, Verdict | Bench] = field(default_factory=dict)
    _fresh: tuple[Problem, Tests] | None = None

    def __post_init__(self) -> None:
        check_controls(self.controls)

    def verdicts(self, method: Method, state: State, random_method: Callable[[int], Method]) -> list[Verdict]:
        """The verdict on every variable's handle that a method ended with."""
        start, handles = time.perf_counter(), state.handles
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # couplings of controls may well mean nothing
            cases = {v: self._case(h) for v, h in handles.items()}
            spared = {v for v, case in cases.items() if self._spares(case)}
            open_ones = {v: h for v, h in handles.items() if cases[v].open and v not in spared}
            self.capacity = {}
            shuffled = self._shuffled(method, open_ones)
            fresh = self._reinitialised(method, open_ones) if self.controls == "full" else {}
            found = [
                case.verdict(
                    Opponents(
                        None if v in spared else partial(self._random_handle, random_method, v),
                        shuffled.get(v, ()),
                        fresh.get(v, ()),
                    )
                )
                for v, case in cases.items()
            ]
            found = [self._with_notes(v, state) for v in found]
        self.seconds += time.perf_counter() - start
        return found

    def _case(self, handle: Handle) -> Case:
        generator = torch.Generator().manual_seed(self.problem.seed)
        return Case.of(handle, self._stand(handle.variable), self.problem.fit, self.problem.calibration, generator)

    def _spares(self, case: Case) -> bool:
        """Whether the controls that need a search are not asked, since no answer that counts can come of them."""
        answers = self.sparing.answers
        if answers == "any" or case.plain is None:
            return False
        return case.waits or (answers == "yes" and not case.open)

    def _with_notes(self, verdict: Verdict, state: State) -> Verdict:
        handle, v = state.handles[verdict.variable], verdict.variable
        notes = [] if verdict.status.found else untried(handle)
        if verdict.status is Status.ABSENT:
            notes += unread(verdict.accuracy, self.problem)
        if verdict.status not in (Status.OUTPUT, Status.ABSENT):
            notes += notes_on(handle, state, self.problem, self.tests[v, "sensitivity"])
        return verdict.with_notes(notes)

    def _random_handle(self, random_method: Callable[[int], Method], variable: str, k: int) -> Handle:
        found = self.sparing.random.found
        if not found.get(variable):
            announce("random handles")
        while len(found.get(variable, ())) <= k:
            with watched_by(None):
                state = random_method(len(found.get(variable, ()))).run(self._judged_problem)[0]
            for v, handle in state.handles.items():
                found.setdefault(v, []).append(handle)
        return found[variable][k]

    @cached_property
    def _judged_problem(self) -> Problem:
        """The problem of finding the variables of which pairs alone do not give the verdict."""
        judged = [v for v in self.problem.variables if isinstance(self._stand(v), Bench)]
        return (self.random_problem or self.problem).only(judged)

    def _stand(self, variable: str) -> Verdict | Bench:
        """What the handles of all methods stand before."""
        if variable not in self._stands:
            changed, kept = self.tests[variable, "sensitivity"], self.tests[variable, "invariance"]
            calibration, readout = self.problem.calibration, self.problem.readout
            self._stands[variable] = stand(variable, changed, kept, calibration, readout, self.sparing.sampled)
        return self._stands[variable]

    def _shuffled(self, method: Method, handles: Mapping[str, Handle]) -> dict[str, list[Score]]:
        """What the method reaches at its handles' places when the values of all variables mean nothing."""
        if not handles:
            return {}
        generator = torch.Generator().manual_seed(7_368_787 + self.problem.seed)
        recordings = with_shuffled_values([self.problem.fit, self.problem.calibration, *self.tests.values()], generator)
        fit, calibration, *tests = recordings
        if any(not bool(calibration.bank.changed[v].any()) for v in handles):
            return {}  # too few inputs for any to change: the gates will say so
        problem = replace(self.problem, fit=fit, calibration=calibration)
        states = _searched(method, problem, handles)
        self.capacity = {v: scores for state in states for v, scores in state.capacity.items()}
        return _reached(states, problem, dict(zip(self.tests, tests, strict=True)))

    def _reinitialised(self, method: Method, handles: Mapping[str, Handle]) -> dict[str, list[Score]]:
        """What the method reaches in a network of the same shape with fresh weights."""
        if not handles:
            return {}
        if self._fresh is None:
            generator = torch.Generator().manual_seed(15_485_863 + self.problem.seed)
            subject = self.problem.subject.reinitialised(generator)
            banks = [self.problem.fit.bank, self.problem.calibration.bank, *(r.bank for r in self.tests.values())]
            fit, calibration, *tests = self.record(subject, banks)
            problem = replace(self.problem, subject=subject, fit=fit, calibration=calibration)
            self._fresh = problem, dict(zip(self.tests, tests, strict=True))
        problem, anew = self._fresh
        return _reached(_searched(method, problem, handles), problem, anew)


def _searched(method: Method, problem: Problem, handles: Mapping[str, Handle]) -> list[State]:
    """What a method finds on another problem, searched where it ended on the true one.

    Variables whose handles went the same way are searched for together, and only that way.
    """
    announce("controls")
    together: dict[str, dict[str, Handle]] = {}
    for v, h in handles.items():
        way = repr([h.chosen.get(fact) for fact in ("stage", "ways", "way_steps")])
        together.setdefault(way, {})[v] = h
    states = []
    with watched_by(None):
        for some in together.values():
            places: dict[str, tuple[Place, ...]] = {v: tuple(e.place for e in h.edits) for v, h in some.items()}
            state = method.retraced(some.values()).run(problem.only(some), places)[0]
            states.append(replace(state, handles={v: h for v, h in state.handles.items() if v in some}))
    return states


def _reached(states: Sequence[State], problem: Problem, tests: Tests) -> dict[str, list[Score]]:
    """The scores of the handles that were found on a problem."""
    reached = {}
    for v, handle in ((v, h) for state in states for v, h in state.handles.items()):
        scored = score([tests[v, "sensitivity"], tests[v, "invariance"]], handle, problem.readout)
        if scored is not None:
            reached[v] = [scored]
    return reached
