"""A causal language model as a subject: an edit at a token runs the tokens from there through the blocks after it."""

from __future__ import annotations

import contextlib
import copy
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from plot_ot.errors import PlotError
from plot_ot.subjects.decoder.architecture import Decoder, refuse_answers
from plot_ot.subjects.decoder.cache import ATTENTION, PrefixCache, PrefixView, branch_attention, register_attention
from plot_ot.subjects.decoder.layout import ALL, Positions, Spot, counted_back, for_some, spots
from plot_ot.subjects.decoder.lens_names import from_lens
from plot_ot.subjects.decoder.live import LENGTHS, LivePrompt
from plot_ot.subjects.decoder.offload import ModelWeights
from plot_ot.subjects.decoder.passes import SpotEdit, in_parts, resumed_pass
from plot_ot.subjects.decoder.recording import record_prompts
from plot_ot.subjects.decoder.shared_pass import ATTENTION as TRIE_ATTENTION
from plot_ot.subjects.decoder.shared_pass import Sharing, trie_attention
from plot_ot.subjects.decoder.sizes import PromptSubject
from plot_ot.subjects.decoder.store import DecoderStore, Remembered, joined, ours
from plot_ot.subjects.decoder.trial import check_resumed, refuse_unresumable
from plot_ot.subjects.memory import give_back, sent
from plot_ot.subjects.open_edits import OpenEdit, Rewrites, held, opened
from plot_ot.subjects.places import Place
from plot_ot.subjects.protocol import Rewrite, Share, Store, frozen
from plot_ot.subjects.shape import Shape

Encode = Callable[[Tensor], tuple[Int[Tensor, "rows tokens"], Int[Tensor, "rows tokens"]]]
"""Input rows to token ids and attention mask, padded on the left."""

WHOLE = Share()


