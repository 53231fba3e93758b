"""Any `nn.Module` as a subject, by forward hooks and a full forward pass: always right, the oracle for fast ones."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn

from plot_ot.errors import PlotError, unknown
from plot_ot.subjects.memory import sent
from plot_ot.subjects.open_edits import OpenEdit, Rewrites, opened
from plot_ot.subjects.places import Place
from plot_ot.subjects.protocol import Rewrite, Store, Subject, frozen

Position = int | tuple[int, ...] | Callable[[Tensor], "Int[Tensor, ' rows']"] | None
"""Where in a module's output a place is; see `ModuleSubject`."""


@dataclass(frozen=True)
class Tap:
    """A place: a submodule, which of its runs within a forward pass, and where in its output."""

    module: nn.Module
    run: int | None
    """None where it runs once."""
    position: Position


class ModuleSubject(Subject):
    """`places` names submodules by their dotted path, or maps names of your own to such paths.

    The activation of a place is its submodule's output (the first entry of a tuple), rows first, flattened to
    [rows, d]. Of a submodule that runs several times in a forward pass, as a recurrent cell does, `path#2` is the third
    run. `position`, one for all places or a mapping from places, picks a part of an output [rows, n, ...]: the index
    of a token (or channel, or timestep) along its second dimension, or a function from input rows to such indices,
    which finds it separately in every base and source; of images [rows, channels, height, width] a tuple (y, x) is the
    channels' vector at a pixel. A list of indices crosses all places with them: `path@0`, `path@1`, ... each a place.

    `encode` turns the bank's input rows into what the module is called with (a mapping into keyword arguments), which
    is moved to the device of its weights; `output` turns what it returns into a tensor of outputs.
    """

    def __init__(
        self,
        module: nn.Module,
        places: Sequence[str] | Mapping[str, str],
        example: Tensor,
        *,
        position: Position | list[int] | range | Mapping[str, Position] = None,
        encode: Callable[[Tensor], Any] | None = None,
        output: Callable[[Any], Tensor] | None = None,
    ) -> None:
        self.module = module
        self.encode = encode or self._as_floats
        self.output = output or _plain_tensor
        paths = dict(places) if isinstance(places, Mapping) else {p: p for p in places}
        if not paths:
            raise PlotError("A subject needs at least one place; name the submodules to look at.")
        if isinstance(position, (list, range)):
            paths, positions = _crossed(paths, position)
        else:
            same: dict[str, Position] = {} if isinstance(position, Mapping) else dict.fromkeys(paths, position)
            positions = dict(position) if isinstance(position, Mapping) else same
        for name in positions:
            if name not in paths:
                unknown("place with a position", name, list(paths))
        known = dict(module.named_modules())
        self._taps = {name: _tap(path, known, positions.get(name)) for name, path in paths.items()}
        self._rows: Tensor | None = None
        self.places = self._trace(example)

    def _trace(self, example: Tensor) -> tuple[Place, ...]:
        """Order and widths of the places, as the forward pass meets them."""
        widths: dict[str, int] = {}

        def note(name: str) -> Callable[[Tensor], Tensor]:
            def look(activation: Tensor) -> Tensor:
                if name in widths:
                    raise PlotError(
                        f"Place '{name}' runs more than once per forward pass; name a module that runs once, or one "
                        f"of its runs as 'path#0', 'path#1', ..."
                    )
                if len(activation) != 1:
                    raise PlotError(
                        f"Place '{name}' outputs {len(activation)} rows for one input: the rows must come first (a "
                        f"recurrent layer needs batch_first=True)."
                    )
                widths[name] = activation.shape[1]
                return activation

            return look

        with torch.no_grad(), self.intervene({n: note(n) for n in self._taps}):
            self._outputs(example[:1])
        silent = [n for n in self._taps if n not in widths]
        if silent:
            raise PlotError(f"These places never ran in the forward pass: {', '.join(silent)}.")
        indices = {n: p if isinstance(p := tap.position, int) else tap.run for n, tap in self._taps.items()}
        return tuple(Place(n, w, k + 1, indices[n]) for k, (n, w) in enumerate(widths.items()))

    # -- Subject -----------------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        held = chain(self.module.parameters(), self.module.buffers())
        return next((t.device for t in held), torch.device("cpu"))

    def weights(self) -> Mapping[str, Tensor]:
        return self.module.state_dict()

    def structure(self) -> str:
        return repr(self.module)

    @property
    def response_bytes(self) -> int:
        # a full forward keeps more alive than its places show
        return 4 * 4 * sum(p.width for p in self.places)

    def record(self, inputs: Tensor, bases: Tensor | None = None) -> Store:
        return self.record_in_chunks(inputs, self._recorded)

    def resume(
        self, store: Store, rows: Tensor, start: Place, activation: Tensor, later: Mapping[str, Rewrite]
    ) -> Tensor:
        variants, pairs, _ = activation.shape

        def per_variant(rewrite: Rewrite) -> Callable[[Tensor], Tensor]:
            return lambda a: rewrite(a.unflatten(0, (variants, pairs))).flatten(0, 1)

        rewrites = {name: per_variant(rewrite) for name, rewrite in later.items()}
        rewrites[start.name] = lambda _: activation.flatten(0, 1)
        inputs = store.inputs[rows.to(store.inputs.device)]
        with self.intervene(rewrites):
            outputs: Tensor = self._outputs(inputs, variants).unflatten(0, (variants, pairs))
            return outputs

    def intervene(self, rewrites: Rewrites) -> contextlib.AbstractContextManager[OpenEdit]:
        return self._edited(rewrites, None)

    @contextlib.contextmanager
    def _edited(self, rewrites: Rewrites, base: Tensor | None) -> Iterator[OpenEdit]:
        for name in rewrites:
            if name not in self._taps:
                unknown("place", name, list(self._taps))
        runs = dict.fromkeys(rewrites, 0)

        def restart(*_: Any) -> None:
            if edit.acts():
                runs.update(dict.fromkeys(runs, 0))

        with opened(self.module) as edit, contextlib.ExitStack() as hooks:
            hooks.callback(self.module.register_forward_pre_hook(restart).remove)
            for name, rewrite in rewrites.items():
                hook = self._hook(name, rewrite, runs, edit, base)
                hooks.callback(self._taps[name].module.register_forward_hook(hook).remove)
            yield edit

    def live(
        self,
        rewrites: Rewrites,
        *,
        rows: int | None = None,
        base: Tensor | None = None,
        every_token: bool = False,
    ) -> contextlib.AbstractContextManager[OpenEdit]:
        """`base` are the input rows the module will be called with, for places that are elsewhere in every input."""
        moving = [name for name in rewrites if callable(self._taps[self.place(name).name].position)]
        if moving and base is None:
            raise PlotError(
                f"The live module does not know where {moving[0]} is in its inputs: give the input rows that it will "
                f"be called with as `base`."
            )
        super().live(rewrites, rows=rows, every_token=every_token)  # refuses what it does not do
        return self._edited(rewrites, base)

    # -- parts -------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _recorded(self, inputs: Tensor) -> Store:
        kept: dict[str, Tensor] = {}

        def keep(name: str) -> Callable[[Tensor], Tensor]:
            def look(activation: Tensor) -> Tensor:
                kept[name] = activation.clone()
                return activation

            return look

        with self.intervene({n: keep(n) for n in self._taps}):
            outputs = self._outputs(inputs)
        return Store(inputs, kept, outputs)

    def _outputs(self, inputs: Tensor, times: int = 1) -> Tensor:
        """What the module makes of the inputs, all of them so many times over."""
        given = moved(self.encode(inputs), self.device)
        encoded, before = _repeated(given, len(inputs), times), self._rows
        self._rows = _repeated(inputs, len(inputs), times)
        try:
            with frozen(self.module):
                made = self.output(self.module(**encoded) if isinstance(encoded, Mapping) else self.module(encoded))
                return made.unsqueeze(1) if made.ndim == 1 else made  # one number for every input
        finally:
            self._rows = before

    def _as_floats(self, rows: Tensor) -> Tensor:
        floats = (t.dtype for t in self.weights().values() if t.is_floating_point())
        return sent(rows, self.device, next(floats, torch.get_default_dtype()))

    def _hook(
        self,
        name: str,
        rewrite: Callable[[Tensor], Tensor],
        runs: dict[str, int],
        edit: OpenEdit,
        base: Tensor | None,
    ) -> Callable[..., Any]:
        tap = self._taps[name]

        def hook(_: nn.Module, __: Any, output: Any) -> Any:
            if not edit.acts():
                return None
            run, runs[name] = runs[name], runs[name] + 1
            if tap.run not in (None, run):
                return None
            whole = output[0] if isinstance(output, tuple) else output
            if not isinstance(whole, Tensor):
                raise PlotError(f"Place '{name}' outputs {type(whole).__name__}; a place must output a tensor.")
            if tap.position is None:
                edited = rewrite(whole.flatten(1)).reshape(whole.shape)
            else:
                at = _where(name, tap.position, whole, base if self._rows is None else self._rows)
                part = whole[at]
                vector = part.flatten(1)
                new = rewrite(vector)
                if new is vector:
                    return output
                edited = whole.clone()
                edited[at] = new.view_as(part)
            return (edited, *output[1:]) if isinstance(output, tuple) else edited

        return hook


