"""Inputs that tell two hypotheses apart, found from the hypotheses themselves."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import permutations, product
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from plot_ot.abstract.banks import distinct_rows
from plot_ot.abstract.causal_model import CausalModel
from plot_ot.comparing.rivals import Field, Rival
from plot_ot.errors import PlotError

PAIRS, SHOWN, MOST_ROWS = 4000, 3, 20_000


@dataclass(frozen=True)
class Telling:
    """What would tell two hypotheses apart: pairs for which their swaps predict different answers."""

    first: str
    second: str
    aligned: tuple[tuple[str, str], ...]
    """Which variable of one plays the part of which of the other, where they are most alike."""
    share: float
    """The share of pairs of the given inputs on which the predictions differ."""
    pairs: tuple[tuple[Mapping[str, Any], Mapping[str, Any], str], ...]
    """(base, source, the variable whose swap tells)"""
    new: bool
    """Whether the pairs are made of inputs that were not given."""

    def __str__(self) -> str:
        who = f"{self.first} and {self.second}"
        if not self.pairs:
            alike = ", ".join(f"{a} as {b}" for a, b in self.aligned)
            return (
                f"{who} predict the same for every swap that was tried ({alike}): no input of these values tells them."
            )
        where = "New inputs" if self.new else f"{self.share:.0%} of the given pairs"
        shown = "; ".join(f"base {dict(b)}, source {dict(s)}, swap {v}" for b, s, v in self.pairs)
        return f"{where} would tell {who} apart: {shown}."


def telling(field: Field, first: Rival, second: Rival, seed: int) -> Telling:
    """Look for telling pairs among the given inputs, then among all combinations of the inputs' values."""
    generator = torch.Generator().manual_seed(seed)
    base, source = _drawn(field.rows, generator)
    aligned = _alignment(first.causal, second.causal, base, source)
    differ = _differ(first.causal, second.causal, base, source, aligned)
    share, new = float(differ.any(dim=0).double().mean()), False
    if not bool(differ.any()):
        with contextlib.suppress(PlotError):  # a combination that nobody gave may be impossible
            grid = _grid(field.rows, generator)
            base, source = _drawn(grid, generator)
            differ, new = _differ(first.causal, second.causal, base, source, aligned), True
    found = []
    for k in differ.any(dim=0).nonzero().squeeze(1)[:SHOWN].tolist():
        one, other = field.dicts(torch.stack([base[k], source[k]]))
        found.append((one, other, aligned[int(differ[:, k].nonzero()[0])][0]))
    return Telling(first.name, second.name, aligned, share, tuple(found), new)


def _drawn(rows: Tensor, generator: torch.Generator) -> tuple[Int[Tensor, "pairs inputs"], Int[Tensor, "pairs inputs"]]:
    base, source = (rows[torch.randint(len(rows), (PAIRS,), generator=generator)] for _ in range(2))
    return base, source


def _grid(rows: Int[Tensor, "rows inputs"], generator: torch.Generator) -> Int[Tensor, "more inputs"]:
    """All combinations of the values that every input has, or some at random where they are too many."""
    values = [column.unique() for column in rows.T]
    count = 1
    for v in values:
        count *= len(v)
    if count <= MOST_ROWS:
        return torch.tensor(list(product(*(v.tolist() for v in values))))
    drawn = [v[torch.randint(len(v), (MOST_ROWS,), generator=generator)] for v in values]
    return distinct_rows(torch.stack(drawn, dim=1))


def _alignment(a: CausalModel, b: CausalModel, base: Tensor, source: Tensor) -> tuple[tuple[str, str], ...]:
    """The one-to-one match of variables under which the fewest predictions differ."""
    few, many = (a, b) if len(a.variables) <= len(b.variables) else (b, a)
    labels = {(m, v): m.swap(base, source, v) for m in (few, many) for v in m.variables}
    apart = {
        (v, w): int((~few.accepts(labels[few, v], labels[many, w])).sum())
        for v in few.variables
        for w in many.variables
    }
    best = min(
        permutations(many.variables[:7], len(few.variables[:7])),
        key=lambda chosen: sum(apart[v, w] for v, w in zip(few.variables, chosen, strict=False)),
    )
    matched = list(zip(few.variables, best, strict=False))
    return tuple(matched if few is a else [(w, v) for v, w in matched])


def _differ(
    a: CausalModel, b: CausalModel, base: Tensor, source: Tensor, aligned: tuple[tuple[str, str], ...]
) -> Tensor:
    """[aligned, pairs]: whether swapping a variable, and the one that plays its part, gives different answers."""
    return torch.stack([~a.accepts(a.swap(base, source, v), b.swap(base, source, w)) for v, w in aligned])
