"""Which inputs count: those that the network answers as the causal model does, by some reading of it, or all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from plot_ot.errors import PlotError

Right = Callable[[Int[Tensor, "rows inputs"]], Bool[Tensor, " rows"]]
"""Which input rows the network answers as the causal model does."""
FILTERS = {
    "vocabulary": "the network's own next token, of its whole vocabulary, is the answer",
    "candidates": "the answer is the network's first choice among the candidates",
    "none": "nothing is asked of an input",
}
"""What an input must pass, by name."""
LEAST_ROWS, LEAST_PAIRS = 60, 20


@dataclass(frozen=True)
class Admission:
    """A filter by name, and what it asks the network."""

    right: Right
    filter: str = "candidates"
    choices: tuple[str, ...] = ("candidates", "none")
    """The filters that this network could have instead."""
    who: str = "the network"
    heard: Callable[[], str] = str
    """What the network answered instead, in words, for whoever finds nothing admitted."""

    def admitted(self, rows: Int[Tensor, "rows inputs"]) -> tuple[Bool[Tensor, " rows"], Bool[Tensor, " rows"]]:
        """Which rows count, and which are answered right."""
        right = self.right(rows)
        return (torch.ones_like(right) if self.filter == "none" else right), right

    def said(self, counted: str) -> str:
        """How many are answered right, as `counted`, and what becomes of the others."""
        told = f"{self.who} answers {counted} as the causal model does"
        if self.filter == "vocabulary":
            return f"{told}, as its own next token"
        told += ", of the candidate answers" if "vocabulary" in self.choices else ""
        return f"{told}; without a filter all of them count" if self.filter == "none" else told

    def refuse_few(self, said: str, left_out: int, least: str = f"{LEAST_ROWS} inputs") -> NoReturn:
        """Refuse too few inputs; if some were left out because the network is wrong on them, name other filters."""
        if not left_out:
            raise PlotError(f"{said[:1].upper()}{said[1:]}; at least {least} are needed. Give more of them.")
        others = [f"filter='{name}' ({FILTERS[name]})" for name in self.choices if name != self.filter]
        heard = self.heard()
        raise PlotError(
            f"{said[:1].upper()}{said[1:]}; at least {least} are needed.{heard and f' {heard}'} Train it further, give "
            f"more inputs, check that the hypothesis, the prompts and the answers are what you mean, or choose another "
            f"filter: {' or '.join(others)}."
        )
