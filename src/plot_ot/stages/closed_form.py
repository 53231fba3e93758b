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

from collections.abc import Sequence
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
from plot_ot.subjects import BankRecording, Place

RULES = ("alone", "siblings", "frontier")


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

    def __call__(self, problem: Problem, state: State) -> State:
        handles = {}
        for v in problem.variables:
            with problem.clock.part("closed_form"):
                candidates = [c for p in state.places[v] for c in self.candidates(problem.fit, p, v)]
            if not candidates:
                raise PlotError(
                    f"No pair of the fit bank moves the states at {', '.join(p.name for p in state.places[v])} where "
                    f"'{v}' changes: base and source states are all equal, or there is nothing to regress on."
                )
            with problem.clock.part("calibration"):
                weights = pair_weights(problem.calibration, v, problem.score)
                tries = [(c.place, c.frame) for c in candidates]
                scores = scored_frames(problem.calibration, tries, self.strengths, v, weights, problem.readout)
            at, k = min(
                (scores >= scores.max() - 1e-9).nonzero().tolist(),
                key=lambda t: (candidates[t[0]].frame.rank, self.strengths[t[1]], t[0]),
            )
            best, reached = candidates[at], scores.max(dim=1).values.tolist()
            chosen = {
                "support": best.place.name,
                "form": best.name,
                "rule": best.rule,
                "strength": self.strengths[k],
                "calibration_score": float(scores[at, k]),
                "at_edge": edge_of(self.strengths, k),
                "by_form": best_by([c.kind for c in candidates], reached),
                "by_support": best_by([c.place.name for c in candidates], reached),
                "by_size": best_by([str(c.frame.rank) for c in candidates], reached),
            }
            handles[v] = handle_from_edits(v, best.edits(self.strengths), k, problem.subject, chosen)
        return replace(state, handles=handles)

    def forecast(self, ahead: Forecast) -> None:
        for v, own in ahead.open.items():
            rules = len({cell_variables(ahead.scene.fit, v, rule) for rule in RULES})
            for p, chance in own.items():
                forms = sum(k < p.width for k in self.sizes) + 2 * rules * len(self.ridges)
                ahead.add("calibration", p, ahead.scene.calibration, forms * len(self.strengths), chance)

    def candidates(self, fit: BankRecording, place: Place, variable: str) -> list[Form]:
        """Every closed form at a place, by rule for the cells."""
        base, source = fit.base_at(place).double().cpu(), fit.source_at(place).double().cpu()
        difference = source - base
        if not difference.any():  # a dead place has nothing to offer
            return []
        found = [
            Form(place, "contrastive", k, "alone", frame)
            for k, frame in contrastive(difference, fit.bank.changed[variable], self.sizes)
        ]
        seen: list[tuple[str, ...]] = []
        for rule in RULES:
            others = cell_variables(fit, variable, rule)
            if others in seen:  # the same cells under another name
                continue
            seen.append(others)
            shift = cell_shift(fit, place, variable, others)
            if shift is None:
                continue
            known, delta = shift
            for ridge in self.ridges:
                frame = barycentric(difference[known], delta, ridge)
                if frame is not None:
                    found.append(Form(place, "barycentric", ridge, rule, frame))
                    found.append(Form(place, "discriminant", ridge, rule, leading(frame)))
        return found


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


def cell_shift(
    fit: BankRecording, place: Place, variable: str, others: Sequence[str]
) -> tuple[Int[Tensor, " known"], Float[Tensor, "known d"]] | None:
    """μ(z_s, f_b) - μ(z_b, f_b) for the pairs whose two cells both occur among the fit inputs."""
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
    inputs = torch.cat([fit.base_rows, fit.source_rows]).cpu()
    of_input = torch.zeros(int(inputs.max()) + 1, dtype=torch.long)
    of_input[inputs] = torch.cat([of_base, of_source])
    distinct = inputs.unique()
    states = fit.store.activations[place.name].double().cpu()[distinct]
    where, count = of_input[distinct], torch.bincount(of_input[distinct], minlength=int(cell.max()) + 1)
    mean = torch.zeros(len(count), states.shape[1], dtype=torch.float64).index_add(0, where, states)
    mean = mean / count.clamp(min=1)[:, None]
    known = (count[of_swapped] > 0).nonzero().squeeze(1)
    if not len(known):
        return None
    return known, mean[of_swapped[known]] - mean[of_base[known]]


def finest_shift(
    fit: BankRecording, place: Place, variable: str, least: float = 0.9
) -> tuple[Int[Tensor, " known"], Float[Tensor, "known d"]]:
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


def barycentric(difference: Float[Tensor, "pairs d"], shift: Float[Tensor, "pairs d"], ridge: float) -> Frame | None:
    """The ridge regression of the shift on the difference, as the oblique frame of its singular vectors."""
    d = difference.shape[1]
    gram = difference.T @ difference
    scale = float(gram.diagonal().mean())
    if not scale > 0:
        raise PlotError("Base and source states are all equal at this place: there is nothing to regress on.")
    m = torch.linalg.solve(gram + ridge * scale * torch.eye(d, dtype=gram.dtype), difference.T @ shift).T
    u, s, vt = torch.linalg.svd(m)
    rank = int((s > 1e-3 * s[0]).sum())
    if not s[0] > 0:
        return None
    return _oblique(vt[:rank].T, u[:, :rank] * s[:rank], "barycentric")


def leading(frame: Frame) -> Frame:
    """The strongest single direction of an oblique frame."""
    assert frame.read is not None and frame.write is not None  # noqa: S101, PT018
    return _oblique(frame.read[:, :1], frame.write[:, :1], "discriminant")


def contrastive(difference: Float[Tensor, "pairs d"], changed: Tensor, sizes: Sequence[int]) -> list[tuple[int, Frame]]:
    """Leading directions of E[δδᵀ | z changes] - E[δδᵀ | z stays], for several sizes."""
    moved, kept = difference[changed], difference[~changed]
    if not len(moved) or not len(kept):
        return []
    contrast = moved.T @ moved / len(moved) - kept.T @ kept / len(kept)
    _, vectors = torch.linalg.eigh(contrast)
    basis = vectors.flip(1).to(torch.get_default_dtype())
    return [(k, Frame.orthonormal(basis[:, :k].contiguous(), "contrastive")) for k in sizes if k < basis.shape[0]]


def _oblique(read: Tensor, write: Tensor, kind: str) -> Frame:
    dtype = torch.get_default_dtype()
    return Frame.oblique(read.to(dtype).contiguous(), write.to(dtype).contiguous(), kind)
