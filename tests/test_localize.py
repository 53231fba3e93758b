"""One call from a causal model and a network to handles and verdicts."""

import sys

import pytest
import torch
from torch import nn

import plot_ot
from plot_ot.errors import CouplingWarning, PlotError
from plot_ot.files.run_reading import read_run
from plot_ot.judging.status import Status
from plot_ot.methods import COARSE, FINE, Method, progressive
from plot_ot.report.payload import payload
from plot_ot.sites import neurons, whole_places
from plot_ot.stages.calibrate import Search
from plot_ot.stages.choose import Calibrate, PatchPlaces, SelectPlaces
from plot_ot.stages.closed_form import ClosedForm
from plot_ot.stages.coupling import Localize
from plot_ot.stages.ways import Best
from plot_ot.transport import Degeneracy

ROWS = torch.cartesian_prod(*[torch.arange(2)] * 8)


@pytest.fixture(autouse=True)
def few_random_handles(monkeypatch):
    monkeypatch.setattr("plot_ot.judging.bench.RANDOM_HANDLES", 5)


def parity_net(first: str, second: str, bystanders: int = 12) -> nn.Sequential:
    """Computes (x ^ x') ^ (z ^ z') through the parities of two named pairs of the bits a..d.

    Four neurons of layer 1 do the work, next to bystanders that look at all bits but lead nowhere.
    """
    rows = []
    for pair in (first, second):
        row = torch.zeros(8)
        row["abcd".index(pair[0])], row["abcd".index(pair[1])] = 1.0, -1.0
        rows += [row, -row]
    looking_on = torch.randn(bystanders, 8, generator=torch.Generator().manual_seed(0))
    onwards = torch.tensor([[1.0, 1, -1, -1], [-1, -1, 1, 1]])
    weights = [
        (torch.cat([torch.stack(rows), looking_on]), torch.zeros(4 + bystanders)),
        (torch.cat([onwards, torch.zeros(2, bystanders)], dim=1), torch.zeros(2)),
        (torch.tensor([[-8.0, -8], [8, 8]]), torch.tensor([4.0, -4])),
    ]
    net = nn.Sequential(
        nn.Linear(8, 4 + bystanders), nn.ReLU(), nn.Linear(4 + bystanders, 2), nn.ReLU(), nn.Linear(2, 2)
    )
    for layer, (weight, bias) in zip([m for m in net if isinstance(m, nn.Linear)], weights, strict=True):
        layer.weight.data, layer.bias.data = weight, bias
    return net


HYPOTHESIS = plot_ot.CausalModel(
    inputs=list("abcdefgh"),
    mechanisms={
        "left": lambda a, b: a ^ b,
        "right": lambda c, d: c ^ d,
        "y": lambda left, right: left ^ right,
    },
    output="y",
)


@pytest.mark.parametrize("method", ["plot-layered", "das"])
def test_the_variable_is_placed_where_the_network_computes_it(method):
    result = plot_ot.localize(plot_ot.MLPSubject(parity_net("ab", "cd")), HYPOTHESIS, ROWS, size=300, method=method)
    assert all(v.status.found for v in result.verdicts.values())
    assert result.handles["left"].places == ["layer1"]
    if method == "plot-layered":
        touched = result.handles["left"].edits[0].gains.nonzero().squeeze(1).tolist()
        assert touched == [0, 1]
    assert "placed in layer1" in str(result)


@pytest.mark.parametrize("method", ["plot-layered", "das"])
def test_the_same_output_computed_through_other_variables_is_not_localized(method):
    """a ^ c and b ^ d give the same answers on every input, but left and right are nowhere in this network."""
    net = parity_net("ac", "bd")
    assert torch.equal(net(ROWS.float()).argmax(dim=1), HYPOTHESIS.answer(ROWS))
    result = plot_ot.localize(plot_ot.MLPSubject(net), HYPOTHESIS, ROWS, size=300, method=method)
    assert {v.status for v in result.verdicts.values()} == {Status.ABSENT}


def test_a_network_that_does_not_solve_the_task_is_refused():
    net = parity_net("ab", "cd")
    net[4].weight.data.neg_()
    net[4].bias.data.neg_()
    with pytest.raises(PlotError, match="answers 0 of 256 distinct inputs"):
        plot_ot.localize(plot_ot.MLPSubject(net), HYPOTHESIS, ROWS)


