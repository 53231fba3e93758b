"""Full DAS on a model nobody here trained, block by block, size by size: the pointer of multiple-choice questions, or
which of two names is meant (`--task ioi`).

python benchmarks/untouched_das.py --model FILE.gguf --seed 4              # or a directory, or a hub id
python benchmarks/untouched_das.py --model FILE.gguf --seed 4 --blocks 0,3,6,9,12,15 --sizes 4 --judge
python benchmarks/untouched_das.py --task ioi --model smollm2 --seed 3 --blocks 0-29 --judge
python benchmarks/untouched_das.py --model tiny --dtype float32 --blocks 0-5 --fit 60 --pairs 40 --judge    # a try

The banks are those of `language_study.py untouched` with the same seed, so that its closed form stands beside the best
rotation. Every (block, size) is one small file in the out folder; what is there is not trained again, so the grid can
be spread over several sittings. With --judge, when all are there, the rotation that does best on calibration pairs is
trained once more (the same seed gives the same rotation), and only then test pairs are looked at: once, with controls.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import matplotlib.pyplot as plt
import torch

from measuring import timed
from pages import markdown, version, write_tables
from plot_ot.cli.common import layer_numbers
from plot_ot.files.writing import Json, write_atomically
from plot_ot.judging.controls import full_patch
from plot_ot.judging.judges import Judge
from plot_ot.judging.naturalness import naturalness
from plot_ot.methods import Method, MethodKind
from plot_ot.stages.calibrate import correct, pair_weights
from plot_ot.stages.choose import TrainDas, best_rotation
from plot_ot.stages.closed_form import SCOUT, ClosedForm
from plot_ot.stages.das import train_rotations
from plot_ot.stages.descent import DasSpec
from plot_ot.stages.problem import Problem, State
from plot_ot.subjects import BankRecording, Place, record
from plot_ot.tasks import IndirectObject, MultipleChoice
from plot_ot.tasks.language import LanguageTask
from plot_ot.tasks.text_data import Sizes

ASKED: Mapping[str, tuple[type[LanguageTask], str]] = {
    "mcqa": (MultipleChoice, "answer_pointer"),
    "ioi": (IndirectObject, "name_position"),
}
"""Studies, and the variable that is looked for; the other one is an output variable."""
AGAIN = 4
"""How many of the best rotations are trained longer, where that is asked for."""
NAMES = {
    "answer_pointer": "which option is right",
    "answer_token": "its letter",
    "name_position": "which name is meant",
    "name_token": "the name itself",
}


def das_of(task: LanguageTask) -> TrainDas:
    """The last stage of the task's own full DAS: the paper's sizes at this model's width, and how they are trained."""
    [stage] = task.methods()["das"].stages
    assert isinstance(stage, TrainDas)
    return stage


def rotated(problem: Problem, spec: DasSpec, place: Place, size: int, start: int = 0) -> tuple[Json, State]:
    """One rotation: what it reaches on calibration pairs, and its handle. Every start has its own directions."""
    salt = problem.subject.places.index(place) * 10_000 + size + start * 1_000_000
    v, generator = sought(problem), problem.generator(salt)
    rotation, seconds = timed(
        lambda: train_rotations(problem.fit, place, [v], [size], problem.readout, spec, generator)
    )
    handle = best_rotation(problem, rotation)
    reached = {name: handle.chosen[name] for name in ("calibration_score", "fit_loss", "epochs")}
    told = {"block": place.name, "size": size, "most": spec.most, "start": start, "version": version()}
    unit = {**told, **reached, "cpu": seconds.cpu}
    return unit, State({v: (place,)}, handles={v: handle})


def sought(problem: Problem) -> str:
    """The variable that is looked for."""
    [variable] = problem.variables
    return variable


def scouted(problem: Problem, place: Place) -> Json:
    """What a few closed forms reach on calibration pairs at a block."""
    v = sought(problem)
    (state, _), seconds = timed(lambda: Method("scout", "", (SCOUT,)).run(problem, {v: (place,)}))
    score = state.handles[v].chosen["calibration_score"]
    return {"block": place.name, "calibration_score": score, "cpu": seconds.cpu, "version": version()}


