"""What the five tasks ask: their entries read as the benchmark reads them, their variables, and what swaps should say.

Every task is a reader of entries and a causal model in plain Python. An expected answer is a text that must occur in
what the model writes; tokens of interest are given by the text before them, as the benchmark gives them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from plot_ot.errors import PlotError

Entry = Mapping[str, Any]
Cities = Mapping[str, Mapping[str, str]]


@dataclass(frozen=True)
class Example:
    """One prompt, the values that its variables have, and where its tokens of interest end in the text."""

    prompt: str
    values: Mapping[str, Any]
    ends: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """By the name of a token: the length of the text that ends with it, and how many tokens later it is."""


@dataclass(frozen=True)
class Question:
    """A task: where its data is, how its entries are read, and what its causal model says."""

    name: str
    hub: str
    read: Callable[[Entry], Example]
    expected: Callable[[Mapping[str, Any], Mapping[str, Any]], str]
    """The answer that follows from a prompt's values, some of them replaced."""
    tokens: tuple[str, ...]
    """The benchmark's names of the tokens; the last one is the prompt's last token."""
    ignored: tuple[str, ...] = ()
    """Counterfactuals whose names contain one of these are left out."""
    keep: Callable[[Entry], bool] = lambda entry: True
    folder: str = ""
    """The part of the data set that is meant."""

    def swapped(self, base: Example, source: Example, variable: str) -> str:
        """What the model should answer when one variable is taken from the source."""
        return self.expected(base.values, {variable: source.values[variable]})


def question(task: str, cities: Cities | None = None) -> Question:
    """A task by the benchmark's name; RAVEL's needs to know the cities."""
    if task == "ravel_task":
        return _ravel(cities)
    return {"4_answer_MCQA": MCQA, "ARC_easy": ARC, "arithmetic": ARITHMETIC, "ioi_task": IOI}[task]


# -- multiple choice -----------------------------------------------------------------------------------------------


def _choice(entry: Entry, pointer: int, prompt: str, after: bool) -> Example:
    symbols = tuple(str(s) for s in entry["choices"]["label"])
    right = symbols[pointer]
    found = next((m for m in re.finditer(r"\b[A-Z]\b", prompt) if m[0] == right), None)
    if found is None:
        raise ValueError(f"the symbol {right} does not stand in the prompt")
    ends = {"correct_symbol": (found.end(), 0)} | ({"correct_symbol_period": (found.end(), 1)} if after else {})
    return Example(prompt, {"symbols": symbols, "answer_pointer": pointer, "answer": f" {right}"}, ends)


def _symbol(values: Mapping[str, Any], do: Mapping[str, Any]) -> str:
    if "answer" in do:
        return str(do["answer"])
    return f" {values['symbols'][do.get('answer_pointer', values['answer_pointer'])]}"


def _read_colours(entry: Entry) -> Example:
    prompt = str(entry["prompt"])
    words = re.split(r" (?:is|are) ", prompt, maxsplit=1)
    colour = words[1].partition(".")[0].strip().lower()
    return _choice(entry, [str(c) for c in entry["choices"]["text"]].index(colour), prompt, True)


def _read_arc(entry: Entry) -> Example:
    key, labels = entry["answerKey"], [str(s) for s in entry["choices"]["label"]]
    pointer = int(key) if str(key).isdigit() and str(key) not in labels else labels.index(str(key))
    return _choice(entry, pointer, str(entry["prompt"]), False)


MCQA = Question(
    "4_answer_MCQA",
    "mib-bench/copycolors_mcqa",
    _read_colours,
    _symbol,
    ("correct_symbol", "correct_symbol_period", "last_token"),
    ("noun", "color", "symbol"),
    folder="4_answer_choices",
)
ARC = Question(
    "ARC_easy",
    "mib-bench/arc_easy",
    _read_arc,
    _symbol,
    ("correct_symbol", "last_token"),
    ("symbol",),
    keep=lambda entry: len(entry["choices"]["label"]) == 4,
)


