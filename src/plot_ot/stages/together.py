"""Variables that several tokens hold together: their states in one block swapped at once, whole or in closed form.

A choice between options is often kept option by option: at the end of every option's line there is a mark that says
whether this is the one. No single token then holds the variable, and swapping one of them leaves two marks, or none.
Tokens whose names differ only in a number (end1, end2, end3) are such a family, and each family is swapped together.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from plot_ot.edits import EditBatch, Frame
from plot_ot.errors import PlotError
from plot_ot.handles import Handle, handle_from_edits
from plot_ot.stages.calibrate import pair_weights, scored_all
from plot_ot.stages.closed_form import RULES, SCOUT, ClosedForm, Form, cell_variables
from plot_ot.stages.forecast import Forecast
from plot_ot.stages.problem import Problem, State
from plot_ot.subjects import Place

Group = tuple[Place, ...]
"""Places of one block at several tokens, in forward order."""
SALT = 6_700_417


@dataclass(frozen=True)
class Together:
    """Handles over families of tokens; what was found before stays where it does as well on calibration.

    In every block each family of tokens is taken whole from the source. In the `keep` best blocks the best family is
    also joined by each of the others. At the group that does best, closed forms of the same kind at each of its places
    are tried as one handle. Calibration picks; between equal scores it is the handle of fewest directions, and one at a
    single place that was found before. Output variables that have a handle are passed over: no verdict asks more of
    them than where they are set.
    """

    learner: ClassVar[bool] = True
    keep: int = 3
    closed: ClosedForm = field(default_factory=lambda: SCOUT)
    only: Mapping[str, tuple[str, ...]] | None = None
    """The names of the places to look at, by variable; all groups otherwise."""

    def __call__(self, problem: Problem, state: State) -> State:
        handles = dict(state.handles)
        for v in problem.variables:
            groups = self._groups(problem.subject.places, v)
            if v in handles and (not groups or problem.fit.bank.power(v).is_output):
                continue
            if not groups:
                raise PlotError(
                    f"No tokens of this network can be taken together for '{v}': name the positions of a family alike "
                    f"but for a number, as in positions={{'end1': ..., 'end2': ...}}."
                )
            found = self._found(problem, v, groups)
            if v not in handles or _score(found) > _score(handles[v]) + 1e-9:  # one place says more than several
                handles[v] = found
        return replace(state, handles=handles)

    def _groups(self, places: Sequence[Place], variable: str) -> list[list[Group]]:
        """By block the families of tokens, or the one group that was asked for."""
        if self.only is None:
            return families(places)
        one = tuple(p for p in places if p.name in self.only.get(variable, ()))
        return [[one]] if len(one) > 1 else []

    def _found(self, problem: Problem, variable: str, groups: Sequence[Sequence[Group]]) -> Handle:
        """The best handle over a group of places."""
        reached = self._patched(problem, variable, list(chain.from_iterable(groups)))
        best = sorted((max(some, key=reached.__getitem__) for some in groups), key=lambda g: -reached[g])[: self.keep]
        wider = [(*g, *other) for g in best for some in groups if g in some for other in some if other != g]
        reached |= self._patched(problem, variable, wider)
        group = max(reached, key=lambda g: (round(reached[g], 9), -len(g)))
        tries = [Try("whole", 1.0, reached[group], _whole(group)), *self._closed(problem, variable, group)]
        chosen = max(tries, key=lambda t: (round(t.score, 9), -t.size, -t.strength))
        how = {
            "support": _named(group),
            "form": chosen.form,
            "strength": chosen.strength,
            "calibration_score": chosen.score,
            "by_group": {_named(g): score for g, score in reached.items()},
        }
        return handle_from_edits(variable, chosen.edits, 0, problem.subject, how)

    def _patched(self, problem: Problem, variable: str, groups: Sequence[Group]) -> dict[Group, float]:
        """What each group does when it is taken whole."""
        scores = _scored(problem, variable, [_whole(g) for g in groups])
        return {g: float(score) for g, [score] in zip(groups, scores, strict=True)}

    def _closed(self, problem: Problem, variable: str, group: Group) -> list[Try]:
        """Closed forms of one kind, setting and rule at every place of a group, with every strength."""
        same: dict[tuple[str, float, str], list[Form]] = {}
        with problem.clock.part("closed_form"):
            for place in group:
                for form in self.closed.candidates(problem.fit, place, variable):
                    same.setdefault((form.kind, form.setting, form.rule), []).append(form)
        everywhere = [forms for forms in same.values() if len(forms) == len(group)]
        batches = [[f.edits(self.closed.strengths)[0] for f in forms] for forms in everywhere]
        scores = _scored(problem, variable, batches)
        return [
            Try(forms[0].name, strength, float(found[k]), [e.select(torch.tensor([k])) for e in batch])
            for forms, batch, found in zip(everywhere, batches, scores, strict=True)
            for k, strength in enumerate(self.closed.strengths)
        ]

    def retraced(self, handles: Sequence[Handle]) -> Together:
        """The same at the places where these handles are."""
        return replace(self, only={h.variable: tuple(h.places) for h in handles})

    def forecast(self, ahead: Forecast) -> None:
        """Each group is resumed where its first token's state is; closed forms at one group."""
        by_block = families(ahead.scene.shape.places)
        groups = list(chain.from_iterable(by_block))
        bank = ahead.scene.calibration
        for v in ahead.open:
            if ahead.scene.fit.bank.power(v).is_output:
                continue
            rules = len({cell_variables(ahead.scene.fit, v, rule) for rule in RULES})
            forms = len(self.closed.sizes) + 2 * rules * len(self.closed.ridges)
            for some in by_block:
                joined = min(1.0, self.keep / len(by_block)) * (len(some) - 1) / len(some)
                for g in some:
                    ahead.add("calibration", g[0], bank, 1, 1.0 + joined)
                    ahead.add("calibration", g[0], bank, forms * len(self.closed.strengths), 1 / len(groups))


