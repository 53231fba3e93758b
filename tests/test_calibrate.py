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
from plot_ot.stages import calibrate as calibration
from plot_ot.stages.calibrate import (
    SCORES,
    TIES,
    Search,
    at_edge,
    calibrate,
    calibrate_coarsely,
    correct,
    correct_all,
    edge_of,
    pair_weights,
    scored,
    scored_all,
    scored_frames,
    top_k_weights,
    within_places,
)
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


def loss_by_hand(outputs: Tensor, bank: Bank, variable: str) -> float:
    """Cross entropy, half over the pairs that change the variable and half over those that do not."""
    loss = torch.nn.functional.cross_entropy(outputs, bank.labels[variable].long(), reduction="none").double()
    changed = bank.changed[variable]
    return float(loss[changed].mean() + loss[~changed].mean()) / 2


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


# -- the same choice for fewer runs ----------------------------------------------------------------------------


@pytest.mark.parametrize("ties", TIES)
@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("variable", ["p", "q"])
def test_a_lean_search_chooses_what_the_whole_grid_does(recording, candidates, variable, score, ties):
    for seed in range(40 if score == "paper" else 10):  # equal scores are more frequent there
        some = [random_candidate(c.family, 10 * seed + n, c.label) for n, c in enumerate(candidates)]
        search = Search((1, 2, 3, 20), (0.5, 1.0, 3.0, 2.0, 30.0), score, ties)
        whole, lean = (calibrate(recording, some, variable, search, READOUT, lean) for lean in (False, True))
        assert lean.candidate == whole.candidate
        for fact in ("K", "strength", "sites", "calibration_score"):
            assert lean.handle.chosen[fact] == pytest.approx(whole.handle.chosen[fact])
        known = lean.surface > -torch.inf
        torch.testing.assert_close(lean.surface[known], whole.surface[known], rtol=0, atol=1e-9)


@pytest.mark.parametrize(("ties", "others"), [("smallest", 2), ("natural", 2), ("loss", 6)])
def test_a_lean_search_of_a_flat_grid_runs_other_pairs_for_the_smallest_size(planted, monkeypatch, ties, others):
    """Where nothing moves the answer, no larger K can be better, and equal is not enough unless losses tell."""
    _, recording, candidate = planted
    ran = []

    def counted(r, tries, *rest):
        ran.append((len(r), sum(len(batches[0].gains) for batches in tries)))
        return scored_all(r, tries, *rest)

    monkeypatch.setattr(calibration, "scored_all", counted)
    search = Search(SIZES, (0.01, 0.02), ties=ties)
    found = calibrate(recording, [candidate], "p", search, READOUT, lean=True)
    changed = int(recording.bank.changed["p"].sum())
    first, *rest = ran
    assert first == (changed, 6)
    assert {pairs for pairs, _ in rest} == {len(recording) - changed}
    assert sum(variants for _, variants in rest) == others
    assert found.score == pytest.approx(0.5)
    assert found.handle.chosen["K"] == 1


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
    losses = {}
    for i, k in enumerate(SIZES):
        for j, strength in enumerate(STRENGTHS):
            if found.surface[0, i, j] > 1 - 1e-9:
                outputs, _ = one_at_a_time(recording, candidate, "p", k, strength)
                losses[k, strength] = loss_by_hand(outputs, recording.bank, "p")
    assert len(losses) > 3
    assert (found.handle.chosen["K"], found.handle.chosen["strength"]) == min(losses, key=losses.get)
    assert found.handle.chosen["strength"] != 0.8  # so the two rules differ here


@pytest.mark.parametrize(("ties", "chosen"), [("smallest", (1, 0.8)), ("natural", (1, 0.8)), ("loss", (3, 1.2))])
def test_each_tie_rule_asks_for_size_and_certainty_in_its_own_order(planted, ties, chosen):
    _, recording, candidate = planted
    search = Search((1, 2, 3), (1.4, 1.2, 0.8), ties=ties)
    losses = {}
    for k in search.sizes:
        for strength in search.strengths:
            outputs, _ = one_at_a_time(recording, candidate, "p", k, strength)
            losses[k, strength] = loss_by_hand(outputs, recording.bank, "p")
    assert min(losses, key=losses.get) == (3, 1.2)
    assert min((at for at in losses if at[0] == 1), key=losses.get) == (1, 1.2)
    found = calibrate(recording, [candidate], "p", search, READOUT)
    assert (found.surface > 1 - 1e-9).all()
    assert (found.handle.chosen["K"], found.handle.chosen["strength"]) == chosen


