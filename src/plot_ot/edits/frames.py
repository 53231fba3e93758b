"""The edit: the one operation behind every intervention of the paper, and batches of it.

    a  <-  a + W ( g * ( Rᵀ a_source - Rᵀ a ) )

The frame (R reads, W writes) holds directions, the gains g say how much of each is taken from the source. Where
reading is not linear (the encoder of a sparse autoencoder), Rᵀ a stands for σ(Rᵀ a + bias).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from plot_ot.edits.encoder import Encoder
from plot_ot.errors import PlotError
from plot_ot.subjects import Place
from plot_ot.subjects.memory import sent


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
    def oblique(
        cls, read: Float[Tensor, "*variants d r"], write: Float[Tensor, "*variants d r"], kind: str = "oblique"
    ) -> Frame:
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

    def coordinates(self, a: Float[Tensor, "*#batch d"]) -> Float[Tensor, "*#batch r"]:
        """Rᵀ a, or what the encoder makes of it."""
        if self.read is None:
            return a
        return a @ self.read if self.encoder is None else self.encoder.read(a, self.read, None)

    def lift(self, c: Float[Tensor, "*#batch r"]) -> Float[Tensor, "*#batch d"]:
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
            read=None if self.read is None else sent(self.read, device, dtype),
            write=None if self.write is None else sent(self.write, device, dtype),
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
