"""Studies from Python: run, resumed, read; one writer and one reader of their directories."""

import json
from pathlib import Path

import pytest
import torch

import plot_ot
from plot_ot import cli
from plot_ot.errors import PlotError
from plot_ot.files.run_reading import read_run
from plot_ot.methods import Method, random_like
from plot_ot.sites import blocks, whole_places
from plot_ot.stages.calibrate import Search
from plot_ot.stages.choose import Calibrate, SelectPlaces, TrainDas
from plot_ot.stages.closed_form import ClosedForm
from plot_ot.stages.coupling import Localize
from plot_ot.stages.random_search import RankAtRandom
from plot_ot.stages.ways import Best
from plot_ot.studies.study import Study
from plot_ot.tasks import HierarchicalEquality
from plot_ot.transport import Transport
from plot_ot.version import library_versions
from small_studies import heq
from test_localize import HYPOTHESIS, ROWS, parity_net

DATA = Path(__file__).parent / "data"
SMALL = {"size": 40, "strengths": "units"}


@pytest.fixture(autouse=True)
def cached_networks(monkeypatch):
    monkeypatch.setenv("PLOT_OT_CACHE", str(DATA))
    monkeypatch.setattr("plot_ot.judging.bench.RANDOM_HANDLES", 2)


def lasting(results: dict) -> dict:
    return {name: rows for name, rows in results.items() if name != "runtimes"}


def test_unknown_controls_are_refused_before_a_directory_is_made(tmp_path):
    with pytest.raises(PlotError, match=r"Unknown choice of controls 'fulll'\. Did you mean 'full'"):
        plot_ot.run_study("heq", seeds=[1003], methods=["full-vector"], out=tmp_path / "run", controls="fulll", **SMALL)
    assert not (tmp_path / "run").exists()


# -- running and resuming ---------------------------------------------------------------------------------------------


def test_a_study_from_python_is_the_commands_study_and_is_resumed_by_it(tmp_path, monkeypatch):
    out = tmp_path / "python"
    plot_ot.run_study("heq", seeds=[1003], methods=["full-vector"], out=out, **SMALL)
    before = {p: p.stat().st_mtime_ns for p in (out / "units").rglob("*.json")}
    run = plot_ot.run_study(HierarchicalEquality(**SMALL), seeds=[1003], methods=["plot", "full-vector"], out=out)
    assert {p: p.stat().st_mtime_ns for p in before} == before
    assert run.methods == ["plot", "full-vector"]
    words = "run heq --seeds 1 --first-seed 1003 --size 40 --strengths units --methods plot,full-vector --no-sweep"
    monkeypatch.setattr(
        "sys.argv", ["plot-ot", *words.split(), "--no-figures", "--quiet", "--out", str(tmp_path / "cli")]
    )
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert not stop.value.code
    assert lasting(read_run(tmp_path / "cli").results) == lasting(run.results)


def test_every_step_of_a_study_is_told(tmp_path):
    steps = []
    options = {"seeds": [1003], "methods": ["full-vector"], "out": tmp_path / "run", "progress": steps.append}
    plot_ot.run_study("heq", **options, **SMALL)
    told = [(s.unit, s.state) for s in steps if not s.stage]
    assert told[:2] == [("controls", "waiting"), ("full-vector", "waiting")]
    assert told[-2:] == [("full-vector", "working"), ("full-vector", "done")]
    assert [str(s) for s in steps if s.stage] == [
        "seed 1003: full-vector, stage 1 of 2 (scores)",
        "seed 1003: full-vector, stage 2 of 2 (calibration)",
    ]
    steps.clear()
    plot_ot.run_study("heq", **options, **SMALL)
    assert {s.state for s in steps} == {"waiting", "skipped"}


def test_a_study_that_is_not_there_or_options_of_another_are_refused(tmp_path):
    with pytest.raises(PlotError, match="Unknown task 'heqq'"):
        plot_ot.run_study("heqq", out=tmp_path / "run")
    with pytest.raises(PlotError, match="Unknown option of heq 'width'"):
        plot_ot.run_study("heq", out=tmp_path / "run", width=8)
    with pytest.raises(PlotError, match="options go with a task's name"):
        plot_ot.run_study(HierarchicalEquality(), out=tmp_path / "run", size=40)
    assert not (tmp_path / "run").exists()


# -- what a run says about itself (E1) --------------------------------------------------------------------------------


