"""Banks of base/source pairs: what changes in each pair, what the answer should become, and what that can show."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Int, Shaped
from torch import Tensor

from plot_ot.abstract.causal_model import CausalModel, same
from plot_ot.errors import PlotError, unknown


@dataclass(frozen=True)
class Power:
    """How many pairs of a bank tell a variable's swap from each thing it could be confused with (DESIGN §8)."""

    pairs: int
    sensitive: int
    against_base: int
    """The counterfactual label differs from the base's answer: doing nothing is wrong."""
    against_source: int
    """The counterfactual label differs from the source's answer: copying the source is wrong."""
    against_others: Mapping[str, int]
    """The counterfactual label differs from what swapping any other variable would give."""
    discriminating: int
    unlike_source: int = 0
    """Of the pairs that change the variable, whether or not its swap moves the answer, those whose label is not the
    source's answer."""

    @property
    def is_output(self) -> bool:
        """The variable's label always equals the source's answer, and some pairs move the answer."""
        return self.against_base > 0 and self.against_source == 0 and self.unlike_source == 0

    def missing(self, least: int = 1) -> list[str]:
        """Say what kinds of pair are too few to decide where the variable lives."""
        gaps = []
        if self.against_base < least:
            gaps.append(f"pairs where swapping it changes the answer ({self.against_base})")
        if self.against_source < least:
            gaps.append(f"pairs where the counterfactual answer is not the source's ({self.against_source})")
        for other, count in self.against_others.items():
            if count < least:
                gaps.append(f"pairs where swapping '{other}' instead gives another answer ({count})")
        return gaps


@dataclass(frozen=True)
class Bank:
    """T base/source pairs with everything the abstract side knows about them."""

    name: str
    causal: CausalModel
    base: Int[Tensor, "pairs inputs"]
    source: Int[Tensor, "pairs inputs"]
    variables: tuple[str, ...]
    changed: Mapping[str, Bool[Tensor, " pairs"]]
    """Whether the source's value of the variable differs from the base's."""
    labels: Mapping[str, Tensor]
    """Per variable, the abstract swap's output."""
    base_answer: Tensor
    source_answer: Tensor
    family: Int[Tensor, " pairs"]
    """Index into `families`: the kind of counterfactual a pair is."""
    families: tuple[str, ...] = field(default=("all",))

    @classmethod
    def from_pairs(
        cls,
        causal: CausalModel,
        base: Int[Tensor, "pairs inputs"],
        source: Int[Tensor, "pairs inputs"],
        *,
        name: str = "pairs",
        variables: Sequence[str] | None = None,
        family: Int[Tensor, " pairs"] | None = None,
        families: Sequence[str] | None = None,
    ) -> Bank:
        """Label the pairs by the causal model. Without `family`, a pair's family is the set of changed variables."""
        variables = tuple(variables or causal.variables)
        if not variables:
            raise PlotError(f"Bank '{name}' has no variable to label: name some in `variables`.")
        if not len(base):
            raise PlotError(f"Bank '{name}' is empty: it needs at least one base/source pair.")
        causal.check_pairs(base, source)
        for v in variables:
            causal.require(v)
        at_base, at_source = causal.run(base), causal.run(source)
        labels = {v: causal.run(base, do={v: at_source[v]})[causal.output] for v in variables}
        changed = {v: ~same(at_base[v], at_source[v]) for v in variables}
        if family is None:
            family, families = families_by_change(changed)
        elif families is None:
            families = [str(k) for k in range(int(family.max()) + 1)]
        names = list(families or ())
        if len(family) == len(base) and not (int(family.min()) >= 0 and int(family.max()) < len(names)):
            raise PlotError(
                f"Bank '{name}': family entries must lie in 0..{len(names) - 1}, one per family name "
                f"({', '.join(names)}); found {family.unique().tolist()}."
            )
        if len(family) != len(base):
            raise PlotError(f"Bank '{name}': {len(family)} family entries for {len(base)} pairs.")
        return cls(
            name,
            causal,
            base,
            source,
            variables,
            changed,
            labels,
            at_base[causal.output],
            at_source[causal.output],
            family,
            tuple(families or ()),
        )

    def __len__(self) -> int:
        return len(self.base)

    def select(self, pairs: Bool[Tensor, " pairs"] | Int[Tensor, " chosen"], name: str | None = None) -> Bank:
        """The sub-bank of some pairs."""
        return Bank(
            name or self.name,
            self.causal,
            self.base[pairs],
            self.source[pairs],
            self.variables,
            {v: c[pairs] for v, c in self.changed.items()},
            {v: y[pairs] for v, y in self.labels.items()},
            self.base_answer[pairs],
            self.source_answer[pairs],
            self.family[pairs],
            self.families,
        )

    def require(self, variable: str) -> None:
        """Refuse a variable the bank has no labels for."""
        if variable not in self.labels:
            unknown(f"variable of bank '{self.name}'", variable, self.variables)

    def sensitive(self, variable: str) -> Bank:
        """The pairs whose source changes the variable (paper, Appendix A.2)."""
        self.require(variable)
        return self.select(self.changed[variable], f"{self.name}/{variable}/sensitivity")

    def invariant(self, variable: str) -> Bank:
        """The pairs whose source leaves the variable as it is."""
        self.require(variable)
        return self.select(~self.changed[variable], f"{self.name}/{variable}/invariance")

    def by_variable(self) -> dict[tuple[str, str], Bank]:
        """The sensitivity and the invariance bank of every variable."""
        kinds = {"sensitivity": self.sensitive, "invariance": self.invariant}
        return {(v, kind): of(v) for v in self.variables for kind, of in kinds.items()}

    def discriminating(self, variable: str) -> Bool[Tensor, " pairs"]:
        """Pairs where the swap moves the answer, and where at least one rival gives a different one: copying the
        source, or swapping another variable."""
        self.require(variable)
        label, accepts = self.labels[variable], self.causal.accepts
        moved = ~accepts(label, self.base_answer)
        unlike = ~accepts(label, self.source_answer)
        for other in self.variables:
            if other != variable:
                unlike = unlike | ~accepts(label, self.labels[other])
        return moved & unlike

    def unseen(self, variable: str) -> Bool[Tensor, " pairs"]:
        """Pairs whose source changes the variable, though its swap does not change the answer."""
        self.require(variable)
        return self.changed[variable] & self.causal.accepts(self.labels[variable], self.base_answer)

    def power(self, variable: str) -> Power:
        """The bank's discriminating power for one variable."""
        self.require(variable)
        label, accepts = self.labels[variable], self.causal.accepts
        moved = ~accepts(label, self.base_answer)

        def count(answer: Tensor) -> int:
            return int((moved & ~accepts(label, answer)).sum())

        return Power(
            pairs=len(self),
            sensitive=int(self.changed[variable].sum()),
            against_base=int(moved.sum()),
            against_source=count(self.source_answer),
            against_others={o: count(self.labels[o]) for o in self.variables if o != variable},
            discriminating=int(self.discriminating(variable).sum()),
            unlike_source=int((self.changed[variable] & ~accepts(label, self.source_answer)).sum()),
        )

    def base_groups(self) -> Int[Tensor, " pairs"]:
        """An index per pair that is equal for pairs sharing a base input: the unit of the bootstrap."""
        group: Tensor = torch.unique(self.base, dim=0, return_inverse=True)[1]
        return group


