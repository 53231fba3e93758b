"""The embedded tiny language models hold what their descriptions say: checked with hooks written here."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from plot_ot.models.vocabulary import FRESH
from plot_ot.tasks.mcqa_data import VARIABLES, causal_model, draw_rows, draw_splits, questions, sources
from plot_ot.tasks.mcqa_text import answer_tokens, encoder, render, says
from refusals import assert_refused

transformers = pytest.importorskip("transformers")

from plot_ot.models import available, folders, tiny  # noqa: E402
from plot_ot.models.tiny import ASSETS, TINY, build_tokenizer, describe_tiny, load_tiny  # noqa: E402

CAUSAL = causal_model()


@pytest.fixture(scope="module", params=list(TINY))
def net(request: Any) -> tuple[str, Any, Any]:
    return request.param, *load_tiny(request.param)


def tokens(tokenizer: Any, rows: Tensor) -> dict[str, Tensor]:
    ids, mask = encoder(tokenizer, bos=tokenizer.bos_token_id)(rows)
    return {"input_ids": ids, "attention_mask": mask}


@torch.no_grad()
def letters(model: Any, tokenizer: Any, rows: Tensor) -> Tensor:
    """The argmax over the whole vocabulary, as a letter; -1 for anything else."""
    return named(tokenizer, model(**tokens(tokenizer, rows)).logits[:, -1].argmax(dim=1))


def named(tokenizer: Any, answers: Tensor) -> Tensor:
    known = {token: k for k, group in enumerate(answer_tokens(tokenizer)) for token in group}
    return torch.tensor([known.get(t, -1) for t in answers.tolist()])


@torch.no_grad()
def patched(model: Any, tokenizer: Any, base: Tensor, source: Tensor, block: int, part: list[int]) -> Tensor:
    """Each pair's base answered with part of the last token's state after a block taken from the source."""
    state = model(**tokens(tokenizer, source), output_hidden_states=True).hidden_states[block + 1][:, -1]

    def write(_module: Any, _inputs: Any, hidden: Tensor) -> Tensor:
        hidden = hidden.clone()
        hidden[:, -1, part] = state[:, part]
        return hidden

    handle = model.model.layers[block].register_forward_hook(write)
    try:
        return letters(model, tokenizer, base)
    finally:
        handle.remove()


def pairs(family: str, count: int = 160) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(1000)
    base = draw_rows(count, g, about=questions(FRESH))
    return base, sources(base, family, g)


def test_answers_questions_about_objects_never_seen(net: tuple[str, Any, Any]) -> None:
    _, model, tokenizer = net
    g = torch.Generator().manual_seed(1000)
    for style in ({}, {"letters": range(26)}, {"letters": range(26), "templates": (1, 2)}):
        rows = draw_rows(300, g, about=questions(FRESH), **style)  # type: ignore[arg-type]
        right = letters(model, tokenizer, rows) == CAUSAL.answer(rows)
        assert right.double().mean() > 0.99


@pytest.mark.parametrize("family", ["answerPosition_randomLetter", "lineOrder"])
def test_swaps_do_what_the_description_says(net: tuple[str, Any, Any], family: str) -> None:
    name, model, tokenizer = net
    base, source = pairs(family)
    moved = CAUSAL.run(base)["answer_pointer"] != CAUSAL.run(source)["answer_pointer"]
    base, source = base[moved], source[moved]
    label = {v: CAUSAL.swap(base, source, v) for v in VARIABLES}
    apart = label["answer_pointer"] != label["answer_token"]
    base, source, label = base[apart], source[apart], {v: y[apart] for v, y in label.items()}
    whole = list(range(64))

    def score(block: int, part: list[int], variable: str) -> float:
        return float((patched(model, tokenizer, base, source, block, part) == label[variable]).double().mean())

    planted = describe_tiny(name)["planted"]
    assert score(5, whole, "answer_token") > 0.99
    if planted:
        own = planted["answer_pointer"]["coordinates"]
        assert score(2, own, "answer_pointer") > 0.97
        assert min(score(block, whole, "answer_token") for block in (3, 4)) > 0.97
        assert 0.35 < score(2, whole, "answer_pointer") < 0.65  # the register moves too
        assert score(2, whole, "answer_token") < 0.65
    else:
        assert max(score(block, whole, "answer_pointer") for block in range(6)) < 0.35


def test_the_table_is_that_of_the_descriptions() -> None:
    table = (ASSETS / "README.md").read_text()
    for name in TINY:
        truth = describe_tiny(name)["truth"]
        row = next(line for line in table.splitlines() if line.startswith(f"| {name} |") and "lineOrder" in line)
        assert " ".join(f"{x:.3f}" for x in truth["lineOrder"]["full patch"]["answer_pointer"]) in row


def test_files_are_small() -> None:
    assert all(f.stat().st_size < 1.5e6 for f in ASSETS.iterdir())


def test_nets_differ_and_load_alike() -> None:
    weights = [load_tiny(name)[0].model.layers[0].mlp.up_proj.weight for name in list(TINY) * 2]
    assert torch.equal(weights[0], weights[len(TINY)])
    assert not torch.equal(weights[0], weights[1])
    assert weights[0].dtype == torch.float32
    assert not weights[0].requires_grad


def test_the_saved_tokenizer_is_the_built_one() -> None:
    saved, built = load_tiny("plain-1000")[1], build_tokenizer()
    assert saved.get_vocab() == built.get_vocab()


def test_every_prompt_word_is_known_and_read_back() -> None:
    tokenizer = build_tokenizer()
    rows = draw_rows(300, torch.Generator().manual_seed(1000), about=questions(range(100)), templates=(0, 1, 2))
    ids, mask = encoder(tokenizer, bos=tokenizer.bos_token_id)(rows)
    assert tokenizer.unk_token_id not in ids
    for row, kept, prompt in zip(ids, mask, render(rows), strict=True):
        words = tokenizer.convert_ids_to_tokens(row[kept > 0].tolist())
        assert words[0] == "<bos>"
        assert "".join(words[1:]) == prompt.replace(" ", "")
    assert ids[rows[:, 2] == 0].shape[1] >= 33
    assert tokenizer.encode("zeppelin", add_special_tokens=False) == [tokenizer.unk_token_id]


def test_banks_can_be_drawn_with_a_tiny_net() -> None:
    model, tokenizer = load_tiny("plain-1000")

    @torch.no_grad()
    def right(rows: Tensor) -> Tensor:
        answers = model(**tokens(tokenizer, rows)).logits[:, -1].argmax(dim=1)
        return says(tokenizer, answers, CAUSAL.answer(rows))

    drawn = draw_splits(1000, right)
    assert min(rate for split in drawn.pass_rates.values() for rate in split.values()) > 0.95


def test_a_net_that_the_wheel_leaves_out_is_found_in_the_cache(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wheel holds one net of each kind (C2); the others come from a source tree or from the cache."""
    monkeypatch.setattr(folders, "SOURCE_TREE", tmp_path / "site-packages")
    monkeypatch.setenv("PLOT_OT_CACHE", str(tmp_path / "cache"))
    assert {m.name: m.state for m in available()}["plain-1001"] == "in a clone"
    assert_refused(lambda: load_tiny("plain-1001"), ["plain-1001", "not installed", "models/tiny", str(tmp_path)])
    shutil.copytree(Path(__file__).parents[1] / "models" / "tiny", tmp_path / "cache" / "models" / "tiny")
    assert load_tiny("plain-1001")[0].config.num_hidden_layers == 6
    assert {m.name: m.state for m in available()}["plain-1001"] == "ready"


def test_tiny_is_the_first_of_them() -> None:
    pairs = zip(load_tiny("tiny")[0].parameters(), load_tiny("planted-1000")[0].parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    assert [m.name for m in available()][:2] == ["tiny", "planted-1000"]


def test_an_unknown_net_is_refused() -> None:
    assert_refused(lambda: load_tiny("planted-1"), ["planted-1", "Did you mean", "plain-1002"])


def test_a_damaged_net_is_refused(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiny, "ASSETS", tmp_path)
    assert_refused(lambda: load_tiny("plain-1000"), ["missing or damaged", "Install"])
    (tmp_path / "plain-1000.json").write_bytes((ASSETS / "plain-1000.json").read_bytes())
    (tmp_path / "plain-1000.safetensors").write_bytes(b"nothing")
    assert_refused(lambda: load_tiny("plain-1000"), ["plain-1000.safetensors", "damaged"])
