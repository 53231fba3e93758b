"""Banks: labels and power against brute force, exact quotas, and splits that share nothing they should not."""

from collections import Counter
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from plot_ot.abstract.banks import (
    POLICIES,
    Bank,
    Power,
    Splits,
    distinct_rows,
    draw_pairs,
    first_of_each,
    row_codes,
)
from plot_ot.abstract.causal_model import CausalModel
from plot_ot.errors import PlotError
from refusals import assert_refused

HEQ = CausalModel(
    inputs=["W", "X", "Y", "Z"],
    mechanisms={
        "z_WX": lambda W, X: W == X,
        "z_YZ": lambda Y, Z: Y == Z,
        "y": lambda z_WX, z_YZ: z_WX == z_YZ,
    },
    output="y",
)
POOL = torch.tensor(list(product(range(3), repeat=4)))
VARIABLES = ("z_WX", "z_YZ")
index_pairs = st.lists(st.tuples(*[st.integers(0, len(POOL) - 1)] * 2), min_size=1, max_size=30)
quick = settings(deadline=None, max_examples=50, derandomize=True)


def brute(base, source):
    """What HEQ says about one pair, in plain Python."""
    (W, X, Y, Z), (w, x, y, z) = base, source
    at_base, at_source = {"z_WX": W == X, "z_YZ": Y == Z}, {"z_WX": w == x, "z_YZ": y == z}
    at_base["y"], at_source["y"] = at_base["z_WX"] == at_base["z_YZ"], at_source["z_WX"] == at_source["z_YZ"]
    labels = {
        "z_WX": at_source["z_WX"] == at_base["z_YZ"],
        "z_YZ": at_base["z_WX"] == at_source["z_YZ"],
        "y": at_source["y"],
    }
    changed = {v: at_base[v] != at_source[v] for v in at_base}
    return labels, changed, at_base["y"], at_source["y"]


def brute_rows(bank):
    return [brute(b, s) for b, s in zip(bank.base.tolist(), bank.source.tolist(), strict=True)]


def bank_of(pairs, **kwargs):
    base, source = torch.tensor(pairs).T
    return Bank.from_pairs(HEQ, POOL[base], POOL[source], **kwargs)


def draw(policy, size, pool=POOL, seed=0, **kwargs):
    if policy in ("sensitive", "invariant"):
        kwargs.setdefault("variable", "z_WX")
    return draw_pairs(HEQ, pool, policy, size, torch.Generator().manual_seed(seed), **kwargs)


def pairs_of(bank):
    return [(tuple(b), tuple(s)) for b, s in zip(bank.base.tolist(), bank.source.tolist(), strict=True)]


# -- what a bank knows --------------------------------------------------------------------------------------------


@quick
@given(index_pairs)
def test_labels_changes_and_families_equal_brute_force(pairs):
    bank = bank_of(pairs)
    for t, (labels, changed, at_base, at_source) in enumerate(brute_rows(bank)):
        assert {v: bool(bank.labels[v][t]) for v in VARIABLES} == {v: labels[v] for v in VARIABLES}
        assert {v: bool(bank.changed[v][t]) for v in VARIABLES} == {v: changed[v] for v in VARIABLES}
        assert (bool(bank.base_answer[t]), bool(bank.source_answer[t])) == (at_base, at_source)
        family = "+".join(v for v in VARIABLES if changed[v]) or "none"
        assert bank.families[bank.family[t]] == family
    assert len(set(bank.families)) == len(bank.families)


@quick
@given(index_pairs, st.sampled_from(["z_WX", "z_YZ", "y"]))
def test_power_and_discriminating_pairs_equal_brute_force(pairs, variable):
    names = (*VARIABLES, "y")
    bank = bank_of(pairs, variables=names)
    others = [o for o in names if o != variable]
    rows = [(labels, labels[variable], at_base, source) for labels, _, at_base, source in brute_rows(bank)]
    moved = [(labels, label, source) for labels, label, at_base, source in rows if label != at_base]
    telling = [
        label != at_base and (label != source or any(label != labels[o] for o in others))
        for labels, label, at_base, source in rows
    ]
    assert bank.discriminating(variable).tolist() == telling
    assert bank.power(variable) == Power(
        pairs=len(pairs),
        sensitive=sum(changed[variable] for _, changed, _, _ in brute_rows(bank)),
        against_base=len(moved),
        against_source=sum(label != source for _, label, source in moved),
        against_others={o: sum(label != labels[o] for labels, label, _ in moved) for o in others},
        discriminating=sum(telling),
        unlike_source=sum(
            changed[variable] and labels[variable] != source for labels, changed, _, source in brute_rows(bank)
        ),
    )


