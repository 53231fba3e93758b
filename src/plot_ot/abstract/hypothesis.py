"""A hypothesis in plain Python: variables as functions of named inputs, prompts from a template, answers as strings."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, TypeVar, overload

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from plot_ot.abstract import prompts
from plot_ot.abstract.causal_model import CausalModel, Mechanism
from plot_ot.abstract.codebook import Codebook, hashable_value, list_values, plain_input, with_type
from plot_ot.abstract.positions import NamedTokens, TokenSpan
from plot_ot.abstract.prompts import Encode
from plot_ot.abstract.templates import Maker, Position, Prompts, Span
from plot_ot.errors import PlotError, unknown

Function = TypeVar("Function", bound=Callable[..., Any])
Inputs = Mapping[str, Any]
Rows = Int[Tensor, "rows inputs"]


class _Coded(CausalModel):
    """A causal model over codes, which stand for values."""

    def __init__(self, *given: Any, value: Callable[[str, int], Any]) -> None:
        super().__init__(*given)
        self._value = value

    def spell(self, name: str, value: Any) -> str:
        """The value that a code stands for."""
        return str(self._value(name, int(value)))


def _first_line(function: Callable[..., Any]) -> str:
    """What a function's docstring begins with, as part of a sentence."""
    words = (inspect.getdoc(function) or "").strip().partition("\n")[0].rstrip(".")
    return words[:1].lower() + words[1:]


