"""The test pairs of one variable, and what its handle and its controls do on them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy import ndarray
from torch import Tensor

from plot_ot.abstract.banks import Bank
from plot_ot.handles import Handle
from plot_ot.judging import gates as g
from plot_ot.judging.controls import Score, controls, full_patch, joined, score_of
from plot_ot.judging.gates import Answer, Gate
from plot_ot.judging.intervals import Accuracy, Bootstrap, Interval, at_least, missing_at_most
from plot_ot.judging.samples import CLEAR, Sample, clear, first_said, samples_of
from plot_ot.signatures import Readout
from plot_ot.stages.calibrate import correct, correct_all
from plot_ot.subjects import BankRecording, Place

VACUOUS = {"shuffled": "shuffled values", "reinitialised": "a re-initialised network"}
ALONE = " alone"
"""Where a bank's labels hold the answers to swapping one thing that a variable is made of; no variable's name."""
RANDOM_PLACES = 12
"""Places at most that are patched whole to see what any place does, drawn at random."""
RANDOM_HANDLES, RANDOM_AT_ONCE = 20, 5
"""Random handles at most; drawn so many at a time until their gates have an answer, or more could not give one."""


class Searched(Protocol):
    """The controls that cost a search (`judging.verdict.Opponents`)."""

    @property
    def random(self) -> Callable[[int], Handle] | None: ...
    @property
    def shuffled(self) -> Sequence[Score]: ...
    @property
    def reinitialised(self) -> Sequence[Score]: ...


@dataclass(frozen=True)
class Plain:
    """A handle on the test pairs, and what the gates say that need no search."""

    right: Float[ndarray, " pairs"]
    """Whether it is right on each of the discriminating pairs."""
    accuracy: Accuracy
    kept: Accuracy
    score: Score | None
    against: tuple[Gate, ...]
    """Copying the source, and random places, if there are others than the handle's."""
    works: Gate
    leaves: Gate
    stays: tuple[Gate, ...] = ()
    """Where the change should not show; nothing where too few pairs are of this kind."""

    @property
    def refused(self) -> bool:
        """Whether one of these gates fails that a variable must pass even in part."""
        return any(gate.fails for gate in (*self.against, *self.stays, self.leaves))

    @property
    def waits(self) -> bool:
        """Whether one of these gates cannot say: no control can then make the verdict a yes."""
        return not all(_said(gate) for gate in (*self.against, *self.stays, self.works, self.leaves))


@dataclass(frozen=True)
class Judged:
    """A handle before the gates that every handle must pass."""

    plain: Plain
    gates: tuple[Gate, ...]
    """Against the controls; `stays where nothing shows`, where it can; then `works` and `leaves the rest alone`."""
    kept_most: bool = True
    """Of a rebuilt handle: whether it is right at least half as often as the handle it was made of, beyond doubt."""

    @property
    def placed(self) -> bool:
        """Whether it passes them all."""
        return all(gate.holds for gate in self.gates)

    @property
    def in_part(self) -> bool:
        """Whether it shows by itself that a part of the variable is there."""
        works = self.plain.works
        return self.kept_most and works.fails and all(gate.holds for gate in self.gates if gate is not works)


