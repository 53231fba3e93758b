"""How a language model's work is cut to its memory budget, whether its weights are loaded or only planned with."""

from __future__ import annotations

from abc import abstractmethod

from plot_ot.subjects.protocol import Subject
from plot_ot.subjects.shape import Shape

RECORDED_AT_ONCE = {"cpu": 1 << 10}
"""Tokens of one recorded batch, on devices where more are not faster."""
RESUMED_AT_ONCE = {"cpu": 1 << 9}
"""Tokens that are resumed together, on devices where more are not faster."""
LEAST_AT_ONCE = 256
"""Tokens that run together however little memory there is: with fewer, reading the weights is what takes time."""


class PromptSubject(Subject):
    """A subject whose inputs are prompts: what it holds and runs at once follows from its shape and its memory.

    A quarter of the memory is for recorded vectors, before they go to a file; three quarters are for vectors, keys and
    values together; what is resumed has the last quarter.
    """

    language = True
    recorder_resumes = True

    @property
    @abstractmethod
    def prompt_shape(self) -> Shape:
        """What a token costs, seen from the residual after every block."""

    @property
    @abstractmethod
    def response_columns(self) -> int:
        """Outputs of one response."""

    @property
    def edited_tokens(self) -> int:
        """Tokens whose vectors an edit may hold together."""
        return 1

    def shape(self, outputs: int) -> Shape:
        return self.prompt_shape

    @property
    def response_bytes(self) -> int:
        # the edited activation and what makes it, the residual on its way, the outputs
        return 4 * (6 * self.prompt_shape.hidden * self.edited_tokens + 2 * self.response_columns)

    @property
    def responses_per_batch(self) -> int:
        return max(1, min(1 << 14, self.memory // 4 // self.response_bytes))

    def recorded_at_once(self, device: str) -> int:
        return min(RECORDED_AT_ONCE.get(device, 1 << 14), self._fitting)

    def resumed_at_once(self, device: str) -> int:
        return min(RESUMED_AT_ONCE.get(device, 1 << 13), self._fitting)

    @property
    def _fitting(self) -> int:
        return max(LEAST_AT_ONCE, self.memory // 4 // self.prompt_shape.token_bytes)

    def pairs_at_once(self, prefix_bytes: float) -> float:
        return max(1, self.memory // 8 // prefix_bytes) if prefix_bytes else super().pairs_at_once(prefix_bytes)

    def recomputes(self, graph_bytes: float) -> bool:
        return graph_bytes > self.memory // 2

    @property
    def vectors_in_memory(self) -> int:
        return self.memory // 4

    def keys_in_memory(self, beside: float) -> float:
        return self.memory * 3 / 4 - beside

    def cache_bytes(self, rows: int, tokens: int) -> int:
        """Bytes of keys and values of so many base prompts of so many tokens."""
        return rows * (tokens - 1) * self.prompt_shape.blocks * self.prompt_shape.key_bytes
