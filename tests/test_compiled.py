"""Compiled transformers: they compute their programs exactly, the layout is as it is said, the twin agrees."""

from __future__ import annotations

import pytest
import torch

from plot_ot.edits import EditBatch, Frame, respond
from plot_ot.judging.usage import read_from_used
from plot_ot.signatures import as_readout
from plot_ot.stages.calibrate import correct
from plot_ot.subjects import record, record_pairs
from truth import compiled as kinds
from truth.compiler import compiled
from truth.kinds import ROWS
from truth.known import ABSENT, DORMANT, HERE, draw_splits
from truth.layout import Wishes, random_layout, random_wishes
from truth.lines import power, random_pairs, random_program, rival_of
from truth.twin import TwinSubject

SEEDS = (1000, 1001, 1002, 1003)


def network(seed, silent=False):
    generator = torch.Generator().manual_seed(seed)
    program = random_program(generator, gate=seed % 4 == 0)
    wishes = Wishes(silent=program.variables[0]) if silent else random_wishes(program, generator)
    return compiled(random_layout(program, wishes, generator), seed)


def answers(net, rows):
    with torch.no_grad():
        return net.model(net.encode(rows)[0]).logits[:, -1]


@pytest.mark.parametrize("silent", [False, True])
@pytest.mark.parametrize("seed", SEEDS)
def test_a_compiled_program_is_right_on_every_input(seed, silent):
    net = network(seed, silent)
    label = net.layout.program.causal.answer(ROWS)
    top = answers(net, ROWS).topk(2)
    assert (top.indices[:, 0] == label).all()
    assert float((top.values[:, 0] - top.values[:, 1]).min()) > 2
    assert (net.layout.answer(ROWS) == label).all()


@pytest.mark.parametrize("seed", SEEDS)
def test_swapping_a_variables_own_slots_where_it_is_carried_is_its_counterfactual(seed):
    net = network(seed)
    subject, causal = net.subject(), net.layout.program.causal
    base, source = random_pairs(60, torch.Generator().manual_seed(1))
    [recording] = record_pairs(subject, (base, source))
    for v in net.layout.program.variables:
        own, _ = net.layout.carried(v)
        assert own
        for spot, slots in own.items():
            [edit] = net.swap(subject, v, spot, slots).edits
            outputs = respond(recording, [EditBatch(edit.place, edit.frame, edit.gains.unsqueeze(0))])[0]
            assert (outputs.argmax(dim=-1) == causal.swap(base, source, v)).all()


def test_every_swap_of_slots_does_in_the_transformer_what_the_layout_says():
    net = network(1001)
    base, source = random_pairs(60, torch.Generator().manual_seed(2))
    [recording] = record_pairs(net.subject(), (base, source))
    for spot in net.layout.spots:
        for slot in net.layout.slots(spot):
            [edit] = net.swap(recording.subject, "p", spot, [slot]).edits
            outputs = respond(recording, [EditBatch(edit.place, edit.frame, edit.gains.unsqueeze(0))])[0]
            taken = net.layout.run(source)[spot[0]][spot[1], slot]
            expected = net.layout.answer(base, spot, {slot: taken})
            assert (outputs.argmax(dim=-1) == expected)[expected >= 0].all()


@pytest.mark.parametrize("silent", [False, True])
@pytest.mark.parametrize("seed", [1001, 1002])
def test_the_twin_is_recorded_and_resumed_as_the_transformer(seed, silent):
    net = network(seed, silent)
    pairs = random_pairs(30, torch.Generator().manual_seed(3))
    [plain], [twin] = record_pairs(net.subject(), pairs), record_pairs(TwinSubject(net), pairs)
    torch.testing.assert_close(plain.base_outputs, twin.base_outputs, atol=0.1, rtol=0.01)
    for place in plain.subject.places:
        torch.testing.assert_close(plain.base_at(place), twin.base_at(place), atol=0.01, rtol=0)
        moved = twin.source_at(place) - twin.base_at(place)
        if float(moved.norm()) < 1e-3:
            continue
        leading = torch.linalg.svd(moved, full_matrices=False)[2][:4].T.contiguous()
        edit = EditBatch(place, Frame.orthonormal(leading), torch.tensor([[1.0, 1, 0, 0], [0.5, 0, 1, 1]]))
        torch.testing.assert_close(respond(plain, [edit]), respond(twin, [edit]), atol=0.6, rtol=0.05)


@pytest.mark.parametrize("seed", range(1000, 1012))
def test_rivals_give_the_same_answers_without_one_of_the_variables(seed):
    generator = torch.Generator().manual_seed(seed)
    program = random_program(generator, gate=seed % 4 == 0)
    other, missing = rival_of(program, generator)
    assert missing not in other.variables
    assert (other.causal.answer(ROWS) == program.causal.answer(ROWS)).all()
    assert power(program, generator) > 0.03


@pytest.mark.parametrize("seed", SEEDS[:2])
def test_no_swap_of_slots_is_a_rivals_missing_variable(seed):
    known = kinds.rival(seed)
    assert ABSENT in {t.status for t in known.truths.values()}
    layout = known.subject.net.layout
    for v, truth in known.truths.items():
        if truth.status == ABSENT:
            assert v not in layout.program.variables
            assert not truth.parents


@pytest.mark.parametrize("seed", [1004, 1006])
def test_an_illusion_where_nothing_natural_is_used_is_told_from_a_handle(seed):
    known = kinds.dormant(seed)
    [v] = [v for v, t in known.truths.items() if t.status == DORMANT]
    splits = draw_splits(known.causal, known.rows, 200, seed)
    fit, calibration = record(known.subject, splits.fit, splits.calibration)
    readout, generator = as_readout("logits"), torch.Generator().manual_seed(0)
    for name, handle in known.handles.items():
        assert correct(calibration, handle, readout, name).all()  # perfect, all of them
        rebuilt = read_from_used(handle, fit, calibration, readout, generator)
        changed = calibration.bank.discriminating(name)
        again = float(correct(calibration, rebuilt.handle, readout, name)[changed].double().mean())
        assert again < 0.6 if name == v else again == 1.0
    assert HERE in {t.status for t in known.truths.values()}
