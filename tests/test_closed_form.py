"""Closed-form handles: the frontier rule, the cells' means, the ridge regression, and a network that adds."""

import numpy as np
import pytest
import torch

from plot_ot.errors import PlotError
from plot_ot.stages.calibrate import correct
from plot_ot.stages.closed_form import (
    ClosedForm,
    barycentric,
    cell_shift,
    cell_variables,
    contrastive,
    leading,
)
from plot_ot.studies.study import Study
from plot_ot.tasks import BinaryAddition, heq
from plot_ot.tasks.addition_data import causal_model


@pytest.fixture(scope="module")
def study(tmp_path_factory) -> Study:
    task = BinaryAddition()
    return Study(task.prepare(1000, tmp_path_factory.mktemp("cache")))


@pytest.mark.parametrize(("variable", "frontier"), [("C1", ("S0",)), ("C2", ("S0", "S1")), ("C3", ("S0", "S1", "S2"))])
def test_the_frontier_of_a_carry_is_the_sums_already_made(variable, frontier):
    assert causal_model(4).frontier(variable) == frontier


def test_the_frontier_of_one_equality_is_the_other():
    assert heq.causal_model().frontier("z_WX") == ("z_YZ",)


def test_the_frontier_and_the_variable_determine_the_output_given_the_inputs_still_to_come():
    """Two inputs equal in (C2, S0, S1) and in the digits after have the same sum, whatever came before."""
    model = causal_model(4)
    rows = torch.cartesian_prod(*[torch.arange(2)] * 8)
    values = model.run(rows)
    known = [values[v] for v in ("C2", *model.frontier("C2"), "A2", "A3", "B2", "B3")]
    key = torch.stack([k.long() for k in known], dim=1)
    _, cell = torch.unique(key, dim=0, return_inverse=True)
    for c in range(int(cell.max()) + 1):
        assert len(torch.unique(values["y"][cell == c], dim=0)) == 1


def test_descendants_follow_the_arrows():
    assert causal_model(3).descendants("C1") == {"S1", "C2", "S2", "C3", "y"}


def test_rules_name_the_cells(study):
    fit = study.problem.fit
    assert cell_variables(fit, "C2", "alone") == ()
    assert cell_variables(fit, "C2", "siblings") == ("S1",)
    assert cell_variables(fit, "C2", "frontier") == ("S0", "S1")


def test_the_shift_is_the_difference_of_two_cells_means(study):
    fit, place = study.problem.fit, study.prepared.subject.places[1]
    known, shift = cell_shift(fit, place, "C2", ("S1",))
    model = fit.bank.causal
    inputs = torch.unique(torch.cat([fit.bank.base, fit.bank.source]), dim=0)
    states = study.prepared.subject.record(inputs).activations["h1"].double()
    values = model.run(inputs)

    def mean(carry: int, total: int) -> torch.Tensor:
        return states[(values["C2"] == carry) & (values["S1"] == total)].mean(dim=0)

    at_base, at_source = model.run(fit.bank.base), model.run(fit.bank.source)
    for n in (0, 7, 100, len(known) - 1):
        t = int(known[n])
        z_b, z_s, f_b = int(at_base["C2"][t]), int(at_source["C2"][t]), int(at_base["S1"][t])
        torch.testing.assert_close(shift[n], mean(z_s, f_b) - mean(z_b, f_b), rtol=1e-5, atol=1e-6)


def test_the_barycentric_map_is_the_ridge_regression():
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(200, 5)), rng.normal(size=(200, 5))
    frame = barycentric(torch.from_numpy(x), torch.from_numpy(y), 0.1)
    rho = 0.1 * np.diag(x.T @ x).mean()
    stacked = np.linalg.lstsq(np.vstack([x, np.sqrt(rho) * np.eye(5)]), np.vstack([y, np.zeros((5, 5))]), rcond=None)[0]
    np.testing.assert_allclose((frame.write @ frame.read.T).numpy(), stacked.T, atol=1e-5)
    one = leading(frame)
    assert one.rank == 1
    assert torch.linalg.matrix_rank(one.write @ one.read.T) == 1


def test_a_linear_code_is_swapped_exactly():
    """State = z·p + f·q + noise in other directions: the map moves z along p and leaves f and the noise alone."""
    g = torch.Generator().manual_seed(0)
    basis = torch.linalg.qr(torch.randn(6, 6, generator=g, dtype=torch.float64))[0]
    z, f, noise = (torch.randint(2, (4000, k), generator=g).double() for k in (1, 1, 4))
    states = torch.cat([z, f, noise], dim=1) @ basis.T
    base, source = states[:2000], states[2000:]
    shift = (z[2000:] - z[:2000]) @ basis[:, :1].T
    frame = barycentric(source - base, shift, 1e-9)
    moved = base + (source - base).float().double() @ frame.read.double() @ frame.write.double().T
    wanted = torch.cat([z[2000:], f[:2000], noise[:2000]], dim=1) @ basis.T
    torch.testing.assert_close(moved, wanted, atol=1e-4, rtol=0)


def test_contrastive_directions_find_what_only_changing_pairs_move():
    g = torch.Generator().manual_seed(0)
    difference = 0.1 * torch.randn(500, 4, generator=g, dtype=torch.float64)
    changed = torch.arange(500) % 2 == 0
    difference[changed, 2] += 3
    [(k, frame)] = contrastive(difference, changed, (1,))
    assert k == 1
    assert abs(float(frame.read[2, 0])) > 0.99


def test_states_that_never_differ_are_refused():
    with pytest.raises(PlotError, match="nothing to regress on"):
        barycentric(torch.zeros(10, 3).double(), torch.zeros(10, 3).double(), 0.1)


def test_carries_are_controlled_without_training(study):
    task = BinaryAddition()
    state, parts = task.methods()["plot-closed-form"].run(study.problem)
    assert [state.handles[v].places for v in ("C1", "C2", "C3")] == [["h0"], ["h1"], ["h2"]]
    right = [correct(r, state.handles[v], study.problem.readout).double().mean() for (v, _), r in study.tests.items()]
    assert float(torch.stack(right).mean()) > 0.99
    assert parts["das"] == 0
    assert parts["closed_form"] > 0
    assert {h.chosen["rule"] for h in state.handles.values()} <= {"alone", "siblings", "frontier"}


def test_the_stage_reports_every_form_it_tried(study):
    place = study.prepared.subject.places[0]
    forms = {c.kind for c in ClosedForm().candidates(study.problem.fit, place, "C1")}
    assert forms == {"contrastive", "barycentric", "discriminant"}