def test_an_unknown_method_is_refused_with_the_legal_ones():
    with pytest.raises(PlotError, match="Choose from: plot, plot-das, plot-layered, das"):
        plot_ot.localize(plot_ot.MLPSubject(parity_net("ab", "cd")), HYPOTHESIS, ROWS, method="dsa")


@pytest.mark.parametrize(
    "wrong",
    [
        {"method": "dsa"},
        {"controls": "none"},
        {"filter": "all"},
        {"seed": -1},
        *({"size": size} for size in (-1, 0, 1, 2.5, True, "80")),
    ],
)
def test_a_misspelt_choice_is_refused_before_anything_runs(wrong, monkeypatch):
    monkeypatch.setattr(plot_ot.MLPSubject, "record", lambda *_: pytest.fail("the network was run"))
    with pytest.raises(PlotError, match=r"Unknown|seed|`size` is a number of pairs per bank, 2 or more; found"):
        plot_ot.localize(plot_ot.MLPSubject(parity_net("ab", "cd")), HYPOTHESIS, ROWS, **wrong)


@pytest.fixture(scope="module")
def found() -> plot_ot.Result:
    return plot_ot.localize(
        plot_ot.MLPSubject(parity_net("ab", "cd")), HYPOTHESIS, ROWS, size=300, method="plot-layered"
    )


def test_verdicts_are_objects_with_a_status_an_accuracy_and_an_interval(found):
    left = found.verdicts["left"]
    assert isinstance(left.status, Status)
    assert left.interval[0] <= left.accuracy <= left.interval[1]
    assert str(left) == left.sentence
    assert left.sentence.startswith("left: placed in layer1")


def test_a_result_read_back_has_the_same_objects(found, tmp_path):
    found.save(tmp_path)
    again = plot_ot.Result.load(tmp_path)
    assert again.verdicts == dict(found.verdicts)
    assert all(isinstance(v.status, Status) for v in again.verdicts.values())
    assert again.records == list(found.records)
    assert again.notes == list(found.notes)
    assert again.method == found.method
    assert str(again) == str(found)
    assert {v: h.places for v, h in again.handles.items()} == {v: h.places for v, h in found.handles.items()}
    assert again.controls["records"] == found.controls["records"]
    with pytest.raises(PlotError, match="method 'dsa'"):
        plot_ot.Result.load(tmp_path, method="dsa")


def test_records_and_verdicts_as_tables(found, monkeypatch):
    frame = found.to_frame()
    assert len(frame) == len(found.records)
    assert frame["accuracy"].tolist() == [r["accuracy"] for r in found.records]
    told = found.to_frame("verdicts").set_index("variable")
    assert told.loc["left", "accuracy"] == found.verdicts["left"].accuracy
    assert told.loc["right", "status"] == found.verdicts["right"].status.value
    head, _, *rows = found.to_markdown().split("\n\n")[0].splitlines()
    assert [r.split(" | ")[0] for r in rows] == ["| left", "| right"]
    assert {r.count("|") for r in (head, *rows)} == {5}
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(PlotError, match="pip install pandas"):
        found.to_frame()


def test_degenerate_couplings_are_warned_of_once_by_name():
    net, one = (
        parity_net("ab", "cd"),
        plot_ot.CausalModel(
            list("abcdefgh"), {"left": lambda a, b: a ^ b, "y": lambda left, c, d: left ^ c ^ d}, output="y"
        ),
    )
    with pytest.warns(CouplingWarning) as heard:
        plot_ot.localize(plot_ot.MLPSubject(net), one, ROWS, size=100, method="plot-layered")
    [told] = [w for w in heard if w.category is CouplingWarning]
    assert told.filename == __file__  # the user's line, not one of the package
    said = str(told.message)
    assert "one row (" in said
    assert Degeneracy.ONE_ROW.meaning in said


CLOSED = Method(
    "closed",
    "places, then neurons or closed forms",
    (
        Localize((whole_places,), COARSE),
        SelectPlaces(2, keep=2),
        Best(((Localize((neurons,), FINE, coupling="place"), Calibrate(Search((3,), (1.0,)))), (ClosedForm(),))),
    ),
)


