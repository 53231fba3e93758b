"""A stage never gives up what was found, and looks into dropped places where calibration is not content."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import nn

from plot_ot.abstract.banks import Bank, Power
from plot_ot.abstract.causal_model import CausalModel
from plot_ot.edits import Frame
from plot_ot.errors import PlotError
from plot_ot.handles import Edit, Handle
from plot_ot.methods import LITERAL, Method, MethodKind, better, pick, progressive
from plot_ot.signatures import as_readout
from plot_ot.sites import whole_places
from plot_ot.stages.choose import Calibrate
from plot_ot.stages.closed_form import ClosedForm
from plot_ot.stages.newton import NewtonHandles
from plot_ot.stages.problem import Calibration, Candidate, Problem, State
from plot_ot.stages.ways import Best, LookFurther
from plot_ot.subjects import MLPSubject, ModuleSubject, Place, record
from plot_ot.transport import from_scores
from truth.kinds import gate_pair
from truth.known import Known, draw_splits


def problem_of(known: Known, size: int = 200) -> Problem:
    splits = draw_splits(known.causal, known.rows, size, known.seed)
    fit, calibration = record(known.subject, splits.fit, splits.calibration)
    variables = tuple(known.truths)
    return Problem(known.subject, fit, calibration, variables, as_readout("softmax"), seed=known.seed)


@pytest.fixture(scope="module")
def gates() -> tuple[Known, Problem]:
    """Seven places, s1 to s7; a and b share one."""
    known = gate_pair(1002)
    return known, problem_of(known)


def handle_at(problem: Problem, variable: str, place: Place, score: float | None, size: int = 1, **chosen: object):
    gains = (torch.arange(place.width) < size).float()
    how = {"by_support": {place.name: score}, **chosen} | ({} if score is None else {"calibration_score": score})
    return Handle(variable, (Edit(place, Frame.identity(place.width), gains),), problem.subject.identity(), how)


@dataclass
class Scores:
    """A stage whose handle at the best of the open places has a score that is given."""

    by_place: Mapping[str, Mapping[str, float]]
    looked: list[dict[str, list[str]]] = field(default_factory=list)
    """The places that were open, call by call."""
    size: int = 1

    def __call__(self, problem: Problem, state: State) -> State:
        assert set(state.places) == set(problem.variables)  # others' places would be measured as well
        self.looked.append({v: [p.name for p in state.places[v]] for v in problem.variables})
        handles, profile, calibrations = {}, {}, {}
        for v in problem.variables:
            scores = {p: self.by_place[v].get(p.name, 0.0) for p in state.places[v]}
            best = max(scores, key=scores.__getitem__)
            handles[v] = handle_at(problem, v, best, scores[best], self.size)
            profile[v] = {p.name: s for p, s in scores.items()}
            calibrations[v] = Calibration(handles[v], scores[best], (1,), (1.0,), torch.zeros(1, 1, 1), 0)
        return replace(state, handles=handles, profile=profile, calibrations=calibrations)


def coarse(problem: Problem, order: Mapping[str, str], keep: int) -> State:
    """The state after a coarse stage that ranks places as told, e.g. "3142...", and keeps the first few."""
    places = problem.subject.places
    family = whole_places(problem.fit, places)
    names = [site.place.name for site in family.sites]
    scores = np.zeros((len(order), len(names)))
    kept = {}
    for i, (_, digits) in enumerate(order.items()):
        for rank, digit in enumerate(digits):
            scores[i, names.index(f"s{digit}")] = len(names) - rank
    for v, digits in order.items():
        kept[v] = tuple(problem.subject.place(f"s{d}") for d in digits[:keep])
    coupling = from_scores(tuple(order), [s.name for s in family.sites], scores, "given")
    return State(kept, candidates=dict.fromkeys(order, (Candidate(family, coupling),)))


ORDER = {"a": "3142567", "b": "7654321"}
POWER = Power(9, 9, 9, 0, {}, 9)
"""Of an output variable."""


def test_places_that_the_coarse_stage_dropped_are_tried_until_calibration_is_content(gates):
    _, problem = gates
    inside = Scores({"a": {"s3": 0.99}, "b": {"s7": 0.6, "s4": 0.98}})
    stage = LookFurther(Best(((inside,),)))
    assert (stage.enough, stage.most) == (0.97, 6)
    found = stage(problem, coarse(problem, ORDER, 2))
    # a is content at once; b looks at two more places at a time, in the order of the coarse coupling
    assert [call["b"] for call in inside.looked] == [["s7", "s6"], ["s5", "s4"]]
    assert [call.get("a") for call in inside.looked] == [["s3", "s1"], None]
    assert found.handles["a"].places == ["s3"]
    assert found.handles["b"].places == ["s4"]
    assert found.handles["a"].chosen["untried"] == ["s4", "s2", "s5", "s6", "s7"]
    assert found.handles["b"].chosen["untried"] == ["s3", "s2", "s1"]
    assert [p.name for p in found.places["b"]] == ["s4"]
    for v, calibration in found.calibrations.items():
        assert calibration.handle is found.handles[v]
        assert calibration.score == found.handles[v].chosen["calibration_score"]
    # all that was tried is in the profile, better or worse
    assert found.profile["b"] == {"s7": 0.6, "s6": 0.0, "s5": 0.0, "s4": 0.98}


def test_nothing_more_is_run_where_calibration_is_content(gates):
    _, problem = gates
    inside = Scores({v: {"s3": 0.97, "s7": 0.97} for v in "ab"})
    found = LookFurther(Best(((inside,),)))(problem, coarse(problem, ORDER, 1))
    assert len(inside.looked) == 1
    assert found.handles["a"].chosen["untried"] == ["s1", "s4", "s2", "s5", "s6", "s7"]


@pytest.mark.parametrize(("keep", "most", "looked"), [(1, 6, 7), (2, 3, 5), (3, 6, 7), (4, 2, 6), (2, 0, 2)])
def test_the_budget_of_further_places_is_kept_and_the_rest_is_named(gates, keep, most, looked):
    _, problem = gates
    inside = Scores({"a": {}, "b": {}})
    found = LookFurther(Best(((inside,),)), most=most)(problem, coarse(problem, ORDER, keep))
    for v, digits in ORDER.items():
        seen = [p for call in inside.looked for p in call[v]]
        assert sorted(seen) == sorted(set(seen))
        assert seen == [f"s{d}" for d in digits[:looked]]
        assert found.handles[v].chosen["untried"] == [f"s{d}" for d in digits[looked:]]
        assert found.handles[v].places == [f"s{digits[0]}"]  # no better one was found
        assert set(found.profile[v]) == set(seen)


def test_another_threshold_is_another_content(gates):
    _, problem = gates
    for enough, calls in ((0.5, 1), (0.7, 2)):
        inside = Scores({v: {"s3": 0.6, "s7": 0.6, "s1": 0.8, "s6": 0.8} for v in "ab"})
        found = LookFurther(Best(((inside,),)), enough=enough)(problem, coarse(problem, ORDER, 1))
        assert len(inside.looked) == calls
        assert found.handles["a"].places == (["s3"] if calls == 1 else ["s1"])


def test_an_equal_score_further_away_changes_nothing(gates):
    _, problem = gates
    inside = Scores({v: dict.fromkeys((f"s{k}" for k in range(1, 8)), 0.5) for v in "ab"})
    found = LookFurther(Best(((inside,),)))(problem, coarse(problem, ORDER, 1))
    assert {v: h.places for v, h in found.handles.items()} == {"a": ["s3"], "b": ["s7"]}


def test_without_a_coarse_coupling_places_follow_in_forward_order(gates):
    _, problem = gates
    inside = Scores({"a": {}, "b": {}})
    state = replace(coarse(problem, ORDER, 1), candidates={})
    LookFurther(Best(((inside,),)), most=2)(problem, state)
    assert [call["a"] for call in inside.looked] == [["s3"], ["s1"], ["s2"]]


def test_a_scout_goes_to_all_dropped_places_and_only_the_best_of_them_is_looked_into(gates):
    _, problem = gates
    scout = Scores({"b": {"s5": 0.6, "s2": 0.7, "s1": 0.7}})
    inside = Scores({"a": {"s3": 0.99}, "b": {"s7": 0.5, "s2": 0.9, "s5": 1.0}})
    stage = LookFurther(Best(((inside,),)), most=0, scout=(scout,))
    found = stage(problem, coarse(problem, ORDER, 2))
    assert scout.looked == [{"b": ["s5", "s4", "s3", "s2", "s1"]}]  # a is content
    assert inside.looked == [{"a": ["s3", "s1"], "b": ["s7", "s6"]}, {"b": ["s2"]}]  # between equals, the coarse order
    assert found.handles["b"].places == ["s2"]
    assert found.handles["b"].chosen["untried"] == []
    assert found.profile["b"] == {"s7": 0.5, "s6": 0.0, "s5": 0.6, "s4": 0.0, "s3": 0.0, "s2": 0.9, "s1": 0.7}


@pytest.mark.parametrize(("count", "scouted"), [(1, ["s6"]), (3, ["s6", "s5", "s4"])])
def test_a_scout_keeps_to_the_budget(gates, count, scouted):
    _, problem = gates
    scout, inside = Scores({"a": {}, "b": {}}), Scores({"a": {}, "b": {}})
    stage = LookFurther(Best(((inside,),)), most=0, scout=(scout,), scouted=count)
    found = stage(problem, coarse(problem, ORDER, 1))
    assert [call["b"] for call in scout.looked] == [scouted]
    assert found.handles["b"].places == ["s7"]  # nothing better was found
    assert found.handles["b"].chosen["untried"] == [f"s{d}" for d in "654321"[count:]]


def test_a_scout_goes_where_looking_in_all_ways_has_ended(gates):
    _, problem = gates
    scout = Scores({"b": {"s4": 0.6, "s1": 0.7}})
    inside = Scores({"a": {"s3": 0.99}, "b": {"s7": 0.5, "s1": 0.8}})
    found = LookFurther(Best(((inside,),)), most=2, scout=(scout,))(problem, coarse(problem, ORDER, 1))
    assert [call["b"] for call in inside.looked] == [["s7"], ["s6"], ["s5"], ["s1"]]
    assert scout.looked == [{"b": ["s4", "s3", "s2", "s1"]}]
    assert found.handles["b"].places == ["s1"]
    assert found.handles["b"].chosen["untried"] == []
    content = Scores({"a": {"s3": 0.99}, "b": {"s7": 0.5, "s5": 1.0}})
    again = LookFurther(Best(((content,),)), most=2, scout=(scout,))(problem, coarse(problem, ORDER, 1))
    assert len(scout.looked) == 1  # nobody needs it
    assert again.handles["b"].chosen["untried"] == ["s4", "s3", "s2", "s1"]


@pytest.mark.parametrize(("width", "wide"), [(64, False), (65, True)])
def test_all_dropped_places_are_scouted_and_some_narrow_ones_looked_into_before(width, wide):
    places = [Place(f"p{k}", width, k) for k in range(9)]
    [further] = [s for s in progressive(places, 2).stages if isinstance(s, LookFurther)]
    assert len(further.scout) == 1
    assert (further.most, further.scouted) == (0 if wide else 6, 30)
    few = [further.best.ways[k] for k in further.outputs]
    assert [[type(stage) for stage in way] for way in few] == ([[ClosedForm], []] if wide else [])
    [rotating] = [s for s in progressive(places, 2, das=True).stages if isinstance(s, LookFurther)]
    assert not rotating.outputs  # rotations follow the size of what was found


def test_output_variables_take_fewer_ways_and_are_not_looked_for_further(gates, monkeypatch):
    _, problem = gates
    monkeypatch.setattr(Bank, "power", lambda bank, v: replace(POWER, unlike_source=int(v != "b")))
    assert [problem.fit.bank.power(v).is_output for v in "ab"] == [False, True]
    dear, cheap = Scores({"a": {"s1": 1.0}, "b": {"s7": 1.0}}), Scores({"a": {}, "b": {"s6": 0.4}})
    start = coarse(problem, ORDER, 2)
    found = LookFurther(Best(((dear,), (cheap,))), outputs=(1,))(problem, start)
    assert dear.looked == [{"a": ["s3", "s1"]}]
    assert cheap.looked == [{"a": ["s3", "s1"]}, {"b": ["s7", "s6"]}]
    assert {v: h.places for v, h in found.handles.items()} == {"a": ["s1"], "b": ["s6"]}
    assert {v: [p.name for p in places] for v, places in found.places.items()} == {"a": ["s1"], "b": ["s6"]}
    assert {v: h.chosen["ways"] for v, h in found.handles.items()} == {"a": (0,), "b": (1,)}
    assert found.profile["b"] == {"s7": 0.0, "s6": 0.4}
    everything = LookFurther(Best(((dear,), (cheap,))))(problem, start)
    assert everything.handles["b"].places == ["s7"]


def test_where_all_are_output_variables_only_the_fewer_ways_run(gates, monkeypatch):
    _, problem = gates
    monkeypatch.setattr(Bank, "power", lambda bank, v: POWER)
    dear, cheap = Scores({"a": {}, "b": {}}), Scores({"a": {"s1": 0.3}, "b": {"s7": 0.2}})
    found = LookFurther(Best(((dear,), (cheap,))), outputs=(1,))(problem, coarse(problem, ORDER, 2))
    assert dear.looked == []
    assert {v: h.places for v, h in found.handles.items()} == {"a": ["s1"], "b": ["s7"]}


def test_where_two_variables_share_a_place_that_was_dropped_looking_further_finds_it(gates):
    """A whole patch of the shared place copies the source, so the coarse stage keeps others for b."""
    known, problem = gates
    method = progressive(problem.subject.places, 2)
    assert any(isinstance(stage, LookFurther) for stage in method.stages)
    content = replace(method, stages=tuple(s.best if isinstance(s, LookFurther) else s for s in method.stages))
    [place] = known.handles["b"].places
    plain, further = (m.run(problem)[0].handles["b"] for m in (content, method))
    assert plain.places != [place]
    assert plain.chosen["calibration_score"] < 0.97
    assert further.places == [place]
    assert further.chosen["calibration_score"] == pytest.approx(1.0)
    assert set(further.chosen["untried"]) < {p.name for p in problem.subject.places} - {place}


# -- the best of several ways -----------------------------------------------------------------------------------------


@dataclass
class Made:
    """A stage that ends with a handle of that score and size at the first open place."""

    score: float
    size: int = 1

    def __call__(self, problem: Problem, state: State) -> State:
        handles = {v: handle_at(problem, v, state.places[v][0], self.score, self.size) for v in problem.variables}
        return replace(state, handles=handles)


@pytest.mark.parametrize(
    ("ways", "taken"),
    [
        (((0.5, 1), (0.9, 1), (0.7, 1)), 1),
        (((0.9, 1), (0.9, 1)), 0),  # the first of equals
        (((0.9, 4), (0.9, 1)), 0),  # unless it needs more than four times the directions
        (((0.9, 5), (0.9, 1)), 1),
        (((0.9, 5), (0.9, 2), (0.9, 1)), 1),
        (((0.9, 5), (0.8, 1)), 0),
    ],
)
def test_the_best_way_is_the_plainest_of_the_highest_score(gates, ways, taken):
    _, problem = gates
    best = Best(tuple((Made(score, size),) for score, size in ways))
    found = best(problem, State.start(problem))
    for handle in found.handles.values():
        assert handle.chosen["ways"] == (taken,)
        assert (handle.chosen["calibration_score"], handle.size) == ways[taken]
    assert {v: [p.name for p in places] for v, places in found.places.items()} == {"a": ["s1"], "b": ["s1"]}
    # and a choice between some of the ways alone is the same choice
    others = [k for k in range(len(ways)) if k != taken]
    again = best.only([taken])(problem, State.start(problem))
    assert again.handles["a"].chosen["calibration_score"] == ways[taken][0]
    assert best.only(reversed(range(len(ways)))).ways == best.ways
    assert best.only(others).ways == tuple(best.ways[k] for k in others)
    assert replace(best, readable=9).only([0]).readable == 9


def test_a_handle_that_is_kept_knows_the_ways_it_came(gates):
    _, problem = gates
    first, second = Best(((Made(0.2),), (Made(0.8),))), Best(((), (Made(0.5),)))
    start = State.start(problem)
    kept = second(problem, first(problem, start))
    assert kept.handles["a"].chosen["ways"] == (1, 0)
    replaced = Best(((), (Made(0.9),)))(problem, first(problem, start))
    assert replaced.handles["a"].chosen["ways"] == (1,)


# -- methods ----------------------------------------------------------------------------------------------------------


def test_the_better_of_two_handles_is_the_later_one_unless_calibration_prefers_the_earlier(gates):
    _, problem = gates
    place = problem.subject.places[0]
    low, high, unscored = (handle_at(problem, "a", place, score) for score in (0.5, 0.7, None))
    again = handle_at(problem, "a", place, 0.7)
    assert better(None, low) is low
    assert better(high, low) is high
    assert better(low, high) is high
    assert better(high, again) is again
    close = handle_at(problem, "a", place, 0.7 - 1e-12)
    assert better(high, close) is close  # but for rounding they are equal
    assert better(high, unscored) is unscored
    assert better(unscored, low) is low


def test_a_method_keeps_what_an_earlier_stage_found_and_read_literally_does_not(gates):
    _, problem = gates
    method = Method("zoom", "two stages", (Made(0.8, 2), Made(0.6, 1)))
    literal = method.literally()
    assert not method.literal
    assert literal.literal
    assert (literal.name, literal.summary) == ("zoom-literal", "two stages; last stage counts")
    assert literal.stages == method.stages
    kept, last = (m.run(problem)[0].handles for m in (method, literal))
    assert [kept[v].chosen["calibration_score"] for v in "ab"] == [0.8, 0.8]
    assert [last[v].chosen["calibration_score"] for v in "ab"] == [0.6, 0.6]
    rising = Method("zoom", "", (Made(0.6), Made(0.8, 2)))
    assert [rising.run(problem)[0].handles[v].size for v in "ab"] == [2, 2]


def test_methods_are_picked_by_name_literally_or_not():
    methods = {name: Method(name, name, (Made(0.5),)) for name in ("one", "two", "three")}
    assert LITERAL == "-literal"
    assert [m.name for m in pick(methods, None)] == ["one", "two", "three"]
    assert [m.name for m in pick(methods, ["three", "one"])] == ["one", "three"]
    found = pick(methods, ["two-literal", "two", "three-literal"])
    assert [(m.name, m.literal) for m in found] == [("two", False), ("two-literal", True), ("three-literal", True)]
    for name in ("four", "four-literal", "-literal"):
        with pytest.raises(PlotError, match=name):
            pick(methods, [name])


def test_kinds_of_methods_are_checked_and_count_their_stages():
    assert Method("x", "", (), kind="das").kind is MethodKind.DAS  # type: ignore[arg-type]
    with pytest.raises(PlotError, match="dsa"):
        Method("x", "", (), kind="dsa")  # type: ignore[arg-type]
    best = Best(((Made(0.1), Made(0.2)), (), (Made(0.3),)))
    assert Method("x", "", (Made(0.1), best)).steps == 4
    assert Method("x", "", (Made(0.1), LookFurther(best), Made(0.2))).steps == 5


def with_ways(problem: Problem, *ways: tuple[int, ...] | None, **chosen: object) -> list[Handle]:
    place = problem.subject.places[0]
    return [handle_at(problem, "a", place, 0.5, **({} if w is None else {"ways": w}), **chosen) for w in ways]


def test_a_retraced_method_goes_only_the_ways_that_its_handles_went(gates):
    _, problem = gates
    before, between, after = Made(0.1), Made(0.2), Made(0.3)
    first, second = (Best(tuple((Made(k / 10),) for k in range(n))) for n in (3, 2))
    method = Method("x", "said", (before, LookFurther(first), between, second, after))

    def stages(*ways: tuple[int, ...] | None, **chosen: object) -> tuple:
        again = method.retraced(with_ways(problem, *ways, **chosen))
        assert (again.name, again.summary) == ("x", "said")
        return again.stages

    assert stages((2, 0)) == (before, first.only([2]), between, second.only([0]), after)
    assert stages((2, 0), (0, 0)) == (before, first.only([0, 2]), between, second.only([0]), after)
    assert stages((1, 0), (1, 1)) == (before, first.only([1]), between, second, after)
    # a handle that does not tell all its ways: all of them, but nowhere else
    whole = (before, first, between, second, after)
    for untold in (None, (), (1,), (0, 1, 1)):
        assert stages(untold) == whole
        assert stages((2, 0), untold) == whole
    # nothing after the stage that made the last handle is run again
    assert stages(None, stage=0) == (before,)
    assert stages((2,), stage=1) == (before, first.only([2]))
    assert stages((2, 0), stage=1) == (before, first.only([2]))  # which the second choice kept
    assert stages((2,), stage=2) == (before, first.only([2]), between)
    assert stages((1,), stage=3) == (before, first, between, second)  # made by the second choice, from nothing
    early, late = with_ways(problem, (2,), stage=1) + with_ways(problem, (0, 1), stage=3)
    assert method.retraced([early, late]).stages == (before, first.only([0, 2]), between, second.only([1]))


def test_handles_tell_the_stage_that_made_them(gates):
    _, problem = gates
    method = Method("x", "", (Made(0.5), Best(((), (Made(0.8),))), Best(((), (Made(0.2),))), Made(0.1)))
    handles = method.run(problem)[0].handles
    assert {v: (h.chosen["stage"], h.chosen["ways"]) for v, h in handles.items()} == dict.fromkeys("ab", (1, (1, 0)))
    again = method.retraced(handles.values())
    assert again.stages == (method.stages[0], Best(((Made(0.8),),)))
    literal = method.literally().run(problem)[0].handles
    assert {v: h.chosen["stage"] for v, h in literal.items()} == dict.fromkeys("ab", 3)


def test_a_retraced_method_looks_at_the_places_it_is_given_alone(gates):
    _, problem = gates
    inside = Scores({"a": {}, "b": {}})
    method = Method("x", "", (LookFurther(Best(((inside,),))),))
    places = dict.fromkeys("ab", (problem.subject.place("s2"),))
    for ways in (None, (0,)):
        inside.looked.clear()
        handles = method.retraced(with_ways(problem, ways)).run(problem, places)[0].handles
        assert inside.looked == [{"a": ["s2"], "b": ["s2"]}]
        assert handles["a"].places == ["s2"]


def test_handles_of_plot_tell_their_ways_also_after_newton(gates):
    _, problem = gates
    method = progressive(problem.subject.places, 2)
    assert any(isinstance(stage, NewtonHandles) for stage in method.stages)
    for handle in method.run(problem)[0].handles.values():
        assert len(handle.chosen["ways"]) == 1


def test_newton_at_a_place_that_nothing_looks_at_finds_nothing_and_does_not_fail():
    class Aside(torch.nn.Module):
        """A layer whose output is thrown away beside one that is used."""

        def __init__(self) -> None:
            super().__init__()
            self.used, self.aside, self.head = (torch.nn.Linear(6, 4), torch.nn.Linear(6, 4), torch.nn.Linear(4, 3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.aside(x)
            return self.head(torch.relu(self.used(x)))

    known = gate_pair(1002)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = Aside()
    for learning in (True, False):
        net.requires_grad_(learning)
        subject = ModuleSubject(net, {"aside": "aside"}, torch.zeros(1, 6), encode=lambda rows: rows.float())
        problem = problem_of(replace(known, subject=subject), 60)
        method = Method("newton", "", (ClosedForm(), NewtonHandles()))
        state, _ = method.run(problem)
        score = state.handles["a"].chosen["calibration_score"]
        changed = problem.calibration.bank.changed["a"]
        right = problem.calibration.base_outputs.argmax(dim=-1) == problem.calibration.bank.labels["a"].long()
        untouched = (right[changed].double().mean() + right[~changed].double().mean()) / 2
        assert score == pytest.approx(float(untouched))


def test_a_retraced_way_ends_where_its_handles_were_made(gates):
    """Steps of a way that changed nothing are left out, and no others."""

    @dataclass(frozen=True)
    class Keeps:
        def __call__(self, problem: Problem, state: State) -> State:
            return state

    _, problem = gates
    worse, good, better_yet = Made(0.1), Made(0.5), Made(0.6)
    for way, steps in (((good, Keeps()), 1), ((good, better_yet), 2), ((good, better_yet, Keeps()), 2)):
        method = Method("m", "", (Best(((worse,), way)),))
        handles = method.run(problem)[0].handles
        assert {h.chosen["way_steps"] for h in handles.values()} == {(steps,)}
        [again] = method.retraced(handles.values()).stages
        assert again.ways == (way[:steps],)
    kept = Best(((worse,), (Keeps(),)))(problem, good(problem, State.start(problem)))
    assert {h.chosen["way_steps"] for h in kept.handles.values()} == {(0,)}


def test_newton_is_retraced_down_to_the_rho_its_handles_took(gates):
    """What came later on the path changed nothing: controls leave it out."""
    known, problem = gates
    newton, place = NewtonHandles(), problem.subject.places[0]
    made = [handle_at(problem, v, place, 1.0, rho=rho) for v, rho in (("a", 0.1), ("b", 1.0))]
    again = newton.retraced(made)
    assert again == replace(newton, weights=(1.0, 0.1))
    assert newton.retraced([*made, handle_at(problem, "a", place, 1.0)]) == newton  # that one was made elsewhere
    method = Method("m", "", (Best(((ClosedForm(), newton),)), newton))
    best, last = method.retraced(made).stages
    assert (best.ways[0][-1], last) == (again, again)
    # and a handle of Newton's says which ρ it took
    open_at = {v: tuple(problem.subject.place(p) for p in t.carried) for v, t in known.truths.items()}
    found = Method("newton", "", (NewtonHandles(),)).run(problem, open_at)[0].handles
    assert all(h.chosen["rho"] in newton.weights for h in found.values())


@pytest.mark.parametrize(("names", "points"), [(["a", "b"], 480), (["a", "b@name"], 20)])
def test_the_large_grid_is_for_places_of_one_token(names, points):
    places = [Place(name, 8, k) for k, name in enumerate(names)]
    [best] = [stage for stage in progressive(places, 2).stages if isinstance(stage, Best)]
    searches = {stage.search for way in best.ways for stage in way if isinstance(stage, Calibrate)}
    assert {len(s.sizes) * len(s.strengths) for s in searches} == {points}


def test_a_wide_network_is_scouted_in_every_place_and_its_output_variable_in_none_but_those_kept():
    """Six places of width 80. Nothing is ever good enough here, so every place is looked into."""
    causal = CausalModel(
        list("abcd"),
        {"bit": lambda b: b, "left": lambda a, bit: a & bit, "out": lambda left, c, d: 2 * left + (c ^ d), "y": _same},
        "y",
    )
    rows = torch.cartesian_prod(*[torch.arange(2)] * 4)
    torch.manual_seed(1000)
    widths = [4, *[80] * 6]
    layers = [x for i, o in pairwise(widths) for x in (nn.Linear(i, o), nn.ReLU())]
    net = nn.Sequential(*layers, nn.Linear(80, 4))
    optimiser = torch.optim.Adam(net.parameters(), lr=2e-3)
    for _ in range(200):
        optimiser.zero_grad()
        torch.nn.functional.cross_entropy(net(rows.float()), causal.answer(rows)).backward()
        optimiser.step()
    bank = Bank.from_pairs(causal, rows.repeat_interleave(16, dim=0), rows.repeat(16, 1))
    fit, calibration = record(MLPSubject(net), bank, bank)
    problem = Problem(fit.subject, fit, calibration, ("bit", "left", "out"), as_readout("softmax"))
    never = [
        replace(s, enough=2.0) if isinstance(s, LookFurther) else s for s in progressive(fit.subject.places, 3).stages
    ]
    state, _ = Method("plot", "", tuple(never)).run(problem)
    assert fit.bank.power("out").is_output
    for v in ("bit", "left"):
        assert len(state.profile[v]) == 6
        assert state.handles[v].chosen["untried"] == []
    assert state.handles["left"].chosen["calibration_score"] == pytest.approx(1.0)
    assert "untried" not in state.handles["out"].chosen
    assert state.handles["out"].chosen["calibration_score"] == pytest.approx(1.0)


def _same(out: torch.Tensor) -> torch.Tensor:
    return out
