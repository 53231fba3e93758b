"""Binary addition: the ripple-carry model, networks that add, and their banks (paper, Section 4.2 and Appendix B.2).

An input is written as a code a·2ⁿ + b, so that codes in rising order are inputs in order of (a, b).
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Int
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from plot_ot.banks import Bank, Splits
from plot_ot.causal import CausalModel, Mechanism, same
from plot_ot.errors import PlotError, unknown
from plot_ot.runs import to_json, write_atomically
from plot_ot.subjects.gru import GRUNet, GRUSubject
from plot_ot.tasks.base import SeedFailed

LEAST_BITS, MOST_BITS = 2, 16
WINDOW = 5
"""Bit positions in which a carry-targeted source may differ from its base: all of them up to 5 bits."""
TABLE = 4**WINDOW
"""The whole truth table is used when it has at most this many inputs; else this many are sampled."""
HELD_OUT = 4096
SPLITS = ("round-robin", "proportional")
FORMAT = "plot-ot adder 1"


def check_bits(bits: int) -> None:
    """Refuse numbers of bits that cannot be studied."""
    if not LEAST_BITS <= bits <= MOST_BITS:
        raise PlotError(f"Binary addition takes {LEAST_BITS} to {MOST_BITS} bits; found {bits}.")


def causal_model(bits: int = 4) -> CausalModel:
    """S_i = (A_i + B_i + C_i) mod 2, C_{i+1} = ⌊(A_i + B_i + C_i) / 2⌋ with no C_0, y = (C_n, S_{n-1}, ..., S_0)."""
    check_bits(bits)
    mechanisms: dict[str, Mechanism] = {}
    for i in range(bits):
        parents = (f"A{i}", f"B{i}", f"C{i}")[: 3 if i else 2]
        mechanisms[f"S{i}"] = Mechanism(parents, lambda *digits: sum(digits) % 2)
        mechanisms[f"C{i + 1}"] = Mechanism(parents, lambda *digits: sum(digits) // 2)
    answer = (f"C{bits}", *(f"S{i}" for i in reversed(range(bits))))
    mechanisms["y"] = Mechanism(answer, lambda *digits: torch.stack(digits, dim=1).bool())
    return CausalModel(
        inputs=[f"{number}{i}" for number in "AB" for i in range(bits)],
        mechanisms=mechanisms,
        output="y",
        variables=[f"C{i}" for i in range(1, bits)],
    )


# -- inputs ---------------------------------------------------------------------------------------------------


def rows_of(codes: Int[Tensor, " rows"], bits: int) -> Int[Tensor, "rows 2n"]:
    """The input rows A_0..A_{n-1}, B_0..B_{n-1} of codes."""
    a, b = _numbers(codes, bits)
    places = torch.arange(bits)
    return torch.cat([a.unsqueeze(1) >> places, b.unsqueeze(1) >> places], dim=1) & 1


def draw_inputs(bits: int, count: int, seed: int) -> Int[Tensor, " drawn"]:
    """Codes of all inputs when there are at most `count`, else of that many different ones, in random order."""
    if 4**bits <= count:
        return torch.arange(4**bits)
    return torch.tensor(random.Random(seed).sample(range(4**bits), count))


def longest_run(codes: Int[Tensor, " rows"], bits: int) -> Int[Tensor, " rows"]:
    """The longest run of active carries among C_1..C_n."""
    carries = _carries_and_sums(codes, bits)[0]
    run = torch.zeros_like(carries)
    while carries.any():
        run += carries != 0
        carries &= carries >> 1  # every run grows one shorter
    return run


def _numbers(codes: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    return codes >> bits, codes & (2**bits - 1)


def _carries_and_sums(codes: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Integers whose i-th bits are C_i (i = 1..n) and S_i (i = 0..n-1)."""
    a, b = _numbers(codes, bits)
    return a ^ b ^ (a + b), (a + b) & (2**bits - 1)


# -- the network ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Recipe:
    """How long and how fast to train."""

    rate: float
    epochs: int
    first_exact: bool
    """Stop at the first exact epoch."""


RECIPES = {"paper": Recipe(0.01, 250, False), "first-exact": Recipe(0.02, 120, True)}


