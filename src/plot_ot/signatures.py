"""Effect signatures: how abstract and neural swaps change the outputs, pooled over the fit bank (Section 3.1)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from plot_ot.edits import Distinct, EditBatch, Gathered, resume_edited
from plot_ot.errors import PlotError, unknown
from plot_ot.sites import SiteFamily
from plot_ot.subjects import BankRecording, Place


@dataclass(frozen=True)
class Readout:
    """How outputs are looked at: φ on both sides, and the answer an output gives.

    `neural` maps network outputs [..., c] to features [..., p]; `abstract` maps labels [rows, ...] to features
    [rows, p] in the same space (told c); `decide` maps outputs to labels; `loss` is what DAS minimises, per response.
    """

    name: str
    neural: Callable[[Tensor], Tensor]
    abstract: Callable[[Tensor, int], Tensor]
    decide: Callable[[Tensor], Tensor]
    loss: Callable[[Tensor, Tensor], Tensor]

    def correct(self, outputs: Float[Tensor, "variants pairs c"], labels: Tensor) -> Tensor:
        """Whether each response gives its pair's label: [variants, pairs] booleans."""
        answers = self.decide(outputs)
        if answers.ndim == 3 and labels.ndim == 1:  # one bit per pair
            labels = labels.unsqueeze(1)
        equal = answers == labels
        return equal if equal.ndim == 2 else equal.flatten(2).all(dim=2)


def _one_hot(labels: Tensor, classes: int) -> Tensor:
    if bool((labels.long() < 0).any() | (labels.long() >= classes).any()):
        raise PlotError(
            f"Labels must lie in 0..{classes - 1}, the network's outputs; found {labels.unique().tolist()}."
        )
    return F.one_hot(labels.long(), classes).float()


def _bits(labels: Tensor, width: int) -> Tensor:
    labels = labels.unsqueeze(1) if labels.ndim == 1 else labels
    if labels.flatten(1).shape[1] != width:
        raise PlotError(f"Labels have {labels.flatten(1).shape[1]} bits, the network {width} outputs.")
    return labels.flatten(1).float()


def _argmax(outputs: Tensor) -> Tensor:
    # torch.argmax over a short last dimension is many times slower than the comparison itself
    return outputs[..., 1] > outputs[..., 0] if outputs.shape[-1] == 2 else outputs.argmax(dim=-1)


def _cross_entropy(outputs: Tensor, labels: Tensor) -> Tensor:
    index = labels.long().expand(outputs.shape[:-1]).unsqueeze(-1)
    return outputs.logsumexp(dim=-1) - outputs.gather(-1, index).squeeze(-1)


def _bit_entropy(outputs: Tensor, labels: Tensor) -> Tensor:
    target = labels.to(outputs.dtype).expand_as(outputs)
    return F.binary_cross_entropy_with_logits(outputs, target, reduction="none").mean(dim=-1)


READOUTS: dict[str, Readout] = {
    "softmax": Readout("softmax", lambda y: y.softmax(dim=-1), _one_hot, _argmax, _cross_entropy),
    "logits": Readout("logits", lambda y: y, _one_hot, _argmax, _cross_entropy),
    "sigmoid": Readout("sigmoid", torch.sigmoid, _bits, lambda y: y >= 0, _bit_entropy),
}


def readout(name: str | Readout) -> Readout:
    """A readout by name (`softmax`, `logits`, `sigmoid`), or one of your own."""
    if isinstance(name, Readout):
        return name
    if name not in READOUTS:
        unknown("readout", name, READOUTS)
    return READOUTS[name]


AGGREGATES = ("stack", "family_mean")
NORMALISATIONS = ("none", "unit", "unit_family")


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

    def __post_init__(self) -> None:
        if self.aggregate not in AGGREGATES:
            unknown("aggregation", self.aggregate, AGGREGATES)
        if self.normalise not in NORMALISATIONS:
            unknown("normalisation", self.normalise, NORMALISATIONS)


