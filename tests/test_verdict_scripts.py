"""Each condition of a verdict by itself: everything else is met, and one number decides what is said."""

import itertools
import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from plot_ot.abstract.banks import Bank, first_of_each, row_codes
from plot_ot.errors import PlotError
from plot_ot.judging.bench import RANDOM_AT_ONCE, RANDOM_HANDLES, _swapped_alone
from plot_ot.judging.controls import Score
from plot_ot.judging.status import Status
from plot_ot.judging.verdict import SUBSPACES, Verdict, _wanted
from scripted import CAUSAL, Court, Script, court, right_on

ABSENT, PLACED, COMPACT, IN_PART = Status.ABSENT, Status.PLACED, Status.COMPACT, Status.IN_PART
DECODABLE, UNDECIDED = Status.DECODABLE, Status.UNDECIDED
SOURCE, PLACES, HANDLES = "beats copying the source", "beats random places", "beats random handles"
BETTER, WORKS, REST, READS = "no random handle does better", "works", "leaves the rest alone", "reads what is used"
STAYS = "stays where nothing shows"
SHUFFLED, FRESH = "beats shuffled values", "beats a re-initialised network"


@pytest.fixture(scope="module")
def bench():
    with pytest.MonkeyPatch.context() as m:
        yield court(m)


def flat(value: float, bases: int = 400) -> Score:
    return Score(value, np.full(1000, value), bases)


def test_everything_met_is_placed_and_compact_and_every_gate_is_in_the_table(bench):
    verdict = bench.verdict(shuffled=(flat(0.5),), reinitialised=(flat(0.4),))
    assert verdict.status is COMPACT
    names = [SOURCE, PLACES, HANDLES, BETTER, SHUFFLED, FRESH, STAYS, WORKS, REST, READS, "compact"]
    assert [gate.name for gate in verdict.gates] == names
    assert all(gate.holds for gate in verdict.gates)
    assert verdict.notes == ()


