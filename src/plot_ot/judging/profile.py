"""The profile of a variable: the best calibration score of all that was tried inside every place."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxtyping import Float
from torch import Tensor

from plot_ot.abstract.banks import Bank
from plot_ot.subjects.places import ARROW

Z = 1.96


@dataclass(frozen=True)
class Tried:
    """One place, and the best calibration score of everything that was tried inside it."""

    place: str
    token: str
    layer: int
    score: float
    low: float
    high: float

    def overlaps(self, other: Tried) -> bool:
        """Whether the two intervals have a value in common."""
        return self.low <= other.high and other.low <= self.high


@dataclass(frozen=True, repr=False)
class Profile:
    """Where a variable could be controlled, place by place, on calibration pairs; nothing was tried elsewhere."""

    variable: str
    tried: tuple[Tried, ...]

    @classmethod
    def from_rows(cls, variable: str, rows: Sequence[Mapping[str, Any]]) -> Profile:
        """The profile that a run has stored."""
        names = ("place", "token", "layer", "score", "low", "high")
        return cls(variable, tuple(Tried(*(r[name] for name in names)) for r in rows if r["variable"] == variable))

    @property
    def best(self) -> Tried | None:
        """The place of the highest score, the earliest of equal ones."""
        return max(self.tried, key=lambda t: t.score, default=None)

    @property
    def as_good(self) -> tuple[str, ...]:
        """Places other than the best whose interval overlaps its interval: these pairs do not tell them apart."""
        best = self.best
        return tuple(t.place for t in self.tried if best is not None and t is not best and t.overlaps(best))

    def __str__(self) -> str:
        if self.best is None:
            return f"{self.variable}: no place was tried on calibration pairs."
        width = max(len("place"), *(len(t.place) for t in self.tried))
        lines = [
            f"{self.variable}: best calibration score inside each place that was tried",
            f"  {'place':{width}}  score",
        ]
        for t in self.tried:
            mark = "  best" if t is self.best else "  as good" if t.place in self.as_good else ""
            lines.append(f"  {t.place:{width}}  {t.score:.3f} [{t.low:.3f}, {t.high:.3f}]{mark}")
        return "\n".join([*lines, f"  {self.sentence}"])

    __repr__ = __str__

    @property
    def sentence(self) -> str:
        """Which place is best, and which ones these pairs do not tell from it."""
        if self.best is None:
            return "No place was tried on calibration pairs."
        others = f"; not told from it by these pairs: {', '.join(self.as_good)}" if self.as_good else ""
        return f"Best: {self.best.place} ({self.best.score:.3f}){others}."

    def _repr_html_(self) -> str:
        """A table of places by tokens; the best score and those as good as it are in bold."""
        columns = list(dict.fromkeys(t.token for t in self.tried))
        rows = list(dict.fromkeys(_without_token(t.place) for t in self.tried))
        at = {(_without_token(t.place), t.token): t for t in self.tried}
        if len(columns) * len(rows) > 2 * len(self.tried):  # most cells would be empty
            columns, rows = [""], [t.place for t in self.tried]
            at = {(t.place, ""): t for t in self.tried}
        head = "".join(f"<th>{html.escape(token)}</th>" for token in columns)
        body = "".join(
            f"<tr><th>{html.escape(row)}</th>{''.join(self._cell(at.get((row, token))) for token in columns)}</tr>"
            for row in rows
        )
        caption = html.escape(f"{self.variable}: best calibration score inside each place. {self.sentence}")
        return f"<table><caption>{caption}</caption><tr><th></th>{head}</tr>{body}</table>"

    def _cell(self, tried: Tried | None) -> str:
        if tried is None:
            return "<td>–</td>"
        said = f"{tried.score:.3f} [{tried.low:.3f}, {tried.high:.3f}]"
        strong = tried is self.best or tried.place in self.as_good
        return f'<td title="{html.escape(tried.place)}">{f"<b>{said}</b>" if strong else said}</td>'


def _without_token(place: str) -> str:
    first, arrow, way = place.partition(ARROW)
    return (first.rpartition("@")[0] or first) + arrow + way


def interval(score: float, pairs: float) -> tuple[float, float]:
    """Wilson's 95 % interval of a share of so many pairs."""
    share = min(max(score, 0.0), 1.0)
    centre, scale = share + Z**2 / (2 * pairs), 1 + Z**2 / pairs
    half = Z * math.sqrt(share * (1 - share) / pairs + Z**2 / (4 * pairs**2))
    return max(0.0, (centre - half) / scale), min(1.0, (centre + half) / scale)


def effective_pairs(bank: Bank, weights: Float[Tensor, " pairs"]) -> float:
    """How many equally weighted pairs tell as much as these do; pairs of one base input count as one."""
    per_base = weights.new_zeros(int(bank.base_groups().max()) + 1).index_add(0, bank.base_groups(), weights)
    return float(per_base.sum() ** 2 / per_base.square().sum())
