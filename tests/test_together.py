"""Variables that several tokens hold together: families of named tokens, swapped at once."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch

import plot_ot
from plot_ot.edits import respond
from plot_ot.errors import PlotError
from plot_ot.judging.controls import full_patch
from plot_ot.methods import Method, progressive, random_like, random_progressive
from plot_ot.stages.calibrate import correct, pair_weights, scored
from plot_ot.stages.closed_form import ClosedForm
from plot_ot.stages.problem import State
from plot_ot.stages.together import Together, TogetherAtRandom, families
from plot_ot.subjects import Place
from refusals import assert_refused
from spread import halves

NAMES = "h@half1", "h@half2"
METHOD = Method("together", "", (Together(),))


def test_families_are_tokens_of_one_block_whose_names_differ_in_a_number() -> None:
    tokens = ("end1", "end2", "line 1.a", "line 2.a", "line 1.b", "end", "7", "8", "only3")
    places = [Place(f"block.{b}@{t}", 4, b) for b, t in product((0, 1), tokens)]
    found = families([*places, Place("block.0", 4, 0, -1), Place("block.1", 4, 1, -1)])
    said = [[[p.name for p in group] for group in of_block] for of_block in found]
    assert said == [
        [[f"block.{b}@end1", f"block.{b}@end2"], [f"block.{b}@line 1.a", f"block.{b}@line 2.a"]] for b in (0, 1)
    ]
    assert families([Place("block.0", 4, 0, -1)]) == []


@pytest.mark.parametrize("seed", [0, 1])
def test_a_variable_in_two_halves_is_controlled_at_both(seed: int) -> None:
    problem, test = halves("bits", seed, NAMES)
    alone = ClosedForm()(problem, State.start(problem)).handles["p"]
    both = METHOD.run(problem)[0].handles["p"]
    single, joint = (float(correct(test, h, problem.readout).double().mean()) for h in (alone, both))
    assert single < 0.8
    assert joint > 0.97
    assert both.places == list(NAMES)
    assert both.size <= 4  # whole, they would also take what is beside the halves
    weights = pair_weights(problem.calibration, "p", problem.score)
    again = float(scored(problem.calibration, both.batch(), "p", weights, problem.readout))
    assert both.chosen["calibration_score"] == pytest.approx(again)
    whole = full_patch("p", [e.place for e in both.edits], problem.subject)
    patched = float(scored(problem.calibration, whole.batch(), "p", weights, problem.readout))
    assert list(both.chosen["by_group"].values()) == [pytest.approx(patched)]
    assert patched < again


def test_what_one_place_does_as_well_stays_there() -> None:
    problem, _ = halves("bits", 0, NAMES)
    found = ClosedForm()(problem, State.start(problem))
    after = Together()(problem, found)
    assert after.handles["q"] is found.handles["q"]  # it is in one place alone, and found there
    assert after.handles["p"] is not found.handles["p"]


def test_a_search_for_controls_looks_only_where_the_handle_is() -> None:
    problem, _ = halves("bits", 0, NAMES)
    zoom = progressive([replace(p, name=n) for p, n in zip(problem.subject.places, NAMES, strict=True)], 2)
    assert isinstance(zoom.stages[-1], Together)
    state = zoom.run(problem)[0]
    assert state.handles["p"].places == list(NAMES)
    [stage] = zoom.retraced([state.handles["p"]]).stages
    assert stage == Together(only={"p": NAMES})
    assert len(zoom.retraced([state.handles["q"]]).stages) > 1 or state.handles["q"].chosen["stage"] == 0
    again = Method("again", "", (stage,)).run(problem.only(["p"]), {"p": problem.subject.places})[0].handles["p"]
    ours, theirs = (respond(problem.calibration, h.batch()) for h in (state.handles["p"], again))
    torch.testing.assert_close(ours, theirs)


def test_without_a_family_there_is_nothing_to_do() -> None:
    problem, _ = halves("bits")
    assert not any(isinstance(stage, Together) for stage in progressive(problem.subject.places, 2).stages)
    before = ClosedForm()(problem, State.start(problem))
    assert Together()(problem, before).handles == before.handles
    assert_refused(lambda: METHOD.run(problem), ["together for 'p'", "end1"])
    with pytest.raises(PlotError):
        METHOD.run(problem)


def test_options_are_marked_one_by_one_where_the_answer_has_no_pointer() -> None:
    """The plain net was trained without a pointer at its last token, and a mark at every option's colour serves it."""
    template = "Question: A {noun} is {colour}. What color is a {noun}?\n"
    template += "".join(f"{{s{k}}}. {{c{k}}}\n" for k in range(4)) + "Answer:"
    h = plot_ot.Hypothesis(template=template, positions={f"end{k}": f"{{s{k}}}. {{c{k}}}" for k in range(4)})

    @h.variable
    def pointer(colour, c0, c1, c2, c3):  # type: ignore[no-untyped-def]
        return [c0, c1, c2, c3].index(colour)

    @h.output
    def answer(pointer, s0, s1, s2, s3):  # type: ignore[no-untyped-def]
        return [s0, s1, s2, s3][pointer]

    g = torch.Generator().manual_seed(1000)
    colours, letters = ["red", "blue", "green", "black", "white", "pink"], "ABCDEFGHJK"
    inputs = []
    for _ in range(300):
        cs = [colours[k] for k in torch.randperm(len(colours), generator=g)[:4]]
        ss = [letters[k] for k in torch.randperm(len(letters), generator=g)[:4]]
        asked = cs[int(torch.randint(4, (1,), generator=g))]
        options = {f"c{k}": c for k, c in enumerate(cs)} | {f"s{k}": s for k, s in enumerate(ss)}
        inputs.append({"noun": "chair", "colour": asked, **options})
    h.rows(inputs)
    subject = plot_ot.load_subject("plain-1000", h, layers=[0, 4])
    result = plot_ot.localize(subject, h, inputs, method=METHOD, size=80, seed=1000, filter="candidates")
    verdict = result.verdicts["pointer"]
    assert verdict.status.found
    assert verdict.accuracy is not None
    assert verdict.accuracy > 0.9
    assert result.handles["pointer"].places == [f"block_output.0@end{k}" for k in range(4)]


