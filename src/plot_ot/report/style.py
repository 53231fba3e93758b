"""The look all figures share: widths, fonts, colours, the pieces charts are made of, and how a figure becomes files."""

from __future__ import annotations

import io
import math
import textwrap
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.collections import QuadMesh
from matplotlib.colors import Colormap, LinearSegmentedColormap
from matplotlib.figure import Figure, SubFigure
from matplotlib.patches import Rectangle
from matplotlib.ticker import FuncFormatter, MaxNLocator

from plot_ot.files.writing import write_atomically
from plot_ot.transport import Degeneracy

COLUMN, PAGE = 3.3, 6.75
"""Widths in inches: one column of a two-column paper, and the whole page."""

ORANGE, SKY, GREEN, YELLOW = "#E69F00", "#56B4E9", "#009E73", "#F0E442"
BLUE, VERMILLION, PURPLE = "#0072B2", "#D55E00", "#CC79A7"
INK, MUTED, FAINT, BLANK = "#222222", "#666666", "#DDDDDD", "#F2F2F2"
CYCLE = (BLUE, ORANGE, GREEN, PURPLE, SKY, VERMILLION, YELLOW)
"""The Okabe-Ito palette: told apart by colour-blind readers."""

HEAT: Colormap = LinearSegmentedColormap.from_list("plot_ot", ["#FFFFFF", "#B9DCEF", SKY, BLUE, "#003A63"])
HEAT = HEAT.with_extremes(bad=BLANK)
"""Colours of heatmaps, steadily darker from nothing (white) to most (dark blue); grey where there is no value."""

PARTS = {
    "recording": MUTED,
    "signatures": SKY,
    "transport": GREEN,
    "closed_form": YELLOW,
    "newton": VERMILLION,
    "calibration": BLUE,
    "das": ORANGE,
    "test": PURPLE,
}
"""Colours of the parts of a method's time."""

MARKS: dict[str, dict[str, Any]] = {
    "sound coupling": {"ls": "", "marker": "o", "ms": 4.5, "mec": BLUE, "mfc": BLUE},
    "saturated (ties)": {"ls": "", "marker": "o", "ms": 4.5, "mec": BLUE, "mfc": "white"},
    "not converged": {"ls": "", "marker": "X", "ms": 6, "mec": "white", "mfc": VERMILLION},
}
"""Marks of a result by the state of its couplings."""

LETTER = 0.066
"""Inches that a letter of 7 points takes, on average."""

FORMATS = {"png": "Software", "pdf": "CreationDate"}
"""File kinds, and the metadata that would make two equal figures differ."""

SETTINGS: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 8,
    "axes.titlesize": 8,
    "axes.labelsize": 8,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "legend.fontsize": 7,
    "legend.frameon": False,
    "legend.handlelength": 1.4,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.6,
    "axes.edgecolor": MUTED,
    "axes.titlelocation": "left",
    "axes.axisbelow": True,
    "text.color": INK,
    "axes.labelcolor": INK,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "grid.color": FAINT,
    "grid.linewidth": 0.5,
    "lines.linewidth": 1.2,
    "errorbar.capsize": 2,
    "figure.facecolor": "white",
    "savefig.dpi": 200,
    "pdf.fonttype": 42,  # fonts embedded as text, as journals ask
    "text.parse_math": False,  # names are shown as they are, even with a dollar sign
    "figure.constrained_layout.h_pad": 0.03,
    "figure.constrained_layout.w_pad": 0.03,
    "figure.constrained_layout.wspace": 0.03,
}


Drawing = Figure | SubFigure
"""What a caption can be put under."""


def look() -> AbstractContextManager[None]:
    """A context in which figures are made in this style."""
    return rc_context(SETTINGS)


def new_figure(width: float, height: float) -> Figure:
    """An empty figure that lays itself out; sizes in inches."""
    return Figure(figsize=(width, height), layout="constrained")


def publish(figure: Figure | None, stem: Path) -> None:
    """Write a figure as PNG and PDF; without one, remove what an earlier call left."""
    for kind, stamp in FORMATS.items():
        path = stem.with_name(f"{stem.name}.{kind}")
        if figure is None:
            path.unlink(missing_ok=True)
            continue
        file = io.BytesIO()
        figure.savefig(file, format=kind, metadata={stamp: None})
        figure.set_layout_engine("none")  # laid out once is enough
        write_atomically(path, file.getvalue())


def caption(figure: Drawing, *sentences: str) -> None:
    """Put small print under the figure, wrapped to its width."""
    text = " ".join(s for s in sentences if s)
    if text:
        lines = textwrap.fill(text, int(figure.bbox.width / figure.dpi * 20))
        figure.supxlabel(lines, x=0.01, ha="left", fontsize=7, color=MUTED, linespacing=1.25)


