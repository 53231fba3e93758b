"""Files from strangers: nothing in them runs, nothing hangs, nothing unpacks to more than it may."""

from __future__ import annotations

import io
import json
import os
import pickle
import sys
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from decoders import network, transformers
from plot_ot import load_sae, read_pairs
from plot_ot.cli.task_files import load_tokenizer
from plot_ot.errors import PlotError
from plot_ot.files import safe_reading
from plot_ot.files.safe_reading import parse_json, read_npz, read_parquet, read_torch_file
from plot_ot.models.loading import load_model
from plot_ot.planner import shape_by_name
from plot_ot.tasks.mcqa_file import read_questions
from refusals import assert_refused

RAN = "plot_ot_test_stranger_ran"
CODE = f"""
import sys
from transformers import PretrainedConfig, PreTrainedTokenizerFast
sys.modules["{RAN}"] = sys
class StrangeConfig(PretrainedConfig):
    model_type = "strange"
class StrangeTokenizer(PreTrainedTokenizerFast):
    pass
"""


class Evil:
    """Unpickling it leaves a mark."""

    def __reduce__(self) -> tuple[object, ...]:
        return exec, (f"import sys; sys.modules['{RAN}'] = sys",)


@pytest.fixture(autouse=True)
def nothing_runs():
    """Whatever a test does, nothing that comes with a file may have been run."""
    yield
    assert RAN not in sys.modules


def soon(work: Callable[[], object]) -> object:
    """What the work gives or raises; work that hangs is a failure."""
    found: list[object] = []

    def run() -> None:
        try:
            found.append(work())
        except Exception as e:
            found.append(e)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(60)
    assert found, "it hangs"
    return found[0]


def assert_soon_refused(work: Callable[[], object], words: list[str]) -> None:
    found = soon(work)
    assert isinstance(found, PlotError), repr(found)
    assert not [w for w in words if w not in str(found)], str(found)


# -- F1: code -----------------------------------------------------------------------------------------------------


