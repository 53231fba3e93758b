"""The library's version, and those of what can change a result; importable from anywhere."""

__version__ = "0.2.0"


def library_versions() -> dict[str, str]:
    """Versions that can change a result."""
    from importlib import metadata  # slow to import, and every command has a version

    versions = {"plot_ot": __version__}
    for name in ("torch", "numpy", "safetensors", "transformers"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "not installed"
    return versions
