"""What a comparison found, in words and tables."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

from plot_ot.comparing.regions import Region
from plot_ot.comparing.telling import Telling
from plot_ot.errors import PlotError, unknown
from plot_ot.handles import Handle
from plot_ot.judging.intervals import Interval
from plot_ot.judging.verdict import Verdict

if TYPE_CHECKING:
    import pandas


class Stand(str, Enum):
    """How a hypothesis stands."""

    HOLDS = "holds"
    FAILS = "fails"
    UNDECIDED = "undecided"
    BEHIND = "left behind"
    """A quick look did not find it, and the whole search was not made: it may hold."""

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class Standing:
    """One hypothesis after the comparison."""

    name: str
    stand: Stand
    why: str
    """What it failed at, or what is undecided."""
    agrees: float
    """The share of inputs that it answers as the network does."""
    verdicts: Mapping[str, Verdict] = field(default_factory=dict)
    handles: Mapping[str, Handle] = field(default_factory=dict)
    explained: Interval | None = None
    """The share of its predictions for swaps of one or several variables that came true: those where nothing is to
    change, those where the source's answer is to come, and others, weighted equally."""
    faithful: Interval | None = None
    """The share of pairs on which swapping all that it does not mention, at its handles' places, changes nothing."""
    searched: str = "none"
    """`full`: its variables were searched for by the whole method; `quick`: a quick look left it far behind."""

    def as_row(self) -> dict[str, Any]:
        """The standing as plain values."""
        return {
            "hypothesis": self.name,
            "stand": str(self.stand),
            "why": self.why,
            "agrees": self.agrees,
            "searched": self.searched,
            **_spread("explained", self.explained),
            **_spread("faithful", self.faithful),
            "verdicts": {v: str(verdict.status) for v, verdict in self.verdicts.items()},
            "places": {v: handle.places for v, handle in self.handles.items()},
        }


