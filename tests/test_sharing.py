"""Handles that are shared: the card, the hub's own client against a hub on this machine, and what never leaves it."""

from __future__ import annotations

import getpass
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from hub import LocalHub, local_hub
from plot_ot import Edit, Frame, Handle, MLPSubject, PlotError, Status, Verdict
from plot_ot.edits.encoder import Encoder
from plot_ot.files.privacy import shared_text
from plot_ot.judging.gates import works
from plot_ot.judging.intervals import Accuracy

BASE, SOURCE = torch.arange(12).float().reshape(3, 4), torch.arange(12).float().flip(0).reshape(3, 4)


@pytest.fixture
def hub(monkeypatch, tmp_path):
    with local_hub(monkeypatch, tmp_path / "cache") as found:
        yield found


def network(seed: int = 1000) -> MLPSubject:
    torch.manual_seed(seed)
    return MLPSubject(nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)), encode=lambda rows: rows.float())


def example(subject: MLPSubject, **chosen: object) -> Handle:
    place = subject.places[0]
    frame = Frame.orthonormal(torch.linalg.qr(torch.randn(place.width, 2))[0])
    values = {"low": (torch.tensor([0.0, 1.0]),), "high": (torch.tensor([2.0, 3.0]),)}
    return Handle("carry", (Edit(place, frame, torch.tensor([1.0, 0.5])),), subject.identity(), chosen, values)


def verdict(sentence: str = "carry is at layer 1.") -> Verdict:
    numbers = {"handle": 0.97, "copy_source": 0.1, "random_best": 0.4, "full_patch": 0.5, "invariance": 0.99}
    gate = works(Accuracy(0.97, 0.94, 1.0, 200), 60)
    return Verdict("carry", Status.PLACED, sentence, numbers, (gate,))


# -- the hub -----------------------------------------------------------------------------------------------------------


def test_a_handle_comes_back_from_the_hub_as_it_was(hub: LocalHub) -> None:
    subject = network()
    handle = example(subject, calibration_score=0.97)
    address = handle.push_to_hub("ann/carry", model="ann/net", verdict=verdict(), private=True, token="hf_x")  # noqa: S106
    assert address == f"{hub.address}/ann/carry"
    assert hub.private["ann/carry"] is True
    assert sorted(hub.files["models/ann/carry"]) == ["README.md", "handle.safetensors"]
    again = Handle.from_hub("ann/carry", subject)
    assert again.variable == "carry"
    assert again.chosen == handle.chosen
    assert list(again.values) == ["low", "high"]
    assert torch.equal(again.apply(subject, BASE, SOURCE), handle.apply(subject, BASE, SOURCE))
    assert torch.equal(again.set("high").apply(subject, BASE), handle.set("high").apply(subject, BASE))


def test_the_card_says_what_where_how_sure_and_how_to_use_it(hub: LocalHub) -> None:
    example(network(), layer=1).push_to_hub("ann/carry", model="ann/net", verdict=verdict())
    card = hub.files["models/ann/carry"]["README.md"].decode()
    header, _, text = card.removeprefix("---\n").partition("\n---\n")
    told = dict(line.split(": ", 1) for line in header.splitlines())
    assert json.loads(told["base_model"]) == "ann/net"
    assert json.loads(told["library_name"]) == "plot-ot"
    place = network().places[0].name
    for said in (f"{place}: 2 directions of 6", "strengths 0.5 to 1", "placed", "carry is at layer 1."):
        assert said in text
    for control in (
        "| copying the source's answer | 0.100 |",
        "| the whole place patched | 0.500 |",
        "| works | holds |",
    ):
        assert control in text
    assert 'Handle.from_hub("ann/carry")' in text
    compile(text.split("```python\n")[1].split("```")[0], "card", "exec")


def test_a_card_without_a_verdict_says_so(hub: LocalHub) -> None:
    example(network()).push_to_hub("ann/carry")
    card = hub.files["models/ann/carry"]["README.md"].decode()
    assert "may not have been tested" in card
    assert "base_model" not in card


