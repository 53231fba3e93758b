"""Banks that grow: inputs in a random order, each of one split for good, of which more and more are used."""

from __future__ import annotations

import torch
from jaxtyping import Int
from torch import Tensor

from plot_ot.abstract.banks import Splits, distinct_rows
from plot_ot.abstract.causal_model import CausalModel
from plot_ot.abstract.splitting import LEAST_ROWS, Right, answered, drawn_splits, refuse_few_rows

SHARES = {"fit": (0, 2), "calibration": (4,), "test": (1, 3)}
"""Of every five inputs that are answered right, those that each split gets."""


class GrowingBanks:
    """Pairs from more and more of the inputs that a network answers right; an input never changes its split."""

    def __init__(
        self,
        causal: CausalModel,
        inputs: Int[Tensor, "rows inputs"],
        right: Right,
        generator: torch.Generator,
        who: str = "the network",
    ) -> None:
        self.causal, self.right, self.generator, self.who = causal, right, generator, who
        distinct = distinct_rows(inputs)
        self._waiting = distinct[torch.randperm(len(distinct), generator=generator)]
        self._count, self._asked = len(distinct), 0
        self.rows = distinct[:0]
        """The inputs answered right so far."""

    @property
    def exhausted(self) -> bool:
        """Whether every input was asked."""
        return not len(self._waiting)

    @property
    def said(self) -> str:
        """How many inputs were answered right, of those that were asked."""
        told = answered(self.who, len(self.rows), self._asked)
        return told if self.exhausted else f"{told} ({self._count - self._asked} more were not needed)"

    def grow(self, rows: int) -> None:
        """Ask about further inputs until so many are answered right, or there are no more."""
        while len(self.rows) < rows and not self.exhausted:
            share = max(0.2, len(self.rows) / self._asked) if self._asked else 1.0
            count = -(-(rows - len(self.rows)) // share)
            some, self._waiting = self._waiting[: int(count)], self._waiting[int(count) :]
            self._asked += len(some)
            self.rows = torch.cat([self.rows, some[self.right(some)]])
        if len(self.rows) < LEAST_ROWS:
            refuse_few_rows(self.said)

    def draw(self, sizes: tuple[int, int, int]) -> Splits:
        """Pairs for fitting, calibration and tests, of the inputs that are answered right so far."""
        fifth = torch.arange(len(self.rows)) % 5
        pools = [self.rows[torch.isin(fifth, torch.tensor(own))] for own in SHARES.values()]
        return drawn_splits(self.causal, pools, sizes, self.generator)