def families_by_change(changed: Mapping[str, Bool[Tensor, " pairs"]]) -> tuple[Int[Tensor, " pairs"], list[str]]:
    """A family for every set of variables that some pair changes, named after them."""
    names = list(changed)
    code = sum((changed[v].long() << k for k, v in enumerate(names)), torch.zeros(len(changed[names[0]])).long())
    seen, family = torch.unique(code, return_inverse=True)
    spelled = ["+".join(v for k, v in enumerate(names) if int(c) >> k & 1) or "none" for c in seen]
    return family, spelled


def distinct_rows(rows: Int[Tensor, "rows inputs"]) -> Int[Tensor, "distinct inputs"]:
    """The rows without repetitions, in their order."""
    if not len(rows):
        return rows
    return rows[first_of_each(row_codes(rows)).sort().values]


def row_codes(rows: Shaped[Tensor, "rows ..."]) -> Int[Tensor, " rows"]:
    """A number 0, 1, ... per row that is equal for bit-identical rows (torch.unique over rows is many times slower)."""
    rows = rows.contiguous().flatten(1)
    words = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[rows.element_size()]
    bits = rows.view(words).long()
    factors = torch.randint(1 << 62, (bits.shape[1],), generator=torch.Generator().manual_seed(0)) | 1
    codes: Tensor = torch.unique((bits * factors.to(bits.device)).sum(dim=1), return_inverse=True)[1]
    # a hash may collide: every row must equal the last one of its code
    last = torch.zeros(int(codes.max()) + 1, dtype=torch.long, device=bits.device)
    last[codes] = torch.arange(len(bits), device=bits.device)
    if bool((bits[last[codes]] == bits).all()):
        return codes
    exact: Tensor = torch.unique(bits, dim=0, return_inverse=True)[1]
    return exact


def first_of_each(code: Int[Tensor, " rows"]) -> Int[Tensor, " codes"]:
    """The first row with each code 0, 1, ..."""
    first = torch.full((int(code.max()) + 1,), len(code), device=code.device)
    return first.scatter_reduce(0, code, torch.arange(len(code), device=code.device), reduce="amin")


