"""Task files are planned as `localize` and `compare` would run them, and nothing is loaded for it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import plot_ot
from plot_ot import Hypothesis, TokenSpan, plan_localization
from plot_ot.abstract.banks import Bank, Splits
from plot_ot.api import bind
from plot_ot.cli import app
from plot_ot.comparing import plan_comparison
from plot_ot.edits import EditBatch, Frame, respond
from plot_ot.planner import MACHINES, Prompted, Scene
from plot_ot.subjects import record
from plot_ot.tasks.planning import language_shape
from refusals import assert_refused

pytest.importorskip("transformers")
ROOT = Path(__file__).parents[1]
POINTER = ROOT / "examples" / "pointer.py"
CPU = MACHINES["h100"].changed(gpu=False)
KINDS = ("block_output", "attention_output", "mlp_output", "head_output")
COLOURS = """
import itertools
import plot_ot
from plot_ot import TokenSpan

hypothesis = plot_ot.Hypothesis(
    template="Question: A {noun} is {color}. What color is a {noun}?",
    answers=list("ABCDEFGH"),
    positions={"fact": TokenSpan("A {noun} is"), "colour": "{color}"},
    name=NAME,
)
hypothesis.variable(name="colour", parents=["color"])(lambda color: len(color) % 4)
hypothesis.output(name="letter", parents=["colour", "noun"])(lambda colour, noun: "ABCDEFGH"[colour + 4 * (noun > "c")])
nouns = "chair bear brick spoon lemon kite bowl table".split()
colours = "red blue yellow green gray black white brown".split()
inputs = [{"noun": n, "color": c} for n, c in itertools.product(nouns, colours)]
print("loaded")
"""


def ran(*words: str) -> dict:
    shown = CliRunner().invoke(app, ["explain", *words, "--json", "--machine", "h100"])
    assert shown.exit_code == 0, (shown.output, shown.exception)
    return json.loads(shown.stdout)


def refused(*words: str, command: str = "explain") -> str:
    shown = CliRunner().invoke(app, [command, *words])
    assert shown.exit_code != 0
    return str(shown.exception)


@pytest.fixture
def colours(tmp_path) -> list[str]:
    paths = []
    for name in ("one", "two"):
        paths.append(tmp_path / f"{name}.py")
        paths[-1].write_text(COLOURS.replace("NAME", repr(name)))
    return list(map(str, paths))


def hypothesis_of(path: str) -> tuple[Hypothesis, list[dict[str, str]]]:
    made: dict = {}
    exec(Path(path).read_text(), made)  # noqa: S102
    return made["hypothesis"], made["inputs"]


def test_a_model_that_is_not_loaded_has_the_places_and_costs_of_the_loaded_one(colours):
    h, given = hypothesis_of(colours[0])
    rows, loaded = h.rows(given), plot_ot.load_subject("tiny")
    live = bind(loaded, h, layers=[0, 2, 5], kinds=KINDS)
    shape = language_shape("tiny").as_type("float32")
    planned = Prompted.through(h, shape, loaded.tokenizer, loaded.bos, layers=[0, 2, 5], kinds=KINDS)
    assert planned.places == live.places
    assert planned.shape(8) == _named(live.shape(8), planned.shape(8).name)
    assert planned.edited_tokens == live.edited_tokens > 1
    assert planned.response_bytes == live.response_bytes
    for place in planned.places[:9]:
        assert torch.equal(planned.tails(place, rows), live.tails(place, rows))
    assert torch.equal(planned.lengths(rows), live.lengths(rows))
    assert all(torch.equal(a, b) for a, b in zip(planned.encoded(rows), live.encoded(rows), strict=True))
    with pytest.raises(plot_ot.PlotError, match="not loaded"):
        planned.record(rows)


def _named(shape, name):
    from dataclasses import replace

    return replace(shape, name=name)


def test_edits_of_spans_and_inside_the_last_block_are_counted_as_they_run(colours):
    """A span has seen the source up to its last token; an edit inside the last block runs all tokens behind it."""
    h, given = hypothesis_of(colours[0])
    rows = h.rows(given)[:24]
    live = bind(plot_ot.load_subject("tiny"), h, layers=[4, 5], kinds=("block_output", "attention_output"))
    labels = torch.zeros(24, dtype=torch.long)
    bank = Bank("fit", h.causal, rows[:2].repeat(12, 1), rows, ("colour",), *_alike(labels))
    scene = Scene.of_subject(live, Splits(bank, bank, {}), 8)
    [recording] = record(live, bank)
    seen = []
    hooks = [
        b.register_forward_hook(lambda _, __, out: seen.append((out[0] if isinstance(out, tuple) else out).shape[:2]))
        for b in live.decoder.blocks
    ]
    for place in live.places:
        seen.clear()
        respond(recording, [EditBatch(place, Frame.identity(place.width), torch.ones(1, place.width))])
        planned = scene.classes(recording, [place]) * scene.through(place)
        assert sum(rows * tokens for rows, tokens in seen) == planned, place.name
    for hook in hooks:
        hook.remove()


def _alike(labels: torch.Tensor) -> tuple:
    changed = {"colour": torch.ones(len(labels), dtype=torch.bool)}
    return changed, {"colour": labels}, labels, labels, labels, ("all",)


@pytest.mark.parametrize("method", ["plot", "das"])
def test_a_task_file_is_planned_as_localize_would_run_it(method, monkeypatch):
    """The live model tells the same, through the Python function."""
    made: dict = {}
    exec(POINTER.read_text(), made)  # noqa: S102
    live = plan_localization(
        plot_ot.load_subject("tiny"), made["hypothesis"], made["inputs"], MACHINES["h100"], method=method, size=80
    )
    _forbid_loading(monkeypatch)
    found = ran(str(POINTER), "--model", "tiny", "--methods", method, "--size", "80", "--dtype", "float32")
    [plan] = found["plans"]
    assert plan["method"] == method
    assert plan["responses"] == pytest.approx(live.responses)
    assert plan["sites"] == live.sites
    for part, cost in live.parts.items():
        assert plan["parts"][part]["forward"] == pytest.approx(cost.forward), part
    # the filter runs every prompt once, and is all the recording there is
    assert live.parts["filter"].forward > 0
    assert live.parts["recording"].forward == 0


def _forbid_loading(monkeypatch) -> None:
    def never(*_, **__):
        raise AssertionError("weights are loaded")

    monkeypatch.setattr("plot_ot.models.named.load_model", never)
    monkeypatch.setattr("plot_ot.models.named.load_tiny", never)
    monkeypatch.setattr("plot_ot.api.resolve", never)


def test_options_of_places_and_banks_change_the_plan(colours):
    one = [colours[0], "--model", "tiny"]
    few, many, wide = (
        sum(part["forward"] for part in ran(*one, "--size", "40", *more)["plans"][0]["parts"].values())
        for more in (["--layers", "5"], [], ["--kinds", "block_output,head_output"])
    )
    assert few < many < wide
    held = ran(colours[0], "--model", "tiny", "--size", "40", "--hold-out", "noun")
    assert held["task"]["hold_out"] == ["noun"]


def test_several_files_are_planned_as_compare_would_run_them(colours, monkeypatch):
    (one, given), (two, _) = map(hypothesis_of, colours)
    live = plan_comparison(plot_ot.load_subject("tiny"), [one, two], given, MACHINES["h100"], size=40)
    _forbid_loading(monkeypatch)
    found = ran(*colours, "--model", "tiny", "--size", "40", "--dtype", "float32")
    assert list(found) == ["one", "two"]
    for name, plans in found.items():
        assert plans["quick"]["responses"] == pytest.approx(live.quick[name].responses)
        assert plans["whole"]["responses"] == pytest.approx(live.whole[name].responses)
    shown = CliRunner().invoke(app, ["compare", *colours, "--model", "tiny", "--size", "40", "--explain"])
    assert shown.exit_code == 0, shown.exception
    assert "quick look" in shown.stdout


def test_without_the_tokenizer_words_and_signs_are_counted_and_named_positions_refused(colours, monkeypatch):
    shown = CliRunner().invoke(
        app, ["explain", str(POINTER), "--model", "google/gemma-2-2b", "--machine", "h100", "--size", "40"]
    )
    assert "prompts are counted in words and signs" in " ".join(shown.stdout.split())
    assert "controls come on top" in shown.stdout
    text = refused(colours[0], "--model", "google/gemma-2-2b", "--machine", "h100")
    assert all(word in text for word in ("tokenizer is not on this machine", "fact, colour", "another model"))


OWN = """
import torch
import plot_ot
hypothesis = plot_ot.CausalModel(["a", "b"], {"same": lambda a, b: a == b, "y": lambda same, b: same ^ (b > 9)}, "y")
inputs = torch.cartesian_prod(torch.arange(20), torch.arange(20))
torch.manual_seed(1000)
net = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.GELU(), torch.nn.Linear(8, 2))
subject = plot_ot.load_subject(net, encode=lambda x: x.float())
"""


def test_a_network_of_the_files_own_is_planned_with(tmp_path):
    path = tmp_path / "own.py"
    path.write_text(OWN)
    made: dict = {}
    exec(OWN, made)  # noqa: S102
    live = plan_localization(made["subject"], made["hypothesis"], made["inputs"], CPU, size=60)
    found = ran(str(path), "--size", "60")
    assert found["plans"][0]["responses"] == pytest.approx(live.responses)
    assert found["shape"]["language"] is False
    for command, more in (("explain", []), ("localize", ["--out", str(tmp_path / "run")])):
        words = [str(path), *more, "--layers", "1"]
        assert "--layers and --kinds are for language models" in refused(*words, command=command)
    words = [str(path), str(path.with_name("other.py")), "--kinds", "head_output"]
    path.with_name("other.py").write_text(path.read_text())
    assert "--layers and --kinds are for language models" in refused(*words, command="compare")
    assert f"{path} is given twice" in refused(str(path), str(path), command="compare")


def test_refusals(colours, tmp_path):
    nothing = tmp_path / "empty.py"
    nothing.write_text(
        "import plot_ot\nhypothesis = plot_ot.CausalModel(['a'], {'p': lambda a: a, 'y': lambda p: p}, 'y')"
    )
    one = [colours[0], "--model", "tiny"]
    for words, said in (
        (["heq", str(POINTER)], ["one study, one task file", "heq"]),
        (["heq", "mcqa"], ["one study"]),
        ([*one, "--bits", "3"], ["--bits is an option of studies", "--layers"]),
        ([*one, "--fit", "20"], ["--fit is an option of studies"]),
        (["heq", "--layers", "3"], ["--layers is an option of task files, not of heq"]),
        (["mcqa", "--hold-out", "noun"], ["--hold-out is an option of task files"]),
        ([str(tmp_path / "none.py")], ["There is no task file"]),
        ([str(nothing)], ["neither `pairs` nor `inputs`", "--inputs FILE"]),
        ([colours[0]], ["Which network? Give --model"]),
        ([*one, "--methods", "plots"], ["plots", "plot-layered"]),
        ([*colours, "--model", "tiny", "--methods", "plot,das"], ["one method"]),
        ([*colours, "--model", "tiny", "--methods", "dass"], ["dass", "plot-das"]),
        ([*one, "--kinds", "blocks"], ["kind of place", "blocks", "block_output"]),
        ([*one, "--layers", "9"], ["0..5"]),
        ([*one, "--hold-out", "town"], ["input to hold out by", "town"]),
        ([colours[0], "--model", "tinny"], ["tinny"]),
    ):
        text = refused(*words)
        assert all(word in text for word in said), (words, text)


def test_a_span_is_one_wide_place_of_a_planned_model():
    h = Hypothesis(
        template="{a} {b} now", positions={"both": TokenSpan("{a} {b}")}, answers=["A", "B"], inputs=["a", "b"]
    )
    h.variable(name="v", parents=["a"])(lambda a: a)
    h.output(name="y", parents=["v"])(lambda v: "A" if v == "red" else "B")
    h.rows([{"a": "red", "b": "blue"}])
    loaded = plot_ot.load_subject("tiny")
    planned = Prompted.through(h, language_shape("tiny"), loaded.tokenizer, loaded.bos)
    assert {p.width for p in planned.places if p.name.endswith("@both")} == {128}
    assert_refused(lambda: Prompted.through(h, language_shape("tiny"), None, None), ["both", "tokenizer"])
