"""Newton on networks and banks nobody meant it for: it answers, or says in our own words why not; never worse."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from nets import mlp
from plot_ot.abstract.banks import Bank
from plot_ot.abstract.causal_model import CausalModel
from plot_ot.errors import PlotError
from plot_ot.handles import Handle
from plot_ot.signatures import as_readout
from plot_ot.stages.closed_form import ClosedForm
from plot_ot.stages.newton import NewtonHandles
from plot_ot.stages.problem import Problem, State
from plot_ot.subjects import MLPSubject, record

DIGITS = [f"x{k}" for k in range(4)]
NEWTON = NewtonHandles(weights=(1.0, 1e-2), ranks=(1, 2))


def causal(values: int, outputs: str) -> CausalModel:
    """p and q, sums of two digits each; the answer is one bit, several, or one of `values` classes."""
    answers = {
        "bit": lambda p, q: (p + q) % 2,
        "bits": lambda p, q: torch.stack([p % 2, q % 2, (p + q) % 2], dim=1),
        "class": lambda p, q: (p + q) % values,
    }
    mechanisms = {"p": lambda x0, x1: (x0 + x1) % values, "q": lambda x2, x3: (x2 + x3) % values}
    return CausalModel(DIGITS, {**mechanisms, "y": answers[outputs]}, "y")


def trained(model: CausalModel, net: nn.Sequential, readout: str, rows: torch.Tensor, values: int) -> nn.Sequential:
    """The network after a short training: it knows something."""
    look, x = as_readout(readout), encode(values)(rows)
    labels = model.answer(rows)
    labels = labels.unsqueeze(1) if readout == "sigmoid" and labels.ndim == 1 else labels
    optimiser = torch.optim.Adam(net.parameters(), lr=2e-2)
    for _ in range(150):
        optimiser.zero_grad()
        look.loss(net(x).unsqueeze(0), labels).mean().backward()
        optimiser.step()
    return net.requires_grad_(False)


def encode(values: int, dtype: torch.dtype = torch.float32):
    return lambda rows: torch.nn.functional.one_hot(rows.long(), values).flatten(1).to(dtype)


def problem(
    values: int = 3,
    outputs: str = "class",
    widths: tuple[int, ...] = (8, 8),
    pairs: int = 80,
    dtype: torch.dtype = torch.float32,
    train: bool = True,
) -> Problem:
    model = causal(values, outputs)
    last = {"bit": 1, "bits": 3, "class": values}[outputs]
    readout = "softmax" if outputs == "class" else "sigmoid"
    rows = torch.cartesian_prod(*[torch.arange(values)] * 4)
    net = mlp(4 * values, *widths, last, seed=1)
    net = (trained(model, net, readout, rows, values) if train else net.requires_grad_(False)).to(dtype)
    subject = MLPSubject(net, encode=encode(values, dtype))
    banks = []
    for seed in range(2):
        g = torch.Generator().manual_seed(seed)
        base, source = (rows[torch.randint(len(rows), (pairs,), generator=g)] for _ in range(2))
        banks.append(Bank.from_pairs(model, base, source, variables=("p",)))
    fit, calibration = record(subject, *banks)
    return Problem(subject, fit, calibration, ("p",), as_readout(readout))


def found(on: Problem, *stages) -> Handle:
    state = State.start(on)
    for stage in stages:
        state = stage(on, state)
    return state.handles["p"]


def score(handle: Handle) -> float:
    return float(handle.chosen["calibration_score"])


STRANGE = {
    "one bit": {"outputs": "bit"},
    "several bits": {"outputs": "bits"},
    "three classes": {},
    "six values": {"values": 6},
    "float16": {"dtype": torch.float16},
    "one dimension": {"widths": (8, 1)},
    "only one dimension": {"widths": (1,)},
    "untrained": {"train": False},
    "forty wide": {"widths": (40,)},
}


@pytest.mark.parametrize("kind", STRANGE)
def test_it_is_never_worse_than_the_stage_before(kind):
    on = problem(**STRANGE[kind])
    before, after = found(on, ClosedForm()), found(on, ClosedForm(), NEWTON)
    assert score(after) >= score(before)
    assert all(
        bool(torch.isfinite(t).all()) for e in after.edits for t in (e.frame.read, e.frame.write) if t is not None
    )


@pytest.mark.parametrize("pairs", [2, 5])
def test_a_handful_of_pairs_ends_in_a_handle(pairs):
    assert 0 <= score(found(problem(pairs=pairs), NEWTON)) <= 1


def test_a_bank_that_changes_nothing_is_refused_in_words():
    on = problem(pairs=40)
    same = on.fit.select(~on.fit.bank.changed["p"])
    with pytest.raises(PlotError, match="no pair that changes 'p'"):
        found(Problem(on.subject, same, on.calibration, ("p",), on.readout), NEWTON)


def test_pairs_that_are_repeated_change_nothing():
    once = problem(pairs=40)
    banks = [b.select(torch.arange(40).repeat(3)) for b in (once.fit, once.calibration)]
    thrice = Problem(once.subject, *banks, ("p",), once.readout)
    one, three = found(once, NEWTON), found(thrice, NEWTON)
    assert score(one) == pytest.approx(score(three))
    for a, b in zip(one.edits, three.edits, strict=True):
        assert a.place == b.place
        torch.testing.assert_close(a.frame.write @ a.frame.read.T, b.frame.write @ b.frame.read.T, rtol=1e-3, atol=1e-4)


def dulled(on: Problem, first: float, last: float) -> Problem:
    """The same banks on the network with its first and last weights scaled: 0 makes states, or answers, constant."""
    net = on.subject.net
    with torch.no_grad():
        net[0].weight.mul_(first)
        net[-1].weight.mul_(last)
    return Problem(on.subject, *record(on.subject, on.fit.bank, on.calibration.bank), ("p",), on.readout)


def test_states_that_never_change_are_refused_in_words():
    with pytest.raises(PlotError, match="states are all equal"):
        found(dulled(problem(), 0.0, 1.0), NEWTON)


def test_some_constant_neurons_do_no_harm():
    on = problem()
    with torch.no_grad():
        on.subject.net[0].weight[:6] = 0
    on = Problem(on.subject, *record(on.subject, on.fit.bank, on.calibration.bank), ("p",), on.readout)
    assert score(found(on, ClosedForm(), NEWTON)) >= score(found(on, ClosedForm()))


def test_labels_that_nothing_can_reach_leave_what_was_there():
    on = dulled(problem(), 1.0, 0.0)
    before = found(on, ClosedForm())
    assert score(found(on, ClosedForm(), NEWTON)) == score(before)


def test_one_constant_place_among_others_does_not_hide_them():
    """A place whose states never vary has nothing to offer; the others are still tried."""
    on = problem(widths=(8, 6))
    with torch.no_grad():
        for layer in on.subject.net[2:3]:
            layer.weight.zero_()
    recorded = record(on.subject, on.fit.bank, on.calibration.bank)
    on = Problem(on.subject, *recorded, ("p",), on.readout)
    first = on.subject.places[0]
    handle = NEWTON(on, State({"p": (first,)})).handles["p"]
    assert score(found(on, NEWTON)) >= score(handle)
