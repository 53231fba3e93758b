"""Controls and verdicts: what may be called localized, and what may not."""

import pytest
import torch
from torch import nn

from plot_ot.abstract.banks import draw_pairs
from plot_ot.abstract.causal_model import CausalModel
from plot_ot.edits import Frame
from plot_ot.handles import Edit, Handle
from plot_ot.judging.status import Status
from plot_ot.judging.verdict import Opponents, judge
from plot_ot.signatures import as_readout
from plot_ot.subjects import MLPSubject, record

READOUT = as_readout("softmax")
ROWS = torch.cartesian_prod(*[torch.arange(2)] * 6)


def xor_model(**changes: object) -> CausalModel:
    mechanisms = {
        "left": lambda a, b: a & b,
        "right": lambda c, d: c & d,
        "y": lambda left, right: left ^ right,
    } | changes.pop("mechanisms", {})
    return CausalModel(list("abcdef"), mechanisms, output="y", **changes)


def and_xor_net() -> nn.Sequential:
    """layer1: [and(a,b), and(c,d), e, f]; layer2: [left - right]+, [right - left]+; output y."""
    net = nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 2), nn.ReLU(), nn.Linear(2, 2))
    weights = [
        (
            torch.tensor([[1.0, 1, 0, 0, 0, 0], [0, 0, 1, 1, 0, 0], [0, 0, 0, 0, 1, 0], [0, 0, 0, 0, 0, 1]]),
            [-1.0, -1, 0, 0],
        ),
        (torch.tensor([[1.0, -1, 0, 0], [-1, 1, 0, 0]]), [0.0, 0]),
        (torch.tensor([[-10.0, -10], [10, 10]]), [5.0, -5]),
    ]
    for layer, (weight, bias) in zip([m for m in net if isinstance(m, nn.Linear)], weights, strict=True):
        layer.weight.data, layer.bias.data = weight, torch.tensor(bias)
    return net


def neuron_handle(subject: MLPSubject, variable: str, neuron: int) -> Handle:
    place = subject.places[0]
    gains = torch.zeros(place.width)
    gains[neuron] = 1.0
    return Handle(variable, (Edit(place, Frame.identity(place.width), gains),), subject.identity())


def judged(
    handle_neuron: int, causal: CausalModel | None = None, variable: str = "left", at_random: int = 3, few: int = 400
):
    causal = causal or xor_model()
    subject = MLPSubject(and_xor_net())
    generator = torch.Generator().manual_seed(0)
    banks = [draw_pairs(causal, ROWS, p, 400, generator, variable=variable) for p in ("sensitive", "invariant")]
    banks.append(draw_pairs(causal, ROWS, "balanced", 400, generator))
    sensitivity, invariance, both = record(subject, *banks)
    handle = neuron_handle(subject, variable, handle_neuron)
    opponents = Opponents(lambda k: neuron_handle(subject, variable, at_random))
    few_kept = invariance.select(torch.arange(few))
    return judge(handle, sensitivity, few_kept, both, both, opponents, READOUT, generator)


def test_the_right_neuron_is_placed_and_compact():
    verdict = judged(handle_neuron=0)
    assert verdict.status is Status.COMPACT
    assert verdict.evidence["handle"] == 1.0
    assert verdict.evidence["copy_source"] == pytest.approx(0.5)
    assert "placed in layer1, compact in 1 of 4 dimensions" in verdict.sentence


@pytest.mark.parametrize("neuron", [1, 2], ids=["the other variable's neuron", "a bystander"])
def test_the_wrong_neuron_is_not_localized(neuron):
    verdict = judged(handle_neuron=neuron)
    assert verdict.status is Status.ABSENT
    assert "does not beat copying the source" in verdict.sentence


def test_a_right_handle_tested_on_few_base_inputs_is_undecided():
    verdict = judged(handle_neuron=0, few=6)
    assert verdict.status is Status.UNDECIDED
    assert "of the pairs that keep the variable: whether that is 90% or more is open" in verdict.sentence
    assert "times as many base inputs would decide" in verdict.sentence


def test_a_handle_no_better_than_random_ones_is_not_localized():
    verdict = judged(handle_neuron=2, at_random=2)
    assert verdict.status is Status.ABSENT
    assert "does not beat random handles" in verdict.sentence


def test_random_handles_that_carry_the_variable_themselves_do_not_make_it_absent():
    verdict = judged(handle_neuron=0, at_random=0)
    assert verdict.status is Status.UNDECIDED
    assert "random handles are right on 1.000 of the discriminating pairs as well, so they carry it" in verdict.sentence
    assert "Not more pairs but other places would decide" in verdict.sentence


def test_a_variable_whose_label_is_always_the_sources_answer_is_an_output_variable():
    verdict = judged(0, xor_model(variables=["y"]), "y")
    assert verdict.status is Status.OUTPUT
    assert (
        "The earliest place that sets it when patched whole is layer1: the answer is right on 1.000 of"
        in verdict.sentence
    )


def test_pairs_that_never_separate_two_variables_leave_it_undecided():
    causal = CausalModel(
        list("abcdef"),
        {
            "left": lambda a, b: a & b,
            "copy": lambda left: left,
            "right": lambda c, d: c & d,
            "y": lambda copy, right: copy ^ right,
        },
        output="y",
    )
    verdict = judged(0, causal)
    assert verdict.status is Status.UNDECIDED
    assert "swapping 'copy' instead" in verdict.sentence