@pytest.fixture
def strange(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model directory with code of its own, and a user who answers every question with yes."""
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 10))
    (tmp_path / "strange.py").write_text(CODE, encoding="utf-8")
    auto = {"AutoConfig": "strange.StrangeConfig", "AutoModelForCausalLM": "strange.StrangeConfig"}
    described = {"model_type": "strange", "auto_map": auto, "architectures": ["StrangeForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(described), encoding="utf-8")
    tokens = {"tokenizer_class": "StrangeTokenizer", "auto_map": {"AutoTokenizer": [None, "strange.StrangeTokenizer"]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(tokens), encoding="utf-8")
    (tmp_path / "tokenizer.json").write_text("{}", encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize("load", [load_model, load_tokenizer, shape_by_name], ids=["model", "check", "explain"])
def test_f1_code_that_comes_with_a_model_is_refused_without_a_question(strange: Path, load: Callable[..., object]):
    assert_refused(lambda: load(str(strange)), ["code that comes with it", "never run"])


# -- F12: adapters ------------------------------------------------------------------------------------------------


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    peft = pytest.importorskip("peft")
    torch.manual_seed(1000)
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "o_proj"], init_lora_weights=False)
    peft.get_peft_model(network("llama"), config).save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter"


def adapted(adapter: Path) -> nn.Module:
    return load_model(network("llama"), adapter=adapter)[0]


def test_f12_an_adapter_must_hold_every_tensor_that_it_is_made_of(adapter: Path):
    adapted(adapter)
    weights = adapter / "adapter_model.safetensors"
    whole = load_file(weights)
    first = min(whole)
    for damaged in (
        {},
        {k: v for k, v in whole.items() if k != first},
        {k.replace("model.layers", "other.layers"): v for k, v in whole.items()},
        {**whole, "base_model.model.strange.lora_A.weight": torch.ones(2, 2)},
    ):
        save_file(damaged, weights, metadata={"format": "pt"})
        assert_refused(lambda: adapted(adapter), ["adapter_model.safetensors", "other tensors"])
    save_file({**whole, first: whole[first].clone().fill_(float("nan"))}, weights, metadata={"format": "pt"})
    assert_refused(lambda: adapted(adapter), ["adapter_model.safetensors", "NaN"])


def test_f12_an_adapter_that_is_a_pickle_is_not_read(adapter: Path):
    weights = adapter / "adapter_model.safetensors"
    torch.save(load_file(weights), adapter / "adapter_model.bin")
    weights.unlink()
    assert_refused(lambda: adapted(adapter), ["holds no adapter_model.safetensors"])


# -- F14: pipes and devices ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_f14_pipes_and_devices_are_refused_not_waited_for(tmp_path: Path, kind: str):
    def put(path: Path) -> Path:
        path.parent.mkdir(exist_ok=True)
        os.mkfifo(path) if kind == "pipe" else path.symlink_to("/dev/zero")
        return path

    put(tmp_path / "a" / "cfg.json")
    assert_soon_refused(lambda: load_sae(tmp_path / "a"), ["cfg.json", "not an ordinary file"])
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "cfg.json").write_text("{}", encoding="utf-8")
    put(tmp_path / "b" / "sae_weights.safetensors")
    assert_soon_refused(lambda: load_sae(tmp_path / "b"), ["sae_weights.safetensors", "not an ordinary file"])
    for name, load in {
        "params.npz": load_sae,
        "pairs.jsonl": lambda path: list(read_pairs(path).base),
        "pairs.csv": lambda path: list(read_pairs(path).base),
        "questions.parquet": lambda path: read_questions(str(path)),
        "questions.jsonl": lambda path: read_questions(str(path)),
    }.items():
        path = put(tmp_path / name)
        why = "no file" if name.startswith("pairs") else "not an ordinary file"
        assert_soon_refused(lambda load=load, path=path: load(path), [name, why])


def test_f14_a_model_directory_with_a_pipe_is_refused(tmp_path: Path):
    network("llama").save_pretrained(tmp_path)
    os.mkfifo(tmp_path / "generation_config2.json")
    assert_soon_refused(lambda: load_model(tmp_path), ["generation_config2.json", "not an ordinary file"])


# -- F15: what a file unpacks to ----------------------------------------------------------------------------------


def test_f15_an_npz_file_may_not_unfold_to_many_times_its_size(tmp_path: Path):
    np.savez_compressed(tmp_path / "params.npz", W_enc=np.zeros((1 << 10, 1 << 13), dtype=np.float32))
    assert (tmp_path / "params.npz").stat().st_size < 1 << 17
    assert_refused(lambda: load_sae(tmp_path / "params.npz"), ["params.npz", "unfold"])
    rng = np.random.default_rng(1000)
    np.savez_compressed(tmp_path / "fine.npz", W_enc=rng.normal(size=(64, 64)).astype(np.float32))
    assert read_npz(tmp_path / "fine.npz", 1 << 20)["W_enc"].shape == (64, 64)
    with pytest.raises(ValueError, match="bytes"):
        read_npz(tmp_path / "fine.npz", 1 << 10)


def test_f15_a_parquet_file_may_not_unfold_to_more_than_questions_take(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    words = pa.DictionaryArray.from_arrays(pa.array(np.zeros(4000, dtype=np.int32)), ["x" * (1 << 16)])
    parquet.write_table(pa.table({"prompt": words}), tmp_path / "bomb.parquet")
    assert (tmp_path / "bomb.parquet").stat().st_size < 1 << 20
    assert_refused(lambda: read_questions(str(tmp_path / "bomb.parquet")), ["bomb.parquet", "more than"])
    counted = pa.array(np.zeros(10_000_000, dtype=np.int8))
    parquet.write_table(pa.table({"prompt": counted}), tmp_path / "many.parquet")
    assert_refused(lambda: read_questions(str(tmp_path / "many.parquet")), ["many.parquet", "more than"])
    parquet.write_table(pa.table({"prompt": ["a", "b"] * 700}), tmp_path / "fine.parquet")
    assert read_parquet(tmp_path / "fine.parquet") == [{"prompt": "a"}, {"prompt": "b"}] * 700


@pytest.mark.parametrize(
    "text", ["[" + "[]," * 9999 + "[]]", "[" + '{"a":0},' * 9999 + "{}]", "[" + "0," * 9999 + "0]"]
)
def test_f15_json_is_bounded_by_what_its_values_take(text: str, monkeypatch: pytest.MonkeyPatch):
    def taken(value: object) -> int:
        inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        return sys.getsizeof(value) + sum(map(taken, inside))

    assert parse_json(text) == parse_json(text.encode())
    monkeypatch.setattr(safe_reading, "MOST_DECODED", taken(json.loads(text)) // 2)
    with pytest.raises(ValueError, match="would take more than"):
        parse_json(text)
    with pytest.raises(ValueError, match="would take more than"):
        parse_json(text.encode())


# -- F16: torch files ---------------------------------------------------------------------------------------------


def test_f16_a_bare_pickle_with_a_zip_behind_it_is_not_opened(tmp_path: Path):
    zipped = io.BytesIO()
    torch.save({"weight": torch.ones(2)}, zipped)
    (tmp_path / "good").write_bytes(zipped.getvalue())
    assert torch.equal(read_torch_file(tmp_path / "good", 1 << 20)["weight"], torch.ones(2))
    old = io.BytesIO()
    torch.save({"weight": torch.zeros(2)}, old, _use_new_zipfile_serialization=False)
    for front in (pickle.dumps(Evil()), old.getvalue()):
        both = tmp_path / "both"
        both.write_bytes(front + zipped.getvalue())
        assert zipfile.is_zipfile(both)
        with pytest.raises(ValueError, match="bare pickles are not opened"):
            read_torch_file(both, 1 << 20)


def test_torch_is_required_in_a_version_that_reads_tensors_only():
    text = (Path(__file__).parent.parent / "pyproject.toml").read_text(encoding="utf-8")
    assert '"torch>=2.6"' in text
    assert transformers.__version__ >= "4.57"
