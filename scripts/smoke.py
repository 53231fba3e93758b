"""Use an installed plot-ot once, from Python and from the command line: for environments without the test tools."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from torch import nn

import plot_ot


def main() -> None:
    """Find a variable that was written into a small network by hand; save, show and report the result."""
    causal = plot_ot.CausalModel(
        inputs=list("abcdefgh"),  # the last four lead nowhere
        mechanisms={
            "left": lambda a, b: a != b,
            "right": lambda c, d: c != d,
            "answer": lambda left, right: 2 * left.int() + right.int(),
        },
        output="answer",
    )
    inputs = torch.cartesian_prod(*[torch.arange(2)] * 8)
    net = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 4))
    with torch.no_grad():  # |a - b| and |c - d|, each as the sum of two neurons
        net[0].weight.zero_()
        net[0].weight[:, :4] = torch.tensor([[1, -1, 0, 0], [-1, 1, 0, 0], [0, 0, 1, -1], [0, 0, -1, 1]]).float()
        net[0].bias.zero_()
        signs = torch.tensor([[-1, -1], [-1, 1], [1, -1], [1, 1]]).float()
        net[2].weight.copy_(8 * signs.repeat_interleave(2, dim=1))
        net[2].bias.copy_(-4 * signs.sum(dim=1))
    assert (net(inputs.float()).argmax(dim=1) == causal.answer(inputs)).all()
    result = plot_ot.localize(plot_ot.load_subject(net), causal, inputs, size=60, seed=1000)
    print(result)
    with tempfile.TemporaryDirectory() as folder:
        result.save(folder)
        for command in (["--version"], ["list"], ["show", folder], ["report", folder], ["table", folder]):
            subprocess.run([Path(sys.executable).parent / "plot-ot", *command], check=True)  # noqa: S603
        assert (Path(folder) / "report.html").stat().st_size > 10_000
    print("plot-ot works here.")


if __name__ == "__main__":
    main()
