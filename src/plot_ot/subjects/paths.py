"""Paths: the effect of a place through chosen later places only, or around them, as places of their own.

An edit at a place p changes the output along every way that leads there. A path keeps some of these ways:

    p -> q         through q only: the edited run is watched up to q, the state that arrives there is written into an
                   otherwise clean run, and the output is read. This is the effect of p that q mediates.
    p -> output    straight to the output, `around` some places, which are held at their clean states: what they do not
                   mediate is the direct effect of p. Around nothing, it is the whole effect.

A subject that looks along paths records what it did before. The activation of a path is that of the place where it
begins, and it is resumed in one pass for each of its legs. So whatever edits places also edits paths.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from plot_ot.errors import PlotError
from plot_ot.subjects.decoder.sequences import SequenceSubject
from plot_ot.subjects.decoder.vectors import Aliased
from plot_ot.subjects.open_edits import OpenEdit, Rewrites, apart, proven
from plot_ot.subjects.places import ARROW, Place
from plot_ot.subjects.protocol import Rewrite, Share, Store, Subject, record_pairs
from plot_ot.subjects.shape import Shape
from plot_ot.subjects.views import SubjectView

OUTPUT = "output"
"""Where a path leads that goes through no place."""
LISTED = 3
"""Places that a path's name lists as gone around; of more it gives their number and a digest."""


@dataclass(frozen=True)
class Path:
    """From a place `through` others, one after the other, to the output, with the places `around` held as they were."""

    sender: Place
    through: tuple[Place, ...] = ()
    around: tuple[Place, ...] = ()

    @property
    def name(self) -> str:
        """`p->q->r`, and what it goes around."""
        stops = ARROW.join(p.name for p in (self.sender, *self.through)) if self.through else self._straight
        if not self.around:
            return stops
        names = [p.name for p in self.around]
        if len(names) > LISTED:
            digest = hashlib.sha256("\n".join(names).encode()).hexdigest()[:8]
            return f"{stops} around {len(names)} places ({digest})"
        return f"{stops} around {', '.join(names)}"

    @property
    def _straight(self) -> str:
        return f"{self.sender.name}{ARROW}{OUTPUT}"

    @property
    def place(self) -> Place:
        """The path as a place: its activation is the sender's."""
        return replace(self.sender, name=self.name)


def along(
    subject: Subject,
    paths: str | Sequence[str | Path] | None = None,
    *,
    senders: str | Sequence[str] | None = None,
    receivers: str | Sequence[str] | None = None,
    around: str | Sequence[str] = (),
) -> PathSubject:
    """The same network, looked at along paths: its places are paths, everything else stays as it is.

    Give `receivers`, names of places or "output", and there is a path to each from every one of the `senders` (by
    default all places) that can reach it. Or give the `paths` themselves, as "p->q", "p->q->r" or "p->output".
    The places `around` are held at their clean states while a path is followed; a path through one of them still is.
    """
    if isinstance(subject, PathSubject):
        subject = subject.inner
    if (paths is None) == (receivers is None) or (paths is not None and senders is not None):
        raise PlotError(
            "Give the `receivers` that paths lead to (and the `senders` where they begin, by default all places), or "
            "the `paths` themselves."
        )
    paths = [paths] if isinstance(paths, str) else paths
    senders, receivers = ([names] if isinstance(names, str) else names for names in (senders, receivers))
    held = tuple(subject.place(name) for name in ([around] if isinstance(around, str) else around))
    if paths is not None:
        return PathSubject(subject, [p if isinstance(p, Path) else _parsed(subject, p, held) for p in paths])
    begin = subject.places if senders is None else [subject.place(name) for name in senders]
    ends = [() if name == OUTPUT else (subject.place(name),) for name in receivers or ()]
    made = [_path(p, end, held) for p in begin for end in ends if all(subject.reaches(p, q) for q in end)]
    if not made:
        raise PlotError(
            f"No path leads from {_some([p.name for p in begin])} to {_some(list(receivers or ()))}: a receiver comes "
            f"after its sender in the forward pass, and not beside it in the same block."
        )
    return PathSubject(subject, made)


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (", ..." if len(names) > 4 else "") or "nothing"


