"""Couplings against POT, geomloss, closed forms and a plain clamped Sinkhorn; and what they say about themselves."""

import math
from dataclasses import replace
from functools import partial

import geomloss.ot
import numpy as np
import ot
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import rel_entr, softmax

from plot_ot import transport
from plot_ot.edits import Frame
from plot_ot.errors import PlotError
from plot_ot.signatures import Signatures, SignatureSpec
from plot_ot.sites import Site, SiteFamily
from plot_ot.subjects import Place
from plot_ot.transport import (
    KINDS,
    PRACTICE_CAP,
    SCALES,
    Coupling,
    Degeneracy,
    Flag,
    Transport,
    couple,
    from_scores,
    solve,
)
from refusals import assert_refused

SOLVED = ("eot", "uot", "uot-one-sided")
EPSILONS, BETAS = (0.3, 1.0, 4.0), (0.1, 1.0, 10.0)
quick = settings(deadline=None, max_examples=40, derandomize=True)


def plan(cost, epsilon, beta=math.inf, kind="eot", **kwargs):
    """The plan of one problem, which must have converged to a probability measure."""
    solution = solve(cost, [(epsilon, beta)], kind, **kwargs)[0]
    assert solution.converged, solution
    assert (solution.plan >= 0).all()
    assert solution.plan.sum() == pytest.approx(1, abs=1e-9)
    return solution.plan


def problem(seed, m=3, n=12, width=4.0):
    """Random costs and random, not uniform, marginals."""
    rng = np.random.default_rng(seed)
    return rng.uniform(0, width, (m, n)), rng.dirichlet(np.full(m, 5.0)), rng.dirichlet(np.full(n, 5.0))


def random_costs(width=20.0):
    shape = st.tuples(st.integers(1, 4), st.integers(1, 9))
    return st.tuples(shape, st.integers(0, 10**6)).map(
        lambda drawn: np.random.default_rng(drawn[1]).uniform(0, width, drawn[0])
    )


epsilons, betas, kinds = st.sampled_from([0.05, 0.3, 2.0]), st.sampled_from([0.02, 0.5, 8.0]), st.sampled_from(SOLVED)

# -- other people's solvers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("epsilon", EPSILONS)
@pytest.mark.parametrize(("m", "n"), [(1, 7), (2, 26), (3, 40)])
def test_eot_is_pots_log_domain_sinkhorn(m, n, epsilon):
    cost, a, b = problem(n, m, n)
    oracle = ot.bregman.sinkhorn_log(a, b, cost, epsilon, numItermax=5000, stopThr=1e-13)
    np.testing.assert_allclose(plan(cost, epsilon, a=a, b=b), oracle, atol=1e-8)


@pytest.mark.parametrize("epsilon", EPSILONS)
@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("kind", ["uot", "uot-one-sided"])
def test_uot_is_pots_unbalanced_sinkhorn_at_mass_one(kind, beta, epsilon):
    cost, a, b = problem(1)
    relaxed = (beta, beta) if kind == "uot" else (math.inf, beta)
    oracle = ot.unbalanced.sinkhorn_unbalanced(a, b, cost, epsilon, relaxed, numItermax=20000, stopThr=1e-13)
    np.testing.assert_allclose(plan(cost, epsilon, beta, kind, a=a, b=b), oracle / oracle.sum(), atol=1e-8)


@pytest.mark.parametrize(
    ("epsilon", "iterations", "error"),
    # geomloss cools ε down from the range of the costs (4): exact from there on up, else off by O(1 / iterations)
    [(4.0, 150, 1e-8), (8.0, 150, 1e-6), (0.5, 400, 3e-3)],
)
@pytest.mark.parametrize("beta", [0.1, 1.0, 10.0, math.inf])
def test_eot_and_two_sided_uot_are_geomlosss_log_domain_solver(beta, epsilon, iterations, error):
    cost, a, b = problem(2)
    reach = None if beta == math.inf else beta
    oracle = geomloss.ot.solve(cost, reg=epsilon, a=a, b=b, unbalanced=reach, max_iter=iterations).plan
    ours = plan(cost, epsilon, beta, "eot" if reach is None else "uot", a=a, b=b)
    np.testing.assert_allclose(ours, oracle / oracle.sum(), atol=error * ours.max())


