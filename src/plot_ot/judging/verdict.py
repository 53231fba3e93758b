"""The verdict on a variable: a table of gates, read in a fixed order (DESIGN §8). Saying no is a feature."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from numpy import ndarray

from plot_ot.errors import unknown
from plot_ot.handles import Handle
from plot_ot.judging import gates as g
from plot_ot.judging.controls import Score, controls, full_patch, random_subspaces, score
from plot_ot.judging.gates import LEAST_PAIRS, Answer, Gate
from plot_ot.judging.intervals import Accuracy, Bootstrap, Interval
from plot_ot.judging.status import Status
from plot_ot.judging.usage import read_from_used
from plot_ot.signatures import Readout
from plot_ot.stages.calibrate import correct
from plot_ot.subjects import BankRecording

OUTPUT = 0.9
"""Share of pairs on which a place patched whole must set an output variable to be called its earliest place."""
VACUOUS = {"shuffled": "shuffled values", "reinitialised": "a re-initialised network"}
RANDOM_HANDLES, RANDOM_AT_ONCE, SUBSPACES = 20, 5, 20
"""Random handles at most; drawn so many at a time until their gates have an answer; random subspaces."""


@dataclass(frozen=True)
class Verdict:
    """What the test banks say about one variable's handle, with the gates and the numbers behind it."""

    variable: str
    status: Status
    sentence: str
    evidence: Mapping[str, float]
    gates: tuple[Gate, ...] = ()
    notes: tuple[str, ...] = ()
    """What to be careful about, one sentence each."""

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> Verdict:
        """A verdict as it was before it was written to a file."""
        gates = tuple(Gate(**{**gate, "answer": Answer(gate["answer"])}) for gate in row.get("gates", ()))
        notes = tuple(row.get("notes", ()))
        return cls(row["variable"], Status(row["status"]), row["sentence"], row["evidence"], gates, notes)

    def as_row(self) -> dict[str, Any]:
        """The verdict as plain values, for a file."""
        return {**asdict(self), "gates": [asdict(gate) for gate in self.gates], "notes": list(self.notes)}

    @property
    def accuracy(self) -> float | None:
        """The share of discriminating test pairs that the handle gets right, families weighted equally."""
        return self.evidence.get("handle")

    @property
    def interval(self) -> tuple[float, float] | None:
        """The 95 % interval of the accuracy."""
        low, high = (self.evidence.get(f"handle_{end}") for end in ("low", "high"))
        return None if low is None or high is None else (low, high)

    def with_notes(self, notes: Sequence[str]) -> Verdict:
        """The verdict with more to be careful about, which its sentence says as well."""
        if not notes:
            return self
        said = " ".join(f"Note: {note}." for note in notes)
        return replace(self, sentence=f"{self.sentence} {said}", notes=(*self.notes, *notes))

    def gate(self, name: str) -> Gate:
        """The gate of that name."""
        for gate in self.gates:
            if gate.name == name:
                return gate
        unknown("gate", name, [gate.name for gate in self.gates])

    def __str__(self) -> str:
        return self.sentence


@dataclass(frozen=True)
class Opponents:
    """The controls that cost a search of their own, as a verdict asks for them."""

    random: Callable[[int], Handle]
    """The k-th random handle: a random ranking of sites, then the same search."""
    shuffled: Sequence[Score] = ()
    """What the same search reaches on shuffled values of the variable."""
    reinitialised: Sequence[Score] = ()
    """What it reaches in networks of the same shape with fresh weights."""


