"""Shapes of language models that are not loaded: from their configuration, or from published numbers.

No weights are loaded, and the presets need no hub either.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from plot_ot.errors import PlotError
from plot_ot.models.loading import _located, guarded, refuse_sizes
from plot_ot.subjects.decoder.architecture import transformers_library
from plot_ot.subjects.shape import BYTES, Shape


def shape_of_config(name: str, config: Any) -> Shape:
    """The shape of any causal language model of transformers, built without memory for its weights."""
    library = transformers_library()
    try:
        with torch.device("meta"):
            model = library.AutoModelForCausalLM.from_config(config)
    except Exception as e:
        raise PlotError(f"{name} cannot be laid out as a causal language model ({type(e).__name__}: {e}).") from e
    model.tie_weights()
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m)]
    if not lists:
        raise PlotError(f"{name} ({type(model).__name__}) has no list of blocks: it is not a usual decoder.")
    blocks = max(lists, key=lambda m: sum(p.numel() for p in m.parameters()))
    dtype = str(getattr(config, "dtype", None) or torch.float32).removeprefix("torch.")
    return Shape.of_decoder(name, model, list(blocks), config, BYTES.get(dtype, 4))


PRESETS = {
    s.name: s
    for s in (
        Shape.gated(
            "google/gemma-2-2b",
            depth=26,
            width=2304,
            heads=8,
            groups=4,
            head_width=256,
            inner=9216,
            vocabulary=256000,
            tied=True,
            norms=4,
        ),
        Shape.gated(
            "meta-llama/Llama-3.1-8B",
            depth=32,
            width=4096,
            heads=32,
            groups=8,
            head_width=128,
            inner=14336,
            vocabulary=128256,
            tied=False,
        ),
        Shape.gated(
            "meta-llama/Llama-3.1-70B",
            depth=80,
            width=8192,
            heads=64,
            groups=8,
            head_width=128,
            inner=28672,
            vocabulary=128256,
            tied=False,
        ),
        Shape.gated(
            "smollm2",
            depth=30,
            width=576,
            heads=9,
            groups=3,
            head_width=64,
            inner=1536,
            vocabulary=49152,
            tied=True,
        ),
    )
}
"""The numbers of published configurations, so that planning needs no download."""


def shape_by_name(name: str | os.PathLike[str]) -> Shape:
    """The shape of a preset (with or without its owner's name), of a saved model, or of a model on the hub."""
    text = os.fspath(name)
    for known, shape in PRESETS.items():
        if text.lower() in (known.lower(), known.lower().rpartition("/")[2]):
            return shape
    try:
        config = _config_by_name(text)
    except PlotError as e:
        raise PlotError(f"{e} Shapes known without a download: {', '.join(PRESETS)}.") from e
    return shape_of_config(text, config)


def class_by_name(name: str) -> str:
    """The name of the class that transformers loads a saved model, or a model on the hub, with."""
    config = _config_by_name(name)
    known: Mapping[str, str] = transformers_library().models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    if config.model_type not in known:
        raise PlotError(f"{name} is no causal language model: its configuration says '{config.model_type}'.")
    return known[config.model_type]


def _config_by_name(name: str) -> Any:
    source, file = _located(name, None)
    where = {"gguf_file": file} if file else {}
    config = guarded(transformers_library().AutoConfig.from_pretrained, "configuration", source, **where)
    refuse_sizes(config, source)
    return config
