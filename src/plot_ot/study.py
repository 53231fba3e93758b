"""A study: methods run on one seed of a task, tested once, with controls and verdicts, as plain records."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor

from plot_ot.banks import Splits
from plot_ot.handles import Handle
from plot_ot.methods import Method
from plot_ot.runs import Json
from plot_ot.signatures import Readout
from plot_ot.stages.base import Clock, Problem, State
from plot_ot.stages.calibrate import correct
from plot_ot.stages.evidence import evidence
from plot_ot.stages.verdict import Bootstrap, controls, full_patch, judge
from plot_ot.subjects import BankRecording, Subject, record

RANDOM_HANDLES = 20


@dataclass(frozen=True)
class Prepared:
    """One seed of a task: a network, its banks, and how its outputs are looked at."""

    task: str
    subject_name: str
    seed: int
    subject: Subject
    splits: Splits
    look: Readout
    score: str = "balanced"
    notes: Mapping[str, Any] = field(default_factory=dict)


class Study:
    """Records a prepared seed once and runs methods on it."""

    def __init__(self, prepared: Prepared) -> None:
        self.prepared = prepared
        splits = prepared.splits
        clock = Clock()
        with clock.part("recording"):
            fit, calibration, *tests = record(prepared.subject, splits.fit, splits.calibration, *splits.test.values())
        self.recording_seconds = clock.parts["recording"]
        self.tests: dict[tuple[str, str], BankRecording] = dict(zip(splits.test, tests, strict=True))
        self.bootstraps = {key: Bootstrap(recording.bank) for key, recording in self.tests.items()}
        self.problem = Problem(
            prepared.subject, fit, calibration, splits.fit.variables, prepared.look, prepared.seed, prepared.score
        )
        self._random: dict[str, list[Handle]] = {}

    # -- units -------------------------------------------------------------------------------------------

    def run(self, method: Method, random_method: Callable[[int], Method]) -> tuple[Json, dict[str, Handle]]:
        """Run a method, test its handles once, judge them."""
        state, parts = method.run(self.problem)
        start = time.perf_counter()
        right = {key: correct(r, state.handles[key[0]], self.problem.look) for key, r in self.tests.items()}
        parts["test"] += time.perf_counter() - start
        parts["recording"] += self.recording_seconds
        records = [self._record(method.name, *key, hits) for key, hits in right.items()]
        for r in records:
            handle = state.handles[r["variable"]]
            patch = full_patch(handle.variable, [e.place for e in handle.edits], self.prepared.subject)
            r["full_patch"] = self._accuracy(patch, r["bank"])
        unit: Json = {
            "records": records,
            "runtimes": [{**self._key(method.name), "seconds": sum(parts.values()), "parts": parts}],
            "selection": [self._selection(method.name, h) for h in state.handles.values()],
            "cross": [self._cross(method.name, h, other) for h in state.handles.values() for other in state.handles],
            "couplings": self._couplings(method.name, state),
        }
        if method.kind != "baseline":
            unit["verdicts"] = [self._verdict(method.name, h, random_method) for h in state.handles.values()]
        return unit, dict(state.handles)

    def control_unit(self) -> Json:
        """Doing nothing and copying the source, on every test bank; and what the banks can show."""
        records, notes = [], []
        for (variable, bank), recording in self.tests.items():
            for name, right in controls(recording, variable, self.problem.look).items():
                records.append(self._record(name, variable, bank, right))
        for variable in self.problem.variables:
            power = self.tests[variable, "sensitivity"].bank.power(variable)
            notes.append({**self._key("controls"), "variable": variable, "power": asdict(power)})
        shared = dict(self.prepared.splits.shared_sources)
        notes.append({**self._key("controls"), **self.prepared.notes, "shared_sources": shared})
        return {"records": records, "notes": notes}

    def sweep_unit(self, variants: Mapping[float, Method]) -> Json:
        """The same method with one parameter varied: reported, never selected from."""
        sweeps = []
        for value, method in variants.items():
            state, _ = method.run(self.problem)
            scores = [self._accuracy(state.handles[v], bank) for v, bank in self.tests]
            calibrated = [h.chosen["calibration_score"] for h in state.handles.values()]
            sweeps.append(
                {
                    **self._key(method.name),
                    "parameter": "epsilon",
                    "value": value,
                    "accuracy": sum(scores) / len(scores),
                    "calibration": sum(calibrated) / len(calibrated),
                    "flags": sorted({f for c in state.candidates.values() for x in c for f in x.coupling.flags}),
                }
            )
        return {"sweeps": sweeps}

    # -- parts -------------------------------------------------------------------------------------------

    def _key(self, method: str) -> Json:
        p = self.prepared
        return {"task": p.task, "subject": p.subject_name, "seed": p.seed, "method": method}

    def _record(self, method: str, variable: str, bank: str, right: Bool[Tensor, " pairs"]) -> Json:
        boot = self.bootstraps[variable, bank]
        overall = boot.accuracy(right)
        return {
            **self._key(method),
            "variable": variable,
            "bank": bank,
            "accuracy": overall.value,
            "pairs": overall.pairs,
            "interval": [overall.low, overall.high],
            "families": {f: asdict(a) for f, a in boot.by_family(right).items()},
        }

    def _accuracy(self, handle: Handle, bank: str, labels_of: str | None = None) -> float:
        recording = self.tests[handle.variable, bank]
        return float(correct(recording, handle, self.problem.look, labels_of).double().mean())

    def _selection(self, method: str, handle: Handle) -> Json:
        return {
            **self._key(method),
            "variable": handle.variable,
            "size": handle.size,
            "places": handle.places,
            "chosen": dict(handle.chosen),
            "evidence": asdict(evidence(handle, self.problem.fit, self.tests[handle.variable, "sensitivity"])),
        }

    def _cross(self, method: str, handle: Handle, labels_of: str) -> Json:
        accuracy = self._accuracy(handle, "sensitivity", labels_of)
        return {**self._key(method), "handle": handle.variable, "labels": labels_of, "accuracy": accuracy}

    def _couplings(self, method: str, state: State) -> list[Json]:
        seen: dict[int, Json] = {}
        for candidates in state.candidates.values():
            for c in candidates:
                seen[id(c.coupling)] = {
                    **self._key(method),
                    "support": c.label,
                    "variables": c.coupling.variables,
                    "sites": c.coupling.sites,
                    "plan": c.coupling.plan.tolist(),
                    "kind": c.coupling.kind,
                    "epsilon": c.coupling.epsilon,
                    "beta": c.coupling.beta,
                    "scale": c.coupling.scale,
                    "unit": c.coupling.unit,
                    "converged": c.coupling.converged,
                    "row_error": c.coupling.row_error,
                    "column_error": c.coupling.column_error,
                    "flags": c.coupling.flags,
                }
        norms = {
            s.name: float(n) for m in state.signatures for s, n in zip(m.family.sites, m.column_norms, strict=True)
        }
        return [{**c, "raw_norms": [norms[s] for s in c["sites"]]} if norms else c for c in seen.values()]

    def _verdict(self, method: str, handle: Handle, random_method: Callable[[int], Method]) -> Json:
        if not self._random:
            drawn = [random_method(k).run(self.problem)[0].handles for k in range(RANDOM_HANDLES)]
            self._random = {v: [handles[v] for handles in drawn] for v in self.problem.variables}
        v = handle.variable
        verdict = judge(
            handle,
            self.tests[v, "sensitivity"],
            self.tests[v, "invariance"],
            self._random[v],
            self.problem.look,
            torch.Generator().manual_seed(self.prepared.seed),
        )
        return {**self._key(method), **asdict(verdict)}
