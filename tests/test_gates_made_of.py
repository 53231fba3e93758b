"""A handle that swaps one thing its variable is made of is not the variable in part."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
import torch

from plot_ot.abstract.banks import draw_pairs
from plot_ot.abstract.causal_model import CausalModel
from plot_ot.judging.bench import ALONE, Bench, _swapped_alone, _where_told
from plot_ot.judging.controls import full_patch
from plot_ot.judging.gates import LEAST_PAIRS, Answer, Gate, does_more_than
from plot_ot.judging.intervals import Interval
from plot_ot.judging.status import Status
from plot_ot.judging.verdict import Opponents, Verdict, judge
from plot_ot.signatures import as_readout
from plot_ot.subjects import CausalSubject, record

ROWS = torch.cartesian_prod(*[torch.arange(3)] * 5)
INPUTS = ["a", "b", "c", "d", "e"]


def claimed(p=lambda a, b: torch.minimum(a, b)) -> CausalModel:
    """The hypothesis: p of a and b, then the answer."""
    mechanisms = {"p": p, "q": lambda d, e: (d + e) % 3, "y": lambda p, q, c: (p + 2 * q + c) % 3}
    return CausalModel(INPUTS, mechanisms, output="y", variables=["p", "q"])


def network(mechanisms: Mapping[str, object], places: list[str]) -> CausalSubject:
    """A network with the same answers that holds other things."""
    return CausalSubject(CausalModel(INPUTS, mechanisms, output="y"), ROWS, places)


def verdict_on(subject: CausalSubject, place: int, causal: CausalModel) -> Verdict:
    """The verdict on patching one place whole, as p's handle."""
    generator = torch.Generator().manual_seed(0)
    banks = [draw_pairs(causal, ROWS, kind, 300, generator, variable="p") for kind in ("sensitive", "invariant")]
    banks.append(draw_pairs(causal, ROWS, "balanced", 300, generator))
    sensitivity, invariance, both = record(subject, *banks)
    handle, other = (full_patch("p", [subject.places[k]], subject) for k in (place, -1))
    readout = as_readout("softmax")
    return judge(handle, sensitivity, invariance, both, both, Opponents(lambda k: other), readout, generator)


def bench_of(causal: CausalModel) -> tuple[Bench, CausalSubject]:
    """The test pairs of p in a network that holds its parents only."""
    subject = network(PARENTS_ONLY, ["a", "b", "q"])
    generator = torch.Generator().manual_seed(0)
    banks = [draw_pairs(causal, ROWS, kind, 300, generator, variable="p") for kind in ("sensitive", "invariant")]
    return Bench("p", *record(subject, *banks), as_readout("softmax")), subject


def answers(verdict: Verdict) -> dict[str, Answer]:
    start = "does more than swap "
    return {gate.name.removeprefix(start): gate.answer for gate in verdict.gates if gate.name.startswith(start)}


PARENTS_ONLY = {
    "q": lambda d, e: (d + e) % 3,
    "y": lambda a, b, q, c: (torch.minimum(a, b) + 2 * q + c) % 3,
}


def test_a_place_that_holds_one_parent_is_refused_by_name():
    verdict = verdict_on(network(PARENTS_ONLY, ["a", "b", "q"]), 1, claimed())
    assert verdict.status is Status.ABSENT
    assert 0.3 < verdict.evidence["handle"] < 0.8  # it is right in part
    assert answers(verdict) == {"a": Answer.HOLDS, "b": Answer.FAILS}
    assert "it carries b" in verdict.sentence


@pytest.mark.parametrize(("place", "carried"), [(0, "a"), (1, "b")])
def test_either_parent_is_told_by_its_own_pairs(place, carried):
    bench, subject = bench_of(claimed())
    gates = bench.made_of(full_patch("p", [subject.places[place]], subject))
    assert {gate.name.split()[-1]: gate.answer for gate in gates} == {
        part: Answer.FAILS if part == carried else Answer.HOLDS for part in "ab"
    }
    assert {gate.name.split()[-1]: gate.value for gate in gates}[carried] == -1.0  # the place is exactly that


