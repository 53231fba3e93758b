"""What a run shows of itself on a terminal: which stage of which method it is at, and how long it will still take."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from plot_ot.methods import Method
from plot_ot.stages.forecast import Forecast
from plot_ot.stages.problem import Problem, Stage, State, stage_name
from plot_ot.studies.showing import duration


@dataclass(frozen=True)
class Announced:
    """A stage that says so before it starts."""

    stage: Stage
    say: Callable[[], None]

    def __call__(self, problem: Problem, state: State) -> State:
        self.say()
        return self.stage(problem, state)

    def forecast(self, ahead: Forecast) -> None:
        self.stage.forecast(ahead)


def announced(method: Method, say: Callable[[str], None]) -> Method:
    """The same method, telling which of its stages it is at."""
    stages = []
    for k, stage in enumerate(method.stages, 1):
        words = f"stage {k} of {len(method.stages)} ({stage_name(stage) or 'several ways'})"
        stages.append(Announced(stage, partial(say, words)))
    return replace(method, stages=tuple(stages))


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
    """A progress bar over units of work; nothing is shown when quiet or not on a terminal."""

    def __init__(self, console: Console, units: Sequence[tuple[int, str]], quiet: bool) -> None:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]}"),
        )
        self.bar = Progress(*columns, console=console, disable=quiet or not console.is_terminal, transient=True)
        self.waiting = list(units)
        self.pace = Pace()
        self.work: TaskID = self.bar.add_task("starting", total=len(units), left="")
        self.title = ""

    def __enter__(self) -> Watch:
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()

    def skip(self, seed: int, names: Sequence[str]) -> None:
        """These units need no work: they are done already, or their seed failed."""
        gone = {(seed, n) for n in names}
        self.bar.update(self.work, advance=sum(u in gone for u in self.waiting))
        self.waiting = [u for u in self.waiting if u not in gone]

    @contextmanager
    def at(self, seed: int, name: str) -> Iterator[Callable[[str], None]]:
        """While open, this unit is being worked on; what is yielded says at which stage."""
        self.title = f"seed {seed}: {name}"
        self._show(self.title)
        start = time.perf_counter()
        yield lambda words: self._show(f"{self.title}, {words}")
        self.pace.took(name, time.perf_counter() - start)
        if (seed, name) in self.waiting:
            self.waiting.remove((seed, name))
            self.bar.update(self.work, advance=1)

    def _show(self, description: str) -> None:
        left = self.pace.left([name for _, name in self.waiting])
        self.bar.update(self.work, description=description, left=f"about {duration(left)} left" if left else "")
