"""Digests of what is written, and seals: a file that says what its content was notices when it is no longer that.

A seal is against damage and slips of the hand. Who changes a file on purpose can make a new seal.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from plot_ot.files.safe_reading import read_bytes
from plot_ot.files.writing import Json, plain, to_json

SEAL = "seal"
"""The entry of a file that holds the digest of all the others."""
BROKEN = "it was changed after it was written"


def digest(value: object) -> str:
    """A digest of any value that can be written as JSON."""
    return hashlib.sha256(to_json(_sorted(plain(value))).encode("utf-8", "replace")).hexdigest()[:16]


def _sorted(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _sorted(value[k]) for k in sorted(value)}
    return [_sorted(v) for v in value] if isinstance(value, list) else value


def file_digest(path: Path) -> str:
    """SHA-256 of a file's bytes."""
    return hashlib.sha256(read_bytes(path)).hexdigest()


def sealed(value: Mapping[str, Any]) -> Json:
    """The value with its seal."""
    content = {k: v for k, v in value.items() if k != SEAL}
    return {**content, SEAL: digest(content)}


def is_sealed(value: Mapping[str, Any]) -> bool:
    """Whether the value has a seal, and is what was sealed."""
    return SEAL in value and value[SEAL] == digest({k: v for k, v in value.items() if k != SEAL})
