"""Studies run in real processes that are killed with SIGKILL, at a chosen change of their directory or after a delay.

As a script it is a nursery: it loads everything once, then forks one process per command it reads. An audit hook in the
fork counts the changes it is about to make below its run directory and kills it before the chosen one, so that every
state in which a directory can be left is reached on purpose, without any hook in the package.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

TASKS: dict[str, list[str]] = {
    "heq": ["--size", "40", "--strengths", "units", "--methods", "plot,full-vector", "--first-seed", "1003"],
    "addition": [
        *("--recipe", "first-exact", "--bases", "32", "--first-seed", "1000"),
        *("--methods", "plot,plot-pca,full-vector"),
    ],
    "mcqa": ["--fit", "24", "--pairs", "12", "--methods", "plot,full-vector", "--first-seed", "1000"],
}
"""The smallest studies: a few seconds each, with transport, calibration, verdicts, couplings and handles."""

CHANGES = ("os.rename", "os.remove", "os.mkdir", "os.truncate")


def command(task: str, out: Path) -> list[str]:
    """What a user would type."""
    more = ["--no-sweep"] if task == "heq" else []
    return ["run", task, *TASKS[task], *more, "--seeds", "1", "--no-figures", "--quiet", "--out", str(out)]


class Nursery:
    """A process that forks studies; the networks it trains are kept in `cache`."""

    def __init__(self, cache: Path) -> None:
        cache.mkdir(exist_ok=True)
        for backbone in (Path(__file__).parent / "data").glob("heq-*.safetensors"):
            shutil.copy(backbone, cache)
        environment = {**os.environ, "PLOT_OT_CACHE": str(cache), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def run(self, task: str, out: Path, *, at: int | None = None, after: float | None = None) -> dict[str, Any]:
        """Run a study, killed before its change number `at` or `after` seconds: its status, changes and seconds."""
        order = {"words": command(task, out), "out": str(out), "at": at, "after": after}
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return dict(json.loads(self._process.stdout.readline()))

    def close(self) -> None:
        self._process.communicate()


def lasting(out: Path) -> dict[str, Any]:
    """What two runs of one study must agree on to the last bit: all but dates and durations (which units hold)."""
    results = json.loads((out / "results.json").read_text())
    handles = {str(p.relative_to(out)): p.read_bytes() for p in sorted(out.glob("handles/**/*.safetensors"))}
    couplings = json.loads((out / "couplings.json").read_text())
    manifest = json.loads((out / "manifest.json").read_text())
    kept = {k: v for k, v in manifest.items() if k in ("format", "config", "versions", "machine", "notes", "subjects")}
    return {
        **results,
        "runtimes": None,
        "seal": None,
        "units": sorted(results["units"]),
        "handles": handles,
        "couplings": couplings,
        "manifest": kept,
    }


def litter(out: Path) -> list[str]:
    """Files that a finished run should not leave."""
    return [str(p.relative_to(out)) for p in out.rglob(".*") if p.name != ".lock"]


# -- the nursery ----------------------------------------------------------------------------------------------


def _child(order: dict[str, Any], report: int) -> None:
    from plot_ot import cli

    count, out = 0, order["out"]

    def hook(event: str, args: tuple[Any, ...]) -> None:
        nonlocal count
        if event == "open":
            changes = isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        else:
            changes = event in CHANGES
        if changes and any(isinstance(a, str) and a.startswith(out) for a in map(_text, args[:2])):
            if count == order["at"]:
                os.kill(os.getpid(), signal.SIGKILL)
            count += 1

    sys.addaudithook(hook)
    sys.argv = ["plot-ot", *order["words"]]
    try:
        cli.main()
        code = 0
    except SystemExit as stop:
        code = int(stop.code or 0)
    os.write(report, str(count).encode())
    os._exit(code)


def _text(value: object) -> object:
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _nursery() -> None:
    import torch

    from plot_ot.judging import bench
    from plot_ot.report import page
    from plot_ot.tasks import MultipleChoice

    torch.set_num_threads(1)
    bench.RANDOM_HANDLES = 2
    page._library()
    answers = os.dup(1)
    os.dup2(2, 1)  # what a study prints is not an answer
    for line in sys.stdin:
        order = json.loads(line)
        if order["words"][1] == "mcqa":
            _ = MultipleChoice("tiny").language_model  # loaded once for all forks
        begin, (read, write) = time.monotonic(), os.pipe()
        if not (pid := os.fork()):
            try:
                _child(order, write)
            finally:
                os._exit(70)  # an error that is not ours: its traceback was printed
        os.close(write)
        if order["after"] is not None:
            time.sleep(order["after"])
            os.kill(pid, signal.SIGKILL)  # harmless to one that has ended: it is not waited for yet
        _, status = os.waitpid(pid, 0)
        changes = os.read(read, 100)
        os.close(read)
        found = {
            "status": os.waitstatus_to_exitcode(status),
            "changes": int(changes or 0),
            "seconds": time.monotonic() - begin,
        }
        os.write(answers, (json.dumps(found) + "\n").encode())


if __name__ == "__main__":
    _nursery()
