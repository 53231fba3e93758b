"""Exact and natural handles: Gauss-Newton on the output loss, with the closed form as prior in the natural metric.

DAS asks for right answers only, the closed form (`stages.closed_form`) for natural shifts only. `NewtonHandles` asks
for both: `stages.gauss_newton` states the problem and its solver. This module says what the prior is, which of its
settings are tried, and how calibration chooses between them. A large ρ is the closed form, ρ = 0 an oblique DAS.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from plot_ot.edits import EditBatch, Frame
from plot_ot.engine import Unit, run
from plot_ot.errors import PlotError
from plot_ot.handles import Handle, handle_from_edits
from plot_ot.signatures import Readout
from plot_ot.stages.calibrate import pair_weights, scored, scored_frames
from plot_ot.stages.closed_form import RULES, cell_shift, cell_variables
from plot_ot.stages.forecast import Forecast
from plot_ot.stages.gauss_newton import DIRECTIONS, Map, Metric, Rest, Whitened, minimise
from plot_ot.stages.natural import Natural, edited_states, shrunk_covariance
from plot_ot.stages.problem import Problem, State, best_by, best_of
from plot_ot.subjects import BankRecording, Place

PAIRS = "pairs"
"""The rule that needs no values: the source's own shift where the variable changes, none where it does not."""
NEGLIGIBLE = 1e-2
"""Singular values of a map below this share of the largest are left out."""


