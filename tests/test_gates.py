"""Gates: three answers each, at their bounds; and the status that a table of them makes."""

import math
from dataclasses import replace
from itertools import product

import pytest

from plot_ot.judging import gates as g
from plot_ot.judging.gates import Answer, Gate
from plot_ot.judging.intervals import Accuracy, Interval
from plot_ot.judging.status import Status
from plot_ot.judging.verdict import decide

HOLDS, FAILS, OPEN = Answer.HOLDS, Answer.FAILS, Answer.CANNOT_SAY


def span(low: float, high: float, bases: int = 100) -> Interval:
    return Interval((low + high) / 2, low, high, bases)


def share(low: float, high: float) -> Accuracy:
    return Accuracy((low + high) / 2, 100, low, high)


def test_the_bounds_are_the_ones_that_are_argued_for():
    assert (g.MARGIN, g.WORKS, g.KEEPS, g.READS, g.COMPACT_LOSS) == (0.05, 0.8, 0.9, 0.05, 0.02)
    assert (g.LEAST_PAIRS, g.LEAST_BASES) == (10, 20)


@pytest.mark.parametrize(
    ("low", "high", "answer"),
    [(0.051, 0.3, HOLDS), (0.05, 0.3, OPEN), (-0.1, 0.051, OPEN), (-0.1, 0.05, FAILS), (-0.3, -0.1, FAILS)],
)
def test_beating_a_control_takes_the_whole_interval_above_the_margin(low, high, answer):
    gate = g.beats("copying the source", span(low, high))
    assert gate.answer is answer
    assert (gate.low, gate.high, gate.bound) == (low, high, 0.05)
    assert gate.name == "beats copying the source"
    assert ("does not beat" in gate.sentence) == (answer is FAILS)
    assert ("may or may not" in gate.sentence) == (answer is OPEN)
    assert gate.holds == (answer is HOLDS)
    assert gate.fails == (answer is FAILS)


@pytest.mark.parametrize(
    ("value", "high", "answer"), [(0.0, 0.1, HOLDS), (0.01, 0.1, HOLDS), (-0.01, 0.0, OPEN), (-0.1, -0.001, FAILS)]
)
def test_no_random_handle_may_be_ahead_beyond_doubt(value, high, answer):
    gate = g.none_better(7, Interval(value, value - 0.1, high, 100))
    assert gate.answer is answer
    assert "7 random handles" in gate.sentence


@pytest.mark.parametrize(
    ("low", "high", "answer"), [(0.8, 1.0, HOLDS), (0.799, 1.0, OPEN), (0.1, 0.8, OPEN), (0.1, 0.799, FAILS)]
)
def test_a_handle_works_at_eighty_percent(low, high, answer):
    assert g.works(share(low, high), 100).answer is answer


def test_a_handle_that_works_on_few_base_inputs_is_open():
    assert g.works(share(0.9, 1.0), 20).holds
    few = g.works(share(0.9, 1.0), 19)
    assert few.answer is OPEN
    assert "only 19 base inputs" in few.sentence
    assert few.more == pytest.approx(20 / 19)
    assert g.works(share(0.1, 0.3), 5).fails


@pytest.mark.parametrize(
    ("low", "high", "answer"), [(0.9, 1.0, HOLDS), (0.899, 1.0, OPEN), (0.1, 0.9, OPEN), (0.1, 0.899, FAILS)]
)
def test_the_rest_is_left_alone_at_ninety_percent(low, high, answer):
    gate = g.leaves_the_rest_alone(share(low, high), 100)
    assert gate.answer is answer
    assert "pairs that keep the variable" in gate.sentence


@pytest.mark.parametrize(
    ("low", "high", "answer"), [(-0.049, 0.01, HOLDS), (-0.05, 0.01, OPEN), (-0.3, -0.049, OPEN), (-0.3, -0.05, FAILS)]
)
def test_reading_from_used_directions_may_cost_five_points(low, high, answer):
    gate = g.reads_what_is_used(span(low, high), 3, 16)
    assert gate.answer is answer
    assert "3 of 16 directions" in gate.sentence


GOOD, BAD, UNSURE = span(0.1, 0.2), span(-0.3, -0.1), span(-0.1, 0.1)


