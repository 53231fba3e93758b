"""Engines by name."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from plot_ot.engine import Engine, InProcess
from plot_ot.engine.ray_engine import RayEngine
from plot_ot.errors import PlotError, unknown

ENGINES = ("process", "ray")


@contextlib.contextmanager
def engine_by_name(name: str, address: str | None, workers: int | None, threads: int) -> Iterator[Engine]:
    """The engine of that name while it is needed."""
    if name not in ENGINES:
        unknown("engine", name, ENGINES)
    if name == "ray":
        with RayEngine(address, workers, threads=threads) as engine:
            yield engine
        return
    if address or workers:
        raise PlotError("--address and --workers are for --engine ray; this process has neither.")
    yield InProcess()
