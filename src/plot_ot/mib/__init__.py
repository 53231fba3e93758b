"""The causal-variable track of MIB, the Mechanistic Interpretability Benchmark: its cells, and submissions to them."""

from plot_ot.mib.cells import CELLS, Cell
from plot_ot.mib.costs import CellPlan, SubmissionPlan, plan_submission
from plot_ot.mib.scoring import highest_and_average
from plot_ot.mib.submission import Settings, submit

__all__ = [
    "CELLS",
    "Cell",
    "CellPlan",
    "Settings",
    "SubmissionPlan",
    "highest_and_average",
    "plan_submission",
    "submit",
]
