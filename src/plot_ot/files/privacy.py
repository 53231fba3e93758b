"""Paths and commands as they may be shared: nothing in them tells whose machine a run was made on."""

from __future__ import annotations

import hashlib
import os
import re
import shlex
from collections.abc import Sequence
from pathlib import Path, PurePath, PureWindowsPath

_PATH = re.compile(r"(?:(?<![\w.:/~])(?:~?/[^\s/'\",;:()<>|]+){2,}/?|\b[A-Za-z]:\\[^\s'\",;()<>|]+)")
"""An absolute path inside a text."""


def shared_path(text: str) -> str:
    """A path without its folders: below the working directory as it is from there, else its name and a digest.

    What is no absolute path (a hub id, a name, a number, a relative path that stays inside) is left as it is.
    """
    if os.name != "nt" and PureWindowsPath(text).is_absolute() and not text.startswith("/"):
        return _named(PureWindowsPath(text))  # a path of another system
    path = Path(text).expanduser() if text.startswith("~") else Path(text)
    if not path.is_absolute() and ".." not in path.parts:
        return text
    whole = Path(os.path.abspath(path))
    try:
        return whole.relative_to(Path.cwd()).as_posix()
    except (ValueError, OSError):
        return _named(whole)


def _named(path: PurePath) -> str:
    return f"{path.name}~{hashlib.sha256(os.fspath(path).encode('utf-8', 'replace')).hexdigest()[:8]}"


def shared_command(words: Sequence[str]) -> str:
    """A command line with every path in it as it may be shared."""
    shown = []
    for word in words:
        option, sign, value = word.partition("=")
        shown.append(f"{option}={shared_path(value)}" if sign and option.startswith("-") else shared_path(word))
    return shlex.join(shown)


def shared_text(text: str) -> str:
    """A text with every absolute path in it as it may be shared."""
    return _PATH.sub(lambda found: shared_path(found[0].rstrip("/.")), text)
