"""A Ray worker: an actor that holds a replica of the network, and what it is told and answers."""

from __future__ import annotations

import os
import uuid
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from plot_ot.engine.stores import Elsewhere, record_shard, to_device, without_caches
from plot_ot.errors import PlotError
from plot_ot.subjects import BankRecording, Store, Subject
from plot_ot.version import library_versions

OPENED = 4
"""Parts of recordings that a worker keeps at hand: units of one part follow each other."""
RECORDINGS = 2
"""Recordings of which a worker keeps its shards: a study has one of its banks, and one of banks to transfer to."""

K = TypeVar("K")
V = TypeVar("V")


def library(loopback: bool = False) -> Any:
    """Ray, without its usage statistics; on `loopback`, with all it starts bound to 127.0.0.1 only."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if loopback:  # read when Ray is first imported; else it takes this machine's outside address for its own
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    try:
        import ray
    except ImportError as e:
        raise PlotError("The engine 'ray' needs Ray, which is not installed. pip install 'plot-ot[ray]'.") from e
    return ray


@dataclass(frozen=True)
class Numerics:
    """What else results depend on: workers compute as the driver would."""

    threads: int
    dtype: torch.dtype
    precision: str


@dataclass(frozen=True)
class Boxed:
    """Something in Ray's object store, fetched by those who do not have it yet."""

    key: str
    where: Any
    recording: str = ""
    """The recording that a shard belongs to."""

    @classmethod
    def of(cls, value: Any, recording: str = "") -> Boxed:
        """Put a value in the store; a reference inside another object is not fetched before it is asked for."""
        return cls(uuid.uuid4().hex, library().put(value), recording)

    def open(self) -> Any:
        """The value."""
        return library().get(self.where)


@dataclass(frozen=True)
class WorkOrder:
    """All that a worker needs to know to run a unit."""

    replica: Boxed
    part: Boxed
    """The part of the recording that the unit looks at."""
    work: bytes
    shards: Boxed
    """Where the inputs of every shard are, each in a box of its own."""
    reading: str | None
    """What the driver's subject reads out."""


@dataclass(frozen=True)
class Done:
    """What became of a unit: a value, or an error that the user can mend; and what to note about how it went."""

    value: Any = None
    error: PlotError | None = None
    notes: tuple[str, ...] = ()


def kept(cache: OrderedDict[K, V], key: K, make: Callable[[], V], most: int) -> V:
    """The value of a key, made if it is not there; the `most` that were used last stay."""
    if key not in cache:
        cache[key] = make()
    cache.move_to_end(key)
    while len(cache) > most:
        cache.popitem(last=False)
    return cache[key]


class Worker:
    """An actor with one replica and what it recorded; both are a cache, nothing is lost with them."""

    def __init__(self, numerics: Numerics, versions: Mapping[str, str]) -> None:
        torch.set_num_threads(numerics.threads)
        torch.set_default_dtype(numerics.dtype)
        torch.set_float32_matmul_precision(numerics.precision)
        self.versions = versions
        self.key = ""
        self.subject: Subject | None = None
        self.noted = 0
        self.stores: OrderedDict[str, dict[str, Store]] = OrderedDict()
        self.opened: OrderedDict[str, BankRecording] = OrderedDict()
        self.shards: tuple[str, Sequence[Boxed]] = "", ()

    def ready(self, replica: Boxed) -> Done:
        """Make the replica."""
        return self._done(lambda: self._replica(replica) and None)

    def record(self, replica: Boxed, shard: Boxed) -> Done:
        """A shard's activations and outputs; keys and values stay here."""
        return self._done(lambda: without_caches(self._recorded(self._replica(replica), shard)))

    def run(self, order: WorkOrder) -> Done:
        """What a unit gives."""
        from ray import cloudpickle

        def result() -> Any:
            subject = self._replica(order.replica).read_as(order.reading)
            boxes = self._boxes(order.shards)
            caches = Elsewhere(len(boxes), lambda k: self._recorded(self._replica(order.replica), boxes[k]))
            do, args = cloudpickle.loads(order.work)  # from our own driver, which Ray let into the cluster
            recording = self._part(order.part, subject)
            return do(replace(recording, subject=subject, store=recording.store.with_prefixes(caches)), *args)

        return self._done(result)

    def numbered(self, number: int, order: WorkOrder) -> tuple[int, Done]:
        """`run`, with the unit's number in the plan: units of whole banks end in any order."""
        return number, self.run(order)

    def _done(self, result: Callable[[], Any]) -> Done:
        try:
            value = result()
        except PlotError as e:
            return Done(error=e)
        new = self.subject.limits.halvings[self.noted :] if self.subject else []
        self.noted += len(new)
        return Done(value, notes=tuple(f"on a worker: {words}" for words in new))

    def process(self) -> int:
        """The number of its process."""
        return os.getpid()

    def node(self) -> str:
        """The node it is on."""
        return str(library().get_runtime_context().get_node_id())

    def _replica(self, box: Boxed) -> Subject:
        if self.subject is None or self.key != box.key:
            if (here := library_versions()) != self.versions:
                raise PlotError(f"A worker has {here}, the driver {dict(self.versions)}: install the same everywhere.")
            self.subject, self.noted = None, 0  # make room first
            self.stores.clear()
            self.opened.clear()
            made, identity = box.open()
            subject = made if isinstance(made, Subject) else made()
            if subject.identity() != identity:
                raise PlotError(
                    f"A worker's network is another than the driver's (weights {subject.identity()}, not {identity}). "
                    f"Give all nodes the same model files."
                )
            self.subject, self.key = subject, box.key
        return self.subject

    def _part(self, box: Boxed, subject: Subject) -> BankRecording:
        """The part of a recording that a unit looks at, on the subject's device."""
        from ray import cloudpickle

        def opened() -> BankRecording:
            part: BankRecording = cloudpickle.loads(box.open())
            return replace(part, store=to_device(part.store, subject))

        return kept(self.opened, box.key, opened, OPENED)

    def _boxes(self, box: Boxed) -> Sequence[Boxed]:
        """Where the shards' inputs are."""
        if self.shards[0] != box.key:
            self.shards = box.key, box.open()
        return self.shards[1]

    def _recorded(self, subject: Subject, box: Boxed) -> Store:
        if not subject.recorder_resumes:  # its units bring all they need
            return record_shard(subject, box.open())
        stores = kept(self.stores, box.recording, dict, RECORDINGS)
        if box.key not in stores:
            stores[box.key] = record_shard(subject, box.open())
        return stores[box.key]