def judge(
    handle: Handle,
    sensitivity: BankRecording,
    invariance: BankRecording,
    fit: BankRecording,
    calibration: BankRecording,
    opponents: Opponents,
    readout: Readout,
    generator: torch.Generator,
) -> Verdict:
    """Ask every gate about a handle, on discriminating test pairs with families weighted equally."""
    variable, subject = handle.variable, sensitivity.subject
    power = sensitivity.bank.power(variable)
    if power.is_output:
        return _output_variable(variable, sensitivity, readout)
    gaps = power.missing(LEAST_PAIRS)
    if gaps:
        sentence = f"{variable}: undecided with these pairs; too few {'; '.join(gaps)}."
        return Verdict(variable, Status.UNDECIDED, sentence, {"discriminating": power.discriminating})

    bench = _Bench(variable, sensitivity, invariance, opponents, readout)
    boot, on = bench.boot, bench.on
    right = on(handle)
    found = bench.judged(handle, right)
    table = list(found.gates)
    worked = found.works
    numbers: dict[str, float] = {"score": found.score.value} if found.score and bench.vacuous else {}
    numbers |= {key: mean.value for key, mean in bench.vacuous.items() if found.score}
    notes, honest = [], None
    if not any(
        gate.fails and gate is not worked for gate in table
    ):  # where the answer is no, nobody asks what it reads
        rebuilt = read_from_used(handle, fit, calibration, readout, generator)
        if rebuilt is None:
            notes.append("it reads through an encoder, so whether that reading is used later was not tested")
        else:
            again = on(rebuilt.handle)
            numbers["read_from_used"] = boot.balanced(again)[0]
            table.append(g.reads_what_is_used(boot.interval(again - right), rebuilt.used, rebuilt.width))
            if not worked.holds:
                honest = bench.judged(rebuilt.handle, again)
                honest = replace(honest, kept_most=boot.interval(again - right / 2).low > 0)
    subspaces = [on(h) for h in random_subspaces(handle, SUBSPACES, generator)]
    patched = on(full_patch(variable, [e.place for e in handle.edits], subject))
    dimensions = sum(e.place.width for e in handle.edits)
    small = g.compact(
        handle.size, dimensions, boot.interval(right - patched), boot.interval(right - np.mean(subspaces, axis=0))
    )
    accuracy, kept = found.accuracy, found.kept
    numbers = {
        "handle": accuracy.value,
        "handle_low": accuracy.low,
        "handle_high": accuracy.high,
        "invariance": kept.value,
        "invariance_low": kept.low,
        "copy_source": boot.balanced(bench.copied)[0],
        "random_mean": boot.balanced(np.mean(bench.at_random, axis=0))[0],
        "random_best": max(boot.balanced(r)[0] for r in bench.at_random),
        "random_handles": len(bench.at_random),
        "random_places": boot.balanced(bench.everywhere)[0],
        "random_subspace": boot.balanced(np.mean(subspaces, axis=0))[0],
        "full_patch": boot.balanced(patched)[0],
        "size": handle.size,
        "width": dimensions,
        "discriminating": power.discriminating,
        "base_inputs": boot.shape[0],
        **numbers,
    }
    status = decide(table, worked, small, honest is not None and honest.in_part)
    part = honest.accuracy if honest is not None and honest.in_part else accuracy
    sentence = _sentence(handle, status, table, part, found, numbers)
    return Verdict(variable, status, sentence, numbers, (*table, small), tuple(notes))


@dataclass(frozen=True)
class _Judged:
    """One handle before the gates that every handle must pass."""

    accuracy: Accuracy
    kept: Accuracy
    score: Score | None
    gates: tuple[Gate, ...]
    """Against the controls; then `works` and `leaves the rest alone`."""
    kept_most: bool = True
    """Of a rebuilt handle: whether it is right at least half as often as the handle it was made of, beyond doubt."""

    @property
    def works(self) -> Gate:
        return self.gates[-2]

    @property
    def in_part(self) -> bool:
        """Whether it shows by itself that a part of the variable is there."""
        return self.kept_most and self.works.fails and all(gate.holds for gate in self.gates if gate is not self.works)


