"""One seed of a task, ready to be studied: the network, its banks, and how its outputs are read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from plot_ot.abstract.banks import Bank, Splits
from plot_ot.engine import Recipe
from plot_ot.methods import Method
from plot_ot.signatures import Readout
from plot_ot.subjects import Subject


@dataclass(frozen=True)
class Wording:
    """The words of a text task: prompts, the names of the answers, and the network read over its whole vocabulary."""

    render: Callable[[Tensor], list[str]]
    answers: Sequence[str]
    strict: Subject
    """The same network with one more output: the largest logit of all that is not an answer."""

    def answer(self, number: int) -> str:
        """The name of an answer; one past the last is any other token."""
        return self.answers[number] if number < len(self.answers) else "(something else)"


@dataclass(frozen=True)
class Prepared:
    """One seed of a task: a network, its banks, and how its outputs are looked at."""

    task: str
    subject_name: str
    seed: int
    subject: Subject
    splits: Splits
    readout: Readout
    score: str = "balanced"
    notes: Mapping[str, Any] = field(default_factory=dict)
    transfer: Mapping[tuple[str, str], Bank] = field(default_factory=dict)
    """More test banks, of another distribution; reported apart."""
    wording: Wording | None = None
    sources: Mapping[str, str] = field(default_factory=dict)
    """What network and banks were made from besides the weights, by name: the tokenizer, files of questions."""
    recorded_seconds: float = 0.0
    """What passes over inputs of the splits took that recording will not repeat: those of a filter."""
    controls: str = "standard"
    """Which controls a verdict has; see `judging.judges.CONTROLS`."""
    recipe: Recipe | None = None
    """How workers elsewhere make the network for themselves; without it, it is sent to them."""


@dataclass(frozen=True)
class Sweep:
    """A method with one parameter (`epsilon` or `beta`) at several values."""

    parameter: str
    variants: Mapping[float, Method]

    @property
    def name(self) -> str:
        """The name of its unit of work in a run."""
        return f"{self.parameter}-sweep"
