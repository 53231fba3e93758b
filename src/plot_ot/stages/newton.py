"""Exact and natural handles: Gauss-Newton on the output loss, with the closed form as prior in the natural metric.

DAS asks for right answers only, the closed form (`stages.closed_form`) for natural shifts only. `NewtonHandles` asks
for both: `stages.gauss_newton` states the problem and its solver, `stages.priors` where it starts. This module says
which settings are tried, and how calibration chooses. A large ρ is the closed form, ρ = 0 an oblique DAS.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from jaxtyping import Float
from torch import Tensor

from plot_ot.edits import EditBatch
from plot_ot.engine import Unit, run
from plot_ot.errors import PlotError
from plot_ot.handles import Handle, handle_from_edits
from plot_ot.signatures import Readout
from plot_ot.stages.calibrate import losses_all, pair_weights, scored, scored_all, scored_frames
from plot_ot.stages.closed_form import RULES
from plot_ot.stages.curvature import DIRECTIONS
from plot_ot.stages.forecast import Forecast
from plot_ot.stages.gauss_newton import Coordinates, Rest, minimise
from plot_ot.stages.maps import Map, Whitened
from plot_ot.stages.natural import Natural, edited_states, fit_states
from plot_ot.stages.priors import PAIRS, Prior, different_rules, edit_of, leading_directions, priors_at
from plot_ot.stages.problem import Problem, State, best_by, best_of
from plot_ot.stages.stand_ins import with_stand_ins
from plot_ot.subjects import BankRecording, Place

CERTAIN = 1e-4
"""A loss, in nats, below which margins are wide enough."""

PRECISE, ROUGH = (0.01, 1e-3), (0.1, 1e-2)
"""The share of the loss' curvature that a step leaves out, and the relative gain below which a ρ is done: usually, and
at wide places, where every direction of curvature is one more backward pass through a large network."""

Start = tuple[Prior, ...]
"""A prior at every place that is solved for together, in forward order; mostly at one."""


@dataclass(frozen=True)
class NewtonHandles:
    """Gauss-Newton from closed-form maps at the places open to each variable; what was found before stays a candidate.

    Calibration picks the place, the prior (its rule and ridge), ρ, the room and the rank. Between equal scores it is
    whoever is right on more of the fit pairs, then the handle found before (if it leaves states ordinary itself), then
    the map that is surest: the least loss on calibration. With `together`, several places are solved at once where no
    single one will do.
    """

    learner: ClassVar[bool] = True

    weights: tuple[float, ...] = (1.0, 0.1, 1e-2, 1e-3, 1e-4, 1e-5)
    """ρ from large to small: what one standard deviation of unneeded movement costs, in nats. Each begins where the
    one before ended."""
    ridges: tuple[float, ...] = (1e-3, 1e-1)
    """The prior's ridge, in units of the mean variance of a_s - a_b."""
    wide_ridges: tuple[float, ...] = (1e-3, 1e-1, 1.0)
    """The same at `wide` places, whose states outnumber the pairs."""
    rules: tuple[str, ...] = (*RULES, PAIRS)
    """Which cells the prior's shifts are between; `pairs` needs no values."""
    starts: int = 2
    """How many priors are followed at each place, the best on calibration."""
    stand_ins: int = 3
    """How often every fit pair is taken again, for small ρ, with another recorded source of the same value."""
    behind: float = 0.15
    """Places whose closed forms are so much worse on calibration than the best place's are left out."""
    rooms: tuple[int, ...] = (8, 24)
    """Sizes of the subspace that is solved in, where the place is wider than `whole`."""
    whole: int = 32
    """Places up to this width are solved in whole."""
    wide: int = 256
    """At places wider than this, where a step is dear, one path is walked first: from the best prior, in the smallest
    room. The others follow only if it beats the handle found before ..."""
    hopeful: float = 0.7
    """... and reaches this calibration score: a handle that works has about 0.85, one that does nothing 0.5."""
    ranks: tuple[int, ...] = (1, 2, 4, 8)
    """Ranks tried besides the whole map."""
    stretch: float = 1.5
    """Maps that push the states of calibration pairs further out than this (1 is ordinary) are left out."""
    scouting: int = 3
    """After so many ρ only the best path of all places goes on."""
    steps: int = 4
    """The most Gauss-Newton steps for one ρ."""
    batch: int = 4096
    """Pairs differentiated at a time."""
    together: int = 1
    """The most open places that are solved together; by default none are, for one place says more than several."""
    enough: float = 0.97
    """Places are solved together only where no single one reaches this calibration score ..."""
    gain: float = 0.05
    """... and a handle over several places is taken only where it is better by so much."""
    outputs: bool = True
    """Whether handles of output variables are improved as well, though no verdict will look at them."""

    def __post_init__(self) -> None:
        if not self.weights or not self.ridges or not self.wide_ridges or not self.rules or min(self.weights) <= 0:
            raise PlotError("NewtonHandles needs at least one ρ, all above 0, one ridge and one rule.")
        if list(self.weights) != sorted(self.weights, reverse=True):
            raise PlotError(f"The ρ of NewtonHandles must fall, each starts from the last; found {self.weights}.")

    def __call__(self, problem: Problem, state: State) -> State:
        if not problem.subject.differentiable:
            return state
        handles, capacity = dict(state.handles), dict[str, dict[int, float]]()
        for v in problem.variables:
            if v in handles and not self.outputs and problem.fit.bank.power(v).is_output:
                continue
            found, capacity[v] = self._better(problem, v, state.places[v], handles.get(v))
            if found is not None:
                handles[v] = found
        return replace(state, handles=handles, capacity=best_of(state.capacity, capacity))

    def _better(
        self, problem: Problem, variable: str, places: Sequence[Place], found: Handle | None
    ) -> tuple[Handle | None, dict[int, float]]:
        """A handle that is better than the one found before, if there is one; and the best score of every rank."""
        ordinary = _Ordinary(problem)
        with problem.clock.part("calibration"):
            # among equals, what was found before gives way to what leaves states ordinary
            stays = found is not None and ordinary.stretch(found.batch()) <= self.stretch
            if found is not None and stays and _exact(problem, found):
                return None, {}
        with problem.clock.part("newton"):
            priors = self._priors(problem.fit, places, variable)
        if not priors:
            raise PlotError(
                f"No fit pair tells what a swap of '{variable}' moves at {', '.join(p.name for p in places)}: its base "
                f"and source states are all equal, or there is nothing to start from."
            )
        with problem.clock.part("calibration"):
            scores = _scores(problem, variable, [[p.edit] for p in priors])
        tries = self._solved(problem, variable, self._followed(priors, scores), ordinary, _score(found), found is None)
        at = self._best(problem, variable, tries, found, stays)
        best = None if at is None else tries[at]
        reached = max([t.score for t in tries] + [_score(found)])
        if self.together > 1 and reached < self.enough:
            joint = self._together(problem, variable, priors, scores, ordinary)
            at = max(range(len(joint)), key=lambda k: joint[k].order, default=None)
            if at is not None and joint[at].score >= reached + self.gain:
                best = joint[at]
        tried = best_by([t.rank for t in tries], [t.score for t in tries])
        return None if best is None else self._handle(problem, variable, best, tries, found), tried

    def _handle(self, problem: Problem, variable: str, best: Try, tries: Sequence[Try], found: Handle | None) -> Handle:
        by_place = best_by([t.solution.path.places[0].name for t in tries], [t.score for t in tries])
        solution = best.solution
        chosen = {
            "support": " and ".join(p.name for p in solution.path.places),
            "form": f"newton ρ = {solution.weight:g}",
            "rho": solution.weight,
            "rule": solution.path.start[0].rule,
            "ridge": solution.path.start[0].ridge,
            "room": solution.path.room,
            "k": best.rank,
            "steps": solution.steps,
            "fit_loss": solution.loss,
            "calibration_score": best.score,
            "by_support": by_place,
        }
        if found is not None:
            chosen |= {f: found.chosen[f] for f in ("untried", "ways", "way_steps") if f in found.chosen}
        return handle_from_edits(variable, best.edits, 0, problem.subject, chosen)

    def retraced(self, handles: Sequence[Handle]) -> NewtonHandles:
        """The same up to where these handles were made: down to their smallest ρ."""
        if not handles or any("rho" not in h.chosen for h in handles):
            return self  # not all of them were made here
        least = min(float(h.chosen["rho"]) for h in handles)
        return replace(self, weights=tuple(w for w in self.weights if w >= least) or self.weights)

    def forecast(self, ahead: Forecast) -> None:
        """Each step runs forward once, backward for the gradient and for every direction of the loss' curvature, and
        forward again to see whether the loss fell; priors and solutions are scored. Where the handle found before is
        right on all pairs, which is the lowest case, nothing runs; in the highest, places are solved together, and
        wide ones are searched to the end. A network without gradients is passed over."""
        if ahead.case == "lowest" or not ahead.scene.subject.differentiable:
            return
        fit, calibration = ahead.scene.fit, ahead.scene.calibration
        back = 1 + min(DIRECTIONS, max(1, ahead.scene.outputs - 1))
        for v, own in ahead.open.items():
            if not self.outputs and fit.bank.power(v).is_output:
                continue
            rules = different_rules(fit, v, self.rules)
            for p, chance in own.items():
                paths: float = min(self.starts, rules) * len(self._rooms_of(p.width))
                scouted = len(self.weights[: self.scouting])
                further = (len(self.weights) - scouted) * chance / len(own)
                if self.is_wide([p]) and ahead.case != "highest":
                    paths, further = 1 / len(own), 0.0  # one path in all, no better than the handle found before
                solved = paths * scouted * chance + further
                times = (solved + further * (0 if set(self.rules) == {PAIRS} else self.stand_ins)) * self.steps
                if ahead.case == "highest" and min(self.together, len(own)) > 1 and p == ahead.by_price(list(own))[0]:
                    times += min(self.starts, rules) * len(self.weights) * self.steps
                ahead.add("newton", p, fit, 1, times, backward=back, units=paths * chance, sent=0.0)
                ahead.add("newton", p, fit, 1, times, units=paths * chance, sent=0.0)
                ridges = self.wide_ridges if self.is_wide([p]) else self.ridges
                tried = rules * len(ridges) + round(solved) * (1 + len(self.ranks))
                ahead.add("calibration", p, calibration, tried, chance)

    def _best(
        self, problem: Problem, variable: str, tries: Sequence[Try], found: Handle | None, stays: bool
    ) -> int | None:
        """Which try to take; None where the handle found before is better, or as good and `stays` among equals."""
        before = round(_score(found), 9)
        most = max((round(t.score, 9) for t in tries), default=-1.0)
        if before > most or not tries:
            return None
        tied = [k for k, t in enumerate(tries) if round(t.score, 9) == most]
        on_fit = [round(x, 9) for x in _scores(problem, variable, [tries[k].edits for k in tied], problem.fit)]
        if found is not None and before == most:
            kept = _on_fit(problem, found)
            if kept > max(on_fit) or (stays and kept == max(on_fit)):
                return None
        surest = [k for right, k in zip(on_fit, tied, strict=True) if right == max(on_fit)]
        weights = pair_weights(problem.calibration, variable, problem.score)
        edits = [tries[k].edits for k in surest]
        losses = losses_all(problem.calibration, edits, variable, weights, problem.readout)
        return min(zip(losses, surest, strict=True), key=lambda t: float(t[0]))[1]

    def _priors(self, fit: BankRecording, places: Sequence[Place], variable: str) -> list[Prior]:
        """The closed-form maps of every place, rule and ridge."""
        weights, found = _balanced(fit, variable), list[Prior]()
        for ridges, wide in ((self.ridges, False), (self.wide_ridges, True)):
            some = [p for p in places if self.is_wide([p]) == wide]
            found += priors_at(fit, some, variable, weights, self.rules, ridges) if some else []
        return found

    def _followed(self, priors: Sequence[Prior], scores: Sequence[float]) -> list[Start]:
        """The best priors of each place not far behind, no two of one rule; between equal scores the larger ridge."""
        order = sorted(range(len(priors)), key=lambda k: (-round(scores[k], 9), -priors[k].ridge, k))
        order = [k for k in order if scores[k] >= max(scores) - self.behind]
        kept: dict[Place, dict[str, Prior]] = {}
        for k in order:
            here = kept.setdefault(priors[k].place, {})
            if len(here) < self.starts:
                here.setdefault(priors[k].rule, priors[k])
        return [(p,) for here in kept.values() for p in here.values()]

    def _together(
        self,
        problem: Problem,
        variable: str,
        priors: Sequence[Prior],
        scores: Sequence[float],
        ordinary: _Ordinary,
    ) -> list[Try]:
        """Tries over the most promising places at once, each with a prior of one rule and ridge."""
        best: dict[Place, float] = {}
        for p, score in zip(priors, scores, strict=True):
            best[p.place] = max(score, best.get(p.place, 0.0))
        kept = sorted(best, key=lambda p: -best[p])[: self.together]
        places = [p for p in problem.subject.places if p in kept]
        if len(places) < 2:
            return []
        same: dict[tuple[str, float], list[Prior]] = {}
        for p in priors:
            same.setdefault((p.rule, p.ridge), []).append(p)
        by_place = [{p.place: p for p in some} for some in same.values()]
        starts: list[Start] = [tuple(some[at] for at in places) for some in by_place if set(places) <= set(some)]
        with problem.clock.part("calibration"):
            reached = _scores(problem, variable, [[p.edit for p in s] for s in starts])
        order = sorted(range(len(starts)), key=lambda k: -round(reached[k], 9))
        return self._solved(problem, variable, [starts[k] for k in order[: self.starts]], ordinary)

    def is_wide(self, places: Sequence[Place]) -> bool:
        """Whether one of the places is so wide that steps there are dear."""
        return max(p.width for p in places) > self.wide

    def _rooms(self, start: Start) -> list[int]:
        """Sizes of the subspaces that are solved in."""
        return self._rooms_of(max(p.place.width for p in start))

    def _rooms_of(self, width: int) -> list[int]:
        return [width] if width <= self.whole else sorted({min(r, width) for r in self.rooms})

    def _solved(
        self,
        problem: Problem,
        variable: str,
        starts: Sequence[Start],
        ordinary: _Ordinary,
        reached: float = -1.0,
        needed: bool = False,
    ) -> list[Try]:
        """Paths over ρ from every start in every room, cut to every rank and scored; what is stretched is left out.

        After `scouting` values of ρ only the best path goes on, with stand-ins. At `wide` places the first path is
        walked before the others, and nothing more unless it beats the score `reached` before and is `hopeful`. Where
        everything is stretched and a handle is `needed`, the least stretched one stays.
        """
        paths = [Path(start, room) for start in starts for room in self._rooms(start)]
        dear = reached >= 0 and any(self.is_wide(path.places) for path in paths)
        ahead = 1 if dear else len(paths)
        scouting, further = self.weights[: self.scouting], self.weights[self.scouting :]
        walked = self._walked(problem, variable, paths[:ahead], scouting, 0)
        best_yet = round(max((t.score for path in walked for t in path), default=-1.0), 9)
        if not dear or (best_yet > round(reached, 9) and best_yet >= self.hopeful):
            walked += self._walked(problem, variable, paths[ahead:], scouting, 0)
            best = max(walked, key=lambda some: max(t.score for t in some), default=[])
            walked += self._walked(problem, variable, [best[-1].solution.path] if best else [], further, self.stand_ins)
        tries = [t for path in walked for t in path]
        with problem.clock.part("calibration"):
            lengths = [ordinary.stretch(t.edits) for t in tries]
        limit = max(self.stretch, min(lengths)) if needed else self.stretch
        return [t for t, length in zip(tries, lengths, strict=True) if length <= limit]

    def _walked(
        self, problem: Problem, variable: str, paths: Sequence[Path], rhos: Sequence[float], more: int
    ) -> list[list[Try]]:
        """The tries along every open path, for ρ as given, each fit pair taken `more` times again."""
        paths = [path for path in paths if path.open]
        if not paths or not rhos:
            return []
        with problem.clock.part("newton"):
            fit = self._pairs(problem, variable, more)
            args = rhos, variable, _balanced(fit, variable), problem.readout, self
            units = [Unit(_path, slice(None), path.places, (path, *args)) for path in paths]
            solved: Iterator[list[Solution]] = run(fit, units)
            walked = [path for path in solved if path]
        with problem.clock.part("calibration"):
            return [self._tries(problem, variable, solutions) for solutions in walked]

    def _tries(self, problem: Problem, variable: str, solutions: Sequence[Solution]) -> list[Try]:
        """Solutions cut to every rank, and their calibration scores."""
        tries = [(s, rank, s.edits(rank)) for s in solutions for rank in self._ranks(s)]
        scores = _scores(problem, variable, [edits for *_, edits in tries])
        return [Try(*t, score) for t, score in zip(tries, scores, strict=True)]

    def _pairs(self, problem: Problem, variable: str, more: int) -> BankRecording:
        """The pairs that are solved for: more than were drawn, unless no value may be looked at."""
        if not more or set(self.rules) == {PAIRS}:
            return problem.fit
        return with_stand_ins(problem.fit, variable, more, problem.generator(salt=15))

    def _ranks(self, solution: Solution) -> list[int]:
        most = max(m.read.shape[1] for m in solution.maps)
        return sorted({min(k, most) for k in (*self.ranks, most)})


