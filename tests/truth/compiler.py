"""From a layout to the weights of a GPT-2: hard attention moves slots, MLPs look tables up, layer norm only scales.

Slots are directions of a random rotation of the residual stream, all of them orthogonal to its mean and to a large
constant that makes up nearly all of its norm, so that layer norm divides by the same number everywhere.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

from plot_ot.edits import Frame
from plot_ot.handles import Edit, Handle
from plot_ot.subjects import DecoderSubject
from truth.kinds import INPUTS
from truth.layout import ANSWER, DEPTH, LAST, TOKEN, Compute, Layout, Move, Spot
from truth.wiring import SHARPNESS, VALUES

FIRST, ASKS = VALUES, VALUES + 1
"""Tokens besides the digits: the first of a prompt and the last."""
LARGE = 300.0
STEEP = 4.0
"""A unit's input is so many times its slots' sum above the threshold."""
LOOK = 60.0
"""The attention score of the token that a head looks at; all others look at the first token, by half of it."""
SILENT = 2.0
"""A silent slot is heeded so much more than what it stands for: half of a swap is then enough."""


@dataclass(frozen=True)
class Compiled:
    """A transformer and its layout."""

    layout: Layout
    model: GPT2LMHeadModel
    directions: dict[str, Tensor]
    """Slot -> orthonormal columns, one for every value."""
    constant: Tensor
    positions: Tensor
    """[width, positions]"""

    def name(self, spot: Spot) -> str:
        """What a spot is called as a place."""
        block, position = spot
        return f"block_output.{block}" + ("" if position == LAST else f"@{self.named[position]}")

    @cached_property
    def named(self) -> dict[int, str]:
        """What the inputs' tokens are called."""
        return {position: x for x, position in self.layout.input_at.items()}

    def subject(self, inputs: Collection[str] = INPUTS) -> DecoderSubject:
        """The model looked at after every block, at the last token and at those of some inputs."""
        ends = {x: position - LAST - 1 for position, x in sorted(self.named.items()) if x in inputs}
        positions = {x: (lambda rows, end=end: torch.full((len(rows),), end)) for x, end in ends.items()}
        return DecoderSubject(self.model, self.encode, [[k] for k in range(self.answers)], positions=positions)

    @property
    def answers(self) -> int:
        return self.layout.program.sizes[ANSWER]

    def encode(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Input rows as prompts."""
        ids = torch.full((len(rows), LAST + 1), FIRST)
        ids[:, LAST] = ASKS
        for k, x in enumerate(INPUTS):
            ids[:, self.layout.input_at[x]] = rows[:, k]
        return ids, torch.ones_like(ids)

    def plane(self, slots: Collection[str]) -> Tensor:
        """Orthonormal columns that span some slots."""
        return torch.cat([self.directions[s] for s in slots], dim=1)

    def swap(self, subject: DecoderSubject, variable: str, spot: Spot, slots: Collection[str]) -> Handle:
        """The handle that swaps some slots of a spot whole."""
        frame = Frame.orthonormal(self.plane(slots), "slots")
        edit = Edit(subject.place(self.name(spot)), frame, torch.ones(frame.rank))
        return Handle(variable, (edit,), subject.identity())

    def illusion(self, subject: DecoderSubject, variable: str, spot: Spot) -> Handle:
        """The handle that reads the dormant copy of a variable and writes its silent slot: perfect, and not the way."""
        read, write = self.directions[f"{variable} dormant"], self.directions[f"{variable} silent"]
        frame = Frame.oblique(read, write, "illusion")
        edit = Edit(subject.place(self.name(spot)), frame, torch.ones(frame.rank))
        return Handle(variable, (edit,), subject.identity())


def compiled(layout: Layout, seed: int) -> Compiled:
    """The transformer of a layout, in directions drawn by the seed."""
    generator = torch.Generator().manual_seed(seed)
    heads = max(4, *(len(moves) for moves in layout.moves))
    needed = sum(layout.sizes.values()) + LAST + 3
    width = heads * max(VALUES + 2, -(-needed // heads))
    inner = max(4, *(sum(c.table.numel() for c in tables) for tables in layout.tables))
    model = GPT2LMHeadModel(_configuration(width, heads, inner)).eval()
    stream = _Stream(layout, width, generator)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            gain = "ln_" in name and name.endswith("weight")
            parameter.fill_(float(gain))
        model.transformer.wte.weight[:VALUES] += stream.slot[TOKEN].T
        model.transformer.wpe.weight += stream.positions.T + LARGE * stream.constant
        for block, moves, tables in zip(model.transformer.h, layout.moves, layout.tables, strict=True):
            for head, move in enumerate(moves):
                _move(block.attn, stream, head, width // heads, move)
            first = 0
            for c in tables:
                first = _compute(block.mlp, stream, first, c)
        answers = layout.program.sizes[ANSWER]
        model.lm_head.weight[:answers] += SHARPNESS * stream.read(ANSWER)[:, :answers].T
        model.lm_head.weight[answers:] -= 10 * SHARPNESS * stream.always()  # never an answer
    return Compiled(layout, model, stream.slot, stream.constant, stream.positions)


def _configuration(width: int, heads: int, inner: int) -> GPT2Config:
    return GPT2Config(
        vocab_size=VALUES + 2,
        n_positions=LAST + 1,
        n_embd=width,
        n_layer=DEPTH,
        n_head=heads,
        n_inner=inner,
        activation_function="relu",
        tie_word_embeddings=False,
        bos_token_id=FIRST,
        eos_token_id=FIRST,
    )


class _Stream:
    """The rotated residual stream: a constant, the positions, and the slots."""

    def __init__(self, layout: Layout, width: int, generator: torch.Generator) -> None:
        random = torch.randn(width, width, generator=generator)
        random[:, 0] = 1.0
        basis = torch.linalg.qr(random)[0][:, 1:]  # all orthogonal to the mean
        self.constant, self.positions = basis[:, 0], basis[:, 1 : LAST + 2]
        rest = basis[:, LAST + 2 :]
        columns = rest[:, : sum(layout.sizes.values())].split(list(layout.sizes.values()), dim=1)
        self.slot = dict(zip(layout.sizes, columns, strict=True))
        self.scale = LARGE / width**0.5
        """What undoes layer norm."""

    def read(self, slot: str) -> Tensor:
        """Columns that read a slot after layer norm."""
        return self.slot[slot] * self.scale

    def at(self, position: int) -> Tensor:
        """What is one at a position and zero elsewhere, after layer norm."""
        return self.positions[:, position] * self.scale

    def always(self) -> Tensor:
        """What is one everywhere, after layer norm."""
        return self.constant * self.scale / LARGE


def _move(attention: nn.Module, stream: _Stream, head: int, size: int, move: Move) -> None:
    width = len(stream.constant)
    columns = slice(head * size, (head + 1) * size)
    query, key, value = (attention.c_attn.weight[:, k * width : (k + 1) * width][:, columns] for k in range(3))
    score = LOOK * size**0.5
    query[:, 0] += stream.at(move.to)
    key[:, 0] += score * stream.at(move.at)
    query[:, 1] += stream.always()
    key[:, 1] += score / 2 * stream.at(0)
    values = min(stream.slot[s].shape[1] for s in (move.slot, move.into))
    value[:, :values] += stream.read(move.slot)[:, :values]
    attention.c_proj.weight[columns][:values] += move.loud * stream.slot[move.into][:, :values].T


def _compute(mlp: nn.Module, stream: _Stream, first: int, c: Compute) -> int:
    """One unit for each combination of the parents' values; it fires at this token if all slots agree."""
    slots = sum(map(len, c.parents))
    unit = first
    for values in itertools.product(*map(range, c.table.shape)):
        seen = stream.at(c.position)
        for k, (value, group) in enumerate(zip(values, c.parents, strict=True)):
            seen = seen + sum(stream.read(slot)[:, value] for slot in group)
            silent = c.silent[k] if c.silent else None
            if silent:
                seen = seen + SILENT * stream.read(silent)[:, value]
        mlp.c_fc.weight[:, unit] += STEEP * seen
        mlp.c_fc.bias[unit] -= STEEP * (slots + 0.5)
        for slot in c.into:
            mlp.c_proj.weight[unit] += 2 / STEEP * stream.slot[slot][:, int(c.table[values])]
        unit += 1
    return unit