def test_discriminating_needs_a_moved_answer_that_a_copy_or_another_swap_would_not_give():
    digits = CausalModel(["a", "b"], {"u": lambda a: a, "v": lambda b: b, "y": lambda u, v: 3 * u + v}, output="y")
    base = torch.tensor([[0, 0]] * 3)
    source = torch.tensor([[0, 1], [1, 0], [1, 1]])  # only v changes; only u: label = copied source; both: unlike both
    bank = Bank.from_pairs(digits, base, source)
    assert bank.discriminating("u").tolist() == [False, True, True]  # the second is told from swapping v only
    alone = Bank.from_pairs(digits, base, source, variables=["u"])
    assert alone.discriminating("u").tolist() == [False, False, True]


def test_an_output_variable_is_recognised_by_its_labels():
    everything = list(product(range(0, 81, 4), range(0, 81, 5)))
    bank = bank_of(everything, variables=(*VARIABLES, "y"))
    assert bank.power("y").is_output
    assert not bank.power("z_WX").is_output
    unmoved = bank.select(~bank.changed["y"])
    assert not unmoved.power("y").is_output  # no pair moves the answer: nothing can be said


def test_a_few_pairs_that_copying_gets_right_do_not_make_an_output_variable():
    """Where a swap moves the answer the source's happens to be right, where it does not copying would be wrong."""
    either = CausalModel(["a", "b"], {"u": lambda a: a, "v": lambda b: b, "y": lambda u, v: u | v}, output="y")
    base, source = torch.tensor([[0, 0], [1, 1]]), torch.tensor([[1, 1], [0, 0]])
    bank = Bank.from_pairs(either, base, source)
    power = bank.power("u")
    assert (power.against_base, power.against_source, power.unlike_source) == (1, 0, 1)
    assert not power.is_output
    assert bank.select(torch.tensor([True, False])).power("u").is_output  # nothing speaks against it there


def test_missing_says_which_pairs_are_too_few():
    power = Power(9, sensitive=5, against_base=4, against_source=2, against_others={"v": 1, "w": 9}, discriminating=3)
    assert power.missing() == []
    assert power.missing(least=5) == [
        "pairs where swapping it changes the answer (4)",
        "pairs where the counterfactual answer is not the source's (2)",
        "pairs where swapping 'v' instead gives another answer (1)",
    ]


def test_sensitive_and_invariant_pairs_part_the_bank():
    bank = draw("balanced", 40)
    sensitive, invariant = bank.sensitive("z_YZ"), bank.invariant("z_YZ")
    assert all(changed["z_YZ"] for _, changed, _, _ in brute_rows(sensitive))
    assert not any(changed["z_YZ"] for _, changed, _, _ in brute_rows(invariant))
    assert sorted(pairs_of(sensitive) + pairs_of(invariant)) == sorted(pairs_of(bank))
    assert [len(sensitive), len(invariant)] == [20, 20]


def test_a_selection_keeps_every_column_in_step():
    bank = draw("balanced", 24)
    chosen = torch.tensor([7, 0, 19])
    part, again = bank.select(chosen), Bank.from_pairs(HEQ, bank.base[chosen], bank.source[chosen])
    for v in VARIABLES:
        assert torch.equal(part.labels[v], again.labels[v])
        assert torch.equal(part.changed[v], again.changed[v])
    assert torch.equal(part.base_answer, again.base_answer)
    assert torch.equal(part.source_answer, again.source_answer)
    named = [part.families[f] for f in part.family.tolist()]
    assert named == [again.families[f] for f in again.family.tolist()]


def test_pairs_with_one_base_share_a_bootstrap_group():
    groups = bank_of([(3, 1), (5, 2), (3, 7), (8, 3), (5, 5)]).base_groups().tolist()
    assert groups[0] == groups[2]
    assert groups[1] == groups[4]
    assert len(set(groups)) == 3


