"""Multiple-choice questions: the causal model, counterfactual families and banks (paper, Section 4.3, Appendix B.3)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise, permutations, product

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from plot_ot.abstract.banks import Splits
from plot_ot.abstract.causal_model import CausalModel, Mechanism
from plot_ot.errors import PlotError, unknown
from plot_ot.models.vocabulary import COLOURS, FAMILIAR, FRESH, LETTERS, LEXICON, Lexicon
from plot_ot.tasks.filling import Draw, Filling, Quota, share_out
from plot_ot.tasks.mcqa_text import (
    COL,
    COLOUR,
    COLUMNS,
    OBJECT,
    OPTIONS,
    PLURAL,
    SYM,
    TEMPLATE,
    answer_tokens,
    check_rows,
    encoder,
    render,
    says,
)
from plot_ot.tasks.text_data import CELLS, Cell, Sizes, TextBanks, cell_quotas

__all__ = [
    "ANSWERS",
    "FAMILIES",
    "VARIABLES",
    "Sizes",
    "answer_tokens",
    "causal_model",
    "draw_rows",
    "draw_splits",
    "encoder",
    "examples",
    "questions",
    "render",
    "says",
    "sources",
]

Rows = Int[Tensor, "rows 12"]
VARIABLES = ("answer_pointer", "answer_token")
ANSWERS: Sequence[str] = LETTERS
FACTS = ("any", "usual")
FIRST_LETTERS = tuple(range(OPTIONS))
"""A, B, C, D."""
LATER_LETTERS = tuple(range(OPTIONS, len(LETTERS)))
"""E .. Z: the letters of the transfer banks."""

FAMILIES: dict[str, tuple[Cell, ...]] = {
    "answerPosition": ((True, True), (False, False)),
    "randomLetter": ((False, True), (False, False)),
    "answerPosition_randomLetter": CELLS,
    "lineOrder": ((True, False), (False, False)),
}
"""Counterfactual families and the cells their pairs can fall into. The first three are the paper's."""


def causal_model() -> CausalModel:
    """q = the queried colour, AP = the i in 1..4 with Col_i = q, AT = Sym_AP; the answer is the letter AT, 0..25."""
    cols, syms = (tuple(f"{name}{i}" for i in range(1, OPTIONS + 1)) for name in ("Col", "Sym"))

    def pointer(q: Tensor, *colours: Tensor) -> Tensor:
        return 1 + (torch.stack(colours, dim=1) == q.unsqueeze(1)).int().argmax(dim=1)

    def token(ap: Tensor, *symbols: Tensor) -> Tensor:
        return torch.stack(symbols, dim=1).gather(1, ap.unsqueeze(1) - 1).squeeze(1)

    return CausalModel(
        inputs=COLUMNS,
        mechanisms={
            "q": Mechanism(("object", "plural", "template", "colour"), lambda *prompt: prompt[-1]),
            "answer_pointer": Mechanism(("q", *cols), pointer),
            "answer_token": Mechanism(("answer_pointer", *syms), token),
            # apart from AT, so that a swap of AT is one of a variable before the output
            "letter": Mechanism(("answer_token",), lambda at: at),
        },
        output="letter",
        variables=VARIABLES,
        meanings={"answer_pointer": "which line has the right answer", "answer_token": "the letter of that line"},
    )


# -- prompts --------------------------------------------------------------------------------------------------


def questions(
    objects: Sequence[int] = FAMILIAR, facts: str = "any", lexicon: Lexicon = LEXICON
) -> Int[Tensor, "questions 2"]:
    """(object, colour) of every fact that can be stated: in `any` colour, or in the object's `usual` one."""
    if facts not in FACTS:
        unknown("kind of facts", facts, FACTS)
    if facts == "usual":
        return torch.tensor([(k, lexicon.nouns[k].usual) for k in objects])
    return torch.tensor(list(product(objects, range(len(COLOURS)))))


