"""The numbers behind the page's charts, as one JSON value of bounded size.

What is counted (accuracies, seconds, scores) is taken from results.json as it is; masses and gains are rounded to six
digits. Where a run has more couplings, handles or examples than fit, whole seeds are left out and the page says so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import fmean, pstdev
from typing import Any

from plot_ot.errors import PlotError
from plot_ot.files.run_reading import UNEXPECTED, Reading, numbers
from plot_ot.files.writing import Json, to_json
from plot_ot.handles import Edit, Handle
from plot_ot.judging.profile import Profile
from plot_ot.report.findings import extent, finding, meaning_of, token_labels, widths_of
from plot_ot.report.flags import flags_of, kinds_of
from plot_ot.report.published import published
from plot_ot.report.summary import best_method, calibrated, kind_of
from plot_ot.report.tables import average_by_seed, banks_in, methods_in
from plot_ot.report.zoom import SiteName, Zoom, direction_level, sites_of, transport_setting

ROOM = 6_000_000
"""Characters of JSON that the page may carry; packed, and with the chart library, it stays below 6 MB."""
MOST_SITES = 4096
CHARTED = ("seeds", "variables", "methods", "banks", "scatter", "naturalness", "sweeps", "menus", "left_out")
"""Lists that charts read, which must be there even if they are empty."""
STRIP = 64
"""Cells of the strip that shows what a direction reads or writes."""
CELLS = 256
"""The widest row a heatmap shows; wider ones keep the largest value of neighbouring cells."""


def payload(reading: Reading) -> Json:
    """Everything the page's charts show."""
    seeds = sorted(reading.distinct("seed", "records", "selection"))
    zoom, menus = Zoom(reading), Menus()

    def way(s: Json) -> Json:
        levels = zoom.levels(s) + ([] if s["chosen"].get("sites") else direction_level(_edits(reading, s)))
        return {"levels": [_rounded(v.plain()) for v in levels], "handle": _handle(reading, s)}

    def stages(s: Json) -> Json:
        return {"stages": [_coupling(c, s, zoom, menus) for c in zoom.couplings(s)]}

    parts: dict[str, Callable[[int], Any]] = {
        "zoom": partial(_nested, reading, way),
        "examples": lambda seed: reading.rows("examples", seed=seed),
        "couplings": partial(_nested, reading, stages),
        "handles": partial(_nested, reading, lambda s: {"edits": _edits(reading, s)}),
        "surfaces": partial(_surfaces, reading),
        "profile": partial(_profile, reading),
        "capacity": partial(_capacity, reading),
    }
    fitted, left_out = _fit_into(ROOM, seeds, parts)
    raw = {k: v for k, v in reading.results.items() if k not in ("surfaces", "examples")}
    return {
        "name": reading.name,
        "task": reading.results.get("task"),
        "seeds": seeds,
        "variables": reading.distinct("variable", "records", "selection"),
        "methods": [method_summary(reading, m) for m in methods_in(reading.results)],
        "best": best_method(reading),
        "banks": [list(b) for b in banks_in(reading.results)],
        "scatter": _scatter(reading),
        "naturalness": _naturalness(reading),
        "sweeps": _sweeps(reading),
        "published": _published(reading),
        "meanings": {v: meaning_of(reading, v) for v in reading.distinct("variable", "records", "selection")},
        **fitted,
        "menus": menus.plain,
        "left_out": left_out,
        "results": raw,
    }


def _fit_into(room: int, seeds: Sequence[int], parts: Mapping[str, Callable[[int], Any]]) -> tuple[Json, list[str]]:
    """Keep the parts of every seed that fit into so many characters, and name those left out."""
    kept: Json = {part: {} for part in parts}
    left: dict[str, list[int]] = {}
    for part, make in parts.items():
        for seed in seeds:
            value = make(seed)
            size = len(to_json(value))
            if size > room:
                left.setdefault(part, []).append(seed)
            elif value:
                kept[part][str(seed)] = value
                room -= size
    return kept, [f"{part} of seeds {', '.join(map(str, some))}" for part, some in left.items()]


