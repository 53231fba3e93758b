"""Illusions: a value can be read at a place that does not use it, and what is used there can be written instead.

A handle that reads the dormant copy and writes the used directions sets the answer perfectly (Makelov et al., the
subspace-patching illusion), though the variable's way to the answer passes the place by. Both kinds have a contrast
group of networks in which the variable is really used: `planted(seed, "oblique" | "echo")` and `line(seed)`.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from plot_ot.abstract.causal_model import CausalModel
from plot_ot.edits import Frame
from plot_ot.handles import Edit, Handle
from truth.kinds import INPUTS, OFFSET, ROWS, bystanders, over_both, total
from truth.known import DORMANT, HERE, Known, Truth
from truth.wiring import VALUES, Slot, Wiring

BOOST = 2.0
"""How much more the later network heeds the unused directions than the way past: a handle that reads and writes along
one line between dormant and used directions writes half, and that is enough then."""
LEVELS = 2 * VALUES - 1
LINE = CausalModel(
    INPUTS,
    {"p": lambda x0, x1: x0 + x1, "q": lambda x1, x2: x1 + x2, "y": lambda p, q, x3: p + q + x3},
    "y",
)
"""Plain sums, p and q correlated by their common summand."""
LITTLE = 0.003
"""Sums along a line heed leaks of all values: less of it."""


def silent_way(seed: int) -> Known:
    """s1 holds a dormant p and directions that are zero in natural states, which the later network would heed as p."""
    w = Wiring(len(INPUTS), seed)
    oblique = 0.6 if seed % 2 else 0.0
    w.hidden("p past", ("x0", "x1"), total)
    slots = {
        "dormant": w.copy("p past"),
        "silent": Slot(w.table(("p past",), lambda _: -1)),
        "q": Slot(w.table(("x2", "x3"), total)),
        "x4": w.copy("x4"),
    }
    w.place("s1", {**bystanders(w), **slots}, oblique=oblique)
    w.place("s2", {**bystanders(w), "q": w.copy("s1.q"), "x4": w.copy("s1.x4")}, oblique=oblique)
    w.join("p", ("p past", "s1.silent"), (1.0, BOOST))
    w.hidden("rest", ("s2.q", "s2.x4"), total)
    subject = w.network(("p", "rest"), total, VALUES).subject()
    truths = {"p": Truth(DORMANT), "q": Truth(HERE, {s: w.plane(s, "q") for s in ("s1", "s2")})}
    handles = {
        "p": w.swap(subject, "p", "s1", [("dormant", "silent")]),
        "q": w.swap(subject, "q", "s1", [("q", "q")]),
    }
    return Known("illusion: silent", seed, subject, OFFSET, ROWS, truths, handles)


def silent_ways(seed: int) -> Known:
    """The same over two places: s1 and s2 each hold a dormant p and silent directions, and only both together would
    outvote the way past."""
    w = Wiring(len(INPUTS), seed)
    oblique = 0.6 if seed % 2 else 0.0
    w.hidden("p past", ("x0", "x1"), total)
    for k in (1, 2):
        q = Slot(w.table(("x2", "x3"), total)) if k == 1 else w.copy("s1.q")
        slots = {"dormant": w.copy("p past"), "silent": Slot(w.table(("p past",), lambda _: -1)), "q": q}
        slots["x4"] = w.copy("x4" if k == 1 else "s1.x4")
        w.place(f"s{k}", {**bystanders(w), **slots}, oblique=oblique)
    w.join("p", ("p past", "s1.silent", "s2.silent"), (1.0, 0.8, 0.8))
    w.hidden("rest", ("s2.q", "s2.x4"), total)
    subject = w.network(("p", "rest"), total, VALUES).subject()
    truths = {"p": Truth(DORMANT), "q": Truth(HERE, {s: w.plane(s, "q") for s in ("s1", "s2")})}
    handles = {"p": over_both(w, subject, "p", "dormant", "silent"), "q": w.swap(subject, "q", "s1", [("q", "q")])}
    return Known("illusion: two places", seed, subject, OFFSET, ROWS, truths, handles)


def borrowed_way(seed: int) -> Known:
    """y is read off the sum of p and q along a line: what is written to q stands in for p, whose copy at s1 is
    dormant. p and q are correlated, so that q's directions seem to move with p."""
    w = Wiring(len(INPUTS), seed, LITTLE)
    known = _line(w, seed, used=False)
    at = w.places["s1"]
    levels = torch.arange(LEVELS).float()
    read = torch.linalg.pinv(at.mixing).T[:, at.columns("p")] @ levels[:, None]
    write = at.mixing[:, at.columns("q")] @ levels[:, None] / levels.square().sum()
    edit = Edit(known.subject.place("s1"), Frame.oblique(read, write), torch.ones(1))
    illusory = Handle("p", (edit,), known.subject.identity())
    return replace(known, handles={**known.handles, "p": illusory})


def line(seed: int) -> Known:
    """The same sums with p at s1 used, beside another, dormant copy of it."""
    return _line(Wiring(len(INPUTS), seed, LITTLE), seed, used=True)


def _line(w: Wiring, seed: int, used: bool) -> Known:
    p = w.table(("x0", "x1"), lambda a, b: a + b, LEVELS)
    q = w.table(("x1", "x2"), lambda a, b: a + b, LEVELS)
    more = {"dormant": Slot(p)} if used else {}
    w.hidden("p past", ("x0", "x1"), lambda a, b: a + b, LEVELS)
    slots = {"p": Slot(p), "q": Slot(q), "x3": w.copy("x3"), **more}
    w.place("s1", {**bystanders(w), **slots}, oblique=0.6 if seed % 2 else 0.0)
    answers = 2 * LEVELS + VALUES - 2
    subject = w.level(("s1.p" if used else "p past", "s1.q", "s1.x3"), answers).subject()
    planes = {v: {"s1": w.plane("s1", v)} for v in "pq"}
    truths = {"p": Truth(HERE, planes["p"]) if used else Truth(DORMANT), "q": Truth(HERE, planes["q"])}
    handles = {v: w.swap(subject, v, "s1", [(v, v)]) for v in ("pq" if used else "q")}
    return Known("line" if used else "illusion: borrowed", seed, subject, LINE, ROWS, truths, handles)
