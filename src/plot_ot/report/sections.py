"""The tables of the page, counted from a run's lists: plain values that the template lays out."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

from plot_ot.files.run_reading import Reading, numbers
from plot_ot.files.writing import Json
from plot_ot.judging.status import Status
from plot_ot.report.findings import STATUSES, widths_of
from plot_ot.report.summary import is_study, kind_of
from plot_ot.report.tables import CONTROLS, average_by_seed, banks_in, inputs_said, methods_in
from plot_ot.report.words import count, names

TASKS = {
    "heq": "Hierarchical equality",
    "addition": "Binary addition",
    "mcqa": "Multiple-choice questions",
    "ioi": "Indirect object identification",
}
"""The names of the tasks in a sentence."""


@dataclass(frozen=True)
class Cell:
    """A mean over seeds with its population standard deviation; for one seed, its 95 % interval if there is one."""

    mean: float
    sd: float | None = None
    interval: tuple[float, float] | None = None


def cell(values: Sequence[float], interval: Sequence[float] = ()) -> Cell | None:
    """The cell of some seeds' values; none without values."""
    if not values:
        return None
    if len(values) > 1:
        return Cell(fmean(values), pstdev(values))
    return Cell(values[0], None, (interval[0], interval[1]) if len(interval) == 2 else None)


def question(reading: Reading) -> str:
    """The question that the run asked, as a sentence."""
    variables = reading.distinct("variable", "records", "selection")
    if not variables:
        return "A run without results"
    return f"Where {'do' if len(variables) > 1 else 'does'} {names(variables)} live?"


def about(reading: Reading) -> str:
    """The setting of the run, as a sentence."""
    task = str(reading.results.get("task") or reading.config.get("task") or "an unnamed task")
    subjects = [subject_words(str(s)) for s in reading.distinct("subject", "records")]
    seeds = reading.distinct("seed", "records")
    methods = [m for m in methods_in(reading.results) if m not in CONTROLS]
    where = f" in {names(subjects)}" if subjects else ""
    model = reading.config.get("model")
    where += f" ({model})" if model and str(model) not in where else ""
    if not seeds:
        return f"{TASKS.get(task, task)}: nothing has been measured yet, or what was measured cannot be read."
    tested = "Everything was chosen on calibration pairs and tested once on held-out pairs."
    if not is_study(reading):
        return f"Looked for{where}{_shape(reading)}. {tested}"
    counts = f"{count(len(seeds), 'seed')}, {count(len(methods), 'method')}"
    return f"{TASKS.get(task, task)}{where}: {counts}. {tested}"


SUBJECTS = {
    "MLPSubject": "a multilayer perceptron",
    "SequentialSubject": "a sequential network",
    "GRUSubject": "a recurrent network",
    "ModuleSubject": "a PyTorch module",
    "CausalSubject": "a causal model",
}
"""Networks without a name of their own, by the class that runs them."""


def subject_words(name: str) -> str:
    """The name of a network in a sentence; what is only the name of a class is told in words."""
    name = re.sub(r"~[0-9a-f]{8}$", "", name)  # tells two paths apart (`privacy`), and nobody wants to read it
    family = re.fullmatch(r"([A-Z]\w*?)(?:ForCausalLM|LMHeadModel)", name)
    return f"a {family[1]} language model" if family else SUBJECTS.get(name, name)


def _shape(reading: Reading) -> str:
    """How many places were looked at, and how wide they are."""
    widths = widths_of(reading)
    if not widths:
        return ""
    low, high = min(widths.values()), max(widths.values())
    return f", at {count(len(widths), 'place')} of width {low if low == high else f'{low} to {high}'}"


# -- accuracy -------------------------------------------------------------------------------------------------


