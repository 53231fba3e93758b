"""Profiles: scores are merged by the best, intervals are Wilson's, and places that are not told apart are named."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binomtest

from plot_ot.abstract.banks import draw_pairs
from plot_ot.judging.profile import Profile, Tried, effective_pairs, interval
from plot_ot.stages.problem import best_of
from test_localize import HYPOTHESIS, ROWS


@given(st.integers(0, 50), st.integers(1, 50))
def test_intervals_are_wilsons(right, more):
    pairs = max(right, more)
    expected = binomtest(right, pairs).proportion_ci(method="wilson")
    assert interval(right / pairs, pairs) == pytest.approx((expected.low, expected.high), abs=1e-4)


def test_profiles_are_merged_by_the_best_score():
    merged = best_of({"x": {"a": 0.5, "b": 0.0}}, {"x": {"a": 0.4, "c": 0.1}, "y": {"a": 1.0}}, {})
    assert merged == {"x": {"a": 0.5, "b": 0.0, "c": 0.1}, "y": {"a": 1.0}}


def test_places_whose_intervals_meet_the_bests_are_named():
    rows = [("a", 0.5, 0.4, 0.6), ("b", 0.9, 0.8, 0.95), ("c", 0.85, 0.75, 0.9), ("d", 0.7, 0.5, 0.8)]
    profile = Profile("x", tuple(Tried(place, "last token", k, *s) for k, (place, *s) in enumerate(rows)))
    assert profile.best.place == "b"
    assert profile.as_good == ("c", "d")
    assert profile.sentence == "Best: b (0.900); not told from it by these pairs: c, d."
    assert Profile("x", ()).sentence == "No place was tried on calibration pairs."


def test_tokens_and_layers_are_crossed_where_most_cells_are_filled():
    grid = [Tried(f"block.{n}@{t}", t, n, 0.5, 0.4, 0.6) for t in ("<here>", "last token") for n in range(3)]
    told = Profile("x", tuple(grid))._repr_html_()
    assert told.count("<tr>") == 4
    assert "<th>&lt;here&gt;</th><th>last token</th>" in told
    steps = [Tried(f"h{n}", f"token {n}", n, 0.5, 0.4, 0.6) for n in range(5)]
    assert Profile("x", tuple(steps))._repr_html_().count("<tr>") == 6


def test_pairs_of_one_base_input_count_as_one():
    some = draw_pairs(HYPOTHESIS, ROWS[::12], "sensitive", 60, torch.Generator().manual_seed(0), variable="left")
    even = torch.full((len(some),), 1 / len(some), dtype=torch.float64)
    bases = len(some.base_groups().unique())
    assert 1 <= effective_pairs(some, even) <= bases
    one = torch.zeros(len(some), dtype=torch.float64)
    one[0] = 1.0
    assert effective_pairs(some, one) == pytest.approx(1)
