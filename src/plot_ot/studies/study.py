"""A study: methods run on one seed of a task, tested once, with controls and verdicts, as plain records."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from jaxtyping import Bool, Float
from torch import Tensor

from plot_ot.abstract.banks import Bank, Splits
from plot_ot.edits import EditBatch, respond
from plot_ot.engine import Engine, InProcess, Recipe, Unit, record_shared, run, shards
from plot_ot.engine.watching import announce
from plot_ot.files.run_directory import Json
from plot_ot.handles import Handle
from plot_ot.judging.controls import controls, full_patch
from plot_ot.judging.intervals import Bootstrap
from plot_ot.judging.judges import Judge
from plot_ot.judging.naturalness import naturalness
from plot_ot.judging.profile import effective_pairs, interval
from plot_ot.methods import Method
from plot_ot.signatures import Readout
from plot_ot.stages.calibrate import correct, pair_weights
from plot_ot.stages.problem import Clock, Problem, State
from plot_ot.subjects import BankRecording, Place, Subject
from plot_ot.transport import Coupling

EXAMPLES = 20
"""Examples kept per method and variable of a text task."""


@dataclass(frozen=True)
class Spoken:
    """What a text task adds: prompts, the names of the answers, and the network read over its whole vocabulary."""

    render: Callable[[Tensor], list[str]]
    answers: Sequence[str]
    strict: Subject
    """The same network with one more output: the largest logit of all that is not an answer."""

    def say(self, answer: int) -> str:
        """An answer's name; one past the last is any other token."""
        return self.answers[answer] if answer < len(self.answers) else "(something else)"


@dataclass(frozen=True)
class Prepared:
    """One seed of a task: a network, its banks, and how its outputs are looked at."""

    task: str
    subject_name: str
    seed: int
    subject: Subject
    splits: Splits
    readout: Readout
    score: str = "balanced"
    notes: Mapping[str, Any] = field(default_factory=dict)
    transfer: Mapping[tuple[str, str], Bank] = field(default_factory=dict)
    """More test banks, of another distribution; reported apart."""
    spoken: Spoken | None = None
    controls: str = "standard"
    """Which controls a verdict has; see `judging.judges.CONTROLS`."""
    recipe: Recipe | None = None
    """How workers elsewhere make the network for themselves; without it, it is sent to them."""


@dataclass(frozen=True)
class Sweep:
    """A method with one parameter (`epsilon` or `beta`) at several values."""

    parameter: str
    variants: Mapping[float, Method]

    @property
    def name(self) -> str:
        """What its unit of a run is called."""
        return f"{self.parameter}-sweep"


