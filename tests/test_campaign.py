"""Long campaigns (`make test-long`): many random transport problems."""

import numpy as np
import ot
import pytest

from plot_ot.transport import solve

pytestmark = pytest.mark.long


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
