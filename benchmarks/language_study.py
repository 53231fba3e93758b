"""The language-model studies behind the pages docs/results/mcqa_*.md and ioi.md.

python benchmarks/language_study.py tiny       # MCQA on the six embedded nets
python benchmarks/language_study.py smollm2    # MCQA on SmolLM2 with the planted and with the plain adapter
python benchmarks/language_study.py ioi        # indirect object identification on unmodified SmolLM2
python benchmarks/language_study.py untouched --model FILE.gguf --seeds 3    # MCQA on a model nobody here trained
python benchmarks/language_study.py settings   # φ, shared (ε, β), the paper's calibration: the embedded planted nets
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

from pages import copy_figures, markdown, run_study, verdict_groups, version, which_seeds, write_tables
from plot_ot.files.run_reading import Reading
from plot_ot.files.writing import Json
from plot_ot.models.named import shipped_adapters
from plot_ot.models.tiny import TINY
from plot_ot.report.tables import average_by_seed, mean_sd, methods_in, stretch_of

Planted = Mapping[str, Sequence[int]]
"""variable -> the blocks where it was planted."""
STAGE_A = {"plot": "one-sided UOT", "plot-eot": "balanced OT", "cosine": "cosine"}
TINY_PLANTED = {"answer_pointer": (2,), "answer_token": (3, 4, 5)}
SMOL_PLANTED = {"answer_pointer": range(15, 23), "answer_token": range(23, 30)}
IOI_FOUND = {"name_position": (20, 21, 22), "name_token": range(23, 30)}
"""Not planted: what final-token patching shows (FACTS)."""
QWEN_FOUND = {"answer_pointer": (20, 21, 22), "answer_token": range(22, 28)}
"""Not planted: what whole patches at the last token of Qwen2.5-Coder-1.5B-Instruct show."""


FEWER_DAS = ["--das-every", "3", "--das-sizes", "4", "--das-epochs", "12"]
"""What two CPU cores have time for on SmolLM2: DAS with 4 of the 11 sizes and 12 epochs, and fewer methods."""
FEW = "plot,plot-closed-form,plot-newton,plot-das,full-vector,plot-eot,cosine"
MORE = "plot,plot-native,plot-pca,plot-closed-form,plot-newton,plot-das,full-vector,plot-eot,cosine"
MOST = f"{MORE},plot-native-das,plot-pca-das,das"
UNTOUCHED = "plot-closed-form,plot,full-vector,plot-eot,plot-native,plot-pca,plot-newton,cosine,plot-das"


def layer_of(site: str) -> int:
    """block_output.12 -> 12."""
    return int(site.rsplit(".", 1)[1])


def stage_a_rows(runs: Mapping[str, Reading], planted: Planted) -> list[str]:
    """Before calibration: where each coupling row ranks the blocks that hold the variable."""
    rows = []
    for method, said in STAGE_A.items():
        for variable, blocks in planted.items():
            found: dict[float, list[tuple[int, int]]] = {}
            for run in runs.values():
                for c in run.couplings:
                    if c["method"] == method and c["stage"] == 0:
                        row = c["plan"][c["variables"].index(variable)]
                        order = sorted(range(len(row)), key=lambda j: -row[j])
                        ranks = [order.index(j) + 1 for j, s in enumerate(c["sites"]) if layer_of(s) in blocks]
                        beta = math.inf if c["beta"] is None else c["beta"]
                        found.setdefault(beta, []).append((min(ranks), layer_of(c["sites"][order[0]])))
            for beta, seen in found.items():
                grid = "" if math.isinf(beta) else f", β = {beta:g}"
                first = sum(rank == 1 for rank, _ in seen)
                tops = ", ".join(str(t) for t in sorted({top for _, top in seen}))
                best = f"{fmean(rank for rank, _ in seen):.1f}"
                rows.append([f"{said}{grid}", variable, f"{first} of {len(seen)}", best, tops])
    rows += _norm_rows(runs, planted)
    return markdown(["coupling", "variable", "right block first", "mean rank of its best block", "blocks on top"], rows)


def _norm_rows(runs: Mapping[str, Reading], planted: Planted) -> list[list[str]]:
    """The control that knows nothing of the variable: blocks ranked by the size of their effect."""
    rows = []
    for variable, blocks in planted.items():
        seen = []
        for run in runs.values():
            done = set()
            for c in run.couplings:
                if c["method"] == "plot" and c["stage"] == 0 and c["seed"] not in done:
                    done.add(c["seed"])
                    order = sorted(range(len(c["sites"])), key=lambda j: -c["raw_norms"][j])
                    ranks = [order.index(j) + 1 for j, s in enumerate(c["sites"]) if layer_of(s) in blocks]
                    seen.append((min(ranks), layer_of(c["sites"][order[0]])))
        tops = ", ".join(str(t) for t in sorted({top for _, top in seen}))
        first = sum(rank == 1 for rank, _ in seen)
        if seen:  # `plot` is among the methods
            best = f"{fmean(r for r, _ in seen):.1f}"
            rows.append(["norm only", variable, f"{first} of {len(seen)}", best, tops])
    return rows


def ot_uot_rows(runs: Mapping[str, Reading]) -> list[str]:
    """The appendix's table: the block each kind of transport leads to, with its full patch on calibration."""
    rows = []
    for name, run in runs.items():
        for seed in sorted({s["seed"] for s in run.results["selection"]}):
            row = [name, str(seed)]
            for method in ("plot-eot", "plot"):
                for s in run.results["selection"]:
                    if (s["method"], s["seed"]) == (method, seed):
                        row.append(f"{layer_of(s['places'][0])} ({s['chosen']['calibration_score']:.3f})")
            rows.append(row)
    variables = list(dict.fromkeys(s["variable"] for run in runs.values() for s in run.results["selection"]))
    return markdown(["model", "seed", *(f"{k} {v}" for k in ("OT", "UOT") for v in variables)], rows)


