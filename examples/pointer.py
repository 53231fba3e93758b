"""Does a language model find the right line of a multiple-choice question before it says the letter?

    plot-ot check examples/pointer.py --tokenizer tiny
    plot-ot localize examples/pointer.py --model tiny
"""

import random

import plot_ot

hypothesis = plot_ot.Hypothesis(
    template="Question: A {noun} is {color}. What color is a {noun}?\n"
    "{s0}. {c0}\n{s1}. {c1}\n{s2}. {c2}\n{s3}. {c3}\nAnswer:"
)


@hypothesis.variable
def pointer(color: str, c0: str, c1: str, c2: str, c3: str) -> int:
    """Which of the four lines names the colour that was asked for."""
    return [c0, c1, c2, c3].index(color)


@hypothesis.output
def answer(pointer: int, s0: str, s1: str, s2: str, s3: str) -> str:
    """The letter at the head of that line."""
    return [s0, s1, s2, s3][pointer]


rng, inputs = random.Random(1000), []
for _ in range(300):
    c, s = rng.sample("red blue yellow green gray black white brown".split(), 4), rng.sample("ABCDEFGH", 4)
    given = {"noun": rng.choice("chair bear brick spoon lemon".split()), "color": rng.choice(c)}
    inputs.append(given | {f"c{k}": x for k, x in enumerate(c)} | {f"s{k}": x for k, x in enumerate(s)})