@pytest.mark.parametrize(
    ("changes", "status", "gate"),
    [
        # no control may come within 0.05 of the handle
        ({"copied": 0.97}, ABSENT, SOURCE),
        ({"copied": 0.95}, UNDECIDED, SOURCE),
        ({"copied": 0.9}, COMPACT, None),
        ({"handle": 0.7, "patch": 0.69, "elsewhere": 0.69, "rebuilt": 0.7}, ABSENT, PLACES),
        ({"patch": 0.98, "elsewhere": 0.96}, UNDECIDED, PLACES),  # the variable is at the other place, too
        ({"patch": 0.2, "elsewhere": 0.98}, COMPACT, None),  # on average, not at the best place
        ({"handle": 0.7, "random": 0.69, "rebuilt": 0.7}, ABSENT, HANDLES),
        ({"random": 0.97}, UNDECIDED, HANDLES),  # random handles carry it, too
        ({"random": 0.95}, UNDECIDED, HANDLES),
        ({"handle": 0.9, "random": [0, 0, 0, 0.97, 0]}, ABSENT, BETTER),
        ({"shuffled": (flat(0.97),)}, ABSENT, SHUFFLED),
        ({"shuffled": (flat(0.9),)}, COMPACT, None),
        ({"reinitialised": (flat(0.97),)}, ABSENT, FRESH),
        ({"shuffled": (flat(0.6), flat(1.0), flat(1.0))}, COMPACT, None),  # their mean counts
        # a handle must work on 80 % and leave 90 % alone, with the whole interval
        ({"handle": 0.9}, COMPACT, None),
        ({"handle": 0.82}, UNDECIDED, WORKS),
        ({"handle": 0.78}, UNDECIDED, WORKS),
        ({"handle": 0.7}, IN_PART, WORKS),
        ({"handle": 0.7, "alone": 0.5}, IN_PART, WORKS),
        ({"handle": 0.7, "kept": 0.95, "still": 0.95, "alone": 1.0}, ABSENT, "does more than swap a"),
        ({"kept": 0.95}, COMPACT, None),
        ({"kept": 0.91}, UNDECIDED, REST),
        ({"kept": 0.85}, ABSENT, REST),
        ({"kept": 0.5}, ABSENT, REST),
        # in part needs every control beaten for sure
        ({"handle": 0.7, "copied": 0.65, "rebuilt": 0.7}, UNDECIDED, SOURCE),
        ({"handle": 0.7, "random": 0.65, "rebuilt": 0.7}, UNDECIDED, HANDLES),
        ({"handle": 0.7, "copied": 0.69, "rebuilt": 0.7}, ABSENT, SOURCE),
        # by the handle, or by what is left of it when it is made of what is used
        ({"handle": 0.6, "copied": 0.53, "rebuilt": 0.7}, IN_PART, WORKS),
        ({"handle": 0.7, "rebuilt": 0.55}, IN_PART, READS),
        ({"handle": 0.79, "rebuilt": 0.7}, IN_PART, READS),
        ({"handle": 0.7, "rebuilt": 0.36}, DECODABLE, READS),  # less than half of it, or nearly
        ({"handle": 0.7, "rebuilt": 0.55, "copied": 0.5}, DECODABLE, READS),
        # rebuilt from what is used it may lose 0.05
        ({"rebuilt": 0.97}, COMPACT, None),
        ({"handle": 0.86, "rebuilt": 0.82}, UNDECIDED, READS),
        ({"rebuilt": 0.82}, DECODABLE, READS),
        # or more, where it passes every gate by itself
        ({"rebuilt": 0.95}, COMPACT, None),
        ({"rebuilt": 0.9}, COMPACT, None),
        ({"rebuilt": 0.9, "copied": 0.88}, DECODABLE, READS),
        ({"rebuilt": 0.9, "shuffled": (flat(0.93),)}, DECODABLE, READS),
        ({"handle": 0.9, "rebuilt": 0.7}, DECODABLE, READS),
        # compact is a word about size only
        ({"handle": 0.95, "patch": 1.0, "elsewhere": 0.0}, PLACED, None),
        ({"handle": 0.998, "patch": 1.0, "elsewhere": 0.0}, COMPACT, None),
        ({"subspace": 1.0}, PLACED, None),
        ({"handle": 0.9, "subspace": 0.86}, COMPACT, None),  # pair by pair, not on average
        ({"size": 4}, PLACED, None),
        ({"size": 3}, COMPACT, None),
    ],
)
def test_one_number_decides(bench, changes, status, gate):
    verdict = bench.verdict(**changes)
    assert verdict.status is status
    missed = [x.name for x in verdict.gates if not x.holds and x.name != "compact"]
    if gate is None:
        assert missed == []
    else:
        assert gate in missed
        if status is not ABSENT:
            assert verdict.gate(gate).fails == (status is not UNDECIDED)


def test_a_handle_that_also_reads_what_is_not_used_says_so(bench):
    verdict = bench.verdict(rebuilt=0.9)
    reads, low = verdict.gate(READS), verdict.evidence["read_from_used"]
    assert reads.high < -0.05
    assert f"even so it passes every other gate, right on {low:.3f} [" in reads.sentence
    assert [n for n in verdict.notes if "hardly used later" in n and reads.sentence in n]
    for little in (0.97, 0.95):  # it loses nothing, or perhaps nothing
        assert not [n for n in bench.verdict(rebuilt=little).notes if "hardly used later" in n]


def test_only_discriminating_pairs_count(bench):
    on_them = bench.verdict(handle=lambda bank: bank.discriminating("left"))
    assert on_them.status is COMPACT
    assert on_them.evidence["handle"] == 1.0
    assert on_them.evidence["discriminating"] == int(bench.sensitivity.bank.discriminating("left").sum())
    # where `right` is 1 the answer stays as it is: being right on such pairs alone is worth nothing
    sensitive = bench.sensitivity.bank
    assert 0.1 < float(sensitive.discriminating("left").double().mean()) < 0.95
    others = bench.verdict(handle=lambda bank: ~bank.discriminating("left"))
    assert others.evidence["handle"] == 0.0
    assert others.status is ABSENT


def one_family(bank: Bank) -> torch.Tensor:
    return bank.family == int(torch.bincount(bank.family).argmax())


