"""Several ways to go on: the best of them, and looking further where calibration is not content with it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from plot_ot.handles import Handle
from plot_ot.stages.forecast import Forecast
from plot_ot.stages.problem import Problem, Stage, State, advance, best_of
from plot_ot.subjects import BankRecording, Place

Inside = Callable[[Problem, State], State]


@dataclass(frozen=True)
class Best:
    """Several ways to go on from here; each variable keeps the handle that does best on calibration.

    Between equal scores the first way counts, unless it needs more than `readable` times the directions of another:
    put the handles that are easiest to read first. The empty way keeps what there is. What follows looks only where
    the handles are.
    """

    ways: tuple[tuple[Stage, ...], ...]
    readable: int = 4

    def __call__(self, problem: Problem, state: State) -> State:
        return self.among(range(len(self.ways)), problem, state)

    def among(self, ways: Sequence[int], problem: Problem, state: State) -> State:
        """The choice between some of the ways."""
        walked = [_walked(problem, state, self.ways[way]) for way in ways]
        ends = [end for end, _ in walked]
        handles, calibrations = {}, {}
        for v in problem.variables:
            k = self._best([end.handles[v] for end in ends])
            best = ends[k]
            before = best.handles[v].chosen  # a handle that was kept knows its earlier ways
            taken, steps = (*before.get("ways", ()), ways[k]), (*before.get("way_steps", ()), walked[k][1].get(v, 0))
            handles[v] = noting(best.handles[v], ways=taken, way_steps=steps)
            if v in best.calibrations and best.calibrations[v].handle is best.handles[v]:
                calibrations[v] = replace(best.calibrations[v], handle=handles[v])
        fitted = [end for end in ends if end.candidates is not state.candidates]
        candidates = {v: tuple(c for end in fitted for c in end.candidates.get(v, ())) for v in problem.variables}
        return replace(
            state,
            places={v: tuple(e.place for e in h.edits) for v, h in handles.items()},
            handles=handles,
            calibrations=calibrations,
            candidates=candidates if fitted else state.candidates,
            signatures=tuple(x for end in fitted for x in end.signatures) or state.signatures,
            profile=best_of(*(end.profile for end in ends)),
            capacity=best_of(*(end.capacity for end in ends)),
        )

    def forecast(self, ahead: Forecast) -> None:
        before = {v: dict(own) for v, own in ahead.open.items()}
        for way in self.ways:
            ahead.open = {v: dict(own) for v, own in before.items()}
            ahead.walk(way)
        ahead.open = before
        ahead.narrow(1)

    def _best(self, handles: Sequence[Handle]) -> int:
        scores = [round(float(h.chosen["calibration_score"]), 9) for h in handles]
        tied = [k for k, score in enumerate(scores) if score == max(scores)]
        fewest = min(handles[k].size for k in tied)
        return next(k for k in tied if handles[k].size <= self.readable * fewest)

    def only(self, ways: Iterable[int], steps: Mapping[int, int] | None = None) -> Best:
        """The same choice between some of the ways, or between the first steps of each."""
        return replace(self, ways=tuple(self.ways[k][: steps[k] if steps else None] for k in sorted(ways)))


def _walked(problem: Problem, state: State, way: Sequence[Stage]) -> tuple[State, dict[str, int]]:
    """Where a way ends, and after how many of its steps each variable's handle was there."""
    made: dict[str, int] = {}
    for number, stage in enumerate(way, 1):
        last, state = state, advance(problem, state, stage)
        changed = [v for v, h in state.handles.items() if v not in last.handles or h.edits is not last.handles[v].edits]
        made |= dict.fromkeys(changed, number)
    return state, made


