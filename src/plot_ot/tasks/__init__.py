"""The studies, by name."""

from plot_ot.tasks.base import SeedFailed, Task
from plot_ot.tasks.heq import HierarchicalEquality

TASKS: dict[str, type[Task]] = {HierarchicalEquality.name: HierarchicalEquality}

__all__ = ["TASKS", "HierarchicalEquality", "SeedFailed", "Task"]
