"""Nothing is mixed and nothing vanishes: what a unit is of is checked wherever it is used (F5-F11, F22)."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

import plot_ot
import report_runs
from plot_ot.errors import PlotError
from plot_ot.files.run_directory import RunDirectory
from plot_ot.files.run_layout import handle_path, unit_path
from plot_ot.files.run_reading import read_run
from plot_ot.files.seals import digest
from plot_ot.methods import Method
from plot_ot.report.paper_tables import paper_tables, render
from plot_ot.sites import blocks
from plot_ot.stages.calibrate import Search
from plot_ot.stages.choose import Calibrate
from plot_ot.stages.coupling import Localize
from plot_ot.studies.identity import banks_digest, method_digest
from plot_ot.tasks import HierarchicalEquality
from plot_ot.transport import Transport
from report_runs import handle
from small_studies import heq
from test_localize import HYPOTHESIS, ROWS, parity_net

DATA = Path(__file__).parent / "data"
CONFIG = {"task": "heq", "methods": ["plot"], "seeds": [1]}
OF = {"subject": {"name": "net", "identity": "1111"}, "banks": "2222", "settings": "3333"}


def records(seed, method):
    """Test accuracies of a method of any name."""
    return [r | {"method": method} for r in report_runs.records(seed, "das")]


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A cache of networks of its own."""
    folder = tmp_path / "cache"
    folder.mkdir()
    shutil.copy(DATA / "heq-1003.safetensors", folder)
    monkeypatch.setenv("PLOT_OT_CACHE", str(folder))
    monkeypatch.setattr("plot_ot.judging.bench.RANDOM_HANDLES", 2)
    return folder


def study(out, methods=("full-vector",), seeds=(1003,), **options):
    return plot_ot.run_study("heq", seeds=seeds, methods=list(methods), out=out, size=40, strengths="units", **options)


def another_network(cache, seed=1003):
    tensors = load_file(cache / f"heq-{seed}.safetensors")
    tensors["net.6.bias"] = tensors["net.6.bias"] + 1e-4
    save_file(tensors, cache / f"heq-{seed}.safetensors")


def files(folder):
    return {p: p.read_bytes() for p in folder.rglob("*") if p.is_file() and p.name not in ("manifest.json", ".lock")}


def written(path, seed=1, name="plot", **changes):
    """A run with a finished unit and its handle."""
    with RunDirectory.open(path, CONFIG, {"torch": "2"}) as run:
        unit = {"records": records(seed, name)}
        run.finish(seed, name, unit, [handle("das", "AnswerToken")], {**OF, **changes})
        run.complete(["plot"])
    return path


# -- another network, other data, versions, settings ------------------------------------------------------------------


@pytest.mark.parametrize(
    "methods", [["full-vector"], ["full-vector", "brute-force"]], ids=["finished", "one more method"]
)
def test_f05_a_network_that_was_replaced_between_two_calls_is_refused(cache, tmp_path, methods):
    study(tmp_path / "run")
    before = files(tmp_path / "run")
    another_network(cache)
    with pytest.raises(PlotError, match=r"another network: identity .* there, .* here.*--start-over"):
        study(tmp_path / "run", methods)
    assert files(tmp_path / "run") == before


def test_f05_starting_over_sets_the_old_run_aside_and_says_so(cache, tmp_path):
    out = tmp_path / "run"
    first = study(out)
    another_network(cache)
    again = study(out, start_over=True)
    assert again.manifest["superseded"] == ["superseded/1"]
    assert read_run(out / "superseded" / "1").results == first.results
    assert again.manifest["subjects"] != first.manifest["subjects"]
    assert study(out).manifest["superseded"] == ["superseded/1"]


def test_f05_other_data_of_the_same_seed_is_refused(cache, tmp_path, monkeypatch):
    study(tmp_path / "run")
    prepare = HierarchicalEquality.prepare

    def other_pairs(self, seed, where):
        prepared = prepare(self, seed, where)
        fit = prepared.splits.fit
        return replace(prepared, splits=replace(prepared.splits, fit=replace(fit, base=fit.base.flip(0))))

    monkeypatch.setattr(HierarchicalEquality, "prepare", other_pairs)
    with pytest.raises(PlotError, match="another data"):
        study(tmp_path / "run", ["full-vector", "brute-force"])


@pytest.mark.parametrize("handles", ["there", "lost"])
def test_f05_a_method_of_the_same_name_with_other_settings_is_refused(cache, tmp_path, monkeypatch, handles):
    """Also where its handles are lost: readers still show its numbers, beside those that would be made now."""
    study(tmp_path / "run")
    if handles == "lost":
        shutil.rmtree(tmp_path / "run" / "handles")
    methods = HierarchicalEquality.methods

    def changed(self):
        found = methods(self)
        return {**found, "full-vector": replace(found["full-vector"], stages=found["brute-force"].stages)}

    monkeypatch.setattr(HierarchicalEquality, "methods", changed)
    with pytest.raises(PlotError, match="another method's settings"):
        study(tmp_path / "run")


