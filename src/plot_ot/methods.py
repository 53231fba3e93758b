"""Methods: short lists of stages. The paper's methods and the baselines they are judged against."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from plot_ot.errors import unknown
from plot_ot.signatures import SignatureSpec
from plot_ot.sites import blocks, pca_bands, pca_components, whole_places
from plot_ot.stages import random_search
from plot_ot.stages.calibrate import Search
from plot_ot.stages.choose import Best, Calibrate, Hint, SelectPlaces, SelectTokens, TrainDas
from plot_ot.stages.closed_form import ClosedForm
from plot_ot.stages.coupling import Localize, LocalizeTokens, ScoreSites, at_random
from plot_ot.stages.descent import DasSpec
from plot_ot.stages.problem import Clock, Problem, Stage, State
from plot_ot.subjects import Place
from plot_ot.transport import Transport

STRENGTHS = (0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5, *(float(x) for x in range(4, 21)))
SEARCH = Search(tuple(range(1, 21)), STRENGTHS, ties="loss")
"""Up to K equal weights, λ = K takes the K sites whole: strengths reach as far as sizes do."""
WIDE_SEARCH = Search((1, 2, 4, 8), (0.5, 1.0, 2.0, 4.0, 8.0), ties="surest")
NARROW, FEW, KEPT = 64, 4, 3
"""Up to this width every neuron is a site of its own; up to this many places none is left out beforehand; where there
are more, so many are kept for a closer look."""
COARSE = Transport("uot-one-sided", epsilon=(0.05, 0.2), beta=(0.03, 0.3, 3.0), scale="median")
FINE = Transport(epsilon=(0.01, 0.03, 0.1, 0.5), scale="median")
WIDE_FINE = Transport(epsilon=(0.03, 0.3), scale="median")


class MethodKind(str, Enum):
    """What a method is, in tables and charts; its text is what files hold."""

    TRANSPORT = "transport"
    DAS = "das"
    BASELINE = "baseline"
    CONTROL = "control"

    def __str__(self) -> str:
        return self.value

    @property
    def judged(self) -> bool:
        """Whether its handles get verdicts: baselines and controls are what others are compared with."""
        return self in (MethodKind.TRANSPORT, MethodKind.DAS)


@dataclass(frozen=True)
class Method:
    """A named list of stages."""

    name: str
    summary: str
    stages: tuple[Stage, ...]
    kind: MethodKind = MethodKind.TRANSPORT

    def run(self, problem: Problem) -> tuple[State, dict[str, float]]:
        """All stages in turn; also the seconds each part took."""
        clock = Clock()
        problem = replace(problem, clock=clock)
        state = State.start(problem)
        seen: list[State] = []
        for stage in self.stages:
            last, state = state, stage(problem, state)
            if state.candidates is last.candidates and seen:
                seen[-1] = state  # made from the same couplings
            elif state.candidates:
                seen.append(state)
        return replace(state, trail=tuple(seen)), clock.parts


def pick(methods: Mapping[str, Method], names: list[str] | None) -> list[Method]:
    """The methods of those names (all by default), in the registry's order."""
    for name in names or []:
        if name not in methods:
            unknown("method", name, methods)
    return [m for name, m in methods.items() if names is None or name in names]


def layered(search: Search = SEARCH) -> Method:
    """One coupling per place over its neurons, ε in units of the median cost; calibration picks place, ε, K and λ."""
    summary = "one coupling per layer, ε in units of the median cost; calibration picks layer, ε, K and λ"
    return Method("plot-layered", summary, (Localize(transport=FINE, coupling="place"), Calibrate(search)))


def progressive(
    places: Sequence[Place], variables: int, spec: SignatureSpec | None = None, das: bool = False
) -> Method:
    """The zoom of Figure 1, with what a network's places need of it: tokens, then places, then what is inside.

    One-sided UOT couples tokens (where places stand at several) and whole places (where there are many); each variable
    keeps a few. Inside these, neurons or groups of them, principal components, closed forms and with `das` rotations
    around the size found so far each make a handle, and calibration keeps the best, the plainest first.
    """
    spec = spec or SignatureSpec()
    unit = replace(spec, normalise="unit") if spec.normalise == "none" else spec  # a whole token outweighs any variable
    stages: list[Stage] = []
    by_token: dict[str, list[Place]] = {}
    for p in places:
        by_token.setdefault(p.token, []).append(p)
    open_places = len(places)
    if len(by_token) > 2 and open_places > len(by_token):
        keep = max(2, -(-len(by_token) // 2))
        stages += [LocalizeTokens(replace(COARSE, beta=(0.03, 0.3)), unit), SelectTokens(keep)]
        open_places = keep * max(len(at) for at in by_token.values())
    ways: list[tuple[Stage, ...]] = []
    if open_places > FEW:
        stages += [
            Localize((whole_places,), COARSE, unit),
            SelectPlaces(max(FEW, round(6 * open_places / 26)), keep=KEPT),
        ]
        ways.append(())
    width = max(p.width for p in places)
    thorough = not ways and width <= NARROW  # few and narrow places
    fine, search = (FINE, replace(SEARCH, ties="surest")) if thorough else (WIDE_FINE, WIDE_SEARCH)
    if variables == 1:  # a balanced coupling of one row is uniform
        fine = replace(fine, kind="uot-one-sided", beta=(0.1,))
    native = (blocks(1),) if width <= NARROW else (blocks(width // NARROW), blocks(width // 16))
    pca = pca_components() if width <= NARROW else pca_bands(16)
    inside: list[tuple[Stage, ...]] = [
        (Localize(menus, fine, spec, coupling="place"), Calibrate(search)) for menus in (native, (pca,))
    ]
    inside.append((ClosedForm(),))
    stages.append(Best((*inside, *ways)))
    summary = "tokens, places, then neurons, principal components and closed forms inside"
    if not das:
        return Method("plot", summary, tuple(stages))
    stages.append(Best(((), (TrainDas(Hint.paper(), DasSpec(most=100), from_handles=True),))))
    return Method("plot-das", f"{summary}, then DAS around what was found", tuple(stages))


def random_like(method: Method, draw: int, places: Sequence[Place]) -> Method:
    """The control of any method: its own search with every coupling a random ranking, and nothing learned.

    A method of learners alone ranks nothing, so its control is that of `progressive`.
    """
    stages = random_search.at_random(method.stages, draw)
    if not stages:
        return random_progressive(draw, places)
    return Method(f"random-{draw}", f"the search of {method.name}, ranked at random", stages, kind=MethodKind.BASELINE)


def random_progressive(draw: int, places: Sequence[Place]) -> Method:
    """The control of `progressive`: random neurons of any place, or where there are many, of one at random."""
    if len(places) <= FEW:
        return random_sites(draw, SEARCH)
    stages = (
        ScoreSites("random", at_random(draw), whole_places),
        SelectPlaces(),
        ScoreSites("random", at_random(draw + 10_000), blocks(max(1, max(p.width for p in places) // NARROW))),
        Calibrate(WIDE_SEARCH),
    )
    return Method(f"random-{draw}", "a random place, random neurons, same search", stages, kind=MethodKind.BASELINE)


def random_sites(draw: int, search: Search) -> Method:
    """The control of every transport method: a random ranking of all neurons, then the same search."""
    stages = (ScoreSites("random", at_random(draw)), Calibrate(replace(search, ties="smallest"), supports="place"))
    return Method(f"random-{draw}", "random neurons and weights, same search", stages, kind=MethodKind.BASELINE)
