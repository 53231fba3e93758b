"""Editing a live language model: which tokens an edit meets in a forward pass, also while the model generates.

An edit belongs to a prompt. The pass over the prompt is edited at the places' tokens; what follows from it, through
keys and values or by running the prompt again with one more token, continues the edited prompt.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from plot_ot.errors import PlotError
from plot_ot.subjects.decoder.layout import ALL, LAST, Spot, require_lengths
from plot_ot.subjects.open_edits import OpenEdit

LENGTHS = "#lengths"
"""Where the prompts' numbers of tokens stand among their positions."""


class LivePrompt:
    """The prompts that a model is called with, and how far they have grown since.

    A pass without earlier keys and values is a new prompt, unless it repeats the last one with one more token, as
    `generate(use_cache=False)` does. A pass of one token on top of the keys and values of the prompt continues it.
    """

    def __init__(
        self,
        back: Mapping[str, Int[Tensor, " prompts"]] | None,
        rows: int | None,
        tokens: int | None,
        every_token: bool,
        edit: OpenEdit,
    ) -> None:
        self.back, self.tokens, self.every_token = back, tokens, every_token
        self.rows = rows if back is None else len(back[LENGTHS])
        """How many different prompts are expected; None for any number."""
        self.copies = 1
        self.grown = 0
        """Tokens since the prompt."""
        self.cached = False
        """Whether this pass sees its new token only."""
        self._prompt: Tensor | None = None
        self._length = 0
        self._padding = torch.zeros(0, dtype=torch.long)
        self._whole = False
        self.edit = edit

    def require(self, spots: Sequence[Spot]) -> None:
        """Refuse places that cannot be found in a prompt."""
        self._whole = any(spot.position == ALL for spot in spots)
        for spot in spots:
            if spot.position not in (LAST, ALL) and self.back is None:
                raise PlotError(
                    f"The live model does not know where {spot.place.name} is in its prompts: give the input rows of "
                    f"the prompts it will be called with as `base`. (Without them only the last token is known.)"
                )
            if self.every_token and spot.position != LAST:
                raise PlotError(
                    f"`every_token` edits the last token of every step; {spot.place.name} is at another token. Leave "
                    f"`every_token` out to edit the prompt alone."
                )

    # -- what is running ----------------------------------------------------------------------------------

    def look(self, trunk: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """See what the model is called with, before it runs."""
        if not self.edit.acts():
            return
        given = inspect.signature(trunk.forward).bind_partial(*args, **kwargs).arguments
        given = {**given, **given.get("kwargs", {})}
        x = given.get("input_ids")
        x = given.get("inputs_embeds") if x is None else x
        if not isinstance(x, Tensor):
            raise PlotError("The live model is called without input_ids and inputs_embeds: there is nothing to edit.")
        past = given.get("past_key_values")
        self.cached = past is not None and int(past.get_seq_length()) > 0
        if self.cached:
            self._continue(x)
        elif self._repeats(x):
            self.grown, self._length = x.shape[1] - self._prompt.shape[1], x.shape[1]  # type: ignore[union-attr]
        else:
            self._begin(x, given.get("attention_mask"))

    def _begin(self, x: Tensor, mask: Any) -> None:
        self._prompt, self._length, self.grown = x.detach().clone(), x.shape[1], 0
        self.copies = self._copies(x)
        lengths = torch.full((len(x),), x.shape[1])
        self._padding = torch.zeros(len(x), dtype=torch.long)
        if isinstance(mask, Tensor) and mask.ndim == 2:
            real = mask.bool().cpu()
            self._padding, lengths = real.flip(1).long().argmax(dim=1), real.sum(dim=1)
        if self._whole and self.tokens is not None:
            require_lengths(lengths, self.tokens)
        expected = None if self.back is None else self.back[LENGTHS].repeat_interleave(self.copies)
        if expected is not None and not torch.equal(expected, lengths):
            row = int((expected != lengths).nonzero()[0])
            raise PlotError(
                f"The model is called with a prompt of {int(lengths[row])} tokens in row {row}, but the `base` row for "
                f"it encodes to {int(expected[row])} tokens: its named positions would be wrong. Call the model with "
                f"what `subject.encode(base)` gives."
            )

    def _continue(self, x: Tensor) -> None:
        if self._prompt is None:
            raise PlotError(
                "The first pass under the handle continues keys and values of an earlier one, so its prompt was never "
                "edited. Open the handle before the prompt runs."
            )
        if x.shape[1] != 1 or len(x) != len(self._prompt):
            raise PlotError(
                f"Under a handle a pass over keys and values may add one token to each of the prompt's "
                f"{len(self._prompt)} rows; found {len(x)} rows and {x.shape[1]} tokens. Run whole prompts at once (no "
                f"chunked prefill, no assisted decoding)."
            )
        if bool(self._padding.any()):
            raise PlotError("Prompts that are continued must be padded on the left; found padding on the right.")
        self.grown += 1

    def _repeats(self, x: Tensor) -> bool:
        """Whether this is the last prompt once more, with one more token in every row."""
        before = self._prompt
        if before is None or x.ndim != before.ndim or len(x) != len(before) or x.shape[1] != self._length + 1:
            return False
        return torch.equal(x[:, : before.shape[1]], before)

    def _copies(self, x: Tensor) -> int:
        """How many copies of each expected prompt there are, one next to the other."""
        if self.rows is None or self.rows == len(x):
            return 1
        many, left = divmod(len(x), self.rows)
        if left or not many or not bool((x.unflatten(0, (self.rows, many)) == x[::many].unsqueeze(1)).all()):
            raise PlotError(
                f"The handle was opened with {self.rows} source rows, but the model is called with {len(x)} prompts "
                f"that are not copies of {self.rows}, one next to the other. Give one source row for every prompt."
            )
        return many

    # -- editing ------------------------------------------------------------------------------------------

    def rewriting(self, spot: Spot, rewrite: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor | None]:
        """What a hook at the spot does with the activations of the running pass."""

        def edited(whole: Float[Tensor, "rows tokens width"]) -> Tensor | None:
            if not self.edit.acts():
                return None
            for back in self._targets(spot, len(whole)):
                whole = spot.rewritten(whole.unsqueeze(1), back, lambda a: self._each(rewrite, a[0])[None]).squeeze(1)
            return whole

        return edited

    def _targets(self, spot: Spot, rows: int) -> list[Int[Tensor, " rows"]]:
        """Where this pass is edited, counted from its end."""
        ones = torch.ones(rows, dtype=torch.long)
        if self.cached:
            return [ones] if self.every_token else []
        known = {LAST: ones, ALL: ones * spot.tokens}
        start = known.get(spot.position)
        if start is None:
            start = self.back[spot.position].repeat_interleave(self.copies)  # type: ignore[index]
        since = [ones * k for k in range(1, self.grown + 1)] if self.every_token else []
        return [start + self._padding + self.grown, *since]

    def _each(self, rewrite: Callable[[Tensor], Tensor], a: Float[Tensor, "rows d"]) -> Float[Tensor, "rows d"]:
        """Rewrite every copy of the prompts by itself."""
        if self.copies == 1:
            return rewrite(a)
        parts = [rewrite(a[k :: self.copies]) for k in range(self.copies)]
        return torch.stack(parts, dim=1).flatten(0, 1)
