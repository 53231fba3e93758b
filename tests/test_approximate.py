"""Fewer pairs, projected φ, error bars, weighted families, and exact verification of what linearising proposes."""

from dataclasses import replace
from itertools import product
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn

from nets import planted_neurons
from plot_ot.abstract.banks import Bank
from plot_ot.abstract.causal_model import CausalModel
from plot_ot.engine import InProcess, record_shared, shards
from plot_ot.signatures import SignatureSpec, as_readout, measure_signatures
from plot_ot.signatures.jacobian import jacobian_signatures
from plot_ot.signatures.pooling import deal, jackknife, subsample
from plot_ot.sites import blocks, neurons, pca_prefixes, whole_places
from plot_ot.stages.calibrate import Search, within_places
from plot_ot.stages.choose import Calibrate
from plot_ot.stages.coupling import Localize, weightings
from plot_ot.stages.prefilter import Prefilter, rank_correlation
from plot_ot.stages.problem import Problem, State
from plot_ot.subjects import MLPSubject, record
from plot_ot.transport import Transport, couple
from refusals import assert_refused

CAUSAL = CausalModel(
    ["a", "b", "c", "d"],
    {"u": lambda a, b: (a + b) % 3, "v": lambda c, d: (c * d) % 3, "y": lambda u, v: (u + v) % 3},
    output="y",
)
POOL = torch.tensor(list(product(range(3), repeat=4)))
READOUT = as_readout("softmax")
SPECS = [SignatureSpec(a, n) for a, n in product(("stack", "family_mean"), ("none", "unit", "unit_family"))]
named = pytest.mark.parametrize("spec", SPECS, ids=lambda s: f"{s.aggregate}-{s.normalise}")


def network(outputs=3):
    with torch.random.fork_rng():
        torch.manual_seed(1000)
        return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, outputs))


def bank(pairs=60, seed=1):
    rows = torch.randint(len(POOL), (2, pairs), generator=torch.Generator().manual_seed(seed))
    return Bank.from_pairs(CAUSAL, POOL[rows[0]], POOL[rows[1]])


def recorded(fit=None, outputs=3):
    return record(MLPSubject(network(outputs)), fit or bank())[0]


def menu(recording):
    return neurons(recording, recording.subject.places)


# -- error bars ---------------------------------------------------------------------------------------------------