@pytest.mark.parametrize(
    ("strengths", "chosen"), [((0.8, 0.9, 1.0, 1.2), 1.0), ((0.8, 0.9, 1.05), 0.9), ((1.4, 1.3, 1.2), 1.2)]
)
def test_natural_ties_stop_at_the_sources_value_and_are_sure_there(planted, strengths, chosen):
    """A gain of 1.05 would be surer than one of 0.9, and makes states that the network has not by itself."""
    _, recording, candidate = planted
    weak, strong = (one_at_a_time(recording, candidate, "p", 1, s)[0] for s in (0.9, 1.05))
    assert loss_by_hand(strong, recording.bank, "p") < loss_by_hand(weak, recording.bank, "p")
    found = calibrate(recording, [candidate], "p", Search((1, 2), strengths, ties="natural"), READOUT)
    assert (found.handle.chosen["K"], found.handle.chosen["strength"]) == (1, chosen)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["better first", "better last"])
def test_ties_by_loss_are_compared_between_candidates(planted, order):
    """One neuron alone, and the same with a small share of others: all answers right, but not equally sure."""
    _, recording, candidate = planted
    scores = candidate.coupling.plan.copy()
    spread = scores**0.1
    other = Candidate(candidate.family, from_scores(("p", "q"), candidate.coupling.sites, spread, "truth"), "spread")
    pool = [candidate, other]
    given = [pool[k] for k in order]
    search = Search((2, 3), (1.2, 1.5), ties="loss")
    found = calibrate(recording, given, "p", search, READOUT)
    losses = {}
    for c, tried in enumerate(given):
        for i, k in enumerate(search.sizes):
            for j, strength in enumerate(search.strengths):
                if found.surface[c, i, j] > found.score - 1e-9:
                    outputs, _ = one_at_a_time(recording, tried, "p", k, strength)
                    losses[c, k, strength] = loss_by_hand(outputs, recording.bank, "p")
    assert len({c for c, _, _ in losses}) == 2  # both candidates are among the best
    best = min(losses, key=losses.get)
    assert (found.candidate, found.handle.chosen["K"], found.handle.chosen["strength"]) == best
    assert found.handle.chosen["support"] == given[best[0]].label


# -- whole frames ---------------------------------------------------------------------------------------------


def test_frames_of_many_places_and_ranks_are_scored_each_with_each_strength(recording):
    """Interleaved on purpose: what is batched together comes back in the order in which it was asked."""
    first, second = recording.subject.places
    tries = [
        (first, Frame.oblique(rand(1, 5, 2), rand(2, 5, 2))),
        (second, Frame.oblique(rand(3, 4, 2), rand(4, 4, 2))),
        (first, Frame.identity(5)),
        (first, Frame.orthonormal(orthonormal(5, 5, 2))),
        (first, Frame.oblique(rand(6, 5, 1), rand(7, 5, 1))),
        (second, Frame.oblique(rand(8, 4, 2), rand(9, 4, 2))),
        (first, Frame.oblique(rand(10, 5, 5), rand(11, 5, 5))),
        (second, Frame.identity(4)),
        (first, Frame.oblique(rand(12, 5, 2), rand(13, 5, 2))),
    ]
    strengths = (1.0, -2.0, 0.5, 4.0)
    weights = pair_weights(recording, "p", "balanced")
    found = scored_frames(recording, tries, strengths, "p", weights, READOUT)
    assert (found.shape, found.dtype) == ((len(tries), len(strengths)), torch.float64)
    assert found.unique().numel() > 8
    for n, (place, frame) in enumerate(tries):
        for j, strength in enumerate(strengths):
            edit = EditBatch(place, frame, torch.full((1, frame.rank), strength))
            expected = score_by_hand(respond(recording, [edit])[0], recording.bank, "p", "balanced")
            assert float(found[n, j]) == pytest.approx(expected, abs=1e-9), (n, strength)


# -- scores ---------------------------------------------------------------------------------------------------


