"""How a network responds to edits: batches of variants over pairs, each resumed at its first edited place."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from plot_ot.abstract.banks import first_of_each, row_codes
from plot_ot.edits.frames import EditBatch
from plot_ot.edits.guards import require_finite_outputs, within_memory
from plot_ot.errors import PlotError
from plot_ot.subjects import Place, Recording
from plot_ot.subjects.memory import sent
from plot_ot.subjects.protocol import PairIndex, Rewrite, Store


def respond(recording: Recording, edits: Sequence[EditBatch]) -> Float[Tensor, "variants pairs ..."]:
    """Outputs of every pair under every variant: the primitive that signatures, calibration, DAS and tests share."""
    pieces = list(stream(recording, edits))
    first = pieces[0][2]
    outputs = first.new_empty(len(edits[0].gains), len(recording), *first.shape[2:])
    for variants, pairs, piece in pieces:
        at = torch.arange(len(recording), device=piece.device)[pairs]
        outputs[variants.to(piece.device)[:, None], at] = piece
    return outputs


@torch.no_grad()
def stream(
    recording: Recording, edits: Sequence[EditBatch]
) -> Iterator[tuple[Int[Tensor, " chosen"], PairIndex, Float[Tensor, "chosen pairs ..."]]]:
    """`respond` in pieces (variants, pairs, outputs) that fit the subject's batch size, by a plan fixed in advance.

    Every variant resumes at the first place where one of its gains is not zero; pairs that are the same to all of
    these edits run once.
    """
    active = torch.stack([(e.gains != 0).any(dim=1).cpu() for e in _sorted(recording, edits)])
    edits = in_forward_order(recording, edits)
    first_active = active.long().argmax(dim=0)
    size = recording.subject.responses_per_batch
    for start in range(len(edits)):
        group = (first_active == start).nonzero().squeeze(1)
        if not len(group):
            continue
        some = slice(None) if len(group) == len(first_active) else group
        acting = [e for k, e in enumerate(edits) if k == start or (k > start and bool(active[k, group].any()))]
        here = [e.select(some) for e in acting]
        distinct = Distinct.of(recording, [e.place for e in here])
        gathered = [Gathered(distinct.once, e.place) for e in here]
        classes_at_once = min(len(distinct.once), size)
        variants_at_once = max(1, size // classes_at_once)
        for first in range(0, len(group), variants_at_once):
            chosen = [e.select(slice(first, first + variants_at_once)) for e in here]
            for classes, pairs, expand in distinct.batches(classes_at_once):
                outputs = _resume(distinct.once, chosen, gathered, classes)
                there = pairs if isinstance(pairs, slice) else sent(pairs, outputs.device)
                yield group[first : first + variants_at_once], there, expand(outputs)


@dataclass(frozen=True)
class Distinct:
    """Pairs sorted into classes that no edit at some places can tell apart: one base input, equal source states.

    Whoever swaps two sources with bit-identical states at the edited places gets identical outputs, so each class
    runs `once`. Which inputs share a state is read off the recording.
    """

    once: Recording
    """One pair per class."""
    of_pair: Int[Tensor, " pairs"] | None
    """The class of every pair; None where every pair is its own."""

    @classmethod
    def of(cls, recording: Recording, places: Sequence[Place]) -> Distinct:
        """The classes under edits at these places."""
        code = recording.base_rows
        for place in places:
            state = _state_codes(recording.store, place)[recording.source_rows]
            code = torch.unique(code * (int(state.max()) + 1) + state, return_inverse=True)[1]
        if int(code.max()) + 1 == len(recording):
            return cls(recording, None)
        first = first_of_each(code)
        once = Recording(recording.subject, recording.store, recording.base_rows[first], recording.source_rows[first])
        return cls(once, code)

    def batches(
        self, size: int, order: Int[Tensor, " classes"] | None = None
    ) -> Iterator[tuple[PairIndex, PairIndex, Callable[[Tensor], Tensor]]]:
        """The classes in batches of `size`, in the given order: (classes, their pairs, outputs by class -> by pair)."""
        if self.of_pair is None:
            for at in range(0, len(self.once), size):
                batch = slice(at, min(at + size, len(self.once))) if order is None else order[at : at + size]
                yield batch, batch, lambda outputs: outputs
            return
        count, rank = len(self.once), self.of_pair
        if order is not None:
            rank = torch.empty_like(order).scatter_(0, order, torch.arange(count))[self.of_pair]
        rank, pairs = rank.sort(stable=True)
        for at in range(0, count, size):
            low, high = torch.searchsorted(rank, torch.tensor([at, at + size])).tolist()
            classes = slice(at, min(at + size, count)) if order is None else order[at : at + size]
            yield classes, pairs[low:high], partial(_by_pair, rank[low:high] - at)

    def first_pair(self, number: int) -> int:
        """The first pair of a class."""
        return number if self.of_pair is None else int((self.of_pair == number).nonzero()[0])


def _state_codes(store: Store, place: Place) -> Int[Tensor, " inputs"]:
    """A number for every input, on the CPU: the same for bit-identical states at a place. Looked up once per store."""
    if place.name not in store.codes:
        store.codes[place.name] = row_codes(store.activations[place.name]).cpu()
    return store.codes[place.name]


def _by_pair(of_pair: Int[Tensor, " pairs"], outputs: Shaped[Tensor, "variants classes ..."]) -> Tensor:
    return outputs.index_select(1, sent(of_pair, outputs.device))


def resume_edited(
    recording: Recording,
    edits: Sequence[EditBatch],
    pairs: PairIndex = slice(None),
    gathered: Sequence[Gathered] | None = None,
) -> Float[Tensor, "variants pairs ..."]:
    """One batch of responses, all resumed at the first edit's place; gradients flow into frames and gains.

    Who calls it often at the same places passes what it `gathered` there, in forward order.
    """
    edits = in_forward_order(recording, edits)
    return _resume(recording, edits, gathered or [Gathered(recording, e.place) for e in edits], pairs)


class Gathered:
    """A place's base and source activations by pair, gathered once for many batches."""

    def __init__(self, recording: Recording, place: Place) -> None:
        self.base = recording.base_at(place)
        self.source = recording.source_at(place)