def _where(name: str, position: Position, whole: Tensor, rows: Tensor | None) -> tuple[Any, ...]:
    """An index into a module's output."""
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
    else:
        at = (slice(None), position)  # type: ignore[assignment]
        inside = whole.ndim >= 3 and position is not None and -whole.shape[1] <= position < whole.shape[1]
    if not inside:
        shown = f"{low}..{high}" if callable(position) else position
        raise PlotError(f"Place '{name}' outputs {tuple(whole.shape)}: it has no position {shown}.")
    return at


def moved(encoded: Any, device: torch.device) -> Any:
    """What a network is called with, on its device; what is no tensor stays as it is."""
    if isinstance(encoded, Tensor):
        return sent(encoded, device)
    if isinstance(encoded, Mapping):
        return {name: moved(value, device) for name, value in encoded.items()}
    if isinstance(encoded, (tuple, list)):
        return type(encoded)(moved(value, device) for value in encoded)
    return encoded


def _repeated(encoded: Any, rows: int, times: int) -> Any:
    """What the module is called with, its rows so many times over: encoding may cost more than running."""
    if times == 1:
        return encoded
    if isinstance(encoded, Mapping):
        return {name: _repeated(value, rows, times) for name, value in encoded.items()}
    if isinstance(encoded, (tuple, list)):
        return type(encoded)(_repeated(value, rows, times) for value in encoded)
    if isinstance(encoded, Tensor) and encoded.ndim and len(encoded) == rows:
        return encoded.repeat(times, *[1] * (encoded.ndim - 1))
    return encoded


