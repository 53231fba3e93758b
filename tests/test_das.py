"""DAS: planted planes are found, frames stay orthonormal, batches of rotations train as if alone."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from scipy.linalg import expm
from torch import Tensor

from nets import planted_plane
from plot_ot.edits import Frame
from plot_ot.errors import PlotError
from plot_ot.handles import Edit, Handle
from plot_ot.signatures import as_readout
from plot_ot.stages.calibrate import correct
from plot_ot.stages.das import Rotation, train_rotations
from plot_ot.stages.descent import OPTIMISERS, DasSpec, skew_exponential
from plot_ot.subjects import BankRecording, record

READOUT = as_readout("softmax")
QUICK = DasSpec(batch=60, most=4, least=1)
optimisers = pytest.mark.parametrize("optimiser", OPTIMISERS)
rotating = pytest.mark.parametrize("optimiser", [o for o in OPTIMISERS if o != "oblique"])


def train(
    recording: BankRecording,
    spec: DasSpec,
    dimensions: tuple[int, ...] = (2,),
    variables: tuple[str, ...] = ("p",),
    seed: int = 7,
    skip: int = 0,
) -> list[Rotation]:
    """Rotations at `layer1`; `skip` starts with the numbers that follow those of so many jobs."""
    place = recording.subject.places[0]
    generator = torch.Generator().manual_seed(seed)
    for _ in range(skip):
        torch.randn(1, place.width, place.width, generator=generator)
    return train_rotations(recording, place, variables, dimensions, READOUT, spec, generator)


def swap(rotation: Rotation, recording: BankRecording) -> Handle:
    gains = torch.ones(rotation.dimension)
    return Handle(rotation.variable, (Edit(rotation.place, rotation.frame, gains),), recording.subject.identity())


def off_orthonormal(rotation: Rotation) -> float:
    q = rotation.frame.read.double()
    return float((q.T @ q - torch.eye(rotation.dimension)).abs().max())


def overlap(a: Tensor, b: Tensor) -> float:
    """1 when the planes are equal, 0 when orthogonal."""
    return float((a.T @ b).square().sum() / a.shape[1])


@pytest.fixture(scope="module")
def fit() -> BankRecording:
    planted = planted_plane()
    return record(planted.subject, *planted.banks(120))[0]


# -- what is found --------------------------------------------------------------------------------------------


@optimisers
@pytest.mark.parametrize("seed", [0, 1])
def test_a_variable_planted_in_a_rotated_plane_is_found(optimiser, seed):
    planted = planted_plane(seed)
    fit, fresh = record(planted.subject, *planted.banks(240, 240))
    rotations = train(fit, DasSpec(optimiser, batch=80, most=30, least=30), variables=("p", "q"))
    assert [(r.variable, r.dimension) for r in rotations] == [("p", 2), ("q", 2)]
    for r in rotations:
        assert correct(fresh, swap(r, fresh), READOUT).all()
        assert overlap(planted.truth[r.variable], r.frame.read) > 0.95
        assert r.loss < 0.02
        assert not correct(fresh, swap(r, fresh), READOUT, "q" if r.variable == "p" else "p").all()


def test_too_few_dimensions_do_not_carry_the_variable(fit):
    [line] = train(fit, DasSpec(batch=60, most=20), dimensions=(1,))
    assert not correct(fit, swap(line, fit), READOUT).all()


@rotating
def test_frames_are_orthonormal_and_jobs_are_all_there(fit, optimiser):
    spec = replace(QUICK, optimiser=optimiser, restarts=2, rate=0.3)
    rotations = train(fit, spec, dimensions=(1, 3, 7), variables=("q", "p"))
    jobs = [(v, k, r) for v in ("q", "p") for k in (1, 3, 7) for r in range(2)]
    assert [(r.variable, r.dimension, r.restart) for r in rotations] == jobs
    for r in rotations:
        assert r.frame.read.shape == (8, r.dimension)
        assert off_orthonormal(r) < 1e-5
    starts = [r.frame.read for r in rotations if r.dimension == 3]
    assert all(overlap(a, b) < 0.999 for i, a in enumerate(starts) for b in starts[:i])


def test_all_dimensions_are_the_full_patch_and_are_not_trained(fit):
    [trained, whole] = sorted(train(fit, QUICK, dimensions=(8, 2)), key=lambda r: r.dimension)
    assert (whole.dimension, whole.epochs, whole.frame.read) == (8, 0, None)
    assert trained.epochs > 0
    found = swap(whole, fit).apply(fit.subject, fit.bank.base, fit.bank.source)
    torch.testing.assert_close(found, fit.source_outputs, rtol=1e-5, atol=1e-5)


# -- how it is trained ----------------------------------------------------------------------------------------


@optimisers
def test_training_lowers_the_loss(fit, optimiser):
    spec = replace(QUICK, optimiser=optimiser)
    [short], [long] = (train(fit, replace(spec, most=most)) for most in (1, 12))
    assert long.loss < 0.8 * short.loss


def test_the_reported_loss_is_that_of_the_returned_frame(fit):
    """The last step of `riemannian` has length zero, so the last epoch's loss belongs to the final frame."""
    [found] = train(fit, DasSpec(batch=len(fit), rate=0.3, most=6, least=6))
    outputs = swap(found, fit).apply(fit.subject, fit.bank.base, fit.bank.source)
    assert found.loss == pytest.approx(float(READOUT.loss(outputs, fit.bank.labels["p"]).mean()), rel=1e-3)