# -- drawing pairs --------------------------------------------------------------------------------------------

Quota = tuple[Bool[Tensor, " draws"], int]
"""Which candidate pairs count towards a quota, and how many are wanted."""

CANDIDATES = 1 << 17
"""Pairs that are looked at together."""
LARGE_POOL = 1 << 14
"""Rows of a pool whose pairs are too many to be put in order."""
POLICIES = ("mixed", "only", "sensitive", "invariant", "balanced")


def draw_pairs(
    causal: CausalModel,
    pool: Int[Tensor, "rows inputs"],
    policy: str,
    size: int,
    generator: torch.Generator,
    *,
    variable: str | None = None,
    variables: Sequence[str] | None = None,
    name: str = "pairs",
    short: bool = False,
) -> Bank:
    """Ordered pairs of different pool rows in random order, the first ones meeting the policy's quotas:

    - `mixed`: half change at least one variable, half change none (the paper's fit bank);
    - `only`: equal shares that change one variable and no other (the paper's calibration bank);
    - `sensitive` / `invariant`: all change / leave `variable` (the paper's test banks);
    - `balanced`: equal shares for every set of changed variables, each with as many different bases as there are
      (ours).

    A pool that offers too few pairs of some kind is refused, or with `short` all of that kind are taken.
    """
    if policy not in POLICIES:
        unknown("pair policy", policy, POLICIES)
    variables = tuple(variables or causal.variables)
    if policy in ("sensitive", "invariant") and variable not in variables:
        unknown(f"variable of policy '{policy}'", variable, variables)
    pool = distinct_rows(pool)
    for v in variables:
        causal.require(v)
    values = causal.run(pool)
    sets = _possible_changes([values[v] for v in variables]) if policy == "balanced" else []
    parts = {"mixed": 2, "only": len(variables), "balanced": len(sets)}.get(policy, 1)
    wanted = [size // parts + (k < size % parts) for k in range(parts)]
    taken: list[list[Tensor]] = [[] for _ in wanted]
    missing = list(wanted)
    rows = len(pool)
    uses = torch.zeros(rows, dtype=torch.long)
    for candidates in _in_random_order(rows, generator):
        base, source = candidates.long() // rows, candidates.long() % rows
        changed = torch.stack([~same(values[v][base], values[v][source]) for v in variables])
        for k, fits in enumerate(_quota_masks(policy, changed, variables, variable, sets)):
            hits = candidates[fits & (base != source)].long()
            if policy == "balanced":
                hits = hits[_spread_over_bases(hits // rows, uses)]
            hits = hits[: missing[k]]
            uses += torch.bincount(hits // rows, minlength=rows)
            taken[k].append(hits)
            missing[k] -= len(hits)
        if not any(missing):
            break
    if any(missing) and not (short and sum(missing) < size):
        whose = f" for '{variable}'" if variable else ""
        raise PlotError(
            f"Bank '{name}' (policy '{policy}'{whose}) wants {size} pairs, but a pool of {rows} rows offers "
            f"{sum(missing)} too few. Use a larger pool, a balanced sampler, or a smaller bank."
        )
    chosen = torch.cat([torch.cat(hits) for hits in taken])
    chosen = chosen[torch.randperm(len(chosen), generator=generator)]
    return Bank.from_pairs(causal, pool[chosen // rows], pool[chosen % rows], name=name, variables=variables)


def _in_random_order(rows: int, generator: torch.Generator) -> Iterator[Int[Tensor, " some"]]:
    """The numbers of ordered pairs of rows in random order, some at a time; of a large pool a few million of them."""
    if rows <= LARGE_POOL:
        yield from torch.randperm(rows * rows, generator=generator, dtype=torch.int32).split(CANDIDATES)
        return
    seen = torch.zeros(0, dtype=torch.long)
    for _ in range(LARGE_POOL * LARGE_POOL // CANDIDATES // 16):
        drawn = torch.randint(rows * rows, (CANDIDATES,), generator=generator).unique()
        drawn = drawn[~torch.isin(drawn, seen)]
        seen = torch.cat([seen, drawn])
        yield drawn[torch.randperm(len(drawn), generator=generator)]


def _spread_over_bases(base: Int[Tensor, " pairs"], uses: Int[Tensor, " rows"]) -> Int[Tensor, " pairs"]:
    """An order of pairs in which no base comes again before all others have come, those `uses` knows least first.

    A verdict rests on its independent base inputs: pairs that share one tell it little more.
    """
    by_base = base.argsort(stable=True)
    count = torch.bincount(base, minlength=len(uses))
    first = count.cumsum(0) - count
    again = torch.empty_like(base)
    again[by_base] = torch.arange(len(base)) - first[base[by_base]]
    return (again * (int(uses.max()) + 1) + uses[base]).argsort(stable=True)


def _possible_changes(values: Sequence[Tensor]) -> list[int]:
    """The sets of variables that some pair of different rows changes, as bit codes.

    A function of the others has no set alone; nothing changes only between rows that agree in every variable.
    """
    columns = [torch.unique(v, dim=0, return_inverse=True)[1] for v in values]
    joint, count = torch.unique(torch.stack(columns, dim=1), dim=0, return_counts=True)
    masks: set[int] = set()
    for some in joint.split(max(1, (CANDIDATES << 5) // joint.numel())):  # variables may have many values
        differ = some[:, None, :] != joint[None, :, :]
        masks |= set(torch.unique((differ.long() << torch.arange(len(values))).sum(dim=-1)).tolist())
        if len(masks) == 1 << len(values):
            break
    return [mask for mask in sorted(masks) if mask or bool((count > 1).any())]


def _quota_masks(
    policy: str, changed: Tensor, variables: Sequence[str], variable: str | None, sets: Sequence[int]
) -> list[Tensor]:
    if policy == "mixed":
        return [changed.any(dim=0), ~changed.any(dim=0)]
    if policy == "only":
        return [changed[k] & (changed.sum(dim=0) == 1) for k in range(len(variables))]
    if policy == "balanced":
        code = torch.stack([changed[k].long() << k for k in range(len(variables))]).sum(dim=0)
        return [torch.eq(code, c) for c in sets]
    hit = changed[variables.index(variable or "")]
    return [hit if policy == "sensitive" else ~hit]


@dataclass(frozen=True)
class Splits:
    """The banks of one study: fit, calibration, and one sensitivity and one invariance test bank per variable."""

    fit: Bank
    calibration: Bank
    test: Mapping[tuple[str, str], Bank]
    """(variable, "sensitivity" | "invariance") -> bank; also shared pairs between test banks are allowed."""
    shared_sources: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def checked(
        cls, fit: Bank, calibration: Bank, test: Mapping[tuple[str, str], Bank], *, strict: bool = False
    ) -> Splits:
        """Refuse splits that share a pair or a base input; count shared sources, or refuse them when `strict`."""
        if not test:
            raise PlotError("Splits need at least one test bank: {(variable, 'sensitivity' | 'invariance'): bank}.")
        for (variable, kind), bank in test.items():
            if not len(bank):
                raise PlotError(
                    f"The {kind} test bank of '{variable}' is empty: {_why_none(calibration, variable, kind)}"
                )
        for variable in calibration.variables:
            if not calibration.changed[variable].any():
                raise PlotError(
                    f"Calibration bank '{calibration.name}' has no pair that changes '{variable}': "
                    f"a handle for it cannot be chosen. Add sensitive pairs."
                )
        held_out = torch.cat([b.base for b in test.values()]), torch.cat([b.source for b in test.values()])
        parts = {
            "fit": (fit.base, fit.source),
            "calibration": (calibration.base, calibration.source),
            "test": held_out,
        }
        shared: dict[str, int] = {}
        names = list(parts)
        for i, a in enumerate(names):
            for b in names[i + 1 :]:
                bases = _common_rows(parts[a][0], parts[b][0])
                if bases:
                    raise PlotError(f"The {a} and {b} banks share {bases} base inputs; splits must share none.")
                shared[f"{a}/{b}"] = _common_rows(parts[a][1], parts[b][1])
        if strict and any(shared.values()):
            raise PlotError(
                f"Strict splits share no source inputs, but found {shared}. Draw sources inside each split."
            )
        return cls(fit, calibration, test, shared)


def _why_none(other: Bank, variable: str, kind: str) -> str:
    """Why no pair changes, or keeps, a variable, as far as the pairs of another bank tell."""
    values = torch.cat([other.causal.run(rows)[variable] for rows in (other.base, other.source)])
    count = len(torch.unique(values.flatten(1) if values.ndim > 1 else values, dim=0))
    if kind == "sensitivity":
        same_value = f"It has the same value in all inputs, {values[0].tolist()}. " if count == 1 else ""
        return f"no pair changes it. {same_value}Leave it out of `variables`, or give inputs in which it differs."
    inputs = len(distinct_rows(torch.cat([other.base, other.source])))
    return (
        f"no two inputs give it the same value ({count} values in {inputs} inputs). A variable needs values that come "
        f"back: round it or sort it into a few classes, or leave it out of `variables`."
    )


def _common_rows(a: Tensor, b: Tensor) -> int:
    """Count the distinct rows that stand in both tensors."""
    codes = row_codes(torch.cat([a, b]))
    return len(set(codes[: len(a)].tolist()) & set(codes[len(a) :].tolist()))
