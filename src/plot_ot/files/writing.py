"""Writing files so that what was there, or all of what is new, is there afterwards; and JSON as we write it."""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from plot_ot.errors import PlotError

WRITING = ".writing-"
"""How the names of files begin that are being written."""

Json = dict[str, Any]


def write_atomically(path: Path, data: bytes) -> None:
    """All of the file or none of it: write beside it, flush to disk, rename, flush the directory.

    What was written stays written when the machine loses power. Who may read it is up to the umask.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.parent / f"{WRITING}{secrets.token_hex(8)}"
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o666)
    except OSError as e:
        raise PlotError(f"Cannot write {path}: {e.strerror or e}. Choose a directory you can write to.") from e
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        _flush_directory(path.parent)
    except BaseException as e:
        temporary.unlink(missing_ok=True)
        if isinstance(e, OSError):
            raise PlotError(f"Cannot write {path}: {e.strerror or e}. The old file, if any, is untouched.") from e
        raise


def require_writable(directory: Path) -> None:
    """Refuse a directory that cannot be written to, before hours are spent on what is to go there."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory, prefix=WRITING):
            pass
    except OSError as e:
        raise PlotError(f"Cannot write to {directory}: {e.strerror or e}. Choose a directory you can write to.") from e


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
    return json.dumps(plain(value), indent=indent, allow_nan=False, ensure_ascii=False)


def write_json(path: Path, value: object) -> None:
    """Write a value as a JSON file."""
    write_atomically(path, (to_json(value, indent=1) + "\n").encode("utf-8", "replace"))


def plain(value: Any) -> Any:
    """The value as JSON will give it back: keys are strings, lists and tuples are lists, NaN and infinities None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    return value
