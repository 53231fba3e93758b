"""Controls asked on a sample of the pairs first: what that may cost, and that it changes no answer that is clear."""

import numpy as np
import pytest
import torch

from plot_ot.judging import gates, verdict
from plot_ot.judging.bench import Bench
from plot_ot.judging.gates import Answer, Gate
from plot_ot.judging.intervals import ERROR, may_miss, missing_at_most
from plot_ot.judging.samples import FEW, WORTH, first_said, samples_of
from scripted import Court, Script, court
from truth.looking import Pairs

HANDLES, BETTER, PLACES = "beats random handles", "no random handle does better", "beats random places"


def pairs(count: int, families: int = 2) -> Pairs:
    return Pairs(np.arange(count), np.arange(count) % families, families)


def test_without_sampling_all_pairs_are_asked_once_with_the_whole_error():
    [everything] = samples_of(pairs(300), False)
    assert everything.at.tolist() == list(range(300))
    assert everything.error == ERROR


def test_a_sample_and_all_pairs_have_half_of_the_error_each():
    with missing_at_most(0.01):
        few, everything = samples_of(pairs(300), True)
    assert (few.error, everything.error) == (0.005, 0.005)
    assert len(few.at) == FEW == len(few.at.unique())
    assert everything.at.tolist() == list(range(300))
    assert few.boot.shape == (FEW, 2)


@pytest.mark.parametrize("families", [1, 2, 3, 7, 40])
def test_a_sample_has_about_as_many_of_every_family(families):
    few, _ = samples_of(pairs(1000, families), True)
    counts = torch.bincount(few.at % families, minlength=families)
    assert counts.max() - counts.min() <= 1
    again, _ = samples_of(pairs(1000, families), True)
    assert torch.equal(few.at, again.at)
    assert few.at.max() > 500  # drawn from all of them


def test_rare_families_are_in_the_sample_whole():
    family = np.zeros(500, dtype=np.int64)
    family[:11] = 1
    few, _ = samples_of(Pairs(np.arange(500), family, 2), True)
    assert set(range(11)) <= set(few.at.tolist())


@pytest.mark.parametrize(("count", "families"), [(int(WORTH * FEW) - 1, 2), (1000, 41)])
def test_few_pairs_or_pairs_of_many_families_are_asked_at_once(count, families):
    [everything] = samples_of(pairs(count, families), True)
    assert len(everything.at) == count


def test_all_pairs_are_asked_only_where_the_sample_is_not_clear():
    asked = []

    def gate(values):
        def ask(sample):
            asked.append((len(sample.at), may_miss()))
            value = values[len(asked) - 1]
            answer = Answer.HOLDS if value > 0.1 else Answer.FAILS if value < -0.1 else Answer.CANNOT_SAY
            return Gate("g", answer, value, value - 0.1, value + 0.1, 0.0, "")

        return ask

    with missing_at_most(0.02):
        both = samples_of(pairs(300), True)
    # an answer of the sample counts where the whole interval is clear of the bound
    for values, times in (
        ([1.0], 1),
        ([-1.0], 1),
        ([0.0, 1.0], 2),
        ([0.0, 0.0], 2),
        ([0.14, 1.0], 2),
        ([-0.14, 0.0], 2),
    ):
        asked.clear()
        assert first_said(both, gate(values)).value == values[-1]
        assert asked == [(FEW, 0.01), (300, 0.01)][:times]


def test_a_wrong_answer_of_either_sample_is_within_the_error():
    """A difference that lies exactly at its bound: how often a gate holds by mistake, sample and all pairs together."""
    rng, wrong, studies, error = np.random.default_rng(0), 0, 400, 0.1
    for _ in range(studies):
        bank, right = pairs(240), (rng.random(240) < 0.45).astype(float)
        with missing_at_most(error):
            both = samples_of(bank, True)
        gate = first_said(both, lambda s, right=right: gates.beats("x", s.boot.interval(right[s.at]), 0.45))
        wrong += gate.holds
    assert wrong / studies <= error  # one side: 5 % expected at most


# -- on a bench -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bench():
    with pytest.MonkeyPatch.context() as patched:
        yield court(patched)


def sampled(bench: Court, monkeypatch: pytest.MonkeyPatch, **script: object) -> tuple[dict[str, list[int]], object]:
    """How many pairs each role was run on, and the verdict that asks a sample first."""
    ran: dict[str, list[int]] = {}

    class Counted(Script):
        def correct(self, recording, handle, *rest):
            role = handle.chosen.get("role") or self._role(handle)
            ran.setdefault(role, []).append(len(recording))
            return super().correct(recording, handle, *rest)

    with monkeypatch.context() as m:
        m.setattr(verdict, "Bench", lambda *of: Bench(*of[:4], True))
        return ran, bench.verdict(Counted(**script))


@pytest.mark.parametrize(
    "script",
    [
        {},
        {"elsewhere": 0.9, "handle": 0.98},
        {"random": 0.5},
        {"random": 4 * [0.0, 0.99, 0.3, 0.0, 0.2]},
        {"random": 4 * [1.0, 0.0, 0.3, 0.0, 0.2], "handle": 0.9},
        {"subspace": 1.0},
        {"handle": 0.5, "rebuilt": 0.5},
        {"rebuilt": 0.0},
        {"copied": 1.0},
        {"elsewhere": 0.7, "handle": 0.72},
    ],
)
def test_a_sample_first_changes_no_clear_answer(bench, monkeypatch, script):
    _, found = sampled(bench, monkeypatch, **script)
    whole = bench.verdict(**script)
    assert found.status is whole.status
    assert {g.name: g.answer for g in found.gates} == {g.name: g.answer for g in whole.gates}
    assert set(found.evidence) == set(whole.evidence)


def test_controls_that_are_far_behind_are_run_on_few_pairs(bench, monkeypatch):
    ran, found = sampled(bench, monkeypatch, elsewhere=0.2, subspace=0.1, random=0.2)
    assert found.status.found
    tested = found.evidence["discriminating"]
    assert {role: set(ran[role]) for role in ("elsewhere", "subspace", "random")} == {
        "elsewhere": {FEW},
        "subspace": {FEW},
        "random": {FEW},
    }
    assert tested in ran["handle"]  # the handle itself is run on all
    assert tested in ran["rebuilt"]


def test_a_random_handle_that_may_be_better_is_run_on_all_pairs(bench, monkeypatch):
    """On few pairs one that is a little better would seem to be as good."""
    ran, found = sampled(bench, monkeypatch, handle=0.97, random=4 * [1.0, 0.0, 0.1, 0.0, 0.0])
    tested = found.evidence["discriminating"]
    assert found.gate(BETTER).fails
    assert found.evidence["random_best"] == 1.0
    assert ran["random"].count(tested) == 1
    assert found.gate(HANDLES).holds
    assert found.gate(PLACES).holds
