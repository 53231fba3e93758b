"""The planner: estimates of compute, memory, traffic and time, before any weight is loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from plot_ot.methods import Method
from plot_ot.planner.costs import Cost, Memory, Spread, cost, memory, recording_cost, total
from plot_ot.planner.counting import by_part, count
from plot_ot.planner.machine import MACHINES, Machine, machine_by_name, measure
from plot_ot.planner.prompted import Prompted
from plot_ot.planner.scene import Inputs, Scene, Unloaded, Words, answers_in, approximate_tokens, unrecorded
from plot_ot.planner.shape import PRESETS, shape_by_name, shape_of_config
from plot_ot.stages.forecast import CASES, Forecast, Passes
from plot_ot.subjects import Place
from plot_ot.subjects.shape import Shape


@dataclass(frozen=True)
class Estimate:
    """What a method costs and takes, by part: `filter`, `recording` and `transfer`, which methods share; `signatures`,
    `calibration`, `das`, `test`."""

    parts: Mapping[str, Cost]
    seconds: Mapping[str, float]

    @property
    def cost(self) -> Cost:
        """The cost of all parts together."""
        return total(list(self.parts.values()))

    @classmethod
    def of(cls, found: Forecast, scene: Scene, machine: Machine, spread: Spread) -> Estimate:
        """The estimate of counted passes, and of what is run whole before them."""
        whole = {**scene.beside, "recording": scene.inputs}
        parts = {part: recording_cost(scene, some, machine) for part, some in whole.items()}
        if "filter" in whole and spread.replicas == 1:  # it keeps what it ran; workers record anew
            parts |= {part: Cost() for part in whole if part != "filter"}
        parts |= {part: total([cost(p, scene, machine) for p in passes]) for part, passes in by_part(found.passes)}
        return cls(parts, {part: c.seconds(machine, spread) for part, c in parts.items()})


@dataclass(frozen=True)
class Plan(Estimate):
    """One method on one seed, predicted. A response is one pair resumed under one variant."""

    method: str
    sites: int
    variants: int
    """Variants that calibration tries, for all variables."""
    rotations: int
    responses: float
    """Resumed responses in all, forward; for DAS the most its epochs allow."""
    lowest: Estimate
    """The estimate if what is not known beforehand turns out cheap: Stage A keeps late places, DAS stops early."""
    highest: Estimate
    """The estimate if it turns out expensive: Stage A keeps early places, another one for every variable."""
    memory: Memory
    spread: Spread
    not_counted: tuple[str, ...]
    """Stages that do not tell what they compute, by name: the plan leaves them out."""

    def json(self) -> dict[str, Any]:
        """The plan as plain values, ready for JSON."""
        parts = {k: {**asdict(c), "seconds": self.seconds[k]} for k, c in self.parts.items()}
        ends = {
            name: {"block_tokens": estimate.cost.block_tokens, "seconds": sum(estimate.seconds.values())}
            for name, estimate in (("lowest", self.lowest), ("highest", self.highest))
        }
        memory = {**asdict(self.memory), "total": self.memory.total}
        known = {k: getattr(self, k) for k in ("method", "sites", "variants", "rotations", "responses", "not_counted")}
        return {**known, "parts": parts, **ends, "memory": memory, "spread": asdict(self.spread)}


def predict(
    method: Method,
    scene: Scene,
    machine: Machine,
    *,
    chosen: Mapping[str, Sequence[Place]] | None = None,
    epochs: int | None = None,
    workers: int | None = None,
) -> Plan:
    """Predict what a method costs and takes.

    `chosen` are the places that Stage A keeps, if known; `epochs` those that DAS will train; `workers` how many share
    the work, by default as many as there are replicas on the machine's devices.
    """
    cases = {case: count(method, scene, chosen, epochs, case) for case in CASES}
    found = cases["expected"]
    held = memory(found, scene, machine)
    spread = Spread.of(held, machine, workers)
    estimates = {case: Estimate.of(counted, scene, machine, spread) for case, counted in cases.items()}
    expected = estimates["expected"].seconds
    # the ends are the fewest and the most blocks; where these take no time, what surrounds them may turn the order
    for case, end in (("lowest", min), ("highest", max)):
        seconds = {k: end(s, expected.get(k, s)) for k, s in estimates[case].seconds.items()}
        estimates[case] = replace(estimates[case], seconds=seconds)
    return Plan(
        estimates["expected"].parts,
        estimates["expected"].seconds,
        method.name,
        round(found.sites),
        round(found.variants),
        round(found.rotations),
        sum(p.responses for p in found.passes),
        estimates["lowest"],
        estimates["highest"],
        held,
        spread,
        tuple(dict.fromkeys(found.not_counted)),
    )


__all__ = [
    "MACHINES",
    "PRESETS",
    "Cost",
    "Estimate",
    "Forecast",
    "Inputs",
    "Machine",
    "Memory",
    "Passes",
    "Plan",
    "Prompted",
    "Scene",
    "Shape",
    "Spread",
    "Unloaded",
    "Words",
    "answers_in",
    "approximate_tokens",
    "count",
    "machine_by_name",
    "measure",
    "predict",
    "shape_by_name",
    "shape_of_config",
    "unrecorded",
]
