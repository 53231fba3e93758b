"""Where a decoder can be edited: what kinds of activations, in which blocks, at which tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from jaxtyping import Float, Int
from torch import Tensor

from plot_ot.errors import PlotError, unknown
from plot_ot.subjects.decoder.architecture import KINDS
from plot_ot.subjects.places import Place
from plot_ot.subjects.protocol import Rewrite

LAST = ""
"""The name of the last token among positions."""
ALL = "all"
"""The name of all tokens together among positions."""

Positions = Mapping[str, Callable[[Tensor], "Int[Tensor, ' rows'] | int"]]
"""Named tokens: input rows to an index from the end, -1 for the last token."""


@dataclass(frozen=True)
class Spot:
    """A place, and how to get at it: some columns of what a kind of module shows, at a named token.

    A spot of several tokens holds their vectors one after the other, in the order of the prompt.
    """

    place: Place
    kind: str
    columns: slice
    position: str
    tokens: int = 1

    @property
    def stage(self) -> tuple[int, str]:
        """Block and kind: spots of one stage change at the same moment."""
        return self.place.layer, self.kind

    @property
    def enters(self) -> int:
        """The first block that runs after the edit, or around it."""
        return self.place.layer + (self.kind == "block_output")

    def vectors(self, whole: Float[Tensor, "rows tokens width"], back: Int[Tensor, " rows"]) -> Float[Tensor, "rows d"]:
        """This spot's vectors, from `back` tokens before the end on, in float32."""
        rows, tokens = self._where(whole.shape[0], whole.shape[1], back.to(whole.device))
        return whole[rows, tokens, self.columns].flatten(1).float()

    def rewritten(
        self, whole: Float[Tensor, "pairs variants tail width"], back: Int[Tensor, " pairs"], rewrite: Rewrite
    ) -> Float[Tensor, "pairs variants tail width"]:
        """The activations with this spot's vectors, from `back` tokens before the end on, rewritten (in float32)."""
        pairs, tokens = self._where(whole.shape[0], whole.shape[2], back.to(whole.device))
        vectors = whole[pairs, :, tokens, self.columns]  # [pairs, (tokens,) variants, columns]
        if self.tokens > 1:
            vectors = vectors.transpose(1, 2).flatten(2)
        new = rewrite(vectors.transpose(0, 1).float()).transpose(0, 1).to(whole.device, whole.dtype)
        if whole.shape[2] == 1 and new.shape[2] == whole.shape[3]:
            return new.unsqueeze(2)
        if self.tokens > 1:
            new = new.unflatten(2, (self.tokens, -1)).transpose(1, 2)
        whole = whole.clone()
        whole[pairs, :, tokens, self.columns] = new
        return whole

    def _where(self, rows: int, length: int, back: Int[Tensor, " rows"]) -> tuple[Tensor, Tensor]:
        """Indices of rows and of their tokens: [rows], or [rows, 1] and [rows, tokens]."""
        row, token = torch.arange(rows, device=back.device), length - back
        if self.tokens == 1:
            return row, token
        return row.unsqueeze(1), token.unsqueeze(1) + torch.arange(self.tokens, device=back.device)


class Laid(Protocol):
    """What the layout asks of a decoder, loaded or not."""

    @property
    def depth(self) -> int: ...
    @property
    def heads(self) -> int: ...
    def shows(self, layer: int, kind: str) -> int:
        """The width of what a block shows of this kind."""
        ...


