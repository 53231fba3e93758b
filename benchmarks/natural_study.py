"""Accuracy and stretch side by side: who is exact, who leaves states natural, and what it costs.

python benchmarks/natural_study.py                                   # seeds 0-9, all networks, then the page
python benchmarks/natural_study.py --seeds 1000 1002 --networks heq  # seeds from .. to (included), some networks
python benchmarks/natural_study.py --page-only                       # only the page, of all that is done

Every (network, seed) is one small file in the out folder; what is there is not run again. All methods of a unit run one
after the other in one process, so their CPU seconds can be compared. Seconds are those of a method alone: the recording
and the tests are left out, for all alike.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import fmean, median

import torch

from measuring import timed
from pages import markdown, version, write_tables
from plot_ot.files.writing import Json, write_atomically
from plot_ot.judging.controls import controls, full_patch
from plot_ot.judging.naturalness import naturalness
from plot_ot.methods import Method, MethodKind
from plot_ot.models.folders import default_cache
from plot_ot.report.tables import mean_sd
from plot_ot.stages.calibrate import correct
from plot_ot.stages.choose import TrainDas
from plot_ot.stages.ways import Best
from plot_ot.studies.study import Study
from plot_ot.studies.task import SeedFailed, Task
from plot_ot.tasks import BinaryAddition, HierarchicalEquality

METHODS = ("plot-newton", "plot-closed-form", "plot-das", "das", "das-oblique", "das-natural", "random")
CONTROLS = ("copy-source", "full patch")
NETWORKS: dict[str, tuple[str, Callable[[], Task]]] = {
    "heq": ("Hierarchical equality, balanced banks", lambda: HierarchicalEquality(sampler="balanced")),
    **{
        f"adder-{width}-{recipe}": (
            f"Adders, d = {width}, recipe {recipe}",
            lambda width=width, recipe=recipe: BinaryAddition(width, recipe=recipe),
        )
        for recipe in ("paper", "first-exact")
        for width in (8, 16)
    },
}


def methods(task: Task) -> dict[str, Method]:
    """The task's own methods; hierarchical equality has no oblique DAS, nor one at the layer that transport chooses."""
    found = dict(task.methods())
    if "plot-layered" not in found:
        return found
    das = next(stage for stage in found["das"].stages if isinstance(stage, TrainDas))
    oblique = replace(das, spec=replace(das.spec, optimiser="oblique", rate=0.02))
    there = Best(((),))  # only where the handles are
    stages = (*found["plot-layered"].stages, there, das)
    own = [
        Method("plot-das", "plot-layered, then DAS at the layer it chose", stages, MethodKind.DAS),
        Method("das-oblique", "full DAS with reading and writing apart", (oblique,), MethodKind.DAS),
    ]
    return {**found, **{m.name: m for m in own}}


def unit(network: str, seed: int) -> Json:
    """All methods on one network: accuracies, stretches and CPU seconds."""
    task = NETWORKS[network][1]()
    found: Json = {"network": network, "seed": seed, "version": version()}
    try:
        study = Study(task.prepare(seed, default_cache()))
    except SeedFailed as failed:
        return found | {"failed": str(failed)}
    readout, rows = study.problem.readout, {}
    for name in METHODS:
        (state, _), seconds = timed(lambda name=name: methods(task)[name].run(study.problem))
        banks = {f"{v} {b}": _mean(correct(r, state.handles[v], readout)) for (v, b), r in study.tests.items()}
        tested = {v: study.tests[v, "sensitivity"] for v in state.handles}
        rows[name] = {
            "banks": banks,
            "cpu": seconds.cpu,
            "handles": {
                v: {
                    "places": h.places,
                    "size": h.size,
                    "chosen": str(h.chosen.get("form", "")),
                    **asdict(naturalness(h, study.problem.fit, tested[v])),
                }
                for v, h in state.handles.items()
            },
        }
        if name == "plot-newton":  # the whole of the places that it chose
            patches = {
                v: full_patch(v, [e.place for e in h.edits], study.problem.subject) for v, h in state.handles.items()
            }
            whole = {f"{v} {b}": _mean(correct(r, patches[v], readout)) for (v, b), r in study.tests.items()}
            rows["full patch"] = {"banks": whole}
    copied = {f"{v} {b}": _mean(controls(r, v, readout)["copy-source"]) for (v, b), r in study.tests.items()}
    rows["copy-source"] = {"banks": copied}
    return found | {"methods": rows}


def _mean(right: torch.Tensor) -> float:
    return float(right.double().mean())


# -- the page -------------------------------------------------------------------------------------------------


def average(row: Json) -> float:
    """The mean over a network's test banks."""
    return fmean(row["banks"].values())


def _handles(units: Sequence[Json], method: str) -> list[Json]:
    return [h for u in units for h in u["methods"][method]["handles"].values()]