def accuracy(reading: Reading) -> Json:
    """Per method: every bank, the average, the full patch at the same places, and seconds."""
    results = reading.results
    banks = banks_in(results)
    rows = []
    for method in methods_in(results):
        mine = reading.rows("records", method=method)
        cells = []
        for variable, bank in banks:
            hits = [r for r in mine if (r["variable"], r["bank"]) == (variable, bank)]
            cells.append(cell([r["accuracy"] for r in hits], numbers(hits[0].get("interval")) if hits else ()))
        patches = list(average_by_seed(results, method, "full_patch").values())
        rows.append(
            {
                "method": method,
                "kind": kind_of(reading, method),
                "cells": cells,
                "average": cell(list(average_by_seed(results, method).values())),
                "full_patch": fmean(patches) if patches else None,
                "seconds": cell([t["seconds"] for t in reading.rows("runtimes", method=method)]),
            }
        )
    return {"banks": banks, "rows": rows, "seeds": len(reading.distinct("seed", "records"))}


def details(reading: Reading) -> list[Json]:
    """Per method, every seed with its intervals and every family."""
    banks = banks_in(reading.results)
    found = []
    for method in methods_in(reading.results):
        mine = reading.rows("records", method=method)
        by_key = {(r["seed"], r["variable"], r["bank"]): r for r in mine}
        seeds = [(s, [by_key.get((s, *b)) for b in banks]) for s in sorted({r["seed"] for r in mine})]
        found.append({"method": method, "banks": banks, "seeds": seeds, "families": _families(mine)})
    return found


def _families(records: Sequence[Json]) -> list[Json]:
    """Accuracy within every counterfactual family, over seeds."""
    grouped: dict[tuple[str, str, str], list[Json]] = {}
    for r in records:
        families = r.get("families")
        for family, a in (families if isinstance(families, dict) else {}).items():
            if isinstance(a, dict) and numbers(a.get("value")):
                grouped.setdefault((r["variable"], r["bank"], str(family)), []).append(a)
    return [
        {
            "variable": v,
            "bank": bank,
            "family": family,
            "cell": cell([a["value"] for a in some], numbers([some[0].get("low"), some[0].get("high")])),
            "pairs": sum(int(n) for n in numbers([a.get("pairs") for a in some])),
        }
        for (v, bank, family), some in grouped.items()
    ]


def elsewhere(reading: Reading) -> list[Json]:
    """The same handles measured differently: over the whole vocabulary, and on banks of another distribution."""
    spoken = [{**r, "accuracy": r["vocabulary"]} for r in reading.results["records"] if numbers(r.get("vocabulary"))]
    tables = {
        "Over the whole vocabulary": (spoken, "The network may say any token, not only one of the answers."),
        "On other inputs": (
            reading.results["transfer"],
            "Test banks of another distribution; nothing was chosen on them.",
        ),
    }
    found = []
    for title, (rows, note) in tables.items():
        if not rows:
            continue
        banks = banks_in({"records": rows})
        by_method: dict[str, list[list[float]]] = {}
        for r in rows:
            line = by_method.setdefault(r["method"], [[] for _ in banks])
            line[banks.index((r["variable"], r["bank"]))].append(r["accuracy"])
        lines = [(m, [cell(values) for values in line]) for m, line in by_method.items()]
        found.append({"title": title, "note": note, "banks": banks, "rows": lines})
    return found


def evidence(reading: Reading) -> list[Json]:
    """What speaks for a handle besides its accuracy: what its directions decode, and how natural edited states are."""
    known = [s for s in reading.results["selection"] if isinstance(s.get("evidence"), dict)]
    found = []
    for method, variable in dict.fromkeys((s["method"], s["variable"]) for s in known):
        mine = [s["evidence"] for s in known if (s["method"], s["variable"]) == (method, variable)]
        values = {k: cell(numbers([e.get(k) for e in mine])) for k in ("decoding", "chance", "stretch")}
        found.append({"method": method, "variable": variable, **values})
    return found


def cross(reading: Reading) -> list[Json]:
    """Per method, handle i scored on the labels of variable j: the mean over seeds."""
    rows = reading.results["cross"]
    labels = list(dict.fromkeys(c["labels"] for c in rows))
    found = []
    for method in dict.fromkeys(c["method"] for c in rows):
        mine = [c for c in rows if c["method"] == method]
        matrix = []
        for handle in dict.fromkeys(c["handle"] for c in mine):
            scores = [[c["accuracy"] for c in mine if (c["handle"], c["labels"]) == (handle, j)] for j in labels]
            matrix.append((handle, [fmean(s) if s else None for s in scores]))
        found.append({"method": method, "labels": labels, "matrix": matrix})
    return found


