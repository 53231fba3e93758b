"""Reading what is used: illusions are told from variables that act, in networks where both are wired by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from nets import orthonormal, rand
from plot_ot.abstract.causal_model import CausalModel
from plot_ot.edits import Frame
from plot_ot.handles import Edit, Handle
from plot_ot.judging import usage
from plot_ot.judging.own_change import OwnChange
from plot_ot.judging.status import Status
from plot_ot.judging.usage import Used, read_from_used, used_directions
from plot_ot.judging.verdict import Opponents, judge
from plot_ot.methods import Method
from plot_ot.signatures import as_readout
from plot_ot.stages.calibrate import correct
from plot_ot.stages.closed_form import RULES, ClosedForm, cell_shift, cell_variables
from plot_ot.stages.problem import Problem
from plot_ot.subjects import BankRecording, MLPSubject, ModuleSubject, record
from plot_ot.tasks import MultipleChoice
from plot_ot.tasks.text_data import Sizes
from truth import illusions, kinds
from truth.campaigns import KINDS
from truth.known import Known, draw_splits

READOUT = as_readout("softmax")


def recorded(known: Known, size: int = 300) -> tuple[BankRecording, BankRecording, BankRecording, BankRecording]:
    """Fit, calibration, sensitivity and invariance of the first variable."""
    splits = known.splits or draw_splits(known.causal, known.rows, size, known.seed)
    tests = [splits.test["p", kind] for kind in ("sensitivity", "invariance")]
    fit, calibration, sensitivity, invariance = record(known.subject, splits.fit, splits.calibration, *tests)
    return fit, calibration, sensitivity, invariance


def judged(known: Known, size: int = 300) -> Status:
    fit, calibration, sensitivity, invariance = recorded(known, size)
    place = known.subject.places[-1]
    idle = Handle("p", (Edit(place, Frame.identity(place.width), torch.zeros(place.width)),), known.subject.identity())
    opponents = Opponents(lambda _: idle)
    generator = torch.Generator().manual_seed(0)
    found = judge(known.handles["p"], sensitivity, invariance, fit, calibration, opponents, READOUT, generator)
    return found.status


@pytest.mark.parametrize("seed", [1100, 1101])
@pytest.mark.parametrize("kind", [illusions.silent_way, illusions.borrowed_way])
def test_a_handle_that_reads_a_dormant_copy_is_right_and_called_decodable_only(kind, seed):
    known = kind(seed)
    fit, calibration, sensitivity, _ = recorded(known)
    handle = known.handles["p"]
    assert float(correct(sensitivity, handle, READOUT).double().mean()) > 0.85  # it looks like a good one
    rebuilt = read_from_used(handle, fit, calibration, READOUT, torch.Generator().manual_seed(0))
    assert rebuilt is not None
    assert rebuilt.used < rebuilt.width
    assert float(correct(sensitivity, rebuilt.handle, READOUT).double().mean()) < 0.7
    assert judged(known) is Status.DECODABLE


@pytest.mark.parametrize("seed", [1100, 1101])
@pytest.mark.parametrize("kind", ["oblique", "echo"])
def test_a_variable_that_acts_is_rebuilt_from_what_is_used(kind, seed):
    known = kinds.planted(seed, kind)
    fit, calibration, sensitivity, _ = recorded(known)
    rebuilt = read_from_used(known.handles["p"], fit, calibration, READOUT, torch.Generator().manual_seed(0))
    assert rebuilt is not None
    assert float(correct(sensitivity, rebuilt.handle, READOUT).double().mean()) > 0.9
    assert judged(known) in (Status.PLACED, Status.COMPACT)


def test_two_variables_that_are_added_up_before_they_are_looked_at_both_act():
    """One functional is used and tells neither of them apart: what naturally goes with the reading decides."""
    assert judged(illusions.line(1100), 1000) in (Status.PLACED, Status.COMPACT)


@pytest.mark.parametrize("seed", [1100, 1101])
@pytest.mark.parametrize(
    ("kind", "says"),
    [(kinds.copies_apart, Status.COMPACT), (kinds.spread, Status.COMPACT), (illusions.silent_ways, Status.DECODABLE)],
)
def test_handles_over_two_places_are_told_apart_as_well(kind, says, seed):
    """Copies or parts of a variable that act together, and dormant copies beside directions that would."""
    known = kind(seed)
    handle = known.handles["p"]
    assert handle.places == ["s1", "s2"]
    _, _, sensitivity, _ = recorded(known)
    assert float(correct(sensitivity, handle, READOUT).double().mean()) > 0.95
    alone = [replace(handle, edits=(e,)) for e in handle.edits]
    assert all(float(correct(sensitivity, h, READOUT).double().mean()) < 0.9 for h in alone)
    assert judged(known) is says
    backwards = replace(known, handles={"p": replace(handle, edits=handle.edits[::-1])})
    assert judged(backwards) is says


def test_a_later_edit_is_rebuilt_from_what_the_earlier_ones_leave():
    """Where s2 is a copy of s1 and s1 is already swapped, nothing of the variable is left to bring there."""
    known = next(k for k in map(kinds.planted, range(1100, 1120)) if set(k.truths["p"].carried) == {"s1", "s2"})
    fit, *_ = recorded(known)
    first = known.handles["p"]
    later = Edit(
        known.subject.place("s2"),
        Frame.identity(known.subject.place("s2").width),
        torch.ones(1).expand(known.subject.place("s2").width),
    )
    both = replace(first, edits=(*first.edits, later))
    seen = [usage._moved(fit, both, k) for k in (0, 1)]
    assert torch.equal(seen[0], fit.base_at(first.edits[0].place).double())
    plane = known.truths["p"].carried["s2"].double()
    source, base = fit.source_at(later.place).double(), fit.base_at(later.place).double()
    assert float(((source - seen[1]) @ plane).norm()) < 0.05 * float(((source - base) @ plane).norm())


def linear_subject(seed: int) -> tuple[MLPSubject, torch.Tensor]:
    """Six states mixed from six inputs, of which the outputs see two functionals."""
    torch.manual_seed(seed)
    net = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Identity(), torch.nn.Linear(6, 3))
    seen = torch.randn(2, 6)
    net[2].weight.data = torch.randn(3, 2) @ seen
    return MLPSubject(net), seen


def test_the_used_functionals_of_a_linear_network_are_those_its_outputs_see(monkeypatch):
    subject, seen = linear_subject(0)
    known = kinds.planted(1100)
    rows = torch.cartesian_prod(*[torch.arange(3)] * 6)
    splits = draw_splits(known.causal, rows, 200, 0)
    [fit] = record(subject, splits.fit)
    place = subject.places[0]
    edit = Edit(place, Frame.identity(6), torch.ones(6))
    used = used_directions(fit, edit, torch.Generator().manual_seed(0))
    assert used.rank == 2
    # a used functional reads nearly the same after it is rebuilt, and exactly so where no effect is faint
    counts = used.effects**2 / (used.effects**2 + 0.2**2)
    assert float(counts[0]) > 0.9
    inside = used.basis.T @ used.root @ seen.double().T
    kept = used.reading(seen.double().T)
    assert torch.allclose(used.basis.T @ used.root @ kept, counts[:, None] * inside, atol=1e-6)
    monkeypatch.setattr(usage, "FAINT", 1e-9)
    assert torch.allclose(used.reading(seen.double().T), seen.double().T, atol=1e-4)
    # one that is not loses what the others do not predict
    other = torch.linalg.svd(seen.double())[2][2:].T
    assert float((used.reading(other) - other).norm()) > 0.5
    # and the swap that they do not see changes no output
    swap = used.unseen()
    assert float((seen.double() @ swap).abs().max()) < 1e-4 * float(seen.abs().max())
    assert isinstance(used, Used)


def test_an_effect_is_what_a_natural_change_does_to_the_outputs_beside_what_the_handle_does():
    """In a linear network with outputs M a, a unit of y along v changes them by M C^{1/2} v."""
    subject, _ = linear_subject(0)
    rows = torch.cartesian_prod(*[torch.arange(3)] * 6)
    splits = draw_splits(kinds.planted(1100).causal, rows, 100, 0)  # so few that all of them are looked at
    [fit] = record(subject, splits.fit)
    place = subject.places[0]
    for gain in (1.0, 0.25):
        edit = Edit(place, Frame.identity(6), torch.full((6,), gain))
        used = used_directions(fit, edit, torch.Generator().manual_seed(0))
        outputs = subject.net[2].weight.double().detach()
        moved = (fit.source_at(place) - fit.base_at(place)).double() @ outputs.T * gain
        handle = (moved**2).sum(dim=1).mean().sqrt()
        expected = torch.linalg.svdvals(outputs @ used.root)[:2] / handle
        assert torch.allclose(used.effects, expected, rtol=1e-3)


def test_jumps_without_a_gradient_are_found_by_swapping():
    known = kinds.planted(1100)
    rows = torch.cartesian_prod(*[torch.arange(3)] * 6)
    subject, seen = linear_subject(1)

    class Jump(torch.nn.Module):
        def forward(self, a: torch.Tensor) -> torch.Tensor:
            return torch.stack([(a @ seen[0] > 0).float(), (a @ seen[0] <= 0).float()], dim=-1)

    net = torch.nn.Sequential(subject.net[0], Jump())
    jumping = ModuleSubject(net, {"state": "0"}, torch.zeros(1, 6), encode=lambda x: x.float())
    [fit] = record(jumping, draw_splits(known.causal, rows, 400, 0).fit)
    place = jumping.places[0]
    used = used_directions(fit, Edit(place, Frame.identity(6), torch.ones(6)), torch.Generator().manual_seed(0))
    kept = used.root @ used.reading(seen[:1].double().T).squeeze(1)
    wanted = used.root @ seen[0].double()
    assert float(torch.nn.functional.cosine_similarity(kept, wanted, dim=0)) > 0.9


def test_a_reading_through_an_encoder_is_not_rebuilt():
    known = kinds.planted(1100)
    fit, calibration, _, _ = recorded(known)
    handle = known.handles["p"]
    edit = handle.edits[0]
    frame = replace(edit.frame, encoder=object())
    odd = replace(handle, edits=(replace(edit, frame=frame),))
    assert read_from_used(odd, fit, calibration, READOUT, torch.Generator()) is None


# -- the parts, against plain linear algebra --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plant() -> tuple[Known, BankRecording, BankRecording]:
    known = kinds.planted(1100)
    fit, calibration, _, _ = recorded(known, 200)
    return known, fit, calibration


def test_the_root_is_that_of_the_shrunk_second_moment():
    difference = rand(0, 50, 4, dtype=torch.float64) * torch.tensor([1.0, 2.0, 3.0, 0.0], dtype=torch.float64)
    moment = difference.T @ difference / 50
    expected = moment + 1e-3 * moment.diagonal().mean() * torch.eye(4, dtype=torch.float64)
    root = usage._root(difference)
    assert torch.allclose(root @ root, expected)
    assert torch.allclose(root, root.T)
    nothing = usage._root(torch.zeros(5, 3, dtype=torch.float64))
    assert bool((nothing.diagonal() > 0).all())  # it can be solved with


def test_the_span_of_rows_is_orthonormal_and_holds_them_strongest_first():
    basis = orthonormal(0, 6, 6, dtype=torch.float64)
    rows = rand(1, 20, 3, dtype=torch.float64) * torch.tensor([1.0, 100.0, 10.0], dtype=torch.float64) @ basis[:, :3].T
    span = usage._span(rows)
    assert span.shape == (6, 3)
    assert torch.allclose(span.T @ span, torch.eye(3, dtype=torch.float64), atol=1e-9)
    assert torch.allclose(rows @ span @ span.T, rows, atol=1e-6)
    assert abs(float(span[:, 0] @ basis[:, 1])) > 0.9
    assert usage._span(torch.zeros(4, 6, dtype=torch.float64)).shape == (6, 0)


def test_the_fewest_functionals_that_are_enough_are_found():
    basis, effects = orthonormal(2, 6, 5, dtype=torch.float64), torch.tensor([9.0, 5.0, 3.0, 0.1, 0.0])
    used = Used(None, basis, torch.eye(6, dtype=torch.float64), effects)  # type: ignore[arg-type]
    assert used.count == 3
    for enough in range(1, 6):
        found = usage._fewest(used, lambda u, enough=enough: u.rank >= enough)
        assert torch.equal(found.basis, basis[:, :enough])
        assert torch.equal(found.effects, effects[:enough])


def test_what_was_not_found_counts_a_little_and_evenly(plant):
    """What a swap of all other directions still does is spread over them: in all they do that much, each hardly any."""
    place = plant[1].subject.places[0]
    d = place.width
    basis, effects = orthonormal(2, d, 3, dtype=torch.float64), torch.tensor([2.0, 1.0, 0.5]).double()
    found = usage._completed(Used(place, basis, torch.eye(d, dtype=torch.float64), effects), 0.6)
    assert torch.allclose(found.basis.T @ found.basis, torch.eye(d, dtype=torch.float64), atol=1e-9)
    assert torch.equal(found.basis[:, :3], basis)
    assert torch.equal(found.effects[:3], effects)
    assert abs(float((found.effects[3:] ** 2).sum().sqrt()) - 0.6) < 1e-9
    assert float(found.effects[3:].max() - found.effects[3:].min()) == 0.0


def test_where_not_all_that_is_used_is_found_the_rest_does_not_count_in_full(plant, monkeypatch):
    known, fit, _ = plant
    [edit] = known.handles["p"].edits
    monkeypatch.setattr(usage, "INERT", 0.0)  # no swap is ever inert enough
    monkeypatch.setattr(usage, "ROUNDS", 0)
    used = used_directions(fit, edit, torch.Generator().manual_seed(0))
    assert used.rank == edit.place.width
    assert 0 < used.count < used.rank


def test_an_edit_is_read_and_written_along_its_nonzero_gains(plant):
    place = plant[1].subject.places[0]
    d = place.width
    gains = torch.zeros(d)
    gains[[1, 3]] = torch.tensor([0.5, -2.0])
    read, write, kept = usage._parts(Edit(place, Frame.identity(d), gains))
    assert torch.equal(read, torch.eye(d, dtype=torch.float64)[:, [1, 3]])
    assert torch.equal(write, read)
    assert kept.tolist() == [0.5, -2.0]
    r, w = rand(0, d, 3), rand(1, d, 3)
    read, write, kept = usage._parts(Edit(place, Frame.oblique(r, w), torch.tensor([1.0, 0.0, 2.0])))
    assert torch.equal(read, r[:, [0, 2]].double())
    assert torch.equal(write, w[:, [0, 2]].double())
    assert kept.tolist() == [1.0, 2.0]


def test_what_is_read_is_averaged_over_pairs_with_the_same_two_values(plant):
    _, fit, _ = plant
    seen = rand(3, len(fit), 2, dtype=torch.float64)
    values = [fit.bank.causal.run(x)["p"].tolist() for x in (fit.bank.base, fit.bank.source)]
    pairs = list(zip(*values, strict=True))
    found = usage._mean_by_values(seen, fit, "p")
    for t, pair in enumerate(pairs):
        alike = [k for k, other in enumerate(pairs) if other == pair]
        assert torch.allclose(found[t], seen[alike].mean(dim=0))


def test_readings_are_refitted_by_projection_and_ridge_regression(plant):
    known, fit, _ = plant
    [edit] = known.handles["p"].edits
    place, d = edit.place, edit.place.width
    difference = (fit.source_at(place) - fit.base_at(place)).double()
    root = usage._root(difference)
    basis, effects = orthonormal(4, d, 5, dtype=torch.float64), torch.tensor([3.0, 1.0, 0.3, 0.1, 0.01]).double()
    used = Used(place, basis, root, effects)
    read, write, gains = usage._parts(edit)
    found = usage.refitted_readings(fit, edit, used, "p")
    seen = difference @ read
    weighted = np.linalg.solve(root.numpy(), difference.numpy().T).T @ basis.numpy() * effects.numpy()
    shrunk = (basis * (effects**2 / (effects**2 + 0.2**2))) @ basis.T
    expected = [np.linalg.solve(root.numpy(), (shrunk @ root @ read).numpy())]
    for target in (seen, usage._mean_by_values(seen, fit, "p")):
        gram = weighted.T @ weighted / len(fit) + 0.2**2 * np.eye(5)
        fitted = np.linalg.solve(gram, weighted.T @ target.numpy() / len(fit))
        expected.append(np.linalg.solve(root.numpy(), basis.numpy() * effects.numpy() @ fitted))
    assert len(found) == len(expected) == 3
    for one, other in zip(found, expected, strict=True):
        assert one.place == place
        assert torch.equal(one.gains, gains)
        np.testing.assert_allclose(one.frame.read, other, rtol=1e-3, atol=1e-4)
        np.testing.assert_allclose(one.frame.write, write, rtol=1e-5, atol=1e-6)


def test_natural_writings_are_what_goes_with_the_reading(plant):
    """The variable's own change, or where it follows from the rest (here: of a sum), all that changes with it."""
    for known, rules in ((plant[0], 0), (illusions.line(1100), len(RULES) + 1)):
        fit, _, _, _ = recorded(known, 200)
        [edit] = known.handles["p"].edits
        difference = (fit.source_at(edit.place) - fit.base_at(edit.place)).double()
        read, _, _ = usage._parts(edit)
        own = OwnChange.of(fit, "p")
        found = usage.natural_writings(fit, edit, "p", own=own)
        everyone = torch.arange(len(fit))
        if rules:
            assert own is None
            targets = [cell_shift(fit, edit.place, "p", cell_variables(fit, "p", rule)) for rule in RULES]
            targets = [(everyone, difference) if t is None else t for t in targets] + [(everyone, difference)]
        else:
            assert own is not None
            targets = [(everyone, own.shift(edit.place))]
        assert len(found) == len(targets)
        for one, (pairs, delta) in zip(found, targets, strict=True):
            seen = (difference[pairs] @ read).numpy()
            gram = seen.T @ seen / len(seen)
            ridge = 1e-3 * np.diag(gram).mean() * np.eye(len(gram))
            write = np.linalg.solve(gram + ridge, seen.T @ delta.numpy() / len(seen)).T
            np.testing.assert_allclose(one.frame.write, write, rtol=1e-3, atol=1e-4)
            np.testing.assert_allclose(one.frame.read, read, rtol=1e-5, atol=1e-6)
            assert torch.equal(one.gains, torch.ones(read.shape[1]))


