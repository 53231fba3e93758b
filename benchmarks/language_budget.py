"""What does transport buy when brute force is cheap? Accuracy against the responses spent on choosing a handle.

python benchmarks/language_budget.py        # the embedded planted nets; writes docs/results/language_budget.{json,md}

Every ranking chooses from the same sites (whole blocks, then groups of neurons of several sizes inside each variable's
block) and ends in the same (K, λ) search on the whole calibration bank; only what it ranks by, and the number of pairs
it ranks on, differ. A response is one pair resumed under one variant; a block-token is one token through one block. A
backward pass counts as two.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

import torch
from torch import Tensor

from heq_speed import ROOT, THREADS, commit, machine, say
from pages import markdown
from plot_ot.models.tiny import TINY
from plot_ot.report import style
from plot_ot.sites import Menu, blocks, whole_places
from plot_ot.stages.calibrate import correct
from plot_ot.stages.choose import Calibrate, SelectPlaces
from plot_ot.stages.coupling import Localize, ScoreSites, at_random, attribution, brute_force
from plot_ot.stages.problem import Problem, Stage, State
from plot_ot.subjects import BankRecording, Place, Store, Subject, record
from plot_ot.tasks import MultipleChoice
from plot_ot.tasks.language import PAPER_DEPTH, PHI, RESOLUTIONS, STAGE_A, STAGE_B, LanguageTask, scaled
from plot_ot.tasks.text_data import Sizes
from plot_ot.transport import Transport

BUDGETS = (4, 10, 25, 50, 100, 200)
"""Pairs to rank on."""
DRAWS = (1, 5, 20)
"""Random rankings, of which the best on calibration is kept."""
POINTER, PLANTED = "answer_pointer", "block_output.2"
NAMES = {
    "transport": "transport (`plot-native`)",
    "cosine": "cosine",
    "brute force": "brute force",
    "attribution": "attribution patching",
    "random": "random, best of n",
}


@dataclass
class Spent:
    """What was resumed since the last `clear`."""

    responses: int = 0
    block_tokens: int = 0

    def clear(self) -> None:
        self.responses = self.block_tokens = 0

    def watch(self, subject: Subject) -> None:
        """Count every resumed batch of this subject from now on."""
        resume, last = subject.resume, max(p.layer for p in subject.places)

        def counted(store: Store, rows: Tensor, start: Place, activation: Tensor, later: Mapping[str, Any]) -> Tensor:
            passes = 3 if activation.requires_grad else 1
            count = passes * activation.shape[0] * activation.shape[1]
            self.responses += count
            self.block_tokens += count * (last - start.layer)
            return resume(store, rows, start, activation, later)

        subject.resume = counted  # type: ignore[method-assign]


@dataclass(frozen=True)
class ScoreMenus:
    """The same scores on several menus at each variable's own places, each a candidate for the search."""

    kind: str
    scores: Any
    menus: tuple[Menu, ...]

    def __call__(self, problem: Problem, state: State) -> State:
        found = {}
        for v in problem.variables:
            alone, own = replace(problem, variables=(v,)), replace(state, places={v: state.places[v]})
            scored = [ScoreSites(self.kind, self.scores, menu)(alone, own).candidates[v] for menu in self.menus]
            found[v] = tuple(c for some in scored for c in some)
        return replace(state, candidates=found)


def rankings(task: LanguageTask) -> dict[str, tuple[Stage, ...]]:
    """The stages before the search, by name."""
    decoder, spec = task.subject.decoder, PHI[task.phi][1]
    menus = tuple(blocks(r) for r in scaled(RESOLUTIONS, decoder.width))
    shortlist = SelectPlaces(max(1, round(6 * len(decoder.blocks) / PAPER_DEPTH)))

    def coupled(a: Transport, b: Transport) -> tuple[Stage, ...]:
        return Localize((whole_places,), a, spec), shortlist, Localize(menus, b, spec, coupling="place")

    def by_scores(name: str, scores: Any) -> tuple[Stage, ...]:
        return ScoreSites(name, scores, whole_places), shortlist, ScoreMenus(name, scores, menus)

    return {
        "transport": coupled(STAGE_A, STAGE_B),
        "cosine": coupled(*(replace(t, kind="cosine") for t in (STAGE_A, STAGE_B))),
        "brute force": by_scores("brute-force", brute_force),
        "attribution": by_scores("attribution", attribution),
    }


def at_random_draw(task: LanguageTask, draw: int) -> tuple[Stage, ...]:
    """A random block, and a random order of the groups inside it."""
    menus = tuple(blocks(r) for r in scaled(RESOLUTIONS, task.subject.decoder.width))
    scores = at_random(draw)
    return ScoreSites("random", scores, whole_places), SelectPlaces(), ScoreMenus("random", scores, menus)


def dealt(recording: BankRecording, count: int, generator: torch.Generator) -> BankRecording:
    """Some pairs at random, dealt evenly over what they change: each variable is changed by some and kept by some."""
    bank = recording.bank
    code = sum(bank.changed[v].long() << k for k, v in enumerate(bank.variables))
    order = torch.randperm(len(bank), generator=generator)
    turn = torch.empty(len(bank), dtype=torch.long)
    for cell in code.unique():
        members = order[code[order] == cell]
        turn[members] = torch.arange(len(members))
    return recording.select(order[turn[order].argsort(stable=True)][:count])