def rows(units: Sequence[Json]) -> list[list[str]]:
    """One row per method and control."""
    told = []
    for name in (*METHODS, *CONTROLS):
        mine = [average(u["methods"][name]) for u in units]
        row = [f"`{name}`", mean_sd(mine, 4), f"{min(mine):.4f}"]
        if name in CONTROLS:
            told.append([*row, *["-"] * 6])
            continue
        found = _handles(units, name)
        stretch, cell = [h["stretch"] for h in found], [h["cell_stretch"] for h in found if h["cell_stretch"]]
        wide = max(found, key=lambda h: h["stretch"])
        cpu = [u["methods"][name]["cpu"] for u in units]
        full = sum(u["methods"]["das"]["cpu"] for u in units)
        told.append(
            [
                *row,
                f"{median(stretch):.2f}",
                f"{wide['stretch']:.2f} [{wide['stretch_low']:.2f}, {wide['stretch_high']:.2f}]",
                f"{median(cell):.2f}",
                f"{max(cell):.2f}",
                f"{fmean(cpu):.2f}",
                f"{sum(cpu) / full:.2f}",
            ]
        )
    return told


HEAD = (
    "method",
    "accuracy",
    "worst network",
    "stretch",
    "worst stretch [95 %]",
    "cell stretch",
    "worst cell stretch",
    "CPU seconds",
    "of full DAS's",
)


def asked(network: str, units: Sequence[Json]) -> str:
    """The targets of the exact and natural method, and whether they are met."""
    accuracy = {m: fmean(average(u["methods"][m]) for u in units) for m in METHODS}
    opponent = accuracy["das"] if network == "heq" else max(accuracy["das"], accuracy["das-oblique"]) - 0.002
    limit = 1.2 if network == "heq" else 1.5
    stretch = median(h["stretch"] for h in _handles(units, "plot-newton"))
    cpu = {m: sum(u["methods"][m]["cpu"] for u in units) for m in ("plot-newton", "das")}
    share, mine = cpu["plot-newton"] / cpu["das"], accuracy["plot-newton"]
    who = "`das`" if network == "heq" else "the better of `das` and `das-oblique` less 0.002"
    wins = sum(average(u["methods"]["plot-newton"]) >= average(u["methods"]["das"]) for u in units)
    return (
        f"Targets for `plot-newton`: accuracy at least {opponent:.4f} ({who}): {mine:.4f}, {_met(mine >= opponent)}; "
        f"median stretch at most {limit}: {stretch:.2f}, {_met(stretch <= limit)}; CPU time at most full DAS's: "
        f"{share:.2f} of it, {_met(share <= 1)}. It is at least as good as `das` on {wins} of {len(units)} networks."
    )


def _met(holds: bool) -> str:
    return "met" if holds else "**not met**"


def page(done: Mapping[str, Sequence[Json]]) -> list[str]:
    """Every network's table."""
    lines = ["Made by `python benchmarks/natural_study.py`. All numbers are in natural.json.", ""]
    for network, units in done.items():
        here = [u for u in units if "methods" in u]
        failed = [f"seed {u['seed']}: {u['failed']}" for u in units if "failed" in u]
        if not here:
            continue
        seeds = ", ".join(str(u["seed"]) for u in here)
        versions = ", ".join(sorted({u["version"] for u in here}))
        lines += [
            f"## {NETWORKS[network][0]}",
            "",
            f"Seeds {seeds}; version {versions}. Failed: {'; '.join(failed) or 'none'}.",
            "",
            *markdown(HEAD, rows(here)),
            "",
            asked(network, here),
            "",
        ]
    return lines


def read(out: Path, network: str, seeds: Sequence[int]) -> list[Json]:
    """The units of a network that are done."""
    paths = [out / f"{network}-{seed}.json" for seed in seeds]
    return [json.loads(path.read_text(encoding="utf-8")) for path in paths if path.exists()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs=2, default=(0, 9), metavar=("FIRST", "LAST"))
    parser.add_argument("--networks", nargs="+", choices=list(NETWORKS), default=list(NETWORKS))
    parser.add_argument("--out", type=Path, default=Path("runs/natural"))
    parser.add_argument("--page", type=Path, default=Path("docs/results/natural.md"))
    parser.add_argument("--page-only", action="store_true", help="run nothing; write the page of what is done")
    args = parser.parse_args()
    torch.set_num_threads(1)
    args.out.mkdir(parents=True, exist_ok=True)
    seeds = range(args.seeds[0], args.seeds[1] + 1)
    for seed in () if args.page_only else seeds:
        for network in args.networks:
            path = args.out / f"{network}-{seed}.json"
            if path.exists():
                continue
            found = unit(network, seed)
            write_atomically(path, json.dumps(found, indent=1).encode())
            for name, row in found.get("methods", {}).items():
                stretch = [f"{h['stretch']:.2f}" for h in row.get("handles", {}).values()]
                print(
                    f"{network} {seed} {name}: {average(row):.4f} ×{' '.join(stretch)} {row.get('cpu', 0):.2f} s",
                    flush=True,
                )
    done = {network: read(args.out, network, seeds) for network in args.networks}
    args.page.parent.mkdir(parents=True, exist_ok=True)
    write_tables(args.page, page(done))
    args.page.with_suffix(".json").write_text(json.dumps(done, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
