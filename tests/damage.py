"""Files as they should not be, and what every loader must do with them: `loaders.py` lists these."""

from __future__ import annotations

import base64
import io
import json
import os
import pickle
import struct
import traceback
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from plot_ot.errors import PlotError

# -- damage ---------------------------------------------------------------------------------------------------

Choose = Callable[[int], int]
"""A number from 0 to n - 1, of whoever makes the choices: hypothesis, atheris or a random generator."""

NASTY: tuple[Any, ...] = (
    *(None, True, -1, 0, 1 << 31, 1 << 63, 10**400, 1e308, float("inf"), float("nan"), "", "NaN", "x" * 5000),
    *("../../../escaped", "/etc/passwd", "\ud800", "a\0b", "<script>", "__class__", [], {}, [[]], [None], {"": None}),
    *([1] * 3000, {"__reduce__": ["os.system"]}, [["deep"]] * 3, -0.0, "1e999", "é🦜"),
)


class _Executed:
    """Unpickling this leaves a trace."""

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, ("executed",)


PICKLE = pickle.dumps(_Executed())


def torch_pickle() -> bytes:
    file = io.BytesIO()
    torch.save({"weights": _Executed()}, file)
    return file.getvalue()


def damaged(sound: bytes, choose: Choose) -> bytes:
    """The file with something wrong with it."""
    kind = choose(12)
    if kind == 0:
        return sound[: choose(len(sound) + 1)]
    if kind == 1:
        return (PICKLE, torch_pickle(), b"", b"\0" * 64, b"[" * 100_000, b'{"a":' * 50_000, b"\xff\xfe")[choose(7)]
    if kind in (2, 3):  # bits
        data = bytearray(sound)
        for _ in range(1 + choose(8)):
            data[choose(min(len(data), 400) if choose(2) else len(data))] ^= 1 << choose(8)
        return bytes(data)
    if kind == 4:  # a stretch of something else
        at, length = choose(len(sound)), 1 + choose(64)
        return sound[:at] + bytes(choose(256) for _ in range(length)) + sound[at + length :]
    if kind == 5:  # twice, or with something behind it
        return sound + (sound, b"\0" * 100, b"}")[choose(3)]
    if kind == 6 and _split(sound):  # another length of the header
        return struct.pack("<Q", (0, 1, 1 << 20, 1 << 40, (1 << 64) - 1)[choose(5)]) + sound[8:]
    if header := _split(sound):
        text, rest = header
        changed = _changed(json.loads(text), choose)
        metadata = changed.get("__metadata__") if isinstance(changed, dict) else None
        if isinstance(metadata, dict) and "plot_ot" in metadata and choose(2):  # ours is JSON within JSON
            with_ours = json.loads(text)
            ours = _changed(json.loads(with_ours["__metadata__"]["plot_ot"]), choose)
            with_ours["__metadata__"]["plot_ot"] = json.dumps(ours)
            changed = with_ours
        new = json.dumps(changed).encode()
        return struct.pack("<Q", len(new)) + new + rest
    return _changed_text(sound, choose)


def _split(data: bytes) -> tuple[bytes, bytes] | None:
    """Header and tensors of a safetensors file."""
    if len(data) < 8 or (size := struct.unpack("<Q", data[:8])[0]) > len(data) - 8 or data[8:9] != b"{":
        return None
    return data[8 : 8 + size], data[8 + size :]


def _changed_text(sound: bytes, choose: Choose) -> bytes:
    """JSON, or a table whose cells or lines may be JSON, with one value replaced."""
    try:
        return json.dumps(_changed(json.loads(sound), choose)).encode()
    except ValueError:
        lines = sound.splitlines(keepends=True)
    if not lines:
        return PICKLE
    at = choose(len(lines))
    try:
        lines[at] = json.dumps(_changed(json.loads(lines[at]), choose)).encode() + b"\n"
    except ValueError:
        lines[at] = (lines[at] * 2, b"\n", b'"', b"," * 50 + b"\n", lines[at][: choose(len(lines[at]) + 1)])[choose(5)]
    return b"".join(lines)


