"""What test banks say about a handle: intervals, controls, the verdict."""

from plot_ot.judging.naturalness import Naturalness
from plot_ot.judging.status import Status
from plot_ot.judging.verdict import Accuracy, Bootstrap, Verdict, controls, full_patch, judge

__all__ = [
    "Accuracy",
    "Bootstrap",
    "Naturalness",
    "Status",
    "Verdict",
    "controls",
    "full_patch",
    "judge",
]
