"""The edit: the one operation behind every intervention of the paper, its batches, and how networks respond to them.

    a  <-  a + W ( g * ( Rᵀ a_source - Rᵀ a ) )

The frame (R reads, W writes) holds directions, the gains g say how much of each is taken from the source. Where
reading is not linear (the encoder of a sparse autoencoder), Rᵀ a stands for σ(Rᵀ a + bias).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from jaxtyping import Float, Int
from torch import Tensor

from plot_ot.banks import first_of_each, row_codes
from plot_ot.encoder import Encoder
from plot_ot.errors import PlotError
from plot_ot.guards import refuse_non_finite, within_memory
from plot_ot.subjects import Place, Recording
from plot_ot.subjects.base import Rewrite


@dataclass(frozen=True)
class Frame:
    """Directions of an activation vector of width d: R, W of shape [d, r], or one per variant [V, d, r].

    `read` None is the identity; `write` None is W = R (an orthonormal frame); an `encoder` makes reading nonlinear.
    """

    width: int
    read: Float[Tensor, "*variants d r"] | None = None
    write: Float[Tensor, "*variants d r"] | None = None
    kind: str = "identity"
    encoder: Encoder | None = None

    @classmethod
    def identity(cls, width: int) -> Frame:
        """The canonical basis."""
        return cls(width)

    @classmethod
    def orthonormal(cls, directions: Float[Tensor, "*variants d r"], kind: str = "orthonormal") -> Frame:
        """R = W = the given orthonormal columns (a PCA basis, a DAS rotation)."""
        gram = directions.mT @ directions
        error = float((gram - torch.eye(gram.shape[-1], device=gram.device, dtype=gram.dtype)).abs().max())
        if not error < 1e-3:
            raise PlotError(f"Frame '{kind}': the columns are not orthonormal (off by {error:.2g}); use Frame.oblique.")
        return cls(directions.shape[-2], directions, None, kind)

    @classmethod
    def oblique(cls, read: Float[Tensor, "d r"], write: Float[Tensor, "d r"], kind: str = "oblique") -> Frame:
        """R != W: what is read from the source is written along other directions."""
        if read.shape != write.shape:
            raise PlotError(f"Read and write must have one shape; found {tuple(read.shape)} and {tuple(write.shape)}.")
        return cls(read.shape[-2], read, write, kind)

    @classmethod
    def encoded(
        cls, read: Float[Tensor, "d r"], write: Float[Tensor, "d r"], encoder: Encoder, kind: str = "sae"
    ) -> Frame:
        """Features of a sparse autoencoder: read through its encoder, written through its decoder."""
        if read.ndim != 2 or read.shape != write.shape or encoder.bias.shape != read.shape[1:]:
            raise PlotError(
                f"Read, write and bias must be [d, r], [d, r] and [r]; found {tuple(read.shape)}, "
                f"{tuple(write.shape)} and {tuple(encoder.bias.shape)}."
            )
        return cls(read.shape[0], read, write, kind, encoder)

    @property
    def rank(self) -> int:
        """r, the number of directions."""
        return self.width if self.read is None else self.read.shape[-1]

    def coordinates(self, a: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch r"]:
        """Rᵀ a, or what the encoder makes of it."""
        if self.read is None:
            return a
        return a @ self.read if self.encoder is None else self.encoder.read(a, self.read, None)

    def lift(self, c: Float[Tensor, "*batch r"]) -> Float[Tensor, "*batch d"]:
        """W c."""
        directions = self.read if self.write is None else self.write
        return c if directions is None else c @ directions.mT

    def compose(self, inner: Frame) -> Frame:
        """Directions given in this frame's coordinates: R Q_R and W Q_W (PLOT-PCA-DAS is R_Z Q)."""
        if self.read is None or inner.read is None:
            return inner if self.read is None else self
        self._require_linear("mixed with others")
        write = None
        if self.write is not None or inner.write is not None:
            outer = self.read if self.write is None else self.write
            write = outer @ (inner.read if inner.write is None else inner.write)
        return Frame(self.width, self.read @ inner.read, write, inner.kind)

    @classmethod
    def stack(cls, frames: Sequence[Frame]) -> Frame:
        """Frames of one rank as one frame with a variant for each."""
        first = frames[0]
        if first.read is None:
            return first
        for f in frames:
            f._require_linear("stacked with other frames")
        read = torch.stack([f.read for f in frames if f.read is not None])
        write = torch.stack([f.write if f.write is not None else f.read for f in frames if f.read is not None])
        return cls(first.width, read, write, first.kind)

    def only(self, some: Int[Tensor, " some"]) -> Frame:
        """The frame of some of its directions, which must have been given (not the identity)."""
        assert self.read is not None  # noqa: S101
        return replace(
            self,
            read=self.read[..., some],
            write=None if self.write is None else self.write[..., some],
            encoder=None if self.encoder is None else self.encoder.only(self.read, some),
        )

    def to(self, device: torch.device, dtype: torch.dtype) -> Frame:
        """The frame's tensors moved."""
        return replace(
            self,
            read=None if self.read is None else self.read.to(device, dtype),
            write=None if self.write is None else self.write.to(device, dtype),
            encoder=None if self.encoder is None else self.encoder.to(device, dtype),
        )

    def _require_linear(self, use: str) -> None:
        if self.encoder is not None:
            raise PlotError(
                f"Directions of a '{self.kind}' frame are read through an encoder and cannot be {use}. "
                f"Choose gains for them instead (a coupling, TrainMask), or rotate the whole place."
            )


