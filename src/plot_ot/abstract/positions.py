"""Named positions as tokens: the last token of a piece of the prompt, or all tokens of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from jaxtyping import Int
from torch import Tensor

from plot_ot.abstract.prompts import token_spans, tokens_of
from plot_ot.abstract.templates import Position, Span, shown
from plot_ot.errors import PlotError, unknown

ALIGNED = ("first", "last")


@dataclass(frozen=True)
class TokenSpan:
    """All tokens of a piece of the prompt as one position: their vectors are swapped together, token by token.

    `where` is a piece of the template or a function, as for a position of one token. Where pieces differ in their
    number of tokens, `align` says which of them are taken: the `first` or the `last`, as many as the shortest has.
    `tokens` sets that number instead.
    """

    where: Position
    align: Literal["first", "last"] | None = None
    tokens: int | None = None

    def __post_init__(self) -> None:
        if self.align is not None and self.align not in ALIGNED:
            unknown("alignment of a token span", self.align, ALIGNED)
        if self.tokens is not None and (isinstance(self.tokens, bool) or self.tokens < 1):
            raise PlotError(f"A token span has at least one token; found tokens={self.tokens}.")

    def size(self, name: str, lengths: Sequence[int]) -> int:
        """How many tokens are swapped where the pieces have so many; lengths that no rule fits are refused."""
        fewest = self.tokens or min(lengths)
        short, longer = min(lengths) < fewest, max(lengths) > fewest
        if short or (longer and self.align is None):
            counted = ", ".join(f"{n} in {k}" for n, k in sorted(Counter(lengths).items()))
            wanted = "one number of tokens" if self.tokens is None else f"{self.tokens} tokens"
            rule = "" if short else " give align='last' (the last tokens of the longer ones) or align='first', or"
            raise PlotError(
                f"Position '{name}' swaps tokens one by one and needs {wanted} in every prompt; found {counted} "
                f"prompts (tokens in prompts):{rule} keep to inputs of one length."
            )
        return fewest


Located = Callable[[Tensor], Sequence[tuple[str, Mapping[str, Span]]]]
"""Input rows to their prompts, with the characters of each named position."""


class NamedTokens:
    """The tokens of named positions in prompts, by one tokenizer.

    `known` are inputs from which the sizes of spans are read that do not say theirs.
    """

    def __init__(
        self,
        tokenizer: Any,
        positions: Mapping[str, Position | TokenSpan],
        located: Located,
        known: Int[Tensor, "rows inputs"],
    ) -> None:
        self.tokenizer, self.located, self.names = tokenizer, located, list(positions)
        spans = {name: p for name, p in positions.items() if isinstance(p, TokenSpan)}
        unsized = [name for name, span in spans.items() if span.tokens is None]
        if unsized and not len(known):
            raise PlotError(
                f"How many tokens has position '{unsized[0]}'? No input is known yet: give TokenSpan(..., tokens=n), "
                f"or code the inputs first (`rows`)."
            )
        found = self._ranges(known) if unsized else {}
        sizes = {name: span.tokens or span.size(name, _lengths(found[name])) for name, span in spans.items()}
        self.spans = {name: replace(span, tokens=sizes[name]) for name, span in spans.items()}
        """The positions of several tokens, each with its number of tokens."""
        self.notes = [_said(name, self.spans[name], _lengths(found[name])) for name in unsized]
        """What was done about pieces of different lengths, in words."""
        self._latest: list[tuple[Tensor, dict[str, Tensor]]] = []  # found for all at once, then asked for in turn

    @property
    def sizes(self) -> dict[str, int]:
        """How many tokens each position of several tokens has."""
        return {name: span.tokens or 1 for name, span in self.spans.items()}

    def functions(self) -> dict[str, Callable[[Tensor], Int[Tensor, " rows"]]]:
        """For every position a function of input rows: its (first) token, counted from the end (-1 is the last)."""
        return {name: partial(self._at, name) for name in self.names}

    def _at(self, name: str, rows: Int[Tensor, "rows inputs"]) -> Int[Tensor, " rows"]:
        if not self._latest or not torch.equal(self._latest[0][0], rows):
            self._latest[:] = [(rows.clone(), self._starts(rows))]
        return self._latest[0][1][name]

    def _starts(self, rows: Int[Tensor, "rows inputs"]) -> dict[str, Int[Tensor, " rows"]]:
        found = {}
        for name, ranges in self._ranges(rows).items():
            at = [last for _, last in ranges]
            if name in self.spans and ranges:
                span = self.spans[name]
                size = span.size(name, _lengths(ranges))
                at = [first if span.align == "first" else last - size + 1 for first, last in ranges]
            found[name] = torch.tensor(at, dtype=torch.long)
        return found

    def _ranges(self, rows: Int[Tensor, "rows inputs"]) -> dict[str, list[tuple[int, int]]]:
        """The first and the last token of every position in every prompt, from the end."""
        located = self.located(rows)
        tokens = token_spans(self.tokenizer, [text for text, _ in located])
        found: dict[str, list[tuple[int, int]]] = {name: [] for name in self.names}
        for (text, named), spans in zip(located, tokens, strict=True):
            for name, (start, end) in named.items():
                ends = tokens_of(spans, (start, end))
                if ends is None:
                    raise PlotError(f"Position '{name}': {text[start:end]!r} has no token in the prompt {shown(text)}.")
                found[name].append(ends)
        return found


def _lengths(ranges: Sequence[tuple[int, int]]) -> list[int]:
    return [last - first + 1 for first, last in ranges]


def _said(name: str, span: TokenSpan, lengths: Sequence[int]) -> str:
    if max(lengths) == span.tokens:
        return f"position '{name}' is all {span.tokens} tokens of its text"
    return f"position '{name}' is the {span.align} {span.tokens} of its text's {min(lengths)} to {max(lengths)} tokens"