def test_the_control_swaps_random_neurons_of_as_many_tokens() -> None:
    problem, test = halves("bits", 0, NAMES)
    places = problem.subject.places
    for control in (random_like(METHOD, 0, places), random_progressive(1, places)):
        assert [type(s) for s in control.stages] == [TogetherAtRandom]
        handle = control.run(problem)[0].handles["p"]
        assert handle.places == list(NAMES)
        neurons = [int((e.gains != 0).sum()) for e in handle.edits]
        assert neurons == [max(1, e.place.width // 8) for e in handle.edits]
        weights = pair_weights(problem.calibration, "p", problem.score)
        again = float(scored(problem.calibration, handle.batch(), "p", weights, problem.readout))
        assert handle.chosen["calibration_score"] == pytest.approx(again)
        assert float(correct(test, handle, problem.readout).double().mean()) < 0.8
    assert random_like(METHOD, 0, places).run(problem)[0].handles["p"].chosen["support"] == " and ".join(NAMES)
    drawn = [random_like(METHOD, k, places).run(problem)[0].handles["p"] for k in (0, 0, 2)]
    same = [torch.equal(drawn[0].edits[1].gains, h.edits[1].gains) for h in drawn[1:]]
    assert same == [True, False]


def test_every_second_random_handle_of_the_default_search_is_over_several_tokens() -> None:
    problem, _ = halves("bits", 0, NAMES)
    places = problem.subject.places
    kinds = [any(isinstance(s, TogetherAtRandom) for s in random_progressive(k, places).stages) for k in range(4)]
    assert kinds == [False, True, False, True]
    alone = [replace(p, name=p.name.partition("@")[0]) for p in places[:1]]
    assert not any(isinstance(s, TogetherAtRandom) for s in random_progressive(1, alone).stages)