@dataclass(frozen=True)
class TogetherAtRandom:
    """The control of handles over several tokens: random neurons of as many random tokens in a random block.

    An eighth of the neurons is drawn at each token; calibration picks the strength. `draw` numbers independent ones.
    """

    draw: int
    strengths: tuple[float, ...] = (1.0, 2.0, 4.0, 8.0)

    def __call__(self, problem: Problem, state: State) -> State:
        generator = problem.generator(SALT + self.draw)
        by_block = families(problem.subject.places)
        handles = dict(state.handles)
        for v in problem.variables:
            alike = by_block[_below(len(by_block), generator)]
            tokens = sorted({p for g in alike for p in g}, key=problem.subject.places.index)
            size = len(alike[_below(len(alike), generator)])
            drawn = sorted(torch.randperm(len(tokens), generator=generator)[:size].tolist())
            group = tuple(tokens[k] for k in drawn)
            edits = [EditBatch(p, Frame.identity(p.width), self._some_neurons(p.width, generator)) for p in group]
            [scores] = _scored(problem, v, [edits])
            best = int(scores.argmax())
            how = {
                "support": _named(group),
                "form": "random neurons",
                "strength": self.strengths[best],
                "calibration_score": float(scores[best]),
            }
            chosen = [e.select(torch.tensor([best])) for e in edits]
            handles[v] = handle_from_edits(v, chosen, 0, problem.subject, how)
        return replace(state, handles=handles)

    def _some_neurons(self, width: int, generator: torch.Generator) -> Float[Tensor, "strengths width"]:
        """An eighth of the neurons, with every strength."""
        neurons = torch.zeros(width)
        neurons[torch.randperm(width, generator=generator)[: max(1, width // 8)]] = 1.0
        return torch.tensor(self.strengths)[:, None] * neurons

    def forecast(self, ahead: Forecast) -> None:
        """One group of a random block, with every strength."""
        groups = list(chain.from_iterable(families(ahead.scene.shape.places)))
        for g in groups:
            for _ in ahead.open:
                ahead.add("calibration", g[0], ahead.scene.calibration, len(self.strengths), 1 / len(groups))


def _below(count: int, generator: torch.Generator) -> int:
    return int(torch.randint(count, (), generator=generator))


def families(places: Iterable[Place]) -> list[list[Group]]:
    """By block, the groups of its places at tokens whose names differ only in a number; blocks without one left out."""
    found: dict[str, dict[str, list[Place]]] = {}
    for p in places:
        stem, at, token = p.name.partition("@")
        if at and not p.way and re.search(r"[^\W\d].*\d|\d.*[^\W\d]", token):  # mere numbers count all tokens
            found.setdefault(stem, {}).setdefault(re.sub(r"\d+", "#", token), []).append(p)
    by_block = [[tuple(some) for some in of.values() if len(some) > 1] for of in found.values()]
    return [groups for groups in by_block if groups]


@dataclass(frozen=True)
class Try:
    """A handle over a group, and what it reaches on calibration."""

    form: str
    strength: float
    score: float
    edits: Sequence[EditBatch]

    @property
    def size(self) -> int:
        """How many directions it has in all."""
        return sum(e.frame.rank for e in self.edits)


def _whole(group: Group) -> list[EditBatch]:
    """The states of a group taken whole from the source."""
    return [EditBatch(p, Frame.identity(p.width), torch.ones(1, p.width)) for p in group]


def _scored(problem: Problem, variable: str, tries: Sequence[Sequence[EditBatch]]) -> list[Float[Tensor, " variants"]]:
    with problem.clock.part("calibration"):
        weights = pair_weights(problem.calibration, variable, problem.score)
        return scored_all(problem.calibration, tries, variable, weights, problem.readout)


def _named(group: Group) -> str:
    return " and ".join(p.name for p in group)


def _score(handle: Handle) -> float:
    return float(handle.chosen.get("calibration_score", 0.0))