def test_f06_a_result_of_another_network_is_not_saved_over_the_first(tmp_path, monkeypatch):
    monkeypatch.setattr("plot_ot.judging.bench.RANDOM_HANDLES", 2)
    net, other = parity_net("ab", "cd"), parity_net("ab", "cd", bystanders=11)
    found = [
        plot_ot.localize(plot_ot.MLPSubject(n), HYPOTHESIS, ROWS, size=60, method="plot-layered") for n in (net, other)
    ]
    found[0].save(tmp_path / "run")
    found[0].save(tmp_path / "run")
    before = files(tmp_path / "run")
    with pytest.raises(PlotError, match="identity"):
        found[1].save(tmp_path / "run")
    pairs = plot_ot.localize(plot_ot.MLPSubject(net), HYPOTHESIS, ROWS[:200], size=60, method="plot-layered")
    with pytest.raises(PlotError, match="another data"):
        pairs.save(tmp_path / "run")
    assert files(tmp_path / "run") == before


def test_f07_a_run_of_other_versions_is_refused(cache, tmp_path, monkeypatch):
    study(tmp_path / "run")
    monkeypatch.setattr("plot_ot.studies.running.library_versions", lambda: {"plot_ot": "0.0.1", "torch": "9"})
    with pytest.raises(
        PlotError, match=rf"other versions .*plot_ot: {re.escape(plot_ot.__version__)} there, 0\.0\.1 here"
    ):
        study(tmp_path / "run", ["brute-force"])


# -- units that are not what their place says -------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["{}", "[]", "{", '{"of": {"unit": "plot", "handles": {}}, "records": 3}'])
def test_f08_an_emptied_unit_is_made_anew_when_its_study_goes_on(cache, tmp_path, text):
    before = study(tmp_path / "run").results
    path = unit_path(tmp_path / "run", 1003, "full-vector")
    path.write_text(text)
    again = study(tmp_path / "run")
    assert {**again.results, "runtimes": 0} == {**before, "runtimes": 0}
    assert any("full-vector was made anew" in note for note in again.manifest["notes"])


def test_f08_units_are_checked_when_they_are_compiled_and_read(tmp_path):
    run = written(tmp_path / "run")
    for name, text in {
        "units/seed-2/plot.json": (run / "units/seed-1/plot.json").read_text(),  # a copied seed would count twice
        "units/seed-1/das.json": (run / "units/seed-1/plot.json").read_text(),
        "units/seed-1/empty.json": "{}",
    }.items():
        (run / name).parent.mkdir(exist_ok=True)
        (run / name).write_text(text)
        with pytest.raises(PlotError, match="is damaged"):
            RunDirectory(run, read_run(run).manifest).compile(["plot"])
        reading = read_run(run)
        assert any(name in p and "left out" in p for p in reading.problems)
        assert {(r["seed"], r["method"]) for r in reading.results["records"]} == {(1, "plot")}
        (run / name).unlink()


def test_f08_a_unit_of_another_size_is_refused(tmp_path):
    small, run = tmp_path / "small", written(tmp_path / "run")
    with RunDirectory.open(small, {**CONFIG, "size": 10}, {"torch": "2"}) as other:
        other.finish(2, "plot", {"records": records(2, "plot")}, of=OF)
    shutil.copytree(small / "units" / "seed-2", run / "units" / "seed-2")
    with pytest.raises(PlotError, match="another configuration"):
        RunDirectory(run, read_run(run).manifest).compile(["plot"])
    assert any("another configuration" in p for p in read_run(run).problems)


def test_f08_two_networks_in_one_seed_are_not_compiled(tmp_path):
    run = written(tmp_path / "run")
    with RunDirectory.open(run, CONFIG, {"torch": "2"}) as again:
        again.finish(1, "das", {"records": records(1, "das")}, of={**OF, "subject": {"name": "net", "identity": "9"}})
        with pytest.raises(PlotError, match="another network"):
            again.compile(["plot", "das"])
    assert any("another network" in p for p in read_run(run).problems)


@pytest.mark.parametrize("damage", ["missing", "cut", "other"])
def test_f09_a_missing_or_damaged_handle_is_noticed_and_made_anew(cache, tmp_path, damage):
    study(tmp_path / "run")
    handles = sorted((tmp_path / "run" / "handles").rglob("*.safetensors"))
    sound = handles[0].read_bytes()
    if damage == "missing":
        handles[0].unlink()
    else:
        handles[0].write_bytes(sound[:-1] if damage == "cut" else handles[1].read_bytes())
    assert any("handle" in p for p in read_run(tmp_path / "run").problems)
    again = study(tmp_path / "run")
    assert handles[0].read_bytes() == sound
    assert not again.problems


