"""Accuracies with intervals, controls, and the verdict on a variable (DESIGN §8). Saying no is a feature."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float
from numpy import ndarray
from torch import Tensor

from plot_ot.abstract.banks import Bank
from plot_ot.edits import Frame
from plot_ot.handles import Edit, Handle
from plot_ot.judging.status import Status
from plot_ot.signatures import Readout
from plot_ot.stages.calibrate import correct
from plot_ot.subjects import BankRecording, Place, Subject

MARGIN, COMPACT_LOSS, INVARIANCE, LEAST, DRAWS = 0.05, 0.02, 0.9, 10, 1000
OUTPUT = 0.9
"""Share of pairs on which a place patched whole must set an output variable to be called its earliest place."""


@dataclass(frozen=True)
class Accuracy:
    """A share of correct pairs with its 95 % bootstrap interval over base inputs."""

    value: float
    pairs: int
    low: float
    high: float


class Bootstrap:
    """Resamples the base inputs of a bank; the same draws for every method, so differences are paired."""

    def __init__(self, bank: Bank, draws: int = DRAWS) -> None:
        groups = bank.base_groups().numpy()
        present, family = np.unique(bank.family.numpy(), return_inverse=True)
        self.families = tuple(bank.families[f] for f in present)
        self.shape = (int(groups.max()) + 1, len(present))
        self.cell = groups * len(present) + family
        count = self._per_cell(np.ones(len(groups)))
        even = np.full(self.shape[0], 1 / self.shape[0])
        drawn = np.random.default_rng(0).multinomial(self.shape[0], even, size=draws)
        self.weights = drawn.astype(np.float32)
        self.sizes = self.weights @ count
        self.count, self.bases = count.sum(axis=0), (count > 0).sum(axis=0)

    def _per_cell(self, values: Float[ndarray, " pairs"]) -> Float[ndarray, "bases families"]:
        cells = self.shape[0] * self.shape[1]
        return np.bincount(self.cell, weights=values, minlength=cells).reshape(self.shape).astype(np.float32)

    def _resample(self, values: Float[ndarray, " pairs"]) -> tuple[Float[ndarray, " families"], ndarray]:
        """Sums per family, and in every draw."""
        sums = self._per_cell(values)
        return sums.sum(axis=0, dtype=np.float64), self.weights @ sums

    def balanced(self, values: Float[ndarray, " pairs"]) -> tuple[float, Float[ndarray, " draws"]]:
        """The mean with families weighted equally, and its draws."""
        sums, drawn = self._resample(values)
        with np.errstate(invalid="ignore", divide="ignore"):
            per_family = np.where(self.sizes > 0, drawn / self.sizes, np.nan)
        return float((sums / self.count).mean()), np.nanmean(per_family, axis=1)

    def accuracy(self, right: Bool[Tensor, " pairs"], balanced: bool = False) -> Accuracy:
        """Mean and interval of correctness over all pairs, or with families weighted equally."""
        values = right.double().numpy()
        if balanced:
            mean, drawn = self.balanced(values)
            # what was never seen could at worst hide in the smallest family, which has one share in the mean
            return _accuracy(mean, drawn, len(values), int(self.bases.min()) * len(self.families))
        _, draws = self._resample(values)
        drawn = draws.sum(axis=1) / self.sizes.sum(axis=1)
        return _accuracy(float(values.mean()), drawn, len(values), self.shape[0])

    def by_family(self, right: Bool[Tensor, " pairs"]) -> dict[str, Accuracy]:
        """Mean and interval within every family."""
        sums, draws = self._resample(right.double().numpy())
        found = {}
        for f, name in enumerate(self.families):
            some = self.sizes[:, f] > 0
            drawn = draws[some, f] / self.sizes[some, f]
            found[name] = _accuracy(float(sums[f] / self.count[f]), drawn, int(self.count[f]), int(self.bases[f]))
        return found

    def beats(self, right: Tensor, control: Float[ndarray, " pairs"], margin: float) -> tuple[bool, float]:
        """Whether the lower 95 % bound of (handle - control) exceeds the margin; and that bound."""
        _, drawn = self.balanced(right.double().numpy() - control)
        low = float(np.quantile(drawn, 0.025))
        return low > margin, low


def _accuracy(mean: float, drawn: ndarray, pairs: int, bases: int) -> Accuracy:
    """The percentile interval; with no variation to resample, the rule of three over base inputs."""
    low, high = (float(q) for q in np.quantile(drawn, (0.025, 0.975)))
    unseen = min(1.0, 3 / bases)
    if mean == 1.0:
        low = 1 - unseen
    elif mean == 0.0:
        high = unseen
    return Accuracy(mean, pairs, low, high)


def answers_right(outputs: Tensor, recording: BankRecording, variable: str, look: Readout) -> Bool[Tensor, " pairs"]:
    """Whether given outputs, one per pair, are the variable's counterfactual labels."""
    labels = recording.bank.labels[variable].to(outputs.device)
    return look.correct(outputs.unsqueeze(0), labels)[0].cpu()


