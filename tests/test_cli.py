"""The command line as a user meets it: tables, run directories, one-line errors, interruptions."""

import io
import json
import sys
import warnings
from pathlib import Path
from statistics import fmean

import pytest
from rich.console import Console

from plot_ot import PlotWarning, cli
from plot_ot.cli.common import console
from plot_ot.cli.progress import Pace, Watch
from plot_ot.studies.running import Step
from plot_ot.studies.showing import duration
from plot_ot.studies.study import Study
from plot_ot.tasks import HierarchicalEquality, SeedFailed
from report_runs import text_run

DATA = Path(__file__).parent / "data"
SMALL = ["--seeds", "1", "--first-seed", "1003", "--size", "100", "--strengths", "tenths", "--no-sweep"]


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


def heq(monkeypatch, out: Path, *more: str) -> int:
    return call(monkeypatch, "run", "heq", *SMALL, "--out", str(out), *more)


def stable(results: dict) -> dict:
    """Everything that must not change between two runs: not the seconds, which are in the units too."""
    return {k: sorted(v) if k == "units" else v for k, v in results.items() if k not in ("runtimes", "seal")}


def test_our_warnings_are_one_line_without_the_code_they_come_from(monkeypatch, capsys):
    def warned(**_):
        warnings.warn("half of it is left out", PlotWarning, stacklevel=1)
        warnings.warn("something else", UserWarning, stacklevel=1)

    monkeypatch.setattr(cli, "app", warned)
    with warnings.catch_warnings(record=True) as others:
        warnings.simplefilter("always")
        cli.main()
    assert capsys.readouterr().err == "warning: half of it is left out\n"
    assert [str(w.message) for w in others] == ["something else"]


