"""The causal-variable track of MIB, the Mechanistic Interpretability Benchmark: its cells, and submissions to them."""

from plot_ot.mib.cells import CELLS, Cell
from plot_ot.mib.scoring import highest_and_average
from plot_ot.mib.submission import Settings, submit

__all__ = ["CELLS", "Cell", "Settings", "highest_and_average", "submit"]
