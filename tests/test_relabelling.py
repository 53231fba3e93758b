"""Shuffled values: banks on which a variable means nothing, made without running a network again."""

import torch

from plot_ot.abstract.banks import Bank, draw_pairs
from plot_ot.abstract.causal_model import CausalModel, same
from plot_ot.abstract.relabelling import Relabelled, shuffled

ROWS = torch.cartesian_prod(*[torch.arange(3)] * 4)
MODEL = CausalModel(
    list("abcd"),
    {"p": lambda a, b: (a + b) % 3, "q": lambda c, d: (c * d) % 3, "y": lambda p, q: 3 * p + q},
    output="y",
)


def banks() -> list[Bank]:
    generator = torch.Generator().manual_seed(0)
    return [draw_pairs(MODEL, ROWS, "balanced", size, generator) for size in (200, 100)]


def test_values_are_dealt_out_by_a_permutation_that_all_banks_share():
    first, second = shuffled(banks(), torch.Generator().manual_seed(1))
    assert first.causal is second.causal
    inputs = torch.cat([first.base, first.source, second.base, second.source]).unique(dim=0)
    for v in ("p", "q"):
        dealt, true = first.causal.run(inputs)[v], MODEL.run(inputs)[v]
        assert torch.equal(dealt.sort().values, true.sort().values)  # as often as before
        assert 0.1 < float((dealt == true).double().mean()) < 0.6  # but elsewhere


def test_a_label_is_the_answer_with_a_value_that_the_base_does_not_have():
    [bank] = shuffled(banks()[:1], torch.Generator().manual_seed(1))
    assert isinstance(bank.causal, Relabelled)
    base, source, true = bank.causal.run(bank.base), bank.causal.run(bank.source), MODEL.run(bank.base)
    for t in range(len(bank)):
        for v in ("p", "q"):
            changed = base[v][t] != source[v][t]
            assert bool(bank.changed[v][t]) == bool(changed)
            if not changed:
                assert bank.labels[v][t] == bank.base_answer[t]
                continue
            target = source[v][t] if source[v][t] != true[v][t] else base[v][t]
            assert target != true[v][t]
            swapped = MODEL.run(bank.base[t : t + 1], do={v: target.reshape(1)})["y"]
            assert bank.labels[v][t] == swapped[0] != bank.base_answer[t]


def test_the_answers_and_the_other_values_stay_true():
    [plain, _], [bank, _] = banks(), shuffled(banks(), torch.Generator().manual_seed(2))
    assert torch.equal(plain.base_answer, bank.base_answer)
    assert bool(same(bank.causal.run(bank.base)["y"], MODEL.run(bank.base)["y"]).all())
    under = bank.causal.run(bank.base, do={"p": torch.zeros(len(bank), dtype=torch.long)})
    assert bool((under["p"] == 0).all())
    assert set(bank.families) == {"p", "q", "p+q", "none"}


def test_another_generator_deals_otherwise():
    one, two = (shuffled(banks(), torch.Generator().manual_seed(s))[0] for s in (1, 2))
    assert not torch.equal(one.labels["p"], two.labels["p"])