def draw_rows(
    count: int,
    generator: torch.Generator,
    *,
    about: Int[Tensor, "questions 2"] | None = None,
    letters: Sequence[int] | None = None,
    templates: Sequence[int] = (0,),
    options: int = OPTIONS,
) -> Rows:
    """Random prompts about some questions (default: all of the familiar objects), the right option anywhere.

    `letters`: the pool that symbols are drawn from; by default they are A, B, C, D in order.
    """
    if not 2 <= options <= OPTIONS:
        raise PlotError(f"A question has 2 to {OPTIONS} options; found {options}.")
    about = questions() if about is None else about
    rows = torch.full((count, len(COLUMNS)), -1)
    rows[:, [OBJECT, COLOUR]] = about[torch.randint(len(about), (count,), generator=generator)]
    rows[:, PLURAL] = torch.randint(2, (count,), generator=generator)
    rows[:, TEMPLATE] = torch.tensor(templates)[torch.randint(len(templates), (count,), generator=generator)]
    # the right colour and others that differ from it, dealt to the lines
    shift = _distinct(count, options - 1, range(1, len(COLOURS)), generator)
    colours = torch.cat([rows[:, [COLOUR]], (rows[:, [COLOUR]] + shift) % len(COLOURS)], dim=1)
    order = torch.rand(count, options, generator=generator).argsort(dim=1)
    rows[:, COL][:, :options] = colours.gather(1, order)
    drawn = torch.tensor(FIRST_LETTERS[:options]) if letters is None else _distinct(count, options, letters, generator)
    rows[:, SYM][:, :options] = drawn
    return rows


def _distinct(count: int, size: int, pool: Sequence[int], generator: torch.Generator) -> Int[Tensor, "count size"]:
    """`size` different entries of the pool for each row."""
    if len(pool) < size:
        raise PlotError(f"Cannot draw {size} different letters from a pool of {len(pool)}.")
    picked = torch.rand(count, len(pool), generator=generator).argsort(dim=1)[:, :size]
    return torch.tensor(list(pool))[picked]


# -- counterfactuals ------------------------------------------------------------------------------------------


def sources(
    bases: Rows, family: str, generator: torch.Generator, *, letters: Sequence[int] = range(len(LETTERS))
) -> Rows:
    """A counterfactual source for every base; all bases must have the same number of options.

    - `answerPosition`: the colours change places, the symbols stay (AP and AT change, or neither);
    - `randomLetter`: four other symbols from `letters` (AT changes);
    - `answerPosition_randomLetter`: both, independently;
    - `lineOrder`: whole lines change places, symbol and colour together (AP changes, AT does not).
    """
    if family not in FAMILIES:
        unknown("counterfactual family", family, FAMILIES)
    options = int((bases[0, COL] >= 0).sum()) if len(bases) else OPTIONS
    if ((bases[:, COL] >= 0).sum(dim=1) != options).any():
        raise PlotError("All base prompts must have the same number of options; found different ones.")
    moved = bases.clone()
    symbols, colours = moved[:, SYM][:, :options], moved[:, COL][:, :options]
    if "randomLetter" in family:
        symbols.copy_(_distinct(len(bases), options, letters, generator))
    if family != "randomLetter":
        others = torch.tensor(list(permutations(range(options))))[1:]  # the first one moves nothing
        order = others[torch.randint(len(others), (len(bases),), generator=generator)]
        colours.copy_(colours.gather(1, order))
        if family == "lineOrder":
            symbols.copy_(symbols.gather(1, order))
    return moved


