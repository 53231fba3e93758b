"""Calibration: choose the top-K support and the strength λ of a handle on the calibration bank (Appendix A.1)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import islice
from typing import TypeVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from plot_ot.edits import EditBatch, Frame, stream
from plot_ot.engine import Unit, run, shards
from plot_ot.errors import PlotError, unknown
from plot_ot.handles import Handle, handle_from_edits
from plot_ot.signatures import Readout
from plot_ot.sites import SiteFamily
from plot_ot.stages.problem import Calibration, Candidate, best_by
from plot_ot.subjects import BankRecording, Place
from plot_ot.subjects.memory import sent
from plot_ot.transport import Coupling

SCORES = ("paper", "balanced", "sensitive")
TIES = ("smallest", "loss", "natural")
COARSE_SIZES, COARSE_STRENGTHS, FOLLOWED = 5, 6, 4
"""Of a coarse grid: how many K and λ it has at most; around the best points of how many candidates it is refined."""


@dataclass(frozen=True)
class Search:
    """The (K, λ) grid, and the name of the score that picks from it."""

    sizes: tuple[int, ...]
    strengths: tuple[float, ...]
    score: str = "balanced"
    """`paper`: accuracy over the bank as drawn; `balanced`: half sensitivity, half invariance; `sensitive`: only pairs
    that change the variable."""
    ties: str = "smallest"
    """Between equal scores: `smallest` K, then λ (paper); the lowest `loss` on the same pairs; or the most `natural`:
    of the smallest K, the lowest loss among swaps that stop at the source's value, the weakest where all go beyond."""

    def __post_init__(self) -> None:
        if self.score not in SCORES:
            unknown("calibration score", self.score, SCORES)
        if self.ties not in TIES:
            unknown("tie rule", self.ties, TIES)
        if not self.sizes or min(self.sizes) < 1 or not self.strengths:
            raise PlotError(f"The search needs K >= 1 and some λ; found K {self.sizes}, λ {self.strengths}.")
        if list(self.sizes) != sorted(set(self.sizes)):
            raise PlotError(f"The K grid must rise without repetitions; found {self.sizes}.")

    def coarse(self) -> Search:
        """A grid of a few of its sizes and strengths, the ends among them."""
        positive = min(self.strengths) > 0
        strengths = _spread(sorted(self.strengths), COARSE_STRENGTHS) if positive else self.strengths
        return replace(self, sizes=_spread(self.sizes, COARSE_SIZES), strengths=strengths)


def calibrate(
    recording: BankRecording,
    candidates: Sequence[Candidate],
    variable: str,
    search: Search,
    readout: Readout,
    lean: bool = False,
) -> Calibration:
    """The best (candidate, K, λ) for one variable, all grid points in batches.

    `lean` finds the same one, and leaves scores out that cannot be the best (minus infinity on its surface).
    """
    recording.bank.require(variable)
    if not candidates:
        raise PlotError(f"There is no coupling to calibrate for '{variable}'.")
    weights = pair_weights(recording, variable, search.score)
    variants = [_grid_weights(c, variable, search) for c in candidates]
    measured = _where_best if lean else _surface
    surface = measured(recording, candidates, variants, variable, weights, readout, search)
    best = float(surface.max())
    tied = [(c, k, s) for c, k, s in (surface >= best - 1e-9).nonzero().tolist()]
    if search.ties == "natural":
        tied = _most_natural(tied, variants, len(search.strengths))
    if search.ties != "smallest" and len(tied) > 1:
        tied = _lowest_loss(recording, candidates, variants, tied, variable, weights, search, readout)
    at, k, s = min(tied, key=lambda t: (search.sizes[t[1]], search.strengths[t[2]], t[0]))
    chosen, size = candidates[at], min(search.sizes[k], len(candidates[at].family))
    described = {
        "K": size,
        "strength": search.strengths[s],
        "epsilon": chosen.coupling.epsilon,
        "beta": chosen.coupling.beta,
        "transport": chosen.coupling.kind,
        "support": chosen.label,
        "sites": [chosen.family.sites[j].name for j in chosen.coupling.ranking(variable)[:size]],
        "tied_at_K": chosen.coupling.tied_at(variable, size),
        "by_support": best_by([c.label for c in candidates], surface.flatten(1).max(dim=1).values.tolist()),
        "by_size": _by_size(candidates, variable, search.sizes, surface),
        "calibration_score": best,
        "at_edge": at_edge(search, k, s, len(chosen.family)),
    }
    one = variants[at][k * len(search.strengths) + s].unsqueeze(0)
    handle = handle_from_edits(variable, chosen.family.edits(one), 0, recording.subject, described)
    return Calibration(handle, best, search.sizes, search.strengths, surface, at)


