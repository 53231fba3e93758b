"""Base/source pairs, or inputs alone, from wherever a user has them: lists, generators, JSONL, CSV, tables."""

from __future__ import annotations

import csv
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from plot_ot.abstract.banks import Bank
from plot_ot.abstract.causal_model import CausalModel
from plot_ot.abstract.codebook import plain_input
from plot_ot.abstract.hypothesis import Hypothesis
from plot_ot.errors import PlotError, unknown
from plot_ot.files.safe_reading import open_ordinary

SPLITS = ("fit", "calibration", "test")
MOST_ROWS = 1_000_000
"""The most rows that are read from a source without a `limit`."""
LONGEST_LINE = 1 << 20
"""The most bytes that one line of a file may have."""
LABELS = ("family", "split")

Given = dict[str, Any]
Line = tuple[str, Any]
"""Where a row stands, in words, and the row."""


@dataclass(frozen=True)
class PairTable:
    """Pairs of inputs as dicts; `source` is empty where the rows were inputs alone."""

    base: tuple[Given, ...]
    source: tuple[Given, ...]
    family: tuple[str, ...] | None = None
    """The kind of counterfactual each pair is, if the rows say so."""
    split: tuple[str, ...] | None = None
    """fit, calibration or test, if the rows say so."""
    where: tuple[str, ...] = ()
    """Where each row stood, for error messages."""
    notes: tuple[str, ...] = ()
    """What was done to the rows while reading them."""

    def __len__(self) -> int:
        return len(self.base)

    def of(self, split: str) -> PairTable:
        """The pairs of one split."""
        if split not in SPLITS:
            unknown("split", split, SPLITS)
        if self.split is None:
            raise PlotError(f"The pairs do not say which split they belong to, so none is '{split}'. Add a `split`.")
        return self._some([k for k, s in enumerate(self.split) if s == split])

    def _some(self, rows: Sequence[int]) -> PairTable:
        def pick(column: Sequence[Any] | None) -> Any:
            return None if column is None else tuple(column[k] for k in rows) if column else ()

        columns = {n: pick(getattr(self, n)) for n in ("base", "source", "family", "split", "where")}
        return replace(self, **columns)

    def rows(
        self, model: Hypothesis | CausalModel
    ) -> tuple[Int[Tensor, "pairs inputs"], Int[Tensor, "sources inputs"]]:
        """Base and source as rows of the model's inputs; a table of prompts alone has no sources."""
        base, source = (
            _rows(model, side, [f"{w}, {name}" if self.source else w for w in self.where])
            for name, side in (("base", self.base), ("source", self.source))
        )
        return base, source

    def bank(self, model: Hypothesis | CausalModel, *, name: str = "pairs") -> Bank:
        """The pairs labelled by the model; without families of their own, by which variables change."""
        causal = model.causal if isinstance(model, Hypothesis) else model
        base, source = self.rows(model)
        if self.family is None:
            return Bank.from_pairs(causal, base, source, name=name)
        names = list(dict.fromkeys(self.family))
        family = torch.tensor([names.index(f) for f in self.family])
        return Bank.from_pairs(causal, base, source, name=name, family=family, families=names)


def read_pairs(source: Any, *, split: str | None = None, limit: int | None = None) -> PairTable:
    """Pairs from a list or generator of rows, a .jsonl or .csv file, a pandas or Hugging Face `datasets` table.

    A row is (base, source), two dicts; or {"base": {...}, "source": {...}} with `family` and `split` if you like; or
    flat columns `base.x`, `source.x`, `family`, `split`, as in a CSV file. Or it is an input alone, a plain dict: then
    the table has no sources. A dict of such sources has the splits' names (fit, calibration, test) as keys.

    `split` keeps one split's pairs; `limit` stops after so many rows, as an endless generator needs.
    """
    table = _read_splits(source, limit) if _is_splits(source) else _read(source, limit)
    return table if split is None else table.of(split)


