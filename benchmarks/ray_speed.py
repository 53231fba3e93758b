"""What does Ray cost, and what does it bring? CPU and wall-clock seconds of one study, in-process and by Ray workers.

python benchmarks/ray_speed.py                     # an embedded net, about a minute of work in-process
python benchmarks/ray_speed.py --model smollm2     # a real one

The same study (recording, Stage A, groups of neurons, DAS, tests) runs in a fresh process per engine: in-process, with
one worker and with two. CPU seconds are those of the driver and of every process that Ray starts, daemons included, up
to the end of the study. What workers need to get ready (Ray itself, imports, loading the model) is measured apart: it
does not grow with the work. Results must be the same bits. Writes docs/results/scale_ray.json.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import torch

from plot_ot.engine import InProcess
from plot_ot.engine.ray import RayEngine
from plot_ot.models import default_cache
from plot_ot.study import Study
from plot_ot.tasks import MultipleChoice
from plot_ot.tasks.replicas import recipe
from plot_ot.tasks.text_data import Sizes

ROOT = Path(__file__).resolve().parents[1]
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
    prepared = replace(task.prepare(SEED, default_cache()), recipe=recipe(task))
    started = time.perf_counter(), cpu_seconds()
    engine = RayEngine(workers=workers, threads=1) if workers else InProcess()
    if isinstance(engine, RayEngine):
        engine.crew(prepared.subject, prepared.recipe).ready()
    ready = time.perf_counter(), cpu_seconds()
    study, found = Study(prepared, engine), []
    for name in METHODS:
        unit, handles = study.run(replace(task.methods()[name], kind="baseline"), task.random_method)
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
    parser.add_argument("--fit", type=int, default=400, help="fit pairs")
    parser.add_argument("--pairs", type=int, default=200, help="pairs of every other bank")
    parser.add_argument("--epochs", type=int, default=40, help="of DAS")
    parser.add_argument("--workers", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "results")
    parser.add_argument("--one", type=int, default=None, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one is not None:
        print(json.dumps(measure(args.one, args)))
        return
    runs = []
    for workers in args.workers:
        command = [sys.executable, __file__, *sys.argv[1:], "--one", str(workers)]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)  # noqa: S603
        runs.append(json.loads(done.stdout.splitlines()[-1]))
        print(runs[-1], flush=True)
    here = next(r for r in runs if not r["workers"])
    for r in runs:
        r["cpu_ratio"] = r["work"]["cpu"] / here["work"]["cpu"]
        r["speed_up"] = here["work"]["wall"] / r["work"]["wall"]
        work, start = r["work"], r["start"]
        print(
            f"{r['workers'] or 'no'} workers: {work['wall']:.1f} s ({r['speed_up']:.2f}x), CPU {work['cpu']:.1f} s "
            f"({r['cpu_ratio']:.2f}x, wanted <= {COST}); {start['cpu']:.1f} CPU s to get ready; load {r['load']:.1f}"
        )
    assert len({r["digest"] for r in runs}) == 1, "engines differ"
    summary = {
        "model": args.model,
        "methods": METHODS,
        "fit": args.fit,
        "pairs": args.pairs,
        "epochs": args.epochs,
        "cores": os.cpu_count(),
        "machine": platform.machine(),
        "wanted": {"cpu_ratio": COST, "speed_up": GAIN},
        "runs": runs,
    }
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "scale_ray.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
