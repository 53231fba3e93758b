"""Families by structure: every kind of place at every kind of position against the plain hooked model.

Swaps are made by hand: a clean run of the source prompt alone, and a run of the base prompt with the source's vector.
"""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from decoders import (
    ANSWERS,
    BASE,
    FAMILIES,
    NAMED,
    POSITIONS,
    SOURCE,
    UNNAMED,
    VOCABULARY,
    WIDTH,
    as_answers,
    encode,
    network,
    plain,
    relative,
    transformers,
    where,
)
from plot_ot.edits import EditBatch, Frame, respond
from plot_ot.errors import PlotError
from plot_ot.handles import Edit, Handle
from plot_ot.models.loading import load_model
from plot_ot.subjects import DecoderSubject, ModuleSubject, record_pairs
from refusals import assert_refused

KINDS = ("head_output", "attention_output", "mlp_output", "block_output")
LONG = torch.tensor([[1], [3]])
"""Two prompts of one length."""


def swapped(model: nn.Module, name: str, base: Tensor, source: Tensor) -> Tensor:
    """The vocabulary's logits after the base prompt with the source prompt's vector at the place."""
    kept: list[Tensor] = []
    plain(model, source, {name: lambda a: kept.append(a) or a}, where(source))
    return plain(model, base, {name: lambda _: kept[0]}, where(base))


@pytest.mark.parametrize("family", [*FAMILIES, *NAMED, *UNNAMED])
@torch.no_grad()
def test_every_kind_of_place_and_position_gives_the_hooked_models_swap(family: str) -> None:
    model = network(family)
    kinds = [kind for kind in KINDS if (family, kind) != ("opt", "mlp_output")]  # its MLP does not see tokens apart
    mixed = DecoderSubject(model, encode, ANSWERS, kinds=kinds, positions=POSITIONS, layers=(0, 2))
    equal = DecoderSubject(model, encode, ANSWERS, kinds=kinds, tokens=12, layers=(0, 2))
    for subject, pairs in ((mixed, (BASE[:3], SOURCE[:3])), (equal, (LONG, LONG.flip(0)))):
        recording, itself = record_pairs(subject, pairs, (pairs[0], pairs[0]))
        for place in subject.places:
            path, _, position = place.name.partition("@")
            if position == "third" or path.startswith(("head_output.0", "head_output.2.1", "head_output.2.2")):
                continue
            if subject is equal and position != "all":
                continue
            patch = [EditBatch(place, Frame.identity(place.width), torch.ones(1, place.width))]
            found = respond(recording, patch)[0]
            expected = [swapped(model, place.name, b, s) for b, s in zip(*pairs, strict=True)]
            assert relative(found, as_answers(torch.stack(expected))) < 1e-4, place.name
            assert relative(respond(itself, patch)[0], itself.base_outputs) < 1e-4, place.name
            assert relative(found, recording.base_outputs) > 1e-4, place.name


# -- all positions ----------------------------------------------------------------------------------------------


def test_a_frame_of_one_token_acts_at_every_token() -> None:
    model = network("llama")
    subject = DecoderSubject(model, encode, ANSWERS, tokens=12, layers=(1,))
    place = subject.place("block_output.1@all")
    assert (place.width, place.position) == (12 * WIDTH, None)
    rotation = torch.linalg.qr(torch.randn(WIDTH, 3, generator=torch.Generator().manual_seed(1000)))[0]
    gains = torch.tensor([1.0, 0.5, 0.0])
    oblique = Frame.oblique(rotation, rotation.roll(1, dims=1))
    for frame, g in (
        (Frame.orthonormal(rotation), gains),
        (Frame.identity(WIDTH), torch.linspace(0, 1, WIDTH)),
        (oblique, gains),
    ):
        handle = Handle("z", (Edit.at_every_token(place, frame, g),), subject.identity())
        found = handle.apply(subject, LONG, LONG.flip(0))
        read = torch.eye(WIDTH) if frame.read is None else frame.read
        write = read if frame.write is None else frame.write
        for t, (b, s) in enumerate(zip(LONG, LONG.flip(0), strict=True)):
            kept: list[Tensor] = []

            def edit(
                a: Tensor, kept: list[Tensor] = kept, r: Tensor = read, w: Tensor = write, g: Tensor = g
            ) -> Tensor:
                source, a = kept[0].view(12, WIDTH), a.view(12, WIDTH)
                return (a + (g * ((source - a) @ r)) @ w.T).flatten()

            with torch.no_grad():
                plain(model, s, {place.name: lambda a, kept=kept: kept.append(a) or a})
                expected = as_answers(plain(model, b, {place.name: edit}))
            assert relative(found[t], expected) < 1e-5
    assert_refused(
        lambda: Edit.at_every_token(place, Frame.identity(7), torch.ones(7)), ["width 7", "block_output.1@all"]
    )


