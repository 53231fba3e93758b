"""Tables that fit the terminal: where one is too wide its columns are dealt out to several, and no number is cut."""

from __future__ import annotations

from collections.abc import Sequence

from rich.cells import cell_len
from rich.table import Column, Table

ROOM = 3
"""What the frame of a column takes besides its text."""
WORDS = 22
"""Columns of words may be folded down to this width; columns of numbers never are."""


def fitted(table: Table, width: int) -> list[Table]:
    """The table itself or, where it is wider than that, tables of some of its columns beside the names of the rows."""
    columns = table.columns
    if not columns or sum(_width(c) + ROOM for c in columns) <= width:
        return [table]
    keys = _keys(columns)
    room = width - sum(_width(c) + ROOM for c in keys)
    groups: list[list[Column]] = [[]]
    for unit in _units(columns[len(keys) :]):
        if groups[-1] and sum(_least(c) + ROOM for c in [*groups[-1], *unit]) > room:
            groups.append([])
        for column in unit:  # a unit that is too wide by itself is taken apart as well
            if groups[-1] and sum(_least(c) + ROOM for c in [*groups[-1], column]) > room:
                groups.append([])
            groups[-1].append(column)
    return [_of(table, [*keys, *group], k == 0, k + 1 == len(groups)) for k, group in enumerate(groups)]


def _keys(columns: Sequence[Column]) -> list[Column]:
    """The columns that name the rows: the first, and the second where the first does not tell all rows apart."""
    first = list(columns[0].cells)
    return list(columns[: 1 if len(set(map(str, first))) == len(first) else 2])


def _units(columns: Sequence[Column]) -> list[list[Column]]:
    """Columns that stay together: neighbours under one heading, such as the two banks of a variable."""
    found: list[list[Column]] = []
    for column in columns:
        over, _, under = str(column.header).partition("\n")
        if found and under and str(found[-1][0].header).partition("\n")[0] == over:
            found[-1].append(column)
        else:
            found.append([column])
    return found


def _texts(column: Column) -> list[str]:
    return [str(x) for x in (column.header, *column.cells)]


def _width(column: Column) -> int:
    return max(cell_len(line) for text in _texts(column) for line in (text.splitlines() or [""]))


def _least(column: Column) -> int:
    """The narrowest that a column may become: a number's whole width, a word's."""
    if _is_number(column):
        return _width(column)
    longest = max(cell_len(word) for text in _texts(column) for word in (text.split() or [""]))
    return min(_width(column), max(WORDS, min(longest, 2 * WORDS)))


def _is_number(column: Column) -> bool:
    return column.justify == "right" or column.no_wrap


def _of(table: Table, columns: Sequence[Column], first: bool, last: bool) -> Table:
    """A table of some columns; the title stands over the first and the caption under the last."""
    made = Table(
        title=table.title if first else None,
        caption=table.caption if last else None,
        title_justify=table.title_justify,
        box=table.box,
        pad_edge=table.pad_edge,
        padding=table.padding,
    )
    for c in columns:
        fold = "fold" if not _is_number(c) else c.overflow
        made.add_column(c.header, justify=c.justify, style=c.style, no_wrap=_is_number(c), overflow=fold)
    cells = [list(c.cells) for c in columns]
    for k, row in enumerate(table.rows):
        made.add_row(*(column[k] for column in cells), end_section=row.end_section)
    return made
