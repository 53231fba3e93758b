"""Networks that compute one of several programs with the same answers, none of them, or one here and another there.

Every program answers x0 + x1 + x2 + x3 + x4 modulo three and differs in which partial sums it forms on the way. A
network that holds the sums of some blocks of inputs at its places carries exactly the sums of unions of these blocks;
the ten programs are chosen so that no network of one carries all variables of another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plot_ot.abstract.causal_model import CausalModel, Mechanism
from plot_ot.subjects import ModuleSubject, Subject
from truth.kinds import INPUTS, ROWS, bystanders, total
from truth.wiring import VALUES, Slot, Wiring

Block = tuple[int, ...]
SUMMED = 5

PROGRAMS: dict[str, tuple[Block, Block]] = {
    "01+23": ((0, 1), (2, 3)),
    "02+13": ((0, 2), (1, 3)),
    "03+12": ((0, 3), (1, 2)),
    "02+14": ((0, 2), (1, 4)),
    "04+12": ((0, 4), (1, 2)),
    "03+14": ((0, 3), (1, 4)),
    "04+13": ((0, 4), (1, 3)),
    "04+23": ((0, 4), (2, 3)),
    "012+34": ((0, 1, 2), (3, 4)),
    "013+24": ((0, 1, 3), (2, 4)),
}
OTHERS: dict[str, tuple[Block, ...]] = {
    "14+23": ((1, 4), (2, 3)),
    "124+03": ((1, 2, 4), (0, 3)),
    "023+14": ((0, 2, 3), (1, 4)),
    "0123": ((0, 1, 2, 3),),
    "at once": (),
}
"""Programs that are none of the ten; some share one of their variables."""


def causal(blocks: Sequence[Block]) -> CausalModel:
    """The program as a causal model: p and q are the sums of its blocks."""
    rest = [k for k in range(SUMMED) if not any(k in b for b in blocks)]
    names = [f"{'pq'[n]}" for n in range(len(blocks))]
    mechanisms = {n: Mechanism(tuple(f"x{k}" for k in b), _sum) for n, b in zip(names, blocks, strict=True)}
    mechanisms["y"] = Mechanism((*names, *(f"x{k}" for k in rest)), _sum)
    return CausalModel(INPUTS, mechanisms, "y", names)


def _sum(*values: Tensor) -> Tensor:
    return sum(values) % VALUES


HYPOTHESES = {name: causal(blocks) for name, blocks in PROGRAMS.items()}


def parts(blocks: Sequence[Block]) -> list[Block]:
    """The blocks, and every summand that is in none of them by itself."""
    return [*blocks, *((k,) for k in range(SUMMED) if not any(k in b for b in blocks))]


def _slots(w: Wiring, blocks: Sequence[Block]) -> dict[str, Slot]:
    return {_name(b): Slot(w.table([f"x{k}" for k in b], total)) for b in blocks}


def _name(block: Block) -> str:
    return "s" + "".join(map(str, block))


def wired(blocks: Sequence[Block], seed: int) -> Subject:
    """A network wired by hand that holds the blocks' sums at one or two places, beside bystanders."""
    w, held = Wiring(len(INPUTS), seed), parts(blocks)
    if not blocks:  # everything passes the places by
        w.place("s1", bystanders(w))
        w.hidden("first half", ("x0", "x1", "x2"), total)
        return w.network(("first half", "x3", "x4"), total, VALUES).subject()
    slant = 0.6 * w.draw(0, 2)
    w.place("s1", {**bystanders(w), **_slots(w, held)}, oblique=slant)
    last = "s1."
    if w.draw(0, 2):
        w.place("s2", {**bystanders(w), **{_name(b): w.copy(f"s1.{_name(b)}") for b in held}}, oblique=slant)
        last = "s2."
    return w.network([last + _name(b) for b in held], total, VALUES).subject()


