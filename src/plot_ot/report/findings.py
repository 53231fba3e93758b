"""What was found about each variable, in the words that the page and the terminal share.

A finding answers the question of a run for one variable and one method: where it is, how much of that place it takes,
on what share of which pairs the handle is right, and what trivial baselines score on the same pairs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median

from plot_ot.files.run_reading import Reading, numbers
from plot_ot.files.writing import Json
from plot_ot.judging.status import Status
from plot_ot.report.words import count, names, percent, place_words
from plot_ot.report.zoom import parse_site_name

STATUSES = (
    Status.COMPACT,
    Status.PLACED,
    Status.IN_PART,
    Status.OUTPUT,
    Status.UNDECIDED,
    Status.DECODABLE,
    Status.ABSENT,
)
"""All statuses, from the strongest claim to the plainest denial."""
LEADS = (Status.PLACED, Status.COMPACT, Status.IN_PART, Status.DECODABLE)
"""Statuses whose headline is a place; of the others no place is claimed."""


@dataclass(frozen=True)
class Share:
    """A share of pairs over seeds: its mean, and its 95 % interval (one seed) or its range (several)."""

    mean: float
    low: float
    high: float
    seeds: int
    certain: bool
    """Whether `low` and `high` are an interval or a range; otherwise nothing is known about the spread."""

    @property
    def spread(self) -> str:
        """The interval or the range, in words."""
        if not self.certain:
            return ""
        low, high = (percent(x).removesuffix(" %") for x in (self.low, self.high))
        return f"95 % interval {low} to {high}" if self.seeds == 1 else f"{low} to {high} over seeds"

    @property
    def bounds(self) -> str:
        """The interval or the range, in brackets."""
        low, high = (percent(x).removesuffix(" %") for x in (self.low, self.high))
        return f" [{low}–{high}]" if self.certain and low != high else ""


@dataclass(frozen=True)
class Finding:
    """What one method says about one variable over all seeds."""

    method: str
    variable: str
    meaning: str
    """What the variable stands for, in words; empty where nobody said it."""
    status: Status
    """The most frequent verdict; of equally frequent ones, the more cautious."""
    tally: tuple[tuple[Status, int], ...]
    where: str
    """The place and what the handle takes of it, or the most frequent one of several seeds."""
    elsewhere: str
    """Where the other seeds have it."""
    shares: dict[str, Share]
    """`handle`, `copy_source`, `random_mean`, `full_patch` on discriminating pairs; `invariance` on the others."""
    pairs: tuple[int, int] | None
    """The fewest and the most discriminating test pairs of a seed."""
    stretch: float | None
    """How far out edited states lie, natural ones being 1: the median over seeds."""
    reasons: tuple[str, ...]
    """Why it is not placed, as the gates of the first such seed say."""
    said: tuple[tuple[int, str], ...]
    """The verdict of each seed in full."""

    @property
    def seeds(self) -> int:
        """How many seeds were judged."""
        return len(self.said)

    @property
    def claims(self) -> bool:
        """Whether the headline names a place."""
        return self.status in LEADS

    @property
    def headline(self) -> str:
        """Where the variable is, in one line."""
        if self.claims:
            return self.where[:1].upper() + self.where[1:] or "Found"
        if self.status is Status.OUTPUT:
            return "An output variable"
        return "Not decided with these pairs" if self.status is Status.UNDECIDED else "Not found here"

    @property
    def reach(self) -> str:
        """What the handle does, and what trivial baselines do on the same pairs."""
        own = self.shares.get("handle")
        if own is None:
            return ""
        pairs = f"{self._pairs} test pairs that can tell" if self.pairs else "test pairs that can tell"
        others = [(label, self.shares.get(key)) for key, label in OTHERS.items()]
        beside = ", ".join(f"{label} {percent(x.mean)}" for label, x in others if x is not None)
        verb = "Right on" if self.claims else f"The best handle{f' ({self.where})' if self.where else ''} is right on"
        mean = " on average" if self.seeds > 1 else ""
        return f"{verb} {percent(own.mean)} of the {pairs}{mean}{own.bounds}; {beside}."

    @property
    def _pairs(self) -> str:
        low, high = self.pairs or (0, 0)
        return f"{low:,}" if low == high else f"{low:,} to {high:,}"

    @property
    def kept(self) -> str:
        """What happens to pairs that do not change the variable."""
        found = self.shares.get("invariance")
        said = "Where both inputs have the same value, the answer stays right on"
        return "" if found is None else f"{said} {percent(found.mean)} of the pairs."

    @property
    def natural(self) -> str:
        """How natural the edited states are."""
        if self.stretch is None or "handle" not in self.shares:
            return ""
        far = (
            "about where natural states do"
            if self.stretch < 1.5
            else f"{self.stretch:.2g} times as far out as natural states"
        )
        return f"Edited states lie {far} (stretch {self.stretch:.2f})."

    @property
    def agreement(self) -> str:
        """How many seeds agree, where there are several."""
        if self.seeds < 2:
            return ""
        return "; ".join(f"{status} in {n} of {self.seeds} seeds" for status, n in self.tally)

    @property
    def told(self) -> str:
        """The finding as a stranger would be told it, in plain sentences."""
        who = f"{self.variable} ({self.meaning})" if self.meaning else self.variable
        several = "" if self.seeds == 1 else f"In {self.tally[0][1]} of {self.seeds} seeds, "
        own, lead = self.shares.get("handle"), ""
        if self.status in (Status.PLACED, Status.COMPACT, Status.IN_PART):
            part = " in part" if self.status is Status.IN_PART else ""
            lead = f"the network keeps {who}{part} in {self.where}."
        elif self.status is Status.DECODABLE:
            lead = f"{who} can be read in {self.where}, but the network does not use it there."
        elif self.status is Status.ABSENT:
            lead = f"{who} was not found. The best candidate: {self.where}."
        elif self.status is Status.UNDECIDED:
            lead = f"these pairs cannot decide where {who} is. The best candidate: {self.where}."
        else:
            lead = f"{who} is an output variable. {self.reasons[0] if self.reasons else ''}".strip()
        said = [several + lead if several or lead.startswith(who) else lead[:1].upper() + lead[1:]]
        if own is not None:
            mean = "an average of " if self.seeds > 1 else ""
            said.append(
                f"Taking just that from another input changes the answer as predicted on {mean}{percent(own.mean)} of "
                f"the {self._pairs} test pairs that can tell{own.bounds}. On the same pairs, "
                + names(
                    [
                        f"{label} is right on {percent(self.shares[k].mean)}"
                        for k, label in TOLD.items()
                        if k in self.shares
                    ]
                )
                + "."
            )
        if self.kept:
            said.append(self.kept)
        if self.stretch is not None and self.stretch >= FAR and own is not None:
            said.append(self.natural)
        if self.reasons and self.status in (Status.ABSENT, Status.UNDECIDED, Status.DECODABLE):
            said.append(f"Why: {'; '.join(self.reasons).rstrip('.')}.")
        return " ".join(said)

    def plain(self) -> Json:
        """The finding as plain values."""
        return {
            "method": self.method,
            "variable": self.variable,
            "meaning": self.meaning,
            "status": str(self.status),
            "seeds": {str(status): n for status, n in self.tally},
            "where": self.where,
            "shares": {name: {"mean": s.mean, "low": s.low, "high": s.high} for name, s in self.shares.items()},
            "pairs": self.pairs,
            "stretch": self.stretch,
            "reasons": self.reasons,
            "told": self.told,
        }


FAR = 2.0
"""Edits that push states so many times as far out as natural ones are mentioned in a sentence."""
TOLD = {"copy_source": "copying that input's answer", "random_mean": "a random handle"}
OTHERS = {"copy_source": "copying the source's answer", "random_mean": "random handles"}
"""The trivial baselines that stand in every headline."""


def findings(reading: Reading, method: str) -> list[Finding]:
    """A method's findings, one per variable."""
    rows = reading.rows("verdicts", method=method)
    return [
        finding(reading, method, v, [x for x in rows if x["variable"] == v])
        for v in dict.fromkeys(x["variable"] for x in rows)
    ]


