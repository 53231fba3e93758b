"""What test banks say about a handle: intervals, controls, gates, the verdict."""

from plot_ot.judging.capacity import Capacity
from plot_ot.judging.controls import full_patch
from plot_ot.judging.gates import Answer, Gate
from plot_ot.judging.intervals import Accuracy, Bootstrap, Interval
from plot_ot.judging.judges import Judge
from plot_ot.judging.naturalness import Naturalness
from plot_ot.judging.profile import Profile
from plot_ot.judging.status import Status
from plot_ot.judging.verdict import Opponents, Verdict, judge

__all__ = [
    "Accuracy",
    "Answer",
    "Bootstrap",
    "Capacity",
    "Gate",
    "Interval",
    "Judge",
    "Naturalness",
    "Opponents",
    "Profile",
    "Status",
    "Verdict",
    "full_patch",
    "judge",
]
