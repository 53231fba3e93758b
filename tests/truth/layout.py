"""Where a compiled transformer computes, moves and keeps every variable, and what swaps of these slots do.

A *slot* is a set of directions of the residual stream; at one token it holds the code of one value or nothing. In every
block attention heads first move slots from token to token, then MLPs compute tables from the slots of one token. What
was written stays, so a variable is at its token from its block on, and copies that were moved are still decodable when
nothing reads them any more.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from truth.kinds import INPUTS
from truth.lines import Program, random_pairs
from truth.wiring import VALUES

DEPTH = 5
LAST = len(INPUTS) + 1
"""Positions: 0 is a first token that holds nothing, then the inputs in some order, then the token that answers."""
TOKEN, ANSWER = "token", "y"
NOTHING = -1
"""The value of a slot that holds none."""
TRIES = 300

Spot = tuple[int, int]
"""(block, position): the residual stream of a token after a block."""
State = dict[tuple[int, str], Tensor]
"""(position, slot) -> values [rows] of the slots that hold something."""


@dataclass(frozen=True)
class Move:
    """A head: the token at `to` looks at `at` and copies a slot from there."""

    at: int
    slot: str
    to: int
    into: str
    loud: float = 1.0


@dataclass(frozen=True)
class Compute:
    """Units of an MLP: the value of a table, from slots of one token, written to slots of this token.

    Where a parent is held by several slots, all must agree. `silent` slots are heeded besides: they are empty in
    natural states.
    """

    position: int
    name: str
    parents: tuple[tuple[str, ...], ...]
    table: Tensor
    into: tuple[str, ...]
    silent: tuple[str | None, ...] = ()


@dataclass(frozen=True)
class Layout:
    """All moves and tables of a network, block by block."""

    program: Program
    input_at: Mapping[str, int]
    moves: tuple[tuple[Move, ...], ...]
    tables: tuple[tuple[Compute, ...], ...]
    sizes: Mapping[str, int]
    """Slot -> how many values it can hold."""
    holds: Mapping[tuple[int, str], str]
    """(position, slot) -> the input or variable whose value is there, once it is."""
    written: Mapping[tuple[int, str], int]
    """(position, slot) -> the block that writes it; -1 for inputs."""
    dormant: Mapping[str, frozenset[Spot]] = field(default_factory=dict)
    """Variable -> where a copy that nothing reads lies beside an empty slot that is heeded."""

    # -- running -----------------------------------------------------------------------------------------

    def run(self, rows: Tensor, at: Spot | None = None, swapped: Mapping[str, Tensor] | None = None) -> list[State]:
        """The state after every block, with slots of one token replaced after one block."""
        state: State = {(self.input_at[x], TOKEN): rows[:, k] for k, x in enumerate(INPUTS)}
        states = []
        for block in range(DEPTH):
            moved = {(m.to, m.into): state[m.at, m.slot] for m in self.moves[block] if (m.at, m.slot) in state}
            state = {**state, **moved}
            for c in self.tables[block]:
                value = _looked_up(c, state, len(rows))
                state = {**state, **{(c.position, slot): value for slot in c.into}}
            if at is not None and at[0] == block:
                state = {**state, **{(at[1], slot): value for slot, value in (swapped or {}).items()}}
            states.append(state)
        return states

    def answer(self, rows: Tensor, at: Spot | None = None, swapped: Mapping[str, Tensor] | None = None) -> Tensor:
        """The values of the answer's slot at the end."""
        return self.run(rows, at, swapped)[-1][LAST, ANSWER]

    # -- what is known -----------------------------------------------------------------------------------

    @property
    def spots(self) -> list[Spot]:
        """Every token after every block."""
        return [(b, t) for b in range(DEPTH) for t in range(1, LAST + 1)]

    def slots(self, spot: Spot) -> list[str]:
        """The slots that hold something at a spot."""
        block, position = spot
        return [s for (p, s), b in self.written.items() if p == position and b <= block]

    def live(self, spot: Spot) -> list[str]:
        """The slots of a spot that something still reads."""
        block, position = spot
        read = {m.slot for moves in self.moves[block + 1 :] for m in moves if m.at == position and m.into in self.read}
        for tables in self.tables[block + 1 :]:
            read |= {s for c in tables if c.position == position for group in c.parents for s in group}
        if position == LAST:
            read.add(ANSWER)
        return [s for s in self.slots(spot) if s in read]

    @cached_property
    def read(self) -> set[str]:
        """Slots that some table reads: what is moved elsewhere is there for nobody."""
        return {s for tables in self.tables for c in tables for group in c.parents for s in group}

    def right(self, spot: Spot, slots: tuple[str, ...], variable: str, program: Program | None = None) -> float:
        """How often swapping these slots gives a variable's counterfactual, on pairs that change it."""
        base, source = self._pairs
        causal = (program or self.program).causal
        changed = causal.run(base)[variable] != causal.run(source)[variable]
        base, source = base[changed], source[changed]
        taken = self.run(source)[spot[0]]
        values = {s: taken[spot[1], s] for s in slots}
        return float((self.answer(base, spot, values) == causal.swap(base, source, variable)).double().mean())

    @cached_property
    def _pairs(self) -> tuple[Tensor, Tensor]:
        return random_pairs(1000, torch.Generator().manual_seed(0))

    def ways(self, spot: Spot, variable: str, program: Program | None = None) -> Iterator[tuple[str, ...]]:
        """Every set of live slots of a spot whose swap is the variable's swap, on all pairs."""
        live = self.live(spot)
        for count in range(1, len(live) + 1):
            for slots in itertools.combinations(live, count):
                if self.right(spot, slots, variable, program) == 1.0:
                    yield slots

    def carried(self, variable: str, program: Program | None = None) -> tuple[dict[Spot, tuple[str, ...]], set[Spot]]:
        """Spots whose own slots of a variable are its handle, and spots where only other slots together are.

        `program` is the hypothesis, where it is not the program that was compiled.
        """
        own: dict[Spot, tuple[str, ...]] = {}
        others: set[Spot] = set()
        for spot in self.spots:
            for slots in self.ways(spot, variable, program):
                if all(self.holds[spot[1], s] == variable for s in slots):
                    own.setdefault(spot, slots)
                else:
                    others.add(spot)
        return own, others - set(own)


