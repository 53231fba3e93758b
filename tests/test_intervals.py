"""Intervals: the bootstrap over base inputs against a loop, and what every interval must be."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from plot_ot.abstract.banks import Bank
from plot_ot.judging.intervals import (
    DRAWS,
    ERROR,
    Accuracy,
    Bootstrap,
    Interval,
    at_least,
    at_most,
    independent_inputs,
    missing_at_most,
)
from test_verdict import ROWS, xor_model

FAMILIES = ("a", "b", "c")
LOW, HIGH = ERROR / 2, 1 - ERROR / 2


def bank_of(bases: list[int], families: list[int]) -> Bank:
    """One pair for every entry: its base input and its family."""
    base = ROWS[torch.tensor(bases)]
    source = ROWS[(torch.arange(len(bases)) * 5 + 3) % len(ROWS)]
    family = torch.tensor(families)
    return Bank.from_pairs(xor_model(), base, source, variables=["left"], family=family, families=FAMILIES)


banks = st.lists(st.tuples(st.integers(0, 11), st.integers(0, 2), st.booleans()), min_size=1, max_size=40)


def resampled(bank: Bank, values: list[float], draws: int) -> list[list[tuple[int, float]]]:
    """Every draw as the list of (family, value) of its pairs, each base input taken with all of its pairs."""
    group = bank.base_groups().tolist()
    count = max(group) + 1
    times = np.random.default_rng(0).multinomial(count, [1 / count] * count, size=draws)
    of = list(zip(group, bank.family.tolist(), values, strict=True))
    return [[(f, v) for g, f, v in of for _ in range(drawn[g])] for drawn in times]


@settings(max_examples=20, deadline=None)
@given(banks)
def test_draws_take_base_inputs_with_all_their_pairs_and_weigh_families_equally(pairs):
    bank = bank_of([b for b, _, _ in pairs], [f for _, f, _ in pairs])
    values = [float(v) for _, _, v in pairs]
    mean, drawn = Bootstrap(bank, draws=30).balanced(np.array(values))
    present = sorted({f for _, f, _ in pairs})
    by_family = [[v for (_, f, _), v in zip(pairs, values, strict=True) if f == k] for k in present]
    assert mean == pytest.approx(np.mean([np.mean(v) for v in by_family]))
    for got, sample in zip(drawn, resampled(bank, values, 30), strict=True):
        shares = [np.mean([v for f, v in sample if f == k]) for k in present if any(f == k for f, _ in sample)]
        assert got == pytest.approx(np.mean(shares), abs=1e-6)


@settings(max_examples=20, deadline=None)
@given(banks)
def test_the_interval_of_a_share_lies_around_it_within_zero_and_one_and_is_never_narrower_than_the_rule(pairs):
    bank = bank_of([b for b, _, _ in pairs], [f for _, f, _ in pairs])
    right = torch.tensor([v for _, _, v in pairs])
    boot = Bootstrap(bank)
    behind = [len({b for b, _, _ in pairs}), boot.balanced_bases]
    behind += [len({b for b, f, _ in pairs if f == k}) for k in sorted({f for _, f, _ in pairs})]
    found = [boot.accuracy(right), boot.accuracy(right, balanced=True), *boot.by_family(right).values()]
    for accuracy, bases in zip(found, behind, strict=True):
        assert 0 <= accuracy.low <= accuracy.value + 1e-6
        assert accuracy.value - 1e-6 <= accuracy.high <= 1
        assert accuracy.low <= 1 - min(1, 2.995 / bases) + 1e-9
        assert accuracy.high >= min(1, 2.995 / bases) - 1e-9
    assert [a.pairs for a in found[2:]] == torch.bincount(bank.family)[torch.bincount(bank.family) > 0].tolist()
    assert found[0].pairs == found[1].pairs == len(pairs)


@settings(max_examples=20, deadline=None)
@given(banks, st.data())
def test_the_interval_of_a_difference_is_that_of_its_draws(pairs, data):
    bank = bank_of([b for b, _, _ in pairs], [f for _, f, _ in pairs])
    values = data.draw(st.lists(st.sampled_from([-1.0, 0.0, 1.0]), min_size=len(pairs), max_size=len(pairs)))
    boot = Bootstrap(bank)
    mean, drawn = boot.balanced(np.array(values))
    found = boot.interval(np.array(values))
    assert (found.value, found.bases) == (mean, boot.balanced_bases)
    assert (found.low, found.high) == pytest.approx(tuple(np.quantile(drawn, (LOW, HIGH))))
    assert min(values) <= found.low <= found.high <= max(values)


@settings(max_examples=20, deadline=None)
@given(st.lists(st.sampled_from([-1.0, 0.0, 1.0]), min_size=20, max_size=60))
def test_the_interval_of_a_difference_contains_its_mean(values):
    found = Bootstrap(bank_of(list(range(len(values))), [0] * len(values))).interval(np.array(values))
    assert found.low - 1e-6 <= np.mean(values) == pytest.approx(found.value)
    assert found.value <= found.high + 1e-6


def test_plain_and_familywise_shares_are_those_of_a_loop():
    bases, families = [k % 13 for k in range(40)], [0] * 25 + [1] * 10 + [2] * 5
    values = [float(k % 3 > 0) for k in range(40)]
    bank, boot = bank_of(bases, families), Bootstrap(bank_of(bases, families))
    right = torch.tensor(values).bool()
    drawn = resampled(bank, values, DRAWS)
    plain, mean = boot.accuracy(right), np.mean(values)
    low, high = np.quantile([np.mean([v for _, v in d]) for d in drawn], (LOW, HIGH))
    assert plain.value == pytest.approx(np.mean(values))
    ends = min(low, 1 - at_most(1 - mean, 13)), max(high, at_most(mean, 13))
    assert (plain.low, plain.high) == pytest.approx(ends, abs=1e-6)
    for k, (name, accuracy) in enumerate(boot.by_family(right).items()):
        some = [[v for f, v in d if f == k] for d in drawn]
        low, high = np.quantile([np.mean(v) for v in some if v], (LOW, HIGH))
        count = len({b for b, f in zip(bases, families, strict=True) if f == k})
        mean = np.mean([v for v, f in zip(values, families, strict=True) if f == k])
        assert name == FAMILIES[k]
        assert accuracy.value == pytest.approx(mean)
        ends = min(low, 1 - at_most(1 - mean, count)), max(high, at_most(mean, count))
        assert (accuracy.low, accuracy.high) == pytest.approx(ends, abs=1e-6)


def test_the_ends_of_an_interval_are_the_outer_fortieths_of_a_thousand_draws():
    assert (DRAWS, ERROR) == (1000, 0.05)
    found = Interval.of(0.5, np.linspace(0, 1, 1001), 10_000)
    assert (found.low, found.high, found.value, found.bases) == (
        pytest.approx(0.025),
        pytest.approx(0.975),
        0.5,
        10_000,
    )
    boot = Bootstrap(bank_of(list(range(60)), [0] * 60))
    drawn = boot.balanced(np.arange(60) % 2 + 0.0)[1]
    assert len(drawn) == 1000
    half = boot.accuracy(torch.arange(60) % 2 == 0)
    assert half.low < 0.42 < 0.58 < half.high  # the whole spread of draws, not their middle


@pytest.mark.parametrize(("bases", "unseen"), [(1, 1.0), (2, 1.0), (3, 1.0), (4, 0.75), (60, 0.05), (300, 0.01)])
def test_what_was_never_seen_in_n_inputs_may_still_have_a_share_of_three_in_n(bases, unseen):
    assert at_most(0.0, bases) == pytest.approx(unseen, rel=2e-3)
    # a share has that as its least width at the ends; a difference is as wide as its draws
    flat = Interval.of(0.25, np.full(100, 0.25), bases)
    assert (flat.low, flat.high, flat.bases) == (0.25, 0.25, bases)


def test_a_score_of_zero_has_the_rule_of_threes_upper_bound():
    boot = Bootstrap(bank_of(list(range(60)), [0] * 60))
    none = torch.zeros(60, dtype=torch.bool)
    assert boot.accuracy(none) == Accuracy(0.0, 60, 0.0, at_most(0.0, 60))
    assert boot.accuracy(~none, balanced=True) == Accuracy(1.0, 60, 1 - at_most(0.0, 60), 1.0)
    assert boot.by_family(none) == {"a": Accuracy(0.0, 60, 0.0, at_most(0.0, 60))}


def test_behind_a_mean_over_families_stand_as_many_inputs_as_the_smallest_allows():
    boot = Bootstrap(bank_of([*range(30), 0, 0, 1], [0] * 30 + [2] * 3))
    assert boot.families == ("a", "c")
    assert boot.balanced_bases == 2 * 2
    all_right = torch.ones(33, dtype=torch.bool)
    assert boot.accuracy(all_right, balanced=True).low == pytest.approx(0.25, abs=2e-3)
    assert boot.accuracy(all_right).low == pytest.approx(1 - 3 / 30, abs=1e-3)
    assert boot.by_family(all_right)["a"].low == pytest.approx(1 - 3 / 30, abs=1e-3)
    assert boot.by_family(all_right)["c"].low == 0.0


def test_two_methods_on_one_bank_share_their_draws_so_that_equal_ones_do_not_differ():
    bank = bank_of([k % 17 for k in range(50)], [k % 3 for k in range(50)])
    one, other = (Bootstrap(bank).balanced(np.arange(50) % 2 + 0.0)[1] for _ in range(2))
    assert np.array_equal(one, other)


def test_the_interval_resamples_base_inputs_not_pairs():
    values = torch.tensor([True] * 30 + [False] * 30)
    clustered = Bootstrap(bank_of([0] * 30 + [1] * 30, [0] * 60)).accuracy(values)
    spread = Bootstrap(bank_of(list(range(60)), [0] * 60)).accuracy(values)
    assert clustered.value == spread.value == 0.5
    assert clustered.high - clustered.low > 2 * (spread.high - spread.low)


def test_the_interval_covers_the_truth_about_as_often_as_it_says():
    rng = np.random.default_rng(0)
    boot = Bootstrap(bank_of(list(range(60)), [0] * 60))
    hits = 0
    for _ in range(200):
        accuracy = boot.accuracy(torch.from_numpy(rng.random(60) < 0.7))
        hits += accuracy.low <= 0.7 <= accuracy.high
    assert 0.88 <= hits / 200 <= 0.99


@pytest.mark.parametrize(("seen", "inputs"), [(0, 20), (1, 60), (3, 40), (2.5, 41), (100, 200), (197, 200), (0, 5000)])
def test_the_bound_on_a_share_is_clopper_and_pearsons(seen, inputs):
    stats = pytest.importorskip("scipy.stats")
    exact = 3 / inputs if seen == 0 else stats.beta.ppf(0.95, seen + 1, inputs - seen)
    assert at_most(seen / inputs, inputs) == pytest.approx(exact, abs=1e-3)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(*[st.booleans()] * 3), min_size=1, max_size=12))
def test_inputs_that_families_share_count_once(rows):
    """Against all sets of families: the share of the mean that a set decides, and the inputs that were looked at."""
    inside = np.array([*rows, (True, True, True)])
    sets = [[f for f in range(3) if k >> f & 1] for k in range(1, 8)]
    expected = min(3 * sum(any(row[f] for f in some) for row in inside) / len(some) for some in sets)
    assert independent_inputs(inside) == pytest.approx(expected)
    assert independent_inputs(inside) <= len(inside)


def test_families_of_other_inputs_count_in_full_and_many_families_have_a_bound():
    apart = np.kron(np.eye(3), np.ones((20, 1))) > 0
    assert independent_inputs(apart) == 60
    assert independent_inputs(np.ones((20, 3), dtype=bool)) == 20
    five_variables = np.kron(np.eye(16), np.ones((15, 1))) > 0  # each kind of swap has inputs of its own
    assert independent_inputs(five_variables) == 240
    many = np.random.default_rng(0).random((50, 20)) < 0.5
    assert independent_inputs(many) <= min(50, 20 * many.sum(axis=0).min())


def test_sets_of_many_families_are_looked_at_one_by_one():
    inside = np.random.default_rng(1).random((40, 11)) < 0.15
    inside[:, 3] = inside[:, 4]  # two families of the same few inputs
    sets = [[f for f in range(11) if k >> f & 1] for k in range(1, 1 << 11)]
    expected = min(11 * inside[:, some].any(axis=1).sum() / len(some) for some in sets)
    assert independent_inputs(inside) == pytest.approx(expected)


@pytest.mark.parametrize("share", [0.8, 0.9, 0.95])
@pytest.mark.parametrize("together", [0.0, 1.0])
def test_a_share_lies_above_its_lower_bound_as_often_as_it_should(share, together):
    """Three families of the same 40 inputs, that are right in all families at once or in each by itself."""
    rng, inputs, families = np.random.default_rng(7), 40, 3
    boot = Bootstrap(bank_of(sorted(list(range(inputs)) * families), list(range(families)) * inputs), draws=400)
    covered = 0
    for _ in range(200):
        alone, common = rng.random((inputs, families)) < share, rng.random((inputs, 1)) < share
        right = np.where(rng.random((inputs, 1)) < together, common, alone)
        covered += boot.accuracy(torch.from_numpy(right.flatten()), balanced=True).low <= share
    assert covered >= 0.95 * 200  # 97.5 % is meant; 95 % of 200 is two standard deviations below


def test_how_many_inputs_can_show_a_share():
    assert at_least(0.9) == 30  # the rule of three
    assert at_least(0.8) == 15
    with missing_at_most(0.01):
        assert at_least(0.9) > 40
