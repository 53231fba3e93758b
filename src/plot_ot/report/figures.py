"""The paper's figures, drawn from a run directory. Spread over seeds is the population standard deviation."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from plot_ot.errors import PlotError
from plot_ot.handles import Edit, Handle
from plot_ot.report import style
from plot_ot.report.tables import CONTROLS, average_by_seed, mean_sd
from plot_ot.runs import LISTS, Json, RunDirectory, read_json

PUBLISHED = {"heq": ("an Apple M1 Pro", {"plot": 4.4, "das": 131.0})}
"""Per task, the paper's machine and the seconds it reports."""


def draw_figures(run: RunDirectory) -> None:
    """Write all figures of the run to its `figures` directory, as PNG and PDF.

    A figure whose numbers are not in the run is left out.
    """
    data = RunData.read(run)
    with style.look():
        for draw in FIGURES:
            style.publish(draw(data), run.path / "figures" / draw.__name__.removeprefix("draw_"))


# -- what is in a run -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RunData:
    """A run's numbers (lists that are not there are empty), and what they are about, in their own order."""

    run: RunDirectory
    results: Json
    couplings: list[Json]
    methods: list[str]
    variables: list[str]
    seeds: list[int]

    @classmethod
    def read(cls, run: RunDirectory) -> RunData:
        """The compiled results and couplings of a run."""
        results = read_json(run.path / "results.json")
        if not isinstance(results, dict):
            raise PlotError(f"{run.path / 'results.json'} is damaged: run the same command again to compile it anew.")
        results |= {name: results.get(name) or [] for name in LISTS}
        couplings = run.couplings() if (run.path / "couplings.json").exists() else []
        methods, variables, seeds = (
            list(dict.fromkeys(s[field] for s in results["selection"])) for field in ("method", "variable", "seed")
        )
        return cls(run, results, couplings, methods, variables, sorted(seeds))

    def rows(self, name: str, **fields: object) -> list[Json]:
        """The entries of a list with the given values."""
        return [r for r in self.results[name] if all(r.get(k) == v for k, v in fields.items())]

    def handle_paths(self, seed: int, method: str) -> dict[str, Path]:
        """A method's handle files, by variable: for every variable, or none."""
        paths = {v: self.run.handle_path(seed, method, v) for v in self.variables}
        return paths if all(path.exists() for path in paths.values()) else {}

    def about(self, spread: str = " ± standard deviation") -> str:
        """How many seeds a figure is about, and what is shown of them."""
        failed = len({f["seed"] for f in self.results["failures"]})
        said = f"Mean{spread} over {len(self.seeds)} seeds" if len(self.seeds) > 1 else "One seed"
        return f"{said}{f' ({failed} failed and left out)' if failed else ''}."


def numbers(rows: Sequence[Mapping[str, Any]], field: str) -> list[float]:
    """A field's values; missing ones (null stands for NaN) are left out."""
    return [float(r[field]) for r in rows if r.get(field) is not None]


def mean_spread(values: Sequence[float]) -> tuple[float, float]:
    """Mean and standard deviation; without values the mean is NaN, which is not drawn."""
    return (fmean(values), pstdev(values)) if values else (float("nan"), 0.0)


# -- handles: the heatmaps of one seed ------------------------------------------------------------------------


def draw_handles(data: RunData) -> Figure | None:
    """Handles of one seed over places x neurons, before and after calibration and for DAS, with its numbers."""
    wanted = _shown_methods(data)
    saved = {s: [m for m in wanted.values() if m and data.handle_paths(s, m)] for s in data.seeds}
    seed = max(saved, key=lambda s: len(saved[s]), default=None)
    if seed is None or not saved[seed]:
        return None
    places = _places(data)
    handles = {m: {v: Handle.load(p) for v, p in data.handle_paths(seed, m).items()} for m in saved[seed]}
    panels = []
    for m, own in handles.items():
        panels += _das_panels(m, own, places) if m == wanted["DAS"] else _plot_panels(data, seed, m, own, places)
    upper = 0.3 + len(panels) * (min(0.17 * len(places), 1.5) + 0.32)
    head = ["method", *data.variables, "average", "seconds", "best setting"]
    lines = style.wrap_last(head, [_seed_line(data, seed, m, own) for m, own in handles.items()])
    lower = 0.5 + 0.16 * sum(style.height(line) for line in lines)
    figure = style.new_figure(style.PAGE, upper + lower)
    over, under = np.asarray(figure.subfigures(2, 1, height_ratios=(upper, lower)))
    style.heatmap_panels(over, panels, places, data.variables)
    style.ruled_table(under.add_subplot(), head, lines)
    missing = [f"{name} is missing: this run has no handles of it." for name, m in wanted.items() if m not in handles]
    said = f"Seed {seed}; test accuracies. Each panel is divided by its largest value."
    style.caption(under, said, _flags(data, seed, wanted["PLOT"]), *missing)
    return figure


