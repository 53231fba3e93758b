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


def with_type(value: Any) -> Hashable:
    """A value with its type: inputs that are equal but written differently (1, 1.0, True) make different prompts."""
    return type(value), tuple(map(with_type, value)) if isinstance(value, tuple) else value


def plain_input(value: Any, where: str) -> Any:
    """An input as plain Python: NumPy and torch values become Python's, lists become tuples; nothing missing."""
    if type(value).__module__.partition(".")[0] in ("numpy", "torch") and hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, list | tuple):
        return tuple(plain_input(v, where) for v in value)
    if value is None or type(value).__name__ in ("NAType", "NaTType") or (isinstance(value, float) and value != value):
        raise PlotError(f"{where} is missing (found {value}). Fill it in, or leave the input out.")
    if not isinstance(value, Hashable):
        raise PlotError(
            f"{where} is {value!r:.80} ({type(value).__name__}); an input must be a text, a number, or a list of these."
        )
    return value


def hashable_value(value: Any, before: str, after: str) -> Any:
    """A function's value, if it can be told from others; an error puts it between the texts `before` and `after`."""
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


def list_values(values: Sequence[Any], most: int = 20) -> str:
    """The values as a list for an error message, cut after `most`."""
    return ", ".join(repr(v) for v in values[:most]) + (f", ... ({len(values)} in all)" if len(values) > most else "")
