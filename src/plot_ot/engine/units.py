"""Work units: what a study computes, cut by pair shards into pieces that anyone with a replica of the network can run.

The cut is fixed by the network and the banks, never by who works or how many there are, and results are used in the
order of the plan. So it does not matter where a unit runs, or how often it had to be started: sums are the same bits.

Inputs are recorded in *shards*. A pair belongs to the shard of its base input, so that pairs which share a response
(`edits.Distinct`) stay together, and what resuming a base needs is in one place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from plot_ot.abstract.banks import Bank, first_of_each, row_codes
from plot_ot.engine.watching import counted
from plot_ot.errors import PlotError
from plot_ot.subjects import BankRecording, Place, Store, Subject
from plot_ot.subjects.decoder.trie import Trie
from plot_ot.subjects.protocol import PairIndex, Share, require_finite

Encoded = Callable[[Tensor], tuple[Int[Tensor, "rows tokens"], Bool[Tensor, "rows tokens"]] | None]
"""A function that gives the tokens of inputs that are prompts, or None."""
Recipe = Callable[[], Subject]
"""How a worker makes its own replica of the network."""

WORK = 1 << 28
"""Multiply-adds below which a piece of work is so small that starting it shows: smaller ones are kept together."""
LEAST, MOST = 128, 1 << 10
"""Inputs of a shard."""


@dataclass(frozen=True)
class Shard:
    """Inputs that are recorded together."""

    inputs: Tensor
    bases: Int[Tensor, " bases"]
    """The rows that will be resumed."""
    share: Share
    """Its part of all inputs and of all bases, and so of the memory for them."""


@dataclass(frozen=True)
class Unit:
    """`work(recording of some pairs, *args)`, which returns little: sums, counts, frames."""

    work: Callable[..., Any]
    pairs: PairIndex
    """The pairs of one shard, as `shards` gives them; slice(None) is the whole bank."""
    places: tuple[Place, ...]
    """Where it looks at activations."""
    args: tuple[Any, ...] = ()

    @property
    def whole(self) -> bool:
        """Whether it needs all pairs."""
        return isinstance(self.pairs, slice)


class Crew(Protocol):
    """Whoever works on one subject: records its shards, and runs units on what was recorded."""

    def record(self, shards: Sequence[Shard]) -> Store:
        """One store of all shards' inputs, one after the other."""

    def map(self, recording: SharedRecording, units: Sequence[Unit]) -> Iterator[Any]:
        """Start the units, and give what comes of them in their order."""


@dataclass(frozen=True)
class SharedRecording(BankRecording):
    """A bank's recording with the crew that works on it and the cut of its work."""

    crew: Crew
    shard: Int[Tensor, " inputs"]
    """The shard of every recorded input."""

    def select(self, pairs: Tensor, name: str | None = None) -> SharedRecording:
        some = super().select(pairs, name)
        return SharedRecording(
            some.subject, some.store, some.base_rows, some.source_rows, some.bank, self.crew, self.shard
        )


def shards(recording: BankRecording) -> list[PairIndex]:
    """The pairs of every shard, in plan order; one slice(None) where there is no more than one."""
    if not isinstance(recording, SharedRecording):
        return [slice(None)]
    of_pair = recording.shard[recording.base_rows]
    present = of_pair.unique().tolist()
    return [slice(None)] if len(present) == 1 else [(of_pair == s).nonzero().squeeze(1) for s in present]


def run(recording: BankRecording, units: Sequence[Unit]) -> Iterator[Any]:
    """What the units give, in their order; the crew of the recording, or else this process, runs them."""
    if isinstance(recording, SharedRecording):
        return counted(recording.crew.map(recording, units), len(units))
    return counted((run_here(recording, unit) for unit in units), len(units))


def run_here(recording: BankRecording, unit: Unit) -> Any:
    """Run a unit in this process."""
    return unit.work(recording if isinstance(unit.pairs, slice) else recording.select(unit.pairs), *unit.args)


def jobs_at_once(subject: Subject, rows: int) -> int:
    """How many jobs that each push so many rows through the network make a unit worth starting."""
    return max(1, WORK // (subject.parameters * max(1, rows)))


def inputs_per_shard(subject: Subject) -> int:
    """Few inputs of a large network, many of a small one."""
    return max(LEAST, min(MOST, WORK // subject.parameters))


# -- the cut -------------------------------------------------------------------------------------------------


def record_shared(
    crew: Crew, subject: Subject, banks: Sequence[Bank], size: int | None = None, *, forget: bool = True
) -> list[SharedRecording]:
    """Record several banks with one pass per distinct input over all of them, `size` inputs to a shard.

    Inputs that the subject remembers from a filter do not run again; afterwards it need not remember them (`forget`).
    """
    if size is not None and size < 1:
        raise PlotError(f"A shard needs at least one input; found {size}.")
    parts, rows = cut_into_shards(banks, size or inputs_per_shard(subject), subject.encoded)
    store = crew.record(parts)
    if forget:
        subject.forget()
    require_finite(store)
    shard = torch.cat([torch.full((len(p.inputs),), k) for k, p in enumerate(parts)])
    recordings, at = [], 0
    rows = rows.cpu()
    for bank in banks:
        middle, end = at + len(bank), at + 2 * len(bank)
        recordings.append(SharedRecording(subject, store, rows[at:middle], rows[middle:end], bank, crew, shard))
        at = end
    return recordings


def cut_into_shards(
    banks: Sequence[Bank], size: int, encoded: Encoded | None = None
) -> tuple[list[Shard], Int[Tensor, " rows"]]:
    """Shards of the distinct inputs, and where each bank's bases, then its sources, stand among them.

    Inputs come in the order in which pairs use them as bases, bank by bank, and a shard serves one bank first; inputs
    that are sources only come last. Prompts (`encoded` gives their tokens) come in alphabetical order instead, those of
    a bank's bases and sources together, because prompts that begin alike share work if they are recorded together.
    """
    inputs = torch.cat([x for bank in banks for x in (bank.base, bank.source)])
    code = row_codes(inputs)
    is_base = torch.cat([torch.arange(2 * len(b)) < len(b) for b in banks])
    bank_of = torch.cat([torch.full((2 * len(b),), k) for k, b in enumerate(banks)])
    count, position = int(code.max()) + 1, torch.arange(len(code))
    never = len(code)
    first_base = torch.full((count,), never).scatter_reduce(0, code[is_base], position[is_base], reduce="amin")
    first = first_of_each(code)
    used, is_used = torch.where(first_base < never, first_base, first), first_base < never
    tokens = encoded(inputs[first]) if encoded is not None else None
    if tokens is None:
        order = torch.where(is_used, first_base, never + first).argsort()
        group = torch.where(is_used, bank_of[used], len(banks))[order]
    else:
        order = Trie(*tokens).order
        group = bank_of[used][order]
    kept, found, in_turn = int(is_used.sum()), list[Shard](), list[Tensor]()
    for g in group.unique().tolist():
        members = order[group == g]
        for some in members.tensor_split(-(-len(members) // size)):
            bases = is_used[some].nonzero().squeeze(1)
            found.append(Shard(inputs[first[some]], bases, Share(len(some) / count, len(bases) / kept)))
            in_turn.append(some)
    order = torch.cat(in_turn)
    rank = torch.empty_like(order).scatter_(0, order, torch.arange(count))
    return found, rank[code]