class DecoderSubject(PromptSubject):
    """A Hugging Face causal language model, by default looked at through the last token's residual after each block.

    `encode` turns the bank's input rows into token ids and attention mask [rows, tokens], padded on the left.
    `answers[j]` are the tokens that spell candidate answer j; output j is the largest of their logits. With `rest` one
    more output is the largest logit of all other tokens, so that the argmax tells whether the model's own next token is
    an answer at all.

    `layers` restricts the places to some blocks. `kinds` are `block_output`, and inside a block `attention_output`,
    `mlp_output` and `head_output` (before the output projection). `positions` names more tokens than the last, by
    functions of the input rows that give an index from the end (-1 is the last token); their places end in `@name`.
    `spans` gives some of them a number of tokens: such a place is the vectors of these tokens one after the other, from
    the index on, and so many times as wide. With `tokens`, the length of every prompt, there are also places at all
    tokens together, `...@all`.

    `memory` bounds, in bytes, what a recording and a resumed batch keep besides the weights; keys and values that do
    not fit, and recorded vectors that would take more than a quarter of it, go to temporary files.
    """

    reading: str

    def __init__(
        self,
        model: nn.Module,
        encode: Encode,
        answers: Sequence[Sequence[int]],
        *,
        layers: Sequence[int] | None = None,
        kinds: Sequence[str] = ("block_output",),
        positions: Positions | None = None,
        spans: Mapping[str, int] | None = None,
        tokens: int | None = None,
        rest: bool = False,
        memory: int = 4 << 30,
    ) -> None:
        if memory < 1:
            raise PlotError(f"`memory` is in bytes, above zero; found {memory}. Leave it out for 4 GiB.")
        register_attention(ATTENTION, branch_attention)
        register_attention(TRIE_ATTENTION, trie_attention)
        self.decoder = Decoder.of(model)
        self.encode = encode
        self.memory = memory
        self.reading = "rest" if rest else "answers"
        self.positions = dict(positions or {})
        self.rules: Mapping[str, Mapping[str, Any]] = {}
        self.spans = dict(spans or {})
        self.tokens = tokens
        self._spots = spots(self.decoder, kinds, layers, list(self.positions), tokens, self.spans)
        self.places = tuple(spot.place for spot in self._spots.values())
        self.answers = tuple(tuple(int(t) for t in group) for group in answers)
        refuse_answers(self.answers, self.decoder.vocabulary)
        self._parameters = list(self.decoder.model.parameters())
        self._identity: tuple[tuple[object, ...], str] | None = None
        self.sharing = Sharing()
        self._checked = False
        self._remembered = Remembered()
        self._remembered_state: tuple[object, ...] = ()
        refuse_unresumable(self)

    def watching(self, *, rest: bool = False, vocabulary: bool = False) -> DecoderSubject:
        """The same subject with another read-out: the answers, the answers and the `rest`, or the whole vocabulary.

        It understands the stores that this one recorded, and what one learns about memory the other knows.
        """
        if rest and vocabulary:
            raise PlotError("Watch the rest or the whole vocabulary, not both.")
        other = copy.copy(self)
        other.limits = self.limits
        other.reading = "vocabulary" if vocabulary else "rest" if rest else "answers"
        return other

    def looking_at(self, positions: Positions) -> DecoderSubject:
        """The same subject with other named positions; it does not understand the stores that this one recorded."""
        other = copy.copy(self)
        other.limits = self.limits
        other.positions, other._remembered = dict(positions), Remembered()
        kinds = {spot.kind for spot in self._spots.values()}
        layers = {spot.place.layer for spot in self._spots.values()}
        other._spots = spots(self.decoder, sorted(kinds), sorted(layers), list(positions), self.tokens)
        other.places = tuple(spot.place for spot in other._spots.values())
        return other

    def rules_of(self, place: Place) -> Mapping[str, Any]:
        return {p: rule for p, rule in self.rules.items() if p == self._spots[place.name].position}

    # -- Subject -----------------------------------------------------------------------------------------

    def place(self, name: str) -> Place:
        """The place of that name, which may be TransformerLens' (`blocks.7.hook_resid_post`)."""
        sandwiched = hasattr(self.decoder.blocks[0], "post_feedforward_layernorm")
        return super().place(from_lens(name, sandwiched=sandwiched) or name)

    def reaches(self, sender: Place, receiver: Place) -> bool:
        """Heads of a block run side by side, and so do tokens of one stage: none of them reaches another."""
        here, there = self._spots[sender.name], self._spots[receiver.name]
        return here.stage != there.stage and super().reaches(sender, receiver)

    @property
    def device(self) -> torch.device:
        return self.decoder.device

    def weights(self) -> Mapping[str, Tensor]:
        """Parameters and persistent buffers; what is tied appears once."""
        return ModelWeights(self.decoder.model)

    def structure(self) -> str:
        return json.dumps(self.decoder.facts, default=str)

    def identity(self) -> str:
        state = self._state()
        if self._identity is None or self._identity[0] != state:  # hash again only what has changed
            self._identity = state, super().identity()
        return self._identity[1]

    def _state(self) -> tuple[object, ...]:
        """Changes with the weights, and with where they are."""
        return tuple(x for p in self.decoder.model.parameters() for x in (p.data_ptr(), p._version, p.device))

    @cached_property
    def prompt_shape(self) -> Shape:
        d = self.decoder
        return Shape.of_decoder(type(d.model).__name__, d.model, d.blocks, d.model.config, d.dtype.itemsize)

    def shape(self, outputs: int) -> Shape:
        after = tuple(self._blocks_after(spot) for spot in self._spots.values())
        return replace(self.prompt_shape, places=self.places, after=after)

    def _blocks_after(self, spot: Spot) -> int:
        return len(self.decoder.blocks) - spot.enters

    @property
    def spots(self) -> Mapping[str, Spot]:
        """How to get at the places, by name."""
        return self._spots

    @property
    def remembered_bytes(self) -> int:
        """Bytes of keys and values that earlier passes keep in memory."""
        return self._remembered.bytes

    @property
    def remembered_vectors(self) -> int:
        """Bytes of recorded vectors that earlier passes keep in memory."""
        return self._remembered.vector_bytes

    @property
    def response_columns(self) -> int:
        return self.decoder.vocabulary if self.reading == "vocabulary" else len(self.answers) + 1

    @property
    def edited_tokens(self) -> int:
        return max(self.tokens or 1, *self.spans.values(), 1)

    def lengths(self, inputs: Tensor) -> Int[Tensor, " rows"]:
        return self.encoded(inputs)[1].sum(dim=1)

    def tails(self, place: Place, inputs: Tensor) -> Int[Tensor, " rows"]:
        position = self._spots[place.name].position
        named = {name: where for name, where in self.positions.items() if name == position}
        return counted_back(named, inputs, self.lengths(inputs), self.tokens if position == ALL else None)[position]

    def tokens_at(self, place: Place) -> int:
        return self._spots[place.name].tokens

    def read_as(self, reading: str | None) -> DecoderSubject:
        if reading == self.reading:
            return self
        return self.watching(rest=reading == "rest", vocabulary=reading == "vocabulary")

    def record_part(self, inputs: Tensor, bases: Int[Tensor, " bases"], share: Share) -> DecoderStore:
        return self.record(inputs, bases, share=share)

    def outputs_of(self, store: Store) -> Tensor:
        store = ours(store)
        if self.reading not in store.readings:
            with torch.no_grad(), self._held():
                final = store.final.split(min(1 << 10, self.responses_per_batch))
                read = [piece for h in final for piece in self.limits.pieces(self._read, h, "read-out")]
                store.readings[self.reading] = torch.cat(read).to(self.device)
        return store.readings[self.reading]

    def record(
        self,
        inputs: Tensor,
        bases: Int[Tensor, " bases"] | None = None,
        *,
        remember: bool = False,
        share: Share = WHOLE,
    ) -> DecoderStore:
        """One pass per prompt; only `bases` (all by default) keep keys and values.

        What is recorded with `remember`, as a task does that filters prompts by their answers, is not run again by the
        recordings that follow, up to the first without `remember`. Inputs that are a `share` of those recorded together
        keep to their part of the memory; who has recorded all of them says `forget`.
        """
        bases = torch.arange(len(inputs)) if bases is None else bases.cpu()
        if self._remembered_state != (state := self._state()):
            self._remembered.forget()
        known, row = self._remembered.lookup(inputs, bases)
        new = (known < 0).nonzero().squeeze(1)
        if len(new) == len(inputs):
            store = self._record(inputs, bases, share)
        else:
            stores = list(self._remembered.stores)
            if len(new):
                known[new], row[new] = len(stores), torch.arange(len(new))
                where = torch.full((len(inputs),), -1)
                where[new] = torch.arange(len(new))
                some = where[bases][where[bases] >= 0]
                stores.append(self._record(inputs[new.to(inputs.device)], some, share))
            store = joined(inputs, stores, known, row)
            store = replace(store, outputs=self.outputs_of(store))
        if remember:
            self._remembered.add(store)
            self._remembered_state = state
        elif share == WHOLE:
            self.forget()
        return store

    def forget(self) -> None:
        """Let go of what was recorded with `remember`."""
        self._remembered.forget()

    def _record(self, inputs: Tensor, bases: Int[Tensor, " bases"], share: Share) -> DecoderStore:
        """Record prompts; the first time, one of them is resumed and compared with the whole forward pass."""
        store = record_prompts(self, inputs, bases, share)
        if len(bases) and not self._checked:
            row = int(bases[store.lengths[bases].argmax()])
            self.limits.attempt(lambda: check_resumed(self, store, row), 1, "input")
            self._checked = True
        return store

    def resume(
        self, store: Store, rows: Tensor, start: Place, activation: Tensor, later: Mapping[str, Rewrite]
    ) -> Tensor:
        at_once = self.resumed_at_once(self.device.type) * (4 if later else 1)  # a rewrite costs once per part
        return self._resume(ours(store), rows.cpu(), self._spots[start.name], activation, later, at_once)

    def intervene(self, rewrites: Rewrites) -> contextlib.AbstractContextManager[OpenEdit]:
        return self.live(rewrites)

    @contextlib.contextmanager
    def live(
        self,
        rewrites: Rewrites,
        *,
        rows: int | None = None,
        base: Tensor | None = None,
        every_token: bool = False,
    ) -> Iterator[OpenEdit]:
        """While open, the live model rewrites these places in the prompts it is called with; see `LivePrompt`.

        `base` are the input rows of those prompts, for places at named positions. With `every_token` last-token
        places are rewritten at each generated token, too. `rows`, the number of different prompts, allows each to come
        in several copies next to each other, as `generate` makes them for beams and return sequences.
        """
        chosen = {name: self._spots[self.place(name).name] for name in rewrites}
        back = self._positions_of(base, list(chosen.values()))
        with opened(self.decoder.model) as edit, contextlib.ExitStack() as hooks:
            prompt = LivePrompt(back, rows, self.tokens, every_token, edit)
            prompt.require(list(chosen.values()))
            hooks.callback(self.decoder.trunk.register_forward_pre_hook(prompt.look, with_kwargs=True).remove)
            for name, spot in chosen.items():
                hooks.callback(self.decoder.hook(*spot.stage, prompt.rewriting(spot, rewrites[name])).remove)
            yield edit

    def _positions_of(self, base: Tensor | None, wanted: Sequence[Spot]) -> dict[str, Tensor] | None:
        """How far from the end the named positions of some prompts are, and under LENGTHS how long those are."""
        if base is None:
            return None
        lengths = self.lengths(base)
        named = {spot.position for spot in wanted}
        positions = {name: where for name, where in self.positions.items() if name in named}
        return {**counted_back(positions, base, lengths, None, self.spans), LENGTHS: lengths}

    # -- parts -------------------------------------------------------------------------------------------

    def _resume(
        self,
        store: DecoderStore,
        rows: Int[Tensor, " pairs"],
        start: Spot,
        activation: Float[Tensor, "variants pairs d"],
        later: Mapping[str, Rewrite],
        at_once: int,
    ) -> Float[Tensor, "variants pairs c"]:
        """Resume with at most so many tokens at a time."""
        variants, pairs, _ = activation.shape
        spots_of = {name: self._spots[self.place(name).name] for name in later}
        back = {spot.position: store.back[spot.position][rows] for spot in (start, *spots_of.values())}
        tails = torch.stack(list(back.values())).amax(dim=0)
        graph = int(tails.sum()) * variants * self._blocks_after(start) * self.prompt_shape.graph_bytes
        heavy = activation.requires_grad and self.recomputes(graph)
        store.require_bases(rows)
        done, order = [], []
        for cache, some, slices in self._parts(store, rows, tails, variants, at_once):
            view = cache.view(store.slot[rows[some]], int(tails[some].max()))

            def run(a: Tensor, v: slice, some: Tensor = some, view: PrefixView = view) -> Tensor:
                edits = [SpotEdit(start, back[start.position][some], lambda _: a)]
                for name, spot in spots_of.items():
                    rewrite = for_some(later[name], variants, pairs, (v, some), self.device)
                    edits.append(SpotEdit(spot, back[spot.position][some], rewrite))
                with self._held():
                    h = resumed_pass(self.decoder, view, start, a, edits)
                    read: Tensor = self._read(h.flatten(0, 1)).unflatten(0, h.shape[:2])
                    return read.transpose(0, 1).to(self.device)

            here = sent(some, activation.device)
            given = [(activation[v, here], v) for v in slices]
            if heavy:  # a graph that would not fit is thrown away and computed again on the way back
                across = [checkpoint(run, a, v, use_reentrant=False, preserve_rng_state=False) for a, v in given]
            else:
                across = [run(a, v) for a, v in given]
            done.append(torch.cat(across))
            order.append(some)
            del across, given
            self.give_back()
        outputs, index = torch.cat(done, dim=1), torch.cat(order)
        return outputs if torch.equal(index, torch.arange(pairs)) else outputs[:, index.argsort().to(outputs.device)]

    def _parts(
        self, store: DecoderStore, rows: Tensor, tails: Tensor, variants: int, at_once: int
    ) -> Iterator[tuple[PrefixCache, Int[Tensor, " some"], list[slice]]]:
        """The work cut into parts, each over one cache."""
        for part in store.part[rows].unique().tolist():
            cache, here = store.caches[part], (store.part[rows] == part).nonzero().squeeze(1)
            pairs_at_once = int(self.pairs_at_once(cache.pair_bytes))
            for some, slices in in_parts(tails[here], variants, at_once, pairs_at_once):
                yield cache, here[some], slices

    def encoded(self, inputs: Tensor) -> tuple[Int[Tensor, "rows tokens"], Bool[Tensor, "rows tokens"]]:
        """Token ids of prompts, padded on the left, and where they are no padding."""
        ids, mask = (t.cpu() for t in self.encode(inputs))
        if ids.ndim != 2 or ids.shape != mask.shape or len(ids) != len(inputs):
            raise PlotError(
                f"`encode` must give token ids and attention mask [rows, tokens] for {len(inputs)} rows; found "
                f"{tuple(ids.shape)} and {tuple(mask.shape)}."
            )
        real = mask.bool()
        if not bool(real[:, -1].all()) or bool((real[:, :-1] & ~real[:, 1:]).any()):
            raise PlotError("Prompts must be padded on the left, so that all end in the last column.")
        if bool((ids < 0).any()) or bool((ids >= self.decoder.vocabulary).any()):
            raise PlotError(f"Token ids must lie in 0..{self.decoder.vocabulary - 1}; found up to {int(ids.max())}.")
        return ids, real

    def _read(self, h: Float[Tensor, "rows d"]) -> Float[Tensor, "rows c"]:
        """The outputs from the last token's residual after the last block."""
        h = h.to(self.decoder.dtype)
        if self.reading == "vocabulary":
            return self.decoder.logits(h)
        tokens = tuple(t for group in self.answers for t in group)
        logits = self.decoder.logits(h, tokens)
        columns = [g.amax(dim=1, keepdim=True) for g in logits.split([len(g) for g in self.answers], dim=1)]
        if self.reading == "rest":
            columns.append(self.decoder.largest(h, without=tokens)[0].unsqueeze(1))
        return torch.cat(columns, dim=1)

    def give_back(self) -> None:
        """Return free memory to the system, where a small budget would feel it."""
        if self.device.type == "cpu":
            give_back(self.memory)

    @contextlib.contextmanager
    def _held(self) -> Iterator[None]:
        """Evaluation mode and frozen weights, at no cost where they are so already."""
        loose = torch.is_grad_enabled() and any(p.requires_grad for p in self._parameters)
        model = self.decoder.model
        with frozen(model) if loose or model.training else held(model):
            yield
