"""Exact and natural handles: the solver against autograd and brute force, its limits, the stage on planted nets."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from nets import mlp, planted_plane, rand
from plot_ot.abstract.banks import Bank
from plot_ot.abstract.causal_model import CausalModel
from plot_ot.edits import EditBatch, Frame
from plot_ot.errors import PlotError
from plot_ot.handles import Handle, handle_from_edits
from plot_ot.signatures import Readout, as_readout
from plot_ot.stages.calibrate import correct, pair_weights
from plot_ot.stages.choose import TrainDas
from plot_ot.stages.closed_form import ClosedForm, finest_shift
from plot_ot.stages.curvature import output_curvature, sharpness
from plot_ot.stages.das import Latents, train_rotations
from plot_ot.stages.descent import DasSpec
from plot_ot.stages.gauss_newton import DIRECT, Coordinates, Normal, Rest, minimise
from plot_ot.stages.maps import Map, Metric, Whitened
from plot_ot.stages.natural import Natural, edited_states, shrunk_covariance
from plot_ot.stages.newton import PRECISE, ROUGH, NewtonHandles, Try, _Ordinary, _scores
from plot_ot.stages.priors import edit_of, leading_directions, prior_maps, priors_at
from plot_ot.stages.problem import Problem, State
from plot_ot.subjects import BankRecording, MLPSubject, record

SOFTMAX = as_readout("softmax")
SQUARED = replace(
    SOFTMAX, loss=lambda y, labels: (y - torch.eye(y.shape[-1])[labels.long()].to(y)).square().sum(dim=-1)
)


def recording(net: nn.Sequential, pairs: int = 60, seed: int = 0) -> BankRecording:
    """Random pairs of bits for a net; A and B are the first two, the answer is which of four they are."""
    causal = CausalModel(
        [f"x{k}" for k in range(net[0].in_features)],
        {"A": lambda x0: x0, "B": lambda x1: x1, "y": lambda A, B: 2 * A + B},
        "y",
    )
    g = torch.Generator().manual_seed(seed)
    base, source = torch.randint(2, (2, pairs, net[0].in_features), generator=g)
    bank = Bank.from_pairs(causal, base, source, variables=("A", "B"))
    return record(MLPSubject(net.double(), encode=lambda rows: rows.double()), bank)[0]


def problem_of(
    recorded: BankRecording, readout: Readout = SOFTMAX, ridge: float = 1e-2, places: int = 1
) -> tuple[Rest, Coordinates]:
    """The rest of the network after its first layers, and coordinates around the maps that A's changes ask for."""
    weights, starts = pair_weights(recorded, "A", "balanced"), []
    at = recorded.subject.places[:places]
    for place in at:
        difference = recorded.source_at(place) - recorded.base_at(place)
        states = recorded.store.activations[place.name]
        natural = torch.linalg.cholesky(shrunk_covariance(states - states.mean(dim=0)))
        shift = difference * recorded.bank.changed["A"].double()[:, None]
        [prior] = prior_maps(place, "pairs", (ridge,), natural, difference, shift, weights)
        starts.append(Whitened.of(prior.start, prior.metric))
    rest = Rest.of(recorded, at[::-1], recorded.bank.labels["A"], weights, readout, batch=17)
    return rest, Coordinates(tuple(starts))


NET = mlp(6, 5, 7, 4, seed=3)


# -- the solver ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("places", [1, 2])
def test_gradients_and_products_agree_with_autograd(places):
    rest, coordinates = problem_of(recording(NET), places=places)
    n0 = 0.1 * rand(1, *coordinates.zero.shape, dtype=torch.float64)

    def outputs(n: torch.Tensor) -> torch.Tensor:
        return rest.outputs(coordinates.maps(n), slice(None))[0]

    def loss(n: torch.Tensor) -> torch.Tensor:
        return (rest.weights * rest.readout.loss(outputs(n)[None], rest.labels)[0]).sum()

    slopes = rest.slopes(coordinates.maps(n0))
    assert slopes.loss == pytest.approx(float(loss(n0)))
    gradient = torch.autograd.functional.jacobian(loss, n0)
    torch.testing.assert_close(coordinates.gradient(slopes), gradient)
    jacobian = torch.autograd.functional.jacobian(outputs, n0)  # pairs x answers x unknowns
    p = (sharpness_of(rest) * outputs(n0)).softmax(dim=1)
    hessian = (torch.diag_embed(p) - p[:, :, None] * p[:, None, :]) * sharpness_of(rest) ** 2
    dense = torch.einsum("t,tau,tab,tbw->uw", rest.weights, jacobian, hessian, jacobian)
    normal = coordinates.normal(slopes)
    along = rand(2, *n0.shape, dtype=torch.float64)
    torch.testing.assert_close(normal.product(along), dense @ along, rtol=0.02, atol=0.02)
    torch.testing.assert_close(normal.scale, float(dense.diagonal().mean()), rtol=0.02, atol=0)


