"""The check of annotated shapes itself: it finds what is false, and lets functions refuse in their own words."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from jaxtyping import Float, Int
from torch import Tensor

import plot_ot
from plot_ot.edits import Frame
from shapes import FalseShape, checked


@checked
def flipped(a: Float[Tensor, "rows d"]) -> Float[Tensor, "d rows"]:
    if a.ndim != 2:
        raise ValueError("two dimensions, please")
    return a.mT if a.shape[0] != 7 else a


@checked
@dataclass
class Weighted:
    rows: Float[Tensor, "rows d"]
    weight: Float[Tensor, " rows"] | None = None
    at: tuple[Int[Tensor, " rows"], Int[Tensor, " rows"]] | None = None


def test_what_agrees_passes_and_a_refusal_is_the_functions_own():
    assert flipped(torch.ones(2, 3)).shape == (3, 2)
    with pytest.raises(ValueError, match="two dimensions"):
        flipped(torch.ones(3))
    Weighted(torch.ones(2, 3), torch.ones(2), (torch.zeros(2).long(), torch.zeros(2).long()))


def test_a_false_shape_is_named():
    with pytest.raises(FalseShape, match=r"flipped: return .*'d rows'.*\(7, 3\)"):
        flipped(torch.ones(7, 3))
    with pytest.raises(FalseShape, match="flipped: a"):
        flipped(torch.ones(2, 3).long())
    with pytest.raises(FalseShape, match="Weighted: weight"):
        Weighted(torch.ones(2, 3), torch.ones(3))
    with pytest.raises(FalseShape, match="Weighted: at"):
        Weighted(torch.ones(2, 3), at=(torch.zeros(2).long(), torch.zeros(3).long()))


def test_shapes_that_passed_before_hide_none_that_are_false():
    for _ in range(2):
        flipped(torch.ones(2, 3))
        flipped(a=torch.ones(2, 3))
        with pytest.raises(FalseShape, match="flipped: return"):
            flipped(torch.ones(7, 3))
        with pytest.raises(FalseShape, match="flipped: a"):
            flipped(torch.ones(2, 3).long())
        Weighted(torch.ones(2, 3), torch.ones(2))
        with pytest.raises(FalseShape, match="Weighted: weight"):
            Weighted(torch.ones(3, 3), torch.ones(2))


def test_the_package_is_loaded_with_the_check():
    assert all(hasattr(f, "__wrapped__") for f in (Frame.coordinates, Frame.__init__, plot_ot.solve))
    with pytest.raises(FalseShape, match="Frame: write"):
        Frame(3, torch.ones(3, 2), torch.ones(3, 1))