@dataclass(frozen=True)
class EditBatch:
    """The edits that V variants make at one place: a frame (shared, or one per variant) and gains [V, r]."""

    place: Place
    frame: Frame
    gains: Float[Tensor, "variants r"]

    def __post_init__(self) -> None:
        if self.gains.ndim != 2 or self.gains.shape[1] != self.frame.rank:
            raise PlotError(
                f"Gains at {self.place.name} must be [variants, {self.frame.rank}]; found {tuple(self.gains.shape)}."
            )
        if self.frame.width != self.place.width:
            raise PlotError(
                f"A frame of width {self.frame.width} does not fit {self.place.name} of width {self.place.width}."
            )
        read = self.frame.read
        if read is not None and read.ndim == 3 and len(read) != len(self.gains):
            raise PlotError(f"{len(read)} frames for {len(self.gains)} variants at {self.place.name}.")

    def select(self, variants: Int[Tensor, " chosen"] | slice) -> EditBatch:
        """The edits of some of the variants."""
        read, write = self.frame.read, self.frame.write
        frame = replace(
            self.frame,
            read=read[variants] if read is not None and read.ndim == 3 else read,
            write=write[variants] if write is not None and write.ndim == 3 else write,
        )
        return EditBatch(self.place, frame, self.gains[variants])

    def apply(
        self, a: Float[Tensor, "#variants pairs d"], source: Float[Tensor, "pairs d"]
    ) -> Float[Tensor, "variants pairs d"]:
        """a + W(g * (Rᵀ a_source - Rᵀ a)) for every variant and pair."""
        g = self.gains.unsqueeze(1)
        if self.frame.read is None:
            # a + g (a_source - a): one pass over what is large, be that the shared difference or the variants' own a
            return torch.addcmul(a, g, source - a) if len(a) == 1 else torch.lerp(a, source, g)
        if self.frame.encoder is not None:
            return self.frame.encoder.edited(a, source, self.frame.read, self.frame.write, self.gains)
        change = self.frame.coordinates(source - a)  # reading is linear
        return a + self.frame.lift(g * change)


def respond(recording: Recording, edits: Sequence[EditBatch]) -> Float[Tensor, "variants pairs ..."]:
    """Outputs of every pair under every variant: the primitive that signatures, calibration, DAS and tests share."""
    pieces = list(stream(recording, edits))
    first = pieces[0][2]
    outputs = first.new_empty(len(edits[0].gains), len(recording), *first.shape[2:])
    for variants, pairs, piece in pieces:
        at = torch.arange(len(recording), device=piece.device)[pairs]
        outputs[variants.to(piece.device)[:, None], at] = piece
    return outputs


Pairs = slice | Int[Tensor, " chosen"]