# -- drawing ------------------------------------------------------------------------------------------------------


def kinds(bank):
    """How many pairs change which variables."""
    return Counter(tuple(v for v in VARIABLES if changed[v]) for _, changed, _, _ in brute_rows(bank))


WX, YZ, BOTH, NONE = ("z_WX",), ("z_YZ",), VARIABLES, ()
QUOTAS = [
    ("mixed", 40, {}, lambda k: (k[WX] + k[YZ] + k[BOTH], k[NONE]), (20, 20)),
    ("mixed", 41, {}, lambda k: (k[WX] + k[YZ] + k[BOTH], k[NONE]), (21, 20)),
    ("only", 40, {}, lambda k: (k[WX], k[YZ], k[BOTH], k[NONE]), (20, 20, 0, 0)),
    ("only", 41, {}, lambda k: (k[WX], k[YZ], k[BOTH], k[NONE]), (21, 20, 0, 0)),
    ("sensitive", 33, {"variable": "z_YZ"}, lambda k: (k[YZ] + k[BOTH], k[WX] + k[NONE]), (33, 0)),
    ("invariant", 33, {"variable": "z_YZ"}, lambda k: (k[YZ] + k[BOTH], k[WX] + k[NONE]), (0, 33)),
    ("balanced", 40, {}, lambda k: (k[NONE], k[WX], k[YZ], k[BOTH]), (10, 10, 10, 10)),
    ("balanced", 42, {}, lambda k: tuple(sorted(k.values())), (10, 10, 11, 11)),
]


@pytest.mark.parametrize(("policy", "size", "options", "count", "expected"), QUOTAS)
def test_policies_meet_their_quotas_exactly(policy, size, options, count, expected):
    bank = draw(policy, size, **options)
    assert len(bank) == size
    assert count(kinds(bank)) == expected


@pytest.mark.parametrize("policy", POLICIES)
def test_drawn_pairs_never_repeat_and_never_pair_a_row_with_itself(policy):
    bank = draw(policy, 400)
    pairs = pairs_of(bank)
    assert len(set(pairs)) == len(pairs)
    assert all(base != source for base, source in pairs)


def test_a_pool_that_repeats_rows_still_gives_distinct_pairs_of_distinct_inputs():
    pairs = pairs_of(draw("invariant", 6, pool=POOL[1:4].repeat(2, 1), variable="z_WX"))
    assert len(set(pairs)) == len(pairs)
    assert all(base != source for base, source in pairs)


def test_the_generator_alone_decides_the_draw():
    assert pairs_of(draw("mixed", 50, seed=3)) == pairs_of(draw("mixed", 50, seed=3))
    assert pairs_of(draw("mixed", 50, seed=3)) != pairs_of(draw("mixed", 50, seed=4))


def test_a_pool_is_used_up_to_its_last_pair_and_then_refused():
    pool = POOL[:4]  # 0000 0001 0002 0010: all with W = X, so 4 * 3 ordered pairs leave z_WX alone
    assert len(set(pairs_of(draw("invariant", 12, pool=pool)))) == 12
    with pytest.raises(PlotError, match=r"wants 13 pairs.*pool of 4 rows offers 1 too few"):
        draw("invariant", 13, pool=pool)


@pytest.mark.parametrize("policy", ["mixed", "only", "sensitive", "balanced"])
def test_a_pool_without_the_wanted_pairs_is_refused_by_name(policy):
    with pytest.raises(PlotError, match=rf"Bank 'fit' \(policy '{policy}'.*wants 30 pairs.*larger pool"):
        draw(policy, 30, pool=POOL[:4], name="fit")


# -- refusals -----------------------------------------------------------------------------------------------------