def controls(recording: BankRecording, variable: str, look: Readout) -> dict[str, Bool[Tensor, " pairs"]]:
    """Correctness of doing nothing and of copying the source's answer."""
    return {
        "no-edit": answers_right(recording.base_outputs, recording, variable, look),
        "copy-source": answers_right(recording.source_outputs, recording, variable, look),
    }


def full_patch(variable: str, places: list[Place], subject: Subject) -> Handle:
    """Everything at these places taken from the source."""
    edits = tuple(Edit(p, Frame.identity(p.width), torch.ones(p.width)) for p in places)
    return Handle(variable, edits, subject.identity())


def random_subspaces(handle: Handle, count: int, generator: torch.Generator) -> list[Handle]:
    """Handles of the same size at the same places, in random directions."""
    drawn = []
    for _ in range(count):
        edits = []
        for e in handle.edits:
            basis = torch.linalg.qr(torch.randn(e.place.width, e.size, generator=generator))[0]
            edits.append(Edit(e.place, Frame.orthonormal(basis, "random"), torch.ones(e.size)))
        drawn.append(Handle(handle.variable, tuple(edits), handle.subject))
    return drawn


@dataclass(frozen=True)
class Verdict:
    """What the test banks say about one variable's handle, with the numbers behind it."""

    variable: str
    status: Status
    sentence: str
    evidence: Mapping[str, float]

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> Verdict:
        """A verdict as it was before it was written to a file."""
        return cls(row["variable"], Status(row["status"]), row["sentence"], row["evidence"])

    @property
    def accuracy(self) -> float | None:
        """The share of discriminating test pairs that the handle gets right, families weighted equally."""
        return self.evidence.get("handle")

    @property
    def interval(self) -> tuple[float, float] | None:
        """The 95 % interval of the accuracy."""
        low, high = (self.evidence.get(f"handle_{end}") for end in ("low", "high"))
        return None if low is None or high is None else (low, high)

    def __str__(self) -> str:
        return self.sentence


