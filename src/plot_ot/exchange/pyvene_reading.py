"""Handles from pyvene: what was trained there, from a live IntervenableModel or a directory that one was saved to.

A directory is read without pyvene: config.json says which interventions there are, each `intkey_*.bin` holds the
tensors of one. pyvene itself imports whatever class a directory names; here a name that is not in KINDS is refused.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from plot_ot.edits import Frame
from plot_ot.errors import PlotError
from plot_ot.exchange.components import NAMES, path_of, spot
from plot_ot.exchange.fold import EXACT
from plot_ot.exchange.torch_files import most_bytes, rotation_in, tensor_of
from plot_ot.files.safe_reading import UNREADABLE, parse_json, read_bytes, read_torch_file
from plot_ot.handles import Edit, Handle
from plot_ot.subjects import DecoderSubject, ModuleSubject, Place, Subject
from plot_ot.subjects.decoder.layout import LAST

THEIRS = (
    *("VanillaIntervention", "RotatedSpaceIntervention", "LowRankRotatedSpaceIntervention"),
    *("BoundlessRotatedSpaceIntervention", "SigmoidMaskRotatedSpaceIntervention", "SigmoidMaskIntervention"),
)
OURS = ("GainIntervention", "FrameIntervention")
KINDS = {f"pyvene.models.interventions.{k}": k for k in THEIRS} | {
    f"plot_ot.exchange.interventions.{k}": k for k in OURS
}
"""Interventions that are edits, by their dotted names."""
FIELDS = (
    *("layer", "component", "unit", "max_number_of_units", "low_rank_dimension", "intervention_type", "intervention"),
    *("subspace_partition", "group_key", "intervention_link_key", "moe_key", "source_representation"),
    *("hidden_source_representation", "latent_dim"),
)
"""The fields of pyvene's RepresentationConfig, in the order in which it is saved."""


@dataclass(frozen=True)
class FoundIntervention:
    """One intervention of a live or a saved pyvene model."""

    kind: str
    representation: Mapping[str, Any]
    swapped: int | None
    """How many of the leading coordinates pyvene swaps; all if None."""
    state: Mapping[str, Any] | Path
    place: str | None = None
    """The name of the handle's place, if `to_pyvene` wrote the intervention."""
    subspaces: Sequence[int] | None = None


def from_pyvene(
    trained: Any,
    subject: Subject,
    variable: str,
    *,
    place: str | Sequence[str] | None = None,
    subspaces: Sequence[int] | None = None,
) -> Handle:
    """A handle from a live `pyvene.IntervenableModel`, or from a directory that one was saved to.

    Understood are swaps of neurons, DAS rotations (also low-rank, with a learned boundary or a learned mask), masks
    over neurons, and whatever `to_pyvene` wrote. pyvene does not keep which token or head an intervention is for:
    `place` names it, one name per intervention; by default it is the component's last token. `subspaces` says which
    parts you swap where an intervention has a subspace partition. Nothing in a directory is executed.
    """
    try:
        if not isinstance(trained, (str, os.PathLike)):
            return _handle(_alive(trained), subject, variable, place, subspaces)
        return _handle(_saved(Path(trained)), subject, variable, place, subspaces)
    except FileNotFoundError as e:
        raise PlotError(f"{trained} is not a directory that pyvene saved: {e.filename} is missing.") from None
    except UNREADABLE as e:
        origin = trained if isinstance(trained, (str, os.PathLike)) else f"this {type(trained).__name__}"
        raise PlotError(
            f"{origin} holds no intervention of pyvene that is an edit ({type(e).__name__}: {e}). Give the directory "
            f"or the IntervenableModel that DAS was trained with."
        ) from e


def _handle(
    found: list[FoundIntervention],
    subject: Subject,
    variable: str,
    place: str | Sequence[str] | None,
    subspaces: Sequence[int] | None,
) -> Handle:
    names: Sequence[str | None] = [place] if isinstance(place, str) else place or [f.place for f in found]
    if len(names) != len(found):
        raise PlotError(f"There are {len(found)} interventions; name a place for each. Found {len(names)}: {names}.")
    places = [_place(f, subject) if n is None else subject.place(n) for f, n in zip(found, names, strict=True)]
    if len({p.name for p in places}) < len(places):
        raise PlotError(f"Two interventions land on one place ({places[0].name}); name their places with `place`.")
    edits = [_edit(f, subject, p, subspaces or f.subspaces) for f, p in zip(found, places, strict=True)]
    order = {p.name: k for k, p in enumerate(subject.places)}
    edits.sort(key=lambda e: order[e.place.name])
    chosen = {"imported": "pyvene", "interventions": [f.kind for f in found]}
    return Handle(variable, tuple(edits), subject.identity(), chosen)