def test_families_count_equally_however_many_pairs_they_have(bench):
    """Nine of ten pairs are of one family; a handle that is right on these alone is right on half."""
    bank = bench.sensitivity.bank
    counts = bank.discriminating("left")
    sizes = torch.bincount(bank.family[counts])
    assert int((sizes > 0).sum()) == 2
    small = int(sizes.argmin()) if sizes.min() > 0 else 1 - int(sizes.argmax())
    rare = (bank.family == small).nonzero().squeeze(1)[:120]
    common = (bank.family != small).nonzero().squeeze(1)[:1100]
    skewed = replace(bench, sensitivity=bench.sensitivity.select(torch.cat([common, rare]).sort().values))
    share = float(
        one_family(skewed.sensitivity.bank.select(skewed.sensitivity.bank.discriminating("left"))).double().mean()
    )
    assert share > 0.8
    verdict = skewed.verdict(handle=one_family)
    assert verdict.evidence["handle"] == pytest.approx(0.5)
    assert verdict.status is IN_PART
    # and so does every control, and what is kept
    assert skewed.verdict(random=one_family).evidence["random_mean"] == pytest.approx(0.5)
    assert skewed.verdict(copied=one_family).evidence["copy_source"] == pytest.approx(0.5)
    few = bench.invariance.bank.family
    kinds = [int(k) for k in few.unique()]
    picked = torch.cat([(few == kinds[0]).nonzero().squeeze(1)[:300], (few == kinds[1]).nonzero().squeeze(1)[:30]])
    uneven = replace(bench, invariance=bench.invariance.select(picked))
    assert uneven.verdict(kept=one_family).evidence["invariance"] == pytest.approx(0.5)


@pytest.mark.parametrize("count", [9, 10])
def test_fewer_than_ten_pairs_that_tell_from_the_source_leave_it_undecided(bench, count):
    bank = bench.sensitivity.bank
    telling = bank.discriminating("left") & (bank.labels["left"] != bank.source_answer)
    rest = (bank.labels["left"] == bank.source_answer).nonzero().squeeze(1)
    some = torch.cat([telling.nonzero().squeeze(1)[:count], rest])
    verdict = replace(bench, sensitivity=bench.sensitivity.select(some)).verdict()
    too_few = f"too few pairs where the counterfactual answer is not the source's ({count})"
    assert (too_few in verdict.sentence) == (count < 10)
    if count < 10:
        assert verdict.status is UNDECIDED
        assert verdict.gates == ()
        assert verdict.evidence == {"discriminating": bench.sensitivity.bank.select(some).power("left").discriminating}


@pytest.mark.parametrize("count", [19, 20])
def test_placed_needs_twenty_different_base_inputs(bench, count):
    """Each of so many base inputs has pairs of both families: counted once they are 19 or 20."""
    bank = bench.sensitivity.bank
    telling, group = bank.discriminating("left"), bank.base_groups()
    kinds = bank.family[telling].unique().tolist()
    assert len(kinds) == 2
    both = [
        g
        for g in group.unique().tolist()
        if all(bool((telling & (group == g) & (bank.family == k)).any()) for k in kinds)
    ]
    pairs = telling & torch.isin(group, torch.tensor(both[:count]))
    verdict = replace(bench, sensitivity=bench.sensitivity.select(pairs)).verdict()
    assert verdict.evidence["base_inputs"] == count
    gate = verdict.gate(WORKS)
    assert gate.holds == (count == 20)
    assert ("only 19 base inputs (20 are needed)" in gate.sentence) == (count == 19)


# -- random handles ------------------------------------------------------------------------------------------------


def drawn(bench: Court, **changes: object) -> tuple[list[int], Verdict]:
    script = Script(**changes)
    return script.drawn, bench.verdict(script)


