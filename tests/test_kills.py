"""A run killed with SIGKILL at any moment continues from its directory and ends as if nothing had happened."""

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from killing import TASKS, Nursery, command, lasting, litter

pytest.importorskip("fcntl")
KILLED = -signal.SIGKILL


@pytest.fixture(scope="module")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    made = Nursery(tmp_path_factory.mktemp("cache"))
    yield made
    made.close()


References = dict[str, tuple[Path, int, float]]


@pytest.fixture(scope="module")
def references(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> References:
    """Runs that nobody disturbs: directory, changes they make, seconds they take. Filled as they are needed."""
    folder = tmp_path_factory.mktemp("undisturbed")

    class Made(dict):  # type: ignore[type-arg]
        def __missing__(self, task: str) -> tuple[Path, int, float]:
            nursery.run(task, folder / f"{task}-first")  # trains what is not in the cache yet
            done = nursery.run(task, folder / task)
            assert done["status"] == 0
            self[task] = folder / task, done["changes"], done["seconds"]
            return self[task]

    return Made()


def assert_same_end(task: str, out: Path, reference: Path) -> None:
    assert lasting(out) == lasting(reference)
    assert litter(out) == []


@pytest.mark.parametrize("task", [t if t == "heq" else pytest.param(t, marks=pytest.mark.long) for t in TASKS])
def test_a_run_killed_again_and_again_ends_the_same(nursery, references, task, tmp_path):
    """One kill while the directory is made, one in the middle, one while the results are compiled."""
    reference, changes, _ = references[task]
    out = tmp_path / "run"
    for at in (3, changes // 2, changes // 3):  # a continued run makes fewer changes: the last is near its end
        assert nursery.run(task, out, at=at)["status"] == KILLED
    assert nursery.run(task, out)["status"] == 0
    assert_same_end(task, out, reference)


@pytest.mark.long
@pytest.mark.parametrize("task", TASKS)
def test_a_run_killed_before_any_change_of_its_directory_ends_the_same(nursery, references, task, tmp_path):
    reference, changes, _ = references[task]
    assert changes > 20
    for at in range(changes):
        out = tmp_path / str(at)
        assert nursery.run(task, out, at=at)["status"] == KILLED
        assert nursery.run(task, out)["status"] == 0
        assert_same_end(task, out, reference)
        shutil.rmtree(out)


@pytest.mark.long
@pytest.mark.parametrize("task", TASKS)
def test_a_run_killed_at_random_moments_ends_the_same(nursery, references, task, tmp_path):
    """Twelve kills per task, up to four of them in one directory."""
    reference, _, seconds = references[task]
    draw, killed, number = random.Random(1000), 0, 0
    while killed < 12:
        out, number = tmp_path / str(number), number + 1
        for _ in range(draw.randint(1, 4)):
            status = nursery.run(task, out, after=draw.uniform(0, seconds))["status"]
            assert status in (0, KILLED)
            killed += status == KILLED
        assert nursery.run(task, out)["status"] == 0
        assert_same_end(task, out, reference)


@pytest.mark.long
def test_a_run_killed_while_its_network_is_trained_ends_the_same(references, tmp_path):
    """Each with a cache of its own, so that a network half trained or half written is left behind."""
    reference, draw = references["addition"][0], random.Random(1001)
    for k in range(4):
        fresh = Nursery(tmp_path / f"cache-{k}")
        out = tmp_path / f"run-{k}"
        fresh.run("addition", out, after=draw.uniform(0.1, 2.5))
        assert fresh.run("addition", out)["status"] == 0
        assert_same_end("addition", out, reference)
        fresh.close()


def test_the_command_itself_killed_when_its_first_unit_appears_ends_the_same(references, nursery, tmp_path):
    """No fork, no hook: `plot-ot run` as a user starts it, killed from outside, and refused to others until then."""
    reference, *_ = references["heq"]
    out = tmp_path / "run"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PLOT_OT_CACHE": str(Path(__file__).parent / "data")}
    words = [
        sys.executable,
        "-c",
        "from plot_ot import cli; from plot_ot.judging import bench; bench.RANDOM_HANDLES = 2; cli.main()",
    ]
    running = subprocess.Popen([*words, *command("heq", out)], env=environment)
    while not (out / "units").exists():
        assert running.poll() is None
        time.sleep(0.002)
    running.send_signal(signal.SIGSTOP)
    refused = nursery.run("heq", out)
    running.kill()
    assert running.wait() == KILLED
    assert refused["status"] == 2  # our own error: in use
    assert nursery.run("heq", out)["status"] == 0
    assert_same_end("heq", out, reference)