def paper_rows(results: Json, variables: Sequence[str]) -> list[str]:
    """The paper's table: accuracy per variable, average, seconds, block and size."""
    rows = []
    for method in methods_in(results):
        cells = []
        for v in variables:
            mine = [r for r in results["records"] if (r["method"], r["variable"]) == (method, v)]
            cells.append(mean_sd([r["accuracy"] for r in mine if r["bank"] == "sensitivity"]))
            cells.append(mean_sd([r["accuracy"] for r in mine if r["bank"] == "invariance"]))
        vocabulary = [r["vocabulary"] for r in results["records"] if r["method"] == method and "vocabulary" in r]
        elsewhere = [r["accuracy"] for r in results["transfer"] if r["method"] == method]
        where = "; ".join(
            f"{layer_of(s['places'][0])}/{s['size']}" for s in results["selection"] if s["method"] == method
        )
        seconds = [t["seconds"] for t in results["runtimes"] if t["method"] == method]
        rows.append(
            [
                f"`{method}`",
                *cells,
                f"**{mean_sd(list(average_by_seed(results, method).values()), 4)}**",
                stretch_of(results, method),
                f"{fmean(vocabulary):.3f}" if vocabulary else "-",
                f"{fmean(elsewhere):.3f}" if elsewhere else "-",
                mean_sd(seconds, 1),
                where,
            ]
        )
    head = [x for v in variables for x in (f"{v} sens.", f"{v} inv.")]
    return markdown(
        ["method", *head, "average", "stretch", "over the vocabulary", "transfer", "seconds", "block/size"],
        rows,
    )


def section(name: str, run: Reading, page: Path) -> list[str]:
    """One model's tables."""
    results = run.results
    variables = list(dict.fromkeys(r["variable"] for r in results["records"]))
    notes = [n for n in results["notes"] if "pass_rates" in n]
    passed = [rate for n in notes for families in n["pass_rates"].values() for rate in families.values()]
    return [
        f"## {name}",
        "",
        f"{which_seeds(results)} Mean ± population sd. The model answered {min(passed):.2f} to {max(passed):.2f} of "
        "the candidate pairs right, by bank and family; the others are left out.",
        "",
        *paper_rows(results, variables),
        "",
        *verdict_groups(results),
        "",
        *copy_figures(run, f"{page.stem}-{name}", page, ("summary", "handles")),
        "",
    ]


def study(models: Mapping[str, Sequence[str]], task: str, args: argparse.Namespace) -> dict[str, Reading]:
    """Run the study of every model."""
    seeds = ["--seeds", str(args.seeds), "--first-seed", str(args.first_seed)]
    return {name: run_study(task, [*options, *seeds], args.runs / f"{task}-{name}") for name, options in models.items()}


SETTINGS = {
    "default settings": [],
    "φ: family means": ["--phi", "family"],
    "φ: probabilities": ["--phi", "probability"],
    "one (ε, β) for all": ["--grid", "shared"],
    "calibrated on sensitive pairs (paper)": ["--calibration", "paper"],
}
"""Each varies one choice of the language studies."""
TRANSPORT = ("plot", "plot-native", "plot-pca", "plot-closed-form")


