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


@pytest.mark.parametrize("make", [SequentialSubject, ModuleSubject])
def test_what_works_in_place_after_a_place_changes_neither_edits_nor_their_gradients(make: type[ModuleSubject]) -> None:
    torch.manual_seed(1000)
    plain = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3)).double()
    inside = nn.Sequential(plain[0], nn.ReLU(inplace=True), plain[2])
    states, found = rand(3, 4, 8).double(), []
    for net in (plain, inside):
        subject = make(net, ["0"], torch.zeros(1, 5).double(), encode=lambda rows: rows)
        inputs = rand(1, 4, 5).double(), rand(2, 4, 5).double()
        [recording] = record_pairs(subject, inputs)
        a = states.clone().requires_grad_(True)
        outputs = subject.resume(recording.store, recording.base_rows, subject.places[0], a.unsqueeze(0), {})[0]
        [slope] = torch.autograd.grad(outputs.sum(), a)
        found.append((outputs.detach(), slope))
        with torch.no_grad():  # states that a caller still needs stay as they are
            subject.resume(recording.store, recording.base_rows, subject.places[0], states.unsqueeze(0), {})
        assert bool((states < 0).any())
    torch.testing.assert_close(found[0], found[1])


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


def test_a_module_that_embeds_tokens_is_given_whole_numbers():
    """Nobody has to say so: floats are tried first, and the module that cannot take them gets what it can."""

    class Embedding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.mix, self.head = nn.Embedding(9, 4), nn.Linear(4, 4), nn.Linear(4, 3)

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(self.mix(self.words(ids)).tanh().mean(dim=1))

    torch.manual_seed(1000)
    module, rows = Embedding(), torch.arange(12).reshape(4, 3) % 9
    subject = plot_ot.load_subject(module, places=["mix"], tokens=3, example=rows)
    [recording] = record_pairs(subject, (rows[:2], rows[2:]))
    assert torch.allclose(recording.base_outputs, module(rows[:2]))
    assert torch.allclose(recording.source_at(subject.place("mix@1")), module.mix(module.words(rows[2:, 1])))
    chain = nn.Sequential(nn.Embedding(9, 4), nn.Flatten(), nn.Linear(12, 3))
    assert plot_ot.load_subject(chain, places=["1"], example=rows.float()).places[0].width == 12
    plain = plot_ot.load_subject(nn.Sequential(nn.Linear(3, 2)), places=["0"], example=rows)  # takes floats as ever
    assert plain.record(rows).outputs.dtype == torch.float32


@pytest.mark.parametrize(
    ("places", "options", "said"),
    [
        (["0"], {"example": torch.rand(4, 7)}, ["does not run on the first row", "(4, 7)", "as floats", "`encode`"]),
        (["0"], {"example": torch.ones(4, 7)}, ["as floats", "as whole numbers", "mat1 and mat2"]),
        (
            ["0"],
            {"example": torch.rand(4, 3), "encode": lambda rows: rows[:, 9]},
            ["as given by `encode`", "IndexError"],
        ),
        ("0.linear1", {"example": torch.rand(4, 3)}, ["a list of submodules' names", "places=['0.linear1']"]),
        (["0"], {"example": torch.rand(4, 3), "tokens": "5"}, ["a whole number; found '5'", "position=[0, 3]"]),
        (["0"], {"example": torch.rand(4, 3), "tokens": [0, 2]}, ["a whole number; found [0, 2]"]),
    ],
)
def test_a_module_that_cannot_be_run_as_asked_is_refused_in_words(places, options, said):
    net = nn.Sequential(nn.Linear(3, 2))
    assert_refused(lambda: plot_ot.load_subject(net, places=places, **options), said)


def test_tokens_without_places_are_refused():
    assert_refused(lambda: plot_ot.load_subject("tiny", tokens=3), ["goes with the `places`"])


# -- inputs, heads, residuals in the middle of a block ---------------------------------------------------------------

TOKENS, WIDE, HEADS = 3, 8, 4


