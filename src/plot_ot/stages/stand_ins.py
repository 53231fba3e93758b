"""More pairs from the same recordings: a pair's source may be any recorded one with the same value of the variable.

What a swap of z asks for depends on the base and on z_s alone, so a pair (b, s) has the same label with another
source s' for which z_s' = z_s. The states of both are recorded already. What else s and s' differ in is what an edit
must learn to leave alone.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from jaxtyping import Int
from torch import Tensor

from plot_ot.abstract.banks import first_of_each
from plot_ot.stages.closed_form import value_codes
from plot_ot.subjects import BankRecording


def with_stand_ins(fit: BankRecording, variable: str, times: int, generator: torch.Generator) -> BankRecording:
    """The pairs as they are, and so many times again with other sources of the same value of the variable.

    The result knows this one variable only: of the others, these sources have other values.
    """
    [value] = value_codes([fit.bank.causal.run(fit.bank.source)], variable)
    # pairs that are the same get the same stand-ins, so that repeating them changes nothing
    pair = torch.unique(torch.stack([fit.base_rows, fit.source_rows]).cpu(), dim=1, return_inverse=True)[1]
    first = first_of_each(pair)
    dealt = [first[_dealt(value[first], generator)][pair] for _ in range(times)]
    source = torch.cat([torch.arange(len(fit)), *dealt])
    again = torch.arange(len(fit)).repeat(1 + times)
    bank = replace(
        fit.bank.select(again),
        source=fit.bank.source[source],
        source_answer=fit.bank.source_answer[source],
        variables=(variable,),
        changed={variable: fit.bank.changed[variable][again]},
        labels={variable: fit.bank.labels[variable][again]},
    )
    device = fit.base_rows.device
    return replace(
        fit, base_rows=fit.base_rows[again.to(device)], source_rows=fit.source_rows[source.to(device)], bank=bank
    )


def _dealt(value: Int[Tensor, " pairs"], generator: torch.Generator) -> Int[Tensor, " pairs"]:
    """For every pair another of the same value (or itself), each taken once."""
    shuffled = torch.randperm(len(value), generator=generator)
    taken = torch.empty_like(shuffled)
    taken[value.argsort(stable=True)] = shuffled[value[shuffled].argsort(stable=True)]
    return taken
