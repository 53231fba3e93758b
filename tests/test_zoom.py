"""Progressive localization: menus of PCA spans and own subspaces, masked couplings, selecting places."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from plot_ot.abstract.banks import Bank, draw_pairs
from plot_ot.abstract.causal_model import CausalModel
from plot_ot.edits import Frame, respond
from plot_ot.errors import PlotError
from plot_ot.methods import Method
from plot_ot.signatures import as_readout
from plot_ot.sites import (
    blocks,
    neurons,
    pca_bands,
    pca_components,
    pca_prefixes,
    principal_frame,
    subspaces,
    whole_places,
)
from plot_ot.stages.calibrate import Search
from plot_ot.stages.choose import Calibrate, Hint, SelectPlaces, TrainDas
from plot_ot.stages.coupling import Localize, attribution
from plot_ot.stages.descent import DasSpec
from plot_ot.stages.problem import Candidate, Problem, State
from plot_ot.subjects import BankRecording, MLPSubject, record
from plot_ot.transport import Transport, couple, from_scores, solve

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
    return Problem(fit.subject, fit, calibration, ("left", "right"), as_readout("softmax"))


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
    with pytest.raises(PlotError, match=r"Choose from: bases, bases\+sources"):
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


def test_one_grid_point_for_all_variables_or_one_each(problem, monkeypatch):
    """Two couplings, each right for one variable: on its own each variable takes its best, shared they take one."""

    def ranked(order: dict[str, list[int]]) -> Candidate:
        scores = np.array([[2.0 - order[v].index(j) for j in range(2)] for v in problem.variables])
        return Candidate(family, from_scores(problem.variables, [s.name for s in family.sites], scores, "made"))

    one, two = problem.subject.places
    monkeypatch.setattr(SelectPlaces, "_scores", lambda *_: {one: 1.0, two: 0.5})
    family = whole_places(problem.fit, problem.subject.places)
    first, second = ranked({"left": [0, 1], "right": [1, 0]}), ranked({"left": [1, 0], "right": [0, 1]})
    state = replace(State.start(problem), candidates=dict.fromkeys(problem.variables, (first, second)))
    own = SelectPlaces(grid="own")(problem, state)
    assert {p.name for v in problem.variables for p in own.places[v]} == {"layer1"}
    shared = SelectPlaces(grid="shared")(problem, state)
    assert {p.name for v in problem.variables for p in shared.places[v]} == {"layer1", "layer2"}
    with pytest.raises(PlotError, match="Choose from: own, shared"):
        SelectPlaces(grid="all")


# -- DAS guided by what was found -------------------------------------------------------------------------------


def test_hints_are_sizes_around_the_handles():
    assert Hint.paper().sizes(8, 64) == [4, 6, 8, 12, 16]
    assert Hint.practice(8).sizes(8, 64) == [8, 10, 12]
    assert Hint.paper().sizes(8, 10) == [4, 6, 8, 10]
    assert Hint.paper().sizes(1, 64) == [1, 2]


def zoomed(problem, menu, **das) -> State:
    stages = (
        Localize((whole_places,), Transport(epsilon=(1.0,))),
        SelectPlaces(shortlist=2),
        Localize((menu,), Transport(epsilon=(1.0,)), coupling="place"),
        Calibrate(Search((1, 2), (0.5, 1.0, 2.0))),
        TrainDas(spec=DasSpec(most=30), **das),
    )
    return Method("guided", "", stages).run(problem)[0]


def test_das_with_a_hint_tries_only_sizes_around_the_handles(problem):
    state = zoomed(problem, blocks(1), dimensions=Hint.paper())
    for v in problem.variables:
        assert state.handles[v].chosen["trained"] == 2  # K = 1 neuron: sizes 1 and 2
        assert state.handles[v].chosen["calibration_score"] == pytest.approx(1.0)


def test_das_inside_a_frame_mixes_its_directions_only(problem):
    """In the first two principal components nothing outside them is written."""
    frame = principal_frame(problem.fit, problem.subject.places[0])
    two = Frame.orthonormal(frame.read[:, :2].contiguous(), "pca")
    menu = subspaces(
        {"layer1": two, "layer2": Frame.identity(2)}, {"layer1": {"a": [0], "b": [1]}, "layer2": {"c": [0]}}
    )
    state = zoomed(problem, menu, dimensions=(1,), inside="frame")
    for v in problem.variables:
        [edit] = state.handles[v].edits
        outside = edit.frame.read - two.read @ (two.read.T @ edit.frame.read)
        assert float(outside.abs().max()) < 1e-5


def test_das_inside_the_support_touches_no_other_neuron(problem):
    state = zoomed(problem, blocks(1), inside="support")
    for v in problem.variables:
        [edit], [before] = state.handles[v].edits, state.calibrations[v].handle.edits
        assert edit.place == before.place
        assert torch.equal(edit.frame.read.abs().sum(dim=1) > 1e-5, before.gains != 0)


def test_das_that_follows_a_handle_needs_one(problem):
    with pytest.raises(PlotError, match="no stage before has made one"):
        Method("lost", "", (TrainDas(Hint.paper()),)).run(problem)
    with pytest.raises(PlotError, match="Choose from: place, frame, support"):
        TrainDas(inside="box")


def test_every_second_place_is_counted_from_the_last(problem):
    state, _ = Method("sparse", "", (TrainDas((1,), DasSpec(most=5), every=2),)).run(problem)
    assert {h.edits[0].place.name for h in state.handles.values()} == {"layer2"}


def test_das_also_trains_at_the_places_that_are_named(problem):
    sparse = TrainDas((1,), DasSpec(most=5), every=2, also=("layer1",))
    state, _ = Method("sparse", "", (sparse,)).run(problem)
    assert {p for h in state.handles.values() for p in h.chosen["by_support"]} == {"layer1", "layer2"}


def test_a_method_remembers_what_every_stage_made_of_its_couplings(problem):
    state = zoomed(problem, blocks(1), dimensions=(1,))
    coarse, fine = state.trail
    assert set(coarse.patched["left"]) == {"layer1", "layer2"}
    assert [s.name for s in fine.candidates["left"][0].family.sites] == [f"layer1[{k}]" for k in range(4)]


def test_attribution_is_the_slope_of_the_loss_in_the_gain(problem):
    family = neurons(problem.fit, problem.subject.places)
    found = attribution(problem, family)
    for row, v in enumerate(problem.variables):
        labels = problem.fit.bank.labels[v]
        for j in range(len(family)):
            weights = torch.zeros(2, len(family), dtype=torch.float64)
            weights[:, j] = torch.tensor([-1e-2, 1e-2])
            low, high = problem.readout.loss(respond(problem.fit, family.edits(weights)), labels).double().sum(dim=1)
            slope = float(low - high) / 2e-2
            assert found[row, j] == pytest.approx(max(0.0, slope), rel=2e-2, abs=0.5)


def test_an_unknown_coupling_is_refused():
    with pytest.raises(PlotError, match="Choose from: all, place, masked"):
        Localize(coupling="both")
