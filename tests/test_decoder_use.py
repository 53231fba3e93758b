"""Decoder language models in use: memory, read-outs, the live model, and what is refused."""

import gc
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import plot_ot
from decoders import (
    ANSWERS,
    BASE,
    FAMILIES,
    POSITIONS,
    PROMPTS,
    SOURCE,
    VOCABULARY,
    WIDTH,
    as_answers,
    encode,
    network,
    plain,
    recorded,
    relative,
    transformers,
    variants,
    whole_forwards,
)
from plot_ot.edits import EditBatch, Frame, respond, resume_edited
from plot_ot.handles import Edit, Handle
from plot_ot.methods import Method
from plot_ot.planner import machine_by_name
from plot_ot.stages.closed_form import ClosedForm
from plot_ot.subjects import DecoderSubject, Store, record_pairs
from plot_ot.subjects.decoder import architecture, cache, sizes
from plot_ot.subjects.decoder import subject as decoder
from plot_ot.subjects.decoder.recording import Recorder
from plot_ot.tasks import MultipleChoice, mcqa_data
from refusals import assert_refused

# -- noise, numbers, memory ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_a_swap_with_itself_is_noise_only(family: str) -> None:
    subject = DecoderSubject(network(family), encode, ANSWERS)
    [recording] = record_pairs(subject, (BASE, BASE))
    for place in subject.places:
        edit = EditBatch(place, Frame.identity(WIDTH), torch.ones(1, WIDTH))
        assert relative(respond(recording, [edit])[0], recording.base_outputs) < 1e-5


@pytest.mark.filterwarnings("ignore:TF32 acceleration")
def test_bfloat16_differs_from_the_hooked_forward_less_than_from_float32() -> None:
    exact = network("llama")
    rough = network("llama").bfloat16()
    # this machine's oneDNN stops with an illegal instruction on some bfloat16 products
    with torch.backends.mkldnn.flags(enabled=False), torch.no_grad():
        fine, coarse = recorded(exact), recorded(rough)
        assert coarse.store.outputs.dtype == torch.float32
        assert next(iter(coarse.store.activations.values())).dtype == torch.float32
        for place in coarse.subject.places:
            activation = variants(coarse, place)
            found = coarse.subject.resume(coarse.store, coarse.base_rows, place, activation, {})
            expected = as_answers(whole_forwards(rough, place, activation))
            in_float32 = fine.subject.resume(fine.store, fine.base_rows, place, activation, {})
            gap = (expected - in_float32).abs().mean()
            assert float((found - expected).abs().mean()) < float(gap)
            assert float(gap) > 1e-4


def test_keys_and_values_beyond_the_budget_go_to_a_file_that_is_removed(tmp_path: Path) -> None:
    model = network("gemma3")
    with_file, tempfile.tempdir = tempfile.tempdir, str(tmp_path)
    try:
        inside, outside = recorded(model), recorded(model, memory=1000)
    finally:
        tempfile.tempdir = with_file
    assert not inside.store.caches[0].spilled
    assert outside.store.caches[0].spilled
    assert inside.store.cache_bytes == inside.subject.cache_bytes(rows=5, tokens=12)
    [folder] = tmp_path.iterdir()
    assert sum(f.stat().st_size for f in folder.iterdir()) == inside.store.cache_bytes
    for place in inside.subject.places:
        activation = variants(inside, place)
        responses = [r.subject.resume(r.store, r.base_rows, place, activation, {}) for r in (inside, outside)]
        assert relative(*responses) < 1e-6
    del outside, responses
    gc.collect()
    assert not list(tmp_path.iterdir())


def test_running_out_of_memory_halves_the_work_and_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    recording = recorded(network("llama"))
    place = recording.subject.places[1]
    edit = EditBatch(place, Frame.identity(place.width), torch.rand(3, place.width))
    expected, sizes = resume_edited(recording, [edit]), []
    whole = decoder.resumed_pass

    def with_little_memory(*given: object) -> torch.Tensor:
        sizes.append(given[3].shape[0] * given[3].shape[1])
        if sizes[-1] > 3:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory.")
        return whole(*given)

    monkeypatch.setattr(decoder, "resumed_pass", with_little_memory)
    assert relative(resume_edited(recording, [edit]), expected) < 1e-5
    assert sizes[0] == 18
    assert sizes[-1] <= 3


