"""A lock on a directory that dies with its owner, however the owner dies.

The operating system holds it on an open file, so nothing is left to clean up after a crash or SIGKILL: the file stays,
the lock does not. On NFS, Linux passes it on to the server, except where the share is mounted with `nolock`.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import sys
import weakref
from datetime import datetime, timezone
from pathlib import Path

from plot_ot.errors import PlotError, warn
from plot_ot.files.safe_reading import read_bytes

NAME = ".lock"
_HELD_BY_ANOTHER = (errno.EAGAIN, errno.EACCES, errno.EDEADLK)

if sys.platform == "win32":
    import msvcrt

    def _lock(file: int) -> None:
        os.lseek(file, 1 << 30, os.SEEK_SET)  # far behind the owner's name, which others must be able to read
        msvcrt.locking(file, msvcrt.LK_NBLCK, 1)
        os.lseek(file, 0, os.SEEK_SET)

else:
    import fcntl

    def _lock(file: int) -> None:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def is_held(directory: Path) -> bool | None:
    """Whether a process of this machine works on a directory, by its signature; None where that cannot be told.

    The lock itself is left alone: taking it, even for a moment, could turn away a run that starts just then.
    """
    try:
        signed = read_bytes(directory / NAME, 1000)
    except FileNotFoundError:
        return False
    except (OSError, ValueError):
        return None
    if not signed:
        return False
    try:
        owner = json.loads(signed)
        pid = int(owner["pid"])
        if owner["host"] != socket.gethostname() or not 0 < pid < 1 << 31 or os.name == "nt":
            return None
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    except (OSError, ValueError, TypeError, LookupError, ArithmeticError, RecursionError):
        return None
    return True


class Lock:
    """Held from `take` until `release`, or until this object or its process is gone."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / NAME
        try:
            directory.mkdir(parents=True, exist_ok=True)
            file = os.open(self.path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o666)
        except OSError as e:
            raise PlotError(f"Cannot write {self.path}: {e.strerror or e}. Choose a directory you can write to.") from e
        try:
            _lock(file)
        except OSError as e:
            if e.errno in _HELD_BY_ANOTHER:
                owner = _owner(file)
                os.close(file)
                raise PlotError(
                    f"{directory} is in use by {owner}. Wait until it is done, or choose another --out; the "
                    f"lock ends with that process."
                ) from None
            warn(
                f"{directory} lies on a file system without locks ({e.strerror or e}): take care that no other process "
                f"works on it."
            )
        self._file = weakref.finalize(self, _let_go, file)
        _sign(file)

    def release(self) -> None:
        """Let others have the directory."""
        self._file()


def _let_go(file: int) -> None:
    """Leave no name behind, then let others have the lock."""
    with contextlib.suppress(OSError):
        os.truncate(file, 0)
    os.close(file)


def _owner(file: int) -> str:
    """Who holds the lock, as far as its file says; anyone may have written anything there."""
    try:
        os.lseek(file, 0, os.SEEK_SET)
        owner = json.loads(os.read(file, 1000))
        return f"process {int(owner['pid'])} on {owner['host']} (since {owner['since']})"
    except (OSError, ValueError, TypeError, LookupError, ArithmeticError, RecursionError):  # it may be about to sign
        return "another process"


def _sign(file: int) -> None:
    """Say who holds the lock; on a full disk it is held all the same."""
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    owner = json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "since": now})
    with contextlib.suppress(OSError):
        os.truncate(file, 0)
        os.write(file, owner.encode())
