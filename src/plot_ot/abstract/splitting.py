"""Banks from a user's own inputs or pairs: those that the network answers right, split without overlap, labelled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from plot_ot.abstract.banks import Bank, Splits, distinct_rows, draw_pairs, row_codes
from plot_ot.abstract.causal_model import CausalModel
from plot_ot.errors import PlotError, unknown

Right = Callable[[Int[Tensor, "rows inputs"]], Bool[Tensor, " rows"]]
"""Which input rows the network answers as the causal model does."""
SPLITS = ("fit", "calibration", "test")
LEAST_ROWS, LEAST_PAIRS = 60, 20


@dataclass(frozen=True)
class Pairs:
    """Base/source pairs of a user's own, with what is known of them."""

    base: Int[Tensor, "pairs inputs"]
    source: Int[Tensor, "pairs inputs"]
    family: Sequence[str] | None = None
    split: Sequence[str] | None = None

    def __len__(self) -> int:
        return len(self.base)


def from_inputs(
    causal: CausalModel,
    inputs: Int[Tensor, "rows inputs"],
    right: Right,
    size: int,
    generator: torch.Generator,
    who: str = "the network",
) -> tuple[Splits, str]:
    """Pairs drawn from the rows that are answered right: half of them fit, a quarter calibrates, a quarter tests.

    Also a sentence on how many rows were right. Banks that the rows cannot fill are drawn half as large, and so on.
    """
    distinct = distinct_rows(inputs)
    passed = right(distinct)
    rows = distinct[passed]
    said = answered(who, len(rows), len(distinct))
    if len(rows) < LEAST_ROWS:
        refuse_few_rows(said)
    rows = rows[torch.randperm(len(rows), generator=generator)]
    half, rest = len(rows) // 2, len(rows) - len(rows) // 2
    pools = rows.split([half, rest // 2, rest - rest // 2])
    return drawn_splits(causal, pools, (size, size, size), generator), said


def drawn_splits(
    causal: CausalModel, pools: Sequence[Tensor], sizes: Sequence[int], generator: torch.Generator
) -> Splits:
    """Pairs for fitting, calibration and tests, each from the rows of its own pool."""
    drawn = (balanced_bank(causal, *of, generator) for of in zip(pools, SPLITS, sizes, strict=True))
    fit, calibration, test = drawn
    return Splits.checked(fit, calibration, test.by_variable(), strict=True)


def answered(who: str, right: int, of: int) -> str:
    """How many inputs are answered right, in words."""
    return f"{who} answers {right} of {of} distinct inputs as the causal model does"


def refuse_few_rows(said: str) -> NoReturn:
    """Refuse a network that is right on too few inputs."""
    raise PlotError(
        f"{said.capitalize()}; at least {LEAST_ROWS} are needed. Train it further, give more inputs, or check that "
        f"the hypothesis, the prompts and the answers are what you mean."
    )


def balanced_bank(
    causal: CausalModel, pool: Int[Tensor, "rows inputs"], name: str, size: int, generator: torch.Generator
) -> Bank:
    """Equal shares of every set of changed variables, so that rare kinds of pair are tested too.

    A bank that the pool cannot fill is drawn half as large, and so on.
    """
    while True:
        try:
            return draw_pairs(causal, pool, "balanced", size, generator, name=name)
        except PlotError:
            if size // 2 < LEAST_PAIRS:
                raise
            size //= 2


def from_pairs(
    causal: CausalModel, pairs: Pairs, right: Right, generator: torch.Generator, who: str = "the network"
) -> tuple[Splits, str]:
    """The pairs whose two inputs are both answered right, split by base input (or as their `split` says)."""
    causal.check_pairs(pairs.base, pairs.source)
    both = distinct_rows(torch.cat([pairs.base, pairs.source]))
    passed = right(both)
    codes = row_codes(torch.cat([both, pairs.base, pairs.source]))
    ok = torch.zeros(int(codes.max()) + 1, dtype=torch.bool)
    ok[codes[: len(both)]] = passed
    base_ok, source_ok = ok[codes[len(both) :]].split(len(pairs))
    kept = (base_ok & source_ok).nonzero().squeeze(1)
    said = f"{who} answers both inputs of {len(kept)} of {len(pairs)} pairs as the causal model does"
    if len(kept) < 3 * LEAST_PAIRS:
        raise PlotError(
            f"{said.capitalize()}; at least {3 * LEAST_PAIRS} are needed ({int(passed.sum())} of {len(both)} distinct "
            f"inputs are answered right). Give more pairs, or check the prompts and the answers."
        )
    part = _named_parts(pairs.split, kept) if pairs.split else _parts_by_base(pairs.base[kept], generator)
    names = list(dict.fromkeys(pairs.family)) if pairs.family else None
    family = torch.tensor([names.index(pairs.family[k]) for k in kept.tolist()]) if names and pairs.family else None
    banks = []
    for number, name in enumerate(SPLITS):
        here = (part == number).nonzero().squeeze(1)
        rows = kept[here]
        base, source = pairs.base[rows], pairs.source[rows]
        of = None if family is None else family[here]
        banks.append(Bank.from_pairs(causal, base, source, name=name, family=of, families=names))
    fit, calibration, held_out = banks
    return Splits.checked(fit, calibration, held_out.by_variable()), said


def _parts_by_base(base: Int[Tensor, "pairs inputs"], generator: torch.Generator) -> Int[Tensor, " pairs"]:
    """The part (0, 1 or 2) of every pair; no base input stands in two parts."""
    codes = row_codes(base)
    count = int(codes.max()) + 1
    if count < 3:
        raise PlotError(f"The pairs have {count} distinct base inputs; at least 3 are needed to split them.")
    rank = torch.randperm(count, generator=generator)[codes]
    return torch.bucketize(rank, torch.tensor([count // 2, count // 2 + (count - count // 2) // 2]), right=True)


def _named_parts(split: Sequence[str], kept: Int[Tensor, " kept"]) -> Int[Tensor, " kept"]:
    for name in dict.fromkeys(split):
        if name not in SPLITS:
            unknown("split", name, SPLITS)
    part = torch.tensor([SPLITS.index(split[k]) for k in kept.tolist()])
    for number, name in enumerate(SPLITS):
        if not bool((part == number).any()):
            raise PlotError(f"No pair that the network answers is in the {name} split.")
    return part
