"""What running a study would take, in words and tables."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, cast

from rich.table import Table
from rich.text import Text

from plot_ot.cli.common import console
from plot_ot.comparing import ComparisonPlan
from plot_ot.errors import PlotError, unknown
from plot_ot.mib.costs import SubmissionPlan
from plot_ot.planner import Machine, Plan, Scene
from plot_ot.planner.ladder import Ladder
from plot_ot.report import tables
from plot_ot.tasks import TASKS, Task
from plot_ot.tasks.text_data import Sizes

SIZES = {"fit": ("fit",), "pairs": ("calibration", "test", "transfer"), "transfer": ("transfer",)}
"""Options that say how many pairs the banks of a language task have, and which banks; a later one has the last word."""
OPTIONS = ("sampler", "strengths", "size", "width", "bits", "split", "model", "adapter", *SIZES, "memory")
"""Options of tasks; the others say on what machine a study is planned."""


def task_by_name(name: str, given: Mapping[str, Any]) -> Task:
    """A task of the registry with the options that were given; options of other tasks are refused."""
    if name == "mib":
        raise PlotError("A submission to MIB is planned by its own command, with its options: plot-ot mib --explain.")
    if name not in TASKS:
        unknown("task", name, TASKS)
    own = options_of(TASKS[name])
    for option in given:
        if option not in own:
            others = [other for other, make in TASKS.items() if option in options_of(make)]
            raise PlotError(
                f"--{option} is an option of {' and '.join(others)}, not of {name}. Leave it out; the options of "
                f"{name} are {', '.join(f'--{o}' for o in own)}."
            )
    values = {option: value for option, value in given.items() if option not in SIZES}
    sizes = {bank: given[option] for option, banks in SIZES.items() if option in given for bank in banks}
    return TASKS[name](**values, **({"sizes": Sizes(**sizes)} if sizes else {}))


OF_FILES = ("model", "adapter", "size", "memory")
"""Options of a task that a task file takes as well."""


def refuse_mixed(tasks: Sequence[str], given: Iterable[str], of_files: Sequence[str]) -> list[Path]:
    """The task files among what is to be planned, all or none; options of the other kind are refused."""
    files = [Path(task) for task in tasks if task.endswith(".py")]
    if len(tasks) > 1 and len(files) < len(tasks):
        raise PlotError(
            f"explain plans one study, one task file as localize runs it, or several as compare does; found "
            f"{', '.join(tasks)}."
        )
    if files:
        for option in given:
            if option not in OF_FILES:
                raise PlotError(
                    f"--{option} is an option of studies, not of task files, which take "
                    f"{', '.join(f'--{o}' for o in (*OF_FILES, 'inputs', 'layers', 'kinds', 'hold-out'))}."
                )
    elif of_files:
        raise PlotError(f"--{of_files[0]} is an option of task files, not of {tasks[0]}. Leave it out.")
    return files


def options_of(task: type[Task]) -> list[str]:
    """The options of this command that a task has: its fields, and what its banks' sizes are made of."""
    own = [f.name for f in fields(cast(Any, task))]
    return [o for o in OPTIONS if o in own or (o in SIZES and "sizes" in own)]


def print_estimates(scene: Scene, machine: Machine, plans: list[Plan], detail: bool = False) -> None:
    """About how long it takes and what it holds; in detail also what the banks can show and what is computed."""
    if detail:
        console.print(tables.power_table({key: r.bank for key, r in scene.tests.items()}))
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
    if detail:
        _print_counts(plans)
        console.print(_times(plans))
        _print_sizes(plans)
    else:
        console.print(_answer(plans))
    if all(sum(p.highest.seconds.values()) < BLUR for p in plans):
        console.print(SMALL, highlight=False)
    console.print(f"{TOKENS if detail else ''}{RANGE}", highlight=False)
    for name in sorted({s for p in plans for s in p.not_counted}):
        loud = Text(f"Not counted: {name}.", style="bold red")
        console.print(loud + " It does not say what it computes (`forecast`): its methods cost more than planned.")
    if not detail:
        console.print("All tables: the same with --detail.")


def _answer(plans: Sequence[Plan]) -> Table:
    """What a newcomer asks: how long, how far that may be off, how much memory."""
    table = tables.plain_table("About how much, per seed")
    for column in ("method", "time", "lowest", "highest", "memory"):
        table.add_column(column, justify="left" if column == "method" else "right", no_wrap=True)
    for p in plans:
        seconds = [_clock(sum(estimate.seconds.values())) for estimate in (p, p.lowest, p.highest)]
        table.add_row(p.method, *seconds, _short(p.memory.total, BYTE))
    return table


