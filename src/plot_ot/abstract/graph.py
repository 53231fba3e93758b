"""The picture of a causal graph: layers by depth, long arrows threaded between the nodes (Sugiyama's method)."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from math import hypot
from pathlib import Path
from statistics import fmean
from typing import Any, Protocol

from plot_ot.errors import PlotError
from plot_ot.files.writing import write_atomically


class Graph(Protocol):
    """What a drawing needs to know of a causal model."""

    inputs: tuple[str, ...]
    variables: tuple[str, ...]
    output: str

    @property
    def mechanisms(self) -> Mapping[str, Any]:
        """Every variable that is not an input."""
        ...

    def parents(self, name: str) -> tuple[str, ...]:
        """The parents of a variable."""
        ...

    def depth(self) -> dict[str, int]:
        """How many mechanisms lie between the inputs and each variable, at most."""
        ...


PICTURES = ("png", "pdf", "svg")
COLOURS = {  # edge, face
    "input": ("#007A5A", "#D3EFE5"),
    "variable": ("#B36B00", "#FFC659"),
    "other variable": ("#B36B00", "#FFF0D2"),
    "output": ("#A83A00", "#F9C4AC"),
}
HEIGHT, LEVEL, MARGIN, GAP = 0.42, 0.78, 0.12, 0.2  # inches

Point = tuple[float, float]
Layers = list[list[str]]


def draw_graph(model: Graph, path: str | os.PathLike[str]) -> None:
    """Draw the graph into a PNG, PDF or SVG file, by suffix."""
    path = Path(path)
    kind = path.suffix.lower().removeprefix(".")
    if kind not in PICTURES:
        legal = ", ".join(f".{k}" for k in PICTURES)
        raise PlotError(f"Cannot draw a causal graph into '{path.name}': its suffix must be one of {legal}.")
    write_atomically(path, _picture(model, kind))


def _role(model: Graph, name: str) -> str:
    if name == model.output:
        return "output"
    if name in model.inputs:
        return "input"
    return "variable" if name in model.variables else "other variable"


def _levels(model: Graph) -> dict[str, int]:
    """The depth of each variable; an input stands just above the first mechanism that reads it."""
    level = model.depth()
    for name in model.inputs:
        level[name] = min((level[n] for n in model.mechanisms if name in model.parents(n)), default=1) - 1
    return level


def _chains(model: Graph, level: Mapping[str, int]) -> list[list[str]]:
    """Each arrow as its ends and, for every layer it crosses, a waypoint of no width."""
    return [
        [parent, *(f"{parent}→{name}@{at}" for at in range(level[parent] + 1, level[name])), name]
        for name in model.mechanisms
        for parent in dict.fromkeys(model.parents(name))
    ]


def _layers(model: Graph, level: Mapping[str, int], chains: Sequence[Sequence[str]]) -> Layers:
    """Nodes and waypoints of each layer, ordered so that few arrows cross."""
    full = dict(level) | {n: level[c[0]] + k for c in chains for k, n in enumerate(c)}
    layers = []
    for at in range(1 + max(full.values())):
        inputs = [n for n in full if full[n] == at and n in model.inputs]
        others = [n for n in full if full[n] == at and n not in model.inputs]
        layers.append([*inputs[: len(inputs) // 2], *others, *inputs[len(inputs) // 2 :]])
    near = _neighbours(chains)
    best, fewest = layers, _crossings(layers, near)
    for sweep in range(24):
        layers = [list(layer) for layer in layers]
        for layer in layers if sweep % 2 else layers[::-1]:
            share = {n: (k + 0.5) / len(row) for row in layers for k, n in enumerate(row)}
            centre = {n: fmean([share[m] for m in near.get(n, ())] or [share[n]]) for n in layer}
            layer.sort(key=centre.__getitem__)
        found = _crossings(layers, near)
        if found < fewest:
            best, fewest = layers, found
    return best


def _neighbours(chains: Sequence[Sequence[str]]) -> dict[str, list[str]]:
    """What each node or waypoint is linked to in the layers above and below."""
    near: dict[str, list[str]] = {}
    for a, b in (link for chain in chains for link in pairwise(chain)):
        near.setdefault(a, []).append(b)
        near.setdefault(b, []).append(a)
    return near


def _crossings(layers: Layers, near: Mapping[str, Sequence[str]]) -> int:
    """How many pairs of links cross."""
    count = 0
    for above, below in pairwise(layers):
        at = {n: k for k, n in enumerate(below)}
        ends = [sorted(at[m] for m in near.get(n, ()) if m in at) for n in above]
        count += sum(b < a for k, left in enumerate(ends) for right in ends[k + 1 :] for a in left for b in right)
    return count


def _columns(layers: Layers, near: Mapping[str, Sequence[str]], width: Mapping[str, float]) -> dict[str, float]:
    """Where each node stands in its layer: close to its neighbours (most of all its parents), without overlaps."""
    x = {n: float(k) for layer in layers for k, n in enumerate(layer)}
    depth = {n: k for k, layer in enumerate(layers) for n in layer}
    for _ in range(60):
        for layer in layers:
            wanted = []
            for n in layer:
                above = [x[m] for m in near.get(n, ()) if depth[m] < depth[n]]
                wanted.append(fmean([x[m] for m in near.get(n, ())] + 4 * above or [x[n]]))
            x.update(zip(layer, _apart(wanted, [width.get(n, 0.0) for n in layer]), strict=True))
    return x


def _apart(wanted: Sequence[float], widths: Sequence[float]) -> list[float]:
    """The positions nearest to the wanted ones that keep the order and the gaps (isotonic regression)."""
    offsets = list(accumulate([0.0, *((a + b) / 2 + GAP for a, b in pairwise(widths))]))
    pools: list[list[float]] = []
    for position, offset in zip(wanted, offsets, strict=True):
        pools.append([position - offset])
        while len(pools) > 1 and fmean(pools[-2]) > fmean(pools[-1]):
            merged = pools.pop()
            pools[-1] += merged
    level = [fmean(pool) for pool in pools for _ in pool]
    return [x + offset for x, offset in zip(level, offsets, strict=True)]


def _picture(model: Graph, kind: str) -> bytes:
    """The whole drawing as a file's content; lengths are inches."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    with rc_context({"font.size": 8, "pdf.fonttype": 42, "svg.hashsalt": "plot-ot", "text.parse_math": False}):
        width = {n: _width(n) for n in [*model.inputs, *model.mechanisms]}
        level = _levels(model)
        chains = _chains(model, level)
        layers = _layers(model, level, chains)
        x = _columns(layers, _neighbours(chains), width)
        left = min(x[n] - width.get(n, 0.0) / 2 for n in x) - MARGIN
        right = max(x[n] + width.get(n, 0.0) / 2 for n in x) + MARGIN
        spare = max(0.0, 3.3 - (right - left)) / 2  # at least a paper's column, so that the legend fits
        top, bottom = HEIGHT / 2 + MARGIN, -LEVEL * (len(layers) - 1) - HEIGHT / 2 - 0.36
        figure = Figure(figsize=(right - left + 2 * spare, top - bottom))
        axes = figure.add_axes((0, 0, 1, 1), xlim=(left - spare, right + spare), ylim=(bottom, top))
        axes.set_axis_off()
        _draw_graph(axes, model, chains, {n: (x[n], -LEVEL * k) for k, r in enumerate(layers) for n in r}, width)
        roles = [r for r in COLOURS if r in {_role(model, n) for n in width}]
        dots = [Line2D([], [], ls="", marker="o", ms=6, mec=COLOURS[r][0], mfc=COLOURS[r][1]) for r in roles]
        figure.legend(dots, roles, loc="lower center", ncols=len(roles), frameon=False, handletextpad=0.1, fontsize=7)
        file = io.BytesIO()
        stamp = {"png": "Software", "pdf": "CreationDate", "svg": "Date"}[kind]  # equal graphs, equal files
        figure.savefig(file, format=kind, dpi=min(200, 2e4 / figure.get_figwidth()), metadata={stamp: None})
    return file.getvalue()


