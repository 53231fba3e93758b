"""The studies, by name."""

from plot_ot.tasks.addition import BinaryAddition
from plot_ot.tasks.base import SeedFailed, Task
from plot_ot.tasks.heq import HierarchicalEquality

TASKS: dict[str, type[Task]] = {t.name: t for t in (HierarchicalEquality, BinaryAddition)}

__all__ = ["TASKS", "BinaryAddition", "HierarchicalEquality", "SeedFailed", "Task"]
