"""Ray as the engine: the same work units as in-process, run by actors that each hold a replica of the network.

Ray places the actors, starts them anew where one dies or a node is lost (`max_restarts`), and sends them again what
they had not finished (`max_task_retries`). A worker has no state that matters: its replica and the shards it recorded
are made again when a unit asks for them. Results are taken by unit, once each, in plan order.
"""

from __future__ import annotations

import os
import sys
import uuid
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import torch

from plot_ot.abstract.banks import Bank
from plot_ot.engine.ray_session import connect
from plot_ot.engine.ray_worker import Boxed, Done, Numerics, Worker, WorkOrder, kept, library
from plot_ot.engine.stores import Elsewhere, merged, narrowed, record_shard, to_device
from plot_ot.engine.units import Crew, Recipe, Shard, SharedRecording, Unit
from plot_ot.errors import PlotError
from plot_ot.subjects import Store, Subject
from plot_ot.version import library_versions

RETRIES = 100
"""A unit during which so many workers died will not do better the next time."""
SENT = 256
"""Parts of recordings that are kept in Ray's object store for units to come."""
PASSED_ON = ("PLOT_OT_CACHE", "HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE")
"""Environment variables that say where models are found."""


class RayEngine:
    """Workers on a Ray cluster: the one at `address` (or `RAY_ADDRESS`), else one started on this machine.

    `workers` is how many replicas there are, by default one per GPU, or per `threads` CPUs where there are no GPUs.
    `gpus` is how many GPUs a replica takes: more than one for a recipe that loads its model with a `device_map`.
    """

    def __init__(
        self,
        address: str | None = None,
        workers: int | None = None,
        *,
        gpus: float | None = None,
        threads: int | None = None,
    ) -> None:
        self.threads = threads or torch.get_num_threads()
        self._leave: Callable[[], None] | None = None
        if not _initialized():
            self._leave = connect(address, None if workers is None else workers * self.threads)
        ray = library()
        have = ray.cluster_resources()
        self.gpus = gpus if gpus is not None else float(have.get("GPU", 0) >= 1)
        room = have.get("GPU", 0) // self.gpus if self.gpus else have.get("CPU", 1) // self.threads
        self.count = workers or max(1, int(room))
        if self.gpus and self.count > room:
            found = f"{have.get('GPU', 0):g} GPUs"
            raise PlotError(f"{self.count} workers need {self.count * self.gpus:g} GPUs; the cluster has {found}.")
        options: dict[str, Any] = {
            # a sliver of a CPU keeps the node in use, and lets the nodes that are left take over from a lost one
            "num_cpus": 0.01,
            "num_gpus": self.gpus,
            "max_restarts": -1,
            "max_task_retries": RETRIES,
            "scheduling_strategy": "SPREAD",
            "runtime_env": {"env_vars": {k: os.environ[k] for k in PASSED_ON if k in os.environ}},
        }
        make = ray.remote(Worker).options(**options)
        numerics = Numerics(self.threads, torch.get_default_dtype(), torch.get_float32_matmul_precision())
        self.workers = [make.remote(numerics, library_versions()) for _ in range(self.count)]
        self._notes: list[str] = []
        self._replicas: WeakKeyDictionary[Subject, Boxed] = WeakKeyDictionary()

    def crew(self, subject: Subject, recipe: Recipe | None = None) -> Crew:
        """Workers with replicas of a subject.

        Without a recipe the subject itself is sent: cloudpickled by you, for your own cluster only.
        """
        if subject not in self._replicas:
            self._replicas[subject] = Boxed.of((recipe or subject, subject.identity()))
        return _RayCrew(self.workers, subject, self._replicas[subject], self._notes)

    def notes(self) -> list[str]:
        """What workers cut smaller because their memory ran out, each said once."""
        said = list(dict.fromkeys(self._notes))
        self._notes.clear()
        return said

    def close(self) -> None:
        """Let go of the workers, and of the cluster if it was started here."""
        if self._leave:
            self._leave()
            self._leave = None
        else:
            for worker in self.workers:
                library().kill(worker)
        self.workers = []

    def __enter__(self) -> RayEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _initialized() -> bool:
    return "ray" in sys.modules and bool(sys.modules["ray"].is_initialized())


