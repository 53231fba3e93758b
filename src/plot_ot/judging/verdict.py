"""The verdict on a variable: a table of gates, read in a fixed order (DESIGN §8). Saying no is a feature."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

import torch

from plot_ot.errors import unknown
from plot_ot.handles import Handle
from plot_ot.judging import gates as g
from plot_ot.judging.bench import Bench, Plain
from plot_ot.judging.controls import Score, full_patch, random_subspaces
from plot_ot.judging.gates import LEAST_PAIRS, Answer, Gate
from plot_ot.judging.intervals import Accuracy
from plot_ot.judging.status import Status
from plot_ot.judging.usage import Rebuilt, read_from_used
from plot_ot.signatures import Readout
from plot_ot.stages.calibrate import correct
from plot_ot.subjects import BankRecording, Place

OUTPUT = 0.9
"""Share of calibration pairs on which a place patched whole must set an output variable to be called the earliest."""
SUBSPACES = 20
"""Random subspaces that a compact handle is compared with."""


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

    random: Callable[[int], Handle] | None
    """The k-th random handle: a random ranking of sites, then the same search. None where random controls are not
    asked: the verdict is then at most undecided."""
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
    tested = stand(handle.variable, sensitivity, invariance, calibration, readout)
    return Case.of(handle, tested, fit, calibration, generator).verdict(opponents)


def stand(
    variable: str,
    sensitivity: BankRecording,
    invariance: BankRecording,
    calibration: BankRecording,
    readout: Readout,
    sampled: bool = False,
) -> Verdict | Bench:
    """What all handles of a variable stand before: its test pairs, or the verdict where these alone give it.

    `sampled` asks controls about a sample of the pairs first.
    """
    beforehand = said_beforehand(variable, sensitivity, calibration, readout)
    return beforehand or Bench(variable, sensitivity, invariance, readout, sampled)


def said_beforehand(
    variable: str, sensitivity: BankRecording, calibration: BankRecording, readout: Readout
) -> Verdict | None:
    """The verdict where the pairs alone give it: on an output variable, or where too few pairs tell anything."""
    power = sensitivity.bank.power(variable)
    if power.is_output:
        return _output_variable(variable, sensitivity, calibration, readout)
    gaps = power.missing(LEAST_PAIRS)
    if not gaps:
        return None
    sentence = (
        f"{variable}: undecided with these pairs; too few {'; '.join(gaps)}. At least {LEAST_PAIRS} are needed: draw "
        f"more pairs per bank (a larger `size`), or give inputs or pairs that have more of them."
    )
    return Verdict(variable, Status.UNDECIDED, sentence, {"discriminating": power.discriminating})


@dataclass(frozen=True)
class Case:
    """A handle before its judge: what the gates say that need no search, and whether the others need to be asked."""

    handle: Handle
    bench: Bench | None
    """The test pairs; None where these alone give the verdict."""
    beforehand: Verdict | None
    plain: Plain | None
    """The handle on the test pairs."""
    fit: BankRecording
    calibration: BankRecording
    generator: torch.Generator

    @classmethod
    def of(
        cls,
        handle: Handle,
        tested: Verdict | Bench,
        fit: BankRecording,
        calibration: BankRecording,
        generator: torch.Generator,
    ) -> Case:
        """The case of a handle on the test pairs that all handles of its variable stand before."""
        if isinstance(tested, Verdict):
            return cls(handle, None, tested, None, fit, calibration, generator)
        bench = tested.anew()
        return cls(handle, bench, None, bench.plainly(handle), fit, calibration, generator)

    @property
    def open(self) -> bool:
        """Whether controls that need a search can change the answer: where a plain gate fails, it is no anyway."""
        return self.plain is not None and not self.plain.refused

    @property
    def waits(self) -> bool:
        """Whether no control that needs a search could make the verdict a yes, and nothing known makes it a no.

        Then a look with more pairs will ask them. A yes needs the handle's own gates, and that it reads what is used or
        is right when rebuilt from it, more often than any random place. That a rebuilt handle is right in part is a yes
        whatever the handle's own gates.
        """
        if self.plain is None or self.plain.refused:
            return False
        if self.again is None or self.reads is None:
            return self.plain.waits
        may_be_own = not self.plain.waits and self.reads.holds
        may_be_rebuilt = not self.again.waits and (self.again.works.fails or not self.plain.waits)
        if self.reads.fails or may_be_own:
            return False
        assert self.bench is not None  # noqa: S101
        return not may_be_rebuilt or self.bench.outdone(self.again)

    @cached_property
    def _rebuilt(self) -> Rebuilt | None:
        """The handle made of what is used later; None where that cannot be told."""
        assert self.bench is not None  # noqa: S101
        return read_from_used(self.handle, self.fit, self.calibration, self.bench.readout, self.generator)

    @cached_property
    def again(self) -> Plain | None:
        """The rebuilt handle on the test pairs."""
        assert self.bench is not None  # noqa: S101
        return None if self._rebuilt is None else self.bench.plainly(self._rebuilt.handle)

    @cached_property
    def reads(self) -> Gate | None:
        """Whether the handle reads what is used later."""
        if self.bench is None or self.plain is None or self.again is None or self._rebuilt is None:
            return None
        difference = self.bench.boot.interval(self.again.right - self.plain.right)
        return g.reads_what_is_used(difference, self._rebuilt.used, self._rebuilt.width)

    def verdict(self, opponents: Opponents) -> Verdict:
        """Every gate's answer, and what they come to."""
        if self.bench is None or self.plain is None:
            assert self.beforehand is not None  # noqa: S101
            return self.beforehand
        handle, bench, plain = self.handle, self.bench, self.plain
        boot, right = bench.boot, plain.right
        found = bench.judged(plain, opponents)
        worked = plain.works
        table = [*found.gates, *(bench.made_of(handle) if worked.fails and not plain.refused else ())]
        numbers: dict[str, float] = {}
        if plain.score and bench.vacuous(opponents):
            numbers["score"] = plain.score.value
            numbers |= {key: mean.value for key, mean in bench.vacuous(opponents).items()}
        notes, honest = [], None
        if not any(gate.fails and gate is not worked for gate in table):  # else nobody asks what it reads
            again, reads = self.again, self.reads
            if self._rebuilt is None or again is None or reads is None:
                notes.append("it reads through an encoder, so whether that reading is used later was not tested")
            else:
                numbers["read_from_used"] = boot.balanced(again.right)[0]
                if opponents.random is not None and not (worked.holds and reads.holds):
                    alone = bench.judged(again, opponents)
                    if not reads.holds and alone.placed:
                        loses, reads = reads.fails, g.works_from_what_is_used(reads, again.accuracy)
                        if loses:
                            notes.append(f"it also reads directions that are hardly used later: {reads.sentence}")
                    if not worked.holds:
                        most = boot.interval(again.right - right / 2).low > 0
                        parts = bench.made_of(self._rebuilt.handle) if most and alone.in_part else ()
                        honest = replace(alone, gates=(*alone.gates, *parts), kept_most=most)
                table.append(reads)
        patched = bench.on(full_patch(handle.variable, [e.place for e in handle.edits], bench.subject))
        dimensions = sum(e.place.width for e in handle.edits)
        small = None
        if opponents.random is not None:
            subspaces = random_subspaces(handle, SUBSPACES, self.generator)
            ahead, numbers["random_subspace"] = bench.ahead_of_subspaces(right, subspaces)
            small = g.compact(handle.size, dimensions, boot.interval(right - patched), ahead)
        accuracy, kept = plain.accuracy, plain.kept
        numbers = {
            "handle": accuracy.value,
            "handle_low": accuracy.low,
            "handle_high": accuracy.high,
            "invariance": kept.value,
            "invariance_low": kept.low,
            "copy_source": boot.balanced(bench.copied)[0],
            **bench.numbers(handle),
            "full_patch": boot.balanced(patched)[0],
            "size": handle.size,
            "width": dimensions,
            "discriminating": bench.sensitivity.bank.power(handle.variable).discriminating,
            "keeping": len(bench.invariance),
            "base_inputs": boot.shape[0],
            **numbers,
        }
        status, part = decide(table, worked, small), accuracy
        if honest is not None and honest.in_part and status is not Status.IN_PART:
            status, part = decide(table, worked, small, in_part=True), honest.plain.accuracy
        assert opponents.random is not None or not status.found  # noqa: S101  no yes before all controls were asked
        if opponents.random is None and status is Status.UNDECIDED:
            notes.append("controls that need a search, random handles among them, are asked when more pairs are there")
        sentence = _sentence(handle, status, table, part, plain, numbers)
        gates = (*table, *([small] if small else []))
        return Verdict(handle.variable, status, sentence, numbers, gates).with_notes(notes)


