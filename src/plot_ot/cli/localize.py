"""Localize the variables of a task file in a model: one command from a hypothesis to handles and a report."""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.text import Text

from plot_ot.cli.common import (
    AsJson,
    Controls,
    Debug,
    Detail,
    Filter,
    HoldOut,
    Private,
    Quiet,
    Threads,
    console,
    errors,
    filter_of,
    layer_numbers,
    memory_bytes,
    names_of,
    printable,
)
from plot_ot.cli.models import Adapter, Device, Memory, Revision
from plot_ot.errors import PlotError, unknown

LEAST = 20
"""Pairs per bank."""
Numbers = Annotated[str | None, typer.Option(help="Blocks to look at, such as 10-20 or 3,5,7 (default: all).")]
Kinds = Annotated[
    str, typer.Option(help="block_output, attention_output, mlp_output, head_output; several with commas.")
]


def localize_task(
    task: Annotated[
        Path,
        typer.Argument(
            metavar="TASK.py",
            help="Your own Python file, as for `plot-ot check`. It may define `subject`, a network of your own, in the "
            "place of --model. It is imported: its code runs.",
        ),
    ],
    model: Annotated[
        str | None, typer.Option(help="A name of `plot-ot models`, a hub id, a directory or a GGUF file.")
    ] = None,
    adapter: Adapter = None,
    pairs: Annotated[Path | None, typer.Option(help="Pairs or inputs in a .jsonl or .csv file.")] = None,
    method: Annotated[str, typer.Option(help="plot, plot-das, plot-layered or das.")] = "plot",
    layers: Numbers = None,
    kinds: Kinds = "block_output",
    size: Annotated[int | None, typer.Option(min=LEAST, help="Pairs per bank, where they are drawn.")] = None,
    budget: Annotated[
        str | None,
        typer.Option(help="auto: banks grow, up to --size, until every variable has its answer. A number is --size."),
    ] = None,
    filter_: Filter = None,
    hold_out: HoldOut = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the splits.")] = 0,
    out: Annotated[Path, typer.Option(help="Run directory: handles, results and report.html.")] = Path("runs/localize"),
    device: Device = None,
    revision: Revision = None,
    memory: Memory = 4.0,
    threads: Threads = 1,
    private: Private = False,
    controls: Controls = "standard",
    detail: Detail = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Find where the variables of a task file live in a model; write handles and a report."""
    import torch

    from plot_ot.abstract import Hypothesis, read_pairs
    from plot_ot.api import METHODS, load_subject, localize
    from plot_ot.cli.show import print_json, print_run
    from plot_ot.cli.task_files import data_of, hypothesis_of, load_task, load_tokenizer, own_subject, require_file
    from plot_ot.files.run_reading import read_run

    if (out / "manifest.json").exists():
        raise PlotError(f"{out} already holds a run. Choose another --out, or delete it.")
    require_file(task)
    if method not in METHODS:
        unknown("method", method, METHODS)
    growing = _budget(budget)
    of_blocks, room = {"layers": layer_numbers(layers)} if layers else {}, memory_bytes(memory)
    chosen = filter_of(filter_)
    torch.set_num_threads(threads)
    with redirect_stdout(sys.stderr):  # what the task prints is not what we print
        module = load_task(task)
        hypothesis, given = hypothesis_of(module, task), pairs or data_of(module, task)
    subject: Any
    options: dict[str, Any] = {}
    if model is not None:
        if not isinstance(hypothesis, Hypothesis):
            raise PlotError(f"{task} defines a bare CausalModel; a language model needs a Hypothesis with a template.")
        given = read_pairs(given)
        rows, _ = given.rows(hypothesis)
        if not Path(model).expanduser().is_file():  # a GGUF file has its tokenizer inside
            tokenizer = load_tokenizer(model)  # what it refuses is refused before any weights are loaded
            hypothesis.answer_tokens(tokenizer)
            hypothesis.render(rows[:1], tokenizer)
        where: dict[str, Any] = {k: v for k, v in {"device": device, "revision": revision}.items() if v}
        with errors.status(Text(f"Loading {printable(model)}")) if not quiet else errors.capture():
            subject = load_subject(model, adapter=adapter, **where)
        options = {"kinds": tuple(k.strip() for k in kinds.split(",")), "memory": room, **of_blocks}
    else:
        subject = own_subject(module, task, of_blocks=bool(layers) or kinds != "block_output")
    result = localize(
        subject,
        hypothesis,
        given,
        method=method,
        size=size,
        budget=growing,
        filter=chosen,
        hold_out=names_of(hold_out),
        seed=seed,
        controls=controls,
        progress=not quiet,
        **options,
    )
    report = result.save(out, private=private)
    if as_json:
        print_json(read_run(out))
    elif not quiet:
        print_run(read_run(out), detail)
        for note in result.notes:
            console.tell("note:", note, "yellow")
        console.print(f"Handles: {out / 'handles'}\nReport: {report}", highlight=False, soft_wrap=True)


def _budget(text: str | None) -> int | Literal["auto"] | None:
    """--budget: `auto`, or a number of pairs."""
    if text is None:
        return None
    if text == "auto":
        return "auto"
    if not text.isdecimal() or int(text) < LEAST:
        raise PlotError(f"--budget is 'auto', or at least {LEAST} pairs per bank; found {text!r}.")
    return int(text)
