"""How a state changes with one variable while all else stays: the answer, and what else the answer is made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import one_hot

from plot_ot.stages.closed_form import value_codes
from plot_ot.subjects import BankRecording, Place

APART = 0.05
"""A variable has changes of its own if at least this share of its variance does not follow from the rest."""


@dataclass(frozen=True)
class OwnChange:
    """β_x (x_source - x_base) in the regression a ≈ β_x x + β_z z + β_y y of natural states.

    x are the values of the variable, z those of all else that is still to be read for the answer, and y the answers,
    each as an indicator per value; the regression is over the distinct inputs of some recordings.
    """

    recordings: Sequence[BankRecording]
    rows: Sequence[Int[Tensor, " inputs"]]
    """The distinct inputs of each recording."""
    left: Float[Tensor, "all k"]
    """What of the variable's values does not follow from the rest: per input, along axes of unit variance."""
    moves: Float[Tensor, "pairs k"]
    """How each pair of the first recording changes the variable along these axes, in units of what is left there."""

    @classmethod
    def of(cls, fit: BankRecording, variable: str, more: Sequence[BankRecording] = ()) -> OwnChange | None:
        """None where the values follow from the rest (a term of a known sum), or are too many for so few inputs."""
        causal, recordings = fit.bank.causal, (fit, *more)
        after = causal.descendants(variable) | {causal.output}
        rest = {p for a in after for p in causal.parents(a)} - after - {variable}
        values = [causal.run(side) for r in recordings for side in (r.bank.base, r.bank.source)]
        of_x, *of_z = (torch.cat(value_codes(values, name)) for name in (variable, *sorted(rest), causal.output))
        rows, first = _distinct(recordings)
        if sum(int(code.max()) + 1 for code in (of_x, *of_z)) > len(first) / 2:
            return None
        x = one_hot(of_x).double()
        z = torch.cat([one_hot(code[first]).double() for code in of_z], dim=1)
        changes, z = x[first] - x[first].mean(dim=0), z - z.mean(dim=0)
        variances, axes = torch.linalg.eigh(changes.T @ changes / len(first))
        some = variances > 1e-9 * variances.max()
        axes = axes[:, some] / variances[some].sqrt()
        left = changes @ axes
        left = left - z @ torch.linalg.lstsq(z, left, driver="gelsd").solution
        shares = left.T @ left / len(first)
        if not len(shares) or float(torch.linalg.eigvalsh(shares).min()) < APART:
            return None
        at_base, at_source = x[: 2 * len(fit)].split(len(fit))
        return cls(recordings, rows, left, torch.linalg.solve(shares, axes.T @ (at_source - at_base).T).T)

    def shift(self, place: Place) -> Float[Tensor, "pairs d"]:
        """How the state at a place changes by it, for every pair of the first recording."""
        states = [
            r.store.activations[place.name].double().cpu()[at] for r, at in zip(self.recordings, self.rows, strict=True)
        ]
        return self.moves @ (self.left.T @ torch.cat(states) / len(self.left))


def _distinct(recordings: Sequence[BankRecording]) -> tuple[list[Int[Tensor, " inputs"]], Int[Tensor, " all"]]:
    """The different inputs of each recording, and where each stands first when all bases and sources stand in a row."""
    rows, first, begins = [], [], 0
    for r in recordings:
        every = torch.cat([r.base_rows, r.source_rows]).cpu()
        some, code = torch.unique(every, return_inverse=True)
        rows.append(some)
        at = torch.full_like(some, len(every)).scatter_reduce(0, code, torch.arange(len(every)), "amin")
        first.append(begins + at)
        begins += len(every)
    return rows, torch.cat(first)