def test_pair_weights_are_the_scores_definition(recording):
    changed = recording.bank.changed["p"]
    moved, still = int(changed.sum()), int((~changed).sum())
    assert moved != still  # or paper and balanced would agree
    expected = {
        "paper": [1 / len(changed)] * len(changed),
        "balanced": [0.5 / moved if c else 0.5 / still for c in changed],
        "sensitive": [1 / moved if c else 0.0 for c in changed],
    }
    for score, weights in expected.items():
        found = pair_weights(recording, "p", score)
        assert found.tolist() == pytest.approx(weights)
        assert float(found.sum()) == pytest.approx(1)
        assert found.dtype == torch.float64
    alone = recording.select(changed)
    assert pair_weights(alone, "p", "balanced").tolist() == pytest.approx([1 / moved] * moved)


def test_several_batches_of_edits_are_scored_as_each_alone(recording, monkeypatch):
    """Pairs in shards, batches of unequal numbers of variants: every score comes back to its own edit."""
    monkeypatch.setattr(type(recording.subject), "responses_per_batch", 16)
    first, second = recording.subject.places
    tries = [
        [EditBatch(first, Frame.identity(5), rand(1, 7, 5))],
        [EditBatch(second, Frame.identity(4), rand(2, 3, 4)), EditBatch(first, Frame.identity(5), rand(3, 3, 5))],
    ]
    weights = pair_weights(recording, "q", "paper")
    found = scored_all(recording, tries, "q", weights, READOUT)
    for edits, scores in zip(tries, found, strict=True):
        right = (respond(recording, edits).argmax(dim=-1) == recording.bank.labels["q"]).double()
        assert scores.tolist() == pytest.approx(right.mean(dim=1).tolist())
        assert torch.equal(scored(recording, edits, "q", weights, READOUT), scores)


def test_correctness_can_be_asked_for_another_variables_swap(recording, candidates):
    handle = calibrate(recording, candidates, "p", Search((2,), (1.0,)), READOUT).handle
    outputs = handle.apply(recording.subject, recording.bank.base, recording.bank.source)
    for named, label in ((None, "p"), ("p", "p"), ("q", "q")):
        expected = outputs.argmax(dim=1) == recording.bank.labels[label]
        assert torch.equal(correct(recording, handle, READOUT, named), expected)
    assert not torch.equal(recording.bank.labels["p"], recording.bank.labels["q"])


def test_a_handle_tells_how_it_was_chosen(recording, candidates):
    blocks_, spans, _ = candidates
    both = [blocks_, spans, replace(spans, label="blocks")]
    found = calibrate(recording, both, "q", Search((2, 50), (1.0, 2.0)), READOUT)
    chosen, at = found.handle.chosen, both[found.candidate]
    ranked = sorted(range(len(at.family)), key=lambda j: -at.coupling.row("q")[j])
    assert chosen["sites"] == [at.family.sites[j].name for j in ranked[: chosen["K"]]]
    assert (chosen["support"], chosen["transport"]) == (at.label, at.coupling.kind)
    assert (chosen["epsilon"], chosen["beta"]) == (at.coupling.epsilon, at.coupling.beta)
    best = [float(s.max()) for s in found.surface]
    assert chosen["by_support"] == pytest.approx({"blocks": max(best[0], best[2]), "spans": best[1]})
    assert (found.sizes, found.strengths) == ((2, 50), (1.0, 2.0))
    for c, candidate in enumerate(both):  # a K beyond the number of sites takes all of them
        assert len(candidate.family) < 50
        whole = calibrate(recording, [candidate], "q", Search((len(candidate.family),), (1.0, 2.0)), READOUT)
        torch.testing.assert_close(found.surface[c, 1], whole.surface[0, 0])


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


# -- the end of a grid --------------------------------------------------------------------------------------------

SMALLEST, LARGEST = "its strength 0.5 is the smallest that was tried", "its strength 8 is the largest that was tried"


