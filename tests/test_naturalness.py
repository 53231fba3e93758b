"""What speaks for a handle besides accuracy: closed forms on states made by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from nets import rand
from plot_ot.abstract.banks import Bank
from plot_ot.abstract.causal_model import CausalModel
from plot_ot.edits import Frame
from plot_ot.handles import Edit, Handle
from plot_ot.judging.naturalness import DRAWS, naturalness
from plot_ot.stages.natural import shrunk_covariance
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


def test_of_several_places_the_most_stretched_counts():
    """At a later place the state is the run's own, as edited before: what the first edit does there counts, too."""
    net = torch.nn.Sequential(
        torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3)
    )
    rows = torch.tensor([[x, y, z] for x in (0, 1) for y in (0, 1) for z in range(16)])
    order = torch.randperm(64, generator=torch.Generator().manual_seed(0))
    bank = Bank.from_pairs(causal(), rows, rows[order], variables=("A", "B"))
    recorded = record(MLPSubject(net), bank)[0]
    first, second = recorded.subject.places
    plain = Edit(first, Frame.identity(4), torch.ones(4))
    strange = Edit(second, Frame.oblique(rand(2, 5, 1), rand(3, 5, 1)), torch.full((1,), 30.0))
    both = Handle("A", (plain, strange), recorded.subject.identity())
    alone = naturalness(Handle("A", (plain,), both.subject), recorded, recorded)
    found = naturalness(both, recorded, recorded)
    assert found.stretch == pytest.approx(alone.stretch, rel=1e-3)  # after a whole patch nothing differs any more
    half = replace(plain, gains=torch.full((4,), 0.5))
    assert naturalness(replace(both, edits=(half, strange)), recorded, recorded).stretch > 3


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


def test_the_stretch_is_the_median_length_of_edited_states_over_that_of_natural_ones(recording):
    place = recording.subject.places[0]
    states = recording.store.activations[place.name].double()
    centred = states - states.mean(dim=0)
    precision = torch.linalg.inv(shrunk_covariance(centred))

    def length(a: torch.Tensor) -> torch.Tensor:
        return torch.stack([(row @ precision @ row).sqrt() for row in a])

    base, source = recording.base_at(place).double(), recording.source_at(place).double()
    edited = base.clone()
    edited[:, 0] += 2.0 * (source[:, 0] - base[:, 0])
    lengths = length(edited - states.mean(dim=0)) / length(centred).median()
    doubled = replace(handle(recording, E1, E1).edits[0], gains=torch.tensor([2.0]))
    found = naturalness(replace(handle(recording, E1, E1), edits=(doubled,)), recording, recording)
    assert found.stretch == pytest.approx(float(lengths.median()), rel=1e-5)
    # its interval draws base inputs again, each with all of its pairs
    group = recording.bank.base_groups()
    count = int(group.max()) + 1
    drawn = torch.randint(count, (DRAWS, count), generator=torch.Generator().manual_seed(0))
    medians = []
    for some in drawn:
        pooled = torch.cat([lengths[group == g] for g in some]).sort().values
        medians.append(float(pooled[(len(pooled) - 1) // 2]))
    ends = np.quantile(medians, (0.025, 0.975))
    assert (found.stretch_low, found.stretch_high) == pytest.approx(tuple(ends), rel=1e-5)
    assert found.stretch_low <= found.stretch <= found.stretch_high


def test_the_cell_stretch_is_measured_from_the_states_that_have_the_sources_value(recording):
    place = recording.subject.places[0]
    inputs = recording.store.inputs
    states = recording.store.activations[place.name].double()
    value = causal().run(inputs)["A"]
    means = torch.stack([states[value == v].mean(dim=0) for v in (0, 1)])
    centred = states - means[value.long()]
    precision = torch.linalg.inv(shrunk_covariance(centred))

    def length(a: torch.Tensor) -> torch.Tensor:
        return torch.stack([(row @ precision @ row).sqrt() for row in a])

    base, source = recording.base_at(place).double(), recording.source_at(place).double()
    wanted = causal().run(recording.bank.source)["A"]
    for direction, natural in ((0, True), (2, False)):  # what is read is written where it belongs, or elsewhere
        edited = base.clone()
        edited[:, direction] += source[:, 0] - base[:, 0]
        expected = (length(edited - means[wanted.long()]) / length(centred).median()).median()
        written = handle(recording, E1, torch.eye(4)[:, direction : direction + 1])
        found = naturalness(written, recording, recording).cell_stretch
        assert found == pytest.approx(float(expected), rel=1e-4)
        assert (found < 1.5) == natural


def test_without_a_fit_input_of_the_sources_value_there_is_no_cell_stretch(recording):
    zeros = recording.select((recording.bank.base[:, 0] == 0) & (recording.bank.source[:, 0] == 0))
    ones = recording.select(recording.bank.source[:, 0] == 1)
    assert naturalness(handle(recording, E1, E1), zeros, ones).cell_stretch is None
    some = naturalness(handle(recording, E1, E1), zeros, recording).cell_stretch  # from the pairs with known values
    assert some is not None
    flat = naturalness(handle(recording, E1, E1), zeros, recording)
    assert (flat.decoding, flat.chance) == (None, None)  # one value only: nothing to tell apart


def test_decoding_is_a_balanced_share_on_inputs_that_were_not_fitted(recording):
    """Of eight held-out inputs with value 0 all are told, of four with value 1 half: 0.75, not 10 of 12."""
    place = recording.subject.places[0]
    rows = recording.base_rows
    value = recording.bank.base[:, 0]
    zeros, ones = ((value == v).nonzero().squeeze(1) for v in (0, 1))
    fit = recording.select(torch.cat([zeros[8:], ones[4:]]))
    held = recording.select(torch.cat([zeros[:8], ones[:4]]))
    kept = recording.store.activations[place.name].clone()
    try:
        recording.store.activations[place.name][rows[ones[:2]], 0] -= 1.0
        found = naturalness(handle(recording, E1, E1), fit, held)
    finally:
        recording.store.activations[place.name] = kept
    assert found.decoding == pytest.approx(0.75)
    assert found.chance == 0.5


def test_only_directions_that_an_edit_uses_are_read(recording):
    place = recording.subject.places[0]
    both = Frame.oblique(torch.eye(4)[:, :2], torch.eye(4)[:, :2])
    for gains, decodes in ((torch.tensor([1.0, 0.0]), True), (torch.tensor([0.0, 1.0]), False)):
        some = Handle("A", (Edit(place, both, gains),), recording.subject.identity())
        assert (naturalness(some, recording, recording).decoding > 0.9) == decodes
