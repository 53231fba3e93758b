"""What counted passes cost: block-tokens, FLOPs, bytes and, on a machine, seconds.

    seconds = max( FLOPs / (FLOP/s), bytes / (bytes/s), block calls x seconds per call )

on a GPU, which computes while the host calls the next block; on a CPU the calls come on top. FLOP/s and bytes/s are the
machine's times its efficiency. What can be shared out in units is divided by the replicas of the model that fit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from math import ceil

from plot_ot.errors import PlotError
from plot_ot.planner.machine import Machine
from plot_ot.planner.scene import Inputs, Scene
from plot_ot.stages.forecast import Forecast, Passes

HELD_BACK, KEPT_BACK = 0.3, 2.0
"""What a CPU's allocator (glibc's) may hold besides, of what was given back: a share of what is needed where recording
asks it to let go (`subjects.memory.give_back`, language models), else so many times the largest pass.

Allowances: docs/results/planner.md has runs beside them."""
SMALL, BATCH, UNIT = 0.1, 1.0, 16.0
"""What else takes time however little is computed, in calls of a decoder's block: a layer of a small network; what
surrounds a resumed batch (gathering, editing, reading out); what surrounds a unit (sorting out equal states, scoring).

Measured on HEQ and addition: docs/results/planner.md."""
FULL = 0.9
"""Share of a device's memory that weights and batches may take."""


@dataclass(frozen=True)
class Cost:
    """What some passes take. Block-tokens are tokens times the blocks they go through."""

    forward: float = 0.0
    backward: float = 0.0
    flops: float = 0.0
    """FLOPs in the model's type."""
    single: float = 0.0
    """FLOPs in float32: frames that are trained."""
    moved: float = 0.0
    """Bytes to and from the device's memory: weights and keys once per batch, activations."""
    keys: float = 0.0
    """The part of `moved` that is keys and values of the bases."""
    sent: float = 0.0
    """Bytes between workers, if others do the work: what was recorded, then sums, counts and frames."""
    calls: float = 0.0
    """Calls of a block, or of as many layers of a small network as take as long."""
    batches: float = 0.0
    """Batches of responses: each is gathered, edited, read out and summed, however few blocks it runs."""
    offload: float = 0.0
    """Bytes of weights that would cross the link if none of them fitted the device."""
    units: float = 0.0
    """Pieces that the work can be shared out in."""

    @property
    def block_tokens(self) -> float:
        """Block-tokens forward and backward."""
        return self.forward + self.backward

    def __add__(self, other: Cost) -> Cost:
        return Cost(*(a + b for a, b in zip(vars(self).values(), vars(other).values(), strict=True)))

    def seconds(self, machine: Machine, spread: Spread) -> float:
        """The seconds that the passes take on a machine with so many replicas."""
        compute = self.flops / machine.flops + self.single / machine.single
        busy = max(compute, self.moved / machine.bandwidth) / machine.efficiency
        called = (self.calls + BATCH * self.batches + UNIT * self.units) * machine.call
        alone = max(busy, called) if machine.gpu else busy + called
        fetched = spread.missing * self.offload + (self.keys if spread.spilled else 0.0)
        alone = max(alone, fetched / machine.link)
        units = max(1.0, self.units)
        return alone * ceil(units / spread.replicas) / units if units > spread.replicas else alone / units


@dataclass(frozen=True)
class Memory:
    """Bytes that are held at the same time, at most."""

    weights: float
    vectors: float
    """Recorded activations in memory."""
    joined: float
    """A second copy of the recorded activations, which exists while those of shards are put together."""
    on_disk: bool
    """Whether recorded activations are kept in a file instead."""
    keys: float
    """Keys and values of the bases' earlier tokens."""
    spilled: bool
    """Whether keys and values are kept in a file instead."""
    batch: float
    """The largest batch that is recorded or resumed, with what it needs on its way."""
    frames: float
    """Rotations that are trained, with their gradients and moments."""
    slack: float
    """What a CPU's allocator may hold besides, of batches that are gone."""

    @property
    def kept(self) -> float:
        """The bytes that are held besides the weights."""
        return self.vectors + (0 if self.spilled else self.keys) + max(self.joined, self.batch + self.frames)

    @property
    def total(self) -> float:
        """All bytes that are held, the weights and the slack included."""
        return self.weights + self.kept + self.slack