def change_a_digit(path, key):
    """Another number under a key, as a slip of the hand or of the disk leaves it; the file is still JSON."""
    before = path.read_text()
    after = re.sub(rf'("{key}": \d+\.?\d*?)(\d)\b', lambda m: m[1] + str((int(m[2]) + 1) % 10), before, count=1)
    assert after != before
    path.write_text(after)


@pytest.mark.parametrize("name", ["results.json", "unit", "couplings.json"])
def test_f08_a_number_that_was_changed_is_not_shown(tmp_path, name):
    """Found by the campaign: one digit of a unit or of the results could change, and every reader showed it."""
    run = written(tmp_path / "run")
    clean = read_run(run)
    if name == "couplings.json":
        (run / name).write_text('[{"seed": 1, "method": "plot", "variables": [], "sites": [], "plan": []}]')
    else:
        change_a_digit(unit_path(run, 1, "plot") if name == "unit" else run / name, "accuracy")
    reading = read_run(run)
    assert any("changed after it was written" in p for p in reading.problems) or name == "couplings.json"
    assert not reading.compiled
    assert reading.couplings == clean.couplings
    if name == "unit":
        assert reading.results["records"] == []
        with pytest.raises(PlotError, match="changed after it was written"):
            RunDirectory(run, reading.manifest).compile(["plot"])
    else:
        assert reading.results == clean.results


def test_f08_a_manifest_that_was_changed_is_refused_and_can_be_set_aside(tmp_path):
    run = written(tmp_path / "run")
    for text in (None, "{", ""):
        if text is None:
            text = (run / "manifest.json").read_text().replace('"torch": "2"', '"torch": "3"')
        (run / "manifest.json").write_text(text)
        with pytest.raises(PlotError, match=r"manifest.json cannot be (trusted|read).*--start-over"):
            RunDirectory.open(run, CONFIG, {"torch": "3"})
        assert any("manifest.json" in p for p in read_run(run).problems)
        RunDirectory.open(run, CONFIG, {"torch": "3"}, start_over=True).close()


def test_f09_a_result_with_another_handle_is_not_loaded(tmp_path):
    """A sibling: `Result.load` took whatever lay at the handle's place."""
    out = tmp_path / "run"
    report_runs.text_run(out)
    path = handle_path(out, 1, "das", "AnswerToken")
    assert plot_ot.Result.load(out, "das", 1).handles
    path.write_bytes(handle_path(out, 1, "das", "AnswerPointer").read_bytes())
    with RunDirectory.open(out, read_run(out).config, read_run(out).manifest["versions"]) as run:
        sound = [handle("das", v) for v in report_runs.VARIABLES]
        run.finish(1, "das", {"records": []}, sound)
    path.write_bytes(handle_path(out, 1, "das", "AnswerPointer").read_bytes())
    with pytest.raises(PlotError, match="is damaged"):
        read_run(out).require_handles(1, "das")


def test_f05_a_run_killed_while_it_was_set_aside_can_be_begun(tmp_path):
    """Found by the campaign: the old manifest gone, the new one not yet written, the directory was refused for ever."""
    run = written(tmp_path / "run")
    with RunDirectory.open(run, CONFIG, {"torch": "2"}, start_over=True):
        pass
    (run / "manifest.json").unlink()
    with RunDirectory.open(run, CONFIG, {"torch": "2"}) as again:
        assert again.manifest["superseded"] == ["superseded/1"]
    (tmp_path / "foreign" / "superseded").mkdir(parents=True)
    (tmp_path / "foreign" / "mine.txt").write_text("")
    with pytest.raises(PlotError, match="not a plot-ot run directory"):
        RunDirectory.open(tmp_path / "foreign", CONFIG, {})


@pytest.mark.parametrize("other", [{"readout": "logits"}, {"controls": "full"}])
def test_f06_results_of_other_readouts_or_controls_are_not_one_table(tmp_path, monkeypatch, other):
    """A sibling: two methods of one directory could be judged by different rules."""
    monkeypatch.setattr("plot_ot.judging.bench.RANDOM_HANDLES", 2)
    subject, once = plot_ot.MLPSubject(parity_net("ab", "cd")), Search((1,), (1.0,))
    for k, options in enumerate(({}, other)):
        mine = Method(f"m{k}", "", (Localize((blocks(2),)), Calibrate(once)))
        found = plot_ot.localize(subject, HYPOTHESIS, ROWS, size=60, method=mine, **options)
        if not k:
            found.save(tmp_path / "run")
    with pytest.raises(PlotError, match=next(iter(other))):
        found.save(tmp_path / "run")