# -- addition ------------------------------------------------------------------------------------------------------


def _read_sum(entry: Entry) -> Example:
    prompt = str(entry["prompt"])
    first, second = list(re.finditer(r"\d+", prompt))[-2:]
    a, b = int(first[0][-2:]), int(second[0][-2:])
    return Example(prompt, {"a": a, "b": b, "ones_carry": int(a % 10 + b % 10 > 9)}, {"op2_last": (second.end(), 0)})


def _sum(values: Mapping[str, Any], do: Mapping[str, Any]) -> str:
    a, b = values["a"], values["b"]
    tens = a // 10 + b // 10 + do.get("ones_carry", values["ones_carry"])
    return f"{tens // 10}{tens % 10}{(a + b) % 10}"


ARITHMETIC = Question(
    "arithmetic",
    "mib-bench/arithmetic_addition",
    _read_sum,
    _sum,
    ("op2_last", "last"),
    ("ones_op1", "ones_op2", "tens_op1", "tens_op2", "tens_carry"),
    keep=lambda entry: entry.get("num_digit", 2) == 2,
)


# -- cities --------------------------------------------------------------------------------------------------------

ATTRIBUTES = ("Continent", "Country", "Language")


def _ravel(cities: Cities | None) -> Question:
    if cities is None:
        raise PlotError(
            "RAVEL needs the attributes of its cities: give the benchmark's ravel_city_entity.json as --cities (a JSON "
            "object of cities, each with Continent, Country and Language)."
        )

    def read(entry: Entry) -> Example:
        city, asked = str(entry["entity"]), str(entry["attribute"])
        prompt = str(entry.get("prompt") or f"Q: What is the {asked.lower()} of {city}? A:")
        found = re.search(rf"\b{re.escape(city)}\b", prompt)
        if found is None:
            raise ValueError(f"{city!r} does not stand in the prompt")
        known = {name: str(cities[city][name]) for name in ATTRIBUTES}
        return Example(prompt, {"asked": asked, **known}, {"entity_last_token": (found.end(), 0)})

    return Question("ravel_task", "mib-bench/ravel", read, _attribute, ("entity_last_token", "last_token"))


def _attribute(values: Mapping[str, Any], do: Mapping[str, Any]) -> str:
    if values["asked"] not in ATTRIBUTES:
        return ""  # a prompt that asks for nothing: any answer will do
    return f" {do.get(values['asked'], values[values['asked']])}"


# -- indirect objects ----------------------------------------------------------------------------------------------


def _read_names(entry: Entry) -> Example:
    prompt, told = str(entry["prompt"]), entry.get("metadata")
    if told:
        a, b, c = str(told["subject"]), str(told["indirect_object"]), str(told["subject"])
    else:
        both = re.search(r"\b([A-Z][\w'-]*) and ([A-Z][\w'-]*)\b", prompt)
        if both is None:
            raise ValueError("no two names joined by 'and' stand in the prompt")
        a, b = both[1], both[2]
        again = [m[0] for m in re.finditer(rf"\b(?:{re.escape(a)}|{re.escape(b)})\b", prompt[both.end() :])]
        if not again:
            raise ValueError(f"neither {a} nor {b} stands in the prompt a second time")
        c = again[-1]
    position = 1 if c == a else 0
    token = b if c == a else a
    return Example(prompt, {"names": (a, b, c), "output_position": position, "output_token": token})


IOI = Question(
    "ioi_task",
    "mib-bench/ioi",
    _read_names,
    lambda values, do: str(do.get("output_token", values["output_token"])),
    ("all",),
    ("random", "abc"),
)


def signals(base: Mapping[str, Any], do: Mapping[str, Any]) -> tuple[int, int]:
    """The (position, token) signals of the linear model: 1 where the variable says what the base's names say, or -1."""
    return tuple(  # type: ignore[return-value]
        1 if do.get(v, base[v]) == base[v] else -1 for v in ("output_position", "output_token")
    )