@pytest.mark.parametrize(
    ("width", "epsilon"), [((200, 400), 4.0), ((20, 100), 1.0), ((0, 600), 0.5), ((300, 600), 4.0)]
)
def test_the_practice_cap_is_a_sinkhorn_with_its_kernel_clamped(width, epsilon):
    cost = np.random.default_rng(3).uniform(*width, (2, 30))
    kernel, v = np.maximum(np.exp(-cost / epsilon), 1e-30), np.ones(30)
    assert (kernel == 1e-30).any()
    for _ in range(3000):
        u = 1 / 2 / (kernel @ v)
        v = 1 / 30 / (kernel.T @ u)
    oracle = u[:, None] * kernel * v
    np.testing.assert_allclose(oracle.sum(axis=1), 0.5, atol=1e-10)
    capped = plan(cost, epsilon, cap=PRACTICE_CAP)
    np.testing.assert_allclose(capped, oracle, atol=1e-9)
    assert np.abs(capped - plan(cost, epsilon)).max() > 1e-3  # the cap matters here


# -- closed forms -------------------------------------------------------------------------------------------------


@quick
@given(random_costs(), epsilons, betas)
def test_one_sided_uot_of_one_row_is_a_softmax(cost, epsilon, beta):
    expected = softmax(-cost[:1] / (epsilon + beta), axis=1)
    np.testing.assert_allclose(plan(cost[:1], epsilon, beta, "uot-one-sided"), expected, atol=1e-9)


@quick
@given(random_costs(), epsilons)
def test_free_marginals_give_softmaxes(cost, epsilon):
    scores = -cost / epsilon
    rows = softmax(scores, axis=1) / len(cost)
    np.testing.assert_allclose(plan(cost, epsilon, 1e-10, "uot-one-sided"), rows, atol=1e-6)
    np.testing.assert_allclose(plan(cost, epsilon, 1e-10, "uot"), softmax(scores), atol=1e-6)


@pytest.mark.parametrize("kind", ["uot", "uot-one-sided"])
@pytest.mark.parametrize("beta", [1e3, 1e6, 1e9, math.inf])
def test_uot_with_a_large_beta_converges_to_eot(beta, kind):
    for seed in range(12):
        rng = np.random.default_rng(seed)
        cost = rng.uniform(0, 1, (rng.integers(2, 5), rng.integers(2, 17)))
        grid = [(e, beta) for e in (0.001, 0.01, 0.1, 1.0)]
        for relaxed, balanced in zip(solve(cost, grid, kind), solve(cost, grid), strict=True):
            assert relaxed.converged
            np.testing.assert_allclose(relaxed.plan, balanced.plan, atol=1 / beta + 1e-7)


@quick
@given(random_costs(), epsilons)
def test_eot_of_one_row_is_uniform_whatever_the_costs(cost, epsilon):
    np.testing.assert_allclose(plan(cost[:1], epsilon), 1 / cost.shape[1], atol=1e-12)


@quick
@given(random_costs(), epsilons, st.integers(0, 10**6))
def test_constants_added_to_rows_and_columns_leave_eot_unchanged(cost, epsilon, seed):
    rng = np.random.default_rng(seed)
    shifted = cost + rng.uniform(-30, 30, (len(cost), 1)) + rng.uniform(-30, 30, (1, cost.shape[1]))
    np.testing.assert_allclose(plan(shifted, epsilon), plan(cost, epsilon), atol=1e-7)


# -- properties of every solution ---------------------------------------------------------------------------------


