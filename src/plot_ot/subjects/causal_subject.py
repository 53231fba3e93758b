"""A causal model as a subject: its variables are the places, and swapping a place is do() of that variable.

Exact ground truth for tests, and the setting of aligning two causal models with each other.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from plot_ot.abstract.banks import distinct_rows
from plot_ot.abstract.causal_model import CausalModel
from plot_ot.errors import PlotError
from plot_ot.subjects.open_edits import OpenEdit, Rewrites, opened
from plot_ot.subjects.places import Place
from plot_ot.subjects.protocol import Rewrite, Store, Subject

MOST_VALUES = 256
"""A variable with more values than this is not encoded."""


class CausalSubject(Subject):
    """A `CausalModel` that can be recorded and edited like a network.

    Every place is a variable, as the one-hot code of its value among the values that it takes on `inputs` (sorted); an
    edited code stands for the value of its largest entry. `variables` are the places, inputs among them if you like
    (by default every variable with a mechanism but the output). Outputs are logits: `sharpness` for the answer's class
    and 0 for the others, or, of an output with several truth values, ± `sharpness` for each. `classes` is for answers
    that only interventions reach.
    """

    cache = 2 << 20  # columns of a batch go through many small steps

    differentiable = False

    def __init__(
        self,
        causal: CausalModel,
        inputs: Int[Tensor, "rows inputs"],
        variables: Sequence[str] | None = None,
        *,
        classes: int | None = None,
        sharpness: float = 10.0,
    ) -> None:
        self.causal = causal
        self.sharpness = sharpness
        chosen = [v for v in causal.mechanisms if v != causal.output] if variables is None else list(variables)
        for name in chosen:
            if name not in causal.inputs:
                causal.require(name)
        if not chosen or len(set(chosen)) < len(chosen):
            raise PlotError(f"A causal subject needs places, each once; found {', '.join(chosen) or 'none'}.")
        self._table = causal.run(distinct_rows(inputs))
        self._codes = {v: _values_of(v, self._table[v]) for v in chosen}
        depth = causal.depth()
        order = [v for v in (*causal.inputs, *causal.mechanisms) if v in chosen]
        self.places = tuple(Place(v, len(self._codes[v]), depth[v]) for v in order)
        self.classes = _classes(causal.output, self._table[causal.output], classes)
        self._live: dict[OpenEdit, Rewrites] = {}

    def __call__(self, inputs: Int[Tensor, "rows inputs"]) -> Float[Tensor, "rows classes"]:
        """The model's answers as logits, under whatever handles are open on it."""
        rewrites: dict[str, list[Callable[[Tensor], Tensor]]] = {}
        for edit, given in self._live.items():
            for name, rewrite in given.items() if edit.acts() else ():
                rewrites.setdefault(name, []).append(rewrite)
        return self._logits(self._run(inputs, {}, rewrites))

    # -- Subject -----------------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        return next(iter(self._table.values())).device

    def weights(self) -> Mapping[str, Tensor]:
        """What every variable is on the enumerated inputs."""
        return self._table

    def structure(self) -> str:
        return repr(self.causal)

    def reinitialised(self, generator: torch.Generator) -> Subject:
        raise PlotError("A causal model has no weights to draw anew. Use controls='standard'.")

    def record(self, inputs: Tensor, bases: Tensor | None = None) -> Store:
        return self.record_in_chunks(inputs, self._recorded)

    def resume(
        self, store: Store, rows: Tensor, start: Place, activation: Tensor, later: Mapping[str, Rewrite]
    ) -> Tensor:
        if activation.requires_grad:
            raise PlotError("A causal model has no gradients: use a method that does not train, such as plot-layered.")
        shape = activation.shape[:2]

        def each(rewrite: Rewrite) -> Callable[[Tensor], Tensor]:
            return lambda code: rewrite(code.unflatten(0, shape)).flatten(0, 1)

        inputs = store.inputs[rows].repeat(shape[0], 1)
        do = {start.name: self._decode(start.name, activation.flatten(0, 1))}
        values = self._run(inputs, do, {name: [each(rewrite)] for name, rewrite in later.items()})
        outputs: Tensor = self._logits(values).unflatten(0, shape)
        return outputs

    @contextlib.contextmanager
    def intervene(self, rewrites: Rewrites) -> Iterator[OpenEdit]:
        for name in rewrites:
            self.place(name)
        with opened(self) as edit:
            self._live[edit] = rewrites
            try:
                yield edit
            finally:
                del self._live[edit]

    # -- parts -------------------------------------------------------------------------------------------

    def _recorded(self, inputs: Tensor) -> Store:
        values = self.causal.run(inputs)
        codes = {p.name: self._encode(p.name, values[p.name]) for p in self.places}
        return Store(inputs, codes, self._logits(values))

    def _run(
        self, inputs: Tensor, do: dict[str, Tensor], rewrites: Mapping[str, Sequence[Callable[[Tensor], Tensor]]]
    ) -> dict[str, Tensor]:
        """Every variable, where places are rewritten one after the other, as the model meets them."""
        for place in self.places:
            for rewrite in rewrites.get(place.name, ()):
                current = self.causal.run(inputs, do=do)[place.name]
                do = {**do, place.name: self._decode(place.name, rewrite(self._encode(place.name, current)))}
        return self.causal.run(inputs, do=do)

    def _encode(self, name: str, values: Tensor) -> Float[Tensor, "rows d"]:
        known = self._codes[name]
        equal = values.unsqueeze(1) == known.unsqueeze(0)
        equal = equal if equal.ndim == 2 else equal.flatten(2).all(dim=2)
        if not bool(equal.any(dim=1).all()):
            strange = values[~equal.any(dim=1)][0].tolist()
            raise PlotError(
                f"Variable '{name}' takes the value {strange}, which it takes on none of the inputs that the subject "
                f"was made with: give inputs that show every value."
            )
        return equal.float()

    def _decode(self, name: str, code: Float[Tensor, "rows d"]) -> Tensor:
        return self._codes[name][code.argmax(dim=1)]

    def _logits(self, values: Mapping[str, Tensor]) -> Float[Tensor, "rows classes"]:
        answer = values[self.causal.output]
        if self.classes is None:
            return self.sharpness * (2 * answer.flatten(1).float() - 1)
        if bool((answer.long() >= self.classes).any()):
            raise PlotError(
                f"The output '{self.causal.output}' becomes {int(answer.max())} under interventions, beyond the "
                f"{self.classes} classes that the inputs show: give `classes`."
            )
        return self.sharpness * F.one_hot(answer.long(), self.classes).float()


