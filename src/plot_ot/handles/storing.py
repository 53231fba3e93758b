"""A handle in a file: tensors and a description, in one safetensors file that is read without trusting it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from safetensors.torch import save
from torch import Tensor

from plot_ot.edits import Frame
from plot_ot.edits.encoder import Encoder
from plot_ot.errors import PlotError
from plot_ot.files.safe_reading import MOST_TENSORS, UNREADABLE, parse_json, read_tensors
from plot_ot.files.writing import to_json
from plot_ot.handles.edit import Edit
from plot_ot.subjects import Place
from plot_ot.version import __version__

FORMAT = "plot-ot handle 1"
ENCODED_FORMAT = "plot-ot handle 2"
"""The format of handles that read through an encoder; an earlier version of the library refuses such a file."""
ENCODER_PARTS = ("bias", "features", "threshold", "rivals", "rival_bias")

Value = bool | int | float | str | tuple["Value", ...]
"""A value of a variable."""


@dataclass(frozen=True)
class Stored:
    """What a handle's file says."""

    variable: str
    edits: tuple[Edit, ...]
    subject: str
    chosen: Mapping[str, Any]
    values: Mapping[Value, tuple[Float[Tensor, " r"], ...]]


def handle_bytes(stored: Stored) -> bytes:
    """The bytes of a handle's file."""
    tensors: dict[str, Tensor] = {}
    described = []
    for k, e in enumerate(stored.edits):
        parts = {"gains": e.gains, "read": e.frame.read, "write": e.frame.write}
        parts |= {part: getattr(e.frame.encoder, part, None) for part in ENCODER_PARTS}
        for part, tensor in parts.items():
            if tensor is not None:
                tensors[f"{k}.{part}"] = _plain(tensor)
        place = {"name": e.place.name, "width": e.place.width, "layer": e.place.layer, "position": e.place.position}
        described.append({"place": place, "frame": e.frame.kind})
        if e.frame.encoder is not None:
            described[-1]["encoder"] = {"k": e.frame.encoder.k}
    header: dict[str, Any] = {
        "format": ENCODED_FORMAT if any("encoder" in d for d in described) else FORMAT,
        "version": __version__,
        "variable": stored.variable,
        "subject": stored.subject,
        "edits": described,
        "chosen": dict(stored.chosen),
    }
    for j, coordinates in enumerate(stored.values.values()):
        for k, c in enumerate(coordinates):
            tensors[f"value.{j}.{k}"] = _plain(c)
    if stored.values:
        header["values"] = list(stored.values)
    return bytes(save(tensors, metadata={"plot_ot": to_json(header)}))


def read_handle(path: str | os.PathLike[str], most: int = MOST_TENSORS) -> Stored:
    """What a handle's file of at most `most` bytes says; refuses a file that is damaged or of another format."""
    try:
        metadata, tensors = read_tensors(path, most)
        header = parse_json(metadata["plot_ot"])
        if header["format"] not in (FORMAT, ENCODED_FORMAT):
            known = f"{FORMAT!r} and {ENCODED_FORMAT!r}"
            raise PlotError(f"{path} has format {header['format']!r}; this version reads {known}.")
        edits = [_read_edit(k, described, tensors) for k, described in enumerate(header["edits"])]
        return Stored(
            str(header["variable"]),
            tuple(edits),
            str(header["subject"]),
            dict(header["chosen"]),
            _read_values(header.get("values", ()), edits, tensors),
        )
    except FileNotFoundError:
        raise PlotError(f"There is no handle file at {path}.") from None
    except UNREADABLE as e:
        raise PlotError(f"{path} is not a readable plot-ot handle ({type(e).__name__}: {e}). Save it again.") from e


def _plain(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().clone(memory_format=torch.contiguous_format)


def _read_values(
    values: Sequence[Any], edits: Sequence[Edit], tensors: Mapping[str, Tensor]
) -> dict[Value, tuple[Tensor, ...]]:
    return {
        _read_label(v): tuple(_read_value(j, k, e, tensors) for k, e in enumerate(edits)) for j, v in enumerate(values)
    }


def as_value(value: Any) -> Value:
    """A value of a variable as it can be looked up and written to a file."""
    if isinstance(value, (Tensor, np.ndarray, np.generic)):
        value = value.tolist()
    if isinstance(value, (list, tuple)):
        return tuple(as_value(v) for v in value)
    if not isinstance(value, (bool, int, float, str)):
        raise PlotError(f"A variable's value is a number, a truth value, a string or a tuple of them; found {value!r}.")
    return value


def _read_label(value: Any) -> Value:
    try:
        return as_value(value)
    except PlotError as e:
        raise ValueError(str(e)) from None


def _read_value(j: int, k: int, edit: Edit, tensors: Mapping[str, Tensor]) -> Tensor:
    coordinates = tensors[f"value.{j}.{k}"]
    if coordinates.shape != (edit.frame.rank,) or not torch.isfinite(coordinates).all():
        raise ValueError(f"a value's coordinates of shape {tuple(coordinates.shape)} for {edit.frame.rank} directions")
    return coordinates


def _read_edit(k: int, described: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Edit:
    at = described["place"]
    place = Place(str(at["name"]), int(at["width"]), int(at["layer"]), at["position"])
    read, write = tensors.get(f"{k}.read"), tensors.get(f"{k}.write")
    if any(t is not None and not torch.isfinite(t).all() for t in (read, write, tensors[f"{k}.gains"])):
        raise ValueError("NaN or infinity in its tensors")
    rank = place.width if read is None else read.shape[-1] if read.ndim else 0
    for part in (read, write):
        if part is not None and tuple(part.shape) != (place.width, rank):
            raise ValueError(f"a frame of shape {tuple(part.shape)} at a place of width {place.width}")
    frame = Frame(place.width, read, write, str(described["frame"]))
    if "encoder" in described:
        frame = replace(frame, encoder=_read_encoder(k, described["encoder"]["k"], tensors, frame))
    gains = tensors[f"{k}.gains"]
    if gains.shape != (frame.rank,) or not torch.isfinite(gains).all():
        raise ValueError(f"gains of shape {tuple(gains.shape)} for {frame.rank} directions")
    return Edit(place, frame, gains)


def _read_encoder(k: int, largest: Any, tensors: Mapping[str, Tensor], frame: Frame) -> Encoder:
    parts = {part: tensors.get(f"{k}.{part}") for part in ENCODER_PARTS}
    if parts["bias"] is None or parts["features"] is None or frame.read is None or frame.write is None:
        raise ValueError("an encoder without its bias, features, read or write")
    if largest is not None and (type(largest) is not int or largest < 1):
        raise ValueError(f"an encoder that keeps the {largest!r} largest features")
    others = parts["rivals"].shape[-1] if parts["rivals"] is not None else 0
    shapes: dict[str, tuple[int, ...]] = dict.fromkeys(ENCODER_PARTS, (frame.rank,))
    shapes |= {"rivals": (frame.width, others), "rival_bias": (others,)}
    for part, tensor in parts.items():
        if tensor is None:
            continue
        if tuple(tensor.shape) != shapes[part] or tensor.is_floating_point() == (part == "features"):
            raise ValueError(f"an encoder's {part} of shape {tuple(tensor.shape)} and type {tensor.dtype}")
        if not torch.isfinite(tensor).all():
            raise ValueError(f"NaN or infinity in an encoder's {part}")
    if (parts["rivals"] is None) != (parts["rival_bias"] is None):
        raise ValueError("an encoder's rivals without their bias")
    return Encoder(parts["bias"], parts["features"], parts["threshold"], largest, parts["rivals"], parts["rival_bias"])
