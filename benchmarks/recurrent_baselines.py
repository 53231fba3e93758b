"""The adder's study without plot-ot: plain PyTorch hooks, POT and pyvene on a GRU. Nothing here imports plot_ot."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import orthogonal

from baselines import EncodedPairs, Job, Laps, Trained, activations, by_mass, hooks, pot_plan

TOLERANCE = 1e-2
"""Error of the marginals that is let pass: POT's default budget does not always do at small ε (a 3 x 3 problem at 0.003
is off by 1e-6 after 200,000 iterations, too), and a user would take the plan with its warning."""


class Unrolled(nn.Module):
    """The GRU with a module of its own for every state, so that hooks and pyvene can name it; weights are shared."""

    def __init__(self, net: nn.Module, steps: int) -> None:
        super().__init__()
        self.cell, self.step_head, self.last_head = net.cell, net.step_head, net.last_head
        self.states = nn.ModuleList(nn.Identity() for _ in range(steps))
        self.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        h = x.new_zeros(len(x), self.cell.hidden_size)
        read = []
        for now, state in zip(x.unbind(dim=1), self.states, strict=True):
            h = self.named(state, self.cell(now, h))
            read.append(self.step_head(h))
        return torch.cat([self.last_head(h), *reversed(read)], dim=1)

    def named(self, state: nn.Module, h: Tensor) -> Tensor:
        return state(h)


class UnrolledForPyvene(Unrolled):
    """pyvene expects activations [rows, positions, d], a configuration and a device."""

    config = None
    device = torch.device("cpu")

    def named(self, state: nn.Module, h: Tensor) -> Tensor:
        return state(h.unsqueeze(1)).squeeze(1)


# -- PLOT in stages, as a loop --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sites:
    """A menu at one state: directions [d, r] (None: the coordinates) and the sets of them that are swapped."""

    directions: Tensor | None
    members: Tensor
    """[sites, r], 1 where a direction belongs to a site."""


Menu = Callable[[Tensor], Sites]
"""From the fit bases' states [n, d] to the sites."""


def blocks(resolution: int) -> Menu:
    """Groups of neighbouring coordinates."""
    return lambda states: Sites(None, _members(states.shape[1], range(0, states.shape[1], resolution), resolution))


def _members(width: int, starts: Sequence[int], size: int) -> Tensor:
    at = torch.arange(width)
    return torch.stack([(at >= s) & (at < s + size) for s in starts]).float()


def pca_prefixes(states: Tensor) -> Sites:
    """The first 1, 2, 4, ... principal components, and all of them."""
    centred = (states - states.mean(dim=0)).double()
    _, spread, directions = torch.linalg.svd(centred, full_matrices=False)
    rank = int((spread > 1e-6 * spread[0]).sum())
    ends = [1 << k for k in range(rank.bit_length()) if 1 << k < rank] + [rank]
    return Sites(directions[:rank].T.float(), torch.tril(torch.ones(rank, rank))[[e - 1 for e in ends]])


@dataclass
class StagedRun:
    """What the loop found, and the seconds of its parts."""

    seconds: dict[str, float] = field(default_factory=dict)
    places: dict[str, int] = field(default_factory=dict)
    surfaces: dict[str, Tensor] = field(default_factory=dict)
    """Per variable, calibration scores [menus x ε, sizes, strengths]."""
    chosen: dict[str, tuple[int, int, float]] = field(default_factory=dict)
    """Per variable, (candidate, K, λ); empty after Stage A alone."""
    test: dict[str, float] = field(default_factory=dict)
    forwards: int = 0


