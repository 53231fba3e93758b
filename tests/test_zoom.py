"""Progressive localization: menus of PCA spans and own subspaces, masked couplings, selecting places."""

import numpy as np
import pytest
import torch
from torch import nn

from plot_ot.banks import Bank, draw_pairs
from plot_ot.causal import CausalModel
from plot_ot.edits import Frame
from plot_ot.errors import PlotError
from plot_ot.methods import Method
from plot_ot.signatures import readout
from plot_ot.sites import (
    blocks,
    pca_bands,
    pca_components,
    pca_prefixes,
    principal_frame,
    subspaces,
    whole_places,
)
from plot_ot.stages.base import Problem, State
from plot_ot.stages.calibrate import Search
from plot_ot.stages.choose import Calibrate, SelectPlaces
from plot_ot.stages.localize import Localize
from plot_ot.subjects import BankRecording, MLPSubject, record
from plot_ot.transport import Transport, couple, solve

ROWS = torch.cartesian_prod(*[torch.arange(2)] * 6)
MODEL = CausalModel(
    list("abcdef"),
    {"left": lambda a, b: a & b, "right": lambda c, d: c & d, "y": lambda left, right: left ^ right},
    output="y",
)


def staged_net() -> nn.Sequential:
    """layer1 holds left and right apart next to e and f; layer2 only |left - right|."""
    net = nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 2), nn.ReLU(), nn.Linear(2, 2))
    rows = torch.zeros(4, 6)
    rows[0, :2] = rows[1, 2:4] = rows[2, 4] = rows[3, 5] = 1.0
    net[0].weight.data, net[0].bias.data = rows, torch.tensor([-1.0, -1, 0, 0])
    net[2].weight.data, net[2].bias.data = torch.tensor([[1.0, -1, 0, 0], [-1, 1, 0, 0]]), torch.zeros(2)
    net[4].weight.data, net[4].bias.data = torch.tensor([[-10.0, -10], [10, 10]]), torch.tensor([5.0, -5])
    return net


def bank(seed: int, policy: str = "balanced") -> Bank:
    return draw_pairs(MODEL, ROWS, policy, 200, torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def fit() -> BankRecording:
    return record(MLPSubject(staged_net()), bank(0, "mixed"))[0]


@pytest.fixture(scope="module")
def problem(fit) -> Problem:
    [calibration] = record(fit.subject, bank(1))
    return Problem(fit.subject, fit, calibration, ("left", "right"), readout("softmax"))


def test_the_principal_frame_is_numpys_pca_of_the_distinct_bases(fit):
    place = fit.subject.places[0]
    frame = principal_frame(fit, place)
    a = np.unique(fit.store.activations["layer1"][fit.base_rows].numpy(), axis=0)
    distinct = fit.store.activations["layer1"][fit.base_rows.unique()].numpy()
    _, _, directions = np.linalg.svd(distinct - distinct.mean(axis=0))
    overlap = np.abs(np.diag(directions @ frame.read.numpy()))
    assert len(a) > 4
    np.testing.assert_allclose(overlap, 1, atol=1e-4)


def test_pca_data_by_name(fit):
    place = fit.subject.places[0]
    both = principal_frame(fit, place, "bases+sources")
    assert both.rank == 4
    with pytest.raises(PlotError, match=r"Legal: bases, bases\+sources"):
        principal_frame(fit, place, "sources")


def spans(menu, fit) -> list[tuple[int, ...]]:
    return [s.directions for s in menu(fit, fit.subject.places[:1]).sites]


def test_menus_of_principal_components(fit):
    assert spans(pca_components(), fit) == [(0,), (1,), (2,), (3,)]
    assert spans(pca_prefixes(), fit) == [(0,), (0, 1), (0, 1, 2, 3)]
    assert spans(pca_bands(2), fit) == [(0, 1), (2, 3)]
    assert spans(pca_bands(3), fit) == [(0,), (1,), (2, 3)]
    assert spans(pca_bands(9), fit) == [(0,), (1,), (2,), (3,)]


def test_prefixes_of_a_rank_that_is_no_power_of_two_end_with_all(fit):
    assert [s.directions[-1] + 1 for s in pca_prefixes()(fit, fit.subject.places[1:]).sites] == [1, 2]


def test_own_subspaces_are_sites(fit):
    frame = Frame.orthonormal(torch.eye(4)[:, :2], "mine")
    menu = subspaces({"layer1": frame}, {"layer1": {"first": [0], "both": [0, 1]}})
    family = menu(fit, fit.subject.places)
    assert [s.name for s in family.sites] == ["layer1.first", "layer1.both"]
    with pytest.raises(PlotError, match=r"directions in 0\.\.1"):
        subspaces({"layer1": frame}, {"layer1": {"third": [2]}})(fit, fit.subject.places)


def test_a_masked_coupling_forbids_and_otherwise_solves_the_same_problem():
    rng = np.random.default_rng(0)
    cost = rng.random((2, 6))
    masked = cost.copy()
    masked[0, 4:] = masked[1, :2] = np.inf
    for kind, beta in (("eot", np.inf), ("uot-one-sided", 0.3), ("uot", 0.3)):
        [solution] = solve(masked, [(0.05, beta)], kind=kind)
        assert solution.converged
        assert (solution.plan[0, 4:] == 0).all()
        assert (solution.plan[1, :2] == 0).all()
        huge = np.where(np.isinf(masked), 1e3, masked)
        [close] = solve(huge, [(0.05, beta)], kind=kind)
        np.testing.assert_allclose(solution.plan, close.plan, atol=1e-9)


def test_a_mask_that_leaves_nothing_is_refused(problem):
    state = Localize((whole_places,))(problem, State.start(problem))
    with pytest.raises(PlotError, match="an allowed site for every variable"):
        couple(state.signatures[0], Transport(), np.array([[True, True], [False, False]]))


@pytest.mark.parametrize("coupling", ["all", "place", "masked"])
def test_zooming_finds_the_neuron_inside_the_selected_place(problem, coupling):
    stages = (
        Localize((whole_places,), Transport(epsilon=(1.0,))),
        SelectPlaces(shortlist=2),
        Localize((blocks(1), blocks(2)), Transport(epsilon=(1.0,)), coupling=coupling),
        Calibrate(Search((1, 2), (0.5, 1.0, 2.0))),
    )
    state, parts = Method("zoom", "", stages).run(problem)
    for v, neuron in (("left", 0), ("right", 1)):
        assert [p.name for p in state.places[v]] == ["layer1"]
        assert state.calibrations[v].score == pytest.approx(1.0)
        assert state.handles[v].edits[0].gains.nonzero().flatten().tolist() == [neuron]
    assert parts["signatures"] > 0


def test_select_places_keeps_several_when_asked(problem):
    coupled = Localize((whole_places,), Transport(epsilon=(1.0,)))(problem, State.start(problem))
    both = SelectPlaces(shortlist=2, keep=2)(problem, coupled)
    assert {p.name for p in both.places["left"]} == {"layer1", "layer2"}
    assert both.handles["left"].size in (2, 4)


def test_an_unknown_coupling_is_refused():
    with pytest.raises(PlotError, match="Legal: all, place, masked"):
        Localize(coupling="both")
