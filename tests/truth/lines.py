"""Straight-line programs over a few digits, and rivals that give the same answers through other variables."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from plot_ot.abstract.causal_model import CausalModel, Mechanism, same
from truth.kinds import INPUTS, ROWS
from truth.wiring import VALUES

Operation = Callable[..., int]
DIGITS: dict[str, tuple[Operation, int]] = {
    "sum": (lambda *v: sum(v) % VALUES, VALUES),
    "max": (lambda *v: max(v), VALUES),
    "equal": (lambda *v: int(len(set(v)) == 1), 2),
    "less": (lambda a, *v: int(all(a < b for b in v)), 2),
}
BITS: dict[str, tuple[Operation, int]] = {
    "and": (lambda *v: int(all(v)), 2),
    "or": (lambda *v: int(any(v)), 2),
    "xor": (lambda *v: sum(v) % 2, 2),
}
MIXED: dict[str, tuple[Operation, int]] = {
    "shift": (lambda *v: sum(v) % VALUES, VALUES),
    "gate": (lambda a, *v: sum(v) % VALUES if a else 0, VALUES),
}
"""Operations by name, with how many values the result has: on digits, on bits, and on both."""
ASSOCIATIVE = ("sum", "max", "and", "or", "xor")
POWER = 0.06
"""At least this share of pairs tells a variable's swap from copying and from the other variables' swaps."""


@dataclass(frozen=True)
class Line:
    """One line of a program: a variable as a function of earlier ones, by a table."""

    name: str
    parents: tuple[str, ...]
    table: Tensor
    """[values of the first parent, of the second, ...]: the variable's value."""
    values: int
    operation: str = ""

    @classmethod
    def of(cls, name: str, parents: Sequence[str], operation: str, sizes: Sequence[int]) -> Line:
        """A line by the name of its operation, for parents with these numbers of values."""
        function, values = {**DIGITS, **BITS, **MIXED}[operation]
        rows = [function(*v) for v in itertools.product(*map(range, sizes))]
        return cls(name, tuple(parents), torch.tensor(rows).reshape(*sizes), values, operation)


@dataclass(frozen=True)
class Program:
    """Lines over the inputs; the last one is the answer, the others are the variables."""

    lines: tuple[Line, ...]

    @cached_property
    def sizes(self) -> dict[str, int]:
        """How many values every input and variable has."""
        return {**dict.fromkeys(INPUTS, VALUES), **{line.name: line.values for line in self.lines}}

    @property
    def variables(self) -> tuple[str, ...]:
        return tuple(line.name for line in self.lines[:-1])

    @property
    def output(self) -> str:
        return self.lines[-1].name

    def line(self, name: str) -> Line:
        """The line of that variable."""
        return next(line for line in self.lines if line.name == name)

    def children(self, name: str) -> list[Line]:
        """The lines that read a variable."""
        return [line for line in self.lines if name in line.parents]

    def ancestors(self, name: str) -> set[str]:
        """Everything that a variable is made of."""
        found = {name}
        for line in reversed(self.lines):
            found |= set(line.parents) if line.name in found else set()
        return found - {name}

    def height(self, name: str) -> int:
        """How many lines come after a variable, one reading the other, up to the answer."""
        return max((1 + self.height(line.name) for line in self.children(name)), default=0)

    @cached_property
    def causal(self) -> CausalModel:
        """The program as a causal model."""
        mechanisms = {line.name: Mechanism(line.parents, _lookup(line.table)) for line in self.lines}
        return CausalModel(INPUTS, mechanisms, self.output)

    def inlined(self, variable: str) -> Program:
        """The same answers without a variable: its children read what it was made of."""
        gone, lines = self.line(variable), []
        for line in self.lines:
            if variable in line.parents:
                parents = tuple(dict.fromkeys([*gone.parents, *(p for p in line.parents if p != variable)]))
                rows = []
                for combination in itertools.product(*(range(self.sizes[p]) for p in parents)):
                    value = dict(zip(parents, combination, strict=True))
                    value[variable] = int(gone.table[tuple(value[p] for p in gone.parents)])
                    rows.append(int(line.table[tuple(value[p] for p in line.parents)]))
                table = torch.tensor(rows).reshape([self.sizes[p] for p in parents])
                line = Line(line.name, parents, table, line.values)
            lines.append(line)
        return Program(tuple(line for line in lines if line.name != variable))

    def regrouped(self, variable: str) -> Program | None:
        """The same answers with the summands of an associative operation put together in another order.

        v = a ∘ b and c = v ∘ w become v' = b ∘ w and c = a ∘ v'. None where nothing can be regrouped.
        """
        first, children = self.line(variable), self.children(variable)
        if len(children) != 1 or len(first.parents) != 2 or len(children[0].parents) != 2:
            return None
        [child] = children
        if first.operation != child.operation or child.operation not in ASSOCIATIVE:
            return None
        (a, b), [w] = first.parents, [p for p in child.parents if p != variable]
        if w in (a, b) or self.sizes[a] != self.sizes[w] or self.sizes[a] != self.sizes[variable]:
            return None
        again = Line.of(f"{variable}'", (b, w), first.operation, (self.sizes[b], self.sizes[w]))
        last = Line.of(child.name, (a, again.name), first.operation, (self.sizes[a], again.values))
        lines = [line for line in self.lines if line.name != variable]
        at = lines.index(child)
        return Program((*lines[:at], again, last, *lines[at + 1 :]))


