"""A run's figures as files of a chosen kind."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

from matplotlib import rc_context

from plot_ot.errors import unknown
from plot_ot.files.run_reading import Reading
from plot_ot.files.writing import write_atomically
from plot_ot.report import style
from plot_ot.report.figures import FIGURES

KINDS: dict[str, dict[str, None]] = {"pdf": {"CreationDate": None}, "png": {"Software": None}, "svg": {"Date": None}}
"""Kinds of files, and the metadata that would make two equal figures differ."""


def export_figures(data: Reading, kinds: Sequence[str], out: Path) -> list[Path]:
    """Write every figure whose numbers are in the run; fonts are embedded (as outlines in SVG)."""
    for kind in kinds:
        if kind not in KINDS:
            unknown("figure format", kind, KINDS)
    written = []
    with style.look(), rc_context({"svg.hashsalt": "plot-ot", "svg.fonttype": "path"}):
        for draw in FIGURES:
            figure = draw(data)
            for kind in kinds if figure is not None else ():
                file = io.BytesIO()
                figure.savefig(file, format=kind, metadata=KINDS[kind])  # type: ignore[union-attr]
                written.append(out / f"{draw.__name__.removeprefix('draw_')}.{kind}")
                write_atomically(written[-1], file.getvalue())
    return written
