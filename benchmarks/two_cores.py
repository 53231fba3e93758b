"""Two cores for filtering and recording: threads of one process, or two processes with half of the prompts each?

python benchmarks/two_cores.py --models smollm2 planted-1000

Every way has processes of its own, which load the model, wait for the word and then record the same prompts (of
multiple choice) as a filter does; ways take turns. Writes docs/results/two_cores.{json,md}.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

import torch

from heq_speed import commit, machine
from pages import markdown
from plot_ot.tasks import MultipleChoice
from trie_recording import prompts_of, subject_of

WAYS = {"one thread": (1, 1), "two threads": (1, 2), "two processes": (2, 1)}
"""Processes, and threads of each."""


class Recorder:
    """A process that records its share of the prompts when it is told to."""

    def __init__(self, model: str, prompts: int, repeats: int, part: int, parts: int, threads: int) -> None:
        what = [model, str(prompts), str(repeats), str(part), str(parts)]
        self.process = subprocess.Popen(  # noqa: S603
            [sys.executable, __file__, "--child", *what],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": str(threads)},
        )
        self.listen()

    def say(self, word: str) -> None:
        """Tell it something."""
        assert self.process.stdin is not None
        self.process.stdin.write(word + "\n")
        self.process.stdin.flush()

    def listen(self) -> float:
        """What it says next: the CPU seconds that it took."""
        assert self.process.stdout is not None
        return float(self.process.stdout.readline())


def child(model: str, prompts: int, repeats: int, part: int, parts: int) -> None:
    """Load, then record whenever a line comes in."""
    task = MultipleChoice(model)
    subject, rows = subject_of(task, prompts_of(task, prompts, 1000, 0))
    mine, nobody = rows[part::parts], torch.zeros(0, dtype=torch.long)
    subject.record(mine[:8], nobody)
    print(0.0, flush=True)
    for _ in sys.stdin:
        start = time.process_time()
        for _ in range(repeats):
            subject.record(mine, nobody)
        print(time.process_time() - start, flush=True)


PRODUCTS = {"256 x 576 x 1536 (SmolLM2's own)": (256, 576, 1536, 800), "1500 x 1500 x 1500": (1500, 1500, 1500, 12)}
"""Rows, inner and outer width of a matrix product, and how often it is run."""


def products(rounds: int) -> dict[str, dict[str, float]]:
    """The fastest seconds of plain matrix products on one and on two threads: what two cores can give at most."""
    found = {}
    for name, (rows, inner, outer, times) in PRODUCTS.items():
        left, right = torch.randn(rows, inner), torch.randn(inner, outer)
        taken: dict[int, list[float]] = {1: [], 2: []}
        for threads in (1, 2) * (rounds + 1):  # the first round warms up
            torch.set_num_threads(threads)
            start = time.perf_counter()
            for _ in range(times):
                left @ right
            taken[threads].append(time.perf_counter() - start)
        found[name] = {"one": min(taken[1][1:]), "two": min(taken[2][1:])}
    return found


def measure(model: str, prompts: int, repeats: int, rounds: int) -> dict[str, dict[str, float]]:
    """Medians over rounds of seconds by the wall clock and of the CPU, for every way."""
    crews = {
        way: [Recorder(model, prompts, repeats, part, parts, threads) for part in range(parts)]
        for way, (parts, threads) in WAYS.items()
    }
    taken: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
    for _ in range(rounds):
        for way, crew in crews.items():
            start = time.perf_counter()
            for one in crew:
                one.say("go")
            cpu = sum(one.listen() for one in crew)
            taken[way].append((time.perf_counter() - start, cpu))
    for crew in crews.values():
        for one in crew:
            one.process.communicate()
    return {way: {"wall": median(w for w, _ in t), "cpu": median(c for _, c in t)} for way, t in taken.items()}


def page(found: dict[str, dict[str, object]]) -> list[str]:
    """The table of all models."""
    rows = []
    alone = found.get("products", {})
    for model, r in ((name, r) for name, r in found.items() if name != "products"):
        ways = r["ways"]
        assert isinstance(ways, dict)
        one = ways["one thread"]
        for way, s in ways.items():
            faster, more = one["wall"] / s["wall"], s["cpu"] / one["cpu"]
            rows.append([model, way, f"{s['wall']:.2f}", f"{s['cpu']:.2f}", f"{faster:.2f}", f"{more:.2f}"])
    made = "; ".join(
        f"{model}: `{r['command']}` at commit {r['commit']}, load {r['load']:.0f}"
        for model, r in found.items()
        if model != "products"
    )
    bare = [[name, f"{s['one'] / s['two']:.2f}"] for name, s in alone.items() if isinstance(s, dict)]
    here = machine()
    return [
        "# Two cores: threads or processes",
        "",
        "Is a recording faster with two threads of one process, or with two processes that have half of the prompts "
        "each? Prompts of multiple choice are recorded as a filter does, after everything was loaded; medians over "
        "rounds in which the ways take turns. `faster` is by the wall clock, against one thread. What CPU seconds "
        "exceed those of one thread by is waiting, or beginnings of prompts that both processes run.",
        "",
        *markdown(["model", "way", "wall s", "CPU s", "faster", "CPU, of one thread's"], rows),
        "",
        "How much faster are plain matrix products on two threads? The first has the size of those in a recording of "
        "SmolLM2: it is the bound for everything that is made of such products.",
        "",
        *markdown(["product", "faster on two threads"], bare),
        "",
        f"Made by {made} ({here['cpu']}, {here['cores']} cores).",
        "",
    ]


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        model, *numbers = sys.argv[2:]
        child(model, *map(int, numbers))
        return
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="*", default=["smollm2", "planted-1000"])
    parser.add_argument("--prompts", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--results", type=Path, default=Path("docs/results"))
    args = parser.parse_args()
    store = args.results / "two_cores.json"
    found = json.loads(store.read_text()) if store.exists() else {}
    found["products"] = products(args.rounds)
    for model in args.models:
        ways = measure(model, args.prompts, 1 if model == "smollm2" else 10, args.rounds)
        command = f"python benchmarks/two_cores.py --models {model} --prompts {args.prompts} --rounds {args.rounds}"
        found[model] = {"ways": ways, "command": command, "commit": commit(), "load": os.getloadavg()[0]}
        print(model, json.dumps(ways), flush=True)
        store.write_text(json.dumps(found, indent=1) + "\n")
        (args.results / "two_cores.md").write_text("\n".join(page(found)), encoding="utf-8")


if __name__ == "__main__":
    main()
