"""Roles of tokens: rules by which the same part is found in every prompt, wherever it stands there.

They are read off the prompts alone. A token's role may be its distance from an end of the prompt, its distance from a
word that stands once in every prompt, or to be the first, second, ... of a class. Tokens that take turns make a class:
whatever names the prompts have, each has one of them, or two. So do tokens that stand between the same neighbours.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from plot_ot.errors import PlotError, unknown
from plot_ot.subjects.decoder.subject import DecoderSubject

KINDS = ("end", "start", "near", "class", "again", "single")
REACH = 2
"""Tokens around a word that stands once in every prompt which get their role by it."""
ALIKE = 0.5
"""Share of their neighbours that tokens of one class have in common, at least."""
EXACT = 1e-6
"""Below this, differences of counts are rounding."""
SHOWN = 3
"""Tokens of a class that its name shows."""
MOST_TOKENS = 1 << 16
"""Tokens of a class that a file may hold."""


@dataclass(frozen=True)
class Role:
    """A rule that picks one token of a prompt.

    `end` and `start`: the `number`-th token from there (1 is the last, or the first). `near`: `number` tokens after the
    one that `tokens` names, which stands there once. Of the tokens of a class: `class`, the `number`-th in the prompt,
    or from its end if negative; `again`, that occurrence of the one which stands there more than once; `single`, the
    first that stands there once only.
    """

    kind: str
    number: int = 1
    tokens: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            unknown("kind of role", self.kind, KINDS)

    @cached_property
    def _own(self) -> frozenset[int]:
        return frozenset(self.tokens)

    def index(self, prompt: Sequence[int]) -> int | None:
        """Where the token is in a prompt, from its beginning; None where there is none."""
        at = self._at(prompt)
        return at if at is not None and 0 <= at < len(prompt) else None

    def _at(self, prompt: Sequence[int]) -> int | None:
        if self.kind == "end":
            return len(prompt) - self.number
        if self.kind == "start":
            return self.number - 1
        places = [t for t, token in enumerate(prompt) if token in self._own]
        if self.kind == "near":
            return places[0] + self.number if len(places) == 1 else None
        if self.kind != "class":
            times = Counter(prompt[t] for t in places)
            wanted = [t for t in places if (times[prompt[t]] > 1) == (self.kind == "again")]
            places = [t for t in wanted if prompt[t] == prompt[wanted[0]]]
        which = self.number - 1 if self.number > 0 else self.number
        return places[which] if -len(places) <= which < len(places) else None

    def name(self, word: Callable[[int], str] = str) -> str:
        """The rule in a few characters; `word` says what a token is called."""
        if self.kind in ("end", "start"):
            return f"{self.kind}{'-' if self.kind == 'end' else '+'}{self.number}"
        shown = "|".join(_plain(word(t)) for t in self.tokens[:SHOWN]) + ("|.." if len(self.tokens) > SHOWN else "")
        if self.kind == "near":
            return f"{shown}{self.number:+d}" if self.number else shown
        kind = {"class": "", "again": "again ", "single": "single "}[self.kind]
        return f"{kind}{{{shown}}}" + (f" {self.number}" if self.kind != "single" else "")

    def described(self) -> dict[str, Any]:
        """The rule as plain values, for files."""
        return {"kind": self.kind, "number": self.number, "tokens": list(self.tokens)}

    @classmethod
    def read(cls, told: Mapping[str, Any]) -> Role:
        """The rule that plain values describe."""
        tokens = told.get("tokens", ())
        whole = isinstance(tokens, Sequence) and all(type(t) is int for t in tokens)
        if not whole or len(tokens) > MOST_TOKENS or type(told.get("number")) is not int:
            raise PlotError(f"This is no role of a token: {str(dict(told))[:200]}. Derive the roles again.")
        return cls(str(told.get("kind")), int(told["number"]), tuple(tokens))


def _plain(word: object) -> str:
    """A token's text without what has a meaning in names of places."""
    return "".join(c for c in str(word).strip() if c not in "@|{}\n" and c.isprintable()).replace("->", "") or "·"


# -- reading roles off prompts ----------------------------------------------------------------------------------------