DIRECT = CausalModel(["a"], {"y": lambda a: a % 2}, output="y")
REFUSED = {
    "no pairs": (lambda: Bank.from_pairs(HEQ, POOL[:0], POOL[:0], name="fit"), ["Bank 'fit' is empty"]),
    "unpaired": (lambda: Bank.from_pairs(HEQ, POOL[:3], POOL[:2]), ["(3, 4)", "(2, 4)"]),
    "unknown variable": (lambda: bank_of([(0, 1)], variables=["z_XY"]), ["'z_XY'", "z_WX, z_YZ"]),
    "no variable": (lambda: Bank.from_pairs(DIRECT, POOL[:2, :1], POOL[2:4, :1]), ["variable"]),
    "family length": (lambda: bank_of([(0, 1)], family=torch.tensor([0, 1])), ["2 family entries", "1 pairs"]),
    "family without a name": (lambda: bank_of([(0, 1)], family=torch.tensor([1]), families=["one"]), ["family"]),
    "unknown policy": (lambda: draw("mixd", 4), ["'mixd'", "Did you mean 'mixed'", *POLICIES]),
    "an empty pool": (lambda: draw("mixed", 4, pool=POOL[:0]), ["wants 4 pairs", "0 rows"]),
    "policy without variable": (lambda: draw("sensitive", 4, variable=None), ["'sensitive'", "z_WX, z_YZ"]),
    "draw for an unknown variable": (lambda: draw("mixed", 4, variables=["z_XY"]), ["'z_XY'", "z_WX, z_YZ"]),
    **{
        f"{method} of an unknown variable": (
            lambda method=method: getattr(bank_of([(0, 1)], name="fit"), method)("z_XY"),
            ["variable of bank 'fit' 'z_XY'", "z_WX, z_YZ"],
        )
        for method in ("sensitive", "invariant", "power", "discriminating")
    },
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals_name_what_was_found_and_expected(case):
    assert_refused(*REFUSED[case])


# -- splits -------------------------------------------------------------------------------------------------------


def split_banks(fit=(1, 0), calibration=(2, 9), test=(3, 18)):
    """One (base, source) pair of pool rows per bank; calibration changes both variables."""
    return bank_of([fit]), bank_of([calibration]), {("z_WX", "sensitivity"): bank_of([test])}


def test_disjoint_splits_are_accepted_and_say_so():
    splits = Splits.checked(*split_banks(), strict=True)
    assert splits.shared_sources == {"fit/calibration": 0, "fit/test": 0, "calibration/test": 0}


@pytest.mark.parametrize(
    ("shared", "names"),
    [
        ({"fit": (2, 0)}, "fit and calibration"),
        ({"fit": (3, 0)}, "fit and test"),
        ({"test": (2, 18)}, "calibration and test"),
    ],
)
def test_splits_that_share_a_base_input_are_refused(shared, names):
    with pytest.raises(PlotError, match=f"The {names} banks share 1 base inputs"):
        Splits.checked(*split_banks(**shared))


def test_shared_sources_are_counted_and_refused_when_strict():
    banks = split_banks(fit=(1, 9), test=(3, 9))
    assert Splits.checked(*banks).shared_sources == {"fit/calibration": 1, "fit/test": 1, "calibration/test": 1}
    with pytest.raises(PlotError, match="'fit/test': 1"):
        Splits.checked(*banks, strict=True)


def test_a_base_may_be_another_splits_source():
    assert Splits.checked(*split_banks(fit=(1, 3), test=(3, 1)), strict=False).fit is not None


def test_an_empty_test_bank_is_refused():
    fit, calibration, test = split_banks()
    empty = {("z_YZ", "invariance"): fit.select(torch.zeros(1, dtype=torch.bool))}
    with pytest.raises(PlotError, match="invariance test bank of 'z_YZ' is empty"):
        Splits.checked(fit, calibration, {**test, **empty})


def test_splits_without_any_test_bank_are_refused():
    fit, calibration, _ = split_banks()
    with pytest.raises(PlotError, match="test"):
        Splits.checked(fit, calibration, {})


def test_a_calibration_bank_that_never_changes_a_variable_is_refused():
    with pytest.raises(PlotError, match="no pair that changes 'z_YZ'"):
        Splits.checked(*split_banks(calibration=(2, 10)))  # 0002 and 0101: z_WX changes, z_YZ does not


# -- the parts of it ----------------------------------------------------------------------------------------------


def test_a_selection_of_pairs_is_named_after_what_it_is():
    bank = draw("mixed", 20, name="fit")
    assert bank.name == "fit"
    assert bank.sensitive("z_WX").name == "fit/z_WX/sensitivity"
    assert bank.invariant("z_YZ").name == "fit/z_YZ/invariance"
    assert bank.select(torch.tensor([0])).name == "fit"
    assert draw("mixed", 4).name == "pairs"
    assert {k: b.name for k, b in bank.by_variable().items()} == {
        (v, kind): f"fit/{v}/{kind}" for v in VARIABLES for kind in ("sensitivity", "invariance")
    }


def test_families_are_spelled_by_the_variables_they_change_or_numbered():
    bank = draw("balanced", 40)
    for t, (_, changed, _, _) in enumerate(brute_rows(bank)):
        name = "+".join(v for v in VARIABLES if changed[v]) or "none"
        assert bank.families[bank.family[t]] == name
    numbered = bank_of([(0, 1), (0, 2), (0, 3)], family=torch.tensor([0, 2, 0]))
    assert numbered.families == ("0", "1", "2")
    named = bank_of([(0, 1), (0, 2)], family=torch.tensor([1, 0]), families=["one", "two"])
    assert (named.families, named.family.tolist()) == (("one", "two"), [1, 0])


@pytest.mark.parametrize("entries", [[-1, 0], [0, 2]])
def test_family_entries_outside_their_names_are_refused(entries):
    with pytest.raises(PlotError, match=r"must lie in 0\.\.1, one per family name \(one, two\)"):
        bank_of([(0, 1), (0, 2)], family=torch.tensor(entries), families=["one", "two"])


@pytest.mark.parametrize(
    ("counts", "least", "gaps"),
    [((1, 1, 1), 1, 0), ((0, 1, 1), 1, 1), ((1, 0, 1), 1, 1), ((1, 1, 0), 1, 1), ((5, 4, 6), 5, 1), ((4, 4, 4), 5, 3)],
)
def test_fewer_pairs_than_the_least_are_missing(counts, least, gaps):
    base, source, other = counts
    power = Power(20, 10, base, source, {"q": other}, 3)
    assert len(power.missing(least)) == gaps
    if least == 1:
        assert power.missing() == power.missing(1)


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.int32, torch.int64, torch.float32, torch.float64])
def test_rows_have_one_code_exactly_when_they_are_equal(dtype):
    rows = torch.randint(-2, 3, (200, 3), generator=torch.Generator().manual_seed(0)).to(dtype)
    codes = row_codes(rows)
    assert torch.equal(codes[:, None] == codes[None], (rows[:, None] == rows[None]).all(dim=-1))
    assert sorted(set(codes.tolist())) == list(range(len({tuple(r) for r in rows.tolist()})))


