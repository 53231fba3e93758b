"""What `localize` would cost, before it runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from plot_ot.abstract.admission import Admission
from plot_ot.abstract.causal_model import CausalModel
from plot_ot.abstract.hypothesis import Hypothesis
from plot_ot.api import Network, ask
from plot_ot.localizing import Given, Question, make_banks, size_or, usual_size
from plot_ot.methods import Method
from plot_ot.planner import Inputs, Machine, Plan, Prompted, Scene, answers_in, predict
from plot_ot.signatures import Readout
from plot_ot.subjects import DecoderSubject


def plan_localization(
    subject: Network,
    hypothesis: CausalModel | Hypothesis,
    pairs: Any,
    machine: Machine,
    *,
    method: str | Method = "plot",
    readout: str | Readout | None = None,
    size: int | None = None,
    filter: str | None = None,
    hold_out: str | Sequence[str] | None = None,
    seed: int = 0,
    **options: Any,
) -> Plan:
    """Estimate what `localize` would compute, if the network answered every input as the hypothesis does.

    The arguments are those of `localize`, and the machine to plan for (`plot_ot.planner.machine_by_name`). A small
    network is recorded, to see which pairs share a response; a language model is not run. Controls are not counted.
    """
    question, given = ask(
        subject,
        hypothesis,
        pairs,
        method=method,
        readout=readout,
        filter=filter,
        hold_out=hold_out,
        seed=seed,
        **options,
    )
    return predict(question.method, scene_of(question, given, size), machine)


def scene_of(question: Question, given: Given, size: int | None = None) -> Scene:
    """The study that a question would be, with banks as if every input were answered right."""
    asked: list[Tensor] = []

    def all_right(rows: Int[Tensor, "rows inputs"]) -> Bool[Tensor, " rows"]:
        asked.append(rows)
        return torch.ones(len(rows), dtype=torch.bool)

    subject = question.subject
    made = make_banks(question, given, size_or(usual_size(subject), size), Admission(all_right))
    scene = Scene.of_subject(subject, made.splits, answers_in(made.splits))
    kept = isinstance(subject, DecoderSubject | Prompted)
    if not (kept and asked):  # others run their inputs twice: to filter them, which is not counted
        return scene
    filtered = [Inputs.recorded(rows, torch.arange(len(rows)), subject.encoded(rows)) for rows in asked]
    return replace(scene, beside={"filter": replace(sum(filtered, Inputs()), shards=1)})