def spots(
    decoder: Laid,
    kinds: Sequence[str],
    layers: Sequence[int] | None,
    positions: Sequence[str],
    tokens: int | None,
    spans: Mapping[str, int] | None = None,
) -> dict[str, Spot]:
    """Every place of these kinds, in forward order: `kind.layer`, `head_output.layer.head`, `...@position`.

    With `tokens` also `...@all`, which is so many tokens wide. `spans` are positions of several tokens.
    """
    sizes = {**refuse_spans(spans or {}, positions), **({} if tokens is None else {ALL: tokens})}
    if tokens is not None and (tokens < 1 or ALL in positions):
        found_name = f"a position of your own called '{ALL}'" if ALL in positions else f"{tokens}"
        raise PlotError(
            f"`tokens` is the number of tokens of every prompt and makes places '@{ALL}'; found {found_name}."
        )
    named = (*positions, *([] if tokens is None else [ALL]), LAST)
    depth = decoder.depth
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
                for position in named:
                    name = f"{kind}.{layer}" + (f".{part}" if kind == "head_output" else "")
                    many = sizes.get(position, 1)
                    place = Place(
                        f"{name}@{position}" if position else name, many * width, layer, None if position else -1
                    )
                    columns = slice(part * width, (part + 1) * width)
                    found[place.name] = Spot(place, kind, columns, position, many)
    return found


def refuse_spans(spans: Mapping[str, int], positions: Sequence[str]) -> Mapping[str, int]:
    """The spans, if each is a named position with a number of tokens."""
    for name, size in spans.items():
        if name not in positions:
            unknown("position with several tokens", name, positions)
        if size < 1:
            raise PlotError(f"Position '{name}' has {size} tokens; a span has at least one.")
    return spans


def counted_back(
    positions: Positions,
    inputs: Tensor,
    lengths: Int[Tensor, " rows"],
    tokens: int | None,
    spans: Mapping[str, int] | None = None,
) -> dict[str, Int[Tensor, " rows"]]:
    """How many tokens from the end each named position is, in every row: 1 for the last token.

    Of a position of several tokens it is the first of them.
    """
    back = {LAST: torch.ones_like(lengths)}
    if tokens is not None:
        require_lengths(lengths, tokens)
        back[ALL] = lengths
    for name, where in positions.items():
        index = torch.as_tensor(where(inputs)).cpu().long().expand(len(inputs))
        wrong = (index >= 0) | (index < -lengths)
        if bool(wrong.any()):
            row = int(wrong.nonzero()[0])
            raise PlotError(
                f"Position '{name}' of input row {row} is {int(index[row])}; a prompt of {int(lengths[row])} tokens "
                f"has positions -{int(lengths[row])} to -1, counted from its end."
            )
        if bool((-index < (size := (spans or {}).get(name, 1))).any()):
            row = int((-index < size).nonzero()[0])
            raise PlotError(
                f"Position '{name}' of input row {row} begins {-int(index[row])} tokens before the end of its prompt, "
                f"which leaves no room for its {size} tokens."
            )
        back[name] = -index
    return back


def require_lengths(lengths: Int[Tensor, " rows"], tokens: int) -> None:
    """Refuse prompts that are not as long as places at all tokens want them."""
    wrong = (lengths != tokens).nonzero().squeeze(1)
    if len(wrong):
        found = ", ".join(str(n) for n in lengths[wrong].unique().tolist())
        raise PlotError(
            f"Places '@{ALL}' swap prompts of {tokens} tokens one token at a time; found prompts of {found} tokens "
            f"({len(wrong)} of {len(lengths)}, the first in row {int(wrong[0])}). Use prompts of one length, or named "
            f"positions."
        )


def for_some(
    rewrite: Rewrite, variants: int, pairs: int, part: tuple[slice, Int[Tensor, " some"]], device: torch.device
) -> Rewrite:
    """A rewrite of all variants and pairs on a device, made to work on some of them: each response is rewritten by
    itself. Which pairs is said on the CPU; activations come from wherever their block runs."""
    v, p = part
    every = torch.equal(p, torch.arange(pairs))

    def some(a: Float[Tensor, "v p d"]) -> Float[Tensor, "v p d"]:
        a = a.to(device)
        if every and len(a) == variants:
            return rewrite(a)
        whole, at = a.new_zeros(variants, pairs, a.shape[2]), p.to(device)
        whole[v, at] = a
        return rewrite(whole)[v, at]

    return some