def calibrate_coarsely(
    recording: BankRecording, candidates: Sequence[Candidate], variable: str, search: Search, readout: Readout
) -> Calibration:
    """The best (candidate, K, λ), looked for in two rounds: a coarse grid, then the whole grid around its best points.

    For controls, which search many times: it finds what the whole grid would (docs/trust.md) for a few of its runs.
    """
    coarse = search.coarse()
    first = calibrate(recording, candidates, variable, coarse, readout)
    reached = first.surface.flatten(1).max(dim=1)
    best = first
    for at in reached.values.argsort(descending=True, stable=True)[:FOLLOWED].tolist():
        k, s = divmod(int(reached.indices[at]), len(coarse.strengths))
        around = replace(
            search,
            sizes=_between(search.sizes, coarse.sizes, k),
            strengths=_between(search.strengths, coarse.strengths, s),
        )
        found = calibrate(recording, [candidates[at]], variable, around, readout)
        best = found if found.score > best.score + 1e-9 else best
    return replace(first, handle=best.handle, score=best.score)


Number = TypeVar("Number", int, float)


def _spread(values: Sequence[Number], count: int) -> tuple[Number, ...]:
    """So many of some rising positive values, the ends among them, in about equal ratios."""
    if len(values) <= count:
        return tuple(values)
    ratio = values[-1] / values[0]
    targets = [values[0] * ratio ** (k / (count - 1)) for k in range(count)]
    return tuple(sorted({min(values, key=lambda x: abs(math.log(x / target))) for target in targets}))


def _between(values: Sequence[Number], some: Sequence[Number], at: int) -> tuple[Number, ...]:
    """The values from the neighbour below of one of some to the neighbour above."""
    low, high = some[max(at - 1, 0)], some[min(at + 1, len(some) - 1)]
    return tuple(x for x in values if low <= x <= high)


def at_edge(search: Search, size: int, strength: int, sites: int) -> list[str]:
    """Which choices lie at the end of their grid, in words: a better one may lie beyond."""
    said = edge_of(search.strengths, strength)
    if len(search.sizes) > 1 and size == len(search.sizes) - 1 and search.sizes[size] < sites:
        said.append(f"its {search.sizes[size]} sites are the most that were tried")
    return said


def edge_of(strengths: Sequence[float], chosen: int) -> list[str]:
    """Whether a strength is the largest or smallest of its grid, in words; a strength of 1 is never remarkable."""
    if len(strengths) == 1 or strengths[chosen] == 1 or min(strengths) < strengths[chosen] < max(strengths):
        return []
    end = "largest" if strengths[chosen] == max(strengths) else "smallest"
    return [f"its strength {strengths[chosen]:g} is the {end} that was tried"]


def _by_size(candidates: Sequence[Candidate], variable: str, tops: Sequence[int], surface: Tensor) -> dict[str, float]:
    """The best score of the handles with each number of directions."""
    counts, scores = list[str](), list[float]()
    for c, reached in zip(candidates, surface.max(dim=2).values.tolist(), strict=True):
        sizes, seen = list[int](), set[tuple[str, int]]()
        for j in c.coupling.ranking(variable)[: max(tops)]:
            seen.update((place.name, d) for place, directions in c.family.sites[j].parts for d in directions)
            sizes.append(len(seen))
        counts += [str(sizes[min(k, len(sizes)) - 1]) for k in tops]
        scores += reached
    return best_by(counts, scores)


def _grid_weights(c: Candidate, variable: str, search: Search) -> Float[Tensor, "settings sites"]:
    """λ Π̃_{j|i} for every (K, λ) of the grid."""
    ranked = c.coupling.ranking(variable)
    tops = torch.stack([_top_weights(c.coupling, variable, ranked[: min(k, len(c.family))]) for k in search.sizes])
    strengths = torch.tensor(search.strengths, dtype=tops.dtype)
    return (tops[:, None, :] * strengths[None, :, None]).flatten(0, 1)


