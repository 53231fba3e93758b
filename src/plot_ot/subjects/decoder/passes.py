"""The two ways through a decoder: the whole prompt while recording, and its last tokens from an edit on."""

from __future__ import annotations

import contextlib
import inspect
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from plot_ot.subjects.decoder.architecture import Decoder, first
from plot_ot.subjects.decoder.cache import ATTENTION, KeysOnly, PrefixBatch, PrefixView, recording_cache
from plot_ot.subjects.decoder.layout import Spot
from plot_ot.subjects.protocol import Rewrite


def whole_pass(
    decoder: Decoder,
    ids: Int[Tensor, "rows tokens"],
    real: Bool[Tensor, "rows tokens"],
    watched: Mapping[tuple[int, str], Callable[[Float[Tensor, "rows tokens width"]], None]],
    batch: PrefixBatch | None,
) -> Float[Tensor, "rows d"]:
    """A plain forward pass over left-padded prompts: the last token's residual after the last block.

    Each (layer, kind) of `watched` is shown its activations, `batch` whatever resuming will need.
    """
    final: list[Tensor] = []

    def entering(layer: int) -> Callable[[Tensor, dict[str, Any]], None]:
        def show(h: Tensor, named: dict[str, Any]) -> None:
            assert batch is not None  # noqa: S101
            batch.residual(layer, h)
            batch.call(layer, named)

        return show

    def leaving(h: Tensor) -> None:
        final.append(h[:, -1])
        if batch is not None:
            batch.residual(len(decoder.blocks), h)

    hooks = [decoder.hook(layer, kind, look) for (layer, kind), look in watched.items()]
    hooks.append(decoder.hook(len(decoder.blocks) - 1, "block_output", leaving))
    if batch is not None:
        hooks += [entered(block, entering(layer)) for layer, block in enumerate(decoder.blocks)]
    with removed(hooks), decoder.attending(decoder.masking):
        decoder.trunk(
            input_ids=ids,
            attention_mask=real.long(),
            position_ids=(real.cumsum(dim=1) - 1).clamp(min=0),
            past_key_values=None if batch is None else recording_cache(batch.keys),
            use_cache=batch is not None,
        )
    return final[0]


@dataclass(frozen=True)
class SpotEdit:
    """What happens at a spot, `back` tokens from the end of each pair's prompt."""

    spot: Spot
    back: Int[Tensor, " pairs"]
    rewrite: Rewrite

    def __call__(self, whole: Float[Tensor, "pairs variants tail width"]) -> Tensor:
        return self.spot.rewritten(whole, self.back, self.rewrite)


def resumed_pass(
    decoder: Decoder,
    view: PrefixView,
    start: Spot,
    activation: Float[Tensor, "variants pairs d"],
    edits: Sequence[SpotEdit],
) -> Float[Tensor, "pairs variants width"]:
    """The last tokens of each pair, one branch per variant, from the start spot on: the last token's final residual.

    `edits` are all that change on the way, the start's own among them. An edit inside a block runs that block too. In
    the last block the tokens before the last only make keys and values: nobody looks at what becomes of them.
    """
    stages: dict[tuple[int, str], list[SpotEdit]] = defaultdict(list)
    for edit in edits:
        stages[edit.spot.place.layer, edit.spot.kind].append(edit)
    variants = len(activation)

    def change(layer: int, kind: str) -> Callable[[Tensor], Tensor]:
        def edited(whole: Tensor) -> Tensor:
            h: Tensor = whole.unflatten(1, (variants, view.tail))
            for edit in stages[layer, kind]:
                h = edit(h)
            return h.flatten(1, 2)

        return edited

    if view.tail == 1 and start.kind == "block_output":
        h = activation.transpose(0, 1).to(decoder.dtype).contiguous()  # nothing but the edited token goes on
    else:
        h = view.residual(start.enters).repeat(1, variants, 1)
    if start.kind == "block_output" and (view.tail > 1 or len(stages[start.stage]) > 1):
        h = change(*start.stage)(h)
    with decoder.attending(ATTENTION):
        for layer in range(start.enters, len(decoder.blocks)):
            changed, h = [kind for at, kind in stages if at == layer], h.to(view.device(layer))
            if layer == len(decoder.blocks) - 1 and view.tail > 1 and not changed and decoder.stops(layer):
                return _last_token(decoder, view, layer, h, variants)
            with removed([decoder.hook(layer, kind, change(layer, kind)) for kind in changed]):
                h = first(decoder.blocks[layer](h, **view.call(layer, variants)))
    last: Tensor = h.unflatten(1, (variants, view.tail))[:, :, -1]
    return last


def _last_token(
    decoder: Decoder, view: PrefixView, layer: int, h: Float[Tensor, "pairs queries d"], variants: int
) -> Float[Tensor, "pairs variants d"]:
    """What a block makes of every branch's last token, given all tokens of the branches."""
    block = decoder.blocks[layer]
    try:
        block(h, **view.call(layer, variants, KeysOnly))
    except KeysOnly as made:
        own = made.own
    last = h.unflatten(1, (variants, view.tail))[:, :, -1].contiguous()
    return first(block(last, **view.call(layer, variants, own)))


def in_parts(
    tails: Int[Tensor, " pairs"], variants: int, tokens: int, pairs: int
) -> Iterator[tuple[Int[Tensor, " some"], list[slice]]]:
    """Cut the work to so many tokens and pairs at a time: similar tails together, and all variants if they fit."""
    order, at = torch.argsort(tails, stable=True), 0
    while at < len(order):
        branches = max(1, tokens // int(tails[order[at]]))
        some = order[at : at + min(max(1, branches // variants), pairs)]
        yield some, [slice(k, k + branches) for k in range(0, variants, branches)]
        at += len(some)


def batches(lengths: Int[Tensor, " rows"], budget: int) -> Iterator[Int[Tensor, " batch"]]:
    """Rows in order of length, so many at a time that a batch stays within a number of tokens."""
    order, at = torch.argsort(lengths, stable=True), 0
    while at < len(order):
        rows = order[at : at + max(1, budget // int(lengths[order[at]]))]
        rows = rows[: max(1, budget // int(lengths[rows].max()))]
        yield rows
        at += len(rows)


def entered(block: nn.Module, show: Callable[[Tensor, dict[str, Any]], dict[str, Any] | None]) -> Any:
    """Let `show` see what a block is called with: hidden states, and the rest by name, which it may replace."""
    names = list(inspect.signature(block.forward).parameters)

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        named = dict(zip(names, args, strict=False)) | dict(kwargs)
        h = named.pop(names[0])
        new = show(h, named)
        return None if new is None else ((h,), new)

    return block.register_forward_pre_hook(before, with_kwargs=True)


@contextlib.contextmanager
def removed(hooks: Sequence[Any]) -> Iterator[None]:
    """Remove the hooks at the end, whatever happens."""
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
