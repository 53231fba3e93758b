"""Variables planted by hand among distractors: `localize`, no option set, must name where they are, or decline.

A sample runs in CI; `make test-long` runs every kind and the campaign, and counts. Two kinds that are long here are
looked for elsewhere in CI: README's example places a variable in a block, `test_own_model.py` at one of two tokens.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch

import plot_ot
from plants import DIGIT_ROWS, DIGITS, SUMS, as_subject, random_plan, wired
from plot_ot.abstract.banks import draw_pairs
from plot_ot.judging.status import Status
from plot_ot.signatures import SignatureSpec, as_readout, measure_signatures
from plot_ot.sites import whole_places
from plot_ot.stages.choose import SelectTokens
from plot_ot.stages.coupling import LocalizeTokens
from plot_ot.stages.problem import Problem, State
from plot_ot.subjects import record
from plot_ot.transport import Transport
from truth.known import outcome, overlap, promise_kept
from truth.older import DEPTH, in_language_model, in_neurons, in_plane

KNOWN = {
    **{kind: partial(in_language_model, kind) for kind in ("token", "layer", "head")},
    "neurons": in_neurons,
    "subspace": in_plane,
}
DECLINED = ("token", "layer", "head", "neurons")


def found(kind: str, seed: int) -> bool:
    """Whether all planted variables are placed where they are, in their subspace or on top in their neurons."""
    known = KNOWN[kind](seed)
    result = plot_ot.localize(known.subject, known.causal, known.rows, seed=seed)
    for variable, truth in known.truths.items():
        handle = result.handles[variable]
        if not promise_kept(outcome(result.verdicts[variable].status, handle.places, truth), truth):
            return False
        if kind == "subspace" and overlap(handle, truth) < 0.9:
            return False
    if kind == "neurons":
        neurons = known.truths["left"].carried["layer1"].nonzero()[:, 0].tolist()
        return strongest_neuron(result.handles["left"]) in neurons
    return True


def strongest_neuron(handle: plot_ot.Handle) -> int:
    """The neuron that a handle reads most of."""
    [edit] = handle.edits
    read = torch.eye(edit.place.width) if edit.frame.read is None else edit.frame.read
    return int((read * edit.gains).norm(dim=1).argmax())


def declined(kind: str, seed: int) -> bool:
    """Whether neither variable is claimed in a network that answers through others."""
    known = KNOWN[kind](seed, aligned=False)
    result = plot_ot.localize(known.subject, known.causal, known.rows, seed=seed)
    return {v.status for v in result.verdicts.values()} == {Status.ABSENT}


def test_tokens_are_as_near_as_their_nearest_state_and_the_right_one_comes_first():
    """Against brute force: every state's cost by itself. All states at once would copy the source's answer at last."""
    plan = random_plan(1003, DEPTH)
    model, _ = wired(plan, DEPTH, torch.Generator().manual_seed(1003))
    subject = as_subject(model, range(DIGITS))
    rows = DIGIT_ROWS[torch.randperm(len(DIGIT_ROWS), generator=torch.Generator().manual_seed(0))][:200]
    [fit] = record(subject, draw_pairs(SUMS, rows, "balanced", 60, torch.Generator().manual_seed(0)))
    problem = Problem(subject, fit, fit, ("p", "q"), as_readout("logits"))
    spec = SignatureSpec(normalise="unit", centre=True)
    state = LocalizeTokens(Transport("uot-one-sided", (0.2,), (0.03,), scale="median"), spec, depth=DEPTH)(
        problem, State.start(problem)
    )
    alone = measure_signatures(fit, whole_places(fit, subject.places), as_readout("logits"), spec)
    [found] = state.signatures
    for j, site in enumerate(found.family.sites):
        own = [k for k, s in enumerate(alone.family.sites) if s.place.token == site.name]
        assert len(own) == DEPTH
        torch.testing.assert_close(found.cost[:, j], alone.cost[:, own].min(dim=1).values)
    for k, v in enumerate("pq"):
        [candidate] = state.candidates[v]
        assert candidate.family.sites[candidate.coupling.ranking(v)[0]].name == f"x{plan.tokens[k]}"
    kept = SelectTokens(1)(problem, state).places
    assert {p.token for p in kept["p"]} == {f"x{plan.tokens[0]}"}


@pytest.fixture
def few_random_handles(monkeypatch):
    monkeypatch.setattr("plot_ot.judging.bench.RANDOM_HANDLES", 4)


SLOW = ("token", "layer")


@pytest.mark.parametrize("kind", [pytest.param(k, marks=pytest.mark.long) if k in SLOW else k for k in KNOWN])
def test_a_planted_variable_is_found(kind, few_random_handles):
    assert found(kind, 1000)


@pytest.mark.parametrize("kind", ["layer", "neurons"])
def test_a_variable_that_is_not_there_is_declined(kind, few_random_handles):
    assert declined(kind, 1000)


@pytest.mark.long
def test_38_of_40_plants_are_found():
    missed = [(kind, seed) for kind in KNOWN for seed in range(2000, 2008) if not found(kind, seed)]
    print(f"found {40 - len(missed)} of 40; missed {missed}")
    assert len(missed) <= 2


@pytest.mark.long
def test_38_of_40_networks_without_the_variable_are_declined():
    claimed = [(kind, seed) for kind in DECLINED for seed in range(3000, 3010) if not declined(kind, seed)]
    print(f"declined {40 - len(claimed)} of 40; claimed {claimed}")
    assert len(claimed) <= 2
