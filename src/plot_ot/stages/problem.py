"""Stages as values: each takes what the stage before found and returns what it found itself."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

from plot_ot.engine.watching import announce
from plot_ot.handles import Handle
from plot_ot.signatures import Readout, Signatures
from plot_ot.sites import SiteFamily
from plot_ot.stages.forecast import Forecast
from plot_ot.subjects import BankRecording, Place, Subject
from plot_ot.transport import Coupling

PARTS = ("recording", "signatures", "transport", "closed_form", "newton", "calibration", "das", "test")


class Clock:
    """Seconds spent per part of a method."""

    def __init__(self) -> None:
        self.parts: dict[str, float] = dict.fromkeys(PARTS, 0.0)

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Charge the time spent inside to a part."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.parts[name] += time.perf_counter() - start


@dataclass(frozen=True)
class Problem:
    """Everything a method may look at while it chooses: never a test bank."""

    subject: Subject
    fit: BankRecording
    calibration: BankRecording
    variables: tuple[str, ...]
    readout: Readout
    seed: int = 0
    score: str = "balanced"
    """The calibration score every stage selects by."""
    clock: Clock = field(default_factory=Clock)
    beside: tuple[str, ...] = ()
    """Variables that are coupled with the others, so that these are told apart from them, but not looked for."""

    @property
    def coupled(self) -> tuple[str, ...]:
        """The rows of every coupling."""
        return (*self.variables, *self.beside)

    def only(self, variables: Iterable[str]) -> Problem:
        """The problem of finding some of the variables; couplings still tell them from the others."""
        wanted = tuple(variables)
        return replace(self, variables=wanted, beside=tuple(v for v in self.coupled if v not in wanted))

    def generator(self, salt: int = 0) -> torch.Generator:
        """A fresh, seeded source of randomness."""
        return torch.Generator().manual_seed(1_000_003 * (self.seed + 1) + salt)


@dataclass(frozen=True)
class Candidate:
    """A coupling over a site family, one of those calibration chooses between."""

    family: SiteFamily
    coupling: Coupling
    label: str = "all"


@dataclass(frozen=True)
class Calibration:
    """The chosen handle and the whole surface it was chosen from."""

    handle: Handle
    score: float
    sizes: tuple[int, ...]
    strengths: tuple[float, ...]
    surface: Float[Tensor, "candidates sizes strengths"]
    candidate: int


Profile = Mapping[str, Mapping[str, float]]
Capacity = Mapping[str, Mapping[int, float]]


@dataclass(frozen=True)
class State:
    """What stages hand on, per variable: where to look, couplings to calibrate, and handles."""

    places: Mapping[str, tuple[Place, ...]]
    signatures: tuple[Signatures, ...] = ()
    candidates: Mapping[str, tuple[Candidate, ...]] = field(default_factory=dict)
    calibrations: Mapping[str, Calibration] = field(default_factory=dict)
    handles: Mapping[str, Handle] = field(default_factory=dict)
    patched: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Calibration scores of the whole places that were tried."""
    profile: Profile = field(default_factory=dict)
    """The best calibration score of all that was tried inside each place, by variable and place."""
    capacity: Capacity = field(default_factory=dict)
    """The best calibration score of all that was tried with each number of directions, by variable and number."""
    trail: tuple[State, ...] = ()
    """The states in which each localization stage left its couplings, and what was made of them."""

    @classmethod
    def start(cls, problem: Problem) -> State:
        """Every place is open to every variable."""
        return cls(dict.fromkeys(problem.variables, problem.subject.places))


Key = TypeVar("Key")


def best_of(*profiles: Mapping[str, Mapping[Key, float]]) -> Mapping[str, Mapping[Key, float]]:
    """Several profiles (or capacities) as one: of every place (or number of directions) the best score."""
    found: dict[str, dict[Key, float]] = {}
    for profile in profiles:
        for variable, scores in profile.items():
            before = found.get(variable, {})
            found[variable] = best_by([*before, *scores], [*before.values(), *scores.values()])
    return found


def best_by(keys: Iterable[Key], scores: Iterable[float]) -> dict[Key, float]:
    """The best score under each key."""
    best: dict[Key, float] = {}
    for key, score in zip(keys, scores, strict=True):
        best[key] = max(score, best.get(key, score))
    return best


STAGES = {
    "Localize": "couplings",
    "LocalizeTokens": "couplings of tokens",
    "ScoreSites": "scores of sites",
    "SelectTokens": "choice of tokens",
    "SelectPlaces": "choice of places",
    "Calibrate": "calibration",
    "TrainDas": "training of rotations",
    "TrainMask": "training of masks",
    "TrainBoundless": "training of rotations",
    "ClosedForm": "closed forms",
    "Together": "tokens together",
    "Best": "",
}
"""What stages are called while they run; of several ways each stage is named by itself."""


def stage_name(stage: Stage) -> str:
    """What a stage is called while it runs."""
    kind = type(stage).__name__
    return STAGES.get(kind, kind)


def advance(problem: Problem, state: State, stage: Stage) -> State:
    """Take a stage, and keep what it tried besides what it chose.

    A stage that ends in handles says in `chosen["by_support"]` how the best handle of every place did on calibration,
    and in `chosen["by_size"]` how the best one of every number of directions did.
    """
    if stage_name(stage):
        announce(stage_name(stage))
    after = stage(problem, state)
    names = {p.name for p in problem.subject.places}
    fresh = {v: h for v, h in after.handles.items() if h is not state.handles.get(v)}
    tried = {v: {p: s for p, s in h.chosen.get("by_support", {}).items() if p in names} for v, h in fresh.items()}
    sizes = {v: {int(n): s for n, s in h.chosen.get("by_size", {}).items()} for v, h in fresh.items()}
    for v, h in fresh.items():
        if "calibration_score" in h.chosen:
            sizes[v].setdefault(h.size, float(h.chosen["calibration_score"]))
    capacity = best_of(state.capacity, after.capacity, sizes)
    return replace(after, profile=best_of(state.profile, after.profile, tried), capacity=capacity)


class Stage(Protocol):
    """One step of a method.

    A stage that learns from labels says so with a class attribute `learner = True`: random controls leave it out.
    """

    def __call__(self, problem: Problem, state: State) -> State:
        """From what is known to what is found."""
        ...

    def forecast(self, ahead: Forecast) -> None:
        """Tell what this stage will compute, and what the stages after it will find (`stages.forecast`)."""
        ...