def test_all_tokens_of_prompts_of_other_lengths_are_refused_with_their_lengths() -> None:
    subject = DecoderSubject(network("llama"), encode, ANSWERS, tokens=12)
    assert_refused(
        lambda: record_pairs(subject, (LONG, BASE[[0, 4]])), ["@all", "12 tokens", "3, 9 tokens", "2 of 4", "named"]
    )
    for tokens, positions in ((0, {}), (12, {"all": lambda rows: -1})):
        with pytest.raises(PlotError, match="number of tokens of every prompt"):
            DecoderSubject(network("llama"), encode, ANSWERS, tokens=tokens, positions=positions)


def test_a_kind_of_place_that_a_family_does_not_have_is_refused() -> None:
    assert_refused(
        lambda: DecoderSubject(network("opt"), encode, ANSWERS, kinds=("mlp_output",)), ["Block 0", "'mlp_output'"]
    )


# -- what cannot be resumed -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: transformers.FalconConfig(alibi=True, **SIZES), ["FalconForCausalLM"]),
        (lambda: transformers.FalconConfig(alibi=False, **SIZES), ["FalconForCausalLM", "attention interface"]),
        (lambda: transformers.GPTNeoConfig(**NEO), ["GPTNeoForCausalLM", "attention interface"]),
        (lambda: transformers.MptConfig(vocab_size=VOCABULARY, d_model=16, n_layers=2, n_heads=2), ["position_ids"]),
        (lambda: transformers.DeepseekV3Config(**LATENT), ["DeepseekV3ForCausalLM", "cannot be resumed"]),
        (
            lambda: transformers.MambaConfig(vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=2),
            ["position_ids"],
        ),
    ],
    ids=["falcon-alibi", "falcon", "gpt_neo", "mpt", "deepseek_v3", "mamba"],
)
def test_a_model_that_cannot_be_resumed_is_refused_before_any_prompt_runs(make: object, words: list[str]) -> None:
    model = transformers.AutoModelForCausalLM.from_config(make()).eval()

    def never(_: Tensor) -> tuple[Tensor, Tensor]:
        raise AssertionError("a prompt was encoded")

    assert_refused(lambda: DecoderSubject(model, never, ANSWERS), [*words, "ModuleSubject"])


@torch.no_grad()
def test_a_model_that_cannot_be_resumed_runs_whole_through_hooks() -> None:
    torch.manual_seed(1000)
    config = transformers.GPTJConfig(
        vocab_size=VOCABULARY, n_embd=16, n_layer=2, n_head=2, n_positions=32, rotary_dim=4
    )
    model = transformers.GPTJForCausalLM(config).eval()
    base, source = torch.randint(VOCABULARY, (2, 4, 7)).unbind()
    subject = ModuleSubject(
        model, ["transformer.h.0"], base, position=-1, encode=lambda rows: rows, output=lambda out: out.logits[:, -1]
    )
    [recording] = record_pairs(subject, (base, source))
    found = respond(recording, [EditBatch(subject.places[0], Frame.identity(16), torch.ones(1, 16))])[0]
    kept: list[Tensor] = []
    block = model.transformer.h[0]
    hook = block.register_forward_hook(lambda _, __, out: kept.append(out[0][:, -1].clone()))
    model(source)
    hook.remove()

    def patch(_: object, __: object, out: tuple[Tensor, ...]) -> None:
        out[0][:, -1].copy_(kept[0])

    hook = block.register_forward_hook(patch)
    expected = model(base).logits[:, -1]
    hook.remove()
    assert relative(found, expected) < 1e-5
    assert relative(found, recording.base_outputs) > 1e-3