def _width(name: str) -> float:
    """A circle for a short name, an ellipse for a long one."""
    from matplotlib.textpath import TextPath

    text = TextPath((0, 0), name, size=8).get_extents().width / 72
    return HEIGHT if text < 0.76 * HEIGHT else 1.2 * text + 0.12


def _draw_graph(
    axes: Any, model: Graph, chains: Sequence[Sequence[str]], at: Mapping[str, Point], width: Mapping[str, float]
) -> None:
    """Arrows, and the nodes over their ends."""
    from matplotlib.patches import Ellipse, FancyArrowPatch

    for chain in chains:
        line = _line([at[n] for n in chain], width[chain[0]], width[chain[-1]])
        axes.add_patch(FancyArrowPatch(path=line, arrowstyle="-|>", mutation_scale=7, lw=0.8, color="#444444"))
    for n in width:
        edge, face = COLOURS[_role(model, n)]
        axes.add_patch(Ellipse(at[n], width[n], HEIGHT, fc=face, ec=edge, lw=1.1, zorder=3))
        axes.text(*at[n], n, ha="center", va="center_baseline", zorder=4)


def _line(points: Sequence[Point], start: float, end: float) -> Any:
    """The line from rim to rim: straight, or a smooth curve through the waypoints (Catmull-Rom)."""
    from matplotlib.path import Path as Curve

    p = [_rim(points[0], points[1], start), *points[1:-1], _rim(points[-1], points[-2], end)]
    if len(p) == 2:
        return Curve(p)
    slopes = [((b[0] - a[0]) / 6, (b[1] - a[1]) / 6) for a, b in zip([p[0], *p[:-1]], [*p[1:], p[-1]], strict=True)]
    vertices = [p[0]]
    for (a, da), (b, db) in pairwise(zip(p, slopes, strict=True)):
        vertices += [(a[0] + da[0], a[1] + da[1]), (b[0] - db[0], b[1] - db[1]), b]
    return Curve(vertices, [Curve.MOVETO] + [Curve.CURVE4] * (len(vertices) - 1))


def _rim(centre: Point, other: Point, width: float) -> Point:
    """Where the line to another point leaves a node, with a little air."""
    dx, dy = other[0] - centre[0], other[1] - centre[1]
    reach = 1 / hypot(dx / (width / 2 + 0.02), dy / (HEIGHT / 2 + 0.02))
    return centre[0] + reach * dx, centre[1] + reach * dy
