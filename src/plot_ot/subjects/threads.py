"""How many threads torch computes with: all that it has for large networks, one for small ones.

Small matrices are multiplied faster than threads can be woken and waited for, and on a busy machine the waiting can
take several times as long as the work. Large ones fill all cores.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from plot_ot.subjects.protocol import Subject

LARGE = 1 << 19
"""From so many weights in a block on (the matrices that one vector is multiplied with), more than one thread helps."""


def threads_that_help(subject: Subject) -> int:
    """Torch's own number of threads, or one where the network is small."""
    return torch.get_num_threads() if subject.shape(1).products >= LARGE else 1


@contextmanager
def enough_threads(subject: Subject) -> Iterator[None]:
    """While open, torch has as many threads as help with this network, never more than before; then as many as before.

    Torch knows one number of threads for the whole process, so this holds for whatever else computes meanwhile.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(threads_that_help(subject))
    try:
        yield
    finally:
        torch.set_num_threads(before)
