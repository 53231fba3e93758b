"""Run directories on disk: safe reading, atomic writing, locks."""

from plot_ot.files.run_directory import RunDirectory, write_atomically, write_json
from plot_ot.files.safe_reading import read_bytes, read_json, read_tensors

__all__ = [
    "RunDirectory",
    "read_bytes",
    "read_json",
    "read_tensors",
    "write_atomically",
    "write_json",
]
