"""RAVEL's entities, attributes and prompts, from its own files, as a hypothesis with inputs and pairs."""

from __future__ import annotations

import os
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from plot_ot.abstract import Hypothesis, TokenSpan
from plot_ot.errors import PlotError, unknown
from plot_ot.files.safe_reading import read_json

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
    held = (v.values() if isinstance(v, dict) else [v] if isinstance(v, str) else v for v in found.values())
    if not all(isinstance(x, str) for some in held for x in some):
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
