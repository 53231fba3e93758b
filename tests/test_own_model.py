"""From a saved model of any family, or a network of one's own, to a saved handle: no code for the family, few lines."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn

import plot_ot
from decoders import UNNAMED, block_list, network, projection, transformers
from nets import PARITIES, PARITY_ROWS, random_parities
from plot_ot.abstract.causal_model import CausalModel
from plot_ot.errors import PlotError
from plot_ot.judging.controls import full_patch
from plot_ot.localizing import read_given
from plot_ot.planner.machine import Machine

WORDS = [f"w{k}" for k in range(58)]
FIRST, LAST = WORDS[:12], WORDS[20:32]
MACHINE = Machine("any", 1e12, 1e11, 1e10, 1e9, 1e-6, 1e11)


@pytest.fixture(autouse=True)
def few_random_handles(monkeypatch):
    monkeypatch.setattr("plot_ot.judging.bench.RANDOM_HANDLES", 3)


def word_tokenizer() -> transformers.PreTrainedTokenizerFast:
    made = Tokenizer(models.WordLevel({w: k for k, w in enumerate(["[PAD]", "[BOS]", "[EOS]", *WORDS])}, "[PAD]"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, pad_token="[PAD]", eos_token="[EOS]")  # noqa: S106


def saved(family: str, folder: Path) -> Path:
    """A directory as the hub has them; attention is weak, so that the last token holds mostly its own word."""
    model = network(family)
    with torch.no_grad():
        for block in block_list(model):
            projection(block).weight.mul_(0.02)
    model.save_pretrained(folder)
    word_tokenizer().save_pretrained(folder)
    return folder


def what_it_says(folder: Path) -> dict[tuple[str, str], str]:
    """The next word after every prompt, by transformers alone."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    tokenizer, words = word_tokenizer(), list(product(FIRST, LAST))
    ids = tokenizer([f"{a} w50 {b}" for a, b in words], return_tensors="pt")["input_ids"]
    with torch.no_grad():
        says = model(ids).logits[:, -1].argmax(dim=1)
    return dict(zip(words, [tokenizer.decode([t]) for t in says.tolist()], strict=True))


def last_word(says: dict[tuple[str, str], str]) -> plot_ot.Hypothesis:
    """What the network says follows from the first word and the last; its last token holds the last, `asked`."""
    h = plot_ot.Hypothesis(
        template="{first} w50 {last}", positions={"first": "{first}"}, answers=sorted(set(says.values()))
    )

    @h.variable
    def asked(last):
        return last

    @h.output
    def answer(asked, first):
        return says[first, asked]

    return h


FEW = ("opt", "granite")
"""The others are long: what differs between families is tested for each of them in `test_families.py`."""


@pytest.mark.parametrize(
    "family", [f if f in FEW else pytest.param(f, marks=pytest.mark.long) for f in UNNAMED if f != "gpt_oss"]
)
def test_from_a_directory_to_a_saved_handle(family, tmp_path):
    folder = saved(family, tmp_path / "model")
    says = what_it_says(folder)
    inputs = [{"first": a, "last": b} for a, b in says if says[a, b] in WORDS]
    # three lines
    subject = plot_ot.load_subject(folder)
    result = plot_ot.localize(subject, last_word(says), inputs, size=150)
    result.handles["asked"].save(tmp_path / "asked.safetensors")

    assert [p.partition("@")[2] for p in result.handles["asked"].places] == [""]  # the last token, not the first word
    assert all(r["accuracy"] > 0.7 for r in result.records), [r["accuracy"] for r in result.records]
    bound = plot_ot.load_subject(folder, last_word(says))
    handle = plot_ot.Handle.load(tmp_path / "asked.safetensors", bound)
    assert set(handle.values) <= set(LAST)


# -- pairs of all kinds ------------------------------------------------------------------------------------------


def parities() -> plot_ot.Hypothesis:
    h = plot_ot.Hypothesis(answers=[False, True], inputs=list("abcdefgh"))

    @h.variable
    def left(a, b):
        return a ^ b

    @h.variable
    def right(c, d):
        return c ^ d

    @h.output
    def y(left, right):
        return bool(left ^ right)

    return h


def as_dicts(rows: torch.Tensor) -> list[dict[str, int]]:
    return [dict(zip("abcdefgh", row, strict=True)) for row in rows.tolist()]


