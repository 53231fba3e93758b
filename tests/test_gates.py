"""Gates: three answers each, at their bounds; and the status that a table of them makes."""

import math
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plot_ot.judging import gates as g
from plot_ot.judging.gates import Answer, Gate
from plot_ot.judging.intervals import Accuracy, Interval, at_most
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
    assert f"{gate.value:+.3f} [{low:+.3f}, {high:+.3f}]" in gate.sentence
    assert ("by 0.05 " in gate.sentence) == (answer is not HOLDS)


def test_another_margin_is_another_bound():
    gate = g.beats("x", span(0.051, 0.2), margin=0.1)
    assert (gate.answer, gate.bound) == (OPEN, 0.1)
    assert "by 0.1 " in gate.sentence


@pytest.mark.parametrize(
    ("value", "high", "answer"), [(0.0, 0.1, HOLDS), (0.01, 0.1, HOLDS), (-0.01, 0.0, OPEN), (-0.1, -0.001, FAILS)]
)
def test_no_random_handle_may_be_ahead_beyond_doubt(value, high, answer):
    gate = g.none_better(7, Interval(value, value - 0.1, high, 100))
    assert gate.answer is answer
    assert gate.name == "no random handle does better"
    assert (gate.value, gate.low, gate.high, gate.bound) == (value, value - 0.1, high, 0.0)
    ahead = f"the best of 7 random handles is ahead by {-value:.3f}"
    assert gate.sentence == ("none of 7 random handles does better" if answer is HOLDS else ahead)
    # from 0.01 behind, with the upper end 0.01 above that, as many inputs as there are would just decide
    assert gate.more == 1.0


def test_a_random_handle_that_may_be_ahead_says_how_many_more_inputs_would_decide():
    assert g.none_better(5, Interval(-0.1, -0.4, 0.2, 100)).more == pytest.approx(9.0)
    assert g.none_better(5, Interval(0.1, -0.4, 0.2, 100)).more == 1.0
    assert g.none_better(5, Interval(-0.5, -0.9, -0.1, 100)).more == 1.0


@pytest.mark.parametrize(
    ("low", "high", "answer"), [(0.8, 1.0, HOLDS), (0.799, 1.0, OPEN), (0.1, 0.8, OPEN), (0.1, 0.799, FAILS)]
)
def test_a_handle_works_at_eighty_percent(low, high, answer):
    gate = g.works(share(low, high), 100)
    assert gate.answer is answer
    assert (gate.name, gate.value, gate.low, gate.high, gate.bound) == ("works", (low + high) / 2, low, high, 0.8)
    said = f"right on {gate.value:.3f} [{low:.3f}, {high:.3f}] of the discriminating pairs"
    ends = {HOLDS: "", FAILS: ", below 80%", OPEN: ": whether that is 80% or more is open"}
    assert gate.sentence == said + ends[answer]


@pytest.mark.parametrize(
    ("low", "high", "answer"), [(0.9, 1.0, HOLDS), (0.899, 1.0, OPEN), (0.1, 0.9, OPEN), (0.1, 0.899, FAILS)]
)
def test_answers_that_should_stay_do_at_ninety_percent(low, high, answer):
    gate = g.stays_where_nothing_shows(share(low, high), 100)
    assert (gate.name, gate.bound, gate.answer) == ("stays where nothing shows", 0.9, answer)


@pytest.mark.parametrize(
    ("low", "high", "answer"),
    [(0.01, 1.0, HOLDS), (-0.2, 0.2, OPEN), (-1.0, -0.01, FAILS), (-1.0, 0.0, OPEN), (0.0, 0.0, OPEN)],
)
def test_the_answer_of_a_part_alone_must_not_be_the_commoner_one(low, high, answer):
    gate = g.does_more_than("x", Interval((low + high) / 2, low, high, 40))
    assert (gate.name, gate.bound, gate.answer) == ("does more than swap x", 0.0, answer)
    assert ("it carries x" in gate.sentence) == (answer is FAILS)


def test_a_handle_that_works_on_few_base_inputs_is_open():
    assert g.works(share(0.9, 1.0), 20).holds
    few = g.works(share(0.9, 1.0), 19)
    assert few.answer is OPEN
    assert (few.name, few.value, few.low, few.high, few.bound) == ("works", 0.95, 0.9, 1.0, 0.8)
    assert "only 19 base inputs" in few.sentence
    assert few.more == pytest.approx(20 / 19)
    assert g.works(share(0.9, 1.0), 10).more == pytest.approx(2.0)
    assert g.works(share(0.1, 0.3), 5).fails


