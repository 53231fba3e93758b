"""RAVEL's files and scores, against networks whose scores are known."""

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import plot_ot
from plot_ot import Edit, Frame, Handle
from plot_ot.ravel import Ravel, disentangle, read_ravel
from plot_ot.ravel.data import variable_name
from refusals import assert_refused

ATTRIBUTES = ("Country", "Continent", "Country of Birth")
PROMPTS = {
    "Country": ("%s is in the country of", "100%% sure: %s lies in"),
    "Continent": ("Paris is in Europe. %s is in",),
    "Country of Birth": ("%s was born in",),
}


def entities() -> dict[str, dict[str, str]]:
    """Twelve entities, whose attributes are independent of each other."""
    values = [("A", "B", "C"), ("K", "L"), ("X", "Y")]
    return {f"e{k}": dict(zip(ATTRIBUTES, v, strict=True)) for k, v in enumerate(product(*values))}


def ravel() -> Ravel:
    names = list(entities())
    split = {e: ("train", "val", "test")[k % 3] for k, e in enumerate(names)}
    return Ravel(entities(), PROMPTS, split)


class Known(nn.Module):
    """Every attribute in directions of its own, turned; what is asked goes around the state."""

    def __init__(self, codes: Tensor, asks: Tensor) -> None:
        super().__init__()
        self.codes, self.asks, self.state = codes, asks, nn.Identity()
        self.turn = torch.linalg.qr(torch.randn(7, 7, generator=torch.Generator().manual_seed(1000)))[0]

    def forward(self, rows: Tensor) -> Tensor:
        rows = rows.long()
        held = self.state(self.codes[rows[:, 0]] @ self.turn.T) @ self.turn
        return torch.where(self.asks[rows[:, 1]] > 0, held, -10.0)


def known_network() -> tuple[Any, Any, list[Any]]:
    """A hypothesis, a network that does what it says, and pairs of all inputs."""
    data = ravel()
    answers = ["A", "B", "C", "K", "L", "X", "Y"]
    h = data.hypothesis(answers=answers)
    rows = h.rows(data.inputs())
    entity = {given["entity"]: int(row[0]) for given, row in zip(data.inputs(), rows, strict=True)}
    codes, asks = torch.zeros(12, 7), torch.zeros(4, 7)
    for name, known in entities().items():
        for value in known.values():
            codes[entity[name], answers.index(value)] = 1.0
    columns = dict(zip(ATTRIBUTES, ((0, 3), (3, 5), (5, 7)), strict=True))
    for given, row in zip(data.inputs(), rows, strict=True):
        [asked] = [a for a, own in PROMPTS.items() if given["prompt"] in own]
        asks[int(row[1]), slice(*columns[asked])] = 1.0
    net = Known(codes, asks)
    subject = plot_ot.load_subject(net, places=["state"], example=rows[:1], encode=lambda r: r)
    pairs = [(b, s) for b in data.inputs() for s in data.inputs()[::5] if b != s]
    return h, subject, pairs


def handle(subject: Any, variable: str, columns: slice | None, strength: float = 1.0) -> Handle:
    [place] = subject.places
    turn = subject.module.turn
    frame = Frame.identity(7) if columns is None else Frame.orthonormal(turn[:, columns].contiguous())
    return Handle(variable, (Edit(place, frame, torch.full((frame.rank,), strength)),), subject.identity())


COLUMNS = {"Country": slice(0, 3), "Continent": slice(3, 5), "Country_of_Birth": slice(5, 7)}


def test_scores_of_exact_handles_of_a_full_patch_and_of_no_edit() -> None:
    h, subject, pairs = known_network()
    exact = disentangle(subject, h, {v: handle(subject, v, c) for v, c in COLUMNS.items()}, pairs)
    assert {(s.cause, s.iso, s.disentangle) for s in exact.by_attribute.values()} == {(1.0, 1.0, 1.0)}
    assert exact.disentangle == 1.0
    patch = disentangle(subject, h, {v: handle(subject, v, None) for v in COLUMNS}, pairs)
    assert {(s.cause, s.iso) for s in patch.by_attribute.values()} == {(1.0, 0.0)}
    nothing = disentangle(subject, h, {v: handle(subject, v, None, 0.0) for v in COLUMNS}, pairs)
    assert {(s.cause, s.iso, s.disentangle) for s in nothing.by_attribute.values()} == {(0.0, 1.0, 0.5)}


def test_a_feature_that_also_moves_another_attribute_is_told_by_isolation() -> None:
    h, subject, pairs = known_network()
    both = disentangle(subject, h, {"Country": handle(subject, "Country", slice(0, 5))}, pairs).by_attribute["Country"]
    assert both.cause == 1.0
    assert both.iso_by == {"Continent": 0.0, "Country_of_Birth": 1.0}
    assert both.iso == 0.5
    assert both.disentangle == 0.75
    asked = [b["prompt"] in PROMPTS["Country"] for b, _ in pairs]
    differ = [entities()[b["entity"]]["Country"] != entities()[s["entity"]]["Country"] for b, s in pairs]
    assert both.pairs["Country"] == sum(a and d for a, d in zip(asked, differ, strict=True))
    said = str(disentangle(subject, h, {"Country": handle(subject, "Country", slice(0, 5))}, pairs))
    assert "0.750" in said


