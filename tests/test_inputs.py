"""Which inputs count, and which values are held out: said, kept to, and refused where there is too little."""

from itertools import product
from typing import Any

import pytest
import torch
from torch import nn

import plot_ot
from chat_models import chat_model, chat_tokenizer
from plot_ot import Hypothesis
from plot_ot.abstract.admission import Admission
from plot_ot.abstract.banks import Bank, Splits
from plot_ot.abstract.causal_model import CausalModel
from plot_ot.abstract.growing import GrowingBanks
from plot_ot.abstract.holding_out import MIXED, HoldOut
from plot_ot.abstract.splitting import Pairs, from_inputs, from_pairs, shares_of
from plot_ot.localizing import as_given, chosen_filter
from refusals import assert_refused
from test_chats import EUROPE, SOME, SYSTEM

CITIES = [f"city{k}" for k in range(16)]
QUICK = plot_ot.Method(
    "quick",
    "one coupling over whole places",
    (
        plot_ot.Localize((plot_ot.whole_places,), plot_ot.Transport("uot-one-sided", (0.05,), (1.0,), scale="median")),
        plot_ot.Calibrate(plot_ot.Search((1,), (1.0,))),
    ),
)
ALWAYS = Admission(lambda rows: torch.ones(len(rows), dtype=torch.bool))


@pytest.fixture(autouse=True)
def few_random_handles(monkeypatch):
    monkeypatch.setattr("plot_ot.judging.bench.RANDOM_HANDLES", 3)


def countries() -> tuple[Hypothesis, list[dict[str, Any]]]:
    """Cities in four countries, asked in two ways."""
    h = Hypothesis(answers=list(range(8)), inputs=["city", "asked", "noise"])

    @h.variable
    def country(city):
        return int(city[4:]) % 4

    @h.output
    def answer(country, asked):
        return 2 * country + asked

    return h, [{"city": c, "asked": a, "noise": n} for c, a, n in product(CITIES, (0, 1), range(4))]


def seen(hold: HoldOut, *banks: Bank) -> set[Any]:
    return {e for b in banks for side in (b.base, b.source) for some in hold.entities(side) for e in some}


def assert_apart(parts: list[set[Any]]) -> None:
    assert len(set.union(*parts)) == sum(map(len, parts))


# -- hold-out by entity ----------------------------------------------------------------------------------------


def test_no_value_stands_in_two_splits_and_the_note_counts_them() -> None:
    h, given = countries()
    hold = HoldOut.by(h, "city")
    assert hold is not None
    made = from_inputs(h.causal, h.rows(given), ALWAYS, 100, torch.Generator().manual_seed(1000), hold)
    fit, calibration = made.splits.fit, made.splits.calibration
    parts = [seen(hold, fit), seen(hold, calibration), seen(hold, *made.splits.test.values())]
    assert [len(p) for p in parts] == [8, 4, 4]
    assert_apart(parts)
    assert made.notes[1] == "held out by 'city': 8 values to fit, 4 to calibrate, 4 to test, none in two of them"
    # without it, cities are everywhere
    plain = from_inputs(h.causal, h.rows(given), ALWAYS, 100, torch.Generator().manual_seed(1000)).splits
    assert seen(hold, plain.fit) & seen(hold, *plain.test.values())


def test_values_of_two_inputs_are_one_kind_of_entity() -> None:
    """A name that is first in one prompt and second in another is the same name; mixed prompts are left out."""
    names = [f"n{k}" for k in range(12)]
    h = Hypothesis(answers=[0, 1], inputs=["a", "b", "side"])
    h.variable(name="first", parents=["side"])(lambda side: side)
    h.output(name="y", parents=["first"])(lambda first: first)
    rows = h.rows([{"a": a, "b": b, "side": s} for a, b, s in product(names, names, (0, 1)) if a != b])
    hold = HoldOut.by(h, ["a", "b"])
    assert hold is not None
    deal = hold.deal(rows, (2, 1, 1), torch.Generator().manual_seed(1000))
    part = deal.splits_of(rows)
    pools = [{e for some in hold.entities(rows[part == k]) for e in some} for k in range(3)]
    assert [len(p) for p in pools] == [6, 3, 3]
    assert len(set.union(*pools)) == 12
    inside = 2 * (6 * 5 + 3 * 2 + 3 * 2)
    assert int((part != MIXED).sum()) == inside
    assert f"{len(rows) - inside} of {len(rows)} inputs have values of several splits" in deal.said(
        len(rows) - inside, len(rows)
    )