def stage_a(problem: Problem, task: LanguageTask) -> Json:
    """Before calibration: each variable's mass in every block, the mean over β. And what whole patches reach."""
    localize = task.methods()["plot"].stages[0]
    state = localize(problem, State.start(problem))
    found: Json = {"version": version(), "mass": {}, "patched": {}}
    couplings = [c.coupling for c in state.candidates[sought(problem)]]
    for v in problem.coupled:
        rows = torch.stack([torch.as_tensor(c.plan[c.variables.index(v)]) for c in couplings])
        found["mass"][v] = (rows / rows.sum(dim=1, keepdim=True)).mean(dim=0).tolist()
        weights = pair_weights(problem.calibration, v, "balanced")
        patches = [full_patch(v, [place], task.subject) for place in task.subject.places]
        right = [correct(problem.calibration, h, problem.readout) for h in patches]
        found["patched"][v] = [float((r.double() * weights).sum()) for r in right]
    return found


def judged(judge: Judge, method: Method, state: State, task: LanguageTask) -> Json:
    """The verdict on the handle, on test pairs."""
    [verdict] = judge.verdicts(method, state, task.random_method)
    problem, v = judge.problem, sought(judge.problem)
    handle = state.handles[v]
    return {
        "method": method.name,
        "block": handle.places[0],
        "size": handle.size,
        "status": str(verdict.status),
        "sentence": verdict.sentence,
        "evidence": dict(verdict.evidence),
        "stretch": naturalness(handle, problem.fit, judge.tests[v, "sensitivity"]).stretch,
    }


def recordings(
    task: LanguageTask, variable: str, seed: int, tested: bool
) -> tuple[Problem, Mapping[tuple[str, str], BankRecording]]:
    """The banks of a seed, recorded: with the test pairs, or without."""
    prepared = task.prepare(seed, Path())
    banks = prepared.splits
    tests = {key: bank for key, bank in banks.test.items() if tested and key[0] == variable}
    fit, calibration, *recorded = record(task.subject, banks.fit, banks.calibration, *tests.values())
    problem = Problem(task.subject, fit, calibration, banks.fit.variables, prepared.readout, seed).only([variable])
    return problem, dict(zip(tests, recorded, strict=True))


@dataclass(frozen=True)
class Asked:
    """What a call is to add to the out folder."""

    blocks: Sequence[int]
    late: Sequence[int]
    longer: int
    again: int
    judge: bool


def study(task: LanguageTask, variable: str, seed: int, asked: Asked, out: Path) -> None:
    """All rotations that are not there yet; then the best of all, and a closed form at its block, before the judge."""
    problem, tests = recordings(task, variable, seed, tested=asked.judge or bool(asked.late))
    das, longer = das_of(task), asked.longer
    assert isinstance(das.dimensions, tuple)
    judge = Judge(problem, tests, _refused, "standard")
    closed = Method("closed form", "closed form", (ClosedForm(),), kind=MethodKind.DAS)
    for place in (task.subject.places[b] for b in asked.late):
        path = out / f"{seed}-late-{place.name}.json"
        row = _once(path, lambda place=place: judged(judge, closed, closed.run(problem, {variable: (place,)})[0], task))
        print(row["sentence"], flush=True)
    places = [task.subject.places[b] for b in asked.blocks]
    _once(out / f"{seed}-stage-a.json", lambda: stage_a(problem, task))
    for place in places:
        _once(out / f"{seed}-scout-{place.name}.json", lambda place=place: scouted(problem, place))
    for place, k in product(places, das.dimensions):
        path = out / f"{seed}-{place.name}-{k}.json"
        unit = _once(path, lambda place=place, k=k: rotated(problem, das.spec, place, k)[0])
        print(f"{place.name}, k = {k}: {unit['calibration_score']:.3f} ({unit['cpu']:.0f} CPU s)", flush=True)
    by_name = {place.name: place for place in task.subject.places}
    if asked.again:
        best = min(first_of(units_in(out, seed)), key=lambda u: -u["calibration_score"])["block"]
        for k in das.dimensions[:-1]:  # the whole width needs no training
            path = out / f"{seed}-{best}-{k}-start-{asked.again}.json"
            unit = _once(path, lambda k=k: rotated(problem, das.spec, by_name[best], k, asked.again)[0])
            print(f"{best}, k = {k}, start {asked.again}: {unit['calibration_score']:.3f}", flush=True)
    if longer:
        spec = replace(das.spec, most=longer)
        once = [u for u in units_in(out, seed) if u["epochs"] and u["most"] != longer]
        for u in sorted(once, key=lambda u: -u["calibration_score"])[:AGAIN]:
            path = out / f"{seed}-{u['block']}-{u['size']}-{longer}.json"
            unit = _once(path, lambda u=u: rotated(problem, spec, by_name[u["block"]], u["size"])[0])
            print(f"{u['block']}, k = {u['size']}, up to {longer} epochs: {unit['calibration_score']:.3f}", flush=True)
    path = out / f"{seed}-judged.json"
    if path.exists() or not asked.judge:
        return
    best = min(units_in(out, seed), key=lambda u: (-round(u["calibration_score"], 9), u["size"]))
    place, spec = by_name[best["block"]], replace(das.spec, most=best["most"])
    sizes = tuple(sorted({u["size"] for u in units_in(out, seed) if u["block"] == best["block"]}))
    searched = replace(das, every=1, dimensions=sizes)  # the control with shuffled values trains all of these
    full = Method("full DAS", "full DAS", (searched,), kind=MethodKind.DAS)
    found = []
    for method in (full, closed):
        if method is full:
            _, state = rotated(problem, spec, place, best["size"], best.get("start", 0))
        else:
            state, _ = method.run(problem, {variable: (place,)})
        found.append(judged(judge, method, state, task))
        print(json.dumps(found[-1]), flush=True)
    write_atomically(path, json.dumps({"version": version(), "rows": found}, indent=1).encode())


