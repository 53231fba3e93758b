"""How fast are PLOT and DAS on binary addition, next to plain PyTorch loops and pyvene? One process, one thread.

python benchmarks/addition_speed.py           # seed 1000, d = 8 and 16; writes docs/results/addition_speed.{json,md}
python benchmarks/addition_speed.py --quick   # a smoke test with a much reduced sample
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from baselines import EncodedPairs, Job, Trained, warm_up
from heq_speed import ROOT, THREADS, alternate, commit, machine, say, table
from plot_ot.abstract.banks import Bank
from plot_ot.edits import EditBatch, Frame
from plot_ot.methods import Method
from plot_ot.stages.calibrate import correct, pair_weights, scored
from plot_ot.stages.choose import TrainDas
from plot_ot.stages.das import Rotation, train_rotations
from plot_ot.stages.descent import DasSpec
from plot_ot.stages.problem import Problem, State
from plot_ot.studies.prepared import Prepared
from plot_ot.subjects import BankRecording, record
from plot_ot.tasks.addition import SEARCH, STAGE_A, STAGE_B, BinaryAddition
from recurrent_baselines import (
    StagedLoop,
    StagedRun,
    Training,
    Unrolled,
    UnrolledForPyvene,
    blocks,
    das_with_hooks,
    das_with_pyvene,
    pca_prefixes,
    warm_up_pyvene,
)

TRANSPORT = {"plot": (), "plot-native": (blocks(1), blocks(2)), "plot-pca": (pca_prefixes,)}
"""The transport methods, and the menus of their second stage for the loops."""
BATCH = 64
"""Pairs per forward of the plain loop: the batch the paper trains with on this task."""
LOOPS = {
    "loop": f"loop of hooked forwards, {BATCH} pairs each: source and base in full for every site and grid point",
    "kept": "the same loop with a whole bank per forward and source states kept",
}
PAPER = DasSpec("adam", rate=0.01, batch=64, least=12, most=12, clip=math.inf)
"""Adam on the generator with the learning rate, batch and epochs of FACTS; for every fit pair, so that all agree."""
WANTED = {"transport": 20, "das": 10}


@dataclass(frozen=True)
class Plan:
    """How much is measured."""

    seed: int
    widths: tuple[int, ...]
    share: float
    """Of the rotations of the DAS sweep, what the hooks and pyvene train."""
    repeats: int = 3
    epochs: int | None = None
    """At most so many epochs of DAS; None as specified."""

    def capped(self, spec: DasSpec) -> DasSpec:
        return spec if self.epochs is None else replace(spec, least=1, most=self.epochs)


@dataclass(frozen=True)
class Bench:
    """One network with its banks, for us and for the others."""

    task: BinaryAddition
    prepared: Prepared

    @property
    def variables(self) -> tuple[str, ...]:
        return self.prepared.splits.fit.variables

    def recorded(self) -> tuple[Problem, dict[tuple[str, str], BankRecording]]:
        """A fresh recording: nothing of an earlier run is used."""
        p, s = self.prepared, self.prepared.splits
        fit, calibration, *tests = record(p.subject, s.fit, s.calibration, *s.test.values())
        problem = Problem(p.subject, fit, calibration, self.variables, p.readout, p.seed, p.score)
        return problem, dict(zip(s.test, tests, strict=True))

    def pairs(self, bank: Bank) -> EncodedPairs:
        """The bank as plain tensors."""
        encode = self.prepared.subject.encode
        labels = {v: bank.labels[v].float() for v in self.variables}
        return EncodedPairs(encode(bank.base), encode(bank.source), bank.base_answer.float(), labels)


# -- (1) transport --------------------------------------------------------------------------------------------


def run_method(bench: Bench, method: Method) -> tuple[tuple[State, dict[str, float]], dict[str, float]]:
    """A method alone and cold: record, choose, test."""
    started = time.perf_counter()
    problem, tests = bench.recorded()
    recording = time.perf_counter() - started
    state, parts = method.run(problem)
    started = time.perf_counter()
    test = {f"{v}/{kind}": _accuracy(r, state, v, problem) for (v, kind), r in tests.items()}
    parts |= {"recording": recording, "test": time.perf_counter() - started}
    return (state, test), parts


def _accuracy(recording: BankRecording, state: State, variable: str, problem: Problem) -> float:
    return float(correct(recording, state.handles[variable], problem.readout).double().mean())


def run_loop(bench: Bench, loop: StagedLoop) -> Callable[[], tuple[StagedRun, dict[str, float]]]:
    s = bench.prepared.splits
    fit, calibration = bench.pairs(s.fit), bench.pairs(s.calibration)
    tests = {f"{v}/{kind}": (v, bench.pairs(bank)) for (v, kind), bank in s.test.items()}

    def once() -> tuple[StagedRun, dict[str, float]]:
        run = loop.run(fit, calibration, tests)
        return run, run.seconds

    return once


def measure_transport(bench: Bench, plan: Plan) -> dict[str, Any]:
    warm_up()
    net = Unrolled(bench.prepared.subject.net, bench.task.bits)
    report = {}
    for name, menus in TRANSPORT.items():
        say(f"  {name}: ours and hooked loops, in turn")
        method = bench.task.methods()[name]
        loop = StagedLoop(net, menus, STAGE_A.epsilon, STAGE_B.epsilon, SEARCH.sizes, SEARCH.strengths, BATCH)
        found = alternate(
            plan.repeats,
            {
                "ours": lambda method=method: run_method(bench, method),
                "loop": run_loop(bench, loop),
                "kept": run_loop(bench, replace(loop, batch=None)),
            },
        )
        (state, test), ours = found["ours"]
        report[name] = {"ours": ours | {"test": test, "chosen": _chosen(bench, state)}}
        for key in LOOPS:
            run, times = found[key]
            report[name][key] = times | {"test": run.test, "chosen": run.chosen, "forwards": run.forwards}
            report[name][key] |= _ratios(times, ours) | _agreement(bench, state, test, run)
    return report


def _ratios(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> dict[str, float]:
    transport = [t["parts"].get("transport", 0.0) for t in (theirs, ours)]
    return {
        "times_ours": theirs["seconds"] / ours["seconds"],
        "times_ours_cpu": theirs["cpu_seconds_run"] / ours["cpu_seconds_run"],
        "times_ours_without_transport": (theirs["seconds"] - transport[0]) / (ours["seconds"] - transport[1]),
    }


def _chosen(bench: Bench, state: State) -> dict[str, Any]:
    """Per variable, the place and (candidate, K, λ)."""
    chosen = {}
    for v, h in state.handles.items():
        calibration = state.calibrations.get(v)
        grid = () if calibration is None else (calibration.candidate, h.chosen["K"], h.chosen["strength"])
        chosen[v] = (h.places[0], *grid)
    return chosen


def _agreement(bench: Bench, state: State, test: Mapping[str, float], run: StagedRun) -> dict[str, Any]:
    """Whether the loop found the same, and the largest differences of scores."""
    places = [p.name for p in bench.prepared.subject.places]
    theirs = {v: (places[t], *run.chosen.get(v, ())) for v, t in run.places.items()}
    surfaces = [
        float((state.calibrations[v].surface - surface.to(torch.float64)).abs().max())
        for v, surface in run.surfaces.items()
    ]
    return {
        "same_choice": theirs == _chosen(bench, state),
        "largest_difference_on_calibration": max(surfaces, default=0.0),
        "largest_difference_on_test": max(abs(test[k] - run.test[k]) for k in test),
    }


# -- (2) DAS --------------------------------------------------------------------------------------------------


def sweep_ours(problem: Problem, spec: DasSpec, sizes: Sequence[int]) -> tuple[list[Rotation], dict[str, float]]:
    """Every rotation of full DAS; training alone."""
    rotations, parts = [], {}
    for n, place in enumerate(problem.subject.places):
        started = time.perf_counter()
        rotations += train_rotations(
            problem.fit, place, problem.variables, sizes, problem.readout, spec, problem.generator(n)
        )
        parts[place.name] = time.perf_counter() - started
    return rotations, parts


def sampled(jobs: Sequence[Job], variables: Sequence[str], share: float) -> list[Job]:
    """Of every place and size the same number of variables, taking turns."""
    count = max(1, math.ceil(share * len(variables) - 1e-9))
    taken = []
    for n, (layer, k) in enumerate(dict.fromkeys((j.layer, j.k) for j in jobs)):
        turn = [variables[(n + i) % len(variables)] for i in range(count)]
        taken += [j for j in jobs if (j.layer, j.k) == (layer, k) and j.variable in turn]
    return taken


def sweep_outside(
    jobs: Sequence[Job], epochs: Mapping[Job, int], train: Callable[[Job], Trained], seed: int
) -> tuple[list[Trained], dict[str, Any]]:
    """Some jobs one after the other; seconds of the whole sweep from the seconds per step at each place."""
    torch.manual_seed(seed)
    cpu = time.process_time()
    done = [train(job) for job in jobs]
    cpu = time.process_time() - cpu
    measured, seconds = sum(t.seconds for t in done), 0.0
    for layer in sorted({j.layer for j in epochs}):
        here = [t for t in done if t.job.layer == layer]
        per_epoch = sum(t.seconds for t in here) / sum(t.epochs for t in here)
        seconds += per_epoch * sum(e for j, e in epochs.items() if j.layer == layer)
    steps = sum(t.steps for t in done)
    times = {
        "seconds": seconds,
        "seconds_measured": measured,
        "cpu_seconds_run": cpu,
        "cpu_seconds": cpu * seconds / measured,
        "milliseconds_per_step": 1e3 * measured / steps,
        "rotations": len(done),
    }
    return done, times


def measure_das(bench: Bench, plan: Plan) -> dict[str, Any]:
    stage = bench.task.methods()["das"].stages[0]
    assert isinstance(stage, TrainDas)
    assert stage.dimensions is not None
    sizes = [k for k in stage.dimensions if k < bench.task.width]  # k = d is the full patch: nobody trains it
    fit, steps = bench.pairs(bench.prepared.splits.fit), bench.task.bits
    plain = Unrolled(bench.prepared.subject.net, steps)
    for_pyvene = UnrolledForPyvene(bench.prepared.subject.net, steps)
    problem, _ = bench.recorded()
    warm_up_pyvene()
    report = {}
    for name, spec in (("default", stage.spec), ("paper's", PAPER)):
        spec = plan.capped(spec)
        say(f"  DAS, {name} optimiser: ours")
        turns = {"ours": lambda spec=spec: sweep_ours(problem, spec, sizes)}
        rotations, ours = alternate(plan.repeats, turns)["ours"]
        places = [p.name for p in bench.prepared.subject.places]
        epochs = {Job(places.index(r.place.name), r.variable, r.dimension): r.epochs for r in rotations}
        scores = {
            job: _score(problem, Trained(job, r.frame.read, r.epochs, 0, 0.0))
            for job, r in zip(epochs, rotations, strict=True)
        }
        jobs = sampled(list(epochs), bench.variables, plan.share)
        kind = "tangent" if spec.optimiser == "riemannian" else "adam"
        report[name] = {
            "spec": {"optimiser": spec.optimiser, "rate": spec.rate, "batch": spec.batch, "most": spec.most},
            "ours": ours | {"cpu_seconds": ours["cpu_seconds_run"], "rotations": len(rotations)},
            "rotation_epochs": sum(epochs.values()),
        }
        report[name]["ours"] |= _best(scores, jobs, bench.variables)
        for other, train, net in (("hooks", das_with_hooks, plain), ("pyvene", das_with_pyvene, for_pyvene)):
            say(f"  DAS, {name} optimiser: {other}, {len(jobs)} of {len(epochs)} rotations")

            trainings = {j: Training(kind, epochs[j], spec.batch, spec.rate, spec.most) for j in jobs}
            done, times = sweep_outside(jobs, epochs, partial(_one, train, net, fit, trainings), plan.seed)
            times |= _best({t.job: _score(problem, t) for t in done}, jobs, bench.variables)
            times["times_ours"] = times["seconds"] / ours["seconds"]
            times["times_ours_cpu"] = times["cpu_seconds"] / ours["cpu_seconds_run"]
            report[name][other] = times
    return report


def _one(train: Any, net: Unrolled, fit: EncodedPairs, trainings: Mapping[Job, Training], job: Job) -> Trained:
    return train(net, fit, job, trainings[job])


def _score(problem: Problem, trained: Trained) -> float:
    """Calibration score, by the same scorer for everyone."""
    job = trained.job
    frame = Frame.orthonormal(trained.directions)
    edits = [EditBatch(problem.subject.places[job.layer], frame, torch.ones(1, job.k))]
    weights = pair_weights(problem.calibration, job.variable, problem.score)
    return float(scored(problem.calibration, edits, job.variable, weights, problem.readout)[0])


def _best(scores: Mapping[Job, float], shared: Sequence[Job], variables: Sequence[str]) -> dict[str, Any]:
    return {
        "best_on_shared": {v: max((scores[j] for j in shared if j.variable == v), default=0.0) for v in variables},
        "mean_on_shared": fmean(scores[j] for j in shared),
    }


# -- (3) our methods side by side -----------------------------------------------------------------------------


def measure_methods(bench: Bench, plan: Plan) -> dict[str, Any]:
    say("  all our methods")
    methods = {n: m for n, m in bench.task.methods().items() if m.kind.judged}
    found = alternate(plan.repeats, {n: lambda m=m: run_method(bench, m) for n, m in methods.items()})
    return {n: times | {"test": fmean(result[1].values())} for n, (result, times) in found.items()}


# -- the report -----------------------------------------------------------------------------------------------


def judge(results: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The targets. A ratio counts by wall or by CPU seconds, whichever is lower; a transport method must also choose
    what the loop chooses."""
    found = []
    for width, r in results["widths"].items():
        rows = [
            (f"`{n}` against the loop, {BATCH} pairs per forward", t["loop"], "transport", t["loop"]["same_choice"])
            for n, t in r["transport"].items()
        ]
        rows += [
            (f"full `das`, {name} optimiser, against {other} one rotation at a time", t[other], "das", True)
            for name, t in r["das"].items()
            for other in ("hooks", "pyvene")
        ]
        for what, t, kind, same in rows:
            least = min(t["times_ours"], t["times_ours_cpu"])
            said = f"{t['times_ours']:.1f} x wall, {t['times_ours_cpu']:.1f} x CPU" + ("" if same else "; other choice")
            met = least >= WANTED[kind] and same
            found.append({"what": f"d = {width}: {what}", "found": said, "target": f">= {WANTED[kind]} x", "met": met})
    return found


