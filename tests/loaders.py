"""Everything that reads files which anyone may have written. A new loader is one line in LOADERS: how to write a sound
folder, which of its files is damaged, how it is read.
"""

from __future__ import annotations

import copy
import csv
import io
import json
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save
from torch import Tensor, nn

import report_runs
from damage import Loader
from plot_ot.abstract.pairs import read_pairs
from plot_ot.edits import Frame
from plot_ot.errors import PlotError
from plot_ot.exchange import from_causalab, from_mib, from_pyvene, to_causalab, to_mib, to_pyvene
from plot_ot.files.locks import NAME as LOCK
from plot_ot.files.locks import Lock
from plot_ot.files.run_directory import RunDirectory
from plot_ot.files.run_reading import read_run
from plot_ot.files.unit_files import unit_digests
from plot_ot.files.writing import write_json
from plot_ot.handles import Edit, Handle
from plot_ot.models.adapters import ADAPTER_FILES, digest_weights, load_adapter, read_record, save_adapter
from plot_ot.models.loading import load_model
from plot_ot.models.named import FORMAT as MODEL_FORMAT
from plot_ot.models.named import MANIFEST, check_directory, hash_file
from plot_ot.planner.shape import shape_by_name
from plot_ot.report.page import page
from plot_ot.sites.sae import load_sae
from plot_ot.subjects import DecoderSubject
from plot_ot.tasks.addition_data import Adder, Backbone, read_backbone, save_backbone, train_backbone
from plot_ot.tasks.heq import build_net, load_backbone
from plot_ot.tasks.mcqa_file import read_questions


def _handle(folder: Path) -> None:
    report_runs.handle("plot-pca", "AnswerToken").save(folder / "x.safetensors")


def _run(folder: Path) -> None:
    run = report_runs.text_run(folder, seeds=(1,))
    run.finish(1, "das", {"records": [], "couplings": [{"seed": 1}], "notes": []})
    run.close()
    results = json.loads((folder / "results.json").read_text())
    write_json(folder / "results.json", {**results, "units": unit_digests(folder)})  # compiled from what is there


def _stale(folder: Path) -> None:
    """Results that were compiled before the last unit was finished: units are read."""
    _run(folder)
    results = json.loads((folder / "results.json").read_text())
    write_json(folder / "results.json", {**results, "units": {}})


def _compile(folder: Path) -> None:
    RunDirectory(folder, json.loads((folder / "manifest.json").read_text())).compile(["das"])


def _open_run(folder: Path) -> None:
    config = json.loads((folder.parent / "config").read_text())
    RunDirectory.open(folder, config, {"plot_ot": "0.1.0"}).close()


def _run_with_config(folder: Path) -> None:
    _run(folder)
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder.parent / "config").write_text(json.dumps(manifest["config"]))


def _held(folder: Path) -> str:
    """What is said of a lock that another process holds, with anything written in its file."""
    import fcntl

    with (folder / LOCK).open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        try:
            Lock(folder).release()
        except PlotError as e:
            return str(e)
    raise AssertionError("a lock that is held was taken")


def _heq(folder: Path) -> None:
    net = build_net()
    tensors = {f"net.{n}": t for n, t in net.state_dict().items()} | {"table": torch.rand(100, 4)}
    more = {"cell_accuracy": torch.ones(4, dtype=torch.float64), "epochs": torch.tensor(3)}
    (folder / "heq-7.safetensors").write_bytes(save(tensors | more))


@lru_cache(maxsize=1)
def _adder() -> Backbone:
    return train_backbone(Adder(4, 8, "first-exact"), 1000)


QUESTION = {
    "question": "A lemon is yellow. What color is a lemon?",
    "choices": {"label": ["A", "B", "C", "D"], "text": ["red", "yellow", "blue", "green"]},
    "answerKey": 1,
}


def _parquet(folder: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.Table.from_pylist([QUESTION] * 3), folder / "x.parquet")


@lru_cache(maxsize=1)
def _small() -> nn.Module:
    import transformers

    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2, "vocab_size": 20}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=1, head_dim=4)
    return transformers.LlamaForCausalLM(config).eval()


