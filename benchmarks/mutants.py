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
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from pages import markdown
from plot_ot.files.writing import write_atomically

ROOT = Path(__file__).resolve().parents[1]
SCRATCH = ROOT / "build" / "mutants"
RESULTS, REASONS = (ROOT / "docs" / "results" / name for name in ("mutants.json", "mutants_reasons.json"))
TESTS = {
    "edits/frames.py": ["test_frames.py", "test_edits.py"],
    "abstract/banks.py": ["test_banks.py"],
    "transport.py": ["test_transport.py"],
    "stages/calibrate.py": ["test_calibrate.py"],
    "stages/closed_form.py": ["test_closed_form_cells.py"],
    "signatures/effects.py": ["test_signatures.py", "test_approximate.py"],
}
JUDGING = sorted(p.stem for p in (ROOT / "src" / "plot_ot" / "judging").glob("[!_]*.py"))
COMMAND = {"test_bench.py"}
"""Of `plot-ot bench`, not of judging's bench."""
FILES = sorted({p.name for name in JUDGING for p in (ROOT / "tests").glob(f"test_{name}*.py")} - COMMAND)
TESTS |= {f"judging/{name}.py": FILES for name in JUDGING}
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
    call = [sys.executable, str(ROOT / "benchmarks" / "mutants_of_a_module.py"), module, str(sample), str(seed)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run(call, cwd=SCRATCH, env=env, check=True)  # noqa: S603
    return json.loads((SCRATCH / "found.json").read_text(encoding="utf-8"))


def commit() -> str:
    """What was tried: the commit that the tree is at."""
    call = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(call, cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()  # noqa: S603


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
        tests = "those of judging" if TESTS[module] is FILES else ", ".join(f"`{t}`" for t in TESTS[module])
        rows.append(
            [
                f"`{module}`",
                str(r["mutants"]),
                str(r["tried"]),
                str(r["killed"]),
                share,
                str(len(r["survivors"])),
                str(r.get("seed", "")),
                r.get("commit", ""),
                tests,
            ]
        )
    killed, tried = (sum(r[k] for r in results.values()) for k in ("killed", "tried"))
    lines = [
        "# Mutants",
        "",
        "Do the tests notice when the code is wrong? `make mutants` lets [mutmut](https://mutmut.readthedocs.io) "
        "change one expression at a time (a comparison, a sign, a constant, an argument), and the tests of that "
        "module must fail.",
        "",
        "Not changed are texts (what a message says is for people to judge), the arguments of errors, docstrings, "
        "annotations, `zip(strict=)` and devices (the test machine has only one). mutmut does not reach constants of "
        "modules and classes, properties, and functions under another decorator (here `measure_signatures` and "
        "`_exact`, under `torch.no_grad`). Where fewer mutants were tried than there are, they are a seeded sample, "
        "and the share has Wilson's 95 % interval. Every survivor is listed with the reason why it is left.",
        "",
        f"Modules of `judging/` are tried with {', '.join(f'`{name}`' for name in FILES)}. Rows without a seed and a "
        "commit are of seed 1000 and of earlier commits. Profile, notes and usage were tried with their own test file "
        "alone, and the sample of usage was known before its last tests were written.",
        "",
        *markdown(["module", "mutants", "tried", "killed", "share", "survivors", "seed", "commit", "tests"], rows),
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
    given = parser.parse_args()
    results = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    for module in [] if given.page else given.only:
        results[module] = campaign(module, given.sample, given.seed) | {"seed": given.seed, "commit": commit()}
        write_atomically(RESULTS, (json.dumps(results, indent=1, ensure_ascii=False) + "\n").encode())
    reasons = json.loads(REASONS.read_text(encoding="utf-8")) if REASONS.exists() else {}
    kept = {module: results[module] for module in TESTS if results.get(module, {}).get("tried")}
    write_atomically(RESULTS.with_suffix(".md"), page(kept, reasons).encode())


if __name__ == "__main__":
    main()
