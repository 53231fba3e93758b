"""Full disks, directories that cannot be written, and two processes on one run: clear errors, nothing corrupted."""

import errno
import json
import multiprocessing
import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from killing import command, lasting
from plot_ot import cli
from plot_ot.errors import PlotError, PlotWarning
from plot_ot.files.locks import NAME, Lock
from plot_ot.files.run_directory import RunDirectory
from plot_ot.files.run_layout import handle_path
from plot_ot.files.run_reading import read_run
from plot_ot.files.safe_reading import read_at, read_json, write_at
from plot_ot.files.writing import write_atomically, write_json
from plot_ot.models import named as models

DATA = Path(__file__).parent / "data"
CONFIG = {"task": "toy", "methods": ["plot"], "seeds": [0]}
as_root = pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="mounting needs root")
not_as_root = pytest.mark.skipif(not hasattr(os, "geteuid"), reason="needs users")


def small_disk(path: Path, size: str) -> bool:
    """Mount a file system in memory that holds so much; False where that is not allowed."""
    path.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path)], capture_output=True)
    return done.returncode == 0


@pytest.fixture
def full_disk(tmp_path: Path):
    """A disk on which no block is left."""
    disk = tmp_path / "disk"
    if not small_disk(disk, "256k"):
        pytest.skip("mounting is not allowed here")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def fill(disk: Path) -> None:
    with (disk / "filler").open("wb", buffering=0) as file:
        try:
            while True:
                file.write(b"x" * 4096)
        except OSError as e:
            assert e.errno == errno.ENOSPC  # noqa: PT017


def in_a_child(work: Callable[[], None]) -> str:
    """What our error said in a process of its own, in which limits and users can be changed."""
    read, write = os.pipe()
    if not (pid := os.fork()):
        said = "no error"
        try:
            work()
        except PlotError as e:
            said = str(e)
        except BaseException as e:
            said = f"NOT OURS: {e!r}"
        os.write(write, said.encode())
        os._exit(0)
    os.close(write)
    os.waitpid(pid, 0)
    with os.fdopen(read, "rb") as file:
        return file.read().decode()


def call(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["plot-ot", *words])
    try:
        cli.main()
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0


# -- full disks -----------------------------------------------------------------------------------------------


@as_root
def test_a_full_disk_leaves_the_old_files_whole(full_disk):
    run = RunDirectory.open(full_disk / "run", CONFIG, {})
    run.finish(0, "plot", {"records": [{"seed": 0, "accuracy": 0.5}]})
    run.compile(["plot"])
    before = (run.path / "results.json").read_bytes()
    fill(full_disk)
    with pytest.raises(PlotError, match=r"Cannot write .*das\.json: No space left"):
        run.finish(0, "das", {"records": ["x" * 100_000]})
    with pytest.raises(PlotError, match="No space left"):
        write_json(run.path / "results.json", ["x" * 100_000])
    assert (run.path / "results.json").read_bytes() == before
    assert not run.finished(0, "das")
    assert not [p for p in run.path.rglob(".*") if p.name != NAME]
    run.close()
    (full_disk / "filler").unlink()
    again = RunDirectory.open(full_disk / "run", CONFIG, {})
    again.finish(0, "das", {"records": [{"seed": 0, "accuracy": 1.0}]})
    again.compile(["plot", "das"])
    assert len(read_json(again.path / "results.json")["records"]) == 2


