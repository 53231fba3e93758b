"""Answers of several tokens: a language model whose outputs are the log-probabilities of whole answers.

log p(t₁ ... tₙ | prompt) is the sum of log p(tₖ | prompt, t₁ ... tₖ₋₁). Every distinct beginning t₁ ... tₖ₋₁ of the
answers is a prompt of its own, the prompt continued by it, and a decoder subject that reads the whole vocabulary after
it. An edit acts at the prompt's tokens; the answer's tokens are run after it and see the edited states. So each
beginning is recorded once and resumed at the edit, and answers share what they begin with.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from plot_ot.errors import PlotError
from plot_ot.subjects.decoder.layout import Positions, for_some
from plot_ot.subjects.decoder.store import DecoderStore
from plot_ot.subjects.decoder.subject import DecoderSubject, Encode
from plot_ot.subjects.open_edits import OpenEdit, Rewrites
from plot_ot.subjects.places import Place
from plot_ot.subjects.protocol import Rewrite, Store, Subject
from plot_ot.subjects.shape import Shape

Beginning = tuple[int, ...]
PROMPT = "prompt_end"
"""What the prompt's last token is called where an answer's beginning follows it."""


@dataclass(frozen=True)
class SequenceStore(Store):
    """What resuming whole answers needs: the store of every beginning, for each part that was recorded by itself."""

    bundles: tuple[Mapping[Beginning, DecoderStore], ...]
    part: Int[Tensor, " inputs"]
    """In which bundle an input is."""
    slot: Int[Tensor, " inputs"]
    """Where in that bundle."""

    @property
    def prefixes(self) -> Sequence[Any]:
        return self.bundles

    def with_prefixes(self, prefixes: Sequence[Any]) -> SequenceStore:
        return replace(self, bundles=tuple(prefixes))


class SequenceSubject(Subject):
    """A Hugging Face causal language model whose candidate answers are sequences of tokens.

    `answers[j]` are the tokens of answer j, in order; output j is its log-probability after the prompt. No answer may
    be the beginning of another: their probabilities would not be of different events. `encode`, `layers`, `kinds`,
    `positions`, `spans` and `memory` are those of `DecoderSubject`; places are at tokens of the prompt.
    """

    recorder_resumes = True

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
        memory: int = 4 << 30,
    ) -> None:
        self.answers = tuple(tuple(int(t) for t in a) for a in answers)
        _refuse_beginnings(self.answers)
        self.memory = memory
        tokens = [[t] for t in dict.fromkeys(t for a in self.answers for t in a)]
        beginnings = list(dict.fromkeys(a[:k] for a in self.answers for k in range(len(a))))
        self._readers: dict[Beginning, DecoderSubject] = {}
        for begun in beginnings:
            named = {name: _moved(where, len(begun)) for name, where in (positions or {}).items()}
            if begun:
                named[PROMPT] = _moved(lambda rows: -1, len(begun))
            reader = DecoderSubject(
                model,
                _continued(encode, begun),
                tokens,
                layers=layers,
                kinds=kinds,
                positions=named,
                spans=spans,
                memory=max(1, memory // len(beginnings)),
            )
            self._readers[begun] = reader.watching(vocabulary=True)
        self.prompt = self._readers[()]
        """The model as a subject that reads one token: handles found here belong to it as well."""
        self.places = self.prompt.places

    # -- what the prompt's own subject knows -------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        return self.prompt.device

    def weights(self) -> Mapping[str, Tensor]:
        return self.prompt.weights()

    def structure(self) -> str:
        return self.prompt.structure()

    def identity(self) -> str:
        return self.prompt.identity()

    @property
    def beginnings(self) -> tuple[int, ...]:
        return tuple(map(len, self._readers))

    def shape(self, outputs: int) -> Shape:
        return self.prompt.shape(outputs)

    def encoded(self, inputs: Tensor) -> tuple[Int[Tensor, "rows tokens"], Bool[Tensor, "rows tokens"]] | None:
        return self.prompt.encoded(inputs)

    def tails(self, place: Place, inputs: Tensor) -> Int[Tensor, " rows"]:
        return self.prompt.tails(place, inputs)

    def tokens_at(self, place: Place) -> int:
        return self.prompt.tokens_at(place)

    def lengths(self, inputs: Tensor) -> Int[Tensor, " rows"]:
        return self.prompt.lengths(inputs)

    @property
    def responses_per_batch(self) -> int:
        return self.prompt.responses_per_batch

    def intervene(self, rewrites: Rewrites) -> contextlib.AbstractContextManager[OpenEdit]:
        return self.prompt.intervene(rewrites)

    def live(self, rewrites: Rewrites, **options: Any) -> contextlib.AbstractContextManager[OpenEdit]:
        return self.prompt.live(rewrites, **options)

    # -- Subject -----------------------------------------------------------------------------------------

    def record(self, inputs: Tensor, bases: Int[Tensor, " bases"] | None = None) -> SequenceStore:
        """One pass per prompt and beginning."""
        stores, logits = {}, {}
        for begun, reader in self._readers.items():
            store = reader.record(inputs, bases)
            logits[begun] = self._needed(begun, store.outputs)
            store.readings.clear()  # a row of the vocabulary for every input is much
            stores[begun] = replace(store, outputs=store.final)
        part, slot = torch.zeros(len(inputs), dtype=torch.long), torch.arange(len(inputs))
        return SequenceStore(inputs, stores[()].activations, self._summed(logits), (stores,), part, slot)

    def resume(
        self, store: Store, rows: Tensor, start: Place, activation: Tensor, later: Mapping[str, Rewrite]
    ) -> Tensor:
        if not isinstance(store, SequenceStore):
            raise PlotError(f"This store was recorded by another kind of subject ({type(store).__name__}).")
        rows, (variants, pairs, _) = rows.cpu(), activation.shape
        done, order = [], []
        for part in store.part[rows].unique().tolist():
            some = (store.part[rows] == part).nonzero().squeeze(1)
            here = some.to(activation.device)
            given = activation[:, here]
            rewrites = {n: for_some(r, variants, pairs, (slice(None), some), self.device) for n, r in later.items()}
            logits = {}
            for begun, reader in self._readers.items():
                renamed = {self._name(n, begun): r for n, r in rewrites.items()}
                place = reader.place(self._name(start.name, begun))
                bundle, at = store.bundles[part][begun], store.slot[rows[some]]
                logits[begun] = self._needed(begun, reader.resume(bundle, at, place, given, renamed))
            done.append(self._summed(logits))
            order.append(some)
        outputs, index = torch.cat(done, dim=1), torch.cat(order)
        return outputs if len(done) == 1 else outputs[:, index.argsort().to(outputs.device)]

    # -- parts -------------------------------------------------------------------------------------------

    def _next(self, begun: Beginning) -> list[int]:
        """The tokens that some answer goes on with."""
        n = len(begun)
        return list(dict.fromkeys(a[n] for a in self.answers if len(a) > n and a[:n] == begun))

    def _needed(self, begun: Beginning, logits: Float[Tensor, "*batch vocabulary"]) -> Float[Tensor, "*batch next"]:
        """The log-probabilities of the tokens that answers go on with."""
        logits = logits.float()
        return logits[..., self._next(begun)] - logits.logsumexp(dim=-1, keepdim=True)

    def _summed(self, found: Mapping[Beginning, Float[Tensor, "*batch next"]]) -> Float[Tensor, "*batch answers"]:
        totals = []
        for a in self.answers:
            steps = [found[a[:k]][..., self._next(a[:k]).index(a[k])] for k in range(len(a))]
            totals.append(torch.stack(steps).sum(dim=0))
        return torch.stack(totals, dim=-1)

    def _name(self, name: str, begun: Beginning) -> str:
        """What a place of the prompt is called where a beginning follows it."""
        return name if not begun or "@" in name else f"{name}@{PROMPT}"


def _refuse_beginnings(answers: Sequence[Beginning]) -> None:
    if len(answers) < 2 or not all(answers):
        raise PlotError("Give at least two answers, each a list of at least one token.")
    for a in answers:
        longer = [b for b in answers if b[: len(a)] == a and b is not a]
        if longer:
            raise PlotError(
                f"The answer {list(a)} is the beginning of {list(longer[0])}: whenever the second is said, so is the "
                f"first. End all answers with the same token, such as a full stop."
            )


def _continued(encode: Encode, begun: Beginning) -> Encode:
    """Prompts continued by an answer's beginning."""

    def encoded(rows: Tensor) -> tuple[Tensor, Tensor]:
        ids, mask = encode(rows)
        more = torch.tensor(begun, dtype=ids.dtype, device=ids.device).expand(len(ids), len(begun))
        return torch.cat([ids, more], dim=1), torch.cat([mask, torch.ones_like(more).to(mask.dtype)], dim=1)

    return encoded


def _moved(where: Any, tokens: int) -> Any:
    """A position counted from the end, when so many tokens follow the prompt."""
    return lambda rows: torch.as_tensor(where(rows)) - tokens
