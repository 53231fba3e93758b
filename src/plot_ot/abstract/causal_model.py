"""The abstract side: a causal model with named variables, run and intervened on in batches."""

from __future__ import annotations

import copy
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from plot_ot.abstract.graph import draw_graph
from plot_ot.errors import PlotError, unknown

Values = dict[str, Tensor]
Accepts = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Mechanism:
    """`value = function(*parents)`, batched: every argument and the value have `pairs` rows."""

    parents: tuple[str, ...]
    function: Callable[..., Tensor]

    @classmethod
    def of(cls, function: Callable[..., Tensor]) -> Mechanism:
        """The parents are the function's parameter names: `lambda W, X: W == X`."""
        try:
            return cls(tuple(inspect.signature(function).parameters), function)
        except (TypeError, ValueError) as e:
            raise PlotError(f"Cannot read the parents of {function!r}: pass Mechanism(parents, function).") from e


class CausalModel:
    """An abstract model 𝔠: X -> Y with named variables Z_1..Z_m.

    `inputs` names the columns of the input rows. `mechanisms` maps every other variable to its mechanism
    (a function whose parameter names are its parents, or a `Mechanism`). `output` names the variable that is
    the answer; `variables` the ones worth localizing (default: all between inputs and output). `meanings` says what
    variables stand for, in words that a reader of the results will see.

        >>> import torch
        >>> heq = CausalModel(
        ...     inputs=["W", "X", "Y", "Z"],
        ...     mechanisms={
        ...         "z_WX": lambda W, X: W == X,
        ...         "z_YZ": lambda Y, Z: Y == Z,
        ...         "y": lambda z_WX, z_YZ: z_WX == z_YZ,
        ...     },
        ...     output="y",
        ... )
        >>> heq.answer(torch.tensor([[1, 1, 2, 2], [1, 1, 1, 2]])).tolist()
        [True, False]
    """

    def __init__(
        self,
        inputs: Sequence[str],
        mechanisms: Mapping[str, Mechanism | Callable[..., Tensor]],
        output: str,
        variables: Sequence[str] | None = None,
        meanings: Mapping[str, str] | None = None,
    ) -> None:
        self.inputs = tuple(inputs)
        declared = {n: m if isinstance(m, Mechanism) else Mechanism.of(m) for n, m in mechanisms.items()}
        _refuse_clashes(self.inputs, declared)
        self.mechanisms = _in_causal_order(self.inputs, declared)
        if output not in self.mechanisms:
            unknown("output variable", output, self.mechanisms)
        self.output = output
        chosen = [n for n in self.mechanisms if n != output] if variables is None else list(variables)
        for name in chosen:
            self.require(name)
        if len(set(chosen)) < len(chosen):
            raise PlotError(f"Variable names must differ; found {', '.join(chosen)}.")
        self.variables = tuple(chosen)
        self.meanings = dict(meanings or {})
        for name in self.meanings:
            self.require(name)
        self.accepts: Accepts = same
        """Whether what is right for the second of two answers may also be right for the first; by default, equality."""

    def accepting(self, accepts: Accepts | None) -> CausalModel:
        """The same model, whose answers are told apart as a readout does (`Readout.accepts`); None changes nothing."""
        if accepts is None:
            return self
        model = copy.copy(self)
        model.accepts = accepts
        return model

    # -- running -----------------------------------------------------------------------------------------

    def run(self, inputs: Int[Tensor, "rows inputs"], do: Mapping[str, Tensor] | None = None) -> Values:
        """Values of every variable for each input row, under the interventions `do`."""
        self._check_rows(inputs)
        do = dict(do or {})
        for name, value in do.items():
            if name not in self.inputs:
                self.require(name)
            rows = len(value) if isinstance(value, Tensor) and value.ndim else "no"
            if rows != len(inputs):
                raise PlotError(f"do({name}) has {rows} rows, the inputs have {len(inputs)}: give one value per row.")
        values: Values = {}
        for column, name in enumerate(self.inputs):
            values[name] = do.get(name, inputs[:, column])
        for name, mechanism in self.mechanisms.items():
            values[name] = do[name] if name in do else self._compute(name, mechanism, values, len(inputs))
        return values

    def answer(self, inputs: Int[Tensor, "rows inputs"]) -> Tensor:
        """𝔠(x): the output of each input row."""
        return self.run(inputs)[self.output]

    def swap(self, base: Int[Tensor, "rows inputs"], source: Int[Tensor, "rows inputs"], variable: str) -> Tensor:
        """The abstract swap 𝔠(x^b; do(Z_i <- Z_i(x^s))): base outputs with one variable taken from the source."""
        self.require(variable)
        self.check_pairs(base, source)
        return self.run(base, do={variable: self.run(source)[variable]})[self.output]

    def _compute(self, name: str, mechanism: Mechanism, values: Values, rows: int) -> Tensor:
        try:
            value = mechanism.function(*(values[p] for p in mechanism.parents))
        except (PlotError, MemoryError, torch.OutOfMemoryError):
            raise  # what does not fit is tried again in halves
        except Exception as e:  # a user's function, and whatever it raises
            reason = str(e).splitlines()[0] if str(e) else "no reason given"
            raise PlotError(
                f"The mechanism of '{name}' failed ({type(e).__name__}: {reason}). It is called once for all rows, "
                f"with a tensor per parent: write torch.where(a > b, a, b) for `a if a > b else b`, `&` and `|` for "
                f"`and` and `or`. (A Hypothesis takes functions of single values.)"
            ) from e
        if not isinstance(value, Tensor):
            raise PlotError(
                f"The mechanism of '{name}' returned {type(value).__name__}; it must return a batched tensor."
            )
        if value.ndim == 0 or len(value) != rows:
            raise PlotError(
                f"The mechanism of '{name}' returned shape {tuple(value.shape)} for {rows} rows: "
                f"its first dimension must be the rows (mechanisms are batched)."
            )
        return value

    # -- checks ------------------------------------------------------------------------------------------

    def require(self, name: str) -> None:
        """Refuse a name that is not a variable with a mechanism."""
        if name not in self.mechanisms:
            unknown("variable", name, self.mechanisms)

    def check_pairs(self, base: Any, source: Any) -> None:
        """Refuse base and source inputs that are not rows of this model or do not pair up."""
        self._check_rows(base)
        self._check_rows(source)
        if base.shape != source.shape:
            raise PlotError(
                f"Base and source inputs must pair up row by row: base has shape {tuple(base.shape)}, "
                f"source {tuple(source.shape)}."
            )

    def _check_rows(self, inputs: Any) -> None:
        if not isinstance(inputs, Tensor) or inputs.ndim != 2 or inputs.shape[1] != len(self.inputs):
            found = tuple(inputs.shape) if isinstance(inputs, Tensor) else type(inputs).__name__
            raise PlotError(
                f"Inputs must be a tensor of shape [rows, {len(self.inputs)}] with columns {', '.join(self.inputs)}; "
                f"found {found}."
            )

    # -- looking -----------------------------------------------------------------------------------------

    def parents(self, name: str) -> tuple[str, ...]:
        """The parents of a variable (none for an input)."""
        if name in self.inputs:
            return ()
        self.require(name)
        return self.mechanisms[name].parents

    def depth(self) -> dict[str, int]:
        """How many mechanisms lie between the inputs and each variable, at most."""
        depth = dict.fromkeys(self.inputs, 0)
        for name, mechanism in self.mechanisms.items():
            depth[name] = 1 + max((depth[p] for p in mechanism.parents), default=0)
        return depth

    def descendants(self, name: str) -> set[str]:
        """Every variable that depends on this one, itself not included."""
        below = {name}
        for other, mechanism in self.mechanisms.items():  # in causal order
            if below & set(mechanism.parents):
                below.add(other)
        return below - {name}

    def ancestors(self, name: str) -> tuple[str, ...]:
        """Every input and variable that this one depends on, itself not included."""
        return tuple(n for n in (*self.inputs, *self.mechanisms) if name in self.descendants(n))

    def frontier(self, name: str) -> tuple[str, ...]:
        """What else must be known where this variable is, so that the rest can be computed.

        The variables that do not depend on it and are read by the output or by something that does depend on it: with
        the inputs still to come, they and the variable determine everything after.
        """
        self.require(name)
        after = self.descendants(name) | {self.output}
        read = {p for a in after for p in self.parents(a)}
        return tuple(n for n in self.mechanisms if n in read and n not in after and n != name)

    def draw(self, path: str | os.PathLike[str]) -> None:
        """Draw the causal graph into a PNG, PDF or SVG file, by suffix.

        Inputs are green, the variables worth localizing orange, other variables a lighter orange, the output red.
        """
        draw_graph(self, path)

    # -- words -------------------------------------------------------------------------------------------

    def describe(self, inputs: Int[Tensor, "rows inputs"]) -> list[str]:
        """Input rows in words: `W = 3, X = 3, Y = 1, Z = 2`."""
        return [
            ", ".join(f"{name} = {self.spell(name, code)}" for name, code in zip(self.inputs, row, strict=True))
            for row in inputs.tolist()
        ]

    def spell(self, name: str, value: Any) -> str:
        """One value of an input or of the output in words: truth values are yes and no, vectors are digits."""
        if isinstance(value, list):
            return "".join(str(int(v)) for v in value)
        return ("no", "yes")[value] if isinstance(value, bool) else str(value)

    def __repr__(self) -> str:
        lines = [f"CausalModel({', '.join(self.inputs)} -> {self.output})"]
        lines += [f"  {n} <- {', '.join(m.parents)}" for n, m in self.mechanisms.items()]
        return "\n".join(lines)