def objective(pi, cost, epsilon, beta, kind):
    """The module's primal problem for uniform marginals; exact marginals cost nothing."""
    m, n = cost.shape
    value = (cost * pi).sum() + epsilon * rel_entr(pi, 1 / (m * n)).sum()
    if kind == "uot":
        value += beta * rel_entr(pi.sum(axis=1), 1 / m).sum()
    if kind != "eot":
        value += beta * rel_entr(pi.sum(axis=0), 1 / n).sum()
    return value


@quick
@given(random_costs(), epsilons, betas, kinds, st.integers(0, 10**6))
def test_no_feasible_plan_does_better(cost, epsilon, beta, kind, seed):
    (m, n), rng = cost.shape, np.random.default_rng(seed)
    best = plan(cost, epsilon, beta, kind)
    rows, columns = rng.dirichlet(np.ones(m)), rng.dirichlet(np.ones(n))
    fixed_row, fixed_column = np.full(m, 1 / m), np.full(n, 1 / n)
    rival = np.outer(rows if kind == "uot" else fixed_row, fixed_column if kind == "eot" else columns)
    for share in (1e-3, 0.1, 1.0):
        other = (1 - share) * best + share * rival
        assert objective(best, cost, epsilon, beta, kind) <= objective(other, cost, epsilon, beta, kind) + 1e-8


@quick
@given(random_costs(), epsilons, betas, kinds)
def test_constrained_marginals_are_exact(cost, epsilon, beta, kind):
    pi = plan(cost, epsilon, beta, kind)
    if kind != "uot":
        np.testing.assert_allclose(pi.sum(axis=1), 1 / len(cost), atol=1e-7)
    if kind == "eot":
        np.testing.assert_allclose(pi.sum(axis=0), 1 / cost.shape[1], atol=1e-12)


@quick
@given(random_costs(), epsilons, betas, kinds, st.randoms(use_true_random=False))
def test_renaming_variables_and_sites_permutes_the_plan(cost, epsilon, beta, kind, random):
    rows, columns = (random.sample(range(k), k) for k in cost.shape)
    permuted = plan(cost[rows][:, columns], epsilon, beta, kind)
    np.testing.assert_allclose(permuted, plan(cost, epsilon, beta, kind)[rows][:, columns], atol=1e-7)


@pytest.mark.parametrize("epsilon", [0.001, 0.003, 0.01])
@pytest.mark.parametrize("kind", SOLVED)
@pytest.mark.parametrize(("m", "n"), [(2, 26), (3, 48)])
def test_small_epsilon_on_large_costs_is_solved_exactly(m, n, kind, epsilon):
    for seed in range(5):
        cost = np.random.default_rng(seed).uniform(300, 700, (m, n))
        pi = plan(cost, epsilon, 1.0, kind)
        if kind != "uot":
            np.testing.assert_allclose(pi.sum(axis=1), 1 / m, atol=1e-7)
        if kind == "eot":
            np.testing.assert_allclose(pi.sum(axis=0), 1 / n, atol=1e-12)
        # optimality inside a column: log π_ij + c_ij / ε differs between two rows by the same amount in every column
        seen = (pi > 1e-250).all(axis=0)
        if seen.any():
            scaled = np.log(pi[:, seen]) + cost[:, seen] / epsilon
            assert np.ptp(scaled - scaled[:1], axis=1).max() < 1e-6


@pytest.mark.parametrize("kind", SOLVED)
def test_a_grid_solved_at_once_equals_its_points_one_at_a_time(kind):
    cost = problem(5, 3, 30, width=50.0)[0]
    grid = [(e, b) for e in (0.01, 0.1, 1.0, 10.0) for b in (0.03, 0.3, 3.0, 30.0)]
    for point, together in zip(grid, solve(cost, grid, kind), strict=True):
        np.testing.assert_allclose(together.plan, plan(cost, *point, kind), atol=1e-8, err_msg=str(point))


# -- couplings ----------------------------------------------------------------------------------------------------


