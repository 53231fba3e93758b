"""F5 for language models: a directory, an adapter, a tokenizer or a file of questions that is replaced between calls."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import plot_ot
from plot_ot.errors import PlotError
from plot_ot.files.run_reading import read_run
from plot_ot.models.tiny import load_tiny
from plot_ot.tasks import MultipleChoice
from plot_ot.tasks.mcqa_data import causal_model, draw_rows
from plot_ot.tasks.mcqa_text import render
from plot_ot.tasks.text_data import Sizes
from test_mcqa_data import entry
from test_nothing_mixed import files

pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model directory, an adapter, a file of questions, and a finished run of all three."""
    peft = pytest.importorskip("peft")
    folder = tmp_path_factory.mktemp("made")
    model, tokenizer = load_tiny("planted-1000")
    tokenizer.save_pretrained(folder / "model")
    model.save_pretrained(folder / "model")
    torch.manual_seed(1000)
    config = peft.LoraConfig(r=1, target_modules=["q_proj"], init_lora_weights=True)
    peft.get_peft_model(model, config).save_pretrained(folder / "adapter")
    rows = draw_rows(400, torch.Generator().manual_seed(1000))
    keys = causal_model().run(rows)["answer_pointer"] - 1
    asked = [entry(prompt, int(key)) for prompt, key in zip(render(rows), keys, strict=True)]
    (folder / "questions.json").write_text(json.dumps(asked), encoding="utf-8")
    study(folder)
    return folder


def study(folder: Path, methods: tuple[str, ...] = ("full-vector",), **options: Any) -> Any:
    with pytest.MonkeyPatch.context() as here:
        here.chdir(folder)  # where a run finds its model is no part of what it is
        return plot_ot.run_study(
            "mcqa",
            model="./model",
            adapter="./adapter",
            questions="questions.json",
            seeds=[1000],
            methods=list(methods),
            out="run",
            sizes=Sizes(16, 8, 8, 8),
            controls="standard",
            **options,
        )


def change_tensors(path: Path) -> None:
    tensors = load_file(path)
    name = max(tensors)
    tensors[name] = tensors[name] + 1e-3
    save_file(tensors, path, metadata={"format": "pt"})


def change_tokenizer(folder: Path) -> None:
    """Text becomes tokens in another way: two words trade places."""
    path = folder / "model" / "tokenizer.json"
    told = json.loads(path.read_text(encoding="utf-8"))
    vocabulary = told["model"]["vocab"]
    one, two = list(vocabulary)[-2:]
    vocabulary[one], vocabulary[two] = vocabulary[two], vocabulary[one]
    path.write_text(json.dumps(told), encoding="utf-8")


def change_questions(folder: Path) -> None:
    path = folder / "questions.json"
    asked = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(asked[1:]), encoding="utf-8")


CHANGES: dict[str, Callable[[Path], None]] = {
    "identity": lambda folder: change_tensors(folder / "model" / "model.safetensors"),
    "identity of the adapter": lambda folder: change_tensors(folder / "adapter" / "adapter_model.safetensors"),
    "tokenizer": change_tokenizer,
    "questions": change_questions,
}


@pytest.mark.parametrize("methods", [("full-vector",), ("full-vector", "plot")], ids=["finished", "one more method"])
@pytest.mark.parametrize("what", CHANGES)
def test_f05_a_model_adapter_tokenizer_or_questions_replaced_between_two_calls(
    made, tmp_path, monkeypatch, what, methods
):
    shutil.copytree(made, tmp_path / "it")
    monkeypatch.chdir(tmp_path / "it")
    held = MultipleChoice("./model", adapter="./adapter")
    assert held.language_model  # held by a task of this process, and yet not taken for what lies there now
    before = files(tmp_path / "it" / "run")
    CHANGES[what](tmp_path / "it")
    with pytest.raises(PlotError, match=rf"another network: {what.split()[0]} .* there, .* here.*--start-over"):
        study(tmp_path / "it", methods)
    assert files(tmp_path / "it" / "run") == before


def test_f05_starting_over_with_another_model_names_it(made, tmp_path):
    shutil.copytree(made, tmp_path / "it")
    CHANGES["identity"](tmp_path / "it")
    again = study(tmp_path / "it", start_over=True)
    old = read_run(made / "run").manifest["subjects"]["1000"]
    new = again.manifest["subjects"]["1000"]
    assert {k for k in old if old[k] != new[k]} == {"identity"}
