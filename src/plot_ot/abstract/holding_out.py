"""Hold-out by entity: no city, name or other value of some inputs stands in two splits."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from plot_ot.abstract.causal_model import CausalModel
from plot_ot.abstract.hypothesis import Hypothesis
from plot_ot.errors import PlotError, unknown

LEAST_ENTITIES = 2
"""Entities of a split: with one alone no pair could change it."""
MIXED = -1
"""The split of an input whose entities are of different splits."""


@dataclass(frozen=True)
class HoldOut:
    """The values of some inputs, each of which belongs to one split."""

    model: Hypothesis | CausalModel
    names: tuple[str, ...]

    @classmethod
    def by(cls, model: Hypothesis | CausalModel, names: str | Sequence[str] | None) -> HoldOut | None:
        """Hold out by inputs of these names; None where no name is given."""
        if names is None:
            return None
        wanted = (names,) if isinstance(names, str) else tuple(names)
        known = (model.causal if isinstance(model, Hypothesis) else model).inputs
        if not wanted:
            raise PlotError("`hold_out` names no input; leave it out, or name one whose values are held out.")
        for name in wanted:
            if name not in known:
                unknown("input to hold out by", name, known)
        return cls(model, wanted)

    def entities(self, rows: Int[Tensor, "rows inputs"]) -> list[tuple[Hashable, ...]]:
        """The entities of every row; a value is the same entity in whichever of the inputs it stands."""
        if isinstance(self.model, Hypothesis):
            return [tuple(given[name] for name in self.names) for given in self.model.dicts(rows)]
        columns = [self.model.inputs.index(name) for name in self.names]
        return [tuple(row) for row in rows[:, columns].tolist()]

    def deal(self, rows: Int[Tensor, "rows inputs"], shares: Sequence[int], generator: torch.Generator) -> Deal:
        """Deal the entities of some rows out at random, in proportion to `shares`."""
        found = list(dict.fromkeys(e for some in self.entities(rows) for e in some))
        sizes = [max(LEAST_ENTITIES, len(found) * share // sum(shares)) for share in shares]
        sizes[0] = len(found) - sum(sizes[1:])  # the first split has what is left over
        if sizes[0] < LEAST_ENTITIES:
            raise PlotError(
                f"Held out by {self}, {len(found)} values are too few: each of {len(shares)} splits needs at least "
                f"{LEAST_ENTITIES} of its own, {LEAST_ENTITIES * len(shares)} in all. Give inputs with more of them, "
                f"or leave `hold_out` out."
            )
        order = torch.randperm(len(found), generator=generator).split(sizes)
        return Deal(self, {found[k]: split for split, some in enumerate(order) for k in some.tolist()}, tuple(sizes))

    def said(self, sizes: Sequence[int]) -> str:
        """How many entities each split has."""
        fit, calibration, test = sizes
        return f"held out by {self}: {fit} values to fit, {calibration} to calibrate, {test} to test, none in two of them"

    def refuse_shared(self, splits: Mapping[str, Int[Tensor, "rows inputs"]]) -> str:
        """Refuse splits of one's own that share an entity; else say how many each has."""
        found = {name: {e for some in self.entities(rows) for e in some} for name, rows in splits.items()}
        names = list(found)
        for i, a in enumerate(names):
            for b in names[i + 1 :]:
                if both := found[a] & found[b]:
                    some = ", ".join(sorted(map(str, both))[:3])
                    raise PlotError(
                        f"Held out by {self}, but {len(both)} values stand in the {a} and the {b} split: {some}"
                        f"{', ...' if len(both) > 3 else ''}. Split the pairs anew, or leave out their `split`."
                    )
        return self.said([len(found[name]) for name in names])

    def __str__(self) -> str:
        return " and ".join(f"'{name}'" for name in self.names)


@dataclass(frozen=True)
class Deal:
    """Entities dealt out to splits."""

    hold_out: HoldOut
    split: Mapping[Hashable, int]
    sizes: tuple[int, ...]

    def splits_of(self, rows: Int[Tensor, "rows inputs"]) -> Int[Tensor, " rows"]:
        """The split of every row; `MIXED` if its entities are of several."""
        found = [{self.split[e] for e in some} for some in self.hold_out.entities(rows)]
        return torch.tensor([some.pop() if len(some) == 1 else MIXED for some in found], dtype=torch.long)

    def said(self, left: int, of: int, what: str = "inputs") -> str:
        """What was held out, and how many had to be left out for it."""
        told = self.hold_out.said(self.sizes)
        return f"{told}; {left} of {of} {what} have values of several splits and are left out" if left else told