def _path(sender: Place, through: tuple[Place, ...], around: Sequence[Place]) -> Path:
    """A path around those of the places that it does not go through."""
    return Path(sender, through, tuple(m for m in around if m not in (sender, *through)) if through else tuple(around))


def _parsed(subject: Subject, name: str, around: tuple[Place, ...]) -> Path:
    stops, _, listed = name.partition(" around ")
    first, *through = stops.split(ARROW)
    if not through:
        raise PlotError(f"'{name}' is no path: write 'p{ARROW}q', or 'p{ARROW}{OUTPUT}'.")
    if listed and not around and not listed.endswith(")"):
        around = tuple(subject.place(m) for m in listed.split(", "))
    legs = () if through == [OUTPUT] else tuple(subject.place(q) for q in through)
    found = _path(subject.place(first), legs, around)
    if listed and found.name != name:
        raise PlotError(f"'{name}' goes around other places than those given: name all of them as `around`.")
    return found


class PathSubject(SubjectView):
    """A subject whose places are paths; see `along`.

    Paths that are edited together: those with the same way are followed in one run, in which all their senders are
    edited. At the end of each way what has arrived there is added to the state that the last run has meanwhile, in
    which the senders of paths straight to the output are edited too.
    """

    def __init__(self, inner: Subject, paths: Sequence[Path]) -> None:
        if isinstance(inner, SequenceSubject):
            raise PlotError(
                "Answers of several tokens are read from several passes; look along paths of `subject.prompt`, which "
                "reads one token."
            )
        super().__init__(inner)
        order = {p.name: k for k, p in enumerate(inner.places)}
        for path in paths:
            _check(inner, path)
        found = {path.name: path for path in paths}
        if not found:
            raise PlotError("A subject along paths needs at least one path.")
        straight = {path.around for path in found.values() if not path.through}
        if len(straight) > 1:
            raise PlotError(
                "Paths straight to the output must all go around the same places: edited together, a place cannot be "
                "held for one of them and not for another. Make a subject for each."
            )
        self._order = order
        self._paths = dict(sorted(found.items(), key=lambda item: order[item[1].sender.name]))
        self.places = tuple(path.place for path in self._paths.values())

    @property
    def paths(self) -> Mapping[str, Path]:
        """The paths by name."""
        return self._paths

    @property
    def recorded(self) -> tuple[Place, ...]:
        return self.inner.recorded

    def reaches(self, sender: Place, receiver: Place) -> bool:
        return False

    def looked_at(self, place: Place) -> tuple[str, ...]:
        path = self._paths[place.name]
        return (place.name, *(p.name for p in (path.sender, *path.through, *path.around)))

    def rules_of(self, place: Place) -> Mapping[str, Any]:
        path = self._paths[place.name]
        stops = (path.sender, *path.through, *path.around)
        return {name: rule for p in stops for name, rule in self.inner.rules_of(p).items()}

    def shape(self, outputs: int) -> Shape:
        """Every leg is resumed where it begins, and runs to the end."""
        inner = self.inner.shape(outputs)
        after = tuple(sum(map(inner.left, (p.sender, *p.through))) for p in self._paths.values())
        return replace(inner, places=self.places, after=after, recorded=sum(p.width for p in inner.places))

    def tails(self, place: Place, inputs: Tensor) -> Int[Tensor, " rows"]:
        return self.inner.tails(self._paths[place.name].sender, inputs)

    def tokens_at(self, place: Place) -> int:
        return self.inner.tokens_at(self._paths[place.name].sender)

    @property
    def response_bytes(self) -> int:
        widest = max(q.width for p in self._paths.values() for q in (p.sender, *p.through))
        return self.inner.response_bytes + 2 * 4 * widest  # what arrives, and its difference to the clean state

    def read_as(self, reading: str | None) -> PathSubject:
        return PathSubject(self.inner.read_as(reading), list(self._paths.values()))

    def reinitialised(self, generator: torch.Generator) -> PathSubject:
        return PathSubject(self.inner.reinitialised(generator), list(self._paths.values()))

    # -- recording -----------------------------------------------------------------------------------------------

    def record(self, inputs: Tensor, bases: Int[Tensor, " bases"] | None = None) -> Store:
        return self._seen(self.inner.record(inputs, bases))

    def record_part(self, inputs: Tensor, bases: Int[Tensor, " bases"], share: Share) -> Store:
        return self._seen(self.inner.record_part(inputs, bases, share))

    def _seen(self, store: Store) -> Store:
        """The store, in which a path's activations are those of its sender."""
        aliases = {name: path.sender.name for name, path in self._paths.items()}
        return replace(store, activations=Aliased(store.activations, aliases))

    # -- resuming ------------------------------------------------------------------------------------------------

    def resume(
        self,
        store: Store,
        rows: Int[Tensor, " pairs"],
        start: Place,
        activation: Float[Tensor, "variants pairs d"],
        later: Mapping[str, Rewrite],
    ) -> Float[Tensor, "variants pairs ..."]:
        run = _Run(self.inner, self._order, store, rows, len(activation))
        return run.output(*self._arrivals(run, {start.name: lambda _: activation, **later}))

    def _arrivals(self, run: _Run, changes: Mapping[str, Rewrite]) -> tuple[dict[str, Rewrite], tuple[Place, ...]]:
        """What changes in the last run: edits of its own, and what arrives by paths; and what is held there."""
        last: dict[str, Rewrite] = {}
        held: tuple[Place, ...] = ()
        ways: dict[tuple[tuple[Place, ...], tuple[Place, ...]], dict[str, Rewrite]] = {}
        for name, rewrite in changes.items():
            path = self._paths[name]
            ways.setdefault((path.through, path.around), {})[path.sender.name] = rewrite
        arrived: dict[str, Tensor] = {}
        for (through, around), edits in ways.items():
            if not through:
                last, held = edits, around
                continue
            state = run.arriving(edits, around, through[0])
            for here, there in pairwise(through):
                state = run.arriving({here.name: _written(state)}, around, there)
            end = through[-1].name
            gained = state - run.clean(end)
            arrived[end] = arrived[end] + gained if end in arrived else gained
        for name, gained in arrived.items():
            last[name] = _added(gained, last.get(name))
        return last, held

    # -- live ----------------------------------------------------------------------------------------------------

    def intervene(self, rewrites: Rewrites) -> contextlib.AbstractContextManager[OpenEdit]:
        return self.live(rewrites)

    @contextlib.contextmanager
    def live(
        self,
        rewrites: Rewrites,
        *,
        rows: int | None = None,
        base: Tensor | None = None,
        every_token: bool = False,
    ) -> Iterator[OpenEdit]:
        """The live network takes up what arrives at the ends of the paths, which passes of our own find beforehand.

        They need the input rows `base` that it will be called with.
        """
        for name in rewrites:
            self.place(name)
        if base is None:
            raise PlotError(
                "What arrives at the end of a path is found by passes of its own, before the live network runs: give "
                "the input rows that it will be called with as `base`."
            )
        if every_token:
            raise PlotError("A path is followed in the prompt; `every_token` edits what is generated as well.")
        with torch.no_grad(), apart():
            [recording] = record_pairs(self.inner, (base, base))
            run = _Run(self.inner, self._order, recording.store, recording.base_rows, 1)
            last = run.in_order(*self._arrivals(run, {name: _one_variant(r) for name, r in rewrites.items()}))
        changes = {name: _of_rows(change, len(base)) for name, change in last.items()}
        with proven(changes, lambda noted: self.inner.live(noted, rows=rows, base=base)):
            yield OpenEdit()  # whether it happened is proven here, at the places that the live network runs through


