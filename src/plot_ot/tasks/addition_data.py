"""Binary addition: the ripple-carry model, networks that add, and their banks (paper, Section 4.2 and Appendix B.2).

An input is written as a code a·2ⁿ + b, so that codes in rising order are inputs in order of (a, b).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Int
from safetensors.torch import save
from torch import Tensor

from plot_ot.abstract.banks import Bank, Splits, distinct_rows
from plot_ot.abstract.causal_model import CausalModel, Mechanism, same
from plot_ot.errors import PlotError, unknown
from plot_ot.files.safe_reading import UNREADABLE, parse_json, read_tensors
from plot_ot.files.writing import require_writable, to_json, write_atomically
from plot_ot.studies.task import SeedFailed
from plot_ot.subjects.gru import GRUNet, GRUSubject

LEAST_BITS, MOST_BITS = 2, 16
TABLE = 1024
"""A truth table of at most this many inputs (5 bits) is used whole; of a larger one this many are sampled."""
BASES = 256
"""Base inputs of the banks: the paper's whole table of 4 bits, and as many sampled ones of more."""
HELD_OUT = 16_384
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
        meanings={f"C{i}": f"the carry into bit {i}" for i in range(1, bits)},
    )


# -- inputs ---------------------------------------------------------------------------------------------------


def rows_of(codes: Int[Tensor, " rows"], bits: int) -> Int[Tensor, "rows digits"]:
    """The input rows A_0..A_{n-1}, B_0..B_{n-1} of codes."""
    shifts = torch.cat([torch.arange(bits) + bits, torch.arange(bits)])
    return codes.unsqueeze(1) >> shifts & 1


def draw_inputs(bits: int, count: int, seed: int) -> Int[Tensor, " drawn"]:
    """Codes of all inputs when there are at most `count`, else of that many different ones, in random order."""
    if 4**bits <= count:
        return torch.arange(4**bits)
    return torch.tensor(random.Random(seed).sample(range(4**bits), count))


def longest_run(codes: Int[Tensor, " rows"], bits: int) -> Int[Tensor, " rows"]:
    """The longest run of active carries among C_1..C_n."""
    values = causal_model(bits).run(rows_of(codes, bits))
    run = longest = torch.zeros_like(codes)
    for i in range(1, bits + 1):
        run = (run + 1) * values[f"C{i}"]
        longest = torch.maximum(longest, run)
    return longest


# -- the network ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Recipe:
    """A training recipe: how long and how fast to train."""

    rate: float
    epochs: int
    first_exact: bool
    """Stop at the first exact epoch."""


RECIPES = {"paper": Recipe(0.01, 250, False), "first-exact": Recipe(0.02, 120, True)}


@dataclass(frozen=True)
class Adder:
    """A network to train: the number of bits, the width d of its state, the training recipe by name."""

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
    def right(self, rows: Int[Tensor, "rows digits"]) -> Bool[Tensor, " rows"]:
        """Whether all n + 1 bits are right, for each input."""
        return same(self.net(self._encode(rows)) >= 0, causal_model(self.adder.bits).answer(rows))

    @property
    def accuracy(self) -> float:
        """Share of exact sums among all inputs or, beyond 5 bits, among 16,384 that training did not see."""
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
        """The network as a subject that can be recorded and resumed."""
        return GRUSubject(self.net, self.adder.bits)

    def _encode(self, rows: Tensor) -> Tensor:
        return self.subject().encode(rows)


def _examples(bits: int, seed: int) -> tuple[Int[Tensor, "rows digits"], Int[Tensor, "others digits"]]:
    """Training inputs, and those that exactness is judged on: the whole table twice, or two samples.

    Samples hold carry chains of all lengths, each row having its own chance that a digit passes its carry on (A ≠ B):
    among uniform rows long chains are so rare that a network wrong on them would go unnoticed.
    """
    if 4**bits <= TABLE:
        rows = rows_of(torch.arange(4**bits), bits)
        return rows, rows
    generator = torch.Generator().manual_seed(20_000 + seed)
    count = TABLE + HELD_OUT
    a = torch.randint(2, (count, bits), generator=generator)
    passes = torch.rand(count, bits, generator=generator) < torch.rand(count, 1, generator=generator)
    rows = distinct_rows(torch.cat([a, a ^ passes], dim=1))
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


def backbone_path(adder: Adder, seed: int, cache: Path) -> Path:
    """The file of a seed's network in the cache."""
    return cache / f"addition-{adder.bits}bit-d{adder.width}-{adder.recipe}-{seed}.safetensors"