def test_e1_the_manifest_names_the_network_and_the_versions_of_all_that_matters(tmp_path):
    plot_ot.run_study("heq", seeds=[1003], methods=["full-vector"], out=tmp_path / "run", **SMALL)
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text())
    identity = HierarchicalEquality(**SMALL).prepare(1003, DATA).subject.identity()
    assert manifest["subjects"] == {"1003": {"name": "mlp-3x16", "identity": identity}}
    assert "transformers" in manifest["versions"]
    assert set(library_versions()) == {"plot_ot", "torch", "numpy", "safetensors", "transformers"}


def test_e1_a_localization_says_which_method_and_which_network_it_is_of(tmp_path, monkeypatch):
    monkeypatch.setattr("plot_ot.methods.DasSpec", lambda most: plot_ot.stages.descent.DasSpec(most=1))
    subject = plot_ot.MLPSubject(parity_net("ab", "cd"))
    result = plot_ot.localize(subject, HYPOTHESIS, ROWS, size=60, method="plot-das")
    result.save(tmp_path / "run")
    assert result.method == "plot-das"
    assert result.config["methods"] == ["plot-das"]
    assert (tmp_path / "run" / "units" / "seed-0" / "plot-das.json").exists()
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text())
    assert manifest["subjects"] == {"0": {"name": "MLPSubject", "identity": subject.identity()}}


def test_e1_the_engine_that_the_docstring_names_exists():
    import importlib
    import re

    [name] = re.findall(r"`(plot_ot\.[\w.]*RayEngine)`", plot_ot.localize.__doc__)
    module, _, what = name.rpartition(".")
    assert hasattr(importlib.import_module(module), what)


# -- the random control of a method of one's own (E1) -----------------------------------------------------------------

SEARCH = Search((1, 2), (1.0, 2.0))


def test_e1_a_users_own_method_is_judged_against_its_own_search_at_random(monkeypatch):
    """The control takes the user's menus and grid: here one pair of neurons, whole."""
    seen = []
    run = Method.run

    def spy(self, problem, *places):
        found = run(self, problem, *places)
        seen.append((self, found[0].handles))
        return found

    monkeypatch.setattr(Method, "run", spy)
    mine = Method("pairs", "", (Localize((blocks(2),), Transport(epsilon=(0.1, 1.0))), Calibrate(Search((1,), (1.0,)))))
    plot_ot.localize(plot_ot.MLPSubject(parity_net("ab", "cd")), HYPOTHESIS, ROWS, size=100, method=mine)
    drawn = [handles for method, handles in seen if method.name.startswith("random-")]
    assert len(drawn) == 2
    for handles in drawn:
        for handle in handles.values():
            touched = handle.edits[0].gains.nonzero().squeeze(1).tolist()
            assert len(touched) == 2
            assert touched[0] % 2 == 0
            assert handle.edits[0].gains[touched].tolist() == [1.0, 1.0]


def test_the_random_control_ranks_as_often_as_the_method_couples_and_differently_every_time():
    study = Study(heq())
    stage = Localize((blocks(4), blocks(8)), Transport(epsilon=(0.1, 1.0, 10.0)), coupling="place")
    state = RankAtRandom(stage, 0)(study.problem, _start(study))
    measured = stage(study.problem, _start(study))
    for v in study.problem.variables:
        ours, theirs = state.candidates[v], measured.candidates[v]
        assert [(c.label, c.coupling.sites) for c in ours] == [(c.label, c.coupling.sites) for c in theirs]
        plans = torch.stack([torch.tensor(c.coupling.plan[0][:2]) for c in ours])
        assert len(plans.unique(dim=0)) == len(ours)
    again = RankAtRandom(stage, 1)(study.problem, _start(study))
    v = study.problem.variables[0]
    assert (again.candidates[v][0].coupling.plan != state.candidates[v][0].coupling.plan).any()


def test_the_random_control_learns_nothing_and_keeps_the_rest():
    learned = (TrainDas(), ClosedForm())
    find = Localize((whole_places,)), SelectPlaces(3)
    inside = Localize((blocks(2),), coupling="place"), Calibrate(SEARCH)
    mine = Method("mine", "", (*find, Best((inside, (ClosedForm(),), ())), *learned))
    control = random_like(mine, 3, ()).stages
    assert [type(s).__name__ for s in control] == ["RankAtRandom", "SelectPlaces", "Best"]
    assert control[1] is find[1]
    assert [[type(s).__name__ for s in way] for way in control[2].ways] == [["RankAtRandom", "Calibrate"], []]
    draws = {control[0].draw, control[2].ways[0][0].draw}
    assert len(draws) == 2
    places = heq().subject.places
    assert random_like(Method("das", "", learned), 3, places).stages  # a method of learners alone: random neurons


def _start(study):
    from plot_ot.stages.problem import State

    return State.start(study.problem)
