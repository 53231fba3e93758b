"""Localization: signatures of the menu's sites, matched to the variables by transport or by a baseline's scores."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from jaxtyping import Float
from numpy import ndarray

from plot_ot.signatures import SignatureSpec, signatures
from plot_ot.sites import Menu, SiteFamily, neurons
from plot_ot.stages.base import Problem, State
from plot_ot.stages.calibrate import Candidate, pair_weights, scored
from plot_ot.subjects import Place
from plot_ot.transport import Transport, couple, from_scores


@dataclass(frozen=True)
class Localize:
    """Fit one coupling over the menu at all open places, or one per place, for every (ε, β) of the grid."""

    menu: Menu = neurons
    transport: Transport = field(default_factory=Transport)
    spec: SignatureSpec = field(default_factory=SignatureSpec)
    per_place: bool = False

    def __call__(self, problem: Problem, state: State) -> State:
        measured = []
        candidates: dict[str, tuple[Candidate, ...]] = dict.fromkeys(problem.variables, ())
        for places in _groups(problem, state, self.per_place):
            family = self.menu(problem.fit, places)
            with problem.clock.part("signatures"):
                found = signatures(problem.fit, family, problem.look, self.spec, problem.variables)
            measured.append(found)
            with problem.clock.part("transport"):
                couplings = couple(found, self.transport)
            label = places[0].name if self.per_place else "all"
            for v in problem.variables:
                if set(places) & set(state.places[v]):
                    candidates[v] += tuple(Candidate(family, c, label) for c in couplings)
        return replace(state, signatures=tuple(measured), candidates=candidates)


@dataclass(frozen=True)
class ScoreSites:
    """A baseline behind the interface of a coupling: sites ranked by scores that use no transport."""

    kind: str
    scores: Callable[[Problem, SiteFamily], Float[ndarray, "m n"]]
    menu: Menu = neurons

    def __call__(self, problem: Problem, state: State) -> State:
        family = self.menu(problem.fit, problem.subject.places)
        with problem.clock.part("calibration"):
            scores = self.scores(problem, family)
        coupling = from_scores(problem.variables, [s.name for s in family.sites], scores, self.kind)
        return replace(state, candidates={v: (Candidate(family, coupling),) for v in problem.variables})


def brute_force(problem: Problem, family: SiteFamily) -> Float[ndarray, "m n"]:
    """What each site gains over no edit, swapped alone, on the calibration bank."""
    rows = []
    swaps = torch.cat([torch.eye(len(family), dtype=torch.float64), torch.zeros(1, len(family), dtype=torch.float64)])
    for v in problem.variables:
        weights = pair_weights(problem.calibration, v, problem.score)
        score = scored(problem.calibration, family.edits(swaps), v, weights, problem.look)
        rows.append((score[:-1] - score[-1]).clamp(min=0).numpy())
    return np.stack(rows)


def at_random(draw: int = 0) -> Callable[[Problem, SiteFamily], Float[ndarray, "m n"]]:
    """Random scores; `draw` numbers independent ones."""

    def scores(problem: Problem, family: SiteFamily) -> Float[ndarray, "m n"]:
        shape = (len(problem.variables), len(family))
        return torch.rand(shape, generator=problem.generator(7919 + draw), dtype=torch.float64).numpy()

    return scores


def _groups(problem: Problem, state: State, per_place: bool) -> list[list[Place]]:
    """The places to couple together: all that are open to some variable, or one at a time."""
    open_to_some = {p for places in state.places.values() for p in places}
    ordered = [p for p in problem.subject.places if p in open_to_some]
    return [[p] for p in ordered] if per_place else [ordered]
