"""`python -m plot_ot.cli` is `plot-ot`."""

from plot_ot.cli import main

main()
