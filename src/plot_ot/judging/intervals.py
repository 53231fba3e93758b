"""Accuracies and differences with 95 % bootstrap intervals over base inputs, families weighted equally where asked."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from jaxtyping import Bool, Float
from numpy import ndarray
from torch import Tensor

from plot_ot.abstract.banks import Bank

DRAWS = 1000
MOST_DRAWS = 5000
ERROR = 0.05
"""How often an interval may miss, unless `missing_at_most` says otherwise."""
MOST_FAMILIES = 16
"""Up to so many families every set of them is looked at."""
_error: ContextVar[float] = ContextVar("error", default=ERROR)


@contextmanager
def missing_at_most(error: float) -> Iterator[None]:
    """While open, intervals may miss with this probability: who looks several times spends 5 % over the looks."""
    token = _error.set(error)
    try:
        yield
    finally:
        _error.reset(token)


def may_miss() -> float:
    """How often an interval may miss at present."""
    return _error.get()


def _ends(drawn: Float[ndarray, " draws"]) -> tuple[float, float]:
    """The percentiles of some draws between which an interval lies."""
    tail = _error.get() / 2
    low, high = (float(q) for q in np.quantile(drawn, (tail, 1 - tail)))
    return low, high


@dataclass(frozen=True)
class Accuracy:
    """A share of correct pairs with its 95 % bootstrap interval over base inputs."""

    value: float
    pairs: int
    low: float
    high: float


@dataclass(frozen=True)
class Interval:
    """A number with its 95 % interval, and how many independent base inputs stand behind it."""

    value: float
    low: float
    high: float
    bases: int

    @classmethod
    def of(cls, value: float, drawn: Float[ndarray, " draws"], bases: int) -> Interval:
        """The percentile interval of some draws."""
        return cls(value, *_ends(drawn), bases)


def at_most(share: float, bases: float) -> float:
    """The largest share of an event that was seen on this share of so many independent inputs.

    It is right at 95 %, or at what `missing_at_most` asks for.

    The exact (Clopper-Pearson) bound, a quantile of Beta(seen + 1, not seen), and for an event that was never seen the
    rule of three: 3 in so many inputs, or in general -ln of the error. A bootstrap of few events is too sure of itself;
    of many, it is the wider one.
    """
    seen = max(0.0, share * bases)
    if bases - seen < 1:  # seen on all inputs, or all but a part of one
        return 1.0
    reach = 8 * ((share * (1 - share) + 1 / bases) / bases) ** 0.5
    x = np.linspace(max(0.0, share - reach), min(1.0, share + reach), 4001)
    x = (x[1:] + x[:-1]) / 2
    log = seen * np.log(x) + (bases - seen - 1) * np.log1p(-x)
    chance = np.exp(log - log.max()).cumsum()
    unseen = 3 * math.log(_error.get()) / math.log(ERROR)
    return max(min(1.0, unseen / bases), float(np.interp(1 - _error.get(), chance / chance[-1], x)))


def at_least(share: float) -> int:
    """On how many independent inputs an event must be seen every time to be that frequent for sure."""
    bases = 1
    while 1 - at_most(0.0, bases) < share:
        bases += 1
    return bases


def independent_inputs(inside: Bool[ndarray, "bases families"]) -> float:
    """How many independent inputs stand behind a mean over families, told which inputs each family has.

    An input may be wrong in some families S at once. Its share of the mean is |S| of all families, and it was looked
    for among the inputs of S together: F |N(S)| / |S| inputs, for the worst S. Families that share no input count in
    full, families of the same inputs once.
    """
    families = inside.shape[1]
    if families > MOST_FAMILIES:  # too many sets: a bound, in which the families of a set have the inputs of one
        sizes = np.sort(inside.sum(axis=0))
        return float((families * sizes / np.arange(1, families + 1)).min())
    within = np.bincount(inside @ (1 << np.arange(families)), minlength=1 << families)
    for f in range(families):  # how many inputs have all their families in a set: sums over its subsets, by family
        halves = within.reshape(-1, 2, 1 << f)
        halves[:, 1] += halves[:, 0]
    sets = np.arange(1, 1 << families)
    reached = len(inside) - within[(1 << families) - 1 - sets]  # all but those that stay outside of the set
    members = sum((sets >> f) & 1 for f in range(families))
    return float((families * reached / members).min())


class Bootstrap:
    """Resamples the base inputs of a bank; the same draws for every method, so differences are paired."""

    def __init__(self, bank: Bank, draws: int | None = None) -> None:
        draws = draws or min(MOST_DRAWS, round(DRAWS * max(1.0, ERROR / _error.get())))
        groups = bank.base_groups().numpy()
        present, family = np.unique(bank.family.numpy(), return_inverse=True)
        self.families = tuple(bank.families[f] for f in present)
        self.shape = (int(groups.max()) + 1, len(present))
        self.cell = groups * len(present) + family
        count = self._per_cell(np.ones(len(groups)))
        self.weights = _drawn(self.shape[0], draws)
        self.sizes = self.weights @ count
        self.count, self.bases = count.sum(axis=0), (count > 0).sum(axis=0)
        self.balanced_bases = int(independent_inputs(count > 0))
        """Independent inputs behind a mean over families, those that families share counted once."""

    def _per_cell(self, values: Float[ndarray, " pairs"]) -> Float[ndarray, "bases families"]:
        cells = self.shape[0] * self.shape[1]
        return np.bincount(self.cell, weights=values, minlength=cells).reshape(self.shape).astype(np.float32)

    def _resample(self, values: Float[ndarray, " pairs"]) -> tuple[Float[ndarray, " families"], ndarray]:
        """Sums per family, and in every draw."""
        sums = self._per_cell(values)
        return sums.sum(axis=0, dtype=np.float64), self.weights @ sums

    def balanced(self, values: Float[ndarray, " pairs"]) -> tuple[float, Float[ndarray, " draws"]]:
        """The mean with families weighted equally, and its draws."""
        sums, drawn = self._resample(values)
        with np.errstate(invalid="ignore", divide="ignore"):
            per_family = np.where(self.sizes > 0, drawn / self.sizes, np.nan)
        return float((sums / self.count).mean()), np.nanmean(per_family, axis=1)

    def interval(self, values: Float[ndarray, " pairs"]) -> Interval:
        """The interval of a mean over pairs (of a difference, say), families weighted equally."""
        return Interval.of(*self.balanced(values), self.balanced_bases)

    def accuracy(self, right: Bool[Tensor, " pairs"], balanced: bool = False) -> Accuracy:
        """The mean and interval of correctness over all pairs, or with families weighted equally."""
        values = right.double().numpy()
        if balanced:
            return _accuracy(*self.balanced(values), len(values), self.balanced_bases)
        _, draws = self._resample(values)
        drawn = draws.sum(axis=1) / self.sizes.sum(axis=1)
        return _accuracy(float(values.mean()), drawn, len(values), self.shape[0])

    def by_family(self, right: Bool[Tensor, " pairs"]) -> dict[str, Accuracy]:
        """The mean and interval within every family."""
        sums, draws = self._resample(right.double().numpy())
        found = {}
        for f, name in enumerate(self.families):
            some = self.sizes[:, f] > 0
            drawn = draws[some, f] / self.sizes[some, f]
            found[name] = _accuracy(float(sums[f] / self.count[f]), drawn, int(self.count[f]), int(self.bases[f]))
        return found


@lru_cache(maxsize=8)
def _drawn(bases: int, draws: int) -> Float[ndarray, "draws bases"]:
    """How often each base input is in every draw; the same for banks of as many inputs."""
    even = np.full(bases, 1 / bases)
    return np.random.default_rng(0).multinomial(bases, even, size=draws).astype(np.float32)


def _accuracy(mean: float, drawn: ndarray, pairs: int, bases: int) -> Accuracy:
    """The interval of a share: that of the draws, or where too little varies to resample, the exact one."""
    low, high = _ends(drawn)
    return Accuracy(mean, pairs, min(low, 1 - at_most(1 - mean, bases)), max(high, at_most(mean, bases)))