def signatures_of(cost, cosine=None, norms=None, names=None):
    """Signatures with the given measures at sites s0, s1, ..."""
    cost = torch.as_tensor(cost, dtype=torch.float64)
    m, n = cost.shape
    place = Place("layer1", n, 1)
    family = SiteFamily(tuple(Site(f"s{j}", place, (j,)) for j in range(n)), {"layer1": Frame.identity(n)})
    cosine = torch.zeros(m, n) if cosine is None else torch.as_tensor(cosine)
    norms = torch.ones(n) if norms is None else torch.as_tensor(norms)
    return Signatures(
        tuple(f"z{i}" for i in range(m)), family, SignatureSpec(), cost, cosine, torch.ones(m), norms, 0.0
    )


def coupling(mass, cost):
    mass, cost = np.array([mass], dtype=float), np.array([cost], dtype=float)
    return Coupling(("z",), tuple(f"s{j}" for j in range(mass.size)), mass, cost, "eot")


def test_ranking_goes_by_mass_and_breaks_ties_by_cost():
    assert coupling([0.1, 0.4, 0.2, 0.3], [1, 9, 1, 1]).ranking("z") == [1, 3, 2, 0]
    assert coupling([0.25, 0.25, 0.25, 0.25], [3, 1, 2, 0]).ranking("z") == [3, 1, 2, 0]
    assert coupling([0.2, 0.3 + 1e-13, 0.3, 0.2], [1, 5, 4, 0]).ranking("z") == [2, 1, 3, 0]  # equal up to rounding
    assert coupling([0, 1, 0], [2, 3, 1]).ranking("z") == [1, 2, 0]  # no mass at all is a tie too


@quick
@given(st.lists(st.integers(0, 3), min_size=1, max_size=8), st.randoms(use_true_random=False))
def test_ranking_does_not_depend_on_the_order_of_the_sites(mass, random):
    cost = random.sample(range(100), len(mass))
    order = random.sample(range(len(mass)), len(mass))
    shuffled = coupling([mass[j] for j in order], [cost[j] for j in order]).ranking("z")
    assert [order[j] for j in shuffled] == coupling(mass, cost).ranking("z")


def test_tied_at_says_when_mass_does_not_choose_the_top_k():
    assert [coupling([0.4, 0.2, 0.1, 0.2], [1, 2, 3, 4]).tied_at("z", k) for k in (1, 2, 3, 4)] == [0, 1, 0, 0]


def test_columns_show_part_of_the_plan_without_renormalising():
    part = coupling([0.1, 0.4, 0.2, 0.3], [4, 3, 2, 1]).columns([3, 0])
    assert part.sites == ("s3", "s0")
    assert part.plan.tolist() == [[0.3, 0.1]]
    assert part.cost.tolist() == [[1, 4]]


def test_couple_gives_one_coupling_per_grid_point_in_order():
    cost = problem(6)[0]
    chosen = Transport("uot", epsilon=(0.5, 2.0), beta=(0.1, 1.0, 10.0))
    couplings = couple(signatures_of(cost), chosen)
    assert [(c.epsilon, c.beta) for c in couplings] == [(e, b) for e in (0.5, 2.0) for b in (0.1, 1.0, 10.0)]
    for c in couplings:
        np.testing.assert_allclose(c.plan, plan(cost, c.epsilon, c.beta, "uot"), atol=1e-8)
        np.testing.assert_array_equal(c.row("z1"), c.plan[1])
    assert len(couple(signatures_of(cost), Transport("eot", beta=(0.1, 1.0)))) == 1  # balanced: no β to vary


def test_the_median_scale_makes_epsilon_free_of_units():
    cost = problem(7)[0]
    scaled = [couple(signatures_of(k * cost), Transport(epsilon=(0.3,), scale="median"))[0] for k in (1, 1000)]
    np.testing.assert_allclose(scaled[0].plan, scaled[1].plan, atol=1e-8)
    np.testing.assert_allclose(scaled[0].plan, plan(cost / np.median(cost), 0.3), atol=1e-8)
    assert [c.unit for c in scaled] == pytest.approx([np.median(cost), 1000 * np.median(cost)])