def decide(table: Sequence[Gate], worked: Gate, small: Gate | None, in_part: bool = False) -> Status:
    """The status that a table of gates makes; `small`, if it was asked, only tells placed from placed and compact.

    `in_part` says that the handle, rebuilt from what is used, shows by itself that a part of the variable is there.
    """
    broken = [gate for gate in table if gate.fails]
    if any(gate.name not in ("works", "reads what is used") for gate in broken):
        return Status.ABSENT
    honest = all(gate.holds for gate in table if gate.name == "reads what is used")
    if worked.fails and all(gate.holds for gate in table if gate is not worked):
        return Status.IN_PART
    if in_part and (worked.fails or not honest):
        return Status.IN_PART
    if any(gate.name == "reads what is used" for gate in broken):
        return Status.DECODABLE
    if any(not gate.holds for gate in table):
        return Status.UNDECIDED
    return Status.COMPACT if small and small.holds else Status.PLACED


# -- words ------------------------------------------------------------------------------------------------------------


def _sentence(
    handle: Handle, status: Status, table: Sequence[Gate], part: Accuracy, found: Plain, n: Mapping[str, float]
) -> str:
    where, variable, accuracy, kept = ", ".join(handle.places), handle.variable, found.accuracy, found.kept
    at_random = f", random handles on {n['random_mean']:.3f}" if "random_mean" in n else ""
    numbers = (
        f"of {n['discriminating']} discriminating test pairs, the handle is right on {accuracy.value:.3f} "
        f"[{accuracy.low:.3f}, {accuracy.high:.3f}], patching the whole place on {n['full_patch']:.3f}, copying the "
        f"source on {n['copy_source']:.3f}{at_random}; of {n['keeping']} test pairs that keep the variable, the handle "
        f"leaves {kept.value:.3f} right"
    )
    also = f"{numbers[0].upper()}{numbers[1:]}."
    if status is Status.COMPACT:
        return f"{variable}: placed in {where}, compact in {handle.size} of {n['width']} dimensions; {numbers}."
    if status is Status.PLACED:
        return f"{variable}: placed in {where}; {numbers}."
    if status is Status.IN_PART:
        best = max(n["copy_source"], n.get("random_mean", 0.0), n.get("random_places", 0.0), 0.0)
        closed = (part.value - best) / max(1 - best, 1e-9)
        who = "the handle" if part is accuracy else "rebuilt from what is used later, the handle"
        return (
            f"{variable}: in part in {where}: {who} beats every control but is right on only "
            f"{part.value:.0%} of the discriminating pairs [{part.low:.0%}, {part.high:.0%}]; it closes "
            f"{closed:.0%} of the gap between the best control and always right. {also}"
        )
    if status is Status.UNDECIDED:
        open_gates = [gate for gate in table if gate.answer is Answer.CANNOT_SAY]
        whole = ""
        if any(gate.name == "works" and gate.fails for gate in table):
            whole = (
                f"the handle does not carry the whole variable (it is right on at most {accuracy.high:.0%} of the "
                f"discriminating pairs), and whether it carries a part of it is open: "
            )
        return (
            f"{variable}: undecided with these pairs ({where}): {whole}{'; '.join(x.sentence for x in open_gates)}. "
            f"{_wanted(g.deciding(open_gates))} {also}"
        )
    reasons = "; ".join(gate.sentence for gate in table if gate.fails)
    name = "decodable here, not used here" if status is Status.DECODABLE else "not localized here"
    return f"{variable}: {name} ({where}): {reasons}. {also}"


