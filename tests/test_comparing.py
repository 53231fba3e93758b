"""Rival hypotheses: which one the network implements, where it fails, and what would tell them apart."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import plot_ot
from plot_ot import CausalModel, ClosedForm, Edit, Frame, Handle, Hypothesis, Mechanism, Method, PlotError, compare
from plot_ot.cli import app
from plot_ot.comparing import plan_comparison
from plot_ot.comparing.entry import finalists_of, standing_of
from plot_ot.comparing.regions import Clause, Rule, find_region
from plot_ot.comparing.rivals import gather
from plot_ot.comparing.standings import Comparison, Stand, Standing
from plot_ot.comparing.swaps import Resampled, Scored, all_else, predicted, sets_of, together, unmentioned_pairs
from plot_ot.comparing.telling import Telling, telling
from plot_ot.engine.watching import watched_by
from plot_ot.judging.intervals import Interval
from plot_ot.judging.status import Status
from plot_ot.judging.verdict import Verdict
from plot_ot.planner import MACHINES
from plot_ot.subjects import Place
from truth.kinds import ROWS
from truth.programs import HYPOTHESES, OTHERS, PROGRAMS, causal, switched, wired

QUICK = Method("closed-form", "closed forms", (ClosedForm(),))
THREE = {n: HYPOTHESES[n] for n in ("01+23", "02+13", "04+23")}


# -- swaps ------------------------------------------------------------------------------------------------------------


def edit(place: Place, rank: int, seed: int, kind: str = "oblique") -> Edit:
    generator = torch.Generator().manual_seed(seed)
    if kind == "whole":
        return Edit(place, Frame.identity(place.width), torch.ones(place.width))
    read, write = (torch.randn(place.width, rank, generator=generator) for _ in range(2))
    return Edit(place, Frame.oblique(read, write / 5), torch.rand(rank, generator=generator) + 0.5)


@pytest.mark.parametrize("kinds", [("oblique", "oblique"), ("whole", "oblique"), ("oblique", "whole")])
def test_edits_of_one_place_follow_each_other(kinds):
    place = Place("h", 6, 1)
    edits = [edit(place, 2, 1000 + k, kind) for k, kind in enumerate(kinds)]
    base, source = torch.randn(2, 5, 6, generator=torch.Generator().manual_seed(1))
    [joint] = together([Handle(v, (e,), "x") for v, e in zip("pq", edits, strict=True)])
    expected = base
    for e in edits:
        expected = e.swapping(source)(expected)
    assert torch.allclose(joint.apply(base[None], source)[0], expected, atol=1e-5)


def test_all_else_and_the_handle_make_the_whole_place():
    place = Place("h", 6, 1)
    own = edit(place, 2, 1000)
    base, source = torch.randn(2, 5, 6, generator=torch.Generator().manual_seed(1))
    [rest] = all_else(Handle("p", (own,), "x"))
    swapped = rest.apply(base[None], source)[0]
    read = own.frame.read
    assert torch.allclose(swapped @ read, base @ read, atol=1e-4)  # what the handle reads stays the base's
    write = own.frame.write
    project = torch.eye(6) - write @ torch.linalg.pinv(write)
    assert torch.allclose(swapped @ project, source @ project, atol=1e-4)  # beside what it writes, all is the source's
    [nothing] = all_else(Handle("p", (edit(place, 6, 1, "whole"),), "x"))
    assert torch.allclose(nothing.apply(base[None], source)[0], base, atol=1e-5)


def test_sets_are_all_or_a_sample_with_each_alone_and_all_together():
    generator = torch.Generator().manual_seed(0)
    assert sets_of("pq", generator) == [("p",), ("q",), ("p", "q")]
    some = sets_of("abcdef", generator)
    assert len(some) == len(set(some)) == 8
    assert {(v,) for v in "abcdef"} | {tuple("abcdef")} <= set(some)


def test_unmentioned_pairs_agree_in_all_that_the_answer_is_made_of():
    model = causal(PROGRAMS["01+23"])
    base, source = unmentioned_pairs(model, ROWS, "p", 100, torch.Generator().manual_seed(0))
    assert len(base) == 100
    at_base, at_source = model.run(ROWS[base]), model.run(ROWS[source])
    assert torch.equal(at_base["q"], at_source["q"])
    assert torch.equal(at_base["x4"], at_source["x4"])
    assert (at_base["p"] != at_source["p"]).all()
    assert not torch.equal(at_base["x2"], at_source["x2"])  # q's own parents may differ


def test_true_handles_make_joint_predictions_come_true_and_others_do_not():
    subject, model = wired(PROGRAMS["01+23"], 1000), causal(PROGRAMS["01+23"])
    bank = plot_ot.draw_pairs(model, ROWS, "balanced", 60, torch.Generator().manual_seed(0))
    [recording] = plot_ot.record(subject, bank)
    found = plot_ot.localize(subject, model, ROWS, method=QUICK, size=120, progress=False).handles
    sets = sets_of(model.variables, torch.Generator())
    right = predicted(recording, bank.base, bank.source, model, found, sets, plot_ot.as_readout("softmax"))
    assert right.right.double().mean() > 0.97
    crossed = {"p": found["q"], "q": found["p"]}
    wrong = predicted(recording, bank.base, bank.source, model, crossed, sets, plot_ot.as_readout("softmax"))
    assert wrong.right[:2][wrong.moved[:2]].double().mean() < 0.6
    assert torch.equal(wrong.right[2], right.right[2])  # both together are the same swap


def test_strata_weigh_equally_and_draws_are_paired():
    right = torch.tensor([[True, True, True, False]])
    moved = torch.tensor([[False, False, True, True]])
    scored = Scored((("p",),), right, moved, torch.tensor([[True, True, False, False]]))
    assert scored.strata.tolist() == [[0, 0, 2, 2]]
    drawn = Resampled(torch.arange(4))
    share, draws = drawn.share(scored)
    assert share.value == pytest.approx((1.0 + 0.5) / 2)
    assert np.array_equal(draws, drawn.share(scored)[1])


# -- regions ----------------------------------------------------------------------------------------------------------


def items(seed, rule, inside, outside=0.02, size=600):
    rng = np.random.default_rng(seed)
    columns = {name: rng.integers(4, size=size).tolist() for name in ("a", "b", "c")}
    columns["kind"] = rng.choice(["red", "blue", "green"], size=size).tolist()
    where = rule.holds(columns) if rule else np.zeros(size, dtype=bool)
    wrong = (rng.random(size) < np.where(where, inside, outside)).astype(float)
    return columns, wrong, np.arange(size)


RULES = [
    Rule((Clause("a", "is", 2),)),
    Rule((Clause("kind", "is not", "red"),)),
    Rule((Clause("b", "<=", 1),)),
    Rule((Clause("a", "is", 1), Clause("kind", "is", "blue")), "or"),
    Rule((Clause("c", ">", 1), Clause("a", "is not", 0))),
    Rule((Clause("a", "is", "b", other=True),)),
]


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("inside", [0.95, 0.5])
def test_a_region_is_found_by_a_rule_that_covers_the_same_inputs(rule, inside):
    columns, wrong, _ = items(1000, rule, inside)
    held_out = items(1001, rule, inside)
    found = find_region(columns, wrong, held_out, columns)
    assert found is not None
    said, true = found.rule.holds(held_out[0]), rule.holds(held_out[0])
    assert (said & true).sum() / (said | true).sum() > 0.95, str(found)
    assert found.inside > found.outside + 0.3
    assert found.covers == pytest.approx(found.rule.holds(columns).mean())


def test_failures_without_a_pattern_give_no_region():
    found = [find_region(*items(1000 + k, None, 0.0, 0.3)[:2], items(3000 + k, None, 0.0, 0.3), {}) for k in range(40)]
    assert found == [None] * 40


def test_a_pattern_that_is_not_there_on_held_out_inputs_gives_no_region():
    columns, wrong, _ = items(1000, RULES[0], 0.9)
    assert find_region(columns, wrong, items(1001, None, 0.0, 0.1), columns) is None


# -- telling ----------------------------------------------------------------------------------------------------------


def test_inputs_that_tell_are_made_of_the_values_that_were_given():
    given = ROWS[ROWS[:, 1] == ROWS[:, 2]]
    field = gather({n: HYPOTHESES[n] for n in ("01+23", "02+13")}, given)
    found = telling(field, *field.rivals, seed=0)
    assert found.new
    assert found.share == 0
    for base, source, variable in found.pairs:
        rows = [torch.tensor([list(side.values())]) for side in (base, source)]
        first, second = (r.causal.swap(*rows, variable) for r in field.rivals)
        assert not torch.equal(first, second)
        assert any(row[0, 1] != row[0, 2] for row in rows)
    given = telling(gather(THREE, ROWS), *gather(THREE, ROWS).rivals[:2], seed=0)
    assert given.share > 0.1
    assert not given.new


def test_a_hypothesis_under_other_names_cannot_be_told():
    renamed = CausalModel(
        HYPOTHESES["01+23"].inputs,
        {
            "u": lambda x2, x3: (x2 + x3) % 3,
            "w": lambda x0, x1: (x0 + x1) % 3,
            "z": lambda u, w, x4: (u + w + x4) % 3,
        },
        "z",
    )
    field = gather([HYPOTHESES["01+23"], renamed], ROWS)
    found = telling(field, *field.rivals, seed=0)
    assert found.aligned == (("p", "w"), ("q", "u"))
    assert not found.pairs
    assert "no input of these values" in str(found)


# -- the whole --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def named():
    return compare(wired(PROGRAMS["02+13"], 1000), THREE, ROWS, size=120, method=QUICK)


def test_the_program_of_a_network_is_named(named):
    assert named.winner == "02+13"
    assert not named.tied
    assert [s.stand for s in named.standings].count(Stand.HOLDS) == 1
    assert named["02+13"].faithful.low > 0.9
    assert named["01+23"].faithful.high < 0.9
    ahead = named.differences["02+13", "01+23"]
    assert ahead.low > 0.2
    assert named.region is None


def test_a_comparison_tells_itself_in_words_tables_and_json(named):
    text = str(named)
    assert text.startswith("02+13 holds: ")
    assert "quick look" in text
    row = named.to_frame().set_index("hypothesis").loc["02+13"]
    assert row["explained_low"] <= row["explained"] <= row["explained_high"]
    again = json.loads(json.dumps(named.to_json()))
    assert again["winner"] == "02+13"
    assert len(again["differences"]) == 3
    assert named.to_markdown().count("\n| ") == 2 + 3
    with pytest.raises(PlotError, match="Choose from"):
        named["02+31"]


def test_html_escapes_names():
    rivals = {"<b>one": HYPOTHESES["01+23"], "two": HYPOTHESES["02+13"]}
    shown = compare(wired(PROGRAMS["02+13"], 1001), rivals, ROWS, size=60, method=QUICK)._repr_html_()
    assert "<b>one" not in shown
    assert "&lt;b&gt;one" in shown


def test_none_of_them_is_an_answer():
    found = compare(wired(OTHERS["14+23"], 1000), THREE, ROWS, size=120, method=QUICK)
    assert found.winner is None
    assert str(found).startswith("None of them")
    assert found["01+23"].verdicts["p"].status is Status.ABSENT


def test_rivals_that_hold_together_are_not_said_to_be_alike_where_inputs_tell_them_apart(named):
    first = named.standings[0]
    both = [first, replace(named.standings[1], stand=Stand.HOLDS)]
    pair = ({"x0": 0}, {"x0": 1}, "p")
    for pairs, new, said in (
        ((pair,), False, "hold, and explain the swaps equally well."),
        ((pair,), True, "hold, and cannot be told apart on these inputs."),
        ((), False, "hold, and cannot be told apart on these inputs."),
    ):
        tells = (Telling(both[0].name, both[1].name, (), 0.5, pairs, new),)
        found = replace(named, standings=tuple(both), tied=(both[1].name,), telling=tells)
        assert found.sentences[0] == f"{both[0].name} and {both[1].name} {said}"


def test_a_network_that_does_not_answer_so_is_left_out():
    far = CausalModel(
        HYPOTHESES["01+23"].inputs, {"p": lambda x0: x0, "y": lambda p, x5: torch.where(p < 5, 3 + x5, p)}, "y"
    )
    found = compare(wired(PROGRAMS["01+23"], 1000), {"true": THREE["01+23"], "far": far}, ROWS, size=120, method=QUICK)
    assert found.winner == "true"
    assert "answers only 0 of 729" in found["far"].why
    assert found["far"].explained is None


def test_the_region_where_a_network_follows_another_program_is_found():
    made = switched(1001)
    found = compare(
        made.subject, {n: HYPOTHESES[n] for n in (made.first, made.second)}, ROWS, size=120, method=QUICK, finalists=1
    )
    values = HYPOTHESES[found.standings[0].name].run(ROWS)
    said = found.region.rule.holds({n: v.tolist() for n, v in values.items()})
    fails = (~made.where if found.standings[0].name == made.first else made.where).numpy()
    assert (said & fails).sum() / (said | fails).sum() >= 0.9
    assert f"fails where {found.region.rule}" in str(found)


def test_plain_hypotheses_are_brought_to_one_code():
    def written(order):
        h = Hypothesis(inputs=["a", "b"], answers=["no", "yes"], name=f"h{order[0]}")
        h.variable(name="same", parents=["a", "b"])(lambda a, b: a == b)
        h.output(name="out", parents=["same"])(lambda same: "yes" if same else "no")
        h.rows([{"a": v, "b": v} for v in order])  # so that codes differ
        return h

    field = gather([written("xyz"), written("zyx")], [{"a": a, "b": b} for a in "xyz" for b in "xyz"])
    first, second = (r.causal.run(field.rows)["same"] for r in field.rivals)
    shown = [r.shown("same", v) for r, v in zip(field.rivals, (first, second), strict=True)]
    assert shown[0] == shown[1] == [row["a"] == row["b"] for row in field.dicts(field.rows)]
    assert torch.equal(*(r.causal.answer(field.rows) for r in field.rivals))


def verdict(status, variable="p"):
    return Verdict(variable, status, "", {})


@pytest.mark.parametrize("status", [Status.ABSENT, Status.IN_PART, Status.PLACED])
def test_only_the_whole_search_says_that_a_hypothesis_fails(status):
    verdicts, poor = {"p": verdict(status)}, Interval(0.5, 0.4, 0.6, 100)
    assert standing_of(verdicts, poor)[0] is Stand.FAILS
    stand, why = standing_of(verdicts, poor, whole=False)
    assert stand is Stand.BEHIND
    assert "by a quick look" in why


def test_none_of_them_says_which_were_only_looked_at_quickly():
    stands = {"a": Stand.FAILS, "b": Stand.BEHIND, "c": Stand.BEHIND}
    standings = tuple(Standing(name, stand, "", 1.0) for name, stand in stands.items())
    found = Comparison(standings, {}, (), (), None, 10, 0.1)
    assert found.winner is None
    assert found.sentences[0] == "None of them holds so far: a fails; only a quick look was taken at b, c."


@pytest.mark.parametrize(
    ("statuses", "explained", "stand"),
    [
        ([Status.PLACED, Status.COMPACT], (0.95, 0.9, 1.0), Stand.HOLDS),
        ([Status.PLACED, Status.OUTPUT], (0.95, 0.9, 1.0), Stand.HOLDS),
        ([Status.PLACED, Status.IN_PART], (0.95, 0.9, 1.0), Stand.FAILS),
        ([Status.PLACED, Status.DECODABLE], (0.95, 0.9, 1.0), Stand.UNDECIDED),
        ([Status.PLACED, Status.ABSENT], (0.95, 0.9, 1.0), Stand.FAILS),
        ([Status.PLACED, Status.UNDECIDED], (0.95, 0.9, 1.0), Stand.UNDECIDED),
        ([Status.OUTPUT, Status.OUTPUT], (0.95, 0.9, 1.0), Stand.UNDECIDED),
        ([Status.PLACED, Status.PLACED], (0.7, 0.6, 0.79), Stand.FAILS),
        ([Status.PLACED, Status.PLACED], (0.82, 0.75, 0.9), Stand.UNDECIDED),
    ],
)
def test_a_hypothesis_holds_when_all_its_variables_are_there_and_its_predictions_come_true(statuses, explained, stand):
    verdicts = {f"v{k}": verdict(s, f"v{k}") for k, s in enumerate(statuses)}
    assert standing_of(verdicts, Interval(*explained, 100))[0] is stand


def test_the_best_few_go_on_and_all_that_do_well():
    scores = {"a": 0.7, "b": 0.65, "c": 0.6, "d": 0.4}
    assert finalists_of(scores, 2) == {"a", "b"}
    assert finalists_of(scores, None) == set(scores)
    assert finalists_of({"a": 1.0, "b": 0.95, "c": 0.92, "d": 0.84}, 1) == {"a", "b", "c"}
    assert finalists_of({"a": 1.0, "b": 0.8}, 2) == {"a"}


# -- refusals ---------------------------------------------------------------------------------------------------------


def other_inputs():
    return CausalModel(["x0", "x1"], {"p": lambda x0: x0, "y": lambda p, x1: p + x1}, "y")


def text(answers=("no", "yes"), template="{a}{b}"):
    h = Hypothesis(template=template, answers=answers)
    h.variable(name="same", parents=["a", "b"])(lambda a, b: a == b)
    h.output(name="out", parents=["same"])(lambda same: "yes" if same else "no")
    return h


SAID = [{"a": a, "b": b} for a in "xyz" for b in "xyz"]


@pytest.mark.parametrize(
    ("hypotheses", "inputs", "options", "said"),
    [
        ([HYPOTHESES["01+23"]], ROWS, {}, "at least two"),
        ([HYPOTHESES["01+23"], "two"], ROWS, {}, "expected a Hypothesis"),
        ([HYPOTHESES["01+23"], other_inputs()], ROWS, {}, "same inputs"),
        ([HYPOTHESES["01+23"], text()], ROWS, {}, "the same way"),
        (THREE, (ROWS, ROWS), {}, "found pairs"),
        (THREE, [{"x0": 1}], {}, "tensor of integer rows"),
        (THREE, ROWS[:30], {}, "at least 60"),
        (THREE, ROWS, {"finalists": 0}, "at least 1"),
        (THREE, ROWS, {"method": "dass"}, "plot-das"),
        (THREE, ROWS, {"layers": [1]}, "language models"),
        ([text(), text(("yes", "no"))], SAID, {}, "same `answers"),
        ([text(), text(template="{a} {b}")], SAID, {}, "different prompts"),
    ],
)
def test_refused(hypotheses, inputs, options, said):
    with pytest.raises(PlotError, match=said):
        compare(wired(PROGRAMS["01+23"], 1000), hypotheses, inputs, size=60, **options)


def test_a_hypothesis_without_variables_is_refused():
    bare = CausalModel(HYPOTHESES["01+23"].inputs, {"y": Mechanism(("x0",), lambda x: x)}, "y")
    with pytest.raises(PlotError, match="no variable between"):
        gather([HYPOTHESES["01+23"], bare], ROWS)


# -- the command ------------------------------------------------------------------------------------------------------

TASK = """
import sys
sys.path.insert(0, {tests!r})
from truth.kinds import ROWS
from truth.programs import HYPOTHESES, PROGRAMS, wired
hypothesis, inputs, subject = HYPOTHESES[{name!r}], ROWS, wired(PROGRAMS["02+13"], 1000)
print("loaded")
"""


def test_the_cost_of_a_comparison_is_told_beforehand():
    """The quick look is counted as it runs: its responses on the calibration bank and the tests."""
    chosen = {n: HYPOTHESES[n] for n in list(HYPOTHESES)[:2]}
    machine = MACHINES["h100"].changed(gpu=False)
    plan = plan_comparison(wired(PROGRAMS["01+23"], 1000), chosen, ROWS, machine, size=40, method=QUICK)
    for name in chosen:
        assert plan.quick[name].cost.block_tokens == plan.whole[name].cost.block_tokens  # the same method
        assert not plan.quick[name].not_counted
    thorough = plan_comparison(wired(PROGRAMS["01+23"], 1000), chosen, ROWS, machine, size=40)
    assert all(thorough.whole[n].cost.block_tokens > 5 * plan.quick[n].cost.block_tokens for n in chosen)


def test_the_steps_of_a_comparison_name_the_hypotheses():
    said = []

    class Watcher:
        def step(self, words):
            said.append(words)

        def part(self, done, total): ...

        def tell(self, words): ...

    with watched_by(Watcher()):
        compare(wired(PROGRAMS["01+23"], 1000), list(HYPOTHESES.values())[:2], ROWS, size=40, method=QUICK, finalists=1)
    assert said[0].startswith("recording")
    assert sum(words.startswith("a quick look at") for words in said) == 2
    assert sum(words.startswith("the whole search for") for words in said) >= 1


def test_the_command_prints_sentences_or_json(tmp_path):
    paths = []
    for name in ("02+13", "01+23"):
        paths.append(tmp_path / f"h{name[:2]}.py")
        paths[-1].write_text(TASK.format(tests=str(Path(__file__).parent), name=name))
    given = [str(p) for p in paths]
    shown = CliRunner().invoke(app, ["compare", *given, "--size", "60", "--finalists", "1", "--json"])
    assert shown.exit_code == 0, shown.output
    found = json.loads(shown.stdout)
    assert {s["hypothesis"] for s in found["standings"]} == {"h02", "h01"}
    assert found["standings"][0]["hypothesis"] == "h02"
    told = CliRunner().invoke(app, ["compare", *given, "--size", "60", "--explain"])
    assert told.exit_code == 0, told.output
    assert "quick look" in told.stdout
    assert "h02" in told.stdout
    assert "holds" not in told.stdout
    for arguments, said in (([given[0]], "at least two task files"), ([*given, "--layers", "x"], "--layers")):
        refused = CliRunner().invoke(app, ["compare", *arguments])
        assert isinstance(refused.exception, PlotError)
        assert said in str(refused.exception)
