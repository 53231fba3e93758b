"""Sites: sets of directions at places. A site family is the menu of one PLOT stage."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from plot_ot.edits import EditBatch, Frame
from plot_ot.errors import PlotError, unknown
from plot_ot.subjects import Place, Recording


@dataclass(frozen=True)
class Site:
    """s_j: some directions of the frame at a place, or of several places that are swapped together."""

    name: str
    place: Place
    """The site's place, or the first of several."""
    directions: tuple[int, ...]
    more: tuple[tuple[Place, tuple[int, ...]], ...] = ()
    """Further places and their directions, in forward order: a token's states in all blocks."""

    @property
    def parts(self) -> tuple[tuple[Place, tuple[int, ...]], ...]:
        """All places of the site with the directions taken there."""
        return ((self.place, self.directions), *self.more)

    @property
    def places(self) -> tuple[Place, ...]:
        """All places of the site."""
        return tuple(place for place, _ in self.parts)


@dataclass(frozen=True)
class SiteFamily:
    """Candidate sites s_1..s_n, with one frame per place."""

    sites: tuple[Site, ...]
    frames: Mapping[str, Frame]

    def __post_init__(self) -> None:
        if not self.sites:
            raise PlotError("A site family needs at least one site.")

    def __len__(self) -> int:
        return len(self.sites)

    @property
    def places(self) -> list[Place]:
        """The places with a site, in the order of their first site."""
        return list({p.name: p for s in self.sites for p in s.places}.values())

    def at(self, place: Place) -> list[int]:
        """Indices of the sites that touch a place."""
        return [j for j, s in enumerate(self.sites) if any(p.name == place.name for p in s.places)]

    def together(self) -> list[tuple[tuple[Place, ...], list[int]]]:
        """The sites by the places they touch: those of one group are resumed as one batch."""
        groups: dict[tuple[str, ...], tuple[tuple[Place, ...], list[int]]] = {}
        for j, s in enumerate(self.sites):
            groups.setdefault(tuple(p.name for p in s.places), (s.places, []))[1].append(j)
        return list(groups.values())

    def indicator(self, place: Place) -> Float[Tensor, "sites r"]:
        """1 where a direction of the place's frame belongs to the site."""
        member = torch.zeros(len(self.sites), self.frames[place.name].rank)
        for j in self.at(place):
            for part, directions in self.sites[j].parts:
                if part.name == place.name:
                    member[j, list(directions)] = 1.0
        return member

    def edits(self, weights: Float[Tensor, "variants sites"]) -> list[EditBatch]:
        """Gains g = Σ_j w_j 1[direction in site j] for every variant: overlapping sites add up (Appendix A.1)."""
        if weights.shape[1] != len(self.sites):
            raise PlotError(f"Site weights must be [variants, {len(self.sites)}]; found {tuple(weights.shape)}.")
        batches = []
        for place in self.places:
            columns = self.at(place)
            if bool((weights[:, columns] != 0).any()):
                gains = weights[:, columns] @ self.indicator(place)[columns].to(weights.dtype)
                batches.append(EditBatch(place, self.frames[place.name], gains))
        if not batches:  # nothing is edited: keep one place so that the variants still have a response
            place = self.places[0]
            gains = torch.zeros(len(weights), self.frames[place.name].rank, dtype=weights.dtype)
            batches.append(EditBatch(place, self.frames[place.name], gains))
        return batches


Menu = Callable[[Recording, Sequence[Place]], SiteFamily]
"""Makes the candidate sites of a stage at given places, from the fit recording."""


def whole_places(recording: Recording, places: Sequence[Place]) -> SiteFamily:
    """Each place as one site: the full-vector patch."""
    sites = [Site(p.name, p, tuple(range(p.width))) for p in places]
    return SiteFamily(tuple(sites), {p.name: Frame.identity(p.width) for p in places})


def tokens(recording: Recording, places: Sequence[Place]) -> SiteFamily:
    """Each token position as one site: its states at all the given places (blocks), swapped together."""
    by_token: dict[str, list[Place]] = {}
    for p in places:
        by_token.setdefault(p.token, []).append(p)
    parts = {token: [(p, tuple(range(p.width))) for p in at] for token, at in by_token.items()}
    sites = [Site(token, *first, tuple(more)) for token, (first, *more) in parts.items()]
    return SiteFamily(tuple(sites), {p.name: Frame.identity(p.width) for p in places})


