"""Keys and values of one layer, in memory or in a file: a page per prompt, or a line per node of a trie."""

from __future__ import annotations

import os
import tempfile
import weakref
from itertools import pairwise
from pathlib import Path

import torch
from jaxtyping import Int, Shaped
from torch import Tensor

from plot_ot.files.safe_reading import read_at, write_at
from plot_ot.subjects.memory import sent


class Pages:
    """One layer's [slots, groups, tokens, width] numbers, in memory or, given a folder, in a file."""

    def __init__(self, shape: tuple[int, ...], like: Tensor, folder: Path | None, key_width: int) -> None:
        self.shape, self.dtype, self.device, self.key_width = shape, like.dtype, like.device, key_width
        self.pair_bytes = torch.Size(shape[1:]).numel() * like.element_size()
        self.bytes = shape[0] * self.pair_bytes
        self._kept = like.new_zeros(shape if folder is None else 0)
        self._file = None if folder is None else _opened(self, folder)
        if self._file is not None:
            os.truncate(self._file, self.bytes)

    def write(self, slots: Tensor, page: Tensor) -> None:
        """Keep a batch's pages; they end at the last column."""
        start = self.shape[2] - page.shape[2]
        if self._file is None:
            self._kept[slots.to(page.device), :, start:] = page
            return
        whole = page.new_zeros(len(page), *self.shape[1:])
        whole[:, :, start:] = page
        for slot, row in zip(slots.tolist(), whole.cpu(), strict=True):
            write_at(self._file, _raw(row), slot * self.pair_bytes)

    def read(self, slots: Tensor, columns: slice) -> tuple[Tensor, Tensor]:
        """Keys and values of some slots; those of slots in a row are not copied."""
        if self._file is not None:
            page = buffer((len(slots), *self.shape[1:]), self.dtype, self.device)
            for row, slot in zip(page, slots.tolist(), strict=True):
                read_at(self._file, _raw(row), slot * self.pair_bytes)
            page = page.to(self.device, non_blocking=True)[:, :, columns]
        elif torch.equal(slots, torch.arange(int(slots[0]), int(slots[0]) + len(slots))):
            page = self._kept[int(slots[0]) : int(slots[0]) + len(slots), :, columns]
        else:
            page = self._kept[:, :, columns].index_select(0, slots.to(self.device))
        return page[..., : self.key_width], page[..., self.key_width :]


class NodePages:
    """One layer's [nodes, groups, width] numbers, in memory or, given a folder, in a file; prompts share nodes."""

    def __init__(self, shape: tuple[int, ...], like: Tensor, folder: Path | None, key_width: int, tokens: int) -> None:
        self.shape, self.dtype, self.device, self.key_width = shape, like.dtype, like.device, key_width
        self._node = torch.Size(shape[1:]).numel() * like.element_size()
        self.pair_bytes = tokens * self._node
        self.bytes = shape[0] * self._node
        self._kept = like.new_zeros(shape if folder is None else 0)
        self._file = None if folder is None else _opened(self, folder)

    def write(self, first: int, lines: Shaped[Tensor, "some groups width"]) -> None:
        """Keep the lines of nodes in a row."""
        if self._file is None:
            self._kept[first : first + len(lines)] = lines
        elif len(lines):
            write_at(self._file, _raw(lines.cpu()), first * self._node)

    def read(self, nodes: Int[Tensor, "pairs tokens"]) -> tuple[Tensor, Tensor]:
        """Keys and values [pairs, groups, tokens, width] along some paths."""
        page = along(self._kept, nodes) if self._file is None else self._from_file(self._file, nodes)
        return page[..., : self.key_width], page[..., self.key_width :]

    def _from_file(self, file: int, nodes: Int[Tensor, "pairs tokens"]) -> Tensor:
        lines = buffer((*nodes.shape, *self.shape[1:]), self.dtype, self.device)
        for line, path in zip(lines, nodes, strict=True):
            cuts = [0, *((path.diff() != 1).nonzero().squeeze(1) + 1).tolist(), len(path)]
            for start, end in pairwise(cuts):  # nodes in a row lie in a row
                if end > start:
                    read_at(file, _raw(line[start:end]), int(path[start]) * self._node)
        return lines.to(self.device, non_blocking=True).transpose(1, 2).contiguous()


def buffer(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Room for what is read from a file on its way to a device; pinned where a GPU can then fetch it by itself."""
    return torch.empty(shape, dtype=dtype, pin_memory=device.type == "cuda")


def along(lines: Shaped[Tensor, "nodes groups width"], nodes: Int[Tensor, "pairs tokens"]) -> Tensor:
    """Lines of nodes along some paths, as one copy: [pairs, groups, tokens, width], groups before tokens."""
    groups = lines.shape[1]
    index = sent(nodes, lines.device)[:, None] * groups + torch.arange(groups, device=lines.device)[:, None]
    return lines.flatten(0, 1).index_select(0, index.flatten()).view(*index.shape, lines.shape[2])


def _opened(owner: object, folder: Path) -> int:
    """An empty file that is closed when its owner is gone."""
    file, _ = tempfile.mkstemp(dir=folder)
    weakref.finalize(owner, os.close, file)
    return file


def _raw(row: Tensor) -> memoryview:
    return row.flatten().view(torch.uint8).numpy().data
