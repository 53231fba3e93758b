"""Linearised signatures: against torch.func's derivatives, exact signatures of linear networks, and HEQ."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from nets import orthonormal
from plot_ot.abstract.banks import Bank
from plot_ot.abstract.causal_model import CausalModel
from plot_ot.edits import Frame
from plot_ot.errors import PlotError, PlotWarning
from plot_ot.signatures import AGGREGATES, NORMALISATIONS, SignatureSpec, as_readout, jacobian, measure_signatures
from plot_ot.signatures.jacobian import jacobian_signatures, jacobians
from plot_ot.sites import Site, SiteFamily, blocks, neurons, whole_places
from plot_ot.stages.prefilter import rank_correlation
from plot_ot.subjects import GRUSubject, MLPSubject, ModuleSubject, record, record_pairs
from plot_ot.subjects.gru import GRUNet
from plot_ot.tasks import heq

CAUSAL = CausalModel(
    ["a", "b", "c", "d"],
    {"u": lambda a, b: (a + b) % 3, "v": lambda c, d: (c * d) % 3, "y": lambda u, v: (u + v) % 3},
    output="y",
)
POOL = torch.cartesian_prod(*[torch.arange(3)] * 4)
PAIRS = 24


def seeded(make):
    with torch.random.fork_rng():
        torch.manual_seed(1000)
        return make()


def network(activation=nn.Tanh):
    return seeded(lambda: nn.Sequential(nn.Linear(4, 6), activation(), nn.Linear(6, 5), activation(), nn.Linear(5, 3)))


def recorded(net, pairs=PAIRS):
    rows = torch.randint(len(POOL), (2, pairs), generator=torch.Generator().manual_seed(1))
    return record(MLPSubject(net), Bank.from_pairs(CAUSAL, POOL[rows[0]], POOL[rows[1]]))[0]


def mixed_menu(recording):
    """Single coordinates, spans and scattered sets; an oblique frame at the second place."""
    first, second = recording.subject.places
    sites = [Site(f"a{s}", first, s) for s in [(0,), (3,), (1, 2), (1, 4)]]
    sites += [Site(f"b{s}", second, s) for s in [(0,), (1, 2), (0, 1)]]
    frame = Frame.oblique(orthonormal(0, 5, 5), torch.randn(5, 5, generator=torch.Generator().manual_seed(3)))
    return SiteFamily(tuple(sites), {first.name: Frame.identity(6), second.name: frame})


def scattered(recording):
    """Spans only at the first place, scattered sets only at the second: each its own way of summing."""
    first, second = recording.subject.places
    sites = [Site(f"a{s}", first, s) for s in [(0,), (0, 1), (2, 3), (3, 4)]]
    sites += [Site(f"b{s}", second, s) for s in [(0, 3), (4, 1)]]
    return SiteFamily(tuple(sites), {first.name: Frame.identity(6), second.name: Frame.identity(5)})


# -- derivatives --------------------------------------------------------------------------------------------------


def assert_derivatives(recording, places, tail):
    """Against jacrev of `tail(place, row, activation)`, the network from a place on."""
    rows = recording.base_rows.unique()
    outputs, found = jacobians(recording, rows, places)
    torch.testing.assert_close(outputs, recording.store.outputs[rows], rtol=1e-5, atol=1e-5)
    for place in places:
        for k, row in enumerate(rows.tolist()):
            a = recording.store.activations[place.name][row]
            expected = torch.func.jacrev(lambda x, p=place, r=row: tail(p, r, x))(a)
            torch.testing.assert_close(found[place.name][k], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("fast", [True, False])
def test_derivatives_of_a_perceptron_at_all_places_at_once(fast):
    net = network()
    subject = MLPSubject(net) if fast else ModuleSubject(net, {"layer1": "1", "layer2": "3"}, torch.zeros(1, 4))
    recording = record_pairs(subject, (POOL[:7], POOL[7:14]))[0]
    after = {"layer1": net[2:], "layer2": net[4:]}
    assert_derivatives(recording, subject.places, lambda place, _, a: after[place.name](a))
    assert all(p.grad is None for p in net.parameters())


def test_derivatives_of_a_recurrent_network():
    net, steps = seeded(lambda: GRUNet(2, 6)), 4
    subject = GRUSubject(net, steps)
    rows = torch.randint(0, 2, (2, 5, 2 * steps), generator=torch.Generator().manual_seed(4))
    recording = record_pairs(subject, (rows[0], rows[1]))[0]

    def tail(place, row, a):
        x = recording.store.inputs[row].unflatten(0, (2, steps)).T.float()
        h, read = a, [net.step_head(a)]
        for t in range(place.position + 1, steps):
            h = net.cell(x[t], h)
            read.append(net.step_head(h))
        earlier = recording.store.outputs[row, steps - place.position + 1 :]
        return torch.cat([net.last_head(h), *reversed(read), earlier])

    assert_derivatives(recording, subject.places, tail)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_derivatives_of_a_decoder_at_several_tokens_and_inside_blocks(family):
    """Against central differences of the whole hooked model, in directions of our choice."""
    decoders = pytest.importorskip("decoders")
    model = decoders.network(family)
    kinds = ("block_output", "mlp_output", "head_output")
    recording = decoders.recorded(model, kinds=kinds, positions=decoders.POSITIONS)
    places = [p for p in recording.subject.places if p.layer in (0, 2)]
    rows = recording.base_rows[:3]
    _, found = jacobians(recording, rows, places)
    for k, place in enumerate(places[::5]):
        step = 1e-2 * torch.randn(place.width, generator=torch.Generator().manual_seed(k))
        for n, row in enumerate(rows.tolist()):
            a, inputs = recording.store.activations[place.name][row], recording.store.inputs[row]
            with torch.no_grad():
                up, down = (
                    decoders.as_answers(
                        decoders.plain(model, inputs, {place.name: lambda _, x=x: x}, decoders.where(inputs))
                    )
                    for x in (a + step, a - step)
                )
            np.testing.assert_allclose(found[place.name][n] @ (2 * step), up - down, rtol=0.02, atol=2e-4)


# -- signatures ---------------------------------------------------------------------------------------------------


def assert_same(found, expected, rtol=1e-4):
    for name in ("cost", "cosine", "row_norms", "column_norms"):
        np.testing.assert_allclose(getattr(found, name), getattr(expected, name), rtol=rtol, atol=1e-5, err_msg=name)


@pytest.mark.filterwarnings("ignore:.*linearised signatures")
@pytest.mark.parametrize("menu", [mixed_menu, scattered, lambda r: whole_places(r, r.subject.places)])
@pytest.mark.parametrize("normalise", NORMALISATIONS)
@pytest.mark.parametrize("aggregate", AGGREGATES)
def test_a_linear_networks_linearised_signatures_are_its_exact_ones(aggregate, normalise, menu):
    """Also with a nonlinear φ on top: only the network is linearised."""
    recording = recorded(network(nn.Identity))
    for readout, centre in (("softmax", False), ("logits", True)):
        spec, family = SignatureSpec(aggregate, normalise, centre), menu(recording)
        found = jacobian_signatures(recording, family, as_readout(readout), spec)
        assert_same(found, measure_signatures(recording, family, as_readout(readout), spec))
        assert not found.exact.any()


@pytest.mark.parametrize("size", [1, 40, 1 << 20])
def test_how_the_work_is_cut_changes_nothing(size, monkeypatch):
    recording, readout = recorded(network()), as_readout("softmax")
    family = mixed_menu(recording)
    whole = jacobian_signatures(recording, family, readout)
    monkeypatch.setattr(jacobian, "EFFECTS_AT_ONCE", size)
    monkeypatch.setattr(jacobian, "bases_at_once", lambda _: min(size, 5))
    assert_same(jacobian_signatures(recording, family, readout), whole, rtol=1e-6)


def test_small_swaps_are_predicted_to_first_order():
    """Between close inputs the error falls with the square of their distance."""
    net = network()
    generator = torch.Generator().manual_seed(5)
    base, away = torch.randn(2, 40, 4, generator=generator)
    errors = []
    for distance in (0.2, 0.02):
        bank = Bank.from_pairs(CAUSAL, POOL[:40], POOL[41:81])
        shown = torch.zeros(81, 4)
        shown[:40], shown[41:81] = base, base + distance * away

        def encode(rows, shown=shown):
            code = (rows * torch.tensor([27, 9, 3, 1])).sum(dim=1)
            return shown[code]

        recording = record(MLPSubject(net, encode=encode), bank)[0]
        family, readout = neurons(recording, recording.subject.places), as_readout("logits")
        norms = [f(recording, family, readout).column_norms for f in (measure_signatures, jacobian_signatures)]
        errors.append(float(((norms[0] - norms[1]).abs() / norms[0].clamp(min=1e-9)).max()))
    assert errors[1] < 0.2 * errors[0]
    assert errors[1] < 0.02


def test_on_hierarchical_equality_linearised_costs_rank_neurons_as_exact_ones_do():
    backbone = heq.load_backbone(1003, Path(__file__).parent / "data")
    splits, _ = heq.draw_splits(backbone)
    [fit] = record(backbone.subject(), splits.fit)
    family, readout = neurons(fit, fit.subject.places), as_readout("softmax")
    exact, linear = measure_signatures(fit, family, readout), jacobian_signatures(fit, family, readout)
    assert min(map(rank_correlation, linear.cost, exact.cost)) >= 0.97


def language_model():
    """A random decoder and the recording of a bank whose variable is its answer."""
    decoders = pytest.importorskip("decoders")
    subject = decoders.recorded(decoders.network("llama")).subject
    causal = CausalModel(["x"], {"p": lambda x: x % 3, "y": lambda p: p}, "y")
    return record(subject, Bank.from_pairs(causal, decoders.BASE, decoders.SOURCE))[0]


@pytest.mark.parametrize("room", [1, 2, 100])
def test_every_neuron_of_a_language_model_is_a_site_and_passes_serve_all_layers_within_memory(room, monkeypatch):
    recording, readout = language_model(), as_readout("logits")
    subject = recording.subject
    family = neurons(recording, subject.places)
    assert len(family) == sum(p.width for p in subject.places)
    exact, expected = measure_signatures(recording, family, readout), jacobian_signatures(recording, family, readout)
    subject.memory = 4 * room * 5 * sum(sum(w.shape) for w in subject.weights().values() if w.ndim == 2)
    monkeypatch.setattr("plot_ot.subjects.decoder.subject.checkpoint", None)  # no graph is too large to be kept
    runs, resume = [], subject.resume

    def counted(store, rows, start, *rest):
        runs.append((start.layer, len(rows)))
        return resume(store, rows, start, *rest)

    monkeypatch.setattr(subject, "resume", counted)
    found = jacobian_signatures(recording, family, readout)
    bases = len(recording.base_rows.unique())
    assert runs == [(0, min(room, bases - at)) for at in range(0, bases, room)]
    assert_same(found, expected)
    last = family.at(subject.places[-1])  # only the final norm follows
    assert rank_correlation(found.column_norms[last], exact.column_norms[last]) > 0.95


def test_the_graph_of_a_batch_stays_within_a_quarter_of_the_memory():
    subject = recorded(network()).subject
    per_base = 5 * (10 + 11 + 8)
    subject.memory = 4 * 7 * per_base
    assert jacobian.bases_at_once(subject) == 7


# -- limits -------------------------------------------------------------------------------------------------------


def test_whole_places_are_warned_about():
    recording = recorded(network())
    with pytest.warns(PlotWarning, match="2 of 2 sites swap half of a place or more"):
        jacobian_signatures(recording, whole_places(recording, recording.subject.places), as_readout("softmax"))
    assert jacobian.coarse(blocks(2)(recording, recording.subject.places)) == []


def test_sites_of_several_places_are_refused():
    recording = recorded(network())
    first, second = recording.subject.places
    family = mixed_menu(recording)
    family = SiteFamily((*family.sites, Site("both", first, (0,), ((second, (1,)),))), family.frames)
    with pytest.raises(PlotError, match="Site both spans several places"):
        jacobian_signatures(recording, family, as_readout("softmax"))


def test_infinite_derivatives_are_named():
    net = network()
    recording = recorded(net)
    with torch.no_grad():
        net[4].weight[0, 0] = torch.inf
    with pytest.raises(PlotError, match="layer"):
        jacobian_signatures(recording, neurons(recording, recording.subject.places), as_readout("softmax"))
