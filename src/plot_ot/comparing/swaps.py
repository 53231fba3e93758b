"""Swaps of several variables at once, and swaps of all that a hypothesis does not mention."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from numpy import ndarray
from torch import Tensor

from plot_ot.abstract.causal_model import CausalModel
from plot_ot.edits import EditBatch, Frame, respond
from plot_ot.handles import Edit, Handle
from plot_ot.judging.intervals import DRAWS, Interval
from plot_ot.signatures import Readout
from plot_ot.subjects import Recording

MOST_SETS = 8
"""Sets of variables that are swapped together, at most."""


# -- the edits --------------------------------------------------------------------------------------------------------


def together(handles: Sequence[Handle]) -> list[EditBatch]:
    """Several handles as one variant, one after the other: a later one sees what an earlier one left.

    At one place the edits a + M₁ (s - a), then a + M₂ (s - a), make a + (M₁ + M₂ (1 - M₁)) (s - a). So a part of the
    state that both take is taken once.
    """
    by_place: dict[str, list[Edit]] = {}
    for handle in handles:
        for edit in handle.edits:
            by_place.setdefault(edit.place.name, []).append(edit)
    return [_one(edits) for edits in by_place.values()]


def _one(edits: Sequence[Edit]) -> EditBatch:
    first = edits[0]
    if len(edits) == 1:
        return EditBatch(first.place, first.frame, first.gains.unsqueeze(0))
    width = first.place.width
    reads, writes, left = [], [], torch.eye(width)
    for edit in edits:
        read, write = factors(edit)
        reads.append(left.T @ read)
        writes.append(write)
        left = left - write @ (read.T @ left)
    frame = Frame.oblique(torch.cat(reads, dim=1), torch.cat(writes, dim=1), "together")
    return EditBatch(first.place, frame, torch.ones(1, frame.rank))


def factors(edit: Edit) -> tuple[Float[Tensor, "d r"], Float[Tensor, "d r"]]:
    """R and W g of the directions that an edit takes."""
    taken = edit.gains != 0
    eye = torch.eye(edit.place.width)
    read = eye if edit.frame.read is None else edit.frame.read
    write = read if edit.frame.write is None else edit.frame.write
    return read[:, taken].float(), (write * edit.gains)[:, taken].float()


def all_else(handle: Handle) -> list[EditBatch]:
    """The swap of everything at a handle's places but what it takes.

    The state is cut in two along the handle's own directions: 1 - W (Rᵀ W)⁻¹ Rᵀ leaves alone what is read.
    """
    edits = []
    for edit in handle.edits:
        read, write = factors(edit)
        kept = torch.eye(edit.place.width) - write @ torch.linalg.pinv(read.T @ write) @ read.T
        frame = Frame.oblique(kept.T.contiguous(), torch.eye(edit.place.width), "all else")
        edits.append(EditBatch(edit.place, frame, torch.ones(1, frame.rank)))
    return edits


def linear(handle: Handle) -> bool:
    """Whether a handle can be cut and joined: one that reads through an encoder cannot."""
    return all(e.frame.encoder is None for e in handle.edits)


# -- what is predicted ------------------------------------------------------------------------------------------------


def sets_of(variables: Sequence[str], generator: torch.Generator) -> list[tuple[str, ...]]:
    """Every set of variables, or where there are many each alone, all together and some at random."""
    every = [s for k in range(1, len(variables) + 1) for s in combinations(variables, k)]
    if len(every) <= MOST_SETS:
        return every
    sure = [*every[: len(variables)], every[-1]]
    others = every[len(variables) : -1]
    drawn = torch.randperm(len(others), generator=generator)[: max(0, MOST_SETS - len(sure))]
    return [*sure, *(others[k] for k in drawn.tolist())]


@dataclass(frozen=True)
class Scored:
    """The counterfactuals that a hypothesis predicts for some pairs, and which of them came true."""

    sets: tuple[tuple[str, ...], ...]
    right: Bool[Tensor, "sets pairs"]
    moved: Bool[Tensor, "sets pairs"]
    """The prediction is not the base's answer."""
    copied: Bool[Tensor, "sets pairs"]
    """The prediction is the source's answer."""

    @property
    def strata(self) -> Int[Tensor, "sets pairs"]:
        """0: nothing is to change; 1: to the source's answer; 2: to another one, which no copying gives."""
        return torch.where(self.moved, 2 - self.copied.long(), 0)