def _nested(reading: Reading, make: Callable[[Json], Json], seed: int) -> Json:
    """What `make` makes of each selection of a seed, by method and variable."""
    kept: Json = {}
    for s in reading.rows("selection", seed=seed):
        try:
            value = make(s)
        except UNEXPECTED as e:
            whose = f"{s['method']} on {s['variable']} in seed {seed}"
            said = f"Part of {whose} is not shown: the files hold something unexpected ({type(e).__name__}: {e})."
            reading.problems += [said] if said not in reading.problems else []
            continue
        if any(value.values()):
            kept.setdefault(s["method"], {})[s["variable"]] = value
    return kept


# -- counted over seeds ---------------------------------------------------------------------------------------


def _spread(values: Sequence[float]) -> Json:
    """The mean and the population standard deviation of some values."""
    return {"mean": fmean(values), "sd": pstdev(values)} if values else {"mean": None, "sd": None}


def method_summary(reading: Reading, method: str) -> Json:
    """A method over all seeds: accuracies, seconds by part, and what kind it is."""
    averages = average_by_seed(reading.results, method)
    patches = list(average_by_seed(reading.results, method, "full_patch").values())
    times = reading.rows("runtimes", method=method)
    names = dict.fromkeys(p for t in times for p in t["parts"])
    parts = {p: fmean(numbers([t["parts"].get(p, 0.0) for t in times])) for p in names}
    return {
        "name": method,
        "kind": kind_of(reading, method),
        "accuracy": {**_spread(list(averages.values())), "seeds": {str(s): x for s, x in averages.items()}},
        "full_patch": fmean(patches) if patches else None,
        "seconds": _spread([t["seconds"] for t in times]),
        "parts": {p: s for p, s in parts.items() if s},
        "calibration": calibrated(reading, method),
    }


def _scatter(reading: Reading) -> list[Json]:
    """Sensitivity and invariance of every handle and control."""
    kept: dict[tuple[int, str, str], Json] = {}
    for r in reading.results["records"]:
        key = (r["seed"], r["method"], r["variable"])
        kept.setdefault(key, dict(zip(("seed", "method", "variable"), key, strict=True)))[r["bank"]] = r["accuracy"]
    return [x for x in kept.values() if {"sensitivity", "invariance"} <= x.keys()]


def _naturalness(reading: Reading) -> list[Json]:
    """Every handle's size and stretch, with its accuracy averaged over test banks."""
    found = []
    for s in reading.results["selection"]:
        key = {k: s[k] for k in ("seed", "method", "variable")}
        tested = [r["accuracy"] for r in reading.rows("records", **key)]
        known = s.get("evidence")
        stretch = numbers(known.get("stretch")) if isinstance(known, dict) else []
        if tested:
            found.append(
                {**key, "size": s["size"], "accuracy": fmean(tested), "stretch": stretch[0] if stretch else None}
            )
    return found


def _capacity(reading: Reading, seed: int) -> Json:
    """Accuracy by the number of directions, and the same for shuffled values, by method and variable."""
    kept: Json = {}
    for s in reading.rows("selection", seed=seed):
        known = s.get("capacity")
        if not isinstance(known, dict):
            continue
        sizes, accuracy, shuffled = (numbers(known.get(k)) for k in ("sizes", "accuracy", "shuffled"))
        if len(sizes) > 1 and len(sizes) == len(accuracy):
            beside = shuffled if len(shuffled) == len(sizes) else None
            row = {"sizes": sizes, "accuracy": accuracy, "shuffled": beside, "taken": s["size"]}
            kept.setdefault(s["method"], {})[s["variable"]] = row
    return kept


