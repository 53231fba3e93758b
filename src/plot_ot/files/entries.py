"""Entries of public data sets: JSON, JSON lines or parquet, from local files or the hub."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from plot_ot.errors import PlotError
from plot_ot.files.hub import download, listed
from plot_ot.files.safe_reading import UNREADABLE, parse_json, read_bytes, read_parquet

SUFFIXES = (".json", ".jsonl", ".parquet")


def fetched(repo: str, folder: str) -> list[Path]:
    """The files of a data set on the hub that hold entries, fetched once into the hub's own cache."""
    there = listed(repo)
    found = [f for f in there if f.endswith(SUFFIXES) and f.startswith(folder)]
    if not found:
        held = ", ".join(f for f in there if f.endswith(SUFFIXES)) or "none"
        raise PlotError(f"The data set '{repo}' has no questions under '{folder}'. Files that could hold some: {held}.")
    return [download(repo, f, kind="dataset") for f in found]


def read_entries(path: Path, expected: str) -> list[dict[str, Any]]:
    """The entries of a file, each of which should have what is `expected`."""
    if path.suffix not in SUFFIXES:
        raise PlotError(f"Cannot read questions from '{path.name}': its suffix must be one of {', '.join(SUFFIXES)}.")
    try:
        if path.suffix == ".parquet":
            entries = read_parquet(path)
        elif path.suffix == ".jsonl":
            entries = [parse_json(line) for line in read_bytes(path).decode("utf-8").splitlines() if line.strip()]
        else:
            entries = parse_json(read_bytes(path).decode("utf-8"))
    except FileNotFoundError:
        raise PlotError(f"There is no file {path}.") from None
    except UNREADABLE as e:
        raise PlotError(f"{path} is damaged or not {path.suffix[1:]} ({e}).") from e
    if not isinstance(entries, list) or not all(isinstance(e, dict) for e in entries):
        raise PlotError(f"{path} must hold a list of entries with {expected}; found {type(entries).__name__}.")
    return entries
