"""Who runs the work units of a study: this process (`InProcess`, the default), or a Ray cluster (`RayEngine`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from plot_ot.engine.ray_engine import RayEngine
from plot_ot.engine.stores import merged, record_shard
from plot_ot.engine.units import (
    Crew,
    Recipe,
    Shard,
    SharedRecording,
    Unit,
    jobs_at_once,
    record_shared,
    run,
    run_here,
    shards,
)
from plot_ot.subjects import Store, Subject


class Engine(Protocol):
    """Somebody who can put a crew on any subject."""

    def crew(self, subject: Subject, recipe: Recipe | None = None) -> Crew:
        """Workers with replicas of a subject, made by the recipe; without one the subject itself is sent to them."""

    def notes(self) -> list[str]:
        """What workers elsewhere had to do differently since this was last asked, in words for the manifest."""


class InProcess:
    """Everything here, one unit after the other."""

    def crew(self, subject: Subject, recipe: Recipe | None = None) -> Crew:
        return _Here(subject)

    def notes(self) -> list[str]:
        return []


class _Here:
    def __init__(self, subject: Subject) -> None:
        self.subject = subject

    def record(self, shards: Sequence[Shard]) -> Store:
        return merged([record_shard(self.subject, shard) for shard in shards])

    def map(self, recording: SharedRecording, units: Sequence[Unit]) -> Iterator[Any]:
        return (run_here(recording, unit) for unit in units)


__all__ = [
    "Crew",
    "Engine",
    "InProcess",
    "RayEngine",
    "Recipe",
    "Shard",
    "SharedRecording",
    "Unit",
    "jobs_at_once",
    "record_shared",
    "run",
    "shards",
]
