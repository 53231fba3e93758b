"""Run directories and the files in them: written atomically, continued after an interruption."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from plot_ot.errors import PlotError


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
