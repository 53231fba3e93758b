"""Test pairs of a text task in words: what the network said before the edit, after it, and what was expected."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from jaxtyping import Float
from torch import Tensor

from plot_ot.edits import EditBatch, respond
from plot_ot.engine import Unit, run, shards
from plot_ot.files.writing import Json
from plot_ot.handles import Handle
from plot_ot.signatures import Readout
from plot_ot.studies.prepared import Wording
from plot_ot.subjects import BankRecording

EXAMPLES = 20
"""Examples kept per method and variable."""


def example_rows(key: Json, handle: Handle, recording: BankRecording, wording: Wording, readout: Readout) -> list[Json]:
    """Some sensitive test pairs in words: families dealt evenly, wrong ones first among each family's."""
    recording = replace(recording, subject=wording.strict)
    bank = recording.bank
    outputs = _responses(recording, handle.batch())
    right = readout.correct(outputs, bank.labels[handle.variable].to(outputs.device))[0].cpu()
    after = readout.decide(outputs)[0].tolist()
    before = readout.decide(wording.strict.outputs_of(recording.store)[recording.base_rows]).tolist()
    each = -(-EXAMPLES // len(bank.families))
    chosen = []
    for family in range(len(bank.families)):
        members = (bank.family == family).nonzero().squeeze(1)
        wrong, good = members[~right[members]].tolist(), members[right[members]].tolist()
        half = wrong[: each // 2]
        chosen += half + good[: each - len(half)]
    base, source = wording.render(bank.base[chosen]), wording.render(bank.source[chosen])
    return [
        {
            **key,
            "variable": handle.variable,
            "bank": "sensitivity",
            "family": bank.families[int(bank.family[t])],
            "base_prompt": base[k],
            "source_prompt": source[k],
            "before": wording.answer(before[t]),
            "after": wording.answer(after[t]),
            "expected": wording.answer(int(bank.labels[handle.variable][t])),
            "source_answer": wording.answer(int(bank.source_answer[t])),
            "right": bool(right[t]),
            "position": {"label": "last token", "base": _last_word(base[k]), "source": _last_word(source[k])},
        }
        for k, t in enumerate(chosen)
    ]


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
