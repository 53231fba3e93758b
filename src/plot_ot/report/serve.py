"""A look at the runs of a folder in the browser, while they are going on: a server for this machine only.

It listens on the loopback address, answers requests addressed to it by that name only (so that no web page can reach it
through a name of its own), reads and never writes. What it serves is looked up among the runs it found: no part of a
request becomes part of a path.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from statistics import fmean, pstdev
from threading import Lock
from urllib.parse import quote, urlsplit

from plot_ot.errors import PlotError
from plot_ot.files.locks import is_held
from plot_ot.files.run_reading import Reading, read_run
from plot_ot.files.safe_reading import read_bytes
from plot_ot.files.unit_files import units_in
from plot_ot.files.writing import Json, to_json
from plot_ot.report import summary
from plot_ot.report.page import index_page, run_page
from plot_ot.report.tables import average_by_seed

HOST = "127.0.0.1"
DEPTH = 3
"""How far below the folder runs are looked for."""
QUIET = 900.0
"""Seconds without a finished unit after which an unfinished run counts as stopped."""
KINDS = {".png": "image/png", ".pdf": "application/pdf", ".svg": "image/svg+xml"}
POLICY = "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'; base-uri 'none'; sandbox"
"""Of everything but our own pages, which carry their own: it may show itself, and run, load or reach nothing."""
PAGE_POLICY = "frame-ancestors 'none'; base-uri 'none'; form-action 'none'; object-src 'none'"
"""Of our own pages, beside the policy in them."""
PATIENCE = 30.0
"""Seconds that a request may take to arrive."""
MOST_FIGURE = 64 << 20
"""Bytes of the largest figure that is served."""


@dataclass(frozen=True)
class Found:
    """A run, and what it looked like when it was last read."""

    path: Path
    stamp: tuple[float, ...]
    row: Json


class Shelf:
    """The runs of a folder, read again only where something changed."""

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            raise PlotError(f"There is no folder {folder} to look at. Give the folder your runs are in.")
        self.folder = folder
        self._found: dict[str, Found] = {}
        self._lock = Lock()

    def runs(self) -> dict[str, Found]:
        """Every run by the address it is served at, newest first."""
        with self._lock:
            kept = {}
            for path in _run_paths(self.folder):
                relative = path.relative_to(self.folder).as_posix()
                key = quote("here" if relative == "." else relative, safe="", errors="surrogatepass")
                stamp = _stamp(path)
                old = self._found.get(key)
                kept[key] = old if old and old.stamp == stamp else Found(path, stamp, _row(path, key))
            self._found = kept
        order = sorted(kept.items(), key=lambda kv: str(kv[1].row["started"]), reverse=True)
        return {k: Found(f.path, f.stamp, {**f.row, "state": _state(f)}) for k, f in order}


def _run_paths(folder: Path) -> Iterator[Path]:
    """Folders with a manifest, not looking inside runs."""

    def walk(path: Path, depth: int) -> Iterator[Path]:
        if _is_file(path / "manifest.json"):
            yield path
        elif depth:
            for child in _folders(path):
                yield from walk(child, depth - 1)

    yield from walk(folder, DEPTH)


def _folders(path: Path) -> list[Path]:
    """The folders in a folder: no links, nothing hidden, and nothing of what cannot be read."""
    try:
        return sorted(Path(e.path) for e in os.scandir(path) if not e.name.startswith(".") and _is_folder(e))
    except OSError:
        return []


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir(follow_symlinks=False)
    except OSError:
        return False


def _is_file(path: Path) -> bool:
    try:
        return path.is_file() and not path.is_symlink()
    except OSError:
        return False


def _stamp(path: Path) -> tuple[float, ...]:
    """What changes when a run does: its files' times and sizes, and those of its finished units."""
    own = [path / "manifest.json", path / "results.json", path / "couplings.json"]
    units = [u for _, u in units_in(path)]
    return tuple(x for p in (*own, *units) for x in _time_and_size(p))


def _time_and_size(path: Path) -> tuple[float, float]:
    try:
        found = path.stat()
    except OSError:
        return 0.0, 0.0
    return found.st_mtime, float(found.st_size)


def _row(path: Path, key: str) -> Json:
    """A line of the index."""
    try:
        reading = read_run(path)
        best = summary.best_method(reading)
        values = list(average_by_seed(reading.results, best).values()) if best else []
    except Exception as e:  # whatever is wrong with one run, the others are shown
        return _line(path, key) | {"problem": str(e) if isinstance(e, PlotError) else f"{type(e).__name__}: {e}"}
    return _line(path, key) | {
        "task": reading.results.get("task") or reading.config.get("task"),
        "model": str(reading.config.get("model") or ", ".join(reading.distinct("subject", "records")) or ""),
        "started": reading.manifest.get("started") or "",
        "best": best,
        "accuracy": fmean(values) if values else None,
        "sd": pstdev(values) if len(values) > 1 else None,
        "seeds": len(values),
        "units": reading.units,
        "expected": _expected(reading),
        "finished": bool(reading.manifest.get("finished")) or (reading.compiled and bool(reading.results["records"])),
        "problem": "; ".join(reading.problems[:2]),
    }


