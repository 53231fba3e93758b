"""A language model that is planned with, looked at through the prompts of a hypothesis: nothing of it is loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from plot_ot.abstract.hypothesis import Hypothesis
from plot_ot.errors import PlotError
from plot_ot.planner.scene import MEMORY, Tokens, Unloaded, approximate_tokens
from plot_ot.subjects import Place
from plot_ot.subjects.decoder.layout import ALL, LAST, Positions, counted_back, spots
from plot_ot.subjects.shape import Shape

Encoded = Callable[[Tensor], Tokens]


@dataclass(frozen=True)
class Blocks:
    """What the layout of places asks of a decoder, known from its shape."""

    depth: int
    heads: int
    width: int
    head_outputs: int

    def shows(self, layer: int, kind: str) -> int:
        """The width of what a block shows of this kind."""
        return self.head_outputs if kind == "head_output" else self.width


class Prompted(Unloaded):
    """A language model of some shape, with the places that it would have once it was loaded."""

    def __init__(
        self,
        shape: Shape,
        outputs: int,
        encode: Encoded,
        *,
        positions: Positions | None = None,
        spans: Mapping[str, int] | None = None,
        layers: Sequence[int] | None = None,
        kinds: Sequence[str] = ("block_output",),
        tokens: int | None = None,
        memory: int = MEMORY,
    ) -> None:
        super().__init__(shape, outputs, memory)
        self._encode, self.positions, self.spans = encode, dict(positions or {}), dict(spans or {})
        self.tokens = tokens
        blocks = Blocks(shape.blocks, shape.heads, shape.hidden, shape.heads * shape.head_width)
        self._spots = spots(blocks, kinds, layers, list(self.positions), tokens, self.spans)
        self.places = tuple(spot.place for spot in self._spots.values())
        after = tuple(shape.blocks - spot.enters for spot in self._spots.values())
        self._looked_at = replace(shape, places=self.places, after=after)

    @classmethod
    def through(cls, hypothesis: Hypothesis, shape: Shape, tokenizer: Any, bos: int | None, **options: Any) -> Prompted:
        """The model seen through a hypothesis' prompts and named tokens.

        Without a tokenizer prompts are counted in words and signs, and there are no named tokens.
        """
        if tokenizer is None:
            if hypothesis.positions:
                raise PlotError(
                    f"{shape.name}'s tokenizer is not on this machine, and the hypothesis names positions "
                    f"({', '.join(hypothesis.positions)}): where they are in a prompt only it can tell. Fetch it, or "
                    f"plan for another model of this size whose tokenizer is here."
                )
            counted = len(hypothesis.answers)
            return cls(shape, counted, lambda rows: approximate_tokens(hypothesis.render(rows)), **options)
        answers, named = hypothesis.answer_tokens(tokenizer), hypothesis.named_tokens(tokenizer)
        encode = hypothesis.encoder(tokenizer, bos)

        def encoded(rows: Tensor) -> Tokens:
            ids, mask = encode(rows)
            return ids, mask.bool()

        return cls(shape, len(answers), encoded, positions=named.functions(), spans=named.sizes, **options)

    def shape(self, outputs: int) -> Shape:
        return self._looked_at

    @property
    def edited_tokens(self) -> int:
        return max(1, *self.spans.values(), self.tokens or 1)

    def encoded(self, inputs: Tensor) -> Tokens:
        return self._encode(inputs)

    def lengths(self, inputs: Tensor) -> Int[Tensor, " rows"]:
        return self.encoded(inputs)[1].sum(dim=1)

    def tails(self, place: Place, inputs: Tensor) -> Int[Tensor, " rows"]:
        position = self._spots[place.name].position
        named = {name: where for name, where in self.positions.items() if name == position}
        if position == LAST:
            return torch.ones(len(inputs), dtype=torch.long)
        everywhere = self.tokens if position == ALL else None
        return counted_back(named, inputs, self.lengths(inputs), everywhere)[position]

    def tokens_at(self, place: Place) -> int:
        return self._spots[place.name].tokens
