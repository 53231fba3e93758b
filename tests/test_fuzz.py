"""Every loader is given damaged and hostile files: only PlotError comes of them, in bounded memory."""

import math
import os
import re
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

pytest.importorskip("transformers")
pytest.importorskip("peft")
pytest.importorskip("pyarrow")
from damage import PICKLE, Bench, Loader, damaged, memory_peak, torch_pickle
from loaders import LOADERS

LINUX = sys.platform == "linux"
ROOM = 256 << 20
"""Bytes that reading a file of some kilobytes may take at most."""


@pytest.fixture(autouse=True)
def _stay_here():
    here = Path.cwd()
    yield
    os.chdir(here)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("loader", LOADERS, ids=str)
def test_a_damaged_file_gives_our_error_or_what_it_says(loader: Loader, tmp_path: Path) -> None:
    bench = Bench(loader, tmp_path)
    before = memory_peak(reset=True) if LINUX else 0
    refused = []

    @settings(
        max_examples=loader.examples,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(st.data())
    def damage(data: st.DataObject) -> None:
        refused.append(bench.try_it(damaged(bench.sound, lambda n: data.draw(st.integers(0, n - 1)))))

    damage()
    assert any(refused) or loader.shows, "no damage was noticed: is the right file damaged?"
    assert not LINUX or memory_peak() - before < ROOM


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("loader", LOADERS, ids=str)
def test_what_could_execute_or_never_end_is_refused(loader: Loader, tmp_path: Path) -> None:
    bench = Bench(loader, tmp_path)
    for data in (PICKLE, torch_pickle(), b"", b"[" * 200_000):
        assert bench.try_it(data) or loader.shows


STRANGE = (
    *("[" * n + "]" * n for n in (50, 62, 900, 994)),
    *("9" * 4300, "9" * 4301, "1e999", "NaN", "-Infinity", "0." + "1" * 100_000),
    *('"\\ud800"', '{"\\udc00": 1}', '{"a": 1, "a": 2}', "[{}]", '"\\u0000"'),
)
"""JSON of limits: of depth, of digits, of numbers, of Unicode; keys twice, and lists that cannot be keys."""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("loader", [x for x in LOADERS if x.file.endswith(".json")], ids=str)
def test_json_at_its_limits_gives_our_error_or_what_it_says(loader: Loader, tmp_path: Path) -> None:
    bench = Bench(loader, tmp_path)
    for value in STRANGE:
        for start in (b"{", b'"config": {', b'"seeds": ['):
            name = b"" if start.endswith(b"[") else b'"strange": '
            bench.try_it(bench.sound.replace(start, start + name + value.encode() + b", ", 1))


FOUND = {
    "adder backbone": (rb"8, \"recipe\": \"first-exact", rb"1e999,\"recipe\":\"first-exa"),
    "questions as JSON": (b'"A", "B"', b'"A", "C", "B"'),
    "questions as JSON lines": (b'"red", "yellow"', b'"yellow"'),
    "configuration to plan with": (b'"vocab_size": 20', b'"vocab_size": "20"'),
    "model's configuration": (b'"LlamaForCausalLM"', b"{}"),
    "model as GGUF": tuple(b"rms_epsilon" + struct.pack("<If", 6, eps) for eps in (1e-6, math.nan)),
}
"""What campaigns found: a part of a sound file, and what was there instead."""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("loader", [x for x in LOADERS if x.name in FOUND], ids=str)
def test_what_campaigns_found_is_refused(loader: Loader, tmp_path: Path) -> None:
    bench, (part, instead) = Bench(loader, tmp_path), FOUND[loader.name]
    assert part in bench.sound
    assert bench.try_it(bench.sound.replace(part, instead, 1))


def complaint(loader: Loader, bench: Bench) -> str:
    """What a loader says of a file that it does not read: its refusal, or what a reader of runs calls wrong."""
    try:
        return " ".join(loader.load(bench.folder).problems)
    except Exception as e:
        return str(e)


@pytest.mark.skipif(not LINUX, reason="needs sparse files and pipes")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "loader", [x for x in LOADERS if x.name in ("handle", "results", "couplings", "manifest")], ids=str
)
def test_files_of_terabytes_pipes_and_directories_are_refused_unread(loader: Loader, tmp_path: Path) -> None:
    bench = Bench(loader, tmp_path)
    before = memory_peak(reset=True)
    os.truncate(bench.target, 1 << 40)
    assert "bytes" in complaint(loader, bench)
    bench.target.unlink()
    for make in (os.mkfifo, os.mkdir, lambda p: os.symlink("/dev/zero", p)):
        make(bench.target)
        assert re.search(r"not an ordinary file|directory|link", complaint(loader, bench))
        bench.target.rmdir() if bench.target.is_dir() else bench.target.unlink()
    assert memory_peak() - before < 64 << 20


def test_no_code_of_a_model_is_trusted_and_nothing_is_unpickled() -> None:
    """In the whole package: trust_remote_code is False, no pickle, and torch.load only for tensors."""
    package = Path(__file__).parent.parent / "src" / "plot_ot"
    for path in package.rglob("*.py"):
        lines = [x for x in path.read_text(encoding="utf-8").splitlines() if not x.strip().startswith(("#", '"'))]
        for line in lines:
            trusted = "trust_remote_code=" in line and "trust_remote_code=False" not in line
            assert not trusted, f"{path}: {line}"
            assert "import pickle" not in line, f"{path}: {line}"
            assert "allow_pickle=True" not in line, f"{path}: {line}"
            assert "torch.load(" not in line or "weights_only=True" in line, f"{path}: {line}"


def test_offline_means_no_request_at_all(tmp_path: Path) -> None:
    """With HF_HUB_OFFLINE=1 a model that is not there is refused by our own words, and no socket is opened."""
    program = """
import sys
def hook(event, args):
    if event in ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname"):
        raise SystemExit(f"asked the network: {event} {args}")
sys.addaudithook(hook)
from plot_ot.errors import PlotError
from plot_ot.models.loading import load_model
try:
    load_model("google/gemma-2-2b")
except PlotError as e:
    print("refused:", e)
"""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert done.stdout.startswith("refused:"), done.stderr[-500:]
    assert "google/gemma-2-2b" in done.stdout
    assert "HF_HUB_OFFLINE" in done.stdout
