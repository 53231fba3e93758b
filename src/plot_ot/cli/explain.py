"""What there is to run, and what it or a task file would take: counted and predicted before any weight is loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from plot_ot.cli.common import AsJson, Debug, First, HoldOut, Methods, console, layer_numbers, memory_bytes, names_of
from plot_ot.errors import PlotError

Model = Annotated[
    str | None, typer.Option(help="Language model: one of `plot-ot models`, a known shape, a directory or a hub id.")
]
Adapter = Annotated[str | None, typer.Option(help="The model's adapter; merging it changes no cost.")]
MachineName = Annotated[
    str | None, typer.Option("--machine", help="'this' (measured now; the default), 'h100' or 'a100'.")
]
Measure = Annotated[bool, typer.Option("--measure", help="Measure this machine instead of using a preset's numbers.")]
Gpus = Annotated[int | None, typer.Option(min=1, help="Number of GPUs.")]
Workers = Annotated[
    int | None, typer.Option(min=1, help="Workers, as in `run --engine ray --workers` (default: one per GPU).")
]
Cores = Annotated[int, typer.Option(min=1, help="Torch threads of the measurement.")]
Flops = Annotated[float | None, typer.Option(help="FLOP/s of large products on one device.")]
Bandwidth = Annotated[float | None, typer.Option(help="Bytes/s of one device's memory.")]
DeviceMemory = Annotated[float | None, typer.Option(help="GB of memory of one device.")]
Efficiency = Annotated[float | None, typer.Option(help="Share of FLOP/s and bandwidth that whole blocks reach.")]
Call = Annotated[float | None, typer.Option(help="Seconds that calling one block takes, whatever it computes.")]
Dtype = Annotated[str | None, typer.Option(help="float32, bfloat16 or float16 (default: bfloat16 on GPUs).")]
Sampler = Annotated[str | None, typer.Option(help="heq: 'uniform' (the paper's, the default) or 'balanced' rows.")]
Strengths = Annotated[str | None, typer.Option(help="heq: λ grid 'units', 'tenths' or 'union' (the default).")]
Size = Annotated[int | None, typer.Option(help="heq and task files: pairs per bank.")]
Width = Annotated[int | None, typer.Option(help="addition: width of the recurrent state (default: 8).")]
Bits = Annotated[int | None, typer.Option(help="addition: bits per number (default: 4).")]
SplitName = Annotated[
    str | None, typer.Option("--split", help="addition: 'round-robin' (the default) or 'proportional' bases.")
]
Fit = Annotated[int | None, typer.Option(help="Language tasks: fit pairs (default: 200).")]
Pairs = Annotated[
    int | None,
    typer.Option(
        help="Language tasks: sensitive pairs per variable and bank, and as many invariant ones (default: 100)."
    ),
]
Transfer = Annotated[
    int | None, typer.Option(help="Language tasks: pairs per bank of words not seen before (default: as --pairs).")
]
Budget = Annotated[
    float | None,
    typer.Option("--memory", help="Language models: GB that a recording may take (default: 4)."),
]
Inputs = Annotated[
    Path | None, typer.Option(help="Task files: pairs or inputs in a .jsonl or .csv file, instead of the first file's.")
]
Numbers = Annotated[str | None, typer.Option(help="Task files: blocks to look at, such as 10-20 or 3,5,7.")]
FileKinds = Annotated[
    str | None,
    typer.Option(help="Task files: block_output, attention_output, mlp_output, head_output; several with commas."),
]
Epochs = Annotated[int | None, typer.Option(min=1, help="Epochs that DAS will train (default: the most it may).")]


def list_all(as_json: AsJson = False) -> None:
    """List the tasks and their methods."""
    from plot_ot.report import tables
    from plot_ot.tasks import TASKS

    tasks = [make() for make in TASKS.values()]
    if as_json:
        told = [
            {
                "name": t.name,
                "summary": t.summary,
                "methods": [{"name": m.name, "kind": m.kind, "summary": m.summary} for m in t.catalogue().values()],
            }
            for t in tasks
        ]
        print(json.dumps(told, indent=1))
        return
    shown: dict[str, list[tuple[str, str]]] = {}
    for task in tasks:
        mine = [(m.name, m.summary) for m in task.catalogue().values()]
        alike = next((name for name, theirs in shown.items() if theirs == mine), None)
        shown[task.name] = mine
        if alike:
            console.print(f"{task.name}: {task.summary}\n\nIts methods are those of {alike}.")
            continue
        table = tables.plain_table(f"{task.name}: {task.summary}")
        table.add_column("method", style="bold", no_wrap=True)
        table.add_column("kind")
        table.add_column("what it does", overflow="fold")
        for m in task.catalogue().values():
            table.add_row(m.name, m.kind, m.summary)
        console.print(table)


def explain(
    tasks: Annotated[
        list[str],
        typer.Argument(
            metavar="TASK",
            help="A study of `plot-ot list`; your own Python file, as for `plot-ot localize`; or several, as for "
            "`plot-ot compare`. Files are imported: their code runs.",
        ),
    ],
    sampler: Sampler = None,
    strengths: Strengths = None,
    size: Size = None,
    width: Width = None,
    bits: Bits = None,
    split: SplitName = None,
    model: Model = None,
    adapter: Adapter = None,
    fit: Fit = None,
    pairs: Pairs = None,
    transfer: Transfer = None,
    memory: Budget = None,
    inputs: Inputs = None,
    layers: Numbers = None,
    kinds: FileKinds = None,
    hold_out: HoldOut = None,
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
    detail: Annotated[
        bool, typer.Option("--detail", help="Also print every table: pairs, counts, parts, memory.")
    ] = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Estimate compute, memory, traffic and time of a study or a task file, without loading any weights."""
    import torch

    from plot_ot.cli.estimates import print_comparison_plan, print_estimates, refuse_mixed, task_by_name
    from plot_ot.comparing.entry import FINALISTS
    from plot_ot.methods import pick
    from plot_ot.planner import Machine, machine_by_name, predict
    from plot_ot.tasks.planning import scene_and_methods

    given = {
        "sampler": sampler,
        "strengths": strengths,
        "size": size,
        "width": width,
        "bits": bits,
        "split": split,
        "model": model,
        "adapter": adapter,
        "fit": fit,
        "pairs": pairs,
        "transfer": transfer,
        "memory": None if memory is None else memory_bytes(memory),
    }
    given = {option: value for option, value in given.items() if value is not None}
    of_files = {"inputs": inputs, "layers": layers, "kinds": kinds, "hold-out": hold_out}
    files = refuse_mixed(tasks, given, [option for option, value in of_files.items() if value is not None])
    name = "this" if measured else machine or ("this" if flops is None else "h100")
    own = dtype or ("bfloat16" if name != "this" or torch.cuda.is_available() else "float32")

    def found_machine(dtype: str, widest: int) -> Machine:
        like = max(16, min(2048, widest))
        return machine_by_name(name, dtype=dtype, cores=cores, width=like).changed(
            name=None if machine or flops is None else "GPU as given",
            devices=gpus,
            flops=flops,
            bandwidth=bandwidth,
            memory=device_memory and device_memory * 1e9,
            efficiency=efficiency,
            call=call,
        )

    chosen_names = methods.split(",") if methods else None
    told: dict[str, Any]
    if files:
        from plot_ot.cli.planned_files import PlannedFiles

        places: dict[str, Any] = {"kinds": tuple(k.strip() for k in (kinds or "block_output").split(","))}
        places |= {k: v for k, v in {"memory": given.get("memory")}.items() if v is not None}
        places |= {"layers": layer_numbers(layers)} if layers else {}
        planned = PlannedFiles.of(files, model, inputs, own, **places)
        own = own if planned.subject.language else dtype or "float32"
        found = found_machine(own, max(p.width for p in planned.subject.places))
        settings = {"size": size, "hold_out": names_of(hold_out), "seed": seed}
        if planned.counted and not as_json:
            console.print("The model's tokenizer is not on this machine: prompts are counted in words and signs.")
        if len(files) > 1:
            if chosen_names and len(chosen_names) > 1:
                raise PlotError(f"compare runs one method; found --methods {methods}.")
            method = chosen_names[0] if chosen_names else "plot"
            print_comparison_plan(planned.comparison(found, method=method, **settings), FINALISTS, as_json)
            return
        scene = planned.scene(**settings)
        plans = planned.plans(scene, found, chosen_names or ["plot"], epochs=epochs, workers=workers)
        [(title, hypothesis)] = planned.hypotheses.items()
        told, model_shown = {"task": {"name": title, "file": files[0].name, **settings}}, repr(hypothesis)
    else:
        configured = task_by_name(tasks[0], given)
        scene, offered = scene_and_methods(configured, seed, own)
        if not scene.shape.language:
            own = dtype or "float32"
        found = found_machine(own, scene.shape.width)
        plans = [predict(m, scene, found, epochs=epochs, workers=workers) for m in pick(offered, chosen_names)]
        told, model_shown = {"task": configured.config()}, repr(configured.causal_model())
    if as_json:
        shape = {k: v for k, v in vars(scene.shape).items() if k not in ("places", "after")}
        everything = {**told, "shape": shape, "machine": vars(found), "plans": [p.json() for p in plans]}
        print(json.dumps(everything, indent=1, default=str))
        return
    console.print(model_shown, highlight=False)
    print_estimates(scene, found, plans, detail)
    if files:
        console.print("A verdict's controls come on top; they are not counted.")
