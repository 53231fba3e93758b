"""A study as the planner sees it: a network's shape, banks of pairs, and recordings that nothing was run for."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NoReturn

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from plot_ot.abstract.banks import Bank, Splits, first_of_each, row_codes
from plot_ot.edits import Distinct
from plot_ot.engine.units import Encoded, cut_into_shards, inputs_per_shard
from plot_ot.errors import PlotError
from plot_ot.subjects import BankRecording, Place, Store, Subject, record
from plot_ot.subjects.decoder.sizes import PromptSubject
from plot_ot.subjects.decoder.trie import Trie
from plot_ot.subjects.shape import Shape

MEMORY = 4 << 30
"""The memory budget of a language model's recording, which `plot-ot run` also uses."""

Tokens = tuple[Int[Tensor, "rows tokens"], Bool[Tensor, "rows tokens"]]
"""Token ids, padded on the left, and where they are no padding."""


@dataclass(frozen=True)
class Inputs:
    """Distinct inputs that are run whole."""

    count: int = 0
    tokens: int = 0
    longest: int = 0
    running: int = 0
    """Tokens that run: a beginning that several prompts of a shard share counts once."""
    bases: int = 0
    """How many of the inputs will be resumed."""
    kept: int = 0
    """Tokens of which keys and values are kept for them."""
    shards: int = 0

    def __add__(self, other: Inputs) -> Inputs:
        return Inputs(
            self.count + other.count,
            self.tokens + other.tokens,
            max(self.longest, other.longest),
            self.running + other.running,
            self.bases + other.bases,
            self.kept + other.kept,
            self.shards + other.shards,
        )

    @classmethod
    def of(cls, banks: Sequence[Bank], encoded: Encoded, subject: Subject) -> Inputs:
        """The inputs of some banks, cut as the engine cuts them for this subject."""
        shards, _ = cut_into_shards(banks, inputs_per_shard(subject), encoded)
        found = sum((cls.recorded(s.inputs, s.bases, encoded(s.inputs)) for s in shards), cls())
        found = replace(found, running=found.tokens, kept=0) if subject.whole_passes else found
        return sum((found.followed(tokens) for tokens in subject.beginnings), cls())

    def followed(self, more: int) -> Inputs:
        """The same inputs with so many tokens behind each."""
        return Inputs(
            self.count,
            self.tokens + more * self.count,
            self.longest + more,
            self.running + more * self.count,
            self.bases,
            self.kept + more * self.bases,
            self.shards,
        )

    @classmethod
    def recorded(cls, inputs: Tensor, bases: Tensor, tokens: Tokens | None) -> Inputs:
        """Inputs that are recorded together; those that are no prompts count as one token."""
        if tokens is None:
            return cls(len(inputs), len(inputs), 1, len(inputs), len(bases), 0, 1)
        trie = Trie(*tokens)
        total, longest = int(trie.lengths.sum()), trie.paths.shape[1]
        return cls(len(inputs), total, longest, trie.running, len(bases), trie.kept(bases), 1)


@dataclass(frozen=True)
class Scene:
    """What a study has before anything runs."""

    shape: Shape
    subject: Subject
    fit: BankRecording
    calibration: BankRecording
    tests: Mapping[tuple[str, str], BankRecording]
    inputs: Inputs
    outputs: int
    """How many candidate answers there are."""
    beside: Mapping[str, Inputs] = field(default_factory=dict)
    """What else is run whole, by part: a `filter` that sees whether the model answers right, banks to `transfer`.

    Recording takes over what a filter ran: in the same process no prompt runs twice."""
    _classes: dict[tuple[str, ...], int] = field(default_factory=dict, compare=False, repr=False)
    _tails: dict[str, float] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def of_subject(cls, subject: Subject, splits: Splits, outputs: int) -> Scene:
        """Describe the study of a live network.

        A small one is recorded, even if it is untrained: which inputs share a state, and so need not be run twice, is
        a matter of its structure. A language model is not run.
        """
        shape, banks = subject.shape(outputs), [splits.fit, splits.calibration, *splits.test.values()]
        recordings = [unrecorded(subject, b) for b in banks] if shape.language else record(subject, *banks)
        return cls._of(subject, shape, splits, recordings, Inputs.of(banks, subject.encoded, subject), outputs)

    @classmethod
    def of_shape(
        cls,
        shape: Shape,
        splits: Splits,
        outputs: int,
        encoded: Encoded,
        memory: int = MEMORY,
        beside: Mapping[str, Inputs] | None = None,
    ) -> Scene:
        """Describe the study of a language model that is known by its shape alone."""
        banks = [splits.fit, splits.calibration, *splits.test.values()]
        subject = Unloaded(shape, outputs, memory)
        recordings = [unrecorded(subject, b) for b in banks]
        return cls._of(subject, shape, splits, recordings, Inputs.of(banks, encoded, subject), outputs, beside)

    @classmethod
    def _of(
        cls,
        subject: Subject,
        shape: Shape,
        splits: Splits,
        recordings: Sequence[BankRecording],
        inputs: Inputs,
        outputs: int,
        beside: Mapping[str, Inputs] | None = None,
    ) -> Scene:
        fit, calibration, *tests = recordings
        named = dict(zip(splits.test, tests, strict=True))
        return cls(shape, subject, fit, calibration, named, inputs, outputs, beside or {})

    @property
    def context(self) -> float:
        """The average number of tokens in a prompt."""
        return self.inputs.tokens / self.inputs.count

    def tail(self, place: Place) -> float:
        """The average number of tokens that an edit at a place runs again: those from its token to the end, or all."""
        if place.token not in self._tails:
            base, subject = self.fit.bank.base, self.subject
            tokens = subject.lengths(base) if subject.whole_passes else subject.tails(place, base)
            self._tails[place.token] = float(tokens.double().mean())
        return self._tails[place.token]

    def through(self, place: Place) -> float:
        """Block-tokens of one response resumed at a place.

        Of the last block's tokens only the last runs to its end, unless the edit is inside that block or the prompt is
        run whole.
        """
        blocks, whole = self.shape.left(place), self.subject.whole_passes or place.layer == self.shape.blocks - 1
        tails = [self.tail(place) + tokens for tokens in self.subject.beginnings]
        return sum(blocks * tail if tail == 1 or not blocks or whole else (blocks - 1) * tail + 1 for tail in tails)

    def resumed_at_once(self, place: Place, device: str) -> int:
        """Responses that are resumed together; whole prompts are counted by themselves, other ones by their tokens."""
        tokens = 1.0 if self.subject.whole_passes else self.tail(place)
        return max(1, int(self.subject.resumed_at_once(device) / tokens))

    def classes(self, recording: BankRecording, places: Sequence[Place]) -> int:
        """How many pairs edits at these places can tell apart; each of them runs once."""
        # a language model's token holds the prompt up to there, whatever the block
        names = [p.token if self.shape.language else p.name for p in places]
        key = recording.bank.name, *dict.fromkeys(names)
        if key not in self._classes:
            if not self.shape.language:
                self._classes[key] = len(Distinct.of(recording, places).once)
            else:
                seen = zip(recording.base_rows.tolist(), self._seen(recording, places), strict=True)
                self._classes[key] = len(set(seen))
        return self._classes[key]

    def _seen(self, recording: BankRecording, places: Sequence[Place]) -> list[object]:
        """Of every pair's source, what the tokens of some places have seen: its beginning up to the last of them."""
        subject, source = self.subject, recording.bank.source
        after = [subject.tails(p, source) - (subject.tokens_at(p) - 1) for p in places]  # from its last token on
        tails = torch.stack(after).amin(dim=0)
        encoded = self.subject.encoded(recording.bank.source) if int(tails.max()) > 1 else None
        if encoded is None:
            return recording.source_rows.tolist()
        return [
            tuple(ids[real][: 1 - tail or None].tolist())
            for ids, real, tail in zip(*encoded, tails.tolist(), strict=True)
        ]


