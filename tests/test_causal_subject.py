"""Causal models as subjects: swaps are do(), and aligning two causal models gives the exact coupling."""

from __future__ import annotations

import pytest
import torch

import plot_ot
from plot_ot.abstract.banks import draw_pairs
from plot_ot.abstract.causal_model import CausalModel
from plot_ot.edits import EditBatch, Frame, respond
from plot_ot.handles import Edit, Handle
from plot_ot.signatures import as_readout, measure_signatures
from plot_ot.sites import Menu, neurons, whole_places
from plot_ot.stages.calibrate import Search, calibrate, correct
from plot_ot.stages.problem import Candidate
from plot_ot.subjects import CausalSubject, record
from plot_ot.transport import Transport, couple
from refusals import assert_refused

LEVELS = 4
ROWS = torch.cartesian_prod(*[torch.arange(LEVELS)] * 4)
HEQ = CausalModel(
    ["W", "X", "Y", "Z"],
    {"z_WX": lambda W, X: W == X, "z_YZ": lambda Y, Z: Y == Z, "y": lambda z_WX, z_YZ: z_WX == z_YZ},
    "y",
)
LOW = CausalModel(
    ["a", "b", "c", "d"],
    {
        "difference": lambda a, b: (a - b) % LEVELS,
        "first": lambda a: a,
        "noise": lambda c: (c * 3 + 1) % LEVELS,
        "left": lambda difference: difference == 0,
        "right": lambda c, d: (c == d).long(),
        "sum": lambda a, d: (a + d) % LEVELS,
        "agree": lambda left, right: left.long() + 2 * right,
        "answer": lambda agree: (agree == 0) | (agree == 3),
    },
    "answer",
)
"""HEQ under other names, with a finer variable before `left`, both in one after it, and three that nobody reads."""
TRUTH = {"z_WX": {"difference", "left"}, "z_YZ": {"right"}}
READOUT = as_readout("softmax")


def banks(*sizes: int, seed: int = 1000) -> list:
    generator = torch.Generator().manual_seed(seed)
    pools = ROWS[torch.randperm(len(ROWS), generator=generator)].chunk(len(sizes))
    return [draw_pairs(HEQ, pool, "balanced", n, generator) for pool, n in zip(pools, sizes, strict=True)]


def test_swapping_a_place_is_do_of_its_variable() -> None:
    subject = CausalSubject(LOW, ROWS)
    assert [p.name for p in subject.places] == ["difference", "first", "noise", "right", "sum", "left", "agree"]
    assert [p.width for p in subject.places] == [4, 4, 4, 2, 4, 2, 4]
    [recording] = record(subject, *banks(200))
    base, source = recording.bank.base, recording.bank.source
    assert torch.equal(recording.base_outputs.argmax(dim=1), LOW.answer(base).long())
    for place in subject.places:
        swap = [EditBatch(place, Frame.identity(place.width), torch.ones(1, place.width))]
        expected = LOW.swap(base, source, place.name)
        assert torch.equal(respond(recording, swap)[0].argmax(dim=1), expected.long())
        handle = Handle("z", (Edit(place, Frame.identity(place.width), torch.ones(place.width)),), subject.identity())
        with handle.on(subject, source):
            assert torch.equal(subject(base).argmax(dim=1), expected.long())
    assert torch.equal(subject(base).argmax(dim=1), LOW.answer(base).long())


def test_later_places_are_rewritten_after_what_an_earlier_edit_made_of_them() -> None:
    subject = CausalSubject(LOW, ROWS)
    [recording] = record(subject, *banks(200))
    base, source = recording.bank.base, recording.bank.source
    edits = []
    for name, gains in (("difference", 1.0), ("agree", 0.4), ("right", 1.0)):  # 0.4 of the way changes no value
        place = subject.place(name)
        edits.append(EditBatch(place, Frame.identity(place.width), torch.full((1, place.width), gains)))
    at_source = LOW.run(source)
    expected = LOW.run(base, do={name: at_source[name] for name in ("difference", "right")})["answer"]
    assert torch.equal(respond(recording, edits)[0].argmax(dim=1), expected.long())


def test_aligning_two_causal_models_gives_the_exact_coupling() -> None:
    subject = CausalSubject(LOW, ROWS)
    [fit] = record(subject, *banks(400))
    found = measure_signatures(fit, whole_places(fit, subject.places), READOUT)
    names = [p.name for p in subject.places]
    for i, variable in enumerate(found.variables):
        exact = {names[j] for j in range(len(names)) if float(found.cost[i, j]) < 1e-3 * float(found.row_norms[i]) ** 2}
        assert exact == TRUTH[variable]
    for kind in ("eot", "uot-one-sided"):
        [coupling] = couple(found, Transport(kind, (0.01,), (0.1,), scale="median"))
        for variable, places in TRUTH.items():
            assert {names[j] for j in coupling.ranking(variable)[: len(places)]} == places