def test_several_places_are_edited_as_a_handle_edits_them():
    """The outputs that are minimised are those of plain edits, one after the other, on the network itself."""
    net = mlp(6, 5, 7, 4, seed=3)
    recorded = recording(net)
    rest, coordinates = problem_of(recorded, places=2)
    maps = coordinates.maps(0.1 * rand(1, *coordinates.zero.shape, dtype=torch.float64))
    first, second, last = (nn.Sequential(*net[k : k + 2]) for k in (0, 2, 4))
    bank = recorded.bank
    base, source = bank.base.double(), bank.source.double()
    m1, m2 = (m.write @ m.read.T for m in maps)
    h1 = first(base) + (first(source) - first(base)) @ m1.T
    clean = second(first(source))
    h2 = second(h1) + (clean - second(h1)) @ m2.T
    weights = pair_weights(recorded, "A", "balanced")
    wanted = float((weights @ rest.readout.loss(last(h2)[None], bank.labels["A"])[0]).detach())
    assert rest.loss(maps)[0] == pytest.approx(wanted, rel=1e-9)
    torch.testing.assert_close(
        rest.slopes(maps).differences[1].norm(), _once(rest, recorded, clean - second(h1)).norm()
    )
    edits = [edit_of(p, m) for p, m in zip(rest.places, maps, strict=True)]
    double = [EditBatch(e.place, Frame.oblique(m.read, m.write), e.gains) for e, m in zip(edits, maps, strict=True)]
    found = edited_states(double, recorded)
    torch.testing.assert_close(found[rest.places[0].name], h1.detach())
    torch.testing.assert_close(found[rest.places[1].name], h2.detach())


def _once(rest: Rest, recorded: BankRecording, by_pair: torch.Tensor) -> torch.Tensor:
    """The rows of distinct pairs, as often as the problem has them."""
    kept = torch.unique(torch.cat([recorded.bank.base, recorded.bank.source], dim=1), dim=0, return_inverse=True)[1]
    firsts = [int((kept == k).nonzero()[0]) for k in kept.unique()]
    assert len(firsts) == len(rest.rows)
    return by_pair[firsts].detach()


def sharpness_of(rest: Rest) -> float:
    """The factor on the outputs that the problem's loss has, from its slope at equal outputs."""
    y = torch.zeros(1, 1, 4, dtype=torch.float64, requires_grad=True)
    [slope] = torch.autograd.grad(rest.readout.loss(y, torch.tensor([0])).sum(), y)
    return float(-slope[0, 0, 0] / 0.75)


def test_conjugate_gradients_agree_with_the_direct_solution():
    u, v = (
        tuple(rand(seed, 40, d, dtype=torch.float64) for seed, d in some)
        for some in (((1, 4), (2, 2)), ((3, 5), (4, 3)))
    )
    normal, right = Normal(u, v), rand(3, 26, dtype=torch.float64)
    direct = normal.solver()(right, 0.3)
    iterated = normal._conjugate(right, 0.3)
    assert float((iterated - direct).norm()) < 3e-3 * float(direct.norm())
    assert float((normal.product(iterated) + 0.3 * iterated - right).norm()) <= 1e-3 * float(right.norm())
    torch.testing.assert_close(normal.product(direct) + 0.3 * direct, right)


