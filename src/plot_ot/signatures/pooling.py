"""Pooling effects: inner products of signatures, accumulated over pairs, with what error bars and weights need.

Pairs fall into *folds*, whole base inputs each. Whatever is made of the inner products can be made again without one
fold at a time; how much it then varies is its standard error (delete-a-group jackknife),

    spread² = (G-1)/G Σ_g (θ_g - θ̄)².
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from plot_ot.edits import Distinct
from plot_ot.errors import PlotError


@dataclass(frozen=True)
class Moments:
    """u·v, |u|² and |v|² by family: everything that costs are made of."""

    uv: Float[Tensor, "f m n"]
    uu: Float[Tensor, "f m"]
    vv: Float[Tensor, "f n"]
    present: Bool[Tensor, " f"]
    """The families that have at least one pair."""

    def weighted(self, weights: Float[Tensor, " f"]) -> Moments:
        """Every family's block of the signatures stretched by the root of its weight."""
        w = weights.to(self.uu)
        return replace(self, uv=w[:, None, None] * self.uv, uu=w[:, None] * self.uu, vv=w[:, None] * self.vv)

    def with_columns(self, at: Sequence[int], other: Moments) -> Moments:
        """The same moments with some sites replaced by another measurement of them."""
        uv, vv = self.uv.clone(), self.vv.clone()
        uv[:, :, at], vv[:, at] = other.uv, other.vv
        return replace(self, uv=uv, vv=vv)


@dataclass(frozen=True)
class Pooled:
    """The moments over all pairs, and without each part of the data in turn."""

    whole: Moments
    left_out: tuple[tuple[Moments, ...], ...] = ()
    """Per source of error (pairs, and random projections that all pairs share) one entry for every part left out."""
    noise: float = 0.0
    weights: Float[Tensor, " f"] | None = None
    """The families' weights, where they are not equal; the moments have them already."""

    def with_columns(self, at: Sequence[int], other: Pooled) -> Pooled:
        """The same moments with some sites replaced by another measurement of them, on the same folds."""
        parts = [
            tuple(a.with_columns(at, b) for a, b in zip(mine, theirs, strict=True))
            for mine, theirs in zip(self.left_out, other.left_out, strict=True)
        ]
        whole, noise = self.whole.with_columns(at, other.whole), max(self.noise, other.noise)
        return replace(self, whole=whole, left_out=tuple(parts), noise=noise)


def jackknife(left_out: Sequence[Float[Tensor, "*shape"]]) -> Float[Tensor, "*shape"]:
    """The variance of an estimate from what it is without each of G parts."""
    values = torch.stack(list(left_out))
    return (len(values) - 1) / len(values) * (values - values.mean(dim=0)).square().sum(dim=0)


@dataclass(frozen=True)
class Abstract:
    """The abstract side of some pairs: what their neural effects are multiplied with, and how they are pooled."""

    u: Float[Tensor, "m pairs p"]
    member: Float[Tensor, "pairs f"]
    """How many pairs of the bank each pair stands for, in the column of its own family."""
    folds: Int[Tensor, " pairs"]
    sizes: Float[Tensor, "g f"]
    """Pairs of every fold and family in the whole bank."""
    means: bool
    """Average effects within families and multiply at the end, instead of summing u·v over pairs."""

    @classmethod
    def of(
        cls,
        u: Float[Tensor, "m pairs p"],
        families: Int[Tensor, " pairs"],
        folds: Int[Tensor, " pairs"],
        weight: Float[Tensor, " pairs"],
        *,
        means: bool,
    ) -> Abstract:
        """The abstract side of all pairs that are used; `weight` says how many of the bank each stands for."""
        member = F.one_hot(families).double() * weight.double()[:, None]
        return cls(u.double(), member, folds, F.one_hot(folds).double().T @ member, means)

    def select(self, pairs: slice | Int[Tensor, " chosen"]) -> Abstract:
        """The abstract side of some of the pairs."""
        return replace(self, u=self.u[:, pairs], member=self.member[pairs], folds=self.folds[pairs])

    def pool(self, distinct: Distinct) -> tuple[Float[Tensor, "classes f"], Float[Tensor, "_ m classes p"]]:
        """Family weights and abstract effects summed over the pairs of each class, which share one neural effect."""
        if self.means:
            u = self.u.new_zeros(0, len(self.u), len(distinct.once), self.u.shape[2])
        elif self.member.shape[1] == 1 and bool((self.member == 1).all()):
            u = self.u.unsqueeze(0)
        else:
            u = torch.einsum("tf,mtp->fmtp", self.member, self.u)
        if distinct.of_pair is None:
            return self.member, u
        of_pair, classes = distinct.of_pair, len(distinct.once)
        weight = self.member.new_zeros(classes, self.member.shape[1]).index_add(0, of_pair, self.member)
        if not self.means:
            u = u.new_zeros(*u.shape[:2], classes, u.shape[3]).index_add(2, of_pair, u)
        return weight, u

    def noise(self, difference: Float[Tensor, "classes p"], weight: Float[Tensor, "classes f"]) -> float:
        """Pool squared differences of what should be equal, as effects are pooled."""
        if self.means:
            weight = weight / self.sizes.sum(dim=0).clamp(min=1)
        return float(weight.sum(dim=1) @ difference.cpu().double().square().flatten(1).sum(dim=1))