def _crossed(paths: Mapping[str, str], at: list[int] | range) -> tuple[dict[str, str], dict[str, Position]]:
    """Every place at every one of some indices, by names such as `block@3`."""
    if not at or len(set(at)) < len(at) or not all(isinstance(k, int) and not isinstance(k, bool) for k in at):
        raise PlotError(f"A list of positions holds different whole numbers, at least one; found {list(at)}.")
    crossed = {f"{name}@{k}": (path, k) for name, path in paths.items() for k in at}
    return {name: path for name, (path, _) in crossed.items()}, {name: k for name, (_, k) in crossed.items()}


def _tap(path: str, known: Mapping[str, nn.Module], position: Position) -> Tap:
    name, _, run = path.partition("#")
    if name not in known:
        unknown("submodule", name, [n for n in known if n])
    if run and not run.isdigit():
        raise PlotError(f"'{path}' does not name a run of '{name}': write a number, '{name}#0' for the first.")
    pixel = isinstance(position, tuple) and all(isinstance(k, int) for k in position)
    if not (position is None or isinstance(position, int) or pixel or callable(position)):
        raise PlotError(
            f"The position of '{path}' is {position!r}; expected an index, a tuple (y, x), a function of rows, or "
            f"one list of indices for all places."
        )
    return Tap(known[name], int(run) if run else None, position)


def _plain_tensor(output: Any) -> Tensor:
    value = getattr(output, "logits", output[0] if isinstance(output, tuple) else output)
    if not isinstance(value, Tensor):
        raise PlotError(
            f"The module returns {type(value).__name__}; pass `output` to turn it into a tensor of outputs."
        )
    return value