def test_pairs_that_cross_splits_are_left_out_and_counted() -> None:
    h, given = countries()
    rows, generator = h.rows(given), torch.Generator().manual_seed(1000)
    some = torch.randint(len(rows), (2, 1200), generator=generator)
    pairs, hold = Pairs(rows[some[0]], rows[some[1]]), HoldOut.by(h, "city")
    assert hold is not None
    made = from_pairs(h.causal, pairs, ALWAYS, generator, hold)
    banks = [made.splits.fit], [made.splits.calibration], list(made.splits.test.values())
    parts = [seen(hold, *b) for b in banks]
    assert_apart(parts)
    used = len(made.splits.fit) + len(made.splits.calibration)
    used += sum(len(made.splits.test["country", kind]) for kind in ("sensitivity", "invariance"))
    assert f"{1200 - used} of 1200 pairs have values of several splits and are left out" in made.notes[1]
    few = Pairs(pairs.base[:100], pairs.source[:100])
    assert_refused(
        lambda: from_pairs(h.causal, few, ALWAYS, generator, hold),
        ["'city'", "of 100 pairs", "fit", "test", "at least 20", "inputs alone"],
    )


def test_splits_of_ones_own_are_checked_for_shared_values() -> None:
    h, given = countries()
    rows = h.rows(given)
    hold = HoldOut.by(h, "city")
    assert hold is not None
    city = rows[:, 0]
    shuffled = torch.randperm(len(rows), generator=torch.Generator().manual_seed(1000))

    def bank(name: str, low: int, high: int) -> Bank:
        pool = rows[shuffled][(city[shuffled] >= low) & (city[shuffled] < high)]
        return Bank.from_pairs(h.causal, pool, pool.roll(1, 0), name=name)

    good = Splits.checked(bank("fit", 0, 8), bank("calibration", 8, 12), bank("test", 12, 16).by_variable())
    assert "8 values to fit, 4 to calibrate, 4 to test" in as_given(good, hold).notes[1]
    split = ["fit" if c < 8 else "calibration" if c < 12 else "test" for c in city.tolist()]
    own = Pairs(rows[shuffled], rows[shuffled], split=[split[k] for k in shuffled.tolist()])
    shared = Pairs(own.base, own.source.roll(1, 0), split=own.split)
    assert_refused(
        lambda: from_pairs(h.causal, shared, ALWAYS, torch.Generator(), hold), ["values stand in the fit", "city"]
    )


def test_too_few_values_and_unknown_inputs_are_refused_with_counts() -> None:
    h, given = countries()
    few = [g for g in given if g["city"] in CITIES[:5]] + [
        {**g, "noise": g["noise"] + 4} for g in given if g["city"] in CITIES[:5]
    ]
    hold = HoldOut.by(h, "city")
    assert_refused(
        lambda: from_inputs(h.causal, h.rows(few), ALWAYS, 40, torch.Generator(), hold),
        ["'city'", "5 values are too few", "at least 2", "6 in all"],
    )
    assert_refused(lambda: HoldOut.by(h, "town"), ["input to hold out by", "town", "city"])
    assert_refused(lambda: HoldOut.by(h, []), ["names no input"])
    assert HoldOut.by(h, None) is None


def test_a_split_that_no_deal_can_fill_is_refused_with_the_reason() -> None:
    """Every city has a country of its own: held out by country, nothing inside a split keeps it."""
    h = Hypothesis(answers=[0, 1], inputs=["city", "k"])
    h.variable(name="first", parents=["city"])(lambda city: city == "city0")  # one city alone makes it true
    h.output(name="y", parents=["first"])(lambda first: int(first))
    rows = h.rows([{"city": c, "k": k} for c, k in product(CITIES, range(8))])
    hold = HoldOut.by(h, "city")
    assert_refused(
        lambda: from_inputs(h.causal, rows, ALWAYS, 40, torch.Generator().manual_seed(1000), hold),
        ["'city'", "20 ways", "more inputs"],
    )


