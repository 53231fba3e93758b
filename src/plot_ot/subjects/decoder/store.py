"""What passes over prompts leave: activations and outputs per prompt, and what resuming the bases needs.

A prompt that was recorded before, say to see whether the model answers it correctly, need not be run again: stores can
be put together from older ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from plot_ot.errors import PlotError
from plot_ot.subjects.decoder.cache import PrefixCache
from plot_ot.subjects.decoder.vectors import held_bytes, together
from plot_ot.subjects.protocol import Store


@dataclass(frozen=True)
class DecoderStore(Store):
    """What one pass over every distinct prompt leaves."""

    top_token: Int[Tensor, " inputs"]
    """The vocabulary's argmax after each prompt."""
    lengths: Int[Tensor, " inputs"]
    """Tokens of each prompt, padding left out."""
    back: Mapping[str, Int[Tensor, " inputs"]]
    """How far from the end each named position is."""
    final: Float[Tensor, "inputs d"]
    """The last token's residual after the last block: every read-out follows from it."""
    caches: Sequence[PrefixCache]
    """What resuming the bases needs."""
    part: Int[Tensor, " inputs"]
    """In which cache a base is, -1 for prompts that are no bases."""
    slot: Int[Tensor, " inputs"]
    """Where in that cache."""
    readings: dict[str, Float[Tensor, "inputs c"]] = field(default_factory=dict)
    """Outputs by the name of the read-out, for those asked for so far."""

    @property
    def prefixes(self) -> Sequence[PrefixCache]:
        return self.caches

    def with_prefixes(self, prefixes: Sequence[PrefixCache]) -> DecoderStore:
        return replace(self, caches=prefixes)

    @property
    def cache_bytes(self) -> int:
        """Bytes of keys and values."""
        return sum(cache.bytes for cache in {id(cache): cache for cache in self.caches}.values())

    def require_bases(self, rows: Int[Tensor, " pairs"]) -> None:
        """Refuse to resume prompts of which no keys and values were kept."""
        sources = int((self.part[rows] < 0).sum())
        if sources:
            raise PlotError(
                f"{sources} of {len(rows)} base inputs were recorded as sources only, without their keys and values. "
                f"Record them as bases."
            )


def ours(store: Store) -> DecoderStore:
    """Refuse a store that another kind of subject recorded."""
    if not isinstance(store, DecoderStore):
        raise PlotError(f"This store was recorded by another kind of subject ({type(store).__name__}).")
    return store


class Remembered:
    """Stores of earlier passes, looked up by input row."""

    def __init__(self) -> None:
        self.stores: list[DecoderStore] = []
        self._found: dict[bytes, tuple[int, int]] = {}

    def add(self, store: DecoderStore) -> None:
        """Remember all rows of a store."""
        for row, key in enumerate(_keys(store.inputs)):
            self._found[key] = len(self.stores), row
        self.stores.append(store)

    def forget(self) -> None:
        """Let go of everything."""
        self.stores.clear()
        self._found.clear()

    @property
    def bytes(self) -> int:
        """Bytes of keys and values held in memory."""
        caches = {id(c): c for store in self.stores for c in store.caches}
        return sum(c.bytes for c in caches.values() if not c.spilled)

    @property
    def vector_bytes(self) -> int:
        """Bytes of recorded vectors held in memory."""
        return sum(held_bytes(store.activations) for store in self.stores)

    def lookup(self, inputs: Tensor, bases: Int[Tensor, " bases"]) -> tuple[Int[Tensor, " inputs"], Tensor]:
        """(store, row in it) of every input, -1 where it is not known, or is a base whose keys were not kept."""
        wanted = torch.zeros(len(inputs), dtype=torch.bool)
        wanted[bases] = True
        where = [self._found.get(key, (-1, -1)) for key in _keys(inputs)]
        for k, (store, row) in enumerate(where):
            if store >= 0 and wanted[k] and self.stores[store].part[row] < 0:
                where[k] = -1, -1
        store_of, row_of = torch.tensor(where).reshape(-1, 2).unbind(dim=1)
        return store_of, row_of


def _keys(inputs: Tensor) -> list[bytes]:
    rows = inputs.cpu().contiguous()
    return [row.tobytes() for row in rows.numpy()]


def joined(
    inputs: Tensor, stores: Sequence[DecoderStore], store_of: Int[Tensor, " inputs"], row_of: Int[Tensor, " inputs"]
) -> DecoderStore:
    """One store of these inputs, each taken from a row of some store."""
    distinct, index = store_of.unique(return_inverse=True)
    used = [stores[k] for k in distinct.tolist()]
    offsets = torch.tensor([0, *(len(s.inputs) for s in used)]).cumsum(0)
    rows = offsets[index] + row_of

    def pick(parts: Sequence[Tensor]) -> Tensor:
        return torch.cat(list(parts))[rows.to(parts[0].device)]

    first_cache = torch.tensor([0, *(len(s.caches) for s in used)]).cumsum(0)
    part = pick([torch.where(s.part < 0, -1, s.part + start) for s, start in zip(used, first_cache, strict=False)])
    final = pick([s.final for s in used])
    return DecoderStore(
        inputs,
        together([s.activations for s in used], rows),
        final,
        pick([s.top_token for s in used]),
        pick([s.lengths for s in used]),
        {name: pick([s.back[name] for s in used]) for name in used[0].back},
        final,
        tuple(cache for s in used for cache in s.caches),
        part,
        pick([s.slot for s in used]),
    )
