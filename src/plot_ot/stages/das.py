"""DAS: learn the directions of a handle by gradient. All rotations of a place are trained as one batch of variants."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

import torch
from jaxtyping import Float
from torch import Tensor

from plot_ot.edits import EditBatch, Frame
from plot_ot.engine import Unit, jobs_at_once, run
from plot_ot.errors import PlotError
from plot_ot.signatures import Readout
from plot_ot.stages.closed_form import finest_shift
from plot_ot.stages.descent import DasSpec, TrainedFrames, continued, descend, trained_frames, trained_like
from plot_ot.stages.natural import shrunk_covariance
from plot_ot.subjects import BankRecording, Place


@dataclass(frozen=True)
class Rotation:
    """One trained (or, for k = d, untrained) subspace."""

    place: Place
    variable: str
    frame: Frame
    dimension: int
    restart: int
    loss: float
    epochs: int


@dataclass(frozen=True)
class Training:
    """What is to be trained at one place: rotations for every variable x dimension x restart.

    k = d swaps the whole vector whatever the rotation: it is the full patch and is not trained (an oblique one is).
    A variable's first restart begins with the directions of its frame in `starts`, if it has one; others at random.
    In a `room` of orthonormal directions, rotations mix these only, and k = their number swaps all of them.
    """

    place: Place
    variables: Sequence[str]
    dimensions: Sequence[int]
    generator: torch.Generator
    starts: Mapping[str, Frame] = field(default_factory=dict)
    room: Frame | None = None

    @property
    def most(self) -> int:
        """The largest dimension there is room for."""
        return self.place.width if self.room is None else self.room.rank

    def whole(self, spec: DasSpec) -> list[Rotation]:
        """Rotations that need no training."""
        sizes = [k for k in self.dimensions if k == self.most and spec.optimiser != "oblique"]
        frame = self.room or Frame.identity(self.place.width)
        return [Rotation(self.place, v, frame, k, 0, math.nan, 0) for v in self.variables for k in sizes]

    def jobs(self, spec: DasSpec) -> list[Job]:
        """Every (variable, dimension, restart) to train."""
        sizes = [k for k in self.dimensions if k < self.most or spec.optimiser == "oblique"]
        return [(v, k, r) for v in self.variables for k in sizes for r in range(spec.restarts)]


Job = tuple[str, int, int]


def train_rotations(
    recording: BankRecording,
    place: Place,
    variables: Sequence[str],
    dimensions: Sequence[int],
    readout: Readout,
    spec: DasSpec,
    generator: torch.Generator,
    starts: Mapping[str, Frame] | None = None,
    room: Frame | None = None,
) -> list[Rotation]:
    """The rotations of one `Training`, each with its own loss, clipping and stop."""
    return train_all(recording, [Training(place, variables, dimensions, generator, starts or {}, room)], readout, spec)


def train_all(
    recording: BankRecording, trainings: Sequence[Training], readout: Readout, spec: DasSpec
) -> list[Rotation]:
    """The rotations of several trainings, by units of (place x some of its variables and dimensions).

    In a small network all jobs of a place are one batch of variants; in a large one every job is a unit of its own.
    """
    at_once = jobs_at_once(recording.subject, min(spec.batch, len(recording)))
    units, untrained = [], []
    for t in trainings:
        _refuse(recording, t)
        jobs, state = t.jobs(spec), t.generator.get_state()
        untrained.append((t.whole(spec), -(-len(jobs) // at_once)))
        for at in range(0, len(jobs), at_once):
            args = t.place, jobs, slice(at, at + at_once), readout, spec, state, t.starts, t.room
            units.append(Unit(_train, slice(None), (t.place,), args))
    trained: Iterator[list[Rotation]] = run(recording, units)
    done = []
    for whole, count in untrained:
        done += [*whole, *(r for some in islice(trained, count) for r in some)]
    return done


def _refuse(recording: BankRecording, t: Training) -> None:
    for v in t.variables:
        recording.bank.require(v)
    for k in t.dimensions:
        if not 1 <= k <= t.most:
            raise PlotError(f"A subspace of {k} dimensions does not fit {t.place.name} of width {t.most}.")


def _train(
    recording: BankRecording,
    place: Place,
    all_jobs: Sequence[Job],
    chosen: slice,
    readout: Readout,
    spec: DasSpec,
    state: Tensor,
    starts: Mapping[str, Frame],
    room: Frame | None,
) -> list[Rotation]:
    """Train the chosen jobs of a place. What is random does not depend on which these are."""
    generator = continued(state)
    like, jobs = trained_like(recording, place), all_jobs[chosen]
    widest = max(k for _, k, _ in jobs)
    room = (room or Frame.identity(place.width)).to(like.device, like.dtype)
    columns = room.rank if spec.optimiser == "adam" else widest  # whose generator turns all directions
    start = starting_frames([(v, r) for v, _, r in all_jobs], room, columns, generator, starts, chosen)
    gains = torch.stack([(torch.arange(widest) < k).to(like.dtype) for _, k, _ in jobs]).to(like.device)
    labels = torch.stack([recording.bank.labels[v] for v, _, _ in jobs]).to(like.device)
    rotations = trained_frames(spec, start.to(like), gains)
    latents = Latents.of(recording, place, jobs, spec.natural) if spec.natural else None
    variants = _Rotations(place, room, rotations, gains, jobs, latents)
    final, epochs = descend(recording, [place], labels, readout, spec, generator, variants)
    found = []
    for j, (v, k, r) in enumerate(jobs):
        frame = room.compose(rotations.finished(j, k)).to(torch.device("cpu"), like.dtype)
        found.append(Rotation(place, v, frame, k, r, float(final[j]), int(epochs[j])))
    return found


def starting_frames(
    jobs: Sequence[tuple[str, int]],
    room: Frame,
    columns: int,
    generator: torch.Generator,
    starts: Mapping[str, Frame],
    chosen: slice = slice(None),
) -> Float[Tensor, "jobs inner columns"]:
    """Random orthonormal columns in the room's coordinates for every (variable, restart), or for some of them.

    A variable's first restart begins with the directions of its frame in `starts`.
    """
    inner = room.rank
    drawn = torch.randn(len(jobs), inner, inner, generator=generator)[chosen, :, :columns].clone()
    for j, (v, restart) in enumerate(jobs[chosen]):
        if v in starts and not restart:
            given = starts[v].lift(torch.eye(starts[v].rank)).mT  # the directions the frame writes along
            given = room.coordinates(given.mT).mT[:, : drawn.shape[2]]
            drawn[j, :, : given.shape[1]] = given / given.norm(dim=0).clamp(min=1e-12)
    orthonormal: Tensor = torch.linalg.qr(drawn)[0]
    return orthonormal


# -- descent: any batch of variants, each with its own loss, clipping and early stop ----------------------------


@dataclass(frozen=True)
class Latents:
    """The counterfactual-latent loss, after an idea of arXiv 2511.04638: where natural states would be after the swap.

    The state that a swap should lead to is the base's, moved between the means of the natural states with the base's
    and with the source's value (`closed_form.finest_shift`). Distances are in the units of natural variation.
    """

    base: Float[Tensor, "pairs d"]
    source: Float[Tensor, "pairs d"]
    wanted: Float[Tensor, "jobs pairs d"]
    known: Float[Tensor, "jobs pairs"]
    """1 where the shift is known, else 0."""
    precision: Float[Tensor, "d d"]
    weight: float

    @classmethod
    def of(cls, recording: BankRecording, place: Place, jobs: Sequence[Job], weight: float) -> Latents:
        """For the variables of some jobs at a place."""
        base, source = recording.base_at(place), recording.source_at(place)
        learned = torch.promote_types(base.dtype, torch.float32)  # frames are learned in float32 on half networks too
        base, source = base.to(learned), source.to(learned)
        states = recording.store.activations[place.name].double().cpu()
        states = states[torch.cat([recording.base_rows, recording.source_rows]).unique().cpu()]
        precision = torch.linalg.inv(shrunk_covariance(states - states.mean(dim=0)))
        wanted, known = [], []
        for v, _, _ in jobs:
            pairs, shift = finest_shift(recording, place, v)
            target, told = torch.zeros(base.shape, dtype=torch.float64), torch.zeros(len(base))
            target[pairs], told[pairs] = base.double().cpu()[pairs] + shift, 1.0
            wanted.append(target.to(base))
            known.append(told.to(base))
        return cls(base, source, torch.stack(wanted), torch.stack(known), precision.to(base), weight)

    def loss(self, edit: EditBatch, active: Tensor, pairs: Tensor | slice) -> Float[Tensor, " active"]:
        """Mean squared distance per dimension over the pairs whose shift is known, times the weight."""
        edited = edit.apply(self.base[pairs].unsqueeze(0), self.source[pairs])
        known, off = self.known[active][:, pairs], edited - self.wanted[active][:, pairs]
        distance = ((off @ self.precision) * off).mean(dim=2)
        return self.weight * (distance * known).sum(dim=1) / known.sum(dim=1).clamp(min=1)


@dataclass
class _Rotations:
    """DAS as variants: learned frames, fixed gains."""

    place: Place
    room: Frame
    rotations: TrainedFrames
    gains: Float[Tensor, "jobs widest"]
    jobs: Sequence[Job]
    latents: Latents | None = None
    now: EditBatch | None = None
    """The edits of the pass under way."""

    def edits(self, active: Tensor, progress: float) -> Sequence[EditBatch]:
        self.now = EditBatch(self.place, self.room.compose(self.rotations.frames(active)), self.gains[active])
        return [self.now]

    def penalty(self, active: Tensor, pairs: Tensor | slice) -> Float[Tensor, " active"] | None:
        if self.latents is None or self.now is None:
            return None
        return self.latents.loss(self.now, active, pairs)

    def step(self, active: Tensor, progress: float) -> None:
        self.rotations.step(active, progress)

    def describe(self, job: int) -> str:
        v, k, _ = self.jobs[job]
        return f"DAS at {self.place.name} for '{v}' with k = {k}"


# -- optimisers ---------------------------------------------------------------------------------------------------
