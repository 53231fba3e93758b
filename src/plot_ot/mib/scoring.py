"""Scores as the benchmark computes them: what is filtered, what counts as right, and "highest" and "average"."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import mean

import torch

from plot_ot.edits import respond
from plot_ot.handles import Handle
from plot_ot.mib.data import Pair
from plot_ot.mib.prompts import AT_ONCE, Prompts
from plot_ot.subjects import DecoderSubject, record_pairs


def right(expected: str, written: str) -> bool:
    """The benchmark's check: the expected text stands somewhere in what the model wrote."""
    return expected in written


def answered(prompts: Prompts, pairs: Sequence[Pair], new_tokens: int) -> list[Pair]:
    """The pairs whose prompts the model answers rightly, base and source; each prompt runs once."""
    examples = {e.prompt: e for p in pairs for e in (p.base, p.source)}
    good = set()
    chosen = list(examples.values())
    for at in range(0, len(chosen), AT_ONCE):
        some = chosen[at : at + AT_ONCE]
        for example, text in zip(some, prompts.written(prompts.rows(some), new_tokens), strict=True):
            if right(prompts.task.expected(example.values, {}), text):
                good.add(example.prompt)
    return [p for p in pairs if p.base.prompt in good and p.source.prompt in good]


def unit_scores(
    handles: Sequence[Handle], subject: DecoderSubject, prompts: Prompts, pairs: Sequence[Pair], new_tokens: int
) -> list[dict[str, float]]:
    """The share of right answers under every handle, by family: as the benchmark runs a unit on each of its data sets.

    A single token is read off responses to one recording of the pairs; longer answers are written under the handle.
    """
    found: list[dict[str, list[bool]]] = [{} for _ in handles]
    for at in range(0, len(pairs), AT_ONCE):
        some = pairs[at : at + AT_ONCE]
        base, source = prompts.rows([p.base for p in some]), prompts.rows([p.source for p in some])
        [recording] = record_pairs(subject.watching(vocabulary=True), (base, source)) if new_tokens == 1 else [None]
        for handle, hits in zip(handles, found, strict=True):
            if recording is not None:
                top = respond(recording, handle.batch())[0].argmax(dim=-1)
                texts = prompts.tokenizer.batch_decode(top.unsqueeze(1).cpu(), skip_special_tokens=True)
            else:
                with torch.no_grad(), handle.on(subject, source, base=base):
                    texts = prompts.written(base, new_tokens)
            for p, text in zip(some, texts, strict=True):
                expected = prompts.task.swapped(p.base, p.source, handle.variable)
                hits.setdefault(p.family, []).append(right(expected, text))
    return [{family: mean(own) for family, own in hits.items()} for hits in found]


def highest_and_average(scores: Mapping[str, Mapping[str, float]], layers: Mapping[str, int]) -> tuple[float, float]:
    """The benchmark's two numbers from the score of every unit on every data set, and the unit's layer.

    A unit's score is its mean over data sets. Of every layer the best unit counts; over layers the highest is taken,
    and the mean.
    """
    units = {unit: mean(by_set.values()) for unit, by_set in scores.items()}
    best: dict[int, float] = {}
    for unit, score in units.items():
        best[layers[unit]] = max(score, best.get(layers[unit], score))
    return max(best.values()), mean(best.values())
