"""Transport: couplings between variables and sites, in the log domain and in float64.

All three problems of the paper are one concave maximisation over the m row potentials f. With marginals a, b,

    min over probability plans π   <c, π> + ε KL(π | a⊗b) + β₁ KL(π₁ | a) + β₂ KL(π₂ | b)
  = max over f   -β₁ log Σ_i a_i e^{-f_i/β₁}  -  (β₂+ε) log Σ_j b_j S_j^{ε/(β₂+ε)},
                                                    S_j = Σ_i a_i e^{(f_i - c_ij)/ε},

where β₁ = ∞ fixes the row marginal (first term <a, f>) and β₂ = ∞ the column marginal (second ε Σ_j b_j log S_j).
m is two or three, so damped Newton steps on f, annealed in ε, solve it for a whole (ε, β) grid at once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum

import numpy as np
import torch
from jaxtyping import Bool, Float
from numpy import ndarray
from torch import Tensor

from plot_ot.errors import PlotError, unknown
from plot_ot.finite import refuse_non_finite
from plot_ot.signatures import Signatures

KINDS = ("eot", "uot", "uot-one-sided", "cosine")
SCALES = ("none", "median")
PRACTICE_CAP = 30 * math.log(10)
"""Clamping the Sinkhorn kernel e^{-c/ε} at 1e-30, as the authors' code did, is capping the cost at 69.1 ε."""


@dataclass(frozen=True)
class Transport:
    """A kind of coupling, by name, and its grid of parameters."""

    kind: str = "eot"
    """`eot` balanced; `uot` relaxes both marginals; `uot-one-sided` only the sites'; `cosine` a softmax per row."""
    epsilon: tuple[float, ...] = (4.0,)
    beta: tuple[float, ...] = (math.inf,)
    scale: str = "none"
    """The unit of ε: `none` (paper), or the `median` cost."""
    cap: float | None = None
    """Cap the cost at this multiple of ε (`PRACTICE_CAP` reproduces the authors' clamped kernel)."""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            unknown("transport", self.kind, KINDS)
        if self.scale not in SCALES:
            unknown("cost scale", self.scale, SCALES)
        if not self.epsilon or not all(0 < e < math.inf for e in self.epsilon):
            raise PlotError(f"ε must be positive and finite; found {list(self.epsilon)}.")
        if not self.beta or not all(b > 0 for b in self.beta):
            raise PlotError(f"β must be positive; found {list(self.beta)}.")

    @property
    def grid(self) -> list[tuple[float, float]]:
        """All (ε, β) of the grid; balanced and cosine couplings have no β."""
        betas = self.beta if self.kind.startswith("uot") else (math.inf,)
        return [(e, b) for e in self.epsilon for b in betas]


class Degeneracy(str, Enum):
    """A way in which a coupling can be uninformative; its text is what files and tables hold."""

    ONE_ROW = "one row"
    UNIFORM = "uniform plan"
    IDENTICAL = "identical rows"
    SATURATED = "saturated"
    DEAD = "dead signatures"
    NOT_CONVERGED = "not converged"

    def __str__(self) -> str:
        return self.value

    @property
    def serious(self) -> bool:
        """Whether the degeneracy makes the plan meaningless; ties are broken by cost, and dead sites lose by theirs."""
        return self not in (Degeneracy.SATURATED, Degeneracy.DEAD)

    @property
    def meaning(self) -> str:
        """The degeneracy in one sentence."""
        return MEANINGS[self]


MEANINGS = {
    Degeneracy.ONE_ROW: "A balanced coupling of a single variable is uniform whatever the costs; use one-sided UOT.",
    Degeneracy.UNIFORM: "The coupling prefers no site.",
    Degeneracy.IDENTICAL: "The effects of the variables are not told apart.",
    Degeneracy.SATURATED: "Several sites tie for the top mass; their costs break the tie.",
    Degeneracy.DEAD: "Swapping these sites changes nothing.",
    Degeneracy.NOT_CONVERGED: "The masses are not yet those of the problem.",
}


@dataclass(frozen=True, repr=False)
class Flag:
    """A degeneracy of one coupling, with its particulars."""

    kind: Degeneracy
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.kind}: {self.detail}" if self.detail else str(self.kind)

    __repr__ = __str__


