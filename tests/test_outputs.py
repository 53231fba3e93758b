"""Outputs beyond one answer: numbers, lists of numbers, distributions, logit differences, sets."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import plot_ot
from plot_ot import (
    CausalModel,
    Hypothesis,
    Mechanism,
    PlotError,
    answer_sets,
    distributions,
    logit_difference,
    nearest_value,
    real_values,
)
from plot_ot.abstract.relabelling import shuffled
from plot_ot.stages.curvature import output_curvature, sharpness
from refusals import assert_refused
from truth import regression

OUTPUTS = torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(1000))


def test_real_values_are_right_within_the_tolerance_in_every_entry():
    readout, labels = real_values(0.5), OUTPUTS[0] + torch.tensor([0.4, -0.4, 0.0, 0.49])
    assert readout.correct(OUTPUTS[:1], labels).all()
    assert not readout.correct(OUTPUTS[:1], labels + torch.tensor([0.2, 0, 0, 0])).any()
    assert torch.allclose(readout.loss(OUTPUTS, labels), 2 * (OUTPUTS - labels).square().sum(dim=-1))


@pytest.mark.parametrize("jobs", [1, 3])
def test_one_number_has_labels_by_pair_or_by_job_and_pair(jobs):
    readout, outputs = real_values(0.25), OUTPUTS[:jobs, :, :1]
    by_pair, by_job = torch.arange(5.0), torch.arange(5.0 * jobs).reshape(jobs, 5)
    assert torch.allclose(readout.loss(outputs, by_pair), 8 * (outputs[..., 0] - by_pair).square())
    assert torch.allclose(readout.loss(outputs, by_job), 8 * (outputs[..., 0] - by_job).square())


def test_squared_errors_have_the_curvature_of_a_parabola_and_are_not_sharpened():
    readout = real_values(0.5)
    losses, slope, directions = output_curvature(OUTPUTS[0, :, :1], torch.zeros(5), readout)
    assert torch.allclose(slope, 4 * OUTPUTS[0, :, :1])
    assert torch.allclose(sum(d * d for d in directions), torch.full((5, 1), 4.0))
    assert torch.allclose(losses, 2 * OUTPUTS[0, :, 0].square())
    subject, causal = regression.planted(1000)
    bank = plot_ot.draw_pairs(causal, regression.rows(1000, 100), "balanced", 40, torch.Generator().manual_seed(1))
    [recording] = plot_ot.record(subject, bank)
    assert sharpness(recording, readout) == 1.0


def test_the_nearest_value_of_a_list_is_the_answer():
    values = [2.0, -1.0, 0.5]
    readout, outputs = nearest_value(values), torch.linspace(-3, 3, 40)[None, :, None]
    wanted = [min(range(3), key=lambda k: abs(values[k] - y)) for y in outputs.flatten().tolist()]
    assert readout.decide(outputs)[0].tolist() == wanted
    assert readout.correct(outputs, torch.tensor(wanted)).all()
    assert torch.allclose(readout.loss(outputs, torch.zeros(40)), 0.5 * ((outputs[..., 0] - 2) / 1.5).square())
    assert readout.abstract(torch.tensor([2, 0]), 1).tolist() == [[0.5], [2.0]]


def test_distributions_are_compared_by_divergence_and_by_their_largest_gap():
    readout, labels = distributions(0.1), torch.softmax(OUTPUTS[1], dim=1)
    expected = torch.distributions.kl_divergence(
        torch.distributions.Categorical(probs=labels), torch.distributions.Categorical(logits=OUTPUTS)
    )
    assert torch.allclose(readout.loss(OUTPUTS, labels), expected, atol=1e-5)
    right = readout.correct(OUTPUTS, labels)
    assert right[1].all()
    assert torch.equal(right, (OUTPUTS.softmax(dim=-1) - labels).abs().amax(dim=-1) <= 0.1)
    certain = torch.tensor([[1.0, 0, 0, 0]])
    assert torch.isfinite(readout.loss(OUTPUTS[:1, :1], certain)).all()
    with pytest.raises(PlotError, match="summing to 1"):
        readout.abstract(torch.tensor([[0.5, 0.4]]), 2)


def test_a_logit_difference_of_two_columns_or_of_those_that_a_label_names():
    fixed, named = logit_difference(0.5, first=2, second=0), logit_difference(0.5)
    wanted = OUTPUTS[0, :, 2] - OUTPUTS[0, :, 0]
    both = torch.tensor([[2.0, 0.0]]).expand(5, 2)
    for readout, labels in ((fixed, wanted), (named, torch.cat([both, wanted[:, None]], dim=1))):
        assert readout.correct(OUTPUTS[:1], labels).all()
        assert torch.allclose(readout.loss(OUTPUTS, labels)[0], torch.zeros(5), atol=1e-6)
        assert not readout.correct(OUTPUTS[:1] + torch.tensor([0.0, 0, 1, 0]), labels).any()
        assert readout.correct(OUTPUTS[:1] + 7.0, labels).all()  # a constant does not matter
        features = readout.abstract(labels, 4)
        assert torch.allclose(features[:, 2] - features[:, 0], wanted)
    jobs = torch.stack([wanted, wanted + 1, wanted])  # three jobs of five pairs, and three pairs of five
    assert fixed.loss(OUTPUTS, jobs).shape == (3, 5)
    assert fixed.loss(OUTPUTS[:, :3], jobs[:, :3]).shape == (3, 3)


SETS = [[0, 1], [1, 2, 3], [3], [0, 1, 2]]


def test_the_mass_of_a_set_against_brute_force():
    readout = answer_sets(SETS, classes=4)
    p = OUTPUTS.softmax(dim=-1)
    for k, some in enumerate(SETS):
        mass = sum(p[..., c] for c in some)
        labels = torch.full((5,), k)
        assert torch.allclose(readout.neural(OUTPUTS)[..., k], mass, atol=1e-6)
        assert torch.allclose(readout.loss(OUTPUTS, labels), -mass.log(), atol=1e-5)
        assert torch.equal(readout.correct(OUTPUTS, labels), mass > 0.5)
    even = readout.abstract(torch.arange(4), 4)
    assert torch.allclose(even[3], torch.tensor([2 / 3, 2 / 3, 0, 1]))


def test_a_set_is_met_by_what_meets_a_part_of_it():
    readout = answer_sets(SETS, classes=4)
    table = [[bool(readout.accepts(torch.tensor([a]), torch.tensor([b]))) for b in range(4)] for a in range(4)]
    assert table == [[set(SETS[b]) <= set(SETS[a]) for b in range(4)] for a in range(4)]
    smallest = readout.decide(torch.tensor([[5.0, 5.0, 0, 0]]))
    assert int(smallest) == 0  # also 3 holds it, which is larger


def test_pairs_that_a_readout_cannot_tell_apart_do_not_discriminate():
    model = CausalModel(["a", "b"], {"p": lambda a: a / 10, "y": lambda p, b: p + b}, "y")
    base, source = torch.tensor([[1, 0], [1, 0], [1, 0]]), torch.tensor([[2, 1], [4, 1], [1, 1]])
    exact = plot_ot.Bank.from_pairs(model, base, source)
    rough = plot_ot.Bank.from_pairs(model.accepting(real_values(0.1).accepts), base, source)
    assert exact.discriminating("p").tolist() == [True, True, False]
    assert rough.discriminating("p").tolist() == [False, True, False]
    assert (exact.power("p").against_base, rough.power("p").against_base) == (2, 1)
    assert model.accepting(None) is model
    [dealt] = shuffled([rough], torch.Generator().manual_seed(1))
    assert dealt.causal.accepts is rough.causal.accepts


# -- end to end -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("make", "found"), [(regression.planted, True), (regression.absent, False)])
def test_a_regression_variable_is_found_where_it_is_and_only_there(make, found):
    subject, causal = make(1001)
    result = plot_ot.localize(
        subject, causal, regression.rows(1001), readout=real_values(regression.TOLERANCE), size=120, progress=False
    )
    assert [v.status.found for v in result.verdicts.values()] == [found, found]


class Greater(nn.Module):
    """The mass lies on all digits above a + b, or on all up to it."""

    def __init__(self) -> None:
        super().__init__()
        self.state = nn.Identity()
        self.turn = nn.Parameter(
            torch.linalg.qr(torch.randn(25, 25, generator=torch.Generator().manual_seed(1000)))[0], requires_grad=False
        )

    def forward(self, rows):
        a, b, mode, e = rows.long().unbind(dim=1)
        code = torch.cat([F.one_hot(a + b, 9).float(), (1.0 - 2 * mode)[:, None], F.one_hot(e, 15).float()], dim=1)
        back = self.state(code @ self.turn) @ self.turn.T
        above = torch.where(torch.arange(10) > torch.arange(9)[:, None], 4.0, -4.0)
        return back[:, :9] @ above * back[:, 9:10]


def test_greater_than_is_localized_by_sets_of_answers():
    sets = [list(range(y + 1, 10)) for y in range(9)] + [list(range(y + 1)) for y in range(9)]
    model = CausalModel(
        ["a", "b", "mode", "e"],
        {"year": lambda a, b: a + b, "y": lambda year, mode: year + 9 * mode},
        "y",
    )
    rows = torch.cartesian_prod(torch.arange(5), torch.arange(5), torch.arange(2), torch.arange(15))
    subject = plot_ot.load_subject(Greater(), places=["state"], example=rows)
    readout = answer_sets(sets, classes=10)
    result = plot_ot.localize(subject, model, rows, readout=readout, size=300, progress=False)
    assert result.verdicts["year"].status.found, str(result)
    low = result.verdicts["year"].evidence["copy_source"]
    assert low < 0.9  # copying gives the source's mode as well


def test_a_module_may_return_one_number_for_every_row():
    subject, causal = regression.planted(1000)
    rows = regression.rows(1000, 50)
    assert subject.module(rows.float()).shape == (50,)
    outputs = subject.record(rows).outputs
    assert outputs.shape == (50, 1)
    assert real_values(regression.TOLERANCE).correct(outputs.unsqueeze(0), causal.answer(rows)).all()


def test_labels_that_a_network_cannot_have_are_refused_before_anything_is_searched():
    """Real numbers under the default readout, and too many of them, which were compared entry by entry with others."""
    subject, causal = regression.planted(1000)
    rows = regression.rows(1000, 200)
    assert_refused(
        lambda: plot_ot.localize(subject, causal, rows, progress=False), ["real numbers", "softmax", "real_values"]
    )
    two = CausalModel(
        causal.inputs, {**causal.mechanisms, "y": lambda p, q: torch.stack([2 * p + q, p - q], dim=1)}, "y"
    )
    assert_refused(
        lambda: plot_ot.localize(subject, two, rows, readout=real_values(0.2), progress=False),
        ["2 numbers", "1 outputs"],
    )
    rivals = {"one": causal, "two": causal}
    assert_refused(lambda: plot_ot.compare(subject, rivals, rows, progress=False), ["real numbers", "real_values"])


def test_labels_that_name_their_columns_are_told_apart_by_these():
    """Columns are names: neighbours are no nearer than others, and an order turned round is the negative difference."""
    accepts = logit_difference(4.0).accepts
    label = torch.tensor([[0, 1, 10.0]]).expand(6, 3)
    others = torch.tensor([[0, 1, 10], [0, 1, 3], [0, 1, 1], [2, 1, 10], [1, 0, -10], [1, 0, 10]]).float()
    assert accepts(label, others).tolist() == [True, True, False, False, True, False]


# -- language models --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def asked():
    """An embedded net, its prompts, and the hypothesis that it finds the right line."""
    pytest.importorskip("transformers")
    lines = "{s0}. {c0}\n{s1}. {c1}\n{s2}. {c2}\n{s3}. {c3}"
    template = f"Question: A {{noun}} is {{color}}. What color is a {{noun}}?\n{lines}\nAnswer:"
    h = Hypothesis(template=template, answers=list("ABCDEFGH"))
    h.variable(name="pointer", parents=["color", "c0", "c1", "c2", "c3"])(lambda color, *c: list(c).index(color))
    h.output(name="answer", parents=["pointer", "s0", "s1", "s2", "s3"])(lambda pointer, *s: s[pointer])
    rng, inputs = random.Random(1000), []
    for _ in range(160):
        colours = ["red", "blue", "yellow", "green", "gray", "black", "white", "brown"]
        c, s = rng.sample(colours, 4), rng.sample("ABCDEFGH", 4)
        given = {"noun": rng.choice(["chair", "bear", "brick"]), "color": rng.choice(c)}
        inputs.append(given | {f"c{k}": x for k, x in enumerate(c)} | {f"s{k}": x for k, x in enumerate(s)})
    rows = h.rows(inputs)
    return plot_ot.load_subject("tiny"), h, inputs, rows


QUICK = plot_ot.Method("closed-form", "closed forms", (plot_ot.ClosedForm(),))


def test_sets_of_a_language_models_answers(asked, monkeypatch):
    """The answer's own set counts; its next token alone does not say it, so that the candidates are asked."""
    monkeypatch.setattr("plot_ot.judging.bench.RANDOM_HANDLES", 3)
    model, h, inputs, _ = asked
    sets = [[k, (k + 1) % 8] for k in range(8)]
    found = plot_ot.localize(
        model, h, inputs, readout=answer_sets(sets, classes=8), method=QUICK, size=60, layers=[2], progress=False
    )
    assert found.config["filter"] == "candidates"
    assert found.verdicts["pointer"].accuracy > 0.9
    said = {row["after"] for row in found.unit["examples"]}
    assert said <= set("ABCDEFGH")
    readout = answer_sets(sets, classes=8)
    assert_refused(
        lambda: plot_ot.localize(model, h, inputs, readout=readout, filter="vocabulary", progress=False),
        ["'vocabulary'", "sets of answers", "'candidates'"],
    )