@dataclass(frozen=True)
class Adder:
    """Which network: the number of bits, the width d of its state, the training recipe by name."""

    bits: int = 4
    width: int = 8
    recipe: str = "paper"

    def __post_init__(self) -> None:
        check_bits(self.bits)
        if self.width < 1:
            raise PlotError(f"The recurrent state needs a width of at least 1; found {self.width}.")
        if self.recipe not in RECIPES:
            unknown("training recipe", self.recipe, RECIPES)

    def __str__(self) -> str:
        return f"{self.bits}-bit adder of width {self.width}, recipe '{self.recipe}'"


@dataclass(frozen=True)
class Backbone:
    """A network and how its training went."""

    adder: Adder
    seed: int
    net: GRUNet
    epochs: int

    @torch.no_grad()
    def right(self, rows: Int[Tensor, "rows 2n"]) -> Bool[Tensor, " rows"]:
        """On which inputs all n + 1 bits are right."""
        return same(self.net(self._encode(rows)) >= 0, causal_model(self.adder.bits).answer(rows))

    @property
    def accuracy(self) -> float:
        """Share of exact sums among all inputs or, beyond 5 bits, among 4096 that training did not see."""
        return float(self.right(_examples(self.adder.bits, self.seed)[1]).double().mean())

    def require_exact(self) -> None:
        """Refuse a network that does not add."""
        accuracy = self.accuracy
        if accuracy < 1:
            where = "all inputs" if 4**self.adder.bits <= TABLE else "held-out inputs"
            raise SeedFailed(
                f"The network ({self.adder}, seed {self.seed}, {self.epochs} epochs) is untrained or badly trained: "
                f"it adds right on {accuracy:.4f} of {where}, and only an exact one can be studied."
            )

    def subject(self) -> GRUSubject:
        """The network for the engine."""
        return GRUSubject(self.net, self.adder.bits)

    def _encode(self, rows: Tensor) -> Tensor:
        return self.subject().encode(rows)


def _examples(bits: int, seed: int) -> tuple[Int[Tensor, "rows 2n"], Int[Tensor, "rows 2n"]]:
    """Training inputs, and those that exactness is judged on: the whole table twice, or two samples."""
    if 4**bits <= TABLE:
        rows = rows_of(torch.arange(4**bits), bits)
        return rows, rows
    rows = rows_of(draw_inputs(bits, TABLE + HELD_OUT, seed), bits)
    rows = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))]
    return rows[:TABLE], rows[TABLE:]