def transport_section(r: Mapping[str, Any]) -> list[str]:
    parts = ("recording", "signatures", "transport", "calibration", "test")
    head = ["", *parts, "seconds", "x ours", "x ours, CPU", "x ours without transport"]
    rows, said = [], []
    for name, t in r["transport"].items():
        for key in ("ours", *LOOPS):
            label = f"`{name}`, ours" if key == "ours" else LOOPS[key]
            cells = [f"{t[key]['parts'].get(p, 0.0):.4f}" for p in parts]
            ratios = ("times_ours", "times_ours_cpu", "times_ours_without_transport")
            last = ["1.0"] * 3 if key == "ours" else [f"{t[key][q]:.1f}" for q in ratios]
            rows.append([label, *cells, f"{t[key]['seconds']:.3f}", *last])
        said += [f"`{name}`: {_agreed(t)}"]
    return [table(head, rows), *said, ""]


def _agreed(t: Mapping[str, Any]) -> str:
    loops = [t[key] for key in LOOPS]
    same = (
        "both loops choose the same as ours"
        if all(x["same_choice"] for x in loops)
        else "**the loops do not choose the same as ours**"
    )
    calibration, test = (max(x[f"largest_difference_on_{bank}"] for x in loops) for bank in ("calibration", "test"))
    return (
        f"{same} (place, coupling, K, λ for every carry); largest difference of a score on calibration "
        f"{calibration:.4f}, on test {test:.4f}; {t['loop']['forwards']:,} forwards in the loop, "
        f"{t['kept']['forwards']:,} with source states kept; mean test accuracy "
        f"{fmean(t['ours']['test'].values()):.4f}."
    )


