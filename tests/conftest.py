"""One thread: tests run small tensors on a shared machine, where a second thread mostly waits.

Every annotated shape of the package is checked as it runs.
"""

import pytest
import torch

import shapes

shapes.install("plot_ot")
torch.set_num_threads(1)


def pytest_configure(config):
    """Filters that name our classes import the package: only now is it loaded with the check of shapes."""
    config.addinivalue_line("filterwarnings", "default::plot_ot.errors.PlotWarning")  # what we warn users of
    # toy networks have degenerate couplings; tests that mean them expect the warning
    config.addinivalue_line("filterwarnings", "ignore::plot_ot.errors.CouplingWarning")


@pytest.fixture(autouse=True)
def no_tracebacks_left_on(monkeypatch):
    """`--debug` asks for tracebacks for the rest of a process; here that is the next test's, too."""
    monkeypatch.setenv("PLOT_OT_DEBUG", "")
