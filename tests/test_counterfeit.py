"""The counterfeit GPU obeys CUDA's rules, computes what the CPU computes, and counts what CUDA would wait for."""

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from counterfeit import Counterfeit, MixedDevices, counterfeit

SOME = torch.arange(12.0).reshape(4, 3) - 5


@pytest.fixture
def gpu():
    with counterfeit() as made:
        yield made


@pytest.fixture
def x(gpu):
    made = SOME.to("cuda")
    gpu.count.taken()
    return made


def test_tensors_say_where_they_are(gpu):
    for where, said in (("cuda", "cuda:0"), ("cuda:1", "cuda:1"), (torch.device("cuda", 1), "cuda:1"), (1, "cuda:1")):
        made = torch.zeros(2).to(where)
        assert made.device == torch.device(said)
        assert made.is_cuda
        assert not made.is_meta
    assert torch.arange(3, device="cuda:1").device == torch.device("cuda:1")
    assert torch.tensor([1.0], device="cuda").device.type == "cuda"
    assert SOME.cuda(1).device.index == 1
    assert torch.zeros(3).device.type == "cpu"  # nothing lands on a GPU that was not sent there
    assert SOME.to("cuda").new_zeros(2).device.type == "cuda"
    with pytest.raises(RuntimeError, match="ordinal"):
        torch.zeros(2, device="cuda:2")


@pytest.mark.parametrize(
    "mixed",
    [
        lambda x: x + torch.zeros(3),
        lambda x: torch.zeros(3) + x,
        lambda x: x + x.to("cuda:1"),
        lambda x: x @ torch.zeros(3, 2),
        lambda x: torch.cat([x, torch.zeros(1, 3)]),
        lambda x: torch.zeros(4, 3).add_(x.sum()),
        lambda x: torch.zeros(4)[torch.tensor([1], device="cuda")],
        lambda x: x[torch.tensor([1], device="cuda:1")],
        lambda x: x.masked_fill(torch.zeros(4, 3, dtype=torch.bool), 0),
        lambda x: torch.where(SOME > 0, x, x),
        lambda x: F.linear(x, torch.zeros(2, 3)),
        lambda x: F.embedding(torch.tensor([1]), x),
        lambda x: x.index_select(0, torch.tensor([1])),
        lambda x: x.gather(1, torch.zeros(4, 1, dtype=torch.long)),
        lambda x: torch.searchsorted(x[0], torch.tensor([0.5])),
        lambda x: torch.randn(3, device="cuda", generator=torch.Generator()),
        lambda x: torch.randn(3, generator=torch.Generator("cuda")),
    ],
)
def test_devices_do_not_mix(x, mixed):
    with pytest.raises(MixedDevices):
        mixed(x)


@pytest.mark.parametrize(
    "allowed",
    [
        lambda x: x + torch.tensor(1.0),
        lambda x: torch.tensor(2.0) * x,
        lambda x: torch.where(x > 0, x, torch.tensor(0.0)),
        lambda x: torch.where(x > 0, x, 0.0),
        lambda x: x[torch.tensor([2, 0])],
        lambda x: x[[2, 0]],
        lambda x: x.masked_fill(x > 0, torch.tensor(7.0)),
        lambda x: x.clone().index_put_((torch.tensor([1]),), torch.tensor(3.0)),
        lambda x: x.lerp(x + 1, 0.5),
    ],
)
def test_what_cuda_lets_mix_may_mix(x, allowed):
    found = allowed(x)
    assert found.device.type == "cuda"
    assert torch.equal(found.cpu(), allowed(SOME))


@pytest.mark.parametrize(
    ("waiting", "waits"),
    [
        (lambda x: x[0, 0].item(), 1),
        (lambda x: x.tolist(), 1),
        (lambda x: bool(x[0, 0] > 0), 1),
        (lambda x: int(x[0, 0]), 1),
        (lambda x: float(x[0, 0]), 1),
        (lambda x: x.nonzero(), 1),
        (lambda x: torch.where(x > 0), 1),
        (lambda x: x[x > 0], 1),
        (lambda x: x.cpu(), 1),
        (lambda x: x.to("cpu"), 1),
        (lambda x: x.unique(), 1),
        (lambda x: x.repeat_interleave(torch.ones_like(x[:, 0]).long(), 0), 1),
        (lambda x: x.repeat_interleave(2, 0), 0),
        (lambda x: torch.equal(x, x), 1),
        (lambda x: repr(x), 1),
        (lambda x: torch.cuda.synchronize(), 1),
        (lambda x: torch.linalg.cholesky(x.T @ x + x.new_ones(3).diag()), 1),
        (lambda x: torch.isfinite(x).all(), 0),
        (lambda x: x.masked_fill_(x > 0, 0), 0),
        (lambda x: x.to(torch.bfloat16), 0),
        (lambda x: F.one_hot(x[:, 0].long().clamp(min=0), 9), 0),
        (lambda x: x.to("cuda"), 0),
    ],
)
def test_waits_are_counted(gpu, x, waiting, waits):
    waiting(x)
    assert gpu.count.waits == waits
    assert gpu.count.uploads == 0


def test_transfers_are_counted(gpu):
    x = SOME.to("cuda")
    assert (gpu.count.uploads, gpu.count.bytes["upload"]) == (1, 48)
    x[torch.tensor([0, 1])]
    assert gpu.count.uploads == 2
    SOME.pin_memory().to("cuda", non_blocking=True)  # this is what holds nobody up
    assert gpu.count.uploads == 2
    SOME.to("cuda", non_blocking=True)
    assert gpu.count.uploads == 3
    x.to("cuda:1")
    assert gpu.count.by["between"] == 1
    assert gpu.count.waits == 0
    assert torch.zeros(3, pin_memory=True).is_pinned()
    assert not SOME.is_pinned()


def test_numpy_wants_the_cpu(x):
    for ask in (lambda: x.numpy(), lambda: np.asarray(x)):
        with pytest.raises(TypeError, match="cpu"):
            ask()


def test_networks_train_as_on_the_cpu(gpu):
    def trained(device):
        torch.manual_seed(1000)
        net = nn.Sequential(nn.Linear(3, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 2)).to(device)
        optimiser = torch.optim.Adam(net.parameters(), lr=0.1)
        for _ in range(3):
            optimiser.zero_grad()
            F.cross_entropy(net(SOME.to(device)), torch.tensor([0, 1, 0, 1], device=device)).backward()
            optimiser.step()
        return net

    here, there = trained("cpu"), trained("cuda")
    assert isinstance(there[0].weight, nn.Parameter)
    again = copy.deepcopy(there)
    for a, b, c in zip(here.parameters(), there.parameters(), again.parameters(), strict=True):
        assert isinstance(b, Counterfeit)
        assert torch.equal(a, b.cpu())
        assert torch.equal(a, c.cpu())
    there.to(torch.bfloat16)
    assert there(SOME.to("cuda", torch.bfloat16)).dtype == torch.bfloat16


def test_generators_of_a_gpu_draw_for_it(gpu):
    drawn = torch.randn(3, device="cuda", generator=torch.Generator("cuda").manual_seed(3))
    assert drawn.device.type == "cuda"


def test_a_network_on_the_cpu_meets_inputs_on_a_gpu(x):
    with pytest.raises(MixedDevices):
        nn.Linear(3, 2)(x)


def test_outside_there_is_no_gpu():
    assert not torch.cuda.is_available()
