"""Any `nn.Module` as a subject, by forward hooks and a full forward pass: always right, the oracle for fast ones."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from plot_ot.errors import PlotError, unknown
from plot_ot.subjects.base import Place, Rewrite, Store, Subject, frozen


class ModuleSubject(Subject):
    """`places` names submodules by their dotted path, or maps names of your own to such paths.

    The activation of a place is its submodule's output (the first entry of a tuple): [rows, d] as it is,
    [rows, positions, d] at `position`, any other shape flattened to [rows, d]. `encode` turns the bank's input rows
    into what the module is called with; `readout` turns what it returns into a tensor of outputs.
    """

    def __init__(
        self,
        module: nn.Module,
        places: Sequence[str] | Mapping[str, str],
        example: Tensor,
        *,
        position: int | None = None,
        encode: Callable[[Tensor], Any] | None = None,
        readout: Callable[[Any], Tensor] | None = None,
    ) -> None:
        self.module = module
        self.position = position
        self.encode = encode or self._as_floats
        self.readout = readout or _plain_tensor
        paths = dict(places) if isinstance(places, Mapping) else {p: p for p in places}
        if not paths:
            raise PlotError("A subject needs at least one place; name the submodules to look at.")
        known = dict(module.named_modules())
        for path in paths.values():
            if path not in known:
                unknown("submodule", path, [n for n in known if n])
        self._modules = {name: known[path] for name, path in paths.items()}
        self.places = self._trace(example)

    def _trace(self, example: Tensor) -> tuple[Place, ...]:
        """Order and widths of the places, as the forward pass meets them."""
        widths: dict[str, int] = {}

        def note(name: str) -> Callable[[Tensor], Tensor]:
            def look(activation: Tensor) -> Tensor:
                if name in widths:
                    raise PlotError(
                        f"Place '{name}' runs more than once per forward pass; name a module that runs once."
                    )
                widths[name] = activation.shape[1]
                return activation

            return look

        with self.intervene({n: note(n) for n in self._modules}):
            self._outputs(example[:1])
        silent = [n for n in self._modules if n not in widths]
        if silent:
            raise PlotError(f"These places never ran in the forward pass: {', '.join(silent)}.")
        return tuple(Place(n, w, k + 1, self.position) for k, (n, w) in enumerate(widths.items()))

    # -- Subject -----------------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        return next((t.device for t in self.weights().values()), torch.device("cpu"))

    def weights(self) -> Mapping[str, Tensor]:
        return self.module.state_dict()

    @property
    def response_bytes(self) -> int:
        # a full forward keeps more alive than its places show
        return 4 * 4 * sum(p.width for p in self.places)

    def record(self, inputs: Tensor, bases: Tensor | None = None) -> Store:
        kept: dict[str, list[Tensor]] = {n: [] for n in self._modules}

        def keep(name: str) -> Callable[[Tensor], Tensor]:
            def look(activation: Tensor) -> Tensor:
                kept[name].append(activation.clone())
                return activation

            return look

        outputs = []
        with torch.no_grad(), self.intervene({n: keep(n) for n in self._modules}):
            for chunk in inputs.split(self.responses_per_batch):
                outputs.append(self._outputs(chunk))
        return Store(inputs, {n: torch.cat(a) for n, a in kept.items()}, torch.cat(outputs))

    def resume(
        self, store: Store, rows: Tensor, start: Place, activation: Tensor, later: Mapping[str, Rewrite]
    ) -> Tensor:
        variants, pairs, _ = activation.shape

        def per_variant(rewrite: Rewrite) -> Callable[[Tensor], Tensor]:
            return lambda a: rewrite(a.unflatten(0, (variants, pairs))).flatten(0, 1)

        rewrites = {name: per_variant(rewrite) for name, rewrite in later.items()}
        rewrites[start.name] = lambda _: activation.flatten(0, 1)
        inputs = store.inputs[rows.to(store.inputs.device)].repeat(variants, *[1] * (store.inputs.ndim - 1))
        with self.intervene(rewrites):
            return self._outputs(inputs).unflatten(0, (variants, pairs))

    @contextlib.contextmanager
    def intervene(self, rewrites: Mapping[str, Callable[[Tensor], Tensor]]) -> Iterator[None]:
        hooks = [
            self._modules[name].register_forward_hook(self._hook(name, rewrite)) for name, rewrite in rewrites.items()
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    # -- parts -------------------------------------------------------------------------------------------

    def _outputs(self, inputs: Tensor) -> Tensor:
        encoded = self.encode(inputs)
        with frozen(self.module):
            return self.readout(self.module(encoded))

    def _as_floats(self, rows: Tensor) -> Tensor:
        floats = (t.dtype for t in self.weights().values() if t.is_floating_point())
        return rows.to(self.device, next(floats, torch.get_default_dtype()))

    def _hook(self, name: str, rewrite: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
        def hook(_: nn.Module, __: Any, output: Any) -> Any:
            whole = output[0] if isinstance(output, tuple) else output
            if not isinstance(whole, Tensor):
                raise PlotError(f"Place '{name}' outputs {type(whole).__name__}; a place must output a tensor.")
            if self.position is None:
                edited = rewrite(whole.flatten(1)).reshape(whole.shape)
            else:
                if whole.ndim != 3 or not -whole.shape[1] <= self.position < whole.shape[1]:
                    raise PlotError(f"Place '{name}' outputs {tuple(whole.shape)}: it has no position {self.position}.")
                vector = whole[:, self.position]
                new = rewrite(vector)
                if new is vector:
                    return output
                edited = whole.clone()
                edited[:, self.position] = new
            return (edited, *output[1:]) if isinstance(output, tuple) else edited

        return hook


def _plain_tensor(output: Any) -> Tensor:
    value = getattr(output, "logits", output[0] if isinstance(output, tuple) else output)
    if not isinstance(value, Tensor):
        raise PlotError(
            f"The module returns {type(value).__name__}; pass `readout` to turn it into a tensor of outputs."
        )
    return value
