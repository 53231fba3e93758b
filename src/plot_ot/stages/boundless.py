"""Boundless DAS: a rotation whose width is learned with it.

The directions of a rotation stand in order, and direction i has the gain σ((b - i) / T): those before the boundary b
are swapped. b is learned, at a price of λ for every direction inside; while T falls the boundary becomes sharp. The
width read off at the end is compared on calibration with its neighbours.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from plot_ot.edits import EditBatch, Frame
from plot_ot.engine import Unit, run
from plot_ot.errors import PlotError, unknown
from plot_ot.signatures import Readout
from plot_ot.stages.choose import best_rotation
from plot_ot.stages.das import Rotation, starting_frames
from plot_ot.stages.descent import (
    OPTIMISERS,
    Adam,
    DasSpec,
    TrainedFrames,
    annealed,
    continued,
    descend,
    trained_frames,
    trained_like,
)
from plot_ot.stages.forecast import Forecast
from plot_ot.stages.problem import Problem, State
from plot_ot.subjects import BankRecording, Place

INSIDE = ("place", "frame")
NEIGHBOURS = 5
"""Widths that a learned one is compared with, itself among them, at most."""


@dataclass(frozen=True)
class BoundlessSpec:
    """How boundaries are trained: all for the same number of epochs, since the temperature falls over them."""

    optimiser: str = "riemannian"
    """Of the rotation, as in `DasSpec`."""
    rate: float = 0.08
    boundary_rate: float = 0.02
    """Step of the boundary, as a share of the widest rotation."""
    batch: int = 250
    epochs: int = 60
    restarts: int = 1
    clip: float = 1.0
    softness: tuple[float, float] = (0.5, 0.1)
    """T: in the first epoch as a share of the widest rotation, in the last one in directions."""

    def __post_init__(self) -> None:
        if self.optimiser not in OPTIMISERS:
            unknown("DAS optimiser", self.optimiser, OPTIMISERS)
        if self.epochs < 1 or self.restarts < 1 or self.batch < 1 or min(self.softness) <= 0:
            raise PlotError(f"Boundless DAS needs epochs, restarts, a batch and a softness above zero; found {self}.")

    def rotating(self) -> DasSpec:
        """What the rotation's optimiser and the descent read."""
        return DasSpec(self.optimiser, self.rate, self.batch, least=self.epochs, most=self.epochs, clip=self.clip)


@dataclass(frozen=True)
class Bounded:
    """A rotation with the width it has learned."""

    place: Place
    variable: str
    frame: Frame
    """All its directions, in order."""
    boundary: float
    price: float
    restart: int
    loss: float
    """Of the last, nearly sharp, epoch on the fit bank, without the boundary's price."""

    @property
    def width(self) -> int:
        """The learned width as a whole number."""
        return min(max(1, round(self.boundary)), self.frame.rank)

    def neighbours(self) -> list[int]:
        """Widths around the learned one, itself among them."""
        k = self.width
        near = {k - 1, k, k + 1, math.floor(0.75 * k), math.ceil(1.25 * k)}
        return sorted(n for n in near if 1 <= n <= self.frame.rank)


