"""What the engine asks of a network: places in forward order, a recording, and a way to resume at an edit."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from plot_ot.abstract.banks import Bank, first_of_each, row_codes
from plot_ot.errors import PlotError, unknown
from plot_ot.finite import refuse_non_finite
from plot_ot.subjects.memory import MemoryLimits, sent
from plot_ot.subjects.open_edits import OpenEdit, Rewrites, held
from plot_ot.subjects.places import ARROW, Place
from plot_ot.subjects.shape import Shape

PairIndex = slice | Int[Tensor, " chosen"]
"""Some of a recording's pairs."""
Rewrite = Callable[[Float[Tensor, "variants pairs d"]], Float[Tensor, "variants pairs d"]]
"""What happens to the current activation at a later place."""


@dataclass(frozen=True)
class Store:
    """What a subject keeps of every distinct input after one pass."""

    inputs: Tensor
    activations: Mapping[str, Float[Tensor, "inputs d"]]
    outputs: Float[Tensor, "inputs ..."]

    @cached_property
    def codes(self) -> dict[str, Int[Tensor, " inputs"]]:
        """Which inputs have equal states at a place, for those who asked once."""
        return {}

    @property
    def prefixes(self) -> Sequence[Any]:
        """What resuming needs besides and only its recorder has, such as keys and values; most need nothing."""
        return ()

    def with_prefixes(self, prefixes: Sequence[Any]) -> Store:
        """The store with what resuming needs to be had from elsewhere, where it needs anything."""
        return self


class Share(NamedTuple):
    """Which part some inputs are of all that are recorded for one purpose, and their bases of all bases."""

    inputs: float = 1.0
    bases: float = 1.0


