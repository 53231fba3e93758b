"""Prompts from templates: texts with plain `{fields}`, and where named pieces of them stand."""

from __future__ import annotations

import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from plot_ot.abstract.chats import Message, Stretch, laid_out, read_messages, transcript
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


Maker = str | Sequence[Mapping[str, str]] | Callable[[dict[str, Any]], Any]
"""What makes prompts: a text with fields, a list of messages with fields, or a function that gives either, filled."""


class Prompt(NamedTuple):
    """A prompt as a model reads it, and where its parts are."""

    text: str
    chat: bool
    """Whether a chat template wrote it: then it brings its own beginning-of-sequence token, or wants none."""
    parts: Sequence[Stretch | None]
    """Where it holds its messages, or the one text that it is."""
    starts: Sequence[Sequence[int]]
    """Where the pieces of each part's template begin in it; none for a function."""


class Prompts:
    """Makes prompts of inputs, and knows where the named positions stand in them.

    A position that is a piece of a template must stand in it once; its place in the prompt then follows, whatever
    else the prompt holds. With a function as template the piece is filled in and looked up in the prompt. Chats are
    written by a tokenizer, and shown as a transcript where none is given.
    """

    def __init__(self, template: Maker, positions: Mapping[str, Position]) -> None:
        self.roles: tuple[str, ...] | None = None
        """Who says each part, if the template is a chat."""
        self.function = template if callable(template) else None
        self.templates: tuple[Template, ...] = ()
        if isinstance(template, str):
            self.templates = (Template.parse(template),)
        elif not callable(template):
            messages = read_messages(template)
            self.roles = tuple(m.role for m in messages)
            self.templates = tuple(Template.parse(m.content) for m in messages)
        self.positions = dict(positions)
        for name in self.positions:
            if not name.isidentifier():
                raise PlotError(f"A position needs a plain name, which places can carry; found {name!r}.")
        self._pieces = {n: Template.parse(p) for n, p in self.positions.items() if isinstance(p, str)}
        self._slices = {n: self._once(n, p) for n, p in self._pieces.items()} if self.templates else {}

    @property
    def fields(self) -> tuple[str, ...] | None:
        """The inputs that the template reads; a function does not say."""
        if self.function is not None:
            return None
        return tuple(dict.fromkeys(f for t in self.templates for f in t.fields))

    def prompt(self, given: Mapping[str, Any], tokenizer: Any = None) -> Prompt:
        """The prompt of an input."""
        filled, roles, starts = self._filled(given)
        if roles is None:
            return Prompt(filled[0], False, [Stretch(0, len(filled[0]))], starts)
        chat = [Message(*m) for m in zip(roles, filled, strict=True)]
        text, parts = transcript(chat) if tokenizer is None else laid_out(chat, tokenizer)
        return Prompt(text, True, parts, starts)

    def located(self, given: Mapping[str, Any], tokenizer: Any = None) -> tuple[str, dict[str, Span]]:
        """The prompt, and where each named position stands in it."""
        prompt = self.prompt(given, tokenizer)
        return prompt.text, {name: self._span(name, given, prompt) for name in self.positions}

    def _filled(self, given: Mapping[str, Any]) -> tuple[list[str], tuple[str, ...] | None, list[list[int]]]:
        """The parts with values filled in, who says them, and where the pieces of their templates begin."""
        if self.function is None:
            parts = [t.render(given) for t in self.templates]
            texts, roles, starts = [text for text, _ in parts], self.roles, [begin for _, begin in parts]
        else:
            made = _called(self.function, given, "template")
            messages = None if isinstance(made, str) or not isinstance(made, Sequence) else read_messages(made)
            texts, starts = ([made] if messages is None else [m.content for m in messages]), []
            roles = None if messages is None else tuple(m.role for m in messages)
        if not all(isinstance(t, str) for t in texts) or not any(texts):
            raise PlotError(
                f"The template must give a text that is not empty, or a list of messages; found {texts[0]!r:.80} for "
                f"{dict(given)}."
            )
        return texts, roles, starts

    def _once(self, name: str, piece: Template) -> tuple[int, int, int]:
        """The part in which a position's piece stands, and where; refused if it stands there twice or not at all."""
        found = [(k, *at) for k, template in enumerate(self.templates) for at in template.find(piece)]
        if len(found) != 1:
            whole = "\n".join(t.text for t in self.templates)
            raise PlotError(
                f"Position '{name}': {piece.text!r} stands {len(found)} times in the template {shown(whole)}; "
                f"it must stand there once. Name a longer piece, or give a function of the inputs."
            )
        return found[0]

    def _span(self, name: str, given: Mapping[str, Any], prompt: Prompt) -> Span:
        where = self.positions[name]
        try:
            if not isinstance(where, str):
                span = _found(_called(where, given, f"position '{name}'"), prompt.text)
            elif name in self._slices:
                part, first, last = self._slices[name]
                stretch = prompt.parts[part]
                if stretch is None:
                    raise PlotError(
                        f"the chat template rewrites the message that holds it, so that it cannot be told where it "
                        f"stands in {shown(prompt.text)}. Give a function of the inputs that returns its text."
                    )
                span = stretch.moved(prompt.starts[part][first], prompt.starts[part][last])
            else:
                for field in self._pieces[name].fields:
                    if field not in given:
                        unknown("input", field, given)
                span = find_text(prompt.text, self._pieces[name].render(given)[0])
        except PlotError as e:
            raise PlotError(f"Position '{name}': {e}") from e
        if span[0] >= span[1]:
            raise PlotError(f"Position '{name}' is missing in the prompt {shown(prompt.text)}: its text is empty there.")
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
