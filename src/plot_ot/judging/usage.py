"""Does a handle read what the network uses? The answer to the subspace-patching illusion.

A handle may *read* a direction from which the value can be decoded but which nothing later looks at, and *write*
another that is used. Its answers are then right although the variable does not act here. Two things speak against an
illusion, and a handle for which neither holds is called decodable only.

**The reading can be made of what is used.** The rest of the network sees a state a only through some functionals uᵀa.
Let C be the covariance of the differences a_source - a_base, and y = C^{-1/2} a the whitened state. Gradients of the
outputs at natural, half-swapped, swapped and edited states span the functionals V found so far; a swap of all that V
does not see, (1 - VVᵀ) y, must leave the outputs alone. If it does not (saturated gates and hard attention have no
gradient), the functionals that best predict what that swap did are added, and it is tried again. The reading is then
refitted from V, and the writing kept. A functional counts by its effect s, how far a natural change along it moves the
outputs in units of what the handle does: R' = C^{-1/2} V S²/(S² + λ²) Vᵀ C^{1/2} R, or a ridge regression on the
features S Vᵀ y. A copy that hardly moves the outputs can be decoded as well as any other, but is not used. (Where the
second answer below is at least a partial yes, there is no such copy, and all functionals count alike.)

**What naturally goes with the variable acts.** Where the network adds up several variables before it looks at them, no
functional it uses tells one of them apart, though each acts; and a code may be used in another way than it is read.
There the reading is kept, and the writing replaced by the natural change of state that goes with it. A dormant copy
moves along its own direction, which does nothing. But what is made of the variable, the answer above all, moves with it
by nature. So the change is the variable's own: its part in a regression of natural states on the values of the
variable, of all else that the answer is made of, and of the answer. Where these follow from one another (a sum and its
terms), nothing is the variable's own, and all that goes with the reading counts.

Whichever of these does best on calibration is compared with the handle itself on test pairs. A handle over several
places is rebuilt in forward order, each place as the rebuilt edits before it leave it: in the best way at each, or in
one way at all of them, since parts that only work together cannot be judged one by one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from plot_ot.abstract.banks import row_codes
from plot_ot.edits import EditBatch, Frame
from plot_ot.engine import Unit, run, shards
from plot_ot.handles import Edit, Handle
from plot_ot.judging.own_change import OwnChange
from plot_ot.signatures import Readout
from plot_ot.stages.calibrate import correct, pair_weights
from plot_ot.stages.closed_form import RULES, cell_shift, cell_variables
from plot_ot.stages.natural import edited_states
from plot_ot.subjects import BankRecording, Place

SHRINKAGE = 1e-3
"""Added to the covariance of differences, in units of its mean variance."""
INERT = 0.01
"""A swap is inert when it moves the outputs by at most this share of what a swap of the whole place does, or the handle
itself where that is more."""
ROUNDS = 4
"""How often functionals are added before all other directions count as used a little."""
FAINT = 0.2
"""λ: used is what moves the outputs, by a natural change along it, by about this share of what the handle does."""
RIDGE = 1e-3
"""Of the regressions on what is read, in units of its variance."""
PARTLY = 0.25
"""A variable's own change acts if it reaches this share of what the handle reaches on calibration pairs."""
NARROW = 128
"""Places up to this width are looked at with more pairs, points and outputs."""


