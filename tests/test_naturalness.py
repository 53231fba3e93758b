"""What speaks for a handle besides accuracy: closed forms on states made by hand."""

from __future__ import annotations

import pytest
import torch

from nets import rand
from plot_ot.abstract.banks import Bank
from plot_ot.abstract.causal_model import CausalModel
from plot_ot.edits import Frame
from plot_ot.handles import Edit, Handle
from plot_ot.judging.naturalness import naturalness
from plot_ot.subjects import BankRecording, MLPSubject, record


def causal() -> CausalModel:
    """Two bits and their sum; a third input means nothing."""
    mechanisms = {"A": lambda a: a, "B": lambda b: b, "y": lambda A, B: A + B}
    return CausalModel(inputs=("a", "b", "c"), mechanisms=mechanisms, output="y")


@pytest.fixture(scope="module")
def recording() -> BankRecording:
    torch.manual_seed(0)
    rows = torch.tensor([[x, y, z] for x in (0, 1) for y in (0, 1) for z in range(16)])
    bank = Bank.from_pairs(causal(), rows, rows[torch.randperm(64)], variables=("A", "B"))
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 3))
    recorded = record(MLPSubject(net), bank)[0]
    place = recorded.subject.places[0]
    states = rand(1, len(recorded.store.inputs), 4) * 0.01
    states[:, 0] += recorded.store.inputs[:, 0]  # A along the first direction, B along the second, else noise
    states[:, 1] += recorded.store.inputs[:, 1]
    recorded.store.activations[place.name] = states
    return recorded


def handle(recording: BankRecording, read: torch.Tensor, write: torch.Tensor) -> Handle:
    place = recording.subject.places[0]
    edit = Edit(place, Frame.oblique(read, write), torch.ones(1))
    return Handle("A", (edit,), recording.subject.identity())


E1, E2, E3 = (torch.eye(4)[:, k : k + 1] for k in range(3))


def test_the_right_direction_decodes_and_stays_natural(recording):
    found = naturalness(handle(recording, E1, E1), recording, recording)
    assert found.decoding == 1.0
    assert found.chance == 0.5
    assert 0.5 < found.stretch < 2


def test_another_variables_direction_does_not_decode(recording):
    assert naturalness(handle(recording, E2, E2), recording, recording).decoding == pytest.approx(0.5, abs=0.26)


def test_writing_along_a_dormant_direction_stands_out(recording):
    moved = recording.select(recording.bank.changed["A"])
    assert naturalness(handle(recording, E1, E3), recording, moved).stretch > 5


def test_the_stretch_does_not_depend_on_units(recording):
    """Mahalanobis lengths are the same in other coordinates of the whole space, up to the ridge."""
    before = naturalness(handle(recording, E1, E1), recording, recording).stretch
    place = recording.subject.places[0].name
    kept = recording.store.activations[place]
    try:
        recording.store.activations[place] = 50 * kept
        assert naturalness(handle(recording, E1, E1), recording, recording).stretch == pytest.approx(before, rel=1e-3)
    finally:
        recording.store.activations[place] = kept
