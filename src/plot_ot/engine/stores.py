"""Stores in pieces: recorded shard by shard, put together, and cut down to what one unit needs of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from itertools import accumulate
from typing import Any, overload

import torch
from jaxtyping import Int
from torch import Tensor

from plot_ot.engine.units import Shard, Unit
from plot_ot.subjects import BankRecording, Store, Subject
from plot_ot.subjects.decoder.cache import PrefixCache
from plot_ot.subjects.decoder.vectors import changed, held_bytes, on_disk, together


def record_shard(subject: Subject, shard: Shard) -> Store:
    """One pass over a shard's inputs, within its share of the memory."""
    return subject.record_part(shard.inputs, shard.bases, shard.share)


def merged(stores: Iterable[Store], most: int | None = None) -> Store:
    """One store of all inputs, one store's after the other's, taken as they come.

    Activations of more than `most` bytes go to temporary files, from where they are read one place at a time.
    """
    stores = _within(stores, most)
    if len(stores) == 1:
        return stores[0]
    found: dict[str, Any] = {}
    for f in fields(stores[0]):
        pieces = [getattr(s, f.name) for s in stores]
        if f.name == "part":  # a store whose caches are elsewhere has one there
            first = accumulate((max(1, len(s.prefixes)) for s in stores), initial=0)
            found["part"] = torch.cat([torch.where(p < 0, -1, p + k) for p, k in zip(pieces, first, strict=False)])
        elif f.name == "readings":  # a read-out that was not asked of all of them is read again
            names = [name for name in pieces[0] if all(name in p for p in pieces)]
            found[f.name] = {name: torch.cat([p[name] for p in pieces]) for name in names}
        elif isinstance(pieces[0], Tensor):
            found[f.name] = torch.cat(pieces)
        elif isinstance(pieces[0], Mapping):
            found[f.name] = together(pieces)
        else:
            found[f.name] = tuple(x for piece in pieces for x in piece)
    return type(stores[0])(**found)


def _within(stores: Iterable[Store], most: int | None) -> list[Store]:
    """The stores, with their activations on disk as soon as they take more than so many bytes together."""
    kept: list[Store] = []
    full = False
    for store in stores:
        kept.append(store)
        full = full or (most is not None and sum(held_bytes(s.activations) for s in kept) > most)
        if full:
            kept = [replace(s, activations=on_disk(s.activations)) for s in kept]
    return kept


def each_tensor(store: Store, change: Callable[[Tensor], Tensor]) -> Store:
    """The store with all that belongs to inputs changed; the caches stay."""
    found: dict[str, Any] = {}
    for f in fields(store):
        value = getattr(store, f.name)
        if isinstance(value, Tensor):
            found[f.name] = change(value)
        elif isinstance(value, Mapping):
            found[f.name] = changed(value, change)
    return replace(store, **found)


def without_caches(store: Store) -> Store:
    """What can be sent anywhere: numbers per input, in main memory."""
    return each_tensor(store.with_prefixes(()), lambda t: t.cpu())


def to_device(store: Store, subject: Subject) -> Store:
    """Activations and outputs where the subject's are; what counts inputs and tokens stays in main memory."""
    return each_tensor(store, lambda t: t.to(subject.device) if t.is_floating_point() else t)


def narrowed(recording: BankRecording, unit: Unit) -> BankRecording:
    """The part of a recording that a unit looks at, small enough to send: its pairs' inputs, its places.

    Inputs keep their order, so that whatever sorts by it gives the same here and there.
    """
    some = recording if isinstance(unit.pairs, slice) else recording.select(unit.pairs)
    rows: Int[Tensor, " rows"] = torch.cat([some.base_rows, some.source_rows]).unique()
    seen = {name: recording.store.activations[name] for p in unit.places for name in recording.subject.looked_at(p)}
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
            [self.here[k]] = self.record(k).prefixes
        return self.here[k]
