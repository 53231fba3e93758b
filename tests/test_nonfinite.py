"""NaN and infinity are caught where they first appear, and the place, the layer and the pair are named."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from nets import planted_plane, rand
from plot_ot.edits import EditBatch, Frame, respond
from plot_ot.errors import PlotError
from plot_ot.handles import Edit, Handle
from plot_ot.signatures import as_readout, measure_signatures
from plot_ot.sites import blocks
from plot_ot.stages.calibrate import Search, calibrate, correct
from plot_ot.stages.das import train_rotations
from plot_ot.stages.descent import DasSpec
from plot_ot.stages.problem import Candidate
from plot_ot.subjects import ModuleSubject, record, record_pairs
from plot_ot.transport import Transport, couple, from_scores
from refusals import assert_refused

READOUT = as_readout("softmax")


class Breaks(nn.Module):
    """Passes its input on, but a row in which some number exceeds the limit becomes NaN or infinite."""

    def __init__(self, limit: float, becomes: float) -> None:
        super().__init__()
        self.limit, self.becomes = limit, becomes

    def forward(self, x: Tensor) -> Tensor:
        return torch.where((x.abs() > self.limit).any(dim=-1, keepdim=True), self.becomes, x)


def network(limit: float, becomes: float = math.nan, at: int = 2) -> ModuleSubject:
    """Three hidden layers; the one at `at` breaks beyond the limit, which no clean input reaches."""
    torch.manual_seed(1000)
    layers: list[nn.Module] = []
    for k in range(3):
        layers += [nn.Linear(4, 4), Breaks(limit if k == at else math.inf, becomes)]
    net = nn.Sequential(*layers, nn.Linear(4, 2))
    return ModuleSubject(net, {f"layer{k + 1}": str(2 * k + 1) for k in range(3)}, torch.zeros(1, 4))


INPUTS = rand(1000, 12, 4)
BASE, SOURCE = INPUTS[:6], INPUTS[6:]


def largest(at: int) -> float:
    """What a clean run reaches at a layer."""
    store = network(math.inf).record(INPUTS)
    return float(store.activations[f"layer{at + 1}"].abs().max())


@pytest.mark.parametrize("becomes", [math.nan, math.inf])
@pytest.mark.parametrize("at", [1, 2])
def test_an_edit_that_breaks_a_late_layer_names_that_layer_the_pair_and_the_edit(becomes, at):
    subject = network(1.01 * largest(at), becomes, at)
    [recording] = record_pairs(subject, (BASE, SOURCE))
    place = subject.places[0]
    strong = torch.tensor([[1.0], [1.0], [40.0]]) * torch.ones(3, 4)
    respond(recording, [EditBatch(place, Frame.identity(4), torch.zeros(1, 4))])  # nothing is wrong with no edit
    words = [
        "An edit at layer1 (layer 1)",
        f"first at layer{at + 1} (layer {at + 1})",
        "pair 0",
        str(recording.store.inputs[recording.base_rows[0]].tolist()),
        str(recording.store.inputs[recording.source_rows[0]].tolist()),
    ]
    assert_refused(lambda: respond(recording, [EditBatch(place, Frame.identity(4), strong)]), words)


def test_only_the_pair_that_breaks_is_named():
    """The limit lies between the largest and the next largest number that the pairs reach under the edit."""
    subject, reached = network(math.inf), torch.zeros(6)
    [recording] = record_pairs(subject, (BASE, SOURCE))
    place = subject.places[0]
    edit = EditBatch(place, Frame.identity(4), torch.tensor([[3.0, -2.0, 0.0, 1.0]]))

    def readout(a: Tensor) -> Tensor:
        reached.copy_(a[0].abs().amax(dim=1))
        return a

    edited = edit.apply(recording.base_at(place).unsqueeze(0), recording.source_at(place))
    subject.resume(recording.store, recording.base_rows, place, edited, {"layer3": readout})
    second, first = reached.sort().values[-2:].tolist()
    broken = replace(recording, subject=network((first + second) / 2))
    with pytest.raises(PlotError, match=rf"pair {int(reached.argmax())}, variant 0 .*1 of 6 responses"):
        respond(broken, [edit])


def test_an_edit_that_is_not_finite_itself_is_named_at_its_own_place():
    subject = network(math.inf)
    [recording] = record_pairs(subject, (BASE, SOURCE))
    gains = torch.tensor([[1.0, math.inf, 0.0, 0.0]])
    edit = EditBatch(subject.places[1], Frame.identity(4), gains)
    assert_refused(lambda: respond(recording, [edit]), ["edit at layer2", "first at layer2 (layer 2)"])


def test_recorded_activations_name_the_place_and_the_input():
    assert_refused(lambda: record_pairs(network(0.0, at=1), (BASE, SOURCE)), ["NaN", "layer2", "for input ["])


# -- the stages -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def planted():
    return planted_plane()


@pytest.fixture(scope="module")
def fit(planted):
    return record(planted.subject, *planted.banks(60))[0]


class _Overflowing:
    """The subject, but what it resumes at a place is NaN for the chosen variants."""

    def __init__(self, subject, at: str):
        self.subject, self.at = subject, at

    def __getattr__(self, name):
        return getattr(self.subject, name)

    def resume(self, store, rows, start, activation, later):
        outputs = self.subject.resume(store, rows, start, activation, later)
        if start.name == self.at:
            outputs = torch.where(torch.arange(len(outputs))[:, None, None] == len(outputs) - 1, math.nan, outputs)
        return outputs


def test_signatures_calibration_and_tests_name_the_place(fit):
    broken = replace(fit, subject=_Overflowing(fit.subject, "layer2"))
    family = blocks(1)(fit, fit.subject.places)
    assert_refused(lambda: measure_signatures(broken, family, READOUT), ["layer2", "NaN or infinity", "pair "])
    sound = measure_signatures(fit, family, READOUT)
    [coupling] = couple(sound, Transport())
    search = Search((1, 2), (1.0, 2.0))
    early = replace(fit, subject=_Overflowing(fit.subject, "layer1"))  # where the best sites are
    assert_refused(
        lambda: calibrate(early, [Candidate(family, coupling)], "p", search, READOUT), ["layer1", "NaN or infinity"]
    )
    place = fit.subject.places[1]
    handle = Handle("p", (Edit(place, Frame.identity(place.width), torch.ones(place.width)),), "any")
    assert_refused(lambda: correct(broken, handle, READOUT), ["layer2", "NaN or infinity"])


def test_features_that_are_not_finite_though_the_outputs_are_name_the_place(fit):
    family = blocks(1)(fit, fit.subject.places)
    strange = replace(READOUT, neural=lambda outputs: READOUT.neural(outputs) / 0)
    assert_refused(lambda: couple(measure_signatures(fit, family, strange), Transport()), ["layer1"])


def test_costs_and_scores_name_the_variable_and_the_site(fit):
    family = blocks(1)(fit, fit.subject.places)
    found = measure_signatures(fit, family, READOUT)
    cost = found.cost.clone()
    cost[1, 3] = math.nan
    for kind in ("eot", "uot", "cosine"):
        assert_refused(
            lambda kind=kind: couple(replace(found, cost=cost), Transport(kind)),
            ["nan", f"variable {found.variables[1]}", f"site {family.sites[3].name}"],
        )
    assert_refused(lambda: from_scores(["u", "v"], ["s"], [[1.0], [math.inf]], "x"), ["inf", "variable v at site s"])


@pytest.mark.parametrize("optimiser", ["riemannian", "adam", "oblique"])
def test_a_das_loss_names_the_place_the_job_and_the_epoch(fit, optimiser):
    calls = []

    def loss(outputs: Tensor, labels: Tensor) -> Tensor:
        calls.append(None)
        return READOUT.loss(outputs, labels) * (math.nan if len(calls) > 3 else 1.0)

    spec = DasSpec(optimiser, batch=30, most=5)
    readout, generator = replace(READOUT, loss=loss), torch.Generator().manual_seed(0)
    place = fit.subject.places[0]
    assert_refused(
        lambda: train_rotations(fit, place, ["p"], [2], readout, spec, generator),
        ["DAS at layer1 for 'p' with k = 2", "NaN or infinity", "epoch 2"],
    )