@dataclass(frozen=True)
class Signatures:
    """Everything transport needs of u_1..u_m and v_1..v_n: their squared distances, norms and angles."""

    variables: tuple[str, ...]
    family: SiteFamily
    spec: SignatureSpec
    cost: Float[Tensor, "m n"]
    """|u_i - v_j|² after normalisation."""
    cosine: Float[Tensor, "m n"]
    row_norms: Float[Tensor, " m"]
    column_norms: Float[Tensor, " n"]
    """Raw norms |v_j|, before any normalisation."""
    noise: float
    """Raw norm of what merely resuming, without an edit, seems to change."""

    @property
    def dead(self) -> list[int]:
        """Sites whose effect is not told from noise."""
        return (self.column_norms <= _floor(self.spec, self.noise, self.column_norms)).nonzero().squeeze(1).tolist()


class _Gram:
    """Inner products of signatures, accumulated over pairs in float64: O(families · m · n) memory besides u itself.

    `stack` sums u·v over pairs; `family_mean` averages effects within families and multiplies at the end. Families are
    kept apart only where they matter.
    """

    def __init__(self, spec: SignatureSpec, u: Float[Tensor, "m pairs p"], n: int, families: Tensor) -> None:
        self.means = spec.aggregate == "family_mean"
        apart = self.means or spec.normalise == "unit_family"
        member = F.one_hot(families if apart else torch.zeros_like(families)).double()
        self.sizes = member.sum(dim=0)
        self.weight = member / self.sizes.clamp(min=1) if self.means else member
        self.noise = 0.0
        self.u = u.double()
        m, count = len(u), len(self.sizes)
        self.uv = torch.zeros(count, m, n, dtype=torch.float64)
        self.vv = torch.zeros(count, n, dtype=torch.float64)
        self.mean_v = torch.zeros(count, n, u.shape[-1], dtype=torch.float64) if self.means else None

    def pool(self, distinct: Distinct) -> tuple[Float[Tensor, "classes f"], Float[Tensor, "f m classes p"]]:
        """Family weights and abstract effects summed over the pairs of each class, which share one neural effect."""
        of_pair = torch.arange(len(self.weight)) if distinct.of_pair is None else distinct.of_pair.cpu()
        weight = self.weight.new_zeros(len(distinct.once), len(self.sizes)).index_add(0, of_pair, self.weight)
        if self.means:
            return weight, self.u.new_zeros(0)
        u = torch.einsum("tf,mtp->fmtp", self.weight, self.u) if len(self.sizes) > 1 else self.u.unsqueeze(0)
        shape = *u.shape[:2], len(weight), u.shape[3]
        return weight, u if distinct.of_pair is None else u.new_zeros(shape).index_add(2, of_pair, u)

    def add(self, sites: list[int], v: Float[Tensor, "k t p"], weight: Tensor, u: Float[Tensor, "f m t p"]) -> None:
        """Effects of some sites on some classes of pairs."""
        v = v.double()
        if self.mean_v is not None:
            self.mean_v[:, sites] += torch.einsum("tf,ktp->fkp", weight, v)
            return
        self.uv[:, :, sites] += u.flatten(2) @ v.flatten(1).T
        self.vv[:, sites] += weight.T @ v.square().sum(dim=2).T

    def finish(self) -> tuple[Tensor, Tensor, Tensor]:
        """(u·v, |u|², |v|²) per family."""
        if self.mean_v is not None:
            u, v = torch.einsum("tf,mtp->fmp", self.weight, self.u), self.mean_v
            return u @ v.mT, u.square().sum(dim=-1), v.square().sum(dim=-1)
        return self.uv, torch.einsum("mt,tf->fm", self.u.square().sum(dim=2), self.weight), self.vv