@pytest.mark.parametrize("more", [0, 1])
def test_a_variables_own_change_is_its_part_in_a_regression_on_all_that_the_answer_is_made_of(plant, more):
    """Against a plain least-squares fit over the distinct inputs, with a column per value."""
    known, fit, calibration = plant
    [edit] = known.handles["p"].edits
    rows, states = [], []
    for r in (fit, calibration)[: 1 + more]:
        inputs = torch.cat([r.bank.base, r.bank.source]).numpy()
        at = torch.cat([r.base_at(edit.place), r.source_at(edit.place)]).double().numpy()
        some, first = np.unique(inputs, axis=0, return_index=True)
        rows.append(some)
        states.append(at[first])
    values = fit.bank.causal.run(torch.as_tensor(np.concatenate(rows)))

    def columns(name: str) -> np.ndarray:
        return (values[name].numpy()[:, None] == np.arange(3)).astype(float)

    answer = fit.bank.causal.output
    design = np.concatenate([columns("p"), columns("q"), columns(answer)], axis=1)
    coefficients, *_ = np.linalg.lstsq(design, np.concatenate(states), rcond=None)
    at_base, at_source = (fit.bank.causal.run(x)["p"].numpy() for x in (fit.bank.base, fit.bank.source))
    expected = coefficients[at_source] - coefficients[at_base]
    found = OwnChange.of(fit, "p", [calibration][:more])
    assert found is not None
    np.testing.assert_allclose(found.shift(edit.place), expected, rtol=1e-4, atol=1e-5)