@as_root
def test_a_study_on_a_full_disk_stops_with_one_line_and_continues_when_there_is_room(
    full_disk, tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv("PLOT_OT_CACHE", str(DATA))
    monkeypatch.setattr("plot_ot.judging.bench.RANDOM_HANDLES", 2)
    out = full_disk / "run"
    (full_disk / "filler").write_bytes(b"x" * 200_000)
    assert call(monkeypatch, *command("heq", out)) == 2
    said = capsys.readouterr().err
    assert "No space left" in said
    assert "Traceback" not in said
    for path in out.rglob("*.json"):
        read_json(path)  # whatever is there is whole
    subprocess.run(["mount", "-o", "remount,size=64m", str(full_disk)], check=True)
    assert call(monkeypatch, *command("heq", out)) == 0
    assert call(monkeypatch, *command("heq", tmp_path / "elsewhere")) == 0
    assert lasting(out) == lasting(tmp_path / "elsewhere")


@as_root
def test_a_recording_that_the_disk_cannot_hold_is_said(full_disk):
    with (full_disk / "scratch").open("w+b", buffering=0) as file:
        os.truncate(file.fileno(), 10 << 20)  # sparse: the disk notices only when it is written to
        data = memoryview(bytearray(os.urandom(100_000)))
        write_at(file.fileno(), data, 5000)
        back = memoryview(bytearray(len(data)))
        read_at(file.fileno(), back, 5000)
        assert back == data
        with pytest.raises(PlotError, match=r"Cannot keep a recording.*No space left.*TMPDIR"):
            write_at(file.fileno(), memoryview(bytearray(1 << 20)), 1 << 20)
        os.truncate(file.fileno(), 6000)
        with pytest.raises(PlotError, match="cut short"):
            read_at(file.fileno(), back, 5000)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_file_size_limit_is_like_a_full_disk(tmp_path):
    write_atomically(tmp_path / "file", b"old")

    def work() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
        write_atomically(tmp_path / "file", b"x" * 5000)

    assert re.search("Cannot write .*file: File too large.*untouched", in_a_child(work))
    assert (tmp_path / "file").read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


# -- what cannot be written -----------------------------------------------------------------------------------


def as_nobody(work: Callable[[], None]) -> Callable[[], None]:
    """Root may write anywhere: be somebody else."""

    def run() -> None:
        if os.geteuid() == 0:
            os.setgid(65534)
            os.setuid(65534)
        work()

    return run


def let_pass(tmp_path: Path) -> None:
    """Let other users through the directories that pytest made; a worker of pytest-xdist has one more of them."""
    for parent in tmp_path.parents:
        if parent.name.startswith(("pytest-", "popen-")):
            parent.chmod(0o755)


@not_as_root
def test_a_run_directory_that_cannot_be_written_is_said(tmp_path):
    tmp_path.chmod(0o755)
    let_pass(tmp_path)
    run = RunDirectory.open(tmp_path / "run", CONFIG, {})
    run.finish(0, "plot", {})
    run.close()
    for path in (tmp_path / "run").rglob("*"):
        path.chmod(0o555 if path.is_dir() else 0o444)
    (tmp_path / "run").chmod(0o555)
    before = {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file()}
    said = in_a_child(as_nobody(lambda: RunDirectory.open(tmp_path / "run", CONFIG, {}).close()))
    assert "Cannot write" in said
    assert "Choose a directory you can write to" in said
    said = in_a_child(as_nobody(lambda: RunDirectory.open(tmp_path / "new" / "run", CONFIG, {}).close()))
    assert "Cannot write" in said
    assert {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file()} == before
    (tmp_path / "run").chmod(0o000)
    said = in_a_child(as_nobody(lambda: RunDirectory.open(tmp_path / "run", CONFIG, {}).close()))
    assert "Cannot read" in said
    (tmp_path / "run").chmod(0o755)


@not_as_root
def test_a_cache_that_cannot_be_written_is_said(tmp_path):
    from plot_ot.tasks.heq import Backbone, build_net, load_backbone

    tmp_path.chmod(0o555)
    let_pass(tmp_path)

    def work() -> None:
        import torch

        from plot_ot.tasks import heq

        net = Backbone(7, build_net(), torch.rand(100, 4), 1, (1.0,) * 4)
        heq.train_backbone = lambda seed: net  # type: ignore[assignment]
        load_backbone(7, tmp_path / "cache")

    assert "Cannot write" in in_a_child(as_nobody(work))
    assert "PLOT_OT_CACHE" in in_a_child(as_nobody(lambda: models.fetch("smollm2", cache=tmp_path / "cache") and None))
    tmp_path.chmod(0o755)


# -- two processes --------------------------------------------------------------------------------------------


def _hold(path: Path, ready: "multiprocessing.synchronize.Event") -> None:
    run = RunDirectory.open(path, CONFIG, {})
    ready.set()
    time.sleep(600)
    run.close()


def test_the_second_process_is_refused_until_the_first_is_gone_however_it_goes(tmp_path):
    context = multiprocessing.get_context("fork")
    ready = context.Event()
    first = context.Process(target=_hold, args=(tmp_path / "run", ready))
    first.start()
    assert ready.wait(60)
    before = (tmp_path / "run" / "manifest.json").read_bytes()
    with pytest.raises(PlotError, match=rf"in use by process {first.pid} on .+ \(since 20\d\d-.*another --out"):
        RunDirectory.open(tmp_path / "run", CONFIG, {})
    assert (tmp_path / "run" / "manifest.json").read_bytes() == before
    assert read_run(tmp_path / "run").config == CONFIG  # readers need no lock
    assert first.pid is not None
    os.kill(first.pid, signal.SIGKILL)
    first.join()
    RunDirectory.open(tmp_path / "run", CONFIG, {}).close()


def test_a_lock_ends_when_it_is_released_closed_or_forgotten(tmp_path):
    first = RunDirectory.open(tmp_path, CONFIG, {})
    with pytest.raises(PlotError, match=f"in use by process {os.getpid()}"):
        RunDirectory.open(tmp_path, CONFIG, {})
    first.close()
    first.close()
    with RunDirectory.open(tmp_path, CONFIG, {}), pytest.raises(PlotError, match="in use"):
        Lock(tmp_path)
    held = Lock(tmp_path)
    del held
    Lock(tmp_path).release()


def test_a_refused_configuration_or_a_foreign_directory_takes_no_lock(tmp_path):
    RunDirectory.open(tmp_path / "run", CONFIG, {}).close()
    with pytest.raises(PlotError, match="another run"):
        RunDirectory.open(tmp_path / "run", {**CONFIG, "task": "other"}, {})
    RunDirectory.open(tmp_path / "run", CONFIG, {}).close()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("x")
    with pytest.raises(PlotError, match="not a plot-ot run"):
        RunDirectory.open(tmp_path / "mine", CONFIG, {})
    assert [p.name for p in (tmp_path / "mine").iterdir()] == ["notes.txt"]


def test_a_lock_file_that_leads_elsewhere_is_not_followed(tmp_path):
    (tmp_path / "victim").write_text("precious")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / NAME).symlink_to(tmp_path / "victim")
    with pytest.raises(PlotError, match="Cannot write"):
        RunDirectory.open(tmp_path / "run", CONFIG, {})
    assert (tmp_path / "victim").read_text() == "precious"


