"""Natural states: how a network's recorded states vary, in a covariance that few of them can support.

The **stretch** of an edit is the length of edited states over that of natural ones: Mahalanobis lengths from the mean
of the natural states, medians over pairs and over states.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from plot_ot.edits import EditBatch
from plot_ot.edits.responses import in_forward_order
from plot_ot.subjects import BankRecording, Place
from plot_ot.subjects.protocol import Rewrite

FLOOR = 1e-6
"""The least share of the mean variance that every direction gets: states that never vary somewhere have no inverse."""


def shrunk_covariance(centred: Float[Tensor, "rows d"]) -> Float[Tensor, "d d"]:
    """The covariance of centred states, shrunk towards a multiple of the identity as Ledoit and Wolf (2004) do.

    (1 - α) S + α μ I with μ the mean variance, where α minimises the expected squared error: close to 0 for many
    states of few dimensions, close to 1 for few states of many.
    """
    rows, d = centred.shape
    s = centred.T @ centred / max(1, rows)
    mean = s.diagonal().mean().clamp(min=1e-12)
    eye = torch.eye(d, dtype=s.dtype, device=s.device)
    spread = (s - mean * eye).square().sum()
    # Σ_t |x_t x_tᵀ - S|² / n², without forming any x_t x_tᵀ
    noise = (centred.square().sum(dim=1).square().sum() / max(1, rows) - s.square().sum()) / max(1, rows)
    share = float((noise / spread.clamp(min=1e-300)).clamp(0.0, 1.0))
    share = min(1.0, max(share, FLOOR))
    return (1 - share) * s + share * mean * eye


@dataclass(frozen=True)
class Natural:
    """Natural states around one mean, or around one mean per cell: what is ordinary, and in which units."""

    precision: Float[Tensor, "d d"]
    ordinary: float
    """The median length of a natural state."""

    @classmethod
    def around(cls, centred: Float[Tensor, "rows d"]) -> Natural:
        """From states less their means."""
        precision = torch.linalg.inv(shrunk_covariance(centred))
        return cls(precision, float(_length(centred, precision).median().clamp(min=1e-12)))

    def stretch(self, centred: Float[Tensor, "rows d"]) -> Float[Tensor, " rows"]:
        """The Mahalanobis length of each state, ordinary = 1."""
        return _length(centred, self.precision) / self.ordinary


def edited_states(edits: Sequence[EditBatch], recording: BankRecording) -> dict[str, Float[Tensor, "pairs _"]]:
    """The states that one variant makes of every pair at each of its places, by name, in double precision.

    At a later place the state is that of the run as edited so far, edited there too.
    """
    first, *others = in_forward_order(recording, edits)
    gathered = [(e, recording.source_at(e.place)) for e in (first, *others)]
    start = first.apply(recording.base_at(first.place).unsqueeze(0), gathered[0][1])
    reached = [torch.zeros_like(source) for _, source in gathered]
    reached[0] = recording.base_at(first.place)
    size = recording.subject.responses_per_batch
    for at in range(0, len(recording) if others else 0, size):
        some = slice(at, min(at + size, len(recording)))
        rows = recording.base_rows[some]
        later = {
            e.place.name: _noting(e, source[some], seen[some])
            for (e, source), seen in zip(gathered[1:], reached[1:], strict=True)
        }
        with torch.no_grad():
            recording.subject.resume(recording.store, rows, first.place, start[:, some], later)
    both = zip(gathered, reached, strict=True)
    return {e.place.name: e.apply(seen.unsqueeze(0), source)[0].double() for (e, source), seen in both}


def _noting(edit: EditBatch, source: Float[Tensor, "some d"], seen: Float[Tensor, "some d"]) -> Rewrite:
    def rewrite(a: Float[Tensor, "1 some d"]) -> Float[Tensor, "1 some d"]:
        seen.add_(a[0])  # a network that is resumed in parts shows zeros for the pairs of other parts
        return edit.apply(a, source)

    return rewrite


def fit_states(fit: BankRecording, place: Place) -> Float[Tensor, "inputs d"]:
    """The state of every fit input at a place."""
    rows = torch.cat([fit.base_rows, fit.source_rows]).unique().cpu()
    return fit.store.activations[place.name].cpu()[rows].double()


def _length(a: Float[Tensor, "rows d"], precision: Float[Tensor, "d d"]) -> Float[Tensor, " rows"]:
    return (a @ precision * a).sum(dim=1).clamp(min=0).sqrt()
