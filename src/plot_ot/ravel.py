"""RAVEL's question: can one attribute of an entity be changed while its others stay? Its files, pairs and scores.

An entity such as a city has attributes (country, continent, language), and every prompt asks for one of them. With the
feature of attribute A taken from a source that names another entity,

    Cause(A)       = of prompts that ask for A, the share that answers with the source entity's value
    Iso(A)         = of prompts that ask for another attribute, the share that answers as before; its mean over these
    Disentangle(A) = (Cause(A) + Iso(A)) / 2

counted over pairs of entities that differ in the attribute that is asked for. (Huang et al. 2024, arXiv 2402.17700.)
"""

from __future__ import annotations

import os
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from plot_ot.abstract import Hypothesis, TokenSpan, read_pairs
from plot_ot.errors import PlotError, unknown
from plot_ot.edits import respond
from plot_ot.files.safe_reading import read_json
from plot_ot.handles import Handle
from plot_ot.signatures import Readout, as_readout
from plot_ot.subjects import Subject, record_pairs

__all__ = ["Disentangled", "Ravel", "Scores", "disentangle", "read_ravel"]

ASKED = "asked"
"""The variable that says which attribute a prompt asks for; it is not searched for."""
SPLITS = {"train": "fit", "val": "calibration", "test": "test"}
"""RAVEL's names of splits, and ours."""


@dataclass(frozen=True)
class Ravel:
    """Entities with their attributes, and prompts that ask for them."""

    entities: Mapping[str, Mapping[str, str]]
    """entity -> attribute -> value"""
    prompts: Mapping[str, Sequence[str]]
    """attribute -> prompts, each with one `%s` for the entity"""
    split: Mapping[str, str] = field(default_factory=dict)
    """entity -> train, val or test, where the files say so"""

    def __post_init__(self) -> None:
        if not self.entities or not self.prompts:
            raise PlotError(
                "RAVEL needs entities with attributes, and prompts that ask for them; one of them is empty."
            )
        for attribute, own in self.prompts.items():
            for prompt in own:
                if prompt.replace("%%", "").count("%s") != 1:
                    raise PlotError(f"The prompt {prompt!r:.120} of '{attribute}' must have one %s, for the entity.")
        lacking = [e for e, known in self.entities.items() if not all(known.get(a) for a in self.prompts)]
        if lacking:
            raise PlotError(
                f"{len(lacking)} entities lack an attribute that prompts ask for ({', '.join(lacking[:3])}, ...): name "
                f"the attributes that all of them have."
            )
        shared = [p for p in self._asks if sum(p in own for own in self.prompts.values()) > 1]
        if shared:
            raise PlotError(f"The prompt {shared[0]!r:.120} asks for two attributes.")

    @property
    def attributes(self) -> tuple[str, ...]:
        """What prompts ask for, by RAVEL's names; variables have underscores instead of spaces."""
        return tuple(self.prompts)

    @property
    def _asks(self) -> dict[str, str]:
        return {prompt: attribute for attribute, own in self.prompts.items() for prompt in own}

    def hypothesis(self, *, span: bool = False, answers: Sequence[str] | None = None) -> Hypothesis:
        """Every attribute a variable of the entity; the answer is the value of the one that is asked for.

        Its position `entity` is the entity's last token, as in RAVEL, or with `span` all of its tokens, aligned at the
        last.
        """
        place: Callable[[dict[str, Any]], tuple[int, int]] = lambda given: _place(given["prompt"], given["entity"])  # noqa: E731
        h = Hypothesis(
            inputs=["entity", "prompt"],
            template=lambda given: _filled(given["prompt"], given["entity"]),
            positions={"entity": TokenSpan(place, align="last") if span else place},
            answers=answers,
            name="ravel",
        )
        asks, names = self._asks, [variable_name(a) for a in self.attributes]
        h.variable(name=ASKED, parents=["prompt"], localize=False)(lambda prompt: asks[prompt])
        for attribute, name in zip(self.attributes, names, strict=True):
            h.variable(name=name, parents=["entity"])(lambda entity, a=attribute: self.entities[entity][a])

        def answer(asked: str, *values: str) -> str:
            return dict(zip(self.attributes, values, strict=True))[asked]

        h.output(name="answer", parents=[ASKED, *names])(answer)
        return h

    def inputs(self, limit: int | None = None, seed: int = 0) -> list[dict[str, str]]:
        """Every entity in every prompt, or so many of these at random; `hold_out="entity"` keeps the splits apart."""
        found = [{"entity": e, "prompt": p} for e in self.entities for p in self._asks]
        return found if limit is None or limit >= len(found) else random.Random(seed).sample(found, limit)

    def pairs(self, each: int, seed: int = 0) -> list[dict[str, Any]]:
        """Pairs inside RAVEL's own splits of the entities, `each` of every split, with `split` as `localize` reads it.

        The source's entity is any other for half of the pairs, and for the rest one that shares an attribute with the
        base's: pairs that keep a variable would else be rare.
        """
        if not self.split:
            raise PlotError("The files have no split of the entities: use `inputs` with hold_out='entity' instead.")
        rng, found = random.Random(seed), []
        for theirs, ours in SPLITS.items():
            own = [e for e in self.entities if self.split.get(e) == theirs]
            if len(own) < 2:
                raise PlotError(f"RAVEL's split '{theirs}' has {len(own)} of these entities; at least 2 are needed.")
            asks = list(self._asks)
            for k in range(each):
                base, source = rng.sample(own, 2)
                if k % 2:
                    shared = rng.choice(self.attributes)
                    like = [e for e in own if self.entities[e][shared] == self.entities[base][shared]]
                    source = rng.choice(like)
                sides = {s: {"entity": e, "prompt": rng.choice(asks)} for s, e in (("base", base), ("source", source))}
                found.append({**sides, "split": ours})
        return found


