"""Banks from a user's own inputs or pairs: those that count, split without overlap, labelled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from plot_ot.abstract.admission import LEAST_PAIRS, LEAST_ROWS, Admission
from plot_ot.abstract.banks import Bank, Splits, distinct_rows, draw_pairs, row_codes
from plot_ot.abstract.causal_model import CausalModel
from plot_ot.abstract.holding_out import MIXED, HoldOut
from plot_ot.errors import PlotError, unknown

SPLITS = ("fit", "calibration", "test")
FEW_PAIRS = 200
"""A bank is not drawn smaller than this because some kind of pair is rare."""
SHARES = (2, 1, 1)
"""A half fits, a quarter calibrates, a quarter tests."""
LEAST_TESTED = 32
"""Base inputs that tests should have: if all of them go right, the rule of three says "at least 0.9"."""
DEALS = 20
"""How often entities are dealt out anew, where a deal leaves a split without pairs that it needs."""


@dataclass(frozen=True)
class Pairs:
    """Base/source pairs of a user's own, with what is known of them."""

    base: Int[Tensor, "pairs inputs"]
    source: Int[Tensor, "pairs inputs"]
    family: Sequence[str] | None = None
    split: Sequence[str] | None = None

    def __len__(self) -> int:
        return len(self.base)


@dataclass(frozen=True)
class Made:
    """Banks, and what was done to make them."""

    splits: Splits
    notes: tuple[str, ...]
    """In words: how many inputs are answered right, which values are held out."""
    right: int = 0
    asked: int = 0
    """How many inputs were asked about, of which so many are `right`."""


def from_inputs(
    causal: CausalModel,
    inputs: Int[Tensor, "rows inputs"],
    admission: Admission,
    size: int,
    generator: torch.Generator,
    hold_out: HoldOut | None = None,
) -> Made:
    """Pairs drawn from the rows that count: half of them fit, a quarter calibrates, a quarter tests (see `shares_of`).

    Banks that the rows cannot fill are drawn half as large, and so on. With `hold_out` the values of an input are split
    instead of the rows.
    """
    distinct = distinct_rows(inputs)
    counts, right = admission.admitted(distinct)
    rows = distinct[counts]
    said = admission.said(f"{int(right.sum())} of {len(distinct)} distinct inputs")
    if len(rows) < LEAST_ROWS:
        admission.refuse_few(said, len(distinct) - len(rows))
    if hold_out is not None:
        splits, held = dealt(causal, rows, hold_out, (size, size, size), generator)
        return Made(splits, (said, held), int(right.sum()), len(distinct))
    rows = rows[torch.randperm(len(rows), generator=generator)]
    pools = rows.split(shares_of(len(rows)))
    splits = drawn_splits(causal, pools, (size, size, size), generator)
    return Made(splits, (said, *rare_kinds(splits.calibration)), int(right.sum()), len(distinct))


