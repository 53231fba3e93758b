"""Causal models: batched runs and swaps against plain Python, and refusals that say what was found."""

import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from plot_ot.abstract.causal_model import CausalModel, Mechanism, same
from plot_ot.errors import PlotError
from refusals import assert_refused

P = 5
MECHANISMS = {  # declared backwards on purpose: the model puts them into causal order itself
    "y": lambda t, a: (t + a) % P,
    "t": lambda s, c: (s * c) % P,
    "s": lambda a, b: (a + b) % P,
}
MODEL = CausalModel(["a", "b", "c"], MECHANISMS, output="y")
ROWS = torch.cartesian_prod(*[torch.arange(P)] * 3)


def brute(row, do=None):
    """Every variable of MODEL for one row, with Python integers."""
    do = do or {}
    a, b, c = row
    s = do.get("s", (a + b) % P)
    t = do.get("t", (s * c) % P)
    return {"a": a, "b": b, "c": c, "s": s, "t": t, "y": do.get("y", (t + a) % P)}


def rows_of(n):
    row = st.tuples(*[st.integers(0, P - 1)] * 3)
    return st.lists(row, min_size=n, max_size=n).map(torch.tensor)


paired_rows = st.integers(1, 6).flatmap(lambda n: st.tuples(rows_of(n), rows_of(n)))
variables = st.sampled_from(MODEL.variables)
quick = settings(deadline=None, max_examples=50, derandomize=True)

# -- running ------------------------------------------------------------------------------------------------------


def test_run_and_answer_equal_plain_python_on_every_row():
    values, expected = MODEL.run(ROWS), [brute(row) for row in ROWS.tolist()]
    assert set(values) == set(expected[0])
    for name, value in values.items():
        assert value.tolist() == [e[name] for e in expected], name
    assert MODEL.answer(ROWS).tolist() == [e["y"] for e in expected]


@pytest.mark.parametrize("variable", ["s", "t", "y"])
def test_swap_equals_plain_python_on_all_pairs(variable):
    base, source = ROWS.repeat_interleave(len(ROWS), 0), ROWS.repeat(len(ROWS), 1)
    rows = ROWS.tolist()
    at_source = [brute(s)[variable] for s in rows]
    expected = [brute(b, {variable: value})["y"] for b in rows for value in at_source]
    assert MODEL.swap(base, source, variable).tolist() == expected


def test_an_intervention_reaches_only_what_lies_downstream():
    forced = torch.full((len(ROWS),), 3)
    before, after = MODEL.run(ROWS), MODEL.run(ROWS, do={"t": forced})
    assert all(torch.equal(before[n], after[n]) for n in ("a", "b", "c", "s"))
    assert after["y"].tolist() == [brute(r, {"t": 3})["y"] for r in ROWS.tolist()]
    on_input = MODEL.run(ROWS, do={"a": forced})["y"]
    assert on_input.tolist() == [brute([3, b, c])["y"] for _, b, c in ROWS.tolist()]


@quick
@given(rows_of(4), variables)
def test_swapping_from_the_base_itself_changes_nothing(base, variable):
    assert torch.equal(MODEL.swap(base, base.clone(), variable), MODEL.answer(base))


@quick
@given(paired_rows, variables)
def test_swap_is_do_with_the_source_value(pair, variable):
    base, source = pair
    by_hand = MODEL.run(base, do={variable: MODEL.run(source)[variable]})["y"]
    assert torch.equal(MODEL.swap(base, source, variable), by_hand)


@quick
@given(paired_rows)
def test_swapping_the_output_copies_the_source_answer(pair):
    base, source = pair
    assert torch.equal(MODEL.swap(base, source, "y"), MODEL.answer(source))


def test_values_may_have_trailing_dimensions():
    half_adder = CausalModel(
        ["a", "b"],
        {"carry": lambda a, b: a & b, "bits": lambda a, b, carry: torch.stack([a ^ b, carry], dim=1)},
        output="bits",
    )
    base, source = torch.tensor([[0, 1], [1, 1]]), torch.tensor([[1, 1], [0, 0]])
    assert half_adder.answer(base).tolist() == [[1, 0], [0, 1]]
    assert half_adder.swap(base, source, "carry").tolist() == [[1, 1], [0, 0]]


def test_same_compares_whole_rows():
    a = torch.tensor([[[1, 2]], [[3, 4]]])
    assert same(a, torch.tensor([[[1, 2]], [[3, 5]]])).tolist() == [True, False]
    assert same(torch.tensor([1, 2]), torch.tensor([1, 3])).tolist() == [True, False]


# -- structure ----------------------------------------------------------------------------------------------------


