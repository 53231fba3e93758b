"""Controls: what each of them does, against plain loops over pairs."""

import numpy as np
import pytest
import torch

from plot_ot.abstract.banks import Bank, draw_pairs
from plot_ot.edits import Frame
from plot_ot.handles import Edit, Handle
from plot_ot.judging.controls import (
    Score,
    controls,
    full_patch,
    joined,
    random_subspaces,
    score,
    with_shuffled_values,
)
from plot_ot.judging.intervals import Bootstrap
from plot_ot.subjects import BankRecording, MLPSubject, record
from test_verdict import READOUT, ROWS, and_xor_net, neuron_handle, xor_model


def recorded(variable: str = "left", size: int = 200) -> tuple[MLPSubject, BankRecording, BankRecording]:
    causal, subject = xor_model(), MLPSubject(and_xor_net())
    generator = torch.Generator().manual_seed(1)
    banks = [draw_pairs(causal, ROWS, p, size, generator, variable=variable) for p in ("sensitive", "invariant")]
    sensitivity, invariance = record(subject, *banks)
    return subject, sensitivity, invariance


def test_controls_do_what_their_names_say():
    subject, recording, _ = recorded()
    bank = recording.bank
    found = controls(recording, "left", READOUT)
    assert list(found) == ["no-edit", "copy-source"]
    assert torch.equal(found["no-edit"], bank.base_answer == bank.labels["left"])
    assert torch.equal(found["copy-source"], bank.source_answer == bank.labels["left"])
    assert not found["no-edit"].any()
    first, second = subject.places[:2]
    patch = full_patch("left", [first, second], subject)
    assert (patch.size, patch.places, patch.subject) == (6, [first.name, second.name], subject.identity())
    out = patch.apply(subject, bank.base, bank.source)
    assert torch.allclose(out, recording.source_outputs, atol=1e-5)  # everything is the source's


def test_random_subspaces_are_orthonormal_of_the_handles_size_and_all_different():
    subject = MLPSubject(and_xor_net())
    first, second = subject.places[:2]
    edits = (
        Edit(first, Frame.identity(4), torch.tensor([0.5, 0.0, 2.0, 0.0])),
        Edit(second, Frame.identity(2), torch.tensor([0.0, 1.0])),
    )
    handle = Handle("left", edits, subject.identity())
    drawn = random_subspaces(handle, 7, torch.Generator().manual_seed(0))
    assert len(drawn) == 7
    for h in drawn:
        assert (h.variable, h.subject, h.places, h.size) == ("left", subject.identity(), handle.places, 3)
        for edit, size in zip(h.edits, (2, 1), strict=True):
            assert edit.frame.read is not None
            assert torch.allclose(edit.frame.read.T @ edit.frame.read, torch.eye(size), atol=1e-5)
            assert torch.equal(edit.gains, torch.ones(size))
            assert edit.frame.kind == "random"
    for k, one in enumerate(drawn):
        for other in drawn[:k]:
            overlap = one.edits[0].frame.read.T @ other.edits[0].frame.read
            assert float(overlap.square().sum()) < 1.999  # 2 for one and the same plane
    again = random_subspaces(handle, 1, torch.Generator().manual_seed(0))[0]
    assert torch.equal(again.edits[0].frame.read, drawn[0].edits[0].frame.read)


def test_joined_banks_keep_every_pair_with_its_familys_name():
    causal, generator = xor_model(), torch.Generator().manual_seed(0)
    one, two = (draw_pairs(causal, ROWS, p, 50, generator, variable="left") for p in ("sensitive", "invariant"))
    both = joined([one, two])
    assert (both.name, both.causal, both.variables) == (one.name, causal, one.variables)
    assert set(one.families) != set(two.families)
    assert list(both.families) == list(dict.fromkeys([*one.families, *two.families]))
    named = [bank.families[f] for bank in (one, two) for f in bank.family.tolist()]
    assert [both.families[f] for f in both.family.tolist()] == named
    for name in ("base", "source", "base_answer", "source_answer"):
        assert torch.equal(getattr(both, name), torch.cat([getattr(one, name), getattr(two, name)]))
    for v in one.variables:
        assert torch.equal(both.labels[v], torch.cat([one.labels[v], two.labels[v]]))
        assert torch.equal(both.changed[v], torch.cat([one.changed[v], two.changed[v]]))


def familywise(bank: Bank, right: torch.Tensor) -> float:
    """The mean over families of the share that is right in each, by a loop."""
    shares = [float(right[bank.family == f].double().mean()) for f in bank.family.unique()]
    return sum(shares) / len(shares)