def _resume(recording: Recording, edits: Sequence[EditBatch], gathered: Sequence[Gathered], pairs: PairIndex) -> Tensor:
    index = range(len(recording))[pairs] if isinstance(pairs, slice) else pairs

    def run(v: slice, p: slice) -> Tensor:
        some = slice(index[p].start, index[p].stop) if isinstance(index, range) else index[p]
        whole = v.stop - v.start == len(edits[0].gains)
        return _resume_at_once(recording, edits if whole else [e.select(v) for e in edits], gathered, some)

    return within_memory(recording.subject, run, len(edits[0].gains), len(index))


def _resume_at_once(
    recording: Recording, edits: Sequence[EditBatch], gathered: Sequence[Gathered], pairs: PairIndex
) -> Tensor:
    first, *rest = edits
    here = pairs if isinstance(pairs, slice) else sent(pairs, gathered[0].base.device)
    edited = first.apply(gathered[0].base[here].unsqueeze(0), gathered[0].source[here])

    def rewrite(edit: EditBatch, source: Tensor) -> Rewrite:
        return lambda a: edit.apply(a, source)

    later = {e.place.name: rewrite(e, g.source[here]) for e, g in zip(rest, gathered[1:], strict=True)}
    outputs = recording.subject.resume(recording.store, recording.base_rows[pairs], first.place, edited, later)
    require_finite_outputs(outputs, recording, pairs, edited, first.place, later)
    return outputs


def in_forward_order(recording: Recording, edits: Sequence[EditBatch]) -> list[EditBatch]:
    """The edits sorted as the forward pass meets them, on the subject's device, checked against each other."""
    moved = []
    for e in _sorted(recording, edits):
        like = recording.store.activations[e.place.name]
        moved.append(EditBatch(e.place, e.frame.to(like.device, like.dtype), sent(e.gains, like.device, like.dtype)))
    return moved


def _sorted(recording: Recording, edits: Sequence[EditBatch]) -> list[EditBatch]:
    """The edits in forward order, where they are."""
    if not edits:
        raise PlotError("There is nothing to respond to: give at least one edit.")
    if len({len(e.gains) for e in edits}) > 1:
        raise PlotError(f"All places need the same variants; found {[len(e.gains) for e in edits]}.")
    order = {p.name: k for k, p in enumerate(recording.subject.places)}
    for e in edits:
        recording.subject.require(e.place)
    if len({e.place.name for e in edits}) < len(edits):
        raise PlotError("Two edits name the same place; put their directions into one frame.")
    return sorted(edits, key=lambda e: order[e.place.name])
