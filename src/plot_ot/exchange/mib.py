"""Handles to and from the featurizer triplets of MIB's causal-variable track.

A unit of a submission is three files beside each other, `<unit>_featurizer`, `<unit>_inverse_featurizer` and
`<unit>_indices`: what CausalAbstraction's `Featurizer.save_modules` and `save_featurizers` write and `load_modules`
reads. A unit is `ResidualStream(Layer-3,Token-last_token)`, the output of block 3, or
`AttentionHead(Layer-3,Head-1,Token-...)`. The featurizer is the identity or a rotation, and the features of the indices
are swapped: so it holds one place, orthonormal directions and strength 1, and anything else is refused.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from plot_ot.edits import Frame
from plot_ot.errors import PlotError
from plot_ot.exchange.fold import neurons, only_edit, principal, shape_of
from plot_ot.exchange.names import parse_place_name
from plot_ot.exchange.torch_files import RotateLayer, most_bytes, rotation_in, to_bytes
from plot_ot.files.safe_reading import UNREADABLE, parse_json, read_bytes, read_torch_file
from plot_ot.files.writing import write_atomically
from plot_ot.handles import Edit, Handle
from plot_ot.subjects import Place, Subject

TARGET = "An MIB featurizer"
LAST_TOKEN = "last_token"  # noqa: S105 - a position, not a secret
SUFFIXES = ("_featurizer", "_inverse_featurizer", "_indices")
UNIT = re.compile(
    r"(?P<kind>ResidualStream|AttentionHead)\(Layer.(?P<layer>\d{1,4})"
    r"(?:,Head.(?P<head>\d{1,4}))?(?:,(?P<side>block_input|block_output))?,Token.(?P<token>[^,()/\\\x00-\x1f]{1,80})\)"
)


def to_mib(handle: Handle, directory: str | os.PathLike[str], *, token: str | None = None) -> Path:
    """Write the handle's triplet into a directory (of a submission: `{task}_{model}_{variable}`).

    `token` is what MIB's task calls the token position; by default the position's own name, and `last_token` for the
    last token. Gives the path that the three names begin with.
    """
    edit = only_edit(handle, TARGET)
    at = parse_place_name(edit.place)
    if at.kind not in ("block_output", "head_output"):
        raise PlotError(f"{TARGET} is for the residual stream or an attention head, not for {edit.place.name}.")
    token = token or at.position or LAST_TOKEN
    what = f"ResidualStream(Layer-{at.layer}" if at.head is None else f"AttentionHead(Layer-{at.layer},Head-{at.head}"
    unit = f"{what},Token-{token})"
    if not UNIT.fullmatch(unit):
        raise PlotError(
            f"'{token}' cannot be part of a file name of MIB; pass the task's name of the position as `token`."
        )
    chosen, found = neurons(edit), principal(edit)
    if chosen is None and (found is None or not found.swaps):
        raise PlotError(
            f"{TARGET} swaps orthonormal directions with strength 1; at {edit.place.name} the handle for "
            f"'{handle.variable}' has {shape_of(edit)}. Export it to pyvene, or a DAS handle of the same place to MIB."
        )
    swapped = chosen if chosen is not None and len(chosen) < edit.place.width else None
    basis = None if chosen is not None or found is None else found.basis
    return write_triplet(Path(directory) / unit, edit.place.width, basis, swapped, handle.variable)


def write_triplet(
    base: Path, width: int, basis: Float[Tensor, "d k"] | None, indices: list[int] | None, variable: str
) -> Path:
    """Write the three files whose names begin with `base`: a rotation, or without one the identity, and indices."""
    kind, state, options, features = "Identity", dict[str, Tensor](), dict[str, Any](), width
    if basis is not None:
        layer = RotateLayer(basis)
        kind, features = "Subspace", basis.shape[1]
        state = {f"rotate.{name}": t for name, t in layer.state_dict().items()}
        options = {"rotation_matrix": layer.weight.detach().clone(), "requires_grad": False}
    info = {
        "featurizer_class": f"{kind}FeaturizerModule",
        "inverse_featurizer_class": f"{kind}InverseFeaturizerModule",
        "n_features": features,
        "featurizer_id": f"plot-ot {variable}",
        "additional_config": options,
    }
    for suffix in SUFFIXES[:2]:
        write_atomically(Path(f"{base}{suffix}"), to_bytes({"model_info": info, "state_dict": state}))
    write_atomically(Path(f"{base}_indices"), json.dumps(indices).encode())
    return base


def from_mib(
    directory: str | os.PathLike[str],
    subject: Subject,
    variable: str,
    *,
    unit: str | None = None,
    place: str | None = None,
) -> Handle:
    """The handle of a triplet in a directory; `unit` names one of several, `place` overrides where it goes."""
    try:
        names = sorted(
            p.name.removesuffix("_indices") for p in Path(directory).iterdir() if p.name.endswith("_indices")
        )
        wanted = [n for n in names if UNIT.fullmatch(n) and unit in (None, n)]
        if len(wanted) != 1:
            raise PlotError(
                f"{directory} has {len(wanted)} triplets{f' named {unit}' if unit else ''}; there are: "
                f"{', '.join(names[:8]) or 'none'}. Name one with `unit`."
            )
        base = Path(directory) / wanted[0]
        where = subject.place(place or _place_name(wanted[0]))
        frame, gains = _read(base, where)
    except FileNotFoundError as e:
        raise PlotError(f"There is no MIB triplet: {e.filename} is missing.") from None
    except UNREADABLE as e:
        raise PlotError(f"{directory} holds no readable MIB triplet ({type(e).__name__}: {e}).") from e
    chosen = {"imported": "mib", "unit": wanted[0]}
    return Handle(variable, (Edit(where, frame, gains),), subject.identity(), chosen)


def _place_name(unit: str) -> str:
    found = UNIT.fullmatch(unit)
    assert found is not None  # noqa: S101
    token, layer = found["token"], int(found["layer"])
    position = "" if token in (LAST_TOKEN, "last") else f"@{token}"
    if (found["kind"] == "AttentionHead") != (found["head"] is not None):
        raise ValueError(f"{unit} names no unit")
    if found["head"] is not None:
        return f"head_output.{layer}.{int(found['head'])}{position}"
    return f"block_output.{layer - (found['side'] == 'block_input')}{position}"


def _read(base: Path, place: Place) -> tuple[Frame, Float[Tensor, " r"]]:
    d = place.width
    saved, inverse = (read_torch_file(f"{base}{suffix}", most_bytes(d)) for suffix in SUFFIXES[:2])
    kind = saved["model_info"]["featurizer_class"]
    if kind == "IdentityFeaturizerModule":
        frame = Frame.identity(d)
    elif kind == "SubspaceFeaturizerModule":
        rotation, back = (rotation_in(half["state_dict"], "rotate.", d) for half in (saved, inverse))
        if not torch.allclose(rotation, back, atol=1e-6):
            raise ValueError("featurizer and inverse featurizer hold different rotations")
        frame = Frame(d, rotation, None, "rotation")
    else:
        raise PlotError(
            f"A featurizer of class {str(kind)[:80]} is not linear; only identities and rotations are read."
        )
    indices = parse_json(read_bytes(f"{base}_indices", 1 << 24))
    gains = torch.ones(frame.rank)
    if indices is not None:
        if not isinstance(indices, list) or not indices or len(set(indices)) != len(indices):
            raise ValueError("indices that are not a list of distinct numbers")
        if not all(type(i) is int and 0 <= i < frame.rank for i in indices):
            raise ValueError(f"indices outside 0..{frame.rank - 1}")
        gains = torch.zeros(frame.rank)
        gains[indices] = 1
    if frame.read is None:
        return frame, gains
    return Frame(d, frame.read[:, gains != 0], None, "rotation"), gains[gains != 0]
