"""Banks of pairs that a model answers correctly: candidates drawn and filtered until every quota is full."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from plot_ot.abstract.banks import Bank
from plot_ot.abstract.causal_model import CausalModel, same
from plot_ot.errors import PlotError

Rows = Int[Tensor, "rows inputs"]
Draw = Callable[[str, int], tuple[Rows, Rows]]
"""A function that draws `count` random base rows of a family, and their sources."""
Filter = Callable[[Rows], Bool[Tensor, " rows"]]
"""A function that says which prompts the model answers correctly."""


@dataclass(frozen=True)
class Quota:
    """How many pairs of a family are wanted; only those that change (True) or keep (False) the named variables."""

    family: str
    size: int
    changes: Mapping[str, bool]


def share_out(size: int, families: Sequence[str], changes: Mapping[str, bool] | None = None) -> list[Quota]:
    """Equal shares for the families, the first ones taking what is left over."""
    parts = len(families)
    return [Quota(f, size // parts + (k < size % parts), changes or {}) for k, f in enumerate(families)]


class Filling:
    """Fills banks; `passed` counts split -> family -> (pairs passed, pairs tried), `seconds` what the filter took."""

    ROUNDS, DRAWN, ENOUGH = 30, 1024, 50

    def __init__(
        self,
        causal: CausalModel,
        families: tuple[str, ...],
        right: Filter,
        generator: torch.Generator,
        least_pass_rate: float = 0.1,
    ) -> None:
        self.causal, self.families, self.right = causal, families, right
        self.generator, self.least = generator, least_pass_rate
        self.passed: dict[str, dict[str, tuple[int, int]]] = {}
        self.seconds: dict[str, float] = {}

    def bank(self, name: str, quotas: Sequence[Quota], draw: Draw) -> Bank:
        """Different pairs with both prompts answered correctly, in random order.

        Every round draws for all open quotas at once, so that the filter sees large batches.
        """
        tally = self.passed[name] = dict.fromkeys(self.families, (0, 0))
        self.seconds[name] = 0.0
        seen: set[bytes] = set()
        missing = [q.size for q in quotas]
        taken: list[tuple[Tensor, Tensor]] = []
        family: list[int] = []
        for _ in range(self.ROUNDS):
            wanted = [round(n * _tries(*tally[q.family])) for n, q in zip(missing, quotas, strict=True)]
            drawn = {
                k: self._candidates(q, n, seen, draw) for k, (q, n) in enumerate(zip(quotas, wanted, strict=True)) if n
            }
            if not drawn:
                break
            start = time.perf_counter()
            good = self._pass(*(torch.cat([pair[side] for pair in drawn.values()]) for side in (0, 1)))
            self.seconds[name] += time.perf_counter() - start
            for (k, (base, source)), ok in zip(
                drawn.items(), good.split([len(b) for b, _ in drawn.values()]), strict=True
            ):
                kind = quotas[k].family
                tally[kind] = tally[kind][0] + int(ok.sum()), tally[kind][1] + len(ok)
                kept = ok.nonzero().squeeze(1)[: missing[k]]
                missing[k] -= len(kept)
                taken.append((base[kept], source[kept]))
                family += [self.families.index(kind)] * len(kept)
            self._refuse_failures(name, tally)
        if any(missing):
            raise PlotError(
                f"The {name} bank lacks {sum(missing)} pairs after {self.ROUNDS} rounds (passed: {_spelled(tally)}): "
                f"there are too few different prompts. Ask for smaller banks or bring more prompts."
            )
        base, source = (torch.cat([pair[side] for pair in taken]) for side in (0, 1))
        order = torch.randperm(len(base), generator=self.generator)
        kinds = torch.tensor(family)[order]
        return Bank.from_pairs(self.causal, base[order], source[order], name=name, family=kinds, families=self.families)

    def _candidates(self, quota: Quota, wanted: int, seen: set[bytes], draw: Draw) -> tuple[Rows, Rows]:
        """Up to `wanted` pairs that fit the quota and have not been seen."""
        found: list[tuple[Tensor, Tensor]] = []
        for base, source in self._fitting(quota, draw):
            pairs = torch.cat([base, source], dim=1).numpy()
            new: list[int] = []
            for k, pair in enumerate(pairs):
                if len(new) < wanted and (key := pair.tobytes()) not in seen:
                    seen.add(key)
                    new.append(k)
            found.append((base[new], source[new]))
            wanted -= len(new)
            if not wanted:
                break
        return torch.cat([b for b, _ in found]), torch.cat([s for _, s in found])

    def _fitting(self, quota: Quota, draw: Draw) -> Iterator[tuple[Rows, Rows]]:
        """Random pairs of different prompts that change what the quota says; rare ones take many draws."""
        for _ in range(self.ROUNDS):
            base, source = draw(quota.family, self.DRAWN)
            fits = ~same(base, source)
            at_base, at_source = self.causal.run(base), self.causal.run(source)
            for variable, changes in quota.changes.items():
                fits &= same(at_base[variable], at_source[variable]) != changes
            yield base[fits], source[fits]

    def _pass(self, base: Rows, source: Rows) -> Bool[Tensor, " pairs"]:
        """Whether both prompts of each pair are answered correctly; every distinct prompt is asked once."""
        rows, index = torch.unique(torch.cat([base, source]), dim=0, return_inverse=True)
        right = self.right(rows)
        if not isinstance(right, Tensor) or right.shape != (len(rows),):
            raise PlotError(f"The filter must return one boolean per row, shape [{len(rows)}]; found {right!r:.80}.")
        return right.cpu().bool()[index].view(2, -1).all(dim=0)

    def _refuse_failures(self, name: str, tally: Mapping[str, tuple[int, int]]) -> None:
        for passed, tried in tally.values():
            if tried >= self.ENOUGH and passed < self.least * tried:
                raise PlotError(
                    f"The model answers too few prompts correctly to fill the {name} bank. Pairs passed of those "
                    f"tried: {_spelled(tally)}; at least {self.least:.0%} must pass. Use a model that can do the task, "
                    f"or lower least_pass_rate."
                )


def _tries(passed: int, tried: int) -> float:
    """How many candidates one pair takes, by the pass rate so far: at most ten."""
    return min(tried / max(passed, 1), 10.0) if tried else 1.0


def _spelled(tally: Mapping[str, tuple[int, int]]) -> str:
    return ", ".join(f"{family} {passed} of {tried}" for family, (passed, tried) in tally.items())
