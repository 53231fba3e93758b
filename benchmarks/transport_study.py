"""When does transport beat simpler rankings? A factorial study on networks whose variables were written in by hand.

python benchmarks/transport_study.py --networks 50 --first-seed 2000       # all cells, about an hour of one core
python benchmarks/transport_study.py --networks 5 --first-seed 1000 --cells 4      # a look

A network holds m binary variables and some distractors in its neurons, H = A u, with random loadings A, and reads the
variables back exactly, z = P H with P the pseudo-inverse of A. So the network always computes its hypothesis, and what
makes the search hard can be set: how many variables there are, how often a neuron holds two of them (overlap), how loud
the distractors are beside them, how many neurons lead nowhere (dead), how many pairs are measured, and whether each
variable has an output of its own (bits) or all share one (the number of variables that are 1).

All rankings see the same pairs and are followed by the same search over K and λ on the same calibration pairs. Every
cell is one file in the out folder; what is there is not run again.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from statistics import fmean, stdev

import torch
from torch import Tensor, nn

from pages import markdown, write_tables
from plot_ot import Bank, CausalModel, CouplingWarning, Mechanism, Method, MLPSubject, Transport, as_readout, record
from plot_ot.files.writing import write_atomically
from plot_ot.stages.calibrate import Search, correct
from plot_ot.stages.choose import Calibrate
from plot_ot.stages.coupling import Localize, ScoreSites, at_random, attribution, brute_force
from plot_ot.stages.problem import Problem, Stage

CARRIERS = 3
"""Neurons per variable."""
SHIFT = 100.0
"""Added before the rectifier and taken off after it, so that the layer is linear where it is used."""
CALIBRATION, TEST = 128, 256
SEARCH = Search((1, 2, 3, 4, 6, 8), (0.5, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0))
EPSILONS = (0.01, 0.03, 0.1, 0.3, 1.0)
BETAS = (0.03, 0.3, 3.0)
MARGIN = 0.05
"""By how much a ranking must win to be called better."""


@dataclass(frozen=True)
class Cell:
    """What makes the networks of one cell hard."""

    variables: int
    overlap: float
    """The share of carriers that hold a second variable as well."""
    distractors: float
    """How loud distractors are in a carrier, the variable being 1."""
    outputs: str
    """`bits`: an output per variable; `count`: one output, how many variables are 1."""
    dead: float = 0.25
    """Neurons that lead nowhere, per carrier."""
    pairs: int = 64
    """Pairs that rankings are made from."""

    @property
    def name(self) -> str:
        return "-".join(f"{value:g}" if isinstance(value, float) else str(value) for value in asdict(self).values())


BASE = Cell(4, 0.25, 1.0, "bits")
CELLS = (
    *(Cell(m, o, d, y) for m, o, d, y in product((2, 4, 8, 16), (0.0, 0.5), (0.0, 2.0), ("bits", "count"))),
    *(replace(BASE, dead=x) for x in (0.0, 4.0)),
    *(replace(BASE, outputs="count", dead=x) for x in (0.0, 4.0)),
    *(replace(BASE, pairs=n) for n in (8, 256)),
    *(replace(BASE, outputs="count", pairs=n) for n in (8, 256)),
)


def rankings(seed: int) -> dict[str, Stage]:
    """What is compared: how sites are ranked for every variable."""

    def coupled(kind: str, beta: tuple[float, ...] = (float("inf"),)) -> Localize:
        return Localize(transport=Transport(kind, EPSILONS, beta, scale="median"))

    return {
        "balanced OT": coupled("eot"),
        "one-sided UOT": coupled("uot-one-sided", BETAS),
        "two-sided UOT": coupled("uot", BETAS),
        "cosine": Localize(transport=Transport("cosine", EPSILONS)),
        "brute force": ScoreSites("brute-force", brute_force),
        "attribution": ScoreSites("attribution", attribution),
        "random": ScoreSites("random", at_random(seed)),
    }


TRANSPORTS = ("balanced OT", "one-sided UOT", "two-sided UOT")
OTHERS = ("cosine", "brute force", "attribution")


def network(cell: Cell, generator: torch.Generator) -> nn.Sequential:
    """H = A u, shifted and rectified; then z = P H and the outputs, all exact."""
    m, latent = cell.variables, cell.variables + max(2, cell.variables // 2)
    carriers = CARRIERS * m

    def loadings(*shape: int) -> Tensor:
        signs = torch.randint(2, shape, generator=generator) * 2 - 1
        return (0.5 + torch.rand(shape, generator=generator)) * signs

    mixing = torch.zeros(carriers, latent)
    owner = torch.arange(carriers) % m
    mixing[torch.arange(carriers), owner] = loadings(carriers)
    shared = torch.rand(carriers, generator=generator) < cell.overlap
    second = (owner + torch.randint(1, m, (carriers,), generator=generator)) % m
    mixing[shared.nonzero()[:, 0], second[shared]] = loadings(int(shared.sum()))
    mixing[:, m:] = cell.distractors * torch.randn(carriers, latent - m, generator=generator)
    reading = torch.linalg.pinv(mixing)[:m]  # z in -1, 1
    useless = loadings(round(cell.dead * carriers), latent)
    order = torch.randperm(carriers + len(useless), generator=generator)
    if cell.outputs == "bits":
        outputs, bias = 6 * reading, torch.zeros(m)
    else:  # -(count - k)² is linear in the count but for a common term
        k = torch.arange(m + 1.0)
        outputs, bias = 6 * k.outer(reading.sum(dim=0)), 6 * (k * m - k**2)
    first, last = nn.Linear(latent, len(order)), nn.Linear(len(order), len(outputs))
    with torch.no_grad():
        weight = torch.cat([mixing, useless])[order]
        first.weight.copy_(2 * weight), first.bias.copy_(SHIFT - weight.sum(dim=1))  # bits 0, 1 as -1, 1
        last.weight.copy_(torch.cat([outputs, torch.zeros(len(outputs), len(useless))], dim=1)[:, order])
        last.bias.copy_(bias - SHIFT * last.weight.sum(dim=1))
    return nn.Sequential(first, nn.ReLU(), last).double()


def hypothesis(cell: Cell, latent: int) -> CausalModel:
    """Every variable is an input bit; the other inputs are distractors."""
    inputs, variables = [f"x{k}" for k in range(latent)], [f"z{k}" for k in range(cell.variables)]
    together = (lambda *z: torch.stack(z, dim=1)) if cell.outputs == "bits" else (lambda *z: sum(z))
    mechanisms = {z: Mechanism((x,), lambda bit: bit) for z, x in zip(variables, inputs, strict=False)}
    return CausalModel(inputs, {**mechanisms, "y": Mechanism(tuple(variables), together)}, "y", variables)


def pairs(variables: int, count: int, latent: int, generator: torch.Generator) -> Tensor:
    """Bases and sources at random, drawn again if some variable never differs."""
    while True:
        drawn = torch.randint(2, (2, count, latent), generator=generator)
        if bool((drawn[0] != drawn[1])[:, :variables].any(dim=0).all()):
            return drawn


def judged(cell: Cell, seed: int) -> dict[str, float]:
    """Every ranking's accuracy on test pairs, sensitivity and invariance in equal parts, the mean over variables."""
    generator = torch.Generator().manual_seed(seed)
    net = network(cell, generator)
    causal = hypothesis(cell, net[0].in_features)
    subject, readout = MLPSubject(net), as_readout("sigmoid" if cell.outputs == "bits" else "softmax")
    sizes = cell.pairs, CALIBRATION, TEST
    drawn = [pairs(cell.variables, n, net[0].in_features, generator) for n in sizes]
    fit, calibration, test = record(subject, *(Bank.from_pairs(causal, *rows) for rows in drawn))
    right = readout.decide(net(drawn[2][0].double())) == causal.answer(drawn[2][0])
    if not right.all():
        raise RuntimeError(f"The network of cell {cell.name}, seed {seed}, does not compute its hypothesis.")
    found = {}
    for name, stage in rankings(seed).items():
        problem = Problem(subject, fit, calibration, causal.variables, readout, seed)
        state, _ = Method(name, name, (stage, Calibrate(SEARCH))).run(problem)
        scores = []
        for v, handle in state.handles.items():
            hits, changed = correct(test, handle, readout).double(), test.bank.changed[v]
            scores.append((hits[changed].mean() + hits[~changed].mean()) / 2)
        found[name] = float(torch.stack(scores).mean())
    return found


