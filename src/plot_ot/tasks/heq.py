"""Hierarchical equality (paper, Section 4.1 and Appendix B.1): y = 1[ 1[W = X] = 1[Y = Z] ]."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn

from plot_ot.banks import Bank, Splits, draw_pairs
from plot_ot.causal import CausalModel
from plot_ot.errors import PlotError, unknown
from plot_ot.runs import write_atomically
from plot_ot.subjects import MLPSubject

ENTITIES, EMBEDDING, WIDTH, LAYERS = 100, 4, 16, 3
VARIABLES = ("z_WX", "z_YZ")
CELLS = ((0, 0), (0, 1), (1, 0), (1, 1))
SAMPLERS = ("uniform", "balanced")


def causal_model() -> CausalModel:
    """z_WX = 1[W = X], z_YZ = 1[Y = Z], y = 1[z_WX = z_YZ]."""
    return CausalModel(
        inputs=["W", "X", "Y", "Z"],
        mechanisms={
            "z_WX": lambda W, X: W == X,
            "z_YZ": lambda Y, Z: Y == Z,
            "y": lambda z_WX, z_YZ: z_WX == z_YZ,
        },
        output="y",
    )


# -- rows -----------------------------------------------------------------------------------------------------


def uniform_rows(count: int, generator: torch.Generator) -> Int[Tensor, "count 4"]:
    """Rows uniform over 100⁴: about 98 % have both pairs unequal."""
    return torch.randint(ENTITIES, (count, 4), generator=generator)


def cell_rows(cell: tuple[int, int], count: int, generator: torch.Generator) -> Int[Tensor, "count 4"]:
    """Rows uniform over those with (z_WX, z_YZ) = cell."""
    rows = uniform_rows(count, generator)
    for side, equal in enumerate(cell):
        left, right = rows[:, 2 * side], rows[:, 2 * side + 1]
        offset = torch.randint(1, ENTITIES, (count,), generator=generator)
        right.copy_(left if equal else (left + offset) % ENTITIES)
    return rows


def draw_pool(sampler: str, count: int, generator: torch.Generator) -> Int[Tensor, "count 4"]:
    """Distinct rows: `uniform` (the paper's), or `balanced` over the four (z_WX, z_YZ) cells."""
    if sampler not in SAMPLERS:
        unknown("sampler", sampler, SAMPLERS)
    if sampler == "uniform":
        return _distinct(uniform_rows(2 * count, generator))[:count]
    share = count // len(CELLS)
    return torch.cat([_distinct(cell_rows(c, 2 * share, generator))[:share] for c in CELLS])


def _distinct(rows: Tensor) -> Tensor:
    """The rows without repetitions, in their order."""
    _, inverse = torch.unique(rows, dim=0, return_inverse=True)
    first = torch.full((int(inverse.max()) + 1,), len(rows)).scatter_reduce(
        0, inverse, torch.arange(len(rows)), reduce="amin"
    )
    return rows[first.sort().values]


# -- the network ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Backbone:
    """A trained network with its entity table and how training went."""

    seed: int
    net: nn.Sequential
    table: Float[Tensor, "100 4"]
    epochs: int
    cell_accuracy: tuple[float, ...]
    """On 10,000 held-out rows of each cell (0,0), (0,1), (1,0), (1,1)."""

    @property
    def accepted(self) -> bool:
        """Right on every held-out row of all four cells: the network does compute hierarchical equality."""
        return min(self.cell_accuracy) == 1.0

    def encode(self, rows: Int[Tensor, "rows 4"]) -> Float[Tensor, "rows 16"]:
        """x = [e(W) e(X) e(Y) e(Z)]."""
        return self.table[rows].flatten(1)

    def subject(self) -> MLPSubject:
        """The network for the engine."""
        return MLPSubject(self.net, encode=self.encode)


def build_net() -> nn.Sequential:
    """16 -> 16 -> 16 -> 16 -> 2 with ReLUs: 850 parameters."""
    layers: list[nn.Module] = []
    for _ in range(LAYERS):
        layers += [nn.Linear(WIDTH, WIDTH), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 2))


