"""Language studies on several seeds of banks, and how sure their mean is: behind docs/results/banks.md.

python benchmarks/more_banks.py --first-seed 1 --seeds 5                  # SmolLM2: planted and plain adapters, IOI
python benchmarks/more_banks.py --models tiny --first-seed 1000 --seeds 2 --page runs/banks.md    # a quick look

Each model is one run of `plot-ot run`, which goes on where it was interrupted. A seed draws new prompts for every bank;
the model stays the same. Of a method's handles the table shows the mean over seeds of what the verdict shows: the share
of discriminating test pairs that are answered as predicted. Its interval is a bootstrap of two levels: first some of
the seeds, then in each some of its base prompts, both with replacement.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean, median

import numpy as np

from pages import markdown, run_study, version, write_tables
from plot_ot.files.run_reading import Reading
from plot_ot.files.writing import Json
from plot_ot.judging.intervals import at_most
from plot_ot.models.named import shipped_adapters
from plot_ot.report.tables import mean_sd

DRAWS = 10_000
METHODS = "plot,plot-closed-form,plot-das,full-vector"
DAS = ["--das-sizes", "4", "--das-epochs", "12"]
SIZES = {"mcqa": ["--fit", "120", "--pairs", "100"], "ioi": ["--fit", "120", "--pairs", "200"]}
MODELS: dict[str, tuple[str, list[str]]] = {
    **{name: ("mcqa", ["--model", "smollm2", "--adapter", name]) for name in shipped_adapters("smollm2")},
    "ioi": ("ioi", []),
    "tiny": ("mcqa", []),
}
"""A task of `plot-ot run`, and its options."""


def over_banks(shares: Sequence[float], inputs: Sequence[int]) -> tuple[float, float, float]:
    """The mean over banks of a share of base inputs, with its 95 % interval over banks and the inputs of each.

    Draws of shares near 0 and 1 vary too little; there the exact bound over all inputs counts, as in a verdict.
    """
    p, n = np.asarray(shares), np.asarray(inputs)
    generator = np.random.default_rng(0)
    picked = generator.integers(len(p), size=(DRAWS, len(p)))
    drawn = (generator.binomial(n[picked], p[picked]) / n[picked]).mean(axis=1)
    low, high = np.quantile(drawn, (0.025, 0.975))
    mean, total = float(p.mean()), float(n.sum())
    return mean, min(float(low), 1 - at_most(1 - mean, total)), max(float(high), at_most(mean, total))


def rows(name: str, run: Reading) -> Iterator[list[str]]:
    """One row per variable that can be found and method."""
    told: dict[tuple[str, str], list[Json]] = {}
    for v in run.results["verdicts"]:
        if "handle" in v["evidence"]:
            told.setdefault((v["variable"], v["method"]), []).append(v)
    for (variable, method), verdicts in told.items():
        evidence = [v["evidence"] for v in verdicts]
        mean, low, high = over_banks([e["handle"] for e in evidence], [round(e["base_inputs"]) for e in evidence])
        chosen = [s for s in run.results["selection"] if (s["variable"], s["method"]) == (variable, method)]
        yield [
            name,
            variable,
            f"`{method}`",
            str(len(verdicts)),
            f"{mean:.3f} [{low:.3f}, {high:.3f}]",
            f"{min(e['handle'] for e in evidence):.3f}",
            *(_mean(evidence, part) for part in ("invariance", "full_patch", "copy_source", "random_mean", "shuffled")),
            f"{median(s['evidence']['stretch'] for s in chosen):.2f}",
            _counted(str(s["size"]) for s in chosen),
            _counted(s["places"][0].rsplit(".", 1)[1] for s in chosen),
            _counted(str(v["status"]) for v in verdicts),
        ]


def _mean(evidence: Sequence[Mapping[str, float]], part: str) -> str:
    found = [e[part] for e in evidence if part in e]
    return f"{fmean(found):.3f}" if found else "-"


def _counted(values: Iterator[str]) -> str:
    return ", ".join(f"{value} ({n})" for value, n in Counter(values).most_common())


def stage_a(name: str, run: Reading) -> Iterator[list[str]]:
    """How often each block is on top of a row of the first coupling, over seeds and β."""
    tops: dict[str, Counter[str]] = {}
    for c in run.couplings:
        if c["method"] == "plot" and c["stage"] == 0:
            for variable, row in zip(c["variables"], c["plan"], strict=True):
                block = c["sites"][int(np.argmax(row))].rsplit(".", 1)[1]
                tops.setdefault(variable, Counter())[block] += 1
    for variable, blocks in tops.items():
        yield [name, variable, ", ".join(f"{block} ({n})" for block, n in blocks.most_common())]


def seconds(name: str, run: Reading) -> Iterator[list[str]]:
    """What each method takes alone and cold, controls not counted."""
    by_method: dict[str, list[float]] = {}
    for t in run.results["runtimes"]:
        by_method.setdefault(t["method"], []).append(t["seconds"])
    for method, taken in by_method.items():
        yield [name, f"`{method}`", mean_sd(taken, 1)]


def tables(runs: Mapping[str, Reading], command: str) -> list[str]:
    """Handles, first couplings and seconds of all models."""
    head = ["model", "variable", "method", "seeds", "right (95 % over banks and inputs)", "worst seed", "stays right"]
    head += ["whole patch", "copying", "random", "shuffled values", "stretch", "directions", "block", "verdicts"]
    return [
        f"Made by `{command}` at {version()}.",
        "",
        *markdown(head, (row for name, run in runs.items() for row in rows(name, run))),
        "",
        "The block on top of each row of Stage A's couplings, in brackets how often over seeds and β:",
        "",
        *markdown(["model", "variable", "block"], (row for name, run in runs.items() for row in stage_a(name, run))),
        "",
        "Seconds of each method, mean ± sd over seeds, recording included and controls not:",
        "",
        *markdown(["model", "method", "seconds"], (row for name, run in runs.items() for row in seconds(name, run))),
        "",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=[m for m in MODELS if m != "tiny"])
    parser.add_argument("--first-seed", type=int, default=1)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--methods", default=METHODS, help="with commas")
    parser.add_argument("--runs", type=Path, default=Path("runs/banks"))
    parser.add_argument("--page", type=Path, default=Path("docs/results/banks.md"))
    args = parser.parse_args()
    drawn = ["--first-seed", str(args.first_seed), "--seeds", str(args.seeds), "--methods", args.methods]
    runs = {}
    for name in args.models:
        task, options = MODELS[name]
        given = [*options, *SIZES[task], *DAS, "--controls", "standard", *drawn]
        runs[name] = run_study(task, given, args.runs / name)
    command = f"python benchmarks/more_banks.py --models {' '.join(args.models)} "
    command += f"--first-seed {args.first_seed} --seeds {args.seeds} --methods {args.methods}"
    write_tables(args.page, tables(runs, command))


if __name__ == "__main__":
    main()