def _sweeps(reading: Reading) -> list[Json]:
    """A method's accuracy as a parameter varies, over seeds, with what its couplings were flagged for."""
    rows = reading.results["sweeps"]
    found = []
    for parameter, method in dict.fromkeys((r["parameter"], r["method"]) for r in rows):
        points = []
        mine = [r for r in rows if (r["parameter"], r["method"]) == (parameter, method)]
        for value in sorted({r["value"] for r in mine}):
            at = [r for r in mine if r["value"] == value]
            flags = {kind.value for r in at for kind in kinds_of(r)}
            calibration = numbers([r.get("calibration") for r in at])
            points.append(
                {
                    "value": value,
                    **_spread([r["accuracy"] for r in at]),
                    "calibration": fmean(calibration) if calibration else None,
                    "flags": sorted(flags),
                }
            )
        found.append({"parameter": parameter, "method": method, "points": points})
    return found


def _published(reading: Reading) -> Json | None:
    paper = published(reading.config)
    if not paper:
        return None
    return {"setting": paper.setting, "machine": paper.machine, "points": [vars(p) for p in paper.points]}


# -- of one handle --------------------------------------------------------------------------------------------


def _handle(reading: Reading, selection: Json) -> Json:
    """What a handle is and does, for the end of the zoom: on the same pairs as its verdict, where it has one."""
    c = selection["chosen"]
    key = {k: selection[k] for k in ("seed", "method", "variable")}
    verdicts = reading.rows("verdicts", **key)
    judged = finding(reading, selection["method"], selection["variable"], verdicts) if verdicts else None
    shares = judged.shares if judged else {}
    tests = {r["bank"]: [r["accuracy"], *_bounds(r)] for r in reading.rows("records", **key)}
    return {
        "extent": str(extent(selection, token_labels(reading), widths_of(reading))),
        "places": selection["places"],
        "size": selection["size"],
        "setting": setting(c),
        "calibration": c.get("calibration_score"),
        "shares": {name: [s.mean, s.low, s.high] if s.certain else [s.mean] for name, s in shares.items()},
        "pairs": judged.pairs[0] if judged and judged.pairs else None,
        "tests": tests,
    }


def setting(chosen: Json) -> str:
    """What calibration chose, in one line."""
    said = []
    for key, sign in (("k", "k"), ("K", "K"), ("strength", "λ"), ("epsilon", "ε"), ("beta", "β")):
        if numbers(chosen.get(key)):
            said.append(f"{sign} = {chosen[key]:g}")
    form = str(chosen.get("form") or "")
    return ", ".join([*said, *([form if form.startswith("newton") else f"closed form: {form}"] if form else [])])


def _bounds(record: Json) -> list[float]:
    found = numbers(record.get("interval"))
    return found if len(found) == 2 else []


class Menus:
    """The distinct lists of sites, so that couplings over the same sites name them once."""

    def __init__(self) -> None:
        self.plain: list[Json] = []
        self._index: dict[tuple[str, ...], int] = {}

    def index(self, names: Sequence[str], sites: Sequence[SiteName]) -> int:
        """The number of a list of sites."""
        key = tuple(names)
        if key not in self._index:
            self._index[key] = len(self.plain)
            self.plain.append({"names": list(names), "at": [[s.place, s.start, s.end] for s in sites]})
        return self._index[key]


def _coupling(coupling: Json, selection: Json, zoom: Zoom, menus: Menus) -> Json:
    """A variable's row of a coupling before calibration and, where its top sites became the handle, after."""
    sites, names = sites_of(coupling, zoom.places), coupling["sites"]
    row = [float(x) for x in coupling["plan"][coupling["variables"].index(selection["variable"])]]
    norms = coupling.get("raw_norms")
    after = _weights(names, row, selection["chosen"])
    shown = list(range(len(names)))
    if len(names) > MOST_SITES:  # a menu over the whole network: what is inside the handle's places
        shown = [k for k, s in enumerate(sites) if s.place in selection["places"]][:MOST_SITES]
    drawn: Json = _rounded(
        {
            "title": zoom.title([sites[k] for k in shown]),
            "setting": transport_setting(coupling),
            "flags": [str(f) for f in flags_of(coupling)],
            "menu": menus.index([names[k] for k in shown], [sites[k] for k in shown]),
            "before": [row[k] for k in shown],
            "after": [after[k] for k in shown] if after else None,
            "norms": [norms[k] for k in shown] if isinstance(norms, list) and len(norms) == len(names) else None,
        }
    )
    return drawn


