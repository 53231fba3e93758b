"""Studies: methods on the seeds of a task, resumed where they stopped, as plain records."""

from plot_ot.studies.prepared import Prepared, Sweep, Wording
from plot_ot.studies.running import Progress, Step
from plot_ot.studies.study import Study
from plot_ot.studies.task import Outline, SeedFailed, Task

__all__ = [
    "Outline",
    "Prepared",
    "Progress",
    "SeedFailed",
    "Step",
    "Study",
    "Sweep",
    "Task",
    "Wording",
]
