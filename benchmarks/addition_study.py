"""The binary-addition study behind docs/results/addition.md: both widths, recipes and splits, all methods, ten seeds.

python benchmarks/addition_study.py       # seeds 0-9 into runs/bench, tables and figures into docs/results
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from statistics import fmean, median

import torch

from pages import (
    accuracy_rows,
    copy_figures,
    markdown,
    paired_rows,
    place_rows,
    run_study,
    verdict_rows,
    which_seeds,
    write_tables,
)
from plot_ot.files.writing import Json
from plot_ot.models.folders import default_cache
from plot_ot.report.tables import average_by_seed, mean_sd, methods_in
from plot_ot.stages.calibrate import correct
from plot_ot.studies.study import Study
from plot_ot.tasks import BinaryAddition

WIDTHS = (8, 16)
MAIN = ("paper", "round-robin")
OTHERS = (("paper", "proportional"), ("first-exact", "round-robin"), ("first-exact", "proportional"))
BITS = (4, 8, 16)
MOST_BITS_OF_DAS = 8
SCALING = ("plot", "plot-native", "plot-pca", "plot-closed-form", "plot-das", "das")
PAPER = {
    "plot-native": ("0.823 ± 0.040", "0.832 ± 0.027"),
    "plot-pca": ("0.937 ± 0.024", "0.941 ± 0.028"),
    "plot-das": ("0.974 ± 0.019", "0.974 ± 0.013"),
    "das": ("0.976 ± 0.018", "0.984 ± 0.009"),
}
"""The paper's averages for d = 8 and 16."""


def summary_rows(by_width: dict[int, Json]) -> list[str]:
    """Average exact accuracy by method and width, with the paper's beside it."""
    rows = []
    for method in methods_in(by_width[WIDTHS[0]]):
        ours = [mean_sd(list(average_by_seed(by_width[w], method).values()), 4) for w in WIDTHS]
        rows.append([f"`{method}`", *ours, *PAPER.get(method, ("", ""))])
    return markdown(["method", *(f"d = {w}" for w in WIDTHS), *(f"paper, d = {w}" for w in WIDTHS)], rows)


def opponent_rows(by_width: dict[int, Json]) -> list[str]:
    """Closed form against the better of the two gradient-trained methods, seed by seed and in the mean."""
    rows = []
    for width, results in by_width.items():
        mine, das, oblique = (average_by_seed(results, m) for m in ("plot-closed-form", "das", "das-oblique"))
        best = max(fmean(das.values()), fmean(oblique.values()))
        gaps = [mine[s] - max(das[s], oblique[s]) for s in mine]
        rows.append([str(width), f"{fmean(mine.values()):.4f}", f"{best:.4f}", f"{min(gaps):+.4f}", mean_sd(gaps, 4)])
    head = ["d", "closed form", "better mean of `das`, `das-oblique`", "worst seed against its better", "gap per seed"]
    return markdown(head, rows)


def evidence_rows(results: Json) -> list[str]:
    """Decoding and stretch by method: medians over seeds and variables, with the worst."""
    rows = []
    for method in dict.fromkeys(s["method"] for s in results["selection"]):
        found = [s["evidence"] for s in results["selection"] if s["method"] == method]
        decoded = [e["decoding"] for e in found if e["decoding"] is not None]
        stretch = [e["stretch"] for e in found]
        rows.append(
            [
                f"`{method}`",
                f"{fmean(decoded):.3f} (worst {min(decoded):.3f})",
                f"{median(stretch):.2f} (worst {max(stretch):.2f})",
            ]
        )
    return markdown(["method", "decoding on held-out inputs", "stretch of edited states (natural = 1)"], rows)


def scaling_rows(bits: Sequence[int], seeds: Sequence[int]) -> list[str]:
    """Accuracy and seconds (alone, recording included) against the number of bits; no verdicts, so no controls."""
    cells: dict[str, list[str]] = {m: [] for m in SCALING}
    for n in bits:
        task = BinaryAddition(16, n, "first-exact")
        found: dict[str, list[tuple[float, float]]] = {m: [] for m in SCALING}
        for seed in seeds:
            study = Study(task.prepare(seed, default_cache()))
            for name in SCALING:
                if name == "das" and n > MOST_BITS_OF_DAS:
                    continue
                state, parts = task.methods()[name].run(study.problem)
                right = [correct(r, state.handles[v], study.problem.readout) for (v, _), r in study.tests.items()]
                accuracy = fmean(float(x.double().mean()) for x in right)
                found[name].append((accuracy, sum(parts.values()) + study.recording_seconds))
        for name, seen in found.items():
            cells[name] += [mean_sd([a for a, _ in seen]), mean_sd([t for _, t in seen], 2)] if seen else ["-", "-"]
    head = [f"{what}, {n} bits" for n, what in product(bits, ("accuracy", "seconds"))]
    return markdown(["method", *head], [[f"`{m}`", *row] for m, row in cells.items()])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--scaling-seeds", type=int, default=2)
    parser.add_argument("--runs", type=Path, default=Path("runs/bench"))
    parser.add_argument("--page", type=Path, default=Path("docs/results/addition.md"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    seeds = ["--seeds", str(args.seeds), "--first-seed", str(args.first_seed)]
    lines = ["Made by `make bench` (benchmarks/addition_study.py).", ""]
    for recipe, split in (MAIN, *OTHERS):
        runs = {
            w: run_study(
                "addition",
                ["--width", str(w), "--recipe", recipe, "--split", split, *seeds],
                args.runs / f"addition-{w}-{recipe}-{split}",
            )
            for w in WIDTHS
        }
        results = {w: r.results for w, r in runs.items()}
        main_study = (recipe, split) == MAIN
        lines += [
            f"## Recipe {recipe}, split {split}",
            "",
            *(f"d = {w}: {which_seeds(r)}" for w, r in results.items()),
            "Mean ± population sd of the average over the six test banks (the paper reports sample sd).",
            "",
            *summary_rows(results),
            "",
            "The closed form against the better of the two methods that are trained by gradient:",
            "",
            *opponent_rows(results),
            "",
        ]
        for w, r in results.items() if main_study else ():
            lines += [
                f"### Width {w}",
                "",
                *accuracy_rows(r),
                "",
                *paired_rows(r, "das", [m for m in methods_in(r) if m != "das"]),
                "",
                *verdict_rows(r),
                "",
                *place_rows(r),
                "",
                *evidence_rows(r),
                "",
                *copy_figures(runs[w], f"addition-{w}", args.page),
                "",
            ]
    first = range(args.first_seed, args.first_seed + args.scaling_seeds)
    lines += [
        "## More bits",
        "",
        f"Width 16, recipe first-exact, seeds {', '.join(str(x) for x in first)}, 256 base inputs (sampled from 8 bits "
        f"on). There is one carry per bit, so variables and timesteps grow together. Full DAS was run up to "
        f"{MOST_BITS_OF_DAS} bits.",
        "",
        *scaling_rows(BITS, first),
        "",
    ]
    write_tables(args.page, lines)


if __name__ == "__main__":
    main()
