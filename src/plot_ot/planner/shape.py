"""What a network is to the planner: how many blocks run after each place, and what a token costs in one of them.

A language model's shape follows from its configuration: no weights are loaded, and the presets need no hub either.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from plot_ot.errors import PlotError
from plot_ot.models.loading import _located, guarded, refuse_sizes
from plot_ot.subjects import DecoderSubject, GRUSubject, MLPSubject, Place, SequentialSubject, Subject
from plot_ot.subjects.decoder.architecture import transformers_library

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Shape:
    """Numbers that fix what computing costs. A block is a decoder's block, a layer, or a timestep of a GRU."""

    name: str
    places: tuple[Place, ...]
    after: tuple[int, ...]
    """How many blocks a response resumed at each place runs."""
    blocks: int
    """How many a whole pass runs."""
    products: int
    """Weights of a block that each token is multiplied with."""
    block_weights: int
    weights: int
    """Parameters in all, what is tied counted once."""
    columns: int
    """Columns of the unembedding, or outputs."""
    heads: int = 0
    groups: int = 0
    """Heads of keys and values."""
    head_width: int = 0
    inner: int = 0
    """The widest vector inside a block."""
    itemsize: int = 4
    """Bytes of a weight, a key or a value."""
    language: bool = False
    """Whether inputs are prompts, whose keys and values are kept."""

    @classmethod
    def gated(
        cls,
        name: str,
        *,
        depth: int,
        width: int,
        heads: int,
        groups: int,
        head_width: int,
        inner: int,
        vocabulary: int,
        tied: bool,
        norms: int = 2,
    ) -> Shape:
        """A decoder with grouped attention and a gated MLP (Llama, Gemma, Mistral, ...), in bfloat16."""
        products = 2 * width * (heads + groups) * head_width + 3 * width * inner
        block = products + norms * width
        weights = depth * block + (1 if tied else 2) * vocabulary * width + width
        return cls(
            name,
            **_block_outputs(depth, width),
            products=products,
            block_weights=block,
            weights=weights,
            columns=vocabulary,
            heads=heads,
            groups=groups,
            head_width=head_width,
            inner=inner,
            itemsize=2,
            language=True,
        )

    @classmethod
    def of_config(cls, name: str, config: Any) -> Shape:
        """Any causal language model of transformers, laid out without memory for its weights."""
        library = transformers_library()
        try:
            with torch.device("meta"):
                model = library.AutoModelForCausalLM.from_config(config)
        except Exception as e:
            raise PlotError(f"{name} cannot be laid out as a causal language model ({type(e).__name__}: {e}).") from e
        model.tie_weights()
        lists = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m)]
        if not lists:
            raise PlotError(f"{name} ({type(model).__name__}) has no list of blocks: it is no usual decoder.")
        blocks = max(lists, key=lambda m: sum(p.numel() for p in m.parameters()))
        text = config.get_text_config()
        heads = int(text.num_attention_heads)
        experts = getattr(text, "num_local_experts", None) or getattr(text, "num_experts", None) or 1
        chosen = (getattr(text, "num_experts_per_tok", None) or experts) / experts
        matrices = [(n, p) for n, p in blocks.named_parameters() if p.ndim > 1]
        products = sum(p.numel() * (chosen if ".experts." in n else 1.0) for n, p in matrices)
        dtype = str(getattr(config, "dtype", None) or torch.float32).removeprefix("torch.")
        return cls(
            name,
            **_block_outputs(len(blocks), int(text.hidden_size)),
            products=round(products / len(blocks)),
            block_weights=sum(p.numel() for p in blocks.parameters()) // len(blocks),
            weights=sum(p.numel() for p in model.parameters()),
            columns=int(text.vocab_size),
            heads=heads,
            groups=int(getattr(text, "num_key_value_heads", None) or heads),
            head_width=int(getattr(text, "head_dim", None) or text.hidden_size // heads),
            inner=int(getattr(text, "intermediate_size", None) or max(max(p.shape[-2:]) for _, p in matrices)),
            itemsize=BYTES.get(dtype, 4),
            language=True,
        )

    @classmethod
    def of_subject(cls, subject: Subject, outputs: int) -> Shape:
        """A live network."""
        name, places, n = type(subject).__name__, subject.places, len(subject.places)
        if isinstance(subject, DecoderSubject):
            model = subject.decoder.model
            shape = cls.of_config(type(model).__name__, model.config)
            after = tuple(shape.blocks - subject._spots[p.name].enters for p in places)
            return replace(shape, places=places, after=after, itemsize=subject.decoder.dtype.itemsize)
        weights = sum(t.numel() for t in subject.weights().values())
        width = max(p.width for p in places)
        if isinstance(subject, MLPSubject):
            after, blocks = tuple(range(n, 0, -1)), n + 1
        elif isinstance(subject, GRUSubject):
            after, blocks = tuple(range(n - 1, -1, -1)), n
        elif isinstance(subject, SequentialSubject):
            after, blocks = tuple(len(subject._later[p.name]) for p in places), len(list(subject.module.children()))
        else:  # whole passes under hooks
            after, blocks = (n,) * n, n
        layers = 1 if isinstance(subject, GRUSubject) else blocks
        products = weights // layers
        inner = 3 * width if isinstance(subject, GRUSubject) else width  # a GRU has three gates
        return cls(name, places, after, blocks, products, products, weights, outputs, inner=inner)

    def as_type(self, dtype: str) -> Shape:
        """The same with weights, keys and values of another type."""
        if dtype not in BYTES:
            raise PlotError(f"Unknown dtype '{dtype}'; expected one of {', '.join(BYTES)}.")
        return replace(self, itemsize=BYTES[dtype])

    @property
    def width(self) -> int:
        """Of the widest place."""
        return max(p.width for p in self.places)

    def left(self, place: Place) -> int:
        """Blocks that a response resumed at a place runs."""
        return self.after[self.places.index(place)]

    def flops(self, context: float) -> float:
        """Of one token through one block: its matrix products, and attention to so many tokens."""
        return 2 * self.products + 4 * self.heads * self.head_width * context

    @property
    def key_bytes(self) -> int:
        """One token's key and value in one block."""
        return 2 * self.groups * self.head_width * self.itemsize

    @property
    def vector_bytes(self) -> int:
        """What recording keeps of an input besides keys and values: its vector at every place, and the last one."""
        last = self.places[-1].width if self.language else self.columns
        return 4 * (sum(p.width for p in self.places) + last)

    @property
    def weight_bytes(self) -> int:
        """All weights."""
        return self.weights * self.itemsize


def _block_outputs(depth: int, width: int) -> dict[str, Any]:
    """The last token's residual after every block, which is where tasks on language models look."""
    places = tuple(Place(f"block_output.{k}", width, k, -1) for k in range(depth))
    return {"places": places, "after": tuple(range(depth - 1, -1, -1)), "blocks": depth}


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
        source, file = _located(text, None)
        where = {"gguf_file": file} if file else {}
        config = guarded(transformers_library().AutoConfig.from_pretrained, "configuration", source, **where)
        refuse_sizes(config, source)
    except PlotError as e:
        raise PlotError(f"{e} Shapes known without a download: {', '.join(PRESETS)}.") from e
    return Shape.of_config(text, config)
