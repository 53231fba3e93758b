"""Networks whose truth is known, and what a verdict is worth against it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from plot_ot.abstract.banks import Splits
from plot_ot.abstract.causal_model import CausalModel
from plot_ot.abstract.admission import Admission
from plot_ot.abstract.splitting import from_inputs
from plot_ot.handles import Handle
from plot_ot.judging.status import Status
from plot_ot.subjects import Subject

HERE, IN_PART, ABSENT, DORMANT = "here", "in part", "absent", "dormant"


@dataclass(frozen=True)
class Truth:
    """Where a variable really is."""

    status: str
    """`here`, `in part` (used on some inputs only), `absent`, or `dormant` (decodable at a place that does not use
    it)."""
    carried: Mapping[str, Tensor | None] = field(default_factory=dict)
    """Place -> orthonormal columns of the subspace that carries the variable there; None where that is not told."""
    parents: frozenset[str] = frozenset()
    """Places that carry all of the variable's parents, and not the variable."""
    share: float = 1.0
    """The part of the pairs on which swapping `carried` sets the variable."""
    together: bool = False
    """Whether each place holds a copy of the variable and the network needs all of them."""


@dataclass(frozen=True)
class Known:
    """A network, a hypothesis about it, and the truth of every variable."""

    kind: str
    seed: int
    subject: Subject
    causal: CausalModel
    rows: Tensor
    truths: Mapping[str, Truth]
    handles: Mapping[str, Handle] = field(default_factory=dict)
    """Handles by construction: exact ones of variables that are there, illusory ones of dormant variables."""
    size: int = 200
    """Pairs a bank that decide, and take about a second."""
    splits: Splits | None = None
    """Banks of a network that does not answer as the causal model does."""


def draw_splits(causal: CausalModel, rows: Tensor, size: int, seed: int) -> Splits:
    """Banks as `localize` draws them, with no input left out."""
    generator = torch.Generator().manual_seed(seed)
    everything = Admission(lambda r: torch.ones(len(r), dtype=torch.bool))
    return from_inputs(causal, rows, everything, size, generator).splits


# -- scoring --------------------------------------------------------------------------------------------------

RIGHT, COPY, PARENTS, WRONG = "right place", "one copy's place", "parents' place", "wrong place"
REFUSED, FLAGGED, UNDECIDED, OUTPUT = "refused", "flagged", "undecided", "output variable"
_PLACED = (RIGHT, COPY, PARENTS, WRONG)
OUTCOMES = (
    *_PLACED,
    *(f"in part: {where}" for where in _PLACED),
    REFUSED,
    FLAGGED,
    UNDECIDED,
    OUTPUT,
)
_SAID = {
    Status.ABSENT: REFUSED,
    Status.DECODABLE: FLAGGED,
    Status.UNDECIDED: UNDECIDED,
    Status.OUTPUT: OUTPUT,
}


def outcome(status: Status, places: Sequence[str], truth: Truth) -> str:
    """What a verdict and the places of its handle come to; one of `OUTCOMES`."""
    if status in _SAID:
        return _SAID[status]
    named, carried = set(places), set(truth.carried)
    if named <= carried:
        where = COPY if truth.together and named < carried else RIGHT
    else:
        where = PARENTS if named <= truth.parents else WRONG
    return f"in part: {where}" if status is Status.IN_PART else where


def promise_kept(outcome: str, truth: Truth) -> bool:
    """Whether this is what should be said: found, found in part, or not claimed. Undecided never is."""
    if truth.status == HERE:
        return outcome == RIGHT or (truth.together and outcome == f"in part: {COPY}")
    if truth.status == IN_PART:
        return outcome == f"in part: {RIGHT}"
    return outcome in (REFUSED, FLAGGED)


def overlap(handle: Handle, truth: Truth) -> float | None:
    """How much of the strongest directions that a handle writes lies in the planted subspace of its one place."""
    plane = truth.carried.get(handle.edits[0].place.name)
    if len(handle.edits) > 1 or plane is None:
        return None
    [edit] = handle.edits
    read = torch.eye(edit.place.width) if edit.frame.read is None else edit.frame.read.float()
    write = read if edit.frame.write is None else edit.frame.write.float()
    left, strength, _ = torch.linalg.svd(write * edit.gains.float() @ read.T)
    rank = min(plane.shape[1], int((strength > 1e-3 * strength[0]).sum()))
    return float((plane.T @ left[:, :rank]).square().sum() / max(rank, 1))