@settings(max_examples=20, deadline=None)
@given(st.integers(2, 32), st.integers(1, 5), st.integers(0, 100))
def test_the_curvature_of_a_loss_is_its_hessian(answers, pairs, seed):
    y = 2 * rand(seed, pairs, answers, dtype=torch.float64)
    labels = torch.arange(pairs) % answers
    loss, slope, directions = output_curvature(y, labels, SOFTMAX)
    p = y.softmax(dim=1)
    torch.testing.assert_close(loss, -p[torch.arange(pairs), labels].log())
    torch.testing.assert_close(slope, p - torch.eye(answers, dtype=torch.float64)[labels])
    found = sum((d[:, :, None] * d[:, None, :] for d in directions), torch.zeros(pairs, answers, answers))
    wanted = torch.diag_embed(p) - p[:, :, None] * p[:, None, :]
    # directions are left out, so the found one is never larger; with few answers nearly all of it is held
    assert float(torch.linalg.eigvalsh(wanted - found).min()) > -1e-9
    if answers <= 8:
        left = (wanted - found).diagonal(dim1=1, dim2=2).sum()
        assert float(left) <= 0.011 * float(wanted.diagonal(dim1=1, dim2=2).sum())


def test_a_large_weight_of_the_prior_gives_the_closed_form():
    recorded = recording(NET)
    rest, coordinates = problem_of(recorded, ridge=1e-2)
    place = recorded.subject.places[0]
    root = pair_weights(recorded, "A", "balanced").sqrt()[:, None]
    x = root * (recorded.source_at(place) - recorded.base_at(place))
    y = x * recorded.bank.changed["A"].double()[:, None]
    ridge = (1e-2 * (x * x).sum() / x.shape[1]) ** 0.5 * torch.eye(x.shape[1], dtype=torch.float64)
    stacked = torch.linalg.lstsq(torch.cat([x, ridge]), torch.cat([y, torch.zeros_like(ridge)])).solution.T
    end = minimise(rest, coordinates, 1e7)
    [m] = coordinates.maps(end.n)
    torch.testing.assert_close(m.write @ m.read.T, stacked, rtol=1e-4, atol=1e-5)


def test_a_small_weight_gives_the_oblique_optimum():
    """Against L-BFGS over all entries of M, on the same loss without a prior."""
    rest, coordinates = problem_of(recording(mlp(6, 4, 4, seed=1), pairs=30), SQUARED)
    free = torch.zeros(4, 4, dtype=torch.float64, requires_grad=True)
    optimiser = torch.optim.LBFGS([free], max_iter=500, line_search_fn="strong_wolfe", tolerance_grad=1e-10)

    def closure() -> torch.Tensor:
        optimiser.zero_grad()
        y, _ = rest.outputs([Map(torch.eye(4, dtype=torch.float64), free.T)], slice(None))
        loss = (rest.weights * rest.readout.loss(y[None], rest.labels)[0]).sum()
        loss.backward()
        return loss

    optimiser.step(closure)
    best = float(closure().detach())
    assert minimise(rest, coordinates, 1e-9, most=30, tolerance=1e-9).loss == pytest.approx(best, rel=1e-3)


def test_a_linear_network_with_a_squared_loss_is_solved_in_one_step():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 5), nn.Identity(), nn.Linear(5, 4))
    rest, coordinates = problem_of(recording(net), SQUARED)
    once = minimise(rest, coordinates, 1e-3, most=1)
    again = minimise(rest, coordinates, 1e-3, once.n, most=5)
    assert once.steps == 1
    assert again.objective == pytest.approx(once.objective, rel=1e-6)  # the network is in single precision
    assert once.objective < once.history[0]


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 1000), st.sampled_from([1.0, 1e-2, 1e-4]))
def test_the_loss_never_rises(seed, rho):
    rest, coordinates = problem_of(recording(mlp(6, 5, 6, 4, seed=seed, activation=nn.ReLU), seed=seed))
    end = minimise(rest, coordinates, rho, most=6)
    assert all(after < before for before, after in pairwise(end.history))
    n = end.n
    assert rest.loss(coordinates.maps(n))[0] + rho * float(n.square().sum()) == pytest.approx(end.objective, rel=1e-6)


def test_whitened_coordinates_make_the_prior_a_sum_of_squares():
    recorded = recording(NET)
    rest, coordinates = problem_of(recorded)
    place = recorded.subject.places[0]
    states = recorded.store.activations[place.name]
    natural = shrunk_covariance(states - states.mean(dim=0))
    n = rand(5, *coordinates.zero.shape, dtype=torch.float64)
    [white] = coordinates.at
    n = n.reshape(white.shape)
    moved = rest.difference @ white.read @ n.T @ white.write.T
    length = (moved @ torch.linalg.inv(natural) * moved).sum(dim=1)
    mean = float(rest.weights @ (rest.difference.square().mean(dim=1)))
    unruly = white.write @ n @ white.read.T
    ridge = 1e-2 * mean * torch.trace(unruly.T @ torch.linalg.inv(natural) @ unruly)
    assert float(rest.weights @ length + ridge) == pytest.approx(float(n.square().sum()), rel=1e-6)


