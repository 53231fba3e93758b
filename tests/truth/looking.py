"""Studies that look several times, simulated pair by pair: how often is a claim wrong, and does an interval miss?

No network runs. A handle has a true accuracy on each kind of pair; whether it is right on a pair depends on the base
input, which makes some inputs harder than others, and on chance. The looks, their errors, the intervals, the gates and
the table are the package's own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from numpy import ndarray
from torch import Tensor

from plot_ot.judging import gates, intervals
from plot_ot.judging.intervals import Bootstrap, missing_at_most
from plot_ot.judging.samples import first_said, samples_of
from plot_ot.judging.status import Status
from plot_ot.judging.verdict import Verdict, decide
from plot_ot.studies.looks import Look, looks, settled, waits_for_pairs

VARIABLE = "x"
HARDNESS = 4.0
"""How alike pairs of one base input are: the shares right follow a Beta distribution, narrow where this is large."""


@dataclass(frozen=True)
class Handle:
    """What is true of a handle, over all inputs: the share right where the variable changes and where it does not."""

    accuracy: float
    kept: float
    control: float
    """The share that the best control gets right."""
    fresh: bool = False
    """Whether every search of all places finds another handle, as good on average; else all looks judge the same."""

    @property
    def placed(self) -> bool:
        """Whether the table would call it placed, were all numbers known."""
        ahead = self.accuracy - self.control > gates.MARGIN
        return ahead and self.accuracy >= gates.WORKS and self.kept >= gates.KEEPS


class Pairs:
    """What a bootstrap asks of a bank."""

    def __init__(self, base: ndarray, family: ndarray, families: int) -> None:
        self.base, self.family = base, torch.from_numpy(family)
        self.families = tuple(str(k) for k in range(families))

    def __len__(self) -> int:
        return len(self.base)

    def select(self, at: Tensor) -> Pairs:
        """Some of the pairs."""
        return Pairs(self.base[at.numpy()], self.family[at].numpy(), len(self.families))

    def base_groups(self) -> Tensor:
        """Equal for pairs that share a base input."""
        return torch.from_numpy(np.unique(self.base, return_inverse=True)[1])


def shares(mean: float, inputs: int, rng: np.random.Generator) -> ndarray:
    """The share right of every input."""
    if mean in (0.0, 1.0):
        return np.full(inputs, mean)
    return rng.beta(HARDNESS * mean, HARDNESS * (1 - mean), size=inputs)


@dataclass(frozen=True)
class Outcome:
    """How a simulated study ended."""

    status: Status
    covered: bool
    """Whether the interval of the accuracy holds the truth."""
    looks: int
    pairs: int


def study(handle: Handle, plan: Sequence[Look], rng: np.random.Generator, families: int = 2) -> Outcome:
    """One study: at each look pairs are drawn from the test inputs so far, judged, and the next look taken or not."""
    most = round(0.4 * plan[-1].rows)
    truths = {"right": handle.accuracy, "kept": handle.kept, "control": handle.control}

    def searched() -> dict[str, ndarray]:
        """A handle of which this is true: the share right of every input."""
        return {name: shares(mean, most, rng) for name, mean in truths.items()}

    of, said, verdict = searched(), None, None
    for number, look in enumerate(plan, 1):
        inputs, count = round(0.4 * look.rows), look.sizes[2] // 2
        banks = [Pairs(rng.integers(inputs, size=count), np.arange(count) % families, families) for _ in range(2)]
        closer = verdict is not None and waits_for_pairs(verdict)
        with missing_at_most(look.error):
            if closer:
                verdict, covered = _judged(handle, of, banks, rng)
                if settled(verdict.status, None):
                    return Outcome(verdict.status, covered, number, look.size)
            if look.last or not closer:
                of = searched() if handle.fresh else of
                verdict, covered = _judged(handle, of, banks, rng)
                if look.last or settled(verdict.status, said):
                    return Outcome(verdict.status, covered, number, look.size)
                said = verdict.status
    raise AssertionError("the last look ends a study")


def _judged(
    handle: Handle, of: dict[str, ndarray], banks: Sequence[Pairs], rng: np.random.Generator
) -> tuple[Verdict, bool]:
    """The table of gates on pairs where the variable changes and as many where it does not."""
    changing, keeping = banks
    boot, boot_kept = Bootstrap(changing), Bootstrap(keeping)  # type: ignore[arg-type]
    right, control = (rng.random(len(changing.base)) < of[name][changing.base] for name in ("right", "control"))
    kept = rng.random(len(keeping.base)) < of["kept"][keeping.base]
    accuracy = boot.accuracy(torch.from_numpy(right), balanced=True)
    worked = gates.works(accuracy, boot.balanced_bases)
    invariance = boot_kept.accuracy(torch.from_numpy(kept), balanced=True)
    ahead = right.astype(float) - control
    table = [
        first_said(samples_of(changing, True), lambda s: gates.beats("the control", s.boot.interval(ahead[s.at]))),  # type: ignore[arg-type]
        worked,
        gates.leaves_the_rest_alone(invariance, boot_kept.balanced_bases),
    ]
    verdict = Verdict(VARIABLE, decide(table, worked, worked), "", {"handle": accuracy.value}, tuple(table))
    return verdict, accuracy.low <= handle.accuracy <= accuracy.high


intervals._drawn = lru_cache(maxsize=400)(
    intervals._drawn.__wrapped__
)  # simulations ask for the same ones all the time


def studies(handle: Handle, count: int, seed: int, most: int = 200) -> Iterator[Outcome]:
    """Many studies of handles of which the same is true."""
    rng, plan = np.random.default_rng(seed), looks(most)
    return (study(handle, plan, rng) for _ in range(count))


CASES = {
    "placed, exact": Handle(1.0, 1.0, 0.1),
    "placed, 0.97": Handle(0.97, 0.99, 0.1),
    "placed, 0.9": Handle(0.9, 0.97, 0.1),
    "just below the bound of accuracy": Handle(0.79, 1.0, 0.1),
    "the same, a new handle at every look": Handle(0.79, 1.0, 0.1, fresh=True),
    "just below the bound of invariance": Handle(1.0, 0.89, 0.1),
    "hardly ahead of a control": Handle(0.9, 1.0, 0.86),
    "in part": Handle(0.5, 1.0, 0.1),
    "nothing there": Handle(0.15, 0.9, 0.14),
}
"""What may be true of a handle, by name."""
