"""The paper's figures, drawn from a run directory. Spread over seeds is the population standard deviation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from plot_ot.files.run_layout import refuse_links
from plot_ot.files.run_reading import Reading
from plot_ot.files.writing import Json
from plot_ot.report import style
from plot_ot.report.figure_data import about, column, mean_spread, published_for, published_points
from plot_ot.report.findings import widths_of
from plot_ot.report.flags import kinds_of
from plot_ot.report.handle_figure import draw_handles
from plot_ot.report.published import Point
from plot_ot.report.tables import CONTROLS, average_by_seed, mean_sd

__all__ = ["draw_figures", "draw_handles"]


def draw_figures(data: Reading) -> None:
    """Write all figures of the run to its `figures` directory, as PNG and PDF.

    A figure whose numbers are not in the run is left out.
    """
    refuse_links(data.path)
    with style.look():
        for draw in FIGURES:
            style.publish(draw(data), data.path / "figures" / draw.__name__.removeprefix("draw_"))


# -- accuracy against runtime ---------------------------------------------------------------------------------


def draw_summary(data: Reading) -> Figure | None:
    """Accuracy against seconds of every method, numbered, beside a table with the paper's own numbers."""
    found = {m: list(average_by_seed(data.results, m).values()) for m in data.methods}
    spent = {m: column(data.rows("runtimes", method=m), "seconds") for m in data.methods}
    shown = [m for m in data.methods if found[m] and spent[m]]
    if not shown:
        return None
    points = published_points(data)
    paper = {shown.index(p.method): p for p in points if p.method in shown}
    ours = [(*mean_spread(spent[m]), *mean_spread(found[m])) for m in shown]
    theirs = [(p.seconds, p.seconds_sd, p.accuracy, p.accuracy_sd) for p in paper.values()]
    head = ["", "method", "accuracy", "seconds", *(["published accuracy", "published seconds"] if paper else [])]
    lines = []
    for k, m in enumerate(shown):
        line = [str(k + 1), m, mean_sd(found[m]), mean_sd(spent[m], 2)]
        lines.append(line + (_published_cells(paper.get(k)) if paper else []))
    upper, lower = 2.6, 0.5 + 0.16 * len(lines)
    figure = style.new_figure(style.PAGE, upper + lower)
    over, under = np.asarray(figure.subfigures(2, 1, height_ratios=(upper, lower)))
    ax = over.subplots()
    style.log_scale(ax)
    style.trade_off(ax, ours, fmt="o", ms=4, color=style.BLUE, lw=0.8, label="this run")
    if theirs:
        style.trade_off(
            ax, theirs, **style.PAPER, ecolor=style.VERMILLION, elinewidth=0.8, label="published, other machine"
        )
    _control_lines(data, ax.axhline)
    ax.set_ylim(min(0.45, *(y - dy for _, _, y, dy in [*ours, *theirs])) - 0.02, 1.03)
    ax.set_xlim(ax.get_xlim()[0] / 1.1, ax.get_xlim()[1] * 1.3)
    style.number_points(ax, {k + 1: (x, y) for k, (x, _, y, _) in enumerate(ours)}, style.INK)
    style.number_points(ax, {k + 1: (p.seconds, p.accuracy) for k, p in paper.items()}, style.VERMILLION)
    ax.grid(visible=True)
    ax.set_xlabel("seconds, logarithmic")
    ax.set_ylabel("average exact accuracy")
    entries = list(zip(*ax.get_legend_handles_labels(), strict=True))
    entries.sort(key=lambda entry: entry[1].startswith(CONTROLS))
    over.legend(*zip(*entries, strict=True), loc="outside upper left", ncols=5, columnspacing=1.2)
    style.ruled_table(under.add_subplot(), head, lines)
    style.caption(under, about(data), _published(data, bool(paper)))
    return figure


def _published_cells(point: Point | None) -> list[str]:
    """A published point's two cells of the table."""
    if point is None:
        return ["", ""]
    return [f"{point.accuracy:.3f} ± {point.accuracy_sd:.3f}", f"{point.seconds:g} ± {point.seconds_sd:g}"]


def _published(data: Reading, shown: bool) -> str:
    """A line that says where the paper's numbers come from."""
    paper = published_for(data)
    if not shown or paper is None:
        return ""
    return f"Published: the paper's numbers ({paper.setting}) on {paper.machine}."