@optimisers
def test_the_same_seed_gives_the_same_rotations(fit, optimiser):
    spec = replace(QUICK, optimiser=optimiser, restarts=2)
    first, again, other = (train(fit, spec, seed=seed) for seed in (3, 3, 4))
    for a, b, c in zip(first, again, other, strict=True):
        assert torch.equal(a.frame.read, b.frame.read)
        assert (a.loss, a.epochs) == (b.loss, b.epochs)
        assert not torch.allclose(a.frame.read, c.frame.read)


@pytest.mark.parametrize(
    ("optimiser", "dimensions"), [("adam", (1, 2, 3)), ("riemannian", (2,)), ("riemannian", (1, 2, 3))]
)
def test_a_batch_of_rotations_trains_as_each_would_alone(fit, optimiser, dimensions):
    """One batch of pairs per epoch, so that their order does not matter; starts are drawn job after job.

    Planes are compared, not frames: Adam turns rounding errors into rotations inside a plane.
    """
    spec = DasSpec(optimiser, batch=len(fit), most=5, least=5, clip=0.01)
    together = train(fit, spec, dimensions, variables=("p", "q"))
    for j, found in enumerate(together):
        [alone] = train(fit, spec, (found.dimension,), skip=j, variables=(found.variable,))
        assert found.loss == pytest.approx(alone.loss, rel=0.02)
        assert overlap(found.frame.read, alone.frame.read) > 0.998


def test_a_rotation_stops_when_its_loss_no_longer_improves(fit):
    patient, hasty = (
        train(fit, DasSpec(batch=60, most=12, least=3, patience=6, improvement=i))[0] for i in (-9.0, 0.9999)
    )
    assert patient.epochs == 12
    assert hasty.epochs == 7  # the first epoch improves on nothing yet, six more do not


# -- refusals -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [0, 9, -1])
def test_a_dimension_that_does_not_fit_is_refused(fit, k):
    with pytest.raises(PlotError, match=rf"{k} dimensions does not fit layer1 of width 8"):
        train(fit, QUICK, dimensions=(2, k))


def test_unknown_names_are_refused_with_the_legal_ones(fit):
    with pytest.raises(PlotError, match=r"DAS optimiser 'adan'.*'adam'.*riemannian, adam"):
        DasSpec("adan")
    with pytest.raises(PlotError, match=r"'r'.*p, q"):
        train(fit, QUICK, variables=("r",))


@optimisers
def test_a_loss_that_is_not_finite_is_refused_with_the_job(fit, optimiser):
    broken = replace(READOUT, loss=lambda outputs, labels: READOUT.loss(outputs, labels) / 0)
    generator = torch.Generator().manual_seed(0)
    spec = replace(QUICK, optimiser=optimiser)
    with pytest.raises(PlotError, match=r"DAS at layer1 for 'p' with k = 2 .*NaN or infinity.*Lower the rate"):
        train_rotations(fit, fit.subject.places[0], ["p"], [2], broken, spec, generator)


