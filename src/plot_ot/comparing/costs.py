"""What comparing hypotheses would cost, before any of them is searched for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from plot_ot.abstract.causal_model import CausalModel
from plot_ot.abstract.hypothesis import Hypothesis
from plot_ot.api import Network
from plot_ot.comparing.drawing import draw_banks
from plot_ot.comparing.entry import about, asked, pairs_of
from plot_ot.comparing.quick import QUICK
from plot_ot.errors import PlotError
from plot_ot.methods import Method
from plot_ot.planner import Machine, Plan, Scene, answers_in, predict
from plot_ot.signatures import Readout


@dataclass(frozen=True)
class ComparisonPlan:
    """The quick look at every hypothesis, and the whole search, which only finalists get. Controls come on top."""

    quick: Mapping[str, Plan]
    whole: Mapping[str, Plan]


def plan_comparison(
    subject: Network,
    hypotheses: Sequence[CausalModel | Hypothesis] | Mapping[str, CausalModel | Hypothesis],
    inputs: Any,
    machine: Machine,
    *,
    method: str | Method = "plot",
    readout: str | Readout | None = None,
    size: int | None = None,
    filter: str | None = None,
    hold_out: str | Sequence[str] | None = None,
    seed: int = 0,
    **options: Any,
) -> ComparisonPlan:
    """Estimate what `compare` would compute for each hypothesis, if the network answers all inputs as each says.

    The arguments are those of `compare`, and the machine to plan for (`plot_ot.planner.machine_by_name`). A small
    network is recorded, to see which pairs share a response; a language model is not run.
    """
    field, question = asked(subject, hypotheses, inputs, method, readout, filter, hold_out, seed, options)
    every = {r.name: torch.ones(len(field.rows), dtype=torch.bool) for r in field.rivals}
    drawn = draw_banks(field, every, pairs_of(question.subject, size), seed, question.hold_out)
    quick, whole = dict[str, Plan](), dict[str, Plan]()
    for rival in field.rivals:
        banks = drawn.banks[rival.name]
        if isinstance(banks, str):
            raise PlotError(f"{rival.name} cannot be planned: {banks}")
        scene = Scene.of_subject(question.subject, banks.splits, answers_in(banks.splits))
        quick[rival.name] = predict(QUICK, scene, machine)
        whole[rival.name] = replace(predict(about(question, rival).method, scene, machine), method=rival.name)
    return ComparisonPlan(quick, whole)
