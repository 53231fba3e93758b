"""Indirect objects by attention heads: which heads, the linear model of their logit difference, and subspaces in them.

The benchmark swaps chosen heads at all tokens together and compares the logit difference, of the indirect object's name
to the subject's, with what a linear model of two signals says: bias + position · s_p + token · s_t.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from plot_ot.edits import EditBatch, Frame, respond
from plot_ot.errors import PlotError
from plot_ot.exchange.torch_files import RotateLayer
from plot_ot.mib.data import Pair
from plot_ot.mib.prompts import Prompts
from plot_ot.mib.questions import signals
from plot_ot.models.named import LanguageModel
from plot_ot.subjects import DecoderSubject, Place, Recording, record_pairs
from plot_ot.transport import solve

Head = tuple[int, int]
"""Layer and head."""
VARIABLES = ("output_position", "output_token")
QUIET = 0.05
"""Heads whose effect is below this share of the largest are not looked at."""


@dataclass(frozen=True)
class LinearModel:
    """The logit difference as a linear function of the two signals, and how much of it that explains."""

    bias: float
    position: float
    token: float
    score: float

    def __call__(self, s: Float[Tensor, "pairs 2"]) -> Float[Tensor, " pairs"]:
        return self.bias + s.to(torch.float64) @ torch.tensor([self.position, self.token], dtype=torch.float64)

    def as_entry(self, name: str) -> dict[str, Any]:
        """An entry of the benchmark's ioi_linear_params.json."""
        told = {"bias": self.bias, "position_coeff": self.position, "token_coeff": self.token}
        return {**told, "score": self.score, "model_name": name}

    @classmethod
    def fitted(cls, s: Float[Tensor, "pairs 2"], y: Float[Tensor, " pairs"]) -> LinearModel:
        """Least squares, with the share of the variance that it explains."""
        design = torch.cat([torch.ones(len(s), 1), s.float()], dim=1).double()
        found = torch.linalg.lstsq(design, y.double().unsqueeze(1), driver="gelsd").solution.squeeze(1)
        left, all_of_it = (y.double() - design @ found).square().sum(), (y.double() - y.double().mean()).square().sum()
        bias, position, token = found.tolist()
        return cls(bias, position, token, float(1 - left / all_of_it) if float(all_of_it) > 0 else 1.0)


@dataclass(frozen=True)
class _Group:
    """The pairs whose prompts have the same number of tokens."""

    pairs: tuple[Pair, ...]
    tokens: int
    recording: Recording
    subject: DecoderSubject
    columns: Tensor
    """Of every pair, the outputs that are the logits of the indirect object's and of the subject's name."""

    def select(self, chosen: Sequence[bool]) -> _Group:
        at = torch.tensor(chosen).nonzero().squeeze(1)
        r = self.recording
        recording = Recording(r.subject, r.store, r.base_rows[at], r.source_rows[at])
        return replace(self, pairs=tuple(compress(self.pairs, chosen)), recording=recording, columns=self.columns[at])

    def place(self, head: Head) -> Place:
        return self.subject.place(f"head_output.{head[0]}.{head[1]}@all")

    def difference(self, outputs: Float[Tensor, "pairs names"]) -> Float[Tensor, " pairs"]:
        both = outputs.gather(1, self.columns.to(outputs.device))
        return both[:, 0] - both[:, 1]