@dataclass(frozen=True)
class Used:
    """The functionals of a place that matter downstream, in whitened coordinates."""

    place: Place
    basis: Float[Tensor, "d k"]
    """V, orthonormal."""
    root: Float[Tensor, "d d"]
    """C^{1/2}."""
    effects: Float[Tensor, " k"]
    """s: how far a natural change along each moves the outputs, in units of what the handle does."""

    @property
    def rank(self) -> int:
        """How many functionals there are."""
        return self.basis.shape[1]

    @property
    def count(self) -> int:
        """How many functionals have an effect to speak of."""
        return int((self.effects >= FAINT).sum())

    def all_alike(self) -> Used:
        """The same functionals, all of them counted in full."""
        return replace(self, effects=torch.full_like(self.effects, FAINT**-2))

    def reading(self, read: Float[Tensor, "d r"]) -> Float[Tensor, "d r"]:
        """C^{-1/2} V S²/(S² + λ²) Vᵀ C^{1/2} R."""
        counts = self.effects**2 / (self.effects**2 + FAINT**2)
        found: Tensor = torch.linalg.solve(self.root, (self.basis * counts) @ (self.basis.T @ (self.root @ read)))
        return found

    def fitted(self, y: Float[Tensor, "pairs d"], target: Float[Tensor, "pairs r"]) -> Float[Tensor, "d r"]:
        """The reading that predicts a target of each pair from its used functionals S Vᵀ y, with the ridge λ²."""
        features = y @ self.basis * self.effects
        gram = features.T @ features / len(features) + FAINT**2 * torch.eye(self.rank, dtype=y.dtype)
        weights = torch.linalg.solve(gram, features.T @ target / len(features))
        found: Tensor = torch.linalg.solve(self.root, (self.basis * self.effects) @ weights)
        return found

    def unseen(self) -> Float[Tensor, "d d"]:
        """The swap of all that the used functionals do not see: C^{1/2} (1 - V Vᵀ) C^{-1/2}."""
        rest = torch.eye(len(self.root), dtype=self.root.dtype) - self.basis @ self.basis.T
        swap: Tensor = self.root @ torch.linalg.solve(self.root, rest).T
        return swap


def used_directions(fit: BankRecording, edit: Edit, generator: torch.Generator) -> Used:
    """Which functionals of the state at an edit's place the rest of the network uses, measured on some fit pairs."""
    place = edit.place
    part = max(shards(fit), key=lambda pairs: len(_index(pairs, fit)))  # one work unit runs on one shard
    within = _index(part, fit)
    count = min(len(within), 128 if place.width <= NARROW else 48)
    pairs = within[torch.randperm(len(within), generator=generator)[:count]]
    root = _root((fit.source_at(place) - fit.base_at(place)).double().cpu())
    seed = int(torch.randint(1 << 31, (1,), generator=generator))
    used: Used
    [used] = run(fit, [Unit(_used, pairs, (place,), (edit, root, seed))])
    return used


def _index(pairs: slice | Tensor, recording: BankRecording) -> Int[Tensor, " pairs"]:
    return torch.arange(len(recording))[pairs]


def _used(recording: BankRecording, edit: Edit, root: Float[Tensor, "d d"], seed: int) -> Used:
    """V and S for the pairs of one work unit."""
    place, narrow = edit.place, edit.place.width <= NARROW
    base, source = (x.double().cpu() for x in (recording.base_at(place), recording.source_at(place)))
    run = _Outputs(recording, place, 8 if narrow else 4, torch.Generator().manual_seed(seed))
    clean = run(base)
    edited = _applied(EditBatch(place, edit.frame, edit.gains.unsqueeze(0)), base, source)
    # where nothing natural is used, a swap of the whole place does nothing, and the handle is the measure
    most = INERT * max(float((run(states) - clean).norm()) for states in (source, edited))
    points = [base, (base + source) / 2, source, edited] if narrow else [base, edited]
    slopes = torch.cat([run.slopes(a) for a in points]) @ root  # [points * pairs * features, d], in whitened states
    slopes = slopes / (len(points) * len(base)) ** 0.5
    moved = (run(edited) - clean).norm() / len(base) ** 0.5
    written = torch.linalg.solve(root, (edited - base).T)

    def change(u: Used) -> Float[Tensor, "pairs features"]:
        return run(base + (source - base) @ u.unseen().T) - clean

    def ordered(basis: Float[Tensor, "d k"]) -> Used:
        """The same functionals, those that matter most first, each with its effect."""
        inside = slopes @ basis
        values, order = torch.linalg.eigh(inside.T @ inside)
        return Used(place, basis @ order.flip(1), root, values.flip(0).clamp(min=0).sqrt() / by_handle())

    def by_handle() -> Tensor:
        """What the handle does. Where gates are saturated, slopes say less than swaps do, of the handle as well."""
        return torch.minimum(moved, (slopes @ written).norm() / len(base) ** 0.5).clamp(min=1e-12)

    used = ordered(_span(slopes))
    for _ in range(ROUNDS):
        if used.rank == place.width:
            return used
        effect = change(used)
        if float(effect.norm()) <= most:
            return _fewest(used, lambda u: float(change(u).norm()) <= most)
        y = torch.linalg.solve(root, (source - base).T).T
        hidden = y - y @ used.basis @ used.basis.T
        gram = hidden.T @ hidden
        ridge = 1e-6 * gram.diagonal().mean().clamp(min=1e-300) * torch.eye(len(gram), dtype=gram.dtype)
        found = torch.linalg.solve(gram + ridge, hidden.T @ effect)  # what best predicts the swap's effects
        slopes = torch.cat([slopes, found.T])
        used = ordered(_span(torch.cat([used.basis.T, found.T / found.norm().clamp(min=1e-300)])))
    return _completed(used, float(change(used).norm() / len(base) ** 0.5 / by_handle()))