def _refuse_clashes(inputs: tuple[str, ...], mechanisms: Mapping[str, Mechanism]) -> None:
    if not inputs:
        raise PlotError("A causal model needs at least one input.")
    if len(set(inputs)) < len(inputs):
        raise PlotError(f"Input names must differ; found {', '.join(inputs)}.")
    both = set(inputs) & set(mechanisms)
    if both:
        raise PlotError(f"{', '.join(sorted(both))}: an input cannot also have a mechanism. Rename one of them.")
    for name, mechanism in mechanisms.items():
        for parent in mechanism.parents:
            if parent not in inputs and parent not in mechanisms:
                unknown(f"parent of '{name}'", parent, [*inputs, *mechanisms])


def _in_causal_order(inputs: tuple[str, ...], mechanisms: dict[str, Mechanism]) -> dict[str, Mechanism]:
    ordered: dict[str, Mechanism] = {}
    waiting = dict(mechanisms)
    while waiting:
        ready = [n for n, m in waiting.items() if all(p in inputs or p in ordered for p in m.parents)]
        if not ready:
            raise PlotError(f"The variables {', '.join(waiting)} form a cycle: a causal model must be acyclic.")
        for name in ready:
            ordered[name] = waiting.pop(name)
    return ordered


def same(a: Tensor, b: Tensor) -> Tensor:
    """Row-wise equality of two batched values of any trailing shape: [rows] booleans."""
    equal = torch.eq(a, b)
    return equal if equal.ndim == 1 else equal.flatten(1).all(dim=1)