@pytest.mark.parametrize("readout", [real_values(0.1), logit_difference(0.5), distributions(0.1)])
def test_numbers_are_not_compared_with_the_answers_of_a_hypothesis(asked, readout):
    model, h, inputs, _ = asked
    assert_refused(
        lambda: plot_ot.localize(model, h, inputs, readout=readout, progress=False),
        ["Hypothesis", "nearest_value", "CausalModel"],
    )
    assert_refused(
        lambda: plot_ot.compare(model, {"a": h, "b": h}, inputs, readout=readout, progress=False), ["Hypothesis"]
    )


def test_a_logit_difference_of_a_language_model(asked, monkeypatch):
    """A causal model over the hypothesis' rows says by how much the right letter leads the next one."""
    monkeypatch.setattr("plot_ot.judging.bench.RANDOM_HANDLES", 3)
    model, h, _, rows = asked
    subject = plot_ot.load_subject(model.model, h, tokenizer=model.tokenizer, layers=[2])
    right, outputs = h.causal.answer(rows), subject.record(rows).outputs
    lead = outputs.gather(1, right[:, None]) - outputs.gather(1, (right[:, None] + 1) % 8)
    usual = float(lead.mean())

    def answer(*values):
        letter = h.causal.mechanisms["answer"].function(*values).double()
        return torch.stack([letter, (letter + 1) % 8, torch.full_like(letter, usual)], dim=1)

    numbers = CausalModel(
        h.inputs,
        {
            "pointer": h.causal.mechanisms["pointer"],
            "lead": Mechanism(h.causal.mechanisms["answer"].parents, answer),
        },
        "lead",
    )
    found = plot_ot.localize(
        subject, numbers, rows, readout=logit_difference(5.0), method=QUICK, size=60, progress=False
    )
    assert found.verdicts["pointer"].accuracy > 0.8, str(found)
    assert found.verdicts["pointer"].evidence["copy_source"] < 0.1


