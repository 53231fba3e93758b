"""Look at runs: their tables in the terminal."""

from __future__ import annotations

from pathlib import Path

from rich.markup import escape

from plot_ot.cli.common import Detail, console
from plot_ot.report import tables
from plot_ot.runs import Json, RunDirectory


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
