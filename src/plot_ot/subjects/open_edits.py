"""Edits that are open on live networks: which passes they change, and who may open one.

An edit belongs to the thread and task that opened it: a pass elsewhere runs as if it were not there. Networks are
changed while they are edited or recorded (hooks, evaluation mode), so one thread at a time may do that to a network.
Compiled networks forget hooks that came after compilation; they run eagerly as long as anything is open.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from plot_ot.errors import PlotError

_OWN_PASS = object()
_open: ContextVar[frozenset[object]] = ContextVar("plot_ot_open_edits", default=frozenset())
"""The edits that passes of this thread and task run under; `_OWN_PASS` among them inside `apart`."""


class OpenEdit:
    """An edit while it is open."""

    def __init__(self) -> None:
        self.ran_elsewhere = False
        """Whether the network also ran where the edit does not act: in another thread or task."""

    def acts(self) -> bool:
        """Whether the edit changes the pass that is running."""
        current = _open.get()
        if self in current:
            return True
        self.ran_elsewhere |= _OWN_PASS not in current
        return False


@contextlib.contextmanager
def apart() -> Iterator[None]:
    """Passes of our own, clean of the edits that are open on the live network."""
    before = _open.get()
    _open.set(frozenset({_OWN_PASS}))
    try:
        yield
    finally:
        _open.set(before)


@contextlib.contextmanager
def opened(network: object) -> Iterator[OpenEdit]:
    """An edit that is open on the network in this thread and task."""
    edit = OpenEdit()
    with held(network):
        _open.set(_open.get() | {edit})
        try:
            yield edit
        finally:
            _open.set(_open.get() - {edit})


# -- proof --------------------------------------------------------------------------------------------------------

Rewrites = Mapping[str, Callable[[Tensor], Tensor]]


@contextlib.contextmanager
def proven(
    rewrites: Rewrites, opening: Callable[[Rewrites], contextlib.AbstractContextManager[OpenEdit]]
) -> Iterator[None]:
    """Open an edit; when it closes without an error, refuse one that never happened at some place."""
    happened: set[str] = set()

    def noted(name: str, rewrite: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        def changed(activation: Tensor) -> Tensor:
            happened.add(name)
            return rewrite(activation)

        return changed

    with opening({name: noted(name, rewrite) for name, rewrite in rewrites.items()}) as edit:
        yield
    missed = [name for name in rewrites if name not in happened]
    if not missed:
        return
    if edit.ran_elsewhere:
        why = (
            "The model ran in another thread or task than the one that opened the handle, and an edit acts only where "
            "it was opened: open it there."
        )
    elif happened:
        why = f"The model ran by a forward path that reaches {', '.join(sorted(happened))} only."
    else:
        why = (
            "The model was not run while the handle was open, or not by its own forward pass: call the very model that "
            "the handle was opened on, not a copy, a part, or a scripted, exported or captured version of it."
        )
    raise PlotError(f"The edit never happened at {', '.join(missed)}. {why}")


# -- one thread at a time -----------------------------------------------------------------------------------------

_lock = threading.Lock()
_holders: dict[int, tuple[int, str, int]] = {}
"""By id of a network that is held: the thread's number and name, and how many times over."""
_stance: list[Any] = []
"""How compiled networks ran before the first network was held."""


@contextlib.contextmanager
def held(network: object) -> Iterator[None]:
    """The network is this thread's alone to record and to edit, and runs eagerly even if it was compiled."""
    _take(network)
    try:
        yield
    finally:
        _give_back(network)


def _take(network: object) -> None:
    me = threading.get_ident()
    with _lock:
        thread, name, times = _holders.get(id(network), (me, threading.current_thread().name, 0))
        if thread != me:
            raise PlotError(
                f"This {type(network).__name__} is being edited or recorded by thread '{name}': one thread at a time. "
                f"Take turns, or give every thread a copy of the network (copy.deepcopy) and a subject of its own."
            )
        if not _holders and "torch._dynamo" in sys.modules:  # nothing was compiled where it is not loaded
            _stance.append(torch.compiler.set_stance("force_eager"))
        _holders[id(network)] = (me, name, times + 1)


def _give_back(network: object) -> None:
    with _lock:
        thread, name, times = _holders.pop(id(network))
        if times > 1:
            _holders[id(network)] = (thread, name, times - 1)
        if not _holders and _stance:
            _stance.pop().__exit__(None, None, None)