@pytest.mark.parametrize("at_once", [1, 2, 7])
def test_responses_do_not_depend_on_how_work_is_cut(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    recording = recorded(network("mistral"), positions=POSITIONS, rest=True)
    for name in ("block_output.1", "block_output.1@early"):
        place = recording.subject.place(name)
        arguments = (recording.store, recording.base_rows, place, variants(recording, place), {})
        whole = recording.subject.resume(*arguments)
        with monkeypatch.context() as patch:
            patch.setitem(sizes.RESUMED_AT_ONCE, "cpu", at_once)
            patch.setattr(architecture, "VOCABULARY_AT_ONCE", 10)
            assert relative(recording.subject.resume(*arguments), whole) < 1e-5
    with monkeypatch.context() as patch:
        patch.setitem(sizes.RECORDED_AT_ONCE, "cpu", at_once)
        again = recorded(network("mistral"))
    assert relative(again.store.outputs, recording.subject.watching().outputs_of(recording.store)) < 1e-5


def test_only_bases_keep_keys_and_values() -> None:
    recording = recorded(network("llama"))
    store, subject = recording.store, recording.subject
    assert len(store.inputs) == 6
    assert len(store.caches[0]) == 5  # prompt 5 is a source only
    row = recording.source_rows[:1]
    place = subject.places[0]
    assert_refused(
        lambda: subject.resume(store, row, place, recording.base_at(place)[None, :1], {}),
        ["1 of 1", "sources only", "Record them as bases"],
    )


@pytest.mark.parametrize("positions", [None, POSITIONS], ids=["last token", "tokens"])
def test_what_is_remembered_is_not_run_again(positions: dict | None, monkeypatch: pytest.MonkeyPatch) -> None:
    model = network("gemma3")
    plainly = recorded(model, positions=positions)
    subject = DecoderSubject(model, encode, ANSWERS, positions=positions)
    rows_run: list[int] = []
    read = Recorder._read
    monkeypatch.setattr(Recorder, "_read", lambda *given: rows_run.append(len(given[1])) or read(*given))
    subject.record(torch.tensor([[4], [1], [0]]), remember=True)
    subject.record(torch.tensor([[5], [1]]), remember=True)
    subject.record(torch.tensor([[3]]), torch.zeros(0, dtype=torch.long), remember=True)
    assert sum(rows_run) == 3 + 1 + 1
    [recording] = record_pairs(subject, (BASE, SOURCE))
    assert sum(rows_run) == 5 + 2  # prompt 2 is new, and prompt 3 was remembered without its keys
    for name, activation in plainly.store.activations.items():
        assert relative(recording.store.activations[name], activation) < 1e-5
        place = subject.place(name)
        arguments = (recording.base_rows, place, variants(plainly, place), {})
        again = subject.resume(recording.store, *arguments)
        assert relative(again, plainly.subject.resume(plainly.store, *arguments)) < 1e-5
    assert relative(recording.base_outputs, plainly.base_outputs) < 1e-5
    assert torch.equal(recording.store.top_token, plainly.store.top_token)
    assert torch.equal(recording.store.lengths, plainly.store.lengths)
    record_pairs(subject, (BASE, SOURCE))
    assert sum(rows_run) == 7 + 6  # forgotten once used


def test_what_was_remembered_of_other_weights_is_forgotten() -> None:
    model = network("llama")
    subject = DecoderSubject(model, encode, ANSWERS)
    subject.record(BASE, remember=True)
    with torch.no_grad():
        model.lm_head.weight.mul_(2)
    assert relative(subject.record(BASE).outputs, recorded(model).base_outputs) < 1e-5


# -- reading out ---------------------------------------------------------------------------------------------------


def test_other_readouts_understand_the_same_store() -> None:
    model = network("gemma2")
    recording = recorded(model)
    with torch.no_grad():
        logits = torch.stack([plain(model, row, {}) for row in BASE])
    for subject, expected in (
        (recording.subject, as_answers(logits)),
        (recording.subject.watching(rest=True), as_answers(logits, rest=True)),
        (recording.subject.watching(vocabulary=True), logits),
    ):
        seen = replace(recording, subject=subject)
        assert relative(seen.base_outputs, expected) < 1e-5
        edit = EditBatch(subject.places[1], Frame.identity(WIDTH), torch.zeros(1, WIDTH))
        assert relative(respond(seen, [edit])[0], expected) < 1e-5
    rest = recording.subject.watching(rest=True).outputs_of(recording.store)
    tokens = {t: j for j, group in enumerate(ANSWERS) for t in group}
    told = [tokens.get(int(t), len(ANSWERS)) for t in recording.store.top_token]
    assert rest.argmax(dim=1).tolist() == told
    assert_refused(lambda: recording.subject.watching(rest=True, vocabulary=True), ["not both"])


@pytest.mark.parametrize("padding", ["left", "right", "none"])
@pytest.mark.parametrize("name", ["block_output.1", "attention_output.0", "head_output.2.3"])
def test_the_live_model_is_edited_at_its_last_real_token(padding: str, name: str) -> None:
    model = network("llama")
    subject = DecoderSubject(model, encode, ANSWERS, kinds=("head_output", "attention_output", "block_output"))
    rows = BASE[:3] if padding != "none" else BASE[[1, 3]]
    chosen = [PROMPTS[int(r)] for r in rows]
    longest = max(map(len, chosen))
    fill = [[0] * (longest - len(p)) for p in chosen]
    left = padding == "left"
    ids = torch.tensor([f + p if left else p + f for f, p in zip(fill, chosen, strict=True)])
    mask = torch.tensor(
        [
            [0] * len(f) + [1] * len(p) if left else [1] * len(p) + [0] * len(f)
            for f, p in zip(fill, chosen, strict=True)
        ]
    )
    new = torch.randn(len(rows), subject.place(name).width, generator=torch.Generator().manual_seed(1003))
    inputs = {"input_ids": ids} if padding == "none" else {"input_ids": ids, "attention_mask": mask}
    last = [len(p) - 1 if padding == "right" else -1 for p in chosen]
    with torch.no_grad():
        clean = model(**inputs).logits
        with subject.intervene({name: lambda _: new}):
            logits = model(**inputs).logits
        for t, row in enumerate(rows):
            assert relative(logits[t, last[t]], plain(model, row, {name: lambda _, t=t: new[t]})) < 1e-5
        assert torch.equal(model(**inputs).logits, clean)


def test_a_handle_does_the_same_on_the_live_model_as_on_the_recording() -> None:
    model = network("gpt2")
    recording = recorded(model)
    place = recording.subject.places[1]
    edit = Edit(place, Frame.identity(WIDTH), torch.linspace(0, 1, WIDTH))
    handle = Handle("x", (edit,), recording.subject.identity())
    ids, mask = encode(BASE)
    with torch.no_grad(), handle.on(recording.subject, SOURCE):
        live = model(input_ids=ids, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0)).logits[:, -1]
    assert relative(handle.apply(recording.subject, BASE, SOURCE), as_answers(live)) < 1e-5


