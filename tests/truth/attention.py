"""Language models whose attention heads are wired by hand: what each looks at, and what it fetches where."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import transformers
from torch import Tensor, nn

LAYERS, HEADS, WIDTH = 3, 4, 64
HEAD = WIDTH // HEADS
At = tuple[int, int]
"""A head: its layer and number."""


class Wired:
    """A GPT-2 of zeros, whose residual stream is given out in channels; every token knows its position."""

    def __init__(self, vocabulary: int, length: int) -> None:
        config = transformers.GPT2Config(
            vocab_size=vocabulary,
            n_embd=WIDTH,
            n_layer=LAYERS,
            n_head=HEADS,
            n_positions=length,
            bos_token_id=1,
            eos_token_id=2,
            tie_word_embeddings=False,
        )
        self.model = transformers.GPT2LMHeadModel(config).eval()
        for name, p in self.model.named_parameters():
            p.fill_(1.0 if ".ln" in name and name.endswith("weight") else 0.0)
        self.used = 0
        self.place = self.channels(length)
        for t, channel in enumerate(self.place):
            self.model.transformer.wpe.weight[t, channel] = 2

    def channels(self, count: int) -> list[int]:
        """Directions of the residual stream that nobody uses yet."""
        self.used += count
        return list(range(self.used - count, self.used))

    def says(self, token: int, channel: int, strongly: float = 1.0) -> None:
        """A token's embedding has something in a channel."""
        self.model.transformer.wte.weight[token, channel] += strongly

    def hears(self, token: int, channel: int, strongly: float) -> None:
        """A token's logit grows with a channel."""
        self.model.lm_head.weight[token, channel] += strongly

    def asks(self, at: At, slot: int, channel: int | None, strongly: float) -> None:
        """A head's query in one dimension: a channel of the residual, or always the same."""
        attention, own = self.head(at)
        if channel is None:
            attention.c_attn.bias[own[slot]] = strongly
        else:
            attention.c_attn.weight[channel, own[slot]] = strongly

    def answers(self, at: At, slot: int, channel: int, strongly: float = 1.0) -> None:
        """A head's key in one dimension."""
        attention, own = self.head(at)
        attention.c_attn.weight[channel, WIDTH + own[slot]] = strongly

    def rests_at_start(self, at: At, firmly: float) -> None:
        """Who asks for nothing else looks at the first token."""
        self.asks(at, HEAD - 2, None, firmly)
        self.answers(at, HEAD - 2, self.place[0])

    def moves(self, at: At, slot: int, read: Sequence[int], write: Sequence[int], mix: Tensor) -> None:
        """What is read into a head's dimensions from `slot` on, and the matrix by which it is written."""
        attention, own = self.head(at)
        for k, channel in enumerate(read):
            attention.c_attn.weight[channel, 2 * WIDTH + own[slot + k]] = 1
            for j, target in enumerate(write):
                attention.c_proj.weight[own[slot + k], target] += float(mix[k, j])

    def head(self, at: At) -> tuple[nn.Module, list[int]]:
        """The attention that a head belongs to, and its dimensions."""
        layer, number = at
        return self.model.transformer.h[layer].attn, list(range(number * HEAD, (number + 1) * HEAD))

    def turned(self, generator: torch.Generator) -> nn.Module:
        """The model, its residual stream and every head's values turned, so that no channel means anything by itself.

        Layer norms take away the mean: turns that keep the vector of ones keep what they do.
        """
        ones = torch.ones(WIDTH, 1) / WIDTH**0.5
        basis = torch.linalg.qr(torch.cat([ones, torch.randn(WIDTH, WIDTH - 1, generator=generator)], dim=1))[0]
        inside = torch.linalg.qr(torch.randn(WIDTH - 1, WIDTH - 1, generator=generator))[0]
        turn = basis @ torch.block_diag(torch.ones(1, 1), inside) @ basis.T
        trunk = self.model.transformer
        for weight in (trunk.wte.weight, trunk.wpe.weight, self.model.lm_head.weight):
            weight.copy_(weight @ turn)
        for block in trunk.h:
            into, out = block.attn.c_attn.weight, block.attn.c_proj.weight
            into.copy_(turn.T @ into)
            out.copy_(out @ turn)
            for h in range(HEADS):
                q = torch.linalg.qr(torch.randn(HEAD, HEAD, generator=generator))[0]
                own = slice(h * HEAD, (h + 1) * HEAD)
                values = slice(2 * WIDTH + own.start, 2 * WIDTH + own.stop)
                into[:, values] = into[:, values] @ q
                out[own] = q.T @ out[own]
        return self.model
