"""A subject seen another way: the same network, recorded and cut as before, with other places."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from plot_ot.subjects.memory import MemoryLimits
from plot_ot.subjects.protocol import Store, Subject


class SubjectView(Subject):
    """All that a network is apart from its places, asked of the subject `inner`.

    Who derives from it says what its places are, and how they are recorded, resumed and edited live.
    """

    def __init__(self, inner: Subject) -> None:
        self.inner = inner
        self.memory, self.cache, self.reading = inner.memory, inner.cache, inner.reading
        self.differentiable, self.recorder_resumes = inner.differentiable, inner.recorder_resumes
        self.language, self.whole_passes = inner.language, inner.whole_passes

    # -- the network ---------------------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        return self.inner.device

    def weights(self) -> Mapping[str, Tensor]:
        return self.inner.weights()

    def structure(self) -> str:
        return self.inner.structure()

    def identity(self) -> str:
        """The network's own: a handle belongs to a network, however it is looked at."""
        return self.inner.identity()

    def outputs_of(self, store: Store) -> Float[Tensor, "inputs ..."]:
        return self.inner.outputs_of(store)

    def encoded(self, inputs: Tensor) -> tuple[Int[Tensor, "rows tokens"], Bool[Tensor, "rows tokens"]] | None:
        return self.inner.encoded(inputs)

    def lengths(self, inputs: Tensor) -> Int[Tensor, " rows"]:
        return self.inner.lengths(inputs)

    def forget(self) -> None:
        self.inner.forget()

    # -- what it costs -------------------------------------------------------------------------------------------

    @property
    def limits(self) -> MemoryLimits:
        """What running out of memory has shown about the network."""
        return self.inner.limits

    @property
    def parameters(self) -> int:
        return self.inner.parameters

    @property
    def beginnings(self) -> tuple[int, ...]:
        return self.inner.beginnings

    @property
    def response_bytes(self) -> int:
        return self.inner.response_bytes

    @property
    def responses_per_batch(self) -> int:
        return self.inner.responses_per_batch

    def recorded_at_once(self, device: str) -> int:
        return self.inner.recorded_at_once(device)

    def resumed_at_once(self, device: str) -> int:
        return self.inner.resumed_at_once(device)

    def pairs_at_once(self, prefix_bytes: float) -> float:
        return self.inner.pairs_at_once(prefix_bytes)

    def recomputes(self, graph_bytes: float) -> bool:
        return self.inner.recomputes(graph_bytes)

    @property
    def vectors_in_memory(self) -> int | None:
        return self.inner.vectors_in_memory

    def keys_in_memory(self, beside: float) -> float:
        return self.inner.keys_in_memory(beside)