@pytest.mark.parametrize(
    ("low", "high", "answer"), [(0.9, 1.0, HOLDS), (0.899, 1.0, OPEN), (0.1, 0.9, OPEN), (0.1, 0.899, FAILS)]
)
def test_the_rest_is_left_alone_at_ninety_percent(low, high, answer):
    gate = g.leaves_the_rest_alone(share(low, high), 100)
    assert gate.answer is answer
    assert (gate.name, gate.bound) == ("leaves the rest alone", 0.9)
    said = f"right on {gate.value:.3f} [{low:.3f}, {high:.3f}] of the pairs that keep the variable"
    ends = {HOLDS: "", FAILS: ", below 90%", OPEN: ": whether that is 90% or more is open"}
    assert gate.sentence == said + ends[answer]


@pytest.mark.parametrize(
    ("low", "high", "answer"), [(-0.049, 0.01, HOLDS), (-0.05, 0.01, OPEN), (-0.3, -0.049, OPEN), (-0.3, -0.05, FAILS)]
)
def test_reading_from_used_directions_may_cost_five_points(low, high, answer):
    gate = g.reads_what_is_used(span(low, high), 3, 16)
    assert gate.answer is answer
    assert (gate.name, gate.bound) == ("reads what is used", -0.05)
    said = {HOLDS: "changes by ", FAILS: "falls: ", OPEN: "may fall by more than 0.05: "}[answer]
    numbers = f"{gate.value:+.3f} [{low:+.3f}, {high:+.3f}]"
    assert (
        gate.sentence
        == f"rebuilt from the 3 of 16 directions that are used later, its share of right pairs {said}{numbers}"
    )


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
    assert gate.name == "compact"
    assert f"{size} of 16 dimensions" in gate.sentence


def test_compact_says_what_it_fell_short_of():
    whole = g.compact(16, 16, GOOD, GOOD)
    assert (whole.value, whole.low, whole.high, whole.bound) == (16, 16, 16, 16)
    assert whole.sentence == "uses 16 of 16 dimensions"
    lost = g.compact(4, 16, BAD, GOOD)
    assert (lost.low, lost.bound) == (BAD.low, -0.02)
    assert lost.sentence == "4 of 16 dimensions; to the full patch -0.200 [-0.300, -0.100]"
    anywhere = g.compact(4, 16, GOOD, UNSURE)
    assert (anywhere.low, anywhere.bound) == (UNSURE.low, 0.0)
    assert anywhere.sentence == "4 of 16 dimensions; to random ones +0.000 [-0.100, +0.100]"
    assert "full patch" in g.compact(4, 16, UNSURE, UNSURE).sentence
    assert g.compact(17, 16, GOOD, GOOD).fails


def test_how_many_more_inputs_would_decide():
    # half widths shrink with the root: to bring 0.2 down to 0.1 takes four times as many
    assert g.beats("x", Interval(0.15, -0.05, 0.35, 100)).more == pytest.approx(4.0)
    # and likewise to bring the upper end down to the bound
    assert g.beats("x", Interval(-0.05, -0.25, 0.25, 100)).more == pytest.approx(9.0)
    # a rule-of-three width shrinks with the number itself: 3/10 down to 0.1
    unseen = at_most(0.0, 10)
    assert g.leaves_the_rest_alone(Accuracy(1.0, 10, 1 - unseen, 1.0), 10).more == pytest.approx(10 * unseen)
    assert math.isinf(g.beats("x", Interval(0.05, -0.1, 0.2, 100)).more)
    assert math.isinf(g.beats("x", Interval(0.05 + 1e-17, -0.1, 0.2, 100)).more)
    assert math.isinf(g.none_better(5, Interval(-1e-200, -0.1, 0.2, 100)).more)  # its square would be no number
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


def status(small: Answer = HOLDS, in_part: bool = False, **answers: Answer) -> Status:
    return decide(*table(**answers), replace(SMALL, answer=small), in_part)


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
    for name in (*CONTROLS, "leaves the rest alone"):  # it may be there in part or not at all
        assert status(**{"works": FAILS, name: OPEN}) is Status.UNDECIDED


def test_the_rebuilt_handle_decides_about_a_part_where_the_handle_leaves_it_open():
    part = {"in_part": True}
    assert status(**part) is Status.COMPACT
    assert status(works=OPEN, **part) is Status.UNDECIDED  # what it reads is used: it may work as it is
    for reads in (OPEN, FAILS):
        assert status(**{"works": OPEN, "reads what is used": reads}, **part) is Status.IN_PART
        assert status(**{"works": FAILS, "reads what is used": reads}, **part) is Status.IN_PART
        assert status(**{"works": FAILS, "reads what is used": reads, "beats random places": FAILS}, **part) is (
            Status.ABSENT
        )
    assert status(**{"works": FAILS, "beats random places": OPEN}, **part) is Status.IN_PART
    assert status(**{"works": FAILS, "reads what is used": OPEN}) is Status.UNDECIDED


