"""What a run says in sentences: a verdict per variable over all seeds, and the caveats."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean

from plot_ot.files.run_reading import Reading, numbers
from plot_ot.files.writing import Json
from plot_ot.judging.gates import COMPACT_LOSS, KEEPS
from plot_ot.judging.status import Status
from plot_ot.methods import MethodKind
from plot_ot.report.tables import CONTROLS, methods_in

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
FEW_PAIRS = 50
"""Fewer calibration pairs that change a variable than this make a noisy choice."""

GAUGES = {
    "handle": "handle",
    "full_patch": "full patch",
    "copy_source": "copy-source",
    "random_mean": "random handles",
    "invariance": "invariance",
}
"""The evidence that is drawn, and what it is called."""


@dataclass(frozen=True)
class Gauge:
    """One number of the evidence over seeds, on a scale from 0 to 1."""

    name: str
    label: str
    mean: float
    values: tuple[float, ...]
    interval: tuple[float, float] | None
    """The 95 % interval, for a single seed."""

    @property
    def spread(self) -> str:
        """The interval of one seed, or the range over several."""
        if self.interval:
            return f"[{self.interval[0]:.3f}, {self.interval[1]:.3f}]"
        low, high = min(self.values), max(self.values)
        return f"{low:.3f} to {high:.3f}" if len(self.values) > 1 and low != high else ""


@dataclass(frozen=True)
class Card:
    """What one method says about one variable."""

    method: str
    variable: str
    status: Status
    """The most frequent verdict; of equally frequent ones, the more cautious."""
    tally: tuple[tuple[Status, int], ...]
    sentence: str
    gauges: tuple[Gauge, ...]
    said: tuple[tuple[int, str], ...]
    """The verdict of each seed in the study's own words."""


def kind_of(reading: Reading, method: str) -> MethodKind:
    """A method's kind, as it is stored with the method's seconds."""
    if method in CONTROLS:
        return MethodKind.CONTROL
    known = [r["kind"] for r in reading.rows("runtimes", method=method) if r.get("kind")]
    return MethodKind(known[0]) if known else MethodKind.TRANSPORT


def calibrated(reading: Reading, method: str) -> float | None:
    """The mean calibration score of a method's handles."""
    scores = numbers([s["chosen"].get("calibration_score") for s in reading.rows("selection", method=method)])
    return fmean(scores) if scores else None


def best_method(reading: Reading) -> str | None:
    """The method that did best on calibration, of those judged that fit a coupling; never chosen on test pairs."""
    judged = list(dict.fromkeys(v["method"] for v in reading.results["verdicts"]))
    coupled = {c["method"] for c in reading.couplings}
    judged = [m for m in judged if m in coupled] or judged
    methods = judged or [m for m in methods_in(reading.results) if m not in CONTROLS]
    scored = [(calibrated(reading, m), m) for m in methods]
    known = [(round(score, 9), m) for score, m in scored if score is not None]
    if not known:
        return methods[0] if methods else None
    top = max(score for score, _ in known)
    return next(str(m) for score, m in known if score == top)


def cards(reading: Reading, method: str) -> list[Card]:
    """A method's verdicts, one card per variable."""
    return [
        card(method, v, [x for x in reading.rows("verdicts", method=method) if x["variable"] == v])
        for v in dict.fromkeys(x["variable"] for x in reading.rows("verdicts", method=method))
    ]


def card(method: str, variable: str, verdicts: Sequence[Json]) -> Card:
    """The verdicts of all seeds on one variable, put together."""
    tally = Counter(Status(v["status"]) for v in verdicts)
    ordered = sorted(tally.items(), key=lambda x: (-x[1], -STATUSES.index(x[0])))
    gauges = tuple(g for g in (_gauge(name, verdicts) for name in GAUGES) if g)
    said = tuple((v["seed"], v["sentence"]) for v in verdicts)
    if len(verdicts) == 1:
        sentence = verdicts[0]["sentence"]
    else:
        shares = ", ".join(f"{status} in {n} of {len(verdicts)} seeds" for status, n in ordered)
        sentence = f"{variable}: {shares}{_extent(verdicts)}{_measured(gauges)}."
    return Card(method, variable, ordered[0][0], tuple(ordered), sentence, gauges, said)


