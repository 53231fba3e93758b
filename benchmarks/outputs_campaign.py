"""Regression heads with a planted variable, or without it: the campaign behind docs/results/outputs.md.

python benchmarks/outputs_campaign.py --seeds 1000 1004
python benchmarks/outputs_campaign.py --seeds 2000 2019 --page docs/results/outputs.md
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch

import plot_ot

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from pages import version
from truth import regression
from verdict_campaign import share


def main() -> None:
    """Judge every network, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", nargs=2, type=int, default=(1000, 1004))
    parser.add_argument("--page", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    seeds = range(args.seeds[0], args.seeds[1] + 1)
    readout = plot_ot.real_values(regression.TOLERANCE)
    lines, start = [], time.process_time()
    for kind, make, wanted in (("planted", regression.planted, True), ("absent", regression.absent, False)):
        hits, said = 0, []
        for seed in seeds:
            subject, causal = make(seed)
            result = plot_ot.localize(
                subject, causal, regression.rows(seed), readout=readout, size=200, seed=seed, progress=False
            )
            statuses = {v: verdict.status for v, verdict in result.verdicts.items()}
            right = all(s.found for s in statuses.values()) if wanted else not any(s.found for s in statuses.values())
            hits += right
            said += [] if right else [f"seed {seed}: {', '.join(f'{v} {s}' for v, s in statuses.items())}"]
            print(f"{kind} {seed}: {', '.join(f'{v} {s}' for v, s in statuses.items())}", flush=True)
        asked = "both variables placed" if wanted else "neither placed"
        lines += [f"| {kind} | {asked} | {share(hits, len(seeds))} | {'; '.join(said) or 'none'} |"]
    if args.page:
        text = [
            "# Regression heads: results",
            "",
            f"Made by `python benchmarks/outputs_campaign.py --seeds {args.seeds[0]} {args.seeds[1]}`, version",
            f"{version()}. Networks whose output is one real number, y = 2p + q (even seeds) or y = pq (odd ones),",
            f"judged by `localize` with `real_values({regression.TOLERANCE})` and 200 pairs a bank. The absent ones",
            "give the answers of y = 2p + q through other sums (tests/truth/regression.py). Shares have 95 %",
            "Clopper-Pearson intervals;",
            f"{(time.process_time() - start) / 2 / len(seeds):.1f} CPU seconds a network.",
            "",
            "| networks | asked | result | missed |",
            "| --- | --- | --- | --- |",
            *lines,
            "",
        ]
        args.page.write_text("\n".join(text), encoding="utf-8")


if __name__ == "__main__":
    main()
