"""Banks that grow: inputs in a random order, each of one split for good, of which more and more are used."""

from __future__ import annotations

import torch
from jaxtyping import Int
from torch import Tensor

from plot_ot.abstract.admission import LEAST_ROWS, Admission
from plot_ot.abstract.banks import Splits, distinct_rows
from plot_ot.abstract.causal_model import CausalModel
from plot_ot.abstract.holding_out import MIXED, Deal, HoldOut
from plot_ot.abstract.splitting import SPLITS, drawn_splits

SHARES = {"fit": (0, 2), "calibration": (4,), "test": (1, 3)}
"""Of every five inputs that count, those that each split gets."""


class GrowingBanks:
    """Pairs from more and more of the inputs that count; an input, or a held-out value, keeps its split."""

    def __init__(
        self,
        causal: CausalModel,
        inputs: Int[Tensor, "rows inputs"],
        admission: Admission,
        generator: torch.Generator,
        hold_out: HoldOut | None = None,
    ) -> None:
        self.causal, self.admission, self.generator = causal, admission, generator
        distinct = distinct_rows(inputs)
        self._waiting = distinct[torch.randperm(len(distinct), generator=generator)]
        self._count, self._asked, self._right = len(distinct), 0, 0
        self.rows = distinct[:0]
        """The inputs that count so far."""
        self._deal: Deal | None = None
        self._held: tuple[str, ...] = ()
        if hold_out is not None:
            self._deal = hold_out.deal(distinct, [len(SHARES[name]) for name in SPLITS], generator)
            mixed = self._deal.splits_of(self._waiting) == MIXED
            self._waiting, self._count = self._waiting[~mixed], int((~mixed).sum())
            self._held = (self._deal.said(int(mixed.sum()), len(distinct)),)

    @property
    def exhausted(self) -> bool:
        """Whether every input was asked."""
        return not len(self._waiting)

    @property
    def notes(self) -> tuple[str, ...]:
        """How many inputs were answered right, of those that were asked, and which values are held out."""
        told = self.admission.said(f"{self._right} of {self._asked} distinct inputs")
        more = "" if self.exhausted else f" ({self._count - self._asked} more were not needed)"
        return f"{told}{more}", *self._held

    @property
    def pass_rate(self) -> tuple[int, int]:
        """How many inputs were answered right, and of how many."""
        return self._right, self._asked

    def grow(self, rows: int) -> None:
        """Ask about further inputs until so many count, or there are no more."""
        while len(self.rows) < rows and not self.exhausted:
            share = max(0.2, len(self.rows) / self._asked) if self._asked else 1.0
            count = -(-(rows - len(self.rows)) // share)
            some, self._waiting = self._waiting[: int(count)], self._waiting[int(count) :]
            counts, right = self.admission.admitted(some)
            self._asked, self._right = self._asked + len(some), self._right + int(right.sum())
            self.rows = torch.cat([self.rows, some[counts]])
        if len(self.rows) < LEAST_ROWS:
            self.admission.refuse_few(self.notes[0], self._asked - len(self.rows))

    def draw(self, sizes: tuple[int, int, int]) -> Splits:
        """Pairs for fitting, calibration and tests, of the inputs that count so far."""
        if self._deal is not None:
            part = self._deal.splits_of(self.rows)
            pools = [self.rows[part == k] for k in range(len(SPLITS))]
        else:
            fifth = torch.arange(len(self.rows)) % 5
            pools = [self.rows[torch.isin(fifth, torch.tensor(own))] for own in SHARES.values()]
        return drawn_splits(self.causal, pools, sizes, self.generator)