def test_a_reading_that_nothing_uses_is_decodable_only():
    assert status(**{"reads what is used": FAILS}) is Status.DECODABLE
    assert status(**{"reads what is used": FAILS, "works": FAILS}) is Status.DECODABLE
    assert status(**{"reads what is used": FAILS, "beats random places": OPEN}) is Status.DECODABLE


@pytest.mark.parametrize("name", [*CONTROLS, *REST])
def test_one_open_gate_leaves_it_undecided(name):
    assert status(**{name: OPEN}) is Status.UNDECIDED


# -- over all inputs ---------------------------------------------------------------------------------------------

RANK = {FAILS: 0, OPEN: 1, HOLDS: 2}
GATES = {
    "beats": lambda x: g.beats("x", x),
    "none better": lambda x: g.none_better(5, x),
    "works": lambda x: g.works(Accuracy(x.value, 100, x.low, x.high), x.bases),
    "rest": lambda x: g.leaves_the_rest_alone(Accuracy(x.value, 100, x.low, x.high), x.bases),
    "reads": lambda x: g.reads_what_is_used(x, 1, 2),
    "compact": lambda x: g.compact(1, 2, x, x),
}
ends = st.lists(st.floats(-1, 1), min_size=3, max_size=3).map(sorted)


@pytest.mark.parametrize("name", GATES)
@settings(deadline=None)
@given(ends, st.lists(st.floats(0, 0.5), min_size=3, max_size=3).map(sorted), st.integers(20, 500))
def test_a_gate_never_answers_worse_for_an_interval_further_up(name, at, up, bases):
    low, value, high = at
    moved = Interval(value + up[1], low + up[1], high + up[1], bases)
    before, after = (GATES[name](x) for x in (Interval(value, low, high, bases), moved))
    assert RANK[after.answer] >= RANK[before.answer]


@pytest.mark.parametrize("name", [n for n in GATES if n != "none better"])
@settings(deadline=None)
@given(ends, st.floats(0, 0.5), st.integers(20, 500))
def test_a_wider_interval_never_decides_what_a_narrower_one_left_open(name, at, more, bases):
    low, value, high = at
    narrow, wide = (GATES[name](Interval(value, low - m, high + m, bases)) for m in (0.0, more))
    assert wide.answer in (narrow.answer, OPEN)
    assert narrow.more >= 1.0
    if name != "compact":  # which asks the first of two conditions that is open
        assert wide.more >= narrow.more or wide.answer is not OPEN


@settings(deadline=None)
@given(st.floats(-1, 1), st.floats(0.01, 1), st.integers(20, 500))
def test_the_number_of_inputs_that_is_asked_for_decides(value, width, bases):
    """With widths that shrink with the square root of the number of inputs, just more than that many decide."""
    gate = g.beats("x", Interval(value, value - width, value + width, bases))
    if gate.answer is OPEN and 1.0 < gate.more < 1e6 and not math.isclose(width, 3 / bases, rel_tol=1e-3):
        shrunk = width / math.sqrt(gate.more * 1.001)
        assert g.beats("x", Interval(value, value - shrunk, value + shrunk, bases)).answer is not OPEN


@settings(deadline=None)
@given(st.tuples(*[st.sampled_from(Answer)] * (len(CONTROLS) + len(REST))), st.sampled_from(Answer))
def test_every_combination_of_answers_has_one_status_and_placed_needs_every_gate(answers, small):
    names = dict(zip((*CONTROLS, *REST), answers, strict=True))
    found = status(small=small, **names)
    controls = [names[n] for n in CONTROLS]
    assert found.found == all(a is HOLDS for a in answers)
    assert (found is Status.COMPACT) == (found.found and small is HOLDS)
    if found is Status.IN_PART:
        assert all(a is HOLDS for a in controls)
        assert names["works"] is FAILS
        assert names["leaves the rest alone"] is not FAILS
    if found is Status.UNDECIDED:
        assert {n for n, a in names.items() if a is FAILS} <= {"works"}
        assert OPEN in answers
    if found in (Status.ABSENT, Status.DECODABLE, Status.IN_PART):
        assert FAILS in answers
    assert found is not Status.OUTPUT


def test_statuses_and_answers_are_their_texts():
    assert [str(a) for a in Answer] == ["holds", "fails", "cannot say"]
    assert [s for s in Status if s.found] == [Status.PLACED, Status.COMPACT]
    assert Status("undecidable") is Status.UNDECIDED  # what older runs call it
    assert [str(s) for s in Status] == [s.value for s in Status]
    assert len({s.meaning for s in Status}) == len(Status)
    with pytest.raises(ValueError, match="perhaps"):
        Status("perhaps")
