"""Forecasts: every stage tells what it will compute, before anything runs.

A stage has a method `forecast(ahead)`, which does to a `Forecast` what the stage would do to a `State`: it adds the
resumed passes it would make (`ahead.add`), and says what the stages after it will find, by changing `ahead.open` (the
places that stay open to each variable, see `narrow`) and `ahead.families` (couplings to calibrate). The planner walks
through a method's stages by it; a stage without `forecast` is named in every plan as not counted.

Which places a stage will keep is not known, unless the caller says so. Hence three cases. In the `expected` one each
place is open to a variable with some chance: after Stage A it is anywhere with equal chance, in a language model the
later the likelier (what a last token knows, it knows late). In the `lowest` and the `highest` one whatever is not known
turns out as cheap, or as dear, as it can: a response resumed early runs many blocks, one resumed late few.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil
from typing import Any, Protocol

from plot_ot.engine import jobs_at_once
from plot_ot.engine.units import inputs_per_shard
from plot_ot.errors import PlotError
from plot_ot.sites import Menu, tokens
from plot_ot.subjects import BankRecording, Place, Subject
from plot_ot.subjects.shape import Shape

CASES = ("lowest", "expected", "highest")
AGREEING = 1.25
"""Places that the couplings of Stage A propose together, per place that one of them proposes: they mostly agree."""


@dataclass(frozen=True)
class Passes:
    """Equal resumed batches: `times` times so many pairs under so many variants, from a place on."""

    part: str
    """`signatures`, `newton`, `calibration`, `das` or `test`."""
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
    """Shards of the bank: keys and values of pairs in different ones are apart."""

    @property
    def responses(self) -> float:
        """(pair, variant) responses in all."""
        return self.pairs * self.variants * self.times


Chances = dict[Place, float]


@dataclass(frozen=True)
class Coupled:
    """Couplings over sites of some places: how many, and how likely they are made for a variable."""

    places: tuple[Place, ...]
    sites: int
    couplings: int
    chance: Mapping[str, float]


class Setting(Protocol):
    """What is known of a study before anything runs; `planner.Scene` is one."""

    @property
    def shape(self) -> Shape: ...
    @property
    def subject(self) -> Subject: ...
    @property
    def fit(self) -> BankRecording: ...
    @property
    def calibration(self) -> BankRecording: ...
    @property
    def outputs(self) -> int: ...
    def classes(self, recording: BankRecording, places: Sequence[Place]) -> int:
        """Pairs that edits at some places can tell apart: each of them runs once."""

    def through(self, place: Place) -> float:
        """Block-tokens of one response resumed at a place."""


@dataclass
class Forecast:
    """What has been counted so far, and what the stages to come will find."""

    scene: Setting
    chosen: Mapping[str, Sequence[Place]] | None = None
    """Where each variable will be after Stage A, if known."""
    epochs: int | None = None
    """Epochs that learners will train, if known; else the most they may, in the lowest case the fewest."""
    case: str = "expected"
    """One of `CASES`."""
    stage: int = -1
    passes: list[Passes] = field(default_factory=list)
    sites: float = 0.0
    variants: float = 0.0
    rotations: float = 0.0
    not_counted: list[str] = field(default_factory=list)
    """Stages that do not tell what they compute, by name."""
    open: dict[str, Chances] = field(default_factory=dict)
    """The chance that each place is open to a variable."""
    families: list[Coupled] = field(default_factory=list)
    """Couplings that the last localization left."""

    def __post_init__(self) -> None:
        places = self.scene.shape.places
        self.open = self.open or {v: dict.fromkeys(places, 1.0) for v in self.variables}

    @property
    def variables(self) -> tuple[str, ...]:
        """The variables that are looked for."""
        return self.scene.fit.bank.variables

    @property
    def apart(self) -> bool:
        """Whether variables are taken to be in different places, where they share nothing."""
        narrowed = any(len(own) < len(self.scene.shape.places) for own in self.open.values())
        return self.case == "highest" and self.chosen is None and narrowed

    # -- walking -------------------------------------------------------------------------------------------

    def walk(self, stages: Sequence[Any]) -> None:
        """Let stages tell what they compute, one after the other."""
        for stage in stages:
            self.stage += 1
            tell = getattr(stage, "forecast", None)
            if tell is None:
                self.not_counted.append(type(stage).__name__)
            else:
                tell(self)

    # -- what stages add -----------------------------------------------------------------------------------

    def add(self, part: str, place: Place, bank: BankRecording, variants: int, times: float, **more: float) -> None:
        """Add the responses of a bank's pairs under so many variants at a place, so many times (or with a chance).

        `more` are other fields of `Passes`; `sent` is per time.
        """
        if not times or not variants:
            return
        pairs = self.scene.classes(bank, [place])
        sent = more.pop("sent", 8.0 * variants) * times
        cut = self.shards(bank)
        here = Passes(part, self.stage, place, pairs, variants, times, sent=sent, units=times * cut, shards=cut)
        self.passes.append(replace(here, **more))  # type: ignore[arg-type]

    def train(self, place: Place, count: float, epochs: int, batch: int, *, together: int = 1, rank: int = 0) -> None:
        """Add the descent of so many jobs (each with its own loss) at a place over the fit bank, forward and backward.

        `together` is how many jobs are one batch of variants, `rank` the directions of a frame that is trained.
        """
        fit = self.scene.fit
        if not count:
            return
        steps, cut = ceil(len(fit) / batch), self.shards(fit)
        each = -(-self.scene.classes(fit, [place]) // steps)
        times, sent = count * epochs * steps / together, 4.0 * place.width * max(1, rank) * count
        self.passes.append(
            Passes("das", self.stage, place, each, together, times, 1, rank, sent, count / together, cut)
        )

    def jobs_at_once(self, batch: int) -> int:
        """Jobs that the engine trains as one batch of variants: one in a large network, many in a small one."""
        return jobs_at_once(self.scene.subject, min(batch, len(self.scene.fit)))

    def epochs_of(self, least: int, most: int) -> int:
        """Epochs that a learner trains, which may stop after `least` and must after `most`."""
        guess = least if self.case == "lowest" else most
        return min(guess if self.epochs is None else self.epochs, most)

    # -- where things may be -------------------------------------------------------------------------------

    def shards(self, bank: BankRecording) -> int:
        """How many pieces a bank's pairs are cut into."""
        return ceil(len(bank.base_rows.unique()) / inputs_per_shard(self.scene.subject))

    def either(self) -> Chances:
        """The chance that a place is open to some variable, if variables keep apart as far as they can; in the lowest
        case all are in the same places."""
        if self.apart:
            apart = self.by_price(self.scene.shape.places)[: sum(map(len, self.open.values()))]
            return {p: 1.0 for p in self.scene.shape.places if p in apart}
        chances = {p: sum(own.get(p, 0.0) for own in self.open.values()) for p in self.scene.shape.places}
        return {p: min(1.0, chance) for p, chance in chances.items() if chance}

    def by_price(self, places: Iterable[Place]) -> list[Place]:
        """Places, cheapest first, in the highest case dearest first: by the block-tokens that a resumed bank runs."""

        def price(p: Place) -> float:
            return self.scene.through(p) * self.scene.classes(self.scene.fit, [p])

        return sorted(places, key=price, reverse=self.case == "highest")

    def some(self, own: Chances, number: float, *, late: bool = False) -> Chances:
        """So many of these places: any of them, the cheapest or the dearest; with `late`, later ones are likelier."""
        if number >= len(own):
            return dict(own)
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
