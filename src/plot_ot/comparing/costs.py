"""What comparing hypotheses would cost, before any of them is searched for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from plot_ot.abstract.banks import Splits
from plot_ot.abstract.causal_model import CausalModel
from plot_ot.abstract.hypothesis import Hypothesis
from plot_ot.abstract.splitting import SPLITS, balanced_bank
from plot_ot.comparing.entry import bound, method_of, pairs_of, signatures_of
from plot_ot.comparing.quick import QUICK
from plot_ot.comparing.rivals import gather
from plot_ot.methods import Method
from plot_ot.models.named import LanguageModel
from plot_ot.planner import Machine, Plan, Scene, predict
from plot_ot.subjects import Subject


@dataclass(frozen=True)
class ComparisonPlan:
    """The quick look at every hypothesis, and the whole search, which only finalists get. Controls come on top."""

    quick: Mapping[str, Plan]
    whole: Mapping[str, Plan]


def plan_comparison(
    subject: Subject | LanguageModel,
    hypotheses: Sequence[CausalModel | Hypothesis] | Mapping[str, CausalModel | Hypothesis],
    inputs: Any,
    machine: Machine,
    *,
    method: str | Method = "plot",
    size: int | None = None,
    seed: int = 0,
    **options: Any,
) -> ComparisonPlan:
    """Estimate what `compare` would compute for each hypothesis, if the network answers all inputs as each says.

    The arguments are those of `compare`, and the machine to plan for (`plot_ot.planner.machine_by_name`). A small
    network is recorded, to see which pairs share a response; a language model is not run.
    """
    field, quick, whole = gather(hypotheses, inputs), dict[str, Plan](), dict[str, Plan]()
    subject = bound(subject, field, options)
    for rival in field.rivals:
        generator = torch.Generator().manual_seed(seed)
        rows = field.rows[torch.randperm(len(field.rows), generator=generator)]
        parts = rows.tensor_split([len(rows) // 2, 3 * len(rows) // 4])
        banks = [
            balanced_bank(rival.causal, part, name, pairs_of(subject, size), generator)
            for part, name in zip(parts, SPLITS, strict=True)
        ]
        splits = Splits.checked(banks[0], banks[1], banks[2].by_variable(), strict=True)
        scene = Scene.of_subject(subject, splits, int(banks[0].base_answer.max()) + 1)
        searched = method_of(method, subject, len(splits.fit.variables), signatures_of(subject))
        quick[rival.name] = predict(QUICK, scene, machine)
        whole[rival.name] = replace(predict(searched, scene, machine), method=rival.name)
    return ComparisonPlan(quick, whole)
