"""Accuracy against capacity: the best calibration score of handles with each number of directions.

A search that is rich enough finds something anywhere. Beside the curve of the true variable stands that of the same
search on shuffled values: what its capacity alone can reach.
"""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, repr=False)
class Capacity:
    """The best calibration score for every number of directions that was tried, and the same for shuffled values."""

    variable: str
    sizes: tuple[int, ...]
    accuracy: tuple[float, ...]
    shuffled: tuple[float | None, ...] | None
    """On shuffled values; None for sizes that were not tried there, and altogether where that control did not run."""

    @classmethod
    def of(cls, variable: str, scores: Mapping[int, float], shuffled: Mapping[int, float] | None) -> Capacity:
        """The curve of some scores by number of directions."""
        sizes = tuple(sorted(scores))
        control = tuple(shuffled.get(n) for n in sizes) if shuffled else None
        return cls(variable, sizes, tuple(scores[n] for n in sizes), control)

    @classmethod
    def from_row(cls, variable: str, row: Mapping[str, Any]) -> Capacity:
        """The curve that a run has stored."""
        shuffled = row.get("shuffled")
        return cls(variable, tuple(row["sizes"]), tuple(row["accuracy"]), None if shuffled is None else tuple(shuffled))

    def as_row(self) -> dict[str, Sequence[float | None] | None]:
        """The curve as plain values, for a file."""
        control = None if self.shuffled is None else list(self.shuffled)
        return {"sizes": list(self.sizes), "accuracy": list(self.accuracy), "shuffled": control}

    @property
    def rows(self) -> list[tuple[int, float, float | None]]:
        """Number of directions, score, score on shuffled values."""
        control = self.shuffled or (None,) * len(self.sizes)
        return list(zip(self.sizes, self.accuracy, control, strict=True))

    def __str__(self) -> str:
        if not self.sizes:
            return f"{self.variable}: nothing was tried on calibration pairs."
        lines = [f"{self.variable}: best calibration score by number of directions", "  directions  score  shuffled"]
        lines += [f"  {n:>10}  {score:.3f}  {_told(control)}" for n, score, control in self.rows]
        return "\n".join(lines)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """A table, one row per number of directions."""
        caption = html.escape(f"{self.variable}: best calibration score by number of directions")
        head = "<tr><th>directions</th><th>score</th><th>shuffled values</th></tr>"
        body = "".join(
            f"<tr><td>{n}</td><td>{score:.3f}</td><td>{_told(control)}</td></tr>" for n, score, control in self.rows
        )
        return f"<table><caption>{caption}</caption>{head}{body}</table>"


def _told(score: float | None) -> str:
    return "–" if score is None else f"{score:.3f}"