def shares_of(rows: int) -> list[int]:
    """How many rows fit, calibrate and test: a half, a quarter and a quarter, but of few rows more of them test.

    With fewer base inputs than `LEAST_TESTED` in its tests no verdict can be passed, however good a handle is. So from
    twice as many rows on that many are for tests, and of the others two thirds fit.
    """
    if 2 * LEAST_TESTED <= rows < 4 * LEAST_TESTED:
        calibrate = (rows - LEAST_TESTED) // 3
        return [rows - LEAST_TESTED - calibrate, calibrate, LEAST_TESTED]
    half = rows - rows // 2
    return [rows // 2, half // 2, half - half // 2]


def dealt(
    causal: CausalModel,
    rows: Int[Tensor, "rows inputs"],
    hold_out: HoldOut,
    sizes: Sequence[int],
    generator: torch.Generator,
) -> tuple[Splits, str]:
    """Pairs from pools that share no entity; dealt out anew while a pool lacks pairs of some kind."""
    reason = ""
    for _ in range(DEALS):
        deal = hold_out.deal(rows, SHARES, generator)
        part = deal.splits_of(rows)
        try:
            splits = drawn_splits(causal, [rows[part == k] for k in range(len(SPLITS))], sizes, generator)
        except PlotError as e:
            reason = str(e)
            continue
        return splits, deal.said(int((part == MIXED).sum()), len(rows))
    raise PlotError(
        f"Held out by {hold_out}, the inputs leave some split without the pairs it needs ({DEALS} ways of dealing them "
        f"out were tried). The last: {reason} Give more inputs, with more values of it, or leave `hold_out` out."
    )


def rare_kinds(bank: Bank) -> list[str]:
    """Kinds of pair that the bank has much fewer of than of others, in words, and what to do about it."""
    count = torch.bincount(bank.family, minlength=len(bank.families)).tolist()
    rare = [f"{n} that change {name}" for name, n in zip(bank.families, count, strict=True) if 2 * n < max(count)]
    if not rare:
        return []
    told = ", ".join(rare).replace("change none", "change nothing")
    return [
        f"some kinds of pair are rare: of {len(bank)} pairs to calibrate {told}; more inputs, or `hold_out` by an "
        f"input with many values, which keeps inputs that share its value together, give more of them"
    ]


def drawn_splits(
    causal: CausalModel, pools: Sequence[Tensor], sizes: Sequence[int], generator: torch.Generator
) -> Splits:
    """Pairs for fitting, calibration and tests, each from the rows of its own pool."""
    drawn = (balanced_bank(causal, *of, generator) for of in zip(pools, SPLITS, sizes, strict=True))
    fit, calibration, test = drawn
    return Splits.checked(fit, calibration, test.by_variable(), strict=True)


def balanced_bank(
    causal: CausalModel, pool: Int[Tensor, "rows inputs"], name: str, size: int, generator: torch.Generator
) -> Bank:
    """Equal shares of every set of changed variables, so that rare kinds of pair are tested too.

    A bank that the pool cannot fill is drawn half as large, and so on; below `FEW_PAIRS` pairs, rare kinds stay rare
    instead. Where a variable has many values, few pairs keep it, and the others would be given up for them.
    """
    while True:
        few = size // 2 < FEW_PAIRS
        try:
            return draw_pairs(causal, pool, "balanced", size, generator, name=name, short=few)
        except PlotError:
            if few:
                raise
            size //= 2


def from_pairs(
    causal: CausalModel,
    pairs: Pairs,
    admission: Admission,
    generator: torch.Generator,
    hold_out: HoldOut | None = None,
) -> Made:
    """The pairs whose two inputs both count, split by base input (or by entity, or as their `split` says)."""
    causal.check_pairs(pairs.base, pairs.source)
    both = distinct_rows(torch.cat([pairs.base, pairs.source]))
    counts, right = admission.admitted(both)
    codes = row_codes(torch.cat([both, pairs.base, pairs.source]))

    def of_pairs(passed: Tensor) -> Tensor:
        ok = torch.zeros(int(codes.max()) + 1, dtype=torch.bool)
        ok[codes[: len(both)]] = passed
        base_ok, source_ok = ok[codes[len(both) :]].split(len(pairs))
        both_ok: Tensor = base_ok & source_ok
        return both_ok

    kept = of_pairs(counts).nonzero().squeeze(1)
    said = admission.said(f"both inputs of {int(of_pairs(right).sum())} of {len(pairs)} pairs")
    if len(kept) < 3 * LEAST_PAIRS:
        told = f"{said} ({int(right.sum())} of {len(both)} distinct inputs)"
        admission.refuse_few(told, len(pairs) - len(kept), f"{3 * LEAST_PAIRS} pairs")
    notes = [said]
    if pairs.split:
        part = _named_parts(pairs.split, kept)
        if hold_out is not None:
            sides = torch.cat([pairs.base[kept], pairs.source[kept]])
            notes.append(hold_out.refuse_shared({n: sides[part.repeat(2) == k] for k, n in enumerate(SPLITS)}))
    elif hold_out is not None:
        part, held = _parts_by_entity(pairs, kept, hold_out, generator)
        notes.append(held)
    else:
        part = _parts_by_base(pairs.base[kept], generator)
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
    splits = Splits.checked(fit, calibration, held_out.by_variable())
    return Made(splits, tuple(notes), int(right.sum()), len(both))


def _parts_by_entity(
    pairs: Pairs, kept: Int[Tensor, " kept"], hold_out: HoldOut, generator: torch.Generator
) -> tuple[Int[Tensor, " kept"], str]:
    """The part of every pair whose two inputs are of one part; of several deals, the one that keeps most pairs."""
    sides = torch.cat([pairs.base[kept], pairs.source[kept]])
    deals = []
    for _ in range(DEALS):
        deal = hold_out.deal(sides, SHARES, generator)
        base, source = deal.splits_of(sides).split(len(kept))
        part = torch.where(base == source, base, MIXED)
        counts = [int((part == k).sum()) for k in range(len(SPLITS))]
        deals.append((min(LEAST_PAIRS, *counts), sum(counts), counts, part, deal))
    _, total, counts, part, deal = max(deals, key=lambda d: d[:2])
    if min(counts) < LEAST_PAIRS:
        told = ", ".join(f"{n} {name}" for name, n in zip(SPLITS, counts, strict=True))
        raise PlotError(
            f"Held out by {hold_out}, {len(kept) - total} of {len(kept)} pairs have base and source of different "
            f"splits, and what is left is too little: {told} pairs, at least {LEAST_PAIRS} of each are needed. Give "
            f"inputs alone (pairs are then drawn inside each split), more pairs, or a `split` of your own."
        )
    return part, deal.said(len(kept) - total, len(kept), "pairs")


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
