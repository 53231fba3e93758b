"""Stages that end in handles: calibrate couplings, or train and select rotations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from plot_ot.edits import EditBatch, Frame
from plot_ot.errors import PlotError
from plot_ot.handles import Handle, handle_from_edits
from plot_ot.stages.base import Problem, State
from plot_ot.stages.calibrate import Search, calibrate, pair_weights, scored, scored_frames, within_places
from plot_ot.stages.das import DasSpec, Rotation, train_rotations
from plot_ot.subjects import Place


@dataclass(frozen=True)
class Calibrate:
    """Turn each variable's couplings into the best handle of the (K, λ) grid.

    `supports="all"` takes the top K over the whole menu; `"place"` also tries the top K within each single place.
    """

    search: Search
    supports: str = "all"

    def __call__(self, problem: Problem, state: State) -> State:
        found = {}
        search = replace(self.search, score=problem.score)
        with problem.clock.part("calibration"):
            for v in problem.variables:
                candidates = state.candidates.get(v, ())
                if not candidates:
                    raise PlotError(f"There is no coupling to calibrate for '{v}'; put a localization stage before.")
                options = within_places(candidates) if self.supports == "place" else list(candidates)
                found[v] = calibrate(problem.calibration, options, v, search, problem.look)
        return replace(state, calibrations=found, handles={v: c.handle for v, c in found.items()})


@dataclass(frozen=True)
class SelectPlaces:
    """From couplings over whole places to the places worth zooming into, with their full patches as handles.

    Each coupling proposes its `shortlist` places of highest mass; each proposed place is tried as a full patch on
    calibration, and the best `keep` stay open. With one coupling and a shortlist of one there is nothing to try.
    """

    shortlist: int = 1
    keep: int = 1

    def __call__(self, problem: Problem, state: State) -> State:
        places, handles = {}, {}
        for v in problem.variables:
            proposed = self._proposed(state, v)
            with problem.clock.part("calibration"):
                weights = pair_weights(problem.calibration, v, problem.score)
                scores = {
                    p: float(scored(problem.calibration, _patch(p), v, weights, problem.look)[0]) for p in proposed
                }
            ranked = sorted(proposed, key=lambda p: -round(scores[p], 9))  # equal scores keep the order of mass
            places[v] = tuple(ranked[: self.keep])
            chosen = {
                "support": ranked[0].name,
                "proposed": [p.name for p in proposed],
                "calibration_score": scores[ranked[0]],
                "by_support": {p.name: scores[p] for p in proposed},
            }
            handles[v] = handle_from_edits(v, _patch(ranked[0]), 0, problem.subject, chosen)
        return replace(state, places=places, handles=handles)

    def _proposed(self, state: State, variable: str) -> list[Place]:
        found: dict[str, Place] = {}
        for c in state.candidates.get(variable, ()):
            for j in c.coupling.ranking(variable)[: self.shortlist]:
                place = c.family.sites[j].place
                found.setdefault(place.name, place)
        if not found:
            raise PlotError(f"There is no coupling to select places for '{variable}' from; put a localization before.")
        return list(found.values())


def _patch(place: Place) -> list[EditBatch]:
    return [EditBatch(place, Frame.identity(place.width), torch.ones(1, place.width))]


@dataclass(frozen=True)
class TrainDas:
    """Train rotations at every place open to a variable and keep the best on calibration (ties: smallest k)."""

    dimensions: tuple[int, ...] | None = None
    """Subspace sizes; None is every size up to the place's width."""
    spec: DasSpec = field(default_factory=DasSpec)
    from_handles: bool = False
    """Start at the directions of the handles found so far, where they are at the same place."""

    def __call__(self, problem: Problem, state: State) -> State:
        rotations: list[Rotation] = []
        with problem.clock.part("das"):
            for n, place in enumerate(problem.subject.places):
                variables = [v for v in problem.variables if place in state.places[v]]
                wanted = self.dimensions or range(1, place.width + 1)
                sizes = sorted({k for k in wanted if k <= place.width})
                if variables:
                    starts = self._starts(state, place)
                    rotations += train_rotations(
                        problem.fit, place, variables, sizes, problem.look, self.spec, problem.generator(n), starts
                    )
        with problem.clock.part("calibration"):
            handles = {v: best_rotation(problem, [r for r in rotations if r.variable == v]) for v in problem.variables}
        return replace(state, handles=handles)

    def _starts(self, state: State, place: Place) -> dict[str, Frame]:
        handles = state.handles if self.from_handles else {}
        return {
            v: e.frame for v, h in handles.items() for e in h.edits if e.place == place and e.frame.read is not None
        }


def best_rotation(problem: Problem, rotations: Sequence[Rotation]) -> Handle:
    """The rotation with the best calibration score, as a handle."""
    variable = rotations[0].variable
    weights = pair_weights(problem.calibration, variable, problem.score)
    tries = [(r.place, r.frame) for r in rotations]
    scores = scored_frames(problem.calibration, tries, (1.0,), variable, weights, problem.look)[:, 0].tolist()
    order = {p.name: k for k, p in enumerate(problem.subject.places)}
    best, score = min(
        zip(rotations, scores, strict=True),
        key=lambda rs: (-round(rs[1], 9), rs[0].dimension, order[rs[0].place.name], rs[0].restart),
    )
    described = {
        "support": best.place.name,
        "k": best.dimension,
        "restart": best.restart,
        "epochs": best.epochs,
        "fit_loss": best.loss,
        "calibration_score": score,
        "trained": len(rotations),
        "by_support": _best_by_place(rotations, scores),
    }
    return handle_from_edits(variable, _edit(best), 0, problem.subject, described)


def _best_by_place(rotations: Sequence[Rotation], scores: Sequence[float]) -> dict[str, float]:
    best: dict[str, float] = {}
    for r, score in zip(rotations, scores, strict=True):
        best[r.place.name] = max(score, best.get(r.place.name, 0.0))
    return best


def _edit(rotation: Rotation) -> list[EditBatch]:
    return [EditBatch(rotation.place, rotation.frame, torch.ones(1, rotation.frame.rank))]
