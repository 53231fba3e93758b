"""Interventions that pyvene has no class for: strengths other than 1, and oblique edits.

They live in a module of their own because pyvene finds an intervention's class by its dotted name when it loads a
directory. All they are is two tensors; what sizes they have, pyvene keeps in the directory's config.json.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from pyvene import TrainableIntervention  # type: ignore[import-untyped]
from torch import Tensor


class _Edit(TrainableIntervention):  # type: ignore[misc] # untyped; "trainable" is how pyvene calls what has tensors to save
    """a <- a + M (a_source - a) on one unit; whatever shape the unit has is one vector, row by row."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{**options, "embed_dim": options["latent_dim"], "keep_last_dim": True})
        self.trainable = False

    def forward(self, base: Tensor, source: Tensor, subspaces: Any = None, **_: Any) -> Tensor:
        a = base.flatten(1).float()
        return (a + self.change(source.flatten(1).float() - a)).reshape(base.shape).to(base.dtype)

    def change(self, difference: Float[Tensor, "rows d"]) -> Float[Tensor, "rows d"]:
        """The change M (a_source - a) that the edit makes."""
        raise NotImplementedError


class GainIntervention(_Edit):
    """M = diag(g): each coordinate takes its own share of the source."""

    gains: Tensor

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.register_buffer("gains", torch.zeros(options["latent_dim"]))

    def change(self, difference: Float[Tensor, "rows d"]) -> Float[Tensor, "rows d"]:
        return self.gains * difference


class FrameIntervention(_Edit):
    """M = W Rᵀ, with the gains multiplied into W."""

    read: Tensor
    write: Tensor

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        shape = options["latent_dim"], options["low_rank_dimension"]
        self.register_buffer("read", torch.zeros(shape))
        self.register_buffer("write", torch.zeros(shape))

    def change(self, difference: Float[Tensor, "rows d"]) -> Float[Tensor, "rows d"]:
        return difference @ self.read @ self.write.T