@dataclass(frozen=True, repr=False)
class Comparison:
    """Rival hypotheses about one network, ranked: first those that hold, then by how much they explain."""

    standings: tuple[Standing, ...]
    differences: Mapping[tuple[str, str], Interval]
    """(a, b): how much more of its predictions came true for a than for b, on the same pairs."""
    tied: tuple[str, ...]
    """Hypotheses that hold as well as the first, and cannot be told from it on these inputs."""
    telling: tuple[Telling, ...]
    """What would tell the tied ones apart."""
    region: Region | None
    """Where the first of the ranking fails, if a small rule says so."""
    inputs: int
    seconds: float
    notes: Sequence[str] = ()
    filter: str = "candidates"
    """Which inputs count for a hypothesis (`plot_ot.abstract.admission.FILTERS`)."""
    hold_out: tuple[str, ...] = ()
    """Inputs whose values stand in one split only."""

    @property
    def winner(self) -> str | None:
        """The hypothesis that holds and explains most; None where none holds."""
        first = self.standings[0]
        return first.name if first.stand is Stand.HOLDS else None

    def __getitem__(self, name: str) -> Standing:
        for standing in self.standings:
            if standing.name == name:
                return standing
        unknown("hypothesis", name, [s.name for s in self.standings])

    # -- words -------------------------------------------------------------------------------------------

    @property
    def sentences(self) -> list[str]:
        """The findings, one sentence each, the answer first."""
        first = self.standings[0]
        said = [self._answer()]
        said += [self._about(s) for s in self.standings]
        said += [str(t) for t in self.telling]
        if self.region is not None:
            said.append(f"{first.name} fails where {self.region}.")
        return said

    def _answer(self) -> str:
        first = self.standings[0]
        if self.winner is not None and self.tied:
            both = f"{first.name} and {', '.join(self.tied)} hold"
            if any(t.pairs and not t.new for t in self.telling):  # the network does what each of them says
                return f"{both}, and explain the swaps equally well."
            return f"{both}, and cannot be told apart on these inputs."
        if self.winner is not None:
            also = [s.name for s in self.standings[1:] if s.stand is Stand.HOLDS]
            others = f" {', '.join(also)} also hold{'s' * (len(also) == 1)}, but explain less." if also else ""
            return f"{first.name} holds: {_percent(first.explained)} of its predicted swaps come true.{others}"
        open_ones = [s.name for s in self.standings if s.stand is Stand.UNDECIDED]
        if open_ones:
            return f"None of them holds so far; undecided: {', '.join(open_ones)}."
        behind = [s.name for s in self.standings if s.stand is Stand.BEHIND]
        if behind:
            failed = [s.name for s in self.standings if s.stand is Stand.FAILS]
            fails = f"{', '.join(failed)} fail{'s' * (len(failed) == 1)}"
            return f"None of them holds so far: {fails}; only a quick look was taken at {', '.join(behind)}."
        if first.explained is None:
            return "None of them: the network answers as none of these hypotheses does."
        return (
            f"None of them: no hypothesis has all its variables in the network. {first.name} comes closest, with "
            f"{_percent(first.explained)} of its predicted swaps."
        )

    def _about(self, s: Standing) -> str:
        where = ", ".join(f"{v} {verdict.status}" for v, verdict in s.verdicts.items())
        parts = [f"answers {s.agrees:.0%} of the inputs as the network does"]
        if s.explained is not None:
            parts.append(f"explains {_percent(s.explained)} of the swaps")
        if s.faithful is not None:
            parts.append(f"faithful on {_percent(s.faithful)}")
        behind = self.differences.get((self.standings[0].name, s.name))
        if behind is not None:
            parts.append(f"{behind.value:.3f} [{behind.low:.3f}, {behind.high:.3f}] behind {self.standings[0].name}")
        if where:
            parts.append(where + (" (quick look)" if s.searched == "quick" else ""))
        return f"{s.name} {s.stand}{f' ({s.why})' if s.why else ''}: {'; '.join(parts)}."

    def __str__(self) -> str:
        answer, *rest = self.sentences
        notes = [f"  note: {n}" for n in self.notes]
        return "\n".join(
            [answer, *(f"  {line}" for line in rest), *notes, f"  {self.inputs} inputs, {self.seconds:.1f} s"]
        )

    __repr__ = __str__

    # -- tables ------------------------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """All that was found, as plain values."""
        return {
            "winner": self.winner,
            "tied": list(self.tied),
            "standings": [s.as_row() for s in self.standings],
            "differences": [
                {"first": a, "second": b, **_spread("difference", d)} for (a, b), d in self.differences.items()
            ],
            "telling": [asdict(t) for t in self.telling],
            "region": None if self.region is None else {**asdict(self.region), "rule": str(self.region.rule)},
            "inputs": self.inputs,
            "filter": self.filter,
            "hold_out": list(self.hold_out),
            "seconds": self.seconds,
            "notes": list(self.notes),
            "sentences": self.sentences,
        }

    def to_frame(self) -> pandas.DataFrame:
        """The ranking as a pandas table, one row per hypothesis."""
        try:
            import pandas
        except ImportError as e:
            raise PlotError("A data frame needs pandas, which is not installed: pip install pandas.") from e
        return pandas.DataFrame([s.as_row() for s in self.standings])

    def _rows(self) -> list[tuple[str, ...]]:
        head = ("hypothesis", "", "answers", "explains", "faithful", "variables")
        rows = [
            (
                s.name,
                str(s.stand),
                f"{s.agrees:.0%}",
                _percent(s.explained),
                _percent(s.faithful),
                ", ".join(f"{v}: {verdict.status}" for v, verdict in s.verdicts.items()) or s.why,
            )
            for s in self.standings
        ]
        return [head, *rows]

    def to_markdown(self) -> str:
        """The ranking as a Markdown table, with the answer above it."""
        head, *rows = ([cell.replace("|", "\\|") for cell in row] for row in self._rows())
        lines = [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)]
        return "\n".join([self.sentences[0], "", *lines])

    def _repr_html_(self) -> str:
        head, *rows = ([html.escape(cell) for cell in row] for row in self._rows())
        cells = "".join(f"<tr>{''.join(f'<td>{c}</td>' for c in row)}</tr>" for row in rows)
        said = "".join(f"<li>{html.escape(line)}</li>" for line in self.sentences[1:])
        table = f"<table><tr>{''.join(f'<th>{c}</th>' for c in head)}</tr>{cells}</table>"
        return f"<p><b>{html.escape(self.sentences[0])}</b></p>{table}<ul>{said}</ul>"


def _spread(name: str, x: Interval | None) -> dict[str, float | None]:
    value, low, high = (None, None, None) if x is None else (x.value, x.low, x.high)
    return {name: value, f"{name}_low": low, f"{name}_high": high}


def _percent(x: Interval | None) -> str:
    return "–" if x is None else f"{x.value:.0%} [{x.low:.0%}, {x.high:.0%}]"