class Subject(ABC):
    """A network 𝔑 that can be recorded once and resumed at an edited activation."""

    places: tuple[Place, ...]

    @property
    def recorded(self) -> tuple[Place, ...]:
        """The places whose activations are kept: all, unless some are others seen again."""
        return self.places

    def place(self, name: str) -> Place:
        """The place of that name."""
        for place in self.places:
            if place.name == name:
                return place
        if ARROW in name:
            raise PlotError(
                f"'{name}' is a path, which this subject does not look along. Make one that does: "
                f"plot_ot.along(subject, ['{name}']), with the same `around` if there was one."
            )
        unknown("place", name, [p.name for p in self.places])

    def reaches(self, sender: Place, receiver: Place) -> bool:
        """Whether what happens at one place can arrive at the other, as far as their order tells."""
        return self.places.index(sender) < self.places.index(receiver)

    def looked_at(self, place: Place) -> tuple[str, ...]:
        """The names of the recorded activations that an edit of a place looks at."""
        return (place.name,)

    def rules_of(self, place: Place) -> Mapping[str, Any]:
        """The rules by which a place is found in each input, as plain values: a handle is saved with them."""
        return {}

    def require(self, place: Place) -> None:
        """Refuse a place that is not one of this subject's: another width or position is another vector."""
        own = self.place(place.name)
        if (own.width, own.position) != (place.width, place.position):
            raise PlotError(
                f"Place {place.name} has width {own.width} and position {own.position} in this subject, not "
                f"width {place.width} and position {place.position}."
            )

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Where the network's weights are."""

    @abstractmethod
    def record(self, inputs: Tensor, bases: Int[Tensor, " bases"] | None = None) -> Store:
        """Run every input once; keep the outputs and the activation at every place.

        Only the rows `bases` (all by default) will be resumed, mostly in this order: a subject may keep less of others.
        """

    def outputs_of(self, store: Store) -> Float[Tensor, "inputs ..."]:
        """The recorded outputs, read out as this subject reads out what it resumes."""
        return store.outputs

    @abstractmethod
    def resume(
        self,
        store: Store,
        rows: Int[Tensor, " pairs"],
        start: Place,
        activation: Float[Tensor, "variants pairs d"],
        later: Mapping[str, Rewrite],
    ) -> Float[Tensor, "variants pairs ..."]:
        """Outputs of base inputs `rows` when the activation at `start` is replaced, one result per variant and pair,
        and each later place named in `later` is rewritten as the pass reaches it."""

    @abstractmethod
    def intervene(self, rewrites: Rewrites) -> contextlib.AbstractContextManager[OpenEdit]:
        """While open, the live network's own forward pass rewrites the activations [rows, d] at these places."""

    def live(
        self,
        rewrites: Rewrites,
        *,
        rows: int | None = None,
        base: Tensor | None = None,
        every_token: bool = False,
    ) -> contextlib.AbstractContextManager[OpenEdit]:
        """`intervene` as handles use it: `rows` inputs, each with its own source, which are the input rows `base`.

        Both matter only to subjects whose places are elsewhere in every input, `every_token` to those that generate.
        """
        if every_token:
            raise PlotError(f"`every_token` is for models that generate text; {type(self).__name__} does not.")
        return self.intervene(rewrites)

    @abstractmethod
    def weights(self) -> Mapping[str, Tensor]:
        """The tensors that make this network what it is."""

    language: bool = False
    """Whether its inputs are prompts, and its answers words."""

    @property
    def beginnings(self) -> tuple[int, ...]:
        """Every input is run once for each of these, with so many tokens of an answer behind it."""
        return (0,)

    whole_passes: bool = False
    """Whether prompts are run whole for every response, and nothing that they share is run once."""
    differentiable: bool = True
    """Whether gradients flow through a resumed pass; methods that need them pass over a network without."""
    memory: int = 512 << 20
    """Bytes that the activations of one resumed batch may take."""
    cache: int | None = None
    """Bytes of fast memory a batch on the CPU should fit in; None where that does not matter."""

    @property
    def response_bytes(self) -> int:
        """Bytes of activations that one resumed response keeps alive: two of the widest place, in float32."""
        return 2 * 4 * max(p.width for p in self.places)

    @property
    def responses_per_batch(self) -> int:
        """How many (variant, pair) responses one resumed batch holds within the budget."""
        budget = min(self.memory, self.cache) if self.cache and self.device.type == "cpu" else self.memory
        return max(1, budget // self.response_bytes)

    @cached_property
    def limits(self) -> MemoryLimits:
        """What running out of memory has shown about this subject; a copy of it shares it."""
        return MemoryLimits()

    def record_in_chunks(self, inputs: Tensor, run: Callable[[Tensor], Store]) -> Store:
        """`run` over all inputs, as many at a time as one batch holds, or fewer where these do not fit into memory."""
        chunks = inputs.split(self.responses_per_batch)
        pieces = [piece for chunk in chunks for piece in self.limits.pieces(run, chunk)]
        activations = {p.name: torch.cat([piece.activations[p.name] for piece in pieces]) for p in self.places}
        return Store(inputs, activations, torch.cat([piece.outputs for piece in pieces]))

    # -- what it costs: the engine cuts its work by these numbers, and the planner predicts it by them -------------

    @property
    def parameters(self) -> int:
        """How many numbers the weights are, tied ones counted once."""
        return max(1, sum(t.numel() for t in self.weights().values()))

    def shape(self, outputs: int) -> Shape:
        """What a response costs after each place, with so many outputs; by default it is always a whole pass."""
        n = len(self.places)
        return Shape.small(type(self).__name__, self.places, (n,) * n, n, self.parameters, outputs)

    def encoded(self, inputs: Tensor) -> tuple[Int[Tensor, "rows tokens"], Bool[Tensor, "rows tokens"]] | None:
        """Token ids of inputs that are prompts, padded on the left, and where they are no padding; else None."""
        return None

    def lengths(self, inputs: Tensor) -> Int[Tensor, " rows"]:
        """How many tokens each input has; one where inputs are not text."""
        return torch.ones(len(inputs), dtype=torch.long)

    def tails(self, place: Place, inputs: Tensor) -> Int[Tensor, " rows"]:
        """How many of each input's tokens, from its end, an edit at a place runs again; one where there is no text."""
        return torch.ones(len(inputs), dtype=torch.long)

    def tokens_at(self, place: Place) -> int:
        """How many tokens, one after the other, a place holds."""
        return 1

    def recorded_at_once(self, device: str) -> int:
        """Tokens of one recorded batch on a device of this type."""
        return self.responses_per_batch

    def resumed_at_once(self, device: str) -> int:
        """Tokens that are resumed together on a device of this type."""
        return self.responses_per_batch

    def pairs_at_once(self, prefix_bytes: float) -> float:
        """Pairs of a resumed batch, each of which needs so many bytes of keys and values; without end for none."""
        return math.inf

    def recomputes(self, graph_bytes: float) -> bool:
        """Whether a graph of so many bytes is thrown away and computed again on the way back."""
        return False

    @property
    def vectors_in_memory(self) -> int | None:
        """Bytes of recorded vectors that are held in memory, where more go to a file; None where all are held."""
        return None

    def keys_in_memory(self, beside: float) -> float:
        """Bytes of keys and values that are held in memory beside so many of vectors, where more go to a file."""
        return math.inf

    # -- recording in parts: subjects that keep more of their inputs than vectors override these --------------------

    recorder_resumes: bool = False
    """Whether resuming an input needs what only its recorder has (`Store.prefixes`)."""
    reading: str | None = None
    """The name of the read-out, of subjects that have several."""

    def record_part(self, inputs: Tensor, bases: Int[Tensor, " bases"], share: Share) -> Store:
        """`record` for inputs that are a part of all that will be recorded together."""
        return self.record(inputs, bases)

    def forget(self) -> None:  # noqa: B027 (most subjects keep nothing)
        """Let go of what was kept while parts were recorded: all of them are."""

    def read_as(self, reading: str | None) -> Subject:
        """The same subject with the read-out of that name."""
        return self

    def structure(self) -> str:
        """What else makes this network what it is: networks of the same weights may compute different things."""
        return ""

    def reinitialised(self, generator: torch.Generator) -> Subject:
        """A network of the same shape with fresh weights: every matrix drawn anew, at the scale that it has."""
        fresh = copy.deepcopy(self)
        with torch.no_grad():
            for weight in fresh.weights().values():
                if weight.is_floating_point() and weight.ndim >= 2:
                    noise = torch.randn(weight.shape, generator=generator, dtype=torch.float32).to(weight)
                    weight.copy_(noise * weight.float().square().mean().sqrt().to(weight))
        return fresh

    def identity(self) -> str:
        """A digest of structure and weights: a handle belongs to one network."""
        digest = hashlib.sha256(self.structure().encode())
        weights = self.weights()
        for name in sorted(weights):
            tensor = weights[name]
            digest.update(f"{name}:{tuple(tensor.shape)}:{tensor.dtype}".encode())
            digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
        return digest.hexdigest()[:16]


@dataclass(frozen=True)
class Recording:
    """T base/source pairs over a subject's store: clean activations of both sides at every place.

    Which inputs they are is said on the CPU, where pairs are sorted and cut, wherever the activations are: a GPU is
    sent small indices, and never waited for to know what comes next.
    """

    subject: Subject
    store: Store
    base_rows: Int[Tensor, " pairs"]
    source_rows: Int[Tensor, " pairs"]

    def __len__(self) -> int:
        return len(self.base_rows)

    def base_at(self, place: Place) -> Float[Tensor, "pairs d"]:
        """Clean base activations."""
        return _taken(self.store.activations[place.name], self.base_rows)

    def source_at(self, place: Place) -> Float[Tensor, "pairs d"]:
        """Clean source activations."""
        return _taken(self.store.activations[place.name], self.source_rows)

    @property
    def base_outputs(self) -> Float[Tensor, "pairs ..."]:
        """𝔑(x^b)."""
        return _taken(self.subject.outputs_of(self.store), self.base_rows)

    @property
    def source_outputs(self) -> Float[Tensor, "pairs ..."]:
        """𝔑(x^s)."""
        return _taken(self.subject.outputs_of(self.store), self.source_rows)


def _taken(numbers: Tensor, rows: Int[Tensor, " pairs"]) -> Tensor:
    return numbers[sent(rows, numbers.device)]


@dataclass(frozen=True)
class BankRecording(Recording):
    """The recording of a bank: the same pairs with their labels."""

    bank: Bank

    def select(self, pairs: Tensor, name: str | None = None) -> BankRecording:
        """The recording of some of the pairs (mask or indices); nothing is run again."""
        index = pairs.nonzero().squeeze(1) if pairs.dtype == torch.bool else pairs
        rows = index.cpu()
        bank = self.bank.select(index, name)
        return BankRecording(self.subject, self.store, self.base_rows[rows], self.source_rows[rows], bank)


def require_subject(network: object) -> None:
    """Refuse what is no subject: a bare module, a name, a language model without its hypothesis."""
    if not isinstance(network, Subject):
        raise PlotError(
            f"Expected a subject, the network as plot_ot.load_subject(model, hypothesis) makes it; found "
            f"{type(network).__name__}. On a live language model use `handle.on(model, source)`."
        )


def record(subject: Subject, *banks: Bank) -> list[BankRecording]:
    """Record several banks with one pass per distinct input over all of them."""
    recordings = record_pairs(subject, *((bank.base, bank.source) for bank in banks))
    return [
        BankRecording(subject, r.store, r.base_rows, r.source_rows, bank)
        for r, bank in zip(recordings, banks, strict=True)
    ]


def record_pairs(subject: Subject, *pairs: tuple[Tensor, Tensor]) -> list[Recording]:
    """Record lists of (base, source) inputs with one pass per distinct input over all of them."""
    require_subject(subject)
    for base, source in pairs:
        if strange := [x for x in (base, source) if not isinstance(x, Tensor) or x.ndim < 2]:
            shape = f"shape {tuple(strange[0].shape)}" if isinstance(strange[0], Tensor) else type(strange[0]).__name__
            raise PlotError(f"Base and source inputs are rows, tensors of shape [rows, inputs]; found {shape}.")
        if len(base) != len(source) or not len(base):
            raise PlotError(f"Base and source inputs must pair up: found {len(base)} bases, {len(source)} sources.")
    distinct, rows = _distinct(torch.cat([x for pair in pairs for x in pair]))
    is_base = torch.cat([torch.arange(2 * len(base)) < len(base) for base, _ in pairs])
    in_order = list(dict.fromkeys(rows.cpu()[is_base].tolist()))  # each once, where it is first used
    store = subject.record(distinct, torch.tensor(in_order))
    require_finite(store)
    recordings, at = [], 0
    rows = rows.cpu()
    for base, _ in pairs:
        middle, end = at + len(base), at + 2 * len(base)
        recordings.append(Recording(subject, store, rows[at:middle], rows[middle:end]))
        at = end
    return recordings


def _distinct(rows: Tensor) -> tuple[Tensor, Int[Tensor, " rows"]]:
    """The distinct rows in rising order, and where each row stands among them."""
    code = row_codes(rows)
    found = rows[first_of_each(code)]
    order = torch.from_numpy(np.lexsort(found.flatten(1).T.flip(0).cpu().numpy()))
    rank = torch.empty_like(order).scatter_(0, order, torch.arange(len(order)))
    return found[order.to(rows.device)], rank.to(rows.device)[code]


def require_finite(store: Store) -> None:
    """Refuse a recording with NaN or infinity, and say at which place, for which input."""
    for name, activation in chain(store.activations.items(), [("the output", store.outputs)]):  # one place at a time

        def message(bad: Tensor, name: str = name) -> str:
            rows = bad.flatten(1).any(dim=1)
            first = store.inputs[int(rows.nonzero()[0])].tolist()
            return (
                f"The network gives NaN or infinity at {name} for input {first} "
                f"({int(rows.sum())} of {len(rows)} inputs). Check the weights and the input encoding."
            )

        refuse_non_finite(activation, message)


@contextlib.contextmanager
def frozen(module: torch.nn.Module) -> Iterator[None]:
    """Evaluation mode and no gradients into the weights, put back as found afterwards."""
    with held(module):
        modes = {m: m.training for m in module.modules()}
        wanted = {p: p.requires_grad for p in module.parameters()}
        module.eval().requires_grad_(False)
        try:
            yield
        finally:
            for m, training in modes.items():
                m.training = training
            for p, grad in wanted.items():
                p.requires_grad_(grad)
