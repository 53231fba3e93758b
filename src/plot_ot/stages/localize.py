"""Localization: signatures of the menu's sites, matched to the variables by transport or by a baseline's scores."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from jaxtyping import Bool, Float
from numpy import ndarray

from plot_ot.edits import EditBatch, resume_edited
from plot_ot.errors import unknown
from plot_ot.signatures import SignatureSpec, signatures
from plot_ot.sites import Menu, SiteFamily, neurons
from plot_ot.stages.base import Problem, State
from plot_ot.stages.calibrate import Candidate, pair_weights, scored
from plot_ot.subjects import Place
from plot_ot.transport import Transport, couple, from_scores

COUPLINGS = ("all", "place", "masked")


@dataclass(frozen=True)
class Localize:
    """Fit couplings over the menus at the places still open, for every (ε, β) of the grid.

    `coupling` says what is coupled together: `all` open places; one `place` at a time (the paper's later stages); or
    `masked`, all places at once with each variable shut out of the places that are not open to it.
    """

    menus: tuple[Menu, ...] = (neurons,)
    transport: Transport = field(default_factory=Transport)
    spec: SignatureSpec = field(default_factory=SignatureSpec)
    coupling: str = "all"

    def __post_init__(self) -> None:
        if self.coupling not in COUPLINGS:
            unknown("coupling", self.coupling, COUPLINGS)

    def __call__(self, problem: Problem, state: State) -> State:
        measured = []
        candidates: dict[str, tuple[Candidate, ...]] = dict.fromkeys(problem.variables, ())
        for places in _groups(problem, state, self.coupling == "place"):
            for menu in self.menus:
                with problem.clock.part("signatures"):
                    family = menu(problem.fit, places)
                    found = signatures(problem.fit, family, problem.look, self.spec, problem.variables)
                measured.append(found)
                with problem.clock.part("transport"):
                    couplings = couple(found, self.transport, self._mask(problem, state, family))
                label = places[0].name if len(places) == 1 else "all"
                for v in problem.variables:
                    if set(places) & set(state.places[v]):
                        candidates[v] += tuple(Candidate(family, c, label) for c in couplings)
        return replace(state, signatures=tuple(measured), candidates=candidates)

    def _mask(self, problem: Problem, state: State, family: SiteFamily) -> Bool[ndarray, "m n"] | None:
        """Which variables may be matched with which sites."""
        if self.coupling != "masked":
            return None
        return np.array([[s.place in state.places[v] for s in family.sites] for v in problem.variables])


@dataclass(frozen=True)
class ScoreSites:
    """A baseline behind the interface of a coupling: sites ranked by scores that use no transport."""

    kind: str
    scores: Callable[[Problem, SiteFamily], Float[ndarray, "m n"]]
    menu: Menu = neurons

    def __call__(self, problem: Problem, state: State) -> State:
        [places] = _groups(problem, state, False)
        family = self.menu(problem.fit, places)
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


def attribution(problem: Problem, family: SiteFamily) -> Float[ndarray, "m n"]:
    """Attribution patching: the slope at g = 0 by which each site's gain lowers the counterfactual label's loss.

    One backward pass per place and variable gives all its sites: d loss / d g = Σ_pairs ∇·W(Rᵀ a_source - Rᵀ a_base).
    """
    scores = np.zeros((len(problem.variables), len(family)))
    fit = problem.fit
    at_once = max(1, fit.subject.responses_per_batch)
    for row, v in enumerate(problem.variables):
        labels = fit.bank.labels[v].to(fit.subject.device)
        for place in family.places:
            like = fit.store.activations[place.name]
            frame, slope = family.frames[place.name], torch.zeros(family.frames[place.name].rank, dtype=torch.float64)
            for at in range(0, len(fit), at_once):
                pairs = slice(at, min(at + at_once, len(fit)))
                gains = torch.zeros(1, frame.rank, device=like.device, dtype=like.dtype, requires_grad=True)
                outputs = resume_edited(fit, [EditBatch(place, frame, gains)], pairs)
                [gradient] = torch.autograd.grad(problem.look.loss(outputs, labels[pairs]).sum(), gains)
                slope -= gradient[0].cpu().double()
            for site in family.at(place):
                scores[row, site] = max(0.0, float(slope[list(family.sites[site].directions)].sum()))
    return scores


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