def _print_counts(plans: Sequence[Plan]) -> None:
    counts = tables.plain_table("Computed, per seed")
    for column in ("method", "sites", "calibration variants", "rotations", "block-tokens", "lowest", "highest", "FLOP"):
        counts.add_column(column, justify="left" if column == "method" else "right")
    for p in plans:
        tokens = [round(estimate.cost.block_tokens) for estimate in (p, p.lowest, p.highest)]
        cells = [f"{x:,}" for x in (p.sites, p.variants, p.rotations, *tokens)]
        counts.add_row(p.method, *cells, _short(p.cost.flops + p.cost.single, FLOP))
    console.print(counts)


def _print_sizes(plans: Sequence[Plan]) -> None:
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


def print_comparison_plan(plan: ComparisonPlan, finalists: int | None, as_json: bool) -> None:
    """What comparing would compute for each hypothesis, and about how long it would take."""
    if as_json:
        told = {n: {"quick": plan.quick[n].json(), "whole": plan.whole[n].json()} for n in plan.quick}
        print(json.dumps(told, indent=1, default=str))
        return
    table = tables.plain_table("Computed, per hypothesis")
    for column in ("hypothesis", "quick look", "whole search", "lowest", "highest", "about how long"):
        table.add_column(column, justify="left" if column == "hypothesis" else "right")
    for name, quick in plan.quick.items():
        whole = plan.whole[name]
        tokens = [round(p.cost.block_tokens) for p in (quick, whole, whole.lowest, whole.highest)]
        table.add_row(Text(name), *(f"{x:,}" for x in tokens), _clock(sum(whole.seconds.values())))
    console.print(table)
    every = "every hypothesis" if finalists is None else _finalists(finalists)
    console.print(
        f"Block-tokens are tokens times the blocks they run through. All get the quick look, {every} the whole search, "
        f"and all controls on top, which are not counted. Lowest and highest depend on the places that are kept.",
        highlight=False,
    )


def print_submission_plan(plan: SubmissionPlan, machine: Machine, as_json: bool) -> None:
    """What every cell of a submission would run, and about how long it would take."""
    if as_json:
        print(json.dumps(plan.json(), indent=1, default=str))
        return
    table = tables.plain_table("Computed, by cell and for all cells of a task")
    for column in ("what", "prompts", "responses", "time", "lowest", "highest", "memory"):
        table.add_column(column, justify="left" if column == "what" else "right")
    for row in plan.rows:
        times = [_clock(row.seconds[case]) for case in ("expected", "lowest", "highest")]
        counts = [f"{n:,}" if n else "" for n in (row.prompts, round(row.responses))]
        table.add_row(Text(row.name), *counts, *times, _short(row.memory, BYTE))
    together = [_clock(plan.seconds(case)) for case in ("expected", "lowest", "highest")]
    table.add_row("all", "", "", *together, "")
    console.print(table)
    console.print(_machine_words(machine), highlight=False)
    shape = plan.shape
    console.print(
        f"{plan.model}: {shape.weights:,} parameters ({_short(shape.weight_bytes, BYTE)}), {shape.blocks} blocks of "
        f"width {shape.hidden}. Prompts run whole: to filter, to record, and for the scores. A response is one pair "
        f"resumed under an edit. All pairs count as answered rightly. {UNKNOWN_PLACES}",
        highlight=False,
    )


def _finalists(finalists: int) -> str:
    """Who gets the whole search, in words."""
    return f"the best {finalists} that are not far behind" if finalists > 1 else "the best one"


def print_ladder(ladder: Ladder) -> None:
    """Print what was measured on a device, next to the plan, and whether it agrees with whole passes."""
    table = tables.plain_table("The ladder, each rung per unit")
    for column in ("rung", "per", "measured", "planned", "ratio", "per full pass"):
        table.add_column(column, justify="left" if column in ("rung", "per") else "right", no_wrap=True)
    for r in ladder.rungs:
        planned = ("", "") if not r.planned else (_fine(r.planned), f"{r.seconds / r.planned:.2g}")
        table.add_row(r.name, r.unit, _fine(r.seconds), *planned, f"{r.ratio:,.1f}")
    console.print(table)
    console.print(_machine_words(ladder.machine), highlight=False)
    console.print(
        f"Peak memory {_short(ladder.peak, BYTE) or 'not known'}"
        f"{'' if ladder.machine.gpu else ' of the whole process'}; the plan has {_short(ladder.planned, BYTE)}.",
        highlight=False,
    )
    said = "agree" if ladder.agrees else "DO NOT AGREE: do not believe results on this device in this type"
    console.tell(
        "checked:" if ladder.agrees else "error:",
        f"resumed and hooked passes {said} (largest difference {ladder.error:.2g} of the largest logit, "
        f"{ladder.allowed:g} allowed).",
        "green" if ladder.agrees else "red",
    )


