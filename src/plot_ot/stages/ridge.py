"""Ridge regressions on the differences between states: one factorization for all variables, targets and ridges.

With D = U s Vᵀ, the rows a_s - a_b of some pairs, and a target T for each pair, the map

    M = argmin_M  Σ_pairs | M D_p - T_p |²  +  ρ |M|²   =   Tᵀ U diag(s / (s² + ρ)) Vᵀ

is a product of small factors: few pairs span few of a wide state's directions, and few distinct targets span fewer
still. So its singular vectors are those of a matrix [distinct targets, pairs], never of one [d, d].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from plot_ot.errors import PlotError


@dataclass(frozen=True)
class Differences:
    """D = U s Vᵀ of some pairs at a place."""

    left: Float[Tensor, "pairs r"]
    scales: Float[Tensor, " r"]
    right: Float[Tensor, "d r"]

    @classmethod
    def of(cls, rows: Float[Tensor, "pairs d"]) -> Differences:
        """Factorize the rows a_s - a_b."""
        left, scales, right = torch.linalg.svd(rows, full_matrices=False)
        return cls(left, scales, right.mT)

    @property
    def variance(self) -> float:
        """The mean over the state's coordinates of Σ_pairs D²."""
        return float(self.scales.square().sum()) / len(self.right)

    def regression(self, target: Float[Tensor, "pairs d"]) -> Regression:
        """The regressions of a target on D, for any ridge."""
        if not self.variance > 0:
            raise PlotError("Base and source states are all equal at this place: there is nothing to regress on.")
        distinct, of_pair = torch.unique(target, dim=0, return_inverse=True)
        basis = torch.linalg.qr(distinct.mT)
        summed = self.left.new_zeros(len(distinct), self.left.shape[1]).index_add(0, of_pair, self.left)
        return Regression(self, basis.Q, basis.R @ summed)

    def contrast(self, among: Bool[Tensor, " pairs"], most: int) -> Float[Tensor, "d most"]:
        """The leading eigenvectors of E[δδᵀ | among] - E[δδᵀ | not among], at most as many as D has directions."""
        inside, outside = self.left[among], self.left[~among]
        contrast = inside.mT @ inside / len(inside) - outside.mT @ outside / len(outside)
        vectors: Tensor = torch.linalg.eigh(self.scales[:, None] * contrast * self.scales)[1]
        return self.right @ vectors.flip(1)[:, :most]


@dataclass(frozen=True)
class Regression:
    """Regressions of one target on differences: M = basis · inner · diag(s / (s² + ρ)) · Vᵀ."""

    differences: Differences
    basis: Float[Tensor, "d k"]
    inner: Float[Tensor, "k r"]

    def factors(self, ridge: float, least: float) -> tuple[Float[Tensor, "d m"], Float[Tensor, "d m"]] | None:
        """(read, write) with M = write · readᵀ, by singular values from `least` of the largest on; None where M = 0.

        The ridge ρ is in units of the mean variance of D.
        """
        s = self.differences.scales
        u, scales, vt = torch.linalg.svd(
            self.inner * (s / (s.square() + ridge * self.differences.variance)), full_matrices=False
        )
        if not scales[0] > 0:
            return None
        rank = int((scales > least * scales[0]).sum())
        return self.differences.right @ vt[:rank].mT, self.basis @ (u[:, :rank] * scales[:rank])


class Factorized:
    """A place's differences, factorized once for every set of pairs that is asked for."""

    def __init__(self, rows: Float[Tensor, "pairs d"]) -> None:
        self.rows = rows
        self._made: dict[bytes, Differences] = {}

    def of(self, pairs: Int[Tensor, " some"] | Sequence[int]) -> Differences:
        """The differences of some pairs."""
        some = torch.as_tensor(pairs)
        key = some.numpy().tobytes()
        if key not in self._made:
            self._made[key] = Differences.of(self.rows[some])
        return self._made[key]

    @property
    def whole(self) -> Differences:
        """The differences of all pairs."""
        return self.of(torch.arange(len(self.rows)))
