"""The edit a + W(g * (Rᵀ a_source - Rᵀ a)): the fast engine against hooked forwards, its algebra, its refusals."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from counterfeit import counterfeit
from nets import PlainEdit, hooked_forward, hooked_subject, mlp, orthonormal, rand
from plot_ot.edits import EditBatch, Frame, respond, resume_edited
from plot_ot.errors import PlotError
from plot_ot.subjects import MLPSubject, Place, Recording, Subject, record_pairs

VARIANTS, PAIRS = 5, 11
WIDTHS = {"layer1": 6, "layer2": 7, "layer3": 5}
SUBJECTS = {"fast": MLPSubject, "hooked": hooked_subject}


def make_frame(kind: str, width: int, seed: int) -> Frame:
    """Of each kind a frame: directions shared by all variants, or one set per variant."""
    if kind == "identity":
        return Frame.identity(width)
    if kind == "orthonormal, full":
        return Frame.orthonormal(orthonormal(seed, width, width))
    if kind == "orthonormal, some":
        return Frame.orthonormal(orthonormal(seed, width, 3))
    if kind == "oblique":
        return Frame.oblique(rand(seed, width, 3) / 2, rand(seed + 1, width, 3) / 2)
    if kind == "orthonormal per variant":
        return Frame.orthonormal(orthonormal(seed, VARIANTS, width, 2))
    return Frame.oblique(rand(seed, VARIANTS, width, 2) / 2, rand(seed + 1, VARIANTS, width, 2) / 2)


KINDS = (
    "identity",
    "orthonormal, full",
    "orthonormal, some",
    "oblique",
    "orthonormal per variant",
    "oblique per variant",
)


def make_edits(subject: Subject, kinds: Sequence[str], seed: int = 0) -> list[EditBatch]:
    """Random gains at the first places, listed last place first.

    Variant 0 edits nothing; of several places, variant 1 leaves out the first and variant 2 the last.
    """
    edits = []
    for k, kind in enumerate(kinds):
        place = subject.places[k]
        frame = make_frame(kind, place.width, seed + 10 * k)
        gains = rand(seed + 10 * k + 5, VARIANTS, frame.rank)
        gains[0] = 0
        if len(kinds) > 1 and k in (0, len(kinds) - 1):
            gains[1 if k == 0 else 2] = 0
        edits.append(EditBatch(place, frame, gains))
    return edits[::-1]


def plain(net: nn.Sequential, edits: Sequence[EditBatch], variant: int) -> list[PlainEdit]:
    """One variant's edits as dense matrices at submodules."""
    dense = []
    for e in edits:
        read = torch.eye(e.frame.width) if e.frame.read is None else e.frame.read
        write = read if e.frame.write is None else e.frame.write
        read, write = (m[variant] if m.ndim == 3 else m for m in (read, write))
        dense.append((net[2 * e.place.layer - 1], read, write, e.gains[variant]))
    return dense


@pytest.fixture
def net() -> nn.Sequential:
    return mlp(4, *WIDTHS.values(), 3)


def record_random(subject: Subject, pairs: int = PAIRS) -> tuple[Recording, Tensor, Tensor]:
    base, source = rand(1, pairs, 4), rand(2, pairs, 4)
    source[0] = base[1]  # an input may be a base in one pair and a source in another
    return record_pairs(subject, (base, source))[0], base, source


# -- the fast engine ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("subject_kind", SUBJECTS)
@pytest.mark.parametrize("activation", [nn.Tanh, nn.ReLU, nn.GELU])
@pytest.mark.parametrize(
    "kinds",
    [
        *[(kind,) for kind in KINDS],
        ("identity", "identity"),
        ("orthonormal, some", "identity", "oblique"),
        ("oblique per variant", "orthonormal per variant", "orthonormal, full"),
    ],
    ids=" + ".join,
)
def test_every_response_is_the_hooked_forward_of_its_variant(subject_kind, activation, kinds):
    net = mlp(4, *WIDTHS.values(), 3, activation=activation)
    recording, base, source = record_random(SUBJECTS[subject_kind](net))
    edits = make_edits(recording.subject, kinds)
    expected = torch.stack([hooked_forward(net, plain(net, edits, v), base, source) for v in range(VARIANTS)])
    torch.testing.assert_close(respond(recording, edits), expected, rtol=1e-4, atol=1e-5)