def _lookup(table: Tensor) -> Callable[..., Tensor]:
    return lambda *values: table[tuple(v.long() for v in values)]


def random_program(generator: torch.Generator, gate: bool = False) -> Program:
    """A program of two or three variables, each of which pairs can tell from the answer and from the others.

    `gate`: one of its lines is the AND or the OR of two variables.
    """
    while True:
        program = _drawn(generator)
        if program is None or (gate and not any(line.operation in ("and", "or") for line in program.lines)):
            continue
        if power(program, generator) >= POWER:
            return program


def _drawn(generator: torch.Generator) -> Program | None:
    def draw(count: int) -> int:
        return int(torch.randint(count, (1,), generator=generator))

    fresh = [INPUTS[k] for k in torch.randperm(len(INPUTS), generator=generator)]
    sizes, lines = dict.fromkeys(INPUTS, VALUES), list[Line]()
    count = 2 + draw(2)
    for k in range(count):
        waiting = [line.name for line in lines if not any(line.name in other.parents for other in lines)]
        parents = []
        for _ in range(2):  # a variable that nobody has read yet, one that somebody has, or an input
            seen = [line.name for line in lines if line.name not in parents]
            kind = draw(6) if lines else 0
            if kind == 5 and seen:
                parents.append(seen[draw(len(seen))])
            elif kind >= 3 and set(waiting) - set(parents):
                rest = [w for w in waiting if w not in parents]
                parents.append(rest[draw(len(rest))])
            elif fresh:
                parents.append(fresh.pop())
        if len(parents) < 2:
            return None
        line = _line("pqr"[k], parents, sizes, draw)
        sizes[line.name] = line.values
        lines.append(line)
    waiting = [line.name for line in lines if not any(line.name in other.parents for other in lines)]
    last = waiting + ([fresh.pop()] if fresh and (len(waiting) == 1 or draw(2)) else [])
    if not 2 <= len(last) <= 3:
        return None
    return Program((*lines, _line("y", last, sizes, draw)))


def _line(name: str, parents: Sequence[str], sizes: dict[str, int], draw: Callable[[int], int]) -> Line:
    widths = [sizes[p] for p in parents]
    if len(set(widths)) > 1:
        parents = sorted(parents, key=lambda p: sizes[p])  # a gate's bit comes first
        names = list(MIXED)
    else:
        names = list(DIGITS if widths[0] == VALUES else BITS)
    return Line.of(name, parents, names[draw(len(names))], [sizes[p] for p in parents])


def power(program: Program, generator: torch.Generator) -> float:
    """The share of pairs that tell a variable's swap from doing nothing, copying and the others' swaps, at the least.

    Pairs count as banks draw them: every set of changed variables equally often.
    """
    base, source = random_pairs(1000, generator)
    causal = program.causal
    before, after = causal.run(base), causal.run(source)
    labels = {v: causal.swap(base, source, v) for v in program.variables}
    changed = sum((before[v] != after[v]).long() << k for k, v in enumerate(program.variables))
    kinds = [changed == kind for kind in range(1, 1 << len(labels))]
    if not all(bool(kind.any()) for kind in kinds):
        return 0.0
    least = 1.0
    for v in program.variables:
        others = [before[program.output], after[program.output], *(label for w, label in labels.items() if w != v)]
        tells = torch.stack([~same(labels[v], o) for o in others]).all(dim=0).double()
        least = min(least, float(sum(tells[kind].mean() for kind in kinds)) / (1 << len(labels)))
    return least


def random_pairs(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Base and source inputs."""
    base, source = (ROWS[torch.randint(len(ROWS), (count,), generator=generator)] for _ in range(2))
    return base, source


def rival_of(program: Program, generator: torch.Generator) -> tuple[Program, str] | None:
    """Another program with the same answers and the variable that it does without; regrouped where that can be."""
    names = [program.variables[k] for k in torch.randperm(len(program.variables), generator=generator)]
    for v in names:
        other = program.regrouped(v)
        if other is not None:
            return other, v
    for v in names:
        other = program.inlined(v)
        if all(len(line.parents) <= 4 for line in other.lines) and len(other.lines) > 1:
            return other, v
    return None
