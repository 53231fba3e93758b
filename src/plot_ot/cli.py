"""The command line: run a study, look at a run, see what would be computed."""

from __future__ import annotations

import os
import sys
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from plot_ot.errors import PlotError, unknown
from plot_ot.methods import pick
from plot_ot.plan import footprint, plan
from plot_ot.report import tables
from plot_ot.runs import Json, RunDirectory
from plot_ot.study import Study
from plot_ot.subjects import record
from plot_ot.tasks import TASKS, BinaryAddition, HierarchicalEquality, SeedFailed, Task
from plot_ot.version import __version__

app = typer.Typer(
    help="Where in this network does this variable live, and how do I control it?",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _print_version(asked: bool) -> None:
    if asked:
        console.print(f"plot-ot {__version__}", highlight=False)
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Where in this network does this variable live, and how do I control it?"""


run_app = typer.Typer(help="Run a study and write a run directory.", no_args_is_help=True)
app.add_typer(run_app, name="run")
console = Console(width=None if sys.stdout.isatty() else 120)
errors = Console(stderr=True)

SWEEP, CONTROLS = "epsilon-sweep", "controls"


def default_cache() -> Path:
    """Where trained networks are kept: $PLOT_OT_CACHE, or plot-ot in the user's cache directory."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(os.environ.get("PLOT_OT_CACHE") or home / "plot-ot")


Methods = Annotated[str | None, typer.Option(help="Comma-separated methods (default: all; see `plot-ot list`).")]
Seeds = Annotated[int, typer.Option(min=1, help="How many seeds.")]
First = Annotated[int, typer.Option(min=0, help="The first seed.")]
Out = Annotated[Path, typer.Option(help="Run directory; an interrupted run there is continued.")]
Sampler = Annotated[str, typer.Option(help="Input rows: 'uniform' (the paper's) or 'balanced' over (z_WX, z_YZ).")]
Strengths = Annotated[str, typer.Option(help="λ grid: 'units' 1..80, 'tenths' 0.1..8.0, or their 'union'.")]
Size = Annotated[int, typer.Option(help="Pairs per bank.")]
Threads = Annotated[int, typer.Option(min=1, help="Torch threads; one is fastest for small networks.")]
Figures = Annotated[bool, typer.Option(help="Write the paper's figures (PNG and PDF).")]
Detail = Annotated[bool, typer.Option(help="Also what calibration chose, and every coupling's flags.")]
Width = Annotated[int, typer.Option(help="Width of the recurrent state.")]
Bits = Annotated[int, typer.Option(help="Bits per number.")]
RecipeName = Annotated[str, typer.Option("--recipe", help="Training: 'paper' (250 epochs) or 'first-exact'.")]
SplitName = Annotated[str, typer.Option("--split", help="Bases: 'round-robin' (the paper's) or 'proportional'.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print no progress and no tables.")]


@run_app.command("heq")
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
) -> None:
    """Hierarchical equality: the paper's first study."""
    finish(
        HierarchicalEquality(sampler, strengths, size), methods, seeds, first_seed, out, threads, sweep, figures, quiet
    )


@run_app.command("addition")
def run_addition(
    width: Width = 8,
    bits: Bits = 4,
    recipe: RecipeName = "paper",
    split: SplitName = "round-robin",
    methods: Methods = None,
    seeds: Seeds = 10,
    first_seed: First = 0,
    out: Out = Path("runs/addition"),
    threads: Threads = 1,
    figures: Figures = True,
    detail: Detail = False,
    quiet: Quiet = False,
) -> None:
    """Binary addition: the paper's second study."""
    task = BinaryAddition(width, bits, recipe, split)
    finish(task, methods, seeds, first_seed, out, threads, False, figures, quiet, detail)


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
) -> None:
    """Run what is missing, compile, draw, print."""
    names = [n.strip() for n in methods.split(",") if n.strip()] if methods else None
    torch.set_num_threads(threads)
    try:
        run = run_study(task, names, list(range(first_seed, first_seed + seeds)), out, sweep=sweep, quiet=quiet)
    except KeyboardInterrupt:
        errors.print("Interrupted. Run the same command again to continue where it stopped.")
        raise typer.Exit(130) from None
    results = run.compile([*task.methods(), SWEEP])
    if figures:
        from plot_ot.report.figures import draw_figures  # matplotlib is slow to import; other commands do without

        draw_figures(run)
        for kind in ("png", "pdf"):
            task.causal_model().draw(run.path / "figures" / f"causal.{kind}")
    if not quiet:
        print_run(run, results, detail)