class HeadStudy:
    """Pairs of indirect-object prompts, recorded at all heads and all tokens."""

    def __init__(self, groups: Sequence[_Group]) -> None:
        self.groups = groups
        self.pairs = [p for g in groups for p in g.pairs]
        decoder = groups[0].subject.decoder
        self.heads = [(k, h) for k in range(len(decoder.blocks)) for h in range(decoder.heads)]
        self.width = groups[0].place((0, 0)).width // groups[0].tokens

    @classmethod
    def recorded(cls, language_model: LanguageModel, prompts: Prompts, pairs: Sequence[Pair], memory: int) -> HeadStudy:
        """The pairs whose heads can be swapped at all tokens, each distinct prompt recorded once."""
        first = first_tokens(prompts, pairs)
        tokens = sorted(set(first.values()))
        groups = []
        for n, some in groups_of(prompts, pairs).items():
            subject = DecoderSubject(
                language_model.model,
                prompts.encode,
                [[t] for t in tokens],
                kinds=("head_output",),
                tokens=n,
                memory=memory,
            )
            rows = prompts.rows([p.base for p in some]), prompts.rows([p.source for p in some])
            columns = torch.tensor([[tokens.index(first[name]) for name in _names(p)] for p in some])
            [recording] = record_pairs(subject, rows)
            groups.append(_Group(tuple(some), n, recording, subject, columns))
        return cls(groups)

    def among(self, pairs: Sequence[Pair]) -> HeadStudy:
        """The study of some of these pairs; nothing is run again."""
        wanted = {(p.base.prompt, p.source.prompt, p.family) for p in pairs}
        kept = [g.select([(p.base.prompt, p.source.prompt, p.family) in wanted for p in g.pairs]) for g in self.groups]
        return HeadStudy([g for g in kept if g.pairs])

    def require(self, heads: Sequence[Head]) -> None:
        """Refuse heads that the model does not have, such as those of another model's defaults."""
        for head in heads:
            if head not in self.heads:
                depth, count = self.heads[-1][0] + 1, self.heads[-1][1] + 1
                raise PlotError(
                    f"This model has {depth} blocks of {count} heads each; there is no head {head[0]}.{head[1]}. "
                    f"Leave the heads out to have them chosen in this model."
                )

    def signals(self, variables: Sequence[str]) -> Float[Tensor, "pairs 2"]:
        """The two signals of every pair when these variables come from its source."""
        taken = [{v: p.source.values[v] for v in variables} for p in self.pairs]
        return torch.tensor([signals(p.base.values, do) for p, do in zip(self.pairs, taken, strict=True)]).float()

    def differences(self, heads: Sequence[Head], rotations: Mapping[Head, Tensor] | None = None) -> Tensor:
        """The logit difference of every pair with these heads taken from the source at all tokens.

        `rotations` are the directions [d, k] of each head that are swapped; without them the whole heads are.
        """
        return torch.cat([self._group(g, heads, rotations or {}) for g in self.groups])

    def _group(self, g: _Group, heads: Sequence[Head], rotations: Mapping[Head, Tensor]) -> Tensor:
        places = {g.place(h): rotations.get(h) for h in sorted(heads)}
        order = [p for p in g.subject.places if p in places]

        def rewrite(place: Place) -> Callable[[Tensor], Tensor]:
            source, basis = g.recording.source_at(place).unsqueeze(0), places[place]

            def swap(a: Float[Tensor, "1 pairs d"]) -> Float[Tensor, "1 pairs d"]:
                if basis is None:
                    return source.to(a)
                moved = (source.to(a) - a).unflatten(-1, (g.tokens, -1))
                new: Tensor = a + (moved @ basis.to(a) @ basis.to(a).T).flatten(-2)
                return new

            return swap

        if not order:
            return g.difference(g.recording.base_outputs)
        start, *later = order
        changed = rewrite(start)(g.recording.base_at(start).unsqueeze(0))
        others = {p.name: rewrite(p) for p in later}
        outputs = g.subject.resume(g.recording.store, g.recording.base_rows, start, changed, others)
        return g.difference(outputs[0])

    def choose(self, count: int) -> list[Head]:
        """The heads that transport couples with the two variables.

        Signatures are what swapping a head does to the logit difference, pair by pair, and what each variable's signal
        does; both at length 1. A head's place in the ranking is the mass it gets from both variables.
        """
        with torch.no_grad():
            base = self.differences([])
            effects = []
            for head in self.heads:
                here = []
                for g in self.groups:
                    place = g.place(head)
                    edit = EditBatch(place, Frame.identity(place.width), torch.ones(1, place.width))
                    here.append(g.difference(respond(g.recording, [edit])[0]))
                effects.append(torch.cat(here) - base)
        v = torch.stack(effects).double().cpu()
        u = torch.stack([self.signals([name])[:, k] - 1 for k, name in enumerate(VARIABLES)]).double()
        norms = v.norm(dim=1)
        loud = norms > QUIET * norms.max()
        if not bool(loud.any()) or not bool((u.norm(dim=1) > 0).all()):
            raise PlotError("No head changes the logit difference on these pairs, or no pair changes both variables.")
        v, u = v[loud] / norms[loud, None], u / u.norm(dim=1, keepdim=True)
        similar = (u @ v.T).abs()  # a head may push the difference either way
        cost = (2 - 2 * similar).numpy()
        plan = solve(cost, [(0.1, 1.0)], "uot-one-sided")[0].plan
        order = np.argsort(-plan.sum(axis=0), kind="stable")
        kept = [self.heads[int(k)] for k in loud.nonzero().squeeze(1)]
        return sorted(kept[int(j)] for j in order[:count])

    def fit_linear(self, heads: Sequence[Head]) -> LinearModel:
        """The linear model, from every prompt as it is (both signals 1) and with the heads of every source."""
        once = {p.base.prompt: k for k, p in enumerate(self.pairs)}
        same = self.differences([]).cpu()[list(once.values())]
        moved = self.differences(heads).cpu()
        s = torch.cat([torch.ones(len(same), 2), self.signals(VARIABLES)])
        return LinearModel.fitted(s, torch.cat([same, moved]))

    def error(self, found: Tensor, linear: LinearModel, variable: str) -> dict[str, float]:
        """The mean squared error against the linear model's answer to a swap of the variable, by family."""
        squared = (found.detach().cpu().double() - linear(self.signals([variable]))).square()
        families = sorted({p.family for p in self.pairs})
        return {f: float(squared[torch.tensor([p.family == f for p in self.pairs])].mean()) for f in families}

    def train(
        self, heads: Sequence[Head], linear: LinearModel, variable: str, size: int, epochs: int, seed: int
    ) -> dict[Head, Tensor]:
        """Directions in every head that, swapped together, give the linear model's answer: DAS with squared error."""
        torch.manual_seed(seed)
        layers = {h: RotateLayer(torch.linalg.qr(torch.randn(self.width, size))[0]) for h in heads}
        optimiser = torch.optim.Adam([p for layer in layers.values() for p in layer.parameters()], lr=0.02)
        target = linear(self.signals([variable])).float()
        for _ in range(epochs):
            optimiser.zero_grad()
            found = self.differences(heads, {h: layer.weight for h, layer in layers.items()}).cpu()
            (found - target).square().mean().backward()
            optimiser.step()
        return {h: layer.weight.detach() for h, layer in layers.items()}


def first_tokens(prompts: Prompts, pairs: Sequence[Pair]) -> dict[str, int]:
    """The token that stands for each name, its first, as the benchmark has it."""
    names = sorted({n for p in pairs for n in p.base.values["names"]})
    return {n: prompts.tokenizer(n, add_special_tokens=False)["input_ids"][0] for n in names}


def groups_of(prompts: Prompts, pairs: Sequence[Pair]) -> dict[int, list[Pair]]:
    """By their number of tokens, the pairs whose prompts are equally long and whose two names can be told apart."""
    first = first_tokens(prompts, pairs)
    groups: dict[int, list[Pair]] = {}
    for p in pairs:
        base, source = (prompts.length(prompts.row(e)) for e in (p.base, p.source))
        if base == source and first[_names(p)[0]] != first[_names(p)[1]]:
            groups.setdefault(base, []).append(p)
    if not groups:
        raise PlotError(
            "No pair of indirect-object prompts has as many tokens in its base as in its source, so no head can be "
            "swapped at all tokens."
        )
    return dict(sorted(groups.items()))


def _names(pair: Pair) -> tuple[str, str]:
    """The indirect object's and the subject's name in the base prompt."""
    a, b, c = pair.base.values["names"]
    return (b, a) if c == a else (a, b)
