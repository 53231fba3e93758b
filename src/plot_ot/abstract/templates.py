"""Prompts from templates: texts with plain `{fields}`, and where named pieces of them stand."""

from __future__ import annotations

import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from plot_ot.errors import PlotError, unknown

Span = tuple[int, int]
"""Characters start..end-1 of a text."""
Position = str | Callable[[dict[str, Any]], Any]
"""A piece of the template, or a function of the inputs that gives a text, (text, occurrence) or a character's index."""


def shown(text: str, most: int = 240) -> str:
    """A prompt as it stands in an error message."""
    return repr(text) if len(text) <= most else f"{text[: most // 2]!r} ... {text[-most // 2 :]!r}"


# -- templates --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Field:
    """`{name}`, with a conversion and a format if it has any."""

    name: str
    conversion: str = ""
    spec: str = ""

    def format(self, value: object) -> str:
        """Write the value as `str.format` would."""
        change: dict[str, Callable[[object], object]] = {"r": repr, "s": str, "a": ascii}
        return format(change[self.conversion](value) if self.conversion else value, self.spec)


@dataclass(frozen=True)
class Template:
    """A text with `{fields}`: plain names only, so that formatting never reaches into a value."""

    text: str
    pieces: tuple[str | Field, ...]
    """Fields, and the characters between them one by one."""

    @classmethod
    def parse(cls, text: str) -> Template:
        """Refuse fields that are no plain name: `{}`, `{0}`, `{a.b}`, `{a[0]}`, `{a:{width}}`."""
        pieces: list[str | Field] = []
        try:
            for literal, name, spec, conversion in string.Formatter().parse(text):
                pieces += literal
                if name is not None:
                    _refuse_field(text, name, spec or "", conversion or "")
                    pieces.append(Field(name, conversion or "", spec or ""))
        except ValueError as e:
            raise PlotError(
                f"The template {shown(text)} cannot be read: {e}. Write a brace itself as {{{{ or }}}}."
            ) from e
        return cls(text, tuple(pieces))

    @property
    def fields(self) -> tuple[str, ...]:
        """The names in the order they stand in the text, once each."""
        return tuple(dict.fromkeys(p.name for p in self.pieces if isinstance(p, Field)))

    def render(self, values: Mapping[str, object]) -> tuple[str, list[int]]:
        """The text with values filled in, and where each piece begins in it; the last entry is the text's length."""
        parts, starts, length = [], [], 0
        for piece in self.pieces:
            starts.append(length)
            try:
                parts.append(piece.format(values[piece.name]) if isinstance(piece, Field) else piece)
            except (ValueError, TypeError) as e:
                raise PlotError(f"The template's field {piece} does not fit the value in {dict(values)}: {e}.") from e
            length += len(parts[-1])
        return "".join(parts), [*starts, length]

    def find(self, fragment: Template) -> list[tuple[int, int]]:
        """Where a fragment of a template stands in this one: slices of `pieces`; formats may differ."""
        mine, wanted = ([(p.name,) if isinstance(p, Field) else p for p in t.pieces] for t in (self, fragment))
        size = len(wanted)
        return [(k, k + size) for k in range(len(mine) - size + 1) if size and mine[k : k + size] == wanted]


def _refuse_field(text: str, name: str, spec: str, conversion: str) -> None:
    if not name.isidentifier():
        raise PlotError(
            f"The template {shown(text)} has the field {{{name}}}; a field must be the plain name of an input, like "
            f"{{colour}}: no position, attribute or index. Compute what you need in a function of the inputs instead."
        )
    if "{" in spec:
        raise PlotError(f"The template's field {{{name}:{spec}}} has a field inside its format; write the format out.")
    if conversion not in ("", "r", "s", "a"):
        raise PlotError(f"The template's field {{{name}!{conversion}}} has an unknown conversion; legal: !r, !s, !a.")


def find_text(prompt: str, text: str, occurrence: int | None = None) -> Span:
    """Where a text stands in the prompt; without `occurrence` (0 the first, -1 the last) it must stand there once."""
    starts = [k for k in range(len(prompt) - len(text) + 1) if text and prompt.startswith(text, k)]
    if not starts:
        raise PlotError(f"{text!r} is missing in the prompt {shown(prompt)}.")
    if occurrence is None and len(starts) > 1:
        raise PlotError(
            f"{text!r} is ambiguous: it stands {len(starts)} times in the prompt {shown(prompt)}. Say which one: "
            f"(text, occurrence) with 0 for the first and -1 for the last."
        )
    at = occurrence or 0
    if not -len(starts) <= at < len(starts):
        raise PlotError(
            f"{text!r} stands only {len(starts)} times in the prompt {shown(prompt)}; found occurrence {at}."
        )
    return starts[at], starts[at] + len(text)