@pytest.fixture(scope="module")
def subject() -> plot_ot.MLPSubject:
    return plot_ot.MLPSubject(random_parities(1000, aligned=True)[0])


@pytest.fixture(scope="module")
def drawn() -> tuple[torch.Tensor, torch.Tensor]:
    order = torch.Generator().manual_seed(0)
    base = PARITY_ROWS[torch.randint(256, (1200,), generator=order)]
    return base, PARITY_ROWS[torch.randint(256, (1200,), generator=order)]


def codes_are_values(h: plot_ot.Hypothesis) -> None:
    """The network is run on codes: give 0 and 1 the codes 0 and 1."""
    h.rows(as_dicts(PARITY_ROWS[[0, 255]]))


def test_pairs_as_tensors_dicts_and_files_lead_to_the_same_handles(subject, drawn, tmp_path):
    base, source = drawn
    by_tensor = plot_ot.localize(subject, PARITIES, (base, source))
    assert all(v.status.found for v in by_tensor.verdicts.values())
    rows = [{"base": b, "source": s} for b, s in zip(as_dicts(base), as_dicts(source), strict=True)]
    file = tmp_path / "pairs.jsonl"
    file.write_text("".join(json.dumps(r) + "\n" for r in rows))
    for given in (rows, file):
        h = parities()
        codes_are_values(h)
        found = plot_ot.localize(subject, h, given)
        for v, handle in by_tensor.handles.items():
            assert found.handles[v].places == handle.places
            assert torch.equal(found.handles[v].edits[0].gains, handle.edits[0].gains)


def test_pairs_are_split_by_base_input_or_as_they_say(subject, drawn):
    base, source = drawn
    h = parities()
    codes_are_values(h)
    sides = list(zip(as_dicts(base), as_dicts(source), strict=True))
    order = {tuple(b.values()): k % 4 for k, b in enumerate(as_dicts(PARITY_ROWS))}
    names = ["fit", "fit", "calibration", "test"]
    rows = [{"base": b, "source": s, "split": names[order[tuple(b.values())]], "family": "x"} for b, s in sides]
    result = plot_ot.localize(subject, h, rows)
    tested = sum(r["pairs"] for r in result.records if r["variable"] == "left")
    assert tested == sum(r["split"] == "test" for r in rows)
    assert list(result.records[0]["families"]) == ["x"]
    for r in rows:
        r["split"] = "fit"
    with pytest.raises(PlotError, match="calibration split"):
        plot_ot.localize(subject, h, rows)


def test_pairs_that_the_network_does_not_answer_are_left_out_and_counted(drawn):
    net = random_parities(1000, aligned=True)[0]
    base, source = drawn
    wrong = plot_ot.CausalModel(
        list("abcdefgh"),
        {
            "left": lambda a, b: a ^ b,
            "right": lambda c, d: c ^ d,
            "y": lambda left, right, h: torch.where(h == 1, 1 - (left ^ right), left ^ right),
        },
        "y",
        ["left", "right"],
    )
    result = plot_ot.localize(plot_ot.MLPSubject(net), wrong, (base, source))
    kept = int(((base[:, 7] == 0) & (source[:, 7] == 0)).sum())
    assert f"both inputs of {kept} of 1200 pairs" in result.notes[0]
    odd = PARITY_ROWS[PARITY_ROWS[:, 7] == 1][:3]
    with pytest.raises(PlotError, match=r"0 of 3 pairs.*at least 60"):
        plot_ot.localize(plot_ot.MLPSubject(net), wrong, (odd, odd.flip(0)))


def test_evaluate_gives_accuracy_with_controls(subject):
    result = plot_ot.localize(subject, PARITIES, PARITY_ROWS, size=300)
    bank = plot_ot.draw_pairs(PARITIES, PARITY_ROWS, "balanced", 200, torch.Generator().manual_seed(7))
    found = plot_ot.evaluate(result.handles["left"], bank, subject)
    assert found.accuracy.value == 1.0
    assert found.controls["no-edit"] == float((bank.labels["left"] == bank.base_answer).double().mean())
    assert found.controls["copy-source"] == float((bank.labels["left"] == bank.source_answer).double().mean())
    assert "left on pairs: 1.000" in str(found)
    other = plot_ot.draw_pairs(PARITIES, PARITY_ROWS, "balanced", 9, torch.Generator(), variables=["right"])
    with pytest.raises(PlotError, match="variable of bank"):
        plot_ot.evaluate(result.handles["left"], other, subject)