def run(cell: Cell, seeds: range, out: Path) -> None:
    """The networks of a cell that are not there yet."""
    path = out / f"{cell.name}.json"
    done: dict[str, dict[str, float]] = json.loads(path.read_text())["networks"] if path.exists() else {}
    start = time.process_time()
    for seed in seeds:
        if str(seed) not in done:
            done[str(seed)] = judged(cell, seed)
    found = {"cell": asdict(cell), "networks": done}
    write_atomically(path, json.dumps(found, indent=1).encode())
    print(f"{cell.name}: {len(done)} networks, {time.process_time() - start:.0f} CPU s", flush=True)


# -- the page -------------------------------------------------------------------------------------------------


def gap(networks: Mapping[str, Mapping[str, float]], ours: str, theirs: str) -> tuple[float, float]:
    """Mean difference over networks, and half its 95 % interval (normal)."""
    differences = [n[ours] - n[theirs] for n in networks.values()]
    return fmean(differences), 1.96 * stdev(differences) / len(differences) ** 0.5


def best(networks: Mapping[str, Mapping[str, float]], names: tuple[str, ...]) -> str:
    """The ranking with the highest mean."""
    return max(names, key=lambda name: fmean(n[name] for n in networks.values()))


def rows(cells: list[tuple[Cell, Mapping[str, Mapping[str, float]]]]) -> Iterator[list[str]]:
    """One row per cell: every ranking's mean, and the best transport against the best of the others."""
    for cell, networks in cells:
        means = [f"{fmean(n[name] for n in networks.values()):.3f}" for name in rankings(0)]
        ours, theirs = best(networks, TRANSPORTS), best(networks, OTHERS)
        mean, half = gap(networks, ours, theirs)
        mark = "**" if abs(mean) - half >= MARGIN else ""
        setting = [str(cell.variables), f"{cell.overlap:g}", f"{cell.distractors:g}", cell.outputs]
        setting += [f"{cell.dead:g}", str(cell.pairs)]
        yield [*setting, *means, f"{mark}{mean:+.3f} ± {half:.3f}{mark} ({ours} - {theirs})"]


