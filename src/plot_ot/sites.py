"""Sites: sets of directions at places. A site family is the menu of one PLOT stage."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from plot_ot.edits import EditBatch, Frame
from plot_ot.errors import PlotError
from plot_ot.subjects import Place, Recording


@dataclass(frozen=True)
class Site:
    """s_j: some directions of the frame at a place."""

    name: str
    place: Place
    directions: tuple[int, ...]


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
        return list({s.place.name: s.place for s in self.sites}.values())

    def at(self, place: Place) -> list[int]:
        """Indices of the sites at a place."""
        return [j for j, s in enumerate(self.sites) if s.place.name == place.name]

    def indicator(self, place: Place) -> Float[Tensor, "sites r"]:
        """1 where a direction of the place's frame belongs to the site."""
        member = torch.zeros(len(self.sites), self.frames[place.name].rank)
        for j in self.at(place):
            member[j, list(self.sites[j].directions)] = 1.0
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