def train_backbone(seed: int, *, rows: int = 1 << 20, epochs: int = 30) -> Backbone:
    """Adam 1e-3 and batches of 1024 over 2^20 uniform rows (paper), kept at the last epoch right on all four cells.

    Uniform rows hold only about a hundred of the cell (1, 1): after the paper's three epochs most networks are still
    wrong on all of it (they compute NOR), so training goes on, and an epoch counts only if all four cells are right.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        net = build_net()
    generator = torch.Generator().manual_seed(seed)
    table = torch.rand(ENTITIES, EMBEDDING, generator=generator) * 2 - 1
    examples = uniform_rows(rows, generator)
    labels = causal_model().answer(examples).long()
    held_out = [cell_rows(c, 10_000, generator) for c in CELLS]
    optimiser = torch.optim.Adam(net.parameters(), lr=1e-3, fused=True)
    kept: tuple[tuple[float, ...], int, dict[str, Tensor]] = ((0.0,) * 4, 0, {})
    for epoch in range(1, epochs + 1):
        order = torch.randperm(rows, generator=generator)
        for x, y in zip(table[examples[order]].flatten(1).split(1024), labels[order].split(1024), strict=True):
            optimiser.zero_grad()
            F.cross_entropy(net(x), y).backward()
            optimiser.step()
        accuracy = tuple(_accuracy(net, table, r, int(c[0] == c[1])) for c, r in zip(CELLS, held_out, strict=True))
        if min(accuracy) >= min(kept[0]):
            kept = accuracy, epoch, {n: t.clone() for n, t in net.state_dict().items()}
    net.load_state_dict(kept[2])
    return Backbone(seed, net.requires_grad_(False), table, kept[1], kept[0])


@torch.no_grad()
def _accuracy(net: nn.Sequential, table: Tensor, rows: Tensor, label: int) -> float:
    return float((net(table[rows].flatten(1)).argmax(dim=1) == label).double().mean())


def load_backbone(seed: int, cache: Path) -> Backbone:
    """The backbone of a seed, from the cache or trained now; one thread, so that every machine agrees with itself."""
    path = cache / f"heq-{seed}.safetensors"
    if path.exists():
        return _read_backbone(path, seed)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        backbone = train_backbone(seed)
    finally:
        torch.set_num_threads(threads)
    tensors = {f"net.{n}": t for n, t in backbone.net.state_dict().items()} | {"table": backbone.table}
    tensors["cell_accuracy"] = torch.tensor(backbone.cell_accuracy, dtype=torch.float64)
    tensors["epochs"] = torch.tensor(backbone.epochs)
    write_atomically(path, save(tensors))
    return backbone


def _read_backbone(path: Path, seed: int) -> Backbone:
    net = build_net()
    try:
        tensors = load(path.read_bytes())
        net.load_state_dict({n.removeprefix("net."): t for n, t in tensors.items() if n.startswith("net.")})
        table, epochs, cells = tensors["table"], int(tensors["epochs"]), tensors["cell_accuracy"].tolist()
    except (SafetensorError, KeyError, RuntimeError, OSError) as e:
        raise PlotError(f"The cached backbone {path} is damaged ({e}). Delete it; it will be trained again.") from e
    return Backbone(seed, net.requires_grad_(False), table, epochs, tuple(cells))


# -- banks ----------------------------------------------------------------------------------------------------


def draw_splits(
    backbone: Backbone, sampler: str = "uniform", *, size: int = 1000, strict: bool = True
) -> tuple[Splits, dict[str, float]]:
    """The paper's banks, from pools of rows the network answers correctly; also the pass rate per cell.

    `uniform`: fit `mixed`, calibration `only`, tests `sensitive` and `invariant`. `balanced` draws pools balanced over
    the cells, and calibrates on pairs balanced over which variables change.
    """
    generator = torch.Generator().manual_seed(10_000 + backbone.seed)
    causal = causal_model()
    seen: list[Tensor] = []
    tried, passed = torch.zeros(4), torch.zeros(4)

    def pool(count: int) -> Tensor:
        rows = draw_pool(sampler, 2 * count, generator)
        right = (backbone.net(backbone.encode(rows)).argmax(dim=1) == causal.answer(rows).long()).cpu()
        values = causal.run(rows)
        cell = 2 * values["z_WX"].long() + values["z_YZ"].long()
        tried.add_(torch.bincount(cell, minlength=4))
        passed.add_(torch.bincount(cell[right], minlength=4))
        rows = rows[right]
        if seen:  # rows of earlier pools are left out, so that splits share nothing
            earlier = torch.cat(seen)
            fresh = _distinct(torch.cat([earlier, rows]))[len(_distinct(earlier)) :]
            rows = fresh
        rows = rows[torch.randperm(len(rows), generator=generator)[:count]]
        seen.append(rows)
        return rows

    calibrate_on = "only" if sampler == "uniform" else "balanced"
    fit = draw_pairs(causal, pool(2048), "mixed", size, generator, name="fit")
    calibration = draw_pairs(causal, pool(4096), calibrate_on, size, generator, name="calibration")
    held_out = pool(2048)
    test: dict[tuple[str, str], Bank] = {}
    for v in VARIABLES:
        for kind, policy in (("sensitivity", "sensitive"), ("invariance", "invariant")):
            name = f"test/{v}/{kind}"
            test[v, kind] = draw_pairs(causal, held_out, policy, size, generator, variable=v, name=name)
    rates = {f"{p}{q}": float(passed[2 * p + q] / tried[2 * p + q].clamp(min=1)) for p, q in CELLS}
    return Splits.checked(fit, calibration, test, strict=strict), rates