@named
def test_a_replicate_is_the_signature_of_the_other_folds_pairs(spec):
    recording, spec = recorded(), replace(spec, folds=4)
    family = menu(recording)
    found = measure_signatures(recording, family, READOUT, spec)
    folds = deal(recording.base_rows, 4, torch.Generator().manual_seed(spec.seed))
    [replicates] = found.replicates
    assert len(replicates) == 4
    for g, replicate in enumerate(replicates):
        rest = recording.select(folds != g)
        expected = measure_signatures(rest, family, READOUT, replace(spec, folds=0))
        if (spec.aggregate, spec.normalise) == ("stack", "none"):
            np.testing.assert_allclose(replicate.cost, expected.cost * len(recording) / len(rest), rtol=1e-5)
        elif spec.aggregate == "family_mean" or spec.normalise == "unit":
            np.testing.assert_allclose(replicate.cost, expected.cost, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(found.spread, jackknife([r.cost for r in replicates]).sqrt())
    plain = measure_signatures(recording, family, READOUT, replace(spec, folds=0))
    np.testing.assert_allclose(found.cost, plain.cost, rtol=1e-5, atol=1e-7)
    assert plain.spread is None


@named
def test_linearised_signatures_have_the_same_folds(spec):
    recording, spec = recorded(), replace(spec, folds=3)
    family = menu(recording)
    found, plain = (jacobian_signatures(recording, family, READOUT, s) for s in (spec, replace(spec, folds=0)))
    np.testing.assert_allclose(found.cost, plain.cost, rtol=1e-5, atol=1e-7)
    assert float(found.spread.min()) > 0


def test_folds_share_no_base_input():
    bases = torch.tensor([5, 3, 5, 9, 3, 7, 7, 5])
    folds = deal(bases, 3, torch.Generator().manual_seed(0))
    for row in bases.unique():
        assert len(folds[bases == row].unique()) == 1
    assert set(folds.tolist()) == {0, 1, 2}


@pytest.mark.parametrize("spec", [SignatureSpec(), SignatureSpec(normalise="unit")], ids=["none", "unit"])
def test_the_spread_is_how_much_costs_vary_between_banks(spec):
    draws = []
    for seed in range(40):
        recording = recorded(bank(80, 2000 + seed))
        draws.append(measure_signatures(recording, menu(recording), READOUT, replace(spec, folds=10)))
    true = torch.stack([d.cost for d in draws]).std(dim=0)
    claimed = torch.stack([d.spread for d in draws]).mean(dim=0)
    assert 0.75 < float((claimed / true).median()) < 1.35


@named
@pytest.mark.parametrize("how", [measure_signatures, jacobian_signatures])
def test_signatures_are_summed_over_shards_of_the_work(how, spec):
    fit, spec = bank(), replace(spec, folds=3, project=2)
    subject = MLPSubject(network())
    [shared] = record_shared(InProcess().crew(subject), subject, [fit], size=11)
    assert len(shards(shared)) > 3
    family = menu(shared)
    found = how(shared, family, READOUT, replace(spec, folds=0))
    expected = how(recorded(fit), family, READOUT, replace(spec, folds=0))
    np.testing.assert_allclose(found.cost, expected.cost, rtol=1e-4, atol=1e-5)
    assert found.noise == pytest.approx(expected.noise, abs=1e-6)
    assert how(shared, family, READOUT, spec).spread.isfinite().all()


# -- fewer pairs --------------------------------------------------------------------------------------------------


def test_subsampled_pairs_keep_the_families_shares_and_stand_for_the_bank():
    families = torch.tensor([0] * 70 + [1] * 25 + [3] * 5)
    chosen, weight = subsample(families, 20, torch.Generator().manual_seed(0))
    assert torch.bincount(families[chosen]).tolist() == [14, 5, 0, 1]
    for f in (0, 1, 3):
        assert float(weight[families[chosen] == f].sum()) == pytest.approx(float((families == f).sum()))
    few, _ = subsample(torch.tensor([0] * 98 + [1, 2]), 4, torch.Generator().manual_seed(0))
    assert len(few) == len(set(few.tolist())) == 4
    assert {98, 99} <= set(few.tolist())


def test_as_many_pairs_as_there_are_change_nothing():
    recording = recorded()
    family = menu(recording)
    found = measure_signatures(recording, family, READOUT, SignatureSpec(pairs=len(recording), folds=0))
    np.testing.assert_allclose(found.cost, measure_signatures(recording, family, READOUT).cost)


@named
def test_costs_on_fewer_pairs_are_near_those_on_all_within_their_error_bars(spec):
    recording = recorded(bank(400))
    family = menu(recording)
    whole = measure_signatures(recording, family, READOUT, spec).cost
    some = [measure_signatures(recording, family, READOUT, replace(spec, pairs=150, seed=s)) for s in range(8)]
    errors = torch.stack([(s.cost - whole).abs() / s.spread.clamp(min=1e-9) for s in some])
    assert float(errors.median()) < 1.5
    assert float((errors < 3).double().mean()) > 0.9


# -- random projections -------------------------------------------------------------------------------------------


@named
def test_projected_costs_are_near_those_of_the_whole_features_within_their_error_bars(spec):
    recording = recorded(bank(200))
    family = menu(recording)
    whole = measure_signatures(recording, family, READOUT, spec).cost
    some = [measure_signatures(recording, family, READOUT, replace(spec, project=12, seed=s)) for s in range(8)]
    errors = torch.stack([(s.cost - whole).abs() / s.spread.clamp(min=1e-9) for s in some])
    assert float((errors < 3).double().mean()) > 0.9
    assert len(some[0].replicates) == (2 if spec.aggregate == "family_mean" else 1)
    many = measure_signatures(recording, family, READOUT, replace(spec, project=3000))
    np.testing.assert_allclose(many.cost, whole, rtol=0.15, atol=0.05 * float(whole.max()))


def test_linear_features_are_projected_before_they_are_linearised():
    """k backward passes instead of one per output; on a linear network still exact."""
    net = network(outputs=9)
    net[1], net[3] = nn.Identity(), nn.Identity()
    recording = record(MLPSubject(net), bank())[0]
    family, readout = menu(recording), as_readout("logits")
    for aggregate in ("stack", "family_mean"):
        spec = SignatureSpec(aggregate, project=2, centre=True, folds=3)
        with mock.patch("torch.autograd.grad", wraps=torch.autograd.grad) as grad:
            found = jacobian_signatures(recording, family, readout, spec)
        assert grad.call_count == 2 * 3  # two projections in each of three folds
        np.testing.assert_allclose(found.cost, measure_signatures(recording, family, readout, spec).cost, rtol=1e-4)


@pytest.mark.parametrize(
    ("project", "folds", "sources"), [(4, 0, 0), (None, 3, 1), (1, 3, 1), (2, 3, 2), (4, 2, 2), (4, None, 2)]
)
def test_projections_that_all_pairs_share_are_a_source_of_error_of_their_own(project, folds, sources):
    """Effects averaged first share one projection; a single direction of it cannot be left out."""
    recording = recorded()
    spec = SignatureSpec("family_mean", project=project, folds=folds)
    found = measure_signatures(recording, menu(recording), READOUT, spec)
    assert len(found.replicates) == sources
    assert (found.spread is None) == (sources == 0)


# -- weighted families --------------------------------------------------------------------------------------------


def test_a_family_with_all_the_weight_is_measured_alone():
    recording = recorded(bank(150))
    family, names = menu(recording), recording.bank.families
    for normalise in ("unit", "unit_family"):
        spec = SignatureSpec(normalise=normalise, hierarchical=True)
        found = measure_signatures(recording, family, READOUT, spec)
        seen = recording.bank.family.unique().tolist()
        both = next(f for f in seen if all(recording.bank.changed[v][recording.bank.family == f].any() for v in "uv"))
        alone = measure_signatures(
            recording.select(recording.bank.family == both), family, READOUT, SignatureSpec(normalise="unit")
        )
        weighted = found.weighted({n: float(k == both) for k, n in enumerate(names)}, names)
        scale = len(seen) if normalise == "unit_family" else 1
        np.testing.assert_allclose(weighted.cost, scale * alone.cost, rtol=1e-4, atol=1e-5)


@named
def test_equal_weights_change_nothing(spec):
    recording = recorded()
    family, names = menu(recording), recording.bank.families
    found = measure_signatures(recording, family, READOUT, replace(spec, hierarchical=True, folds=3))
    even = found.weighted(dict.fromkeys(names, 0.25), names)
    np.testing.assert_allclose(even.cost, found.cost, rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(even.spread, found.spread, rtol=1e-5, atol=1e-9)
    np.testing.assert_allclose(
        found.cost, measure_signatures(recording, family, READOUT, spec).cost, rtol=1e-5, atol=1e-7
    )


def weighted_cost(moments, spec, weights):
    """Σ_f w_f |u_f - v_f|² of the blocks, normalised as the spec says; weights share as much as equal ones would."""
    seen = moments.present.nonzero().squeeze(1).tolist()
    share = {f: weights[f] * len(seen) / sum(weights[g] for g in seen) for f in seen}
    blocks = {f: (moments.uu[f][:, None], moments.vv[f][None], moments.uv[f]) for f in seen}
    if spec.normalise == "unit_family":
        return sum(share[f] * (2 - 2 * uv / (uu * vv).sqrt().clamp(min=1e-12)) for f, (uu, vv, uv) in blocks.items())
    uu, vv, uv = (sum(share[f] * blocks[f][k] for f in seen) for k in range(3))
    return uu + vv - 2 * uv if spec.normalise == "none" else 2 - 2 * uv / (uu * vv).sqrt()


@named
def test_a_familys_weight_counts_its_block_that_often(spec):
    recording = recorded(bank(150))
    family, names = menu(recording), recording.bank.families
    found = measure_signatures(recording, family, READOUT, replace(spec, hierarchical=True, folds=3))
    found = replace(found, exact=torch.ones(len(family), dtype=torch.bool))
    weights = {n: float(k + 1) for k, n in enumerate(names)}
    weighted = found.weighted(weights, names)
    expected = weighted_cost(found.pooled.whole, spec, [*weights.values()])
    np.testing.assert_allclose(weighted.cost, expected, rtol=1e-5, atol=1e-7)
    assert not np.allclose(weighted.cost, found.cost, rtol=1e-2)
    [parts], [moments] = weighted.replicates, found.pooled.left_out
    for replicate, without in zip(parts, moments, strict=True):
        expected = weighted_cost(without, spec, [*weights.values()])
        np.testing.assert_allclose(replicate.cost, expected, rtol=1e-5, atol=1e-7)
    assert (weighted.weights, weighted.exact is found.exact, weighted.noise) == (weights, True, found.noise)
    assert (weighted.variables, weighted.family, weighted.spec) == (found.variables, found.family, found.spec)


def weights_of(**changes):
    recording = recorded()
    names = recording.bank.families
    found = measure_signatures(recording, menu(recording), READOUT, SignatureSpec(hierarchical=True))
    found.weighted(
        {n: changes.get(n, changes.get("others", 1.0)) for n in names if changes.get(n, 1) is not None}, names
    )


def test_the_grid_of_weights_is_the_simplexs():
    points = weightings(["p", "q", "r", "unseen"], ["p", "q", "r"], 2)
    assert len(points) == 6
    assert all(sum(w.values()) == 1 and w["unseen"] == 0 for w in points)
    assert weightings(["p", "q"], ["p", "q"], 2) == [{"p": 1.0, "q": 0.0}, {"p": 0.0, "q": 1.0}]  # not the equal one


# -- stages -------------------------------------------------------------------------------------------------------


def problem(copies=2, pairs=200):
    planted = planted_neurons(copies, seed=1000)
    fit, calibration = record(planted.subject, *planted.banks(pairs, pairs, seed=1000))
    return planted, Problem(planted.subject, fit, calibration, ("p", "q"), READOUT)


TRANSPORT = Transport(epsilon=(0.03,), scale="median")
SEARCH = Search((1, 2, 3), (1.0, 2.0, 3.0))


def counted(subject):
    """The responses a subject gives from now on."""
    spent, resume = [], subject.resume

    def watched(store, rows, start, activation, later):
        spent.append(activation.shape[0] * activation.shape[1])
        return resume(store, rows, start, activation, later)

    subject.resume = watched
    return spent


@pytest.mark.parametrize("how", ["exact", "jacobian", Prefilter(0.5, few=0), Prefilter(0.5, few=0, audit=0.3)], ids=str)
def test_every_way_of_measuring_finds_the_planted_neurons(how):
    planted, p = problem()
    state = Localize((neurons,), TRANSPORT, coupling="place", signatures=how)(p, State.start(p))
    state = Calibrate(SEARCH)(p, state)
    for v in ("p", "q"):
        assert set(state.handles[v].chosen["sites"]) <= planted.truth[v]
        assert state.handles[v].chosen["calibration_score"] > 0.999
    for found in state.signatures:
        assert (found.agreement is not None) == isinstance(how, Prefilter)


def test_a_prefilter_says_which_sites_are_exact_and_stays_within_its_budget():
    _, p = problem(pairs=300)
    family = neurons(p.fit, p.subject.places)
    exact, linear = measure_signatures(p.fit, family, READOUT), jacobian_signatures(p.fit, family, READOUT)
    spent = counted(p.subject)
    found = Prefilter(0.3, few=0, audit=0.3)(p.fit, family, READOUT, SignatureSpec(), p.variables, TRANSPORT)
    verified = found.exact.nonzero().squeeze(1).tolist()
    assert len(verified) == int(0.3 * len(family))
    bases, places = len(p.fit.base_rows.unique()), len(p.subject.places)
    assert sum(spent) <= bases + len(p.fit) * (len(verified) + places)
    np.testing.assert_allclose(found.cost[:, found.exact], exact.cost[:, found.exact], rtol=1e-5)
    np.testing.assert_allclose(found.cost[:, ~found.exact], linear.cost[:, ~found.exact], rtol=1e-5)
    for i, v in enumerate(p.variables):
        rho = rank_correlation(linear.cost[i, verified], exact.cost[i, verified])
        assert found.agreement.spearman[v] == pytest.approx(rho)
        assert 0 <= found.agreement.overlap[v] <= 1
        assert 0 <= found.agreement.missed[v] <= 1


def test_a_budget_may_be_a_number_of_responses():
    _, p = problem(pairs=100)
    family = neurons(p.fit, p.subject.places)
    found = Prefilter(7 * 100 + 99, few=0)(p.fit, family, READOUT, SignatureSpec(), p.variables, TRANSPORT)
    assert int(found.exact.sum()) == 7
    fewer = Prefilter(7 * 100, few=0)(p.fit, family, READOUT, SignatureSpec(pairs=50), p.variables, TRANSPORT)
    assert int(fewer.exact.sum()) == 14


def test_couplings_see_all_sites_and_say_which_are_exact():
    _, p = problem()
    stage = Localize((neurons,), TRANSPORT, SignatureSpec(folds=5), signatures=Prefilter(0.3, few=0))
    state = stage(p, State.start(p))
    [found], [candidate] = state.signatures, state.candidates["p"]
    coupling = candidate.coupling
    assert coupling.plan.shape == coupling.spread.shape == (2, len(found.family))
    np.testing.assert_array_equal(coupling.exact, found.exact)
    for narrowed in within_places([candidate])[1:]:
        at = found.family.at(narrowed.family.sites[0].place)
        np.testing.assert_array_equal(narrowed.coupling.spread, coupling.spread[:, at])
        np.testing.assert_array_equal(narrowed.coupling.exact, coupling.exact[at])


def test_small_menus_are_measured_exactly_and_whole_places_always():
    _, p = problem()
    small = Prefilter()(p.fit, blocks(4)(p.fit, p.subject.places), READOUT, SignatureSpec(), p.variables, TRANSPORT)
    assert small.exact is None
    family = pca_prefixes()(p.fit, p.subject.places)
    found = Prefilter(0.8, few=0)(p.fit, family, READOUT, SignatureSpec(), p.variables, TRANSPORT)
    large = [j for j, s in enumerate(family.sites) if 2 * len(s.directions) >= family.frames[s.place.name].rank]
    assert found.exact[large].all()


def test_a_couplings_spread_is_how_much_its_replicates_vary():
    recording = recorded(bank(200))
    family = menu(recording)
    found = measure_signatures(recording, family, READOUT, SignatureSpec(folds=6))
    [coupling] = couple(found, TRANSPORT)
    plans = [couple(s, TRANSPORT)[0].plan for s in found.replicates[0]]
    np.testing.assert_allclose(coupling.spread, np.sqrt(5 / 6 * np.square(plans - np.mean(plans, axis=0)).sum(axis=0)))
    plain = couple(measure_signatures(recording, family, READOUT), TRANSPORT)[0]
    assert plain.exact is plain.spread is plain.weights is None


def test_calibration_chooses_between_weights_of_families():
    _, p = problem()
    names = p.fit.bank.families
    plain = Localize((neurons,), TRANSPORT, SignatureSpec(normalise="unit"))
    stage = replace(plain, spec=SignatureSpec(normalise="unit", hierarchical=True))
    states = [Calibrate(SEARCH)(p, s(p, State.start(p))) for s in (plain, stage)]
    assert len(states[1].candidates["p"]) == 1 + len(weightings(names, names, 2))
    for v in p.variables:
        assert states[1].calibrations[v].score >= states[0].calibrations[v].score
        weights = [c.coupling.weights for c in states[1].candidates[v][1:]]
        assert all(abs(sum(w.values()) - 1) < 1e-9 for w in weights)


# -- refusals -----------------------------------------------------------------------------------------------------


def too_small_a_budget():
    _, p = problem(pairs=100)
    family = neurons(p.fit, p.subject.places)
    Prefilter(99, few=0)(p.fit, family, READOUT, SignatureSpec(), p.variables, TRANSPORT)


def only_whole_places():
    _, p = problem(pairs=100)
    family = whole_places(p.fit, p.subject.places)
    Prefilter(0.4, few=0)(p.fit, family, READOUT, SignatureSpec(), p.variables, TRANSPORT)


def one_base():
    rows = POOL[[0] * 20]
    measure_signatures(
        recorded(Bank.from_pairs(CAUSAL, rows, POOL[20:40])), menu(recorded()), READOUT, SignatureSpec(folds=4)
    )


def pooled_families():
    recording = recorded()
    names = recording.bank.families
    measure_signatures(recording, menu(recording), READOUT).weighted(dict.fromkeys(names, 1.0), names)


REFUSED = {
    "no pairs": (lambda: SignatureSpec(pairs=0), ["`pairs`", "at least 1", "found 0"]),
    "no projections": (lambda: SignatureSpec(project=-2), ["`project`", "at least 1"]),
    "one fold": (lambda: SignatureSpec(folds=1), ["at least 2 folds", "found 1"]),
    "fewer pairs than families": (
        lambda: subsample(torch.arange(5), 3, torch.Generator()),
        ["3 pairs", "5 families", "at least 5"],
    ),
    "folds of a single base": (one_base, ["at least two base inputs", "folds=0"]),
    "a share above one": (lambda: Prefilter(1.5), ["(0, 1]", "1.5"]),
    "nothing affordable": (too_small_a_budget, ["99 responses", "one site on 100 pairs"]),
    "coarse menu": (only_whole_places, ["3 of 3 sites", "exact responses"]),
    "unknown measure": (lambda: Localize(signatures="jacobi"), ["'jacobi'", "Did you mean 'jacobian'", "exact"]),
    "weights of pooled families": (pooled_families, ["hierarchical=True"]),
    "a family without its weight": (lambda: weights_of(none=None), ["Every family (none, ", "weight of 0 or more"]),
    "a negative weight": (lambda: weights_of(none=-0.5), ["weight of 0 or more", "-0.5"]),
    "no weight at all": (lambda: weights_of(none=0.0, others=0.0), ["weight of 0 or more"]),
    "no steps": (lambda: Localize(steps=0), ["at least one step"]),
    "too many weights": (lambda: weightings([*"abcdefghij"], [*"abcdefghij"], 5), ["10 families", "fewer steps"]),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals_name_what_was_found_and_expected(case):
    assert_refused(*REFUSED[case])
