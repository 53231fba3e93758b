"""Gates: the conditions of a verdict, each with a name and three answers (DESIGN §8).

A gate holds when the whole 95 % interval lies on the good side of its bound, fails when it lies on the bad side, and
otherwise cannot say. The bounds are fixed here; `docs/trust.md` argues for each.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum

from plot_ot.judging.intervals import Accuracy, Interval, at_most

MARGIN = 0.05
"""How far a handle must be ahead of every control."""
WORKS = 0.8
"""The least share of discriminating pairs on which a handle that is called placed is right."""
KEEPS = 0.9
"""The least share of pairs whose answer the handle leaves as it should be: of those that keep the variable, and of
those that change it without a change of the answer."""
READS = 0.05
"""What a handle may lose when it reads only directions that the network uses later."""
COMPACT_LOSS = 0.02
"""What a compact handle may lose against swapping its whole place."""
SHARED = -1.0
"""In the place of a number of inputs that would decide: none would, other places might."""
LEAST_PAIRS = 10
"""Of every kind of pair that a verdict needs, at least so many."""
LEAST_BASES = 20
"""Base inputs among the discriminating pairs below which nothing is called placed."""


class Answer(str, Enum):
    """What a gate says."""

    HOLDS = "holds"
    FAILS = "fails"
    CANNOT_SAY = "cannot say"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class Gate:
    """One condition of a verdict: its answer, the number it looked at with its interval, and the bound."""

    name: str
    answer: Answer
    value: float
    low: float
    high: float
    bound: float
    sentence: str
    """What the answer rests on, in words."""
    more: float = 1.0
    """How many times as many base inputs would decide, where the gate cannot say; `SHARED` where none would."""

    @property
    def holds(self) -> bool:
        """Whether the condition is met beyond doubt."""
        return self.answer is Answer.HOLDS

    @property
    def fails(self) -> bool:
        """Whether the condition is broken beyond doubt."""
        return self.answer is Answer.FAILS


def beats(control: str, difference: Interval, margin: float = MARGIN) -> Gate:
    """The handle is ahead of a control by more than the margin."""
    name = f"beats {control}"
    words = {
        Answer.HOLDS: f"{name} by {_span(difference)}",
        Answer.FAILS: f"does not beat {control} by {margin:g} (difference {_span(difference)})",
        Answer.CANNOT_SAY: f"may or may not beat {control} by {margin:g} (difference {_span(difference)})",
    }
    return _gate(name, difference, margin, words)


def beats_unless_shared(control: str, difference: Interval, reached: Interval) -> Gate:
    """The handle is ahead of a control; where it is not, a control that carries the variable itself proves nothing.

    Whatever is right on 80 % of the pairs that tell the variable from its rivals swaps it, however it was found. That
    says that it is in more than one place, or that a place is so narrow that a random handle takes it whole; not that
    it is absent where the handle is.
    """
    gate = beats(control, difference)
    if gate.holds or reached.low < WORKS:
        return gate
    also = f"{control} are right on {reached.value:.3f} of the discriminating pairs as well, so they carry it, too"
    return replace(gate, answer=Answer.CANNOT_SAY, sentence=also, more=SHARED)


def none_better(count: int, best: Interval) -> Gate:
    """No random handle does better: `best` is the difference to the best of so many."""
    answer = Answer.HOLDS if best.value >= 0 else Answer.FAILS if best.high < 0 else Answer.CANNOT_SAY
    ahead = f"the best of {count} random handles is ahead by {-best.value:.3f}"
    words = f"none of {count} random handles does better" if answer is Answer.HOLDS else ahead
    more = _more(best, 0.0) if answer is Answer.CANNOT_SAY else 1.0
    return Gate("no random handle does better", answer, best.value, best.low, best.high, 0.0, words, more)


def works(accuracy: Accuracy, bases: int) -> Gate:
    """The handle is right on most discriminating pairs, and there are enough independent base inputs to say so."""
    interval = Interval(accuracy.value, accuracy.low, accuracy.high, bases)
    share = f"right on {_share(accuracy)} of the discriminating pairs"
    words = {
        Answer.HOLDS: share,
        Answer.FAILS: f"{share}, below {WORKS:.0%}",
        Answer.CANNOT_SAY: f"{share}: whether that is {WORKS:.0%} or more is open",
    }
    gate = _gate("works", interval, WORKS, words, closed=True)
    if gate.holds and bases < LEAST_BASES:
        few = f"{share}, but these have only {bases} base inputs ({LEAST_BASES} are needed)"
        return Gate(gate.name, Answer.CANNOT_SAY, *_numbers(interval), WORKS, few, LEAST_BASES / bases)
    return gate


def leaves_the_rest_alone(kept: Accuracy, bases: int) -> Gate:
    """Where the source keeps the variable's value, the handle keeps the answer."""
    return _keeps("leaves the rest alone", "pairs that keep the variable", kept, bases)


def stays_where_nothing_shows(still: Accuracy, bases: int) -> Gate:
    """Where the variable changes and the answer should not, the handle keeps the answer.

    A handle that writes the answer itself, by what it can decode of the variable, overshoots there.
    """
    pairs = "pairs whose answer should stay though the variable changes"
    return _keeps("stays where nothing shows", pairs, still, bases)


