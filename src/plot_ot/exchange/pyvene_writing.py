"""Handles to pyvene (0.1.8): the same outputs, as an IntervenableModel or a directory that pyvene loads.

What pyvene's own classes hold exactly is written with them: swaps of neurons (`VanillaIntervention` with a subspace
partition) and of orthonormal directions (`LowRankRotatedSpaceIntervention`). Strengths other than 1 and oblique edits
go into two small classes of ours (`interventions.py`), which pyvene loads by name where plot-ot is installed. Several
places are several representations of one group: one run of the source feeds them all.
"""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from jaxtyping import Float
from torch import Tensor

from plot_ot.errors import PlotError
from plot_ot.exchange.components import Component, component, encoded, pyvene_library, pyvene_model, tokens
from plot_ot.exchange.fold import effective_edits, factors, neurons, principal, shape_of
from plot_ot.handles import Edit, Handle
from plot_ot.subjects import Subject
from plot_ot.version import __version__


@dataclass(frozen=True)
class WrittenIntervention:
    """An edit as an intervention: its class, what its representation says, the tensors that go into it."""

    at: Component
    kind: str
    rank: int | None = None
    partition: list[list[int]] | None = None
    """Runs of neurons [from, to) that are swapped, all of them."""
    tensors: Mapping[str, Float[Tensor, "..."]] = field(default_factory=dict)

    @property
    def subspaces(self) -> list[int] | None:
        """The parts of the partition to swap, which pyvene is told with every call."""
        return None if self.partition is None else list(range(len(self.partition)))


def to_pyvene(
    handle: Handle,
    subject: Subject,
    directory: str | os.PathLike[str] | None = None,
    *,
    native_only: bool = False,
) -> Any:
    """The handle as a `pyvene.IntervenableModel`; with a `directory`, also saved there in pyvene's format.

    Call it with `pyvene_inputs`. With `native_only`, only pyvene's own classes are used, and a handle that they do not
    hold exactly is refused. As always with pyvene, the network's weights are frozen by it.
    """
    pyvene = pyvene_library()
    handle.require(subject)
    written = _written(handle, subject, native_only)
    model = pyvene_model(subject)
    representations = [
        pyvene.RepresentationConfig(
            layer=w.at.layer,
            component=w.at.name,
            unit=w.at.unit,
            max_number_of_units=w.at.units,
            low_rank_dimension=w.rank,
            subspace_partition=w.partition,
            group_key=0,
            latent_dim=w.at.width,
        )
        for w in written
    ]
    note = {
        "version": __version__,
        "variable": handle.variable,
        "subject": handle.subject,
        "places": [e.place.name for e in effective_edits(handle, "pyvene")],
        "subspaces": [w.subspaces for w in written],
    }
    config = pyvene.IntervenableConfig(
        representations=representations, intervention_types=[_class(w.kind) for w in written], plot_ot=note
    )
    made = pyvene.IntervenableModel(config, model)
    for w, intervention in zip(written, made.interventions.values(), strict=True):
        if "rotation" in w.tensors:
            intervention.rotate_layer.weight = w.tensors["rotation"]
        else:
            intervention.load_state_dict({**intervention.state_dict(), **w.tensors})
        intervention.to(subject.device)
    if directory is not None:
        _save(made, Path(directory))
    return made


def pyvene_inputs(handle: Handle, subject: Subject, base: Tensor, source: Tensor) -> dict[str, Any]:
    """What to call the exported model with: `_, outputs = model(**pyvene_inputs(handle, subject, base, source))`.

    Base and source prompts are padded on the left, each to its own longest; a unit location is the index of the place's
    token in its padded row, worked out separately in base and source.
    """
    written = _written(handle, subject)
    if len(base) != len(source) or not len(base):
        raise PlotError(f"Base and source inputs must pair up: found {len(base)} bases, {len(source)} sources.")
    places = [e.place for e in effective_edits(handle, "pyvene")]
    sides = [tokens(subject, places, rows) for rows in (source, base)]
    subspaces = [None if w.subspaces is None else [w.subspaces] * len(base) for w in written]
    pair = tuple([_locations(w.at, at) for w, at in zip(written, side, strict=True)] for side in sides)
    somewhere = any(at is not None for at in pair[0])
    return {
        "base": encoded(subject, base),
        "sources": [encoded(subject, source)],
        "unit_locations": {"sources->base": pair} if somewhere else None,
        "subspaces": subspaces if any(s is not None for s in subspaces) else None,
    }


