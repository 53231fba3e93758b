"""Encoders, convolutional and recurrent networks through hooks: places and positions against plain hooks by hand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import plot_ot
from nets import mlp, rand
from plot_ot.edits import EditBatch, Frame, respond
from plot_ot.errors import PlotError
from plot_ot.handles import Edit, Handle
from plot_ot.subjects import (
    DecoderSubject,
    GRUNet,
    GRUSubject,
    MLPSubject,
    ModuleSubject,
    SequentialSubject,
    record_pairs,
)
from refusals import assert_refused


def whole(subject: ModuleSubject, name: str) -> list[EditBatch]:
    place = subject.place(name)
    return [EditBatch(place, Frame.identity(place.width), torch.ones(1, place.width))]


def handle_for(subject: ModuleSubject, *names: str) -> Handle:
    edits = []
    for k, name in enumerate(names):
        place = subject.place(name)
        edits.append(Edit(place, Frame.oblique(rand(k, place.width, 2), rand(k + 5, place.width, 2)), torch.ones(2)))
    return Handle("z", tuple(edits), subject.identity())


# -- encoders ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bert() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(1000)
    config = transformers.BertConfig(
        vocab_size=40, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24, num_labels=3
    )
    model = transformers.BertForSequenceClassification(config).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(0, 0.3)
    return model


def words(seed: int, rows: int = 6, tokens: int = 7) -> Tensor:
    """Sentences of several lengths, padded with 0 on the right; their 5 is somewhere else in each."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(6, 40, (rows, tokens), generator=generator)
    for row in range(rows):
        ids[row, (row * 3 + seed) % 4] = 5
        ids[row, 5 + row % 3 :] = 0
    return ids


def five(rows: Tensor) -> Tensor:
    return rows.eq(5).long().argmax(dim=1)


def bert_subject(model: nn.Module, **options: object) -> ModuleSubject:
    paths = {"first": "bert.encoder.layer.0", "mlp": "bert.encoder.layer.1.intermediate", "pooled": "bert.pooler"}
    encode = lambda rows: {"input_ids": rows, "attention_mask": (rows != 0).long()}  # noqa: E731
    return ModuleSubject(model, paths, words(0), encode=encode, **options)


