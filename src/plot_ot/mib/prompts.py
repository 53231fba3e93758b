"""Prompts of the benchmark as rows that a subject takes: tokens, tokens of interest, and answers of several tokens.

An answer of several tokens is asked for token by token: the prompt is followed by the first tokens of the answer that
is wanted, and the edit stays where it was in the prompt. That is exact, because a token never looks ahead.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from plot_ot.errors import PlotError
from plot_ot.mib.questions import Example, Question
from plot_ot.models.named import LanguageModel
from plot_ot.subjects import DecoderSubject

AT_ONCE = 64
"""Prompts that are generated from together."""


class Prompts:
    """A growing table of prompts of one task for one model; a row is the number of an entry."""

    def __init__(self, language_model: LanguageModel, task: Question) -> None:
        self.task, self.tokenizer, self.model = task, language_model.tokenizer, language_model.model
        self._rows: dict[tuple[str, tuple[int, ...]], int] = {}
        self._ids: list[list[int]] = []
        self._back: list[dict[str, int]] = []

    def row(self, example: Example, forced: Sequence[int] = ()) -> int:
        """The row of a prompt that is followed by some tokens of an answer."""
        key = example.prompt, tuple(forced)
        if key not in self._rows:
            ids = self.encoded(example.prompt)
            at = {
                name: len(self.encoded(example.prompt[:end])) - 1 + more for name, (end, more) in example.ends.items()
            }
            at[self.task.tokens[-1]] = len(ids) - 1
            if max(at.values()) >= len(ids):
                raise PlotError(f"A token of interest lies behind the end of the prompt {example.prompt[:80]!r}.")
            whole = [*ids, *forced]
            self._rows[key] = len(self._ids)
            self._ids.append(whole)
            self._back.append({name: index - len(whole) for name, index in at.items()})
        return self._rows[key]

    def rows(self, examples: Sequence[Example]) -> Int[Tensor, "rows 1"]:
        """The rows of some prompts."""
        return torch.tensor([[self.row(e)] for e in examples])

    def encoded(self, text: str) -> list[int]:
        """A text's tokens, with what the tokenizer puts in front of its own accord."""
        ids: list[int] = self.tokenizer(text)["input_ids"]
        return ids

    def answer_tokens(self, example: Example, answer: str) -> list[int]:
        """The tokens that an answer is written with after a prompt."""
        before, whole = self.encoded(example.prompt), self.encoded(example.prompt + answer)
        if whole[: len(before)] == before and len(whole) > len(before):
            return whole[len(before) :]
        alone: list[int] = self.tokenizer(answer, add_special_tokens=False)["input_ids"]
        return alone

    def length(self, row: int) -> int:
        """How many tokens a row has."""
        return len(self._ids[row])

    def encode(self, rows: Int[Tensor, "rows 1"]) -> tuple[Int[Tensor, "rows tokens"], Int[Tensor, "rows tokens"]]:
        """Token ids and attention mask of rows, padded on the left."""
        chosen = [self._ids[int(r)] for r in rows[:, 0]]
        longest = max(map(len, chosen))
        ids = [[0] * (longest - len(p)) + p for p in chosen]
        mask = [[0] * (longest - len(p)) + [1] * len(p) for p in chosen]
        return torch.tensor(ids), torch.tensor(mask)

    @property
    def positions(self) -> dict[str, Any]:
        """The tokens of interest, as functions of rows."""

        def position(name: str) -> Any:
            return lambda rows: torch.tensor([self._back[int(r)][name] for r in rows[:, 0]])

        return {name: position(name) for name in self.task.tokens}

    def subject(self, answers: Sequence[Sequence[int]], layers: Sequence[int] | None, memory: int) -> DecoderSubject:
        """The model with the outputs of its blocks at the tokens of interest."""
        return DecoderSubject(
            self.model, self.encode, answers, layers=layers, positions=self.positions, rest=True, memory=memory
        )

    def written(self, rows: Int[Tensor, "rows 1"], new_tokens: int) -> list[str]:
        """What the model writes after each prompt, as it is now (perhaps under a handle)."""
        ids, mask = self.encode(rows)
        device = self.model.device
        with torch.no_grad():
            out = self.model.generate(
                input_ids=ids.to(device),
                attention_mask=mask.to(device),
                max_new_tokens=new_tokens,
                do_sample=False,
                pad_token_id=0,
            )
        texts: list[str] = self.tokenizer.batch_decode(out[:, ids.shape[1] :], skip_special_tokens=True)
        return texts
