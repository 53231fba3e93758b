"""Shuffled values: banks on which a variable means nothing, for the control that a search must fail.

Every input is given the value that another input has, by a random permutation, so that the variable is taken as often
as before and changes between two inputs as often as between any two; but nothing a network computes can tell its value
on an input that was never seen. Swapping it still has an effect on the answer, as large as a real swap's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from jaxtyping import Int
from torch import Tensor

from plot_ot.abstract.banks import Bank, distinct_rows, families_by_change
from plot_ot.abstract.causal_model import CausalModel, Values, same


class Relabelled(CausalModel):
    """A causal model some of whose variables are read off a table of inputs instead of being computed."""

    def __init__(self, model: CausalModel, inputs: Int[Tensor, "rows inputs"], values: Mapping[str, Tensor]) -> None:
        super().__init__(model.inputs, model.mechanisms, model.output, model.variables)
        self.true, self.accepts = model, model.accepts
        self._row = {tuple(row): k for k, row in enumerate(inputs.tolist())}
        self._values = dict(values)

    def run(self, inputs: Int[Tensor, "rows inputs"], do: Mapping[str, Tensor] | None = None) -> Values:
        """The true model's values, with those of the table in the place of the relabelled variables'."""
        values = self.true.run(inputs, do)
        at = torch.tensor([self._row[tuple(row)] for row in inputs.tolist()], dtype=torch.long)
        return values | {v: table[at] for v, table in self._values.items() if v not in (do or {})}


def shuffled(banks: Sequence[Bank], generator: torch.Generator) -> list[Bank]:
    """The banks with every variable's values shuffled over all their inputs, the same way in all banks.

    A pair is changed where its two new values differ. Its label is then the answer with the variable set to a value
    that it does not have on the base: the source's new one, or where the base happens to have that, the base's new one.
    """
    first = banks[0]
    model, variables = first.causal, first.variables
    inputs = distinct_rows(torch.cat([x for bank in banks for x in (bank.base, bank.source)]))
    true = model.run(inputs)
    dealt = {v: true[v][torch.randperm(len(inputs), generator=generator)] for v in variables}
    relabelled = Relabelled(model, inputs, dealt)
    return [_relabel(bank, relabelled) for bank in banks]


def _relabel(bank: Bank, model: Relabelled) -> Bank:
    at_base, at_source, true = model.run(bank.base), model.run(bank.source), model.true.run(bank.base)
    changed, labels = {}, {}
    for v in bank.variables:
        changed[v] = ~same(at_base[v], at_source[v])
        target = torch.where(_rows(~same(at_source[v], true[v]), at_source[v]), at_source[v], at_base[v])
        answer = model.true.run(bank.base, do={v: target})[model.output]
        labels[v] = torch.where(_rows(changed[v], answer), answer, bank.base_answer)
    family, families = families_by_change(changed)
    return replace(
        bank, causal=model, changed=changed, labels=labels, family=family, families=tuple(families), name=bank.name
    )


def _rows(mask: Tensor, like: Tensor) -> Tensor:
    """A mask of rows in the shape of batched values."""
    return mask.reshape(-1, *[1] * (like.ndim - 1))