def _completed(used: Used, effect: float) -> Used:
    """With all other directions, over which what a swap of them still does is spread evenly."""
    _, vectors = torch.linalg.eigh(used.basis @ used.basis.T)
    rest = vectors[:, : used.place.width - used.rank]
    spread = torch.full((rest.shape[1],), effect / max(1, rest.shape[1]) ** 0.5, dtype=used.effects.dtype)
    return replace(used, basis=torch.cat([used.basis, rest], dim=1), effects=torch.cat([used.effects, spread]))


def _fewest(used: Used, inert: Callable[[Used], bool]) -> Used:
    """The fewest leading functionals whose complement is still inert: slopes are strongest along what matters most."""
    low, high = 1, used.rank
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if inert(_leading(used, middle)) else (middle + 1, high)
    return _leading(used, high)


def _leading(used: Used, count: int) -> Used:
    return replace(used, basis=used.basis[:, :count], effects=used.effects[:count])


def _root(difference: Float[Tensor, "pairs d"]) -> Float[Tensor, "d d"]:
    """C^{1/2} of the differences, shrunk towards a multiple of the identity."""
    c = difference.T @ difference / len(difference)
    c = c + SHRINKAGE * c.diagonal().mean().clamp(min=1e-12) * torch.eye(len(c), dtype=c.dtype)
    values, vectors = torch.linalg.eigh(c)
    root: Tensor = (vectors * values.clamp(min=0).sqrt()) @ vectors.T
    return root


def _span(rows: Float[Tensor, "rows d"]) -> Float[Tensor, "d k"]:
    """An orthonormal basis of what the rows span, up to rounding."""
    values, vectors = torch.linalg.eigh(rows.T @ rows)
    basis: Tensor = vectors[:, values > 1e-9 * values.max().clamp(min=1e-300)].flip(1)
    return basis


def _applied(batch: EditBatch, base: Tensor, source: Tensor) -> Float[Tensor, "pairs d"]:
    frame = batch.frame.to(base.device, base.dtype)
    return EditBatch(batch.place, frame, batch.gains.to(base)).apply(base.unsqueeze(0), source)[0]