def das_section(r: Mapping[str, Any], variables: Sequence[str]) -> list[str]:
    head = ["DAS sweep", "rotations run", "ms per step", "s run", "s full sweep", "x ours", "x ours, CPU"]
    head += [f"best cal. {v}" for v in variables] + ["mean cal."]
    rows = []
    for name, t in r["das"].items():
        total = t["ours"]["rotations"]
        for key in ("ours", "hooks", "pyvene"):
            x = t[key]
            full = "" if x["rotations"] == total else " (extrapolated)"
            ratios = ["1.0", "1.0"] if key == "ours" else [f"{x[q]:.1f}" for q in ("times_ours", "times_ours_cpu")]
            rows.append(
                [
                    f"{name} optimiser, {key}",
                    f"{x['rotations']} of {total}",
                    f"{x['milliseconds_per_step']:.2f}" if key != "ours" else "-",
                    f"{x.get('seconds_measured', x['seconds']):.2f}",
                    f"{x['seconds']:.2f}{full}",
                    *ratios,
                    *(f"{x['best_on_shared'][v]:.3f}" for v in variables),
                    f"{x['mean_on_shared']:.3f}",
                ]
            )
    return [table(head, rows)]


def methods_section(r: Mapping[str, Any]) -> list[str]:
    head = ["our method, alone and cold", "seconds", "CPU seconds", "test accuracy"]
    rows = [
        [f"`{n}`", f"{t['seconds']:.3f}", f"{t['cpu_seconds_run']:.3f}", f"{t['test']:.4f}"]
        for n, t in r["methods"].items()
    ]
    return [table(head, rows)]


