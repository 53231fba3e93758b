"""Methods: short lists of stages. The paper's methods and the baselines they are judged against."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import accumulate

from plot_ot.errors import unknown
from plot_ot.handles import Handle
from plot_ot.signatures import SignatureSpec
from plot_ot.sites import blocks, pca_bands, pca_components, whole_places
from plot_ot.stages import random_search
from plot_ot.stages.calibrate import Search
from plot_ot.stages.choose import Calibrate, Hint, PatchPlaces, SelectPlaces, SelectTokens, TrainDas
from plot_ot.stages.closed_form import SCOUT, ClosedForm
from plot_ot.stages.coupling import Localize, LocalizeTokens, ScoreSites, at_random
from plot_ot.stages.descent import DasSpec
from plot_ot.stages.newton import NewtonHandles
from plot_ot.stages.problem import Clock, Problem, Stage, State, advance
from plot_ot.stages.together import Together, TogetherAtRandom, families
from plot_ot.stages.ways import Best, LookFurther, noting
from plot_ot.subjects import Place
from plot_ot.transport import Transport

STRENGTHS = (0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5, *(float(x) for x in range(4, 21)))
SEARCH = Search(tuple(range(1, 21)), STRENGTHS, ties="loss")
"""Up to K equal weights, λ = K takes the K sites whole: strengths reach as far as sizes do."""
WIDE_SEARCH = Search((1, 2, 4, 8), (0.5, 1.0, 2.0, 4.0, 8.0), ties="natural")
NARROW, FEW, KEPT = 64, 4, 3
"""Up to this width every neuron is a site of its own; up to this many places none is left out beforehand; where there
are more, so many are kept for a closer look."""
SCOUTED = 30
"""In how many of the places that were dropped a few closed forms look for a variable."""
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
    literal: bool = False
    """Whether the last stage's handle counts, as in the paper, even where calibration prefers an earlier one."""

    def __post_init__(self) -> None:
        if self.kind not in [*MethodKind]:
            unknown("kind of method", self.kind, [kind.value for kind in MethodKind])
        object.__setattr__(self, "kind", MethodKind(self.kind))  # its text will do

    @property
    def steps(self) -> int:
        """How many stages it has, those of alternative ways included."""
        return _steps(self.stages)

    def run(
        self, problem: Problem, places: Mapping[str, tuple[Place, ...]] | None = None
    ) -> tuple[State, dict[str, float]]:
        """All stages in turn, at every place or only at those open to each variable; also the seconds of each part."""
        clock = Clock()
        problem = replace(problem, clock=clock)
        state = State.start(problem) if places is None else State(places)
        seen: list[State] = []
        best: dict[str, Handle] = {}
        made: dict[str, tuple[object, int]] = {}
        for number, stage in enumerate(self.stages):
            last, state = state, advance(problem, state, stage)
            for v, h in state.handles.items():
                best[v] = better(best.get(v), h)
                if v not in made or made[v][0] is not best[v].edits:
                    made[v] = best[v].edits, number
            if state.candidates is last.candidates and seen:
                seen[-1] = state  # made from the same couplings
            elif state.candidates:
                seen.append(state)
        handles = dict(state.handles) if self.literal else best  # a stage never gives up what was found before it
        last_stage = len(self.stages) - 1
        for v, h in handles.items():
            handles[v] = noting(h, stage=last_stage if self.literal else made[v][1])
        return replace(state, handles=handles, trail=tuple(seen)), clock.parts

    def literally(self) -> Method:
        """The paper's reading of the method: it ends with the handle of its last stage, better or worse."""
        return replace(self, name=f"{self.name}{LITERAL}", summary=f"{self.summary}; last stage counts", literal=True)

    def quick(self) -> Method:
        """The method without the dear ways of a choice that also has cheap ones; else as it is."""
        return replace(self, stages=tuple(s.quick() if isinstance(s, LookFurther) else s for s in self.stages))

    def retraced(self, handles: Iterable[Handle]) -> Method:
        """The method up to the stage that made the last of these handles, with only the ways they took.

        Stages that came later and changed nothing are left out, also within a way. Where a handle does not tell its way
        through every choice, all ways are kept. No stage looks further than the places it is given, and Newton's path
        ends at the ρ that the handles took. Tokens that are tried together need no other stage.
        """
        handles = list(handles)
        plain = [stage.best if isinstance(stage, LookFurther) else stage for stage in self.stages]
        before = list(accumulate(int(isinstance(stage, Best)) for stage in plain))  # choices up to every stage
        taken, ends = list[list[tuple[int, int]]](), list[int]()
        for h in handles:
            ends.append(int(h.chosen.get("stage", len(plain) - 1)))
            ways = h.chosen.get("ways", ())
            taken.append(list(zip(ways, h.chosen.get("way_steps", [_steps(plain)] * len(ways)), strict=True)))
        told = all(len(ways) in (before[end], before[-1]) for ways, end in zip(taken, ends, strict=True))
        if all(isinstance(plain[end], Together) for end in ends):  # asks nothing of the stages before it
            return replace(self, stages=_ended([plain[end] for end in ends[:1]], handles))
        stages = plain[: 1 + max(ends)]
        for n, stage in enumerate(stages):
            if isinstance(stage, Best) and told:
                steps: dict[int, int] = {}
                for way, count in (ways[before[n] - 1] for ways in taken if len(ways) >= before[n]):
                    steps[way] = max(count, steps.get(way, 0))
                stages[n] = stage.only(steps, steps)
        return replace(self, stages=_ended(stages, handles))


