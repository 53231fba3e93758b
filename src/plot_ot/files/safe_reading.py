"""Reading files that may be damaged or meant badly: nothing in them is executed, sizes are checked before anything is
read, and whatever is wrong with them ends in a PlotError.
"""

from __future__ import annotations

import json
import os
import stat
import tempfile
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from plot_ot.errors import PlotError

MOST_TEXT = 512 << 20
"""Bytes of the largest JSON file that is read."""
MOST_TENSORS = 4 << 30
"""Bytes of the largest safetensors file that is read whole."""
DEEPEST = 64
"""Levels of the deepest JSON value that is taken; ours have fewer than ten."""

UNREADABLE = (
    SafetensorError,
    *(OSError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RuntimeError, MemoryError),
)
"""What taking a damaged file apart can lead to; RecursionError is a RuntimeError."""


def read_bytes(path: str | os.PathLike[str], most: int = MOST_TEXT) -> bytes:
    """A file's bytes; a pipe, a device or a file larger than `most` bytes is refused unread."""
    with open(path, "rb", opener=_without_waiting) as file:
        _refuse_size(path, os.fstat(file.fileno()), most)
        data = file.read(most + 1)
    if len(data) > most:
        raise ValueError(f"it grew beyond {most:,} bytes while it was read")
    return data


def _without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))  # a pipe that nobody writes to must not hold us up


def _refuse_size(path: str | os.PathLike[str], found: os.stat_result, most: int) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise ValueError(f"{os.fspath(path)} is not an ordinary file")
    if found.st_size > most:
        raise ValueError(f"it has {found.st_size:,} bytes, more than the {most:,} that such a file may have")


def parse_json(text: str | bytes) -> Any:
    """A JSON value of at most DEEPEST levels; NaN and infinities, which we write as null, are read as null."""
    try:
        value = json.loads(text, parse_constant=lambda _: None)
    except RecursionError:
        raise ValueError("its values are nested too deeply") from None
    level = [value]
    for _ in range(DEEPEST):
        level = [x for v in level if isinstance(v, (dict, list)) for x in (v.values() if isinstance(v, dict) else v)]
        if not level:
            return value
    raise ValueError("its values are nested too deeply")


def read_json(path: Path) -> Any:
    """Read a JSON file, or say what is wrong with it."""
    try:
        return parse_json(read_bytes(path).decode("utf-8"))
    except FileNotFoundError:
        raise PlotError(f"{path} is missing.") from None
    except UNREADABLE as e:
        raise PlotError(f"{path} cannot be read ({_short(e)}). Delete it and run again to make it anew.") from e


def read_tensors(path: str | os.PathLike[str], most: int = MOST_TENSORS) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Metadata and tensors of a safetensors file of at most `most` bytes.

    Errors are those of UNREADABLE, for the caller to say in the file's own terms.
    """
    _refuse_size(path, os.stat(path), most)
    with safe_open(os.fspath(path), framework="pt") as file:
        return dict(file.metadata() or {}), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def write_at(file: int, data: memoryview, offset: int) -> None:
    """Write all of the bytes at an offset of an open scratch file; a full disk is said."""
    done = 0
    while done < len(data):
        try:
            done += os.pwrite(file, data[done:], offset + done)
        except OSError as e:
            raise PlotError(
                f"Cannot keep a recording on disk: {e.strerror or e}. Make room in {tempfile.gettempdir()}, set TMPDIR "
                f"to a larger disk, or give more --memory."
            ) from e


def read_at(file: int, into: memoryview, offset: int) -> None:
    """Fill the buffer from an offset of an open scratch file; one that was cut short is said."""
    done = 0
    while done < len(into):
        try:
            got = os.preadv(file, [into[done:]], offset + done)
        except OSError as e:
            raise PlotError(f"Cannot read a recording back from disk: {e.strerror or e}. Run again.") from e
        if not got:
            raise PlotError("A recording on disk was cut short by someone else. Run again.")
        done += got


def _short(e: BaseException) -> str:
    said = str(e) or type(e).__name__
    return said if len(said) <= 200 else f"{said[:200]} ..."