def run_study(
    task: Task, names: list[str] | None, seeds: list[int], out: Path, *, sweep: bool, quiet: bool
) -> RunDirectory:
    """Run the units that are missing from the run directory."""
    chosen = pick(task.methods(), names)
    config = {**task.config(), "methods": [m.name for m in chosen], "seeds": seeds}
    run = RunDirectory.open(out, config, library_versions())
    units = [CONTROLS, *(m.name for m in chosen), *([SWEEP] if sweep and "plot" in {m.name for m in chosen} else [])]
    with progress(len(seeds) * len(units), quiet) as tick:
        for seed in seeds:
            missing = [u for u in units if not run.finished(seed, u)]
            tick(f"seed {seed}", len(units) - len(missing))
            if not missing or run.finished(seed, "failed"):
                continue
            tick(f"seed {seed}: network and banks", 0)
            try:
                study = Study(task.prepare(seed, default_cache()))
            except SeedFailed as e:
                run.finish(seed, "failed", {"failures": [{"task": task.name, "seed": seed, "reason": str(e)}]})
                tick(f"seed {seed} failed", len(missing))
                continue
            if CONTROLS in missing:
                run.finish(seed, CONTROLS, study.control_unit())
                tick(f"seed {seed}: {CONTROLS}", 1)
            for method in chosen:
                if method.name in missing:
                    tick(f"seed {seed}: {method.name}", 0)
                    unit, handles = study.run(method, task.random_method)
                    for handle in handles.values():
                        handle.save(run.handle_path(seed, method.name, handle.variable))
                    run.finish(seed, method.name, unit)
                    tick(f"seed {seed}: {method.name}", 1)
            if SWEEP in missing:
                tick(f"seed {seed}: {SWEEP}", 0)
                run.finish(seed, SWEEP, study.sweep_unit(task.epsilon_sweep()))
                tick(f"seed {seed}: {SWEEP}", 1)
    return run


@contextmanager
def progress(total: int, quiet: bool) -> Any:
    """A progress bar on a terminal, nothing elsewhere."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=errors, disable=quiet or not errors.is_terminal, transient=True) as bar:
        work = bar.add_task("starting", total=total)
        yield lambda said, done: bar.update(work, description=said, advance=done)


def library_versions() -> dict[str, str]:
    """Versions that can change a result."""
    versions = {"plot_ot": __version__}
    for name in ("torch", "numpy", "safetensors"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "unknown"
    return versions


@app.command()
def show(directory: Path, detail: Detail = False) -> None:
    """Print the tables of a run."""
    run = RunDirectory.read(directory)
    print_run(run, run.results(), detail)


def print_run(run: RunDirectory, results: Json, detail: bool = False) -> None:
    """Tables, verdicts, warnings, and where things are."""
    if not results["records"]:
        console.print(f"No finished unit in {run.path} yet.")
    shown = [
        tables.accuracy_table(results, console.width),
        tables.runtime_table(results),
        tables.verdict_table(results),
    ]
    more = [tables.selection_table(results), tables.cross_table(results)] if detail else []
    for table in [*shown, *more]:
        if table.row_count:
            console.print(table)
    for line in [*tables.verdict_sentences(results), *tables.bank_lines(results)]:
        console.print(escape(line), highlight=False)
    for failure in results["failures"]:
        console.print(f"[yellow]seed {failure['seed']} failed:[/yellow] {escape(failure['reason'])}")
    if detail:
        for line in tables.coupling_flags(run.couplings()):
            console.print(f"[yellow]coupling:[/yellow] {escape(line)}")
    console.print(f"Run directory: {run.path}", soft_wrap=True)


@app.command("list")
def list_all() -> None:
    """Tasks and their methods."""
    for make in TASKS.values():
        task = make()
        table = tables.plain_table(f"{task.name}: {task.summary}")
        table.add_column("method", style="bold", no_wrap=True)
        table.add_column("kind")
        table.add_column("what it does", overflow="fold")
        for m in task.methods().values():
            table.add_row(m.name, m.kind, m.summary)
        console.print(table)


@app.command()
def explain(
    task: Annotated[str, typer.Argument(help="A task of `plot-ot list`.")],
    sampler: Sampler = "uniform",
    strengths: Strengths = "union",
    size: Size = 1000,
    width: Width = 8,
    bits: Bits = 4,
    split: SplitName = "round-robin",
    seed: First = 0,
) -> None:
    """What a run would compute: sites, variants, forwards and memory, before spending the time."""
    tasks = {
        "heq": lambda: HierarchicalEquality(sampler, strengths, size),
        "addition": lambda: BinaryAddition(width, bits, split=split),
    }
    if task not in tasks:
        unknown("task", task, tasks)
    configured: Task = tasks[task]()
    outline = configured.outline(seed)
    console.print(repr(configured.causal_model()), highlight=False)
    console.print(tables.power_table(outline.splits.test))
    cost = footprint(outline.subject, outline.splits, outline.outputs)
    console.print(
        f"Recording: {cost.forwards:,} forwards (every distinct input once), {cost.bytes / 1e6:.1f} MB kept; "
        f"largest resumed batch {cost.batch_bytes / 1e6:.1f} MB."
    )
    [recording] = record(outline.subject, outline.splits.fit)
    table = tables.plain_table("Per seed")
    for column in ("method", "sites", "calibration variants", "rotations", "responses (at most)"):
        table.add_column(column, justify="left" if column == "method" else "right")
    for method in configured.methods().values():
        p = plan(method, recording, outline.splits)
        table.add_row(p.method, *(f"{x:,}" for x in (p.sites, p.variants, p.rotations, p.responses)))
    console.print(table)


def main() -> None:
    """Entry point: one line per error, no traceback unless PLOT_OT_DEBUG is set."""
    try:
        app()
    except PlotError as e:
        if os.environ.get("PLOT_OT_DEBUG"):
            raise
        errors.print(f"[red]error:[/red] {escape(str(e))}", highlight=False, soft_wrap=True)
        sys.exit(2)


if __name__ == "__main__":
    main()
