"""Any `nn.Module` as a subject, by forward hooks and a full forward pass: always right, the oracle for fast ones."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from plot_ot.errors import PlotError, unknown
from plot_ot.subjects.memory import sent
from plot_ot.subjects.open_edits import OpenEdit, Rewrites, opened
from plot_ot.subjects.places import Place
from plot_ot.subjects.protocol import Rewrite, Store, Subject, frozen
from plot_ot.subjects.taps import Look, Position, Side, crossed, read_tap


class ModuleSubject(Subject):
    """`places` names submodules by their dotted path, or maps names of your own to such paths.

    The activation of a place is its submodule's output (the first entry of a tuple), rows first, flattened to
    [rows, d]; `path:input` is what the submodule is called with. Of a submodule that runs several times in a forward
    pass, as a recurrent cell does, `path#2` is the third run. `path[8:16]` are some columns and `path[1/4]` the second
    of four equal parts, such as a head in the input of an output projection. `a:input + b` is a sum that the network
    makes, such as the residual in the middle of a block: `b`, computed last, is rewritten to rewrite the sum.

    `position`, one for all places or a mapping from places, picks a part of an activation [rows, n, ...]: the index
    of a token (or channel, or timestep) along its second dimension, a slice of several that are taken together, or a
    function from input rows to such indices, which finds it separately in every base and source; of images
    [rows, channels, height, width] a tuple (y, x) is the channels' vector at a pixel. A list of indices crosses all
    places with them: `path@0`, `path@1`, ... each a place.

    `encode` turns the bank's input rows into what the module is called with (a mapping into keyword arguments), which
    is moved to the device of its weights; without it rows are given as floats, or as whole numbers to a module that
    does not take floats, such as one that embeds tokens. `output` turns what it returns into a tensor of outputs.
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
        self.encode: Callable[[Tensor], Any] = encode or self._as_floats
        self.output = output or _plain_tensor
        paths = named_paths(places)
        if not isinstance(example, Tensor):
            raise PlotError(f"`example` is a tensor of input rows, such as rows[:1]; found {type(example).__name__}.")
        if not len(example):
            raise PlotError("`example` has no row: give one input or more, such as rows[:1].")
        if isinstance(position, (list, range)):
            paths, positions = crossed(paths, position)
        else:
            same: dict[str, Position] = {} if isinstance(position, Mapping) else dict.fromkeys(paths, position)
            positions = dict(position) if isinstance(position, Mapping) else same
        for name in positions:
            if name not in paths:
                unknown("place with a position", name, list(paths))
        known = dict(module.named_modules())
        self._taps = {name: read_tap(path, known, positions.get(name)) for name, path in paths.items()}
        self._rows: Tensor | None = None
        self.places = self._tried(example, {"as given by `encode`": encode} if encode else self._plain_ways(example))

    def _plain_ways(self, example: Tensor) -> dict[str, Callable[[Tensor], Any]]:
        """How rows may be given to the module where nobody says."""
        whole = not example.is_floating_point() or torch.equal(example, example.round())
        return {"as floats": self._as_floats} | ({"as whole numbers": lambda rows: rows.long()} if whole else {})

    def _tried(self, example: Tensor, ways: Mapping[str, Callable[[Tensor], Any]]) -> tuple[Place, ...]:
        """The places, found with the first way to give the example that the module can be run with."""
        failed = []
        for how, encode in ways.items():
            self.encode = encode
            try:
                return self._trace(example)
            except PlotError:
                raise
            except Exception as e:  # whatever the module raises
                failed.append(f"{how}: {type(e).__name__}, {str(e).splitlines()[0] if str(e) else 'no reason'}")
        raise PlotError(
            f"The module does not run on the first row of the example, whose shape is {tuple(example.shape)} ("
            f"{'; '.join(failed)}). Give input rows [rows, ...], and if the module is called with something else "
            f"`encode`, a function from rows to what it is called with."
        )

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
            outputs = self._outputs(example[:1])
        with torch.no_grad():
            _refuse_noise(outputs, self._outputs(example[:1]))
        silent = [n for n in self._taps if n not in widths]
        if silent:
            raise PlotError(
                f"These places never ran in the forward pass: {', '.join(silent)}. (A module that only holds weights, "
                f"as the out_proj of nn.MultiheadAttention does, is never called.)"
            )
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
        rewrites[start.name] = lambda _: activation.flatten(0, 1).clone()  # what follows may work in place
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
        counts: list[dict[Side, int]] = [{} for _ in rewrites]  # runs of every place's submodules in this pass

        def restart(*_: Any) -> None:
            if edit.acts():
                for runs in counts:
                    runs.clear()

        with opened(self.module) as edit, contextlib.ExitStack() as hooks:
            hooks.callback(self.module.register_forward_pre_hook(restart).remove)
            # sums come last, to add up what other places have rewritten
            by_sum = sorted(rewrites, key=lambda name: len(self._taps[name].sides) > 1)
            for name, runs in zip(by_sum, counts, strict=True):
                for hook in self._taps[name].open(name, self._editing(name, rewrites[name], base), edit.acts, runs):
                    hooks.callback(hook.remove)
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

    def _editing(self, name: str, rewrite: Callable[[Tensor], Tensor], base: Tensor | None) -> Look:
        """What a place does with the tensor that holds its vectors."""

        def edited(whole: Tensor) -> Tensor:
            rows = base if self._rows is None else self._rows
            return self._taps[name].edited(name, whole, rewrite, rows)

        return edited


def _refuse_noise(first: Tensor, again: Tensor) -> None:
    """Refuse a network that answers the same input differently from one run to the next."""
    differ, size = float((first.double() - again.double()).abs().max()), float(first.double().abs().max())
    if differ > 1e-3 * size:  # NaN is told elsewhere
        raise PlotError(
            f"The network answers the same input differently from one run to the next (by up to {differ:.3g}): no edit "
            f"can be told from its noise. Switch it off: random numbers in `forward`, or dropout that does not heed "
            f"`eval()`."
        )


def named_paths(places: Sequence[str] | Mapping[str, str]) -> dict[str, str]:
    """What each place is called: the submodule it is."""
    if isinstance(places, str):
        raise PlotError(f"`places` is a list of submodules' names; found one name. Write places=[{places!r}].")
    if not places:
        raise PlotError("A subject needs at least one place; name the submodules to look at.")
    if isinstance(places, Mapping):
        return dict(places)
    if twice := [p for p, count in Counter(places).items() if count > 1]:
        raise PlotError(f"`places` names {', '.join(map(repr, twice))} more than once; name each submodule once.")
    return {p: p for p in places}


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


def _plain_tensor(output: Any) -> Tensor:
    value = getattr(output, "logits", output[0] if isinstance(output, tuple) else output)
    if not isinstance(value, Tensor):
        key = next((k for k, v in value.items() if isinstance(v, Tensor)), None) if isinstance(value, Mapping) else None
        such = "" if key is None else f", such as output=lambda made: made[{key!r}]"
        raise PlotError(
            f"The module returns {type(value).__name__}; pass `output` to turn it into a tensor of outputs{such}."
        )
    return value