def _flags(data: RunData, seed: int, method: str | None) -> str:
    """What is doubtful about a method's couplings."""
    flags = [f for c in data.couplings if (c["seed"], c["method"]) == (seed, method) for f in c.get("flags") or ()]
    said = "; ".join(dict.fromkeys(f.split(":")[0] for f in flags))
    return f"Couplings flagged: {said}." if said else ""


def _shown_methods(data: RunData) -> dict[str, str | None]:
    """The run's first method with an optimal-transport coupling, and its first DAS method."""
    moved = {c["method"] for c in data.couplings if c.get("kind") != "cosine" and c.get("epsilon") is not None}
    rotated = {s["method"] for s in data.results["selection"] if "k" in s["chosen"]}
    return {k: next((m for m in data.methods if m in some), None) for k, some in (("PLOT", moved), ("DAS", rotated))}


def _places(data: RunData) -> list[str]:
    """Every place that the couplings and searches looked at, in forward order."""
    sites = [_site(name)[0] for c in data.couplings for name in c["sites"]]
    chosen = data.results["selection"]
    searched = [p for s in chosen for p in s["chosen"].get("by_support", ()) if p != "all"]
    return list(dict.fromkeys([*sites, *searched, *(p for s in chosen for p in s["places"])]))


def _site(name: str) -> tuple[str, slice]:
    """`layer1[3]`, `layer1[0:4]` or `layer1` as a place and its coordinates."""
    found = re.fullmatch(r"(.+)\[(\d+)(?::(\d+))?\]", name)
    if not found:
        return name, slice(None)
    return found[1], slice(int(found[2]), int(found[3] or int(found[2]) + 1))


def _grid(handle: Handle, places: Sequence[str], value: Callable[[Edit], np.ndarray]) -> np.ndarray:
    """What the handle does at every place; zero where it does nothing."""
    grid = np.zeros((len(places), max((e.place.width for e in handle.edits), default=1)))
    for e in handle.edits:
        shown = value(e)
        grid[places.index(e.place.name), : len(shown)] = shown
    return grid


def _mass(data: RunData, seed: int, method: str, handle: Handle, places: Sequence[str]) -> np.ndarray:
    """The handle's row of the coupling it was made from; blank where there is no site."""
    grid = _grid(handle, places, lambda e: np.zeros(0)) * np.nan
    keys = {"seed": seed, "method": method, **{k: handle.chosen.get(k) for k in ("epsilon", "beta")}}
    for c in data.couplings:
        if all(c.get(k) == value for k, value in keys.items()) and handle.variable in c["variables"]:
            for name, mass in zip(c["sites"], c["plan"][c["variables"].index(handle.variable)], strict=True):
                place, at = _site(name)
                grid[places.index(place), at] = mass
    return grid


def _plot_panels(
    data: RunData, seed: int, method: str, handles: Mapping[str, Handle], places: Sequence[str]
) -> list[style.Panel]:
    before = {v: _mass(data, seed, method, h, places) for v, h in handles.items()}
    after = {v: _grid(h, places, lambda e: e.gains.double().abs().numpy()) for v, h in handles.items()}
    settings = {v: _setting(h) for v, h in handles.items()}
    epsilons = {v: _epsilon(h) for v, h in handles.items()}
    return [
        style.Panel(f"{method}\nbefore calibration", "", before, epsilons, "mass"),
        style.Panel(f"{method}\nafter calibration", "neuron", after, settings, "gain"),
    ]


