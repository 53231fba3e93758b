"""Readouts: how outputs are looked at, by the network and by the causal model (φ of Section 3.1)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from plot_ot.errors import PlotError, unknown


@dataclass(frozen=True)
class Readout:
    """How outputs are looked at: φ on both sides, and the answer an output gives.

    `neural` maps network outputs [..., c] to features [..., p]; `abstract` maps labels [rows, ...] to features
    [rows, p] in the same space (told c); `decide` maps outputs to labels; `loss` is what DAS minimises, per response.
    `linear` says that `neural` is linear: then features can be linearised themselves.
    """

    name: str
    neural: Callable[[Tensor], Tensor]
    abstract: Callable[[Tensor, int], Tensor]
    decide: Callable[[Tensor], Tensor]
    loss: Callable[[Tensor, Tensor], Tensor]
    linear: bool = False

    def correct(self, outputs: Float[Tensor, "variants pairs c"], labels: Tensor) -> Tensor:
        """Whether each response gives its pair's label: [variants, pairs] booleans."""
        answers = self.decide(outputs)
        if answers.ndim == 3 and labels.ndim == 1:  # one bit per pair
            labels = labels.unsqueeze(1)
        equal = answers == labels
        return equal if equal.ndim == 2 else equal.flatten(2).all(dim=2)


def _one_hot(labels: Tensor, classes: int) -> Tensor:
    if bool((labels.long() < 0).any() | (labels.long() >= classes).any()):
        raise PlotError(
            f"Labels must lie in 0..{classes - 1}, the network's outputs; found {labels.unique().tolist()}."
        )
    return F.one_hot(labels.long(), classes).float()


def _bits(labels: Tensor, width: int) -> Tensor:
    labels = labels.unsqueeze(1) if labels.ndim == 1 else labels
    if labels.flatten(1).shape[1] != width:
        raise PlotError(f"Labels have {labels.flatten(1).shape[1]} bits, the network {width} outputs.")
    return labels.flatten(1).float()


def _argmax(outputs: Tensor) -> Tensor:
    # torch.argmax over a short last dimension is many times slower than the comparison itself
    return outputs[..., 1] > outputs[..., 0] if outputs.shape[-1] == 2 else outputs.argmax(dim=-1)


def _cross_entropy(outputs: Tensor, labels: Tensor) -> Tensor:
    index = labels.long().expand(outputs.shape[:-1]).unsqueeze(-1)
    return outputs.logsumexp(dim=-1) - outputs.gather(-1, index).squeeze(-1)


def _bit_entropy(outputs: Tensor, labels: Tensor) -> Tensor:
    labels = labels.unsqueeze(1) if labels.ndim == 1 else labels  # one bit per pair
    target = labels.to(outputs.dtype).expand_as(outputs)
    return F.binary_cross_entropy_with_logits(outputs, target, reduction="none").mean(dim=-1)


READOUTS: dict[str, Readout] = {
    "softmax": Readout("softmax", lambda y: y.softmax(dim=-1), _one_hot, _argmax, _cross_entropy),
    "logits": Readout("logits", lambda y: y, _one_hot, _argmax, _cross_entropy, linear=True),
    "sigmoid": Readout("sigmoid", torch.sigmoid, _bits, lambda y: y >= 0, _bit_entropy),
}


def as_readout(name: str | Readout) -> Readout:
    """A readout by name (`softmax`, `logits`, `sigmoid`), or one of your own."""
    if isinstance(name, Readout):
        return name
    if name not in READOUTS:
        unknown("readout", name, READOUTS)
    return READOUTS[name]
