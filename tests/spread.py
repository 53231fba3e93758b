"""Networks that hold a variable at two places at once, half of it in each: no single place will do."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from nets import orthonormal
from plot_ot.abstract.banks import Bank
from plot_ot.abstract.causal_model import CausalModel
from plot_ot.signatures import as_readout
from plot_ot.stages.problem import Problem
from plot_ot.subjects import BankRecording, ModuleSubject, record

WIDTH = 6
BITS = "abcdefgh"


class Spread(nn.Module):
    """Two branches side by side, each a turned code of a half of p beside what p has nothing to do with.

    `bits`: p is two bits, one in each branch. `shares`: both branches hold half of p's number plus or minus the same
    noise, so that only their sum tells it. The answer is (p + q) mod 4.
    """

    def __init__(self, kind: str, seed: int) -> None:
        super().__init__()
        self.kind, self.left, self.right = kind, nn.Identity(), nn.Identity()
        turns = orthonormal(seed, 2, WIDTH, WIDTH)
        self.turns = nn.ParameterList([nn.Parameter(t) for t in turns])

    def forward(self, rows: Tensor) -> Tensor:
        a, b, c, d, e, f, g, h = rows.float().unbind(dim=1)
        high, low, q = (a - b).abs(), (c - d).abs(), (e - f).abs()
        p = 2 * high + low
        noise = 2 * g + h - 1.5 + 0.5 * (e - f)
        halves = (high, low) if self.kind == "bits" else (p / 2 + noise, p / 2 - noise)
        beside = (q, g, h, a - c, b + d), (g - h, e, f, a + d, b - c)
        states = [torch.stack([half, *others], dim=1) for half, others in zip(halves, beside, strict=True)]
        left, right = (
            place(state @ turn) @ turn.T
            for place, state, turn in zip((self.left, self.right), states, self.turns, strict=True)
        )
        number = 2 * left[:, 0] + right[:, 0] if self.kind == "bits" else left[:, 0] + right[:, 0]
        angle = (number + left[:, 1]) * math.pi / 2
        return 8 * torch.stack([(angle - k * math.pi / 2).cos() for k in range(4)], dim=1)


def spread(
    kind: str, seed: int = 0, names: tuple[str, str] = ("left", "right")
) -> tuple[ModuleSubject, CausalModel, Tensor]:
    """The network with its two places so named, its causal model, and all inputs."""
    causal = CausalModel(
        list(BITS),
        {
            "p": lambda a, b, c, d: 2 * (a != b).long() + (c != d).long(),
            "q": lambda e, f: (e != f).long(),
            "y": lambda p, q: (p + q) % 4,
        },
        "y",
    )
    rows = torch.cartesian_prod(*[torch.arange(2)] * len(BITS))
    subject = ModuleSubject(
        Spread(kind, seed), dict(zip(names, ("left", "right"), strict=True)), rows[:1], encode=lambda r: r
    )
    return subject, causal, rows


def halves(kind: str, seed: int = 0, names: tuple[str, str] = ("left", "right")) -> tuple[Problem, BankRecording]:
    """The problem of finding p and q in such a network, and a bank of test pairs."""
    subject, causal, rows = spread(kind, seed, names)
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))
    parts = []
    for part in rows[order].split([128, 64, 64]):
        g = torch.Generator().manual_seed(seed + len(parts))
        base, source = (part[torch.randint(len(part), (300,), generator=g)] for _ in range(2))
        parts.append(Bank.from_pairs(causal, base, source, variables=("p", "q")))
    fit, calibration, test = record(subject, *parts)
    return Problem(subject, fit, calibration, ("p", "q"), as_readout("softmax")), test
