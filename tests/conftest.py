"""One thread: tests run small tensors on a shared machine, where a second thread mostly waits.

Every annotated shape of the package is checked as it runs.
"""

import pytest
import torch

import shapes

shapes.install("plot_ot")
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def no_tracebacks_left_on(monkeypatch):
    """`--debug` asks for tracebacks for the rest of a process; here that is the next test's, too."""
    monkeypatch.setenv("PLOT_OT_DEBUG", "")
