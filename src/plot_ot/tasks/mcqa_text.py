"""Copy-colour questions as text: words, templates, rows to prompts and back, prompts to tokens.

A row of integers fully determines a prompt:

    object  plural  template  colour  Col1 Col2 Col3 Col4  Sym1 Sym2 Sym3 Sym4

`object` and `template` index the lexicon, `plural` is 0 or 1; colours index `COLOURS`, symbols are letters
0..25 (A..Z). A question with fewer than four options has -1 for the missing ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jaxtyping import Bool, Int
from torch import Tensor

from plot_ot.abstract import prompts
from plot_ot.abstract.prompts import Encoded
from plot_ot.errors import PlotError
from plot_ot.models.vocabulary import COLOURS, LETTERS, LEXICON, Lexicon

OPTIONS = 4
COLUMNS = ("object", "plural", "template", "colour", *(f"{name}{i}" for name in ("Col", "Sym") for i in range(1, 5)))
OBJECT, PLURAL, TEMPLATE, COLOUR = range(4)
COL, SYM = slice(4, 8), slice(8, 12)


# -- rows to text -----------------------------------------------------------------------------------------------


def check_rows(rows: Int[Tensor, "rows 12"], lexicon: Lexicon = LEXICON) -> None:
    """Refuse rows that are no question with exactly one right option and different symbols."""
    if not isinstance(rows, Tensor) or rows.ndim != 2 or rows.shape[1] != len(COLUMNS):
        found = tuple(rows.shape) if isinstance(rows, Tensor) else type(rows).__name__
        raise PlotError(f"MCQA rows must have shape [rows, {len(COLUMNS)}] ({' '.join(COLUMNS)}); found {found}.")
    there = rows[:, COL] >= 0
    sizes = {OBJECT: len(lexicon.nouns), PLURAL: 2, TEMPLATE: len(lexicon.templates), COLOUR: len(COLOURS)}
    wrong = {
        **{COLUMNS[k]: (rows[:, k] < 0) | (rows[:, k] >= size) for k, size in sizes.items()},
        "Col1..Col4": (rows[:, COL] >= len(COLOURS)).any(dim=1),
        "Sym1..Sym4": (rows[:, SYM] >= len(LETTERS)).any(dim=1) | ((rows[:, SYM] >= 0) != there).any(dim=1),
        "the right option (the question's colour must stand there once)": (rows[:, COL] == rows[:, [COLOUR]]).sum(1)
        != 1,
        "the symbols (they must differ)": _repeated(rows[:, SYM]),
    }
    for what, bad in wrong.items():
        if bad.any():
            row = int(bad.nonzero()[0])
            raise PlotError(
                f"Row {row} of the MCQA rows is wrong in {what}: {dict(zip(COLUMNS, rows[row].tolist(), strict=True))}."
            )


def _repeated(values: Int[Tensor, "rows options"]) -> Bool[Tensor, " rows"]:
    ordered = values.sort(dim=1).values
    return ((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)).any(dim=1)


def render(rows: Int[Tensor, "rows 12"], lexicon: Lexicon = LEXICON) -> list[str]:
    """The prompt of every row, without a trailing space: the model answers " X"."""
    check_rows(rows, lexicon)
    texts = []
    for row in rows.tolist():
        noun = lexicon.nouns[row[OBJECT]]
        phrase = noun.many if row[PLURAL] else noun.one
        lines = [f"{LETTERS[s]}. {COLOURS[c]}" for c, s in zip(row[COL], row[SYM], strict=True) if c >= 0]
        texts.append(
            lexicon.templates[row[TEMPLATE]].format(
                Noun=phrase[0].upper() + phrase[1:],
                noun=phrase,
                colour=COLOURS[row[COLOUR]],
                options="\n".join(lines),
                **{"is": "are" if row[PLURAL] else "is"},
            )
        )
    return texts


# -- text to tokens ---------------------------------------------------------------------------------------------


def encoder(
    tokenizer: Any, *, bos: int | None, lexicon: Lexicon = LEXICON
) -> Callable[[Int[Tensor, "rows 12"]], Encoded]:
    """A function that turns rows into tokens. `bos` is explicit: GGUF tokenizers add none, some models want none."""

    def run(rows: Tensor) -> Encoded:
        return prompts.encode(render(rows, lexicon), tokenizer, bos=bos)

    return run


def answer_tokens(tokenizer: Any) -> list[list[int]]:
    """For each of the 26 letters, the tokens that spell it."""
    return prompts.answer_tokens(tokenizer, LETTERS)


def says(tokenizer: Any, tokens: Int[Tensor, " rows"], letters: Int[Tensor, " rows"]) -> Bool[Tensor, " rows"]:
    """Whether each token is the letter, however it is written."""
    return prompts.says(tokenizer, tokens, LETTERS, letters)
