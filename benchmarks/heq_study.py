"""The hierarchical-equality study behind docs/results/heq.md: both samplers, all methods, ten seeds.

python benchmarks/heq_study.py            # seeds 0-9 into runs/bench, tables and figures into docs/results
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from statistics import fmean, pstdev

from plot_ot.report.tables import average_by_seed, banks_in, mean_sd, methods_in
from plot_ot.runs import Json, RunDirectory

SAMPLERS = ("balanced", "uniform")
TRANSPORT = ("plot", "plot-joint", "plot-layered")


def run(sampler: str, seeds: int, first: int, out: Path) -> RunDirectory:
    """The same command a user would type; continues where it was interrupted."""
    words = ["run", "heq", "--sampler", sampler, "--seeds", str(seeds), "--first-seed", str(first), "--out", str(out)]
    subprocess.run([sys.executable, "-m", "plot_ot.cli", *words], check=True)  # noqa: S603
    return RunDirectory.read(out)


def accuracy_rows(results: Json) -> list[str]:
    """One markdown row per method: every bank, the average, full patch and seconds."""
    banks = banks_in(results)
    head = ["method", *(f"{v} {b[:4]}." for v, b in banks), "average", "full patch", "size", "seconds"]
    rows = [head, ["---"] * len(head)]
    for method in methods_in(results):
        cells = [
            mean_sd(
                [r["accuracy"] for r in results["records"] if (r["method"], r["variable"], r["bank"]) == (method, *b)]
            )
            for b in banks
        ]
        average = mean_sd(list(average_by_seed(results, method).values()), 4)
        patch = list(average_by_seed(results, method, "full_patch").values())
        sizes = [s["size"] for s in results["selection"] if s["method"] == method]
        seconds = [t["seconds"] for t in results["runtimes"] if t["method"] == method]
        rows.append(
            [
                f"`{method}`",
                *cells,
                f"**{average}**",
                f"{fmean(patch):.3f}" if patch else "-",
                f"{fmean(sizes):.1f}" if sizes else "-",
                mean_sd(seconds, 2),
            ]
        )
    return ["| " + " | ".join(r) + " |" for r in rows]


def paired_rows(results: Json) -> list[str]:
    """Differences to full DAS on the same seeds."""
    das = average_by_seed(results, "das")
    rows = ["| method | mean difference to `das` (same seeds) | sd | seeds at least as good |", "|---|---|---|---|"]
    for method in (*TRANSPORT, "cosine", "brute-force", "random", "copy-source"):
        mine = average_by_seed(results, method)
        gaps = [mine[s] - das[s] for s in das if s in mine]
        better = sum(g >= 0 for g in gaps)
        rows.append(f"| `{method}` | {fmean(gaps):+.4f} | {pstdev(gaps):.4f} | {better} of {len(gaps)} |")
    return rows


def verdict_rows(results: Json) -> list[str]:
    """How many seeds got each verdict."""
    rows = ["| method | variable | verdicts |", "|---|---|---|"]
    for method, variable in dict.fromkeys((v["method"], v["variable"]) for v in results["verdicts"]):
        said = Counter(v["status"] for v in results["verdicts"] if (v["method"], v["variable"]) == (method, variable))
        rows.append(f"| `{method}` | {variable} | {', '.join(f'{s} ({n})' for s, n in said.most_common())} |")
    return rows


def sweep_rows(results: Json) -> list[str]:
    """`plot` over ε."""
    rows = ["| ε | accuracy | calibration | saturated couplings |", "|---|---|---|---|"]
    for epsilon in dict.fromkeys(s["value"] for s in results["sweeps"]):
        here = [s for s in results["sweeps"] if s["value"] == epsilon]
        tied = sum(any(f.startswith("saturated") for f in s["flags"]) for s in here)
        accuracy, calibration = (mean_sd([s[k] for s in here], 4) for k in ("accuracy", "calibration"))
        rows.append(f"| {epsilon:g} | {accuracy} | {calibration} | {tied} of {len(here)} |")
    return rows


def layer_rows(results: Json) -> list[str]:
    """Where calibration put each handle."""
    rows = ["| method | variable | places chosen (seeds) |", "|---|---|---|"]
    for method, variable in dict.fromkeys((s["method"], s["variable"]) for s in results["selection"]):
        where = Counter(
            "+".join(s["places"]) for s in results["selection"] if (s["method"], s["variable"]) == (method, variable)
        )
        rows.append(f"| `{method}` | {variable} | {', '.join(f'{p} ({n})' for p, n in where.most_common())} |")
    return rows


def write_page(runs: dict[str, RunDirectory], command: str, page: Path) -> None:
    """The results page, numbers only: the reading of them is in claims.md."""
    lines = ["# Hierarchical equality: results", "", f"Made by `{command}`.", ""]
    for sampler, run in runs.items():
        results = run.results()
        seeds = sorted({r["seed"] for r in results["records"]})
        failed = [f"seed {f['seed']}: {f['reason']}" for f in results["failures"]]
        lines += [
            f"## {sampler.capitalize()} banks",
            "",
            f"Seeds {', '.join(str(s) for s in seeds)}; mean ± population sd. Failed: {'; '.join(failed) or 'none'}. "
            "`full patch` is the whole vector at the places the handle uses; `size` the number of directions.",
            "",
            *accuracy_rows(results),
            "",
            *paired_rows(results),
            "",
            *verdict_rows(results),
            "",
            *layer_rows(results),
            "",
            "`plot` at other ε (reported, never selected from):",
            "",
            *sweep_rows(results),
            "",
            *(
                f"![{name}](figures/heq-{sampler}-{name}.png)"
                for name in ("accuracy", "handles", "epsilon", "sizes", "layers")
            ),
            "",
        ]
        for picture in (run.path / "figures").glob("*.png"):
            target = page.parent / "figures" / f"heq-{sampler}-{picture.name}"
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(picture, target)
    page.write_text("\n".join(lines), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--runs", type=Path, default=Path("runs/bench"))
    parser.add_argument("--page", type=Path, default=Path("docs/results/heq.md"))
    args = parser.parse_args()
    runs = {s: run(s, args.seeds, args.first_seed, args.runs / f"heq-{s}") for s in SAMPLERS}
    args.page.parent.mkdir(parents=True, exist_ok=True)
    write_page(runs, "make bench", args.page)


if __name__ == "__main__":
    main()