def test_the_cosine_coupling_is_a_softmax_per_row_of_unit_costs():
    cosine = np.random.default_rng(8).uniform(-1, 1, (2, 6))
    (found,) = couple(signatures_of(np.ones((2, 6)), cosine), Transport("cosine", epsilon=(0.2,), beta=(1.0, 2.0)))
    np.testing.assert_allclose(found.plan, softmax(-(2 - 2 * cosine) / 0.2, axis=1) / 2, atol=1e-12)


RAMP, HALVES = [[1.0, 2.0, 3.0], [3.0, 2.0, 1.5]], [[0.0, 0.1, 5.0, 6.0], [5.0, 6.0, 0.0, 0.1]]
FLAGS = {
    "nothing to say": (RAMP, Transport("uot-one-sided"), None),
    "one balanced row": (RAMP[:1], Transport("eot"), "one row"),
    "one row that may choose": (RAMP[:1], Transport("uot-one-sided", beta=(1.0,)), None),
    "equal costs": ([[2.0] * 3] * 2, Transport("uot", beta=(1.0,)), "uniform plan"),
    "balanced identical rows": ([RAMP[0]] * 2, Transport("eot"), "uniform plan"),
    "everything capped": (
        [[500.0, 600.0], [550.0, 400.0]],
        Transport(epsilon=(1.0,), cap=PRACTICE_CAP),
        "uniform plan",
    ),
    "free identical rows": ([RAMP[0]] * 2, Transport("uot-one-sided", beta=(1.0,)), "identical rows"),
    "tiny epsilon": (HALVES, Transport(epsilon=(0.01,)), "saturated"),
}


@pytest.mark.parametrize("case", FLAGS)
def test_a_coupling_says_when_it_means_nothing(case):
    cost, chosen, expected = FLAGS[case]
    flags = couple(signatures_of(cost), chosen)[0].flags
    assert len(flags) == (expected is not None), flags
    assert expected is None or flags[0].kind is Degeneracy(expected)


def test_dead_sites_are_named():
    flags = couple(signatures_of(RAMP, norms=[1.0, 0.0, 1.0]), Transport("uot", beta=(1.0,)))[0].flags
    assert flags == (Flag(Degeneracy.DEAD, "1 of 3 sites: s1"),)
    many = couple(signatures_of(np.eye(2, 9), norms=[1.0] + [0.0] * 8), Transport("uot", beta=(1.0,)))[0].flags
    assert many[-1].detail == "8 of 9 sites: s1, s2, s3, s4, s5, s6, ..."


def test_a_solution_that_did_not_converge_says_so(monkeypatch):
    assert not solve(RAMP, [(4.0, math.inf)], steps=0)[0].converged
    monkeypatch.setattr(transport, "solve", partial(solve, steps=0))
    stopped = couple(signatures_of(RAMP), Transport("eot"))[0]
    assert not stopped.converged
    assert stopped.flags[0] == Flag(Degeneracy.NOT_CONVERGED, f"row marginal off by {stopped.row_error:.1e}")


def test_scores_rank_sites_behind_the_same_interface():
    found = from_scores(["u", "v"], ["s0", "s1", "s2"], [[1, 3, 0], [0, 0, 0]], "brute force")
    assert found.ranking("u") == [1, 0, 2]
    np.testing.assert_allclose(found.plan, [[1 / 8, 3 / 8, 0], [1 / 6, 1 / 6, 1 / 6]])
    assert found.plan.sum() == pytest.approx(1)
    assert from_scores(["u"], ["s0", "s1"], [[2, 2]], "brute force").flags == (Flag(Degeneracy.UNIFORM),)


