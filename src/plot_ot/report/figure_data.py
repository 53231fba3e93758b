"""The small statistics that figures share: columns of numbers, means, and what a figure is about."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean, pstdev
from typing import Any

from plot_ot.files.run_reading import Reading
from plot_ot.report.published import Point, Published, published


def published_for(reading: Reading) -> Published | None:
    """The paper's numbers for a run's task and size, if it has any."""
    return published({**reading.config, "task": reading.results.get("task")})


def published_points(reading: Reading) -> Sequence[Point]:
    """The paper's methods with accuracy and seconds; none where it has no such study."""
    paper = published_for(reading)
    return paper.points if paper else ()


def about(reading: Reading, spread: str = " ± standard deviation") -> str:
    """How many seeds a figure is about, and what is shown of them."""
    failed = len({f["seed"] for f in reading.results["failures"]})
    said = f"Mean{spread} over {len(reading.seeds)} seeds" if len(reading.seeds) > 1 else "One seed"
    return f"{said}{f' ({failed} failed and left out)' if failed else ''}."


def column(rows: Sequence[Mapping[str, Any]], field: str) -> list[float]:
    """A field's values; missing ones (null stands for NaN) are left out."""
    return [float(r[field]) for r in rows if r.get(field) is not None]


def mean_spread(values: Sequence[float]) -> tuple[float, float]:
    """Mean and standard deviation; without values the mean is NaN, which is not drawn."""
    return (fmean(values), pstdev(values)) if values else (float("nan"), 0.0)