def runtime(reading: Reading) -> Json:
    """Mean seconds of every part, per method."""
    rows = reading.results["runtimes"]
    every = dict.fromkeys(p for t in rows for p in t["parts"])
    parts = [p for p in every if any(numbers(t["parts"].get(p)) and t["parts"][p] for t in rows)]
    found = []
    for method in dict.fromkeys(t["method"] for t in rows):
        mine = [t for t in rows if t["method"] == method]
        means = [fmean(numbers([t["parts"].get(p, 0.0) for t in mine]) or [0.0]) for p in parts]
        found.append((method, means, cell([t["seconds"] for t in mine])))
    return {"parts": parts, "rows": found}


def waited(reading: Reading) -> str:
    """Where the time of a single method went, as a sentence."""
    rows = reading.results["runtimes"]
    if len(rows) != 1:
        return ""
    parts = rows[0].get("waited") if isinstance(rows[0].get("waited"), dict) else rows[0]["parts"]
    told = {str(p).replace("_", " "): float(s) for p, s in parts.items() if numbers(s) and s >= 0.05}
    said = ", ".join(f"{part} {seconds:.1f} s" for part, seconds in told.items())
    return f"{rows[0]['method']} took {sum(told.values()):.1f} s: {said}." if told else ""


def verdicts(reading: Reading) -> Json:
    """Per method and variable, the verdicts of all seeds, best first."""
    rows = reading.results["verdicts"]
    variables = list(dict.fromkeys(v["variable"] for v in rows))
    found = []
    for method in dict.fromkeys(v["method"] for v in rows):
        line = []
        for variable in variables:
            said = [Status(v["status"]) for v in rows if (v["method"], v["variable"]) == (method, variable)]
            tally = sorted(Counter(said).items(), key=lambda x: STATUSES.index(x[0]))
            placed = sum(status.found for status in said)
            line.append({"tally": tally, "seeds": len(said), "placed": placed})
        found.append((method, line))
    seen = {Status(v["status"]) for v in rows}
    return {
        "variables": variables,
        "rows": found,
        "statuses": [s for s in STATUSES if s in seen],
    }


# -- where it came from ---------------------------------------------------------------------------------------


def provenance(reading: Reading) -> Json:
    """What was run, with what, and which files it left."""
    m = reading.manifest
    inside = ("manifest.json", "results.json", "couplings.json")
    kept = [name for name in inside if (reading.path / name).exists()]
    figures = sorted(p.relative_to(reading.path).as_posix() for p in reading.path.glob("figures/*") if p.is_file())
    handles = sum(1 for _ in reading.path.glob("handles/*/*.safetensors"))
    return {
        "started": m.get("started"),
        "finished": m.get("finished"),
        "versions": _table(m.get("versions")),
        "machine": _table(m.get("machine")),
        "config": _table(reading.config),
        "inputs": inputs_said(reading.results),
        "seeds": reading.distinct("seed", "records"),
        "directory": reading.name,
        "files": kept,
        "figures": figures,
        "handles": handles,
    }


def _table(value: Any) -> list[tuple[str, str]]:
    items = value.items() if isinstance(value, dict) else ()
    return [(str(k), setting_text(v)) for k, v in items if v is not None]


def setting_text(value: Any) -> str:
    """Write a setting as text; lists and tables lose their brackets."""
    if isinstance(value, dict):
        return ", ".join(f"{k} {setting_text(v)}" for k, v in value.items())
    return ", ".join(map(setting_text, value)) if isinstance(value, list) else str(value)


def figure_links(figures: Sequence[str]) -> list[tuple[str, list[tuple[str, str]]]]:
    """Figure files by name, each with its kinds."""
    grouped: dict[str, list[tuple[str, str]]] = {}
    for f in figures:
        path = Path(f)
        grouped.setdefault(path.stem, []).append((path.suffix.lstrip("."), f))
    return list(grouped.items())
