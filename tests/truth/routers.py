"""Planted language models in which a quiet head tells a loud one where to look.

The prompt is start x0 x1 x2 x3 r n end, and the answer is the value that stands where r points. Heads at the last token
(at the others they look at the start, where there is nothing):

- the router fetches r, quietly, and also n, loudly, which it writes among the answers;
- the cleaner takes n out again, fetched by itself: as long as both see the same n, n does not matter;
- the mover looks where the router's r points, and moves that value loudly to the answers;
- a backup router fetches r for a backup mover, which moves the same value so quietly that no answer depends on it;
- the others fetch values into directions that nudge the answers a little.

So taking the router's output from another prompt does much besides pointing elsewhere: by its whole effect it looks
worse than the backup router, which changes nothing but the variable, and changes no answer. What reaches the mover of
it is the pointer alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from plot_ot.abstract.causal_model import CausalModel
from plot_ot.subjects import DecoderSubject
from truth.attention import HEAD, HEADS, At, Wired

VALUES, LENGTH = 4, 8
START, END, VALUE, POINTER, NUISANCE = 2, 3, 4, 8, 12
"""The ids of the first and the last token; the first of those of values, pointers and n."""
R, N = 5, 6
"""Where r and n stand."""
ANSWER = 16
WHERE = "where"


@dataclass(frozen=True)
class Routed:
    """A planted model and what was planted."""

    model: nn.Module
    router: str
    mover: str
    backup: str

    @property
    def path(self) -> str:
        """The path that carries the variable."""
        return f"{self.router}->{self.mover}"

    def subject(self) -> DecoderSubject:
        """The model, seen through its heads at the last token."""
        answers = [(ANSWER + v,) for v in range(VALUES)]
        return DecoderSubject(self.model, encode, answers, kinds=("head_output",))


def encode(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Rows x0 x1 x2 x3 r n as tokens."""
    first = torch.tensor([VALUE] * VALUES + [POINTER, NUISANCE])
    ends = torch.tensor([[START, END]]).expand(len(rows), -1)
    ids = torch.cat([ends[:, :1], rows.long() + first, ends[:, 1:]], dim=1)
    return ids, torch.ones_like(ids)


def causal() -> CausalModel:
    """The answer is the value that `where` points to."""

    def pointed(x0: Tensor, x1: Tensor, x2: Tensor, x3: Tensor, where: Tensor) -> Tensor:
        return torch.stack([x0, x1, x2, x3], dim=1).gather(1, where.long().unsqueeze(1)).squeeze(1)

    return CausalModel(["x0", "x1", "x2", "x3", "r", "n"], {WHERE: lambda r: r, "y": pointed}, "y")


@torch.no_grad()
def routed(seed: int) -> Routed:
    """The planted model of a seed: which heads do what, how loud they are, and all directions are drawn."""
    g = torch.Generator().manual_seed(seed)

    def between(low: float, high: float) -> float:
        return low + (high - low) * float(torch.rand((), generator=g))

    net = Wired(32, LENGTH)
    value, pointer, nuisance, [end] = (net.channels(n) for n in (VALUES, VALUES, VALUES, 1))
    told, backup_told, answer, nudge = (net.channels(n) for n in (VALUES, VALUES, VALUES, 3 * VALUES))
    for v in range(VALUES):
        for first, group in ((VALUE, value), (POINTER, pointer), (NUISANCE, nuisance)):
            net.says(first + v, group[v])
        net.hears(ANSWER + v, answer[v], 8)
        for channel in nudge:
            net.hears(ANSWER + v, channel, 0.3 * float(torch.randn((), generator=g)))
    net.says(END, end)

    def looks_at(at: At, tokens: list[int]) -> None:
        """The last token's query asks for these tokens alike, all others for the start."""
        net.rests_at_start(at, 10)
        net.asks(at, HEAD - 1, end, 200)
        for t in tokens:
            net.answers(at, HEAD - 1, net.place[t])

    def follows(at: At, code: list[int]) -> None:
        """The query is a pointer's code, the keys are positions."""
        net.rests_at_start(at, 3)
        for t in range(VALUES):
            net.asks(at, t, code[t], 300)
            net.answers(at, t, net.place[1 + t])

    early = [(layer, h) for layer in (0, 1) for h in range(HEADS)]
    early = [early[k] for k in torch.randperm(len(early), generator=g).tolist()]
    late = [(2, h) for h in torch.randperm(HEADS, generator=g).tolist()]
    router, backup, *idle = early
    mover, backup_mover, cleaner, last = late
    eye = torch.eye(VALUES)
    speech = torch.randn(VALUES, VALUES, generator=g)  # what n says about the answers
    for side in (0, 1):  # layer norms take means away: nothing here depends on them
        speech = speech - speech.mean(dim=side, keepdim=True)
    speech = between(1.5, 3.0) * speech
    looks_at(router, [R, N])
    net.moves(router, 0, pointer, told, between(0.2, 0.5) * eye)
    net.moves(router, 4, nuisance, answer, 2 * speech)  # it looks at two tokens, so it fetches half of each
    looks_at(cleaner, [N])
    net.moves(cleaner, 0, nuisance, answer, -speech)
    follows(mover, told)
    net.moves(mover, 0, value, answer, eye)
    looks_at(backup, [R])
    net.moves(backup, 0, pointer, backup_told, 0.5 * eye)
    follows(backup_mover, backup_told)
    net.moves(backup_mover, 0, value, answer, between(0.1, 0.3) * eye)
    for at in [*idle, last]:
        looks_at(at, [1 + int(torch.randint(VALUES, (), generator=g))])
        some = torch.randn(VALUES, len(nudge), generator=g) / VALUES
        net.moves(at, 0, value, nudge, some)
    names = [f"head_output.{layer}.{number}" for layer, number in (router, mover, backup)]
    return Routed(net.turned(g), *names)
