"""Where Gauss-Newton starts from and what it must not leave without need: closed-form maps and their metric."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from plot_ot.edits import EditBatch, Frame
from plot_ot.stages.closed_form import RULES, cell_shift, cell_variables
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
    place: Place,
    variable: str,
    weights: Float[Tensor, " pairs"],
    rules: Sequence[str] = (*RULES, PAIRS),
    ridges: Sequence[float] = (1e-3, 1e-1),
) -> list[Prior]:
    """The closed-form map of every rule and ridge at a place."""
    base, source = fit.base_at(place).double().cpu(), fit.source_at(place).double().cpu()
    states = fit_states(fit, place)
    natural = shrunk_covariance(states - states.mean(dim=0))
    found, seen = [], list[tuple[str, ...]]()
    for rule in rules:
        shift = _shift(fit, place, variable, rule, source - base, seen)
        if shift is None:
            continue
        known, delta = shift
        for ridge in ridges:
            prior = prior_map(
                place, rule, ridge, natural, (source - base)[known], delta, weights[known] / weights[known].sum()
            )
            if prior is not None:
                found.append(prior)
    return found


def different_rules(fit: BankRecording, variable: str, rules: Sequence[str]) -> int:
    """How many rules differ for a variable."""
    cells = {cell_variables(fit, variable, rule) for rule in rules if rule != PAIRS}
    return len(cells) + (PAIRS in rules)


def _shift(
    fit: BankRecording,
    place: Place,
    variable: str,
    rule: str,
    difference: Float[Tensor, "pairs d"],
    seen: list[tuple[str, ...]],
) -> tuple[Int[Tensor, " known"], Float[Tensor, "known d"]] | None:
    """δ for the pairs where it is known; None where it is not for any, or the same cells were `seen` before."""
    if rule == PAIRS:
        return torch.arange(len(fit)), difference * fit.bank.changed[variable].cpu().double()[:, None]
    others = cell_variables(fit, variable, rule)
    if others in seen:
        return None
    seen.append(others)
    return cell_shift(fit, place, variable, others)


def prior_map(
    place: Place,
    rule: str,
    ridge: float,
    natural: Float[Tensor, "d d"],
    difference: Float[Tensor, "pairs d"],
    shift: Float[Tensor, "pairs d"],
    weights: Float[Tensor, " pairs"],
) -> Prior | None:
    """The ridge regression of the shift on the difference over weighted pairs; None where nothing differs or shifts."""
    root = weights.sqrt()[:, None]
    moment = (root * difference).T @ (root * difference)
    mean = float(moment.diagonal().mean())
    if not mean > 0:
        return None
    moment = moment + ridge * mean * torch.eye(len(moment), dtype=moment.dtype)
    cross = (root * shift).T @ (root * difference)
    # few distinct shifts make a map of low rank: keep it as factors
    _, s, vt = torch.linalg.svd(torch.unique(root * shift, dim=0), full_matrices=False)
    if not len(s) or not float(s[0]) > 0:
        return None
    write = vt[s > 1e-6 * s[0]].T
    read = torch.linalg.solve(moment, (write.T @ cross).T)
    return Prior(place, rule, ridge, Map(write, read), Metric.of(natural, moment), write)


def leading_directions(prior: Prior, rest: Rest, room: int) -> Float[Tensor, "d room"]:
    """An orthonormal basis of the strongest shifts (up to half of it) and of the strongest differences."""
    shifts = prior.shifts[:, : max(1, room // 2)]
    difference = rest.weights.sqrt()[:, None] * rest.clean_difference(prior.place)
    beyond = difference - (difference @ shifts) @ shifts.T
    *_, vt = torch.linalg.svd(beyond, full_matrices=False)
    basis: Tensor = torch.linalg.qr(torch.cat([shifts, vt[: room - shifts.shape[1]].T], dim=1)).Q
    return basis
