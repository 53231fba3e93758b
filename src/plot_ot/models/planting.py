"""Interchange-intervention training: plant a hypothesis into a model that is being trained.

A plant says that a variable lives at the output of some blocks, in the whole vector or in some directions of it. The
loss then asks two things of the model: its own answers to base and source, and, with the planted activation of the base
run replaced by the source run's, the answer of the causal model under the same swap:

    L = CE(𝔑(x), y)  +  w · CE(𝔑(x^b; a <- a + F Fᵀ (a(x^s) - a)), 𝔠(x^b; Z <- Z(x^s)))

Gradients flow through both runs. Works on any Hugging Face causal LM, wrapped by peft or not.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from plot_ot.errors import PlotError, unknown


@dataclass(frozen=True)
class Plant:
    """A variable and the places it is planted at.

    `layers`: blocks by index, or modules by name; every step one of them is swapped. `position`: the token, counted
    from the end. `coordinates`: only these entries of the vector; `frame`: only this subspace (orthonormal columns).
    """

    variable: str
    layers: tuple[int | str, ...]
    position: int = -1
    coordinates: tuple[int, ...] | None = None
    frame: Float[Tensor, "d k"] | None = None

    def __post_init__(self) -> None:
        if not self.layers:
            raise PlotError(f"The plant of '{self.variable}' names no layer.")
        if self.position >= 0:
            raise PlotError(
                f"The plant of '{self.variable}' has position {self.position}: prompts are padded on the left, so "
                f"count from the end (-1 is the last token)."
            )
        if self.coordinates is not None and self.frame is not None:
            raise PlotError(f"The plant of '{self.variable}' has coordinates and a frame: give one of them.")

    def swap(self, base: Float[Tensor, "rows d"], source: Float[Tensor, "rows d"]) -> Float[Tensor, "rows d"]:
        """The base activation with the planted part taken from the source."""
        if self.frame is not None:
            basis = self.frame.to(base)
            return base + (source - base) @ basis @ basis.T
        if self.coordinates is not None:
            index = torch.tensor(self.coordinates, device=base.device)
            return base.index_copy(1, index, source.index_select(1, index).to(base.dtype))
        return source.to(base.dtype)


@dataclass(frozen=True)
class PlantBatch:
    """Pairs as tokens: bases first, then their sources, padded on the left to one length."""

    ids: Int[Tensor, "prompts tokens"]
    mask: Int[Tensor, "prompts tokens"]
    answers: Int[Tensor, " prompts"]
    """The token of every prompt's own answer."""
    labels: Mapping[str, Int[Tensor, " pairs"]]
    """variable -> the token that the base's answer becomes under its swap."""

    def __len__(self) -> int:
        return len(self.ids) // 2

    def to(self, device: torch.device | str) -> PlantBatch:
        """Move the batch to another device."""
        labels = {v: y.to(device) for v, y in self.labels.items()}
        return PlantBatch(self.ids.to(device), self.mask.to(device), self.answers.to(device), labels)


@dataclass(frozen=True)
class PlantLosses:
    """The losses of one step; `swaps` and `swapped_right` have one entry per plant, over the pairs of each."""

    total: Tensor
    answer: Tensor
    swaps: tuple[Tensor, ...]
    right: float
    """Share of own answers that are right, over the whole vocabulary."""
    swapped_right: tuple[float, ...]
    activations: Mapping[int | str, Float[Tensor, "prompts d"]]
    """The clean last-position activation at every planted layer, with its gradient: for losses of your own."""


def planted_loss(
    model: nn.Module,
    batch: PlantBatch,
    plants: Sequence[Plant],
    generator: torch.Generator,
    *,
    weight: float = 1.0,
) -> PlantLosses:
    """The loss above for one batch: one clean run of all prompts and one swapped run of the bases.

    The pairs are dealt to the plants in turn, and each plant draws one of its layers. Without plants it is plain
    training on answers.
    """
    for plant in plants:
        if plant.variable not in batch.labels:
            unknown("planted variable (the batch has no labels for it)", plant.variable, batch.labels)
    modules = {layer: planted_module(model, layer) for plant in plants for layer in plant.layers}
    positions = {(layer, plant.position) for plant in plants for layer in plant.layers}
    clean: dict[tuple[int | str, int], Tensor] = {}

    def keep(layer: int | str) -> Any:
        def hook(hidden: Tensor) -> Tensor:
            for position in {p for name, p in positions if name == layer}:
                clean[layer, position] = hidden[:, position]
            return hidden

        return hook

    with _rewriting({modules[layer]: [keep(layer)] for layer in modules}):
        logits = _last_logits(model, batch.ids, batch.mask)
    answer = F.cross_entropy(logits, batch.answers)
    swaps: list[Tensor] = []
    swapped_right: list[float] = []
    if plants:
        pairs = len(batch)
        rows = [torch.arange(k, pairs, len(plants), device=batch.ids.device) for k in range(len(plants))]
        hooks: dict[nn.Module, list[Any]] = {}
        for plant, own in zip(plants, rows, strict=True):
            layer = plant.layers[int(torch.randint(len(plant.layers), (1,), generator=generator))]
            source = clean[layer, plant.position][pairs:][own]
            hooks.setdefault(modules[layer], []).append(_swapping(plant, own, source))
        with _rewriting(hooks):
            swapped = _last_logits(model, batch.ids[:pairs], batch.mask[:pairs])
        for plant, own in zip(plants, rows, strict=True):
            label = batch.labels[plant.variable][own]
            swaps.append(F.cross_entropy(swapped[own], label))
            swapped_right.append(float((swapped[own].argmax(dim=1) == label).double().mean()))
    total = answer + weight * sum(swaps, torch.zeros_like(answer))
    right = float((logits.argmax(dim=1) == batch.answers).double().mean())
    last = {layer: activation for (layer, position), activation in clean.items() if position == -1}
    return PlantLosses(total, answer, tuple(swaps), right, tuple(swapped_right), last)