def settings_page(args: argparse.Namespace) -> list[str]:
    """The transport methods on the planted nets under every setting."""
    nets = [name for name, condition in TINY.items() if condition == "planted"]
    seeds = ["--seeds", str(args.seeds), "--first-seed", str(args.first_seed), "--methods", ",".join(TRANSPORT)]
    rows = []
    for k, (said, options) in enumerate(SETTINGS.items()):
        runs = [run_study("mcqa", ["--model", n, *options, *seeds], args.runs / f"mcqa-setting{k}-{n}") for n in nets]
        found = [run.results for run in runs]
        cells = []
        for method in TRANSPORT:
            mine = [r for results in found for r in results["records"] if r["method"] == method]
            pointer = [r["accuracy"] for r in mine if (r["variable"], r["bank"]) == ("answer_pointer", "sensitivity")]
            whole = [x for results in found for x in average_by_seed(results, method).values()]
            cells.append(f"{mean_sd(whole)} ({fmean(pointer):.3f})")
        rows.append([said, *cells])
    return [
        f"Made by `python benchmarks/language_study.py settings`: {', '.join(nets)}, {args.seeds} seed(s) from "
        f"{args.first_seed}.",
        "",
        *markdown(["setting", *(f"`{m}`" for m in TRANSPORT)], rows),
        "",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("tiny", "smollm2", "ioi", "untouched", "settings"))
    parser.add_argument("--model", help="untouched: a GGUF file, directory or hub id of Qwen2.5-Coder-1.5B-Instruct")
    parser.add_argument("--dtype", default="float32", help="untouched: the type of its weights")
    parser.add_argument("--controls", default="standard", help="untouched: 'full' also re-initialises the network")
    parser.add_argument("--methods", default=UNTOUCHED, help="untouched: the methods to run, with commas")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--runs", type=Path, default=Path("runs/bench"))
    parser.add_argument("--results", type=Path, default=Path("docs/results"))
    args = parser.parse_args()
    if args.what == "settings":
        write_tables(args.results / "mcqa_settings.md", settings_page(args))
        return
    if args.what == "untouched" and not args.model:
        parser.error("untouched needs --model FILE.gguf (or a directory, or a hub id)")
    if args.what == "tiny":
        models: dict[str, list[str]] = {name: ["--model", name] for name in TINY}
        planted: Planted = TINY_PLANTED
        known = {n: c == "planted" for n, c in TINY.items()}
        page = args.results / "mcqa_tiny.md"
    elif args.what == "smollm2":
        known = {name: name.startswith("planted") for name in shipped_adapters("smollm2")}
        sizes = ["--fit", "120", "--pairs", "100", *FEWER_DAS]
        models = {
            f"smollm2-{name}": ["--model", "smollm2", "--adapter", name, *sizes, "--methods", MOST if there else FEW]
            for name, there in known.items()
        }
        planted, known = SMOL_PLANTED, {f"smollm2-{name}": there for name, there in known.items()}
        page = args.results / "mcqa_smollm2.md"
    elif args.what == "untouched":
        sizes = [
            "--dtype",
            args.dtype,
            "--controls",
            args.controls,
            "--fit",
            "300",
            "--pairs",
            "200",
            "--transfer",
            "4",
        ]
        sizes += FEWER_DAS
        models = {"qwen2.5-coder-1.5b": ["--model", args.model, *sizes, "--methods", args.methods]}
        planted, known = QWEN_FOUND, dict.fromkeys(models, True)
        page = args.results / "mcqa_untouched.md"
    else:
        models = {"smollm2": ["--fit", "120", "--pairs", "200", *FEWER_DAS, "--methods", MORE]}
        planted, known = IOI_FOUND, {"smollm2": True}
        page = args.results / "ioi.md"
    runs = study(models, "ioi" if args.what == "ioi" else "mcqa", args)
    truth = {name: run for name, run in runs.items() if known[name]}
    command = f"python benchmarks/language_study.py {args.what} --seeds {args.seeds}"
    lines = [
        f"Made by `{command}` at {version()}.",
        "",
        "## Stage A before calibration",
        "",
        *stage_a_rows(truth, planted),
        "",
    ]
    contrast = (
        "Balanced (OT) against one-sided (UOT) transport: the block that each leads to, and the calibration score of "
    )
    lines += [f"{contrast}its full patch.", "", *ot_uot_rows(runs), ""]
    for name, run in runs.items():
        lines += section(name, run, page)
    write_tables(page, lines)


if __name__ == "__main__":
    main()