def judge(
    handle: Handle,
    sensitivity: BankRecording,
    invariance: BankRecording,
    random_handles: list[Handle],
    look: Readout,
    generator: torch.Generator,
) -> Verdict:
    """Compare a handle with its controls on discriminating pairs, families weighted equally."""
    variable, subject = handle.variable, sensitivity.subject
    power = sensitivity.bank.power(variable)
    if power.is_output:
        return _output_variable(variable, sensitivity, look)
    gaps = power.missing(LEAST)
    if gaps:
        sentence = f"{variable}: undecided with these pairs; too few {'; '.join(gaps)}."
        return Verdict(variable, Status.UNDECIDED, sentence, {"discriminating": power.discriminating})

    tested = sensitivity.select(sensitivity.bank.discriminating(variable))
    boot = Bootstrap(tested.bank)

    def on(h: Handle) -> ndarray:
        return correct(tested, h, look).double().numpy()

    mine = correct(tested, handle, look)
    score = boot.accuracy(mine, balanced=True)
    kept = Bootstrap(invariance.bank).accuracy(correct(invariance, handle, look), balanced=True)
    at_random = [on(h) for h in random_handles]
    everywhere = np.mean([on(full_patch(variable, [p], subject)) for p in subject.places], axis=0)
    copied = controls(tested, variable, look)["copy-source"].double().numpy()
    patched = on(full_patch(variable, [e.place for e in handle.edits], subject))
    evidence = {
        "handle": score.value,
        "handle_low": score.low,
        "handle_high": score.high,
        "invariance": kept.value,
        "invariance_low": kept.low,
        "copy_source": boot.balanced(copied)[0],
        "random_mean": boot.balanced(np.mean(at_random, axis=0))[0],
        "random_best": max(boot.balanced(r)[0] for r in at_random),
        "random_places": boot.balanced(everywhere)[0],
        "full_patch": boot.balanced(patched)[0],
        "size": handle.size,
        "width": sum(e.place.width for e in handle.edits),
        "discriminating": power.discriminating,
    }
    failures = []
    for name, control in (
        ("copying the source", copied),
        ("random places", everywhere),
        ("random handles", np.mean(at_random, axis=0)),
    ):
        ahead, low = boot.beats(mine, control, MARGIN)
        if not ahead:
            failures.append(f"does not beat {name} by {MARGIN} (lower bound of the difference {low:+.3f})")
    if evidence["handle"] < evidence["random_best"]:
        failures.append(f"one of {len(at_random)} random handles does better, {evidence['random_best']:.3f}")
    if kept.low < INVARIANCE:
        failures.append(f"invariance may be as low as {kept.low:.3f}")
    if len(failures) == 1 and kept.low < INVARIANCE and kept.value == 1.0:  # nothing went wrong, but little was tried
        bases = len(invariance.bank.base_groups().unique())
        sentence = (
            f"{variable}: undecided with these pairs; too few base inputs whose source keeps it ({bases}): its "
            f"invariance was never broken, but may be as low as {kept.low:.3f}."
        )
        return Verdict(variable, Status.UNDECIDED, sentence, evidence)
    where = ", ".join(handle.places)
    numbers = (
        f"handle {score.value:.3f} [{score.low:.3f}, {score.high:.3f}], full patch {evidence['full_patch']:.3f}, "
        f"copy-source {evidence['copy_source']:.3f}, random {evidence['random_mean']:.3f}, invariance {kept.value:.3f}"
    )
    if failures:
        sentence = f"{variable}: not localized here ({where}): {'; '.join(failures)}. {_capital(numbers)}."
        return Verdict(variable, Status.ABSENT, sentence, evidence)
    subspaces = [on(h) for h in random_subspaces(handle, 20, generator)]
    evidence["random_subspace"] = boot.balanced(np.mean(subspaces, axis=0))[0]
    _, compared = boot.balanced(mine.double().numpy() - patched)
    compact = (
        handle.size < evidence["width"]
        and float(np.quantile(compared, 0.025)) > -COMPACT_LOSS
        and boot.beats(mine, np.mean(subspaces, axis=0), 0.0)[0]
    )
    status = Status.COMPACT if compact else Status.PLACED
    size = f", compact in {handle.size} of {evidence['width']} dimensions" if compact else ""
    return Verdict(variable, status, f"{variable}: placed in {where}{size}; {numbers}.", evidence)


def _output_variable(variable: str, sensitivity: BankRecording, look: Readout) -> Verdict:
    """A variable that copying the source also sets: all there is to say is from where on a patch does it."""
    subject, reached = sensitivity.subject, 0.0
    said = f"{variable}: an output variable (its label always equals the source's answer); copying it proves nothing."
    for place in subject.places:
        right = correct(sensitivity, full_patch(variable, [place], subject), look)
        reached = max(reached, float(right.double().mean()))
        if reached >= OUTPUT:
            said += f" The earliest place that sets it, patched whole, is {place.name} ({reached:.3f})."
            break
    else:
        said += f" No place patched whole sets it on {OUTPUT:.0%} of the pairs (at best {reached:.3f})."
    return Verdict(variable, Status.OUTPUT, said, {"pairs": sensitivity.bank.power(variable).pairs, "patch": reached})


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]
