"""What a check found, printed."""

from __future__ import annotations

from typing import Any

from rich.text import Text

from plot_ot.checking import Checkup, Example
from plot_ot.cli.common import console
from plot_ot.report import tables

STYLES = ("bold black on yellow", "bold black on cyan", "bold black on green", "bold white on magenta")
POWER = (
    "changed: pairs in which the source changes the variable. ≠: pairs whose right answer after a swap of the variable "
    "is not the base's, and not the source's or what swapping another variable gives. tell: pairs that differ from the "
    "base's answer and at least one of the rest. copying: the share on which the source's answer is right."
)
"""What the columns of the table of pairs count."""
MOST_ANSWERS = 12
"""Answers that the tables list."""


def print_checkup(found: Checkup) -> None:
    """Graph, pairs, power, labels, an example, tokens, notes, and the verdict as the last line."""
    if found.graph:
        console.print(found.graph, highlight=False)
    if found.families:
        console.print(f"{found.pairs:,} pairs, {found.inputs:,} distinct inputs.")
        table = tables.plain_table("Pairs by family")
        for column in ("family", *found.families):
            table.add_column(column, justify="left" if column == "family" else "right")
        for name in found.families["all"]:
            table.add_row(name, *(str(counts.get(name, 0)) for counts in found.families.values()))
        console.print(table)
    if found.banks:
        console.print(_power_table(found))
        console.print(POWER)
    if found.answers:
        console.print(_answer_table(found))
    if found.example:
        _print_example(found.example)
    if found.tokens:
        some = [f"{a} = {', '.join(map(repr, t))}" for a, t in list(found.tokens.items())[:MOST_ANSWERS]]
        more = f", ... ({len(found.tokens)} in all)" if len(found.tokens) > MOST_ANSWERS else ""
        console.print(f"Answers as tokens: {'; '.join(some)}{more}", highlight=False)
    for note in found.notes:
        console.tell("note:", note, "yellow")
    colour = "green" if found.ready else "red"
    console.tell(found.verdict, "", colour)


def _power_table(found: Checkup) -> Any:
    """Counts of pairs by what they tell the variable from; other variables only where there are some."""
    table = tables.plain_table("What the pairs can show")
    others = list(dict.fromkeys(o for b in found.banks for o in b.power.against_others))
    counted = ("pairs", "changed", "≠base", "≠source", *(f"≠{o}" for o in others), "tell", "copying")
    for column in ("variable", "split", *counted):
        table.add_column(column, justify="right" if column in counted else "left")
    for b in found.banks:
        p = b.power
        rivals = [p.against_others.get(o, "-") for o in others]
        counts = (p.pairs, p.sensitive, p.against_base, p.against_source, *rivals, p.discriminating)
        copied = "-" if b.copy_source is None else f"{b.copy_source:.3f}"
        table.add_row(b.variable, b.split, *(str(c) for c in counts), copied)
    return table


def _answer_table(found: Checkup) -> Any:
    answers = list(dict.fromkeys(a for column in found.answers.values() for a in column))
    more = f" (the first {MOST_ANSWERS} of {len(answers)})" if len(answers) > MOST_ANSWERS else ""
    table = tables.plain_table(f"Answers: pairs by label{more}")
    for column in ("answer", *found.answers):
        table.add_column(column, justify="left" if column == "answer" else "right")
    for answer in answers[:MOST_ANSWERS]:
        table.add_row(answer, *(str(column.get(answer, 0)) for column in found.answers.values()))
    return table


def _print_example(example: Example) -> None:
    text = Text(example.prompt)
    for k, span in enumerate(example.positions.values()):
        text.stylize(STYLES[k % len(STYLES)], *span)
    console.print("Example prompt:", highlight=False)
    console.print(text)
    console.print(f"-> {example.answer}", highlight=False)
    for k, (name, (start, end)) in enumerate(example.positions.items()):
        at, token = example.tokens.get(name, (None, ""))
        where = f", token {at} from the end: {token!r}" if at is not None else ""
        line = Text.assemble((name, STYLES[k % len(STYLES)]), f": {example.prompt[start:end]!r}{where}")
        console.print(line, highlight=False)
