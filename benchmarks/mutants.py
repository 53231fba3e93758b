"""Do the tests notice? mutmut changes one expression at a time, and the tests of its module must fail.

python benchmarks/mutants.py                        # a seeded sample of every module (`make mutants`)
python benchmarks/mutants.py --only edits/frames.py --sample 0      # all mutants of one module
python benchmarks/mutants.py --page                 # only write the page again

Results are kept in docs/results/mutants.json, and the page is written from them and from mutants_reasons.json, which
says of survivors why they are left. A module is tried by the fast test files that are about it, a part of `make test`.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from pages import markdown
from plot_ot.files.run_directory import write_atomically

ROOT = Path(__file__).resolve().parents[1]
SCRATCH = ROOT / "build" / "mutants"
RESULTS, REASONS = (ROOT / "docs" / "results" / name for name in ("mutants.json", "mutants_reasons.json"))
TESTS = {
    "edits/frames.py": ["test_frames.py", "test_edits.py"],
    "abstract/banks.py": ["test_banks.py"],
    "transport.py": ["test_transport.py"],
    "stages/calibrate.py": ["test_calibrate.py"],
    "stages/closed_form.py": ["test_closed_form_cells.py"],
    "signatures/effects.py": ["test_signatures.py"],
    "judging/verdict.py": ["test_verdict.py"],
    "judging/naturalness.py": ["test_evidence.py"],
}
SURVIVED = {0, 5, 33}
"""What pytest says when all tests pass, and when no test runs the function at all."""

CONFIG = """
[tool.pytest.ini_options]
addopts = "-q --strict-markers -m 'not long'"
markers = ["long: campaigns"]

[tool.mutmut]
source_paths = ["src"]
only_mutate = ["src/plot_ot/{module}"]
do_not_mutate_patterns = ["raise PlotError", "unknown\\\\(", "# noqa: S101"]
pytest_add_cli_args = ["-p", "no:xdist", "-p", "no:cacheprovider"]
pytest_add_cli_args_test_selection = [{tests}]
use_git_change_detection = false
"""


def campaign(module: str, sample: int, seed: int) -> dict[str, Any]:
    """One module's mutants, in a copy of the tree and a process of their own."""
    shutil.rmtree(SCRATCH, ignore_errors=True)
    for part in ("src", "tests"):
        shutil.copytree(ROOT / part, SCRATCH / part, ignore=shutil.ignore_patterns("__pycache__"))
    tests = ", ".join(f'"tests/{name}"' for name in TESTS[module])
    (SCRATCH / "pyproject.toml").write_text(CONFIG.format(module=module, tests=tests), encoding="utf-8")
    call = [sys.executable, __file__, "--here", module, "--sample", str(sample), "--seed", str(seed)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run(call, cwd=SCRATCH, env=env, check=True)  # noqa: S603
    return json.loads((SCRATCH / "found.json").read_text(encoding="utf-8"))


def here(module: str, sample: int, seed: int) -> None:
    """The campaign itself, in the copy."""
    import pytest
    from mutmut import __main__ as mutmut
    from mutmut.mutation import mutators
    from mutmut.mutation.diff_apply import get_diff_for_mutant
    from mutmut.mutation.file_mutation import mutate_file_contents

    pytest.Item._nodeid = property(lambda item: item.nodeid)  # type: ignore[attr-defined]  # mutmut 3.8 with pytest 9
    wording = {"operator_string"}  # what a text says is for people to judge
    mutators.mutation_operators[:] = [o for o in mutators.mutation_operators if o[1].__name__ not in wording]
    path = Path("src/plot_ot") / module
    prefix = "plot_ot." + module.removesuffix(".py").replace("/", ".") + "."
    names = [prefix + n for n in mutate_file_contents(str(path), path.read_text(encoding="utf-8")).mutant_names]
    chosen = sorted(random.Random(seed).sample(names, min(sample or len(names), len(names))))
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


def change(name: str, diff: str) -> str:
    """A mutant by what it changes, which stays the same when other lines come and go."""
    function = name.rsplit("__mutmut_", 1)[0].removeprefix("x").strip("_ǁ").replace("ǁ", ".")
    lines = [line for line in diff.splitlines() if line[:1] in "+-" and line[:3] not in ("+++", "---")]
    return f"{function}: " + " ".join(f"{line[0]} {' '.join(line[1:].split())}" for line in lines)


def interval(killed: int, tried: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a share."""
    z, p = 1.96, killed / tried
    centre, half = p + z * z / (2 * tried), z * (p * (1 - p) / tried + z * z / (4 * tried * tried)) ** 0.5
    return (centre - half) / (1 + z * z / tried), (centre + half) / (1 + z * z / tried)


def page(results: dict[str, Any], reasons: dict[str, str]) -> str:
    """docs/results/mutants.md."""
    rows = []
    for module, r in results.items():
        low, high = interval(r["killed"], r["tried"]) if r["tried"] < r["mutants"] else (None, None)
        share = f"{r['killed'] / r['tried']:.0%}" + (f" [{low:.0%}, {high:.0%}]" if low is not None else "")
        tests = ", ".join(f"`{t}`" for t in TESTS[module])
        rows.append(
            [f"`{module}`", str(r["mutants"]), str(r["tried"]), str(r["killed"]), share, str(len(r["survivors"])), tests]
        )
    killed, tried = (sum(r[k] for r in results.values()) for k in ("killed", "tried"))
    lines = [
        "# Mutants",
        "",
        "Do the tests notice when the code is wrong? `make mutants` lets [mutmut](https://mutmut.readthedocs.io) change "
        "one expression at a time (a comparison, a sign, a constant, an argument), and the tests of that module must fail.",
        "",
        "Left out: texts (what a message says is for people to judge), refusals' arguments, docstrings and annotations. "
        "mutmut does not reach constants of modules and classes, properties, and functions under another decorator "
        "(here `signatures` and `_exact`, under `torch.no_grad`). Where fewer mutants were tried than there are, "
        "they are a seeded sample of all, with Wilson's 95 % interval; survivors among them are listed with a reason.",
        "",
        *markdown(["module", "mutants", "tried", "killed", "share", "survivors", "tests"], rows),
        "",
        f"Together {killed} of {tried} killed ({killed / tried:.1%}).",
        "",
        "## Survivors",
        "",
    ]
    for module, r in results.items():
        if r["survivors"]:
            lines += [f"### `{module}`", ""]
            cells = [[f"`{s.replace('|', '¦')}`", reasons.get(s, "**to be killed**")] for s in sorted(r["survivors"])]
            lines += [*markdown(["change", "why it is left"], cells), ""]
    return "\n".join(lines).rstrip() + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=TESTS, nargs="+", default=list(TESTS))
    parser.add_argument("--sample", type=int, default=60, help="mutants of each module; 0 for all")
    parser.add_argument("--seed", type=int, default=1000)
    parser.add_argument("--page", action="store_true", help="write the page from what is known, run nothing")
    parser.add_argument("--here", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.here:
        here(given.here, given.sample, given.seed)
        return
    results = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    for module in [] if given.page else given.only:
        results[module] = campaign(module, given.sample, given.seed)
        write_atomically(RESULTS, (json.dumps(results, indent=1, ensure_ascii=False) + "\n").encode())
    reasons = json.loads(REASONS.read_text(encoding="utf-8")) if REASONS.exists() else {}
    kept = {module: results[module] for module in TESTS if module in results}
    write_atomically(RESULTS.with_suffix(".md"), page(kept, reasons).encode())


if __name__ == "__main__":
    main()
