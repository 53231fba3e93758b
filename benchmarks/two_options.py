"""The pointer of questions with two options, block by block, on a model nobody here trained.

python benchmarks/two_options.py --model FILE.gguf                 # or a directory, or a hub id
python benchmarks/two_options.py --model tiny --blocks 0 5         # a quick look at an embedded net

Prompts, pairs and filter are ours: the fact and both options are drawn at random, the source has other letters and its
own order, and both prompts are answered correctly. Scored are test pairs whose pointer differs: the edited run must say
the base's other letter. At every block: the whole vector; a closed-form map; Newton from there; DAS with k = 32; random
32-dimensional subspaces. Maps are made from the fit pairs and chosen on the calibration pairs. Every seed is one file
in the out folder; the page has a table for each.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from measuring import timed
from pages import markdown, version, write_tables
from plot_ot.abstract.banks import Bank
from plot_ot.files.writing import Json, write_atomically
from plot_ot.handles import Handle
from plot_ot.judging.controls import full_patch, random_subspaces
from plot_ot.judging.intervals import Bootstrap
from plot_ot.judging.naturalness import naturalness
from plot_ot.methods import Method
from plot_ot.stages.calibrate import correct
from plot_ot.stages.choose import TrainDas
from plot_ot.stages.closed_form import ClosedForm
from plot_ot.stages.descent import DasSpec
from plot_ot.stages.newton import NewtonHandles
from plot_ot.stages.problem import Problem, Stage
from plot_ot.subjects import BankRecording, Place, record
from plot_ot.tasks import MultipleChoice, mcqa_data

POINTER, OPTIONS, SUBSPACE, DRAWS = "answer_pointer", 2, 32, 10
HELD = {"calibration": 60, "test": 100}


def draw_bank(task: MultipleChoice, name: str, size: int, generator: torch.Generator) -> tuple[Bank, float]:
    """Random pairs with both prompts answered correctly, half of which move the pointer; and the share that passed."""
    causal, halves, passed, tried = mcqa_data.causal_model(), [[], []], 0, 0
    while any(sum(len(b) for b, _ in half) < size // 2 for half in halves):
        base, source = (mcqa_data.draw_rows(size // 2, generator, letters=range(26), options=OPTIONS) for _ in range(2))
        right = task.answers_correctly(torch.cat([base, source])).view(2, -1).all(dim=0)
        passed, tried = passed + int(right.sum()), tried + len(right)
        moved = causal.run(base)[POINTER] != causal.run(source)[POINTER]
        for half, wanted in zip(halves, (moved, ~moved), strict=True):
            half.append((base[right & wanted], source[right & wanted]))
    sides: list[Tensor] = [torch.cat([torch.cat([p[k] for p in half])[: size // 2] for half in halves]) for k in (0, 1)]
    family = torch.zeros(len(sides[0]), dtype=torch.long)
    return Bank.from_pairs(causal, *sides, name=name, family=family, families=("random",)), passed / tried


def unit(task: MultipleChoice, seed: int, blocks: range, newton: Sequence[int], fit_pairs: int) -> Json:
    """All blocks of one model."""
    generator = torch.Generator().manual_seed(70_000 + seed)
    sizes = {"fit": fit_pairs, **HELD}
    drawn = {name: draw_bank(task, name, size, generator) for name, size in sizes.items()}
    (fit, calibration, test), recorded = timed(lambda: record(task.subject, *(bank for bank, _ in drawn.values())))
    moved, kept = (test.select(test.bank.changed[POINTER] == want) for want in (True, False))
    problem = Problem(task.subject, fit, calibration, (POINTER,), task.readout, seed)
    das = TrainDas((SUBSPACE,), DasSpec(batch=64, most=task.das_epochs, patience=8, improvement=0.02))
    inside: dict[str, tuple[Stage, ...]] = {
        "closed form": (ClosedForm(),),
        "Newton": (ClosedForm(), NewtonHandles()),
        f"DAS, k = {SUBSPACE}": (das,),
    }
    rows: list[Json] = []
    for place in task.subject.places:
        block = int(place.name.rsplit(".", 1)[1])
        if block not in blocks:
            continue
        whole = full_patch(POINTER, [place], task.subject)
        rows.append({"block": place.name, "handle": "full vector", **_scored(whole, problem, moved, kept)})
        for said, stages in inside.items():
            if said == "Newton" and block not in newton:
                continue
            handle, seconds = timed(lambda stages=stages, place=place: _found(stages, problem, place))
            rows.append(
                {"block": place.name, "handle": said, **_scored(handle, problem, moved, kept), "cpu": seconds.cpu}
            )
        some = random_subspaces(handle, DRAWS, generator)
        share = sum(float(correct(moved, h, task.readout).double().mean()) for h in some) / DRAWS
        rows.append({"block": place.name, "handle": f"{DRAWS} random subspaces", "moved": share})
        print(json.dumps([r for r in rows if r["block"] == place.name]), flush=True)
    passed, cpu = min(rate for _, rate in drawn.values()), recorded.cpu
    return {"seed": seed, "version": version(), "sizes": sizes, "passed": passed, "recording": cpu, "rows": rows}


def _found(stages: tuple[Stage, ...], problem: Problem, place: Place) -> Handle:
    return Method("inside", "", stages).run(problem, {POINTER: (place,)})[0].handles[POINTER]


def _scored(handle: Handle, problem: Problem, moved: BankRecording, kept: BankRecording) -> Json:
    right = correct(moved, handle, problem.readout)
    interval = Bootstrap(moved.bank).accuracy(right)
    return {
        "moved": float(right.double().mean()),
        "low": interval.low,
        "high": interval.high,
        "kept": float(correct(kept, handle, problem.readout).double().mean()),
        "size": handle.size,
        "stretch": naturalness(handle, problem.fit, moved).stretch,
    }


def tables(found: Json, model: str) -> list[str]:
    """The blocks of one seed."""
    rows = []
    for r in found["rows"]:
        share = f"{r['moved']:.3f}" + (f" [{r['low']:.3f}, {r['high']:.3f}]" if "low" in r else "")
        rest = [f"{r['kept']:.3f}", str(r["size"]), f"{r['stretch']:.2f}"] if "kept" in r else ["-", str(SUBSPACE), "-"]
        rows.append([r["block"], r["handle"], share, *rest])
    sizes = found["sizes"]
    return [
        f"## Seed {found['seed']}, {sizes['fit']} fit pairs",
        "",
        f"Made by `python benchmarks/two_options.py --model {model} --seed {found['seed']} --fit {sizes['fit']}` at "
        f"{found['version']}. {sizes['calibration']} calibration and {sizes['test']} test pairs; half of each bank "
        f"moves the pointer. Of the drawn pairs {found['passed']:.0%} passed the filter.",
        "",
        *markdown(["block", "handle", "moved", "kept", "directions", "stretch"], rows),
        "",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--fit", type=int, default=120, help="fit pairs, half of which move the pointer")
    parser.add_argument("--blocks", type=int, nargs=2, default=(17, 25), help="the first and the last block")
    parser.add_argument("--newton", type=int, nargs="*", help="the blocks where Newton follows; default: all of them")
    parser.add_argument("--out", type=Path, default=Path("runs/two_options"))
    parser.add_argument("--page", type=Path, default=Path("docs/results/two_options.md"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    name = Path(args.model).name
    path = args.out / f"{name}-{args.seed}.json"
    if not path.exists():
        task = MultipleChoice(model=args.model, dtype=args.dtype, das_epochs=12)
        blocks = range(args.blocks[0], args.blocks[1] + 1)
        found = unit(task, args.seed, blocks, blocks if args.newton is None else args.newton, args.fit)
        args.out.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(found, indent=1).encode())
    done = [json.loads(p.read_text(encoding="utf-8")) for p in sorted(args.out.glob(f"{name}-*.json"))]
    write_tables(args.page, [line for found in done for line in tables(found, name)])


if __name__ == "__main__":
    main()