class Conjunction(nn.Module):
    """The answer is p AND q, of p = (x0 = x1) and q = (x2 = x3); its place holds p, q and something made of both."""

    def __init__(self, used) -> None:
        super().__init__()
        self.state, self.used = nn.Identity(), used

    def forward(self, x):
        p, q = (x[:, 0] == x[:, 1]).float(), (x[:, 2] == x[:, 3]).float()
        state = self.state(torch.stack([p, q, self.used(p, q)], dim=1))
        return torch.stack([torch.full_like(p, self.used(1.0, 1.0) - 0.5), state[:, 2]], dim=1)


@pytest.mark.parametrize(
    ("used", "moves"),
    [(lambda p, q: p * q, 0.0), (lambda p, q: p + q, 1.0)],  # the answer itself; a sum that is looked at later
)
def test_what_is_made_of_the_variable_does_not_count_as_its_own_change(used, moves):
    """Beside a copy of p that nothing reads, p AND q changes with p by nature, but the answer tells that apart."""
    mechanisms = {"p": equal01, "q": equal23, "y": lambda p, q: p * q}
    rows = torch.cartesian_prod(*[torch.arange(3)] * 4)
    subject = ModuleSubject(Conjunction(used), ["state"], rows)
    causal = CausalModel(["x0", "x1", "x2", "x3"], mechanisms, "y")
    [fit] = record(subject, draw_splits(causal, rows, 400, 1000).fit)
    [place] = subject.places
    edit = Edit(place, Frame.orthonormal(torch.tensor([[1.0], [0.0], [0.0]]), "p's copy"), torch.ones(1))
    [natural] = usage.natural_writings(fit, edit, "p", own=OwnChange.of(fit, "p"))
    np.testing.assert_allclose(natural.frame.write[:, 0], [1.0, 0.0, moves], atol=0.02)
    # six values of p, q and the answer need more than a few inputs
    assert OwnChange.of(fit.select(torch.arange(5)), "p") is None
    assert OwnChange.of(fit.select(torch.arange(40)), "p") is not None
    # from q and a sum p follows, and all that goes with it counts
    added = CausalModel(["x0", "x1", "x2", "x3"], {**mechanisms, "y": lambda p, q: p + q}, "y")
    [fit] = record(subject, draw_splits(added, rows, 400, 1000).fit)
    assert OwnChange.of(fit, "p") is None
    every = usage.natural_writings(fit, edit, "p")
    assert len(every) == len(RULES) + 1
    assert all(float(w.frame.write[2, 0]) > 0.1 for w in every)
    # and so it does where there are too few inputs for so many values
    few = fit.select(torch.arange(4))
    assert OwnChange.of(few, "p") is None


