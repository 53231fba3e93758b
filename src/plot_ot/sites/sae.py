"""Features of sparse autoencoders as sites: SAELens directories, Gemma Scope files, and the menu of their features.

A feature is read through the encoder and written along its decoder direction, so that an edit leaves alone what the
autoencoder does not explain:  a <- a + W_dec ( g * ( enc(a_source) - enc(a) ) ).
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from plot_ot.edits import Frame
from plot_ot.edits.encoder import AT_ONCE, Encoder
from plot_ot.errors import PlotError, unknown, warn
from plot_ot.files.safe_reading import UNREADABLE, parse_json, read_bytes, read_npz, read_tensors
from plot_ot.sites.families import Menu, Site, SiteFamily
from plot_ot.subjects import Place, Recording

ARCHITECTURES = ("standard", "jumprelu", "topk", "gated")
KEEP = ("active", "all")
LARGEST = 32 << 30
"""The most bytes of weights that a file may unpack to."""
_CONFIG, _WEIGHTS, _PARAMS = "cfg.json", "sae_weights.safetensors", "params.npz"


@dataclass(frozen=True)
class SAE:
    """A sparse autoencoder: all its features as one frame, and what its decoder adds."""

    frame: Frame
    offset: Float[Tensor, " d"]
    """b_dec: what is reconstructed when no feature is active."""
    hook: str = ""
    """The TransformerLens name of the activation it was trained on, where known."""

    @classmethod
    def of(
        cls,
        W_enc: Float[Tensor, "d features"],
        W_dec: Float[Tensor, "features d"],
        b_enc: Float[Tensor, " features"],
        b_dec: Float[Tensor, " d"],
        *,
        threshold: Float[Tensor, " features"] | None = None,
        k: int | None = None,
        centred: bool = False,
        hook: str = "",
    ) -> SAE:
        """Make one from its weights: a ReLU encoder, a JumpReLU with a `threshold`, or one that keeps the `k` largest.

        `centred` encoders subtract b_dec from the activation first (SAELens's `apply_b_dec_to_input`).
        """
        d, size = W_enc.shape if W_enc.ndim == 2 else (0, 0)
        shapes = {"W_dec": (size, d), "b_enc": (size,), "b_dec": (d,), "threshold": (size,)}
        given = {"W_enc": W_enc, "W_dec": W_dec, "b_enc": b_enc, "b_dec": b_dec, "threshold": threshold}
        for name, tensor in given.items():
            if tensor is None:
                continue
            if not size or (name in shapes and tuple(tensor.shape) != shapes[name]):
                raise PlotError(
                    f"An autoencoder's {name} has shape {tuple(tensor.shape)}; with W_enc [width, features] = "
                    f"{tuple(W_enc.shape)} it must be {shapes.get(name, '[width, features], both positive')}."
                )
            if not tensor.is_floating_point() or not bool(torch.isfinite(tensor).all()):
                raise PlotError(
                    f"An autoencoder's {name} must hold finite floating-point numbers; found {tensor.dtype}."
                )
        if threshold is not None and k is not None:
            raise PlotError("An autoencoder has a threshold or keeps the k largest features, not both.")
        if k is not None and not 1 <= k <= size:
            raise PlotError(f"An autoencoder of {size} features cannot keep the {k} largest; k must be 1 to {size}.")
        dtype = torch.get_default_dtype()
        bias = b_enc.double() - (b_dec.double() @ W_enc.double() if centred else 0)
        limit = None if threshold is None else threshold.to(dtype)
        encoder = Encoder(bias.to(dtype), torch.arange(size), limit, k)
        return cls(Frame.encoded(W_enc.to(dtype), W_dec.T.to(dtype).contiguous(), encoder), b_dec.to(dtype), hook)

    @property
    def size(self) -> int:
        """The number of features."""
        return self.frame.rank

    @property
    def place(self) -> str:
        """The decoder's place it was trained on, as far as its hook's name tells; else empty."""
        found = re.fullmatch(r"blocks\.(\d+)\.hook_resid_(pre|post)", self.hook)
        layer = -1 if found is None else int(found[1]) - (found[2] == "pre")
        return f"block_output.{layer}" if layer >= 0 else ""

    def encode(self, a: Float[Tensor, "rows d"]) -> Float[Tensor, "rows features"]:
        """The feature activations of some states."""
        return self.frame.to(a.device, a.dtype).coordinates(a)

    def explained(self, a: Float[Tensor, "rows d"]) -> float:
        """The share of the activations' variance that the reconstruction explains: 1 at best, below 0 when it is worse
        than their mean, as at a place it was not trained on."""
        error = total = 0.0
        mean = a.mean(dim=0)
        for some in a.split(max(1, AT_ONCE // self.size)):
            back = self.frame.to(a.device, a.dtype).lift(self.encode(some)) + self.offset.to(a)
            error += float((some - back).double().square().sum())
            total += float((some - mean).double().square().sum())
        return 1 - error / max(total, 1e-300)


# -- the menu -------------------------------------------------------------------------------------------------

Source = SAE | str | os.PathLike[str]


def sae_features(
    sae: Source | Mapping[str, Source], place: str | None = None, keep: str | int | Sequence[int] = "active"
) -> Menu:
    """Every feature of an autoencoder as a site; `sae` is one, its directory or file, or one per place's name.

    `place` names where it reads; without it a SAELens directory's own hook name must tell. `keep` says which features
    become sites: the `active` ones, that differ between base and source of some fit pair (others cannot have an
    effect); so many that differ most; the numbers of your choice; or `all`.
    """
    if isinstance(keep, str) and keep not in KEEP:
        unknown("choice of features", keep, KEEP)
    if isinstance(keep, int) and keep < 1:
        raise PlotError(f"Keep at least one feature; found {keep}.")
    if isinstance(sae, Mapping):
        if place is not None:
            raise PlotError("Give one autoencoder and its place, or a mapping from places to autoencoders, not both.")
        found = {name: _loaded(one) for name, one in sae.items()}
    else:
        one = _loaded(sae)
        found = {place or one.place: one}
        if "" in found:
            raise PlotError(
                f"The autoencoder does not say at which place it reads (hook name '{one.hook}'); give `place`, "
                f"as in sae_features(path, place='block_output.12')."
            )

    def menu(recording: Recording, places: Sequence[Place]) -> SiteFamily:
        there = [p for p in places if p.name in found]
        if not there:
            raise PlotError(
                f"The autoencoders read at {', '.join(found)}, but the places open to this stage are "
                f"{', '.join(p.name for p in places)}. Name one of these, or open the place."
            )
        frames, sites = {}, []
        for p in there:
            frames[p.name], features = _frame(found[p.name], recording, p, keep)
            sites += [Site(f"{p.name}.sae[{f}]", p, (j,)) for j, f in enumerate(features)]
        return SiteFamily(tuple(sites), frames)

    return menu


def _loaded(sae: Source) -> SAE:
    return sae if isinstance(sae, SAE) else load_sae(sae)


def _frame(
    sae: SAE, recording: Recording, place: Place, keep: str | int | Sequence[int]
) -> tuple[Frame, Sequence[int]]:
    """The frame of the features kept at a place, and their numbers."""
    if sae.frame.width != place.width:
        raise PlotError(f"An autoencoder of width {sae.frame.width} does not fit {place.name} of width {place.width}.")
    like = recording.store.activations[place.name]
    frame = sae.frame.to(like.device, like.dtype)
    rows = torch.cat([recording.base_rows, recording.source_rows]).unique()
    if (share := sae.explained(like[rows])) < -0.01:  # beyond rounding
        warn(
            f"The autoencoder reconstructs the activations at {place.name} worse than their mean does (explained "
            f"variance {share:.2f}): it was trained on another place, another model, or scaled activations."
        )
    if keep == "all":
        return frame, range(sae.size)
    if isinstance(keep, (str, int)):
        moved = _movement(frame, recording, place)
        most = int((moved > 0).sum()) if isinstance(keep, str) else min(keep, int((moved > 0).sum()))
        if not most:
            raise PlotError(
                f"No feature at {place.name} differs between base and source of any fit pair: swapping features there "
                f"cannot do anything. Check that the autoencoder belongs to this place and model."
            )
        numbers = moved.topk(most).indices.sort().values
    else:
        numbers = torch.tensor(list(keep), dtype=torch.long)
        if not len(numbers) or int(numbers.min()) < 0 or int(numbers.max()) >= sae.size:
            raise PlotError(f"Features must be numbers in 0..{sae.size - 1}; found {list(keep)[:10]}.")
        if len(numbers.unique()) < len(numbers):
            raise PlotError(f"Each feature can be kept once; found repetitions in {list(keep)[:10]}.")
        numbers = numbers.to(like.device)
    return frame.only(numbers), numbers.tolist()


@torch.no_grad()
def _movement(frame: Frame, recording: Recording, place: Place) -> Float[Tensor, " features"]:
    """Σ_pairs |c(a_source) - c(a_base)| |w|: how far swapping each feature moves the activations."""
    base, source = recording.base_at(place), recording.source_at(place)
    moved = base.new_zeros(frame.rank, dtype=torch.float64)
    for b, s in zip(*(side.split(max(1, AT_ONCE // frame.rank)) for side in (base, source)), strict=True):
        moved += (frame.coordinates(s) - frame.coordinates(b)).abs().double().sum(dim=0)
    assert frame.write is not None  # noqa: S101
    change: Tensor = moved * frame.write.double().norm(dim=0)
    return change


# -- files ----------------------------------------------------------------------------------------------------


def load_sae(path: str | os.PathLike[str], scale: float | None = None) -> SAE:
    """Read a SAELens directory (`cfg.json` and `sae_weights.safetensors`) or Gemma Scope's `params.npz`.

    Architectures: standard, jumprelu, topk and gated. `scale` is the factor by which activations were multiplied in
    training, which `normalize_activations = expected_average_only_in` leaves to the user. Nothing is unpickled.
    """
    path = Path(path)
    if path.is_dir() and (path / _PARAMS).is_file() and not (path / _CONFIG).exists():
        path = path / _PARAMS
    if path.suffix == ".npz":
        config: dict[str, Any] = {"architecture": "jumprelu", "apply_b_dec_to_input": False}
        weights = _npz(path)
    elif path.is_dir():
        config, weights = _config(path / _CONFIG), _safetensors(path / _WEIGHTS)
    else:
        raise PlotError(f"{path} is neither a directory with {_CONFIG} and {_WEIGHTS} nor an .npz file.")
    try:
        return _from_config(config, weights, scale)
    except PlotError as e:
        raise PlotError(f"{path} cannot be used: {e}") from None


def _from_config(config: Mapping[str, Any], weights: dict[str, Tensor], scale: float | None) -> SAE:
    """An autoencoder from SAELens's settings; what would change results and is not known is refused by name."""
    metadata = config.get("metadata") if isinstance(config.get("metadata"), dict) else {}
    hook = str(config.get("hook_name") or metadata.get("hook_name") or "")  # type: ignore[union-attr]
    activation = config.get("activation_fn") or config.get("activation_fn_str") or "relu"  # before version 6
    architecture = config.get("architecture", "standard")
    k = config.get("k")
    if activation == "topk":
        architecture, kwargs = "topk", config.get("activation_fn_kwargs")
        k = kwargs.get("k", k) if isinstance(kwargs, dict) else k
    elif activation != "relu":
        unknown("activation function of an autoencoder", activation, ("relu", "topk"))
    if architecture not in ARCHITECTURES:
        unknown("architecture of an autoencoder", architecture, ARCHITECTURES)
    if architecture == "topk" and type(k) is not int:
        raise PlotError(f"a topk autoencoder needs a whole number k in its {_CONFIG}; found {k!r}.")
    if config.get("reshape_activations", "none") not in ("none", None) or hook.endswith("hook_z"):
        raise PlotError("it reads all attention heads side by side (hook_z), which is not one of our places.")
    scaled = _scale(config.get("normalize_activations"), scale)
    extra = weights.pop("scaling_factor", None)
    if extra is not None and not bool((extra == 1).all()):
        raise PlotError("its features are rescaled after encoding (scaling_factor), which is not supported.")
    needed = {"gated": ("W_enc", "W_dec", "b_dec", "b_gate", "b_mag", "r_mag")}.get(
        architecture, ("W_enc", "W_dec", "b_enc", "b_dec", *(("threshold",) if architecture == "jumprelu" else ()))
    )
    missing = [name for name in needed if name not in weights]
    if missing:
        raise PlotError(f"it lacks {', '.join(missing)}; {architecture} has {', '.join(needed)}.")
    w = {name: weights[name] for name in needed}
    for name, expected in (("d_in", w["W_enc"].shape[:1]), ("d_sae", w["W_enc"].shape[1:])):
        if config.get(name, None) not in (None, *expected):
            raise PlotError(f"its {_CONFIG} says {name} = {config[name]!r}, but W_enc is {tuple(w['W_enc'].shape)}.")
    if architecture == "gated":
        w = _ungated(w)
    elif architecture == "topk" and config.get("rescale_acts_by_decoder_norm", False):
        norm = w["W_dec"].norm(dim=1).clamp(min=1e-12)
        w |= {"W_enc": w["W_enc"] * norm, "b_enc": w["b_enc"] * norm, "W_dec": w["W_dec"] / norm[:, None]}
    w |= {"W_enc": w["W_enc"] * scaled, "W_dec": w["W_dec"] / scaled, "b_dec": w["b_dec"] / scaled}
    centred = bool(config.get("apply_b_dec_to_input", True))
    return SAE.of(**w, k=k if architecture == "topk" else None, centred=centred, hook=hook)


def _ungated(w: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A gated encoder is a JumpReLU: with m = e^r Wᵀa + b_mag, the gate Wᵀa + b_gate > 0 is m > b_mag - e^r b_gate."""
    if len({tuple(w[name].shape) for name in ("b_gate", "b_mag", "r_mag")} | {tuple(w["W_enc"].shape[1:])}) > 1:
        raise PlotError("b_gate, b_mag and r_mag must have one number per feature.")
    stretch = w["r_mag"].exp()
    threshold = w["b_mag"] - stretch * w["b_gate"]
    kept = {name: w[name] for name in ("W_dec", "b_dec")}
    return {**kept, "W_enc": w["W_enc"] * stretch, "b_enc": w["b_mag"], "threshold": threshold}


def _scale(normalised: Any, scale: float | None) -> float:
    """The factor on activations that `normalize_activations` asks for."""
    if normalised in (None, False, "none"):
        if scale is not None:
            raise PlotError("it reads activations as they are (normalize_activations is none): leave out `scale`.")
        return 1.0
    if normalised not in (True, "expected_average_only_in"):
        raise PlotError(
            f"it normalises activations by '{normalised}', which depends on each activation or is not folded into the "
            f"weights; supported are none and expected_average_only_in."
        )
    if scale is None or not 0 < scale < float("inf"):
        raise PlotError(
            f"it was trained on scaled activations (expected_average_only_in); give the positive factor as "
            f"load_sae(path, scale=...), sqrt(width) over the mean norm in training; found {scale}."
        )
    return scale


def _config(path: Path) -> dict[str, Any]:
    config = _read(path, lambda at: parse_json(read_bytes(at, 1 << 20)), "JSON")
    if not isinstance(config, dict):
        raise PlotError(f"{path} must hold a JSON object; found {type(config).__name__}.")
    return config


def _safetensors(path: Path) -> dict[str, Tensor]:
    found = _read(path, lambda at: read_tensors(at, LARGEST)[1], "safetensors file")
    return {name: t.float() if t.dtype in (torch.float16, torch.bfloat16) else t for name, t in found.items()}


def _npz(path: Path) -> dict[str, Tensor]:
    found = _read(path, lambda at: read_npz(at, LARGEST), ".npz file of numbers")
    return {_named(name): t for name, t in found.items()}


def _read(path: Path, read: Callable[[Path], Any], kind: str) -> Any:
    try:
        return read(path)
    except FileNotFoundError:
        raise PlotError(
            f"There is no {path}; an autoencoder is a directory with {_CONFIG} and {_WEIGHTS}, or an .npz file."
        ) from None
    except UNREADABLE as e:
        raise PlotError(f"{path} is not a readable {kind} ({type(e).__name__}: {e}).") from e


def _named(name: str) -> str:
    return "W_" + name[2:] if name.startswith("w_") else name  # either spelling occurs