class Hypothesis:
    """What a network may compute, as plain functions whose parameter names are their parents.

    `template` makes a prompt of an input: a text with `{input}` fields, a list of chat messages with such fields, which
    the tokenizer's own chat template writes out, or a function of the input. `answers` are the strings the output can
    be (default: those seen so far); on a network without prompts, what each output column means. `positions` names
    tokens of the prompt: by a piece of the template, such as `"{name}"` (its last token), by a function of the input,
    or by a `TokenSpan` of either (all its tokens). `inputs` names the inputs (default: the template's fields and all
    parameters that are no variable).

        >>> h = Hypothesis(template="{a}+{b}=", answers=[str(n) for n in range(19)])
        >>> @h.variable
        ... def carry(a, b):
        ...     return a + b > 9
        >>> @h.variable
        ... def unit(a, b):
        ...     return (a + b) % 10
        >>> @h.output
        ... def total(carry, unit):
        ...     return str(10 * carry + unit)
        >>> base, source = h.rows([{"a": 2, "b": 3}, {"a": 6, "b": 7}]).split(1)
        >>> h.render(base), h.answers[h.causal.swap(base, source, "carry")]
        (['2+3='], '15')

    A function's docstring says what its variable means, for readers of the results.

    Functions see one input at a time, and each distinct combination of parent values once. `causal` is the causal model
    over integer codes that the rest of plot_ot works on: `rows` codes inputs, `values` says what a code stands for.
    """

    def __init__(
        self,
        *,
        inputs: Sequence[str] | None = None,
        template: Maker | None = None,
        answers: Sequence[Any] | None = None,
        positions: Mapping[str, Position | TokenSpan] | None = None,
        name: str = "hypothesis",
    ) -> None:
        if isinstance(inputs, str):
            raise PlotError(f"`inputs` must be a list of names; found the text {inputs!r}. Write inputs=[{inputs!r}].")
        self.name = name
        self.positions = dict(positions or {})
        if template is None and self.positions:
            raise PlotError("Named positions are tokens of a prompt: give a `template` as well.")
        wanted = {n: p.where if isinstance(p, TokenSpan) else p for n, p in self.positions.items()}
        self._prompts = None if template is None else Prompts(template, wanted)
        self._given_inputs = None if inputs is None else tuple(inputs)
        self._mechanisms: dict[str, tuple[tuple[str, ...], Callable[..., Any]]] = {}
        self._aside: set[str] = set()
        self._output: str | None = None
        self._books: dict[str, Codebook] = {}
        self._seen: dict[tuple[int, ...], None] = {}
        self._given_answers = answers is not None
        self._open = not self._given_answers
        self._answers = Codebook()
        self._collect_answers(answers)

    # -- declaring ---------------------------------------------------------------------------------------

    @overload
    def variable(self, function: Function) -> Function: ...
    @overload
    def variable(
        self, *, name: str | None = None, parents: Sequence[str] | None = None, localize: bool = True
    ) -> Callable[[Function], Function]: ...
    def variable(
        self,
        function: Callable[..., Any] | None = None,
        *,
        name: str | None = None,
        parents: Sequence[str] | None = None,
        localize: bool = True,
    ) -> Any:
        """Declare a variable: `@h.variable`, or `@h.variable(...)` with options.

        `name` and `parents` replace the function's own name and parameter names (for functions made in a loop);
        `localize=False` is for a step of the computation that is not to be looked for.
        """

        def declare(f: Function) -> Function:
            key = self._declare(f, name, parents)
            if not localize:
                self._aside.add(key)
            return f

        return declare if function is None else declare(function)

    @overload
    def output(self, function: Function) -> Function: ...
    @overload
    def output(
        self, *, name: str | None = None, parents: Sequence[str] | None = None
    ) -> Callable[[Function], Function]: ...
    def output(
        self,
        function: Callable[..., Any] | None = None,
        *,
        name: str | None = None,
        parents: Sequence[str] | None = None,
    ) -> Any:
        """Declare the answer, like a variable. With a template it must return a string."""

        def declare(f: Function) -> Function:
            if self._output is not None:
                raise PlotError(f"'{self._output}' is the output already: a hypothesis has one. Use @h.variable.")
            self._output = self._declare(f, name, parents)
            return f

        return declare if function is None else declare(function)

    def _declare(self, function: Callable[..., Any], name: str | None, parents: Sequence[str] | None) -> str:
        name = str(name or getattr(function, "__name__", ""))
        if not name.isidentifier():
            raise PlotError(f"A variable needs a plain name; found '{name}'. Give one: @h.variable(name=...).")
        if "causal" in self.__dict__:
            raise PlotError(f"'{name}' comes too late: inputs were coded already. Declare all variables first.")
        if name in self._mechanisms:
            raise PlotError(f"'{name}' is declared twice. Rename one, or make a new Hypothesis (in a notebook: rerun).")
        parents = _parents(function, name) if parents is None else tuple(parents)
        if not parents:
            raise PlotError(f"'{name}' has no parent: a variable is a function of inputs or other variables.")
        self._mechanisms[name] = parents, function
        return name

    # -- the causal model --------------------------------------------------------------------------------

    @property
    def inputs(self) -> tuple[str, ...]:
        """The names of the inputs, in the order of the columns."""
        if self._given_inputs is not None:
            return self._given_inputs
        fields = (self._prompts and self._prompts.fields) or ()
        read = [p for parents, _ in self._mechanisms.values() for p in parents if p not in self._mechanisms]
        return tuple(dict.fromkeys([*fields, *read]))

    @cached_property
    def causal(self) -> CausalModel:
        """The causal model over integer codes."""
        if self._output is None:
            raise PlotError(f"{self.name} has no output. Mark the function that gives the answer with @h.output.")
        inputs = self.inputs
        if self._prompts is not None and self._prompts.fields is None and self._given_inputs is None:
            raise PlotError("With a function as template, name the inputs it reads: Hypothesis(inputs=[...], ...).")
        for field in (self._prompts and self._prompts.fields) or ():
            if field in self._mechanisms:
                raise PlotError(f"The template's field {{{field}}} is a variable; prompts are made of inputs only.")
            if field not in inputs:
                unknown("field of the template", field, inputs)
        if self._prompts is None and self._open:
            raise PlotError(
                f"Without a template, say what each output column of the network means: Hypothesis(answers=[...]) "
                f"with the values that '{self._output}' can have, in the order of the columns."
            )
        batched = {n: Mechanism(p, self._batched(n, p, f)) for n, (p, f) in self._mechanisms.items()}
        wanted = [n for n in self._mechanisms if n != self._output and n not in self._aside]
        said = {n: _first_line(f) for n, (_, f) in self._mechanisms.items()}
        meanings = {n: words for n, words in said.items() if words}
        model = _Coded(inputs, batched, self._output, wanted, meanings, value=self._value)
        self._books = {n: Codebook(with_type) for n in inputs}
        self._books |= {n: self._answers if n == self._output else Codebook() for n in self._mechanisms}
        return model

    def _batched(self, name: str, parents: tuple[str, ...], function: Callable[..., Any]) -> Callable[..., Tensor]:
        known: dict[tuple[int, ...], int] = {}

        def run(*columns: Tensor) -> Tensor:
            combinations = list(zip(*(c.flatten().tolist() for c in columns), strict=True))
            for codes in dict.fromkeys(combinations):
                if codes not in known:
                    given = {p: self._value(p, c) for p, c in zip(parents, codes, strict=True)}
                    known[codes] = self._compute(name, function, given)
            return torch.tensor([known[c] for c in combinations], dtype=torch.long, device=columns[0].device)

        return run

    def _compute(self, name: str, function: Callable[..., Any], given: dict[str, Any]) -> int:
        try:
            value = function(*given.values())
        except Exception as e:
            raise PlotError(
                f"The function of '{name}' failed on {given}: {type(e).__name__}: {e}. Mend it, or the inputs."
            ) from e
        value = hashable_value(value, f"The function of '{name}' returned", f"on {given}")
        if name == self._output:
            self._check_answer(value, given)
        return self._books[name].code(value)

    def _check_answer(self, value: Any, given: Mapping[str, Any]) -> None:
        if self._prompts is not None and not isinstance(value, str):
            raise PlotError(
                f"The output '{self._output}' returned {value!r:.80} ({type(value).__name__}) on {given}; with a "
                f"template it must return the answer's text. Return str(...)."
            )
        if value not in self._answers:
            if not self._open:
                raise PlotError(
                    f"The output '{self._output}' returned {value!r:.80} on {given}, which is not among the answers "
                    f"{list_values(self.answers)}. Add it to `answers`, or mend the function."
                )
            if self._prompts is not None:
                prompts.refuse_spaces([value])

    # -- codes -------------------------------------------------------------------------------------------

    def rows(self, inputs: Sequence[Inputs], *, names: Sequence[str] | None = None) -> Rows:
        """Inputs as rows of codes; `names` says in errors where each comes from."""
        columns = self.causal.inputs
        rows = []
        for k, given in enumerate(inputs):
            where = names[k] if names is not None else f"Input {k}"
            if not isinstance(given, Mapping):
                raise PlotError(f"{where} must be a dict with {', '.join(columns)}; found {given!r:.80}.")
            missing, extra = [c for c in columns if c not in given], [c for c in given if c not in columns]
            if missing or extra:
                lacks = [f"lacks {', '.join(missing)}"] * bool(missing)
                lacks += [f"has the unknown {', '.join(map(str, extra))}"] * bool(extra)
                raise PlotError(
                    f"{where} {' and '.join(lacks)}: {dict(given)!r:.200}. Inputs are {', '.join(columns)}."
                )
            rows.append([self._books[c].code(plain_input(given[c], f"{where}, '{c}'")) for c in columns])
        self._seen |= dict.fromkeys(map(tuple, rows))
        return torch.tensor(rows, dtype=torch.long).reshape(len(rows), len(columns))

    def _seen_rows(self) -> Rows:
        """The inputs coded so far."""
        return torch.tensor(list(self._seen), dtype=torch.long).reshape(len(self._seen), len(self.causal.inputs))

    def dicts(self, rows: Rows) -> list[dict[str, Any]]:
        """The inputs that rows of codes stand for."""
        self.causal.check_pairs(rows, rows)
        columns = self.causal.inputs
        return [{c: self._value(c, code) for c, code in zip(columns, row, strict=True)} for row in rows.tolist()]

    def values(self, name: str) -> list[Any]:
        """The distinct values of a variable or input that were seen so far: entry k is what code k stands for."""
        return list(self._book(name).values)

    def code(self, name: str, value: Any) -> int:
        """The code of a value that was seen before."""
        book = self._book(name)
        if value not in book.values:
            raise PlotError(f"'{name}' had no value {value!r:.80} so far. Seen: {list_values(book.values)}.")
        return book.code(value)

    def encode_inputs(self, rows: Rows) -> Float[Tensor, "rows inputs"]:
        """The inputs as floats, for a network that takes numbers."""
        inputs = self.dicts(rows)
        for given in inputs:
            for name, value in given.items():
                if not isinstance(value, int | float):
                    raise PlotError(
                        f"Input '{name}' is {value!r:.80}, no number. Give the subject an `encode` of your own, made "
                        f"from {self.name}.dicts(rows)."
                    )
        floats = [[float(v) for v in given.values()] for given in inputs]
        return torch.tensor(floats).reshape(len(inputs), len(self.inputs))

    def _book(self, name: str) -> Codebook:
        known = [*self.causal.inputs, *self.causal.mechanisms]
        if name not in known:
            unknown("variable", name, known)
        return self._books[name]

    def _value(self, name: str, code: int) -> Any:
        values = self._books[name].values
        if not 0 <= code < len(values):
            raise PlotError(f"'{name}' has no value with code {code}; its codes are 0..{len(values) - 1} so far.")
        return values[int(code)]

    # -- prompts -----------------------------------------------------------------------------------------

    @property
    def has_prompts(self) -> bool:
        """Whether there is a template."""
        return self._prompts is not None

    @property
    def has_chats(self) -> bool:
        """Whether the template is a list of messages (one that is a function does not say)."""
        return self._prompts is not None and self._prompts.roles is not None

    def render(self, rows: Rows, tokenizer: Any = None) -> list[str]:
        """The prompt of every row; chats as the `tokenizer` writes them, or as a transcript without one."""
        maker = self._need_prompts()
        return [maker.prompt(given, tokenizer).text for given in self.dicts(rows)]

    def located(self, rows: Rows, tokenizer: Any = None) -> list[tuple[str, dict[str, Span]]]:
        """The prompt of every row, and the characters of each named position in it."""
        maker = self._need_prompts()
        return [maker.located(given, tokenizer) for given in self.dicts(rows)]

    def encoder(self, tokenizer: Any, bos: int | None) -> Encode:
        """A function that turns rows into tokens, after `bos` if the model wants one; a chat brings its own."""
        maker = self._need_prompts()

        def encode(rows: Rows) -> prompts.Encoded:
            made = [maker.prompt(given, tokenizer) for given in self.dicts(rows)]
            chats = {p.chat for p in made}
            if len(chats) > 1:
                raise PlotError("The template gives messages for some inputs and a text for others: give one of them.")
            return prompts.encode([p.text for p in made], tokenizer, bos=None if True in chats else bos)

        return encode

    def named_tokens(self, tokenizer: Any) -> NamedTokens:
        """The tokens of the named positions; how many a `TokenSpan` has is read off the inputs coded so far."""
        known = self._seen_rows() if self.positions else torch.zeros(0, 0, dtype=torch.long)
        return NamedTokens(tokenizer, self.positions, lambda rows: self.located(rows, tokenizer), known)

    def token_positions(self, tokenizer: Any) -> dict[str, Callable[[Tensor], Int[Tensor, " rows"]]]:
        """For every named position, a function of the rows: its token, counted from the end (-1 is the last).

        Counted so, a beginning-of-sequence token before the prompt moves nothing. Of a `TokenSpan` it is the first of
        the tokens that are swapped.
        """
        return self.named_tokens(tokenizer).functions()

    def _need_prompts(self) -> Prompts:
        if self._prompts is None:
            raise PlotError(f"{self.name} has no prompts: give it a template.")
        return self._prompts

    # -- answers -----------------------------------------------------------------------------------------

    @property
    def answers(self) -> tuple[Any, ...]:
        """The answers in the order of their codes: output code k is `answers[k]`."""
        return tuple(self._answers.values)

    def answer_tokens(self, tokenizer: Any) -> list[list[int]]:
        """The tokens that spell each answer; answers that single tokens cannot tell apart are refused, all by name.

        Where no `answers` were given, they are those of the inputs coded so far and of swaps between them; no new one
        is taken in until this is asked again, since what reads these tokens has one output for each.
        """
        self._settle_answers()
        groups = prompts.answer_tokens(tokenizer, self.answers, alike=True)
        self._open = False
        return groups

    def answer_sequences(self, tokenizer: Any, *, after: str = " ", end: str = "") -> list[list[int]]:
        """The tokens of whole answers, for a `SequenceSubject`: `after` the prompt comes the answer, then `end`.

        Where one answer begins another ("1" and "12"), an `end` such as a full stop tells them apart.
        """
        self._settle_answers()
        sequences = prompts.answer_sequences(tokenizer, self.answers, after=after, end=end)
        self._open = False
        return sequences

    def _settle_answers(self) -> None:
        self._need_prompts()
        if not self._given_answers:
            self._open = True
            self._explore()
        if not self.answers:
            raise PlotError("No answer is known yet: give `answers`, or call rows(inputs) on the hypothesis first.")

    def _explore(self, draws: int = 8) -> None:
        """Compute the answers that the inputs coded so far can lead to."""
        rows = self._seen_rows()
        self.causal.answer(rows)
        generator = torch.Generator().manual_seed(0)
        for variable in self.causal.variables * draws:
            # a pair that nobody asked for may be impossible; its answer is not needed then
            with contextlib.suppress(PlotError):
                self.causal.swap(rows, rows[torch.randperm(len(rows), generator=generator)], variable)

    def says(self, tokenizer: Any, tokens: Int[Tensor, " rows"], labels: Int[Tensor, " rows"]) -> Bool[Tensor, " rows"]:
        """Whether each token is the answer with that code, however it is written."""
        return prompts.says(tokenizer, tokens, self.answers, labels)

    def _collect_answers(self, answers: Sequence[Any] | None) -> None:
        given = list(answers or ())
        if answers is not None and not given:
            raise PlotError("`answers` is empty: give the answers, or leave it out to collect them.")
        if len(set(given)) < len(given):
            twice = [a for k, a in enumerate(given) if a in given[:k]]
            raise PlotError(f"Answers must differ; found {list_values(twice)} more than once.")
        if self._prompts is not None:
            wrong = [a for a in given if not isinstance(a, str)]
            if wrong:
                raise PlotError(
                    f"With a template answers are texts; found {list_values(wrong)}. Write them as strings."
                )
            prompts.refuse_spaces(given)
        for answer in given:
            self._answers.code(answer)

    def __repr__(self) -> str:
        lines = [f"Hypothesis '{self.name}' ({', '.join(self.inputs)} -> {self._output or 'no output yet'})"]
        return "\n".join([*lines, *(f"  {n} <- {', '.join(p)}" for n, (p, _) in self._mechanisms.items())])


# -- parts ------------------------------------------------------------------------------------------------------


def _parents(function: Callable[..., Any], name: str) -> tuple[str, ...]:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError) as e:
        raise PlotError(f"Cannot read the parameters of '{name}': give @h.variable(parents=[...]).") from e
    odd = [
        p.name for p in parameters if p.kind not in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) or p.default != p.empty
    ]
    if odd:
        raise PlotError(
            f"The parameters of '{name}' name its parents, but {', '.join(odd)} may be left out or stand for many. "
            f"Use plain parameters, or name the parents: @h.variable(parents=[...])."
        )
    return tuple(p.name for p in parameters)
