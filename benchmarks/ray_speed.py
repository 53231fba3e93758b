"""What does Ray cost, and what does it bring? CPU and wall-clock seconds of one study, in-process and by Ray workers.

python benchmarks/ray_speed.py                     # an embedded net, 40 seconds of work in-process, three rounds
python benchmarks/ray_speed.py --model smollm2     # a real one

The same study (recording, Stage A, groups of neurons, DAS, tests) runs in a fresh process per engine: in-process, with
one worker and with two. CPU seconds are those of the driver and of every process that Ray starts, daemons included, up
to the end of the study. What workers need to get ready (Ray itself, imports, loading the model) is measured apart: it
does not grow with the work. Results must be the same bits. One run's CPU seconds differ from the next one's by a tenth
on a shared machine, so engines take turns for some rounds; the ratios of a round are of runs next to each other, and
their medians count. Two processes that know nothing of each other, each with the whole study, show what the machine
itself takes when both its cores are busy. Writes docs/results/scale_ray.json and scale_ray.md.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import torch

from heq_speed import ROOT, commit, machine
from pages import markdown
from plot_ot.engine import InProcess
from plot_ot.engine.ray_engine import RayEngine
from plot_ot.methods import MethodKind
from plot_ot.models.folders import default_cache
from plot_ot.studies.study import Study
from plot_ot.tasks import MultipleChoice
from plot_ot.tasks.text_data import Sizes

SEED = 1000
METHODS = ("plot-native", "das")
COST, GAIN = 1.1, 1.6
"""At most so many CPU seconds for one in-process; at least such a speed-up by two workers on idle cores."""


def cpu_seconds() -> float:
    """Of this process and all that it started."""
    me = psutil.Process()
    total = 0.0
    for process in (me, *me.children(recursive=True)):
        try:
            times = process.cpu_times()
        except psutil.Error:
            continue
        total += times.user + times.system
        total += times.children_user + times.children_system  # those that have ended
    return total


def measure(workers: int, args: argparse.Namespace) -> dict[str, Any]:
    """One study by so many workers, 0 being this process."""
    torch.set_num_threads(1)
    sizes = Sizes(args.fit, args.pairs, args.pairs, args.pairs)
    task = MultipleChoice(args.model, das_epochs=args.epochs, das_sizes=4, sizes=sizes)
    prepared = replace(task.prepare(SEED, default_cache()), recipe=task.network_recipe())
    started = time.perf_counter(), cpu_seconds()
    engine = RayEngine(workers=workers, threads=1) if workers else InProcess()
    if isinstance(engine, RayEngine):
        engine.crew(prepared.subject, prepared.recipe).ready()
    ready = time.perf_counter(), cpu_seconds()
    study, found = Study(prepared, engine), []
    for name in METHODS:
        unit, handles = study.run(replace(task.methods()[name], kind=MethodKind.BASELINE), task.random_method)
        unit.pop("runtimes")
        chosen = {v: [e.gains.tolist() for e in h.edits] for v, h in handles.items()}
        found.append([unit, chosen])
    done = time.perf_counter(), cpu_seconds()
    if isinstance(engine, RayEngine):
        engine.close()
    return {
        "workers": workers,
        "start": {"wall": ready[0] - started[0], "cpu": ready[1] - started[1]},
        "work": {"wall": done[0] - ready[0], "cpu": done[1] - ready[1]},
        "load": os.getloadavg()[0],
        "digest": hashlib.sha256(json.dumps(found, sort_keys=True, default=str).encode()).hexdigest()[:16],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--fit", type=int, default=1000, help="fit pairs")
    parser.add_argument("--pairs", type=int, default=400, help="pairs of every other bank")
    parser.add_argument("--epochs", type=int, default=60, help="of DAS")
    parser.add_argument("--workers", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "results")
    parser.add_argument("--one", type=int, default=None, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one is not None:
        print(json.dumps(measure(args.one, args)))
        return
    rounds, alone = [], []
    for _ in range(args.rounds):
        rounds.append([run for workers in args.workers for run in run_apart(workers)])
        alone.append(run_apart(0, copies=2))
    digests = {r["digest"] for runs in [*rounds, *alone] for r in runs}
    assert len(digests) == 1, f"engines differ: {digests}"
    summary = {
        "command": shlex.join(["python", "benchmarks/ray_speed.py", *sys.argv[1:]]),
        "commit": commit(),
        "machine": machine(),
        "model": args.model,
        "methods": METHODS,
        "wanted": {"cpu_ratio": COST, "speed_up": GAIN},
        "engines": [engine(n, rounds) for n in args.workers],
        "two_alone": two_alone(rounds, alone),
        "rounds": rounds,
    }
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "scale_ray.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    (args.out / "scale_ray.md").write_text(page(summary), encoding="utf-8")
    print(page(summary))


def run_apart(workers: int, copies: int = 1) -> list[dict[str, Any]]:
    """`measure` in a process of its own, or in several at the same time."""
    command = [sys.executable, __file__, *sys.argv[1:], "--one", str(workers)]
    started = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(copies)]  # noqa: S603
    found = []
    for process in started:
        said, _ = process.communicate()
        if process.returncode:
            raise SystemExit(process.returncode)
        found.append(json.loads(said.splitlines()[-1]))
        print(found[-1], flush=True)
    return found


def engine(workers: int, rounds: Sequence[Sequence[dict[str, Any]]]) -> dict[str, Any]:
    """One engine's medians over the rounds, and its ratios to the in-process run of each."""
    found: dict[str, Any] = {"workers": workers}
    pairs = []
    for runs in rounds:
        by_workers = {r["workers"]: r for r in runs}
        pairs.append((by_workers[0], by_workers[workers]))
    for name in ("wall", "cpu"):
        found[f"work_{name}"] = median(r["work"][name] for _, r in pairs)
        found[f"start_{name}"] = median(r["start"][name] for _, r in pairs)
    found["cpu_ratios"] = [r["work"]["cpu"] / here["work"]["cpu"] for here, r in pairs]
    found["speed_ups"] = [here["work"]["wall"] / r["work"]["wall"] for here, r in pairs]
    found["loads"] = [r["load"] for _, r in pairs]
    return found


