"""Prompts as a trie of tokens: what prompts have in common at their beginning is one path of nodes, and runs once.

Prompts are put into alphabetical order of their tokens. Then whatever a prompt shares with any prompt before it, it
shares with the one right before it, so that a pass over the next few prompts needs nothing of earlier passes but the
path of their last prompt. Every prompt *owns* the nodes that the prompts before it do not have; its last token is
always its own.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

WORTH_IT = 0.9
"""A trie is used if it has at most so many nodes per token of the prompts: reading paths takes time, too."""


class Trie:
    """Token ids [rows, tokens], padded on the left, as nodes that are numbered in the order in which they run."""

    def __init__(self, ids: Int[Tensor, "rows tokens"], real: Bool[Tensor, "rows tokens"]) -> None:
        lengths = real.sum(dim=1).numpy()
        longest = int(lengths.max(initial=0))
        padded, at = ids.numpy()[:, ids.shape[1] - longest :], np.arange(longest)
        inside = at >= longest - lengths[:, None]
        words = np.full_like(padded, -1)  # the same, padded on the right
        words[at < lengths[:, None]] = padded[inside]
        order = np.lexsort(words.T[::-1]) if longest else np.arange(len(ids))
        same = np.logical_and.accumulate(words[order[1:]] == words[order[:-1]], axis=1).sum(axis=1)
        shared = np.minimum(np.concatenate([[0], same])[: len(ids)], lengths[order] - 1)
        starts = np.concatenate([[0], np.cumsum(lengths[order] - shared)])
        paths, path = np.zeros(padded.shape, dtype=np.int64), np.zeros(longest, dtype=np.int64)
        for row, first, start, length in zip(order, shared, starts, lengths[order], strict=False):
            path[first:length] = start + np.arange(length - first)
            paths[row, longest - length :] = path[:length]
        token, depth = np.zeros((2, starts[-1]), dtype=np.int64)
        token[paths[inside]] = padded[inside]
        depth[paths[inside]] = (at - (longest - lengths[:, None]))[inside]
        self.lengths = torch.from_numpy(lengths)
        self.order = torch.from_numpy(order)
        """The rows in alphabetical order."""
        self.shared = torch.from_numpy(shared)
        """How many tokens each row, in that order, has in common with the row before it."""
        self.starts = torch.from_numpy(starts)
        """The first node that each row, in that order, owns; at the end the number of nodes."""
        self.rank = self.order.argsort()
        self.paths = torch.from_numpy(paths)
        """The nodes of every row's tokens [rows, longest], padded with zeros on the left."""
        self.inside = torch.from_numpy(inside)
        """Where paths are no padding."""
        self.token, self.depth = torch.from_numpy(token), torch.from_numpy(depth)
        """Every node's token, and how many come before it."""

    def __len__(self) -> int:
        return len(self.token)

    @property
    def is_worth_it(self) -> bool:
        """Whether nodes instead of prompts save something, also after one prompt was run twice to look at its masks."""
        return len(self) + 2 * self.paths.shape[1] <= WORTH_IT * int(self.lengths.sum())

    @property
    def running(self) -> int:
        """Tokens that run when the prompts are recorded."""
        return len(self) if self.is_worth_it else int(self.lengths.sum())

    def kept(self, bases: Int[Tensor, " bases"]) -> int:
        """Tokens whose keys and values are kept for these rows: nodes, or all but the last of pages of equal length."""
        if self.is_worth_it:
            return KeptNodes(self, bases, last=False).count
        return len(bases) * max(0, self.paths.shape[1] - 1)

    def batches(self, budget: int) -> Iterator[Int[Tensor, " batch"]]:
        """Rows in alphabetical order, so many at a time that they own at most so many nodes together."""
        at = 0
        while at < len(self.order):
            end = int(torch.searchsorted(self.starts, int(self.starts[at]) + budget, right=True)) - 1
            end = max(at + 1, end)
            yield self.order[at:end]
            at = end


class KeptNodes:
    """The nodes of a trie that some of its rows need later, numbered anew in the same order."""

    def __init__(self, trie: Trie, rows: Int[Tensor, " slots"], last: bool) -> None:
        """Without `last` the rows' last tokens are not needed."""
        paths, inside = trie.paths[rows], trie.inside[rows]
        if not last:
            inside[:, -1:] = False
        wanted = torch.zeros(len(trie), dtype=torch.bool)
        wanted[paths[inside]] = True
        number = wanted.cumsum(0) - 1
        self.count = int(wanted.sum())
        self.paths = torch.where(inside, number[paths], 0)
        """The rows' nodes in the new numbering [slots, longest], padded with zeros."""
        self._number, self._wanted = number, wanted

    def among(self, start: int, end: int) -> tuple[int, Int[Tensor, " some"] | slice]:
        """Of the nodes start..end of the trie: the new number of the first that is kept, and which are."""
        wanted = self._wanted[start:end]
        some = wanted.nonzero().squeeze(1)
        if not len(some):
            return 0, some
        return int(self._number[start:end][some[0]]), slice(None) if len(some) == len(wanted) else some