def test_random_handles_are_drawn_until_their_gates_answer(bench):
    assert (RANDOM_AT_ONCE, RANDOM_HANDLES, SUBSPACES) == (5, 20, 20)
    once, verdict = drawn(bench)
    assert once == list(range(5))  # never fewer, although one would do
    assert verdict.evidence["random_handles"] == 5
    assert "5 random handles" in verdict.gate(BETTER).sentence
    open_to_the_end, verdict = drawn(bench, random=2 * [1.0, 1.0, 1.0, 0.0, 1.0, 1.0, 1.0, 1.0, 0.2, 1.0])
    assert open_to_the_end == list(range(20))
    assert verdict.evidence["random_handles"] == 20
    assert verdict.status is UNDECIDED
    alike, verdict = drawn(bench, random=0.95)  # all alike: the pairs are too few, more handles would not tell
    assert alike == list(range(5))
    assert verdict.status is UNDECIDED
    refused, verdict = drawn(bench, copied=0.97, random=4 * [1.0, 1.0, 1.0, 0.0, 1.0])  # the answer is no without them
    assert refused == list(range(5))
    assert verdict.status is ABSENT
    lost, verdict = drawn(bench, random=1.0)
    assert lost == list(range(5))
    assert verdict.status is UNDECIDED
    assert "Not more pairs but other places would decide" in verdict.sentence


def test_a_verdict_that_waits_for_other_gates_draws_only_the_first_random_handles(bench):
    """Whether the handle works is open: no number of random handles below it can make the verdict a yes."""
    far = 4 * [0.74, 0.74, 0.74, 0.0, 0.74]
    some, verdict = drawn(bench, handle=0.8, random=far)
    assert some == list(range(5))
    assert verdict.status is UNDECIDED
    assert not verdict.gate(WORKS).holds
    assert not verdict.gate(HANDLES).holds  # five are too few to say, and that is told
    near, _ = drawn(bench, handle=0.8, random=4 * [0.9, 0.7, 0.7, 0.0, 0.7])  # one may be better, which would be a no
    assert len(near) > 5
    level, _ = drawn(bench, handle=0.8, random=4 * [0.79, 0.79, 0.79, 0.66, 0.79])  # less than the margin behind
    assert len(level) > 5


def test_which_handles_were_drawn_is_part_of_the_interval(bench):
    """Of five handles four are always right and one never is: their mean is 0.8 give or take what five draws give."""
    some, verdict = drawn(bench, random=[1.0, 1.0, 1.0, 0.0, 1.0] + 5 * [0.0])
    assert some == list(range(10))  # after five the mean may be anything, after ten it is low
    gate = verdict.gate(HANDLES)
    assert gate.value == pytest.approx(0.6)
    # the mean of ten draws from four ones and six zeros
    assert gate.high - gate.low == pytest.approx(2 * 1.96 * (0.24 / 10) ** 0.5, rel=0.1)
    assert verdict.evidence["random_best"] == 1.0
    assert verdict.evidence["random_mean"] == pytest.approx(0.4)


def test_the_pairs_are_part_of_that_interval_as_well(bench):
    _, verdict = drawn(bench, handle=0.9, random=0.4)
    pairs = verdict.gate(HANDLES)
    plain = verdict.gate(SOURCE)
    assert pairs.value == pytest.approx(0.5, abs=0.02)
    assert pairs.high - pairs.low > 1.2 * (plain.high - plain.low)  # of 0.9 - 0.4 and of 0.9 - 0


def test_twenty_random_subspaces_and_the_two_patches_are_tried_once_each(bench):
    script = Script()
    bench.verdict(script)
    assert script.asked["subspace"] == 20
    assert script.asked["elsewhere"] == 1
    assert script.asked["read_from_used"] == 1


# -- what is not asked, or cannot be ---------------------------------------------------------------------------------


def test_what_a_handle_reads_is_asked_only_where_no_control_has_said_no(bench):
    for changes, asked in (({"copied": 1.0}, 0), ({"kept": 0.5}, 0), ({"handle": 0.7}, 1), ({"handle": 0.82}, 1)):
        script = Script(**changes)
        verdict = bench.verdict(script)
        assert script.asked.get("read_from_used", 0) == asked
        assert (READS in [gate.name for gate in verdict.gates]) == bool(asked)
        assert ("read_from_used" in verdict.evidence) == bool(asked)


def test_a_reading_through_an_encoder_is_noted_and_not_tested(bench):
    verdict = bench.verdict(rebuilt=None)
    assert verdict.status is COMPACT
    assert READS not in [gate.name for gate in verdict.gates]
    assert verdict.notes == ("it reads through an encoder, so whether that reading is used later was not tested",)


