"""PLOT end to end on networks written by hand: it must rank the neurons that hold a variable above everything else."""

from __future__ import annotations

import math

import pytest
import torch

from nets import planted_neurons
from plot_ot.signatures import SignatureSpec, as_readout, measure_signatures
from plot_ot.sites import neurons
from plot_ot.stages.calibrate import Search, calibrate, correct
from plot_ot.stages.problem import Candidate
from plot_ot.subjects import record
from plot_ot.transport import Transport, couple

READOUT = as_readout("softmax")
SEARCH = Search((1, 2, 4), (0.5, 1.0, 2.0))
TRANSPORTS = {
    "eot": Transport("eot", (0.05,), scale="median"),
    "eot in units of the cost": Transport("eot", (4.0,)),
    "uot": Transport("uot", (0.05,), (1.0,), scale="median"),
    "uot-one-sided": Transport("uot-one-sided", (0.05,), (1.0,), scale="median"),
    "cosine": Transport("cosine", (0.1,)),
}


@pytest.mark.parametrize("transport", TRANSPORTS.values(), ids=TRANSPORTS)
@pytest.mark.parametrize("copies", [1, 2])
@pytest.mark.parametrize("seed", [0, 1])
def test_plot_ranks_the_planted_neurons_on_top_and_its_handles_are_always_right(transport, copies, seed):
    planted = planted_neurons(copies, seed)
    fit, calibration, test = record(planted.subject, *planted.banks(300, 300, 300, seed=seed))
    family = neurons(fit, planted.subject.places)
    [coupling] = couple(measure_signatures(fit, family, READOUT), transport)
    assert coupling.converged
    for variable, truth in planted.truth.items():
        ranked = [family.sites[j].name for j in coupling.ranking(variable)]
        assert set(ranked[:copies]) == truth
        found = calibrate(calibration, [Candidate(family, coupling)], variable, SEARCH, READOUT)
        assert found.score == pytest.approx(1)
        assert set(found.handle.chosen["sites"]) <= truth
        assert correct(test, found.handle, READOUT).all()
        gains = {e.place.name: e.gains for e in found.handle.edits}
        assert list(gains) == ["layer2"]
        assert {f"layer2[{j}]" for j in gains["layer2"].nonzero().flatten().tolist()} <= truth


@pytest.mark.parametrize("aggregate", ["stack", "family_mean"])
@pytest.mark.parametrize("normalise", ["none", "unit", "unit_family"])
def test_a_planted_neuron_has_the_signature_of_its_variable(aggregate, normalise):
    planted = planted_neurons()
    [fit] = record(planted.subject, *planted.banks(300))
    family = neurons(fit, planted.subject.places)
    found = measure_signatures(fit, family, READOUT, SignatureSpec(aggregate, normalise))
    names = [s.name for s in family.sites]
    for i, variable in enumerate(found.variables):
        [site] = planted.truth[variable]
        assert float(found.cost[i, names.index(site)]) <= float(found.cost[i].min()) * (1 + 1e-3)
        assert float(found.cosine[i, names.index(site)]) > 0.99
        assert math.isclose(float(found.column_norms[names.index(site)]), float(found.row_norms[i]), rel_tol=0.05)


def test_a_network_without_the_variable_gets_no_handle_that_is_right():
    """The same search in a network with shuffled weights must not claim the variable."""
    planted = planted_neurons()
    net = planted.subject.net
    with torch.no_grad():
        for linear in net[::2]:
            order = torch.randperm(linear.weight.numel(), generator=torch.Generator().manual_seed(0))
            linear.weight.copy_(linear.weight.flatten()[order].view_as(linear.weight))
    fit, calibration = record(planted.subject, *planted.banks(300, 300))
    family = neurons(fit, planted.subject.places)
    [coupling] = couple(measure_signatures(fit, family, READOUT), TRANSPORTS["uot-one-sided"])
    for variable in planted.truth:
        assert calibrate(calibration, [Candidate(family, coupling)], variable, SEARCH, READOUT).score < 0.8
