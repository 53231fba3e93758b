"""Planted language models that use a name and a colour which stand elsewhere in every prompt.

A prompt is a start, a few words in any order and an end. The answer is told by a name and a colour together. There is
one colour; which name counts is the model's kind: the `only` one, the one after a `mark`, or the `last` of two. In the
first block a token learns whether it follows the mark; in later ones the last token fetches the name and the colour
that count. So between these blocks each variable is at a token that moves.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor, nn

from plot_ot.abstract.causal_model import CausalModel, Mechanism
from plot_ot.subjects import DecoderSubject
from truth.attention import HEAD, Wired

KINDS = ("only", "mark", "last")
NAMES, COLOURS, FILLERS = 4, 3, 6
START, END, MARK, NAME = 1, 2, 3, 4
COLOUR, FILLER = NAME + NAMES, NAME + NAMES + COLOURS
ANSWER = FILLER + FILLERS
SHORTEST, LONGEST = 5, 8
"""Words between start and end."""
INPUTS = ("name", "other", "colour", "arrangement")


@dataclass(frozen=True)
class Moving:
    """A planted model, and the prompts that its input rows stand for."""

    model: nn.Module
    kind: str
    prompts: list[list[int]]
    where: list[dict[str, int]]
    """Of every arrangement the positions of name and colour, from the end."""
    rows: Int[Tensor, "rows inputs"]

    def encode(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Rows as tokens: an arrangement is a prompt with holes for the name, the other name and the colour."""
        made = [self._filled(*row) for row in rows.tolist()]
        longest = max(map(len, made))
        ids = [[0] * (longest - len(p)) + p for p in made]
        mask = [[0] * (longest - len(p)) + [1] * len(p) for p in made]
        return torch.tensor(ids), torch.tensor(mask)

    def _filled(self, name: int, other: int, colour: int, arrangement: int) -> list[int]:
        values = {-1: NAME + name, -2: NAME + other, -3: COLOUR + colour}
        return [values.get(t, t) for t in self.prompts[arrangement]]

    def true_position(self, variable: str) -> object:
        """Where the token of a variable is, as a position."""
        return lambda rows: torch.tensor([self.where[a][variable] for a in rows[:, 3].tolist()])

    def subject(self, **options: object) -> DecoderSubject:
        """The model, seen after its first block."""
        answers = [(ANSWER + y,) for y in range(NAMES * COLOURS)]
        return DecoderSubject(self.model, self.encode, answers, **{"layers": (0,), **options})


def causal() -> CausalModel:
    """The answer tells the name that counts, and the colour."""
    parts = {
        "who": Mechanism(("name",), lambda name: name),
        "hue": Mechanism(("colour",), lambda colour: colour),
        "y": Mechanism(("who", "hue"), lambda who, hue: COLOURS * who + hue),
    }
    return CausalModel(list(INPUTS), parts, "y")


@torch.no_grad()
def moving(kind: str, seed: int, arrangements: int = 60) -> Moving:
    """The planted model of a kind and seed, with prompts in so many arrangements."""
    g = torch.Generator().manual_seed(seed)
    net = Wired(ANSWER + NAMES * COLOURS, LONGEST + 2)
    name, colour, filler = net.channels(NAMES), net.channels(COLOURS), net.channels(4)
    [end], [is_name], [is_colour], [is_mark], [marked] = (net.channels(1) for _ in range(5))
    who, hue = net.channels(NAMES), net.channels(COLOURS)
    net.says(END, end)
    net.says(MARK, is_mark)
    for v in range(NAMES):
        net.says(NAME + v, name[v])
        net.says(NAME + v, is_name)
    for v in range(COLOURS):
        net.says(COLOUR + v, colour[v])
        net.says(COLOUR + v, is_colour)
    for v in range(FILLERS):
        for channel in filler:
            net.says(FILLER + v, channel, float(torch.randn((), generator=g)))
    for y in range(NAMES * COLOURS):
        net.hears(ANSWER + y, who[y // COLOURS], 8)
        net.hears(ANSWER + y, hue[y % COLOURS], 8)
    before = (0, int(torch.randint(4, (), generator=g)))
    for t in range(1, LONGEST + 2):
        net.asks(before, t, net.place[t], 30)
        net.answers(before, t, net.place[t - 1])
    net.moves(before, 0, [is_mark], [marked], torch.ones(1, 1))
    fetches_name, fetches_colour = (
        (1, int(torch.randint(4, (), generator=g))),
        (2, int(torch.randint(4, (), generator=g))),
    )
    for at, sign in ((fetches_name, marked if kind == "mark" else is_name), (fetches_colour, is_colour)):
        net.rests_at_start(at, 10)
        net.asks(at, HEAD - 1, end, 120)
        net.answers(at, HEAD - 1, sign)
    if kind == "last":
        for t in range(LONGEST + 2):  # the later, the more it is looked at
            net.answers(fetches_name, HEAD - 1, net.place[t], 0.02 * t)
    net.moves(fetches_name, 0, name, who, torch.eye(NAMES))
    net.moves(fetches_colour, 0, colour, hue, torch.eye(COLOURS))
    prompts, where = _arranged(kind, arrangements, g)
    values = torch.cartesian_prod(torch.arange(NAMES), torch.arange(NAMES), torch.arange(COLOURS))
    drawn = values[torch.randint(len(values), (8 * arrangements,), generator=g)]
    rows = torch.cat([drawn, torch.arange(arrangements).repeat(8).unsqueeze(1)], dim=1).unique(dim=0)
    return Moving(net.turned(g), kind, prompts, where, rows[torch.randperm(len(rows), generator=g)])


def _arranged(kind: str, count: int, g: torch.Generator) -> tuple[list[list[int]], list[dict[str, int]]]:
    """Prompts with holes, -1 for the name that counts, -2 for another and -3 for the colour; and where they are."""
    prompts, where = list[list[int]](), list[dict[str, int]]()
    while len(prompts) < count:
        parts = {"only": [[-1], [-3]], "mark": [[MARK, -1], [-2], [-3]], "last": [[-2], [-1], [-3]]}[kind]
        length = SHORTEST + int(torch.randint(LONGEST - SHORTEST + 1, (), generator=g))
        fillers = length - sum(map(len, parts))
        parts += [[FILLER + int(torch.randint(FILLERS, (), generator=g))] for _ in range(fillers)]
        order = torch.randperm(len(parts), generator=g).tolist()
        if kind == "last" and order.index(0) > order.index(1):
            continue
        prompt = [START, *(t for k in order for t in parts[k]), END]
        prompts.append(prompt)
        where.append({"who": prompt.index(-1) - len(prompt), "hue": prompt.index(-3) - len(prompt)})
    return prompts, where
