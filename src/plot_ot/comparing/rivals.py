"""Rivals: hypotheses about the same inputs and answers, brought to one code so that they can be compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from plot_ot.abstract.banks import distinct_rows
from plot_ot.abstract.causal_model import Accepts, CausalModel, Values
from plot_ot.abstract.hypothesis import Hypothesis
from plot_ot.abstract.pairs import PairTable, read_pairs
from plot_ot.errors import PlotError


@dataclass(frozen=True)
class Rival:
    """One of the hypotheses, over the input rows that all share."""

    name: str
    hypothesis: CausalModel | Hypothesis
    causal: CausalModel
    """The causal model that takes the shared rows."""

    def shown(self, name: str, values: Tensor) -> list[Any]:
        """What the codes of an input or variable stand for, in plain Python."""
        codes = values.tolist()
        if isinstance(self.hypothesis, Hypothesis) and name not in self.causal.inputs:
            known = self.hypothesis.values(name)
            return [known[c] for c in codes]
        return [tuple(c) if isinstance(c, list) else c for c in codes]


class Recoded(CausalModel):
    """A causal model that is given the rows of another code of the same inputs."""

    def __init__(self, model: CausalModel, columns: Sequence[Mapping[int, int]]) -> None:
        super().__init__(model.inputs, model.mechanisms, model.output, model.variables)
        self._model, self._columns, self.accepts = model, columns, model.accepts

    def run(self, inputs: Int[Tensor, "rows inputs"], do: Mapping[str, Tensor] | None = None) -> Values:
        """The model's values on the rows in its own code; the inputs are given back as they came."""
        own = [[code[v] for code, v in zip(self._columns, row, strict=True)] for row in inputs.tolist()]
        values = self._model.run(torch.tensor(own).reshape(len(inputs), len(self.inputs)), do)
        return values | {name: inputs[:, k] for k, name in enumerate(self.inputs)}


@dataclass(frozen=True)
class Field:
    """The rivals and the distinct inputs they are compared on."""

    rivals: tuple[Rival, ...]
    rows: Int[Tensor, "rows inputs"]

    def accepting(self, accepts: Accepts | None) -> Field:
        """The same rivals, with answers told apart as a readout does."""
        return replace(self, rivals=tuple(replace(r, causal=r.causal.accepting(accepts)) for r in self.rivals))

    @property
    def inputs(self) -> tuple[str, ...]:
        """The names of the inputs."""
        return self.rivals[0].causal.inputs

    def shown(self, name: str, codes: Tensor) -> list[Any]:
        """What the codes of an input stand for."""
        first = self.rivals[0].hypothesis
        if isinstance(first, Hypothesis):
            known = first.values(name)
            return [known[c] for c in codes.tolist()]
        return codes.tolist()

    def dicts(self, rows: Int[Tensor, "rows inputs"]) -> list[dict[str, Any]]:
        """Rows as named inputs."""
        columns = [self.shown(name, rows[:, k]) for k, name in enumerate(self.inputs)]
        return [dict(zip(self.inputs, row, strict=True)) for row in zip(*columns, strict=True)]