def test_banks_that_grow_keep_every_value_in_its_split() -> None:
    h, given = countries()
    hold = HoldOut.by(h, "city")
    assert hold is not None
    banks = GrowingBanks(h.causal, h.rows(given), ALWAYS, torch.Generator().manual_seed(1000), hold)
    parts: list[set[Any]] = [set(), set(), set()]
    for rows in (80, 128):
        banks.grow(rows)
        splits = banks.draw((30, 30, 30))
        for part, some in zip(parts, ([splits.fit], [splits.calibration], splits.test.values()), strict=True):
            part |= seen(hold, *some)
    assert_apart(parts)
    assert banks.notes[1].startswith("held out by 'city': 7 values to fit, 3 to calibrate, 6 to test")


def test_integers_of_a_causal_model_are_held_out_too() -> None:
    causal = CausalModel(["x", "y"], {"p": lambda x: x % 2, "out": lambda p, y: p + y}, "out")
    rows = torch.cartesian_prod(torch.arange(12), torch.arange(10))
    hold = HoldOut.by(causal, "x")
    assert hold is not None
    made = from_inputs(causal, rows, ALWAYS, 60, torch.Generator().manual_seed(1000), hold)
    fit, test = (
        set(torch.cat([b.base[:, 0], b.source[:, 0]]).tolist()) for b in (made.splits.fit, made.splits.calibration)
    )
    assert not fit & test


def test_a_check_says_what_would_be_held_out() -> None:
    h, given = countries()
    found = plot_ot.check(h, given, hold_out="city")
    assert any("8 values to fit" in note for note in found.notes)
    assert "too few" in plot_ot.check(h, given, hold_out="asked").verdict


# -- filters ---------------------------------------------------------------------------------------------------


def half_right(rows: torch.Tensor) -> torch.Tensor:
    return rows[:, 2] < 2


@pytest.mark.parametrize(("name", "kept"), [("candidates", 64), ("none", 128)])
def test_a_filter_decides_what_counts_and_the_pass_rate_is_told(name: str, kept: int) -> None:
    h, given = countries()
    made = from_inputs(h.causal, h.rows(given), Admission(half_right, name), 4000, torch.Generator().manual_seed(1000))
    assert made.notes[0].startswith("the network answers 64 of 128 distinct inputs as the causal model does")
    assert ("all of them count" in made.notes[0]) == (name == "none")
    assert (made.right, made.asked) == (64, 128)
    noise = torch.cat([b.base[:, 2] for b in (made.splits.fit, made.splits.calibration, *made.splits.test.values())])
    assert bool((noise >= 2).any()) == (name == "none")
    rows = h.rows(given)
    rows, generator = rows.repeat(3, 1), torch.Generator().manual_seed(1000)
    source = rows[torch.randperm(len(rows), generator=generator)]
    pairs = from_pairs(h.causal, Pairs(rows, source), Admission(half_right, name), generator)
    used = len(pairs.splits.fit) + len(pairs.splits.calibration)
    used += sum(len(pairs.splits.test["country", k]) for k in ("sensitivity", "invariance"))
    both = int((half_right(rows) & half_right(source)).sum())
    assert used == (len(rows) if name == "none" else both)
    assert f"both inputs of {both} of {len(rows)} pairs" in pairs.notes[0]


def test_filters_that_a_network_cannot_have_are_refused() -> None:
    assert chosen_filter(None, None) == "candidates"
    assert chosen_filter(None, object()) == "vocabulary"
    assert chosen_filter("none", None) == "none"
    assert_refused(lambda: chosen_filter("vocabulary", None), ["'vocabulary'", "load_subject", "'candidates'"])
    assert_refused(lambda: chosen_filter("top-1", object()), ["filter", "top-1", "vocabulary"])


def asked_in_chats() -> tuple[Hypothesis, list[dict[str, str]]]:
    h = Hypothesis(template=[SYSTEM, {"role": "user", "content": "{word} {city} {more}?"}], answers=["Yes", "No"])

    @h.variable
    def european(city):
        return city in EUROPE

    @h.output
    def answer(european, word):
        return "Yes" if european == (len(word) < 3) else "No"

    cities = ("Paris", "Lyon", "Rome", "Rio", "New", "Los")
    return h, [{"city": c, "word": w, "more": m} for c in cities for w in SOME[:8] for m in ("user", "system", "brief")]


def test_a_network_that_says_something_else_is_refused_with_what_it_says_and_the_other_filters() -> None:
    tokenizer = chat_tokenizer("trims")
    model = plot_ot.load_subject(chat_model(tokenizer), tokenizer=tokenizer)
    h, given = asked_in_chats()
    assert_refused(
        lambda: plot_ot.localize(model, h, given, progress=False),
        ["answers 0 of 144", "next token is", "times)", "filter='candidates'", "filter='none'"],
    )