def _locations(at: Component, token: Tensor | None) -> Any:
    if token is None:
        return None
    positions = [list(range(int(t), int(t) + at.units)) for t in token]
    return positions if at.head is None else [[[at.head]] * len(positions), positions]


def _written(handle: Handle, subject: Subject, native_only: bool = False) -> list[WrittenIntervention]:
    handle.require(subject)
    pyvene_library()
    return [_write(edit, component(subject, edit.place), native_only) for edit in effective_edits(handle, "pyvene")]


def _write(edit: Edit, at: Component, native_only: bool) -> WrittenIntervention:
    first, d = at.columns.start, at.width
    chosen, found = neurons(edit), None if edit.frame.read is None else principal(edit)
    if found is not None and found.swaps and found.basis.shape[1] == d:
        chosen = list(range(d))  # every direction: the whole vector
    if chosen is not None and len(chosen) == d:
        return WrittenIntervention(at, "VanillaIntervention")
    if at.flat and chosen is not None:
        return WrittenIntervention(at, "VanillaIntervention", partition=_runs([first + i for i in chosen]))
    if at.flat and found is not None and found.swaps:
        rotation = _padded(found.basis, at)
        return WrittenIntervention(
            at, "LowRankRotatedSpaceIntervention", rotation.shape[1], tensors={"rotation": rotation}
        )
    if native_only:
        why = shape_of(edit) if at.flat else "an activation that is not a vector per row"
        raise PlotError(
            f"pyvene's own interventions swap neurons and orthonormal directions with strength 1; at {edit.place.name} "
            f"the handle has {why}. Leave out native_only to write it with plot-ot's intervention classes."
        )
    if edit.frame.read is None:
        return WrittenIntervention(
            at, "GainIntervention", tensors={"gains": _padded(edit.gains.detach().cpu().float(), at)}
        )
    read, write = (_padded(t.float(), at) for t in factors(edit))
    return WrittenIntervention(at, "FrameIntervention", read.shape[1], tensors={"read": read, "write": write})


def _padded(part: Float[Tensor, "d ..."], at: Component) -> Float[Tensor, "width ..."]:
    """Fill a place's values up with zeros where pyvene's unit has columns that are not the place's."""
    whole = part.new_zeros(at.width, *part.shape[1:])
    whole[at.columns] = part
    return whole


def _runs(chosen: Sequence[int]) -> list[list[int]]:
    """Consecutive neurons as [from, to): pyvene reads any two numbers as such a range."""
    starts = [chosen[0], *(b for a, b in pairwise(chosen) if b != a + 1)]
    ends = [*(a + 1 for a, b in pairwise(chosen) if b != a + 1), chosen[-1] + 1]
    return [list(run) for run in zip(starts, ends, strict=True)]


def _class(kind: str) -> type:
    from plot_ot.exchange import interventions

    found: type = getattr(interventions if hasattr(interventions, kind) else pyvene_library(), kind)
    return found


def _save(made: Any, directory: Path) -> None:
    """Save the whole directory or nothing: pyvene writes into a temporary one, which is then renamed."""
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise PlotError(f"{directory} is there already and is not an empty directory. Choose another name.")
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        beside = tempfile.mkdtemp(dir=directory.parent, prefix=".writing-")
        try:
            with contextlib.redirect_stdout(io.StringIO()):  # pyvene prints that the directory exists
                made.save(beside)
            os.chmod(beside, 0o755)  # noqa: S103 - mkdtemp is stricter than mkdir
            os.replace(beside, directory)
        finally:
            shutil.rmtree(beside, ignore_errors=True)
    except OSError as e:
        raise PlotError(f"Cannot write {directory}: {e.strerror or e}. Choose a directory you can write to.") from e
