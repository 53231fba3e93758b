"""Greater-than: does a language model keep the decade of a year apart from the question before or after?

    python examples/years.py        # on SmolLM2: a few minutes

"The war began in the year 1732 and ended in the year 17" goes on with 3 or more; "The war ended in the year 1732. It had
begun in the year 17" with 3 or less. Many digits are right, so answers are read as sets (docs/outputs.md).
"""

import random

import plot_ot

SENTENCES = {
    "after": "The {event} began in the year 17{decade}{year} and ended in the year 17",
    "before": "The {event} ended in the year 17{decade}{year}. It had begun in the year 17",
}
ORDERS, DECADES = tuple(SENTENCES), range(1, 9)
EVENTS = "war siege feud revolt trial voyage strike famine drought reign".split()

prompts = plot_ot.Hypothesis(
    inputs=["order", "event", "decade", "year"],
    template=lambda given: SENTENCES[given["order"]].format(**given),
    answers=[str(digit) for digit in range(10)],
    name="years",
)
prompts.output(name="digit", parents=["decade"])(str)
# Values are coded in the order in which they are first seen: here decade d as d - 1, and ORDERS[k] as k.
prompts.rows([{"order": o, "event": EVENTS[0], "decade": d, "year": 1} for o in ORDERS for d in DECADES])

causal = plot_ot.CausalModel(
    prompts.inputs,
    {
        "bound": lambda decade: decade,
        "direction": lambda order: order,
        "digits": lambda bound, direction: bound + len(DECADES) * direction,
    },
    "digits",
)
readout = plot_ot.answer_sets([[*range(d, 10)] for d in DECADES] + [[*range(d + 1)] for d in DECADES], classes=10)
"""What is right: from decade d on, and up to decade d."""


def inputs(count: int = 700, seed: int = 1000) -> list[dict[str, str | int]]:
    """Sentences drawn at random."""
    rng, drawn = random.Random(seed), []
    for _ in range(count):
        given = {"order": rng.choice(ORDERS), "event": rng.choice(EVENTS)}
        drawn.append(given | {"decade": rng.choice(DECADES), "year": rng.randrange(1, 9)})
    return drawn


if __name__ == "__main__":
    subject = plot_ot.load_subject("smollm2", prompts)
    print(plot_ot.localize(subject, causal, prompts.rows(inputs()), readout=readout))
