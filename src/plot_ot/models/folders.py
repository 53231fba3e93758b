"""Where models are kept: in the user's cache, and beside the source tree where this runs from one."""

from __future__ import annotations

import os
from pathlib import Path

SOURCE_TREE = Path(__file__).parents[3]
"""The checkout or unpacked source distribution, where this file lies in one."""


def default_cache() -> Path:
    """Where what was fetched or trained is kept: $PLOT_OT_CACHE, or plot-ot in the user's cache directory."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(os.environ.get("PLOT_OT_CACHE") or home / "plot-ot")


def shipped_folders(kind: str, name: str) -> tuple[Path, Path]:
    """The two folders for what comes with the source distribution but not with the wheel: `adapters` or `models`."""
    return default_cache() / kind / name, SOURCE_TREE / kind / name


def how_to_ship(kind: str, name: str) -> str:
    """The remedy where such a folder is missing."""
    return f"They come with the source distribution: copy its folder {kind}/{name} to {shipped_folders(kind, name)[0]}"
