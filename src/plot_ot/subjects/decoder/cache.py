"""What a decoder keeps of a prompt so that it can be resumed: the keys and values of its earlier tokens, and how its
blocks were called. The variants of a prompt share them, and no resumed pass ever changes them.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor, nn

from plot_ot.errors import PlotError
from plot_ot.subjects.decoder.architecture import transformers_library
from plot_ot.subjects.decoder.pages import NodePages, Pages
from plot_ot.subjects.decoder.trie import KeptNodes, Trie
from plot_ot.subjects.memory import clear, is_out_of_memory, sent

ATTENTION = "plot_ot_branches"
"""The name under which transformers knows `branch_attention`."""


@dataclass(frozen=True)
class Prefix:
    """What a block's query tokens see. It travels to the attention function in the place of the mask."""

    keys: Float[Tensor, "pairs groups before width"]
    values: Float[Tensor, "pairs groups before value_width"]
    hidden: Float[Tensor, "pairs 1 1 1 tail seen"] | None
    """0 where a query sees a token before its branch or within it, -inf where not; None where it sees all."""
    tail: int
    """Tokens per branch."""
    own: (
        tuple[Float[Tensor, "pairs groups queries width"], Float[Tensor, "pairs groups queries value_width"]] | None
    ) = None
    """Keys and values of the branches' tokens, where only the last token of each asks; else those are the queries'."""


