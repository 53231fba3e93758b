"""One place's part of a handle: which directions of an activation to take from the source, and how much of each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from plot_ot.edits import EditBatch, Frame
from plot_ot.errors import PlotError
from plot_ot.subjects import Place


@dataclass(frozen=True)
class Edit:
    """One place's part of a handle: directions and how much of each to take from the source."""

    place: Place
    frame: Frame
    gains: Float[Tensor, " r"]

    @property
    def size(self) -> int:
        """How many directions it touches."""
        return int((self.gains != 0).sum())

    def matrix(self) -> Float[Tensor, "d d"]:
        """M of the edit a <- a + M (a_source - a): what is read, weighed and written, multiplied out in float64.

        A swap of directions is a projection; M of a soft handle has its strengths as eigenvalues.
        """
        if self.frame.encoder is not None:
            raise PlotError(
                f"The edit at {self.place.name} reads through a nonlinear encoder, so it is not a matrix. Its parts "
                f"are `edit.frame.encoder`, `edit.frame.write` and `edit.gains`."
            )
        gains = self.gains.detach().cpu().double()
        if self.frame.read is None:
            return gains.diag()
        read = self.frame.read.detach().cpu().double()
        write = read if self.frame.write is None else self.frame.write.detach().cpu().double()
        return (write * gains) @ read.T

    def describe(self) -> str:
        """The edit in words: where it is, what its directions are, and how strongly they are taken."""
        directions = "neuron" if self.frame.read is None else "direction"
        if self.size == self.place.width and self.frame.read is None:
            what = f"all {self.size} neurons"
        else:
            what = f"{self.size} {directions}{'' if self.size == 1 else 's'} of {self.place.width}"
        if self.frame.encoder is not None:
            what = f"{self.size} feature{'' if self.size == 1 else 's'} of a sparse autoencoder"
        elif self.frame.read is not None:
            what += f" ({self.frame.kind}{', oblique' if self.frame.write is not None else ''})"
        used = self.gains.detach().cpu()[self.gains.detach().cpu() != 0]
        if not len(used):
            return f"{self.place.name}: nothing is taken"
        low, high = float(used.min()), float(used.max())
        strength = f"strength {low:.4g}" if high - low < 1e-6 else f"strengths {low:.4g} to {high:.4g}"
        return f"{self.place.name}: {what}, {strength}"

    @classmethod
    def at_every_token(cls, place: Place, frame: Frame, gains: Float[Tensor, " r"]) -> Edit:
        """The edit of one token's vector, made at each token of a place at all tokens (`...@all`)."""
        tokens, left = divmod(place.width, frame.width)
        if left or frame.encoder is not None:
            what = f"of width {frame.width}" if left else "with an encoder"
            raise PlotError(f"A frame {what} cannot be repeated over {place.name} of width {place.width}.")
        read, write = (None if t is None else torch.block_diag(*[t] * tokens) for t in (frame.read, frame.write))
        return cls(place, Frame(place.width, read, write, frame.kind), gains.repeat(tokens))

    def swapping(self, source: Float[Tensor, "rows d"]) -> Callable[[Tensor], Tensor]:
        """Rewrites activations [rows, d] towards those of the sources, row by row (or of one source)."""
        gains = self.gains.to(source.device, source.dtype).unsqueeze(0)
        batch = EditBatch(self.place, self.frame.to(source.device, source.dtype), gains)

        def edit(a: Float[Tensor, "rows d"]) -> Float[Tensor, "rows d"]:
            if len(source) not in (1, len(a)):
                raise PlotError(
                    f"The handle was opened with {len(source)} source rows, but the model is called with {len(a)}."
                )
            return batch.apply(a.unsqueeze(0), source.expand(len(a), -1))[0]

        return edit

    def setting(self, target: Float[Tensor, " r"]) -> Callable[[Tensor], Tensor]:
        """Rewrites activations [..., d] towards fixed coordinates: a + W (g * (target - Rᵀ a))."""

        def edit(a: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
            frame, gains, wanted = self.frame.to(a.device, a.dtype), self.gains.to(a), target.to(a)
            return a + frame.lift(gains * (wanted - frame.coordinates(a)))

        return edit
