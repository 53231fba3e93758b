"""Linearised signatures: all directions of all places at once, from one backward pass per output feature.

At the base activation a_b of a place let J = ∂y/∂a, [c, d], be the derivative of the network's outputs. Swapping a
site whose directions the frame reads by R and writes by W moves the outputs by about

    Δy ≈ Σ_{r in site} J W_r (R_rᵀ a_source - R_rᵀ a_base),

and its effect is about φ(y + Δy) - φ(y): outputs are linearised, φ is not. J depends on the base input alone, and one
backward pass meets every place on its way, so the network runs once forward and c times backward per base input
however many sites, places and sources there are. Good for small swaps (neurons, narrow blocks), wrong for whole places.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from jaxtyping import Float, Int
from torch import Tensor

from plot_ot.edits import Distinct
from plot_ot.edits.guards import within_memory
from plot_ot.errors import PlotError, warn
from plot_ot.finite import refuse_non_finite
from plot_ot.signatures.effects import Collection, Signatures, SignatureSpec, View, batches
from plot_ot.signatures.pooling import Abstract, Sums
from plot_ot.signatures.readouts import Readout
from plot_ot.sites import SiteFamily
from plot_ot.subjects import BankRecording, Place, Recording, Subject

EFFECTS_AT_ONCE = 1 << 20
"""Linearised effects (pairs x sites x features) that are held together: what fits a processor's cache."""


def jacobians(
    recording: Recording,
    rows: Int[Tensor, " rows"],
    places: Sequence[Place],
    seen: Callable[[Float[Tensor, "rows c"]], Float[Tensor, "rows f"]] = lambda outputs: outputs,
) -> tuple[Float[Tensor, "rows f"], dict[str, Float[Tensor, "rows f d"]]]:
    """What is `seen` of the outputs of recorded base inputs, and its derivatives in the activations at these places.

    One forward pass from the first place on, and one backward pass through all of them per feature.
    """
    ordered = sorted(places, key=recording.subject.places.index)

    def run(_: slice, some: slice) -> Tensor:
        return _jacobians(recording, rows[some], ordered, seen).unsqueeze(0)

    found = within_memory(recording.subject, run, 1, len(rows))[0]
    features, *slopes = found.split([1, *(p.width for p in ordered)], dim=2)
    for place, slope in zip(ordered, slopes, strict=True):
        refuse_non_finite(slope, partial(_steep, place))
    return features[:, :, 0], {p.name: slope for p, slope in zip(ordered, slopes, strict=True)}


def _steep(place: Place, _: Tensor) -> str:
    return f"The outputs' derivative at {place.name} is NaN or infinite. Use float32, or exact signatures."


def _jacobians(
    recording: Recording, rows: Tensor, places: Sequence[Place], seen: Callable[[Tensor], Tensor]
) -> Float[Tensor, "rows f values"]:
    """Compute each feature, then its derivatives at one place after the other."""
    subject, store, (first, *rest) = recording.subject, recording.store, places
    clean = store.activations[first.name][rows]
    with torch.enable_grad():
        nudges = {p.name: clean.new_zeros(1, len(rows), p.width, requires_grad=True) for p in places}

        def nudged(name: str) -> Callable[[Tensor], Tensor]:
            return lambda a: a + nudges[name]

        later = {p.name: nudged(p.name) for p in rest}
        features = seen(subject.resume(store, rows, first, clean.unsqueeze(0) + nudges[first.name], later)[0])
        found = clean.new_empty(len(rows), features.shape[1], 1 + sum(p.width for p in places))
        found[:, :, 0] = features.detach()
        for f in range(features.shape[1]):
            slopes = torch.autograd.grad(
                features[:, f].sum(),
                list(nudges.values()),
                retain_graph=f + 1 < features.shape[1],
                materialize_grads=True,
            )
            found[:, f, 1:] = torch.cat([s[0] for s in slopes], dim=1)
    return found


@torch.no_grad()
def jacobian_signatures(
    recording: BankRecording,
    family: SiteFamily,
    readout: Readout,
    spec: SignatureSpec | None = None,
    variables: Sequence[str] | None = None,
) -> Signatures:
    """`measure_signatures` with linearised effects: the same sums of other v; the cost hardly grows with the menu."""
    _refuse(family)
    collection = Collection(recording, family, readout, spec, variables)
    collection.gather(_linearised, [(family.places, list(range(len(family))))])
    return replace(collection.finish(), exact=torch.zeros(len(family), dtype=torch.bool))


