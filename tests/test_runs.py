"""Run directories: atomic files, continuing, refusing what is not ours."""

import json
import os
from pathlib import Path

import pytest

from plot_ot.errors import PlotError
from plot_ot.files.run_directory import RunDirectory
from plot_ot.files.run_layout import handle_path
from plot_ot.files.run_reading import read_run
from plot_ot.files.safe_reading import read_json
from plot_ot.files.writing import to_json, write_atomically, write_json

CONFIG = {"task": "toy", "sampler": "uniform", "methods": ["plot"], "seeds": [0]}


def open_run(path: Path, **changes: object) -> RunDirectory:
    return RunDirectory.open(path, {**CONFIG, **changes}, {"plot_ot": "test"})


def test_a_failed_write_leaves_the_old_file_and_no_litter(tmp_path, monkeypatch):
    target = tmp_path / "file"
    write_atomically(target, b"old")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(PlotError, match="No space left"):
        write_atomically(target, b"new")
    assert target.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_json_is_strict(tmp_path):
    write_json(tmp_path / "x.json", {"a": float("inf"), "b": [float("nan"), 1.5], "c": ("ε", None)})
    text = (tmp_path / "x.json").read_text()
    assert json.loads(text, parse_constant=pytest.fail) == {"a": None, "b": [None, 1.5], "c": ["ε", None]}
    assert to_json(True) == "true"


def test_an_empty_directory_becomes_a_run_and_the_same_configuration_continues_it(tmp_path):
    open_run(tmp_path / "run").finish(0, "plot", {"records": [{"seed": 0}]})
    again = open_run(tmp_path / "run")
    assert again.finished(0, "plot")
    assert not again.finished(1, "plot")


def test_seeds_and_methods_may_grow_but_nothing_else_may_change(tmp_path):
    open_run(tmp_path)
    grown = open_run(tmp_path, seeds=[0, 1], methods=["das"])
    assert grown.manifest["config"]["seeds"] == [0, 1]
    assert grown.manifest["config"]["methods"] == ["plot", "das"]
    with pytest.raises(PlotError, match="sampler: 'uniform' there, 'balanced' asked"):
        open_run(tmp_path, sampler="balanced")


def test_units_are_compiled_by_seed_and_in_the_methods_order(tmp_path):
    run = open_run(tmp_path)
    for seed in (10, 2):
        for name in ("b", "a"):
            run.finish(seed, name, {"records": [{"seed": seed, "method": name}], "couplings": [{"seed": seed}]})
    run.compile(["b", "a"])
    results = read_json(tmp_path / "results.json")
    assert [(r["seed"], r["method"]) for r in results["records"]] == [(2, "b"), (2, "a"), (10, "b"), (10, "a")]
    assert len(read_json(tmp_path / "couplings.json")) == 4


@pytest.mark.parametrize("litter", ["notes.txt", "results.json"])
def test_a_foreign_directory_is_refused_and_left_alone(tmp_path, litter):
    (tmp_path / litter).write_text("mine")
    with pytest.raises(PlotError, match="not a plot-ot run directory"):
        open_run(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == [litter]


def test_a_file_in_place_of_the_directory_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(PlotError, match="not a plot-ot run directory"):
        open_run(tmp_path / "file")


def test_a_directory_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(PlotError, match="Cannot write"):
        open_run(tmp_path / "file" / "below")


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("manifest.json", "{", "manifest.json cannot be read"),
        ("manifest.json", "[]", "manifest.json is damaged"),
        ("results.json", "[]", "results.json is damaged"),
        ("results.json", '{"records": 3}', "'records' in the results is damaged"),
        ("couplings.json", '{"records": 3}', "couplings.json is damaged"),
    ],
)
def test_damaged_files_are_named(tmp_path, name, text, said):
    run = open_run(tmp_path)
    run.compile([])
    (tmp_path / name).write_text(text)
    assert said in " ".join(read_run(tmp_path).problems)


def test_reading_what_is_no_run_is_refused(tmp_path):
    with pytest.raises(PlotError, match="no manifest"):
        read_run(tmp_path)
    with pytest.raises(PlotError, match="There is no run directory"):
        read_run(tmp_path / "nowhere")


def test_a_variable_name_cannot_leave_the_handles_folder(tmp_path):
    path = handle_path(tmp_path, 0, "plot", "../../../etc/passwd")
    assert path.parent == tmp_path / "handles" / "seed-0"