def _fine(seconds: float) -> str:
    """A short time, to two digits."""
    unit, name = next((u, n) for u, n in ((1.0, "s"), (1e-3, "ms"), (0.0, "µs")) if seconds >= u)
    return f"{seconds / (unit or 1e-6):.3g} {name}"


def _times(plans: Sequence[Plan]) -> Table:
    parts = [column for column, some in PARTS.items() if any(set(some) & set(p.parts) for p in plans)]
    times = tables.plain_table("About how long, per seed")
    for column in ("method", *parts, "in all", "lowest", "highest"):
        times.add_column(column, justify="left" if column == "method" else "right", no_wrap=True)
    for p in plans:
        seconds = [sum(p.seconds.get(part, 0.0) for part in PARTS[column]) for column in parts]
        seconds += [sum(estimate.seconds.values()) for estimate in (p, p.lowest, p.highest)]
        times.add_row(p.method, *map(_clock, seconds))
    return times


def _machine_words(machine: Machine) -> str:
    several = f"{machine.devices} x " if machine.devices > 1 else ""
    return (
        f"Machine: {several}{machine.name}{' (measured now)' if machine.measured else ''}: "
        f"{_short(machine.flops, FLOP)}/s and {_short(machine.bandwidth, BYTE)}/s, of which blocks reach "
        f"{machine.efficiency:.0%}; {machine.call * 1e6:.0f} µs per block call; "
        f"{_short(machine.memory, BYTE)} of memory{' each' if several else ''}."
    )


def _spread_words(machine: Machine, plans: Sequence[Plan]) -> str:
    """Say in words how the work is spread over workers: what they change, and what they do not."""
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
    "Newton": ("newton",),
    "calibrate": ("calibration",),
    "DAS": ("das",),
    "test": ("test",),
}
"""Columns, and the parts of a plan they hold."""


TOKENS = "Block-tokens are tokens times the blocks they run through. "
RANGE = (
    "Which places Stage A keeps is known only after it has "
    "run: `lowest` assumes late places, where few blocks are left to run, `highest` early ones; the number before is "
    "an average over all places. DAS trains between its fewest epochs (lowest) and its most (the others)."
)
UNKNOWN_PLACES = (
    "Lowest and highest depend on what is known only later: which places or heads transport ranks first (late ones "
    "have few blocks left to run), and when training stops."
)
FLOP = {1e15: "PFLOP", 1e12: "TFLOP", 1e9: "GFLOP", 1e6: "MFLOP"}
BYTE = {1e12: "TB", 1e9: "GB", 1e6: "MB", 1e3: "kB"}
TIME = {3600.0: "h", 60.0: "min", 1.0: "s"}
BLUR = 10.0
"""Shorter times than these are told as `seconds`."""
SMALL = (
    "About how long: seconds per method and seed. On a network this small Python's own overhead decides, and no plan "
    "knows it; run it to see."
)


def _short(x: float, units: Mapping[float, str]) -> str:
    """Write a number in the largest unit that leaves at least 1, as exactly as a plan knows it; zero is nothing."""
    unit = next((u for u in units if x >= u), min(units))
    number = f"{x / unit:,.0f}" if x >= 10 * unit else f"{x / unit:.2g}"
    return f"{number} {units[unit]}" if x else ""


def _clock(seconds: float) -> str:
    """Write a time with the digits that a plan can know: one, or two where the first is a 1.

    Minutes are used from two minutes on, hours from two hours on. Below ten seconds Python's own overhead decides,
    which no plan knows: such times are only said to be seconds.
    """
    if not seconds:
        return ""
    if seconds < BLUR:
        return "seconds"
    unit = next(u for u in TIME if u <= 1 or seconds >= 2 * u)
    digit = 10.0 ** math.floor(math.log10(seconds / unit))
    step = digit / 10 if seconds / unit < 2 * digit else digit
    return f"{round(round(seconds / unit / step) * step, 6):g} {TIME[unit]}"