@dataclass(frozen=True)
class TrainBoundless:
    """Learn rotation and width at every place open to a variable; calibration picks price, place and final width.

    Every (variable, price, restart) of a place is one variant of a batch.
    """

    learner: ClassVar[bool] = True
    prices: tuple[float, ...] = (1e-3, 1e-2, 1e-1)
    """λ: by how much (in units of the loss) a direction must help."""
    widest: int | None = None
    """At most so many directions; None is as many as there are, a square rotation."""
    spec: BoundlessSpec = field(default_factory=BoundlessSpec)
    from_handles: bool = False
    """Start at the directions and the size of the handles found so far, where they are at the same place."""
    inside: str = "place"
    """Rotate the whole `place`, or only the orthonormal `frame` of the handle found there (PCA components)."""

    def __post_init__(self) -> None:
        if self.inside not in INSIDE:
            unknown("room for Boundless DAS", self.inside, INSIDE)
        if not self.prices or min(self.prices) < 0 or (self.widest is not None and self.widest < 1):
            raise PlotError(f"Boundless DAS needs prices >= 0 and widths >= 1; found {self.prices}, {self.widest}.")

    def __call__(self, problem: Problem, state: State) -> State:
        trainings = []
        for n, place in enumerate(problem.subject.places):
            rooms: dict[int, tuple[Frame | None, list[str]]] = {}
            for v in (v for v in problem.variables if place in state.places[v]):
                room = self._room(state, v, place)
                rooms.setdefault(0 if room is None else id(room.read), (room, []))[1].append(v)
            starts = self._starts(state, place)
            trainings += [
                BoundlessTraining(place, variables, self.prices, problem.generator(n), self.widest, starts, room)
                for room, variables in rooms.values()
            ]
        with problem.clock.part("das"):
            found = train_boundless(problem.fit, trainings, problem.readout, self.spec)
        handles = {}
        with problem.clock.part("calibration"):
            for v in problem.variables:
                mine = [b for b in found if b.variable == v]
                tries = {id(r): (b, r) for b in mine for r in rotations(b, self.spec.epochs)}
                handle = best_rotation(problem, [r for _, r in tries.values()])
                learned = {
                    "learned": [
                        {"place": b.place.name, "boundary": b.boundary, "price": b.price, "loss": b.loss} for b in mine
                    ]
                }
                handles[v] = replace(handle, chosen={**handle.chosen, **learned})
        return replace(state, handles=handles)

    def forecast(self, ahead: Forecast) -> None:
        """All prices and restarts of a place are one batch; the learned widths and their neighbours are scored."""
        each = len(self.prices) * self.spec.restarts
        for own in ahead.open.values():
            for p, chance in own.items():
                together = each * sum(p in other for other in ahead.open.values())
                widest = min(self.widest or p.width, p.width)
                ahead.train(p, each * chance, self.spec.epochs, self.spec.batch, together=together, rank=widest)
                ahead.rotations += each * chance
                ahead.add("calibration", p, ahead.scene.calibration, min(NEIGHBOURS, widest), each * chance)

    def _room(self, state: State, variable: str, place: Place) -> Frame | None:
        """The directions that rotations may mix; None is the whole place."""
        if self.inside == "place":
            return None
        handle = state.handles.get(variable)
        here = [e for e in handle.edits if e.place == place] if handle else []
        if not here:
            raise PlotError(f"No stage before has found a handle for '{variable}' at {place.name} to rotate inside of.")
        frame = here[0].frame
        if frame.write is not None:
            raise PlotError(
                f"The frame of '{variable}' at {place.name} ('{frame.kind}') is not orthonormal: use 'place'."
            )
        return None if frame.read is None else frame

    def _starts(self, state: State, place: Place) -> dict[str, Frame]:
        handles = state.handles if self.from_handles else {}
        return {
            v: e.frame for v, h in handles.items() for e in h.edits if e.place == place and e.frame.read is not None
        }


def rotations(bounded: Bounded, epochs: int) -> list[Rotation]:
    """The learned width and its neighbours as hard rotations."""
    b = bounded
    assert b.frame.read is not None  # noqa: S101
    made = []
    for k in b.neighbours():
        frame = b.frame.only(torch.arange(k, device=b.frame.read.device))
        made.append(Rotation(b.place, b.variable, frame, k, b.restart, b.loss, epochs))
    return made


@dataclass(frozen=True)
class BoundlessTraining:
    """What is to be trained at one place: rotations with learned width for every variable x price x restart.

    A variable's first restart begins with the directions of its frame in `starts` and the boundary after them; others
    begin at random, with half of the directions inside. In a `room` of orthonormal directions, rotations mix these.
    """

    place: Place
    variables: Sequence[str]
    prices: Sequence[float]
    generator: torch.Generator
    widest: int | None = None
    starts: Mapping[str, Frame] = field(default_factory=dict)
    room: Frame | None = None