def mark(flags: Sequence[Degeneracy]) -> str:
    """Choose the mark of a result by the worst flag that any of its couplings has."""
    if Degeneracy.NOT_CONVERGED in flags:
        return "not converged"
    return "saturated (ties)" if Degeneracy.SATURATED in flags else "sound coupling"


# -- rows of bars and dots ------------------------------------------------------------------------------------


def name_rows(axes: Axes, names: Sequence[str]) -> None:
    """Give the vertical axis one row per name, the first on top, without tick marks."""
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.grid(axis="x")
    if axes.get_xscale() == "linear":
        axes.xaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))


def whisker(axes: Axes, y: float, mean: float, spread: float, said: str) -> None:
    """Draw a bar's spread, and write its value beside it."""
    if np.isfinite(mean):
        if spread:
            axes.errorbar(mean, y, xerr=spread, color=INK, lw=0.8, capsize=1.5)
        note(axes, mean + spread, y, said)


def note(axes: Axes, x: float, y: float, said: str, shift: tuple[float, float] = (4, 0), colour: str = INK) -> None:
    """Write a small remark beside a point."""
    at: dict[str, Any] = {"ha": "center" if not shift[0] else "left", "va": "center", "fontsize": 6.5}
    axes.annotate(said, (x, y), shift, textcoords="offset points", color=colour, **at)


def dots(
    axes: Axes, values: Sequence[Sequence[float]], spans: Sequence[tuple[float, float, float]], marks: Sequence[float]
) -> None:
    """Draw in each row every seed, their mean with whiskers (low, mean, high), and a reference mark.

    A mean left of the axis is an arrow at its edge.
    """
    left = axes.get_xlim()[0]
    for y, (row, (low, mean, high)) in enumerate(zip(values, spans, strict=True)):
        if mean < left:
            axes.plot(left, y, "<", color=BLUE, ms=4.5, clip_on=False)
            continue
        if len(row) > 1:
            axes.plot(row, [y] * len(row), "o", color=ORANGE, ms=2.5, label=None if y else "one seed", zorder=4)
        axes.errorbar(mean, y, xerr=[[max(0.0, mean - low)], [max(0.0, high - mean)]], color=BLUE, lw=1, zorder=2)
        axes.plot(mean, y, "o", color=BLUE, ms=5, label=None if y else "mean" if len(row) > 1 else "handle", zorder=3)
    axes.plot(marks, range(len(marks)), "|", color=MUTED, ms=9, mew=1.2, label="full patch, same places", zorder=2)


def stack(axes: Axes, parts: Mapping[str, np.ndarray]) -> None:
    """Draw stacked bars of each part's share of every row."""
    left = np.zeros(len(next(iter(parts.values()))))
    for name, share in parts.items():
        axes.barh(
            np.arange(len(left)), share, 0.62, left=left, color=PARTS.get(name, FAINT), label=name.replace("_", " ")
        )
        left = left + share


def legend_above(axes: Axes, columns: int = 4) -> None:
    """Put the legend in a line over the chart."""
    at: dict[str, Any] = {"loc": "lower left", "bbox_to_anchor": (-0.02, 1.0), "borderaxespad": 0.2}
    axes.legend(**at, ncols=columns, columnspacing=0.9, handletextpad=0.4, handlelength=1.0)


def log_scale(axes: Axes) -> None:
    """Make the horizontal axis logarithmic, with plain numbers: 0.01, 0.1, 1, 10; or, without these, some between."""

    def between(value: float, _: int | None) -> str:
        low, high = (math.log10(x) for x in axes.get_xlim())
        return f"{value:g}" if math.ceil(low) > math.floor(high) else ""

    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_formatter(FuncFormatter(between))


PAPER: dict[str, Any] = {"ls": "", "marker": "D", "ms": 4.5, "mfc": "white", "mec": VERMILLION, "zorder": 5}
"""The mark of a number that the paper published."""


def trade_off(axes: Axes, points: Sequence[tuple[float, float, float, float]], **look: Any) -> None:
    """Draw points (x, its spread, y, its spread) with whiskers."""
    for k, (x, dx, y, dy) in enumerate(points):
        axes.errorbar(x, y, xerr=dx or None, yerr=dy or None, **(look if not k else look | {"label": None}))