def read_inputs(source: Any, *, limit: int | None = None) -> list[Given]:
    """Inputs alone, from the same kinds of source; pairs are refused."""
    table = read_pairs(source, limit=limit)
    if table.source:
        raise PlotError(f"{table.where[0]} is a pair of base and source; expected inputs alone. Use read_pairs.")
    return list(table.base)


# -- rows -------------------------------------------------------------------------------------------------------


def _is_splits(source: Any) -> bool:
    return isinstance(source, Mapping) and not {"base", "source"} & set(source)


def _read_splits(source: Mapping[str, Any], limit: int | None) -> PairTable:
    for name in source:
        if name not in SPLITS:
            unknown("split", name, SPLITS)
    tables = {name: _read(part, limit) for name, part in source.items()}
    if not tables:
        raise PlotError("There are no pairs: the dict of splits is empty.")
    if any(t.split is not None for t in tables.values()) or not all(t.source for t in tables.values()):
        raise PlotError("A dict of splits holds pairs that do not name a split themselves.")
    if len({t.family is None for t in tables.values()}) > 1:
        raise PlotError("Some splits name the pairs' families and some do not: name all or none.")
    every = list(tables.values())

    def join(column: str) -> tuple[Any, ...]:
        return tuple(x for t in every for x in getattr(t, column))

    names = tuple(name for name, t in tables.items() for _ in range(len(t)))
    where = tuple(f"{name} {w}" for name, t in tables.items() for w in t.where)
    family = join("family") if every[0].family is not None else None
    return PairTable(join("base"), join("source"), family, names, where, tuple(dict.fromkeys(join("notes"))))


def _read(source: Any, limit: int | None) -> PairTable:
    if limit is not None and limit < 1:
        raise PlotError(f"`limit` must be at least 1; found {limit}.")
    name, lines, typeless = _lines(source)
    read = list(islice(lines, limit or MOST_ROWS))
    if limit is None and len(read) == MOST_ROWS and next(lines, None) is not None:
        raise PlotError(f"{name} gives more than {MOST_ROWS:,} rows. Give limit=... to stop after so many.")
    if not read:
        raise PlotError(f"{name} is empty: it needs at least one pair (base and source) or input.")
    rows = [_sides(where, row) for where, row in read]
    pairs = rows[0][1] is not None
    for (at, _), (_, side, _) in zip(read, rows, strict=True):
        if (side is not None) != pairs:
            kinds = ("a pair", "an input alone") if pairs else ("an input alone", "a pair")
            raise PlotError(f"{at} is {kinds[1]}, but {read[0][0]} is {kinds[0]}: all rows must be of one kind.")
    base, sources = [dict(r[0]) for r in rows], [dict(r[1] or {}) for r in rows]
    notes = _numbers(base, sources) if typeless else []
    if limit is not None and len(read) == limit:
        notes.append(f"{name}: the first {limit} rows were taken")
    where = tuple(w for w, _ in read)
    family, named = (_label(label, [r[2] for r in rows], where) for label in LABELS)
    return PairTable(tuple(base), tuple(sources) if pairs else (), family, named, where, tuple(notes))


