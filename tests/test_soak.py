"""A long run: studies of all tasks again and again, with random kills; nothing leaks and no record is lost.

PLOT_OT_SOAK_MINUTES says how long (30 by default).
"""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from killing import TASKS, Nursery, lasting, litter

MINUTES = float(os.environ.get("PLOT_OT_SOAK_MINUTES", "30"))
SLOPE = 64 << 10
"""Bytes per run of growth that is still no leak: what the interpreter's own bookkeeping may take."""


@pytest.mark.long
def test_hours_of_studies_with_random_kills_lose_no_record(tmp_path):
    nursery, draw = Nursery(tmp_path / "cache"), random.Random()
    reference, seconds, runs, kills = {}, {}, 0, 0
    for task in TASKS:
        nursery.run(task, tmp_path / f"{task}-first")
        done = nursery.run(task, tmp_path / task)
        assert done["status"] == 0
        reference[task], seconds[task] = lasting(tmp_path / task), done["seconds"]
    end = time.monotonic() + 60 * MINUTES / 3
    while time.monotonic() < end:
        task, out = draw.choice(list(TASKS)), tmp_path / "run"
        for _ in range(draw.randint(0, 4)):
            status = nursery.run(task, out, after=draw.uniform(0, seconds[task]))["status"]
            assert status in (0, -signal.SIGKILL)
            kills += status != 0
        assert nursery.run(task, out)["status"] == 0
        assert lasting(out) == reference[task]
        assert litter(out) == []
        shutil.rmtree(out)
        runs += 1
    nursery.close()
    print(f"{runs} runs, {kills} kills, no record lost")
    assert runs


SAME_PROCESS = """
import gc, json, os, sys, time
import torch
torch.set_num_threads(1)
from pathlib import Path
from plot_ot.judging import bench
bench.RANDOM_HANDLES = 2
from plot_ot.files.run_directory import RunDirectory
from plot_ot.studies.study import Study
from plot_ot.tasks import BinaryAddition, HierarchicalEquality, MultipleChoice
from plot_ot.tasks.text_data import Sizes

which, seconds, cache, out = sys.argv[1], float(sys.argv[2]), Path(sys.argv[3]), Path(sys.argv[4])
task, seed, names = {
    "heq": lambda: (HierarchicalEquality("uniform", "units", 40), 1003, ("plot", "full-vector")),
    "addition": lambda: (BinaryAddition(recipe="first-exact", bases=32), 1000, ("plot", "plot-pca", "plot-das")),
    "mcqa": lambda: (MultipleChoice("tiny", sizes=Sizes(24, 12, 12, 12)), 1000, ("plot", "plot-native")),
}[which]()


def once(number):
    made = Study(task.prepare(seed, cache))
    with RunDirectory.open(out / str(number % 2), {"task": which}, {}) as run:
        for name in names:
            unit, handles = made.run(task.methods()[name], task.random_method)
            run.finish(seed, name, unit, list(handles.values()))
        run.compile(names)


def resident():
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


for k in range(4):
    once(k)
held, end = [resident()], time.monotonic() + seconds
while time.monotonic() < end or len(held) < 24:
    once(len(held))
    held.append(resident())
print(json.dumps({"held": held, "files": len(os.listdir("/proc/self/fd"))}))
"""


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("task", TASKS)
def test_studies_in_one_process_do_not_leak(task, tmp_path):
    """The slope of the memory held is ≈ 0."""
    for backbone in (Path(__file__).parent / "data").glob("heq-*.safetensors"):
        shutil.copy(backbone, tmp_path)
    words = [sys.executable, "-c", SAME_PROCESS, task, str(60 * MINUTES / 9), str(tmp_path), str(tmp_path / "runs")]
    found = said(words)
    print(f"{task}: {len(found['held'])} runs, {growth(found['held'])}")
    assert slope(found["held"]) < SLOPE
    assert found["files"] < 64


ON_RAY = """
import gc, json, os, random, signal, sys, threading, time
from dataclasses import replace
from pathlib import Path
import psutil, torch
torch.set_num_threads(1)
from plot_ot.engine.ray_engine import RayEngine
from small_studies import HEQ_METHODS, MCQA_METHODS, bits, heq, mcqa, run_all

question = mcqa()
loaded = replace(question.prepare(1000, Path()), recipe=question.network_recipe())
studies = [(heq(), HEQ_METHODS), (loaded, MCQA_METHODS)]
expected = [bits(run_all(prepared, methods, shard=20)) for prepared, methods in studies]
held, kills, over = [], 0, threading.Event()


def workers():
    return [p for p in psutil.Process().children(recursive=True) if p.name().startswith("ray::Worker")]


def kill_now_and_then():
    global kills
    while not over.wait(random.uniform(5, 30)):
        for victim in random.sample(workers(), 1):
            victim.send_signal(signal.SIGKILL)
            kills += 1


def anonymous():
    gc.collect()
    return next(int(x.split()[1]) << 10 for x in open("/proc/self/status") if x.startswith("RssAnon"))


with RayEngine(workers=2, threads=1) as engine:
    end, killer = time.monotonic() + float(sys.argv[1]), threading.Thread(target=kill_now_and_then)
    killer.start()
    while time.monotonic() < end or len(held) < 6:
        (prepared, methods), wanted = random.choice(list(zip(studies, expected)))
        assert bits(run_all(prepared, methods, engine, 20)) == wanted, "another result"
        held.append(anonymous())
    over.set()
    killer.join()
print(json.dumps({"held": held, "kills": kills}))
"""


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_cluster_whose_workers_die_again_and_again_gives_the_same_bits(tmp_path):
    pytest.importorskip("ray")
    found = said([sys.executable, "-c", ON_RAY, str(60 * MINUTES / 3)])
    print(f"Ray: {len(found['held'])} studies, {found['kills']} workers killed, the driver: {growth(found['held'])}")
    assert found["kills"]
    assert slope(found["held"]) < SLOPE


def said(words):
    """What a process says last, as JSON."""
    tests = str(Path(__file__).parent)
    path = os.pathsep.join(p for p in (tests, os.environ.get("PYTHONPATH")) if p)
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    done = subprocess.run(words, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def slope(held):
    """Bytes by which memory grows from run to run: the median of slopes between all pairs of runs (Theil-Sen)."""
    held = held[len(held) // 3 :]  # allocators warm up
    slopes = sorted((b - a) / (j - i) for i, a in enumerate(held) for j, b in enumerate(held) if j > i)
    return slopes[len(slopes) // 2]


def growth(held):
    return f"{held[-1] / 1e6:.0f} MB held, slope {slope(held) / 1e3:.1f} kB per run"
