"""What there is to run, and what running it would compute."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import typer

from plot_ot.cli.common import Bits, First, Sampler, Size, SplitName, Strengths, Width, console
from plot_ot.errors import unknown
from plot_ot.plan import footprint, hollow, plan
from plot_ot.report import tables
from plot_ot.tasks import TASKS, BinaryAddition, HierarchicalEquality, IndirectObject, MultipleChoice, Task

Model = Annotated[str | None, typer.Option(help="Language model, as in `plot-ot run mcqa`.")]
Adapter = Annotated[str | None, typer.Option(help="Its adapter.")]


def list_all() -> None:
    """Tasks and their methods."""
    for make in TASKS.values():
        task = make()
        table = tables.plain_table(f"{task.name}: {task.summary}")
        table.add_column("method", style="bold", no_wrap=True)
        table.add_column("kind")
        table.add_column("what it does", overflow="fold")
        for m in task.catalogue().values():
            table.add_row(m.name, m.kind, m.summary)
        console.print(table)


def explain(
    task: Annotated[str, typer.Argument(help="A task of `plot-ot list`.")],
    sampler: Sampler = "uniform",
    strengths: Strengths = "union",
    size: Size = 1000,
    width: Width = 8,
    bits: Bits = 4,
    split: SplitName = "round-robin",
    model: Model = None,
    adapter: Adapter = None,
    seed: First = 0,
) -> None:
    """What a run would compute: sites, variants, forwards and memory, before spending the time."""
    tasks: dict[str, Callable[[], Task]] = {
        "heq": lambda: HierarchicalEquality(sampler, strengths, size),
        "addition": lambda: BinaryAddition(width, bits, split=split),
        "mcqa": lambda: MultipleChoice(model or "tiny", adapter),
        "ioi": lambda: IndirectObject(model or "smollm2", adapter),
    }
    if task not in tasks:
        unknown("task", task, tasks)
    configured: Task = tasks[task]()
    outline = configured.outline(seed)
    console.print(repr(configured.causal_model()), highlight=False)
    console.print(tables.power_table(outline.splits.test))
    cost = footprint(outline.subject, outline.splits, outline.outputs)
    console.print(
        f"Recording: {cost.forwards:,} forwards (every distinct input once), {cost.bytes / 1e6:.1f} MB kept; "
        f"largest resumed batch {cost.batch_bytes / 1e6:.1f} MB."
    )
    if cost.prefix_bytes:
        console.print(
            f"Keys and values of the base prompts: {cost.prefix_bytes / 1e6:.1f} MB, the largest part; what does not "
            f"fit into --memory goes to a temporary file."
        )
    recording = hollow(outline.subject, outline.splits.fit)
    table = tables.plain_table("Per seed")
    for column in ("method", "sites", "calibration variants", "rotations", "responses (at most)"):
        table.add_column(column, justify="left" if column == "method" else "right")
    for method in configured.methods().values():
        p = plan(method, recording, outline.splits)
        table.add_row(p.method, *(f"{x:,}" for x in (p.sites, p.variants, p.rotations, p.responses)))
    console.print(table)
