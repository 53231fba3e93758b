"""Indirect object identification: who is handed the thing? The causal model, prompts, counterfactuals and banks.

    When John and Mary went to the store, John gave a drink to        -> " Mary"

The answer is the name that is not said again. A row of integers fully determines a prompt:

    template  first  second  repeated  place  thing

`first` and `second` index the names in the order of the first clause, `repeated` says which of them (0 or 1) is the
subject of the second: 1 is the pattern ABBA, 0 is BABA.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations, pairwise
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from plot_ot.abstract import prompts
from plot_ot.abstract.banks import Splits
from plot_ot.abstract.causal_model import CausalModel
from plot_ot.abstract.prompts import Encoded
from plot_ot.errors import PlotError, unknown
from plot_ot.tasks.filling import Draw, Filling, share_out
from plot_ot.tasks.text_data import Cell, Sizes, TextBanks, cell_quotas

COLUMNS = ("template", "first", "second", "repeated", "place", "thing")
TEMPLATE, FIRST, SECOND, REPEATED, PLACE, THING = range(len(COLUMNS))
PAIR = slice(FIRST, SECOND + 1)
Rows = Int[Tensor, "rows 6"]
NamePairs = Int[Tensor, "pairs 2"]
VARIABLES = ("name_position", "name_token")

_FAMILIAR = """
John Mary James David Robert Michael William Richard Thomas Charles Daniel Paul George Peter Henry Adam Frank Jack Alice
Anna Emma Sarah Laura Susan Karen Nancy Helen Julia Jane Linda
"""
_FRESH = """
Simon Sam Ben Tom Kevin Brian Andrew Steven Matthew Edward Eric Jason Martin Oliver Lucas Maria Rachel Lisa Kate Emily
Lucy Amy Claire Diana Rebecca Jennifer Jessica Elizabeth Margaret Ruth
"""
NAMES = (*_FAMILIAR.split(), *_FRESH.split())
ANSWERS: Sequence[str] = NAMES
FAMILIAR, FRESH = range(30), range(30, len(NAMES))
"""The names of the fit, calibration and test banks, and those of the transfer banks only."""

# No template begins with a name: without a space it is another token, and SmolLM2 is then little better than chance.
TEMPLATES = (
    "When {first} and {second} went to the {place}, {subject} gave a {thing} to",
    "After {first} and {second} met at the {place}, {subject} handed a {thing} to",
    "While {first} and {second} were waiting at the {place}, {subject} offered a {thing} to",
    "Because {first} and {second} worked at the {place}, {subject} lent a {thing} to",
    "At the {place}, {first} and {second} talked for a while before {subject} gave the {thing} to",
    "Then {first} and {second} spent the day at the {place}, and {subject} decided to give a {thing} to",
    # of the transfer banks only
    "As {first} and {second} were leaving the {place}, {subject} gave a {thing} to",
    "When {first} and {second} got a {thing} at the {place}, {subject} gave it to",
    "During the break {first} and {second} stood outside the {place}, and {subject} gave a {thing} to",
    "Then {first} and {second} sat down in the {place}, and {subject} showed a {thing} to",
)
USUAL, OTHER = range(6), range(6, len(TEMPLATES))
PLACES = ("store", "garden", "school", "office", "park", "market", "station", "library")
THINGS = ("drink", "book", "ring", "letter", "ball", "basket", "camera", "flower")

FAMILIES: dict[str, tuple[Cell, ...]] = {
    "names": ((False, True),),
    "order": ((True, False),),
    "subject": ((True, True),),
    "order_subject": ((False, True),),
    "names_subject": ((True, True),),
    "scene": ((False, False),),
}
"""Counterfactual families and whether their pairs change (name_position, name_token)."""
FIT_FAMILIES = tuple(f for f in FAMILIES if f != "scene")
"""A family that changes no variable has no effect to compare with."""


def causal_model() -> CausalModel:
    """position = the name (0 first, 1 second) that is not repeated; token = that name; the answer is the token."""
    return CausalModel(
        inputs=COLUMNS,
        mechanisms={
            "name_position": lambda repeated: 1 - repeated,
            "name_token": lambda name_position, first, second: torch.where(name_position == 0, first, second),
            # apart from the token, so that a swap of the token is one of a variable before the output
            "name": lambda name_token: name_token,
        },
        output="name",
        variables=VARIABLES,
        meanings={"name_position": "which of the two names is not repeated", "name_token": "that name"},
    )


# -- prompts --------------------------------------------------------------------------------------------------


def check_rows(rows: Rows) -> None:
    """Refuse rows that are no prompt about two different names."""
    if not isinstance(rows, Tensor) or rows.ndim != 2 or rows.shape[1] != len(COLUMNS):
        found = tuple(rows.shape) if isinstance(rows, Tensor) else type(rows).__name__
        raise PlotError(f"IOI rows must have shape [rows, {len(COLUMNS)}] ({' '.join(COLUMNS)}); found {found}.")
    sizes = torch.tensor([len(TEMPLATES), len(NAMES), len(NAMES), 2, len(PLACES), len(THINGS)])
    wrong = ((rows < 0) | (rows >= sizes)).any(dim=1) | (rows[:, FIRST] == rows[:, SECOND])
    if wrong.any():
        row = int(wrong.nonzero()[0])
        raise PlotError(
            f"Row {row} of the IOI rows is no prompt: {dict(zip(COLUMNS, rows[row].tolist(), strict=True))}. Entries "
            f"lie below {sizes.tolist()}, and the two names differ."
        )


def render(rows: Rows) -> list[str]:
    """The prompt of every row, without a trailing space: the model answers " Mary"."""
    check_rows(rows)
    return [
        TEMPLATES[template].format(
            first=NAMES[first],
            second=NAMES[second],
            subject=NAMES[second if repeated else first],
            place=PLACES[place],
            thing=THINGS[thing],
        )
        for template, first, second, repeated, place, thing in rows.tolist()
    ]


def encoder(tokenizer: Any, *, bos: int | None) -> Callable[[Rows], Encoded]:
    """A function that turns rows into tokens, after `bos` if the model wants one."""
    return lambda rows: prompts.encode(render(rows), tokenizer, bos=bos)


def answer_tokens(tokenizer: Any) -> list[list[int]]:
    """For each name, the ids of " X" and, where it is one token, "X".

    A name follows a space here, so " X" must be a single token; names that are not, and names that share one, are
    refused.
    """
    broken = [n for n in NAMES if len(tokenizer.encode(f" {n}", add_special_tokens=False)) != 1]
    if broken:
        raise PlotError(
            f"In this tokenizer the names {', '.join(broken)} are not single tokens after a space: the answer would be "
            f"read from a part of the name. Use a model whose tokenizer has them."
        )
    return prompts.answer_tokens(tokenizer, NAMES)


def says(tokenizer: Any, tokens: Int[Tensor, " rows"], names: Int[Tensor, " rows"]) -> Bool[Tensor, " rows"]:
    """Whether each token is that name."""
    return prompts.says(tokenizer, tokens, NAMES, names)


def name_pairs(names: Sequence[int] = FAMILIAR) -> NamePairs:
    """Every unordered pair of the names: what the splits share none of."""
    return torch.tensor(list(combinations(names, 2)))


def draw_rows(
    count: int,
    generator: torch.Generator,
    *,
    about: NamePairs | None = None,
    templates: Sequence[int] = USUAL,
) -> Rows:
    """Random prompts about some pairs of names (default: all familiar ones), in either order and pattern."""
    about = name_pairs() if about is None else about
    sizes = (len(templates), len(about), 2, 2, len(PLACES), len(THINGS))
    template, pair, turned, repeated, place, thing = (torch.randint(n, (count,), generator=generator) for n in sizes)
    names = torch.where(turned.bool().unsqueeze(1), about[pair].flip(1), about[pair])
    return torch.stack([torch.tensor(templates)[template], *names.T, repeated, place, thing], dim=1)


# -- counterfactuals ------------------------------------------------------------------------------------------


def sources(bases: Rows, family: str, generator: torch.Generator, *, about: NamePairs | None = None) -> Rows:
    """A counterfactual source for every base.

    - `names`: two other names, of the pairs `about` (the token changes);
    - `order`: the two names change places, the subject stays the same person (the position changes);
    - `subject`: the other person is the subject (both change);
    - `order_subject`: both of these (the token changes);
    - `names_subject`: other names, and the other one is the subject (both change; only here do the swaps of the two
      variables and the base give three different answers);
    - `scene`: another place and thing (neither changes).
    """
    if family not in FAMILIES:
        unknown("counterfactual family", family, FAMILIES)
    moved = bases.clone()
    if "names" in family:
        moved[:, PAIR] = _other_names(bases[:, PAIR], name_pairs() if about is None else about, generator)
    if "order" in family:
        moved[:, PAIR] = bases[:, PAIR].flip(1)
    if family in ("order", "subject", "names_subject"):
        moved[:, REPEATED] = 1 - bases[:, REPEATED]
    if family == "scene":
        for column, words in ((PLACE, PLACES), (THING, THINGS)):
            step = torch.randint(1, len(words), (len(bases),), generator=generator)
            moved[:, column] = (bases[:, column] + step) % len(words)
    return moved


def _other_names(names: NamePairs, about: NamePairs, generator: torch.Generator) -> NamePairs:
    """A pair without either name of the base, in random order."""
    clash = (names[:, None, :, None] == about[None, :, None, :]).flatten(2).any(dim=2)
    if clash.all(dim=1).any():
        raise PlotError(f"{len(about)} pairs of names are too few: some base has a name in common with all of them.")
    chosen = torch.rand(clash.shape, generator=generator).masked_fill(clash, -1.0).argmax(dim=1)
    turned = torch.randint(2, (len(names), 1), generator=generator).bool()
    return torch.where(turned, about[chosen].flip(1), about[chosen])


def examples() -> list[dict[str, str]]:
    """One pair of every family in plain words: prompts, answers, and what swapping each variable should give."""
    generator, causal = torch.Generator().manual_seed(0), causal_model()
    base = torch.tensor([[0, NAMES.index("John"), NAMES.index("Mary"), 0, 0, 0]])
    table = []
    for family in FAMILIES:
        source = sources(base, family, generator)
        answers = {
            "base_answer": causal.answer(base),
            "source_answer": causal.answer(source),
            **{f"swap_{v}": causal.swap(base, source, v) for v in VARIABLES},
        }
        texts = {"base": render(base)[0], "source": render(source)[0]}
        table.append({"family": family, **texts, **{k: NAMES[int(x)] for k, x in answers.items()}})
    return table


# -- banks ----------------------------------------------------------------------------------------------------


def template_pass_rates(
    answers_correctly: Callable[[Rows], Bool[Tensor, " rows"]], count: int = 100, seed: int = 0
) -> dict[str, float]:
    """Template -> share of random prompts that the model answers correctly; the transfer templates with fresh names."""
    generator = torch.Generator().manual_seed(50_000 + seed)
    rates = {}
    for k, template in enumerate(TEMPLATES):
        about = name_pairs(FRESH if k in OTHER else FAMILIAR)
        rows = draw_rows(count, generator, about=about, templates=[k])
        rates[template] = float(answers_correctly(rows).double().mean())
    return rates


def draw_splits(
    seed: int,
    answers_correctly: Callable[[Rows], Bool[Tensor, " rows"]],
    sizes: Sizes | None = None,
    *,
    least_pass_rate: float = 0.1,
) -> TextBanks:
    """Banks whose pairs of names are split 4 : 3 : 3 into fit, calibration and test; sources stay inside.

    Only pairs with both prompts answered correctly are kept. Fit: the families that change something, in equal shares.
    The others: the four cells of (position changed, token changed) in equal shares, so 2n pairs hold n sensitive and n
    invariant ones for both variables. The transfer banks have names and templates of their own.
    """
    sizes, generator = sizes or Sizes(), torch.Generator().manual_seed(50_000 + seed)
    filling = Filling(causal_model(), tuple(FAMILIES), answers_correctly, generator, least_pass_rate)
    pairs = name_pairs()[torch.randperm(len(name_pairs()), generator=generator)]
    marks = [0, round(0.4 * len(pairs)), round(0.7 * len(pairs)), len(pairs)]
    parts = [pairs[a:b] for a, b in pairwise(marks)]

    def about(part: NamePairs, templates: Sequence[int] = USUAL) -> Draw:
        def draw(family: str, count: int) -> tuple[Rows, Rows]:
            base = draw_rows(count, generator, about=part, templates=templates)
            return base, sources(base, family, generator, about=part)

        return draw

    def quotas(size: int) -> list[Any]:
        return cell_quotas(FAMILIES, VARIABLES, size)

    fit = filling.bank("fit", share_out(sizes.fit, FIT_FAMILIES), about(parts[0]))
    calibration = filling.bank("calibration", quotas(sizes.calibration), about(parts[1]))
    test = filling.bank("test", quotas(sizes.test), about(parts[2]))
    transfer = filling.bank("transfer", quotas(sizes.transfer), about(name_pairs(FRESH), OTHER))
    splits = Splits.checked(fit, calibration, test.by_variable(), strict=True)
    return TextBanks(splits, transfer.by_variable(), filling.passed, filling.seconds)