class _Bench:
    """The test pairs of one variable and what its controls did on them."""

    def __init__(
        self,
        variable: str,
        sensitivity: BankRecording,
        invariance: BankRecording,
        opponents: Opponents,
        readout: Readout,
    ) -> None:
        self.tested = sensitivity.select(sensitivity.bank.discriminating(variable))
        self.sensitivity, self.invariance, self.readout = sensitivity, invariance, readout
        self.boot, self.boot_kept = Bootstrap(self.tested.bank), Bootstrap(invariance.bank)
        self.opponents, subject = opponents, sensitivity.subject
        self.copied = controls(self.tested, variable, readout)["copy-source"].double().numpy()
        self.everywhere = np.mean([self.on(full_patch(variable, [p], subject)) for p in subject.places], axis=0)
        self.at_random: list[ndarray] = []
        others = {"shuffled": opponents.shuffled, "reinitialised": opponents.reinitialised}
        self.vacuous = {key: _mean(scores) for key, scores in others.items() if scores}

    def on(self, handle: Handle) -> Float[ndarray, " pairs"]:
        """Whether a handle is right on each of the discriminating pairs."""
        return correct(self.tested, handle, self.readout).double().numpy()

    def judged(self, handle: Handle, right: Float[ndarray, " pairs"]) -> _Judged:
        """The gates of a handle that is right on these pairs."""
        accuracy = self.boot.accuracy(torch.from_numpy(right > 0), balanced=True)
        kept = self.boot_kept.accuracy(correct(self.invariance, handle, self.readout), balanced=True)
        gates = [
            g.beats("copying the source", self.boot.interval(right - self.copied)),
            g.beats("random places", self.boot.interval(right - self.everywhere)),
            *self._against_random(right),
        ]
        own = score([self.sensitivity, self.invariance], handle, self.readout)
        if own is not None:
            gates += [g.beats(VACUOUS[key], own.ahead_of(mean)) for key, mean in self.vacuous.items()]
        gates.append(g.works(accuracy, self.boot.balanced_bases))
        gates.append(g.leaves_the_rest_alone(kept, self.boot_kept.balanced_bases))
        return _Judged(accuracy, kept, own, tuple(gates))

    def _against_random(self, right: Float[ndarray, " pairs"]) -> list[Gate]:
        """Random handles, drawn until their gates have an answer; the mean's interval also resamples the handles."""
        mine, mine_drawn = self.boot.balanced(right)
        rng = np.random.default_rng(3)
        while True:
            drawn = len(self.at_random)
            if drawn:
                each = [self.boot.balanced(r) for r in self.at_random]
                draws = np.stack([d for _, d in each])
                chosen = rng.integers(drawn, size=draws.shape)
                mean = np.take_along_axis(draws, chosen, axis=0).mean(axis=0)
                difference = mine - float(np.mean([m for m, _ in each]))
                best = max(range(drawn), key=lambda k: each[k][0])
                gates = [
                    g.beats("random handles", Interval.of(difference, mine_drawn - mean, self.boot.balanced_bases)),
                    g.none_better(drawn, self.boot.interval(right - self.at_random[best])),
                ]
                if drawn >= RANDOM_HANDLES or all(gate.answer is not Answer.CANNOT_SAY for gate in gates):
                    return gates
            more = range(drawn, min(drawn + RANDOM_AT_ONCE, RANDOM_HANDLES))
            self.at_random += [self.on(self.opponents.random(k)) for k in more]


def decide(table: Sequence[Gate], worked: Gate, small: Gate, in_part: bool = False) -> Status:
    """The status that a table of gates makes; `small` only tells placed from placed and compact.

    `in_part` says that the handle, rebuilt from what is used, shows by itself that a part of the variable is there.
    """
    broken = [gate for gate in table if gate.fails]
    if any(gate.name not in ("works", "reads what is used") for gate in broken):
        return Status.ABSENT
    honest = all(gate.holds for gate in table if gate.name == "reads what is used")
    against_controls = [gate for gate in table if gate.name.startswith(("beats", "no random"))]
    if worked.fails and honest and all(gate.holds for gate in against_controls):
        return Status.IN_PART
    if in_part and (worked.fails or not honest):
        return Status.IN_PART
    if any(gate.name == "reads what is used" for gate in broken):
        return Status.DECODABLE
    if any(not gate.holds for gate in table):
        return Status.UNDECIDED
    return Status.COMPACT if small.holds else Status.PLACED