# -- prompts with named positions -------------------------------------------------------------------------------


class Prompts:
    """Makes prompts of inputs, and knows where the named positions stand in them.

    A position that is a piece of a text template must stand in it once; its place in the prompt then follows, whatever
    else the prompt holds. With a function as template the piece is filled in and looked up in the prompt.
    """

    def __init__(self, template: str | Callable[[dict[str, Any]], str], positions: Mapping[str, Position]) -> None:
        self.template = Template.parse(template) if isinstance(template, str) else template
        self.positions = dict(positions)
        for name in self.positions:
            if not name.isidentifier():
                raise PlotError(f"A position needs a plain name, which places can carry; found {name!r}.")
        self._pieces = {n: Template.parse(p) for n, p in self.positions.items() if isinstance(p, str)}
        text = self.template
        self._slices = (
            {n: self._once(n, text, p) for n, p in self._pieces.items()} if isinstance(text, Template) else {}
        )

    @property
    def fields(self) -> tuple[str, ...] | None:
        """The inputs that the template reads; a function does not say."""
        return self.template.fields if isinstance(self.template, Template) else None

    def text(self, given: Mapping[str, Any]) -> str:
        """The prompt of an input."""
        return self._rendered(given)[0]

    def located(self, given: Mapping[str, Any]) -> tuple[str, dict[str, Span]]:
        """The prompt, and where each named position stands in it."""
        prompt, starts = self._rendered(given)
        return prompt, {name: self._span(name, given, prompt, starts) for name in self.positions}

    def _rendered(self, given: Mapping[str, Any]) -> tuple[str, list[int]]:
        """The prompt and where the template's pieces begin in it (none for a function)."""
        if isinstance(self.template, Template):
            prompt, starts = self.template.render(given)
        else:
            prompt, starts = _called(self.template, given, "template"), []
        if not isinstance(prompt, str) or not prompt:
            raise PlotError(f"The template must give a text that is not empty; found {prompt!r:.80} for {dict(given)}.")
        return prompt, starts

    @staticmethod
    def _once(name: str, template: Template, piece: Template) -> tuple[int, int]:
        """Where a position's piece stands in the template; refuses a piece that stands there twice or not at all."""
        found = template.find(piece)
        if len(found) != 1:
            raise PlotError(
                f"Position '{name}': {piece.text!r} stands {len(found)} times in the template {shown(template.text)}; "
                f"it must stand there once. Name a longer piece, or give a function of the inputs."
            )
        return found[0]

    def _span(self, name: str, given: Mapping[str, Any], prompt: str, starts: list[int]) -> Span:
        where = self.positions[name]
        try:
            if not isinstance(where, str):
                span = _found(_called(where, given, f"position '{name}'"), prompt)
            elif name in self._slices:
                first, last = self._slices[name]
                span = starts[first], starts[last]
            else:
                for field in self._pieces[name].fields:
                    if field not in given:
                        unknown("input", field, given)
                span = find_text(prompt, self._pieces[name].render(given)[0])
        except PlotError as e:
            raise PlotError(f"Position '{name}': {e}") from e
        if span[0] == span[1]:
            raise PlotError(f"Position '{name}' is missing in the prompt {shown(prompt)}: its text is empty there.")
        return span


def _called(function: Callable[[dict[str, Any]], Any], given: Mapping[str, Any], what: str) -> Any:
    try:
        return function(dict(given))
    except Exception as e:
        raise PlotError(f"The function of the {what} failed on {dict(given)}: {type(e).__name__}: {e}.") from e


def _found(answer: Any, prompt: str) -> Span:
    """Turn what a position's function returned into characters of the prompt."""
    match answer:
        case str():
            return find_text(prompt, answer)
        case (str() as text, int() as occurrence):
            return find_text(prompt, text, occurrence)
        case int() if not isinstance(answer, bool) and -len(prompt) <= answer < len(prompt):
            return answer % len(prompt), answer % len(prompt) + 1
    raise PlotError(
        f"its function gave {answer!r:.80}; expected a text of the prompt, (text, occurrence), or the index of a "
        f"character, for the prompt {shown(prompt)} of {len(prompt)} characters."
    )