def test_parents_are_the_parameter_names_and_order_is_causal():
    assert {n: MODEL.parents(n) for n in "asty"} == {"a": (), "s": ("a", "b"), "t": ("s", "c"), "y": ("t", "a")}
    assert list(MODEL.mechanisms) == ["s", "t", "y"]
    assert MODEL.variables == ("s", "t")
    assert MODEL.depth() == {"a": 0, "b": 0, "c": 0, "s": 1, "t": 2, "y": 3}


def test_a_mechanism_may_name_its_parents_itself():
    model = CausalModel(["a", "b"], {"y": Mechanism(("b", "a"), torch.sub)}, output="y")
    assert model.answer(torch.tensor([[1, 5]])).tolist() == [4]


# -- refusals -----------------------------------------------------------------------------------------------------


def model(inputs=("a", "b", "c"), mechanisms=MECHANISMS, output="y", **kwargs):
    return CausalModel(inputs, mechanisms, output, **kwargs)


BASE = torch.tensor([[1, 2, 3], [4, 0, 1]])
REFUSED = {
    "cycle": (lambda: model(mechanisms={**MECHANISMS, "s": lambda y: y}), ["cycle", "y, t, s", "acyclic"]),
    "own parent": (lambda: model(mechanisms={**MECHANISMS, "s": lambda s: s}), ["variables y, t, s form a cycle"]),
    "unknown parent": (lambda: model(mechanisms={**MECHANISMS, "s": lambda d: d}), ["parent of 's' 'd'", "a, b, c, y"]),
    "unreadable parents": (lambda: model(mechanisms={"y": torch.eq}), ["parents", "Mechanism(parents, function)"]),
    "no input": (lambda: model(inputs=()), ["at least one input"]),
    "two inputs of one name": (lambda: model(inputs=("a", "b", "c", "a")), ["must differ", "a, b, c, a"]),
    "an input with a mechanism": (
        lambda: model(inputs=("a", "b", "c", "s")),
        ["s: an input cannot also have a mechanism"],
    ),
    "one variable twice": (lambda: model(variables=["s", "s"]), ["s, s"]),
    "unknown output": (lambda: model(output="z"), ["output variable 'z'", "s, t, y"]),
    "unknown variable": (lambda: model(variables=["s", "u"]), ["variable 'u'", "s, t, y"]),
    "unknown do": (lambda: MODEL.run(BASE, do={"u": BASE[:, 0]}), ["variable 'u'", "s, t, y"]),
    "unknown swap": (lambda: MODEL.swap(BASE, BASE, "u"), ["variable 'u'", "s, t, y"]),
    "unknown name's parents": (lambda: MODEL.parents("u"), ["'u'", "s, t, y"]),
    "wrong columns": (lambda: MODEL.run(BASE[:, :2]), ["[rows, 3]", "a, b, c", "(2, 2)"]),
    "one row without rows": (lambda: MODEL.answer(BASE[0]), ["[rows, 3]", "(3,)"]),
    "lists to run": (lambda: MODEL.run(BASE.tolist()), ["[rows, 3]", "list"]),
    "lists to swap": (lambda: MODEL.swap(BASE.tolist(), BASE.tolist(), "s"), ["[rows, 3]", "list"]),
    "unpaired rows": (lambda: MODEL.swap(BASE, BASE[:1], "s"), ["(2, 3)", "(1, 3)", "row by row"]),
    "do with other rows": (lambda: MODEL.run(BASE, do={"s": torch.ones(3)}), ["do(s)", "3 rows", "have 2"]),
    "do with a scalar": (lambda: MODEL.run(BASE, do={"s": torch.tensor(1)}), ["do(s)", "one value per row"]),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals_name_what_was_found_and_expected(case):
    assert_refused(*REFUSED[case])


@pytest.mark.parametrize(
    ("mechanism", "found"),
    [(lambda a: a.sum(), "()"), (lambda a: a[:1], "(1,)"), (lambda a: a.tolist(), "list"), (lambda a: 1, "int")],
)
def test_mechanisms_that_are_not_batched_are_refused(mechanism, found):
    broken = CausalModel(["a"], {"y": mechanism}, output="y")
    with pytest.raises(PlotError, match=rf"mechanism of 'y' returned.*{re.escape(found)}.*batched"):
        broken.answer(torch.tensor([[1], [2]]))


def test_a_misspelt_name_is_answered_with_the_closest_one():
    heq = CausalModel(["W", "X"], {"z_WX": lambda W, X: W == X, "y": lambda z_WX: ~z_WX}, output="y")
    with pytest.raises(PlotError, match="Did you mean 'z_WX'"):
        heq.swap(torch.zeros(1, 2), torch.zeros(1, 2), "zWX")