def test_a_run_ends_in_sentences_and_writes_its_directory(monkeypatch, tmp_path, capsys):
    out = tmp_path / "run"
    assert heq(monkeypatch, out, "--methods", "plot-joint,full-vector", "--sampler", "balanced") == 0
    told = capsys.readouterr()
    printed, said = told.out, " ".join(told.out.split())
    for words in ("z_WX (whether W equals X)", "test pairs that can tell", "copying that input's answer is right on"):
        assert words in said  # A4: nothing said what z_WX is
    assert str(out) in printed
    assert "recording" not in printed  # tables are behind --detail
    assert [line.split(" in ")[0] for line in told.err.splitlines()] == [  # A10: nothing was printed for minutes
        "seed 1003: training or loading the network, drawing pairs ...",
        *(f"seed 1003: {unit}, done" for unit in ("controls", "plot-joint", "full-vector")),
    ]
    results = json.loads((out / "results.json").read_text())
    wanted = {"task", "subject", "seed", "method", "variable", "bank", "accuracy", "pairs"}
    assert all(wanted <= set(r) for r in results["records"])
    assert {(r["method"], r["variable"], r["bank"]) for r in results["records"]} == {
        (m, v, b)
        for m in ("plot-joint", "full-vector", "no-edit", "copy-source")
        for v in ("z_WX", "z_YZ")
        for b in ("sensitivity", "invariance")
    }
    assert all({"seconds", "parts"} <= set(r) for r in results["runtimes"])
    assert {s["method"] for s in results["selection"]} == {"plot-joint", "full-vector"}
    assert {v["method"] for v in results["verdicts"]} == {"plot-joint"}
    assert len(list((out / "handles" / "seed-1003").glob("*.safetensors"))) == 4
    assert list((out / "figures").glob("*.png"))
    manifest = json.loads((out / "manifest.json").read_text())
    assert {"config", "versions", "machine", "started", "finished"} <= set(manifest)
    [command] = manifest["commands"]
    assert command.startswith("plot-ot run heq --seeds 1")
    assert "--methods plot-joint,full-vector" in command
    page = (out / "report.html").read_text()
    assert "Where do z_WX and z_YZ live?" in page
    assert command not in page  # what is shared tells no command
    assert f"Report: {out / 'report.html'}" in printed
    assert call(monkeypatch, "show", str(out), "--detail") == 0
    detailed = capsys.readouterr().out
    for words in ("Chosen on calibration", "Handles on other variables' labels", "by cell: 00 1.0000", "fit/test 0"):
        assert words in detailed
    for word in ("plot-joint", "full-vector", "no-edit", "copy-source", "recording", "calibration"):
        assert word in detailed
    assert call(monkeypatch, "show", str(out), "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["results"]["records"] == results["records"]
    assert {f["variable"] for f in found["findings"]} == {"z_WX", "z_YZ"}


def test_an_interrupted_run_continues_and_ends_as_if_it_had_not_been(monkeypatch, tmp_path, capsys):
    names = ["--methods", "full-vector,brute-force", "--no-figures"]
    assert heq(monkeypatch, tmp_path / "whole", *names) == 0
    run = Study.run

    def interrupted(self, method, random_method):
        if method.name == "brute-force":
            raise KeyboardInterrupt
        return run(self, method, random_method)

    monkeypatch.setattr(Study, "run", interrupted)
    assert heq(monkeypatch, tmp_path / "cut", *names) == 130
    assert "continue" in capsys.readouterr().err
    monkeypatch.setattr(Study, "run", run)
    done = tmp_path / "cut" / "units" / "seed-1003" / "full-vector.json"
    before = done.stat().st_mtime_ns
    assert heq(monkeypatch, tmp_path / "cut", *names) == 0
    assert done.stat().st_mtime_ns == before
    whole, cut = (json.loads((tmp_path / d / "results.json").read_text()) for d in ("whole", "cut"))
    assert stable(whole) == stable(cut)
    for handle in (tmp_path / "whole" / "handles").rglob("*.safetensors"):
        twin = tmp_path / "cut" / handle.relative_to(tmp_path / "whole")
        assert handle.read_bytes() == twin.read_bytes()


def test_a_failed_seed_is_listed_and_never_replaced(monkeypatch, tmp_path, capsys):
    def fail(*_: object) -> None:
        raise SeedFailed("the backbone is wrong on cell 11")

    monkeypatch.setattr(HierarchicalEquality, "prepare", fail)
    assert heq(monkeypatch, tmp_path / "run", "--no-figures") == 1  # nothing was studied
    assert "seed 1003 failed: the backbone is wrong on cell 11" in capsys.readouterr().out
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert [f["seed"] for f in results["failures"]] == [1003]
    assert results["records"] == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["report", "/nowhere/at/all"], "There is no run directory"),
        (["figures", str(DATA)], "not a plot-ot run directory"),
        (["table", str(DATA)], "not a plot-ot run directory"),
        (["table", str(DATA), "--format", "word"], "Unknown table format 'word'"),
        (["view", "/nowhere/at/all"], "There is no folder"),
        (["run", "heq", "--methods", "plott"], "Unknown method 'plott'. Did you mean 'plot'?"),
        (["run", "heq", "--sampler", "even"], "Unknown sampler 'even'"),
        (["explain", "hqe"], "Unknown task 'hqe'. Did you mean 'heq'?"),
        (["show", "/nowhere/at/all"], "There is no run directory"),
        (["run", "heq", "--out", "/dev/null/x"], "Cannot write"),
        (["run", "heq", "--out", str(DATA)], "not a plot-ot run directory"),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, list) else "",
)
def test_mistakes_are_one_line_and_leave_nothing(monkeypatch, tmp_path, capsys, words, said):
    monkeypatch.chdir(tmp_path)
    assert call(monkeypatch, *words) == 2
    err = capsys.readouterr().err.strip()
    assert err.startswith("error: ")
    assert said in err
    assert "\n" not in err
    assert not list(tmp_path.iterdir())


