"""A submission: the folders of one model's cells, the linear model of indirect objects, and our own scores of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from plot_ot.errors import PlotError, warn
from plot_ot.exchange.mib import UNIT, to_mib, write_triplet
from plot_ot.files.safe_reading import read_json
from plot_ot.files.writing import write_json
from plot_ot.mib.cells import MODELS, Cell
from plot_ot.mib.data import Pair, fit_and_calibration, read_split, some_of_each
from plot_ot.mib.heads import Head, HeadStudy, LinearModel
from plot_ot.mib.prompts import Prompts
from plot_ot.mib.questions import Cities, question
from plot_ot.mib.residual import find_units
from plot_ot.mib.scoring import answered, highest_and_average, unit_scores
from plot_ot.models.named import LanguageModel

LINEAR, SCORES = "ioi_linear_params.json", "scores.json"
LONGEST = 3
"""The most tokens that an answer is given; the benchmark's own runs give no more."""


@dataclass(frozen=True)
class Settings:
    """How a submission is made."""

    data: str | None = None
    """A folder, file or hub data set; by default the benchmark's own on the hub."""
    cities: Cities | None = None
    method: str = "plot-das"
    places: int = 6
    dimensions: int = 16
    epochs: int = 40
    pairs: int = 200
    """Training pairs of every family."""
    test_pairs: int = 100
    """Test pairs of every family that we score on ourselves."""
    new_tokens: int | None = None
    """Tokens that the model may write; by default as many as the answers take, and one on all tasks but addition."""
    layers: Sequence[int] | None = None
    heads: Sequence[Head] | None = None
    head_count: int = 4
    memory: int = 4 << 30
    seed: int = 0


@dataclass(frozen=True)
class Drawn:
    """The pairs of a task that are run, before the model is asked which of them it answers."""

    prompts: Prompts
    train: Sequence[Pair]
    test: Sequence[Pair]
    new_tokens: int


def draw(language_model: LanguageModel, task: str, settings: Settings) -> Drawn:
    """A task's training and test pairs, and how many tokens its answers are given; the model is not run."""
    asked = question(task, settings.cities)
    prompts = Prompts(language_model, asked)
    train, test = (read_split(asked, settings.data, split) for split in ("train", "test"))
    return Drawn(
        prompts,
        some_of_each(train, settings.pairs, settings.seed),
        some_of_each(test, settings.test_pairs, settings.seed),
        settings.new_tokens or _new_tokens(prompts, train),
    )


def submit(
    language_model: LanguageModel,
    cells: Sequence[Cell],
    out: Path,
    settings: Settings | None = None,
    progress: Callable[[str], None] = lambda line: None,
) -> list[dict[str, Any]]:
    """Write the folders of some cells of one model below `out`; our own scores of each, which are also kept there.

    Of several tasks, one whose prompts the model does not answer is left out with a warning.
    """
    settings = settings or Settings()
    taken = [out / c.folder for c in cells if (out / c.folder).exists()]
    if taken:
        raise PlotError(f"{taken[0]} is there already. Choose another --out, or delete it.")
    scores: list[dict[str, Any]] = list(read_json(out / SCORES)["cells"]) if (out / SCORES).is_file() else []
    # what is missing is said before anything runs
    every = {task: draw(language_model, task, settings) for task in dict.fromkeys(c.task for c in cells)}
    made: list[dict[str, Any]] = []
    for task, drawn in every.items():
        prompts, new_tokens, chosen = drawn.prompts, drawn.new_tokens, (drawn.train, drawn.test)
        kept = [answered(prompts, pairs, new_tokens) for pairs in chosen]
        written = f"{new_tokens} token{'s' * (new_tokens != 1)}"
        progress(f"{task}: {len(kept[0])} of {len(chosen[0])} training pairs answered rightly in {written}")
        unanswered = next((n for n, pairs in zip(("training", "test"), kept, strict=True) if not pairs), None)
        if unanswered is not None:
            why = _why_empty(unanswered, drawn)
            if not made and task == [*every][-1]:
                raise PlotError(why)
            warn(f"{task} is left out. {why}")
            continue
        shared = _Indirect.of(language_model, prompts, kept, settings) if task == "ioi_task" else None
        for cell in (c for c in cells if c.task == task):
            if shared is not None:
                told = shared.write(cell, out, settings)
            else:
                told = _residual(cell, prompts, kept, new_tokens, out, settings)
            facts = {"task": cell.task, "model": cell.model, "variable": cell.variable, "new_tokens": new_tokens}
            made.append({**facts, "training_pairs": len(kept[0]), "test_pairs": len(kept[1]), **told})
            progress(f"{cell.folder}: highest {told['highest']:.3f}, average {told['average']:.3f}")
            write_json(out / SCORES, {"cells": [*scores, *made]})
    return made