def blocks(resolution: int) -> Menu:
    """Groups of `resolution` neighbouring coordinates; a shorter last block is kept."""
    if resolution < 1:
        raise PlotError(f"A block resolution must be at least 1; found {resolution}.")

    def menu(recording: Recording, places: Sequence[Place]) -> SiteFamily:
        sites = []
        for p in places:
            for start in range(0, p.width, resolution):
                end = min(start + resolution, p.width)
                name = f"{p.name}[{start}]" if end - start == 1 else f"{p.name}[{start}:{end}]"
                sites.append(Site(name, p, tuple(range(start, end))))
        return SiteFamily(tuple(sites), {p.name: Frame.identity(p.width) for p in places})

    return menu


neurons: Menu = blocks(1)
"""Every coordinate of every place as its own site."""


# -- PCA spans and subspaces of your own ----------------------------------------------------------------------

PCA_DATA = ("bases", "bases+sources")


def principal_frame(recording: Recording, place: Place, data: str = "bases") -> Frame:
    """Centred PCA of the distinct recorded activations at a place: an orthonormal basis, by falling variance.

    `data` names the activations: the pairs' `bases` (paper), or `bases+sources`. The rank is at most their number - 1;
    a place that is the same for all inputs, such as a token that has seen nothing yet, has one dead direction.
    """
    if data not in PCA_DATA:
        unknown("PCA data", data, PCA_DATA)
    rows = recording.base_rows if data == "bases" else torch.cat([recording.base_rows, recording.source_rows])
    a = recording.store.activations[place.name][rows.unique()].double()
    _, spread, directions = torch.linalg.svd(a - a.mean(dim=0), full_matrices=False)
    rank = max(1, int((spread > 1e-6 * spread[0].clamp(min=1e-300)).sum()))  # where nothing varies: a dead site
    return Frame.orthonormal(directions[:rank].T.contiguous().to(torch.get_default_dtype()), "pca")


def _pca(name: str, spans: Callable[[int], Sequence[tuple[int, int]]], data: str) -> Menu:
    """Sites that are spans [start, end) of principal components, the same rule at every place."""

    def menu(recording: Recording, places: Sequence[Place]) -> SiteFamily:
        frames = {p.name: principal_frame(recording, p, data) for p in places}
        sites = [
            Site(f"{p.name}.{name}[{start}:{end}]", p, tuple(range(start, end)))
            for p in places
            for start, end in spans(frames[p.name].rank)
        ]
        return SiteFamily(tuple(sites), frames)

    return menu


def pca_components(data: str = "bases") -> Menu:
    """Every principal component as its own site."""
    return _pca("pc", lambda rank: [(k, k + 1) for k in range(rank)], data)


def pca_prefixes(data: str = "bases") -> Menu:
    """The first 1, 2, 4, ... principal components, and all of them: nested sites (paper, Algorithm 3)."""

    def spans(rank: int) -> list[tuple[int, int]]:
        ends = [1 << k for k in range(rank.bit_length()) if 1 << k < rank]
        return [(0, end) for end in [*ends, rank]]

    return _pca("pc", spans, data)


def pca_bands(bands: int, data: str = "bases") -> Menu:
    """`bands` disjoint spans of equal width; the remainder goes to the last (paper, Algorithm 8)."""
    if bands < 1:
        raise PlotError(f"There must be at least one band; found {bands}.")

    def spans(rank: int) -> list[tuple[int, int]]:
        count = min(bands, rank)
        width = rank // count
        return [(k * width, rank if k == count - 1 else (k + 1) * width) for k in range(count)]

    return _pca(f"band{bands}", spans, data)


def subspaces(frames: Mapping[str, Frame], sites: Mapping[str, Mapping[str, Sequence[int]]]) -> Menu:
    """Sites of your own: per place a frame, and named sets of its directions."""

    def menu(recording: Recording, places: Sequence[Place]) -> SiteFamily:
        made = []
        for p in places:
            for name, directions in sites.get(p.name, {}).items():
                rank = frames[p.name].rank
                if not directions or min(directions) < 0 or max(directions) >= rank:
                    raise PlotError(
                        f"Site '{name}' at {p.name} needs directions in 0..{rank - 1}; found {list(directions)}."
                    )
                made.append(Site(f"{p.name}.{name}", p, tuple(directions)))
        return SiteFamily(tuple(made), {p.name: frames[p.name] for p in places if p.name in frames})

    return menu
