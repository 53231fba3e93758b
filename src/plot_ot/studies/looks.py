"""Early answers: banks grow, and after each look every variable has its answer or the next look is taken.

Each look chooses afresh on its own fit and calibration pairs and is judged on test pairs, so test pairs are looked at
more than once. What keeps this honest is that the probability of error is spent over the looks: an interval of look k
may miss with probability e_k, and the e_k add up to `SPENT`. Whatever the looks have to do with each other, the
interval that is reported in the end misses with at most that probability, and so does a gate that holds by mistake.

A yes ends the search at once. A no may come from a search that had too few pairs to fit, which no test can tell: it
ends only if the next look, with about twice as many pairs, says it again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from plot_ot.judging.status import Status

SPENT = 0.02
"""How often the interval that is reported may miss, all looks together: less than the 5 % of a single look, so that no
more than one study in a hundred is called placed by mistake, also where the truth lies just below a bound."""
FIRST = 40
"""Fit pairs of the first look; the next ones have twice as many each."""
TESTS, MORE_TESTS = 4, 80
"""Test pairs per fit pair, and besides. A search costs by its fit and calibration pairs; a verdict waits for test
pairs, of which it needs a number however good the handle is."""
ROWS, MORE_ROWS = 3, 80
"""Inputs per fit pair that a look draws its pairs from, and besides."""


@dataclass(frozen=True)
class Look:
    """One look: how many pairs it fits and calibrates with, and how often its intervals may miss."""

    size: int
    error: float
    last: bool

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Pairs for fitting, calibration and tests."""
        return self.size, self.size, TESTS * self.size + MORE_TESTS

    @property
    def rows(self) -> int:
        """Inputs to draw them from."""
        return ROWS * self.size + MORE_ROWS


def looks(most: int) -> list[Look]:
    """The looks up to so many pairs; the last one may spend half of the error."""
    early, size = [], FIRST
    while 4 * size < 3 * most:
        early.append(size)
        size *= 2
    if not early:
        return [Look(most, SPENT, last=True)]
    return [*(Look(n, SPENT / 2 / len(early), last=False) for n in early), Look(most, SPENT / 2, last=True)]


def settled(now: Mapping[str, Status], before: Mapping[str, Status]) -> bool:
    """Whether no further look is needed: every variable has its answer, and a no was said by the look before, too."""
    return all(status.found or status is Status.OUTPUT or _said_again(v, now, before) for v, status in now.items())


def _said_again(variable: str, now: Mapping[str, Status], before: Mapping[str, Status]) -> bool:
    return now[variable] is not Status.UNDECIDED and now[variable] is before.get(variable)