def _once(path: Path, make: Callable[[], Json]) -> Json:
    """What a file holds; made now if it is not there."""
    if not path.exists():
        write_atomically(path, json.dumps(make(), indent=1).encode())
    found: Json = json.loads(path.read_text(encoding="utf-8"))
    return found


def _refused(*_: object) -> list[BankRecording]:
    raise RuntimeError("This study asks for no re-initialised network.")


def units_in(out: Path, seed: int) -> list[Json]:
    """The rotations that are there."""
    return [json.loads(p.read_text(encoding="utf-8")) for p in sorted(out.glob(f"{seed}-block_output*.json"))]


def first_of(units: Sequence[Json]) -> list[Json]:
    """The grid itself: first starts, trained as long as asked at first."""
    least = min(u["most"] for u in units)
    return [u for u in units if u["most"] == least and not u.get("start", 0)]


def tables(out: Path, seed: int, command: str) -> list[str]:
    """Calibration scores of all rotations, and the verdicts."""
    units = units_in(out, seed)
    blocks = sorted({u["block"] for u in units}, key=lambda name: int(name.rsplit(".", 1)[1]))
    sizes = sorted({u["size"] for u in units})
    first = first_of(units)
    reached = {(u["block"], u["size"]): f"{u['calibration_score']:.3f}" for u in first}
    again = [u for u in units if u not in first]
    rows = [[block, *(reached.get((block, k), "-") for k in sizes)] for block in blocks]
    made = ", ".join(sorted({u["version"] for u in units}))
    lines = [
        f"Made by `{command}` at {made}. Calibration score (half accuracy where the variable changes, half where it "
        f"does not) of every rotation; {len(units)} rotations, {sum(u['cpu'] for u in units) / 60:.0f} CPU minutes.",
        "",
        *markdown(["block", *(f"k = {k}" for k in sizes)], rows),
        "",
        *(
            f"- {u['block']}, k = {u['size']}, start {u.get('start', 0) + 1}, up to {u['most']} epochs: "
            f"{u['calibration_score']:.3f}"
            for u in sorted(again, key=lambda u: -u["calibration_score"])
        ),
        "",
    ]
    path = out / f"{seed}-judged.json"
    told = json.loads(path.read_text(encoding="utf-8"))["rows"] if path.exists() else []
    late = [json.loads(p.read_text(encoding="utf-8")) for p in sorted(out.glob(f"{seed}-late-*.json"))]
    there = {(r["method"], r["block"]) for r in told}
    told += [r for r in late if (r["method"], r["block"]) not in there]
    if told:
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