@pytest.mark.parametrize(
    ("size", "patch", "subspaces", "answer"),
    [
        (4, GOOD, GOOD, HOLDS),
        (16, GOOD, GOOD, FAILS),
        (4, BAD, GOOD, FAILS),
        (4, GOOD, BAD, FAILS),
        (4, UNSURE, GOOD, OPEN),
        (4, GOOD, UNSURE, OPEN),
        (4, UNSURE, BAD, FAILS),
        (4, span(-0.019, 0.1), GOOD, HOLDS),
        (4, span(-0.02, 0.1), GOOD, OPEN),
        (4, GOOD, span(0.001, 0.1), HOLDS),
        (4, GOOD, span(0.0, 0.1), OPEN),
    ],
)
def test_compact_is_smaller_no_worse_than_the_patch_and_better_than_random_subspaces(size, patch, subspaces, answer):
    gate = g.compact(size, 16, patch, subspaces)
    assert gate.answer is answer
    assert f"{size} of 16" in gate.sentence


def test_how_many_more_inputs_would_decide():
    # half widths shrink with the root: to bring 0.2 down to 0.1 takes four times as many
    assert g.beats("x", Interval(0.15, -0.05, 0.35, 100)).more == pytest.approx(4.0)
    # and likewise to bring the upper end down to the bound
    assert g.beats("x", Interval(-0.05, -0.25, 0.25, 100)).more == pytest.approx(9.0)
    # a rule-of-three width shrinks with the number itself: 3/10 down to 0.1
    assert g.leaves_the_rest_alone(Accuracy(1.0, 10, 0.7, 1.0), 10).more == pytest.approx(3.0)
    assert math.isinf(g.beats("x", Interval(0.05, -0.1, 0.2, 100)).more)
    assert g.beats("x", Interval(0.5, 0.4, 0.6, 100)).more == 1.0
    open_gates = [g.beats("x", Interval(0.15, -0.05, 0.35, 100)), g.beats("y", Interval(0.5, 0.4, 0.6, 100))]
    assert g.deciding(open_gates) == pytest.approx(4.0)
    assert g.deciding([]) == 1.0


# -- the status ----------------------------------------------------------------------------------------------------


CONTROLS = (
    "beats copying the source",
    "beats random places",
    "beats random handles",
    "no random handle does better",
    "beats shuffled values",
)
REST = ("works", "leaves the rest alone", "reads what is used")


def table(**answers: Answer) -> tuple[list[Gate], Gate]:
    made = [Gate(name, answers.get(name, HOLDS), 0, 0, 0, 0, "") for name in (*CONTROLS, *REST)]
    return made, next(gate for gate in made if gate.name == "works")


SMALL = Gate("compact", HOLDS, 0, 0, 0, 0, "")


def status(small: Answer = HOLDS, **answers: Answer) -> Status:
    return decide(*table(**answers), replace(SMALL, answer=small))


def test_all_gates_held_is_placed_and_compact_if_small():
    assert status() is Status.COMPACT
    assert status(small=FAILS) is Status.PLACED
    assert status(small=OPEN) is Status.PLACED


@pytest.mark.parametrize("name", [*CONTROLS, "leaves the rest alone"])
def test_a_control_or_invariance_that_fails_means_not_localized(name):
    assert status(**{name: FAILS}) is Status.ABSENT
    for other, answer in product((*CONTROLS, *REST), Answer):
        if other != name:
            assert status(**{name: FAILS, other: answer}) is Status.ABSENT


def test_a_handle_that_works_seldom_but_beats_every_control_is_there_in_part():
    assert status(works=FAILS) is Status.IN_PART
    assert status(**{"works": FAILS, "leaves the rest alone": OPEN}) is Status.IN_PART
    for name in CONTROLS:
        assert status(**{"works": FAILS, name: OPEN}) is Status.ABSENT


def test_a_reading_that_nothing_uses_is_decodable_only():
    assert status(**{"reads what is used": FAILS}) is Status.DECODABLE
    assert status(**{"reads what is used": FAILS, "works": FAILS}) is Status.DECODABLE
    assert status(**{"reads what is used": FAILS, "beats random places": OPEN}) is Status.DECODABLE


@pytest.mark.parametrize("name", [*CONTROLS, *REST])
def test_one_open_gate_leaves_it_undecided(name):
    assert status(**{name: OPEN}) is Status.UNDECIDED