# -- what is there ----------------------------------------------------------------------------------------------------


def _alive(model: Any) -> list[FoundIntervention]:
    note = _note(getattr(model.config, "plot_ot", None), len(model.interventions))
    found = []
    for k, (key, intervention) in enumerate(model.interventions.items()):
        kind = type(intervention)
        swapped = intervention.interchange_dim
        found.append(
            FoundIntervention(
                _kind(f"{kind.__module__}.{kind.__qualname__}"),
                model.representations[key]._asdict(),
                None if swapped is None else int(swapped),
                intervention.state_dict(),
                *note[k],
            )
        )
    return _some(found)


def _saved(directory: Path) -> list[FoundIntervention]:
    config = parse_json(read_bytes(directory / "config.json", 16 << 20))
    if not isinstance(config, dict):
        raise ValueError("config.json is not an object")
    types, dimensions = config["intervention_types"], config["intervention_dimensions"]
    representations = [_fields(r) for r in config["representations"]]
    if not len(types) == len(dimensions) == len(representations):
        raise ValueError("config.json lists differing numbers of interventions")
    note, seen, found = _note(config.get("plot_ot"), len(types)), dict[str, int](), []
    for k, (name, representation, swapped) in enumerate(zip(types, representations, dimensions, strict=True)):
        key = _key(representation, seen)
        kind = _kind(str(name).removeprefix("<class '").removesuffix("'>"))
        file = directory / f"intkey_{key}.bin"
        if file.parent != directory or not key.replace("#", "_").replace("[", "_").replace("]", "_").isidentifier():
            raise ValueError(f"a component whose file would be {file.name!r}")
        state: Mapping[str, Any] | Path = {} if kind == "VanillaIntervention" else file
        found.append(
            FoundIntervention(kind, representation, None if swapped is None else int(swapped), state, *note[k])
        )
    return _some(found)


def _some(found: list[FoundIntervention]) -> list[FoundIntervention]:
    if not found:
        raise ValueError("no intervention at all")
    return found


def _kind(dotted: str) -> str:
    if dotted not in KINDS:
        name = dotted.rpartition(".")[2][:80]
        raise PlotError(
            f"An intervention of class {name} is not an edit that a handle holds. Understood: {', '.join(THEIRS)}."
        )
    return KINDS[dotted]


def _fields(saved: Any) -> dict[str, Any]:
    if isinstance(saved, dict):
        return saved
    if not isinstance(saved, list) or len(saved) > len(FIELDS):
        raise ValueError("a representation that is not a list of fields")
    return dict(zip(FIELDS, saved, strict=False))


def _key(representation: Mapping[str, Any], seen: dict[str, int]) -> str:
    """The name under which pyvene keeps an intervention."""
    component, unit = str(representation["component"]), str(representation["unit"]).replace(".", "_")
    units = representation.get("max_number_of_units", 1)
    name = component.replace(".", "_") if "." in component else f"{component}"
    prefix = f"comp_{name}" if "." in component else f"layer_{representation['layer']}_comp_{name}"
    key = f"{prefix}_unit_{unit}_nunit_{units}"
    seen[key] = seen.get(key, -1) + 1
    return f"{key}#{seen[key]}"


def _note(note: Any, count: int) -> list[tuple[str | None, Sequence[int] | None]]:
    """Read the places and subspaces that `to_pyvene` noted in the configuration."""
    if not isinstance(note, dict):
        return [(None, None)] * count
    places, subspaces = note["places"], note["subspaces"]
    if not len(places) == len(subspaces) == count:
        raise ValueError("plot_ot's note does not fit the interventions")
    return [(str(p), s) for p, s in zip(places, subspaces, strict=True)]


def _place(found: FoundIntervention, subject: Subject) -> Place:
    """The place of a representation: its component's, at the last token."""
    said, layer = str(found.representation["component"]), found.representation["layer"]
    path = said.replace("[", ".").replace("]", "")
    matches = []
    for place in subject.places:
        if isinstance(subject, DecoderSubject):
            at = spot(subject, place)
            named = (said, layer) == (NAMES[at.kind], place.layer)
            if at.position == LAST and (named or path == path_of(subject, place)):
                matches.append(place)
        elif isinstance(subject, ModuleSubject) and path in (own := path_of(subject, place), own.partition(".")[2]):
            matches.append(place)
    if len(matches) == 1:
        return matches[0]
    count = f"{len(matches)} places" if matches else "no place"
    raise PlotError(
        f"Component {said[:80]} of layer {layer} is {count} of this subject. "
        f"Say with `place` which it is: {', '.join(p.name for p in (matches or subject.places)[:8])}, ..."
    )


# -- what it does -----------------------------------------------------------------------------------------------------