def figure(out: Path, seed: int, target: Path) -> None:
    """Where both variables live: transport's mass in every block, and what can be done there."""
    first = json.loads((out / f"{seed}-stage-a.json").read_text(encoding="utf-8"))
    made, (above, below) = plt.subplots(2, 1, figsize=(8.2, 5.4), sharex=True, height_ratios=(1, 1.5))
    depth = len(next(iter(first["mass"].values())))
    one, other = first["mass"]  # what is looked for, and what follows from it
    colors = {one: "#0b5fa5", other: "#d98200"}
    for (v, mass), shift in zip(first["mass"].items(), (-0.2, 0.2), strict=True):
        above.bar([b + shift for b in range(depth)], mass, 0.4, color=colors[v], label=NAMES[v])
    above.set(ylabel="share of transport mass")
    best: dict[int, float] = {}
    for u in units_in(out, seed):
        block, trained = int(u["block"].rsplit(".", 1)[1]), u["epochs"] > 0
        best[block] = max(best.get(block, 0.0), u["calibration_score"] if trained else 0.0)
    scouts = [json.loads(p.read_text(encoding="utf-8")) for p in out.glob(f"{seed}-scout-*.json")]
    closed = {int(u["block"].rsplit(".", 1)[1]): u["calibration_score"] for u in scouts}
    lines = [
        (f"{NAMES[one]}: closed form", sorted(closed.items()), colors[one], "o-"),
        (f"{NAMES[one]}: DAS, best of all sizes", sorted(best.items()), "#555555", "s--"),
        (f"{NAMES[one]}: whole vector", list(enumerate(first["patched"][one])), "#8fbce6", "-"),
        (f"{NAMES[other]}: whole vector", list(enumerate(first["patched"][other])), colors[other], "-"),
    ]
    for said, points, color, style in lines:
        below.plot(*zip(*points, strict=True), style, color=color, label=said, markersize=4)
    below.axhline(0.5, color="#bbbbbb", linewidth=0.8, zorder=0)
    below.set(xlabel="block (last token)", ylabel="calibration score", ylim=(0.2, 1.03))
    for axis in (above, below):
        axis.legend(frameon=False, fontsize=8, loc="upper left")
        axis.spines[["top", "right"]].set_visible(False)
    made.tight_layout()
    target.parent.mkdir(parents=True, exist_ok=True)
    made.savefig(target, dpi=150)


def _row(r: Json) -> list[str]:
    e = r["evidence"]
    accuracy = f"{e['handle']:.3f} [{e['handle_low']:.3f}, {e['handle_high']:.3f}]" if "handle" in e else "-"
    stays = f"{e['invariance']:.3f}" if "invariance" in e else "-"
    return [r["method"], r["block"], str(r["size"]), accuracy, stays, f"{r['stretch']:.2f}", r["status"]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=ASKED, default="mcqa")
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--seed", type=int, default=4)
    parser.add_argument("--fit", type=int, default=300, help="fit pairs")
    parser.add_argument("--pairs", type=int, default=200, help="pairs of every other bank")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--sizes", type=int, default=11, help="how many of the paper's sizes")
    parser.add_argument("--blocks", default="17-25", help="blocks, as 17-25 or 21,22")
    parser.add_argument("--longer", type=int, default=0, help="epochs with which the best few are trained once more")
    parser.add_argument("--again", type=int, default=0, help="1: a second start at the best block, 2: a third ...")
    parser.add_argument("--late", default="", help="blocks where a closed form is put before the judge, as 22-27")
    parser.add_argument("--judge", action="store_true", help="look at test pairs when all rotations are there")
    parser.add_argument("--out", type=Path, default=Path("runs/untouched_das"))
    parser.add_argument("--figure", type=Path, help="a picture of all blocks")
    parser.add_argument("--page", type=Path, help="a page whose part below the line '<!-- tables -->' is written anew")
    args = parser.parse_args()
    torch.set_num_threads(1)
    sizes = Sizes(args.fit, args.pairs, args.pairs, transfer=4)
    kind, variable = ASKED[args.task]
    task = kind(model=args.model, dtype=args.dtype, das_epochs=args.epochs, das_sizes=args.sizes, sizes=sizes)
    args.out.mkdir(parents=True, exist_ok=True)
    blocks, late = layer_numbers(args.blocks, "--blocks"), layer_numbers(args.late, "--late") if args.late else []
    study(task, variable, args.seed, Asked(blocks, late, args.longer, args.again, args.judge), args.out)
    name = Path(args.model).name
    asks = "" if args.task == "mcqa" else f"--task {args.task} "
    command = f"python benchmarks/untouched_das.py {asks}--model {name} --seed {args.seed} --blocks {args.blocks}"
    lines = tables(args.out, args.seed, command)
    print("\n".join(lines))
    if args.figure:
        figure(args.out, args.seed, args.figure)
    if args.page:
        write_tables(args.page, lines)


if __name__ == "__main__":
    main()
