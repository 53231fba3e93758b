"""Numbers, lists and places in words, the same on the page and in the terminal."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from decimal import ROUND_HALF_UP, Decimal

KINDS = {
    "layer": "layer {0}",
    "h": "state h{0}",
    "block_output": "block {0}",
    "attention_output": "the attention of block {0}",
    "mlp_output": "the MLP of block {0}",
    "head_output": "head {1} of block {0}",
}
"""Kinds of places in words; the numbers are those in the place's name."""


def percent(x: float) -> str:
    """A share in per cent: whole numbers, tenths near the ends, and never 100 or 0 where some pairs differ."""
    x = round(x, 9)
    if 0 < x < 0.001:
        return "<0.1 %"
    if 0.999 < x < 1:
        return ">99.9 %"
    near = (0 < x < 0.02) or (0.98 < x < 1)
    digits = Decimal("0.1" if near else "1")
    return f"{Decimal(100 * x).quantize(digits, ROUND_HALF_UP)} %"  # as a browser rounds: the page has both


def count(n: int, word: str) -> str:
    """`1 seed`, `10 seeds`."""
    return f"{n:,} {word}{'' if n == 1 else 's'}"


def names(words: Sequence[str], joined: str = "and") -> str:
    """Join names into a phrase: `a, b and c`."""
    return f" {joined} ".join(filter(None, [", ".join(words[:-1]), words[-1]])) if words else ""


def place_words(place: str, tokens: Mapping[str, str] | None = None) -> str:
    """A place in words: `block_output.3@-1` is `block 3, last token`; a path goes from place to place."""
    if "->" in place:
        stops, _, around = place.partition(" around ")
        said = " to ".join(place_words(stop, tokens) for stop in stops.split("->"))
        return f"{said}, around {around}" if around else said
    stem, _, position = place.partition("@")
    kind = re.match(r"[A-Za-z_]*[A-Za-z]", stem)
    numbers_in = re.findall(r"\d+", stem)
    known = KINDS.get(kind[0] if kind else "")
    said = stem
    if known and len(numbers_in) == 1 + ("{1}" in known) and re.fullmatch(r"[A-Za-z_]+[\d.]*", stem):
        said = known.format(*numbers_in)
    token = (tokens or {}).get(place, "last token" if position == "-1" else position)
    return f"{said}, {token}" if token else said