class Faint(nn.Module):
    """The answer q of a place that also holds p; one of its outputs sees p, a little."""

    def __init__(self, much: float) -> None:
        super().__init__()
        self.state, self.much = nn.Identity(), much

    def forward(self, x):
        p, q = (x[:, 0] == x[:, 1]).float(), (x[:, 2] == x[:, 3]).float()
        state = self.state(torch.stack([p, q], dim=1))
        return torch.stack([torch.full_like(p, 0.5), state[:, 1], self.much * state[:, 0] - 9], dim=1)


@pytest.mark.parametrize(("much", "used"), [(0.03, False), (3.0, True)])
def test_a_copy_that_hardly_moves_the_outputs_is_not_what_is_used(much, used):
    """A handle that reads p and writes q: from the used functionals p can be decoded however faint it is in them."""
    causal = CausalModel(["x0", "x1", "x2", "x3"], {"p": equal01, "q": equal23, "y": lambda p, q: p ^ q}, "y")
    rows = torch.cartesian_prod(*[torch.arange(3)] * 4)
    subject = ModuleSubject(Faint(much), ["state"], rows)
    [fit] = record(subject, draw_splits(causal, rows, 400, 1000).fit)
    [place] = subject.places
    read, write = torch.tensor([[1.0], [0.0]]), torch.tensor([[0.0], [1.0]])
    edit = Edit(place, Frame.oblique(read, write), torch.ones(1))
    found = used_directions(fit, edit, torch.Generator().manual_seed(0))
    assert found.rank == 2  # a swap of p alone moves the outputs
    for rebuilt in usage.refitted_readings(fit, edit, found, "p"):
        assert (float(rebuilt.frame.read[0, 0]) > 0.9) is used
        assert (float(rebuilt.frame.read[0, 0]) < 0.1) is not used


