"""Calibration: the whole (candidate, K, λ) grid against one handle at a time, tie rules, scores and refusals."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from nets import Planted, hooked_subject, mlp, orthonormal, planted_neurons, rand
from plot_ot.abstract.banks import Bank
from plot_ot.abstract.causal_model import CausalModel
from plot_ot.edits import EditBatch, Frame, respond
from plot_ot.errors import PlotError
from plot_ot.signatures import as_readout
from plot_ot.sites import Site, SiteFamily, blocks, neurons
from plot_ot.stages.calibrate import Search, calibrate, correct, top_k_weights, within_places
from plot_ot.stages.problem import Candidate
from plot_ot.subjects import BankRecording, MLPSubject, Recording, record
from plot_ot.transport import Coupling, from_scores

READOUT = as_readout("softmax")
CAUSAL = CausalModel(
    ["a", "b", "c"], {"p": lambda a, b: (a + b) % 2, "q": lambda b, c: b * c % 2, "y": lambda p, q: (p + q) % 2}, "y"
)


@pytest.fixture(scope="module")
def recording() -> BankRecording:
    rows = torch.randint(0, 3, (2, 60, 3), generator=torch.Generator().manual_seed(0))
    net = mlp(3, 5, 4, 2)
    with torch.no_grad():
        for linear in net[::2]:
            linear.weight *= 3  # outputs of a wider range than a fresh network's, or no edit would change a label
        net[4].bias -= net(rows[0].float()).mean(dim=0)
    return record(MLPSubject(net), Bank.from_pairs(CAUSAL, *rows, name="calibration"))[0]


def overlapping(recording: Recording, seed: int) -> SiteFamily:
    """Spans of rotated directions that share some, at both places."""
    sites, frames = [], {}
    for place in recording.subject.places:
        frames[place.name] = Frame.orthonormal(orthonormal(seed, place.width, place.width), "pca")
        for start in range(place.width - 1):
            sites.append(Site(f"{place.name}<{start}>", place, (start, start + 1)))
    return SiteFamily(tuple(sites), frames)


def random_candidate(family: SiteFamily, seed: int, label: str) -> Candidate:
    scores = rand(seed, 2, len(family)).abs().numpy()
    return Candidate(family, from_scores(("p", "q"), [s.name for s in family.sites], scores, "random"), label)


@pytest.fixture(scope="module")
def candidates(recording: BankRecording) -> list[Candidate]:
    places = recording.subject.places
    return [
        random_candidate(blocks(2)(recording, places), 1, "blocks"),
        random_candidate(overlapping(recording, 3), 2, "spans"),
        random_candidate(neurons(recording, places[1:]), 3, "neurons"),
    ]


def one_at_a_time(
    recording: BankRecording, candidate: Candidate, variable: str, k: int, strength: float
) -> tuple[Tensor, int]:
    """(outputs, size) of one handle, its gains summed up site by site, by hooked full forwards."""
    subject = hooked_subject(recording.subject.net, recording.subject.encode)
    [again] = record(subject, recording.bank)
    row = candidate.coupling.row(variable)
    top = sorted(range(len(row)), key=lambda j: -row[j])[:k]
    gains = {name: torch.zeros(1, frame.rank) for name, frame in candidate.family.frames.items()}
    for j in top:
        site = candidate.family.sites[j]
        for direction in site.directions:
            gains[site.place.name][0, direction] += strength * row[j] / sum(row[t] for t in top)
    edits = [EditBatch(subject.place(n), candidate.family.frames[n], g) for n, g in gains.items()]
    return respond(again, edits)[0], sum(int((g != 0).sum()) for g in gains.values())


def score_by_hand(outputs: Tensor, bank: Bank, variable: str, score: str) -> float:
    right = (outputs.argmax(dim=1) == bank.labels[variable]).double()
    changed = bank.changed[variable]
    if score == "paper":
        return float(right.mean())
    return float(right[changed].mean() + right[~changed].mean()) / 2


@pytest.mark.parametrize("score", ["paper", "balanced"])
@pytest.mark.parametrize("variable", ["p", "q"])
def test_calibration_equals_trying_every_handle_alone(recording, candidates, variable, score):
    search = Search((1, 2, 3, 20), (0.5, 1.0, 3.0, 2.0), score)
    found = calibrate(recording, candidates, variable, search, READOUT)
    tried = {}
    for c, candidate in enumerate(candidates):
        for i, k in enumerate(search.sizes):
            for j, strength in enumerate(search.strengths):
                outputs, size = one_at_a_time(recording, candidate, variable, k, strength)
                tried[c, i, j] = score_by_hand(outputs, recording.bank, variable, score), outputs, size
    surface = torch.tensor([value for value, _, _ in tried.values()], dtype=torch.float64)
    assert surface.unique().numel() > 3  # the grid is not flat: there is something to choose
    torch.testing.assert_close(found.surface, surface.reshape(found.surface.shape), rtol=0, atol=1e-9)
    best = max(value for value, _, _ in tried.values())
    c, i, j = min(
        (at for at, (value, _, _) in tried.items() if value > best - 1e-9),
        key=lambda at: (search.sizes[at[1]], search.strengths[at[2]], at[0]),
    )
    assert found.candidate == c
    assert found.score == found.handle.chosen["calibration_score"] == pytest.approx(best, abs=1e-9)
    chosen = found.handle.chosen
    assert (chosen["K"], chosen["strength"]) == (min(search.sizes[i], len(candidates[c].family)), search.strengths[j])
    assert len(chosen["sites"]) == chosen["K"]
    _, outputs, size = tried[c, i, j]
    assert found.handle.size == size
    applied = found.handle.apply(recording.subject, recording.bank.base, recording.bank.source)
    torch.testing.assert_close(applied, outputs, rtol=1e-4, atol=1e-5)
    right = correct(recording, found.handle, READOUT)
    assert torch.equal(right, outputs.argmax(dim=1) == recording.bank.labels[variable])


# -- ties -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def planted() -> tuple[Planted, BankRecording, Candidate]:
    """One neuron per variable: many (K, λ) around (1, 1) give every answer right."""
    planted = planted_neurons()
    [recording] = record(planted.subject, *planted.banks(200))
    family = neurons(recording, [planted.subject.places[1]])
    names = [s.name for s in family.sites]
    scores = np.stack([[100.0 if n in planted.truth[v] else 1.0 for n in names] for v in ("p", "q")])
    scores += np.linspace(0, 0.1, len(names))
    return planted, recording, Candidate(family, from_scores(("p", "q"), names, scores, "truth"))


SIZES, STRENGTHS = (1, 2, 3), (1.2, 0.8, 1.0, 3.0, 0.2)


def test_ties_go_to_the_smallest_size_then_strength_then_first_candidate(planted):
    _, recording, candidate = planted
    found = calibrate(recording, [candidate, replace(candidate, label="again")], "p", Search(SIZES, STRENGTHS), READOUT)
    assert (found.surface > 1 - 1e-9).sum() > 6
    assert (found.score, found.candidate) == (pytest.approx(1), 0)
    assert (found.handle.chosen["K"], found.handle.chosen["strength"]) == (1, 0.8)


def test_ties_by_loss_go_to_the_surest_of_the_best(planted):
    _, recording, candidate = planted
    search = Search(SIZES, STRENGTHS, ties="loss")
    found = calibrate(recording, [candidate], "p", search, READOUT)
    weights = recording.bank.changed["p"].double()
    weights = weights / weights.sum() + (1 - weights) / (1 - weights).sum()
    losses = {}
    for i, k in enumerate(SIZES):
        for j, strength in enumerate(STRENGTHS):
            if found.surface[0, i, j] > 1 - 1e-9:
                outputs, _ = one_at_a_time(recording, candidate, "p", k, strength)
                loss = torch.nn.functional.cross_entropy(outputs, recording.bank.labels["p"].long(), reduction="none")
                losses[k, strength] = float(loss.double() @ weights)
    assert len(losses) > 3
    assert (found.handle.chosen["K"], found.handle.chosen["strength"]) == min(losses, key=losses.get)
    assert found.handle.chosen["strength"] != 0.8  # so the two rules differ here


# -- supports -------------------------------------------------------------------------------------------------


def test_within_places_narrows_the_support_but_not_the_coupling(recording, candidates):
    spans, single = candidates[1:]
    narrowed = within_places([spans, single])
    assert [c.label for c in narrowed] == ["spans", "neurons", "layer1", "layer2"]
    assert narrowed[:2] == [spans, single]
    for c in narrowed[2:]:
        at = [j for j, s in enumerate(spans.family.sites) if s.place.name == c.label]
        assert [s.name for s in c.family.sites] == list(c.coupling.sites) == [spans.family.sites[j].name for j in at]
        assert np.array_equal(c.coupling.plan, spans.coupling.plan[:, at])
        found = calibrate(recording, [c], "p", Search((2,), (1.0,)), READOUT)
        assert found.handle.places == [c.label]
        assert found.handle.chosen["support"] == c.label


@pytest.mark.parametrize(
    ("k", "expected"),
    [(1, [0, 1, 0, 0]), (2, [0, 0.6, 0, 0.4]), (3, [0.2 / 1.2, 0.6 / 1.2, 0, 0.4 / 1.2]), (4, [1 / 6, 0.5, 0, 1 / 3])],
)
def test_top_k_weights_keep_the_heaviest_sites_and_sum_to_one(k, expected):
    plan = np.array([[0.1, 0.3, 0.0, 0.2], [0.4, 0.0, 0.0, 0.0]])
    coupling = Coupling(("p", "q"), ("a", "b", "c", "d"), plan, 1 - plan, "eot")
    weights = top_k_weights(coupling, "p", k)
    assert weights.tolist() == pytest.approx(expected)
    assert float(weights.sum()) == pytest.approx(1)


def test_top_k_weights_of_a_massless_row_are_even():
    plan = np.zeros((1, 3))
    coupling = Coupling(("p",), ("a", "b", "c"), plan, np.array([[3.0, 1.0, 2.0]]), "uot")
    assert top_k_weights(coupling, "p", 2).tolist() == pytest.approx([0, 0.5, 0.5])  # the cheapest two


# -- refusals -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Search((1,), (1.0,), "papers"), "Unknown calibration score 'papers'.*'paper'.*paper, balanced"),
        (lambda: Search((1,), (1.0,), ties="largest"), "Unknown tie rule.*smallest, loss"),
        (lambda: Search((), (1.0,)), "K >= 1 and some λ"),
        (lambda: Search((0, 1), (1.0,)), "K >= 1 and some λ"),
        (lambda: Search((1,), ()), "K >= 1 and some λ"),
        (lambda: Search((2, 1), (1.0,)), "must rise"),
    ],
)
def test_searches_that_mean_nothing_are_refused(make, message):
    with pytest.raises(PlotError, match=message):
        make()


def test_a_bank_that_never_changes_the_variable_is_refused(recording, candidates):
    still = recording.select(~recording.bank.changed["p"])
    with pytest.raises(PlotError, match="no pair that changes 'p'"):
        calibrate(still, candidates, "p", Search((1,), (1.0,), "balanced"), READOUT)


def test_a_bank_of_changes_only_is_scored_by_sensitivity(recording, candidates):
    moved = recording.select(recording.bank.changed["p"])
    by = [calibrate(moved, candidates, "p", Search((1, 2), (1.0, 2.0), s), READOUT) for s in ("paper", "balanced")]
    torch.testing.assert_close(by[0].surface, by[1].surface)


@pytest.mark.parametrize("variable", ["r", "y"])
def test_a_variable_without_labels_is_refused(recording, candidates, variable):
    with pytest.raises(PlotError, match=rf"variable of bank 'calibration' '{variable}'.*p, q"):
        calibrate(recording, candidates, variable, Search((1,), (1.0,)), READOUT)