def load_backbone(adder: Adder, seed: int, cache: Path) -> Backbone:
    """The backbone of a seed, from the cache or trained now; one thread, so that every machine agrees with itself."""
    path = backbone_path(adder, seed, cache)
    if path.exists():
        backbone = read_backbone(path, adder)
        if backbone.seed != seed:
            raise PlotError(f"The checkpoint {path} is of seed {backbone.seed}, not {seed}. Delete or rename it.")
        return backbone
    require_writable(cache)
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
        metadata, tensors = read_tensors(path)
        header = parse_json(metadata["plot_ot"])
        if header["format"] != FORMAT:
            raise ValueError(f"format {header['format']!r}, not {FORMAT!r}")
        found = Adder(int(header["bits"]), int(header["width"]), str(header["recipe"]))
        if found != adder:
            raise PlotError(f"The checkpoint {path} holds a {found}; wanted is a {adder}. Delete or rename it.")
        if {n: t.shape for n, t in tensors.items()} != {n: t.shape for n, t in net.state_dict().items()}:
            raise ValueError("its tensors are not those of such a network")
        net.load_state_dict(tensors)
        backbone = Backbone(adder, int(header["seed"]), net.requires_grad_(False), int(header["epochs"]))
    except FileNotFoundError:
        raise PlotError(f"There is no checkpoint at {path}.") from None
    except UNREADABLE as e:
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

    For C_i: of all inputs with another C_i, the first ranked by (mismatches among S_0..S_{i-1}; other differing bits
    among C_1..C_n, S_0..S_{n-1}; Hamming distance of the inputs; a; b).
    """
    _, sizes = source_families(bits)
    flips = 1 << torch.cat([torch.arange(bits) + bits, torch.arange(bits)])
    targeted = [_carry_targeted(bases, bits, i, size) for i, size in enumerate(sizes[2 * bits :], 1)]
    return torch.cat([bases.unsqueeze(1) ^ flips, *targeted], dim=1)


def _carry_targeted(bases: Tensor, bits: int, i: int, size: int) -> Int[Tensor, "bases size"]:
    """The ranking is one integer key that sums over digits, so its smallest values are the shortest paths through the
    adder: exact for any number of bits, without going through the inputs. A path's state is the source's carry."""
    base = causal_model(bits).run(rows_of(bases, bits))
    x, y, carry = torch.cartesian_prod(*[torch.arange(2)] * 3).unbind(dim=1)
    digit, carried = (x + y + carry) % 2, (x + y + carry) // 2
    never, worse = 1 << 60, 2 * bits + 1
    best = torch.full((len(bases), 2, size), never)
    best[:, 0, 0] = 0
    for j in range(bits):
        a, b, s, c = (base[f"{name}{k}"].unsqueeze(1) for name, k in zip("ABSC", (j, j, j, j + 1), strict=True))
        sums, carries, flips = (digit ^ s), (carried ^ c), (x ^ a) + (y ^ b)
        rank = (sums * (j < i) * worse + sums + carries * (j + 1 != i)) * worse + flips
        key = (rank << 2 * bits) + (x << bits + j) + (y << j)  # ends with the source's code: a, then b
        key += (1 - carries) * never * (j + 1 == i)
        grown = best[:, carry] + key.unsqueeze(2)
        best = torch.stack([grown[:, carried == k].flatten(1).topk(size, largest=False).values for k in (0, 1)], dim=1)
    nearest: Tensor = best.flatten(1).topk(size, largest=False).values & (4**bits - 1)
    return nearest


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


def draw_splits(seed: int, bits: int = 4, split: str = "round-robin", *, bases: int = BASES) -> Splits:
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
    tests: dict[tuple[str, str], Bank] = {}
    for v in causal.variables:
        tests |= {(v, "sensitivity"): test.sensitive(v), (v, "invariance"): test.invariant(v)}
    return Splits.checked(fit, calibration, tests, strict=False)


def _bank(
    causal: CausalModel, bases: Tensor, paired: Tensor, family: Tensor, families: Sequence[str], name: str
) -> Bank:
    bits = len(causal.inputs) // 2
    base = rows_of(bases, bits).repeat_interleave(paired.shape[1], dim=0)
    source = rows_of(paired.flatten(), bits)
    return Bank.from_pairs(causal, base, source, name=name, family=family.repeat(len(bases)), families=families)
