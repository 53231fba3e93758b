"""Learned masks (desiderata-based masking): which sites of a menu to swap, learned by gradient.

A site's gain is σ(m / T). The loss of a variable's mask is the cross-entropy of its counterfactual labels over the fit
pairs, those that change the variable (the answer must follow) and those that do not (it must stay), plus λ Σ σ(m / T):
a site stays if it lowers the loss by more than λ. While T falls the gains become 0 or 1; what is kept are the sites
with m > 0, taken whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from plot_ot.edits import EditBatch
from plot_ot.engine import Unit, run
from plot_ot.errors import PlotError, unknown
from plot_ot.handles import Handle, handle_from_edits
from plot_ot.signatures import Readout
from plot_ot.sites import Menu, SiteFamily, neurons
from plot_ot.stages.calibrate import pair_weights, scored
from plot_ot.stages.descent import Adam, DasSpec, annealed, continued, descend, trained_like
from plot_ot.stages.forecast import Forecast
from plot_ot.stages.problem import Problem, State, best_by
from plot_ot.subjects import BankRecording, Place

OVER = ("place", "all")


@dataclass(frozen=True)
class MaskSpec:
    """How masks are trained: all for the same number of epochs, since the temperature falls over them."""

    rate: float = 0.1
    batch: int = 250
    epochs: int = 40
    restarts: int = 1
    """The first starts with every gain at one half, others at random."""
    clip: float = 1.0
    temperatures: tuple[float, float] = (1.0, 0.05)
    """T, from the first epoch to the last."""

    def __post_init__(self) -> None:
        if self.epochs < 1 or self.restarts < 1 or self.batch < 1:
            raise PlotError(f"Masks need at least one epoch, restart and pair in a batch; found {self}.")
        if not 0 < self.temperatures[1] <= self.temperatures[0]:
            raise PlotError(f"The temperature must fall and stay positive; found {self.temperatures}.")


@dataclass(frozen=True)
class Mask:
    """One learned choice of sites."""

    family: SiteFamily
    variable: str
    sparsity: float
    restart: int
    chosen: Bool[Tensor, " sites"]
    loss: float
    """Of the last, nearly hard, epoch on the fit bank, without λ's part."""


@dataclass(frozen=True)
class TrainMask:
    """Learn masks over the menu's sites at the places open to a variable; the best on calibration becomes its handle.

    `over` says what one mask spans: a single `place` (calibration also picks the place), or `all` that are open.
    Every (variable, λ, restart) is one variant of a batch. Ties go to the handle with the fewest directions.
    """

    learner: ClassVar[bool] = True
    menu: Menu = neurons
    sparsities: tuple[float, ...] = (1e-3, 1e-2, 1e-1)
    """λ: by how much (in units of the loss) a site must help."""
    spec: MaskSpec = field(default_factory=MaskSpec)
    over: str = "place"

    def __post_init__(self) -> None:
        if self.over not in OVER:
            unknown("span of a mask", self.over, OVER)
        if not self.sparsities or min(self.sparsities) < 0:
            raise PlotError(f"Masks need some λ, none below zero; found {self.sparsities}.")

    def __call__(self, problem: Problem, state: State) -> State:
        with problem.clock.part("das"):  # the part of what is learned by gradient
            groups = self._groups(problem, state)
            families = [self.menu(problem.fit, places) for places in groups]
            plans = [
                MaskTraining(family, variables, self.sparsities, problem.generator(n))
                for n, (family, variables) in enumerate(zip(families, groups.values(), strict=True))
            ]
            masks = train_masks(problem.fit, plans, problem.readout, self.spec)
        with problem.clock.part("calibration"):
            handles = {v: best_mask(problem, [m for m in masks if m.variable == v]) for v in problem.variables}
        return replace(state, handles=handles)

    def forecast(self, ahead: Forecast) -> None:
        """Masks over several places are resumed at the first of them; each is then scored."""
        each = len(self.sparsities) * self.spec.restarts
        for own in ahead.open.values():
            first = {min(own, key=ahead.scene.shape.places.index): 1.0} if self.over == "all" else own
            for p, chance in first.items():
                together = each * sum(p in other for other in ahead.open.values())
                ahead.train(p, each * chance, self.spec.epochs, self.spec.batch, together=together)
                ahead.add("calibration", p, ahead.scene.calibration, each, chance)

    def _groups(self, problem: Problem, state: State) -> dict[tuple[Place, ...], list[str]]:
        """Places that one mask spans, and the variables they are open to."""
        groups: dict[tuple[Place, ...], list[str]] = {}
        for v in problem.variables:
            places = [p for p in problem.subject.places if p in state.places[v]]
            for span in [tuple(places)] if self.over == "all" else [(p,) for p in places]:
                groups.setdefault(span, []).append(v)
        return groups


@dataclass(frozen=True)
class MaskTraining:
    """Masks to be learned over one family: for every variable x sparsity x restart."""

    family: SiteFamily
    variables: Sequence[str]
    sparsities: Sequence[float]
    generator: torch.Generator

    def jobs(self, spec: MaskSpec) -> list[Job]:
        """Every (variable, sparsity, restart)."""
        return [(v, s, r) for v in self.variables for s in self.sparsities for r in range(spec.restarts)]


Job = tuple[str, float, int]


