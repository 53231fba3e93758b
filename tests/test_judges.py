"""The judge of a seed: which controls it runs, where, how often, and what it makes of them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from plot_ot.abstract.banks import Bank, Power
from plot_ot.abstract.relabelling import Relabelled
from plot_ot.edits import Frame
from plot_ot.engine.watching import announce, watched_by
from plot_ot.errors import PlotError
from plot_ot.handles import Edit, Handle
from plot_ot.judging import judges
from plot_ot.judging.controls import Score
from plot_ot.judging.judges import ANSWERS, CONTROLS, Judge, RandomHandles, Sparing
from plot_ot.judging.status import Status
from plot_ot.judging.verdict import Verdict
from plot_ot.methods import Method
from plot_ot.signatures import as_readout
from plot_ot.stages.problem import Problem, State
from plot_ot.subjects import BankRecording, MLPSubject, Place, Subject, record
from truth.kinds import planted
from truth.known import Known, draw_splits
from truth.nulls import fresh

SHUFFLED, FRESH = "beats shuffled values", "beats a re-initialised network"


@dataclass
class Bench:
    """A planted network whose handles are known, recorded on banks that decide."""

    known: Known
    problem: Problem
    tests: dict[tuple[str, str], BankRecording]
    recorded: list[tuple[Subject, Sequence[Bank]]] = field(default_factory=list)
    """What the judge had recorded anew."""

    def record(self, subject: Subject, banks: Sequence[Bank]) -> Sequence[BankRecording]:
        self.recorded.append((subject, banks))
        return record(subject, *banks)

    def judge(self, **options: Any) -> Judge:
        self.recorded.clear()
        return Judge(self.problem, self.tests, self.record, **options)

    def idle(self, variable: str) -> Handle:
        """A handle that does nothing."""
        place = self.problem.subject.places[-1]
        edit = Edit(place, Frame.identity(place.width), torch.zeros(place.width))
        return Handle(variable, (edit,), self.problem.subject.identity())


@pytest.fixture(scope="module")
def bench() -> Bench:
    known = planted(1100)
    splits = draw_splits(known.causal, known.rows, 200, known.seed)
    fit, calibration, *tests = record(known.subject, splits.fit, splits.calibration, *splits.test.values())
    problem = Problem(known.subject, fit, calibration, ("p", "q"), as_readout("softmax"), seed=1100)
    return Bench(known, problem, dict(zip(splits.test, tests, strict=True)))


@dataclass
class Give:
    """A stage that finds the same handles in every problem, and remembers what it was shown."""

    handles: Mapping[str, Handle]
    seen: list[tuple[Problem, Mapping[str, tuple[Place, ...]]]] = field(default_factory=list)
    act: Callable[[], None] = lambda: None

    def __call__(self, problem: Problem, state: State) -> State:
        self.seen.append((problem, state.places))
        self.act()
        return replace(state, handles=dict(self.handles))


def given(bench: Bench, act: Callable[[], None] = lambda: None) -> tuple[Method, Give, State]:
    """A method that ends with the known handles; its stage; and the state it ended in."""
    stage = Give(bench.known.handles, act=act)
    return Method("given", "", (stage,)), stage, State({}, handles=bench.known.handles)


def doing_nothing(bench: Bench, asked: list[int] | None = None) -> Callable[[int], Method]:
    def method(k: int) -> Method:
        if asked is not None:
            asked.append(k)
        return Method("random", "", (Give({v: bench.idle(v) for v in "pq"}),))

    return method


def test_known_handles_are_placed_with_the_shuffled_control(bench):
    method, stage, state = given(bench)
    found = bench.judge().verdicts(method, state, doing_nothing(bench))
    assert [v.variable for v in found] == ["p", "q"]
    assert all(v.status.found for v in found)
    for verdict in found:
        assert verdict.gate(SHUFFLED).holds
        assert verdict.evidence["score"] == 1.0
        assert verdict.evidence["shuffled"] < 0.8
        assert FRESH not in [gate.name for gate in verdict.gates]
    assert bench.recorded == []
    # the search ran once more, on the same recorded runs with other values, at the handles' places alone
    [(problem, places)] = stage.seen
    assert places == {v: tuple(e.place for e in h.edits) for v, h in bench.known.handles.items()}
    assert problem.subject is bench.problem.subject
    assert problem.fit.store is bench.problem.fit.store
    assert isinstance(problem.fit.bank.causal, Relabelled)
    assert problem.calibration.bank.causal is problem.fit.bank.causal
    assert torch.equal(problem.calibration.bank.base, bench.problem.calibration.bank.base)
    assert (problem.seed, problem.variables, problem.score) == (1100, ("p", "q"), bench.problem.score)


def test_a_handle_that_any_relabelling_reaches_is_refused(bench, monkeypatch):
    method, _, state = given(bench)
    scored = []

    def reached(parts: Sequence[BankRecording], handle: Handle, readout: object) -> Score | None:
        scored.append((handle.variable, [r.bank for r in parts]))
        return Score(1.0, np.ones(1000), 400) if handle.variable == "p" else None

    monkeypatch.setattr(judges, "score", reached)
    p, q = bench.judge().verdicts(method, state, doing_nothing(bench))
    assert p.status is Status.ABSENT
    assert p.gate(SHUFFLED).fails
    assert "does not beat shuffled values" in p.sentence
    assert q.status.found  # nothing could be scored for it
    assert SHUFFLED not in [gate.name for gate in q.gates]
    for v, (sensitive, invariant) in scored:
        assert torch.equal(sensitive.base, bench.tests[v, "sensitivity"].bank.base)
        assert torch.equal(invariant.base, bench.tests[v, "invariance"].bank.base)
        assert isinstance(sensitive.causal, Relabelled)
        assert sensitive.causal is invariant.causal


def test_the_shuffled_control_depends_on_the_seed_alone(bench):
    values = []
    for seed in (1100, 1100, 1101):
        method, stage, state = given(bench)
        judge = replace(bench.judge(), problem=replace(bench.problem, seed=seed))
        judge.verdicts(method, state, doing_nothing(bench))
        values.append(stage.seen[0][0].fit.bank.labels["p"])
    assert torch.equal(values[0], values[1])
    assert not torch.equal(values[0], values[2])


def test_without_pairs_that_change_there_is_no_shuffled_control(bench):
    bank = bench.problem.calibration.bank
    same = Bank.from_pairs(bank.causal, bank.base[:3], bank.base[:3])
    [calibration] = record(bench.problem.subject, same)
    judge = replace(bench.judge(), problem=replace(bench.problem, calibration=calibration))
    method, stage, _ = given(bench)
    assert judge._shuffled(method, bench.known.handles) == {}
    assert stage.seen == []


def test_what_is_refused_or_said_beforehand_is_not_searched_for_again(bench, monkeypatch):
    """Only variables whose answer is open are searched for on shuffled values; the others stay beside them."""
    [edit] = bench.known.handles["q"].edits
    other = replace(bench.known.handles["q"], edits=(replace(edit, gains=0.01 * edit.gains),))  # does next to nothing
    handles = {"p": bench.known.handles["p"], "q": other}
    stage = Give(handles)
    method = Method("given", "", (stage,))
    p, q = bench.judge(controls="full").verdicts(method, State({}, handles=handles), doing_nothing(bench))
    assert p.gate(SHUFFLED).holds
    assert q.status is Status.ABSENT
    assert not {SHUFFLED, FRESH} & {gate.name for gate in q.gates}
    assert [(problem.variables, problem.beside) for problem, _ in stage.seen] == 2 * [(("p",), ("q",))]
    assert all(list(places) == ["p"] for _, places in stage.seen)
    # random handles are found for what is not said beforehand
    stand = judges.stand

    def output(variable: str, *of: Any) -> Any:
        return Verdict("q", Status.OUTPUT, "", {}) if variable == "q" else stand(variable, *of)

    monkeypatch.setattr(judges, "stand", output)
    asked = Give({v: bench.idle(v) for v in "pq"})
    bench.judge()._random_handle(lambda _: Method("random", "", (asked,)), "p", 0)
    assert [(problem.variables, problem.beside) for problem, _ in asked.seen] == [(("p",), ("q",))]


def test_handles_that_went_different_ways_are_searched_for_apart(bench):
    handles = {v: replace(h, chosen={"stage": 0, "ways": (k,)}) for k, (v, h) in enumerate(bench.known.handles.items())}
    stage = Give(handles)
    found = bench.judge().verdicts(Method("given", "", (stage,)), State({}, handles=handles), doing_nothing(bench))
    assert [problem.variables for problem, _ in stage.seen] == [("p",), ("q",)]
    assert all(v.gate(SHUFFLED).holds for v in found)


# -- which answers count ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("answers", ANSWERS)
def test_a_no_that_must_be_said_again_asks_no_random_handle(bench, answers):
    """Of two handles one is refused by its own gates; the other is placed, whatever answers count."""
    [edit] = bench.known.handles["q"].edits
    other = replace(bench.known.handles["q"], edits=(replace(edit, gains=0.01 * edit.gains),))
    handles = {"p": bench.known.handles["p"], "q": other}
    method = Method("given", "", (Give(handles),))
    judge = bench.judge(sparing=Sparing(answers))
    p, q = judge.verdicts(method, State({}, handles=handles), doing_nothing(bench))
    assert p.status.found
    assert q.status is Status.ABSENT
    assert ("random_mean" in q.evidence) == (answers != "yes")
    assert p.evidence["random_handles"] >= 5


@pytest.mark.parametrize("answers", ANSWERS)
def test_what_waits_for_pairs_asks_no_control_that_needs_a_search(bench, answers):
    few = bench.tests["q", "invariance"].select(torch.arange(15))  # too few to say that a handle leaves them alone
    bench = replace(bench, tests={**bench.tests, ("q", "invariance"): few})
    method, stage, state = given(bench)
    p, q = bench.judge(sparing=Sparing(answers)).verdicts(method, state, doing_nothing(bench))
    assert p.status.found
    assert ("random_mean" in q.evidence) == (SHUFFLED in [g.name for g in q.gates]) == (answers == "any")
    assert [problem.variables for problem, _ in stage.seen] == [("p", "q") if answers == "any" else ("p",)]


def test_random_handles_of_an_earlier_look_are_found_on_its_banks_and_kept(bench):
    """Those that were found jointly are used; more of them are looked for one variable alone."""
    other = bench.problem.calibration
    earlier = replace(bench.problem, fit=other, calibration=other)
    known = RandomHandles({"p": [bench.idle("p")]}, (other.bank, other.bank))
    stage = Give({v: bench.idle(v) for v in "pq"})
    asked: list[int] = []

    def at_random(k: int) -> Method:
        asked.append(k)
        return Method("random", "", (stage,))

    judge = bench.judge(sparing=Sparing(random=known), random_problem=earlier)
    assert judge._random_handle(at_random, "p", 0) is known.found["p"][0]
    assert asked == []
    alone = known.only("q")
    judge = bench.judge(sparing=Sparing(random=alone), random_problem=earlier.only("q"))
    judge.problem = bench.problem.only("q")
    judge._random_handle(at_random, "q", 1)
    assert asked == [0, 1]
    assert {id(problem.fit) for problem, _ in stage.seen} == {id(other)}
    assert [problem.variables for problem, _ in stage.seen] == 2 * [("q",)]
    assert len(known.found["q"]) == 2  # the next look has them


# -- a network with fresh weights -------------------------------------------------------------------------------------


def test_full_controls_record_a_network_with_fresh_weights_once_for_all_methods(bench):
    assert CONTROLS == ("standard", "full")
    judge = bench.judge(controls="full")
    for count in (1, 2):
        method, stage, state = given(bench)
        found = judge.verdicts(method, state, doing_nothing(bench))
        assert len(bench.recorded) == 1
        for verdict in found:
            assert verdict.status.found
            assert verdict.gate(FRESH).holds
            assert verdict.evidence["reinitialised"] < 0.9
        shuffled, again = stage.seen
        assert isinstance(shuffled[0].fit.bank.causal, Relabelled)
        problem, places = again
        assert places == shuffled[1]
        assert problem.subject is bench.recorded[0][0]
        assert problem.subject.identity() != bench.problem.subject.identity()
        assert problem.fit.subject is problem.subject
        assert problem.fit.bank is bench.problem.fit.bank
        assert problem.calibration.bank is bench.problem.calibration.bank
        assert count
    banks = [bench.problem.fit.bank, bench.problem.calibration.bank, *(r.bank for r in bench.tests.values())]
    assert all(a is b for a, b in zip(bench.recorded[0][1], banks, strict=True))


def test_a_handle_that_fresh_weights_reach_is_refused(bench, monkeypatch):
    def reached(parts: Sequence[BankRecording], handle: Handle, readout: object) -> Score:
        value = 0.5 if isinstance(parts[0].bank.causal, Relabelled) else 1.0
        assert (parts[0].subject is bench.problem.subject) == (value == 0.5)
        return Score(value, np.full(1000, value), 400)

    monkeypatch.setattr(judges, "score", reached)
    method, _, state = given(bench)
    for verdict in bench.judge(controls="full").verdicts(method, state, doing_nothing(bench)):
        assert verdict.status is Status.ABSENT
        assert verdict.gate(FRESH).fails
        assert verdict.gate(SHUFFLED).holds


@pytest.mark.parametrize("network", ["mlp", "gru", "gpt2", "llama"])
def test_fresh_weights_have_the_same_shapes_and_scales_and_leave_the_network_alone(network):
    subject = fresh(network, 1001)
    rows = planted(1100).rows[:40]
    before, outputs = subject.identity(), subject.record(rows).outputs
    kept = {name: w.clone() for name, w in subject.weights().items()}
    other = subject.reinitialised(torch.Generator().manual_seed(0))
    assert subject.identity() == before
    assert torch.equal(subject.record(rows).outputs, outputs)
    assert type(other) is type(subject)
    assert [p.name for p in other.places] == [p.name for p in subject.places]
    assert {name: w.shape for name, w in other.weights().items()} == {name: w.shape for name, w in kept.items()}
    drawn = 0
    for name, weight in other.weights().items():
        if weight.ndim < 2 or not weight.is_floating_point():
            assert torch.equal(weight, kept[name])
            continue
        drawn += 1
        assert not torch.equal(weight, kept[name])
        if weight.numel() > 200:
            assert float(weight.square().mean() / kept[name].square().mean()) == pytest.approx(1, abs=0.35)
            assert abs(float(weight.mean())) < 0.25 * float(weight.std())
    assert drawn >= 3
    assert not torch.allclose(other.record(rows).outputs, outputs, atol=1e-3)
    again = subject.reinitialised(torch.Generator().manual_seed(0))
    assert again.identity() == other.identity()
    assert subject.reinitialised(torch.Generator().manual_seed(1)).identity() != other.identity()


def test_fresh_weights_of_a_matrix_of_one_number_are_numbers():
    """The deviation of one number is none: its size is the scale."""
    net = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.ReLU(), torch.nn.Linear(1, 2))
    other = MLPSubject(net).reinitialised(torch.Generator().manual_seed(0))
    assert all(bool(w.isfinite().all()) for w in other.weights().values())
    even = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
    torch.nn.init.constant_(even[0].weight, 0.5)
    drawn = MLPSubject(even).reinitialised(torch.Generator().manual_seed(0)).net[0].weight
    assert 0.2 < float(drawn.square().mean().sqrt()) < 1.0


def test_controls_are_chosen_by_name(bench):
    with pytest.raises(PlotError, match="ful"):
        bench.judge(controls="ful")


# -- random handles, seconds, words -----------------------------------------------------------------------------------


def test_random_handles_are_found_once_for_all_methods_and_variables(bench):
    judge, asked = bench.judge(), []
    for _ in range(2):
        method, _, state = given(bench)
        found = judge.verdicts(method, state, doing_nothing(bench, asked))
        assert [v.evidence["random_handles"] for v in found] == [5, 5]
    assert asked == list(range(5))
    handle = judge._random_handle(doing_nothing(bench, asked), "q", 7)
    assert handle.variable == "q"
    assert asked == list(range(8))


def test_what_all_methods_stand_before_is_made_once(bench, monkeypatch):
    made, stand, judge = [], judges.stand, bench.judge()
    monkeypatch.setattr(judges, "stand", lambda v, *of: made.append(v) or stand(v, *of))
    method, _, state = given(bench)
    first, second = (judge.verdicts(method, state, doing_nothing(bench)) for _ in range(2))
    assert made == ["p", "q"]
    assert [v.as_row() for v in first] == [v.as_row() for v in second]


def test_random_handles_are_searched_for_judged_variables_only(bench, monkeypatch):
    power = Bank.power

    def q_is_the_output(bank: Bank, variable: str) -> Power:
        found = power(bank, variable)
        return replace(found, against_source=0, unlike_source=0) if variable == "q" else found

    monkeypatch.setattr(Bank, "power", q_is_the_output)
    method, _, state = given(bench)
    searched = Give({v: bench.idle(v) for v in "pq"})
    found = bench.judge().verdicts(method, state, lambda k: Method("random", "", (searched,)))
    assert {v.variable: v.status is Status.OUTPUT for v in found} == {"p": False, "q": True}
    assert {problem.variables for problem, _ in searched.seen} == {("p",)}


def test_seconds_count_every_control_of_every_method(bench, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(judges, "time", SimpleNamespace(perf_counter=lambda: now[0]))

    def passing() -> None:
        now[0] += 7.0

    judge = bench.judge(controls="full")
    assert judge.seconds == 0.0
    method, _, state = given(bench, passing)
    judge.verdicts(method, state, doing_nothing(bench))
    assert judge.seconds == 14.0  # shuffled values and fresh weights
    judge.verdicts(method, state, doing_nothing(bench))
    assert judge.seconds == 28.0


class Steps:
    """A watcher that remembers."""

    def __init__(self) -> None:
        self.words: list[str] = []

    def step(self, words: str) -> None:
        self.words.append(words)

    def part(self, done: int, total: int) -> None:
        pass


def test_controls_announce_themselves_and_not_their_stages_and_warn_of_nothing(bench):
    def loud() -> None:
        announce("inside")
        warnings.warn("couplings of nothing", stacklevel=2)

    method, _, state = given(bench, loud)
    steps = Steps()
    with watched_by(steps), warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        bench.judge(controls="full").verdicts(method, state, doing_nothing(bench))
    assert steps.words == ["controls", "controls", "random handles"]
    assert heard == []


@pytest.mark.parametrize(
    ("status", "notes"),
    [
        (Status.PLACED, ["at the edge"]),
        (Status.COMPACT, ["at the edge"]),
        (Status.IN_PART, ["untried", "at the edge"]),
        (Status.UNDECIDED, ["untried", "at the edge"]),
        (Status.DECODABLE, ["untried", "at the edge"]),
        (Status.ABSENT, ["untried"]),
    ],
)
def test_notes_follow_the_status(bench, status, notes):
    """What was not tried is said where nothing was found; what to be careful about, where there is something to use."""
    handle = replace(bench.known.handles["p"], chosen={"untried": ["s9"], "at_edge": ["at the edge"]})
    verdict = Verdict("p", status, "p: so it is.", {})
    noted = bench.judge()._with_notes(verdict, State({}, handles={"p": handle}))
    words = {"untried": "these places were compared whole but not looked into: s9", "at the edge": "at the edge"}
    assert list(noted.notes) == [words[n] for n in notes]
    assert noted.sentence == " ".join(["p: so it is.", *(f"Note: {words[n]}." for n in notes)])


def test_notes_of_a_judged_handle_are_in_its_sentence(bench):
    handles = {v: replace(h, chosen={"at_edge": [f"{v} at the edge"]}) for v, h in bench.known.handles.items()}
    stage = Give(handles)
    found = bench.judge().verdicts(Method("given", "", (stage,)), State({}, handles=handles), doing_nothing(bench))
    for verdict in found:
        assert f"{verdict.variable} at the edge" in verdict.notes
        assert f" Note: {verdict.variable} at the edge." in verdict.sentence


def test_a_method_is_retraced_before_it_searches_again(bench, monkeypatch):
    """Only what led to the handles is run again: the method that runs on controls is the retraced one."""
    method, stage, state = given(bench)
    asked = []

    def retraced(self: Method, handles: Any) -> Method:
        asked.append(list(handles))
        return Method("again", "", (stage,))

    monkeypatch.setattr(Method, "retraced", retraced)
    other = Method("other", "", (Give({}, act=lambda: pytest.fail("the whole method ran again")),))
    bench.judge(controls="full").verdicts(other, state, doing_nothing(bench))
    assert asked == [list(state.handles.values())] * 2
    assert len(stage.seen) == 2
    assert method.name == "given"
