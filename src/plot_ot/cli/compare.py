"""Compare the hypotheses of several task files on one model."""

from __future__ import annotations

import json
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Annotated, Any

import typer

from plot_ot.cli.common import (
    Debug,
    Filter,
    HoldOut,
    Threads,
    console,
    filter_of,
    layer_numbers,
    memory_bytes,
    names_of,
)
from plot_ot.cli.localize import Kinds, Numbers
from plot_ot.cli.models import Adapter, Device, Memory, Revision
from plot_ot.errors import PlotError


def compare_tasks(
    tasks: Annotated[
        list[Path],
        typer.Argument(
            metavar="TASK.py...",
            help="Your own Python files, as for `plot-ot check`, each with a `hypothesis` about the same inputs. The "
            "first may define `subject`, a network of your own, in the place of --model. They are imported: their code "
            "runs.",
        ),
    ],
    model: Annotated[
        str | None, typer.Option(help="A name of `plot-ot models`, a hub id, a directory or a GGUF file.")
    ] = None,
    adapter: Adapter = None,
    inputs: Annotated[
        Path | None, typer.Option(help="Inputs in a .jsonl or .csv file, instead of the first task file's.")
    ] = None,
    method: Annotated[str, typer.Option(help="One of: plot, plot-das, plot-layered, das.")] = "plot",
    finalists: Annotated[
        int | None, typer.Option(min=1, help="How many hypotheses get the whole search after a quick look at all.")
    ] = 2,
    layers: Numbers = None,
    kinds: Kinds = "block_output",
    size: Annotated[int | None, typer.Option(min=20, help="Pairs per bank.")] = None,
    filter_: Filter = None,
    hold_out: HoldOut = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the splits.")] = 0,
    device: Device = None,
    revision: Revision = None,
    memory: Memory = 4.0,
    threads: Threads = 1,
    explain: Annotated[
        bool, typer.Option("--explain", help="Only estimate what it would compute, and about how long it would take.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
    debug: Debug = False,
) -> None:
    """Which of several hypotheses does a model implement? "None of them" is an answer."""
    import torch

    from plot_ot.api import load_subject
    from plot_ot.cli.task_files import data_of, hypothesis_of, load_task, name_of, own_subject, require_file
    from plot_ot.comparing import compare

    for task in tasks:
        require_file(task)
    if len(tasks) < 2:
        raise PlotError("Give at least two task files, one for each hypothesis. For one, use plot-ot localize.")
    twice = next((task for k, task in enumerate(tasks) if task in tasks[:k]), None)
    if twice is not None:
        raise PlotError(f"{twice} is given twice. Give a file for each hypothesis.")
    places: dict[str, Any] = {"kinds": tuple(k.strip() for k in kinds.split(",")), "memory": memory_bytes(memory)}
    places |= {"layers": layer_numbers(layers)} if layers else {}
    asked, held = filter_of(filter_), names_of(hold_out)
    settings = {"method": method, "size": size, "hold_out": held, "seed": seed}
    torch.set_num_threads(threads)
    if explain:
        _explain(tasks, model, inputs, places, asked, settings, finalists, threads, as_json)
        return
    with redirect_stdout(sys.stderr):  # what the tasks print is not what we print
        modules = [load_task(task) for task in tasks]
        hypotheses = [hypothesis_of(module, task) for module, task in zip(modules, tasks, strict=True)]
        given = inputs or data_of(modules[0], tasks[0], "--inputs FILE")
        subject: Any
        if model is not None:
            where: dict[str, Any] = {k: v for k, v in {"device": device, "revision": revision}.items() if v}
            subject = load_subject(model, adapter=adapter, **where)
        else:
            subject = own_subject(modules[0], tasks[0], of_blocks=bool(layers) or kinds != "block_output")
        rivals = dict(zip(name_of(hypotheses, tasks), hypotheses, strict=True))
        chosen = {**settings, "filter": asked, **({} if model is None else places)}
        found = compare(subject, rivals, given, finalists=finalists, **chosen)
    if as_json:
        typer.echo(json.dumps(found.to_json(), indent=2, ensure_ascii=False))
    else:
        console.print(str(found), soft_wrap=True)


def _explain(
    tasks: list[Path],
    model: str | None,
    inputs: Path | None,
    places: dict[str, Any],
    asked: Any,
    settings: dict[str, Any],
    finalists: int | None,
    threads: int,
    as_json: bool,
) -> None:
    """Estimate what comparing would compute, without loading any weights."""
    from plot_ot.cli.estimates import print_comparison_plan
    from plot_ot.cli.planned_files import PlannedFiles
    from plot_ot.localizing import chosen_filter
    from plot_ot.planner import machine_by_name

    chosen_filter(asked, tokenizer=model)  # a model by name has a vocabulary; no filter changes the cost
    files = PlannedFiles.of(tasks, model, inputs, "float32", **places)
    plan = files.comparison(machine_by_name("this", cores=threads), **settings)
    print_comparison_plan(plan, finalists, as_json)