@dataclass(frozen=True)
class LookFurther:
    """Choose at the places kept so far, and where calibration is not content, look into those that were dropped.

    A whole patch of a place that several variables share looks like copying the source, so a coarse stage may drop
    the right place. As long as a variable's calibration score is below `enough`, the next places in the order of the
    coarse coupling are tried, as many at a time as were kept, up to `most` more. Then a `scout`, stages that end in a
    handle at little cost, goes to all places that are left, up to `scouted`, at once, and only the one where it did
    best is looked into in all ways. What is left after that is named as untried. Output variables, of which no verdict
    asks more than where they are set, can be given fewer ways, `outputs`, and are then not looked for further.
    """

    best: Best
    enough: float = 0.97
    most: int = 6
    scout: tuple[Stage, ...] = ()
    scouted: int = 30
    outputs: tuple[int, ...] = ()

    def __call__(self, problem: Problem, state: State) -> State:
        outputs = self._outputs(problem.variables, problem.fit)
        others = [v for v in problem.variables if v not in outputs]
        found = self.best(problem.only(others), _open_to(state, others)) if others else replace(state, handles={})
        left = {v: [p for p in self._order(problem, state, v) if p not in state.places[v]] for v in others}
        ways: list[tuple[Inside, int]] = [(self.best, self.most), (self._scouted, self.scouted if self.scout else 0)]
        for inside, budget in ways:
            further = dict.fromkeys(others, 0)
            for _ in range(budget):
                wanting = [v for v in others if left[v] and self._score(found, v) < self.enough and further[v] < budget]
                if not wanting:
                    break
                places: dict[str, tuple[Place, ...]] = {}
                for v in wanting:
                    at_once = max(1, len(state.places[v])) if inside is self.best else budget
                    count = min(at_once, budget - further[v])
                    places[v], left[v] = tuple(left[v][:count]), left[v][count:]
                    further[v] += count
                found = self._with_further(found, inside(problem.only(wanting), replace(state, places=places)))
        handles = {v: noting(h, untried=[p.name for p in left[v]]) for v, h in found.handles.items()}
        same = {v: c for v, c in found.calibrations.items() if c.handle is found.handles[v]}
        kept = {v: replace(c, handle=handles[v]) for v, c in same.items()}
        found = replace(found, handles=handles, calibrations=kept)
        return self._with_outputs(problem.only(outputs), state, found) if outputs else found

    def quick(self) -> LookFurther:
        """The same, for all variables, by the ways that output variables are given."""
        fewer = tuple(range(len(self.outputs)))
        return replace(self, best=self.best.only(self.outputs), outputs=fewer) if fewer else self

    def _outputs(self, variables: Iterable[str], fit: BankRecording) -> list[str]:
        """The variables that get fewer ways."""
        return [v for v in variables if fit.bank.power(v).is_output] if self.outputs else []

    def _with_outputs(self, problem: Problem, state: State, found: State) -> State:
        """What was found, and what the fewer ways find of the output variables."""
        fewer = self.best.among(self.outputs, problem, _open_to(state, problem.variables))
        return replace(
            found,
            places={**found.places, **fewer.places},
            handles={**found.handles, **fewer.handles},
            profile=best_of(found.profile, fewer.profile),
            capacity=best_of(found.capacity, fewer.capacity),
        )

    def forecast(self, ahead: Forecast) -> None:
        """Output variables are counted by themselves, on fewer ways."""
        places, outputs = ahead.open, self._outputs(ahead.open, ahead.scene.fit)
        if outputs:
            ahead.open = {v: dict(own) if v in outputs else {} for v, own in places.items()}
            self.best.only(self.outputs).forecast(ahead)
        ahead.open = {v: {} if v in outputs else dict(own) for v, own in places.items()}
        if len(outputs) < len(places):
            self._forecast(ahead)
        ahead.open = {v: dict(own) for v, own in places.items()}
        ahead.narrow(1)

    def _forecast(self, ahead: Forecast) -> None:
        if ahead.case == "highest":  # nothing was good enough until the budget was spent
            at = {v: dict(own) for v, own in ahead.open.items()}
            first = max(map(len, at.values()))
            others = len(ahead.scene.shape.places) - first
            for _ in range(-(-min(self.most, others) // max(1, first))):
                self.best.forecast(ahead)
                ahead.open = {v: dict(own) for v, own in at.items()}
            scouted = min(self.scouted, others - self.most) if self.scout else 0
            for _ in range(-(-max(0, scouted) // max(1, first))):
                ahead.walk(self.scout)
                ahead.open = {v: dict(own) for v, own in at.items()}
            if scouted > 0:
                ahead.narrow(1)
                self.best.forecast(ahead)
                ahead.open = at
        self.best.forecast(ahead)

    def _with_further(self, found: State, again: State) -> State:
        """What was found, and what was found further on where that does better."""
        for v in again.handles:
            if self._score(again, v) > self._score(found, v) + 1e-9:
                found = _with_variable(found, again, v)
        capacity = best_of(found.capacity, again.capacity)
        return replace(found, profile=best_of(found.profile, again.profile), capacity=capacity)

    def _scouted(self, problem: Problem, state: State) -> State:
        """All ways inside the best of the open places, by the scout."""
        scouted, _ = _walked(problem, replace(state, profile={}), self.scout)
        seen = {(v, p): scouted.profile[v].get(p.name, 0.0) for v in problem.variables for p in state.places[v]}
        best = {v: max(state.places[v], key=lambda p: seen[v, p]) for v in problem.variables}
        looked = self.best(problem, replace(state, places={v: (p,) for v, p in best.items()}))
        profile, capacity = best_of(scouted.profile, looked.profile), best_of(scouted.capacity, looked.capacity)
        return replace(looked, profile=profile, capacity=capacity)

    def _order(self, problem: Problem, state: State, variable: str) -> list[Place]:
        """All places, those of lowest cost in the coarse coupling first."""
        ranked: list[Place] = []
        for c in state.candidates.get(variable, ())[:1]:
            ranked = [p for j in c.coupling.ranking(variable) for p in c.family.sites[j].places]
        return list(dict.fromkeys([*ranked, *problem.subject.places]))

    def _score(self, state: State, variable: str) -> float:
        return float(state.handles[variable].chosen["calibration_score"])


def _open_to(state: State, variables: Iterable[str]) -> State:
    """The state with only the places that are open to some variables: nothing is measured at the others'."""
    return replace(state, places={v: state.places[v] for v in variables})


def _with_variable(state: State, other: State, variable: str) -> State:
    """A state with what another found about one variable."""
    calibrations = {v: c for v, c in state.calibrations.items() if v != variable}
    if variable in other.calibrations:
        calibrations[variable] = other.calibrations[variable]
    return replace(
        state,
        places={**state.places, variable: other.places[variable]},
        handles={**state.handles, variable: other.handles[variable]},
        candidates={**state.candidates, variable: other.candidates.get(variable, ())},
        signatures=(*state.signatures, *other.signatures),
        calibrations=calibrations,
    )


def noting(handle: Handle, **facts: object) -> Handle:
    """The handle with more said about how it was chosen."""
    return replace(handle, chosen={**handle.chosen, **facts})
