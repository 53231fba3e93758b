"""Is there one "how far along" for days, months, letters and numbers in a language model?

    plot-ot check examples/successors.py --tokenizer smollm2
    plot-ot localize examples/successors.py --model smollm2 --filter candidates

Two other sequences stand in front: "A, B, C\\nMay, June, July\\nTuesday, Wednesday," goes on with "Thursday".
"""

import random

import plot_ot

LISTS = {
    "day": "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split(),
    "month": "January February March April May June July".split(),
    "number": "one two three four five six seven".split(),
    "letter": "A B C D E F G".split(),
    "ordinal": "first second third fourth fifth sixth seventh".split(),
}
KINDS = {item: kind for kind, items in LISTS.items() for item in items}

hypothesis = plot_ot.Hypothesis(
    template="{shown}\n{before}, {last},", answers=[x for items in LISTS.values() for x in items[2:]], name="successors"
)


@hypothesis.variable
def kind(last: str) -> str:
    """A day, a month, a number, ...?"""
    return KINDS[last]


@hypothesis.variable
def rank(last: str) -> int:
    """The how-manyth of its list comes next?"""
    return LISTS[KINDS[last]].index(last) + 1


@hypothesis.output
def successor(kind: str, rank: int) -> str:
    """What comes next."""
    return LISTS[kind][rank]


def piece(rng: random.Random) -> list[str]:
    """Three neighbours of a list."""
    items, start = LISTS[rng.choice(list(LISTS))], rng.randrange(5)
    return items[start : start + 3]


def inputs(count: int = 700, seed: int = 1000) -> list[dict[str, str]]:
    """Sequences drawn at random, two others in front of each."""
    rng, drawn = random.Random(seed), []
    for _ in range(count):
        shown = "\n".join(", ".join(piece(rng)) for _ in range(2))
        before, last, _ = piece(rng)
        drawn.append({"shown": shown, "before": before, "last": last})
    return drawn
