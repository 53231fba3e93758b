"""The library's version, importable from anywhere."""

__version__ = "0.1.0"