def _keeps(name: str, pairs: str, right: Accuracy, bases: int) -> Gate:
    interval = Interval(right.value, right.low, right.high, bases)
    share = f"right on {_share(right)} of the {pairs}"
    words = {
        Answer.HOLDS: share,
        Answer.FAILS: f"{share}, below {KEEPS:.0%}",
        Answer.CANNOT_SAY: f"{share}: whether that is {KEEPS:.0%} or more is open",
    }
    return _gate(name, interval, KEEPS, words, closed=True)


def does_more_than(part: str, difference: Interval) -> Gate:
    """The handle swaps the variable, not one thing it is made of.

    `difference` is how much more often it gives the variable's answer than that of swapping this thing alone, on pairs
    where the two differ and the second would show.
    """
    name = f"does more than swap {part}"
    where = f"where swapping {part} alone would change the answer to another one"
    words = {
        Answer.HOLDS: f"{where}, it does not follow ({_span(difference)})",
        Answer.FAILS: f"{where}, it gives that one more often ({_span(difference)}): it carries {part}",
        Answer.CANNOT_SAY: f"{where}, which of the two it gives is open ({_span(difference)})",
    }
    gate = _gate(name, difference, 0.0, words)
    # one that gives neither answer carries neither
    neither = gate.fails and difference.high == 0
    return replace(gate, answer=Answer.CANNOT_SAY, sentence=words[Answer.CANNOT_SAY]) if neither else gate


def right_where_a_part_is_not_enough(part: str, enough: float, beyond: float, difference: Interval) -> Gate:
    """The handle swaps the variable, not one thing it is made of: the same gate, asked of other pairs.

    `enough` and `beyond` are the shares of discriminating pairs on which it is right, where swapping this thing alone
    gives the variable's answer and where it does not; `difference` is the second less half of the first.
    """
    where = (
        f"it is right on {enough:.2f} of the pairs where swapping {part} alone would do and on {beyond:.2f} of others"
    )
    words = dict.fromkeys(Answer, where) | {Answer.FAILS: f"{where}: it carries {part}"}
    return _gate(f"does more than swap {part}", difference, 0.0, words)


def reads_what_is_used(difference: Interval, kept: int, width: int) -> Gate:
    """The same writing with a reading made of used directions alone does as well; `difference` is what that changes."""
    used = f"rebuilt from the {kept} of {width} directions that are used later"
    words = {
        Answer.HOLDS: f"{used}, its share of right pairs changes by {_span(difference)}",
        Answer.FAILS: f"{used}, its share of right pairs falls: {_span(difference)}",
        Answer.CANNOT_SAY: f"{used}, its share of right pairs may fall by more than {READS:g}: {_span(difference)}",
    }
    return _gate("reads what is used", difference, -READS, words)


def works_from_what_is_used(reads: Gate, rebuilt: Accuracy) -> Gate:
    """The gate before, of a handle that loses something when rebuilt, but then passes every other gate by itself.

    The variable is used here, for a handle that reads nothing else shows it.
    """
    words = (
        f"{reads.sentence}; even so it passes every other gate, right on {_share(rebuilt)} of the discriminating pairs"
    )
    return replace(reads, answer=Answer.HOLDS, sentence=words)


def compact(size: int, width: int, to_patch: Interval, to_subspaces: Interval) -> Gate:
    """Fewer directions than the place has, no loss against its full patch, and better than random subspaces."""
    what = f"{size} of {width} dimensions"
    if size >= width:
        return Gate("compact", Answer.FAILS, size, size, size, width, f"uses {what}")
    gates = (
        _gate(
            "compact", to_patch, -COMPACT_LOSS, dict.fromkeys(Answer, f"{what}; to the full patch {_span(to_patch)}")
        ),
        _gate("compact", to_subspaces, 0.0, dict.fromkeys(Answer, f"{what}; to random ones {_span(to_subspaces)}")),
    )
    return min(gates, key=lambda g: (Answer.FAILS, Answer.CANNOT_SAY, Answer.HOLDS).index(g.answer))


def _gate(name: str, x: Interval, bound: float, words: dict[Answer, str], closed: bool = False) -> Gate:
    """Above the bound, or `closed`: at it."""
    above = x.low >= bound if closed else x.low > bound
    below = x.high < bound if closed else x.high <= bound
    answer = Answer.HOLDS if above else Answer.FAILS if below else Answer.CANNOT_SAY
    more = _more(x, bound) if answer is Answer.CANNOT_SAY else 1.0
    return Gate(name, answer, *_numbers(x), bound, words[answer], more)


def _more(x: Interval, bound: float) -> float:
    """How many times as many base inputs would move the nearer end of the interval to the bound.

    Widths shrink with the square root of the number; those around a share of 0 or 1, with the number itself.
    """
    distance = abs(x.value - bound)
    width = x.value - x.low if x.value > bound else x.high - x.value
    if distance < 1e-9:  # at the bound, but for rounding
        return math.inf
    by_rule = math.isclose(width, at_most(0.0, x.bases), rel_tol=1e-6)
    ratio = width / distance
    return max(1.0, ratio if by_rule else ratio**2)


def _numbers(x: Interval) -> tuple[float, float, float]:
    return x.value, x.low, x.high


def _span(x: Interval) -> str:
    return f"{x.value:+.3f} [{x.low:+.3f}, {x.high:+.3f}]"


def _share(x: Accuracy) -> str:
    return f"{x.value:.3f} [{x.low:.3f}, {x.high:.3f}]"


def deciding(gates: Sequence[Gate]) -> float:
    """How many times as many base inputs would let every gate say something; `SHARED` where other places would."""
    return max((g.more for g in gates if g.answer is Answer.CANNOT_SAY), default=1.0)
