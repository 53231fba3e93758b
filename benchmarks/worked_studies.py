"""Four questions about unmodified SmolLM2, each asked by a file of `examples/`; behind docs/results/worked.md.

python benchmarks/worked_studies.py --seeds 2000 2002 --out runs/worked    # every (study, seed) is one small file
python benchmarks/worked_studies.py --page --out runs/worked               # only the page, of all that is done
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import matplotlib.pyplot as plt

import plot_ot
from pages import markdown, version, write_tables
from plot_ot.files.writing import Json, write_atomically
from plot_ot.result import Result

STUDIES = ("verbs", "pronouns", "successors", "years")
MODEL, PAIRS = "smollm2", 200
EXAMPLES = Path(__file__).parents[1] / "examples"


def example(name: str) -> ModuleType:
    """A file of `examples/` as a module."""
    spec = spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def asked(name: str, seed: int) -> Result:
    """A study's own question, with inputs and banks of this seed."""
    study, settings = example(name), {"size": PAIRS, "seed": seed, "progress": False}
    inputs = study.inputs(count=4 * PAIRS, seed=seed)
    if hasattr(study, "hypothesis"):
        model = plot_ot.load_subject(MODEL)
        return plot_ot.localize(model, study.hypothesis, inputs, filter="candidates", **settings)
    subject = plot_ot.load_subject(MODEL, study.prompts)
    return plot_ot.localize(subject, study.causal, study.prompts.rows(inputs), readout=study.readout, **settings)


def unit(name: str, seed: int) -> Json:
    """What is said of every variable of a study."""
    cpu = time.process_time()
    result = asked(name, seed)
    variables = {
        v: {
            "status": str(verdict.status),
            "sentence": verdict.sentence,
            "interval": verdict.interval,
            "evidence": dict(verdict.evidence),
            "places": result.handles[v].places,
            "size": result.handles[v].size,
            "profile": [[t.place, t.layer, t.score, t.low, t.high] for t in result.profile(v).tried],
        }
        for v, verdict in result.verdicts.items()
    }
    return {
        "study": name,
        "seed": seed,
        "version": version(),
        "variables": variables,
        "notes": list(result.notes),
        "cpu": time.process_time() - cpu,
    }


def done(out: Path) -> Iterator[Json]:
    """The units that are there, study by study."""
    for name in STUDIES:
        for path in sorted(out.glob(f"{name}-*.json")):
            yield json.loads(path.read_text(encoding="utf-8"))


def number(value: Any) -> str:
    return "-" if value is None else f"{value:.3f}"


def rows(units: list[Json]) -> list[str]:
    """One row per study, variable and seed."""
    head = [
        "study",
        "variable",
        "seed",
        "verdict",
        "where",
        "right on",
        "whole patch",
        "copying",
        "random",
        "stays right",
    ]
    table = []
    for u in units:
        for v, found in u["variables"].items():
            evidence = found["evidence"]
            interval = "" if found["interval"] is None else " [{:.3f}, {:.3f}]".format(*found["interval"])
            where = f"{', '.join(found['places'])}: {found['size']} direction{'s' * (found['size'] > 1)}"
            table.append(
                [
                    f"`{u['study']}`",
                    v,
                    str(u["seed"]),
                    found["status"],
                    where,
                    number(evidence.get("handle")) + interval,
                    *(number(evidence.get(k)) for k in ("full_patch", "copy_source", "random_mean", "invariance")),
                ]
            )
    return markdown(head, table)


def figure(units: list[Json], target: Path) -> None:
    """Best calibration score inside every block, one panel per study."""
    names = [s for s in STUDIES if any(u["study"] == s for u in units)]
    made, axes = plt.subplots(1, len(names), figsize=(3.1 * len(names), 2.6), sharey=True, squeeze=False)
    for axis, name in zip(axes[0], names, strict=True):
        for u in (u for u in units if u["study"] == name):
            for k, (variable, found) in enumerate(u["variables"].items()):
                points = sorted((layer, score) for _, layer, score, _, _ in found["profile"])
                axis.plot(
                    *zip(*points, strict=True), color=f"C{k}", marker="o", markersize=3.5, linestyle="", label=variable
                )
        handles, labels = axis.get_legend_handles_labels()
        first = {label: line for line, label in zip(handles, labels, strict=True)}
        axis.legend(first.values(), first.keys(), frameon=False, fontsize=8)
        axis.set(title=name, xlabel="block", xlim=(-1, 30), ylim=(0.2, 1.02))
        axis.spines[["top", "right"]].set_visible(False)
    axes[0][0].set_ylabel("calibration score")
    made.tight_layout()
    target.parent.mkdir(parents=True, exist_ok=True)
    made.savefig(target, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs=2, default=(2000, 2002), help="the first and the last")
    parser.add_argument("--studies", nargs="+", choices=STUDIES, default=STUDIES)
    parser.add_argument("--out", type=Path, default=Path("runs/worked"))
    parser.add_argument("--page", action="store_true")
    parser.add_argument("--results", type=Path, default=Path("docs/results"))
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if not args.page:
        for seed in range(args.seeds[0], args.seeds[1] + 1):
            for name in args.studies:
                path = args.out / f"{name}-{seed}.json"
                if not path.exists():
                    write_atomically(path, json.dumps(unit(name, seed), indent=1).encode())
    units = list(done(args.out))
    figure(units, args.results / "figures" / "worked.png")
    made_at = ", ".join(sorted({u["version"] for u in units}))
    cpu = ", ".join(f"{u['cpu'] / 60:.1f}" for u in units)
    lines = [
        f"Made by `python benchmarks/worked_studies.py` at {made_at}. CPU minutes (one thread): {cpu}.",
        "",
        *rows(units),
        "",
        "![Best calibration score inside every block](figures/worked.png)",
        "",
    ]
    write_tables(args.results / "worked.md", lines)


if __name__ == "__main__":
    main()