def _looked_up(c: Compute, state: State, rows: int) -> Tensor:
    empty = torch.full((rows,), NOTHING)
    values, there = [], torch.ones(rows, dtype=torch.bool)
    for group in c.parents:
        codes = [state.get((c.position, slot), empty) for slot in group]
        values.append(codes[0])
        there &= torch.stack([(code == codes[0]) & (code != NOTHING) for code in codes]).all(dim=0)
    found = c.table[tuple(v.clamp(min=0) for v in values)]
    return torch.where(there, found, empty)


# -- drawing a layout ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Wishes:
    """What a layout is to have besides what the program needs."""

    together: bool = False
    """Variables with a common child are at one token and come from one block."""
    twice: str | None = None
    """A variable that is held by two slots, which must agree."""
    early: bool = False
    """Parents are moved as early as can be: they wait beside their child's place, and values are used late."""
    noise: int = 2
    """How many inputs or variables are also moved where nothing reads them, loudly."""
    silent: str | None = None
    """A variable of which a child's token has a dormant copy and a silent slot, before the variable arrives there."""


class _Drawing:
    """A layout in the making."""

    def __init__(self, program: Program, wishes: Wishes, generator: torch.Generator) -> None:
        self.program, self.wishes, self.generator = program, wishes, generator
        order = torch.randperm(len(INPUTS), generator=generator).tolist()
        self.input_at = {x: 1 + k for x, k in zip(INPUTS, order, strict=True)}
        self.position, self.block = dict(self.input_at), dict.fromkeys(INPUTS, -1)
        self.own = {x: (TOKEN,) for x in INPUTS}
        self.moves: list[list[Move]] = [[] for _ in range(DEPTH)]
        self.tables: list[list[Compute]] = [[] for _ in range(DEPTH)]
        self.sizes = {TOKEN: VALUES}
        self.holds = {(p, TOKEN): x for x, p in self.input_at.items()}
        self.written = dict.fromkeys(self.holds, -1)
        self.reads = dict.fromkeys(range(LAST + 1), 0)
        self.dormant: dict[str, frozenset[Spot]] = {}

    def draw(self, low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (1,), generator=self.generator))

    def write(self, position: int, slot: str, name: str, block: int) -> None:
        self.sizes[slot] = max(self.sizes.get(slot, 0), self.program.sizes[name])
        self.holds[position, slot], self.written[position, slot] = name, block

    def placed(self) -> None:
        """A token and a block for every line; if wished, drawn until two variables with a common child are together."""
        pairs = [
            (a, b)
            for line in self.program.lines
            for a, b in itertools.combinations([p for p in line.parents if p not in INPUTS], 2)
            if a not in self.program.ancestors(b) and b not in self.program.ancestors(a)
        ]
        for _ in range(TRIES):
            for line in self.program.lines:
                low = max(self.position[p] for p in line.parents)
                self.position[line.name] = LAST if line.name == ANSWER else self.draw(low, LAST)
                earliest = 1 + max(self.block[p] for p in line.parents)
                self.block[line.name] = self.draw(earliest, DEPTH - 1 - self.program.height(line.name))
            spots = {name: (self.block[name], self.position[name]) for name in self.position}
            if not self.wishes.together or not pairs or any(spots[a] == spots[b] for a, b in pairs):
                return

    def fetched(self, name: str, position: int, earliest: int, latest: int, into: str | None = None) -> tuple[str, ...]:
        """The slots that hold a value at a position by the latest block, moved there if it is elsewhere."""
        if self.position[name] == position and into is None:
            return self.own[name]
        waits = self.wishes.early or self.draw(0, 2) == 0
        block, slots = earliest if waits else latest, []
        for slot in self.own[name]:
            if into is None:
                self.reads[position] += 1
            slots.append(into or f"read {self.reads[position]}")
            self.moves[block].append(Move(self.position[name], slot, position, slots[-1]))
            self.write(position, slots[-1], name, block)
        return tuple(slots)

    def computed(self) -> None:
        """Every line, with what it needs."""
        for line in self.program.lines:
            at, block = self.position[line.name], self.block[line.name]
            self.own[line.name] = names = (line.name, f"{line.name} again")[: 1 + (self.wishes.twice == line.name)]
            groups, silent = [], list[str | None]()
            for p in line.parents:
                hidden = self.hidden_way(p, at, block) if p == self.wishes.silent else None
                earliest = block if hidden else self.block[p] + 1
                groups.append(self.fetched(p, at, earliest, block))
                silent.append(hidden)
            self.tables[block].append(Compute(at, line.name, tuple(groups), line.table, names, tuple(silent)))
            for slot in names:
                self.write(at, slot, line.name, block)

    def hidden_way(self, variable: str, at: int, until: int) -> str | None:
        """A dormant copy of a variable at a token, and the silent slot that a table there heeds for it."""
        if self.position[variable] == at or variable in self.dormant or len(self.own[variable]) > 1:
            return None
        line, first = self.program.line(variable), self.block[variable]
        groups = [self.fetched(p, at, self.block[p] + 1, first, into=f"seen {p}") for p in line.parents]
        copy, silent = f"{variable} dormant", f"{variable} silent"
        self.tables[first].append(Compute(at, copy, tuple(groups), line.table, (copy,)))
        self.write(at, copy, variable, first)
        self.sizes[silent] = self.program.sizes[variable]
        self.dormant[variable] = frozenset((b, at) for b in range(first, until))
        return silent

    def noisy(self) -> None:
        """Values that are moved where nothing reads them."""
        for k in range(self.wishes.noise):
            names = [n for n in self.position if self.block[n] < DEPTH - 1 and self.position[n] < LAST]
            name = names[self.draw(0, len(names) - 1)]
            to, block = self.draw(self.position[name] + 1, LAST), self.draw(self.block[name] + 1, DEPTH - 1)
            self.moves[block].append(Move(self.position[name], self.own[name][0], to, f"noise {k}", loud=2.0))
            self.write(to, f"noise {k}", name, block)

    def layout(self) -> Layout:
        self.placed()
        self.computed()
        self.noisy()
        moves, tables = (tuple(map(tuple, of)) for of in (self.moves, self.tables))
        return Layout(
            self.program, self.input_at, moves, tables, self.sizes, self.holds, self.written, self.dormant
        )


def random_layout(program: Program, wishes: Wishes, generator: torch.Generator) -> Layout:
    """A layout of a program, drawn at random."""
    return _Drawing(program, wishes, generator).layout()


def random_wishes(program: Program, generator: torch.Generator) -> Wishes:
    """Each wish about every third time."""
    chance = torch.rand(3, generator=generator).tolist()
    which = int(torch.randint(len(program.variables), (1,), generator=generator))
    twice = program.variables[which] if chance[1] < 1 / 3 else None
    return replace(Wishes(), together=chance[0] < 1 / 2, twice=twice, early=chance[2] < 1 / 3)
