"""Our verdicts beside the errors of causal-abstraction-eval: what is behind docs/outside-judge.md.

python benchmarks/outside_judge.py planted illusions heq addition --seeds 1000 1001 --page docs/outside-judge.md

Needs the extra `judge`. Contrasts that must be invalid: `random` rows are subspaces of the same size at the same place,
`exchanged` ones are the handle of another variable.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import torch

import plot_ot
from pages import markdown, version, write_tables
from plot_ot.abstract.causal_model import CausalModel
from plot_ot.exchange import outside_errors
from plot_ot.exchange.outside_judge import METRICS
from plot_ot.handles import Handle
from plot_ot.judging.controls import random_subspaces
from plot_ot.methods import Method, random_progressive
from plot_ot.studies.study import Study
from plot_ot.studies.task import SeedFailed
from plot_ot.subjects import Subject
from plot_ot.tasks import TASKS

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from truth.campaigns import Give
from truth.illusions import silent_way
from truth.kinds import planted

VALID = 0.2
"""The package gives errors and no verdicts: up to this one is called valid, the other side of our bound of 80 %."""
METHODS = {"heq": ("plot", "plot-newton", "das"), "addition": ("plot-pca", "plot-newton", "das")}
Judge = Callable[[Mapping[str, Handle]], dict[str, str]]


@dataclass(frozen=True)
class Network:
    """A network, handles of it by name, and what we say of handles."""

    subject: Subject
    causal: CausalModel
    inputs: torch.Tensor
    readout: object
    handles: Mapping[str, Mapping[str, Handle]]
    ours: Judge


def studied(task: str, seed: int, cache: Path) -> Network:
    """The network of one of the paper's studies, with the handles that methods find."""
    configured = TASKS[task](**{"sampler": "balanced"} if task == "heq" else {})  # of uniform pairs few can tell
    prepared = configured.prepare(seed, cache)
    study = Study(prepared)

    def at_random(draw: int) -> Method:
        return random_progressive(draw, prepared.subject.places)

    def ours(handles: Mapping[str, Handle]) -> dict[str, str]:
        unit, _ = study.run(Method("given", "", (Give(handles),)), at_random)
        return {v["variable"]: str(v["status"]) for v in unit["verdicts"]}

    found = {name: configured.methods()[name].run(study.problem)[0].handles for name in METHODS[task]}
    bank = prepared.splits.calibration
    inputs = torch.cat([bank.base, bank.source])
    named = {f"{task}, {name}": handles for name, handles in found.items()}
    return Network(prepared.subject, bank.causal, inputs, prepared.readout, named, ours)


def built(kind: str, seed: int) -> Network:
    """A network whose variables were written in, with handles by construction; in `illusions` one reads in vain."""
    known = planted(seed) if kind == "planted" else silent_way(seed)

    def ours(handles: Mapping[str, Handle]) -> dict[str, str]:
        result = plot_ot.localize(
            known.subject,
            known.causal,
            known.rows,
            method=Method("given", "", (Give(handles),)),
            size=known.size,
            seed=seed,
            progress=False,
        )
        return {v: str(verdict.status) for v, verdict in result.verdicts.items()}

    return Network(known.subject, known.causal, known.rows, "softmax", {kind: known.handles}, ours)


def exchanged(handles: Mapping[str, Handle]) -> dict[str, Handle]:
    """Every variable with the handle of the next."""
    names = list(handles)
    return {v: replace(handles[other], variable=v) for v, other in zip(names, [*names[1:], names[0]], strict=True)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="+", choices=("planted", "illusions", *METHODS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[1000])
    parser.add_argument("--samples", type=int, default=96)
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache" / "plot-ot")
    parser.add_argument("--page", type=Path, help="write the tables below a page's own words")
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    rows: list[list[str]] = []
    failed: list[str] = []
    for kind, seed in product(args.kinds, args.seeds):
        try:
            net = studied(kind, seed, args.cache) if kind in METHODS else built(kind, seed)
        except SeedFailed as e:
            failed.append(f"{kind}, seed {seed}: {e}")
            continue
        generator = torch.Generator().manual_seed(seed)
        inputs = net.inputs[torch.randperm(len(net.inputs), generator=generator)[:200]]
        first = next(iter(net.handles.values()))
        drawn = {v: random_subspaces(h, 1, generator)[0] for v, h in first.items()}
        contrasts = {f"{kind}, random": drawn, f"{kind}, exchanged": exchanged(first)}
        for name, handles in {**net.handles, **contrasts}.items():
            said = net.ours(handles)
            found = outside_errors(net.subject, net.causal, handles, inputs, readout=net.readout, samples=args.samples)
            for v, errors in found.items():
                valid = "valid" if errors["CAE_down_nf"] <= VALID and errors["IIA"] <= VALID else "invalid"
                cells = [f"{errors[m]:.2f}" for m in METRICS]
                rows.append([name, str(seed), v, said[v], *cells, valid])
                print(rows[-1], flush=True)
    lines = [*counts(rows), "", *markdown(["handles", "seed", "variable", "ours", *METRICS, "theirs"], rows), ""]
    command = f"python benchmarks/outside_judge.py {' '.join(args.kinds)} --seeds {' '.join(map(str, args.seeds))}"
    lines += [f"Made by `{command}` at {version()}. Not trained to the end: {'; '.join(failed) or 'none'}.", ""]
    if args.page:
        write_tables(args.page, lines)
    print("\n".join(lines))


def counts(rows: Sequence[Sequence[str]]) -> list[str]:
    """How often the two judges agree: by handles, what we say, how many, and how many of them are valid to theirs."""
    said = Counter((row[0], row[3]) for row in rows)
    valid = Counter((row[0], row[3]) for row in rows if row[-1] == "valid")
    table = [[*key, str(count), str(valid[key])] for key, count in said.items()]
    return markdown(["handles", "ours", "handles of variables", "valid to theirs"], table)


if __name__ == "__main__":
    main()
