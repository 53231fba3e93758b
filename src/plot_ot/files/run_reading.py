"""A run directory as a reader finds it: everything that can be read of it, and what is wrong with the rest.

A run may be going on, interrupted, or damaged. Entries that lack what every such entry has are left out and counted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from plot_ot.errors import PlotError
from plot_ot.files.run_directory import Json, RunDirectory, read_json

NUMBER = (int, float)
KEY = {"seed": int, "method": str}
SHAPES: dict[str, dict[str, Any]] = {
    "records": {**KEY, "variable": str, "bank": str, "accuracy": NUMBER},
    "runtimes": {**KEY, "seconds": NUMBER, "parts": dict},
    "selection": {**KEY, "variable": str, "size": NUMBER, "places": list, "chosen": dict},
    "verdicts": {**KEY, "variable": str, "status": str, "sentence": str, "evidence": dict},
    "cross": {**KEY, "handle": str, "labels": str, "accuracy": NUMBER},
    "sweeps": {**KEY, "parameter": str, "value": NUMBER, "accuracy": NUMBER},
    "failures": {"seed": int, "reason": str},
    "notes": {},
    "profile": {
        **KEY,
        "variable": str,
        "place": str,
        "token": str,
        "layer": int,
        **dict.fromkeys(("score", "low", "high"), NUMBER),
    },
    "surfaces": {**KEY, "variable": str, "sizes": list, "strengths": list, "scores": list},
    "transfer": {**KEY, "variable": str, "bank": str, "accuracy": NUMBER},
    "examples": {**KEY, "variable": str, "base_prompt": str, "source_prompt": str, "right": bool},
}
"""What every entry of a list has at least."""

NEEDED = ("records", "runtimes", "selection", "verdicts")
"""Lists that every run has; the others depend on the task and on the version that wrote them."""

COUPLING = {**KEY, "variables": list, "sites": list, "plan": list}

UNEXPECTED = (KeyError, TypeError, ValueError, AttributeError, IndexError, ZeroDivisionError, OverflowError)
"""What reading files of an unexpected shape can lead to."""


@dataclass
class Reading:
    """What could be read of one run."""

    path: Path
    manifest: Json
    results: Json
    couplings: list[Json]
    problems: list[str] = field(default_factory=list)
    units: int = 0
    """Finished units of work."""
    compiled: bool = True
    """Whether results.json holds all finished units; otherwise they were gathered from the units themselves."""

    @property
    def config(self) -> Json:
        """What was asked for."""
        found = self.manifest.get("config")
        return found if isinstance(found, dict) else {}

    @property
    def name(self) -> str:
        """What the run is called: its directory."""
        return self.path.resolve().name

    @property
    def directory(self) -> RunDirectory:
        """Where its handles are."""
        return RunDirectory(self.path, self.manifest)

    def rows(self, name: str, **fields: object) -> list[Json]:
        """The entries of a list with the given values."""
        return [r for r in self.results[name] if all(r.get(k) == v for k, v in fields.items())]

    def distinct(self, key: str, *lists: str) -> list[Any]:
        """The values of a key, in order of appearance."""
        return list(dict.fromkeys(r[key] for name in lists for r in self.results[name] if r.get(key) is not None))


def read_run(path: Path) -> Reading:
    """Read what there is. A directory without a manifest, results and units is not a run."""
    path = Path(path)
    if not path.is_dir():
        raise PlotError(f"There is no run directory at {path}.")
    units = sorted(path.glob("units/seed-*/*.json"))
    if not units and not any((path / name).exists() for name in ("manifest.json", "results.json")):
        raise PlotError(f"{path} is not a plot-ot run directory: it has no manifest.json, results.json or units.")
    problems: list[str] = []
    manifest = _read(path / "manifest.json", dict, problems, "what was run, and with which versions, is not known")
    compiled = path / "results.json"
    found: Json
    couplings: list[Json]
    fresh = compiled.exists() and all(u.stat().st_mtime <= compiled.stat().st_mtime for u in units)
    if not compiled.exists() and not units:
        found, couplings = {name: [] for name in NEEDED}, []
        problems.append("No unit of work is finished yet.")
    elif fresh or not units:
        found = _read(compiled, dict, problems, "no number can be shown")
        couplings = _read(path / "couplings.json", list, problems, "couplings are not shown")
        fresh = bool(found)
    if not fresh and units:
        found, couplings = _gather(units, manifest, problems)
    results = {"task": found.get("task")} | {name: _sound(name, found.get(name), problems) for name in SHAPES}
    whole = [c for c in couplings if _has(c, COUPLING) and _is_plan(c)]
    if len(whole) < len(couplings):
        problems.append(f"{len(couplings) - len(whole)} of {len(couplings)} couplings are damaged and left out.")
    return Reading(path, manifest, results, whole, problems, len(units), fresh)


def _read(path: Path, kind: type, problems: list[str], loss: str) -> Any:
    """A file's content, or an empty one and a word about what that means."""
    try:
        value = read_json(path)
    except PlotError as e:
        wrong = "is missing" if not path.exists() else f"cannot be read ({str(e).partition('(')[2].partition(')')[0]})"
        problems.append(f"{path.name} {wrong}: {loss}.")
        return kind()
    if not isinstance(value, kind):
        problems.append(f"{path.name} is damaged (not a {kind.__name__}): {loss}.")
        return kind()
    return value


