"""The way from coarse to fine that a method took to a variable's handle, as levels with masses (paper, Figure 1).

A level is one resolution: tokens, layers or other places, then coordinates or principal components inside the place.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from plot_ot.files.run_reading import Reading, numbers
from plot_ot.files.writing import Json
from plot_ot.report.flags import kinds_of
from plot_ot.report.words import percent, place_words

MOST_ITEMS = 400
"""More sites than this are gathered into neighbouring groups: a screen has no more rows."""
MOST_DIRECTIONS = 6
"""Directions of a rotated or closed-form handle that are drawn one by one."""

SITE = re.compile(r"(?P<place>.+?)(?:\.(?P<basis>[A-Za-z]\w*))?\[(?P<start>\d+)(?::(?P<end>\d+))?\]")

PLACES = {"layer": "layers", "block_output": "layers", "h": "states", "timestep": "timesteps"}
"""What several places with a common name are called."""


@dataclass(frozen=True)
class SiteName:
    """What a site's name says: its place and, for part of a place, which directions of which basis."""

    place: str
    start: int | None = None
    end: int | None = None
    basis: str = ""


def parse_site_name(site: str, places: Sequence[str] = ()) -> SiteName:
    """Take `layer1`, `layer1[3]`, `layer1[0:4]` or `h0.pc[0:2]` apart; the name of a place is that place."""
    found = None if site in places else SITE.fullmatch(site)
    if not found:
        return SiteName(site)
    start = int(found["start"])
    return SiteName(found["place"], start, int(found["end"] or start + 1), found["basis"] or "")


def sites_of(coupling: Json, places: Sequence[str] = ()) -> list[SiteName]:
    """Where every site of a coupling is: as recorded, or as its name says."""
    recorded, spans = coupling.get("places"), coupling.get("spans")
    if not (isinstance(recorded, list) and isinstance(spans, list) and len(recorded) == len(coupling["sites"])):
        return [parse_site_name(s, places) for s in coupling["sites"]]
    basis = str(coupling.get("frame") or "")
    return [
        SiteName(p) if s == p else SiteName(p, int(a), int(b), "" if basis == "identity" else basis)
        for s, p, (a, b) in zip(coupling["sites"], recorded, spans, strict=True)
    ]


def whole_tokens(coupling: Json) -> list[str]:
    """The tokens that are a coupling's sites, where they were swapped with all their states."""
    tokens = coupling.get("tokens")
    return tokens if isinstance(tokens, list) and len(tokens) == len(coupling["sites"]) else []


@dataclass(frozen=True)
class Item:
    """One site, or one group of sites, of a level."""

    name: str
    mass: float | None
    norm: float | None
    """The length of the item's raw effect signature, before normalisation."""
    score: float | None
    """The best calibration accuracy of everything that was tried in this item."""
    on: bool
    """Whether the handle, or the next level, is in this item."""


