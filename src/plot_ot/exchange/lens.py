"""Handles on TransformerLens models, by the hooks that `run_with_hooks` takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from plot_ot.errors import PlotError
from plot_ot.exchange.components import spot
from plot_ot.exchange.names import parse_place_name
from plot_ot.handles import Edit, Handle
from plot_ot.subjects import DecoderSubject, Subject
from plot_ot.subjects.decoder.layout import counted_back
from plot_ot.subjects.decoder.lens_names import to_lens
from plot_ot.subjects.open_edits import apart

Hook = tuple[str, Callable[..., Tensor]]
"""The name of a hook, and what happens there."""


def lens_hooks(handle: Handle, subject: Subject, base: Tensor, source: Tensor) -> list[Hook]:
    """The `fwd_hooks` under which a TransformerBridge takes the variable from `source` into its run of `base`.

    `subject` is what `load_subject` made of the bridge. Call the bridge with the tokens of the base rows, padded on the
    left if at all: `bridge.run_with_hooks(subject.encode(base)[0], fwd_hooks=lens_hooks(...))`.
    """
    if not isinstance(subject, DecoderSubject):
        raise PlotError(
            f"Hooks are made for the subject of a language model; found {type(subject).__name__}. On a module whose "
            f"places are hooks, use `handle.on(subject, source)`."
        )
    handle.require(subject)
    if len(source) not in (1, len(base)):
        raise PlotError(f"{len(source)} source rows for {len(base)} base rows: give one source per base, or one.")
    with apart():
        store = subject.record(source, torch.zeros(0, dtype=torch.long))
    back = counted_back(subject.positions, base, subject.lengths(base), subject.tokens)
    hooks = []
    for edit in handle.edits:
        subject.require(edit.place)
        at = parse_place_name(edit.place)
        if spot(subject, edit.place).tokens > 1:
            raise PlotError(
                f"Hooks for TransformerLens rewrite one token; {edit.place.name} is several tokens together. Use "
                f"`handle.on(subject, source, base=...)`, or places at single tokens."
            )
        sources = store.activations[edit.place.name]
        hooks.append(
            (to_lens(at.kind, at.layer), _hook(edit, sources, back[spot(subject, edit.place).position], at.head))
        )
    return hooks


def _hook(
    edit: Edit, sources: Float[Tensor, "rows d"], back: Int[Tensor, " rows"], head: int | None
) -> Callable[..., Tensor]:
    """Rewrite one vector of every row, `back` tokens before the end."""
    swap = edit.swapping(sources)

    def hook(activation: Float[Tensor, "rows tokens ..."], hook: Any = None) -> Float[Tensor, "rows tokens ..."]:
        if len(activation) != len(back):
            raise PlotError(f"The hooks were made for {len(back)} rows, but the model runs {len(activation)}.")
        rows = torch.arange(len(activation), device=activation.device)
        where = (rows, activation.shape[1] - back.to(activation.device), *(() if head is None else (head,)))
        new = activation.clone()
        new[where] = swap(activation[where].to(sources)).to(activation)
        return new

    return hook