def read_ravel(folder: str | os.PathLike[str], kind: str = "city", attributes: Sequence[str] | None = None) -> Ravel:
    """RAVEL's own files of one kind of entity (city, nobel_prize_winner, verb, ...) from a local folder.

    `ravel_{kind}_entity_attributes.json`, `ravel_{kind}_attribute_to_prompts.json` and, if it is there,
    `ravel_{kind}_entity_to_split.json`. `attributes` keeps some of the attributes, and the entities that have all of
    them. Prompts from Wikipedia, which ask for nothing, are not read.
    """
    path = Path(folder).expanduser()
    entities = _table(path / f"ravel_{kind}_entity_attributes.json", dict)
    prompts = _table(path / f"ravel_{kind}_attribute_to_prompts.json", list)
    wanted = list(prompts) if attributes is None else list(attributes)
    for name in wanted:
        if name not in prompts:
            unknown(f"attribute of RAVEL's {kind}", name, prompts)
    kept = {e: known for e, known in entities.items() if all(known.get(a) for a in wanted)}
    to_split = path / f"ravel_{kind}_entity_to_split.json"
    split = _table(to_split, str) if to_split.is_file() else {}
    return Ravel(kept, {a: tuple(prompts[a]) for a in wanted}, split)


def _table(path: Path, of: type) -> dict[str, Any]:
    """A JSON object whose values are of one type."""
    if not path.is_file():
        raise PlotError(f"There is no file {path}. RAVEL's data are in data.tgz of its repository: unpack it first.")
    found: Any = read_json(path)
    if not isinstance(found, dict) or not all(isinstance(v, of) for v in found.values()):
        raise PlotError(f"{path} must be a JSON object whose values are of type {of.__name__}, as RAVEL's are.")
    inner = {dict: lambda v: v.values(), list: lambda v: v, str: lambda v: [v]}[of]
    if not all(isinstance(x, str) for v in found.values() for x in inner(v)):
        raise PlotError(f"{path} holds something that is no text where RAVEL has texts.")
    return found


def variable_name(attribute: str) -> str:
    """An attribute's name as that of a variable: Country of Birth becomes Country_of_Birth."""
    return re.sub(r"\W", "_", attribute)


def _filled(prompt: str, entity: str) -> str:
    before, after = (part.replace("%%", "%") for part in prompt.split("%s"))
    return f"{before}{entity}{after}"


def _place(prompt: str, entity: str) -> tuple[int, int]:
    start = len(prompt.split("%s")[0].replace("%%", "%"))
    return start, start + len(entity)


# -- scores ------------------------------------------------------------------------------------------------------


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
                f"RAVEL's scores of '{name}' need pairs that ask for it and for other attributes, whose entities differ "
                f"in what is asked; there are none for {', '.join(empty) or 'others'}."
            )
        share = {a: float(right[some].double().mean()) for a, some in counted.items()}
        iso = {a: value for a, value in share.items() if a != name}
        found[name] = Disentangled(name, share[name], iso, {a: len(some) for a, some in counted.items()})
    return Scores(found)
