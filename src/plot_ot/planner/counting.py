"""Walk through a method's stages and count the passes they make, before anything runs.

Which places a stage will keep is not known, unless the caller says so. Hence three cases. In the `expected` one each
place is open to a variable with some chance: after Stage A it is anywhere with equal chance, in a language model the
later the likelier (what a last token knows, it knows late). In the `lowest` and the `highest` one whatever is not known
turns out as cheap, or as dear, as it can: a response resumed early runs many blocks, one resumed late few.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import ceil

from plot_ot.engine.units import WORK
from plot_ot.errors import PlotError
from plot_ot.methods import Method
from plot_ot.planner.scene import Scene, inputs_per_shard
from plot_ot.sites import Menu, tokens
from plot_ot.stages.choose import Best, Calibrate, Hint, SelectPlaces, SelectTokens, TrainDas
from plot_ot.stages.closed_form import RULES, ClosedForm, cell_variables
from plot_ot.stages.coupling import Localize, ScoreSites, weightings
from plot_ot.stages.prefilter import Prefilter
from plot_ot.stages.problem import Stage
from plot_ot.subjects import BankRecording, Place

CASES = ("lowest", "expected", "highest")
AGREEING = 1.25
"""Places that the couplings of Stage A propose together, per place that one of them proposes: they mostly agree."""


@dataclass(frozen=True)
class Passes:
    """Equal resumed batches: `times` times so many pairs under so many variants, from a place on."""

    part: str
    """`signatures`, `calibration`, `das` or `test`."""
    stage: int
    place: Place
    pairs: int
    variants: int
    times: float
    backward: int = 0
    """Backward passes per forward pass; with frozen weights one costs about as much."""
    rank: int = 0
    """Directions of a frame that is trained, or 0."""
    sent: float = 0.0
    """Bytes that whoever runs them elsewhere hands back, in all."""
    units: float = 1.0
    """Pieces that the work can be shared out in."""
    shards: int = 1
    """Of the bank: keys and values of pairs in different ones are apart."""

    @property
    def responses(self) -> float:
        """(pair, variant) responses in all."""
        return self.pairs * self.variants * self.times


Chances = dict[Place, float]


@dataclass(frozen=True)
class _Family:
    """Couplings over sites of some places: how many, and how likely they are made for a variable."""

    places: tuple[Place, ...]
    sites: int
    couplings: int
    chance: Mapping[str, float]


@dataclass
class Count:
    """What has been counted so far."""

    scene: Scene
    chosen: Mapping[str, Sequence[Place]] | None = None
    """Where each variable will be after Stage A, if known."""
    epochs: int | None = None
    """That DAS will train, if known; else the most it may, in the lowest case the fewest."""
    case: str = "expected"
    """One of `CASES`."""
    stage: int = -1
    passes: list[Passes] = field(default_factory=list)
    sites: float = 0.0
    variants: float = 0.0
    rotations: float = 0.0
    skipped: list[str] = field(default_factory=list)
    """Stages that cannot be counted, by name."""
    open: dict[str, Chances] = field(default_factory=dict)
    families: list[_Family] = field(default_factory=list)

    def __post_init__(self) -> None:
        places = self.scene.shape.places
        self.open = self.open or {v: dict.fromkeys(places, 1.0) for v in self.variables}

    @property
    def variables(self) -> tuple[str, ...]:
        return self.scene.fit.bank.variables

    @property
    def apart(self) -> bool:
        """Whether variables are taken to be in different places, where they share nothing."""
        narrowed = any(len(own) < len(self.scene.shape.places) for own in self.open.values())
        return self.case == "highest" and self.chosen is None and narrowed

    # -- helpers -------------------------------------------------------------------------------------------

    def add(self, part: str, place: Place, bank: BankRecording, variants: int, times: float, **more: float) -> None:
        """Responses of a bank's pairs at a place."""
        if not times or not variants:
            return
        pairs = self.scene.classes(bank, [place])
        sent = more.pop("sent", 8.0 * variants) * times
        cut = self.shards(bank)
        here = Passes(part, self.stage, place, pairs, variants, times, sent=sent, units=times * cut, shards=cut)
        self.passes.append(replace(here, **more))  # type: ignore[arg-type]

    def shards(self, bank: BankRecording) -> int:
        """How many pieces a bank's pairs are cut into."""
        return ceil(len(bank.base_rows.unique()) / inputs_per_shard(self.scene.shape))

    def either(self) -> Chances:
        """The chance that a place is open to some variable, if variables keep apart as far as they can; in the lowest
        case all are in the same places."""
        if self.apart:
            apart = self.by_price(self.scene.shape.places)[: sum(map(len, self.open.values()))]
            return {p: 1.0 for p in self.scene.shape.places if p in apart}
        chances = {p: sum(own.get(p, 0.0) for own in self.open.values()) for p in self.scene.shape.places}
        return {p: min(1.0, chance) for p, chance in chances.items() if chance}

    def by_price(self, places: Iterable[Place]) -> list[Place]:
        """Cheapest first, in the highest case dearest first: blocks that a resumed bank runs."""

        def price(p: Place) -> int:
            return self.scene.shape.left(p) * self.scene.classes(self.scene.fit, [p])

        return sorted(places, key=price, reverse=self.case == "highest")

    def some(self, own: Chances, number: float, *, late: bool = False) -> Chances:
        """So many of these places: any of them, the cheapest or the dearest; with `late`, later ones are likelier."""
        if self.case != "expected":
            return dict.fromkeys(self.by_price(own)[: round(number)], 1.0)
        likely = {p: chance * (n + 1 if late else 1) for n, (p, chance) in enumerate(own.items())}
        total = sum(likely.values())
        return {p: min(1.0, x * number / total) for p, x in likely.items()}

    def narrow(self, keep: float) -> None:
        """Each variable keeps so many of its places."""
        for v, own in self.open.items():
            if self.chosen is not None:
                self.open[v] = dict.fromkeys(self.chosen[v], 1.0)
            else:
                self.open[v] = self.some(own, keep, late=self.scene.shape.language)

    def menu_sizes(self, menu: Menu, places: Sequence[Place]) -> list[tuple[Place, int]]:
        """Sites of a menu by the place where they are resumed; equally wide places have equally many."""
        with contextlib.suppress(PlotError):  # some menus need all places at once
            if menu is not tokens:  # whose sites are at several places
                by_width = {w: len(menu(self.scene.fit, [p])) for w, p in {p.width: p for p in places}.items()}
                return [(p, by_width[p.width]) for p in places]
        return [(at[0], len(sites)) for at, sites in menu(self.scene.fit, places).together()]

    # -- stages --------------------------------------------------------------------------------------------

    def walk(self, stages: Sequence[Stage]) -> None:
        """Count stages one after the other."""
        for stage in stages:
            self.stage += 1
            counts = {
                Localize: self.localize,
                ScoreSites: self.score,
                SelectPlaces: self.select,
                SelectTokens: self.select_tokens,
                Calibrate: self.calibrate,
                ClosedForm: self.closed_form,
                TrainDas: self.das,
                Best: self.best,
            }
            if type(stage) in counts:
                counts[type(stage)](stage)  # type: ignore[operator]
            else:
                self.skipped.append(type(stage).__name__)

    def localize(self, stage: Localize) -> None:
        fit, chances = self.scene.fit, self.either()
        grid = len(stage.transport.grid)
        if stage.spec.hierarchical:
            seen = [fit.bank.families[f] for f in fit.bank.family.unique().tolist()]
            grid *= 1 + len(weightings(fit.bank.families, seen, stage.steps))
        self.families, self.sites = [], 0
        for menu in stage.menus:
            found = self.menu_sizes(menu, list(chances))
            total = round(sum(n * chances[p] for p, n in found))
            self.sites += total
            self.measure(stage, found, chances, total)
            if stage.coupling == "place":
                self.families += [
                    _Family((p,), n, grid, {v: own.get(p, 0.0) for v, own in self.open.items()}) for p, n in found
                ]
            else:
                self.families.append(_Family(tuple(p for p, _ in found), total, grid, dict.fromkeys(self.open, 1.0)))

    def measure(self, stage: Localize, found: Sequence[tuple[Place, int]], chances: Chances, total: int) -> None:
        """Signatures: every site and an unedited variant, or linearised, or both."""
        fit, m = self.scene.fit, len(self.variables)
        how, share = stage.signatures, 1.0
        if isinstance(how, Prefilter) and total > how.few:
            share = how.budget if not isinstance(how.budget, int) else how.budget / (total * len(fit))
        if how == "jacobian" or share < 1:
            bases = len(fit.base_rows.unique())
            times = bases / self.scene.classes(fit, [found[0][0]])  # a base's derivatives serve all its pairs
            self.add("signatures", found[0][0], fit, 1, times, backward=self.scene.outputs, sent=8.0 * (m + 1) * total)
            if how == "jacobian":
                return
        for p, n in found:
            verified = max(1, round(share * n))
            size = self.scene.subject.responses_per_batch
            at_once = min(verified + 1, max(2, size // self.scene.classes(fit, [p])))
            cuts = ceil(verified / (at_once - 1))
            self.add("signatures", p, fit, verified + cuts, chances[p], sent=8.0 * (m + 1) * verified)

    def score(self, stage: ScoreSites) -> None:
        scene, chances = self.scene, self.either()
        found = self.menu_sizes(stage.menu, list(chances))
        self.sites = round(sum(n * chances[p] for p, n in found))
        for k, (p, n) in enumerate(found):
            if stage.kind == "brute-force":  # the unedited variant is resumed at the first place
                self.add("calibration", p, scene.calibration, n + (k == 0), chances[p] * len(self.variables))
            elif stage.kind == "attribution":
                self.add("calibration", p, scene.fit, 1, chances[p] * len(self.variables), backward=1)
        places = tuple(p for p, _ in found)
        self.families = [_Family(places, self.sites, 1, dict.fromkeys(self.open, 1.0))]

    def select(self, stage: SelectPlaces) -> None:
        """Each proposed place is tried as a full patch."""
        most = max((f.couplings for f in self.families), default=1)
        agreeing = {"lowest": 1, "expected": min(most, AGREEING), "highest": most}[self.case]
        for own in self.open.values():
            for p, chance in self.some(own, min(sum(own.values()), stage.shortlist * agreeing)).items():
                self.add("calibration", p, self.scene.calibration, 1, chance)
        self.narrow(stage.keep)

    def select_tokens(self, stage: SelectTokens) -> None:
        places = self.scene.shape.places
        there = len({p.token for p in places})
        kept = {"lowest": stage.keep, "expected": stage.keep * AGREEING, "highest": there}[self.case]
        self.narrow(min(there, kept) * len(places) / there)

    def calibrate(self, stage: Calibrate) -> None:
        """The (K, λ) grid of every coupling, a variant resumed at the first place that its support touches.

        Variants that are equally good may run once more for their losses: in the highest case all of them do.
        """
        apart, ties = stage.supports == "place", stage.search.ties
        self.variants = 0
        for v in self.variables:
            for f in self.families:
                supports = [f.places]
                if apart and len(f.places) > 1:
                    supports += [(p,) for p in f.places]
                for places in supports:
                    sites = f.sites * len(places) // len(f.places)
                    sizes = sorted({min(k, max(1, sites)) for k in stage.search.sizes})
                    strengths = len(stage.search.strengths)
                    self.variants += f.chance[v] * f.couplings * len(sizes) * strengths
                    again = {"smallest": 0.0, "surest": 1 / len(sizes), "loss": 1.0}[ties]
                    again *= self.case == "highest"
                    self.grid(places, sizes, strengths, f.chance[v] * f.couplings * (1 + again))

    def grid(self, places: Sequence[Place], sizes: Sequence[int], strengths: int, times: float) -> None:
        """Top-K supports over some places: the chance that they begin at each, were the sites anywhere."""
        if len(places) == 1:
            self.add("calibration", places[0], self.scene.calibration, len(sizes) * strengths, times)
            return
        extreme = {self.by_price(places)[0]: 1.0}
        for k in sizes:
            later = pairwise(((len(places) - n) / len(places)) ** k for n in range(len(places) + 1))
            anywhere = {p: this - beyond for p, (this, beyond) in zip(places, later, strict=True)}
            for p, chance in (anywhere if self.case == "expected" else extreme).items():
                self.add("calibration", p, self.scene.calibration, strengths, times * chance)

    def closed_form(self, stage: ClosedForm) -> None:
        fit = self.scene.fit
        for v, own in self.open.items():
            rules = len({cell_variables(fit, v, rule) for rule in RULES})
            for p, chance in own.items():
                forms = sum(k < p.width for k in stage.sizes) + 2 * rules * len(stage.ridges)
                self.add("calibration", p, self.scene.calibration, forms * len(stage.strengths), chance)

    def das(self, stage: TrainDas) -> None:
        """Every rotation trains by itself in a large network, many at once in a small one; each is then scored."""
        fit, places = self.scene.fit, self.scene.shape.places
        guess = stage.spec.least if self.case == "lowest" else stage.spec.most
        epochs = min(guess if self.epochs is None else self.epochs, stage.spec.most)
        steps = ceil(len(fit) / stage.spec.batch)
        batch = min(stage.spec.batch, len(fit))
        together = max(1, WORK // (max(1, self.scene.shape.weights) * batch))
        for n, p in enumerate(places):
            chances = [own.get(p, 0.0) for own in self.open.values()]
            if (len(places) - 1 - n) % stage.every or not sum(chances):
                continue
            sizes = _sizes(stage, p.width)
            trained = [k for k in sizes if k < p.width or stage.spec.optimiser == "oblique"]
            self.rotations += sum(chances) * len(sizes)
            each = -(-self.scene.classes(fit, [p]) // steps)
            variables = 1.0 if self.apart else max(1.0, sum(chances))
            jobs = round(len(trained) * stage.spec.restarts * variables)
            for k in trained:
                times = sum(chances) * stage.spec.restarts * epochs * steps
                shared = min(together, max(1, jobs))
                units = sum(chances) * stage.spec.restarts / shared
                sent = 4.0 * p.width * k * sum(chances)
                now = Passes("das", self.stage, p, each, shared, times / shared, 1, k, sent, units, self.shards(fit))
                self.passes.append(now)
            self.add("calibration", p, self.scene.calibration, 1, sum(chances) * len(sizes) * stage.spec.restarts)

    def best(self, stage: Best) -> None:
        before = {v: dict(own) for v, own in self.open.items()}
        for way in stage.ways:
            self.open = {v: dict(own) for v, own in before.items()}
            self.walk(way)
        self.open = before
        self.narrow(1)

    def test(self) -> None:
        """Every handle once on its test banks."""
        self.stage += 1
        for (v, _), bank in self.scene.tests.items():
            for p, chance in self.some(self.open[v], 1).items():
                self.add("test", p, bank, 1, chance)


def _sizes(stage: TrainDas, width: int) -> list[int]:
    if isinstance(stage.dimensions, Hint):
        return stage.dimensions.sizes(width // 4, width - 1)  # how many there are, not which
    return sorted({min(k, width) for k in stage.dimensions or range(1, width + 1)})


def count(
    method: Method,
    scene: Scene,
    chosen: Mapping[str, Sequence[Place]] | None = None,
    epochs: int | None = None,
    case: str = "expected",
) -> Count:
    """All passes of a method, its test included; recording is counted apart, since methods share it."""
    found = Count(scene, chosen, epochs, case)
    found.walk(method.stages)
    found.test()
    return found


def by_part(passes: Sequence[Passes]) -> Iterator[tuple[str, list[Passes]]]:
    """Passes of one part together, in the order in which parts first come."""
    for part in dict.fromkeys(p.part for p in passes):
        yield part, [p for p in passes if p.part == part]