@dataclass
class StagedLoop:
    """Stage A over whole states and, with menus, Stage B inside the chosen ones: one hooked forward after another.

    `batch` a number: that many pairs per forward, and the sources run again for every site and every grid point.
    None: a whole bank per forward, with source states kept (as fast as a loop over sites and grid points gets).
    """

    net: Unrolled
    menus: Sequence[Menu]
    stage_a: Sequence[float]
    stage_b: Sequence[float]
    sizes: Sequence[int]
    strengths: Sequence[float]
    batch: int | None = 64
    forwards: int = 0
    kept: dict[int, list[Tensor]] = field(default_factory=dict)

    @torch.no_grad()
    def run(
        self, fit: EncodedPairs, calibration: EncodedPairs, tests: Mapping[str, tuple[str, EncodedPairs]]
    ) -> StagedRun:
        done, self.forwards, self.kept = StagedRun(), 0, {}
        clock = Laps(done.seconds)
        if self.batch is None:
            self.kept = {id(p): self._states(p.source) for p in (fit, calibration, *(p for _, p in tests.values()))}
        bases = self._states(fit.base.unique(dim=0))
        clean = self._forward(fit.base).sigmoid()
        clock.lap("recording")
        width = self.net.cell.hidden_size
        whole = Sites(None, torch.ones(1, width))
        effects = torch.cat([self._effects(fit, clean, t, whole) for t in range(len(bases))])
        clock.lap("signatures")
        cost = _cost(fit, effects)
        plans = [pot_plan(cost, e, TOLERANCE) for e in self.stage_a]
        clock.lap("transport")
        for i, v in enumerate(fit.labels):
            proposed = list(dict.fromkeys(int(by_mass(plan[i], cost[i])[0]) for plan in plans))
            scores = [self._score(calibration, v, t, None, torch.ones(width)) for t in proposed]
            done.places[v] = proposed[max(range(len(proposed)), key=lambda n: round(scores[n], 9))]
        clock.lap("calibration")
        handles = {v: (t, None, torch.ones(width)) for v, t in done.places.items()}
        for t in sorted(set(done.places.values())) if self.menus else ():
            found = []
            for menu in self.menus:
                sites = menu(bases[t])
                effects = self._effects(fit, clean, t, sites)
                clock.lap("signatures")
                cost = _cost(fit, effects)
                found += [(sites, cost, pot_plan(cost, e, TOLERANCE)) for e in self.stage_b]
                clock.lap("transport")
            for i, v in enumerate(fit.labels):
                if done.places[v] == t:
                    rows = [(sites, plan[i], by_mass(plan[i], cost[i])) for sites, cost, plan in found]
                    done.surfaces[v], done.chosen[v] = self._calibrate(calibration, v, t, rows)
                    at, k, strength = done.chosen[v]
                    handles[v] = (t, rows[at][0].directions, _gains(*rows[at], k) * strength)
            clock.lap("calibration")
        for name, (v, pairs) in tests.items():
            done.test[name] = float(self._right(pairs, v, *handles[v]).mean())
        clock.lap("test")
        done.forwards = self.forwards
        return done

    def _calibrate(
        self, pairs: EncodedPairs, v: str, t: int, rows: Sequence[tuple[Sites, Tensor, Tensor]]
    ) -> tuple[Tensor, tuple[int, int, float]]:
        """Every (K, λ) of every coupling in turn; ties: smallest K, then smallest λ, then the first coupling."""
        surface = torch.zeros(len(rows), len(self.sizes), len(self.strengths), dtype=torch.float64)
        for c, (sites, row, order) in enumerate(rows):
            for n, k in enumerate(self.sizes):
                if n and self.sizes[n - 1] >= len(row):  # more sites than there are: as before
                    surface[c, n] = surface[c, n - 1]
                    continue
                gains = _gains(sites, row, order, k)
                for s, strength in enumerate(self.strengths):
                    surface[c, n, s] = self._score(pairs, v, t, sites.directions, strength * gains)
        tied = (surface >= surface.max() - 1e-9).nonzero().tolist()
        c, n, s = min(tied, key=lambda at: (at[1], at[2], at[0]))
        return surface, (c, min(self.sizes[n], len(rows[c][1])), self.strengths[s])

    def _effects(self, fit: EncodedPairs, clean: Tensor, t: int, sites: Sites) -> Tensor:
        """φ(edited) - φ(base) of every site swapped alone, [sites, pairs x bits]."""
        swaps = [self._edited(fit, t, sites.directions, member) for member in sites.members]
        return torch.stack([(y.sigmoid() - clean).flatten() for y in swaps])

    def _score(self, pairs: EncodedPairs, v: str, t: int, directions: Tensor | None, gains: Tensor) -> float:
        """Half sensitivity, half invariance."""
        right = self._right(pairs, v, t, directions, gains)
        changed = (pairs.labels[v] != pairs.answer).any(dim=1)
        return float(0.5 * right[changed].mean() + 0.5 * right[~changed].mean())

    def _right(self, pairs: EncodedPairs, v: str, t: int, directions: Tensor | None, gains: Tensor) -> Tensor:
        bits = self._edited(pairs, t, directions, gains) >= 0
        return (bits == pairs.labels[v].bool()).all(dim=1).double()

    def _edited(self, pairs: EncodedPairs, t: int, directions: Tensor | None, gains: Tensor) -> Tensor:
        """Outputs of the base with the source's part of the state at t."""

        def forward(base: Tensor, source: Tensor) -> Tensor:
            def edit(a: Tensor) -> Tensor:
                if directions is None:
                    return a + gains * (source - a)
                return a + (gains * ((source - a) @ directions)) @ directions.T

            with hooks({self.net.states[t]: edit}):
                return self._forward(base)

        if self.batch is None:
            return forward(pairs.base, self.kept[id(pairs)][t])
        parts = zip(pairs.base.split(self.batch), pairs.source.split(self.batch), strict=True)
        return torch.cat([forward(b, self._states(s)[t]) for b, s in parts])

    def _states(self, x: Tensor) -> list[Tensor]:
        self.forwards += 1
        return activations(self.net, x)

    def _forward(self, x: Tensor) -> Tensor:
        self.forwards += 1
        return self.net(x)


