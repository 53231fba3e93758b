"""A featurizer for every layer and token of interest: transport says where training pays, calibration what is kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from plot_ot.abstract.banks import Bank
from plot_ot.abstract.causal_model import CausalModel, Mechanism
from plot_ot.edits import EditBatch, Frame
from plot_ot.errors import PlotError, unknown
from plot_ot.handles import Edit, Handle
from plot_ot.mib.data import Pair, fit_and_calibration
from plot_ot.mib.prompts import Prompts
from plot_ot.signatures import SignatureSpec, as_readout
from plot_ot.sites import whole_places
from plot_ot.stages.calibrate import pair_weights, scored_all, scored_frames
from plot_ot.stages.coupling import Localize
from plot_ot.stages.das import train_rotations
from plot_ot.stages.descent import DasSpec
from plot_ot.stages.problem import Problem, State
from plot_ot.subjects import DecoderSubject, Place, record
from plot_ot.transport import Transport

METHODS = ("plot-das", "das", "full-vector")
COARSE = Transport("uot-one-sided", epsilon=(1.0,), beta=(0.3,))
"""The paper's first stage on language models; with one variable it ranks places by their distance to the variable."""
RANK = Localize((whole_places,), COARSE, SignatureSpec(normalise="unit", centre=True))


@dataclass(frozen=True)
class Unit:
    """What is submitted for one layer and token."""

    handle: Handle
    calibration: float
    how: str
    """`full vector`, or `DAS` with its size."""

    @property
    def place(self) -> Place:
        """Where it is."""
        return self.handle.edits[0].place


def find_units(
    prompts: Prompts,
    pairs: Sequence[Pair],
    variable: str,
    *,
    method: str = "plot-das",
    places: int = 6,
    dimensions: int = 16,
    epochs: int = 40,
    new_tokens: int = 1,
    layers: Sequence[int] | None = None,
    memory: int = 4 << 30,
    seed: int = 0,
) -> tuple[DecoderSubject, list[Unit]]:
    """A unit for every layer and token, from training pairs that the model answers rightly.

    Two thirds of the base prompts fit, the others calibrate. `plot-das` trains rotations of `dimensions` directions at
    the `places` that transport ranks first, `das` everywhere, `full-vector` nowhere; elsewhere, and where a rotation
    does worse on calibration, the whole vector is swapped.
    """
    if method not in METHODS:
        unknown("method", method, METHODS)
    wanted, fit, calibration = learning_banks(prompts, pairs, variable, new_tokens, seed)
    subject = prompts.subject([[t] for t in wanted], layers, memory)
    for bank, what in ((fit, "learn from"), (calibration, "choose by")):
        if not bool(bank.changed[variable].any()):
            raise PlotError(
                f"The model answers {len(pairs)} training pairs, and none of the {len(bank)} kept to {what} changes "
                f"'{variable}'. Give more training pairs (--pairs), or a model that answers more of them."
            )
    fitted, calibrated = record(subject, fit, calibration)
    readout, open_to = as_readout("logits"), [p for p in subject.places if "@" in p.name]
    weights = pair_weights(calibrated, variable, "balanced")
    patches = [[EditBatch(p, Frame.identity(p.width), torch.ones(1, p.width))] for p in open_to]
    whole = scored_all(calibrated, patches, variable, weights, readout)
    units = {
        p: _unit(subject, variable, p, Frame.identity(p.width), float(s), "full vector")
        for p, s in zip(open_to, whole, strict=True)
    }
    if method == "plot-das":
        problem = Problem(subject, fitted, calibrated, (variable,), readout, seed)
        state = replace(State.start(problem), places={variable: tuple(open_to)})
        [candidate] = RANK(problem, state).candidates[variable]
        ranked = [candidate.family.sites[j].place for j in candidate.coupling.ranking(variable)][:places]
    else:
        ranked = open_to if method == "das" else []
    spec = training(epochs)
    for p in ranked:
        size, generator = size_of(p, dimensions), torch.Generator().manual_seed(seed)
        [rotation] = train_rotations(fitted, p, [variable], [size], readout, spec, generator)
        score = float(scored_frames(calibrated, [(p, rotation.frame)], [1.0], variable, weights, readout))
        if score > units[p].calibration:
            units[p] = _unit(subject, variable, p, rotation.frame, score, f"DAS {size}")
    return subject, list(units.values())


