"""Run a study: the units that are missing, then tables, figures and the report."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated

import torch
import typer

from plot_ot.cli.common import (
    Address,
    Bits,
    Detail,
    EngineName,
    Figures,
    First,
    Methods,
    Out,
    Quiet,
    RecipeName,
    Sampler,
    Seeds,
    Size,
    SplitName,
    Strengths,
    Threads,
    Width,
    Workers,
    console,
    errors,
)
from plot_ot.cli.engine_options import engine_by_name
from plot_ot.cli.progress import Watch, announced
from plot_ot.cli.show import print_run
from plot_ot.engine import Engine
from plot_ot.files.run_directory import RunDirectory
from plot_ot.methods import Method, pick
from plot_ot.models.named import default_cache
from plot_ot.report.page import write_page
from plot_ot.studies.study import Study
from plot_ot.tasks import BinaryAddition, HierarchicalEquality, SeedFailed, Task
from plot_ot.tasks.replicas import recipe as recipe_of
from plot_ot.version import library_versions

app = typer.Typer(help="Run a study and write a run directory.", no_args_is_help=True)
CONTROLS = "controls"


@app.command("heq")
def run_heq(
    methods: Methods = None,
    seeds: Seeds = 10,
    first_seed: First = 0,
    sampler: Sampler = "uniform",
    strengths: Strengths = "union",
    size: Size = 1000,
    out: Out = Path("runs/heq"),
    threads: Threads = 1,
    sweep: Annotated[bool, typer.Option(help="Also run plot at several ε, for the stability figure.")] = True,
    figures: Figures = True,
    quiet: Quiet = False,
    engine: EngineName = "process",
    address: Address = None,
    workers: Workers = None,
) -> None:
    """Hierarchical equality: the paper's first study."""
    task = HierarchicalEquality(sampler, strengths, size)
    crew = engine, address, workers
    finish(task, methods, seeds, first_seed, out, threads, sweep, figures, quiet, crew=crew)


@app.command("addition")
def run_addition(
    width: Width = 8,
    bits: Bits = 4,
    recipe: RecipeName = "paper",
    split: SplitName = "round-robin",
    bases: Annotated[int, typer.Option(help="Base inputs in the banks; 4 bits have 256 in all.")] = 256,
    methods: Methods = None,
    seeds: Seeds = 10,
    first_seed: First = 0,
    out: Out = Path("runs/addition"),
    threads: Threads = 1,
    figures: Figures = True,
    detail: Detail = False,
    quiet: Quiet = False,
    engine: EngineName = "process",
    address: Address = None,
    workers: Workers = None,
) -> None:
    """Binary addition: the paper's second study."""
    task = BinaryAddition(width, bits, recipe, split, bases)
    crew = engine, address, workers
    finish(task, methods, seeds, first_seed, out, threads, False, figures, quiet, detail, crew)


def finish(
    task: Task,
    methods: str | None,
    seeds: int,
    first_seed: int,
    out: Path,
    threads: int,
    sweep: bool,
    figures: bool,
    quiet: bool,
    detail: bool = False,
    crew: tuple[str, str | None, int | None] = ("process", None, None),
) -> None:
    """Run what is missing by an engine (its name, address, workers), compile, draw, write the report, print."""
    names = [n.strip() for n in methods.split(",") if n.strip()] if methods else None
    chosen = list(range(first_seed, first_seed + seeds))
    torch.set_num_threads(threads)
    try:
        with engine_by_name(*crew, threads) as engine:
            run = run_study(task, names, chosen, out, sweep=sweep, quiet=quiet, engine=engine)
    except KeyboardInterrupt:
        errors.print("Interrupted. Run the same command again to continue where it stopped.")
        raise typer.Exit(130) from None
    with run:
        results = run.compile([*task.methods()])
        run.manifest["finished"] = datetime.now(timezone.utc).isoformat(timespec="seconds")
        run.write_manifest()
        if figures:
            from plot_ot.report.figures import draw_figures  # matplotlib is slow to import; other commands do without

            draw_figures(run)
            for kind in ("png", "pdf"):
                task.causal_model().draw(run.path / "figures" / f"causal.{kind}")
        report = write_page([run.path])
    if not quiet:
        print_run(run, results, detail)
        console.print(f"Report: {report}", soft_wrap=True, highlight=False)


def run_study(
    task: Task, names: list[str] | None, seeds: list[int], out: Path, *, sweep: bool, quiet: bool, engine: Engine
) -> RunDirectory:
    """Run the units that are missing from the run directory, which stays locked until what comes back is closed."""
    chosen = pick(task.methods(), names)
    config = {**task.config(), "methods": [m.name for m in chosen], "seeds": seeds}
    run = RunDirectory.open(out, config, library_versions(), shlex.join(["plot-ot", *sys.argv[1:]]))
    try:
        _run_missing(run, task, chosen, seeds, sweep, quiet, engine)
    except BaseException:
        run.close()
        raise
    return run


def _run_missing(
    run: RunDirectory,
    task: Task,
    chosen: Sequence[Method],
    seeds: list[int],
    sweep: bool,
    quiet: bool,
    engine: Engine,
) -> None:
    if run.manifest.pop("finished", None):
        run.write_manifest()
    swept = task.sweep() if sweep and "plot" in {m.name for m in chosen} else None
    units = [CONTROLS, *(m.name for m in chosen), *([swept.name] if swept else [])]
    with Watch(errors, [(seed, u) for seed in seeds for u in units], quiet) as watch:
        for seed in seeds:
            missing = [u for u in units if not run.finished(seed, u)]
            watch.skip(seed, units if run.finished(seed, "failed") else [u for u in units if u not in missing])
            if not missing or run.finished(seed, "failed"):
                continue
            try:
                with watch.at(seed, "network and banks"):
                    prepared = replace(task.prepare(seed, default_cache()), recipe=recipe_of(task))
                    study = Study(prepared, engine)
            except SeedFailed as e:
                run.finish(seed, "failed", {"failures": [{"task": task.name, "seed": seed, "reason": str(e)}]})
                watch.skip(seed, missing)
                continue
            if CONTROLS in missing:
                with watch.at(seed, CONTROLS):
                    run.finish(seed, CONTROLS, study.control_unit())
            for method in chosen:
                if method.name in missing:
                    with watch.at(seed, method.name) as say:
                        unit, handles = study.run(announced(method, say), task.random_method)
                        for handle in handles.values():
                            handle.save(run.handle_path(seed, method.name, handle.variable))
                        run.finish(seed, method.name, unit)
            if swept and swept.name in missing:
                with watch.at(seed, swept.name):
                    run.finish(seed, swept.name, study.sweep_unit(swept))
            _note_memory(run, seed, study, engine)


def _note_memory(run: RunDirectory, seed: int, study: Study, engine: Engine) -> None:
    """A run that ran out of memory says so in its manifest: its last bits depend on how its work was cut."""
    spoken = study.prepared.spoken
    subjects = study.prepared.subject, *([spoken.strict] if spoken else [])
    for words in (*(w for s in subjects for w in s.limits.halvings), *engine.notes()):
        run.note(f"seed {seed}: {words}")