def test_what_is_no_verdict_or_another_variables_is_not_published(hub: LocalHub) -> None:
    other = replace(verdict(), variable="sum")
    for given, said in ((other, "that of 'sum'"), ({"carry": verdict()}, "found dict"), ("placed", "found str")):
        with pytest.raises(PlotError, match=said) as refused:
            example(network()).push_to_hub("ann/carry", verdict=given)
        assert "result.verdicts['carry']" in str(refused.value)
    assert not hub.files


def test_nothing_shared_names_a_folder_or_user_of_this_machine(hub: LocalHub) -> None:
    home, data = str(Path.home() / "secret" / "pairs.csv"), "/home/somebody/data/pairs.csv"
    handle = example(network(), trained_on=home, notes=[f"read from {data}, twice"], deep={"at": {"here": data}})
    handle.push_to_hub("ann/carry", model="/home/somebody/models/mine", verdict=verdict(f"Pairs of {data}: placed."))
    for content in hub.files["models/ann/carry"].values():
        for trace in (b"/home", b"secret", b"somebody", str(Path.home()).encode() + b"/"):
            assert trace not in content
        assert getpass.getuser() == "root" or getpass.getuser().encode() not in content
    assert Handle.from_hub("ann/carry").chosen["notes"][0].startswith("read from pairs.csv~")
    assert handle.chosen["trained_on"] == home  # the handle at hand is as it was


@pytest.mark.parametrize(
    ("text", "left"),
    [("share right 3/4 and 1/2", None), ("see ann/net and a/b/c", None), ("https://x.org/a/b", None)],
)
def test_what_is_no_path_is_left_alone(text: str, left: str | None) -> None:
    assert shared_text(text) == (left or text)


def test_text_of_others_stays_text_on_the_card(hub: LocalHub) -> None:
    subject = network()
    [edit] = example(subject).edits
    nasty = "x`\n---\n# Owned <script>alert(1)</script> | [link](http://x)"
    told = replace(verdict("<img src=x> |a|"), variable=nasty)
    Handle(nasty, (edit,), subject.identity()).push_to_hub("ann/carry", verdict=told)
    card = hub.files["models/ann/carry"]["README.md"].decode()
    shown = re.sub(r"`[^`\n]*`", "", card)  # between backticks, and in indented lines, text is text
    shown = "\n".join(line for line in shown.splitlines() if not line.startswith("    "))
    assert "\n# Owned" not in card
    assert not re.search(r"(?<!\\)[<|]\s*(script|img|a\b)", shown)
    assert "\\<img" in shown


# -- refusals ----------------------------------------------------------------------------------------------------------


def test_a_handle_of_another_network_is_refused(hub: LocalHub) -> None:
    example(network()).push_to_hub("ann/carry")
    with pytest.raises(PlotError, match="belongs to network"):
        Handle.from_hub("ann/carry", network(1001))
    for nothing in (
        "other.safetensors",
        torch.nn.Linear(2, 2),
    ):  # a file's name or a bare module in the subject's place
        with pytest.raises(
            PlotError, match=r"Expected a subject.*load_subject\(model, hypothesis\).*found (str|Linear)"
        ):
            Handle.from_hub("ann/carry", nothing)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["carry", "../../etc", "a/b/c", "a/..", "", "http://x/y"])
def test_a_name_that_is_no_repository_is_refused(name: str) -> None:
    with pytest.raises(PlotError, match="owner/name"):
        Handle.from_hub(name)
    with pytest.raises(PlotError, match="owner/name"):
        example(network()).push_to_hub(name)


def test_what_is_missing_or_forbidden_is_said_in_one_line(hub: LocalHub) -> None:
    hub.files["models/ann/empty"] = {"README.md": b"nothing"}
    for name in ("ann/empty", "ann/nowhere"):
        with pytest.raises(PlotError, match=f"'{name}' has no handle.safetensors that can be fetched"):
            Handle.from_hub(name)
    hub.refuses = True
    with pytest.raises(PlotError, match="could not be written") as said:
        example(network()).push_to_hub("ann/carry")
    assert "hf auth login" in str(said.value)
    assert re.search(r"\. Check the network, log in", str(said.value))
    assert "\n" not in str(said.value)


