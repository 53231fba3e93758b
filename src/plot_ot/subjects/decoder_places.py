"""Where a decoder can be edited: what kinds of activations, in which blocks, at which tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from plot_ot.errors import PlotError, unknown
from plot_ot.subjects.base import Place, Rewrite
from plot_ot.subjects.decoder_shape import KINDS, Decoder

LAST = ""
"""The name of the last token among positions."""

Positions = Mapping[str, Callable[[Tensor], "Int[Tensor, ' rows'] | int"]]
"""Named tokens: input rows to an index from the end, -1 for the last token."""


@dataclass(frozen=True)
class Spot:
    """A place, and how to get at it: some columns of what a kind of module shows, at a named token."""

    place: Place
    kind: str
    columns: slice
    position: str

    @property
    def stage(self) -> tuple[int, str]:
        """Block and kind: spots of one stage change at the same moment."""
        return self.place.layer, self.kind

    @property
    def enters(self) -> int:
        """The first block that runs after the edit, or around it."""
        return self.place.layer + (self.kind == "block_output")

    def vectors(self, whole: Float[Tensor, "rows tokens width"], back: Int[Tensor, " rows"]) -> Float[Tensor, "rows d"]:
        """This spot's vectors, `back` tokens from the end, in float32."""
        rows, tokens = torch.arange(len(whole), device=whole.device), whole.shape[1] - back.to(whole.device)
        return whole[rows, tokens, self.columns].float()

    def rewritten(
        self, whole: Float[Tensor, "pairs variants tail width"], back: Int[Tensor, " pairs"], rewrite: Rewrite
    ) -> Float[Tensor, "pairs variants tail width"]:
        """The activations with this spot's vectors, `back` tokens from the end, rewritten (in float32)."""
        pairs, tokens = torch.arange(len(whole), device=whole.device), whole.shape[2] - back.to(whole.device)
        vectors = whole[pairs, :, tokens, self.columns]
        new = rewrite(vectors.transpose(0, 1).float()).transpose(0, 1).to(whole.device, whole.dtype)
        if whole.shape[2] == 1 and new.shape[2] == whole.shape[3]:
            return new.unsqueeze(2)
        whole = whole.clone()
        whole[pairs, :, tokens, self.columns] = new
        return whole


def spots(
    decoder: Decoder, kinds: Sequence[str], layers: Sequence[int] | None, positions: Sequence[str]
) -> dict[str, Spot]:
    """Every place of these kinds, in forward order: `kind.layer`, `head_output.layer.head`, `...@position`."""
    depth = len(decoder.blocks)
    wanted = range(depth) if layers is None else sorted({k + depth if k < 0 else k for k in layers})
    if not wanted or not all(0 <= k < depth for k in wanted):
        raise PlotError(f"Layers must lie in 0..{depth - 1}, the model's blocks; found {list(layers or [])}.")
    for kind in kinds:
        if kind not in KINDS:
            unknown("kind of place", kind, KINDS)
    found = {}
    for layer in wanted:
        for kind in (k for k in KINDS if k in kinds):
            total = decoder.shows(layer, kind)
            parts = decoder.heads if kind == "head_output" else 1
            width = total // parts
            for part in range(parts):
                for position in (*positions, LAST):
                    name = f"{kind}.{layer}" + (f".{part}" if kind == "head_output" else "")
                    place = Place(f"{name}@{position}" if position else name, width, layer, None if position else -1)
                    columns = slice(part * width, (part + 1) * width)
                    found[place.name] = Spot(place, kind, columns, position)
    return found


def counted_back(
    positions: Positions, inputs: Tensor, lengths: Int[Tensor, " rows"]
) -> dict[str, Int[Tensor, " rows"]]:
    """How many tokens from the end each named position is, in every row: 1 for the last token."""
    back = {LAST: torch.ones_like(lengths)}
    for name, where in positions.items():
        index = torch.as_tensor(where(inputs)).cpu().long().expand(len(inputs))
        wrong = (index >= 0) | (index < -lengths)
        if bool(wrong.any()):
            row = int(wrong.nonzero()[0])
            raise PlotError(
                f"Position '{name}' of input row {row} is {int(index[row])}; a prompt of {int(lengths[row])} tokens "
                f"has positions -{int(lengths[row])} to -1, counted from its end."
            )
        back[name] = -index
    return back


def for_some(rewrite: Rewrite, variants: int, pairs: int, part: tuple[slice, Int[Tensor, " some"]]) -> Rewrite:
    """A rewrite of all variants and pairs, made to work on some of them: each response is rewritten by itself."""
    v, p = part

    def some(a: Float[Tensor, "v p d"]) -> Float[Tensor, "v p d"]:
        if len(a) == variants and torch.equal(p, torch.arange(pairs, device=p.device)):
            return rewrite(a)
        whole = a.new_zeros(variants, pairs, a.shape[2])
        whole[v, p] = a
        return rewrite(whole)[v, p]

    return some
