"""Indirect object identification: against readings of the prompt text itself, and hand-written examples."""

import re
from types import SimpleNamespace

import pytest
import torch

from plot_ot.abstract.banks import Bank
from plot_ot.tasks.ioi_data import (
    FAMILIAR,
    FAMILIES,
    FIT_FAMILIES,
    FRESH,
    NAMES,
    OTHER,
    PAIR,
    TEMPLATE,
    TEMPLATES,
    USUAL,
    VARIABLES,
    answer_tokens,
    causal_model,
    draw_rows,
    draw_splits,
    encoder,
    examples,
    name_pairs,
    render,
    says,
    sources,
    template_pass_rates,
)
from plot_ot.tasks.text_data import CELLS, Sizes, TextBanks
from refusals import assert_refused


def generator(seed: int = 1000) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def always(rows: torch.Tensor) -> torch.Tensor:
    return torch.ones(len(rows), dtype=torch.bool)


@pytest.fixture(scope="module")
def banks() -> TextBanks:
    return draw_splits(1000, always, Sizes(60, 40, 40, 40))


def read(prompt: str) -> tuple[int, str]:
    """Position and name of the answer, by reading the text: the name that is said only once (the oracle)."""
    said = [w for w in re.findall(r"\w+", prompt) if w in NAMES]
    assert len(said) == 3
    [once] = [n for n in said if said.count(n) == 1]
    return said[:2].index(once), once


class Words:
    """A tokenizer of whole words, with or without the space before them; unknown words are cut into letters."""

    pad_token_id, eos_token_id, unk_token_id = 0, 0, -1

    def __init__(self, words: list[str]) -> None:
        self.ids = {w: k + 1 for k, w in enumerate(dict.fromkeys(words))}

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        ids = []
        for word in re.findall(r" ?\w+|[^\w]", text):
            ids += [self.ids[word]] if word in self.ids else [1000 + ord(c) for c in word]
        return ids

    def __call__(self, texts: list[str], add_special_tokens: bool) -> dict[str, list[list[int]]]:
        return {"input_ids": [self.encode(t) for t in texts]}

    def decode(self, ids: list[int]) -> str:
        spelled = {i: w for w, i in self.ids.items()}
        return "".join(spelled.get(i, chr(max(i - 1000, 32))) for i in ids)


def test_prompts_of_both_patterns() -> None:
    john, mary = NAMES.index("John"), NAMES.index("Mary")
    assert render(torch.tensor([[0, john, mary, 0, 0, 0], [1, john, mary, 1, 1, 1]])) == [
        "When John and Mary went to the store, John gave a drink to",
        "After John and Mary met at the garden, Mary handed a book to",
    ]


def test_words_of_the_lists_differ() -> None:
    assert len(set(NAMES)) == len(NAMES) == len(FAMILIAR) + len(FRESH)
    assert len(set(TEMPLATES)) == len(USUAL) + len(OTHER)
    assert not any(t.startswith("{") for t in TEMPLATES)  # a name without its space is another token


def test_the_causal_model_agrees_with_reading_the_prompt() -> None:
    rows = draw_rows(300, generator(), about=name_pairs(range(len(NAMES))), templates=range(len(TEMPLATES)))
    values = causal_model().run(rows)
    for prompt, position, name in zip(render(rows), values["name_position"], values["name"], strict=True):
        assert read(prompt) == (int(position), NAMES[int(name)])


def test_names_orders_and_patterns_are_balanced() -> None:
    rows = draw_rows(2000, generator())
    assert 900 < (rows[:, 1] < rows[:, 2]).sum() < 1100
    assert 900 < causal_model().run(rows)["name_position"].sum() < 1100
    assert torch.bincount(causal_model().answer(rows), minlength=30)[:30].min() > 30


@pytest.mark.parametrize("family", FAMILIES)
def test_families_change_what_they_say(family: str) -> None:
    base = draw_rows(200, generator())
    source = sources(base, family, generator())
    [(position, token)] = FAMILIES[family]
    for before, after in zip(render(base), render(source), strict=True):
        (p, name), (q, other) = read(before), read(after)
        assert (p != q, name != other) == (position, token)
        own = {w for w in re.findall(r"\w+", before) if w in NAMES}
        theirs = {w for w in re.findall(r"\w+", after) if w in NAMES}
        assert not own & theirs if "names" in family else own == theirs
        assert before != after
    assert (base[:, TEMPLATE] == source[:, TEMPLATE]).all()


def test_labels_of_swaps_by_hand() -> None:
    table = {row["family"]: row for row in examples()}
    assert list(table) == list(FAMILIES)
    expected = {  # base: When John and Mary went to the store, John gave a drink to -> Mary, the second
        "names": ("Mary", None),
        "order": ("John", "Mary"),
        "subject": ("John", "John"),
        "order_subject": ("Mary", "John"),
        "names_subject": ("John", None),
        "scene": ("Mary", "Mary"),
    }
    for family, (position, token) in expected.items():
        row = table[family]
        assert row["base_answer"] == "Mary"
        assert row["swap_name_position"] == position
        assert row["swap_name_token"] == (token or row["source_answer"]) == read(row["source"])[1]


def test_only_other_names_with_another_subject_tell_all_three_answers_apart() -> None:
    base, causal = draw_rows(100, generator()), causal_model()
    for family in FAMILIES:
        source = sources(base, family, generator())
        answers = torch.stack([causal.answer(base), *(causal.swap(base, source, v) for v in VARIABLES)])
        apart = all((answers[i] != answers[j]).all() for i, j in ((0, 1), (0, 2), (1, 2)))
        assert apart == (family == "names_subject")


