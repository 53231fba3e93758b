"""The planner: what a method would compute, hold, move and take, before any weight is loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from plot_ot.methods import Method
from plot_ot.plan.costs import Cost, Memory, Spread, cost, memory, recording_cost, total
from plot_ot.plan.counting import Count, Passes, by_part, count
from plot_ot.plan.machine import MACHINES, Machine, machine_by_name, measure
from plot_ot.plan.scene import Inputs, Scene, Unloaded, hollow, words
from plot_ot.plan.shape import PRESETS, Shape, shape_by_name
from plot_ot.subjects import Place


@dataclass(frozen=True)
class Plan:
    """One method on one seed, predicted. A response is one pair resumed under one variant."""

    method: str
    sites: int
    variants: int
    """Variants that calibration tries, for all variables."""
    rotations: int
    responses: float
    """Resumed responses in all, forward; for DAS the most its epochs allow."""
    parts: Mapping[str, Cost]
    """By part: `filter`, `recording` and `transfer`, shared by methods; `signatures`, `calibration`, `das`, `test`."""
    seconds: Mapping[str, float]
    """By part."""
    memory: Memory
    spread: Spread
    skipped: tuple[str, ...]
    """Stages that are not counted, by name."""

    @property
    def cost(self) -> Cost:
        """All parts together."""
        return total(list(self.parts.values()))

    def json(self) -> dict[str, Any]:
        """Plain numbers."""
        parts = {k: {**asdict(c), "seconds": self.seconds[k]} for k, c in self.parts.items()}
        memory = {**asdict(self.memory), "total": self.memory.total}
        known = {k: getattr(self, k) for k in ("method", "sites", "variants", "rotations", "responses", "skipped")}
        return {**known, "parts": parts, "memory": memory, "spread": asdict(self.spread)}


def plan(
    method: Method,
    scene: Scene,
    machine: Machine,
    *,
    chosen: Mapping[str, Sequence[Place]] | None = None,
    epochs: int | None = None,
) -> Plan:
    """Predict a method. `chosen` are the places that Stage A keeps, if known; `epochs` those that DAS will train."""
    found = count(method, scene, chosen, epochs)
    held = memory(found, machine)
    spread = Spread.of(held, machine)
    whole = {**scene.beside, "recording": scene.inputs}
    pieces: dict[str, list[Cost]] = {part: [recording_cost(scene, some, machine)] for part, some in whole.items()}
    for part, passes in by_part(found.passes):
        pieces[part] = [cost(p, scene, machine) for p in passes]
    return Plan(
        method.name,
        round(found.sites),
        round(found.variants),
        round(found.rotations),
        sum(p.responses for p in found.passes),
        {part: total(costs) for part, costs in pieces.items()},
        {part: total(costs).seconds(machine, spread) for part, costs in pieces.items()},
        held,
        spread,
        tuple(dict.fromkeys(found.skipped)),
    )


__all__ = [
    "MACHINES",
    "PRESETS",
    "Cost",
    "Count",
    "Inputs",
    "Machine",
    "Memory",
    "Passes",
    "Plan",
    "Scene",
    "Shape",
    "Spread",
    "Unloaded",
    "count",
    "hollow",
    "machine_by_name",
    "measure",
    "plan",
    "shape_by_name",
    "words",
]
