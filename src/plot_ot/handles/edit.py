"""One place's part of a handle: which directions of an activation to take from the source, and how much of each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

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
        self._refuse_encoder()
        if self.frame.read is None:
            return self.gains.detach().cpu().double().diag()
        read, write = self._factors()
        return write @ read.T

    def _refuse_encoder(self) -> None:
        if self.frame.encoder is not None:
            raise PlotError(
                f"The edit at {self.place.name} reads through a nonlinear encoder, so it is no matrix. Its parts are "
                f"`edit.frame.encoder`, `edit.frame.write` and `edit.gains`."
            )
    def _factors(self) -> tuple[Float[Tensor, "d r"], Float[Tensor, "d r"]]:
        """R and W g of M = (W g) Rᵀ, where the frame has directions."""
        assert self.frame.read is not None  # noqa: S101
        read = self.frame.read.detach().cpu().double()
        write = read if self.frame.write is None else self.frame.write.detach().cpu().double()
        return read, write * self.gains.detach().cpu().double()

    def singular_values(self) -> Float[Tensor, " r"]:
        """Those of M, the largest first: by how much a difference grows on its way into the state."""
        self._refuse_encoder()
        if self.frame.read is None:
            return self.gains.detach().cpu().double().abs().sort(descending=True).values
        read, write = (torch.linalg.qr(side)[1] for side in self._factors())
        values: Tensor = torch.linalg.svdvals(write @ read.T)
        return values

    def neurons(self, most: int = 5, *, side: Literal["read", "written"] = "written") -> list[tuple[int, float]]:
        """The neurons that weigh most in what is written (or read), each with its share of the sum of squares of M.

        A neuron's weight is its row of M, or its column; whichever basis the directions came from, M does not change.
        """
        self._refuse_encoder()
        if self.frame.read is None:
            squares = self.gains.detach().cpu().double().square()
        else:
            read, write = self._factors()
            one, other = (write, read) if side == "written" else (read, write)
            squares = ((one @ (other.T @ other)) * one).sum(dim=1).clamp(min=0)
        total = float(squares.sum())
        order = squares.argsort(descending=True, stable=True)[:most].tolist()
        return [(k, float(squares[k]) / total) for k in order if total > 0 and float(squares[k]) > 0]

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
        return f"{self.place.name}: {what}, {strength}{self._weighed()}"

    def _weighed(self) -> str:
        """What M is in numbers, and which neurons weigh most in it."""
        if self.frame.encoder is not None:
            return ""
        if self.frame.read is None:
            chosen = self.gains.detach().cpu().nonzero().squeeze(1).tolist()
            return "" if len(chosen) == self.place.width else f" (neuron{'s'[: len(chosen) > 1]} {_runs(chosen)})"
        values = self.singular_values()
        rank = int((values > 1e-6 * values[0]).sum())
        told = f"; rank {rank}, largest factor {float(values[0]):.3g}, norm {float(values.norm()):.3g}"
        sides: tuple[Literal["read", "written"], ...] = ("written",) if self.frame.write is None else ("read", "written")
        for side in sides:
            named = ", ".join(f"{k} ({share:.0%})" for k, share in self.neurons(side=side))
            told += f"; {'read and written' if len(sides) == 1 else side} most at neurons {named}"
        return told

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

        def edit(a: Float[Tensor, "rows d"]) -> Float[Tensor, "rows d"]:
            if len(source) not in (1, len(a)):
                raise PlotError(
                    f"The handle was opened with {len(source)} source rows, but the model is called with {len(a)}."
                )
            there = source.to(a.device)  # parts of a network may be on several devices
            gains = self.gains.to(there.device, there.dtype).unsqueeze(0)
            batch = EditBatch(self.place, self.frame.to(there.device, there.dtype), gains)
            return batch.apply(a.unsqueeze(0), there.expand(len(a), -1))[0]

        return edit

    def setting(self, target: Float[Tensor, " r"]) -> Callable[[Tensor], Tensor]:
        """Rewrites activations [..., d] towards fixed coordinates: a + W (g * (target - Rᵀ a))."""

        def edit(a: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
            frame, gains, wanted = self.frame.to(a.device, a.dtype), self.gains.to(a), target.to(a)
            return a + frame.lift(gains * (wanted - frame.coordinates(a)))

        return edit


def _runs(numbers: list[int], most: int = 6) -> str:
    """Rising numbers with runs written as such: 0-3, 7, 9-10."""
    runs: list[list[int]] = []
    for n in numbers:
        if runs and n == runs[-1][1] + 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    told = [str(a) if a == b else f"{a}-{b}" for a, b in runs[:most]]
    return ", ".join([*told, *(["..."] if len(runs) > most else [])])
