"""Who is told how far the work is: the watcher of this context, if there is one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol, TypeVar

T = TypeVar("T")


class Watcher(Protocol):
    """Somebody who shows how far the work is."""

    def step(self, words: str) -> None:
        """The next step begins."""

    def part(self, done: int, total: int) -> None:
        """So many of the units of work that were started together are done."""

    def tell(self, words: str) -> None:
        """Something is known that should stay on the screen, such as a provisional answer."""


_watcher: ContextVar[Watcher | None] = ContextVar("watcher", default=None)


@contextmanager
def watched_by(watcher: Watcher | None) -> Iterator[None]:
    """While open, this watcher (or nobody) is told."""
    token = _watcher.set(watcher)
    try:
        yield
    finally:
        _watcher.reset(token)


def announce(words: str) -> None:
    """Say that the next step begins."""
    watcher = _watcher.get()
    if watcher is not None:
        watcher.step(words)


def tell(words: str) -> None:
    """Say something that should stay to be seen while the work goes on."""
    watcher = _watcher.get()
    if watcher is not None:
        watcher.tell(words)


def counted(results: Iterator[T], total: int) -> Iterator[T]:
    """The same results; the watcher is told when each of them is there."""
    watcher = _watcher.get()
    if watcher is None:
        yield from results
        return
    for done, result in enumerate(results, 1):
        watcher.part(done, total)
        yield result