@torch.no_grad()
def stream(
    recording: Recording, edits: Sequence[EditBatch]
) -> Iterator[tuple[Int[Tensor, " chosen"], Pairs, Float[Tensor, "chosen pairs ..."]]]:
    """`respond` in pieces (variants, pairs, outputs) that fit the subject's batch size, by a plan fixed in advance.

    Every variant resumes at the first place where one of its gains is not zero; pairs that are the same to all of
    these edits run once.
    """
    edits = in_forward_order(recording, edits)
    first_active = torch.stack([(e.gains != 0).any(dim=1) for e in edits]).long().argmax(dim=0).cpu()
    size = recording.subject.responses_per_batch
    for start in range(len(edits)):
        group = (first_active == start).nonzero().squeeze(1)
        if not len(group):
            continue
        here = [e.select(group.to(e.gains.device)) for e in edits[start:]]
        here = [e for k, e in enumerate(here) if not k or bool(e.gains.any())]
        distinct = Distinct.of(recording, [e.place for e in here])
        gathered = [Gathered(distinct.once, e.place) for e in here]
        classes_at_once = min(len(distinct.once), size)
        variants_at_once = max(1, size // classes_at_once)
        for first in range(0, len(group), variants_at_once):
            chosen = [e.select(slice(first, first + variants_at_once)) for e in here]
            for classes, pairs, expand in distinct.batches(classes_at_once):
                outputs = _resume(distinct.once, chosen, gathered, classes)
                yield group[first : first + variants_at_once], pairs, expand(outputs)


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
            state = row_codes(recording.store.activations[place.name])[recording.source_rows]
            code = torch.unique(code * (int(state.max()) + 1) + state, return_inverse=True)[1]
        if int(code.max()) + 1 == len(recording):
            return cls(recording, None)
        first = first_of_each(code)
        once = Recording(recording.subject, recording.store, recording.base_rows[first], recording.source_rows[first])
        return cls(once, code)

    def batches(
        self, size: int, order: Int[Tensor, " classes"] | None = None
    ) -> Iterator[tuple[Pairs, Pairs, Callable[[Tensor], Tensor]]]:
        """The classes in batches of `size`, in the given order: (classes, their pairs, outputs by class -> by pair)."""
        if self.of_pair is None:
            for at in range(0, len(self.once), size):
                batch = slice(at, min(at + size, len(self.once))) if order is None else order[at : at + size]
                yield batch, batch, lambda outputs: outputs
            return
        if order is None:
            order = torch.arange(len(self.once), device=self.of_pair.device)
        rank, pairs = (
            torch.empty_like(order)
            .scatter_(0, order, torch.arange(len(order), device=order.device))[self.of_pair]
            .sort(stable=True)
        )
        for at in range(0, len(order), size):
            low, high = torch.searchsorted(rank, torch.tensor([at, at + size], device=rank.device)).tolist()
            yield order[at : at + size], pairs[low:high], partial(_by_pair, rank[low:high] - at)

    def first_pair(self, number: int) -> int:
        """The first pair of a class."""
        return number if self.of_pair is None else int((self.of_pair == number).nonzero()[0])


def _by_pair(of_pair: Int[Tensor, " pairs"], outputs: Float[Tensor, "variants classes ..."]) -> Tensor:
    return outputs.index_select(1, of_pair)


def resume_edited(
    recording: Recording,
    edits: Sequence[EditBatch],
    pairs: slice | Tensor = slice(None),
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


def _resume(
    recording: Recording, edits: Sequence[EditBatch], gathered: Sequence[Gathered], pairs: slice | Tensor
) -> Tensor:
    index = range(len(recording))[pairs] if isinstance(pairs, slice) else pairs

    def run(v: slice, p: slice) -> Tensor:
        some = slice(index[p].start, index[p].stop) if isinstance(index, range) else index[p]
        whole = v.stop - v.start == len(edits[0].gains)
        return _resume_at_once(recording, edits if whole else [e.select(v) for e in edits], gathered, some)

    return within_memory(recording.subject, run, len(edits[0].gains), len(index))


def _resume_at_once(
    recording: Recording, edits: Sequence[EditBatch], gathered: Sequence[Gathered], pairs: slice | Tensor
) -> Tensor:
    first, *rest = edits
    edited = first.apply(gathered[0].base[pairs].unsqueeze(0), gathered[0].source[pairs])

    def rewrite(edit: EditBatch, source: Tensor) -> Rewrite:
        return lambda a: edit.apply(a, source)

    later = {e.place.name: rewrite(e, g.source[pairs]) for e, g in zip(rest, gathered[1:], strict=True)}
    outputs = recording.subject.resume(recording.store, recording.base_rows[pairs], first.place, edited, later)
    refuse_non_finite(outputs, recording, pairs, edited, first.place, later)
    return outputs


def in_forward_order(recording: Recording, edits: Sequence[EditBatch]) -> list[EditBatch]:
    """The edits sorted as the forward pass meets them, on the subject's device, checked against each other."""
    if not edits:
        raise PlotError("There is nothing to respond to: give at least one edit.")
    if len({len(e.gains) for e in edits}) > 1:
        raise PlotError(f"All places need the same variants; found {[len(e.gains) for e in edits]}.")
    order = {p.name: k for k, p in enumerate(recording.subject.places)}
    for e in edits:
        recording.subject.require(e.place)
    if len({e.place.name for e in edits}) < len(edits):
        raise PlotError("Two edits name the same place; put their directions into one frame.")
    moved = []
    for e in sorted(edits, key=lambda e: order[e.place.name]):
        like = recording.store.activations[e.place.name]
        moved.append(EditBatch(e.place, e.frame.to(like.device, like.dtype), e.gains.to(like.device, like.dtype)))
    return moved
