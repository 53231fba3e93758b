"""Questions to controls, asked on a sample of the pairs first and on all of them where that cannot say.

A control that is far behind shows it on few pairs. A question that may be asked twice may be wrong twice, so each time
it is asked with half of the error: whatever the two answers have to do with each other, the one that counts is wrong
no more often than before. Few pairs make poor intervals, so on a sample only what is clear counts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from plot_ot.abstract.banks import Bank
from plot_ot.judging.gates import Answer, Gate
from plot_ot.judging.intervals import Bootstrap, may_miss, missing_at_most

FEW = 80
"""Pairs of a sample, as many of every family as it has."""
WORTH = 1.5
"""How many times as many pairs there must be for a sample to be worth its half of the error."""
CLEAR = 0.05
"""How far from its bound the whole interval of a gate must lie on a sample."""


@dataclass(frozen=True, eq=False)
class Sample:
    """Some pairs of a bank, and how often an interval over them may miss."""

    at: Int[Tensor, " pairs"]
    boot: Bootstrap
    error: float


def samples_of(bank: Bank, sampled: bool) -> list[Sample]:
    """A sample and all pairs, in the order in which they are asked; all pairs alone if no sample is worth it."""
    error, everything = may_miss(), torch.arange(len(bank))
    if not sampled or len(bank) < WORTH * FEW or len(bank.family.unique()) > FEW / 2:
        return [Sample(everything, Bootstrap(bank), error)]
    with missing_at_most(error / 2):
        return [Sample(at, Bootstrap(bank.select(at)), error / 2) for at in (_few(bank.family), everything)]


def _few(family: Int[Tensor, " pairs"]) -> Int[Tensor, " few"]:
    """Some pairs drawn at random, always the same ones, about as many of every family."""
    order = torch.randperm(len(family), generator=torch.Generator().manual_seed(15_485_867))
    of_family = family[order] == family.unique()[:, None]  # [families, pairs]
    turn = torch.where(of_family, of_family.cumsum(dim=1), 0).sum(dim=0)
    return order[turn.argsort(stable=True)[:FEW]].sort().values


def first_said(samples: Sequence[Sample], ask: Callable[[Sample], Gate]) -> Gate:
    """A gate's answer on the first sample that gives a clear one, or on all pairs."""
    for sample in samples:
        with missing_at_most(sample.error):
            gate = ask(sample)
        if clear(gate):
            break
    return gate


def clear(gate: Gate) -> bool:
    """Whether a gate says what it says with room to spare."""
    beyond = gate.low - gate.bound if gate.holds else gate.bound - gate.high
    return gate.answer is not Answer.CANNOT_SAY and beyond >= CLEAR