def test_after_the_letter_is_made_a_copy_of_the_pointer_is_decodable_only():
    """Bases of the paper's banks have the letters A to D, so a map at the last block may write the letter itself.

    The embedded net makes the pointer in block 2 and the letter in block 3. From there on closed forms are right on
    all pairs: they read a copy of the pointer that is still in the stream, and write a letter.
    """
    task = MultipleChoice(model="planted-1000", sizes=Sizes(300, 200, 200, transfer=4))
    prepared = task.prepare(1004, Path())
    banks = prepared.splits
    tests = [banks.test["answer_pointer", kind] for kind in ("sensitivity", "invariance")]
    fit, calibration, sensitivity, invariance = record(task.subject, banks.fit, banks.calibration, *tests)
    problem = Problem(task.subject, fit, calibration, banks.fit.variables, prepared.readout, 1004)
    problem = problem.only(["answer_pointer"])
    closed = Method("closed form", "", (ClosedForm(),))
    said = {}
    for block in (2, 4, 5):
        place = task.subject.places[block]
        handle = closed.run(problem, {"answer_pointer": (place,)})[0].handles["answer_pointer"]
        assert float(correct(sensitivity, handle, prepared.readout).double().mean()) > 0.95
        idle = replace(handle, edits=(Edit(place, Frame.identity(place.width), torch.zeros(place.width)),))
        generator = torch.Generator().manual_seed(0)
        opponents = Opponents(lambda _, idle=idle: idle)
        verdict = judge(handle, sensitivity, invariance, fit, calibration, opponents, prepared.readout, generator)
        said[block] = verdict.status
    assert said == {2: Status.COMPACT, 4: Status.DECODABLE, 5: Status.DECODABLE}


