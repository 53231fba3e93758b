"""What can be said about a hypothesis and its pairs before any network is loaded: a dry run of `localize`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from plot_ot.abstract import prompts
from plot_ot.abstract.admission import Admission
from plot_ot.abstract.banks import Bank, Power, Splits, distinct_rows, row_codes
from plot_ot.abstract.causal_model import CausalModel, same
from plot_ot.abstract.holding_out import HoldOut
from plot_ot.abstract.hypothesis import Hypothesis
from plot_ot.abstract.pairs import read_pairs
from plot_ot.abstract.splitting import Pairs, from_inputs, from_pairs
from plot_ot.abstract.templates import Span, shown
from plot_ot.errors import PlotError
from plot_ot.files.writing import Json
from plot_ot.judging.gates import KEEPS, LEAST_PAIRS, WORKS
from plot_ot.judging.intervals import Bootstrap, at_least

ANYONE = "a network that is always right"
"""Who answers in a check: no network is loaded."""
SIZE = {True: 200, False: 1000}
"""Pairs per bank that `localize` draws from inputs, on a language model and else."""
PROMPTS_TRIED = 5


@dataclass(frozen=True)
class BankCheck:
    """What one bank can show about one variable."""

    split: str
    variable: str
    power: Power
    copy_source: float | None
    """How often the source's answer is the right one, among pairs that change the variable."""


@dataclass(frozen=True)
class Example:
    """One prompt with its answer and the named positions."""

    prompt: str
    answer: str
    positions: Mapping[str, Span]
    tokens: Mapping[str, tuple[int, str]] = field(default_factory=dict)
    """Each position's token, counted from the end, and its text; empty without a tokenizer."""


@dataclass
class Checkup:
    """Everything that was found; `problems` are what must be mended, `notes` what should be known."""

    graph: str = ""
    pairs: int = 0
    inputs: int = 0
    families: dict[str, dict[str, int]] = field(default_factory=dict)
    """`all` pairs and, where they are the user's own, each split: how many pairs of every family."""
    banks: list[BankCheck] = field(default_factory=list)
    answers: dict[str, dict[str, int]] = field(default_factory=dict)
    """Base answers, source answers and each variable's counterfactual answers, with how many pairs have each."""
    example: Example | None = None
    tokens: dict[str, list[str]] = field(default_factory=dict)
    """The tokens of each answer, as texts."""
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    strict: bool = False
    """Raise an error instead of collecting it."""

    @property
    def ready(self) -> bool:
        """Whether `localize` has what it needs."""
        return not self.problems

    @property
    def verdict(self) -> str:
        """The outcome in one line."""
        return "ready" if self.ready else f"not ready: {' | '.join(self.problems)}"

    def to_json(self) -> Json:
        """The outcome as plain values, ready for JSON."""
        return {"ready": self.ready, **{k: v for k, v in asdict(self).items() if k != "strict"}}

    @contextmanager
    def part(self) -> Iterator[None]:
        """Collect the errors of one part of the check as problems, so that the other parts are checked too."""
        try:
            yield
        except PlotError as e:
            if self.strict:
                raise
            if str(e) not in self.problems:
                self.problems.append(str(e))


def check(
    hypothesis: Hypothesis | CausalModel,
    pairs: Any,
    *,
    tokenizer: Any = None,
    hold_out: str | Sequence[str] | None = None,
    strict: bool = False,
) -> Checkup:
    """Would `localize` get what it needs? `pairs` as there: pairs or inputs, from a list, a file, a table, tensors.

    Labels every pair, splits them as `localize` would for a network that answers everything right, and says which
    variables change, what each bank can show, and what is missing. With a `tokenizer` also whether the answers are
    single tokens and where the named positions are. `hold_out` is that of `localize`. Errors are collected as problems,
    or raised when `strict`.
    """
    found = Checkup(strict=strict)
    with found.part():
        causal = hypothesis.causal if isinstance(hypothesis, Hypothesis) else hypothesis
        found.graph = repr(hypothesis)
        rows, given = _read(hypothesis, pairs, found)
        found.inputs = len(distinct_rows(rows))
        with found.part():
            _look_at_banks(found, hypothesis, causal, rows, given, HoldOut.by(hypothesis, hold_out))
        if isinstance(hypothesis, Hypothesis) and hypothesis.has_prompts:
            with found.part():
                _look_at_prompts(found, hypothesis, rows, tokenizer)
            with found.part():
                _look_at_tokens(found, hypothesis, rows, tokenizer)
        elif tokenizer is not None:
            found.notes.append("the hypothesis has no template, so the tokenizer was not needed")
    return found


