"""Draw the figures of docs/five-pictures.md from one run of examples/pointer.py on the embedded net.

python scripts/five_pictures.py          (about half a CPU minute)
"""

from __future__ import annotations

import runpy
import tempfile
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure

import plot_ot
from plot_ot.files.run_reading import read_run
from plot_ot.report import style
from plot_ot.report.words import percent, place_words
from plot_ot.report.zoom import Zoom

ROOT = Path(__file__).parent.parent
OUT = ROOT / "docs" / "figures"
SHOWN = 4
"""Pairs whose effects are drawn, for each line that the source can point to."""


def main() -> None:
    """Run the example once, then draw."""
    torch.set_num_threads(1)
    example = runpy.run_path(str(ROOT / "examples" / "pointer.py"))
    hypothesis, inputs = example["hypothesis"], example["inputs"]
    base, source = telling_pairs(hypothesis, inputs)
    subject = plot_ot.load_subject("tiny", hypothesis)
    result = plot_ot.localize(subject, hypothesis, inputs)
    print(result)
    drawn = {
        "swap": draw_swap(hypothesis, base[:1], source[:1]),
        "effects": draw_effects(hypothesis, subject, result.handles["pointer"], base, source),
        "match": draw_match(result),
        "zoom": draw_zoom(result),
        "check": draw_check(result),
    }
    OUT.mkdir(exist_ok=True)
    for k, (name, figure) in enumerate(drawn.items(), start=1):
        figure.savefig(OUT / f"five-{k}-{name}.png", dpi=160)


