"""A submission to MIB's causal-variable track: one command from a model and the benchmark's data to its folders."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from plot_ot.cli.common import AsJson, Debug, Quiet, Threads, console, errors, memory_bytes, printable
from plot_ot.cli.models import Adapter, Device, Memory, Revision
from plot_ot.errors import PlotError, unknown


def mib(
    model: Annotated[str, typer.Option(help="A hub id or a directory; its class says which of MIB's models it is.")],
    task: Annotated[str, typer.Option(help="ioi, mcqa, arc, arithmetic, ravel, or all that the model has.")] = "all",
    variable: Annotated[str | None, typer.Option(help="One variable of the task (default: all).")] = None,
    out: Annotated[Path, typer.Option(help="The submission: a folder for every cell.")] = Path("mib_submission"),
    data: Annotated[
        str | None, typer.Option(help="A folder, a file or a hub data set (default: the benchmark's own on the hub).")
    ] = None,
    cities: Annotated[Path | None, typer.Option(help="RAVEL's ravel_city_entity.json.")] = None,
    method: Annotated[str, typer.Option(help="plot-das (train where transport says), das, full-vector.")] = "plot-das",
    places: Annotated[int, typer.Option(min=1, help="Places that plot-das trains at.")] = 6,
    dimensions: Annotated[int, typer.Option(min=1, help="Directions of a trained subspace.")] = 16,
    epochs: Annotated[int, typer.Option(min=1, help="The most epochs of a training.")] = 40,
    pairs: Annotated[int, typer.Option(min=4, help="Training pairs of every family.")] = 200,
    test_pairs: Annotated[int, typer.Option(min=1, help="Test pairs of every family, for our own scores.")] = 100,
    new_tokens: Annotated[
        int | None, typer.Option(min=1, max=8, help="Tokens the model may write (default: what an answer takes).")
    ] = None,
    heads: Annotated[
        str | None, typer.Option(help="IOI's heads as layer.head, such as '7.3,8.10' (default: chosen by transport).")
    ] = None,
    head_count: Annotated[int, typer.Option(min=1, help="How many heads of IOI are chosen.")] = 4,
    adapter: Adapter = None,
    device: Device = None,
    revision: Revision = None,
    memory: Memory = 4.0,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the draws and the training.")] = 0,
    threads: Threads = 1,
    explain: Annotated[
        bool, typer.Option("--explain", help="Only estimate what it would take; no weights are loaded.")
    ] = False,
    machine: Annotated[
        str | None, typer.Option(help="With --explain: 'this' (measured now; the default), 'h100' or 'a100'.")
    ] = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Write a submission to the causal-variable track of MIB, the Mechanistic Interpretability Benchmark."""
    import torch

    from plot_ot.api import load_subject
    from plot_ot.mib import Settings, submit
    from plot_ot.mib.cells import cells_of
    from plot_ot.mib.data import read_cities
    from plot_ot.mib.residual import METHODS

    if method not in METHODS:
        unknown("method", method, METHODS)
    chosen = None if heads is None else _heads(heads)
    known = None if cities is None else read_cities(cities)
    torch.set_num_threads(threads)
    settings = Settings(
        data,
        known,
        method,
        places,
        dimensions,
        epochs,
        pairs,
        test_pairs,
        new_tokens,
        None,
        chosen,
        head_count,
        memory_bytes(memory),
        seed,
    )
    if machine is not None and not explain:
        raise PlotError("--machine is what --explain plans for. Give both, or choose where to run with --device.")
    if explain:
        _explain(model, task, variable, settings, machine or "this", threads, as_json)
        return
    where: dict[str, Any] = {k: v for k, v in {"device": device, "revision": revision}.items() if v}
    with errors.status(Text(f"Loading {printable(model)}")) if not quiet else errors.capture():
        loaded = load_subject(model, adapter=adapter, **where)
    cells = cells_of(type(loaded.model).__name__, task, variable)
    made = submit(
        loaded, cells, out, settings, (lambda _: None) if quiet else (lambda line: errors.tell("·", line, ""))
    )
    if as_json:
        print(json.dumps({_folder(scores): scores for scores in made}, indent=1, default=str))
    elif not quiet:
        table = Table("cell", "highest", "average", "measure")
        for scores in made:
            table.add_row(_folder(scores), f"{scores['highest']:.3f}", f"{scores['average']:.3f}", scores["measure"])
        console.print(table)
        console.print(f"Submission: {out} (our scores: {out / 'scores.json'})", highlight=False, soft_wrap=True)


def _folder(scores: dict[str, Any]) -> str:
    """The folder of the cell that some scores are of."""
    from plot_ot.mib import Cell

    return Cell(scores["task"], scores["model"], scores["variable"]).folder


def _explain(
    model: str, task: str, variable: str | None, settings: Any, machine: str, threads: int, as_json: bool
) -> None:
    """Estimate what the submission would take, without loading any weights."""
    import torch

    from plot_ot.cli.estimates import print_submission_plan
    from plot_ot.mib.costs import plan_submission
    from plot_ot.planner import machine_by_name

    dtype = "bfloat16" if machine != "this" or torch.cuda.is_available() else "float32"
    found = machine_by_name(machine, dtype=dtype, cores=threads)
    plan = plan_submission(model, found, settings, task=task, variable=variable, dtype=dtype)
    if plan.counted and not as_json:
        console.print("The model's tokenizer is not on this machine: prompts are counted in words and signs.")
    print_submission_plan(plan, found, as_json)


def _heads(text: str) -> list[tuple[int, int]]:
    """7.3,8.10 -> (7, 3), (8, 10)."""
    parts = [part.strip() for part in text.split(",")]
    if not all(re.fullmatch(r"\d{1,4}\.\d{1,4}", part) for part in parts):
        raise PlotError(f"--heads is {text!r}; expected layers and heads such as 7.3,8.10.")
    return [(int(part.partition(".")[0]), int(part.partition(".")[2])) for part in parts]
