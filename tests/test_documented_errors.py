"""Every error message that the documentation lists is provoked here, and says what the documentation says."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from plot_ot.abstract.hypothesis import Hypothesis
from plot_ot.abstract.pairs import read_pairs
from plot_ot.checking import check
from plot_ot.errors import PlotError

DOCS = Path(__file__).parent.parent / "docs"
Table = list[tuple[dict[str, Any], dict[str, Any]]]


def documented() -> list[tuple[str, str]]:
    """(page, message) of every row of the tables with a column `message`."""
    found = []
    for page in sorted(DOCS.glob("*.md")):
        for table in re.findall(r"^\| message \|.*\n\|[-| ]+\n((?:\|.*\n)+)", page.read_text(encoding="utf-8"), re.M):
            for row in table.splitlines():
                found += [(page.name, m) for m in re.findall(r"`([^`]+)`", re.split(r"(?<!\\)\|", row)[1])]
    return found


def pattern(message: str) -> str:
    """A documented message as a pattern: an ellipsis, a quoted name, a number, X and Y stand for anything."""
    parts = re.split(r"\.\.\.|(?<=')\w(?=')|\b[XY]\b|\b\d+\b|pairs\.jsonl", message)
    return ".*".join(re.escape(p) for p in parts)


def tokenizer(*words: str) -> Any:
    """One token per listed word, spaces kept in it; anything else is unknown."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.WordLevel({w: k for k, w in enumerate(["<unk>", *words])}, unk_token="<unk>"))  # noqa: S106
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r" ?\w+|[^\w\s]|\s"), behavior="isolated")
    return PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>")  # noqa: S106


def echo(template: Any = "{a}:", function: Callable[[Any], Any] = lambda a: a, **options: Any) -> Hypothesis:
    """A hypothesis with one input and nothing but an output."""
    h = Hypothesis(template=template, **options)
    h.output(name="y", parents=["a"])(function)
    return h


def spoken(*words: str, answers: list[str], template: str = "{a}:") -> None:
    h = echo(template, answers=answers)
    h.rows([{"a": answers[0]}])
    h.answer_tokens(tokenizer(*words))


def answered(**options: Any) -> None:
    h = echo(**options)
    h.causal.answer(h.rows([{"a": "x"}]))


class Folding:
    """A tokenizer that writes all words alike."""

    unk_token_id = None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [7]

    def decode(self, ids: list[int]) -> str:
        return "same"


def parity() -> Hypothesis:
    """p is the first input, y the sum's parity."""
    h = Hypothesis(answers=[0, 1])
    h.variable(name="p", parents=["a"])(lambda a: a)
    h.output(name="y", parents=["p", "b"])(lambda p, b: (p + b) % 2)
    return h


def checked(h: Hypothesis, pairs: Table, **options: Any) -> None:
    """What a check finds wrong, as an error."""
    found = check(h, pairs, **options)
    if found.problems:
        raise PlotError("; ".join(found.problems))


def late() -> None:
    h = echo()
    h.rows([{"a": "x"}])
    h.variable(name="p", parents=["a"])(lambda a: a)


def no_json(folder: Path) -> None:
    (folder / "pairs.jsonl").write_text("{\n")
    read_pairs(folder / "pairs.jsonl")


def located(position: Any, text: str) -> None:
    h = echo("{a}:", lambda a: "x", positions={"here": position})
    h.located(h.rows([{"a": text}]))


def pairs_of(source: Callable[[int], dict[str, int]]) -> Table:
    return [({"a": k % 2, "b": k // 2}, source(k)) for k in range(200)]


KEPT = pairs_of(lambda k: {"a": k % 2, "b": k // 2 + 1})
CHANGED = pairs_of(lambda k: {"a": 1 - k % 2, "b": k // 2 + 1})
RARELY_TOLD = pairs_of(lambda k: {"a": (k + k // 2) % 2, "b": k // 2 + (k % 6 == 0)})
"""Copying the source's answer is nearly always right."""

ATTEMPTS: dict[str, Callable[[Path], None]] = {
    "The tokenizer has no single token for the answers ...": lambda d: spoken("cat", answers=["dog"]),
    "The answers X and Y share the token ...": lambda d: echo(answers=["cat", "dog"]).answer_tokens(Folding()) and None,
    "The answers ... are single tokens only with a space before them, ... only without": lambda d: spoken(
        " cat", "dog", answers=["cat", "dog"]
    ),
    "After the prompt ... the answers ... are not read as single tokens": lambda d: checked(
        echo("{a}: ", answers=["cat", "dog"]),
        [({"a": "cat"}, {"a": "dog"})] * 9,
        tokenizer=tokenizer(" cat", " dog", ":", " "),
    ),
    "The answers ... have spaces around them": lambda d: echo(answers=[" cat"]) and None,
    "Position 'x': '...' stands 2 times in the template": lambda d: echo("{a} {a}:", positions={"p": "{a}"}) and None,
    "Position 'x': '...' is ambiguous": lambda d: located(lambda given: "cat", "cat cat"),
    "is missing in the prompt": lambda d: located(lambda given: "dog", "cat"),
    "The prompt ... stands for inputs with different answers": lambda d: checked(
        echo("always:", inputs=["a"], answers=["cat", "dog"]), [({"a": "cat"}, {"a": "dog"})] * 9
    ),
    "The function of 'x' failed on {...}": lambda d: answered(function=lambda a: 1 // 0),
    "The function of 'x' returned ...; a value must be hashable": lambda d: answered(function=lambda a: [a]),
    "The output 'y' returned ..., which is not among the answers": lambda d: answered(answers=["cat"]),
    "With a function as template, name the inputs it reads": lambda d: echo(lambda given: "x").causal and None,
    "Without a template, say what each output column of the network means": lambda d: echo(None).causal and None,
    "'x' comes too late": lambda d: late(),
    "Input 3 lacks ...": lambda d: echo().rows([{"a": "x"}] * 3 + [{}]) and None,
    "Input 3 has the unknown ...": lambda d: echo().rows([{"a": "x"}] * 3 + [{"a": "x", "b": 1}]) and None,
    "pairs.jsonl line 7 is not JSON": no_json,
    "no pair changes 'x'": lambda d: checked(parity(), KEPT),
    "every pair changes 'x'": lambda d: checked(parity(), CHANGED),
    "'x' would be undecided with these pairs": lambda d: checked(parity(), RARELY_TOLD),
}


def test_every_documented_error_has_an_attempt_to_provoke_it() -> None:
    assert {m for _, m in documented()} == set(ATTEMPTS)


@pytest.mark.parametrize("message", ATTEMPTS)
def test_the_documented_error_is_what_is_said(message: str, tmp_path: Path) -> None:
    with pytest.raises(PlotError) as error:
        ATTEMPTS[message](tmp_path)
    assert re.search(pattern(message), str(error.value)), f"{message!r} is documented; said was {error.value}"