def markdown(results: Mapping[str, Any]) -> str:
    m = results["machine"]
    targets = [[t["what"], t["found"], t["target"], "yes" if t["met"] else "**no**"] for t in results["targets"]]
    before, after = (", ".join(f"{x:.2f}" for x in m[f"load_average_{when}"]) for when in ("before", "after"))
    lines = [
        "# Binary addition: speed",
        "",
        "How fast are PLOT and DAS here, compared with a loop of hooked forward passes and with pyvene, on the "
        "networks of the [addition study](addition.md)?",
        "",
        f"`{results['command']}`",
        "",
        f"{m['cpu']}, {m['cores']} cores, {m['ram_gb']:.0f} GB, {m['platform']}, Python {m['python']}, "
        + ", ".join(f"{p} {v}" for p, v in m["versions"].items())
        + f". One process, {m['torch_threads']} torch thread; commit {results['commit']}; load average before the run "
        + f"{before}, after it {after}."
        + (" **Quick run: a reduced sample, not a measurement.**" if results["quick"] else ""),
        "",
        table(["target", "found", "wanted", "met"], targets),
        "A ratio counts by the lower of its values in wall and CPU seconds. Seconds are medians over "
        f"{results['repeats']} runs taken in turn (hooks and pyvene train once), each from a fresh recording.",
        "",
        "The loops solve the couplings with POT and its default budget, which is slow at small ε; the last column "
        "leaves transport out on both sides. The ratio depends on the loop's batch size, so we also show the fastest "
        "loop (whole banks, source states kept).",
        "",
        "**DAS.** Hooks and pyvene train each rotation for as many epochs as ours did, with the same batch and the "
        "same optimiser. `default` is the tangent-space Adam of `das` (in pyvene a plain subspace-swap "
        f"intervention). `paper's` is Adam {PAPER.rate:g} on the generator of a rotation, batch {PAPER.batch}, "
        f"{PAPER.most} epochs (pyvene's `RotatedSpaceIntervention`). Times are training only. None of them trains k = "
        "d, which is the full patch.",
        "",
        "The rotations that were run are a share of the sweep, the same number at every place and size. An "
        "extrapolated sweep takes their seconds per epoch at a place, times the epochs of all rotations there. "
        "Calibration scores are over the rotations that all three trained.",
        "",
    ]
    for width, r in results["widths"].items():
        lines += [f"## d = {width}, seed {results['seed']}", "", *transport_section(r)]
        lines += [*das_section(r, r["variables"]), *methods_section(r)]
    return "\n".join(lines)


