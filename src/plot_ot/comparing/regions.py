"""Where a hypothesis fails: a rule of at most two tests on named inputs and variables, checked on held-out pairs."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int
from numpy import ndarray

from plot_ot.judging.intervals import DRAWS, Interval

MOST_VALUES = 16
"""An input or variable with more values than this is tested by order only."""
FEWEST = 5
"""Failures below which no rule is looked for."""
SURE = 3.0
"""How much likelier than without it, in logarithms, a test must make the failures, beyond how many tests there are."""
AHEAD = 0.1
"""How much more often a hypothesis must fail inside the region than outside it, beyond doubt."""

Column = Sequence[Any]


@dataclass(frozen=True)
class Clause:
    """A comparison of a named value with a constant, or with another named value."""

    name: str
    relation: str
    """`is`, `is not`, `<=` or `>`."""
    value: Any
    other: bool = False
    """Whether `value` is the name of another column."""

    def holds(self, columns: Mapping[str, Column]) -> Bool[ndarray, " rows"]:
        """Which rows pass."""
        own = columns[self.name]
        against: Sequence[Any] = columns[self.value] if self.other else [self.value] * len(own)
        compare = {"is": operator.eq, "is not": operator.ne, "<=": operator.le, ">": operator.gt}[self.relation]
        return np.array([compare(a, b) for a, b in zip(own, against, strict=True)], dtype=bool)

    def __str__(self) -> str:
        return f"{self.name} {self.relation} {self.value}"


@dataclass(frozen=True)
class Rule:
    """One test, or two joined by `and` or `or`."""

    tests: tuple[Clause, ...]
    joined: str = "and"

    def holds(self, columns: Mapping[str, Column]) -> Bool[ndarray, " rows"]:
        """Which rows lie in the region."""
        masks = np.stack([t.holds(columns) for t in self.tests])
        joint: ndarray = np.logical_and.reduce(masks) if self.joined == "and" else np.logical_or.reduce(masks)
        return joint

    def __str__(self) -> str:
        return f" {self.joined} ".join(map(str, self.tests))


@dataclass(frozen=True)
class Region:
    """A rule for where a hypothesis fails, and how often it fails on held-out pairs inside and outside."""

    rule: Rule
    inside: float
    outside: float
    difference: Interval
    covers: float
    """The share of all inputs that the rule holds for."""

    def __str__(self) -> str:
        return (
            f"{self.rule} ({self.covers:.0%} of the inputs): wrong on {self.inside:.0%} of the telling swaps there, on "
            f"{self.outside:.0%} elsewhere"
        )


def find_region(
    columns: Mapping[str, Column],
    wrong: Float[ndarray, " items"],
    held_out: tuple[Mapping[str, Column], Float[ndarray, " held"], Int[ndarray, " held"]],
    everywhere: Mapping[str, Column],
) -> Region | None:
    """The rule that best covers what went wrong, if it also tells right from wrong on `held_out` items.

    Those are columns, what went wrong, and the base input of each. `everywhere` are the columns of all inputs.
    """
    failed = wrong > 0
    if failed.sum() < FEWEST or failed.all():
        return None
    rule = _best_rule(columns, failed)
    if rule is None:
        return None
    test_columns, test_wrong, group = held_out
    here = rule.holds(test_columns)
    if not here.any() or here.all():
        return None
    difference = _difference(here, test_wrong, group)
    if difference.low <= AHEAD:
        return None
    covers = float(rule.holds(everywhere).mean())
    return Region(rule, float(test_wrong[here].mean()), float(test_wrong[~here].mean()), difference, covers)


def _best_rule(columns: Mapping[str, Column], failed: Bool[ndarray, " items"]) -> Rule | None:
    """The likeliest rule, where failures have one frequency inside and another outside.

    The more rules were tried the likelier one must be: a single test than none, and two tests than the best single one.
    """
    tests = _tests(columns)
    if not tests:
        return None
    masks = np.stack([t.holds(columns) for t in tests])
    single = _gained(masks, failed)
    first = int(single.argmax())
    if single[first] < math.log(len(tests)) + SURE:
        return None
    best, reached = Rule((tests[first],)), float(single[first]) + 2 * math.log(len(tests)) + SURE
    for k, mask in enumerate(masks[:-1]):
        for joined, joint in (("and", mask & masks[k + 1 :]), ("or", mask | masks[k + 1 :])):
            gained = _gained(joint, failed)
            at = int(gained.argmax())
            if gained[at] > reached + 1e-9:
                best, reached = Rule((tests[k], tests[k + 1 + at]), joined), float(gained[at])
    return best


def _gained(masks: Bool[ndarray, "rules items"], failed: Bool[ndarray, " items"]) -> Float[ndarray, " rules"]:
    """How much likelier the failures are with a frequency of their own inside each region, where it is the higher."""
    inside, total = masks.sum(axis=1), len(failed)
    hits, every = (masks & failed).sum(axis=1), int(failed.sum())

    def likelihood(k: Any, n: Any) -> Any:
        share = np.clip(k / np.maximum(n, 1), 1e-9, 1 - 1e-9)
        return k * np.log(share) + (n - k) * np.log(1 - share)

    gained = likelihood(hits, inside) + likelihood(every - hits, total - inside) - likelihood(every, total)
    return np.where(hits * (total - inside) > (every - hits) * inside, gained, 0.0)


def _tests(columns: Mapping[str, Column]) -> list[Clause]:
    found: list[Clause] = []
    domains = {name: list(dict.fromkeys(values)) for name, values in columns.items()}
    for name, domain in domains.items():
        if len(domain) < 2:
            continue
        if len(domain) <= MOST_VALUES:
            relations = ("is",) if len(domain) == 2 else ("is", "is not")
            found += [Clause(name, relation, value) for value in domain for relation in relations]
        if len(domain) > 2 and all(isinstance(v, int | float) and not isinstance(v, bool) for v in domain):
            bounds = sorted(domain)[1 if len(domain) <= MOST_VALUES else 0 : -1]  # "<= the least" is "is the least"
            bounds = bounds[:: max(1, len(bounds) // MOST_VALUES)]
            found += [Clause(name, relation, value) for value in bounds for relation in ("<=", ">")]
    names = list(domains)
    for k, name in enumerate(names):
        for other in names[k + 1 :]:
            if len(domains[name]) > 1 and set(domains[name]) == set(domains[other]):
                found += [Clause(name, relation, other, other=True) for relation in ("is", "is not")]
    return found


def _difference(
    inside: Bool[ndarray, " items"], wrong: Float[ndarray, " items"], group: Int[ndarray, " items"]
) -> Interval:
    """How much more often things go wrong inside than outside, with base inputs drawn again."""
    bases = int(group.max()) + 1
    weights = np.random.default_rng(0).multinomial(bases, np.full(bases, 1 / bases), size=DRAWS).astype(np.float64)

    def shares(where: Bool[ndarray, " items"]) -> tuple[float, ndarray]:
        sums = np.bincount(group[where], weights=wrong[where], minlength=bases)
        counts = np.bincount(group[where], minlength=bases)
        with np.errstate(invalid="ignore", divide="ignore"):
            drawn = (weights @ sums) / (weights @ counts)
        return float(wrong[where].mean()), np.where(np.isfinite(drawn), drawn, wrong[where].mean())

    (value, drawn), (other, also) = shares(inside), shares(~inside)
    return Interval.of(value - other, drawn - also, bases)
