"""The parts of a decoder place's name, `head_output.3.1@subject`, for formats that name layers and heads."""

from __future__ import annotations

import re
from dataclasses import dataclass

from plot_ot.errors import PlotError
from plot_ot.subjects import Place
from plot_ot.subjects.decoder.architecture import KINDS
from plot_ot.subjects.decoder.layout import ALL

_NAME = re.compile(rf"(?P<kind>{'|'.join(KINDS)})\.(?P<layer>\d+)(?:\.(?P<head>\d+))?(?:@(?P<position>.+))?")


@dataclass(frozen=True)
class PlaceName:
    """The parts of a place's name: kind, block, head and token; the last token has no name."""

    kind: str
    layer: int
    head: int | None
    position: str | None


def parse_place_name(place: Place) -> PlaceName:
    """Take a place's name apart; refuses places of other networks than language models."""
    found = _NAME.fullmatch(place.name)
    if found is None or (found["kind"] == "head_output") != (found["head"] is not None):
        raise PlotError(
            f"'{place.name}' is not a place of a language model; this format is for places such as block_output.3."
        )
    if found["position"] == ALL:
        raise PlotError(f"{place.name} is all tokens of a prompt at once; this format is for one token.")
    head = None if found["head"] is None else int(found["head"])
    return PlaceName(found["kind"], int(found["layer"]), head, found["position"])