# -- the command ----------------------------------------------------------------------------------------------


def arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=1000)
    parser.add_argument("--widths", type=int, nargs="+", default=[8, 16])
    parser.add_argument("--cache", type=Path, default=Path("~/.cache/plot-ot"), help="where backbones are kept")
    parser.add_argument("--share", type=float, default=1 / 3, help="of the rotations that hooks and pyvene train")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="a smoke test: about half a minute")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "results")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> None:
    args = arguments(argv)
    torch.set_num_threads(THREADS)
    plan = Plan(args.seed, tuple(args.widths), args.share, args.repeats)
    if args.quick:
        plan = Plan(args.seed, (8,), 1 / 3, repeats=1, epochs=1)
    results: dict[str, Any] = {
        "command": shlex.join(["python", "benchmarks/addition_speed.py", *argv]),
        "seed": plan.seed,
        "quick": args.quick,
        "repeats": plan.repeats,
        "machine": machine(),
        "commit": commit(),
        "widths": {},
    }
    for width in plan.widths:
        say(f"d = {width}")
        task = BinaryAddition(width)
        bench = Bench(task, task.prepare(plan.seed, args.cache.expanduser()))
        results["widths"][str(width)] = {
            "variables": bench.variables,
            "transport": measure_transport(bench, plan),
            "das": measure_das(bench, plan),
            "methods": measure_methods(bench, plan),
        }
    results["machine"]["load_average_after"] = os.getloadavg()
    results["targets"] = judge(results)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "addition_speed.json").write_text(json.dumps(results, indent=1) + "\n")
    (args.out / "addition_speed.md").write_text(markdown(results))
    print(markdown(results))


if __name__ == "__main__":
    main(sys.argv[1:])
