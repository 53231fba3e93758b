"""What results pages share: run the command a user would type, and turn its records into Markdown tables."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import fmean, pstdev

from plot_ot import __version__
from plot_ot.files.run_reading import Reading, read_run
from plot_ot.files.writing import Json
from plot_ot.report.tables import average_by_seed, banks_in, mean_sd, methods_in, stretch_of


def _described() -> str:
    described = subprocess.run(
        ["git", "describe", "--always", "--dirty"],  # noqa: S607
        capture_output=True,
        text=True,
        cwd=Path(__file__).parent,
        check=False,
    )
    return described.stdout.strip() or __version__


_AT_START = _described()


def version() -> str:
    """The commit of the code that runs: as the process began, whatever was committed while it ran."""
    return _AT_START


def run_study(task: str, options: Sequence[str], out: Path) -> Reading:
    """`plot-ot run TASK ...`; continues where it was interrupted."""
    subprocess.run([sys.executable, "-m", "plot_ot.cli", "run", task, *options, "--out", str(out)], check=True)  # noqa: S603
    return read_run(out)


TABLES = "<!-- tables -->"


def write_tables(page: Path, lines: Iterable[str]) -> None:
    """Write the page anew below its line `<!-- tables -->`; what stands above is written by hand, and stays."""
    before, mark, _ = page.read_text(encoding="utf-8").partition(TABLES) if page.exists() else ("", TABLES, "")
    if not mark:
        raise SystemExit(f"{page} has no line {TABLES}: put one above the tables that are to be written anew.")
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(before + "\n".join([TABLES, "", *lines]), encoding="utf-8")


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A Markdown table."""
    return ["| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *rows)]


def which_seeds(results: Json) -> str:
    """The seeds behind a table, and those that failed."""
    seeds = sorted({r["seed"] for r in results["records"]})
    failed = [f"seed {f['seed']}: {f['reason']}" for f in results["failures"]]
    return f"Seeds {', '.join(str(s) for s in seeds)}. Failed: {'; '.join(failed) or 'none'}."


def accuracy_rows(results: Json) -> list[str]:
    """One row per method: every bank, the average, the stretch of edited states, full patch and seconds."""
    banks = banks_in(results)
    rows = []
    for method in methods_in(results):
        cells = [
            mean_sd(
                [r["accuracy"] for r in results["records"] if (r["method"], r["variable"], r["bank"]) == (method, *b)]
            )
            for b in banks
        ]
        average = mean_sd(list(average_by_seed(results, method).values()), 4)
        patch = list(average_by_seed(results, method, "full_patch").values())
        sizes = [s["size"] for s in results["selection"] if s["method"] == method]
        seconds = [t["seconds"] for t in results["runtimes"] if t["method"] == method]
        rows.append(
            [
                f"`{method}`",
                *cells,
                f"**{average}**",
                stretch_of(results, method),
                f"{fmean(patch):.3f}" if patch else "-",
                f"{fmean(sizes):.1f}" if sizes else "-",
                mean_sd(seconds, 2),
            ]
        )
    head = ["method", *(f"{v} {b[:4]}." for v, b in banks), "average", "stretch", "full patch", "size", "seconds"]
    return markdown(head, rows)


def paired_rows(results: Json, opponent: str, methods: Sequence[str]) -> list[str]:
    """Differences to one method on the same seeds."""
    theirs = average_by_seed(results, opponent)
    rows = []
    for method in methods:
        mine = average_by_seed(results, method)
        gaps = [mine[s] - theirs[s] for s in theirs if s in mine]
        if gaps:
            better = f"{sum(g >= 0 for g in gaps)} of {len(gaps)}"
            rows.append([f"`{method}`", f"{fmean(gaps):+.4f}", f"{pstdev(gaps):.4f}", better])
    return markdown(["method", f"mean difference to `{opponent}` (same seeds)", "sd", "seeds at least as good"], rows)


def _counted(results: Json, part: str, what: Callable[[Json], str], title: str) -> list[str]:
    rows = []
    for method, variable in dict.fromkeys((v["method"], v["variable"]) for v in results[part]):
        said = Counter(what(v) for v in results[part] if (v["method"], v["variable"]) == (method, variable))
        rows.append([f"`{method}`", variable, ", ".join(f"{s} ({n})" for s, n in said.most_common())])
    return markdown(["method", "variable", title], rows)


def verdict_rows(results: Json) -> list[str]:
    """How many seeds got each verdict."""
    return _counted(results, "verdicts", lambda v: str(v["status"]), "verdicts (seeds)")


def verdict_groups(results: Json) -> list[str]:
    """Which methods got each verdict on each variable, on how many seeds; an output variable is said to be one once."""
    got: dict[tuple[str, str], Counter[str]] = {}
    for v in results["verdicts"]:
        got.setdefault((v["variable"], str(v["status"])), Counter())[v["method"]] += 1
    seeds = len({v["seed"] for v in results["verdicts"]})
    rows = []
    for (variable, status), methods in sorted(got.items(), key=lambda item: item[0][0]):
        named = ", ".join(f"`{m}`" + (f" ({n} of {seeds})" if seeds > 1 else "") for m, n in methods.items())
        rows.append([variable, status, "by nature, for all methods" if status == "output variable" else named])
    return markdown(["variable", "verdict", "methods"], rows)


def place_rows(results: Json) -> list[str]:
    """Where calibration put each handle."""
    return _counted(results, "selection", lambda s: "+".join(s["places"]), "places chosen (seeds)")


def copy_figures(run: Reading, prefix: str, page: Path, only: Sequence[str] = ()) -> list[str]:
    """The run's pictures (or `only` some) beside the page, as Markdown images."""
    target = page.parent / "figures"
    target.mkdir(parents=True, exist_ok=True)
    names = []
    for picture in sorted((run.path / "figures").glob("*.png")):
        if only and picture.stem not in only:
            continue
        shutil.copyfile(picture, target / f"{prefix}-{picture.name}")
        names.append(picture.stem)
    return [f"![{name}](figures/{prefix}-{name}.png)" for name in names]
