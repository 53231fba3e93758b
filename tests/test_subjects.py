"""Subjects: one pass per distinct input, places as the forward pass meets them, networks left as they were found."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from nets import hooked_subject, mlp, rand
from plot_ot.abstract.banks import Bank
from plot_ot.abstract.causal_model import CausalModel
from plot_ot.edits import EditBatch, Frame, respond
from plot_ot.errors import PlotError
from plot_ot.subjects import MLPSubject, ModuleSubject, Place, record, record_pairs


class Reader(nn.Module):
    """Tokens -> transformer blocks [rows, positions, d] -> logits at the last token. Blocks may return tuples."""

    def __init__(self, tuples: bool = False) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.embed = nn.Embedding(5, 8)
            make = nn.TransformerEncoderLayer
            self.blocks = nn.ModuleList([make(8, 2, 16, dropout=0.5, batch_first=True) for _ in range(2)])
            self.taps = nn.ModuleList([Tap(tuples) for _ in range(2)])
            self.head = nn.Linear(8, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block, tap in zip(self.blocks, self.taps, strict=True):
            x = tap(block(x))
            if tap.tuples:
                x, _ = x
        return self.head(x[:, -1])


class Tap(nn.Module):
    def __init__(self, tuples: bool) -> None:
        super().__init__()
        self.tuples = tuples

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, str]:
        return (x, "attention weights") if self.tuples else x


class Twice(nn.Module):
    """Runs one layer twice and another one never."""

    def __init__(self) -> None:
        super().__init__()
        self.twice, self.never, self.once = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.once(self.twice(self.twice(x)))


class Named(nn.Module):
    """Returns a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"scores": self.inner(x)}


def tokens(seed: int, rows: int) -> Tensor:
    return torch.randint(0, 5, (rows, 4), generator=torch.Generator().manual_seed(seed))


def read_tokens(net: nn.Module, places: list[str], **options: object) -> ModuleSubject:
    return ModuleSubject(net, places, tokens(0, 1), encode=lambda rows: rows, **options)


# -- recording ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [MLPSubject, hooked_subject])
def test_every_distinct_input_of_all_banks_runs_once(make, monkeypatch):
    net, seen = mlp(2, 6, 5, 2), []
    subject = make(net)
    monkeypatch.setattr(type(subject), "responses_per_batch", 3)
    net.register_forward_pre_hook(lambda _, args: seen.extend(args[0].tolist()))
    causal = CausalModel(["a", "b"], {"p": lambda a: a, "y": lambda p, b: p + b}, "y")
    rows = torch.cartesian_prod(torch.arange(3), torch.arange(3))
    banks = [Bank.from_pairs(causal, rows, rows.flip(0)), Bank.from_pairs(causal, rows[:4], rows[2:6])]
    recordings = record(subject, *banks)
    assert sorted(seen) == sorted(rows.float().tolist())
    for bank, recording in zip(banks, recordings, strict=True):
        torch.testing.assert_close(recording.base_outputs, net(bank.base.float()).detach())
        torch.testing.assert_close(recording.source_outputs, net(bank.source.float()).detach())
        hidden = net[:2](bank.source.float()).detach()
        torch.testing.assert_close(recording.source_at(subject.places[0]), hidden)
    some = recordings[0].select(torch.tensor([5, 1]))
    assert torch.equal(some.base_outputs, recordings[0].base_outputs[[5, 1]])
    assert torch.equal(some.bank.labels["p"], banks[0].labels["p"][[5, 1]])


def test_the_fast_subject_never_runs_the_layers_before_the_edit():
    net = mlp(4, 6, 5, 3)
    [recording] = record_pairs(MLPSubject(net), (rand(0, 7, 4), rand(1, 7, 4)))
    for early in net[:3]:
        early.forward = None  # calling it now fails
    place = recording.subject.places[1]
    respond(recording, [EditBatch(place, Frame.identity(5), torch.ones(2, 5))])