class Bench:
    """The test pairs of one variable and what its controls did on them.

    `sampled` asks controls about a sample of the pairs first (`judging.samples`).
    """

    def __init__(
        self,
        variable: str,
        sensitivity: BankRecording,
        invariance: BankRecording,
        readout: Readout,
        sampled: bool = False,
    ) -> None:
        self.tested = sensitivity.select(sensitivity.bank.discriminating(variable))
        self.sensitivity, self.invariance, self.readout = sensitivity, invariance, readout
        self.boot, self.boot_kept = Bootstrap(self.tested.bank), Bootstrap(invariance.bank)
        self.unseen = sensitivity.select(sensitivity.bank.unseen(variable))
        self.subject, self.variable = sensitivity.subject, variable
        self.copied = controls(self.tested, variable, readout)["copy-source"].double().numpy()
        self.samples = samples_of(self.tested.bank, sampled)
        self._patched: dict[Sample, dict[str, ndarray]] = {}
        self._at_random: dict[Sample, list[ndarray]] = {}
        self._at_random_on_all: dict[int, ndarray] = {}
        """Of random handles that a sample could not tell from the handle."""

    def anew(self) -> Bench:
        """The same for another handle, which draws random handles of its own number."""
        other = copy(self)
        other._at_random, other._at_random_on_all = {}, {}
        return other

    def _others(self, handle: Handle) -> bool:
        """Whether any of the random places is not one of the handle's."""
        return any(p.name not in handle.places for p in random_places(self.subject.places))

    def anywhere(self, handle: Handle, sample: Sample) -> Float[ndarray, " pairs"]:
        """What a random place does when it is patched whole.

        On average over all places, or over all but the handle's own where that is less.
        """
        patched = self._places(sample)
        others = [right for place, right in patched.items() if place not in handle.places]
        means = [np.mean(some, axis=0) for some in (list(patched.values()), others)]
        least: ndarray = min(means, key=lambda mean: sample.boot.balanced(mean)[0])
        return least

    def _places(self, sample: Sample) -> Mapping[str, Float[ndarray, " pairs"]]:
        """Random places, patched whole."""
        if sample not in self._patched:
            places = random_places(self.subject.places)
            patches = {p.name: full_patch(self.variable, [p], self.subject) for p in places}
            self._patched[sample] = {name: self.on(patch, sample) for name, patch in patches.items()}
        return self._patched[sample]

    def on(self, handle: Handle, sample: Sample | None = None) -> Float[ndarray, " pairs"]:
        """Whether a handle is right on each of the discriminating pairs, or of a sample of them."""
        right: ndarray = correct(self._of(sample), handle, self.readout).double().numpy()
        return right

    def _of(self, sample: Sample | None) -> BankRecording:
        return self.tested if sample is None or self._is_all(sample) else self.tested.select(sample.at)

    def _is_all(self, sample: Sample) -> bool:
        return len(sample.at) == len(self.tested)

    def ahead_of_subspaces(
        self, right: Float[ndarray, " pairs"], subspaces: Sequence[Handle]
    ) -> tuple[Interval, float]:
        """How far a handle that is so `right` is ahead of random subspaces on average; how often these are right."""
        reached = []

        def ahead(sample: Sample) -> Gate:
            each = correct_all(self._of(sample), subspaces, self.readout).double().numpy()
            mean = np.mean(each, axis=0)
            reached.append(sample.boot.balanced(mean)[0])
            return g.beats("random subspaces", sample.boot.interval(right[sample.at] - mean), margin=0.0)

        gate = first_said(self.samples, ahead)
        return Interval(gate.value, gate.low, gate.high, self.boot.balanced_bases), reached[-1]

    def plainly(self, handle: Handle) -> Plain:
        """A handle on all test pairs, each run once."""
        changed, same = (correct(r, handle, self.readout) for r in (self.tested, self.invariance))
        right = changed.double().numpy()
        accuracy = self.boot.accuracy(changed, balanced=True)
        kept = self.boot_kept.accuracy(same, balanced=True)
        against = [g.beats("copying the source", self.boot.interval(right - self.copied))]
        if self._others(handle):
            against.append(first_said(self.samples, partial(self._beats_places, handle, right)))
        works = g.works(accuracy, self.boot.balanced_bases)
        leaves = g.leaves_the_rest_alone(kept, self.boot_kept.balanced_bases)
        own = score_of([self.tested.bank, self.invariance.bank], [changed, same], handle.variable)
        return Plain(right, accuracy, kept, own, tuple(against), works, leaves, self._stays(handle))

    def _beats_places(self, handle: Handle, right: Float[ndarray, " pairs"], sample: Sample) -> Gate:
        other = self.anywhere(handle, sample)
        difference, reached = sample.boot.interval(right[sample.at] - other), sample.boot.interval(other)
        return g.beats_unless_shared("random places", difference, reached)

    def _stays(self, handle: Handle) -> tuple[Gate, ...]:
        if len(self.unseen) < g.LEAST_PAIRS:
            return ()
        boot = Bootstrap(self.unseen.bank)
        if boot.balanced_bases < g.LEAST_BASES:
            return ()
        still = boot.accuracy(correct(self.unseen, handle, self.readout), balanced=True)
        gate = g.stays_where_nothing_shows(still, boot.balanced_bases)
        # on so few inputs not even a handle that is always right could show it: only a no counts
        return (gate,) if gate.fails or boot.balanced_bases >= at_least(g.KEEPS) else ()

    def made_of(self, handle: Handle) -> list[Gate]:
        """Whether a handle that is right in part only swaps one of the things its variable is made of.

        Two questions for each of them, and a no to either counts: does the handle follow it where swapping it alone
        would show and the variable's swap would not be the same; and is the handle right where it is not enough?
        """
        found, right = [], self.on(handle)
        for part in self.sensitivity.bank.causal.ancestors(handle.variable):
            both = self._follows(handle, part), self._needs(handle.variable, part, right)
            asked = [gate for gate in both if gate is not None]
            found += [next((gate for gate in asked if gate.fails), asked[0])] if asked else []
        return found

    def _follows(self, handle: Handle, part: str) -> Gate | None:
        """Asked on all test pairs where swapping a part alone would give an answer that is neither the base's nor the
        variable's own."""
        v = handle.variable
        told = [_where_told(r, v, part) for r in (self.sensitivity, self.invariance)]
        told = [r for r in told if len(r)]
        if sum(len(r) for r in told) < g.LEAST_PAIRS:
            return None
        boot = _all_alike(joined([r.bank for r in told]))
        if boot.balanced_bases < g.LEAST_BASES:
            return None
        own, other = (np.concatenate([correct(r, handle, self.readout, x).double() for r in told]) for x in (v, ALONE))
        return g.does_more_than(part, boot.interval(own - other))

    def _needs(self, variable: str, part: str, right: Float[ndarray, " pairs"]) -> Gate | None:
        """Asked on the discriminating pairs: is a handle `right` where swapping a part alone would not do, at least
        half as often as where it would? A variable that is there in part does not care."""
        pairs, alone = _swapped_alone(self.tested.bank, part)
        bank, right = self.tested.bank.select(pairs), right[pairs.numpy()]
        enough = bank.causal.accepts(bank.labels[variable], alone).numpy()
        if min(enough.sum(), (~enough).sum()) < g.LEAST_PAIRS:
            return None
        boot = _all_alike(bank)
        if boot.balanced_bases < g.LEAST_BASES:
            return None
        beyond = right * np.where(enough, -0.5 / enough.mean(), 1 / (~enough).mean())
        shares = float(right[enough].mean()), float(right[~enough].mean())
        gate = g.right_where_a_part_is_not_enough(part, *shares, boot.interval(beyond))
        return gate if _said(gate) else None  # of many parts some have few pairs of either kind: they prove nothing

    def vacuous(self, opponents: Searched) -> Mapping[str, Score]:
        """What the searches reach that must fail, on average."""
        reached = {"shuffled": opponents.shuffled, "reinitialised": opponents.reinitialised}
        return {key: _mean(scores) for key, scores in reached.items() if scores}

    def judged(self, plain: Plain, opponents: Searched) -> Judged:
        """All gates of a handle but what it reads."""
        gates = [*plain.against, *self._against_random(plain, opponents)]
        if plain.score is not None:
            means = self.vacuous(opponents)
            gates += [g.beats(VACUOUS[key], plain.score.ahead_of(mean)) for key, mean in means.items()]
        return Judged(plain, (*gates, *plain.stays, plain.works, plain.leaves))

    def _against_random(self, plain: Plain, opponents: Searched) -> list[Gate]:
        """Random handles, if they are asked."""
        gates, random = list[Gate](), opponents.random
        if random is None:
            return gates
        for sample in self.samples:
            with missing_at_most(sample.error):
                gates = self._random_gates(plain, random, sample)
            ahead, none_better = gates  # of which the second was asked on all pairs where a sample is not clear
            if plain.refused or (clear(ahead) and _said(none_better)):
                break
        return gates

    def _random_gates(self, plain: Plain, random: Callable[[int], Handle], sample: Sample) -> list[Gate]:
        """Random handles, drawn until their gates have an answer or more of them could not give one.

        The mean's interval also resamples the handles. Where it cannot say even if their mean were known, the pairs are
        too few, not the handles. The first few are enough where the answer is no without them, and where it waits for
        another gate while none of them comes near.
        """
        boot, bases = sample.boot, sample.boot.balanced_bases
        mine, mine_drawn = boot.balanced(plain.right[sample.at])
        found, rng = self._at_random.setdefault(sample, []), np.random.default_rng(3)
        while True:
            drawn = len(found)
            if drawn:
                each = [boot.balanced(r) for r in found]
                draws = np.stack([d for _, d in each])
                chosen = rng.integers(drawn, size=draws.shape)
                mean = np.take_along_axis(draws, chosen, axis=0).mean(axis=0)
                average = float(np.mean([m for m, _ in each]))
                difference, reached = mine - average, Interval.of(average, mean, bases)
                ahead, known = (
                    g.beats_unless_shared(
                        "random handles", Interval.of(difference, mine_drawn - theirs, bases), reached
                    )
                    for theirs in (mean, draws.mean(axis=0))
                )
                gates = [ahead, self._none_better(plain, random, sample)]
                final = _said(gates[1]) and (_said(ahead) or not _said(known))
                spared = plain.refused or (plain.waits and all(gate.value >= gate.bound for gate in gates))
                if drawn >= RANDOM_HANDLES or final or spared:
                    return gates
            more = range(drawn, min(drawn + RANDOM_AT_ONCE, RANDOM_HANDLES))
            found += [self.on(random(k), sample) for k in more]

    def _none_better(self, plain: Plain, random: Callable[[int], Handle], sample: Sample) -> Gate:
        """The best random handle, on all pairs where a sample does not show that it is behind."""
        found, right = self._at_random[sample], plain.right[sample.at]
        each = [] if self._is_all(sample) else [sample.boot.interval(right - r) for r in found]
        near = [k for k, ahead in enumerate(each) if ahead.low < CLEAR]
        if near:
            known = self._at_random_on_all
            known |= {k: self.on(random(k)) for k in near if k not in known}
            best = max((known[k] for k in near), key=lambda r: self.boot.balanced(r)[0])
            return g.none_better(len(found), self.boot.interval(plain.right - best))
        best = max(found, key=lambda r: sample.boot.balanced(r)[0])
        return g.none_better(len(found), sample.boot.interval(right - best))

    def outdone(self, plain: Plain) -> bool:
        """Whether a random place, patched whole, is right more often: a random handle that takes it would be, too."""
        sample = self.samples[0]
        most = max(sample.boot.balanced(right)[0] for right in self._places(sample).values())
        return most > sample.boot.balanced(plain.right[sample.at])[0]

    def numbers(self, handle: Handle) -> dict[str, float]:
        """How often random handles and random places were right, as far as they were asked."""
        numbers: dict[str, float] = {}
        for sample, found in self._at_random.items():
            on_all = self._at_random_on_all
            each = [
                self.boot.balanced(on_all[k])[0] if k in on_all else sample.boot.balanced(r)[0]
                for k, r in enumerate(found)
            ]
            numbers["random_mean"] = sample.boot.balanced(np.mean(found, axis=0))[0]
            numbers |= {"random_best": max(each), "random_handles": len(each)}
        for sample in self._patched if self._others(handle) else ():
            numbers["random_places"] = sample.boot.balanced(self.anywhere(handle, sample))[0]
        return numbers