def _surface(
    recording: BankRecording,
    candidates: Sequence[Candidate],
    variants: Sequence[Tensor],
    variable: str,
    weights: Tensor,
    readout: Readout,
    search: Search,
) -> Float[Tensor, "candidates sizes strengths"]:
    """Scores of every candidate's grid; sizes beyond its number of sites repeat the largest."""
    distinct = [len({min(k, len(c.family)) for k in search.sizes}) for c in candidates]
    tries = [
        c.family.edits(v[: n * len(search.strengths)]) for c, v, n in zip(candidates, variants, distinct, strict=True)
    ]
    grids = []
    for n, scores in zip(distinct, scored_all(recording, tries, variable, weights, readout), strict=True):
        grid = scores.unflatten(0, (n, len(search.strengths)))
        grids.append(torch.cat([grid, grid[-1:].expand(len(search.sizes) - n, -1)]))
    return torch.stack(grids)


def _where_best(
    recording: BankRecording,
    candidates: Sequence[Candidate],
    variants: Sequence[Tensor],
    variable: str,
    weights: Tensor,
    readout: Readout,
    search: Search,
) -> Float[Tensor, "candidates sizes strengths"]:
    """The surface where it may be highest: pairs that change the variable come first, then the likely winners.

    A grid point can gain no more than the weight of the other pairs. Of equal scores the smallest K wins, unless
    losses tell: larger ones are left out as soon as they could be no more than equal.
    """
    changed = recording.bank.changed[variable]
    first, rest = changed.nonzero()[:, 0], (~changed).nonzero()[:, 0]

    def reached(pairs: Tensor, members: Bool[Tensor, "candidates points"]) -> Tensor:
        """The part of the score that these pairs give to some grid points."""
        found, used = torch.zeros(members.shape, dtype=torch.float64), members.any(dim=1).nonzero()[:, 0].tolist()
        tries = [candidates[c].family.edits(variants[c][members[c]]) for c in used]
        for c, scores in zip(
            used, scored_all(recording.select(pairs), tries, variable, weights[pairs], readout), strict=True
        ):
            found[c, members[c]] = scores
        return found

    points = len(search.sizes) * len(search.strengths)
    size = (torch.arange(points) // len(search.strengths)).expand(len(candidates), -1)
    sites = torch.tensor([len(c.family) for c in candidates])[:, None]
    distinct = size == 0  # sizes beyond the number of sites repeat the largest
    distinct = distinct | (torch.tensor(search.sizes)[size - 1] < sites)
    score = torch.full(size.shape, -math.inf, dtype=torch.float64)
    highest = torch.where(distinct, reached(first, distinct) + float(weights[rest].sum()), -math.inf)
    left = distinct.clone()
    while bool(left.any()):
        best = float(score.max())
        told_by_loss = search.ties == "loss" or best == -math.inf
        smallest = len(search.sizes) if told_by_loss else int(size[score >= best - 1e-9].min())
        left &= (highest > best + 1e-9) | ((highest >= best - 1e-9) & (size <= smallest))
        if not bool(left.any()):
            break
        now = left & (highest >= highest[left].max() - 1e-9)
        now &= size == size[now].min()
        gained = reached(rest, now) if len(rest) else torch.zeros_like(score)
        score[now] = (highest - float(weights[rest].sum()) + gained)[now]
        left &= ~now
    surface: Tensor = score.unflatten(1, (len(search.sizes), len(search.strengths)))
    return surface


def _most_natural(
    tied: list[tuple[int, int, int]], variants: Sequence[Tensor], strengths: int
) -> list[tuple[int, int, int]]:
    """Of grid points of the smallest K, those without a gain above 1, else those whose largest gain is least.

    A gain of 1 takes a site from the source; more pushes it past any value that it has by itself. Losses alone would
    choose the strongest push, since it makes the network surest of its answers.
    """
    fewest = min(k for _, k, _ in tied)
    excess = {(at, k, s): float(variants[at][k * strengths + s].max()) - 1 for at, k, s in tied if k == fewest}
    least = max(min(excess.values()), 0.0)
    return [t for t, beyond in excess.items() if beyond <= least + 1e-9]


def _lowest_loss(
    recording: BankRecording,
    candidates: Sequence[Candidate],
    variants: Sequence[Tensor],
    tied: list[tuple[int, int, int]],
    variable: str,
    weights: Tensor,
    search: Search,
    readout: Readout,
) -> list[tuple[int, int, int]]:
    """Of grid points with equal accuracy, the one that is surest: the lowest mean loss on the same pairs."""
    used = sorted({t[0] for t in tied})
    grouped = [[t for t in tied if t[0] == at] for at in used]
    rows = [torch.tensor([k * len(search.strengths) + s for _, k, s in group]) for group in grouped]
    tries = [candidates[at].family.edits(variants[at][r]) for at, r in zip(used, rows, strict=True)]
    losses = losses_all(recording, tries, variable, weights, readout)
    found = [
        pair for loss, group in zip(losses, grouped, strict=True) for pair in zip(loss.tolist(), group, strict=True)
    ]
    return [min(found)[1]]


def within_places(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Each candidate as it is, and its coupling restricted to the sites of one place at a time.

    The coupling stays the joint one; only the support a handle may take is narrowed.
    """
    narrowed = list(candidates)
    for c in candidates:
        for place in c.family.places if len(c.family.places) > 1 else []:
            at = c.family.at(place)
            family = SiteFamily(tuple(c.family.sites[j] for j in at), c.family.frames)
            narrowed.append(Candidate(family, c.coupling.columns(at), place.name))
    return narrowed


def top_k_weights(coupling: Coupling, variable: str, k: int) -> Float[Tensor, " sites"]:
    """Π̃_{j|i}: the k highest-mass sites, renormalised to sum to one."""
    return _top_weights(coupling, variable, coupling.ranking(variable)[:k])


def _top_weights(coupling: Coupling, variable: str, top: Sequence[int]) -> Float[Tensor, " sites"]:
    row = torch.from_numpy(coupling.row(variable))
    kept = torch.zeros_like(row)
    kept[top] = row[top].clamp(min=1e-300)
    return kept / kept.sum()


def pair_weights(recording: BankRecording, variable: str, score: str) -> Float[Tensor, " pairs"]:
    """Weights whose product with correctness is the score."""
    changed = recording.bank.changed[variable]
    sensitive, invariant = changed.double(), (~changed).double()
    if not sensitive.sum():
        raise PlotError(f"The calibration bank has no pair that changes '{variable}': a handle cannot be chosen on it.")
    if score == "paper":
        return torch.full_like(sensitive, 1 / len(changed))
    if score == "sensitive" or not invariant.sum():
        return sensitive / sensitive.sum()
    return 0.5 * sensitive / sensitive.sum() + 0.5 * invariant / invariant.sum()


def scored(
    recording: BankRecording,
    edits: Sequence[EditBatch],
    variable: str,
    weights: Float[Tensor, " pairs"],
    readout: Readout,
) -> Float[Tensor, " variants"]:
    """Score of every variant, streamed."""
    return scored_all(recording, [edits], variable, weights, readout)[0]


def scored_all(
    recording: BankRecording,
    tries: Sequence[Sequence[EditBatch]],
    variable: str,
    weights: Float[Tensor, " pairs"],
    readout: Readout,
) -> list[Float[Tensor, " variants"]]:
    """Score of every variant of several batches of edits, which may be run at the same time."""
    return _over_shards(_scores, recording, tries, variable, weights, readout)


def losses_all(
    recording: BankRecording,
    tries: Sequence[Sequence[EditBatch]],
    variable: str,
    weights: Float[Tensor, " pairs"],
    readout: Readout,
) -> list[Float[Tensor, " variants"]]:
    """Mean weighted loss of every variant of several batches of edits: how sure, where `scored_all` says how right."""
    return _over_shards(_losses, recording, tries, variable, weights, readout)


Sums = Callable[[BankRecording, Sequence[EditBatch], str, Tensor, Readout], Float[Tensor, " variants"]]


def _over_shards(
    work: Sums,
    recording: BankRecording,
    tries: Sequence[Sequence[EditBatch]],
    variable: str,
    weights: Float[Tensor, " pairs"],
    readout: Readout,
) -> list[Float[Tensor, " variants"]]:
    """Units by (edits x pair shard), summed over shards in plan order."""
    parts = shards(recording)
    units = [
        Unit(work, pairs, tuple(e.place for e in edits), (edits, variable, weights[pairs], readout))
        for edits in tries
        for pairs in parts
    ]
    results: Iterator[Tensor] = run(recording, units)
    return [reduce(torch.add, islice(results, len(parts))) for _ in tries]


def _scores(
    recording: BankRecording, edits: Sequence[EditBatch], variable: str, weights: Tensor, readout: Readout
) -> Float[Tensor, " variants"]:
    labels = sent(recording.bank.labels[variable], recording.subject.device)
    weights = sent(weights, labels.device)
    scores = torch.zeros(len(edits[0].gains), dtype=torch.float64, device=labels.device)
    for variants, pairs, outputs in stream(recording, edits):
        right, at = readout.correct(outputs, labels[pairs]), sent(variants, labels.device)
        scores[at] += right.double() @ weights[pairs]
    return scores.cpu()


def _losses(
    recording: BankRecording, edits: Sequence[EditBatch], variable: str, weights: Tensor, readout: Readout
) -> Float[Tensor, " variants"]:
    labels = sent(recording.bank.labels[variable], recording.subject.device)
    weights = sent(weights, labels.device)
    losses = torch.zeros(len(edits[0].gains), dtype=torch.float64, device=labels.device)
    for variants, pairs, outputs in stream(recording, edits):
        at = sent(variants, labels.device)
        losses[at] += readout.loss(outputs, labels[pairs]).double() @ weights[pairs]
    return losses.cpu()


def scored_frames(
    recording: BankRecording,
    tries: Sequence[tuple[Place, Frame]],
    strengths: Sequence[float],
    variable: str,
    weights: Float[Tensor, " pairs"],
    readout: Readout,
) -> Float[Tensor, "tries strengths"]:
    """Score of whole frames at places with every strength, frames of one place and rank in one batch."""
    groups: dict[tuple[Place, int, bool], list[int]] = {}
    for k, (place, frame) in enumerate(tries):
        groups.setdefault((place, frame.rank, frame.read is None), []).append(k)
    strength = torch.tensor(strengths)
    edits = []
    for (place, rank, _), members in groups.items():
        variants = [tries[k][1] for k in members for _ in strengths]
        gains = strength.repeat(len(members)).unsqueeze(1).expand(-1, rank)
        edits.append([EditBatch(place, Frame.stack(variants), gains)])
    scores = torch.zeros(len(tries), len(strengths), dtype=torch.float64)
    for members, found in zip(groups.values(), scored_all(recording, edits, variable, weights, readout), strict=True):
        scores[members] = found.unflatten(0, (-1, len(strengths)))
    return scores


def correct(
    recording: BankRecording, handle: Handle, readout: Readout, variable: str | None = None
) -> Bool[Tensor, " pairs"]:
    """Whether the handle gives each pair's counterfactual label (of its own variable unless another is named)."""
    return _correct_under(recording, handle.batch(), variable or handle.variable, readout)[0]


def correct_all(recording: BankRecording, handles: Sequence[Handle], readout: Readout) -> Bool[Tensor, "handles pairs"]:
    """The same for several handles of one variable, of equal sizes at the same places, which run together."""
    batches = zip(*(h.batch() for h in handles), strict=True)
    edits = [EditBatch(b[0].place, Frame.stack([e.frame for e in b]), torch.cat([e.gains for e in b])) for b in batches]
    return _correct_under(recording, edits, handles[0].variable, readout)


def _correct_under(
    recording: BankRecording, edits: Sequence[EditBatch], variable: str, readout: Readout
) -> Bool[Tensor, "variants pairs"]:
    parts = shards(recording)
    units = [Unit(_correct, pairs, tuple(e.place for e in edits), (edits, variable, readout)) for pairs in parts]
    right = torch.zeros(len(edits[0].gains), len(recording), dtype=torch.bool)
    for pairs, found in zip(parts, run(recording, units), strict=True):
        right[:, pairs] = found
    return right


def _correct(
    recording: BankRecording, edits: Sequence[EditBatch], variable: str, readout: Readout
) -> Bool[Tensor, "variants pairs"]:
    labels = sent(recording.bank.labels[variable], recording.subject.device)
    right = torch.zeros(len(edits[0].gains), len(recording), dtype=torch.bool, device=labels.device)
    for variants, pairs, outputs in stream(recording, edits):
        at = torch.arange(len(recording), device=labels.device)[pairs]
        right[variants.to(labels.device)[:, None], at] = readout.correct(outputs, labels[pairs])
    return right.cpu()
