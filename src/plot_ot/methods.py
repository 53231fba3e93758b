"""Methods: short lists of stages. The paper's methods and the baselines they are judged against."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from plot_ot.errors import unknown
from plot_ot.stages.base import Clock, Problem, Stage, State


@dataclass(frozen=True)
class Method:
    """A named list of stages."""

    name: str
    summary: str
    stages: tuple[Stage, ...]
    kind: str = "transport"
    """`transport`, `das`, or `baseline`."""

    def run(self, problem: Problem) -> tuple[State, dict[str, float]]:
        """All stages in turn; also the seconds each part took."""
        clock = Clock()
        problem = replace(problem, clock=clock)
        state = State.start(problem)
        for stage in self.stages:
            state = stage(problem, state)
        return state, clock.parts


def pick(methods: Mapping[str, Method], names: list[str] | None) -> list[Method]:
    """The methods of those names (all by default), in the registry's order."""
    for name in names or []:
        if name not in methods:
            unknown("method", name, methods)
    return [m for name, m in methods.items() if names is None or name in names]