def training(epochs: int) -> DasSpec:
    """How rotations are trained."""
    return DasSpec(batch=64, most=epochs, patience=8, improvement=0.02)


def size_of(place: Place, dimensions: int) -> int:
    """The directions of a rotation: no more than half of what there is."""
    return min(dimensions, max(1, place.width // 2))


def learning_banks(
    prompts: Prompts, pairs: Sequence[Pair], variable: str, new_tokens: int, seed: int
) -> tuple[list[int], Bank, Bank]:
    """The tokens that are answers, and the banks to fit and to choose on."""
    wanted = sorted({t for p in pairs for t in _tokens(prompts, p, variable, new_tokens)})
    if not wanted:
        raise PlotError("These pairs have no answers that could be learned from.")
    fit, calibration = (
        _bank(name, prompts, some, variable, wanted, new_tokens)
        for name, some in zip(("fit", "calibration"), fit_and_calibration(pairs, seed), strict=True)
    )
    return wanted, fit, calibration


def _unit(subject: DecoderSubject, variable: str, place: Place, frame: Frame, score: float, how: str) -> Unit:
    edit = Edit(place, frame, torch.ones(frame.rank))
    return Unit(Handle(variable, (edit,), subject.identity(), {"calibration_score": score, "how": how}), score, how)


def _tokens(prompts: Prompts, pair: Pair, variable: str, new_tokens: int) -> list[int]:
    """The tokens that the model should write under the swap."""
    label = prompts.task.swapped(pair.base, pair.source, variable)
    return prompts.answer_tokens(pair.base, label)[:new_tokens] if label else []


def _bank(
    name: str, prompts: Prompts, pairs: Sequence[Pair], variable: str, wanted: Sequence[int], new_tokens: int
) -> Bank:
    """The pairs as a bank whose labels are tokens among those wanted, one entry for every token of an answer."""
    classes = {t: k for k, t in enumerate(wanted)}
    rows: list[Row] = []
    for p in pairs:
        tokens = _tokens(prompts, p, variable, new_tokens)
        own, theirs = (prompts.answer_tokens(e, prompts.task.expected(e.values, {})) for e in (p.base, p.source))
        changed = p.base.values[variable] != p.source.values[variable]
        for j, token in enumerate(tokens):
            said, other = (classes.get(t[j], len(classes)) if j < len(t) else len(classes) for t in (own, theirs))
            base, source = prompts.row(p.base, tokens[:j]), prompts.row(p.source)
            rows.append((base, source, classes[token], said, other, changed, p.family))
    if not rows:
        raise PlotError(f"The {name} pairs have no answers that could be learned from.")
    return bank_of_rows(name, variable, rows)


Row = tuple[int, int, int, int, int, bool, str]
"""Base and source, label, the base's and the source's answer, whether the variable changes, and the family."""


def bank_of_rows(name: str, variable: str, rows: Sequence[Row]) -> Bank:
    """A bank of some prompts by their rows."""
    bases, sources, labels, base_answer, source_answer, changed, families = zip(*rows, strict=True)
    names = sorted(set(families))
    named = Mechanism(("row",), lambda row: row), Mechanism((variable,), lambda value: value)
    table = CausalModel(["row"], {variable: named[0], "said": named[1]}, "said")
    return Bank(
        name,
        table,  # labels come from the task's own causal model; this one only names the variable
        torch.tensor(bases).unsqueeze(1),
        torch.tensor(sources).unsqueeze(1),
        (variable,),
        {variable: torch.tensor(changed)},
        {variable: torch.tensor(labels)},
        torch.tensor(base_answer),
        torch.tensor(source_answer),
        torch.tensor([names.index(f) for f in families]),
        tuple(names),
    )
