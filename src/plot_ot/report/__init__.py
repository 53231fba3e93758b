"""The report of a run: a page, figures, tables. It reads run directories and never computes results."""

from plot_ot.report.page import fragment, write_page

__all__ = ["fragment", "write_page"]
