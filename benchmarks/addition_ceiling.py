"""Why is `plot-native` weak? The best that swapping coordinates can do, by search over all subsets of them.

At each carry's timestep every subset of coordinates is swapped with each of five strengths and scored on calibration;
the best one is tested once, beside the transport, closed-form and DAS handles of the same network. 255 subsets (d = 8)
are searched in full. 65,535 (d = 16) take minutes a network: by default a beam search looks for the best, and random
subsets show the spread; `--exhaustive 8 16` searches them all.

python benchmarks/addition_ceiling.py --seeds 1000 1001     # writes docs/results/addition_ceiling.{json,md}, figures
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from torch import Tensor

from heq_speed import ROOT, THREADS, commit, say, table
from plot_ot.edits import EditBatch, Frame, Gathered, resume_edited
from plot_ot.handles import Handle, handle_from_edits
from plot_ot.report import style
from plot_ot.stages.calibrate import correct, pair_weights, scored
from plot_ot.stages.problem import Problem
from plot_ot.studies.task import SeedFailed
from plot_ot.subjects import BankRecording, Place, record
from plot_ot.tasks.addition import BinaryAddition
from plot_ot.tasks.addition_data import RECIPES

STRENGTHS = (0.5, 1.0, 1.5, 2.0, 4.0)
METHODS = ("plot-native", "plot-pca", "plot-closed-form", "das")
SUBSET, GAINS, PATCH = "best subset", "trained gains", "full patch"
COORDINATE = {
    "plot-native": ("D", style.BLUE),
    SUBSET: ("o", style.VERMILLION),
    GAINS: ("^", style.PURPLE),
}
ROTATED = {"plot-pca": "P", "plot-closed-form": "X", "das": "*"}
"""Marks of the handles that swap coordinates, and of those that do not."""
BEAM, RANDOM, STARTS = 48, 1500, 16
CHUNK = 4096
"""Variants scored at once."""

Score = Callable[[Tensor], Tensor]
"""Calibration scores of gains [variants, d]."""


# -- searching subsets ----------------------------------------------------------------------------------------


def subsets(d: int) -> Tensor:
    """All subsets of coordinates but the empty one, as masks [2^d - 1, d]."""
    return (torch.arange(1, 2**d).unsqueeze(1) >> torch.arange(d) & 1).float()


def score_masks(masks: Tensor, score: Score) -> Tensor:
    """Scores [masks, strengths]."""
    strengths = torch.tensor(STRENGTHS)
    parts = [score((m.unsqueeze(1) * strengths[:, None]).flatten(0, 1)) for m in masks.split(CHUNK // len(STRENGTHS))]
    return torch.cat(parts).unflatten(0, (len(masks), len(STRENGTHS)))


def beam_search(d: int, score: Score, width: int = BEAM) -> tuple[Tensor, Tensor]:
    """Subsets growing by a coordinate at a time, the best `width` of each size kept: (masks, scores) of all tried."""
    kept, tried = torch.zeros(1, d), []
    for _ in range(d):
        grown = (kept.unsqueeze(1) + torch.eye(d)).flatten(0, 1)
        masks = grown[(grown <= 1).all(dim=1)].unique(dim=0)
        scores = score_masks(masks, score)
        tried.append((masks, scores))
        kept = masks[scores.max(dim=1).values.topk(min(width, len(masks))).indices]
    return torch.cat([m for m, _ in tried]), torch.cat([s for _, s in tried])


def random_masks(d: int, count: int, generator: torch.Generator) -> Tensor:
    """Random subsets, the same number of every size."""
    order = torch.rand(count, d, generator=generator).argsort(dim=1).argsort(dim=1)
    sizes = torch.arange(count) % d + 1
    return (order < sizes.unsqueeze(1)).float().unique(dim=0)


def train_gains(
    problem: Problem, place: Place, variable: str, starts: Tensor, steps: int = 300, batch: int = 512
) -> Tensor:
    """A gain for every coordinate, by Adam on the fit bank from each start: axis-aligned handles beyond subsets."""
    gains = starts.clone().requires_grad_()
    adam, generator = torch.optim.Adam([gains], lr=0.05), problem.generator()
    labels, gathered = problem.fit.bank.labels[variable], [Gathered(problem.fit, place)]
    for _ in range(steps):
        pairs = torch.randint(len(problem.fit), (batch,), generator=generator)
        outputs = resume_edited(problem.fit, [EditBatch(place, Frame.identity(place.width), gains)], pairs, gathered)
        adam.zero_grad()
        problem.readout.loss(outputs, labels[pairs]).mean(dim=1).sum().backward()
        adam.step()
    return gains.detach()


# -- one network ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Net:
    """A network, recorded."""

    problem: Problem
    tests: Mapping[tuple[str, str], BankRecording]

    def score(self, place: Place, variable: str) -> Score:
        calibration = self.problem.calibration
        weights = pair_weights(calibration, variable, self.problem.score)
        frame = Frame.identity(place.width)
        return lambda g: scored(calibration, [EditBatch(place, frame, g)], variable, weights, self.problem.readout)

    def test(self, handle: Handle) -> dict[str, float]:
        """Sensitivity and invariance of a handle on the test banks."""
        return {
            kind: float(correct(r, handle, self.problem.readout).double().mean())
            for (v, kind), r in self.tests.items()
            if v == handle.variable
        }


def prepare(task: BinaryAddition, seed: int, cache: Path) -> Net:
    p = task.prepare(seed, cache)
    s = p.splits
    fit, calibration, *tests = record(p.subject, s.fit, s.calibration, *s.test.values())
    problem = Problem(p.subject, fit, calibration, s.fit.variables, p.readout, seed, p.score)
    return Net(problem, dict(zip(s.test, tests, strict=True)))


def search(net: Net, place: Place, variable: str, exhaustive: bool) -> dict[str, Any]:
    """The best subset and strength on calibration, the best trained gains, and how all subsets score."""
    d, score = place.width, net.score(place, variable)
    started = time.perf_counter()
    if exhaustive:
        masks = shown = subsets(d)
        scores = best_of = score_masks(masks, score)
    else:
        masks, scores = beam_search(d, score)
        shown = random_masks(d, RANDOM, net.problem.generator(1))
        best_of = score_masks(shown, score)
    at, s = min(  # ties: fewest coordinates, then smallest strength
        (scores >= scores.max() - 1e-9).nonzero().tolist(), key=lambda x: (int(masks[x[0]].sum()), x[1])
    )
    seconds = time.perf_counter() - started
    top = scores.max(dim=1).values.topk(min(STARTS, len(masks))).indices
    starts = masks[top] * torch.tensor(STRENGTHS)[scores[top].argmax(dim=1)].unsqueeze(1)
    gains = torch.cat([starts, train_gains(net.problem, place, variable, starts)])
    trained = gains[int(score(gains).argmax())]
    spread = best_of.max(dim=1).values
    return {
        "handles": {
            SUBSET: _handle(net, place, variable, masks[at] * STRENGTHS[s], float(scores[at, s])),
            GAINS: _handle(net, place, variable, trained, float(score(trained.unsqueeze(0)))),
            PATCH: _handle(net, place, variable, torch.ones(d), float(score(torch.ones(1, d)))),
        },
        "strength": STRENGTHS[s],
        "coordinates": masks[at].nonzero().squeeze(1).tolist(),
        "subsets": len(masks),
        "search": "all subsets" if exhaustive else f"beam search, width {BEAM}",
        "seconds": seconds,
        "shown": [[int(m.sum()), round(float(x), 4)] for m, x in zip(shown, spread, strict=True)],
    }


def _handle(net: Net, place: Place, variable: str, gains: Tensor, score: float) -> Handle:
    edit = [EditBatch(place, Frame.identity(place.width), gains.unsqueeze(0))]
    return handle_from_edits(variable, edit, 0, net.problem.subject, {"calibration_score": score})


def measure(task: BinaryAddition, seed: int, cache: Path, exhaustive: bool) -> dict[str, Any]:
    """Everything about one network: per carry, the search and the methods' handles, tested once."""
    net = prepare(task, seed, cache)
    states = {m: task.methods()[m].run(net.problem)[0] for m in METHODS}
    carries = {}
    for v in net.problem.variables:
        place = states["plot-native"].places[v][0]
        found = search(net, place, v, exhaustive)
        handles = {**found.pop("handles"), **{m: s.handles[v] for m, s in states.items()}}
        found["place"] = place.name
        found["handles"] = {
            name: {"calibration": h.chosen["calibration_score"], "size": h.size, "place": h.places[0], **net.test(h)}
            for name, h in handles.items()
        }
        carries[v] = found
    return {"width": task.width, "recipe": task.recipe, "seed": seed, "carries": carries}


