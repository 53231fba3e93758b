"""Gauss-Newton for the map of an edit: right answers at the least cost in natural states.

At a place with states a (width d) the edit of pair p is a_b + M D_p, with D_p = a_s - a_b. Over weighted pairs,

    F(M) = Σ_p w_p loss( f_p(a_b + M D_p), y_p )  +  ρ Σ_p w_p | M D_p - δ_p |²_{Σ⁻¹}  +  ρ ridge |M|²_{Σ⁻¹},

f_p is the rest of the network, δ_p the shift that the prior asks for, Σ the covariance of natural states. Let M₀ be the
minimiser of the prior alone (a ridge regression, the closed form) and G = Σ_p w_p D_p D_pᵀ + ridge I. In the whitened
coordinates M = M₀ + Σ^{1/2} N G^{-1/2} the prior is ρ|N|² and a constant, so

    F(N) = Σ_p w_p loss( f_p(a_b + M₀ D_p + Σ^{1/2} N v_p), y_p ) + ρ |N|²,        v_p = G^{-1/2} D_p.

One Gauss-Newton step needs, per pair, the gradient of the loss at the edited state and as many backward passes as the
loss' Hessian in the outputs has directions that matter: for u = Σ^{1/2} Jᵀ l, the Hessian in N is Σ (u ⊗ v)(u ⊗ v)ᵀ.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from plot_ot.abstract.banks import first_of_each
from plot_ot.edits import Distinct
from plot_ot.errors import PlotError
from plot_ot.signatures import Readout
from plot_ot.subjects import BankRecording, Place, Subject
from plot_ot.subjects.protocol import Store

DIRECT = 1024
"""Up to so many unknowns a step solves the normal equations; beyond, conjugate gradients on products with them."""
OUTPUTS = 32
"""Of more outputs than this, only those on which the loss depends most are differentiated."""
DIRECTIONS = 8
"""The most backward passes for the curvature of one pair."""
SURE, SHARPEST = 0.01, 64.0
"""A network that is right but not sure has a loss on its own answers. The loss of its edits would then ask for surer
answers than it ever gives; so outputs are scaled until that loss is small, by a factor of at most the second number."""
ITERATIONS = 40
"""The most conjugate-gradient iterations of one step."""


@dataclass(frozen=True)
class Rest:
    """f: what the network makes of states at a place, for pairs that no two have base, source state and label alike."""

    subject: Subject
    store: Store
    place: Place
    rows: Int[Tensor, " pairs"]
    """The base input of every pair."""
    base: Float[Tensor, "pairs d"]
    difference: Float[Tensor, "pairs d"]
    """a_s - a_b, in double precision on the CPU."""
    labels: Tensor
    weights: Float[Tensor, " pairs"]
    readout: Readout
    batch: int

    @classmethod
    def of(
        cls,
        recording: BankRecording,
        place: Place,
        labels: Tensor,
        weights: Float[Tensor, " pairs"],
        readout: Readout,
        batch: int,
    ) -> Rest:
        """The pairs of a recording; those alike run once, with their weights added up."""
        distinct = Distinct.of(recording, [place]).of_pair
        device = recording.base_rows.device
        code = torch.arange(len(recording), device=device) if distinct is None else distinct
        answer = torch.unique(labels, dim=0 if labels.ndim > 1 else None, return_inverse=True)[1].to(device)
        code = torch.unique(code * (int(answer.max()) + 1) + answer, return_inverse=True)[1]
        first = first_of_each(code)
        base = recording.base_at(place)[first]
        difference = (recording.source_at(place)[first] - base).double().cpu()
        summed = torch.zeros(len(first), dtype=torch.float64).index_add(0, code.cpu(), weights.double().cpu())
        rows = recording.base_rows[first]
        readout = sharpened(readout, sharpness(recording, readout))
        labels = labels.to(device)[first]
        return cls(
            recording.subject, recording.store, place, rows, base, difference, labels, summed, readout, max(1, batch)
        )

    def _states(self, shift: Float[Tensor, "pairs d"], some: slice) -> Float[Tensor, "some d"]:
        return self.base[some] + shift[some].to(self.base)

    def _outputs(self, state: Float[Tensor, "some d"], some: slice) -> Float[Tensor, "some ..."]:
        return self.subject.resume(self.store, self.rows[some], self.place, state.unsqueeze(0), {})[0]

    def _batches(self) -> list[slice]:
        return [slice(at, min(at + self.batch, len(self.rows))) for at in range(0, len(self.rows), self.batch)]

    @torch.no_grad()
    def loss(self, shift: Float[Tensor, "pairs d"]) -> tuple[float, bool]:
        """Σ_p w_p loss at the edited states a_b + shift, and whether every pair gives its label."""
        total, right = 0.0, True
        for some in self._batches():
            outputs = self._outputs(self._states(shift, some), some).unsqueeze(0)
            total += float(self.weights[some] @ self.readout.loss(outputs, self.labels[some])[0].double().cpu())
            right = right and bool(self.readout.correct(outputs, self.labels[some]).all())
        return total, right

    def slopes(self, shift: Float[Tensor, "pairs d"]) -> Slopes:
        """The loss' gradient and the factors of its Gauss-Newton matrix at the edited states."""
        total, gradients, factors = 0.0, [], []
        for some in self._batches():
            with torch.enable_grad():
                state = self._states(shift, some).detach().requires_grad_()
                outputs = self._outputs(state, some)
                losses, slope, curvature = output_curvature(outputs.detach(), self.labels[some], self.readout)
                total += float(self.weights[some] @ losses.double().cpu())
                backs = [slope, *curvature]
                if outputs.requires_grad:
                    found = [
                        torch.autograd.grad(outputs, state, back, retain_graph=more, materialize_grads=True)[0]
                        for back, more in zip(backs, [*[True] * len(curvature), False], strict=True)
                    ]
                else:  # nothing later looks at this place
                    found = [torch.zeros_like(state) for _ in backs]
            gradients.append(found[0].double().cpu())
            factors.append([f.double().cpu() for f in found[1:]])
        most = max(map(len, factors))
        stacked = torch.zeros(len(self.rows), most, self.place.width, dtype=torch.float64)
        for some, own in zip(self._batches(), factors, strict=True):
            for k, f in enumerate(own):
                stacked[some, k] = f
        gradient = torch.cat(gradients) * self.weights[:, None]
        return Slopes(total, gradient, stacked * self.weights.sqrt()[:, None, None])