def _mean(scores: Sequence[Score]) -> Score:
    drawn = np.mean([s.drawn for s in scores], axis=0)
    return Score(float(np.mean([s.value for s in scores])), drawn, min(s.bases for s in scores))


# -- words ------------------------------------------------------------------------------------------------------------


def _sentence(
    handle: Handle, status: Status, table: Sequence[Gate], part: Accuracy, found: _Judged, n: Mapping[str, float]
) -> str:
    where, variable, accuracy, kept = ", ".join(handle.places), handle.variable, found.accuracy, found.kept
    numbers = (
        f"handle {accuracy.value:.3f} [{accuracy.low:.3f}, {accuracy.high:.3f}], full patch {n['full_patch']:.3f}, "
        f"copy-source {n['copy_source']:.3f}, random {n['random_mean']:.3f}, invariance {kept.value:.3f}"
    )
    also = f"{numbers[0].upper()}{numbers[1:]}."
    if status is Status.COMPACT:
        return f"{variable}: placed in {where}, compact in {handle.size} of {n['width']} dimensions; {numbers}."
    if status is Status.PLACED:
        return f"{variable}: placed in {where}; {numbers}."
    if status is Status.IN_PART:
        best = max(n["copy_source"], n["random_mean"], n["random_places"], 0.0)
        closed = (part.value - best) / max(1 - best, 1e-9)
        who = "the handle" if part is accuracy else "rebuilt from what is used later, the handle"
        return (
            f"{variable}: in part in {where}: {who} beats every control but is right on only "
            f"{part.value:.0%} of the discriminating pairs [{part.low:.0%}, {part.high:.0%}]; it closes "
            f"{closed:.0%} of the gap between the best control and always right. {also}"
        )
    if status is Status.UNDECIDED:
        open_gates = [gate for gate in table if gate.answer is Answer.CANNOT_SAY]
        return (
            f"{variable}: undecided with these pairs ({where}): {'; '.join(x.sentence for x in open_gates)}. "
            f"{_wanted(g.deciding(open_gates))} {also}"
        )
    reasons = "; ".join(gate.sentence for gate in table if gate.fails)
    name = "decodable here, not used here" if status is Status.DECODABLE else "not localized here"
    return f"{variable}: {name} ({where}): {reasons}. {also}"


def _wanted(more: float) -> str:
    """About how many more pairs would decide, in words."""
    if not math.isfinite(more) or more > 100:
        return "More pairs of this kind would hardly decide it: the handle lies almost exactly at the bound."
    return f"About {max(1.5, more):.2g} times as many base inputs would decide."


def _output_variable(variable: str, sensitivity: BankRecording, readout: Readout) -> Verdict:
    """A variable that copying the source also sets: all there is to say is from where on a patch does it."""
    subject, reached = sensitivity.subject, 0.0
    said = f"{variable}: an output variable (its label always equals the source's answer); copying it proves nothing."
    for place in subject.places:
        right = correct(sensitivity, full_patch(variable, [place], subject), readout)
        reached = max(reached, float(right.double().mean()))
        if reached >= OUTPUT:
            said += f" The earliest place that sets it, patched whole, is {place.name} ({reached:.3f})."
            break
    else:
        said += f" No place patched whole sets it on {OUTPUT:.0%} of the pairs (at best {reached:.3f})."
    numbers = {"pairs": sensitivity.bank.power(variable).pairs, "patch": reached}
    return Verdict(variable, Status.OUTPUT, said, numbers)
