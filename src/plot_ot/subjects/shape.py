"""What computing with a network costs: how many blocks run after each place, and what a token takes in one of them.

The engine cuts its work by these numbers, and the planner predicts it by them, so that there is one formula of each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from plot_ot.errors import unknown
from plot_ot.subjects.places import Place

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Shape:
    """Numbers that fix what computing costs. A block is a decoder's block, a layer, or a timestep of a GRU."""

    name: str
    places: tuple[Place, ...]
    after: tuple[int, ...]
    """How many blocks a response resumed at each place runs."""
    blocks: int
    """How many blocks a whole pass runs."""
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
    hidden: int = 0
    """Width of the vector that goes from block to block."""
    language: bool = False
    """Whether inputs are prompts, whose keys and values are kept."""
    longest: int = 0
    """The longest side of a block's matrices (language models)."""
    sides: int = 0
    """All sides of a block's matrices together (language models): the vectors that go into and come out of them."""
    recorded: int | None = None
    """Numbers that are kept of an input at its places, where several places are one activation seen again."""

    @classmethod
    def small(
        cls,
        name: str,
        places: tuple[Place, ...],
        after: tuple[int, ...],
        blocks: int,
        weights: int,
        outputs: int,
        *,
        shared: bool = False,
        inner: int | None = None,
    ) -> Shape:
        """A network whose inputs are single vectors; `shared` says that all blocks use the same weights."""
        width = max(p.width for p in places)
        products = weights if shared else weights // blocks
        return cls(
            name, places, after, blocks, products, products, weights, outputs, inner=inner or width, hidden=width
        )

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
            **block_outputs(depth, width),
            products=products,
            block_weights=block,
            weights=weights,
            columns=vocabulary,
            heads=heads,
            groups=groups,
            head_width=head_width,
            inner=inner,
            itemsize=2,
            hidden=width,
            language=True,
            longest=max(width, inner, heads * head_width),
            sides=7 * width + 2 * (heads + groups) * head_width + 3 * inner,
        )

    @classmethod
    def of_decoder(cls, name: str, model: nn.Module, blocks: Sequence[nn.Module], config: Any, itemsize: int) -> Shape:
        """A causal language model of transformers, laid out with its weights or without memory for them."""
        text = config.get_text_config()
        heads = int(text.num_attention_heads)
        experts = getattr(text, "num_local_experts", None) or getattr(text, "num_experts", None) or 1
        chosen = (getattr(text, "num_experts_per_tok", None) or experts) / experts
        matrices = [(n, p) for block in blocks for n, p in block.named_parameters() if p.ndim > 1]
        products = sum(p.numel() * (chosen if ".experts." in n else 1.0) for n, p in matrices)
        flat = [p.shape for _, p in matrices if p.ndim == 2]
        return cls(
            name,
            **block_outputs(len(blocks), int(text.hidden_size)),
            products=round(products / len(blocks)),
            block_weights=sum(p.numel() for block in blocks for p in block.parameters()) // len(blocks),
            weights=sum(p.numel() for p in model.parameters()),
            columns=int(text.vocab_size),
            heads=heads,
            groups=int(getattr(text, "num_key_value_heads", None) or heads),
            head_width=int(getattr(text, "head_dim", None) or text.hidden_size // heads),
            inner=int(getattr(text, "intermediate_size", None) or max(max(p.shape[-2:]) for _, p in matrices)),
            itemsize=itemsize,
            hidden=int(text.hidden_size),
            language=True,
            longest=max((max(p.shape) for p in blocks[0].parameters() if p.ndim == 2), default=0),
            sides=sum(map(sum, flat)) // len(blocks),
        )

    def as_type(self, dtype: str) -> Shape:
        """The same with weights, keys and values of another type."""
        if dtype not in BYTES:
            unknown("dtype", dtype, BYTES)
        return replace(self, itemsize=BYTES[dtype])

    @property
    def width(self) -> int:
        """The width of the widest place."""
        return max(p.width for p in self.places)

    def left(self, place: Place) -> int:
        """Blocks that a response resumed at a place runs."""
        return self.after[self.places.index(place)]

    def flops(self, context: float) -> float:
        """FLOPs of one token through one block: its matrix products, and attention to so many tokens."""
        return 2 * self.products + 4 * self.heads * self.head_width * context

    @property
    def key_bytes(self) -> int:
        """Bytes of one token's key and value in one block."""
        return 2 * self.groups * self.head_width * self.itemsize

    @property
    def vector_bytes(self) -> int:
        """What recording keeps of an input besides keys and values: its vector at every place, and the last one."""
        last = self.hidden if self.language else self.columns
        at_places = sum(p.width for p in self.places) if self.recorded is None else self.recorded
        return 4 * (at_places + last)

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights."""
        return self.weights * self.itemsize

    @property
    def token_bytes(self) -> int:
        """About what a token on its way through a block holds: residuals, and the widest vectors."""
        return (8 * self.hidden + 3 * self.longest) * self.itemsize

    @property
    def graph_bytes(self) -> int:
        """About what a token's way through one block keeps for the backward pass."""
        return 5 * self.sides if self.language else 4 * (self.hidden + self.inner)

    @property
    def activation_bytes(self) -> int:
        """About what a token's way through a block writes and reads besides weights and keys; small nets stay in
        cache."""
        return self.itemsize * (12 * self.hidden + 4 * self.inner) if self.language else 0

    def pass_bytes(self, tokens: int, context: float) -> float:
        """What so many tokens hold on their way through a block: residuals, the widest vectors, attention weights."""
        return tokens * (self.itemsize * (4 * self.hidden + 3 * self.inner) + 8 * self.heads * context)


def block_outputs(depth: int, width: int) -> dict[str, Any]:
    """The last token's residual after every block, which is where tasks on language models look."""
    places = tuple(Place(f"block_output.{k}", width, k, -1) for k in range(depth))
    return {"places": places, "after": tuple(range(depth - 1, -1, -1)), "blocks": depth}
