"""Localize variables of your own causal model in your own network, in one call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from plot_ot.banks import Bank, Splits, draw_pairs
from plot_ot.causal import CausalModel, same
from plot_ot.errors import PlotError, unknown
from plot_ot.handles import Handle
from plot_ot.methods import Method, random_sites
from plot_ot.runs import Json
from plot_ot.signatures import Readout, readout
from plot_ot.stages.calibrate import Search
from plot_ot.stages.choose import Calibrate, TrainDas
from plot_ot.stages.localize import Localize
from plot_ot.study import Prepared, Study
from plot_ot.subjects import Subject
from plot_ot.transport import Transport

STRENGTHS = (0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5, *(float(x) for x in range(4, 21)))
SEARCH = Search(tuple(range(1, 21)), STRENGTHS, ties="loss")
"""Up to K equal weights, λ = K takes the K sites whole: strengths reach as far as sizes do."""


def layered(search: Search = SEARCH) -> Method:
    """One coupling per place over its neurons, ε in units of the median cost; calibration picks place, ε, K and λ."""
    transport = Transport(epsilon=(0.01, 0.03, 0.1, 0.5), scale="median")
    summary = "one coupling per layer, ε in units of the median cost; calibration picks layer, ε, K and λ"
    return Method("plot-layered", summary, (Localize(transport=transport, coupling="place"), Calibrate(search)))


METHODS = {
    "plot-layered": layered(),
    "das": Method("das", "DAS at every place, every subspace size", (TrainDas(),), kind="das"),
}


@dataclass(frozen=True)
class Result:
    """Handles by variable, with what the test banks say about them."""

    handles: Mapping[str, Handle]
    verdicts: Mapping[str, Json]
    records: Sequence[Json]
    seconds: float

    def __str__(self) -> str:
        return "\n".join(str(v["sentence"]) for v in self.verdicts.values())


def localize(
    subject: Subject,
    causal: CausalModel,
    inputs: Int[Tensor, "rows inputs"],
    *,
    look: str | Readout = "softmax",
    method: str | Method = "plot-layered",
    pairs: int = 1000,
    seed: int = 0,
) -> Result:
    """Where in `subject` do the variables of `causal` live?

    `inputs` are rows of the causal model's inputs that the network can be run on. Rows it answers correctly are split
    into three disjoint pools; base/source pairs balanced over which variables change are drawn from each, for fitting
    the couplings, calibrating the handles, and testing them once. `method` is `plot-layered` (neurons, no training),
    `das` (learned subspaces of every place), or a `Method` of your own.
    """
    if isinstance(method, str):
        if method not in METHODS:
            unknown("method", method, METHODS)
        method = METHODS[method]
    look = readout(look)
    generator = torch.Generator().manual_seed(seed)
    rows = _answered(subject, causal, inputs, look)
    rows = rows[torch.randperm(len(rows), generator=generator)]
    half, rest = len(rows) // 2, len(rows) - len(rows) // 2
    fit, calibration, held_out = rows.split([half, rest // 2, rest - rest // 2])
    test: dict[tuple[str, str], Bank] = {}
    for v in causal.variables:
        for kind, policy in (("sensitivity", "sensitive"), ("invariance", "invariant")):
            test[v, kind] = draw_pairs(causal, held_out, policy, pairs, generator, variable=v, name=f"test/{v}/{kind}")
    splits = Splits.checked(
        draw_pairs(causal, fit, "mixed", pairs, generator, name="fit"),
        draw_pairs(causal, calibration, "balanced", pairs, generator, name="calibration"),
        test,
        strict=True,
    )
    study = Study(Prepared("localize", type(subject).__name__, seed, subject, splits, look))
    unit, handles = study.run(method, lambda draw: random_sites(draw, SEARCH))
    verdicts = {v["variable"]: v for v in unit.get("verdicts", [])}
    return Result(handles, verdicts, unit["records"], unit["runtimes"][0]["seconds"])


def _answered(subject: Subject, causal: CausalModel, inputs: Tensor, look: Readout) -> Tensor:
    """The distinct rows the network answers as the causal model does."""
    distinct = torch.unique(inputs, dim=0)
    answers = look.decide(subject.record(distinct).outputs).cpu()
    right = same(answers, causal.answer(distinct).to(answers.dtype))
    if right.sum() < 100:
        raise PlotError(
            f"The network answers only {int(right.sum())} of {len(distinct)} distinct inputs as the causal model does; "
            f"at least 100 are needed. Train it further, or give more inputs."
        )
    return distinct[right]
