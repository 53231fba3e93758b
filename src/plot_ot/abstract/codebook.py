"""Plain Python values as integer codes, and back."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

from plot_ot.errors import PlotError


class Codebook:
    """Values by code, in the order they were first seen: a code never changes."""

    def __init__(self, key: Callable[[Any], Hashable] = lambda value: value) -> None:
        self.values: list[Any] = []
        self._key = key
        self._codes: dict[Hashable, int] = {}

    def __contains__(self, value: Any) -> bool:
        return self._key(value) in self._codes

    def code(self, value: Any) -> int:
        """The value's code, a new one for a new value."""
        code = self._codes.setdefault(self._key(value), len(self.values))
        if code == len(self.values):
            self.values.append(value)
        return code


def typed(value: Any) -> Hashable:
    """Inputs that are equal but written differently (1, 1.0, True) make different prompts."""
    return type(value), tuple(map(typed, value)) if isinstance(value, tuple) else value


def plain(value: Any, where: str) -> Any:
    """An input as plain Python: NumPy and torch values become Python's, lists become tuples; nothing missing."""
    if type(value).__module__.partition(".")[0] in ("numpy", "torch") and hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, list | tuple):
        return tuple(plain(v, where) for v in value)
    if value is None or type(value).__name__ in ("NAType", "NaTType") or (isinstance(value, float) and value != value):
        raise PlotError(f"{where} is missing (found {value}). Fill it in, or leave the input out.")
    if not isinstance(value, Hashable):
        raise PlotError(
            f"{where} is {value!r:.80} ({type(value).__name__}); an input must be a text, a number, or a list of these."
        )
    return value


def settled(value: Any, before: str, after: str) -> Any:
    """A function's value as something that can be told from others; the texts stand around it in an error."""
    if type(value).__module__ in ("numpy", "torch") and getattr(value, "ndim", None) == 0:
        value = value.item()
    try:
        hash(value)
    except TypeError as e:
        raise PlotError(
            f"{before} {value!r:.80} ({type(value).__name__}) {after}; a value must be hashable, such as a number, a "
            f"string or a tuple."
        ) from e
    if value != value:
        raise PlotError(f"{before} NaN {after}, which equals nothing, not even itself.")
    return value


def listed(values: Sequence[Any], most: int = 20) -> str:
    """Values in an error message."""
    return ", ".join(repr(v) for v in values[:most]) + (f", ... ({len(values)} in all)" if len(values) > most else "")
