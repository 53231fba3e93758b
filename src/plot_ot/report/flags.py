"""What the couplings of a run are flagged with, read back from its files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from plot_ot.files.writing import Json
from plot_ot.transport import Degeneracy, Flag

KINDS = {kind.value: kind for kind in Degeneracy}


def flags_of(row: Json) -> list[Flag]:
    """The flags of a stored coupling or sweep; what is not a flag is left out."""
    flags = row.get("flags")
    known = [f for f in flags if isinstance(f, dict) and f.get("kind") in KINDS] if isinstance(flags, list) else []
    return [Flag(KINDS[f["kind"]], str(f.get("detail") or "")) for f in known]


def kinds_of(row: Json) -> list[Degeneracy]:
    """Each kind of flag of a stored coupling or sweep once."""
    return list(dict.fromkeys(f.kind for f in flags_of(row)))


def flag_counts(couplings: Sequence[Json]) -> list[tuple[Degeneracy, str, int, int]]:
    """(flag, method, couplings with it, couplings of the method), most frequent first."""
    totals = Counter(c["method"] for c in couplings)
    found = Counter((kind, c["method"]) for c in couplings for kind in kinds_of(c))
    rows = [(kind, method, n, totals[method]) for (kind, method), n in found.items()]
    return sorted(rows, key=lambda r: (-r[2] / r[3], r[0]))