@dataclass(frozen=True)
class Coupling:
    """A fitted plan Π with its names, and what it says about itself."""

    variables: tuple[str, ...]
    sites: tuple[str, ...]
    plan: Float[ndarray, "m n"]
    cost: Float[ndarray, "m n"]
    kind: str
    epsilon: float | None = None
    beta: float | None = None
    scale: str = "none"
    unit: float = 1.0
    """The cost that ε = 1 stands for."""
    converged: bool = True
    iterations: int = 0
    row_error: float = 0.0
    column_error: float = 0.0
    flags: tuple[Flag, ...] = ()
    spread: Float[ndarray, "m n"] | None = None
    """Standard errors of the plan, where signatures were made to have them."""
    exact: Bool[ndarray, " n"] | None = None
    """Columns whose costs come from exact responses; None: all."""
    weights: Mapping[str, float] | None = None
    """The families' weights in hierarchical signatures."""

    def row(self, variable: str) -> Float[ndarray, " n"]:
        """The soft correspondence of one variable."""
        if variable not in self.variables:
            unknown("variable of the coupling", variable, self.variables)
        row: ndarray = self.plan[self.variables.index(variable)]
        return row

    def ranking(self, variable: str) -> list[int]:
        """Sites from highest to lowest mass; equal masses by lower cost."""
        mass, cost = self.row(variable), self.cost[self.variables.index(variable)]
        order = np.argsort(-mass, kind="stable")
        larger, smaller = np.abs(mass[order[:-1]]), np.abs(mass[order[1:]])
        close = 1e-9 * np.maximum(np.maximum(larger, smaller), 1e-300)
        if not bool((np.abs(mass[order[:-1]] - mass[order[1:]]) <= close).any()):  # no ties
            alone: list[int] = order.tolist()
            return alone
        ranked: list[int] = []
        group: list[int] = []
        for j in order:
            if group and not _tied(mass[group[0]], mass[j]):
                ranked += sorted(group, key=lambda s: (cost[s], s))
                group = []
            group.append(int(j))
        return ranked + sorted(group, key=lambda s: (cost[s], s))

    def columns(self, at: Sequence[int]) -> Coupling:
        """The same plan seen on some of the sites only (not renormalised)."""
        names = tuple(self.sites[j] for j in at)
        exact = None if self.exact is None else self.exact[at]
        spread = None if self.spread is None else self.spread[:, at]
        return replace(self, sites=names, plan=self.plan[:, at], cost=self.cost[:, at], exact=exact, spread=spread)

    def tied_at(self, variable: str, k: int) -> bool:
        """Whether mass alone does not say which sites are the top k."""
        mass, ranked = self.row(variable), self.ranking(variable)
        return k < len(ranked) and _tied(mass[ranked[k - 1]], mass[ranked[k]])


def _tied(a: float, b: float) -> bool:
    return bool(abs(a - b) <= 1e-9 * max(abs(a), abs(b), 1e-300))


def couple(signatures: Signatures, transport: Transport, mask: Bool[ndarray, "m n"] | None = None) -> list[Coupling]:
    """One coupling per (ε, β) of the grid; `mask` False forbids a variable a site.

    Of approximate signatures it keeps which costs are exact and the families' weights; where they have replicates, the
    plans of these give the plan's standard errors.
    """
    couplings = _fitted(signatures, transport, mask)
    replicates = [[_fitted(s, transport, mask) for s in some] for some in signatures.replicates]
    exact = None if signatures.exact is None else signatures.exact.numpy()
    return [
        replace(
            c,
            spread=_spread([[s[g].plan for s in some] for some in replicates]),
            exact=exact,
            weights=signatures.weights,
        )
        for g, c in enumerate(couplings)
    ]


def _spread(replicates: Sequence[Sequence[Float[ndarray, "m n"]]]) -> Float[ndarray, "m n"] | None:
    """Standard errors of a plan from the plans without each part, over all sources of error."""
    if not replicates:
        return None
    variances = [(len(p) - 1) * np.var(np.stack(p), axis=0) for p in replicates]
    return np.asarray(np.sqrt(np.sum(variances, axis=0)))


