"""What there is to run, and what running it would take: counted and predicted before any weight is loaded."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from plot_ot.abstract.prompts import encode
from plot_ot.cli.common import (
    Bits,
    First,
    Methods,
    PairCount,
    Sampler,
    Size,
    SplitName,
    Strengths,
    Width,
    budget,
    console,
)
from plot_ot.errors import PlotError, unknown
from plot_ot.methods import Method, pick
from plot_ot.models.named import LanguageModel, model_directory
from plot_ot.models.tiny import TINY, describe_tiny
from plot_ot.planner import Inputs, Machine, Plan, Scene, Shape, machine_by_name, plan, shape_by_name, words
from plot_ot.report import tables
from plot_ot.subjects.decoder.architecture import transformers_library
from plot_ot.tasks import TASKS, BinaryAddition, HierarchicalEquality, IndirectObject, MultipleChoice, Task
from plot_ot.tasks.language import LanguageTask
from plot_ot.tasks.text_data import Sizes

Model = Annotated[
    str | None, typer.Option(help="Language model: one of `plot-ot models`, a known shape, a directory or a hub id.")
]
Adapter = Annotated[str | None, typer.Option(help="Its adapter; it is merged, and changes no cost.")]
MachineName = Annotated[
    str | None, typer.Option("--machine", help="'this' (measured now; the default), 'h100' or 'a100'.")
]
Measure = Annotated[bool, typer.Option("--measure", help="Measure this machine in place of a preset's numbers.")]
Gpus = Annotated[int | None, typer.Option(min=1, help="How many GPUs there are.")]
Workers = Annotated[
    int | None, typer.Option(min=1, help="Workers, as of `run --engine ray --workers` (default: one per GPU).")
]
Cores = Annotated[int, typer.Option(min=1, help="Torch threads of the measurement.")]
Flops = Annotated[float | None, typer.Option(help="FLOP/s of large products on one device.")]
Bandwidth = Annotated[float | None, typer.Option(help="Bytes/s of one device's memory.")]
DeviceMemory = Annotated[float | None, typer.Option(help="GB of memory of one device.")]
Efficiency = Annotated[float | None, typer.Option(help="Share of FLOP/s and bandwidth that whole blocks reach.")]
Call = Annotated[float | None, typer.Option(help="Seconds that calling one block takes, whatever it computes.")]
Dtype = Annotated[str | None, typer.Option(help="float32, bfloat16 or float16 (default: bfloat16 on GPUs).")]
Fit = Annotated[int, typer.Option(help="Fit pairs of a language task.")]
Budget = Annotated[float, typer.Option("--memory", help="GB that a language model's recording may take.")]
Epochs = Annotated[int | None, typer.Option(min=1, help="Epochs that DAS will train (default: the most it may).")]
AsJson = Annotated[bool, typer.Option("--json", help="Print all numbers as JSON.")]


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
    fit: Fit = 200,
    pairs: PairCount = 100,
    memory: Budget = 4.0,
    methods: Methods = None,
    epochs: Epochs = None,
    machine: MachineName = None,
    measured: Measure = False,
    gpus: Gpus = None,
    workers: Workers = None,
    cores: Cores = 1,
    flops: Flops = None,
    bandwidth: Bandwidth = None,
    device_memory: DeviceMemory = None,
    efficiency: Efficiency = None,
    call: Call = None,
    dtype: Dtype = None,
    seed: First = 0,
    as_json: AsJson = False,
) -> None:
    """What a run would compute, hold, move and take, per method and part; no weights are loaded for it."""
    sizes = Sizes(fit, pairs, pairs, pairs)
    tasks: dict[str, Callable[[], Task]] = {
        "heq": lambda: HierarchicalEquality(sampler, strengths, size),
        "addition": lambda: BinaryAddition(width, bits, split=split),
        "mcqa": lambda: MultipleChoice(model or "tiny", adapter, sizes=sizes, memory=budget(memory)),
        "ioi": lambda: IndirectObject(model or "smollm2", adapter, sizes=sizes, memory=budget(memory)),
    }
    if task not in tasks and task.endswith(".py"):
        raise PlotError(
            f"{task} is a task file, and explain plans the studies of `plot-ot list`: {', '.join(tasks)}. See whether "
            f"the file is ready with `plot-ot check`; docs/planner.md says how to plan your own network from Python."
        )
    if task not in tasks:
        unknown("task", task, tasks)
    configured: Task = tasks[task]()
    name = "this" if measured else machine or ("this" if flops is None else "h100")
    own = dtype or ("bfloat16" if name != "this" or torch.cuda.is_available() else "float32")
    if isinstance(configured, LanguageTask):
        shape = _language_shape(configured.model).as_type(own)
        scene = language_scene(configured, shape, seed)
        offered = configured.methods_at(shape.width, shape.blocks)
    else:
        own = dtype or "float32"
        outline = configured.outline(seed)
        scene, offered = Scene.of_subject(outline.subject, outline.splits, outline.outputs), configured.methods()
    like = max(16, min(2048, scene.shape.width))
    found = machine_by_name(name, dtype=own, cores=cores, width=like).changed(
        name=None if machine or flops is None else "GPU as given",
        devices=gpus,
        flops=flops,
        bandwidth=bandwidth,
        memory=device_memory and device_memory * 1e9,
        efficiency=efficiency,
        call=call,
    )
    chosen: list[Method] = pick(offered, methods.split(",") if methods else None)
    plans = [plan(m, scene, found, epochs=epochs, workers=workers) for m in chosen]
    if as_json:
        told = {"task": configured.config(), "shape": _plain(scene.shape), "machine": vars(found)}
        print(json.dumps({**told, "plans": [p.json() for p in plans]}, indent=1, default=str))
        return
    console.print(repr(configured.causal_model()), highlight=False)
    console.print(tables.power_table({key: r.bank for key, r in scene.tests.items()}))
    _show(scene, found, plans)


# -- language models without their weights ------------------------------------------------------------------------


def _language_shape(name: str) -> Shape:
    """By name, as tasks take it."""
    if name != "tiny" and name not in TINY:
        return shape_by_name(name)
    c = describe_tiny(next(iter(TINY)) if name == "tiny" else name)["config"]
    return Shape.gated(
        name,
        depth=c["num_hidden_layers"],
        width=c["hidden_size"],
        heads=c["num_attention_heads"],
        groups=c["num_key_value_heads"],
        head_width=c["head_dim"],
        inner=c["intermediate_size"],
        vocabulary=c["vocab_size"],
        tied=True,
        norms=4,
    )


def language_scene(task: LanguageTask, shape: Shape, seed: int) -> Scene:
    """A task's banks, drawn as if the model answered every prompt correctly, and the prompts that the filter asks."""
    lengths = _lengths(task)
    asked: list[Tensor] = []

    def all_right(rows: Tensor) -> Tensor:
        asked.append(rows)
        return torch.ones(len(rows), dtype=torch.bool)

    banks = task.draw(seed, all_right)
    tokens = lengths(torch.cat(asked))
    beside = {"filter": Inputs(len(tokens), int(tokens.sum()), int(tokens.max()))}
    if banks.transfer:
        beside["transfer"] = Inputs.of(list(banks.transfer.values()), lengths, shape)
    return Scene.of_shape(shape, banks.splits, len(task.data.ANSWERS), lengths, task.memory, beside)


