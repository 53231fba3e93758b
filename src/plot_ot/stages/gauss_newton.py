"""Gauss-Newton for the maps of an edit: right answers at the least cost in natural states.

At a place with states a (width d) the edit of pair p is a_b + M D_p, with D_p = a_s - a_b. Over weighted pairs,

    F(M) = Σ_p w_p loss( f_p(a_b + M D_p), y_p )  +  ρ Σ_p w_p | M D_p - δ_p |²_{Σ⁻¹}  +  ρ ridge |M|²_{Σ⁻¹},

f_p is the rest of the network, δ_p the shift that the prior asks for, Σ the covariance of natural states. Let M₀ be the
minimiser of the prior alone (a ridge regression, the closed form) and G = Σ_p w_p D_p D_pᵀ + ridge I. In the whitened
coordinates M = M₀ + Σ^{1/2} N G^{-1/2} the prior is ρ|N|² and a constant, so

    F(N) = Σ_p w_p loss( f_p(a_b + M₀ D_p + Σ^{1/2} N v_p), y_p ) + ρ |N|²,        v_p = G^{-1/2} D_p.

One Gauss-Newton step needs, per pair, the gradient of the loss at the edited state and as many backward passes as the
loss' Hessian in the outputs has directions that matter: for u = Σ^{1/2} Jᵀ l, the Hessian in N is Σ (u ⊗ v)(u ⊗ v)ᵀ.

Several places at once have a map each, and N is all of theirs. The edits follow one another as in any handle: at a
later place D_p is the source's state less that of the run as edited so far, and J is taken through the later edits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from plot_ot.abstract.banks import first_of_each
from plot_ot.edits import Distinct
from plot_ot.errors import PlotError
from plot_ot.signatures import Readout
from plot_ot.stages.curvature import output_curvature, sharpened, sharpness
from plot_ot.stages.maps import Map, Whitened
from plot_ot.subjects import BankRecording, Place, Subject
from plot_ot.subjects.memory import sent
from plot_ot.subjects.protocol import Rewrite, Store

DIRECT = 1024
"""Up to so many unknowns a step solves the normal equations; beyond, conjugate gradients on products with them."""
UNFELT = 1e-4
"""The share of the matrix that a direct solution leaves out, in the rows of pairs that are sure."""
ITERATIONS = 40
"""The most conjugate-gradient iterations of one step."""


@dataclass(frozen=True)
class Rest:
    """f: what the network makes of states at some places, for pairs that no two have all alike that matters.

    That is the base, the source's states and the label.
    """

    subject: Subject
    store: Store
    places: tuple[Place, ...]
    """In forward order; the network is resumed at the first."""
    rows: Int[Tensor, " pairs"]
    """The base input of every pair."""
    base: Float[Tensor, "pairs d"]
    """Its state at the first place."""
    difference: Float[Tensor, "pairs d"]
    """a_s - a_b at the first place, in double precision on the CPU."""
    later: tuple[Float[Tensor, "pairs _"], ...]
    """The source's states at the other places."""
    labels: Tensor
    """On the CPU, where losses and their curvature are computed: outputs are few numbers."""
    weights: Float[Tensor, " pairs"]
    readout: Readout
    batch: int
    left_out: float = 0.01
    """The share of the loss' curvature that a step may do without; each direction of it is a backward pass."""

    @classmethod
    def of(
        cls,
        recording: BankRecording,
        places: Sequence[Place],
        labels: Tensor,
        weights: Float[Tensor, " pairs"],
        readout: Readout,
        batch: int,
        left_out: float = 0.01,
    ) -> Rest:
        """The pairs of a recording; those alike run once, with their weights added up."""
        order = {p.name: k for k, p in enumerate(recording.subject.places)}
        first_place, *others = sorted(places, key=lambda p: order[p.name])
        distinct = Distinct.of(recording, places).of_pair
        labels, code = labels.cpu(), torch.arange(len(recording)) if distinct is None else distinct
        answer = torch.unique(labels, dim=0 if labels.ndim > 1 else None, return_inverse=True)[1]
        code = torch.unique(code * (int(answer.max()) + 1) + answer, return_inverse=True)[1]
        first = first_of_each(code)
        base = recording.base_at(first_place)[first]
        summed = torch.zeros(len(first), dtype=torch.float64).index_add(0, code, weights.double().cpu())
        return cls(
            recording.subject,
            recording.store,
            (first_place, *others),
            recording.base_rows[first],
            base,
            (recording.source_at(first_place)[first] - base).double().cpu(),
            tuple(recording.source_at(p)[first] for p in others),
            labels[first],
            summed,
            sharpened(readout, sharpness(recording, readout)),
            max(1, batch),
            left_out,
        )

    def outputs(
        self, maps: Sequence[Map], some: slice, nudges: Sequence[Tensor] | None = None
    ) -> tuple[Float[Tensor, "some ..."], list[Float[Tensor, "some _"]]]:
        """The outputs of some pairs under the edits of all places, and D at every place.

        With `nudges` the edited states are a little elsewhere: zeros whose gradients are those of the states.
        """
        state = self.base[some] + sent(maps[0].of(self.difference[some]), self.base.device, self.base.dtype)
        seen: dict[int, Tensor] = {}

        def rewriting(k: int) -> Rewrite:
            source = self.later[k - 1][some]

            def rewrite(a: Float[Tensor, "variants some d"]) -> Float[Tensor, "variants some d"]:
                # a network that is resumed in parts shows zeros for the pairs of other parts
                seen[k] = seen.get(k, 0) + a.detach()
                moved = a + maps[k].of(source - a)
                return moved if nudges is None else moved + nudges[k]

            return rewrite

        later: Mapping[str, Rewrite] = {p.name: rewriting(k) for k, p in enumerate(self.places) if k}
        if nudges is not None:
            state = state + nudges[0]
        outputs = self.subject.resume(self.store, self.rows[some], self.places[0], state.unsqueeze(0), later)[0]
        differences = [(self.later[k - 1][some] - seen[k][0]).double().cpu() for k in range(1, len(self.places))]
        return outputs, [self.difference[some], *differences]

    def clean_difference(self, place: Place) -> Float[Tensor, "pairs d"]:
        """a_s - a_b at a place, both from clean runs, in double precision on the CPU."""
        k = self.places.index(place)
        if not k:
            return self.difference
        return (self.later[k - 1] - self.store.activations[place.name][self.rows]).double().cpu()

    def _batches(self) -> list[slice]:
        return [slice(at, min(at + self.batch, len(self.rows))) for at in range(0, len(self.rows), self.batch)]

    @torch.no_grad()
    def loss(self, maps: Sequence[Map]) -> tuple[float, bool]:
        """Σ_p w_p loss under the edits, and whether every pair gives its label."""
        total, right = 0.0, True
        for some in self._batches():
            outputs = self.outputs(maps, some)[0].unsqueeze(0).cpu()
            total += float(self.weights[some] @ self.readout.loss(outputs, self.labels[some])[0].double())
            right = right and bool(self.readout.correct(outputs, self.labels[some]).all())
        return total, right

    def slopes(self, maps: Sequence[Map]) -> Slopes:
        """The loss' gradient and the factors of its Gauss-Newton matrix at the edited states."""
        total, right, found, seen = 0.0, True, [], []
        for some in self._batches():
            with torch.enable_grad():
                states = [self.base[some], *(later[some] for later in self.later)]
                nudges = [torch.zeros_like(a, requires_grad=True) for a in states]
                outputs, differences = self.outputs(maps, some, nudges)
                seen_here = outputs.detach().cpu()
                losses, slope, curvature = output_curvature(seen_here, self.labels[some], self.readout, self.left_out)
                total += float(self.weights[some] @ losses.double())
                right = right and bool(self.readout.correct(seen_here.unsqueeze(0), self.labels[some]).all())
                backs = sent(torch.stack([slope, *curvature]), outputs.device).unbind()
                if outputs.requires_grad:
                    kept = [*[True] * len(curvature), False]
                    back = [
                        torch.autograd.grad(outputs, nudges, b, retain_graph=more, materialize_grads=True)
                        for b, more in zip(backs, kept, strict=True)
                    ]
                else:  # nothing later looks at these places
                    back = [tuple(torch.zeros_like(a) for a in states) for _ in backs]
            found.append([torch.stack(at).double().cpu() for at in zip(*back, strict=True)])
            seen.append(differences)
        most = max(len(at[0]) for at in found)
        gradients, factors = [], []
        for k in range(len(self.places)):
            gradients.append(torch.cat([at[k][0] for at in found]) * self.weights[:, None])
            padded = [_padded(at[k].transpose(0, 1)[:, 1:], most - 1) for at in found]
            factors.append(torch.cat(padded) * self.weights.sqrt()[:, None, None])
        differences = [torch.cat(at) for at in zip(*seen, strict=True)]
        return Slopes(total, right, tuple(gradients), tuple(factors), tuple(differences))


