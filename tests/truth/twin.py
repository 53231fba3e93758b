"""The twin of a compiled transformer: the same states, moves and tables, of which only what an edit reaches is run.

A compiled network's layer norm divides by a constant, but for a thousandth, and its heads look at one token; the twin
leaves both out. Tests compare it with the transformer itself, edit by edit.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from plot_ot.subjects import DecoderSubject, Place, Store
from plot_ot.subjects.protocol import Rewrite, Share
from truth.compiler import LARGE, LOOK, SILENT, STEEP, Compiled
from truth.kinds import INPUTS
from truth.layout import ANSWER, DEPTH, LAST, NOTHING, Compute, Layout, Spot, State
from truth.wiring import SHARPNESS

Codes = dict[tuple[int, str], Tensor]
"""(position, slot) -> codes [..., values]; a position's own direction is the slot `POSITION`."""
POSITION = "position"


class TwinSubject(DecoderSubject):
    """A compiled transformer that is recorded and resumed by its twin."""

    recorder_resumes = False
    cache = 2 << 20

    def __init__(self, net: Compiled, inputs: Collection[str] = INPUTS) -> None:
        self.__dict__.update(net.subject(inputs).__dict__)  # the trial of a new subject is for the transformer
        self.net = net
        self.spot: dict[str, Spot] = {
            net.name(spot): spot for spot in net.layout.spots if net.name(spot) in {p.name for p in self.places}
        }

    @property
    def responses_per_batch(self) -> int:
        return 1 << 13

    def record(self, inputs: Tensor, bases: Tensor | None = None, remember: bool = False) -> Store:
        layout = self.net.layout
        states = layout.run(inputs)
        activations = {
            name: self._stream(spot, _codes(states[spot[0]], layout)).expand(len(inputs), -1).contiguous()
            for name, spot in self.spot.items()
        }
        outputs = SHARPNESS * _codes(states[-1], layout)[LAST, ANSWER][:, : self.net.answers]
        return Store(inputs, activations, outputs)

    def record_part(self, inputs: Tensor, bases: Tensor, share: Share) -> Store:  # type: ignore[override]
        return self.record(inputs)

    def outputs_of(self, store: Store) -> Tensor:
        return store.outputs

    def forget(self) -> None:
        """Nothing was kept."""

    def resume(
        self, store: Store, rows: Tensor, start: Place, activation: Tensor, later: Mapping[str, Rewrite]
    ) -> Tensor:
        layout, shape = self.net.layout, activation.shape[:2]
        natural = [_codes(state, layout) for state in layout.run(store.inputs[rows])]
        rewrites = {self.spot[name]: rewrite for name, rewrite in later.items()}
        begin, _ = spot = self.spot[start.name]
        edited = self._held(spot, activation)
        for block in range(begin, DEPTH):
            if block > begin:
                edited = self._after(block, edited, natural)
            for spot in [s for s in rewrites if s[0] == block and s != (begin, self.spot[start.name][1])]:
                state = self._stream(spot, {**natural[block], **edited})
                edited |= self._held(spot, rewrites[spot](state.expand(*shape, state.shape[-1])))
        answer = edited.get((LAST, ANSWER), natural[-1][LAST, ANSWER])
        outputs = SHARPNESS * answer[..., : self.net.answers].expand(*shape, self.net.answers)
        return outputs + 0.0 * activation[..., :1]  # whoever asks for gradients may do so where nothing is reached

    def _after(self, block: int, edited: Codes, natural: list[Codes]) -> Codes:
        """What an edit has reached after one more block; what is written adds to what an edit has left in a slot."""
        layout, edited = self.net.layout, dict(edited)
        before = {**natural[block - 1], **edited}
        after = {**natural[block], **edited}

        def write(key: tuple[int, str], code: Tensor) -> None:
            code = _resized(code, layout.sizes[key[1]])
            edited[key] = after[key] = edited[key] + code if key in edited else code

        for m in layout.moves[block]:
            looks = [edited[p, POSITION] for p in (m.to, m.at) if (p, POSITION) in edited]
            if looks or {(m.at, m.slot), (m.to, m.into)} & edited.keys():
                sure = torch.sigmoid(LOOK * (torch.stack(looks).prod(dim=0) - 0.5)) if looks else 1.0
                write((m.to, m.into), m.loud * sure * before[m.at, m.slot])
        for c in layout.tables[block]:
            slots = [*(slot for group in c.parents for slot in group), *(s for s in c.silent if s), *c.into, POSITION]
            if any((c.position, slot) in edited for slot in slots):
                value = _fired(c, after, layout)
                for slot in c.into:
                    write((c.position, slot), value)
        return edited

    def _stream(self, spot: Spot, codes: Codes) -> Tensor:
        """The residual stream at a spot."""
        block, position = spot
        state = LARGE * self.net.constant + self.net.positions[:, position]
        for slot in self.net.layout.slots(spot):
            state = state + codes[position, slot] @ self.net.directions[slot].T
        return state

    def _held(self, spot: Spot, state: Tensor) -> Codes:
        """What all slots of a token hold, also those that are empty in natural states."""
        _, position = spot
        sizes = self.net.layout.sizes
        columns = [self.net.positions[:, position : position + 1], *(self.net.directions[s] for s in sizes)]
        own, *codes = (state @ torch.cat(columns, dim=1)).split([1, *sizes.values()], dim=-1)
        return {(position, POSITION): own, **{(position, s): code for s, code in zip(sizes, codes, strict=True)}}


def _codes(state: State, layout: Layout) -> Codes:
    loud = {(m.to, m.into): m.loud for moves in layout.moves for m in moves}
    return {
        key: loud.get(key, 1.0) * F.one_hot(value.clamp(min=0), layout.sizes[key[1]]).float() * (value != NOTHING)[:, None]
        for key, value in state.items()
    }


def _resized(code: Tensor, values: int) -> Tensor:
    """A code with so many values: a slot may have room for more of them than a variable has."""
    return F.pad(code, (0, values - code.shape[-1])) if code.shape[-1] < values else code[..., :values]


def _fired(c: Compute, codes: Codes, layout: Layout) -> Tensor:
    """The units of a table: those whose slots all agree vote for its value."""
    own = codes.get((c.position, POSITION))
    seen = torch.ones(1) if own is None else own
    for k, (group, values) in enumerate(zip(c.parents, c.table.shape, strict=True)):
        empty = torch.zeros(1, values)
        code = sum((_resized(codes.get((c.position, slot), empty), values) for slot in group), start=torch.zeros(values))
        silent = c.silent[k] if c.silent else None
        if silent and (c.position, silent) in codes:
            code = code + SILENT * _resized(codes[c.position, silent], values)
        seen = (seen.unsqueeze(-1) + code.unsqueeze(-2)).flatten(-2)
    slots = sum(map(len, c.parents))
    vote = F.one_hot(c.table.flatten(), layout.program.sizes.get(c.name, int(c.table.max()) + 1)).float()
    return 2 * F.relu(seen - (slots + 0.5)) @ vote