def page(out: Path, command: str) -> list[str]:
    """The table, and how often transport wins or loses by the margin."""
    cells = []
    for cell in CELLS:
        path = out / f"{cell.name}.json"
        if path.exists():
            cells.append((cell, json.loads(path.read_text())["networks"]))
    gaps = []
    for _, networks in cells:
        gaps.append(gap(networks, best(networks, TRANSPORTS), best(networks, OTHERS)))
    cosine = [gap(n, best(n, TRANSPORTS), "cosine") for _, n in cells]
    count = min(len(n) for _, n in cells)
    head = ["variables", "overlap", "distractors", "outputs", "dead", "pairs", *rankings(0), "transport - the rest"]
    return [
        f"Made by `{command}`: {count} networks a cell.",
        "",
        f"Transport wins by {MARGIN:g} or more in {sum(m - h >= MARGIN for m, h in gaps)} of {len(cells)} cells and "
        f"loses by as much in {sum(m + h <= -MARGIN for m, h in gaps)}. Against cosine alone it wins in "
        f"{sum(m - h >= MARGIN for m, h in cosine)} and loses in {sum(m + h <= -MARGIN for m, h in cosine)}.",
        "",
        *markdown(head, rows(cells)),
        "",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", type=int, default=50)
    parser.add_argument("--first-seed", type=int, default=1000)
    parser.add_argument("--cells", type=int, help="only the first so many cells")
    parser.add_argument("--named", default="", help="only cells whose name begins so: 16-0.5 (variables, overlap, ...)")
    parser.add_argument("--out", type=Path, default=Path("runs/transport"))
    parser.add_argument("--page", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", CouplingWarning)  # some cells are meant to be hard
    args.out.mkdir(parents=True, exist_ok=True)
    for cell in (c for c in CELLS[: args.cells] if c.name.startswith(args.named)):
        run(cell, range(args.first_seed, args.first_seed + args.networks), args.out)
    command = f"python benchmarks/transport_study.py --networks {args.networks} --first-seed {args.first_seed}"
    lines = page(args.out, command)
    print("\n".join(lines))
    if args.page:
        write_tables(args.page, lines)


if __name__ == "__main__":
    main()
