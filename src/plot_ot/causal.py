"""The abstract side: a causal model with named variables, run and intervened on in batches."""

from __future__ import annotations

import inspect
import io
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import hypot
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from plot_ot.errors import PlotError, unknown
from plot_ot.runs import write_atomically

Values = dict[str, Tensor]


@dataclass(frozen=True)
class Mechanism:
    """`value = function(*parents)`, batched: every argument and the value have `pairs` rows."""

    parents: tuple[str, ...]
    function: Callable[..., Tensor]

    @classmethod
    def of(cls, function: Callable[..., Tensor]) -> Mechanism:
        """The parents are the function's parameter names: `lambda W, X: W == X`."""
        try:
            return cls(tuple(inspect.signature(function).parameters), function)
        except (TypeError, ValueError) as e:
            raise PlotError(f"Cannot read the parents of {function!r}: pass Mechanism(parents, function).") from e


class CausalModel:
    """An abstract model 𝔠: X -> Y with named variables Z_1..Z_m.

    `inputs` names the columns of the input rows. `mechanisms` maps every other variable to its mechanism
    (a function whose parameter names are its parents, or a `Mechanism`). `output` names the variable that is
    the answer; `variables` the ones worth localizing (default: all between inputs and output).

        >>> import torch
        >>> heq = CausalModel(
        ...     inputs=["W", "X", "Y", "Z"],
        ...     mechanisms={
        ...         "z_WX": lambda W, X: W == X,
        ...         "z_YZ": lambda Y, Z: Y == Z,
        ...         "y": lambda z_WX, z_YZ: z_WX == z_YZ,
        ...     },
        ...     output="y",
        ... )
        >>> heq.answer(torch.tensor([[1, 1, 2, 2], [1, 1, 1, 2]])).tolist()
        [True, False]
    """

    def __init__(
        self,
        inputs: Sequence[str],
        mechanisms: Mapping[str, Mechanism | Callable[..., Tensor]],
        output: str,
        variables: Sequence[str] | None = None,
    ) -> None:
        self.inputs = tuple(inputs)
        declared = {n: m if isinstance(m, Mechanism) else Mechanism.of(m) for n, m in mechanisms.items()}
        _refuse_clashes(self.inputs, declared)
        self.mechanisms = _in_causal_order(self.inputs, declared)
        if output not in self.mechanisms:
            unknown("output variable", output, self.mechanisms)
        self.output = output
        chosen = [n for n in self.mechanisms if n != output] if variables is None else list(variables)
        for name in chosen:
            self._require(name)
        if len(set(chosen)) < len(chosen):
            raise PlotError(f"Variable names must differ; found {', '.join(chosen)}.")
        self.variables = tuple(chosen)

    # -- running -----------------------------------------------------------------------------------------

    def run(self, inputs: Int[Tensor, "rows inputs"], do: Mapping[str, Tensor] | None = None) -> Values:
        """Values of every variable for each input row, under the interventions `do`."""
        self._check_rows(inputs)
        do = dict(do or {})
        for name, value in do.items():
            if name not in self.inputs:
                self._require(name)
            rows = len(value) if isinstance(value, Tensor) and value.ndim else "no"
            if rows != len(inputs):
                raise PlotError(f"do({name}) has {rows} rows, the inputs have {len(inputs)}: give one value per row.")
        values: Values = {}
        for column, name in enumerate(self.inputs):
            values[name] = do.get(name, inputs[:, column])
        for name, mechanism in self.mechanisms.items():
            values[name] = do[name] if name in do else self._compute(name, mechanism, values, len(inputs))
        return values

    def answer(self, inputs: Int[Tensor, "rows inputs"]) -> Tensor:
        """𝔠(x): the output of each input row."""
        return self.run(inputs)[self.output]

    def swap(self, base: Int[Tensor, "rows inputs"], source: Int[Tensor, "rows inputs"], variable: str) -> Tensor:
        """The abstract swap 𝔠(x^b; do(Z_i <- Z_i(x^s))): base outputs with one variable taken from the source."""
        self._require(variable)
        self._check_rows(base)
        self._check_rows(source)
        if base.shape != source.shape:
            raise PlotError(
                f"Base and source inputs must pair up row by row: base has shape {tuple(base.shape)}, "
                f"source {tuple(source.shape)}."
            )
        return self.run(base, do={variable: self.run(source)[variable]})[self.output]

    def _compute(self, name: str, mechanism: Mechanism, values: Values, rows: int) -> Tensor:
        value = mechanism.function(*(values[p] for p in mechanism.parents))
        if not isinstance(value, Tensor):
            raise PlotError(
                f"The mechanism of '{name}' returned {type(value).__name__}; it must return a batched tensor."
            )
        if value.ndim == 0 or len(value) != rows:
            raise PlotError(
                f"The mechanism of '{name}' returned shape {tuple(value.shape)} for {rows} rows: "
                f"its first dimension must be the rows (mechanisms are batched)."
            )
        return value

    # -- checks ------------------------------------------------------------------------------------------

    def _require(self, name: str) -> None:
        if name not in self.mechanisms:
            unknown("variable", name, self.mechanisms)

    def _check_rows(self, inputs: Any) -> None:
        if not isinstance(inputs, Tensor) or inputs.ndim != 2 or inputs.shape[1] != len(self.inputs):
            found = tuple(inputs.shape) if isinstance(inputs, Tensor) else type(inputs).__name__
            raise PlotError(
                f"Inputs must be a tensor of shape [rows, {len(self.inputs)}] with columns {', '.join(self.inputs)}; "
                f"found {found}."
            )

    # -- looking -----------------------------------------------------------------------------------------

    def parents(self, name: str) -> tuple[str, ...]:
        """The parents of a variable (none for an input)."""
        if name in self.inputs:
            return ()
        self._require(name)
        return self.mechanisms[name].parents

    def depth(self) -> dict[str, int]:
        """How many mechanisms lie between the inputs and each variable, at most."""
        depth = dict.fromkeys(self.inputs, 0)
        for name, mechanism in self.mechanisms.items():
            depth[name] = 1 + max((depth[p] for p in mechanism.parents), default=0)
        return depth

    def draw(self, path: str | os.PathLike[str]) -> None:
        """Draw the causal graph into a PNG, PDF or SVG file, by suffix.

        Inputs are green, the variables worth localizing orange, other variables a lighter orange, the output red.
        """
        path = Path(path)
        kind = path.suffix.lower().removeprefix(".")
        if kind not in PICTURES:
            legal = ", ".join(f".{k}" for k in PICTURES)
            raise PlotError(f"Cannot draw a causal graph into '{path.name}': its suffix must be one of {legal}.")
        write_atomically(path, _picture(self, kind))

    def __repr__(self) -> str:
        lines = [f"CausalModel({', '.join(self.inputs)} -> {self.output})"]
        lines += [f"  {n} <- {', '.join(m.parents)}" for n, m in self.mechanisms.items()]
        return "\n".join(lines)


