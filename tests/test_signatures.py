"""Signatures against loops over hooked forward passes, and readouts that refuse labels they cannot read."""

from itertools import product

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from plot_ot.abstract.banks import Bank
from plot_ot.abstract.causal_model import CausalModel
from plot_ot.edits import Frame
from plot_ot.signatures import AGGREGATES, NORMALISATIONS, READOUTS, SignatureSpec, as_readout, measure_signatures
from plot_ot.sites import Site, SiteFamily, neurons
from plot_ot.subjects import MLPSubject, record
from refusals import assert_refused

CAUSAL = CausalModel(
    ["a", "b", "c", "d"],
    {"u": lambda a, b: (a + b) % 3, "v": lambda c, d: (c * d) % 3, "y": lambda u, v: (u + v) % 3},
    output="y",
)
POOL = torch.tensor(list(product(range(3), repeat=4)))
PAIRS = 24


class Sized(MLPSubject):
    """An MLP that resumes `size` responses at a time, and errs by `error` whenever it resumes."""

    size, error = 4096, 0.0
    responses_per_batch = property(lambda self: self.size)

    def resume(self, *args):
        return super().resume(*args) + self.error


def network():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))


def bank(pairs=PAIRS, **kwargs):
    rows = torch.randint(len(POOL), (2, pairs), generator=torch.Generator().manual_seed(1))
    return Bank.from_pairs(CAUSAL, POOL[rows[0]], POOL[rows[1]], **kwargs)


def recorded(net=None, fit=None, **attributes):
    subject = Sized(net or network())
    for name, value in attributes.items():
        setattr(subject, name, value)
    return record(subject, fit or bank())[0]


def menu(recording):
    """Coordinates, a block and a whole layer at the first place; directions of a rotated frame at the second."""
    first, second = recording.subject.places
    rotation = torch.linalg.qr(torch.randn(5, 5, generator=torch.Generator().manual_seed(2)))[0]
    sites = [Site(str(s), first, s) for s in [(0,), (3,), (1, 2, 4), tuple(range(6))]]
    sites += [Site(str(s), second, s) for s in [(0,), (1, 2), (2, 3, 4)]]
    return SiteFamily(tuple(sites), {first.name: Frame.identity(6), second.name: Frame.orthonormal(rotation)})


# -- the oracle: one hooked forward pass per pair and site, aggregated in NumPy ---------------------------------------


def swapped_output(net, family, site, base, source):
    """The network's output for one base row with the site's directions taken from one source row."""
    layer = net[1] if site.place.name == "layer1" else net[3]
    read = family.frames[site.place.name].read
    directions = (torch.eye(site.place.width) if read is None else read)[:, list(site.directions)]
    seen = []
    with layer.register_forward_hook(lambda _, __, out: seen.append(out)):
        net(source.float())

    def swap(_, __, out):
        return out + (seen[0] - out) @ directions @ directions.T

    with layer.register_forward_hook(swap):
        return net(base.float())


@torch.no_grad()
def oracle(fit, family, readout, spec, variables=("u", "v")):
    """(cost, cosine, |u|, |v|) from explicit effects of every pair."""
    net, one_hot = network(), torch.eye(3)
    centred = (lambda x: x - x.mean()) if spec.centre else (lambda x: x)

    def effect(after, before):
        return centred((after - before).double()).numpy()

    def abstract(name):
        answers = zip(fit.labels[name].tolist(), fit.base_answer.tolist(), strict=True)
        return [effect(one_hot[label], one_hot[answer]) for label, answer in answers]

    def neural(site):
        pairs = zip(fit.base, fit.source, strict=True)
        return [
            effect(readout.neural(swapped_output(net, family, site, b, s)), readout.neural(net(b.float())))
            for b, s in pairs
        ]

    def blocks(effects):
        """One vector per family of pairs."""
        grouped = [[e for e, g in zip(effects, fit.family.tolist(), strict=True) if g == f] for f in families]
        return [np.concatenate(g) if spec.aggregate == "stack" else np.mean(g, axis=0) for g in grouped]

    families = sorted(set(fit.family.tolist()))
    rows, columns = [blocks(abstract(v)) for v in variables], [blocks(neural(s)) for s in family.sites]
    norm = np.linalg.norm

    def distance(u, v):
        if spec.normalise == "unit_family":  # a variable without an effect in a family is unrelated to every site there
            return sum(norm(x / norm(x) - y / norm(y)) ** 2 if norm(x) else 2 for x, y in zip(u, v, strict=True))
        x, y = np.concatenate(u), np.concatenate(v)
        return norm(x - y) ** 2 if spec.normalise == "none" else norm(x / norm(x) - y / norm(y)) ** 2

    flat_rows, flat_columns = [np.concatenate(u) for u in rows], [np.concatenate(v) for v in columns]
    return (
        np.array([[distance(u, v) for v in columns] for u in rows]),
        np.array([[x @ y / norm(x) / norm(y) for y in flat_columns] for x in flat_rows]),
        np.array([norm(x) for x in flat_rows]),
        np.array([norm(y) for y in flat_columns]),
    )


