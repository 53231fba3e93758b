"""`plot-ot bench`: the ladder on the CPU and on the counterfeit GPU, and what it refuses."""

import json

import pytest
import torch
from typer.testing import CliRunner

from counterfeit import counterfeit
from plot_ot.cli import app
from plot_ot.errors import PlotError
from plot_ot.planner import ladder
from plot_ot.planner.ladder import climb, device_by_name

RUNGS = ["hooked full pass", "recorded pass", "resumed edit", "signatures", "calibration", "DAS step"]
WORDS = ["bench", "--pairs", "8", "--tokens", "6"]


def told(*words: str, code: int = 0) -> dict:
    done = CliRunner().invoke(app, [*WORDS, *words, "--json"])
    assert done.exit_code == code, done.output
    return json.loads(done.stdout)


def test_the_ladder_has_every_rung_beside_the_plan():
    found = told("--device", "cpu")
    assert [r["name"] for r in found["rungs"]] == RUNGS
    assert all(r["seconds"] > 0 for r in found["rungs"])
    assert [r["name"] for r in found["rungs"] if r["planned"]] == [n for n in RUNGS if n not in (RUNGS[0], RUNGS[2])]
    assert found["rungs"][0]["ratio"] == 1
    assert found["agrees"]
    assert found["error"] < 1e-5
    assert found["peak"] > 0
    assert found["planned"] > 0


def test_the_ladder_is_climbed_on_a_gpu_in_half_precision():
    with counterfeit():
        found = told("--device", "cuda", "--dtype", "bfloat16")
    assert (found["device"], found["dtype"]) == ("cuda:0", "bfloat16")
    assert found["machine"]["gpu"]
    assert found["agrees"]


def test_a_device_that_computes_something_else_is_not_believed(monkeypatch):
    monkeypatch.setattr(ladder, "_difference", lambda *_: 0.2)
    done = CliRunner().invoke(app, [*WORDS, "--device", "cpu"])
    assert done.exit_code == 1
    assert "DO NOT AGREE" in done.stdout


def test_the_difference_is_one_of_numbers(monkeypatch):
    """A fast path that answers from elsewhere is noticed."""
    monkeypatch.setattr(ladder, "respond", lambda *_: torch.zeros(1, 8, 2))
    assert not told("--device", "cpu", code=1)["agrees"]


@pytest.mark.parametrize(
    ("name", "said"),
    [("cuda", "no CUDA device"), ("cuda:3", "no CUDA device"), ("tpu", "no device"), ("meta", "cpu or cuda")],
)
def test_devices_that_are_not_there_are_refused(name, said):
    with pytest.raises(PlotError, match=said):
        device_by_name(name)


def test_a_third_gpu_is_refused_where_there_are_two():
    with counterfeit():
        assert device_by_name(None).type == "cuda"
        with pytest.raises(PlotError, match="2 CUDA devices"):
            device_by_name("cuda:2")


def test_too_few_pairs_and_unknown_types_are_refused():
    with pytest.raises(PlotError, match="at least 8 pairs"):
        climb(torch.nn.Identity(), pairs=4)
    done = CliRunner().invoke(app, [*WORDS, "--dtype", "float64x"])
    assert isinstance(done.exception, PlotError)
