"""Reading files that may be damaged or meant badly: the one room through which strangers' files come in.

Nothing in them is executed, only ordinary files are opened, and what they would unpack to is bounded before it is
unpacked. Errors are those of UNREADABLE, for the caller to say in the file's own terms, or a PlotError.
"""

from __future__ import annotations

import io
import json
import os
import stat
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from plot_ot.errors import PlotError

MOST_TEXT = 512 << 20
"""Bytes of the largest JSON file that is read."""
MOST_TENSORS = 4 << 30
"""Bytes of the largest safetensors file that is read whole."""
MOST_DECODED = 2 << 30
"""Bytes that the values of a JSON text may take in memory, by estimate."""
MOST_ROWS_DECODED = 64 << 20
"""Bytes that the rows of a table of questions may take."""
MOST_PACKED = 16
"""How many times its size a compressed file of numbers may unpack to; trained weights hardly compress."""
DEEPEST = 64
"""Levels of the deepest JSON value that is taken; ours have fewer than ten."""

UNREADABLE = (
    *(SafetensorError, zipfile.BadZipFile, zlib.error, EOFError),
    *(OSError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RuntimeError, MemoryError),
)
"""What taking a damaged file apart can lead to; RecursionError is a RuntimeError."""


# -- ordinary files -----------------------------------------------------------------------------------------------


@contextmanager
def open_ordinary(path: str | os.PathLike[str], most: int = MOST_TENSORS) -> Iterator[IO[bytes]]:
    """A file open for reading; a pipe, a device or a file larger than `most` bytes is refused unread."""
    with open(path, "rb", opener=_without_waiting) as file:
        _refuse_size(path, os.fstat(file.fileno()), most)
        yield file


def read_bytes(path: str | os.PathLike[str], most: int = MOST_TEXT) -> bytes:
    """The bytes of an ordinary file of at most `most` bytes."""
    with open_ordinary(path, most) as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise ValueError(f"it grew beyond {most:,} bytes while it was read")
    return data


def refuse_strange_files(directory: Path) -> None:
    """Refuse a directory for others to read (a saved model, an adapter) that holds pipes, devices or endless texts."""
    for path in sorted(directory.iterdir()):
        if path.is_dir():
            continue
        try:
            _refuse_size(path, path.stat(), MOST_TEXT if path.suffix in (".json", ".txt", ".model") else 1 << 50)
        except (OSError, ValueError) as e:
            raise PlotError(f"{directory} cannot be read: {path.name}: {_short(e)}.") from e


def _without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))  # a pipe that nobody writes to must not hold us up


def _refuse_size(path: str | os.PathLike[str], found: os.stat_result, most: int) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise ValueError(f"{os.fspath(path)} is not an ordinary file")
    if found.st_size > most:
        raise ValueError(f"it has {found.st_size:,} bytes, more than the {most:,} that such a file may have")


# -- formats ------------------------------------------------------------------------------------------------------


def parse_json(text: str | bytes) -> Any:
    """A JSON value of at most DEEPEST levels; NaN and infinities, which we write as null, are read as null."""
    commas, lists, objects = (text.count(c) if isinstance(text, str) else text.count(c.encode()) for c in ",[{")
    if len(text) + 64 * (commas + lists) + 240 * objects > MOST_DECODED:  # what small values take in memory
        raise ValueError(f"its values would take more than {MOST_DECODED:,} bytes")
    try:
        value = json.loads(text, parse_constant=lambda _: None)
    except RecursionError:
        raise ValueError("its values are nested too deeply") from None
    level = [value]
    for _ in range(DEEPEST):
        level = [x for v in level if isinstance(v, (dict, list)) for x in (v.values() if isinstance(v, dict) else v)]
        if not level:
            return value
    raise ValueError("its values are nested too deeply")


def read_json(path: Path) -> Any:
    """Read a JSON file, or say what is wrong with it."""
    try:
        return parse_json(read_bytes(path).decode("utf-8"))
    except FileNotFoundError:
        raise PlotError(f"{path} is missing.") from None
    except UNREADABLE as e:
        raise PlotError(f"{path} cannot be read ({_short(e)}). Delete it and run again to make it anew.") from e


@contextmanager
def open_tensors(path: str | os.PathLike[str], most: int = MOST_TENSORS) -> Iterator[Any]:
    """A safetensors file of at most `most` bytes, open for reading one tensor at a time."""
    _refuse_size(path, os.stat(path), most)
    with safe_open(os.fspath(path), framework="pt") as file:
        yield file


