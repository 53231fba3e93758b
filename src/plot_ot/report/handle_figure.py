"""The heatmaps of one seed's handles, each in the basis it was chosen in (paper, Sections 4.1 and 4.2).

Up to two variables stand side by side, with a method's panels under each other and a table of the seed's numbers; more
variables are rows, with a column per method.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np
from matplotlib.figure import Figure

from plot_ot.files.run_reading import Reading
from plot_ot.handles import Edit, Handle
from plot_ot.report import style
from plot_ot.report.figure_data import column
from plot_ot.report.flags import kinds_of
from plot_ot.report.tables import mean_sd

SIDE_BY_SIDE = 2
"""At most this many variables are columns."""
DIRECTIONS = {"identity": "neuron", "pca": "principal component"}
"""What the directions of a frame are called; others by the frame's kind."""


@dataclass(frozen=True)
class Shown:
    """A method that is drawn, and as what: transport over a basis, DAS, or another kind of directions."""

    method: str
    group: str
    basis: str = ""


def draw_handles(data: Reading) -> Figure | None:
    """Handles of one seed over places x directions: the first seed that has most of the methods to show."""
    wanted = shown_methods(data)
    saved = {s: [w for w in wanted if data.handle_paths(s, w.method)] for s in data.seeds}
    seed = max(saved, key=lambda s: len(saved[s]), default=None)
    if seed is None or not saved[seed]:
        return None
    handles = {w: {v: Handle.load(p) for v, p in data.handle_paths(seed, w.method).items()} for w in saved[seed]}
    draw = _side_by_side if len(data.variables) <= SIDE_BY_SIDE else _by_variable
    figure, under = draw(data, seed, handles)
    missing = [g for g in ("PLOT", "DAS") if g not in {w.group for w in saved[seed]}]
    flags = _flags(data, seed, [w.method for w in handles if w.group == "PLOT"])
    style.caption(
        under, *_said(seed, handles, draw), flags, *(f"{g} is missing: this run has no handles of it." for g in missing)
    )
    return figure


def shown_methods(data: Reading) -> list[Shown]:
    """The first transport method of every basis, the first of other closed forms, the first and the last DAS method.

    Only DAS methods with the first one's kind of frame count; where variables stand side by side, only the first.
    """
    moved = {c["method"] for c in data.couplings if c.get("kind") != "cosine" and c.get("epsilon") is not None}
    found: dict[str, list[Shown]] = {"PLOT": [], "other": [], "DAS": []}
    for m in data.methods:
        chosen = [s["chosen"] for s in data.rows("selection", method=m)]
        if any("k" in c for c in chosen):
            found["DAS"].append(Shown(m, "DAS", _frame_kind(data, m)))
        elif m in moved and any("K" in c for c in chosen):
            basis = next((_basis(name) for c in chosen for name in c.get("sites") or ()), "")
            if basis not in [w.basis for w in found["PLOT"]]:
                found["PLOT"].append(Shown(m, "PLOT", basis))
        elif not found["other"] and _frame_kind(data, m) not in ("", "identity"):
            found["other"].append(Shown(m, "other"))
    das = [w for w in found["DAS"] if w.basis in (found["DAS"][0].basis, "")]
    return [*found["PLOT"], *found["other"], *das[:1], *(das[1:][-1:] if len(data.variables) > SIDE_BY_SIDE else ())]


def _frame_kind(data: Reading, method: str) -> str:
    """The kind of frame that a method's handles have, if it has saved any: of those that are not the identity."""
    for seed in data.seeds:
        kinds = [e.frame.kind for p in data.handle_paths(seed, method).values() for e in Handle.load(p).edits]
        if kinds:
            return next((k for k in kinds if k != "identity"), "identity")
    return ""


def _said(seed: int, handles: Mapping[Shown, Mapping[str, Handle]], draw: Callable[..., object]) -> list[str]:
    said = [f"Seed {seed}; test accuracies. Each panel is divided by its largest value."]
    if draw is _by_variable and any(w.group != "PLOT" for w in handles):
        said.append(
            "Transport handles: gain of each direction of their own basis. Others, in the network's own coordinates: "
            "norm of each neuron's row in the directions that are written along."
        )
    return said


def _flags(data: Reading, seed: int, methods: Sequence[str]) -> str:
    """What is doubtful about the methods' couplings."""
    own = [c for c in data.couplings if c["seed"] == seed and c["method"] in methods]
    said = "; ".join(dict.fromkeys(str(kind) for c in own for kind in kinds_of(c)))
    return f"Couplings flagged: {said}." if said else ""


# -- variables side by side -----------------------------------------------------------------------------------