def _fitted(signatures: Signatures, transport: Transport, mask: Bool[ndarray, "m n"] | None) -> list[Coupling]:
    cost = signatures.cost.numpy()
    _require_finite(
        "Costs must be an m x n matrix of numbers",
        cost,
        signatures.variables,
        [s.name for s in signatures.family.sites],
    )
    unit = float(np.median(cost)) if transport.scale == "median" else 1.0
    if not unit > 0:
        raise PlotError("The median cost is zero: every site already matches every variable. Use scale='none'.")
    names = tuple(s.name for s in signatures.family.sites)
    dead = [names[j] for j in signatures.dead]
    if transport.kind == "cosine":
        angles = _masked(-2 * signatures.cosine.numpy(), mask)
        solutions = [_row_softmax(angles, e) for e, _ in transport.grid]
    else:
        solutions = solve(_masked(cost / unit, mask), transport.grid, kind=transport.kind, cap=transport.cap)
    couplings = []
    for (epsilon, beta), s in zip(transport.grid, solutions, strict=True):
        couplings.append(
            Coupling(
                signatures.variables,
                names,
                s.plan,
                cost,
                transport.kind,
                epsilon,
                beta,
                transport.scale,
                unit,
                s.converged,
                s.iterations,
                s.row_error,
                s.column_error,
                _degeneracies(s, transport.kind, dead),
            )
        )
    return couplings


def _require_finite(wanted: str, found: Float[ndarray, "m n"], variables: Sequence[str], sites: Sequence[str]) -> None:
    def message(bad: Tensor) -> str:
        i, j = bad.nonzero()[0].tolist()
        return (
            f"{wanted}; found {found[i, j]} for variable {variables[i]} at site {sites[j]} ({int(bad.sum())} of "
            f"{found.size} are not finite). Look at that site's activations, or leave it out."
        )

    refuse_non_finite(torch.from_numpy(found), message)


def _masked(cost: Float[ndarray, "m n"], mask: Bool[ndarray, "m n"] | None) -> Float[ndarray, "m n"]:
    """Infinite cost where a match is forbidden; every site and every variable must keep one that is allowed."""
    if mask is None:
        return cost
    if not mask.any(axis=0).all() or not mask.any(axis=1).all():
        raise PlotError(
            "A masked coupling needs an allowed site for every variable and an allowed variable for every site."
        )
    return np.where(mask, cost, np.inf)


def from_scores(variables: Sequence[str], sites: Sequence[str], scores: Float[ndarray, "m n"], kind: str) -> Coupling:
    """Any non-negative scores behind the same interface: rows normalised, ranked by score (brute force, random)."""
    scores = np.asarray(scores, dtype=np.float64)
    if scores.shape != (len(variables), len(sites)):
        raise PlotError(f"Scores must be [{len(variables)}, {len(sites)}]; found {scores.shape}.")
    _require_finite("Site scores must be finite and non-negative", scores, variables, sites)
    if (scores < 0).any():
        raise PlotError("Site scores must be finite and non-negative.")
    total = scores.sum(axis=1, keepdims=True)
    even = np.full_like(scores, 1 / scores.shape[1])
    plan = np.where(total > 0, scores / np.where(total > 0, total, 1), even) / len(scores)
    solution = Solution(plan, True, 0, 0.0, 0.0)
    return Coupling(tuple(variables), tuple(sites), plan, -scores, kind, flags=_degeneracies(solution, kind, []))


def _degeneracies(solution: Solution, kind: str, dead: list[str]) -> tuple[Flag, ...]:
    """The degeneracies of a coupling: why it says less than its numbers suggest."""
    plan, flags = solution.plan, list[Flag]()
    conditional = plan / plan.sum(axis=1, keepdims=True).clip(min=1e-300)
    if not solution.converged:
        flags.append(Flag(Degeneracy.NOT_CONVERGED, f"row marginal off by {solution.row_error:.1e}"))
    if len(plan) == 1 and kind == "eot" and plan.shape[1] > 1:
        flags.append(Flag(Degeneracy.ONE_ROW))
    elif np.ptp(conditional, axis=1).max() < 1e-6 / plan.shape[1]:
        flags.append(Flag(Degeneracy.UNIFORM))
    elif len(plan) > 1 and np.abs(conditional - conditional[:1]).max() < 1e-6 * conditional.max():
        flags.append(Flag(Degeneracy.IDENTICAL))
    top = np.sort(conditional, axis=1)[:, ::-1]
    if plan.shape[1] > 1 and not flags:
        ties = [(row >= row[0] * (1 - 1e-9)).sum() for row in top]
        if max(ties) > 1:
            tied = ", ".join(str(t) for t in ties)
            flags.append(Flag(Degeneracy.SATURATED, f"{tied} sites tie for the top; costs break the tie"))
    if dead:
        shown = ", ".join(dead[:6]) + (", ..." if len(dead) > 6 else "")
        flags.append(Flag(Degeneracy.DEAD, f"{len(dead)} of {plan.shape[1]} sites: {shown}"))
    return tuple(flags)