def test_f10_a_grid_with_holes_is_said_in_every_table(tmp_path, capsys):
    from plot_ot.cli.show import print_run

    with RunDirectory.open(tmp_path / "run", {**CONFIG, "seeds": [1, 2]}, {}) as run:
        run.finish(1, "plot", {"records": records(1, "plot")})
        run.finish(2, "das", {"records": records(2, "das")})
        run.complete(["plot", "das"])
    reading = read_run(tmp_path / "run")
    assert reading.gaps == {"plot": [2], "das": [1]}
    print_run(reading)
    shown = " ".join(capsys.readouterr().out.split())
    assert "plot lacks seed 2; das lacks seed 1" in shown
    for kind in ("latex", "markdown", "csv"):
        tables = [render(t, kind) for t in paper_tables([reading], True)]
        assert tables
        assert all("1 of 2 seeds" in t for t in tables), kind
    from plot_ot.report.page import run_page

    assert "lacks seed" in run_page(reading)


@pytest.mark.parametrize("name", ["plot/v2", "../../../x", "a b", "ä", "con\x00", "", "a" * 300])
def test_f11_any_name_of_a_method_has_a_file_of_its_own_inside_the_run(tmp_path, name):
    run = written(tmp_path / "run" / "deep" / "er", name=name)
    assert {r["method"] for r in read_run(run).results["records"]} == {name}
    below = {p for p in tmp_path.rglob("*") if p.is_file()}
    assert all(p.is_relative_to(run) for p in below)


@pytest.mark.parametrize("name", ["controls", "failed", "epsilon-sweep"])
def test_f11_a_method_that_is_named_like_another_part_of_a_run_is_refused(tmp_path, name, monkeypatch):
    monkeypatch.setattr("plot_ot.judging.bench.RANDOM_HANDLES", 2)
    mine = Method(name, "", (Localize((blocks(2),)), Calibrate(Search((1,), (1.0,)))))
    result = plot_ot.localize(plot_ot.MLPSubject(parity_net("ab", "cd")), HYPOTHESIS, ROWS, size=60, method=mine)
    with pytest.raises(PlotError, match="cannot be called"):
        result.save(tmp_path / "run")


def test_f22_a_copied_run_is_as_finished_as_the_first(tmp_path):
    run = written(tmp_path / "run")
    import os

    for k, path in enumerate(sorted(p for p in run.rglob("*") if p.is_file())):
        os.utime(path, (1e9 + 1000 * k, 1e9 + 1000 * k))  # as a clone leaves them: in any order
    os.utime(run / "results.json", (1, 1))
    assert read_run(run).compiled
    unit = unit_path(run, 1, "plot")
    unit.write_text(unit.read_text() + "\n")
    os.utime(unit, (0, 0))
    assert not read_run(run).compiled


# -- digests ----------------------------------------------------------------------------------------------------------


def test_settings_have_one_digest_each():
    stages = [
        (Localize((blocks(2),)), Calibrate(Search((1,), (1.0,)))),
        (Localize((blocks(4),)), Calibrate(Search((1,), (1.0,)))),
        (Localize((blocks(2),), Transport(epsilon=(1.0,))), Calibrate(Search((1,), (1.0,)))),
        (Localize((blocks(2),)), Calibrate(Search((1,), (2.0,)))),
        (Localize((blocks(2),)), lambda problem, state: state),
        (Localize((blocks(2),)), lambda problem, state: None),
    ]
    found = [method_digest(Method("m", "", s)) for s in stages]
    assert len(set(found)) == len(found)
    assert found[0] == method_digest(
        Method("m", "other words", (Localize((blocks(2),)), Calibrate(Search((1,), (1.0,)))))
    )


def test_banks_have_one_digest_each():
    assert banks_digest(heq()) == banks_digest(heq())
    assert banks_digest(heq()) != banks_digest(heq(seed=1001))
    assert digest({"a": 1, "b": [1.5]}) == digest({"b": (1.5,), "a": 1})
    assert digest({"a": 1}) != digest({"a": 1.5})


def test_a_run_says_in_its_units_what_they_are_of(cache, tmp_path):
    study(tmp_path / "run")
    of = json.loads(unit_path(tmp_path / "run", 1003, "full-vector").read_text())["of"]
    prepared = HierarchicalEquality(size=40, strengths="units").prepare(1003, cache)
    assert of["subject"] == {"name": "mlp-3x16", "identity": prepared.subject.identity()}
    assert of["banks"] == banks_digest(prepared)
    assert of["seed"] == 1003
    assert of["unit"] == "full-vector"
    assert {"torch", "plot_ot"} <= set(of["versions"])
    assert len(of["handles"]) == 2