def answers_in(splits: Splits) -> int:
    """How many outputs a network has that is asked for the answers of some banks: candidates, bits or numbers."""
    banks = [splits.fit, splits.calibration, *splits.test.values()]
    answers = torch.cat([b.base_answer for b in banks])
    if answers.dim() > 1:
        return answers.shape[1]
    return 1 if answers.is_floating_point() else int(answers.max()) + 1


class Words:
    """Stands in for a tokenizer that is not on this machine: words, signs and line breaks, numbered as they come.

    `first` is how many tokens a model puts before every prompt.
    """

    def __init__(self, first: int = 1) -> None:
        self.first, self._numbers = first, {"": 0}

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        words = [""] * (self.first if add_special_tokens else 0) + re.findall(r"\n|\w+|[^\w\s]", text)
        return {"input_ids": [self._numbers.setdefault(word, len(self._numbers)) for word in words]}


def approximate_tokens(texts: Sequence[str], first: int = 1) -> Tokens:
    """Estimate the tokens of prompts without their tokenizer: words, signs and line breaks.

    `first` is how many tokens a model puts before every prompt.
    """
    words = Words(first)
    found = [words(text)["input_ids"] for text in texts]
    longest = max(map(len, found), default=0)
    ids = [[0] * (longest - len(text)) + text for text in found]
    lengths = torch.tensor([len(text) for text in found])
    return torch.tensor(ids, dtype=torch.long), torch.arange(longest) >= longest - lengths[:, None]


# -- recordings that nothing was run for --------------------------------------------------------------------------


class _RandomActivations(Mapping[str, Tensor]):
    """Random activations of the right shapes, made when they are asked for."""

    def __init__(self, rows: int, places: Sequence[Place]) -> None:
        self.rows, self.widths = rows, {p.name: p.width for p in places}

    def __getitem__(self, name: str) -> Tensor:
        return torch.randn(self.rows, self.widths[name], generator=torch.Generator().manual_seed(0))

    def __iter__(self) -> Iterator[str]:
        return iter(self.widths)

    def __len__(self) -> int:
        return len(self.widths)


def unrecorded(subject: Subject, bank: Bank) -> BankRecording:
    """A recording of the right shapes that nothing was run for: enough to lay out menus."""
    rows = torch.cat([bank.base, bank.source])
    code = row_codes(rows)
    inputs = rows[first_of_each(code)]
    store = Store(inputs, _RandomActivations(len(inputs), subject.places), torch.zeros(len(inputs), 1))
    base, source = code.split(len(bank))
    return BankRecording(subject, store, base, source, bank)


class Unloaded(PromptSubject):
    """A language model whose weights are elsewhere: it has places and a budget, and cannot be run."""

    def __init__(self, shape: Shape, outputs: int, memory: int = MEMORY) -> None:
        self._shape, self._outputs, self.memory = shape, outputs, memory
        self.places = shape.places

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def prompt_shape(self) -> Shape:
        return self._shape

    @property
    def response_columns(self) -> int:
        return self._outputs + 1

    @property
    def parameters(self) -> int:
        return self._shape.weights

    def record(self, inputs: Tensor, bases: Tensor | None = None) -> NoReturn:
        self._refuse()

    def resume(self, *_: object) -> NoReturn:
        self._refuse()

    def intervene(self, rewrites: object) -> NoReturn:
        self._refuse()

    def weights(self) -> NoReturn:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise PlotError(f"{self._shape.name} is planned with, not loaded: it has no weights to run.")
