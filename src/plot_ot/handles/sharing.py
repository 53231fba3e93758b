"""What is said about a handle where it is shared: a card for those who find it, without a trace of its maker's machine.

The card is Markdown with a header for the hub. Whatever others wrote into names and sentences stays text there.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from plot_ot.errors import PlotError
from plot_ot.files.hub import REPOSITORY
from plot_ot.files.privacy import shared_path, shared_text
from plot_ot.handles.storing import Stored
from plot_ot.version import __version__

HANDLE_FILE = "handle.safetensors"
MOST_SHARED = 1 << 30
"""Bytes of the largest handle that is read from the hub: a rotation of a vector of width 16,384 in float32."""

CONTROLS = {
    "handle": "the handle",
    "copy_source": "copying the source's answer",
    "random_mean": "random handles of the same search, on average",
    "random_best": "the best of them",
    "random_places": "the same places at random",
    "full_patch": "the whole place patched",
    "invariance": "the handle on pairs that keep the variable",
}
"""The numbers of a verdict that a card shows, by their names in its evidence."""


class CardVerdict(Protocol):
    """What the tests said about a handle: a `plot_ot.Verdict`."""

    @property
    def variable(self) -> str:
        """Whose verdict it is."""

    @property
    def status(self) -> Any:
        """One of the statuses."""

    @property
    def sentence(self) -> str:
        """The verdict in a sentence."""

    @property
    def evidence(self) -> Mapping[str, float]:
        """The numbers behind it."""

    @property
    def gates(self) -> Sequence[Any]:
        """The conditions that were tested, each with a `name`, an `answer` and a `sentence`."""


def shareable(value: Any) -> Any:
    """Plain values with every path in them as it may be shared."""
    if isinstance(value, str):
        return shared_text(value)
    if isinstance(value, Mapping):
        return {shareable(k): shareable(v) for k, v in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        return [shareable(v) for v in value]
    return value


def require_verdict(variable: str, verdict: Any) -> None:
    """Refuse what is no verdict, or that of another variable: nobody reads a card twice."""
    if verdict is None:
        return
    if not all(hasattr(verdict, name) for name in ("variable", "status", "sentence", "evidence", "gates")):
        raise PlotError(
            f"`verdict` is what the tests said about this handle: result.verdicts[{variable!r}]; found "
            f"{type(verdict).__name__}."
        )
    if verdict.variable != variable:
        raise PlotError(
            f"The verdict is that of '{verdict.variable}', the handle that of '{variable}': give "
            f"result.verdicts[{variable!r}]."
        )


def handle_card(stored: Stored, repo_id: str, described: str, model: str | None, verdict: CardVerdict | None) -> str:
    """The model card: what the handle is, where it was found, its controls and verdict, and how to use it."""
    header: dict[str, Any] = {"library_name": "plot-ot", "tags": ["plot-ot", "interpretability", "causal-abstraction"]}
    network = None if model is None else shared_path(model)
    if network is not None and REPOSITORY.fullmatch(network):
        header["base_model"] = network
    parts = [
        "---",
        *(f"{key}: {json.dumps(value)}" for key, value in header.items()),
        "---",
        "",
        f"# A handle for {_text(stored.variable)}",
        "",
        f"This handle controls the variable `{_code(stored.variable)}` inside {_network(network)}: it takes the "
        "variable's value from one run of the network into another. It was found with plot-ot.",
        "",
        "## What it is, and where it was found",
        "",
        *(f"    {line}" for line in shared_text(described).splitlines()),
        "",
        f"It fits one network only, the one whose identity is `{_code(stored.subject)}`; plot-ot refuses any other.",
        "",
        "## Verdict and controls",
        "",
        *_verdict(verdict),
        "",
        "## How to use it",
        "",
        "```python",
        "from plot_ot import Handle",
        "",
        f"handle = Handle.from_hub({json.dumps(repo_id)})",
        "print(handle.describe())",
        "outputs = handle.apply(subject, base, source)  # the subject: plot_ot.load_subject(model, hypothesis)",
        "with handle.on(model, source_tokens):  # or on a live language model, where its places are last tokens",
        "    model.generate(**prompts)",
        "```",
        "",
        f"Written by plot-ot {__version__}. The file `{HANDLE_FILE}` holds tensors and a description, no code.",
        "",
    ]
    return "\n".join(parts)


def _network(model: str | None) -> str:
    return "one network" if model is None else f"`{_code(model)}`"


def _verdict(verdict: CardVerdict | None) -> list[str]:
    if verdict is None:
        return ["No verdict was given with this handle: it may not have been tested against controls."]
    lines = [f"**{_text(str(verdict.status))}.** {_text(shared_text(verdict.sentence))}"]
    rows = [(told, verdict.evidence[name]) for name, told in CONTROLS.items() if name in verdict.evidence]
    if rows:
        lines += ["", "| on test pairs that can tell | share right |", "| --- | --- |"]
        lines += [f"| {told} | {value:.3f} |" for told, value in rows]
    if verdict.gates:
        lines += ["", "| condition | answer | found |", "| --- | --- | --- |"]
        lines += [
            f"| {_text(g.name)} | {_text(str(g.answer))} | {_text(shared_text(g.sentence))} |" for g in verdict.gates
        ]
    return lines


def _text(text: str) -> str:
    """Text of others as Markdown that shows it as it is, on one line."""
    return re.sub(r"([\\`*_\[\]<>#|~])", r"\\\1", " ".join(text.split()))


def _code(text: str) -> str:
    """Text of others between backticks."""
    return " ".join(text.replace("`", "'").split())
