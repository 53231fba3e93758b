"""Linear maps of an edit as two factors, their length in natural units, and coordinates in which a prior is |N|²."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True)
class Map:
    """M = W Rᵀ, as its two factors."""

    write: Float[Tensor, "d m"]
    read: Float[Tensor, "d m"]

    def of(self, difference: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
        """M D for every pair, in the precision of D."""
        return (difference @ self.read.to(difference)) @ self.write.to(difference).T


@dataclass(frozen=True)
class Metric:
    """Cholesky factors of Σ, the covariance of natural states, and of G, the second moment of differences."""

    natural: Float[Tensor, "d d"]
    differences: Float[Tensor, "d d"]

    def factored(self, m: Map, least: float) -> Map:
        """A map by singular values, the largest first, without those below `least` of the largest.

        Length is measured where it counts: what goes in in units of the differences, what comes out in natural units.
        """
        out = torch.linalg.qr(torch.linalg.solve_triangular(self.natural, m.write, upper=False))
        into = torch.linalg.qr(self.differences.T @ m.read)
        u, s, vt = torch.linalg.svd(out.R @ into.R.T)
        rank = max(1, int((s > least * s[0]).sum()))
        write = self.natural @ (out.Q @ (u[:, :rank] * s[:rank]))
        read = torch.linalg.solve_triangular(self.differences.T, into.Q @ vt[:rank].T, upper=True)
        return Map(write, read)


@dataclass(frozen=True)
class Whitened:
    """M = M₀ + A N Bᵀ: the coordinates in which the prior of a map is |N|².

    Any root of a matrix will do, since |N|² does not change when N is turned.
    """

    start: Map
    write: Float[Tensor, "d p"]
    """A, with Aᵀ Σ⁻¹ A = I."""
    read: Float[Tensor, "d q"]
    """B, with Bᵀ G B = I."""

    @classmethod
    def of(cls, start: Map, metric: Metric, basis: Float[Tensor, "d r"] | None = None) -> Whitened:
        """Around `start`; with an orthonormal `basis`, N mixes only these directions, both ways."""
        eye = torch.eye(len(metric.natural), dtype=metric.natural.dtype)
        if basis is None:
            return cls(start, metric.natural, torch.linalg.solve_triangular(metric.differences.T, eye, upper=True))
        small = torch.linalg.solve_triangular(metric.natural, basis, upper=False)
        precision = torch.linalg.cholesky(small.T @ small)
        moment = torch.linalg.cholesky((metric.differences.T @ basis).T @ (metric.differences.T @ basis))
        within = eye[: basis.shape[1], : basis.shape[1]]
        return cls(
            start,
            basis @ torch.linalg.solve_triangular(precision.T, within, upper=True),
            basis @ torch.linalg.solve_triangular(moment.T, within, upper=True),
        )

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of N."""
        return self.write.shape[1], self.read.shape[1]

    def map(self, n: Float[Tensor, "p q"]) -> Map:
        """M."""
        return Map(torch.cat([self.start.write, self.write @ n], dim=1), torch.cat([self.start.read, self.read], dim=1))
