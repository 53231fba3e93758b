"""A Ray cluster of this machine alone that nobody else can look into, or one that was there before and is joined.

What Ray starts here keeps its sockets, logs and stored objects in a folder that only this user can enter (0700), and
asks for a token that only this user can read (0600). Both go when the cluster does.
"""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path

from plot_ot.engine.ray_worker import library
from plot_ot.errors import PlotError, warn

QUIET = {"task_events_report_interval_ms": 0, "enable_metrics_collection": False}
"""A cluster of this machine alone keeps no history of tasks and no metrics: there is nobody to look at them."""
TOKEN = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
"""Environment variables by which Ray is told of a token; a user who sets one of them has decided."""
_token: list[str] = []
"""This process's token: Ray reads it once and keeps it, so that clusters of one process share it."""


def connect(address: str | None, cpus: int | None) -> Callable[[], None]:
    """Join the cluster at an address (or at `RAY_ADDRESS`, saying so), or start one; returns how to leave it."""
    named = os.environ.get("RAY_ADDRESS")
    if not address and named:
        warn(
            f"Joining the Ray cluster at '{named}', as RAY_ADDRESS says: it will run this study's code and see its "
            f"data. Unset RAY_ADDRESS to start a cluster of this machine alone."
        )
    address = address or named
    try:
        return _join(address) if address else _start(cpus)
    except (OSError, RuntimeError, ValueError) as e:
        where = f"at '{address}'" if address else "on this machine"
        raise PlotError(
            f"There is no Ray cluster {where} that lets us in ({e}). Start one with `ray start --head`; if it asks "
            f"for a token, set RAY_AUTH_MODE=token here as on its nodes."
        ) from e


def _join(address: str) -> Callable[[], None]:
    ray = library()
    leave: Callable[[], None] = ray.shutdown
    _require_listener(address)
    ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    return leave


def _start(cpus: int | None) -> Callable[[], None]:
    ray, folder = library(loopback=True), _private_folder()
    before = {name: os.environ.get(name) for name in TOKEN}
    if not any(before.values()):
        path = folder / "token"
        _token[:] = _token or [secrets.token_hex(32)]
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(_token[0])
        os.environ["RAY_AUTH_TOKEN_PATH"] = str(path)  # Ray 2.59 and later ask for it by themselves

    def leave() -> None:
        try:
            ray.shutdown()
        finally:
            for name, value in before.items():
                os.environ.pop(name, None)
                if value is not None:
                    os.environ[name] = value
            shutil.rmtree(folder, ignore_errors=True)

    try:
        ray.init(
            address="local",
            num_cpus=cpus,
            _node_ip_address="127.0.0.1",
            _temp_dir=str(folder / "ray"),  # which Ray opens to everybody: the folder around it does not
            include_dashboard=False,
            log_to_driver=False,
            logging_level="ERROR",
            _system_config=QUIET,
        )
    except BaseException:
        leave()
        raise
    return leave


def _private_folder() -> Path:
    """A new folder that only this user can enter, of a short name: paths of sockets have 107 letters at most."""
    short = os.environ.get("RAY_TMPDIR") or ("/tmp" if Path("/tmp").is_dir() else None)  # noqa: S108 (mkdtemp is safe)
    return Path(tempfile.mkdtemp(prefix="plot-ray-", dir=short))  # mode 0700


def _require_listener(address: str) -> None:
    """Fail at once where nobody listens: Ray itself would go on trying for many minutes."""
    host, _, port = address.rpartition(":")
    if host and port.isdigit() and "/" not in host:
        socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