@torch.no_grad()
def swapped_answers(model: nn.Module, batch: PlantBatch, plant: Plant, layer: int | str) -> Int[Tensor, " pairs"]:
    """The token each base is answered with when the plant is swapped at one layer: has it taken root?"""
    module, pairs = planted_module(model, layer), len(batch)
    clean: list[Tensor] = []

    def keep(hidden: Tensor) -> Tensor:
        clean.append(hidden[:, plant.position])
        return hidden

    with _rewriting({module: [keep]}):
        _last_logits(model, batch.ids[pairs:], batch.mask[pairs:])
    with _rewriting({module: [_swapping(plant, torch.arange(pairs, device=batch.ids.device), clean[0])]}):
        return _last_logits(model, batch.ids[:pairs], batch.mask[:pairs]).argmax(dim=1)


# -- the model ------------------------------------------------------------------------------------------------


def planted_module(model: nn.Module, layer: int | str) -> nn.Module:
    """Find the module to plant in: a block by index, or a module by name."""
    if isinstance(layer, str):
        try:
            return model.get_submodule(layer)
        except AttributeError:
            raise PlotError(f"The model has no module '{layer}'.") from None
    blocks = _blocks(model)
    if not 0 <= layer < len(blocks):
        raise PlotError(f"The model has blocks 0..{len(blocks) - 1}; found {layer}.")
    return blocks[layer]


def _blocks(model: nn.Module) -> nn.ModuleList:
    """The list of decoder blocks: the model's one module list with as many entries as it has layers."""
    layers = getattr(getattr(model, "config", None), "num_hidden_layers", None)
    found = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == layers]
    if len(found) != 1:
        raise PlotError(
            f"{type(model).__name__} has {len(found)} module lists of num_hidden_layers = {layers} blocks; expected "
            f"one. Name the modules to plant at instead of numbering them."
        )
    return found[0]


def _last_logits(model: nn.Module, ids: Tensor, mask: Tensor) -> Float[Tensor, "rows vocabulary"]:
    """Next-token logits after the last token; positions count from each prompt's first real token."""
    unwrap: Any = getattr(model, "get_base_model", lambda: model)  # peft
    inner = unwrap()
    short = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(inner.forward).parameters else {}
    positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
    out = model(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False, **short)
    last: Tensor = out.logits[:, -1].float()
    return last


def _swapping(plant: Plant, rows: Tensor, source: Tensor) -> Any:
    def hook(hidden: Tensor) -> Tensor:
        at = hidden[:, plant.position]
        edited = at.index_copy(0, rows, plant.swap(at[rows], source).to(at.dtype))
        # a new tensor: writing into the block's own output would lose what its gradient needs
        there = torch.zeros(hidden.shape[1], dtype=torch.bool, device=hidden.device)
        there[plant.position] = True
        return torch.where(there[:, None], edited[:, None], hidden)

    return hook


@contextlib.contextmanager
def _rewriting(hooks: Mapping[nn.Module, Sequence[Any]]) -> Iterator[None]:
    """While open, the output (or the first of a tuple) of each module goes through its functions."""

    def register(module: nn.Module, functions: Sequence[Any]) -> Any:
        def hook(_module: nn.Module, _inputs: Any, output: Any) -> Any:
            hidden = output[0] if isinstance(output, tuple) else output
            for function in functions:
                hidden = function(hidden)
            return (hidden, *output[1:]) if isinstance(output, tuple) else hidden

        return module.register_forward_hook(hook)

    handles = [register(module, functions) for module, functions in hooks.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