def test_the_identity_is_that_of_the_weights_and_follows_them() -> None:
    subject = DecoderSubject(network("llama-tied"), encode, ANSWERS)
    twin = DecoderSubject(network("llama-tied"), encode, ((1,), (2,)), layers=(0,))
    assert subject.identity() == twin.identity()
    assert subject.identity() != DecoderSubject(network("llama-tied", 1001), encode, ANSWERS).identity()
    assert "lm_head.weight" not in subject.weights()
    first = subject.identity()
    with torch.no_grad():
        subject.decoder.blocks[0].mlp.up_proj.weight[0, 0] += 1e-3
    assert subject.identity() != first


# -- refusals ------------------------------------------------------------------------------------------------------


def test_models_of_another_shape_are_refused() -> None:
    small = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    bert = transformers.BertForMaskedLM(transformers.BertConfig(**small, intermediate_size=16))
    t5 = transformers.T5ForConditionalGeneration(
        transformers.T5Config(vocab_size=50, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    )
    bloom = transformers.BloomForCausalLM(transformers.BloomConfig(vocab_size=50, hidden_size=16, n_layer=2, n_head=2))
    backwards = transformers.Gemma3ForCausalLM(
        transformers.Gemma3TextConfig(
            **small, intermediate_size=16, num_key_value_heads=1, head_dim=8, use_bidirectional_attention=True
        )
    )
    for model, words in (
        (nn.Linear(3, 3), ["no Hugging Face model"]),
        (t5, ["an encoder and a decoder"]),
        (bert, ["BertForMaskedLM"]),
        (network("llama").model, ["no unembedding"]),
        (bloom, ["position_ids"]),
        (backwards, ["earlier tokens see later ones"]),
    ):
        assert_refused(lambda m=model: DecoderSubject(m, encode, ANSWERS), [*words, "usual decoder shape"])


def test_attention_that_leaves_the_cap_out_is_refused() -> None:
    model = network("gemma2")
    model.config._attn_implementation = "sdpa"
    assert_refused(lambda: DecoderSubject(model, encode, ANSWERS), ["Gemma2ForCausalLM", "caps", "'eager'"])


def test_a_model_whose_attention_cannot_be_resumed_is_refused_while_recording() -> None:
    gptj = transformers.GPTJForCausalLM(
        transformers.GPTJConfig(vocab_size=VOCABULARY, n_embd=16, n_layer=2, n_head=2, n_positions=32, rotary_dim=4)
    ).eval()
    assert_refused(
        lambda: DecoderSubject(gptj, encode, ANSWERS).record(BASE), ["GPTJForCausalLM", "attention", "ModuleSubject"]
    )


def test_a_wrong_pass_is_noticed_while_recording(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a model does that resuming does not reproduce: here, attention to the first token only."""

    class First(cache.Prefix):
        def __init__(self, keys, values, hidden, *rest):
            super().__init__(keys[:, :, :1], values[:, :, :1], None, *rest)

    monkeypatch.setattr(cache, "Prefix", First)
    assert_refused(
        lambda: DecoderSubject(network("llama"), encode, ANSWERS).record(BASE), ["cannot be resumed", "whole forward"]
    )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"answers": ((5,), (5, 6))}, ["Answers 0 and 1", "token 5"]),
        ({"answers": ((5,), ())}, ["at least one token"]),
        ({"answers": ()}, ["at least one token"]),
        ({"answers": ((5,), (61,))}, ["0..60", "61"]),
        ({"layers": (4,)}, ["0..3", "[4]"]),
        ({"layers": ()}, ["0..3"]),
        ({"kinds": ("block_outputs",)}, ["'block_outputs'", "block_output"]),
        ({"memory": 0}, ["bytes, above zero", "found 0"]),
    ],
)
def test_wrong_arguments_are_refused(options: dict, words: list[str]) -> None:
    arguments = {"answers": ANSWERS, **options}
    assert_refused(lambda: DecoderSubject(network("llama"), encode, **arguments), words)


@pytest.mark.parametrize(
    ("ids", "mask", "words"),
    [
        ([[3, 4, 0]], [[1, 1, 0]], ["left"]),
        ([[0, 4, 5]], [[1, 0, 1]], ["left"]),
        ([[3, 4]], [[1]], ["(1, 2)", "(1, 1)"]),
        ([[3, 4], [3, 4]], [[1, 1], [1, 1]], ["for 1 rows", "(2, 2)"]),
        ([[3, 61]], [[1, 1]], ["0..60", "61"]),
    ],
)
def test_wrong_encodings_are_refused(ids: list, mask: list, words: list[str]) -> None:
    subject = DecoderSubject(network("llama"), lambda _: (torch.tensor(ids), torch.tensor(mask)), ANSWERS)
    assert_refused(lambda: subject.record(torch.tensor([[0]])), words)


def test_a_position_outside_a_prompt_is_refused_with_its_row() -> None:
    subject = DecoderSubject(network("llama"), encode, ANSWERS, positions={"noun": lambda rows: -5})
    assert_refused(lambda: subject.record(torch.tensor([[0], [4]])), ["'noun'", "row 1", "-5", "3 tokens", "-3 to -1"])
    subject = DecoderSubject(network("llama"), encode, ANSWERS, positions={"noun": lambda rows: 0})
    assert_refused(lambda: subject.record(torch.tensor([[0]])), ["'noun'", "is 0", "-9 to -1"])


def test_stores_of_other_subjects_and_unknown_places_are_refused() -> None:
    recording = recorded(network("llama"), positions={"second": lambda rows: -2})
    other = Store(BASE, {}, torch.zeros(6, 3))
    place = recording.subject.places[0]
    vector = torch.zeros(1, 6, WIDTH)
    assert_refused(
        lambda: recording.subject.resume(other, recording.base_rows, place, vector, {}), ["another kind of subject"]
    )
    assert_refused(lambda: recording.subject.place("block_output.9"), ["block_output.9", "block_output.3"])

    def open_named() -> None:
        with recording.subject.intervene({"block_output.1@second": lambda a: a}):
            pass

    assert_refused(open_named, ["block_output.1@second", "last token"])


def test_a_model_that_is_already_a_subject_runs_its_prompts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """To see how they are answered is to record them; a plan counts it so."""
    subject, causal = MultipleChoice(model="planted-1000").subject, mcqa_data.causal_model()
    rows = mcqa_data.draw_rows(60, torch.Generator().manual_seed(7), letters=range(len(mcqa_data.ANSWERS)))
    rows_run: list[int] = []
    read = Recorder._read
    monkeypatch.setattr(Recorder, "_read", lambda *given: rows_run.append(len(given[1])) or read(*given))
    method = Method("closed form", "", (ClosedForm(sizes=(1,), ridges=(0.1,)),))
    result = plot_ot.localize(subject, causal, rows, method=method, size=20, progress=False)
    assert sum(rows_run) == 60
    assert result.waited["filtering"] > 0
    plan = plot_ot.plan_localization(
        subject, causal, rows, machine_by_name("h100").changed(gpu=False), method=method, size=20
    )
    assert plan.parts["filter"].forward > 0
    assert plan.parts["recording"].forward == 0
