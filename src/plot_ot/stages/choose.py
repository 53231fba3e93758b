"""Stages that end in handles: calibrate couplings, or train and select rotations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise, product
from typing import ClassVar

import torch

from plot_ot.edits import EditBatch, Frame
from plot_ot.errors import PlotError, unknown
from plot_ot.handles import Handle, handle_from_edits
from plot_ot.stages.calibrate import (
    FOLLOWED,
    Search,
    calibrate,
    calibrate_coarsely,
    pair_weights,
    scored_all,
    scored_frames,
    within_places,
)
from plot_ot.stages.das import Rotation, Training, train_all
from plot_ot.stages.descent import DasSpec
from plot_ot.stages.forecast import AGREEING, Forecast
from plot_ot.stages.problem import Calibration, Candidate, Problem, State, best_by, best_of
from plot_ot.subjects import Place

GRIDS = ("own", "shared")
INSIDE = ("place", "frame", "support")


@dataclass(frozen=True)
class Calibrate:
    """Turn each variable's couplings into the best handle of the (K, λ) grid.

    `supports="all"` takes the top K over the whole menu; `"place"` also tries the top K within each single place.
    `coarse` goes through the grid in two rounds and `lean` finds the best alone, as controls do.
    """

    search: Search
    supports: str = "all"
    coarse: bool = False
    lean: bool = False

    def __call__(self, problem: Problem, state: State) -> State:
        found, profile = {}, {}
        search = replace(self.search, score=problem.score)
        with problem.clock.part("calibration"):
            for v in problem.variables:
                candidates = state.candidates.get(v, ())
                if not candidates:
                    raise PlotError(f"There is no coupling to calibrate for '{v}'; put a `Localize` stage first.")
                options = within_places(candidates) if self.supports == "place" else list(candidates)
                find = calibrate_coarsely if self.coarse else partial(calibrate, lean=self.lean)
                found[v] = find(problem.calibration, options, v, search, problem.readout)
                profile[v] = _within_one_place(options, v, found[v])
        handles = {v: c.handle for v, c in found.items()}
        return replace(state, calibrations=found, handles=handles, profile=best_of(state.profile, profile))

    def forecast(self, ahead: Forecast) -> None:
        """The (K, λ) grid of every coupling, a variant resumed at the first place that its support touches.

        Variants that are equally good may run once more for their losses: in the highest case all of them do.
        """
        search = self.search.coarse() if self.coarse else self.search
        strengths, ahead.variants = len(search.strengths), 0
        for v, f in product(ahead.variables, ahead.families):
            supports = [f.places]
            if self.supports == "place" and len(f.places) > 1:
                supports += [(p,) for p in f.places]
            for places in supports:
                sites = f.sites * len(places) // len(f.places)
                sizes = sorted({min(k, max(1, sites)) for k in search.sizes})
                ahead.variants += f.chance[v] * f.couplings * len(sizes) * strengths
                again = {"smallest": 0.0, "natural": 1 / len(sizes), "loss": 1.0}[self.search.ties]
                again *= ahead.case == "highest"
                _forecast_grid(ahead, places, sizes, strengths, f.chance[v] * f.couplings * (1 + again))
                if self.coarse:  # around each of the best points there are about as many again
                    followed = min(FOLLOWED, f.couplings)
                    _forecast_grid(ahead, places, sizes, strengths, f.chance[v] * followed)


def _within_one_place(candidates: Sequence[Candidate], variable: str, found: Calibration) -> dict[str, float]:
    """The best score of the grid points whose sites are all at one place, by place."""
    best: dict[str, float] = {}
    for c, scores in zip(candidates, found.surface.max(dim=2).values.tolist(), strict=True):
        ranked = [c.family.sites[j] for j in c.coupling.ranking(variable)]
        for size, score in zip(found.sizes, scores, strict=True):
            places = {p.name for site in ranked[:size] for p in site.places}
            if len(places) == 1:
                [place] = places
                best[place] = max(score, best.get(place, score))
    return best


def _forecast_grid(
    ahead: Forecast, places: Sequence[Place], sizes: Sequence[int], strengths: int, times: float
) -> None:
    """Top-K supports over some places: the chance that they begin at each, were the sites anywhere."""
    bank = ahead.scene.calibration
    if len(places) == 1:
        ahead.add("calibration", places[0], bank, len(sizes) * strengths, times)
        return
    extreme = {ahead.by_price(places)[0]: 1.0}
    for k in sizes:
        later = pairwise(((len(places) - n) / len(places)) ** k for n in range(len(places) + 1))
        anywhere = {p: this - beyond for p, (this, beyond) in zip(places, later, strict=True)}
        for p, chance in (anywhere if ahead.case == "expected" else extreme).items():
            ahead.add("calibration", p, bank, strengths, times * chance)


@dataclass(frozen=True)
class SelectTokens:
    """From couplings over token positions to the places of the tokens worth zooming into.

    A variable keeps the `keep` tokens of highest mass of every (ε, β): tokens hold much besides a variable, so which of
    them is right is left to the stages that look inside.
    """

    keep: int = 2

    def __call__(self, problem: Problem, state: State) -> State:
        places = {}
        for v in problem.variables:
            found = state.candidates.get(v, ())
            if not found:
                raise PlotError(f"There is no coupling to select tokens for '{v}' from; put a `Localize` stage first.")
            tops = {j for c in found for j in c.coupling.ranking(v)[: self.keep]}
            kept = {p for j in tops for p in found[0].family.sites[j].places}
            places[v] = tuple(p for p in state.places[v] if p in kept)
        return replace(state, places=places)

    def forecast(self, ahead: Forecast) -> None:
        places = ahead.scene.shape.places
        there = len({p.token for p in places})
        kept = {"lowest": self.keep, "expected": self.keep * AGREEING, "highest": there}[ahead.case]
        ahead.narrow(min(there, kept) * len(places) / there)


@dataclass(frozen=True)
class SelectPlaces:
    """From couplings over whole places to the places worth zooming into, with their full patches as handles.

    Each coupling proposes its `shortlist` places of highest mass; each proposed place is tried as a full patch on
    calibration, and the best `keep` stay open. With one coupling and a shortlist of one there is nothing to try.
    `grid` says whose (ε, β) counts: every variable's `own`, or one `shared` by all, the best for them on average.
    """

    shortlist: int = 1
    keep: int = 1
    grid: str = "own"

    def __post_init__(self) -> None:
        if self.grid not in GRIDS:
            unknown("choice of (ε, β)", self.grid, GRIDS)

    def __call__(self, problem: Problem, state: State) -> State:
        places, handles, patched = {}, {}, {}
        proposed = {v: self._proposed(state, v) for v in problem.variables}
        scores = {v: self._scores(problem, v, proposed[v]) for v in problem.variables}
        profile = {v: {p.name: score for p, score in found.items()} for v, found in scores.items()}
        if self.grid == "shared":
            chosen = self._shared(proposed, scores)
            proposed = {v: [lists[chosen]] for v, lists in proposed.items()}
        for v, lists in proposed.items():
            tried = list(dict.fromkeys(p for some in lists for p in some))
            ranked = _ranked(tried, scores[v])  # equal scores keep the order of mass
            places[v] = tuple(ranked[: self.keep])
            patched[v] = {p.name: scores[v][p] for p in tried}
            handles[v] = _best_patch(problem, v, tried, scores[v])
        return replace(state, places=places, handles=handles, patched=patched, profile=best_of(state.profile, profile))

    def forecast(self, ahead: Forecast) -> None:
        """Each proposed place is tried as a full patch."""
        most = max((f.couplings for f in ahead.families), default=1)
        agreeing = {"lowest": 1, "expected": min(most, AGREEING), "highest": most}[ahead.case]
        for own in ahead.open.values():
            for p, chance in ahead.some(own, min(sum(own.values()), self.shortlist * agreeing)).items():
                ahead.add("calibration", p, ahead.scene.calibration, 1, chance)
        ahead.narrow(self.keep)

    def _proposed(self, state: State, variable: str) -> list[list[Place]]:
        """The shortlist of every coupling."""
        candidates = state.candidates.get(variable, ())
        if not candidates:
            raise PlotError(
                f"There is no coupling to select places for '{variable}' from; put a `Localize` stage first."
            )
        open_to_it = set(state.places[variable])
        ranked = [[c.family.sites[j].place for j in c.coupling.ranking(variable)] for c in candidates]
        return [[p for p in places if p in open_to_it][: self.shortlist] for places in ranked]

    def _scores(self, problem: Problem, variable: str, proposed: Sequence[Sequence[Place]]) -> dict[Place, float]:
        """The calibration score of every proposed place, patched whole."""
        return _patch_scores(problem, variable, list(dict.fromkeys(p for some in proposed for p in some)))

    def _shared(
        self, proposed: Mapping[str, Sequence[Sequence[Place]]], scores: Mapping[str, Mapping[Place, float]]
    ) -> int:
        """The coupling whose shortlists hold the best places, summed over variables."""
        best = [[max(scores[v][p] for p in some) for some in lists] for v, lists in proposed.items()]
        return max(range(len(best[0])), key=lambda g: round(sum(row[g] for row in best), 9))


@dataclass(frozen=True)
class PatchPlaces:
    """Every open place patched whole: each variable's best one is its handle, and all places stay open."""

    learner: ClassVar[bool] = True

    def __call__(self, problem: Problem, state: State) -> State:
        scores = {v: _patch_scores(problem, v, state.places[v]) for v in problem.variables}
        handles = {v: _best_patch(problem, v, list(found), found) for v, found in scores.items()}
        profile = {v: {p.name: score for p, score in found.items()} for v, found in scores.items()}
        return replace(state, handles=handles, profile=best_of(state.profile, profile))

    def forecast(self, ahead: Forecast) -> None:
        """Each open place is tried as a full patch."""
        for own in ahead.open.values():
            for p, chance in own.items():
                ahead.add("calibration", p, ahead.scene.calibration, 1, chance)


