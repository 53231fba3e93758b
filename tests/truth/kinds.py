"""Kinds of wired networks: variables that are there, there in part, not there, beside their parents, sharing a place.

Inputs x0..x5 have three values each. Unless told otherwise the hypothesis is p = x0 + x1, q = x2 + x3, y = p + q, all
modulo three; x4 and x5 drive bystanders. Places are s1, s2, ... in forward order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from plot_ot.abstract.causal_model import CausalModel
from plot_ot.handles import Handle
from plot_ot.subjects import Subject
from truth.known import ABSENT, HERE, IN_PART, Known, Truth
from truth.wiring import VALUES, Slot, Wiring

INPUTS = [f"x{k}" for k in range(6)]
ROWS = torch.cartesian_prod(*[torch.arange(VALUES)] * len(INPUTS))
QUIET, LOUD = 0.25, 4.0


def total(*values: int) -> int:
    """The sum modulo three."""
    return sum(values) % VALUES


SUMS = CausalModel(
    INPUTS,
    {
        "p": lambda x0, x1: (x0 + x1) % VALUES,
        "q": lambda x2, x3: (x2 + x3) % VALUES,
        "y": lambda p, q: (p + q) % VALUES,
    },
    "y",
)


def bystanders(wiring: Wiring, scale: float = 1.0) -> dict[str, Slot]:
    """Slots that nothing reads: x4, x5 and their sum."""
    together = Slot(wiring.table(("x4", "x5"), total), scale)
    return {"b4": wiring.copy("x4", scale), "b5": wiring.copy("x5", scale), "b45": together}


PLACES = 2


def planted(seed: int, kind: str = "plant") -> Known:
    """p and q at one or both of two places, each from where it is computed on; before, one summand is in its stead.

    `quiet`: among loud bystanders; `copies`: each in two subspaces of its places, and an answer needs both to agree;
    `oblique`: in directions that are not orthogonal to the others; `echo`: oblique, with a dormant copy of p beside it.
    """
    w = Wiring(len(INPUTS), seed)
    first = {"p": w.draw(1, PLACES + 1), "q": w.draw(1, PLACES + 1)}
    of = {"p": ("x0", "x1"), "q": ("x2", "x3")}
    loud, quiet = (LOUD, QUIET) if kind == "quiet" else (1.0, 1.0)
    names = {v: (v, f"{v} again") if kind == "copies" else (v,) for v in of}
    for k in range(1, PLACES + 1):
        slots = bystanders(w, loud)
        for v, (one, other) in of.items():
            at = "" if k == 1 else f"s{k - 1}."
            if k < first[v]:
                slots[one] = w.copy(at + one, quiet)
            for name in names[v] if k >= first[v] else ():
                slots[name] = (
                    w.copy(at + name, quiet) if k > first[v] else Slot(w.table((at + one, other), total), quiet)
                )
        if kind == "echo":
            slots["dormant"] = Slot(w.table(of["p"], total))
        w.place(f"s{k}", slots, oblique=0.6 if kind in ("oblique", "echo") else 0.0)
    last = f"s{PLACES}."
    if kind == "copies":
        votes = [w.hidden(f"y{k}", [last + names[v][k] for v in of], total) for k in (0, 1)]
        subject = w.network(votes, lambda a, b: a if a == b else -1, VALUES).subject()
    else:
        subject = w.network((last + "p", last + "q"), total, VALUES).subject()
    truths, handles = {}, {}
    for v in of:
        carried = {f"s{k}": w.plane(f"s{k}", *names[v]) for k in range(first[v], PLACES + 1)}
        truths[v] = Truth(HERE, carried)
        handles[v] = w.swap(subject, v, f"s{first[v]}", [(n, n) for n in names[v]])
    return Known(kind, seed, subject, SUMS, ROWS, truths, handles)


MORE_INPUTS = [*INPUTS, "x6"]
MORE_ROWS = torch.cartesian_prod(*[torch.arange(VALUES)] * len(MORE_INPUTS))
OFFSET_SUMS = {
    "p": lambda x0, x1: (x0 + x1) % VALUES,
    "q": lambda x2, x3: (x2 + x3) % VALUES,
    "y": lambda p, q, x4: (p + q + x4) % VALUES,
}
OFFSET = CausalModel(INPUTS, OFFSET_SUMS, "y")
"""With x4 in the answer, copying the source is right on a third of the pairs only, whichever variable changes."""


def half_carried(seed: int) -> Known:
    """On five or six ninths of the inputs, told by x4 and x5, p reaches the answer through s1; q does on all.

    On the others p passes both places by (even seeds), or it goes through s2 only, where nothing of s1 arrives (odd
    seeds): there each place carries a part. A seventh input that nothing uses makes base inputs enough to tell such
    shares from a whole.
    """
    w = Wiring(len(MORE_INPUTS), seed)
    elsewhere = seed % 2 == 1
    share = w.draw(5, 7)
    chosen = set(torch.randperm(VALUES**2, generator=w.generator)[:share].tolist())
    w.hidden("through", ("x4", "x5"), lambda x4, x5: int(VALUES * x4 + x5 in chosen), 2)
    w.hidden("p past", ("x0", "x1"), total)
    common = {"b0": w.copy("x0"), "b45": Slot(w.table(("x4", "x5"), total))}
    w.place("s1", {**common, "p": Slot(w.table(("x0", "x1"), total)), "q": Slot(w.table(("x2", "x3"), total))})
    w.place("s2", {**common, "p": w.copy("p past" if elsewhere else "s1.p"), "q": w.copy("s1.q")})
    w.hidden("taken", ("s1.p" if elsewhere else "s2.p", "through"), lambda p, t: p if t else -1)
    w.hidden("passed", ("s2.p" if elsewhere else "p past", "through"), lambda p, t: -1 if t else p)
    w.join("p", ("taken", "passed"))
    subject = w.network(("p", "s2.q", "x4"), total, VALUES).subject()
    carried = {v: {s: w.plane(s, v) for s in ("s1", "s2")} for v in "pq"}
    truths = {"p": Truth(IN_PART, carried["p"], share=share / VALUES**2), "q": Truth(HERE, carried["q"])}
    handles = {v: w.swap(subject, v, "s1", [(v, v)]) for v in "pq"}
    causal = CausalModel(MORE_INPUTS, OFFSET_SUMS, "y")
    return Known("half", seed, subject, causal, MORE_ROWS, truths, handles, size=480)


def copies_apart(seed: int) -> Known:
    """Two copies of p, at s1 and at s2, made from the inputs apart; an answer needs both to agree."""
    w = Wiring(len(INPUTS), seed)
    w.place("s1", {**bystanders(w), "p": Slot(w.table(("x0", "x1"), total))})
    w.place("s2", {**bystanders(w), "p": Slot(w.table(("x0", "x1"), total)), "q": Slot(w.table(("x2", "x3"), total))})
    w.hidden("y1", ("s1.p", "s2.q"), total)
    w.hidden("y2", ("s2.p", "s2.q"), total)
    net = w.network(("y1", "y2"), lambda a, b: a if a == b else -1, VALUES)
    subject = net.subject()
    both = {s: w.plane(s, "p") for s in ("s1", "s2")}
    truths = {"p": Truth(HERE, both, together=True), "q": Truth(HERE, {"s2": w.plane("s2", "q")})}
    handles = {"p": over_both(w, subject, "p", "p", "p"), "q": w.swap(subject, "q", "s2", [("q", "q")])}
    return Known("apart", seed, subject, SUMS, ROWS, truths, handles)


def over_both(w: Wiring, subject: Subject, variable: str, read: str, write: str) -> Handle:
    """The handle that swaps a slot at s1 and at s2, or writes what it reads there to another slot."""
    parts = [w.swap(subject, variable, s, [(read, write)]) for s in ("s1", "s2")]
    return replace(parts[0], edits=tuple(e for h in parts for e in h.edits))


def spread(seed: int) -> Known:
    """p in two parts: s1 holds whether it is 0, s2 whether it is 1, and only both together tell it. q is at s2."""
    w = Wiring(len(INPUTS), seed)
    oblique = 0.6 if seed % 2 else 0.0

    def whether(value: int) -> Slot:
        return Slot(w.table(("x0", "x1"), lambda a, b: int(total(a, b) == value), 2))

    w.place("s1", {**bystanders(w), "part": whether(0)}, oblique=oblique)
    w.place("s2", {**bystanders(w), "part": whether(1), "q": Slot(w.table(("x2", "x3"), total))}, oblique=oblique)
    w.hidden("p", ("s1.part", "s2.part"), lambda zero, one: 0 if zero else 1 if one else 2)
    subject = w.network(("p", "s2.q"), total, VALUES).subject()
    parts = {s: w.plane(s, "part") for s in ("s1", "s2")}
    truths = {"p": Truth(HERE, parts, together=True), "q": Truth(HERE, {"s2": w.plane("s2", "q")})}
    handles = {"p": over_both(w, subject, "p", "part", "part"), "q": w.swap(subject, "q", "s2", [("q", "q")])}
    return Known("spread", seed, subject, SUMS, ROWS, truths, handles)


def absent(seed: int) -> Known:
    """The same answers without p and q: through x0 + x2 and x1 + x3, as a running total, or looked up at once."""
    w = Wiring(len(INPUTS), seed)
    how = ("other sums", "running total", "at once")[seed % 3]
    steps: dict[str, tuple[tuple[str, ...], ...]] = {
        "other sums": (("x0", "x2"), ("x1", "x3")),
        "running total": (("x0", "x2"), ("x1",), ("x3",)),
        "at once": (("x0", "x1", "x2", "x3"),),
    }
    if how == "other sums":
        first = {"a": w.draw(1, 4), "b": w.draw(1, 4)}
        for k in range(1, 4):
            held = bystanders(w)
            for name, parents in zip("ab", steps[how], strict=True):
                if k == first[name]:
                    held[name] = Slot(w.table(parents, total))
                elif k > first[name]:
                    held[name] = w.copy(f"s{k - 1}.{name}")
            w.place(f"s{k}", held)
        answer = ("s3.a", "s3.b")
    else:
        for k, summands in enumerate(steps[how], 1):
            before = (f"s{k - 1}.sum",) if k > 1 else ()
            w.place(f"s{k}", {**bystanders(w), "sum": Slot(w.table((*before, *summands), total))})
        for k in range(len(steps[how]) + 1, 4):
            w.place(f"s{k}", {**bystanders(w), "sum": w.copy(f"s{k - 1}.sum")})
        answer = ("s3.sum",)
    subject = w.network(answer, total, VALUES).subject()
    return Known("absent", seed, subject, SUMS, ROWS, {v: Truth(ABSENT) for v in "pq"})


SHARED = CausalModel(
    INPUTS,
    {
        "p": lambda x0, x1: (x0 + x1) % VALUES,
        "q": lambda x1, x2: (x1 + x2) % VALUES,
        "y": lambda p, q: (p + q) % VALUES,
    },
    "y",
)


def beside_parents(seed: int, shared: bool) -> Known:
    """Places with the summands, then places with the sums. `shared`: p and q have the summand x1 in common."""
    w = Wiring(len(INPUTS), seed)
    of = {"p": ("x0", "x1"), "q": ("x1", "x2") if shared else ("x2", "x3")}
    raw, depth = w.draw(1, 3), 4
    digits = ["x0", "x1", "x2", "x3"][: 3 if shared else 4]
    for k in range(1, depth + 1):
        slots = bystanders(w)
        before = "" if k == 1 else f"s{k - 1}."
        if k <= raw:
            slots |= {x: w.copy(before + x) for x in digits}
        elif k == raw + 1:
            slots |= {v: Slot(w.table([before + x for x in parents], total)) for v, parents in of.items()}
        else:
            slots |= {v: w.copy(before + v) for v in of}
        w.place(f"s{k}", slots)
    subject = w.network((f"s{depth}.p", f"s{depth}.q"), total, VALUES).subject()
    early = frozenset(f"s{k}" for k in range(1, raw + 1))
    truths = {v: Truth(HERE, {f"s{k}": w.plane(f"s{k}", v) for k in range(raw + 1, depth + 1)}, early) for v in of}
    handles = {v: w.swap(subject, v, f"s{raw + 1}", [(v, v)]) for v in of}
    kind = "parents shared" if shared else "parents"
    return Known(kind, seed, subject, SHARED if shared else SUMS, ROWS, truths, handles)


def gate_pair(seed: int) -> Known:
    """a = (x0 = x1) and b = (x2 = x3) share one of seven places, and y is a AND b, or a OR b by the seed's parity.

    Earlier places hold one summand of each, later ones y: patched whole, the shared place copies the source, as the
    later ones do, and so does no single variable.
    """
    w = Wiring(len(INPUTS), seed)
    disjunction = seed % 2 == 1
    at, depth = w.draw(3, 6), 7

    def equal(a: int, b: int) -> int:
        return int(a == b)

    def gate(a: int, b: int) -> int:
        return int(a or b) if disjunction else int(a and b)

    early = w.draw(1, at)
    for k in range(1, depth + 1):
        slots = _some_bystanders(w, k)
        if k == early:
            slots |= {"x0": w.copy("x0"), "x2": w.copy("x2")}
        elif k == at:
            slots["a"] = Slot(w.table((f"s{early}.x0", "x1"), equal, 2))
            slots["b"] = Slot(w.table((f"s{early}.x2", "x3"), equal, 2))
        elif k == at + 1:
            slots["y"] = Slot(w.table((f"s{at}.a", f"s{at}.b"), gate, 2))
        elif k > at:
            slots["y"] = w.copy(f"s{k - 1}.y")
        w.place(f"s{k}", slots)
    subject = w.network((f"s{depth}.y",), lambda y: y, 2).subject()
    combine: Callable[..., torch.Tensor] = (lambda a, b: a | b) if disjunction else (lambda a, b: a & b)
    causal = CausalModel(INPUTS, {"a": lambda x0, x1: x0 == x1, "b": lambda x2, x3: x2 == x3, "y": combine}, "y")
    place = f"s{at}"
    truths = {v: Truth(HERE, {place: w.plane(place, v)}) for v in "ab"}
    handles = {v: w.swap(subject, v, place, [(v, v)]) for v in "ab"}
    return Known("gate", seed, subject, causal, ROWS, truths, handles, size=1000)


def _some_bystanders(w: Wiring, k: int) -> dict[str, Slot]:
    return {f"b{k % 2}": w.copy(f"x{4 + k % 2}"), "b45": Slot(w.table(("x4", "x5"), total))}