def train_masks(
    recording: BankRecording, trainings: Sequence[MaskTraining], readout: Readout, spec: MaskSpec
) -> list[Mask]:
    """The masks of several trainings, each with its own loss and clipping; a training is one unit of work."""
    order = {p.name: k for k, p in enumerate(recording.subject.places)}
    units = []
    for t in trainings:
        for v in t.variables:
            recording.bank.require(v)
        places = tuple(sorted(t.family.places, key=lambda p: order[p.name]))
        args = t.family, places, t.jobs(spec), readout, spec, t.generator.get_state()
        units.append(Unit(_train, slice(None), places, args))
    learned: Iterator[tuple[Bool[Tensor, "jobs sites"], list[float]]] = run(recording, units)
    return [
        Mask(t.family, v, s, r, on, loss)
        for t, (chosen, losses) in zip(trainings, learned, strict=True)
        for (v, s, r), on, loss in zip(t.jobs(spec), chosen, losses, strict=True)
    ]


def _train(
    recording: BankRecording,
    family: SiteFamily,
    places: Sequence[Place],
    jobs: Sequence[Job],
    readout: Readout,
    spec: MaskSpec,
    state: Tensor,
) -> tuple[Bool[Tensor, "jobs sites"], list[float]]:
    """Which sites each job keeps, and its last loss."""
    generator = continued(state)
    like = trained_like(recording, places[0])
    start = torch.randn(len(jobs), len(family), 1, generator=generator)
    start *= torch.tensor([float(r > 0) for _, _, r in jobs])[:, None, None]
    masks = _Masks(family, places, recording, jobs, start.to(like), spec)
    labels = torch.stack([recording.bank.labels[v] for v, _, _ in jobs]).to(like.device)
    rounds = DasSpec(batch=spec.batch, least=spec.epochs, most=spec.epochs)
    final, _ = descend(recording, places, labels, readout, rounds, generator, masks)
    return masks.logits[:, :, 0].cpu() > 0, final.tolist()


class _Masks:
    """Masks as variants: fixed frames, learned gains."""

    def __init__(
        self,
        family: SiteFamily,
        places: Sequence[Place],
        recording: BankRecording,
        jobs: Sequence[Job],
        start: Float[Tensor, "jobs sites 1"],
        spec: MaskSpec,
    ) -> None:
        self.spec, self.jobs, self.logits = spec, jobs, start
        self.sparsity = torch.tensor([s for _, s, _ in jobs]).to(start)
        self.adam = Adam(self.logits, spec.clip)
        self.parts = []
        for p in places:
            like = trained_like(recording, p)
            self.parts.append((p, family.frames[p.name].to(like.device, like.dtype), family.indicator(p).to(start)))

    def edits(self, active: Tensor, progress: float) -> Sequence[EditBatch]:
        self.leaf = self.logits[active].requires_grad_()
        self.soft = torch.sigmoid(self.leaf[:, :, 0] / annealed(self.spec.temperatures, progress))
        return [EditBatch(place, frame, self.soft @ member) for place, frame, member in self.parts]

    def penalty(self, active: Tensor, pairs: Tensor | slice) -> Float[Tensor, " active"]:
        return self.sparsity[active] * self.soft.sum(dim=1)

    @torch.no_grad()
    def step(self, active: Tensor, progress: float) -> None:
        gradient = self.leaf.grad
        assert gradient is not None  # noqa: S101
        self.logits[active] -= self.spec.rate * self.adam.direction(active, gradient, per_entry=True)

    def describe(self, job: int) -> str:
        v, s, _ = self.jobs[job]
        return f"The mask at {', '.join(p.name for p, *_ in self.parts)} for '{v}' with λ = {s:g}"


def best_mask(problem: Problem, masks: Sequence[Mask]) -> Handle:
    """The mask with the best calibration score, as a handle."""
    variable = masks[0].variable
    weights = pair_weights(problem.calibration, variable, problem.score)
    families = list({id(m.family): m.family for m in masks}.values())
    scores = [0.0] * len(masks)
    for family in families:
        here = [j for j, m in enumerate(masks) if m.family is family]
        gains = torch.stack([masks[j].chosen for j in here]).double()
        found = scored(problem.calibration, family.edits(gains), variable, weights, problem.readout)
        for j, score in zip(here, found.tolist(), strict=True):
            scores[j] = score
    sizes = [
        sum(len(d) for s, on in zip(m.family.sites, m.chosen, strict=True) if on for _, d in s.parts) for m in masks
    ]
    best = min(range(len(masks)), key=lambda j: (-round(scores[j], 9), sizes[j], j))
    mask = masks[best]
    described = {
        "support": _support(mask.family),
        "K": int(mask.chosen.sum()),
        "sites": [s.name for s, on in zip(mask.family.sites, mask.chosen, strict=True) if on],
        "sparsity": mask.sparsity,
        "restart": mask.restart,
        "fit_loss": mask.loss,
        "calibration_score": scores[best],
        "trained": len(masks),
        "by_support": best_by([_support(m.family) for m in masks], scores),
        "by_size": best_by(map(str, sizes), scores),
    }
    return handle_from_edits(variable, mask.family.edits(mask.chosen[None].double()), 0, problem.subject, described)


def _support(family: SiteFamily) -> str:
    return family.places[0].name if len(family.places) == 1 else "all"