def _das_panels(method: str, handles: Mapping[str, Handle], places: Sequence[str]) -> list[style.Panel]:
    norms = {v: _grid(h, places, _row_norms) for v, h in handles.items()}
    marked = {v: _grid(h, places, lambda e: (e.gains != 0).double().numpy()) for v, h in handles.items()}
    sizes = {v: f"{_setting(h)}: swapped coordinates" for v, h in handles.items()}
    return [
        style.Panel(f"{method}\ncanonical basis", "neuron", norms, dict.fromkeys(handles, ""), "row norm"),
        style.Panel(f"{method}\nrotated basis", "rotated coordinate", marked, sizes),
    ]


def _row_norms(e: Edit) -> np.ndarray:
    """How much each neuron contributes: the norm of its row in the swapped directions."""
    directions = np.eye(e.place.width) if e.frame.read is None else e.frame.read.double().numpy()
    return np.linalg.norm(directions * e.gains.double().numpy(), axis=1)


def _setting(handle: Handle) -> str:
    """K and λ, or k, as chosen on calibration."""
    c = handle.chosen
    return f"k = {c['k']}" if "k" in c else f"K = {c.get('K')}, λ = {c.get('strength')}"


def _seed_line(data: RunData, seed: int, method: str, handles: Mapping[str, Handle]) -> list[str]:
    """A method's row of the single-seed table; one line of settings per variable."""
    own = data.rows("records", seed=seed, method=method)
    scores = [numbers([r for r in own if r["variable"] == v], "accuracy") for v in handles]
    seconds = numbers(data.rows("runtimes", seed=seed, method=method), "seconds")
    chosen = {v: ", ".join(x for x in (_epsilon(h), _setting(h)) if x) for v, h in handles.items()}
    settings = [f"{v}: {chosen[v]} in {', '.join(h.places)}" for v, h in handles.items()]
    cells = [mean_sd([fmean(x)] if x else []) for x in [*scores, numbers(own, "accuracy")]]
    return [method, *cells, mean_sd(seconds, 2), "\n".join(settings)]


def _epsilon(handle: Handle) -> str:
    return f"ε = {handle.chosen['epsilon']:g}" if handle.chosen.get("epsilon") is not None else ""


# -- runtime --------------------------------------------------------------------------------------------------


def draw_runtime(data: RunData) -> Figure | None:
    """Seconds per method: by part on a linear axis, and in total beside the published ones on a logarithmic axis."""
    rows = {m: data.rows("runtimes", method=m) for m in data.methods}
    rows = {m: r for m, r in rows.items() if numbers(r, "seconds")}
    if not rows:
        return None
    totals = [mean_spread(numbers(r, "seconds")) for r in rows.values()]
    figure = style.new_figure(style.PAGE, 1.05 + 0.24 * len(rows))
    left, right = figure.subplots(1, 2, width_ratios=[1.5, 1])
    style.stack(left, _parts(rows, np.array(totals)[:, 0]))
    for y, (mean, spread) in enumerate(totals):
        style.whisker(left, y, mean, spread, f"{mean:.2f}" + (f" ± {spread:.2f}" if spread else ""))
    left.set_xlim(0, 1.25 * max(mean + spread for mean, spread in totals))
    left.set_xlabel("seconds, by part")
    right.plot([mean for mean, _ in totals], range(len(rows)), "o", color=style.BLUE, ms=4, label="this run")
    machine, published = PUBLISHED.get(str(data.results.get("task")), ("", {}))
    points = [(published[m], y) for y, m in enumerate(rows) if m in published]
    if points:
        right.plot(
            *np.array(points).T, "D", ms=4.5, mfc="white", mec=style.VERMILLION, label="published, other machine"
        )
    for seconds, y in points:
        style.note(right, seconds, y, f"{seconds:g}", (0, -8))
    style.log_scale(right)
    right.set_xlim(min(0.9, right.get_xlim()[0] / 1.5), right.get_xlim()[1] * 1.5)
    right.set_xlabel("seconds in total, logarithmic")
    for ax in (left, right):
        style.name_rows(ax, list(rows))
        style.legend_above(ax, 6)
    right.tick_params(axis="y", labelleft=False)
    said = f"Published: the paper's seconds on {machine}." if points else ""
    style.caption(figure, data.about(), "Each method is charged what it costs alone and cold.", said)
    return figure