@torch.no_grad()
def test_an_encoder_is_edited_at_tokens_that_are_elsewhere_in_base_and_source(bert: nn.Module) -> None:
    subject = bert_subject(bert, position={"first": five, "mlp": 0})
    assert [(p.name, p.width, p.position) for p in subject.places] == [
        ("first", 16, None),
        ("mlp", 24, 0),
        ("pooled", 16, None),
    ]
    base, source = words(1), words(2)
    assert not torch.equal(five(base), five(source))
    [recording] = record_pairs(subject, (base, source))
    modules = {"first": bert.bert.encoder.layer[0], "mlp": bert.bert.encoder.layer[1].intermediate}
    for name, module in modules.items():
        for b, s, found in zip(base, source, respond(recording, whole(subject, name))[0], strict=True):
            at = (lambda x, name=name: int(five(x[None]))) if name == "first" else lambda _: 0
            kept: list[Tensor] = []
            hook = module.register_forward_hook(
                lambda m, i, o, at=at, s=s, kept=kept: kept.append(
                    (o[0] if isinstance(o, tuple) else o)[0, at(s)].clone()
                )
            )
            bert(input_ids=s[None], attention_mask=(s != 0)[None].long())
            hook.remove()

            def write(m: nn.Module, i: object, o: object, at=at, b=b, kept=kept) -> None:
                (o[0] if isinstance(o, tuple) else o)[0, at(b)] = kept[0]

            hook = module.register_forward_hook(write)
            expected = bert(input_ids=b[None], attention_mask=(b != 0)[None].long()).logits[0]
            hook.remove()
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_a_live_encoder_finds_tokens_by_its_base_rows(bert: nn.Module) -> None:
    subject = bert_subject(bert, position={"first": five})
    base, source = words(1), words(2)
    handle = handle_for(subject, "first", "pooled")
    with handle.on(subject, source, base=base):
        live = bert(**subject.encode(base)).logits
        inside = handle.apply(subject, base, source)
    torch.testing.assert_close(live, handle.apply(subject, base, source), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(inside, live, rtol=1e-4, atol=1e-5)
    assert_refused(lambda: handle.on(subject, source).__enter__(), ["first", "`base`"])


# -- images -----------------------------------------------------------------------------------------------------


def convolutions() -> nn.Sequential:
    torch.manual_seed(1000)
    return nn.Sequential(
        nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Conv2d(3, 4, 2), nn.Tanh(), nn.Flatten(), nn.Linear(4 * 9, 2)
    ).eval()


@torch.no_grad()
def test_images_are_edited_whole_by_channel_and_by_pixel() -> None:
    net, images = convolutions(), (rand(1, 5, 1, 6, 6), rand(2, 5, 1, 6, 6))
    places = {"all": "1", "channel": "1", "pixel": "3"}
    subject = ModuleSubject(net, places, images[0], position={"channel": 2, "pixel": (0, -1)})
    assert {p.name: p.width for p in subject.places} == {"all": 48, "channel": 16, "pixel": 4}
    [recording] = record_pairs(subject, images)
    base, source = (net[:2](x) for x in images)
    expected = {"all": net[2:](source)}
    mixed = base.clone()
    mixed[:, 2] = source[:, 2]
    expected["channel"] = net[2:](mixed)
    late, other = net[2:4](base), net[2:4](source)
    late[:, :, 0, -1] = other[:, :, 0, -1]
    expected["pixel"] = net[4:](late)
    for name, outputs in expected.items():
        torch.testing.assert_close(respond(recording, whole(subject, name))[0], outputs, rtol=1e-5, atol=1e-6)


@torch.no_grad()
def test_a_chain_of_layers_is_resumed_after_the_edit_and_never_run_before_it() -> None:
    net, images = convolutions(), (rand(1, 5, 1, 6, 6), rand(2, 5, 1, 6, 6))
    places = {"early": "1", "late": "3"}
    fast, slow = (make(net, places, images[0]) for make in (SequentialSubject, ModuleSubject))
    assert fast.places == slow.places
    assert fast.identity() == slow.identity()
    fast_recording, slow_recording = (record_pairs(subject, images)[0] for subject in (fast, slow))
    both = [
        EditBatch(p, Frame.oblique(rand(k, p.width, 2), rand(k + 5, p.width, 2)), rand(k + 7, 3, 2))
        for k, p in enumerate(slow.places)
    ]
    for edits in (both, both[:1], both[1:]):
        torch.testing.assert_close(respond(fast_recording, edits), respond(slow_recording, edits), rtol=1e-4, atol=1e-5)
    handle = handle_for(fast, "early", "late")
    expected = handle.apply(slow, *images)
    with handle.on(fast, images[1]):
        torch.testing.assert_close(net(images[0]), expected, rtol=1e-4, atol=1e-5)
    net[0].forward = None  # calling it now fails
    respond(fast_recording, both)


# -- recurrent networks -----------------------------------------------------------------------------------------


class Unrolled(nn.Module):
    """An LSTM cell run step by step; the last state is read."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1000)
        self.cell, self.head = nn.LSTMCell(2, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        state = None
        for now in x.unbind(dim=1):
            state = self.cell(now, state)
        return self.head(state[0])


@torch.no_grad()
def test_a_cell_that_runs_many_times_is_edited_in_one_of_its_runs() -> None:
    net, base, source = Unrolled(), rand(1, 6, 4, 2), rand(2, 6, 4, 2)
    subject = ModuleSubject(net, {f"h{t}": f"cell#{t}" for t in range(4)}, base)
    assert [(p.name, p.width, p.position) for p in subject.places] == [(f"h{t}", 5, t) for t in range(4)]
    [recording] = record_pairs(subject, (base, source))
    for t in range(4):
        state, other = None, None
        for step in range(4):
            state, other = net.cell(base[:, step], state), net.cell(source[:, step], other)
            if step == t:
                torch.testing.assert_close(recording.source_at(subject.places[t]), other[0])
                state = other[0], state[1]
        torch.testing.assert_close(respond(recording, whole(subject, f"h{t}"))[0], net.head(state[0]))
    handle = handle_for(subject, "h1", "h3")
    with handle.on(subject, source):
        for _ in range(2):  # runs are counted anew in every forward pass
            torch.testing.assert_close(net(base), handle.apply(subject, base, source), rtol=1e-4, atol=1e-5)


def test_recurrent_layers_need_their_rows_first() -> None:
    net = nn.Sequential(nn.GRU(2, 4, batch_first=True))
    read = {"output": lambda out: out[0][:, -1]}
    subject = ModuleSubject(net, ["0"], rand(0, 1, 3, 2), position=1, **read)
    assert (subject.places[0].width, subject.places[0].position) == (4, 1)
    other = nn.Sequential(nn.GRU(2, 4))
    flipped = {"encode": lambda x: x.transpose(0, 1), "output": lambda out: out[0][-1]}
    assert_refused(lambda: ModuleSubject(other, ["0"], rand(0, 1, 3, 2), **flipped), ["'0'", "3 rows", "batch_first"])


# -- refusals ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"position": 7}, ["(1, 3, 4, 4)", "no position 7"]),
        ({"position": (4, 0)}, ["no position (4, 0)"]),
        ({"position": (1,)}, ["no position (1,)"]),
        ({"position": lambda rows: torch.tensor([3])}, ["no position 3..3"]),
        ({"position": lambda rows: torch.zeros(2, 2)}, ["one index for each of 1 rows", "(2, 2)"]),
        ({"position": {"on": 1}}, ["place with a position", "'on'", "one"]),
        ({"places": {"one": "1#x"}}, ["'1#x'", "'1#0'"]),
        ({"places": {"one": "1#4"}}, ["never ran", "one"]),
    ],
)
def test_positions_that_are_not_there_are_refused(options: dict, words: list[str]) -> None:
    arguments = {"places": {"one": "1"}, "example": rand(0, 1, 1, 6, 6), **options}
    assert_refused(lambda: ModuleSubject(convolutions(), **arguments), words)


def test_what_is_no_chain_of_layers_is_refused() -> None:
    example = rand(0, 1, 1, 6, 6)
    assert_refused(lambda: SequentialSubject(Unrolled(), ["cell"], example), ["nn.Sequential", "Unrolled"])
    nested = nn.Sequential(convolutions())
    assert_refused(lambda: SequentialSubject(nested, ["0.1"], example), ["child of the network", "'0.1'"])
    pair = nn.Sequential(nn.GRU(2, 4, batch_first=True))
    read = {"output": lambda out: out[0][:, -1]}
    assert_refused(lambda: SequentialSubject(pair, ["0"], rand(0, 1, 3, 2), **read), ["'0'", "tuple", "ModuleSubject"])


# -- identity ---------------------------------------------------------------------------------------------------


def test_networks_of_the_same_weights_that_compute_different_things_are_told_apart() -> None:
    tanh, relu = mlp(4, 6, 3, seed=1000), mlp(4, 6, 3, seed=1000, activation=nn.ReLU)
    assert MLPSubject(tanh).identity() != MLPSubject(relu).identity()
    subject = MLPSubject(tanh)
    handle = Handle("z", (Edit(subject.places[0], Frame.identity(6), torch.ones(6)),), subject.identity())
    with pytest.raises(PlotError, match="belongs to network"):
        handle.apply(MLPSubject(relu), rand(0, 2, 4), rand(1, 2, 4))
    net = GRUNet(2, 4)
    assert GRUSubject(net, 3).identity() == GRUSubject(net, 4).identity()


def test_language_models_are_told_apart_by_what_their_weights_do_not_show() -> None:
    pytest.importorskip("transformers")
    from decoders import ANSWERS, encode, network

    model = network("llama")
    before = DecoderSubject(model, encode, ANSWERS).identity()
    model.config.hidden_act = "relu"
    assert DecoderSubject(model, encode, ANSWERS).identity() != before
    model.config.hidden_act = "silu"
    model.config._attn_implementation = "eager"  # another way to compute the same
    assert DecoderSubject(model, encode, ANSWERS).identity() == before


# -- places crossed with positions ---------------------------------------------------------------------------------


class Tagged(nn.Module):
    """Two layers over three tokens of width 4, read off at the last token."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1000)
        self.first, self.second, self.read = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(12, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.read(torch.tanh(self.second(torch.tanh(self.first(x)))).flatten(1))


def test_places_are_crossed_with_tokens():
    """As if every place had been spelled by hand, in recordings and under edits."""
    net, rows = Tagged(), rand(3, 5, 3, 4)
    crossed = plot_ot.load_subject(net, places=["first", "second"], example=rows[:1], tokens=3)
    names = {f"{layer}@{t}": (layer, t) for layer in ("first", "second") for t in range(3)}
    assert [p.name for p in crossed.places] == list(names)
    assert [p.token for p in crossed.places] == ["0", "1", "2"] * 2
    spelled = ModuleSubject(
        net, {n: m for n, (m, _) in names.items()}, rows, position={n: t for n, (_, t) in names.items()}
    )
    one, two = crossed.record(rows), spelled.record(rows)
    for name, (layer, t) in names.items():
        assert torch.equal(one.activations[name], two.activations[name])
        assert torch.equal(
            one.activations[name], getattr(net, layer)(rows if layer == "first" else torch.tanh(net.first(rows)))[:, t]
        )
    [place] = [p for p in crossed.places if p.name == "first@1"]
    edited, at = rand(4, 2, 5, 4), torch.arange(5)
    assert torch.equal(crossed.resume(one, at, place, edited, {}), spelled.resume(two, at, place, edited, {}))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"position": []}, ["at least one"]),
        ({"position": [1, 1]}, ["different whole numbers"]),
        ({"position": [0, "last"]}, ["whole numbers", "last"]),
        ({"position": {"first": [1, 2]}}, ["[1, 2]", "one list of indices for all places"]),
        ({"position": "last"}, ["'last'", "an index"]),
        ({"tokens": 0}, ["1 or more"]),
        ({"tokens": 3, "position": 1}, ["not both"]),
    ],
    ids=str,
)
def test_strange_positions_are_refused(options, said):
    assert_refused(lambda: plot_ot.load_subject(Tagged(), places=["first"], example=rand(5, 1, 3, 4), **options), said)


def test_tokens_without_places_are_refused():
    assert_refused(lambda: plot_ot.load_subject("tiny", tokens=3), ["goes with the `places`"])
