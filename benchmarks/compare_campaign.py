"""Rival hypotheses against networks whose program is known: the campaign behind docs/results/compare.md.

python benchmarks/compare_campaign.py named --seeds 1000 1009      # networks of one of ten programs
python benchmarks/compare_campaign.py none switched --seeds 1000 1009
python benchmarks/compare_campaign.py --page docs/results/compare.md    # only the page, of all that is done

Every network is one small file in the out folder; what is there is not run again.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from pathlib import Path

import torch

import plot_ot
from plot_ot.files.writing import Json, write_atomically

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from pages import version, write_tables
from truth.kinds import ROWS
from truth.programs import HYPOTHESES, OTHERS, PROGRAMS, switched, trained, wired
from verdict_campaign import share

SIZE = 120
METHOD = plot_ot.Method("closed-form", "closed forms at every place", (plot_ot.ClosedForm(),))
"""The search of the finalists: a fraction of the default's cost, on networks whose places are linear codes."""
TRAINED = 4
"""Every so many seeds the network is trained, else wired by hand."""
KINDS = ("named", "none", "switched")
HISTORY = (
    "These seeds were run once. An earlier run (bee0e40, seeds 3000 to 3099), before `compare` was rebuilt, had 99,",
    "100 and 100.",
    "",
)


def network(kind: str, seed: int) -> tuple[str, plot_ot.Subject]:
    """The program of a seed's network, and the network."""
    programs = PROGRAMS if kind == "named" else OTHERS
    name = list(programs)[seed % len(programs)]
    by_training = (seed // len(PROGRAMS)) % TRAINED == 0 and programs[name]
    return name, (trained if by_training else wired)(programs[name], seed)


def unit(kind: str, seed: int) -> Json:
    """One network compared with the ten programs; a switching one with its two."""
    cpu = time.process_time()
    if kind == "switched":
        made = switched(seed)
        rivals = {n: HYPOTHESES[n] for n in (made.first, made.second)}
        found = plot_ot.compare(made.subject, rivals, ROWS, size=SIZE, seed=seed, method=METHOD)
        result: Json = {"truth": f"{made.first} where {made.rule}, else {made.second}", "iou": overlap(made, found)}
    else:
        truth, subject = network(kind, seed)
        found = plot_ot.compare(subject, HYPOTHESES, ROWS, size=SIZE, seed=seed, method=METHOD)
        wanted = truth if kind == "named" else None
        right = found.winner == wanted and not found.tied
        result = {"truth": truth, "network": type(subject).__name__, "right": right}
    told = {"winner": found.winner, "tied": list(found.tied), "region": found.region and str(found.region.rule)}
    rows = [s.as_row() for s in found.standings]
    spent = time.process_time() - cpu
    return {"kind": kind, "seed": seed, "version": version(), **result, **told, "standings": rows, "cpu": spent}


def overlap(made: object, found: plot_ot.Comparison) -> float:
    """Intersection over union of the region found and the one where the leader's program is not followed."""
    if found.region is None:
        return 0.0
    leader = found.standings[0].name
    causal = HYPOTHESES[leader].run(ROWS)
    said = torch.from_numpy(found.region.rule.holds({n: c.tolist() for n, c in causal.items()}))
    fails = ~made.where if leader == made.first else made.where
    return float((said & fails).sum() / (said | fails).sum())


def run(kind: str, seed: int, out: Path) -> None:
    """A seed's network of a kind, unless it is there already."""
    path = out / kind / f"{seed}.json"
    if path.exists():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    found = unit(kind, seed)
    write_atomically(path, json.dumps(found, indent=1).encode())
    said = found.get("right", found.get("iou"))
    print(f"{kind} {seed}: {found['truth']}: {found['winner']}, {found['region']}, {said} ({found['cpu']:.1f} CPU s)")
    sys.stdout.flush()


def page(out: Path) -> list[str]:
    """The results page, of every unit in the out folder."""
    lines = [
        "Made by `python benchmarks/compare_campaign.py`.",
        "",
        "| networks | asked | result |",
        "| --- | --- | --- |",
    ]
    about = []
    for kind in KINDS:
        units = [json.loads(p.read_text()) for p in sorted((out / kind).glob("*.json"))]
        if not units:
            continue
        what, asked, hits = {
            "named": ("compute one of the ten", "that one named, alone", [u.get("right") for u in units]),
            "none": ("compute an eleventh", "none named", [u.get("right") for u in units]),
            "switched": ("switch program by input", "region with IoU >= 0.9", [u.get("iou", 0) >= 0.9 for u in units]),
        }[kind]
        lines.append(f"| {len(units)} that {what} | {asked} | {share(sum(map(bool, hits)), len(units))} |")
        seeds, versions = [u["seed"] for u in units], sorted({u["version"] for u in units})
        cpu = sorted(u["cpu"] for u in units)[len(units) // 2]
        of = f"seeds {min(seeds)} to {max(seeds)}, version {', '.join(versions)}"
        about.append(f"- *{kind}*: {of}; median {cpu:.1f} CPU seconds.")
        missed = [u for u, hit in zip(units, hits, strict=True) if not hit]
        said = Counter(f"{u['truth']}: winner {u['winner']}, region {u['region']}" for u in missed)
        about += [f"    - missed: {text} ({n})" for text, n in said.items()]
        if kind != "switched":
            learned = sum(u["network"] == "ModuleSubject" for u in units)
            about.append(f"    - {learned} of the networks are trained, the others wired by hand")
            stands = Counter(u["standings"][0]["stand"] for u in units)
            about.append(
                f"    - verdict on the hypothesis ranked first: {', '.join(f'{s} {n}' for s, n in stands.items())}"
            )
    return [*lines, "", *about, "", *HISTORY, ""]


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", choices=[*KINDS, []])
    parser.add_argument("--seeds", nargs=2, type=int, default=(1000, 1009))
    parser.add_argument("--out", type=Path, default=Path("runs/compare_campaign"))
    parser.add_argument("--page", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    for seed in range(args.seeds[0], args.seeds[1] + 1):
        for kind in args.kinds:
            run(kind, seed, args.out)
    if args.page:
        write_tables(args.page, page(args.out))


if __name__ == "__main__":
    main()
