"""What campaigns are made of: kinds of networks by name, and the methods that end in a handle."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

from plot_ot.handles import Handle
from plot_ot.methods import FINE, SEARCH, Method, MethodKind, natural_das
from plot_ot.sites import pca_components
from plot_ot.stages.choose import Calibrate, TrainDas
from plot_ot.stages.closed_form import ClosedForm
from plot_ot.stages.coupling import Localize
from plot_ot.stages.descent import DasSpec
from plot_ot.stages.newton import NewtonHandles
from plot_ot.stages.problem import Problem, State
from truth import compiled, illusions, kinds, nulls, older
from truth.known import Known

COMPILED: dict[str, Callable[[int], Known]] = {
    "compiled": compiled.there,
    "rival": compiled.rival,
    "dormant": compiled.dormant,
    "decoder": partial(compiled.there, twin=False),
}
KINDS: dict[str, Callable[[int], Known]] = {
    **COMPILED,
    **{kind: partial(kinds.planted, kind=kind) for kind in ("plant", "quiet", "copies", "oblique", "echo")},
    "line": illusions.line,
    "subspace": older.in_plane,
    "neurons": older.in_neurons,
    **{f"decoder {kind}": partial(older.in_language_model, kind) for kind in ("token", "layer", "head")},
    "apart": kinds.copies_apart,
    "spread": kinds.spread,
    "half": kinds.half_carried,
    "parents": partial(kinds.beside_parents, shared=False),
    "parents shared": partial(kinds.beside_parents, shared=True),
    "gate": kinds.gate_pair,
    "absent": kinds.absent,
    "absent neurons": partial(older.in_neurons, aligned=False),
    "absent decoder layer": partial(older.in_language_model, "layer", aligned=False),
    "illusion: silent": illusions.silent_way,
    "illusion: borrowed": illusions.borrowed_way,
    "illusion: two places": illusions.silent_ways,
    **{f"fresh {network}": partial(nulls.reinitialised, network) for network in nulls.NETWORKS},
    **{f"shuffled {network}": partial(nulls.shuffled, network) for network in nulls.NETWORKS},
}

_DAS = TrainDas(dimensions=(1, 2, 4, 8), spec=DasSpec(most=30))
_OBLIQUE = TrainDas(dimensions=(1, 2, 4, 8), spec=DasSpec("oblique", rate=0.02, most=60))
METHODS: dict[str, str | Method] = {
    "plot": "plot",
    "plot-layered": "plot-layered",
    "plot-pca": Method(
        "plot-pca",
        "one coupling per place over its principal components",
        (Localize((pca_components(),), FINE, coupling="place"), Calibrate(SEARCH)),
    ),
    "closed-form": Method("closed-form", "oblique maps in closed form at every place", (ClosedForm(),)),
    "newton": Method("newton", "closed forms, then Gauss-Newton, at every place", (ClosedForm(), NewtonHandles())),
    "newton together": Method(
        "newton-together", "the same, over two places where one will not do", (ClosedForm(), NewtonHandles(together=2))
    ),
    "das-natural": Method("das-natural", "DAS kept natural, four sizes", (natural_das(_DAS),), kind=MethodKind.DAS),
    "das": Method("das", "DAS at every place, four sizes", (_DAS,), kind=MethodKind.DAS),
    "das-oblique": Method("das-oblique", "oblique DAS at every place, four sizes", (_OBLIQUE,), kind=MethodKind.DAS),
}

GIVEN = "given"
"""The handles by construction (`Known.handles`) in place of a search: what is judged is the verdict alone."""


@dataclass(frozen=True)
class Give:
    """A stage that finds what it was given; nothing of it can be ranked at random."""

    learner: ClassVar[bool] = True

    handles: Mapping[str, Handle]

    def __call__(self, problem: Problem, state: State) -> State:
        return replace(state, handles=dict(self.handles))


def method_for(name: str, known: Known) -> str | Method:
    """A method by name, for a network."""
    if name == GIVEN:
        return Method(GIVEN, "handles by construction", (Give(known.handles),))
    return METHODS[name]


NULLS = [name for name in KINDS if name.startswith(("fresh", "shuffled"))]
DECEPTIVE = ["illusion: silent", "illusion: borrowed", "oblique", "echo", "line"]
CAMPAIGNS: dict[str, tuple[list[str], list[str]]] = {
    "plants": (
        ["plant", "quiet", "copies", "oblique", "subspace", "neurons", "decoder layer", "decoder token"],
        ["plot"],
    ),
    "apart": (["apart"], ["plot"]),
    "several": (["apart", "spread", "illusion: two places"], [GIVEN, "newton together"]),
    "half": (["half"], ["plot"]),
    "absent": (["absent", "absent neurons", "absent decoder layer"], ["plot"]),
    "illusions": (DECEPTIVE, [GIVEN, "plot", "closed-form", "newton", "das", "das-oblique"]),
    "parents": (["parents", "parents shared"], ["plot"]),
    "gates": (["gate"], ["plot"]),
    "nulls": (NULLS, [name for name in METHODS if name != "newton together"]),
}
"""Name -> kinds of networks, methods."""
