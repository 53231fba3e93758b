"""Effect signatures: how abstract and neural swaps change the outputs, pooled over the fit bank (Section 3.1)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from plot_ot.edits import Distinct, EditBatch, Gathered, resume_edited
from plot_ot.engine import Unit, run, shards
from plot_ot.errors import PlotError, unknown
from plot_ot.signatures.pooling import Abstract, Moments, Pooled, Sums, deal, jackknife, pooled, subsample
from plot_ot.signatures.readouts import Readout
from plot_ot.sites import SiteFamily
from plot_ot.subjects import BankRecording, Place, Subject

AGGREGATES = ("stack", "family_mean")
NORMALISATIONS = ("none", "unit", "unit_family")
FOLDS = 10
"""Parts the pairs are cut into for error bars, where an approximation asks for them."""


@dataclass(frozen=True)
class SignatureSpec:
    """How effects become one signature per variable and site, by name."""

    aggregate: str = "stack"
    """`stack`: all pairs' effects side by side (paper); `family_mean`: signed mean effect per family."""
    normalise: str = "none"
    """`none` (paper, HEQ), `unit`: length 1, `unit_family`: length 1 within every family."""
    centre: bool = False
    """Subtract the mean over features from every effect."""
    floor: float = 10.0
    """A site whose raw norm is below this multiple of the resume noise counts as dead."""
    hierarchical: bool = False
    """Keep families apart, to be pooled with weights (`Signatures.weighted`) that calibration chooses."""
    pairs: int | None = None
    """Measure on so many pairs only, drawn from every family in proportion; costs are scaled to the whole bank."""
    project: int | None = None
    """Look at so many random Gaussian projections of φ instead of φ itself."""
    folds: int | None = None
    """Error bars by leaving out one of so many folds of base inputs at a time; 0 is none. By default 10 where `pairs`
    or `project` approximate, else none."""
    seed: int = 0
    """The seed of the drawn pairs, projections and folds."""

    def __post_init__(self) -> None:
        if self.aggregate not in AGGREGATES:
            unknown("aggregation", self.aggregate, AGGREGATES)
        if self.normalise not in NORMALISATIONS:
            unknown("normalisation", self.normalise, NORMALISATIONS)
        for name in ("pairs", "project"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise PlotError(f"`{name}` must be at least 1 (or None for all); found {getattr(self, name)}.")
        if self.folds is not None and (self.folds < 0 or self.folds == 1):
            raise PlotError(f"Error bars need at least 2 folds (0 for none); found {self.folds}.")

    @property
    def parts(self) -> int:
        """How many folds there are; 0 without error bars."""
        return self.folds if self.folds is not None else FOLDS if self.pairs or self.project else 0


@dataclass(frozen=True)
class Agreement:
    """How well linearised costs agree with exact ones where both are known, per variable."""

    spearman: Mapping[str, float]
    overlap: Mapping[str, float]
    """Share of the `top` sites by exact cost that are also among the top by linearised cost."""
    top: int
    missed: Mapping[str, float] | None
    """Share of sites verified at random, not for their rank, that exact costs put among the verified top."""


@dataclass(frozen=True)
class Signatures:
    """Everything transport needs of u_1..u_m and v_1..v_n: their squared distances, norms and angles."""

    variables: tuple[str, ...]
    family: SiteFamily
    spec: SignatureSpec
    cost: Float[Tensor, "m n"]
    """The costs |u_i - v_j|² after normalisation."""
    cosine: Float[Tensor, "m n"]
    row_norms: Float[Tensor, " m"]
    column_norms: Float[Tensor, " n"]
    """Raw norms |v_j|, before any normalisation."""
    noise: float
    """Raw norm of what merely resuming, without an edit, seems to change."""
    pooled: Pooled | None = None
    """The inner products all this was made of."""
    exact: Bool[Tensor, " n"] | None = None
    """Sites measured by exact responses; the others are linearised. None: all are exact."""
    agreement: Agreement | None = None
    weights: Mapping[str, float] | None = None
    """The families' weights, where they are not equal."""

    @property
    def dead(self) -> list[int]:
        """Sites whose effect is not told from noise."""
        return (self.column_norms <= _floor(self.spec, self.noise, self.column_norms)).nonzero().squeeze(1).tolist()

    @property
    def replicates(self) -> list[list[Signatures]]:
        """The signatures without each fold of pairs in turn (and without each part of shared random projections)."""
        if self.pooled is None:
            return []
        parts = [[replace(self.pooled, whole=m, left_out=()) for m in some] for some in self.pooled.left_out]
        return [[measure(self.variables, self.family, self.spec, p) for p in some] for some in parts]

    @property
    def spread(self) -> Float[Tensor, "m n"] | None:
        """Standard errors of the costs, from the replicates; None where the spec asks for no folds."""
        variances = [jackknife([s.cost for s in some]) for some in self.replicates]
        return torch.stack(variances).sum(dim=0).sqrt() if variances else None

    def weighted(self, weights: Mapping[str, float], families: Sequence[str]) -> Signatures:
        """Hierarchical signatures: every family's block counts with its weight; equal weights of 1 change nothing."""
        if self.pooled is None or not self.spec.hierarchical:
            raise PlotError("Families were pooled while measuring; use SignatureSpec(hierarchical=True).")
        missing = [f for f in families if f not in weights]
        if missing or min(weights.values()) < 0 or not sum(weights.values()) > 0:
            raise PlotError(f"Every family ({', '.join(families)}) needs a weight of 0 or more; found {dict(weights)}.")
        w = torch.tensor([weights[f] for f in families][: len(self.pooled.whole.uu)], dtype=torch.float64)
        w = w * self.pooled.whole.present.sum() / w[self.pooled.whole.present].sum().clamp(min=1e-300)
        parts = tuple(tuple(m.weighted(w) for m in some) for some in self.pooled.left_out)
        pooled = Pooled(self.pooled.whole.weighted(w), parts, self.noise, w)
        found = measure(self.variables, self.family, self.spec, pooled)
        return replace(found, exact=self.exact, agreement=self.agreement, weights=dict(weights))


@dataclass(frozen=True)
class View:
    """How effects are looked at: φ, centred and projected as the spec says."""

    readout: Readout
    centre: bool
    projections: Float[Tensor, "draws p k"] | None

    def seen(self, features: Float[Tensor, "*batch p"], fold: int) -> Float[Tensor, "*batch k"]:
        """Centre and project features, or differences of them."""
        if self.centre and features.shape[-1] > 1:
            features = features - features.mean(dim=-1, keepdim=True)
        if self.projections is None:
            return features
        return features @ self.projections[min(fold, len(self.projections) - 1)].to(features)


class Collection:
    """What every way of measuring v shares: the pairs used, u, how effects are seen, and where they are summed."""

    def __init__(
        self,
        recording: BankRecording,
        family: SiteFamily,
        readout: Readout,
        spec: SignatureSpec | None,
        variables: Sequence[str] | None,
    ) -> None:
        self.family, self.spec = family, spec or SignatureSpec()
        self.variables = tuple(variables or recording.bank.variables)
        for name in self.variables:
            recording.bank.require(name)
        generator = torch.Generator().manual_seed(self.spec.seed)
        weight = torch.ones(len(recording))
        if self.spec.pairs is not None and self.spec.pairs < len(recording):
            chosen, weight = subsample(recording.bank.family, self.spec.pairs, generator)
            recording = recording.select(chosen)
        self.recording, bank = recording, recording.bank
        folds = deal(recording.base_rows, self.spec.parts, generator)
        means = self.spec.aggregate == "family_mean"
        self.view = View(
            readout, self.spec.centre, self._projections(readout, 1 if means else int(folds.max()) + 1, generator)
        )
        apart = means or self.spec.normalise == "unit_family" or self.spec.hierarchical
        families = bank.family if apart else torch.zeros_like(bank.family)
        self.side = Abstract.of(self._u(folds), families, folds, weight, means=means)
        self.sums = Sums(self.side, len(family))

    @property
    def _outputs(self) -> int:
        return self.recording.base_outputs.shape[-1]

    def _projections(
        self, readout: Readout, count: int, generator: torch.Generator
    ) -> Float[Tensor, "draws p k"] | None:
        """Gaussian projections that keep inner products on average: one per fold where effects are stacked, so that
        their error shows between folds; one for all where effects are averaged first."""
        if self.spec.project is None:
            return None
        features = readout.abstract(self.recording.bank.base_answer[:1], self._outputs).shape[-1]
        drawn: Tensor = torch.randn(count, features, self.spec.project, generator=generator)
        return drawn / math.sqrt(self.spec.project)

    def _u(self, folds: Int[Tensor, " pairs"]) -> Float[Tensor, "m pairs p"]:
        """The abstract effects of every pair."""
        bank, readout, pieces = self.recording.bank, self.view.readout, []
        order = folds.argsort(stable=True)
        for pairs in order.split(torch.bincount(folds).tolist()):
            base = readout.abstract(bank.base_answer[pairs], self._outputs)
            effects = [readout.abstract(bank.labels[v][pairs], self._outputs) - base for v in self.variables]
            pieces.append(self.view.seen(torch.stack(effects), int(folds[pairs[0]])))
        return torch.cat(pieces, dim=1)[:, order.argsort()]

    def gather(self, work: Callable[..., Sums], jobs: Sequence[tuple[Sequence[Place], Sequence[int]]]) -> None:
        """Let `work(recording, sites, side, view)` measure sites at places, by shards of pairs, and add up what it
        finds in plan order."""
        parts = shards(self.recording)
        frames = [{p.name: self.family.frames[p.name] for p in places} for places, _ in jobs]
        chosen = [
            SiteFamily(tuple(self.family.sites[j] for j in sites), own)
            for (_, sites), own in zip(jobs, frames, strict=True)
        ]
        units = [
            Unit(work, pairs, tuple(places), (some, self.side.select(pairs), self.view))
            for (places, _), some in zip(jobs, chosen, strict=True)
            for pairs in parts
        ]
        results: Iterator[Sums] = run(self.recording, units)
        for _, sites in jobs:
            noise = 0.0
            for found in islice(results, len(parts)):
                self.sums.take(sites, found)
                noise += found.noise
            self.sums.noise = max(self.sums.noise, noise)

    def finish(self) -> Signatures:
        """The signatures of all that was gathered."""
        shared = self.side.means and self.spec.parts > 0 and (self.spec.project or 0) > 1
        found = pooled(self.side, self.sums, shared=shared)
        silent = [n for n, u in zip(self.variables, found.whole.uu.sum(dim=0).tolist(), strict=True) if u == 0]
        if silent:
            raise PlotError(
                f"Swapping {', '.join(silent)} never changes the answer in the fit bank: its signature is zero. "
                f"Add fit pairs that change it."
            )
        return measure(self.variables, self.family, self.spec, found)


@torch.no_grad()
def measure_signatures(
    recording: BankRecording,
    family: SiteFamily,
    readout: Readout,
    spec: SignatureSpec | None = None,
    variables: Sequence[str] | None = None,
) -> Signatures:
    """u_i = Agg_t φ(𝔠(x^b; do(Z_i <- Z_i(x^s)))) - φ(𝔠(x^b)) and v_j = Agg_t φ(𝔑 swapped at s_j) - φ(𝔑(x^b)).

    Neural effects are differences to an unedited variant of the same resumed batch, so that numerical noise of
    resuming cancels. Pairs are streamed; only inner products are kept.
    """
    collection = Collection(recording, family, readout, spec, variables)
    collection.gather(_exact, family.together())
    return collection.finish()


@torch.no_grad()
def _exact(recording: BankRecording, family: SiteFamily, side: Abstract, view: View) -> Sums:
    """Effects of sites that share their places on some pairs, by one response each."""
    places, sums = list(family.sites[0].places), Sums(side, len(family))
    distinct = Distinct.of(recording, places)
    weight, u = side.pool(distinct)
    gathered = [Gathered(distinct.once, p) for p in places]
    size = recording.subject.responses_per_batch
    at_once = variants_at_once(recording.subject, len(family), len(distinct.once))
    cut = [some.tolist() for some in torch.arange(len(family)).split(at_once - 1)]
    edits = [(some, _one_by_one(family, some)) for some in cut]
    recorded = distinct.once.base_outputs.cpu()
    for fold, here in batches(_fold_of_class(side.folds, distinct), max(1, size // at_once)):
        for some, edit in edits:
            features = view.readout.neural(resume_edited(distinct.once, edit, here, gathered).cpu())
            v = view.seen(features[:-1] - features[-1:], fold)
            sums.add(fold, some, v, weight[here], u[:, :, here])
        resumed = features[-1] - view.readout.neural(recorded[here])
        sums.noise += side.noise(view.seen(resumed, fold), weight[here])
    return sums


def variants_at_once(subject: Subject, sites: int, classes: int) -> int:
    """How many variants one batch of responses has: a part of the sites, or all, and one that edits nothing."""
    return min(sites + 1, max(2, subject.responses_per_batch // classes))


def batches(folds: Int[Tensor, " classes"], size: int) -> Iterator[tuple[int, slice | Int[Tensor, " classes"]]]:
    """Classes in batches of at most `size`, each within one fold."""
    for fold in folds.unique().tolist():
        members = (folds == fold).nonzero().squeeze(1)
        whole = len(members) == len(folds)
        for at in range(0, len(members), size):
            yield fold, slice(at, min(at + size, len(members))) if whole else members[at : at + size]


def _one_by_one(family: SiteFamily, sites: Sequence[int]) -> list[EditBatch]:
    """Edits with one variant per site, and one that edits nothing."""
    some = SiteFamily(tuple(family.sites[j] for j in sites), family.frames)
    return [EditBatch(p, family.frames[p.name], F.pad(some.indicator(p), (0, 0, 0, 1))) for p in some.places]


def _fold_of_class(folds: Int[Tensor, " pairs"], distinct: Distinct) -> Int[Tensor, " classes"]:
    """The fold of every class: a class has one base input, so all its pairs are in one fold."""
    if distinct.of_pair is None:
        return folds
    return folds.new_zeros(len(distinct.once)).index_copy(0, distinct.of_pair, folds)


def measure(names: tuple[str, ...], family: SiteFamily, spec: SignatureSpec, pooled: Pooled) -> Signatures:
    """Costs and angles from inner products."""
    m: Moments = pooled.whole
    uv, uu, vv = m.uv.sum(dim=0), m.uu.sum(dim=0), m.vv.sum(dim=0)
    row_norms, column_norms = uu.sqrt(), vv.sqrt()
    floor = _floor(spec, pooled.noise, column_norms)
    cosine = uv / (row_norms.clamp(min=1e-12)[:, None] * column_norms.clamp(min=floor)[None])
    if spec.normalise == "none":
        cost = uu[:, None] + vv[None] - 2 * uv
    elif spec.normalise == "unit":
        cost = 2 - 2 * cosine  # a dead site has cosine 0: as far away as an unrelated one, not nearer
    else:
        # a family's weight scales its block after normalising: u·v/(|u||v|) does not see it
        w = m.present.double() if pooled.weights is None else pooled.weights * m.present
        norms = m.uu.sqrt().clamp(min=1e-12)[:, :, None] * m.vv.sqrt().clamp(min=floor)[:, None]
        cost = (w[:, None, None] * (2 - 2 * m.uv / norms)).sum(dim=0)
    return Signatures(names, family, spec, cost.clamp(min=0), cosine, row_norms, column_norms, pooled.noise, pooled)


def _floor(spec: SignatureSpec, noise: float, column_norms: Tensor) -> float:
    return max(spec.floor * noise, 1e-6 * float(column_norms.max()), 1e-12)
