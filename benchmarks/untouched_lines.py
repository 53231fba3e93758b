"""Do the ends of the options' lines hold the pointer together, in a model nobody here trained?

python benchmarks/untouched_lines.py --model FILE.gguf --seed 5                       # or a directory, or a hub id
python benchmarks/untouched_lines.py --model FILE.gguf --seed 5 --at last --blocks 19 21 23
python benchmarks/untouched_lines.py --model FILE.gguf --seed 5 --fresh 7             # the kept handle on new questions
python benchmarks/untouched_lines.py --model plain-1000 --dtype float32 --blocks 0 1  # a quick look at an embedded net

The last token of every option (`A. red`) and the line break after it are two families of four tokens. In every block
each family is taken whole from the source, then both together; where that does best, one closed form of the same kind
at each token is tried as one handle. All of this is chosen on calibration pairs. Test pairs, controls and the verdict
are those of `localize`. The result is saved as a run directory: `plot-ot show` and `plot-ot report` read it.

`--fresh SEED` tests the handle that was found, and its tokens taken whole, on questions of another seed: nothing is
chosen there, and questions that the model gets wrong count as well.

`--at last` asks the same questions of the last token alone, by the default search. Every question has random letters,
so that the letter does not follow from the pointer: a handle that writes the letter itself cannot be right.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch

import plot_ot
from pages import markdown, version
from plot_ot.abstract.splitting import balanced_bank
from plot_ot.handles import Handle
from plot_ot.judging.controls import controls, full_patch
from plot_ot.judging.intervals import Bootstrap
from plot_ot.result import Result
from plot_ot.signatures import as_readout
from plot_ot.stages import Together
from plot_ot.stages.calibrate import correct
from plot_ot.subjects import record
from token_stage import TEMPLATE, questions
from untouched_tokens import ENDS, POINTER

READOUT = as_readout("logits")
BREAKS = {name.replace("end", "break"): f"{text}\n" for name, text in ENDS.items()}


def hypothesis(lines: bool = True) -> plot_ot.Hypothesis:
    """Which option is right, with the tokens that may hold it: the lines' ends, or the last one."""
    positions = ENDS | BREAKS if lines else None
    h = plot_ot.Hypothesis(template=TEMPLATE + "Answer:", positions=positions, name="mcqa-lines")

    @h.variable
    def answer_pointer(colour, c0, c1, c2, c3):  # type: ignore[no-untyped-def]
        return [c0, c1, c2, c3].index(colour)

    @h.output
    def answer(answer_pointer, s0, s1, s2, s3):  # type: ignore[no-untyped-def]
        return [s0, s1, s2, s3][answer_pointer]

    return h


def found(args: argparse.Namespace) -> Result:
    """What `localize` says when tokens are tried together, or of the last token."""
    lines = args.at == "lines"
    h, rows = hypothesis(lines), questions(args.questions, args.seed)
    h.rows(rows)
    subject = plot_ot.load_subject(args.model, h, dtype=args.dtype, layers=args.blocks)
    together = plot_ot.Method("plot-together", "tokens that are named alike, swapped together", (Together(),))
    options = {"method": together} if lines else {}
    return plot_ot.localize(
        subject, h, rows, seed=args.seed, size=args.pairs, filter="candidates", progress=False, **options
    )


def tested_anew(args: argparse.Namespace, handle: Handle) -> list[str]:
    """The handle, its tokens taken whole, and copying the source, on questions that no choice has seen."""
    h = hypothesis(args.at == "lines")
    inputs = h.rows(questions(args.questions, args.fresh))
    subject = plot_ot.load_subject(args.model, h, dtype=args.dtype, layers=args.blocks)
    bank = balanced_bank(h.causal, inputs, "fresh", args.pairs, torch.Generator().manual_seed(args.fresh))
    [recording] = record(subject, bank)
    places = [e.place for e in handle.edits]
    ways = {
        "handle": correct(recording, handle, READOUT),
        "all these tokens whole": correct(recording, full_patch(POINTER, places, subject), READOUT),
        "copying the source": controls(recording, POINTER, READOUT)["copy-source"],
    }
    parts = {"discriminating": bank.discriminating(POINTER), "keep it": ~bank.changed[POINTER]}
    rows = []
    for name, right in ways.items():
        cells = [Bootstrap(bank.select(some)).accuracy(right[some]) for some in parts.values()]
        rows.append([name, *(f"{a.value:.3f} [{a.low:.3f}, {a.high:.3f}]" for a in cells)])
    counts = {name: int(some.sum()) for name, some in parts.items()}
    return [f"Seed {args.fresh}: {counts}", *markdown([f"{handle.places[0]} ...", *parts], rows)]


def table(result: Result) -> list[str]:
    """What every family does in every block when it is taken whole, on calibration pairs."""
    reached: dict[str, dict[str, float]] = {}
    for group, score in result.handles[POINTER].chosen["by_group"].items():
        names = group.split(" and ")
        kinds = sorted({n.partition("@")[2].rstrip("1234") for n in names}, reverse=True)
        reached.setdefault(names[0].partition("@")[0], {})[" and ".join(kinds)] = score
    columns = ["end", "break", "end and break"]
    rows = [[block, *(f"{of[c]:.3f}" if c in of else "-" for c in columns)] for block, of in reached.items()]
    return markdown(["block", "four ends", "four line breaks", "both"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--at", choices=("lines", "last"), default="lines", help="tokens to look at")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--questions", type=int, default=400)
    parser.add_argument("--pairs", type=int, default=160, help="pairs per bank")
    parser.add_argument("--blocks", type=int, nargs="+", default=(12, 14, 16))
    parser.add_argument("--fresh", type=int, help="test the handle that is there on questions of this seed")
    parser.add_argument("--out", type=Path, default=Path("runs/untouched_lines"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    path = args.out / f"{Path(args.model).stem}-{args.at}-{args.seed}"
    if not path.exists():
        begun = time.process_time()
        result = found(args)
        args.out.mkdir(parents=True, exist_ok=True)
        result.save(path)
        print(f"{time.process_time() - begun:.0f} CPU seconds at {version()}")
    result = plot_ot.Result.load(path)
    if args.fresh is not None:
        print("\n".join([*tested_anew(args, result.handles[POINTER]), f"Made at {version()}."]))
        return
    print("\n".join([str(result), result.handles[POINTER].describe(), *(table(result) if args.at == "lines" else ())]))


if __name__ == "__main__":
    main()
