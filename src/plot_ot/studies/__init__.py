"""Studies: methods on the seeds of a task, resumed where they stopped, as plain records."""

from plot_ot.studies.study import Prepared, Spoken, Study
from plot_ot.studies.task import Outline, SeedFailed, Task

__all__ = [
    "Outline",
    "Prepared",
    "SeedFailed",
    "Spoken",
    "Study",
    "Task",
]
