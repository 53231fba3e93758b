"""Learned masks: they find exactly the planted sites among distractors, over neurons, PCA, SAE features and heads."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from nets import orthonormal, planted_neurons, planted_plane
from plot_ot.edits import Frame
from plot_ot.signatures import as_readout
from plot_ot.sites import blocks, neurons, subspaces, whole_places
from plot_ot.sites.sae import SAE, sae_features
from plot_ot.stages.calibrate import correct
from plot_ot.stages.masks import MaskSpec, MaskTraining, TrainMask, train_masks
from plot_ot.stages.problem import Problem, State
from plot_ot.subjects import BankRecording, record
from refusals import assert_refused

READOUT = as_readout("softmax")
SPEC = MaskSpec(batch=100, epochs=30)


def problem_of(planted, seed: int = 1000, score: str = "balanced") -> tuple[Problem, BankRecording]:
    fit, calibration, fresh = record(planted.subject, *planted.banks(240, 240, 240, seed=seed))
    return Problem(planted.subject, fit, calibration, ("p", "q"), READOUT, seed, score), fresh


@pytest.mark.parametrize("seed", [1000, 1001, 1002])
@pytest.mark.parametrize("copies", [1, 2, 3])
def test_the_mask_is_exactly_the_planted_neurons(copies, seed):
    planted = planted_neurons(copies, seed)
    problem, fresh = problem_of(planted, seed)
    state = TrainMask(spec=SPEC)(problem, State.start(problem))
    for v, truth in planted.truth.items():
        handle = state.handles[v]
        assert set(handle.chosen["sites"]) == truth
        assert handle.size == copies
        [edit] = handle.edits
        assert set(edit.gains.tolist()) == {0.0, 1.0}
        assert correct(fresh, handle, READOUT).all()
        assert handle.chosen["support"] == "layer2"
        assert set(handle.chosen["by_support"]) == {"layer1", "layer2", "layer3"}


def test_one_mask_over_all_places_finds_the_same_neurons():
    planted = planted_neurons(2, 1000)
    problem, fresh = problem_of(planted)
    state = TrainMask(spec=SPEC, over="all", sparsities=(1e-2,))(problem, State.start(problem))
    for v, truth in planted.truth.items():
        assert truth <= set(state.handles[v].chosen["sites"])
        assert correct(fresh, state.handles[v], READOUT).all()


def test_places_closed_to_a_variable_are_not_searched():
    planted = planted_neurons(1, 1000)
    problem, _ = problem_of(planted)
    first, second, third = planted.subject.places
    start = replace(State.start(problem), places={"p": (third,), "q": (first, second)})
    state = TrainMask(spec=replace(SPEC, epochs=3))(problem, start)
    assert set(state.handles["p"].chosen["by_support"]) == {"layer3"}
    assert set(state.handles["q"].chosen["by_support"]) == {"layer1", "layer2"}


def test_directions_of_any_frame_are_masked():
    """A rotated basis with each plane in two of its directions, and a dictionary with the corners."""
    planted = planted_plane(1000)
    problem, fresh = problem_of(planted)
    basis = torch.cat([planted.truth["p"], planted.truth["q"]], dim=1)
    mixed = basis[:, [2, 0, 3, 1]] @ torch.block_diag(orthonormal(1, 1, 1), *[torch.eye(1)] * 3)
    rest = torch.linalg.qr(torch.cat([mixed, orthonormal(2, 8, 8)], dim=1))[0][:, 4:8]
    frame = Frame.orthonormal(torch.cat([mixed, rest], dim=1))
    menu = subspaces({"layer1": frame}, {"layer1": {str(k): [k] for k in range(8)}})
    place = planted.subject.places[0]
    start = replace(State.start(problem), places=dict.fromkeys(("p", "q"), (place,)))
    state = TrainMask(menu, spec=SPEC)(problem, start)
    assert set(state.handles["p"].chosen["sites"]) == {"layer1.1", "layer1.3"}
    assert set(state.handles["q"].chosen["sites"]) == {"layer1.0", "layer1.2"}
    corners = planted.subject.net[0].weight.detach()
    spare = torch.nn.functional.normalize(torch.randn(8, 6, generator=torch.Generator().manual_seed(1)), dim=0)
    directions = torch.cat([corners, spare], dim=1)
    sae = SAE.of(directions, directions.T.contiguous(), torch.tensor([0.0] * 12 + [-1.2] * 6), torch.zeros(8))
    state = TrainMask(sae_features(sae, "layer1"), spec=SPEC)(problem, start)
    for v, first in (("p", 0), ("q", 3)):
        handle = state.handles[v]
        assert set(handle.edits[0].frame.encoder.features.tolist()) == {first, first + 1, first + 2}
        assert correct(fresh, handle, READOUT).all()


def test_sites_of_several_directions_stand_or_fall_together():
    planted = planted_neurons(1, 1000)
    problem, _ = problem_of(planted)
    state = TrainMask(blocks(2), spec=SPEC)(problem, State.start(problem))
    for v, [site] in planted.truth.items():
        number = int(site.split("[")[1][:-1]) // 2
        assert f"layer2[{2 * number}:{2 * number + 2}]" in state.handles[v].chosen["sites"]
        assert state.handles[v].size == 2 * state.handles[v].chosen["K"]


# -- how it is trained --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def fit() -> BankRecording:
    planted = planted_neurons(2, 1000)
    return record(planted.subject, *planted.banks(200))[0]


def train(fit: BankRecording, spec: MaskSpec, variables=("p",), sparsities=(1e-2,), readout=READOUT, seed=5):
    family = neurons(fit, [fit.subject.places[1]])
    training = MaskTraining(family, variables, sparsities, torch.Generator().manual_seed(seed))
    return train_masks(fit, [training], readout, spec)


def test_a_batch_of_masks_trains_as_each_would_alone(fit):
    spec = MaskSpec(batch=len(fit), epochs=8, clip=0.05)
    together = train(fit, spec, ("p", "q"), (1e-3, 1e-1))
    assert [(m.variable, m.sparsity) for m in together] == [("p", 1e-3), ("p", 1e-1), ("q", 1e-3), ("q", 1e-1)]
    for m in together:
        [alone] = train(fit, spec, (m.variable,), (m.sparsity,))
        assert torch.equal(m.chosen, alone.chosen)
        assert m.loss == pytest.approx(alone.loss, rel=1e-4)


def test_a_higher_price_keeps_fewer_sites_and_a_prohibitive_one_none(fit):
    sizes = [int(m.chosen.sum()) for m in train(fit, SPEC, sparsities=(0.0, 1e-2, 10.0))]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] == 0


def test_the_same_seed_gives_the_same_masks_and_restarts_differ_in_their_start(fit):
    spec = MaskSpec(batch=100, epochs=2, restarts=2)
    first, again = train(fit, spec), train(fit, spec)
    assert [m.loss for m in first] == [m.loss for m in again]
    assert first[0].loss != first[1].loss


def test_the_last_loss_is_nearly_that_of_the_hard_mask(fit):
    [mask] = train(fit, SPEC)
    handle_gains = mask.family.edits(mask.chosen[None].float())
    from plot_ot.edits import respond

    outputs = respond(fit, handle_gains)[0]
    assert mask.loss == pytest.approx(float(READOUT.loss(outputs, fit.bank.labels["p"]).mean()), abs=0.02)


def test_mistakes_are_refused(fit):
    assert_refused(lambda: MaskSpec(epochs=0), ["at least one epoch"])
    assert_refused(lambda: MaskSpec(temperatures=(0.1, 1.0)), ["must fall", "(0.1, 1.0)"])
    assert_refused(lambda: TrainMask(over="layer"), ["'layer'", "place, all"])
    assert_refused(lambda: TrainMask(sparsities=()), ["some λ"])
    assert_refused(lambda: TrainMask(sparsities=(-1.0,)), ["below zero"])
    assert_refused(lambda: train(fit, SPEC, ("r",)), ["'r'", "p, q"])
    broken = replace(READOUT, loss=lambda outputs, labels: READOUT.loss(outputs, labels) * math.nan)
    words = ["mask at layer2 for 'p' with λ = 0.01", "NaN or infinity", "Lower the rate"]
    assert_refused(lambda: train(fit, SPEC, readout=broken), words)


def test_whole_places_can_be_masked(fit):
    """Over all places the mask of `layer1` or of any later one carries everything; nothing is swapped twice."""
    family = whole_places(fit, fit.subject.places)
    training = MaskTraining(family, ("p",), (1e-2,), torch.Generator().manual_seed(0))
    [mask] = train_masks(fit, [training], READOUT, SPEC)
    assert mask.chosen.shape == (3,)
