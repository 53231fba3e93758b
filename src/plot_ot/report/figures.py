"""The paper's figures, drawn from a run directory."""

from __future__ import annotations

from plot_ot.runs import RunDirectory


def draw_figures(run: RunDirectory) -> None:
    """All figures of the run."""