def test_a_run_becomes_pages_figures_and_tables(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        assert heq(monkeypatch, tmp_path / name, "--methods", "full-vector", "--no-figures", "--quiet") == 0
    assert capsys.readouterr().out == ""
    (tmp_path / "a" / "report.html").unlink()
    assert call(monkeypatch, "report", "a") == 0
    assert call(monkeypatch, "report", "a", "b") == 0
    assert "2 runs compared" in (tmp_path / "comparison.html").read_text()
    assert (tmp_path / "a" / "report.html").exists()
    assert call(monkeypatch, "figures", "a", "--format", "svg,pdf,png", "--out", "drawn") == 0
    drawn = {p.name for p in (tmp_path / "drawn").iterdir()}
    assert {"accuracy.svg", "accuracy.pdf", "accuracy.png", "causal.svg", "runtime.pdf"} <= drawn
    assert b"/FontFile2" in (tmp_path / "drawn" / "accuracy.pdf").read_bytes()  # the font is in the file
    assert b"<text" not in (tmp_path / "drawn" / "accuracy.svg").read_bytes()  # letters are outlines
    assert call(monkeypatch, "figures", "a", "--format", "gif") == 2
    assert "Unknown figure format 'gif'" in capsys.readouterr().err
    assert call(monkeypatch, "table", "a", "--format", "markdown") == 0
    assert "| z_WX sensitivity |" in capsys.readouterr().out
    assert call(monkeypatch, "table", "a", "--format", "csv", "--out", "a.csv") == 0
    assert (tmp_path / "a.csv").read_text().startswith("Metric,full-vector\n")
    capsys.readouterr()
    assert call(monkeypatch, "table", "a", "--json") == 0
    assert json.loads(capsys.readouterr().out)[0]["columns"] == ["Metric", "full-vector"]


def test_list_and_explain_say_what_there_is(monkeypatch, capsys):
    assert call(monkeypatch, "list") == 0
    printed = capsys.readouterr().out
    assert "plot-layered" in printed
    assert "Its methods are those of mcqa." in printed
    assert call(monkeypatch, "list", "--json") == 0
    assert {t["name"] for t in json.loads(capsys.readouterr().out)} >= {"heq", "mcqa"}
    assert call(monkeypatch, "models", "--json") == 0
    assert {"tiny", "planted-1000", "smollm2"} <= {m["name"] for m in json.loads(capsys.readouterr().out)}
    assert call(monkeypatch, "explain", "heq", "--size", "100") == 0
    printed = capsys.readouterr().out
    assert "z_WX <- W, X" in printed
    assert "forwards (every distinct input once)" in printed
    assert "Memory, and bytes moved" not in printed  # a newcomer asks how long; the rest is behind --detail
    assert call(monkeypatch, "explain", "heq", "--size", "100", "--detail") == 0
    assert "Memory, and bytes moved" in capsys.readouterr().out


@pytest.mark.parametrize("width", [120, 80, 60])
def test_no_number_is_cut_and_no_line_too_long(monkeypatch, tmp_path, capsys, width):
    """A3: at 80 columns numbers became `0.…` and columns vanished."""
    run = text_run(tmp_path / "run").path
    monkeypatch.setattr(console, "_width", width)
    assert call(monkeypatch, "show", str(run), "--detail") == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if str(run) not in line]
    assert max(len(line.rstrip()) for line in lines) <= width
    printed = "\n".join(lines)
    assert "…" not in printed
    results = json.loads((run / "results.json").read_text())
    for method in ("plot-native", "plot-pca", "das"):
        mine = [r for r in results["records"] if r["method"] == method]
        for bank in {(r["variable"], r["bank"]) for r in mine}:
            accuracies = [r["accuracy"] for r in mine if (r["variable"], r["bank"]) == bank]
            assert f"{sum(accuracies) / len(accuracies):.3f}" in printed
        assert f"{fmean(t['seconds'] for t in results['runtimes'] if t['method'] == method):.2f}" in printed


def test_addition_runs_stage_by_stage(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("PLOT_OT_CACHE", str(tmp_path / "cache"))
    words = ["--recipe", "first-exact", "--seeds", "1", "--first-seed", "1000", "--out", str(tmp_path / "run")]
    methods = "plot,plot-native,plot-pca,plot-closed-form"
    assert call(monkeypatch, "run", "addition", *words, "--methods", methods, "--detail") == 0
    printed = capsys.readouterr().out
    assert "plot-closed-form" in printed
    assert "Chosen on calibration" in printed
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    placed = {s["variable"]: s["places"] for s in results["selection"] if s["method"] == "plot"}
    assert placed == {"C1": ["h0"], "C2": ["h1"], "C3": ["h2"]}
    assert (tmp_path / "run" / "figures" / "handles.png").exists()
    assert call(monkeypatch, "explain", "addition", "--bits", "3") == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--bits", "40"], "2 to 16 bits; found 40"),
        (["--width", "0"], "width of at least 1; found 0"),
        (["--recipe", "quick"], "Unknown training recipe 'quick'"),
        (["--split", "random"], "Unknown split 'random'"),
    ],
    ids=str,
)
def test_impossible_adders_are_refused(monkeypatch, tmp_path, capsys, words, said):
    monkeypatch.chdir(tmp_path)
    assert call(monkeypatch, "run", "addition", *words) == 2
    assert said in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("given", ["0", "-1", "nan", "inf"])
