"""Handles before an outside judge: the metrics of `causal-abstraction-eval` (Méloux et al.), made without ours.

That package judges whether a high-level model E is a valid abstraction of a low-level system M through a map τ. Here E
is the hypothesis, M the network, and the cell of a variable is what its handle reads, Rᵀa: setting the cell to c is the
handle's own edit, a <- a + W (g * (c - Rᵀa)). τ calls a cell by the value whose natural mean is nearest, and grounds a
value in the cell of an input that has it. What no handle touches is Φ, claimed to be inert: noise along its leading
directions, in units of their natural spread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from plot_ot.abstract.causal_model import CausalModel
from plot_ot.errors import PlotError
from plot_ot.handles import Edit, Handle
from plot_ot.signatures import Readout, as_readout
from plot_ot.subjects import Place, Store, Subject

INPUT, ANSWER = "input", "answer"
NO_ANSWER = -1
REST = 4
"""Directions of every place that stand for all that no handle touches."""
BATCH = 8
METRICS = ("CAE_down_nf", "CAE_up_nf", "CAE_down", "CAE_up", "IIA")
"""Errors, 0 is best: values set from above and from below, both again with noise on the rest, and interchanges."""


def outside_errors(
    subject: Subject,
    causal: CausalModel,
    handles: Mapping[str, Handle],
    inputs: Int[Tensor, "rows inputs"],
    *,
    readout: str | Readout = "softmax",
    samples: int = 200,
    seed: int = 0,
    noise: float = 1.0,
) -> dict[str, dict[str, float]]:
    """For each variable, the errors (`METRICS`) that `causal-abstraction-eval` finds when its handle is intervened on.

    Inputs that the network does not answer as the hypothesis does are left out. `noise` is the size of what is added
    along the directions that no handle touches, in natural standard deviations.
    Needs the package: pip install 'plot-ot[judge]'.
    """
    package = _package()
    system = HandleSystem(subject, causal, dict(handles), inputs, as_readout(readout)).answered()
    return {v: _errors(package, system, v, samples, seed, noise) for v in handles}


def _package() -> Any:
    try:
        import causal_abstraction  # type: ignore[import-not-found,unused-ignore]
    except ImportError as e:
        raise PlotError(
            "The outside judge is the package causal-abstraction-eval (Python 3.11 or later), which is not installed: "
            "pip install 'plot-ot[judge]'."
        ) from e
    return causal_abstraction


# -- the system: nothing here needs the package ------------------------------------------------------------------------


@dataclass(frozen=True)
class HandleSystem:
    """A network as a system of cells: the inputs, what every handle reads, the answer, and the rest."""

    subject: Subject
    causal: CausalModel
    handles: Mapping[str, Handle]
    inputs: Int[Tensor, "rows inputs"]
    readout: Readout

    def __post_init__(self) -> None:
        for variable, handle in self.handles.items():
            self.causal.require(variable)
            for edit in handle.edits:
                self.subject.require(edit.place)

    def answered(self) -> HandleSystem:
        """The same with only the inputs that the network answers as the hypothesis does."""
        right = self.answers(self.subject.outputs_of(self.store)) == self.codes[self.causal.output]
        if not bool(right.any()):
            raise PlotError("The network answers none of the inputs as the hypothesis does: there is nothing to judge.")
        return replace(self, inputs=self.inputs[right])

    @cached_property
    def store(self) -> Store:
        """One pass over the inputs."""
        return self.subject.record(self.inputs)

    @cached_property
    def values(self) -> dict[str, Tensor]:
        """Every variable on every input."""
        return self.causal.run(self.inputs)

    def code(self, name: str, value: Tensor) -> int:
        """The number of a value, or of an answer; values are numbered as the inputs show them."""
        key = tuple(value.reshape(-1).tolist())
        return self._codes(name).get(key, NO_ANSWER)

    def _codes(self, name: str) -> dict[tuple[Any, ...], int]:
        rows = self.values[name].reshape(len(self.inputs), -1).tolist()
        return {key: k for k, key in enumerate(dict.fromkeys(map(tuple, rows)))}

    @cached_property
    def codes(self) -> dict[str, Int[Tensor, " rows"]]:
        """The numbers of all values of the handles' variables and of the answer, on every input."""
        names = [*self.handles, self.causal.output]
        return {n: torch.tensor([self.code(n, value) for value in self.values[n]]) for n in names}

    @cached_property
    def cells(self) -> dict[str, Float[Tensor, "rows r"]]:
        """What every handle reads on every input."""
        states = {p.name: self.store.activations[p.name] for p in self.places}
        return {v: self._read(h, states) for v, h in self.handles.items()}

    @cached_property
    def places(self) -> list[Place]:
        """The places that handles edit, in forward order."""
        edited = {e.place.name for h in self.handles.values() for e in h.edits}
        return [p for p in self.subject.places if p.name in edited]

    def expected(self, row: int, do: Mapping[str, int]) -> dict[str, int]:
        """The hypothesis' values for one input, with variables set to values by number."""
        base = self.inputs[row : row + 1]
        given = {v: self.values[v][int((self.codes[v] == code).nonzero()[0])].unsqueeze(0) for v, code in do.items()}
        found = self.causal.run(base, do=given)
        return {n: self.code(n, found[n][0]) for n in self.codes}

    @torch.no_grad()
    def run(
        self,
        rows: Int[Tensor, " batch"],
        cells: Mapping[str, Float[Tensor, "batch r"]],
        rest: Float[Tensor, "batch places directions"] | None = None,
    ) -> tuple[dict[str, Tensor], Int[Tensor, " batch"]]:
        """Set cells, and perhaps stir the rest, on some inputs: what all cells then are, and the answers by number."""
        seen: dict[str, Tensor] = {}

        def rewritten(place: Place, k: int) -> Callable[[Tensor], Tensor]:
            def rewrite(state: Tensor) -> Tensor:
                if rest is not None:
                    state = state + (rest[:, k] @ self.stirred[place.name].T).to(state)
                for v, cell in cells.items():
                    for edit, part in zip(self.handles[v].edits, self._parts(v, cell), strict=True):
                        if edit.place.name == place.name:
                            state = _set(edit, state, part.to(state))
                seen[place.name] = state.reshape(-1, state.shape[-1])
                return state

            return rewrite

        first, *others = self.places
        at = {p.name: rewritten(p, k) for k, p in enumerate(self.places)}
        state = at[first.name](self.store.activations[first.name][rows].unsqueeze(0))
        later = {p.name: at[p.name] for p in others}
        outputs = self.subject.resume(self.store, rows, first, state, later)
        found = {v: self._read(h, seen) for v, h in self.handles.items()}
        return found, self.answers(outputs[0])

    def answers(self, outputs: Tensor) -> Int[Tensor, " batch"]:
        """Which answer each output is, by number."""
        output, found = self.causal.output, torch.full((len(outputs),), NO_ANSWER)
        for code in range(len(self._codes(output))):
            label = self.values[output][int((self.codes[output] == code).nonzero()[0])]
            labels = label.unsqueeze(0).expand(len(outputs), *label.shape).to(outputs.device)
            found[self.readout.correct(outputs.unsqueeze(0), labels)[0].cpu()] = code
        return found

    @cached_property
    def stirred(self) -> dict[str, Float[Tensor, "d directions"]]:
        """Leading natural directions of every place besides those that handles write, as long as states vary along."""
        found = {}
        for place in self.places:
            states = self.store.activations[place.name].double().cpu()
            states = states - states.mean(dim=0)
            edits = [e for h in self.handles.values() for e in h.edits if e.place.name == place.name]
            span = torch.linalg.svd(torch.cat([e.matrix() for e in edits], dim=1), full_matrices=False)
            basis = span.U[:, 1e-6 * span.S[0] < span.S]
            left = states - states @ basis @ basis.T
            _, spread, directions = torch.linalg.svd(left, full_matrices=False)
            found[place.name] = (directions.T * spread / len(states) ** 0.5)[:, :REST]
        return found

    def _read(self, handle: Handle, states: Mapping[str, Tensor]) -> Tensor:
        read = [e.frame.coordinates(states[e.place.name])[:, e.gains != 0] for e in handle.edits]
        return torch.cat(read, dim=1)

    def _parts(self, variable: str, cell: Tensor) -> Sequence[Tensor]:
        parts: tuple[Tensor, ...] = cell.split([e.size for e in self.handles[variable].edits], dim=1)
        return parts


