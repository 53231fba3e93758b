"""Networks wired by hand: every place holds named values in chosen directions, and tables compute the next ones.

A value v of n is the v-th of n columns. A table sees the values of its parents by units that fire when all agree,
relu(Σ - (k - 1)), and votes for the value of its function; it may read places, hidden values and the inputs themselves,
so that information can also pass by a place.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plot_ot.edits import Frame
from plot_ot.handles import Edit, Handle
from plot_ot.subjects import ModuleSubject, Store, Subject
from plot_ot.subjects import Place as PlaceName
from plot_ot.subjects.protocol import Rewrite

VALUES = 3
SHARPNESS = 8.0
LEAK = 0.01
"""Every direction of a place also holds so much of a random linear function of the inputs."""


@dataclass(frozen=True)
class Table:
    """A value as a function of others; a negative value of the function writes nothing."""

    parents: tuple[str, ...]
    vote: Tensor
    """[combinations of the parents' values, values]"""

    @classmethod
    def of(cls, parents: Sequence[str], function: Callable[..., int], sizes: Sequence[int], values: int) -> Table:
        """The table of a function, for parents with these numbers of values."""
        rows = [function(*combination) for combination in itertools.product(*map(range, sizes))]
        vote = torch.tensor([[float(v == row) for v in range(values)] for row in rows])
        return cls(tuple(parents), vote)


@dataclass(frozen=True)
class Join:
    """A value that comes by several ways: the weighted sum of their codes."""

    parents: tuple[str, ...]
    weights: tuple[float, ...]


@dataclass(frozen=True)
class Level:
    """An answer c that is the sum of the parents' values, read along a line: the logit of c is 2 c s - c²."""

    parents: tuple[str, ...]
    classes: int


@dataclass(frozen=True)
class Slot:
    """A value that a place holds, how loudly."""

    table: Table
    scale: float = 1.0

    @property
    def values(self) -> int:
        return self.table.vote.shape[1]


@dataclass
class Place:
    """The values that a place holds, and in which directions."""

    slots: dict[str, Slot] = field(default_factory=dict)
    mixing: Tensor = field(default_factory=lambda: torch.zeros(0))
    """[width, all columns of all slots]; linearly independent columns."""
    leak: Tensor = field(default_factory=lambda: torch.zeros(0))

    def columns(self, name: str) -> slice:
        """Which columns of the mixing are a slot's."""
        start = 0
        for other, slot in self.slots.items():
            if other == name:
                return slice(start, start + slot.values)
            start += slot.values
        raise KeyError(name)


Step = Table | Join | Level | Place


class Wiring:
    """What a network is wired from, told step by step; then `network`."""

    def __init__(self, inputs: int, seed: int, leak: float = LEAK) -> None:
        self.inputs, self.values, self.leak = inputs, VALUES, leak
        self.generator = torch.Generator().manual_seed(seed)
        self.sizes = {f"x{k}": VALUES for k in range(inputs)}
        self.order: list[tuple[str, Step]] = []
        self.places: dict[str, Place] = {}

    def draw(self, low: int, high: int) -> int:
        """A random number in low..high-1."""
        return int(torch.randint(low, high, (1,), generator=self.generator))

    def table(self, parents: Sequence[str], function: Callable[..., int], values: int | None = None) -> Table:
        """The table of a function of signals."""
        return Table.of(parents, function, [self.sizes[p] for p in parents], values or self.values)

    def hidden(self, name: str, parents: Sequence[str], function: Callable[..., int], values: int | None = None) -> str:
        """A value that later tables can read and that no place holds."""
        made = self.table(parents, function, values)
        self.order.append((name, made))
        self.sizes[name] = made.vote.shape[1]
        return name

    def join(self, name: str, parents: Sequence[str], weights: Sequence[float] | None = None) -> str:
        """A hidden value that comes by one of several ways."""
        self.order.append((name, Join(tuple(parents), tuple(weights or [1.0] * len(parents)))))
        self.sizes[name] = self.sizes[parents[0]]
        return name

    def place(self, name: str, slots: dict[str, Slot], *, spare: int = 4, oblique: float = 0.0) -> None:
        """A place that holds these slots, in rotated directions (or slanted ones, so much), with room to spare."""
        total = sum(s.values for s in slots.values())
        width = total + spare
        mixing = torch.linalg.qr(torch.randn(width, width, generator=self.generator))[0][:, :total]
        slant = torch.eye(total) + oblique * torch.randn(total, total, generator=self.generator) / total**0.5
        mixing = F.normalize(mixing @ slant, dim=0)
        leak = self.leak * torch.randn(width, self.inputs * self.values, generator=self.generator)
        self.places[name] = made = Place(slots, mixing, leak)
        self.order.append((name, made))
        for slot, of in slots.items():
            self.sizes[f"{name}.{slot}"] = of.values

    def copy(self, parent: str, scale: float = 1.0) -> Slot:
        """A slot that holds the value of a signal."""
        return Slot(self.table((parent,), lambda v: v, self.sizes[parent]), scale)

    def network(self, parents: Sequence[str], answer: Callable[..., int], classes: int) -> Wired:
        """The network that answers by this last table."""
        return Wired([*self.order, ("answer", self.table(parents, answer, classes))], self.inputs, self.values)

    def level(self, parents: Sequence[str], classes: int) -> Wired:
        """The network that answers with the sum of these values."""
        return Wired([*self.order, ("answer", Level(tuple(parents), classes))], self.inputs, self.values)

    # -- what is known ---------------------------------------------------------------------------------------

    def plane(self, place: str, *slots: str) -> Tensor:
        """Orthonormal columns that span a place's slots."""
        at = self.places[place]
        return torch.linalg.qr(torch.cat([at.mixing[:, at.columns(s)] for s in slots], dim=1))[0]

    def swap(self, subject: ModuleSubject, variable: str, place: str, pairs: Sequence[tuple[str, str]]) -> Handle:
        """The handle that reads slots and writes slots of a place (the same ones, for an exact swap)."""
        at = self.places[place]
        dual = torch.linalg.pinv(at.mixing).T
        read = [dual[:, at.columns(r)] / at.slots[r].scale for r, _ in pairs]
        write = [at.mixing[:, at.columns(w)] * at.slots[w].scale for _, w in pairs]
        frame = Frame.oblique(torch.cat(read, dim=1), torch.cat(write, dim=1))
        edit = Edit(subject.place(place), frame, torch.ones(frame.rank))
        return Handle(variable, (edit,), subject.identity())


class Wired(nn.Module):
    """A network as wired: rows of input values in, logits out; every place is a submodule of its name."""

    def __init__(self, steps: Sequence[tuple[str, Step]], inputs: int, values: int) -> None:
        super().__init__()
        self.inputs, self.values, self.steps = inputs, values, list(steps)
        self.places = {name: step for name, step in self.steps if isinstance(step, Place)}
        self.needed = _needed(self.steps)
        self.votes, self.weights = nn.ParameterDict(), nn.ParameterDict()
        for name, step in self.steps:
            if isinstance(step, Table):
                self.votes[name] = _fixed(step.vote)
            if not isinstance(step, Place):
                continue
            self.add_module(name, nn.Identity())
            loudness = torch.cat([torch.full((s.values,), s.scale) for s in step.slots.values()])
            dual = torch.linalg.pinv(step.mixing) / loudness[:, None]
            parts = {"write": step.mixing * loudness, "leak": step.leak, "read": dual}
            self.weights.update({f"{name}:{part}": _fixed(weight) for part, weight in parts.items()})
            self.votes.update({f"{name}:{slot}": _fixed(of.table.vote) for slot, of in step.slots.items()})

    def forward(self, rows: Tensor) -> Tensor:
        signals = self.seen(rows)
        for name, step in self.steps:
            if isinstance(step, Place):
                self.read(name, self.get_submodule(name)(self.state(name, signals)), signals)
            else:
                signals[name] = self.computed(name, step, signals)
        return SHARPNESS * signals["answer"]

    def resumed(self, rows: Tensor, start: str, states: Tensor, later: Mapping[str, Rewrite]) -> Tensor:
        """The outputs of rows [pairs, inputs] with these states [variants, pairs, width] at a place, others rewritten.

        What a place holds is read back as it was written, so that only what the answer needs is computed.
        """
        signals = self.seen(rows)
        for name, step in self.steps:
            if name == start:
                self.read(name, states, signals)
            elif name in later:
                state = self.state(name, signals)
                self.read(name, later[name](state.expand(*states.shape[:2], state.shape[-1])), signals)
            elif isinstance(step, Place):
                leaked = signals["inputs"] @ (self.weights[f"{name}:read"] @ self.weights[f"{name}:leak"]).T
                for slot in step.slots:
                    if f"{name}.{slot}" in self.needed:
                        signals[f"{name}.{slot}"] = self.held(name, slot, signals) + leaked[..., step.columns(slot)]
            elif name in self.needed:
                signals[name] = self.computed(name, step, signals)
        answer = SHARPNESS * signals["answer"]
        return answer.expand(*states.shape[:2], answer.shape[-1])  # nothing may depend on the place

    def seen(self, rows: Tensor) -> dict[str, Tensor]:
        """The inputs' codes."""
        codes = F.one_hot(rows.long(), self.values).float()
        return {"inputs": codes.flatten(-2), **{f"x{k}": codes[..., k, :] for k in range(self.inputs)}}

    def held(self, place: str, slot: str, signals: dict[str, Tensor]) -> Tensor:
        """The code that a place is to hold in a slot."""
        step = self.places[place].slots[slot]
        return _looked_up(step.table.parents, self.votes[f"{place}:{slot}"], signals)

    def state(self, place: str, signals: dict[str, Tensor]) -> Tensor:
        """A place's activation."""
        held = [self.held(place, slot, signals) for slot in self.places[place].slots]
        return (
            _side_by_side(held) @ self.weights[f"{place}:write"].T + signals["inputs"] @ self.weights[f"{place}:leak"].T
        )

    def read(self, place: str, state: Tensor, signals: dict[str, Tensor]) -> None:
        """Add what a place's state holds."""
        codes = state @ self.weights[f"{place}:read"].T
        signals |= {
            f"{place}.{slot}": codes[..., self.places[place].columns(slot)] for slot in self.places[place].slots
        }

    def computed(self, name: str, step: Step, signals: dict[str, Tensor]) -> Tensor:
        """A value that no place holds."""
        if isinstance(step, Table):
            return _looked_up(step.parents, self.votes[name], signals)
        if isinstance(step, Join):
            return sum(weight * signals[way] for weight, way in zip(step.weights, step.parents, strict=True))
        sums = [signals[parent] @ torch.arange(signals[parent].shape[-1]).float() for parent in step.parents]
        level, c = sum(sums).unsqueeze(-1), torch.arange(step.classes)
        return 2 * c * level - c.square()

    def subject(self) -> WiredSubject:
        """The network with all its places."""
        return WiredSubject(self, list(self.places), torch.zeros(1, self.inputs), encode=lambda rows: rows)


class WiredSubject(ModuleSubject):
    """A wired network that runs only what comes after an edit."""

    response_bytes = Subject.response_bytes

    def resume(
        self, store: Store, rows: Tensor, start: PlaceName, activation: Tensor, later: Mapping[str, Rewrite]
    ) -> Tensor:
        return self.module.resumed(store.inputs[rows], start.name, activation, later)


def _side_by_side(codes: Sequence[Tensor]) -> Tensor:
    """Codes [..., values] of one or of all variants, together."""
    shape = torch.broadcast_shapes(*(c.shape[:-1] for c in codes))
    return torch.cat([c.expand(*shape, c.shape[-1]) for c in codes], dim=-1)


def _looked_up(parents: Sequence[str], vote: Tensor, signals: dict[str, Tensor]) -> Tensor:
    seen = signals[parents[0]]
    for parent in parents[1:]:
        seen = (seen.unsqueeze(-1) + signals[parent].unsqueeze(-2)).flatten(-2)
    return F.relu(seen - (len(parents) - 1)) @ vote


def _needed(steps: Sequence[tuple[str, Step]]) -> set[str]:
    """Everything that the answer depends on."""
    needed = {"answer"}
    for name, step in reversed(steps):
        if isinstance(step, Place):
            for slot, of in step.slots.items():
                needed |= set(of.table.parents) if f"{name}.{slot}" in needed else set()
        elif name in needed:
            needed |= set(step.parents)
    return needed


def _fixed(weight: Tensor) -> nn.Parameter:
    return nn.Parameter(weight.clone(), requires_grad=False)