def _sides(where: str, row: Any) -> tuple[Given, Given | None, Mapping[str, Any]]:
    """Base, source (None for an input alone) and labels of one row."""
    if isinstance(row, tuple | list) and len(row) == 2 and all(isinstance(side, Mapping) for side in row):
        return _checked(where, "base", row[0]), _checked(where, "source", row[1]), {}
    if not isinstance(row, Mapping):
        raise PlotError(
            f"{where} is {row!r:.80} ({type(row).__name__}); expected (base, source), a dict with base and source, or "
            f"an input as a dict."
        )
    flat = {k: v for k, v in row.items() if isinstance(k, str) and k.startswith(("base.", "source."))}
    if not flat and not {"base", "source"} & set(row):
        return _checked(where, "", row), None, {}
    sides: dict[str, Any] = {}
    for side in ("base", "source"):
        inside = {k.removeprefix(f"{side}."): v for k, v in flat.items() if k.startswith(f"{side}.")}
        if bool(inside) == (side in row):
            found = "both" if inside else "neither"
            raise PlotError(f"{where} has {found} of `{side}` and `{side}.x` columns: {list(row)!r:.200}.")
        sides[side] = _checked(where, side, inside or row[side])
    strange = [str(k) for k in row if k not in flat and k not in (*sides, *LABELS)]
    if strange:
        raise PlotError(f"{where} has the unknown {', '.join(strange)}. A pair has base, source, family and split.")
    if set(sides["base"]) != set(sides["source"]):
        differ = ", ".join(sorted(map(str, set(sides["base"]) ^ set(sides["source"]))))
        raise PlotError(f"{where}: base and source must have the same inputs; only one of them has {differ}.")
    return sides["base"], sides["source"], {k: row[k] for k in LABELS if k in row}


def _checked(where: str, side: str, given: Any) -> Given:
    inside = f"{where}, {side}" if side else where
    if not isinstance(given, Mapping) or not given:
        raise PlotError(f"{inside} must be a dict of inputs that is not empty; found {given!r:.80}.")
    for name in given:
        if not isinstance(name, str):
            raise PlotError(f"{inside}: inputs are called by names; found the key {name!r}.")
    return {name: plain_input(value, f"{inside}, '{name}'") for name, value in given.items()}


def _label(label: str, found: Sequence[Mapping[str, Any]], where: Sequence[str]) -> tuple[str, ...] | None:
    """Read a column of names that must stand in all rows or in none."""
    there = [label in row for row in found]
    if not any(there):
        return None
    if not all(there):
        raise PlotError(
            f"{where[there.index(False)]} has no `{label}`, other rows have one: give it in all or in none."
        )
    names = [row[label] for row in found]
    for at, name in zip(where, names, strict=True):
        if not isinstance(name, str) or not name:
            raise PlotError(f"{at}: `{label}` must be a name; found {name!r:.80}.")
        if label == "split" and name not in SPLITS:
            raise PlotError(f"{at}: unknown split '{name}'. Choose from: {', '.join(SPLITS)}.")
    return tuple(names)


def _numbers(base: list[Given], source: list[Given]) -> list[str]:
    """CSV knows texts only: make integers of inputs that are written as such in every row, on both sides."""
    notes = []
    for name in dict.fromkeys(n for side in (base, source) for row in side for n in row):
        cells = [row for side in (base, source) for row in side if name in row]
        if all(re.fullmatch(r"0|-?[1-9][0-9]{0,17}", row[name]) for row in cells):
            for row in cells:
                row[name] = int(row[name])
            notes.append(f"'{name}' was read as integers")
    return notes


def _rows(model: Hypothesis | CausalModel, inputs: Sequence[Given], where: Sequence[str]) -> Int[Tensor, "rows inputs"]:
    if isinstance(model, Hypothesis):
        return model.rows(inputs, names=where)
    for at, given in zip(where, inputs, strict=False):
        if set(given) != set(model.inputs):
            raise PlotError(f"{at} has the inputs {', '.join(given)}; expected {', '.join(model.inputs)}.")
        for name, value in given.items():
            if not isinstance(value, int):
                raise PlotError(f"{at}: '{name}' is {value!r:.80}; a CausalModel takes integers. Use a Hypothesis.")
    rows = [[int(given[n]) for n in model.inputs] for given in inputs]
    return torch.tensor(rows, dtype=torch.long).reshape(len(rows), len(model.inputs))


# -- sources ----------------------------------------------------------------------------------------------------


