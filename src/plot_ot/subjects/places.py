"""Places: the named activation vectors of a network."""

from __future__ import annotations

from dataclasses import dataclass

ARROW = "->"
"""Stands between the places of a path: `layer1->layer3`."""


@dataclass(frozen=True)
class Place:
    """A named activation vector; a subject lists its places in forward order."""

    name: str
    width: int
    layer: int
    position: int | None = None
    """Index of the token or timestep, where the activation has one."""

    @property
    def token(self) -> str:
        """The name of the token it is at: what follows the @ in its name, else its index, else the last token's.

        A path is at the token where it begins.
        """
        _, at, token = self.name.partition(ARROW)[0].rpartition("@")
        if at:
            return token
        return "last token" if self.position in (None, -1) else f"token {self.position}"

    @property
    def way(self) -> str:
        """Where a path leads, by its name; empty for a place that is none."""
        return self.name.partition(ARROW)[2]