@pytest.mark.parametrize("budget", [None, "auto"])
def test_the_filter_and_what_is_held_out_are_in_the_result_its_record_and_its_report(
    budget: Any, tmp_path: Any
) -> None:
    tokenizer = chat_tokenizer("trims")
    model = plot_ot.load_subject(chat_model(tokenizer), tokenizer=tokenizer)
    h, given = asked_in_chats()
    result = plot_ot.localize(
        model, h, given, method=QUICK, filter="none", hold_out="word", size=40, budget=budget, progress=False
    )
    assert result.config["filter"] == "none"
    assert result.config["hold_out"] == ["word"]
    text = str(result)
    assert "the tokenizer's chat template writes the prompts" in text
    assert "distinct inputs as the causal model does, of the candidate answers; without a filter" in text
    assert "held out by 'word': " in text
    [note] = [n for n in result.controls["notes"] if "filter" in n]
    assert note["filter"] == "none"
    assert note["asked"] >= 60
    assert 0 < note["right"] < note["asked"]
    report = result.save(tmp_path / "run")
    page = report.read_text(encoding="utf-8")
    assert "without a filter all of them count" in page
    assert "Held out by" in page
    assert "No filter: " in page
    again = plot_ot.Result.load(tmp_path / "run")
    assert any("held out by" in n for n in again.notes)


def test_too_few_inputs_that_are_all_answered_are_no_fault_of_the_network() -> None:
    """No advice to train it further, or to ask less of it."""
    causal = CausalModel(["a", "b"], {"s": lambda a, b: (a + b) % 3, "y": lambda s: s}, "y")
    rows = torch.cartesian_prod(torch.arange(5), torch.arange(5))
    with pytest.raises(plot_ot.PlotError) as refused:
        plot_ot.localize(plot_ot.load_subject(causal, example=rows), causal, rows, progress=False)
    assert str(refused.value).endswith(
        "25 of 25 distinct inputs as the causal model does; at least 60 inputs are needed. Give more of them."
    )


def test_banks_as_given_have_no_filter_of_ours() -> None:
    causal = CausalModel(["x", "y"], {"p": lambda x: x % 2, "out": lambda p, y: p ^ y}, "out")
    rows = torch.cartesian_prod(torch.arange(40), torch.arange(2))
    splits = from_inputs(causal, rows, ALWAYS, 40, torch.Generator().manual_seed(1000)).splits
    net = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 2))
    result = plot_ot.localize(
        plot_ot.load_subject(net, encode=lambda r: r.float()), causal, splits, method=QUICK, progress=False
    )
    assert result.config["filter"] == "as given"
    assert_refused(
        lambda: plot_ot.localize(
            plot_ot.load_subject(net, encode=lambda r: r.float()), causal, splits, hold_out="x", progress=False
        ),
        ["'x'", "values stand in the fit"],
    )


# -- variables with many values --------------------------------------------------------------------------------


def many_values(values: int = 40, contexts: int = 3, copies: int = 2) -> tuple[CausalModel, torch.Tensor]:
    """A variable with many values, each in few inputs, beside one with few."""
    causal = CausalModel(
        ["city", "context", "copy"],
        {"z": lambda city: city, "w": lambda context: context, "y": lambda z, w: contexts * z + w},
        "y",
    )
    return causal, torch.cartesian_prod(torch.arange(values), torch.arange(contexts), torch.arange(copies))


def test_rare_kinds_of_pair_do_not_shrink_the_others() -> None:
    causal, rows = many_values()
    made = from_inputs(causal, rows, ALWAYS, 200, torch.Generator().manual_seed(1000))
    bank = made.splits.calibration
    count = dict(zip(bank.families, torch.bincount(bank.family).tolist(), strict=True))
    assert count["z"] == count["z+w"] == 50  # equal shares of what there is enough of
    pool = torch.unique(torch.cat([bank.base, bank.source]), dim=0)
    assert 0 < count["none"] < 25
    assert (
        count["none"]
        == sum(  # all there are
            int((p[:2] == q[:2]).all() and not torch.equal(p, q)) for p in pool for q in pool
        )
    )
    assert any("that change nothing" in note and "`hold_out`" in note for note in made.notes)
    held = from_inputs(causal, rows, ALWAYS, 200, torch.Generator().manual_seed(1000), HoldOut.by(causal, "city"))
    assert torch.bincount(held.splits.calibration.family).min() >= 50  # inputs with one value stay together


