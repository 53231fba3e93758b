"""What a method would compute, counted before anything runs."""

from __future__ import annotations

from dataclasses import dataclass

from plot_ot.banks import Splits
from plot_ot.methods import Method
from plot_ot.stages.base import Stage
from plot_ot.stages.choose import Calibrate, SelectPlaces, TrainDas
from plot_ot.stages.localize import Localize, ScoreSites
from plot_ot.subjects import BankRecording, Subject


@dataclass(frozen=True)
class Plan:
    """Counts for one method on one seed. A response is one pair resumed under one variant."""

    method: str
    sites: int
    variants: int
    """Variants calibration tries, for all variables."""
    rotations: int
    responses: int
    """Resumed responses in all; for DAS the most its epochs allow, a backward pass counting as two."""


@dataclass(frozen=True)
class Footprint:
    """What recording costs, shared by all methods."""

    forwards: int
    """Distinct inputs, each run once."""
    bytes: int
    """Recorded activations and outputs, in float32."""
    batch_bytes: int
    """Activations of the largest resumed batch."""


def footprint(subject: Subject, splits: Splits, outputs: int) -> Footprint:
    """Distinct inputs over all banks, and the memory their recording takes."""
    banks = [splits.fit, splits.calibration, *splits.test.values()]
    rows = {tuple(r) for b in banks for side in (b.base, b.source) for r in side.tolist()}
    width = sum(p.width for p in subject.places) + outputs
    return Footprint(len(rows), 4 * len(rows) * width, subject.responses_per_batch * subject.response_bytes)


def plan(method: Method, recording: BankRecording, splits: Splits) -> Plan:
    """Walk through the stages, counting instead of computing; `recording` is of the fit bank, for menus that need one.

    Places that a stage would rule out are still counted for the stages after it.
    """
    subject = recording.subject
    m, fit, calibration = len(splits.fit.variables), len(splits.fit), len(splits.calibration)
    sites = couplings = variants = rotations = responses = 0
    places = len(subject.places)
    for stage in method.stages:
        if isinstance(stage, Localize):
            sites = sum(len(menu(recording, subject.places)) for menu in stage.menus)
            couplings = len(stage.transport.grid) * len(stage.menus) * (places if stage.coupling == "place" else 1)
            responses += (sites + places * len(stage.menus)) * fit
        elif isinstance(stage, ScoreSites):
            sites, couplings = len(stage.menu(recording, subject.places)), 1
            responses += m * (sites + 1) * calibration if stage.kind == "brute-force" else 0
        elif isinstance(stage, SelectPlaces):
            responses += m * stage.shortlist * couplings * calibration
        elif isinstance(stage, Calibrate):
            per_place = 1 + places if stage.supports == "place" and not _split_by_place(method.stages) else 1
            variants = m * couplings * per_place * len(stage.search.sizes) * len(stage.search.strengths)
            responses += variants * calibration
        elif isinstance(stage, TrainDas):
            for p in subject.places:
                sizes = [k for k in stage.dimensions or range(1, p.width + 1) if k <= p.width]
                trained = m * sum(k < p.width for k in sizes) * stage.spec.restarts
                rotations += m * len(sizes)
                responses += trained * fit * stage.spec.most * 3 + m * len(sizes) * calibration
    return Plan(method.name, sites, variants, rotations, responses)


def _split_by_place(stages: tuple[Stage, ...]) -> bool:
    return any(isinstance(s, Localize) and s.coupling == "place" for s in stages)
