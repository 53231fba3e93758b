"""The one family of errors and the one family of warnings that users meet.

A message says what was found, what was expected, and what to do about it.
"""

import inspect
import warnings
from collections.abc import Iterable
from difflib import get_close_matches
from typing import NoReturn

MOST_NAMES = 40
"""The most names that a message lists."""


class PlotError(Exception):
    """Something the user can mend: a wrong name, shape, value, file or directory."""


class PlotWarning(UserWarning):
    """Something that a user should know and the package goes on after."""


class CouplingWarning(PlotWarning):
    """Some couplings of a stage are degenerate, so that their masses mean little."""


def warn(message: str, category: type[PlotWarning] = PlotWarning) -> None:
    """Warn, and name the line of the user's own code that led here, not one of this package's."""
    frame, level = inspect.currentframe(), 1
    while frame is not None and str(frame.f_globals.get("__name__")).partition(".")[0] == "plot_ot":
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)


def unknown(kind: str, given: object, choices: Iterable[str]) -> NoReturn:
    """Refuse an unknown name: list the names to choose from, and suggest the closest."""
    names = list(choices)
    hint = suggestion(given, names)
    more = f", ... ({len(names)} in all)" if len(names) > MOST_NAMES else ""
    raise PlotError(f"Unknown {kind} '{given}'.{hint} Choose from: {', '.join(names[:MOST_NAMES]) or '(none)'}{more}.")


def suggestion(given: object, names: Iterable[str]) -> str:
    """A question after the closest of these names, to follow a sentence; empty where none is close."""
    close = get_close_matches(str(given), list(names), n=1)
    return f" Did you mean '{close[0]}'?" if close else ""
