"""Weights that accelerate keeps on disk or in another memory until their module runs (`device_map`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from plot_ot.errors import PlotError


def working_device(module: nn.Module) -> torch.device:
    """Where a module with a weight runs."""
    return _known_device(module) or torch.device("cpu")


def carried_to(module: nn.Module, x: Tensor) -> Tensor:
    """What a module is given, on the device where it runs; unmoved where it has no weights to tell."""
    device = _known_device(module)
    return x if device is None else x.to(device)


def _known_device(module: nn.Module) -> torch.device | None:
    weight = getattr(module, "weight", None)
    if isinstance(weight, Tensor) and weight.device.type != "meta":
        return weight.device
    found = next((h.execution_device for h in _hooks(module)), None)
    return None if found is None else torch.device(found)


class ModelWeights(Mapping[str, Tensor]):
    """A model's parameters and persistent buffers by name, tied ones once; what is offloaded is loaded when read."""

    def __init__(self, model: nn.Module) -> None:
        kept: dict[Any, tuple[str, Tensor]] = {}
        for name, tensor in reversed(model.state_dict().items()):
            offloaded = tensor.device.type == "meta"  # accelerate never offloads tied weights
            kept[name if offloaded else (tensor.data_ptr(), tensor.shape)] = name, tensor
        self._model, self._tensors = model, dict(kept.values())

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __getitem__(self, name: str) -> Tensor:
        tensor = self._tensors[name]
        if tensor.device.type != "meta":
            return tensor
        path, _, local = name.rpartition(".")
        for hook in _hooks(self._model.get_submodule(path)):
            if hook.weights_map is not None:
                return torch.as_tensor(hook.weights_map[local])
        raise PlotError(f"The weight {name} is nowhere: the model was made on the 'meta' device. Load its weights.")


def _hooks(module: nn.Module) -> list[Any]:
    """Accelerate's hooks of a module that know where it runs and where its weights are."""
    hook = getattr(module, "_hf_hook", None)
    return [h for h in getattr(hook, "hooks", (hook,)) if hasattr(h, "execution_device") and hasattr(h, "weights_map")]