def _read(hypothesis: Hypothesis | CausalModel, pairs: Any, found: Checkup) -> tuple[Tensor, Pairs | Tensor]:
    """Read all input rows, and the pairs or rows in the form that `localize` takes."""
    if isinstance(pairs, Tensor):
        return pairs, pairs
    if isinstance(pairs, tuple) and len(pairs) == 2 and all(isinstance(p, Tensor) for p in pairs):
        return torch.cat(pairs), Pairs(*pairs)
    table = read_pairs(pairs)
    found.notes += table.notes
    base, source = table.rows(hypothesis)
    if not table.source:
        return base, base
    return torch.cat([base, source]), Pairs(base, source, table.family, table.split)


# -- banks ------------------------------------------------------------------------------------------------------


def _look_at_banks(
    found: Checkup,
    model: Hypothesis | CausalModel,
    causal: CausalModel,
    rows: Tensor,
    given: Pairs | Tensor,
    hold_out: HoldOut | None,
) -> None:
    generator = torch.Generator().manual_seed(0)
    text = isinstance(model, Hypothesis) and model.has_prompts

    admission = Admission(lambda rows: torch.ones(len(rows), dtype=torch.bool), who=ANYONE)
    if isinstance(given, Pairs):
        names = list(dict.fromkeys(given.family or ()))
        family = torch.tensor([names.index(f) for f in given.family]) if given.family else None
        whole = Bank.from_pairs(causal, given.base, given.source, family=family, families=names or None)
        _describe(found, model, whole)
        made = from_pairs(causal, given, admission, generator, hold_out)
        splits = made.splits
        held_out = [splits.test[causal.variables[0], kind] for kind in ("sensitivity", "invariance")]
        parts = {"fit": [splits.fit], "calibration": [splits.calibration], "test": held_out}
        found.families |= {split: _families(*banks) for split, banks in parts.items()}
    else:
        made = from_inputs(causal, given, admission, SIZE[text], generator, hold_out)
        splits = made.splits
        found.notes.append("inputs without pairs: the pairs below are drawn as `localize` would draw them")
        _describe(found, model, splits.calibration)
    found.notes += made.notes[1:]  # the first is about the network's answers, and there is no network here
    _look_at_power(found, causal, splits)


def _describe(found: Checkup, model: Hypothesis | CausalModel, bank: Bank) -> None:
    """Count families, answers and changed variables over all pairs."""
    found.pairs = len(bank)
    found.families["all"] = _families(bank)
    columns = {"base": bank.base_answer, "source": bank.source_answer}
    columns |= {f"swap {v}": bank.labels[v] for v in bank.variables}
    for name, values in columns.items():
        found.answers[name] = dict(Counter(_spelled(model, v) for v in values.tolist()).most_common())
    equal = int(same(bank.base, bank.source).sum())
    if equal:
        found.notes.append(f"{equal} pairs have the same base and source")
    repeated = len(bank) - int(row_codes(torch.cat([bank.base, bank.source], dim=1)).max()) - 1
    if repeated:
        found.notes.append(f"{repeated} pairs stand there more than once")
    for v in bank.variables:
        if not bool(bank.changed[v].any()):
            found.problems.append(f"no pair changes '{v}': give sources in which it differs")
        elif bool(bank.changed[v].all()):
            found.problems.append(f"every pair changes '{v}': give pairs that keep it, to test invariance")


def _look_at_power(found: Checkup, causal: CausalModel, splits: Splits) -> None:
    for v in causal.variables:
        banks = {"fit": splits.fit, "calibration": splits.calibration, "test": splits.test[v, "sensitivity"]}
        for split, bank in banks.items():
            moved = bank.sensitive(v)
            copied = float(same(moved.labels[v], moved.source_answer).float().mean()) if len(moved) else None
            found.banks.append(BankCheck(split, v, bank.power(v), copied))
        power = found.banks[-1].power
        if power.is_output:
            found.notes.append(f"'{v}' is an output variable: its swap always gives the source's answer")
        elif gaps := power.missing(LEAST_PAIRS):
            found.problems.append(
                f"'{v}' would be undecided with these pairs: its test bank has too few {'; '.join(gaps)}"
            )
        else:
            found.notes += _too_few_bases(v, splits)


