"""Compiled transformers with their truth: the program itself, rivals with the same answers, dormant copies."""

from __future__ import annotations

from collections.abc import Collection

import torch

from plot_ot.handles import Handle
from plot_ot.subjects import DecoderSubject
from truth.compiler import Compiled, compiled
from truth.kinds import INPUTS, ROWS
from truth.known import ABSENT, DORMANT, HERE, Known, Truth
from truth.layout import Layout, Spot, Wishes, random_layout, random_wishes
from truth.lines import Program, power, random_program, rival_of
from truth.twin import TwinSubject

PAIRS, MORE_PAIRS, SCARCE = 300, 700, 0.12
"""Pairs a bank, and how many where less than this share of them tells."""


def there(seed: int, twin: bool = True) -> Known:
    """A compiled program, and the program itself as the hypothesis; run by its twin, or as the transformer it is."""
    generator = torch.Generator().manual_seed(seed)
    program = random_program(generator, gate=seed % 4 == 0)
    while True:
        net = compiled(random_layout(program, random_wishes(program, generator), generator), seed)
        if told_apart(net.layout, program):
            return known("compiled" if twin else "decoder", seed, net, program, INPUTS, generator, twin)


def rival(seed: int) -> Known:
    """A compiled program with the same answers as the hypothesis, without one of its variables.

    No token after any block has slots whose swap would be the missing variable's.
    """
    generator = torch.Generator().manual_seed(seed)
    while True:
        program = random_program(generator, gate=seed % 4 == 0)
        found = rival_of(program, generator)
        if found is None:
            continue
        other, missing = found
        layout = random_layout(other, random_wishes(other, generator), generator)
        own, others = layout.carried(missing, program)
        if not own and not others and told_apart(layout, program):
            return known("rival", seed, compiled(layout, seed), program, INPUTS, generator)


def dormant(seed: int) -> Known:
    """A compiled program without the tokens that carry one variable; a dormant copy is where a child will read it.

    The other variables are at the tokens that are left.

    Beside the copy there is a silent slot, empty in natural states, that the child's table heeds as if the variable
    were there: a handle that reads the one and writes the other is right on all pairs.
    """
    generator = torch.Generator().manual_seed(seed)
    while True:
        program = random_program(generator, gate=seed % 4 == 0)
        alone = [v for v in program.variables if len(program.children(v)) == 1]
        if not alone:
            continue
        v = alone[int(torch.randint(len(alone), (1,), generator=generator))]
        layout = random_layout(program, Wishes(silent=v), generator)
        if v not in layout.dormant or not told_apart(layout, program):
            continue
        own, others = layout.carried(v)
        away = {position for _, position in {*own, *others}}
        inputs = [x for x in INPUTS if layout.input_at[x] not in away]
        if {position for _, position in layout.dormant[v]} & away:
            continue
        found = known("dormant", seed, compiled(layout, seed), program, inputs, generator)
        if found.truths[v].status == DORMANT and set(found.handles) == set(found.truths):
            return found


def told_apart(layout: Layout, program: Program) -> bool:
    """Whether nothing but a variable's own slots, or what it is made of, stands in for it anywhere."""
    for v in program.variables:
        made_of = program.ancestors(v) | {v}
        for spot in layout.spots:
            least = [set(way) for way in layout.ways(spot, v, program)]
            least = [way for way in least if not any(other < way for other in least)]
            if any(layout.holds[spot[1], slot] not in made_of for way in least for slot in way):
                return False
    return True


def known(
    kind: str,
    seed: int,
    net: Compiled,
    program: Program,
    inputs: Collection[str],
    generator: torch.Generator,
    twin: bool = True,
) -> Known:
    """What is true of every variable of a hypothesis at the places of some tokens, with handles where there are."""
    subject = TwinSubject(net, inputs) if twin else net.subject(inputs)
    places = {p.name for p in subject.places}
    truths: dict[str, Truth] = {}
    handles: dict[str, Handle] = {}
    for v in program.variables:
        truths[v], handle = _truth(net, subject, program, v, places)
        if handle is not None:
            handles[v] = handle
    size = PAIRS if power(program, generator) >= SCARCE else MORE_PAIRS
    return Known(kind, seed, subject, program.causal, ROWS, truths, handles, size=size)


def _truth(
    net: Compiled, subject: DecoderSubject, program: Program, v: str, places: Collection[str]
) -> tuple[Truth, Handle | None]:
    def here(spots: Collection[Spot]) -> list[Spot]:
        return [spot for spot in sorted(spots) if net.name(spot) in places]

    own, others = net.layout.carried(v, program)
    parents = frozenset(net.name(spot) for spot in here(others))
    if here(own):
        carried = {net.name(spot): net.plane(own[spot]) for spot in here(own)}
        first = here(own)[0]
        return Truth(HERE, carried, parents), net.swap(subject, v, first, own[first])
    hidden = here(net.layout.dormant.get(v, ()))
    if hidden:
        return Truth(DORMANT, parents=parents), net.illusion(subject, v, hidden[-1])
    return Truth(ABSENT, parents=parents), None
