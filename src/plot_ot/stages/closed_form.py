"""Handles without gradients: oblique frames in closed form, from recorded states and the causal model's own values.

Write z for a variable's value, f for its frontier's (`CausalModel.frontier`), and μ(z, f) for the mean recorded state
of the inputs with these values. If the state at a place is a noisy code of (z, f), the swap z_b -> z_s moves its mean
by μ(z_s, f_b) - μ(z_b, f_b). The **barycentric map** is the linear map of a_s - a_b that comes closest,

    M = argmin_M  Σ_pairs | M (a_s - a_b) - (μ(z_s, f_b) - μ(z_b, f_b)) |²  +  ρ |M|²,

a ridge regression. Its singular vectors are an oblique frame, M = W Rᵀ; its leading one is the **discriminant**, of
rank one. **Contrastive** directions are those along which pairs that change z differ most beyond pairs that do not.

What this uses beyond output effects: the values of z and f for the fit inputs. It never looks at the network's weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from plot_ot.abstract.causal_model import Values
from plot_ot.edits import EditBatch, Frame
from plot_ot.errors import PlotError
from plot_ot.handles import handle_from_edits
from plot_ot.stages.calibrate import edge_of, pair_weights, scored_frames
from plot_ot.stages.forecast import Forecast
from plot_ot.stages.problem import Problem, State, best_by
from plot_ot.stages.ridge import Differences, Factorized, Regression
from plot_ot.subjects import BankRecording, Place

RULES = ("alone", "siblings", "frontier")
Shift = tuple[Int[Tensor, " known"], Float[Tensor, "known d"]]
"""The pairs whose mean shift is known, and what it is."""


@dataclass(frozen=True)
class ClosedForm:
    """Closed-form handles at the places open to each variable; calibration picks the place, the rule and the form."""

    learner: ClassVar[bool] = True
    ridges: tuple[float, ...] = (1e-3, 1e-2, 1e-1, 1.0)
    """ρ, in units of the mean variance of a_s - a_b."""
    sizes: tuple[int, ...] = (1, 2, 4)
    """Dimensions of contrastive subspaces."""
    strengths: tuple[float, ...] = (1.0, 1.25, 1.5, 2.0)
    """λ: a mean shift may stop short of a decision that the network makes late."""
    further: tuple[float, ...] = (2.5, 3.0, 4.0)
    """Tried on the best form where the largest λ is best."""

    def __call__(self, problem: Problem, state: State) -> State:
        handles = {}
        with problem.clock.part("closed_form"):
            found = self._everywhere(problem.fit, state)
        for v in problem.variables:
            candidates = [c for p in state.places[v] for c in found[v, p]]
            if not candidates:
                raise PlotError(
                    f"No pair of the fit bank moves the states at {', '.join(p.name for p in state.places[v])} where "
                    f"'{v}' changes: base and source states are all equal, or there is nothing to regress on."
                )
            with problem.clock.part("calibration"):
                weights = pair_weights(problem.calibration, v, problem.score)
                tries = [(c.place, c.frame) for c in candidates]
                strengths = self.strengths
                scores = scored_frames(problem.calibration, tries, strengths, v, weights, problem.readout)
                at, k = min(
                    (scores >= scores.max() - 1e-9).nonzero().tolist(),
                    key=lambda t: (candidates[t[0]].frame.rank, strengths[t[1]], t[0]),
                )
                reached = scores.max(dim=1).values
                if self.further and strengths[k] == max(strengths) > 1:  # the grid was too short
                    [more] = scored_frames(problem.calibration, [tries[at]], self.further, v, weights, problem.readout)
                    strengths, own = (*strengths, *self.further), torch.cat([scores[at], more])
                    k = min((own >= own.max() - 1e-9).nonzero()[:, 0].tolist(), key=strengths.__getitem__)
                    reached[at] = own.max()
            best, by = candidates[at], reached.tolist()
            chosen = {
                "support": best.place.name,
                "form": best.name,
                "rule": best.rule,
                "strength": strengths[k],
                "calibration_score": by[at],
                "at_edge": edge_of(strengths, k),
                "by_form": best_by([c.kind for c in candidates], by),
                "by_support": best_by([c.place.name for c in candidates], by),
                "by_size": best_by([str(c.frame.rank) for c in candidates], by),
            }
            handles[v] = handle_from_edits(v, best.edits(strengths), k, problem.subject, chosen)
        return replace(state, handles=handles)

    def forecast(self, ahead: Forecast) -> None:
        for v, own in ahead.open.items():
            rules = len({cell_variables(ahead.scene.fit, v, rule) for rule in RULES})
            for p, chance in own.items():
                forms = sum(k < p.width for k in self.sizes) + 2 * rules * len(self.ridges)
                ahead.add("calibration", p, ahead.scene.calibration, forms * len(self.strengths), chance)

    def _everywhere(self, fit: BankRecording, state: State) -> dict[tuple[str, Place], list[Form]]:
        """The closed forms of every variable at every place that is open to it: a place's states are taken apart once,
        a variable's cells are found once."""
        cells = {v: different_cells(fit, v) for v in state.places}
        found = {}
        for place in dict.fromkeys(p for open_to in state.places.values() for p in open_to):
            at = _difference(fit, place)
            for v, open_to in state.places.items():
                if place in open_to:
                    found[v, place] = self._forms(fit, place, v, at, cells[v])
        return found

    def candidates(self, fit: BankRecording, place: Place, variable: str) -> list[Form]:
        """Every closed form at a place, by rule for the cells."""
        return self._forms(fit, place, variable, _difference(fit, place), different_cells(fit, variable))

    def _forms(
        self, fit: BankRecording, place: Place, variable: str, at: Factorized, cells: Mapping[str, Cells]
    ) -> list[Form]:
        if not at.rows.any():  # a dead place has nothing to offer
            return []
        states = fit.store.activations[place.name]
        found = [
            Form(place, "contrastive", k, "alone", frame)
            for k, frame in _contrastive(at.whole, fit.bank.changed[variable], self.sizes)
        ]
        for rule, own in cells.items():
            shift = own.shift(states)
            if shift is None:
                continue
            known, delta = shift
            regression = at.of(known).regression(delta)
            for ridge in self.ridges:
                frame = _barycentric(regression, ridge)
                if frame is not None:
                    found.append(Form(place, "barycentric", ridge, rule, frame))
                    found.append(Form(place, "discriminant", ridge, rule, leading(frame)))
        return found