def test_possible_changes_of_many_values_are_found_in_parts(monkeypatch: Any) -> None:
    from plot_ot.abstract import banks

    causal, rows = many_values(30)
    values = causal.run(rows)
    tied = [values["z"], values["z"] % 2, values["w"]]  # a function of the first never changes alone
    whole = banks._possible_changes(tied)
    monkeypatch.setattr(banks, "CANDIDATES", 1)
    assert banks._possible_changes(tied) == whole == [0, 1, 3, 4, 5, 7]


def test_pairs_of_a_large_pool_are_drawn_without_putting_all_in_order(monkeypatch: Any) -> None:
    from plot_ot.abstract import banks

    monkeypatch.setattr(banks, "LARGE_POOL", 64)
    monkeypatch.setattr(banks, "CANDIDATES", 32)
    causal, rows = many_values()
    bank = banks.draw_pairs(causal, rows, "sensitive", 200, torch.Generator().manual_seed(1000), variable="z")
    pairs = torch.cat([bank.base, bank.source], dim=1)
    assert len(torch.unique(pairs, dim=0)) == 200
    assert bool(bank.changed["z"].all())
    whole = sum(len(some) for some in banks._in_random_order(240, torch.Generator().manual_seed(0)))
    assert whole < 240 * 240


class Planted(nn.Module):
    """z and w in turned directions of one state; the answer is the nearest code of both."""

    def __init__(self, values: int, contexts: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1000)
        self.turn = torch.linalg.qr(torch.randn(24, 24, generator=generator))[0]
        self.codes = torch.randn(values, 8, generator=generator) / 8**0.5
        self.contexts, self.state = contexts, nn.Identity()

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        city, context, copy = rows.long().T
        parts = [self.codes[city], nn.functional.one_hot(context, self.contexts), 0.1 * copy[:, None]]
        held = torch.cat([p.float() for p in parts], dim=1)
        back = self.state(held @ self.turn[:, : held.shape[1]].T) @ self.turn[:, : held.shape[1]]
        far = (back[:, None, :8] - self.codes).square().sum(dim=-1)
        return (20 * back[:, None, 8 : 8 + self.contexts] - 40 * far[:, :, None]).flatten(1)


def test_a_variable_with_forty_values_is_placed() -> None:
    """Also on cities that were never seen while the handle was made."""
    causal, rows = many_values()
    subject = plot_ot.load_subject(Planted(40, 3), places=["state"], example=rows[:1], encode=lambda r: r)
    result = plot_ot.localize(subject, causal, rows, size=160, hold_out="city", progress=False)
    assert result.verdicts["z"].status.found, result
    assert result.verdicts["w"].status.found, result
    assert result.handles["z"].size < 24


@pytest.mark.parametrize(
    ("rows", "shares"),
    [(63, [31, 16, 16]), (64, [22, 10, 32]), (81, [33, 16, 32]), (127, [64, 31, 32]), (128, [64, 32, 32])],
)
def test_few_inputs_are_split_so_that_a_verdict_can_be_passed(rows, shares):
    assert shares_of(rows) == shares
    assert sum(shares) == rows


def test_a_perfect_handle_is_placed_with_sixty_four_inputs(monkeypatch):
    monkeypatch.setattr("plot_ot.judging.bench.RANDOM_HANDLES", 20)
    ands = {"left": lambda a, b: a & b, "right": lambda c, d: c & d, "y": lambda left, right: 2 * left + right}
    causal = CausalModel(list("abcdef"), ands, "y")
    net = nn.Sequential(nn.Linear(6, 2), nn.ReLU(), nn.Linear(2, 4)).requires_grad_(False)
    net[0].weight.copy_(torch.tensor([[1.0, 1, 0, 0, 0, 0], [0, 0, 1, 1, 0, 0]]))
    net[0].bias.fill_(-1)
    net[2].weight.copy_(torch.tensor([[-8.0, -8], [-8, 8], [8, -8], [8, 8]]))
    net[2].bias.copy_(torch.tensor([8.0, 0, 0, -8]))
    rows = torch.cartesian_prod(*[torch.arange(2)] * 6)
    verdicts = plot_ot.localize(net, causal, rows, progress=False).verdicts
    assert all(v.status.found for v in verdicts.values()), verdicts
