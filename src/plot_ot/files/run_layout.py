"""Where things are in a run directory: the names of its files, and the lists in them."""

from __future__ import annotations

import hashlib
from pathlib import Path

from plot_ot.errors import PlotError

FORMAT = "plot-ot run 1"
LISTS = (
    "records",
    "transfer",
    "runtimes",
    "selection",
    "verdicts",
    "cross",
    "profile",
    "surfaces",
    "sweeps",
    "examples",
    "failures",
    "notes",
)
"""The lists in results.json; a unit file holds its share of each, and of `couplings`."""

MANIFEST, RESULTS, COUPLINGS = "manifest.json", "results.json", "couplings.json"


RESERVED = ("controls", "failed", "epsilon-sweep", "beta-sweep")
"""Units of a seed that are no methods."""


def unit_path(run: Path, seed: int, name: str) -> Path:
    """The file of a finished unit of work."""
    return run / "units" / f"seed-{safe_name(str(seed))}" / f"{safe_name(name)}.json"


def handle_folder(run: Path, seed: int) -> Path:
    """The folder of a seed's handles."""
    return run / "handles" / f"seed-{safe_name(str(seed))}"


def handle_path(run: Path, seed: int, method: str, variable: str) -> Path:
    """The file of a handle."""
    return handle_folder(run, seed) / f"{safe_name(method)}.{safe_name(variable)}.safetensors"


def seed_folders(run: Path) -> list[tuple[int, Path]]:
    """The folders with units of each seed, in the seeds' order."""
    numbers = [(p.name.removeprefix("seed-"), p) for p in (run / "units").glob("seed-*")]
    return sorted((int(n), p) for n, p in numbers if n.isascii() and n.isdigit() and len(n) < 19 and not p.is_symlink())


def refuse_links(run: Path) -> None:
    """Refuse to write through a link: what a run writes stays in its directory."""
    for name in ("units", "handles", "figures", "superseded", MANIFEST, RESULTS, COUPLINGS):
        if (run / name).is_symlink():
            raise PlotError(f"{run / name} is a symbolic link. A run writes into its own directory only: remove it.")


def safe_name(name: str) -> str:
    """A name as part of a file name: distinct names stay distinct, and none leaves its directory."""
    kept = "".join(c if (c.isascii() and c.isalnum()) or c in "-_" else "_" for c in name[:60])
    return kept if kept == name else f"{kept}-{hashlib.sha256(name.encode('utf-8', 'replace')).hexdigest()[:8]}"