@pytest.mark.parametrize(
    ("base", "source", "message"),
    [(3, 2, "3 bases, 2 sources"), (0, 0, "0 bases, 0 sources")],
)
def test_inputs_that_do_not_pair_up_are_refused(base, source, message):
    with pytest.raises(PlotError, match=message):
        record_pairs(MLPSubject(mlp(4, 6, 3)), (rand(0, base, 4), rand(0, source, 4)))


@pytest.mark.parametrize("layer", [0, 2, 4])
def test_a_network_with_nan_names_the_place_and_the_input(layer):
    net = mlp(2, 6, 5, 3)
    subject = MLPSubject(net)
    with torch.no_grad():
        net[layer].bias[0] = torch.nan
    where = {0: "layer1", 2: "layer2", 4: "the output"}[layer]
    with pytest.raises(PlotError, match=rf"NaN or infinity at {where} for input \[1.5, 2.0\] \(2 of 2 inputs\)"):
        record_pairs(subject, (torch.tensor([[1.5, 2.0]]), torch.tensor([[4.0, 2.0]])))


# -- places ---------------------------------------------------------------------------------------------------


def test_places_stand_in_forward_order_with_their_widths():
    net = mlp(4, 6, 7, 5, 3)
    expected = (Place("late", 5, 3), Place("early", 6, 1), Place("middle", 7, 2))
    subject = ModuleSubject(net, {"late": "5", "early": "1", "middle": "3"}, rand(0, 1, 4))
    assert subject.places == tuple(sorted(expected, key=lambda p: p.layer))
    assert [p.name for p in MLPSubject(net).places] == ["layer1", "layer2", "layer3"]
    assert [p.width for p in MLPSubject(net).places] == [6, 7, 5]


@pytest.mark.parametrize("tuples", [False, True], ids=["tensor", "tuple"])
@pytest.mark.parametrize("position", [1, 3, -1])
def test_a_position_of_a_sequence_is_read_and_written_alone(tuples, position):
    net = Reader(tuples).eval()
    subject = read_tokens(net, ["taps.1", "taps.0"], position=position)
    assert subject.places == (Place("taps.0", 8, 1, position), Place("taps.1", 8, 2, position))
    base, source = tokens(1, 6), tokens(2, 6)
    [recording] = record_pairs(subject, (base, source))
    with torch.no_grad():
        middle, other = (net.blocks[0](net.embed(x)) for x in (base, source))
        torch.testing.assert_close(recording.base_at(subject.places[0]), middle[:, position], rtol=1e-4, atol=1e-5)
        middle[:, position] = other[:, position]
        expected = net.head(net.blocks[1](middle)[:, -1])
    patch = EditBatch(subject.places[0], Frame.identity(8), torch.ones(1, 8))
    torch.testing.assert_close(respond(recording, [patch])[0], expected, rtol=1e-4, atol=1e-5)


def test_images_are_flattened_for_edits_and_shaped_back_for_the_network():
    net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(inplace=True), nn.Conv2d(2, 3, 2), nn.Flatten(), nn.Linear(12, 2))
    images = rand(0, 4, 1, 5, 5), rand(1, 4, 1, 5, 5)
    subject = ModuleSubject(net, ["0", "2"], images[0])
    assert [p.width for p in subject.places] == [18, 12]
    [recording] = record_pairs(subject, images)
    with torch.no_grad():
        base, source = (net[0](x) for x in images)
        torch.testing.assert_close(recording.base_at(subject.places[0]), base.flatten(1))
        base[:, 1] = source[:, 1]  # the second channel is the second half of the flat vector
        expected = net[1:](base)
    gains = (torch.arange(18) >= 9).float().unsqueeze(0)
    found = respond(recording, [EditBatch(subject.places[0], Frame.identity(18), gains)])[0]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("make", [MLPSubject, hooked_subject])
def test_networks_of_any_precision_are_recorded_in_it(make, dtype):
    net = mlp(4, 6, 3).to(dtype)
    [recording] = record_pairs(make(net), (rand(0, 3, 4), rand(1, 3, 4)))
    assert recording.base_outputs.dtype == recording.base_at(recording.subject.places[0]).dtype == dtype


