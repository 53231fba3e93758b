"""Linearised signatures: all directions of all places at once, from one backward pass per output feature.

At the base activation a_b of a place let J = ∂y/∂a, [c, d], be the derivative of the network's outputs. Swapping a
site whose directions the frame reads by R and writes by W moves the outputs by about

    Δy ≈ Σ_{r in site} J W_r (R_rᵀ a_source - R_rᵀ a_base),

and its effect is about φ(y + Δy) - φ(y): outputs are linearised, φ is not. J depends on the base input alone, and one
backward pass meets every place on its way, so the network runs once forward and c times backward per base input
however many sites, places and sources there are. Good for small swaps (neurons, narrow blocks), wrong for whole places.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from plot_ot.edits import Distinct
from plot_ot.errors import PlotError
from plot_ot.signatures import Collection, Readout, Signatures, SignatureSpec
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
    subject, store = recording.subject, recording.store
    first, *rest = sorted(places, key=subject.places.index)
    like = store.activations[first.name]
    with torch.enable_grad():
        nudges = {p.name: like.new_zeros(1, len(rows), p.width, requires_grad=True) for p in (first, *rest)}

        def nudged(name: str) -> Callable[[Tensor], Tensor]:
            return lambda a: a + nudges[name]

        start = like[rows].unsqueeze(0) + nudges[first.name]
        features = seen(subject.resume(store, rows, first, start, {p.name: nudged(p.name) for p in rest})[0])
        found = {name: like.new_empty(len(rows), features.shape[1], n.shape[2]) for name, n in nudges.items()}
        for f in range(features.shape[1]):
            slopes = torch.autograd.grad(
                features[:, f].sum(),
                list(nudges.values()),
                retain_graph=f + 1 < features.shape[1],
                materialize_grads=True,
            )
            for name, slope in zip(nudges, slopes, strict=True):
                found[name][:, f] = slope[0]
    for name, jacobian in found.items():
        if not bool(torch.isfinite(jacobian).all()):
            raise PlotError(f"The outputs' derivative at {name} is NaN or infinite. Use float32, or exact signatures.")
    return features.detach(), found


@torch.no_grad()
def jacobian_signatures(
    recording: BankRecording,
    family: SiteFamily,
    look: Readout,
    spec: SignatureSpec | None = None,
    variables: Sequence[str] | None = None,
) -> Signatures:
    """`signatures` with linearised effects: the same sums of other v, at a cost that hardly grows with the menu."""
    _refuse(family)
    collection = Collection(recording, family, look, spec, variables)
    recording, gram = collection.recording, collection.gram
    every = Distinct(recording, None)  # the Jacobian is shared by all pairs of a base: equal sources save nothing
    weight, u = gram.pool(every)
    bases, base_of = torch.unique(recording.base_rows.cpu(), return_inverse=True)
    fold_of = collection.folds.new_zeros(len(bases)).index_copy(0, base_of, collection.folds)
    layouts = {p.name: Layout(family, p) for p in family.places}
    noise = 0.0
    for fold, some in collection.batches(fold_of, bases_at_once(recording.subject)):
        rows = bases[some]

        def seen(outputs: Tensor, fold: int = fold) -> Tensor:
            return collection.seen(look.neural(outputs), fold) if look.linear else outputs

        outputs, slopes = jacobians(recording, rows.to(recording.base_rows.device), family.places, seen)
        position = torch.full((len(bases),), -1)
        position[some] = torch.arange(len(rows))
        pairs = (position[base_of] >= 0).nonzero().squeeze(1)
        own = position[base_of[pairs]]
        before = outputs if look.linear else collection.seen(look.neural(outputs), fold)
        for place in family.places:
            layout, frame = layouts[place.name], family.frames[place.name].to(outputs.device, outputs.dtype)
            directions = frame.read if frame.write is None else frame.write
            written = slopes[place.name] if directions is None else slopes[place.name] @ directions
            by_direction = written.permute(2, 0, 1).contiguous()  # [r, rows, f]
            at_once = max(1, EFFECTS_AT_ONCE // (frame.rank * outputs.shape[1]))
            for at in range(0, len(pairs), at_once):
                here, base = pairs[at : at + at_once], own[at : at + at_once].to(outputs.device)
                rows_of = here.to(recording.base_rows.device)
                a = recording.store.activations[place.name]
                source, clean = a[recording.source_rows[rows_of]], a[recording.base_rows[rows_of]]
                change = frame.coordinates(source) - frame.coordinates(clean)
                moved = by_direction[:, base] * change.T.unsqueeze(2)  # [r, t, f]
                for sites, delta in layout.sums(moved):
                    v = delta if look.linear else _effect(collection, outputs[base], delta, before[base], fold)
                    gram.add(fold, sites, v.cpu(), weight[here], u[:, :, here])
        recorded = collection.seen(look.neural(recording.base_outputs[pairs.to(recording.base_rows.device)]), fold)
        noise += collection.noise_of(before[own.to(before.device)], recorded, weight[pairs])
    gram.noise = noise**0.5
    found = collection.finish()
    return replace(found, exact=torch.zeros(len(family), dtype=torch.bool))


def _effect(
    collection: Collection,
    outputs: Float[Tensor, "t c"],
    delta: Float[Tensor, "k t c"],
    before: Float[Tensor, "t f"],
    fold: int,
) -> Float[Tensor, "k t f"]:
    """φ(y + Δy) - φ(y)."""
    return collection.seen(collection.look.neural(outputs + delta.to(outputs)), fold) - before


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
        warnings.warn(
            f"{len(large)} of {len(family)} sites swap half of a place or more ({family.sites[large[0]].name}, ...): "
            f"linearised signatures are often wrong for such large changes. Use exact signatures, or a Prefilter.",
            stacklevel=3,
        )