def test_controls_that_were_not_found_have_no_gate_and_no_number(bench):
    verdict = bench.verdict()
    assert not {SHUFFLED, FRESH} & {gate.name for gate in verdict.gates}
    assert not {"shuffled", "reinitialised", "score"} & set(verdict.evidence)
    no_pairs = replace(bench, invariance=bench.sensitivity.select(bench.sensitivity.bank.discriminating("left")))
    assert SHUFFLED not in [gate.name for gate in no_pairs.verdict(shuffled=(flat(0.9),)).gates]


def test_scores_of_controls_are_compared_with_the_handles_own_score(bench):
    verdict = bench.verdict(handle=0.9, kept=0.96, shuffled=(flat(0.3), flat(0.5, 50)), reinitialised=(flat(0.2),))
    own = verdict.evidence["score"]
    assert own == pytest.approx(0.93, abs=0.01)
    assert (verdict.evidence["shuffled"], verdict.evidence["reinitialised"]) == (pytest.approx(0.4), 0.2)
    assert verdict.gate(SHUFFLED).value == pytest.approx(own - 0.4)
    assert verdict.gate(FRESH).value == pytest.approx(own - 0.2)
    # both vary as the handle's own score does
    widths = [verdict.gate(name).high - verdict.gate(name).low for name in (SHUFFLED, FRESH)]
    assert widths[0] == pytest.approx(widths[1])
    assert 0.01 < widths[0] < 0.1


def test_the_numbers_behind_a_verdict(bench):
    verdict = bench.verdict(
        handle=0.9, kept=0.96, copied=0.1, patch=0.6, elsewhere=0.2, random=0.3, subspace=0.15, rebuilt=0.88
    )
    numbers = verdict.evidence
    near = {"handle": 0.9, "invariance": 0.96, "copy_source": 0.1, "random_mean": 0.3, "random_best": 0.3}
    near |= {"random_places": 0.2, "random_subspace": 0.15, "full_patch": 0.6, "read_from_used": 0.88}
    for name, value in near.items():
        assert numbers[name] == pytest.approx(value, abs=0.02), name
    counts = bench.sensitivity.bank.discriminating("left")
    exact = {"size": 1, "width": 4, "random_handles": 5, "discriminating": int(counts.sum())}
    exact["keeping"] = len(bench.invariance.bank)
    exact["base_inputs"] = len(bench.sensitivity.bank.select(counts).base.unique(dim=0))
    assert {name: numbers[name] for name in exact} == exact
    assert numbers["handle_low"] < numbers["handle"] < numbers["handle_high"]
    assert numbers["invariance_low"] < numbers["invariance"]
    assert verdict.accuracy == numbers["handle"]
    assert verdict.interval == (numbers["handle_low"], numbers["handle_high"])
    assert verdict.gate("compact").value == pytest.approx(numbers["handle"] - numbers["full_patch"])
    assert verdict.gate(READS).value == pytest.approx(numbers["read_from_used"] - numbers["handle"])


# -- what is said -----------------------------------------------------------------------------------------------------


def numbers_of(verdict: Verdict) -> str:
    n = verdict.evidence
    return (
        f"f {n['discriminating']} discriminating test pairs, the handle is right on {n['handle']:.3f} "
        f"[{n['handle_low']:.3f}, {n['handle_high']:.3f}], patching the whole place on {n['full_patch']:.3f}, copying "
        f"the source on {n['copy_source']:.3f}, random handles on {n['random_mean']:.3f}; of {n['keeping']} test pairs "
        f"that keep the variable, the handle leaves {n['invariance']:.3f} right."
    )