# -- the solver -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Solution:
    """A plan and how well it solves its problem."""

    plan: Float[ndarray, "m n"]
    converged: bool
    iterations: int
    row_error: float
    column_error: float


def _row_softmax(cost: Float[ndarray, "m n"], epsilon: float) -> Solution:
    logits = -cost / epsilon
    plan = np.exp(logits - _logsumexp(logits, axis=1))
    return Solution(plan / len(plan), True, 0, 0.0, 0.0)


def solve(
    cost: Float[ndarray, "m n"],
    grid: Sequence[tuple[float, float]],
    kind: str = "eot",
    a: Float[ndarray, " m"] | None = None,
    b: Float[ndarray, " n"] | None = None,
    cap: float | None = None,
    tolerance: float = 1e-9,
    steps: int = 200,
) -> list[Solution]:
    """Solve the module's problem for every (ε, β) of the grid, uniform marginals by default."""
    cost = np.asarray(cost, dtype=np.float64)
    if cost.ndim != 2 or not cost.size or np.isnan(cost).any() or (cost == -np.inf).any():
        raise PlotError(
            f"Costs must be an m x n matrix of numbers (infinite where forbidden); found shape {cost.shape}."
        )
    allowed = np.isfinite(cost)
    if not allowed.any(axis=0).all() or not allowed.any(axis=1).all():
        raise PlotError("Every row and every column of the costs needs a finite entry.")
    if kind not in KINDS or kind == "cosine":
        unknown("transport problem", kind, [k for k in KINDS if k != "cosine"])
    if not grid or not all(0 < e < math.inf and b > 0 for e, b in grid):
        raise PlotError(f"ε must be positive and finite, β positive; found {list(grid)}.")
    m, n = cost.shape
    a = np.full(m, 1 / m) if a is None else np.asarray(a, dtype=np.float64)
    b = np.full(n, 1 / n) if b is None else np.asarray(b, dtype=np.float64)
    epsilon = np.array([e for e, _ in grid], dtype=np.float64)
    beta = np.array([math.inf if kind == "eot" else x for _, x in grid], dtype=np.float64)
    rows = beta if kind == "uot" else np.full_like(beta, math.inf)
    costs = np.broadcast_to(cost, (len(grid), m, n))
    if cap is not None:
        costs = np.where(allowed, np.minimum(costs, cap * epsilon[:, None, None]), np.inf)
    problem = _Dual(costs, np.log(a), np.log(b), rows, beta)
    f, taken = np.zeros((len(grid), m)), 0
    widest = max(float(np.ptp(cost[allowed])), float(epsilon.max()))
    levels = max(0, math.ceil(math.log(widest / epsilon.min(), 4)))
    for level in range(levels + 1):
        at = np.maximum(epsilon, widest / 4.0**level) if level < levels else epsilon
        f, used = _newton(problem, f, at, tolerance if level == levels else 1e-3, steps if level == levels else 30)
        taken += used
    plan, alpha = problem.plan(f, epsilon)
    row_error = np.abs(plan.sum(axis=2) - alpha).sum(axis=1)
    column_error = np.abs(plan.sum(axis=1) - b).sum(axis=1)
    return [
        Solution(p, bool(e < 1e-6), taken, float(e), float(c))
        for p, e, c in zip(plan, row_error, column_error, strict=True)
    ]