def derive_roles(prompts: Sequence[Sequence[int]], reach: int = REACH) -> list[Role]:
    """Every role that some token has in all of these prompts; of rules that always agree the plainest."""
    if not prompts or not min(map(len, prompts)):
        raise PlotError("Roles are read off prompts; found none, or empty ones.")
    found: dict[tuple[int, ...], Role] = {}
    for role in _candidates(prompts, reach):
        at = [role.index(p) for p in prompts]
        if None not in at:
            # counted from the end, as places are: a prompt that begins with more is the same prompt
            found.setdefault(tuple(a - len(p) for a, p in zip(at, prompts, strict=True) if a is not None), role)
    return list(found.values())


def _candidates(prompts: Sequence[Sequence[int]], reach: int) -> Iterator[Role]:
    """Rules from the plainest on."""
    shortest = min(map(len, prompts))
    yield from (Role("end", k) for k in range(1, shortest + 1))
    yield from (Role("start", k) for k in range(1, shortest + 1))
    once = set.intersection(*({t for t, n in Counter(p).items() if n == 1} for p in prompts))
    for token in sorted(once):
        yield from (Role("near", k, (token,)) for k in sorted(range(-reach, reach + 1), key=abs))
    for members in token_classes(prompts):
        own = set(members)
        fewest = min(sum(t in own for t in p) for p in prompts)
        yield from (Role("class", k, members) for n in range(1, fewest + 1) for k in (n, -n))
        yield from (Role("again", k, members) for k in (1, 2))
        yield Role("single", 1, members)


