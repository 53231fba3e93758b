"""The hierarchical-equality study behind docs/results/heq.md: both samplers, all methods, ten seeds.

python benchmarks/heq_study.py            # seeds 0-9 into runs/bench, tables and figures into docs/results
"""

from __future__ import annotations

import argparse
from pathlib import Path

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
from plot_ot.files.run_reading import Reading
from plot_ot.files.writing import Json
from plot_ot.report.tables import mean_sd
from plot_ot.transport import Degeneracy

SAMPLERS = ("balanced", "uniform")
TRANSPORT = ("plot", "plot-joint", "plot-layered")


def sweep_rows(results: Json) -> list[str]:
    """`plot` over ε."""
    rows = []
    for epsilon in dict.fromkeys(s["value"] for s in results["sweeps"]):
        here = [s for s in results["sweeps"] if s["value"] == epsilon]
        tied = sum(any(f["kind"] == Degeneracy.SATURATED for f in s["flags"]) for s in here)
        accuracy, calibration = (mean_sd([s[k] for s in here], 4) for k in ("accuracy", "calibration"))
        rows.append([f"{epsilon:g}", accuracy, calibration, f"{tied} of {len(here)}"])
    return markdown(["ε", "accuracy", "calibration", "saturated couplings"], rows)


def write_page(runs: dict[str, Reading], command: str, page: Path) -> None:
    """The tables of the results page: the reading of them is in claims.md."""
    lines = [f"Made by `{command}` (benchmarks/heq_study.py).", ""]
    for sampler, run in runs.items():
        results = run.results
        lines += [
            f"## {sampler.capitalize()} banks",
            "",
            f"{which_seeds(results)} Mean ± population sd.",
            "",
            *accuracy_rows(results),
            "",
            *paired_rows(results, "das", (*TRANSPORT, "cosine", "brute-force", "random", "copy-source")),
            "",
            *verdict_rows(results),
            "",
            *place_rows(results),
            "",
            "`plot` at other values of ε. They are only reported; nothing was chosen by them.",
            "",
            *sweep_rows(results),
            "",
            *copy_figures(run, f"heq-{sampler}", page),
            "",
        ]
    write_tables(page, lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--runs", type=Path, default=Path("runs/bench"))
    parser.add_argument("--page", type=Path, default=Path("docs/results/heq.md"))
    args = parser.parse_args()
    seeds = ["--seeds", str(args.seeds), "--first-seed", str(args.first_seed)]
    runs = {s: run_study("heq", ["--sampler", s, *seeds], args.runs / f"heq-{s}") for s in SAMPLERS}
    write_page(runs, "make bench", args.page)


if __name__ == "__main__":
    main()