def test_scores_that_barely_differ_are_flagged_and_those_that_differ_are_not():
    def kinds_of(scores):
        return [f.kind for f in from_scores(["u", "v"], ["s0", "s1", "s2"], scores, "brute force").flags]

    assert kinds_of([[1, 1, 1 + 1e-7], [1, 1, 1]]) == [Degeneracy.UNIFORM]
    assert kinds_of([[1, 1.1, 1 + 1e-5], [1.2, 1, 1]]) == []
    assert kinds_of([[1, 2, 3], [1, 2, 3 + 1e-7]]) == [Degeneracy.IDENTICAL]
    assert kinds_of([[1, 2, 3], [1, 2, 3 + 1e-4]]) == []
    assert kinds_of([[1, 2, 2 * (1 + 1e-11)], [1, 2, 3]]) == [Degeneracy.SATURATED]
    assert kinds_of([[1, 2, 2 * (1 + 1e-7)], [1, 2, 3]]) == []
    one = from_scores(["u"], ["s0", "s1"], [[1, 3]], "brute force")
    assert (one.flags, one.kind, one.variables, one.sites) == ((), "brute force", ("u",), ("s0", "s1"))
    assert (one.converged, one.iterations, one.row_error, one.column_error) == (True, 0, 0.0, 0.0)
    assert one.cost.tolist() == [[-1, -3]]
    ties = from_scores(["u", "v"], ["s0", "s1", "s2"], [[2, 2, 1], [1, 2, 3]], "x").flags
    assert str(ties[0]) == "saturated: 2, 1 sites tie for the top; costs break the tie"


def test_a_single_site_takes_everything_and_is_no_tie():
    assert couple(signatures_of([[1.0], [2.0]]), Transport("eot"))[0].flags == (Flag(Degeneracy.UNIFORM),)
    assert couple(signatures_of([[1.0]]), Transport("eot"))[0].plan.tolist() == [[1.0]]


def test_a_coupling_carries_where_it_comes_from():
    cost = problem(6)[0]
    signatures = signatures_of(cost)
    exact = torch.tensor([True] * 5 + [False] * 7)
    signatures = replace(signatures, exact=exact, weights={"all": 1.0})
    (found,) = couple(signatures, Transport("uot", epsilon=(0.5,), beta=(2.0,), scale="median"))
    assert (found.variables, found.sites) == (("z0", "z1", "z2"), tuple(f"s{j}" for j in range(12)))
    assert (found.kind, found.epsilon, found.beta, found.scale) == ("uot", 0.5, 2.0, "median")
    assert found.exact.tolist() == exact.tolist()
    assert (found.weights, found.spread) == ({"all": 1.0}, None)
    np.testing.assert_array_equal(found.cost, cost)
    (solution,) = solve(cost / np.median(cost), [(0.5, 2.0)], "uot")
    assert (found.converged, found.iterations) == (True, solution.iterations)
    assert (found.row_error, found.column_error) == (solution.row_error, solution.column_error)
    assert found.column_error > 1e-3  # which a relaxed marginal may have
    part = replace(found, spread=found.plan / 7).columns([11, 0])
    assert part.exact.tolist() == [False, True]
    np.testing.assert_array_equal(part.spread, found.plan[:, [11, 0]] / 7)


def test_the_cap_of_a_transport_reaches_the_solver():
    cost = problem(6, width=100.0)[0]
    (found,) = couple(signatures_of(cost), Transport(epsilon=(1.0,), cap=5.0))
    np.testing.assert_allclose(found.plan, plan(np.minimum(cost, 5.0), 1.0), atol=1e-8)


# -- masks --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_masked_coupling_is_that_of_a_forbidding_cost(kind):
    cost = problem(9, 2, 5)[0]
    mask = np.array([[True, False, True, True, True], [True, True, False, True, False]])
    cosine = -cost / 2
    chosen = Transport(kind, epsilon=(0.5,), beta=(2.0,))
    (found,) = couple(signatures_of(cost, cosine), chosen, mask)
    (dear,) = couple(signatures_of(np.where(mask, cost, 1e4), np.where(mask, cosine, -5e3)), chosen)
    assert (found.plan[~mask] == 0).all()
    np.testing.assert_allclose(found.plan, dear.plan, atol=1e-7)