@pytest.mark.parametrize(
    ("strengths", "chosen", "said"),
    [
        ((0.5, 1.0, 8.0), 0, [SMALLEST]),
        ((0.5, 1.0, 8.0), 1, []),
        ((0.5, 1.0, 8.0), 2, [LARGEST]),
        ((8.0, 0.5, 2.0), 0, [LARGEST]),  # in any order
        ((8.0, 0.5, 2.0), 1, [SMALLEST]),
        ((8.0, 0.5, 2.0), 2, []),
        ((1.0, 2.0), 0, []),  # taking the source as it is is never remarkable
        ((0.5, 1.0), 1, []),
        ((8.0,), 0, []),  # there was no choice
    ],
)
def test_a_strength_at_the_end_of_its_grid_is_told(strengths, chosen, said):
    assert edge_of(strengths, chosen) == said


@pytest.mark.parametrize(
    ("sizes", "chosen", "sites", "said"),
    [
        ((1, 2, 4), 2, 5, ["its 4 sites are the most that were tried"]),
        ((1, 2, 4), 2, 4, []),  # there are no more
        ((1, 2, 4), 1, 5, []),
        ((1, 2, 4), 0, 5, []),
        ((4,), 0, 5, []),
    ],
)
def test_a_size_at_the_end_of_its_grid_is_told(sizes, chosen, sites, said):
    assert at_edge(Search(sizes, (1.0, 2.0, 4.0)), chosen, 1, sites) == said
    assert at_edge(Search(sizes, (0.5, 8.0)), chosen, 1, sites) == [LARGEST, *said]


def test_a_calibrated_handle_tells_its_edges(recording, candidates):
    found = calibrate(recording, candidates, "p", Search((1,), (0.5, 8.0)), READOUT)
    assert len(found.handle.chosen["at_edge"]) == 1
    plain = calibrate(recording, candidates, "p", Search((1, 50), (1.0,)), READOUT)
    assert plain.handle.chosen["at_edge"] == []


# -- from coarse to fine, and handles that run together ---------------------------------------------------------------


def test_a_coarse_grid_has_the_ends_and_even_ratios():
    search = Search(tuple(range(1, 21)), tuple(float(x) for x in range(1, 25)), ties="loss")
    coarse = search.coarse()
    assert (coarse.sizes, coarse.ties) == ((1, 2, 4, 9, 20), "loss")
    assert (coarse.strengths[0], coarse.strengths[-1], len(coarse.strengths)) == (1.0, 24.0, 6)
    few = Search((1, 2), (0.0, 1.0))
    assert few.coarse() == few


def test_what_a_coarse_grid_misses_is_found_around_its_best_points(recording, candidates, monkeypatch):
    """Scores with one peak, between the points of the coarse grid and in the second candidate."""
    tried = []

    def peaked(_, some, *rest):
        search = rest[-1]
        sizes, strengths = (torch.tensor(x, dtype=torch.float64).log() for x in (search.sizes, search.strengths))
        tried.append(len(some) * sizes.numel() * strengths.numel())
        peak = 1 - 0.1 * ((sizes - np.log(3)).abs()[:, None] + (strengths - np.log(5)).abs()[None, :])
        return torch.stack([peak - (0.0 if c is candidates[1] else 0.3) for c in some])

    monkeypatch.setattr("plot_ot.stages.calibrate._surface", peaked)
    search = Search(tuple(range(1, 11)), tuple(float(x) for x in range(1, 21)))
    whole = calibrate(recording, candidates, "p", search, READOUT)
    everything = tried.pop()
    found = calibrate_coarsely(recording, candidates, "p", search, READOUT)
    facts = ("K", "strength", "support", "sites", "calibration_score")
    assert [found.handle.chosen[f] for f in facts] == [whole.handle.chosen[f] for f in facts]
    assert (found.handle.chosen["K"], found.handle.chosen["strength"]) == (3, 5.0)
    assert found.score == whole.score
    assert sum(tried) < everything
    assert found.surface.shape[1:] == (len(found.sizes), len(found.strengths))


def test_handles_that_run_together_are_as_right_as_each_alone(recording, candidates):
    searches = [Search((2,), (strength,)) for strength in (1.0, 3.0)]
    handles = [calibrate(recording, [candidates[0]], "p", search, READOUT).handle for search in searches]
    together = correct_all(recording, handles, READOUT)
    assert torch.equal(together, torch.stack([correct(recording, h, READOUT) for h in handles]))
    assert torch.equal(correct_all(recording, handles[:1], READOUT), together[:1])