def train_backbone(adder: Adder, seed: int) -> Backbone:
    """Binary cross-entropy over the n + 1 bits, Adam, batches of 64; kept at the last epoch that was exact, if any."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        net = GRUNet(2, adder.width)
    generator = torch.Generator().manual_seed(seed)
    recipe = RECIPES[adder.recipe]
    rows, judged = _examples(adder.bits, seed)
    backbone = Backbone(adder, seed, net, 0)
    x, y = backbone._encode(rows), causal_model(adder.bits).answer(rows).float()
    optimiser = torch.optim.Adam(net.parameters(), lr=recipe.rate, fused=True)
    kept: tuple[int, dict[str, Tensor]] = (recipe.epochs, net.state_dict())  # unless an epoch is exact: the last one
    for epoch in range(1, recipe.epochs + 1):
        order = torch.randperm(len(rows), generator=generator)
        for batch in order.split(64):
            optimiser.zero_grad()
            F.binary_cross_entropy_with_logits(net(x[batch]), y[batch]).backward()
            optimiser.step()
        if bool(backbone.right(judged).all()):
            kept = epoch, {n: t.clone() for n, t in net.state_dict().items()}
            if recipe.first_exact:
                break
    net.load_state_dict(kept[1])
    return Backbone(adder, seed, net.requires_grad_(False), kept[0])


def load_backbone(adder: Adder, seed: int, cache: Path) -> Backbone:
    """The backbone of a seed, from the cache or trained now; one thread, so that every machine agrees with itself."""
    path = cache / f"addition-{adder.bits}bit-d{adder.width}-{adder.recipe}-{seed}.safetensors"
    if path.exists():
        backbone = read_backbone(path, adder)
        if backbone.seed != seed:
            raise PlotError(f"The checkpoint {path} is of seed {backbone.seed}, not {seed}. Delete or rename it.")
        return backbone
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        backbone = train_backbone(adder, seed)
    finally:
        torch.set_num_threads(threads)
    save_backbone(backbone, path)
    backbone.require_exact()
    return backbone


def save_backbone(backbone: Backbone, path: Path) -> None:
    """Write weights and description into one safetensors file."""
    header = {"format": FORMAT, **asdict(backbone.adder), "seed": backbone.seed, "epochs": backbone.epochs}
    write_atomically(path, save(backbone.net.state_dict(), metadata={"plot_ot": to_json(header)}))


def read_backbone(path: Path, adder: Adder) -> Backbone:
    """A checkpoint; refused when it is damaged, of another adder than the one wanted, or does not add."""
    net = GRUNet(2, adder.width)
    try:
        with safe_open(str(path), framework="pt") as file:
            header = json.loads((file.metadata() or {})["plot_ot"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        if header["format"] != FORMAT:
            raise ValueError(f"format {header['format']!r}, not {FORMAT!r}")
        found = Adder(int(header["bits"]), int(header["width"]), str(header["recipe"]))
        if found != adder:
            raise PlotError(f"The checkpoint {path} holds a {found}; wanted is a {adder}. Delete or rename it.")
        net.load_state_dict(tensors)
        backbone = Backbone(adder, int(header["seed"]), net.requires_grad_(False), int(header["epochs"]))
    except FileNotFoundError:
        raise PlotError(f"There is no checkpoint at {path}.") from None
    except (SafetensorError, KeyError, TypeError, ValueError, RuntimeError, OSError) as e:
        raise PlotError(f"The checkpoint {path} is damaged ({e}). Delete it; it will be trained again.") from e
    backbone.require_exact()
    return backbone


# -- pairs ----------------------------------------------------------------------------------------------------


def source_families(bits: int) -> tuple[list[str], list[int]]:
    """The names of a base's source families and how many sources each has.

    `flip_a0`.. `flip_b0`..: one input bit flipped. `carry_C1`.. `carry_C{n}`: the nearest inputs with another C_i;
    3, 5, 7 for C_1, C_2, C_3, 7 for later carries, but 3 for the last one, which is an output.
    """
    flips = [f"flip_{number}{i}" for number in "ab" for i in range(bits)]
    carries = [f"carry_C{i}" for i in range(1, bits + 1)]
    return flips + carries, [1] * len(flips) + [min(2 * i + 1, 7) if i < bits else 3 for i in range(1, bits + 1)]


def sources(bases: Int[Tensor, " bases"], bits: int) -> Int[Tensor, "bases sources"]:
    """The codes of every base's sources, families side by side: 2n single-bit flips, then the carry-targeted ones.

    For C_i: of the inputs with another C_i, the first ranked by (mismatches among S_0..S_{i-1}; other differing bits
    among C_1..C_n, S_0..S_{n-1}; Hamming distance of the inputs; a; b). Beyond 5 bits a source may differ from its base
    in the five bit positions i-4..i only (moved to fit into 0..n-1): these decide C_i, or can.
    """
    _, sizes = source_families(bits)
    flips = torch.cat([1 << torch.arange(bits) + bits, 1 << torch.arange(bits)])
    found = [bases.unsqueeze(1) ^ flips]
    for i, size in enumerate(sizes[2 * bits :], 1):
        found.append(torch.cat([_carry_targeted(chunk, bits, i, size) for chunk in bases.split(256)]))
    return torch.cat(found, dim=1)


def _carry_targeted(bases: Tensor, bits: int, i: int, size: int) -> Int[Tensor, "bases size"]:
    ones = _ones(bits + 1)
    candidates = _window(bases, bits, i)
    (a, b), (x, y) = _numbers(bases.unsqueeze(1), bits), _numbers(candidates, bits)
    base_carries, base_sums = _carries_and_sums(bases.unsqueeze(1), bits)
    carries, sums = _carries_and_sums(candidates, bits)
    carries, sums = carries ^ base_carries, sums ^ base_sums  # what differs
    mismatches = ones[sums & (2**i - 1)]
    others = ones[carries & ~(1 << i)] + ones[sums]
    rank = (mismatches * (2 * bits + 1) + others) * (2 * bits + 1) + ones[a ^ x] + ones[b ^ y]
    key = (rank << 2 * bits) + candidates  # ends with a, b
    key = key.where(carries >> i & 1 == 1, torch.iinfo(torch.int64).max)
    return key.topk(size, largest=False).values & (4**bits - 1)


def _window(bases: Tensor, bits: int, i: int) -> Int[Tensor, "bases candidates"]:
    """All inputs that agree with a base outside the window of bit positions that ends with i."""
    width = min(bits, WINDOW)
    shift = min(max(i - width + 1, 0), bits - width)
    digits = torch.arange(2**width) << shift
    free = (2**width - 1) << shift
    inside = ((digits << bits).unsqueeze(1) + digits).flatten()
    return (bases & ~(free << bits | free)).unsqueeze(1) + inside


@lru_cache
def _ones(bits: int) -> Int[Tensor, " numbers"]:
    """How many bits are set in each number."""
    return torch.tensor([bin(k).count("1") for k in range(2**bits)])


# -- splits ---------------------------------------------------------------------------------------------------


def split_bases(codes: Int[Tensor, " bases"], bits: int, split: str, seed: int) -> list[Int[Tensor, " part"]]:
    """Base inputs for fit, calibration and test, 2 : 1 : 1, from buckets by longest carry run, each shuffled.

    `round-robin` (the paper's): take turns between the buckets, then cut; the long runs end up in fit.
    `proportional`: deal the buckets one after another, so that every part has its share of each.
    """
    if split not in SPLITS:
        unknown("split", split, SPLITS)
    codes = codes.sort().values
    runs = longest_run(codes, bits)
    buckets = [codes[runs == run].tolist() for run in range(bits + 1)]
    shuffler = random.Random(seed)
    for bucket in buckets:
        shuffler.shuffle(bucket)
    if split == "proportional":
        dealt = [code for bucket in buckets for code in bucket]
        return [torch.tensor(part) for part in (dealt[0::4] + dealt[2::4], dealt[1::4], dealt[3::4])]
    dealt = []
    while any(buckets):
        dealt += [bucket.pop() for bucket in buckets if bucket]
    half, quarter = len(dealt) // 2, len(dealt) // 4
    return [torch.tensor(part) for part in (dealt[:half], dealt[half : half + quarter], dealt[half + quarter :])]


def draw_splits(seed: int, bits: int = 4, split: str = "round-robin", *, bases: int = TABLE) -> Splits:
    """All banks of a seed: every base with every source. At most `bases` base inputs, sampled if there are more.

    Splits share no base and no pair; they do share sources, as in the paper, which the result counts.
    """
    causal = causal_model(bits)
    if bases < 16:
        raise PlotError(f"{bases} base inputs are too few for three splits; use at least 16.")
    parts = split_bases(draw_inputs(bits, bases, seed), bits, split, seed)
    names, sizes = source_families(bits)
    family = torch.repeat_interleave(torch.arange(len(names)), torch.tensor(sizes))
    fit, calibration, test = (
        _bank(causal, part, sources(part, bits), family, names, name)
        for part, name in zip(parts, ("fit", "calibration", "test"), strict=True)
    )
    tests = {(v, "sensitivity"): test.sensitive(v) for v in causal.variables}
    tests |= {(v, "invariance"): test.invariant(v) for v in causal.variables}
    ordered = {(v, kind): tests[v, kind] for v in causal.variables for kind in ("sensitivity", "invariance")}
    return Splits.checked(fit, calibration, ordered, strict=False)


def _bank(
    causal: CausalModel, bases: Tensor, paired: Tensor, family: Tensor, families: Sequence[str], name: str
) -> Bank:
    bits = len(causal.inputs) // 2
    base = rows_of(bases, bits).repeat_interleave(paired.shape[1], dim=0)
    source = rows_of(paired.flatten(), bits)
    return Bank.from_pairs(causal, base, source, name=name, family=family.repeat(len(bases)), families=families)