def _lines(source: Any) -> tuple[str, Iterator[Line], bool]:
    """The source's name, its rows, and whether these are texts without types."""
    if isinstance(source, str | os.PathLike):
        path = Path(source).expanduser()
        readers = {".jsonl": _jsonl, ".ndjson": _jsonl, ".csv": _csv}
        if path.suffix.lower() not in readers:
            legal = ", ".join(readers)
            raise PlotError(
                f"Cannot tell how to read {path}: its suffix must be one of {legal}. JSONL has a row per line."
            )
        if not path.is_file():
            raise PlotError(f"There is no file {path}.")
        return str(path), readers[path.suffix.lower()](path), path.suffix.lower() == ".csv"
    if hasattr(source, "to_dict") and hasattr(source, "iloc"):  # pandas: iterating it would give columns
        columns = [str(c) for c in source.columns]
        if len(set(columns)) < len(columns):
            raise PlotError(f"The table has a column twice: {', '.join(columns)}.")
        return "The table", _counted(source.to_dict("records"), "table row"), False
    if isinstance(source, Mapping) or not isinstance(source, Iterable):
        raise PlotError(
            f"Cannot read pairs from {type(source).__name__}; expected a list or generator of pairs, a .jsonl or .csv "
            f"file, or a pandas or datasets table."
        )
    return "The list of pairs", _counted(source, "pair"), False


def _counted(rows: Iterable[Any], what: str) -> Iterator[Line]:
    at = 0
    try:
        for row in rows:
            yield f"{what} {at}", row
            at += 1
    except PlotError:
        raise
    except Exception as e:  # the user's own generator
        raise PlotError(f"Reading {what} {at} failed: {type(e).__name__}: {e}.") from e


def _texts(path: Path) -> Iterator[tuple[int, str]]:
    """Numbered lines of a UTF-8 file, without a byte order mark, none longer than is sane."""
    try:
        with open_ordinary(path) as file:
            number = 0
            while line := file.readline(LONGEST_LINE + 1):
                number += 1
                if len(line) > LONGEST_LINE:
                    raise PlotError(
                        f"{path} line {number} is longer than {LONGEST_LINE:,} bytes: is it a file of pairs?"
                    )
                try:
                    yield number, line.decode("utf-8-sig" if number == 1 else "utf-8")
                except UnicodeDecodeError as e:
                    raise PlotError(f"{path} line {number} is not UTF-8 text ({e.reason}). Save it as UTF-8.") from e
    except (OSError, ValueError) as e:
        raise PlotError(f"{path} cannot be read: {getattr(e, 'strerror', None) or e}.") from e


def _jsonl(path: Path) -> Iterator[Line]:
    for number, text in _texts(path):
        if not text.strip():
            continue  # a blank line is no row
        where = f"{path} line {number}"
        try:
            row = json.loads(text, object_pairs_hook=_once, parse_constant=_no_constant)
        except (ValueError, RecursionError) as e:
            reason = f"{e.msg} at column {e.colno}" if isinstance(e, json.JSONDecodeError) else str(e)
            raise PlotError(f"{where} is not JSON: {reason}. Every line must be one JSON object.") from e
        yield where, row


def _once(items: list[tuple[str, Any]]) -> Given:
    found = dict(items)
    if len(found) < len(items):
        names = [k for k, _ in items]
        raise ValueError(f"the key {next(k for k in names if names.count(k) > 1)!r} stands there twice")
    return found


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no value")


def _csv(path: Path) -> Iterator[Line]:
    reader = csv.reader((text for _, text in _texts(path)), strict=True)
    header: list[str] = []
    try:
        for cells in reader:
            where = f"{path} line {reader.line_num}"
            if not cells:
                continue
            if not header:
                header = cells
                if len(set(header)) < len(header) or not all(header):
                    raise PlotError(f"{where}: columns need names that differ; found {', '.join(map(repr, header))}.")
                continue
            if len(cells) != len(header):
                raise PlotError(
                    f"{where} has {len(cells)} cells, the header has {len(header)}. Quote cells with commas."
                )
            yield where, dict(zip(header, cells, strict=True))
    except csv.Error as e:
        raise PlotError(f"{path} line {reader.line_num} is no CSV: {e}.") from e
