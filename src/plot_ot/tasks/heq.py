"""Hierarchical equality (paper, Section 4.1 and Appendix B.1): y = 1[ 1[W = X] = 1[Y = Z] ]."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from safetensors.torch import save
from torch import Tensor, nn

from plot_ot.abstract.banks import Bank, Splits, distinct_rows, draw_pairs
from plot_ot.abstract.causal_model import CausalModel
from plot_ot.errors import PlotError, unknown
from plot_ot.files.safe_reading import UNREADABLE, read_tensors
from plot_ot.files.writing import require_writable, write_atomically
from plot_ot.methods import Method, MethodKind, layered, natural_das, random_sites
from plot_ot.signatures import as_readout
from plot_ot.sites import whole_places
from plot_ot.stages.calibrate import Search
from plot_ot.stages.choose import Calibrate, TrainDas
from plot_ot.stages.closed_form import ClosedForm
from plot_ot.stages.coupling import Localize, ScoreSites, brute_force
from plot_ot.stages.newton import NewtonHandles
from plot_ot.studies.prepared import Prepared, Sweep
from plot_ot.studies.task import Outline, SeedFailed, Task
from plot_ot.subjects import MLPSubject
from plot_ot.transport import Transport

ENTITIES, EMBEDDING, WIDTH, LAYERS = 100, 4, 16, 3
NAME = f"mlp-{LAYERS}x{WIDTH}"
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
        meanings={"z_WX": "whether W equals X", "z_YZ": "whether Y equals Z"},
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
        return distinct_rows(uniform_rows(2 * count, generator))[:count]
    share = count // len(CELLS)
    return torch.cat([distinct_rows(cell_rows(c, 2 * share, generator))[:share] for c in CELLS])


# -- the network ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Backbone:
    """A trained network with its entity table and how training went."""

    seed: int
    net: nn.Sequential
    table: Float[Tensor, "100 4"]
    epochs: int
    cell_accuracy: tuple[float, ...]
    """The accuracy on 10,000 held-out rows of each cell (0,0), (0,1), (1,0), (1,1)."""

    @property
    def accepted(self) -> bool:
        """Whether the network is right on all held-out rows of all four cells: it computes hierarchical equality."""
        return min(self.cell_accuracy) == 1.0

    def encode(self, rows: Int[Tensor, "rows 4"]) -> Float[Tensor, "rows 16"]:
        """x = [e(W) e(X) e(Y) e(Z)]."""
        return self.table[rows].flatten(1)

    @torch.no_grad()
    def answers(self, rows: Int[Tensor, "rows 4"]) -> Bool[Tensor, " rows"]:
        """The answers that the network gives."""
        answers: Tensor = self.net(self.encode(rows)).argmax(dim=1) == 1
        return answers

    def subject(self) -> MLPSubject:
        """The network as a subject that can be recorded and resumed."""
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
    require_writable(cache)
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
        _, tensors = read_tensors(path)
        net.load_state_dict({n.removeprefix("net."): t for n, t in tensors.items() if n.startswith("net.")})
        table, epochs, cells = tensors["table"], int(tensors["epochs"]), tensors["cell_accuracy"].tolist()
    except UNREADABLE as e:
        raise PlotError(f"The cached backbone {path} is damaged ({e}). Delete it; it will be trained again.") from e
    return Backbone(seed, net.requires_grad_(False), table, epochs, tuple(cells))


# -- banks ----------------------------------------------------------------------------------------------------


def draw_splits(
    backbone: Backbone, sampler: str = "uniform", *, size: int = 1000, filtered: bool = True, strict: bool = True
) -> tuple[Splits, dict[str, float | None]]:
    """The paper's banks, from pools of rows the network answers correctly; also the pass rate per cell.

    `uniform`: fit `mixed`, calibration `only`, tests `sensitive` and `invariant`. `balanced` draws pools balanced over
    the cells, and calibrates on pairs balanced over which variables change.
    """
    generator = torch.Generator().manual_seed(10_000 + backbone.seed)
    causal = causal_model()
    taken = torch.empty(0, 4, dtype=torch.long)
    tried, passed = torch.zeros(4), torch.zeros(4)

    def pool(count: int) -> Tensor:
        """Rows that pass the filter and are in no earlier pool, so that splits share nothing."""
        nonlocal taken
        rows = draw_pool(sampler, 2 * count, generator)
        values = causal.run(rows)
        right = backbone.answers(rows) == values["y"] if filtered else torch.ones(len(rows), dtype=torch.bool)
        cell = 2 * values["z_WX"].long() + values["z_YZ"].long()
        tried.add_(torch.bincount(cell, minlength=4))
        passed.add_(torch.bincount(cell[right], minlength=4))
        fresh = distinct_rows(torch.cat([taken, rows[right]]))[len(taken) :]
        fresh = fresh[torch.randperm(len(fresh), generator=generator)[:count]]
        taken = torch.cat([taken, fresh])
        return fresh

    calibrate_on = "only" if sampler == "uniform" else "balanced"
    fit = draw_pairs(causal, pool(2048), "mixed", size, generator, name="fit")
    calibration = draw_pairs(causal, pool(4096), calibrate_on, size, generator, name="calibration")
    held_out = pool(2048)
    test: dict[tuple[str, str], Bank] = {}
    for v in VARIABLES:
        for kind, policy in (("sensitivity", "sensitive"), ("invariance", "invariant")):
            name = f"test/{v}/{kind}"
            test[v, kind] = draw_pairs(causal, held_out, policy, size, generator, variable=v, name=name)
    rates = {
        f"{p}{q}": float(passed[2 * p + q] / tried[2 * p + q]) if tried[2 * p + q] else None  # no such row was drawn
        for p, q in CELLS
    }
    return Splits.checked(fit, calibration, test, strict=strict), rates


# -- the study ------------------------------------------------------------------------------------------------

STRENGTHS: dict[str, tuple[float, ...]] = {
    "units": tuple(float(x) for x in range(1, 81)),
    "tenths": tuple(x / 10 for x in range(1, 81)),
}
STRENGTHS["union"] = tuple(sorted({*STRENGTHS["units"], *STRENGTHS["tenths"]}))
EPSILON = 4.0


@dataclass(frozen=True)
class HierarchicalEquality(Task):
    """The paper's first study, configured."""

    sampler: str = "uniform"
    strengths: str = "union"
    """λ grid: `units` 1..80 (the paper's text), `tenths` 0.1..8.0 (its example handle), or their `union`."""
    size: int = 1000
    name = "heq"
    summary = "hierarchical equality: does W = X agree with Y = Z? 3 x 16 MLP (paper, Section 4.1)"

    def __post_init__(self) -> None:
        if self.sampler not in SAMPLERS:
            unknown("sampler", self.sampler, SAMPLERS)
        if self.strengths not in STRENGTHS:
            unknown("λ grid", self.strengths, STRENGTHS)
        if self.size < 20:
            raise PlotError(f"Banks of {self.size} pairs are too small to calibrate on; use at least 20.")

    def config(self) -> dict[str, object]:
        return {"task": self.name, "sampler": self.sampler, "strengths": self.strengths, "size": self.size}

    def causal_model(self) -> CausalModel:
        return causal_model()

    def _search(self, ties: str = "smallest") -> Search:
        return Search(tuple(range(1, 21)), STRENGTHS[self.strengths], ties=ties)

    def methods(self) -> dict[str, Method]:
        search = self._search()
        once = Search((1,), (1.0,))
        cosine = Transport("cosine", epsilon=(0.1, 0.3, 1.0))
        methods = [
            Method(
                "plot",
                "one 2 x 48 coupling over neurons at ε = 4 (paper); support in all layers or one, by calibration",
                (Localize(transport=Transport(epsilon=(EPSILON,))), Calibrate(search, supports="place")),
            ),
            Method(
                "plot-joint",
                "the same coupling; support always the top K over all layers, as the text reads",
                (Localize(transport=Transport(epsilon=(EPSILON,))), Calibrate(search)),
            ),
            layered(self._search(ties="loss")),
            Method(
                "plot-closed-form",
                "oblique maps in closed form, no training; layer by calibration (ours)",
                (ClosedForm(),),
            ),
            Method(
                "plot-newton",
                "plot-closed-form, then Gauss-Newton on the output loss with the closed form as prior (ours)",
                (ClosedForm(), NewtonHandles()),
            ),
            Method("das", "full DAS: 3 layers x 16 dimensions x 2 variables", (TrainDas(),), kind=MethodKind.DAS),
            Method(
                "das-natural",
                "full DAS with a counterfactual-latent loss that keeps edited states natural",
                (natural_das(TrainDas()),),
                kind=MethodKind.DAS,
            ),
            Method(
                "full-vector",
                "the whole activation vector of the best layer",
                (ScoreSites("brute-force", brute_force, whole_places), Calibrate(once)),
                kind=MethodKind.BASELINE,
            ),
            Method(
                "cosine",
                "softmax of cosine similarities in place of transport, same search as plot",
                (Localize(transport=cosine), Calibrate(search, supports="place")),
                kind=MethodKind.BASELINE,
            ),
            Method(
                "brute-force",
                "every neuron swapped alone on calibration, same search as plot",
                (ScoreSites("brute-force", brute_force), Calibrate(search, supports="place")),
                kind=MethodKind.BASELINE,
            ),
            replace(self.random_method(0), name="random"),
        ]
        return {m.name: m for m in methods}

    def random_method(self, draw: int) -> Method:
        return random_sites(draw, self._search())

    def sweep(self) -> Sweep:
        def at(epsilon: float) -> Method:
            transport = Transport(epsilon=(epsilon,))
            stages = (Localize(transport=transport), Calibrate(self._search(), supports="place"))
            return Method("plot", f"plot at ε = {epsilon}", stages)

        return Sweep("epsilon", {e: at(e) for e in (0.01, 0.1, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 64.0)})

    def prepare(self, seed: int, cache: Path) -> Prepared:
        backbone = load_backbone(seed, cache)
        if not backbone.accepted:
            cells = ", ".join(f"{p}{q}: {a:.4f}" for (p, q), a in zip(CELLS, backbone.cell_accuracy, strict=True))
            raise SeedFailed(
                f"the network did not learn the task exactly on all four (z_WX, z_YZ) cells within 30 epochs "
                f"({cells}); other seeds may (--first-seed)"
            )
        splits, rates = draw_splits(backbone, self.sampler, size=self.size)
        notes = {"epochs": backbone.epochs, "cell_accuracy": backbone.cell_accuracy, "pass_rates": rates}
        score = "paper" if self.sampler == "uniform" else "balanced"
        subject = backbone.subject()
        return Prepared(self.name, NAME, seed, subject, splits, as_readout("softmax"), score, notes)

    def subject_known(self, seed: int, cache: Path) -> dict[str, str] | None:
        if not (cache / f"heq-{seed}.safetensors").exists():
            return None
        return {"name": NAME, "identity": load_backbone(seed, cache).subject().identity()}

    def outline(self, seed: int) -> Outline:
        untrained = Backbone(seed, build_net(), torch.rand(ENTITIES, EMBEDDING), 0, (0.0,) * 4)
        splits, _ = draw_splits(untrained, self.sampler, size=self.size, filtered=False)
        return Outline(untrained.subject(), splits, outputs=2)
