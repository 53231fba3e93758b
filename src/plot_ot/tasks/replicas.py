"""How workers elsewhere load a task's language model for themselves: a recipe of plain values, not the weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from functools import partial
from typing import Any

from plot_ot.engine import Recipe
from plot_ot.errors import PlotError
from plot_ot.subjects import Subject
from plot_ot.tasks import TASKS, Task
from plot_ot.tasks.language import LanguageTask
from plot_ot.tasks.text_data import Sizes


def recipe(task: Task) -> Recipe | None:
    """The task's name and options, from which `replica` makes its network; None where networks are small and are sent.

    A model that is named by a directory or file must be found there on every node.
    """
    if not isinstance(task, LanguageTask):
        return None
    options = {f.name: getattr(task, f.name) for f in fields(task)}
    return partial(replica, task.name, {**options, "sizes": vars(task.sizes)})


def replica(name: str, options: Mapping[str, Any]) -> Subject:
    """The network of a language task, loaded here."""
    task = TASKS[name](**{**options, "sizes": Sizes(**options["sizes"])})
    if not isinstance(task, LanguageTask):
        raise PlotError(f"'{name}' is no task on a language model; its network is sent, not loaded.")
    return task.subject