def random_places(places: Sequence[Place]) -> list[Place]:
    """Some of the places, drawn at random, always the same ones; all where these are few."""
    drawn = torch.randperm(len(places), generator=torch.Generator().manual_seed(104_729))[:RANDOM_PLACES]
    return [places[k] for k in sorted(drawn.tolist())]


def _all_alike(bank: Bank) -> Bootstrap:
    """The bootstrap of a bank whose pairs all count alike, whatever their family."""
    return Bootstrap(replace(bank, family=torch.zeros_like(bank.family), families=("all",)))


def _where_told(recording: BankRecording, variable: str, part: str) -> BankRecording:
    """The pairs where swapping a part of a variable alone would show, and not as the variable's own swap."""
    pairs, alone = _swapped_alone(recording.bank, part)
    recording = recording.select(pairs)
    bank, accepts = recording.bank, recording.bank.causal.accepts
    own = bank.labels[variable]
    told = ~accepts(alone, bank.base_answer) & ~accepts(alone, own) & ~accepts(own, alone)
    return replace(recording, bank=replace(bank, labels={**bank.labels, ALONE: alone})).select(told)


def _swapped_alone(bank: Bank, part: str) -> tuple[Int[Tensor, " pairs"], Tensor]:
    """The pairs whose mixture of values the causal model was written for, and the answers to swapping a part alone."""
    causal = bank.causal
    values = causal.run(bank.source)[part]

    def answers(pairs: slice) -> Tensor:
        return causal.run(bank.base[pairs], do={part: values[pairs]})[causal.output]

    with contextlib.suppress(Exception):  # a user's function, and whatever it does when it fails
        return torch.arange(len(bank)), answers(slice(None))
    found: dict[int, Tensor] = {}
    for k in range(len(bank)):
        with contextlib.suppress(Exception):
            found[k] = answers(slice(k, k + 1))
    some = torch.tensor(list(found), dtype=torch.long)
    return some, torch.cat(list(found.values())) if found else bank.base_answer[:0]


def _said(gate: Gate) -> bool:
    return gate.answer is not Answer.CANNOT_SAY


def _mean(scores: Sequence[Score]) -> Score:
    drawn = np.mean([s.drawn for s in scores], axis=0)
    return Score(float(np.mean([s.value for s in scores])), drawn, min(s.bases for s in scores))