class _RayCrew:
    """The driver's end of one recording: which worker has which shard, and what was sent to them already."""

    def __init__(self, workers: Sequence[Any], subject: Subject, replica: Boxed, notes: list[str]) -> None:
        self.workers, self.subject, self.replica, self.notes = workers, subject, replica, notes
        self.shards = Boxed("", None)
        self._sent: OrderedDict[tuple[Any, ...], tuple[Bank, Boxed]] = OrderedDict()

    def ready(self) -> None:
        """Wait until every worker has its replica; they would make it with their first unit anyway."""
        list(_values_or_errors(map(library().get, [w.ready.remote(self.replica) for w in self.workers]), self.notes))

    def record(self, shards: Sequence[Shard]) -> Store:
        recording = uuid.uuid4().hex
        boxes = [Boxed.of(s, recording) for s in shards]
        self.shards = Boxed.of(boxes)
        refs = [self._worker(k, 0, len(boxes)).record.remote(self.replica, box) for k, box in enumerate(boxes)]
        found = zip(_values_or_errors(map(library().get, refs), self.notes), shards, strict=True)
        pieces = (to_device(self._checked(store, shard), self.subject) for store, shard in found)
        # as much of the budget as a recording in this process holds in memory
        store = merged(pieces, self.subject.vectors_in_memory)
        return store.with_prefixes(Elsewhere(len(shards), lambda k: record_shard(self.subject, shards[k])))

    def _checked(self, store: object, shard: Shard) -> Store:
        """Refuse what is no recording of a shard's inputs at the subject's places; numbers are looked at later."""
        rows = len(shard.inputs)
        if (
            isinstance(store, Store)
            and torch.equal(store.inputs.cpu(), shard.inputs.cpu())
            and len(store.outputs) == rows
        ):
            shapes = {name: tuple(a.shape) for name, a in store.activations.items()}
            if shapes == {p.name: (rows, p.width) for p in self.subject.recorded}:
                return store
        raise PlotError(
            f"A worker returned something else than a recording of the {rows} inputs it was given. Install the same "
            f"plot-ot everywhere, and use a cluster that you trust."
        )

    def map(self, recording: SharedRecording, units: Sequence[Unit]) -> Iterator[Any]:
        if any(u.whole for u in units):  # nobody has all that is needed: whoever is free takes the next
            from ray.util import ActorPool

            orders = [(k, self._order(recording, u, None)) for k, u in enumerate(units)]
            pool = ActorPool(list(self.workers))
            # Ray's `map` keeps a worker waiting for those before it in the order; so take them as they come
            done = pool.map_unordered(lambda worker, order: worker.numbered.remote(*order), orders)
            return _values_or_errors(_in_order(done), self.notes)
        of_pair = recording.shard[recording.base_rows]
        present, turns = len(of_pair.unique()), Counter[int]()
        refs = []
        for unit in units:
            shard = int(of_pair[unit.pairs][0])
            worker = self._worker(shard, turns[shard], present)
            refs.append(worker.run.remote(self._order(recording, unit, shard)))
            turns[shard] += 1
        return _values_or_errors(map(library().get, refs), self.notes)

    def _worker(self, shard: int, turn: int, count: int) -> Any:
        """Who works on a shard: always the same, or the same few in turn where there are more workers than shards."""
        several = max(1, len(self.workers) // count)
        return self.workers[(shard + count * (turn % several)) % len(self.workers)]

    def _order(self, recording: SharedRecording, unit: Unit, shard: int | None) -> WorkOrder:
        from ray import cloudpickle

        key = id(recording.bank), shard, tuple(p.name for p in unit.places)

        def sent() -> tuple[Bank, Boxed]:  # the bank is kept so that nobody else gets its id
            part = replace(narrowed(recording, unit), subject=None)  # type: ignore[arg-type]
            return recording.bank, Boxed.of(cloudpickle.dumps(part))

        _, part = kept(self._sent, key, sent, SENT)
        work = cloudpickle.dumps((unit.work, unit.args))
        return WorkOrder(self.replica, part, work, self.shards, recording.subject.reading)


def _in_order(numbered: Iterator[tuple[int, Done]]) -> Iterator[Done]:
    """Results by their numbers 0, 1, 2, ..., each as soon as those before it are there."""
    early: dict[int, Done] = {}
    due = 0
    for number, result in numbered:
        early[number] = result
        while due in early:
            yield early.pop(due)
            due += 1


def _values_or_errors(results: Iterator[Done], notes: list[str]) -> Iterator[Any]:
    """What workers gave, or the error they met, without Ray's part of the story."""
    ray = library()
    try:
        for result in results:
            if not isinstance(result, Done) or not all(isinstance(note, str) for note in result.notes):
                raise PlotError(f"A worker answered with {type(result).__name__}, which no worker of ours does.")
            notes.extend(result.notes)
            if result.error is not None:
                raise result.error
            yield result.value
    except ray.exceptions.RayTaskError as e:
        raise e.cause from None
    except ray.exceptions.RayError as e:
        raise PlotError(
            f"A unit could not be finished although it was started again up to {RETRIES} times ({type(e).__name__}). "
            f"Workers that run out of memory look like this; use fewer workers per node or less --memory."
        ) from e
