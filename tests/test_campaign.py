"""Long campaigns (`make test-long`): many random plants, many random transport problems."""

import numpy as np
import ot
import pytest
import torch
from torch import nn

import plot_ot
from plot_ot.transport import solve

pytestmark = pytest.mark.long
ROWS = torch.cartesian_prod(*[torch.arange(2)] * 8)


def random_plant(seed: int, aligned: bool) -> tuple[nn.Sequential, set[int]]:
    """(a ^ b) ^ (c ^ d) through a ^ b and c ^ d (aligned) or through a ^ c and b ^ d, in shuffled neurons of random
    scale among bystanders; also the neurons of the first parity."""
    g = torch.Generator().manual_seed(seed)
    bystanders = int(torch.randint(4, 13, (1,), generator=g))
    width = 4 + bystanders
    rows = torch.randn(width, 8, generator=g)
    rows[:4] = 0
    for k, (x, z) in enumerate([(0, 1), (2, 3)] if aligned else [(0, 2), (1, 3)]):
        for j, sign in ((2 * k, 1.0), (2 * k + 1, -1.0)):
            rows[j, x], rows[j, z] = sign, -sign
    scale = 0.5 + 2 * torch.rand(width, generator=g)
    onwards = torch.zeros(2, width)
    onwards[:, :4] = torch.tensor([[1.0, 1, -1, -1], [-1, -1, 1, 1]])
    order = torch.randperm(width, generator=g)
    net = nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 2), nn.ReLU(), nn.Linear(2, 2))
    net[0].weight.data, net[0].bias.data = (rows * scale[:, None])[order], torch.zeros(width)
    net[2].weight.data, net[2].bias.data = (onwards / scale)[:, order], torch.zeros(2)
    net[4].weight.data, net[4].bias.data = torch.tensor([[-8.0, -8], [8, 8]]), torch.tensor([4.0, -4])
    return net, {int((order == j).nonzero()) for j in (0, 1)}


HYPOTHESIS = plot_ot.CausalModel(
    list("abcdefgh"),
    {"left": lambda a, b: a ^ b, "right": lambda c, d: c ^ d, "y": lambda left, right: left ^ right},
    output="y",
)


@pytest.mark.parametrize("seed", range(20))
def test_localize_finds_planted_neurons_by_default(seed):
    net, planted = random_plant(seed, aligned=True)
    result = plot_ot.localize(plot_ot.MLPSubject(net), HYPOTHESIS, ROWS, size=300, seed=seed)
    assert result.verdicts["left"]["status"].startswith("placed")
    gains = result.handles["left"].edits[0].gains
    assert set(gains.nonzero().squeeze(1).tolist()) >= planted
    assert result.handles["left"].places == ["layer1"]


@pytest.mark.parametrize("seed", range(20))
def test_localize_declines_when_the_output_is_computed_through_other_variables(seed):
    net, _ = random_plant(seed, aligned=False)
    result = plot_ot.localize(plot_ot.MLPSubject(net), HYPOTHESIS, ROWS, size=300, seed=seed)
    assert {v["status"] for v in result.verdicts.values()} == {"not localized"}


def test_a_thousand_random_problems_agree_with_pot():
    rng = np.random.default_rng(0)
    for _ in range(1000):
        m, n = int(rng.integers(1, 5)), int(rng.integers(2, 60))
        cost = rng.random((m, n)) * 10 ** rng.uniform(-2, 3)
        epsilon = float(np.ptp(cost) * 10 ** rng.uniform(-0.7, 1))
        a, b = np.full(m, 1 / m), np.full(n, 1 / n)
        [ours] = solve(cost, [(epsilon, np.inf)])
        theirs = ot.sinkhorn(a, b, cost, epsilon, method="sinkhorn_log", numItermax=50_000, stopThr=1e-13)
        assert ours.converged
        np.testing.assert_allclose(ours.plan, theirs, atol=1e-9)


def test_small_epsilon_always_converges():
    rng = np.random.default_rng(1)
    for _ in range(500):
        cost = rng.random((int(rng.integers(2, 5)), int(rng.integers(2, 80)))) * 500
        for solution in solve(cost, [(e, np.inf) for e in (0.001, 0.01, 0.1, 1.0)]):
            assert solution.converged
            assert solution.column_error < 1e-9