def test_a_rate_that_destroys_the_rotation_is_refused(fit):
    with pytest.raises(PlotError, match="Lower the rate"):
        train(fit, replace(QUICK, optimiser="adam", rate=1e30))


@pytest.mark.parametrize("rate", [3.0, 1e30])
def test_riemannian_steps_of_any_rate_stay_on_the_manifold(fit, rate):
    [found] = train(fit, replace(QUICK, rate=rate))
    assert off_orthonormal(found) < 1e-5
    assert math.isfinite(found.loss)


def test_oblique_frames_read_and_write_along_different_directions_and_train_all_dimensions(fit):
    spec = DasSpec("oblique", rate=0.02, batch=60, most=30)
    few, whole = sorted(train(fit, spec, dimensions=(2, 8)), key=lambda r: r.dimension)
    assert not torch.allclose(few.frame.read, few.frame.write)
    assert whole.epochs > 0
    assert whole.frame.read.shape == (8, 8)


def test_a_start_is_where_training_begins(fit):
    given = torch.linalg.qr(torch.randn(8, 2, generator=torch.Generator().manual_seed(5)))[0]
    still = DasSpec(rate=1e-9, batch=60, most=1)
    for frame in (Frame.orthonormal(given), Frame.oblique(torch.randn(8, 2), 3 * given)):
        [r] = train_rotations(fit, fit.subject.places[0], ["p"], [2], READOUT, still, torch.Generator(), {"p": frame})
        assert overlap(r.frame.read, given) > 0.9999


# -- the exponential of skew-symmetric matrices -------------------------------------------------------------------


def skew(size: float, width: int, seed: int = 1000, jobs: int = 1) -> Tensor:
    lower = (size * torch.randn(jobs, width, width, generator=torch.Generator().manual_seed(seed))).tril(-1)
    return lower - lower.mT


@pytest.mark.parametrize("width", [16, 64, 96])
@pytest.mark.parametrize("size", [0.0, 1e-3, 1e-2, 0.1, 1.0, 5.0])
def test_the_exponential_and_its_slope_are_those_of_double_precision(size, width):
    a, weights = skew(size, width), skew(1.0, width, seed=1001)
    found, expected = a.clone().requires_grad_(), a.double().requires_grad_()
    e = skew_exponential(found)
    (e * weights).sum().backward()
    exact = torch.linalg.matrix_exp(expected)
    (exact * weights.double()).sum().backward()
    assert torch.allclose(e.detach().double(), exact.detach(), atol=5e-6 * (1 + size))
    assert torch.allclose(torch.from_numpy(expm(a[0].double().numpy())), exact.detach()[0], atol=1e-9)
    assert float((found.grad.double() - expected.grad).norm()) <= 1e-5 * (1 + size) * float(expected.grad.norm())
    assert torch.allclose(e.detach() @ e.detach().mT, torch.eye(width), atol=1e-4 * (1 + size))


@pytest.mark.parametrize("angle", [0.1, 0.57, 0.59, 3.0])
def test_turns_of_planes_have_their_sines_and_cosines(angle):
    """Here the norm is as large as its bound, so that the last terms of the series count."""
    turn = torch.kron(torch.eye(32), torch.tensor([[0.0, -angle], [angle, 0.0]]))[None]
    c, s = math.cos(angle), math.sin(angle)
    expected = torch.kron(torch.eye(32), torch.tensor([[c, -s], [s, c]]))
    assert torch.allclose(skew_exponential(turn)[0], expected, atol=1e-6)


def test_a_matrix_is_exponentiated_alike_whoever_is_in_its_batch():
    calm, wild = skew(1e-3, 64), skew(3.0, 64, seed=1002)
    together = skew_exponential(torch.cat([calm, wild]))
    assert torch.equal(together[:1], skew_exponential(calm))
    assert torch.equal(together[1:], skew_exponential(wild))


def test_the_exponential_of_what_is_no_number_is_none():
    assert skew_exponential(torch.full((1, 64, 64), torch.nan)).isnan().all()
    assert not skew_exponential(torch.full((1, 64, 64), torch.inf)).isfinite().all()
