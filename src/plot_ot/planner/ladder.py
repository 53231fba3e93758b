"""The ladder: what a whole pass, a recorded one, a resumed edit and the parts of a method take on one device.

All rungs are climbed in one run, on random prompts, beside what the plan says of the same work. The fast path is held
against the hooked forward on the way. This is what `plot-ot bench` prints.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from plot_ot.abstract import CausalModel
from plot_ot.abstract.banks import Splits, draw_pairs
from plot_ot.edits import EditBatch, Frame, respond
from plot_ot.errors import PlotError
from plot_ot.methods import Method
from plot_ot.planner import Plan, Scene, predict
from plot_ot.planner.machine import Machine, best_time, measure
from plot_ot.signatures import as_readout
from plot_ot.sites import blocks
from plot_ot.stages.calibrate import Search
from plot_ot.stages.choose import Calibrate, TrainDas
from plot_ot.stages.coupling import Localize
from plot_ot.stages.descent import DasSpec
from plot_ot.stages.problem import Problem
from plot_ot.subjects import DecoderSubject, Place, Recording, record

VARIANTS, SITES, EPOCHS = 16, 8, 2
"""Variants of a resumed edit, sites of a place, and epochs that DAS trains."""
ROUNDS = 2
"""How often the method runs: the first round also warms the device up, and the fastest counts."""
CLOSE = {torch.float32: 1e-3, torch.float64: 1e-3}
"""How far, of the largest logit, the fast path may be from the hooked forward; 0.1 in half precision."""


@dataclass(frozen=True)
class Rung:
    """One kind of work, measured."""

    name: str
    unit: str
    """What `seconds` are for."""
    seconds: float
    count: int
    """Units that were run."""
    ratio: float
    """Units that take as long as one prompt of the hooked full pass."""
    planned: float | None = None
    """Seconds of one unit as the plan has them."""


@dataclass(frozen=True)
class Ladder:
    """All rungs, and whether the fast path can be believed on this device."""

    device: str
    dtype: str
    rungs: tuple[Rung, ...]
    error: float
    """The largest difference between resumed and hooked logits, of the largest logit."""
    allowed: float
    peak: float
    """Bytes that the device held at most; on a CPU the process."""
    planned: float
    """Bytes that the plan has, weights with it."""
    machine: Machine

    @property
    def agrees(self) -> bool:
        """Whether resumed passes give what whole ones give."""
        return self.error <= self.allowed

    def json(self) -> dict[str, Any]:
        """All of it as plain values."""
        return {**asdict(self), "agrees": self.agrees}


def device_by_name(name: str | None) -> torch.device:
    """The device to run on, by default a GPU where there is one; refuses one that is not there."""
    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError as e:
        raise PlotError(f"'{name}' is no device. Write cpu, cuda or cuda:1.") from e
    if device.type not in ("cpu", "cuda"):
        raise PlotError(f"The ladder is climbed on cpu or cuda; found '{name}'.")
    if device.type == "cuda" and not torch.cuda.is_available():
        built = "this torch was built without CUDA" if torch.version.cuda is None else "the driver shows no GPU"
        raise PlotError(
            f"There is no CUDA device here: {built} (torch {torch.__version__}). Install a CUDA build of torch on a "
            f"machine with a GPU, or use --device cpu."
        )
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise PlotError(f"'{name}' is not among the {torch.cuda.device_count()} CUDA devices here, cuda:0 and on.")
    return device


def climb(model: nn.Module, *, pairs: int = 32, tokens: int = 32, cores: int = 1, memory: int = 4 << 30) -> Ladder:
    """Measure every rung on a loaded language model, where it is and in its type."""
    if pairs < 8 or tokens < 2:
        raise PlotError(f"The ladder needs at least 8 pairs and 2 tokens; found {pairs} and {tokens}.")
    threads = torch.get_num_threads()
    torch.set_num_threads(cores)
    try:
        return _climb(model, pairs, tokens, cores, memory)
    finally:
        torch.set_num_threads(threads)


def _climb(model: nn.Module, pairs: int, tokens: int, cores: int, memory: int) -> Ladder:
    vocabulary = int(model.get_input_embeddings().weight.shape[0])  # type: ignore[operator]
    splits, prompts = _banks(pairs), _prompts(vocabulary, tokens, pairs)
    answers = [[vocabulary // 3], [vocabulary // 2]]
    depth = DecoderSubject(model, prompts, answers).decoder.blocks
    layers = sorted({0, len(depth) // 2, len(depth) - 1})
    subject = DecoderSubject(model, prompts, answers, layers=layers, memory=memory)
    device = subject.device
    _reset_peak(device)
    machine = measure(
        dtype=str(subject.decoder.dtype).removeprefix("torch."),
        cores=cores,
        width=max(16, min(2048, subject.decoder.width)),
        device=device,
    )
    method = _method(pairs)
    plan = predict(method, Scene.of_subject(subject, splits, len(answers)), machine, epochs=EPOCHS)
    recording = record(subject, splits.fit)[0]
    error = max(_difference(recording, place) for place in subject.places)
    hooked, resumed = _passes(recording, subject.places[len(layers) // 2], device, cores)
    recorded, *parts = _parts(method, plan, subject, splits, device, cores)
    rungs, whole = (hooked, recorded, resumed, *parts), hooked.seconds
    return Ladder(
        str(device),
        str(subject.decoder.dtype).removeprefix("torch."),
        tuple(Rung(r.name, r.unit, r.seconds, r.count, whole / r.seconds, r.planned) for r in rungs),
        error,
        CLOSE.get(subject.decoder.dtype, 0.1),
        _peak(device),
        plan.memory.total,
        machine,
    )


def _passes(recording: Recording, place: Place, device: torch.device, cores: int) -> tuple[Rung, Rung]:
    """Whole passes under a hook, and edits resumed at the same place."""
    n, gains = len(recording), torch.linspace(0, 1, VARIANTS)[:, None].repeat(1, place.width)
    swap = [EditBatch(place, Frame.identity(place.width), gains)]
    hooked = best_time(lambda: _hooked(recording, place), device, cores)
    resumed = best_time(lambda: respond(recording, swap), device, cores)
    return (
        Rung("hooked full pass", "prompt", hooked / n, n, 1.0),
        Rung("resumed edit", "response", resumed / (n * VARIANTS), n * VARIANTS, 1.0),
    )


def _parts(
    method: Method, plan: Plan, subject: DecoderSubject, splits: Splits, device: torch.device, cores: int
) -> list[Rung]:
    """A recording and the parts of a method, each next to the plan's.

    Parts are timed by the wall. On one core of a CPU they are scaled to its own seconds, so that others who use the
    machine do not count.
    """
    best: dict[str, float] = {}
    banks = splits.fit, splits.calibration, *splits.test.values()
    for _ in range(ROUNDS):
        start, busy = time.perf_counter(), time.process_time()
        fit, calibration, *_tests = record(subject, *banks)
        _synchronise(device)
        taken = {"recording": time.perf_counter() - start}
        problem = Problem(subject, fit, calibration, ("z",), as_readout("softmax"))
        taken |= {part: seconds for part, seconds in method.run(problem)[1].items() if part in UNITS and seconds}
        alone = device.type == "cpu" and cores == 1
        share = (time.process_time() - busy) / (time.perf_counter() - start) if alone else 1.0
        taken = {part: share * seconds for part, seconds in taken.items()}
        best = {part: min(seconds, best.get(part, seconds)) for part, seconds in taken.items()}
    trained = EPOCHS * len(subject.places) * len(splits.fit)  # one rotation at every place, all pairs a step
    counts = {
        "recording": ("recorded pass", len(fit.store.inputs)),
        "signatures": ("signatures", plan.sites * len(splits.fit)),
        "calibration": ("calibration", plan.variants * len(splits.calibration)),
        "das": ("DAS step", trained),
    }
    return [
        Rung(
            counts[part][0], UNITS[part], best[part] / counts[part][1], counts[part][1], 1.0, _each(plan, part, counts)
        )
        for part in UNITS
        if part in best
    ]


UNITS = {"recording": "prompt", "signatures": "response", "calibration": "response", "das": "response"}


def _each(plan: Plan, part: str, counts: dict[str, tuple[str, int]]) -> float | None:
    return plan.seconds[part] / counts[part][1] if part in plan.seconds else None


# -- the fast path against the hooked forward -----------------------------------------------------------------------


@torch.no_grad()
def _hooked(recording: Recording, place: Place) -> Float[Tensor, "pairs vocabulary"]:
    """Logits after the base prompts by whole forward passes, with the sources' vectors put in by a hook."""
    subject = recording.subject
    assert isinstance(subject, DecoderSubject)  # noqa: S101
    ids, real = subject.encoded(recording.store.inputs[recording.base_rows])
    source = recording.source_at(place)
    with subject.intervene({place.name: lambda a: source.to(a)}):
        model = subject.decoder.model
        logits: Tensor = model(input_ids=ids.to(subject.device), attention_mask=real.long().to(subject.device)).logits
    return logits[:, -1].float()