@pytest.mark.parametrize("words", [("run", "mcqa"), ("run", "ioi"), ("explain", "mcqa"), ("localize", "task.py")])
def test_a_budget_of_nothing_is_refused_before_anything_is_written(monkeypatch, tmp_path, capsys, words, given):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "task.py").write_text("")
    assert call(monkeypatch, *words, f"--memory={given}") == 2
    assert f"--memory is in GB, above zero; found {given}" in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ["task.py"]


# -- progress -------------------------------------------------------------------------------------------------


def test_a_terminal_shows_the_stage_and_the_time_left():
    console = Console(file=io.StringIO(), force_terminal=True, width=120)
    with Watch(console, quiet=False) as watch:
        watch.pace.took("plot", 10.0)
        watch.pace.took("das", 100.0)
        for seed, unit in [(1, "plot"), (1, "das"), (2, "plot"), (2, "das")]:
            watch(Step(seed, unit, "waiting"))
        watch(Step(1, "das", "skipped"))
        watch(Step(1, "plot", "working"))
        watch(Step(1, "plot", "working", "stage 2 of 2 (calibration)"))
        watch.bar.refresh()
        watch(Step(1, "plot", "done"))
    shown = console.file.getvalue()
    assert "seed 1: plot, stage 2 of 2 (calibration)" in shown
    assert "about 2.0 min left" in shown
    assert watch.waiting == [(2, "plot"), (2, "das")]
    assert len(watch.pace.seconds["plot"]) == 2


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_is_silent_when_asked_to(terminal):
    console = Console(file=io.StringIO(), force_terminal=terminal)
    with Watch(console, quiet=True) as watch:
        for state, stage in (("waiting", ""), ("working", "stage 1 of 1 (couplings)"), ("done", "")):
            watch(Step(1, "plot", state, stage))
    assert console.file.getvalue().strip() == ""


def test_a_pipe_gets_a_line_per_seed_and_finished_unit():
    console = Console(file=io.StringIO(), force_terminal=False, width=20)
    with Watch(console, quiet=False) as watch:
        for unit in ("plot", "das"):
            watch(Step(1, unit, "waiting"))
        watch(Step(1, "training or loading the network, drawing pairs", "working"))  # may take minutes
        for state, stage in (("working", ""), ("working", "stage 1 of 1 (couplings)"), ("done", "")):
            watch(Step(1, "plot", state, stage))
        watch(Step(1, "das", "skipped"))
    assert console.file.getvalue().splitlines() == [
        "seed 1: training or loading the network, drawing pairs ...",
        "seed 1: plot, done in 0.0 s, about 1 s left",
    ]


def test_units_are_expected_to_take_as_long_as_their_namesakes():
    pace = Pace()
    assert pace.left(["plot"]) is None
    pace.took("plot", 2.0)
    pace.took("plot", 4.0)
    pace.took("das", 60.0)
    assert pace.left(["plot", "das"]) == 63.0
    assert pace.left(["unheard of"]) == 22.0
    assert [duration(s) for s in (0.2, 59, 200, 1500, 9000)] == ["1 s", "59 s", "3.3 min", "25 min", "2.5 h"]


def test_every_registered_task_has_a_run_command_and_no_other_has():
    from plot_ot.cli.run import app
    from plot_ot.tasks import TASKS

    assert {c.name for c in app.registered_commands} == set(TASKS)


# -- a hypothesis of one's own ------------------------------------------------------------------------------------


def test_localize_ends_in_plain_sentences_or_in_json_and_nothing_else(monkeypatch, tmp_path, capsys):
    """A4, A10: it printed the verdicts' own sentences only, had no --json, and mixed in what a task file prints."""
    from test_docs import DOCS, blocks

    monkeypatch.setattr("plot_ot.judging.bench.RANDOM_HANDLES", 5)
    code = blocks(DOCS / "choosing.md", "python")[0].text  # a network with known neurons
    task = tmp_path / "task.py"
    task.write_text(f"{code}\nhypothesis, inputs = causal, rows\nprint('said by the task')\n", encoding="utf-8")
    words = ["localize", str(task), "--size", "100"]
    assert call(monkeypatch, *words, "--out", str(tmp_path / "one")) == 0
    told = " ".join(capsys.readouterr().out.split())
    for expected in (
        "sign (computed from x0 and x1)",
        "test pairs that can tell",
        "copying that input's answer",
        "Report:",
    ):
        assert expected in told
    assert "said by the task" not in told
    assert call(monkeypatch, *words, "--out", str(tmp_path / "two"), "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert [f["variable"] for f in found["findings"]] == ["sign", "size"]
    assert found["findings"][0]["pairs"]
