"""Variables whose token moves, found by roles, at fixed positions and where they are: behind docs/results/roles.md.

python benchmarks/roles_campaign.py --seeds 1000 1004
python benchmarks/roles_campaign.py --page docs/results/roles.md    # only the page, of all that is done

Every network is one small file in the out folder; what is there is not run again.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import torch

from plot_ot import (
    ClosedForm,
    DecoderSubject,
    Handle,
    Problem,
    SelectTokens,
    State,
    as_readout,
    draw_pairs,
    record,
    with_roles,
)
from plot_ot.files.writing import Json, write_atomically
from plot_ot.methods import COARSE
from plot_ot.signatures import SignatureSpec
from plot_ot.stages.calibrate import correct
from plot_ot.stages.coupling import LocalizeTokens
from plot_ot.subjects import BankRecording

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from pages import version, write_tables
from truth.moving import KINDS, Moving, causal, moving
from verdict_campaign import share

PAIRS = 80
READOUT = as_readout("logits")
TOKENS = LocalizeTokens(COARSE, SignatureSpec(normalise="unit", centre=True))
WAYS = {"roles": "learned roles", "fixed": "fixed positions", "told": "the position is told"}
VARIABLES = ("who", "hue")
WORKS = 0.9


def searched(made: Moving, subject: DecoderSubject, seed: int, variables: tuple[str, ...] = VARIABLES) -> Json:
    """Tokens by one coupling, a closed form in the best two, and how the handles test."""
    model, generator = causal(), torch.Generator().manual_seed(seed)
    pools = made.rows.chunk(3)
    fit, calibration, test = record(subject, *(draw_pairs(model, p, "balanced", PAIRS, generator) for p in pools))
    problem = Problem(subject, fit, calibration, variables, READOUT, seed)
    state = State.start(problem)
    stages = (TOKENS, SelectTokens(2), ClosedForm()) if len(subject.places) > 2 else (ClosedForm(),)
    for stage in stages:
        state = stage(problem, state)
    return {v: tested(made, subject, v, state.handles[v], test) for v in variables}


def tested(made: Moving, subject: DecoderSubject, variable: str, handle: Handle, test: BankRecording) -> Json:
    """Where a handle is, whether its variable is there in every prompt, and how it tests."""
    right, changed = correct(test, handle, READOUT), test.bank.changed[variable]
    [edit] = handle.edits
    position = edit.place.name.partition("@")[2]
    true = made.true_position(variable)(made.rows)
    at = subject.positions[position](made.rows) if position else torch.full_like(true, -1)
    return {
        "tokens": len(subject.places),
        "place": edit.place.name,
        "is_there": bool(torch.equal(torch.as_tensor(at).expand(len(true)), true)),
        "sensitivity": float(right[changed].double().mean()),
        "invariance": float(right[~changed].double().mean()),
    }


def unit(kind: str, seed: int) -> Json:
    """A planted network, looked at by roles, at every fixed position and where the variables are."""
    cpu, made = time.process_time(), moving(kind, seed)
    subject = made.subject()
    roles = with_roles(subject, made.rows)
    fixed = subject.looking_at({n: p for n, p in roles.positions.items() if roles.rules[n]["kind"] in ("end", "start")})
    found = {"roles": searched(made, roles, seed), "fixed": searched(made, fixed, seed), "told": {}}
    for v in VARIABLES:
        found["told"] |= searched(made, subject.looking_at({v: made.true_position(v)}), seed, (v,))
    result = {v: {way: found[way][v] for way in WAYS} for v in VARIABLES}
    spent = time.process_time() - cpu
    return {"kind": kind, "seed": seed, "version": version(), "variables": result, "cpu": spent}


def works(found: Json) -> bool:
    """Right on 90 % of the test pairs of both kinds."""
    return min(found["sensitivity"], found["invariance"]) >= WORKS


def run(kind: str, seed: int, out: Path) -> None:
    """A seed's network of a kind, unless it is there already."""
    path = out / kind / f"{seed}.json"
    if path.exists():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    found = unit(kind, seed)
    write_atomically(path, json.dumps(found, indent=1).encode())
    for variable, ways in found["variables"].items():
        said = [f"{w} {f['place']} {f['sensitivity']:.2f}/{f['invariance']:.2f}" for w, f in ways.items()]
        print(f"{kind} {seed} {variable}: {'; '.join(said)} ({found['cpu']:.1f} CPU s)", flush=True)


def page(out: Path) -> list[str]:
    """The results page, of every network in the out folder."""
    lines = [
        "Made by `python benchmarks/roles_campaign.py`.",
        "",
        f"| variable | {' | '.join(f'{w}: works' for w in WAYS.values())} | the role is its token | sensitivities |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    every = [json.loads(p.read_text()) for p in sorted(out.glob("*/*.json"))]
    for kind in KINDS:
        units = [u for u in every if u["kind"] == kind]
        for variable in VARIABLES:
            found = {w: [u["variables"][variable][w] for u in units] for w in WAYS}
            n = len(units)
            cells = [share(sum(map(works, found[w])), n) for w in WAYS]
            there = share(sum(f["is_there"] for f in found["roles"]), n)
            means = " / ".join(f"{sum(f['sensitivity'] for f in found[w]) / n:.3f}" for w in WAYS)
            what = {"who": f"the name ({kind})", "hue": f"the colour ({kind})"}[variable]
            lines.append(f"| {what} | {' | '.join(cells)} | {there} | {means} |")
    seeds, versions = [u["seed"] for u in every], ", ".join(sorted({u["version"] for u in every}))
    cpu = sorted(u["cpu"] for u in every)[len(every) // 2]
    lines += ["", f"- Seeds {min(seeds)} to {max(seeds)}, version {versions}; median {cpu:.1f} CPU seconds a network."]
    return [*lines, ""]


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", nargs=2, type=int)
    parser.add_argument("--out", type=Path, default=Path("runs/roles_campaign"))
    parser.add_argument("--page", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.seeds:
        for seed in range(args.seeds[0], args.seeds[1] + 1):
            for kind in KINDS:
                run(kind, seed, args.out)
    if args.page:
        write_tables(args.page, page(args.out))


if __name__ == "__main__":
    main()