def test_a_map_by_singular_values_is_the_same_map():
    roots = [torch.linalg.cholesky(torch.diag(rand(seed, 5).square().double() + 0.1)) for seed in (1, 2)]
    metric = Metric(*roots)
    _, coordinates = problem_of(recording(NET))
    [m] = coordinates.maps(rand(4, *coordinates.zero.shape, dtype=torch.float64))
    again = metric.factored(m, 0.0)
    torch.testing.assert_close(again.write @ again.read.T, m.write @ m.read.T)
    white = torch.linalg.solve_triangular(metric.natural, again.write, upper=False)
    lengths = white.norm(dim=0)
    torch.testing.assert_close(white.T @ white, torch.diag(lengths.square()))
    assert all(a >= b for a, b in pairwise(lengths.tolist()))


def test_a_wide_state_needs_no_matrix_of_its_unknowns():
    """600 wide: the unknowns of a whole map would be 360,000 and their matrix a terabyte."""
    net = mlp(6, 600, 4, seed=0)
    recorded = recording(net, pairs=20)
    rest, coordinates = problem_of(recorded)
    assert coordinates.zero.numel() > DIRECT
    end = minimise(rest, coordinates, 1e-2, most=2)
    assert end.objective < end.history[0]
    place, weights = recorded.subject.places[0], pair_weights(recorded, "A", "balanced")
    states = recorded.store.activations[place.name]
    natural = torch.linalg.cholesky(shrunk_covariance(states - states.mean(dim=0)))
    [prior] = prior_maps(place, "pairs", (0.1,), natural, rest.difference, rest.difference, rest.weights)
    basis = leading_directions(prior, rest, 8)
    torch.testing.assert_close(basis.T @ basis, torch.eye(8, dtype=torch.float64))
    inside = Coordinates((Whitened.of(prior.start, prior.metric, basis),))
    assert inside.zero.shape == (64,)
    assert len(weights) == 20
    assert minimise(rest, inside, 1e-2, most=2).loss < rest.loss([prior.start])[0]


def test_a_network_that_is_unsure_of_itself_is_read_more_sharply():
    recorded = recording(NET)
    answers = recorded.bank.base_answer
    margin = torch.eye(4, dtype=torch.float64)[answers] * 0.5
    rows = recorded.base_rows
    outputs = recorded.store.outputs.clone()
    outputs[rows] = margin
    unsure = replace(recorded, store=replace(recorded.store, outputs=outputs))
    factor = sharpness(unsure, SOFTMAX)
    assert float(SOFTMAX.loss(factor * margin[None], answers).mean()) <= 0.01
    assert float(SOFTMAX.loss(factor / 2 * margin[None], answers).mean()) > 0.01


# -- natural states -----------------------------------------------------------------------------------------------


def test_the_shrinkage_is_the_one_of_ledoit_and_wolf():
    for rows, d in ((30, 8), (400, 5), (10, 40)):
        x = rand(rows, rows, d, dtype=torch.float64) * torch.linspace(0.2, 3, d, dtype=torch.float64)
        x = x - x.mean(dim=0)
        s = x.T @ x / rows
        mu = torch.trace(s) / d
        eye = torch.eye(d, dtype=torch.float64)
        noise = sum(((t[:, None] * t - s) ** 2).sum() for t in x) / rows**2
        share = min(1.0, float(noise / ((s - mu * eye) ** 2).sum()))
        torch.testing.assert_close(shrunk_covariance(x), (1 - share) * s + share * mu * eye)


# -- the stage ----------------------------------------------------------------------------------------------------


def planted(fit: int = 300, seed: int = 0) -> Problem:
    """Three-valued p and q, each in a plane of a 12-wide layer, among four planes that mean nothing."""
    plant = planted_plane(seed, distractors=4)
    banks = plant.banks(fit, 300, 300, seed=seed)
    fitted, calibration, _ = record(plant.subject, *banks)
    return Problem(plant.subject, fitted, calibration, ("p", "q"), SOFTMAX)


