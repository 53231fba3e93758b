"""Handles: executable interventions for one variable, applied to inputs or a live model, saved as safetensors."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from plot_ot.edits import EditBatch, Frame, respond
from plot_ot.encoder import Encoder
from plot_ot.errors import PlotError
from plot_ot.runs import to_json, write_atomically
from plot_ot.subjects import Place, Subject, record_pairs
from plot_ot.version import __version__

FORMAT = "plot-ot handle 1"
ENCODED_FORMAT = "plot-ot handle 2"
"""Of handles that read through an encoder: a version that would not know it refuses the file."""
ENCODER_PARTS = ("bias", "features", "threshold", "rivals", "rival_bias")


@dataclass(frozen=True)
class Edit:
    """One place's part of a handle: directions and how much of each to take from the source."""

    place: Place
    frame: Frame
    gains: Float[Tensor, " r"]

    @property
    def size(self) -> int:
        """How many directions it touches."""
        return int((self.gains != 0).sum())


@dataclass(frozen=True)
class Handle:
    """Edits in forward order that together swap one variable from a source into a base run."""

    variable: str
    edits: tuple[Edit, ...]
    subject: str
    """Identity of the network it belongs to."""
    chosen: Mapping[str, Any] = field(default_factory=dict)
    """How it was chosen: method, K, λ, ε, layer, k, calibration score."""

    def __post_init__(self) -> None:
        if not self.edits:
            raise PlotError(f"A handle for '{self.variable}' needs at least one edit (gains may be zero).")

    @property
    def size(self) -> int:
        """Number of directions with a nonzero gain."""
        return sum(e.size for e in self.edits)

    @property
    def places(self) -> list[str]:
        """Names of the places it edits."""
        return [e.place.name for e in self.edits]

    def batch(self) -> list[EditBatch]:
        """The handle as a single variant."""
        return [EditBatch(e.place, e.frame, e.gains.unsqueeze(0)) for e in self.edits]

    # -- use ---------------------------------------------------------------------------------------------

    def apply(self, subject: Subject, base: Tensor, source: Tensor) -> Float[Tensor, "pairs ..."]:
        """The network's outputs for the base inputs with this variable taken from the source inputs."""
        self.require(subject)
        [recording] = record_pairs(subject, (base, source))
        return respond(recording, self.batch())[0]

    @contextlib.contextmanager
    def on(self, subject: Subject, source: Tensor) -> Iterator[None]:
        """While open, every forward pass of the live model takes this variable from the clean run of `source`.

        The model must be called with as many rows as `source` has.
        """
        self.require(subject)
        store = subject.record(source)

        def rewrite(batch: EditBatch, clean: Tensor) -> Callable[[Tensor], Tensor]:
            def edit(a: Tensor) -> Tensor:
                if len(a) != len(clean):
                    raise PlotError(
                        f"The handle was opened with {len(clean)} source rows, but the model is called with {len(a)}."
                    )
                return batch.apply(a.unsqueeze(0), clean)[0]

            return edit

        rewrites = {}
        for e in self.edits:
            subject.require(e.place)
            clean = store.activations[e.place.name]
            gains = e.gains.to(clean.device, clean.dtype).unsqueeze(0)
            batch = EditBatch(e.place, e.frame.to(clean.device, clean.dtype), gains)
            rewrites[e.place.name] = rewrite(batch, clean)
        with subject.intervene(rewrites):
            yield

    def require(self, subject: Subject) -> None:
        """Refuse a network that is not the one this handle was made for."""
        found = subject.identity()
        if found != self.subject:
            raise PlotError(
                f"This handle for '{self.variable}' belongs to network {self.subject}, not to {found}. "
                f"Load the weights it was made with, or localize the variable again in this network."
            )

    # -- files -------------------------------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the handle: tensors and a description, in one safetensors file."""
        tensors: dict[str, Tensor] = {}
        described = []
        for k, e in enumerate(self.edits):
            parts = {"gains": e.gains, "read": e.frame.read, "write": e.frame.write}
            parts |= {part: getattr(e.frame.encoder, part, None) for part in ENCODER_PARTS}
            for part, tensor in parts.items():
                if tensor is not None:
                    tensors[f"{k}.{part}"] = tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
            place = {
                "name": e.place.name,
                "width": e.place.width,
                "layer": e.place.layer,
                "position": e.place.position,
            }
            described.append({"place": place, "frame": e.frame.kind})
            if e.frame.encoder is not None:
                described[-1]["encoder"] = {"k": e.frame.encoder.k}
        header = {
            "format": ENCODED_FORMAT if any("encoder" in d for d in described) else FORMAT,
            "version": __version__,
            "variable": self.variable,
            "subject": self.subject,
            "edits": described,
            "chosen": dict(self.chosen),
        }
        write_atomically(Path(path), save(tensors, metadata={"plot_ot": to_json(header)}))

    @classmethod
    def load(cls, path: str | os.PathLike[str], subject: Subject | None = None) -> Handle:
        """Read a handle; with a `subject`, refuse one that belongs to another network."""
        try:
            with safe_open(str(path), framework="pt") as file:
                header = json.loads((file.metadata() or {})["plot_ot"])
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            if header["format"] not in (FORMAT, ENCODED_FORMAT):
                known = f"{FORMAT!r} and {ENCODED_FORMAT!r}"
                raise PlotError(f"{path} has format {header['format']!r}; this version reads {known}.")
            edits = [_read_edit(k, described, tensors) for k, described in enumerate(header["edits"])]
            handle = cls(str(header["variable"]), tuple(edits), str(header["subject"]), dict(header["chosen"]))
        except FileNotFoundError:
            raise PlotError(f"There is no handle file at {path}.") from None
        except (SafetensorError, KeyError, TypeError, ValueError, AttributeError, OSError) as e:
            raise PlotError(f"{path} is not a readable plot-ot handle ({type(e).__name__}: {e}). Save it again.") from e
        if subject is not None:
            handle.require(subject)
        return handle


