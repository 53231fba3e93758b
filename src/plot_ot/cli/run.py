"""Run a study from the command line, then draw its figures, write its report and say what was found."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from plot_ot.cli.common import (
    Address,
    AsJson,
    Bits,
    Controls,
    Debug,
    Detail,
    EngineName,
    Figures,
    First,
    Methods,
    Out,
    PlainGroup,
    PlainHelp,
    Private,
    Quiet,
    RecipeName,
    Sampler,
    Seeds,
    Size,
    SplitName,
    StartOver,
    Strengths,
    Threads,
    Width,
    Workers,
    console,
    errors,
)

if TYPE_CHECKING:
    from plot_ot.tasks import Task

app = typer.Typer(cls=PlainGroup, help="Run a study and write a run directory.", no_args_is_help=True)


@app.command("heq", cls=PlainHelp, short_help="Hierarchical equality, the first study.")
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
    detail: Detail = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
    engine: EngineName = "process",
    address: Address = None,
    workers: Workers = None,
    start_over: StartOver = False,
    private: Private = False,
    controls: Controls = "full",
    debug: Debug = False,
) -> None:
    """Hierarchical equality: the paper's first study."""
    from plot_ot.tasks import HierarchicalEquality

    task = HierarchicalEquality(sampler, strengths, size)
    crew = engine, address, workers
    finish(
        task,
        methods,
        seeds,
        first_seed,
        out,
        threads,
        sweep,
        figures,
        quiet,
        detail,
        crew,
        start_over,
        private,
        controls,
        as_json,
    )


@app.command("addition", cls=PlainHelp, short_help="Binary addition, the second study.")
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
    as_json: AsJson = False,
    quiet: Quiet = False,
    engine: EngineName = "process",
    address: Address = None,
    workers: Workers = None,
    start_over: StartOver = False,
    private: Private = False,
    controls: Controls = "full",
    debug: Debug = False,
) -> None:
    """Binary addition: the paper's second study."""
    from plot_ot.tasks import BinaryAddition

    task = BinaryAddition(width, bits, recipe, split, bases)
    crew = engine, address, workers
    finish(
        task,
        methods,
        seeds,
        first_seed,
        out,
        threads,
        False,
        figures,
        quiet,
        detail,
        crew,
        start_over,
        private,
        controls,
        as_json,
    )


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
    start_over: bool = False,
    private: bool = False,
    controls: str = "full",
    as_json: bool = False,
) -> None:
    """Run what is missing by an engine (its name, address, workers), draw, write the report, print."""
    import torch

    from plot_ot.cli.engine_options import engine_by_name
    from plot_ot.cli.progress import Watch
    from plot_ot.cli.show import print_json, print_run
    from plot_ot.files.privacy import shared_command
    from plot_ot.report.page import write_page
    from plot_ot.studies.running import run_study

    names = [n.strip() for n in methods.split(",") if n.strip()] if methods else None
    chosen = range(first_seed, first_seed + seeds)
    torch.set_num_threads(threads)
    try:
        with engine_by_name(*crew, threads) as engine, Watch(errors, quiet) as watch:
            run = run_study(
                task,
                seeds=chosen,
                methods=names,
                out=out,
                engine=engine,
                progress=watch,
                sweep=sweep,
                start_over=start_over,
                private=private,
                controls=controls,
                command=shared_command(["plot-ot", *sys.argv[1:]]),
            )
    except KeyboardInterrupt:
        errors.print("Interrupted. Run the same command again to continue where it stopped.")
        raise typer.Exit(130) from None
    if figures:
        from plot_ot.report.figures import draw_figures  # matplotlib is slow to import; other commands do without

        draw_figures(run)
        for kind in ("png", "pdf"):
            task.causal_model().draw(run.path / "figures" / f"causal.{kind}")
    report = write_page([run.path])
    if as_json:
        print_json(run)
    elif not quiet:
        print_run(run, detail)
        console.print(f"Report: {report}", soft_wrap=True, highlight=False)
    if run.results["failures"] and not run.results["records"]:
        raise typer.Exit(1)  # a script should not take this for a study
