"""Handles and models that the tests of other tools share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

import decoders
from plot_ot import Edit, Frame, Handle, Subject
from plot_ot.models.tiny import build_tokenizer

KINDS = ("block_output", "head_output", "attention_output", "mlp_output")
SETS = (
    ("block_output.1",),
    ("head_output.2.1@early",),
    ("attention_output.1", "mlp_output.2", "block_output.2@third"),
)
"""Places of handles: one, a head at another token, several that follow from each other."""


def tokenizer(folder: Path) -> Any:
    """A tokenizer that has a place on the disk, as TransformerLens wants it."""
    build_tokenizer().save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


def handle(subject: Subject, names: tuple[str, ...]) -> Handle:
    """A soft rotation at every one of the places; the last is oblique."""
    generator = torch.Generator().manual_seed(1000)
    edits = []
    for name in names:
        place = subject.place(name)
        read = torch.linalg.qr(torch.randn(place.width, 3, generator=generator))[0]
        write = torch.linalg.qr(torch.randn(place.width, 3, generator=generator))[0]
        frame = Frame.oblique(read, write) if name == names[-1] else Frame.orthonormal(read)
        edits.append(Edit(place, frame, torch.tensor([1.0, 0.5, 2.0])))
    return Handle("x", tuple(edits), subject.identity())


def subject_of(model: Any) -> decoders.DecoderSubject:
    return decoders.DecoderSubject(model, decoders.encode, decoders.ANSWERS, kinds=KINDS, positions=decoders.POSITIONS)


def run_page(note: str) -> None:
    """The page about other tools, with the blocks that need one of them."""
    from test_docs import DOCS, blocks, module_of

    page = DOCS / "other-tools.md"
    chosen = [b for b in blocks(page, "python") if b.note in ("", note)]
    assert any(b.note == note for b in chosen)
    exec(compile(module_of(page, chosen), "other-tools.md", "exec"), {"__name__": "page"})  # noqa: S102
