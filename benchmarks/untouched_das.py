"""Full DAS for the pointer of multiple-choice questions on a model nobody here trained, block by block, size by size.

python benchmarks/untouched_das.py --model FILE.gguf --seed 4              # or a directory, or a hub id
python benchmarks/untouched_das.py --model FILE.gguf --seed 4 --blocks 0,3,6,9,12,15 --sizes 4 --judge
python benchmarks/untouched_das.py --model tiny --dtype float32 --blocks 0-5 --fit 60 --pairs 40 --judge    # a try

The banks are those of `language_study.py untouched` with the same seed, so that its closed form stands beside the best
rotation. Every (block, size) is one small file in the out folder; what is there is not trained again, so the grid can
be spread over several sittings. With --judge, when all are there, the rotation that does best on calibration pairs is
trained once more (the same seed gives the same rotation), and only then test pairs are looked at: once, with controls.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

import torch

from measuring import timed
from pages import markdown, version, write_tables
from plot_ot.cli.common import layer_numbers
from plot_ot.files.writing import Json, write_atomically
from plot_ot.judging.judges import Judge
from plot_ot.judging.naturalness import naturalness
from plot_ot.methods import Method, MethodKind
from plot_ot.stages.choose import TrainDas, best_rotation
from plot_ot.stages.closed_form import ClosedForm
from plot_ot.stages.das import train_rotations
from plot_ot.stages.problem import Problem, Stage, State
from plot_ot.subjects import BankRecording, Place, record
from plot_ot.tasks import MultipleChoice
from plot_ot.tasks.text_data import Sizes

POINTER = "answer_pointer"


def das_of(task: MultipleChoice) -> TrainDas:
    """The last stage of the task's own full DAS: the paper's sizes at this model's width, and how they are trained."""
    [stage] = task.methods()["das"].stages
    assert isinstance(stage, TrainDas)
    return stage


def rotated(problem: Problem, das: TrainDas, place: Place, size: int) -> tuple[Json, State]:
    """One rotation: what it reaches on calibration pairs, and its handle."""
    salt = problem.subject.places.index(place) * 10_000 + size
    rotation, seconds = timed(
        lambda: train_rotations(
            problem.fit, place, [POINTER], [size], problem.readout, das.spec, problem.generator(salt)
        )
    )
    handle = best_rotation(problem, rotation)
    reached = {name: handle.chosen[name] for name in ("calibration_score", "fit_loss", "epochs")}
    unit = {"block": place.name, "size": size, **reached, "cpu": seconds.cpu, "version": version()}
    return unit, State({POINTER: (place,)}, handles={POINTER: handle})


def judged(judge: Judge, method: Method, state: State, task: MultipleChoice) -> Json:
    """The verdict on the pointer's handle, on test pairs."""
    [verdict] = judge.verdicts(method, state, task.random_method)
    handle, problem = state.handles[POINTER], judge.problem
    return {
        "method": method.name,
        "block": handle.places[0],
        "size": handle.size,
        "status": str(verdict.status),
        "sentence": verdict.sentence,
        "evidence": dict(verdict.evidence),
        "stretch": naturalness(handle, problem.fit, judge.tests[POINTER, "sensitivity"]).stretch,
    }


def recordings(task: MultipleChoice, seed: int) -> tuple[Problem, Mapping[tuple[str, str], BankRecording]]:
    """The banks of a seed, recorded."""
    prepared = task.prepare(seed, Path())
    banks = prepared.splits
    tests = {key: bank for key, bank in banks.test.items() if key[0] == POINTER}
    fit, calibration, *recorded = record(task.subject, banks.fit, banks.calibration, *tests.values())
    problem = Problem(task.subject, fit, calibration, banks.fit.variables, prepared.readout, seed).only([POINTER])
    return problem, dict(zip(tests, recorded, strict=True))


