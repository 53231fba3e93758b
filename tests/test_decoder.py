"""Decoder language models: recorded once and resumed at the edited token, against the plain hooked full forward."""

import pytest
import torch
from torch import Tensor

from decoders import (
    ANSWERS,
    BASE,
    DEPTH,
    FAMILIES,
    POSITIONS,
    PROMPTS,
    SOURCE,
    WIDTH,
    as_answers,
    block_list,
    network,
    plain,
    projection,
    recorded,
    relative,
    variants,
    where,
    whole_forwards,
)
from plot_ot.edits import EditBatch, Frame, resume_edited
from plot_ot.subjects import record_pairs
from plot_ot.subjects.decoder import sizes

# -- equality with the oracle ------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_resuming_equals_the_hooked_full_forward_at_every_layer(family: str) -> None:
    model = network(family)
    recording = recorded(model)
    subject = recording.subject
    assert [p.name for p in subject.places] == [f"block_output.{k}" for k in range(DEPTH)]
    with torch.no_grad():
        for place in subject.places:
            activation = variants(recording, place)
            expected = whole_forwards(model, place, activation)
            arguments = (recording.store, recording.base_rows, place, activation, {})
            found = subject.watching(vocabulary=True).resume(*arguments)
            assert relative(found, expected) < 1e-5
            assert relative(subject.resume(*arguments), as_answers(expected)) < 1e-5
            with_rest = subject.watching(rest=True).resume(*arguments)
            assert relative(with_rest, as_answers(expected, rest=True)) < 1e-5
            # the edits do something, and the variants are not mixed up
            assert relative(expected[1], expected[0]) > 1e-2
            assert relative(expected[2], expected[1]) > 1e-2


@pytest.mark.parametrize("family", FAMILIES)
def test_recording_equals_the_plain_forward(family: str) -> None:
    model = network(family)
    recording = recorded(model)
    kept: dict[int, Tensor] = {}
    for rows, index in ((BASE, recording.base_rows), (SOURCE, recording.source_rows)):
        for row, at in zip(rows, index, strict=True):
            look = {f"block_output.{k}": lambda h, k=k: kept.update({k: h}) or h for k in range(DEPTH)}
            with torch.no_grad():
                logits = plain(model, row, look)
            for k in range(DEPTH):
                assert relative(recording.store.activations[f"block_output.{k}"][at], kept[k]) < 1e-5
            assert relative(recording.store.outputs[at], as_answers(logits)) < 1e-5
            assert int(recording.store.top_token[at]) == int(logits.argmax())
            assert int(recording.store.lengths[at]) == len(PROMPTS[int(row)])


def test_a_source_may_be_longer_than_every_base_of_its_batch() -> None:
    model = network("llama")
    subject = recorded(model).subject
    by_length = sorted(range(len(PROMPTS)), key=lambda k: len(PROMPTS[k]))
    rows = torch.tensor([by_length[0], by_length[-1]]).unsqueeze(1)
    assert len(PROMPTS[by_length[0]]) < len(PROMPTS[by_length[-1]])
    [recording] = record_pairs(subject, (rows[:1], rows[1:]))
    place = subject.places[0]
    activation = recording.source_at(place).unsqueeze(0)
    found = subject.watching(vocabulary=True).resume(recording.store, recording.base_rows, place, activation, {})
    with torch.no_grad():
        expected = plain(model, rows[0], {place.name: lambda _: activation[0, 0]})
    assert relative(found[0, 0], expected) < 1e-5


# -- other places ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_places_inside_blocks_and_at_other_tokens_equal_the_hooked_full_forward(family: str) -> None:
    model = network(family)
    kinds = ("head_output", "attention_output", "mlp_output", "block_output")
    recording = recorded(model, kinds=kinds, positions=POSITIONS, layers=(1,))
    subject = recording.subject
    heads = [f"head_output.1.{h}" for h in range(4)]
    assert [p.name for p in subject.places] == [
        f"{name}{at}"
        for name in (*heads, "attention_output.1", "mlp_output.1", "block_output.1")
        for at in ("@early", "@third", "")
    ]
    generator = torch.Generator().manual_seed(1001)
    with torch.no_grad():
        for place in subject.places:
            if place.name.startswith(("head_output.1.0", "head_output.1.3")):
                continue
            noise = torch.randn(1, len(BASE), place.width, generator=generator)
            activation = torch.cat([recording.source_at(place)[None], noise])[len(place.name) % 2 :]
            expected = as_answers(whole_forwards(model, place, activation))
            found = subject.resume(recording.store, recording.base_rows, place, activation, {})
            assert relative(found, expected) < 1e-5, place.name
            assert relative(expected, recording.base_outputs.expand_as(expected)) > 1e-4, place.name


MANY = {
    "last token": ["block_output.0", "block_output.1", "block_output.3"],
    "tokens": [
        "block_output.0",
        "block_output.1@early",
        "block_output.1@third",
        "block_output.2",
        "block_output.3@early",
    ],
    "one block": ["head_output.1.0", "head_output.1.2@third", "attention_output.1", "mlp_output.1", "block_output.1"],
    "same vector twice": ["block_output.1@third", "block_output.1@end", "block_output.2"],
}


