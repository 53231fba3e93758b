"""What a run shows and shares: damaged results, text of others, tables for spreadsheets, privacy (F18-F20, F23-F25)."""

import getpass
import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import plot_ot
from plot_ot import cli
from plot_ot.errors import PlotError
from plot_ot.files.privacy import shared_command, shared_path
from plot_ot.files.run_directory import RunDirectory
from plot_ot.files.run_reading import read_run
from plot_ot.files.seals import sealed
from plot_ot.files.writing import write_atomically
from plot_ot.report.page import run_page, write_page
from plot_ot.report.paper_tables import paper_tables, render
from plot_ot.report.payload import payload
from report_runs import text_run

DATA = Path(__file__).parent / "data"
ESCAPES = "\x1b[31mred\x1b]0;title\x07\u202e\x9b5n"


@pytest.fixture(autouse=True)
def cached_networks(monkeypatch):
    monkeypatch.setenv("PLOT_OT_CACHE", str(DATA))
    monkeypatch.setattr("plot_ot.judging.bench.RANDOM_HANDLES", 2)


def call(monkeypatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["plot-ot", *words])
    try:
        cli.main()
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0


def changed(run: Path, change) -> Path:
    """The run with other results, sealed again: otherwise readers would take the units instead."""
    results = json.loads((run / "results.json").read_text())
    change(results)
    (run / "results.json").write_text(json.dumps(sealed(results)))
    return run


def rename(value, old: str, new: str):
    return json.loads(json.dumps(value).replace(json.dumps(old), json.dumps(new)))


# -- damaged results --------------------------------------------------------------------------------------------------

DAMAGES = {
    "no lists": lambda r: r.clear(),
    "lists are numbers": lambda r: r.update(dict.fromkeys(r, 3)),
    "rows are numbers": lambda r: r.update({k: [1, None] for k in r}),
    "verdicts without evidence": lambda r: [v.pop("evidence") for v in r["verdicts"]],
    "verdicts of another kind": lambda r: [v.update(status=["x"], sentence=None) for v in r["verdicts"]],
    "parts are words": lambda r: [t.update(parts={"test": "long"}) for t in r["runtimes"]],
    "notes of another kind": lambda r: r.update(notes=[{"pass_rates": 7}, {"power": []}, {"shared_sources": "x"}]),
    "chosen is empty": lambda r: [s.update(chosen={}, places=[]) for s in r["selection"]],
    "no runtimes": lambda r: r.update(runtimes=[]),
    "labels are gone": lambda r: [c.update(labels=[1]) for c in r["cross"]],
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_f18_show_survives_damaged_results(tmp_path, monkeypatch, capsys, damage):
    run = changed(text_run(tmp_path / "run").path, DAMAGES[damage])
    assert call(monkeypatch, "show", str(run), "--detail") == 0
    assert "Run directory" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["results.json", "manifest.json", "couplings.json"])
def test_f18_show_says_which_file_is_damaged(tmp_path, monkeypatch, capsys, name):
    run = text_run(tmp_path / "run").path
    (run / name).write_text('{"a": [')
    assert call(monkeypatch, "show", str(run)) == 0
    assert f"{name} cannot be read" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["[red]x[/red]", "[/]", "[link=file:///etc]x[/link]", ":boom:", ESCAPES])
def test_f19_names_are_printed_as_they_are(tmp_path, monkeypatch, capsys, name):
    """Rich's markup means nothing, and nothing that steers a terminal gets through (F20)."""
    run = text_run(tmp_path / "run").path
    results = json.loads((run / "results.json").read_text())
    (run / "results.json").write_text(json.dumps(rename(results, "das", name)))
    assert call(monkeypatch, "show", str(run), "--detail") == 0
    shown = capsys.readouterr().out
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", shown)
    assert (name if name != ESCAPES else "x1b[31mred") in shown


@pytest.mark.parametrize("kind", ["markdown", "latex", "csv"])
def test_f20_tables_do_not_steer_the_terminal_they_are_printed_on(tmp_path, monkeypatch, capsys, kind):
    run = text_run(tmp_path / "run").path
    results = json.loads((run / "results.json").read_text())
    (run / "results.json").write_text(json.dumps(rename(results, "das", ESCAPES) | {"task": "another"}))
    assert call(monkeypatch, "table", str(run), "--format", kind, "--all") == 0
    shown = capsys.readouterr().out
    assert "red" in shown
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e]", shown)