def equal01(x0, x1):
    return (x0 == x1).long()


def equal23(x2, x3):
    return (x2 == x3).long()


def test_the_rebuilt_handle_is_the_best_of_all_fits_on_calibration(plant):
    known, fit, calibration = plant
    handle = known.handles["p"]
    rebuilt = read_from_used(handle, fit, calibration, READOUT, torch.Generator().manual_seed(0))
    assert rebuilt is not None
    used = used_directions(fit, handle.edits[0], torch.Generator().manual_seed(0))
    assert (rebuilt.used, rebuilt.width) == (used.rank, handle.edits[0].place.width)
    tries = usage.refitted_readings(fit, handle.edits[0], used.all_alike(), "p")  # for its own change acts
    tries += usage.natural_writings(fit, handle.edits[0], "p", own=OwnChange.of(fit, "p", [calibration]))
    changed = calibration.bank.changed["p"]
    scores = []
    for edit in tries:
        right = correct(calibration, replace(handle, edits=(edit,)), READOUT).double()
        scores.append(float(right[changed].mean() + right[~changed].mean()) / 2)
    best = tries[max(range(len(scores)), key=scores.__getitem__)]
    assert torch.allclose(rebuilt.handle.edits[0].frame.read, best.frame.read, atol=1e-5)
    assert torch.allclose(rebuilt.handle.edits[0].frame.write, best.frame.write, atol=1e-5)
    assert rebuilt.handle.variable == "p"
    # of two edits both are rebuilt, and their sizes added up
    first, second = fit.subject.places
    edits = tuple(Edit(p, Frame.identity(p.width), (torch.arange(p.width) < 3).float()) for p in (first, second))
    both = read_from_used(replace(handle, edits=edits), fit, calibration, READOUT, torch.Generator().manual_seed(0))
    assert both is not None
    assert both.handle.places == [first.name, second.name]
    assert both.width == first.width + second.width
    assert 2 <= both.used <= both.width


@pytest.mark.parametrize(("kind", "loses"), [("spread", False), ("illusion: two places", True)])
def test_parts_are_rebuilt_together_only_where_one_after_the_other_they_lose(kind, loses, monkeypatch):
    known = KINDS[kind](1000)
    fit, calibration, *_ = recorded(known)
    handle, ways, plainly = known.handles["p"], [], usage._one_after_the_other

    def watched(handle, options, scored, way=None):
        ways.append(way)
        return plainly(handle, options, scored, way)

    monkeypatch.setattr(usage, "_one_after_the_other", watched)
    assert len(handle.edits) > 1
    read_from_used(handle, fit, calibration, READOUT, torch.Generator().manual_seed(0))
    together = [way for way in ways if way is not None]
    assert together == (list(range(len(together))) if loses else [])
    assert bool(together) is loses
