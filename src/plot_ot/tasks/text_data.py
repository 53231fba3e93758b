"""What tasks on language models share: banks over cells of two variables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from plot_ot.abstract.banks import Bank, Splits
from plot_ot.errors import PlotError
from plot_ot.tasks.filling import Quota, share_out

Cell = tuple[bool, bool]
"""Whether a pair changes each of the two variables."""
CELLS: tuple[Cell, ...] = ((True, True), (True, False), (False, True), (False, False))


@dataclass(frozen=True)
class Sizes:
    """How many pairs: `fit` in all; else that many sensitive and that many invariant ones for every variable."""

    fit: int = 200
    calibration: int = 100
    test: int = 100
    transfer: int = 100

    def __post_init__(self) -> None:
        for name, size in vars(self).items():
            if size < len(CELLS):
                raise PlotError(f"The {name} bank needs at least {len(CELLS)} pairs; found {size}.")


@dataclass(frozen=True)
class TextBanks:
    """All banks of a seed, and how many candidate pairs the filter let through."""

    splits: Splits
    transfer: Mapping[tuple[str, str], Bank]
    """Like `splits.test`, but with words and templates that the other banks do not have."""
    passed: Mapping[str, Mapping[str, tuple[int, int]]]
    """How many pairs passed the filter and how many were tried, by split and family."""

    filter_seconds: Mapping[str, float]
    """What the filter took, by split."""

    @property
    def pass_rates(self) -> dict[str, dict[str, float]]:
        """The share of the tried pairs with both prompts answered correctly, by split and family."""
        return {s: {f: p / t for f, (p, t) in families.items() if t} for s, families in self.passed.items()}


def cell_quotas(families: Mapping[str, Sequence[Cell]], variables: tuple[str, str], size: int) -> list[Quota]:
    """n sensitive and n invariant pairs for both variables: n/2 in every cell (an odd one goes to both or neither),
    and within a cell equal shares of the families whose pairs can fall into it."""
    quotas = []
    for cell in CELLS:
        able = [f for f, cells in families.items() if cell in cells]
        if not able:
            does = " and ".join(f"{'changes' if c else 'keeps'} {v}" for c, v in zip(cell, variables, strict=True))
            raise PlotError(f"No pair of the families {', '.join(families)} {does}. Add a family that does.")
        quotas += share_out((size + (cell[0] == cell[1])) // 2, able, dict(zip(variables, cell, strict=True)))
    return quotas
