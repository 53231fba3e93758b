"""Taps: where in a module's forward pass a place is, and how its vector is taken out and put back.

A tap is written as a path, with what is wanted of it behind:

    blocks.1.mlp               what the submodule puts out
    cell#2                     in its third run within a forward pass
    blocks.1.mlp:input         what it is called with
    attn.out:input[8:16]       some columns of it; [1/4] is the second of four equal parts, as an attention head is
    blocks.1:input + blocks.1.attn
                               a sum; the last summand is rewritten so that the sum becomes what it should be
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from plot_ot.errors import PlotError, unknown

Position = int | tuple[int, ...] | slice | Callable[[Tensor], "Int[Tensor, ' rows']"] | None
"""Where in what a module takes or gives a place is; see `ModuleSubject`."""
Look = Callable[[Tensor], Tensor]
"""What is done with a tensor that passes by: it goes on as what comes back."""

_END = re.compile(r"^(?P<sides>.*?)\[(?P<low>\d+)(?P<kind>[:/])(?P<high>\d+)\]$")
_SIDE = re.compile(r"^(?P<path>.*?)(?:#(?P<run>[^#:]*))?(?::(?P<side>[^#:]*))?$")


@dataclass(frozen=True)
class Side:
    """What a submodule puts out, or is called with, in one of its runs within a forward pass."""

    module: nn.Module
    run: int | None = None
    """None where it runs once."""
    before: bool = False
    """Whether it is what the module is called with."""

    def hook(self, name: str, look: Look, acts: Callable[[], bool], runs: dict[Side, int]) -> Any:
        """Show what passes by to `look` while `acts` says so; a handle to remove the hook with."""

        def passing(value: Any) -> Any:
            run, runs[self] = runs.get(self, 0), runs.get(self, 0) + 1
            if self.run not in (None, run):
                return value
            whole = value[0] if isinstance(value, tuple) and value else value
            if not isinstance(whole, Tensor):
                what = "is called with" if self.before else "outputs"
                raise PlotError(f"Place '{name}' {what} {type(whole).__name__}; a place must be a tensor.")
            if whole.is_nested:
                raise PlotError(
                    f"Place '{name}' is a nested tensor, whose rows differ in length: build the encoder with "
                    f"enable_nested_tensor=False, or call it without a padding mask."
                )
            new = look(whole)
            return value if new is whole else (new, *value[1:]) if isinstance(value, tuple) else new

        def after(_: nn.Module, __: Any, output: Any) -> Any:
            return passing(output) if acts() else None

        def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if not acts():
                return None
            if args:
                return passing(args), kwargs
            first = next((k for k, v in kwargs.items() if isinstance(v, Tensor)), None)
            return args, kwargs if first is None else kwargs | {first: passing(kwargs[first])}

        if self.before:
            return self.module.register_forward_pre_hook(before, with_kwargs=True)
        return self.module.register_forward_hook(after)


@dataclass(frozen=True)
class Tap:
    """A place: a side of a submodule or a sum of several, where in it, and which columns."""

    sides: tuple[Side, ...]
    position: Position = None
    columns: slice | tuple[int, int] | None = None
    """Columns low:high, or part k of n."""

    @property
    def module(self) -> nn.Module:
        """The submodule that is hooked to rewrite it."""
        return self.sides[-1].module

    @property
    def run(self) -> int | None:
        """Which run of that submodule; None where it runs once."""
        return self.sides[-1].run

    @property
    def is_output(self) -> bool:
        """Whether it is what one submodule puts out, all columns of it."""
        return len(self.sides) == 1 and not self.sides[0].before and self.columns is None

    def open(self, name: str, look: Look, acts: Callable[[], bool], runs: dict[Side, int]) -> list[Any]:
        """Hooks that show `look` the tensor of the place, and put back what it gives; handles to remove them with."""
        *earlier, last = self.sides
        kept: dict[Side, Tensor] = {}

        def keep(side: Side) -> Look:
            def pass_on(whole: Tensor) -> Tensor:
                kept[side] = whole
                return whole

            return pass_on

        def rewrite(part: Tensor) -> Tensor:
            whole = part
            for side in earlier:
                if side not in kept or kept[side].shape != part.shape:
                    found = f"of shape {tuple(kept[side].shape)}" if side in kept else "not there yet"
                    raise PlotError(
                        f"Place '{name}' is a sum whose last summand has shape {tuple(part.shape)}, but another is "
                        f"{found}: name tensors that the network adds up, the last to be computed last."
                    )
                whole = whole + kept[side]
            new = look(whole)
            return part if new is whole else new if whole is part else part + (new - whole)

        return [s.hook(name, keep(s), acts, runs) for s in earlier] + [last.hook(name, rewrite, acts, runs)]

    def edited(self, name: str, whole: Tensor, rewrite: Look, rows: Tensor | None) -> Tensor:
        """The tensor with the place's vectors [rows, d] rewritten; itself where nothing changes."""
        if self.position is None and self.columns is None:
            vector = whole.flatten(1)
            new = rewrite(vector)
            return whole if new is vector else new.reshape(whole.shape)
        at = (slice(None),) if self.position is None else index_of(name, self.position, whole, rows)
        part = whole[at]
        if self.columns is not None:
            chosen = self._columns(name, part)
            at, part = (*at, ..., chosen), part[..., chosen]
        vector = part.flatten(1)
        new = rewrite(vector)
        if new is vector:
            return whole
        changed = whole.clone()
        changed[at] = new.view_as(part)
        return changed

    def _columns(self, name: str, part: Float[Tensor, "rows ..."]) -> slice:
        width = part.shape[-1]
        if isinstance(self.columns, slice):
            if not 0 <= self.columns.start < self.columns.stop <= width:
                found = f"{self.columns.start}:{self.columns.stop}"
                raise PlotError(f"Place '{name}' has {width} columns; found [{found}].")
            return self.columns
        assert self.columns is not None  # noqa: S101
        k, of = self.columns
        if not 0 <= k < of or width % of:
            raise PlotError(
                f"Place '{name}' has {width} columns, of which [{k}/{of}] is no part: equal parts are [0/n] to [n-1/n]."
            )
        return slice(k * width // of, (k + 1) * width // of)


# -- reading a tap -----------------------------------------------------------------------------------------------


def read_tap(text: str, known: Mapping[str, nn.Module], position: Position) -> Tap:
    """The tap that a text stands for, in a network with the `known` submodules."""
    _refuse_position(text, position)
    if text in known:
        return Tap((Side(known[text]),), position)
    columns: slice | tuple[int, int] | None = None
    if end := _END.match(text):
        text, low, high = end["sides"], int(end["low"]), int(end["high"])
        columns = slice(low, high) if end["kind"] == ":" else (low, high)
    return Tap(tuple(_side(part.strip(), known) for part in text.split("+")), position, columns)


def _side(text: str, known: Mapping[str, nn.Module]) -> Side:
    found = _SIDE.match(text)
    path, run, side = (found["path"], found["run"], found["side"]) if found else (text, None, None)
    if not path or path not in known:
        unknown("submodule", path, [n for n in known if n])
    if run is not None and not run.isdigit():
        raise PlotError(f"'{text}' does not name a run of '{path}': write a number, '{path}#0' for the first.")
    if side not in (None, "input", "output"):
        raise PlotError(f"'{text}': what of '{path}'? Write '{path}:input', or '{path}' alone for its output.")
    return Side(known[path], None if run is None else int(run), side == "input")


def _refuse_position(text: str, position: Position) -> None:
    pixel = isinstance(position, tuple) and all(isinstance(k, int) for k in position)
    run = isinstance(position, slice) and position.step in (None, 1)
    if not (position is None or isinstance(position, int) or pixel or run or callable(position)):
        raise PlotError(
            f"The position of '{text}' is {position!r}; expected an index, slice(first, last + 1), a tuple (y, x), a "
            f"function of rows, or one list of indices for all places."
        )


def crossed(paths: Mapping[str, str], at: Sequence[int]) -> tuple[dict[str, str], dict[str, Position]]:
    """Every place at every one of some indices, by names such as `block@3`."""
    if not at or len(set(at)) < len(at) or not all(isinstance(k, int) and not isinstance(k, bool) for k in at):
        raise PlotError(f"A list of positions holds different whole numbers, at least one; found {list(at)}.")
    found = {f"{name}@{k}": (path, k) for name, path in paths.items() for k in at}
    return {name: path for name, (path, _) in found.items()}, {name: k for name, (_, k) in found.items()}


def index_of(name: str, position: Position, whole: Tensor, rows: Tensor | None) -> tuple[Any, ...]:
    """An index into what a module takes or gives."""
    if callable(position):
        if rows is None or len(rows) != len(whole):
            known = "none" if rows is None else f"{len(rows)}"
            raise PlotError(
                f"The position of '{name}' is a function of the input rows, and {known} are known for the "
                f"{len(whole)} rows that run: give them as `base`."
            )
        index = torch.as_tensor(position(rows)).long()
        if index.shape != (len(whole),):
            raise PlotError(
                f"The position of '{name}' must be one index for each of {len(whole)} rows; found shape "
                f"{tuple(index.shape)}."
            )
        low, high = int(index.min()), int(index.max())  # before it moves: rows are on the CPU
        at = torch.arange(len(whole), device=whole.device), index.to(whole.device)
        inside = whole.ndim >= 3 and -whole.shape[1] <= low <= high < whole.shape[1]
    elif isinstance(position, tuple):
        at = (slice(None), slice(None), *position)  # type: ignore[assignment]
        sizes = whole.shape[2:]
        inside = len(sizes) == len(position) and all(-n <= k < n for k, n in zip(position, sizes, strict=True))
    elif isinstance(position, slice):
        at = (slice(None), position)  # type: ignore[assignment]
        ends = [k for k in (position.start, position.stop) if k is not None]
        inside = whole.ndim >= 3 and all(-whole.shape[1] <= k <= whole.shape[1] for k in ends)
        inside = inside and len(range(*position.indices(whole.shape[1]))) > 0
    else:
        at = (slice(None), position)  # type: ignore[assignment]
        inside = whole.ndim >= 3 and position is not None and -whole.shape[1] <= position < whole.shape[1]
    if not inside:
        shown = f"{low}..{high}" if callable(position) else position
        raise PlotError(f"Place '{name}' outputs {tuple(whole.shape)}: it has no position {shown}.")
    return at
