"""Is a handle's variable really there? What its reading directions decode, and how natural the edited states look.

An edit may steer the answer through directions that carry nothing in natural states (a dormant path). Two measures
speak against that, neither of which the methods optimise:

- **decoding**: a linear discriminant on Rᵀ a, fitted on the fit inputs, tells the variable's value on held-out ones;
- **stretch**: how far the edited states lie from the mean of the natural ones, in the units of natural variation
  (Mahalanobis length, median over pairs, natural states = 1). Directions in which natural states hardly vary count
  most: an edit that writes along a dormant one stands out at once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from plot_ot.abstract.banks import first_of_each
from plot_ot.edits import EditBatch
from plot_ot.handles import Handle
from plot_ot.subjects import BankRecording

RIDGE = 1e-3
"""Added to covariances, in units of their mean variance."""


@dataclass(frozen=True)
class Naturalness:
    """What speaks for a handle besides its accuracy."""

    decoding: float | None
    """Balanced accuracy on held-out base inputs; None where the fit inputs show only one value."""
    chance: float | None
    stretch: float
    """Mahalanobis length of edited states at the first edited place over that of natural ones, medians."""


def naturalness(handle: Handle, fit: BankRecording, test: BankRecording) -> Naturalness:
    """Both measures, on test pairs' states against everything recorded."""
    decoding, chance = _decoding(handle, fit, test)
    edit = handle.batch()[0]
    natural = fit.store.activations[edit.place.name].double()
    mean = natural.mean(dim=0)
    precision = torch.linalg.inv(_covariance(natural - mean))

    def length(a: Float[Tensor, "rows d"]) -> Float[Tensor, " rows"]:
        squared: Tensor = ((a - mean) @ precision * (a - mean)).sum(dim=1)
        return squared.clamp(min=0).sqrt()

    ordinary = length(natural).median().clamp(min=1e-12)
    return Naturalness(decoding, chance, float(length(_edited(edit, test)).median() / ordinary))


def _covariance(centred: Float[Tensor, "rows d"]) -> Float[Tensor, "d d"]:
    covariance = centred.T @ centred / len(centred)
    ridge = RIDGE * covariance.diagonal().mean().clamp(min=1e-12)
    return covariance + ridge * torch.eye(len(covariance), dtype=covariance.dtype, device=covariance.device)


def _edited(edit: EditBatch, test: BankRecording) -> Float[Tensor, "pairs d"]:
    base, source = test.base_at(edit.place), test.source_at(edit.place)
    moved = EditBatch(edit.place, edit.frame.to(base.device, base.dtype), edit.gains.to(base))
    return moved.apply(base.unsqueeze(0), source)[0].double()


def _decoding(handle: Handle, fit: BankRecording, test: BankRecording) -> tuple[float | None, float | None]:
    (x, fit_values), (held, test_values) = _read(handle, fit), _read(handle, test)
    joint = torch.cat([fit_values, test_values]).flatten(1)
    z, truth = torch.unique(joint, dim=0, return_inverse=True)[1].split([len(x), len(held)])
    seen, coded = torch.unique(z, return_inverse=True)
    if len(seen) < 2:
        return None, None
    means = torch.stack([x[coded == k].mean(dim=0) for k in range(len(seen))])
    white = torch.linalg.solve(_covariance(x - means[coded]), means.T)  # Σ⁻¹ μ
    guess = seen[(held @ white - 0.5 * (means.T * white).sum(dim=0)).argmax(dim=1)]
    hits = [(guess[truth == value] == value).double().mean() for value in truth.unique()]
    return float(torch.stack(hits).mean()), 1 / len(seen)


def _read(handle: Handle, recording: BankRecording) -> tuple[Float[Tensor, "inputs r"], Tensor]:
    """The coordinates the handle reads, and the variable's value [inputs, ...], for the distinct base inputs."""
    rows, code = torch.unique(recording.base_rows.cpu(), return_inverse=True)
    parts = []
    for edit in handle.batch():
        a = recording.store.activations[edit.place.name].double().cpu()[rows]
        used = (edit.gains[0] != 0).cpu()
        parts.append(edit.frame.to(a.device, a.dtype).coordinates(a)[:, used])
    value = recording.bank.causal.run(recording.bank.base[first_of_each(code)])[handle.variable]
    return torch.cat(parts, dim=1), value.reshape(len(rows), -1)