def test_a_variable_that_only_some_inputs_use_is_not_taken_for_a_parent():
    mechanisms = {
        "p": lambda a, b: torch.minimum(a, b),
        "q": lambda d, e: (d + e) % 3,
        "y": lambda a, b, p, q, c: (torch.where(c == 0, torch.minimum(a, b), p) + 2 * q + c) % 3,
    }
    verdict = verdict_on(network(mechanisms, ["p", "q"]), 0, claimed())
    assert verdict.evidence["handle"] < 0.8
    assert set(answers(verdict).values()) == {Answer.HOLDS}
    assert "carries" not in verdict.sentence


def test_a_handle_that_works_is_not_asked():
    mechanisms = {
        "p": lambda a, b: torch.minimum(a, b),
        "q": lambda d, e: (d + e) % 3,
        "y": lambda p, q, c: (p + 2 * q + c) % 3,
    }
    verdict = verdict_on(network(mechanisms, ["p", "q"]), 0, claimed())
    assert verdict.status.found
    assert not answers(verdict)


def test_mixtures_that_a_mechanism_refuses_are_left_out():
    def careful(a, b):
        if ((a == 1) & (b == 2)).any():
            raise ValueError("not written for such a mixture")
        return torch.minimum(a, b)

    bench, _ = bench_of(claimed())
    natural = [
        ~(x[:, :2] == torch.tensor([1, 2])).all(1) for x in (bench.sensitivity.bank.base, bench.sensitivity.bank.source)
    ]
    some = bench.sensitivity.select(natural[0] & natural[1])
    all_told = _where_told(some, "p", "a").bank
    mixed = (all_told.source[:, 0] == 1) & (all_told.base[:, 1] == 2)
    assert 0 < int(mixed.sum()) < len(mixed)
    told = _where_told(replace(some, bank=replace(some.bank, causal=claimed(careful))), "p", "a").bank
    assert torch.equal(told.base, all_told.base[~mixed])
    assert torch.equal(told.labels[ALONE], all_told.labels[ALONE][~mixed])


def test_a_part_that_never_stands_alone_is_not_asked_about():
    bench, subject = bench_of(claimed())
    handle = full_patch("p", [subject.places[0]], subject)
    assert len(bench.made_of(handle)) == 2
    source = [r.bank.source for r in (bench.sensitivity, bench.invariance, bench.tested)]

    def only_sources(a, b):
        if not any(len(a) == len(x) and torch.equal(torch.stack([a, b], 1), x[:, :2]) for x in source):
            raise ValueError("no mixtures at all")
        return torch.minimum(a, b)

    for name in ("sensitivity", "invariance", "tested"):
        recording = getattr(bench, name)
        setattr(bench, name, replace(recording, bank=replace(recording.bank, causal=claimed(only_sources))))
    assert bench.made_of(handle) == []


def larger(a, b):
    return torch.maximum(a, b)


LARGER_OF_PARENTS = {"q": lambda d, e: (d + e) % 3, "y": lambda a, b, q, c: (larger(a, b) + 2 * q + c) % 3}


def needs(mechanisms: Mapping[str, object], places: list[str], part: str) -> Gate | None:
    """What the discriminating pairs alone say about a part, of patching the first place whole as p's handle."""
    subject = network(mechanisms, places)
    generator = torch.Generator().manual_seed(0)
    causal = claimed(larger)
    banks = [draw_pairs(causal, ROWS, kind, 300, generator, variable="p") for kind in ("sensitive", "invariant")]
    bench = Bench("p", *record(subject, *banks), as_readout("softmax"))
    return bench._needs("p", part, bench.on(full_patch("p", [subject.places[0]], subject)))


def test_a_parent_is_right_only_where_it_is_enough():
    gate = needs(LARGER_OF_PARENTS, ["a", "b", "q"], "a")
    assert gate is not None
    assert gate.answer is Answer.FAILS
    assert gate.value == pytest.approx(-0.5)  # right on all pairs where it is enough, and on none of the others
    assert "right on 1.00" in gate.sentence
    assert "on 0.00 of others: it carries a" in gate.sentence
    other = needs(LARGER_OF_PARENTS, ["a", "b", "q"], "b")
    assert other is not None
    assert other.answer is Answer.HOLDS
    assert "carries" not in other.sentence