def _control_lines(data: Reading, line: Callable[..., object]) -> None:
    """Draw lines at the accuracies of doing nothing and of copying the source."""
    for control, dashes in zip(CONTROLS, ("--", (0, (1, 1.2))), strict=True):
        for value in [fmean(x) for x in [average_by_seed(data.results, control).values()] if x]:
            line(value, color=style.VERMILLION, lw=1, ls=dashes, label=f"{control} {value:.3f}", zorder=1)


# -- runtime --------------------------------------------------------------------------------------------------


def draw_runtime(data: Reading) -> Figure | None:
    """Seconds per method: by part on a linear axis, and in total beside the published ones on a logarithmic axis."""
    rows = {m: data.rows("runtimes", method=m) for m in data.methods}
    rows = {m: r for m, r in rows.items() if column(r, "seconds")}
    if not rows:
        return None
    totals = [mean_spread(column(r, "seconds")) for r in rows.values()]
    figure = style.new_figure(style.PAGE, 1.15 + 0.24 * len(rows))
    left, right = figure.subplots(1, 2, width_ratios=[1.5, 1])
    style.stack(left, _parts(rows, np.array(totals)[:, 0]))
    for y, (mean, spread) in enumerate(totals):
        style.whisker(left, y, mean, spread, f"{mean:.2f}" + (f" ± {spread:.2f}" if spread else ""))
    left.set_xlim(0, 1.25 * max(mean + spread for mean, spread in totals))
    left.set_xlabel("seconds, by part")
    right.plot([mean for mean, _ in totals], range(len(rows)), "o", color=style.BLUE, ms=4, label="this run")
    published = {p.method: p.seconds for p in published_points(data)}
    points = [(published[m], y) for y, m in enumerate(rows) if m in published]
    if points:
        right.plot(*np.array(points).T, **style.PAPER, label="published, other machine")
    for seconds, y in points:
        style.note(right, seconds, y, f"{seconds:g}", (0, -8))
    style.log_scale(right)
    right.set_xlim(min(0.9, right.get_xlim()[0] / 1.5), right.get_xlim()[1] * 1.5)
    right.set_xlabel("seconds in total, logarithmic")
    for ax in (left, right):
        style.name_rows(ax, list(rows))
    right.tick_params(axis="y", labelleft=False)
    entries = [pair for ax in (left, right) for pair in zip(*ax.get_legend_handles_labels(), strict=True)]
    figure.legend(*zip(*entries, strict=True), loc="outside upper left", ncols=5, columnspacing=1.2)
    style.caption(
        figure, about(data), "Each method is charged what it costs alone and cold.", _published(data, bool(points))
    )
    return figure


def _parts(rows: Mapping[str, Sequence[Json]], totals: np.ndarray) -> dict[str, np.ndarray]:
    """Mean seconds of every part in every row; parts below 1 % of all rows are gathered into one."""
    split = {m: [x.get("parts") or {"total": x["seconds"]} for x in r] for m, r in rows.items()}
    names = list(dict.fromkeys(p for r in split.values() for x in r for p in x))
    means = {p: np.array([fmean(column(r, p) or [0.0]) for r in split.values()]) for p in names}
    small = [p for p in names if (means[p] < 0.01 * totals).all()]
    rest = [p for p in small if means[p].any()]
    shown = {p: means[p] for p in names if p not in small}
    return shown | ({" + ".join(rest): np.sum([means[p] for p in rest], axis=0)} if rest else {})


# -- the strength of the regularisation -----------------------------------------------------------------------


def draw_epsilon(data: Reading) -> Figure | None:
    """Accuracy against ε; hollow where a coupling saturates, crossed where one did not converge."""
    rows = [r for r in data.rows("sweeps", parameter="epsilon") if column([r], "value") and column([r], "accuracy")]
    values = sorted({float(r["value"]) for r in rows})
    if len(values) < 2:
        return None
    at = [[r for r in rows if float(r["value"]) == e] for e in values]
    mean, spread = np.array([mean_spread(column(r, "accuracy")) for r in at]).T
    calibration = np.array([mean_spread(column(r, "calibration"))[0] for r in at])
    marks = [style.mark([kind for r in some for kind in kinds_of(r)]) for some in at]
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
    style.caption(figure, about(data))
    return figure


# -- sizes, layers, accuracy ----------------------------------------------------------------------------------