def _parts(rows: Mapping[str, Sequence[Json]], totals: np.ndarray) -> dict[str, np.ndarray]:
    """Mean seconds of every part in every row; parts below 1 % of all rows are gathered into one."""
    split = {m: [x.get("parts") or {"total": x["seconds"]} for x in r] for m, r in rows.items()}
    names = list(dict.fromkeys(p for r in split.values() for x in r for p in x))
    means = {p: np.array([fmean(numbers(r, p) or [0.0]) for r in split.values()]) for p in names}
    small = [p for p in names if (means[p] < 0.01 * totals).all()]
    rest = [p for p in small if means[p].any()]
    shown = {p: means[p] for p in names if p not in small}
    return shown | ({" + ".join(rest): np.sum([means[p] for p in rest], axis=0)} if rest else {})


# -- the strength of the regularisation -----------------------------------------------------------------------


def draw_epsilon(data: RunData) -> Figure | None:
    """Accuracy against ε; hollow where a coupling saturates, crossed where one did not converge."""
    rows = [r for r in data.rows("sweeps", parameter="epsilon") if numbers([r], "value") and numbers([r], "accuracy")]
    values = sorted({float(r["value"]) for r in rows})
    if len(values) < 2:
        return None
    at = [[r for r in rows if float(r["value"]) == e] for e in values]
    mean, spread = np.array([mean_spread(numbers(r, "accuracy")) for r in at]).T
    calibration = np.array([mean_spread(numbers(r, "calibration"))[0] for r in at])
    marks = [style.mark([flag for r in some for flag in r.get("flags") or ()]) for some in at]
    figure = style.new_figure(style.COLUMN, 2.6)
    ax = figure.subplots()
    style.log_scale(ax)
    ax.plot(values, mean, color=style.BLUE, label="test accuracy")
    ax.plot(values, calibration, color=style.MUTED, lw=0.8, ls="--", label="calibration score")
    ax.fill_between(values, mean - spread, np.minimum(mean + spread, 1), color=style.BLUE, alpha=0.15, lw=0)
    for mark, look in style.MARKS.items():
        chosen = [k for k, m in enumerate(marks) if m == mark]
        if chosen:
            ax.plot([values[k] for k in chosen], mean[chosen], **look, label=mark)
    low = min(0.965, float(np.nanmin([mean - spread, calibration])) - 0.01)
    ax.set_ylim(low, 1 + 0.06 * (1 - low))
    ax.grid(axis="y")
    ax.set_xlabel(f"ε (cost scale: {next((c['scale'] for c in data.couplings if c.get('scale')), 'none')})")
    ax.set_ylabel("average exact accuracy")
    figure.legend(loc="outside upper left", ncols=2, columnspacing=1.2)
    style.caption(figure, data.about())
    return figure


# -- sizes, layers, accuracy ----------------------------------------------------------------------------------


def draw_sizes(data: RunData) -> Figure | None:
    """How many directions the handles touch, per method and variable."""
    if not data.methods:
        return None
    figure = style.new_figure(style.COLUMN, 0.9 + len(data.methods) * (0.04 + 0.13 * len(data.variables)))
    ax = figure.subplots()
    thick = 0.76 / len(data.variables)
    for k, v in enumerate(data.variables):
        sizes = [mean_spread(numbers(data.rows("selection", method=m, variable=v), "size")) for m in data.methods]
        rows = np.arange(len(data.methods)) + (k - (len(data.variables) - 1) / 2) * thick
        ax.barh(rows, [s for s, _ in sizes], 0.9 * thick, color=style.CYCLE[k % len(style.CYCLE)], label=v)
        for y, (mean, spread) in zip(rows, sizes, strict=True):
            style.whisker(ax, y, mean, spread, f"{mean:.1f}")
    style.name_rows(ax, data.methods)
    ax.set_xlim(0, 1.08 * ax.get_xlim()[1])
    ax.set_xlabel("directions with a nonzero gain")
    style.legend_above(ax)
    style.caption(figure, data.about())
    return figure