def _line(path: Path, key: str) -> Json:
    empty: Json = dict.fromkeys(("task", "model", "best", "accuracy", "sd"))
    return (
        empty
        | {"key": key, "name": path.resolve().name, "started": "", "seeds": 0, "units": 0, "expected": 0}
        | {
            "finished": False,
            "problem": "",
        }
    )


def _expected(reading: Reading) -> int:
    """Units of work that were asked for: per seed the controls and every method."""
    seeds, methods = (reading.config.get(k) for k in ("seeds", "methods"))
    return len(seeds) * (1 + len(methods)) if isinstance(seeds, list) and isinstance(methods, list) else 0


def _state(found: Found) -> str:
    if found.row["finished"]:
        return "finished"
    held = is_held(found.path)
    if held is None:  # this system cannot tell: go by when it last wrote something
        held = time.time() - max(found.stamp[::2]) < QUIET
    return "running" if held else "interrupted"


class Server(ThreadingHTTPServer):
    """Serves a shelf of runs on the loopback address."""

    daemon_threads = True

    def __init__(self, folder: Path, port: int = 0) -> None:
        self.shelf = Shelf(folder)
        try:
            super().__init__((HOST, port), Handler)
        except OSError as e:
            raise PlotError(f"Port {port} cannot be used ({e.strerror or e}). Choose another with --port.") from e

    @property
    def url(self) -> str:
        """Where to look."""
        return f"http://{HOST}:{self.server_address[1]}/"


class Handler(BaseHTTPRequestHandler):
    """Answers GET and HEAD: the index, its rows, a run's page, and the figures beside it."""

    server: Server
    timeout = PATIENCE
    server_version = "plot-ot"
    sys_version = ""

    def do_GET(self) -> None:
        """Look up what is asked for; anything that is not there is not found."""
        port = self.server.server_address[1]
        if self.headers.get("Host") not in (f"{HOST}:{port}", f"localhost:{port}"):
            return self._send(HTTPStatus.FORBIDDEN, "text/plain", b"This server is for this machine only.\n")
        parts = urlsplit(self.path).path.split("/")[1:]
        runs = self.server.shelf.runs()
        if parts == [""]:
            return self._send(
                HTTPStatus.OK, "text/html", index_page([f.row for f in runs.values()]).encode("utf-8", "replace")
            )
        if parts == ["runs.json"]:
            return self._send(
                HTTPStatus.OK, "application/json", to_json([f.row for f in runs.values()]).encode("utf-8", "replace")
            )
        if parts[0] == "run" and len(parts) in (3, 4) and parts[1] in runs:
            path = runs[parts[1]].path
            if parts[2:] == [""]:
                return self._run(path)
            if len(parts) == 4 and parts[2] == "figures":
                return self._figure(path, parts[3])
        return self._send(HTTPStatus.NOT_FOUND, "text/plain", b"There is no such run or figure.\n")

    do_HEAD = do_GET  # noqa: N815

    def _figure(self, run: Path, name: str) -> None:
        """A figure of a run: an ordinary file in its own folder, never what a link leads to."""
        folder = run / "figures"
        try:
            entries = [] if folder.is_symlink() else list(os.scandir(folder))
            kept = [Path(e.path) for e in entries if e.is_file(follow_symlinks=False)]
            figures = {quote(p.name, errors="surrogatepass"): p for p in kept if p.suffix in KINDS}
            if name in figures:
                found = figures[name]
                return self._send(HTTPStatus.OK, KINDS[found.suffix], read_bytes(found, MOST_FIGURE))
        except (OSError, ValueError):
            pass
        return self._send(HTTPStatus.NOT_FOUND, "text/plain", b"There is no such run or figure.\n")

    def _run(self, path: Path) -> None:
        try:
            body = run_page(read_run(path)).encode("utf-8", "replace")
        except Exception as e:  # a run as nobody expected it costs its own page only
            said = str(e) if isinstance(e, PlotError) else f"This run cannot be shown ({type(e).__name__}: {e})."
            return self._send(HTTPStatus.NOT_FOUND, "text/plain", f"{said}\n".encode("utf-8", "replace"))
        return self._send(HTTPStatus.OK, "text/html", body)

    def _send(self, status: HTTPStatus, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Content-Security-Policy", PAGE_POLICY if kind == "text/html" else POLICY)
        self.send_header("Cross-Origin-Resource-Policy", "same-origin")
        self.send_header("Referrer-Policy", "no-referrer")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing: the terminal shows the address only."""