def test_rows_whose_hashes_collide_are_still_told_apart(monkeypatch):
    """Factors of one make every row with the same sum collide."""
    monkeypatch.setattr(torch, "randint", lambda high, size, generator: torch.zeros(size, dtype=torch.long))
    rows = torch.tensor([[1, 2], [2, 1], [1, 2], [0, 3], [5, 5]])
    codes = row_codes(rows)
    assert torch.equal(codes[:, None] == codes[None], (rows[:, None] == rows[None]).all(dim=-1))


def test_distinct_rows_keep_the_order_in_which_they_first_came():
    rows = POOL[torch.tensor([5, 3, 5, 9, 3, 0, 9])]
    assert torch.equal(distinct_rows(rows), POOL[torch.tensor([5, 3, 9, 0])])
    assert distinct_rows(POOL[:0]).shape == (0, 4)
    assert first_of_each(torch.tensor([2, 0, 2, 1, 0])).tolist() == [1, 3, 0]


def test_values_that_are_vectors_change_as_a_whole():
    """Two coordinates swapped are another value, though each number occurs in both."""
    causal = CausalModel(
        ["a", "b", "c", "unused"],
        {"p": lambda a, b: torch.stack([a, b], dim=1), "q": lambda c: c, "y": lambda p, q: p[:, 0] * 2 + p[:, 1] + q},
        "y",
    )
    pool = torch.tensor(list(product(range(2), repeat=4)))
    bank = draw_pairs(causal, pool, "balanced", 40, torch.Generator().manual_seed(0))
    moved = (bank.base[:, :2] != bank.source[:, :2]).any(dim=1)
    assert torch.equal(bank.changed["p"], moved)
    assert Counter(zip(moved.tolist(), bank.changed["q"].tolist(), strict=True)) == {
        (p, q): 10 for p in (False, True) for q in (False, True)
    }