def _read_edit(k: int, described: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Edit:
    at = described["place"]
    place = Place(str(at["name"]), int(at["width"]), int(at["layer"]), at["position"])
    frame = Frame(place.width, tensors.get(f"{k}.read"), tensors.get(f"{k}.write"), str(described["frame"]))
    if any(t is not None and not torch.isfinite(t).all() for t in (frame.read, frame.write, tensors[f"{k}.gains"])):
        raise ValueError("NaN or infinity in its tensors")
    for part in (frame.read, frame.write):
        if part is not None and (part.ndim != 2 or part.shape[0] != place.width or part.shape[1] != frame.rank):
            raise ValueError(f"a frame of shape {tuple(part.shape)} at a place of width {place.width}")
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


def handle_from_edits(
    variable: str, edits: Sequence[EditBatch], variant: int, subject: Subject, chosen: Mapping[str, Any]
) -> Handle:
    """One variant of a batch as a handle; places it does not touch are left out."""
    order = {p.name: k for k, p in enumerate(subject.places)}
    ones = [e.select(torch.tensor([variant])) for e in sorted(edits, key=lambda e: order[e.place.name])]
    touching = [e for e in ones if bool((e.gains != 0).any())]
    kept = []
    for one in touching or ones[:1]:  # a handle that touches nothing still says where
        read, write = one.frame.read, one.frame.write
        read = read[0] if read is not None and read.ndim == 3 else read
        write = write[0] if write is not None and write.ndim == 3 else write
        frame, gains = replace(one.frame, read=read, write=write), one.gains[0]
        if frame.encoder is not None:  # a dictionary is large: keep the features that are used
            used = (gains != 0).nonzero().squeeze(1) if bool(gains.any()) else torch.tensor([0])
            frame, gains = frame.only(used.to(gains.device)), gains[used]
        kept.append(Edit(one.place, frame, gains))
    return Handle(variable, tuple(kept), subject.identity(), chosen)
