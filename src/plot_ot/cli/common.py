"""What all commands share: the consoles they print to, and options that mean the same everywhere."""

from __future__ import annotations

import math
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text
from typer.core import TyperCommand, TyperGroup

from plot_ot.cli.fitting import fitted
from plot_ot.errors import PlotError, unknown


class Terminal(Console):
    """A console that shows text as it is: no markup, no links and no control characters of others in it."""

    def render_str(self, text: str, **options: Any) -> Text:
        """Every string that is printed, in a line or in a table, comes through here."""
        return super().render_str(printable(text), **{**options, "markup": False, "emoji": False, "highlight": False})

    def print(self, *objects: Any, **options: Any) -> None:
        """Print; tables that are too wide become several."""
        for o in objects:
            if isinstance(o, Table):
                for part in fitted(o, self.width):
                    super().print(part, **options)
        rest = [o for o in objects if not isinstance(o, Table)]
        if rest or not objects:
            super().print(*rest, **options)

    def tell(self, label: str, text: str, style: str) -> None:
        """A line that begins with a coloured word."""
        self.print(Text.assemble((printable(label), style), f" {printable(text)}" if text else ""), soft_wrap=True)


class PlainHelp(TyperCommand):
    """A command whose help has one column of options and one of sentences: it fits 60 columns, and has no box."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Without Rich, whose table has a column for types and leaves ten letters to the sentences."""
        self.rich_markup_mode = None
        super().format_help(ctx, formatter)
        formatter.buffer[:] = [
            text.replace("\\[", "[") for text in formatter.buffer
        ]  # older Typers write for Rich anyway


class PlainGroup(TyperGroup):
    """Commands in groups, a line each, in the same plain way."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Without Rich."""
        self.rich_markup_mode = None
        super().format_help(ctx, formatter)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Each group of commands under its name."""
        groups: dict[str, list[tuple[str, str]]] = {}
        for name in self.list_commands(ctx):
            command: Any = self.get_command(ctx, name)
            group = command.rich_help_panel if isinstance(command.rich_help_panel, str) else "Commands"
            groups.setdefault(group, []).append((name, command.short_help or command.get_short_help_str()))
        for group, lines in groups.items():
            with formatter.section(group):
                formatter.write_dl(lines)


def printable(text: str) -> str:
    """The text with control characters, and marks that turn the direction of writing, as escapes anyone can read."""
    return "".join(
        c if c == "\n" or c.isprintable() or c in "\t\u00a0" else c.encode("unicode_escape").decode() for c in text
    )


console = Terminal(width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else 120)
errors = Terminal(stderr=True)

Methods = Annotated[str | None, typer.Option(help="Comma-separated methods (default: all; see `plot-ot list`).")]
Seeds = Annotated[int, typer.Option(metavar="N", min=1, help="Number of seeds.")]
First = Annotated[int, typer.Option(metavar="N", min=0, help="The first seed.")]
Out = Annotated[Path, typer.Option(help="Run directory; an interrupted run there is continued.")]
Sampler = Annotated[str, typer.Option(help="Input rows: 'uniform' (the paper's) or 'balanced' over (z_WX, z_YZ).")]
Strengths = Annotated[str, typer.Option(help="λ grid: 'units' 1..80, 'tenths' 0.1..8.0, or their 'union'.")]
Size = Annotated[int, typer.Option(metavar="N", help="Pairs per bank.")]
PairCount = Annotated[
    int, typer.Option(metavar="N", help="Sensitive pairs per variable and bank, and as many invariant ones.")
]
Threads = Annotated[
    int,
    typer.Option(
        metavar="N", min=1, help="Torch threads at most; more than one helps large networks on an idle machine."
    ),
]
Figures = Annotated[bool, typer.Option(help="Write the paper's figures (PNG and PDF).")]
Detail = Annotated[
    bool, typer.Option(help="Also print every table: accuracies, seconds, verdicts, choices, couplings.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print everything as JSON, and nothing else.")]
Width = Annotated[int, typer.Option(metavar="N", help="Width of the recurrent state.")]
Bits = Annotated[int, typer.Option(metavar="N", help="Bits per number.")]
RecipeName = Annotated[str, typer.Option("--recipe", help="Training: 'paper' (250 epochs) or 'first-exact'.")]
SplitName = Annotated[str, typer.Option("--split", help="Bases: 'round-robin' (the paper's) or 'proportional'.")]
EngineName = Annotated[str, typer.Option("--engine", help="Execution engine: this 'process', or workers on 'ray'.")]
Address = Annotated[
    str | None,
    typer.Option(help="The Ray cluster's address (default: RAY_ADDRESS, or a cluster of this machine alone)."),
]
Workers = Annotated[
    int | None, typer.Option(metavar="N", min=1, help="Ray workers (default: one per GPU, or per core).")
]
StartOver = Annotated[
    bool,
    typer.Option("--start-over", help="Move the run in --out to superseded/ and begin again; the manifest says so."),
]
Private = Annotated[bool, typer.Option("--private", help="Keep this machine and the commands out of the run.")]
HoldOut = Annotated[
    str | None,
    typer.Option(help="Inputs whose values (cities, names) must not stand in two splits; several with commas."),
]
Filter = Annotated[
    str | None,
    typer.Option(
        "--filter",
        help="Which inputs count: vocabulary (the model's own next token is right; its default), candidates (the "
        "best of the answers is right) or none.",
    ),
]
Controls = Annotated[
    str,
    typer.Option(help="standard: random handles and shuffled values; full: also a re-initialised network."),
]


def _show_tracebacks(asked: bool) -> bool:
    if asked:
        os.environ["PLOT_OT_DEBUG"] = "1"
    return asked


Debug = Annotated[bool, typer.Option("--debug", callback=_show_tracebacks, help="Show the traceback of an error.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print no progress and no tables.")]


def names_of(text: str | None) -> list[str] | None:
    """a,b -> a and b; nothing for nothing."""
    return None if text is None else [name.strip() for name in text.split(",") if name.strip()]


def filter_of(name: str | None) -> Any:
    """--filter: one of the filters' names."""
    from plot_ot.abstract.admission import FILTERS

    if name is not None and name not in FILTERS:
        unknown("filter", name, FILTERS)
    return name


def memory_bytes(gigabytes: float) -> int:
    """--memory in bytes."""
    if not 1e-9 <= gigabytes < math.inf:
        raise PlotError(f"--memory is in GB, above zero; found {gigabytes:g}. The default is 4.")
    return int(gigabytes * 1e9)


def layer_numbers(text: str, option: str = "--layers") -> list[int]:
    """10-12,20 -> 10, 11, 12, 20."""
    found: list[int] = []
    try:
        for part in text.split(","):
            low, _, high = part.strip().partition("-")
            if int(high or low) < int(low):
                raise ValueError
            found += range(int(low), int(high or low) + 1)
    except ValueError:
        raise PlotError(f"{option} is {text!r}; expected numbers such as 10-20 or 3,5,7.") from None
    return found