@pytest.mark.parametrize("neuron", [0, 1, 2])
def test_a_score_is_half_the_discriminating_and_half_the_unchanged_pairs_families_weighted_equally(neuron):
    subject, sensitivity, invariance = recorded()
    handle = neuron_handle(subject, "left", neuron)
    found = score([sensitivity, invariance], handle, READOUT)
    assert found is not None
    halves = []
    for recording, pairs in (
        (sensitivity, sensitivity.bank.discriminating("left")),
        (invariance, ~invariance.bank.changed["left"]),
    ):
        some = recording.bank.select(pairs)
        answers = handle.apply(subject, some.base, some.source).argmax(dim=-1)
        halves.append(familywise(some, answers == some.labels["left"]))
    assert found.value == pytest.approx(sum(halves) / 2)
    assert found.drawn.mean() == pytest.approx(found.value, abs=0.02)
    boots = [
        Bootstrap(sensitivity.bank.select(sensitivity.bank.discriminating("left"))),
        Bootstrap(invariance.bank),
    ]
    assert found.bases == min(b.balanced_bases for b in boots)


def test_the_two_halves_of_a_score_are_drawn_apart():
    """The variance of a sum of independent draws is the sum of their variances."""
    subject, sensitivity, invariance = recorded()
    found = score([sensitivity, invariance], neuron_handle(subject, "left", 1), READOUT)
    assert found is not None
    alone = []
    for recording, pairs in (
        (sensitivity, sensitivity.bank.discriminating("left")),
        (invariance, ~invariance.bank.changed["left"]),
    ):
        some = recording.bank.select(pairs)
        answers = neuron_handle(subject, "left", 1).apply(subject, some.base, some.source).argmax(dim=-1)
        alone.append(Bootstrap(some).balanced((answers == some.labels["left"]).double().numpy())[1])
    assert found.drawn.var() == pytest.approx(sum(d.var() for d in alone) / 4, rel=0.15)


def test_a_score_can_be_of_another_variables_labels():
    subject, sensitivity, invariance = recorded("right")
    crossed = score([sensitivity, invariance], neuron_handle(subject, "left", 1), READOUT, "right")
    own = score([sensitivity, invariance], neuron_handle(subject, "right", 1), READOUT)
    assert crossed is not None
    assert own is not None
    assert crossed.value == own.value == 1.0


def test_without_pairs_of_both_kinds_there_is_no_score():
    subject, sensitivity, invariance = recorded()
    handle = neuron_handle(subject, "left", 0)
    assert score([sensitivity], handle, READOUT) is None
    assert score([invariance], handle, READOUT) is None


def test_how_far_one_score_is_ahead_of_another_of_other_pairs():
    rng = np.random.default_rng(5)
    drawn = rng.normal(0.0, 0.1, 1000)
    mine, other = Score(0.9, 0.9 + drawn, 40), Score(0.4, 0.4 + drawn, 30)
    ahead = mine.ahead_of(other)
    assert ahead.value == pytest.approx(0.5)
    assert ahead.bases == 30
    assert mine.ahead_of(other) == ahead  # the same draws every time
    # although both come from one stream of draws, their errors are taken as independent: √2 · 1.96 · 0.1 to each side
    assert ahead.high - ahead.low == pytest.approx(2 * 1.96 * 0.1 * 2**0.5, rel=0.1)
    assert other.ahead_of(mine).value == pytest.approx(-0.5)
    assert Score(0.9, np.full(1000, 0.9), 40).ahead_of(mine).value == 0.0


def test_shuffled_recordings_are_the_same_runs_with_other_labels():
    _, sensitivity, invariance = recorded()
    found = with_shuffled_values([sensitivity, invariance], torch.Generator().manual_seed(0))
    assert len(found) == 2
    for before, after in zip((sensitivity, invariance), found, strict=True):
        assert after.store is before.store
        assert after.subject is before.subject
        assert torch.equal(after.base_rows, before.base_rows)
        assert torch.equal(after.bank.base, before.bank.base)
        assert not torch.equal(after.bank.changed["left"], before.bank.changed["left"])
    assert found[0].bank.causal is found[1].bank.causal  # one relabelling of all inputs
    again = with_shuffled_values([sensitivity, invariance], torch.Generator().manual_seed(0))
    assert torch.equal(again[0].bank.labels["left"], found[0].bank.labels["left"])
