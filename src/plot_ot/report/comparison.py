"""Several runs side by side: what differs between them, and what that did to accuracy and cost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from plot_ot.files.privacy import shared_path
from plot_ot.files.run_reading import Reading
from plot_ot.files.writing import Json
from plot_ot.report import sections, summary
from plot_ot.report.findings import Finding, findings
from plot_ot.report.payload import method_summary
from plot_ot.report.published import published
from plot_ot.report.tables import CONTROLS, average_by_seed, methods_in


def compare(readings: Sequence[Reading]) -> Json:
    """Collect everything that a comparison of runs shows."""
    labels = run_labels(readings)
    return {
        "runs": [_run(r, label) for r, label in zip(readings, labels, strict=True)],
        "labels": labels,
        "differences": differences(readings),
        "methods": _methods(readings),
        "verdicts": _verdicts(readings),
        "problems": [
            f"{label}: {p}"
            for r, label in zip(readings, labels, strict=True)
            for p in (*r.problems, r.gaps_sentence)
            if p
        ],
        "data": {
            "name": "comparison",
            "runs": [
                {
                    "name": label,
                    "methods": [method_summary(r, m) for m in methods_in(r.results)],
                }
                for r, label in zip(readings, labels, strict=True)
            ],
            "published": _published(readings),
        },
    }


def run_labels(readings: Sequence[Reading]) -> list[str]:
    """The runs' directory names; with their parents where two are called the same."""
    names = [r.name for r in readings]
    parents = [f"{r.path.resolve().parent.name}/{r.name}" for r in readings]
    labels = [n if names.count(n) == 1 else p for n, p in zip(names, parents, strict=True)]
    return [x if labels.count(x) == 1 else shared_path(str(r.path)) for x, r in zip(labels, readings, strict=True)]


def _run(reading: Reading, label: str) -> Json:
    best = summary.best_method(reading)
    averages = list(average_by_seed(reading.results, best).values()) if best else []
    return {
        "label": label,
        "about": sections.about(reading),
        "best": best,
        "seeds": len(reading.distinct("seed", "records")),
        "average": sections.cell(averages),
        "seconds": sections.cell([t["seconds"] for t in reading.rows("runtimes", method=best)]),
    }


def differences(readings: Sequence[Reading]) -> list[tuple[str, list[str]]]:
    """Configuration, versions and machine, where they are not the same in all runs."""
    flat = [_flat(r.manifest) for r in readings]
    keys = list(dict.fromkeys(k for f in flat for k in f))
    rows = [(k, [f.get(k, "–") for f in flat]) for k in keys]
    return [(k, values) for k, values in rows if len(set(values)) > 1]


def _flat(manifest: Json) -> dict[str, str]:
    found: dict[str, str] = {}
    for part in ("config", "versions", "machine"):
        value: Any = manifest.get(part)
        for k, v in (value if isinstance(value, dict) else {}).items():
            found[str(k)] = sections.setting_text(v)
    return found


def _methods(readings: Sequence[Reading]) -> list[Json]:
    """Per method, its average accuracy and seconds in every run."""
    every = dict.fromkeys(m for r in readings for m in methods_in(r.results))
    ordered = [m for m in every if m not in CONTROLS] + [m for m in CONTROLS if m in every]
    return [
        {
            "method": m,
            "control": m in CONTROLS,
            "accuracy": [sections.cell(list(average_by_seed(r.results, m).values())) for r in readings],
            "seconds": [sections.cell([t["seconds"] for t in r.rows("runtimes", method=m)]) for r in readings],
        }
        for m in ordered
    ]


def _verdicts(readings: Sequence[Reading]) -> list[tuple[str, list[Finding | None]]]:
    """Per variable, the finding of every run's best method."""
    own = [{f.variable: f for f in findings(r, summary.best_method(r) or "")} for r in readings]
    variables = dict.fromkeys(v for o in own for v in o)
    return [(v, [o.get(v) for o in own]) for v in variables]


def _published(readings: Sequence[Reading]) -> list[Json]:
    papers = {p.setting: p for p in (published(r.config) for r in readings) if p}
    return [
        {"setting": p.setting, "machine": p.machine, "points": [vars(x) for x in p.points]} for p in papers.values()
    ]
