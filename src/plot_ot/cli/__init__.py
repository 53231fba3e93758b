"""The command line: run a study, look at a run, see what would be computed."""

from __future__ import annotations

import os
import sys
import warnings
from typing import Annotated

import typer

from plot_ot.cli import bench, check, compare, explain, localize, mib, models, run, show
from plot_ot.cli.common import console, errors
from plot_ot.errors import CouplingWarning, PlotError
from plot_ot.version import __version__

app = typer.Typer(
    help="Where in this network does this variable live, and how do I control it?",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
OWN, STUDIES, RUNS = "Your own hypothesis", "The studies that come with the package", "What a run found"
app.command("check", rich_help_panel=OWN)(check.check_task)
app.command("localize", rich_help_panel=OWN)(localize.localize_task)
app.command("compare", rich_help_panel=OWN)(compare.compare_tasks)
app.command("list", rich_help_panel=STUDIES)(explain.list_all)
app.command(rich_help_panel=STUDIES)(models.models)
app.command(rich_help_panel=STUDIES)(explain.explain)
app.add_typer(run.app, name="run", rich_help_panel=STUDIES)
app.command("mib", rich_help_panel=STUDIES)(mib.mib)
app.command(rich_help_panel=STUDIES)(bench.bench)
for command in (show.show, show.report, show.figures, show.table, show.view):
    app.command(rich_help_panel=RUNS)(command)


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


def main() -> None:
    """Entry point: one line per error, no traceback unless PLOT_OT_DEBUG is set."""
    warnings.simplefilter("ignore", CouplingWarning)  # flags are printed with the results, not between them
    try:
        app(prog_name="plot-ot")
    except PlotError as e:
        if os.environ.get("PLOT_OT_DEBUG"):
            raise
        errors.tell("error:", str(e), "red")
        sys.exit(2)
