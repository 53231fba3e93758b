"""Reading that is not linear: the encoder of a sparse autoencoder, and the edit of activations read through it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

AT_ONCE = 1 << 25
"""Numbers that a nonlinear reading of a batch keeps at a time."""


@dataclass(frozen=True)
class Encoder:
    """What makes reading nonlinear: c = σ(Rᵀ a + bias), as the encoder of a sparse autoencoder does.

    σ is a ReLU; with a `threshold` θ a JumpReLU, which is zero up to θ; with `k` only the k largest of all features
    stay. Who takes some of the features that compete for these k places still needs the others, the `rivals`.
    """

    bias: Float[Tensor, " r"]
    features: Int[Tensor, " r"]
    """Which features of the dictionary the frame's directions are."""
    threshold: Float[Tensor, " r"] | None = None
    k: int | None = None
    rivals: Float[Tensor, "d others"] | None = None
    rival_bias: Float[Tensor, " others"] | None = None

    @property
    def competing(self) -> int:
        """How many features have to be read to know one of them."""
        return 0 if self.k is None else len(self.bias) + (0 if self.rival_bias is None else len(self.rival_bias))

    def read(
        self, a: Float[Tensor, "*batch d"], read: Float[Tensor, "d r"], some: Int[Tensor, " some"] | None
    ) -> Float[Tensor, "*batch some"]:
        """σ(Rᵀ a + bias), of all directions or of some."""
        at = slice(None) if some is None else some
        if self.k is None:
            x = a @ read[:, at] + self.bias[at]
            return x.relu() if self.threshold is None else x.relu() * (x > self.threshold[at])
        x = a @ read + self.bias
        everyone = x
        if self.rivals is not None and self.rival_bias is not None:
            everyone = torch.cat([x, a @ self.rivals + self.rival_bias], dim=-1)
        least = everyone.topk(min(self.k, everyone.shape[-1]), dim=-1).values[..., -1:]
        return (x.relu() * (x >= least))[..., at]

    def only(self, read: Float[Tensor, "d r"], some: Int[Tensor, " some"]) -> Encoder:
        """The encoder of some directions; the others stay as rivals where features compete."""
        rivals, rival_bias = self.rivals, self.rival_bias
        if self.k is not None:
            left = torch.ones(len(self.bias), dtype=torch.bool, device=self.bias.device).index_fill(0, some, False)
            rivals = read[:, left] if rivals is None else torch.cat([rivals, read[:, left]], dim=1)
            rival_bias = self.bias[left] if rival_bias is None else torch.cat([rival_bias, self.bias[left]])
        threshold = None if self.threshold is None else self.threshold[some]
        return Encoder(self.bias[some], self.features[some], threshold, self.k, rivals, rival_bias)

    def to(self, device: torch.device, dtype: torch.dtype) -> Encoder:
        """The encoder's tensors moved."""
        moved = {
            name: tensor.to(device, dtype)
            for name in ("bias", "threshold", "rivals", "rival_bias")
            if (tensor := getattr(self, name)) is not None
        }
        return replace(self, features=self.features.to(device), **moved)

    def edited(
        self,
        a: Float[Tensor, "#variants pairs d"],
        source: Float[Tensor, "pairs d"],
        read: Float[Tensor, "d r"],
        write: Float[Tensor, "d r"] | None,
        gains: Float[Tensor, "variants r"],
    ) -> Float[Tensor, "variants pairs d"]:
        """a + W(g * (c(a_source) - c(a))) for every variant and pair; only directions that a variant takes are read.

        Where gradients are wanted a gain of zero has one too, so all directions are read.
        """
        some = None if gains.requires_grad else (gains != 0).any(dim=0).nonzero().squeeze(1)
        most = gains.shape[1] if some is None else int((gains != 0).sum(dim=1).max())
        back = (read if write is None else write).mT
        gains, back = (gains, back) if some is None else (gains[:, some], back[some])
        taken = self.read(source, read, some)
        shared = taken - self.read(a, read, some) if len(a) == 1 else None
        each = len(source) * (most if shared is not None else max(gains.shape[1], self.competing))
        step = max(1, AT_ONCE // max(1, each))
        edited = []
        for at in range(0, len(gains), step):
            own = a if shared is not None else a[at : at + step]
            change = shared if shared is not None else taken - self.read(own, read, some)
            edited.append(own + _written(gains[at : at + step], change, back, most))
        return torch.cat(edited)


def _written(
    gains: Float[Tensor, "variants r"],
    change: Float[Tensor, "#variants pairs r"],
    back: Float[Tensor, "r d"],
    most: int,
) -> Float[Tensor, "variants pairs d"]:
    """W(g * change); where variants take few directions each (at most `most`), only those."""
    if 4 * most >= gains.shape[1]:
        return (gains.unsqueeze(1) * change) @ back
    few = (gains != 0).float().topk(most, dim=1).indices
    own = change.expand(len(gains), -1, -1).gather(2, few.unsqueeze(1).expand(-1, change.shape[1], -1))
    return (gains.gather(1, few).unsqueeze(1) * own) @ back[few]