def _padded(factors: Float[Tensor, "pairs k d"], most: int) -> Float[Tensor, "pairs most d"]:
    return torch.cat([factors, factors.new_zeros(len(factors), most - factors.shape[1], factors.shape[2])], dim=1)


@dataclass(frozen=True)
class Slopes:
    """How the weighted loss changes with the edited states of every place."""

    loss: float
    right: bool
    """Whether every pair gives its label."""
    gradients: tuple[Float[Tensor, "pairs _"], ...]
    factors: tuple[Float[Tensor, "pairs directions _"], ...]
    """The Gauss-Newton matrix of pair p is Σ_k factors[p, k] factors[p, k]ᵀ, over all places' states as one vector."""
    differences: tuple[Float[Tensor, "pairs _"], ...]
    """D at every place, as the edits before it leave it."""


@dataclass(frozen=True)
class Coordinates:
    """N of every place as one vector."""

    at: tuple[Whitened, ...]

    @property
    def zero(self) -> Float[Tensor, " unknowns"]:
        """N of the start."""
        return self.at[0].write.new_zeros(sum(p * q for p, q in (w.shape for w in self.at)))

    def maps(self, n: Float[Tensor, " unknowns"]) -> tuple[Map, ...]:
        """M of every place."""
        parts = n.split([p * q for p, q in (w.shape for w in self.at)])
        return tuple(w.map(part.reshape(w.shape)) for w, part in zip(self.at, parts, strict=True))

    def gradient(self, slopes: Slopes) -> Float[Tensor, " unknowns"]:
        """The gradient of the loss in N."""
        parts = zip(self.at, slopes.gradients, slopes.differences, strict=True)
        return torch.cat([((g @ w.write).T @ (d @ w.read)).flatten() for w, g, d in parts])

    def normal(self, slopes: Slopes) -> Normal:
        """The Gauss-Newton matrix of the loss in N."""
        directions = slopes.factors[0].shape[1]
        u = [(f @ w.write).flatten(0, 1) for w, f in zip(self.at, slopes.factors, strict=True)]
        v = [(d @ w.read).repeat_interleave(directions, 0) for w, d in zip(self.at, slopes.differences, strict=True)]
        return Normal(tuple(u), tuple(v))


