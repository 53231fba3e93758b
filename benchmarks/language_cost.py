"""What does a study of a language model cost, counted in recordings? And DAS next to pyvene. One process, one thread.

python benchmarks/language_cost.py --task mcqa --model smollm2 --adapter planted-1000
python benchmarks/language_cost.py --task ioi --model smollm2 --share 0.1

1 recording is a plain batched forward over the distinct prompts of all banks with logits at the last token only, run
before and after the methods. A method's cost is its seconds, alone and cold, over that: recording, signatures,
transport, calibration, DAS and test. Every task and model has its section in docs/results/language_cost.{json,md}.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np
import torch

from baselines import Job
from heq_speed import ROOT, THREADS, commit, machine, say, table
from language_baselines import Prompts, TextPairs, das_with_pyvene, plain_forward
from measuring import Peak, Seconds, resident, timed
from plot_ot.abstract.prompts import encode
from plot_ot.edits import EditBatch, Frame, respond
from plot_ot.methods import Method
from plot_ot.stages.calibrate import correct
from plot_ot.stages.choose import TrainDas
from plot_ot.stages.das import train_rotations
from plot_ot.stages.descent import DasSpec
from plot_ot.stages.problem import Problem
from plot_ot.studies.prepared import Prepared
from plot_ot.subjects import BankRecording, record
from plot_ot.subjects.decoder.sizes import RECORDED_AT_ONCE
from plot_ot.subjects.decoder.store import DecoderStore
from plot_ot.subjects.decoder.subject import Encode
from plot_ot.tasks import IndirectObject, MultipleChoice, mcqa_data
from plot_ot.tasks.language import LanguageTask
from plot_ot.tasks.text_data import Sizes
from recurrent_baselines import Training, warm_up_pyvene


@dataclass(frozen=True)
class OneShot(MultipleChoice):
    """Multiple choice with a solved question in front, so that prompts are twice as long. Every pair counts, right or
    wrong: only costs are looked at."""

    name = "mcqa-one-shot"

    def render(self, rows: torch.Tensor) -> list[str]:
        solved = mcqa_data.draw_rows(1, torch.Generator().manual_seed(0))
        letter = self.data.ANSWERS[int(self.causal_model().answer(solved))]
        front = f"{super().render(solved)[0]} {letter}\n\n"
        return [front + prompt for prompt in super().render(rows)]

    def encoder(self) -> Encode:
        lm = self.language_model
        return lambda rows: encode(self.render(rows), lm.tokenizer, bos=lm.bos)

    def answers_correctly(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.ones(len(rows), dtype=torch.bool)


TASKS: dict[str, type[LanguageTask]] = {"mcqa": MultipleChoice, "mcqa-one-shot": OneShot, "ioi": IndirectObject}
METHODS = ("plot", "plot-native", "plot-pca", "plot-closed-form", "plot-das")
WANTED = {"plot": 1.3, "plot-native": 2.0, "plot-pca": 2.0, "plot-das": 10.0}
"""At most so many recordings."""
FASTER, BOUND = 15.0, 1.1
"""DAS against pyvene; peak memory over what was allowed."""
OPTIMISERS = {
    "adam": DasSpec("adam", rate=1e-3, clip=math.inf),
    "riemannian": DasSpec("riemannian", rate=0.08),
}
PYVENE = {"adam": "adam", "riemannian": "tangent"}


# -- what is measured -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bench:
    """One model with its banks, for us and for the others."""

    task: LanguageTask
    prepared: Prepared

    @cached_property
    def prompts(self) -> Prompts:
        """The distinct prompts of all banks."""
        splits = self.prepared.splits
        banks = [splits.fit, splits.calibration, *splits.test.values()]
        rows = torch.cat([side for bank in banks for side in (bank.base, bank.source)]).unique(dim=0)
        return Prompts(*self.task.subject.encode(rows))

    def plain(self) -> Seconds:
        """1 recording."""
        model, at_once = self.task.subject.decoder.model, RECORDED_AT_ONCE["cpu"]
        return timed(lambda: plain_forward(model, self.prompts, at_once))[1]

    def record(self) -> tuple[Problem, dict[tuple[str, str], BankRecording]]:
        """Every distinct prompt once, by ours."""
        p, s = self.prepared, self.prepared.splits
        subject = self.task.subject
        fit, calibration, *tests = record(subject, s.fit, s.calibration, *s.test.values())
        problem = Problem(subject, fit, calibration, s.fit.variables, p.readout, p.seed, p.score)
        return problem, dict(zip(s.test, tests, strict=True))

    def run(self, method: Method, problem: Problem, tests: Mapping[tuple[str, str], BankRecording]) -> dict[str, Any]:
        """A method on what was recorded, as `Study.run` counts it: its parts and the test."""
        state, parts = method.run(problem)
        started = time.perf_counter()
        right = {key: correct(r, state.handles[key[0]], problem.readout) for key, r in tests.items()}
        parts["test"] = time.perf_counter() - started
        handles = {v: {"place": h.places[0], "size": h.size} for v, h in state.handles.items()}
        return {"parts": parts, "test": fmean(float(x.double().mean()) for x in right.values()), "handles": handles}


def measure_methods(bench: Bench, names: Sequence[str], rounds: int, floor: int) -> tuple[dict[str, Any], Problem]:
    """Rounds of: a plain forward, a fresh recording, every method; the unit of a round is the mean of the plain
    forwards before and after it. Also what was recorded last."""
    methods = bench.task.methods()
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in ("recording", *names)}
    say("  a plain forward over all prompts")
    plain = [bench.plain()]
    memory: dict[str, Any] = {}
    for k in range(rounds):
        problem = tests = None  # one recording at a time
        say(f"  round {k + 1} of {rounds}: recording")
        with Peak(floor) as peak:
            (problem, tests), recording = timed(bench.record)
        memory |= _cache(problem) | {"recording_peak": peak.bytes}
        ran: dict[str, tuple[Seconds, dict[str, Any]]] = {"recording": (Seconds(), {})}
        for name in names:
            say(f"  round {k + 1} of {rounds}: {name}")
            with Peak(floor) as peak:
                result, seconds = timed(partial(bench.run, methods[name], problem, tests))
            ran[name] = seconds, result | {"peak": peak.bytes}
        say(f"  round {k + 1} of {rounds}: a plain forward")
        plain.append(bench.plain())
        unit = Seconds.mean(plain[-2:])
        for name, (seconds, result) in ran.items():
            whole = seconds + recording
            parts = {part: s / unit.wall for part, s in result.pop("parts", {}).items()}
            found[name].append({"recordings": whole.over(unit), "parts": parts, "seconds": vars(whole), **result})
    return {
        "plain": [vars(p) for p in plain],
        "methods": {name: _medians(runs) for name, runs in found.items()},
        "memory": memory,
    }, problem


def _medians(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    both = ("wall", "cpu")
    middle = {key: {kind: median(r[key][kind] for r in runs) for kind in both} for key in ("recordings", "seconds")}
    return runs[-1] | middle | {"rounds": len(runs)}


def _cache(problem: Problem) -> dict[str, Any]:
    store = problem.fit.store
    assert isinstance(store, DecoderStore)
    kept = sum(a.nbytes for a in store.activations.values()) + store.final.nbytes
    spilled = any(cache.spilled for cache in store.caches)
    bases = int((store.part >= 0).sum())
    return {"cache": store.cache_bytes, "spilled": spilled, "activations": kept, "bases": bases}


def memory_child(args: argparse.Namespace) -> None:
    """Peak memory in a process of its own: recording, `plot`, and one epoch of `plot-das`."""
    bench, floor, _ = prepared(args)
    with Peak(floor) as peak:
        problem, tests = bench.record()
    found = _cache(problem) | {"allowed": bench.task.memory, "recording": peak.bytes}
    methods = bench.task.methods()
    short = methods["plot-das"]
    stages = [replace(s, spec=replace(s.spec, most=1)) if isinstance(s, TrainDas) else s for s in short.stages]
    for method in (methods["plot"], replace(short, stages=tuple(stages))):
        with Peak(floor) as peak:
            bench.run(method, problem, tests)
        found[method.name] = peak.bytes
    print(json.dumps(found))


def measure_tight(argv: Sequence[str], gigabytes: float) -> dict[str, Any]:
    """The same study where little memory is allowed."""
    say(f"  memory: at most {gigabytes:g} GB, in a process of its own")
    command = [sys.executable, str(Path(__file__).resolve()), *argv, "--memory", str(gigabytes), "--memory-child"]
    printed = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout  # noqa: S603
    return dict(json.loads(printed.strip().splitlines()[-1]))


# -- DAS ------------------------------------------------------------------------------------------------------


def stratified(places: int, sizes: Sequence[int], share: float) -> list[tuple[int, int]]:
    """(place, k), taken for all variables: of every place the same number of sizes, which move on from place to
    place, so that all sizes have equal shares too."""
    count = max(1, math.ceil(share * len(sizes) - 1e-9))
    return [(p, sizes[(p * count + i) % len(sizes)]) for p in range(places) for i in range(count)]


def measure_das(bench: Bench, optimiser: str, share: float, pairs: int, epochs: int, seed: int) -> dict[str, Any]:
    """The same fits by ours and by pyvene: same pairs, batch, optimiser and number of epochs."""
    task, splits = bench.task, bench.prepared.splits
    variables, decoder = splits.fit.variables, task.subject.decoder
    das = task.methods()["das"].stages[0]
    assert isinstance(das, TrainDas)
    sizes = [k for k in das.dimensions if k < decoder.width]  # k = d is the full patch: nobody trains it
    batch = das.spec.batch
    spec = replace(OPTIMISERS[optimiser], batch=batch, least=epochs, most=epochs)
    bank = splits.fit.select(torch.arange(min(pairs, len(splits.fit))))
    [fit] = record(task.subject, bank)
    chosen = stratified(len(decoder.blocks), sizes, share)
    jobs = [Job(layer, v, k) for layer, k in chosen for v in variables]
    sweep = len(decoder.blocks) * len(sizes) * len(variables)

    def ours(layer: int, some: Sequence[int]) -> Seconds:
        place, generator = task.subject.places[layer], torch.Generator().manual_seed(seed)
        return timed(lambda: train_rotations(fit, place, variables, some, task.readout, spec, generator))[1]

    ours(len(decoder.blocks) - 1, sizes[:1])  # warm up
    say(f"  DAS, {optimiser}: ours, {len(jobs)} of {sweep} rotations")
    same = sum((ours(layer, [k]) for layer, k in chosen), Seconds())
    say(f"  DAS, {optimiser}: ours, all {sweep} rotations")
    every = [ours(layer, sizes) for layer in range(len(decoder.blocks))]
    base, source = (Prompts(*task.subject.encode(side)) for side in (bank.base, bank.source))
    plain = TextPairs(base, source, task.subject.answers, {v: bank.labels[v].long() for v in variables})
    training = Training(PYVENE[optimiser], epochs, batch, spec.rate, epochs)
    blocks = next(name for name, m in decoder.model.named_modules() if m is decoder.blocks[0]).rpartition(".")[0]
    torch.manual_seed(seed)
    theirs, difference = Seconds(), 0.0
    for n, job in enumerate(jobs):
        say(f"  DAS, {optimiser}: pyvene, {n + 1} of {len(jobs)}")
        done = das_with_pyvene(decoder.model, blocks, decoder.width, plain, job, training)
        theirs += Seconds(done.seconds, done.cpu_seconds)
        if not n:
            difference = _difference(fit, done.forward, done.directions, job)
    whole = sum(every, Seconds())
    return {
        "spec": {"rate": spec.rate, "batch": batch, "epochs": epochs, "pairs": len(bank)},
        "tokens": [int(base.lengths.min()), int(base.lengths.max())],
        "rotations": len(jobs),
        "sweep": sweep,
        "ours": vars(same),
        "pyvene": vars(theirs),
        "ours_whole_sweep": vars(whole),
        "times": theirs.over(same),
        "times_in_a_sweep": {k: x * sweep / len(jobs) for k, x in theirs.over(whole).items()},
        "ours_by_place": [vars(s) for s in every],
        "largest_difference_of_logits": difference,
    }


@torch.no_grad()
def _difference(fit: BankRecording, theirs: Callable[[Any], Any], directions: torch.Tensor, job: Job) -> float:
    """Relative difference of the answers' logits under pyvene's rotation, by pyvene and by ours."""
    some = torch.arange(min(8, len(fit)))
    place, frame = fit.subject.places[job.layer], Frame.orthonormal(directions.contiguous())
    ours = respond(fit.select(some), [EditBatch(place, frame, torch.ones(1, job.k))])[0]
    expected = theirs(some)
    found = float((ours - expected).abs().max() / expected.abs().max())
    assert found < 1e-3, f"pyvene and ours do not run the same edit: they differ by {found:.2g}"
    return found


def full_das(bench: Bench, problem: Problem, every: int, epochs: int, unit: Seconds) -> dict[str, Any]:
    """Full DAS as the method does it, at most: a few epochs at every n-th block, scaled to all epochs and blocks."""
    stage = bench.task.methods()["das"].stages[0]
    assert isinstance(stage, TrainDas)
    places, measured = bench.task.subject.places, {}
    for n in range((len(places) - 1) % every, len(places), every):
        say(f"  full DAS at {places[n].name}, {epochs} epochs")
        spec = replace(stage.spec, least=epochs, most=epochs)
        arguments = (problem.variables, stage.dimensions, problem.readout, spec, problem.generator(n))
        measured[n] = timed(partial(train_rotations, problem.fit, places[n], *arguments))[1]
    scale = stage.spec.most / epochs
    total = [
        scale * float(np.interp(range(len(places)), list(measured), [getattr(s, k) for s in measured.values()]).sum())
        for k in ("wall", "cpu")
    ]
    return {
        "blocks": list(measured),
        "epochs": epochs,
        "most": stage.spec.most,
        "seconds": vars(Seconds(*total)),
        "recordings": Seconds(*total).over(unit),
    }


# -- the report -----------------------------------------------------------------------------------------------


def judge(r: Mapping[str, Any]) -> list[list[str]]:
    """The targets; of wall and CPU seconds the one that is worse counts."""
    rows = []
    for name, most in WANTED.items():
        if name in r["methods"]:
            cost = max(r["methods"][name]["recordings"].values())
            rows.append([f"`{name}`", f"{cost:.2f} recordings", f"<= {most:g}", "yes" if cost <= most else "**no**"])
    for optimiser, d in r.get("das", {}).items():
        times = min(d["times"].values())
        met = "yes" if times >= FASTER else "**no**"
        rows.append([f"DAS ({optimiser}) against pyvene, same fits", f"{times:.1f} x", f">= {FASTER:g} x", met])
    peaks = [r["memory"]["recording_peak"], *(m["peak"] for m in r["methods"].values() if "peak" in m)]
    budgets = [("", max(peaks), r["memory"]["allowed"])]
    for t in r.get("tight", []):
        budgets.append((", little", max(t["recording"], t["plot"], t["plot-das"]), t["allowed"]))
    for said, peak, allowed in budgets:
        share = peak / allowed
        found = f"{peak / 1e9:.2f} of {allowed / 1e9:.2f} GB"
        rows.append([f"peak memory{said}", found, f"<= {BOUND:g} x", "yes" if share <= BOUND else "**no**"])
    return rows


def methods_table(r: Mapping[str, Any]) -> str:
    parts = ("signatures", "transport", "closed_form", "calibration", "das", "test")
    head = ["method", "recordings (wall)", "recordings (CPU)", "CPU s", *parts, "peak GB", "test"]
    rows = []
    for name, m in r["methods"].items():
        cells = [f"{m['recordings']['wall']:.2f}", f"{m['recordings']['cpu']:.2f}", f"{m['seconds']['cpu']:.1f}"]
        if name == "recording":
            rows.append(
                ["recording, ours", *cells, *[""] * len(parts), f"{r['memory']['recording_peak'] / 1e9:.2f}", ""]
            )
            continue
        cells += [f"{m['parts'][p]:.2f}" if m["parts"].get(p) else "" for p in parts]
        rows.append([f"`{name}`", *cells, f"{m['peak'] / 1e9:.2f}", f"{m['test']:.3f}"])
    if "full_das" in r:
        f = r["full_das"]
        cells = [f"{f['recordings']['wall']:.0f}", f"{f['recordings']['cpu']:.0f}", f"{f['seconds']['cpu']:.0f}"]
        rows.append(["`das`, at most (scaled up)", *cells, *[""] * len(parts), "", ""])
    return table(head, rows)


def section(name: str, r: Mapping[str, Any]) -> list[str]:
    p, m, s = r["prompts"], r["memory"], r["stage_a_plain"]
    before, after = (", ".join(f"{x:.2f}" for x in r["load_average"][when]) for when in ("before", "after"))
    lines = [
        f"## {name}",
        "",
        f"`{r['command']}`; commit {r['commit']}; {r['cpu']}; load average before {before}, after {after}.",
        "",
        table(["target", "found", "wanted", "met"], judge(r)),
        f"{p['distinct']} distinct prompts of {p['tokens'][0]} to {p['tokens'][1]} tokens, {p['all_tokens']:,} "
        f"tokens in all. One recording takes {fmean(x['cpu'] for x in r['plain']):.1f} CPU seconds "
        f"({', '.join(format(x['cpu'], '.1f') for x in r['plain'])}; {p['all_tokens'] * p['blocks']:,} tokens through "
        f"blocks). Before that, filtering the candidates took {r['prepare']['cpu']:.1f} CPU seconds.",
        "",
        f"The plain way, with hooks, would need 2 forwards per site and pair for Stage A alone: 2 x {s['sites']} "
        f"sites x {s['pairs']} fit pairs = {s['prompts']:,} prompts, or **{s['recordings']:.1f} recordings**, before "
        "anything is calibrated.",
        "",
        methods_table(r),
        f"Keys and values of {m['bases']} base prompts: {m['cache'] / 1e9:.2f} GB"
        f"{', in a file' if m['spilled'] else ''} (sources keep none); recorded activations "
        f"{m['activations'] / 1e9:.2f} GB. Peak memory is resident memory above that of the loaded model, with "
        f"{m['allowed'] / 1e9:g} GB allowed.",
        "",
    ]
    for t in r.get("tight", []):
        lines += [
            f"With {t['allowed'] / 1e9:g} GB allowed, keys and values ({t['cache'] / 1e9:.2f} GB) are "
            f"{'in a file' if t['spilled'] else 'in memory'}: peak {t['recording'] / 1e9:.2f} GB while recording, "
            f"{t['plot'] / 1e9:.2f} in `plot`, {t['plot-das'] / 1e9:.2f} in `plot-das` (one epoch).",
            "",
        ]
    if "das" in r:
        rows = [
            [
                optimiser,
                f"{d['rotations']} of {d['sweep']}",
                f"{d['spec']['pairs']} / {d['spec']['batch']} / {d['spec']['epochs']}",
                f"{d['pyvene']['cpu']:.1f}",
                f"{d['ours']['cpu']:.1f}",
                f"**{d['times']['cpu']:.1f}** ({d['times']['wall']:.1f})",
                f"{d['times_in_a_sweep']['cpu']:.1f} ({d['times_in_a_sweep']['wall']:.1f})",
            ]
            for optimiser, d in r["das"].items()
        ]
        head = ["optimiser", "fits", "pairs / batch / epochs", "pyvene, CPU s", "ours, CPU s"]
        head += ["x faster, same fits: CPU (wall)", "x faster, in a whole sweep: CPU (wall)"]
        lines += [
            table(head, rows),
            "Both train the same fits: the same number at every block, for both variables, with sizes k that change "
            "from block to block. Ours trains two of them at a time (one size, both variables), and in a whole sweep "
            "all of a block at once. pyvene's seconds are its training steps alone, with frozen weights and logits at "
            "the last token only.",
            "",
        ]
    return lines


def page(results: Mapping[str, Any]) -> str:
    m = results["machine"]
    lines = [
        "# Language models: cost",
        "",
        "What does a whole study of a language model cost? The unit is one *recording*: a plain forward pass over "
        "every prompt of the study.",
        "",
        f"{m['cores']} cores, {m['ram_gb']:.0f} GB, {m['platform']}, Python {m['python']}, "
        + ", ".join(f"{p} {v}" for p, v in m["versions"].items())
        + f". One process, {m['torch_threads']} torch thread. Targets count the worse of wall and CPU seconds.",
        "",
    ]
    return "\n".join(lines + [line for name, r in results["runs"].items() for line in section(name, r)])


# -- the command ----------------------------------------------------------------------------------------------


def arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=TASKS, default="ioi")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--adapter")
    parser.add_argument("--seed", type=int, default=1000)
    parser.add_argument("--fit", type=int, default=200)
    parser.add_argument("--pairs", type=int, default=100, help="sensitive, and as many invariant, pairs per variable")
    parser.add_argument("--methods", nargs="*", default=METHODS)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--memory", type=float, default=4.0, help="GB allowed")
    parser.add_argument(
        "--tight", type=float, nargs="*", default=[], help="GB allowed in runs that only measure memory"
    )
    parser.add_argument("--memory-child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--share", type=float, default=0.1, help="of the DAS sweep that pyvene trains; 0: none")
    parser.add_argument("--optimisers", nargs="*", choices=OPTIMISERS, default=["adam"])
    parser.add_argument("--das-pairs", type=int, default=64, help="fit pairs of the comparison with pyvene")
    parser.add_argument("--das-epochs", type=int, default=1, help="epochs of the comparison with pyvene")
    parser.add_argument("--full-das-every", type=int, default=6, help="blocks at which full DAS is sampled; 0: none")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "results")
    return parser.parse_args(argv)


def prepared(args: argparse.Namespace) -> tuple[Bench, int, Seconds]:
    """The bench, the memory that the loaded model takes, and the time of filtering."""
    sizes = Sizes(args.fit, args.pairs, args.pairs, 4)
    task = TASKS[args.task](args.model, args.adapter, sizes=sizes, memory=int(args.memory * 1e9))
    model = task.subject.decoder.model.requires_grad_(False)
    word = torch.ones(1, 8, dtype=torch.long)
    plain_forward(model, Prompts(word, word), RECORDED_AT_ONCE["cpu"])  # warm up
    floor = resident()
    found, filtering = timed(lambda: task.prepare(args.seed, Path()))
    task.subject.record(found.splits.fit.base[:1])  # lets go of what filtering recorded: a method is to run cold
    return Bench(task, found), floor, filtering


def measure(args: argparse.Namespace, argv: Sequence[str]) -> dict[str, Any]:
    load_before = os.getloadavg()
    bench, floor, filtering = prepared(args)
    task = bench.task
    found, problem = measure_methods(bench, args.methods, args.rounds, floor)
    found["memory"]["allowed"] = task.memory
    if args.full_das_every:
        unit = Seconds.mean([Seconds(**p) for p in found["plain"]])
        found["full_das"] = full_das(bench, problem, args.full_das_every, 2, unit)
    del problem
    if args.tight:
        found["tight"] = [measure_tight(argv, gigabytes) for gigabytes in args.tight]
    if args.share:
        warm_up_pyvene()
        found["das"] = {
            o: measure_das(bench, o, args.share, args.das_pairs, args.das_epochs, args.seed) for o in args.optimisers
        }
    fit = bench.prepared.splits.fit
    tokens = int(sum(Prompts(*task.subject.encode(side)).mask.sum() for side in (fit.base, fit.source)))
    lengths, sites = bench.prompts.lengths, len(task.subject.places)
    return found | {
        "seed": args.seed,
        "sizes": vars(task.sizes),
        "commit": commit(),
        "prepare": vars(filtering),
        "prompts": {
            "distinct": len(bench.prompts),
            "tokens": [int(lengths.min()), int(lengths.max())],
            "all_tokens": int(lengths.sum()),
            "blocks": sites,
        },
        "stage_a_plain": {
            "sites": sites,
            "pairs": len(fit),
            "prompts": 2 * sites * len(fit),
            "recordings": sites * tokens / int(lengths.sum()),
        },
        "load_average": {"before": load_before, "after": os.getloadavg()},
    }


def main(argv: Sequence[str]) -> None:
    args = arguments(argv)
    torch.set_num_threads(THREADS)
    if args.memory_child:
        return memory_child(args)
    args.out.mkdir(parents=True, exist_ok=True)
    file = args.out / "language_cost.json"
    found = measure(args, argv) | {"command": shlex.join(["python", "benchmarks/language_cost.py", *argv])}
    results = json.loads(file.read_text()) if file.exists() else {"runs": {}}
    results["machine"] = machine()
    found["cpu"] = results["machine"]["cpu"]
    name = f"{args.task} on {Path(args.model).name}" + (
        f" with adapter {Path(args.adapter).name}" if args.adapter else ""
    )
    results["runs"][name] = found
    file.write_text(json.dumps(results, indent=1) + "\n")
    file.with_suffix(".md").write_text(page(results))
    print(page(results))


if __name__ == "__main__":
    main(sys.argv[1:])
