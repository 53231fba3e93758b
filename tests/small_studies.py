"""Small studies that run in a second or two: an MLP on hierarchical equality, and an embedded language model."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from plot_ot.engine import Engine
from plot_ot.files.writing import Json
from plot_ot.handles import Handle
from plot_ot.methods import Method, MethodKind
from plot_ot.signatures import SignatureSpec, as_readout
from plot_ot.sites import blocks, pca_bands, whole_places
from plot_ot.stages.boundless import BoundlessSpec, TrainBoundless
from plot_ot.stages.calibrate import Search
from plot_ot.stages.choose import Calibrate, SelectPlaces, TrainDas
from plot_ot.stages.closed_form import ClosedForm
from plot_ot.stages.coupling import Localize, ScoreSites, attribution, brute_force
from plot_ot.stages.descent import DasSpec
from plot_ot.stages.masks import MaskSpec, TrainMask
from plot_ot.studies.prepared import Prepared
from plot_ot.studies.study import Study
from plot_ot.tasks import MultipleChoice
from plot_ot.tasks.heq import Backbone, build_net, draw_splits
from plot_ot.tasks.text_data import Sizes
from plot_ot.transport import Transport

SEARCH = Search((1, 2, 4), (0.5, 1.0, 2.0, 4.0), ties="loss")
SHORT = DasSpec(batch=16, most=3)
STAGE_A = (
    Localize((whole_places,), Transport("uot-one-sided", beta=(0.1, 1.0)), SignatureSpec(normalise="unit")),
    SelectPlaces(2),
)


def heq(pairs: int = 60, seed: int = 1000) -> Prepared:
    """An untrained net: it does not matter here whether anything is found."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        backbone = Backbone(seed, build_net(), torch.rand(100, 4) * 2 - 1, 0, (0.0,) * 4)
    splits, _ = draw_splits(backbone, "balanced", size=pairs, filtered=False)
    return Prepared("heq", "mlp", seed, backbone.subject(), splits, as_readout("softmax"))


HEQ_METHODS = (
    Method("plot", "", (Localize(), Calibrate(SEARCH, supports="place")), MethodKind.BASELINE),
    Method("das", "", (TrainDas((1, 4, 16), SHORT),), MethodKind.BASELINE),
    Method("boundless", "", (TrainBoundless((1e-2,), spec=BoundlessSpec(batch=16, epochs=2)),), MethodKind.BASELINE),
    Method("mask", "", (TrainMask(sparsities=(1e-2,), spec=MaskSpec(batch=16, epochs=2)),), MethodKind.BASELINE),
    Method("brute-force", "", (ScoreSites("brute-force", brute_force), Calibrate(SEARCH)), MethodKind.BASELINE),
)


def mcqa(pairs: int = 24, seed: int = 1000) -> MultipleChoice:
    return MultipleChoice("planted-1000", sizes=Sizes(pairs, pairs // 2, pairs // 2, pairs // 2))


SPEC = SignatureSpec("family_mean", "unit_family", centre=True)
MCQA_METHODS = (
    Method("plot", "", STAGE_A, MethodKind.BASELINE),
    Method(
        "plot-native",
        "",
        (*STAGE_A, Localize((blocks(16),), spec=SPEC, coupling="place"), Calibrate(SEARCH)),
        MethodKind.BASELINE,
    ),
    Method(
        "plot-pca", "", (*STAGE_A, Localize((pca_bands(4),), coupling="place"), Calibrate(SEARCH)), MethodKind.BASELINE
    ),
    Method("closed-form", "", (*STAGE_A, ClosedForm()), MethodKind.BASELINE),
    Method("das", "", (TrainDas((8, 64), SHORT, every=3),), MethodKind.BASELINE),
    Method(
        "attribution", "", (ScoreSites("attribution", attribution, whole_places), SelectPlaces(2)), MethodKind.BASELINE
    ),
)


def _never(draw: int) -> Method:
    raise AssertionError("baselines are not judged")


def run_all(
    prepared: Prepared, methods: Sequence[Method], engine: Engine | None = None, shard: int | None = None
) -> dict[str, tuple[Json, dict[str, Handle]]]:
    """Every method's records and handles, without what time it took."""
    study, found = Study(prepared, engine, shard=shard), {}
    for method in methods:
        unit, handles = study.run(method, _never)
        found[method.name] = {k: v for k, v in unit.items() if k != "runtimes"}, handles
    return found


def bits(found: dict[str, tuple[Json, dict[str, Handle]]]) -> dict[str, object]:
    """Everything that makes a result, down to the last bit, as plain values."""
    handles = {}
    for name, (_, made) in found.items():
        for v, handle in made.items():
            tensors = [(e.place.name, e.gains, e.frame.read, e.frame.write) for e in handle.edits]
            handles[name, v] = (
                [
                    [None if t is None else t.tolist() if isinstance(t, torch.Tensor) else t for t in edit]
                    for edit in tensors
                ],
                dict(handle.chosen),
            )
    return {"records": {name: unit for name, (unit, _) in found.items()}, "handles": handles}


def choices(found: dict[str, tuple[Json, dict[str, Handle]]]) -> dict[str, object]:
    """What was chosen and how it did, without numbers that end in rounding errors."""
    return {
        name: (
            [(r["variable"], r["bank"], r["accuracy"]) for r in unit["records"]],
            {v: handle.places for v, handle in handles.items()},
        )
        for name, (unit, handles) in found.items()
    }