@pytest.mark.parametrize("mask", [[[True, False], [True, False]], [[True, True], [False, False]]])
def test_a_mask_that_leaves_a_site_or_variable_alone_is_refused(mask):
    with pytest.raises(PlotError, match="an allowed site for every variable and an allowed variable for every site"):
        couple(signatures_of(np.ones((2, 2))), Transport(), np.array(mask))
    with pytest.raises(PlotError, match="needs a finite entry"):
        solve(np.where(mask, 1.0, np.inf), [(1.0, 1.0)])


# -- the dual -----------------------------------------------------------------------------------------------------


def dual(kind, epsilon, beta, seed=3):
    cost, a, b = problem(seed, 3, 6)
    rows, columns = (beta if kind == "uot" else math.inf), (math.inf if kind == "eot" else beta)
    made = transport._Dual(cost[None], np.log(a), np.log(b), np.array([rows]), np.array([columns]))
    return made, cost, a, b, rows, columns


def dual_by_hand(f, cost, a, b, epsilon, rows, columns):
    """The second line of the module's problem, as it is written there."""
    s = (a[:, None] * np.exp((f[:, None] - cost) / epsilon)).sum(axis=0)
    first = (a * f).sum() if math.isinf(rows) else -rows * math.log((a * np.exp(-f / rows)).sum())
    if math.isinf(columns):
        return first - epsilon * (b * np.log(s)).sum()
    return first - (columns + epsilon) * math.log((b * s ** (epsilon / (columns + epsilon))).sum())


@pytest.mark.parametrize("kind", SOLVED)
@pytest.mark.parametrize(("epsilon", "beta"), [(0.7, 2.0), (2.0, 0.3)])
def test_the_dual_is_the_documented_function_with_its_own_derivatives(kind, epsilon, beta):
    made, *given = dual(kind, epsilon, beta)
    cost, a, b, rows, columns = given
    at, eps = np.random.default_rng(0).normal(size=3), np.array([epsilon])

    def value(f):
        return dual_by_hand(f, cost, a, b, epsilon, rows, columns)

    assert made.value(at[None], eps)[0] == pytest.approx(value(at), rel=1e-12)
    gradient, curvature = made.gradient_and_curvature(at[None], eps)
    step = 1e-5 * np.eye(3)
    slope = [(value(at + e) - value(at - e)) / 2e-5 for e in step]
    np.testing.assert_allclose(gradient[0], slope, atol=1e-8)
    bend = [(made.gradient_and_curvature((at + e)[None], eps)[0] - gradient)[0] / 1e-5 for e in step]
    np.testing.assert_allclose(curvature[0], -np.array(bend), atol=1e-4)
    found, alpha = made.plan(at[None], eps)
    np.testing.assert_allclose(alpha[0] - found[0].sum(axis=1), slope, atol=1e-8)
    assert found.sum() == pytest.approx(1)


@pytest.mark.parametrize("kind", SOLVED)
def test_no_gap_is_left_between_primal_and_dual(kind):
    """The plan's own cost, with its divergences, is the dual's value where the solver stops."""
    epsilon, beta = 0.5, 1.5
    made, cost, a, b, rows, columns = dual(kind, epsilon, beta)
    (solution,) = solve(cost, [(epsilon, beta)], kind, a, b)
    pi = solution.plan
    primal = (cost * pi).sum() + epsilon * rel_entr(pi, np.outer(a, b)).sum()
    primal += 0 if math.isinf(rows) else rows * rel_entr(pi.sum(axis=1), a).sum()
    primal += 0 if math.isinf(columns) else columns * rel_entr(pi.sum(axis=0), b).sum()
    f, _ = transport._newton(made, np.zeros((1, 3)), np.array([epsilon]), 1e-12, 100)
    assert made.value(f, np.array([epsilon]))[0] == pytest.approx(primal, rel=1e-9)
    assert solution.column_error == pytest.approx(np.abs(pi.sum(axis=0) - b).sum(), abs=1e-12)