@dataclass(frozen=True)
class _Run:
    """Passes of the network over some base inputs, in several variants."""

    subject: Subject
    order: Mapping[str, int]
    store: Store
    rows: Int[Tensor, " pairs"]
    variants: int

    def clean(self, name: str) -> Float[Tensor, "pairs d"]:
        """The base's own state at a place."""
        return self.store.activations[name][self.rows]

    def arriving(
        self, changes: Mapping[str, Rewrite], around: Sequence[Place], end: Place
    ) -> Float[Tensor, "variants pairs d"]:
        """The state at a place under changes before it."""
        kept: list[Tensor] = []

        def keep(a: Tensor) -> Tensor:
            # a subject that runs in parts shows each of them among zeros
            kept[:] = [kept[0] + a if kept else a.clone()]
            return a

        self._resumed({**changes, end.name: keep}, around)
        return kept[0]

    def output(self, changes: Mapping[str, Rewrite], around: Sequence[Place]) -> Float[Tensor, "variants pairs ..."]:
        """The output under changes."""
        return self._resumed(changes, around)

    def in_order(self, changes: Mapping[str, Rewrite], around: Sequence[Place]) -> dict[str, Rewrite]:
        """The changes in forward order, among them that places around are held from the first change on."""
        since = min(map(self.order.__getitem__, changes))
        held = {m.name for m in around if self.order[m.name] > since}
        found = {**changes, **{name: self._held(name, changes.get(name)) for name in held}}
        return {name: found[name] for name in sorted(found, key=self.order.__getitem__)}

    def _resumed(self, changes: Mapping[str, Rewrite], around: Sequence[Place]) -> Tensor:
        (first, change), *later = self.in_order(changes, around).items()
        activation = change(self.clean(first).expand(self.variants, -1, -1))
        return self.subject.resume(self.store, self.rows, self.subject.place(first), activation, dict(later))

    def _held(self, name: str, change: Rewrite | None) -> Rewrite:
        """The clean state, whatever arrives, and then what is changed there."""
        clean = self.clean(name)

        def hold(a: Tensor) -> Tensor:
            still = clean.expand_as(a)
            return still if change is None else change(still)

        return hold


