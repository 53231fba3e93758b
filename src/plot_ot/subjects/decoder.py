"""A causal language model as a subject: an edit at the last token runs one token through the blocks after it."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from plot_ot.errors import PlotError
from plot_ot.subjects.base import Place, Rewrite, Store, Subject, frozen
from plot_ot.subjects.decoder_cache import ATTENTION, PrefixCache, PrefixView, recording_cache, register_attention
from plot_ot.subjects.decoder_shape import Decoder, first

Encode = Callable[[Tensor], tuple[Int[Tensor, "rows tokens"], Int[Tensor, "rows tokens"]]]
"""Input rows to token ids and attention mask, padded on the left."""

TOKENS_AT_ONCE = {"cpu": 1 << 10}
"""Tokens of one recorded batch, where more are not faster."""
RESPONSES_AT_ONCE = {"cpu": 256}
"""Responses that run through the blocks together, where more are not faster."""


@dataclass(frozen=True)
class DecoderStore(Store):
    """What one pass over every distinct prompt leaves."""

    top_token: Int[Tensor, " inputs"]
    """The vocabulary's argmax after each prompt."""
    lengths: Int[Tensor, " inputs"]
    """Tokens of each prompt, padding left out."""
    final: Float[Tensor, "inputs d"]
    """The last token's residual after the last block: every read-out follows from it."""
    cache: PrefixCache
    """What resuming the bases needs."""
    readings: dict[str, Float[Tensor, "inputs c"]] = field(default_factory=dict)
    """Outputs by the name of the read-out, for those asked for so far."""