def sharpness(recording: BankRecording, readout: Readout) -> float:
    """The least factor 1, 2, 4, ... on the outputs at which the network's own answers have a mean loss below `SURE`."""
    outputs, answers = recording.base_outputs, recording.bank.base_answer.to(recording.base_rows.device)
    factor = 1.0
    while (
        readout.logits
        and factor < SHARPEST
        and float(readout.loss(factor * outputs.unsqueeze(0), answers).mean()) > SURE
    ):
        factor *= 2
    return factor


def sharpened(readout: Readout, factor: float) -> Readout:
    """The readout whose loss sees outputs times a factor."""
    return replace(readout, loss=lambda outputs, labels: readout.loss(factor * outputs, labels))


@dataclass(frozen=True)
class Slopes:
    """How the weighted loss changes with the edited states."""

    loss: float
    gradient: Float[Tensor, "pairs d"]
    factors: Float[Tensor, "pairs directions d"]
    """The Gauss-Newton matrix of pair p is Σ_k factors[p, k] factors[p, k]ᵀ."""


def output_curvature(
    outputs: Float[Tensor, "pairs ..."], labels: Tensor, readout: Readout
) -> tuple[Float[Tensor, " pairs"], Tensor, list[Tensor]]:
    """Loss, gradient in the outputs, and directions l with Σ l lᵀ the loss' Hessian in the outputs, for every pair.

    A loss of K answers has a Hessian of few directions: the label against its rivals. Those that together hold less
    than 1 % of it, summed over pairs, are left out.
    """
    shape = outputs.shape
    y = outputs.detach().requires_grad_()
    losses = readout.loss(y.unsqueeze(0), labels)[0]
    [slope] = torch.autograd.grad(losses.sum(), y, create_graph=True)
    flat = slope.flatten(1)
    if not flat.requires_grad:  # a loss that is linear in the outputs
        return losses.detach(), slope.detach(), []
    k = min(OUTPUTS, flat.shape[1])
    chosen = flat.detach().abs().topk(k, dim=1).indices
    columns = []
    for n in range(k):
        [column] = torch.autograd.grad(flat.gather(1, chosen[:, n : n + 1]).sum(), y, retain_graph=True)
        columns.append(column.flatten(1).gather(1, chosen))
    hessian = torch.stack(columns, dim=2).double()
    values, vectors = torch.linalg.eigh(0.5 * (hessian + hessian.mT))
    values, vectors = values.clamp(min=0).flip(1), vectors.flip(2)
    held = values.sum(dim=0)
    beyond = held.sum() - held.cumsum(0)
    most = min(DIRECTIONS, int((beyond > 0.01 * held.sum()).sum()) + 1)
    directions = []
    for n in range(most):
        direction = torch.zeros(len(y), flat.shape[1], dtype=torch.float64, device=y.device)
        direction.scatter_(1, chosen, vectors[:, :, n] * values[:, n : n + 1].sqrt())
        directions.append(direction.to(outputs.dtype).reshape(shape))
    return losses.detach(), slope.detach(), directions