def accuracy(problem: Problem, handle: Handle, bank: BankRecording) -> float:
    return float(correct(bank, handle, problem.readout).double().mean())


def run(problem: Problem, *stages) -> State:
    state = State.start(problem)
    for stage in stages:
        state = stage(problem, state)
    return state


def held_out(problem: Problem, seed: int = 0) -> BankRecording:
    [bank] = planted_plane(seed, distractors=4).banks(300, 300, 300, seed=seed)[2:]
    return record(problem.subject, bank)[0]


@pytest.mark.parametrize("rules", [("alone", "siblings", "frontier", "pairs"), ("pairs",)])
def test_planted_planes_are_controlled_with_values_and_without(rules):
    problem = planted()
    state = run(problem, NewtonHandles(rules=rules))
    for v in ("p", "q"):
        handle = state.handles[v]
        assert accuracy(problem, handle, held_out(problem)) > 0.97
        edit = handle.batch()[0]
        states = problem.fit.store.activations[edit.place.name].double()
        natural = Natural.around(states - states.mean(dim=0))
        lengths = natural.stretch(edited_states([edit], problem.calibration)[edit.place.name] - states.mean(dim=0))
        assert float(lengths.median()) <= 1.5
        assert handle.chosen["rule"] in rules


def test_few_pairs_do_not_undo_the_closed_form():
    problem = planted(fit=40)
    test = held_out(problem)
    closed = run(problem, ClosedForm())
    newton = run(problem, ClosedForm(), NewtonHandles())
    for v in ("p", "q"):
        before, after = (accuracy(problem, s.handles[v], test) for s in (closed, newton))
        assert after >= before - 0.02
        assert newton.handles[v].chosen["calibration_score"] >= closed.handles[v].chosen["calibration_score"]


def test_a_handle_that_is_right_everywhere_stays():
    problem = planted()
    state = run(problem, NewtonHandles())
    again = NewtonHandles(weights=(1.0,))(problem, state)
    assert all(again.handles[v] is state.handles[v] for v in ("p", "q"))


def solved(problem: Problem, stage: NewtonHandles, variable: str = "p") -> list[Try]:
    """Every try of the stage at the best places."""
    weights = pair_weights(problem.fit, variable, "balanced")
    priors = priors_at(problem.fit, problem.subject.places, variable, weights)
    scores = [1.0] * len(priors)
    return stage._solved(problem, variable, stage._followed(priors, scores), _Ordinary(problem))


def test_a_path_goes_on_when_every_fit_pair_is_right():
    """Margins widen with a smaller ρ, and one path at most goes on after scouting."""
    problem = planted(fit=60)
    stage = NewtonHandles(stretch=9.0)
    tries = solved(problem, stage)
    whole = {id(t.solution): t.solution for t in tries}.values()
    losses = {s.weight: s.loss for s in whole}
    assert min(losses) < stage.weights[stage.scouting - 1]
    assert losses[min(losses)] < losses[stage.weights[stage.scouting - 1]]
    further = [s for s in whole if s.weight in stage.weights[stage.scouting :]]
    assert len({s.path.start[0].rule for s in further}) == 1
    assert len({s.path.start[0].rule for s in whole}) == stage.starts


def test_between_equals_the_surest_map_is_taken():
    problem = planted()
    stage = NewtonHandles()
    tries = solved(problem, stage)
    bank, subject = problem.calibration.bank, problem.subject
    weights = pair_weights(problem.calibration, "p", "balanced")

    def loss(t: Try) -> float:
        handle = handle_from_edits("p", t.edits, 0, subject, {})
        outputs = handle.apply(subject, bank.base, bank.source)
        return float(weights @ SOFTMAX.loss(outputs[None], bank.labels["p"])[0].double())

    exact = [t for t in tries if t.score > 1 - 1e-9 and _scores(problem, "p", [t.edits], problem.fit)[0] > 1 - 1e-9]
    assert len(exact) > 2
    chosen = stage._best(problem, "p", tries, None, False)
    assert chosen is not None
    assert loss(tries[chosen]) == pytest.approx(min(loss(t) for t in exact), rel=1e-4)