def test_a_result_shows_itself_and_is_saved_as_a_run(subject, tmp_path):
    result = plot_ot.localize(subject, PARITIES, PARITY_ROWS, size=300)
    assert "left: placed" in str(result)
    assert result.zoom("left")[-1].startswith("layer1[")
    page = result._repr_html_()
    assert "placed and compact" in page
    assert "<iframe srcdoc=" in page
    report = result.save(tmp_path / "run")
    assert "placed and compact" in report.read_text(encoding="utf-8")
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert [r["accuracy"] for r in results["records"] if r["method"] == "plot"] == [
        r["accuracy"] for r in result.records
    ]
    path = tmp_path / "run" / "handles" / "seed-0" / "plot.left.safetensors"
    assert plot_ot.Handle.load(path, subject).places == ["layer1"]
    assert plot_ot.Handle.load(path).values.keys() == {0, 1}


# -- networks of all kinds ---------------------------------------------------------------------------------------


def test_load_subject_takes_networks_of_all_kinds():
    net = random_parities(1000, aligned=True)[0]
    assert isinstance(plot_ot.load_subject(net), plot_ot.MLPSubject)
    by_layers = plot_ot.load_subject(net, places=["1", "3"], example=PARITY_ROWS[:1])
    assert isinstance(by_layers, plot_ot.SequentialSubject)
    wrapped = nn.ModuleDict({"net": net})
    wrapped.forward = net.forward  # type: ignore[method-assign]
    hooked = plot_ot.load_subject(wrapped, places={"first": "net.1"}, example=PARITY_ROWS[:1])
    assert type(hooked) is plot_ot.ModuleSubject
    exact = plot_ot.load_subject(PARITIES, example=PARITY_ROWS)
    result = plot_ot.localize(exact, PARITIES, PARITY_ROWS, size=300)
    assert {v: h.places for v, h in result.handles.items()} == {"left": ["left"], "right": ["right"]}


def test_what_load_subject_needs_is_said(tmp_path):
    with pytest.raises(PlotError, match=r"places=\[...\], example=rows\[:1\].*it has none.*its `tokenizer`"):
        plot_ot.load_subject(nn.Linear(2, 2))
    with pytest.raises(PlotError, match="it has left, right"):
        plot_ot.load_subject(nn.ModuleDict({"left": nn.Linear(2, 2), "right": nn.Linear(2, 2)}))
    with pytest.raises(PlotError, match="found Linear, a class: make one of it"):
        plot_ot.load_subject(nn.Linear)
    with pytest.raises(PlotError, match="`example` input row"):
        plot_ot.load_subject(nn.Linear(2, 2), places=["x"])
    with pytest.raises(PlotError, match="input rows as `example`"):
        plot_ot.load_subject(PARITIES)
    with pytest.raises(PlotError, match="There is no model at"):
        plot_ot.load_subject(tmp_path / "missing")
    with pytest.raises(PlotError, match="give these to localize"):
        plot_ot.load_subject("tiny", layers=[1])


def test_a_network_that_needs_no_further_words_is_taken_as_it_is():
    net = random_parities(1000, aligned=True)[0]
    bare = plot_ot.localize(net, PARITIES, PARITY_ROWS, size=300)
    made = plot_ot.localize(plot_ot.load_subject(net), PARITIES, PARITY_ROWS, size=300)
    assert bare.verdicts == made.verdicts
    assert {v: h.places for v, h in bare.handles.items()} == {v: h.places for v, h in made.handles.items()}


@pytest.mark.parametrize("enter", [plot_ot.localize, plot_ot.plan_localization])
def test_a_network_that_needs_further_words_is_told_which(enter):
    rest = (MACHINE,) if enter is plot_ot.plan_localization else ()
    with pytest.raises(PlotError, match="it has left, right"):
        enter(nn.ModuleDict({"left": nn.Linear(2, 2), "right": nn.Linear(2, 2)}), PARITIES, PARITY_ROWS, *rest)
    with pytest.raises(PlotError, match=r"Expected a network.*found NoneType"):
        enter(None, PARITIES, PARITY_ROWS, *rest)
    with pytest.raises(PlotError, match="There is no model at"):
        enter("./missing", PARITIES, PARITY_ROWS, *rest)