def _difference(recording: Recording, place: Place) -> float:
    """How far resumed logits of the answers are from those of whole passes, of the largest logit."""
    subject = recording.subject
    assert isinstance(subject, DecoderSubject)  # noqa: S101
    whole = _hooked(recording, place).cpu()
    expected = torch.stack([whole[:, list(group)].amax(dim=1) for group in subject.answers], dim=1)
    swap = EditBatch(place, Frame.identity(place.width), torch.ones(1, place.width))
    found = respond(recording, [swap])[0].cpu()
    return float((found - expected).abs().max() / whole.abs().max().clamp(min=1e-6))


# -- what is run -----------------------------------------------------------------------------------------------------


def _method(pairs: int) -> Method:
    stages = (
        Localize((blocks(SITES),)),
        Calibrate(Search((1, 2, 4), (0.5, 1.0))),
        TrainDas((2,), DasSpec(batch=pairs, least=EPOCHS, most=EPOCHS)),
    )
    return Method("ladder", "signatures, calibration and DAS", stages)


def _banks(pairs: int) -> Splits:
    """Pairs of a toy variable: what they mean is all the same to a clock."""
    causal = CausalModel(["a", "b"], {"z": lambda a: a % 2, "y": lambda z, b: (z + b) % 2}, "y")
    generator, side = torch.Generator().manual_seed(1000), _side(pairs)
    rows = torch.cartesian_prod(torch.arange(side), torch.arange(side))
    fit, calibration, test = rows[torch.randperm(len(rows), generator=generator)].chunk(3)

    def bank(pool: Int[Tensor, "rows inputs"], policy: str, name: str) -> Any:
        return draw_pairs(causal, pool, policy, pairs, generator, variable="z", variables=["z"], name=name)

    held = {("z", "sensitivity"): bank(test, "sensitive", "test")}
    return Splits.checked(bank(fit, "mixed", "fit"), bank(calibration, "mixed", "calibration"), held)


def _side(pairs: int) -> int:
    return max(6, int((3 * pairs) ** 0.5) + 1)


def _prompts(vocabulary: int, tokens: int, pairs: int) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """Random prompts of so many tokens, one for every input row."""
    side = _side(pairs)
    drawn = torch.randint(vocabulary, (side * side, tokens), generator=torch.Generator().manual_seed(1000))

    def encode(rows: Int[Tensor, "rows inputs"]) -> tuple[Tensor, Tensor]:
        ids = drawn[rows[:, 0] * side + rows[:, 1]]
        return ids, torch.ones_like(ids)

    return encode


# -- the device ------------------------------------------------------------------------------------------------------


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def _peak(device: torch.device) -> float:
    if device.type == "cuda":
        return float(torch.cuda.max_memory_allocated(device))
    try:
        import resource
    except ImportError:  # not on every system
        return 0.0
    return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss) * 1024
