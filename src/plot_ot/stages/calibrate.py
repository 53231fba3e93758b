"""Calibration: choose the top-K support and the strength λ of a handle on the calibration bank (Appendix A.1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from plot_ot.edits import EditBatch, stream
from plot_ot.errors import PlotError, unknown
from plot_ot.handles import Handle, handle_from_edits
from plot_ot.signatures import Readout
from plot_ot.sites import SiteFamily
from plot_ot.subjects import BankRecording
from plot_ot.transport import Coupling

SCORES = ("paper", "balanced")


@dataclass(frozen=True)
class Search:
    """The (K, λ) grid, and the name of the score that picks from it."""

    sizes: tuple[int, ...]
    strengths: tuple[float, ...]
    score: str = "balanced"
    """`paper`: accuracy over the bank as drawn; `balanced`: half sensitivity, half invariance."""

    def __post_init__(self) -> None:
        if self.score not in SCORES:
            unknown("calibration score", self.score, SCORES)
        if not self.sizes or min(self.sizes) < 1 or not self.strengths:
            raise PlotError(f"The search needs K >= 1 and some λ; found K {self.sizes}, λ {self.strengths}.")


@dataclass(frozen=True)
class Candidate:
    """A coupling over a site family, one of those calibration chooses between."""

    family: SiteFamily
    coupling: Coupling
    label: str = ""


@dataclass(frozen=True)
class Calibration:
    """The chosen handle and the whole surface it was chosen from."""

    handle: Handle
    score: float
    sizes: tuple[int, ...]
    strengths: tuple[float, ...]
    surface: Float[Tensor, "candidates sizes strengths"]
    candidate: int


def calibrate(
    recording: BankRecording, candidates: Sequence[Candidate], variable: str, search: Search, look: Readout
) -> Calibration:
    """The best (candidate, K, λ) for one variable. Ties: smallest K, then smallest λ, then the first candidate."""
    recording.bank.require(variable)
    weights = pair_weights(recording, variable, search.score)
    strengths = torch.tensor(search.strengths, dtype=torch.float64)
    surfaces = []
    for c in candidates:
        sizes = [min(k, len(c.family)) for k in search.sizes]
        tops = torch.stack([top_k_weights(c.coupling, variable, k) for k in sizes])
        variants = (tops[:, None, :] * strengths[None, :, None]).flatten(0, 1)
        scores = scored(recording, c.family.edits(variants), variable, weights, look)
        surfaces.append(scores.unflatten(0, (len(sizes), len(strengths))))
    surface = torch.stack(surfaces)
    chosen = min(
        ((-round(float(surface[c, k, s]), 9), search.sizes[k], search.strengths[s], c) for c, k, s in _best(surface)),
    )
    size, strength, c = chosen[1:]
    best = candidates[c]
    kept = min(size, len(best.family))
    one = (top_k_weights(best.coupling, variable, kept) * strength).unsqueeze(0)
    described = {
        "K": kept,
        "strength": strength,
        "epsilon": best.coupling.epsilon,
        "beta": best.coupling.beta,
        "transport": best.coupling.kind,
        "candidate": best.label,
        "sites": [best.family.sites[j].name for j in best.coupling.ranking(variable)[:kept]],
        "tied_at_K": best.coupling.tied_at(variable, kept),
        "calibration_score": -chosen[0],
    }
    handle = handle_from_edits(variable, best.family.edits(one), 0, recording.subject, described)
    return Calibration(handle, -chosen[0], search.sizes, search.strengths, surface, c)


def _best(surface: Tensor) -> list[list[int]]:
    return (surface >= surface.max() - 1e-9).nonzero().tolist()


def top_k_weights(coupling: Coupling, variable: str, k: int) -> Float[Tensor, " sites"]:
    """Π̃_{j|i}: the k highest-mass sites, renormalised to sum to one."""
    row = torch.from_numpy(coupling.row(variable))
    kept = torch.zeros_like(row)
    top = coupling.ranking(variable)[:k]
    kept[top] = row[top].clamp(min=1e-300)
    return kept / kept.sum()


def pair_weights(recording: BankRecording, variable: str, score: str) -> Float[Tensor, " pairs"]:
    """Weights whose product with correctness is the score."""
    changed = recording.bank.changed[variable]
    if score == "paper":
        return torch.full((len(changed),), 1 / len(changed), dtype=torch.float64)
    sensitive, invariant = changed.double(), (~changed).double()
    if not sensitive.sum():
        raise PlotError(f"The calibration bank has no pair that changes '{variable}': a handle cannot be chosen on it.")
    if not invariant.sum():
        return sensitive / sensitive.sum()
    return 0.5 * sensitive / sensitive.sum() + 0.5 * invariant / invariant.sum()


def scored(
    recording: BankRecording, edits: Sequence[EditBatch], variable: str, weights: Float[Tensor, " pairs"], look: Readout
) -> Float[Tensor, " variants"]:
    """Score of every variant, streamed."""
    labels = recording.bank.labels[variable].to(recording.subject.device)
    weights = weights.to(labels.device)
    scores = torch.zeros(len(edits[0].gains), dtype=torch.float64, device=labels.device)
    for variants, pairs, outputs in stream(recording, edits):
        right = look.correct(outputs, labels[pairs])
        scores[variants] += right.double() @ weights[pairs]
    return scores.cpu()


def correct(
    recording: BankRecording, handle: Handle, look: Readout, variable: str | None = None
) -> Bool[Tensor, " pairs"]:
    """Whether the handle gives each pair's counterfactual label (of its own variable unless another is named)."""
    labels = recording.bank.labels[variable or handle.variable].to(recording.subject.device)
    right = torch.zeros(len(recording), dtype=torch.bool, device=labels.device)
    for _, pairs, outputs in stream(recording, handle.batch()):
        right[pairs] = look.correct(outputs, labels[pairs])[0]
    return right.cpu()