def _changed(value: Any, choose: Choose) -> Any:
    """The JSON value with a value, a key or an entry somewhere inside replaced, added or taken away."""
    if not isinstance(value, (dict, list)) or not value or not choose(6):
        return NASTY[choose(len(NASTY))]
    if isinstance(value, list):
        at, rest = choose(len(value)), list(value)
        what = choose(4)
        if what == 0:
            del rest[at]
        elif what == 1:
            rest.insert(at, rest[choose(len(rest))])
        else:
            rest[at] = _changed(rest[at], choose)
        return rest
    key, what = list(value)[choose(len(value))], choose(5)
    if what == 0:
        return {k: v for k, v in value.items() if k != key}
    if what == 1:
        strange = NASTY[choose(len(NASTY))]
        return {(str(strange)[:300] if k == key else k): v for k, v in value.items()}
    return {**value, key: _changed(value[key], choose)}


# -- loaders --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Loader:
    """Something that reads a file which anyone may have written."""

    name: str
    file: str
    make: Callable[[Path], object]
    load: Callable[[Path], object]
    writes: tuple[str, ...] = ()
    """What it may write, below its folder."""
    examples: int = 50
    """How many in CI: fewer where one is slow."""
    shows: bool = False
    """Whether it shows what can be read and names the rest, where others refuse."""

    def __str__(self) -> str:
        return self.name


# -- what must hold -------------------------------------------------------------------------------------------

TRIED = "tried"
"""Where a bench keeps the file it is trying, below its root: a process that dies of it leaves it there."""


def packed(data: bytes) -> str:
    """A file as a word: `python tests/test_fuzz_long.py LOADER WORD` tries it again."""
    return base64.urlsafe_b64encode(zlib.compress(data, 9)).decode()


def unpacked(word: str) -> bytes:
    return zlib.decompress(base64.urlsafe_b64decode(word))


class Bench:
    """A loader's sound folder, in which one file is damaged again and again."""

    def __init__(self, loader: Loader, root: Path) -> None:
        self.loader, self.root, self.folder = loader, root, root / "below" / "folder"
        self.folder.mkdir(parents=True)
        (root / TRIED).touch()
        loader.make(self.folder)
        self.target = self.folder / loader.file
        self.sound = self.target.read_bytes()
        self.kept = {p: p.read_bytes() for name in loader.writes if (p := self.folder / name).is_file()}
        loader.load(self.folder)  # sound files are taken
        self._restore()
        self.there = self._tree()

    def try_it(self, data: bytes) -> str | None:
        """Load the damaged file: only our own error may come of it, and nothing else may happen. What it said."""
        (self.root / TRIED).write_bytes(data)
        self.target.write_bytes(data)
        os.chdir(self.folder)  # an executed payload, or a relative name, leaves its trace here
        try:
            self.loader.load(self.folder)
            said = None
        except PlotError as e:
            said = str(e)
        except Exception as e:  # atheris prints the last error only
            told = traceback.format_exc(limit=-6)
            raise AssertionError(f"{self.loader}: of the file {packed(data)} came\n{told}") from e
        finally:
            os.chdir(self.root)
        changed = {p for p in self._tree() ^ self.there if not any(p == self.folder / w for w in self.loader.writes)}
        assert not changed, f"{self.loader} made or removed {changed} because of the file {packed(data)}"
        self._restore()
        return said

    def _restore(self) -> None:
        for path, data in self.kept.items():
            path.write_bytes(data)
        self.target.write_bytes(self.sound)

    def _tree(self) -> set[Path]:
        return set(self.root.rglob("*"))


def memory_peak(reset: bool = False) -> int:
    """Bytes that this process held at most since the last reset (Linux)."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.split("VmHWM:")[1].split()[0])