def _lengths(task: LanguageTask) -> Callable[[Tensor], Tensor]:
    """Tokens of prompts, by the model's tokenizer where it is at hand."""
    fetched = model_directory(task.model)
    folder = fetched if fetched.is_dir() else Path(task.model).expanduser()
    tiny = task.model == "tiny" or task.model in TINY  # whose tokens are words
    if tiny or not (folder / "tokenizer.json").is_file():
        return lambda rows: words(task.render(rows), first=0 if tiny else 1)
    try:
        tokenizer = transformers_library().AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)
    except (OSError, ValueError) as e:
        raise PlotError(f"The tokenizer in {folder} cannot be read ({e}).") from e
    bos = LanguageModel(task.model, None, tokenizer).bos
    return lambda rows: encode(task.render(rows), tokenizer, bos=bos)[1].sum(dim=1)


# -- words and tables -----------------------------------------------------------------------------------------------


def _show(scene: Scene, machine: Machine, plans: list[Plan]) -> None:
    shape, inputs, held = scene.shape, scene.inputs, plans[0].memory
    console.print(
        f"Recording: {inputs.count:,} forwards (every distinct input once), {_short(held.vectors, BYTE)} kept; "
        f"largest batch {_short(max(p.memory.batch for p in plans), BYTE)}.",
        highlight=False,
    )
    if shape.language:
        where = "more than --memory leaves: they go to a temporary file" if held.spilled else "kept in memory"
        if held.on_disk:
            console.print("Recorded vectors take more than a quarter of --memory: they go to a temporary file.")
        console.print(
            f"{shape.name}: {shape.weights:,} parameters ({_short(shape.weight_bytes, BYTE)}), {shape.blocks} blocks "
            f"of width {shape.width}; prompts of up to {inputs.longest} tokens, keys and values of the bases "
            f"{_short(held.keys, BYTE)} ({where}).",
            highlight=False,
        )
    console.print(_machine_words(machine), highlight=False)
    console.print(_spread_words(machine, plans), highlight=False)
    counts = tables.plain_table("Computed, per seed")
    for column in ("method", "sites", "calibration variants", "rotations", "block-tokens", "lowest", "highest", "FLOP"):
        counts.add_column(column, justify="left" if column == "method" else "right")
    for p in plans:
        tokens = [round(bill.cost.block_tokens) for bill in (p, p.lowest, p.highest)]
        cells = [f"{x:,}" for x in (p.sites, p.variants, p.rotations, *tokens)]
        counts.add_row(p.method, *cells, _short(p.cost.flops + p.cost.single, FLOP))
    console.print(counts)
    parts = [column for column, some in PARTS.items() if any(set(some) & set(p.parts) for p in plans)]
    times = tables.plain_table("Time, per seed")
    for column in ("method", *parts, "in all", "lowest", "highest"):
        times.add_column(column, justify="left" if column == "method" else "right", no_wrap=True)
    for p in plans:
        seconds = [sum(p.seconds.get(part, 0.0) for part in PARTS[column]) for column in parts]
        seconds += [sum(bill.seconds.values()) for bill in (p, p.lowest, p.highest)]
        times.add_row(p.method, *map(_clock, seconds))
    console.print(times)
    sizes = tables.plain_table("Memory, and bytes moved")
    columns: dict[str, Callable[[Plan], float]] = {
        "weights": lambda p: p.memory.weights,
        "needed besides": lambda p: p.memory.kept,
        "with the allocator's": lambda p: p.memory.slack and p.memory.kept + p.memory.slack,
        "read and written": lambda p: p.cost.moved,
        "keys of it": lambda p: p.cost.keys,
        "sent to workers": lambda p: p.cost.sent if p.spread.replicas > 1 else 0.0,
    }
    columns = {name: of for name, of in columns.items() if any(map(of, plans))}
    for column in ("method", *columns):
        sizes.add_column(column, justify="left" if column == "method" else "right")
    for p in plans:
        sizes.add_row(p.method, *(_short(of(p), BYTE) for of in columns.values()))
    console.print(sizes)
    console.print(RANGE, highlight=False)
    for name in sorted({s for p in plans for s in p.skipped}):
        console.print(f"Not counted: {name}.")


