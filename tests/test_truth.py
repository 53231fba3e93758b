"""Networks with a known truth: what they claim of themselves holds, by plain hooked forward passes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from nets import hooked_forward
from plot_ot.abstract.causal_model import same
from plot_ot.edits import EditBatch, Frame, respond
from plot_ot.handles import Handle
from plot_ot.judging.status import Status
from plot_ot.subjects import ModuleSubject, record_pairs
from truth.campaigns import CAMPAIGNS, GIVEN, KINDS, METHODS
from truth.illusions import borrowed_way, line, silent_way
from truth.kinds import beside_parents, copies_apart, gate_pair, half_carried, planted
from truth.known import ABSENT, DORMANT, HERE, IN_PART, OUTCOMES, Known, Truth, outcome, overlap, promise_kept
from truth.nulls import fresh, reinitialised, shuffled
from truth.wiring import WiredSubject

SEEDS = (1000, 1001, 1002)
WIRED = ("plant", "quiet", "copies", "oblique", "echo", "line", "half", "apart", "parents", "parents shared", "gate")
WIRED += ("absent", "illusion: silent", "illusion: borrowed")


def pairs(known: Known, count: int = 300) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(known.seed)
    return tuple(known.rows[torch.randint(len(known.rows), (count,), generator=generator)] for _ in range(2))


def swapped(known: Known, handle: Handle, base: Tensor, source: Tensor) -> Tensor:
    """Answers under the handle, by hooks on the plain module."""
    [edit] = handle.edits
    module = known.subject.module.get_submodule(edit.place.name)
    edits = [(module, edit.frame.read, edit.frame.write, edit.gains)]
    return hooked_forward(known.subject.module, edits, base, source).argmax(dim=-1)


def shares(known: Known, variable: str) -> tuple[float, float]:
    """How often the known handle gives the counterfactual label: where the variable changes, and where it does not."""
    base, source = pairs(known)
    right = same(
        swapped(known, known.handles[variable], base, source), known.causal.swap(base, source, variable).long()
    )
    changed = known.causal.run(base)[variable] != known.causal.run(source)[variable]
    return float(right[changed].double().mean()), float(right[~changed].double().mean())


@pytest.mark.parametrize("kind", WIRED)
@pytest.mark.parametrize("seed", SEEDS)
def test_a_wired_network_answers_as_its_hypothesis(kind, seed):
    known = KINDS[kind](seed)
    answers = known.subject.module(known.rows).argmax(dim=-1)
    assert same(answers, known.causal.answer(known.rows).long()).all()


@pytest.mark.parametrize(
    "kind", ["plant", "quiet", "copies", "oblique", "echo", "line", "parents", "parents shared", "gate"]
)
@pytest.mark.parametrize("seed", SEEDS)
def test_swapping_the_planted_subspace_gives_the_counterfactual_answer(kind, seed):
    known = KINDS[kind](seed)
    assert known.handles
    for variable, handle in known.handles.items():
        assert known.truths[variable].status == HERE
        assert shares(known, variable) == (1.0, 1.0)
        assert outcome(Status.PLACED, handle.places, known.truths[variable]) == "right place"
        assert overlap(handle, known.truths[variable]) == pytest.approx(1.0, abs=1e-3)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_half_carried_variable_is_set_on_its_share_of_the_pairs(seed):
    known = half_carried(seed)
    assert known.truths["p"].status == IN_PART
    right, kept = shares(known, "p")
    assert right == pytest.approx(known.truths["p"].share, abs=0.12)
    assert kept == 1.0
    assert shares(known, "q") == (1.0, 1.0)


@pytest.mark.parametrize("make", [silent_way, borrowed_way])
@pytest.mark.parametrize("seed", SEEDS)
def test_an_illusion_reads_what_is_decodable_and_unused_and_writes_what_is_used(make, seed):
    known = make(seed)
    assert known.truths["p"].status == DORMANT
    assert shares(known, "p") == (1.0, 1.0)  # the illusory handle is perfect
    [edit] = known.handles["p"].edits
    base, source = pairs(known)
    store = known.subject.record(base)
    read = store.activations[edit.place.name] @ edit.frame.read
    value = known.causal.run(base)["p"]
    means = torch.stack([read[value == v].mean(dim=0) for v in value.unique()])
    assert (torch.cdist(read, means).argmin(dim=1) == value).all()  # decodable
    module, plain = known.subject.module, known.subject.module(base)
    columns = module.places["s1"].columns("dormant" if make is silent_way else "p")
    reading, writing = module.weights["s1:read"][columns].T, module.weights["s1:write"][:, columns]
    copied = [(module.s1, reading, writing, torch.ones(reading.shape[1]))]
    torch.testing.assert_close(hooked_forward(module, copied, base, source), plain, atol=1e-3, rtol=0)  # unused


def test_both_copies_are_needed():
    known = copies_apart(1000)
    base, source = pairs(known)
    label = known.causal.swap(base, source, "p")
    moved = label != known.causal.answer(base)
    module = known.subject.module
    planes = known.truths["p"].carried
    edits = [(module.get_submodule(s), plane, plane, torch.ones(plane.shape[1])) for s, plane in planes.items()]
    together = hooked_forward(module, edits, base, source).argmax(dim=-1)
    assert (together == label)[moved].all()
    for one in edits:
        assert (hooked_forward(module, [one], base, source).argmax(dim=-1) == label)[moved].double().mean() < 0.6


def test_whole_patches_of_a_shared_place_copy_the_source():
    known = gate_pair(1000)
    place = known.handles["a"].places[0]
    module, width = known.subject.module, known.subject.place(place).width
    base, source = pairs(known)
    whole = [(module.get_submodule(place), torch.eye(width), torch.eye(width), torch.ones(width))]
    assert (hooked_forward(module, whole, base, source).argmax(dim=-1) == known.causal.answer(source).long()).all()


def test_swapping_both_parents_sets_a_variable_only_if_they_have_no_other_child():
    for shared, expected in ((False, 1.0), (True, 0.7)):
        known = beside_parents(1000, shared)
        [place] = sorted(known.truths["p"].parents)[:1]
        module = known.subject.module
        columns = [module.places[place].columns(x) for x in ("x0", "x1")]
        read = torch.cat([module.weights[f"{place}:read"][c].T for c in columns], dim=1)
        write = torch.cat([module.weights[f"{place}:write"][:, c] for c in columns], dim=1)
        base, source = pairs(known)
        edits = [(module.get_submodule(place), read, write, torch.ones(read.shape[1]))]
        right = hooked_forward(module, edits, base, source).argmax(dim=-1) == known.causal.swap(base, source, "p")
        assert (right.double().mean() == 1.0) == (not shared)
        assert right.double().mean() <= expected


@pytest.mark.parametrize("kind", WIRED)
def test_resuming_a_wired_network_is_its_hooked_forward(kind):
    known = KINDS[kind](1001)
    fast = known.subject
    slow = ModuleSubject(fast.module, [p.name for p in fast.places], known.rows[:1], encode=lambda rows: rows)
    assert isinstance(fast, WiredSubject)
    base, source = pairs(known, 20)
    generator = torch.Generator().manual_seed(0)
    for places in ([p] for p in fast.places), [list(fast.places)]:
        for chosen in places:
            edits = [EditBatch(p, Frame.identity(p.width), torch.rand(3, p.width, generator=generator)) for p in chosen]
            responses = [_responses(subject, base, source, edits) for subject in (fast, slow)]
            torch.testing.assert_close(*responses, atol=2e-3, rtol=1e-4)


def _responses(subject: ModuleSubject, base: Tensor, source: Tensor, edits: list[EditBatch]) -> Tensor:
    return respond(record_pairs(subject, (base, source))[0], edits)


@pytest.mark.parametrize("network", ["mlp", "gru", "gpt2", "llama", "gemma2"])
def test_nulls_answer_by_chance_or_by_shuffled_values(network):
    known = shuffled(network, 1001)
    answers = fresh(network, 1001).record(known.rows).outputs.argmax(dim=-1)
    assert torch.equal(answers, known.causal.answer(known.rows))
    p = known.causal.run(known.rows)["p"]
    assert p.bincount().tolist() == [243, 243, 243]  # as often as before
    untrained = reinitialised(network, 1001)
    assert untrained.splits is not None
    assert {t.status for t in (*known.truths.values(), *untrained.truths.values())} == {ABSENT}
    right = fresh(network, 1001).record(known.rows).outputs.argmax(dim=-1) == untrained.causal.answer(known.rows)
    assert right.double().mean() < 0.5


def test_scoring_tells_the_right_place_from_parents_copies_and_nothing():
    there = Truth(HERE, {"s2": None, "s3": None}, frozenset({"s1"}))
    said = {
        ("placed", "s2"): ("right place", True),
        ("placed and compact", "s3"): ("right place", True),
        ("placed", "s1"): ("parents' place", False),
        ("placed", "s9"): ("wrong place", False),
        ("in part", "s2"): ("in part: right place", False),
        ("not localized", "s2"): ("refused", False),
        ("decodable here, not used here", "s2"): ("flagged", False),
        ("undecided", "s2"): ("undecided", False),
        ("output variable", "s2"): ("output variable", False),
    }
    for (status, place), (name, kept) in said.items():
        assert outcome(Status(status), [place], there) == name
        assert name in OUTCOMES
        assert promise_kept(name, there) == kept
    for truth in (Truth(ABSENT), Truth(DORMANT)):
        assert outcome(Status.PLACED, ["s2"], truth) == "wrong place"
        assert [n for n in OUTCOMES if promise_kept(n, truth)] == ["refused", "flagged"]
    assert [n for n in OUTCOMES if promise_kept(n, Truth(IN_PART))] == ["in part: right place"]
    copies = Truth(HERE, {"s1": None, "s2": None}, together=True)
    assert outcome(Status.PLACED, ["s1"], copies) == "one copy's place"
    assert outcome(Status.PLACED, ["s1", "s2"], copies) == "right place"


def test_campaigns_name_kinds_and_methods_that_exist():
    for kinds, methods in CAMPAIGNS.values():
        assert set(kinds) <= set(KINDS)
        assert set(methods) <= {*METHODS, GIVEN}
    assert planted(1000).kind == "plant"
    assert line(1000).truths["p"].status == HERE