class KeysOnly(Exception):
    """Ends a block as soon as its tokens' keys and values are known, and holds these. It asks in the mask's place."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        super().__init__("keys and values")
        self.own = keys, values


def branch_attention(
    module: nn.Module,
    query: Float[Tensor, "pairs heads queries width"],
    key: Float[Tensor, "pairs groups queries width"],
    value: Float[Tensor, "pairs groups queries value_width"],
    attention_mask: Prefix | type[KeysOnly],
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Float[Tensor, " heads"] | None = None,
    **_: Any,
) -> tuple[Float[Tensor, "pairs queries heads value_width"], None]:
    """Attention of V branches of T tokens each: a query sees its pair's prefix and its own branch, no other branch.

    All heads and variants that share keys are one product with them, and V x V scores are never formed.
    """
    if not isinstance(attention_mask, Prefix):
        raise attention_mask(key, value)
    prefix, tail = attention_mask, attention_mask.tail
    pairs, heads, queries, width = query.shape
    asking = tail
    if prefix.own is not None:
        (key, value), asking = prefix.own, 1
    q = query * (width**-0.5 if scaling is None else scaling)
    q = q.reshape(pairs, key.shape[1], -1, queries // asking, asking, width)  # groups, heads of one, variants, tail
    k, v = (t.unflatten(2, (-1, tail)).unsqueeze(2) for t in (key, value))
    before = (q.flatten(2, 4) @ prefix.keys.mT).unflatten(2, q.shape[2:5])
    own = (q * k).sum(dim=-1, keepdim=True) if tail == 1 else q @ k.mT
    weights = attention_weights(torch.cat([before, own], dim=-1), prefix.hidden, softcap, s_aux).to(value.dtype)
    seen, within = weights.split([prefix.keys.shape[2], tail], dim=-1)
    out = (seen.flatten(2, 4) @ prefix.values).unflatten(2, q.shape[2:5])
    out = out + (within * v if tail == 1 else within @ v)
    return out.reshape(pairs, heads, queries, -1).transpose(1, 2), None


def attention_weights(
    scores: Float[Tensor, "pairs groups own ... seen"],
    hidden: Tensor | None,
    softcap: float | None,
    s_aux: Float[Tensor, " heads"] | None,
) -> Float[Tensor, "pairs groups own ... seen"]:
    """Scores to weights. `s_aux` are attention sinks: a score per head that takes weight from all tokens."""
    seen = scores.shape[-1]
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if hidden is not None:
        scores = scores + hidden
    if s_aux is not None:
        sinks = s_aux.to(scores.dtype).reshape(1, scores.shape[1], -1, *[1] * (scores.ndim - 3))
        scores = torch.cat([scores, sinks.expand(*scores.shape[:-1], 1)], dim=-1)
    return scores.softmax(dim=-1, dtype=torch.float32)[..., :seen]


def register_attention(name: str, function: Callable[..., Any]) -> None:
    """Tell transformers about a way to attend."""
    transformers_library()
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if name not in ALL_ATTENTION_FUNCTIONS:
        type(ALL_ATTENTION_FUNCTIONS).register(name, function)


class PrefixCache:
    """Keys, values, masks and call arguments of the prompts that will be resumed.

    Prompts end at the same column; a slot's page of a layer is [groups, tokens, key width + value width]. Of prompts
    that were recorded as a trie, keys, values and residuals are kept by node. Pages beyond `limit` bytes in all are
    kept in a file.
    """

    def __init__(
        self,
        bases: Int[Tensor, " slots"],
        lengths: Int[Tensor, " rows"],
        layers: int,
        limit: int,
        tail: int,
        entries: Collection[int],
        trie: Trie | None = None,
    ) -> None:
        self.slots = torch.full_like(lengths, -1)
        """Each recorded row's slot, -1 for rows that keep none."""
        self.slots[bases] = torch.arange(len(bases))
        self.lengths = lengths[bases]
        self.layers = layers
        self.tail = tail
        """Tokens at the end of a prompt that may be run again."""
        self.nodes = None if trie is None or not len(bases) else KeptNodes(trie, bases, last=tail > 1 or bool(entries))
        """The nodes that the slots need, where prompts were recorded as a trie."""
        self.residuals: dict[int, Shaped[Tensor, "..."]] = dict.fromkeys(entries, torch.empty(0))
        """The tail's residual before those blocks (or after the last) at which a resumed pass may enter: [slots, tail,
        d], or [nodes, d]."""
        self.width = int(lengths.max()) if len(bases) else 0  # a longer source may run beside the bases
        self._limit = limit
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._pages: dict[int, Pages | NodePages] = {}
        self._visible: dict[int, Bool[Tensor, "slots tail tokens"]] = {}
        self._calls: dict[int, dict[str, Any]] = {}
        self._tokenwise: dict[tuple[Any, ...], Tensor] = {}

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def bytes(self) -> int:
        """Bytes of keys and values."""
        return sum(page.bytes for page in self._pages.values())

    @property
    def spilled(self) -> bool:
        """Whether keys and values are in files."""
        return self._folder is not None

    # -- recording ----------------------------------------------------------------------------------------

    def batch(self, rows: Int[Tensor, " batch"], real: Bool[Tensor, "batch tokens"]) -> PrefixBatch | None:
        """Start to keep what a forward pass over these rows shows; None where none of them is a base."""
        slots = self.slots[rows]
        return PrefixBatch(self, slots, real) if bool((slots >= 0).any()) else None

    def pages(self, layer: int, shape: Sequence[int], like: Tensor, key_width: int) -> Any:
        """A layer's pages, at first empty: by slot, or by node where there are nodes."""
        if layer not in self._pages:
            self._pages[layer] = self._blank(torch.Size(shape), like, key_width)
        return self._pages[layer]

    def _blank(self, shape: torch.Size, like: Tensor, key_width: int) -> Pages | NodePages:
        """Empty pages: in a file where all layers together exceed the limit, or memory runs out."""
        make = Pages if self.nodes is None else partial(NodePages, tokens=self.width - 1)
        if not self.spilled and self.layers * shape.numel() * like.element_size() <= self._limit:
            try:
                return make(shape, like, None, key_width)
            except Exception as e:
                if not is_out_of_memory(e):
                    raise
            clear()
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="plot-ot-keys-")
        return make(shape, like, Path(self._folder.name), key_width)

    def see(self, tables: Sequence[Bool[Tensor, "tokens tokens"]]) -> None:
        """Which earlier tokens a layer's tokens see, where that depends on nothing but how many come before each."""
        made: dict[int, Tensor] = {}
        for layer, table in enumerate(tables):
            if id(table) not in made:
                made[id(table)] = seen_at_the_end(table, self.lengths, self.tail, self.width)
            self._visible[layer] = made[id(table)]

    def finish(self) -> None:
        """Let layers that saw the same masks and positions share them. Masks stay on the CPU, where views are cut."""
        here = {id(t): t for t in self._visible.values()}
        here = {key: t.cpu() for key, t in here.items()}
        self._visible = {layer: here[id(t)] for layer, t in self._visible.items()}
        for kept in (self._visible, self._tokenwise):
            distinct: list[tuple[Tensor, Tensor]] = []  # with a copy to compare: a GPU is asked once for each
            for key, tensor in kept.items():
                copy = tensor.cpu()
                same = next((d for d, c in distinct if d.device == tensor.device and torch.equal(c, copy)), None)
                if same is None:
                    distinct.append((tensor, copy))
                else:
                    kept[key] = same  # type: ignore[index]

    # -- resuming -----------------------------------------------------------------------------------------

    @property
    def pair_bytes(self) -> int:
        """Bytes that one pair's keys and values of one layer take while that layer runs."""
        return max((page.pair_bytes for page in self._pages.values()), default=1)

    def view(self, slots: Int[Tensor, " pairs"], tail: int) -> PrefixView:
        """What some pairs' resumed tokens, the last `tail` of each prompt, need."""
        return PrefixView(self, slots, tail, int(self.lengths[slots].max()) - tail)


