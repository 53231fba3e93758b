"""RAVEL's scores of handles: cause, isolation, and the mean of both."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from plot_ot.abstract import Hypothesis, read_pairs
from plot_ot.edits import respond
from plot_ot.errors import PlotError
from plot_ot.handles import Handle
from plot_ot.ravel.data import ASKED, variable_name
from plot_ot.signatures import Readout, as_readout
from plot_ot.subjects import Subject, record_pairs


@dataclass(frozen=True)
class Disentangled:
    """RAVEL's scores of one attribute's feature."""

    attribute: str
    cause: float
    iso_by: Mapping[str, float]
    """Of prompts that ask for each other attribute, the share that answers as before."""
    pairs: Mapping[str, int]
    """Pairs by the attribute that the base asks for."""

    @property
    def iso(self) -> float:
        """The mean over the other attributes."""
        return fmean(self.iso_by.values())

    @property
    def disentangle(self) -> float:
        """The mean of cause and isolation."""
        return (self.cause + self.iso) / 2


@dataclass(frozen=True)
class Scores:
    """RAVEL's scores of all attributes, by variable."""

    by_attribute: Mapping[str, Disentangled]

    @property
    def disentangle(self) -> float:
        """RAVEL's one number: the mean over attributes."""
        return fmean(s.disentangle for s in self.by_attribute.values())

    def __str__(self) -> str:
        wide = max(map(len, [*self.by_attribute, "attribute"]))
        lines = [f"{'attribute':<{wide}}  cause    iso  disentangle"]
        for name, s in self.by_attribute.items():
            lines.append(f"{name:<{wide}}  {s.cause:5.3f}  {s.iso:5.3f}  {s.disentangle:11.3f}")
        return "\n".join([*lines, f"{'mean':<{wide}}  {'':5}  {'':5}  {self.disentangle:11.3f}"])


def disentangle(
    subject: Subject,
    hypothesis: Hypothesis,
    handles: Mapping[str, Handle],
    pairs: Any,
    readout: str | Readout = "logits",
) -> Scores:
    """RAVEL's scores of the handles, by variable of a `Ravel.hypothesis`, on pairs that none of them was made with.

    `pairs` as `localize` takes them, of which only those count whose entities differ in the attribute that the base
    asks for. An answer is the readout's: the best of the candidates.
    """
    table = read_pairs(pairs)
    if not table.source:
        raise PlotError("RAVEL's scores need pairs of base and source; found inputs alone. See `Ravel.pairs`.")
    base, source = table.rows(hypothesis)
    causal, look = hypothesis.causal, as_readout(readout)
    for name in handles:
        causal.require(name)
    at_base, at_source = causal.run(base), causal.run(source)
    asks = [variable_name(hypothesis.values(ASKED)[k]) for k in at_base[ASKED].tolist()]
    others = list(dict.fromkeys(asks))
    differs = torch.tensor([bool(at_base[a][k] != at_source[a][k]) for k, a in enumerate(asks)])
    [recording] = record_pairs(subject, (base, source))
    found = {}
    for name, handle in handles.items():
        outputs = respond(recording, handle.batch())
        label = causal.swap(base, source, name)
        right: Bool[Tensor, " pairs"] = look.correct(outputs, label.to(outputs.device))[0].cpu()
        counted: dict[str, Int[Tensor, " some"]] = {
            a: (torch.tensor([x == a for x in asks]) & differs).nonzero().squeeze(1) for a in others
        }
        empty = [a for a in {name, *others} if a not in counted or not len(counted[a])]
        if empty or len(others) < 2:
            raise PlotError(
                f"RAVEL's scores of '{name}' need pairs that ask for it and for other attributes, whose entities "
                f"differ in what is asked; there are none for {', '.join(empty) or 'others'}."
            )
        share = {a: float(right[some].double().mean()) for a, some in counted.items()}
        iso = {a: value for a, value in share.items() if a != name}
        found[name] = Disentangled(name, share[name], iso, {a: len(some) for a, some in counted.items()})
    return Scores(found)