class Study:
    """Records a prepared seed once and runs methods on it.

    The `engine` says who does the work, `shard` how many inputs a work unit has (by default few of a large network).
    Results depend on the shards in their last bits, never on the engine.
    """

    def __init__(self, prepared: Prepared, engine: Engine | None = None, *, shard: int | None = None) -> None:
        self.prepared = prepared
        splits = prepared.splits
        engine = engine or InProcess()
        self._engine, self._shard = engine, shard
        clock = Clock()
        announce("recording")
        with clock.part("recording"):
            banks = splits.fit, splits.calibration, *splits.test.values()
            crew = engine.crew(prepared.subject, prepared.recipe)
            fit, calibration, *tests = record_shared(crew, prepared.subject, banks, shard)
        self.recording_seconds = clock.parts["recording"]
        self.tests: dict[tuple[str, str], BankRecording] = dict(zip(splits.test, tests, strict=True))
        self.transfer: dict[tuple[str, str], BankRecording] = {}
        if prepared.transfer:
            crew = engine.crew(prepared.subject, prepared.recipe)
            elsewhere = record_shared(crew, prepared.subject, list(prepared.transfer.values()), shard)
            self.transfer = dict(zip(prepared.transfer, elsewhere, strict=True))
        self.bootstraps = {key: Bootstrap(recording.bank) for key, recording in self.tests.items()}
        self.problem = Problem(
            prepared.subject, fit, calibration, splits.fit.variables, prepared.readout, prepared.seed, prepared.score
        )
        self.judge = Judge(self.problem, self.tests, self._recorded, prepared.controls)

    # -- units -------------------------------------------------------------------------------------------

    def run(self, method: Method, random_method: Callable[[int], Method]) -> tuple[Json, dict[str, Handle]]:
        """Run a method, test its handles once, judge them."""
        state, parts = method.run(self.problem)
        announce("tests")
        start = time.perf_counter()
        right = {key: correct(r, state.handles[key[0]], self.problem.readout) for key, r in self.tests.items()}
        parts["test"] += time.perf_counter() - start
        parts["recording"] += self.recording_seconds
        records = [self._record(method.name, *key, hits) for key, hits in right.items()]
        if self.prepared.spoken:
            for r in records:
                r["vocabulary"] = self._over_vocabulary(state.handles[r["variable"]], r["bank"])
        for r in records:
            handle = state.handles[r["variable"]]
            patch = full_patch(handle.variable, [e.place for e in handle.edits], self.prepared.subject)
            r["full_patch"] = self._accuracy(patch, r["bank"])
        unit: Json = {
            "records": records,
            "runtimes": [
                {**self._key(method.name), "kind": method.kind, "seconds": sum(parts.values()), "parts": parts}
            ],
            "selection": [self._selection(method.name, h) for h in state.handles.values()],
            "cross": [self._cross(method.name, h, other) for h in state.handles.values() for other in state.handles],
            "profile": self._profile(method.name, state),
            "surfaces": self._surfaces(method.name, state),
            "couplings": [c for n, s in enumerate(state.trail) for c in self._couplings(method.name, n, s)],
            "transfer": [self._elsewhere(method.name, state.handles[v], bank) for v, bank in self.transfer],
            "examples": [e for h in state.handles.values() for e in self._examples(method.name, h)],
        }
        if method.kind.judged:
            before = self.judge.seconds
            found = self.judge.verdicts(method, state, random_method)
            unit["verdicts"] = [{**self._key(method.name), **v.as_row()} for v in found]
            unit["runtimes"][0]["controls"] = self.judge.seconds - before
        return unit, dict(state.handles)

    def control_unit(self) -> Json:
        """Doing nothing and copying the source, on every test bank; and what the banks can show."""
        records, notes = [], []
        for (variable, bank), recording in self.tests.items():
            for name, right in controls(recording, variable, self.problem.readout).items():
                records.append(self._record(name, variable, bank, right))
        for variable in self.problem.variables:
            power = self.tests[variable, "sensitivity"].bank.power(variable)
            notes.append({**self._key("controls"), "variable": variable, "power": asdict(power)})
        shared = dict(self.prepared.splits.shared_sources)
        calibration = self.problem.calibration.bank
        sensitive = {v: int(calibration.changed[v].sum()) for v in self.problem.variables}
        notes.append(
            {
                **self._key("controls"),
                **self.prepared.notes,
                "shared_sources": shared,
                "calibration": {"pairs": len(calibration), "sensitive": sensitive},
                "places": [_described(p) for p in self.prepared.subject.places],
            }
        )
        return {"records": records, "notes": notes}

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
        return float(correct(recording, handle, self.problem.readout, labels_of).double().mean())

    def _selection(self, method: str, handle: Handle) -> Json:
        return {
            **self._key(method),
            "variable": handle.variable,
            "size": handle.size,
            "places": handle.places,
            "chosen": dict(handle.chosen),
            "evidence": asdict(naturalness(handle, self.problem.fit, self.tests[handle.variable, "sensitivity"])),
        }

    def _cross(self, method: str, handle: Handle, labels_of: str) -> Json:
        accuracy = self._accuracy(handle, "sensitivity", labels_of)
        return {**self._key(method), "handle": handle.variable, "labels": labels_of, "accuracy": accuracy}

    def _couplings(self, method: str, stage: int, state: State) -> list[Json]:
        """The couplings of one localization stage, each once, with where its sites are and how they did alone."""
        norms = {
            s.name: float(n) for m in state.signatures for s, n in zip(m.family.sites, m.column_norms, strict=True)
        }
        seen: dict[int, Json] = {}
        for variable, candidates in state.candidates.items():
            patched = state.patched.get(variable, {})
            for c in candidates:
                sites = c.family.sites
                found = seen.setdefault(
                    id(c.coupling),
                    {
                        **self._key(method),
                        "stage": stage,
                        "support": c.label,
                        "variables": c.coupling.variables,
                        "sites": c.coupling.sites,
                        "places": [s.place.name for s in sites],
                        "tokens": [s.place.token for s in sites] if any(s.more for s in sites) else None,
                        "spans": [[min(s.directions), max(s.directions) + 1] for s in sites],
                        "frame": c.family.frames[sites[0].place.name].kind,
                        "plan": c.coupling.plan.tolist(),
                        "kind": c.coupling.kind,
                        "epsilon": c.coupling.epsilon,
                        "beta": c.coupling.beta,
                        "scale": c.coupling.scale,
                        "unit": c.coupling.unit,
                        "converged": c.coupling.converged,
                        "row_error": c.coupling.row_error,
                        "column_error": c.coupling.column_error,
                        "flags": [asdict(f) for f in c.coupling.flags],
                        **_approximations(c.coupling),
                        "calibration": {},
                    },
                )
                if norms:
                    found["raw_norms"] = [norms[s.name] for s in sites]
                if patched and all(len(s.directions) == s.place.width and not s.more for s in sites):
                    found["calibration"][variable] = [patched.get(s.place.name) for s in sites]
        return list(seen.values())

    def _surfaces(self, method: str, state: State) -> list[Json]:
        """The (K, λ) grid each handle was chosen from, of the coupling that won."""
        return [
            {
                **self._key(method),
                "variable": v,
                "support": c.handle.chosen["support"],
                "epsilon": c.handle.chosen["epsilon"],
                "beta": c.handle.chosen["beta"],
                "sizes": c.sizes,
                "strengths": c.strengths,
                "scores": [[round(x, 4) for x in row] for row in c.surface[c.candidate].tolist()],
                "K": c.handle.chosen["K"],
                "strength": c.handle.chosen["strength"],
            }
            for v, c in state.calibrations.items()
            if state.handles[v] is c.handle
        ]

    def _profile(self, method: str, state: State) -> list[Json]:
        """The best calibration score inside every place that was tried, in the network's order."""
        calibration, rows = self.problem.calibration, []
        for v, scores in state.profile.items():
            pairs = effective_pairs(calibration.bank, pair_weights(calibration, v, self.problem.score))
            for p in self.prepared.subject.places:
                if p.name in scores:
                    low, high = interval(scores[p.name], pairs)
                    where = {"variable": v, "place": p.name, "token": p.token, "layer": p.layer}
                    rows.append({**self._key(method), **where, "score": scores[p.name], "low": low, "high": high})
        return rows

    def _elsewhere(self, method: str, handle: Handle, bank: str) -> Json:
        right = correct(self.transfer[handle.variable, bank], handle, self.problem.readout)
        return {
            **self._key(method),
            "variable": handle.variable,
            "bank": bank,
            "accuracy": float(right.double().mean()),
            "pairs": len(right),
        }

    def _over_vocabulary(self, handle: Handle, bank: str) -> float:
        """Accuracy where the network may also say anything that is not an answer."""
        assert self.prepared.spoken is not None  # noqa: S101
        recording = replace(self.tests[handle.variable, bank], subject=self.prepared.spoken.strict)
        return float(correct(recording, handle, self.problem.readout).double().mean())

    def _examples(self, method: str, handle: Handle) -> list[Json]:
        """Some sensitive test pairs in words: families dealt evenly, wrong ones first among each family's."""
        spoken = self.prepared.spoken
        if spoken is None:
            return []
        recording = replace(self.tests[handle.variable, "sensitivity"], subject=spoken.strict)
        bank, readout = recording.bank, self.problem.readout
        outputs = _responses(recording, handle.batch())
        right = readout.correct(outputs, bank.labels[handle.variable].to(outputs.device))[0].cpu()
        after = readout.decide(outputs)[0].tolist()
        before = readout.decide(spoken.strict.outputs_of(recording.store)[recording.base_rows]).tolist()
        each = -(-EXAMPLES // len(bank.families))
        chosen = []
        for family in range(len(bank.families)):
            members = (bank.family == family).nonzero().squeeze(1)
            wrong, good = members[~right[members]].tolist(), members[right[members]].tolist()
            half = wrong[: each // 2]
            chosen += half + good[: each - len(half)]
        base, source = spoken.render(bank.base[chosen]), spoken.render(bank.source[chosen])
        return [
            {
                **self._key(method),
                "variable": handle.variable,
                "bank": "sensitivity",
                "family": bank.families[int(bank.family[t])],
                "base_prompt": base[k],
                "source_prompt": source[k],
                "before": spoken.say(before[t]),
                "after": spoken.say(after[t]),
                "expected": spoken.say(int(bank.labels[handle.variable][t])),
                "source_answer": spoken.say(int(bank.source_answer[t])),
                "right": bool(right[t]),
                "position": {"label": "last token", "base": _last_word(base[k]), "source": _last_word(source[k])},
            }
            for k, t in enumerate(chosen)
        ]


def _responses(recording: BankRecording, edits: Sequence[EditBatch]) -> Float[Tensor, "variants pairs ..."]:
    """`respond`, by pair shards."""
    parts = shards(recording)
    units = [Unit(_outputs, pairs, tuple(e.place for e in edits), (edits,)) for pairs in parts]
    found = list(run(recording, units))
    outputs: Tensor = found[0].new_empty(len(edits[0].gains), len(recording), *found[0].shape[2:])
    for pairs, piece in zip(parts, found, strict=True):
        outputs[:, pairs] = piece
    return outputs


def _outputs(recording: BankRecording, edits: Sequence[EditBatch]) -> Tensor:
    return respond(recording, edits).cpu()


def _approximations(coupling: Coupling) -> Json:
    """What is known of a coupling's errors, where its signatures were not all exact or had error bars."""
    known = {"spread": coupling.spread, "exact": coupling.exact}
    told: Json = {name: value.tolist() for name, value in known.items() if value is not None}
    return told | ({"weights": dict(coupling.weights)} if coupling.weights is not None else {})


def _described(place: Place) -> Json:
    named = {"position_label": place.token} if "@" in place.name or place.position == -1 else {}
    return {**asdict(place), **named}


def _last_word(prompt: str) -> list[int] | None:
    """Where the last word or sign of a prompt begins and ends."""
    found = re.search(r"(\w+|[^\w\s])\s*$", prompt)
    return list(found.span(1)) if found else None