class Sight:
    """Which tokens each token sees in every block of one forward pass, from the masks that the model made."""

    def __init__(self, real: Bool[Tensor, "batch tokens"]) -> None:
        self.real = real
        self._known: dict[int, tuple[Any, Tensor]] = {}
        """By mask: layers of one kind share theirs, and kinds may alternate."""

    def __call__(self, layer: int, mask: Any) -> Bool[Tensor, "batch tokens tokens"]:
        if id(mask) in self._known:
            return self._known[id(mask)][1]
        n, real = self.real.shape[1], self.real
        earlier = torch.ones(n, n, dtype=torch.bool, device=real.device).tril()
        if mask is None:
            visible = earlier & real[:, None]
        elif isinstance(mask, Tensor) and mask.ndim == 4 and mask.shape[1] == 1:
            seen = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
            visible = seen[:, 0].expand(len(real), n, n).to(real.device)
        else:
            found = f"of shape {tuple(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
            raise PlotError(
                f"Block {layer} is called with an attention mask {found}; resuming needs [rows, 1, tokens, tokens]."
            )
        if bool((visible & ~earlier & real[:, :, None]).any()):
            raise PlotError(f"In block {layer} tokens see later ones: a resumed prompt would not notice its own edit.")
        self._known[id(mask)] = mask, visible
        return visible


def seen_at_the_end(
    table: Bool[Tensor, "tokens tokens"], lengths: Int[Tensor, " rows"], queries: int, width: int
) -> Bool[Tensor, "rows queries width"]:
    """Which of the last `width` tokens each of the last `queries` sees, in prompts of these lengths that end together.

    A query before the beginning of its prompt sees everything, so that it stays a number.
    """
    end = lengths.to(table.device)[:, None]
    query, key = (torch.arange(n, device=table.device) - n + end for n in (queries, width))
    seen = table[query.clamp(min=0)[:, :, None], key.clamp(min=0)[:, None]] & (key >= 0)[:, None]
    return seen | (query < 0)[:, :, None]