@dataclass(frozen=True)
class Level:
    """One resolution of the way to a handle."""

    title: str
    measure: str
    """What the bars show: `mass`; where no coupling was fitted, calibration `score`; or a handle's `directions`."""
    setting: str
    total: float | None
    """Mass of the whole row: what a share is a share of."""
    items: tuple[Item, ...]
    flags: tuple[str, ...] = field(default=())
    strips: tuple[Json, ...] = field(default=())
    """Of directions: what each reads and writes, neuron by neuron."""

    @property
    def why(self) -> str:
        """What was taken, and why: its mass, its calibration accuracy, or both."""
        return self._why_directions() if self.measure == "directions" else _why(self.items, self.measure, self.total)

    def _why_directions(self) -> str:
        drawn = f"The {len(self.strips)} longest. " if len(self.strips) < len(self.items) else ""
        cell = max((-(-s["width"] // max(1, len(s["reads"]))) for s in self.strips), default=1)
        by = "neuron by neuron" if cell == 1 else f"a bar for the strongest of every {cell} neurons"
        if any(s["writes"] for s in self.strips):
            return f"{drawn}Blue: what each direction reads; red: what it writes, {by}."
        return f"{drawn}What each direction reads and writes, {by}."

    def plain(self) -> Json:
        """The level as plain values for the page, its items as short lists."""
        items = [[i.name, i.mass, i.norm, i.score, int(i.on)] for i in self.items]
        return {**asdict(self), "items": items, "why": self.why}


def _why(items: Sequence[Item], measure: str, total: float | None) -> str:
    taken = [i for i in items if i.on]
    if not taken or len(items) < 2:
        return ""

    def called(i: Item) -> str:  # sites inside a place are labelled by their numbers
        return i.name[i.name.index("[") :] if "[" in i.name else place_words(i.name)

    scored = [i for i in items if i.score is not None]
    most = max(items, key=lambda i: i.mass or 0.0)

    def share(i: Item) -> str:
        return percent(i.mass / total) if i.mass is not None and total else "no"

    if len(taken) > 1:
        heaviest = sorted(items, key=lambda i: -(i.mass or 0.0))[: len(taken)]
        said = "the ones with most mass" if set(heaviest) == set(taken) else "as calibration chose them"
        return f"{len(taken)} of {len(items)} taken: {said}." if measure == "mass" else f"{len(taken)} taken."
    one = taken[0]
    best = len(scored) > 1 and one.score is not None and one.score >= max(i.score or 0.0 for i in scored) - 1e-9
    reached = percent(one.score) if one.score is not None else ""
    if measure == "score":
        return f"Taken: {called(one)}, best on calibration pairs ({reached})."
    if one is most or share(one) == share(most):
        return f"Taken: {called(one)}, with {share(one)} of the mass" + (
            f" and the best calibration accuracy ({reached})." if best else "."
        )
    over = f"although {called(most)} has more mass ({share(most)})"
    if best:
        return f"Taken: {called(one)}, best on calibration pairs ({reached}), {over}."
    return f"Taken: {called(one)}, as calibration chose it, {over}."


class Zoom:
    """The levels of every method's way to every variable."""

    def __init__(self, reading: Reading) -> None:
        self.reading = reading
        self.by_run: dict[tuple[int, str], list[Json]] = {}
        for c in reading.couplings:
            self.by_run.setdefault((c["seed"], c["method"]), []).append(c)
        self.position: dict[str, Any] = {}
        self.places: list[str] = []
        for note in reading.results["notes"]:
            places = note.get("places")
            for p in places if isinstance(places, list) else []:
                if not isinstance(p, dict) or not isinstance(p.get("name"), str):
                    continue
                self.position[p["name"]] = p.get("position_label") or p.get("position")
                self.places += [p["name"]] if p["name"] not in self.places else []

    def couplings(self, selection: Json) -> list[Json]:
        """The couplings a handle was chosen from, coarse first: of every stage the one that led to it."""
        seed, method, chosen = selection["seed"], selection["method"], selection["chosen"]
        own = self.by_run.get((seed, method), [])
        stages = sorted({c["stage"] for c in own if isinstance(c.get("stage"), int)})
        trail = [self._pick([c for c in own if c.get("stage") == n], selection) for n in stages or [None]]
        found = [c for c in trail if c]
        if found and len(stages) < 2 and self._inside_one_place(found[-1]):
            # older runs keep only the last stage's couplings; the first stage is the method `plot` by itself
            first = [c for c in self.by_run.get((seed, "plot"), []) if chosen.get("support") in c["sites"]]
            before = self._pick(first, selection)
            found = [before, *found] if before and before["method"] != method else found
        return found

    def _inside_one_place(self, coupling: Json) -> bool:
        sites = sites_of(coupling, self.places)
        return len({s.place for s in sites}) == 1 and any(s.start is not None for s in sites)

    def _pick(self, couplings: Sequence[Json], selection: Json) -> Json | None:
        """The coupling whose sites the handle takes; where none was calibrated, the one that puts most mass there."""
        chosen, v = selection["chosen"], selection["variable"]
        some = [c for c in couplings if v in c["variables"]]
        for c in some:
            same = all(c.get(k) == chosen.get(k) for k in ("epsilon", "beta"))
            if same and chosen.get("sites") and set(chosen["sites"]) <= set(c["sites"]):
                return c

        def share(c: Json) -> float:
            row = c["plan"][c["variables"].index(v)]
            inside = sum(x for x, here in zip(row, self._on(c, selection), strict=True) if here)
            return float(inside / (sum(row) or 1.0))

        return max((c for c in some if any(self._on(c, selection))), key=share, default=None)

    def _on(self, coupling: Json, selection: Json) -> list[bool]:
        """Whether each site leads to the handle: at one of its places or, of whole tokens, one of its tokens."""
        tokens = whole_tokens(coupling)
        if tokens:
            wanted = {str(self.position.get(p)) for p in selection["places"]}
            return [t in wanted for t in tokens]
        return [s.place in selection["places"] for s in sites_of(coupling, self.places)]

    def levels(self, selection: Json) -> list[Level]:
        """The levels of the whole way to one handle."""
        found: list[Level] = []
        for coupling in self.couplings(selection):
            if not selection["chosen"].get("sites") and self._inside_one_place(coupling):
                continue  # rotated and closed-form handles take none of its sites: they end in their directions
            found += self._levels_of(coupling, selection, any(v.title == "tokens" for v in found))
        scores = self._scores(selection)
        if len(scores) > 1 and not any(i.score is not None for v in found for i in v.items):
            items = [Item(p, None, None, s, p in selection["places"]) for p, s in scores.items()]
            found.insert(0, Level(_plural(scores), "score", "best calibration accuracy in each", None, tuple(items)))
        return found

    def _scores(self, selection: Json) -> dict[str, float]:
        """The best calibration accuracy of all that was tried inside each place."""
        key = {k: selection[k] for k in ("seed", "method", "variable")}
        scores = {str(r["place"]): float(r["score"]) for r in self.reading.rows("profile", **key)}
        by = selection["chosen"].get("by_support")
        known = by.items() if isinstance(by, dict) else ()
        return scores | {str(p): float(s) for p, s in known if p != "all" and p not in scores and numbers(s)}

    def _levels_of(self, coupling: Json, selection: Json, tokens_shown: bool) -> list[Level]:
        row = coupling["plan"][coupling["variables"].index(selection["variable"])]
        sites = sites_of(coupling, self.places)
        norms = coupling.get("raw_norms")
        norms = norms if isinstance(norms, list) and len(norms) == len(sites) else [None] * len(sites)
        taken = set(selection["chosen"].get("sites") or ())
        scores = self._scores(selection)
        own = coupling.get("calibration")
        own = own.get(selection["variable"]) if isinstance(own, dict) else None
        own = own if isinstance(own, list) and len(own) == len(sites) else [None] * len(sites)

        def level(title: str, items: Sequence[Item]) -> Level:
            flags = tuple(map(str, kinds_of(coupling)))
            return Level(title, "mass", transport_setting(coupling), float(sum(row)), tuple(_grouped(items)), flags)

        tokens = whole_tokens(coupling)
        if tokens:
            on = self._on(coupling, selection)
            best = self._token_scores(scores)
            items = [Item(t, float(row[k]), norms[k], best.get(t), on[k]) for k, t in enumerate(tokens)]
            return [level("tokens", items)]
        found = []
        whole = all(s.start is None for s in sites)
        kept = list(range(len(sites)))
        in_places = selection["places"]
        positions = [self.position.get(s.place) for s in sites]
        if 1 < len({str(p) for p in positions}) < len({s.place for s in sites}):  # else a token is a place
            marked = {str(self.position.get(p)) for p in in_places}
            sums = _sums([str(p) for p in positions], row)
            if not tokens_shown:
                best = self._token_scores(scores)
                items = [Item(_token(p), m, None, best.get(p), p in marked) for p, m in sums.items()]
                found.append(level("tokens", items))
            kept = [k for k in kept if str(positions[k]) in marked]  # the next level looks inside the taken tokens
        if not whole and len({sites[k].place for k in kept}) > 1:
            sums = _sums([sites[k].place for k in kept], [row[k] for k in kept])
            items = [Item(p, m, None, scores.get(p), p in in_places) for p, m in sums.items()]
            found.append(level(_plural(sums), items))
        inside = [k for k in kept if whole or sites[k].place in in_places]
        names = coupling["sites"]
        items = [
            Item(
                names[k],
                float(row[k]),
                norms[k],
                scores.get(names[k], own[k]),
                names[k] in taken if taken & set(names) else sites[k].place in in_places,
            )
            for k in inside
        ]
        found.append(level(self.title([sites[k] for k in inside]), items))
        return found

    def _token_scores(self, scores: Mapping[str, float]) -> dict[str, float]:
        """The best score of all places of each token."""
        best: dict[str, float] = {}
        for place, score in scores.items():
            token = str(self.position.get(place))
            best[token] = max(score, best.get(token, 0.0))
        return best

    def title(self, sites: Sequence[SiteName]) -> str:
        """The title of a level: what its sites are, in one word."""
        return _plural(s.place for s in sites) if all(s.start is None for s in sites) else _parts(sites)


def direction_level(edits: Sequence[Json]) -> list[Level]:
    """What a rotated or closed-form handle reads and writes, direction by direction; nothing for plain neurons."""
    strips = [strip for e in edits for strip in e.get("directions") or ()]
    if not strips:
        return []
    items = [Item(s["name"], s["length"], None, None, True) for s in strips]
    longest = sorted(strips, key=lambda s: -float(s["length"]))[:MOST_DIRECTIONS]
    drawn = [s for s in strips if s in longest]
    title = "direction" if len(strips) == 1 else "directions"
    return [Level(title, "directions", "", None, tuple(items), strips=tuple(drawn))]


def _token(position: str) -> str:
    """The name of a token position, counted from the start, or from the end when negative."""
    return "last token" if position == "-1" else f"token {position}" if position.lstrip("-").isdigit() else position


def _sums(names: Sequence[str], row: Sequence[float]) -> dict[str, float]:
    sums: dict[str, float] = {}
    for name, mass in zip(names, row, strict=True):
        sums[name] = sums.get(name, 0.0) + float(mass)
    return sums


def _grouped(items: Sequence[Item]) -> list[Item]:
    """Group neighbours into at most MOST_ITEMS items: masses are added, the strongest norm and score are kept."""
    step = -(-len(items) // MOST_ITEMS)
    if step == 1:
        return list(items)
    found = []
    for k in range(0, len(items), step):
        some = items[k : k + step]
        name = f"{some[0].name} to {some[-1].name}" if len(some) > 1 else some[0].name
        mass = sum(i.mass or 0.0 for i in some)
        norm = max((i.norm for i in some if i.norm is not None), default=None)
        score = max((i.score for i in some if i.score is not None), default=None)
        found.append(Item(name, mass, norm, score, any(i.on for i in some)))
    return found


def transport_setting(coupling: Json) -> str:
    """Say which transport problem the masses solve."""
    kind = str(coupling.get("kind") or "")
    scale = "" if coupling.get("scale") in (None, "none") else f" × {coupling['scale']} cost"
    said = [{"eot": "OT", "uot": "UOT", "uot-one-sided": "one-sided UOT"}.get(kind, kind)]
    for key, sign in (("epsilon", "ε"), ("beta", "β")):
        if numbers(coupling.get(key)):
            said.append(f"{sign} = {coupling[key]:g}{scale}")
    return ", ".join(s for s in said if s)


def _plural(places: Iterable[str]) -> str:
    """What places of one kind are called together: `layer1, layer2` are layers."""
    stems = {re.sub(r"[^A-Za-z]+$", "", p) for p in places}
    return PLACES.get(stems.pop(), "places") if len(stems) == 1 else "places"


def _parts(sites: Sequence[SiteName]) -> str:
    """The name of the sites inside a place."""
    if any(s.basis for s in sites):
        if not {s.basis for s in sites} & {"pc", "pca"}:
            return "spans"
        several = all((s.end or 0) - (s.start or 0) > 1 for s in sites)
        return "bands of components" if several and len({s.start for s in sites}) > 1 else "principal components"
    if any(s.start is None for s in sites):
        return "sites"
    return "neurons" if all(s.end == (s.start or 0) + 1 for s in sites) else "blocks of neurons"