@dataclass(frozen=True)
class _Dual:
    """The dual objective of every grid point g: value, plan and curvature at row potentials f [g, m]."""

    cost: Float[ndarray, "g m n"]
    log_a: Float[ndarray, " m"]
    log_b: Float[ndarray, " n"]
    beta_rows: Float[ndarray, " g"]
    beta_columns: Float[ndarray, " g"]

    def _columns(self, f: ndarray, epsilon: ndarray) -> tuple[ndarray, ndarray, ndarray]:
        """The logarithms of P(row | column) and of the column masses, and the second dual term."""
        scores = self.log_a[:, None] + (f[:, :, None] - self.cost) / epsilon[:, None, None]
        log_s = _logsumexp(scores, axis=1)
        free = np.isfinite(self.beta_columns)
        power = np.where(free, epsilon / (epsilon + np.where(free, self.beta_columns, 1.0)), 0.0)
        masses = self.log_b + power[:, None] * log_s[:, 0]
        total = _logsumexp(masses, axis=1)
        value = np.where(
            free,
            (epsilon + np.where(free, self.beta_columns, 0.0)) * total[:, 0],
            epsilon * (np.exp(self.log_b) * log_s[:, 0]).sum(axis=1),
        )
        return scores - log_s, masses - total, value

    def _rows(self, f: ndarray) -> tuple[ndarray, ndarray]:
        """The row marginal α the potentials ask for, and the first dual term."""
        free = np.isfinite(self.beta_rows)
        width = np.where(free, self.beta_rows, 1.0)[:, None]
        tilted = self.log_a - np.where(free[:, None], f / width, 0.0)
        total = _logsumexp(tilted, axis=1)
        value = np.where(free, -width[:, 0] * total[:, 0], (np.exp(self.log_a) * f).sum(axis=1))
        return np.exp(tilted - total), value

    def value(self, f: ndarray, epsilon: ndarray) -> ndarray:
        value: ndarray = self._rows(f)[1] - self._columns(f, epsilon)[2]
        return value

    def plan(self, f: ndarray, epsilon: ndarray) -> tuple[ndarray, ndarray]:
        conditional, masses, _ = self._columns(f, epsilon)
        return np.exp(conditional + masses[:, None, :]), self._rows(f)[0]

    def gradient_and_curvature(self, f: ndarray, epsilon: ndarray) -> tuple[ndarray, ndarray]:
        conditional, masses, _ = self._columns(f, epsilon)
        p, w = np.exp(conditional), np.exp(masses)
        alpha, _ = self._rows(f)
        plan = p * w[:, None, :]
        r = plan.sum(axis=2)
        second = plan @ p.transpose(0, 2, 1)
        eps = epsilon[:, None, None]
        outer = r[:, :, None] * r[:, None, :]
        curvature = (_diagonal(r) - second) / eps + (second - outer) / (eps + self.beta_columns[:, None, None])
        curvature += (_diagonal(alpha) - alpha[:, :, None] * alpha[:, None, :]) / self.beta_rows[:, None, None]
        return alpha - r, curvature


def _newton(problem: _Dual, f: ndarray, epsilon: ndarray, tolerance: float, steps: int) -> tuple[ndarray, int]:
    """Maximise by Newton steps with a damping that grows when a step fails and shrinks when it succeeds."""
    m = f.shape[1]
    gauge = np.ones((m, m)) / (m * epsilon[:, None, None])  # the objective ignores f + constant: pin it
    damping = np.full(len(f), 1e-6)
    value = problem.value(f, epsilon)
    step = 0
    gradient, curvature = problem.gradient_and_curvature(f, epsilon)
    while step < steps and np.abs(gradient).sum(axis=1).max() > tolerance:
        step += 1
        ridge = (damping / epsilon)[:, None, None] * np.eye(m)
        move = np.linalg.solve(curvature + gauge + ridge, gradient[:, :, None])[:, :, 0]
        trial = f + move
        gained = problem.value(trial, epsilon)
        slope, bend = problem.gradient_and_curvature(trial, epsilon)
        flatter = np.abs(slope).sum(axis=1) < np.abs(gradient).sum(axis=1)  # seen where the value's digits run out
        better = (gained >= value - 1e-14 * np.abs(value)) | flatter
        f = np.where(better[:, None], trial, f)
        value = np.where(better, gained, value)
        damping = np.clip(np.where(better, damping / 10, damping * 10), 1e-15, 1e6)
        gradient = np.where(better[:, None], slope, gradient)
        curvature = np.where(better[:, None, None], bend, curvature)
    return f - f.mean(axis=1, keepdims=True), step


def _diagonal(x: Float[ndarray, "g m"]) -> Float[ndarray, "g m m"]:
    return x[:, :, None] * np.eye(x.shape[1])


def _logsumexp(x: ndarray, axis: int) -> ndarray:
    top = x.max(axis=axis, keepdims=True)
    total: ndarray = top + np.log(np.exp(x - top).sum(axis=axis, keepdims=True))
    return total
