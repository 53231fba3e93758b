"""Test pairs in words: what the network said before the edit, after it, and what the causal model expected."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jaxtyping import Bool, Float
from torch import Tensor

from plot_ot.abstract.banks import Bank
from plot_ot.edits import EditBatch, respond
from plot_ot.engine import Unit, run, shards
from plot_ot.files.writing import Json
from plot_ot.handles import Handle
from plot_ot.signatures import Readout
from plot_ot.studies.prepared import Wording
from plot_ot.subjects import BankRecording

EXAMPLES, PLAIN = 20, 4
"""Examples kept per method and variable: of prompts, and of inputs that are only numbers."""


@dataclass(frozen=True)
class _Words:
    """How inputs and answers of a bank are written."""

    inputs: Callable[[Tensor], list[str]]
    answer: Callable[[Any], str]
    prompts: bool


def example_rows(
    key: Json, handle: Handle, recording: BankRecording, wording: Wording | None, readout: Readout
) -> list[Json]:
    """Some sensitive test pairs in words: those that tell the handle from copying first, families dealt evenly."""
    bank = recording.bank
    if wording is None:
        causal = bank.causal
        words = _Words(causal.describe, lambda value: causal.spell(causal.output, value), False)
    else:
        recording = replace(recording, subject=wording.strict)
        words = _Words(wording.render, lambda value: wording.answer(int(value)), True)
    outputs = _responses(recording, handle.batch())
    labels = bank.labels[handle.variable]
    right = readout.correct(outputs, labels.to(outputs.device))[0].cpu()
    recorded = recording.subject.outputs_of(recording.store)[recording.base_rows]
    after, before = (readout.decide(o).cpu() for o in (outputs[0], recorded))
    if wording is None:  # the network's classes, written as the causal model writes its answers
        after, before = after.to(labels.dtype), before.to(labels.dtype)
    telling = bank.discriminating(handle.variable)
    chosen = _chosen(bank, handle.variable, right, EXAMPLES if words.prompts else PLAIN)
    base, source = words.inputs(bank.base[chosen]), words.inputs(bank.source[chosen])
    said: dict[str, Tensor] = {
        "before": before,
        "after": after,
        "expected": labels,
        "source_answer": bank.source_answer,
    }
    rows = []
    for k, t in enumerate(chosen):
        row = {
            **key,
            "variable": handle.variable,
            "bank": "sensitivity",
            "family": bank.families[int(bank.family[t])],
            "base_prompt": base[k],
            "source_prompt": source[k],
            **{name: words.answer(values[t].tolist()) for name, values in said.items()},
            "right": bool(right[t]),
            "discriminating": bool(telling[t]),
        }
        if words.prompts:
            row["position"] = {"label": "last token", "base": _last_word(base[k]), "source": _last_word(source[k])}
        rows.append(row)
    return rows


def _chosen(bank: Bank, variable: str, right: Bool[Tensor, " pairs"], most: int) -> list[int]:
    """Pairs to show, families dealt evenly: up to half are wrong ones, and those that tell come first among each kind.

    A pair tells most where neither doing nothing nor copying the source nor swapping another variable is right.
    """
    label, telling = bank.labels[variable], bank.discriminating(variable)
    copied = (label == bank.source_answer).flatten(1).all(dim=1) if label.ndim > 1 else label == bank.source_answer
    weight = 2 * telling.long() + (telling & ~copied).long()
    each = -(-most // len(bank.families))
    kept: list[int] = []
    for family in range(len(bank.families)):
        members = (bank.family == family).nonzero().squeeze(1).tolist()
        members.sort(key=lambda t: -int(weight[t]))
        wrong = [t for t in members if not right[t]][: each // 2]
        kept += wrong + [t for t in members if right[t]][: each - len(wrong)]
    return sorted(kept, key=lambda t: -int(weight[t]))[:most]


def _responses(recording: BankRecording, edits: Sequence[EditBatch]) -> Float[Tensor, "variants pairs ..."]:
    """`respond`, by pair shards."""
    parts = shards(recording)
    units = [Unit(_outputs, pairs, tuple(e.place for e in edits), (edits,)) for pairs in parts]
    found = list(run(recording, units))
    outputs: Tensor = found[0].new_empty(len(edits[0].gains), len(recording), *found[0].shape[2:])
    for pairs, piece in zip(parts, found, strict=True):
        outputs[:, pairs] = piece
    return outputs


def _outputs(recording: BankRecording, edits: Sequence[EditBatch]) -> Tensor:
    return respond(recording, edits).cpu()


def _last_word(prompt: str) -> list[int] | None:
    """Where the last word or sign of a prompt begins and ends."""
    found = re.search(r"(\w+|[^\w\s])\s*$", prompt)
    return list(found.span(1)) if found else None