def _cost(fit: EncodedPairs, effects: Tensor) -> Tensor:
    """|u_i - v_j|² of effects of length one."""
    u = torch.stack([(y - fit.answer).flatten() for y in fit.labels.values()]).double()
    return 2 - 2 * F.normalize(u, dim=1) @ F.normalize(effects.double(), dim=1).T


def _gains(sites: Sites, row: Tensor, order: Tensor, k: int) -> Tensor:
    """Π̃ over the k sites of highest mass, as gains of the directions: overlapping sites add up."""
    top = order[:k]
    weights = torch.zeros(len(row), dtype=torch.float64)
    weights[top] = row[top] / row[top].sum()
    return (weights @ sites.members.double()).float()


# -- DAS, one rotation at a time ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Training:
    """How one rotation is trained: `tangent` is plot-ot's default optimiser, `adam` the paper's."""

    optimiser: str
    epochs: int
    batch: int
    rate: float
    horizon: int
    """Epochs after which the decaying rate of `tangent` would be zero."""


class Tangent:
    """plot-ot's default for one frame, in plain PyTorch: Adam with one scale, tangent step, polar retraction."""

    def __init__(self, q: nn.Parameter, rate: float) -> None:
        self.q, self.rate = q, rate
        self.first, self.second, self.steps = torch.zeros_like(q), torch.zeros(()), 0

    def zero_grad(self) -> None:
        self.q.grad = None

    @torch.no_grad()
    def step(self, progress: float) -> None:
        q = self.q
        gradient = self._tangent(q.grad)
        gradient = gradient * (1 / gradient.norm().clamp(min=1e-12)).clamp(max=1.0)
        self.steps += 1
        self.first.lerp_(gradient, 0.1)
        self.second.lerp_(gradient.square().mean(), 0.01)
        move = (self.first / (1 - 0.9**self.steps)) / ((self.second / (1 - 0.99**self.steps)).sqrt() + 1e-8)
        rate = self.rate * 0.5 * (1 + torch.cos(torch.tensor(torch.pi * progress)))
        step = rate * self._tangent(move)
        moved = q - step * (1 / step.norm().clamp(min=1e-12)).clamp(max=1.0)
        for _ in range(3):
            moved = 1.5 * moved - 0.5 * moved @ (moved.T @ moved)
        q.copy_(moved)

    def _tangent(self, g: Tensor) -> Tensor:
        inner = self.q.T @ g
        return g - self.q @ (0.5 * (inner + inner.T))


