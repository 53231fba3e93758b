"""Small networks, causal models with planted variables, and the plain hooked forward that tests compare against."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plot_ot.abstract.banks import Bank, draw_pairs
from plot_ot.abstract.causal_model import CausalModel
from plot_ot.subjects import MLPSubject, ModuleSubject

torch.set_num_threads(1)  # matrices this small only lose by more

# -- random tensors and networks ------------------------------------------------------------------------------


def rand(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Standard normal numbers of a seed."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def orthonormal(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Random orthonormal columns [..., d, r]."""
    return torch.linalg.qr(rand(seed, *shape, dtype=dtype))[0]


def mlp(*widths: int, seed: int = 0, activation: type[nn.Module] = nn.Tanh) -> nn.Sequential:
    """Linear layers of these widths with an activation between them; place `layer<n>` is submodule 2n - 1."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layers = [layer for a, b in itertools.pairwise(widths) for layer in (nn.Linear(a, b), activation())]
    return nn.Sequential(*layers[:-1])


def hooked_subject(net: nn.Sequential, encode: Callable[[Tensor], Tensor] | None = None) -> ModuleSubject:
    """The places of `MLPSubject(net)`, reached by hooks and full forward passes."""
    paths = {f"layer{n}": str(2 * n - 1) for n in range(1, len(net) // 2 + 1)}
    subject = ModuleSubject(net, paths, torch.zeros(1, net[0].in_features))
    subject.encode = encode or subject.encode
    return subject


# -- the oracle -----------------------------------------------------------------------------------------------

PlainEdit = tuple[nn.Module, Tensor, Tensor, Tensor]
"""(submodule, R [d, r], W [d, r], gains [r])"""


@torch.no_grad()
def hooked_forward(net: nn.Module, edits: Sequence[PlainEdit], base: Tensor, source: Tensor) -> Tensor:
    """One variant by definition: a clean source run, then a base run whose hooks rewrite each edited output."""
    clean: dict[nn.Module, Tensor] = {}

    def keep(module: nn.Module, _: object, output: Tensor) -> None:
        clean[module] = output.clone()

    def patch(read: Tensor, write: Tensor, gains: Tensor) -> Callable[..., Tensor]:
        return lambda module, _, a: a + (gains * (clean[module] @ read - a @ read)) @ write.T

    with contextlib.ExitStack() as hooks:
        for module, *_ in edits:
            hooks.callback(module.register_forward_hook(keep).remove)
        net(source)
    with contextlib.ExitStack() as hooks:
        for module, read, write, gains in edits:
            hooks.callback(module.register_forward_hook(patch(read, write, gains)).remove)
        return net(base)


# -- planted variables ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Planted:
    """A network written by hand, the causal model it computes, and where each variable lives."""

    subject: MLPSubject
    causal: CausalModel
    levels: int
    truth: Mapping[str, object]
    """Variable -> orthonormal plane at `layer1`, or the set of its neurons' site names."""

    def banks(self, *sizes: int, seed: int = 0) -> list[Bank]:
        """Banks balanced over the sets of changed variables; no two share an input."""
        generator = torch.Generator().manual_seed(seed)
        rows = torch.cartesian_prod(*[torch.arange(self.levels)] * len(self.causal.inputs))
        pools = rows[torch.randperm(len(rows), generator=generator)].chunk(len(sizes))
        return [draw_pairs(self.causal, pool, "balanced", n, generator) for pool, n in zip(pools, sizes, strict=True)]


def planted_plane(seed: int = 0, distractors: int = 2) -> Planted:
    """y = (p + q) mod 3 with p = x0, q = x1: `layer1` holds p, q and distractors in as many rotated planes.

    A value is a corner of a triangle in its plane; `layer2` detects the nine (p, q).
    """
    angles = torch.arange(3) * 2 * math.pi / 3
    triangle = torch.stack([angles.cos(), angles.sin()])
    planes = 2 + distractors
    rotation = orthonormal(seed, 2 * planes, 2 * planes)
    detect = torch.stack([torch.cat([triangle[:, i], triangle[:, j]]) for i in range(3) for j in range(3)])
    vote = torch.stack([torch.tensor([float((i + j) % 3 == y) for i in range(3) for j in range(3)]) for y in range(3)])
    net = _network(
        [
            (rotation @ torch.block_diag(*[triangle] * planes), torch.zeros(2 * planes), nn.Identity()),
            (4 * detect @ rotation[:, :4].T, torch.full((9,), -5.0), nn.Softplus()),
            (3 * vote, torch.zeros(3), None),
        ]
    )
    causal = CausalModel(
        [f"x{k}" for k in range(planes)],
        {"p": lambda x0: x0, "q": lambda x1: x1, "y": lambda p, q: (p + q) % 3},
        "y",
    )
    truth = {"p": rotation[:, :2], "q": rotation[:, 2:4]}
    return Planted(MLPSubject(net, encode=_one_hots(3)), causal, 3, truth)


