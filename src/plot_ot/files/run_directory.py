"""Run directories: a manifest, one file per finished unit of work, and what is compiled from them.

Everything is written atomically, so an interrupted run continues with the units that are missing. Who works on a
directory holds its lock; who only reads needs none.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import platform
import tempfile
import time
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from plot_ot.errors import PlotError
from plot_ot.files.locks import NAME as LOCK
from plot_ot.files.locks import Lock
from plot_ot.files.safe_reading import read_json as read_json

FORMAT = "plot-ot run 1"
LISTS = (
    "records",
    "transfer",
    "runtimes",
    "selection",
    "verdicts",
    "cross",
    "profile",
    "surfaces",
    "sweeps",
    "examples",
    "failures",
    "notes",
)
"""The lists in results.json; a unit file holds its share of each, and of `couplings`."""

WRITING = ".writing-"
"""How the names of files begin that are being written."""

Json = dict[str, Any]


def write_atomically(path: Path, data: bytes) -> None:
    """All of the file or none of it: write beside it, flush to disk, rename, flush the directory.

    What was written stays written when the machine loses power.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=WRITING)
    except OSError as e:
        raise PlotError(f"Cannot write {path}: {e.strerror or e}. Choose a directory you can write to.") from e
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
        _flush_directory(path.parent)
    except BaseException as e:
        Path(temporary).unlink(missing_ok=True)
        if isinstance(e, OSError):
            raise PlotError(f"Cannot write {path}: {e.strerror or e}. The old file, if any, is untouched.") from e
        raise


def _flush_directory(path: Path) -> None:
    """Make a rename last; some systems cannot, and need not."""
    with contextlib.suppress(OSError):
        directory = os.open(path, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)


def to_json(value: object, indent: int | None = None) -> str:
    """Strict JSON: NaN and infinities become null."""
    return json.dumps(_plain(value), indent=indent, allow_nan=False, ensure_ascii=False)


def write_json(path: Path, value: object) -> None:
    """Write a value as a JSON file."""
    write_atomically(path, (to_json(value, indent=1) + "\n").encode("utf-8", "replace"))


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    return value


class RunDirectory:
    """One run: which configuration, which units are finished, and the compiled results.

    One that was opened holds the directory's lock until it is closed, or gone.
    """

    def __init__(self, path: Path, manifest: Json, lock: Lock | None = None) -> None:
        self.path, self.manifest, self._lock = path, manifest, lock

    @classmethod
    def open(cls, path: Path, config: Json, versions: Mapping[str, str], command: str = "") -> RunDirectory:
        """Start a run in an empty directory, or continue the run of the same configuration found there.

        Seeds and methods may grow from one call to the next; everything else must be the same. The manifest keeps
        every `command` that worked on the run. A directory that another process works on is refused.
        """
        _refuse_foreign(path)
        cls._continued(path, config)  # what does not fit is said at once, and needs no lock
        lock = Lock(path)
        try:
            _sweep(path)
            run = cls(path, cls._continued(path, config) or _begun(config, versions), lock)
            if command:
                run.manifest["commands"] = [*run.manifest.get("commands", []), command]
            run.write_manifest()
        except BaseException:
            lock.release()
            raise
        return run

    def close(self) -> None:
        """Let other processes work on the directory."""
        if self._lock is not None:
            self._lock.release()

    def __enter__(self) -> RunDirectory:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @classmethod
    def _continued(cls, path: Path, config: Json) -> Json | None:
        """The manifest found in the directory with what is asked for now; None where there is none."""
        if not (path / "manifest.json").exists():
            return None
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
        return {**manifest, "config": config}

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
        lists = ("commands", "notes")
        if (
            not isinstance(manifest, dict)
            or manifest.get("format") != FORMAT
            or not isinstance(manifest.get("config"), dict)
            or not all(isinstance(manifest["config"].get(k, []), list) for k in ("seeds", "methods"))
            or not all(isinstance(manifest.get(k, []), list) for k in lists)
        ):
            raise PlotError(f"{path / 'manifest.json'} is not the manifest of a plot-ot run ({FORMAT!r}).")
        return manifest

    # -- the manifest ------------------------------------------------------------------------------------

    def write_manifest(self) -> None:
        """Write it as it is now."""
        write_json(self.path / "manifest.json", self.manifest)

    def note(self, words: str) -> None:
        """Keep a remark about how the run went, once."""
        notes = self.manifest.setdefault("notes", [])
        if words not in notes:
            notes.append(words)
            self.write_manifest()

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
        return self.path / "handles" / f"seed-{_safe(str(seed))}" / f"{_safe(method)}.{_safe(variable)}.safetensors"

    # -- results -----------------------------------------------------------------------------------------

    def compile(self, order: Sequence[str]) -> Json:
        """Gather the units of all seeds into results.json and couplings.json, methods in the given order."""
        results: Json = {"format": FORMAT, "task": self.manifest["config"].get("task")}
        results |= {name: [] for name in LISTS}
        couplings: list[Json] = []
        rank = {name: k for k, name in enumerate(order)}
        folders = [p for p in (self.path / "units").glob("seed-*") if _is_number(p.name.removeprefix("seed-"))]
        for folder in sorted(folders, key=lambda p: int(p.name.removeprefix("seed-"))):
            for path in sorted(folder.glob("*.json"), key=lambda p: (rank.get(p.stem, -1), p.stem)):
                unit = read_json(path)
                wanted = (*LISTS, "couplings")
                if not isinstance(unit, dict) or not all(isinstance(unit.get(name, []), list) for name in wanted):
                    raise PlotError(f"{path} is damaged. Delete it and run again to make it anew.")
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
        couplings = read_json(self.path / "couplings.json")
        if not isinstance(couplings, list):
            raise PlotError(
                f"{self.path / 'couplings.json'} is damaged: run the same command again to compile it anew."
            )
        return couplings


def _begun(config: Json, versions: Mapping[str, str]) -> Json:
    return {
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


def _refuse_foreign(path: Path) -> None:
    """Refuse to work in a directory with files of others; what a run leaves that dies at once is not one."""
    try:
        others = path.exists() and (
            not path.is_dir() or any(p.name != LOCK and not p.name.startswith(WRITING) for p in path.iterdir())
        )
        if others and not (path / "manifest.json").exists():
            raise PlotError(f"{path} exists and is not a plot-ot run directory. Choose another --out.")
    except OSError as e:
        raise PlotError(f"Cannot read {path}: {e.strerror or e}. Choose a directory of yours with --out.") from e


def _sweep(path: Path) -> None:
    """Remove what a killed process was writing; what a report elsewhere may be writing just now is left alone."""
    for file in path.rglob(f"{WRITING}*"):
        ours = file.parent == path or file.relative_to(path).parts[0] in ("units", "handles")
        with contextlib.suppress(OSError):
            if ours or file.stat().st_mtime < time.time() - 3600:
                file.unlink()


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 19


def _safe(name: str) -> str:
    """A name as part of a file name: distinct names stay distinct, and none leaves its directory."""
    kept = "".join(c if (c.isascii() and c.isalnum()) or c in "-_" else "_" for c in name[:60])
    return kept if kept == name else f"{kept}-{hashlib.sha256(name.encode('utf-8', 'replace')).hexdigest()[:8]}"
