"""What a handle must beat: doing nothing, copying the source, full patches, random subspaces, shuffled values."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Bool, Float
from numpy import ndarray
from torch import Tensor

from plot_ot.abstract.banks import Bank
from plot_ot.abstract.relabelling import shuffled
from plot_ot.edits import Frame
from plot_ot.handles import Edit, Handle
from plot_ot.judging.intervals import Bootstrap, Interval
from plot_ot.signatures import Readout
from plot_ot.stages.calibrate import correct
from plot_ot.subjects import BankRecording, Place, Subject


def answers_right(outputs: Tensor, recording: BankRecording, variable: str, readout: Readout) -> Bool[Tensor, " pairs"]:
    """Whether given outputs, one per pair, are the variable's counterfactual labels."""
    labels = recording.bank.labels[variable].to(outputs.device)
    return readout.correct(outputs.unsqueeze(0), labels)[0].cpu()


def controls(recording: BankRecording, variable: str, readout: Readout) -> dict[str, Bool[Tensor, " pairs"]]:
    """The correctness of doing nothing and of copying the source's answer."""
    return {
        "no-edit": answers_right(recording.base_outputs, recording, variable, readout),
        "copy-source": answers_right(recording.source_outputs, recording, variable, readout),
    }


def full_patch(variable: str, places: Iterable[Place], subject: Subject) -> Handle:
    """The handle that takes everything at these places from the source."""
    edits = tuple(Edit(p, Frame.identity(p.width), torch.ones(p.width)) for p in places)
    return Handle(variable, edits, subject.identity())


def random_subspaces(handle: Handle, count: int, generator: torch.Generator) -> list[Handle]:
    """Handles of the same size at the same places, each in random directions of its own."""
    drawn = []
    for _ in range(count):
        edits = []
        for e in handle.edits:
            basis = torch.linalg.qr(torch.randn(e.place.width, e.size, generator=generator))[0]
            edits.append(Edit(e.place, Frame.orthonormal(basis, "random"), torch.ones(e.size)))
        drawn.append(Handle(handle.variable, tuple(edits), handle.subject))
    return drawn


@dataclass(frozen=True)
class Score:
    """Half the accuracy on discriminating pairs, half that on pairs that keep the variable: what a search aims at."""

    value: float
    drawn: Float[ndarray, " draws"]
    bases: int

    def ahead_of(self, other: Score) -> Interval:
        """The interval of the difference to another score, of other pairs."""
        # both were drawn from the same stream: shuffle one of them so that the draws are independent
        order = np.random.default_rng(1).permutation(len(other.drawn))
        return Interval.of(self.value - other.value, self.drawn - other.drawn[order], min(self.bases, other.bases))


def score(
    parts: Sequence[BankRecording], handle: Handle, readout: Readout, variable: str | None = None
) -> Score | None:
    """The score of a handle on the pairs of some recordings together; None without pairs of both kinds."""
    v = variable or handle.variable
    return score_of([r.bank for r in parts], [correct(r, handle, readout, v) for r in parts], v)


def score_of(banks: Sequence[Bank], rights: Sequence[Bool[Tensor, " _"]], variable: str) -> Score | None:
    """The score of whoever is right on these pairs of some banks."""
    v, bank, right = variable, joined(banks), torch.cat(list(rights))
    halves = []
    for pairs in (bank.discriminating(v), ~bank.changed[v]):
        if not bool(pairs.any()):
            return None
        boot = Bootstrap(bank.select(pairs))
        halves.append((*boot.balanced(right[pairs].double().numpy()), boot.balanced_bases))
    (sensitive, drawn, bases), (kept, also, others) = halves
    order = np.random.default_rng(2).permutation(len(also))
    return Score((sensitive + kept) / 2, (drawn + also[order]) / 2, min(bases, others))


def joined(banks: Sequence[Bank]) -> Bank:
    """The pairs of several banks of the same families' names as one bank."""
    first = banks[0]
    families = tuple(dict.fromkeys(f for b in banks for f in b.families))
    index = [torch.tensor([families.index(f) for f in b.families])[b.family] for b in banks]
    return Bank(
        first.name,
        first.causal,
        torch.cat([b.base for b in banks]),
        torch.cat([b.source for b in banks]),
        first.variables,
        {v: torch.cat([b.changed[v] for b in banks]) for v in first.variables},
        {v: torch.cat([b.labels[v] for b in banks]) for v in first.variables},
        torch.cat([b.base_answer for b in banks]),
        torch.cat([b.source_answer for b in banks]),
        torch.cat(index),
        families,
    )


def with_shuffled_values(recordings: Sequence[BankRecording], generator: torch.Generator) -> list[BankRecording]:
    """The same recorded pairs with the values of all variables dealt out anew: nothing is run again."""
    banks = shuffled([r.bank for r in recordings], generator)
    return [replace(r, bank=bank) for r, bank in zip(recordings, banks, strict=True)]
