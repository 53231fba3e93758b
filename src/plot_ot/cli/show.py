"""Look at runs: tables in the terminal, the report, figures and tables for a paper, and a live view."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.padding import Padding
from rich.table import Table

from plot_ot.cli.common import AsJson, Detail, console, printable
from plot_ot.errors import PlotError, unknown

if TYPE_CHECKING:  # commands import what needs torch when they run
    from plot_ot.files.run_reading import Reading
    from plot_ot.files.writing import Json
    from plot_ot.tasks import Task

Directory = Annotated[Path, typer.Argument(help="A run directory.")]
Directories = Annotated[list[Path], typer.Argument(help="Run directories.")]


def show(directory: Directory, detail: Detail = False, as_json: AsJson = False) -> None:
    """Say in sentences what a run found, with its accuracies; --detail prints every table."""
    from plot_ot.files.run_reading import read_run

    run = read_run(directory)
    if as_json:
        print_json(run)
    else:
        print_run(run, detail, accuracies=True)


def print_json(run: Reading) -> None:
    """Everything that is known about a run: findings in words and numbers, and all lists of results."""
    from plot_ot.files.writing import to_json
    from plot_ot.report.findings import findings
    from plot_ot.report.summary import best_method

    methods = dict.fromkeys(v["method"] for v in run.results["verdicts"])
    told = {
        "directory": str(run.path),
        "config": run.config,
        "best_method": best_method(run),
        "findings": [f.plain() for m in methods for f in findings(run, m)],
        "problems": run.problems,
        "results": run.results,
    }
    print(to_json(told))


def print_run(run: Reading, detail: bool = False, accuracies: bool = False) -> None:
    """What was found in plain sentences, warnings, and where things are; tables where they are wanted."""
    from plot_ot.report import tables

    results = run.results
    for problem in run.problems:
        console.tell("warning:", problem, "yellow")
    if not results["records"]:
        console.print(f"No finished unit in {run.path} yet.")
    makers: list[Callable[[], Table]] = []
    if detail or accuracies:
        makers += [lambda: tables.accuracy_table(results, console.width)]
    if detail:
        makers += [
            lambda: tables.runtime_table(results),
            lambda: tables.verdict_table(results),
            lambda: tables.selection_table(results),
            lambda: tables.cross_table(results),
        ]
    for make in makers:
        _guarded(lambda make=make: _print_table(run, make()))  # type: ignore[misc]
    if detail:
        _guarded(lambda: _print_lines(tables.bank_lines(results)))
        _guarded(lambda: _print_lines(f"Coupling warning: {line}" for line in tables.coupling_flags(run.couplings)))
    _guarded(lambda: _print_findings(run))
    for failure in results["failures"]:
        console.tell(f"seed {failure['seed']} failed:", failure["reason"], "yellow")
    if run.gaps_sentence and not makers:
        console.tell("note:", run.gaps_sentence, "yellow")
    if not detail and results["records"]:
        console.print(f"All tables: plot-ot show {run.path} --detail", soft_wrap=True)
    console.print(f"Run directory: {run.path}", soft_wrap=True)


def _print_findings(run: Reading) -> None:
    """A paragraph per variable on what the best method found."""
    from plot_ot.report.findings import findings
    from plot_ot.report.sections import about
    from plot_ot.report.summary import best_method, judged_methods, why_best

    best = best_method(run)
    found = findings(run, best) if best else []
    if best is None or not found:
        return
    console.print(about(run))
    if len(judged_methods(run)) > 1:
        console.print(f"This is what {best} found. {why_best(run, best)}")
    for f in found:
        console.print()
        console.tell(f"{f.variable}:", str(f.status), "bold")
        console.print(Padding(printable(f.told), (0, 0, 0, 2)))
    console.print()
    console.print(
        "A pair can tell if swapping the variable changes its answer, and copying the other input's answer or swapping "
        "another variable would give a different one. Kinds of pairs count equally."
    )


def _guarded(part: Callable[[], None]) -> None:
    """Print one part; damaged results must not cost the reader the parts that can be shown."""
    from plot_ot.files.run_reading import UNEXPECTED

    try:
        part()
    except UNEXPECTED as e:
        console.tell(
            "warning:", f"a part cannot be shown: the results are not as expected ({type(e).__name__}).", "yellow"
        )


def _print_table(run: Reading, table: Table) -> None:
    if table.row_count:
        table.caption = run.gaps_sentence or None
        console.print(table)


def _print_lines(lines: Iterable[str]) -> None:
    for line in lines:
        console.print(line)


def report(
    directories: Directories,
    out: Annotated[
        Path | None, typer.Option(help="The page (default: report.html in the run, comparison.html for several runs).")
    ] = None,
) -> None:
    """Write the report of a run as one HTML page that needs nothing else, or compare several runs."""
    from plot_ot.report.page import write_page

    console.print(f"Report: {write_page(directories, out)}", soft_wrap=True, highlight=False)


def figures(
    directory: Directory,
    format: Annotated[str, typer.Option(help="pdf, png or svg; several with commas.")] = "pdf",
    out: Annotated[Path | None, typer.Option(help="Folder (default: figures in the run directory).")] = None,
) -> None:
    """Write the paper's figures from a run, in one style, with fonts embedded."""
    from plot_ot.files.run_layout import refuse_links
    from plot_ot.files.run_reading import read_run
    from plot_ot.report.export import export_figures

    run = read_run(directory)
    refuse_links(run.path)
    kinds = [k.strip() for k in format.split(",") if k.strip()]
    folder = out or run.path / "figures"
    written = export_figures(run, kinds, folder)
    task = configured(run.config)
    if task:
        causal = [folder / f"causal.{kind}" for kind in kinds]
        for path in causal:
            task.causal_model().draw(path)
        written += causal
    if not written:
        raise PlotError(f"There is nothing to draw in {directory} yet: it has no finished unit.")
    for path in written:
        console.print(str(path), soft_wrap=True, highlight=False)


