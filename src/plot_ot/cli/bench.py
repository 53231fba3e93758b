"""The first command on a new machine: what the rungs of the engine take on its device, and whether they agree."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from plot_ot.cli.common import AsJson, Debug, console, memory_bytes
from plot_ot.errors import unknown


def bench(
    model: Annotated[str, typer.Option(help="One of `plot-ot models`, a directory, a GGUF file or a hub id.")] = "tiny",
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, ... (default: cuda if there is one).")] = None,
    dtype: Annotated[
        str | None, typer.Option(help="float32, bfloat16 or float16 (default: as saved; float32 on a CPU).")
    ] = None,
    pairs: Annotated[int, typer.Option(min=8, help="Pairs of prompts in a bank.")] = 32,
    tokens: Annotated[int, typer.Option(min=2, help="Tokens of a prompt; they are random.")] = 32,
    cores: Annotated[int, typer.Option(min=1, help="Torch threads on the CPU.")] = 1,
    memory: Annotated[float, typer.Option(help="GB that a recording may take.")] = 4.0,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Time the engine on this machine's device, next to the plan, and check it against the hooked forward.

    Exit code 1 if resumed passes do not give what whole passes give.
    """
    from plot_ot.models.loading import DTYPES
    from plot_ot.planner.ladder import climb, device_by_name
    from plot_ot.tasks.language import load

    if dtype is not None and dtype not in DTYPES:
        unknown("dtype", dtype, DTYPES)
    where = device_by_name(device)
    found = climb(
        load(model, None, dtype, str(where), None).model,
        pairs=pairs,
        tokens=tokens,
        cores=cores,
        memory=memory_bytes(memory),
    )
    if as_json:
        typer.echo(json.dumps({"model": model, "pairs": pairs, "tokens": tokens, **found.json()}, indent=1))
    else:
        from plot_ot.cli.estimates import print_ladder

        console.print(f"{model} on {found.device} in {found.dtype}: {pairs} pairs of prompts of {tokens} tokens.")
        print_ladder(found)
    if not found.agrees:
        raise typer.Exit(1)