# -- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: real_values(0), "above 0"),
        (lambda: real_values(float("nan")), "above 0"),
        (lambda: distributions(-1), "above 0"),
        (lambda: nearest_value([1.0]), "two different"),
        (lambda: nearest_value([1.0, 1.0]), "two different"),
        (lambda: nearest_value(["A", "B"]), r"finite numbers; found \['A', 'B'\]"),
        (lambda: logit_difference(1.0, first=1), "two different columns"),
        (lambda: logit_difference(1.0, first=1, second=1), "two different columns"),
        (lambda: logit_difference(1.0).abstract(torch.zeros(3), 4), "two columns and a number"),
        (lambda: logit_difference(1.0, 0, 7).abstract(torch.zeros(3), 4), "0..3"),
        (lambda: answer_sets([[0], [4]], classes=4), "0..3"),
        (lambda: answer_sets([[0], []], classes=4), "Set 1"),
        (lambda: answer_sets([[0, 1], [1, 0]], classes=4), "all different"),
        (lambda: answer_sets([[0], [1]], classes=4, mass=1.0), "between 0 and 1"),
        (lambda: answer_sets([[0], [1]], classes=3).neural(OUTPUTS), "4 outputs"),
        (lambda: nearest_value([0, 1]).decide(OUTPUTS), "one output"),
        (lambda: nearest_value([0, 1]).abstract(torch.tensor([2]), 1), "0 to 1"),
        (lambda: nearest_value([0, 1]).abstract(torch.tensor([0.5]), 1), "Let it answer by the number"),
        (lambda: answer_sets([[0], [1]], classes=4).abstract(torch.tensor([2]), 4), "0 to 1"),
        (lambda: plot_ot.as_readout("real_values"), r"readout=plot_ot.real_values\(tolerance\)"),
        (lambda: plot_ot.as_readout("reals"), "real_values"),
        (lambda: plot_ot.as_readout("softmax").refuse_others(torch.tensor([0.5, 1.0]), 2), "real_values"),
        (lambda: plot_ot.as_readout("softmax").refuse_others(torch.zeros(3, 2), 2), "sigmoid"),
        (lambda: plot_ot.as_readout("logits").refuse_others(torch.tensor([0, 1]), 1), "one output"),
        (lambda: real_values(1.0).refuse_others(torch.zeros(3), 2), "1 numbers, the network 2"),
        (lambda: real_values(1.0).abstract(torch.zeros(3, 2), 4), "2 numbers"),
        (lambda: distributions(0.1).abstract(torch.zeros(3), 4), "4 probabilities"),
    ],
)
def test_refused(make, said):
    with pytest.raises(PlotError, match=said):
        make()