def test_f20_an_error_about_a_strange_name_does_not_steer_the_terminal(monkeypatch, capsys):
    assert call(monkeypatch, "show", f"[bold]{ESCAPES}") == 2
    shown = capsys.readouterr().err
    assert "\x1b" not in shown
    assert "[bold]" in shown


def zooms(run: Path) -> set[tuple[str, str, str]]:
    """The handles whose way the page draws: seed, method and variable."""
    found = payload(read_run(run))["zoom"]
    return {(s, m, v) for s, methods in found.items() for m, by in methods.items() for v, zoom in by.items() if zoom}


def test_f23_a_record_without_an_interval_costs_nothing_else(tmp_path):
    def one_of_every_method(results):
        for record in results["records"]:
            if (record["variable"], record["bank"]) == ("AnswerToken", "invariance"):
                record.pop("interval")

    run = changed(text_run(tmp_path / "run", seeds=(1,)).path, one_of_every_method)
    page = run_page(read_run(run))
    assert "cannot be shown" not in page
    assert "Where do AnswerPointer and AnswerToken live?" in page
    assert zooms(run) == zooms(text_run(tmp_path / "whole", seeds=(1,)).path)
    write_page([run, text_run(tmp_path / "other").path], tmp_path / "comparison.html")


# -- what is shared ---------------------------------------------------------------------------------------------------


def secrets() -> list[str]:
    """What may not be told: where we are, on which machine, who we are."""
    names = [n for n in (socket.gethostname(), getpass.getuser()) if len(n) > 4]  # a shorter one is in any word
    return [os.getcwd(), *names, *([home] if len(home := str(Path.home())) > 6 else [])]


def test_f24_nothing_that_is_shared_tells_where_it_was_made(tmp_path, monkeypatch):
    model = tmp_path / "secret" / "models"
    model.mkdir(parents=True)
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    out = tmp_path / "secret" / "run"
    words = f"run heq --seeds 1 --first-seed 1003 --size 40 --strengths units --methods full-vector --out {out}"
    assert call(monkeypatch, *words.split(), "--no-figures", "--no-sweep", "--quiet") == 0
    for path in [p for p in out.rglob("*") if p.is_file()]:
        text = path.read_bytes()
        for secret in [*secrets(), str(tmp_path), "secret"]:
            assert secret.encode() not in text, (path.name, secret)
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["commands"][0].startswith("plot-ot run heq --seeds 1")
    assert "--out 'run~" in manifest["commands"][0]
    assert "plot-ot run heq" not in (out / "report.html").read_text()


def test_f24_a_private_run_keeps_nothing_about_the_machine(tmp_path):
    options = {"seeds": [1003], "methods": ["full-vector"], "out": tmp_path / "run", "size": 40, "strengths": "units"}
    plot_ot.run_study("heq", **options)
    assert {"machine", "commands"} <= set(read_run(tmp_path / "run").manifest)
    manifest = plot_ot.run_study("heq", **options, private=True).manifest
    assert not {"machine", "commands"} & set(manifest)
    manifest = plot_ot.run_study("heq", **options).manifest  # once private, always
    assert not {"machine", "commands"} & set(manifest)
    assert manifest["versions"]
    assert manifest["subjects"]


def test_f24_a_model_in_a_folder_of_mine_is_named_without_the_folder(tmp_path, monkeypatch):
    from plot_ot.tasks import MultipleChoice

    where = str(tmp_path / "secret" / "model")
    config = MultipleChoice(where, adapter=where + "-lora", questions=where + ".json").config()
    assert "secret" not in json.dumps(config)
    monkeypatch.chdir(tmp_path)
    assert shared_path(where) == "secret/model"
    assert shared_path("google/gemma-2-2b") == "google/gemma-2-2b"
    assert shared_path("~/model").startswith("model~")
    assert shared_path("../other/model").startswith("model~")
    assert shared_path("C:\\Users\\me\\model").startswith("model~")
    assert shared_path("/a/model") != shared_path("/b/model")
    said = shared_command(["plot-ot", "run", "mcqa", f"--model={where}", "--out", "/home/me/x y"])
    assert said.startswith("plot-ot run mcqa --model=secret/model --out 'x y~")


