"""What an edit is once its frame and gains are multiplied out: which formats can hold it without a rounding of meaning.

An edit moves the activation by M (a_source - a) with M = W diag(g) Rᵀ. A format that knows only swaps of neurons or of
subspaces holds exactly those edits whose M is a projection; one that takes any weights holds every symmetric M ≥ 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from plot_ot.errors import PlotError
from plot_ot.handles import Edit, Handle

EXACT = 2e-6
"""Relative difference below which two float32 edits are one."""


@dataclass(frozen=True)
class Principal:
    """A symmetric M as orthonormal directions, each taken from the source with its own strength."""

    basis: Float[Tensor, "d k"]
    strengths: Float[Tensor, " k"]

    @property
    def swaps(self) -> bool:
        """Whether every direction is swapped, no more and no less."""
        return bool(((self.strengths - 1).abs() <= EXACT).all())


def principal(edit: Edit) -> Principal | None:
    """The directions and strengths of M, or None where M is not symmetric (an oblique frame)."""
    used = edit.gains.detach().cpu().nonzero().squeeze(1)
    gains = edit.gains.detach().cpu()[used].float()
    if edit.frame.read is None:
        basis = torch.zeros(edit.frame.width, len(used))
        basis[used, torch.arange(len(used))] = 1
        return Principal(basis, gains)
    read, write = factors(edit)
    if edit.frame.write is None:
        error = (read.T @ read - torch.eye(len(used), dtype=torch.float64)).abs().max()
        if float(error) < 5 * EXACT:
            return Principal(read.float(), gains)
    Q, T = torch.linalg.qr(read)
    inside = Q.T @ write
    M = inside @ T.T  # M in the coordinates of what is read
    scale = float(write.norm()) * float(read.norm())
    if float((write - Q @ inside).norm()) * float(read.norm()) > EXACT * scale:
        return None  # it writes where it does not read
    if float((M - M.T).norm()) > EXACT * scale:
        return None
    strengths, turn = torch.linalg.eigh((M + M.T) / 2)
    kept = strengths.abs() > EXACT * strengths.abs().max()
    return Principal((Q @ turn[:, kept]).float(), strengths[kept].float())


def neurons(edit: Edit) -> list[int] | None:
    """The coordinates that are swapped, or None where the edit is anything but a swap of some coordinates."""
    if edit.frame.read is not None:
        return None
    gains = edit.gains.detach().cpu()
    if bool(((gains != 0) & ((gains - 1).abs() > EXACT)).any()):
        return None
    return [int(i) for i in gains.nonzero().squeeze(1)]


def factors(edit: Edit) -> tuple[Float[Tensor, "d k"], Float[Tensor, "d k"]]:
    """R and W diag(g) in float64, without the directions of gain zero."""
    gains = edit.gains.detach().cpu().double()
    used = gains != 0
    read = torch.eye(edit.frame.width) if edit.frame.read is None else edit.frame.read.detach().cpu()
    write = read if edit.frame.write is None else edit.frame.write.detach().cpu()
    return read[:, used].double(), write[:, used].double() * gains[used]


def effective_edits(handle: Handle, target: str) -> list[Edit]:
    """The edits of a handle that change something; refuses edits that no linear format holds."""
    for edit in handle.edits:
        if edit.frame.encoder is not None:
            raise PlotError(
                f"The handle for '{handle.variable}' reads {edit.place.name} through a nonlinear encoder; {target} "
                f"holds linear edits only. Save it with handle.save, or export a linear handle."
            )
        if edit.place.way:
            raise PlotError(
                f"The handle for '{handle.variable}' acts along the path {edit.place.name}, and {target} knows places "
                f"only. Save it with handle.save, and use it with plot_ot.along."
            )
    edits = [edit for edit in handle.edits if edit.size]
    if not edits:
        raise PlotError(f"The handle for '{handle.variable}' changes nothing; there is nothing to export to {target}.")
    return edits


def only_edit(handle: Handle, target: str) -> Edit:
    """The one edit of a handle, for formats that hold one place."""
    edits = effective_edits(handle, target)
    if len(edits) > 1:
        raise PlotError(
            f"{target} holds one place, but the handle for '{handle.variable}' edits {len(edits)}: "
            f"{', '.join(e.place.name for e in edits)}. Export it to pyvene, or calibrate a handle at one place."
        )
    return edits[0]


def shape_of(edit: Edit) -> str:
    """Say in words why an edit is not a plain swap."""
    found = principal(edit)
    if found is None:
        return "an oblique edit (what it reads is not what it writes)"
    low, high = float(found.strengths.min()), float(found.strengths.max())
    return f"a strength other than 1 ({low:.4g})" if high - low < EXACT else f"strengths from {low:.4g} to {high:.4g}"
