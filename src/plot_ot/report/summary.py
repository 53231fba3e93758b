"""What a reader should know of a run: which method to look at first, and the caveats."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from plot_ot.files.run_reading import Reading, numbers
from plot_ot.files.writing import Json
from plot_ot.judging.gates import COMPACT_LOSS, KEEPS
from plot_ot.judging.status import Status
from plot_ot.methods import MethodKind
from plot_ot.report.tables import CONTROLS, methods_in
from plot_ot.report.words import count, names, percent

FEW_PAIRS = 50
"""Fewer calibration pairs that change a variable than this make a noisy choice."""


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


def judged_methods(reading: Reading) -> list[str]:
    """The methods whose handles have a verdict."""
    return list(dict.fromkeys(str(v["method"]) for v in reading.results["verdicts"]))


def best_method(reading: Reading) -> str | None:
    """The method that did best on calibration, of those judged that fit a coupling; never chosen on test pairs."""
    judged = judged_methods(reading)
    coupled = {c["method"] for c in reading.couplings}
    judged = [m for m in judged if m in coupled] or judged
    methods = judged or [m for m in methods_in(reading.results) if m not in CONTROLS]
    scored = [(calibrated(reading, m), m) for m in methods]
    known = [(round(score, 9), m) for score, m in scored if score is not None]
    if not known:
        return methods[0] if methods else None
    top = max(score for score, _ in known)
    return next(str(m) for score, m in known if score == top)


def why_best(reading: Reading, best: str) -> str:
    """Why this method is shown, and which others did better on calibration: those that fit no coupling."""
    coupled = {c["method"] for c in reading.couplings}
    own = calibrated(reading, best)
    scored = {m: calibrated(reading, m) for m in judged_methods(reading) if m not in coupled}
    ahead = [m for m, score in scored.items() if own is not None and score is not None and score > own + 1e-9]
    among = " of the methods that fit a coupling" if best in coupled and scored else ""
    others = f"; {names(ahead)}, which {_fits(ahead)} none, did better still" if best in coupled and ahead else ""
    return f"{best} did best on calibration pairs{among}{others}."


def _fits(methods: Sequence[str]) -> str:
    return "fits" if len(methods) == 1 else "fit"


def is_study(reading: Reading) -> bool:
    """Whether it is a study over networks or seeds; `localize` looks at one network of the user's."""
    return "subject" not in reading.config


# -- caveats --------------------------------------------------------------------------------------------------


def warnings(reading: Reading, method: str | None) -> list[str]:
    """The caveats: everything about the run, and about one method's handles, that weakens what the numbers say."""
    found = [f"Seed {f['seed']} failed and is left out: {f['reason']}." for f in reading.results["failures"]]
    seeds = reading.distinct("seed", "records")
    if len(seeds) == 1 and is_study(reading):
        found.append("One seed only: nothing is known about the spread over networks.")
    of_variables = _calibration(reading) + _power(reading) + (_handles(reading, method) if method else [])
    return found + _unfiltered(reading) + _together(of_variables, reading.distinct("variable", "verdicts"))


def _together(said: Sequence[str], variables: Sequence[str]) -> list[str]:
    """What is said of several variables in the same words, said once."""
    whom: dict[str, list[str]] = {}
    for line in said:
        variable = next((v for v in variables if line.startswith(f"{v}: ")), "")
        whom.setdefault(line.removeprefix(f"{variable}: ") if variable else line, []).append(variable)
    return [f"{names(who)}: {what}" if any(who) else what for what, who in whom.items()]


def _unfiltered(reading: Reading) -> list[str]:
    """Inputs that the network gets wrong and that count all the same."""
    said = []
    for note in reading.results["notes"]:
        right, asked = note.get("right"), note.get("asked")
        if note.get("filter") == "none" and isinstance(right, int) and isinstance(asked, int) and 0 <= right < asked:
            said.append(
                f"No filter: {asked - right} of {asked} inputs, which the network answers unlike the hypothesis, count "
                f"as well; where it is wrong without an edit, a handle can hardly make it right."
            )
    return list(dict.fromkeys(said))


def _calibration(reading: Reading) -> list[str]:
    """Variables whose calibration rests on few pairs."""
    fewest: dict[str, int] = {}
    for note in reading.results["notes"]:
        known = note.get("calibration")
        sensitive = known.get("sensitive") if isinstance(known, dict) else None
        for v, n in (sensitive if isinstance(sensitive, dict) else {}).items():
            fewest[v] = min(int(n), fewest.get(v, int(n)))
    return [
        f"{v}: calibration has only {count(n, 'pair')} that change it, so the choice of place and size is noisy."
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
                f"{v}: copying the source's answer is right on {percent(fmean(copied))} of all test pairs that change "
                f"it, so accuracies over all pairs hardly tell a handle from copying."
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
        f"{v}: weak invariance{where(some)}: the lower bound is "
        f"{percent(min(x['evidence']['invariance_low'] for x in some))} of the pairs that keep the variable, below "
        f"{percent(KEEPS)}."
        for v, some in weak.items()
    ]
    for name, some in worse.items():
        seed, e = some[0]["seed"], some[0]["evidence"]
        first = "" if seeds == 1 else f" in seed {seed}"
        said.append(
            f"{name}: the handle does worse than swapping the whole place{where(some)} ({percent(e['handle'])} against "
            f"{percent(e['full_patch'])} of the pairs that can tell{first})."
        )
    noted = [f"{v['variable']}: {note}." for v in verdicts for note in v.get("notes") or () if isinstance(note, str)]
    return said + list(dict.fromkeys(noted))