@dataclass(frozen=True)
class Bench:
    """One net and seed, recorded."""

    task: LanguageTask
    problem: Problem
    tests: Mapping[tuple[str, str], BankRecording]
    spent: Spent

    @classmethod
    def of(cls, task: LanguageTask, seed: int) -> Bench:
        prepared = task.prepare(seed, Path())
        s, subject, spent = prepared.splits, prepared.subject, Spent()
        fit, calibration, *tests = record(subject, s.fit, s.calibration, *s.test.values())
        spent.watch(subject)
        problem = Problem(subject, fit, calibration, s.fit.variables, prepared.readout, seed, prepared.score)
        return cls(task, problem, dict(zip(s.test, tests, strict=True)), spent)

    def ranked(self, stages: Sequence[Stage], pairs: int, generator: torch.Generator) -> tuple[State, dict[str, Any]]:
        """Rank on some pairs, then search on all; and what each took."""
        few = replace(
            self.problem,
            fit=dealt(self.problem.fit, pairs, generator),
            calibration=dealt(self.problem.calibration, pairs, generator),
        )
        self.spent.clear()
        state = State.start(few)
        for stage in stages:
            state = stage(few, state)
        ranking = asdict(self.spent)
        self.spent.clear()
        state = Calibrate(self.task.search)(self.problem, state)
        return state, {"ranking": ranking, "search": asdict(self.spent)}

    def random(self, draws: int, first: int) -> tuple[State, dict[str, Any]]:
        """The best on calibration of some random rankings; all searches but one count as ranking."""
        states, spent = [], []
        for k in range(draws):
            state, one = self.ranked(at_random_draw(self.task, first + k), 4, torch.Generator().manual_seed(first + k))
            states.append(state)
            spent.append(one["search"])  # a random ranking needs no responses
        handles = {
            v: max((s.handles[v] for s in states), key=lambda h: h.chosen["calibration_score"])
            for v in self.problem.variables
        }
        ranking = {unit: sum(x[unit] for x in spent[1:]) for unit in spent[0]}
        return replace(states[0], handles=handles), {"ranking": ranking, "search": spent[0]}

    def tested(self, state: State) -> dict[str, Any]:
        """Accuracy on every test bank, and where the pointer was put."""
        right = {
            f"{v}/{kind}": float(correct(r, state.handles[v], self.problem.readout).double().mean())
            for (v, kind), r in self.tests.items()
        }
        return {
            "average": fmean(right.values()),
            "pointer": fmean(x for name, x in right.items() if name.startswith(POINTER)),
            "banks": right,
            "at_planted_block": state.handles[POINTER].places == [PLANTED],
        }


def measure(net: str, seed: int, repeats: int, sizes: Sizes, budgets: Sequence[int]) -> list[dict[str, Any]]:
    """All rankings and budgets on one net and seed."""
    bench = Bench.of(MultipleChoice(net, sizes=sizes), seed)
    found = []

    def note(ranking: str, budget: int, repeat: int, state: State, spent: Mapping[str, Any]) -> None:
        key = {"net": net, "seed": seed, "ranking": ranking, "budget": budget, "repeat": repeat}
        found.append({**key, "spent": spent, **bench.tested(state)})

    for repeat in range(repeats):
        for name, stages in rankings(bench.task).items():
            for pairs in budgets:
                generator = torch.Generator().manual_seed(1000 * seed + repeat)
                note(name, pairs, repeat, *bench.ranked(stages, pairs, generator))
        for draws in DRAWS:
            note("random", draws, repeat, *bench.random(draws, 100 * repeat))
    return found


# -- the report -----------------------------------------------------------------------------------------------