def _machine_words(machine: Machine) -> str:
    several = f"{machine.devices} x " if machine.devices > 1 else ""
    return (
        f"Machine: {several}{machine.name}{' (measured now)' if machine.measured else ''}: "
        f"{_short(machine.flops, FLOP)}/s and {_short(machine.bandwidth, BYTE)}/s, of which blocks reach "
        f"{machine.efficiency:.0%}; {machine.call * 1e6:.0f} µs per block call; "
        f"{_short(machine.memory, BYTE)} of memory{' each' if several else ''}."
    )


def _spread_words(machine: Machine, plans: Sequence[Plan]) -> str:
    """Who works: what workers change, and what they do not."""
    spread, held = plans[0].spread, max((p.memory for p in plans), key=lambda m: m.total)
    where = f" of {spread.devices} GPUs" if spread.devices > 1 else ""
    words = f"One replica{where}, in this process."
    if spread.replicas > 1:
        words = (
            f"{spread.replicas} replicas{where}, as with --engine ray --workers {spread.replicas}. Each holds "
            f"weights of its own, {_short(held.total, BYTE)} with the rest at most"
        )
        driver = held.weights + held.vectors
        words += "." if machine.gpu else f": {_short(spread.replicas * held.total + driver, BYTE)} with the driver."
        words += (
            " Results stay the same. Time is shared out as far as there are units of work; the driver filters alone."
        )
        if any("das" in p.parts for p in plans):
            words += " For DAS every worker records the fit bank for itself, which is not counted."
    if spread.missing:
        words += f" {spread.missing:.0%} of the weights do not fit and are fetched in every pass."
    cores = os.cpu_count() or 1
    if not machine.gpu and machine.measured and spread.replicas > cores:
        words += f" This machine has {cores} cores: more workers than that make nothing faster."
    return words


PARTS = {
    "record": ("filter", "recording", "transfer"),
    "signatures": ("signatures",),
    "calibrate": ("calibration",),
    "DAS": ("das",),
    "test": ("test",),
}
"""Columns, and the parts of a plan they hold."""


RANGE = (
    "Block-tokens are tokens times the blocks they run through. Which places Stage A keeps is known only once it ran: "
    "lowest is if they are late, where few blocks are left to run, highest if early; the number before is an average "
    "over all places. DAS trains between its fewest epochs (lowest) and its most (the others)."
)
FLOP = {1e15: "PFLOP", 1e12: "TFLOP", 1e9: "GFLOP", 1e6: "MFLOP"}
BYTE = {1e12: "TB", 1e9: "GB", 1e6: "MB", 1e3: "kB"}
TIME = {3600.0: "h", 60.0: "min", 1.0: "s", 1e-3: "ms"}


def _short(x: float, units: Mapping[float, str]) -> str:
    """In the largest unit that leaves at least 1; nothing for nothing."""
    unit = next((u for u in units if x >= u), min(units))
    number = f"{x / unit:,.0f}" if x >= 100 * unit else f"{x / unit:.3g}"
    return f"{number} {units[unit]}" if x else ""


def _clock(seconds: float) -> str:
    """Minutes from two of them on, hours likewise."""
    return _short(seconds, {u: name for u, name in TIME.items() if u <= 1 or seconds >= 2 * u})


def _plain(shape: Shape) -> dict[str, Any]:
    return {k: v for k, v in vars(shape).items() if k not in ("places", "after")}
