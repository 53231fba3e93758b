"""An `nn.Sequential` of any layers as a subject: an edit after layer ℓ runs only the layers after ℓ."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from plot_ot.errors import PlotError, unknown
from plot_ot.subjects.module import ModuleSubject, named_paths
from plot_ot.subjects.places import Place
from plot_ot.subjects.protocol import Rewrite, Store, Subject, frozen
from plot_ot.subjects.shape import Shape


class SequentialSubject(ModuleSubject):
    """Like `ModuleSubject`, with direct children of the network as places, each whole: convolutions, norms, pooling.

    Use it where the forward pass is nothing but one child after the other, and `ModuleSubject` for everything else.
    """

    cache = 2 << 20  # a core's second-level cache
    response_bytes = Subject.response_bytes  # only the later layers run, one after the other

    def __init__(
        self,
        net: nn.Sequential,
        places: Sequence[str] | Mapping[str, str],
        example: Tensor,
        *,
        encode: Callable[[Tensor], Any] | None = None,
        output: Callable[[Any], Tensor] | None = None,
    ) -> None:
        if type(net).forward is not nn.Sequential.forward:
            raise PlotError(f"SequentialSubject needs an nn.Sequential; found {type(net).__name__}. Use ModuleSubject.")
        paths = named_paths(places)
        children = [name for name, _ in net.named_children()]
        for path in paths.values():
            if path not in children:
                unknown("child of the network", path, children)
        super().__init__(net, paths, example, encode=encode, output=output)
        self._later = {name: list(net)[children.index(path) + 1 :] for name, path in paths.items()}
        self._shapes = self._shapes_at(example)

    def shape(self, outputs: int) -> Shape:
        after = tuple(len(self._later[p.name]) for p in self.places)
        blocks = len(list(self.module.children()))
        return Shape.small(type(self).__name__, self.places, after, blocks, self.parameters, outputs)

    def resume(
        self, store: Store, rows: Tensor, start: Place, activation: Tensor, later: Mapping[str, Rewrite]
    ) -> Tensor:
        shape = activation.shape[:2]

        def each(rewrite: Rewrite) -> Callable[[Tensor], Tensor]:
            return lambda a: rewrite(a.unflatten(0, shape)).flatten(0, 1)

        x = activation.reshape(-1, *self._shapes[start.name]).clone()  # what follows may work in place
        with frozen(self.module), self.intervene({name: each(rewrite) for name, rewrite in later.items()}):
            for layer in self._later[start.name]:
                x = layer(x)
        outputs: Tensor = self.output(x).unflatten(0, shape)
        return outputs

    def _shapes_at(self, example: Tensor) -> dict[str, torch.Size]:
        """What the activations of one input look like at every place."""
        found: dict[str, torch.Size] = {}
        hooks = []
        for name, tap in self._taps.items():

            def note(_: nn.Module, __: Any, output: Any, name: str = name) -> None:
                if not isinstance(output, Tensor):
                    raise PlotError(f"Place '{name}' outputs {type(output).__name__}; use ModuleSubject for it.")
                found[name] = output.shape[1:]

            hooks.append(tap.module.register_forward_hook(note))
        try:
            with torch.no_grad():
                self._outputs(example[:1])
        finally:
            for hook in hooks:
                hook.remove()
        return found