def configured(config: Json) -> Task | None:
    """The task of a run, as it was configured; None for one that is not ours."""
    from plot_ot.tasks import TASKS

    make = TASKS.get(str(config.get("task")))
    if make is None:
        return None
    try:
        return make(**{k: v for k, v in config.items() if k in getattr(make, "__dataclass_fields__", {})})
    except (TypeError, PlotError):  # options of another version
        return None


def table(
    directories: Directories,
    format: Annotated[str, typer.Option(help="latex, markdown, csv or json.")] = "latex",
    every: Annotated[bool, typer.Option("--all", help="Every method of the run, not only the paper's.")] = False,
    out: Annotated[Path | None, typer.Option(help="Write to a file instead of printing.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The same as --format json.")] = False,
) -> None:
    """Print the paper's tables with a run's numbers; runs of the adder with several widths stand side by side."""
    from plot_ot.files.run_reading import read_run
    from plot_ot.files.writing import write_atomically
    from plot_ot.report.paper_tables import FORMATS, paper_tables, render_all

    format = "json" if as_json else format
    if format not in FORMATS:
        unknown("table format", format, FORMATS)
    text = render_all(paper_tables([read_run(d) for d in directories], every), format)
    if out:
        write_atomically(out, text.encode())
        console.print(f"Tables: {out}", soft_wrap=True, highlight=False)
    else:
        print(printable(text), end="")  # a file's content, not a message: no wrapping, no markup


def view(
    directory: Annotated[Path, typer.Argument(help="The folder the runs are in.")] = Path("runs"),
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port on this machine (0: any that is free).")] = 8765,
    open_browser: Annotated[bool, typer.Option("--open", help="Also open the browser.")] = False,
) -> None:
    """Serve the runs of a folder to this machine's browser, refreshing while runs are going on."""
    from plot_ot.report.serve import Server

    with Server(directory, port) as server:
        console.print(f"Runs in {directory}: {server.url} (Ctrl-C to stop)", soft_wrap=True, highlight=False)
        if open_browser:
            typer.launch(server.url)
        try:
            server.serve_forever(poll_interval=0.2)
        except KeyboardInterrupt:
            console.print("Stopped.")