def _values_of(name: str, column: Tensor) -> Tensor:
    """The distinct values of a variable, sorted."""
    if column.is_floating_point() and not bool(torch.isfinite(column).all()):
        raise PlotError(f"Variable '{name}' takes values that are not finite numbers (NaN or infinity).")
    values: Tensor = torch.unique(column, dim=0)
    if len(values) > MOST_VALUES:
        raise PlotError(
            f"Variable '{name}' takes {len(values)} values on these inputs; up to {MOST_VALUES} can be listed one by "
            f"one. Leave it out of `variables`, or give a model in which it takes fewer."
        )
    return values


def _classes(name: str, column: Tensor, wanted: int | None) -> int | None:
    """How many classes the output has; None for several truth values."""
    if column.ndim > 1:
        if bool(((column != 0) & (column != 1)).any()):
            raise PlotError(f"The output '{name}' has several entries per row, so each must be a truth value.")
        return None
    if column.is_floating_point() or int(column.min()) < 0 or int(column.max()) >= MOST_VALUES:
        raise PlotError(
            f"The output '{name}' must be a truth value or a class 0..{MOST_VALUES - 1}; found {column.dtype} from "
            f"{column.min().item()} to {column.max().item()}. Map its values to classes."
        )
    return max(2, int(column.max()) + 1, wanted or 0)