@torch.no_grad()
def _linearised(recording: BankRecording, family: SiteFamily, side: Abstract, view: View) -> Sums:
    """Linearised effects of all sites on some pairs."""
    # the derivatives are shared by all pairs of a base, so pairs with equal sources are not worth sorting out
    weight, u = side.pool(Distinct(recording, None))
    sums, readout = Sums(side, len(family)), view.readout
    bases, base_of = torch.unique(recording.base_rows, return_inverse=True)
    fold_of = side.folds.new_zeros(len(bases)).index_copy(0, base_of.cpu(), side.folds)
    layouts = {p.name: Layout(family, p) for p in family.places}
    for fold, some in batches(fold_of, bases_at_once(recording.subject)):

        def linear(outputs: Tensor, fold: int = fold) -> Tensor:
            return view.seen(readout.neural(outputs), fold) if readout.linear else outputs

        rows = bases[some]
        outputs, slopes = jacobians(recording, rows, family.places, linear)
        before = outputs if readout.linear else view.seen(readout.neural(outputs), fold)
        position = torch.full((len(bases),), -1, device=rows.device)
        position[some] = torch.arange(len(rows), device=rows.device)
        pairs = (position[base_of] >= 0).nonzero().squeeze(1)
        own = position[base_of[pairs]]
        for place in family.places:
            frame = family.frames[place.name].to(outputs.device, outputs.dtype)
            directions = frame.read if frame.write is None else frame.write
            slope = slopes[place.name] if directions is None else slopes[place.name] @ directions
            by_direction = slope.permute(2, 0, 1).contiguous()  # [r, rows, f]
            at_once = max(1, EFFECTS_AT_ONCE // (frame.rank * outputs.shape[1]))
            a = recording.store.activations[place.name]
            for here, base in zip(pairs.split(at_once), own.split(at_once), strict=True):
                source, clean = a[recording.source_rows[here]], a[recording.base_rows[here]]
                change = frame.coordinates(source) - frame.coordinates(clean)
                moved = by_direction[:, base] * change.T.unsqueeze(2)  # [r, t, f]
                t = here.cpu()
                for sites, delta in layouts[place.name].sums(moved):
                    if not readout.linear:  # φ(y + Δy) - φ(y)
                        delta = view.seen(readout.neural(outputs[base] + delta.to(outputs)), fold) - before[base]
                    sums.add(fold, sites, delta.cpu(), weight[t], u[:, :, t])
        recorded = view.seen(readout.neural(recording.base_outputs[pairs]), fold)
        sums.noise += side.noise(before[own] - recorded, weight[pairs.cpu()])
    return sums


class Layout:
    """How the sites of a place sum up its directions: by index if each has one, by differences of running sums if all
    are spans, else by a matrix. The first two cost the same for however many sites share the directions."""

    def __init__(self, family: SiteFamily, place: Place) -> None:
        self.sites = family.at(place)
        chosen = [family.sites[j].directions for j in self.sites]
        self.starts = torch.tensor([min(d) for d in chosen])
        self.ends = torch.tensor([max(d) + 1 for d in chosen])
        self.lengths = self.ends - self.starts
        self.member: Tensor | None = None
        if any(len(set(d)) != n for d, n in zip(chosen, self.lengths.tolist(), strict=True)):
            self.member = torch.zeros(len(chosen), family.frames[place.name].rank)
            for k, d in enumerate(chosen):
                self.member[k, list(d)] = 1.0

    def sums(self, moved: Float[Tensor, "r t f"]) -> Iterator[tuple[list[int], Float[Tensor, "k t f"]]]:
        """Σ over every site's directions, in pieces: (sites, their sums)."""
        if self.member is None and not bool((self.lengths == 1).all()):
            # in float64, for a short span's sum is the difference of two long ones
            running = torch.cat([torch.zeros_like(moved[:1], dtype=torch.float64), moved.double().cumsum(dim=0)])
        at_once = max(1, EFFECTS_AT_ONCE // max(1, moved[0].numel()))
        for k in range(0, len(self.sites), at_once):
            some = slice(k, k + at_once)
            starts, ends = self.starts[some].to(moved.device), self.ends[some].to(moved.device)
            if self.member is not None:
                total = (self.member[some].to(moved) @ moved.flatten(1)).unflatten(1, moved.shape[1:])
            elif bool((self.lengths == 1).all()):
                total = moved[starts]
            else:
                total = running[ends] - running[starts]
            yield self.sites[some], total


def bases_at_once(subject: Subject) -> int:
    """Base inputs whose graph a quarter of the subject's memory holds, so that no backward pass runs forward again."""
    graph = 5 * sum(sum(w.shape) for w in subject.weights().values() if w.ndim == 2)
    return max(1, min(subject.responses_per_batch, subject.memory // 4 // max(1, graph)))


def coarse(family: SiteFamily) -> list[int]:
    """Sites that take half of their place's directions or more, where linearising cannot be trusted."""
    rank: Mapping[str, int] = {name: frame.rank for name, frame in family.frames.items()}
    return [
        j for j, s in enumerate(family.sites) if rank[s.place.name] > 1 and 2 * len(s.directions) >= rank[s.place.name]
    ]


def _refuse(family: SiteFamily) -> None:
    several = [s.name for s in family.sites if s.more]
    if several:
        raise PlotError(
            f"Site {several[0]} spans several places ({len(several)} such sites): linearised signatures know sites of "
            f"one place only. Use exact signatures for this menu."
        )
    large = coarse(family)
    if large:
        warn(
            f"{len(large)} of {len(family)} sites swap half of a place or more ({family.sites[large[0]].name}, ...): "
            f"linearised signatures are often wrong for such large changes. Use exact signatures, or a Prefilter."
        )
