"""A task as the planner sees it: its banks and methods, and a network that need not be trained or loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from plot_ot.abstract.prompts import encode
from plot_ot.errors import PlotError
from plot_ot.methods import Method
from plot_ot.models.loading import guarded
from plot_ot.models.named import LanguageModel, model_directory
from plot_ot.models.tiny import build_tokenizer, describe_tiny, is_tiny
from plot_ot.planner import Inputs, Scene, Shape, Unloaded, approximate_tokens, shape_by_name
from plot_ot.studies.task import Task
from plot_ot.subjects.decoder.architecture import transformers_library
from plot_ot.tasks.language import LanguageTask


def scene_and_methods(task: Task, seed: int, dtype: str) -> tuple[Scene, Mapping[str, Method]]:
    """What the planner knows of a task before anything runs, and its methods; `dtype` is a language model's type."""
    if isinstance(task, LanguageTask):
        shape = language_shape(task.model).as_type(dtype)
        return language_scene(task, shape, seed), task.methods_at(shape.width, shape.blocks)
    outline = task.outline(seed)
    return Scene.of_subject(outline.subject, outline.splits, outline.outputs), task.methods()


def language_shape(name: str) -> Shape:
    """The shape of a model by the name that tasks take."""
    if not is_tiny(name):
        return shape_by_name(name)
    c = describe_tiny(name)["config"]
    return Shape.gated(
        name,
        depth=c["num_hidden_layers"],
        width=c["hidden_size"],
        heads=c["num_attention_heads"],
        groups=c["num_key_value_heads"],
        head_width=c["head_dim"],
        inner=c["intermediate_size"],
        vocabulary=c["vocab_size"],
        tied=True,
        norms=4,
    )


def tokenizer_here(model: str) -> Any:
    """The model's tokenizer, if it is on this machine; no hub is asked."""
    if is_tiny(model):
        return build_tokenizer()
    fetched = model_directory(model)
    source = str(fetched if fetched.is_dir() else Path(model).expanduser())
    try:
        found = guarded(
            transformers_library().AutoTokenizer.from_pretrained, "tokenizer", source, local_files_only=True
        )
    except PlotError:
        return None
    return found


def language_scene(task: LanguageTask, shape: Shape, seed: int) -> Scene:
    """A task's banks, drawn as if the model answered every prompt correctly, and the prompts that the filter asks."""
    encoded = _encoded(task)
    asked: list[Tensor] = []

    def all_right(rows: Tensor) -> Tensor:
        asked.append(rows)
        return torch.ones(len(rows), dtype=torch.bool)

    banks = task.draw(seed, all_right)
    filtered = sum((Inputs.recorded(rows, torch.arange(len(rows)), encoded(rows)) for rows in asked), Inputs())
    beside = {"filter": replace(filtered, shards=1)}  # nobody shares this work
    if banks.transfer:
        subject = Unloaded(shape, len(task.data.ANSWERS), task.memory)
        beside["transfer"] = Inputs.of(list(banks.transfer.values()), encoded, subject)
    return Scene.of_shape(shape, banks.splits, len(task.data.ANSWERS), encoded, task.memory, beside)


def _encoded(task: LanguageTask) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """A function that turns rows into tokens, by the model's tokenizer where it is available."""
    fetched = model_directory(task.model)
    folder = fetched if fetched.is_dir() else Path(task.model).expanduser()
    tiny = is_tiny(task.model)  # whose tokens are words
    if tiny or not (folder / "tokenizer.json").is_file():
        return lambda rows: approximate_tokens(task.render(rows), first=0 if tiny else 1)
    tokenizer = guarded(transformers_library().AutoTokenizer.from_pretrained, "tokenizer", str(folder))
    bos = LanguageModel(task.model, None, tokenizer).bos

    def encoded(rows: Tensor) -> tuple[Tensor, Tensor]:
        ids, mask = encode(task.render(rows), tokenizer, bos=bos)
        return ids, mask.bool()

    return encoded