def test_the_handle_is_an_ordinary_one(tmp_path):
    problem = planted()
    handle = run(problem, NewtonHandles(weights=(0.1,))).handles["p"].with_values(problem.fit)
    handle.save(tmp_path / "p.safetensors")
    again = Handle.load(tmp_path / "p.safetensors", problem.subject)
    bank = problem.calibration.bank
    torch.testing.assert_close(
        again.apply(problem.subject, bank.base, bank.source), handle.apply(problem.subject, bank.base, bank.source)
    )
    with again.on(problem.subject, bank.source):
        live = problem.subject.net(problem.subject.encode(bank.base))
    torch.testing.assert_close(live, handle.apply(problem.subject, bank.base, bank.source), rtol=1e-4, atol=1e-4)
    values = bank.causal.run(bank.source)["p"]
    ones = bank.base[values == 1]
    said = again.set(1).apply(problem.subject, ones).argmax(dim=1)
    wanted = bank.causal.run(ones, do={"p": torch.ones(len(ones), dtype=torch.long)})["y"]
    assert float((said == wanted).double().mean()) > 0.95
    assert again.chosen["form"] == "newton ρ = 0.1"


def test_maps_that_leave_natural_states_are_left_out():
    problem = planted()
    state = run(problem, ClosedForm())
    assert NewtonHandles(stretch=0.0)(problem, state).handles == state.handles


def test_settings_that_cannot_be_are_refused():
    with pytest.raises(PlotError, match="must fall"):
        NewtonHandles(weights=(0.1, 1.0))
    with pytest.raises(PlotError, match="at least one ρ"):
        NewtonHandles(weights=())


def paths_of(tries: list[Try]) -> set[tuple[str, float, int]]:
    """The different paths behind some tries, by where they began and in which room."""
    return {(t.solution.path.start[0].rule, t.solution.path.start[0].ridge, t.solution.path.room) for t in tries}


@pytest.mark.parametrize(("reached", "hopeful"), [(0.0, 0.7), (0.0, 1.1), (1.0, 0.7), (-1.0, 1.1)])
def test_a_wide_place_gets_one_path_unless_it_beats_what_was_found(reached, hopeful):
    """Where no handle was found before (-1), or a worse one and there is hope, the search is the usual one."""
    problem = planted(fit=60)
    usual = NewtonHandles(stretch=9.0, whole=4, rooms=(4, 8))
    thrifty = replace(usual, wide=8, hopeful=hopeful)
    priors = thrifty._priors(problem.fit, problem.subject.places, "p")
    assert {p.ridge for p in priors} == set(thrifty.wide_ridges)
    starts = thrifty._followed(priors, _scores(problem, "p", [[p.edit] for p in priors]))
    whole = usual._solved(problem, "p", starts, _Ordinary(problem), reached)
    tries = thrifty._solved(problem, "p", starts, _Ordinary(problem), reached)
    assert len(paths_of(whole)) == 2 * len(starts)
    if reached == 1.0 or (reached >= 0 and hopeful > 1):
        first = starts[0][0]
        assert paths_of(tries) == {(first.rule, first.ridge, 4)}
        assert {t.solution.weight for t in tries} == set(usual.weights[: usual.scouting])
    else:
        assert [(t.score, t.rank, t.solution.weight) for t in tries] == [
            (t.score, t.rank, t.solution.weight) for t in whole
        ]


def test_where_no_step_is_taken_it_is_known_whether_all_pairs_are_right():
    """A path ends where all are right beyond doubt, so a start that is must say so."""
    problem = planted()
    weights = pair_weights(problem.fit, "p", "balanced")
    priors = priors_at(problem.fit, problem.subject.places, "p", weights)
    said = set()
    for prior in priors:
        rest = Rest.of(problem.fit, [prior.place], problem.fit.bank.labels["p"], weights, SOFTMAX, 64)
        start = Coordinates((Whitened.of(prior.start, prior.metric, None),))
        right = rest.loss(start.maps(start.zero))[1]
        assert minimise(rest, start, 1.0, most=0).right == right
        said.add(right)
    assert said == {True, False}


def test_little_curvature_may_be_left_out():
    outputs = 3 * rand(0, 40, 10)
    labels = torch.arange(40) % 10
    held = []
    for left_out in (0.0, 0.1, 0.5):
        directions = output_curvature(outputs, labels, SOFTMAX, left_out)[2]
        held.append((len(directions), sum(float(d.double().square().sum()) for d in directions)))
    assert held[0][0] > held[1][0] > held[2][0]
    assert 0.5 * held[0][1] <= held[2][1] < held[1][1] < held[0][1]
    assert held[1][1] >= 0.9 * held[0][1]