SIZES = {"vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
LATENT = {
    **SIZES,
    "intermediate_size": 16,
    "num_key_value_heads": 2,
    "n_routed_experts": 2,
    "num_experts_per_tok": 1,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 8,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
    "initializer_range": 0.3,
}
NEO = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "num_layers": 2,
    "num_heads": 2,
    "attention_types": [[["global", "local"], 1]],
    "max_position_embeddings": 32,
}


# -- where weights and attention live ---------------------------------------------------------------------------

OFFLOADED = {
    "llama": {"model.embed_tokens": "disk", "model.rotary_emb": "cpu", "model.norm": "disk", "lm_head": "disk"},
    "gpt2": {"transformer.wte": "cpu", "transformer.wpe": "cpu", "transformer.ln_f": "disk", "lm_head": "cpu"},
}


@pytest.mark.parametrize("family", OFFLOADED)
def test_weights_offloaded_to_disk_give_the_same_responses_and_identity(family: str, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    model = network(family)
    model.save_pretrained(tmp_path)
    blocks = "model.layers" if family == "llama" else "transformer.h"
    where_to = {**OFFLOADED[family], **{f"{blocks}.{k}": "disk" if k else "cpu" for k in range(4)}}
    offloaded, _ = load_model(tmp_path, device_map=where_to, tokenizer=SimpleNamespace(pad_token=0))
    assert sum(p.device.type == "meta" for p in offloaded.parameters()) > 20
    options = {"kinds": ("head_output", "block_output"), "rest": True, "positions": POSITIONS}
    there, here = (DecoderSubject(m, encode, ANSWERS, **options) for m in (offloaded, model))
    assert there.identity() == here.identity()
    [ours, theirs] = (record_pairs(s, (BASE, SOURCE))[0] for s in (there, here))
    assert relative(ours.store.outputs, theirs.store.outputs) < 1e-5
    for name in ("head_output.1.2", "block_output.0@early", "block_output.3"):
        patch = [EditBatch(there.place(name), Frame.identity(w := there.place(name).width), torch.ones(1, w))]
        assert relative(respond(ours, patch), respond(theirs, patch)) < 1e-5
    place = there.place("block_output.2")
    vector = ours.base_at(place)[None].clone().requires_grad_()  # DAS trains through offloaded blocks
    there.resume(ours.store, ours.base_rows, place, vector, {}).sum().backward()
    assert float(vector.grad.abs().max()) > 0


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_attention_that_takes_no_masks_is_replaced_while_recording_and_resuming(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As flash attention: no mask per query, only which tokens are real."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, flash_attention_mask
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    calls: list[int] = []

    def flash(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: object
    ) -> tuple[Tensor, None]:
        if attention_mask is not None:
            raise ValueError("flash attention takes no mask")
        calls.append(query.shape[2])
        n, groups = query.shape[2], query.shape[1] // key.shape[1]
        near = torch.ones(n, n, dtype=torch.bool).tril().triu(1 - (options.get("sliding_window") or n))
        key, value = (t.repeat_interleave(groups, dim=1) for t in (key, value))
        scores = (query @ key.mT * options["scaling"]).masked_fill(~near, -torch.inf)
        return (scores.softmax(dim=-1) @ value).transpose(1, 2), None

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "fake_flash", flash)
    monkeypatch.setitem(ALL_MASK_ATTENTION_FUNCTIONS._global_mapping, "fake_flash", flash_attention_mask)
    model, usual = network(family), network(family)
    model.config._attn_implementation = "fake_flash"
    found, expected = (
        record_pairs(DecoderSubject(m, encode, ANSWERS, positions=POSITIONS), (BASE, SOURCE))[0] for m in (model, usual)
    )
    assert calls  # by the probe
    assert relative(found.store.outputs, expected.store.outputs) < 1e-5
    for name in ("block_output.1", "block_output.1@early"):
        place = found.subject.place(name)
        patch = [EditBatch(place, Frame.identity(WIDTH), torch.ones(1, WIDTH))]
        assert relative(respond(found, patch), respond(expected, patch)) < 1e-5
    assert model.config._attn_implementation == "fake_flash"
