"""Running out of memory halves the batch and goes on; the manifest says so."""

import contextlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from killing import command
from nets import mlp, planted_plane, rand
from plot_ot import cli
from plot_ot.edits import EditBatch, Frame, respond, resume_edited
from plot_ot.errors import PlotError
from plot_ot.guards import halvings, is_out_of_memory
from plot_ot.signatures import readout, signatures
from plot_ot.sites import blocks
from plot_ot.stages.das import train_rotations
from plot_ot.stages.descent import DasSpec
from plot_ot.subjects import MLPSubject, record, record_pairs

DATA = Path(__file__).parent / "data"
ERRORS = {
    "CPU": lambda: RuntimeError(
        "[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory: you tried"
    ),
    "CUDA": lambda: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    "Python": MemoryError,
}


class Small(MLPSubject):
    """A network on a machine where only so many responses fit at once."""

    def __init__(self, net, fits: int, error="CPU", **options):
        super().__init__(net, **options)
        self.fits, self.error, self.asked = fits, error, []

    def resume(self, store, rows, start, activation, later):
        count = activation.shape[0] * activation.shape[1]
        self.asked.append(count)
        if count > self.fits:
            raise ERRORS[self.error]()
        return super().resume(store, rows, start, activation, later)


def small(fits: int, error: str = "CPU") -> Small:
    return Small(mlp(4, 6, 5, 3, seed=1000), fits, error)


BASE, SOURCE = rand(1000, 10, 4), rand(1001, 10, 4)


def edits(subject: MLPSubject, variants: int = 7) -> list[EditBatch]:
    return [EditBatch(p, Frame.identity(p.width), rand(7, variants, p.width)) for p in subject.places]


@pytest.mark.parametrize(("fits", "error"), [(1, "CPU"), (9, "CUDA"), (35, "Python"), (69, "CPU"), (70, "CPU")])
def test_the_responses_are_the_same_in_halves(fits, error):
    whole, cut = small(10**9), small(fits, error)
    expected, found = (respond(record_pairs(s, (BASE, SOURCE))[0], edits(s)) for s in (whole, cut))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert halvings(whole) == []
    assert bool(halvings(cut)) == (fits < 70)
    assert all("chunk halved from" in words for words in halvings(cut))


def test_the_next_batches_are_cut_before_they_fail():
    subject = small(9)
    [recording] = record_pairs(subject, (BASE, SOURCE))
    respond(recording, edits(subject))
    failures = sum(n > 9 for n in subject.asked)
    assert failures == 3  # 70, 35, 17 (then 8)
    for _ in range(3):
        respond(recording, edits(subject))
    assert sum(n > 9 for n in subject.asked) == failures


@pytest.mark.parametrize("pairs", [slice(None), slice(2, 9), torch.tensor([3, 1, 8])])
def test_any_choice_of_pairs_can_be_halved(pairs):
    whole, cut = small(10**9), small(2)
    expected, found = (resume_edited(record_pairs(s, (BASE, SOURCE))[0], edits(s), pairs) for s in (whole, cut))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_a_single_response_that_does_not_fit_is_said():
    subject = small(0)
    [recording] = record_pairs(subject, (BASE, SOURCE))
    with pytest.raises(PlotError, match="Not even one response fits into memory"):
        respond(recording, edits(subject))


def test_other_errors_are_not_mistaken_for_it():
    assert not is_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not is_out_of_memory(ValueError("out of memory"))


def test_signatures_and_das_choose_the_same_in_halves():
    planted = planted_plane()
    cut = Small(planted.subject.net, 50, encode=planted.subject.encode)
    banks = planted.banks(60)
    whole, halved = (record(s, *banks)[0] for s in (planted.subject, cut))
    look, family = readout("softmax"), blocks(1)(whole, whole.subject.places)
    a, b = (signatures(r, family, look).cost for r in (whole, halved))
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    assert halvings(cut)
    trained = []
    for r in (whole, halved):
        generator = torch.Generator().manual_seed(0)
        trained.append(train_rotations(r, r.subject.places[0], ["p"], [2], look, DasSpec(most=4), generator)[0])
    torch.testing.assert_close(trained[0].frame.read, trained[1].frame.read, rtol=1e-3, atol=1e-3)


REAL = """
import resource, sys, torch
torch.set_num_threads(1)
from torch import nn
from plot_ot.edits import EditBatch, Frame, respond
from plot_ot.guards import halvings
from plot_ot.subjects import MLPSubject, record_pairs

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(4, 4000), nn.ReLU(), nn.Linear(4000, 8), nn.ReLU(), nn.Linear(8, 2))
subject = MLPSubject(net)
subject.cache, subject.memory = None, 4 << 30  # more than there is
[recording] = record_pairs(subject, (torch.randn(64, 4), torch.randn(64, 4)))
place = subject.places[0]
edit = EditBatch(place, Frame.identity(4000), torch.randn(100, 4000).round())
if sys.argv[1] == "little":
    used = int(open("/proc/self/statm").read().split()[0]) * 4096
    resource.setrlimit(resource.RLIMIT_AS, (used + (80 << 20),) * 2)
outputs = respond(recording, [edit])
print(len(halvings(subject)), float(outputs.double().mean()), float(outputs.double().std()))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs a limit on memory")
def test_a_machine_that_really_runs_out_gives_the_same_numbers():
    """100 x 64 responses of width 4000 are 102 MB several times over; 80 MB are there."""
    found = {}
    for how in ("enough", "little"):
        done = subprocess.run([sys.executable, "-c", REAL, how], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-800:]
        found[how] = [float(x) for x in done.stdout.split()]
    assert found["enough"][0] == 0
    assert found["little"][0] > 0
    assert found["little"][1:] == pytest.approx(found["enough"][1:], rel=1e-5)


def test_the_manifest_of_a_run_says_that_chunks_were_halved(tmp_path, monkeypatch):
    resume = MLPSubject.resume

    def short(self: MLPSubject, store, rows, start, activation: Tensor, later) -> Tensor:
        if activation.shape[0] * activation.shape[1] > 3000:
            raise ERRORS["CPU"]()
        return resume(self, store, rows, start, activation, later)

    monkeypatch.setenv("PLOT_OT_CACHE", str(DATA))
    monkeypatch.setattr("plot_ot.study.RANDOM_HANDLES", 2)
    for name in ("plenty", "little"):
        monkeypatch.setattr(sys, "argv", ["plot-ot", *command("heq", tmp_path / name)])
        _main()
        monkeypatch.setattr(MLPSubject, "resume", short)
    manifests = [json.loads((tmp_path / n / "manifest.json").read_text()) for n in ("plenty", "little")]
    assert "notes" not in manifests[0]
    assert any("seed 1003: chunk halved from" in words for words in manifests[1]["notes"])
    records = [json.loads((tmp_path / n / "results.json").read_text())["records"] for n in ("plenty", "little")]
    assert records[0] == records[1]


def _main() -> None:
    with contextlib.suppress(SystemExit):
        cli.main()
