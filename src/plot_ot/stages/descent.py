"""Descent: one loop for all that is learned by gradient, and how frames move in it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from plot_ot.edits import Distinct, EditBatch, Frame, Gathered, resume_edited
from plot_ot.errors import unknown
from plot_ot.finite import refuse_non_finite
from plot_ot.signatures import Readout
from plot_ot.subjects import BankRecording, Place
from plot_ot.subjects.memory import sent

OPTIMISERS = ("riemannian", "adam", "oblique")
SERIES_FROM, SERIES_UP_TO = 64, 0.58
"""Matrices of which width, scaled to what norm, are exponentiated by eight terms of the series."""


@dataclass(frozen=True)
class DasSpec:
    """How rotations are trained.

    `riemannian` (ours): Adam on the tangent space of orthonormal frames with a polar retraction and a decaying step.
    `adam` (the paper's): Adam on a skew-symmetric generator, Q = Q₀ exp(A), batches in random order.
    `oblique`: Adam on R and W apart, so that a handle may write along other directions than it reads.
    A rotation stops after `patience` epochs without a relative improvement of its loss by `improvement`.
    """

    optimiser: str = "riemannian"
    rate: float = 0.08
    batch: int = 250
    least: int = 5
    most: int = 100
    patience: int = 20
    improvement: float = 0.03
    restarts: int = 1
    clip: float = 1.0
    natural: float = 0.0
    """The weight of the counterfactual-latent loss: the squared distance, in natural units per dimension, between the
    edited state and the base's state moved to where natural states have the source's value. 0 is plain DAS."""

    def __post_init__(self) -> None:
        if self.optimiser not in OPTIMISERS:
            unknown("DAS optimiser", self.optimiser, OPTIMISERS)

    @classmethod
    def paper(cls) -> DasSpec:
        """Adam 1e-3, batch 128, 5 to 1000 epochs, stop after 3 epochs without 1 % improvement."""
        return cls("adam", rate=1e-3, batch=128, least=5, most=1000, patience=3, improvement=0.01)


class Variants(Protocol):
    """A batch of variants being trained, one per job."""

    def edits(self, active: Tensor, progress: float) -> Sequence[EditBatch]:
        """What the jobs still going do, ready for a backward pass; `progress` runs from 0 to 1."""

    def penalty(self, active: Tensor, pairs: Tensor | slice) -> Float[Tensor, " active"] | None:
        """What is added to each job's loss in the pass over some pairs that `edits` began."""

    def step(self, active: Tensor, progress: float) -> None:
        """Move the jobs along their gradients."""

    def describe(self, job: int) -> str:
        """Who a job is, for errors."""


def descend(
    recording: BankRecording,
    places: Sequence[Place],
    labels: Tensor,
    readout: Readout,
    spec: DasSpec,
    generator: torch.Generator,
    variants: Variants,
) -> tuple[Float[Tensor, " jobs"], Int[Tensor, " jobs"]]:
    """Lower every job's loss on its counterfactual labels; the last loss (without penalty) and the epochs of each.

    `places` are those the variants edit, in forward order. Of `spec` this reads the batch and when to stop.
    """
    device, jobs = recording.store.activations[places[0].name].device, len(labels)
    distinct = Distinct.of(recording, places)
    gathered = [Gathered(distinct.once, place) for place in places]
    at_once = -(-len(distinct.once) // -(-len(recording) // spec.batch))  # as many steps an epoch as without classes
    active = torch.arange(jobs, device=device)
    best = torch.full((jobs,), math.inf, dtype=torch.float64)
    stale, epochs = torch.zeros(jobs, dtype=torch.long), torch.zeros(jobs, dtype=torch.long)
    final = torch.full((jobs,), math.inf, dtype=torch.float64)
    for epoch in range(1, spec.most + 1):
        total = torch.zeros(len(active), dtype=torch.float64, device=device)
        order = torch.randperm(len(distinct.once), generator=generator)
        for classes, pairs, expand in distinct.batches(at_once, order):
            batch = variants.edits(active, epoch / spec.most)
            outputs = expand(resume_edited(distinct.once, batch, classes, gathered))
            there = pairs if isinstance(pairs, slice) else sent(pairs, device)
            losses = readout.loss(outputs, labels[active][:, there]).mean(dim=1)
            penalty = variants.penalty(active, there)
            (losses.sum() if penalty is None else losses.sum() + penalty.sum()).backward()
            variants.step(active, epoch / spec.most)
            total += losses.detach().double() * outputs.shape[1]
        mean = total.cpu() / len(recording)  # the one time in an epoch that a GPU is waited for
        refuse_non_finite(mean, partial(_diverged, variants, active.cpu(), epoch))
        here = active.cpu()
        final[here], epochs[here] = mean, epoch
        improved = mean < best[here] * (1 - spec.improvement)
        best[here] = torch.where(improved, mean, best[here])
        stale[here] = torch.where(improved, 0, stale[here] + 1)
        going = (stale[here] < spec.patience) | (epoch < spec.least)
        active = active[going.to(active.device)]
        if not len(active):
            break
    return final, epochs


def _diverged(variants: Variants, active: Tensor, epoch: int, bad: Bool[Tensor, " active"]) -> str:
    who = variants.describe(int(active[bad][0]))
    return f"{who} has a loss of NaN or infinity in epoch {epoch}. Lower the rate."


def trained_like(recording: BankRecording, place: Place) -> Tensor:
    """A tensor of the device and type in which is trained what edits a place: at least float32, for the steps of a
    descent are lost in the few digits of float16 and bfloat16."""
    like = recording.store.activations[place.name][:0]
    return like.float() if like.dtype in (torch.float16, torch.bfloat16) else like


def continued(state: Tensor) -> torch.Generator:
    """A generator that goes on from there, wherever a unit of work runs."""
    generator = torch.Generator()
    generator.set_state(state)
    return generator


def annealed(ends: tuple[float, float], progress: float) -> float:
    """A temperature that falls geometrically from the first of `ends` to the second while `progress` runs to 1."""
    return float(ends[0] * (ends[1] / ends[0]) ** progress)


class Adam:
    """Adam's moments for a batch of matrices, each clipped to its own gradient norm."""

    def __init__(self, like: Tensor, clip: float) -> None:
        self.first, self.second = torch.zeros_like(like), torch.zeros_like(like)
        self.steps = torch.zeros(len(like), device=like.device)
        self.clip = clip

    def direction(self, active: Tensor, gradient: Tensor, per_entry: bool) -> Tensor:
        norm = gradient.flatten(1).norm(dim=1).clamp(min=1e-12)
        gradient = gradient * (self.clip / norm).clamp(max=1.0)[:, None, None]
        self.steps[active] += 1
        square = gradient.square()
        if not per_entry:  # one scale per matrix keeps the step in the tangent space
            square = square.mean(dim=(1, 2), keepdim=True).expand_as(square)
        first = self.first[active].lerp_(gradient, 0.1)
        second = self.second[active].lerp_(square, 0.001 if per_entry else 0.01)
        self.first[active], self.second[active] = first, second
        t = self.steps[active][:, None, None]
        decay = 0.999 if per_entry else 0.99
        return (first / (1 - 0.9**t)) / ((second / (1 - decay**t)).sqrt() + 1e-8)


class TrainedFrames(Protocol):
    """A batch of frames being trained, one per job."""

    def frames(self, active: Tensor) -> Frame:
        """The frames of the jobs still going, ready for a backward pass."""

    def step(self, active: Tensor, progress: float) -> None:
        """Move them along their gradients; `progress` runs from 0 to 1."""

    def finished(self, job: int, k: int) -> Frame:
        """A job's first k directions, checked."""


def trained_frames(
    spec: DasSpec, start: Float[Tensor, "jobs d columns"], used: Float[Tensor, "jobs widest"]
) -> TrainedFrames:
    """Frames that the named optimiser trains; each job moves the columns it has `used`."""
    kinds: dict[str, Callable[..., TrainedFrames]] = {
        "adam": _Generator,
        "oblique": _Oblique,
        "riemannian": _Tangent,
    }
    return kinds[spec.optimiser](start, used, spec)


class _Tangent:
    """Frames on the Stiefel manifold: step along the tangent space, retract to the nearest orthonormal frame."""

    def __init__(self, start: Float[Tensor, "jobs d start"], used: Float[Tensor, "jobs widest"], spec: DasSpec) -> None:
        self.spec = spec
        # columns beyond a job's own k stay zero: its path does not depend on the widest job of the batch
        self.q = start[:, :, : used.shape[1]] * used[:, None]
        self.share = used.mean(dim=1)[:, None, None]
        self.adam = Adam(self.q, spec.clip)
        self.leaf = self.q

    def frames(self, active: Tensor) -> Frame:
        self.leaf = self.q[active].requires_grad_()
        return Frame(self.q.shape[1], self.leaf, None, "das")

    @torch.no_grad()
    def step(self, active: Tensor, progress: float) -> None:
        q, g = self.leaf.detach(), self.leaf.grad
        assert g is not None  # noqa: S101
        move = self.adam.direction(active, _tangent(q, g), per_entry=False) * self.share[active].sqrt()
        rate = self.spec.rate * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
        step = rate * _tangent(q, move)
        length = step.flatten(1).norm(dim=1).clamp(min=1e-12)  # the retraction converges for steps shorter than √2
        self.q[active] = _polar(q - step * (1 / length).clamp(max=1.0)[:, None, None])

    def finished(self, job: int, k: int) -> Frame:
        return Frame.orthonormal(torch.linalg.qr(self.q[job, :, :k])[0].contiguous(), "das")


class _Oblique:
    """R and W trained apart, both started at the same orthonormal directions."""

    def __init__(self, start: Float[Tensor, "jobs d start"], used: Float[Tensor, "jobs widest"], spec: DasSpec) -> None:
        self.spec, self.used = spec, used[:, None]
        self.both = (start[:, :, : used.shape[1]] * self.used).repeat(1, 2, 1)  # R above W
        self.adam = Adam(self.both, spec.clip)
        self.leaf = self.both

    def frames(self, active: Tensor) -> Frame:
        self.leaf = self.both[active].requires_grad_()
        read, write = self.leaf.chunk(2, dim=1)
        return Frame(read.shape[1], read, write, "das-oblique")

    @torch.no_grad()
    def step(self, active: Tensor, progress: float) -> None:
        gradient = self.leaf.grad
        assert gradient is not None  # noqa: S101
        rate = self.spec.rate * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
        move = self.adam.direction(active, gradient, per_entry=True)
        self.both[active] -= rate * move * self.used[active]

    def finished(self, job: int, k: int) -> Frame:
        read, write = self.both[job, :, :k].chunk(2, dim=0)
        return Frame.oblique(read.contiguous(), write.contiguous(), "das-oblique")


class _Generator:
    """Q = Q₀ exp(A - Aᵀ) with Adam on the lower triangle of A, as PyTorch's orthogonal parametrization does."""

    def __init__(self, start: Float[Tensor, "jobs d start"], used: Float[Tensor, "jobs widest"], spec: DasSpec) -> None:
        self.start, self.widest, self.spec = start, used.shape[1], spec
        self.a = torch.zeros_like(start)
        self.adam = Adam(self.a, spec.clip)
        self.leaf = self.a

    def _rotate(self, a: Tensor, start: Tensor) -> Tensor:
        lower = a.tril(-1)
        return start @ skew_exponential(lower - lower.mT)

    def frames(self, active: Tensor) -> Frame:
        self.leaf = self.a[active].requires_grad_()
        return Frame(self.a.shape[1], self._rotate(self.leaf, self.start[active])[:, :, : self.widest], None, "das")

    @torch.no_grad()
    def step(self, active: Tensor, progress: float) -> None:
        gradient = self.leaf.grad
        assert gradient is not None  # noqa: S101
        self.a[active] -= self.spec.rate * self.adam.direction(active, gradient, per_entry=True)

    @torch.no_grad()
    def finished(self, job: int, k: int) -> Frame:
        rotated = self._rotate(self.a[job : job + 1], self.start[job : job + 1])[0]
        return Frame.orthonormal(torch.linalg.qr(rotated[:, :k])[0].contiguous(), "das")


def skew_exponential(a: Float[Tensor, "jobs d d"]) -> Float[Tensor, "jobs d d"]:
    """exp(A) of skew-symmetric matrices, to float32's precision.

    Wide matrices are scaled to where eight terms of the series suffice, and the result is squared again. That is made
    of products alone, of which a backward pass takes two each, where PyTorch's own takes an exponential of twice the
    width: a seventh to a third of the time for a matrix of 576. Others are left to PyTorch.
    """
    if a.shape[-1] < SERIES_FROM or a.dtype != torch.float32:
        exponential: Tensor = torch.linalg.matrix_exp(a)
        return exponential
    second = a @ a
    size = second.detach().abs().sum(dim=1).amax(dim=1).sqrt()  # |A|² = |A²|: a closer bound than A's column sums
    halvings = (size / SERIES_UP_TO).log2().ceil().clamp(min=0).nan_to_num(0.0, posinf=0.0)
    a, second = a * 0.5 ** halvings[:, None, None], second * 0.25 ** halvings[:, None, None]
    third, fourth = second @ a, second @ second
    one = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device)
    late = one / 24 + a / 120 + second / 720 + third / 5040 + fourth / 40320
    e = one + a + second / 2 + third / 6 + fourth @ late
    for n in range(int(halvings.max())):  # each job as often as it was halved, whoever is in its batch
        e = torch.where((n < halvings)[:, None, None], e @ e, e)
    return e


def _tangent(q: Float[Tensor, "jobs d k"], g: Float[Tensor, "jobs d k"]) -> Float[Tensor, "jobs d k"]:
    """Project onto the tangent space at q: g - q sym(qᵀ g)."""
    inner = q.mT @ g
    return g - q @ (0.5 * (inner + inner.mT))


def _polar(q: Float[Tensor, "jobs d k"]) -> Float[Tensor, "jobs d k"]:
    """The nearest orthonormal frame, by Newton-Schulz steps from a nearly orthonormal one."""
    for _ in range(3):
        q = 1.5 * q - 0.5 * q @ (q.mT @ q)
    return q
