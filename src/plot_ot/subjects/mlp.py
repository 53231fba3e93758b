"""A multilayer perceptron as a subject: an edit at layer ℓ runs only the layers after ℓ."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plot_ot.errors import PlotError
from plot_ot.subjects.module import ModuleSubject
from plot_ot.subjects.places import Place
from plot_ot.subjects.protocol import Rewrite, Store, Subject
from plot_ot.subjects.shape import Shape


class MLPSubject(ModuleSubject):
    """An `nn.Sequential` of linear layers and elementwise activations.

    Its places are the activations' outputs, `layer1`, `layer2`, ...: the post-activation hidden vectors h^[ℓ].
    """

    cache = 2 << 20  # a core's second-level cache
    response_bytes = Subject.response_bytes  # only the later layers run, one after the other

    def __init__(self, net: nn.Sequential, *, encode: Callable[[Tensor], Any] | None = None) -> None:
        _refuse_others(net)
        at = [k for k, layer in enumerate(net) if k and not isinstance(layer, nn.Linear) and k < len(net) - 1]
        if not at:
            raise PlotError("The network has no hidden activation to look at.")
        super().__init__(net, {f"layer{n + 1}": str(k) for n, k in enumerate(at)}, _example(net))
        if encode is not None:
            self.encode = encode
        self.net = net
        self._layers = list(net)
        self._index = {p.name: k for p, k in zip(self.places, at, strict=True)}

    def shape(self, outputs: int) -> Shape:
        n = len(self.places)
        after = tuple(range(n, 0, -1))
        return Shape.small(type(self).__name__, self.places, after, n + 1, self.parameters, outputs)

    def resume(
        self, store: Store, rows: Tensor, start: Place, activation: Tensor, later: Mapping[str, Rewrite]
    ) -> Tensor:
        shape = activation.shape[:2]
        at = {self._index[name]: rewrite for name, rewrite in later.items()}
        x, fresh = activation.flatten(0, 1), False
        for k, layer in enumerate(self._layers[self._index[start.name] + 1 :], self._index[start.name] + 1):
            x = _apply(layer, x, fresh and not x.requires_grad)
            fresh = isinstance(layer, nn.Linear)
            if k in at:
                x = at[k](x.unflatten(0, shape)).flatten(0, 1)
        outputs: Tensor = x.unflatten(0, shape)
        return outputs


_ELEMENTWISE = (
    nn.ReLU,
    nn.GELU,
    nn.SiLU,
    nn.Tanh,
    nn.Sigmoid,
    nn.ELU,
    nn.LeakyReLU,
    nn.Softplus,
    nn.Identity,
)


def _example(net: nn.Sequential) -> Tensor:
    first = net[0]
    return torch.zeros(1, first.in_features if isinstance(first, nn.Linear) else 0)


def _refuse_others(net: nn.Module) -> None:
    layers = list(net) if isinstance(net, nn.Sequential) else []
    strange = [type(layer).__name__ for layer in layers if not isinstance(layer, (nn.Linear, *_ELEMENTWISE))]
    if strange or not layers or not isinstance(layers[0], nn.Linear):
        found = f"layers {', '.join(strange)}" if strange else type(net).__name__
        raise PlotError(
            f"MLPSubject needs an nn.Sequential of Linear layers and elementwise activations; found {found}. "
            f"Any module can be loaded by load_subject(model, places=[...], example=rows[:1]), with the names of the "
            f"submodules to look at."
        )


def _apply(layer: nn.Module, x: Tensor, in_place: bool) -> Tensor:
    """The layer with its weights held fixed; `in_place` when nobody else sees x."""
    if isinstance(layer, nn.ReLU):
        return F.relu(x, inplace=in_place)
    if not isinstance(layer, nn.Linear):
        activated: Tensor = layer(x)
        return activated
    weight, bias = layer.weight.detach(), None if layer.bias is None else layer.bias.detach()
    if bias is not None and layer.out_features <= 4:
        # BLAS is several times faster on a wide product with few rows than on a tall one with few columns
        return torch.addmm(bias.unsqueeze(1), weight, x.T).T
    return F.linear(x, weight, bias)
