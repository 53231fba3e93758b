"""Attention heads as a site family: one coupling over the heads of chosen layers."""

from __future__ import annotations

from collections.abc import Sequence

from plot_ot.edits import Frame
from plot_ot.errors import PlotError
from plot_ot.sites.families import Menu, Site, SiteFamily
from plot_ot.subjects import Place, Recording

KIND = "head_output."


def heads(layers: Sequence[int] | None = None, *, together: int = 1) -> Menu:
    """Every attention head of the chosen layers (all by default) as one site: its output before the projection.

    The subject must show `head_output` places (`DecoderSubject(..., kinds=("head_output",))`). `together` neighbouring
    heads of a layer and token make one site: with grouped queries, those that share keys and values.
    """
    if together < 1:
        raise PlotError(f"At least one head makes a site; found together = {together}.")

    def menu(recording: Recording, places: Sequence[Place]) -> SiteFamily:
        shown = [p for p in places if p.name.startswith(KIND)]
        if not shown:
            raise PlotError(
                f"There are no attention heads among the places {', '.join(p.name for p in places)}. "
                f"Make the subject with kinds=('head_output',)."
            )
        wanted = {p.layer for p in shown} if layers is None else set(layers)
        if not wanted or not wanted <= {p.layer for p in shown}:
            there = sorted({p.layer for p in shown})
            raise PlotError(f"Heads are open in layers {there}; found layers {sorted(wanted)}.")
        by_token: dict[tuple[int, str, str], list[Place]] = {}
        for p in shown:
            if p.layer in wanted:
                by_token.setdefault((p.layer, p.token, p.way), []).append(p)
        sites = []
        for row in by_token.values():
            if len(row) % together:
                raise PlotError(f"Layer {row[0].layer} has {len(row)} open heads, which do not part into {together}s.")
            for at in range(0, len(row), together):
                sites.append(_site(row[at : at + together]))
        return SiteFamily(tuple(sites), {p.name: Frame.identity(p.width) for p in shown if p.layer in wanted})

    return menu


def _site(places: Sequence[Place]) -> Site:
    (first, directions), *more = [(p, tuple(range(p.width))) for p in places]
    return Site("+".join(p.name for p in places), first, directions, tuple(more))