def _check(subject: Subject, path: Path) -> None:
    """Refuse a path whose places do not follow each other."""
    for p in (path.sender, *path.through, *path.around):
        subject.require(p)
    for here, there in pairwise((path.sender, *path.through)):
        if not subject.reaches(here, there):
            raise PlotError(
                f"Nothing of {here.name} arrives at {there.name}, which does not come after it in the forward pass: "
                f"there is no path {path.name}."
            )
    within = [m.name for m in path.around if m in path.through]
    if within:
        raise PlotError(f"The path {path.name} goes both through {within[0]} and around it.")


def _written(state: Tensor) -> Rewrite:
    return lambda _: state


def _added(gained: Tensor, then: Rewrite | None) -> Rewrite:
    """Add what has arrived to the current state, and then change it."""
    return lambda a: a + gained if then is None else then(a + gained)


def _one_variant(rewrite: Callable[[Tensor], Tensor]) -> Rewrite:
    """A rewrite of rows [rows, d] as one of the only variant."""
    return lambda a: rewrite(a[0]).unsqueeze(0)


def _of_rows(change: Rewrite, rows: int) -> Callable[[Tensor], Tensor]:
    """A change of the only variant as one of rows [rows, d], which must be as many as were prepared."""

    def changed(a: Tensor) -> Tensor:
        if len(a) != rows:
            raise PlotError(f"The path was followed in {rows} `base` rows, but the network is called with {len(a)}.")
        return change(a.unsqueeze(0))[0].to(a)

    return changed