def assert_measures(found, expected):
    for name, value in zip(("cost", "cosine", "row_norms", "column_norms"), expected, strict=True):
        np.testing.assert_allclose(getattr(found, name), value, rtol=1e-4, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("centre", [False, True])
@pytest.mark.parametrize("normalise", NORMALISATIONS)
@pytest.mark.parametrize("aggregate", AGGREGATES)
def test_signatures_equal_loops_over_hooked_forward_passes(aggregate, normalise, centre):
    recording, readout = recorded(), as_readout("logits" if centre else "softmax")
    family, spec = menu(recording), SignatureSpec(aggregate, normalise, centre)
    found = measure_signatures(recording, family, readout, spec)
    assert_measures(found, oracle(recording.bank, family, readout, spec))
    assert found.variables == ("u", "v")
    assert found.dead == []


@pytest.mark.parametrize("size", [1, 7, 2 * PAIRS, 3 * PAIRS + 1])
@pytest.mark.parametrize("aggregate", AGGREGATES)
def test_signatures_do_not_depend_on_how_the_work_is_cut(aggregate, size):
    recording, spec = recorded(size=size), SignatureSpec(aggregate, "unit_family")
    family, readout = menu(recording), as_readout("softmax")
    assert_measures(measure_signatures(recording, family, readout, spec), oracle(recording.bank, family, readout, spec))


def test_chosen_variables_are_the_rows_in_the_given_order():
    recording, readout, spec = recorded(), as_readout("softmax"), SignatureSpec()
    family = menu(recording)
    found = measure_signatures(recording, family, readout, spec, variables=["v"])
    assert_measures(found, oracle(recording.bank, family, readout, spec, variables=["v"]))


def test_families_of_the_banks_own_are_averaged_apart():
    fit = bank(family=torch.arange(PAIRS) % 3 * 2)  # families 0, 2, 4: 1 and 3 have no pair
    recording, readout, spec = recorded(fit=fit), as_readout("softmax"), SignatureSpec("family_mean", "unit_family")
    family = menu(recording)
    assert_measures(measure_signatures(recording, family, readout, spec), oracle(fit, family, readout, spec))


# -- dead sites and noise -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("outgoing", [0.0, 1e-7])
@pytest.mark.parametrize("aggregate", AGGREGATES)
def test_a_dead_neuron_is_reported_and_gains_nothing_by_normalising(aggregate, outgoing):
    net = network()
    with torch.no_grad():
        net[4].weight[:, 2] *= outgoing
        net[3] = nn.Tanh()  # the neuron itself varies; only nothing listens to it
    recording = recorded(net)
    family = neurons(recording, recording.subject.places)
    dead = [s.name for s in family.sites].index("layer2[2]")
    found = measure_signatures(recording, family, as_readout("softmax"), SignatureSpec(aggregate, "unit"))
    assert found.dead == [dead]
    assert found.column_norms[dead] < 1e-6
    np.testing.assert_allclose(found.cosine[:, dead], 0, atol=0.05)
    np.testing.assert_allclose(found.cost[:, dead], 2, atol=0.1)  # as far as an unrelated site
    assert (found.cost.min(dim=1).values < found.cost[:, dead] - 0.1).all()


def test_a_constant_error_of_resuming_cancels_in_effects_and_shows_as_noise():
    clean, noisy = recorded(), recorded(error=0.01)
    family, readout = menu(clean), as_readout("logits")
    expected, found = measure_signatures(clean, family, readout), measure_signatures(noisy, family, readout)
    np.testing.assert_allclose(found.cost, expected.cost, rtol=1e-4)
    assert found.noise == pytest.approx(0.01 * (PAIRS * 3) ** 0.5, rel=1e-3)
    assert expected.noise < 1e-5


def test_sites_within_ten_times_the_noise_count_as_dead():
    family, readout = menu(recorded()), as_readout("logits")
    norms = measure_signatures(recorded(), family, readout).column_norms
    weakest, second = norms.sort().values[:2].tolist()
    error = (weakest * second) ** 0.5 / (10 * (PAIRS * 3) ** 0.5)  # ten times the noise lies between the two
    found = measure_signatures(recorded(error=error), family, readout)
    assert found.dead == [int(norms.argmin())]
    assert measure_signatures(recorded(error=error), family, readout, SignatureSpec(floor=0.0)).dead == []


@pytest.mark.parametrize("aggregate", AGGREGATES)
def test_repeating_every_pair_does_not_change_which_sites_are_dead(aggregate):
    once, spec, readout = bank(), SignatureSpec(aggregate), as_readout("logits")
    often = once.select(torch.arange(PAIRS).repeat(50))
    family = menu(recorded())
    norms = measure_signatures(recorded(fit=once), family, readout, spec).column_norms
    error = 0.5 * float(norms.min()) / (10 * (PAIRS * 3) ** 0.5)
    few, many = (measure_signatures(recorded(fit=fit, error=error), family, readout, spec) for fit in (once, often))
    assert few.dead == []
    assert many.dead == []
    assert many.noise / float(many.column_norms.max()) == pytest.approx(
        few.noise / float(few.column_norms.max()), rel=1e-3
    )


# -- refusals -----------------------------------------------------------------------------------------------------


def silent(fit):
    recording = recorded(fit=fit)
    return measure_signatures(recording, menu(recording), as_readout("softmax"))


def same_u():
    """A bank whose sources never change u."""
    fit = bank(60)
    return fit.select(~fit.changed["u"])


def overflowing():
    recording = recorded(error=torch.nan)
    return measure_signatures(recording, menu(recording), as_readout("softmax"))


def unknown_variable():
    recording = recorded()
    return measure_signatures(recording, menu(recording), as_readout("softmax"), variables=["u", "w"])


ANSWERS = torch.tensor([0, 1, 3])
REFUSED = {
    "a variable that never changes the answer": (lambda: silent(same_u()), ["Swapping u never changes", "fit pairs"]),
    "an unknown variable": (unknown_variable, ["'w'", "u, v"]),
    "a swap that overflows": (overflowing, ["layer1", "NaN", "pair 0"]),
    "unknown aggregation": (lambda: SignatureSpec(aggregate="mean"), ["aggregation 'mean'", *AGGREGATES]),
    "unknown normalisation": (lambda: SignatureSpec(normalise="l2"), ["normalisation 'l2'", *NORMALISATIONS]),
    "unknown readout": (lambda: as_readout("softmx"), ["readout 'softmx'", "Did you mean 'softmax'", *READOUTS]),
    "label beyond the outputs": (lambda: as_readout("softmax").abstract(ANSWERS, 3), ["0..2", "[0, 1, 3]"]),
    "negative label": (lambda: as_readout("logits").abstract(ANSWERS - 1, 3), ["0..2", "[-1, 0, 2]"]),
    "more bits than outputs": (lambda: as_readout("sigmoid").abstract(torch.ones(4, 5), 3), ["5 bits", "3 outputs"]),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals_name_what_was_found_and_expected(case):
    assert_refused(*REFUSED[case])


# -- readouts -----------------------------------------------------------------------------------------------------


def test_a_readout_of_your_own_is_taken_as_it_is():
    assert as_readout(READOUTS["logits"]) is READOUTS["logits"] is as_readout("logits")


@pytest.mark.parametrize("classes", [2, 3])
@pytest.mark.parametrize("name", ["softmax", "logits"])
def test_an_answer_is_correct_when_its_label_has_the_largest_output(name, classes):
    outputs = torch.randn(4, 9, classes, generator=torch.Generator().manual_seed(3))
    labels = torch.arange(9) % classes
    expected = [
        [max(range(classes), key=row.__getitem__) == t % classes for t, row in enumerate(v)] for v in outputs.tolist()
    ]
    assert as_readout(name).correct(outputs, labels).tolist() == expected
    if classes == 2:
        assert as_readout(name).correct(outputs, labels.bool()).tolist() == expected


def test_a_multi_bit_answer_is_correct_only_with_every_bit():
    labels = torch.tensor([[1, 0, 1], [0, 0, 1]])
    outputs = torch.tensor([[[2.0, -1, 3], [-1, -1, 4]], [[2.0, 1, 3], [-1, -1, -4]], [[0.0, -1, 3], [1, -1, 4]]])
    expected = [[True, True], [False, False], [True, False]]  # a logit of exactly 0 is a probability of 1/2: bit 1
    assert as_readout("sigmoid").correct(outputs, labels).tolist() == expected
    assert as_readout("sigmoid").correct(outputs, labels.bool()).tolist() == expected


def test_a_single_bit_answer_may_be_a_plain_vector_of_labels():
    readout, labels = as_readout("sigmoid"), torch.tensor([True, False, True])
    assert readout.abstract(labels, 1).tolist() == [[1.0], [0.0], [1.0]]
    outputs = torch.tensor([[[3.0], [-2.0], [-1.0]]])
    assert readout.correct(outputs, labels).tolist() == [[True, True, False]]


def test_features_of_both_sides_share_one_space():
    outputs = torch.tensor([[100.0, 0.0, 0.0], [0.0, 0.0, 100.0]])
    certain = as_readout("softmax")
    torch.testing.assert_close(certain.neural(outputs), certain.abstract(torch.tensor([0, 2]), 3))
    bits = torch.tensor([[1, 0], [0, 1]])
    torch.testing.assert_close(
        as_readout("sigmoid").neural(200.0 * bits - 100), as_readout("sigmoid").abstract(bits, 2)
    )


def test_losses_are_torchs_cross_entropies_per_response():
    outputs = torch.randn(2, 7, 3, generator=torch.Generator().manual_seed(4))
    labels, bits = torch.arange(7) % 3, torch.arange(21).reshape(7, 3) % 2
    for variant in range(2):
        expected = F.cross_entropy(outputs[variant], labels, reduction="none")
        torch.testing.assert_close(as_readout("softmax").loss(outputs, labels)[variant], expected)
        by_bit = F.binary_cross_entropy_with_logits(outputs[variant], bits.float(), reduction="none")
        torch.testing.assert_close(as_readout("sigmoid").loss(outputs, bits)[variant], by_bit.mean(dim=1))
