"""One module's mutants, tried in the copy of the tree that benchmarks/mutants.py made and called this in.

mutmut imports the package anew from the mutated copy, so nothing here may have imported it before.
"""

from __future__ import annotations

import json
import random
import re
import sys
from pathlib import Path

import pytest
from mutmut import __main__ as mutmut
from mutmut.mutation import mutators
from mutmut.mutation.diff_apply import get_diff_for_mutant
from mutmut.mutation.file_mutation import MutatedFile, mutate_file_contents

SURVIVED = {0, 5, 33}
"""What pytest says when all tests pass, and when no test runs the function at all."""


def main(module: str, sample: int, seed: int) -> None:
    pytest.Item._nodeid = property(lambda item: item.nodeid)  # type: ignore[attr-defined]  # mutmut 3.8 with pytest 9
    wording = {"operator_string"}  # what a text says is for people to judge
    mutators.mutation_operators[:] = [o for o in mutators.mutation_operators if o[1].__name__ not in wording]
    path = Path("src/plot_ot") / module
    prefix = "plot_ot." + module.removesuffix(".py").replace("/", ".") + "."
    mutated = mutate_file_contents(str(path), path.read_text(encoding="utf-8"))
    names = [prefix + n for n in mutated.mutant_names if not idle(n, mutated)]
    chosen = sorted(random.Random(seed).sample(names, min(sample or len(names), len(names))))
    codes = {}
    if chosen:  # without names mutmut would run whatever there is
        mutmut._run(chosen, 1)
        codes = json.loads((Path("mutants") / f"{path}.meta").read_text(encoding="utf-8"))["exit_code_by_key"]
    survivors = [n for n in chosen if codes[n] in SURVIVED]
    if unknown := [n for n in chosen if codes[n] is None]:
        raise SystemExit(f"mutmut left {len(unknown)} mutants untried: {unknown[:3]}")
    found = {
        "mutants": len(names),
        "tried": len(chosen),
        "killed": len(chosen) - len(survivors),
        "survivors": [change(n.removeprefix(prefix), get_diff_for_mutant(n, path=path)) for n in survivors],
    }
    Path("found.json").write_text(json.dumps(found), encoding="utf-8")


def idle(name: str, mutated: MutatedFile) -> bool:
    """Whether a mutant changes only what no run here can notice: `zip`'s own check, or which device is meant."""
    function = name.rsplit("__mutmut_", 1)[0]
    lines, spans = mutated.code.splitlines(), mutated.line_span_by_function_name

    def bare(which: str) -> str:
        text = " ".join(" ".join(lines[spans[which].start - 1 : spans[which].end]).split())
        text = re.sub(r"__mutmut_(orig|\d+)", "", text)
        text = re.sub(r"(strict|device)=[\w.]+|\.to\((None|\w+\.device)\)", "", text)
        return re.sub(r"[,\s]+", " ", text).replace(" )", ")").replace("( ", "(")

    return bare(name) == bare(f"{function}__mutmut_orig")


def change(name: str, diff: str) -> str:
    """A mutant by what it changes, which stays the same when other lines come and go."""
    function = name.rsplit("__mutmut_", 1)[0].removeprefix("x").strip("_ǁ").replace("ǁ", ".")
    lines = [line for line in diff.splitlines() if line[:1] in "+-" and line[:3] not in ("+++", "---")]
    return f"{function}: " + " ".join(f"{line[0]} {' '.join(line[1:].split())}" for line in lines)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