def _ended(stages: Sequence[Stage], handles: Sequence[Handle]) -> tuple[Stage, ...]:
    """The stages, with those that go along a path ending where the handles did."""
    ended: list[Stage] = []
    for stage in stages:
        if isinstance(stage, Best):
            ended.append(replace(stage, ways=tuple(_ended(way, handles) for way in stage.ways)))
        else:
            ended.append(stage.retraced(handles) if isinstance(stage, (NewtonHandles, Together)) else stage)
    return tuple(ended)


LITERAL = "-literal"
"""Ends the name of a method that is to be read literally: `plot-native-literal`."""


def better(earlier: Handle | None, later: Handle) -> Handle:
    """Whichever of two handles has the higher calibration score; the later one where they are equal or not scored."""
    scores = [h.chosen.get("calibration_score") if h else None for h in (earlier, later)]
    if earlier is None or scores[0] is None or scores[1] is None:
        return later
    return earlier if scores[0] > scores[1] + 1e-9 else later


def _steps(stages: Sequence[Stage]) -> int:
    inner = [s.best if isinstance(s, LookFurther) else s for s in stages]
    return sum(sum(map(_steps, s.ways)) if isinstance(s, Best) else 1 for s in inner)


def pick(methods: Mapping[str, Method], names: list[str] | None) -> list[Method]:
    """The methods of those names (all by default), in the registry's order; `NAME-literal` is the paper's reading."""
    for name in names or []:
        if name.removesuffix(LITERAL) not in methods:
            unknown("method", name, methods)
    chosen = [(n, m) for name, m in methods.items() for n, m in ((name, m), (f"{name}{LITERAL}", m.literally()))]
    return [m for name, m in chosen if (name in methods if names is None else name in names)]


def layered(search: Search = SEARCH) -> Method:
    """One coupling per place over its neurons, ε in units of the median cost; calibration picks place, ε, K and λ."""
    summary = "one coupling per layer, ε in units of the median cost; calibration picks layer, ε, K and λ"
    return Method("plot-layered", summary, (Localize(transport=FINE, coupling="place"), Calibrate(search)))


