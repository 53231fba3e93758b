"""The studies, by name."""

from plot_ot.studies.task import SeedFailed, Task
from plot_ot.tasks.addition import BinaryAddition
from plot_ot.tasks.heq import HierarchicalEquality
from plot_ot.tasks.ioi import IndirectObject
from plot_ot.tasks.mcqa import MultipleChoice

TASKS: dict[str, type[Task]] = {
    t.name: t for t in (HierarchicalEquality, BinaryAddition, MultipleChoice, IndirectObject)
}

__all__ = [
    "TASKS",
    "BinaryAddition",
    "HierarchicalEquality",
    "IndirectObject",
    "MultipleChoice",
    "SeedFailed",
    "Task",
]
