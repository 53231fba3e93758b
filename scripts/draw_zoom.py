"""Draw docs/figures/zoom.png: the paper's Figure 1 with the numbers of an embedded net in which the answer is known.

python scripts/draw_zoom.py          (about one CPU minute)
"""

from __future__ import annotations

import random
import re
import tempfile
from pathlib import Path

import torch
from matplotlib.figure import Figure
from matplotlib.patches import ConnectionPatch

import plot_ot
from plot_ot.files.run_reading import read_run
from plot_ot.methods import COARSE, FEW, KEPT, WIDE_FINE, WIDE_SEARCH
from plot_ot.report import style
from plot_ot.report.zoom import Level, Zoom
from plot_ot.sites import tokens
from plot_ot.stages.choose import Calibrate, SelectPlaces, SelectTokens
from plot_ot.stages.coupling import Localize

OUT = Path(__file__).parent.parent / "docs" / "figures" / "zoom.png"
TEMPLATE = (
    "Question: A {noun} is {color}. What color is a {noun}?\n{s0}. {c0}\n{s1}. {c1}\n{s2}. {c2}\n{s3}. {c3}\nAnswer:"
)


def colour_questions() -> tuple[plot_ot.Hypothesis, list[dict[str, str]]]:
    """Which line, which letter; with a token of the question and one of the options named."""
    h = plot_ot.Hypothesis(template=TEMPLATE, positions={"fact": "{color}", "option": "{c1}"})
    h.variable(name="pointer", parents=["color", "c0", "c1", "c2", "c3"])(lambda color, *c: c.index(color))
    h.variable(name="letter", parents=["pointer", "s0", "s1", "s2", "s3"])(lambda pointer, *s: s[pointer])
    h.output(name="answer", parents=["letter"])(lambda letter: letter)
    rng, inputs = random.Random(1000), []
    for _ in range(300):
        colours, letters = rng.sample(["red", "blue", "green", "black", "white", "gray"], 4), rng.sample("ABCDEFGH", 4)
        given = {"noun": rng.choice(["chair", "bear", "brick", "spoon", "lemon"]), "color": rng.choice(colours)}
        inputs.append(given | {f"c{k}": c for k, c in enumerate(colours)} | {f"s{k}": s for k, s in enumerate(letters)})
    return h, inputs


def levels() -> list[Level]:
    """Tokens, blocks, groups of eight neurons: one coupling each, for the pointer."""
    spec = plot_ot.SignatureSpec(normalise="unit", centre=True)
    stages = (
        Localize((tokens,), COARSE, spec),
        SelectTokens(2),
        Localize((plot_ot.whole_places,), COARSE, spec),
        SelectPlaces(FEW, keep=KEPT),
        Localize((plot_ot.blocks(8),), WIDE_FINE, spec, coupling="place"),
        Calibrate(WIDE_SEARCH),
    )
    method = plot_ot.Method("zoom", "tokens, blocks, groups of neurons", stages)
    hypothesis, inputs = colour_questions()
    result = plot_ot.localize(
        plot_ot.load_subject("planted-1000"), hypothesis, inputs, method=method, size=100, seed=1000
    )
    print(result)
    with tempfile.TemporaryDirectory() as folder:
        result.save(Path(folder) / "run")
        reading = read_run(Path(folder) / "run")
        [selection] = [s for s in reading.results["selection"] if s["variable"] == "pointer" and s["method"] == "zoom"]
        return Zoom(reading).levels(selection)


def draw(found: list[Level]) -> Figure:
    """Bars of mass, level by level; a wedge from what was taken to the next level."""
    figure = style.new_figure(style.PAGE, 2.6)
    axes = figure.subplots(1, len(found))
    figure.get_layout_engine().set(wspace=0.1)
    for k, (ax, level) in enumerate(zip(axes, found, strict=True)):
        total = level.total or 1.0
        names = [re.sub(r".*(\[.*\])", r"\1", i.name).replace("block_output.", "block ") for i in level.items]
        colours = [style.VERMILLION if i.on else style.FAINT for i in level.items]
        ax.barh(range(len(names)), [(i.mass or 0) / total for i in level.items], color=colours)
        ax.set_yticks(range(len(names)), names)
        ax.invert_yaxis()
        ax.set_title(f"{k + 1}. {level.title}", loc="left")
        ax.set_xlabel("share of mass")
        if k:
            taken = [j for j, i in enumerate(found[k - 1].items) if i.on]
            before = axes[k - 1]
            for y, corner in ((min(taken) - 0.4, 1), (max(taken) + 0.4, 0)):
                wedge = ConnectionPatch(
                    (1.02, y),
                    (-0.34, corner),
                    before.get_yaxis_transform(),
                    ax.transAxes,
                    color=style.MUTED,
                    lw=0.6,
                    ls=":",
                )
                figure.add_artist(wedge)
    return figure


if __name__ == "__main__":
    torch.set_num_threads(1)
    with style.look():
        drawn = draw(levels())
        OUT.parent.mkdir(exist_ok=True)
        drawn.savefig(OUT, dpi=200)
