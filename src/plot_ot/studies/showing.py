"""What `localize` shows while it works: the step it is at, and about how long the step will still take.

A terminal gets a bar that goes away again, a notebook a line of plain HTML that is written anew. Pipes, files and
whoever asks for `progress=False` get nothing.
"""

from __future__ import annotations

import html
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as RichProgress

from plot_ot.engine.watching import watched_by

Show = Callable[[int, int, str], None]
"""Draws: steps begun, steps in all, words."""


class Progress:
    """Counts steps, and estimates what is left of the present one from its units of work."""

    def __init__(self, steps: int, show: Show, clock: Callable[[], float] = time.perf_counter) -> None:
        self.steps, self.show, self.clock = steps, show, clock
        self.begun, self.words, self.since, self.known = 0, "", 0.0, ""

    def step(self, words: str) -> None:
        """The next step begins."""
        self.begun, self.words, self.since = self.begun + 1, words, self.clock()
        self._show(words)

    def tell(self, words: str) -> None:
        """What is known so far stands behind every step from now on; the steps begin again."""
        self.known, self.begun = f" | {words}", 0

    def part(self, done: int, total: int) -> None:
        """Units of the present step are done; those started together take about equally long."""
        if done == 1 or done == total:
            left = ""
        else:
            seconds = (self.clock() - self.since) * (total - done) / done
            left = f", about {duration(seconds)} left" if seconds >= 1 else ""
        if done == total:
            self.since = self.clock()  # what is started next is estimated by itself
        self._show(f"{self.words}{left}")

    def _show(self, words: str) -> None:
        self.show(min(self.begun, self.steps), self.steps, f"{words}{self.known}")


def duration(seconds: float) -> str:
    """A duration as one would say it."""
    for size, unit in ((3600, "h"), (60, "min")):
        if seconds >= 1.5 * size:
            return f"{seconds / size:.1f} {unit}" if seconds < 10 * size else f"{seconds / size:.0f} {unit}"
    return f"{max(1, round(seconds))} s"


@contextmanager
def shown(progress: bool, steps: int) -> Iterator[None]:
    """While open, what is announced is shown, where somebody looks."""
    notebook = _notebook() if progress else None
    if notebook is not None:
        with _on_page(notebook) as show, watched_by(Progress(steps, show)):
            yield
    elif progress and sys.stderr is not None and sys.stderr.isatty():
        with _on_terminal(Console(stderr=True)) as show, watched_by(Progress(steps, show)):
            yield
    else:
        yield


@contextmanager
def _on_terminal(console: Console) -> Iterator[Show]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with RichProgress(*columns, console=console, transient=True) as bar:
        work = bar.add_task("starting", total=None)

        def show(begun: int, steps: int, words: str) -> None:
            bar.update(work, completed=begun - 1, total=steps, description=words)

        yield show


def _notebook() -> Any:
    """The function that shows things in the notebook this runs in; None elsewhere."""
    if "IPython" not in sys.modules:
        return None
    from IPython import get_ipython
    from IPython.display import display

    shell = get_ipython()
    if shell is None or not hasattr(shell, "kernel"):
        return None
    return display


@contextmanager
def _on_page(display: Callable[..., Any], every: float = 0.2) -> Iterator[Show]:
    """One line that is written anew a few times a second, and is empty in the end."""
    place = display(_Html(""), display_id=True)
    last, at = -every, 0

    def show(begun: int, steps: int, words: str) -> None:
        nonlocal last, at
        now = time.monotonic()
        if begun == at and now - last < every:
            return
        last, at = now, begun
        bar = f'<progress value="{begun - 1}" max="{steps}"></progress>'
        place.update(_Html(f"{bar} {begun} of {steps}: {html.escape(words)}"))

    try:
        yield show
    finally:
        place.update(_Html(""))


class _Html:
    def __init__(self, text: str) -> None:
        self.text = text

    def _repr_html_(self) -> str:
        return self.text