def _side_by_side(
    data: Reading, seed: int, handles: Mapping[Shown, Mapping[str, Handle]]
) -> tuple[Figure, style.Drawing]:
    """Panels under each other, columns are variables; under them the seed's numbers."""
    places = places_in(data)
    panels = []
    for w, own in handles.items():
        if w.group == "PLOT":
            panels += _plot_panels(data, seed, w.method, own, places)
        elif w.group == "DAS":
            panels += _das_panels(w.method, own, places)
        else:
            panels.append(_written(w.method, own, places))
    upper = 0.3 + len(panels) * (min(0.17 * len(places), 1.5) + 0.32)
    head = ["method", *data.variables, "average", "seconds", "best setting"]
    lines = style.wrap_last(head, [_seed_line(data, seed, w.method, own) for w, own in handles.items()])
    lower = 0.5 + 0.16 * sum(style.height(line) for line in lines)
    figure = style.new_figure(style.PAGE, upper + lower)
    over, under = np.asarray(figure.subfigures(2, 1, height_ratios=(upper, lower)))
    style.heatmap_panels(over, panels, places, data.variables)
    style.ruled_table(under.add_subplot(), head, lines)
    return figure, under


def _plot_panels(
    data: Reading, seed: int, method: str, handles: Mapping[str, Handle], places: Sequence[str]
) -> list[style.Panel]:
    before = {v: _mass(data, seed, method, h, places) for v, h in handles.items()}
    settings = {v: _setting(h) for v, h in handles.items()}
    epsilons = {v: _epsilon(h) for v, h in handles.items()}
    name = _direction(handles)
    return [
        style.Panel(f"{method}\nbefore calibration", "", before, epsilons, "mass"),
        style.Panel(f"{method}\nafter calibration", name, _gains(handles, places), settings, "gain"),
    ]


def _das_panels(method: str, handles: Mapping[str, Handle], places: Sequence[str]) -> list[style.Panel]:
    norms = {v: _grid(h, places, _row_norms) for v, h in handles.items()}
    marked = {v: _grid(h, places, lambda e: (e.gains != 0).double().numpy()) for v, h in handles.items()}
    sizes = {v: f"{_setting(h)}: swapped coordinates" for v, h in handles.items()}
    return [
        style.Panel(f"{method}\ncanonical basis", "neuron", norms, dict.fromkeys(handles, ""), "row norm"),
        style.Panel(f"{method}\nrotated basis", "rotated coordinate", marked, sizes),
    ]


def _seed_line(data: Reading, seed: int, method: str, handles: Mapping[str, Handle]) -> list[str]:
    """A method's row of the single-seed table; one line of settings per variable."""
    own = data.rows("records", seed=seed, method=method)
    scores = [column([r for r in own if r["variable"] == v], "accuracy") for v in handles]
    seconds = column(data.rows("runtimes", seed=seed, method=method), "seconds")
    chosen = {v: ", ".join(x for x in (_epsilon(h), _setting(h)) if x) for v, h in handles.items()}
    settings = [f"{v}: {chosen[v]} in {', '.join(h.places)}" for v, h in handles.items()]
    cells = [mean_sd([fmean(x)] if x else []) for x in [*scores, column(own, "accuracy")]]
    return [method, *cells, mean_sd(seconds, 2), "\n".join(settings)]


# -- variables as rows ----------------------------------------------------------------------------------------


def _by_variable(
    data: Reading, seed: int, handles: Mapping[Shown, Mapping[str, Handle]]
) -> tuple[Figure, style.Drawing]:
    """A column per method, rows are variables; every cell says its setting and its test accuracy."""
    places = places_in(data)
    panels = []
    for w, own in handles.items():
        settings = {v: _setting(h) for v, h in own.items()}
        scores = {v: column(data.rows("records", seed=seed, method=w.method, variable=v), "accuracy") for v in own}
        accuracy = {v: f"{fmean(x):.3f}" if x else "" for v, x in scores.items()}
        if w.group == "PLOT":
            grids = _gains(own, places)
            panels.append(style.Panel(w.method, _direction(own), grids, settings, corner=accuracy))
        else:
            panels.append(_written(w.method, own, places, settings, accuracy))
    tall = min(0.15 * len(places), max(0.45, 5 / len(data.variables)))
    figure = style.new_figure(style.PAGE, 0.75 + len(data.variables) * (tall + 0.24))
    style.heatmap_rows(figure, panels, places, data.variables, tall)
    return figure, figure


def _written(
    method: str,
    handles: Mapping[str, Handle],
    places: Sequence[str],
    remarks: Mapping[str, str] | None = None,
    corner: Mapping[str, str] | None = None,
) -> style.Panel:
    """What a handle writes to each neuron."""
    grids = {v: _grid(h, places, _row_norms) for v, h in handles.items()}
    settings = remarks or {v: _setting(h) for v, h in handles.items()}
    return style.Panel(method, "neuron", grids, settings, corner=corner or {})