def _residual(
    cell: Cell, prompts: Prompts, kept: Sequence[Sequence[Pair]], new_tokens: int, out: Path, settings: Settings
) -> dict[str, Any]:
    subject, units = find_units(
        prompts,
        kept[0],
        cell.variable,
        method=settings.method,
        places=settings.places,
        dimensions=settings.dimensions,
        epochs=settings.epochs,
        new_tokens=new_tokens,
        layers=settings.layers,
        memory=settings.memory,
        seed=settings.seed,
    )
    scored = unit_scores([u.handle for u in units], subject, prompts, kept[1], new_tokens)
    scores, layers, how = {}, {}, {}
    for unit, by_family in zip(units, scored, strict=True):
        name = to_mib(unit.handle, out / cell.folder).name
        scores[name], layers[name], how[name] = by_family, unit.place.layer, unit.how
    highest, average = highest_and_average(scores, layers)
    return {"highest": highest, "average": average, "units": scores, "how": how, "measure": "accuracy"}


@dataclass(frozen=True)
class _Indirect:
    """What the two variables of indirect objects share: recorded pairs, the chosen heads, and the linear model."""

    train: HeadStudy
    test: HeadStudy
    heads: Sequence[Head]
    linear: LinearModel

    @classmethod
    def of(
        cls, language_model: LanguageModel, prompts: Prompts, kept: Sequence[Sequence[Pair]], settings: Settings
    ) -> _Indirect:
        train, test = (HeadStudy.recorded(language_model, prompts, pairs, settings.memory) for pairs in kept)
        if settings.heads is not None:
            train.require(settings.heads)
        heads = sorted(settings.heads) if settings.heads is not None else train.choose(settings.head_count)
        with torch.no_grad():
            return cls(train, test, heads, train.fit_linear(heads))

    def write(self, cell: Cell, out: Path, settings: Settings) -> dict[str, Any]:
        """Write a cell's folder, and score it."""
        rotations = {} if settings.method == "full-vector" else self._subspaces(cell.variable, settings)
        for layer, head in self.heads:
            unit = f"AttentionHead(Layer-{layer},Head-{head},Token-all)"
            assert UNIT.fullmatch(unit)  # noqa: S101
            basis = rotations.get((layer, head))
            write_triplet(out / cell.folder / unit, self.train.width, basis, None, cell.variable)
        _write_linear(out, cell.model, self.linear)
        with torch.no_grad():
            found = self.test.error(self.test.differences(self.heads, rotations), self.linear, cell.variable)
        mse = sum(found.values()) / len(found)
        told = {"heads": [list(h) for h in self.heads], "linear": self.linear.as_entry(MODELS[cell.model])}
        return {"highest": mse, "average": mse, "families": found, "measure": "squared error, lower is better", **told}

    def _subspaces(self, variable: str, settings: Settings) -> dict[Head, torch.Tensor]:
        """Directions in the heads, learned on some pairs; none where the whole heads do better on the others."""
        fit, calibration = map(self.train.among, fit_and_calibration(self.train.pairs, settings.seed))
        size = min(settings.dimensions, max(1, fit.width // 2))
        rotations = fit.train(self.heads, self.linear, variable, size, settings.epochs, settings.seed)
        with torch.no_grad():
            tried = [calibration.differences(self.heads), calibration.differences(self.heads, rotations)]
        whole, learned = (sum(calibration.error(y, self.linear, variable).values()) for y in tried)
        return rotations if learned < whole else {}


def _write_linear(out: Path, model: str, linear: LinearModel) -> None:
    """Add the linear model under the class's name: under any other the evaluator may take another model's."""
    path = out / LINEAR
    known = dict(read_json(path)) if path.is_file() else {}
    write_json(path, {**known, model: linear.as_entry(MODELS[model])})


def _new_tokens(prompts: Prompts, pairs: Sequence[Pair]) -> int:
    """One, as the benchmark's evaluator; in addition as many as a sum takes, where a model writes it digit by digit."""
    if prompts.task.name != "arithmetic":
        return 1
    wanted = [prompts.answer_tokens(p.base, prompts.task.expected(p.base.values, {})) for p in pairs[:50]]
    return min(LONGEST, max(map(len, wanted)))


def _why_empty(name: str, drawn: Drawn) -> str:
    """What to say where the model answers no training pair, or no test pair."""
    prompts, example = drawn.prompts, drawn.train[0].base
    expected = prompts.task.expected(example.values, {})
    takes = len(prompts.answer_tokens(example, expected))
    more = (
        f" Its answers take {takes} tokens, such as {expected!r}, and the model may write {drawn.new_tokens}: give "
        f"--new-tokens {takes}."
        if takes > drawn.new_tokens
        else " A model that cannot do the task has no cell."
    )
    return f"The model answers no {name} pair of {prompts.task.name} rightly, base and source.{more}"
