"""The planner: what a method would compute, hold, move and take, before any weight is loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from plot_ot.methods import Method
from plot_ot.planner.costs import Cost, Memory, Spread, cost, memory, recording_cost, total
from plot_ot.planner.counting import CASES, Count, Passes, by_part, count
from plot_ot.planner.machine import MACHINES, Machine, machine_by_name, measure
from plot_ot.planner.scene import Inputs, Scene, Unloaded, hollow, words
from plot_ot.planner.shape import PRESETS, Shape, shape_by_name
from plot_ot.subjects import Place


@dataclass(frozen=True)
class Bill:
    """What a method costs and takes, by part: `filter`, `recording` and `transfer`, which methods share; `signatures`,
    `calibration`, `das`, `test`."""

    parts: Mapping[str, Cost]
    seconds: Mapping[str, float]

    @property
    def cost(self) -> Cost:
        """All parts together."""
        return total(list(self.parts.values()))

    @classmethod
    def of(cls, found: Count, machine: Machine, spread: Spread) -> Bill:
        """Of counted passes, and of what is run whole before them."""
        scene = found.scene
        whole = {**scene.beside, "recording": scene.inputs}
        parts = {part: recording_cost(scene, some, machine) for part, some in whole.items()}
        parts |= {part: total([cost(p, scene, machine) for p in passes]) for part, passes in by_part(found.passes)}
        return cls(parts, {part: c.seconds(machine, spread) for part, c in parts.items()})


@dataclass(frozen=True)
class Plan(Bill):
    """One method on one seed, predicted. A response is one pair resumed under one variant."""

    method: str
    sites: int
    variants: int
    """Variants that calibration tries, for all variables."""
    rotations: int
    responses: float
    """Resumed responses in all, forward; for DAS the most its epochs allow."""
    lowest: Bill
    """If all that is not known before turns out cheap: Stage A keeps late places, DAS stops early."""
    highest: Bill
    """If it turns out dear: Stage A keeps early places, a different one for every variable."""
    memory: Memory
    spread: Spread
    skipped: tuple[str, ...]
    """Stages that are not counted, by name."""

    def json(self) -> dict[str, Any]:
        """Plain numbers."""
        parts = {k: {**asdict(c), "seconds": self.seconds[k]} for k, c in self.parts.items()}
        ends = {
            name: {"block_tokens": bill.cost.block_tokens, "seconds": sum(bill.seconds.values())}
            for name, bill in (("lowest", self.lowest), ("highest", self.highest))
        }
        memory = {**asdict(self.memory), "total": self.memory.total}
        known = {k: getattr(self, k) for k in ("method", "sites", "variants", "rotations", "responses", "skipped")}
        return {**known, "parts": parts, **ends, "memory": memory, "spread": asdict(self.spread)}


def plan(
    method: Method,
    scene: Scene,
    machine: Machine,
    *,
    chosen: Mapping[str, Sequence[Place]] | None = None,
    epochs: int | None = None,
    workers: int | None = None,
) -> Plan:
    """Predict a method. `chosen` are the places that Stage A keeps, if known; `epochs` those that DAS will train;
    `workers` how many share the work, by default as many as there are replicas on the machine's devices."""
    cases = {case: count(method, scene, chosen, epochs, case) for case in CASES}
    found = cases["expected"]
    held = memory(found, machine)
    spread = Spread.of(held, machine, workers)
    bills = {case: Bill.of(counted, machine, spread) for case, counted in cases.items()}
    return Plan(
        bills["expected"].parts,
        bills["expected"].seconds,
        method.name,
        round(found.sites),
        round(found.variants),
        round(found.rotations),
        sum(p.responses for p in found.passes),
        bills["lowest"],
        bills["highest"],
        held,
        spread,
        tuple(dict.fromkeys(found.skipped)),
    )


__all__ = [
    "MACHINES",
    "PRESETS",
    "Bill",
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