def test_later_places_see_the_edited_run_and_clean_sources(net):
    """A full patch at a later place undoes whatever came before it; a partial one at both places does not commute."""
    recording, _, _ = record_random(MLPSubject(net))
    first, second = recording.subject.places[:2]
    patch = EditBatch(second, Frame.identity(second.width), torch.ones(1, second.width))
    noise = EditBatch(first, Frame.identity(first.width), rand(3, 1, first.width))
    torch.testing.assert_close(respond(recording, [noise, patch]), respond(recording, [patch]), rtol=1e-5, atol=1e-6)
    half = EditBatch(second, patch.frame, patch.gains / 2)
    assert (respond(recording, [noise, half]) - respond(recording, [half])).abs().max() > 1e-2


@pytest.mark.parametrize("size", [1, 3, 7, VARIANTS * PAIRS, 10**6])
@pytest.mark.parametrize("subject_class", SUBJECTS.values(), ids=SUBJECTS)
def test_responses_do_not_depend_on_the_batch_size(net, size, subject_class, monkeypatch):
    recording, _, _ = record_random(subject_class(net))
    edits = make_edits(recording.subject, ("orthonormal per variant", "identity"))
    expected = respond(recording, edits)
    monkeypatch.setattr(type(recording.subject), "responses_per_batch", size)
    torch.testing.assert_close(respond(recording, edits), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kinds", [("identity",), ("oblique", "orthonormal, full", "oblique per variant")], ids=str)
def test_a_self_swap_changes_nothing(net, kinds):
    inputs = rand(1, PAIRS, 4)
    [recording] = record_pairs(MLPSubject(net), (inputs, inputs))
    outputs = respond(recording, make_edits(recording.subject, kinds))
    torch.testing.assert_close(outputs, net(inputs).detach().expand_as(outputs), rtol=1e-5, atol=1e-5)


def test_resuming_some_pairs_is_the_response_of_those_pairs(net):
    recording, _, _ = record_random(MLPSubject(net))
    edits = make_edits(recording.subject, ("oblique", "identity"))
    chosen = torch.tensor([7, 2, 2])
    found = resume_edited(recording, edits, chosen)
    torch.testing.assert_close(found, respond(recording, edits)[:, chosen], rtol=1e-5, atol=1e-6)


# -- algebra of one edit --------------------------------------------------------------------------------------


@st.composite
def activations(draw):
    """(place, a [1, pairs, d], source [pairs, d], rank r <= d, seed) in float64, of very different sizes."""
    d = draw(st.integers(1, 9))
    pairs, seed = draw(st.integers(1, 6)), draw(st.integers(0, 2**31))
    scale = 10.0 ** draw(st.integers(-3, 3))
    a, source = scale * rand(seed, 2, pairs, d, dtype=torch.float64)
    return Place("here", d, 1), a.unsqueeze(0), source, draw(st.integers(1, d)), seed


def apply_frame(place: Place, frame: Frame, gains: Tensor, a: Tensor, source: Tensor) -> Tensor:
    return EditBatch(place, frame, gains).apply(a, source)


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-10 * (1 + float(expected.abs().max())))


properties = settings(max_examples=40, deadline=None, derandomize=True)


@properties
@given(activations())
def test_an_orthonormal_swap_applied_twice_is_applied_once(drawn):
    place, a, source, r, seed = drawn
    frame = Frame.orthonormal(orthonormal(seed, place.width, r, dtype=torch.float64))
    swap = EditBatch(place, frame, torch.ones(1, r, dtype=torch.float64))
    once = swap.apply(a, source)
    close(swap.apply(once, source), once)
    close(frame.coordinates(once), frame.coordinates(source).unsqueeze(0))


