"""The loss as a function of a network's outputs: its gradient, and the few directions in which it curves.

A loss of many answers curves along few directions, the label against its rivals, so a Gauss-Newton step through a
network needs as many backward passes as there are such directions.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from plot_ot.signatures import Readout
from plot_ot.subjects import BankRecording

OUTPUTS = 32
"""Of more outputs than this, only those on which the loss depends most are differentiated."""
DIRECTIONS = 8
"""The most backward passes for the curvature of one pair."""
SURE, SHARPEST = 0.01, 64.0
"""A network that is right but not sure has a loss on its own answers. The loss of its edits would then ask for surer
answers than it ever gives; so outputs are scaled until that loss is small, by a factor of at most the second number."""


def sharpness(recording: BankRecording, readout: Readout) -> float:
    """The least factor 1, 2, 4, ... on the outputs at which the network's own answers have a mean loss below `SURE`."""
    outputs, answers = recording.base_outputs.cpu(), recording.bank.base_answer.cpu()
    factor = 1.0
    if not readout.logits:
        return factor
    while factor < SHARPEST and float(readout.loss(factor * outputs.unsqueeze(0), answers).mean()) > SURE:
        factor *= 2
    return factor


def sharpened(readout: Readout, factor: float) -> Readout:
    """The readout whose loss sees outputs times a factor."""
    return replace(readout, loss=lambda outputs, labels: readout.loss(factor * outputs, labels))


def output_curvature(
    outputs: Float[Tensor, "pairs ..."], labels: Tensor, readout: Readout, left_out: float = 0.01
) -> tuple[Float[Tensor, " pairs"], Tensor, list[Tensor]]:
    """Loss, gradient in the outputs, and directions l with Σ l lᵀ the loss' Hessian in the outputs, for every pair.

    A loss of K answers has a Hessian of few directions: the label against its rivals. Those that together hold less
    than a share `left_out` of it, summed over pairs, are left out.
    """
    shape = outputs.shape
    y = outputs.detach().requires_grad_()
    losses = readout.loss(y.unsqueeze(0), labels)[0]
    [slope] = torch.autograd.grad(losses.sum(), y, create_graph=True)
    flat = slope.flatten(1)
    if not flat.requires_grad:  # a loss that is linear in the outputs
        return losses.detach(), slope.detach(), []
    k = min(OUTPUTS, flat.shape[1])
    chosen = flat.detach().abs().topk(k, dim=1).indices
    columns = []
    for n in range(k):
        [column] = torch.autograd.grad(flat.gather(1, chosen[:, n : n + 1]).sum(), y, retain_graph=True)
        columns.append(column.flatten(1).gather(1, chosen))
    hessian = torch.stack(columns, dim=2).double()
    values, vectors = torch.linalg.eigh(0.5 * (hessian + hessian.mT))
    values, vectors = values.clamp(min=0).flip(1), vectors.flip(2)
    held = values.sum(dim=0)
    beyond = held.sum() - held.cumsum(0)
    most = min(DIRECTIONS, int((beyond > left_out * held.sum()).sum()) + 1)
    directions = []
    for n in range(most):
        direction = torch.zeros(len(y), flat.shape[1], dtype=torch.float64, device=y.device)
        direction.scatter_(1, chosen, vectors[:, :, n] * values[:, n : n + 1].sqrt())
        directions.append(direction.to(outputs.dtype).reshape(shape))
    return losses.detach(), slope.detach(), directions