@pytest.mark.parametrize("names", MANY.values(), ids=MANY)
@pytest.mark.parametrize("family", ["gemma2", "gpt_neox"])
@pytest.mark.parametrize("at_once", [512, 1])
def test_edits_at_several_places_follow_each_other(
    family: str, names: list[str], at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sizes.RESUMED_AT_ONCE, "cpu", at_once)
    model = network(family)
    kinds = ("head_output", "attention_output", "mlp_output", "block_output")
    positions = {**POSITIONS, "end": lambda rows: -1}
    recording = recorded(model, kinds=kinds, positions=positions)
    subject = recording.subject
    strengths = torch.tensor([1.0, 0.0, -0.7])
    source = {n: recording.source_at(subject.place(n)) for n in names}

    def mixed(name: str, a: Tensor) -> Tensor:
        """A variant's strength times the way to the source, at every place."""
        return a + strengths[:, None, None] * (source[name] - a)

    start = subject.place(names[0])
    edited = mixed(names[0], recording.base_at(start).expand(3, -1, -1))
    later = {name: lambda a, n=name: mixed(n, a) for name in names[1:]}
    with torch.no_grad():
        found = subject.resume(recording.store, recording.base_rows, start, edited, later)
        for v, strength in enumerate(strengths):
            for t, row in enumerate(BASE):
                edits = {n: lambda a, s=source[n][t], g=strength: a + g * (s - a) for n in names}
                expected = as_answers(plain(model, row, edits, {**where(row), "end": -1}))
                assert relative(found[v, t], expected) < 1e-5
    assert relative(found[0], found[1]) > 1e-3
    assert relative(found[1], recording.base_outputs) < 1e-5


@pytest.mark.parametrize("family", FAMILIES)
def test_in_the_last_block_only_the_last_token_runs_to_the_end(family: str) -> None:
    """Its earlier tokens make keys and values, which the last one sees; nobody reads what else becomes of them."""
    model = network(family)
    recording = recorded(model, positions=POSITIONS)
    subject, place = recording.subject, recording.subject.place(f"block_output.{DEPTH - 2}@third")
    activation = variants(recording, place)
    rows: list[int] = []
    hook = projection(block_list(model)[-1]).register_forward_hook(lambda _, args, __: rows.append(args[0].shape[1]))
    with torch.no_grad():
        expected = as_answers(whole_forwards(model, place, activation))
        rows.clear()
        found = subject.resume(recording.store, recording.base_rows, place, activation, {})
    hook.remove()
    assert relative(found, expected) < 1e-5
    assert relative(expected[1], expected[0]) > 1e-4
    assert set(rows) == {len(activation)}


# -- gradients -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("memory", [4 << 30, 1], ids=["kept graph", "graph computed again"])
@pytest.mark.parametrize("name", ["block_output.1", "block_output.0@third", "attention_output.2", "head_output.0.1"])
@pytest.mark.parametrize("family", ["gemma2", "llama-tied"])
def test_gradients_equal_those_of_the_hooked_forward(family: str, name: str, memory: int) -> None:
    model = network(family)
    kinds = ("head_output", "attention_output", "block_output")
    recording = recorded(model, kinds=kinds, positions=POSITIONS, rest=True)
    subject = recording.subject
    subject.memory = memory
    place = subject.place(name)
    torch.manual_seed(1002)
    activation = torch.randn(2, len(BASE), place.width, requires_grad=True)
    weight = torch.randn(2, len(BASE), len(ANSWERS) + 1)
    (weight * subject.resume(recording.store, recording.base_rows, place, activation, {})).sum().backward()
    found, activation.grad = activation.grad, None
    (weight * as_answers(whole_forwards(model, place, activation), rest=True)).sum().backward()
    assert relative(found, activation.grad) < 1e-5


def test_the_models_weights_and_settings_are_left_as_found() -> None:
    model = network("llama").train()
    model.lm_head.requires_grad_(False)
    before = {n: (p.requires_grad, p.clone()) for n, p in model.named_parameters()}
    recording = recorded(model)
    place = recording.subject.places[1]
    activation = recording.source_at(place)[None].clone().requires_grad_()
    recording.subject.resume(recording.store, recording.base_rows, place, activation, {}).sum().backward()
    assert activation.grad is not None
    assert model.training
    assert model.config._attn_implementation == "sdpa"
    for name, p in model.named_parameters():
        assert p.grad is None
        assert p.requires_grad == before[name][0]
        assert torch.equal(p, before[name][1])
    with torch.no_grad():
        assert not recording.subject.resume(recording.store, recording.base_rows, place, activation, {}).requires_grad


def test_rotations_train_through_the_subject() -> None:
    """The engine's own edit, with a frame that needs gradients, in one batch of pairs and variants."""
    recording = recorded(network("qwen3"))
    place = recording.subject.places[2]
    directions = torch.linalg.qr(torch.randn(2, WIDTH, 3))[0].requires_grad_()
    frame = Frame(WIDTH, directions, None, "das")
    outputs = resume_edited(recording, [EditBatch(place, frame, torch.ones(2, 3))])
    outputs.square().sum().backward()
    assert directions.grad is not None
    assert float(directions.grad.abs().max()) > 1e-4
