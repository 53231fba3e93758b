"""Recorded vectors by place: in memory, or where they do not fit, in a file that is read one place at a time."""

from __future__ import annotations

import os
import tempfile
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from plot_ot.files.safe_reading import read_at, write_at
from plot_ot.subjects.decoder.pages import buffer


class Vectors(dict[str, Tensor]):
    """Vectors [rows, d] in float32 by name."""

    def __init__(self, rows: int, widths: Mapping[str, int], device: torch.device) -> None:
        super().__init__({name: torch.empty(rows, width, device=device) for name, width in widths.items()})

    def write(self, name: str, rows: Int[Tensor, " some"], vectors: Float[Tensor, "some d"]) -> None:
        """Keep the vectors of some rows."""
        kept = self[name]
        kept[rows] = vectors.to(kept.device)


class Spilled(Mapping[str, Tensor]):
    """Vectors [rows, d] in float32 by name, in a temporary file that goes when nobody needs it any more.

    Whoever looks at a name gets all its rows; the last one looked at stays in memory, because work goes on at one place
    for a while.
    """

    def __init__(self, rows: int, widths: Mapping[str, int], device: torch.device) -> None:
        self.rows, self.widths, self.device = rows, dict(widths), device
        self._starts, end = {}, 0
        for name, width in self.widths.items():
            self._starts[name], end = end, end + 4 * rows * width
        self.bytes = end
        self._file, path = tempfile.mkstemp(prefix="plot-ot-vectors-")
        weakref.finalize(self, os.close, self._file)
        os.unlink(path)  # it lives as long as it is open, and no crash leaves it behind
        os.truncate(self._file, end)
        self._last: tuple[str, Tensor] | None = None

    def write(self, name: str, rows: Int[Tensor, " some"], vectors: Float[Tensor, "some d"]) -> None:
        """Keep the vectors of some rows."""
        each = 4 * self.widths[name]
        for row, vector in zip(rows.tolist(), vectors.cpu().contiguous().numpy(), strict=True):
            write_at(self._file, vector.data.cast("B"), self._starts[name] + row * each)
        self._last = None

    def __getitem__(self, name: str) -> Float[Tensor, "rows d"]:
        if self._last is None or self._last[0] != name:
            self._last = None  # never two at once
            found = buffer((self.rows, self.widths[name]), torch.float32, self.device)
            self._read(name, found.view(torch.uint8).flatten().numpy().data)
            self._last = name, found.to(self.device, non_blocking=True)
        return self._last[1]

    def _read(self, name: str, into: memoryview) -> None:
        read_at(self._file, into, self._starts[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self.widths)

    def __len__(self) -> int:
        return len(self.widths)


class Joined(Mapping[str, Tensor]):
    """Vectors of several recordings, one after the other, put together when they are looked at."""

    def __init__(self, parts: Sequence[Mapping[str, Tensor]], rows: Int[Tensor, " rows"] | None = None) -> None:
        self.parts, self.rows = tuple(parts), rows
        """The parts, and which of all their rows these are, in which order (default: all, as they come)."""
        self._last: tuple[str, Tensor] | None = None

    def __getitem__(self, name: str) -> Shaped[Tensor, "rows ..."]:
        if self._last is None or self._last[0] != name:
            self._last = None
            found = torch.cat([part[name] for part in self.parts])
            self._last = name, found if self.rows is None else found[self.rows.to(found.device)]
        return self._last[1]

    def __iter__(self) -> Iterator[str]:
        return iter(self.parts[0])

    def __len__(self) -> int:
        return len(self.parts[0])


class Aliased(Mapping[str, Tensor]):
    """Vectors that also go by other names, without being kept twice; it lists those that are kept."""

    def __init__(self, kept: Mapping[str, Tensor], aliases: Mapping[str, str]) -> None:
        self.kept, self.aliases = kept, aliases

    def __getitem__(self, name: str) -> Shaped[Tensor, "rows ..."]:
        return self.kept[self.aliases.get(name, name)]

    def __iter__(self) -> Iterator[str]:
        return iter(self.kept)

    def __len__(self) -> int:
        return len(self.kept)


def together(parts: Sequence[Mapping[str, Tensor]], rows: Int[Tensor, " rows"] | None = None) -> Mapping[str, Tensor]:
    """The vectors of several recordings as one, or some rows of it; what is in a file stays there."""
    if isinstance(parts[0], Aliased):
        kept = [p.kept for p in parts if isinstance(p, Aliased)]
        return Aliased(together(kept, rows), parts[0].aliases)
    whole = Joined(parts, rows)
    return whole if any(isinstance(p, (Spilled, Joined)) for p in parts) else {name: whole[name] for name in whole}


def held_bytes(vectors: Mapping[str, Tensor]) -> int:
    """Bytes in memory; what is in a file takes none."""
    vectors = vectors.kept if isinstance(vectors, Aliased) else vectors
    return sum(t.nbytes for t in vectors.values()) if isinstance(vectors, dict) else 0


def on_disk(vectors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """The same vectors in a file, where they are in memory and of the type that files hold."""
    if isinstance(vectors, Aliased):
        return Aliased(on_disk(vectors.kept), vectors.aliases)
    if not isinstance(vectors, dict) or any(t.dtype != torch.float32 for t in vectors.values()):
        return vectors
    like = next(iter(vectors.values()))
    spilled = Spilled(len(like), {name: t.shape[1] for name, t in vectors.items()}, like.device)
    for name, t in vectors.items():
        spilled.write(name, torch.arange(len(t)), t)
    return spilled


def changed(vectors: Mapping[str, Tensor], change: Callable[[Tensor], Tensor]) -> Mapping[str, Tensor]:
    """What `change` makes of every place's vectors."""
    if isinstance(vectors, Aliased):
        return Aliased(changed(vectors.kept, change), vectors.aliases)
    return {name: change(t) for name, t in vectors.items()}