def test_the_sentence_of_every_status(bench):
    compact = bench.verdict()
    assert compact.sentence == f"left: placed in layer1, compact in 1 of 4 dimensions; o{numbers_of(compact)}"
    placed = bench.verdict(size=4)
    assert placed.sentence == f"left: placed in layer1; o{numbers_of(placed)}"
    part = bench.verdict(handle=0.6, copied=0.2, rebuilt=0.6)
    n = part.evidence
    best = max(n["copy_source"], n["random_places"])
    assert part.sentence == (
        f"left: in part in layer1: the handle beats every control but is right on only {n['handle']:.0%} of the "
        f"discriminating pairs [{n['handle_low']:.0%}, {n['handle_high']:.0%}]; it closes "
        f"{(n['handle'] - best) / (1 - best):.0%} of the gap between the best control and always right. "
        f"O{numbers_of(part)}"
    )
    absent = bench.verdict(copied=0.99, kept=0.5)
    reasons = f"{absent.gate(SOURCE).sentence}; {absent.gate(REST).sentence}"
    assert absent.sentence == f"left: not localized here (layer1): {reasons}. O{numbers_of(absent)}"
    # in part or not at all: what did not hold is the reason
    doubt = bench.verdict(handle=0.7, copied=0.65, rebuilt=0.7)
    assert doubt.status is UNDECIDED
    assert doubt.gate(WORKS).fails
    assert doubt.sentence.startswith(
        f"left: undecided with these pairs (layer1): the handle does not carry the whole variable (it is right on at "
        f"most {doubt.evidence['handle_high']:.0%} of the discriminating pairs), and whether it carries a part of it "
        f"is open: {doubt.gate(SOURCE).sentence}"
    )
    rest = bench.verdict(handle=0.7, rebuilt=0.55)
    said = "in part in layer1: rebuilt from what is used later, the handle beats every control but is right on only"
    assert f"{said} {rest.evidence['read_from_used']:.0%} of" in rest.sentence
    decodable = bench.verdict(rebuilt=0.5)
    assert decodable.sentence == (
        f"left: decodable here, not used here (layer1): {decodable.gate(READS).sentence}. O{numbers_of(decodable)}"
    )
    undecided = bench.verdict(handle=0.82, kept=0.91)
    more = max(undecided.gate(name).more for name in (WORKS, REST))
    assert 1.5 < more < 100
    assert undecided.sentence == (
        f"left: undecided with these pairs (layer1): {undecided.gate(WORKS).sentence}; "
        f"{undecided.gate(REST).sentence}. About {more:.2g} times as many base inputs would decide. "
        f"O{numbers_of(undecided)}"
    )
    assert str(undecided) == undecided.sentence


def test_a_rebuilt_handle_shows_a_part_only_if_it_keeps_half_of_what_the_handle_did(bench):
    low = dict.fromkeys(("copied", "random", "patch", "elsewhere"), 0.05)
    said = [bench.verdict(handle=0.7, rebuilt=rebuilt, **low).status for rebuilt in (0.45, 0.3)]
    assert said == [IN_PART, DECODABLE]


def test_a_rebuilt_handle_that_only_swaps_a_part_of_the_variable_shows_no_part_of_it(bench):
    """The handle itself is right on pairs of every kind; what is left of it, only where swapping `a` alone would do."""

    def where_a_is_enough(bank: Bank) -> torch.Tensor:
        pairs, alone = _swapped_alone(bank, "a")
        right = torch.zeros(len(bank), dtype=torch.bool)
        right[pairs] = alone == bank.labels["left"][pairs]
        return right

    plain = bench.verdict(handle=0.75, rebuilt=0.6)
    assert plain.status is IN_PART
    told = bench.verdict(handle=0.75, rebuilt=where_a_is_enough)
    assert 0.4 < told.evidence["read_from_used"] < 0.75
    assert told.gate(READS).fails
    assert told.status is DECODABLE


def test_the_gap_that_a_handle_closes_counts_from_the_best_control(bench):
    for best in ("copied", "random", "patch"):
        shares = {"copied": 0.1, "random": 0.1, "patch": 0.1, "elsewhere": 0.1} | {best: 0.4}
        if best == "patch":
            shares["elsewhere"] = 0.4
        verdict = bench.verdict(handle=0.7, **shares)
        assert verdict.status is IN_PART
        top = max(verdict.evidence[name] for name in ("copy_source", "random_mean", "random_places"))
        assert top == pytest.approx(0.4, abs=0.03)
        closed = (verdict.evidence["handle"] - top) / (1 - top)
        assert f"it closes {closed:.0%} of the gap" in verdict.sentence


