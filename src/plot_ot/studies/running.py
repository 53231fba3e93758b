"""Run a study into a directory: the units of work that are missing there, seed by seed, so that it can be resumed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from numbers import Integral
from pathlib import Path

from plot_ot.engine import Engine, InProcess
from plot_ot.errors import PlotError
from plot_ot.files.run_directory import RunDirectory
from plot_ot.files.run_layout import RESERVED
from plot_ot.files.run_reading import Reading, read_run
from plot_ot.files.unit_files import units_in
from plot_ot.files.writing import Json
from plot_ot.judging.judges import check_controls
from plot_ot.methods import Method, pick
from plot_ot.models.folders import default_cache
from plot_ot.stages.forecast import Forecast
from plot_ot.stages.problem import Problem, Stage, State
from plot_ot.studies.identity import method_digest, unit_of
from plot_ot.studies.prepared import Prepared, Sweep
from plot_ot.studies.study import Study
from plot_ot.studies.task import SeedFailed, Task
from plot_ot.subjects.threads import enough_threads
from plot_ot.version import library_versions

CONTROLS, FAILED = RESERVED[:2]
"""Units of a seed besides its methods: what doing nothing scores, and why a seed could not be used."""
MOST_SEEDS = 10**12
STAGES = {
    "Localize": "couplings",
    "LocalizeTokens": "couplings of tokens",
    "ScoreSites": "scores",
    "SelectPlaces": "places",
    "SelectTokens": "tokens",
    "Best": "several ways",
    "Calibrate": "calibration",
    "TrainDas": "training",
    "TrainBoundless": "training",
    "TrainMask": "training",
    "ClosedForm": "closed form",
    "Together": "tokens together",
}
"""What stages are called while they run."""


@dataclass(frozen=True)
class Step:
    """Something that happened on the way: a unit of work of a seed is `waiting`, `working`, `done` or `skipped`."""

    seed: int
    unit: str
    state: str
    stage: str = ""
    """Which stage of the method is starting, while it is `working`."""

    def __str__(self) -> str:
        return f"seed {self.seed}: {self.unit}, {self.stage or self.state}"


Progress = Callable[[Step], None]
"""Whoever wants to know how far a run is; `print` will do."""


def run_study(
    task: Task,
    *,
    seeds: int | Iterable[int] = 10,
    methods: Sequence[str] | None = None,
    out: str | Path,
    engine: Engine | None = None,
    progress: Progress | None = None,
    sweep: bool = False,
    start_over: bool = False,
    private: bool = False,
    controls: str = "full",
    cache: Path | None = None,
    command: str = "plot_ot.run_study(...)",
) -> Reading:
    """Run a configured task's methods on some seeds into the directory `out`, and read what is there afterwards.

    `seeds` are their numbers, or how many from 0 on; `methods` their names (default: all of the task's). What a run
    there has finished already is not done again: call it once more after an interruption, or with more seeds and
    methods. A run there of another network, other data, settings or versions is refused, or with `start_over` set
    aside. `sweep` also runs `plot` at several ε or β. `progress` is told every `Step`; networks are kept in `cache`.
    The manifest of a `private` run keeps nothing about the machine and the commands. `controls` are `standard` (random
    handles, shuffled values) or `full` (also a re-initialised network).
    """
    numbers = [check_seed(s) for s in (range(seeds) if isinstance(seeds, int) else seeds)]
    chosen = pick(task.methods(), list(methods) if methods is not None else None)
    check_controls(controls)
    config = {**task.config(), "controls": controls, "methods": [m.name for m in chosen], "seeds": numbers}
    for m in chosen:
        check_name(m.name)
    swept = task.sweep() if sweep and "plot" in {m.name for m in chosen} else None
    with RunDirectory.open(
        Path(out), config, library_versions(), command, start_over=start_over, private=private
    ) as run:
        worker = _Worker(
            run, task, chosen, swept, engine or InProcess(), progress or _silent, cache or default_cache(), controls
        )
        for seed in numbers:
            worker.tell(seed, worker.units, "waiting")
        worker.refuse_another()
        for seed in numbers:
            worker.run_seed(seed)
        run.complete([*task.methods()])
    return read_run(run.path)


def check_seed(seed: int) -> int:
    """Refuse a seed that the random number generators cannot take."""
    if not (isinstance(seed, Integral) and 0 <= seed < MOST_SEEDS):
        raise PlotError(f"A seed is a whole number from 0 to {MOST_SEEDS - 1:,}; found {seed}.")
    return int(seed)


def check_name(method: str) -> None:
    """Refuse a method that is named like another unit of a run."""
    if method in RESERVED:
        raise PlotError(f"A method cannot be called {method!r}: a run has another part of that name. Rename it.")


def _silent(step: Step) -> None:
    """Tell nobody."""


@dataclass(frozen=True)
class _Worker:
    """What it takes to run any seed."""

    run: RunDirectory
    task: Task
    methods: Sequence[Method]
    sweep: Sweep | None
    engine: Engine
    progress: Progress
    cache: Path
    controls: str

    @property
    def units(self) -> list[str]:
        """The units of work of every seed, in order."""
        return [CONTROLS, *(m.name for m in self.methods), *([self.sweep.name] if self.sweep else [])]

    @property
    def settings(self) -> dict[str, str]:
        """The digest of every method's settings, by the name of its unit."""
        parts: list[Method | Sweep] = [*self.methods, *([self.sweep] if self.sweep else [])]
        return {p.name: method_digest(p) for p in parts}

    def refuse_another(self) -> None:
        """Refuse a directory whose units are of other networks or of methods with other settings, before any work."""
        for seed in dict(units_in(self.run.path)):
            if known := self.task.subject_known(seed, self.cache):
                self.run.require(seed, {"subject": known})
            for name, digest in self.settings.items():
                self.run.require(seed, {"settings": digest}, [name])

    def run_seed(self, seed: int) -> None:
        """Run what is missing of a seed."""
        missing = [u for u in self.units if not self.run.finished(seed, u)]
        failed = self.run.finished(seed, FAILED)
        self.tell(seed, [u for u in self.units if failed or u not in missing], "skipped")
        if failed or not missing:
            return
        try:
            self.progress(Step(seed, "training or loading the network, drawing pairs", "working"))
            found = self.task.prepare(seed, self.cache)
            prepared = replace(found, recipe=self.task.network_recipe(), controls=self.controls)
            of = unit_of(prepared)
            self.run.require(seed, of)
        except SeedFailed as e:
            self.run.finish(seed, FAILED, {"failures": [{"task": self.task.name, "seed": seed, "reason": str(e)}]})
            self.tell(seed, missing, "skipped")
            return
        with enough_threads(prepared.subject):
            self._run_units(seed, prepared, of, missing)
        self._note_memory(seed, prepared)

    def _run_units(self, seed: int, prepared: Prepared, of: Json, missing: Sequence[str]) -> None:
        """Record a seed and run these units on it."""
        study = Study(prepared, self.engine)
        self.run.note_subject(seed, of["subject"])
        settings = self.settings
        if CONTROLS in missing:
            with self._at(seed, CONTROLS):
                self.run.finish(seed, CONTROLS, study.control_unit(), of=of)
        for method in self.methods:
            if method.name in missing:
                with self._at(seed, method.name) as say:
                    unit, handles = study.run(_announced(method, say), self.task.random_method)
                    with_settings = {**of, "settings": settings[method.name]}
                    self.run.finish(seed, method.name, unit, list(handles.values()), with_settings)
        if self.sweep and self.sweep.name in missing:
            with self._at(seed, self.sweep.name):
                self.run.finish(
                    seed,
                    self.sweep.name,
                    study.sweep_unit(self.sweep),
                    of={**of, "settings": settings[self.sweep.name]},
                )

    def tell(self, seed: int, units: Iterable[str], state: str) -> None:
        """Say the same of several units."""
        for unit in units:
            self.progress(Step(seed, unit, state))

    @contextmanager
    def _at(self, seed: int, unit: str) -> Iterator[Callable[[str], None]]:
        """Work on a unit; what is yielded says at which stage."""
        self.progress(Step(seed, unit, "working"))
        yield lambda stage: self.progress(Step(seed, unit, "working", stage))
        self.progress(Step(seed, unit, "done"))

    def _note_memory(self, seed: int, prepared: Prepared) -> None:
        """A run that ran out of memory says so in its manifest: its last bits depend on how its work was cut."""
        subjects = prepared.subject, *([prepared.wording.strict] if prepared.wording else [])
        for words in (*(w for s in subjects for w in s.limits.halvings), *self.engine.notes()):
            self.run.note(f"seed {seed}: {words}")


# -- stages that say when they start ---------------------------------------------------------------------------


@dataclass(frozen=True)
class _Announced:
    """A stage that says so before it starts."""

    stage: Stage
    say: Callable[[], None]

    def __call__(self, problem: Problem, state: State) -> State:
        self.say()
        return self.stage(problem, state)

    def forecast(self, ahead: Forecast) -> None:
        self.stage.forecast(ahead)


def _announced(method: Method, say: Callable[[str], None]) -> Method:
    """The same method, telling which of its stages it is at."""
    stages = []
    for k, stage in enumerate(method.stages, 1):
        kind = type(stage).__name__
        words = f"stage {k} of {len(method.stages)} ({STAGES.get(kind, kind)})"
        stages.append(_Announced(stage, partial(say, words)))
    return replace(method, stages=tuple(stages))