@dataclass(frozen=True)
class NewtonHandles:
    """Gauss-Newton from closed-form maps at the places open to each variable; what was found before stays a candidate.

    Calibration picks the place, the prior (its rule and ridge), ρ, the room and the rank. Between equal scores it is
    whoever is right on more of the fit pairs, then the handle found before (if it leaves states ordinary itself), then
    the larger ρ (the more natural), then the smaller rank.
    """

    learner: ClassVar[bool] = True

    weights: tuple[float, ...] = (1.0, 0.1, 1e-2, 1e-3, 1e-4)
    """ρ from large to small: what one standard deviation of unneeded movement costs, in nats. Each begins where the
    one before ended."""
    ridges: tuple[float, ...] = (1e-3, 1e-1)
    """The prior's ridge, in units of the mean variance of a_s - a_b."""
    rules: tuple[str, ...] = (*RULES, PAIRS)
    """Which cells the prior's shifts are between; `pairs` needs no values."""
    starts: int = 2
    """How many priors are followed at each place, the best on calibration."""
    behind: float = 0.15
    """Places whose closed forms are so much worse on calibration than the best place's are left out."""
    rooms: tuple[int, ...] = (8, 24)
    """Sizes of the subspace that is solved in, where the place is wider than `whole`."""
    whole: int = 32
    """Places up to this width are solved in whole."""
    ranks: tuple[int, ...] = (1, 2, 4, 8)
    """Ranks tried besides the whole map."""
    stretch: float = 1.5
    """Maps that push the states of calibration pairs further out than this (1 is ordinary) are left out."""
    steps: int = 4
    """The most Gauss-Newton steps for one ρ."""
    batch: int = 1024
    """Pairs differentiated at a time."""

    def __post_init__(self) -> None:
        if not self.weights or not self.ridges or not self.rules or min(self.weights) <= 0:
            raise PlotError("NewtonHandles needs at least one ρ, all above 0, one ridge and one rule.")
        if list(self.weights) != sorted(self.weights, reverse=True):
            raise PlotError(f"The ρ of NewtonHandles must fall, each starts from the last; found {self.weights}.")

    def __call__(self, problem: Problem, state: State) -> State:
        if not problem.subject.differentiable:
            return state
        handles, capacity = dict(state.handles), dict[str, dict[int, float]]()
        for v in problem.variables:
            with problem.clock.part("calibration"):
                ordinary = _Ordinary(problem)
                found = handles.get(v)
                # among equals, what was found before gives way to what leaves states ordinary
                stays = found is not None and all(ordinary.stretch(e) <= self.stretch for e in found.batch())
                if found is not None and stays and _exact(problem, found):
                    continue
            with problem.clock.part("newton"):
                weights = _balanced(problem.fit, v)
                priors = [p for place in state.places[v] for p in self.priors(problem.fit, place, v, weights)]
            if not priors:
                raise PlotError(f"No fit pair tells what a swap of '{v}' moves: there is nothing to start from.")
            with problem.clock.part("calibration"):
                first = _scores(problem, v, [(p.place, p.frame(p.start)) for p in priors])
            with problem.clock.part("newton"):
                solutions = self._solved(problem, v, self._followed(priors, first), weights)
            with problem.clock.part("calibration"):
                tries = [(s, rank) for s in solutions for rank in self._ranks(s)]
                tries = [(s, rank) for s, rank in tries if ordinary.stretch(s.edit(rank)) <= self.stretch]
                if not tries:
                    continue
                scores = _scores(problem, v, [(s.prior.place, s.frame(rank)) for s, rank in tries])
                capacity[v] = best_by([rank for _, rank in tries], scores)
                at = self._best(problem, v, tries, scores, found, stays)
            if at is None:
                continue
            best, rank = tries[at]
            chosen = {
                "support": best.prior.place.name,
                "form": f"newton ρ = {best.weight:g}",
                "rule": best.prior.rule,
                "ridge": best.prior.ridge,
                "room": best.room,
                "k": rank,
                "steps": best.steps,
                "fit_loss": best.loss,
                "calibration_score": scores[at],
                "by_support": best_by([s.prior.place.name for s, _ in tries], scores),
            }
            if found is not None:
                chosen |= {
                    fact: found.chosen[fact] for fact in ("untried", "ways", "way_steps") if fact in found.chosen
                }
            handles[v] = handle_from_edits(v, [best.edit(rank)], 0, problem.subject, chosen)
        return replace(state, handles=handles, capacity=best_of(state.capacity, capacity))

    def forecast(self, ahead: Forecast) -> None:
        """Each step runs forward once, backward for the gradient and for every direction of the loss' curvature, and
        forward again to see whether the loss fell; priors and solutions are scored. Where the handle found before is
        right on all pairs, which is the lowest case, nothing runs."""
        if ahead.case == "lowest":
            return
        fit, calibration = ahead.scene.fit, ahead.scene.calibration
        for v, own in ahead.open.items():
            rules = self._rules(fit, v)
            for p, chance in own.items():
                paths = min(self.starts, rules) * len(self._rooms(p))
                times = paths * len(self.weights) * self.steps * chance
                back = 1 + min(DIRECTIONS, max(1, ahead.scene.outputs - 1))
                ahead.add("newton", p, fit, 1, times, backward=back, units=paths * chance, sent=0.0)
                ahead.add("newton", p, fit, 1, times, units=paths * chance, sent=0.0)
                tried = rules * len(self.ridges) + paths * len(self.weights) * (1 + len(self.ranks))
                ahead.add("calibration", p, calibration, tried, chance)

    def _best(
        self,
        problem: Problem,
        variable: str,
        tries: Sequence[tuple[Solution, int]],
        scores: Sequence[float],
        found: Handle | None,
        stays: bool,
    ) -> int | None:
        """Which try to take; None where the handle found before is better, or as good and `stays` among equals."""
        before = -1.0 if found is None else round(float(found.chosen["calibration_score"]), 9)
        most = round(max(scores), 9)
        if before > most:
            return None
        tied = [k for k, score in enumerate(scores) if round(score, 9) == most]
        frames = [(tries[k][0].prior.place, tries[k][0].frame(tries[k][1])) for k in tied]
        on_fit = [round(x, 9) for x in _scores(problem, variable, frames, problem.fit)]
        if found is not None and before == most:
            kept = _on_fit(problem, found)
            if kept > max(on_fit) or (stays and kept == max(on_fit)):
                return None
        return min(zip(on_fit, tied, strict=True), key=lambda t: (-t[0], -tries[t[1]][0].weight, tries[t[1]][1]))[1]

    def priors(self, fit: BankRecording, place: Place, variable: str, weights: Float[Tensor, " pairs"]) -> list[Prior]:
        """The closed-form map of every rule and ridge at a place."""
        base, source = fit.base_at(place).double().cpu(), fit.source_at(place).double().cpu()
        states = _states(fit, place)
        natural = shrunk_covariance(states - states.mean(dim=0))
        found, seen = [], list[tuple[str, ...]]()
        for rule in self.rules:
            shift = self._shift(fit, place, variable, rule, source - base, seen)
            if shift is None:
                continue
            known, delta = shift
            for ridge in self.ridges:
                prior = prior_map(
                    place, rule, ridge, natural, (source - base)[known], delta, weights[known] / weights[known].sum()
                )
                if prior is not None:
                    found.append(prior)
        return found

    def _rules(self, fit: BankRecording, variable: str) -> int:
        """How many rules differ for a variable."""
        cells = {cell_variables(fit, variable, rule) for rule in self.rules if rule != PAIRS}
        return len(cells) + (PAIRS in self.rules)

    def _shift(
        self,
        fit: BankRecording,
        place: Place,
        variable: str,
        rule: str,
        difference: Float[Tensor, "pairs d"],
        seen: list[tuple[str, ...]],
    ) -> tuple[Int[Tensor, " known"], Float[Tensor, "known d"]] | None:
        """δ for the pairs where it is known; None where it is not for any, or the same cells were `seen` before."""
        if rule == PAIRS:
            return torch.arange(len(fit)), difference * fit.bank.changed[variable].cpu().double()[:, None]
        others = cell_variables(fit, variable, rule)
        if others in seen:
            return None
        seen.append(others)
        return cell_shift(fit, place, variable, others)

    def _followed(self, priors: Sequence[Prior], scores: Sequence[float]) -> list[Prior]:
        """The best priors of each place not far behind, no two of one rule; between equal scores the larger ridge."""
        order = sorted(range(len(priors)), key=lambda k: (-round(scores[k], 9), -priors[k].ridge, k))
        order = [k for k in order if scores[k] >= max(scores) - self.behind]
        kept: dict[Place, dict[str, Prior]] = {}
        for k in order:
            here = kept.setdefault(priors[k].place, {})
            if len(here) < self.starts:
                here.setdefault(priors[k].rule, priors[k])
        return [p for here in kept.values() for p in here.values()]

    def _rooms(self, place: Place) -> list[int]:
        """Sizes of the subspaces that are solved in."""
        width = place.width
        return [width] if width <= self.whole else sorted({min(r, width) for r in self.rooms})

    def _solved(
        self, problem: Problem, variable: str, priors: Sequence[Prior], weights: Float[Tensor, " pairs"]
    ) -> list[Solution]:
        """A path over ρ for every prior and room."""
        args = variable, weights, problem.readout, self
        units = []
        for p in priors:
            units += [Unit(_path, slice(None), (p.place,), (p, room, *args)) for room in self._rooms(p.place)]
        found: Iterator[list[Solution]] = run(problem.fit, units)
        return [s for path in found for s in path]

    def _ranks(self, solution: Solution) -> list[int]:
        most = solution.map.read.shape[1]
        return sorted({min(k, most) for k in (*self.ranks, most)})


