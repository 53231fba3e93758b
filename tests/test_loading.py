"""Language models by path: what comes back, and what is refused before time is spent."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from decoders import ANSWERS, BASE, VOCABULARY, encode, network, recorded, relative, transformers, variants
from plot_ot.models.loading import load_model
from plot_ot.subjects import DecoderSubject
from refusals import assert_refused

WORDS = {"[PAD]": 0, "[EOS]": 1, **{f"w{k}": k for k in range(2, VOCABULARY)}}


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers

    made = Tokenizer(models.WordLevel(WORDS, unk_token="[PAD]"))  # noqa: S106
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, eos_token="[EOS]")  # noqa: S106


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    network("gemma2").bfloat16().save_pretrained(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def logits(model: nn.Module) -> torch.Tensor:
    ids, mask = encode(BASE)
    with torch.no_grad():
        return model(input_ids=ids, attention_mask=mask).logits[:, -1].float()


def test_a_directory_is_loaded_frozen_in_float32_and_padded_on_the_left(saved: Path) -> None:
    model, words = load_model(saved, device="cpu")
    expected = network("gemma2")
    with torch.no_grad():
        for p in expected.parameters():
            p.copy_(p.bfloat16())
    assert relative(logits(model), logits(expected)) < 1e-6
    assert not model.training
    assert not any(p.requires_grad for p in model.parameters())
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    batch = words(["w5 w6 w7", "w8"], padding=True, return_tensors="pt")
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [0, 0, 1]]
    assert batch["input_ids"][1].tolist() == [1, 1, 8]
    assert DecoderSubject(model, encode, ANSWERS).record(BASE).outputs.shape == (6, 3)


def test_users_say_how_it_is_loaded(saved: Path) -> None:
    assert load_model(str(saved), dtype=torch.float16, device="cpu")[0].dtype == torch.float16
    mapped, _ = load_model(saved, device_map={"": "cpu"}, attn_implementation="eager", dtype="float32")
    assert mapped.config._attn_implementation == "eager"
    assert mapped.dtype == torch.float32
    recording = recorded(mapped)
    place = recording.subject.places[1]
    found = recording.subject.resume(recording.store, recording.base_rows, place, variants(recording, place), {})
    assert relative(found[0], recording.base_outputs) < 1e-6


def test_a_live_model_comes_back_with_the_tokenizer_given() -> None:
    model, words = network("llama").train(), tokenizer()
    found = load_model(model, tokenizer=words)
    assert found == (model, words)
    assert not model.training
    assert load_model(model)[1] is None


def test_an_adapter_is_merged_or_may_stay_a_wrapper(saved: Path, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    base, _ = load_model(saved, device="cpu")
    plain = logits(base)
    torch.manual_seed(1000)
    wrapped = peft.get_peft_model(
        base, peft.LoraConfig(r=2, target_modules=["q_proj", "o_proj"], init_lora_weights=False)
    )
    wrapped.eval().save_pretrained(tmp_path / "adapter")
    adapted = logits(wrapped)
    assert relative(adapted, plain) > 1e-2
    merged, _ = load_model(saved, device="cpu", adapter=tmp_path / "adapter")
    assert relative(logits(merged), adapted) < 1e-5
    outputs = [recorded(m, kinds=("head_output", "block_output"), layers=(1,)) for m in (wrapped, merged)]
    for place in outputs[0].subject.places:
        activation = variants(outputs[0], place)
        responses = [r.subject.resume(r.store, r.base_rows, place, activation, {}) for r in outputs]
        assert relative(*responses) < 1e-4
    assert outputs[0].subject.identity() != outputs[1].subject.identity()
    assert_refused(lambda: load_model(saved, adapter=saved), ["adapter_config.json"])


def test_weights_that_are_missing_are_not_made_up(saved: Path) -> None:
    weights = load_file(saved / "model.safetensors")
    del weights["model.layers.1.self_attn.q_proj.weight"]
    save_file(weights, saved / "model.safetensors", metadata={"format": "pt"})
    assert_refused(lambda: load_model(saved), ["lack model.layers.1.self_attn.q_proj.weight"])


def test_a_gguf_file_is_loaded(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    model = network("llama")
    file = write_gguf(gguf, model, tmp_path / "tiny.gguf")
    loaded, _ = load_model(file, device="cpu")
    assert relative(logits(loaded), logits(model)) < 1e-5
    inside, _ = load_model(tmp_path, gguf_file="tiny.gguf", device="cpu")
    assert torch.equal(logits(inside), logits(loaded))


def write_gguf(gguf: Any, model: nn.Module, path: Path) -> Path:
    """A Llama as llama.cpp's converter writes it: rotary halves of queries and keys interleaved."""
    c = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(c.max_position_embeddings)
    writer.add_embedding_length(c.hidden_size)
    writer.add_block_count(c.num_hidden_layers)
    writer.add_feed_forward_length(c.intermediate_size)
    writer.add_head_count(c.num_attention_heads)
    writer.add_head_count_kv(c.num_key_value_heads)
    writer.add_layer_norm_rms_eps(c.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(c.vocab_size)
    writer.add_tokenizer_model("gpt2")
    letters = [chr(ord("A") + k) for k in range(26)]
    writer.add_token_list(["<s>", "</s>", *letters, "AB", "CD", *(f"_{k}" for k in range(31))])
    writer.add_token_merges(["A B", "C D"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    names = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    parts = {
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
    for k in range(c.num_hidden_layers):
        names |= {f"model.layers.{k}.{here}": f"blk.{k}.{there}" for here, there in parts.items()}
    for name, weight in model.named_parameters():
        w, short = weight.detach(), names[name.removesuffix(".weight")]
        if short.endswith(("attn_q", "attn_k")):
            heads = c.num_attention_heads if short.endswith("q") else c.num_key_value_heads
            w = w.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)
        writer.add_tensor(f"{short}.weight", w.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


# -- refusals ------------------------------------------------------------------------------------------------------


def test_missing_and_damaged_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "text.gguf").write_bytes(b"hello")
    (tmp_path / "cut.gguf").write_bytes(b"GGUF\x03\x00\x00\x00")
    (tmp_path / "notes.txt").write_text("x")
    for path, words in (
        (tmp_path / "none", ["no model at", "none"]),
        ("./none", ["no model at"]),
        (tmp_path / "none.gguf", ["no model at", "none.gguf"]),
        (tmp_path, ["config.json", "notes.txt"]),
        (tmp_path / "notes.txt", ["is a file", ".gguf"]),
        (tmp_path / "text.gguf", ["no GGUF file", "hell"]),
        (tmp_path / "cut.gguf", ["cannot be read"]),
    ):
        assert_refused(lambda p=path: load_model(p), words)
    assert_refused(lambda: load_model(tmp_path, gguf_file="other.gguf"), ["no GGUF file", "other.gguf"])


def test_other_kinds_of_models_are_refused_by_their_configuration(tmp_path: Path) -> None:
    small = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    bert = transformers.BertForMaskedLM(transformers.BertConfig(**small, intermediate_size=16))
    t5 = transformers.T5Config(vocab_size=50, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    vit = transformers.ViTConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
    bert.save_pretrained(tmp_path / "bert")
    t5.save_pretrained(tmp_path / "t5")
    vit.save_pretrained(tmp_path / "vit")
    for name, word in (("bert", "BertForMaskedLM"), ("t5", "encoder-decoder"), ("vit", "vit model")):
        assert_refused(lambda n=name: load_model(tmp_path / n), [word, "not a causal language model"])


def test_a_directory_without_weights_or_tokenizer_says_so(saved: Path) -> None:
    (saved / "model.safetensors").unlink()
    assert_refused(lambda: load_model(saved), ["weights", str(saved), "cannot be read"])
    for file in saved.glob("*token*"):
        file.unlink()
    assert_refused(lambda: load_model(saved), ["tokenizer", str(saved), "cannot be read"])


def test_a_hub_model_without_network_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*_: object, **__: object) -> None:
        raise OSError("Name or service not known")

    monkeypatch.setattr("socket.create_connection", unreachable)
    monkeypatch.setattr("plot_ot.models.loading.getproxies", dict)
    assert_refused(
        lambda: load_model("nobody/no-such-model"), ["nobody/no-such-model", "huggingface.co", "local copy", "network"]
    )


def test_without_transformers_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert_refused(lambda: load_model("gpt2"), ["plot-ot[hf]"])
    assert_refused(lambda: DecoderSubject(nn.Linear(2, 2), encode, ANSWERS), ["plot-ot[hf]"])
