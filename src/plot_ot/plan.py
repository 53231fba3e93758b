"""What a method would compute, counted before anything runs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from plot_ot.banks import Bank, Splits, distinct_rows
from plot_ot.methods import Method
from plot_ot.stages.base import Stage
from plot_ot.stages.choose import Calibrate, Hint, SelectPlaces, TrainDas
from plot_ot.stages.localize import Localize, ScoreSites
from plot_ot.subjects import BankRecording, Store, Subject
from plot_ot.subjects.decoder import DecoderSubject


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
    prefix_bytes: int
    """Keys and values of the base prompts of a language model, the largest part there."""


def footprint(subject: Subject, splits: Splits, outputs: int) -> Footprint:
    """Distinct inputs over all banks, and the memory their recording takes."""
    banks = [splits.fit, splits.calibration, *splits.test.values()]
    bases = distinct_rows(torch.cat([b.base for b in banks]))
    rows = len(distinct_rows(torch.cat([bases, *(b.source for b in banks)])))
    width = sum(p.width for p in subject.places) + outputs
    batch = subject.responses_per_batch * subject.response_bytes
    return Footprint(rows, 4 * rows * width, batch, _prefix_bytes(subject, bases))


def _prefix_bytes(subject: Subject, bases: Tensor) -> int:
    if not isinstance(subject, DecoderSubject):
        return 0
    return sum(subject.cache_bytes(1, int(tokens)) for tokens in subject.encode(bases)[1].sum(dim=1))


def hollow(subject: Subject, bank: Bank) -> BankRecording:
    """A recording of the right shapes that nothing was run for: enough to lay out menus."""
    rows = distinct_rows(torch.cat([bank.base, bank.source]))
    generator = torch.Generator().manual_seed(0)
    made = {p.name: torch.randn(len(rows), p.width, generator=generator) for p in subject.places}
    index = torch.arange(len(bank)) % len(rows)
    return BankRecording(subject, Store(rows, made, torch.zeros(len(rows), 1)), index, index, bank)


def plan(method: Method, recording: BankRecording, splits: Splits) -> Plan:
    """Walk through the stages, counting instead of computing; `recording` is of the fit bank, for menus that need one.

    Where a stage narrows the places, as many stay as it keeps for every variable.
    """
    subject = recording.subject
    m, fit, calibration = len(splits.fit.variables), len(splits.fit), len(splits.calibration)
    sites = couplings = variants = rotations = responses = 0
    places, each = subject.places, len(subject.places)  # open to some variable; open to each
    for stage in method.stages:
        if isinstance(stage, Localize):
            sites = sum(len(menu(recording, places)) for menu in stage.menus)
            couplings = len(stage.transport.grid) * len(stage.menus) * (each if stage.coupling == "place" else 1)
            responses += (sites + len(places) * len(stage.menus)) * fit
        elif isinstance(stage, ScoreSites):
            sites, couplings = len(stage.menu(recording, places)), 1
            responses += m * (sites + 1) * calibration if stage.kind == "brute-force" else 0
            responses += m * len(places) * fit * 3 if stage.kind == "attribution" else 0
        elif isinstance(stage, SelectPlaces):
            responses += m * min(stage.shortlist * couplings, len(places)) * calibration
            each = min(each, stage.keep)
            places = places[-m * each :]
        elif isinstance(stage, Calibrate):
            per_place = 1 + each if stage.supports == "place" and not _split_by_place(method.stages) else 1
            variants = m * couplings * per_place * len(stage.search.sizes) * len(stage.search.strengths)
            responses += variants * calibration
        elif isinstance(stage, TrainDas):
            here = places[::-1][: each : stage.every]
            for p in here:
                sizes = _sizes(stage, p.width)
                trained = m * sum(k < p.width for k in sizes) * stage.spec.restarts
                rotations += m * len(sizes)
                responses += trained * fit * stage.spec.most * 3 + m * len(sizes) * calibration
    return Plan(method.name, sites, variants, rotations, responses)


def _sizes(stage: TrainDas, width: int) -> list[int]:
    if isinstance(stage.dimensions, Hint):
        return stage.dimensions.sizes(width // 4, width - 1)  # how many there are, not which
    return [k for k in stage.dimensions or range(1, width + 1) if k <= width]


def _split_by_place(stages: tuple[Stage, ...]) -> bool:
    return any(isinstance(s, Localize) and s.coupling == "place" for s in stages)
