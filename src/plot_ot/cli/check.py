"""Check a task file before any network is loaded."""

from __future__ import annotations

import json
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Annotated

import typer

from plot_ot.cli.common import Debug, HoldOut, names_of
from plot_ot.errors import PlotError


def check_task(
    task: Annotated[
        Path,
        typer.Argument(
            metavar="TASK.py",
            help="Your own Python file. It defines `hypothesis` (a Hypothesis or a CausalModel) and, if you like, "
            "`pairs` or `inputs`. It is imported: its code runs.",
        ),
    ],
    pairs: Annotated[
        Path | None, typer.Option(help="Pairs or inputs in a .jsonl or .csv file, instead of the task file's.")
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(
            help="Check answers and positions with this tokenizer: directory, hub id or model name. No weights."
        ),
    ] = None,
    hold_out: HoldOut = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
    debug: Debug = False,
) -> None:
    """Check a task file, its pairs, labels and answers before any network is loaded. Exit code 1 if it is not ready."""
    from plot_ot.checking import Checkup, check
    from plot_ot.cli.checkup import print_checkup
    from plot_ot.cli.task_files import data_of, hypothesis_of, load_task, load_tokenizer, require_file

    require_file(task)
    found = Checkup()
    with redirect_stdout(sys.stderr):  # what the task prints is not what we print
        words = load_tokenizer(tokenizer) if tokenizer else None
        try:
            module = load_task(task)
            hypothesis, given = hypothesis_of(module, task), pairs or data_of(module, task)
            found = check(hypothesis, given, tokenizer=words, hold_out=names_of(hold_out), strict=debug)
        except PlotError as e:
            if debug:
                raise
            found.problems.append(str(e))
    if as_json:
        typer.echo(json.dumps({"task": str(task), **found.to_json()}, indent=2, ensure_ascii=False))
    else:
        print_checkup(found)
    if not found.ready:
        raise typer.Exit(1)
