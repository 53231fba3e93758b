"""What a run shows of itself on a terminal: which stage of which method it is at, and how long it will still take."""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import fmean

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from plot_ot.studies.running import Step
from plot_ot.studies.showing import duration


class Pace:
    """How long units of work take, learned from those that are done: a DAS is not as quick as a patch."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {}

    def took(self, name: str, seconds: float) -> None:
        """A unit of this name is done."""
        self.seconds.setdefault(name, []).append(seconds)

    def left(self, names: Sequence[str]) -> float | None:
        """Seconds for these units: like their namesakes or, before there are any, like the average unit."""
        if not self.seconds or not names:
            return None
        usual = fmean(s for times in self.seconds.values() for s in times)
        return sum(fmean(self.seconds[n]) if n in self.seconds else usual for n in names)


class Watch:
    """A progress bar over units of work on a terminal, elsewhere a line per seed and unit, nothing if quiet."""

    def __init__(self, console: Console, quiet: bool) -> None:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]}"),
        )
        self.console, self.lines = console, not quiet and not console.is_terminal
        self.bar = Progress(*columns, console=console, disable=quiet or not console.is_terminal, transient=True)
        self.waiting: list[tuple[int, str]] = []
        self.pace = Pace()
        self.work: TaskID = self.bar.add_task("starting", total=0, left="")
        self.begun = 0.0

    def __enter__(self) -> Watch:
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()

    def __call__(self, step: Step) -> None:
        """Show a step of the run."""
        unit = step.seed, step.unit
        if step.state == "waiting":
            self.waiting.append(unit)
            self.bar.update(self.work, total=len(self.waiting))
        elif step.state == "working":
            if not step.stage:
                self.begun = time.perf_counter()
            self._show(f"seed {step.seed}: {step.unit}{f', {step.stage}' if step.stage else ''}")
            if self.lines and unit not in self.waiting:  # no unit of work, so no line will say that it is done
                self.console.print(f"seed {step.seed}: {step.unit} ...", soft_wrap=True)
        else:
            if unit in self.waiting:
                self.waiting.remove(unit)
                self.bar.update(self.work, advance=1)
            if step.state == "done":
                took = time.perf_counter() - self.begun
                self.pace.took(step.unit, took)
                if self.lines:
                    self.console.print(f"{step} in {took:.1f} s{self._left(', ')}", soft_wrap=True)

    def _show(self, description: str) -> None:
        self.bar.update(self.work, description=description, left=self._left())

    def _left(self, before: str = "") -> str:
        left = self.pace.left([name for _, name in self.waiting])
        return f"{before}about {duration(left)} left" if left else ""