def summary(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Means and population sd over nets, seeds and repeats."""
    rows = []
    for ranking, budget in dict.fromkeys((r["ranking"], r["budget"]) for r in records):
        mine = [r for r in records if (r["ranking"], r["budget"]) == (ranking, budget)]
        row: dict[str, Any] = {"ranking": ranking, "budget": budget, "runs": len(mine)}
        for unit in ("responses", "block_tokens"):
            for part in ("ranking", "search"):
                row[f"{part}_{unit}"] = fmean(r["spent"][part][unit] for r in mine)
        for score in ("average", "pointer"):
            values = [r[score] for r in mine]
            row[score], row[f"{score}_sd"] = fmean(values), pstdev(values)
        row["at_planted_block"] = fmean(float(r["at_planted_block"]) for r in mine)
        rows.append(row)
    return rows


LOOKS: dict[str, dict[str, Any]] = {
    "transport": {"color": style.BLUE, "marker": "o"},
    "cosine": {"color": style.SKY, "marker": "s"},
    "brute force": {"color": style.ORANGE, "marker": "^"},
    "attribution": {"color": style.GREEN, "marker": "v"},
}
PANELS = {"average": "all test banks", "pointer": "the pointer's banks"}


def draw(rows: Sequence[Mapping[str, Any]], said: str, stem: Path) -> None:
    """Accuracy against the responses used for ranking, on average and for the pointer; random draws as levels."""
    with style.look():
        figure = style.new_figure(style.PAGE, 3.1)
        panels = figure.subplots(1, len(PANELS), sharey=True)
        for axes, (score, title) in zip(panels, PANELS.items(), strict=True):
            for name, look in LOOKS.items():
                mine = [r for r in rows if r["ranking"] == name]
                x, y = [r["ranking_responses"] for r in mine], [r[score] for r in mine]
                error = [r[f"{score}_sd"] / r["runs"] ** 0.5 for r in mine]
                axes.errorbar(x, y, yerr=error, label=NAMES[name].replace("`", ""), ms=3.5, elinewidth=0.7, **look)
            style.log_scale(axes)
            axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
            for r, line in zip((r for r in rows if r["ranking"] == "random"), (":", "-.", "--"), strict=False):
                count, cost = r["budget"], r["ranking_responses"]
                label = f"random, best of {count} ({cost:,.0f} responses)" if count > 1 else "random, one"
                axes.axhline(r[score], color=style.MUTED, lw=1, ls=line, label=label, zorder=1)
            axes.set_title(title)
            axes.set_xlabel("responses used for ranking")
            axes.grid(axis="y")
        panels[0].set_ylabel("accuracy on test")
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper center", ncols=4)
        style.caption(figure, said)
        style.publish(figure, stem)
        stem.with_name(f"{stem.name}.pdf").unlink()  # the page shows the picture only


def page(results: Mapping[str, Any]) -> str:
    rows = []
    for r in results["summary"]:
        unit = "drawn" if r["ranking"] == "random" else "pairs"
        rows.append(
            [
                NAMES[r["ranking"]],
                f"{r['budget']} {unit}",
                f"{r['ranking_responses']:,.0f}",
                f"{r['search_responses']:,.0f}",
                f"{r['ranking_block_tokens']:,.0f}",
                f"{r['search_block_tokens']:,.0f}",
                f"{r['at_planted_block']:.2f}",
                f"{r['average']:.3f} ± {r['average_sd']:.3f}",
                f"{r['pointer']:.3f} ± {r['pointer_sd']:.3f}",
            ]
        )
    head = ["ranked by", "on", "responses to rank", "responses to search", "block-tokens to rank"]
    head += ["block-tokens to search", "pointer at the planted block", "average", "pointer"]
    lines = [
        "# What transport buys when brute force is cheap",
        "",
        f"`{results['command']}`; commit {results['commit']}.",
        "",
        "Transport ranks sites by comparing effects. Brute force, which scores every site by itself on labelled "
        "pairs, is affordable on a small model. Which ranking leads to the better handle for the same number of "
        "responses (one pair with one site swapped)? The models are those with a [planted pointer](mcqa_tiny.md); "
        "*pointer* is that variable's accuracy, *average* that over both variables.",
        "",
        f"{results['said']} Mean ± population sd.",
        "",
        "![Accuracy against responses](figures/language_budget.png)",
        "",
        *markdown(head, rows),
        "",
    ]
    return "\n".join(lines)


def arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nets", nargs="+", default=[n for n, condition in TINY.items() if condition == "planted"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1000, 1001, 1002])
    parser.add_argument("--repeats", type=int, default=2, help="random choices of the pairs to rank on")
    parser.add_argument("--fit", type=int, default=200)
    parser.add_argument("--pairs", type=int, default=100, help="sensitive, and as many invariant, pairs per variable")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "results")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> None:
    args = arguments(argv)
    torch.set_num_threads(THREADS)
    sizes = Sizes(args.fit, args.pairs, args.pairs, 4)
    budgets = [b for b in BUDGETS if b <= min(args.fit, 2 * args.pairs)]
    records = []
    for net in args.nets:
        for seed in args.seeds:
            say(f"{net}, seed {seed}")
            records += measure(net, seed, args.repeats, sizes, budgets)
    rows = summary(records)
    search = fmean(r["search_responses"] for r in rows)
    said = (
        f"MCQA on {', '.join(args.nets)}, seeds {', '.join(map(str, args.seeds))}, {args.repeats} choices of pairs. "
        f"Rankings use {', '.join(map(str, budgets))} pairs (random: the best of {', '.join(map(str, DRAWS))} on "
        f"calibration); all end in the same (K, λ) search over all group sizes on {2 * args.pairs} calibration pairs, "
        f"{search:,.0f} responses more."
    )
    results = {
        "command": shlex.join(["python", "benchmarks/language_budget.py", *argv]),
        "commit": commit(),
        "machine": machine(),
        "said": said,
        "summary": rows,
        "records": records,
    }
    (args.out / "figures").mkdir(parents=True, exist_ok=True)
    (args.out / "language_budget.json").write_text(json.dumps(results, indent=1) + "\n")
    (args.out / "language_budget.md").write_text(page(results))
    draw(rows, f"{said} Bars: standard error.", args.out / "figures" / "language_budget")


if __name__ == "__main__":
    main(sys.argv[1:])
