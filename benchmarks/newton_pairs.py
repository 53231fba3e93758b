"""Wide states and few pairs: Newton, the closed form and DAS on language models, against the number of pairs.

python benchmarks/newton_pairs.py                              # the planted embedded nets, then the page
python benchmarks/newton_pairs.py --models ioi smollm2         # SmolLM2: indirect objects, and the planted adapter
python benchmarks/newton_pairs.py --models planted-1000 --seed 1000 --sizes 40 80

One recording of a model serves all sizes; n pairs are n of the fit bank, and n of the calibration bank. The block is
the one that transport chooses on the largest size; there the closed form, Newton after it, Newton by itself and DAS
look for the same variable. On the embedded nets full DAS (all blocks, all sizes) runs on the largest size, too; on
SmolLM2 its cost is what DAS costs at the one block, counted in blocks that resumed tokens pass, over all blocks.
Every model is one small file in the out folder; what is there is not run again.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from measuring import timed
from pages import markdown, version, write_tables
from plot_ot.files.writing import Json, write_atomically
from plot_ot.judging.naturalness import naturalness
from plot_ot.methods import Method
from plot_ot.models.folders import default_cache
from plot_ot.stages.calibrate import correct
from plot_ot.stages.choose import TrainDas
from plot_ot.stages.closed_form import ClosedForm
from plot_ot.stages.newton import NewtonHandles
from plot_ot.stages.problem import Problem
from plot_ot.studies.study import Study
from plot_ot.subjects import BankRecording
from plot_ot.tasks import IndirectObject, MultipleChoice
from plot_ot.tasks.language import LanguageTask
from plot_ot.tasks.text_data import Sizes

SIZES = (40, 80, 120, 200)
BANKS = Sizes(fit=200, calibration=100, test=60, transfer=4)
MODELS: dict[str, tuple[str, Callable[[], LanguageTask]]] = {
    **{
        name: ("answer_pointer", lambda name=name: MultipleChoice(model=name, sizes=BANKS))
        for name in ("planted-1000", "planted-1001", "planted-1002")
    },
    "ioi": ("name_position", lambda: IndirectObject(sizes=BANKS, das_sizes=4, das_epochs=12)),
    "smollm2": (
        "answer_pointer",
        lambda: MultipleChoice(model="smollm2", adapter="planted-1000", sizes=BANKS, das_sizes=4, das_epochs=12),
    ),
}
EMBEDDED = tuple(name for name in MODELS if name.startswith("planted"))


def some(recording: BankRecording, variable: str, count: int, seed: int) -> BankRecording:
    """So many pairs of a bank, half of which change the variable if there are so many."""
    order = torch.randperm(len(recording), generator=torch.Generator().manual_seed(seed))
    changed = recording.bank.changed[variable][order]
    moved, kept = order[changed], order[~changed]
    half = min(len(moved), max(count // 2, count - len(kept)))
    return recording.select(torch.cat([moved[:half], kept[: count - half]]))


def unit(name: str, seed: int, sizes: Sequence[int]) -> Json:
    """One model: every size and method at the block that transport chooses."""
    variable, make = MODELS[name]
    task = make()
    study, recorded = timed(lambda: Study(task.prepare(seed, default_cache())))
    problem = replace(study.problem, variables=(variable,))
    methods = task.methods()
    (state, _), chosen = timed(lambda: methods["plot"].run(_few(problem, variable, max(sizes), seed)))
    [place] = {e.place for e in state.handles[variable].edits}
    [das] = [stage for stage in methods["das"].stages if isinstance(stage, TrainDas)]
    inside = {
        "closed form": Method("closed form", "", (ClosedForm(),)),
        "newton": Method("newton", "", (ClosedForm(), NewtonHandles())),
        "newton alone": Method("newton alone", "", (NewtonHandles(),)),
        "das": Method("das", "", (replace(das, every=1),)),
    }
    rows: list[Json] = []
    for size in sorted(sizes):
        few = _few(problem, variable, size, seed)
        for said, method in inside.items():
            rows.append(_row(study, few, said, size, variable, method, {variable: (place,)}))
            print(name, rows[-1], flush=True)
    if name in EMBEDDED:
        rows.append(_row(study, few, "full das", max(sizes), variable, methods["das"], None))
        print(name, rows[-1], flush=True)
    places = problem.subject.places
    after = [len(places) - k for k in range(len(places))]
    return {
        "model": name,
        "seed": seed,
        "version": version(),
        "variable": variable,
        "block": place.name,
        "width": place.width,
        "blocks": sum(after) / after[places.index(place)],
        "recording": recorded.cpu,
        "transport": chosen.cpu,
        "rows": rows,
    }


def _few(problem: Problem, variable: str, size: int, seed: int) -> Problem:
    fit, calibration = (some(r, variable, size, seed) for r in (problem.fit, problem.calibration))
    return replace(problem, fit=fit, calibration=calibration)


def _row(
    study: Study, problem: Problem, said: str, size: int, variable: str, method: Method, places: dict | None
) -> Json:
    (state, _), seconds = timed(lambda: method.run(problem, places))
    handle = state.handles[variable]
    banks = {bank: r for (v, bank), r in study.tests.items() if v == variable}
    found = naturalness(handle, problem.fit, banks["sensitivity"])
    accuracy = {bank: float(correct(r, handle, problem.readout).double().mean()) for bank, r in banks.items()}
    return {
        "method": said,
        "pairs": size,
        **accuracy,
        "stretch": found.stretch,
        "cell_stretch": found.cell_stretch,
        "size": handle.size,
        "form": str(handle.chosen.get("form", "")),
        "cpu": seconds.cpu,
    }


# -- the page -------------------------------------------------------------------------------------------------


def section(found: Json) -> list[str]:
    """One model's table."""
    largest = max(r["pairs"] for r in found["rows"])
    full = [r["cpu"] for r in found["rows"] if r["method"] == "full das"]
    counted = not full
    if counted:
        full = [r["cpu"] * found["blocks"] for r in found["rows"] if (r["method"], r["pairs"]) == ("das", largest)]
    rows = [
        [
            r["method"],
            str(r["pairs"]),
            f"{r['sensitivity']:.3f}",
            f"{r['invariance']:.3f}",
            f"{r['stretch']:.2f}",
            "-" if r["cell_stretch"] is None else f"{r['cell_stretch']:.2f}",
            str(r["size"]),
            r["form"],
            f"{r['cpu']:.1f}",
        ]
        for r in found["rows"]
    ]
    how = "counted from DAS at one block" if counted else "measured"
    told = [
        f"`{found['variable']}` at {found['block']}, {found['width']} wide; seed {found['seed']}, version "
        f"{found['version']}. The recording took {found['recording']:.1f} CPU seconds, transport over whole blocks "
        f"{found['transport']:.1f}. Full DAS on {largest} pairs takes {full[0]:.0f} CPU seconds ({how})."
    ]
    mine = [r["cpu"] for r in found["rows"] if (r["method"], r["pairs"]) == ("newton", largest)]
    if mine:
        share = (mine[0] + found["transport"]) / full[0]
        told.append(f"Transport and Newton together take {share:.1%} of that.")
    head = ["method", "pairs", "sensitivity", "invariance", "stretch", "cell stretch", "size", "form", "CPU seconds"]
    return [f"## {found['model']}", "", " ".join(told), "", *markdown(head, rows), ""]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(EMBEDDED))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES))
    parser.add_argument("--out", type=Path, default=Path("runs/newton_pairs"))
    parser.add_argument("--page", type=Path, default=Path("docs/results/newton_pairs.md"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    args.out.mkdir(parents=True, exist_ok=True)
    for name in args.models:
        path = args.out / f"{name}-{args.seed}.json"
        if not path.exists():
            write_atomically(path, json.dumps(unit(name, args.seed, args.sizes), indent=1).encode())
    paths = [args.out / f"{name}-{args.seed}.json" for name in MODELS]
    done = [json.loads(path.read_text("utf-8")) for path in paths if path.exists()]
    lines = ["Made by `python benchmarks/newton_pairs.py` (the embedded models), and with `--models ioi smollm2`.", ""]
    lines += [line for found in done for line in section(found)]
    write_tables(args.page, lines)


if __name__ == "__main__":
    main()