def draw_sizes(data: Reading) -> Figure | None:
    """How many directions the handles touch, per method and variable."""
    if not data.methods:
        return None
    figure = style.new_figure(style.COLUMN, 0.9 + len(data.methods) * (0.04 + 0.13 * len(data.variables)))
    ax = figure.subplots()
    thick = 0.76 / len(data.variables)
    for k, v in enumerate(data.variables):
        sizes = [mean_spread(column(data.rows("selection", method=m, variable=v), "size")) for m in data.methods]
        rows = np.arange(len(data.methods)) + (k - (len(data.variables) - 1) / 2) * thick
        ax.barh(rows, [s for s, _ in sizes], 0.9 * thick, color=style.CYCLE[k % len(style.CYCLE)], label=v)
        for y, (mean, spread) in zip(rows, sizes, strict=True):
            style.whisker(ax, y, mean, spread, f"{mean:.1f}")
    style.name_rows(ax, data.methods)
    ax.set_xlim(0, 1.08 * ax.get_xlim()[1])
    ax.set_xlabel("directions with a nonzero gain")
    style.legend_above(ax)
    style.caption(figure, about(data))
    return figure


def in_forward_order(data: Reading, places: Iterable[str]) -> list[str]:
    """Places as the network computes them, not as a search proposed them; over all of them comes last."""
    known = {name: k for k, name in enumerate(widths_of(data))}
    return sorted(dict.fromkeys(places), key=lambda p: (p == "all", known.get(p, len(known))))


def draw_layers(data: Reading) -> Figure | None:
    """The best calibration score each method reached at each place; what was chosen most often is outlined."""
    chosen = [s for s in data.results["selection"] if set(s["chosen"].get("by_support") or ()) - {"all"}]
    methods = list(dict.fromkeys(s["method"] for s in chosen))
    supports = in_forward_order(data, (p for s in chosen for p in s["chosen"]["by_support"]))
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
        scores = [[mean_spread(column([c["by_support"] for c in r], p)) for p in supports] for r in rows]
        taken = [Counter(c.get("support") for c in r) for r in rows]
        outlined = [[k for k, p in enumerate(supports) if t[p] and t[p] == max(t.values())] for t in taken]
        mesh = style.score_cells(ax, np.array(scores), outlined, low, inches / len(supports))
        style.name_cells(ax.xaxis, supports, most=inches / 0.1)
        ax.tick_params(axis="x", labelsize=7, rotation=90 if turned else 0)
        style.name_cells(ax.yaxis, methods, most=len(methods))
        ax.set_title(v, weight="bold", loc="center")
    if mesh:
        figure.colorbar(mesh, ax=axes, fraction=0.02, pad=0.015).outline.set_visible(False)
    over_all = " (all: over all places)" if "all" in supports else ""
    said = f"Best calibration score within each place{over_all}; outlined: chosen most often."
    style.caption(figure, said, about(data) if inches / len(supports) > 0.4 else about(data, ""))
    return figure


def draw_accuracy(data: Reading) -> Figure | None:
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
        _control_lines(data, ax.axvline)
        shown = _mark_published(data, ax, list(averages))
        style.name_rows(ax, list(averages))
        ax.set_xlabel("average exact accuracy" + (", close up" if ax is axes[1] else ""))
    axes[1].tick_params(axis="y", labelleft=False)
    for y, values in enumerate(averages.values()):
        axes[1].text(1.02, y, mean_sd(values), transform=axes[1].get_yaxis_transform(), va="center", fontsize=7)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper left", ncols=6, columnspacing=1.2)
    single = "" if len(data.seeds) > 1 else "Whiskers: 95 % intervals, averaged over the test banks."
    style.caption(figure, about(data), single, _published(data, shown))
    return figure


def _mark_published(data: Reading, ax: Axes, methods: Sequence[str]) -> bool:
    """Mark the paper's accuracies that lie within the axis."""
    low, high = ax.get_xlim()
    points = published_points(data)
    marks = [(p.accuracy, methods.index(p.method)) for p in points if p.method in methods]
    inside = [(x, y) for x, y in marks if low <= x <= high]
    if inside:
        ax.plot(*np.array(inside).T, **style.PAPER, label="published")
    return bool(marks)


def _span(data: Reading, method: str, values: Sequence[float]) -> tuple[float, float, float]:
    """Low, mean and high: a standard deviation over seeds or, for one seed, the banks' 95 % bounds averaged."""
    mean, spread = mean_spread(values)
    bounds = [r["interval"] for r in data.rows("records", method=method) if None not in (r.get("interval") or [None])]
    if len(values) > 1 or not bounds:
        return mean - spread, mean, min(1.0, mean + spread)
    return fmean(b[0] for b in bounds), mean, fmean(b[1] for b in bounds)


FIGURES: tuple[Callable[[Reading], Figure | None], ...]
FIGURES = (draw_summary, draw_handles, draw_runtime, draw_epsilon, draw_sizes, draw_layers, draw_accuracy)
