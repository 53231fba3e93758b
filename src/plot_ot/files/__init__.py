"""Run directories on disk: safe reading, atomic writing, locks."""

from plot_ot.files.run_directory import RunDirectory
from plot_ot.files.safe_reading import read_bytes, read_json, read_tensors
from plot_ot.files.writing import write_atomically, write_json

__all__ = [
    "RunDirectory",
    "read_bytes",
    "read_json",
    "read_tensors",
    "write_atomically",
    "write_json",
]
