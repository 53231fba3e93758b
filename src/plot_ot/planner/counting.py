"""Count the passes that a method makes, before anything runs: its stages tell (`stages.forecast`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from plot_ot.methods import Method
from plot_ot.planner.scene import Scene
from plot_ot.stages.forecast import Forecast, Passes
from plot_ot.subjects import Place


def count(
    method: Method,
    scene: Scene,
    chosen: Mapping[str, Sequence[Place]] | None = None,
    epochs: int | None = None,
    case: str = "expected",
) -> Forecast:
    """All passes of a method, its test included; recording is counted apart, since methods share it."""
    found = Forecast(scene, chosen, epochs, case)
    found.walk(method.stages)
    found.stage += 1
    for (v, _), bank in scene.tests.items():  # every handle once on its test banks
        for p, chance in found.some(found.open[v], 1).items():
            found.add("test", p, bank, 1, chance)
    return found


def by_part(passes: Sequence[Passes]) -> Iterator[tuple[str, list[Passes]]]:
    """Passes of one part together, in the order in which parts first come."""
    for part in dict.fromkeys(p.part for p in passes):
        yield part, [p for p in passes if p.part == part]
