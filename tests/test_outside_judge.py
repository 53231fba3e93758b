"""Handles before `causal-abstraction-eval`: cells are the handles' own edits, and its metrics tell good from bad."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from plot_ot import PlotError
from plot_ot.edits import EditBatch, respond
from plot_ot.exchange import outside_errors
from plot_ot.exchange.outside_judge import METRICS, HandleSystem
from plot_ot.judging.controls import random_subspaces
from plot_ot.signatures import as_readout
from plot_ot.subjects import record_pairs
from truth.illusions import silent_way
from truth.kinds import planted

installed = importlib.util.find_spec("causal_abstraction") is not None
SAMPLES = 48


def rows(known, count=120):
    return known.rows[torch.randperm(len(known.rows), generator=torch.Generator().manual_seed(0))[:count]]


def system_of(known, handles=None):
    return HandleSystem(known.subject, known.causal, handles or known.handles, rows(known), as_readout("softmax"))


@pytest.mark.parametrize("variable", ["p", "q"])
def test_setting_a_cell_to_a_source_cell_is_the_handle(variable):
    system = system_of(planted(1000, "oblique"))
    base, source = torch.arange(40), torch.arange(40, 80)
    _, answers = system.run(base, {variable: system.cells[variable][source]})
    [recording] = record_pairs(system.subject, (system.inputs[base], system.inputs[source]))
    edits = [EditBatch(e.place, e.frame, e.gains.unsqueeze(0)) for e in system.handles[variable].edits]
    assert (answers == system.answers(respond(recording, edits)[0])).all()
    label = system.causal.swap(system.inputs[base], system.inputs[source], variable)
    assert answers.tolist() == [system.code("y", value) for value in label]


def test_a_cell_that_is_set_reads_back_and_nothing_set_changes_nothing():
    system = system_of(planted(1001))
    every = torch.arange(30)
    cells, answers = system.run(every, {})
    torch.testing.assert_close(cells["p"], system.cells["p"][:30])
    assert (answers == system.codes["y"][:30]).all()
    told = system.cells["p"][30:60]
    cells, _ = system.run(every, {"p": told})
    torch.testing.assert_close(cells["p"], told, atol=1e-4, rtol=1e-4)


def test_the_rest_is_what_no_handle_writes():
    system = system_of(planted(1000))
    for place in system.places:
        for h in system.handles.values():
            for e in h.edits:
                if e.place.name == place.name:
                    assert float((e.matrix().T @ system.stirred[place.name]).abs().max()) < 1e-5


def test_the_hypothesis_under_set_values_is_the_causal_models():
    system = system_of(planted(1000))
    for row in range(5):
        for code in range(3):
            value = system.values["p"][int((system.codes["p"] == code).nonzero()[0])]
            label = system.causal.run(system.inputs[row : row + 1], do={"p": value.unsqueeze(0)})["y"][0]
            assert system.expected(row, {"p": code})["answer" if "answer" in system.codes else "y"] == system.code(
                "y", label
            )


@pytest.mark.skipif(installed, reason="the package is there")
def test_without_the_package_it_says_what_to_install():
    known = planted(1000)
    with pytest.raises(PlotError, match=r"plot-ot\[judge\]"):
        outside_errors(known.subject, known.causal, known.handles, rows(known))


@pytest.mark.skipif(not installed, reason="causal-abstraction-eval is not installed")
def test_the_outside_judge_tells_planted_handles_from_random_ones():
    known = planted(1000)
    good = outside_errors(known.subject, known.causal, known.handles, rows(known), samples=SAMPLES)
    drawn = {v: random_subspaces(h, 1, torch.Generator().manual_seed(1))[0] for v, h in known.handles.items()}
    bad = outside_errors(known.subject, known.causal, drawn, rows(known), samples=SAMPLES)
    for v in "pq":
        assert set(good[v]) == set(METRICS)
        assert max(good[v].values()) < 0.05
        assert bad[v]["CAE_down_nf"] > 0.3
        assert bad[v]["IIA"] > 0.3


@pytest.mark.skipif(not installed, reason="causal-abstraction-eval is not installed")
def test_the_outside_judge_passes_an_illusion_that_our_verdict_flags():
    known = silent_way(1000)
    errors = outside_errors(known.subject, known.causal, known.handles, rows(known), samples=SAMPLES)
    assert errors["p"]["IIA"] == errors["p"]["CAE_down_nf"] == 0.0  # `truth.illusions`: dormant, and flagged by ours
