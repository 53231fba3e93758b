"""Does a language model keep a person's gender and the pronoun's case apart before it says the pronoun?

    plot-ot check examples/pronouns.py --tokenizer smollm2
    plot-ot localize examples/pronouns.py --model smollm2 --filter candidates
"""

import random

import plot_ot

NAMES = {
    "she": "Mary Anna Emma Sarah Alice Laura Susan Linda Julia Lucy Helen Karen Jane Rachel Betty Nancy".split(),
    "he": "John Peter Tom David Paul James Mark Robert Henry Simon George Steven Jack Frank Kevin Brian".split(),
}
GENDERS = {name: gender for gender, names in NAMES.items() for name in names}
FRAMES = {
    "subject": (
        "{name} was late because",
        "{name} was tired, but",
        "{name} went home when",
        "{name} was sad because",
        "{name} left early although",
    ),
    "object": (
        "I met {name} yesterday, and I like",
        "I saw {name}, and then I called",
        "There is {name}! Let us talk to",
        "I know {name} well, and I trust",
        "We looked for {name} until we found",
    ),
}
CASES = {frame: case for case, frames in FRAMES.items() for frame in frames}

hypothesis = plot_ot.Hypothesis(
    inputs=["frame", "name"],
    template=lambda given: given["frame"].format(name=given["name"]),
    answers=["she", "he", "her", "him"],
    name="pronouns",
)


@hypothesis.variable
def gender(name: str) -> str:
    """She or he?"""
    return GENDERS[name]


@hypothesis.variable
def case(frame: str) -> str:
    """Who does something, or whom something is done to?"""
    return CASES[frame]


@hypothesis.output
def pronoun(gender: str, case: str) -> str:
    """The pronoun."""
    return gender if case == "subject" else {"she": "her", "he": "him"}[gender]


def inputs(count: int = 700, seed: int = 1000) -> list[dict[str, str]]:
    """Sentences drawn at random."""
    rng = random.Random(seed)
    return [{"frame": rng.choice(list(CASES)), "name": rng.choice(list(GENDERS))} for _ in range(count)]
