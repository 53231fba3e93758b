"""Run directories: a manifest, one file per finished unit of work, and what is compiled from them.

Everything is written atomically, so an interrupted run continues with the units that are missing.
"""

from __future__ import annotations

import json
import math
import os
import platform
import tempfile
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from plot_ot.errors import PlotError

FORMAT = "plot-ot run 1"
LISTS = (
    "records",
    "transfer",
    "runtimes",
    "selection",
    "verdicts",
    "cross",
    "surfaces",
    "sweeps",
    "examples",
    "failures",
    "notes",
)
"""The lists in results.json; a unit file holds its share of each, and of `couplings`."""

Json = dict[str, Any]


def write_atomically(path: Path, data: bytes) -> None:
    """All of the file or none of it: write beside it, flush to disk, rename."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    except OSError as e:
        raise PlotError(f"Cannot write {path}: {e.strerror or e}. Choose a directory you can write to.") from e
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException as e:
        Path(temporary).unlink(missing_ok=True)
        if isinstance(e, OSError):
            raise PlotError(f"Cannot write {path}: {e.strerror or e}. The old file, if any, is untouched.") from e
        raise


def to_json(value: object, indent: int | None = None) -> str:
    """Strict JSON: NaN and infinities become null."""
    return json.dumps(_plain(value), indent=indent, allow_nan=False, ensure_ascii=False)


def write_json(path: Path, value: object) -> None:
    """Write a value as a JSON file."""
    write_atomically(path, (to_json(value, indent=1) + "\n").encode())


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    return value


def read_json(path: Path) -> Any:
    """Read a JSON file, or say what is wrong with it."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise PlotError(f"{path} is missing.") from None
    except (OSError, ValueError) as e:
        raise PlotError(f"{path} cannot be read ({e}). Delete it and run again to make it anew.") from e


class RunDirectory:
    """One run: which configuration, which units are finished, and the compiled results."""

    def __init__(self, path: Path, manifest: Json) -> None:
        self.path, self.manifest = path, manifest

    @classmethod
    def open(cls, path: Path, config: Json, versions: Mapping[str, str], command: str = "") -> RunDirectory:
        """Start a run in an empty directory, or continue the run of the same configuration found there.

        Seeds and methods may grow from one call to the next; everything else must be the same. The manifest keeps
        every `command` that worked on the run.
        """
        described = path / "manifest.json"
        if described.exists():
            manifest = cls._read_manifest(path)
            found = {k: v for k, v in manifest["config"].items() if k not in ("seeds", "methods")}
            asked = {k: v for k, v in _plain(config).items() if k not in ("seeds", "methods")}
            if found != asked:
                differ = sorted(k for k in found.keys() | asked.keys() if found.get(k) != asked.get(k))
                said = "; ".join(f"{k}: {found.get(k)!r} there, {asked.get(k)!r} asked" for k in differ)
                raise PlotError(f"{path} holds another run ({said}). Choose another --out.")
            for key in ("seeds", "methods"):
                old = manifest["config"].get(key, [])
                config = {**config, key: [*old, *(x for x in config.get(key, []) if x not in old)]}
            manifest = {**manifest, "config": config}
        else:
            if path.exists() and (not path.is_dir() or any(path.iterdir())):
                raise PlotError(f"{path} exists and is not a plot-ot run directory. Choose another --out.")
            manifest = {
                "format": FORMAT,
                "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
                "config": config,
                "versions": dict(versions),
                "machine": {
                    "python": platform.python_version(),
                    "system": platform.platform(),
                    "cores": os.cpu_count(),
                },
            }
        if command:
            manifest["commands"] = [*manifest.get("commands", []), command]
        write_json(described, manifest)
        return cls(path, manifest)

    @classmethod
    def read(cls, path: Path) -> RunDirectory:
        """An existing run."""
        if not path.is_dir():
            raise PlotError(f"There is no run directory at {path}.")
        if not (path / "manifest.json").exists():
            raise PlotError(f"{path} is not a plot-ot run directory: it has no manifest.json.")
        return cls(path, cls._read_manifest(path))

    @staticmethod
    def _read_manifest(path: Path) -> Json:
        manifest = read_json(path / "manifest.json")
        if not isinstance(manifest, dict) or manifest.get("format") != FORMAT or "config" not in manifest:
            raise PlotError(f"{path / 'manifest.json'} is not the manifest of a plot-ot run ({FORMAT!r}).")
        return manifest

    # -- units -------------------------------------------------------------------------------------------

    def _unit(self, seed: int, name: str) -> Path:
        return self.path / "units" / f"seed-{seed}" / f"{name}.json"

    def finished(self, seed: int, name: str) -> bool:
        """Whether a unit's file is there."""
        return self._unit(seed, name).exists()

    def finish(self, seed: int, name: str, unit: Json) -> None:
        """Write a finished unit; its handles must be written before."""
        write_json(self._unit(seed, name), unit)

    def handle_path(self, seed: int, method: str, variable: str) -> Path:
        """Where a handle's file goes."""
        return self.path / "handles" / f"seed-{seed}" / f"{method}.{_safe(variable)}.safetensors"

    # -- results -----------------------------------------------------------------------------------------

    def compile(self, order: Sequence[str]) -> Json:
        """Gather the units of all seeds into results.json and couplings.json, methods in the given order."""
        results: Json = {"format": FORMAT, "task": self.manifest["config"].get("task")}
        results |= {name: [] for name in LISTS}
        couplings: list[Json] = []
        rank = {name: k for k, name in enumerate(order)}
        folders = sorted((self.path / "units").glob("seed-*"), key=lambda p: int(p.name.removeprefix("seed-")))
        for folder in folders:
            for path in sorted(folder.glob("*.json"), key=lambda p: (rank.get(p.stem, -1), p.stem)):
                unit = read_json(path)
                for name in LISTS:
                    results[name] += unit.get(name, [])
                couplings += unit.get("couplings", [])
        write_json(self.path / "couplings.json", couplings)
        write_json(self.path / "results.json", results)
        return results

    def results(self) -> Json:
        """The compiled results."""
        results = read_json(self.path / "results.json")
        if not isinstance(results, dict) or not all(isinstance(results.get(n, []), list) for n in LISTS):
            raise PlotError(f"{self.path / 'results.json'} is damaged: run the same command again to compile it anew.")
        return results | {n: results.get(n, []) for n in LISTS}  # older runs have fewer lists

    def couplings(self) -> list[Json]:
        """The couplings before calibration."""
        return read_json(self.path / "couplings.json")


def _safe(name: str) -> str:
    """A variable's name as part of a file name."""
    return "".join(c if c.isalnum() or c in "-_" else "_" for c in name)
