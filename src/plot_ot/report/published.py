"""What the paper published, to be shown beside a run's own numbers and marked as such."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Point:
    """A method of the paper: average exact accuracy and seconds, each with its standard deviation over seeds."""

    method: str
    accuracy: float
    accuracy_sd: float
    seconds: float
    seconds_sd: float


@dataclass(frozen=True)
class Published:
    """One column of the paper's results: which setting, on which machine."""

    setting: str
    machine: str
    points: tuple[Point, ...]


HEQ = Published(
    "10 seeds, uniform banks",
    "an Apple M1 Pro",
    (Point("plot", 0.991, 0.008, 4.4, 0.1), Point("das", 0.995, 0.004, 131.0, 22.4)),
)
ADDITION = {
    8: Published(
        "10 seeds, d = 8",
        "an Intel Core i7-1185G7",
        (
            Point("plot-native", 0.823, 0.040, 20.2, 0.8),
            Point("plot-pca", 0.937, 0.024, 20.3, 1.3),
            Point("plot-das", 0.974, 0.019, 44.2, 2.1),
            Point("das", 0.976, 0.018, 95.6, 2.4),
        ),
    ),
    16: Published(
        "10 seeds, d = 16",
        "an Intel Core i7-1185G7",
        (
            Point("plot-native", 0.832, 0.027, 33.5, 1.8),
            Point("plot-pca", 0.941, 0.028, 32.4, 1.4),
            Point("plot-das", 0.974, 0.013, 64.2, 3.8),
            Point("das", 0.984, 0.009, 210.5, 10.4),
        ),
    ),
}
MCQA = Published(
    "4 seeds, Gemma-2-2B, sensitive pairs",
    "an NVIDIA H100",
    (
        Point("plot-native", 0.9113, 0.0074, 204.6, 89.4),
        Point("plot-pca", 0.8700, 0.0269, 188.0, 4.0),
        Point("plot-das", 0.9313, 0.0065, 1148.6, 31.7),
        Point("plot-native-das", 0.9187, 0.0108, 346.1, 88.4),
        Point("plot-pca-das", 0.8650, 0.0146, 455.2, 38.0),
        Point("das", 0.9310, 0.0070, 13107.6, 747.7),
    ),
)


def published(config: dict[str, Any]) -> Published | None:
    """The paper's numbers for the task of a run, if the run has the paper's network in the paper's size."""
    if config.get("task") == "heq":
        return HEQ
    if config.get("task") == "addition" and config.get("bits", 4) == 4:
        return ADDITION.get(config.get("width", 8))
    model = str(config.get("model") or "").lower().rstrip("/").rpartition("/")[2]
    return MCQA if config.get("task") == "mcqa" and model == "gemma-2-2b" else None