class Adam(torch.optim.Adam):
    """PyTorch's Adam at a constant rate."""

    def step(self, progress: float) -> None:
        super().step()


def das_with_hooks(net: Unrolled, fit: EncodedPairs, job: Job, training: Training) -> Trained:
    """Plain PyTorch: frozen weights, cached source states, one hook."""
    started = time.perf_counter()
    with torch.no_grad():
        source = activations(net, fit.source)[job.layer]
    width = source.shape[1]
    if training.optimiser == "tangent":
        q = nn.Parameter(torch.linalg.qr(torch.randn(width, job.k))[0])
        optimiser, directions = Tangent(q, training.rate), lambda: q
    else:
        rotation = orthogonal(nn.Linear(width, width, bias=False))
        optimiser, directions = Adam(rotation.parameters(), lr=training.rate), lambda: rotation.weight[:, : job.k]

    def forward(index: Tensor) -> Tensor:
        w = directions()
        with hooks({net.states[job.layer]: lambda a: a + ((source[index] - a) @ w) @ w.T}):
            return net(fit.base[index])

    steps = _train(forward, optimiser, fit.labels[job.variable], training)
    found = directions().detach().clone()
    return Trained(job, found, training.epochs, steps, time.perf_counter() - started)


def das_with_pyvene(net: UnrolledForPyvene, fit: EncodedPairs, job: Job, training: Training) -> Trained:
    """pyvene with `use_fast`: its own `RotatedSpaceIntervention` for Adam, a plain subspace swap for `tangent`."""
    import pyvene as pv

    logging.getLogger().setLevel(logging.ERROR)  # pyvene logs a warning per model
    started = time.perf_counter()
    width = net.cell.hidden_size
    if training.optimiser == "tangent":
        swap = _subspace_swap(torch.linalg.qr(torch.randn(width, job.k))[0])
        optimiser, directions = Tangent(swap.q, training.rate), lambda: swap.q
    else:
        swap = pv.RotatedSpaceIntervention(embed_dim=width)
        swap.set_interchange_dim(job.k)
        optimiser = Adam(swap.parameters(), lr=training.rate)
        directions = lambda: swap.rotate_layer.weight[:, : job.k]  # noqa: E731
    where = {"component": f"states[{job.layer}].output", "unit": "pos", "intervention": swap}
    model = pv.IntervenableModel(where, net, use_fast=True)

    def forward(index: Tensor) -> Tensor:
        return model({"x": fit.base[index]}, [{"x": fit.source[index]}], {"sources->base": 0})[1]

    steps = _train(forward, optimiser, fit.labels[job.variable], training)
    found = directions().detach().clone()
    return Trained(job, found, training.epochs, steps, time.perf_counter() - started)


def warm_up_pyvene() -> None:
    """Import pyvene: it takes seconds and is no part of training."""
    import pyvene  # noqa: F401


def _subspace_swap(start: Tensor) -> nn.Module:
    """A trainable pyvene intervention a + Q Qᵀ (a_source - a) whose Q its optimiser keeps orthonormal."""
    import pyvene as pv

    class SubspaceSwap(pv.TrainableIntervention, pv.DistributedRepresentationIntervention):
        def __init__(self) -> None:
            super().__init__(embed_dim=len(start))
            self.q = nn.Parameter(start)

        def forward(self, base: Tensor, source: Tensor, subspaces: object = None, **_: object) -> Tensor:
            return base + ((source - base) @ self.q) @ self.q.T

    return SubspaceSwap()


def _train(forward: Callable[[Tensor], Tensor], optimiser: Tangent | Adam, labels: Tensor, training: Training) -> int:
    """Binary cross-entropy over the bits, for exactly so many epochs; the number of steps."""
    steps = 0
    for epoch in range(1, training.epochs + 1):
        for index in torch.randperm(len(labels)).split(training.batch):
            loss = F.binary_cross_entropy_with_logits(forward(index), labels[index])
            optimiser.zero_grad()
            loss.backward()
            optimiser.step(min(1.0, epoch / training.horizon))
            steps += 1
    return steps
