"""Limits of memory: work that does not fit is halved, and what did not fit once is not tried again."""

from __future__ import annotations

import contextlib
import ctypes
import gc
from collections.abc import Callable, Iterator
from typing import TypeVar

import torch
from torch import Tensor

from plot_ot.errors import PlotError

T = TypeVar("T")

_WORDS = ("out of memory", "can't allocate memory", "not enough memory", "cannot allocate memory")


class OutOfMemory(PlotError):
    """Not even the smallest piece of work fits into memory."""

    @classmethod
    def for_one(cls, what: str, e: BaseException) -> OutOfMemory:
        """Not even one input, response, ..., as that error says."""
        return cls(
            f"Not even one {what} fits into memory ({_said(e)}). Free some, take a smaller network or type, or another "
            f"machine."
        )


class MemoryLimits:
    """How much of a subject's work fits at once, as far as running out of memory has shown.

    A subject and its copies share one; where it is sent to another process, it starts anew.
    """

    def __init__(self) -> None:
        self.halvings: list[str] = []
        """What was cut smaller because memory ran out, in words."""
        self._most: dict[str, int] = {}

    def __reduce__(self) -> tuple[type[MemoryLimits], tuple[()]]:
        return MemoryLimits, ()

    def attempt(self, run: Callable[[], T], size: int, what: str) -> T | None:
        """What `run` gives, which works on so many inputs or responses; None where they have to be halved."""
        if size > max(1, self._most.get(what, size)):
            return None
        try:
            return run()
        except Exception as e:
            if not is_out_of_memory(e):
                raise
            if size <= 1:
                raise OutOfMemory.for_one(what, e) from e
            said = _said(e)
        clear()
        self._most[what] = size // 2
        self.halvings.append(f"chunk halved from {size} to {size // 2} {what}s ({said})")
        return None

    def pieces(self, run: Callable[[Tensor], T], rows: Tensor, what: str = "input") -> Iterator[T]:
        """`run` of all rows, or of halves of them if memory runs out, or of halves of these if it does again, ..."""
        done = self.attempt(lambda: run(rows), len(rows), what)
        if done is not None:
            yield done
            return
        for half in rows.tensor_split(2):
            yield from self.pieces(run, half, what)


def _said(e: BaseException) -> str:
    return (str(e).splitlines() or [type(e).__name__])[0][:120]


def sent(tensor: Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """A tensor on a device. What goes from the CPU to a GPU is pinned, so that nobody waits until it has arrived."""
    plain = tensor.device.type != "cpu" or device.type != "cuda" or tensor.requires_grad or not tensor.numel()
    return tensor.to(device, dtype) if plain else tensor.pin_memory().to(device, dtype, non_blocking=True)


def clear() -> None:
    """Let go of what a failed attempt held, before the next."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def is_out_of_memory(e: BaseException) -> bool:
    """Whether an error says that memory, the CPU's or an accelerator's, has run out."""
    if isinstance(e, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(e, RuntimeError) and any(words in str(e).lower() for words in _WORDS)


SPARE = 256 << 20
"""Budgets of fewer bytes feel what the C library keeps: glibc learns to keep up to 64 MB, and holes besides."""


def give_back(memory: int) -> None:
    """Ask the C library to return what is free in its heap, where a budget of so many bytes would feel it.

    It is asked this once: nothing about how this process allocates is set.
    """
    if memory < SPARE:
        with contextlib.suppress(OSError, AttributeError):  # other C libraries have nothing of the kind
            ctypes.CDLL(None).malloc_trim(0)
