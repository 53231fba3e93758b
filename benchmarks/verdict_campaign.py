"""Verdicts against networks whose truth is known: the campaigns behind docs/results/verdict_campaign.md.

python benchmarks/verdict_campaign.py plants half --seeds 1000 1009    # some campaigns, seeds from .. to (included)
python benchmarks/verdict_campaign.py all --seeds 1000 1009
python benchmarks/verdict_campaign.py smollm2 --seeds 2000 2002        # adapters with and without the pointer
python benchmarks/verdict_campaign.py --page docs/results/verdict_campaign.md    # only the page, of all that is done

Every (kind, seed, method) is one small file in the out folder; what is there is not run again.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import lru_cache, partial
from pathlib import Path

import torch
from scipy.stats import beta

import plot_ot
from pages import markdown, version, write_tables
from plot_ot.files.writing import Json, write_atomically
from plot_ot.result import Result
from plot_ot.tasks import MultipleChoice, mcqa_data

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from truth.campaigns import CAMPAIGNS, GIVEN, KINDS, METHODS, method_for
from truth.known import ABSENT, HERE, OUTCOMES, OUTPUT, RIGHT, Known, Truth, outcome, overlap, promise_kept

ERROR = "error"
ADAPTERS, SIZES = ("planted-1000", "planted-1001", "plain-1000", "plain-1001"), (40, 80, 200)
POINTER_BLOCKS = range(15, 23)
"""Where the planted adapters hold the pointer."""


# -- SmolLM2 --------------------------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def adapted(adapter: str) -> MultipleChoice:
    """SmolLM2 with an adapter; kept for the next unit."""
    return MultipleChoice(model="smollm2", adapter=adapter)


def smollm2(seed: int, adapter: str, size: int) -> Known:
    """Random multiple-choice prompts, from which `localize` draws banks of this size."""
    generator = torch.Generator().manual_seed(seed)
    rows = mcqa_data.draw_rows(120 + size, generator, letters=range(len(mcqa_data.ANSWERS)))
    blocks = dict.fromkeys(f"block_output.{b}" for b in POINTER_BLOCKS)
    pointer = Truth(HERE, blocks) if adapter.startswith("planted") else Truth(ABSENT)
    truths = {"answer_pointer": pointer, "answer_token": Truth(OUTPUT)}
    name = f"{adapter}, {size} pairs"
    return Known(name, seed, adapted(adapter).subject, mcqa_data.causal_model(), rows, truths, size=size)


LARGE = {f"{a}, {n} pairs": partial(smollm2, adapter=a, size=n) for a in ADAPTERS for n in SIZES}
ALL = {**CAMPAIGNS, "smollm2": (list(LARGE), ["plot"])}


# -- units ----------------------------------------------------------------------------------------------------


def unit(kind: str, seed: int, method: str) -> Json:
    """One network judged: what was said of every variable, and what that is worth."""
    start, cpu = time.perf_counter(), time.process_time()
    known = {**KINDS, **LARGE}[kind](seed)
    found: Json = {"kind": kind, "seed": seed, "method": method, "version": version()}
    try:
        pairs = known.rows if known.splits is None else known.splits
        result = plot_ot.localize(
            known.subject, known.causal, pairs, method=method_for(method, known), seed=seed, size=known.size
        )
        found["variables"] = {v: judged(known, v, result) for v in known.truths}
    except plot_ot.PlotError as problem:
        found[ERROR] = str(problem)
        found["variables"] = {v: {"truth": t.status, "outcome": ERROR, "kept": False} for v, t in known.truths.items()}
    return found | {"seconds": time.perf_counter() - start, "cpu": time.process_time() - cpu}


def judged(known: Known, variable: str, result: Result) -> Json:
    """A verdict against the truth."""
    truth, handle, verdict = known.truths[variable], result.handles[variable], result.verdicts[variable]
    said = outcome(verdict.status, handle.places, truth)
    return {
        "truth": truth.status,
        "share": truth.share,
        "status": str(verdict.status),
        "places": handle.places,
        "size": handle.size,
        "overlap": overlap(handle, truth),
        "outcome": said,
        "kept": said == OUTPUT if truth.status == OUTPUT else promise_kept(said, truth),
        "sentence": verdict.sentence,
        "evidence": dict(verdict.evidence),
    }


def run(campaign: str, seeds: Sequence[int], out: Path, only: Sequence[str], methods: Sequence[str]) -> None:
    """All units of a campaign that are not there yet, seed by seed."""
    kinds, usual = ALL[campaign]
    for seed in seeds:
        for kind in kinds:
            for method in usual:
                path = (
                    out / campaign / f"{kind.replace(' ', '-').replace(':', '').replace(',', '')}-{seed}-{method}.json"
                )
                if path.exists() or (only and kind not in only) or (methods and method not in methods):
                    continue
                path.parent.mkdir(parents=True, exist_ok=True)
                found = unit(kind, seed, method)
                write_atomically(path, json.dumps(found, indent=1).encode())
                said = ", ".join(f"{v} {x['outcome']}" for v, x in found["variables"].items())
                print(f"{kind} {seed} {method}: {said} ({found['cpu']:.1f} CPU s)", flush=True)


# -- the page -------------------------------------------------------------------------------------------------


def interval(hits: int, tries: int, level: float = 0.95) -> tuple[float, float]:
    """The Clopper-Pearson interval of a share."""
    tail = (1 - level) / 2
    low = float(beta.ppf(tail, hits, tries - hits + 1)) if hits else 0.0
    high = float(beta.ppf(1 - tail, hits + 1, tries - hits)) if hits < tries else 1.0
    return low, high


def share(hits: int, tries: int) -> str:
    """Hits of tries with their interval."""
    low, high = interval(hits, tries)
    return f"{hits} of {tries} [{low:.1%}, {high:.1%}]"


def read(out: Path, campaign: str) -> list[Json]:
    """The units of a campaign that are done."""
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted((out / campaign).glob("*.json"))]


def rows(units: Sequence[Json]) -> Iterator[list[str]]:
    """One row per kind, truth and method: what was said how often, and how often that was right."""
    entries = [(u["kind"], x["truth"], u["method"], x) for u in units for x in u["variables"].values()]
    order, methods = [*KINDS, *LARGE], [*METHODS, GIVEN]
    for key in sorted({e[:3] for e in entries}, key=lambda k: (order.index(k[0]), k[1], methods.index(k[2]))):
        mine = [x for *k, x in entries if tuple(k) == key]
        said = Counter(x["outcome"] for x in mine)
        told = ", ".join(f"{name} {said[name]}" for name in (*OUTCOMES, ERROR) if said[name])
        yield [*key, told, share(sum(x["kept"] for x in mine), len(mine))]


def page(out: Path) -> list[str]:
    """Every campaign's table."""
    lines = ["Made by `python benchmarks/verdict_campaign.py`.", ""]
    for campaign in ALL:
        units = read(out, campaign)
        if not units:
            continue
        seeds = sorted({u["seed"] for u in units})
        seconds = sorted(u["cpu"] for u in units)
        versions = ", ".join(sorted({u["version"] for u in units}))
        claimed = [x["outcome"].endswith((RIGHT, "place")) for u in units for x in u["variables"].values()]
        told = [
            f"{len(units)} networks and methods, seeds {seeds[0]} to {seeds[-1]}, version {versions}; median "
            f"{seconds[len(seconds) // 2]:.1f} CPU seconds each."
        ]
        if campaign == "nulls":
            told.append(f"Claimed (placed or in part): {share(sum(claimed), len(claimed))}.")
        head = ["kind", "truth", "method", "said", "as it should be"]
        lines += [f"## {campaign.capitalize()}", "", *told, "", *markdown(head, rows(units)), ""]
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("campaigns", nargs="*", help=f"all, or some of {', '.join(ALL)}")
    parser.add_argument("--seeds", type=int, nargs=2, default=(1000, 1009), metavar=("FIRST", "LAST"))
    parser.add_argument("--kinds", nargs="*", default=(), help="only these kinds of networks")
    parser.add_argument("--methods", nargs="*", default=(), help="only these methods")
    parser.add_argument("--out", type=Path, default=Path("runs/verdicts"))
    parser.add_argument("--page", type=Path, help="where to write the page")
    args = parser.parse_args()
    torch.set_num_threads(1)
    chosen = list(CAMPAIGNS) if args.campaigns == ["all"] else args.campaigns
    for campaign in chosen:
        if campaign not in ALL:
            parser.error(f"unknown campaign '{campaign}'; choose from all, {', '.join(ALL)}")
        run(campaign, range(args.seeds[0], args.seeds[1] + 1), args.out, args.kinds, args.methods)
    lines = page(args.out)
    print("\n".join(lines))
    if args.page:
        write_tables(args.page, lines)


if __name__ == "__main__":
    main()
