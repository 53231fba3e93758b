"""Which inputs count for which rival, and which values are held out: said, kept to, and refused where it cannot be."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from typer.testing import CliRunner

import plot_ot
from plot_ot import CausalModel, ClosedForm, Hypothesis, Mechanism, Method, compare
from plot_ot.abstract.holding_out import HoldOut
from plot_ot.cli import app
from plot_ot.comparing import plan_comparison
from plot_ot.comparing.drawing import RivalBanks, draw_banks
from plot_ot.comparing.rivals import gather
from plot_ot.planner import MACHINES
from refusals import assert_refused
from truth.kinds import ROWS
from truth.programs import HYPOTHESES, PROGRAMS, wired

QUICK = Method("closed-form", "closed forms", (ClosedForm(),))
TWO = {n: HYPOTHESES[n] for n in ("02+13", "01+23")}
COLOURS, LETTERS = ["red", "blue", "yellow", "green", "gray", "black", "white", "brown"], "ABCDEFGH"
NOUNS = ["chair", "bear", "brick", "spoon", "lemon", "kite", "bowl", "table"]


def sides(banks: RivalBanks) -> list[torch.Tensor]:
    """All inputs of fit, calibration and test."""
    tests = [side for b in banks.splits.test.values() for side in (b.base, b.source)]
    fit, calibration = banks.splits.fit, banks.splits.calibration
    return [torch.cat([fit.base, fit.source]), torch.cat([calibration.base, calibration.source]), torch.cat(tests)]


# -- the filter -------------------------------------------------------------------------------------------------------


def colours(by: str, **options) -> Hypothesis:
    """Which of the lines names the colour; or a rival that always takes the first line."""
    lines = "{s0}. {c0}\n{s1}. {c1}\n{s2}. {c2}\n{s3}. {c3}"
    h = Hypothesis(
        template=f"Fact: A {{noun}} is {{color}}.\nQuestion: What color is a {{noun}}?\n{lines}\nAnswer:",
        answers=list(LETTERS),
        name=by,
        **options,
    )
    if by == "the line":
        h.variable(name="pointer", parents=["color", "c0", "c1", "c2", "c3"])(lambda color, *c: list(c).index(color))
    else:
        h.variable(name="pointer", parents=["noun"])(lambda noun: len(noun) % 2)
    h.output(name="answer", parents=["pointer", "s0", "s1", "s2", "s3"])(lambda pointer, *s: s[pointer])
    return h


def questions(count: int) -> list[dict[str, str]]:
    rng, found = random.Random(1000), []
    for _ in range(count):
        c, s = rng.sample(COLOURS, 4), rng.sample(LETTERS, 4)
        given = {"noun": rng.choice(NOUNS), "color": rng.choice(c)}
        found.append(given | {f"c{k}": x for k, x in enumerate(c)} | {f"s{k}": x for k, x in enumerate(s)})
    return found


@pytest.mark.parametrize("asked", [None, "candidates"])
def test_a_language_model_is_asked_for_its_own_next_token_unless_told_otherwise(asked) -> None:
    """A tilted bias makes it say a word that is no answer on some prompts; among the candidates it stays right."""
    model = plot_ot.load_subject("tiny")
    rivals, given = [colours("the line"), colours("the noun")], questions(150)
    ids, mask = rivals[0].encoder(model.tokenizer, model.bos)(rivals[0].rows(given))
    word = model.tokenizer.convert_tokens_to_ids("chair")
    unembed = torch.nn.Linear(model.model.lm_head.in_features, model.model.lm_head.out_features)
    unembed.weight.data = model.model.lm_head.weight.data.clone()
    unembed.bias.data.zero_()
    model.model.lm_head = unembed
    with torch.no_grad():
        plain = model.model(input_ids=ids, attention_mask=mask).logits[:, -1]
        unembed.bias.data[word] = float((plain.amax(1) - plain[:, word]).median())
        said = model.model(input_ids=ids, attention_mask=mask).logits[:, -1]
    right = model.tokenizer.convert_tokens_to_ids(
        [row[f"s{[row[f'c{k}'] for k in range(4)].index(row['color'])}"] for row in given]
    )
    letters = model.tokenizer.convert_tokens_to_ids(list(LETTERS))
    own = (said.argmax(1) == torch.tensor(right)).double().mean()
    best = torch.tensor(letters)[said[:, letters].argmax(1)]
    among = (best == torch.tensor(right)).double().mean()
    assert own < 0.9 < 0.99 < among
    found = compare(model, rivals, given, filter=asked, method=QUICK, layers=[2], size=40, progress=False)
    assert found.filter == (asked or "vocabulary")
    assert found["the line"].agrees == pytest.approx(float(among if asked else own))
    assert f"(filter '{found.filter}')" in str(found)
    assert json.loads(json.dumps(found.to_json()))["filter"] == found.filter


def test_a_model_that_says_something_else_is_told_with_what_it_says_and_the_other_filters() -> None:
    model = plot_ot.load_subject("tiny")
    with torch.no_grad():
        model.model.lm_head = torch.nn.Linear(model.model.lm_head.in_features, model.model.lm_head.out_features)
        model.model.lm_head.weight.zero_()
        model.model.lm_head.bias.zero_()
        model.model.lm_head.bias[model.tokenizer.convert_tokens_to_ids("chair")] = 5.0
    found = compare(
        model, [colours("the line"), colours("the noun")], questions(80), layers=[2], size=40, progress=False
    )
    assert found.winner is None
    assert "answers as none of these hypotheses" in str(found)
    [note] = [n for n in found.notes if "next token" in n and "Most often" in n]
    assert "'chair' (80 times)" in note
    assert "filter='candidates'" in note


def test_without_a_filter_inputs_count_that_a_rival_answers_wrong() -> None:
    """A rival that is right on two thirds of the inputs, in a network that computes another program."""
    inputs = HYPOTHESES["01+23"].inputs
    other = CausalModel(
        inputs,
        {
            "p": Mechanism(("x0", "x1"), lambda a, b: (a + b) % 3),
            "y": Mechanism(("p", "x2", "x3", "x4", "x5"), lambda p, a, b, c, d: (p + a + b + c + (d == 0)) % 3),
        },
        "y",
        ["p"],
    )
    subject, rivals = wired(PROGRAMS["02+13"], 1000), {"true": HYPOTHESES["02+13"], "other": other}
    field = gather(rivals, ROWS)
    filtered = compare(subject, rivals, ROWS, size=60, method=QUICK, progress=False)
    every = compare(subject, rivals, ROWS, size=60, method=QUICK, filter="none", progress=False)
    assert filtered["other"].agrees == every["other"].agrees == pytest.approx(2 / 3)
    assert every.filter == "none"
    assert "nothing is asked of an input" in str(every)
    right = other.answer(ROWS) == HYPOTHESES["02+13"].answer(ROWS)
    for counted, wanted in ((right, False), (torch.ones_like(right), True)):
        drawn = draw_banks(field, {"true": torch.ones_like(right), "other": counted}, 60, 0)
        banks = drawn.banks["other"]
        assert isinstance(banks, RivalBanks)
        assert bool((torch.cat(sides(banks))[:, 5] == 0).any()) == wanted


# -- hold-out ---------------------------------------------------------------------------------------------------------


def cities(by: str) -> Hypothesis:
    h = Hypothesis(answers=list(range(8)), inputs=["city", "asked", "noise"], name=by)
    h.variable(name="country", parents=["city"])(lambda city: int(city[4:]) % 4 if by == "rest" else int(city[4:]) // 4)
    h.output(name="answer", parents=["country", "asked"])(lambda country, asked: 2 * country + asked)
    return h


CITIES = [{"city": f"city{c}", "asked": a, "noise": n} for c in range(16) for a in (0, 1) for n in range(4)]


def test_no_value_stands_in_two_splits_of_any_rival() -> None:
    field = gather([cities("rest"), cities("quarter")], CITIES)
    hold = HoldOut.by(field.rivals[0].hypothesis, "city")
    assert hold is not None
    every = {r.name: torch.ones(len(field.rows), dtype=torch.bool) for r in field.rivals}
    drawn = draw_banks(field, every, 60, 1000, hold)
    parts = [set(), set(), set()]
    for banks in drawn.banks.values():
        assert isinstance(banks, RivalBanks)
        for part, rows in zip(parts, sides(banks), strict=True):
            part |= {e for some in hold.entities(rows) for e in some}
    assert len(set.union(*parts)) == sum(map(len, parts)) == 16
    assert drawn.note.startswith("held out by 'city': 8 values to fit, 4 to calibrate, 4 to test")
    # without it, cities are everywhere
    plain = draw_banks(field, every, 60, 1000).banks["rest"]
    fit, _, test = sides(plain)
    assert set(hold.entities(fit)) & set(hold.entities(test))


class Network(nn.Module):
    """It adds up a and c, and b and d, modulo three, keeps both sums in a state, and adds them up; it reads no tag."""

    def __init__(self) -> None:
        super().__init__()
        self.state = nn.Identity()

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        a, b, c, d, _ = rows.long().unbind(dim=1)
        state = self.state(torch.cat([F.one_hot(v % 3, 3).float() for v in (a + c, b + d)], dim=1))
        both = F.relu(state[:, :3, None] + state[:, None, 3:] - 1)
        return torch.stack([8 * both.flip(2).roll(k + 1, 2).diagonal(dim1=1, dim2=2).sum(1) for k in range(3)], dim=1)


def sums(first: tuple[str, str], second: tuple[str, str]) -> CausalModel:
    add = {n: Mechanism(of, lambda x, y: (x + y) % 3) for n, of in (("left", first), ("right", second))}
    return CausalModel([*"abcd", "tag"], {**add, "y": lambda left, right: (left + right) % 3}, "y")


def test_what_is_held_out_is_said_in_the_result() -> None:
    rows = torch.cartesian_prod(*[torch.arange(3)] * 4, torch.arange(8))
    network = plot_ot.load_subject(Network(), places=["state"], example=rows)
    rivals = {"ac + bd": sums(("a", "c"), ("b", "d")), "ab + cd": sums(("a", "b"), ("c", "d"))}
    held = compare(network, rivals, rows, size=60, method=QUICK, hold_out="tag", progress=False)
    assert held.hold_out == ("tag",)
    assert "held out by 'tag': 4 values to fit, 2 to calibrate, 2 to test, none in two of them" in str(held)
    assert held.to_json()["hold_out"] == ["tag"]
    assert held.winner == "ac + bd"


def test_a_deal_that_serves_no_rival_is_refused() -> None:
    """Where all cities are of one country, no pair can change it, however they are dealt out."""
    constant = [{**c, "city": f"city{4 * int(c['city'][4:])}"} for c in CITIES]  # all of one country, by rest

    def plan():
        same = [cities("rest"), cities("rest")]
        field = gather(same, constant)
        every = {r.name: torch.ones(len(field.rows), dtype=torch.bool) for r in field.rivals}
        draw_banks(field, every, 60, 1000, HoldOut.by(same[0], "city"))

    assert_refused(plan, ["Held out by 'city'", "for every hypothesis", "20 ways", "leave `hold_out` out"])


# -- refusals, plans and the command ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"filter": "vocabulary"}, ["language model", "'candidates' or 'none'"]),
        ({"filter": "top-1"}, ["filter", "top-1", "candidates"]),
        ({"hold_out": "x9"}, ["input to hold out by", "x9", "x5"]),
        ({"hold_out": []}, ["names no input"]),
        ({"hold_out": "x0"}, ["3 values are too few", "6 in all"]),
        ({"seed": -1}, ["seed"]),
    ],
)
def test_refused(options, said) -> None:
    subject, machine = wired(PROGRAMS["01+23"], 1000), MACHINES["h100"].changed(gpu=False)
    assert_refused(lambda: compare(subject, TWO, ROWS, size=60, progress=False, **options), said)
    assert_refused(lambda: plan_comparison(subject, TWO, ROWS, machine, size=60, **options), said)


def test_pairs_and_positions_that_only_one_rival_names_are_refused() -> None:
    given, model = questions(2), plot_ot.load_subject("tiny")
    pair = [(given[0], given[1])]
    assert_refused(lambda: compare(model, [colours("the line"), colours("the noun")], pair), ["inputs alone", "a pair"])
    named = colours("the noun", positions={"asked": "What color is a {noun}"})
    assert_refused(
        lambda: compare(model, [colours("the line"), named], given), ["position 'asked'", "the same `positions"]
    )


TASK = """
import sys
sys.path.insert(0, {tests!r})
import torch
from truth.kinds import ROWS
from truth.programs import HYPOTHESES, PROGRAMS, wired
hypothesis, subject = HYPOTHESES[{name!r}], wired(PROGRAMS["02+13"], 1000)
inputs = ROWS
"""


def test_the_command_takes_both_options_and_says_so(tmp_path) -> None:
    paths = []
    for name in ("02+13", "01+23"):
        paths.append(tmp_path / f"h{name[:2]}.py")
        paths[-1].write_text(TASK.format(tests=str(Path(__file__).parent), name=name))
    given = ["compare", *map(str, paths), "--size", "40", "--finalists", "1"]
    shown = CliRunner().invoke(app, [*given, "--filter", "none", "--json"])
    assert shown.exit_code == 0, shown.output
    assert json.loads(shown.stdout)["filter"] == "none"
    for options, said in (
        (["--filter", "top-1"], ["top-1", "vocabulary"]),
        (["--hold-out", "x0"], ["too few"]),
        (["--hold-out", "x0", "--explain"], ["too few"]),
        (["--filter", "vocabulary", "--explain"], ["language model"]),
    ):
        refused = CliRunner().invoke(app, [*given, *options])
        assert all(word in str(refused.exception) for word in said), (options, refused.exception)
