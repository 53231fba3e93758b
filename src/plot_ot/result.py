"""What a localization found: handles with verdicts, told in a terminal, a notebook, or a run directory."""

from __future__ import annotations

import html
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from plot_ot.abstract.banks import Bank
from plot_ot.errors import PlotError, unknown
from plot_ot.files.run_directory import RunDirectory
from plot_ot.files.run_layout import LISTS
from plot_ot.files.run_reading import read_run
from plot_ot.files.writing import Json
from plot_ot.handles import Handle
from plot_ot.judging.capacity import Capacity
from plot_ot.judging.controls import controls, full_patch
from plot_ot.judging.intervals import Accuracy, Bootstrap
from plot_ot.judging.profile import Profile
from plot_ot.judging.verdict import Verdict
from plot_ot.report.page import fragment, page, write_page
from plot_ot.signatures import Readout, as_readout
from plot_ot.stages.calibrate import correct
from plot_ot.studies.running import CONTROLS, check_name
from plot_ot.subjects import Subject, record
from plot_ot.version import library_versions

if TYPE_CHECKING:
    import pandas


@dataclass(frozen=True, repr=False)
class Result:
    """Handles by variable, with what the test banks say about them."""

    handles: Mapping[str, Handle]
    verdicts: Mapping[str, Verdict]
    records: Sequence[Json]
    seconds: float
    """All that was waited for; `waited` has its parts."""
    unit: Json
    """All that was measured, as in a run directory."""
    controls: Json
    config: Json
    of: Json = field(default_factory=dict)
    """What it is of, by digests: the network (`subject`), the `banks`, the method's `settings`."""
    notes: Sequence[str] = ()
    """What happened on the way that a reader should know: rows left out, what the couplings warn of."""

    @property
    def method(self) -> str:
        """The name of the method that made the handles."""
        return str(self.unit["runtimes"][0]["method"])

    @property
    def waited(self) -> Mapping[str, float]:
        """The seconds of each part: loading, filtering, recording, search, controls, tables; saving adds the report."""
        runtime = self.unit["runtimes"][0]
        found: dict[str, float] = runtime.get("waited") or runtime["parts"]
        return found

    @property
    def looks(self) -> Sequence[Json]:
        """The looks of `budget="auto"`: `pairs` per bank, `error`, `seconds` and `verdicts` of each; else nothing."""
        found: list[Json] = self.unit["runtimes"][0].get("looks", [])
        return found

    def zoom(self, variable: str) -> list[str]:
        """The way to the handle, coarse to fine: its token, its place, and the sites or directions it takes there."""
        handle, path = self.handles[variable], []
        own = [c for c in self.unit["couplings"] if variable in c["variables"]]
        for stage in sorted({c["stage"] for c in own}):
            here = [c for c in own if c["stage"] == stage]
            if any(c["tokens"] for c in here):
                path.append(_some(dict.fromkeys(e.place.token for e in handle.edits)))
            elif any(set(c["places"]) == set(c["sites"]) for c in here):
                path.append(_some(handle.places))
        whole = all(e.frame.read is None and e.size == e.place.width for e in handle.edits)
        if own and not whole:
            path.append(self._inside(handle))
        return path

    def _inside(self, handle: Handle) -> str:
        """What the handle takes inside its places: sites by name where calibration chose some, else directions."""
        sites = handle.chosen.get("sites") or []
        if not sites:
            return f"{handle.size} direction{'' if handle.size == 1 else 's'}"
        return _some(sites, 3)

    def _stretched(self, variable: str) -> str:
        """How far out the handle's edited states lie, natural ones being at 1; nothing where it was not measured."""
        known = [s.get("evidence") or {} for s in self.unit["selection"] if s["variable"] == variable]
        found = [e["stretch"] for e in known if e.get("stretch") is not None]
        return f", stretch {found[0]:.2f}" if found else ""

    def profile(self, variable: str) -> Profile:
        """The best calibration score of all that was tried inside every place: where else could the variable be?"""
        if variable not in self.handles:
            unknown("variable", variable, self.handles)
        return Profile.from_rows(variable, self.unit.get("profile", []))

    def capacity(self, variable: str) -> Capacity:
        """The best calibration score for every number of directions that was tried, beside that of shuffled values."""
        if variable not in self.handles:
            unknown("variable", variable, self.handles)
        rows = {s["variable"]: s.get("capacity") for s in self.unit["selection"]}
        return Capacity.from_row(variable, rows.get(variable) or Capacity.of(variable, {}, None).as_row())

    def __str__(self) -> str:
        lines = [v.sentence for v in self.verdicts.values()]
        lines += [
            f"  {v}: {' → '.join(self.zoom(v))}{self._stretched(v)}" for v in self.handles if len(self.zoom(v)) > 1
        ]
        lines += [f"  note: {note}" for note in self.notes]
        parts = ", ".join(f"{part} {s:.1f}" for part, s in self.waited.items() if s >= 0.05 and part != "report")
        return "\n".join([*lines, f"  {self.seconds:.1f} s ({parts}), method {self.method}"])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """The verdicts as plain HTML, and below them the whole report in a frame of its own."""
        verdicts, notes = self.unit.get("verdicts", []), self.controls.get("notes", [])
        told = fragment(self.records, verdicts, self.unit["runtimes"], self.unit["selection"], notes)
        with tempfile.TemporaryDirectory() as folder:
            self._write(Path(folder) / "run")
            report = html.escape(page([Path(folder) / "run"]), quote=True)
        frame = 'sandbox="allow-scripts allow-downloads" style="width:100%;height:48rem;border:1px solid #8884"'
        return f'{told}<details><summary>Charts</summary><iframe srcdoc="{report}" {frame}></iframe></details>'

    def to_frame(self, table: Literal["records", "verdicts"] = "records") -> pandas.DataFrame:
        """The records, or the verdicts with their numbers, as a pandas table: one row each."""
        try:
            import pandas
        except ImportError as e:
            raise PlotError("A data frame needs pandas, which is not installed: pip install pandas.") from e
        if table not in ("records", "verdicts"):
            unknown("table", table, ("records", "verdicts"))
        if table == "records":
            return pandas.DataFrame(list(self.records))
        rows = [
            {
                "variable": v.variable,
                "status": str(v.status),
                "accuracy": v.accuracy,
                "sentence": v.sentence,
                **v.evidence,
            }
            for v in self.verdicts.values()
        ]
        return pandas.DataFrame(rows)

    def to_markdown(self) -> str:
        """The verdicts as a Markdown table with a sentence each, for notes and issues."""
        lines = ["| variable | verdict | accuracy | handle |", "| --- | --- | --- | --- |"]
        for name, verdict in self.verdicts.items():
            handle, reached = self.handles[name], "–" if verdict.accuracy is None else f"{verdict.accuracy:.3f}"
            spread = "" if verdict.interval is None else " [{:.3f}, {:.3f}]".format(*verdict.interval)
            where = f"{', '.join(handle.places)}: {handle.size} direction{'' if handle.size == 1 else 's'}"
            cells = (name, str(verdict.status), reached + spread, where)
            lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
        return "\n".join([*lines, "", *(f"- {v.sentence}" for v in self.verdicts.values())])

    @classmethod
    def load(cls, directory: str | Path, method: str | None = None, seed: int | None = None) -> Result:
        """What one method found in one seed of a run directory; the only method and seed need no name."""
        run = read_run(Path(directory))
        results, config = run.results, run.config
        method = _only("method", method, [r["method"] for r in results["runtimes"]])
        seed = int(_only("seed", None if seed is None else str(seed), [str(r["seed"]) for r in results["runtimes"]]))
        rows = {**{name: results[name] for name in LISTS}, "couplings": run.couplings}
        here = {name: [r for r in some if r.get("seed") == seed] for name, some in rows.items()}
        unit = {name: [r for r in some if r.get("method") == method] for name, some in here.items()}
        if not unit["runtimes"]:
            raise PlotError(f"{directory} has no results of method '{method}' in seed {seed}.")
        told = ("no-edit", "copy-source", CONTROLS)
        controls = {name: [r for r in here[name] if r.get("method") in told] for name in ("records", "notes")}
        run.require_handles(seed, method)
        handles = {s["variable"]: Handle.load(run.handle_path(seed, method, s["variable"])) for s in unit["selection"]}
        verdicts = {v["variable"]: Verdict.from_row(v) for v in unit["verdicts"]}
        notes = [str(n) for n in run.manifest.get("notes", [])]
        took = unit["runtimes"][0]
        seconds = sum(took["waited"].values()) if "waited" in took else took["seconds"]
        of = run.unit_of(seed, method)
        return cls(handles, verdicts, unit["records"], seconds, unit, controls, config, of, notes)

    def save(self, directory: str | Path, *, private: bool = False) -> Path:
        """Write a run directory: handles, couplings, results and report.html; the path of the report.

        A directory with results of another network, other data, settings or versions is refused. The manifest of a
        `private` run keeps nothing about the machine.
        """
        start = time.perf_counter()
        report = write_page([self._write(Path(directory), private)])
        self.unit["runtimes"][0].setdefault("waited", {})["report"] = time.perf_counter() - start
        return report

    def _write(self, directory: Path, private: bool = False) -> Path:
        check_name(self.method)
        seed = int(self.config["seeds"][0])
        with RunDirectory.open(
            directory, self.config, library_versions(), "plot_ot.localize(...)", private=private
        ) as run:
            about = {k: v for k, v in self.of.items() if k != "settings"}
            run.require(seed, about)
            run.require(seed, self.of, [self.method])
            for note in self.notes:
                run.note(note)
            run.note_subject(seed, self.of.get("subject", {}))
            run.finish(seed, CONTROLS, self.controls, of=about)
            run.finish(seed, self.method, self.unit, list(self.handles.values()), self.of)
            run.complete([CONTROLS, self.method])
        return run.path