@properties
@given(activations())
def test_a_full_rank_swap_is_the_full_patch_whatever_the_rotation(drawn):
    place, a, source, _, seed = drawn
    d, dtype = place.width, torch.float64
    for frame in (Frame.identity(d), Frame.orthonormal(orthonormal(seed, d, d, dtype=dtype))):
        close(apply_frame(place, frame, torch.ones(1, d, dtype=dtype), a, source), source.unsqueeze(0))


@properties
@given(activations())
def test_an_edit_of_an_oblique_frame_is_its_equation_and_zero_gains_change_nothing(drawn):
    place, a, source, r, seed = drawn
    read, write = rand(seed, 2, place.width, r, dtype=torch.float64)
    gains = torch.stack([rand(seed, r, dtype=torch.float64), torch.zeros(r, dtype=torch.float64)])
    edited = apply_frame(place, Frame.oblique(read, write), gains, a, source)
    for t in range(len(source)):
        close(edited[0, t], a[0, t] + write @ (gains[0] * (read.T @ source[t] - read.T @ a[0, t])))
    assert torch.equal(edited[1], a[0])


@properties
@given(activations(), st.sampled_from(["identity", "orthonormal", "oblique"]))
def test_a_composed_frame_is_a_rotation_inside_the_outer_frame(drawn, kind):
    place, a, source, r, seed = drawn
    d, dtype = place.width, torch.float64
    outer = {
        "identity": Frame.identity(d),
        "orthonormal": Frame.orthonormal(orthonormal(seed, d, r, dtype=dtype)),
        "oblique": Frame.oblique(*rand(seed, 2, d, r, dtype=dtype)),
    }[kind]
    inner = orthonormal(seed + 1, outer.rank, max(1, outer.rank - 1), dtype=dtype)
    composed = outer.compose(Frame.orthonormal(inner, "das"))
    assert (composed.rank, composed.width, composed.kind) == (inner.shape[1], d, "das")
    gains = rand(seed + 2, 1, composed.rank, dtype=dtype)
    change = outer.coordinates(source - a[0]) @ inner
    close(apply_frame(place, composed, gains, a, source)[0], a[0] + outer.lift((gains * change) @ inner.T))


# -- gradients ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("subject_class", SUBJECTS.values(), ids=SUBJECTS)
def test_gradients_reach_frames_and_gains_but_not_the_network(net, subject_class):
    recording, base, source = record_random(subject_class(net))
    directions = orthonormal(3, VARIANTS, WIDTHS["layer1"], 2).requires_grad_()
    gains = rand(4, VARIANTS, 2).requires_grad_()
    edit = EditBatch(recording.subject.places[0], Frame(WIDTHS["layer1"], directions), gains)
    later = make_edits(recording.subject, ("identity", "oblique"))[0]
    resume_edited(recording, [edit, later]).square().sum().backward()
    assert all(p.grad is None and p.requires_grad for p in net.parameters())

    def total(moved: Tensor, scaled: Tensor) -> float:
        shifted = [EditBatch(edit.place, Frame(edit.frame.width, moved), scaled), later]
        variants = range(VARIANTS)
        return float(sum(hooked_forward(net, plain(net, shifted, v), base, source).square().sum() for v in variants))

    for leaf, at in ((directions, 0), (gains, 1)):
        step = 1e-2 * rand(5, *leaf.shape)
        ends = [[directions.detach(), gains.detach()] for _ in range(2)]
        ends[0][at], ends[1][at] = leaf.detach() - step, leaf.detach() + step
        slope = (total(*ends[1]) - total(*ends[0])) / 2
        assert slope == pytest.approx(float((leaf.grad * step).sum()), rel=2e-2, abs=1e-3)


