"""What `localize FILE` and `compare FILE FILE` would take: planned like a study, and no weights are loaded."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plot_ot.abstract import CausalModel, Hypothesis, read_pairs
from plot_ot.api import ask
from plot_ot.cli.task_files import data_of, hypothesis_of, load_task, name_of, own_subject, require_file
from plot_ot.comparing import ComparisonPlan, plan_comparison
from plot_ot.errors import PlotError, unknown
from plot_ot.estimating import scene_of
from plot_ot.localizing import METHODS
from plot_ot.models.named import LanguageModel
from plot_ot.planner import Machine, Plan, Prompted, Scene, predict
from plot_ot.subjects import Subject
from plot_ot.tasks.planning import language_shape, tokenizer_here

BLOCKS = ("block_output",)
"""The kinds of places that are looked at unless others are asked for."""


@dataclass(frozen=True)
class PlannedFiles:
    """The hypotheses of task files, what they are asked on, and a network that need not be loaded."""

    hypotheses: Mapping[str, Hypothesis | CausalModel]
    given: Any
    subject: Subject
    counted: bool
    """Whether prompts are counted in words and signs, because the tokenizer is not here."""

    @classmethod
    def of(
        cls, tasks: Sequence[Path], model: str | None, inputs: Path | None, dtype: str, **places: Any
    ) -> PlannedFiles:
        """Read the files; `places` (layers, kinds, memory) are those of the language model."""
        for task in tasks:
            require_file(task)
        with redirect_stdout(sys.stderr):  # what the tasks print is not what we print
            modules = [load_task(task) for task in tasks]
            hypotheses = [hypothesis_of(module, task) for module, task in zip(modules, tasks, strict=True)]
            given = inputs or data_of(modules[0], tasks[0], "--inputs FILE")
        named = dict(zip(name_of(hypotheses, tasks), hypotheses, strict=True))
        first = hypotheses[0]
        if model is None:
            subject = own_subject(modules[0], tasks[0], of_blocks="layers" in places or places["kinds"] != BLOCKS)
            return cls(named, given, subject, counted=False)
        if not isinstance(first, Hypothesis):
            raise PlotError(f"{tasks[0]} defines a bare CausalModel; a language model needs a Hypothesis.")
        given = read_pairs(given)
        given.rows(first)  # all values are known before the answers are checked
        shape, tokenizer = language_shape(model).as_type(dtype), tokenizer_here(model)
        bos = None if tokenizer is None else LanguageModel(model, None, tokenizer).bos
        prompted = Prompted.through(first, shape, tokenizer, bos, **places)
        return cls(named, given, prompted, counted=tokenizer is None)

    def scene(self, **settings: Any) -> Scene:
        """The study that `localize` would be."""
        [hypothesis] = self.hypotheses.values()
        size = settings.pop("size")
        question, given = ask(self.subject, hypothesis, self.given, **settings)
        return scene_of(question, given, size)

    def plans(self, scene: Scene, machine: Machine, methods: Sequence[str], **options: Any) -> list[Plan]:
        """What `localize` would compute on it, by method."""
        [hypothesis] = self.hypotheses.values()
        for name in methods:
            if name not in METHODS:
                unknown("method", name, METHODS)
        chosen = [ask(self.subject, hypothesis, self.given, method=name)[0].method for name in methods]
        return [predict(m, scene, machine, **options) for m in chosen]

    def comparison(self, machine: Machine, **settings: Any) -> ComparisonPlan:
        """What `compare` would compute for each hypothesis."""
        return plan_comparison(self.subject, self.hypotheses, self.given, machine, **settings)
