"""Verdicts on transformers compiled from programs, whose layout is known: what is behind docs/results/truth.md.

python benchmarks/compiled_study.py --seeds 1000 1009                                # every kind, every method
python benchmarks/compiled_study.py --kinds rival --methods plot das --seeds 2000 2099
python benchmarks/compiled_study.py --page docs/results/truth.md     # only the tables, of all that is done

Every (kind, seed, method) is one small file in the out folder; what is there is not run again.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path

import torch

from pages import markdown, write_tables
from plot_ot.files.writing import Json, write_atomically
from verdict_campaign import ERROR, share, unit

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from truth.campaigns import COMPILED, GIVEN, METHODS
from truth.known import ABSENT, COPY, DORMANT, FLAGGED, HERE, OUTPUT, PARENTS, REFUSED, RIGHT, UNDECIDED, WRONG

CHOSEN = ("plot", "plot-layered", "plot-pca", "closed-form", "newton", "das", "das-oblique", GIVEN)
COLUMNS = (RIGHT, PARENTS, "in part", UNDECIDED, REFUSED, FLAGGED, WRONG, ERROR)
KIND = {
    "compiled": "The program itself as the hypothesis: every variable is there",
    "rival": "A rival with the same answers as the hypothesis: one of its variables is nowhere",
    "dormant": "The tokens that carry one variable are not looked at; a dormant copy of it lies where it will be read",
    "decoder": "The same as the first kind, recorded and resumed as the Hugging Face model it is",
}


def run(kinds: Sequence[str], methods: Sequence[str], seeds: Sequence[int], out: Path) -> None:
    """All units that are not there yet, seed by seed."""
    out.mkdir(parents=True, exist_ok=True)
    for seed, kind, method in product(seeds, kinds, methods):
        path = out / f"{kind}-{seed}-{method}.json"
        if path.exists() or (kind == "rival" and method == GIVEN):  # nobody can give what is not there
            continue
        found = unit(kind, seed, method)
        write_atomically(path, json.dumps(found, indent=1).encode())
        said = ", ".join(f"{v} ({x['truth']}) {x['outcome']}" for v, x in found["variables"].items())
        print(f"{kind} {seed} {method}: {said} ({found['cpu']:.1f} CPU s)", flush=True)


def column(outcome: str) -> str:
    """Which column counts an outcome."""
    if outcome.startswith("in part"):
        return "in part"
    return {COPY: "in part", OUTPUT: WRONG}.get(outcome, outcome)


def rows(units: Sequence[Json]) -> Iterator[list[str]]:
    """One row per truth and method: how many variables each answer was given to, and how often it was right."""
    entries = [(x["truth"], u["method"], x) for u in units for x in u["variables"].values()]
    for truth in (HERE, ABSENT, DORMANT):
        for method in CHOSEN:
            mine = [x for t, m, x in entries if (t, m) == (truth, method)]
            if method == GIVEN:
                mine = [x for x in mine if x["outcome"] != ERROR]
            if mine:
                said = Counter(column(x["outcome"]) for x in mine)
                counts = [str(said[c]) for c in COLUMNS]
                yield [truth, method, *counts, share(sum(x["kept"] for x in mine), len(mine))]


def page(out: Path, seeds: range | None = None) -> list[str]:
    """The tables of every kind."""
    units = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(out.glob("*.json"))]
    units = [u for u in units if seeds is None or u["seed"] in seeds]
    lines = list[str]()
    for kind, told in KIND.items():
        mine = [u for u in units if u["kind"] == kind]
        if not mine:
            continue
        numbers, seconds = sorted({u["seed"] for u in mine}), sorted(u["cpu"] for u in mine)
        commits = ", ".join(sorted({u["version"] for u in mine}))
        lines += [
            f"## {kind.capitalize()}",
            "",
            f"{told}. {len(numbers)} programs, seeds {numbers[0]} to {numbers[-1]}, commit {commits}; median "
            f"{seconds[len(seconds) // 2]:.1f} CPU seconds a program and method.",
            "",
            *markdown(["truth", "method", *COLUMNS, "as it should be"], rows(mine)),
            "",
        ]
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="*", choices=list(COMPILED), default=["compiled", "rival", "dormant"])
    parser.add_argument("--methods", nargs="*", choices=[*METHODS, GIVEN], default=CHOSEN)
    parser.add_argument("--seeds", type=int, nargs=2, metavar=("FIRST", "LAST"))
    parser.add_argument("--out", type=Path, default=Path("runs/compiled"))
    parser.add_argument("--page", type=Path, help="a page whose part below the line '<!-- tables -->' is written anew")
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    seeds = range(args.seeds[0], args.seeds[1] + 1) if args.seeds else None
    if seeds and not args.page:
        run(args.kinds, args.methods, seeds, args.out)
    lines = page(args.out, seeds)
    print("\n".join(lines))
    if args.page:
        write_tables(args.page, lines)


if __name__ == "__main__":
    main()
