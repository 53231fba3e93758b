"""A handle: edits that together control one variable, on inputs or on a live model."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from plot_ot.abstract.banks import first_of_each
from plot_ot.edits import EditBatch, respond
from plot_ot.errors import PlotError, unknown
from plot_ot.files.hub import download, upload
from plot_ot.files.writing import write_atomically
from plot_ot.handles.edit import Edit
from plot_ot.handles.sharing import HANDLE_FILE, MOST_SHARED, CardVerdict, handle_card, require_verdict, shareable
from plot_ot.handles.storing import Stored, Value, as_value, handle_bytes, read_handle
from plot_ot.subjects import BankRecording, Subject, record_pairs
from plot_ot.subjects.decoder.bare import token_rows, token_subject
from plot_ot.subjects.open_edits import Rewrites, apart, proven
from plot_ot.subjects.protocol import require_subject


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

    def describe(self) -> str:
        """The handle in words, a line for each place: what it takes there and how strongly; then how it was chosen."""
        lines = [f"{self.variable}: {self.size} direction{'' if self.size == 1 else 's'} in network {self.subject}"]
        lines += [f"  {edit.describe()}" for edit in self.edits]
        if self.values:
            lines.append(f"  can be set to {', '.join(str(v) for v in self.values)}")
        simple = {k: v for k, v in self.chosen.items() if isinstance(v, (str, int, float)) and not isinstance(v, bool)}
        told = [f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in simple.items()]
        return "\n".join(lines + ([f"  chosen: {', '.join(told)}"] if told else []))

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
            a = recording.source_at(e.place)[once]
            c = e.frame.to(a.device, a.dtype).coordinates(a).cpu()
            means.append([c[which == j].mean(dim=0) for j in range(len(distinct))])
        values = {as_value(v): tuple(m[j] for m in means) for j, v in enumerate(distinct.tolist())}
        return replace(self, values=values)

    def set(self, value: Value) -> Setting:
        """do(Z = value), where no source is at hand: `handle.set(value).apply(subject, base)`, or `.on(model)`."""
        if not self.values:
            raise PlotError(
                f"This handle for '{self.variable}' knows no values: call `handle.with_values(recording)` with a "
                f"recorded bank first. (A variable that takes too many values there has none.)"
            )
        value = as_value(value)
        if value not in self.values:
            if isinstance(value, str) and value in map(str, self.values):
                raise PlotError(f"The values of '{self.variable}' are no text: write {value} without quotes.")
            unknown(f"value of '{self.variable}'", str(value), [str(v) for v in self.values])
        return Setting(self, value)

    def require(self, subject: Subject) -> None:
        """Refuse a network that is not the one this handle was made for."""
        require_subject(subject)
        found = subject.identity()
        if found != self.subject:
            raise PlotError(
                f"This handle for '{self.variable}' belongs to network {self.subject}, not to {found}. "
                f"Load the weights it was made with, or localize the variable again in this network."
            )

    # -- files -------------------------------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the handle: tensors and a description, in one safetensors file."""
        write_atomically(Path(path), handle_bytes(self._stored()))

    @classmethod
    def load(cls, path: str | os.PathLike[str], subject: Subject | None = None) -> Handle:
        """Read a handle; with a `subject`, refuse one that belongs to another network."""
        return cls._from(read_handle(path), subject)

    def push_to_hub(
        self,
        repo_id: str,
        *,
        model: str | None = None,
        verdict: CardVerdict | None = None,
        private: bool = False,
        token: str | None = None,
    ) -> str:
        """Share the handle on the Hugging Face hub as `handle.safetensors` beside a model card; gives its address.

        `model` is what others load the network by (a hub id), `verdict` what the tests said: `result.verdicts[name]`.
        The card says what the handle is, where it was found, its controls and verdict, and how to use it. Nothing that
        is shared names a folder of this machine. `token` is by default the one that you are logged in with.
        """
        require_verdict(self.variable, verdict)
        shared = replace(self, chosen=shareable(self.chosen))
        card = handle_card(shared._stored(), repo_id, self.describe(), model, verdict)
        files = {HANDLE_FILE: handle_bytes(shared._stored()), "README.md": card.encode()}
        return upload(repo_id, files, f"The handle for {self.variable}", private=private, token=token)

    @classmethod
    def from_hub(
        cls,
        repo_id: str,
        subject: Subject | None = None,
        *,
        revision: str | None = None,
        token: str | None = None,
    ) -> Handle:
        """The handle that someone shared on the hub; with a `subject`, refuse one that belongs to another network.

        Only the safetensors file is fetched and read, never code. Name a `revision` (a commit) to be sure of what you
        get later.
        """
        path = download(repo_id, HANDLE_FILE, revision=revision, token=token)
        return cls._from(read_handle(path, MOST_SHARED), subject)

    def _stored(self) -> Stored:
        return Stored(self.variable, self.edits, self.subject, self.chosen, self.values)

    @classmethod
    def _from(cls, stored: Stored, subject: Subject | None) -> Handle:
        handle = cls(stored.variable, stored.edits, stored.subject, stored.chosen, stored.values)
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
    rules = {name: rule for e in kept for name, rule in subject.rules_of(e.place).items()}
    chosen = {**chosen, "rules": rules} if rules else chosen
    return Handle(variable, tuple(kept), subject.identity(), chosen)
