"""Ridge regressions that share a factorization, against the plain normal equations and eigenvectors."""

import pytest
import torch

from plot_ot.stages.ridge import Differences, Factorized


def rows(pairs: int, d: int, seed: int) -> torch.Tensor:
    """Differences with a few directions much stronger than all others, as wide states have them."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(pairs, d, generator=g, dtype=torch.float64)
    x[:, 0] *= 300
    x[:, -1] *= 1e-3
    return x


def plain(x: torch.Tensor, y: torch.Tensor, ridge: float) -> torch.Tensor:
    gram = x.T @ x
    gram = gram + ridge * gram.diagonal().mean() * torch.eye(len(gram), dtype=gram.dtype)
    return torch.linalg.solve(gram, x.T @ y).T


@pytest.mark.parametrize(("pairs", "d"), [(7, 30), (30, 30), (60, 8), (1, 5)])
@pytest.mark.parametrize("cells", [1, 3, 60])
@pytest.mark.parametrize("ridge", [1e-6, 1e-3, 1.0])
def test_one_factorization_serves_every_target_and_ridge(pairs, d, cells, ridge):
    x, distinct = rows(pairs, d, 1000), rows(cells, d, 1001)
    y = distinct[torch.arange(pairs) % cells]
    read, write = Differences.of(x).regression(y).factors(ridge, 0.0)
    expected = plain(x, y, ridge)
    torch.testing.assert_close(write @ read.T, expected, rtol=0, atol=1e-7 * float(expected.abs().max()))
    assert read.shape[1] <= min(pairs, d, cells)
    torch.testing.assert_close(read.T @ read, torch.eye(read.shape[1], dtype=x.dtype))
    lengths = write.norm(dim=0)
    assert bool((lengths[:-1] >= lengths[1:]).all())


def test_singular_values_below_the_least_are_left_out():
    x, weights = torch.eye(4, dtype=torch.float64), torch.tensor([4.0, 2.0, 1e-2, 0.0]).double()
    regression = Differences.of(x).regression(torch.diag(weights))
    assert [regression.factors(1e-9, least)[0].shape[1] for least in (0.4, 1e-3, 1e-1)] == [2, 3, 2]
    assert Differences.of(x).regression(torch.zeros(4, 4).double()).factors(1.0, 1e-3) is None


@pytest.mark.parametrize(("pairs", "d"), [(9, 40), (50, 6)])
def test_contrasts_are_the_leading_eigenvectors(pairs, d):
    x, among = rows(pairs, d, 1002), torch.arange(pairs) % 3 > 0
    contrast = x[among].T @ x[among] / among.sum() - x[~among].T @ x[~among] / (~among).sum()
    values, vectors = torch.linalg.eigh(contrast)
    wanted = vectors[:, values > 1e-9 * values[-1]].flip(1)[:, :3]
    found = Differences.of(x).contrast(among, wanted.shape[1])
    torch.testing.assert_close((found.T @ wanted).abs(), torch.eye(wanted.shape[1], dtype=x.dtype), rtol=0, atol=1e-6)


def test_a_place_is_taken_apart_once_for_each_set_of_pairs(monkeypatch):
    asked = []
    plain_of = Differences.of
    monkeypatch.setattr(Differences, "of", lambda x: asked.append(len(x)) or plain_of(x))
    at = Factorized(rows(8, 5, 1003))
    some = torch.tensor([0, 3, 4])
    assert at.whole is at.whole
    assert at.of(some) is at.of(some.clone())
    assert asked == [8, 3]
