"""Which token holds the pointer in a model nobody here trained? The last one, or the ends of the options' lines?

python benchmarks/untouched_tokens.py --model FILE.gguf                     # or a directory, or a hub id
python benchmarks/untouched_tokens.py --model tiny --dtype float32 --blocks 0 5     # a quick look at an embedded net

Transport couples the variables with token positions (the first stage of `localize`): the mass that each token gets,
before any calibration. Then, token by token, the best block for the pointer: its state taken whole from the source,
and a closed-form map inside it. Blocks and maps are chosen on calibration pairs; test pairs are used once.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import torch

import plot_ot
from pages import markdown, version
from plot_ot.files.writing import Json, write_atomically
from plot_ot.handles import Handle
from plot_ot.judging.controls import full_patch
from plot_ot.judging.intervals import Bootstrap
from plot_ot.localizing import Question, make_banks
from plot_ot.methods import COARSE, Method
from plot_ot.signatures import SignatureSpec, as_readout
from plot_ot.stages.calibrate import correct, pair_weights
from plot_ot.stages.closed_form import SCOUT
from plot_ot.stages.coupling import LocalizeTokens
from plot_ot.stages.problem import Problem
from plot_ot.subjects import Place, record
from token_stage import multiple_choice, questions

POINTER = "answer_pointer"
ENDS = {f"end{k + 1}": f"{{s{k}}}. {{c{k}}}" for k in range(4)}


def measured(model: str, options: Json, count: int, pairs: int, seed: int) -> Json:
    """Masses of all tokens, and what can be done at each."""
    h = multiple_choice(ENDS)
    inputs = h.rows(questions(count, seed))
    subject = plot_ot.load_subject(model, h, **options)
    question = Question(subject, h, "plot", as_readout("softmax"), SignatureSpec(normalise="unit"), model, seed)
    made = make_banks(question, inputs, pairs, question.admission(question.run))
    banks = made.splits
    tests = [banks.test[POINTER, kind] for kind in ("sensitivity", "invariance")]
    fit, calibration, moved, kept = record(subject, banks.fit, banks.calibration, *tests)
    problem = Problem(subject, fit, calibration, banks.fit.variables, question.readout, seed)
    state, _ = Method("tokens", "", (LocalizeTokens(COARSE, question.spec),)).run(problem)
    mass: dict[str, dict[str, float]] = {}
    for v in problem.variables:
        couplings = [c.coupling for c in state.candidates[v]]
        rows = torch.stack([torch.as_tensor(c.plan[c.variables.index(v)]) for c in couplings])
        share = (rows / rows.sum(dim=1, keepdim=True)).mean(dim=0).tolist()
        mass[v] = dict(zip(couplings[0].sites, share, strict=True))
    by_token: dict[str, list[Place]] = {}
    for place in subject.places:
        by_token.setdefault(place.token, []).append(place)
    ends = [by_token[token] for token in ENDS]
    mine = problem.only([POINTER])
    telling = moved.select(moved.bank.discriminating(POINTER))
    boot, weights = Bootstrap(telling.bank), pair_weights(calibration, POINTER, mine.score)

    def whole(options: Sequence[Sequence[Place]]) -> Handle:
        """Some states taken whole from the source: those that do best on calibration."""
        handles = [full_patch(POINTER, list(places), subject) for places in options]
        return max(handles, key=lambda h: float((correct(calibration, h, mine.readout).double() * weights).sum()))

    def tested(handle: Handle) -> Json:
        accuracy = boot.accuracy(correct(telling, handle, mine.readout))
        stays = float(correct(kept, handle, mine.readout).double().mean())
        reached = {"accuracy": accuracy.value, "low": accuracy.low, "high": accuracy.high, "kept": stays}
        return {"block": handle.places[0].split("@")[0], "size": handle.size, **reached}

    found: list[Json] = []
    for token, places in by_token.items():
        inside, _ = Method("scout", "", (SCOUT,)).run(mine, {POINTER: tuple(places)})
        ways = {"whole": tested(whole([[p] for p in places])), "closed form": tested(inside.handles[POINTER])}
        found.append({"token": token, "mass": {v: mass[v][token] for v in mass}, **ways})
        print(json.dumps(found[-1]), flush=True)
    found.append({"token": "all four ends", "mass": {}, "whole": tested(whole(list(zip(*ends, strict=True))))})
    return {"model": Path(model).name, "seed": seed, "version": version(), "notes": list(made.notes), "rows": found}


def table(found: Json) -> list[str]:
    """One row per token."""
    names = list(found["rows"][0]["mass"])
    cells = []
    for r in found["rows"]:
        ways = []
        for w in (r["whole"], r.get("closed form")):
            reached = w and f"{w['accuracy']:.3f} [{w['low']:.3f}, {w['high']:.3f}]"
            ways += [reached, w["block"], f"{w['kept']:.3f}"] if w else ["-"] * 3
        cells.append([r["token"], *(f"{r['mass'][v]:.2f}" if v in r["mass"] else "-" for v in names), *ways])
    head = ["token", *(f"mass of {v}" for v in names)]
    head += [x for way in ("whole state", "closed form") for x in (way, "at", "stays right")]
    return markdown(head, cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--questions", type=int, default=320)
    parser.add_argument("--pairs", type=int, default=80, help="pairs per bank")
    parser.add_argument("--blocks", type=int, nargs=2, default=(11, 25), help="the first and the last block")
    parser.add_argument("--out", type=Path, default=Path("runs/untouched_tokens"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    path = args.out / f"{Path(args.model).name}-{args.seed}.json"
    if not path.exists():
        options = {"dtype": args.dtype, "layers": range(args.blocks[0], args.blocks[1] + 1, 2)}
        found = measured(args.model, options, args.questions, args.pairs, args.seed)
        args.out.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(found, indent=1).encode())
    print("\n".join(table(json.loads(path.read_text(encoding="utf-8")))))


if __name__ == "__main__":
    main()
