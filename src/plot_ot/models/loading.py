"""Language models by name: a hub id, a local directory, a GGUF file, or a live model."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit
from urllib.request import getproxies

import torch
from torch import nn

from plot_ot.errors import PlotError, unknown
from plot_ot.files.safe_reading import open_ordinary, refuse_strange_files
from plot_ot.models.adapters import ADAPTER_FILES, placed_adapter
from plot_ot.subjects.decoder.architecture import Decoder, transformers_library

if TYPE_CHECKING:
    import transformers


LARGEST = {
    **{"num_hidden_layers": 1 << 10, "hidden_size": 1 << 17, "intermediate_size": 1 << 20, "vocab_size": 1 << 22},
    **{"num_attention_heads": 1 << 12, "num_key_value_heads": 1 << 12, "head_dim": 1 << 14},
}
"""Sizes beyond which a configuration is damaged, not a model: building it would fill memory or never end."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def as_dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """A floating-point type, also by its name; None and 'auto' leave it to the model."""
    if dtype is None or isinstance(dtype, torch.dtype) or dtype == "auto":
        return dtype if isinstance(dtype, torch.dtype) else None
    if dtype not in DTYPES:
        unknown("dtype", str(dtype), [*DTYPES, "auto"])
    return DTYPES[dtype]


def load_model(
    name_or_path: str | os.PathLike[str] | nn.Module,
    *,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
    device_map: str | dict[str, Any] | None = None,
    revision: str | None = None,
    attn_implementation: str | None = None,
    gguf_file: str | None = None,
    adapter: str | os.PathLike[str] | None = None,
    tokenizer: Any = None,
) -> tuple[nn.Module, Any]:
    """A causal language model, frozen and in evaluation mode, and its tokenizer, padding on the left.

    `name_or_path` is a hub id (`revision` as there), a directory, a `.gguf` file (or a directory or hub id with
    `gguf_file` inside it), or a live model, which comes back with the `tokenizer` you give. By default a model runs on
    the GPU if there is one, in the type it was saved in; on the CPU it runs in float32, which is faster there than
    bfloat16. An `adapter` (peft) is merged into the weights. Only safetensors and GGUF files are read, and no code that
    comes with a model is run. Tokenizers made from GGUF files add no beginning-of-sequence token: where the model wants
    one, put it into the prompt's tokens.
    """
    if isinstance(name_or_path, nn.Module):
        model = name_or_path
    else:
        library = transformers_library()
        source, file = _located(name_or_path, gguf_file)
        place = device or ("cuda" if torch.cuda.is_available() else "cpu")
        where: dict[str, Any] = {"gguf_file": file} if file else {"revision": revision}
        config = guarded(library.AutoConfig.from_pretrained, "configuration", source, **where)
        _refuse_config(config, library, source)
        refuse_sizes(config, source)
        if tokenizer is None:
            _refuse_no_tokenizer(source, file)
            tokenizer = guarded(library.AutoTokenizer.from_pretrained, "tokenizer", source, **where)
        on_cpu = device_map is None and torch.device(place).type == "cpu" and dtype != "auto"
        options: dict[str, Any] = {"dtype": as_dtype(dtype) or (torch.float32 if on_cpu else "auto")}
        if not file:
            options["use_safetensors"] = True
        if device_map is not None:
            options["device_map"] = device_map
        if attn_implementation is None and getattr(config, "attn_logit_softcapping", None):
            attn_implementation = "eager"  # the others leave the cap out, or refuse it
        if attn_implementation is not None:
            options["attn_implementation"] = attn_implementation
        load = library.AutoModelForCausalLM.from_pretrained
        model, told = guarded(load, "weights", source, **where, **options, output_loading_info=True)
        if missing := sorted(told["missing_keys"]):  # transformers would make them up at random
            raise PlotError(
                f"The weights at {source} lack {missing[0]} ({len(missing)} missing in all). Fetch the model again."
            )
        if device_map is None:
            model = model.to(place)
    if adapter is not None:
        model = _adapted(model, adapter)
    model.eval().requires_grad_(False)
    Decoder.of(model)  # refuse another shape here, not after the prompts were made
    if tokenizer is not None:
        tokenizer.padding_side = "left"
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token
    return model, tokenizer


def _located(name_or_path: str | os.PathLike[str], gguf_file: str | None) -> tuple[str, str | None]:
    """Find a model: the directory or hub id to give to transformers, and the name of a GGUF file if there is one."""
    text = os.fspath(name_or_path)
    path = Path(text).expanduser()
    looks_local = path.is_absolute() or text.startswith((".", "~")) or text.count("/") > 1 or path.suffix == ".gguf"
    if not path.exists():
        if looks_local:
            raise PlotError(
                f"There is no model at {path}. Give a directory, a .gguf file, or a hub id like owner/name."
            )
        refuse_unreachable(text)
        return text, gguf_file
    if path.is_dir():
        if gguf_file is None and not (path / "config.json").exists():
            found = ", ".join(sorted(p.name for p in path.iterdir())[:8]) or "nothing"
            raise PlotError(f"{path} holds no config.json, so it is not a saved model (it holds {found}).")
        refuse_strange_files(path)
        return str(path), gguf_file and _readable_gguf(path / gguf_file).name
    if path.suffix != ".gguf":
        raise PlotError(f"{path} is a file; a model is a directory, a .gguf file, or a hub id.")
    return str(_readable_gguf(path).parent), path.name


def refuse_unreachable(hub_id: str) -> None:
    """Refuse a hub that cannot be reached within seconds; the hub's own client would try for half a minute."""
    from huggingface_hub import constants, try_to_load_from_cache

    known = any(isinstance(try_to_load_from_cache(hub_id, name), str) for name in ("config.json", "tokenizer.json"))
    if not known and constants.HF_HUB_OFFLINE:
        raise PlotError(
            f"'{hub_id}' is neither a path nor a model in the hub's local cache, and HF_HUB_OFFLINE is set. Give the "
            f"path of a local copy, or unset it to download the model."
        )
    host = urlsplit(constants.ENDPOINT)
    if known or any(getproxies().get(kind) for kind in ("https", "http", "all")):
        return
    try:
        socket.create_connection((host.hostname or "", host.port or 443), timeout=5).close()
    except OSError as e:
        raise PlotError(
            f"'{hub_id}' is neither a path nor a model in the hub's local cache, and {host.hostname} cannot be reached "
            f"({e}). Give the path of a local copy, or connect to the network."
        ) from e