class _Outputs:
    """A few numbers that stand for all outputs of some pairs' bases, at any state of one place."""

    def __init__(self, recording: BankRecording, place: Place, features: int, generator: torch.Generator) -> None:
        self.recording, self.place = recording, place
        width = recording.base_outputs.flatten(1).shape[1]
        self.mixing = (
            torch.eye(width) if width <= features else torch.randn(width, features, generator=generator) / width**0.5
        )

    def _run(self, states: Tensor, rows: Tensor) -> Tensor:
        subject, store = self.recording.subject, self.recording.store
        outputs = subject.resume(store, rows, self.place, states.unsqueeze(0), {})[0].flatten(1)
        return outputs @ self.mixing.to(outputs)

    @torch.no_grad()
    def __call__(self, states: Float[Tensor, "pairs d"]) -> Float[Tensor, "pairs features"]:
        """The outputs at these states, in double precision."""
        like = self.recording.store.activations[self.place.name]
        rows, size = self.recording.base_rows, max(1, self.recording.subject.responses_per_batch)
        parts = [self._run(s.to(like), r) for s, r in zip(states.split(size), rows.split(size), strict=True)]
        return torch.cat(parts).double().cpu()

    def slopes(self, states: Float[Tensor, "pairs d"]) -> Float[Tensor, "rows d"]:
        """The derivatives of all features at these states, one after the other."""
        like = self.recording.store.activations[self.place.name]
        rows, size = self.recording.base_rows, max(1, self.recording.subject.responses_per_batch // 4)
        if not self.recording.subject.differentiable:  # a network of jumps: only swaps can tell
            return torch.zeros_like(states)
        found = []
        for some, at in zip(states.split(size), rows.split(size), strict=True):
            with torch.enable_grad():
                a = some.to(like).detach().requires_grad_(True)
                outputs = self._run(a, at)
                if not outputs.requires_grad:  # nothing after this place has a gradient
                    found.append(torch.zeros_like(some))
                    continue
                for f in range(outputs.shape[1]):
                    [slope] = torch.autograd.grad(outputs[:, f].sum(), a, retain_graph=True, materialize_grads=True)
                    found.append(slope.double().cpu())
        return torch.cat(found)


@dataclass(frozen=True)
class Rebuilt:
    """A handle that reads used directions only, and how many of how many directions these are."""

    handle: Handle
    used: int
    width: int


def read_from_used(
    handle: Handle, fit: BankRecording, calibration: BankRecording, readout: Readout, generator: torch.Generator
) -> Rebuilt | None:
    """The handle with its reading rebuilt from used directions, by whichever of a few fits does best on calibration.

    None where a handle reads through an encoder: such a reading is not linear and cannot be rebuilt.
    """
    if any(e.frame.encoder is not None for e in handle.edits):
        return None
    handle = replace(handle, edits=tuple(sorted(handle.edits, key=lambda e: _order(fit, e))))
    found = [used_directions(fit, e, generator) for e in handle.edits]
    own = OwnChange.of(fit, handle.variable, [calibration])
    weights = pair_weights(calibration, handle.variable, "balanced")

    def scored(h: Handle) -> float:
        return float(correct(calibration, h, readout).double() @ weights)

    def natural(h: Handle, k: int) -> list[Edit]:
        return natural_writings(fit, h.edits[k], h.variable, _moved(fit, h, k), own)

    if own is not None:
        nothing = scored(replace(handle, edits=tuple(replace(e, gains=0 * e.gains) for e in handle.edits)))
        reached = scored(_one_after_the_other(handle, natural, scored))
        if reached - nothing >= PARTLY * (scored(handle) - nothing):  # no dormant copy: how it is read is free
            found = [u.all_alike() for u in found]

    def options(h: Handle, k: int) -> list[Edit]:
        edit, moved = h.edits[k], _moved(fit, h, k)
        refitted = refitted_readings(fit, edit, found[k], h.variable, moved)
        return refitted + natural_writings(fit, edit, h.variable, moved, own)

    rebuilt = [_one_after_the_other(handle, options, scored)]
    if len(handle.edits) > 1 and scored(rebuilt[0]) < scored(handle) - 1e-9:
        # parts that only work together are rebuilt together, all in the same way
        ways = range(len(options(handle, 0)))
        rebuilt += [_one_after_the_other(handle, options, scored, way) for way in ways]
    best = max(rebuilt, key=scored) if len(rebuilt) > 1 else rebuilt[0]
    return Rebuilt(best, sum(u.count for u in found), sum(e.place.width for e in handle.edits))


def _one_after_the_other(
    handle: Handle,
    options_at: Callable[[Handle, int], list[Edit]],
    scored: Callable[[Handle], float],
    way: int | None = None,
) -> Handle:
    """The handle rebuilt place by place, in forward order: in one way at all of them, or in the best way at each."""
    for k in range(len(handle.edits)):
        options = options_at(handle, k)
        some = options if way is None else [options[way]]
        tries = [replace(handle, edits=(*handle.edits[:k], option, *handle.edits[k + 1 :])) for option in some]
        handle = max(tries, key=scored) if len(tries) > 1 else tries[0]
    return handle


def _moved(fit: BankRecording, handle: Handle, k: int) -> Float[Tensor, "pairs d"]:
    """The bases' states at the place of edit k, as the edits before it leave them."""
    edit = handle.edits[k]
    if not k:
        return fit.base_at(edit.place).double().cpu()
    # a later edit takes from the source what the earlier ones have not brought
    still = EditBatch(edit.place, edit.frame, torch.zeros_like(edit.gains).unsqueeze(0))
    before = replace(handle, edits=handle.edits[:k]).batch()
    return edited_states([*before, still], fit)[edit.place.name].cpu()


def _order(fit: BankRecording, edit: Edit) -> int:
    return [p.name for p in fit.subject.places].index(edit.place.name)


def refitted_readings(
    fit: BankRecording, edit: Edit, used: Used, variable: str, moved: Float[Tensor, "pairs d"] | None = None
) -> list[Edit]:
    """An edit's readings from used functionals: the projection of R, and regressions of what R reads of each pair.

    What it reads is predicted as it is, or as it is on average over the pairs with the same two values of the variable:
    the second is what a reading of the value alone would see. `moved` are the states that earlier edits have made of
    the bases'.
    """
    read, write, gains = _parts(edit)
    base = fit.base_at(edit.place).double().cpu()
    difference = fit.source_at(edit.place).double().cpu() - (base if moved is None else moved)
    y, seen = torch.linalg.solve(used.root, difference.T).T, difference @ read
    targets = seen, _mean_by_values(seen, fit, variable)
    readings = [used.reading(read), *(used.fitted(y, target) for target in targets)]
    return [_oblique(edit.place, r, write, gains) for r in readings]


def natural_writings(
    fit: BankRecording,
    edit: Edit,
    variable: str,
    moved: Float[Tensor, "pairs d"] | None = None,
    own: OwnChange | None = None,
) -> list[Edit]:
    """An edit that writes what naturally goes with its reading: B in δ ≈ B Rᵀ(a_source - a_base), for several δ.

    Where earlier edits have `moved` the states, it reads from there and writes what is left of δ. Where the variable
    has a change of its `own`, δ is that: at a place that holds the answer (or anything else made of the variable) and a
    copy of the variable that nothing reads, all of them go with the reading.
    """
    read, _, _ = _parts(edit)
    base = fit.base_at(edit.place).double().cpu()
    moved = base if moved is None else moved
    difference = fit.source_at(edit.place).double().cpu() - moved
    everyone = torch.arange(len(fit))
    if own is not None:
        targets = [(everyone, own.shift(edit.place) - (moved - base))]
    else:
        shifts = [cell_shift(fit, edit.place, variable, cell_variables(fit, variable, rule)) for rule in RULES]
        left = [None if s is None else (s[0], s[1] - (moved - base)[s[0]]) for s in shifts]
        targets = [shift if shift is not None else (everyone, difference) for shift in left] + [(everyone, difference)]
    writings = []
    for pairs, delta in targets:
        seen = difference[pairs] @ read
        gram = seen.T @ seen / len(seen)
        ridge = RIDGE * gram.diagonal().mean().clamp(min=1e-12) * torch.eye(len(gram), dtype=gram.dtype)
        writings.append(torch.linalg.solve(gram + ridge, seen.T @ delta / len(seen)).T)
    return [_oblique(edit.place, read, w, torch.ones(read.shape[1])) for w in writings]


def _parts(edit: Edit) -> tuple[Float[Tensor, "d r"], Float[Tensor, "d r"], Float[Tensor, " r"]]:
    """What an edit reads and writes along its nonzero gains, and these."""
    some = (edit.gains != 0).cpu()
    eye = torch.eye(edit.place.width, dtype=torch.float64)
    read = (eye if edit.frame.read is None else edit.frame.read.double().cpu())[:, some]
    write = read if edit.frame.write is None else edit.frame.write.double().cpu()[:, some]
    return read, write, edit.gains[some.to(edit.gains.device)]


def _oblique(place: Place, read: Tensor, write: Tensor, gains: Tensor) -> Edit:
    dtype = torch.get_default_dtype()
    return Edit(place, Frame.oblique(read.to(dtype).contiguous(), write.to(dtype).contiguous(), "used"), gains)


def _mean_by_values(seen: Float[Tensor, "pairs r"], fit: BankRecording, variable: str) -> Float[Tensor, "pairs r"]:
    """The mean over all pairs with the same value on the base and the same value on the source."""
    at_base, at_source = (
        fit.bank.causal.run(x)[variable].reshape(len(fit), -1) for x in (fit.bank.base, fit.bank.source)
    )
    code = row_codes(torch.cat([at_base, at_source], dim=1).double())
    total = torch.zeros(int(code.max()) + 1, seen.shape[1], dtype=seen.dtype).index_add(0, code, seen)
    return (total / torch.bincount(code)[:, None])[code]
