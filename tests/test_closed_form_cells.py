"""Closed forms cell by cell: means counted one input at a time, and the stage's choice by trying every edit alone."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from nets import mlp, planted_plane, rand
from plot_ot.abstract.banks import Bank
from plot_ot.abstract.causal_model import CausalModel
from plot_ot.edits import respond
from plot_ot.errors import PlotError
from plot_ot.signatures import as_readout
from plot_ot.stages.closed_form import (
    RULES,
    ClosedForm,
    barycentric,
    cell_shift,
    cell_variables,
    contrastive,
    finest_shift,
    leading,
)
from plot_ot.stages.problem import Problem, State
from plot_ot.stages.ridge import Differences
from plot_ot.subjects import BankRecording, MLPSubject, record

READOUT = as_readout("softmax")
CAUSAL = CausalModel(
    ["a", "b", "c", "d"],
    {
        "p": lambda a, b: (a + b) % 3,
        "q": lambda b, c: (b + c) % 2,
        "r": lambda d: d,
        "pair": lambda c, d: torch.stack([c, d], dim=1),
        "y": lambda p, q, r, pair: (p + q + r + pair[:, 0]) % 2,
    },
    "y",
)


def recorded(pairs: int = 60, seed: int = 0) -> BankRecording:
    rows = torch.randint(0, 3, (2, pairs, 4), generator=torch.Generator().manual_seed(seed))
    bank = Bank.from_pairs(CAUSAL, *rows, variables=["p", "q", "r", "pair"])
    return record(MLPSubject(mlp(4, 6, 5, 2)), bank)[0]


@pytest.fixture(scope="module")
def fit() -> BankRecording:
    return recorded()


# -- cells ----------------------------------------------------------------------------------------------------


def test_cells_are_by_nothing_by_siblings_or_by_the_whole_frontier(fit):
    assert [cell_variables(fit, "p", rule) for rule in ("alone", "siblings", "frontier")] == [
        (),
        ("q",),
        ("q", "r", "pair"),
    ]


def one_by_one(fit: BankRecording, layer: int, variable: str, others: Sequence[str]) -> dict[int, Tensor]:
    """μ(z_s, f_b) - μ(z_b, f_b) of every pair whose cells occur, from a plain list of inputs and their states."""
    inputs = [list(row) for row in {tuple(x) for x in torch.cat([fit.bank.base, fit.bank.source]).tolist()}]
    states = fit.subject.net[: 2 * layer](torch.tensor(inputs).float()).double().detach()

    def values(row: Sequence[int]) -> tuple[object, tuple[object, ...]]:
        run = CAUSAL.run(torch.tensor([list(row)]))
        return run[variable][0].tolist(), tuple(str(run[o][0].tolist()) for o in others)

    cells: dict[str, list[Tensor]] = {}
    for row, state in zip(inputs, states, strict=True):
        cells.setdefault(str(values(row)), []).append(state)
    shifts = {}
    for t, (base, source) in enumerate(zip(fit.bank.base.tolist(), fit.bank.source.tolist(), strict=True)):
        (z_base, f_base), (z_source, _) = values(base), values(source)
        if (there := str((z_source, f_base))) in cells:
            here = cells[str((z_base, f_base))]
            shifts[t] = sum(cells[there]) / len(cells[there]) - sum(here) / len(here)
    return shifts


@pytest.mark.parametrize(
    ("variable", "others"),
    [("p", ()), ("p", ("q",)), ("p", ("q", "r")), ("p", ("r", "pair")), ("pair", ("p",)), ("q", ("pair", "p", "r"))],
    ids=str,
)
@pytest.mark.parametrize("layer", [1, 2])
def test_every_shift_is_to_the_sources_value_among_inputs_with_the_bases_frontier(fit, layer, variable, others):
    known, shift = cell_shift(fit, fit.subject.places[layer - 1], variable, others)
    expected = one_by_one(fit, layer, variable, others)
    assert known.tolist() == sorted(expected)
    torch.testing.assert_close(shift, torch.stack([expected[t] for t in known.tolist()]), rtol=1e-5, atol=1e-6)


def test_the_shift_differs_from_one_to_the_sources_own_cell(fit):
    """So that taking the source's frontier for the base's would show."""
    known, shift = cell_shift(fit, fit.subject.places[0], "p", ("q", "r", "pair"))
    assert 5 < len(known) < len(fit)
    at_base, at_source = CAUSAL.run(fit.bank.base), CAUSAL.run(fit.bank.source)
    differs = (at_base["q"] != at_source["q"]) | (at_base["r"] != at_source["r"])
    assert differs[known].sum() > 3
    unmoved = ~fit.bank.changed["p"][known]
    assert (shift[unmoved] == 0).all()
    assert (shift[~unmoved].abs().amax(dim=1) > 1e-3).all()


def test_without_an_input_in_the_swapped_cell_there_is_no_shift():
    """Whether that cell would come before or after those that occur."""
    low, high = torch.tensor([[0, 0, 0, 0]]), torch.tensor([[1, 0, 1, 1]])
    late = torch.tensor([[0, 0, 1, 1]]), torch.tensor([[2, 0, 0, 0]])
    for base, source in ((high, low), late, (low, high)):
        [fit] = record(MLPSubject(mlp(4, 6, 2)), Bank.from_pairs(CAUSAL, base, source, variables=["p"]))
        assert cell_shift(fit, fit.subject.places[0], "p", ("q", "r")) is None
    known, _ = cell_shift(fit, fit.subject.places[0], "p", ())
    assert known.tolist() == [0]


def test_the_finest_shift_is_by_the_most_variables_whose_cells_are_known(fit):
    place, rules = fit.subject.places[0], ((), ("q",), ("q", "r", "pair"))
    shifts = [cell_shift(fit, place, "p", others) for others in rules]
    shares = [len(known) / len(fit) for known, _ in shifts]
    assert shares == sorted(shares, reverse=True)
    for least in (0.0, *shares, 1.1):
        enough = [k for k, share in enumerate(shares) if share >= least]
        known, shift = shifts[max(enough, default=0)]  # the coarsest, where none is enough
        found, moved = finest_shift(fit, place, "p", least)
        assert torch.equal(found, known)
        assert torch.equal(moved, shift)


# -- maps -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ridge", [1e-3, 0.5])
def test_the_map_solves_the_ridge_regressions_normal_equations(ridge):
    x, y = rand(1, 40, 4, dtype=torch.float64), rand(2, 40, 4, dtype=torch.float64)
    frame = barycentric(x, y, ridge)
    m = (frame.write @ frame.read.T).double()
    mean_square = (x**2).sum(dim=0).mean()
    torch.testing.assert_close(m @ (x.T @ x + ridge * mean_square * torch.eye(4)), y.T @ x, rtol=1e-4, atol=1e-3)
    assert (frame.kind, frame.rank, frame.read.dtype) == ("barycentric", 4, torch.get_default_dtype())
    torch.testing.assert_close(frame.read.T @ frame.read, torch.eye(4), rtol=0, atol=1e-5)
    norms = frame.write.norm(dim=0)
    assert (norms[:-1] >= norms[1:]).all()  # the strongest direction first


def test_directions_a_thousand_times_weaker_are_left_out():
    x = torch.eye(3, dtype=torch.float64)
    for weak, rank in ((1.1e-3, 2), (0.9e-3, 1)):
        frame = barycentric(x, torch.diag(torch.tensor([2.0, 2 * weak, 0.0]).double()), 1e-9)
        assert frame.rank == rank
    assert barycentric(x, torch.zeros(3, 3).double(), 1e-9) is None


def test_the_leading_direction_is_the_best_map_of_rank_one():
    x, y = rand(1, 40, 4, dtype=torch.float64), rand(2, 40, 4, dtype=torch.float64)
    frame = barycentric(x, y, 0.1)
    one = leading(frame)
    u, s, vt = torch.linalg.svd(frame.write @ frame.read.T)
    torch.testing.assert_close(one.write @ one.read.T, s[0] * u[:, :1] @ vt[:1], rtol=1e-4, atol=1e-5)
    assert (one.rank, one.kind) == (1, "discriminant")


def test_equal_states_leave_nothing_to_regress_on():
    with pytest.raises(PlotError, match="nothing to regress on"):
        barycentric(torch.zeros(5, 2).double(), torch.ones(5, 2).double(), 0.1)


def test_contrastive_directions_are_those_that_changing_pairs_move_beyond_others():
    """Unequal numbers of pairs, and a direction that all pairs move: means are compared, not sums."""
    difference = 0.01 * rand(3, 50, 4, dtype=torch.float64)
    changed = torch.arange(50) < 10
    difference[:, 0] += 5 * rand(4, 50, dtype=torch.float64).sign()
    difference[changed, 1] += 2
    difference[changed, 2] += rand(5, 10, dtype=torch.float64).sign()
    found = contrastive(difference, changed, (1, 2, 3, 4, 9))
    assert [k for k, _ in found] == [1, 2, 3]  # as many as the width would patch the whole place
    assert [f.rank for _, f in found] == [1, 2, 3]
    assert {f.kind for _, f in found} == {"contrastive"}
    moved, kept = (sum(torch.outer(x, x) for x in difference[some]) / int(some.sum()) for some in (changed, ~changed))
    values, vectors = torch.linalg.eigh(moved - kept)
    order = values.argsort(descending=True)
    assert int(vectors[:, order[0]].abs().argmax()) == 1  # though all pairs move direction 0 more
    for k, frame in found:
        top = vectors[:, order[:k]].float()
        torch.testing.assert_close(frame.read @ frame.read.T, top @ top.T, rtol=0, atol=1e-5)
    for some in (torch.zeros(50).bool(), torch.ones(50).bool()):
        assert contrastive(difference, some, (1,)) == []


# -- the stage ------------------------------------------------------------------------------------------------


def test_candidates_are_every_form_under_every_rule_that_names_other_cells(fit):
    place = fit.subject.places[0]
    stage = ClosedForm(ridges=(0.1, 1.0), sizes=(1, 2))
    found = stage.candidates(fit, place, "p")
    forms = ["barycentric 0.1", "discriminant 0.1", "barycentric 1", "discriminant 1"]
    expected = [("contrastive 1", "alone"), ("contrastive 2", "alone")]
    expected += [(form, rule) for rule in ("alone", "siblings", "frontier") for form in forms]
    assert [(c.name, c.rule) for c in found] == expected
    assert {c.place for c in found} == {place}
    by = {(c.name, c.rule): c.frame for c in found}
    difference = fit.source_at(place).double() - fit.base_at(place).double()
    known, shift = cell_shift(fit, place, "p", ("q",))
    own = barycentric(difference[known], shift, 0.1)
    frame = by["barycentric 0.1", "siblings"]
    torch.testing.assert_close(frame.write @ frame.read.T, own.write @ own.read.T)
    frame = by["contrastive 2", "alone"]
    [(_, own)] = contrastive(difference, fit.bank.changed["p"], (2,))
    torch.testing.assert_close(frame.read @ frame.read.T, own.read @ own.read.T)


def test_rules_with_the_same_cells_are_tried_once(fit):
    assert cell_variables(fit, "r", "siblings") == ("pair",)
    planted = planted_plane()
    [recording] = record(planted.subject, *planted.banks(60))
    assert cell_variables(recording, "p", "alone") == cell_variables(recording, "p", "siblings") == ()
    found = ClosedForm(ridges=(1.0,), sizes=(1,)).candidates(recording, planted.subject.places[0], "p")
    assert [c.rule for c in found] == ["alone", "alone", "alone", "frontier", "frontier"]


def score_alone(recording: BankRecording, edits: list, variant: int, variable: str) -> float:
    right = (respond(recording, edits)[variant].argmax(dim=1) == recording.bank.labels[variable]).double()
    changed = recording.bank.changed[variable]
    return float(right[changed].mean() + right[~changed].mean()) / 2


@pytest.mark.parametrize("kind", ["random", "planted"])
def test_the_stage_chooses_the_best_then_the_smallest_then_the_weakest_edit(fit, kind):
    """A random network, where scores differ, and a planted one, where many edits get everything right."""
    if kind == "random":
        problem = Problem(fit.subject, fit, recorded(seed=1), ("p", "r"), READOUT)
    else:
        planted = planted_plane()
        problem = Problem(planted.subject, *record(planted.subject, *planted.banks(60, 40)), ("p", "q"), READOUT)
    stage = ClosedForm(ridges=(0.01, 1.0), sizes=(1, 2), strengths=(2.0, 1.0, 1.5), further=())
    start = State.start(problem)
    state = stage(problem, start)
    assert state.places == start.places
    assert set(state.handles) == set(problem.variables)
    for v, handle in state.handles.items():
        tried = {}
        for p in problem.subject.places:
            for c in stage.candidates(problem.fit, p, v):
                edits = c.edits(stage.strengths)
                for k, strength in enumerate(stage.strengths):
                    tried[len(tried)] = score_alone(problem.calibration, edits, k, v), c, strength
        best = max(score for score, _, _ in tried.values())
        at = min(
            (n for n, (score, _, _) in tried.items() if score > best - 1e-9),
            key=lambda n: (tried[n][1].frame.rank, tried[n][2], n),
        )
        _, c, strength = tried[at]
        chosen = handle.chosen
        assert (chosen["support"], chosen["form"], chosen["rule"]) == (c.place.name, c.name, c.rule)
        assert (handle.variable, handle.places, chosen["strength"]) == (v, [c.place.name], strength)
        assert chosen["calibration_score"] == pytest.approx(best)
        for name, part in (("by_form", lambda c: c.kind), ("by_support", lambda c: c.place.name)):
            scores: dict[str, float] = {}
            for score, c_, _ in tried.values():
                scores[part(c_)] = max(score, scores.get(part(c_), 0.0))
            assert chosen[name] == pytest.approx(scores)
        base, source = problem.calibration.bank.base, problem.calibration.bank.source
        expected = respond(problem.calibration, c.edits([strength]))[0]
        torch.testing.assert_close(handle.apply(problem.subject, base, source), expected, rtol=1e-4, atol=1e-5)
    assert problem.clock.parts["closed_form"] > 0
    assert problem.clock.parts["calibration"] > 0


def test_a_place_is_taken_apart_once_for_all_variables(fit, monkeypatch):
    """Two variables, three rules, four ridges: one factorization per place and set of known pairs."""
    asked, plain = [], Differences.of
    monkeypatch.setattr(Differences, "of", lambda x: asked.append(x) or plain(x))
    places = tuple(fit.subject.places)
    stage, state = ClosedForm(), State(dict.fromkeys(("p", "q"), places))
    together = stage._everywhere(fit, state)
    known = {tuple(cell_shift(fit, places[0], v, cell_variables(fit, v, r))[0].tolist()) for v in "pq" for r in RULES}
    assert len(asked) == len(places) * len(known | {tuple(range(len(fit)))}) < len(places) * 6
    for (variable, place), forms in together.items():
        alone = stage.candidates(fit, place, variable)
        assert [(f.name, f.rule) for f in forms] == [(f.name, f.rule) for f in alone]
        for f, g in zip(forms, alone, strict=True):
            torch.testing.assert_close(f.frame.lift(f.frame.read), g.frame.lift(g.frame.read))


@pytest.mark.parametrize(
    ("best", "found", "edge"), [(3.0, 3.0, False), (9.0, 4.0, True), (1.5, 1.5, False), (2.1, 2.0, False)]
)
def test_a_grid_of_strengths_that_is_too_short_goes_on(fit, best, found, edge, monkeypatch):
    """The score falls with the distance to a strength that may lie beyond the grid; the first form is the best."""
    problem, asked = Problem(fit.subject, fit, recorded(seed=1), ("p",), READOUT), []

    def scored(bank, tries, strengths, *_):
        asked.append((len(tries), tuple(strengths)))
        score = 1 - (torch.tensor(strengths, dtype=torch.float64) - best).abs() / 10
        return score - 0.01 * torch.arange(len(tries))[:, None]

    monkeypatch.setattr("plot_ot.stages.closed_form.scored_frames", scored)
    stage = ClosedForm()
    chosen = stage(problem, State.start(problem)).handles["p"].chosen
    assert chosen["strength"] == found
    assert chosen["calibration_score"] == pytest.approx(1 - abs(found - best) / 10)
    assert bool(chosen["at_edge"]) == edge
    assert max(chosen["by_form"].values()) == chosen["calibration_score"]
    assert asked[1:] == ([(1, stage.further)] if best > 1.75 else [])


def test_of_strengths_beyond_the_grid_that_do_as_well_the_smallest_is_taken(fit, monkeypatch):
    problem = Problem(fit.subject, fit, recorded(seed=1), ("p",), READOUT)

    def scored(bank, tries, strengths, *_):
        return torch.tensor(strengths, dtype=torch.float64).clamp(max=2.5) - 0.01 * torch.arange(len(tries))[:, None]

    monkeypatch.setattr("plot_ot.stages.closed_form.scored_frames", scored)
    stage = ClosedForm(further=(4.0, 2.5, 3.0))
    assert stage(problem, State.start(problem)).handles["p"].chosen["strength"] == 2.5