def _wanted(more: float) -> str:
    """About how many more pairs would decide, in words."""
    if more == g.SHARED:
        return "Not more pairs but other places would decide: at these, nearly any swap carries it."
    if not math.isfinite(more) or more > 100:
        return "More pairs of this kind would hardly decide it: the handle lies almost exactly at the bound."
    return f"About {max(1.5, more):.2g} times as many base inputs would decide."


def _output_variable(
    variable: str, sensitivity: BankRecording, calibration: BankRecording, readout: Readout
) -> Verdict:
    """A variable that copying the source also sets: all there is to say is from where on a patch does it.

    Calibration pairs find the earliest place that does, or the best one; test pairs say how often.
    """
    subject, pairs = sensitivity.subject, sensitivity.bank.power(variable).pairs
    looked = calibration.select(calibration.bank.changed[variable])

    def reached(recording: BankRecording, place: Place) -> float:
        return float(correct(recording, full_patch(variable, [place], subject), readout).double().mean())

    best, most = subject.places[0], -1.0
    for place in subject.places:
        here = reached(looked, place)
        if here > most:
            best, most = place, here
        if most >= OUTPUT:
            break
    share = reached(sensitivity, best)
    said = f"{variable}: an output variable (its label always equals the source's answer); copying it proves nothing."
    if most >= OUTPUT:
        said += (
            f" The earliest place that sets it when patched whole is {best.name}: the answer is right on "
            f"{share:.3f} of {pairs} test pairs."
        )
    else:
        said += (
            f" No place patched whole sets it on {OUTPUT:.0%} of calibration pairs (at best {best.name}: on "
            f"{share:.3f} of {pairs} test pairs)."
        )
    return Verdict(variable, Status.OUTPUT, said, {"pairs": pairs, "patch": share})
