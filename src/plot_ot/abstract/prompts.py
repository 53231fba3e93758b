"""Prompts and answers as tokens: left-padded batches, named tokens, single-token answers. No model in sight."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from plot_ot.abstract.templates import Span
from plot_ot.errors import PlotError

Encoded = tuple[Int[Tensor, "rows tokens"], Int[Tensor, "rows tokens"]]
"""Token ids, padded on the left, and the attention mask."""
Encode = Callable[[Tensor], Encoded]
"""A function that turns input rows into tokens."""


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


# -- where text stands in tokens --------------------------------------------------------------------------------


def token_spans(tokenizer: Any, texts: Sequence[str]) -> list[list[Span]]:
    """The characters of every token, special ones left out: by the tokenizer's own offsets, or by decoding."""
    if getattr(tokenizer, "is_fast", False):
        found = tokenizer(list(texts), add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
        return [[(int(a), int(b)) for a, b in spans] for spans in found]
    return [_decoded_spans(tokenizer, text) for text in texts]


def _decoded_spans(tokenizer: Any, text: str) -> list[Span]:
    """Find every token's characters by decoding; those of a cut character belong to the token that completes it."""
    ids = list(tokenizer([text], add_special_tokens=False)["input_ids"][0])
    spans, done = [], 0
    for k in range(len(ids)):
        decoded = tokenizer.decode(ids[: k + 1], clean_up_tokenization_spaces=False)
        same = next(
            (i for i, (a, b) in enumerate(zip(decoded, text, strict=False)) if a != b), min(len(decoded), len(text))
        )
        spans.append((done, max(done, same)))
        done = max(done, same)
    if done < len(text.rstrip()):
        raise PlotError(
            f"This tokenizer does not give back the prompt it was given: after {text[:done][-40:]!r} it loses "
            f"{text[done:][:40]!r}. Named positions need a fast tokenizer (tokenizer.json) or one that keeps the text."
        )
    return spans


def tokens_of(spans: Sequence[Span], where: Span) -> tuple[int, int] | None:
    """The first and the last token with a character of the span, from the end (-1 is the last token), if there are."""
    start, end = where
    touching = [k for k, (a, b) in enumerate(spans) if a < end and b > start]
    return (touching[0] - len(spans), touching[-1] - len(spans)) if touching else None


# -- answers ----------------------------------------------------------------------------------------------------


def refuse_spaces(answers: Sequence[str]) -> None:
    """Refuse answers that are empty or come with their own spaces: whether one is needed is the tokenizer's affair."""
    wrong = [a for a in answers if a.strip() != a or not a]
    if wrong:
        raise PlotError(
            f"The answers {', '.join(map(repr, wrong))} are empty or have spaces around them. Give the bare words: "
            f"both ' X' and 'X' are looked up in the tokenizer."
        )


def spellings(tokenizer: Any, answer: str) -> dict[str, list[int]]:
    """The tokens of " X" and of "X"."""
    return {text: list(tokenizer.encode(text, add_special_tokens=False)) for text in (f" {answer}", answer)}


def _single(tokenizer: Any, ids: Sequence[int]) -> bool:
    return len(ids) == 1 and ids[0] != tokenizer.unk_token_id


def answer_tokens(tokenizer: Any, answers: Sequence[str], *, alike: bool = False) -> list[list[int]]:
    """For each answer, the ids of " X" and "X" where these are single tokens, " X" first.

    Refused when an answer has no such token, or two answers share one: their logits could not be told apart. `alike`
    also refuses answers of which some are single tokens only after a space and others only without it: at one place
    in a text the model can say the ones or the others.
    """
    spelled = [spellings(tokenizer, a) for a in answers]
    groups = [list(dict.fromkeys(i[0] for i in s.values() if _single(tokenizer, i))) for s in spelled]
    problems = [*_missing(tokenizer, answers, spelled), *_shared(tokenizer, answers, groups)]
    if alike:
        problems += _unlike(tokenizer, answers, spelled)
    if problems:
        raise PlotError(" ".join(problems))
    return groups


def answer_sequences(tokenizer: Any, answers: Sequence[str], *, after: str = " ", end: str = "") -> list[list[int]]:
    """The tokens of every answer as it follows a prompt: `after` it comes the answer, then `end`."""
    found = [list(tokenizer.encode(f"{after}{a}{end}", add_special_tokens=False)) for a in answers]
    unknown = [a for a, ids in zip(answers, found, strict=True) if not ids or tokenizer.unk_token_id in ids]
    if unknown:
        raise PlotError(f"The tokenizer cannot spell the answers {', '.join(unknown)}. Use other answers.")
    return found


def _missing(tokenizer: Any, answers: Sequence[str], spelled: Sequence[Mapping[str, Sequence[int]]]) -> list[str]:
    none = [a for a, s in zip(answers, spelled, strict=True) if not any(_single(tokenizer, i) for i in s.values())]
    if not none:
        return []
    cut = [f"{a} = {'|'.join(tokenizer.decode([t]) for t in spellings(tokenizer, a)[f' {a}'])}" for a in none[:3]]
    return [
        f"The tokenizer has no single token for the answers {', '.join(none)} (tried ' X' and 'X'; {', '.join(cut)}): "
        f"answers must be single tokens. Use other answers or another tokenizer."
    ]


def _shared(tokenizer: Any, answers: Sequence[str], groups: Sequence[Sequence[int]]) -> list[str]:
    owners: dict[int, list[str]] = {}
    for answer, group in zip(answers, groups, strict=True):
        for token in group:
            owners.setdefault(token, []).append(answer)
    said = [
        f"The answers {' and '.join(names)} share the token {token} ({tokenizer.decode([token])!r})"
        for token, names in owners.items()
        if len(names) > 1
    ]
    return [f"{'; '.join(said)}: they cannot be told apart. Use answers that differ in their first token."] * bool(said)


def _unlike(tokenizer: Any, answers: Sequence[str], spelled: Sequence[Mapping[str, Sequence[int]]]) -> list[str]:
    spaced, bare = (
        [a for a, s in zip(answers, spelled, strict=True) if [_single(tokenizer, i) for i in s.values()] == kind]
        for kind in ([True, False], [False, True])
    )
    if not spaced or not bare:
        return []
    return [
        f"The answers {', '.join(spaced)} are single tokens only with a space before them, {', '.join(bare)} only "
        f"without: no prompt leads to both. Use answers that are spelled alike."
    ]


def unreachable_answers(
    tokenizer: Any, prompt: str, answers: Sequence[str], groups: Sequence[Sequence[int]]
) -> list[str]:
    """The answers that cannot follow this prompt as one of their tokens.

    A prompt that ends in a space is the usual cause: tokenizers put the space into the answer's token.
    """
    start = list(tokenizer.encode(prompt, add_special_tokens=False))
    between = ("",) if prompt[-1].isspace() else (" ", "")

    def follows(answer: str, group: Sequence[int]) -> bool:
        whole = [list(tokenizer.encode(prompt + b + answer, add_special_tokens=False)) for b in between]
        return any([*start, token] in whole for token in group)

    return [answer for answer, group in zip(answers, groups, strict=True) if not follows(answer, group)]


def says(
    tokenizer: Any, tokens: Int[Tensor, " rows"], answers: Sequence[str], labels: Int[Tensor, " rows"]
) -> Bool[Tensor, " rows"]:
    """Whether each token, decoded and stripped, is the answer of that label; an empty text is wrong.

    Case does not count, unless it is all that tells two answers apart.
    """
    fold = str.casefold if len({a.casefold() for a in answers}) == len(set(answers)) else str
    texts = {t: fold(tokenizer.decode([t]).strip()) for t in set(tokens.tolist())}
    pairs = zip(tokens.tolist(), labels.tolist(), strict=True)
    return torch.tensor([texts[t] == fold(answers[x]) for t, x in pairs], dtype=torch.bool)