class Trained(nn.Module):
    """An encoder trained to put the blocks' sums into random directions, and a head trained to add them up."""

    def __init__(self, blocks: Sequence[Block], seed: int, width: int = 20, hidden: int = 96) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        torch.manual_seed(seed)
        held = [*parts(blocks), (5,)]
        self.encoder = nn.Sequential(nn.Linear(VALUES * len(INPUTS), hidden), nn.ReLU(), nn.Linear(hidden, width))
        self.state = nn.Identity()
        self.head = nn.Sequential(nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, VALUES))
        codes = torch.linalg.qr(torch.randn(width, width, generator=generator))[0][:, : VALUES * len(held)]
        sums = torch.stack([ROWS[:, list(b)].sum(dim=1) % VALUES for b in held], dim=1)
        target = 2 * F.one_hot(sums, VALUES).flatten(1).float() @ codes.T
        answers = ROWS[:, :SUMMED].sum(dim=1) % VALUES
        seen = self.seen(ROWS)
        for part, given, wanted in ((self.encoder, seen, target), (self.head, target, answers)):
            optimiser = torch.optim.Adam(part.parameters(), lr=5e-3)
            for _ in range(350):
                noise = 0.15 * torch.randn(given.shape, generator=generator) if part is self.head else 0.0
                made = part(given + noise)
                loss = F.mse_loss(made, wanted) if wanted.is_floating_point() else F.cross_entropy(made, wanted)
                optimiser.zero_grad()
                loss.backward()
                optimiser.step()

    @staticmethod
    def seen(rows: Tensor) -> Tensor:
        """The inputs as the network takes them."""
        return F.one_hot(rows.long(), VALUES).flatten(1).float()

    def forward(self, seen: Tensor) -> Tensor:
        """Logits."""
        return self.head(self.state(self.encoder(seen)))


def trained(blocks: Sequence[Block], seed: int) -> Subject:
    """A trained network of a program; its places are the state and the hidden layers on both sides."""
    network = Trained(blocks, seed).eval()
    places = {"state": "state", "head": "head.1"}
    return ModuleSubject(network, places, ROWS[:1], encode=Trained.seen)


@dataclass(frozen=True)
class Switched:
    """A network that follows one program on some inputs and another on the rest."""

    subject: Subject
    first: str
    second: str
    where: Tensor
    """Which of all rows the first program is followed on."""
    rule: str


def switched(seed: int) -> Switched:
    """Both programs' sums are held; a test on x5, or on x4 and x5, tells which are added up."""
    w = Wiring(len(INPUTS), seed)
    names = list(PROGRAMS)[:8]
    one, other = (names[k] for k in torch.randperm(len(names), generator=w.generator)[:2].tolist())
    v, u, kind = w.draw(0, VALUES), w.draw(0, VALUES), w.draw(0, 3)
    tests = {
        0: (f"x5 is {v}", lambda a, b: b == v),
        1: (f"x5 is not {v}", lambda a, b: b != v),
        2: (f"x4 is {u} or x5 is {v}", lambda a, b: (a == u) | (b == v)),
    }
    rule, test = tests[kind]
    w.hidden("first", ("x4", "x5"), lambda a, b: int(test(a, b)), 2)
    both = [parts(PROGRAMS[n]) for n in (one, other)]
    held = list(dict.fromkeys([*both[0], *both[1]]))
    w.place("s1", {**_slots(w, held), "b5": w.copy("x5")})
    for n, blocks in enumerate(both):
        w.hidden(f"y{n}", [f"s1.{_name(b)}" for b in blocks], total)
        w.hidden(f"taken{n}", (f"y{n}", "first"), lambda y, first, n=n: y if first == 1 - n else -1)
    w.join("y", ("taken0", "taken1"))
    subject = w.network(("y",), lambda y: y, VALUES).subject()
    return Switched(subject, one, other, test(ROWS[:, 4], ROWS[:, 5]), rule)