def finding(reading: Reading, method: str, variable: str, verdicts: Sequence[Json]) -> Finding:
    """The verdicts of all seeds on one variable, put together."""
    tally = Counter(Status(v["status"]) for v in verdicts)
    ordered = sorted(tally.items(), key=lambda x: (-x[1], -STATUSES.index(x[0])))
    status = ordered[0][0]
    there = [v["seed"] for v in verdicts if Status(v["status"]) is status]
    extents = _grouped([x for seed in there if (x := where_found(reading, seed, method, variable))])
    found = {name: share for name in SHARES if (share := _share(name, verdicts))}
    told = [int(n) for n in numbers([v["evidence"].get("discriminating") for v in verdicts])]
    return Finding(
        method,
        variable,
        meaning_of(reading, variable),
        status,
        tuple(ordered),
        _first_place(extents, len(there)),
        ", ".join(f"{place} in {n}" for place, n in extents[1:4]),
        found,
        (min(told), max(told)) if told else None,
        median_stretch(reading, method, variable),
        _reasons(verdicts, status),
        tuple((v["seed"], v["sentence"]) for v in verdicts),
    )


SHARES = ("handle", "full_patch", *OTHERS, "invariance")


def median_stretch(reading: Reading, method: str, variable: str) -> float | None:
    """The median over seeds of how far out a handle's edits push states; None where it was not measured."""
    rows = reading.rows("selection", method=method, variable=variable)
    known = [s["evidence"].get("stretch") for s in rows if isinstance(s.get("evidence"), dict)]
    return median(numbers(known)) if numbers(known) else None