# -- devices --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pairs", ["all", "slice", "indices"])
def test_edits_made_on_the_cpu_run_where_the_network_is(net, pairs):
    def responses(device: str) -> Tensor:
        subject = MLPSubject(net.to(device))
        rows = torch.arange(PAIRS) % 8
        store = subject.record(torch.arange(32.0).reshape(8, 4) / 8)
        recording = Recording(subject, store, rows, rows.flip(0))
        first, second, third = subject.places
        edits = [
            EditBatch(first, Frame(first.width, rand(1, VARIANTS, 6, 2)), rand(2, VARIANTS, 2)),
            EditBatch(second, Frame.identity(second.width), rand(3, VARIANTS, 7)),
            EditBatch(third, Frame(third.width, rand(4, 5, 3), rand(5, 5, 3)), rand(6, VARIANTS, 3)),
        ]
        chosen = {"all": slice(None), "slice": slice(2, 6), "indices": torch.tensor([3, 0, 2, 1])}[pairs]
        outputs = resume_edited(recording, edits, chosen)
        assert outputs.device.type == device
        assert outputs.shape == (VARIANTS, PAIRS if pairs == "all" else 4, 3)
        return outputs.cpu()

    expected = responses("cpu")
    with counterfeit(), torch.no_grad():
        torch.testing.assert_close(responses("cuda"), expected)
        place, there = Place("layer2", 7, 2), rand(7, 1, PAIRS, 7).to("cuda")
        with pytest.raises(RuntimeError, match="device"):  # the check can fail: unmoved gains do not mix
            EditBatch(place, Frame.identity(7), rand(8, VARIANTS, 7)).apply(there, there[0])


# -- refusals -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: EditBatch(p, Frame.identity(5), torch.ones(1, 5)), "width 5 does not fit layer1 of width 6"),
        (lambda p: EditBatch(p, Frame.identity(6), torch.ones(1, 4)), r"\[variants, 6\]; found \(1, 4\)"),
        (lambda p: EditBatch(p, Frame.identity(6), torch.ones(6)), r"\[variants, 6\]; found \(6,\)"),
        (lambda p: EditBatch(p, Frame.identity(6), torch.tensor(1.0)), r"\[variants, 6\]"),
        (lambda p: EditBatch(p, Frame(6, orthonormal(0, 3, 6, 2)), torch.ones(2, 2)), "3 frames for 2 variants"),
        (lambda p: Frame.orthonormal(2 * torch.eye(6)), "not orthonormal .* use Frame.oblique"),
        (lambda p: Frame.orthonormal(torch.full((6, 2), torch.nan)), "not orthonormal"),
        (lambda p: Frame.oblique(torch.ones(6, 2), torch.ones(6, 3)), r"one shape; found \(6, 2\) and \(6, 3\)"),
    ],
)
def test_malformed_edits_are_refused_when_made(make, message):
    with pytest.raises(PlotError, match=message):
        make(Place("layer1", 6, 1))


def _whole(place: Place, variants: int = 1) -> EditBatch:
    return EditBatch(place, Frame.identity(place.width), torch.ones(variants, place.width))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda first, second: [], "at least one edit"),
        (lambda first, second: [_whole(first), _whole(first)], "same place"),
        (lambda first, second: [_whole(first, 1), _whole(second, 2)], r"same variants; found \[1, 2\]"),
        (lambda first, second: [_whole(Place("layer9", 6, 9))], "Unknown place 'layer9'.*layer1, layer2, layer3"),
        (lambda first, second: [_whole(Place("layer1", 1, 1))], "width"),  # would broadcast over the whole vector
    ],
    ids=["nothing", "twice one place", "unequal variants", "unknown place", "a place of another width"],
)
@pytest.mark.parametrize("run", [respond, resume_edited])
def test_edits_that_do_not_fit_the_recording_are_refused(net, run, make, message):
    recording, _, _ = record_random(MLPSubject(net))
    with pytest.raises(PlotError, match=message):
        run(recording, make(*recording.subject.places[:2]))