def test_the_hypothesis_reads_prompts_as_ravel_does() -> None:
    h = ravel().hypothesis()
    rows = h.rows([{"entity": "e0", "prompt": p} for own in PROMPTS.values() for p in own])
    assert h.render(rows)[:3] == ["e0 is in the country of", "100% sure: e0 lies in", "Paris is in Europe. e0 is in"]
    for text, spans in h.located(rows):
        assert text[slice(*spans["entity"])] == "e0"
    assert h.causal.variables == ("Country", "Continent", "Country_of_Birth")
    b, s = h.rows(
        [{"entity": "e0", "prompt": "%s was born in"}, {"entity": "e11", "prompt": PROMPTS["Country"][0]}]
    ).split(1)
    swapped = [int(h.causal.swap(b, s, v)) for v in h.causal.variables]
    assert [h.answers[k] for k in swapped] == ["X", "X", "Y"]
    # an entity that stands in the prompt twice is found where the prompt's gap is
    paris = Ravel({"Paris": dict.fromkeys(ATTRIBUTES, "A"), "e": dict.fromkeys(ATTRIBUTES, "B")}, PROMPTS).hypothesis()
    [(text, spans)] = paris.located(paris.rows([{"entity": "Paris", "prompt": PROMPTS["Continent"][0]}]))
    assert spans["entity"] == (len("Paris is in Europe. "), len("Paris is in Europe. Paris"))


def test_pairs_stay_inside_ravels_own_splits() -> None:
    data = ravel()
    pairs = data.pairs(30, seed=1000)
    assert len(pairs) == 90
    ours = {"train": "fit", "val": "calibration", "test": "test"}
    for pair in pairs:
        assert {ours[data.split[pair[side]["entity"]]] for side in ("base", "source")} == {pair["split"]}
    kept = [entities()[p["base"]["entity"]]["Country"] == entities()[p["source"]["entity"]]["Country"] for p in pairs]
    assert 15 < sum(kept) < 60
    assert data.pairs(30, seed=1000) == pairs
    assert len(data.inputs()) == 12 * 4
    assert len(data.inputs(10, seed=1)) == 10


# -- files -----------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    more = {**entities(), "e12": {"Country": "A", "Continent": "", "Country of Birth": "X"}}
    files = {
        "entity_attributes": more,
        "attribute_to_prompts": {a: list(own) for a, own in PROMPTS.items()},
        "entity_to_split": dict(ravel().split),
    }
    for name, content in files.items():
        (tmp_path / f"ravel_city_{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return tmp_path


def test_ravels_files_are_read_from_a_folder(folder: Path) -> None:
    assert read_ravel(folder) == ravel()  # the entity that lacks a value is left out
    some = read_ravel(folder, "city", ["Country", "Country of Birth"])
    assert some.attributes == ("Country", "Country of Birth")
    assert "e12" in some.entities
    (folder / "ravel_city_entity_to_split.json").unlink()
    assert_refused(lambda: read_ravel(folder).pairs(5), ["no split", "hold_out='entity'"])


def test_what_is_no_ravel_is_refused(folder: Path) -> None:
    assert_refused(lambda: read_ravel(folder, "verb"), ["There is no file", "data.tgz"])
    assert_refused(lambda: read_ravel(folder, "city", ["Latitude"]), ["attribute of RAVEL's city", "Latitude"])
    for name, content in (
        ("entity_attributes", "[1]"),
        ("entity_attributes", '{"a": 3}'),
        ("entity_attributes", '{"a": {"x": 3}}'),
    ):
        (folder / f"ravel_city_{name}.json").write_text(content, encoding="utf-8")
        assert_refused(lambda: read_ravel(folder), ["ravel_city_entity_attributes.json"])
    assert_refused(lambda: Ravel(entities(), {"Country": ["no gap"]}), ["'no gap'", "one %s"])
    assert_refused(lambda: Ravel(entities(), {"Country": ["%s"], "Continent": ["%s"]}), ["two attributes"])
    assert_refused(lambda: Ravel(entities(), {"Latitude": ["%s"]}), ["lack an attribute"])
    assert_refused(lambda: Ravel({}, PROMPTS), ["empty"])
    assert variable_name("Country of Birth") == "Country_of_Birth"


def test_scores_need_pairs_that_ask_for_all_attributes() -> None:
    h, subject, pairs = known_network()
    one = {"Country": handle(subject, "Country", slice(0, 3))}
    assert_refused(lambda: disentangle(subject, h, one, [b for b, _ in pairs]), ["inputs alone", "Ravel.pairs"])
    only = [(b, s) for b, s in pairs if b["prompt"] in PROMPTS["Continent"]]
    assert_refused(lambda: disentangle(subject, h, one, only), ["'Country'", "none for Country"])
    assert_refused(lambda: disentangle(subject, h, {"City": handle(subject, "City", None)}, pairs), ["City"])
