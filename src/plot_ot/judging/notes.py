"""What to be careful about when a handle is used: one sentence each, made without being asked."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Int
from torch import Tensor

from plot_ot.abstract.banks import first_of_each, row_codes
from plot_ot.abstract.causal_model import same
from plot_ot.edits import respond
from plot_ot.handles import Handle
from plot_ot.judging.controls import full_patch
from plot_ot.judging.naturalness import naturalness
from plot_ot.stages.problem import Problem, State
from plot_ot.subjects import BankRecording

STRETCH = 1.5
"""Edited states this many times as far out as natural ones are called unnatural."""
TRIED = 32
"""Fit pairs on which a place is patched to see whether anything reads it."""
PARENTS = 0.5
"""Share of a reading's variance within the variable's values above which it may be of the parents."""


def notes_on(handle: Handle, state: State, problem: Problem, test: BankRecording) -> list[str]:
    """All that is remarkable about a handle: its grid's edges, its states, its coupling, its rivals and its parents."""
    found = [*handle.chosen.get("at_edge", ()), *_stretched(handle, problem.fit, test), *_flagged(handle, state)]
    return found + _elsewhere(handle, problem) + _parents(handle, problem.fit, test)


def _stretched(handle: Handle, fit: BankRecording, test: BankRecording) -> list[str]:
    stretch = naturalness(handle, fit, test).stretch
    if stretch <= STRETCH:
        return []
    return [f"it pushes states {stretch:.1f} times as far out as natural ones lie"]


def _flagged(handle: Handle, state: State) -> list[str]:
    if "K" not in handle.chosen:
        return []  # it was not read off a coupling
    found = {flag.kind for c in state.candidates.get(handle.variable, ()) for flag in c.coupling.flags}
    flags = [flag for flag in found if flag.serious]
    return [f"the coupling behind it is flagged: {', '.join(sorted(map(str, flags)))}"] if flags else []


def _elsewhere(handle: Handle, problem: Problem) -> list[str]:
    """Other places that calibration cannot tell from the chosen one, and the earliest of them."""
    scores: Mapping[str, float] = handle.chosen.get("by_support", {})
    order = [p.name for p in problem.subject.places]
    here = [name for name in handle.places if name in scores]
    if not here or len(handle.places) > 1:
        return []
    best = float(scores[here[0]])
    bank = problem.calibration.bank
    count = len(bank.base_groups().unique())
    noise = 2 * math.sqrt(max(best * (1 - best), 1 / count) / count)
    level = [n for n in order if n in scores and n != here[0] and scores[n] >= best - noise and best > 0.5 + noise]
    if not level:
        return []
    earliest = min([here[0], *level], key=order.index)
    also = f"{', '.join(level)} {'does' if len(level) == 1 else 'do'} about as well on calibration"
    return [f"{also}; the earliest of these places is {earliest}"]


def unread(verdict_accuracy: float | None, problem: Problem) -> list[str]:
    """That no edit at any place can act, for a handle that is never right: patched whole, none changes an output."""
    if verdict_accuracy != 0.0:
        return []
    some = problem.fit.select(torch.arange(min(len(problem.fit), TRIED)))
    at_rest = some.base_outputs
    least = 1e-6 * float(at_rest.abs().max())
    for place in problem.subject.places:
        patched = respond(some, full_patch(problem.variables[0], [place], problem.subject).batch())[0]
        if float((patched - at_rest).abs().max()) > least:
            return []
    return [
        "no edit at any of these places changes an output: the network does not read them there (the final state of a "
        "recurrent layer, for one, is not read from its outputs); name places that it reads later"
    ]


def untried(handle: Handle) -> list[str]:
    """The places that nobody looked into, for a verdict that found nothing."""
    names = list(handle.chosen.get("untried", ()))
    if not names:
        return []
    shown = ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")
    return [f"these places were compared whole but not looked into: {shown}"]


def _parents(handle: Handle, fit: BankRecording, test: BankRecording) -> list[str]:
    """Whether the handle might carry what the variable is made of instead of the variable.

    Swapping the parents shows in the answer only where they have another child. Where no test pair tells the two swaps
    apart, what the handle reads is asked: a reading of the variable alone is the same for all inputs of one value.
    """
    causal, bank = test.bank.causal, test.bank
    parents = causal.parents(handle.variable)
    at_source = causal.run(bank.source)
    swapped = causal.run(bank.base, do={p: at_source[p] for p in parents})[causal.output]
    if not bool(same(swapped, bank.labels[handle.variable]).all()):
        return []  # pairs that tell are part of the handle's accuracy
    share = share_of_parents(handle, fit)
    if share is None or share < PARENTS:
        return []
    names = ", ".join(parents)
    return [
        f"it may carry {names} rather than {handle.variable}: what it reads tells these apart within one value, and no "
        f"test pair tells the two swaps apart (pairs would, in which {names} change the answer by another way as well)"
    ]


def share_of_parents(handle: Handle, fit: BankRecording) -> float | None:
    """How much of what a handle reads of its variable's parents is not the variable: 0 for a code of it alone.

    With r the mean of W(g * Rᵀa) for each combination of the parents' values, the variance of r within the values of
    the variable over its whole variance. None where the parents have too many combinations to average over.
    """
    causal, bank = fit.bank.causal, fit.bank
    rows, code = torch.unique(fit.base_rows.cpu(), return_inverse=True)
    values = causal.run(bank.base[first_of_each(code)])
    combination = _codes([values[p] for p in causal.parents(handle.variable)])
    value = _codes([values[handle.variable]])
    count = torch.bincount(combination)
    if len(count) > len(rows) // 4 or len(count) < 3:
        return None
    written = []
    for e in handle.edits:
        a = fit.store.activations[e.place.name].double().cpu()[rows]
        frame = e.frame.to(a.device, a.dtype)
        written.append(frame.lift(e.gains.to(a) * frame.coordinates(a)))
    seen = torch.cat(written, dim=1)
    seen = seen - seen.mean(dim=0)
    mean = torch.zeros(len(count), seen.shape[1], dtype=seen.dtype).index_add(0, combination, seen) / count[:, None]
    of = value[first_of_each(combination)]
    inside = torch.zeros(int(of.max()) + 1, seen.shape[1], dtype=seen.dtype).index_add(0, of, mean * count[:, None])
    middle = inside / torch.bincount(of, weights=count.double())[:, None]
    weight = count[:, None].double()
    within, whole = ((weight * (mean - centre) ** 2).sum() for centre in (middle[of], mean.new_zeros(())))
    return float(within / whole.clamp(min=1e-12))


def _codes(values: Sequence[Tensor]) -> Int[Tensor, " rows"]:
    """Several batched values as one integer per row, 0, 1, ... for every combination that occurs."""
    columns = torch.cat([v.reshape(len(v), -1).double() for v in values], dim=1)
    return row_codes(columns)