def test_places_and_examples_that_cannot_be_meant_are_refused():
    net = random_parities(1000, aligned=True)[0]
    with pytest.raises(PlotError, match=r"found one name. Write places=\['1'\]"):
        plot_ot.load_subject(net, places="1", example=PARITY_ROWS[:1])
    with pytest.raises(PlotError, match="names '1' more than once"):
        plot_ot.load_subject(net, places=["1", "3", "1"], example=PARITY_ROWS[:1])
    with pytest.raises(PlotError, match="needs at least one place"):
        plot_ot.load_subject(net, places=[], example=PARITY_ROWS[:1])
    wrapped = nn.ModuleDict({"net": net})
    wrapped.forward = net.forward  # type: ignore[method-assign]
    with pytest.raises(PlotError, match=r"`example` is a tensor of input rows, such as rows\[:1\]; found list"):
        plot_ot.load_subject(wrapped, places=["net.1"], example=PARITY_ROWS[:1].tolist())


def test_comparisons_and_recordings_refuse_what_is_no_network():
    with pytest.raises(PlotError, match=r"Expected a network.*found list"):
        plot_ot.compare([nn.Linear(2, 2)], [PARITIES, PARITIES], PARITY_ROWS)
    with pytest.raises(PlotError, match=r"Expected a subject.*found Linear"):
        plot_ot.record_pairs(nn.Linear(2, 2), (PARITY_ROWS[:2], PARITY_ROWS[2:4]))


def test_what_localize_needs_is_said(subject):
    with pytest.raises(PlotError, match="needs a Hypothesis with a template"):
        plot_ot.localize(plot_ot.load_subject("tiny"), PARITIES, PARITY_ROWS)
    with pytest.raises(PlotError, match="takes inputs as tensors or arrays of numbers"):
        plot_ot.localize(subject, PARITIES, as_dicts(PARITY_ROWS))
    with pytest.raises(PlotError, match="Unknown option 'layers'"):
        plot_ot.localize(subject, PARITIES, PARITY_ROWS, layers=[1])
    with pytest.raises(PlotError, match=r"tensors or arrays of numbers.*found ndarray"):
        plot_ot.localize(subject, PARITIES, np.array([["a", "b"]]))
    with pytest.raises(PlotError, match=r"rows, a tensor of shape \[rows, inputs\]; found shape \(256,\)"):
        plot_ot.localize(subject, PARITIES, PARITY_ROWS[:, 0])
    with pytest.raises(PlotError, match="found Hypothesis, a class: make one of it"):
        plot_ot.localize(subject, plot_ot.Hypothesis, PARITY_ROWS)
    with pytest.raises(PlotError, match="found function"):
        plot_ot.localize(subject, as_dicts, PARITY_ROWS)
    with pytest.raises(PlotError, match="no variable to look for"):
        plot_ot.localize(subject, CausalModel(list("ab"), {"y": lambda a, b: a ^ b}, "y"), PARITY_ROWS[:, :2])
    with pytest.raises(PlotError, match=r"A seed is a whole number.*found 1.5"):
        plot_ot.localize(subject, PARITIES, PARITY_ROWS, seed=1.5)


def test_arrays_of_numbers_are_read_as_rows_and_pairs():
    rows = PARITY_ROWS.numpy()
    assert torch.equal(read_given(PARITIES, rows), PARITY_ROWS)
    assert torch.equal(read_given(PARITIES, rows.astype(float)), PARITY_ROWS.double())
    pairs = read_given(PARITIES, (rows[:4], rows[4:8]))
    assert torch.equal(pairs.base, PARITY_ROWS[:4])
    assert torch.equal(pairs.source, PARITY_ROWS[4:8])


@pytest.mark.parametrize("wrong", [PARITY_ROWS.numpy(), PARITY_ROWS.tolist(), PARITY_ROWS[0]])
def test_a_handle_is_applied_to_rows_only(subject, wrong):
    handle = full_patch("left", subject.places[:1], subject)
    with pytest.raises(PlotError, match=r"Base and source inputs are rows, tensors of shape \[rows, inputs\]; found"):
        handle.apply(subject, wrong, wrong)