def number_points(axes: Axes, points: Mapping[int, tuple[float, float]], colour: str, near: float = 0.045) -> None:
    """Write numbers beside points on a logarithmic x axis; points next to each other share a label."""
    (left, right), (low, high) = np.log(axes.get_xlim()), axes.get_ylim()
    at = {n: ((np.log(x) - left) / (right - left), (y - low) / (high - low)) for n, (x, y) in points.items()}
    groups: list[list[int]] = []
    for n in sorted(at, key=lambda n: at[n]):
        close = (g for g in groups if any(np.hypot(*np.subtract(at[n], at[m])) < near for m in g))
        group = next(close, None)
        if group is None:
            groups.append([n])
        else:
            group.append(n)
    for group in groups:
        x, y = points[max(group, key=lambda n: at[n][0])]
        note(axes, x, y, ", ".join(str(n) for n in sorted(group)), (4, -6), colour)


# -- heatmaps and tables --------------------------------------------------------------------------------------


def cells(axes: Axes, grid: np.ndarray, low: float = 0.0, high: float = 1.0) -> QuadMesh:
    """A heatmap with the first row on top; cells without a value are grey. Huge grids become an image."""
    huge = grid.size > 5000
    mesh = axes.pcolormesh(np.ma.masked_invalid(grid), cmap=HEAT, vmin=low, vmax=high, rasterized=huge)
    if not huge:
        mesh.set(edgecolor="#DADADA", linewidth=0.25, clip_on=False)
    axes.set_ylim(len(grid), 0)
    axes.tick_params(length=0)
    for spine in axes.spines.values():
        spine.set(visible=huge, color="#DADADA")
    return mesh


def name_cells(axis: Axis, names: Sequence[str], most: float) -> None:
    """Write names at the middle of cells: every one, every second, fifth, tenth, ..., at most `most` of them."""
    steps = (lead * 10**power for power in range(9) for lead in (1, 2, 5))
    every = next(step for step in steps if len(names) <= max(1.0, most) * step)
    axis.set_ticks([k + 0.5 for k in range(0, len(names), every)], list(names[::every]))


def crowded(names: Sequence[str], inches: float) -> bool:
    """Whether names, each under a cell, would run into each other."""
    return len(names) * (2 + max(map(len, names))) * LETTER > inches


def score_cells(
    axes: Axes, scores: np.ndarray, outlined: Sequence[Sequence[int]], low: float, inches: float
) -> QuadMesh | None:
    """A heatmap of scores [rows, columns, (mean, spread)] with outlined cells and, where cells are wide, the numbers.

    Returns the mesh if there was no room for numbers: it needs a colour bar.
    """
    mean, spread = scores[:, :, 0], scores[:, :, 1]
    mesh = cells(axes, mean, low)
    both = spread.any() and inches > 0.4
    for y, x in np.argwhere(np.isfinite(mean)) if inches > 0.3 else ():
        ink = "white" if mean[y, x] > 0.6 + 0.4 * low else INK
        at: dict[str, Any] = {"ha": "center", "va": "center", "color": ink}
        axes.text(x + 0.5, y + (0.36 if both else 0.5), f"{mean[y, x]:.3f}", fontsize=7, **at)
        if both:
            axes.text(x + 0.5, y + 0.74, f"± {spread[y, x]:.3f}", fontsize=5.5, **at)
    for y, x in ((y, x) for y, columns in enumerate(outlined) for x in columns):
        axes.add_patch(Rectangle((x, y), 1, 1, fill=False, ec=VERMILLION, lw=1.4, clip_on=False, zorder=3))
    return None if inches > 0.3 else mesh


@dataclass(frozen=True)
class Panel:
    """One row of heatmaps: per column a grid and a remark.

    `axis` names the cells of a row (empty: as below); `unit` says what the largest value is (empty: not said);
    `corner` is a second remark at the right end.
    """

    title: str
    axis: str
    grids: Mapping[str, np.ndarray]
    remarks: Mapping[str, str]
    unit: str = ""
    corner: Mapping[str, str] = field(default_factory=dict)


def heatmap_panels(figure: SubFigure, panels: Sequence[Panel], rows: Sequence[str], columns: Sequence[str]) -> None:
    """Draw panels under each other, columns side by side, every grid divided by its largest value."""
    axes = figure.subplots(len(panels), len(columns), squeeze=False, sharey=True)
    for line, panel in zip(axes, panels, strict=True):
        for ax, column in zip(line, columns, strict=True):
            mesh = _scaled_cells(ax, panel.grids[column], rows, 5.2 / len(columns))
            ax.tick_params(labelbottom=bool(panel.axis))
            largest = np.nanmax(panel.grids[column], initial=0.0)
            remarks = [panel.remarks[column], f"largest {panel.unit} {largest:.2g}" if panel.unit else ""]
            ax.set_title(", ".join(r for r in remarks if r), fontsize=7, color=MUTED, pad=2)
            ax.set_xlabel(panel.axis, fontsize=7, labelpad=1)
        line[0].set_ylabel(panel.title, rotation=0, ha="right", va="center", multialignment="left", labelpad=6)
    for ax, column in zip(axes[0], columns, strict=True):
        ax.annotate(column, (0.5, 1), (0, 13), "axes fraction", "offset points", ha="center", weight="bold")
    _scale_bar(figure, mesh, axes)


