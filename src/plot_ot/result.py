"""What a localization found: handles with verdicts, told in a terminal, a notebook, or a run directory."""

from __future__ import annotations

import html
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

from plot_ot.abstract.banks import Bank
from plot_ot.files.run_directory import Json, RunDirectory, write_json
from plot_ot.handles import Handle
from plot_ot.judging.verdict import Accuracy, Bootstrap, controls, full_patch
from plot_ot.report.page import fragment, page, write_page
from plot_ot.signatures import Readout, readout
from plot_ot.stages.calibrate import correct
from plot_ot.subjects import Subject, record
from plot_ot.version import library_versions

CONTROLS = "controls"


@dataclass(frozen=True, repr=False)
class Result:
    """Handles by variable, with what the test banks say about them."""

    handles: Mapping[str, Handle]
    verdicts: Mapping[str, Json]
    records: Sequence[Json]
    seconds: float
    unit: Json
    """All that was measured, as in a run directory."""
    controls: Json
    config: Json
    notes: Sequence[str] = ()
    """What happened on the way that a reader should know: rows left out, what the couplings warn of."""

    @property
    def method(self) -> str:
        """The name of the method that made the handles."""
        return str(self.unit["runtimes"][0]["method"])

    def zoom(self, variable: str) -> list[str]:
        """The way to the handle, coarse to fine: its token, its place, and the site of highest mass inside."""
        handle, path = self.handles[variable], []
        for stage in sorted({c["stage"] for c in self.unit["couplings"]}):
            own = [c for c in self.unit["couplings"] if c["stage"] == stage and variable in c["variables"]]
            if any(c["tokens"] for c in own):
                path.append(handle.edits[0].place.token)
            elif any(set(c["places"]) == set(c["sites"]) for c in own):
                path.append(handle.places[0])
            inside = [c for c in own if set(c["places"]) <= set(handle.places) and c["sites"] != c["places"]]
            for c in inside[:1]:
                row = c["plan"][c["variables"].index(variable)]
                path.append(c["sites"][max(range(len(row)), key=row.__getitem__)])
        return path

    def __str__(self) -> str:
        lines = [str(v["sentence"]) for v in self.verdicts.values()]
        lines += [f"  {v}: {' → '.join(self.zoom(v))}" for v in self.handles if len(self.zoom(v)) > 1]
        lines += [f"  note: {note}" for note in self.notes]
        return "\n".join([*lines, f"  {self.seconds:.1f} s, method {self.method}"])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """The verdicts as plain HTML, and below them the whole report in a frame of its own."""
        told = fragment(self.records, list(self.verdicts.values()), self.unit["runtimes"])
        with tempfile.TemporaryDirectory() as folder:
            self._write(Path(folder) / "run")
            report = html.escape(page([Path(folder) / "run"]), quote=True)
        frame = 'sandbox="allow-scripts allow-downloads" style="width:100%;height:48rem;border:1px solid #8884"'
        return f'{told}<details><summary>Charts</summary><iframe srcdoc="{report}" {frame}></iframe></details>'

    def save(self, directory: str | Path) -> Path:
        """Write a run directory: handles, couplings, results and report.html; the path of the report."""
        return write_page([self._write(Path(directory))])

    def _write(self, directory: Path) -> Path:
        seed = int(self.config["seeds"][0])
        run = RunDirectory.open(directory, self.config, library_versions(), "plot_ot.localize(...)")
        for handle in self.handles.values():
            handle.save(run.handle_path(seed, self.method, handle.variable))
        run.finish(seed, CONTROLS, self.controls)
        run.finish(seed, self.method, self.unit)
        run.compile([CONTROLS, self.method])
        run.manifest["finished"] = datetime.now(timezone.utc).isoformat(timespec="seconds")
        write_json(run.path / "manifest.json", run.manifest)
        return run.path


@dataclass(frozen=True)
class Evaluation:
    """A handle on a bank: how often it gives the counterfactual answer, next to its controls."""

    variable: str
    bank: str
    accuracy: Accuracy
    families: Mapping[str, Accuracy]
    controls: Mapping[str, float]
    """`no-edit`, `copy-source`, and the `full-patch` at the same places."""

    def __str__(self) -> str:
        a, said = self.accuracy, ", ".join(f"{name} {value:.3f}" for name, value in self.controls.items())
        return f"{self.variable} on {self.bank}: {a.value:.3f} [{a.low:.3f}, {a.high:.3f}] of {a.pairs} pairs; {said}"


def evaluate(handle: Handle, bank: Bank, subject: Subject, look: str | Readout = "softmax") -> Evaluation:
    """The share of a bank's pairs where the handle makes the network give the swap's label, with 95 % intervals."""
    handle.require(subject)
    bank.require(handle.variable)
    look = readout(look)
    [recording] = record(subject, bank)
    boot, right = Bootstrap(bank), correct(recording, handle, look)
    patch = full_patch(handle.variable, [e.place for e in handle.edits], subject)
    others = {**controls(recording, handle.variable, look), "full-patch": correct(recording, patch, look)}
    shares = {name: float(hits.double().mean()) for name, hits in others.items()}
    return Evaluation(handle.variable, bank.name, boot.accuracy(right), boot.by_family(right), shares)
