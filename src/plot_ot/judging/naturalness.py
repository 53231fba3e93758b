"""Is a handle's variable really there? What its reading directions decode, and how natural the edited states look.

An edit may steer the answer through directions that carry nothing in natural states (a dormant path). Three measures
speak against that:

- **decoding**: a linear discriminant on Rᵀ a, fitted on the fit inputs, tells the variable's value on held-out ones;
- **stretch**: how far the edited states lie from the mean of the natural ones, in the units of natural variation
  (Mahalanobis length, median over pairs, natural states = 1). Directions in which natural states hardly vary count
  most: an edit that writes along a dormant one stands out at once;
- **cell stretch**: the same against natural states that have the source's value of the variable: does the edited state
  look like one of them?

Covariances are shrunk (Ledoit and Wolf), so that few states can support them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from plot_ot.abstract.banks import first_of_each
from plot_ot.handles import Handle
from plot_ot.stages.natural import Natural, edited_states, shrunk_covariance
from plot_ot.subjects import BankRecording, Place

DRAWS = 400
"""Resampled sets of base inputs for an interval."""


@dataclass(frozen=True)
class Naturalness:
    """What speaks for a handle besides its accuracy."""

    decoding: float | None
    """Balanced accuracy on held-out base inputs; None where the fit inputs show only one value."""
    chance: float | None
    stretch: float
    """Mahalanobis length of edited states over that of natural ones, medians; of several places the one where it is
    largest."""
    stretch_low: float
    """The lower end of its 95 % interval, from resampled base inputs."""
    stretch_high: float
    cell_stretch: float | None
    """The same from the mean of the natural states that have the source's value, with the variation inside such cells;
    None where no fit input has the sources' values."""


def naturalness(handle: Handle, fit: BankRecording, test: BankRecording) -> Naturalness:
    """All measures, on test pairs' states against everything recorded."""
    decoding, chance = _decoding(handle, fit, test)
    made, found = edited_states(handle.batch(), test), []
    for place in (e.place for e in handle.edits):
        edited, states = made[place.name], fit.store.activations[place.name].double()
        mean = states.mean(dim=0)
        lengths = Natural.around(states - mean).stretch(edited - mean)
        found.append((float(lengths.median()), place, edited, lengths))
    stretch, place, edited, lengths = max(found, key=lambda f: f[0])
    low, high = _median_interval(lengths.cpu(), test)
    cell = _cell_stretch(handle.variable, place, edited, fit, test)
    return Naturalness(decoding, chance, stretch, low, high, cell)


def _median_interval(lengths: Float[Tensor, " pairs"], test: BankRecording) -> tuple[float, float]:
    """The 95 % interval of the median when base inputs are drawn again, each with all of its pairs."""
    group = test.bank.base_groups().cpu()
    count = int(group.max()) + 1
    drawn = torch.randint(count, (DRAWS, count), generator=torch.Generator().manual_seed(0))
    times = torch.zeros(DRAWS, count).scatter_add_(1, drawn, torch.ones(DRAWS, count))
    order = lengths.argsort()
    cumulated = times[:, group[order]].cumsum(dim=1)
    at = (cumulated >= 0.5 * cumulated[:, -1:]).float().argmax(dim=1)
    medians = lengths[order][at]
    low, high = torch.quantile(medians, torch.tensor([0.025, 0.975], dtype=medians.dtype)).tolist()
    return low, high


def _cell_stretch(
    variable: str, place: Place, edited: Float[Tensor, "pairs d"], fit: BankRecording, test: BankRecording
) -> float | None:
    rows = torch.cat([fit.base_rows, fit.source_rows]).cpu()
    once = first_of_each(torch.unique(rows, return_inverse=True)[1])
    inputs = torch.cat([fit.bank.base, fit.bank.source])
    known = fit.bank.causal.run(inputs[once])[variable]
    wanted = test.bank.causal.run(test.bank.source)[variable]
    joint = torch.cat([known.reshape(len(once), -1), wanted.reshape(len(test), -1)])
    cell, target = torch.unique(joint, dim=0, return_inverse=True)[1].split([len(once), len(test)])
    states = fit.store.activations[place.name].double().cpu()[rows[once]]
    count = torch.bincount(cell, minlength=int(torch.cat([cell, target]).max()) + 1)
    means = torch.zeros(len(count), states.shape[1], dtype=states.dtype).index_add(0, cell, states)
    means = means / count.clamp(min=1)[:, None]
    seen = count[target] > 0
    if not seen.any():
        return None
    natural = Natural.around(states - means[cell])
    return float(natural.stretch(edited.cpu()[seen] - means[target[seen]]).median())


def _decoding(handle: Handle, fit: BankRecording, test: BankRecording) -> tuple[float | None, float | None]:
    (x, fit_values), (held, test_values) = _read(handle, fit), _read(handle, test)
    joint = torch.cat([fit_values, test_values]).flatten(1)
    z, truth = torch.unique(joint, dim=0, return_inverse=True)[1].split([len(x), len(held)])
    seen, coded = torch.unique(z, return_inverse=True)
    if len(seen) < 2:
        return None, None
    means = torch.stack([x[coded == k].mean(dim=0) for k in range(len(seen))])
    white = torch.linalg.solve(shrunk_covariance(x - means[coded]), means.T)  # Σ⁻¹ μ
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