def _share(name: str, verdicts: Sequence[Json]) -> Share | None:
    values = numbers([v["evidence"].get(name) for v in verdicts])
    if not values:
        return None
    evidence = verdicts[0]["evidence"]
    bounds = numbers([evidence.get(f"{name}_low"), evidence.get(f"{name}_high")]) if len(verdicts) == 1 else []
    low, high = bounds if len(bounds) == 2 else (min(values), max(values))
    return Share(fmean(values), low, high, len(values), len(bounds) == 2 or len(values) > 1)


def _first_place(extents: Sequence[tuple[str, int]], seeds: int) -> str:
    if not extents:
        return ""
    place, n = extents[0]
    return place if n == seeds else f"{place} (in {n} of {seeds} seeds)"


def _reasons(verdicts: Sequence[Json], status: Status) -> tuple[str, ...]:
    """Sentences of the gates that failed or, where none did, of those that cannot say."""
    mine = next(v for v in verdicts if Status(v["status"]) is status)
    gates, of = mine.get("gates"), f"seed {mine['seed']}: " if len(verdicts) > 1 else ""
    known = [g for g in gates if isinstance(g, dict) and "sentence" in g] if isinstance(gates, list) else []
    # where it is undecided what is open counts, beside what fails: a handle that is right too seldom may be one in part
    for answers in (("fails", "cannot say") if status is Status.UNDECIDED else ("fails",), ("cannot say",)):
        found = [f"{of}{g['sentence']}" for g in known if g.get("answer") in answers and g.get("name") != "compact"]
        if found:
            return tuple(x.replace("the discriminating pairs", "the pairs that can tell") for x in found)
    plain = str(mine["sentence"]).partition(" Note:")[0].removeprefix(f"{mine['variable']}: ")
    plain = plain.removeprefix("undecided with these pairs; ")  # the headline says it
    if plain.startswith("an output variable ("):
        plain = plain.removeprefix("an output variable (").replace(")", "", 1)
    return (of + plain if of else plain[:1].upper() + plain[1:],)


