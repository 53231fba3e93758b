"""Networks with a regression head: real variables along directions of a state, read and combined to one real number.

Inputs x0..x5 are 0..3. The hypothesis is p = (x0 + x1) / 2, q = (x2 - x3) / 2 and y = 2 p + q, or y = p q.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from plot_ot.abstract.causal_model import CausalModel
from plot_ot.subjects import ModuleSubject, Subject

INPUTS = [f"x{k}" for k in range(6)]
ROWS = torch.cartesian_prod(*[torch.arange(4)] * len(INPUTS))
LEAK = 0.02
"""The state also holds so much of random nonlinear functions of the inputs (linear ones would give away their sums)."""
TOLERANCE = 0.15
"""Answers are multiples of a half (of a quarter, of products)."""


def hypothesis(product: bool = False) -> CausalModel:
    """The linear model, or the one that multiplies."""
    answer = (lambda p, q: p * q) if product else (lambda p, q: 2 * p + q)
    parts = {"p": lambda x0, x1: (x0 + x1) / 2, "q": lambda x2, x3: (x2 - x3) / 2, "y": answer}
    return CausalModel(INPUTS, parts, "y")


def rows(seed: int, count: int = 1200) -> Tensor:
    """Some of the inputs."""
    return ROWS[torch.randperm(len(ROWS), generator=torch.Generator().manual_seed(seed))[:count]]


class Regressor(nn.Module):
    """What the state holds are linear functions of the inputs, in random directions; the head reads two of them."""

    def __init__(self, held: list[list[float]], product: bool, seed: int, width: int = 14) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        bystanders = [[0, 0, 0, 0, 1, 0], [0, 0, 0, 0, 0, 1], [0, 0, 0, 0, 1, 1]]
        sums = torch.tensor([*held, *bystanders], dtype=torch.float32)
        mixing = torch.linalg.qr(torch.randn(width, width, generator=generator))[0][:, : len(sums)]
        slant = torch.eye(len(sums)) + 0.3 * torch.randn(len(sums), len(sums), generator=generator) / len(sums) ** 0.5
        mixing = mixing @ slant
        self.held, self.state = nn.Linear(len(INPUTS), width, bias=False), nn.Identity()
        self.leak = nn.Parameter(3 * torch.randn(width, len(INPUTS), generator=generator), requires_grad=False)
        self.readers = nn.Linear(width, 2, bias=False)
        self.product = product
        with torch.no_grad():
            self.held.weight.copy_(mixing @ sums)
            self.readers.weight.copy_(torch.linalg.pinv(mixing)[:2])

    def forward(self, x: Tensor) -> Tensor:
        """One number for every row."""
        p, q = self.readers(self.state(self.held(x) + LEAK * torch.sin(x @ self.leak.T))).unbind(dim=1)
        return p * q if self.product else 2 * p + q


def planted(seed: int) -> tuple[Subject, CausalModel]:
    """A network that holds p and q."""
    product = seed % 2 == 1
    held = [[0.5, 0.5, 0, 0, 0, 0], [0, 0, 0.5, -0.5, 0, 0]]
    network = Regressor(held, product, seed)
    return ModuleSubject(network, ["state"], ROWS[:1]), hypothesis(product)


def absent(seed: int) -> tuple[Subject, CausalModel]:
    """A network with the same answers that holds other sums: x0 / 2 + x2 / 4, and x1 - x3 / 2."""
    held = [[0.5, 0, 0.25, 0, 0, 0], [0, 1, 0, -0.5, 0, 0]]
    network = Regressor(held, False, seed)
    return ModuleSubject(network, ["state"], ROWS[:1]), hypothesis()