@torch.no_grad()
def predicted(
    recording: Recording,
    base: Int[Tensor, "pairs inputs"],
    source: Int[Tensor, "pairs inputs"],
    causal: CausalModel,
    handles: Mapping[str, Handle],
    sets: Sequence[tuple[str, ...]],
    readout: Readout,
) -> Scored:
    """Swap every set of variables in the network by their handles, and compare with the causal model's answers."""
    at_base, at_source = causal.run(base), causal.run(source)
    answer, copied = at_base[causal.output], at_source[causal.output]
    rows = []
    for chosen in sets:
        label = causal.run(base, do={v: at_source[v] for v in chosen})[causal.output]
        outputs = respond(recording, together([handles[v] for v in chosen]))
        right = readout.correct(outputs, label.to(outputs.device))[0].cpu()
        rows.append((right, ~causal.accepts(label, answer), causal.accepts(label, copied)))
    right, moved, as_source = (torch.stack(column) for column in zip(*rows, strict=True))
    return Scored(tuple(sets), right, moved, as_source)


def unmentioned_pairs(
    causal: CausalModel, rows: Int[Tensor, "rows inputs"], variable: str, size: int, generator: torch.Generator
) -> tuple[Int[Tensor, " pairs"], Int[Tensor, " pairs"]]:
    """Pairs of rows that differ in a variable, where it matters, and agree in all else that the answer is made of.

    What else may differ is what the hypothesis does not mention: the variable's own parents, and inputs it never reads.
    """
    values = causal.run(rows)
    after = causal.descendants(variable) | {causal.output}
    read = dict.fromkeys(p for a in after for p in causal.parents(a) if p not in after and p != variable)
    columns = [torch.unique(values[p], dim=0, return_inverse=True)[1] for p in read]
    key = (
        torch.unique(torch.stack(columns, dim=1), dim=0, return_inverse=True)[1]
        if columns
        else rows.new_zeros(len(rows))
    )
    order = torch.randperm(len(rows), generator=generator)
    order = order[key[order].argsort(stable=True)]
    count = torch.bincount(key)
    start = count.cumsum(0) - count
    base = torch.randint(len(rows), (20 * size,), generator=generator)
    offset = (torch.rand(len(base), generator=generator) * count[key[base]]).long()
    source = order[start[key[base]] + offset]
    label = causal.run(rows[base], do={variable: values[variable][source]})[causal.output]
    telling = ~causal.accepts(label, values[causal.output][base])
    return base[telling][:size], source[telling][:size]


# -- intervals --------------------------------------------------------------------------------------------------------


class Resampled:
    """Base inputs drawn again, the same draws for every hypothesis, so that differences are paired."""

    def __init__(self, base_rows: Int[Tensor, " pairs"], draws: int = DRAWS) -> None:
        self.group = torch.unique(base_rows.cpu(), return_inverse=True)[1].numpy()
        self.bases = int(self.group.max()) + 1
        even = np.full(self.bases, 1 / self.bases)
        self.weights = np.random.default_rng(0).multinomial(self.bases, even, size=draws).astype(np.float64)

    def mean(self, values: Float[ndarray, "sets pairs"], strata: Int[ndarray, "sets pairs"]) -> tuple[float, ndarray]:
        """The mean with the strata that occur weighted equally, and its draws."""
        found, drawn = [], []
        for stratum in np.unique(strata):
            here = strata == stratum
            sums, counts = (
                np.bincount(np.broadcast_to(self.group, here.shape)[here], weights=w, minlength=self.bases)
                for w in (values[here], np.ones(int(here.sum())))
            )
            found.append(sums.sum() / counts.sum())
            with np.errstate(invalid="ignore", divide="ignore"):
                drawn.append((self.weights @ sums) / (self.weights @ counts))
        return float(np.mean(found)), np.nanmean(drawn, axis=0)

    def share(self, scored: Scored) -> tuple[Interval, ndarray]:
        """The share of predictions that came true, with its interval and draws."""
        value, drawn = self.mean(scored.right.numpy().astype(float), scored.strata.numpy())
        interval = Interval.of(value, drawn, self.bases)
        unseen = min(1.0, 3 / self.bases)  # what never happened among so many may still be this frequent
        return Interval(value, min(interval.low, 1 - unseen), max(interval.high, unseen), self.bases), drawn