def draw_layers(data: RunData) -> Figure | None:
    """The best calibration score each method reached at each place; what was chosen most often is outlined."""
    chosen = [s for s in data.results["selection"] if set(s["chosen"].get("by_support") or ()) - {"all"}]
    methods = list(dict.fromkeys(s["method"] for s in chosen))
    supports = sorted(dict.fromkeys(p for s in chosen for p in s["chosen"]["by_support"]), key=lambda p: p == "all")
    if not methods:
        return None
    low = min([0.9, *(x for s in chosen for x in s["chosen"]["by_support"].values() if x is not None)])
    inches = (style.PAGE - 1.2) / len(data.variables)
    turned = style.crowded(supports, inches)
    below = style.LETTER * max(map(len, supports)) if turned else 0.0
    figure = style.new_figure(style.PAGE, 0.75 + 0.33 * len(methods) + below)
    axes = figure.subplots(1, len(data.variables), squeeze=False, sharey=True)[0]
    for ax, v in zip(axes, data.variables, strict=True):
        rows = [[s["chosen"] for s in chosen if (s["method"], s["variable"]) == (m, v)] for m in methods]
        scores = [[mean_spread(numbers([c["by_support"] for c in r], p)) for p in supports] for r in rows]
        taken = [Counter(c.get("support") for c in r) for r in rows]
        outlined = [[k for k, p in enumerate(supports) if t[p] and t[p] == max(t.values())] for t in taken]
        mesh = style.score_cells(ax, np.array(scores), outlined, low, inches / len(supports))
        style.name_cells(ax.xaxis, supports, most=inches / 0.1)
        ax.tick_params(axis="x", labelsize=7, rotation=90 if turned else 0)
        style.name_cells(ax.yaxis, methods, most=len(methods))
        ax.set_title(v, weight="bold", loc="center")
    if mesh:
        figure.colorbar(mesh, ax=axes, fraction=0.02, pad=0.015).outline.set_visible(False)
    said = "Best calibration score within each place (all: over all places); outlined: chosen most often."
    style.caption(figure, said, data.about() if inches / len(supports) > 0.4 else data.about(""))
    return figure


def draw_accuracy(data: RunData) -> Figure | None:
    """Average exact accuracy per method beside the controls: on the whole range, and the best ones close up."""
    averages = {m: list(average_by_seed(data.results, m).values()) for m in data.methods}
    averages = {m: values for m, values in averages.items() if values}
    if not averages:
        return None
    patches = {m: list(average_by_seed(data.results, m, "full_patch").values()) for m in averages}
    spans = {m: _span(data, m, values) for m, values in averages.items()}
    best = max(mean for _, mean, _ in spans.values())
    floor = min(low for low, mean, _ in spans.values() if mean > best - 0.06)
    figure = style.new_figure(style.PAGE, 1.05 + 0.24 * len(averages))
    axes = figure.subplots(1, 2, width_ratios=[1, 1.2])
    for ax, low in zip(axes, (min(0.45, *(x[0] for x in spans.values())), floor), strict=True):
        ax.set_xlim(low - 0.05 * (1 - low) - 0.002, 1 + 0.03 * (1 - low) + 0.001)
        style.dots(ax, list(averages.values()), list(spans.values()), [fmean(p or [np.nan]) for p in patches.values()])
        for control, dashes in zip(CONTROLS, ("--", (0, (1, 1.2))), strict=True):
            for value in [fmean(x) for x in [average_by_seed(data.results, control).values()] if x]:
                ax.axvline(value, color=style.VERMILLION, lw=1, ls=dashes, label=f"{control} {value:.3f}", zorder=1)
        style.name_rows(ax, list(averages))
        ax.set_xlabel("average exact accuracy" + (", close up" if ax is axes[1] else ""))
    axes[1].tick_params(axis="y", labelleft=False)
    for y, values in enumerate(averages.values()):
        axes[1].text(1.02, y, mean_sd(values), transform=axes[1].get_yaxis_transform(), va="center", fontsize=7)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper left", ncols=5, columnspacing=1.2)
    single = "" if len(data.seeds) > 1 else "Whiskers: 95 % intervals, averaged over the test banks."
    style.caption(figure, data.about(), single)
    return figure


def _span(data: RunData, method: str, values: Sequence[float]) -> tuple[float, float, float]:
    """Low, mean and high: a standard deviation over seeds or, for one seed, the banks' 95 % bounds averaged."""
    mean, spread = mean_spread(values)
    bounds = [r["interval"] for r in data.rows("records", method=method) if None not in (r.get("interval") or [None])]
    if len(values) > 1 or not bounds:
        return mean - spread, mean, min(1.0, mean + spread)
    return fmean(b[0] for b in bounds), mean, fmean(b[1] for b in bounds)


FIGURES: tuple[Callable[[RunData], Figure | None], ...]
FIGURES = (draw_handles, draw_runtime, draw_epsilon, draw_sizes, draw_layers, draw_accuracy)
