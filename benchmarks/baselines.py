"""What a competent user would run without plot-ot: plain PyTorch hooks, POT, pyvene. Nothing here imports plot_ot."""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import orthogonal


@dataclass(frozen=True)
class EncodedPairs:
    """A bank as plain tensors: encoded inputs, the base's answer, and the counterfactual label per variable."""

    base: Tensor
    source: Tensor
    answer: Tensor
    labels: Mapping[str, Tensor]

    def __len__(self) -> int:
        return len(self.base)


def hidden_layers(net: nn.Module) -> list[nn.Module]:
    """The modules whose outputs are edited: an MLP's ReLUs, a recurrent network's states."""
    return list(net.states) if hasattr(net, "states") else [m for m in net if isinstance(m, nn.ReLU)]


@contextlib.contextmanager
def hooks(rewrites: Mapping[nn.Module, Callable[[Tensor], Tensor]]) -> Iterator[None]:
    """While open, each module's output is replaced by what its function returns."""
    handles = [m.register_forward_hook(lambda _, __, out, f=f: f(out)) for m, f in rewrites.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def activations(net: nn.Module, x: Tensor) -> list[Tensor]:
    """Clean activations at every hidden layer, from one hooked forward."""
    kept: list[Tensor] = []
    with hooks(dict.fromkeys(hidden_layers(net), kept.append)):
        net(x)
    return kept


# -- PLOT as a loop -------------------------------------------------------------------------------------------


@dataclass
class LoopRun:
    """What the loop found, and the seconds of its parts."""

    seconds: dict[str, float] = field(default_factory=dict)
    handles_run: int = 0
    surfaces: dict[str, Tensor] = field(default_factory=dict)
    """Per variable, calibration accuracy [sizes, strengths]; NaN where not run."""
    chosen: dict[str, tuple[int, float]] = field(default_factory=dict)
    test: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class PlotLoop:
    """PLOT with one hooked full forward per site and per handle.

    `batch` None: all pairs of a bank in one forward, source activations cached (the competent loop).
    A number: that many pairs per forward, and sources run again every time (the careless loop).
    """

    net: nn.Sequential
    sizes: Sequence[int]
    strengths: Sequence[float]
    epsilon: float = 4.0
    batch: int | None = None
    every: int = 1
    """Run every n-th handle of the grid only, for a stratified sample."""

    @torch.no_grad()
    def run(
        self, fit: EncodedPairs, calibration: EncodedPairs, tests: Mapping[str, tuple[str, EncodedPairs]]
    ) -> LoopRun:
        done = LoopRun()
        clock = Laps(done.seconds)
        sources = {id(p): activations(self.net, p.source) for p in (fit, calibration, *(p for _, p in tests.values()))}
        clock.lap("record")
        cost = self._cost(fit, sources[id(fit)])
        clock.lap("signatures")
        plan = pot_plan(cost, self.epsilon)
        clock.lap("transport")
        gains = {}
        for v, row, costs in zip(fit.labels, plan, cost, strict=True):
            found = self._calibrate(calibration, v, row, by_mass(row, costs), sources[id(calibration)])
            done.surfaces[v], done.chosen[v], gains[v] = found
            done.handles_run += int((~done.surfaces[v].isnan()).sum())
        clock.lap("calibration")
        for name, (v, pairs) in tests.items():
            done.test[name] = self._accuracy(pairs, v, gains[v], sources[id(pairs)])
        clock.lap("test")
        return done

    def _cost(self, fit: EncodedPairs, source: list[Tensor]) -> Tensor:
        """|u_i - v_j|² of stacked effects in softmax space."""
        clean = self.net(fit.base).softmax(dim=1)
        answer = F.one_hot(fit.answer, 2)
        u = torch.stack([(F.one_hot(y, 2) - answer).float().flatten() for y in fit.labels.values()])
        effects = []
        for layer, width in enumerate(s.shape[1] for s in source):
            for neuron in range(width):
                gains = [torch.zeros(width) for _ in source]
                gains[layer][neuron] = 1.0
                effects.append((self._outputs(fit, gains, source).softmax(dim=1) - clean).flatten())
        return torch.cdist(u.double(), torch.stack(effects).double()).square()

    def _calibrate(
        self, pairs: EncodedPairs, v: str, row: Tensor, order: Tensor, source: list[Tensor]
    ) -> tuple[Tensor, tuple[int, float], list[Tensor]]:
        """Every (K, λ) in turn; ties go to the smallest K, then the smallest λ."""
        surface = torch.full((len(self.sizes), len(self.strengths)), math.nan)
        for at in range(0, surface.numel(), self.every):
            k, s = divmod(at, len(self.strengths))
            surface[k, s] = self._accuracy(pairs, v, self._gains(row, order, k, s, source), source)
        k, s = divmod(int(surface.nan_to_num(-1).argmax()), len(self.strengths))
        return surface, (self.sizes[k], self.strengths[s]), self._gains(row, order, k, s, source)

    def _gains(self, row: Tensor, order: Tensor, k: int, s: int, source: list[Tensor]) -> list[Tensor]:
        """λ Π̃ at every layer."""
        top = order[: self.sizes[k]]
        weights = torch.zeros(len(row))
        weights[top] = (self.strengths[s] * row[top] / row[top].sum()).float()
        return list(weights.split([x.shape[1] for x in source]))

    def _accuracy(self, pairs: EncodedPairs, v: str, gains: list[Tensor], source: list[Tensor]) -> float:
        return float((self._outputs(pairs, gains, source).argmax(dim=1) == pairs.labels[v]).double().mean())

    def _outputs(self, pairs: EncodedPairs, gains: list[Tensor], source: list[Tensor]) -> Tensor:
        if self.batch is None:
            return self._edited(pairs.base, gains, source)
        parts = zip(pairs.base.split(self.batch), pairs.source.split(self.batch), strict=True)
        return torch.cat([self._edited(b, gains, activations(self.net, s)) for b, s in parts])

    def _edited(self, base: Tensor, gains: list[Tensor], source: list[Tensor]) -> Tensor:
        edits = zip(hidden_layers(self.net), gains, source, strict=True)
        with hooks({m: (lambda a, g=g, s=s: a + g * (s - a)) for m, g, s in edits if g.any()}):
            return self.net(base)


def pot_plan(cost: Tensor, epsilon: float, tolerance: float = 1e-8) -> Tensor:
    """POT's balanced Sinkhorn in the log domain with its default budget, uniform marginals.

    Marginals must be float64 from the start: 1/48 rounded to float32 leaves unequal masses, and POT then never
    reaches its threshold and runs until its iteration limit.
    """
    import ot

    m, n = cost.shape
    a, b = np.full(m, 1 / m), np.full(n, 1 / n)
    plan, log = ot.sinkhorn(a, b, cost.numpy(), epsilon, method="sinkhorn_log", log=True, warn=False)
    if log["err"][-1] > tolerance:
        raise RuntimeError(f"POT did not converge (error {log['err'][-1]:.1e}): the loop would not be comparable.")
    return torch.from_numpy(plan)


def warm_up() -> None:
    """Import POT and call it once: importing takes seconds and is no part of the loop, by wall or CPU clock."""
    pot_plan(torch.zeros(2, 3).double(), 1.0)


def by_mass(row: Tensor, cost: Tensor) -> Tensor:
    """Sites from highest to lowest mass; masses equal to 8 digits by lower cost, as plot-ot does."""
    return torch.from_numpy(np.lexsort((cost.numpy(), -(row / row.max()).numpy().round(8))).copy())


class Laps:
    """Seconds from lap to lap."""

    def __init__(self, laps: dict[str, float]) -> None:
        self.laps, self.last = laps, time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.laps[name], self.last = self.laps.get(name, 0.0) + now - self.last, now


# -- DAS, one rotation at a time ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rule:
    """The paper's optimisation: Adam 1e-3, batch 128, stop after 3 epochs without 1 % relative improvement."""

    rate: float = 1e-3
    batch: int = 128
    least: int = 5
    most: int = 1000
    patience: int = 3
    improvement: float = 0.01


@dataclass(frozen=True)
class Job:
    """One rotation of the sweep."""

    layer: int
    variable: str
    k: int


@dataclass(frozen=True)
class Trained:
    """A finished job: its directions [d, k], epochs and seconds."""

    job: Job
    directions: Tensor
    epochs: int
    steps: int
    seconds: float


Step = Callable[[Tensor], Tensor]
"""Forward, backward and optimiser step on the pairs of these indices; the loss."""


def until_stale(step: Step, pairs: int, rule: Rule) -> tuple[int, int]:
    """Epochs and steps until the mean training loss stops improving."""
    best, stale, steps = math.inf, 0, 0
    for epoch in range(1, rule.most + 1):
        total = 0.0
        for index in torch.randperm(pairs).split(rule.batch):
            total += step(index).item() * len(index)
            steps += 1
        improved = total / pairs < best * (1 - rule.improvement)
        best, stale = (total / pairs, 0) if improved else (best, stale + 1)
        if stale >= rule.patience and epoch >= rule.least:
            break
    return epoch, steps


def das_with_hooks(net: nn.Sequential, fit: EncodedPairs, job: Job, rule: Rule) -> Trained:
    """Plain PyTorch: frozen weights, cached source activations, `parametrizations.orthogonal`, one hook."""
    started = time.perf_counter()
    net.requires_grad_(False)
    module = hidden_layers(net)[job.layer]
    with torch.no_grad():
        source = activations(net, fit.source)[job.layer]
    width, labels = source.shape[1], fit.labels[job.variable]
    linear = nn.Linear(width, width, bias=False)
    nn.init.orthogonal_(linear.weight)
    rotation = orthogonal(linear)
    optimiser = torch.optim.Adam(rotation.parameters(), lr=rule.rate)

    def step(index: Tensor) -> Tensor:
        q = rotation.weight[:, : job.k]
        with hooks({module: lambda a: a + ((source[index] - a) @ q) @ q.T}):
            loss = F.cross_entropy(net(fit.base[index]), labels[index])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        return loss.detach()

    epochs, steps = until_stale(step, len(fit), rule)
    directions = rotation.weight[:, : job.k].detach().clone()
    return Trained(job, directions, epochs, steps, time.perf_counter() - started)


def pyvene_mlp(net: nn.Sequential) -> nn.Module:
    """The same network as pyvene's own MLP classifier."""
    from pyvene.models.mlp.modelings_mlp import MLPConfig, MLPForClassification

    linears = [m for m in net if isinstance(m, nn.Linear)]
    width, classes = linears[0].out_features, linears[-1].out_features
    config = MLPConfig(
        n_layer=len(linears) - 1, h_dim=width, num_classes=classes, activation_function="relu", pdrop=0.0
    )
    model = MLPForClassification(config).eval()
    for target, linear in zip([*(b.ff1 for b in model.mlp.h), model.score], linears, strict=True):
        target.load_state_dict(linear.state_dict())
    x = torch.randn(8, linears[0].in_features)
    assert torch.allclose(model(inputs_embeds=x.unsqueeze(1))[0].reshape(-1, classes), net(x), atol=1e-5)
    return model


PYVENE_KINDS = ("rotated", "low-rank")


def das_with_pyvene(model: nn.Module, fit: EncodedPairs, job: Job, rule: Rule, kind: str = "rotated") -> Trained:
    """pyvene as it comes: `RotatedSpaceIntervention` swapping the first k dimensions (the paper's 16 x 16 rotation),
    or `LowRankRotatedSpaceIntervention` of rank k, on its own MLP, with `use_fast`."""
    started = time.perf_counter()
    intervenable, rotate = _intervenable(model, job, kind)
    optimiser = torch.optim.Adam(intervenable.get_trainable_parameters(), lr=rule.rate)
    base, source, labels = fit.base.unsqueeze(1), fit.source.unsqueeze(1), fit.labels[job.variable]

    def step(index: Tensor) -> Tensor:
        _, edited = intervenable(
            {"inputs_embeds": base[index]}, [{"inputs_embeds": source[index]}], {"sources->base": 0}
        )
        loss = F.cross_entropy(edited[0].flatten(0, -2), labels[index])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        return loss.detach()

    epochs, steps = until_stale(step, len(fit), rule)
    directions = rotate.weight[:, : job.k].detach().clone()
    return Trained(job, directions, epochs, steps, time.perf_counter() - started)


def _intervenable(model: nn.Module, job: Job, kind: str) -> tuple[nn.Module, nn.Module]:
    import pyvene as pv

    logging.getLogger().setLevel(logging.ERROR)  # pyvene logs a warning per model
    rank = {"low_rank_dimension": job.k} if kind == "low-rank" else {}
    config = pv.IntervenableConfig(
        model_type=type(model),
        representations=[pv.RepresentationConfig(job.layer, "block_output", "pos", 1, **rank)],
        intervention_types=pv.LowRankRotatedSpaceIntervention if rank else pv.RotatedSpaceIntervention,
    )
    intervenable = pv.IntervenableModel(config, model, use_fast=True)
    (intervention,) = intervenable.interventions.values()
    if not rank:
        intervention.set_interchange_dim(job.k)
    return intervenable, intervention.rotate_layer


def stratified(layers: int, variables: Sequence[str], width: int, share: float) -> list[Job]:
    """The same number of jobs per layer and variable, evenly spread over k, the variables interleaved."""
    count = max(1, math.ceil(share * width - 1e-9))
    jobs = []
    for layer in range(layers):
        for i, v in enumerate(variables):
            offset = (i + 0.5) / len(variables)
            jobs += [Job(layer, v, 1 + int((n + offset) * width / count)) for n in range(count)]
    return jobs