@dataclass(frozen=True)
class Map:
    """M = W Rᵀ, as its two factors."""

    write: Float[Tensor, "d m"]
    read: Float[Tensor, "d m"]

    def of(self, difference: Float[Tensor, "pairs d"]) -> Float[Tensor, "pairs d"]:
        """M D for every pair."""
        return (difference @ self.read) @ self.write.T


@dataclass(frozen=True)
class Metric:
    """Cholesky factors of Σ, the covariance of natural states, and of G, the second moment of differences."""

    natural: Float[Tensor, "d d"]
    differences: Float[Tensor, "d d"]

    @classmethod
    def of(cls, natural: Float[Tensor, "d d"], differences: Float[Tensor, "d d"]) -> Metric:
        """From Σ and G themselves."""
        return cls(torch.linalg.cholesky(natural), torch.linalg.cholesky(differences))

    def factored(self, m: Map, least: float) -> Map:
        """A map by singular values, the largest first, without those below `least` of the largest.

        Length is measured where it counts: what goes in in units of the differences, what comes out in natural units.
        """
        out = torch.linalg.qr(torch.linalg.solve_triangular(self.natural, m.write, upper=False))
        into = torch.linalg.qr(self.differences.T @ m.read)
        u, s, vt = torch.linalg.svd(out.R @ into.R.T)
        rank = max(1, int((s > least * s[0]).sum()))
        write = self.natural @ (out.Q @ (u[:, :rank] * s[:rank]))
        read = torch.linalg.solve_triangular(self.differences.T, into.Q @ vt[:rank].T, upper=True)
        return Map(write, read)


@dataclass(frozen=True)
class Whitened:
    """M = M₀ + A N Bᵀ: the coordinates in which the prior of a map is |N|².

    Any root of a matrix will do, since |N|² does not change when N is turned.
    """

    start: Map
    write: Float[Tensor, "d p"]
    """A, with Aᵀ Σ⁻¹ A = I."""
    read: Float[Tensor, "d q"]
    """B, with Bᵀ G B = I."""

    @classmethod
    def of(cls, start: Map, metric: Metric, basis: Float[Tensor, "d r"] | None = None) -> Whitened:
        """Around `start`; with an orthonormal `basis`, N mixes only these directions, both ways."""
        eye = torch.eye(len(metric.natural), dtype=metric.natural.dtype)
        if basis is None:
            return cls(start, metric.natural, torch.linalg.solve_triangular(metric.differences.T, eye, upper=True))
        small = torch.linalg.solve_triangular(metric.natural, basis, upper=False)
        precision = torch.linalg.cholesky(small.T @ small)
        moment = torch.linalg.cholesky((metric.differences.T @ basis).T @ (metric.differences.T @ basis))
        within = eye[: basis.shape[1], : basis.shape[1]]
        return cls(
            start,
            basis @ torch.linalg.solve_triangular(precision.T, within, upper=True),
            basis @ torch.linalg.solve_triangular(moment.T, within, upper=True),
        )

    @property
    def zero(self) -> Float[Tensor, "p q"]:
        """N of the start."""
        return self.write.new_zeros(self.write.shape[1], self.read.shape[1])

    def map(self, n: Float[Tensor, "p q"]) -> Map:
        """M."""
        return Map(torch.cat([self.start.write, self.write @ n], dim=1), torch.cat([self.start.read, self.read], dim=1))