def test_how_many_more_inputs_would_decide_is_said_in_words():
    assert _wanted(1.0) == "About 1.5 times as many base inputs would decide."
    assert _wanted(1.6) == "About 1.6 times as many base inputs would decide."
    assert _wanted(100) == "About 1e+02 times as many base inputs would decide."
    hardly = "More pairs of this kind would hardly decide it: the handle lies almost exactly at the bound."
    assert _wanted(101) == _wanted(float("inf")) == hardly


# -- output variables -------------------------------------------------------------------------------------------------


def test_of_an_output_variable_the_earliest_place_that_sets_it_is_named():
    with pytest.MonkeyPatch.context() as m:
        outputs = court(m, "y", CAUSAL.__class__(CAUSAL.inputs, CAUSAL.mechanisms, "y", ["y"]), size=200)
        said = "y: an output variable (its label always equals the source's answer); copying it proves nothing."
        first = outputs.verdict(variable="y", patch=0.95, elsewhere=1.0)
        assert first.status is Status.OUTPUT
        assert first.evidence["pairs"] == 200
        assert (
            f"{said} The earliest place that sets it when patched whole is layer1: the answer is right on 0.9"
            in first.sentence
        )
        second = outputs.verdict(variable="y", patch=0.85, elsewhere=1.0)
        assert second.sentence == (
            f"{said} The earliest place that sets it when patched whole is layer2: the answer is right on 1.000 of "
            f"{second.evidence['pairs']} test pairs."
        )
        assert second.evidence["patch"] == 1.0
        none = outputs.verdict(variable="y", patch=0.6, elsewhere=0.3)
        assert none.sentence == (
            f"{said} No place patched whole sets it on 90% of calibration pairs (at best layer1: on "
            f"{none.evidence['patch']:.3f} of {none.evidence['pairs']} test pairs)."
        )
        assert none.evidence["patch"] == pytest.approx(0.6, abs=0.05)
        assert none.gates == ()


# -- rows and notes ---------------------------------------------------------------------------------------------------


def test_a_verdict_survives_a_file(bench):
    for changes in ({}, {"rebuilt": None}, {"handle": 0.82}, {"copied": 1.0}):
        verdict = bench.verdict(**changes).with_notes(["look out"])
        assert verdict.gates
        assert verdict.notes[-1] == "look out"
        row = json.loads(json.dumps(verdict.as_row()))
        again = Verdict.from_row(row)
        assert again == verdict
        assert again.status is verdict.status
        assert [gate.answer for gate in again.gates] == [gate.answer for gate in verdict.gates]
    old = {k: v for k, v in row.items() if k not in ("gates", "notes")} | {"status": "undecidable"}
    assert Verdict.from_row(old).status is UNDECIDED
    assert (Verdict.from_row(old).gates, Verdict.from_row(old).notes) == ((), ())


def test_notes_are_in_the_sentence_and_add_up(bench):
    verdict = bench.verdict(rebuilt=None)
    assert verdict.with_notes([]) is verdict
    noted = verdict.with_notes(["one", "two"])
    assert noted.sentence == f"{verdict.sentence} Note: one. Note: two."
    assert noted.notes == (*verdict.notes, "one", "two")
    assert noted.with_notes(["three"]).notes[-3:] == ("one", "two", "three")


def test_a_gate_is_asked_for_by_its_name(bench):
    verdict = bench.verdict()
    assert verdict.gate("works").name == "works"
    with pytest.raises(PlotError, match="wroks"):
        verdict.gate("wroks")
    bare = Verdict("x", UNDECIDED, "x: undecided.", {})
    assert bare.accuracy is None
    assert bare.interval is None


@pytest.mark.parametrize(("still", "status"), [(0.5, ABSENT), (0.9, UNDECIDED), (1.0, COMPACT)])
def test_a_handle_that_moves_answers_which_should_stay_is_not_placed(bench, still, status):
    verdict = bench.verdict(still=still)
    assert verdict.status is status
    assert verdict.gate(STAYS).bound == 0.9