SCOUT = ClosedForm(ridges=(1e-1,), sizes=(1, 2), strengths=(1.0, 2.0), further=())
"""A few forms, to see at little cost whether there is something."""


@dataclass(frozen=True)
class Form:
    """A closed-form frame at a place."""

    place: Place
    kind: str
    """`contrastive`, `barycentric` or `discriminant`."""
    setting: float
    """How many directions it has, if contrastive; else ρ."""
    rule: str
    frame: Frame

    @property
    def name(self) -> str:
        """What reports call it."""
        return f"{self.kind} {self.setting:g}"

    def edits(self, strengths: Sequence[float]) -> list[EditBatch]:
        """One variant per strength, the same for all directions."""
        gains = torch.tensor(strengths).unsqueeze(1).expand(-1, self.frame.rank)
        return [EditBatch(self.place, self.frame, gains)]


def cell_variables(fit: BankRecording, variable: str, rule: str) -> tuple[str, ...]:
    """Which other variables define the cells: none; the frontier's members that share a parent; the whole frontier."""
    causal = fit.bank.causal
    if rule == "alone":
        return ()
    frontier = causal.frontier(variable)
    if rule == "frontier":
        return frontier
    return tuple(f for f in frontier if set(causal.parents(f)) & set(causal.parents(variable)))


@dataclass(frozen=True)
class Cells:
    """The cells (z, f) of a variable and of what else defines them, of fit inputs and pairs; they know no place."""

    inputs: Int[Tensor, " inputs"]
    """The distinct fit inputs."""
    of_input: Int[Tensor, " inputs"]
    of_base: Int[Tensor, " pairs"]
    of_swapped: Int[Tensor, " pairs"]
    """The cell (z_s, f_b)."""
    count: Int[Tensor, " cells"]
    """How many of the inputs are in each cell."""

    @classmethod
    def of(cls, fit: BankRecording, variable: str, others: Sequence[str]) -> Cells:
        """The cells of a variable and these others."""
        values = [fit.bank.causal.run(side) for side in (fit.bank.base, fit.bank.source)]
        z_base, z_source = value_codes(values, variable)
        size, total = len(fit), int(torch.cat([z_base, z_source]).max()) + 1
        f_base, f_source = torch.zeros_like(z_base), torch.zeros_like(z_source)
        for other in others:
            code = value_codes(values, other)
            most = int(torch.cat(code).max()) + 1
            f_base, f_source = (f * most + c for f, c in zip((f_base, f_source), code, strict=True))
        cells = [f * total + z for f, z in ((f_base, z_base), (f_source, z_source), (f_base, z_source))]
        _, cell = torch.unique(torch.cat(cells), return_inverse=True)
        of_base, of_source, of_swapped = cell.split(size)
        rows = torch.cat([fit.base_rows, fit.source_rows]).cpu()
        of_row = torch.zeros(int(rows.max()) + 1, dtype=torch.long)
        of_row[rows] = torch.cat([of_base, of_source])
        inputs = rows.unique()
        count = torch.bincount(of_row[inputs], minlength=int(cell.max()) + 1)
        return cls(inputs, of_row[inputs], of_base, of_swapped, count)

    def shift(self, activations: Float[Tensor, "rows d"]) -> Shift | None:
        """μ(z_s, f_b) - μ(z_b, f_b) for the pairs whose two cells both occur among the inputs; None where none does."""
        known = (self.count[self.of_swapped] > 0).nonzero().squeeze(1)
        if not len(known):
            return None
        states = activations.cpu()[self.inputs].double()
        mean = torch.zeros(len(self.count), states.shape[1], dtype=torch.float64).index_add(0, self.of_input, states)
        mean = mean / self.count.clamp(min=1)[:, None]
        return known, mean[self.of_swapped[known]] - mean[self.of_base[known]]