# -- the report -----------------------------------------------------------------------------------------------

ROWS = (PATCH, "plot-native", SUBSET, GAINS, "plot-pca", "plot-closed-form", "das")


def average(net: Mapping[str, Any], name: str, bank: str = "test") -> float:
    """Mean over carries, on test over both kinds of bank."""
    handles = [c["handles"][name] for c in net["carries"].values()]
    kinds = ("calibration",) if bank == "calibration" else ("sensitivity", "invariance")
    return fmean(h[k] for h in handles for k in kinds)


def _spread(values: Sequence[float]) -> str:
    return f"{fmean(values):.3f}" + (f" ± {stdev(values):.3f}" if len(values) > 1 else "")


def markdown(results: Mapping[str, Any]) -> str:
    lines = [
        "# Binary addition: how far coordinates can go",
        "",
        f"`{results['command']}`, commit {results['commit']}.",
        "",
    ]
    lines += [
        "How well can a handle do that swaps single coordinates of the adder's state, without rotating it? "
        f"`{SUBSET}` is the subset of coordinates at a carry's timestep that is best on calibration, swapped with "
        f"strength {', '.join(map(str, STRENGTHS[:-1]))} or {STRENGTHS[-1]}. `{GAINS}` goes further: every coordinate "
        f"has a gain of its own, trained on the fit bank from the {STARTS} best subsets and chosen on calibration. The "
        "other rows are methods of the [study](addition.md). All handles are tested once, on the paper's six banks; "
        "mean ± sample sd over seeds.",
        "",
    ]
    for width, recipe in dict.fromkeys((n["width"], n["recipe"]) for n in results["nets"]):
        nets = [n for n in results["nets"] if (n["width"], n["recipe"]) == (width, recipe)]
        carries = list(nets[0]["carries"])
        how = nets[0]["carries"][carries[0]]["search"]
        rows = []
        for name in ROWS:
            per_carry = [
                _spread(
                    [fmean(n["carries"][v]["handles"][name][k] for k in ("sensitivity", "invariance")) for n in nets]
                )
                for v in carries
            ]
            sizes = [n["carries"][v]["handles"][name]["size"] for n in nets for v in carries]
            calibration, test = (_spread([average(n, name, b) for n in nets]) for b in ("calibration", "test"))
            rows.append([f"`{name}`", *per_carry, f"**{test}**", calibration, f"{fmean(sizes):.1f}"])
        seeds = ", ".join(str(n["seed"]) for n in nets)
        seconds = fmean(sum(c["seconds"] for c in n["carries"].values()) for n in nets)
        head = ["handle", *(f"{v}, test" for v in carries), "average, test", "average, calibration", "directions"]
        lines += [f"## d = {width}, recipe `{recipe}`, seeds {seeds}", "", table(head, rows)]
        lines += [f"Search: {how}, {seconds:.1f} s per network.", ""]
    for failure in results["failures"]:
        lines.append(
            f"Failed: d = {failure['width']}, `{failure['recipe']}`, seed {failure['seed']}: {failure['reason']}"
        )
    lines += [f"![d = {w}](figures/{figure_name(w, results)})" for w in sorted({n["width"] for n in results["nets"]})]
    return "\n".join(lines) + "\n"


