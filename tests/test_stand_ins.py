"""More pairs from the same recordings: a source may stand in for another that has the same value."""

from __future__ import annotations

import torch

from nets import mlp
from plot_ot.abstract.banks import Bank
from plot_ot.abstract.causal_model import CausalModel
from plot_ot.abstract.relabelling import shuffled
from plot_ot.stages.stand_ins import with_stand_ins
from plot_ot.subjects import BankRecording, MLPSubject, record

CAUSAL = CausalModel(
    ["x0", "x1", "x2", "x3"],
    {"A": lambda x0, x1: x0 & x1, "B": lambda x2, x3: x2 + x3, "y": lambda A, B: A + 2 * B},
    "y",
)


def recorded(bank: Bank | None = None) -> BankRecording:
    base, source = torch.randint(2, (2, 80, 4), generator=torch.Generator().manual_seed(0))
    base, source = torch.unique(torch.stack([base, source]), dim=1)
    bank = bank or Bank.from_pairs(CAUSAL, base, source, variables=("A", "B"))
    return record(MLPSubject(mlp(4, 5, 6, seed=0), encode=lambda rows: rows.float()), bank)[0]


def more(fit: BankRecording, variable: str, times: int = 2) -> BankRecording:
    return with_stand_ins(fit, variable, times, torch.Generator().manual_seed(1))


def test_a_stand_in_asks_for_what_the_causal_model_says():
    fit = recorded()
    for v in ("A", "B"):
        found = more(fit, v)
        said = Bank.from_pairs(CAUSAL, found.bank.base, found.bank.source, variables=(v,))
        assert torch.equal(found.bank.labels[v], said.labels[v])
        assert torch.equal(found.bank.changed[v], said.changed[v])
        assert torch.equal(found.bank.source_answer, said.source_answer)
        assert found.bank.variables == tuple(found.bank.labels) == (v,)


def test_the_pairs_come_first_and_sources_really_change():
    fit = recorded()
    found = more(fit, "A")
    assert len(found) == 3 * len(fit)
    assert torch.equal(found.bank.source[: len(fit)], fit.bank.source)
    assert torch.equal(found.bank.base, fit.bank.base.repeat(3, 1))
    for k in (1, 2):  # every source as often as before, at other bases
        again = found.bank.source[k * len(fit) : (k + 1) * len(fit)]
        assert sorted(again.tolist()) == sorted(fit.bank.source.tolist())
        assert (again != fit.bank.source).any(dim=1).double().mean() > 0.5


def test_states_are_those_of_the_sources():
    fit = recorded()
    found, place = more(fit, "B"), fit.subject.places[0]
    fresh = record(fit.subject, Bank.from_pairs(CAUSAL, found.bank.base, found.bank.source))[0]
    torch.testing.assert_close(found.source_at(place), fresh.source_at(place))
    torch.testing.assert_close(found.base_at(place), fresh.base_at(place))


def test_shuffled_values_are_the_ones_that_count():
    """The control on shuffled values must not be helped, nor hurt, by the true ones."""
    fit = recorded()
    [bank] = shuffled([fit.bank], torch.Generator().manual_seed(2))
    found = more(recorded(bank), "A")
    dealt = bank.causal.run(bank.source)["A"]
    assert torch.equal(bank.causal.run(found.bank.source)["A"], dealt.repeat(3))
    assert not torch.equal(CAUSAL.run(found.bank.source)["A"], CAUSAL.run(bank.source)["A"].repeat(3))


def test_values_that_no_two_sources_share_leave_the_pairs_as_they_are():
    causal = CausalModel(["x"], {"A": lambda x: x, "y": lambda A: A % 2}, "y")
    base, source = torch.arange(10).unsqueeze(1), torch.arange(10, 20).unsqueeze(1)
    bank = Bank.from_pairs(causal, base, source, variables=("A",))
    fit = record(MLPSubject(mlp(1, 3, 2, seed=0), encode=lambda rows: rows.float()), bank)[0]
    assert torch.equal(more(fit, "A", 1).bank.source, source.repeat(2, 1))


def test_pairs_that_are_repeated_get_the_same_stand_ins():
    fit = recorded()
    once, twice = more(fit, "A", 1), more(fit.select(torch.arange(len(fit)).repeat(2)), "A", 1)
    assert torch.equal(twice.bank.source[2 * len(fit) :], once.bank.source[len(fit) :].repeat(2, 1))
