"""Handles to and from causalab's featurizer bundles: a fitted `subspace` in one safetensors file.

The bundle holds the slot `weight`, [d, k]; causalab reads f = Wᵀ a and puts a back together as a + W (f_source - f), so
what it does is M = W Wᵀ. That takes any symmetric M ≥ 0: directions of strength λ are columns of length √λ, and the
strength is folded in exactly. Negative strengths, oblique edits and several places are refused. What the bundle is for
stands in the file's metadata by the names of causalab's ArtifactIdentity, which its loader compares with the document.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

from plot_ot.edits import Frame
from plot_ot.errors import PlotError
from plot_ot.exchange.fold import EXACT, only_edit, principal, shape_of
from plot_ot.exchange.names import parse_place_name
from plot_ot.exchange.torch_files import tensor_of
from plot_ot.files.safe_reading import UNREADABLE, open_tensors, parse_json
from plot_ot.files.writing import to_json, write_atomically
from plot_ot.handles import Edit, Handle
from plot_ot.subjects import Subject
from plot_ot.version import __version__

TARGET = "A causalab bundle"
COMPONENTS = {
    "block_output": "block_output",
    "attention_output": "attention_output",
    "mlp_output": "mlp_output",
    "head_output": "attention_premix",
}
"""causalab's component for each kind of place."""


def to_causalab(
    handle: Handle,
    path: str | os.PathLike[str],
    *,
    model_key: str,
    model_dtype: str = "fp32",
    model_revision: str | None = None,
    parametrization: str = "cayley",
    trained_on: str | None = None,
) -> None:
    """Write the handle as a `subspace` bundle for the `file_path` of a causalab featurizer.

    `model_key`, `model_dtype` and `model_revision` are what the causalab document says of its model, `parametrization`
    what it says of the subspace: its loader refuses a bundle that says otherwise. The token position is the document's.
    """
    edit = only_edit(handle, TARGET)
    at, found = parse_place_name(edit.place), principal(edit)
    if found is None or not bool((found.strengths > 0).all()):
        raise PlotError(
            f"{TARGET} holds symmetric edits of positive strength; at {edit.place.name} the handle for "
            f"'{handle.variable}' has {shape_of(edit)}. Export it to pyvene."
        )
    site: dict[str, Any] = {"component": COMPONENTS[at.kind], "layers": [at.layer]}
    if at.head is not None:
        site["head"] = at.head
    identity = {
        "model_key": model_key,
        "model_revision": model_revision,
        "model_dtype": model_dtype,
        "site": json.dumps(site, sort_keys=True),
        "k": str(found.basis.shape[1]),
        "parametrization": parametrization,
        "dtype": "fp32",
        "trained_on": trained_on,
        "engine": f"plot-ot {__version__}",
        "plot_ot": to_json({"variable": handle.variable, "subject": handle.subject, "place": edit.place.name}),
    }
    weight = (found.basis * found.strengths.sqrt()).contiguous()
    metadata = {key: value for key, value in identity.items() if value is not None}
    write_atomically(Path(path), save({"weight": weight}, metadata=metadata))


def from_causalab(
    path: str | os.PathLike[str],
    subject: Subject,
    variable: str,
    *,
    place: str | None = None,
    entry: str | None = None,
) -> Handle:
    """The handle of a fitted `subspace` (or `pca`) bundle.

    A bundle of a sweep has several entries, `weight[k=8,seed=0]`: `entry` names one. The place is `place`, or the one
    that `to_causalab` wrote down, or the last token of the bundle's site.
    """
    try:
        with open_tensors(path) as file:
            metadata = file.metadata() or {}
            names = [n for n in file.keys() if n == "weight" or n.startswith("weight[")]  # noqa: SIM118
            wanted = [n for n in names if entry in (None, n)]
            if len(wanted) != 1:
                raise PlotError(
                    f"{path} has {len(wanted)} subspaces{f' named {entry}' if entry else ''}; there are: "
                    f"{', '.join(names[:8]) or 'none'}. Name one with `entry`."
                )
            where = subject.place(place or _our_place(metadata) or _place_name(metadata, wanted[0]))
            shape = file.get_slice(wanted[0]).get_shape()
            if len(shape) != 2 or shape[0] != where.width or not 1 <= shape[1] <= where.width:
                raise PlotError(f"{path} holds a subspace of shape {shape}; {where.name} has width {where.width}.")
            weight = tensor_of(file.get_tensor(wanted[0]), wanted[0])
    except FileNotFoundError:
        raise PlotError(f"There is no causalab bundle at {path}.") from None
    except UNREADABLE as e:
        raise PlotError(f"{path} is not a readable causalab bundle ({type(e).__name__}: {e}).") from e
    gram = weight.double().T @ weight.double()
    lengths = gram.diagonal().sqrt()
    chosen = {"imported": "causalab", "entry": wanted[0], "trained_on": metadata.get("trained_on")}
    if float((gram - gram.diagonal().diag()).abs().max()) <= 10 * EXACT * float(lengths.max()) ** 2 and lengths.all():
        edit = Edit(where, Frame(where.width, (weight / lengths).float(), None, "rotation"), _rounded(lengths**2))
    else:  # columns that are not orthogonal still mean M = W Wᵀ
        edit = Edit(where, Frame.oblique(weight, weight), torch.ones(weight.shape[1]))
    return Handle(variable, (edit,), subject.identity(), chosen)


def _rounded(strengths: torch.Tensor) -> torch.Tensor:
    """Replace strengths that differ from 1 by rounding only by 1."""
    return torch.where((strengths - 1).abs() < 10 * EXACT, 1.0, strengths).float()


def _our_place(metadata: dict[str, str]) -> str | None:
    """The place that `to_causalab` wrote down, its token included, which causalab's site does not know."""
    ours = parse_json(metadata.get("plot_ot", "{}"))
    named = ours.get("place") if isinstance(ours, dict) else None
    return named if isinstance(named, str) else None


def _place_name(metadata: dict[str, str], entry: str) -> str:
    """The last token of the site that the bundle, or this entry of it, was fitted at."""
    entries = parse_json(metadata.get("entries", "{}"))
    said = entries.get(entry, {}).get("site", metadata.get("site"))
    site = parse_json(said) if isinstance(said, str) else said
    kinds = {theirs: ours for ours, theirs in COMPONENTS.items()}
    if not isinstance(site, dict) or site.get("component") not in kinds or len(site.get("layers") or []) != 1:
        raise PlotError("The bundle does not say which layer and component it is for; name the `place`.")
    head = f".{int(site['head'])}" if "head" in site else ""
    return f"{kinds[site['component']]}.{int(site['layers'][0])}{head}"