def read_tensors(path: str | os.PathLike[str], most: int = MOST_TENSORS) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Metadata and tensors of a safetensors file of at most `most` bytes."""
    with open_tensors(path, most) as file:
        return dict(file.metadata() or {}), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def read_npz(path: str | os.PathLike[str], most: int) -> dict[str, Tensor]:
    """The arrays of floats in an .npz file, as float32; their headers must agree with the space they really have."""
    with open_ordinary(path, most) as file, zipfile.ZipFile(file) as archive:
        entries = archive.infolist()
        size, packed = sum(e.file_size for e in entries), os.fstat(file.fileno()).st_size
        if size > most or size > MOST_PACKED * packed + (1 << 20):
            raise ValueError(f"its {packed:,} bytes unfold to {size:,}")
        found = {}
        for entry in entries:
            with archive.open(entry) as inside:
                shape, dtype = _npy_header(inside)
                space = entry.file_size - inside.tell()
            if dtype.kind != "f" or np.prod(shape, dtype=object) * dtype.itemsize != space:
                raise ValueError(f"{entry.filename} is {dtype} {shape} in {entry.file_size} bytes")
            with archive.open(entry) as inside:
                array = np.lib.format.read_array(inside, allow_pickle=False)
            found[entry.filename.removesuffix(".npy")] = torch.from_numpy(np.asarray(array, dtype=np.float32))
        return found


def _npy_header(file: IO[bytes]) -> tuple[tuple[int, ...], np.dtype[Any]]:
    readers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    shape, _, dtype = readers[np.lib.format.read_magic(file)](file)
    return shape, dtype


def read_torch_file(path: str | os.PathLike[str], most: int) -> Any:
    """What torch.save wrote, in at most `most` bytes.

    Such a file is a pickle inside a zip. It is read by torch's restricted reader, which builds tensors, lists, dicts
    and numbers and calls nothing else. What does not begin as a zip is refused unread: torch would take a bare pickle
    with a zip behind it for the pickle.
    """
    data = read_bytes(path, most)
    if not data.startswith(b"PK\x03\x04"):
        raise ValueError("it is not a zip file of torch.save, and bare pickles are not opened")
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            inside = archive.infolist()
    except Exception as e:  # a damaged archive can raise anything
        raise ValueError(f"it is not a zip file of torch.save, and bare pickles are not opened: {e}") from e
    if any(i.compress_type != zipfile.ZIP_STORED for i in inside) or sum(i.file_size for i in inside) > most:
        raise ValueError(f"it unpacks to more than {most:,} bytes or is compressed, which torch.save does not do")
    try:
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as e:  # a damaged pickle can raise anything
        said = (str(e) or type(e).__name__).splitlines()[0]
        raise ValueError(f"it holds more than tensors, or is damaged: {said[:200]}") from e


def read_parquet(path: str | os.PathLike[str], most: int = MOST_ROWS_DECODED) -> list[dict[str, Any]]:
    """The rows of a parquet file, which may take at most `most` bytes.

    What is written once may stand for many rows, so a file's size says nothing: rows are unpacked a few at a time.
    """
    try:
        from pyarrow import parquet  # type: ignore[import-untyped,unused-ignore]
    except ImportError:
        raise PlotError("Reading .parquet needs pyarrow: pip install pyarrow, or convert the file to .jsonl.") from None
    rows: list[dict[str, Any]] = []
    with open_ordinary(path, most) as file:
        table = parquet.ParquetFile(file)
        groups = [table.metadata.row_group(k) for k in range(table.num_row_groups)]
        written = sum(group.total_byte_size for group in groups)
        if written > most or sum(g.column(c).num_values for g in groups for c in range(g.num_columns)) > most // 8:
            raise ValueError(f"its columns take more than {most:,} bytes")
        left = most
        for batch in table.iter_batches(batch_size=max(1, min(1024, most // max(1, written)))):
            some = batch.to_pylist()
            left -= _taken(some)
            if left < 0:
                raise ValueError(f"its rows take more than {most:,} bytes")
            rows += some
    return rows


def _taken(value: Any) -> int:
    """About what a value of a table takes in memory."""
    if isinstance(value, (str, bytes)):
        return 50 + len(value)
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 32 + sum(map(_taken, inside))


# -- scratch files ------------------------------------------------------------------------------------------------


def write_at(file: int, data: memoryview, offset: int) -> None:
    """Write all of the bytes at an offset of an open scratch file; a full disk is said."""
    done = 0
    while done < len(data):
        try:
            done += os.pwrite(file, data[done:], offset + done)
        except OSError as e:
            raise PlotError(
                f"Cannot keep a recording on disk: {e.strerror or e}. Make room in {tempfile.gettempdir()}, set TMPDIR "
                f"to a larger disk, or give more --memory."
            ) from e


def read_at(file: int, into: memoryview, offset: int) -> None:
    """Fill the buffer from an offset of an open scratch file; one that was cut short is said."""
    done = 0
    while done < len(into):
        try:
            got = os.preadv(file, [into[done:]], offset + done)
        except OSError as e:
            raise PlotError(f"Cannot read a recording back from disk: {e.strerror or e}. Run again.") from e
        if not got:
            raise PlotError("A recording on disk was cut short by someone else. Run again.")
        done += got


def said_of(e: BaseException, path: Path) -> str:
    """What is wrong with a file, without the folders it is in."""
    said = e.strerror if isinstance(e, OSError) and e.strerror else str(e) or type(e).__name__
    said = said.replace(os.fspath(path), path.name)
    return said if len(said) <= 200 else f"{said[:200]} ..."


def _short(e: BaseException) -> str:
    said = str(e) or type(e).__name__
    return said if len(said) <= 200 else f"{said[:200]} ..."