def _weights(names: Sequence[str], row: Sequence[float], chosen: Json) -> list[float] | None:
    """λ Π̃: the masses of the K chosen sites, renormalised and scaled, if calibration chose from this coupling."""
    top = [k for k, name in enumerate(names) if name in set(chosen.get("sites") or ())]
    if not top or not numbers(chosen.get("strength")):
        return None
    kept = sum(max(row[k], 1e-300) for k in top)
    return [chosen["strength"] * max(row[k], 1e-300) / kept if k in top else 0.0 for k in range(len(row))]


def _profile(reading: Reading, seed: int) -> Json:
    """The best calibration score inside every place that was tried, by method and variable."""
    kept: Json = {}
    rows = reading.rows("profile", seed=seed)
    for method, variable in dict.fromkeys((r["method"], r["variable"]) for r in rows):
        found = Profile.from_rows(variable, [r for r in rows if r["method"] == method])
        places = [
            [t.place, t.token, t.layer, t.score, t.low, t.high, t is found.best, t.place in found.as_good]
            for t in found.tried
        ]
        kept.setdefault(method, {})[variable] = {"said": found.sentence, "places": places}
    return kept


def _surfaces(reading: Reading, seed: int) -> Json:
    kept: Json = {}
    for s in reading.rows("surfaces", seed=seed):
        fields = ("support", "sizes", "strengths", "scores", "K", "strength")
        kept.setdefault(s["method"], {})[s["variable"]] = {k: s.get(k) for k in fields}
    return kept


def _edits(reading: Reading, selection: Json) -> list[Json]:
    """Gains in the handle's own basis, and how much each neuron takes part; nothing where its file is not there."""
    path = reading.handle_path(selection["seed"], selection["method"], selection["variable"])
    if not path.exists():
        return []
    try:
        handle = Handle.load(path)
    except PlotError as e:
        said = f"A handle is not shown: {e}"
        reading.problems += [said] if said not in reading.problems else []
        return []
    return [_rounded(_edit(e)) for e in handle.edits]


def _edit(e: Edit) -> Json:
    gains = e.gains.double()
    shown: Json = {"place": e.place.name, "width": e.place.width, "basis": e.frame.kind, "size": e.size}
    if e.frame.read is None:
        return {**shown, "native": _binned(gains.tolist()), "own": None}
    reads = (e.frame.read.double() * gains).norm(dim=1).tolist()
    writes = None if e.frame.write is None else _binned((e.frame.write.double() * gains).norm(dim=1).tolist())
    rows = {"native": _binned(reads), "writes": writes, "own": _binned(gains.tolist())}
    return {**shown, **rows, "directions": _directions(e)}


def _directions(e: Edit) -> list[Json]:
    """What each direction with a gain reads and writes, in the neurons' basis."""
    if e.frame.read is None:
        return []
    reads, gains = e.frame.read.double(), e.gains.double()
    writes = reads if e.frame.write is None else e.frame.write.double()
    found = []
    for k in gains.nonzero().flatten().tolist():
        read, write = reads[:, k], writes[:, k] * gains[k]
        length = float(read.norm() * write.norm())
        strip = {"name": f"direction {k + 1}", "place": e.place.name, "width": e.place.width, "length": length}
        oblique = None if e.frame.write is None else _binned(write.tolist(), STRIP)
        found.append({**strip, "reads": _binned((read if oblique else write).tolist(), STRIP), "writes": oblique})
    return found


def _binned(values: Sequence[float], most: int = CELLS) -> list[float]:
    step = -(-len(values) // most)
    return [max(values[k : k + step], key=abs) for k in range(0, len(values), step)]


def _rounded(value: Any) -> Any:
    """Round to six digits, which is more than a picture shows."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {k: _rounded(v) for k, v in value.items()}
    return [_rounded(v) for v in value] if isinstance(value, (list, tuple)) else value