def gather(
    hypotheses: Sequence[CausalModel | Hypothesis] | Mapping[str, CausalModel | Hypothesis], inputs: Any
) -> Field:
    """The hypotheses by name, over the distinct inputs; refused where they are about different things."""
    named = _named(hypotheses)
    kinds = {isinstance(h, Hypothesis) for h in named.values()}
    if len(kinds) > 1:
        raise PlotError("Some of the hypotheses are bare CausalModels and some not: write all of them the same way.")
    first_name, first = next(iter(named.items()))
    if isinstance(inputs, tuple | Mapping) and not isinstance(first, Hypothesis):
        raise PlotError("compare takes inputs alone and draws the pairs itself; found pairs.")
    if isinstance(first, Hypothesis):
        rows = inputs if isinstance(inputs, Tensor) else first.rows(_inputs_alone(inputs))
        rivals = tuple(Rival(n, h, _recoded(first_name, first, n, h, rows)) for n, h in named.items())  # type: ignore[arg-type]
    else:
        rows = inputs
        if not isinstance(rows, Tensor):
            raise PlotError(
                f"CausalModels take inputs as a tensor of integer rows; found {type(inputs).__name__}. Write the "
                f"hypotheses as Hypothesis to give dicts, files or tables."
            )
        rivals = tuple(Rival(n, h, h) for n, h in named.items())  # type: ignore[arg-type]
        for rival in rivals[1:]:
            _same_inputs(first_name, first.inputs, rival.name, rival.causal.inputs)
    for rival in rivals:
        rival.causal.check_pairs(rows, rows)
        if not rival.causal.variables:
            raise PlotError(f"Hypothesis '{rival.name}' has no variable between its inputs and its answer.")
    return Field(rivals, distinct_rows(rows))


def _inputs_alone(inputs: Any) -> list[Any]:
    table = inputs if isinstance(inputs, PairTable) else read_pairs(inputs)
    if table.source:
        raise PlotError(
            f"compare takes inputs alone and draws the pairs itself; {table.where[0]} is a pair of base and source."
        )
    return list(table.base)


def _named(hypotheses: Any) -> dict[str, CausalModel | Hypothesis]:
    if isinstance(hypotheses, Mapping):
        found = {str(n): h for n, h in hypotheses.items()}
    else:
        given = list(hypotheses)
        names = [h.name if isinstance(h, Hypothesis) else "hypothesis" for h in given]
        numbered = [n if names.count(n) == 1 else f"{n} {k + 1}" for k, n in enumerate(names)]
        found = dict(zip(numbered, given, strict=True))
    for name, h in found.items():
        if not isinstance(h, CausalModel | Hypothesis):
            raise PlotError(f"'{name}' is {type(h).__name__}; expected a Hypothesis or a CausalModel.")
    if len(found) < 2:
        raise PlotError(f"Comparing needs at least two hypotheses; found {len(found)}. For one, use localize.")
    return found


def _same_inputs(first: str, own: Sequence[str], name: str, others: Sequence[str]) -> None:
    if tuple(own) != tuple(others):
        raise PlotError(
            f"'{first}' has the inputs {', '.join(own)}, '{name}' {', '.join(others)}: rivals must have the same "
            f"inputs in the same order. Name them with `inputs=[...]`; one that a hypothesis does not use does no harm."
        )


def _recoded(first_name: str, first: Hypothesis, name: str, h: Hypothesis, rows: Tensor) -> CausalModel:
    """The model of a hypothesis over the first one's codes."""
    if h is first:
        return first.causal
    _same_inputs(first_name, first.inputs, name, h.inputs)
    dicts = first.dicts(rows)
    own = h.rows(dicts)
    if first.has_prompts != h.has_prompts or (h.has_prompts and first.render(rows) != h.render(own)):
        raise PlotError(f"'{first_name}' and '{name}' make different prompts of the same inputs: use one template.")
    if lacking := [p for p in h.positions if p not in first.positions]:
        raise PlotError(
            f"'{name}' names the position '{lacking[0]}', '{first_name}' does not, and what the first names is looked "
            f"at: give all of them the same `positions={{...}}`."
        )
    for each, at in ((first, rows), (h, own)):
        each.causal.answer(at)  # collects the answers, where they are not given
    if first.answers != h.answers:
        raise PlotError(
            f"'{first_name}' has the answers {first.answers!r:.100}, '{name}' {h.answers!r:.100}: give both the same "
            f"`answers=[...]`, in the same order."
        )
    if bool((own == rows).all()):
        return h.causal
    columns = [dict(zip(rows[:, k].tolist(), own[:, k].tolist(), strict=True)) for k in range(rows.shape[1])]
    return Recoded(h.causal, columns)
