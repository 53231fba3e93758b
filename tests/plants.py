"""Language models written by hand: sums modulo three, computed at a known token, block, head and subspace."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

from plot_ot.abstract.causal_model import CausalModel
from plot_ot.subjects.decoder.subject import DecoderSubject

VALUES, DIGITS = 3, 6
TOKENS = DIGITS + 1
SLOTS = {
    "constant": 1,
    "position": TOKENS,
    "token": VALUES,
    "bystander": VALUES,
    **{f"{v}{k}": VALUES for v in "pq" for k in (0, 1)},
    "p": VALUES,
    "q": VALUES,
    "p read": VALUES,
    "q read": VALUES,
    "y": VALUES,
}
HEADS, WIDTH, LARGE = 6, 72, 30.0
DIGIT_ROWS = torch.cartesian_prod(*[torch.arange(VALUES)] * DIGITS)

SUMS = CausalModel(
    [f"x{k}" for k in range(DIGITS)],
    {
        "p": lambda x0, x1: (x0 + x1) % VALUES,
        "q": lambda x2, x3: (x2 + x3) % VALUES,
        "y": lambda p, q: (p + q) % VALUES,
    },
    "y",
)


@dataclass(frozen=True)
class Plan:
    """Where the two sums are computed, moved to the last token, and added."""

    tokens: tuple[int, int]
    blocks: tuple[int, int]
    moves: int
    adds: int
    heads: tuple[int, int]
    """The heads that move p and q."""
    summands: tuple[tuple[int, int], tuple[int, int]]


class Stream:
    """A residual stream whose named slots are rotated directions with mean zero, so that layer norm only scales it."""

    def __init__(self, generator: torch.Generator) -> None:
        random = torch.randn(WIDTH, WIDTH, generator=generator)
        random[:, 0] = 1.0
        basis = torch.linalg.qr(random)[0][:, 1:]  # all orthogonal to the mean
        names, sizes = list(SLOTS), list(SLOTS.values())
        self.slot: dict[str, Tensor] = dict(
            zip([*names, "rest"], basis.split([*sizes, basis.shape[1] - sum(sizes)], dim=1), strict=True)
        )
        self.scale = LARGE / WIDTH**0.5
        """What undoes layer norm: the constant is nearly all of the norm."""

    def read(self, name: str) -> Tensor:
        """Columns that read a slot after layer norm."""
        return self.slot[name] * self.scale


def wired(plan: Plan, depth: int, generator: torch.Generator, noise: float = 0.003) -> tuple[GPT2LMHeadModel, Stream]:
    """A GPT-2 that answers (x0 + x1 + x2 + x3) mod 3 by the plan, with bystanders and noise on all weights."""
    config = GPT2Config(
        vocab_size=VALUES + 1,
        n_positions=TOKENS,
        n_embd=WIDTH,
        n_layer=depth,
        n_head=HEADS,
        activation_function="relu",
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    model, stream = GPT2LMHeadModel(config).eval(), Stream(generator)
    slot = stream.slot
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_gain = "ln_" in name and name.endswith("weight")
            random = torch.randn(parameter.shape, generator=generator) * noise
            parameter.copy_(torch.ones_like(parameter) if is_gain else random * (0 if parameter.ndim == 1 else 1))
        trunk = model.transformer
        trunk.wte.weight[:VALUES] += slot["token"].T
        trunk.wpe.weight += slot["position"].T + LARGE * slot["constant"].T
        for k, name in enumerate("pq"):
            block, others = trunk.h[plan.blocks[k]], [h for h in range(HEADS) if h not in plan.heads]
            for j, digit in enumerate(plan.summands[k]):
                head = others[2 * k + j] if plan.blocks[0] == plan.blocks[1] else others[j]
                _move(block.attn, stream, head, plan.tokens[k], digit, "token", f"{name}{j}")
            _add(block.mlp, stream, (f"{name}0", f"{name}1"), name, 9 * k)
            _move(trunk.h[plan.moves].attn, stream, plan.heads[k], TOKENS - 1, plan.tokens[k], name, f"{name} read")
        spare = plan.heads[0] if plan.blocks[0] != plan.moves else None
        if spare is not None:
            _move(trunk.h[plan.blocks[0]].attn, stream, spare, plan.tokens[0], 4 % plan.tokens[0], "token", "bystander")
        _add(trunk.h[plan.adds].mlp, stream, ("p read", "q read"), "y", 18)
        model.lm_head.weight[:VALUES] += 8 * stream.read("y").T
    return model, stream


def _move(attention: nn.Module, stream: Stream, head: int, to: int, at: int, what: str, where: str) -> None:
    """Head: the token at position `to` looks at position `at` and copies a slot from there into another."""
    width = WIDTH // HEADS
    columns = slice(head * width, (head + 1) * width)
    weight = attention.c_attn.weight  # [in, 3 * out]
    query, key, value = (weight[:, k * WIDTH : (k + 1) * WIDTH][:, columns] for k in range(3))
    positions = stream.read("position")
    query[:, 0] += 40 * positions[:, to]
    key[:, 0] += 10 * positions[:, at]
    value[:, :VALUES] += stream.read(what)
    attention.c_proj.weight[columns][:VALUES] += stream.slot[where].T


def _add(mlp: nn.Module, stream: Stream, summands: tuple[str, str], total: str, first: int) -> None:
    """Nine hidden units see every pair of values, and write their sum modulo three."""
    for i in range(VALUES):
        for j in range(VALUES):
            unit = first + VALUES * i + j
            mlp.c_fc.weight[:, unit] += 4 * (stream.read(summands[0])[:, i] + stream.read(summands[1])[:, j])
            mlp.c_fc.bias[unit] -= 6
            mlp.c_proj.weight[unit] += 0.5 * stream.slot[total][:, (i + j) % VALUES]


def random_plan(seed: int, depth: int, *, aligned: bool = True, at_last: bool = False) -> Plan:
    """A plan drawn at random; not `aligned`, the same answer is computed through other sums."""
    g = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (1,), generator=g))

    blocks = draw(0, depth - 2), draw(0, depth - 2)
    moves = draw(max(blocks) + 1, depth)
    tokens = (TOKENS - 1, TOKENS - 1) if at_last else (draw(3, TOKENS - 1), draw(3, TOKENS - 1))
    heads = torch.randperm(HEADS, generator=g)[:2].tolist()
    summands = ((0, 1), (2, 3)) if aligned else ((0, 2), (1, 3))
    return Plan(tokens, blocks, moves, draw(moves, depth), (heads[0], heads[1]), summands)


def encode(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Digits and a last token that asks."""
    ids = torch.cat([rows, torch.full((len(rows), 1), VALUES)], dim=1)
    return ids, torch.ones_like(ids)


def as_subject(model: nn.Module, tokens: Sequence[int] = (), **options: object) -> DecoderSubject:
    """The model with some digits' tokens besides the last."""
    positions = {f"x{k}": (lambda rows, k=k: torch.full((len(rows),), k - TOKENS)) for k in tokens}
    return DecoderSubject(model, encode, [[k] for k in range(VALUES)], positions=positions, **options)  # type: ignore[arg-type]
