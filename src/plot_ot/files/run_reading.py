"""The one reader of run directories: everything that can be read of a run, and what is wrong with the rest.

A run may be going on, interrupted, or damaged. Entries that lack what every such entry has are left out and counted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from plot_ot.errors import PlotError
from plot_ot.files.run_layout import COUPLINGS, MANIFEST, RESULTS, handle_path, unit_path
from plot_ot.files.safe_reading import read_json, said_of
from plot_ot.files.seals import BROKEN, SEAL, digest, is_sealed
from plot_ot.files.unit_files import (
    OF,
    Damaged,
    check_handles,
    check_place,
    config_digest,
    differences,
    parse_unit,
    unit_digests,
    units_in,
)
from plot_ot.files.writing import Json

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
    def methods(self) -> list[str]:
        """The methods that made handles."""
        return self.distinct("method", "selection")

    @property
    def variables(self) -> list[str]:
        """The variables that handles were made for."""
        return self.distinct("variable", "selection")

    @property
    def seeds(self) -> list[int]:
        """The seeds of which there are handles, in rising order."""
        return sorted(self.distinct("seed", "selection"))

    @property
    def gaps(self) -> dict[str, list[int]]:
        """Methods that lack seeds which others have, and which: means over different seeds cannot be compared."""
        had: dict[str, set[int]] = {}
        for r in self.results["records"]:
            had.setdefault(r["method"], set()).add(r["seed"])
        every = {s for seeds in had.values() for s in seeds}
        return {m: sorted(every - seeds) for m, seeds in had.items() if every - seeds}

    @property
    def gaps_sentence(self) -> str:
        """What is missing of the grid of seeds and methods; empty where it is complete."""
        if not self.gaps:
            return ""
        lacking = "; ".join(f"{m} lacks seed {', '.join(map(str, seeds))}" for m, seeds in self.gaps.items())
        return f"Not every method was run on every seed ({lacking}): such rows cannot be compared."

    def handle_path(self, seed: int, method: str, variable: str) -> Path:
        """The file of a handle, whether or not it is there."""
        return handle_path(self.path, seed, method, variable)

    def handle_paths(self, seed: int, method: str) -> dict[str, Path]:
        """A method's handle files, by variable: for every variable, or none."""
        paths = {v: self.handle_path(seed, method, v) for v in self.variables}
        return paths if all(path.exists() for path in paths.values()) else {}

    def unit_of(self, seed: int, name: str) -> Json:
        """The network, the data and the settings that a unit says it is of; nothing where there is no such unit."""
        try:
            of = parse_unit(unit_path(self.path, seed, name))[OF]
        except Damaged:
            return {}
        return {k: of[k] for k in ("subject", "banks", "settings") if k in of}

    def require_handles(self, seed: int, name: str) -> None:
        """Refuse handles of a unit that are missing, or are not those that were written with it."""
        path = unit_path(self.path, seed, name)
        try:
            if path.exists():
                check_handles(self.path, seed, parse_unit(path))
        except Damaged as e:
            raise PlotError(f"{path} cannot be used: {e}. Run its method again to make it anew.") from None

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
    units = list(units_in(path))
    if not units and not any((path / name).exists() for name in (MANIFEST, RESULTS)):
        raise PlotError(f"{path} is not a plot-ot run directory: it has no manifest.json, results.json or units.")
    problems: list[str] = []
    manifest = _read(path / MANIFEST, dict, problems, "what was run, and with which versions, is not known")
    found: Json = {name: [] for name in NEEDED}
    couplings: list[Json] = []
    fresh = False
    if (path / RESULTS).exists():
        compiled = _read(path / RESULTS, dict, problems, "no number can be shown" if not units else "units are read")
        couplings = _read(path / COUPLINGS, list, problems, "couplings are not shown")
        fresh = bool(compiled) and (not units or _compiled_from(compiled, couplings, path))
        if fresh:
            found = compiled
    elif not units:
        problems.append("No unit of work is finished yet.")
    if not fresh and units:
        found, couplings = _gather(path, manifest, problems)
    _notice_handles(path, problems)
    results = {"task": found.get("task")} | {name: _sound(name, found.get(name), problems) for name in SHAPES}
    whole = [c for c in couplings if _has(c, COUPLING) and _is_plan(c)]
    if len(whole) < len(couplings):
        problems.append(f"{len(couplings) - len(whole)} of {len(couplings)} couplings are damaged and left out.")
    return Reading(path, manifest, results, whole, problems, len(units), fresh)


def _compiled_from(results: Json, couplings: list[Json], run: Path) -> bool:
    """Whether results and couplings are what was compiled, from the units that are there now."""
    whole = is_sealed(results) and results.get("couplings") == digest(couplings)
    return whole and results.get("units") == unit_digests(run)


def _read(path: Path, kind: type, problems: list[str], loss: str) -> Any:
    """A file's content, or an empty one and a word about what that means."""
    try:
        value = read_json(path)
    except PlotError as e:
        wrong = "is missing" if not path.exists() else f"cannot be read ({said_of(e.__cause__ or e, path)})"
        problems.append(f"{path.name} {wrong}: {loss}.")
        return kind()
    if not isinstance(value, kind):
        problems.append(f"{path.name} is damaged (not a {kind.__name__}): {loss}.")
        return kind()
    if isinstance(value, dict) and SEAL in value and not is_sealed(value):
        problems.append(f"{path.name} is damaged: {BROKEN}.")
    return value


def _gather(run: Path, manifest: Json, problems: list[str]) -> tuple[Json, list[Json]]:
    """The lists of all finished units, methods in the order they were asked for."""
    config = manifest.get("config")
    config = config if isinstance(config, dict) else {}
    asked = config.get("methods")
    rank = {str(name): k for k, name in enumerate(asked if isinstance(asked, list) else [])}
    own = {"config": config_digest(config), "versions": manifest.get("versions", {})} if manifest else {}
    found: Json = {"task": config.get("task")}
    units: list[tuple[int, int, str, Json]] = []
    for seed, path in units_in(run):
        try:
            unit = parse_unit(path)
            check_place(path, seed, unit)
            if said := differences(unit[OF], own):
                raise Damaged(f"it is of {said}")
        except Damaged as e:
            problems.append(f"{path.relative_to(run).as_posix()} is left out: {e}.")
            continue
        units.append((seed, rank.get(unit[OF]["unit"], -1), unit[OF]["unit"], unit))
    couplings: list[Json] = []
    first: dict[int, Json] = {}
    for seed, _, name, unit in sorted(units, key=lambda u: u[:3]):
        known = first.setdefault(seed, unit[OF]) if "subject" in unit[OF] else unit[OF]
        if said := differences(unit[OF], {k: known.get(k) for k in ("subject", "banks")}):
            problems.append(f"{name} of seed {seed} is left out: it is of {said}.")
            continue
        for kind in SHAPES:
            found.setdefault(kind, []).extend(unit.get(kind, []))
        couplings += unit.get("couplings", [])
    return found, couplings


def _notice_handles(run: Path, problems: list[str]) -> None:
    """Say which handles are missing or damaged."""
    for seed, path in units_in(run):
        try:
            check_handles(run, seed, parse_unit(path))
        except Damaged as e:
            said = f"{path.relative_to(run).as_posix()}: {e}"
            if "handle" in said:
                problems.append(f"{said}. Run its method again to make it anew.")


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