def _patch_scores(problem: Problem, variable: str, places: Sequence[Place]) -> dict[Place, float]:
    """The calibration score of every place, patched whole."""
    with problem.clock.part("calibration"):
        weights = pair_weights(problem.calibration, variable, problem.score)
        scores = scored_all(problem.calibration, [_patch(p) for p in places], variable, weights, problem.readout)
        return {p: float(score[0]) for p, score in zip(places, scores, strict=True)}


def _ranked(places: Sequence[Place], scores: Mapping[Place, float]) -> list[Place]:
    return sorted(places, key=lambda p: -round(scores[p], 9))


def _best_patch(problem: Problem, variable: str, tried: Sequence[Place], scores: Mapping[Place, float]) -> Handle:
    """The best of some places as a handle, patched whole."""
    best, reached = _ranked(tried, scores)[0], [scores[p] for p in tried]
    how = {
        "support": best.name,
        "proposed": [p.name for p in tried],
        "calibration_score": scores[best],
        "by_support": {p.name: scores[p] for p in tried},
        "by_size": best_by([str(p.width) for p in tried], reached),
    }
    return handle_from_edits(variable, _patch(best), 0, problem.subject, how)


def _patch(place: Place) -> list[EditBatch]:
    return [EditBatch(place, Frame.identity(place.width), torch.ones(1, place.width))]