class PrefixBatch:
    """The bases among the rows of one forward pass, while it runs."""

    def __init__(self, cache: PrefixCache, slots: Int[Tensor, " rows"], real: Bool[Tensor, "called tokens"]) -> None:
        """`slots` of the rows of the pass, -1 where a row is no base; `real` tokens as blocks are called with them."""
        bases = (slots >= 0).nonzero().squeeze(1)
        self.cache, self.slots, self.real = cache, slots[bases], real
        self.inside = slice(None) if len(bases) == len(slots) else bases
        self.padded = not bool(real.all())
        self._seen = Sight(real)

    def keys(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Keep keys and values for all tokens but the last."""
        cache, keys, values = self.cache, keys[self.inside, :, :-1], values[self.inside, :, :-1]
        if self.padded:
            # what attention makes of padding may be anything, also NaN, which a weight of zero would not silence
            padding = ~self.real[self.inside, None, :-1, None].to(keys.device)
            keys, values = keys.masked_fill(padding, 0), values.masked_fill(padding, 0)
        page = torch.cat([keys, values], dim=-1)
        shape = len(cache), page.shape[1], cache.width - 1, page.shape[3]
        cache.pages(layer, shape, page, keys.shape[-1]).write(self.slots, page)

    def residual(self, entry: int, h: Float[Tensor, "batch tokens d"]) -> None:
        """Keep the tail's residual before a block, where it is wanted."""
        kept = self.cache.residuals
        if entry in kept:
            if not len(kept[entry]):
                kept[entry] = h.new_zeros(len(self.cache), self.cache.tail, h.shape[2])
            tail = min(self.cache.tail, h.shape[1])
            kept[entry][self.slots, -tail:] = h[self.inside, -tail:]

    def call(self, layer: int, arguments: Mapping[str, Any]) -> None:
        """Keep how a block was called: what belongs to tokens per slot, for the tail only; anything else as it is."""
        cache, n = self.cache, self.real.shape[1]
        tail = min(cache.tail, n)
        visible = self._seen(layer, arguments.get("attention_mask"))
        if layer not in cache._visible:
            kept = torch.zeros(len(cache), cache.tail, cache.width, dtype=torch.bool, device=visible.device)
            cache._visible[layer] = kept
        cache._visible[layer][self.slots, -tail:, cache.width - n :] = visible[self.inside, -tail:]
        self.keep_call(layer, arguments)

    def keep_call(self, layer: int, arguments: Mapping[str, Any]) -> None:
        """Keep what a block was called with, the mask left out."""
        split = {name: self._split((layer, name), v) for name, v in arguments.items()}
        self.cache._calls.setdefault(layer, split)

    def _split(self, path: tuple[Any, ...], value: Any) -> Any:
        if isinstance(value, (tuple, list)):
            return type(value)(self._split((*path, k), v) for k, v in enumerate(value))
        if isinstance(value, dict):
            return {k: self._split((*path, k), v) for k, v in value.items()}
        if path[1] == "attention_mask" or hasattr(value, "get_seq_length"):  # ours come in their place
            return None
        if not isinstance(value, Tensor) or value.ndim < 2 or value.shape[1] != self.tokens:
            return value
        cache, tails = self.cache, self.tails(path, value)
        if path not in cache._tokenwise:
            cache._tokenwise[path] = value.new_zeros(len(cache), cache.tail, *value.shape[2:])
        cache._tokenwise[path][sent(self.slots, value.device), -tails.shape[1] :] = tails
        return _Token(path)

    @property
    def tokens(self) -> int:
        """Tokens that a block is called with, per row."""
        return self.real.shape[1]

    def tails(
        self, path: tuple[Any, ...], value: Shaped[Tensor, "rows tokens ..."]
    ) -> Shaped[Tensor, "slots tail ..."]:
        """The bases' last tokens of something that belongs to tokens, known by its path among the arguments."""
        whole = value.expand(len(self.real), *value.shape[1:])
        return whole[self.inside, -min(self.cache.tail, self.tokens) :]


@dataclass(frozen=True)
class _Token:
    """Stands for a value that belongs to tokens."""

    path: tuple[Any, ...]


class PrefixView:
    """The cache as some pairs' resumed tokens see it."""

    def __init__(self, cache: PrefixCache, slots: Tensor, tail: int, before: int) -> None:
        self.cache, self.slots, self.tail = cache, slots, tail
        end = cache.width - tail
        self.columns = slice(end - before, end)
        nodes = cache.nodes
        self._where = (slots, self.columns) if nodes is None else (nodes.paths[slots, self.columns],)
        self._made: dict[Any, Any] = {}

    def residual(self, entry: int) -> Float[Tensor, "pairs tail d"]:
        """The tail's clean residual before a block (or after the last)."""
        kept, nodes = self.cache.residuals[entry], self.cache.nodes
        if nodes is not None:
            return kept[sent(nodes.paths[self.slots, -self.tail :], kept.device)]
        return kept[sent(self.slots, kept.device), -self.tail :]

    def device(self, layer: int) -> torch.device:
        """Where a layer works."""
        return self.cache._pages[layer].device

    def call(
        self, layer: int, variants: int, own: tuple[Tensor, Tensor] | type[KeysOnly] | None = None
    ) -> dict[str, Any]:
        """What to call a block with besides the hidden states: those of all tokens of all branches.

        With the keys and values of the branches' `own` tokens, hidden states are those of the last tokens alone. With
        `KeysOnly` the block ends, by raising one, when it has made these.
        """
        last = isinstance(own, tuple)

        def put(value: Any) -> Any:
            if isinstance(value, _Token):
                return self._tokens(value, variants, 1 if last else self.tail)
            if isinstance(value, (tuple, list)):
                return type(value)(put(v) for v in value)
            return {k: put(v) for k, v in value.items()} if isinstance(value, dict) else value

        seen = self._prefix(layer, own) if own is None or isinstance(own, tuple) else own
        return {**put(self.cache._calls[layer]), "attention_mask": seen}

    def _tokens(self, token: _Token, variants: int, tail: int) -> Shaped[Tensor, "pairs queries ..."]:
        kept = self.cache._tokenwise[token.path]
        key = id(kept), variants, tail
        if key not in self._made:
            rows = kept[sent(self.slots, kept.device), -tail:]
            self._made[key] = rows.repeat(1, variants, *[1] * (rows.ndim - 2))
        made: Tensor = self._made[key]
        return made

    def _prefix(self, layer: int, own: tuple[Tensor, Tensor] | None) -> Prefix:
        keys, values = self.cache._pages[layer].read(*self._where)
        hidden = self._hidden(layer, keys)
        if own is not None and hidden is not None:
            hidden = hidden[..., -1:, :]
        return Prefix(keys, values, hidden, self.tail, own)

    def _hidden(self, layer: int, like: Tensor) -> Tensor | None:
        kept = self.cache._visible[layer]
        if id(kept) not in self._made:
            visible = kept[self.slots, -self.tail :, self.columns.start :]
            # a short prompt's padding may be run along with longer tails: it sees itself, so that it stays a number
            visible.diagonal(visible.shape[2] - self.tail, dim1=1, dim2=2).fill_(True)
            hidden = torch.zeros(visible.shape, dtype=like.dtype)
            hidden = hidden.masked_fill(~visible, -torch.inf)[:, None, None, None]
            self._made[id(kept)] = None if bool(visible.all()) else hidden
        made = self._made[id(kept)]
        return None if made is None else self._there(made, like.device)

    def _there(self, made: Tensor, device: torch.device) -> Tensor:
        """A mask where a layer works, sent once."""
        if (id(made), device) not in self._made:
            self._made[id(made), device] = sent(made, device)
        there: Tensor = self._made[id(made), device]
        return there


def recording_cache(sink: Callable[[int, Tensor, Tensor], None]) -> Any:
    """A cache for one forward pass from nothing: it hands keys and values to `sink` and keeps none."""
    from transformers import DynamicCache

    class Recorder(DynamicCache):
        def update(
            self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
        ) -> tuple[Tensor, Tensor]:
            sink(layer_idx, key_states, value_states)
            return key_states, value_states

    return Recorder()