class Attention(nn.Module):
    """Causal attention as people write it: the heads meet in the output projection's input."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDE, 3 * WIDE), nn.Linear(WIDE, WIDE)

    def heads(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=-1))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return mixed.transpose(1, 2).flatten(2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.heads(x))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln1, self.ln2, self.attn = nn.LayerNorm(WIDE), nn.LayerNorm(WIDE), Attention()
        self.mlp = nn.Sequential(nn.Linear(WIDE, 16), nn.GELU(), nn.Linear(16, WIDE))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln1(x))
        return x + self.mlp(input=self.ln2(x))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1000)
        self.blocks, self.read = nn.ModuleList([Block(), Block()]), nn.Linear(WIDE, 5)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.read(x[:, -1])


MIDDLE = "blocks.0:input + blocks.0.attn"


def by_hand(net: Transformer, x: Tensor, at: int, change: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """The first block written out, with what is changed at one token; what stood there."""
    found: dict[str, Tensor] = {}

    def place(name: str, h: Tensor, columns: slice = slice(None)) -> Tensor:
        found[name] = h[:, at, columns].clone()
        if name not in change:
            return h
        h = h.clone()
        h[:, at, columns] = change[name]
        return h

    block = net.blocks[0]
    heads = place("head", block.attn.heads(block.ln1(x)), slice(4, 6))
    middle = place("middle", x + block.attn.out(heads))
    into = place("mlp", block.ln2(middle))
    return net.read(net.blocks[1](middle + block.mlp(into))[:, -1]), found


@pytest.mark.parametrize("at", range(TOKENS))
def test_inputs_heads_and_the_residual_in_mid_block_need_no_wrapper_modules(at: int) -> None:
    net = Transformer().eval()
    places = {"head": "blocks.0.attn.out:input[2/4]", "middle": MIDDLE, "mlp": "blocks.0.mlp:input"}
    subject = plot_ot.load_subject(net, places=places, example=rand(0, 1, TOKENS, WIDE), position=at)
    assert [(p.name, p.width) for p in subject.places] == [("head", 2), ("middle", WIDE), ("mlp", WIDE)]
    rows = rand(1, 6, TOKENS, WIDE)
    store, index = subject.record(rows), torch.arange(6)
    with torch.no_grad():
        plain, found = by_hand(net, rows, at, {})
        assert torch.allclose(store.outputs, plain, atol=1e-5)
        for place in subject.places:
            assert torch.allclose(store.activations[place.name], found[place.name], atol=1e-5)
            new = rand(2, 6, place.width)
            expected, _ = by_hand(net, rows, at, {place.name: new})
            edited = subject.resume(store, index, place, new.unsqueeze(0), {})[0]
            assert torch.allclose(edited, expected, atol=1e-5), place.name
            assert not torch.allclose(edited, plain, atol=1e-3)
        both = {"head": rand(3, 6, 2), "middle": rand(4, 6, WIDE)}
        expected, _ = by_hand(net, rows, at, both)
        later = {"middle": lambda a: both["middle"].expand_as(a)}
        edited = subject.resume(store, index, subject.place("head"), both["head"].unsqueeze(0), later)[0]
        assert torch.allclose(edited, expected, atol=1e-5)


def test_the_residual_in_mid_block_is_also_what_the_norm_after_it_is_given() -> None:
    """But editing the norm's input alone would leave the way around it as it was."""
    net, rows = Transformer().eval(), rand(5, 4, TOKENS, WIDE)
    both = plot_ot.load_subject(net, places=[MIDDLE, "blocks.0.ln2:input"], example=rows[:1], position=TOKENS - 1)
    store = both.record(rows)
    middle, into = (store.activations[p.name] for p in both.places)
    assert torch.allclose(middle, into, atol=1e-6)
    new = rand(6, 1, 4, WIDE)
    one, two = (both.resume(store, torch.arange(4), p, new, {}) for p in both.places)
    assert not torch.allclose(one, two, atol=1e-3)


