"""A small MLP from twenty seeds: which methods find its two halves, and how natural are the states they make?

python benchmarks/two_halves.py           # seeds 1000-1019; prints the tables, writes docs/results/two_halves.md

Every seed is one small file in the out folder; what is there is not run again. Verdicts have all controls: random
handles, shuffled values, and the same search on the network with fresh weights. With `--untrained` the networks
themselves are fresh: nothing should be placed there.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median

import torch
from torch import nn

import plot_ot
from pages import markdown, version, write_tables
from plot_ot.files.writing import write_atomically
from plot_ot.methods import Method, MethodKind, natural_das
from plot_ot.stages.choose import TrainDas
from plot_ot.stages.closed_form import ClosedForm
from plot_ot.stages.newton import NewtonHandles

CAUSAL = plot_ot.CausalModel(
    inputs=list("abcdefgh"),
    mechanisms={
        "left": lambda a, b, c, d: (a & b) | (c & d),
        "right": lambda e, f, g, h: (e & f) | (g & h),
        "differ": lambda left, right: left != right,
    },
    output="differ",
)
INPUTS = torch.cartesian_prod(*[torch.arange(2)] * 8)
METHODS: dict[str, str | Method] = {
    "localize": "plot",
    "closed form": Method("closed-form", "closed forms", (ClosedForm(),)),
    "newton": Method("newton", "closed forms, then Gauss-Newton", (ClosedForm(), NewtonHandles())),
    "das": "das",
    "das-natural": Method("das-natural", "DAS kept natural", (natural_das(TrainDas()),), MethodKind.DAS),
}


def trained(seed: int, steps: int = 1000) -> nn.Sequential:
    """A network of the study; 0 steps leave it as it was made."""
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 2))
    optimiser = torch.optim.Adam(net.parameters(), lr=1e-2)
    for _ in range(steps):
        optimiser.zero_grad()
        nn.functional.cross_entropy(net(INPUTS.float()), CAUSAL.answer(INPUTS).long()).backward()
        optimiser.step()
    return net


def measured(seed: int, methods: Sequence[str], steps: int) -> list[dict[str, object]]:
    """One row per method and variable."""
    subject, rows = plot_ot.load_subject(trained(seed, steps)), []
    for name in methods:
        result = plot_ot.localize(subject, CAUSAL, INPUTS, method=METHODS[name], controls="full")
        chosen = {s["variable"]: s for s in result.unit["selection"]}
        for v, verdict in result.verdicts.items():
            accuracy = {r["bank"]: r["accuracy"] for r in result.records if r["variable"] == v}
            rows.append(
                {
                    "seed": seed,
                    "method": name,
                    "variable": v,
                    **accuracy,
                    "stretch": chosen[v]["evidence"]["stretch"],
                    "cell": chosen[v]["evidence"]["cell_stretch"],
                    "verdict": str(verdict.status),
                    "sentence": verdict.sentence,
                    "version": version(),
                    "seconds": result.seconds,
                }
            )
    return rows


def tables(rows: Sequence[dict[str, object]]) -> list[str]:
    """Every network, and the means over those where some method finds the variable."""

    def cell(seed: object, method: str) -> str:
        here = [r for r in rows if (r["seed"], r["method"]) == (seed, method)]
        told = [f"{r['sensitivity']:.3f}/{r['invariance']:.3f} ×{r['stretch']:.2f} {r['verdict']}" for r in here]
        return "; ".join(told)

    methods = list(dict.fromkeys(str(r["method"]) for r in rows))
    seeds = list(dict.fromkeys(r["seed"] for r in rows))
    lines = markdown(["seed", *methods], [[str(s), *(cell(s, m) for m in methods)] for s in seeds])
    found = {(r["seed"], r["variable"]) for r in rows if str(r["verdict"]).startswith("placed")}
    summary = []
    for m in methods:
        mine = [r for r in rows if r["method"] == m]
        placed = [r for r in mine if str(r["verdict"]).startswith("placed")]
        there = [r for r in mine if (r["seed"], r["variable"]) in found]
        numbers = [f"{fmean(float(str(r[k])) for r in there):.4f}" for k in ("sensitivity", "invariance") if there]
        stretch = [float(str(r["stretch"])) for r in there or mine]
        seconds = fmean(float(str(r["seconds"])) for r in mine)
        summary.append(
            [
                m,
                *(numbers or ["-", "-"]),
                f"{median(stretch):.2f} (worst {max(stretch):.2f})",
                f"{len(placed)} of {len(mine)}",
                f"{seconds:.2f}",
            ]
        )
    head = ["method", "sensitivity", "invariance", "median stretch", "placed", "seconds"]
    cases = f"Means over the {len(found)} cases (a network and a variable) that at least one method places:"
    lines += ["", cases, ""]
    return [*lines, *markdown(head, summary), "", *lonely(rows)]


def lonely(rows: Sequence[dict[str, object]]) -> list[str]:
    """The cases that a method with Newton places and no method without it does, with what their verdicts say."""
    with_newton = ("localize", "newton")
    told = ["Cases placed by a method that ends in Newton, and by no other:", ""]
    for key in dict.fromkeys((r["seed"], r["variable"]) for r in rows):
        mine = [r for r in rows if (r["seed"], r["variable"]) == key]
        placed = [r for r in mine if str(r["verdict"]).startswith("placed")]
        if placed and all(r["method"] in with_newton for r in placed):
            others = ", ".join(f"{r['method']}: {r['verdict']}" for r in mine if r not in placed)
            told += [f"- seed {key[0]}, {r['method']}: {r['sentence']} ({others})" for r in placed]
    return told if len(told) > 2 else [*told, "- none"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--first-seed", type=int, default=1000)
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS))
    parser.add_argument("--untrained", action="store_true", help="networks that were never trained")
    parser.add_argument("--out", type=Path, default=Path("runs/two_halves"))
    parser.add_argument("--page", type=Path, default=Path("docs/results/two_halves.md"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    args.out.mkdir(parents=True, exist_ok=True)
    rows = []
    for seed in range(args.first_seed, args.first_seed + args.seeds):
        path = args.out / f"{'untrained-' if args.untrained else ''}{seed}.json"
        if not path.exists():
            new = measured(seed, args.methods, 0 if args.untrained else 1000)
            write_atomically(path, json.dumps(new, indent=1).encode())
            for r in new:
                told = f"{r['sensitivity']:.3f}/{r['invariance']:.3f} stretch {r['stretch']:.2f}, {r['verdict']}"
                print(f"{seed} {r['method']} {r['variable']}: {told}", flush=True)
        rows += json.loads(path.read_text(encoding="utf-8"))
    made = f"Made by `python benchmarks/two_halves.py`, version {', '.join(sorted({r['version'] for r in rows}))}."
    lines = [made, "", *tables(rows), ""]
    print("\n".join(lines))
    write_tables(args.page, lines)


if __name__ == "__main__":
    main()
