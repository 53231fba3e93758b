"""Adapters: small changes to a language model that belong to one set of weights.

An adapter is a directory in peft's format (LoRA, safetensors) with `planted.json`, which says what was trained into the
model, how well it held, and the digest of the weights it was trained on.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import nn

from plot_ot.errors import PlotError
from plot_ot.files.safe_reading import UNREADABLE, read_json, read_tensors, refuse_strange_files
from plot_ot.files.writing import Json, write_atomically, write_json

ADAPTER_FORMAT = "plot-ot adapter 1"
RECORD = "planted.json"
SPELLED_OUT = ("peft_type", "task_type", "r", "lora_alpha", "lora_dropout", "bias")
PLAIN = (
    *SPELLED_OUT,
    *("target_modules", "layers_to_transform", "layers_pattern", "use_rslora", "fan_in_fan_out"),
    *("base_model_name_or_path", "inference_mode", "peft_version", "revision"),
)
"""The settings that an adapter's configuration may have; any other would make peft import, train or keep something."""
_NOTHING: tuple[object, ...] = (None, {}, [])
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors", RECORD)


def digest_weights(model: nn.Module) -> str:
    """A digest of a model's parameters, in their own precision: what an adapter knows its base by."""
    digest = hashlib.sha256()
    for name, weight in sorted(model.named_parameters()):
        digest.update(f"{name}:{tuple(weight.shape)}:{weight.dtype}".encode())
        digest.update(weight.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def read_record(directory: Path) -> Json:
    """An adapter's own description; refuses a directory that is no adapter of ours."""
    for file in ADAPTER_FILES:
        if not (directory / file).is_file():
            raise PlotError(
                f"{directory} is not an adapter: {file} is missing. Expected {', '.join(ADAPTER_FILES)}, as "
                f"plot_ot.models.save_adapter writes them."
            )
    record: Json = read_json(directory / RECORD)
    base = record.get("base") if isinstance(record, dict) else None
    if (
        not isinstance(base, dict)
        or record.get("format") != ADAPTER_FORMAT
        or not all(isinstance(base.get(key), str) for key in ("name", "weights"))
    ):
        raise PlotError(f"{directory / RECORD} does not describe an adapter ({ADAPTER_FORMAT!r} with its 'base').")
    return record


def load_adapter(model: nn.Module, directory: Path) -> tuple[nn.Module, Json]:
    """Merge a LoRA adapter into its base model, in place: a plain decoder again, and the adapter's record.

    The adapter was made on one set of weights and says nothing about others, so any other base is refused.
    """
    record = read_record(directory)
    _refuse_config(directory / ADAPTER_FILES[0])
    found, wanted = digest_weights(model), record["base"]["weights"]
    if found != wanted:
        raise PlotError(
            f"The adapter {directory} belongs to {record['base']['name']} with weights "
            f"{wanted[:16]}; this model's are {found[:16]}. Load that base in float32, without another adapter, or "
            f"train an adapter for this one."
        )
    return placed_adapter(model, directory).merge_and_unload().eval(), record


def placed_adapter(model: nn.Module, directory: Path) -> Any:
    """The model wrapped by peft with an adapter in it, every tensor of the adapter's file in its place.

    Only `adapter_config.json` and `adapter_model.safetensors` are read: `adapter_model.bin` is a pickle.
    """
    config, weights = (directory / file for file in ADAPTER_FILES[:2])
    library = _peft()
    for path in (config, weights):
        if not path.is_file():
            raise PlotError(
                f"{directory} holds no {path.name}, so it cannot be read as an adapter. Save it with peft, as "
                f"safetensors."
            )
    refuse_strange_files(directory)
    asked = read_json(config)
    if not isinstance(asked, dict) or asked.get("megatron_config"):
        raise PlotError(f"{config} does not describe an adapter of a Hugging Face model.")
    try:
        _, tensors = read_tensors(weights)
        if not all(bool(torch.isfinite(t).all()) for t in tensors.values()):
            raise ValueError("NaN or infinity in its tensors")
    except UNREADABLE as e:
        raise PlotError(f"{weights} is damaged ({e}).") from e
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of tensors that do not fit, which are refused below
            adapted = library.PeftModel.from_pretrained(model, str(directory), use_safetensors=True)
        placed = _tensors(adapted)
    except Exception as e:  # a configuration that does not fit fails in many ways
        raise PlotError(f"{config} does not fit the model: {e} Load the model again.") from e
    for name in sorted({*placed, *tensors}):
        if name not in placed or name not in tensors:
            where = "its file" if name in placed else "the adapted model"
            raise PlotError(
                f"{weights} holds other tensors than its configuration asks for: {name} is not in {where}. Load the "
                f"model again."
            )
        there = placed[name]
        if there.shape != tensors[name].shape or not torch.equal(there, tensors[name].to(there.device, there.dtype)):
            raise PlotError(
                f"{weights} holds other tensors than its configuration asks for: {name}. Load the model again."
            )
    return adapted


def _refuse_config(path: Path) -> None:
    config = read_json(path)
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        raise PlotError(f"{path} does not describe a LoRA adapter.")
    strange = sorted(k for k, v in config.items() if k not in PLAIN and not isinstance(v, bool) and v not in _NOTHING)
    if strange:
        raise PlotError(f"{path} asks for {', '.join(strange)}; a plain LoRA adapter has only {', '.join(PLAIN)}.")
    names = config.get("target_modules")
    if not isinstance(names, list) or not all(isinstance(n, str) and n.replace(".", "_").isidentifier() for n in names):
        raise PlotError(f"{path}: target_modules must be a list of module names; found {names!r}.")
    if not isinstance(config.get("r"), int) or not 1 <= config["r"] <= 4096:
        raise PlotError(f"{path}: the rank r must be an integer from 1 to 4096; found {config.get('r')!r}.")


def save_adapter(adapted: Any, directory: Path, base: Mapping[str, str], record: Json) -> None:
    """Write a peft adapter in half precision, with a record of what it does and of the base it belongs to.

    `base` is {"name": ..., "weights": digest_weights(the base before the adapter)}.
    """
    config, weights = (directory / file for file in ADAPTER_FILES[:2])
    chosen = adapted.peft_config["default"]
    usual = type(chosen)().to_dict()  # what is left at its default would only trouble other versions of peft
    described = {k: v for k, v in chosen.to_dict().items() if k in SPELLED_OUT or v != usual.get(k)}
    lists = {k: sorted(v) if isinstance(v, set) else v for k, v in described.items()}
    write_json(config, {**lists, "base_model_name_or_path": base["name"], "inference_mode": True})
    halves = {n: w.detach().cpu().half().contiguous() for n, w in _tensors(adapted).items()}
    write_atomically(weights, save(halves, metadata={"format": "pt"}))
    write_json(directory / RECORD, {"format": ADAPTER_FORMAT, "base": dict(base), **record})


def _tensors(adapted: Any) -> dict[str, torch.Tensor]:
    """An adapter's tensors; without the last word peft would ask the hub about the base."""
    return dict(_peft().get_peft_model_state_dict(adapted, save_embedding_layers=False))


def _peft() -> Any:
    try:
        import peft
    except ImportError as e:
        raise PlotError("Adapters need the extra 'hf': pip install 'plot-ot[hf]'.") from e
    return peft
