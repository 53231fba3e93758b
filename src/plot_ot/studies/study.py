"""A study of one seed: record it once, run methods on it, test their handles once, with controls and verdicts."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace

from plot_ot.abstract.banks import Bank
from plot_ot.engine import Engine, InProcess, SharedRecording, record_shared
from plot_ot.engine.watching import announce
from plot_ot.files.writing import Json
from plot_ot.handles import Handle
from plot_ot.judging.capacity import Capacity
from plot_ot.judging.controls import controls, full_patch
from plot_ot.judging.intervals import Bootstrap
from plot_ot.judging.judges import Judge, Sparing
from plot_ot.judging.naturalness import naturalness
from plot_ot.methods import Method
from plot_ot.stages.calibrate import correct
from plot_ot.stages.problem import Clock, Problem
from plot_ot.studies import records
from plot_ot.studies.examples import example_rows
from plot_ot.studies.prepared import Prepared, Sweep
from plot_ot.subjects import BankRecording, Place, Subject

Recorder = Callable[[Sequence[Bank]], list[SharedRecording]]
"""Gives the recordings of banks."""


class Study:
    """Records a prepared seed once and runs methods on it.

    The `engine` says who does the work, `shard` how many inputs a work unit has (by default few of a large network).
    Results depend on the shards in their last bits, never on the engine. Banks whose inputs were recorded before have a
    `recorder`, which knows them. With `variables` only these are looked for; couplings still tell them from the others.
    `sparing` says what is spared where a question is asked several times.
    """

    def __init__(
        self,
        prepared: Prepared,
        engine: Engine | None = None,
        *,
        shard: int | None = None,
        recorder: Recorder | None = None,
        variables: Sequence[str] | None = None,
        sparing: Sparing | None = None,
    ) -> None:
        self.prepared = prepared
        splits = prepared.splits
        engine = engine or InProcess()
        self._engine, self._shard = engine, shard
        clock = Clock()
        announce("recording")
        with clock.part("recording"):
            banks = splits.fit, splits.calibration, *splits.test.values()
            if recorder is None:
                crew = engine.crew(prepared.subject, prepared.recipe)
                last = not prepared.transfer
                fit, calibration, *tests = record_shared(crew, prepared.subject, banks, shard, forget=last)
            else:
                fit, calibration, *tests = recorder(banks)
        self.recording_seconds = clock.parts["recording"] + prepared.recorded_seconds
        wanted = splits.fit.variables if variables is None else tuple(variables)
        self.tests: dict[tuple[str, str], BankRecording] = {
            at: recording for at, recording in zip(splits.test, tests, strict=True) if at[0] in wanted
        }
        self.transfer: dict[tuple[str, str], BankRecording] = {}
        if prepared.transfer:
            crew = engine.crew(prepared.subject, prepared.recipe)
            elsewhere = record_shared(crew, prepared.subject, list(prepared.transfer.values()), shard)
            self.transfer = dict(zip(prepared.transfer, elsewhere, strict=True))
        self.bootstraps = {key: Bootstrap(recording.bank) for key, recording in self.tests.items()}
        self.problem = Problem(
            prepared.subject, fit, calibration, splits.fit.variables, prepared.readout, prepared.seed, prepared.score
        ).only(wanted)
        self.judge = Judge(
            self.problem,
            self.tests,
            self._recorded,
            prepared.controls,
            sparing=sparing or Sparing(),
            random_problem=None if sparing is None or recorder is None else self._random_problem(sparing, recorder),
        )

    def _random_problem(self, sparing: Sparing, recorder: Recorder) -> Problem | None:
        """The problem of the study that finds random handles, recorded again where it was an earlier one."""
        if sparing.random.banks is None:
            sparing.random.banks = self.problem.fit.bank, self.problem.calibration.bank
            return None
        fit, calibration = recorder(sparing.random.banks)
        return replace(self.problem, fit=fit, calibration=calibration)

    # -- units of work -----------------------------------------------------------------------------------

    def run(
        self,
        method: Method,
        random_method: Callable[[int], Method],
        places: Mapping[str, tuple[Place, ...]] | None = None,
    ) -> tuple[Json, dict[str, Handle]]:
        """Run a method, at every place or only at those open to each variable; test its handles once, judge them."""
        state, parts = method.run(self.problem, places)
        announce("tests")
        start = time.perf_counter()
        right = {key: correct(r, state.handles[key[0]], self.problem.readout) for key, r in self.tests.items()}
        parts["test"] += time.perf_counter() - start
        parts["recording"] += self.recording_seconds
        key, handles = self._key(method.name), dict(state.handles)
        rows = [records.accuracy_row(key, *at, self.bootstraps[at], hits) for at, hits in right.items()]
        for r in rows:
            handle = handles[r["variable"]]
            if self.prepared.wording:
                r["vocabulary"] = self._over_vocabulary(handle, r["bank"])
            patch = full_patch(handle.variable, [e.place for e in handle.edits], self.prepared.subject)
            r["full_patch"] = self._accuracy(patch, r["bank"])
        unit: Json = {
            "records": rows,
            "runtimes": [{**key, "kind": method.kind, "seconds": sum(parts.values()), "parts": parts}],
            "selection": [self._selection(key, h) for h in handles.values()],
            "cross": [self._cross(key, h, other) for h in handles.values() for other in self.problem.coupled],
            "profile": records.profile_rows(key, state, self.problem),
            "surfaces": records.surface_rows(key, state),
            "couplings": [c for n, s in enumerate(state.trail) for c in records.coupling_rows(key, n, s)],
            "transfer": [self._elsewhere(key, handles[v], bank) for v, bank in self.transfer],
            "examples": [e for h in handles.values() for e in self._examples(key, h)],
        }
        if method.kind.judged:
            before = self.judge.seconds
            found = self.judge.verdicts(method, state, random_method)
            unit["verdicts"] = [{**key, **v.as_row()} for v in found]
            unit["runtimes"][0]["controls"] = self.judge.seconds - before
        for row in unit["selection"]:
            v, control = row["variable"], self.judge.capacity if method.kind.judged else {}
            row["capacity"] = Capacity.of(v, state.capacity.get(v, {}), control.get(v)).as_row()
        return unit, handles

    def control_unit(self) -> Json:
        """Doing nothing and copying the source, on every test bank; and what the banks can show."""
        rows, notes, key = [], [], self._key("controls")
        for (variable, bank), recording in self.tests.items():
            for name, right in controls(recording, variable, self.problem.readout).items():
                boot = self.bootstraps[variable, bank]
                rows.append(records.accuracy_row(self._key(name), variable, bank, boot, right))
        for variable in self.problem.variables:
            power = self.tests[variable, "sensitivity"].bank.power(variable)
            notes.append({**key, "variable": variable, "power": asdict(power)})
        shared = {**key, **self.prepared.notes, "shared_sources": dict(self.prepared.splits.shared_sources)}
        places = self.prepared.subject.places
        notes.append(records.bank_note(shared, self.problem.calibration, self.problem.variables, places))
        return {"records": rows, "notes": notes}

    def sweep_unit(self, sweep: Sweep) -> Json:
        """The same method with one parameter varied: reported, never selected from."""
        sweeps = []
        for value, method in sweep.variants.items():
            state, _ = method.run(self.problem)
            scores = [self._accuracy(state.handles[v], bank) for v, bank in self.tests]
            calibrated = [h.chosen["calibration_score"] for h in state.handles.values()]
            flagged = {f.kind for some in state.candidates.values() for c in some for f in c.coupling.flags}
            sweeps.append(
                {
                    **self._key(method.name),
                    "parameter": sweep.parameter,
                    "value": value,
                    "accuracy": sum(scores) / len(scores),
                    "calibration": sum(calibrated) / len(calibrated),
                    "flags": [{"kind": kind} for kind in sorted(flagged)],
                }
            )
        return {"sweeps": sweeps}

    def _recorded(self, subject: Subject, banks: Sequence[Bank]) -> Sequence[BankRecording]:
        """Banks recorded on another network, by the same engine."""
        return record_shared(self._engine.crew(subject, None), subject, banks, self._shard)

    # -- parts of a unit ---------------------------------------------------------------------------------

    def _key(self, method: str) -> Json:
        p = self.prepared
        return {"task": p.task, "subject": p.subject_name, "seed": p.seed, "method": method}

    def _accuracy(self, handle: Handle, bank: str, labels_of: str | None = None) -> float:
        recording = self.tests[handle.variable, bank]
        return float(correct(recording, handle, self.problem.readout, labels_of).double().mean())

    def _selection(self, key: Json, handle: Handle) -> Json:
        found = naturalness(handle, self.problem.fit, self.tests[handle.variable, "sensitivity"])
        return records.selection_row(key, handle, found)

    def _cross(self, key: Json, handle: Handle, labels_of: str) -> Json:
        accuracy = self._accuracy(handle, "sensitivity", labels_of)
        return {**key, "handle": handle.variable, "labels": labels_of, "accuracy": accuracy}

    def _elsewhere(self, key: Json, handle: Handle, bank: str) -> Json:
        right = correct(self.transfer[handle.variable, bank], handle, self.problem.readout)
        return records.transfer_row(key, handle.variable, bank, right)

    def _over_vocabulary(self, handle: Handle, bank: str) -> float:
        """Accuracy where the network may also say anything that is not an answer."""
        assert self.prepared.wording is not None  # noqa: S101
        recording = replace(self.tests[handle.variable, bank], subject=self.prepared.wording.strict)
        return float(correct(recording, handle, self.problem.readout).double().mean())

    def _examples(self, key: Json, handle: Handle) -> list[Json]:
        recording = self.tests[handle.variable, "sensitivity"]
        return example_rows(key, handle, recording, self.prepared.wording, self.problem.readout)