# -- refusals -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ModuleSubject(Twice(), ["twice"], rand(0, 1, 3)), "'twice' runs more than once"),
        (lambda: ModuleSubject(Twice(), ["never", "once"], rand(0, 1, 3)), "never ran in the forward pass: never"),
        (lambda: ModuleSubject(Twice(), ["onec"], rand(0, 1, 3)), "submodule 'onec'.*'once'.*twice, never, once"),
        (lambda: ModuleSubject(Twice(), [], rand(0, 1, 3)), "at least one place"),
        (lambda: ModuleSubject(nn.Sequential(Named()), ["0"], rand(0, 1, 3)), "'0' outputs dict; .* a tensor"),
        (lambda: ModuleSubject(Named(), ["inner"], rand(0, 1, 3)), "returns dict; pass `output`"),
        (lambda: ModuleSubject(mlp(4, 6, 3), ["1"], rand(0, 1, 4), position=0), "position"),
        (lambda: read_tokens(Reader(), ["taps.0"], position=9), "position"),
        (lambda: MLPSubject(nn.Sequential(nn.Linear(3, 3))), "no hidden activation"),
        (
            lambda: MLPSubject(nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3), nn.Linear(3, 3))),
            "LayerNorm.*load_subject",
        ),
        (lambda: MLPSubject(Twice()), "nn.Sequential.*found Twice"),
        (lambda: MLPSubject(mlp(4, 6, 3)).place("layer7"), "Unknown place 'layer7'.*Choose from: layer1"),
    ],
)
def test_networks_that_cannot_be_looked_at_so_are_refused(make: Callable[[], object], message: str):
    with pytest.raises(PlotError, match=message):
        make()


def test_a_readout_turns_any_output_into_a_tensor():
    subject = ModuleSubject(Named(), ["inner"], rand(0, 1, 3), output=lambda out: out["scores"])
    assert subject.record(rand(0, 4, 3)).outputs.shape == (4, 2)


# -- the network is left alone --------------------------------------------------------------------------------


@pytest.mark.parametrize("fails", [False, True], ids=["normally", "after an error"])
def test_modes_gradients_and_hooks_are_as_before_afterwards(fails):
    net = Reader().train()
    net.blocks[0].eval()
    net.head.weight.requires_grad_(False)

    def state() -> list[object]:
        modes = {n: (m.training, len(m._forward_hooks)) for n, m in net.named_modules()}
        return [modes, {n: (p.requires_grad, p.grad) for n, p in net.named_parameters()}]

    before = state()
    subject = read_tokens(net, ["taps.0", "taps.1"], position=-1)
    [recording] = record_pairs(subject, (tokens(1, 6), tokens(2, 6)))
    patch = EditBatch(subject.places[0], Frame.identity(8), torch.ones(1, 8))
    if fails:
        net.head.register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            respond(recording, [patch])
    else:  # dropout is off while recording and resuming, though the module is training
        assert torch.equal(respond(recording, [patch]), respond(recording, [patch]))
    assert state() == before


# -- identity -------------------------------------------------------------------------------------------------


def test_identity_is_stable_and_tells_weights_apart():
    net = mlp(4, 6, 3)
    identity = MLPSubject(net).identity()
    assert identity == MLPSubject(net).identity() == MLPSubject(mlp(4, 6, 3)).identity()
    assert identity == hooked_subject(net).identity()
    assert identity != MLPSubject(mlp(4, 6, 3, seed=1)).identity()
    subject = MLPSubject(net)
    with torch.no_grad():
        net[0].weight[0, 0] += 1e-6
    assert subject.identity() != identity


def test_identity_takes_scalar_buffers_and_low_precision():
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))  # counts batches in a 0-d tensor
    subject = ModuleSubject(net, ["1"], rand(0, 1, 3))
    before = subject.identity()
    net[1].num_batches_tracked += 1
    assert subject.identity() != before
    half = ModuleSubject(mlp(3, 4, 2).bfloat16(), ["1"], rand(0, 1, 3), encode=lambda rows: rows.bfloat16())
    assert half.identity() != MLPSubject(mlp(3, 4, 2)).identity()
