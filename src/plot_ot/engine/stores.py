"""Stores in pieces: recorded shard by shard, put together, and cut down to what one unit needs of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, overload

import torch
from jaxtyping import Int
from torch import Tensor

from plot_ot.engine.units import Shard, Unit
from plot_ot.subjects import BankRecording, DecoderStore, DecoderSubject, Store, Subject
from plot_ot.subjects.decoder_cache import PrefixCache
from plot_ot.subjects.decoder_vectors import together


def record_shard(subject: Subject, shard: Shard) -> Store:
    """One pass over a shard's inputs, within its share of the memory for keys and values."""
    if not isinstance(subject, DecoderSubject):
        return subject.record(shard.inputs, shard.bases)
    memory = subject.memory
    subject.memory = max(1, int(memory * shard.share))
    try:
        return subject.record(shard.inputs, shard.bases)
    finally:
        subject.memory = memory


def merged(stores: Sequence[Store]) -> Store:
    """One store of all inputs, one store's after the other's."""
    if len(stores) == 1:
        return stores[0]
    found: dict[str, Any] = {}
    for f in fields(stores[0]):
        pieces = [getattr(s, f.name) for s in stores]
        if f.name == "part":  # every shard has one cache
            found["part"] = torch.cat([torch.where(part < 0, -1, k) for k, part in enumerate(pieces)])
        elif isinstance(pieces[0], Tensor):
            found[f.name] = torch.cat(pieces)
        elif isinstance(pieces[0], Mapping):
            found[f.name] = together(pieces)
        else:
            found[f.name] = tuple(x for piece in pieces for x in piece)
    return type(stores[0])(**found)


def each_tensor(store: Store, change: Callable[[Tensor], Tensor]) -> Store:
    """The store with all that belongs to inputs changed; the caches stay."""
    found: dict[str, Any] = {}
    for f in fields(store):
        value = getattr(store, f.name)
        if isinstance(value, Tensor):
            found[f.name] = change(value)
        elif isinstance(value, Mapping):
            found[f.name] = {name: change(t) for name, t in value.items()}
    return replace(store, **found)


def without_caches(store: Store) -> Store:
    """What can be sent anywhere: numbers per input, in main memory."""
    if isinstance(store, DecoderStore):
        store = replace(store, caches=())
    return each_tensor(store, lambda t: t.cpu())


def to_device(store: Store, subject: Subject) -> Store:
    """Activations and outputs where the subject's are; what counts inputs and tokens stays in main memory."""
    return each_tensor(store, lambda t: t.to(subject.device) if t.is_floating_point() else t)


def narrowed(recording: BankRecording, unit: Unit) -> BankRecording:
    """The part of a recording that a unit looks at, small enough to send: its pairs' inputs, its places.

    Inputs keep their order, so that whatever sorts by it gives the same here and there.
    """
    some = recording if isinstance(unit.pairs, slice) else recording.select(unit.pairs)
    rows: Int[Tensor, " rows"] = torch.cat([some.base_rows, some.source_rows]).unique()
    seen = {p.name: recording.store.activations[p.name] for p in unit.places}
    store = each_tensor(replace(recording.store, activations=seen), lambda t: t[rows.to(t.device)])
    base, source = (torch.searchsorted(rows, r).cpu() for r in (some.base_rows, some.source_rows))
    return BankRecording(recording.subject, without_caches(store), base, source, some.bank)


class Elsewhere(Sequence[PrefixCache]):
    """Keys and values by shard that are not here: whoever resumes here after all records that shard here."""

    def __init__(self, count: int, record: Callable[[int], Store]) -> None:
        self.size, self.record = count, record
        self.here: dict[int, PrefixCache] = {}

    def __len__(self) -> int:
        return self.size

    @overload
    def __getitem__(self, k: int) -> PrefixCache: ...
    @overload
    def __getitem__(self, k: slice) -> Sequence[PrefixCache]: ...
    def __getitem__(self, k: int | slice) -> PrefixCache | Sequence[PrefixCache]:
        if isinstance(k, slice):
            return [self[n] for n in range(*k.indices(self.size))]
        if not -self.size <= k < self.size:
            raise IndexError(k)
        k %= self.size
        if k not in self.here:
            store = self.record(k)
            assert isinstance(store, DecoderStore)  # noqa: S101
            [self.here[k]] = store.caches
        return self.here[k]


def with_caches(store: Store, caches: Elsewhere) -> Store:
    """The store with keys and values to be had on demand, where it is of a kind that needs them."""
    return replace(store, caches=caches) if isinstance(store, DecoderStore) else store  # type: ignore[arg-type]