def _edit(found: FoundIntervention, subject: Subject, place: Place, subspaces: Sequence[int] | None) -> Edit:
    d, columns, units = place.width, slice(0, place.width), 1
    if isinstance(subject, DecoderSubject):
        at, units = spot(subject, place), spot(subject, place).tokens
        if at.kind == "head_output" and "." in str(found.representation["component"]):
            d, columns = subject.decoder.shows(place.layer, at.kind), at.columns  # pyvene sees all heads
    if (spans := found.representation.get("max_number_of_units", 1)) != units:
        raise PlotError(f"The intervention spans {spans} units, but {place.name} is {units} token(s) wide.")
    frame, gains = _read(found, d, _parts(found, subspaces, place))
    outside = torch.ones(d, dtype=torch.bool)
    outside[columns] = False
    parts = [gains] if frame.read is None else [frame.read] if frame.write is None else [frame.read, frame.write]
    if any(bool((part[outside].abs() > EXACT).any()) for part in parts):  # a rotation is kept but for rounding
        raise PlotError(f"The intervention also changes what is outside {place.name}; name the place it belongs to.")
    if frame.read is None:
        return Edit(place, Frame.identity(place.width), gains[columns])
    write = None if frame.write is None else frame.write[columns]
    return Edit(place, Frame(place.width, frame.read[columns], write, frame.kind), gains)


def _read(found: FoundIntervention, d: int, chosen: list[int] | None) -> tuple[Frame, Float[Tensor, " r"]]:
    """Frame and gains of an intervention on vectors of width d."""
    state = read_torch_file(found.state, most_bytes(d)) if isinstance(found.state, Path) else found.state
    if not isinstance(state, Mapping):
        raise ValueError("a file that is not a table of tensors")
    if found.kind == "GainIntervention":
        return Frame.identity(d), tensor_of(state.get("gains"), "gains", (d,))
    if found.kind == "SigmoidMaskIntervention":
        return Frame.identity(d), torch.sigmoid(tensor_of(state.get("mask"), "mask", (d,)) / _temperature(state))
    if found.kind == "VanillaIntervention":
        return Frame.identity(d), _ones(d, chosen if chosen is not None else range(d)[: found.swapped])
    if found.kind == "FrameIntervention":
        read = tensor_of(state.get("read"), "read")
        if read.ndim != 2 or read.shape[0] != d:
            raise ValueError(f"a frame of shape {tuple(read.shape)} at a place of width {d}")
        write = tensor_of(state.get("write"), "write", tuple(read.shape))
        return Frame.oblique(read, write), torch.ones(read.shape[1])
    rotation = rotation_in(state, "rotate_layer.", d)
    r = rotation.shape[1]
    if found.kind == "BoundlessRotatedSpaceIntervention":
        end = tensor_of(state.get("intervention_boundaries"), "boundaries", (1,)).clamp(1e-3, 1) * d
        index, t = torch.arange(r), _temperature(state)
        gains = torch.sigmoid(index / t) * torch.sigmoid((end - index) / t)
    elif found.kind == "SigmoidMaskRotatedSpaceIntervention":
        gains = torch.sigmoid(tensor_of(state.get("masks"), "masks", (r,)) / _temperature(state))
    else:
        low_rank = found.kind == "LowRankRotatedSpaceIntervention"
        gains = _ones(r, chosen if chosen is not None else range(r) if low_rank else range(r)[: found.swapped])
    used = gains != 0
    return Frame(d, rotation[:, used], None, "rotation"), gains[used]


def _parts(found: FoundIntervention, subspaces: Sequence[int] | None, place: Place) -> list[int] | None:
    """The coordinates of the chosen parts of a subspace partition; None where there is none to choose from."""
    partition = found.representation.get("subspace_partition")
    if partition is None:
        return None if subspaces is None else [int(i) for i in subspaces]
    if subspaces is None:
        raise PlotError(
            f"The intervention at {place.name} has a subspace partition of {len(partition)} parts; say with "
            f"`subspaces` which of them you swap."
        )
    chosen: list[int] = []
    for k in subspaces:
        part = partition[int(k)]
        a_range = len(part) == 2 and isinstance(part[0], int)  # pyvene reads any two numbers as [from, to)
        chosen += range(int(part[0]), min(int(part[1]), 1 << 20)) if a_range else [int(i) for i in part]
    return chosen


def _ones(size: int, at: Sequence[int]) -> Float[Tensor, " size"]:
    if not at or not all(0 <= i < size for i in at):
        raise ValueError(f"coordinates outside 0..{size - 1}")
    gains = torch.zeros(size)
    gains[list(at)] = 1
    return gains


def _temperature(state: Mapping[str, Any]) -> Tensor:
    t = tensor_of(state.get("temperature"), "temperature", ())
    if not float(t) > 0:
        raise ValueError(f"temperature {float(t)}")
    return t
