"""What a study found, as rows of plain JSON: the only place that knows how results are written down."""

from __future__ import annotations

from dataclasses import asdict

from jaxtyping import Bool
from torch import Tensor

from plot_ot.files.writing import Json
from plot_ot.handles import Handle
from plot_ot.judging.intervals import Bootstrap
from plot_ot.judging.naturalness import Naturalness
from plot_ot.judging.profile import effective_pairs, interval
from plot_ot.stages.calibrate import pair_weights
from plot_ot.stages.problem import Problem, State
from plot_ot.subjects import BankRecording, Place
from plot_ot.transport import Coupling


def accuracy_row(key: Json, variable: str, bank: str, boot: Bootstrap, right: Bool[Tensor, " pairs"]) -> Json:
    """A handle's or a control's accuracy on one test bank, with its interval, overall and by family."""
    overall = boot.accuracy(right)
    return {
        **key,
        "variable": variable,
        "bank": bank,
        "accuracy": overall.value,
        "pairs": overall.pairs,
        "interval": [overall.low, overall.high],
        "families": {f: asdict(a) for f, a in boot.by_family(right).items()},
    }


def selection_row(key: Json, handle: Handle, natural: Naturalness) -> Json:
    """What calibration chose for a variable."""
    return {
        **key,
        "variable": handle.variable,
        "size": handle.size,
        "places": handle.places,
        "chosen": dict(handle.chosen),
        "evidence": asdict(natural),
    }


def transfer_row(key: Json, variable: str, bank: str, right: Bool[Tensor, " pairs"]) -> Json:
    """A handle's accuracy on a test bank of another distribution."""
    return {**key, "variable": variable, "bank": bank, "accuracy": float(right.double().mean()), "pairs": len(right)}


def coupling_rows(key: Json, stage: int, state: State) -> list[Json]:
    """The couplings of one localization stage, each once, with where its sites are and how they did alone."""
    norms = {s.name: float(n) for m in state.signatures for s, n in zip(m.family.sites, m.column_norms, strict=True)}
    seen: dict[int, Json] = {}
    for variable, candidates in state.candidates.items():
        patched = state.patched.get(variable, {})
        for c in candidates:
            sites = c.family.sites
            found = seen.setdefault(
                id(c.coupling),
                {
                    **key,
                    "stage": stage,
                    "support": c.label,
                    "variables": c.coupling.variables,
                    "sites": c.coupling.sites,
                    "places": [s.place.name for s in sites],
                    "tokens": [s.place.token for s in sites] if any(s.more for s in sites) else None,
                    "spans": [[min(s.directions), max(s.directions) + 1] for s in sites],
                    "frame": c.family.frames[sites[0].place.name].kind,
                    "plan": c.coupling.plan.tolist(),
                    "kind": c.coupling.kind,
                    "epsilon": c.coupling.epsilon,
                    "beta": c.coupling.beta,
                    "scale": c.coupling.scale,
                    "unit": c.coupling.unit,
                    "converged": c.coupling.converged,
                    "row_error": c.coupling.row_error,
                    "column_error": c.coupling.column_error,
                    "flags": [asdict(f) for f in c.coupling.flags],
                    **_approximations(c.coupling),
                    "calibration": {},
                },
            )
            if norms:
                found["raw_norms"] = [norms[s.name] for s in sites]
            if patched and all(len(s.directions) == s.place.width and not s.more for s in sites):
                found["calibration"][variable] = [patched.get(s.place.name) for s in sites]
    return list(seen.values())


def _approximations(coupling: Coupling) -> Json:
    """What is known of a coupling's errors, where its signatures were not all exact or had error bars."""
    known = {"spread": coupling.spread, "exact": coupling.exact}
    told: Json = {name: value.tolist() for name, value in known.items() if value is not None}
    return told | ({"weights": dict(coupling.weights)} if coupling.weights is not None else {})


def surface_rows(key: Json, state: State) -> list[Json]:
    """The (K, λ) grid each handle was chosen from, of the coupling that won."""
    return [
        {
            **key,
            "variable": v,
            "support": c.handle.chosen["support"],
            "epsilon": c.handle.chosen["epsilon"],
            "beta": c.handle.chosen["beta"],
            "sizes": c.sizes,
            "strengths": c.strengths,
            "scores": [[round(x, 4) for x in row] for row in c.surface[c.candidate].tolist()],
            "K": c.handle.chosen["K"],
            "strength": c.handle.chosen["strength"],
        }
        for v, c in state.calibrations.items()
        if state.handles[v].edits is c.handle.edits  # not one that was found elsewhere
    ]


def bank_note(key: Json, calibration: BankRecording, variables: tuple[str, ...], places: tuple[Place, ...]) -> Json:
    """How many pairs there are to choose by, and the places that were searched."""
    bank = calibration.bank
    sensitive = {v: int(bank.changed[v].sum()) for v in variables}
    causal = bank.causal
    known = {v: {"meaning": causal.meanings.get(v, ""), "parents": causal.mechanisms[v].parents} for v in variables}
    return {
        **key,
        "variables": known,
        "calibration": {"pairs": len(bank), "sensitive": sensitive},
        "places": [_described(p) for p in places],
    }


def _described(place: Place) -> Json:
    named = {"position_label": place.token} if "@" in place.name or place.position == -1 else {}
    return {**asdict(place), **named}


def profile_rows(key: Json, state: State, problem: Problem) -> list[Json]:
    """The best calibration score inside every place that was tried, in the network's order."""
    calibration, rows = problem.calibration, []
    for v, scores in state.profile.items():
        pairs = effective_pairs(calibration.bank, pair_weights(calibration, v, problem.score))
        for p in problem.subject.places:
            if p.name in scores:
                low, high = interval(scores[p.name], pairs)
                where = {"variable": v, "place": p.name, "token": p.token, "layer": p.layer}
                rows.append({**key, **where, "score": scores[p.name], "low": low, "high": high})
    return rows