@pytest.mark.parametrize(
    ("bases", "still", "gates"), [(19, 0.0, 0), (25, 0.0, 1), (25, 0.95, 0), (25, 1.0, 0), (29, 1.0, 0), (30, 1.0, 1)]
)
def test_few_inputs_whose_answer_should_stay_can_only_say_no(bench, bases, still, gates):
    """Nobody can show 90 % on fewer than 30 inputs: that must leave nothing undecided."""
    bank = bench.sensitivity.bank
    unseen = bank.unseen("left").nonzero()[:, 0]
    unseen = unseen[bank.family[unseen] == bank.family[unseen].mode().values]  # inputs of one family count in full
    first = first_of_each(row_codes(bank.base[unseen]))[:bases]
    kept = torch.cat([bank.discriminating("left").nonzero()[:, 0], unseen[first]])
    few = replace(bench, sensitivity=bench.sensitivity.select(kept))
    verdict = few.verdict(still=still)
    assert sum(gate.name == STAYS for gate in verdict.gates) == gates
    assert verdict.status is (ABSENT if gates and not still else COMPACT)


# -- what looks with few pairs need not ask ---------------------------------------------------------------------------


def test_what_waits_for_pairs_can_be_no_yes_whatever_the_controls_say(bench):
    """Every answer that controls could help to bring about, placed, in part or decodable, is asked for."""
    few = replace(bench, sensitivity=bench.sensitivity.select(torch.arange(300)))
    waiting, found = [], []
    for handle, rebuilt, kept in itertools.product(
        (0.6, 0.78, 0.86, 1.0), (None, 0.5, 0.78, 0.98, 1.0), (0.8, 0.9, 1.0)
    ):
        script = {"handle": handle, "rebuilt": rebuilt, "kept": kept}
        waits, without = few.spared(**script)
        verdict = few.verdict(**script)
        if without is not None:
            assert not {HANDLES, BETTER, "compact"} & {gate.name for gate in without.gates}
        if waits:
            assert verdict.status is UNDECIDED, script
            waiting.append(script)
        found += [script] if verdict.status.found or verdict.status is DECODABLE else []
        if verdict.status is ABSENT:
            assert without is not None, script  # no control is better than its share of 0 here
            assert without.status is ABSENT
    assert len(waiting) >= 5
    assert len(found) >= 5


@pytest.mark.parametrize(
    ("script", "status"),
    [
        ({}, COMPACT),
        ({"handle": 0.5, "rebuilt": 0.5}, IN_PART),  # of itself
        ({"handle": 0.81, "rebuilt": 0.5}, IN_PART),  # whether it works is open; what is made of it shows a part
        # the same, where it is open what it reads: the rebuilt handle is right on other pairs
        ({"handle": 0.81, "rebuilt": lambda bank: ~right_on(bank, 0.3)}, IN_PART),
        ({"handle": 0.98, "rebuilt": 0.94}, COMPACT),  # what it reads is open, and the rebuilt handle works
        ({"handle": 1.0, "rebuilt": 0.0}, DECODABLE),
    ],
)
def test_what_controls_may_make_an_answer_is_not_left_to_wait(bench, script, status):
    waits, _ = bench.spared(**script)
    assert not waits
    assert bench.verdict(**script).status is status


def test_a_rebuilt_handle_that_a_random_place_outdoes_waits(bench):
    """A random handle may be that place: then none of them could show that the rebuilt one is best."""
    open_reading = {"handle": 1.0, "rebuilt": 0.95}
    for patch, waits in ((0.5, False), (1.0, True)):
        verdict = bench.verdict(**open_reading, patch=patch)
        assert verdict.status.found
        waiting, without = bench.spared(**open_reading, patch=patch)
        assert waiting is waits
        # the rebuilt handle passes all that was asked of it: without random handles that is no yes
        assert (without is not None and without.status is UNDECIDED) is waits


def test_a_verdict_without_the_controls_that_need_a_search_says_what_it_knows(bench):
    waits, verdict = bench.spared(handle=0.81)
    assert waits
    assert verdict.status is UNDECIDED
    assert "random handles on" not in verdict.sentence
    [note] = verdict.notes
    assert "asked when more pairs are there" in note
    assert "copying the source on 0.000; of" in verdict.sentence
    assert not {"random_mean", "random_best", "random_handles", "random_subspace"} & set(verdict.evidence)
    assert READS in [gate.name for gate in verdict.gates]
    waits, verdict = bench.spared(copied=1.0)
    assert (waits, verdict.status) == (False, ABSENT)
