"""The random control of any method: its own search, with random rankings in the place of what it measured.

Every coupling becomes a random ranking of the same sites, as many as the method's own grid has, and everything that
selects and calibrates stays as it is. Stages that learn from labels are left out: a control that learns is no control.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count

import torch

from plot_ot.stages.choose import Calibrate, SelectTokens
from plot_ot.stages.coupling import Localize, LocalizeTokens, ScoreSites, open_places, weightings
from plot_ot.stages.forecast import Forecast
from plot_ot.stages.problem import Candidate, Problem, Stage, State
from plot_ot.stages.ways import Best, LookFurther
from plot_ot.subjects import Place
from plot_ot.transport import from_scores

Localization = Localize | LocalizeTokens | ScoreSites
SALT = 7919
APART = 10_000
"""What separates the random numbers of one localization of a method from those of the next."""


@dataclass(frozen=True)
class RankAtRandom:
    """The menus and groups of a localization stage with random rankings; `draw` numbers independent ones."""

    stage: Localization
    draw: int = 0

    def __call__(self, problem: Problem, state: State) -> State:
        generator = problem.generator(SALT + self.draw)
        candidates: dict[str, tuple[Candidate, ...]] = dict.fromkeys(problem.variables, ())
        for places in open_places(problem, state, isinstance(self.stage, Localize) and self.stage.coupling == "place"):
            for found in self._ranked(problem, state, places, generator):
                for v in problem.variables:
                    if set(places) & set(state.places[v]):
                        candidates[v] += (found,)
        return replace(state, signatures=(), candidates=candidates)

    def forecast(self, ahead: Forecast) -> None:
        """Count no passes: ranking at random costs nothing, and what follows finds as many couplings."""
        counted = len(ahead.passes)
        self.stage.forecast(ahead)
        del ahead.passes[counted:]

    def _ranked(
        self, problem: Problem, state: State, places: Sequence[Place], generator: torch.Generator
    ) -> list[Candidate]:
        label = places[0].name if len(places) == 1 else "all"
        found = []
        for menu in self.stage.menus:
            family = menu(problem.fit, places)
            mask = self.stage.mask(problem, state, family) if isinstance(self.stage, Localize) else None
            for _ in range(self._rankings(problem)):
                shape = (len(problem.coupled), len(family))
                scores = torch.rand(shape, generator=generator, dtype=torch.float64).numpy()
                names = [s.name for s in family.sites]
                coupling = from_scores(problem.coupled, names, scores if mask is None else scores * mask, "random")
                found.append(Candidate(family, coupling, label))
        return found

    def _rankings(self, problem: Problem) -> int:
        """How many couplings of one menu the stage lets calibration choose between."""
        if isinstance(self.stage, ScoreSites):
            return 1
        grid = len(self.stage.transport.grid)
        if not isinstance(self.stage, Localize) or not self.stage.spec.hierarchical:
            return grid
        bank = problem.fit.bank
        seen = [bank.families[f] for f in bank.family.unique().tolist()]
        return grid * (1 + len(weightings(bank.families, seen, self.stage.steps)))


def at_random(stages: Sequence[Stage], draw: int) -> tuple[Stage, ...]:
    """The same stages with every localization ranked at random; empty where nothing but learners makes handles."""
    kept = _at_random(stages, draw, count())
    return kept if any(not isinstance(s, (RankAtRandom, SelectTokens)) for s in kept) else ()


def _at_random(stages: Sequence[Stage], draw: int, number: count[int]) -> tuple[Stage, ...]:
    kept: list[Stage] = []
    for given in stages:
        stage = given.best if isinstance(given, LookFurther) else given
        if isinstance(stage, (Localize, LocalizeTokens, ScoreSites)):
            kept.append(RankAtRandom(stage, draw + APART * next(number)))
        elif isinstance(stage, Best):
            ways = [(way, _at_random(way, draw, number)) for way in stage.ways]
            left = tuple(new for old, new in ways if new or not old)
            if left:
                kept.append(replace(stage, ways=left))
        elif isinstance(stage, Calibrate):  # most random handles tie at doing nothing: their losses need not be run
            kept.append(replace(stage, search=replace(stage.search, ties="smallest"), coarse=True))
        elif not getattr(stage, "learner", False):
            kept.append(stage)
    return tuple(kept)
