"""What is shown of a localization while it works: steps in order, an estimate, and nothing where nobody looks."""

import io
import sys

import pytest
from rich.console import Console

import plot_ot
from plot_ot.engine.watching import announce, counted, watched_by
from plot_ot.studies import showing
from plot_ot.studies.showing import Progress, duration
from test_localize import HYPOTHESIS, ROWS, parity_net


class Heard:
    def __init__(self) -> None:
        self.lines: list[tuple[int, int, str]] = []

    def __call__(self, begun: int, steps: int, words: str) -> None:
        self.lines.append((begun, steps, words))


def test_what_is_left_is_estimated_from_the_units_that_are_done():
    now, heard = [0.0], Heard()
    progress = Progress(2, heard, clock=lambda: now[0])
    progress.step("couplings")
    for done, at in enumerate((10.0, 20.0, 30.0, 40.0), 1):
        now[0] = at
        progress.part(done, 4)
    said = [words for *_, words in heard.lines]
    assert said == ["couplings", "couplings", "couplings, about 20 s left", "couplings, about 10 s left", "couplings"]
    now[0] = 45.0
    progress.part(2, 4)  # the next lot of units is estimated by itself
    assert heard.lines[-1][2] == "couplings, about 5 s left"
    for _ in range(3):
        progress.step("more than was known of")
    assert heard.lines[-1][:2] == (2, 2)


@pytest.mark.parametrize(
    ("seconds", "said"), [(0.2, "1 s"), (89, "89 s"), (90, "1.5 min"), (660, "11 min"), (9000, "2.5 h")]
)
def test_durations_are_said_plainly(seconds, said):
    assert duration(seconds) == said


def test_nobody_is_told_unless_somebody_watches():
    announce("nothing")
    heard = Heard()
    with watched_by(Progress(1, heard)):
        assert list(counted(iter("ab"), 2)) == ["a", "b"]
        with watched_by(None):
            announce("inside")
    announce("after")
    assert list(counted(iter("ab"), 2)) == ["a", "b"]
    assert [words for *_, words in heard.lines] == ["", ""]


@pytest.mark.parametrize("method", ["plot", "plot-layered"])
def test_localize_tells_every_step(method, monkeypatch):
    heard = Heard()

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    class Shown:
        def __enter__(self) -> Heard:
            return heard

        def __exit__(self, *_: object) -> None:
            pass

    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setattr(showing, "_on_terminal", lambda console: Shown())
    plot_ot.localize(plot_ot.MLPSubject(parity_net("ab", "cd")), HYPOTHESIS, ROWS, size=100, method=method)
    steps = list(dict.fromkeys((begun, words.split(", about")[0]) for begun, _, words in heard.lines))
    words = [w for _, w in steps]
    assert words[:2] == ["answers of the network", "recording"]
    assert words[-3:] == ["tests", "controls", "random handles"]
    assert "couplings" in words
    assert "calibration" in words
    assert [begun for begun, _ in steps] == list(range(1, heard.lines[0][1] + 1))  # as many as were promised
    heard.lines.clear()
    plot_ot.localize(
        plot_ot.MLPSubject(parity_net("ab", "cd")), HYPOTHESIS, ROWS, size=100, method=method, progress=False
    )
    assert not heard.lines


def test_a_pipe_gets_nothing(capfd):
    plot_ot.localize(plot_ot.MLPSubject(parity_net("ab", "cd")), HYPOTHESIS, ROWS, size=100, method="plot-layered")
    assert capfd.readouterr() == ("", "")


def test_a_terminal_gets_a_bar_that_goes_away():
    screen = io.StringIO()
    with showing._on_terminal(Console(file=screen, force_terminal=True, width=100)) as show:
        show(2, 5, "calibration, about 3 s left")
    assert "calibration, about 3 s left" in screen.getvalue()
    assert "1/5" in screen.getvalue()


def test_a_notebook_gets_one_line_that_is_empty_in_the_end():
    class Place:
        said: list[str] = []  # noqa: RUF012

        def update(self, shown: showing._Html) -> None:
            self.said.append(shown._repr_html_())

    with showing._on_page(lambda shown, display_id: Place()) as show:
        show(1, 3, "<b>recording</b>")
        show(1, 3, "too soon after")
        show(2, 3, "tests")
    assert Place.said == [
        '<progress value="0" max="3"></progress> 1 of 3: &lt;b&gt;recording&lt;/b&gt;',
        '<progress value="1" max="3"></progress> 2 of 3: tests',
        "",
    ]