def telling_pairs(h: plot_ot.Hypothesis, inputs: list[dict[str, Any]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Neighbouring inputs whose swapped pointer leads to a letter that neither of them answers."""
    rows = h.rows(inputs)
    base, source = rows[:-1], rows[1:]
    swapped = h.causal.swap(base, source, "pointer")
    tells = (swapped != h.causal.answer(base)) & (swapped != h.causal.answer(source))
    return base[tells], source[tells]


def pointers(h: plot_ot.Hypothesis, rows: torch.Tensor) -> list[int]:
    """The line that each input points to, from 0."""
    known = h.values("pointer")
    return [known[code] for code in h.causal.run(rows)["pointer"].tolist()]


def draw_swap(h: plot_ot.Hypothesis, base: torch.Tensor, source: torch.Tensor) -> Figure:
    """Two prompts, what the hypothesis says about each, and what it predicts when the pointer is swapped."""
    texts = [h.render(rows)[0] for rows in (base, source)]
    letters = [h.answers[int(h.causal.answer(rows))] for rows in (base, source)]
    lines = [pointers(h, rows)[0] for rows in (base, source)]
    predicted = h.answers[int(h.causal.swap(base, source, "pointer"))]
    figure = style.new_figure(style.PAGE, 2.7)
    [left, right] = figure.subplots(1, 2)
    for ax, text, title, line, letter in zip((left, right), texts, ("base", "source"), lines, letters, strict=True):
        ax.axis("off")
        ax.set_title(title, loc="left", fontweight="bold")
        wrapped = text.replace("? ", "?\n").replace(". What", ".\nWhat").splitlines()
        first = next(k for k, words in enumerate(wrapped) if words[1:3] == ". ")
        for k, words in enumerate(wrapped):
            on = k == first + line
            colour = style.VERMILLION if on else style.INK
            ax.text(0.0, 0.97 - 0.12 * k, words, color=colour, family="monospace", fontsize=8, va="top")
        ax.text(0.0, 0.0, f"pointer: line {line + 1}     answer: {letter}", va="bottom", color=style.MUTED)
    left.text(
        0.0,
        -0.13,
        f"Base, with the source's pointer (line {lines[1] + 1}): the hypothesis predicts {predicted}.",
        va="bottom",
        color=style.VERMILLION,
        fontweight="bold",
    )
    return figure


def draw_effects(
    h: plot_ot.Hypothesis, subject: plot_ot.Subject, found: plot_ot.Handle, base: torch.Tensor, source: torch.Tensor
) -> Figure:
    """What a swap changes in the answers: of the pointer in the hypothesis, of blocks and the handle in the network."""
    lines = pointers(h, source)
    shown = [k for line in range(4) for k in [k for k, at in enumerate(lines) if at == line][:SHOWN]]
    base, source = base[shown], source[shown]
    count = len(h.answers)
    hot = torch.nn.functional.one_hot
    before = h.causal.answer(base)
    panels = [("hypothesis:\nthe pointer", (hot(h.causal.swap(base, source, "pointer"), count) - hot(before, count)))]
    places = [p for p in subject.places if p.name.startswith("block_output.")]
    nothing = plot_ot.full_patch("pointer", places[-1:], subject).apply(subject, base, base).softmax(-1)
    for p in places:
        effect = plot_ot.full_patch("pointer", [p], subject).apply(subject, base, source).softmax(-1) - nothing
        panels.append((f"network:\nblock {p.name.rpartition('.')[2]}", effect))
    panels.append(("network:\nthe handle", found.apply(subject, base, source).softmax(-1) - nothing))
    figure = style.new_figure(style.PAGE, 2.7)
    axes = figure.subplots(1, len(panels), sharey=True)
    for ax, (title, effect) in zip(axes, panels, strict=True):
        image = ax.imshow(effect, cmap="RdBu_r", vmin=-1, vmax=1, aspect="auto", interpolation="nearest")
        ax.set_title(title, fontsize=7)
        ax.set_xticks(range(count), h.answers, fontsize=6)
        ax.tick_params(length=0)
        for line in range(1, 4):
            ax.axhline(SHOWN * line - 0.5, color=style.MUTED, lw=0.5)
    middles = [SHOWN * line + (SHOWN - 1) / 2 for line in range(4)]
    axes[0].set_yticks(middles, [f"line {line + 1}" for line in range(4)], fontsize=7)
    axes[0].set_ylabel("source points to")
    bar = figure.colorbar(image, ax=axes[-1], fraction=0.15)
    bar.set_label("change of the answer's probability", fontsize=7)
    bar.ax.tick_params(labelsize=6)
    return figure


def draw_match(result: plot_ot.Result) -> Figure:
    """The coupling's mass on every block, and how well handles inside the block do on calibration pairs."""
    with tempfile.TemporaryDirectory() as folder:
        result.save(Path(folder) / "run")
        reading = read_run(Path(folder) / "run")
        level = Zoom(reading).levels(reading.results["selection"][0])[0]
    figure = style.new_figure(style.PAGE, 2.3)
    [left, right] = figure.subplots(1, 2, sharey=True)
    colours = [style.VERMILLION if i.on else style.FAINT for i in level.items]
    left.barh(
        [place_words(i.name) for i in level.items],
        [(i.mass or 0) / (level.total or 1) for i in level.items],
        color=colours,
    )
    left.invert_yaxis()
    left.set_xlabel("share of the pointer's mass")
    right.set_xlabel("calibration accuracy of the best handle")
    right.set_xlim(0, 1.05)
    for k, item in enumerate(level.items):
        if item.score is None:
            right.text(0.02, k, "not tried: too little mass", va="center", fontsize=7, color=style.MUTED)
        else:
            right.plot([item.score], [k], "o", color=style.VERMILLION if item.on else style.INK)
    return figure


def draw_zoom(result: plot_ot.Result) -> Figure:
    """What each direction of the handle reads and writes, neuron by neuron."""
    [edit] = result.handles["pointer"].edits
    on = edit.gains != 0
    reads, writes = edit.frame.read[:, on].T, edit.frame.write[:, on].T
    figure = style.new_figure(style.PAGE, 2.7)
    axes = figure.subplots(len(reads), 2, sharex=True, squeeze=False)
    for k, pair in enumerate(zip(reads, writes, strict=True)):
        for ax, part, colour in zip(axes[k], pair, (style.BLUE, style.VERMILLION), strict=True):
            ax.bar(range(len(part)), part / part.abs().max(), width=1.0, color=colour, zorder=2)
            ax.set_yticks([])
            ax.axvspan(-0.5, 15.5, color=style.BLANK, zorder=0, lw=0)
        axes[k][0].set_ylabel(f"direction {k + 1}", fontsize=7)
    axes[0][0].set_title("reads", loc="left")
    axes[0][1].set_title("writes", loc="left")
    for ax in axes[-1]:
        ax.set_xlabel("neuron of block 2")
    return figure


def draw_check(result: plot_ot.Result) -> Figure:
    """Accuracy on test pairs that can tell, beside the controls."""
    told = result.verdicts["pointer"].evidence
    bars = {
        "this handle": told["handle"],
        "whole block swapped": told["full_patch"],
        "copy the source's answer": told["copy_source"],
        "random handles, same search": told["random_mean"],
        "random directions of this block": told["random_subspace"],
    }
    figure = style.new_figure(style.PAGE, 2.0)
    ax = figure.subplots()
    ax.barh(list(bars), list(bars.values()), color=[style.VERMILLION, *[style.FAINT] * (len(bars) - 1)])
    ax.plot([told["handle_low"], told["handle_high"]], [0, 0], color=style.INK, lw=2)
    for k, value in enumerate(bars.values()):
        inside = value > 0.9
        where = {"x": value - 0.08, "ha": "right", "color": "white"} if inside else {"x": value + 0.01, "ha": "left"}
        ax.text(y=k, s=percent(value), va="center", **where)
    ax.invert_yaxis()
    ax.set_xlim(0, 1.02)
    ax.set_xlabel(f"right answers on the {int(told['discriminating'])} test pairs that can tell")
    return figure


if __name__ == "__main__":
    with style.look():
        main()
