"""What others keep in files of torch.save: orthogonal layers, and the tensors that they are made of."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.utils.parametrizations import orthogonal


def to_bytes(value: Any) -> bytes:
    """The bytes that torch.save writes for a value."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


class RotateLayer(nn.Module):
    """Orthonormal columns [d, k] behind torch's orthogonal parametrization: what pyvene and CausalAbstraction save."""

    weight: Tensor

    def __init__(self, basis: Float[Tensor, "d k"]) -> None:
        super().__init__()
        self.weight = nn.Parameter(basis.detach().float().cpu().clone(memory_format=torch.contiguous_format))
        orthogonal(self)

    def forward(self, a: Float[Tensor, "*rows d"]) -> Float[Tensor, "*rows k"]:
        return a.to(self.weight.dtype) @ self.weight


def rotation_in(state: Mapping[str, Tensor], prefix: str, width: int) -> Float[Tensor, "d k"]:
    """The orthonormal columns that a saved layer's parameters stand for."""
    inside = {name[len(prefix) :]: t for name, t in state.items() if name.startswith(prefix)}
    plain, original = inside.get("weight"), inside.get("parametrizations.weight.original")
    found = tensor_of(original if plain is None else plain, f"{prefix}weight")
    if found.ndim != 2 or found.shape[0] != width or not 1 <= found.shape[1] <= width:
        raise ValueError(f"a rotation of shape {tuple(found.shape)} at a place of width {width}")
    basis = found
    if plain is None:
        layer = RotateLayer(torch.eye(*found.shape))
        layer.load_state_dict({name: tensor_of(t, prefix + name) for name, t in inside.items()})
        basis = layer.weight.detach()
    error = float((basis.T @ basis - torch.eye(basis.shape[1])).abs().max())
    if not error < 1e-3:
        raise ValueError(f"its columns are not orthonormal (off by {error:.2g})")
    return basis


def tensor_of(value: Any, name: str, shape: tuple[int, ...] | None = None) -> Tensor:
    """A finite, plain tensor of floats, or a ValueError."""
    if not isinstance(value, Tensor) or value.layout != torch.strided or value.device.type == "meta":
        raise ValueError(f"no tensor {name}")
    if not value.is_floating_point() or value.numel() * value.element_size() > value.untyped_storage().nbytes():
        raise ValueError(f"{name} is not a tensor of floats that is all there")
    if shape is not None and tuple(value.shape) != shape:
        raise ValueError(f"{name} of shape {tuple(value.shape)}, not {shape}")
    plain: Tensor = value.detach().cpu().float().clone(memory_format=torch.contiguous_format)
    if not bool(torch.isfinite(plain).all()):
        raise ValueError(f"NaN or infinity in {name}")
    return plain


def most_bytes(width: int) -> int:
    """A bound on a featurizer's file: twice what any linear one of a vector of this width takes in float64."""
    return 4 * 8 * width * width + (1 << 20)