def study(task: MultipleChoice, seed: int, blocks: Sequence[int], out: Path, judge_it: bool) -> None:
    """All rotations that are not there yet; then the best of all, and a closed form at its block, before the judge."""
    problem, tests = recordings(task, seed)
    das = das_of(task)
    assert isinstance(das.dimensions, tuple)
    for place, k in product([task.subject.places[b] for b in blocks], das.dimensions):
        path = out / f"{seed}-{place.name}-{k}.json"
        if not path.exists():
            unit, _ = rotated(problem, das, place, k)
            write_atomically(path, json.dumps(unit, indent=1).encode())
            print(f"{place.name}, k = {k}: {unit['calibration_score']:.3f} ({unit['cpu']:.0f} CPU s)", flush=True)
    path = out / f"{seed}-judged.json"
    if path.exists() or not judge_it:
        return
    best = min(units_in(out, seed), key=lambda u: (-round(u["calibration_score"], 9), u["size"]))
    place = next(p for p in task.subject.places if p.name == best["block"])
    judge = Judge(problem, tests, _refused, "standard")
    methods: dict[str, tuple[Stage, ...]] = {"full DAS": (replace(das, every=1),), "closed form": (ClosedForm(),)}
    found = []
    for name, stages in methods.items():
        method = Method(name, name, stages, kind=MethodKind.DAS)
        if name == "full DAS":
            _, state = rotated(problem, das, place, best["size"])
        else:
            state, _ = method.run(problem, {POINTER: (place,)})
        found.append(judged(judge, method, state, task))
        print(json.dumps(found[-1]), flush=True)
    write_atomically(path, json.dumps({"version": version(), "rows": found}, indent=1).encode())


def _refused(*_: object) -> list[BankRecording]:
    raise RuntimeError("This study asks for no re-initialised network.")


def units_in(out: Path, seed: int) -> list[Json]:
    """The rotations that are there."""
    return [json.loads(p.read_text(encoding="utf-8")) for p in sorted(out.glob(f"{seed}-block_output*.json"))]


def tables(out: Path, seed: int, command: str) -> list[str]:
    """Calibration scores of all rotations, and the verdicts."""
    units = units_in(out, seed)
    blocks = sorted({u["block"] for u in units}, key=lambda name: int(name.rsplit(".", 1)[1]))
    sizes = sorted({u["size"] for u in units})
    reached = {(u["block"], u["size"]): f"{u['calibration_score']:.3f}" for u in units}
    rows = [[block, *(reached.get((block, k), "-") for k in sizes)] for block in blocks]
    made = ", ".join(sorted({u["version"] for u in units}))
    lines = [
        f"Made by `{command}` at {made}. Calibration score (half accuracy where the pointer moves, half where it does "
        f"not) of every rotation; {len(units)} rotations, {sum(u['cpu'] for u in units) / 60:.0f} CPU minutes.",
        "",
        *markdown(["block", *(f"k = {k}" for k in sizes)], rows),
        "",
    ]
    path = out / f"{seed}-judged.json"
    if path.exists():
        told = json.loads(path.read_text(encoding="utf-8"))["rows"]
        lines += markdown(
            [
                "method",
                "block",
                "directions",
                "right on discriminating test pairs",
                "stays right",
                "stretch",
                "verdict",
            ],
            (_row(r) for r in told),
        )
        lines += ["", *(f"- {r['method']}: {r['sentence']}" for r in told), ""]
    return lines


def _row(r: Json) -> list[str]:
    e = r["evidence"]
    accuracy = f"{e['handle']:.3f} [{e['handle_low']:.3f}, {e['handle_high']:.3f}]" if "handle" in e else "-"
    stays = f"{e['invariance']:.3f}" if "invariance" in e else "-"
    return [r["method"], r["block"], str(r["size"]), accuracy, stays, f"{r['stretch']:.2f}", r["status"]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--seed", type=int, default=4)
    parser.add_argument("--fit", type=int, default=300, help="fit pairs")
    parser.add_argument("--pairs", type=int, default=200, help="pairs of every other bank")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--sizes", type=int, default=11, help="how many of the paper's sizes")
    parser.add_argument("--blocks", default="17-25", help="blocks, as 17-25 or 21,22")
    parser.add_argument("--judge", action="store_true", help="look at test pairs when all rotations are there")
    parser.add_argument("--out", type=Path, default=Path("runs/untouched_das"))
    parser.add_argument("--page", type=Path, help="a page whose part below the line '<!-- tables -->' is written anew")
    args = parser.parse_args()
    torch.set_num_threads(1)
    sizes = Sizes(args.fit, args.pairs, args.pairs, transfer=4)
    task = MultipleChoice(model=args.model, dtype=args.dtype, das_epochs=args.epochs, das_sizes=args.sizes, sizes=sizes)
    args.out.mkdir(parents=True, exist_ok=True)
    study(task, args.seed, layer_numbers(args.blocks, "--blocks"), args.out, args.judge)
    name = Path(args.model).name
    command = f"python benchmarks/untouched_das.py --model {name} --seed {args.seed} --blocks {args.blocks}"
    lines = tables(args.out, args.seed, command)
    print("\n".join(lines))
    if args.page:
        write_tables(args.page, lines)


if __name__ == "__main__":
    main()
