"""Newton over several places at once: variables that no single place holds, and ones that a single place does."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import decoders
from plot_ot.edits import EditBatch, Frame, respond
from plot_ot.signatures import as_readout
from plot_ot.stages.calibrate import correct
from plot_ot.stages.closed_form import ClosedForm
from plot_ot.stages.gauss_newton import Rest
from plot_ot.stages.maps import Map
from plot_ot.stages.natural import edited_states
from plot_ot.stages.newton import NewtonHandles
from plot_ot.stages.problem import Problem, State
from spread import halves

SOFTMAX = as_readout("softmax")


def run(problem: Problem, *stages) -> State:
    state = State.start(problem)
    for stage in stages:
        state = stage(problem, state)
    return state


@pytest.mark.parametrize("kind", ["bits", "shares"])
def test_a_variable_in_two_halves_is_found_at_both_places(kind):
    problem, test = halves(kind)
    alone = run(problem, ClosedForm(), NewtonHandles())
    both = run(problem, ClosedForm(), NewtonHandles(together=4))
    single, joint = (correct(test, s.handles["p"], SOFTMAX).double().mean() for s in (alone, both))
    assert float(single) < 0.8
    assert float(joint) > 0.97
    assert both.handles["p"].places == ["left", "right"]
    assert both.handles["p"].chosen["support"] == "left and right"
    assert both.handles["q"].places == ["left"]  # it is there alone
    lengths = edited_states(both.handles["p"].batch(), test)
    for name, states in lengths.items():
        natural = problem.fit.store.activations[name].double()
        assert float((states - natural.mean(dim=0)).norm(dim=1).max()) < 2.5 * float(
            (natural - natural.mean(dim=0)).norm(dim=1).max()
        )


def test_places_are_not_joined_for_a_small_gain():
    problem, _ = halves("bits")
    alone = run(problem, NewtonHandles())
    assert run(problem, NewtonHandles(together=4, gain=0.9)).handles["p"].places == alone.handles["p"].places
    assert run(problem, NewtonHandles(together=4, enough=0.0)).handles["p"].places == alone.handles["p"].places


@pytest.mark.parametrize("at_once", [None, 3])
def test_tokens_of_a_decoder_are_solved_together(at_once, monkeypatch):
    """What is minimised is what the handle does, also where the network is resumed in parts."""
    model = decoders.network("llama")
    recording = decoders.recorded(model, positions={"early": lambda rows: torch.full((len(rows),), -3)})
    if at_once:
        monkeypatch.setattr(type(recording.subject), "resumed_at_once", lambda *_: at_once)
    places = [
        p for p in recording.subject.places if p.name in ("block_output.1@early", "block_output.1", "block_output.2")
    ]
    assert len(places) == 3
    g = torch.Generator().manual_seed(0)
    maps = [Map(*(0.3 * torch.randn(2, p.width, 2, generator=g, dtype=torch.float64))) for p in places]
    edits = [
        EditBatch(p, Frame.oblique(m.read.float(), m.write.float()), torch.ones(1, 2))
        for p, m in zip(places, maps, strict=True)
    ]
    wanted = respond(recording, edits)[0]
    rest = Rest(
        recording.subject,
        recording.store,
        tuple(places),
        recording.base_rows,
        recording.base_at(places[0]),
        (recording.source_at(places[0]) - recording.base_at(places[0])).double(),
        tuple(recording.source_at(p) for p in places[1:]),
        torch.zeros(len(recording), dtype=torch.long),
        torch.full((len(recording),), 1 / len(recording), dtype=torch.float64),
        SOFTMAX,
        4,
    )
    found = torch.cat([rest.outputs(maps, some)[0] for some in rest._batches()])
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-4)
    slopes = rest.slopes(maps)

    def moved(k: int, step: float) -> float:
        shifted = [replace(m) for m in maps]
        shifted[k] = Map(maps[k].write + step * along, maps[k].read)
        return rest.loss(shifted)[0]

    for k, m in enumerate(maps):  # against a finite difference of the writing directions
        along = torch.randn(m.write.shape, generator=g, dtype=torch.float64)
        slope = float((slopes.gradients[k] * ((slopes.differences[k] @ m.read) @ along.T)).sum())
        assert slope == pytest.approx((moved(k, 0.02) - moved(k, -0.02)) / 0.04, rel=0.05, abs=2e-4)
    states = edited_states(edits, recording)
    for p, m, d in zip(places, maps, slopes.differences, strict=True):
        torch.testing.assert_close(states[p.name], recording.source_at(p).double() - d + m.of(d), rtol=1e-3, atol=1e-4)
