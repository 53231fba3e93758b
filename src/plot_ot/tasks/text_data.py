"""What tasks on language models share: prompts to tokens, answers as tokens, and banks over cells of two variables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from plot_ot.banks import Bank, Splits
from plot_ot.errors import PlotError
from plot_ot.tasks.filling import Quota, share_out

Encoded = tuple[Int[Tensor, "rows tokens"], Int[Tensor, "rows tokens"]]
"""Token ids, padded on the left, and the attention mask."""
Cell = tuple[bool, bool]
"""Whether a pair changes each of the two variables."""
CELLS: tuple[Cell, ...] = ((True, True), (True, False), (False, True), (False, False))


# -- text to tokens ---------------------------------------------------------------------------------------------


def encode(texts: Sequence[str], tokenizer: Any, *, bos: int | None) -> Encoded:
    """Tokens of the texts as they stand, after `bos` if there is one."""
    first = [] if bos is None else [bos]
    ids = [first + list(x) for x in tokenizer(list(texts), add_special_tokens=False)["input_ids"]]
    length = max((len(x) for x in ids), default=0)
    # what stands in the padding is masked away; some tokenizers have no token for it
    fill = next((x for x in (tokenizer.pad_token_id, tokenizer.eos_token_id) if x is not None), 0)
    padded = torch.tensor([[fill] * (length - len(x)) + x for x in ids], dtype=torch.long)
    mask = torch.tensor([[0] * (length - len(x)) + [1] * len(x) for x in ids], dtype=torch.long)
    return padded, mask


def answer_tokens(tokenizer: Any, answers: Sequence[str]) -> list[list[int]]:
    """For each answer, the ids of " X" and "X" where these are single tokens, " X" first.

    Refused when an answer has no such token, or two answers share one: their logits could not be told apart.
    """
    groups: list[list[int]] = []
    for answer in answers:
        spelled = [tokenizer.encode(text, add_special_tokens=False) for text in (f" {answer}", answer)]
        known = [ids[0] for ids in spelled if len(ids) == 1 and ids[0] != tokenizer.unk_token_id]
        groups.append(list(dict.fromkeys(known)))
    missing = [a for a, group in zip(answers, groups, strict=True) if not group]
    if missing:
        raise PlotError(
            f"The tokenizer has no single token for the answers {', '.join(missing)} (tried ' X' and 'X'): "
            f"answers must be single tokens. Use other answers or another tokenizer."
        )
    owner: dict[int, str] = {}
    for answer, group in zip(answers, groups, strict=True):
        for token in group:
            other = owner.setdefault(token, answer)
            if other != answer:
                raise PlotError(
                    f"The answers {other} and {answer} share the token {token} ({tokenizer.decode([token])!r}): "
                    f"they cannot be told apart. Use answers that differ in their first token."
                )
    return groups


def says(
    tokenizer: Any, tokens: Int[Tensor, " rows"], answers: Sequence[str], labels: Int[Tensor, " rows"]
) -> Bool[Tensor, " rows"]:
    """Whether each token, decoded, stripped and case-folded, is the answer of that label; an empty text is wrong."""
    texts = {t: tokenizer.decode([t]).strip().casefold() for t in set(tokens.tolist())}
    pairs = zip(tokens.tolist(), labels.tolist(), strict=True)
    return torch.tensor([texts[t] == answers[x].casefold() for t, x in pairs], dtype=torch.bool)


# -- banks ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sizes:
    """How many pairs: `fit` in all; else that many sensitive and that many invariant ones for every variable."""

    fit: int = 200
    calibration: int = 100
    test: int = 100
    transfer: int = 100

    def __post_init__(self) -> None:
        for name, size in vars(self).items():
            if size < len(CELLS):
                raise PlotError(f"The {name} bank needs at least {len(CELLS)} pairs; found {size}.")


@dataclass(frozen=True)
class TextBanks:
    """All banks of a seed, and how many candidate pairs the filter let through."""

    splits: Splits
    transfer: Mapping[tuple[str, str], Bank]
    """Like `splits.test`, but with words and templates that the other banks do not have."""
    passed: Mapping[str, Mapping[str, tuple[int, int]]]
    """split -> family -> (pairs passed, pairs tried)."""

    @property
    def pass_rates(self) -> dict[str, dict[str, float]]:
        """split -> family -> share of the tried pairs with both prompts answered correctly."""
        return {s: {f: p / t for f, (p, t) in families.items() if t} for s, families in self.passed.items()}


def cell_quotas(families: Mapping[str, Sequence[Cell]], variables: tuple[str, str], size: int) -> list[Quota]:
    """n sensitive and n invariant pairs for both variables: n/2 in every cell (an odd one goes to both or neither),
    and within a cell equal shares of the families whose pairs can fall into it."""
    quotas = []
    for cell in CELLS:
        able = [f for f, cells in families.items() if cell in cells]
        if not able:
            does = " and ".join(f"{'changes' if c else 'keeps'} {v}" for c, v in zip(cell, variables, strict=True))
            raise PlotError(f"No pair of the families {', '.join(families)} {does}. Add a family that does.")
        quotas += share_out((size + (cell[0] == cell[1])) // 2, able, dict(zip(variables, cell, strict=True)))
    return quotas


def by_variable(bank: Bank) -> dict[tuple[str, str], Bank]:
    """The sensitivity and the invariance bank of every variable."""
    kinds = {"sensitivity": bank.sensitive, "invariance": bank.invariant}
    return {(v, kind): of(v) for v in bank.variables for kind, of in kinds.items()}