def pairs_of(*banks: Bank) -> set[frozenset[int]]:
    rows = torch.cat([r for b in banks for r in (b.base, b.source)])
    return {frozenset(p) for p in rows[:, PAIR].tolist()}


def test_splits_share_no_pair_of_names(banks: TextBanks) -> None:
    splits = banks.splits
    parts = [pairs_of(splits.fit), pairs_of(splits.calibration), pairs_of(*splits.test.values())]
    assert not any(a & b for k, a in enumerate(parts) for b in parts[k + 1 :])
    assert set().union(*parts) <= {frozenset(p) for p in name_pairs().tolist()}


def test_transfer_has_names_and_templates_of_its_own(banks: TextBanks) -> None:
    for bank in banks.transfer.values():
        for rows in (bank.base, bank.source):
            assert set(rows[:, PAIR].flatten().tolist()) <= set(FRESH)
            assert set(rows[:, TEMPLATE].tolist()) <= set(OTHER)


def test_bank_sizes_cells_and_families(banks: TextBanks) -> None:
    fit = banks.splits.fit
    counts = torch.bincount(fit.family, minlength=len(FAMILIES)).tolist()
    assert dict(zip(fit.families, counts, strict=True)) == {**dict.fromkeys(FIT_FAMILIES, 12), "scene": 0}
    for bank_set in (banks.splits.test, banks.transfer):
        for (variable, kind), bank in bank_set.items():
            assert len(bank) == 40
            assert (bank.changed[variable] == (kind == "sensitivity")).all()
    calibration = banks.splits.calibration
    cells = list(zip(*(calibration.changed[v].tolist() for v in VARIABLES), strict=True))
    assert [cells.count(c) for c in CELLS] == [20] * 4
    power = calibration.power("name_position")
    assert not power.missing(10)
    assert calibration.power("name_token").is_output


def test_the_same_seed_gives_the_same_banks(banks: TextBanks) -> None:
    again, other = (draw_splits(seed, always, Sizes(60, 40, 40, 40)) for seed in (1000, 1001))
    assert torch.equal(again.splits.fit.base, banks.splits.fit.base)
    assert torch.equal(again.splits.fit.source, banks.splits.fit.source)
    assert not torch.equal(other.splits.fit.base, banks.splits.fit.base)


def test_only_prompts_answered_correctly_are_kept() -> None:
    def knows_even_templates(rows: torch.Tensor) -> torch.Tensor:
        return rows[:, TEMPLATE] % 2 == 0

    banks = draw_splits(1000, knows_even_templates, Sizes(200, 20, 20, 20))
    for bank in (banks.splits.fit, banks.splits.calibration, *banks.splits.test.values(), *banks.transfer.values()):
        assert knows_even_templates(bank.base).all()
        assert knows_even_templates(bank.source).all()
    assert all(0.25 < banks.pass_rates["fit"][f] < 0.75 for f in FIT_FAMILIES)
    assert set(template_pass_rates(knows_even_templates, 5).values()) == {0.0, 1.0}


def test_a_model_that_cannot_do_it_is_refused_with_counts() -> None:
    assert_refused(
        lambda: draw_splits(1000, lambda rows: ~always(rows), Sizes(60, 40, 40, 40)), ["fit", " 0 of ", "10%"]
    )


def test_tokens_are_padded_on_the_left_after_bos() -> None:
    rows = torch.tensor([[0, 0, 1, 0, 0, 0], [4, 0, 1, 0, 0, 0]])
    tokenizer = Words([w for p in render(rows) for w in re.findall(r" ?\w+", p)])
    ids, mask = encoder(tokenizer, bos=777)(rows)
    lengths = mask.sum(dim=1)
    for prompt, row, n in zip(render(rows), ids.tolist(), lengths.tolist(), strict=True):
        assert row[-n:] == [777, *tokenizer.encode(prompt)]
    assert lengths[0] < lengths[1] == ids.shape[1]
    assert encoder(tokenizer, bos=None)(rows)[1].sum() == mask.sum() - 2


def test_names_must_be_single_tokens_that_differ() -> None:
    spaced = [f" {n}" for n in NAMES]
    whole = Words([*spaced, *NAMES])
    groups = answer_tokens(whole)
    assert [g[0] for g in groups] == [whole.ids[s] for s in spaced]
    assert all(len(g) == 2 for g in groups)
    cut = Words([s for s in [*spaced, *NAMES] if s not in (" Mary", " Ruth")])
    assert_refused(lambda: answer_tokens(cut), ["Mary, Ruth", "single tokens"])
    same = Words(spaced)
    same.ids[" Jane"] = same.ids[" John"]
    assert_refused(lambda: answer_tokens(same), ["John", "Jane", "share the token"])


def test_what_counts_as_saying_the_name() -> None:
    tokenizer = SimpleNamespace(decode=lambda ids: [" Mary", "mary", " Mar", "", " John"][ids[0]])
    mary = torch.full((5,), NAMES.index("Mary"))
    assert says(tokenizer, torch.arange(5), mary).tolist() == [True, True, False, False, False]


def test_wrong_rows_families_and_names_are_refused() -> None:
    good = draw_rows(3, generator())
    twice = good.clone()
    twice[1, PAIR] = 5
    assert_refused(lambda: render(twice), ["Row 1", "two names differ"])
    assert_refused(lambda: render(good[:, :4]), ["[rows, 6]", "(3, 4)"])
    assert_refused(lambda: sources(good, "subjects", generator()), ["subjects", "Did you mean 'subject'"])
    assert_refused(lambda: sources(good, "names", generator(), about=good[:1, PAIR]), ["too few"])