def _set(edit: Edit, state: Tensor, cell: Tensor) -> Tensor:
    """a + W (g * (c - Rᵀa))."""
    frame, used = edit.frame.to(state.device, state.dtype), edit.gains != 0
    difference = torch.zeros(*state.shape[:-1], frame.rank, dtype=state.dtype, device=state.device)
    difference[..., used] = edit.gains[used].to(state) * (cell - frame.coordinates(state)[..., used])
    return state + frame.lift(difference)


# -- the package's side ------------------------------------------------------------------------------------------------


def _errors(
    package: Any, system: HandleSystem, variable: str, samples: int, seed: int, noise: float
) -> dict[str, float]:
    engine = _engine(package, system, seed, noise)
    tasks = []
    for direction, sampler in (("down", package.TopDownSampler), ("up", package.BottomUpSampler)):
        for faithful in (False, True):
            tasks.append(
                package.StandardTasks.score(
                    engine.builder,
                    name=f"CAE_{direction}{'' if faithful else '_nf'}",
                    include_faithfulness=faithful,
                    sampler=sampler(engine.value_map),
                    score_vars=[ANSWER],
                )
            )
    scores = engine.run_tasks(tasks, n_samples=samples, batch_size=BATCH, intervention_domain=[variable]).summary()
    alone = _engine(package, replace(system, handles={variable: system.handles[variable]}), seed, noise)
    interchange = package.IIAMetric(output_vars=[ANSWER], n_pairs=samples, normalize=False)
    parts = alone.high_level_model, alone.low_level_model, alone.value_map, alone.cg_map
    # its mean is over the variable and the whole input, whose swap is right wherever the network is
    scores["IIA"] = 2 * interchange.compute(*parts, None, samples, alone.config)
    return {name: float(scores[name]) for name in METRICS}


