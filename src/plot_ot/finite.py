"""The one check that numbers are numbers: NaN and infinity are refused where they appear, in the caller's words."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from jaxtyping import Bool
from torch import Tensor

from plot_ot.errors import PlotError


def refuse_non_finite(values: Tensor, message: Callable[[Bool[Tensor, "..."]], str]) -> None:
    """Refuse values that are NaN or infinite; `message` is asked for the error, given which of them are."""
    if math.isfinite(float(values.sum())):  # one pass and no mask, almost always
        return
    bad = ~torch.isfinite(values)
    if bool(bad.any()):
        raise PlotError(message(bad))