def planted_neurons(copies: int = 1, seed: int = 0) -> Planted:
    """y = (p == q) with p = (x0 == x1), q = (x2 == x3): `layer2` holds each in `copies` neurons that are averaged.

    `layer1` detects each equal pair of values, `layer3` both and neither; x4 drives distractors in every layer, which
    nudge the output. Neurons are shuffled.
    """
    generator = torch.Generator().manual_seed(seed)
    one = torch.eye(20).unflatten(0, (5, 4))
    layer1 = torch.cat([one[0] + one[1], one[2] + one[3], one[4]])
    layer2 = torch.zeros(2 * copies + 4, 12)
    layer2[:copies, :4] = layer2[copies : 2 * copies, 4:8] = 1
    layer2[2 * copies :, 8:] = torch.rand(4, 4, generator=generator)
    layer3 = torch.zeros(6, 2 * copies + 4)
    layer3[0, : 2 * copies], layer3[1, : 2 * copies] = 1 / copies, -1 / copies
    layer3[2:, 2 * copies :] = torch.rand(4, 4, generator=generator) / 4
    out = torch.zeros(2, 6)
    out[1, :2] = 10
    out[:, 2:] = torch.rand(2, 4, generator=generator) / 2
    weights = [layer1, layer2, layer3, out]
    biases = [
        torch.tensor([-1.0] * 8 + [0.0] * 4),
        torch.zeros(len(layer2)),
        torch.tensor([-1.0, 1.0] + [0.0] * 4),
        torch.tensor([5.0, 0.0]),
    ]
    for k in range(3):
        order = torch.randperm(len(weights[k]), generator=generator)
        weights[k], biases[k], weights[k + 1] = weights[k][order], biases[k][order], weights[k + 1][:, order]
        if k == 1:
            places = order.argsort().tolist()
    net = _network([(w, b, nn.ReLU() if k < 3 else None) for k, (w, b) in enumerate(zip(weights, biases, strict=True))])
    causal = CausalModel(
        ["x0", "x1", "x2", "x3", "x4"],
        {"p": lambda x0, x1: x0 == x1, "q": lambda x2, x3: x2 == x3, "y": lambda p, q: p == q},
        "y",
    )
    names = [f"layer2[{j}]" for j in places]
    truth = {"p": set(names[:copies]), "q": set(names[copies : 2 * copies])}
    return Planted(MLPSubject(net, encode=_one_hots(4)), causal, 4, truth)


PARITY_ROWS = torch.cartesian_prod(*[torch.arange(2)] * 8)
PARITIES = CausalModel(
    list("abcdefgh"),
    {"left": lambda a, b: a ^ b, "right": lambda c, d: c ^ d, "y": lambda left, right: left ^ right},
    output="y",
)


def random_parities(seed: int, aligned: bool) -> tuple[nn.Sequential, set[int]]:
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


def _network(layers: Sequence[tuple[Tensor, Tensor, nn.Module | None]]) -> nn.Sequential:
    """A network with these weights, biases and activations."""
    built: list[nn.Module] = []
    for weight, bias, activation in layers:
        linear = nn.Linear(weight.shape[1], weight.shape[0])
        linear.load_state_dict({"weight": weight, "bias": bias})
        built += [linear] if activation is None else [linear, activation]
    return nn.Sequential(*built)


def _one_hots(levels: int) -> Callable[[Tensor], Tensor]:
    """Every input column as a one-hot code."""
    return lambda rows: F.one_hot(rows.long(), levels).flatten(1).float()
