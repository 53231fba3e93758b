"""Reading what is used: illusions are told from variables that act, in networks where both are wired by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from plot_ot.edits import Frame
from plot_ot.handles import Edit, Handle
from plot_ot.judging.status import Status
from plot_ot.judging.usage import Used, read_from_used, used_directions
from plot_ot.judging.verdict import Opponents, judge
from plot_ot.signatures import as_readout
from plot_ot.stages.calibrate import correct
from plot_ot.subjects import BankRecording, MLPSubject, ModuleSubject, record
from truth import illusions, kinds
from truth.known import Known, draw_splits

READOUT = as_readout("softmax")


def recorded(known: Known, size: int = 300) -> tuple[BankRecording, BankRecording, BankRecording, BankRecording]:
    """Fit, calibration, sensitivity and invariance of the first variable."""
    splits = known.splits or draw_splits(known.causal, known.rows, size, known.seed)
    tests = [splits.test["p", kind] for kind in ("sensitivity", "invariance")]
    fit, calibration, sensitivity, invariance = record(known.subject, splits.fit, splits.calibration, *tests)
    return fit, calibration, sensitivity, invariance


def judged(known: Known, size: int = 300) -> Status:
    fit, calibration, sensitivity, invariance = recorded(known, size)
    place = known.subject.places[-1]
    idle = Handle("p", (Edit(place, Frame.identity(place.width), torch.zeros(place.width)),), known.subject.identity())
    opponents = Opponents(lambda _: idle)
    generator = torch.Generator().manual_seed(0)
    found = judge(known.handles["p"], sensitivity, invariance, fit, calibration, opponents, READOUT, generator)
    return found.status


@pytest.mark.parametrize("seed", [1100, 1101])
@pytest.mark.parametrize("kind", [illusions.silent_way, illusions.borrowed_way])
def test_a_handle_that_reads_a_dormant_copy_is_right_and_called_decodable_only(kind, seed):
    known = kind(seed)
    fit, calibration, sensitivity, _ = recorded(known)
    handle = known.handles["p"]
    assert float(correct(sensitivity, handle, READOUT).double().mean()) > 0.85  # it looks like a good one
    rebuilt = read_from_used(handle, fit, calibration, READOUT, torch.Generator().manual_seed(0))
    assert rebuilt is not None
    assert rebuilt.used < rebuilt.width
    assert float(correct(sensitivity, rebuilt.handle, READOUT).double().mean()) < 0.7
    assert judged(known) is Status.DECODABLE


@pytest.mark.parametrize("seed", [1100, 1101])
@pytest.mark.parametrize("kind", ["oblique", "echo"])
def test_a_variable_that_acts_is_rebuilt_from_what_is_used(kind, seed):
    known = kinds.planted(seed, kind)
    fit, calibration, sensitivity, _ = recorded(known)
    rebuilt = read_from_used(known.handles["p"], fit, calibration, READOUT, torch.Generator().manual_seed(0))
    assert rebuilt is not None
    assert float(correct(sensitivity, rebuilt.handle, READOUT).double().mean()) > 0.9
    assert judged(known) in (Status.PLACED, Status.COMPACT)


def test_two_variables_that_are_added_up_before_they_are_looked_at_both_act():
    """One functional is used and tells neither of them apart: what naturally goes with the reading decides."""
    assert judged(illusions.line(1100), 1000) in (Status.PLACED, Status.COMPACT)


def linear_subject(seed: int) -> tuple[MLPSubject, torch.Tensor]:
    """Six states mixed from six inputs, of which the outputs see two functionals."""
    torch.manual_seed(seed)
    net = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Identity(), torch.nn.Linear(6, 3))
    seen = torch.randn(2, 6)
    net[2].weight.data = torch.randn(3, 2) @ seen
    return MLPSubject(net), seen


def test_the_used_functionals_of_a_linear_network_are_those_its_outputs_see():
    subject, seen = linear_subject(0)
    known = kinds.planted(1100)
    rows = torch.cartesian_prod(*[torch.arange(3)] * 6)
    splits = draw_splits(known.causal, rows, 200, 0)
    [fit] = record(subject, splits.fit)
    place = subject.places[0]
    edit = Edit(place, Frame.identity(6), torch.ones(6))
    used = used_directions(fit, edit, torch.Generator().manual_seed(0))
    assert used.rank == 2
    # a used functional reads the same after it is rebuilt, one that is not loses what the others do not predict
    kept = used.reading(seen.double().T)
    assert torch.allclose(kept, seen.double().T, atol=1e-4)
    other = torch.linalg.svd(seen.double())[2][2:].T
    assert float((used.reading(other) - other).norm()) > 0.5
    # and the swap that they do not see changes no output
    swap = used.unseen()
    assert float((seen.double() @ swap).abs().max()) < 1e-4 * float(seen.abs().max())
    assert isinstance(used, Used)


def test_jumps_without_a_gradient_are_found_by_swapping():
    known = kinds.planted(1100)
    rows = torch.cartesian_prod(*[torch.arange(3)] * 6)
    subject, seen = linear_subject(1)

    class Jump(torch.nn.Module):
        def forward(self, a: torch.Tensor) -> torch.Tensor:
            return torch.stack([(a @ seen[0] > 0).float(), (a @ seen[0] <= 0).float()], dim=-1)

    net = torch.nn.Sequential(subject.net[0], Jump())
    jumping = ModuleSubject(net, {"state": "0"}, torch.zeros(1, 6), encode=lambda x: x.float())
    [fit] = record(jumping, draw_splits(known.causal, rows, 400, 0).fit)
    place = jumping.places[0]
    used = used_directions(fit, Edit(place, Frame.identity(6), torch.ones(6)), torch.Generator().manual_seed(0))
    kept = used.reading(seen[:1].double().T).squeeze(1)
    assert float(torch.nn.functional.cosine_similarity(kept, seen[0].double(), dim=0)) > 0.9


def test_a_reading_through_an_encoder_is_not_rebuilt():
    known = kinds.planted(1100)
    fit, calibration, _, _ = recorded(known)
    handle = known.handles["p"]
    edit = handle.edits[0]
    frame = replace(edit.frame, encoder=object())
    odd = replace(handle, edits=(replace(edit, frame=frame),))
    assert read_from_used(odd, fit, calibration, READOUT, torch.Generator()) is None
