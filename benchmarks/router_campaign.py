"""Quiet routers before loud movers, by whole effects and along paths: the campaign behind docs/results/paths.md.

python benchmarks/router_campaign.py --seeds 1000 1004
python benchmarks/router_campaign.py --page docs/results/paths.md    # only the page, of all that is done

Every network is one small file in the out folder; what is there is not run again.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from plot_ot import (
    Calibrate,
    Localize,
    Problem,
    Search,
    SignatureSpec,
    State,
    Transport,
    along,
    as_readout,
    draw_pairs,
    record,
)
from plot_ot.files.writing import Json, write_atomically
from plot_ot.sites import heads
from plot_ot.stages.calibrate import correct
from plot_ot.subjects import Subject

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from pages import version, write_tables
from truth.routers import WHERE, Routed, causal, routed
from verdict_campaign import share

PAIRS = 100
READOUT = as_readout("softmax")
TRANSPORT = Transport("uot-one-sided", (0.05,), (1.0,), scale="median")
SEARCH = Search((1, 2, 4), (1.0, 2.0, 4.0), ties="natural")
DIRECTION = SignatureSpec(normalise="unit", centre=True)
"""What `localize` compares language models by: directions of effects on logits."""
WAYS = {"whole": "whole effects", "direction": "whole effects, their directions in logits", "paths": "paths"}


def searched(subject: Subject, seed: int, wanted: str, spec: SignatureSpec | None = None) -> Json:
    """One coupling over all heads or paths, calibrated: where what is wanted ranks, what was chosen, how it tests."""
    model, generator = causal(), torch.Generator().manual_seed(seed)
    rows = torch.cartesian_prod(*[torch.arange(4)] * 6)
    pools = rows[torch.randperm(len(rows), generator=generator)[:600]].chunk(3)
    fit, calibration, test = record(subject, *(draw_pairs(model, p, "balanced", PAIRS, generator) for p in pools))
    readout = READOUT if spec is None else as_readout("logits")
    problem = Problem(subject, fit, calibration, (WHERE,), readout, seed)
    state = State.start(problem)
    for stage in (Localize((heads(),), TRANSPORT, spec or SignatureSpec()), Calibrate(SEARCH)):
        state = stage(problem, state)
    [candidate] = state.candidates[WHERE]
    order = [candidate.family.sites[j].name for j in candidate.coupling.ranking(WHERE)]
    handle, changed = state.handles[WHERE], test.bank.changed[WHERE]
    right = correct(test, handle, READOUT)
    return {
        "sites": len(order),
        "first": order[0],
        "rank": 1 + order.index(wanted),
        "chosen": handle.chosen["sites"],
        "sensitivity": float(right[changed].double().mean()),
        "invariance": float(right[~changed].double().mean()),
        "answers": float((READOUT.decide(test.base_outputs) == test.bank.base_answer).double().mean()),
    }


def unit(seed: int) -> Json:
    """One planted network, looked at whole and along the paths into the heads of its last block."""
    cpu, planted = time.process_time(), routed(seed)
    subject = planted.subject()
    names = [p.name for p in subject.places]
    early, late = ([n for n in names if (n.split(".")[1] == "2") == last] for last in (False, True))
    paths = along(subject, senders=early, receivers=late)
    whole, found = searched(subject, seed, planted.router), searched(paths, seed, planted.path)
    direction = searched(subject, seed, planted.router, DIRECTION)
    return {
        "seed": seed,
        "version": version(),
        "router": planted.router,
        "mover": planted.mover,
        "whole": whole,
        "direction": direction,
        "paths": found,
        "right": hit(planted, found),
        "cpu": time.process_time() - cpu,
    }


def hit(planted: Routed, found: Json) -> bool:
    """The path from the router to the mover ranks first, leads the handle, and the handle works."""
    works = min(found["sensitivity"], found["invariance"]) >= 0.9
    return works and found["first"] == found["chosen"][0] == planted.path


def run(seed: int, out: Path) -> None:
    """A seed's network, unless it is there already."""
    path = out / f"{seed}.json"
    if path.exists():
        return
    out.mkdir(parents=True, exist_ok=True)
    found = unit(seed)
    write_atomically(path, json.dumps(found, indent=1).encode())
    whole, paths = found["whole"], found["paths"]
    print(
        f"{seed}: answers {whole['answers']:.2f}; router whole rank {whole['rank']} of {whole['sites']}, chosen "
        f"{whole['chosen']} {whole['sensitivity']:.2f}/{whole['invariance']:.2f}; path rank {paths['rank']} of "
        f"{paths['sites']}, chosen {paths['chosen']} {paths['sensitivity']:.2f}/{paths['invariance']:.2f}: "
        f"{found['right']} ({found['cpu']:.1f} CPU s)",
        flush=True,
    )


def page(out: Path) -> list[str]:
    """The results page, of every network in the out folder."""
    units = [json.loads(p.read_text()) for p in sorted(out.glob("*.json"))]
    n = len(units)

    def mean(which: str, what: str) -> float:
        return sum(u[which][what] for u in units) / n

    def row(asked: str, cell: Callable[[str], str]) -> str:
        return f"| {asked} | {' | '.join(map(cell, WAYS))} |"

    def works(which: str) -> int:
        return sum(min(u[which][s] for s in ("sensitivity", "invariance")) >= 0.9 for u in units)

    found, alone = sum(u["right"] for u in units), sum(len(u["paths"]["chosen"]) == 1 for u in units)
    versions = ", ".join(sorted({u["version"] for u in units}))
    lines = [
        "Made by `python benchmarks/router_campaign.py`.",
        "",
        row("asked", WAYS.__getitem__),
        "| --- | --- | --- | --- |",
        row("the router (to the mover) ranks first", lambda w: share(sum(u[w]["rank"] == 1 for u in units), n)),
        row("its mean rank", lambda w: f"{mean(w, 'rank'):.1f} of {units[0][w]['sites']}"),
        row("the handle is right on 90 % of test pairs of both kinds", lambda w: share(works(w), n)),
        row("sensitivity, mean", lambda w: f"{mean(w, 'sensitivity'):.3f}"),
        row("invariance, mean", lambda w: f"{mean(w, 'invariance'):.3f}"),
        "",
        f"- **Found**: in {share(found, n)} the path from router to mover ranks first, and its handle works.",
        f"- The handle is one path alone in {alone} of {n}.",
        f"- The networks answer {mean('whole', 'answers'):.1%} of the test prompts as planted.",
        f"- Seeds {units[0]['seed']} to {units[-1]['seed']}, version {versions};",
        f"  median {sorted(u['cpu'] for u in units)[n // 2]:.1f} CPU seconds for all three searches.",
    ]
    missed = [u for u in units if not u["right"]]
    lines += [f"- missed: seed {u['seed']} chose {', '.join(u['paths']['chosen'])}" for u in missed]
    return [*lines, ""]


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", nargs=2, type=int)
    parser.add_argument("--out", type=Path, default=Path("runs/router_campaign"))
    parser.add_argument("--page", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.seeds:
        for seed in range(args.seeds[0], args.seeds[1] + 1):
            run(seed, args.out)
    if args.page:
        write_tables(args.page, page(args.out))


if __name__ == "__main__":
    main()
