"""The one writer of run directories: a manifest, one file per finished unit of work, and what is compiled from them.

Everything is written atomically, so an interrupted run continues with the units that are missing. Who works on a
directory holds its lock; who only reads (`run_reading`) needs none.
"""

from __future__ import annotations

import contextlib
import os
import platform
import time
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Protocol

from plot_ot.errors import PlotError
from plot_ot.files.locks import NAME as LOCK
from plot_ot.files.locks import Lock
from plot_ot.files.run_layout import COUPLINGS, FORMAT, LISTS, MANIFEST, RESULTS, handle_path, refuse_links, unit_path
from plot_ot.files.safe_reading import read_json, said_of
from plot_ot.files.seals import BROKEN, SEAL, digest, file_digest, is_sealed, sealed
from plot_ot.files.unit_files import (
    GROWING,
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
from plot_ot.files.writing import WRITING, Json, plain, write_json

SUPERSEDED = "superseded"
"""The folder of runs that were set aside."""
REMEDY = "Choose another directory, or set what is there aside (--start-over)."


class Saved(Protocol):
    """A handle, as far as a run directory needs to know it."""

    @property
    def variable(self) -> str:
        """The variable that it is for."""
        ...

    def save(self, path: Path) -> None:
        """Write it to a file."""
        ...


class RunDirectory:
    """A run that is being worked on. It holds the directory's lock until it is closed, or gone."""

    def __init__(self, path: Path, manifest: Json, lock: Lock | None = None) -> None:
        self.path, self.manifest, self._lock = path, manifest, lock

    @classmethod
    def open(
        cls,
        path: Path,
        config: Json,
        versions: Mapping[str, str],
        command: str = "",
        *,
        start_over: bool = False,
        private: bool = False,
    ) -> RunDirectory:
        """Start a run in an empty directory, or continue the run of the same configuration and versions found there.

        Seeds and methods may grow from one call to the next; everything else must be the same. With `start_over` what
        is there is set aside first, and the manifest says so. The manifest keeps every `command` that worked on the
        run, and the machine, unless it is `private`. A directory that another process works on is refused.
        """
        path = Path(path)
        _refuse_foreign(path)
        refuse_links(path)
        if not start_over:
            _continued(path, config, versions)  # what does not fit is said at once, and needs no lock
        lock = Lock(path)
        try:
            _sweep(path)
            if start_over:
                _set_aside(path)
            run = cls(path, _continued(path, config, versions) or _begun(config, versions), lock)
            run.manifest.pop("finished", None)
            if private or run.manifest.get("private"):
                run.manifest = {k: v for k, v in run.manifest.items() if k not in ("commands", "machine")}
                run.manifest["private"], command = True, ""
            if aside := _set_aside_before(path):
                run.manifest[SUPERSEDED] = aside
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

    # -- the manifest ------------------------------------------------------------------------------------

    def write_manifest(self) -> None:
        """Write it as it is now."""
        write_json(self.path / MANIFEST, sealed(self.manifest))

    def note(self, words: str) -> None:
        """Keep a remark about how the run went, once."""
        notes = self.manifest.setdefault("notes", [])
        if words not in notes:
            notes.append(words)
            self.write_manifest()

    def note_subject(self, seed: int, subject: Mapping[str, str]) -> None:
        """Keep which network a seed is about."""
        subjects = self.manifest.setdefault("subjects", {})
        if subjects.get(str(seed)) != dict(subject):
            subjects[str(seed)] = dict(subject)
            self.write_manifest()

    # -- units of work -----------------------------------------------------------------------------------

    def finished(self, seed: int, name: str) -> bool:
        """Whether a unit is there with its handles, whole; one that is not is noted, and to be made anew."""
        path = unit_path(self.path, seed, name)
        if not path.exists():
            return False
        try:
            self._checked(seed, path)
        except Damaged as e:
            self.note(f"seed {seed}: the unit {name} was made anew: {e}")
            return False
        return True

    def finish(
        self, seed: int, name: str, unit: Json, handles: Sequence[Saved] = (), of: Mapping[str, Any] | None = None
    ) -> None:
        """Write a finished unit: its handles, then its own file, which says that all of it is there.

        `of` says what the unit is of beside its seed and this run's configuration and versions: the `subject`, the
        digest of the `banks`, the method's `settings`.
        """
        digests = {}
        for handle in handles:
            path = handle_path(self.path, seed, name, handle.variable)
            handle.save(path)
            digests[path.name] = file_digest(path)
        told = {"seed": seed, "unit": name, **self._own(), **(of or {}), "handles": digests}
        write_json(unit_path(self.path, seed, name), sealed({OF: told, **unit}))

    def require(self, seed: int, of: Mapping[str, Any], names: Sequence[str] | None = None) -> None:
        """Refuse to go on where units of a seed (all, or those of some names) are of something else."""
        for at, path in units_in(self.path):
            if at != seed:
                continue
            try:
                told = self._placed(seed, path)[OF]  # with or without its handles, its numbers are shown
            except Damaged:
                continue  # it will be made anew, or compiling names it
            if told["unit"] == "failed" or (names is not None and told["unit"] not in names):
                continue
            if said := differences(told, of):
                raise PlotError(f"{self.path} holds {told['unit']} of seed {seed} of {said}. {REMEDY}")

    def _own(self) -> Json:
        return {"config": config_digest(self.manifest["config"]), "versions": self.manifest.get("versions", {})}

    def _checked(self, seed: int, path: Path) -> Json:
        """A unit that is whole, where it belongs, of this run's configuration and versions, and has its handles."""
        unit = self._placed(seed, path)
        check_handles(self.path, seed, unit)
        return unit

    def _placed(self, seed: int, path: Path) -> Json:
        """A unit that is whole, where it belongs, and of this run's configuration and versions."""
        unit = parse_unit(path)
        check_place(path, seed, unit)
        if said := differences(unit[OF], self._own()):
            raise PlotError(f"{path} is of {said}. Delete it, or set the run aside with --start-over.")
        return unit

    # -- results -----------------------------------------------------------------------------------------

    def complete(self, order: Sequence[str]) -> None:
        """Compile the results, methods in the given order, and say in the manifest that the run is finished."""
        self.compile(order)
        self.manifest["finished"] = _now()
        self.write_manifest()

    def compile(self, order: Sequence[str]) -> None:
        """Gather the units of all seeds into results.json and couplings.json, methods in the given order.

        The results name the units they were compiled from, with their digests, and that of the couplings.
        """
        results: Json = {"format": FORMAT, "task": self.manifest["config"].get("task")}
        results |= {name: [] for name in LISTS}
        couplings: list[Json] = []
        rank = {name: k for k, name in enumerate(order)}
        found = []
        for seed, path in units_in(self.path):
            try:
                unit = self._checked(seed, path)
            except Damaged as e:
                raise PlotError(
                    f"{path} is damaged: {e}. Run its method again with --methods, or delete the file."
                ) from None
            found.append((seed, rank.get(unit[OF]["unit"], -1), unit[OF]["unit"], unit))
        _refuse_mixed([unit[OF] for *_, unit in found], self.path)
        for *_, unit in sorted(found, key=lambda f: f[:3]):
            for name in LISTS:
                results[name] += unit.get(name, [])
            couplings += unit.get("couplings", [])
        results |= {"units": unit_digests(self.path), "couplings": digest(couplings)}
        write_json(self.path / COUPLINGS, couplings)
        write_json(self.path / RESULTS, sealed(results))


def _refuse_mixed(told: Sequence[Json], path: Path) -> None:
    """Units of one seed must be of one network and one set of banks."""
    first: dict[int, Json] = {}
    for of in told:
        if of["unit"] == "failed":
            continue
        known = first.setdefault(of["seed"], of)
        same = {k: known.get(k) for k in ("subject", "banks")}
        if said := differences(of, same):
            raise PlotError(f"{path}: {of['unit']} of seed {of['seed']} is of {said} ({known['unit']}). {REMEDY}")


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def _begun(config: Json, versions: Mapping[str, str]) -> Json:
    return {
        "format": FORMAT,
        "started": _now(),
        "config": config,
        "versions": dict(versions),
        "machine": {
            "python": platform.python_version(),
            "system": platform.platform(),
            "cores": os.cpu_count(),
        },
    }


def _set_aside_before(path: Path) -> list[str]:
    """The folders of all runs that were set aside, in the order in which they were."""
    numbers = [p.name for p in (path / SUPERSEDED).glob("*") if p.name.isascii() and p.name.isdigit()]
    return [f"{SUPERSEDED}/{name}" for name in sorted(numbers, key=int)]


def _set_aside(path: Path) -> None:
    """Move the run that is there, if any, whole or damaged, into a folder of its own."""
    if not (path / MANIFEST).exists():
        return
    number = max((int(name.partition("/")[2]) for name in _set_aside_before(path)), default=0) + 1
    folder = path / SUPERSEDED / str(number)
    try:
        folder.mkdir(parents=True)
        for name in ("units", "handles", "figures", "report.html", RESULTS, COUPLINGS, MANIFEST):  # the manifest last
            if (path / name).exists():
                os.replace(path / name, folder / name)
    except OSError as e:
        raise PlotError(f"Cannot set the run in {path} aside: {e.strerror or e}.") from e


def _continued(path: Path, config: Json, versions: Mapping[str, str]) -> Json | None:
    """The manifest found in the directory with what is asked for now; None where there is none."""
    if not (path / MANIFEST).exists():
        return None
    manifest = _read_manifest(path)
    found = {k: v for k, v in manifest["config"].items() if k not in GROWING}
    asked = {k: v for k, v in plain(config).items() if k not in GROWING}
    if found != asked:
        differ = sorted(k for k in found.keys() | asked.keys() if found.get(k) != asked.get(k))
        said = "; ".join(f"{k}: {found.get(k)!r} there, {asked.get(k)!r} asked" for k in differ)
        raise PlotError(f"{path} holds another run ({said}). {REMEDY}")
    old = manifest.get("versions", {})
    if old != dict(versions):
        differ = sorted(k for k in old.keys() | versions.keys() if old.get(k) != versions.get(k))
        said = "; ".join(f"{k}: {old.get(k)} there, {versions.get(k)} here" for k in differ)
        raise PlotError(f"{path} holds a run of other versions ({said}). {REMEDY}")
    for key in GROWING:
        had = manifest["config"].get(key, [])
        config = {**config, key: [*had, *(x for x in config.get(key, []) if x not in had)]}
    return {**manifest, "config": config}


def _read_manifest(path: Path) -> Json:
    try:
        manifest = read_json(path / MANIFEST)
    except PlotError as e:
        raise PlotError(f"{path / MANIFEST} cannot be read ({said_of(e.__cause__ or e, path)}). {REMEDY}") from e
    if (
        not isinstance(manifest, dict)
        or manifest.get("format") != FORMAT
        or not isinstance(manifest.get("config"), dict)
        or not all(isinstance(manifest["config"].get(k, []), list) for k in GROWING)
        or not all(isinstance(manifest.get(k, []), list) for k in ("commands", "notes"))
        or not all(isinstance(manifest.get(k, {}), dict) for k in ("subjects", "versions"))
    ):
        raise PlotError(f"{path / MANIFEST} is not the manifest of a plot-ot run ({FORMAT!r}).")
    if SEAL in manifest and not is_sealed(manifest):
        raise PlotError(f"{path / MANIFEST} cannot be trusted: {BROKEN}. Put the old one back. {REMEDY}")
    return manifest


def _refuse_foreign(path: Path) -> None:
    """Refuse to work in a directory with files of others; what a run leaves that dies while it begins is not one."""
    ours = LOCK, SUPERSEDED
    try:
        others = path.exists() and (
            not path.is_dir() or any(p.name not in ours and not p.name.startswith(WRITING) for p in path.iterdir())
        )
        if others and not (path / MANIFEST).exists():
            raise PlotError(f"{path} exists and is not a plot-ot run directory. Choose another directory.")
    except OSError as e:
        raise PlotError(f"Cannot read {path}: {e.strerror or e}. Choose a directory of yours with --out.") from e


def _sweep(path: Path) -> None:
    """Remove what a killed process was writing; what a report elsewhere may be writing just now is left alone."""
    for file in path.rglob(f"{WRITING}*"):
        ours = file.parent == path or file.relative_to(path).parts[0] in ("units", "handles")
        with contextlib.suppress(OSError):
            if ours or file.stat().st_mtime < time.time() - 3600:
                file.unlink()
