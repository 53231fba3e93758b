"""Early answers (`localize(..., budget="auto")`): error rates by simulation, and costs against banks of one size.

python benchmarks/early_answers.py simulate --studies 500 --out runs/early       # per case, pair by pair, no networks
python benchmarks/early_answers.py networks --seeds 1000 1007 --out runs/early   # planted and null networks, both ways
python benchmarks/early_answers.py smollm2 --seeds 1000 1000 --out runs/early    # planted adapters, and untouched
python benchmarks/early_answers.py page --out runs/early                         # the tables, of all that is done

Every unit is one small file in the out folder; what is there is not run again.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

import plot_ot
from pages import markdown, version
from plot_ot.files.writing import Json, write_atomically
from plot_ot.judging.status import Status
from plot_ot.result import Result
from plot_ot.tasks import IndirectObject, ioi_data

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from truth.campaigns import KINDS
from truth.known import Known
from truth.looking import CASES, studies
from verdict_campaign import ADAPTERS, judged, share, smollm2
from worked_studies import example

PLANTED = ("plant", "quiet", "oblique", "neurons", "decoder layer")
NULL = ("absent", "absent neurons", "absent decoder layer")
PAIRS, INPUTS = 200, 500
WAYS: dict[str, str | None] = {"one size": None, "auto": "auto"}


def simulate(count: int, out: Path, seed: int = 1000) -> None:
    """Many simulated studies of every case."""
    for name, handle in CASES.items():
        path = out / "simulated" / f"{name.replace(' ', '-').replace(',', '')}-{count}.json"
        if path.exists():
            continue
        ended = list(studies(handle, count, seed))
        placed = sum(o.status.found for o in ended)
        found = {
            "case": name,
            "studies": count,
            "placed": placed,
            "true": handle.placed,
            "covered": sum(o.covered for o in ended),
            "said": Counter(str(o.status) for o in ended),
            "pairs": Counter(o.pairs for o in ended),
        }
        _write(path, found)
        print(f"{name}: {placed} of {count} placed, {found['covered']} intervals hold the truth", flush=True)


@dataclass(frozen=True)
class Case:
    """A question to `localize`, and what is said of a variable of its answer."""

    subject: Any
    hypothesis: Any
    inputs: Any
    size: int
    said: Callable[[str, Result], Json]
    options: Mapping[str, Any] = field(default_factory=dict)


def known_case(known: Known) -> Case:
    """A network whose truth is known."""
    return Case(known.subject, known.causal, known.rows, known.size, partial(judged, known))


def as_said(variable: str, result: Result) -> Json:
    """What is said of a variable that nobody knows the truth of."""
    return {"status": str(result.verdicts[variable].status), "sentence": result.verdicts[variable].sentence}


def names(seed: int) -> Case:
    """Indirect objects on unmodified SmolLM2."""
    rows = ioi_data.draw_rows(INPUTS, torch.Generator().manual_seed(seed))
    return Case(IndirectObject().subject, ioi_data.causal_model(), rows, PAIRS, as_said)


def verbs(seed: int) -> Case:
    """Agreement in number and tense on unmodified SmolLM2, as in examples/verbs.py."""
    study = example("verbs")
    options = {"filter": "candidates"}
    inputs = study.inputs(count=INPUTS, seed=seed)
    return Case(plot_ot.load_subject("smollm2"), study.hypothesis, inputs, PAIRS, as_said, options)


def adapter(seed: int, name: str) -> Case:
    """SmolLM2 with an adapter that holds the pointer, or one that does not."""
    return known_case(smollm2(seed, name, PAIRS))


LARGE: dict[str, Callable[[int], Case]] = {
    **{name: partial(adapter, name=name) for name in ADAPTERS},
    "indirect objects": names,
    "verbs": verbs,
}
"""Studies of SmolLM2, from a seed."""


def compare(group: str, kind: str, seed: int, made: Callable[[], Case], out: Path) -> None:
    """One network, with banks of one size and with banks that grow."""
    path = out / group / f"{kind.replace(' ', '-')}-{seed}.json"
    if path.exists():
        return
    case = made()
    found: Json = {"kind": kind, "seed": seed, "pairs": case.size, "version": version(), "ways": {}}
    for way, budget in WAYS.items():
        cpu, until = time.process_time(), dict[int, float]()

        def looked(so_far: Result, begun: float = cpu, until: dict[int, float] = until) -> None:
            until[so_far.looks[-1]["pairs"]] = time.process_time() - begun

        result = plot_ot.localize(
            case.subject,
            case.hypothesis,
            case.inputs,
            seed=seed,
            size=case.size,
            budget=budget,
            progress=looked if budget else False,
            **case.options,
        )
        took = time.process_time() - cpu
        ended = {v: look["pairs"] for look in result.looks for v in look["verdicts"]}
        found["ways"][way] = {
            "cpu": took,
            "decided": {v: until.get(ended.get(v, 0), took) for v in result.verdicts},
            "waited": dict(result.waited),
            "variables": {v: case.said(v, result) for v in result.verdicts},
            "looks": list(result.looks),
        }
    _write(path, found)
    told = {
        way: (round(w["cpu"], 1), [x["status"] for x in w["variables"].values()]) for way, w in found["ways"].items()
    }
    print(f"{kind} {seed}: {told}", flush=True)


def networks(seeds: range, out: Path) -> None:
    """Small networks with a variable at a known place, and without one."""
    for seed in seeds:
        for group, kinds in (("planted", PLANTED), ("null", NULL)):
            for kind in kinds:
                compare(group, kind, seed, partial(_small, kind, seed), out)


def _small(kind: str, seed: int) -> Case:
    return known_case(KINDS[kind](seed))


def _write(path: Path, found: Json) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(found, indent=1).encode())


def _read(folder: Path) -> list[Json]:
    return [json.loads(p.read_text(encoding="utf-8")) for p in sorted(folder.glob("*.json"))]


# -- tables -----------------------------------------------------------------------------------------------------------


def page(out: Path) -> Iterator[str]:
    """Tables of all that is done."""
    simulated = _read(out / "simulated")
    if simulated:
        yield from ("## Error rates, simulated", "")
        rows = [
            [
                f["case"],
                str(f["studies"]),
                "" if f["true"] else share(f["placed"], f["studies"]),
                share(f["covered"], f["studies"]),
                ", ".join(f"{k} {n}" for k, n in f["said"].items()),
                ", ".join(f"{k}: {n}" for k, n in sorted(f["pairs"].items(), key=lambda x: int(x[0]))),
            ]
            for f in simulated
        ]
        head = ["what is true", "studies", "placed by mistake", "interval holds the truth", "said", "ended at pairs"]
        yield from (*markdown(head, rows), "")
    for group in ("planted", "null", "smollm2"):
        units = _read(out / group)
        if units:
            yield from (f"## Networks: {group}", "", *markdown(*_compared(units)), "")
            if group == "smollm2":
                yield from (*_until_decided(units), "")


def _until_decided(units: list[Json]) -> Iterator[str]:
    """CPU seconds until each variable has its verdict, against those of banks of one size."""
    rows, ratios = list[list[str]](), dict[str, float]()
    for u in units:
        early, fixed = u["ways"]["auto"], u["ways"]["one size"]
        for v, took in early["decided"].items():
            said, other = (way["variables"][v]["status"] for way in (early, fixed))
            looks = sorted({look["pairs"] for look in early["looks"] if v in look["verdicts"]})
            ratio = took / fixed["cpu"]
            if said != str(Status.OUTPUT) and not u["kind"].startswith("plain"):
                ratios[f"{u['kind']}, {v}, {u['seed']}"] = ratio
            numbers = [f"{took:.0f}", f"{fixed['cpu']:.0f}", f"{ratio:.2f}", ", ".join(map(str, looks))]
            rows.append([u["kind"], str(u["seed"]), v, *numbers, said, other])
    yield from markdown(
        ["question", "seed", "variable", "early", "fixed", "ratio", "looks", "said", "fixed said"], rows
    )
    said = f"{len(ratios)} variables that are there and no output variables"
    yield f"Median ratio of the {said}: {median(ratios.values()):.2f}."


def _compared(units: list[Json]) -> tuple[list[str], list[list[str]]]:
    rows = []
    for kind in dict.fromkeys(u["kind"] for u in units):
        mine = [u for u in units if u["kind"] == kind]
        for way in WAYS:
            done = [u["ways"][way] for u in mine]
            variables = [x for d in done for x in d["variables"].values()]
            said, known = Counter(x["status"] for x in variables), [x for x in variables if "kept" in x]
            ends = Counter(
                d["looks"][-1]["pairs"] if d["looks"] else u["pairs"] for u, d in zip(mine, done, strict=True)
            )
            rows.append(
                [
                    kind,
                    way,
                    str(len(mine)),
                    f"{median(d['cpu'] for d in done):.1f}",
                    f"{sum(d['cpu'] for d in done):.0f}",
                    ", ".join(f"{status} {n}" for status, n in said.items()),
                    share(sum(x["kept"] for x in known), len(known)) if known else "-",
                    ", ".join(f"{pairs}: {n}" for pairs, n in sorted(ends.items())),
                ]
            )
    head = ["kind", "banks", "networks", "median CPU s", "CPU s in all", "said", "as it should be", "ended at pairs"]
    return head, rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("simulate", "networks", "smollm2", "page"))
    parser.add_argument("--studies", type=int, default=250)
    parser.add_argument("--seeds", type=int, nargs=2, default=(1000, 1007), metavar=("FIRST", "LAST"))
    parser.add_argument("--kinds", nargs="*", choices=LARGE, help="smollm2: only these studies")
    parser.add_argument("--out", type=Path, default=Path("runs/early"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    seeds = range(args.seeds[0], args.seeds[1] + 1)
    if args.what == "simulate":
        simulate(args.studies, args.out)
    elif args.what == "networks":
        networks(seeds, args.out)
    elif args.what == "smollm2":
        for seed in seeds:
            for kind in args.kinds or LARGE:
                compare("smollm2", kind, seed, partial(LARGE[kind], seed), args.out)
    else:
        print("\n".join(page(args.out)))


if __name__ == "__main__":
    main()
