"""Places: the named activation vectors of a network."""

from __future__ import annotations

from dataclasses import dataclass


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
        """The name of the token it is at: what follows the @ in its name, else its index, else the last token's."""
        _, at, token = self.name.rpartition("@")
        if at:
            return token
        return "last token" if self.position in (None, -1) else f"token {self.position}"