@pytest.mark.parametrize(
    ("mechanism", "said"),
    [
        (lambda a, b: a if a > b else b, "The mechanism of 'left' failed.*write torch.where"),
        (lambda a, b: a * 0, "'left' is empty: no pair changes it. It has the same value in all inputs, 0"),
        (lambda a, b, c, d, e, f, g, h: sum(2.0**k * x for k, x in enumerate((a, b, c, d, e, f, g, h))), "round it"),
    ],
)
def test_a_variable_that_cannot_be_looked_for_is_told_why(subject, mechanism, said):
    causal = CausalModel(
        list("abcdefgh"),
        {
            "left": mechanism,
            "right": lambda c, d: c ^ d,
            "y": lambda a, b, right, left: a ^ b ^ right + 0 * left.long(),
        },
        "y",
    )
    with pytest.raises(PlotError, match=said):
        plot_ot.localize(subject, causal, PARITY_ROWS, filter="none", size=60)


def test_answers_that_are_no_output_of_the_network_are_refused_as_such(subject):
    causal = CausalModel(
        list("abcdefgh"), {"left": lambda a, b: a ^ b, "y": lambda left, c, d: 3 + (left ^ c ^ d)}, "y"
    )
    with pytest.raises(PlotError, match=r"answers \(labels\) must lie in 0..1, the network's outputs; found \[3, 4\]"):
        plot_ot.localize(subject, causal, PARITY_ROWS)


class Noisy(nn.Module):
    """A network whose dropout does not heed `eval()`."""

    def __init__(self):
        super().__init__()
        self.hidden, self.head = nn.Linear(8, 16), nn.Linear(16, 2)

    def forward(self, x):
        return self.head(nn.functional.dropout(self.hidden(x), 0.5))


def test_a_network_that_answers_differently_each_time_is_refused():
    torch.manual_seed(0)
    with pytest.raises(PlotError, match=r"differently from one run to the next.*does not heed `eval\(\)`"):
        plot_ot.load_subject(Noisy(), places=["hidden"], example=PARITY_ROWS[:1])
    with pytest.raises(PlotError, match="`example` has no row"):
        plot_ot.load_subject(Noisy(), places=["hidden"], example=PARITY_ROWS[:0])


def test_rows_of_different_lengths_inside_an_encoder_are_told_as_such():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2)
    shown = nn.ModuleDict({"encoder": encoder, "head": nn.Linear(8, 2)})

    def forward(x):
        mask = torch.zeros(x.shape[:2], dtype=torch.bool)
        mask[:, -1] = True
        return shown["head"](encoder(x, src_key_padding_mask=mask)[:, 0])

    shown.forward = forward  # type: ignore[method-assign]
    with pytest.raises(PlotError, match=r"nested tensor.*enable_nested_tensor=False"):
        plot_ot.load_subject(
            shown, places=["encoder.layers.0"], example=torch.randn(1, 4, 8), position=0, encode=lambda rows: rows
        )


def test_places_that_nothing_reads_are_told_apart_from_absent_variables(subject):
    net = random_parities(1000, aligned=True)[0]

    class Aside(nn.Module):
        """Also runs a layer whose output goes nowhere."""

        def __init__(self):
            super().__init__()
            self.net, self.aside = net, nn.Linear(8, 12)

        def forward(self, x):
            self.aside(x)
            return self.net(x)

    unread = plot_ot.load_subject(Aside(), places=["aside"], example=PARITY_ROWS[:1])
    verdict = plot_ot.localize(unread, PARITIES, PARITY_ROWS, size=100, progress=False).verdicts["left"]
    assert str(verdict.status) == "not localized"
    assert "no edit at any of these places changes an output: the network does not read them" in verdict.sentence
    read = plot_ot.load_subject(Aside(), places=["net.1"], example=PARITY_ROWS[:1])
    found = plot_ot.localize(read, PARITIES, PARITY_ROWS, size=100, progress=False).verdicts["left"]
    assert "no edit at any of these places" not in found.sentence


def test_rows_that_do_not_fit_the_hypothesis_are_refused_before_the_network_runs(subject, monkeypatch):
    monkeypatch.setattr(type(subject), "record", lambda *_: pytest.fail("the network ran"))
    with pytest.raises(PlotError, match="columns"):
        plot_ot.localize(subject, PARITIES, torch.cat([PARITY_ROWS, PARITY_ROWS], dim=1))


def test_a_network_whose_outputs_are_not_finite_is_said_to_be_so():
    net = random_parities(1000, aligned=True)[0]
    with torch.no_grad():
        net[0].bias.fill_(torch.nan)
    with pytest.raises(PlotError, match=r"(?i)nan"):
        plot_ot.localize(net, PARITIES, PARITY_ROWS, size=100)
