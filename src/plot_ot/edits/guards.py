"""What stands around every resumed batch: one that does not fit into memory is halved, and NaN is named where it first
appears.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from jaxtyping import Float
from torch import Tensor

from plot_ot.finite import refuse_non_finite
from plot_ot.subjects import Place, Recording, Subject
from plot_ot.subjects.protocol import Rewrite

# -- memory ---------------------------------------------------------------------------------------------------


def within_memory(
    subject: Subject, run: Callable[[slice, slice], Float[Tensor, "variants pairs ..."]], variants: int, pairs: int
) -> Float[Tensor, "variants pairs ..."]:
    """`run` over all variants and pairs, in halves if memory runs out, in halves of these if it does again, ...

    What has been learned about a subject's limits is kept, so that its next batches are cut before they fail.
    """

    def part(v: slice, p: slice) -> Tensor:
        wide, long = v.stop - v.start, p.stop - p.start
        done = subject.limits.attempt(lambda: run(v, p), wide * long, "response")
        if done is not None:
            return done
        axis, (left, right) = (1, _halves(p)) if long > 1 else (0, _halves(v))
        parts = [part(v, left), part(v, right)] if axis else [part(left, p), part(right, p)]
        return torch.cat(parts, dim=axis)

    return part(slice(0, variants), slice(0, pairs))


def _halves(s: slice) -> tuple[slice, slice]:
    middle = (s.start + s.stop) // 2
    return slice(s.start, middle), slice(middle, s.stop)


# -- numbers --------------------------------------------------------------------------------------------------


def require_finite_outputs(
    outputs: Float[Tensor, "variants pairs ..."],
    recording: Recording,
    pairs: Tensor | slice,
    edited: Float[Tensor, "variants pairs d"],
    start: Place,
    later: Mapping[str, Rewrite],
) -> None:
    """Refuse outputs with NaN or infinity, and say at which place it first appeared, for which pair.

    Outputs that are trained through are left to those who look at the losses and know whose they are.
    """
    if outputs.requires_grad:
        return

    def message(found: Tensor) -> str:
        bad = found.flatten(2).any(dim=2)
        variant, pair = bad.nonzero()[0].tolist()
        rows = recording.base_rows[pairs]
        place = _first_bad(recording, rows, edited, start, later, variant, pair)
        where = "the output" if place is None else f"{place.name} (layer {place.layer})"
        number = int(torch.arange(len(recording), device=rows.device)[pairs][pair])
        base, source = rows[pair], recording.source_rows[pairs][pair]
        said = {side: recording.store.inputs[int(row)].tolist() for side, row in (("base", base), ("source", source))}
        return (
            f"An edit at {start.name} (layer {start.layer}) gives NaN or infinity, first at {where}, for base input "
            f"{said['base']} with source {said['source']} (pair {number}, variant {variant} of the batch; "
            f"{int(bad.sum())} of {bad.numel()} responses). The network overflows there: use float32, smaller "
            f"strengths, or drop that place."
        )

    refuse_non_finite(outputs, message)


@torch.no_grad()
def _first_bad(
    recording: Recording,
    rows: Tensor,
    edited: Tensor,
    start: Place,
    later: Mapping[str, Rewrite],
    variant: int,
    pair: int,
) -> Place | None:
    """The first place whose activation is not finite when the batch runs once more; None where only the output is."""
    subject, seen = recording.subject, dict[str, bool]()
    if not bool(torch.isfinite(edited[variant, pair]).all()):
        return start

    def watch(name: str) -> Rewrite:
        def look(a: Tensor) -> Tensor:
            a = later[name](a) if name in later else a
            seen[name] = bool(torch.isfinite(a[variant, pair]).all())
            return a

        return look

    after = subject.places[[p.name for p in subject.places].index(start.name) + 1 :]
    subject.resume(recording.store, rows, start, edited, {p.name: watch(p.name) for p in after})
    return next((p for p in after if not seen.get(p.name, True)), None)
