"""Profiles: scores are merged by the best, intervals are Wilson's, and places that are not told apart are named."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binomtest

from plot_ot.abstract.banks import draw_pairs
from plot_ot.judging.profile import Profile, Tried, effective_pairs, interval
from plot_ot.stages.problem import best_of
from test_localize import HYPOTHESIS, ROWS


@settings(deadline=None)
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


ROWS_STORED = [
    {"variable": "x", "place": "b.0@last", "token": "last", "layer": 0, "score": 0.5, "low": 0.4, "high": 0.6},
    {"variable": "y", "place": "b.1@last", "token": "last", "layer": 1, "score": 0.3, "low": 0.2, "high": 0.4},
    {"variable": "x", "place": "b.10@here", "token": "here", "layer": 10, "score": 0.9, "low": 0.8, "high": 0.95},
    {"variable": "x", "place": "b.10@last", "token": "last", "layer": 10, "score": 0.8, "low": 0.7, "high": 0.8},
]


def test_a_stored_profile_is_read_back_for_one_variable():
    profile = Profile.from_rows("x", ROWS_STORED)
    assert profile.variable == "x"
    assert profile.tried == (
        Tried("b.0@last", "last", 0, 0.5, 0.4, 0.6),
        Tried("b.10@here", "here", 10, 0.9, 0.8, 0.95),
        Tried("b.10@last", "last", 10, 0.8, 0.7, 0.8),
    )
    assert Profile.from_rows("z", ROWS_STORED) == Profile("z", ())


def test_a_profile_is_printed_as_a_table():
    said = (
        "x: best calibration score inside each place that was tried\n"
        "  place      score\n"
        "  b.0@last   0.500 [0.400, 0.600]\n"
        "  b.10@here  0.900 [0.800, 0.950]  best\n"
        "  b.10@last  0.800 [0.700, 0.800]  as good\n"
        "  Best: b.10@here (0.900); not told from it by these pairs: b.10@last."
    )
    assert str(Profile.from_rows("x", ROWS_STORED)) == repr(Profile.from_rows("x", ROWS_STORED)) == said
    short = Profile("x", (Tried("a", "last", 0, 0.5, 0.4, 0.6),))
    assert str(short).splitlines()[1:3] == ["  place  score", "  a      0.500 [0.400, 0.600]  best"]
    assert str(Profile("x", ())) == "x: no place was tried on calibration pairs."


def test_the_html_table_has_every_score_in_its_cell_and_the_best_in_bold():
    told = Profile.from_rows("x", ROWS_STORED)._repr_html_()
    caption = "x: best calibration score inside each place. Best: b.10@here (0.900); not told from it by these pairs: "
    assert told == (
        f"<table><caption>{caption}b.10@last.</caption><tr><th></th><th>last</th><th>here</th></tr>"
        '<tr><th>b.0</th><td title="b.0@last">0.500 [0.400, 0.600]</td><td>–</td></tr>'
        '<tr><th>b.10</th><td title="b.10@last"><b>0.800 [0.700, 0.800]</b></td>'
        '<td title="b.10@here"><b>0.900 [0.800, 0.950]</b></td></tr></table>'
    )
    odd = Profile("<x>", (Tried("a<b", "l<t", 0, 0.5, 0.4, 0.6),))._repr_html_()
    assert "<x>" not in odd
    assert '<tr><th></th><th>l&lt;t</th></tr><tr><th>a&lt;b</th><td title="a&lt;b">' in odd


def test_a_table_is_crossed_where_at_least_half_its_cells_are_filled():
    def rows(*places: str) -> int:
        tried = tuple(Tried(p, p.partition("@")[2], k, 0.5, 0.4, 0.6) for k, p in enumerate(places))
        return Profile("x", tried)._repr_html_().count("<tr>") - 1

    assert rows("a@s", "b@t") == 2  # two of four cells
    assert rows("a@s", "b@t", "c@u") == 3
    told = Profile("x", tuple(Tried(f"{n}@{n}", n, 0, 0.5, 0.4, 0.6) for n in "stu"))._repr_html_()
    assert "<th>s@s</th>" in told  # three of nine: one place a row, under its whole name
    assert "<th></th><th></th>" in told
    assert rows("a@b@t", "a@c@t") == 2  # the last @ comes before the token


@pytest.mark.parametrize(
    ("low", "high", "meets"),
    [(0.5, 0.7, True), (0.6, 0.7, True), (0.61, 0.7, False), (0.1, 0.4, True), (0.1, 0.39, False)],
)
def test_intervals_that_touch_overlap(low, high, meets):
    one, other = Tried("a", "", 0, 0.5, 0.4, 0.6), Tried("b", "", 0, 0.5, low, high)
    assert one.overlaps(other) == other.overlaps(one) == meets


def test_of_equal_scores_the_earliest_place_is_best():
    equal = Profile("x", tuple(Tried(p, "", k, 0.5, 0.4, 0.6) for k, p in enumerate("abc")))
    assert equal.best.place == "a"
    assert equal.as_good == ("b", "c")
    assert Profile("x", ()).best is None
    assert Profile("x", ()).as_good == ()


def test_scores_are_shares_and_pairs_weigh_by_their_base_input():
    assert interval(1.2, 50) == interval(1.0, 50)
    assert interval(-0.2, 50) == interval(0.0, 50)
    assert interval(1.0, 50)[1] == 1.0
    assert interval(0.0, 50)[0] == 0.0
    some = draw_pairs(HYPOTHESIS, ROWS[::12], "sensitive", 60, torch.Generator().manual_seed(0), variable="left")
    weights = torch.rand(60, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    per_base = [float(weights[some.base_groups() == g].sum()) for g in some.base_groups().unique()]
    expected = sum(per_base) ** 2 / sum(w * w for w in per_base)
    assert effective_pairs(some, weights) == pytest.approx(expected)
    assert effective_pairs(some, 3 * weights) == pytest.approx(expected)