def test_steps_are_rough_at_wide_places_only(monkeypatch):
    problem, used = planted(fit=40), set[float]()

    def spied(rest, coordinates, rho, start, most, tolerance):
        used.add(tolerance)
        assert (rest.left_out, tolerance) in (PRECISE, ROUGH)
        return minimise(rest, coordinates, rho, start, most, tolerance)

    monkeypatch.setattr("plot_ot.stages.newton.minimise", spied)
    for wide, wanted in ((12, PRECISE), (11, ROUGH)):
        used.clear()
        run(problem, NewtonHandles(weights=(1.0,), wide=wide))
        assert used == {wanted[1]}


def test_rough_steps_at_a_wide_place_end_where_precise_ones_do():
    """Fewer directions of curvature, and an earlier end: the objective is the same within two per cent."""
    problem = planted(fit=60)
    weights = pair_weights(problem.fit, "p", "balanced")
    [prior, *_] = priors_at(problem.fit, problem.subject.places, "p", weights)
    ends = []
    for left_out, tolerance in (PRECISE, ROUGH):
        rest = Rest.of(problem.fit, [prior.place], problem.fit.bank.labels["p"], weights, SOFTMAX, 64, left_out)
        start = Coordinates((Whitened.of(prior.start, prior.metric, None),))
        ends.append((rest.slopes([prior.start]).factors[0].shape[1], minimise(rest, start, 1e-2, None, 8, tolerance)))
    (many, precise), (few, rough) = ends
    assert few <= many
    assert rough.steps <= precise.steps
    assert rough.objective == pytest.approx(precise.objective, rel=0.02)


# -- DAS kept natural ---------------------------------------------------------------------------------------------


def test_the_latent_loss_is_the_distance_to_the_moved_base():
    problem = planted()
    place = problem.subject.places[0]
    edit = run(problem, TrainDas((2,), DasSpec(most=2))).handles["p"].batch()[0]
    assert edit.place == place
    latents = Latents.of(problem.fit, place, [("p", 2, 0)], 0.5)
    known, shift = finest_shift(problem.fit, place, "p")
    off = (edited_states([edit], problem.fit)[place.name] - problem.fit.base_at(place).double())[known] - shift
    states = problem.fit.store.activations[place.name].double()
    states = states[torch.cat([problem.fit.base_rows, problem.fit.source_rows]).unique()]
    precision = torch.linalg.inv(shrunk_covariance(states - states.mean(dim=0)))
    wanted = 0.5 * float(((off @ precision) * off).mean())
    assert float(latents.loss(edit, torch.tensor([0]), slice(None))) == pytest.approx(wanted, rel=1e-3)


def test_das_with_a_latent_loss_ends_nearer_to_natural_states():
    problem = planted()
    place = problem.subject.places[1]

    def distance(weight: float) -> float:
        spec = DasSpec(most=15, natural=weight)
        [rotation] = train_rotations(problem.fit, place, ["p"], [1], SOFTMAX, spec, problem.generator())
        edit = EditBatch(place, rotation.frame, torch.ones(1, 1))
        return float(Latents.of(problem.fit, place, [("p", 1, 0)], 1.0).loss(edit, torch.tensor([0]), slice(None)))

    assert distance(10.0) < 0.98 * distance(0.0)


def test_output_variables_may_keep_the_handle_found_before(monkeypatch):
    problem = planted(fit=40)
    before = run(problem, ClosedForm(sizes=(1,), ridges=(1.0,))).handles
    stages = [ClosedForm(sizes=(1,), ridges=(1.0,)), NewtonHandles(outputs=False)]
    assert "rho" in run(problem, *stages).handles["p"].chosen  # not an output: it is improved
    monkeypatch.setattr("plot_ot.abstract.banks.Power.is_output", property(lambda power: True))
    after = run(problem, *stages).handles
    assert {v: h.chosen["form"] for v, h in after.items()} == {v: h.chosen["form"] for v, h in before.items()}
    assert "rho" in run(problem, NewtonHandles(outputs=False)).handles["p"].chosen  # there is no other
