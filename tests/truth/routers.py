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
import transformers
from torch import Tensor, nn

from plot_ot.abstract.causal_model import CausalModel
from plot_ot.subjects import DecoderSubject

LAYERS, HEADS, WIDTH = 3, 4, 64
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


class _Channels:
    """Directions of the residual stream, given out in groups."""

    def __init__(self) -> None:
        self.used = 0

    def take(self, count: int) -> list[int]:
        self.used += count
        return list(range(self.used - count, self.used))


@torch.no_grad()
def routed(seed: int) -> Routed:
    """The planted model of a seed: which heads do what, how loud they are, and all directions are drawn."""
    g = torch.Generator().manual_seed(seed)

    def between(low: float, high: float) -> float:
        return low + (high - low) * float(torch.rand((), generator=g))

    config = transformers.GPT2Config(
        vocab_size=32,
        n_embd=WIDTH,
        n_layer=LAYERS,
        n_head=HEADS,
        n_positions=LENGTH,
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=False,
    )
    model = transformers.GPT2LMHeadModel(config).eval()
    for name, p in model.named_parameters():
        p.zero_()
        if ".ln" in name and name.endswith("weight"):
            p.fill_(1.0)
    channels = _Channels()
    value, pointer, nuisance, place, [end] = (channels.take(n) for n in (VALUES, VALUES, VALUES, LENGTH, 1))
    told, backup_told, answer, nudge = (channels.take(n) for n in (VALUES, VALUES, VALUES, 3 * VALUES))
    trunk, width = model.transformer, WIDTH // HEADS
    for v in range(VALUES):
        for first, group in ((VALUE, value), (POINTER, pointer), (NUISANCE, nuisance)):
            trunk.wte.weight[first + v, group[v]] = 1
        model.lm_head.weight[ANSWER + v, answer[v]] = 8
        model.lm_head.weight[ANSWER + v, nudge] = 0.3 * torch.randn(len(nudge), generator=g)
    trunk.wte.weight[END, end] = 1
    for t in range(LENGTH):
        trunk.wpe.weight[t, place[t]] = 2

    def head(layer: int, number: int) -> tuple[nn.Module, list[int]]:
        return trunk.h[layer].attn, list(range(number * width, (number + 1) * width))

    def rests_at_start(at: tuple[int, int], firmly: float) -> None:
        attention, own = head(*at)
        attention.c_attn.bias[own[-2]] = firmly
        attention.c_attn.weight[place[0], WIDTH + own[-2]] = 1

    def looks_at(at: tuple[int, int], tokens: list[int]) -> None:
        """The last token's query asks for these tokens alike, all others for the start."""
        attention, own = head(*at)
        rests_at_start(at, 10)
        attention.c_attn.weight[end, own[-1]] = 200
        for t in tokens:
            attention.c_attn.weight[place[t], WIDTH + own[-1]] = 1

    def follows(at: tuple[int, int], code: list[int]) -> None:
        """The query is a pointer's code, the keys are positions."""
        attention, own = head(*at)
        rests_at_start(at, 3)
        for t in range(VALUES):
            attention.c_attn.weight[code[t], own[t]] = 300
            attention.c_attn.weight[place[1 + t], WIDTH + own[t]] = 1

    def moves(at: tuple[int, int], slot: int, read: list[int], write: list[int], mix: Tensor) -> None:
        """Values in four dimensions of a head: what is read, and the matrix by which it is written."""
        attention, own = head(*at)
        for k, channel in enumerate(read):
            attention.c_attn.weight[channel, 2 * WIDTH + own[slot + k]] = 1
            for j, target in enumerate(write):
                attention.c_proj.weight[own[slot + k], target] += float(mix[k, j])

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
    moves(router, 0, pointer, told, between(0.2, 0.5) * eye)
    moves(router, 4, nuisance, answer, 2 * speech)  # it looks at two tokens, so it fetches half of each
    looks_at(cleaner, [N])
    moves(cleaner, 0, nuisance, answer, -speech)
    follows(mover, told)
    moves(mover, 0, value, answer, eye)
    looks_at(backup, [R])
    moves(backup, 0, pointer, backup_told, 0.5 * eye)
    follows(backup_mover, backup_told)
    moves(backup_mover, 0, value, answer, between(0.1, 0.3) * eye)
    for at in [*idle, last]:
        looks_at(at, [1 + int(torch.randint(VALUES, (), generator=g))])
        some = torch.randn(VALUES, len(nudge), generator=g) / VALUES
        moves(at, 0, value, nudge, some)
    _turn(model, g)
    names = [f"head_output.{layer}.{number}" for layer, number in (router, mover, backup)]
    return Routed(model, *names)


def _turn(model: nn.Module, g: torch.Generator) -> None:
    """Turn the residual stream, and the values of every head, so that no channel means anything by itself.

    Layer norms take away the mean: turns that keep the vector of ones keep what they do.
    """
    ones = torch.ones(WIDTH, 1) / WIDTH**0.5
    basis = torch.linalg.qr(torch.cat([ones, torch.randn(WIDTH, WIDTH - 1, generator=g)], dim=1))[0]
    inside = torch.linalg.qr(torch.randn(WIDTH - 1, WIDTH - 1, generator=g))[0]
    turn = basis @ torch.block_diag(torch.ones(1, 1), inside) @ basis.T
    for weight in (model.transformer.wte.weight, model.transformer.wpe.weight, model.lm_head.weight):
        weight.copy_(weight @ turn)
    width = WIDTH // HEADS
    for block in model.transformer.h:
        into, out = block.attn.c_attn.weight, block.attn.c_proj.weight
        into.copy_(turn.T @ into)
        out.copy_(out @ turn)
        for h in range(HEADS):
            q = torch.linalg.qr(torch.randn(width, width, generator=g))[0]
            own, values = slice(h * width, (h + 1) * width), slice(2 * WIDTH + h * width, 2 * WIDTH + (h + 1) * width)
            into[:, values] = into[:, values] @ q
            out[own] = q.T @ out[own]
