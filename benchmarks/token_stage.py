"""Token positions as the first stage (the paper's Figure 1): multiple choice with symbol, period and last tokens.

python benchmarks/token_stage.py                              # the six embedded nets
python benchmarks/token_stage.py --model smollm2 --adapter planted

Writes docs/results/tokens.md and tokens.json; every model has its section.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Mapping
from pathlib import Path

import torch

import plot_ot
from pages import markdown, write_tables
from plot_ot.models.tiny import TINY
from plot_ot.models.vocabulary import COLOURS
from plot_ot.result import Result

NOUNS = ("chair", "bear", "lobster", "brick", "spoon", "lemon", "kettle", "table", "lamp", "bottle")
TEMPLATE = "Question: A {noun} is {colour}. What color is a {noun}?\n" + "".join(
    f"{{s{k}}}. {{c{k}}}\n" for k in range(4)
)


SYMBOLS = {f"symbol{k}": f"{{s{k}}}" for k in range(4)} | {f"period{k}": f"{{s{k}}}." for k in range(4)}


def multiple_choice(tokens: Mapping[str, str] = SYMBOLS) -> plot_ot.Hypothesis:
    """AnswerPointer and AnswerToken, with named tokens: by default the options' symbols and periods."""
    h = plot_ot.Hypothesis(template=TEMPLATE + "Answer:", positions=dict(tokens), name="mcqa-tokens")

    @h.variable
    def answer_pointer(colour, c0, c1, c2, c3):  # type: ignore[no-untyped-def]
        return [c0, c1, c2, c3].index(colour)

    @h.variable
    def answer_token(answer_pointer, s0, s1, s2, s3):  # type: ignore[no-untyped-def]
        return [s0, s1, s2, s3][answer_pointer]

    @h.output
    def answer(answer_token):  # type: ignore[no-untyped-def]
        return answer_token

    return h


def questions(count: int, seed: int) -> list[dict[str, str]]:
    """Inputs with four options each."""
    r = random.Random(seed)
    made = []
    for _ in range(count):
        colours, symbols = r.sample(list(COLOURS), 4), r.sample("ABCDEFGHIJKLMNOPQRSTUVWXYZ", 4)
        options = {f"c{k}": c for k, c in enumerate(colours)} | {f"s{k}": s for k, s in enumerate(symbols)}
        made.append({"noun": r.choice(NOUNS), "colour": r.choice(colours), **options})
    return made


def section(name: str, result: Result) -> dict[str, object]:
    """Masses per token before any calibration, averaged over the (ε, β) grid, and where the zoom ends."""
    couplings = [c for c in result.unit["couplings"] if c["stage"] == 0]
    mass = {}
    for variable in result.handles:
        rows = torch.tensor([c["plan"][c["variables"].index(variable)] for c in couplings])
        share = (rows / rows.sum(dim=1, keepdim=True)).mean(dim=0).tolist()
        mass[variable] = dict(zip(couplings[0]["sites"], share, strict=True))
    return {
        "mass": mass,
        "zoom": {v: result.zoom(v) for v in result.handles},
        "verdicts": {v: verdict.sentence for v, verdict in result.verdicts.items()},
        "seconds": result.seconds,
    }


def page(found: dict[str, dict]) -> list[str]:
    """The page of all models."""
    tokens = list(next(iter(found.values()))["mass"]["answer_pointer"])
    lines = [
        "Made by `python benchmarks/token_stage.py`.",
        "",
        *markdown(
            ["model", "variable", *tokens],
            [[m, v, *(f"{s['mass'][v][t]:.2f}" for t in tokens)] for m, s in found.items() for v in s["mass"]],
        ),
        "",
        "The places that each zoom goes through, and the verdict on test pairs:",
        "",
    ]
    for model, s in found.items():
        lines.append(f"**{model}** ({s['seconds']:.0f} s)")
        lines.append("")
        lines += [f"- {' → '.join(s['zoom'][v])}: {said}" for v, said in s["verdicts"].items()]
        lines.append("")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", nargs="*", default=list(TINY))
    parser.add_argument("--adapter")
    parser.add_argument("--questions", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--results", type=Path, default=Path("docs/results"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    store = args.results / "tokens.json"
    found = json.loads(store.read_text()) if store.exists() else {}
    for name in args.model:
        model = plot_ot.load_subject(name, adapter=args.adapter)
        result = plot_ot.localize(model, multiple_choice(), questions(args.questions, args.seed), seed=args.seed)
        found[f"{name} {args.adapter}" if args.adapter else name] = section(name, result)
        print(name, result, sep="\n", flush=True)
        store.write_text(json.dumps(found, indent=1) + "\n")
        write_tables(args.results / "tokens.md", page(found))


if __name__ == "__main__":
    main()
