"""The banks of every rival: which inputs count for it, and one split of the inputs for all of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from plot_ot.abstract.admission import LEAST_ROWS
from plot_ot.abstract.banks import Bank, Splits
from plot_ot.abstract.holding_out import MIXED, HoldOut
from plot_ot.abstract.splitting import DEALS, SHARES, SPLITS, balanced_bank, shares_of
from plot_ot.comparing.rivals import Field, Rival
from plot_ot.errors import PlotError

Counts = Mapping[str, Bool[Tensor, " rows"]]
"""By rival: which inputs count for it."""


@dataclass(frozen=True)
class RivalBanks:
    """The pairs of one rival, each bank from the inputs of its own split."""

    splits: Splits
    test: Bank
    """All test pairs together, for predictions."""


@dataclass(frozen=True)
class Drawn:
    """One split of the inputs, and the banks that it leaves to every rival."""

    part: Int[Tensor, " rows"]
    """0: fit, 1: calibration, 2: test; `MIXED`: in none of them, for its held-out values are of several."""
    banks: Mapping[str, RivalBanks | str]
    """By rival: its banks, or why it has none."""
    note: str = ""
    """What was held out, in words."""

    @property
    def without(self) -> list[str]:
        """The rivals that have no banks."""
        return [name for name, banks in self.banks.items() if isinstance(banks, str)]


def draw_banks(field: Field, counts: Counts, size: int, seed: int, hold_out: HoldOut | None = None) -> Drawn:
    """Split the inputs once for all rivals: half to fit, a quarter to calibrate, a quarter to test (see `shares_of`).

    With `hold_out` the values of some inputs are split instead. They are dealt out anew while a split lacks the pairs
    that some rival needs; of several such deals, the first with banks for the most rivals is taken.
    """
    generator = torch.Generator().manual_seed(seed)
    rows = field.rows
    if hold_out is None:
        order = torch.randperm(len(rows), generator=generator)
        part = torch.empty_like(order)
        part[order] = torch.arange(len(SPLITS)).repeat_interleave(torch.tensor(shares_of(len(rows))))
        return _with_part(field, counts, size, seed, part)
    hopeless = sum(int(counted.sum()) < LEAST_ROWS for counted in counts.values())
    best: Drawn | None = None
    for _ in range(DEALS):
        deal = hold_out.deal(rows, SHARES, generator)
        part = deal.splits_of(rows)
        found = _with_part(field, counts, size, seed, part, deal.said(int((part == MIXED).sum()), len(rows)))
        if best is None or len(found.without) < len(best.without):
            best = found
        if len(best.without) <= hopeless:
            break
    assert best is not None  # noqa: S101
    if len(best.without) == len(best.banks) > hopeless:
        raise PlotError(
            f"Held out by {hold_out}, the inputs leave some split without the pairs it needs, for every hypothesis "
            f"({DEALS} ways of dealing them out were tried). Of {best.without[0]}: {best.banks[best.without[0]]} Give "
            f"more inputs, with more values of it, or leave `hold_out` out."
        )
    return best


def _with_part(field: Field, counts: Counts, size: int, seed: int, part: Int[Tensor, " rows"], note: str = "") -> Drawn:
    return Drawn(part, {r.name: _banks(r, field, counts[r.name], size, seed, part) for r in field.rivals}, note)


def _banks(
    rival: Rival, field: Field, counted: Bool[Tensor, " rows"], size: int, seed: int, part: Int[Tensor, " rows"]
) -> RivalBanks | str:
    """The rival's banks, or why it cannot be searched for."""
    if int(counted.sum()) < LEAST_ROWS:
        return f"it answers only {int(counted.sum())} of {len(counted)} inputs as the network does"
    generator = torch.Generator().manual_seed(seed)
    try:
        fit, calibration, test = (
            balanced_bank(rival.causal, field.rows[counted & (part == k)], name, size, generator)
            for k, name in enumerate(SPLITS)
        )
        return RivalBanks(Splits.checked(fit, calibration, test.by_variable(), strict=True), test)
    except PlotError as e:
        return f"no pairs can be drawn for it: {e}"