def figure_name(width: int, results: Mapping[str, Any]) -> str:
    """The narrowest network's figure has the plain name."""
    narrowest = min(n["width"] for n in results["nets"])
    return "addition_ceiling.png" if width == narrowest else f"addition_ceiling_d{width}.png"


def draw(nets: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Per recipe: subsets of the first network by size, one panel per carry; and every network's test accuracy."""
    recipes = list(dict.fromkeys(n["recipe"] for n in nets))
    carries = list(nets[0]["carries"])
    with style.look():
        figure = style.new_figure(style.PAGE, 0.85 + 1.7 * len(recipes))
        grid = figure.subplots(len(recipes), len(carries) + 1, squeeze=False, width_ratios=[1] * len(carries) + [0.75])
        for line, recipe in zip(grid, recipes, strict=True):
            mine = [n for n in nets if n["recipe"] == recipe]
            for ax, v in zip(line, carries, strict=False):
                draw_subsets(ax, mine[0]["carries"][v], mine[0]["width"])
                ax.set_title(f"{v} in {mine[0]['carries'][v]['place']}")
                ax.set_ylim(0.43, 1.03)
                ax.tick_params(labelleft=ax is line[0])
            line[0].set_ylabel(f"recipe {recipe}\ncalibration score")
            draw_tests(line[-1], mine)
            line[-1].set_xlim(min(0.6, *(average(n, name) for n in nets for name in ROWS)) - 0.02, 1.01)
        for ax in grid[-1, :-1]:
            ax.set_xlabel("coordinates swapped", x=0.36)
        grid[-1, -1].set_xlabel("test accuracy")
        handles, names = grid[0, 0].get_legend_handles_labels()
        figure.legend(handles, names, loc="outside upper left", ncols=8, columnspacing=1.0, handletextpad=0.2)
        first, seeds = nets[0], sorted({n["seed"] for n in nets})
        shown, search = (first["carries"][carries[0]][k] for k in ("shown", "search"))
        whole = search == "all subsets"
        tested = "one seed" if len(seeds) == 1 else f"{len(seeds)} seeds (dots) and their mean"
        style.caption(
            figure,
            f"d = {first['width']}. Left: seed {first['seed']}; {'all ' if whole else ''}{len(shown):,}"
            f"{'' if whole else ' random'} subsets of the state's coordinates, each at the best of {len(STRENGTHS)} "
            "strengths.",
            "" if whole else f"Best subset by {search}.",
            f"Right: average exact accuracy on test, {tested}.",
        )
        style.publish(figure, path.with_suffix(""))


def draw_subsets(ax: Axes, carry: Mapping[str, Any], width: int) -> None:
    """Scores of subsets by size, the coordinate handles among them, and the rotated ones at the right edge."""
    sizes, scores = np.array(carry["shown"]).T
    jitter = np.random.default_rng(0).uniform(-0.3, 0.3, len(sizes))
    ax.plot(sizes + jitter, scores, "o", ms=1.6, mew=0, color=style.SKY, alpha=0.6, label="subset", rasterized=True)
    h = carry["handles"]
    ax.axhline(h[SUBSET]["calibration"], color=style.VERMILLION, lw=0.6, ls="--", zorder=1)
    ax.plot(h[PATCH]["size"], h[PATCH]["calibration"], "s", ms=4, color=style.MUTED, label=PATCH)
    for name, (mark, colour) in COORDINATE.items():
        at = h[name]["size"], h[name]["calibration"]
        ax.plot(*at, mark, ms=5, mec=colour, mfc="white", mew=1.3, label=name, zorder=4)
    step = width / 8
    for k, (name, mark) in enumerate(ROTATED.items()):
        x = width + step * (1.6 + 0.9 * k)
        ax.plot(x, h[name]["calibration"], mark, ms=6, color=style.GREEN, mew=0, label=name, zorder=4)
    ax.axvspan(width + 0.7 * step, width + 4.2 * step, color=style.BLANK, lw=0, zorder=0)
    every = max(1, width // 4 if width > 8 else 1)
    ticks = range(every, width + 1, every)
    ax.set_xticks([*ticks, width + 2.5 * step], [*ticks, "other\nbases"])
    ax.tick_params(axis="x", labelsize=7)
    ax.set_xlim(0.3, width + 4.2 * step)
    ax.grid(axis="y")


def draw_tests(ax: Axes, nets: Sequence[Mapping[str, Any]]) -> None:
    """Average test accuracy of every network and their mean, by handle."""
    for y, name in enumerate(ROWS):
        values = [average(n, name) for n in nets]
        if len(values) > 1:
            ax.plot(values, [y] * len(values), "o", ms=2.5, color=style.ORANGE, zorder=3)
        ax.plot(fmean(values), y, "|", ms=8, mew=1.8, color=style.INK, zorder=4)
        ax.text(1.03, y, f"{fmean(values):.3f}", transform=ax.get_yaxis_transform(), va="center", fontsize=6.5)
    style.name_rows(ax, [n.removeprefix("plot-") for n in ROWS])
    ax.tick_params(axis="both", labelsize=7)


# -- the command ----------------------------------------------------------------------------------------------


def arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1000])
    parser.add_argument("--widths", type=int, nargs="+", default=[8])
    parser.add_argument("--recipes", nargs="+", choices=list(RECIPES), default=list(RECIPES))
    parser.add_argument("--exhaustive", type=int, nargs="*", default=[8], help="widths whose subsets are all searched")
    parser.add_argument("--cache", type=Path, default=Path("~/.cache/plot-ot"), help="where backbones are kept")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "results")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> None:
    args = arguments(argv)
    torch.set_num_threads(THREADS)
    command = shlex.join(["python", "benchmarks/addition_ceiling.py", *argv])
    results: dict[str, Any] = {"command": command, "commit": commit(), "nets": [], "failures": []}
    for width in args.widths:
        for recipe in args.recipes:
            for seed in args.seeds:
                say(f"d = {width}, recipe {recipe}, seed {seed}")
                task = BinaryAddition(width, recipe=recipe)
                try:
                    net = measure(task, seed, args.cache.expanduser(), width in args.exhaustive)
                    results["nets"].append(net)
                except SeedFailed as e:
                    failure = {"width": width, "recipe": recipe, "seed": seed, "reason": str(e)}
                    results["failures"].append(failure)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "addition_ceiling.json").write_text(json.dumps(results) + "\n")
    (args.out / "addition_ceiling.md").write_text(markdown(results))
    for width in dict.fromkeys(n["width"] for n in results["nets"]):
        draw([n for n in results["nets"] if n["width"] == width], args.out / "figures" / figure_name(width, results))
    print(markdown(results))


if __name__ == "__main__":
    main(sys.argv[1:])
