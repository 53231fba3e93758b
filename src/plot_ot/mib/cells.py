"""The 26 cells of the causal-variable track: a task, a model and a variable, and the folder that a submission has."""

from __future__ import annotations

from dataclasses import dataclass

from plot_ot.errors import PlotError, unknown

MODELS = {
    "GPT2LMHeadModel": "openai-community/gpt2",
    "Qwen2ForCausalLM": "Qwen/Qwen2.5-0.5B",
    "Gemma2ForCausalLM": "google/gemma-2-2b",
    "LlamaForCausalLM": "meta-llama/Meta-Llama-3.1-8B-Instruct",
}
"""The benchmark's models, by the name of their class, which its folders have."""
_SMALL, _QWEN, _GEMMA, _LLAMA = MODELS
TASKS = {
    "ioi_task": ((_SMALL, _QWEN, _GEMMA, _LLAMA), ("output_token", "output_position")),
    "4_answer_MCQA": ((_QWEN, _GEMMA, _LLAMA), ("answer_pointer", "answer")),
    "ARC_easy": ((_GEMMA, _LLAMA), ("answer_pointer", "answer")),
    "arithmetic": ((_GEMMA, _LLAMA), ("ones_carry",)),
    "ravel_task": ((_GEMMA, _LLAMA), ("Country", "Continent", "Language")),
}
"""Which models and variables each task has."""
SHORT = {"ioi": "ioi_task", "mcqa": "4_answer_MCQA", "arc": "ARC_easy", "ravel": "ravel_task"}


@dataclass(frozen=True)
class Cell:
    """One cell of the track's table."""

    task: str
    model: str
    variable: str

    @property
    def folder(self) -> str:
        """The name of its folder in a submission."""
        return f"{self.task}_{self.model}_{self.variable}"


CELLS = tuple(Cell(task, m, v) for task, (models, variables) in TASKS.items() for m in models for v in variables)


def cells_of(model: str, task: str, variable: str | None) -> list[Cell]:
    """The cells of a model's class that a task (or `all`) and perhaps a variable name."""
    if model not in MODELS:
        raise PlotError(
            f"MIB's causal-variable track has no model of class {model}; its classes are {', '.join(MODELS)}."
        )
    task = SHORT.get(task, task)
    if task != "all" and task not in TASKS:
        unknown("task of MIB", task, ["all", *SHORT, *TASKS])
    named = [c for c in CELLS if task in ("all", c.task)]
    if variable is not None and variable not in {c.variable for c in named}:
        unknown("variable of this task", variable, dict.fromkeys(c.variable for c in named))
    found = [c for c in named if c.model == model and variable in (None, c.variable)]
    if not found:
        there = ", ".join(dict.fromkeys(c.model for c in named))
        raise PlotError(f"MIB has no cell of {task} for {model}; it has {there}.")
    return found