@dataclass(frozen=True)
class Normal:
    """The Gauss-Newton equations (Σ_i x_i x_iᵀ + c I) N = right side, x_i = u_i ⊗ v_i of every place, in products."""

    u: tuple[Float[Tensor, "rows _"], ...]
    v: tuple[Float[Tensor, "rows _"], ...]

    def product(self, n: Float[Tensor, " unknowns"]) -> Float[Tensor, " unknowns"]:
        """Σ_i (x_iᵀ N) x_i."""
        parts = n.split([u.shape[1] * v.shape[1] for u, v in zip(self.u, self.v, strict=True)])
        along = sum(
            ((u @ part.reshape(u.shape[1], v.shape[1])) * v).sum(dim=1)
            for u, v, part in zip(self.u, self.v, parts, strict=True)
        )
        return torch.cat([(u.T @ (along[:, None] * v)).flatten() for u, v in zip(self.u, self.v, strict=True)])

    @property
    def scale(self) -> float:
        """The mean of the diagonal."""
        both = list(zip(self.u, self.v, strict=True))
        whole = sum(float((u.square().sum(dim=1) * v.square().sum(dim=1)).sum()) for u, v in both)
        return whole / sum(u.shape[1] * v.shape[1] for u, v in both)

    def solver(self) -> Callable[[Float[Tensor, " unknowns"], float], Float[Tensor, " unknowns"]]:
        """N of a right side and c; few unknowns are solved directly, many by conjugate gradients."""
        both = list(zip(self.u, self.v, strict=True))
        if sum(u.shape[1] * v.shape[1] for u, v in both) > DIRECT:
            return self._conjugate
        kept = self._felt()
        products = torch.cat([(u[kept, :, None] * v[kept, None, :]).flatten(1) for u, v in both], dim=1)
        matrix = products.T @ products
        eye = torch.eye(len(matrix), dtype=matrix.dtype)

        def direct(right: Float[Tensor, " unknowns"], c: float) -> Float[Tensor, " unknowns"]:
            return torch.cholesky_solve(right[:, None], torch.linalg.cholesky(matrix + c * eye))[:, 0]

        return direct

    def _felt(self) -> Int[Tensor, " kept"]:
        """The rows that hold nearly all of the matrix: most pairs are sure, and curve next to nothing."""
        sizes = sum(u.square().sum(dim=1) * v.square().sum(dim=1) for u, v in zip(self.u, self.v, strict=True))
        assert isinstance(sizes, Tensor)  # noqa: S101
        rising = sizes.sort()
        return rising.indices[rising.values.cumsum(0) > UNFELT * sizes.sum()]

    def _conjugate(self, right: Float[Tensor, " unknowns"], c: float) -> Float[Tensor, " unknowns"]:
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

    n: Float[Tensor, " unknowns"]
    objective: float
    loss: float
    right: bool
    """Whether every pair gives its label."""
    steps: int
    history: tuple[float, ...]
    """The objective at the start and after every step; it never rises."""