# -- handles as grids -----------------------------------------------------------------------------------------


def places_in(data: Reading) -> list[str]:
    """Every place that the couplings and searches looked at, in forward order."""
    known = _known_places(data)
    sites = [_site(name, known)[0] for c in data.couplings for name in c["sites"]]
    return list(dict.fromkeys([*sites, *known]))


def _known_places(data: Reading) -> list[str]:
    """The places that handles edit and that searches name."""
    chosen = data.results["selection"]
    searched = [p for s in chosen for p in s["chosen"].get("by_support", ()) if p != "all"]
    return list(dict.fromkeys([*searched, *(p for s in chosen for p in s["places"])]))


def _site(name: str, places: Sequence[str]) -> tuple[str, slice]:
    """`layer1[3]`, `layer1[0:4]`, `layer1.pc[0:4]` or `layer1` as a place and its directions."""
    found = re.fullmatch(r"(.+)\[(\d+)(?::(\d+))?\]", name)
    if not found:
        return name, slice(None)
    place = found[1].rpartition(".")[0] if _basis(name) and found[1] not in places else found[1]
    return place, slice(int(found[2]), int(found[3] or int(found[2]) + 1))


def _basis(name: str) -> str:
    """`pc` of `layer1.pc[0:4]`; empty for coordinates."""
    found = re.fullmatch(r".+\.([A-Za-z]\w*)\[[\d:]+\]", name)
    return found[1] if found else ""


def _grid(
    handle: Handle, places: Sequence[str], value: Callable[[Edit], np.ndarray], beyond: float = 0.0
) -> np.ndarray:
    """What the handle does at every place; zero where it does nothing, `beyond` where its frame has no direction."""
    grid = np.zeros((len(places), max((e.place.width for e in handle.edits), default=1)))
    for e in handle.edits:
        shown = value(e)
        grid[places.index(e.place.name)] = beyond
        grid[places.index(e.place.name), : len(shown)] = shown
    return grid


def _gains(handles: Mapping[str, Handle], places: Sequence[str]) -> dict[str, np.ndarray]:
    return {v: _grid(h, places, lambda e: e.gains.double().abs().numpy(), np.nan) for v, h in handles.items()}


def _mass(data: Reading, seed: int, method: str, handle: Handle, places: Sequence[str]) -> np.ndarray:
    """The handle's row of the coupling it was made from; overlapping sites add up; blank where there is no site."""
    grid = _grid(handle, places, lambda e: np.zeros(0)) * np.nan
    keys = {"seed": seed, "method": method, **{k: handle.chosen.get(k) for k in ("epsilon", "beta")}}
    sites, known = set(handle.chosen.get("sites") or ()), _known_places(data)
    for c in data.couplings:
        mine = all(c.get(k) == value for k, value in keys.items()) and sites <= set(c["sites"])
        if mine and handle.variable in c["variables"]:
            for name, mass in zip(c["sites"], c["plan"][c["variables"].index(handle.variable)], strict=True):
                place, at = _site(name, known)
                grid[places.index(place), at] = np.nan_to_num(grid[places.index(place), at]) + mass
    return grid


def _direction(handles: Mapping[str, Handle]) -> str:
    """What the directions of the handles' frames are called."""
    kind = next(e.frame.kind for h in handles.values() for e in h.edits)
    return DIRECTIONS.get(kind, f"{kind} direction")


def _row_norms(e: Edit) -> np.ndarray:
    """How much is written to each neuron: the norm of its row in the directions, times their gains."""
    directions = e.frame.read if e.frame.write is None else e.frame.write
    basis = np.eye(e.place.width) if directions is None else directions.double().numpy()
    lengths: np.ndarray = np.linalg.norm(basis * e.gains.double().numpy(), axis=1)
    return lengths


def _setting(handle: Handle) -> str:
    """K and λ, or k, as chosen on calibration; else how many directions, and λ if there is one."""
    c = handle.chosen
    if "k" in c:
        return f"k = {c['k']}"
    strength = f", λ = {c['strength']:g}" if c.get("strength") is not None else ""
    return f"K = {c['K']}{strength}" if c.get("K") else f"{handle.size} of {_widths(handle)}{strength}"


def _widths(handle: Handle) -> int:
    return sum(e.place.width for e in handle.edits)


def _epsilon(handle: Handle) -> str:
    return f"ε = {handle.chosen['epsilon']:g}" if handle.chosen.get("epsilon") is not None else ""