def different_cells(fit: BankRecording, variable: str, rules: Sequence[str] = RULES) -> dict[str, Cells]:
    """A variable's cells by rule, without rules that name the same cells as one before."""
    by_others: dict[tuple[str, ...], str] = {}
    for rule in rules:
        by_others.setdefault(cell_variables(fit, variable, rule), rule)
    return {rule: Cells.of(fit, variable, others) for others, rule in by_others.items()}


def cell_shift(fit: BankRecording, place: Place, variable: str, others: Sequence[str]) -> Shift | None:
    """μ(z_s, f_b) - μ(z_b, f_b) at a place, for the pairs where it is known."""
    return Cells.of(fit, variable, others).shift(fit.store.activations[place.name])


def finest_shift(fit: BankRecording, place: Place, variable: str, least: float = 0.9) -> Shift:
    """`cell_shift` by the rule of the most variables whose cells are known for at least a share of the pairs."""
    for rule in reversed(RULES):
        shift = cell_shift(fit, place, variable, cell_variables(fit, variable, rule))
        if shift is not None and (len(shift[0]) >= least * len(fit) or rule == RULES[0]):
            return shift
    raise PlotError(f"No fit input has a value of '{variable}' that a source has: nothing is known of its swaps.")


def value_codes(sides: Sequence[Values], variable: str) -> list[Int[Tensor, " rows"]]:
    """A variable's values, of any shape, as one integer per row; equal codes, equal values, on all sides."""
    joint = torch.cat([values[variable] for values in sides])
    code: Tensor = torch.unique(joint, dim=None if joint.ndim == 1 else 0, return_inverse=True)[1]
    return list(code.split([len(values[variable]) for values in sides]))


def _difference(fit: BankRecording, place: Place) -> Factorized:
    """a_s - a_b of every fit pair at a place, in double precision on the CPU."""
    return Factorized(fit.source_at(place).double().cpu() - fit.base_at(place).double().cpu())


def barycentric(difference: Float[Tensor, "pairs d"], shift: Float[Tensor, "pairs d"], ridge: float) -> Frame | None:
    """The ridge regression of the shift on the difference, as the oblique frame of its singular vectors."""
    return _barycentric(Differences.of(difference).regression(shift), ridge)


def _barycentric(regression: Regression, ridge: float) -> Frame | None:
    found = regression.factors(ridge, 1e-3)
    return None if found is None else _oblique(*found, "barycentric")


def leading(frame: Frame) -> Frame:
    """The strongest single direction of an oblique frame."""
    assert frame.read is not None and frame.write is not None  # noqa: S101, PT018
    return _oblique(frame.read[:, :1], frame.write[:, :1], "discriminant")


def contrastive(difference: Float[Tensor, "pairs d"], changed: Tensor, sizes: Sequence[int]) -> list[tuple[int, Frame]]:
    """Leading directions of E[δδᵀ | z changes] - E[δδᵀ | z stays], for several sizes."""
    return _contrastive(Differences.of(difference), changed, sizes)


def _contrastive(difference: Differences, changed: Tensor, sizes: Sequence[int]) -> list[tuple[int, Frame]]:
    if not changed.any() or changed.all():
        return []
    basis = difference.contrast(changed, max(sizes)).to(torch.get_default_dtype())
    most = min(basis.shape[1], basis.shape[0] - 1)
    return [(k, Frame.orthonormal(basis[:, :k].contiguous(), "contrastive")) for k in sizes if k <= most]


def _oblique(read: Tensor, write: Tensor, kind: str) -> Frame:
    dtype = torch.get_default_dtype()
    return Frame.oblique(read.to(dtype).contiguous(), write.to(dtype).contiguous(), kind)
