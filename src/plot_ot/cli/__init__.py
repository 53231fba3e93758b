"""The command line: run a study, look at a run, see what would be computed."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any

import typer

from plot_ot.cli import bench, check, compare, explain, localize, mib, models, run, show
from plot_ot.cli.common import PlainGroup, PlainHelp, console, errors
from plot_ot.errors import CouplingWarning, PlotError, PlotWarning
from plot_ot.version import __version__

app = typer.Typer(
    cls=PlainGroup,
    help="Where in this network does this variable live, and how do I control it?",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
OWN, STUDIES, RUNS = "Your own hypothesis", "The studies that come with the package", "What a run found"
COMMANDS: list[tuple[str, str, str, Callable[..., None]]] = [
    (OWN, "check", "Check a task file; no model is loaded.", check.check_task),
    (OWN, "localize", "Find where its variables live in a model.", localize.localize_task),
    (OWN, "compare", "Which of several hypotheses does it fit?", compare.compare_tasks),
    (STUDIES, "list", "List the tasks and their methods.", explain.list_all),
    (STUDIES, "models", "List the language models known by name.", models.models),
    (STUDIES, "explain", "Estimate what a study would cost.", explain.explain),
    (STUDIES, "mib", "Write a submission to the benchmark MIB.", mib.mib),
    (STUDIES, "bench", "Time the engine on this machine.", bench.bench),
    (RUNS, "show", "Say in sentences what a run found.", show.show),
    (RUNS, "report", "Write its report as one HTML page.", show.report),
    (RUNS, "figures", "Write the paper's figures from it.", show.figures),
    (RUNS, "table", "Print the paper's tables from it.", show.table),
    (RUNS, "view", "Serve runs to this machine's browser.", show.view),
]
"""Every command with the line that `plot-ot -h` has for it: short enough for a terminal of 60 columns."""
for panel, name, line, command in COMMANDS:
    app.command(name, cls=PlainHelp, rich_help_panel=panel, short_help=line)(command)
app.add_typer(run.app, name="run", rich_help_panel=STUDIES, short_help="Run one of the studies.")


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


def _warn(usual: Callable[..., None], message: Warning | str, category: type[Warning], *where: Any) -> None:
    """Our own warnings are a line, without the place in the code that they come from."""
    if issubclass(category, PlotWarning):
        errors.tell("warning:", str(message), "yellow")
    else:
        usual(message, category, *where)


def main() -> None:
    """Entry point: one line per error, no traceback unless PLOT_OT_DEBUG is set."""
    warnings.simplefilter("ignore", CouplingWarning)  # flags are printed with the results, not between them
    warnings.showwarning = partial(_warn, warnings.showwarning)
    try:
        app(prog_name="plot-ot")
    except PlotError as e:
        if os.environ.get("PLOT_OT_DEBUG"):
            raise
        errors.tell("error:", str(e), "red")
        sys.exit(2)
