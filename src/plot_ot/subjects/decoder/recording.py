"""One pass over prompts: vectors at all places, the last residuals, and what resuming the bases will need.

Prompts that begin alike run as a trie, each shared beginning once; others run in batches of similar length.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from plot_ot.subjects.decoder.cache import PrefixCache
from plot_ot.subjects.decoder.layout import LAST, Spot, counted_back
from plot_ot.subjects.decoder.passes import batches, whole_pass
from plot_ot.subjects.decoder.shared_pass import Carried, TrieBatch, shared_pass
from plot_ot.subjects.decoder.store import DecoderStore
from plot_ot.subjects.decoder.trie import Trie
from plot_ot.subjects.decoder.vectors import Spilled, Vectors
from plot_ot.subjects.memory import sent
from plot_ot.subjects.protocol import Share, frozen

if TYPE_CHECKING:
    from plot_ot.subjects.decoder.subject import DecoderSubject

Ran = tuple[Tensor, Tensor, Tensor]
"""Rows, their last residuals and largest tokens. What a pass writes, a second one over the same rows writes again."""


def record_prompts(subject: DecoderSubject, inputs: Tensor, bases: Int[Tensor, " bases"], share: Share) -> DecoderStore:
    """Run every prompt once; only `bases` keep keys and values."""
    ids, real = subject.encoded(inputs)
    with torch.no_grad(), frozen(subject.decoder.model):
        recorder = Recorder(subject, inputs, ids, real, bases, share)
        store = recorder.record()
    return replace(store, outputs=subject.outputs_of(store))


class Recorder:
    """What is written while prompts run."""

    def __init__(
        self,
        subject: DecoderSubject,
        inputs: Tensor,
        ids: Int[Tensor, "rows tokens"],
        real: Bool[Tensor, "rows tokens"],
        bases: Int[Tensor, " bases"],
        share: Share,
    ) -> None:
        self.subject, self.decoder, self.inputs, self.ids, self.real = subject, subject.decoder, inputs, ids, real
        self.lengths, device = real.sum(dim=1), subject.device
        self.back = counted_back(subject.positions, inputs, self.lengths, subject.tokens, subject.spans)
        self.trie, self.tables = self._as_trie()
        spots = subject.spots
        tail = max(int(b[bases].max()) for b in self.back.values()) if len(bases) else 1
        entries = {spot.enters for spot in spots.values() if tail > 1 or spot.kind != "block_output"}
        widths = {name: spot.place.width for name, spot in spots.items()}
        vectors, last = 4 * len(ids) * sum(widths.values()), 4 * len(ids) * self.decoder.width
        before = subject.remembered_vectors
        spilled = vectors + before > subject.vectors_in_memory * share.inputs
        # a quarter is for what is resumed; all inputs have vectors, and the bases share what these leave
        beside = (last + (0 if spilled else vectors)) / share.inputs + before + subject.remembered_bytes
        limit = int(share.bases * subject.keys_in_memory(beside))
        self.cache = PrefixCache(bases, self.lengths, len(self.decoder.blocks), limit, tail, entries, self.trie)
        self.kept = Spilled(len(ids), widths, device) if spilled else Vectors(len(ids), widths, device)
        self.stages: dict[tuple[int, str], list[Spot]] = {}
        for spot in spots.values():
            self.stages.setdefault(spot.stage, []).append(spot)
        self._carried = Carried()

    def _as_trie(self) -> tuple[Trie | None, list[Tensor]]:
        """The prompts as a trie, and what tokens see in each layer; None where that saves nothing, or is refused."""
        trie, row = Trie(self.ids, self.real), int(self.lengths.argmax())
        if not trie.is_worth_it:
            return None, []
        longest = self.ids[row : row + 1, -int(self.lengths[row]) :].to(self.subject.device)
        tables = self.subject.sharing.tables(self.decoder, longest)
        return (None, []) if tables is None else (trie, list(tables))

    def record(self) -> DecoderStore:
        """Run all prompts."""
        subject, device = self.subject, self.subject.device
        final = torch.empty(len(self.ids), self.decoder.width, device=device)
        top = torch.empty(len(self.ids), dtype=torch.long, device=device)
        at_once = subject.recorded_at_once(device.type)
        if self.trie is None:
            run, cut = self._run, batches(self.lengths, at_once)
        else:
            run, cut = self._run_nodes, self.trie.batches(at_once)
            self.cache.see(self.tables)
        for batch in cut:
            for here, h, token in subject.limits.pieces(run, batch):
                final[here], top[here] = h, token
            subject.give_back()
        cache = self.cache
        cache.finish()
        part = torch.where(cache.slots < 0, -1, 0)
        return DecoderStore(
            self.inputs, self.kept, final, top, self.lengths, self.back, final, (cache,), part, cache.slots
        )

    def _run(self, rows: Int[Tensor, " rows"]) -> Ran:
        """A plain pass."""
        device = self.subject.device
        longest, here = int(self.lengths[rows].max()), sent(rows, device)
        tokens, mask = (sent(t[rows, -longest:], device) for t in (self.ids, self.real))

        def keep(spots: list[Spot]) -> Callable[[Tensor], None]:
            def look(whole: Tensor) -> None:
                for spot in spots:
                    self.kept.write(spot.place.name, here, spot.vectors(whole, self.back[spot.position][rows]))

            return look

        watched = {stage: keep(spots) for stage, spots in self.stages.items()}
        return self._read(rows, whole_pass(self.decoder, tokens, mask, watched, self.cache.batch(rows, mask)))

    def _run_nodes(self, rows: Int[Tensor, " rows"]) -> Ran:
        """A pass over the nodes that the rows own, which are the next ones of the trie."""
        assert self.trie is not None  # noqa: S101
        here, shape = sent(rows, self.subject.device), self.subject.prompt_shape
        numbers = 2 * shape.groups * shape.head_width
        batch = TrieBatch(self.trie, rows, self._carried, self.tables, self.cache, numbers)

        def keep(stage: tuple[int, str], spots: list[Spot]) -> Callable[[Tensor], None]:
            def look(new: Tensor) -> None:
                if all(spot.position == LAST for spot in spots):
                    ends = batch.at_the_end(new)
                    for spot in spots:
                        self.kept.write(spot.place.name, here, ends[:, spot.columns].float())
                    return
                lines = batch.lines(stage, new)
                for spot in spots:
                    at = batch.tokens_from(self.back[spot.position][rows], spot.tokens).to(lines.device)
                    self.kept.write(spot.place.name, here, lines[at][..., spot.columns].flatten(1).float())

            return look

        watched = {stage: keep(stage, spots) for stage, spots in self.stages.items()}
        ran = self._read(rows, shared_pass(self.decoder, batch, watched))
        self._carried = batch.left()
        return ran

    def _read(self, rows: Tensor, h: Tensor) -> Ran:
        device = self.subject.device
        return sent(rows, device), h.to(device, torch.float32), self.decoder.largest(h)[1].to(device)
