"""How tests look at an error meant for a user."""

from collections.abc import Callable

import pytest

from plot_ot.errors import PlotError


def assert_refused(attempt: Callable[[], object], words: list[str]) -> None:
    """The attempt is refused by our own error, and the message holds all these words."""
    with pytest.raises(PlotError) as error:
        attempt()
    missing = [w for w in words if w not in str(error.value)]
    assert not missing, f"{error.value} lacks {missing}"