@dataclass(frozen=True)
class Path:
    """Where a sequence of solutions for falling ρ began, and where it has come to."""

    start: Start
    room: int
    n: Float[Tensor, " unknowns"] | None = None
    """N so far; None at the start."""
    open: bool = True
    """Whether a smaller ρ could still widen margins."""

    @property
    def places(self) -> tuple[Place, ...]:
        """The places that are solved for together."""
        return tuple(p.place for p in self.start)


@dataclass(frozen=True)
class Solution:
    """The maps at one ρ, by singular values."""

    path: Path
    weight: float
    """ρ."""
    maps: tuple[Map, ...]
    steps: int
    loss: float

    def edits(self, rank: int) -> list[EditBatch]:
        """The edits along the `rank` leading directions of every map."""
        return [edit_of(p.place, m, rank) for p, m in zip(self.path.start, self.maps, strict=True)]


@dataclass(frozen=True)
class Try:
    """A solution cut to a rank, and its calibration score."""

    solution: Solution
    rank: int
    edits: list[EditBatch]
    score: float

    @property
    def order(self) -> tuple[float, float, int]:
        """The better one is larger: the score, then ρ, then the fewer directions."""
        return round(self.score, 9), self.solution.weight, -self.rank


class _Ordinary:
    """How far edits push the states of calibration pairs, against the fit inputs' states."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.known: dict[str, tuple[Natural, Float[Tensor, " d"]]] = {}

    def stretch(self, edits: Sequence[EditBatch]) -> float:
        """The median over pairs, ordinary = 1, at the place where it is largest."""
        found, longest = edited_states(edits, self.problem.calibration), []
        for edit in edits:
            natural, mean = self._at(edit.place)
            longest.append(float(natural.stretch(found[edit.place.name].cpu() - mean).median()))
        return max(longest)

    def _at(self, place: Place) -> tuple[Natural, Float[Tensor, " d"]]:
        if place.name not in self.known:
            states = fit_states(self.problem.fit, place)
            self.known[place.name] = Natural.around(states - states.mean(dim=0)), states.mean(dim=0)
        return self.known[place.name]


def _path(
    recording: BankRecording,
    path: Path,
    rhos: Sequence[float],
    variable: str,
    weights: Float[Tensor, " pairs"],
    readout: Readout,
    stage: NewtonHandles,
) -> list[Solution]:
    """The solutions from the largest ρ to the smallest, each begun where the one before ended.

    That every fit pair is right is no reason to stop: a smaller ρ widens the margins, which other pairs need.
    """
    labels = recording.bank.labels[variable]
    # the passes of all blocks are kept until the last backward pass
    batch = min(stage.batch, max(1, recording.subject.responses_per_batch // 4))
    left_out, tolerance = ROUGH if stage.is_wide(path.places) else PRECISE
    rest = Rest.of(recording, path.places, labels, weights, readout, batch, left_out)
    bases = [None if path.room >= p.place.width else leading_directions(p, rest, path.room) for p in path.start]
    coordinates = Coordinates(
        tuple(Whitened.of(p.start, p.metric, basis) for p, basis in zip(path.start, bases, strict=True))
    )
    found = list[Solution]()
    for rho in rhos:
        if path.open:
            end = minimise(rest, coordinates, rho, path.n, stage.steps, tolerance)
            path = replace(path, n=end.n, open=not end.right or end.loss > CERTAIN)
            maps = tuple(p.factored(m) for p, m in zip(path.start, coordinates.maps(end.n), strict=True))
            found.append(Solution(path, rho, maps, end.steps, end.loss))
    return found


def _balanced(fit: BankRecording, variable: str) -> Float[Tensor, " pairs"]:
    """Half of the weight on pairs that change the variable, half on those that do not."""
    if not fit.bank.changed[variable].any():
        raise PlotError(f"The fit bank has no pair that changes '{variable}': a handle cannot be fitted to it.")
    return pair_weights(fit, variable, "balanced")


def _scores(
    problem: Problem, variable: str, tries: Sequence[Sequence[EditBatch]], on: BankRecording | None = None
) -> list[float]:
    """The score of every variant, on calibration unless another bank is given; those of one place run together."""
    bank = on or problem.calibration
    weights = pair_weights(bank, variable, problem.score)
    found = [0.0] * len(tries)
    single = [k for k, edits in enumerate(tries) if len(edits) == 1]
    if single:
        frames = [(tries[k][0].place, tries[k][0].frame) for k in single]
        scores = scored_frames(bank, frames, (1.0,), variable, weights, problem.readout)[:, 0].tolist()
        found = [dict(zip(single, scores, strict=True)).get(k, 0.0) for k in range(len(tries))]
    several = [k for k, edits in enumerate(tries) if len(edits) > 1]
    scored_several = scored_all(bank, [tries[k] for k in several], variable, weights, problem.readout)
    for k, score in zip(several, scored_several, strict=True):
        found[k] = float(score[0])
    return found


def _score(found: Handle | None) -> float:
    """The calibration score of a handle found before."""
    return -1.0 if found is None else float(found.chosen["calibration_score"])


def _on_fit(problem: Problem, handle: Handle) -> float:
    """The score of a handle on the fit pairs."""
    weights = pair_weights(problem.fit, handle.variable, problem.score)
    return round(float(scored(problem.fit, handle.batch(), handle.variable, weights, problem.readout)[0]), 9)


def _exact(problem: Problem, handle: Handle) -> bool:
    """Whether a handle is right on all calibration and fit pairs, so that nothing could be better."""
    return round(float(handle.chosen["calibration_score"]), 9) == 1.0 and _on_fit(problem, handle) == 1.0
