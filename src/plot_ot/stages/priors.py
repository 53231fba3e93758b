"""Where Gauss-Newton starts from and what it must not leave without need: closed-form maps and their metric."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from plot_ot.edits import EditBatch, Frame
from plot_ot.stages.closed_form import RULES, Shift, cell_variables, different_cells
from plot_ot.stages.gauss_newton import Rest
from plot_ot.stages.maps import Map, Metric
from plot_ot.stages.natural import fit_states, shrunk_covariance
from plot_ot.subjects import BankRecording, Place

PAIRS = "pairs"
"""The rule that needs no values: the source's own shift where the variable changes, none where it does not."""
NEGLIGIBLE = 1e-2
"""Singular values of a map below this share of the largest are left out."""


@dataclass(frozen=True)
class Prior:
    """A closed-form map at a place, and the metric in which leaving it is measured."""

    place: Place
    rule: str
    ridge: float
    start: Map
    metric: Metric
    shifts: Float[Tensor, "d k"]
    """Directions of the shifts that it asks for, the strongest first."""

    def factored(self, m: Map) -> Map:
        """A map at this place by singular values, without the negligible."""
        return self.metric.factored(m, NEGLIGIBLE)

    @property
    def edit(self) -> EditBatch:
        """The edit of the closed form itself."""
        return edit_of(self.place, self.factored(self.start))


def edit_of(place: Place, m: Map, rank: int | None = None) -> EditBatch:
    """The edit of a map at a place, or of its leading directions."""
    dtype = torch.get_default_dtype()
    read, write = (t[:, :rank].to(dtype).contiguous() for t in (m.read, m.write))
    return EditBatch(place, Frame.oblique(read, write, "newton"), torch.ones(1, read.shape[1]))


def priors_at(
    fit: BankRecording,
    places: Sequence[Place],
    variable: str,
    weights: Float[Tensor, " pairs"],
    rules: Sequence[str] = (*RULES, PAIRS),
    ridges: Sequence[float] = (1e-3, 1e-1),
) -> list[Prior]:
    """The closed-form map of every rule and ridge at some places; a variable's cells are the same at all of them."""
    cells = different_cells(fit, variable, [rule for rule in rules if rule != PAIRS])
    found = []
    for place in places:
        difference = fit.source_at(place).double().cpu() - fit.base_at(place).double().cpu()
        states, own = fit_states(fit, place), fit.store.activations[place.name]
        natural = torch.linalg.cholesky(shrunk_covariance(states - states.mean(dim=0)))
        for rule in rules:
            if rule == PAIRS:
                moved = difference * fit.bank.changed[variable].cpu().double()[:, None]
                shift: Shift | None = (torch.arange(len(fit)), moved)
            else:
                shift = cells[rule].shift(own) if rule in cells else None
            if shift is None:
                continue
            known, delta = shift
            share = weights[known] / weights[known].sum()
            found += prior_maps(place, rule, ridges, natural, difference[known], delta, share)
    return found


def different_rules(fit: BankRecording, variable: str, rules: Sequence[str]) -> int:
    """How many rules differ for a variable."""
    cells = {cell_variables(fit, variable, rule) for rule in rules if rule != PAIRS}
    return len(cells) + (PAIRS in rules)


def prior_maps(
    place: Place,
    rule: str,
    ridges: Sequence[float],
    natural: Float[Tensor, "d d"],
    difference: Float[Tensor, "pairs d"],
    shift: Float[Tensor, "pairs d"],
    weights: Float[Tensor, " pairs"],
) -> list[Prior]:
    """The ridge regressions of the shift on the difference over weighted pairs; none where nothing differs or shifts.

    `natural` is a Cholesky factor of the natural states' covariance.
    """
    root = weights.sqrt()[:, None]
    moment = (root * difference).T @ (root * difference)
    mean = float(moment.diagonal().mean())
    # few distinct shifts make a map of low rank: keep it as factors
    _, s, vt = torch.linalg.svd(torch.unique(root * shift, dim=0), full_matrices=False)
    if not mean > 0 or not len(s) or not float(s[0]) > 0:
        return []
    write = vt[s > 1e-6 * s[0]].T
    cross = (root * difference).T @ ((root * shift) @ write)
    found = []
    for ridge in ridges:
        factor = torch.linalg.cholesky(moment + ridge * mean * torch.eye(len(moment), dtype=moment.dtype))
        read = torch.cholesky_solve(cross, factor)
        found.append(Prior(place, rule, ridge, Map(write, read), Metric(natural, factor), write))
    return found


def leading_directions(prior: Prior, rest: Rest, room: int) -> Float[Tensor, "d room"]:
    """An orthonormal basis of the strongest shifts (up to half of it) and of the strongest differences."""
    shifts = prior.shifts[:, : max(1, room // 2)]
    difference = rest.weights.sqrt()[:, None] * rest.clean_difference(prior.place)
    beyond = difference - (difference @ shifts) @ shifts.T
    *_, vt = torch.linalg.svd(beyond, full_matrices=False)
    basis: Tensor = torch.linalg.qr(torch.cat([shifts, vt[: room - shifts.shape[1]].T], dim=1)).Q
    return basis