@dataclass(frozen=True)
class Normal:
    """The Gauss-Newton equations (Σ_i (u_i ⊗ v_i)(u_i ⊗ v_i)ᵀ + c I) N = right side, in products alone."""

    u: Float[Tensor, "rows p"]
    v: Float[Tensor, "rows q"]

    def product(self, n: Float[Tensor, "p q"]) -> Float[Tensor, "p q"]:
        """Σ_i (u_iᵀ N v_i) u_i v_iᵀ."""
        along = ((self.u @ n) * self.v).sum(dim=1)
        return self.u.T @ (along[:, None] * self.v)

    @property
    def scale(self) -> float:
        """The mean of the diagonal."""
        whole = (self.u.square().sum(dim=1) * self.v.square().sum(dim=1)).sum()
        return float(whole) / (self.u.shape[1] * self.v.shape[1])

    def solver(self) -> Callable[[Float[Tensor, "p q"], float], Float[Tensor, "p q"]]:
        """N of a right side and c; few unknowns are solved directly, many by conjugate gradients."""
        p, q = self.u.shape[1], self.v.shape[1]
        if p * q > DIRECT:
            return self._conjugate
        products = (self.u[:, :, None] * self.v[:, None, :]).flatten(1)
        matrix = products.T @ products
        eye = torch.eye(p * q, dtype=matrix.dtype)

        def direct(right: Float[Tensor, "p q"], c: float) -> Float[Tensor, "p q"]:
            root = torch.linalg.cholesky(matrix + c * eye)
            return torch.cholesky_solve(right.flatten()[:, None], root).reshape(p, q)

        return direct

    def _conjugate(self, right: Float[Tensor, "p q"], c: float) -> Float[Tensor, "p q"]:
        n, left = torch.zeros_like(right), right.clone()
        along, size = left, float(left.square().sum())
        wanted = 1e-6 * size
        for _ in range(ITERATIONS):
            if size <= wanted:
                break
            moved = self.product(along) + c * along
            step = size / float((along * moved).sum())
            n, left = n + step * along, left - step * moved
            size, before = float(left.square().sum()), size
            along = left + (size / before) * along
        return n


@dataclass(frozen=True)
class Descent:
    """Where Gauss-Newton has come to."""

    n: Float[Tensor, "p q"]
    objective: float
    loss: float
    right: bool
    """Whether every pair gives its label."""
    steps: int
    history: tuple[float, ...]
    """The objective at the start and after every step; it never rises."""


def minimise(
    rest: Rest,
    coordinates: Whitened,
    rho: float,
    start: Float[Tensor, "p q"] | None = None,
    most: int = 8,
    tolerance: float = 1e-3,
) -> Descent:
    """Gauss-Newton with Levenberg's damping on F(N), from `start` (by default M₀); ends when a step gains little."""
    n = coordinates.zero if start is None else start
    v = rest.difference @ coordinates.read
    closed = coordinates.start.of(rest.difference)

    def shift(n: Float[Tensor, "p q"]) -> Float[Tensor, "pairs d"]:
        return closed + v @ n.T @ coordinates.write.T

    damping = 0.0
    slopes = rest.slopes(shift(n))
    objective, history = slopes.loss + rho * float(n.square().sum()), []
    if not torch.isfinite(slopes.gradient).all() or not objective < float("inf"):
        raise PlotError(f"The loss at {rest.place.name} has NaN or infinity in its value or gradient.")
    history.append(objective)
    now = Descent(n, objective, slopes.loss, rest.loss(shift(n))[1], 0, ())
    for step in range(1, most + 1):
        right = -((slopes.gradient @ coordinates.write).T @ v) - 2 * rho * now.n
        k = slopes.factors.shape[1]
        normal = Normal((slopes.factors @ coordinates.write).flatten(0, 1), v.repeat_interleave(k, dim=0))
        solve, unit = normal.solver(), normal.scale + 2 * rho
        for _ in range(12):
            tried = now.n + solve(right, 2 * rho + damping * unit)
            loss, right_now = rest.loss(shift(tried))
            objective = loss + rho * float(tried.square().sum())
            if objective < now.objective:
                break
            damping = max(1e-2, 8 * damping)
        else:
            break
        gained = now.objective - objective
        now = replace(now, n=tried, objective=objective, loss=loss, right=right_now, steps=step)
        history.append(objective)
        damping = damping / 8 if damping > 1e-3 else 0.0
        if gained <= tolerance * max(objective, 1e-12) or step == most:
            break
        slopes = rest.slopes(shift(now.n))
    return replace(now, history=tuple(history))