def train_boundless(
    recording: BankRecording, trainings: Sequence[BoundlessTraining], readout: Readout, spec: BoundlessSpec
) -> list[Bounded]:
    """The rotations of several trainings; each is one unit of work, its jobs one batch of variants."""
    units = []
    for t in trainings:
        for v in t.variables:
            recording.bank.require(v)
        jobs = [(v, price, r) for v in t.variables for price in t.prices for r in range(spec.restarts)]
        args = t.place, jobs, readout, spec, t.generator.get_state(), t.widest, t.starts, t.room
        units.append(Unit(_train, slice(None), (t.place,), args))
    learned: Iterator[list[Bounded]] = run(recording, units)
    return [bounded for some in learned for bounded in some]


def _train(
    recording: BankRecording,
    place: Place,
    jobs: Sequence[Job],
    readout: Readout,
    spec: BoundlessSpec,
    state: Tensor,
    widest: int | None,
    starts: Mapping[str, Frame],
    room: Frame | None,
) -> list[Bounded]:
    """Train the jobs of a place as one batch."""
    generator = continued(state)
    like = trained_like(recording, place)
    room = (room or Frame.identity(place.width)).to(like.device, like.dtype)
    widest = min(widest or room.rank, room.rank)
    columns = room.rank if spec.optimiser == "adam" else widest
    start = starting_frames([(v, r) for v, _, r in jobs], room, columns, generator, starts)
    frames = trained_frames(spec.rotating(), start.to(like), like.new_ones(len(jobs), widest))
    begin = [min(starts[v].rank, widest) if v in starts and not r else widest / 2 for v, _, r in jobs]
    bounded = _Bounded(place, room, frames, torch.tensor(begin).to(like), jobs, spec, widest)
    labels = torch.stack([recording.bank.labels[v] for v, _, _ in jobs]).to(like.device)
    final, _ = descend(recording, [place], labels, readout, spec.rotating(), generator, bounded)
    found = []
    for j, (v, price, r) in enumerate(jobs):
        frame = room.compose(frames.finished(j, widest)).to(torch.device("cpu"), like.dtype)
        found.append(Bounded(place, v, frame, float(bounded.boundary[j]), price, r, float(final[j])))
    return found


Job = tuple[str, float, int]


class _Bounded:
    """Rotations with boundaries as variants: learned frames, learned gains."""

    def __init__(
        self,
        place: Place,
        room: Frame,
        frames: TrainedFrames,
        boundary: Float[Tensor, " jobs"],
        jobs: Sequence[Job],
        spec: BoundlessSpec,
        widest: int,
    ) -> None:
        self.place, self.room, self.frames, self.jobs, self.spec, self.widest = place, room, frames, jobs, spec, widest
        self.boundary = boundary
        self.price = torch.tensor([price for _, price, _ in jobs]).to(boundary)
        self.middle = torch.arange(widest).to(boundary) + 0.5  # so that b = k takes k directions
        self.adam = Adam(boundary[:, None, None], spec.clip)

    def edits(self, active: Tensor, progress: float) -> Sequence[EditBatch]:
        self.leaf = self.boundary[active].requires_grad_()
        first, last = self.spec.softness
        softness = annealed((max(first * self.widest, last), last), progress)
        self.gains = torch.sigmoid((self.leaf[:, None] - self.middle) / softness)
        return [EditBatch(self.place, self.room.compose(self.frames.frames(active)), self.gains)]

    def penalty(self, active: Tensor, pairs: Tensor | slice) -> Float[Tensor, " active"]:
        return self.price[active] * self.gains.sum(dim=1)

    @torch.no_grad()
    def step(self, active: Tensor, progress: float) -> None:
        self.frames.step(active, progress)
        gradient = self.leaf.grad
        assert gradient is not None  # noqa: S101
        rate = self.spec.boundary_rate * self.widest * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
        move = self.adam.direction(active, gradient[:, None, None], per_entry=True)[:, 0, 0]
        self.boundary[active] = (self.boundary[active] - rate * move).clamp(0.5, self.widest)

    def describe(self, job: int) -> str:
        v, price, _ = self.jobs[job]
        return f"Boundless DAS at {self.place.name} for '{v}' with price {price:g}"
