"""A unit of work says what it is of: seed, name, settings, network, data, versions, and the digests of its handles.

What is written down here is compared again wherever units are resumed, compiled or read, so that numbers of another
network, of other data, settings or versions never end up in one table, and a missing or damaged file is noticed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from plot_ot.files.run_layout import LISTS, handle_folder, seed_folders, unit_path
from plot_ot.files.safe_reading import parse_json, read_bytes, said_of
from plot_ot.files.seals import BROKEN, SEAL, digest, file_digest, is_sealed
from plot_ot.files.writing import Json, plain

GROWING = ("seeds", "methods")
"""Parts of a run's configuration that may grow from one call to the next."""
OF = "of"
"""The entry of a unit file that says what the unit is of."""
ASPECTS = {
    "config": "configuration",
    "versions": "versions",
    "subject": "network",
    "banks": "data",
    "settings": "method's settings",
}
"""What two units may differ in, in the words of an error."""


def config_digest(config: Mapping[str, Any]) -> str:
    """A digest of the parts of a run's configuration that may not change."""
    return digest({k: v for k, v in config.items() if k not in GROWING})


class Damaged(Exception):
    """A unit that cannot be used as it is, and why; it is made anew."""


def parse_unit(path: Path) -> Json:
    """The content of a unit file, all its parts being of the right kind; otherwise Damaged."""
    try:
        unit = parse_json(read_bytes(path).decode("utf-8"))
    except (OSError, ValueError) as e:
        raise Damaged(f"it cannot be read ({said_of(e, path)})") from None
    if not isinstance(unit, dict) or not all(isinstance(unit.get(n, []), list) for n in (*LISTS, "couplings")):
        raise Damaged("its lists are not lists")
    of = unit.get(OF)
    if not isinstance(of, dict) or not isinstance(of.get("handles"), dict) or not isinstance(of.get("unit"), str):
        raise Damaged("it does not say what it is of")
    if not is_sealed(unit):
        raise Damaged(BROKEN if SEAL in unit else "it has no seal: a version wrote it that made none")
    return unit


def check_place(path: Path, seed: int, unit: Json) -> None:
    """Refuse a unit that lies where another belongs: a copied seed would count twice."""
    of = unit[OF]
    if of.get("seed") != seed or path.name != unit_path(Path(), seed, of["unit"]).name:
        raise Damaged(f"it is the unit {of['unit']!r} of seed {of.get('seed')!r}")


def check_handles(run: Path, seed: int, unit: Json) -> None:
    """Notice handles that are missing or are not what was written."""
    for name, wanted in unit[OF]["handles"].items():
        path = handle_folder(run, seed) / str(name)
        if path.name != name or path.is_symlink() or not path.is_file():
            raise Damaged(f"its handle {name} is missing")
        try:
            found = file_digest(path)
        except (OSError, ValueError) as e:
            raise Damaged(f"its handle {name} cannot be read ({said_of(e, path)})") from None
        if found != wanted:
            raise Damaged(f"its handle {name} is damaged")


def differences(found: Mapping[str, Any], asked: Mapping[str, Any]) -> str:
    """What a unit differs in from what is asked for, in words; what is not asked for is not compared."""
    said = []
    for aspect, words in ASPECTS.items():
        there, here = found.get(aspect), plain(asked.get(aspect))
        if aspect in asked and there != here:
            if isinstance(there, dict) and isinstance(here, dict):
                parts = sorted(k for k in there.keys() | here.keys() if there.get(k) != here.get(k))
                said.append(
                    f"another {words}: " + ", ".join(f"{k} {there.get(k)} there, {here.get(k)} here" for k in parts)
                )
            else:
                said.append(f"another {words}: {there} there, {here} here")
    return "; ".join(said)


def units_in(run: Path) -> Iterator[tuple[int, Path]]:
    """The files of all finished units with their seeds, in order."""
    for seed, folder in seed_folders(run):
        for path in sorted(folder.glob("*.json")):
            yield seed, path


def unit_digests(run: Path) -> dict[str, str]:
    """The digest of every unit file: what results were compiled from, or would be now."""
    found = {}
    for _, path in units_in(run):
        try:
            found[path.relative_to(run).as_posix()] = file_digest(path)
        except (OSError, ValueError):
            found[path.relative_to(run).as_posix()] = "unreadable"
    return found
