"""Frames and batches of edits by their own equation, a + W(g * (Rᵀ a_source - Rᵀ a)), one variant at a time."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from nets import orthonormal, rand
from plot_ot.edits import EditBatch, Frame
from plot_ot.edits.encoder import Encoder
from plot_ot.errors import PlotError
from plot_ot.subjects import Place

D, R, PAIRS = 5, 2, 4
PLACE = Place("here", D, 1)
ORTHONORMAL = [orthonormal(k, D, R) for k in range(3)]
OBLIQUE = [Frame.oblique(rand(10 + k, D, R), rand(20 + k, D, R), "closed form") for k in range(3)]


def by_hand(read: Tensor, write: Tensor, gains: Tensor, a: Tensor, source: Tensor) -> Tensor:
    """[pairs, d] for one variant, by dense d x d matrices."""
    moved = write @ torch.diag(gains) @ read.T
    return torch.stack([x + moved @ (s - x) for x, s in zip(a, source, strict=True)])


def states(variants: int = 1) -> tuple[Tensor, Tensor]:
    return rand(30, variants, PAIRS, D), rand(31, PAIRS, D)


def both(frame: Frame) -> tuple[Tensor, Tensor]:
    """R and W of a frame, whichever it was given."""
    read = torch.eye(frame.width) if frame.read is None else frame.read
    return read, read if frame.write is None else frame.write


# -- stacking -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "frames",
    [
        OBLIQUE,
        [Frame.orthonormal(q, "das") for q in ORTHONORMAL],
        [Frame.orthonormal(ORTHONORMAL[0], "das"), *OBLIQUE[1:]],
        [*OBLIQUE[:2], Frame.orthonormal(ORTHONORMAL[2], "das")],
    ],
    ids=["oblique", "orthonormal", "orthonormal first", "orthonormal last"],
)
@pytest.mark.parametrize("each", [1, 3], ids=["one state", "a state per variant"])
def test_a_variant_of_stacked_frames_reads_and_writes_as_its_own_frame(frames, each):
    stacked = Frame.stack(frames)
    assert (stacked.width, stacked.rank, stacked.kind) == (D, R, frames[0].kind)
    gains, (a, source) = rand(32, 3, R), states(each)
    edited = EditBatch(PLACE, stacked, gains).apply(a, source)
    for v, frame in enumerate(frames):
        expected = by_hand(*both(frame), gains[v], a[v if each > 1 else 0], source)
        torch.testing.assert_close(edited[v], expected, rtol=1e-4, atol=1e-5)


def test_stacked_identities_stay_the_identity():
    assert Frame.stack([Frame.identity(D)] * 3) == Frame.identity(D)


def test_selecting_variants_keeps_each_with_its_own_directions_and_gains():
    edit = EditBatch(PLACE, Frame.stack(OBLIQUE), rand(33, 3, R))
    a, source = states()
    whole = edit.apply(a, source)
    for some in (torch.tensor([2, 0]), slice(1, 3)):
        torch.testing.assert_close(edit.select(some).apply(a, source), whole[some], rtol=1e-5, atol=1e-6)
    shared = EditBatch(PLACE, OBLIQUE[0], rand(33, 3, R))
    torch.testing.assert_close(shared.select(torch.tensor([1])).apply(a, source), shared.apply(a, source)[1:2])


# -- composing ------------------------------------------------------------------------------------------------

INNER = {
    "orthonormal": Frame.orthonormal(orthonormal(40, R, 1), "inner"),
    "oblique": Frame.oblique(rand(41, R, 1), rand(42, R, 1), "inner"),
}


@pytest.mark.parametrize("inner", INNER.values(), ids=INNER)
@pytest.mark.parametrize(
    "outer", [Frame.orthonormal(ORTHONORMAL[0], "pca"), OBLIQUE[0]], ids=["orthonormal", "oblique"]
)
def test_composing_multiplies_what_is_read_and_what_is_written_apart(outer, inner):
    composed = outer.compose(inner)
    (outer_read, outer_write), (inner_read, inner_write) = both(outer), both(inner)
    read, write = both(composed)
    torch.testing.assert_close(read, outer_read @ inner_read)
    torch.testing.assert_close(write, outer_write @ inner_write)
    assert (composed.width, composed.rank, composed.kind) == (D, 1, "inner")
    assert (composed.write is None) == (outer.write is None and inner.write is None)


def test_composing_with_the_identity_gives_the_other_frame():
    frame = OBLIQUE[0]
    assert Frame.identity(D).compose(frame) is frame
    assert frame.compose(Frame.identity(R)) is frame


# -- frames read through an encoder ---------------------------------------------------------------------------


def sae() -> Frame:
    encoder = Encoder(rand(50, R), torch.tensor([7, 3]), torch.rand(R))
    return Frame.encoded(rand(51, D, R), rand(52, D, R), encoder, "features")


def test_an_encoded_frame_keeps_all_it_was_given():
    frame = sae()
    assert (frame.width, frame.rank, frame.kind) == (D, R, "features")
    a = rand(53, 3, D)
    torch.testing.assert_close(frame.coordinates(a), frame.encoder.read(a, frame.read, None))
    assert (frame.coordinates(a) >= 0).all()
    torch.testing.assert_close(frame.lift(rand(54, 3, R)), rand(54, 3, R) @ frame.write.T)
    assert Frame.encoded(frame.read, frame.write, frame.encoder).kind == "sae"


def test_an_edit_through_an_encoder_writes_what_its_readings_differ_by():
    frame, gains, (a, source) = sae(), rand(57, 3, R), states()
    edited = EditBatch(PLACE, frame, gains).apply(a, source)
    difference = frame.coordinates(source) - frame.coordinates(a[0])
    assert (difference != 0).any(dim=0).all()
    for v in range(3):
        torch.testing.assert_close(edited[v], a[0] + (gains[v] * difference) @ frame.write.T, rtol=1e-4, atol=1e-5)


def test_some_directions_of_a_frame_are_read_and_written_as_before():
    a, some = rand(55, 3, D), torch.tensor([1])
    for frame in (Frame.orthonormal(ORTHONORMAL[0], "pca"), OBLIQUE[0], sae()):
        only = frame.only(some)
        assert (only.width, only.rank, only.kind, only.write is None) == (D, 1, frame.kind, frame.write is None)
        torch.testing.assert_close(only.coordinates(a), frame.coordinates(a)[:, some])
        c = torch.zeros(3, R).index_copy(1, some, rand(56, 3, 1))
        torch.testing.assert_close(only.lift(rand(56, 3, 1)), frame.lift(c))


def test_moving_a_frame_moves_all_its_tensors():
    frame = sae().to(torch.device("cpu"), torch.float64)
    tensors = [frame.read, frame.write, frame.encoder.bias, frame.encoder.threshold]
    assert [t.dtype for t in tensors] == [torch.float64] * 4
    assert frame.encoder.features.dtype == torch.long
    assert Frame.orthonormal(ORTHONORMAL[0]).to(torch.device("meta"), torch.float32).read.device.type == "meta"
    moved = OBLIQUE[0].to(torch.device("meta"), torch.float64)
    assert (moved.read.device.type, moved.write.device.type, moved.write.dtype) == ("meta", "meta", torch.float64)
    assert Frame.identity(D).to(torch.device("meta"), torch.float64) == Frame.identity(D)


def test_directions_behind_an_encoder_are_neither_stacked_nor_mixed():
    inner = Frame.orthonormal(orthonormal(40, R, 1))
    mixed, stacked = "mixed with others", "stacked with other frames"
    for act, use in (
        (lambda: sae().compose(inner), mixed),
        (lambda: Frame.stack([sae()]), stacked),
        (lambda: Frame.stack([OBLIQUE[0], sae()]), stacked),
    ):
        with pytest.raises(PlotError, match=f"'features' frame are read through an encoder and cannot be {use}"):
            act()


@pytest.mark.parametrize(
    ("read", "write", "bias"),
    [((1, D, R), (1, D, R), R), ((D, R), (D, R + 1), R), ((D, R), (D, R), R + 1)],
    ids=["one frame per variant", "unequal shapes", "a bias too many"],
)
def test_encoded_frames_of_other_shapes_are_refused(read, write, bias):
    with pytest.raises(PlotError, match=r"must be \[d, r\], \[d, r\] and \[r\]"):
        Frame.encoded(rand(0, *read), rand(1, *write), Encoder(rand(2, bias), torch.arange(bias)))


# -- what is refused ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("off", "fits"), [(0.9e-3, True), (1.1e-3, False)])
def test_columns_may_be_a_thousandth_from_orthonormal(off, fits):
    directions = torch.eye(D, R, dtype=torch.float64)
    directions[R, 0] = off**0.5
    if fits:
        frame = Frame.orthonormal(directions)
        assert (frame.width, frame.write, frame.kind) == (D, None, "orthonormal")
    else:
        with pytest.raises(PlotError, match="not orthonormal"):
            Frame.orthonormal(directions)


def test_a_frame_is_as_wide_as_its_columns_are_long():
    assert [Frame.oblique(rand(0, *s), rand(1, *s)).width for s in ((D, R), (3, D, R))] == [D, D]
    assert Frame.oblique(rand(0, D, R), rand(1, D, R)).kind == "oblique"
    assert Frame.orthonormal(orthonormal(0, 3, D, R)).width == D


def test_an_identity_takes_each_coordinate_by_its_own_gain():
    a, source = states(3)
    gains = rand(60, 3, D)
    one, each = (EditBatch(PLACE, Frame.identity(D), gains).apply(x, source) for x in (a[:1], a))
    for v in range(3):
        eye = torch.eye(D)
        torch.testing.assert_close(one[v], by_hand(eye, eye, gains[v], a[0], source), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(each[v], by_hand(eye, eye, gains[v], a[v], source), rtol=1e-4, atol=1e-5)
