"""Verdicts on handles whose correctness is given by a script, role by role, in place of a network's answers."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from plot_ot.abstract.banks import Bank, draw_pairs
from plot_ot.abstract.causal_model import CausalModel
from plot_ot.edits import Frame
from plot_ot.handles import Edit, Handle
from plot_ot.judging import bench, controls, verdict
from plot_ot.judging.controls import Score
from plot_ot.judging.usage import Rebuilt
from plot_ot.judging.verdict import Case, Opponents, Verdict, judge, stand
from plot_ot.signatures import Readout, as_readout
from plot_ot.subjects import BankRecording, MLPSubject, record

READOUT = as_readout("softmax")
INPUTS = list("abcdefghij")
ROWS = torch.cartesian_prod(*[torch.arange(2)] * len(INPUTS))
CAUSAL = CausalModel(
    INPUTS,
    {"left": lambda a, b: a & b, "right": lambda c, d: c & d, "y": lambda left, right: left | right},
    "y",
)
Right = float | Callable[[Bank], Tensor]
"""A share of the base inputs, those of a smaller share among those of a larger one; or which pairs are right."""


@dataclass
class Script:
    """Who is right how often; what is not told is never right. `random` may be a list, one entry for each handle."""

    handle: Right = 1.0
    kept: Right = 1.0
    """The handle on pairs that keep the variable."""
    still: Right = 1.0
    """The handle on pairs that change the variable and not the answer."""
    alone: Right = 0.0
    """How often the handle gives the answer of swapping one parent, where that is another one."""
    copied: Right = 0.0
    patch: Right = 0.5
    """The whole place of the handle, layer1."""
    elsewhere: Right = 0.2
    """The other place, layer2."""
    random: Right | list[Right] = 0.0
    subspace: Right = 0.0
    rebuilt: Right | None = 1.0
    """The handle made of what is used; None where it cannot be rebuilt."""
    size: int = 1
    shuffled: tuple[Score, ...] = ()
    reinitialised: tuple[Score, ...] = ()
    drawn: list[int] = field(default_factory=list)
    """Which random handles were asked for."""
    asked: dict[str, int] = field(default_factory=dict)
    """How often each role was run."""

    def correct(
        self, recording: BankRecording, handle: Handle, readout: Readout, variable: str | None = None
    ) -> Tensor:
        """In the place of `calibrate.correct`."""
        if variable == bench.ALONE:
            return right_on(recording.bank, self.alone)
        role = handle.chosen.get("role") or self._role(handle)
        if role in ("handle", "rebuilt") and bool(recording.bank.unseen(handle.variable).all()):
            return right_on(recording.bank, self.still)
        self.asked[role] = self.asked.get(role, 0) + 1
        right: Any = getattr(self, role) if role != "random" or not isinstance(self.random, list) else self.random
        if isinstance(right, list):
            right = right[handle.chosen["k"]]
        if role in ("handle", "rebuilt") and not recording.bank.changed[handle.variable].any():
            right = self.kept
        return right_on(recording.bank, right)

    def correct_all(self, recording: BankRecording, handles: list[Handle], readout: Readout) -> Tensor:
        """In the place of `calibrate.correct_all`."""
        return torch.stack([self.correct(recording, h, readout) for h in handles])

    def _role(self, handle: Handle) -> str:
        edit = handle.edits[0]
        if edit.frame.kind == "random":
            return "subspace"
        assert bool((edit.gains == 1).all())
        return "patch" if edit.place.name == "layer1" else "elsewhere"


def right_on(bank: Bank, right: Right) -> Tensor:
    """Which pairs are right."""
    if callable(right):
        return right(bank)
    group = bank.base_groups()
    count = int(group.max()) + 1
    level = torch.empty(count)
    level[torch.randperm(count, generator=torch.Generator().manual_seed(0))] = (torch.arange(count) + 0.5) / count
    return (level < right)[group]


@dataclass(frozen=True)
class Court:
    """A network of two layers and banks that decide; `verdict` puts a script before the judge."""

    subject: MLPSubject
    sensitivity: BankRecording
    invariance: BankRecording
    fit: BankRecording
    patched: pytest.MonkeyPatch

    def verdict(self, script: Script | None = None, variable: str = "left", **changes: Any) -> Verdict:
        """The verdict on a script (or on the default one with changes)."""
        script = script or Script(**changes)
        with self._put(script, variable) as (handle, opponents):
            return judge(
                handle,
                self.sensitivity,
                self.invariance,
                self.fit,
                self.fit,
                opponents,
                READOUT,
                torch.Generator().manual_seed(0),
            )

    def spared(self, variable: str = "left", **changes: Any) -> tuple[bool, Verdict | None]:
        """Whether a script's case waits for pairs, and the verdict without the controls that need a search.

        No verdict where these have to be asked.
        """
        with self._put(Script(**changes), variable) as (handle, _):
            tested = stand(variable, self.sensitivity, self.invariance, self.fit, READOUT)
            case = Case.of(handle, tested, self.fit, self.fit, torch.Generator().manual_seed(0))
            return case.waits, case.verdict(Opponents(None)) if case.waits or not case.open else None

    @contextmanager
    def _put(self, script: Script, variable: str) -> Iterator[tuple[Handle, Opponents]]:
        """The handle and the controls of a script, while everything that runs them follows it."""
        place = self.subject.places[0]
        gains = (torch.arange(place.width) < script.size).float()
        edits = (Edit(place, Frame.identity(place.width), gains),)
        handle = Handle(variable, edits, self.subject.identity(), {"role": "handle"})

        def at_random(k: int) -> Handle:
            script.drawn.append(k)
            return replace(handle, chosen={"role": "random", "k": k})

        def rebuilt(*_: Any) -> Rebuilt | None:
            script.asked["read_from_used"] = script.asked.get("read_from_used", 0) + 1
            if script.rebuilt is None:
                return None
            return Rebuilt(replace(handle, chosen={"role": "rebuilt"}), 3, 4)

        def simple(recording: BankRecording, *_: Any) -> dict[str, Tensor]:
            return {"no-edit": right_on(recording.bank, 0.0), "copy-source": right_on(recording.bank, script.copied)}

        with self.patched.context() as m:
            for module in (bench, controls, verdict):
                m.setattr(module, "correct", script.correct)
            m.setattr(bench, "correct_all", script.correct_all)
            m.setattr(verdict, "read_from_used", rebuilt)
            m.setattr(bench, "controls", simple)
            yield handle, Opponents(at_random, script.shuffled, script.reinitialised)


def court(patched: pytest.MonkeyPatch, variable: str = "left", causal: CausalModel = CAUSAL, size: int = 1500) -> Court:
    """A court with banks of that size."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        widths = (len(INPUTS), 4, 2, 2)
        layers = [m for a, b in itertools.pairwise(widths) for m in (torch.nn.Linear(a, b), torch.nn.ReLU())][:-1]
    subject = MLPSubject(torch.nn.Sequential(*layers))
    generator = torch.Generator().manual_seed(0)
    banks = [draw_pairs(causal, ROWS, p, size, generator, variable=variable) for p in ("sensitive", "invariant")]
    return Court(subject, *record(subject, *banks, draw_pairs(causal, ROWS, "balanced", 100, generator)), patched)