def _adapter(folder: Path) -> None:
    import peft

    config = peft.LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj"])
    base = {"name": "small", "weights": digest_weights(_small())}
    save_adapter(peft.get_peft_model(copy.deepcopy(_small()), config), folder, base, {"seed": 1})


def _model(folder: Path) -> None:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    _small().save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"w{k}": k for k in range(20)}, unk_token="w0"))  # noqa: S106
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0").save_pretrained(folder)  # noqa: S106


def _gguf(folder: Path) -> None:
    import gguf

    import decoders
    from test_loading import write_gguf

    write_gguf(gguf, decoders.network("llama"), folder / "x.gguf")


def _model_and_adapter(folder: Path) -> None:
    for name, make in (("model", _model), ("adapter", _adapter)):
        (folder / name).mkdir()
        make(folder / name)


def _merged(folder: Path) -> None:
    load_model(folder / "model", adapter=folder / "adapter")


def _converted(folder: Path) -> None:
    (folder / "config.json").write_text("{}")
    files = {"config.json": hash_file(folder / "config.json")}
    write_json(folder / MANIFEST, {"format": MODEL_FORMAT, "name": "x", "from": {"gguf": "00"}, "files": files})


def _text(name: str, text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text(text, encoding="utf-8")


def _table() -> str:
    file = io.StringIO()
    csv.writer(file).writerows(
        [["base_x", "base_y", "source_x", "source_y"], ["1", "2", "3", "4"], ["0", "1", "1", "0"]]
    )
    return file.getvalue()


ROW = {"base": {"x": 1, "y": "é"}, "source": {"x": 2, "y": "b"}, "family": "f", "split": "fit"}


@lru_cache(maxsize=1)
def _subject() -> DecoderSubject:
    def encode(rows: Tensor) -> tuple[Tensor, Tensor]:
        return rows % 20, torch.ones_like(rows)

    return DecoderSubject(_small(), encode, [[1], [2]])


def _rotation() -> Handle:
    place = _subject().places[0]
    basis = torch.linalg.qr(torch.randn(8, 2, generator=torch.Generator().manual_seed(1000)))[0]
    edit = Edit(place, Frame.orthonormal(basis, "das"), torch.ones(2))
    return Handle("z", (edit,), _subject().identity())


MIB = "ResidualStream(Layer-0,Token-last_token)"
PYVENE = "intkey_layer_0_comp_block_output_unit_pos_nunit_1#0.bin"


def _sae(folder: Path) -> None:
    shapes = {"W_enc": (8, 16), "W_dec": (16, 8), "b_enc": (16,), "b_dec": (8,)}
    (folder / "sae_weights.safetensors").write_bytes(save({n: torch.ones(s) for n, s in shapes.items()}))
    config = {"architecture": "standard", "d_in": 8, "d_sae": 16, "hook_name": "blocks.0.hook_resid_post"}
    (folder / "cfg.json").write_text(json.dumps(config))


def _params(folder: Path) -> None:
    shapes = {"W_enc": (8, 16), "W_dec": (16, 8), "b_enc": (16,), "b_dec": (8,), "threshold": (16,)}
    np.savez(folder / "params.npz", **{n: np.ones(s, dtype=np.float32) for n, s in shapes.items()})


LOADERS = [
    Loader("handle", "x.safetensors", _handle, lambda f: Handle.load(f / "x.safetensors"), examples=150),
    Loader("results", "results.json", _run, read_run, shows=True),
    Loader("couplings", "couplings.json", _run, read_run, shows=True),
    Loader("manifest", "manifest.json", _run, read_run, shows=True),
    Loader(
        *("manifest of a run to continue", "manifest.json", _run_with_config, _open_run),
        writes=(".lock", "manifest.json"),
    ),
    Loader("lock that is held", LOCK, lambda f: (f / LOCK).write_text('{"pid": 7, "since": "now"}'), _held, shows=True),
    Loader(
        *("unit", "units/seed-1/das.json", _run, _compile),
        writes=("results.json", "couplings.json"),
    ),
    Loader("unit that is read", "units/seed-1/das.json", _stale, read_run, shows=True),
    Loader("page of results", "results.json", _run, lambda f: page([f]), shows=True, examples=40),
    Loader("page of couplings", "couplings.json", _run, lambda f: page([f]), shows=True, examples=25),
    Loader("page of a manifest", "manifest.json", _run, lambda f: page([f]), shows=True, examples=20),
    Loader(
        "page of a handle",
        str(Path("handles/seed-1/plot-pca.AnswerToken.safetensors")),
        _run,
        lambda f: page([f]),
        shows=True,
        examples=20,
    ),
    Loader("adapter's record", ADAPTER_FILES[2], _adapter, read_record),
    Loader(
        "adapter's configuration",
        ADAPTER_FILES[0],
        _adapter,
        lambda f: load_adapter(copy.deepcopy(_small()), f),
        examples=40,
    ),
    Loader(
        "adapter's weights", ADAPTER_FILES[1], _adapter, lambda f: load_adapter(copy.deepcopy(_small()), f), examples=40
    ),
    Loader("converted model", MANIFEST, _converted, lambda f: check_directory(f, "00")),
    Loader("HEQ backbone", "heq-7.safetensors", _heq, lambda f: load_backbone(7, f), examples=80),
    Loader(
        "adder backbone",
        "x.safetensors",
        lambda f: save_backbone(_adder(), f / "x.safetensors"),
        lambda f: read_backbone(f / "x.safetensors", _adder().adder),
        examples=80,
    ),
    Loader(
        "questions as JSON",
        "x.json",
        _text("x.json", json.dumps([QUESTION] * 2)),
        lambda f: read_questions(f / "x.json"),
    ),
    Loader(
        "questions as JSON lines",
        "x.jsonl",
        _text("x.jsonl", (json.dumps(QUESTION) + "\n") * 2),
        lambda f: read_questions(f / "x.jsonl"),
    ),
    Loader("questions as parquet", "x.parquet", _parquet, lambda f: read_questions(f / "x.parquet")),
    Loader("model's configuration", "config.json", _model, load_model, examples=20),
    Loader("model's weights", "model.safetensors", _model, load_model, examples=20),
    Loader("model's tokenizer", "tokenizer.json", _model, load_model, examples=20),
    Loader("configuration to plan with", "config.json", _model, shape_by_name),
    Loader("model as GGUF", "x.gguf", _gguf, lambda f: load_model(f / "x.gguf"), examples=10),
    *(
        Loader(f"merged adapter's {what}", str(Path("adapter") / file), _model_and_adapter, _merged, examples=20)
        for what, file in (("configuration", ADAPTER_FILES[0]), ("weights", ADAPTER_FILES[1]))
    ),
    Loader(
        *("pairs as JSON lines", "x.jsonl", _text("x.jsonl", (json.dumps(ROW) + "\n") * 3)),
        lambda f: read_pairs(f / "x.jsonl"),
    ),
    Loader("pairs as a table", "x.csv", _text("x.csv", _table()), lambda f: read_pairs(f / "x.csv")),
    Loader("autoencoder's settings", "cfg.json", _sae, load_sae),
    Loader("autoencoder's weights", "sae_weights.safetensors", _sae, load_sae),
    Loader("autoencoder as .npz", "params.npz", _params, load_sae),
    *(
        Loader(name, file, lambda f: to_mib(_rotation(), f), lambda f: from_mib(f, _subject(), "z"), examples=30)
        for name, file in (("MIB's featurizer", f"{MIB}_featurizer"), ("MIB's indices", f"{MIB}_indices"))
    ),
    Loader(
        *("causalab's bundle", "x.safetensors"),
        lambda f: to_causalab(_rotation(), f / "x.safetensors", model_key="small"),
        lambda f: from_causalab(f / "x.safetensors", _subject(), "z"),
    ),
    *(
        Loader(
            *(name, file, lambda f: to_pyvene(_rotation(), _subject(), f)),
            lambda f: from_pyvene(f, _subject(), "z"),
            examples=30,
        )
        for name, file in (("pyvene's configuration", "config.json"), ("pyvene's tensors", PYVENE))
    ),
]