def _engine(package: Any, system: HandleSystem, seed: int, noise: float) -> Any:
    import numpy as np

    class Points(package.Subspace):  # type: ignore[misc]
        """Natural cells of one value."""

        def __init__(self, points: Tensor) -> None:
            super().__init__(points.shape[1])
            self.points = points.double().cpu().numpy()

        def sample(self, shape: tuple[int, ...], rng: Any = None) -> Any:
            return self.points[self._get_rng(rng).integers(len(self.points), size=shape[0])]

        def contains(self, x: Any) -> Any:
            return np.isclose(self.points[None], np.atleast_2d(x)[:, None]).all(-1).any(-1)

    means = {
        v: [cell[system.codes[v] == k].double().cpu().mean(dim=0).numpy() for k in range(_count(system, v))]
        for v, cell in system.cells.items()
    }

    class Names(package.ValueMap):  # type: ignore[misc]
        """τ: the value whose natural mean is nearest; inputs and answers are numbers already."""

        def abstract(self, name: str, micro: Any) -> int:
            if name in means:
                return int(np.argmin([np.linalg.norm(np.ravel(micro) - mean) for mean in means[name]]))
            return int(np.ravel(micro)[0])

    class Network(package.LowLevelModel):  # type: ignore[misc]
        """M: sets what it is told to set."""

        def forward_with_interventions(self, input_state: Any, interventions: Mapping[str, Any]) -> Any:
            told = {name: _value(v) for name, v in interventions.items()}
            rows = torch.from_numpy(told[INPUT].reshape(-1).astype("int64"))
            cells = {v: torch.from_numpy(told[v]).reshape(len(rows), -1) for v in system.handles if v in told}
            rest = None
            if any(name.startswith("rest") for name in told):
                parts = [told[name].reshape(-1) for name in _rest(system)]
                rest = torch.from_numpy(np.stack(parts, axis=1)).reshape(len(rows), len(system.places), -1)
            found, answers = system.run(rows, cells, rest)
            values = {v: cell.double().cpu().numpy() for v, cell in found.items()}
            values |= {INPUT: told[INPUT].reshape(-1, 1), ANSWER: answers.double().numpy()[:, None]}
            return package.SystemState(values=values)

    widths = {INPUT: 1, **{v: cell.shape[1] for v, cell in system.cells.items()}, ANSWER: 1}
    widths |= dict.fromkeys(_rest(system), 1)
    schema = package.MicroVariableSchema([package.Variable(n, shape=(w,)) for n, w in widths.items()])
    cells = package.CoarseGrainingMap(schema, {n: [n] for n in (INPUT, *system.handles, ANSWER)})
    specs = {
        v: {k: Points(cell[system.codes[v] == k]) for k in range(_count(system, v))} for v, cell in system.cells.items()
    }
    numbers = torch.arange(len(system.inputs), dtype=torch.float64)[:, None]
    specs[INPUT] = {k: Points(numbers[k : k + 1]) for k in range(len(system.inputs))}
    graph = _graph(package, system)
    config = package.EvaluationConfig(
        metric="hard", phi_noise_std=noise, phi_selection_prob=0.5, seed=seed, logging_level=40
    )
    return package.EvaluationEngine(graph, Network(), Names(cells, specs), cells, config)


def _graph(package: Any, system: HandleSystem) -> Any:
    """E: the hypothesis, seen through the variables that have handles."""
    graph, causal = package.CausalGraph(), system.causal
    rows = len(system.inputs)
    graph.add_variable(INPUT, lambda: 0, [], distribution=dict.fromkeys(range(rows), 1 / rows))

    def node(name: str, above: Sequence[str]) -> Callable[..., int]:
        def equation(**given: Any) -> int:
            do = {v: int(given[v]) for v in above}
            return system.expected(int(given[INPUT]), do)[causal.output if name == ANSWER else name]

        return equation

    for v in (v for v in causal.mechanisms if v in system.handles):
        above = [u for u in system.handles if v in causal.descendants(u)]
        shares = torch.bincount(system.codes[v]).double() / rows
        graph.add_variable(v, node(v, above), [INPUT, *above], distribution=dict(enumerate(shares.tolist())))
    graph.add_variable(ANSWER, node(ANSWER, list(system.handles)), [INPUT, *system.handles])
    return graph


def _count(system: HandleSystem, variable: str) -> int:
    return int(system.codes[variable].max()) + 1


def _rest(system: HandleSystem) -> list[str]:
    return [f"rest {k} of {p.name}" for p in system.places for k in range(REST)]


def _value(given: Any) -> Any:
    """What a cell is set to: an array, or a list of one write of the whole cell."""
    if isinstance(given, list):
        [(_, value)] = given
        return value
    return given
