"""A language model's study without plot-ot: plain forwards, and DAS with pyvene. Nothing here imports plot_ot."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from baselines import Job
from recurrent_baselines import Adam, Tangent, Training, _subspace_swap


@dataclass(frozen=True)
class Prompts:
    """Token ids and attention mask [rows, tokens], padded on the left."""

    ids: Tensor
    mask: Tensor

    @property
    def lengths(self) -> Tensor:
        return self.mask.sum(dim=1)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, rows: Tensor) -> Prompts:
        """Some rows, as long as the longest of them."""
        longest = int(self.lengths[rows].max())
        return Prompts(self.ids[rows, -longest:], self.mask[rows, -longest:])

    def arguments(self) -> dict[str, Any]:
        """What a Hugging Face model is called with for its logits at the last token only."""
        positions = (self.mask.cumsum(dim=1) - 1).clamp(min=0)
        return {"input_ids": self.ids, "attention_mask": self.mask, "position_ids": positions, "logits_to_keep": 1}

    def batches(self, tokens: int) -> Iterator[Tensor]:
        """Rows in order of length, as many at a time as stay within a number of tokens."""
        order, at = torch.argsort(self.lengths, stable=True), 0
        while at < len(order):
            count = 1
            while at + count < len(order) and (count + 1) * int(self.lengths[order[at + count]]) <= tokens:
                count += 1
            yield order[at : at + count]
            at += count


@torch.no_grad()
def plain_forward(model: nn.Module, prompts: Prompts, tokens: int) -> Tensor:
    """The next token after every prompt: one pass over each, in batches of similar length."""
    found = torch.empty(len(prompts), dtype=torch.long)
    for rows in prompts.batches(tokens):
        found[rows] = model(**prompts[rows].arguments(), use_cache=False).logits[:, -1].argmax(dim=1)
    return found


# -- DAS with pyvene ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TextPairs:
    """Pairs of prompts, the tokens that spell each answer, and the counterfactual answer per variable."""

    base: Prompts
    source: Prompts
    answers: Sequence[Sequence[int]]
    labels: Mapping[str, Tensor]

    def __len__(self) -> int:
        return len(self.base)


@dataclass(frozen=True)
class PyveneFit:
    """A rotation that pyvene trained; seconds of the steps alone, without setting up."""

    job: Job
    directions: Tensor
    steps: int
    seconds: float
    cpu_seconds: float
    forward: Callable[[Tensor], Tensor]
    """The answers' logits of some pairs under the rotation."""


def das_with_pyvene(
    model: nn.Module, blocks: str, width: int, pairs: TextPairs, job: Job, training: Training
) -> PyveneFit:
    """pyvene with `use_fast`: its `RotatedSpaceIntervention` for Adam, a plain subspace swap for `tangent`.

    `blocks` is the name of the list of blocks in the model, whose weights must be frozen. Both prompts run with logits
    at the last token only.
    """
    import pyvene as pv

    logging.getLogger().setLevel(logging.ERROR)  # pyvene logs a warning per model
    if training.optimiser == "tangent":
        swap = _subspace_swap(torch.linalg.qr(torch.randn(width, job.k))[0])
        optimiser, directions = Tangent(swap.q, training.rate), lambda: swap.q
    else:
        swap = pv.RotatedSpaceIntervention(embed_dim=width)
        swap.set_interchange_dim(job.k)
        optimiser = Adam(swap.parameters(), lr=training.rate)
        directions = lambda: swap.rotate_layer.weight[:, : job.k]  # noqa: E731
    where = {"component": f"{blocks}[{job.layer}].output", "unit": "pos", "intervention": swap}
    intervenable = pv.IntervenableModel(where, model, use_fast=True)
    tokens, sizes = [t for group in pairs.answers for t in group], [len(group) for group in pairs.answers]

    def forward(index: Tensor) -> Tensor:
        base, source = pairs.base[index].arguments(), pairs.source[index].arguments()
        last = source["input_ids"].shape[1] - 1, base["input_ids"].shape[1] - 1
        logits = intervenable(base, [source], {"sources->base": last})[1].logits[:, -1, tokens]
        return torch.stack([group.amax(dim=1) for group in logits.split(sizes, dim=1)], dim=1)

    labels, steps = pairs.labels[job.variable], 0
    wall, cpu = time.perf_counter(), time.process_time()
    for epoch in range(1, training.epochs + 1):
        for index in torch.randperm(len(pairs)).split(training.batch):
            loss = F.cross_entropy(forward(index), labels[index])
            optimiser.zero_grad()
            loss.backward()
            optimiser.step(min(1.0, epoch / training.horizon))
            steps += 1
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return PyveneFit(job, directions().detach().clone(), steps, wall, cpu, forward)
