"""Can a decoder be resumed at an edit? Tried on a few tokens before any prompt runs, and on the first one recorded."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import torch

from plot_ot.errors import PlotError
from plot_ot.subjects.decoder.layout import LAST
from plot_ot.subjects.decoder.store import DecoderStore
from plot_ot.subjects.memory import OutOfMemory, is_out_of_memory
from plot_ot.subjects.protocol import Share

if TYPE_CHECKING:
    from plot_ot.subjects.decoder.subject import DecoderSubject


def refuse_unresumable(subject: DecoderSubject) -> None:
    """Record and resume a few tokens before any prompt is: what cannot be resumed is refused here."""
    ids = torch.arange(1, 6).unsqueeze(0) % subject.decoder.vocabulary
    trial = copy.copy(subject)
    trial.encode, trial.positions, trial.tokens = lambda _: (ids, torch.ones_like(ids)), {}, None
    trial.memory = 1 << 30
    trial._spots = {name: spot for name, spot in subject._spots.items() if spot.position == LAST}
    try:
        trial._record(torch.zeros(1, 1), torch.tensor([0]), Share())
    except OutOfMemory:
        raise
    except Exception as e:
        if isinstance(e, PlotError) and "cannot be resumed" in str(e):
            raise
        name = type(subject.decoder.model).__name__
        raise PlotError(f"{name} cannot be resumed at an edit: {e} Use ModuleSubject for it.") from e


@torch.no_grad()
def check_resumed(subject: DecoderSubject, store: DecoderStore, row: int) -> None:
    """Resume one prompt under a strong edit and compare with the whole hooked forward."""
    place = next(spot.place for spot in subject._spots.values() if spot.position == LAST)
    edited = store.activations[place.name][row].flip(0)
    ids, real = subject.encoded(store.inputs[row : row + 1])
    prompt, mask = (t[:, -int(store.lengths[row]) :].to(subject.device) for t in (ids, real.long()))
    with subject._held(), subject.intervene({place.name: lambda _: edited.unsqueeze(0)}):
        whole = subject.decoder.model(input_ids=prompt, attention_mask=mask).logits[0, -1].float()
    expected = torch.stack([whole[list(group)].amax() for group in subject.answers])
    name = type(subject.decoder.model).__name__
    try:
        found = subject.watching().resume(store, torch.tensor([row]), place, edited[None, None], {})[0, 0]
    except Exception as e:
        if is_out_of_memory(e):
            raise
        raise PlotError(
            f"{name} cannot be resumed at an edit ({type(e).__name__}: {e}): its attention must go through "
            f"transformers' attention interface. Use ModuleSubject for it."
        ) from e
    error = float((found - expected.to(found.device)).abs().max() / whole.abs().max().clamp(min=1e-6))
    if not error < (1e-3 if subject.decoder.dtype in (torch.float32, torch.float64) else 0.1):
        raise PlotError(
            f"{name} cannot be resumed at an edit: its answers differ from those of the whole forward pass by "
            f"{error:.2g} of the largest logit. Use ModuleSubject for it."
        )
