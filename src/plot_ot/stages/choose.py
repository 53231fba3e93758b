"""Stages that end in handles: calibrate couplings, or train and select rotations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from plot_ot.edits import EditBatch
from plot_ot.errors import PlotError
from plot_ot.handles import Handle, handle_from_edits
from plot_ot.stages.base import Problem, State
from plot_ot.stages.calibrate import Search, calibrate, pair_weights, scored, within_places
from plot_ot.stages.das import DasSpec, Rotation, train_rotations


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
class TrainDas:
    """Train rotations at every place open to a variable and keep the best on calibration (ties: smallest k)."""

    dimensions: tuple[int, ...] | None = None
    """Subspace sizes; None is every size up to the place's width."""
    spec: DasSpec = field(default_factory=DasSpec)

    def __call__(self, problem: Problem, state: State) -> State:
        rotations: list[Rotation] = []
        with problem.clock.part("das"):
            for n, place in enumerate(problem.subject.places):
                variables = [v for v in problem.variables if place in state.places[v]]
                wanted = self.dimensions or range(1, place.width + 1)
                sizes = sorted({k for k in wanted if k <= place.width})
                if variables:
                    generator = problem.generator(n)
                    rotations += train_rotations(
                        problem.fit, place, variables, sizes, problem.look, self.spec, generator
                    )
        with problem.clock.part("calibration"):
            handles = {v: best_rotation(problem, [r for r in rotations if r.variable == v]) for v in problem.variables}
        return replace(state, handles=handles)


def best_rotation(problem: Problem, rotations: Sequence[Rotation]) -> Handle:
    """The rotation with the best calibration score, as a handle."""
    variable = rotations[0].variable
    weights = pair_weights(problem.calibration, variable, problem.score)
    scores = [float(scored(problem.calibration, _edit(r), variable, weights, problem.look)[0]) for r in rotations]
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
