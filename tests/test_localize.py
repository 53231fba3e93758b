"""One call from a causal model and a network to handles and verdicts."""

import pytest
import torch
from torch import nn

import plot_ot
from plot_ot.errors import PlotError

ROWS = torch.cartesian_prod(*[torch.arange(2)] * 8)


@pytest.fixture(autouse=True)
def few_random_handles(monkeypatch):
    monkeypatch.setattr("plot_ot.studies.study.RANDOM_HANDLES", 5)


def parity_net(first: str, second: str, bystanders: int = 12) -> nn.Sequential:
    """Computes (x ^ x') ^ (z ^ z') through the parities of two named pairs of the bits a..d.

    Four neurons of layer 1 do the work, next to bystanders that look at all bits but lead nowhere.
    """
    rows = []
    for pair in (first, second):
        row = torch.zeros(8)
        row["abcd".index(pair[0])], row["abcd".index(pair[1])] = 1.0, -1.0
        rows += [row, -row]
    looking_on = torch.randn(bystanders, 8, generator=torch.Generator().manual_seed(0))
    onwards = torch.tensor([[1.0, 1, -1, -1], [-1, -1, 1, 1]])
    weights = [
        (torch.cat([torch.stack(rows), looking_on]), torch.zeros(4 + bystanders)),
        (torch.cat([onwards, torch.zeros(2, bystanders)], dim=1), torch.zeros(2)),
        (torch.tensor([[-8.0, -8], [8, 8]]), torch.tensor([4.0, -4])),
    ]
    net = nn.Sequential(
        nn.Linear(8, 4 + bystanders), nn.ReLU(), nn.Linear(4 + bystanders, 2), nn.ReLU(), nn.Linear(2, 2)
    )
    for layer, (weight, bias) in zip([m for m in net if isinstance(m, nn.Linear)], weights, strict=True):
        layer.weight.data, layer.bias.data = weight, bias
    return net


HYPOTHESIS = plot_ot.CausalModel(
    inputs=list("abcdefgh"),
    mechanisms={
        "left": lambda a, b: a ^ b,
        "right": lambda c, d: c ^ d,
        "y": lambda left, right: left ^ right,
    },
    output="y",
)


@pytest.mark.parametrize("method", ["plot-layered", "das"])
def test_the_variable_is_placed_where_the_network_computes_it(method):
    result = plot_ot.localize(plot_ot.MLPSubject(parity_net("ab", "cd")), HYPOTHESIS, ROWS, size=300, method=method)
    assert {v["status"] for v in result.verdicts.values()} <= {"placed", "placed and compact"}
    assert result.handles["left"].places == ["layer1"]
    if method == "plot-layered":
        touched = result.handles["left"].edits[0].gains.nonzero().squeeze(1).tolist()
        assert touched == [0, 1]
    assert "placed in layer1" in str(result)


@pytest.mark.parametrize("method", ["plot-layered", "das"])
def test_the_same_output_computed_through_other_variables_is_not_localized(method):
    """a ^ c and b ^ d give the same answers on every input, but left and right are nowhere in this network."""
    net = parity_net("ac", "bd")
    assert torch.equal(net(ROWS.float()).argmax(dim=1), HYPOTHESIS.answer(ROWS))
    result = plot_ot.localize(plot_ot.MLPSubject(net), HYPOTHESIS, ROWS, size=300, method=method)
    assert {v["status"] for v in result.verdicts.values()} == {"not localized"}


def test_a_network_that_does_not_solve_the_task_is_refused():
    net = parity_net("ab", "cd")
    net[4].weight.data.neg_()
    net[4].bias.data.neg_()
    with pytest.raises(PlotError, match="answers 0 of 256 distinct inputs"):
        plot_ot.localize(plot_ot.MLPSubject(net), HYPOTHESIS, ROWS)


def test_an_unknown_method_is_refused_with_the_legal_ones():
    with pytest.raises(PlotError, match="Legal: plot, plot-das, plot-layered, das"):
        plot_ot.localize(plot_ot.MLPSubject(parity_net("ab", "cd")), HYPOTHESIS, ROWS, method="dsa")
