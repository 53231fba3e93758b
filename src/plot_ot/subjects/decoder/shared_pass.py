"""A pass over the nodes of a trie of prompts: each runs once, and attends to its path to the root.

All nodes of a batch go through a block as one row of tokens; only attention looks at prompts. There the tokens that a
prompt owns are the queries, and the keys and values of its whole path are gathered. Of the batches before, nothing is
needed but what their last prompt's path left behind (`Carried`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor, nn

from plot_ot.subjects.decoder.architecture import Decoder
from plot_ot.subjects.decoder.cache import PrefixBatch, PrefixCache, Sight, attention_weights, seen_at_the_end
from plot_ot.subjects.decoder.pages import along
from plot_ot.subjects.decoder.passes import entered, removed, whole_pass
from plot_ot.subjects.decoder.trie import KeptNodes, Trie
from plot_ot.subjects.memory import is_out_of_memory, sent

ATTENTION = "plot_ot_trie"
"""The name under which transformers knows `trie_attention`."""
AT_ONCE = 1 << 22
"""Numbers that are gathered, or scores that are formed, at once."""


@dataclass(frozen=True)
class Carried:
    """What the path of the last prompt of a batch leaves to the next batch."""

    lines: Mapping[Any, Shaped[Tensor, "tokens ..."]] = field(default_factory=dict)
    tokens: int = 0


@dataclass(frozen=True)
class Bucket:
    """Prompts of a batch that own about equally many tokens, and attend together."""

    paths: Int[Tensor, "rows tokens"]
    """Lines of their whole paths, padded on the left."""
    lengths: Int[Tensor, " rows"]
    queries: Int[Tensor, "rows own"]
    """Nodes that they own, padded on the left."""
    mine: Int[Tensor, " nodes"]
    """Where that is no padding, in all of it row by row."""
    nodes: Int[Tensor, " nodes"]
    """The nodes that they own."""

    def to(self, device: torch.device) -> Bucket:
        """The same on another device; lengths, from which masks are made, stay."""
        return Bucket(**{name: t if name == "lengths" else sent(t, device) for name, t in vars(self).items()})


class TrieBatch:
    """Some rows of a trie, one after the other in its order, while they run."""

    def __init__(
        self,
        trie: Trie,
        rows: Int[Tensor, " rows"],
        carried: Carried,
        tables: Sequence[Bool[Tensor, "tokens tokens"]],
        cache: PrefixCache,
        numbers: int,
    ) -> None:
        """`tables` say what each layer's tokens see; a token holds about so many `numbers` of keys, values, queries."""
        rank, lengths = trie.rank[rows], trie.lengths[rows]
        start, end = int(trie.starts[rank[0]]), int(trie.starts[rank[-1] + 1])
        width = int(lengths.max())
        self.carried, self.tables, self._numbers = carried, tables, numbers
        self.nodes = slice(start, end)
        self.ids, self.depths = trie.token[None, start:end], trie.depth[None, start:end]
        self.lengths = lengths
        depth = torch.arange(width) - (width - lengths)[:, None]
        path = trie.paths[rows, -width:]
        self.lines_of = torch.where(path >= start, path - start + carried.tokens, depth).clamp(min=0)
        """The lines [rows, tokens] of every row's path: first those that were carried here, then the batch's nodes."""
        self._own = lengths - trie.shared[rank]
        self._last = self.lines_of[-1, -int(lengths[-1]) :]
        self._left: dict[Any, Tensor] = {}
        self._made: dict[Any, Any] = {}
        self.keeper = None if cache.nodes is None else NodeKeeper(cache, cache.nodes, rows, self)

    # -- lines ---------------------------------------------------------------------------------------------

    def lines(self, key: Any, new: Shaped[Tensor, "nodes ..."]) -> Shaped[Tensor, "lines ..."]:
        """The lines of the carried path and of the batch's nodes, of which the next batch gets the last path's."""
        before = self.carried.lines.get(key)
        whole = new if before is None else torch.cat([before, new])
        self._left[key] = whole.index_select(0, sent(self._last, whole.device))
        return whole

    def left(self) -> Carried:
        """What the next batch needs."""
        return Carried(self._left, len(self._last))

    def at_the_end(self, new: Shaped[Tensor, "nodes ..."]) -> Shaped[Tensor, "rows ..."]:
        """What belongs to every row's last token, which is always its own."""
        return new.index_select(0, sent(self.lines_of[:, -1] - self.carried.tokens, new.device))

    def tokens_from(self, back: Int[Tensor, " rows"], count: int) -> Int[Tensor, "rows count"]:
        """The lines of so many tokens of every row, from `back` tokens before its end on."""
        first = self.lines_of.shape[1] - back.cpu()
        return self.lines_of.gather(1, first[:, None] + torch.arange(count))

    # -- attention -----------------------------------------------------------------------------------------

    def keys(
        self,
        layer: int,
        keys: Float[Tensor, "1 groups nodes width"],
        values: Float[Tensor, "1 groups nodes value_width"],
    ) -> Float[Tensor, "lines groups both"]:
        """Keep the keys and values of a layer, and give those that the batch sees."""
        new = torch.cat([keys[0], values[0]], dim=-1).transpose(0, 1).contiguous()
        if self.keeper is not None:
            self.keeper.lines(layer, new, keys.shape[-1])
        return self.lines(("keys", layer), new)

    def buckets(self, layer: int, heads: int, like: Tensor) -> Iterator[tuple[Bucket, Tensor]]:
        """Who attends together, and what is added to the scores [rows, 1, 1, queries, keys]: 0, or -inf."""
        device, table = like.device, self.tables[layer]
        if device not in self._made:
            self._made[device] = [b.to(device) for b in self._cut(heads)]
        for k, bucket in enumerate(self._made[device]):
            key = k, id(table), device
            if key not in self._made:
                (_, queries), (_, tokens) = bucket.queries.shape, bucket.paths.shape
                visible = sent(seen_at_the_end(table, bucket.lengths, queries, tokens), device)
                hidden = torch.zeros(visible.shape, dtype=like.dtype, device=device)
                self._made[key] = hidden.masked_fill_(~visible, -torch.inf)[:, None, None]
            yield bucket, self._made[key]

    def _cut(self, heads: int) -> Iterator[Bucket]:
        order, own, at = self._own.argsort(descending=True), self._own, 0
        ends = own.cumsum(0)
        while at < len(order):
            queries = int(own[order[at]])
            near = order[at:][own[order[at:]] * 2 >= queries]
            tokens = int(self.lengths[near].max())
            some = near[: max(1, AT_ONCE // (tokens * max(queries * heads, self._numbers)))]
            tokens = int(self.lengths[some].max())
            back = torch.arange(queries, 0, -1)
            mine = back <= own[some][:, None]
            asked = torch.where(mine, ends[some][:, None] - back, 0)
            where = mine.flatten().nonzero().squeeze(1)
            yield Bucket(self.lines_of[some, -tokens:], self.lengths[some], asked, where, asked[mine])
            at += len(some)


@dataclass(frozen=True)
class Sees:
    """What a block's tokens see. It travels to the attention function in the place of the mask."""

    batch: TrieBatch
    layer: int


def trie_attention(
    module: nn.Module,
    query: Float[Tensor, "1 heads nodes width"],
    key: Float[Tensor, "1 groups nodes width"],
    value: Float[Tensor, "1 groups nodes value_width"],
    attention_mask: Sees,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Float[Tensor, " heads"] | None = None,
    **_: Any,
) -> tuple[Float[Tensor, "1 nodes heads value_width"], None]:
    """Attention of nodes, each to the nodes of its path that its layer lets it see."""
    batch, layer = attention_mask.batch, attention_mask.layer
    lines = batch.keys(layer, key, value)
    heads, nodes, width = query.shape[1:]
    groups, key_width = key.shape[1], key.shape[-1]
    q = query[0].transpose(0, 1) * (width**-0.5 if scaling is None else scaling)
    out = value.new_empty(nodes, heads, value.shape[-1])
    for bucket, hidden in batch.buckets(layer, heads, query):
        page = along(lines, bucket.paths)
        asked = q.index_select(0, bucket.queries.flatten()).view(*bucket.queries.shape, groups, -1, width)
        asked = asked.permute(0, 2, 3, 1, 4)  # rows, groups, heads of a group, queries
        scores = (asked.flatten(2, 3) @ page[..., :key_width].mT).unflatten(2, asked.shape[2:4])
        weights = attention_weights(scores, hidden, softcap, s_aux).to(value.dtype)
        found = (weights.flatten(2, 3) @ page[..., key_width:]).unflatten(2, asked.shape[2:4])
        out[bucket.nodes] = found.permute(0, 3, 1, 2, 4).flatten(2, 3).flatten(0, 1)[bucket.mine]
    return out.unsqueeze(0), None


def _index(some: slice | Tensor, like: Tensor) -> slice | Tensor:
    """An index where it is used."""
    return some if isinstance(some, slice) else sent(some, like.device)


class NodeKeeper(PrefixBatch):
    """Keeps, by node, what bases need, wherever among the rows a base is: others may own the nodes that it shares."""

    def __init__(self, cache: PrefixCache, nodes: KeptNodes, rows: Int[Tensor, " rows"], batch: TrieBatch) -> None:
        super().__init__(cache, cache.slots[rows], torch.ones_like(batch.ids, dtype=torch.bool))
        self.nodes, self.batch = nodes, batch
        self._lines = batch.lines_of[self.inside, -min(cache.tail, batch.lines_of.shape[1]) :]
        self._first, self._kept = nodes.among(batch.nodes.start, batch.nodes.stop)

    def lines(self, layer: int, new: Float[Tensor, "nodes groups both"], key_width: int) -> None:
        """Keep the nodes' keys and values."""
        pages = self.cache.pages(layer, (self.nodes.count, *new.shape[1:]), new, key_width)
        pages.write(self._first, new[_index(self._kept, new)])

    def residual(self, entry: int, h: Float[Tensor, "1 nodes d"]) -> None:
        """Keep the nodes' residual before a block, where it is wanted."""
        kept = self.cache.residuals
        if entry in kept:
            if not len(kept[entry]):
                kept[entry] = h.new_zeros(self.nodes.count, h.shape[2])
            new = h[0, _index(self._kept, h)]
            kept[entry][self._first : self._first + len(new)] = new

    def call(self, layer: int, arguments: Mapping[str, Any]) -> None:
        """Keep how a block was called; what its tokens see is known beforehand."""
        self.keep_call(layer, arguments)

    def tails(self, path: tuple[Any, ...], value: Shaped[Tensor, "1 nodes ..."]) -> Shaped[Tensor, "slots tail ..."]:
        """The bases' last tokens of something that belongs to tokens."""
        if self.cache.tail == 1:
            return self.batch.at_the_end(value[0])[_index(self.inside, value)].unsqueeze(1)
        return self.batch.lines(path, value[0])[sent(self._lines, value.device)]


def shared_pass(
    decoder: Decoder,
    batch: TrieBatch,
    watched: Mapping[tuple[int, str], Callable[[Float[Tensor, "nodes width"]], None]],
) -> Float[Tensor, "rows d"]:
    """A pass over the nodes of a batch: the residual of every row's last token after the last block.

    Each (layer, kind) of `watched` is shown the nodes' activations; what resuming will need is kept on the way.
    """
    final: list[Tensor] = []
    depth = len(decoder.blocks)

    def entering(layer: int) -> Callable[[Tensor, dict[str, Any]], dict[str, Any]]:
        def show(h: Tensor, named: dict[str, Any]) -> dict[str, Any]:
            if batch.keeper is not None:
                batch.keeper.residual(layer, h)
                batch.keeper.call(layer, named)
            return named | {"attention_mask": Sees(batch, layer)}

        return show

    def leaving(h: Tensor) -> None:
        final.append(batch.at_the_end(h[0]))
        if batch.keeper is not None:
            batch.keeper.residual(depth, h)

    def looking(look: Callable[[Tensor], None]) -> Callable[[Tensor], None]:
        return lambda whole: look(whole[0])

    hooks = [decoder.hook(layer, kind, looking(look)) for (layer, kind), look in watched.items()]
    hooks.append(decoder.hook(depth - 1, "block_output", leaving))
    hooks += [entered(block, entering(layer)) for layer, block in enumerate(decoder.blocks)]
    device = decoder.device
    with removed(hooks), decoder.attending(ATTENTION):
        decoder.trunk(
            input_ids=sent(batch.ids, device),
            attention_mask=None,
            position_ids=sent(batch.depths, device),
            past_key_values=None,
            use_cache=False,
        )
    return final[0]


def look_at(
    decoder: Decoder, ids: Int[Tensor, "1 tokens"]
) -> tuple[list[Bool[Tensor, "tokens tokens"]], Float[Tensor, " d"]]:
    """What the tokens of a prompt see in every layer, from the masks of a plain pass, and its last residual.

    What a token sees depends on nothing but its position, so that this holds for all prompts up to this length.
    """
    real = torch.ones_like(ids, dtype=torch.bool)
    sight, tables = Sight(real), list[Tensor]()

    def see(layer: int) -> Callable[[Tensor, dict[str, Any]], None]:
        def look(_: Tensor, named: dict[str, Any]) -> None:
            table = sight(layer, named.get("attention_mask"))[0]
            tables.append(next((t for t in tables if torch.equal(t, table)), table))

        return look

    with removed([entered(block, see(layer)) for layer, block in enumerate(decoder.blocks)]):
        final = whole_pass(decoder, ids, real, {}, None)[0]
    return tables, final


class Sharing:
    """Whether a model's prompts can be recorded as a trie, and what its tokens see; found out when it is first asked.

    A subject and its copies share one.
    """

    def __init__(self) -> None:
        self._tables: list[Bool[Tensor, "tokens tokens"]] = []
        self._works: bool | None = None

    def tables(self, decoder: Decoder, ids: Int[Tensor, "1 tokens"]) -> Sequence[Bool[Tensor, "tokens tokens"]] | None:
        """What tokens see in every layer, for prompts no longer than this one; None where a trie cannot be used."""
        if self._works is not False and (not self._tables or len(self._tables[0]) < ids.shape[1]):
            self._tables, final = look_at(decoder, ids)
            if self._works is None:
                self._works = _agrees(decoder, ids, self._tables, final)
        return self._tables if self._works else None


def _agrees(decoder: Decoder, ids: Tensor, tables: Sequence[Tensor], expected: Float[Tensor, " d"]) -> bool:
    """Whether a prompt in a trie, beside one that differs in the last token, ends as it does in a plain pass."""
    other = ids.clone()
    other[0, -1] = (other[0, -1] + 1) % decoder.vocabulary
    both = torch.cat([ids, other]).cpu()
    trie = Trie(both, torch.ones_like(both, dtype=torch.bool))
    nobody = PrefixCache(torch.zeros(0, dtype=torch.long), trie.lengths, len(decoder.blocks), 0, 1, ())
    try:
        final = shared_pass(decoder, TrieBatch(trie, trie.order, Carried(), tables, nobody, 1), {})
    except Exception as e:  # a model of a kind that we have not seen attends in a way of its own
        if is_out_of_memory(e):
            raise
        return False
    error = (final[trie.rank[0]].to(expected.device) - expected).abs().max() / expected.abs().max().clamp(min=1e-6)
    return bool(error < (1e-3 if decoder.dtype in (torch.float32, torch.float64) else 0.1))