def test_a_variable_that_others_determine_has_no_family_alone():
    causal = CausalModel(
        ["a", "b", "unused"],
        {"p": lambda a: a, "q": lambda b: b, "r": lambda p, q: p ^ q, "y": lambda r, p: r + p},
        "y",
    )
    pool = torch.tensor(list(product(range(2), repeat=3)))
    bank = draw_pairs(causal, pool, "balanced", 12, torch.Generator().manual_seed(0), variables=["p", "q", "r"])
    assert Counter(bank.families[f] for f in bank.family) == {"none": 3, "p+q": 3, "p+r": 3, "q+r": 3}


def test_pairs_that_change_nothing_are_asked_for_only_where_there_are_some():
    causal = CausalModel(["a", "b"], {"p": lambda a: a, "q": lambda b: b, "y": lambda p, q: p * 2 + q}, "y")
    pool = torch.tensor(list(product(range(3), repeat=2)))  # every row has values of its own
    bank = draw_pairs(causal, pool, "balanced", 30, torch.Generator().manual_seed(0))
    assert Counter(bank.families[f] for f in bank.family) == {"p": 10, "q": 10, "p+q": 10}
    twice = CausalModel(["a", "b", "unused"], causal.mechanisms, "y")
    pool = torch.tensor([*[(a, b, 0) for a, b in pool.tolist()], (0, 0, 1)])  # one other row with the values of a first
    found = draw_pairs(twice, pool, "balanced", 8, torch.Generator().manual_seed(0))
    assert Counter(found.families[f] for f in found.family) == {"none": 2, "p": 2, "q": 2, "p+q": 2}


def test_pairs_are_spread_over_a_large_pool_in_random_order():
    """Of so many pairs the first of a shuffled order are taken: bases and sources from all over the pool."""
    pool = torch.tensor(list(product(range(5), repeat=4)))
    bank = draw("invariant", 400, pool=pool, variable="z_YZ")
    rows = torch.tensor([5**3, 5**2, 5, 1])
    for side in (bank.base, bank.source):
        at = (side * rows).sum(dim=1)
        assert len(at.unique()) > 150
        assert 0.35 < float((at < len(pool) // 2).double().mean()) < 0.65
    assert not torch.equal((bank.base * rows).sum(dim=1), (bank.base * rows).sum(dim=1).sort().values)


def test_coding_rows_leaves_the_global_random_numbers_alone():
    before = torch.random.get_rng_state()
    assert torch.equal(row_codes(POOL), row_codes(POOL))
    assert torch.equal(torch.random.get_rng_state(), before)


def test_a_draw_that_fails_says_for_which_variable():
    with pytest.raises(PlotError, match=r"\(policy 'sensitive' for 'z_WX'\) wants 5 pairs"):
        draw("sensitive", 5, pool=POOL[:4])
    with pytest.raises(PlotError, match=r"\(policy 'mixed'\) wants 30 pairs"):
        draw("mixed", 30, pool=POOL[:4])


def test_balanced_pairs_have_as_many_different_bases_as_there_are():
    """Independent base inputs are what intervals rest on: none comes twice in a family before every other has come."""
    bank = draw_pairs(HEQ, POOL, "balanced", 80, torch.Generator().manual_seed(0))
    assert len(distinct_rows(bank.base)) == 80  # of 81 rows, each of which has pairs of all kinds
    larger = draw_pairs(HEQ, POOL, "balanced", 400, torch.Generator().manual_seed(0))
    for f in range(len(larger.families)):
        of_family = larger.base[larger.family == f]
        counts = Counter(map(tuple, of_family.tolist()))
        assert len(counts) == 81
        assert set(counts.values()) == {1, 2}
    drawn = [draw_pairs(HEQ, POOL, "balanced", 40, torch.Generator().manual_seed(s)).base for s in (0, 1)]
    assert not torch.equal(*drawn)  # still at random