def _refuse_clashes(inputs: tuple[str, ...], mechanisms: Mapping[str, Mechanism]) -> None:
    if not inputs:
        raise PlotError("A causal model needs at least one input.")
    if len(set(inputs)) < len(inputs):
        raise PlotError(f"Input names must differ; found {', '.join(inputs)}.")
    both = set(inputs) & set(mechanisms)
    if both:
        raise PlotError(f"{', '.join(sorted(both))}: an input cannot also have a mechanism. Rename one of them.")
    for name, mechanism in mechanisms.items():
        for parent in mechanism.parents:
            if parent not in inputs and parent not in mechanisms:
                unknown(f"parent of '{name}'", parent, [*inputs, *mechanisms])


def _in_causal_order(inputs: tuple[str, ...], mechanisms: dict[str, Mechanism]) -> dict[str, Mechanism]:
    ordered: dict[str, Mechanism] = {}
    waiting = dict(mechanisms)
    while waiting:
        ready = [n for n, m in waiting.items() if all(p in inputs or p in ordered for p in m.parents)]
        if not ready:
            raise PlotError(f"The variables {', '.join(waiting)} form a cycle: a causal model must be acyclic.")
        for name in ready:
            ordered[name] = waiting.pop(name)
    return ordered


def same(a: Tensor, b: Tensor) -> Tensor:
    """Row-wise equality of two batched values of any trailing shape: [rows] booleans."""
    equal = torch.eq(a, b)
    return equal if equal.ndim == 1 else equal.flatten(1).all(dim=1)


# -- the picture of a causal graph: layers by depth, long arrows threaded between the nodes (Sugiyama's method) ---

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


def _role(model: CausalModel, name: str) -> str:
    if name == model.output:
        return "output"
    if name in model.inputs:
        return "input"
    return "variable" if name in model.variables else "other variable"


def _levels(model: CausalModel) -> dict[str, int]:
    """The depth of each variable; an input stands just above the first mechanism that reads it."""
    level = model.depth()
    for name in model.inputs:
        level[name] = min((level[n] for n in model.mechanisms if name in model.parents(n)), default=1) - 1
    return level


def _chains(model: CausalModel, level: Mapping[str, int]) -> list[list[str]]:
    """Each arrow as its ends and, for every layer it crosses, a waypoint of no width."""
    return [
        [parent, *(f"{parent}→{name}@{at}" for at in range(level[parent] + 1, level[name])), name]
        for name in model.mechanisms
        for parent in dict.fromkeys(model.parents(name))
    ]


def _layers(model: CausalModel, level: Mapping[str, int], chains: Sequence[Sequence[str]]) -> Layers:
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


def _picture(model: CausalModel, kind: str) -> bytes:
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
    axes: Any, model: CausalModel, chains: Sequence[Sequence[str]], at: Mapping[str, Point], width: Mapping[str, float]
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
    """From rim to rim: straight, or a smooth curve through the waypoints (Catmull-Rom)."""
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