@torch.no_grad()
def signatures(
    recording: BankRecording,
    family: SiteFamily,
    look: Readout,
    spec: SignatureSpec | None = None,
    variables: Sequence[str] | None = None,
) -> Signatures:
    """u_i = Agg_t φ(𝔠(x^b; do(Z_i <- Z_i(x^s)))) - φ(𝔠(x^b)) and v_j = Agg_t φ(𝔑 swapped at s_j) - φ(𝔑(x^b)).

    Neural effects are differences to an unedited variant of the same resumed batch, so that numerical noise of
    resuming cancels. Pairs are streamed; only inner products are kept.
    """
    spec = spec or SignatureSpec()
    bank = recording.bank
    names = tuple(variables or bank.variables)
    for name in names:
        bank.require(name)
    classes = recording.store.outputs.shape[-1]
    base_features = look.abstract(bank.base_answer, classes)
    effects = torch.stack([look.abstract(bank.labels[v], classes) - base_features for v in names])
    if spec.centre:
        effects = effects - effects.mean(dim=-1, keepdim=True)
    gram = _Gram(spec, effects, len(family), bank.family)
    size = recording.subject.responses_per_batch
    for places, sites in family.together():
        distinct = Distinct.of(recording, places)
        weight, u = gram.pool(distinct)
        gathered = [Gathered(distinct.once, p) for p in places]
        at_once = min(len(sites) + 1, max(2, size // len(distinct.once)))
        classes_at_once = max(1, size // at_once)
        members = {p.name: family.indicator(p)[sites] for p in places}
        noise = 0.0
        for at in range(0, len(distinct.once), classes_at_once):
            here = slice(at, min(at + classes_at_once, len(distinct.once)))
            for k in range(0, len(sites), at_once - 1):
                edits = [
                    EditBatch(p, family.frames[p.name], F.pad(members[p.name][k : k + at_once - 1], (0, 0, 0, 1)))
                    for p in places
                ]  # the last variant edits nothing
                features = look.neural(resume_edited(distinct.once, edits, here, gathered))
                _refuse_non_finite(features, places[0], distinct, at)
                v = (features[:-1] - features[-1:]).cpu()
                if spec.centre:
                    v = v - v.mean(dim=-1, keepdim=True)
                gram.add(sites[k : k + at_once - 1], v, weight[here], u[:, :, here] if len(u) else u)
            recorded = look.neural(distinct.once.base_outputs[here])
            squares = (features[-1] - recorded).cpu().double().pow(2).flatten(1).sum(dim=1)
            noise += float((weight[here].sum(dim=1) * squares).sum())
        gram.noise = max(gram.noise, noise**0.5)
    return _measure(names, family, spec, gram)


def _measure(names: tuple[str, ...], family: SiteFamily, spec: SignatureSpec, gram: _Gram) -> Signatures:
    uv, uu, vv = gram.finish()
    row_norms, column_norms = uu.sum(dim=0).sqrt(), vv.sum(dim=0).sqrt()
    silent = [n for n, norm in zip(names, row_norms.tolist(), strict=True) if norm == 0]
    if silent:
        raise PlotError(
            f"Swapping {', '.join(silent)} never changes the answer in the fit bank: its signature is zero. "
            f"Add fit pairs that change it."
        )
    floor = _floor(spec, gram.noise, column_norms)
    cosine = uv.sum(dim=0) / (row_norms[:, None] * column_norms.clamp(min=floor)[None])
    if spec.normalise == "none":
        cost = uu.sum(dim=0)[:, None] + vv.sum(dim=0)[None] - 2 * uv.sum(dim=0)
    elif spec.normalise == "unit":
        cost = 2 - 2 * cosine  # a dead site has cosine 0: as far away as an unrelated one, not nearer
    else:
        present = gram.sizes > 0
        norms = uu[present].sqrt().clamp(min=1e-12)[:, :, None] * vv[present].sqrt().clamp(min=floor)[:, None]
        cost = (2 - 2 * uv[present] / norms).sum(dim=0)
    return Signatures(names, family, spec, cost.clamp(min=0), cosine, row_norms, column_norms, gram.noise)


def _floor(spec: SignatureSpec, noise: float, column_norms: Tensor) -> float:
    return max(spec.floor * noise, 1e-6 * float(column_norms.max()), 1e-12)


def _refuse_non_finite(features: Tensor, place: Place, distinct: Distinct, at: int) -> None:
    if not bool(torch.isfinite(features).all()):
        bad = (~torch.isfinite(features)).flatten(2).any(dim=2).nonzero()[0]
        pair = distinct.first_pair(int(bad[1]) + at)
        raise PlotError(
            f"A swap at {place.name} gives NaN or infinity (pair {pair} of the fit bank): "
            f"the network overflows there. Use float32, or drop that place."
        )