def _gauge(name: str, verdicts: Sequence[Json]) -> Gauge | None:
    values = numbers([v["evidence"].get(name) for v in verdicts])
    if not values:
        return None
    evidence = verdicts[0]["evidence"]
    bounds = numbers([evidence.get(f"{name}_low"), evidence.get(f"{name}_high")]) if len(verdicts) == 1 else []
    interval = (bounds[0], bounds[1]) if len(bounds) == 2 else None
    return Gauge(name, GAUGES[name], fmean(values), tuple(values), interval)


def _extent(verdicts: Sequence[Json]) -> str:
    """How many dimensions the handles take, where the variable was placed."""
    placed = [v["evidence"] for v in verdicts if Status(v["status"]).found]
    sizes, widths = (numbers([e.get(k) for e in placed]) for k in ("size", "width"))
    if not sizes or not widths:
        return ""
    low, high, most = int(min(sizes)), int(max(sizes)), int(max(widths))
    return f", with {low if low == high else f'{low} to {high}'} of {most} dimensions"


def _measured(gauges: Iterable[Gauge]) -> str:
    shown = [f"{g.label} {g.mean:.3f}{f' ({g.spread})' if g.name == 'handle' and g.spread else ''}" for g in gauges]
    return f"; {', '.join(shown)}" if shown else ""


# -- caveats --------------------------------------------------------------------------------------------------


def warnings(reading: Reading, method: str | None) -> list[str]:
    """The caveats: everything about the run, and about one method's handles, that weakens what the numbers say."""
    found = [f"Seed {f['seed']} failed and is left out: {f['reason']}." for f in reading.results["failures"]]
    seeds = reading.distinct("seed", "records")
    if len(seeds) == 1:
        found.append("One seed only: nothing is known about the spread over networks.")
    return found + _calibration(reading) + _power(reading) + (_handles(reading, method) if method else [])


def _calibration(reading: Reading) -> list[str]:
    """Variables whose calibration rests on few pairs."""
    fewest: dict[str, int] = {}
    for note in reading.results["notes"]:
        known = note.get("calibration")
        sensitive = known.get("sensitive") if isinstance(known, dict) else None
        for v, n in (sensitive if isinstance(sensitive, dict) else {}).items():
            fewest[v] = min(int(n), fewest.get(v, int(n)))
    return [
        f"{v}: calibration has only {n} pairs that change it, so K, λ and the place are chosen with noise."
        for v, n in fewest.items()
        if n < FEW_PAIRS
    ]


def _power(reading: Reading) -> list[str]:
    """Variables whose banks hardly tell a handle from copying the source."""
    said = []
    for v in reading.distinct("variable", "records"):
        copied = [r["accuracy"] for r in reading.rows("records", method="copy-source", variable=v, bank="sensitivity")]
        output = any(x["status"] == Status.OUTPUT for x in reading.rows("verdicts", variable=v))
        if copied and fmean(copied) > 0.9 and not output:  # of an output variable it is right by definition
            said.append(
                f"{v}: copying the source's answer is right on {fmean(copied):.3f} of its sensitivity pairs, "
                f"so these banks hardly tell a handle from copying."
            )
    return said


def _handles(reading: Reading, method: str) -> list[str]:
    """A method's handles with weak invariance, or worse than the plain full patch at their own place."""
    weak: dict[str, list[Json]] = {}
    worse: dict[str, list[Json]] = {}
    verdicts = reading.rows("verdicts", method=method)
    for v in verdicts:
        e = v["evidence"]
        if numbers(e.get("invariance_low")) and e["invariance_low"] < KEEPS:
            weak.setdefault(v["variable"], []).append(v)
        if len(numbers([e.get("handle"), e.get("full_patch")])) == 2 and e["handle"] < e["full_patch"] - COMPACT_LOSS:
            worse.setdefault(v["variable"], []).append(v)
    seeds = len({v["seed"] for v in verdicts})

    def where(some: list[Json]) -> str:
        return "" if seeds == 1 else f" in {len(some)} of {seeds} seeds"

    said = [
        f"{v}: weak invariance{where(some)}: its lower bound is "
        f"{min(x['evidence']['invariance_low'] for x in some):.3f}, below {KEEPS}."
        for v, some in weak.items()
    ]
    for name, some in worse.items():
        seed, e = some[0]["seed"], some[0]["evidence"]
        said.append(
            f"{name}: the handle does worse than swapping the whole place{where(some)} "
            f"({e['handle']:.3f} against {e['full_patch']:.3f} in seed {seed})."
        )
    return said
