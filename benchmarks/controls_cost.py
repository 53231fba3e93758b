"""What the controls of a verdict cost: CPU seconds of `localize` by part, on small networks, for several methods.

python benchmarks/controls_cost.py                                    # all networks and methods, seed 1000
python benchmarks/controls_cost.py --networks "two halves" --methods plot newton
python benchmarks/controls_cost.py --page docs/results/controls_cost.md

Controls are random handles, shuffled values, full patches, rebuilt handles, random subspaces: all that a verdict asks
for besides the search itself. They are to take at most a third of a run.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

import plot_ot
from pages import markdown, version, write_tables
from plot_ot.methods import Method
from plot_ot.result import Result
from two_halves import CAUSAL, INPUTS, trained

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from truth.campaigns import KINDS, METHODS

Case = tuple[Any, Any, Any, int]
"""Network, hypothesis, inputs or banks, pairs a bank."""
LIMIT = 1 / 3
COLOURS = ["red", "blue", "yellow", "green", "gray", "black", "white", "brown"]


def two_halves(seed: int, steps: int = 1000) -> Case:
    """The small MLP of two halves."""
    return plot_ot.load_subject(trained(seed, steps)), CAUSAL, INPUTS, 200


def pointer(seed: int) -> Case:
    """The README's questions to the embedded language model."""
    h = plot_ot.Hypothesis(
        template="Question: A {noun} is {color}. What color is a {noun}?\n"
        "{s0}. {c0}\n{s1}. {c1}\n{s2}. {c2}\n{s3}. {c3}\nAnswer:"
    )
    h.variable(name="pointer", parents=["color", "c0", "c1", "c2", "c3"])(lambda color, *c: c.index(color))
    h.output(name="answer", parents=["pointer", "s0", "s1", "s2", "s3"])(lambda pointer, *s: s[pointer])
    rng, questions = random.Random(seed), []
    for _ in range(300):
        c, s = rng.sample(COLOURS, 4), rng.sample("ABCDEFGH", 4)
        given = {"noun": rng.choice(["chair", "bear", "brick", "spoon", "lemon"]), "color": rng.choice(c)}
        questions.append(given | {f"c{k}": x for k, x in enumerate(c)} | {f"s{k}": x for k, x in enumerate(s)})
    return plot_ot.load_subject("tiny"), h, questions, 200


def known(kind: str, seed: int) -> Case:
    """A network of the campaigns."""
    of = KINDS[kind](seed)
    return of.subject, of.causal, of.rows if of.splits is None else of.splits, of.size


NETWORKS: dict[str, Callable[[int], Case]] = {
    "two halves": two_halves,
    "two halves, untrained": partial(two_halves, steps=0),
    "pointer, tiny decoder": pointer,
    **{kind: partial(known, kind) for kind in ("plant", "half", "gate", "decoder layer", "decoder token")},
    **{
        kind: partial(known, kind) for kind in ("absent", "illusion: borrowed", "fresh mlp", "fresh gru", "fresh llama")
    },
}
OWN = ("newton", "plot-pca", "das")
"""Methods as a user would put them together: a learner, a search over a grid, training."""
SHOWN = [
    *((network, "plot") for network in NETWORKS),
    *((n, m) for n in ("two halves", "plant", "absent") for m in OWN),
]


def asked(name: str) -> str | Method:
    """A method by name, or as a user's own."""
    return METHODS[name]


def measured(network: str, method: str, seed: int) -> Result:
    """One run, timed by the CPU: what else this machine does is not counted."""
    subject, hypothesis, pairs, size = NETWORKS[network](seed)
    wall, time.perf_counter = time.perf_counter, time.process_time
    try:
        return plot_ot.localize(subject, hypothesis, pairs, method=asked(method), size=size, seed=seed, progress=False)
    finally:
        time.perf_counter = wall


def row(network: str, method: str, result: Result) -> list[str]:
    """The parts of a run, and what share of it the controls took."""
    took = result.waited
    said = ", ".join(f"{v}: {x.status}" for v, x in result.verdicts.items())
    parts = [f"{took.get(part, 0.0):.2f}" for part in ("filtering", "recording", "search", "controls", "tables")]
    share = took["controls"] / sum(took.values())
    return [network, method, *parts, f"{share:.0%}" if share <= LIMIT else f"**{share:.0%}**", said]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="+", choices=list(NETWORKS), help="with --methods: other than the usual")
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=["plot"])
    parser.add_argument("--seed", type=int, default=1000)
    parser.add_argument("--page", type=Path)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    measured("plant", "plot", args.seed)  # what is loaded and compiled once is nobody's
    rows = []
    chosen = [(n, m) for n in args.networks for m in args.methods] if args.networks else SHOWN
    for network, method in chosen:
        rows.append(row(network, method, measured(network, method, args.seed)))
        print(" | ".join(rows[-1]), flush=True)
    head = ["network", "method", "filtering", "recording", "search", "controls", "tables", "controls' share", "said"]
    lines = [
        f"Made by `python benchmarks/controls_cost.py`, seed {args.seed}, version {version()}. `newton`, `plot-pca` "
        "and `das` are a user's own methods.",
    ]
    if args.page:
        write_tables(args.page, [*lines, "", *markdown(head, rows), ""])


if __name__ == "__main__":
    main()
