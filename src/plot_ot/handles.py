"""Handles: executable interventions for one variable, applied to inputs or a live model, saved as safetensors."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from safetensors.torch import save
from torch import Tensor, nn

from plot_ot.abstract.banks import first_of_each
from plot_ot.edits import EditBatch, Frame, respond
from plot_ot.edits.encoder import Encoder
from plot_ot.errors import PlotError, unknown
from plot_ot.files.safe_reading import UNREADABLE, parse_json, read_tensors
from plot_ot.files.writing import to_json, write_atomically
from plot_ot.subjects import BankRecording, Place, Subject, record_pairs
from plot_ot.subjects.decoder.bare import token_rows, token_subject
from plot_ot.subjects.open_edits import Rewrites, apart, proven
from plot_ot.version import __version__

FORMAT = "plot-ot handle 1"
ENCODED_FORMAT = "plot-ot handle 2"
"""The format of handles that read through an encoder; an earlier version of the library refuses such a file."""
ENCODER_PARTS = ("bias", "features", "threshold", "rivals", "rival_bias")

Value = bool | int | float | str | tuple["Value", ...]
"""A value of a variable."""


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

    @classmethod
    def at_every_token(cls, place: Place, frame: Frame, gains: Float[Tensor, " r"]) -> Edit:
        """The edit of one token's vector, made at each token of a place at all tokens (`...@all`)."""
        tokens, left = divmod(place.width, frame.width)
        if left or frame.encoder is not None:
            what = f"of width {frame.width}" if left else "with an encoder"
            raise PlotError(f"A frame {what} cannot be repeated over {place.name} of width {place.width}.")
        read, write = (None if t is None else torch.block_diag(*[t] * tokens) for t in (frame.read, frame.write))
        return cls(place, Frame(place.width, read, write, frame.kind), gains.repeat(tokens))

    def swapping(self, source: Float[Tensor, "rows d"]) -> Callable[[Tensor], Tensor]:
        """Rewrites activations [rows, d] towards those of the sources, row by row (or of one source)."""
        gains = self.gains.to(source.device, source.dtype).unsqueeze(0)
        batch = EditBatch(self.place, self.frame.to(source.device, source.dtype), gains)

        def edit(a: Float[Tensor, "rows d"]) -> Float[Tensor, "rows d"]:
            if len(source) not in (1, len(a)):
                raise PlotError(
                    f"The handle was opened with {len(source)} source rows, but the model is called with {len(a)}."
                )
            return batch.apply(a.unsqueeze(0), source.expand(len(a), -1))[0]

        return edit

    def setting(self, target: Float[Tensor, " r"]) -> Callable[[Tensor], Tensor]:
        """Rewrites activations [..., d] towards fixed coordinates: a + W (g * (target - Rᵀ a))."""

        def edit(a: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
            frame, gains, wanted = self.frame.to(a.device, a.dtype), self.gains.to(a), target.to(a)
            return a + frame.lift(gains * (wanted - frame.coordinates(a)))

        return edit


@dataclass(frozen=True)
class Handle:
    """Edits in forward order that together swap one variable from a source into a base run."""

    variable: str
    edits: tuple[Edit, ...]
    subject: str
    """Identity of the network it belongs to."""
    chosen: Mapping[str, Any] = field(default_factory=dict)
    """How it was chosen: method, K, λ, ε, layer, k, calibration score."""
    values: Mapping[Value, tuple[Float[Tensor, " r"], ...]] = field(default_factory=dict)
    """What stands for a source that has a value: its mean coordinates in every edit's frame; see `with_values`."""

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
        with apart():
            [recording] = record_pairs(subject, (base, source))
            return respond(recording, self.batch())[0]

    def on(
        self,
        network: Subject | nn.Module,
        source: Tensor | Mapping[str, Tensor],
        *,
        base: Tensor | None = None,
        every_token: bool = False,
    ) -> contextlib.AbstractContextManager[None]:
        """While open, every prompt or input of the live model takes this variable from the clean run of `source`.

        The model must be called with as many rows as `source` has, or `source` is one row for all. On a language model
        also `generate` works: the edit acts on the prompt, at the tokens of the handle's places, and what is generated
        follows from it; with `every_token` it acts on every generated token as well. Beams and return sequences share
        their prompt's source. `base` are the input rows of the prompts, for places at named positions.

        `network` is a subject, or a Hugging Face model; then `source` are token ids or what a tokenizer returns.
        """
        subject, source = _subject_and_rows(network, source, self.places)
        self.require(subject)
        if base is not None and len(source) not in (1, len(base)):
            raise PlotError(f"{len(source)} source rows for {len(base)} `base` rows: give one source per base, or one.")
        with apart():
            store = subject.record(source, torch.zeros(0, dtype=torch.long))  # sources are never resumed
        rewrites = {}
        for e in self.edits:
            subject.require(e.place)
            rewrites[e.place.name] = e.swapping(store.activations[e.place.name])
        rows = None if len(source) == 1 else len(source)
        return _live(subject, rewrites, rows, base, every_token)

    # -- values ------------------------------------------------------------------------------------------

    def with_values(self, recording: BankRecording, most: int = 64) -> Handle:
        """The handle with a stand-in for sources of every value of its variable, so that it can be `set`.

        Over the recorded sources that have a value, the mean of the coordinates that the handle reads. A variable that
        takes more than `most` values gets none.
        """
        self.require(recording.subject)
        bank = recording.bank
        bank.causal.require(self.variable)
        once = first_of_each(torch.unique(recording.source_rows.cpu(), return_inverse=True)[1])
        value = bank.causal.run(bank.source[once.to(bank.source.device)])[self.variable]
        distinct, which = torch.unique(value.cpu(), dim=0, return_inverse=True)
        if len(distinct) > most:
            return self
        means = []
        for e in self.edits:
            a = recording.source_at(e.place)[once.to(recording.source_rows.device)]
            c = e.frame.to(a.device, a.dtype).coordinates(a).cpu()
            means.append([c[which == j].mean(dim=0) for j in range(len(distinct))])
        values = {_label(v): tuple(m[j] for m in means) for j, v in enumerate(distinct.tolist())}
        return replace(self, values=values)

    def set(self, value: Value) -> Setting:
        """do(Z = value), where no source is at hand: `handle.set(value).apply(subject, base)`, or `.on(model)`."""
        if not self.values:
            raise PlotError(
                f"This handle for '{self.variable}' knows no values: call `handle.with_values(recording)` with a "
                f"recorded bank first. (A variable that takes too many values there has none.)"
            )
        value = _label(value)
        if value not in self.values:
            unknown(f"value of '{self.variable}'", str(value), [str(v) for v in self.values])
        return Setting(self, value)

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
        header: dict[str, Any] = {
            "format": ENCODED_FORMAT if any("encoder" in d for d in described) else FORMAT,
            "version": __version__,
            "variable": self.variable,
            "subject": self.subject,
            "edits": described,
            "chosen": dict(self.chosen),
        }
        for j, coordinates in enumerate(self.values.values()):
            for k, c in enumerate(coordinates):
                tensors[f"value.{j}.{k}"] = c.detach().cpu().clone(memory_format=torch.contiguous_format)
        if self.values:
            header["values"] = list(self.values)
        write_atomically(Path(path), save(tensors, metadata={"plot_ot": to_json(header)}))

    @classmethod
    def load(cls, path: str | os.PathLike[str], subject: Subject | None = None) -> Handle:
        """Read a handle; with a `subject`, refuse one that belongs to another network."""
        try:
            metadata, tensors = read_tensors(path)
            header = parse_json(metadata["plot_ot"])
            if header["format"] not in (FORMAT, ENCODED_FORMAT):
                known = f"{FORMAT!r} and {ENCODED_FORMAT!r}"
                raise PlotError(f"{path} has format {header['format']!r}; this version reads {known}.")
            edits = [_read_edit(k, described, tensors) for k, described in enumerate(header["edits"])]
            values = {
                _read_label(v): tuple(_read_value(j, k, e, tensors) for k, e in enumerate(edits))
                for j, v in enumerate(header.get("values", ()))
            }
            handle = cls(str(header["variable"]), tuple(edits), str(header["subject"]), dict(header["chosen"]), values)
        except FileNotFoundError:
            raise PlotError(f"There is no handle file at {path}.") from None
        except UNREADABLE as e:
            raise PlotError(f"{path} is not a readable plot-ot handle ({type(e).__name__}: {e}). Save it again.") from e
        if subject is not None:
            handle.require(subject)
        return handle


@dataclass(frozen=True)
class Setting:
    """A handle with one value of its variable in the place of a source: do(Z = value)."""

    handle: Handle
    value: Value

    def apply(self, subject: Subject, base: Tensor) -> Float[Tensor, "rows ..."]:
        """The network's outputs for the base inputs with the variable set to the value."""
        self.handle.require(subject)
        (start, first), *later = self._changes(subject).items()
        place = subject.place(start)

        def outputs(rows: Tensor) -> Tensor:
            edited = first(recording.store.activations[start][rows].unsqueeze(0))
            return subject.resume(recording.store, rows, place, edited, dict(later))[0]

        with torch.no_grad(), apart():
            [recording] = record_pairs(subject, (base, base))
            chunks = recording.base_rows.split(subject.responses_per_batch)
            return torch.cat([piece for rows in chunks for piece in subject.limits.pieces(outputs, rows, "response")])

    def on(
        self, network: Subject | nn.Module, *, base: Tensor | None = None, every_token: bool = False
    ) -> contextlib.AbstractContextManager[None]:
        """While open, the live model runs with the variable set to the value; options as in `Handle.on`."""
        subject, _ = _subject_and_rows(network, torch.zeros(1, 1, dtype=torch.long), self.handle.places)
        self.handle.require(subject)
        return _live(subject, self._changes(subject), None, base, every_token)

    def _changes(self, subject: Subject) -> dict[str, Callable[[Tensor], Tensor]]:
        """What happens at each place, in forward order."""
        order = {p.name: k for k, p in enumerate(subject.places)}
        edits = sorted(
            zip(self.handle.edits, self.handle.values[self.value], strict=True),
            key=lambda pair: order[pair[0].place.name],
        )
        for e, _ in edits:
            subject.require(e.place)
        return {e.place.name: e.setting(target) for e, target in edits}


def _live(
    subject: Subject, rewrites: Rewrites, rows: int | None, base: Tensor | None, every_token: bool
) -> contextlib.AbstractContextManager[None]:
    """The rewrites on the live network, refused at the end where they never happened."""
    return proven(rewrites, lambda noted: subject.live(noted, rows=rows, base=base, every_token=every_token))


def _label(value: Any) -> Value:
    """A value of a variable as it can be looked up and written to a file."""
    if isinstance(value, Tensor):
        value = value.tolist()
    if isinstance(value, (list, tuple)):
        return tuple(_label(v) for v in value)
    if not isinstance(value, (bool, int, float, str)):
        raise PlotError(f"A variable's value is a number, a truth value, a string or a tuple of them; found {value!r}.")
    return value


def _subject_and_rows(
    network: Subject | nn.Module, given: Tensor | Mapping[str, Tensor], places: Sequence[str]
) -> tuple[Subject, Tensor]:
    """A subject and its input rows; of a bare language model, token ids are the rows."""
    if isinstance(network, Subject):
        if not isinstance(given, Tensor):
            raise PlotError(
                f"With a subject, `source` are its input rows (a tensor); found {type(given).__name__}. What a "
                f"tokenizer returns goes with the model itself."
            )
        return network, given
    return token_subject(network, places), token_rows(given)


def _read_label(value: Any) -> Value:
    try:
        return _label(value)
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
