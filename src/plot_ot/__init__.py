"""PLOT: where in this network does this variable live, and how do I control it?

The names of `plot_ot.public` are attributes of this package. They are imported when the first of them is asked for,
because they need torch: `import plot_ot` and `plot-ot --help` do not wait for it.
"""

from typing import TYPE_CHECKING

from plot_ot.version import __version__ as __version__

if TYPE_CHECKING:
    from plot_ot.public import *  # noqa: F403
    from plot_ot.public import __all__ as __all__
else:
    from importlib import import_module

    def __getattr__(name: str) -> object:
        """A public name, or a room of the package such as `plot_ot.sites`."""
        if name == "__all__" or not name.startswith("__"):
            public = import_module("plot_ot.public")
            if name == "__all__" or name in public.__all__:
                value = globals()[name] = getattr(public, name)
                return value
            if name in globals():  # a room that was imported along with them
                return globals()[name]
        raise AttributeError(f"module 'plot_ot' has no attribute '{name}'")

    def __dir__() -> list[str]:
        return sorted({*globals(), *import_module("plot_ot.public").__all__})
