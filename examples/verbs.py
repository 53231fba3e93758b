"""Does a language model keep a subject's number and the sentence's tense apart before it says the verb?

    plot-ot check examples/verbs.py --tokenizer smollm2
    plot-ot localize examples/verbs.py --model smollm2 --filter candidates

"Last year, the keys near the cabinet" goes on with "were": the subject is several, the other noun does not count.
"""

import random

import plot_ot

NOUNS = "key boy dog car book girl chair bird tree horse".split()
WHEN = {"present": ("Right now,", "Today,", "At this moment,"), "past": ("Last year,", "Yesterday,", "Long ago,")}
TENSES = {opening: tense for tense, openings in WHEN.items() for opening in openings}

hypothesis = plot_ot.Hypothesis(
    template="{opening} the {subject} {where} the {other}", answers=["is", "are", "was", "were"], name="verbs"
)


@hypothesis.variable
def number(subject: str) -> str:
    """One or several?"""
    return "plural" if subject.endswith("s") else "singular"


@hypothesis.variable
def tense(opening: str) -> str:
    """Now or then?"""
    return TENSES[opening]


@hypothesis.output
def verb(number: str, tense: str) -> str:
    """The form of "to be"."""
    one, several = ("is", "are") if tense == "present" else ("was", "were")
    return several if number == "plural" else one


def inputs(count: int = 700, seed: int = 1000) -> list[dict[str, str]]:
    """Sentences drawn at random."""
    rng, drawn = random.Random(seed), []
    for _ in range(count):
        subject, other = (noun + rng.choice(("", "s")) for noun in rng.sample(NOUNS, 2))
        where, opening = rng.choice("near behind under beside".split()), rng.choice(list(TENSES))
        drawn.append({"opening": opening, "subject": subject, "where": where, "other": other})
    return drawn
