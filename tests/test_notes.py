"""Notes: each says its sentence when it should, and nothing when it should not."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from nets import rand
from plot_ot.abstract.banks import Bank
from plot_ot.abstract.causal_model import CausalModel
from plot_ot.edits import Frame
from plot_ot.handles import Edit, Handle
from plot_ot.judging.naturalness import naturalness
from plot_ot.judging.notes import PARENTS, STRETCH, notes_on, share_of_parents, untried
from plot_ot.signatures import as_readout
from plot_ot.sites import neurons
from plot_ot.stages.problem import Candidate, Problem, State
from plot_ot.subjects import BankRecording, MLPSubject, record
from plot_ot.transport import Coupling, Degeneracy, Flag

VALUES = 3
INPUTS = tuple("abcde")
ROWS = torch.cartesian_prod(*[torch.arange(VALUES)] * len(INPUTS))
ALONE = CausalModel(
    INPUTS,
    {"p": lambda a, b: (a + b) % VALUES, "q": lambda c, d: (c + d) % VALUES, "y": lambda p, q: (p + q) % VALUES},
    "y",
)
SHARED = CausalModel(
    INPUTS,
    {"p": lambda a, b: (a + b) % VALUES, "q": lambda b, c: (b + c) % VALUES, "y": lambda p, q: (p + q) % VALUES},
    "y",
)
WIDTH = 12
SLOTS = {"p": slice(0, 3), "a": slice(3, 6), "b": slice(6, 9)}
"""Where states hold one-hot codes of p and of its parents; the last three directions are noise."""


def recording_of(causal: CausalModel, seed: int = 0, count: int = 300, places: int = 3) -> BankRecording:
    generator = torch.Generator().manual_seed(seed)
    base, source = (ROWS[torch.randint(len(ROWS), (count,), generator=generator)] for _ in range(2))
    layers = [torch.nn.Linear(len(INPUTS), WIDTH), torch.nn.Tanh()]
    for _ in range(places - 1):
        layers += [torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh()]
    [recording] = record(
        MLPSubject(torch.nn.Sequential(*layers, torch.nn.Linear(WIDTH, VALUES))), Bank.from_pairs(causal, base, source)
    )
    inputs = recording.store.inputs
    values = causal.run(inputs)
    coded = {**{v: values[v] for v in "p"}, "a": inputs[:, 0], "b": inputs[:, 1]}
    for place in recording.subject.places:
        states = 0.05 * rand(seed + 1, len(inputs), WIDTH)
        for name, where in SLOTS.items():
            states[:, where] += torch.nn.functional.one_hot(coded[name].long(), VALUES).float()
        recording.store.activations[place.name] = states
    return recording


def reading(recording: BankRecording, *names: str, strength: float = 1.0, **chosen: object) -> Handle:
    """A handle that swaps some slots at the first place."""
    place = recording.subject.places[0]
    gains = torch.zeros(WIDTH)
    for name in names:
        gains[SLOTS[name]] = strength
    edit = Edit(place, Frame.identity(WIDTH), gains)
    return Handle("p", (edit,), recording.subject.identity(), chosen)


def problem_of(recording: BankRecording) -> Problem:
    return Problem(recording.subject, recording, recording, ("p",), as_readout("softmax"))


def said(handle: Handle, recording: BankRecording, state: State | None = None) -> list[str]:
    return notes_on(handle, state or State({}), problem_of(recording), recording)


@pytest.fixture(scope="module")
def shared() -> BankRecording:
    return recording_of(SHARED)


@pytest.fixture(scope="module")
def alone() -> BankRecording:
    return recording_of(ALONE)


def test_there_is_nothing_to_say_about_an_ordinary_handle(shared, alone):
    assert said(reading(shared, "p"), shared) == []
    assert said(reading(alone, "p"), alone) == []


def test_choices_at_the_edge_of_their_grid_are_passed_on(shared):
    edge = ["its strength 8 is the largest that was tried", "its 8 sites are the most that were tried"]
    assert said(reading(shared, "p", at_edge=edge), shared) == edge


def test_states_pushed_far_out_are_noted_and_natural_ones_are_not(shared):
    assert STRETCH == 1.5
    for strength in (1.0, 4.0):
        handle = reading(shared, "p", strength=strength)
        stretch = naturalness(handle, shared, shared).stretch
        expected = [f"it pushes states {stretch:.1f} times as far out as natural ones lie"]
        assert (stretch > STRETCH) == (strength == 4.0)
        assert said(handle, shared) == (expected if strength == 4.0 else [])


def with_flags(recording: BankRecording, *kinds: Degeneracy, variable: str = "p") -> State:
    family = neurons(recording, recording.subject.places)
    plan = np.full((1, len(family)), 1 / len(family))
    coupling = Coupling((variable,), tuple(s.name for s in family.sites), plan, plan, "eot")
    flagged = [replace(coupling, flags=(Flag(kind, "somewhere"),)) for kind in kinds]
    return State({}, candidates={variable: tuple(Candidate(family, c) for c in flagged)})


def test_only_serious_flags_of_the_coupling_behind_a_handle_are_noted(shared):
    serious = [kind for kind in Degeneracy if kind.serious]
    minor = [kind for kind in Degeneracy if not kind.serious]
    assert serious
    assert minor
    chosen = reading(shared, "p", K=1)
    assert said(chosen, shared, with_flags(shared, *minor)) == []
    names = ", ".join(sorted(str(kind) for kind in serious[:2]))
    flagged = with_flags(shared, serious[1], *minor, serious[0], serious[0])
    assert said(chosen, shared, flagged) == [f"the coupling behind it is flagged: {names}"]
    assert said(reading(shared, "p"), shared, flagged) == []  # it was not read off a coupling
    assert said(chosen, shared, with_flags(shared, serious[0], variable="q")) == []


def test_places_that_do_as_well_are_named_with_the_earliest(shared):
    first, second, third = (p.name for p in shared.subject.places)
    bases = len(shared.bank.base_groups().unique())
    noise = 2 * math.sqrt(0.9 * 0.1 / bases)

    def at(place: str, **scores: float) -> list[str]:
        handle = reading(shared, "p", by_support=scores)
        edit = replace(handle.edits[0], place=shared.subject.place(place))
        return said(replace(handle, edits=(edit,)), shared)

    assert at(second, **{second: 0.9}) == []
    assert at(second, **{first: 0.9 - noise - 0.01, second: 0.9, third: 0.9 - noise - 0.01}) == []
    one = [f"{third} does about as well on calibration; the earliest of these places is {second}"]
    assert at(second, **{first: 0.5, second: 0.9, third: 0.9 - noise + 1e-3}) == one
    two = [f"{first}, {third} do about as well on calibration; the earliest of these places is {first}"]
    assert at(second, **{third: 0.9, second: 0.9, first: 0.95}) == two
    assert at(second, **{first: 0.9, third: 0.9}) == []  # the place itself was not scored
    assert at(second, **{second: 0.9, "somewhere": 0.9}) == []


def test_rivals_of_a_handle_that_hardly_works_are_not_named(shared):
    """Half is what a handle that does nothing scores."""
    first, second, _ = (p.name for p in shared.subject.places)
    bases = len(shared.bank.base_groups().unique())
    for best, named in ((0.55, False), (0.5 + 2 * math.sqrt(0.25 / bases) + 0.02, True)):
        assert bool(said(reading(shared, "p", by_support={first: best, second: best}), shared)) == named
    # a perfect score is not known exactly either: the noise of one error in all inputs
    slack = 2 / bases
    for below, named in ((slack * 0.9, True), (slack * 1.1, False)):
        scores = {first: 1.0, second: 1.0 - below}
        assert bool(said(reading(shared, "p", by_support=scores), shared)) == named


def test_a_handle_at_several_places_has_no_rivals(shared):
    first, second, _ = shared.subject.places
    handle = reading(shared, "p", by_support={first.name: 0.9, second.name: 0.9})
    assert said(handle, shared)
    both = replace(handle, edits=(handle.edits[0], replace(handle.edits[0], place=second)))
    assert all("pushes states" in note for note in said(both, shared))


def test_untried_places_are_named_up_to_six(shared):
    assert untried(reading(shared, "p")) == []
    assert untried(reading(shared, "p", untried=[])) == []
    words = "these places were compared whole but not looked into: "
    names = [f"s{k}" for k in range(9)]
    assert untried(reading(shared, "p", untried=names[:1])) == [f"{words}s0"]
    assert untried(reading(shared, "p", untried=names[:6])) == [f"{words}s0, s1, s2, s3, s4, s5"]
    assert untried(reading(shared, "p", untried=names)) == [f"{words}s0, s1, s2, s3, s4, s5 and 3 more"]


# -- parents ----------------------------------------------------------------------------------------------------------

PARENTS_SAID = (
    "it may carry a, b rather than p: what it reads tells these apart within one value, and no test pair tells the two "
    "swaps apart (pairs would, in which a, b change the answer by another way as well)"
)


def test_a_handle_of_the_parents_is_noted_where_no_pair_tells_it_from_one_of_the_variable(alone, shared):
    assert PARENTS == 0.5
    assert said(reading(alone, "a", "b"), alone) == [PARENTS_SAID]
    assert said(reading(alone, "p"), alone) == []
    # where the parents have another child, pairs tell: what the handle does to them is part of its accuracy
    assert said(reading(shared, "a", "b"), shared) == []


def test_the_share_of_parents_is_the_variance_within_values_over_the_whole(alone):
    inputs = ROWS[(torch.unique(alone.bank.base, dim=0) * 3 ** torch.arange(4, -1, -1)).sum(dim=1)]
    a, b = inputs[:, 0], inputs[:, 1]
    states = alone.store.activations[alone.subject.places[0].name].double()
    row = {tuple(x): k for k, x in enumerate(alone.store.inputs.tolist())}
    at = states[[row[tuple(x)] for x in inputs.tolist()]]

    def by_loop(names: tuple[str, ...], strength: float) -> float:
        gains = torch.zeros(WIDTH, dtype=torch.float64)
        for name in names:
            gains[SLOTS[name]] = strength
        seen = at * gains
        seen = seen - seen.mean(dim=0)
        within = whole = 0.0
        for value in range(VALUES):
            cells = [(x, y) for x in range(VALUES) for y in range(VALUES) if (x + y) % VALUES == value]
            means = [seen[(a == x) & (b == y)].mean(dim=0) for x, y in cells]
            sizes = [int(((a == x) & (b == y)).sum()) for x, y in cells]
            centre = sum(n * m for n, m in zip(sizes, means, strict=True)) / sum(sizes)
            within += sum(n * float((m - centre).square().sum()) for n, m in zip(sizes, means, strict=True))
            whole += sum(n * float(m.square().sum()) for n, m in zip(sizes, means, strict=True))
        return within / whole

    for names in (("p",), ("a",), ("a", "b"), ("p", "a")):
        found = share_of_parents(reading(alone, *names, strength=0.7), alone)
        assert found == pytest.approx(by_loop(names, 0.7), rel=1e-4)
    assert share_of_parents(reading(alone, "p"), alone) < 0.05
    assert share_of_parents(reading(alone, "a", "b"), alone) > 0.6


def test_several_edits_and_oblique_frames_count_as_what_they_write(alone):
    first, second, _ = alone.subject.places
    read = torch.eye(WIDTH)[:, SLOTS["p"]]
    of_p = Edit(first, Frame.oblique(read, 3 * read), torch.ones(VALUES))
    of_a = Edit(second, Frame.identity(WIDTH), reading(alone, "a").edits[0].gains)
    both = Handle("p", (of_p, of_a), alone.subject.identity())
    little = share_of_parents(both, alone)
    more = share_of_parents(replace(both, edits=(replace(of_p, frame=Frame.oblique(read, read)), of_a)), alone)
    assert little is not None
    assert more is not None
    assert little < 0.2 < more  # three times as much of p written is nine times the variance


def test_parents_of_too_many_or_too_few_combinations_are_not_asked(alone):
    handle = reading(alone, "a", "b")
    distinct = torch.unique(alone.bank.base, dim=0)
    four = [distinct[(distinct[:, 0] == a) & (distinct[:, 1] == b)][:4] for a in range(VALUES) for b in range(VALUES)]
    assert [len(some) for some in four] == 9 * [4]  # nine combinations need four inputs each on average
    kept = {tuple(row) for row in torch.cat(four).tolist()}
    for without, told in ((0, True), (1, False)):
        rows = sorted(kept)[without:]
        some = alone.select(torch.tensor([tuple(row) in rows for row in alone.bank.base.tolist()]))
        assert (share_of_parents(handle, some) is not None) == told
    copied = CausalModel(INPUTS, {"p": lambda a: a % 2, "q": lambda c: c, "y": lambda p, q: (p + q) % VALUES}, "y")
    two = recording_of(copied)
    some = two.select((two.bank.base[:, 0] < 2) & (two.bank.source[:, 0] < 2))
    assert share_of_parents(reading(two, "a"), some) is None  # two values of one parent are the variable
    assert share_of_parents(reading(two, "a"), two) is not None
