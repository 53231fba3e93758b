"""A language model looked at through token ids: the subject behind a handle that is opened on a bare model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Int
from torch import Tensor, nn

from plot_ot.errors import PlotError
from plot_ot.subjects.decoder.subject import DecoderSubject

PADDING = -1
"""Fills a row of token ids on the left."""


def token_subject(model: nn.Module, places: Sequence[str]) -> DecoderSubject:
    """The model with (at least) these places; its input rows are token ids, padded with -1 on the left."""
    kinds, layers = [], []
    for name in places:
        path, _, position = name.partition("@")
        kind, *rest = path.split(".")
        if position or not rest or not rest[0].isdigit():
            raise PlotError(
                f"A bare model has last-token places such as block_output.3; '{name}' is none of them. Give the "
                f"subject that the handle was made with, which knows its places."
            )
        kinds.append(kind)
        layers.append(int(rest[0]))
    return DecoderSubject(model, encode_tokens, ((0,),), kinds=sorted(set(kinds)), layers=sorted(set(layers)))


def token_rows(given: Tensor | Mapping[str, Tensor]) -> Int[Tensor, "rows tokens"]:
    """Token ids, or what a tokenizer returns (padded on any side), as input rows of a `token_subject`."""
    ids = given if isinstance(given, Tensor) else given.get("input_ids")
    mask = None if isinstance(given, Tensor) else given.get("attention_mask")
    if not isinstance(ids, Tensor) or ids.ndim != 2 or ids.is_floating_point():
        raise PlotError(
            "A source for a bare model is a tensor of token ids [rows, tokens], or what its tokenizer returns with "
            "return_tensors='pt' (input_ids and attention_mask)."
        )
    ids = ids.long() if mask is None else ids.long().masked_fill(~mask.bool(), PADDING)
    return ids.gather(1, (ids != PADDING).long().argsort(dim=1, stable=True))


def encode_tokens(rows: Int[Tensor, "rows tokens"]) -> tuple[Int[Tensor, "rows tokens"], Int[Tensor, "rows tokens"]]:
    """Input rows of a `token_subject` as ids and attention mask."""
    real = rows.long() != PADDING
    return torch.where(real, rows.long(), 0), real.long()