@dataclass(frozen=True)
class Prior:
    """A closed-form map at a place, and the metric in which leaving it is measured."""

    place: Place
    rule: str
    ridge: float
    start: Map
    metric: Metric
    shifts: Float[Tensor, "d k"]
    """Directions of the shifts that it asks for, the strongest first."""

    def frame(self, m: Map) -> Frame:
        """A map as the oblique frame of its leading directions."""
        return _oblique(self.metric.factored(m, NEGLIGIBLE))


@dataclass(frozen=True)
class Solution:
    """The map at one ρ, by singular values."""

    prior: Prior
    weight: float
    """ρ."""
    room: int
    map: Map
    steps: int
    loss: float

    def frame(self, rank: int) -> Frame:
        """Its `rank` leading directions."""
        return _oblique(Map(self.map.write[:, :rank], self.map.read[:, :rank]))

    def edit(self, rank: int) -> EditBatch:
        """The edit along these."""
        return EditBatch(self.prior.place, self.frame(rank), torch.ones(1, rank))


class _Ordinary:
    """How far edits push the states of calibration pairs, against the fit inputs' states."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.known: dict[str, tuple[Natural, Float[Tensor, " d"]]] = {}

    def stretch(self, edit: EditBatch) -> float:
        """The median over pairs, ordinary = 1."""
        place = edit.place
        if place.name not in self.known:
            states = _states(self.problem.fit, place)
            self.known[place.name] = Natural.around(states - states.mean(dim=0)), states.mean(dim=0)
        natural, mean = self.known[place.name]
        return float(natural.stretch(edited_states(edit, self.problem.calibration)[0].cpu() - mean).median())


def prior_map(
    place: Place,
    rule: str,
    ridge: float,
    natural: Float[Tensor, "d d"],
    difference: Float[Tensor, "pairs d"],
    shift: Float[Tensor, "pairs d"],
    weights: Float[Tensor, " pairs"],
) -> Prior | None:
    """The ridge regression of the shift on the difference over weighted pairs; None where nothing is shifted."""
    root = weights.sqrt()[:, None]
    moment = (root * difference).T @ (root * difference)
    mean = float(moment.diagonal().mean())
    if not mean > 0:
        raise PlotError(f"Base and source states are all equal at {place.name}: there is nothing to regress on.")
    moment = moment + ridge * mean * torch.eye(len(moment), dtype=moment.dtype)
    cross = (root * shift).T @ (root * difference)
    # few distinct shifts make a map of low rank: keep it as factors
    _, s, vt = torch.linalg.svd(torch.unique(root * shift, dim=0), full_matrices=False)
    if not len(s) or not float(s[0]) > 0:
        return None
    write = vt[s > 1e-6 * s[0]].T
    read = torch.linalg.solve(moment, (write.T @ cross).T)
    return Prior(place, rule, ridge, Map(write, read), Metric.of(natural, moment), write)


def _path(
    recording: BankRecording,
    prior: Prior,
    room: int,
    variable: str,
    weights: Float[Tensor, " pairs"],
    readout: Readout,
    stage: NewtonHandles,
) -> list[Solution]:
    """The solutions from the largest ρ to the smallest, each begun where the one before ended.

    Once every fit pair is right, one more ρ is tried: it widens the margins.
    """
    labels = recording.bank.labels[variable]
    # the passes of all blocks are kept until the last backward pass
    batch = min(stage.batch, max(1, recording.subject.responses_per_batch // 4))
    rest = Rest.of(recording, prior.place, labels, weights, readout, batch)
    basis = None if room == prior.place.width else leading_directions(prior, rest, room)
    coordinates = Whitened.of(prior.start, prior.metric, basis)
    found, n, right = list[Solution](), coordinates.zero, False
    for weight in stage.weights:
        end = minimise(rest, coordinates, weight, n, stage.steps)
        n = end.n
        m = prior.metric.factored(coordinates.map(n), NEGLIGIBLE)
        found.append(Solution(prior, weight, room, m, end.steps, end.loss))
        if right:
            break
        right = end.right
    return found


def leading_directions(prior: Prior, rest: Rest, room: int) -> Float[Tensor, "d room"]:
    """An orthonormal basis of the strongest shifts (up to half of it) and of the strongest differences."""
    shifts = prior.shifts[:, : max(1, room // 2)]
    difference = rest.weights.sqrt()[:, None] * rest.difference
    beyond = difference - (difference @ shifts) @ shifts.T
    *_, vt = torch.linalg.svd(beyond, full_matrices=False)
    basis: Tensor = torch.linalg.qr(torch.cat([shifts, vt[: room - shifts.shape[1]].T], dim=1)).Q
    return basis


def _states(fit: BankRecording, place: Place) -> Float[Tensor, "inputs d"]:
    """The state of every fit input at a place."""
    rows = torch.cat([fit.base_rows, fit.source_rows]).unique().cpu()
    return fit.store.activations[place.name].cpu()[rows].double()


def _balanced(fit: BankRecording, variable: str) -> Float[Tensor, " pairs"]:
    """Half of the weight on pairs that change the variable, half on those that do not."""
    if not fit.bank.changed[variable].any():
        raise PlotError(f"The fit bank has no pair that changes '{variable}': a handle cannot be fitted to it.")
    return pair_weights(fit, variable, "balanced")


def _scores(
    problem: Problem, variable: str, tries: Sequence[tuple[Place, Frame]], on: BankRecording | None = None
) -> list[float]:
    """The score of every frame, on calibration unless another bank is given."""
    bank = on or problem.calibration
    weights = pair_weights(bank, variable, problem.score)
    return scored_frames(bank, tries, (1.0,), variable, weights, problem.readout)[:, 0].tolist()


def _on_fit(problem: Problem, handle: Handle) -> float:
    """The score of a handle on the fit pairs."""
    weights = pair_weights(problem.fit, handle.variable, problem.score)
    return round(float(scored(problem.fit, handle.batch(), handle.variable, weights, problem.readout)[0]), 9)


def _exact(problem: Problem, handle: Handle) -> bool:
    """Whether a handle is right on all calibration and fit pairs, so that nothing could be better."""
    return round(float(handle.chosen["calibration_score"]), 9) == 1.0 and _on_fit(problem, handle) == 1.0


def _oblique(m: Map) -> Frame:
    dtype = torch.get_default_dtype()
    return Frame.oblique(m.read.to(dtype).contiguous(), m.write.to(dtype).contiguous(), "newton")