def test_where_places_are_few_each_is_also_tried_whole():
    subject = plot_ot.MLPSubject(parity_net("ab", "cd"))
    method = progressive(subject.places, 2)
    [best] = method.stages
    assert isinstance(best, Best)
    assert best.ways[-1] == (PatchPlaces(),)
    only = Method("whole", "each place whole", (PatchPlaces(),))
    found = plot_ot.localize(subject, HYPOTHESIS, ROWS, size=200, method=only)
    [edit] = found.handles["left"].edits
    assert (edit.frame.rank, edit.gains.unique().tolist()) == (edit.place.width, [1.0])
    chosen = found.handles["left"].chosen
    assert set(chosen["by_support"]) == {"layer1", "layer2"}
    assert chosen["calibration_score"] == max(chosen["by_support"].values())
    assert chosen["by_support"][edit.place.name] == chosen["calibration_score"]
    assert {t.place: t.score for t in found.profile("left").tried} == pytest.approx(chosen["by_support"])


@pytest.fixture(scope="module")
def closed() -> plot_ot.Result:
    return plot_ot.localize(plot_ot.MLPSubject(parity_net("ab", "cd")), HYPOTHESIS, ROWS, size=300, method=CLOSED)


def test_the_profile_keeps_the_best_score_of_everything_that_was_tried_in_a_place(closed):
    profile = closed.profile("left")
    assert [t.place for t in profile.tried] == ["layer1", "layer2"]
    assert profile.best.place == "layer1"
    assert profile.best.score == pytest.approx(closed.handles["left"].chosen["calibration_score"])
    assert profile.as_good == ()
    whole = {c["stage"]: c["calibration"] for c in closed.unit["couplings"]}[0]["left"]
    assert all(t.score >= patched for t, patched in zip(profile.tried, whole, strict=True))
    assert "layer1  1.000 [" in str(profile)
    assert "<b>1.000 [" in profile._repr_html_()
    with pytest.raises(PlotError, match="variable 'lefd'"):
        closed.profile("lefd")


def test_the_profile_is_read_back(closed, tmp_path):
    closed.save(tmp_path)
    assert plot_ot.Result.load(tmp_path).profile("right") == closed.profile("right")


def test_capacity_is_the_best_score_of_every_size_that_was_tried(closed, found):
    curve = closed.capacity("left")
    # 3 neurons by calibration; closed forms of 1, 2 and 4 directions; whole places of 16
    assert set(curve.sizes) >= {1, 2, 3, 4, 16}
    assert list(curve.sizes) == sorted(curve.sizes)
    at = dict(zip(curve.sizes, curve.accuracy, strict=True))
    handle = closed.handles["left"]
    assert at[handle.size] == max(at.values()) == handle.chosen["calibration_score"]
    whole = max(closed.unit["couplings"][0]["calibration"]["left"])
    assert at[16] == pytest.approx(whole)
    k = found.capacity("left")
    surface = next(s for s in found.unit["surfaces"] if s["variable"] == "left")
    for size, scores in zip(surface["sizes"], surface["scores"], strict=True):
        assert dict(zip(k.sizes, k.accuracy, strict=True))[min(size, 16)] >= max(scores) - 1e-4


def test_shuffled_values_have_a_capacity_of_their_own(closed, tmp_path):
    curve = closed.capacity("left")
    control = [score for score in curve.shuffled if score is not None]
    assert control
    assert max(control) < max(curve.accuracy) - 0.2
    closed.save(tmp_path)
    assert plot_ot.Result.load(tmp_path).capacity("left") == curve
    assert f"{curve.sizes[0]}  {curve.accuracy[0]:.3f}" in str(curve)
    assert f"<td>{curve.accuracy[0]:.3f}</td>" in curve._repr_html_()
    with pytest.raises(PlotError, match="variable 'lefd'"):
        closed.capacity("lefd")


def test_the_way_to_a_handle_ends_in_what_it_takes(found, closed):
    assert closed.zoom("left") == ["layer1", "1 direction"]
    assert found.zoom("left")[-1] == ", ".join(found.handles["left"].chosen["sites"])


def test_the_reports_zoom_ends_in_the_directions_of_a_closed_form(closed, tmp_path):
    closed.save(tmp_path)
    data = payload(read_run(tmp_path))
    levels = data["zoom"]["0"]["closed"]["left"]["levels"]
    assert [v["title"] for v in levels] == ["layers", "direction"]
    read, frame = levels[1]["strips"][0]["reads"], closed.handles["left"].edits[0].frame.read[:, 0]
    assert torch.nn.functional.cosine_similarity(torch.tensor(read), frame.float(), dim=0).abs() > 0.999
    assert all(not s["after"] for s in data["couplings"]["0"]["closed"]["left"]["stages"])