def test_f24_problems_of_files_are_told_without_their_folders(tmp_path):
    run = text_run(tmp_path / "secret" / "run").path
    (run / "couplings.json").unlink()
    (run / "couplings.json").mkdir()
    (run / "results.json").write_text("{")
    assert "secret" not in run_page(read_run(run))


@pytest.mark.skipif(os.name != "posix", reason="the umask is of POSIX systems")
def test_f24_files_are_as_open_as_the_umask_says(tmp_path):
    old = os.umask(0o077)
    try:
        with RunDirectory.open(tmp_path / "run", {"task": "x"}, {}) as run:
            run.finish(0, "plot", {})
            run.complete([])
        write_page([run.path])
    finally:
        os.umask(old)
    assert {p.name for p in (tmp_path / "run").rglob("*") if p.is_file() and p.stat().st_mode & 0o077} == set()
    old = os.umask(0o022)
    try:
        write_atomically(tmp_path / "open", b"")
    finally:
        os.umask(old)
    assert (tmp_path / "open").stat().st_mode & 0o777 == 0o644


def test_f24_a_lock_that_is_let_go_names_nobody(tmp_path):
    run = RunDirectory.open(tmp_path / "run", {"task": "x"}, {})
    assert socket.gethostname() in (tmp_path / "run" / ".lock").read_text()
    run.close()
    assert (tmp_path / "run" / ".lock").read_text() == ""


# -- the rest (F25) ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["=1+1", "+cmd", "-2", "@SUM(A1)", "\t=1", "\r=1"])
def test_f25_no_cell_of_a_table_is_a_formula(tmp_path, name):
    run = text_run(tmp_path / "run").path
    results = json.loads((run / "results.json").read_text())
    (run / "results.json").write_text(json.dumps(rename(results, "das", name) | {"task": "another"}))
    import csv
    import io

    text = "".join(render(t, "csv") for t in paper_tables([read_run(run)], True))
    cells = [c for row in csv.reader(io.StringIO(text, newline="")) for c in row]
    assert any(c.split() == f"'{name}".split() or c == "'" + re.sub(r"\s", " ", name) for c in cells)
    assert not [c for c in cells if re.match(r"\s*[=+@]|-\d", c)]


def test_f25_a_linked_folder_is_not_written_through(tmp_path, monkeypatch):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    run = text_run(tmp_path / "run").path
    (run / "figures").symlink_to(elsewhere)
    assert call(monkeypatch, "figures", str(run)) == 2
    with pytest.raises(PlotError, match="symbolic link"):
        RunDirectory.open(run, read_run(run).config, {"plot_ot": "0.1.0"})
    assert not list(elsewhere.iterdir())


@pytest.mark.parametrize("seed", [2**70, -1, 10**12])
def test_f25_a_seed_out_of_range_is_refused_before_anything_is_written(tmp_path, seed):
    with pytest.raises(PlotError, match="A seed is a whole number from 0"):
        plot_ot.run_study("heq", seeds=[seed], out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_f25_an_unwritable_cache_is_told_before_training(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    trained = []
    monkeypatch.setattr("plot_ot.tasks.heq.train_backbone", lambda seed: trained.append(seed))
    monkeypatch.setattr("plot_ot.tasks.addition_data.train_backbone", lambda adder, seed: trained.append(seed))
    monkeypatch.setenv("PLOT_OT_CACHE", str(tmp_path / "file" / "below"))
    for task in ("heq", "addition"):
        with pytest.raises(PlotError, match="Cannot write"):
            plot_ot.run_study(task, seeds=[1003], out=tmp_path / task)
    assert not trained


@pytest.mark.skipif(os.name != "posix", reason="pipes of POSIX systems")
def test_f25_a_closed_pipe_is_no_traceback(tmp_path):
    run = text_run(tmp_path / "run").path
    command = f"{sys.executable} -m plot_ot.cli show {run} --detail | true"
    done = subprocess.run(["bash", "-c", f"sleep 0.1; {command}"], capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stderr
    assert "BrokenPipe" not in done.stderr