def meaning_of(reading: Reading, variable: str) -> str:
    """What a variable stands for, as the run has noted it: its meaning, or what it is computed from."""
    for note in reading.results["notes"]:
        known = note.get("variables")
        mine = known.get(variable) if isinstance(known, dict) else None
        if isinstance(mine, dict):
            parents = [str(p) for p in mine.get("parents") or ()]
            short = len(parents) <= 4
            computed = f"computed from {names(parents) if short else f'{len(parents)} inputs'}" if parents else ""
            return str(mine.get("meaning") or computed)
    return ""


def token_labels(reading: Reading) -> dict[str, str]:
    """The token of every place that is at one, where the run has places at several tokens."""
    found: dict[str, str] = {}
    for note in reading.results["notes"]:
        places = note.get("places")
        for p in places if isinstance(places, list) else []:
            if isinstance(p, dict) and isinstance(p.get("name"), str) and p.get("position_label"):
                found[p["name"]] = str(p["position_label"])
    return found


@dataclass(frozen=True)
class Extent:
    """What a handle takes of its places."""

    size: int
    unit: str
    """Neurons, directions or principal components, in the singular; empty for whole places."""
    where: str
    exactly: str = ""
    """Which neurons, where they are few."""

    def __str__(self) -> str:
        return self.exactly or _amount([self.size], self.unit, self.where)


def _amount(sizes: Sequence[int], unit: str, where: str) -> str:
    low, high = min(sizes), max(sizes)
    if not unit:
        return f"all of {where}"
    return f"{count(high, unit) if low == high else f'{low} to {high} {unit}s'} of {where}"


def _grouped(extents: Sequence[Extent]) -> list[tuple[str, int]]:
    """The places of several seeds in words, the most frequent first, each with the range of sizes and its seeds."""
    if len(extents) == 1:
        return [(str(extents[0]), 1)]
    by_place: dict[tuple[str, str], list[int]] = {}
    for x in extents:
        by_place.setdefault((x.unit, x.where), []).append(x.size)
    ordered = sorted(by_place.items(), key=lambda kv: -len(kv[1]))
    return [(_amount(sizes, unit, where), len(sizes)) for (unit, where), sizes in ordered]


def where_found(reading: Reading, seed: int, method: str, variable: str) -> Extent | None:
    """A handle's place and what it takes there: `5 neurons of layer 1`, `3 directions of block 2, last token`."""
    rows = reading.rows("selection", seed=seed, method=method, variable=variable)
    return extent(rows[0], token_labels(reading), widths_of(reading)) if rows else None


def widths_of(reading: Reading) -> dict[str, int]:
    """The width of every place that the run has noted."""
    notes = [n.get("places") for n in reading.results["notes"]]
    known = [p for some in notes if isinstance(some, list) for p in some if isinstance(p, dict)]
    return {p["name"]: p["width"] for p in known if isinstance(p.get("name"), str) and numbers(p.get("width"))}


def extent(selection: Json, tokens: dict[str, str], widths: dict[str, int]) -> Extent:
    """What a handle takes of its places."""
    places, size, chosen = [str(p) for p in selection["places"]], int(selection["size"]), selection["chosen"]
    where = names([place_words(p, tokens) for p in places])
    total = sum(widths.get(p, 0) for p in places)
    sites = [parse_site_name(str(s), places) for s in chosen.get("sites") or ()]
    bases = {s.basis for s in sites if s.start is not None}
    if total and size == total and not bases - {""} and not chosen.get("form"):
        return Extent(size, "", where)
    if bases == {""}:
        single = sorted(s.start for s in sites if s.start is not None)
        few = len(places) == 1 and len(single) == size <= 3
        exactly = f"neuron{'' if size == 1 else 's'} {names([str(k) for k in single])} of {where}" if few else ""
        return Extent(size, "neuron", where, exactly)
    if bases and all(b.startswith(("pc", "band")) for b in bases):
        return Extent(size, "principal component", where)
    return Extent(size, "direction", where)