def minimise(
    rest: Rest,
    coordinates: Coordinates,
    rho: float,
    start: Float[Tensor, " unknowns"] | None = None,
    most: int = 8,
    tolerance: float = 1e-3,
) -> Descent:
    """Gauss-Newton with Levenberg's damping on F(N), from `start` (by default M₀); ends when a step gains little."""
    n = coordinates.zero if start is None else start
    damping = 0.0
    slopes = rest.slopes(coordinates.maps(n))
    objective, history = slopes.loss + rho * float(n.square().sum()), []
    if not all(torch.isfinite(g).all() for g in slopes.gradients) or not objective < float("inf"):
        where = " and ".join(p.name for p in rest.places)
        raise PlotError(f"The loss at {where} has NaN or infinity in its value or gradient.")
    history.append(objective)
    now = Descent(n, objective, slopes.loss, slopes.right, 0, ())
    for step in range(1, most + 1):
        right = -coordinates.gradient(slopes) - 2 * rho * now.n
        normal = coordinates.normal(slopes)
        solve, unit = normal.solver(), normal.scale + 2 * rho
        for _ in range(12):
            tried = now.n + solve(right, 2 * rho + damping * unit)
            loss, right_now = rest.loss(coordinates.maps(tried))
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
        slopes = rest.slopes(coordinates.maps(now.n))
    return replace(now, history=tuple(history))