@dataclass(frozen=True)
class Spread:
    """How a model lies on a machine's devices."""

    devices: int
    """Devices that one replica takes."""
    replicas: int
    missing: float
    """Share of the weights that fits nowhere, and comes over the link whenever it is needed."""
    spilled: bool = False
    """Whether keys and values come over the link as well."""

    @classmethod
    def of(cls, memory: Memory, machine: Machine, workers: int | None = None) -> Spread:
        """Lay a model out on as few devices per replica as hold its weights and what is kept; each worker has one.

        Workers without GPUs share a machine's main memory.
        """
        usable = FULL * machine.memory
        wanted = max(1, ceil(memory.total / usable))
        devices = min(wanted, machine.devices)
        missing = max(0.0, min(1.0, (memory.total - devices * usable) / max(1.0, memory.weights)))
        fitting = machine.devices // devices if machine.gpu else max(machine.devices, int(usable // memory.total))
        if workers is not None and workers > fitting:
            what = f"{devices} GPU{'s' * (devices > 1)} each" if machine.gpu else f"{memory.total / 1e9:.2g} GB each"
            raise PlotError(
                f"{workers} workers do not fit: a replica takes {what}, and there is room for {max(1, fitting)}. "
                f"Use fewer workers, or a larger machine."
            )
        return cls(devices, workers or max(1, machine.devices // devices), missing, memory.spilled)


# -- costs ------------------------------------------------------------------------------------------------------------


def recording_cost(scene: Scene, inputs: Inputs, machine: Machine) -> Cost:
    """The cost of recording: all inputs, what they share once, and the vocabulary's largest logit after each prompt."""
    shape = scene.shape
    context = inputs.tokens / inputs.count
    at_once = scene.subject.recorded_at_once(machine.device)
    together = inputs.count if scene.subject.whole_passes else inputs.running
    calls = max(inputs.shards, ceil(together / at_once)) * shape.blocks
    share = 1.0 if shape.language else SMALL
    forward = float(inputs.running * shape.blocks)
    keys = float(inputs.kept * shape.blocks * shape.key_bytes)
    return Cost(
        forward,
        flops=forward * shape.flops(context) + 2.0 * inputs.count * shape.hidden * shape.columns,
        moved=calls * shape.block_weights * shape.itemsize + keys + forward * shape.activation_bytes,
        keys=keys,
        sent=float(inputs.count * shape.vector_bytes),
        calls=share * calls,
        offload=calls * shape.block_weights * shape.itemsize,
        units=inputs.shards,
    )


def cost(p: Passes, scene: Scene, machine: Machine) -> Cost:
    """The cost of resumed passes."""
    shape, through = scene.shape, scene.through(p.place)
    blocks = shape.left(p.place) * len(scene.subject.beginnings)
    context = scene.context if shape.language else 0.0
    branches = scene.resumed_at_once(p.place, machine.device)
    pair_keys = context * shape.key_bytes
    pairs_at_once = max(1, min(branches // p.variants, scene.subject.pairs_at_once(pair_keys)))
    slices = ceil(p.variants / branches)
    pieces = max(ceil(p.pairs / pairs_at_once) * slices, min(p.shards, p.pairs)) * p.times
    ways = 1 + p.backward
    # a graph that would not fit is computed again on the way back
    again = bool(p.backward) and scene.subject.recomputes(p.pairs * p.variants * through * shape.graph_bytes)
    forward = p.responses * through * (1 + again)
    backward = p.responses * through * p.backward
    calls = pieces * blocks * (ways + again)
    share = 1.0 if shape.language else SMALL
    keys = p.pairs * slices * p.times * blocks * pair_keys * (ways + again)
    d, tokens = p.place.width, forward + backward
    frames = 12.0 * p.responses * d * p.rank + 20.0 * p.times * p.variants * d * p.rank**2 if p.rank else 0.0
    return Cost(
        forward,
        backward,
        flops=tokens * shape.flops(context) + 2.0 * ways * p.responses * shape.hidden * 2 * scene.outputs,
        single=frames,
        moved=calls * shape.block_weights * shape.itemsize + keys + tokens * shape.activation_bytes,
        keys=keys,
        sent=p.sent + 8.0 * len(scene.fit) * d * (p.part == "signatures"),  # base and source vectors go out once
        calls=share * calls,
        batches=pieces * ways,
        offload=calls * shape.block_weights * shape.itemsize,
        units=p.units,
    )


def total(costs: Sequence[Cost]) -> Cost:
    """The sum of some costs."""
    return reduce(Cost.__add__, costs, Cost())


# -- memory -----------------------------------------------------------------------------------------------------------


def memory(found: Forecast, scene: Scene, machine: Machine) -> Memory:
    """The memory that a method needs at most, its recording included."""
    shape, inputs, subject = scene.shape, scene.inputs, scene.subject
    ran = scene.beside.get("filter", inputs)  # what a filter ran is kept until recording takes over its part
    place = 4.0 * inputs.count * shape.width
    vectors, running = (float(n * shape.vector_bytes) for n in (inputs.count, ran.count))
    keys = float(ran.kept * shape.blocks * shape.key_bytes)
    limit = subject.vectors_in_memory
    on_disk = limit is not None and running - 4.0 * ran.count * shape.width > limit
    if on_disk:
        vectors = 3 * place  # the last vectors; one place as it was read, and put together from shards
    joined = running if (ran is not inputs or inputs.shards > 1) and not on_disk else 0.0
    recorded, resumed = subject.recorded_at_once(machine.device), subject.resumed_at_once(machine.device)
    passing = batch = shape.pass_bytes(min(inputs.running, recorded), scene.context)
    for p in found.passes:
        responses = min(p.pairs * p.variants, subject.responses_per_batch)
        # edited vectors and a copy of a part; base and source by pair; to tell equal states apart, 64-bit words
        held = 8.0 * p.place.width * (responses + p.pairs)
        going = shape.pass_bytes(min(ceil(responses * scene.tail(p.place)), resumed), scene.context)
        passing, held = max(passing, going), held + going
        if p.backward:
            graph = float(responses * scene.through(p.place) * shape.graph_bytes)
            held += subject.memory / 2 if subject.recomputes(graph) else graph
        batch = max(batch, held, 6 * place)
    beside = 4.0 * ran.count * shape.width if on_disk else running
    needed = Memory(
        float(shape.weight_bytes),
        vectors,
        joined,
        on_disk,
        keys,
        keys > subject.keys_in_memory(beside),
        float(batch),
        float(max((_frame_bytes(p, found) for p in found.passes if p.rank), default=0.0)),
        slack=0.0,
    )
    if machine.gpu:
        return needed
    return replace(needed, slack=HELD_BACK * needed.kept if shape.language else KEPT_BACK * passing)


def _frame_bytes(p: Passes, found: Forecast) -> float:
    """Starting directions of all jobs of a place, drawn whole; frames, gradients, moments of those trained at once."""
    d = p.place.width
    jobs = sum(q.times * q.variants for q in found.passes if q.rank and q.place == p.place)
    jobs = max(1.0, jobs / max(1.0, p.times * p.variants))
    return 4.0 * d * (jobs * d + 6 * p.variants * p.rank)