class DecoderSubject(Subject):
    """A Hugging Face causal language model, looked at through the last token's residual after each block.

    `encode` turns the bank's input rows into token ids and attention mask [rows, tokens], padded on the left.
    `answers[j]` are the tokens that spell candidate answer j; output j is the largest of their logits. With `rest` one
    more output is the largest logit of all other tokens, so that the argmax tells whether the model's own next token is
    an answer at all. `layers` restricts the places to some blocks. `memory` bounds, in bytes, what a recording and a
    resumed batch keep besides the weights; keys and values that do not fit go to a temporary file.
    """

    def __init__(
        self,
        model: nn.Module,
        encode: Encode,
        answers: Sequence[Sequence[int]],
        *,
        layers: Sequence[int] | None = None,
        rest: bool = False,
        memory: int = 4 << 30,
    ) -> None:
        register_attention()
        self.decoder = Decoder.of(model)
        self.encode = encode
        self.memory = memory
        self.reading = "rest" if rest else "answers"
        depth, width = len(self.decoder.blocks), self.decoder.width
        wanted = range(depth) if layers is None else sorted({k + depth if k < 0 else k for k in layers})
        if not wanted or not all(0 <= k < depth for k in wanted):
            raise PlotError(f"Layers must lie in 0..{depth - 1}, the model's blocks; found {list(layers or [])}.")
        self.places = tuple(Place(f"block_output.{k}", width, k, -1) for k in wanted)
        self.answers = tuple(tuple(int(t) for t in group) for group in answers)
        _refuse_answers(self.answers, self.decoder.vocabulary)
        self._parameters = list(self.decoder.model.parameters())
        self._identity: tuple[tuple[int, ...], str] | None = None
        self._checked = False

    def watching(self, *, rest: bool = False, vocabulary: bool = False) -> DecoderSubject:
        """The same subject with another read-out: the answers, the answers and the `rest`, or the whole vocabulary.

        It understands the stores that this one recorded.
        """
        if rest and vocabulary:
            raise PlotError("Watch the rest or the whole vocabulary, not both.")
        other = copy.copy(self)
        other.reading = "vocabulary" if vocabulary else "rest" if rest else "answers"
        return other

    # -- Subject -----------------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        return self.decoder.model.get_input_embeddings().weight.device  # type: ignore[operator]

    @property
    def dtype(self) -> torch.dtype:
        """What the blocks compute in; recorded activations and outputs are float32 all the same."""
        return next(p.dtype for p in self.decoder.blocks[0].parameters() if p.is_floating_point())

    def weights(self) -> Mapping[str, Tensor]:
        """Parameters and persistent buffers; what is tied appears once."""
        kept = {(t.data_ptr(), t.shape): (name, t) for name, t in reversed(self.decoder.model.state_dict().items())}
        return dict(kept.values())

    def identity(self) -> str:
        state = tuple(x for p in self._parameters for x in (p.data_ptr(), p._version))
        if self._identity is None or self._identity[0] != state:  # hash again only what has changed
            digest = hashlib.sha256()
            for name, tensor in sorted(self.weights().items()):
                digest.update(f"{name}:{tuple(tensor.shape)}:{tensor.dtype}".encode())
                digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
            self._identity = state, digest.hexdigest()[:16]
        return self._identity[1]

    @property
    def response_bytes(self) -> int:
        # the edited activation and what makes it, the residual on its way, the outputs
        columns = self.decoder.vocabulary if self.reading == "vocabulary" else len(self.answers) + 1
        return 4 * (6 * self.decoder.width + 2 * columns)

    @property
    def responses_per_batch(self) -> int:
        return max(1, min(1 << 14, self.memory // 4 // self.response_bytes))

    def cache_bytes(self, rows: int, tokens: int) -> int:
        """Bytes of keys and values of so many base prompts of so many tokens."""
        config = self.decoder.trunk.config.get_text_config()  # type: ignore[union-attr, operator]
        heads = config.num_attention_heads
        groups = getattr(config, "num_key_value_heads", None) or heads
        width = getattr(config, "head_dim", None) or config.hidden_size // heads
        size = torch.empty((), dtype=self.dtype).element_size()
        return int(rows * (tokens - 1) * len(self.decoder.blocks) * groups * 2 * width * size)

    def outputs_of(self, store: Store) -> Tensor:
        store = _ours(store)
        if self.reading not in store.readings:
            with torch.no_grad(), self._held():
                store.readings[self.reading] = torch.cat([self._read(h) for h in store.final.split(1 << 10)])
        return store.readings[self.reading]

    def record(self, inputs: Tensor, bases: Int[Tensor, " bases"] | None = None) -> DecoderStore:
        """One pass per prompt, in batches of similar length; only `bases` (all by default) keep keys and values."""
        ids, real = self._encoded(inputs)
        lengths, device = real.sum(dim=1), self.device
        bases = torch.arange(len(ids)) if bases is None else bases.cpu()
        cache = PrefixCache(bases, lengths, len(self.decoder.blocks), self.memory // 2)
        names = {p.layer: p.name for p in self.places}
        kept = {n: torch.empty(len(ids), self.decoder.width, device=device) for n in names.values()}
        final = torch.empty(len(ids), self.decoder.width, device=device)
        top = torch.empty(len(ids), dtype=torch.long, device=device)
        with torch.no_grad(), frozen(self.decoder.model), self.decoder.attending(self.decoder.masking):
            for rows in self._batches(lengths):
                here, longest = rows.to(device), int(lengths[rows].max())
                tokens, mask = (t[rows, -longest:].to(device) for t in (ids, real))
                residuals = self._forward(tokens, mask, cache.batch(rows, mask))
                for layer, name in names.items():
                    kept[name][here] = residuals[layer].to(device)
                final[here] = residuals[-1].to(device)
                top[here] = self.decoder.logits(residuals[-1].to(self.dtype)).argmax(dim=1).to(device)
        cache.finish()
        store = DecoderStore(inputs, kept, final, top, lengths, final, cache)
        store = replace(store, outputs=self.outputs_of(store))
        if len(cache) and not self._checked:
            self._check(store, ids, real, int(bases[cache.lengths.argmax()]))
        return store

    def resume(
        self, store: Store, rows: Tensor, start: Place, activation: Tensor, later: Mapping[str, Rewrite]
    ) -> Tensor:
        rewrites = {self.place(name).layer: rewrite for name, rewrite in later.items()}
        cache, h, at = _ours(store).cache, activation.transpose(0, 1), start.layer
        with self._held(), self.decoder.attending(ATTENTION):
            for stop in sorted(rewrites):
                h = self._advance(cache, rows, h, range(at + 1, stop + 1), Tensor.float)
                h = rewrites[stop](h.transpose(0, 1)).transpose(0, 1)
                at = stop
            last = range(at + 1, len(self.decoder.blocks))
            return self._advance(cache, rows, h, last, self._read).transpose(0, 1)

    @contextlib.contextmanager
    def intervene(self, rewrites: Mapping[str, Callable[[Tensor], Tensor]]) -> Iterator[None]:
        after: list[Tensor] = []  # tokens from the last real one to the end, per row

        def look(_: nn.Module, __: Any, kwargs: Mapping[str, Any]) -> None:
            mask = kwargs.get("attention_mask")
            after.clear()
            if isinstance(mask, Tensor) and mask.ndim == 2:
                after.append(mask.flip(1).long().argmax(dim=1) + 1)

        def hook(rewrite: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
            def edit(_: nn.Module, __: Any, output: Any) -> Any:
                h = first(output)
                rows = torch.arange(len(h), device=h.device)
                tokens = h.shape[1] - (after[0].to(h.device) if after else torch.ones_like(rows))
                edited = h.index_put((rows, tokens), rewrite(h[rows, tokens].float()).to(h.dtype))
                return (edited, *output[1:]) if isinstance(output, tuple) else edited

            return edit

        blocks = self.decoder.blocks
        hooks = [self.decoder.trunk.register_forward_pre_hook(look, with_kwargs=True)]
        hooks += [blocks[self.place(n).layer].register_forward_hook(hook(r)) for n, r in rewrites.items()]
        try:
            yield
        finally:
            for h in hooks:
                h.remove()

    # -- parts -------------------------------------------------------------------------------------------

    def _encoded(self, inputs: Tensor) -> tuple[Int[Tensor, "rows tokens"], Bool[Tensor, "rows tokens"]]:
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

    def _batches(self, lengths: Tensor) -> Iterator[Tensor]:
        """Rows in order of length, so many at a time that a batch holds about the same number of tokens."""
        order, at = torch.argsort(lengths, stable=True), 0
        budget = TOKENS_AT_ONCE.get(self.device.type, 1 << 14)
        while at < len(order):
            rows = order[at : at + max(1, budget // int(lengths[order[at]]))]
            rows = rows[: max(1, budget // int(lengths[rows].max()))]
            yield rows
            at += len(rows)

    def _forward(self, ids: Tensor, real: Tensor, batch: Any) -> list[Float[Tensor, "rows d"]]:
        """A plain forward pass: the last token's residual after every block; `batch` is shown what bases need."""
        residuals: list[Tensor] = []

        def show(layer: int) -> Callable[..., None]:
            names = list(inspect.signature(self.decoder.blocks[layer].forward).parameters)

            def call(_: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
                named = dict(zip(names, args, strict=False)) | dict(kwargs)
                batch.call(layer, {n: v for n, v in named.items() if n != names[0]})

            return call

        blocks = self.decoder.blocks
        hooks = [b.register_forward_hook(lambda _, __, h: residuals.append(first(h)[:, -1].float())) for b in blocks]
        if batch is not None:
            hooks += [b.register_forward_pre_hook(show(k), with_kwargs=True) for k, b in enumerate(blocks)]
        try:
            self.decoder.trunk(
                input_ids=ids,
                attention_mask=real.long(),
                position_ids=(real.cumsum(dim=1) - 1).clamp(min=0),
                past_key_values=None if batch is None else recording_cache(batch.keys),
                use_cache=batch is not None,
            )
        finally:
            for hook in hooks:
                hook.remove()
        return residuals

    def _advance(
        self,
        cache: PrefixCache,
        rows: Int[Tensor, " pairs"],
        h: Float[Tensor, "pairs variants d"],
        layers: range,
        finish: Callable[[Tensor], Tensor],
    ) -> Float[Tensor, "pairs variants ..."]:
        """Run the last token through some blocks, few enough pairs and variants at a time, and `finish` each part."""
        pairs, variants, _ = h.shape
        at_once = RESPONSES_AT_ONCE.get(self.device.type, 1 << 13)
        variants_at_once = min(variants, at_once)
        pairs_at_once = max(1, at_once // variants_at_once)
        heavy = h.requires_grad and pairs * variants * self._graph_bytes(layers) > self.memory // 2
        done = []
        for at in range(0, pairs, pairs_at_once):
            some = slice(at, at + pairs_at_once)
            view = cache.view(rows[some], 1)

            def run(x: Tensor, view: PrefixView = view) -> Tensor:
                for layer in layers:
                    x = first(self.decoder.blocks[layer](x.to(view.device(layer)), **view.call(layer, x.shape[1])))
                return finish(x.flatten(0, 1)).unflatten(0, x.shape[:2])

            parts = [x.to(self.dtype).contiguous() for x in h[some].split(variants_at_once, dim=1)]
            # a graph that would not fit is thrown away and computed again on the way back
            out = [checkpoint(run, x, use_reentrant=False) if heavy else run(x) for x in parts]
            done.append(torch.cat(out, dim=1))
        return torch.cat(done).to(self.device)

    def _graph_bytes(self, layers: range) -> int:
        """About what a response's way through some blocks keeps for the backward pass."""
        wide = sum(sum(p.shape) for k in layers for p in self.decoder.blocks[k].parameters() if p.ndim == 2)
        return 8 * wide

    def _read(self, h: Float[Tensor, "rows d"]) -> Float[Tensor, "rows c"]:
        """The outputs from the last token's residual after the last block."""
        h = h.to(self.dtype)
        if self.reading == "vocabulary":
            return self.decoder.logits(h)
        tokens = torch.tensor([t for group in self.answers for t in group], device=h.device)
        logits = self.decoder.logits(h, tokens)
        columns = [g.amax(dim=1, keepdim=True) for g in logits.split([len(g) for g in self.answers], dim=1)]
        if self.reading == "rest":
            columns.append(self.decoder.largest(h, without=tokens))
        return torch.cat(columns, dim=1)

    @contextlib.contextmanager
    def _held(self) -> Iterator[None]:
        """Evaluation mode and frozen weights, at no cost where they are so already."""
        loose = self.decoder.model.training or (
            torch.is_grad_enabled() and any(p.requires_grad for p in self._parameters)
        )
        with frozen(self.decoder.model) if loose else contextlib.nullcontext():
            yield

    @torch.no_grad()
    def _check(self, store: DecoderStore, ids: Tensor, real: Tensor, row: int) -> None:
        """Resume one prompt under a strong edit and compare with the whole hooked forward, once per subject."""
        place = self.places[0]
        edited = store.activations[place.name][row].flip(0)
        start = ids.shape[1] - int(store.lengths[row])
        prompt, mask = (t[row : row + 1, start:].to(self.device) for t in (ids, real.long()))
        with self._held(), self.intervene({place.name: lambda _: edited.unsqueeze(0)}):
            whole = self.decoder.model(input_ids=prompt, attention_mask=mask).logits[:, -1].float()
        expected = torch.stack([whole[0, list(g)].amax() for g in self.answers])
        at = torch.tensor([row], device=self.device)
        try:
            found = self.watching().resume(store, at, place, edited[None, None], {})[0, 0]
        except Exception as e:
            raise PlotError(
                f"{type(self.decoder.model).__name__} cannot be resumed at an edit ({type(e).__name__}: {e}): its "
                f"attention must go through transformers' attention interface. Use ModuleSubject for it."
            ) from e
        error = float((found - expected.to(found.device)).abs().max() / whole.abs().max().clamp(min=1e-6))
        if not error < (1e-3 if self.dtype in (torch.float32, torch.float64) else 0.1):
            raise PlotError(
                f"{type(self.decoder.model).__name__} cannot be resumed at an edit: its answers differ from those of "
                f"the whole forward pass by {error:.2g} of the largest logit. Use ModuleSubject for it."
            )
        self._checked = True


def _ours(store: Store) -> DecoderStore:
    if not isinstance(store, DecoderStore):
        raise PlotError(f"This store was recorded by another kind of subject ({type(store).__name__}).")
    return store


def _refuse_answers(answers: Sequence[Sequence[int]], vocabulary: int) -> None:
    tokens = [t for group in answers for t in group]
    if not answers or not all(answers):
        raise PlotError("Every answer needs at least one token that spells it.")
    if not all(0 <= t < vocabulary for t in tokens):
        raise PlotError(f"Answer tokens must lie in 0..{vocabulary - 1}; found {min(tokens)} to {max(tokens)}.")
    owners: dict[int, int] = {}
    for j, group in enumerate(answers):
        for t in group:
            if owners.setdefault(t, j) != j:
                raise PlotError(
                    f"Answers {owners[t]} and {j} share token {t}: the tokenizer does not tell them apart. Choose "
                    f"answers that differ in their first token."
                )
