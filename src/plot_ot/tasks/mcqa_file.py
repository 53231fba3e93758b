"""The public copy-colour questions (`copycolors_mcqa`, MIB and those in its format), from a local file or the hub.

Every entry has `prompt` (the whole prompt) or `question` (its first line), `choices` = {`label`: [...], `text`: [...]},
perhaps `answerKey` (the index of the right choice, or its label), and perhaps entries of the same form under
`{family}_counterfactual`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from plot_ot.errors import PlotError
from plot_ot.files.entries import SUFFIXES, fetched, read_entries
from plot_ot.models.vocabulary import COLOURS, LETTERS, LEXICON, Lexicon
from plot_ot.tasks.mcqa_data import FAMILIES
from plot_ot.tasks.mcqa_text import COL, OPTIONS, SYM, check_rows, render

HUB_ID = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(?::(?P<folder>[\w./-]+))?")
_QUESTION = re.compile(r"(?P<noun>.+?) (?P<verb>is|are) (?P<colour>\w+)\. What color (?P=verb) (?P<again>.+)\?")


@dataclass(frozen=True)
class PublicQuestions:
    """The questions of a file as rows, with the lexicon that knows their nouns."""

    rows: Int[Tensor, "rows 12"]
    pairs: Mapping[str, tuple[Int[Tensor, "pairs 12"], Int[Tensor, "pairs 12"]]]
    """The (base, source) rows of each family that the file has."""
    lexicon: Lexicon


def read_questions(at: str | Path) -> PublicQuestions:
    """All entries of a .json, .jsonl or .parquet file, or of a data set on the hub (`owner/name`, or with one of its
    folders or splits `owner/name:4_answer_choices/test`); an entry that does not fit is refused, none is left out."""
    hub = HUB_ID.fullmatch(str(at))
    if hub and not Path(at).exists() and not str(at).endswith(SUFFIXES):
        files = fetched(hub["repo"], hub["folder"] or "")
    else:
        files = [Path(at)]
    reader, path = _Reader(Path(at)), Path(at)
    base: list[list[int]] = []
    pairs: dict[str, list[tuple[list[int], list[int]]]] = {}
    for number, entry in enumerate(entry for file in files for entry in read_entries(file, "`prompt` and `choices`")):
        base.append(reader.row(entry, f"entry {number}"))
        for family in FAMILIES:
            other = entry.get(f"{family}_counterfactual")
            if other is not None:
                source = reader.row(other, f"entry {number}, {family}_counterfactual")
                pairs.setdefault(family, []).append((base[-1], source))
    if not base:
        raise PlotError(f"{path} holds no questions.")
    together = {f: (torch.tensor([b for b, _ in p]), torch.tensor([s for _, s in p])) for f, p in pairs.items()}
    return PublicQuestions(torch.tensor(base), together, reader.lexicon)


class _Reader:
    """Turns entries into rows; its lexicon grows by the nouns it meets."""

    def __init__(self, path: Path) -> None:
        self.path, self.lexicon = path, LEXICON

    def row(self, entry: Any, where: str) -> list[int]:
        def refuse(problem: str) -> PlotError:
            return PlotError(f"{self.path}, {where}: {problem}")

        try:
            labels = [str(x).strip() for x in entry["choices"]["label"]]
            texts = [str(x).strip() for x in entry["choices"]["text"]]
            asked = str(entry["prompt" if "prompt" in entry else "question"])
        except (KeyError, TypeError) as e:
            raise refuse(f"expected `prompt` or `question`, and `choices` with `label` and `text` ({e!r}).") from None
        if len(labels) != OPTIONS or len(texts) != OPTIONS:
            raise refuse(f"expected {OPTIONS} choices; found {len(texts)} texts and {len(labels)} labels.")
        prompt = asked if "prompt" in entry else _whole(asked, labels, texts)
        for values, legal in ((labels, LETTERS), (texts, COLOURS)):
            strange = [x for x in values if x not in tuple(legal)]
            if strange:
                raise refuse(f"{strange[0]!r} is none of {', '.join(legal)}.")
        row = [-1] * 12
        row[COL], row[SYM] = [COLOURS.index(x) for x in texts], [LETTERS.index(x) for x in labels]
        question = _QUESTION.fullmatch(prompt.split("\n")[0].removeprefix("Question: ").strip())
        if question is None or question["colour"] not in COLOURS:
            raise refuse(f"expected 'Question: A lemon is yellow. What color is a lemon?'; found {prompt[:90]!r}.")
        plural = question["verb"] == "are"
        self.lexicon, noun = self.lexicon.with_noun(question["again"], plural)
        row[:4] = [noun, int(plural), 0, COLOURS.index(question["colour"])]
        try:
            check_rows(torch.tensor([row]), self.lexicon)
        except PlotError as e:
            raise refuse(str(e)) from None
        written = render(torch.tensor([row]), self.lexicon)[0]
        if written != prompt:
            raise refuse(f"the prompt is {prompt!r}, but its question and choices give {written!r}.")
        self._check_key(entry.get("answerKey"), row, refuse)
        return row

    @staticmethod
    def _check_key(key: Any, row: list[int], refuse: Any) -> None:
        right = row[COL].index(row[3])
        if key is not None and str(key).strip() not in (str(right), LETTERS[row[SYM][right]]):
            raise refuse(f"answerKey is {key!r}, but choice {right} ({LETTERS[row[SYM][right]]}) has the asked colour.")


def _whole(question: str, labels: list[str], texts: list[str]) -> str:
    lines = "\n".join(f"{label}. {text}" for label, text in zip(labels, texts, strict=True))
    return f"Question: {question}\n{lines}\nAnswer:"