def two_alone(
    rounds: Sequence[Sequence[dict[str, Any]]], alone: Sequence[Sequence[dict[str, Any]]]
) -> dict[str, list[float]]:
    """What two processes that share nothing take, beside one of them on its own."""
    found: dict[str, list[float]] = {"cpu_ratios": [], "speed_ups": []}
    for runs, two in zip(rounds, alone, strict=True):
        here = next(r["work"] for r in runs if not r["workers"])
        found["cpu_ratios"] += [r["work"]["cpu"] / here["cpu"] for r in two]
        found["speed_ups"].append(2 * here["wall"] / max(r["work"]["wall"] for r in two))
    return found


def page(summary: Mapping[str, Any]) -> str:
    """What Ray costs and brings."""

    def spread(values: Sequence[float]) -> str:
        return f"{median(values):.2f} ({min(values):.2f} .. {max(values):.2f})"

    rows = [
        [
            str(e["workers"] or "in-process"),
            f"{e['work_cpu']:.1f}",
            spread(e["cpu_ratios"]),
            f"{e['work_wall']:.1f}",
            spread(e["speed_ups"]),
            f"{e['start_cpu']:.1f}",
            f"{e['start_wall']:.1f}",
        ]
        for e in summary["engines"]
    ]
    head = ["workers", "CPU s", "of in-process", "wall s", "speed-up", "CPU s to get ready", "wall s to get ready"]
    loads = [load for e in summary["engines"] for load in e["loads"]]
    alone = summary["two_alone"]
    where = f"{summary['machine']['cpu']}, {summary['machine']['cores']} cores"
    lines = [
        "# Ray against one process",
        "",
        "The same study, run in one process and by Ray workers on one machine with two cores. Does "
        "[Ray](../scale-out.md) waste CPU time, and how much sooner is the study done?",
        "",
        f"Made by `{summary['command']}` (commit {summary['commit']}; {where}): one MCQA study on "
        f"{summary['model']} ({', '.join(f'`{m}`' for m in summary['methods'])}), development seed {SEED}. Numbers are "
        f"medians of {len(summary['rounds'])} rounds in which engines take turns; the lowest and highest are in "
        f"brackets. The load average was {min(loads):.1f} to {max(loads):.1f} (two workers make a load of 2 by "
        f"themselves). All runs gave the same bits. Targets: at most {COST} times the CPU seconds of one process, and "
        f"a speed-up of {GAIN} with two workers on idle cores.",
        "",
        *markdown(head, rows),
        "",
        "For comparison, two processes without Ray each ran the whole study at the same time. Each took "
        f"{spread(alone['cpu_ratios'])} of the CPU seconds, and together they did {spread(alone['speed_ups'])} times "
        "the work in the same time. No engine can do more on these two cores.",
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