def test_a_variable_that_is_there_in_part_does_not_care_which_parent_decides():
    mechanisms = {
        "p": larger,
        "q": lambda d, e: (d + e) % 3,
        "y": lambda a, b, p, q, c: (torch.where(c == 0, p, larger(a, b)) + 2 * q + c) % 3,  # on a third of the inputs
    }
    for part in "ab":
        gate = needs(mechanisms, ["p", "q"], part)
        assert gate is not None
        assert gate.answer is Answer.HOLDS
        assert 0.05 < gate.value < 0.3


def test_what_few_pairs_leave_open_does_not_count():
    bench, _ = bench_of(claimed())
    assert bench._needs("p", "a", np.ones(len(bench.tested))) is not None
    some = torch.arange(len(bench.tested))[::7]
    bench.tested = bench.tested.select(some)
    rng = np.random.default_rng(0)
    right = (rng.random(len(some)) < 0.3).astype(float)  # b is not enough on about half of the pairs
    enough = bench.tested.bank.labels["p"] == _swapped_alone(bench.tested.bank, "a")[1]
    assert min(int(enough.sum()), int((~enough).sum())) >= LEAST_PAIRS
    right[~enough.numpy()] = right[~enough.numpy()] * (rng.random(int((~enough).sum())) < 0.5)
    assert bench._needs("p", "a", right) is None


def test_a_part_that_is_always_or_never_enough_is_not_asked_about():
    mechanisms = {"p": lambda a: a, "q": lambda d, e: (d + e) % 3, "y": lambda p, q, c: (p + 2 * q + c) % 3}
    causal = CausalModel(INPUTS, mechanisms, output="y", variables=["p", "q"])
    subject = CausalSubject(causal, ROWS, ["p", "q"])
    generator = torch.Generator().manual_seed(0)
    banks = [draw_pairs(causal, ROWS, kind, 300, generator, variable="p") for kind in ("sensitive", "invariant")]
    bench = Bench("p", *record(subject, *banks), as_readout("softmax"))
    assert bench._needs("p", "a", bench.on(full_patch("p", [subject.places[0]], subject))) is None


def test_one_no_of_two_questions_counts(monkeypatch):
    bench, subject = bench_of(claimed())
    handle = full_patch("p", [subject.places[0]], subject)
    said = {name: does_more_than("a", Interval(v, v - 0.1, v + 0.1, 40)) for name, v in (("no", -0.5), ("yes", 0.5))}
    for first, second, expected in (("yes", "no", "no"), ("no", "yes", "no"), ("yes", "yes", "yes")):
        monkeypatch.setattr(bench, "_follows", lambda *_, x=first: said[x])
        monkeypatch.setattr(bench, "_needs", lambda *_, x=second: said[x])
        assert bench.made_of(handle) == [said[expected]] * 2
    monkeypatch.setattr(bench, "_follows", lambda *_: None)
    assert bench.made_of(handle) == [said["yes"]] * 2


def test_pairs_whose_mixture_is_refused_do_not_count_there_either():
    def careful(a, b):
        if ((a == 2) & (b == 0)).any():
            raise ValueError("not written for such a mixture")
        return torch.minimum(a, b)

    bench, subject = bench_of(claimed())
    natural = [~(x[:, :2] == torch.tensor([2, 0])).all(1) for x in (bench.tested.bank.base, bench.tested.bank.source)]
    bench.tested = bench.tested.select(natural[0] & natural[1])
    right = bench.on(full_patch("p", [subject.places[1]], subject))  # b alone
    mixed = (bench.tested.bank.source[:, 0] == 2) & (bench.tested.bank.base[:, 1] == 0)
    assert 0 < int(mixed.sum()) < len(mixed)
    some = bench.tested.select(~mixed)
    bench.tested = replace(bench.tested, bank=replace(bench.tested.bank, causal=claimed(careful)))
    found = bench._needs("p", "a", right)
    bench.tested = some
    assert found == bench._needs("p", "a", right[~mixed.numpy()])
    assert found is not None
