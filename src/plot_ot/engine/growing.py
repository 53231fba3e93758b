"""Recordings of inputs that come in portions: each input is run once, however often banks are drawn from them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Int
from torch import Tensor

from plot_ot.abstract.banks import Bank, row_codes
from plot_ot.engine.stores import merged, record_shard
from plot_ot.engine.units import Crew, Shard, SharedRecording, inputs_per_shard
from plot_ot.errors import PlotError
from plot_ot.subjects import Store, Subject
from plot_ot.subjects.protocol import Share, require_finite


class GrowingRecording:
    """A subject's recording that more inputs can be added to; at `most` so many, which share the memory.

    Every input can be resumed: which of them will be bases is not known before all pairs are drawn.
    """

    def __init__(self, subject: Subject, crew: Crew, most: int) -> None:
        self.subject, self.crew, self.most = subject, crew, most
        self._pieces: list[Store] = []
        self._shard: list[Int[Tensor, " inputs"]] = []

    def add(self, inputs: Int[Tensor, "rows inputs"]) -> Store:
        """Run inputs that were not there before, and keep them; the store of these alone."""
        found = []
        for some in inputs.split(inputs_per_shard(self.subject)):
            part = len(some) / max(self.most, len(some))
            found.append(record_shard(self.subject, Shard(some, torch.arange(len(some)), Share(part, part))))
            self._shard.append(torch.full((len(some),), len(self._shard)))
        store = merged(found)
        require_finite(store)
        self._pieces.append(store)
        return store

    def recordings(self, banks: Sequence[Bank]) -> list[SharedRecording]:
        """Recordings of banks whose inputs were all added; nothing is run."""
        self._pieces = [merged(self._pieces)]
        [store] = self._pieces
        recorded, shard = len(store.inputs), torch.cat(self._shard)
        asked = torch.cat([x for bank in banks for x in (bank.base, bank.source)])
        code = row_codes(torch.cat([store.inputs.to(asked), asked]))
        at = torch.full((int(code.max()) + 1,), -1)
        at[code[:recorded]] = torch.arange(recorded)
        rows = at[code[recorded:]]
        if bool((rows < 0).any()):
            raise PlotError("A bank has inputs that were not recorded: add them first.")
        rows, found, start = rows.cpu(), [], 0
        for bank in banks:
            middle, end = start + len(bank), start + 2 * len(bank)
            base, source = rows[start:middle], rows[middle:end]
            found.append(SharedRecording(self.subject, store, base, source, bank, self.crew, shard))
            start = end
        return found
