"""Linearised signatures as a filter: exact responses only for the sites that could matter, within a stated budget."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain, zip_longest

import numpy as np
import torch
from jaxtyping import Bool, Float
from numpy import ndarray
from torch import Tensor

from plot_ot.errors import PlotError, PlotWarning
from plot_ot.signatures import Agreement, Readout, Signatures, SignatureSpec, measure, measure_signatures
from plot_ot.signatures.jacobian import coarse, jacobian_signatures
from plot_ot.sites import SiteFamily
from plot_ot.subjects import BankRecording
from plot_ot.transport import Coupling, Transport, couple

TOP = 20
"""Sites per variable that agreement is about."""


@dataclass(frozen=True)
class Prefilter:
    """Measure a large menu by linearisation, then its most promising sites exactly.

    Promising are, in turn for every variable, the sites of lowest linearised cost and of highest mass in the couplings
    made of these costs. Sites that take half a place or more cannot be linearised and are always verified. Menus of
    at most `few` sites are measured exactly as they are.
    """

    budget: float | int = 0.1
    """Exact responses (one pair under one site) that verification may use: a share of sites x pairs if a fraction, a
    number of responses if an integer."""
    few: int = 64
    audit: float = 0.1
    """Share of the budget for sites drawn at random from those the filter left out: what it may have missed."""

    def __post_init__(self) -> None:
        share = not isinstance(self.budget, int)
        if self.budget <= 0 or (share and self.budget > 1):
            raise PlotError(f"A budget is a share in (0, 1] or a whole number of responses; found {self.budget}.")
        if self.few < 0 or not 0 <= self.audit < 1:
            raise PlotError(f"`few` must be 0 or more and `audit` in [0, 1); found {self.few} and {self.audit}.")

    def __call__(
        self,
        recording: BankRecording,
        family: SiteFamily,
        readout: Readout,
        spec: SignatureSpec,
        variables: Sequence[str],
        transport: Transport,
        mask: Bool[ndarray, "m n"] | None = None,
    ) -> Signatures:
        """The menu's signatures: exact where verified (`Signatures.exact`), linearised elsewhere."""
        if len(family) <= self.few:
            return measure_signatures(recording, family, readout, spec, variables)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", PlotWarning)  # what it warns of is verified here
            linear = jacobian_signatures(recording, family, readout, spec, variables)
        count = self._affordable(len(family), min(spec.pairs or len(recording), len(recording)))
        must = coarse(family)
        if len(must) > count:
            raise PlotError(
                f"{len(must)} of {len(family)} sites swap half a place or more and need exact responses; the budget "
                f"allows {count}. Raise it to {len(must) / len(family):.2g}, or use exact signatures for this menu."
            )
        audited = min(int(self.audit * (count - len(must))), len(family) - count) if count < len(family) else 0
        kept = list(dict.fromkeys([*must, *_in_turn(_rankings(linear, transport, mask))]))[: count - audited]
        left = torch.tensor([j for j in range(len(family)) if j not in set(kept)], dtype=torch.long)
        generator = torch.Generator().manual_seed(spec.seed + 1)
        drawn = left[torch.randperm(len(left), generator=generator)[:audited]].tolist()
        verified = sorted([*kept, *drawn])
        some = SiteFamily(tuple(family.sites[j] for j in verified), family.frames)
        exact = measure_signatures(recording, some, readout, spec, variables)
        assert linear.pooled is not None  # noqa: S101
        assert exact.pooled is not None  # noqa: S101
        found = measure(linear.variables, family, spec, linear.pooled.with_columns(verified, exact.pooled))
        known = torch.zeros(len(family), dtype=torch.bool)
        known[verified] = True
        return replace(found, exact=known, agreement=agreement(linear.cost, exact.cost, verified, drawn, variables))

    def _affordable(self, sites: int, pairs: int) -> int:
        responses = self.budget if isinstance(self.budget, int) else self.budget * sites * pairs
        count = min(sites, int(responses / pairs + 1e-9))
        if count < 1:
            raise PlotError(
                f"A budget of {responses:g} responses does not verify one site on {pairs} pairs. Use at least {pairs}."
            )
        return count


def _rankings(linear: Signatures, transport: Transport, mask: Bool[ndarray, "m n"] | None) -> list[list[int]]:
    """For every variable, sites by rising cost, and by falling mass in every coupling."""
    couplings: list[Coupling] = couple(linear, transport, mask)
    by_cost = [
        [j for j in row.argsort(stable=True).tolist() if mask is None or mask[i, j]]
        for i, row in enumerate(linear.cost)
    ]
    return by_cost + [c.ranking(v) for c in couplings for v in linear.variables]


def _in_turn(rankings: Sequence[Sequence[int]]) -> list[int]:
    """Everyone's first, everyone's second, ..., each site once."""
    turns = chain.from_iterable(zip_longest(*rankings))
    return list(dict.fromkeys(j for j in turns if j is not None))


def agreement(
    linear: Float[Tensor, "m n"],
    exact: Float[Tensor, "m k"],
    verified: Sequence[int],
    drawn: Sequence[int],
    variables: Sequence[str],
) -> Agreement:
    """Linearised against exact costs on the verified sites, of which some were drawn at random."""
    top = min(TOP, max(1, len(verified) // 2))
    spearman, overlap, missed = {}, {}, {}
    at_random = torch.tensor([j in set(drawn) for j in verified])
    for i, v in enumerate(variables):
        approximate, true = linear[i, list(verified)], exact[i]
        spearman[v] = rank_correlation(approximate, true)
        best = set(true.argsort(stable=True)[:top].tolist())
        overlap[v] = len(best & set(approximate.argsort(stable=True)[:top].tolist())) / top
        if drawn:
            missed[v] = float(at_random[list(best)].sum()) / len(drawn)
    return Agreement(spearman, overlap, top, missed or None)


def rank_correlation(x: Float[Tensor, " n"], y: Float[Tensor, " n"]) -> float:
    """Spearman's ρ, ties sharing their mean rank; NaN where one of them is constant."""
    ranks = []
    for values in (x, y):
        _, code, count = np.unique(values.numpy(), return_inverse=True, return_counts=True)
        ranks.append((np.cumsum(count) - (count - 1) / 2)[code])
    a, b = (r - r.mean() for r in ranks)
    scale = float(np.sqrt((a * a).sum() * (b * b).sum()))
    return float((a * b).sum() / scale) if scale else float("nan")
