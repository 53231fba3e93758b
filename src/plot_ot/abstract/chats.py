"""Chats: prompts that are lists of messages, written out by the tokenizer's own chat template."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from plot_ot.errors import PlotError

MARK = "\ue000{}\ue001"
"""Stands for the content of a message, in characters that no template has a use for."""


class Message(NamedTuple):
    """What one side says."""

    role: str
    content: str


class Stretch(NamedTuple):
    """Where a message's content stands in a text: characters `begin` to `end`, of which the first is its `cut`-th."""

    begin: int
    end: int
    cut: int = 0

    def moved(self, start: int, end: int) -> tuple[int, int]:
        """Characters of the content as characters of the text."""
        shift = self.begin - self.cut
        return max(start + shift, self.begin), min(end + shift, self.end)


def read_messages(given: Any) -> tuple[Message, ...]:
    """Messages from a list of {"role": ..., "content": ...}; anything else is refused."""
    if not isinstance(given, Sequence) or isinstance(given, str) or not given:
        raise PlotError(f"A chat is a list of messages that is not empty; found {given!r:.80}.")
    for k, message in enumerate(given):
        fits = isinstance(message, Mapping) and set(message) == {"role", "content"}
        if not fits or not all(isinstance(message[name], str) for name in ("role", "content")):
            raise PlotError(
                f'Message {k} of the chat is {message!r:.120}; expected {{"role": "user", "content": "..."}}, both '
                f"texts and nothing else."
            )
    return tuple(Message(m["role"], m["content"]) for m in given)


def written(chat: Sequence[Message], tokenizer: Any) -> str:
    """The text of a chat, up to where the assistant begins to speak; a last message of its own is left open."""
    if getattr(tokenizer, "chat_template", None) is None:
        raise PlotError(
            "The prompts are lists of messages, but this tokenizer has no chat template. Take the tokenizer of an "
            "instruction-tuned model, set `tokenizer.chat_template`, or write the template as one text."
        )
    begun = chat[-1].role == "assistant"
    try:
        text = tokenizer.apply_chat_template(
            [m._asdict() for m in chat], tokenize=False, add_generation_prompt=not begun, continue_final_message=begun
        )
    except Exception as e:  # a template is a program: it may refuse roles, or their order
        roles = ", ".join(m.role for m in chat)
        raise PlotError(
            f"The tokenizer's chat template refuses messages of {roles}: {e or type(e).__name__}. Change the messages "
            f"(some models take no system message), or write the template as one text."
        ) from e
    return str(text)


def laid_out(chat: Sequence[Message], tokenizer: Any) -> tuple[str, list[Stretch | None]]:
    """The text of a chat, and where it holds each message; None for one that it does not hold once.

    The template writes the chat a second time with marks in the place of the contents: what stands between the marks is
    the template's own.
    """
    text = written(chat, tokenizer)
    marked = written([Message(m.role, MARK.format(k)) for k, m in enumerate(chat)], tokenizer)
    own, *rest = re.split(MARK.format("([0-9]+)"), marked)
    order = [int(k) for k in rest[::2]]
    found: list[Stretch | None] = [None] * len(chat)
    at = len(own)
    known = text.startswith(own)
    for k, after in zip(order, rest[1::2], strict=True):
        content = chat[k].content
        for cut in (0, len(content) - len(content.lstrip())):
            kept = next((c for c in (content[cut:], content[cut:].rstrip()) if text.startswith(c + after, at)), None)
            if kept is not None:
                break
        if kept is None or not known:  # this template rewrites what it is given
            return text, [None] * len(chat)
        found[k] = Stretch(at, at + len(kept), cut) if order.count(k) == 1 else None
        at += len(kept) + len(after)
    return text, found if at == len(text) else [None] * len(chat)


def transcript(chat: Sequence[Message]) -> tuple[str, list[Stretch | None]]:
    """The chat as it is shown where no tokenizer is at hand, and where it holds each message."""
    text, found = "", []
    for role, content in chat:
        begin = len(text) + len(role) + 2
        found.append(Stretch(begin, begin + len(content)))
        text += f"{role}: {content}\n"
    return (text[:-1] if chat[-1].role == "assistant" else f"{text}assistant:"), list(found)