class Sums:
    """Neural effects of some sites, summed over pairs in float64: O(folds · families · m · n) numbers, for means
    O(folds · families · n · p). What workers hand back."""

    def __init__(self, side: Abstract, sites: int) -> None:
        (g, f), (m, _, p) = side.sizes.shape, side.u.shape
        self.means = side.means
        self.uv = side.u.new_zeros(g, f, m, 0 if self.means else sites)
        self.vv = side.u.new_zeros(g, f, 0 if self.means else sites)
        self.v = side.u.new_zeros(g, f, sites if self.means else 0, p)
        self.noise = 0.0
        """The squared norm of what resuming alone changes."""

    def add(
        self, fold: int, sites: Sequence[int], v: Float[Tensor, "k t p"], weight: Tensor, u: Float[Tensor, "f m t p"]
    ) -> None:
        """Add the effects of some sites on some classes of pairs of one fold."""
        v = v.double()
        if self.means:
            self.v[fold][:, sites] += torch.einsum("tf,ktp->fkp", weight, v)
            return
        self.uv[fold][:, :, sites] += u.flatten(2) @ v.flatten(1).T
        self.vv[fold][:, sites] += weight.T @ v.square().sum(dim=2).T

    def take(self, sites: Sequence[int], others: Sums) -> None:
        """Add the sums of another worker over other pairs; `sites` are the indices of its sites among ours."""
        if self.means:
            self.v[:, :, sites] += others.v
        else:
            self.uv[:, :, :, sites] += others.uv
            self.vv[:, :, sites] += others.vv


def pooled(side: Abstract, sums: Sums, *, shared: bool = False) -> Pooled:
    """The moments of what was summed, whole and without each fold.

    With `shared`, features are random projections that all pairs share: leaving some out shows their error.
    """
    moments = _Moments(side, sums)
    folds = len(side.sizes)
    parts = []
    if folds > 1:
        parts.append(tuple(moments(folds=torch.arange(folds) != g) for g in range(folds)))
    if shared:
        columns = torch.arange(side.u.shape[2]) % min(max(folds, 2), side.u.shape[2])
        parts.append(tuple(moments(columns=columns != g) for g in columns.unique()))
    return Pooled(moments(), tuple(parts), sums.noise**0.5)


class _Moments:
    """Moments of some of the folds, or of some of the features, scaled to all of them."""

    def __init__(self, side: Abstract, sums: Sums) -> None:
        self.sizes, self.sums = side.sizes, sums
        by_fold = F.one_hot(side.folds, len(side.sizes)).double()
        if sums.means:
            self.u = torch.einsum("tg,tf,mtp->gfmp", by_fold, side.member, side.u)
        else:
            self.uu = torch.einsum("tg,tf,mt->gfm", by_fold, side.member, side.u.square().sum(dim=2))

    def __call__(self, folds: Tensor | None = None, columns: Tensor | None = None) -> Moments:
        folds = torch.ones(len(self.sizes), dtype=torch.bool) if folds is None else folds
        count = self.sizes[folds].sum(dim=0)
        if self.sums.means:
            some = slice(None) if columns is None else columns
            stretch = 1.0 if columns is None else (len(columns) / float(columns.sum())) ** 0.5
            divided = stretch / count.clamp(min=1e-300)[:, None, None]
            u, v = (x[folds].sum(dim=0)[..., some] * divided for x in (self.u, self.sums.v))
            return Moments(u @ v.mT, u.square().sum(dim=-1), v.square().sum(dim=-1), count > 0)
        uv, uu, vv = (x[folds].sum(dim=0) for x in (self.sums.uv, self.uu, self.sums.vv))
        found = Moments(uv, uu, vv, count > 0)
        return found if bool(folds.all()) else found.weighted(self.sizes.sum(dim=0) / count.clamp(min=1e-300))


# -- which pairs, in which fold ---------------------------------------------------------------------------------------


def subsample(
    families: Int[Tensor, " pairs"], count: int, generator: torch.Generator
) -> tuple[Int[Tensor, " chosen"], Float[Tensor, " chosen"]]:
    """So many pairs at random, of every family in proportion (and at least one), with how many each stands for."""
    sizes = torch.bincount(families)
    present = int((sizes > 0).sum())
    if count < present:
        raise PlotError(f"{count} pairs cannot represent the bank's {present} families; use at least {present}.")
    if count >= len(families):
        return torch.arange(len(families)), torch.ones(len(families))
    exact = sizes.double() * count / len(families)
    quota = torch.where(sizes > 0, exact.floor().clamp(min=1), 0).long()
    while int(quota.sum()) > count:  # families of a fraction of a pair were rounded up: take it from the largest
        quota[quota.argmax()] -= 1
    short = (exact - quota).argsort(descending=True, stable=True)[: count - int(quota.sum())]
    quota[short] += 1
    order = torch.randperm(len(families), generator=generator)
    chosen = torch.cat([order[families[order] == f][:k] for f, k in enumerate(quota.tolist())]).sort().values
    return chosen, (sizes / quota.clamp(min=1))[families[chosen]]


def deal(bases: Int[Tensor, " pairs"], folds: int, generator: torch.Generator) -> Int[Tensor, " pairs"]:
    """The fold of every pair: distinct base inputs shuffled and dealt, so that folds share none; 0 is one fold."""
    if not folds:
        return torch.zeros(len(bases), dtype=torch.long)
    seen, code = torch.unique(bases.cpu(), return_inverse=True)
    if len(seen) < 2:
        raise PlotError("Error bars need pairs of at least two base inputs; set folds=0, or add base inputs.")
    return (torch.randperm(len(seen), generator=generator) % min(folds, len(seen)))[code]