@pytest.mark.parametrize("menu", [whole_places, neurons])
def test_the_variables_of_one_causal_model_are_found_in_another_and_their_handles_are_always_right(menu: Menu) -> None:
    subject = CausalSubject(LOW, ROWS)
    fit, calibration, test = record(subject, *banks(300, 100, 200))
    family = menu(fit, subject.places)
    [coupling] = couple(
        measure_signatures(fit, family, READOUT), Transport("uot-one-sided", (0.01,), (0.1,), scale="median")
    )
    for variable, places in TRUTH.items():
        search = Search((1, 2), (1.0, 1.5))
        found = calibrate(calibration, [Candidate(family, coupling)], variable, search, READOUT)
        assert set(found.handle.places) <= places
        assert correct(test, found.handle, READOUT).all()
        for value in (True, False):  # and without a source, too
            able = found.handle.with_values(fit)
            expected = HEQ.run(test.bank.base, do={variable: torch.full((len(test),), value)})["y"]
            if menu is whole_places:
                outputs = able.set(value).apply(subject, test.bank.base)
                assert torch.equal(outputs.argmax(dim=1), expected.long())


def test_localize_places_the_variables_of_one_causal_model_in_another() -> None:
    result = plot_ot.localize(CausalSubject(LOW, ROWS), HEQ, ROWS, size=100)
    for variable, places in TRUTH.items():
        assert result.verdicts[variable].status.found
        assert set(result.handles[variable].places) <= places


def test_other_outputs_and_inputs_as_places() -> None:
    rows = torch.cartesian_prod(torch.arange(4), torch.arange(4))
    adder = CausalModel(
        ["a", "b"],
        {"sum": lambda a, b: a + b, "bits": lambda sum: torch.stack([sum & 1, sum >> 1 & 1, sum >> 2], dim=1)},
        "bits",
    )
    subject = CausalSubject(adder, rows, ["b", "sum"])
    assert [(p.name, p.width, p.layer) for p in subject.places] == [("b", 4, 0), ("sum", 7, 1)]
    store = subject.record(rows)
    assert torch.equal(store.outputs > 0, adder.answer(rows).bool())
    pairs = CausalModel(
        ["a", "b"], {"both": lambda a, b: torch.stack([a, b], dim=1), "y": lambda both: both[:, 0]}, "y"
    )
    subject = CausalSubject(pairs, rows)
    assert [p.width for p in subject.places] == [16]
    assert torch.equal(subject.record(rows).outputs.argmax(dim=1), rows[:, 0])


def test_what_a_causal_subject_cannot_do_is_refused() -> None:
    many = torch.arange(300).unsqueeze(1)
    wide = CausalModel(["a"], {"same": lambda a: a, "y": lambda same: same % 2}, "y")
    assert_refused(lambda: CausalSubject(wide, many), ["'same'", "300 values", "256"])
    assert_refused(lambda: CausalSubject(wide, many, []), ["places"])
    assert_refused(lambda: CausalSubject(wide, many, ["samE"]), ["'samE'", "same"])
    real = CausalModel(["a"], {"half": lambda a: a / 2, "y": lambda half: half}, "y")
    assert_refused(lambda: CausalSubject(real, many[:9]), ["output 'y'", "classes"])
    subject = CausalSubject(wide, many[:9])
    assert_refused(lambda: subject.record(many[8:12]), ["'same'", "the value 9"])
    store, place = subject.record(many[:9]), subject.places[0]
    trained = torch.zeros(1, 9, 9, requires_grad=True)
    assert_refused(lambda: subject.resume(store, torch.arange(9), place, trained, {}), ["no gradients"])
    grows = CausalModel(["a", "b"], {"u": lambda a: a, "y": lambda u, b: u + b}, "y")
    some = torch.tensor([[0, 0], [1, 0], [0, 1]])
    subject = CausalSubject(grows, some)
    handle = Handle("u", (Edit(subject.places[0], Frame.identity(2), torch.ones(2)),), subject.identity())
    assert_refused(lambda: handle.apply(subject, some[2:], some[1:2]), ["becomes 2", "`classes`"])
    enough = CausalSubject(grows, some, classes=3)
    assert int(Handle("u", handle.edits, enough.identity()).apply(enough, some[2:], some[1:2]).argmax()) == 2
    assert CausalSubject(LOW, ROWS).identity() != CausalSubject(HEQ, ROWS).identity()