def test_iterations_are_all_newton_steps_of_every_level(monkeypatch):
    taken, newton = [], transport._newton

    def counted(*given):
        f, used = newton(*given)
        taken.append(used)
        return f, used

    monkeypatch.setattr(transport, "_newton", counted)
    (solution,) = solve(problem(4, width=60.0)[0], [(0.05, math.inf)])
    assert len(taken) > 4  # annealed: widest / ε is about 4^5
    assert solution.iterations == sum(taken) > max(taken)


@pytest.mark.parametrize("kind", SOLVED)
def test_newton_with_annealing_needs_few_steps_even_for_small_epsilon(kind):
    cost = problem(5, 3, 40, width=50.0)[0]
    grid = [(e, b) for e in (0.01, 0.1, 1.0) for b in (0.1, 3.0)]
    solutions = solve(cost, grid, kind)
    assert all(s.converged for s in solutions)
    assert solutions[0].iterations <= 90


@pytest.mark.parametrize("kind", SOLVED)
def test_steps_that_would_overshoot_are_taken_back(kind):
    """From here full Newton steps run away: the damping has to grow, and then to shrink again."""
    made, *_ = dual(kind, 0.3, 0.3, seed=8)
    start, eps = np.array([[1.0, -1.0, 0.2]]), np.array([0.3])
    f, steps = transport._newton(made, start, eps, 1e-10, 100)
    assert np.abs(made.gradient_and_curvature(f, eps)[0]).sum() < 1e-9
    assert 5 < steps < 40
    gradient, curvature = made.gradient_and_curvature(start, eps)
    full = start + np.linalg.lstsq(curvature[0], gradient[0])[0]
    assert made.value(full, eps) < made.value(start, eps)  # undamped, the first step already goes too far


# -- refusals -----------------------------------------------------------------------------------------------------

REFUSED = {
    "unknown kind": (lambda: Transport("sinkhorn"), ["transport 'sinkhorn'", *KINDS]),
    "unknown scale": (lambda: Transport(scale="mean"), ["cost scale 'mean'", *SCALES]),
    **{
        f"ε = {e}": (lambda e=e: Transport(epsilon=(1.0, e)), ["ε must be positive", str(e)])
        for e in (0.0, -1.0, math.nan, math.inf)
    },
    "no ε": (lambda: Transport(epsilon=()), ["ε must be positive"]),
    "β = 0": (lambda: Transport("uot", beta=(0.0,)), ["β must be positive", "0.0"]),
    "solving an unknown kind": (lambda: solve(RAMP, [(1.0, 1.0)], kind="sinkhorn"), ["'sinkhorn'", *SOLVED]),
    "solving ε = 0": (lambda: solve(RAMP, [(0.0, 1.0)]), ["ε must be positive", "0.0"]),
    "NaN cost": (lambda: solve([[1.0, math.nan]], [(1.0, 1.0)]), ["m x n matrix of numbers", "(1, 2)"]),
    "NaN signatures": (lambda: couple(signatures_of([[1.0, math.nan]]), Transport()), ["m x n matrix of numbers"]),
    "costs of one dimension": (lambda: solve([1.0, 2.0], [(1.0, 1.0)]), ["m x n", "(2,)"]),
    "no costs": (lambda: solve(np.ones((2, 0)), [(1.0, 1.0)]), ["m x n", "(2, 0)"]),
    "zero median": (
        lambda: couple(signatures_of(np.zeros((2, 3))), Transport(scale="median")),
        ["median", "scale='none'"],
    ),
    "negative scores": (lambda: from_scores(["u"], ["s"], [[-1.0]], "x"), ["finite and non-negative"]),
    "NaN scores": (lambda: from_scores(["u"], ["s"], [[math.nan]], "x"), ["finite and non-negative"]),
    "scores of another shape": (lambda: from_scores(["u"], ["s"], np.ones((2, 3)), "x"), ["(2, 3)"]),
    "unknown row": (lambda: coupling([1], [1]).ranking("w"), ["'w'", "Choose from: z"]),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals_name_what_was_found_and_expected(case):
    assert_refused(*REFUSED[case])