@pytest.mark.parametrize("content", [b"", b"\x80\x05.", b"PK\x03\x04", b"\xff" * 64, b"{}"])
def test_a_damaged_or_strange_file_is_refused_unopened(hub: LocalHub, content: bytes) -> None:
    hub.files["models/ann/carry"] = {"handle.safetensors": content}
    with pytest.raises(PlotError, match="not a readable plot-ot handle"):
        Handle.from_hub("ann/carry")


def test_a_file_beyond_bounds_is_refused(hub: LocalHub, monkeypatch) -> None:
    example(network()).push_to_hub("ann/carry")
    monkeypatch.setattr("plot_ot.handles.handle.MOST_SHARED", 100)
    with pytest.raises(PlotError, match="more than the 100"):
        Handle.from_hub("ann/carry")


# -- looking at a handle -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["identity", "orthonormal", "oblique"])
def test_the_matrix_is_what_the_edit_does(kind: str) -> None:
    subject = network()
    place = subject.places[0]
    read, write = torch.randn(2, place.width, 3)
    frame = {
        "identity": Frame.identity(place.width),
        "orthonormal": Frame.orthonormal(torch.linalg.qr(read)[0]),
        "oblique": Frame.oblique(read, write),
    }[kind]
    edit = Edit(place, frame, torch.tensor([1.0, -0.5, 2.0, 0, 0, 0][: frame.rank]))
    a, source = torch.randn(2, 5, place.width)
    moved = a + (source - a) @ edit.matrix().T.float()
    assert torch.allclose(edit.swapping(source)(a), moved, atol=1e-5)
    assert edit.matrix().dtype == torch.float64
    values, m = edit.singular_values(), edit.matrix()
    assert torch.allclose(values[:3], torch.linalg.svdvals(m)[:3])
    for side, dim in (("written", 1), ("read", 0)):
        share = m.square().sum(dim=dim) / m.square().sum()
        for k, found in edit.neurons(6, side=side):
            assert found == pytest.approx(float(share[k]))
        assert [k for k, _ in edit.neurons(2, side=side)] == share.argsort(descending=True, stable=True)[:2].tolist()


def test_an_edit_through_an_encoder_is_no_matrix() -> None:
    place = network().places[0]
    encoder = Encoder(torch.zeros(2), torch.arange(2))
    frame = Frame(place.width, torch.randn(6, 2), torch.randn(6, 2), "sae", encoder)
    edit = Edit(place, frame, torch.ones(2))
    with pytest.raises(PlotError, match="nonlinear encoder"):
        edit.matrix()
    for look in (edit.singular_values, edit.neurons):
        with pytest.raises(PlotError, match="nonlinear encoder"):
            look()
    assert "2 features of a sparse autoencoder" in edit.describe()


def test_a_handle_says_what_it_does() -> None:
    subject = network()
    place = subject.places[0]
    handle = example(subject, layer=1, calibration_score=0.96875, surface=[1, 2])
    told, [edit] = handle.describe(), handle.edits
    squares = edit.matrix().square().sum(dim=1)
    shares = squares / squares.sum()
    named = ", ".join(f"{k} ({shares[k]:.0%})" for k in shares.argsort(descending=True).tolist()[:5])
    assert told.splitlines() == [
        f"carry: 2 directions in network {subject.identity()}",
        f"  {place.name}: 2 directions of 6 (orthonormal), strengths 0.5 to 1; rank 2, largest factor 1, norm 1.12; "
        f"read and written most at neurons {named}",
        "  can be set to low, high",
        "  chosen: layer 1, calibration_score 0.9688",
    ]
    whole = Edit(place, Frame.identity(6), torch.ones(6))
    assert whole.describe() == f"{place.name}: all 6 neurons, strength 1"
    one = Edit(place, Frame.identity(6), torch.eye(6)[2])
    assert one.describe() == f"{place.name}: 1 neuron of 6, strength 1 (neuron 2)"
    some = Edit(place, Frame.identity(6), torch.tensor([1.0, 1, 0, 1, 1, 0]))
    assert some.describe() == f"{place.name}: 4 neurons of 6, strength 1 (neurons 0-1, 3-4)"
    assert Edit(place, Frame.identity(6), torch.zeros(6)).describe() == f"{place.name}: nothing is taken"
