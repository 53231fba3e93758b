"""Handles on live language models: edited prompts, what is generated from them, and values in the place of sources."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load, save
from torch import Tensor, nn

from decoders import (
    ANSWERS,
    BASE,
    POSITIONS,
    PROMPTS,
    SOURCE,
    as_answers,
    encode,
    hooked,
    network,
    plain,
    relative,
    where,
)
from nets import hooked_subject, mlp, planted_neurons, planted_plane, rand
from plot_ot.edits import Frame
from plot_ot.errors import PlotError
from plot_ot.handles import Edit, Handle
from plot_ot.subjects import DecoderSubject, record
from refusals import assert_refused

NEW = 5
"""Tokens that are generated."""


@pytest.fixture(scope="module")
def model() -> nn.Module:
    made = network("llama")
    made.generation_config.eos_token_id = None  # generate all the tokens asked for
    return made


def handle_at(subject: DecoderSubject, *names: str) -> Handle:
    """Random oblique maps at some places, or whole swaps where tokens are many."""
    edits = []
    for k, name in enumerate(names):
        place = subject.place(name)
        frame = Frame.oblique(rand(k, place.width, 3), rand(k + 9, place.width, 3))
        edits.append(Edit(place, frame, torch.tensor([0.5, 1.0, -0.7])))
    return Handle("z", tuple(edits), subject.identity())


def greedy(
    model: nn.Module, handle: Handle, base: Tensor, source: Tensor, every: bool = False, steps: int = NEW
) -> list[int]:
    """The continuation by plain hooks and without a cache: run all tokens so far, edit the prompt's token(s), take the
    largest logit, again and again."""
    clean: dict[str, Tensor] = {}
    look = {n: lambda a, n=n: clean.update({n: a}) or a for n in handle.places}
    plain(model, source, look, where(source))
    prompt = PROMPTS[int(base)]
    tokens = list(prompt)
    parts = {e.place.name: e for e in handle.edits}

    def edit(name: str, a: Tensor) -> Tensor:
        e = parts[name]
        return a + (e.gains * ((clean[name] - a) @ e.frame.read)) @ e.frame.write.T

    for _ in range(steps):
        grown = len(tokens) - len(prompt)
        at: dict[str, tuple[str, int]] = {}
        for name in handle.places:
            path, _, position = name.partition("@")
            spots = [where(base)[position] if position else -1]
            spots = [k - grown for k in spots] + ([-k for k in range(1, grown + 1)] if every else [])
            for k in spots:
                at[f"{path}@{k}"] = name, k
        edits = {key: lambda a, n=name: edit(n, a) for key, (name, _) in at.items()}
        with torch.no_grad(), hooked(model, edits, {key.split("@")[1]: k for key, (_, k) in at.items()}):
            tokens.append(int(model(input_ids=torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def generated(model: nn.Module, rows: Tensor, **options: object) -> list[list[int]]:
    ids, mask = encode(rows)
    found = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False, **options)
    return found[:, ids.shape[1] :].tolist()


# -- generation -------------------------------------------------------------------------------------------------

PLACES = {
    "last token": ["block_output.1"],
    "inside a block": ["head_output.1.2", "mlp_output.2"],
    "named token": ["block_output.0@early", "block_output.2"],
}


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2"])
@pytest.mark.parametrize("names", PLACES.values(), ids=PLACES)
def test_what_is_generated_follows_from_the_edited_prompt(family: str, names: list[str]) -> None:
    net = network(family)
    net.generation_config.eos_token_id = None
    kinds = ("head_output", "mlp_output", "block_output")
    subject = DecoderSubject(net, encode, ANSWERS, kinds=kinds, positions=POSITIONS)
    handle = handle_at(subject, *names)
    expected = [greedy(net, handle, b, s) for b, s in zip(BASE, SOURCE, strict=True)]
    clean = generated(net, BASE)
    with handle.on(subject, SOURCE, base=BASE):
        assert generated(net, BASE) == expected
        assert generated(net, BASE) == expected  # a new prompt is edited again
    with handle.on(subject, SOURCE, base=BASE):
        assert generated(net, BASE, use_cache=False) == expected
    assert expected != clean
    assert generated(net, BASE) == clean


@pytest.mark.parametrize("use_cache", [True, False])
def test_every_generated_token_can_be_edited_too(model: nn.Module, use_cache: bool) -> None:
    subject = DecoderSubject(model, encode, ANSWERS)
    handle = handle_at(subject, "block_output.0", "block_output.2")
    expected = [greedy(model, handle, b, s, every=True) for b, s in zip(BASE, SOURCE, strict=True)]
    with handle.on(subject, SOURCE, every_token=True):
        assert generated(model, BASE, use_cache=use_cache) == expected
    assert expected != [greedy(model, handle, b, s) for b, s in zip(BASE, SOURCE, strict=True)]


@pytest.mark.parametrize("options", [{"num_beams": 3, "num_return_sequences": 2}, {"num_beams": 2, "use_cache": False}])
def test_beams_share_the_source_of_their_prompt(model: nn.Module, options: dict) -> None:
    subject = DecoderSubject(model, encode, ANSWERS, positions=POSITIONS)
    handle = handle_at(subject, "block_output.1@early", "block_output.2")
    expected = []
    for b, s in zip(BASE[:3], SOURCE[:3], strict=True):
        with handle.on(subject, s[None], base=b[None]):
            expected += generated(model, b[None], **options)
    with handle.on(subject, SOURCE[:3], base=BASE[:3]):
        assert generated(model, BASE[:3], **options) == expected
    handle, expected = handle_at(subject, "block_output.0"), []
    for b, s in zip(BASE[:3], SOURCE[:3], strict=True):
        with handle.on(subject, s[None], every_token=True):
            expected += generated(model, b[None], **options)
    with handle.on(subject, SOURCE[:3], every_token=True):
        assert generated(model, BASE[:3], **options) == expected


def test_sampled_sequences_share_the_source_of_their_prompt(model: nn.Module) -> None:
    subject = DecoderSubject(model, encode, ANSWERS)
    handle = handle_at(subject, "block_output.1")
    ids, mask = encode(BASE[:2])
    with handle.on(subject, SOURCE[:2]):
        found = model.generate(
            input_ids=ids, attention_mask=mask, max_new_tokens=1, do_sample=True, num_return_sequences=3, top_k=1
        )
    assert found[:, -1].tolist() == [
        greedy(model, handle, b, s, steps=1)[0] for b, s in zip(BASE[:2], SOURCE[:2], strict=True) for _ in range(3)
    ]


@pytest.mark.parametrize("side", ["left", "right"])
@torch.no_grad()
def test_named_tokens_are_found_in_prompts_padded_on_either_side(model: nn.Module, side: str) -> None:
    subject = DecoderSubject(model, encode, ANSWERS, positions=POSITIONS)
    handle = handle_at(subject, "block_output.0@early", "block_output.1@third", "block_output.2")
    ids, mask = encode(BASE)
    lengths = mask.sum(dim=1)
    if side == "right":
        order = mask.argsort(dim=1, descending=True, stable=True)
        ids, mask = ids.gather(1, order), mask.gather(1, order)
    with handle.on(subject, SOURCE, base=BASE):
        positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
        logits = model(input_ids=ids, attention_mask=mask, position_ids=positions).logits
    last = logits[:, -1] if side == "left" else logits[torch.arange(len(ids)), lengths - 1]
    assert relative(as_answers(last), handle.apply(subject, BASE, SOURCE)) < 1e-5


@torch.no_grad()
def test_all_tokens_are_edited_in_the_live_prompt(model: nn.Module) -> None:
    subject = DecoderSubject(model, encode, ANSWERS, tokens=12)
    long = torch.tensor([[1], [3]])
    place = subject.place("block_output.1@all")
    handle = Handle("z", (Edit(place, Frame.identity(place.width), rand(1, place.width)),), subject.identity())
    ids, mask = encode(long)
    with handle.on(subject, long.flip(0)):
        live = model(input_ids=ids[:, 1:], attention_mask=mask[:, 1:]).logits[:, -1]
        assert relative(as_answers(live), handle.apply(subject, long, long.flip(0))) < 1e-5
        assert_refused(lambda: model(input_ids=ids[:, 2:]), ["@all", "11 tokens"])


@torch.no_grad()
def test_handles_open_inside_each_other_and_take_clean_sources(model: nn.Module) -> None:
    subject = DecoderSubject(model, encode, ANSWERS)
    one, two = handle_at(subject, "block_output.0"), handle_at(subject, "block_output.2")
    both = Handle("z", one.edits + two.edits, subject.identity())
    ids, mask = encode(BASE)
    inputs = {"input_ids": ids, "attention_mask": mask, "position_ids": (mask.cumsum(dim=1) - 1).clamp(min=0)}
    with one.on(subject, SOURCE), two.on(subject, SOURCE):
        live = as_answers(model(**inputs).logits[:, -1])
        alone = two.apply(subject, BASE, SOURCE)
    assert relative(live, both.apply(subject, BASE, SOURCE)) < 1e-5
    assert relative(alone, two.apply(subject, BASE, SOURCE)) < 1e-6
    net = hooked_subject(mlp(4, 6, 7, 3))
    first, second = (
        Handle("z", (Edit(p, Frame.identity(p.width), rand(k, p.width)),), net.identity())
        for k, p in enumerate(net.places)
    )
    together = Handle("z", first.edits + second.edits, net.identity())
    with first.on(net, rand(1, 5, 4)), second.on(net, rand(1, 5, 4)):
        torch.testing.assert_close(net.module(rand(2, 5, 4)), together.apply(net, rand(2, 5, 4), rand(1, 5, 4)))


# -- a bare model -----------------------------------------------------------------------------------------------


def test_a_handle_opens_on_the_model_itself_with_token_ids(model: nn.Module) -> None:
    subject = DecoderSubject(model, encode, ANSWERS, kinds=("head_output", "block_output"))
    handle = handle_at(subject, "head_output.1.3", "block_output.2")
    with handle.on(subject, SOURCE):
        expected = generated(model, BASE)
    ids, mask = encode(SOURCE)
    order = mask.argsort(dim=1, descending=True, stable=True)
    right = {"input_ids": ids.gather(1, order), "attention_mask": mask.gather(1, order)}
    for source in ({"input_ids": ids, "attention_mask": mask}, right):
        with handle.on(model, source):
            assert generated(model, BASE) == expected
    with handle.on(model, torch.tensor([PROMPTS[1], PROMPTS[3]])):
        generated(model, torch.tensor([[0], [2]]))
    with handle.on(subject, SOURCE[:1]):  # one source for all prompts
        assert generated(model, BASE)[0] == expected[0]


# -- refusals ---------------------------------------------------------------------------------------------------


def test_what_a_live_handle_cannot_know_is_refused(model: nn.Module) -> None:
    subject = DecoderSubject(model, encode, ANSWERS, positions=POSITIONS)
    last, named = handle_at(subject, "block_output.1"), handle_at(subject, "block_output.1@early")
    ids, mask = encode(BASE)

    def opened(handle: Handle, run: object = lambda: None, network: object = subject, **options: object) -> object:
        def attempt() -> None:
            with handle.on(network, options.pop("source", SOURCE), **options):
                run()

        return attempt

    assert_refused(opened(named), ["block_output.1@early", "`base`"])
    assert_refused(opened(named, base=BASE, every_token=True), ["every_token", "block_output.1@early"])
    assert_refused(opened(named, base=BASE[:4]), ["6 source rows", "4 `base` rows"])
    assert_refused(
        opened(named, lambda: model(input_ids=ids[:, -3:]), base=BASE),
        ["3 tokens in row 0", "9 tokens", "encode(base)"],
    )
    assert_refused(opened(named, network=model, source=ids), ["block_output.1@early", "subject"])
    assert_refused(opened(last, network=model, source=ids.float()), ["token ids"])
    assert_refused(opened(last, source={"input_ids": ids}), ["input rows", "model itself"])
    assert_refused(opened(last, lambda: model(input_ids=ids.repeat(2, 1))), ["6 source rows", "12 prompts", "copies"])
    assert_refused(opened(last, lambda: model(input_ids=ids[:4])), ["6 source rows", "4 prompts"])
    begun = model(input_ids=ids[:, :4], use_cache=True).past_key_values
    assert_refused(
        opened(last, lambda: model(input_ids=ids[:, 4:5], past_key_values=begun)), ["continues", "before the prompt"]
    )

    def in_chunks() -> None:
        past = model(input_ids=ids[:, :4], use_cache=True).past_key_values
        model(input_ids=ids[:, 4:8], past_key_values=past)

    assert_refused(opened(last, in_chunks), ["one token", "4 tokens", "chunked"])

    def right_padded() -> None:
        past = model(input_ids=ids, attention_mask=mask.flip(1), use_cache=True).past_key_values
        model(input_ids=ids[:, :1], past_key_values=past)

    assert_refused(opened(last, right_padded), ["left"])
    assert not model.model._forward_pre_hooks
    assert not any(m._forward_hooks for m in model.modules())
    net = hooked_subject(mlp(4, 6, 3))
    edit = Edit(net.places[0], Frame.identity(6), torch.ones(6))
    with pytest.raises(PlotError, match=r"every_token.*ModuleSubject"):
        opened(Handle("z", (edit,), net.identity()), network=net, source=rand(0, 2, 4), every_token=True)()


# -- values in the place of sources -----------------------------------------------------------------------------


def planted_handles(seed: int) -> list[tuple[object, Handle, object]]:
    """(planted network, true handle of a variable, recorded fit bank) of two planted networks."""
    found = []
    for planted in (planted_plane(seed), planted_neurons(2, seed)):
        [fit] = record(planted.subject, *planted.banks(200, seed=seed))
        for variable, truth in planted.truth.items():
            if isinstance(truth, Tensor):
                place, frame, gains = planted.subject.places[0], Frame.orthonormal(truth), torch.ones(2)
            else:
                place = planted.subject.places[1]
                frame, gains = Frame.identity(place.width), torch.zeros(place.width)
                gains[[int(name[7:-1]) for name in truth]] = 1
            found.append((planted, Handle(variable, (Edit(place, frame, gains),), planted.subject.identity()), fit))
    return found


@pytest.mark.parametrize("seed", [1000, 1001])
def test_a_value_can_be_set_without_a_source(seed: int, tmp_path: Path) -> None:
    for planted, handle, fit in planted_handles(seed):
        able = handle.with_values(fit)
        able.save(tmp_path / "z.safetensors")
        back = Handle.load(tmp_path / "z.safetensors", planted.subject)
        rows = torch.randint(
            planted.levels, (50, len(planted.causal.inputs)), generator=torch.Generator().manual_seed(seed)
        )
        values = sorted(set(planted.causal.run(rows)[handle.variable].tolist()))
        assert sorted(able.values) == sorted(back.values) == values
        for value in values:
            like = planted.causal.run(rows)[handle.variable]
            wanted = planted.causal.run(rows, do={handle.variable: torch.full_like(like, value)})[planted.causal.output]
            for one in (able, back):
                outputs = one.set(value).apply(planted.subject, rows)
                assert torch.equal(outputs.argmax(dim=1), wanted.long())
                with one.set(value).on(planted.subject):
                    live = planted.subject.net(planted.subject.encode(rows))
                torch.testing.assert_close(live.detach(), outputs, rtol=1e-4, atol=1e-5)


def test_a_set_value_works_at_several_places_of_a_language_model(model: nn.Module) -> None:
    subject = DecoderSubject(model, encode, ANSWERS, positions=POSITIONS)
    handle = handle_at(subject, "block_output.0@early", "block_output.2")
    source = torch.tensor([[3]])
    clean = subject.record(source)
    targets = tuple(clean.activations[e.place.name][0] @ e.frame.read for e in handle.edits)
    able = Handle("z", handle.edits, handle.subject, values={"yes": targets})  # the value is what this source has
    expected = handle.apply(subject, BASE, source.expand(len(BASE), 1))
    assert relative(able.set("yes").apply(subject, BASE), expected) < 1e-5
    with able.set("yes").on(subject, base=BASE):
        tokens = generated(model, BASE)
    assert tokens == [greedy(model, handle, b, source[0]) for b in BASE]
    only = Handle("z", handle.edits[1:], handle.subject)
    able = Handle("z", only.edits, only.subject, values={(1, True): targets[1:]})
    with only.on(subject, source):
        expected_tokens = generated(model, BASE)
    with able.set((1, True)).on(model):
        assert generated(model, BASE) == expected_tokens


def test_values_that_are_unknown_too_many_or_damaged_are_refused(tmp_path: Path) -> None:
    _, handle, fit = planted_handles(1000)[0]
    assert_refused(lambda: handle.set(1), ["'p'", "with_values"])
    assert_refused(lambda: handle.with_values(fit, most=2).set(1), ["knows no values"])
    assert_refused(lambda: handle.with_values(fit).set(7), ["value of 'p'", "'7'", "0, 1, 2"])
    assert_refused(lambda: handle.with_values(fit).set(None), ["None", "number"])
    assert_refused(lambda: handle.with_values(fit).set("1"), ["'p' are no text: write 1 without quotes"])
    known = handle.with_values(fit)
    assert known.set(np.int64(1)).value == known.set(torch.tensor(1)).value == 1
    assert_refused(lambda: Handle("r", handle.edits, handle.subject).with_values(fit), ["'r'", "p, q"])
    handle.with_values(fit).save(tmp_path / "z.safetensors")
    for damage in (
        lambda tensors, header: tensors.pop("value.1.0"),
        lambda tensors, header: tensors.update({"value.1.0": torch.ones(5)}),
        lambda tensors, header: tensors["value.1.0"].fill_(torch.nan),
        lambda tensors, header: header.update(values=[0, 1, 2, 3]),
        lambda tensors, header: header.update(values=[None]),
    ):
        data = (tmp_path / "z.safetensors").read_bytes()
        tensors = load(data)
        header = json.loads(json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]["plot_ot"])
        damage(tensors, header)
        (tmp_path / "damaged.safetensors").write_bytes(save(tensors, metadata={"plot_ot": json.dumps(header)}))
        assert_refused(lambda: Handle.load(tmp_path / "damaged.safetensors"), ["damaged.safetensors", "not a readable"])