def heatmap_rows(
    figure: Drawing, panels: Sequence[Panel], lines: Sequence[str], rows: Sequence[str], tall: float
) -> None:
    """Draw panels side by side, rows under each other, every grid `tall` inches and divided by its largest value."""
    axes = figure.subplots(len(rows), len(panels), squeeze=False, sharey=True)
    for column, panel in zip(axes.T, panels, strict=True):
        for ax, row in zip(column, rows, strict=True):
            mesh = _scaled_cells(ax, panel.grids[row], lines, 5.6 / len(panels), tall)
            ax.tick_params(labelbottom=ax is column[-1])
            ax.set_title(panel.remarks[row], fontsize=6.5, color=MUTED, pad=2)
            ax.set_title(panel.corner.get(row, ""), fontsize=6.5, loc="right", pad=2)
        column[0].annotate(panel.title, (0.5, 1), (0, 13), "axes fraction", "offset points", ha="center", weight="bold")
        column[-1].set_xlabel(panel.axis, fontsize=7, labelpad=1)
    for ax, row in zip(axes[:, 0], rows, strict=True):
        ax.set_ylabel(row, rotation=0, ha="right", va="center", weight="bold", labelpad=6)
    _scale_bar(figure, mesh, axes)


def _scaled_cells(axes: Axes, grid: np.ndarray, rows: Sequence[str], wide: float, tall: float = 1.2) -> QuadMesh:
    """A grid divided by its largest value, with rows named and directions numbered as far as there is room."""
    mesh = cells(axes, grid / (np.nanmax(grid, initial=0.0) or 1.0))
    name_cells(axes.yaxis, rows, most=tall / 0.12)
    numbers = [str(k) for k in range(grid.shape[1])]
    name_cells(axes.xaxis, numbers, most=wide / LETTER / (0.4 + len(numbers[-1])))
    axes.tick_params(pad=1, labelsize=7)
    return mesh


def _scale_bar(figure: Drawing, mesh: QuadMesh, axes: np.ndarray) -> None:
    bar = figure.colorbar(mesh, ax=axes, fraction=0.02, pad=0.015, aspect=40, ticks=[0, 1])
    bar.outline.set_visible(False)
    bar.ax.tick_params(length=0)


def ruled_table(axes: Axes, head: Sequence[str], lines: Sequence[Sequence[str]]) -> None:
    """A page-wide table with rules above, under the head, and below; columns as wide as their texts."""
    axes.set_axis_off()
    starts = _column_starts(head, lines)
    top = 0
    for line in [head, *lines]:
        for start, cell in zip(starts, line, strict=True):
            for k, part in enumerate(cell.split("\n")):
                x, y = 0.005 + start * LETTER / PAGE, top + k + 0.5
                axes.text(x, y, part, va="center", fontsize=7, weight="normal" if top else "bold")
        top += height(line)
    for y, width in ((0, 0.9), (1, 0.5), (top, 0.9)):
        axes.plot([0, 1], [y, y], color=INK, lw=width, clip_on=False)
    axes.set(xlim=(0, 1), ylim=(top, 0))


def _column_starts(head: Sequence[str], lines: Sequence[Sequence[str]]) -> list[float]:
    """Where the columns of a table start, in letters."""
    columns = zip(head, *lines, strict=True)
    widest = [max(len(part) for cell in column for part in cell.split("\n")) for column in columns]
    return [0.0, *accumulate(2.5 + 1.1 * letters for letters in widest[:-1])]


def wrap_last(head: Sequence[str], lines: Sequence[Sequence[str]]) -> list[list[str]]:
    """The lines of a table with the last column wrapped to what the others leave of the page."""
    room = max(20, int(PAGE / LETTER - _column_starts(head, lines)[-1]) - 1)
    wrapped = ["\n".join(textwrap.fill(part, room) for part in line[-1].split("\n")) for line in lines]
    return [[*line[:-1], last] for line, last in zip(lines, wrapped, strict=True)]


def height(line: Sequence[str]) -> int:
    """How many lines of text a table's row takes."""
    return 1 + max(cell.count("\n") for cell in line)
