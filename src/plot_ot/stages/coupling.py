"""Localization: signatures of the menu's sites, matched to the variables by transport or by a baseline's scores."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations_with_replacement, islice, product

import numpy as np
import torch
from jaxtyping import Bool, Float
from numpy import ndarray
from torch import Tensor

from plot_ot.edits import EditBatch, Frame, resume_edited
from plot_ot.engine import Unit, run, shards
from plot_ot.errors import CouplingWarning, PlotError, unknown, warn
from plot_ot.signatures import Readout, Signatures, SignatureSpec
from plot_ot.signatures import measure_signatures as exact_signatures
from plot_ot.signatures.effects import variants_at_once
from plot_ot.signatures.jacobian import jacobian_signatures
from plot_ot.sites import Menu, SiteFamily, neurons, tokens, whole_places
from plot_ot.stages.calibrate import pair_weights, scored
from plot_ot.stages.forecast import Coupled, Forecast
from plot_ot.stages.prefilter import Prefilter
from plot_ot.stages.problem import Candidate, Problem, State
from plot_ot.subjects import BankRecording, Place
from plot_ot.transport import Coupling, Transport, couple, from_scores

COUPLINGS = ("all", "place", "masked")
MEASURES = ("exact", "jacobian")
MOST_WEIGHTS = 200
"""Weightings of families that calibration is asked to choose between, at most."""


@dataclass(frozen=True)
class Localize:
    """Fit couplings over the menus at the places still open, for every (ε, β) of the grid.

    `coupling` says what is coupled together: `all` open places; one `place` at a time (the paper's later stages); or
    `masked`, all places at once with each variable shut out of the places that are not open to it.

    `signatures` says how effects are measured: `exact`, by responses; `jacobian`, linearised, at a cost that hardly
    grows with the menu; or a `Prefilter`, which verifies the best linearised sites exactly. Sites it leaves out keep
    their linearised costs: they stay in the coupling, and calibration, which is exact, judges what they are worth.

    With a hierarchical `spec` there is one coupling for every weighting of the families in multiples of 1/`steps`, and
    one for equal weights; calibration chooses between them as it does between ε and β.
    """

    menus: tuple[Menu, ...] = (neurons,)
    transport: Transport = field(default_factory=Transport)
    spec: SignatureSpec = field(default_factory=SignatureSpec)
    coupling: str = "all"
    signatures: str | Prefilter = "exact"
    steps: int = 2

    def __post_init__(self) -> None:
        if self.coupling not in COUPLINGS:
            unknown("coupling", self.coupling, COUPLINGS)
        if not isinstance(self.signatures, Prefilter) and self.signatures not in MEASURES:
            unknown("way to measure signatures", self.signatures, MEASURES)
        if self.steps < 1:
            raise PlotError(f"Weights of families need at least one step; found {self.steps}.")

    def __call__(self, problem: Problem, state: State) -> State:
        all_found = []
        fitted: list[Coupling] = []
        candidates: dict[str, tuple[Candidate, ...]] = dict.fromkeys(problem.variables, ())
        for places in open_places(problem, state, self.coupling == "place"):
            for menu in self.menus:
                with problem.clock.part("signatures"):
                    family = menu(problem.fit, places)
                    mask = self.mask(problem, state, family)
                    found = self._measure(problem, family, mask)
                all_found.append(found)
                with problem.clock.part("transport"):
                    couplings = [c for w in self._weighted(problem, found) for c in couple(w, self.transport, mask)]
                fitted += couplings
                label = places[0].name if len(places) == 1 else "all"
                for v in problem.variables:
                    if set(places) & set(state.places[v]):
                        candidates[v] += tuple(Candidate(family, c, label) for c in couplings)
        warn_of_degeneracies(fitted)
        return replace(state, signatures=tuple(all_found), candidates=candidates)

    def forecast(self, ahead: Forecast) -> None:
        bank, chances = ahead.scene.fit.bank, ahead.either()
        grid = len(self.transport.grid)
        if self.spec.hierarchical:
            seen = [bank.families[f] for f in bank.family.unique().tolist()]
            grid *= 1 + len(weightings(bank.families, seen, self.steps))
        ahead.families, ahead.sites = [], 0
        for menu in self.menus:
            found = ahead.menu_sizes(menu, list(chances))
            total = round(sum(n * chances[p] for p, n in found))
            ahead.sites += total
            forecast_signatures(ahead, self.signatures, found, chances, total)
            if self.coupling == "place":
                ahead.families += [
                    Coupled((p,), n, grid, {v: own.get(p, 0.0) for v, own in ahead.open.items()}) for p, n in found
                ]
            else:
                places = tuple(p for p, _ in found)
                ahead.families.append(Coupled(places, total, grid, dict.fromkeys(ahead.open, 1.0)))

    def _measure(self, problem: Problem, family: SiteFamily, mask: Bool[ndarray, "m n"] | None) -> Signatures:
        fit, readout = problem.fit, problem.readout
        if isinstance(self.signatures, Prefilter):
            return self.signatures(fit, family, readout, self.spec, problem.coupled, self.transport, mask)
        how = exact_signatures if self.signatures == "exact" else jacobian_signatures
        return how(fit, family, readout, self.spec, problem.coupled)

    def _weighted(self, problem: Problem, found: Signatures) -> list[Signatures]:
        """The signatures under every weighting of the families; just themselves where families are not kept apart."""
        if not self.spec.hierarchical:
            return [found]
        bank = problem.fit.bank
        seen = [bank.families[f] for f in bank.family.unique().tolist()]
        return [found, *(found.weighted(w, bank.families) for w in weightings(bank.families, seen, self.steps))]

    def mask(self, problem: Problem, state: State, family: SiteFamily) -> Bool[ndarray, "m n"] | None:
        """Which variables may be matched with which sites."""
        if self.coupling != "masked":
            return None
        open_to = {v: state.places.get(v, problem.subject.places) for v in problem.coupled}
        return np.array([[s.place in open_to[v] for s in family.sites] for v in problem.coupled])


@dataclass(frozen=True)
class LocalizeTokens:
    """Couple token positions, each as near to a variable as the nearest of its states.

    Swapping all states of a token at once (the menu `tokens`) hides a variable at the last token, whose last state is
    the answer itself: such a swap copies the source's answer. So states are swapped one at a time, `depth` of every
    token, spread over its places, and the token takes the smallest cost.
    """

    transport: Transport = field(default_factory=Transport)
    spec: SignatureSpec = field(default_factory=SignatureSpec)
    depth: int = 6

    @property
    def menus(self) -> tuple[Menu, ...]:
        """The sites it couples."""
        return (tokens,)

    def __call__(self, problem: Problem, state: State) -> State:
        [places] = open_places(problem, state, False)
        by_token: dict[str, list[Place]] = {}
        for p in places:
            by_token.setdefault(p.token, []).append(p)
        tried = {p for at in by_token.values() for p in _spread_out(at, self.depth)}
        with problem.clock.part("signatures"):
            family = whole_places(problem.fit, [p for p in places if p in tried])
            found = exact_signatures(problem.fit, family, problem.readout, self.spec, problem.coupled)
        with problem.clock.part("transport"):
            nearest = _nearest(found, tokens(problem.fit, places))
            couplings = couple(nearest, self.transport)
        warn_of_degeneracies(couplings)
        candidates = tuple(Candidate(nearest.family, c) for c in couplings)
        return replace(state, signatures=(nearest,), candidates=dict.fromkeys(problem.variables, candidates))

    def forecast(self, ahead: Forecast) -> None:
        chances = ahead.either()
        by_token: dict[str, list[Place]] = {}
        for p in chances:
            by_token.setdefault(p.token, []).append(p)
        tried = [(p, 1) for at in by_token.values() for p in dict.fromkeys(_spread_out(at, self.depth))]
        forecast_signatures(ahead, "exact", tried, chances, len(tried))
        ahead.sites = len(by_token)
        everywhere = dict.fromkeys(ahead.open, 1.0)
        ahead.families = [Coupled(tuple(chances), len(by_token), len(self.transport.grid), everywhere)]


def forecast_signatures(
    ahead: Forecast,
    how: str | Prefilter,
    found: Sequence[tuple[Place, int]],
    chances: Mapping[Place, float],
    total: int,
) -> None:
    """Responses of every site and of an unedited variant, or derivatives, or both; `found` are the sites by place."""
    fit, m, share = ahead.scene.fit, len(ahead.variables), 1.0
    if isinstance(how, Prefilter) and total > how.few:
        share = how.budget if not isinstance(how.budget, int) else how.budget / (total * len(fit))
    if how == "jacobian" or share < 1:
        first = found[0][0]
        times = len(fit.base_rows.unique()) / ahead.scene.classes(
            fit, [first]
        )  # derivatives serve all of a base's pairs
        ahead.add("signatures", first, fit, 1, times, backward=ahead.scene.outputs, sent=8.0 * (m + 1) * total)
        if how == "jacobian":
            return
    for p, n in found:
        verified = max(1, round(share * n))
        at_once = variants_at_once(ahead.scene.subject, verified, ahead.scene.classes(fit, [p]))
        unedited = math.ceil(verified / (at_once - 1))
        ahead.add("signatures", p, fit, verified + unedited, chances[p], sent=8.0 * (m + 1) * verified)


def warn_of_degeneracies(couplings: Sequence[Coupling]) -> None:
    """Warn once of all serious flags of a stage's couplings, by name."""
    found = Counter(kind for c in couplings for kind in {f.kind for f in c.flags} if kind.serious)
    if found:
        said = " ".join(f"{kind} ({n} of {len(couplings)}): {kind.meaning}" for kind, n in sorted(found.items()))
        warn(f"Degenerate couplings. {said}", CouplingWarning)


def _spread_out(places: Sequence[Place], count: int) -> list[Place]:
    """So many of the places, evenly from the first to the last."""
    last, steps = len(places) - 1, max(1, min(count, len(places)) - 1)
    return [places[round(k * last / steps)] for k in range(steps + 1)]


def _nearest(found: Signatures, family: SiteFamily) -> Signatures:
    """Every token's smallest cost over its states, with that state's cosine."""
    cost, cosine, norms = [], [], []
    for site in family.sites:
        own = [j for j, s in enumerate(found.family.sites) if s.place.token == site.place.token]
        least = found.cost[:, own].min(dim=1)
        cost.append(least.values)
        cosine.append(found.cosine[:, own].gather(1, least.indices[:, None]).squeeze(1))
        norms.append(found.column_norms[own].max())
    return replace(
        found,
        family=family,
        cost=torch.stack(cost, dim=1),
        cosine=torch.stack(cosine, dim=1),
        column_norms=torch.stack(norms),
        pooled=None,
    )


def weightings(families: Sequence[str], seen: Sequence[str], steps: int) -> list[dict[str, float]]:
    """The points of a grid on the simplex of the families seen, multiples of 1/steps, other than equal weights."""
    if math.comb(len(seen) + steps - 1, steps) > MOST_WEIGHTS:
        raise PlotError(
            f"{len(seen)} families in {steps} steps give {math.comb(len(seen) + steps - 1, steps)} weightings; at most "
            f"{MOST_WEIGHTS} are tried. Use fewer steps."
        )
    points = []
    for chosen in combinations_with_replacement(seen, steps):
        weights = {f: chosen.count(f) / steps for f in families}
        if len({weights[f] for f in seen}) > 1:
            points.append(weights)
    return points


@dataclass(frozen=True)
class ScoreSites:
    """A baseline behind the interface of a coupling: sites ranked by scores that use no transport."""

    kind: str
    scores: Callable[[Problem, SiteFamily], Float[ndarray, "m n"]]
    menu: Menu = neurons

    @property
    def menus(self) -> tuple[Menu, ...]:
        """The sites it ranks."""
        return (self.menu,)

    def __call__(self, problem: Problem, state: State) -> State:
        [places] = open_places(problem, state, False)
        family = self.menu(problem.fit, places)
        with problem.clock.part("calibration"):
            scores = self.scores(problem, family)
        coupling = from_scores(problem.variables, [s.name for s in family.sites], scores, self.kind)
        return replace(state, candidates={v: (Candidate(family, coupling),) for v in problem.variables})

    def forecast(self, ahead: Forecast) -> None:
        scene, chances = ahead.scene, ahead.either()
        found = ahead.menu_sizes(self.menu, list(chances))
        ahead.sites = round(sum(n * chances[p] for p, n in found))
        for k, (p, n) in enumerate(found):
            if self.kind == "brute-force":  # the unedited variant is resumed at the first place
                ahead.add("calibration", p, scene.calibration, n + (k == 0), chances[p] * len(ahead.variables))
            elif self.kind == "attribution":
                ahead.add("calibration", p, scene.fit, 1, chances[p] * len(ahead.variables), backward=1)
        if self.kind not in ("brute-force", "attribution", "random"):
            ahead.not_counted.append(f"{type(self).__name__} by '{self.kind}'")
        ahead.families = [Coupled(tuple(p for p, _ in found), ahead.sites, 1, dict.fromkeys(ahead.open, 1.0))]


def brute_force(problem: Problem, family: SiteFamily) -> Float[ndarray, "m n"]:
    """What each site gains over no edit, swapped alone, on the calibration bank."""
    rows = []
    swaps = torch.cat([torch.eye(len(family), dtype=torch.float64), torch.zeros(1, len(family), dtype=torch.float64)])
    for v in problem.variables:
        weights = pair_weights(problem.calibration, v, problem.score)
        score = scored(problem.calibration, family.edits(swaps), v, weights, problem.readout)
        rows.append((score[:-1] - score[-1]).clamp(min=0).numpy())
    return np.stack(rows)


def attribution(problem: Problem, family: SiteFamily) -> Float[ndarray, "m n"]:
    """Attribution patching: the slope at g = 0 by which each site's gain lowers the counterfactual label's loss.

    One backward pass per place and variable gives all its sites: d loss / d g = Σ_pairs ∇·W(Rᵀ a_source - Rᵀ a_base).
    """
    scores, fit = np.zeros((len(problem.variables), len(family))), problem.fit
    jobs, parts = list(product(enumerate(problem.variables), family.places)), shards(fit)
    units = [
        Unit(_slope, pairs, (place,), (place, family.frames[place.name], v, problem.readout))
        for (_, v), place in jobs
        for pairs in parts
    ]
    results: Iterator[Tensor] = run(fit, units)
    for (row, _), place in jobs:
        slope = torch.stack(list(islice(results, len(parts)))).sum(dim=0)
        for site in family.at(place):
            for part, directions in family.sites[site].parts:
                if part.name == place.name:
                    scores[row, site] += float(slope[list(directions)].sum())
    return scores.clip(min=0)


def _slope(
    recording: BankRecording, place: Place, frame: Frame, variable: str, readout: Readout
) -> Float[Tensor, " r"]:
    """How fast each direction's gain lowers the loss, summed over pairs."""
    labels = recording.bank.labels[variable].to(recording.subject.device)
    like, slope = recording.store.activations[place.name], torch.zeros(frame.rank, dtype=torch.float64)
    at_once = max(1, recording.subject.responses_per_batch)
    for at in range(0, len(recording), at_once):
        pairs = slice(at, min(at + at_once, len(recording)))
        gains = torch.zeros(1, frame.rank, device=like.device, dtype=like.dtype, requires_grad=True)
        outputs = resume_edited(recording, [EditBatch(place, frame, gains)], pairs)
        [gradient] = torch.autograd.grad(readout.loss(outputs, labels[pairs]).sum(), gains)
        slope -= gradient[0].cpu().double()
    return slope


def at_random(draw: int = 0) -> Callable[[Problem, SiteFamily], Float[ndarray, "m n"]]:
    """Random scores; `draw` numbers independent ones."""

    def scores(problem: Problem, family: SiteFamily) -> Float[ndarray, "m n"]:
        shape = (len(problem.variables), len(family))
        return torch.rand(shape, generator=problem.generator(7919 + draw), dtype=torch.float64).numpy()

    return scores


def open_places(problem: Problem, state: State, per_place: bool) -> list[list[Place]]:
    """The places to couple together: all that are open to some variable, or one at a time."""
    open_to_some = {p for places in state.places.values() for p in places}
    ordered = [p for p in problem.subject.places if p in open_to_some]
    return [[p] for p in ordered] if per_place else [ordered]
