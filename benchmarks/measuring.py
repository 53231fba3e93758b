"""What the language benchmarks measure with: seconds by the wall clock and of the CPU, and peak memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import psutil


@dataclass(frozen=True)
class Seconds:
    """By the wall clock, and of this process's CPU."""

    wall: float = 0.0
    cpu: float = 0.0

    def __add__(self, other: Seconds) -> Seconds:
        return Seconds(self.wall + other.wall, self.cpu + other.cpu)

    def over(self, unit: Seconds) -> dict[str, float]:
        """How many of those units."""
        return {"wall": self.wall / unit.wall, "cpu": self.cpu / unit.cpu}

    @classmethod
    def mean(cls, several: Sequence[Seconds]) -> Seconds:
        return cls(fmean(s.wall for s in several), fmean(s.cpu for s in several))


def timed(work: Callable[[], Any]) -> tuple[Any, Seconds]:
    """What the work gives and takes."""
    wall, cpu = time.perf_counter(), time.process_time()
    found = work()
    return found, Seconds(time.perf_counter() - wall, time.process_time() - cpu)


class Peak:
    """The highest resident memory of this process while open, above `floor` bytes."""

    def __init__(self, floor: int) -> None:
        self.floor, self.bytes = floor, 0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def _look(self) -> None:
        self.bytes = max(self.bytes, resident() - self.floor)

    def _watch(self) -> None:
        while not self._done.wait(0.02):
            self._look()

    def __enter__(self) -> Peak:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()
        self._look()


def resident() -> int:
    """Bytes of this process in memory."""
    return int(psutil.Process().memory_info().rss)