def progressive(
    places: Sequence[Place], variables: int, spec: SignatureSpec | None = None, das: bool = False
) -> Method:
    """The zoom of Figure 1, with what a network's places need of it: tokens, then places, then what is inside.

    One-sided UOT couples tokens (where places stand at several) and whole places (where there are many); each variable
    keeps a few. Inside these, neurons or groups of them, principal components and closed forms each make a handle, and
    calibration keeps the best, the plainest first. Gauss-Newton goes on from the closed forms where places are few and
    narrow at one token, else only where the best handle is. Tokens that are named alike (end1, end2) are also tried
    together. With `das` rotations around the size found so far follow. What was found before stays unless it is beaten.
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
    # few and narrow places, at one token: an edit at an earlier one runs all tokens after it
    thorough = not ways and width <= NARROW and len(by_token) == 1
    fine, search = (FINE, replace(SEARCH, ties="natural")) if thorough else (WIDE_FINE, WIDE_SEARCH)
    if variables == 1:  # a balanced coupling of one row is uniform
        fine = replace(fine, kind="uot-one-sided", beta=(0.1,))
    native = (blocks(1),) if width <= NARROW else (blocks(width // NARROW), blocks(width // 16))
    pca = pca_components() if width <= NARROW else pca_bands(16)
    inside: list[tuple[Stage, ...]] = [
        (Localize(menus, fine, spec, coupling="place"), Calibrate(search)) for menus in (native, (pca,))
    ]
    inside.append((ClosedForm(), NewtonHandles()) if thorough else (ClosedForm(),))
    inner = Best((*inside, *(ways or [(PatchPlaces(),)])))
    if ways:
        cheap = () if das else (len(inside) - 1, len(inside))  # closed forms, and what there is
        narrow = LookFurther(inner, scout=(SCOUT,), scouted=SCOUTED)
        wide = replace(narrow, most=0, outputs=cheap)  # where a way inside costs more than the whole of a narrow place
        stages.append(narrow if width <= NARROW else wide)
    else:
        stages.append(inner)
    if not thorough:
        stages.append(NewtonHandles(outputs=False))
    if families(places):
        stages.append(Together())
    summary = "tokens, places, then neurons, principal components, closed forms and Newton inside"
    if not das:
        return Method("plot", summary, tuple(stages))
    stages.append(Best(((), (TrainDas(Hint.paper(), DasSpec(most=100), from_handles=True),))))
    return Method("plot-das", f"{summary}, then DAS around what was found", tuple(stages))


def natural_das(das: TrainDas) -> Best:
    """DAS with a counterfactual-latent loss, its weight chosen on calibration, between equal scores the larger."""
    return Best(tuple((replace(das, spec=replace(das.spec, natural=weight)),) for weight in (0.1, 0.01)))


def random_like(method: Method, draw: int, places: Sequence[Place]) -> Method:
    """The control of any method: its own search with every coupling a random ranking, and nothing learned.

    A method of learners alone ranks nothing, so its control is that of `progressive`, or where it swaps several tokens
    together, of that.
    """
    stages = random_search.at_random(method.stages, draw)
    if not stages:
        if method.stages and all(isinstance(s, Together) for s in method.stages):
            return random_together(draw)
        return random_progressive(draw, places)
    return Method(f"random-{draw}", f"the search of {method.name}, ranked at random", stages, kind=MethodKind.BASELINE)


def random_progressive(draw: int, places: Sequence[Place]) -> Method:
    """The control of `progressive`: random neurons of any place, or where there are many, of one at random.

    Where it also swaps several tokens together, every second draw does so, too.
    """
    if draw % 2 and families(places):
        return random_together(draw)
    if len(places) <= FEW:
        return random_sites(draw, WIDE_SEARCH)  # the plain grid is as good for random sites, at a twentieth of the cost
    stages = (
        ScoreSites("random", at_random(draw), whole_places),
        SelectPlaces(),
        ScoreSites("random", at_random(draw + 10_000), blocks(max(1, max(p.width for p in places) // NARROW))),
        Calibrate(WIDE_SEARCH, lean=True),
    )
    return Method(f"random-{draw}", "a random place, random neurons, same search", stages, kind=MethodKind.BASELINE)


def random_together(draw: int) -> Method:
    """The control of `Together`: random neurons of several tokens at once."""
    what = "random neurons of several tokens, same search"
    return Method(f"random-{draw}", what, (TogetherAtRandom(draw),), kind=MethodKind.BASELINE)


def random_sites(draw: int, search: Search) -> Method:
    """The control of every transport method: a random ranking of all neurons, then the same search."""
    stages = (ScoreSites("random", at_random(draw)), Calibrate(replace(search, ties="smallest"), supports="place"))
    return Method(f"random-{draw}", "random neurons and weights, same search", stages, kind=MethodKind.BASELINE)