def token_classes(prompts: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    """Tokens that belong together: those that take turns, and of the others those between the same neighbours.

    Tokens that are in every prompt are in no class.
    """
    always = set.intersection(*map(set, prompts))
    varying = sorted({t for p in prompts for t in p} - always)
    turns = _taking_turns(prompts, varying)
    taken = {t for group in turns for t in group}
    return [*turns, *_between_the_same(prompts, [t for t in varying if t not in taken])]


def _taking_turns(prompts: Sequence[Sequence[int]], tokens: Sequence[int]) -> list[tuple[int, ...]]:
    """Sets of tokens of which every prompt has the same number, be it one name or two.

    With the counts C [prompts, tokens], an indicator z of such a set solves C z = const. Where these sets are disjoint
    they span all solutions, so that the projection onto these is a block of equal entries for each set.
    """
    if not tokens or len(prompts) <= len(tokens):
        return []  # too few prompts: sets would be found by chance
    column = {t: k for k, t in enumerate(tokens)}
    counts = torch.zeros(len(prompts), len(tokens), dtype=torch.float64)
    for row, p in enumerate(prompts):
        for t in p:
            if t in column:
                counts[row, column[t]] += 1
    _, spread, directions = torch.linalg.svd(counts - counts.mean(dim=0), full_matrices=False)
    null = directions[spread <= EXACT * spread[0]]
    projection = null.T @ null
    groups = list[tuple[int, ...]]()
    for k in range(len(tokens)):
        members = ((projection[k] - projection[k, k]).abs() < EXACT) & (projection[k] > EXACT)
        number = counts[:, members].sum(dim=1)
        group = tuple(tokens[j] for j in members.nonzero().squeeze(1).tolist())
        if len(group) > 1 and group not in groups and bool((number == number[0]).all()):
            groups.append(group)
    return groups


def _between_the_same(prompts: Sequence[Sequence[int]], tokens: Sequence[int]) -> list[tuple[int, ...]]:
    """Tokens that hang together by pairs which share half of their neighbours."""
    beside: dict[int, set[tuple[str, int]]] = defaultdict(set)
    for p in prompts:
        for before, token, after in zip([-1, *p], p, [*p[1:], -1], strict=False):
            beside[token] |= {("before", before), ("after", after)}
    left, groups = list(tokens), list[tuple[int, ...]]()
    while left:
        group, fresh = list[int](), [left.pop(0)]
        while fresh:
            group += fresh
            alike = [t for t in left if any(_shared(beside[t], beside[u]) >= ALIKE for u in fresh)]
            left, fresh = [t for t in left if t not in alike], alike
        if len(group) > 1:
            groups.append(tuple(sorted(group)))
    return groups


def _shared(a: set[tuple[str, int]], b: set[tuple[str, int]]) -> float:
    return len(a & b) / len(a | b)


# -- subjects that look at roles --------------------------------------------------------------------------------------


class _Found:
    """Where roles are in the prompts of input rows, found for all roles at once."""

    def __init__(self, subject: DecoderSubject, roles: Mapping[str, Role]) -> None:
        self.encoded, self.roles = subject.encoded, roles
        self._latest: tuple[Tensor, dict[str, Tensor]] | None = None

    def at(self, name: str) -> Callable[[Tensor], Int[Tensor, " rows"]]:
        """A position as subjects take it: an index from the end of every prompt."""

        def where(rows: Tensor) -> Int[Tensor, " rows"]:
            if self._latest is None or not torch.equal(self._latest[0], rows):
                self._latest = rows.clone(), self._all(prompts_of(*self.encoded(rows)))
            return self._latest[1][name]

        return where

    def _all(self, prompts: Sequence[Sequence[int]]) -> dict[str, Int[Tensor, " rows"]]:
        found = {}
        for name, role in self.roles.items():
            at = [role.index(p) for p in prompts]
            if None in at:
                row = at.index(None)
                raise PlotError(
                    f"Prompt {row} has no token '{name}' ({role.kind}); its tokens are {list(prompts[row])}. Derive "
                    f"the roles from prompts like it, too, or leave it out."
                )
            found[name] = torch.tensor([a - len(p) for a, p in zip(at, prompts, strict=True) if a is not None])
        return found


def prompts_of(ids: Int[Tensor, "rows tokens"], real: Bool[Tensor, "rows tokens"]) -> list[list[int]]:
    """The tokens of every prompt, without padding."""
    return [row[mask].tolist() for row, mask in zip(ids, real, strict=True)]


def with_roles(
    subject: DecoderSubject,
    inputs: Tensor | None = None,
    *,
    roles: Mapping[str, Role] | None = None,
    reach: int = REACH,
    word: Callable[[int], str] = str,
) -> DecoderSubject:
    """The same language model, looked at where the tokens of each role are: places `...@role`, besides the last token.

    Roles are read off the prompts of the `inputs`, so that a variable whose token moves from prompt to prompt can be
    localized without saying where it is: the coupling over tokens (`localize` begins with it) gives every role its
    mass. `word` says what a token is called (`lambda t: tokenizer.decode([t])`). Or give `roles` that are known, such
    as those of a handle (`roles_of(handle)`). Roles of tokens that are the last one in every prompt are left out.
    """
    if not isinstance(subject, DecoderSubject):
        raise PlotError(
            f"Roles are those of tokens in prompts; found a {type(subject).__name__}. Give a DecoderSubject, such as "
            f"load_subject(model, hypothesis) makes, and rows of inputs (hypothesis.rows(...))."
        )
    if reach < 0:
        raise PlotError(f"`reach` is how many tokens from a landmark are looked at, 0 or more; found {reach}.")
    if (inputs is None) == (roles is None):
        raise PlotError("Give the `inputs` whose prompts roles are read off, or the `roles`.")
    if roles is None:
        assert inputs is not None  # noqa: S101
        if not len(inputs):
            raise PlotError("There are no inputs: roles are read off their prompts.")
        derived = derive_roles(prompts_of(*subject.encoded(inputs)), reach)
        roles = {role.name(word): role for role in derived if role != Role("end", 1)}
    for name, role in roles.items():
        if not isinstance(role, Role):
            raise PlotError(
                f"`roles` are those of a handle, roles_of(handle); found {type(role).__name__} as '{name}'. To use "
                f"those of a subject again, look at the same prompts."
            )
    if not roles:
        raise PlotError("These prompts have one token each: there is nothing but the last token.")
    found = _Found(subject, roles)
    looking = subject.looking_at({**subject.positions, **{name: found.at(name) for name in roles}})
    looking.rules = {**subject.rules, **{name: role.described() for name, role in roles.items()}}
    return looking


def roles_of(handle: Any) -> dict[str, Role]:
    """The roles by which a handle finds its tokens, as it was saved with them."""
    told = handle.chosen.get("rules")
    if not isinstance(told, Mapping) or not told:
        raise PlotError(f"The handle for '{handle.variable}' does not find its tokens by roles.")
    return {str(name): Role.read(rule) for name, rule in told.items()}