def _gather(units: list[Path], manifest: Json, problems: list[str]) -> tuple[Json, list[Json]]:
    """The lists of all finished units, methods in the order they were asked for."""
    config = manifest.get("config")
    asked = config.get("methods") if isinstance(config, dict) else None
    rank = {str(name): k for k, name in enumerate(asked if isinstance(asked, list) else [])}
    found: Json = {"task": config.get("task") if isinstance(config, dict) else None}
    couplings: list[Json] = []

    def order(path: Path) -> tuple[int, int, str]:
        seed = path.parent.name.removeprefix("seed-")
        return int(seed) if seed.isdigit() else 0, rank.get(path.stem, -1), path.stem

    for path in sorted(units, key=order):
        unit = _read(path, dict, problems, "this unit is left out")
        for name in SHAPES:
            rows = unit.get(name)
            found.setdefault(name, []).extend(rows if isinstance(rows, list) else [])
        couplings += unit["couplings"] if isinstance(unit.get("couplings"), list) else []
    return found, couplings


def _sound(name: str, rows: object, problems: list[str]) -> list[Json]:
    """The entries that have what such entries have."""
    if rows is None:
        if name in NEEDED:
            problems.append(f"The results have no list '{name}'.")
        return []
    if not isinstance(rows, list):
        problems.append(f"'{name}' in the results is damaged (not a list).")
        return []
    whole = [r for r in rows if _has(r, SHAPES[name])]
    if len(whole) < len(rows):
        problems.append(f"{len(rows) - len(whole)} of {len(rows)} entries of '{name}' are damaged and left out.")
    return whole


def _has(row: object, shape: Mapping[str, Any]) -> bool:
    if not isinstance(row, dict):
        return False
    # a bool is an int to Python, but not a number to a reader
    return all(isinstance(row.get(k), t) and (t is bool or not isinstance(row[k], bool)) for k, t in shape.items())


def _is_plan(c: Json) -> bool:
    rows = c["plan"]
    if not all(isinstance(name, str) for name in (*c["variables"], *c["sites"])):
        return False
    return len(rows) == len(c["variables"]) and all(
        isinstance(r, list) and len(r) == len(c["sites"]) and all(isinstance(x, NUMBER) for x in r) for r in rows
    )


def numbers(values: object) -> list[float]:
    """The numbers among some values: null stands for NaN and is left out."""
    many = values if isinstance(values, (list, tuple, Iterator)) else [values]
    return [float(x) for x in many if isinstance(x, NUMBER) and not isinstance(x, bool)]