def _readable_gguf(path: Path) -> Path:
    if not path.is_file():
        raise PlotError(f"There is no GGUF file at {path}.")
    with open_ordinary(path, 1 << 50) as file:
        start = file.read(4)
    if start != b"GGUF":
        raise PlotError(f"{path} is no GGUF file: it begins with {start!r}, not b'GGUF'. Fetch it again.")
    try:
        import gguf  # noqa: F401
    except ImportError as e:
        raise PlotError("GGUF files need the `hf` extra: pip install 'plot-ot[hf]'.") from e
    return path


def guarded(load: Any, what: str, source: str, **options: Any) -> Any:
    """Load a part of a model by `from_pretrained`; code that comes with it is never run, and never asked about.

    Whatever goes wrong is told in our words.
    """
    try:
        return load(source, trust_remote_code=False, **options)
    except Exception as e:  # a damaged file fails in many ways
        reason = next((line for line in str(e).splitlines() if line.strip()), type(e).__name__)
        if "trust_remote_code" in str(e):
            reason = "it needs code that comes with it, and such code is never run here. Use a model that your version "
            reason += "of transformers knows, or load it yourself and give the live model."
        if Path(source).exists():
            raise PlotError(f"The {what} at {source} cannot be read: {reason}") from e
        raise PlotError(
            f"The {what} of '{source}' cannot be loaded from the hub: {reason} Check the name and the network, log in "
            f"if the model is gated, or give the path of a local copy."
        ) from e


def _refuse_config(config: Any, library: transformers, source: str) -> None:  # type: ignore[valid-type]
    said = getattr(config, "architectures", None) or []
    kinds = [str(k) for k in (said if isinstance(said, list) else [said])]
    if getattr(config, "is_encoder_decoder", False):
        found = "an encoder-decoder"
    elif type(config) not in library.AutoModelForCausalLM._model_mapping:  # type: ignore[attr-defined]
        found = f"a {config.model_type} model"
    elif kinds and not any(k.endswith(("CausalLM", "LMHeadModel", "ConditionalGeneration")) for k in kinds):
        found = ", ".join(kinds)
    else:
        return
    raise PlotError(f"{source} is {found}, not a causal language model (a decoder that predicts the next token).")


def refuse_sizes(config: Any, source: str) -> None:
    """Refuse declared sizes that no model has, or that the weights beside the configuration cannot fill."""
    text = config.get_text_config()
    for name, most in LARGEST.items():
        found = getattr(text, name, None)
        if isinstance(found, bool) or not (found is None or (isinstance(found, int) and 0 < found <= most)):
            raise PlotError(f"The configuration at {source} cannot be read: {name} is {found!r}, not in 1..{most}.")
    width, layers = text.hidden_size, text.num_hidden_layers
    wanted = width * (text.vocab_size + 2 * layers * (getattr(text, "intermediate_size", None) or width))
    files = (
        [p for p in Path(source).glob("*") if p.suffix in (".safetensors", ".gguf")] if Path(source).is_dir() else []
    )
    there = sum(p.stat().st_size for p in files)
    if files and wanted > 4 * there + (1 << 20):  # quantised weights take half a byte
        raise PlotError(
            f"The configuration at {source} declares about {wanted:,} weights, but its files have {there:,} bytes."
        )


def _refuse_no_tokenizer(source: str, gguf_file: str | None) -> None:
    """Refuse a model without tokenizer files, for which transformers may make up an empty tokenizer."""
    names = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
    folder = Path(source)
    if folder.is_dir() and not gguf_file and not any((folder / name).exists() for name in names):
        raise PlotError(f"The tokenizer at {source} cannot be read: it has none of {', '.join(names)}.")


def _adapted(model: nn.Module, adapter: str | os.PathLike[str]) -> nn.Module:
    """The model with a peft adapter merged into its weights."""
    source = os.fspath(adapter)
    path = Path(source).expanduser()
    adapted = placed_adapter(model, path if path.exists() else _fetched_adapter(source))
    merged: nn.Module = adapted.merge_and_unload()
    return merged


def _fetched_adapter(hub_id: str) -> Path:
    """The two files of an adapter on the hub; no others are fetched."""
    from huggingface_hub import hf_hub_download

    config, _ = (
        guarded(lambda at, trust_remote_code, name=name: hf_hub_download(at, name), "adapter", hub_id)
        for name in ADAPTER_FILES[:2]
    )
    return Path(config).parent
