"""Early answers: banks grow, and after each look every variable has its answer or the next look is taken.

Each look chooses on its own fit and calibration pairs and is judged on test pairs, so test pairs are looked at more
than once. What keeps this honest is that the probability of error is spent over the searches of all looks: an interval
of look k may miss with probability e_k, and these add up to `SPENT`. Whatever the looks have to do with each other, the
interval that is reported in the end misses with at most that probability, and so does a gate that holds by mistake.

A yes stands. A no may come from a search that had too few pairs to fit, which no test can tell: it stands only if the
next search of all places, with about twice as many pairs, says it again. Where nothing speaks against a handle and only
test pairs are missing, the next look searches where it was found and nowhere else. Whether it does depends on test
pairs, too: after the first look the error is shared between the two searches that a look may make.
"""

from __future__ import annotations

from dataclasses import dataclass

from plot_ot.judging.gates import WORKS
from plot_ot.judging.status import Status
from plot_ot.judging.verdict import Verdict

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
    """One look: how many pairs it fits and calibrates with, and how often the intervals of a search may miss."""

    size: int
    error: float
    last: bool
    searches: int = 1
    """How many searches it may be judged by: all places, and after the first look also where the handle was before."""

    @property
    def answers(self) -> str:
        """Which answers can end the looking (`judging.judges.ANSWERS`): a no of the first look must be said again."""
        if self.last:
            return "any"
        return "yes or no" if self.searches > 1 else "yes"

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
    sizes, size = [], FIRST
    while 4 * size < 3 * most:
        sizes.append(size)
        size *= 2
    if not sizes:
        return [Look(most, SPENT, last=True)]
    each = SPENT / 2 / len(sizes)
    first, *more = sizes
    return [
        Look(first, each, last=False),
        *(Look(n, each / 2, last=False, searches=2) for n in more),
        Look(most, SPENT / 4, last=True, searches=2),
    ]


def settled(now: Status, before: Status | None) -> bool:
    """Whether a variable has its answer: a yes, or a no that the search of all places before this one said, too."""
    return now.found or now is Status.OUTPUT or (now is not Status.UNDECIDED and now is before)


def waits_for_pairs(verdict: Verdict) -> bool:
    """Whether nothing speaks against a handle but that its test pairs are too few: no place need be searched again."""
    open_only = not any(gate.fails for gate in verdict.gates if gate.name != "compact")
    return verdict.status is Status.UNDECIDED and (verdict.accuracy or 0.0) >= WORKS and open_only