def test_a_sum_adds_up_what_other_places_have_rewritten() -> None:
    net, rows = Transformer().eval(), rand(7, 4, TOKENS, WIDE)
    after = "blocks.1:input + blocks.1.attn"
    subject = plot_ot.load_subject(net, places=[after, "blocks.0"], example=rows[:1])
    store, new = subject.record(rows), rand(8, 1, 4, TOKENS * WIDE)
    seen: list[Tensor] = []

    def look(a: Tensor) -> Tensor:
        seen.append(a.clone())
        return a

    with torch.no_grad():
        subject.resume(store, torch.arange(4), subject.place("blocks.0"), new, {after: look})
        x = new[0].unflatten(-1, (TOKENS, WIDE))
        expected = x + net.blocks[1].attn(net.blocks[1].ln1(x))
    assert torch.allclose(seen[0][0], expected.flatten(1), atol=1e-5)


def test_several_tokens_are_one_place_by_a_slice() -> None:
    net, rows = Transformer().eval(), rand(9, 5, TOKENS, WIDE)
    subject = plot_ot.load_subject(net, places=["blocks.0"], example=rows[:1], position=slice(1, 3))
    [place] = subject.places
    assert place.width == 2 * WIDE
    store = subject.record(rows)
    assert torch.allclose(store.activations["blocks.0"], net.blocks[0](rows)[:, 1:3].flatten(1))
    new = rand(10, 1, 5, 2 * WIDE)
    edited = subject.resume(store, torch.arange(5), place, new, {})[0]
    x = net.blocks[0](rows).clone()
    x[:, 1:3] = new[0].unflatten(-1, (2, WIDE))
    assert torch.allclose(edited, net.read(net.blocks[1](x)[:, -1]), atol=1e-5)


def test_a_live_handle_edits_a_head_and_a_mid_block_residual() -> None:
    net, rows = Transformer().eval(), rand(11, 2, TOKENS, WIDE)
    places = {"head": "blocks.0.attn.out:input[2/4]", "middle": MIDDLE}
    subject = plot_ot.load_subject(net, places=places, example=rows[:1], tokens=TOKENS)
    edits = [
        plot_ot.Edit(subject.place(n), plot_ot.Frame.identity(w), torch.ones(w))
        for n, w in (("head@2", 2), ("middle@1", 8))
    ]
    handle = plot_ot.Handle("z", tuple(edits), subject.identity())
    expected = handle.apply(subject, rows[:1], rows[1:])
    with handle.on(subject, rows[1:]), torch.no_grad():
        assert torch.allclose(net(rows[:1]), expected, atol=1e-5)


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("blocks.1.mlp:inputs", ["blocks.1.mlp", ":input"]),
        ("blocks.1.mpl:input", ["submodule", "blocks.1.mpl", "Did you mean"]),
        ("blocks.1.mlp:input[0:9]", ["8 columns", "[0:9]"]),
        ("blocks.1.mlp:input[4/4]", ["[4/4]", "equal parts"]),
        ("blocks.1.mlp:input[0/3]", ["8 columns", "[0/3]"]),
        ("blocks.1.attn + blocks.1:input", ["sum", "not there yet", "last"]),
        ("blocks.1:input + blocks.1.mlp.0", ["sum", "(1, 3, 16)", "(1, 3, 8)"]),
        ("blocks.1:input + ", ["submodule"]),
        ("read:input[0:4]#2", ["submodule"]),
    ],
)
def test_taps_that_cannot_be_meant_are_refused(path: str, said: list[str]) -> None:
    example = rand(0, 1, TOKENS, WIDE)
    assert_refused(lambda: plot_ot.load_subject(Transformer(), places=[path], example=example), said)


def test_heads_of_a_fused_attention_are_named_in_the_refusal() -> None:
    class Fused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix = nn.MultiheadAttention(8, 2, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.mix(x, x, x)[0][:, -1]

    place = "mix.out_proj:input[0/2]"
    example = rand(0, 1, 3, 8)
    assert_refused(
        lambda: plot_ot.load_subject(Fused(), places=[place], example=example), ["never ran", "MultiheadAttention"]
    )


def test_pyvene_has_no_name_for_inputs_and_sums() -> None:
    from plot_ot.exchange.components import component

    rows = rand(0, 1, TOKENS, WIDE)
    for place in (MIDDLE, "blocks.1.mlp:input", "blocks.1.attn[0/4]"):
        subject = plot_ot.load_subject(Transformer(), places=[place], example=rows, position=0)
        assert_refused(lambda s=subject: component(s, s.places[0]), ["pyvene cannot address", "sums"])
