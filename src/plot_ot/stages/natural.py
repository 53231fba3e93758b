"""Natural states: how a network's recorded states vary, in a covariance that few of them can support.

The **stretch** of an edit is the length of edited states over that of natural ones: Mahalanobis lengths from the mean
of the natural states, medians over pairs and over states.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from plot_ot.edits import EditBatch
from plot_ot.subjects import BankRecording

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


def edited_states(edit: EditBatch, recording: BankRecording) -> Float[Tensor, "variants pairs d"]:
    """The states that an edit makes of every pair, in double precision."""
    base, source = recording.base_at(edit.place), recording.source_at(edit.place)
    moved = EditBatch(edit.place, edit.frame.to(base.device, base.dtype), edit.gains.to(base))
    return moved.apply(base.unsqueeze(0), source).double()


def _length(a: Float[Tensor, "rows d"], precision: Float[Tensor, "d d"]) -> Float[Tensor, " rows"]:
    return (a @ precision * a).sum(dim=1).clamp(min=0).sqrt()