def _too_few_bases(variable: str, splits: Splits) -> list[str]:
    """What even a perfect handle could not be shown to do, for want of base inputs (the rule of three)."""
    tested = splits.test[variable, "sensitivity"]
    kinds = {
        ("work on most pairs that tell", WORKS): tested.select(tested.discriminating(variable)),
        ("leave the rest alone", KEEPS): splits.test[variable, "invariance"],
    }
    said = []
    for (what, bound), bank in kinds.items():
        bases = Bootstrap(bank).balanced_bases
        needed = at_least(bound)
        if bases < needed:
            said.append(
                f"'{variable}': even a perfect handle could not be shown to {what}: the test pairs for it have {bases} "
                f"base inputs, at least {needed} are needed"
            )
    return said


def _families(*banks: Bank) -> dict[str, int]:
    return dict(Counter(b.families[f] for b in banks for f in b.family.tolist()).most_common())


def _spelled(model: Hypothesis | CausalModel, answer: Any) -> str:
    return str(model.answers[answer] if isinstance(model, Hypothesis) else answer)


# -- prompts and tokens -----------------------------------------------------------------------------------------


def _look_at_prompts(found: Checkup, hypothesis: Hypothesis, rows: Tensor, tokenizer: Any) -> None:
    """Check that every prompt can be made, has its named positions, and means one answer."""
    distinct = distinct_rows(rows)
    if hypothesis.has_chats and tokenizer is None:
        found.notes.append("the chat below is a transcript: what the model reads is written by its tokenizer")
    located = hypothesis.located(distinct, tokenizer)
    answers = [str(hypothesis.answers[k]) for k in hypothesis.causal.answer(distinct).tolist()]
    found.example = Example(located[0][0], answers[0], located[0][1])
    known: dict[str, str] = {}
    for (prompt, _), answer in zip(located, answers, strict=True):
        if known.setdefault(prompt, answer) != answer:
            raise PlotError(
                f"The prompt {shown(prompt)} stands for inputs with different answers, {known[prompt]} and {answer}: "
                f"the template leaves out an input that the answer depends on."
            )
    if len(known) < len(located):
        found.notes.append(f"{len(located)} distinct inputs have only {len(known)} distinct prompts")


def _look_at_tokens(found: Checkup, hypothesis: Hypothesis, rows: Tensor, tokenizer: Any) -> None:
    if tokenizer is None:
        found.notes.append("answers and positions were not checked against a tokenizer: none was given")
        return
    groups = hypothesis.answer_tokens(tokenizer)
    answers = hypothesis.answers
    found.tokens = {a: [tokenizer.decode([t]) for t in g] for a, g in zip(answers, groups, strict=True)}
    distinct = distinct_rows(rows)
    for prompt in hypothesis.render(distinct[:PROMPTS_TRIED], tokenizer):
        silent = prompts.unreachable_answers(tokenizer, prompt, answers, groups)
        if silent:
            hint = " Remove the space at its end." if prompt[-1].isspace() else ""
            if hypothesis.has_chats:
                hint = " A chat's answer has no space before it: use answers that are single tokens without one."
            raise PlotError(
                f"After the prompt {shown(prompt)} the answers {', '.join(silent)} are not read as single tokens.{hint}"
            )
    places = hypothesis.named_tokens(tokenizer)
    found.notes += places.notes
    tokens = {name: at(distinct) for name, at in places.functions().items()}
    if found.example is not None:
        ids = hypothesis.encoder(tokenizer, None)(distinct[:1])[0][0].tolist()
        named = {}
        for name, at in tokens.items():
            start = len(ids) + int(at[0])
            named[name] = int(at[0]), tokenizer.decode(ids[start : start + places.sizes.get(name, 1)])
        found.example = Example(found.example.prompt, found.example.answer, found.example.positions, named)