def test_a_file_system_without_locks_is_said_and_used(tmp_path, monkeypatch):
    def none(_: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("plot_ot.files.locks._lock", none)
    with pytest.warns(PlotWarning, match="without locks.*no other process"):
        RunDirectory.open(tmp_path, CONFIG, {}).close()


def test_what_killed_processes_were_writing_is_swept_away(tmp_path):
    run = RunDirectory.open(tmp_path, CONFIG, {})
    run.finish(0, "plot", {})
    run.close()
    (tmp_path / "figures").mkdir()
    old = [tmp_path / ".writing-a", tmp_path / "units" / "seed-0" / ".writing-b", tmp_path / "figures" / ".writing-c"]
    new = tmp_path / "figures" / ".writing-d"  # perhaps of `plot-ot figures`, just now
    for path in (*old, new):
        path.write_text("half")
    os.utime(old[2], (0, 0))
    RunDirectory.open(tmp_path, CONFIG, {}).close()
    assert not any(p.exists() for p in old)
    assert new.exists()


def test_what_killed_processes_were_fetching_is_swept_away(tmp_path):
    folders = {name: tmp_path / f".work-{name}" for name in ("left", "busy", "new")}
    for name, folder in folders.items():
        folder.mkdir()
        (folder / "model.gguf").write_bytes(b"x" * 1000)
        if name != "new":
            os.utime(folder, (0, 0))
    lock = Lock(folders["busy"])
    os.utime(folders["busy"], (0, 0))
    with models._work_directory(tmp_path) as work:
        assert work.is_dir()
        assert [n for n, f in folders.items() if f.exists()] == ["busy", "new"]
    assert not work.exists()
    lock.release()


def test_names_that_look_alike_have_files_of_their_own(tmp_path):
    names = ["a_b", "a b", "a/b", "ä", "a" * 300, "a" * 301, "../x", "", "\ud800"]
    paths = {handle_path(tmp_path, 0, method, v) for method in ("plot", "../plot") for v in names}
    assert len(paths) == 2 * len(names)
    assert all(p.parent == tmp_path / "handles" / "seed-0" and len(p.name) < 200 for p in paths)
    assert handle_path(tmp_path, 0, "plot", "z_WX").name == "plot.z_WX.safetensors"


def test_a_note_is_kept_once_and_survives(tmp_path):
    with RunDirectory.open(tmp_path, CONFIG, {}) as run:
        for _ in range(2):
            run.note("chunk halved")
    with RunDirectory.open(tmp_path, CONFIG, {}) as run:
        assert run.manifest["notes"] == ["chunk halved"]
    assert json.loads((tmp_path / "manifest.json").read_text())["notes"] == ["chunk halved"]
