"""What a submission would take: prompts, recordings and the search of every cell, counted without any weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any

import torch

from plot_ot.abstract.banks import Bank, Splits
from plot_ot.errors import PlotError
from plot_ot.mib.cells import MODELS, Cell, cells_of
from plot_ot.mib.data import Pair, fit_and_calibration
from plot_ot.mib.heads import groups_of
from plot_ot.mib.prompts import AT_ONCE, Prompts
from plot_ot.mib.questions import Example
from plot_ot.mib.residual import RANK, bank_of_rows, learning_banks, size_of, training
from plot_ot.mib.submission import Drawn, Settings, draw
from plot_ot.models.named import LanguageModel
from plot_ot.planner import (
    Cost,
    Forecast,
    Inputs,
    Machine,
    Passes,
    Prompted,
    Scene,
    Shape,
    Spread,
    Words,
    unrecorded,
)
from plot_ot.planner.costs import cost, memory, recording_cost
from plot_ot.planner.shape import class_by_name
from plot_ot.stages.forecast import CASES
from plot_ot.subjects import Place
from plot_ot.subjects.decoder.layout import ALL
from plot_ot.tasks.planning import language_shape, tokenizer_here

SAME_SHAPE = {"meta-llama/Meta-Llama-3.1-8B-Instruct": "meta-llama/Llama-3.1-8B"}
"""Models of the benchmark whose shape is known by another name."""
Counted = list[tuple[Scene, Passes]]
"""Passes, each with what it is seen through."""


@dataclass(frozen=True)
class CellPlan:
    """What one cell takes, or what all cells of a task share; by part."""

    name: str
    """A cell's folder, or a task's name where the cells of it share this."""
    prompts: int
    """Prompts that run whole."""
    responses: float
    """Pairs that are resumed under an edit, a DAS step counted once; a guess where it depends on what is found."""
    cases: Mapping[str, Mapping[str, Cost]]
    """Costs by part: as expected, and if what is not known beforehand turns out as cheap or as dear as it can."""
    seconds: Mapping[str, float]
    """By case."""
    memory: float
    """Bytes that are held at most, weights included."""

    @property
    def parts(self) -> Mapping[str, Cost]:
        """The costs that are expected."""
        return self.cases["expected"]


@dataclass(frozen=True)
class SubmissionPlan:
    """What `submit` would compute if the model answered every prompt rightly."""

    model: str
    shape: Shape
    counted: bool
    """Whether prompts are counted in words and signs, because the tokenizer is not here."""
    rows: tuple[CellPlan, ...]

    def seconds(self, case: str = "expected") -> float:
        """The seconds of all rows."""
        return sum(row.seconds[case] for row in self.rows)

    def json(self) -> dict[str, Any]:
        """The plan as plain values, ready for JSON."""
        told = {
            row.name: {
                "prompts": row.prompts,
                "responses": row.responses,
                "parts": {part: asdict(c) for part, c in row.parts.items()},
                "seconds": dict(row.seconds),
                "memory": row.memory,
            }
            for row in self.rows
        }
        seconds = {case: self.seconds(case) for case in CASES}
        return {"model": self.model, "counted_in_words": self.counted, "rows": told, "seconds": seconds}


def plan_submission(
    model: str,
    machine: Machine,
    settings: Settings | None = None,
    *,
    task: str = "all",
    variable: str | None = None,
    dtype: str = "float32",
) -> SubmissionPlan:
    """Estimate what `submit` would compute for a model's cells, if it answered every prompt rightly.

    The data are read; of the model only its configuration, and its tokenizer if it is on this machine: without it
    prompts are counted in words and signs.
    """
    settings = settings or Settings()
    kind = next((k for k, known in MODELS.items() if known == model), None) or class_by_name(model)
    cells = cells_of(kind, task, variable)
    shape = language_shape(SAME_SHAPE.get(model, model)).as_type(dtype)
    tokenizer = tokenizer_here(model)
    planned = LanguageModel(model, None, tokenizer or Words())
    rows: list[CellPlan] = []
    for name in dict.fromkeys(c.task for c in cells):
        drawn, own = draw(planned, name, settings), [c for c in cells if c.task == name]
        make = _heads if name == "ioi_task" else _residual
        rows += make(drawn, own, shape, machine, settings)
    return SubmissionPlan(model, shape, tokenizer is None, tuple(rows))


# -- whole prompts ----------------------------------------------------------------------------------------------------


def _written(prompts: Prompts, examples: Sequence[Example], new_tokens: int) -> Inputs:
    """Prompts that the model writes after: batches padded to their longest, then one token after the other."""
    found = Inputs()
    for at in range(0, len(examples), AT_ONCE):
        rows = prompts.rows(examples[at : at + AT_ONCE])
        lengths = [prompts.length(int(r)) for r in rows[:, 0]]
        running = len(rows) * (max(lengths) + new_tokens - 1)
        found += Inputs(len(rows), sum(lengths), max(lengths), running, 0, 0, new_tokens)
    return found


def _filtered(drawn: Drawn) -> Inputs:
    """Every distinct prompt of the training pairs, and of the test pairs, is answered once."""
    found = Inputs()
    for pairs in (drawn.train, drawn.test):
        examples = {e.prompt: e for p in pairs for e in (p.base, p.source)}
        found += _written(drawn.prompts, list(examples.values()), drawn.new_tokens)
    return found


def _recorded(prompts: Prompts, pairs: Sequence[Pair]) -> Inputs:
    """The distinct prompts of some pairs, recorded together."""
    bases = dict.fromkeys(prompts.row(p.base) for p in pairs)
    return _run(prompts, [*bases, *({prompts.row(p.source): None for p in pairs}.keys() - bases.keys())], len(bases))


def _run(prompts: Prompts, rows: Sequence[int], bases: int = 0) -> Inputs:
    """Prompts that run together, the first of them to be resumed."""
    every = torch.tensor(rows).unsqueeze(1)
    return Inputs.recorded(every, torch.arange(bases), _encoded(prompts)(every))


# -- blocks at tokens of interest -------------------------------------------------------------------------------------


def _residual(
    drawn: Drawn, cells: Sequence[Cell], shape: Shape, machine: Machine, settings: Settings
) -> list[CellPlan]:
    """The filter once, then for each variable a recording, the search, and the scores of a unit at every place."""
    found: list[CellPlan] = []
    for cell in cells:
        scene = _scene(drawn, cell.variable, shape, settings)
        places = [p for p in scene.shape.places if "@" in p.name]
        tested, whole = _tested(drawn, cell.variable, len(places))
        cases = {case: _search(scene, cell.variable, places, tested, settings, case) for case in CASES}
        if not found:
            found.append(_row(f"{cell.task}: filter", scene, {"filter": _filtered(drawn)}, {}, machine))
        found.append(_row(cell.folder, scene, {"recording": scene.inputs, "test": whole}, cases, machine))
    return found


def _scene(drawn: Drawn, variable: str, shape: Shape, settings: Settings) -> Scene:
    """What the search of one variable sees."""
    prompts = drawn.prompts
    wanted, fit, calibration = learning_banks(prompts, drawn.train, variable, drawn.new_tokens, settings.seed)
    subject = Prompted(
        shape,
        len(wanted),
        _encoded(prompts),
        positions=prompts.positions,
        layers=settings.layers,
        memory=settings.memory,
    )
    return _read_whole(Scene.of_subject(subject, Splits(fit, calibration, {}), len(wanted)))


def _read_whole(scene: Scene) -> Scene:
    """The scene with the whole vocabulary read after every response (a candidate answer counts as two tokens)."""
    return replace(scene, outputs=scene.shape.columns // 2)


def _encoded(prompts: Prompts) -> Any:
    def encoded(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ids, mask = prompts.encode(rows)
        return ids, mask.bool()

    return encoded


def _tested(drawn: Drawn, variable: str, places: int) -> tuple[list[Bank], Inputs]:
    """The test banks that every place responds to, and the prompts that run whole for the scores.

    Longer answers are written anew under the handle of each of the places, and nothing is resumed.
    """
    prompts, banks, whole = drawn.prompts, list[Bank](), Inputs()
    for at in range(0, len(drawn.test), AT_ONCE):
        some = drawn.test[at : at + AT_ONCE]
        if drawn.new_tokens == 1:
            whole += _recorded(prompts, some)
            banks.append(_unlabelled(f"test {at}", prompts, some, variable))
        else:
            sources = _run(prompts, [prompts.row(p.source) for p in some])
            written = _written(prompts, [p.base for p in some], drawn.new_tokens)
            whole = sum([sources + written] * places, whole)
    return banks, whole


def _unlabelled(name: str, prompts: Prompts, pairs: Sequence[Pair], variable: str) -> Bank:
    """Pairs whose labels no cost depends on."""
    rows = [(prompts.row(p.base), prompts.row(p.source), 0, 0, 0, False, p.family) for p in pairs]
    return bank_of_rows(name, variable, rows)


def _search(
    scene: Scene, variable: str, places: Sequence[Place], tested: Sequence[Bank], settings: Settings, case: str
) -> Counted:
    """The passes of `find_units` and of the scores."""
    ahead = Forecast(scene, case=case, open={variable: dict.fromkeys(places, 1.0)})
    for p in places:  # the whole vector everywhere
        ahead.add("calibration", p, scene.calibration, 1, 1.0)
    trained = dict.fromkeys(places, 1.0) if settings.method == "das" else {}
    if settings.method == "plot-das":
        ahead.walk([RANK])
        trained = ahead.some(ahead.open[variable], min(settings.places, len(places)), late=True)
    spec = training(settings.epochs)
    epochs = ahead.epochs_of(spec.least, spec.most)
    for p, chance in trained.items():
        ahead.train(p, chance, epochs, spec.batch, rank=size_of(p, settings.dimensions))
        ahead.add("calibration", p, scene.calibration, 1, chance)
    for bank in tested:
        recording = unrecorded(scene.subject, bank)
        for p in places:
            ahead.add("test", p, recording, 1, 1.0)
    return [(scene, p) for p in ahead.passes]


# -- attention heads at all tokens ------------------------------------------------------------------------------------


def _heads(drawn: Drawn, cells: Sequence[Cell], shape: Shape, machine: Machine, settings: Settings) -> list[CellPlan]:
    """Indirect objects: the heads and the linear model once, then directions in the heads for each variable."""
    prompts = drawn.prompts
    train, test = (groups_of(prompts, pairs) for pairs in (drawn.train, drawn.test))
    _, kept_out = fit_and_calibration([p for some in train.values() for p in some], settings.seed)
    scenes = {n: _head_scene(prompts, n, some, shape, settings) for n, some in {**test, **train}.items()}
    recorded = sum((_recorded(prompts, some) for split in (train, test) for some in split.values()), Inputs())
    shared: dict[str, Counted] = {case: [] for case in CASES}
    each: dict[str, Counted] = {case: [] for case in CASES}
    for case, (n, scene) in product(CASES, scenes.items()):
        heads = [p for p in scene.shape.places if p.name.endswith(f"@{ALL}")]
        start, pairs = _first_head(heads, settings, case, shape), len(train.get(n, ()))
        chosen = sum(p in kept_out for p in train.get(n, ()))
        if settings.heads is None and pairs:
            once = Forecast(scene, case=case)
            for place in heads:
                once.add("signatures", place, scene.fit, 1, 1.0)
            shared[case] += [(scene, p) for p in once.passes]
        shared[case] += _swaps("calibration", scene, start, pairs)  # the linear model
        if settings.method != "full-vector":
            each[case] += _swaps("das", scene, start, pairs - chosen, settings.epochs, backward=1)
            each[case] += _swaps("calibration", scene, start, chosen, 2)
        each[case] += _swaps("test", scene, start, len(test.get(n, ())))
    largest = scenes[max(train, key=lambda n: len(train[n]))]
    whole = {"filter": _filtered(drawn), "recording": recorded}
    once_for_all = _row("ioi_task: filter, heads, linear model", largest, whole, shared, machine)
    return [once_for_all, *(_row(cell.folder, largest, {}, each, machine) for cell in cells)]


def _head_scene(prompts: Prompts, tokens: int, pairs: Sequence[Pair], shape: Shape, settings: Settings) -> Scene:
    """Prompts of so many tokens, seen at all heads and all tokens."""
    bank = _unlabelled(f"{tokens} tokens", prompts, pairs, "output_token")
    names = len({n for p in pairs for n in p.base.values["names"]})
    subject = Prompted(shape, names, _encoded(prompts), kinds=("head_output",), tokens=tokens, memory=settings.memory)
    return Scene.of_subject(subject, Splits(bank, bank, {}), names)


def _first_head(heads: Sequence[Place], settings: Settings, case: str, shape: Shape) -> Place:
    """Where a swap of the chosen heads begins; of heads that are yet to be chosen the first is early on average."""
    if settings.heads is not None:
        layer, head = min(settings.heads)
        if not (layer < shape.blocks and head < shape.heads):
            raise PlotError(
                f"This model has {shape.blocks} blocks of {shape.heads} heads each; there is no head {layer}.{head}. "
                f"Leave the heads out to have them chosen in this model."
            )
        return next(p for p in heads if p.name.startswith(f"head_output.{layer}.{head}@"))
    average = len(heads) // (settings.head_count + 1)
    return heads[{"lowest": len(heads) - 1, "expected": average, "highest": 0}[case]]


def _swaps(part: str, scene: Scene, start: Place, pairs: int, times: int = 1, backward: int = 0) -> Counted:
    """All pairs resumed at a head so many times, in one batch each."""
    return [(scene, Passes(part, 0, start, pairs, 1, float(times), backward))] if pairs else []


# -- together ---------------------------------------------------------------------------------------------------------


def _row(
    name: str, scene: Scene, whole: Mapping[str, Inputs], cases: Mapping[str, Counted], machine: Machine
) -> CellPlan:
    """Costs and seconds of prompts that run whole and of passes; memory is that of the scene."""
    costs, seconds, held = {}, {}, 0.0
    for case in CASES:
        passes = cases.get(case, [])
        parts = {part: recording_cost(scene, inputs, machine) for part, inputs in whole.items() if inputs.count}
        for of, p in passes:
            parts[p.part] = parts.get(p.part, Cost()) + cost(p, of, machine)
        here = Forecast(scene, case=case, passes=[p for of, p in passes if of is scene])
        needed = memory(here, scene, machine)
        spread, held = Spread.of(needed, machine, 1), max(held, needed.total)
        costs[case], seconds[case] = parts, sum(c.seconds(machine, spread) for c in parts.values())
    for case, end in (("lowest", min), ("highest", max)):  # fewer blocks may be cut into more batches
        seconds[case] = end(seconds[case], seconds["expected"])
    responses = sum(p.responses for _, p in cases.get("expected", []))
    return CellPlan(name, sum(inputs.count for inputs in whole.values()), responses, costs, seconds, held)