def examples() -> list[dict[str, str]]:
    """One pair of every family in plain words: prompts, answers, and what swapping AP and AT should give."""
    lemon, yellow, red, green, blue = 1, 2, 0, 3, 1
    base = torch.tensor([[lemon, 0, 0, yellow, red, blue, yellow, green, *FIRST_LETTERS]])
    causal, other = causal_model(), [LETTERS.index(x) for x in "HTPX"]
    moved, lines = base.clone(), base.clone()
    moved[0, COL] = torch.tensor([green, yellow, red, blue])
    lines[0, COL], lines[0, SYM] = torch.tensor([yellow, red, green, blue]), torch.tensor([2, 0, 3, 1])
    lettered, both = base.clone(), moved.clone()
    lettered[0, SYM] = both[0, SYM] = torch.tensor(other)
    table = []
    for family, source in zip(FAMILIES, (moved, lettered, both, lines), strict=True):
        answers = {
            "base_answer": causal.answer(base),
            "source_answer": causal.answer(source),
            **{f"swap_{v}": causal.swap(base, source, v) for v in VARIABLES},
        }
        prompts = {"base": render(base)[0], "source": render(source)[0]}
        table.append({"family": family, **prompts, **{k: LETTERS[int(x)] for k, x in answers.items()}})
    return table


# -- banks ----------------------------------------------------------------------------------------------------


def draw_splits(
    seed: int,
    answers_correctly: Callable[[Rows], Bool[Tensor, " rows"]],
    sizes: Sizes | None = None,
    *,
    families: Sequence[str] = tuple(FAMILIES),
    facts: str = "any",
    bases: Rows | None = None,
    lexicon: Lexicon = LEXICON,
    least_pass_rate: float = 0.1,
) -> TextBanks:
    """Banks whose questions (object, colour) are split 4 : 3 : 3 into fit, calibration and test; sources stay inside.

    Only pairs with both prompts answered correctly are kept. Fit: families in equal shares. The others: the four cells
    of (AP changed, AT changed) in equal shares, and within a cell the families that can fall into it in equal shares;
    so 2n pairs hold n sensitive and n invariant ones for both variables. `bases` (such as those of a public file)
    replaces the drawn base prompts of all but the transfer banks.
    """
    for family in families:
        if family not in FAMILIES:
            unknown("counterfactual family", family, FAMILIES)
    sizes, generator = sizes or Sizes(), torch.Generator().manual_seed(40_000 + seed)
    if bases is not None:
        check_rows(bases, lexicon)
    filling = Filling(causal_model(), tuple(families), answers_correctly, generator, least_pass_rate)
    asked = questions(FAMILIAR, facts, lexicon) if bases is None else bases[:, [OBJECT, COLOUR]].unique(dim=0)
    asked = asked[torch.randperm(len(asked), generator=generator)]
    marks = [0, round(0.4 * len(asked)), round(0.7 * len(asked)), len(asked)]
    parts = [asked[a:b] for a, b in pairwise(marks)]
    if not all(len(p) for p in parts):
        raise PlotError(f"{len(asked)} different questions (object, colour) are too few for three splits.")

    def about(part: Tensor) -> Draw:
        own = None if bases is None else bases[(bases[:, None, [OBJECT, COLOUR]] == part).all(dim=2).any(dim=1)]

        def draw(family: str, count: int) -> tuple[Rows, Rows]:
            if own is None:
                base = draw_rows(count, generator, about=part)
            else:
                base = own[torch.randint(len(own), (count,), generator=generator)]
            return base, sources(base, family, generator)

        return draw

    def fresh(family: str, count: int) -> tuple[Rows, Rows]:
        other, unseen = range(1, len(lexicon.templates)), questions(FRESH, facts, lexicon)
        base = draw_rows(count, generator, about=unseen, letters=LATER_LETTERS, templates=other)
        return base, sources(base, family, generator, letters=LATER_LETTERS)

    def quotas(size: int) -> list[Quota]:
        return cell_quotas({f: FAMILIES[f] for f in families}, VARIABLES, size)

    fit = filling.bank("fit", share_out(sizes.fit, families), about(parts[0]))
    calibration = filling.bank("calibration", quotas(sizes.calibration), about(parts[1]))
    test = filling.bank("test", quotas(sizes.test), about(parts[2]))
    transfer = filling.bank("transfer", quotas(sizes.transfer), fresh)
    splits = Splits.checked(fit, calibration, test.by_variable(), strict=True)
    return TextBanks(splits, transfer.by_variable(), filling.passed, filling.seconds)
