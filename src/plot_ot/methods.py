"""Methods: short lists of stages. The paper's methods and the baselines they are judged against."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from plot_ot.errors import unknown
from plot_ot.stages.base import Clock, Problem, Stage, State
from plot_ot.stages.calibrate import Search
from plot_ot.stages.choose import Calibrate
from plot_ot.stages.localize import ScoreSites, at_random


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
        seen: list[State] = []
        for stage in self.stages:
            last, state = state, stage(problem, state)
            if state.candidates is last.candidates and seen:
                seen[-1] = state  # made from the same couplings
            elif state.candidates:
                seen.append(state)
        return replace(state, trail=tuple(seen)), clock.parts


def pick(methods: Mapping[str, Method], names: list[str] | None) -> list[Method]:
    """The methods of those names (all by default), in the registry's order."""
    for name in names or []:
        if name not in methods:
            unknown("method", name, methods)
    return [m for name, m in methods.items() if names is None or name in names]


def random_sites(draw: int, search: Search) -> Method:
    """The control of every transport method: a random ranking of all neurons, then the same search."""
    stages = (ScoreSites("random", at_random(draw)), Calibrate(replace(search, ties="smallest"), supports="place"))
    return Method(f"random-{draw}", "random neurons and weights, same search", stages, kind="baseline")
