"""The benchmark's data: entries with counterfactuals, from local files or the hub, as pairs by family and split."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plot_ot.errors import PlotError
from plot_ot.files.entries import SUFFIXES, fetched, read_entries
from plot_ot.files.safe_reading import read_json
from plot_ot.mib.questions import ATTRIBUTES, Cities, Example, Question

SUFFIX = "_counterfactual"


@dataclass(frozen=True)
class Pair:
    """A base and a source prompt, and the kind of counterfactual that the source is."""

    base: Example
    source: Example
    family: str


def read_split(task: Question, data: str | None, split: str) -> list[Pair]:
    """The pairs of a split (`train`, `test`), by default from the benchmark's own data set on the hub.

    `data` is a file, a folder, or a data set on the hub. In a folder, the files whose path names the split count; a
    folder of several tasks has one folder for each, named as on the hub.
    """
    files = [f for f in _files(task, data) if split in f.stem or split in f.parent.name]
    if not files:
        raise PlotError(
            f"There is no {split} data of {task.name} in {data or task.hub}: expected files with '{split}' in "
            f"their names that end in {', '.join(SUFFIXES)}."
        )
    pairs = []
    for file in files:
        for number, entry in enumerate(read_entries(file, "`prompt` and `..._counterfactual`")):
            try:
                if not task.keep(entry):
                    continue
                base = task.read(entry)
                families = [k for k in entry if k.endswith(SUFFIX) and not any(i in k for i in task.ignored)]
                for k in sorted(families):
                    for other in entry[k] if isinstance(entry[k], list) else [entry[k]]:
                        if other is not None:
                            pairs.append(Pair(base, task.read(other), k.removesuffix(SUFFIX)))
            except (KeyError, ValueError, TypeError, IndexError, AttributeError) as e:
                raise PlotError(
                    f"{file.name}, entry {number}: not an entry of {task.name} ({type(e).__name__}: {e})."
                ) from e
    if not pairs:
        raise PlotError(
            f"The {split} data of {task.name} has no counterfactuals: expected `..._counterfactual` entries."
        )
    return pairs


def _files(task: Question, data: str | None) -> Sequence[Path]:
    if data is None:
        return fetched(task.hub, task.folder)
    at, name = Path(data).expanduser(), task.hub.partition("/")[2]
    if at.is_file():
        return [at]
    if not at.is_dir():
        if data.count("/") != 1 or data.startswith((".", "/", "~")):
            raise PlotError(f"There is no file or folder {data}, and a data set on the hub is named owner/name.")
        return fetched(data, task.folder)
    inner = next((f for f in (at / name / task.folder, at / name, at / task.folder) if f.is_dir()), at)
    return sorted(f for f in inner.rglob("*") if f.suffix in SUFFIXES and f.is_file())


def fit_and_calibration(pairs: Sequence[Pair], seed: int) -> tuple[list[Pair], list[Pair]]:
    """The pairs of two thirds of the base prompts, to fit on, and those of the others, to choose on."""
    bases = sorted({p.base.prompt for p in pairs})
    random.Random(seed).shuffle(bases)
    held_out = set(bases[: max(1, len(bases) // 3)])
    fit, calibration = ([p for p in pairs if (p.base.prompt in held_out) == out] for out in (False, True))
    if not fit:
        raise PlotError(f"{len(pairs)} pairs of {len(bases)} base prompts are too few to fit and to choose on.")
    return fit, calibration


def some_of_each(pairs: Sequence[Pair], size: int, seed: int) -> list[Pair]:
    """At most so many pairs of every family, drawn by the seed."""
    found = []
    for family in sorted({p.family for p in pairs}):
        own = [p for p in pairs if p.family == family]
        random.Random(seed).shuffle(own)
        found += own[:size]
    return found


def read_cities(path: Path) -> Cities:
    """The attributes of cities, from the benchmark's ravel_city_entity.json."""
    found: Any = read_json(path)
    good = isinstance(found, Mapping) and all(
        isinstance(c, Mapping) and all(isinstance(c.get(a), str) for a in ATTRIBUTES) for c in found.values()
    )
    if not good or not found:
        raise PlotError(f"{path} must be a JSON object of cities, each with {', '.join(ATTRIBUTES)}.")
    cities: Cities = found
    return cities