@dataclass(frozen=True)
class Hint:
    """Subspace sizes around the size e of the handle found so far: `factors` · e, at least `floor`."""

    factors: tuple[float, ...]
    floor: int = 1

    @classmethod
    def paper(cls) -> Hint:
        """The factors of Algorithms 11 and 12."""
        return cls((0.5, 0.75, 1.0, 1.5, 2.0))

    @classmethod
    def practice(cls, floor: int) -> Hint:
        """The factors of the authors' runs, which also kept sizes from getting small."""
        return cls((0.5, 0.75, 1.0, 1.25, 1.5), floor)

    def sizes(self, effective: int, most: int) -> list[int]:
        """The sizes to train, none above the room there is."""
        return sorted({min(most, max(self.floor, round(f * effective), 1)) for f in self.factors})


@dataclass(frozen=True)
class TrainDas:
    """Train rotations at every place open to a variable and keep the best on calibration (ties: smallest k)."""

    learner: ClassVar[bool] = True
    dimensions: tuple[int, ...] | Hint | None = None
    """Subspace sizes; None is every size up to the place's width, a `Hint` follows the handles found so far."""
    spec: DasSpec = field(default_factory=DasSpec)
    from_handles: bool = False
    """Start at the directions of the handles found so far, where they are at the same place."""
    every: int = 1
    """Only at every n-th place, counted from the last."""
    also: tuple[str, ...] = ()
    """Names of places where to train besides these."""
    inside: str = "place"
    """Rotate the whole `place`; the `frame` of the handle found there (PLOT-PCA-DAS: R_Z Q); or only the directions
    that handle uses, its `support`."""

    def __post_init__(self) -> None:
        if self.inside not in INSIDE:
            unknown("room for DAS", self.inside, INSIDE)

    def __call__(self, problem: Problem, state: State) -> State:
        trainings: list[Training] = []
        with problem.clock.part("das"):
            places = problem.subject.places
            for n, place in enumerate(places):
                if not self._here(n, places):
                    continue
                # variables with one room and one list of sizes are trained as one batch
                groups: dict[tuple[int, tuple[int, ...]], tuple[Frame | None, list[str]]] = {}
                for v in problem.variables:
                    if place in state.places[v]:
                        room = self._room(state, v, place)
                        key = (id(room.read) if room else 0, self._sizes(state, v, room.rank if room else place.width))
                        groups.setdefault(key, (room, []))[1].append(v)
                for (_, sizes), (room, variables) in groups.items():
                    starts = self._starts(state, place)
                    trainings.append(Training(place, variables, sizes, problem.generator(n), starts, room))
            rotations = train_all(problem.fit, trainings, problem.readout, self.spec)
        with problem.clock.part("calibration"):
            handles = {v: best_rotation(problem, [r for r in rotations if r.variable == v]) for v in problem.variables}
        return replace(state, handles=handles)

    def forecast(self, ahead: Forecast) -> None:
        """Every rotation trains by itself in a large network, many at once in a small one; each is then scored."""
        places, spec = ahead.scene.shape.places, self.spec
        epochs = ahead.epochs_of(spec.least, spec.most)
        for n, p in enumerate(places):
            chance = sum(own.get(p, 0.0) for own in ahead.open.values())
            if not (chance and self._here(n, places)):
                continue
            if isinstance(self.dimensions, Hint):
                sizes = self.dimensions.sizes(p.width // 4, p.width - 1)  # how many there are, not which
            else:
                sizes = sorted({min(k, p.width) for k in self.dimensions or range(1, p.width + 1)})
            trained = [k for k in sizes if k < p.width or spec.optimiser == "oblique"]
            ahead.rotations += chance * len(sizes)
            jobs = round(len(trained) * spec.restarts * (1.0 if ahead.apart else max(1.0, chance)))
            together = min(ahead.jobs_at_once(spec.batch), max(1, jobs))
            for k in trained:
                ahead.train(p, chance * spec.restarts, epochs, spec.batch, together=together, rank=k)
            ahead.add("calibration", p, ahead.scene.calibration, 1, chance * len(sizes) * spec.restarts)

    def _here(self, number: int, places: Sequence[Place]) -> bool:
        return (len(places) - 1 - number) % self.every == 0 or places[number].name in self.also

    def _sizes(self, state: State, variable: str, room: int) -> tuple[int, ...]:
        if isinstance(self.dimensions, Hint):
            return tuple(self.dimensions.sizes(_found(state, variable).size, room))
        wanted = self.dimensions or range(1, room + 1)
        return tuple(sorted({min(k, room) for k in wanted}))

    def _room(self, state: State, variable: str, place: Place) -> Frame | None:
        """The directions that rotations may mix; None is the whole place."""
        if self.inside == "place":
            return None
        [edit] = [e for e in _found(state, variable).edits if e.place == place]
        if self.inside == "frame":
            return edit.frame if edit.frame.read is not None else None
        used = (edit.gains != 0).nonzero().squeeze(1)
        read = edit.frame.read if edit.frame.read is not None else torch.eye(place.width)
        return Frame.orthonormal(read[:, used].contiguous(), "support")

    def _starts(self, state: State, place: Place) -> dict[str, Frame]:
        handles = state.handles if self.from_handles else {}
        return {
            v: e.frame for v, h in handles.items() for e in h.edits if e.place == place and e.frame.read is not None
        }


def _found(state: State, variable: str) -> Handle:
    if variable not in state.handles:
        raise PlotError(f"DAS is to follow the handle of '{variable}', but no stage before has made one.")
    return state.handles[variable]


def best_rotation(problem: Problem, rotations: Sequence[Rotation]) -> Handle:
    """The rotation with the best calibration score, as a handle."""
    variable = rotations[0].variable
    weights = pair_weights(problem.calibration, variable, problem.score)
    tries = [(r.place, r.frame) for r in rotations]
    scores = scored_frames(problem.calibration, tries, (1.0,), variable, weights, problem.readout)[:, 0].tolist()
    order = {p.name: k for k, p in enumerate(problem.subject.places)}
    best, score = min(
        zip(rotations, scores, strict=True),
        key=lambda rs: (-round(rs[1], 9), rs[0].dimension, order[rs[0].place.name], rs[0].restart),
    )
    described = {
        "support": best.place.name,
        "k": best.dimension,
        "restart": best.restart,
        "epochs": best.epochs,
        "fit_loss": best.loss,
        "calibration_score": score,
        "trained": len(rotations),
        "by_support": best_by([r.place.name for r in rotations], scores),
        "by_size": best_by([str(r.frame.rank) for r in rotations], scores),
    }
    return handle_from_edits(variable, _edit(best), 0, problem.subject, described)


def _edit(rotation: Rotation) -> list[EditBatch]:
    return [EditBatch(rotation.place, rotation.frame, torch.ones(1, rotation.frame.rank))]