def _some(names: Iterable[str], most: int = 4) -> str:
    """Names in a row, and how many more there are."""
    names = list(names)
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _only(kind: str, name: str | None, there: Sequence[str]) -> str:
    """The one that was asked for, or the only one there is."""
    names = list(dict.fromkeys(there))
    if name is None and len(names) != 1:
        raise PlotError(f"The run has {len(names)} {kind}s ({', '.join(names)}): name one.")
    if name is not None and name not in names:
        unknown(kind, name, names)
    return names[0] if name is None else name


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


def evaluate(handle: Handle, bank: Bank, subject: Subject, readout: str | Readout = "softmax") -> Evaluation:
    """The share of a bank's pairs where the handle makes the network give the swap's label, with 95 % intervals."""
    handle.require(subject)
    bank.require(handle.variable)
    readout = as_readout(readout)
    [recording] = record(subject, bank)
    boot, right = Bootstrap(bank), correct(recording, handle, readout)
    patch = full_patch(handle.variable, [e.place for e in handle.edits], subject)
    others = {**controls(recording, handle.variable, readout), "full-patch": correct(recording, patch, readout)}
    shares = {name: float(hits.double().mean()) for name, hits in others.items()}
    return Evaluation(handle.variable, bank.name, boot.accuracy(right), boot.by_family(right), shares)
