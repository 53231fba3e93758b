"""The report: one self-contained HTML page about a run, a comparison of several, or a piece of HTML for a notebook.

The page carries its charts' library and numbers with it. Its content security policy allows no request and no script
but its own, so text from prompts and names can neither load nor run anything, even if it were not escaped.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeVar

from jinja2 import Environment, PackageLoader, StrictUndefined, TemplateError
from markupsafe import Markup

from plot_ot.errors import PlotError
from plot_ot.files.run_reading import SHAPES, UNEXPECTED, Reading, read_run
from plot_ot.files.writing import Json, to_json, write_atomically
from plot_ot.judging.status import Status
from plot_ot.report import flags, sections, summary
from plot_ot.report.comparison import compare
from plot_ot.report.findings import findings
from plot_ot.report.payload import CHARTED, payload
from plot_ot.report.tables import CONTROLS, methods_in
from plot_ot.report.words import count, percent
from plot_ot.version import __version__

STYLES = ("tokens.css", "page.css", "parts.css")
SCRIPTS = ("core.js", "charts.js", "zoom.js", "examples.js", "start.js")
T = TypeVar("T")


def write_page(paths: Sequence[Path], out: Path | None = None) -> Path:
    """Write the page of a run into its directory, or a comparison of several to `out`."""
    target = out or (Path(paths[0]) / "report.html" if len(paths) == 1 else Path("comparison.html"))
    write_atomically(target, page(paths).encode("utf-8", "replace"))
    return target


def page(paths: Sequence[Path]) -> str:
    """The page of a run directory, or a comparison of several."""
    readings = [read_run(Path(p)) for p in paths]
    if len(readings) > 1:
        return _render("compare.html.j2", compare(readings), scripts=("core.js", "compare.js"))
    return run_page(readings[0])


def run_page(reading: Reading) -> str:
    """The page of one run; a part that cannot be made is named, and the others are shown."""
    best = _try(reading, "The best method", lambda: summary.best_method(reading))
    judged = list(dict.fromkeys(v["method"] for v in reading.results["verdicts"]))
    parts: dict[str, Callable[[], Any]] = {
        "question": lambda: sections.question(reading),
        "about": lambda: sections.about(reading),
        "why_best": lambda: summary.why_best(reading, best) if best else "",
        "cards": lambda: [(m, findings(reading, m)) for m in judged],
        "warnings": lambda: [(m, summary.warnings(reading, m)) for m in judged or [best]],
        "flags": lambda: flags.flag_counts(reading.couplings),
        "verdicts": lambda: sections.verdicts(reading),
        "accuracy": lambda: sections.accuracy(reading),
        "details": lambda: sections.details(reading),
        "elsewhere": lambda: sections.elsewhere(reading),
        "evidence": lambda: sections.evidence(reading),
        "cross": lambda: sections.cross(reading),
        "runtime": lambda: sections.runtime(reading),
        "waited": lambda: sections.waited(reading),
        "provenance": lambda: sections.provenance(reading),
        "data": lambda: payload(reading),
    }
    found: Json = {name: _try(reading, f"The part '{name}'", make) for name, make in parts.items()}
    data = found["data"] or {"name": reading.name, "best": best, "results": {}, **{name: [] for name in CHARTED}}
    examples = [e for rows in (data.get("examples") or {}).values() for e in rows]
    shown = {
        "name": reading.name,
        "best": best,
        "methods": [m for m in methods_in(reading.results) if m not in CONTROLS],
        "seeds": data["seeds"],
        "variables": data["variables"],
        "families": sorted({str(e["family"]) for e in examples if e.get("family") is not None}),
        "examples": len(examples),
        "marked": any(e.get("position") for e in examples),
        "published": data.get("published"),
        "study": summary.is_study(reading),
        "shows": _try(reading, "What applies to this run", lambda: _applicable(reading, data)) or defaultdict(bool),
        "left_out": data.get("left_out") or [],
        "complete": reading.compiled,
        "units": reading.units,
        "problems": shortened([*reading.problems, *filter(None, [reading.gaps_sentence])]),
        "figure_links": sections.figure_links,
        "lists": [name for name, rows in (data.get("results") or {}).items() if isinstance(rows, list) and rows],
    }
    try:
        return _render("page.html.j2", {**found, **shown, "data": data}, SCRIPTS)
    except (*UNEXPECTED, TemplateError) as e:
        raise PlotError(
            f"The report of {reading.path} cannot be made: its files hold something unexpected ({type(e).__name__}: "
            f"{e}). Run the same command again to compile them."
        ) from e


MOST_PROBLEMS = 8
"""More problems than this are counted, not listed."""


def shortened(problems: Sequence[str]) -> list[str]:
    """The first problems, and how many more there are."""
    more = len(problems) - MOST_PROBLEMS
    rest = [f"{count(more, 'more such problem')}: `plot-ot show` lists them all."] if more > 0 else []
    return [*problems[:MOST_PROBLEMS], *rest]


def _applicable(reading: Reading, data: Json) -> dict[str, bool]:
    """Which charts and tables have something to show in this run; the others are left out."""
    tested = [m for m in data.get("methods") or [] if m["accuracy"]["mean"] is not None and m["kind"] != "control"]
    timed = [m for m in data.get("methods") or [] if m["seconds"]["mean"] is not None]
    seeds, several = len(data["seeds"]), len(tested) > 1
    profiles, curves = (
        [row for some in (data.get(part) or {}).values() for by in some.values() for row in by.values()]
        for part in ("profile", "capacity")
    )
    return {
        "several": several,
        "zoom": bool(data.get("zoom")),
        "cost": bool(timed),
        "profile": any(len(p["places"]) > 1 for p in profiles),
        "stretch": len({h["method"] for h in data["naturalness"] if h["stretch"] is not None}) > 1,
        "capacity": bool(curves),
        "shuffled": any(c["shuffled"] for c in curves),
        "coupling": bool(data.get("couplings")),
        "sweep": any(len(s["points"]) > 1 for s in data["sweeps"]),
        "handle": bool(data.get("handles")),
        "surface": bool(data.get("surfaces")),
        "scatter": several or seeds > 2,
        "accuracy": several or seeds > 2,
        "frontier": len(timed) > 1 or bool(data.get("published") and timed),
        "runtime": len(timed) > 1,
        "verdicts": len(reading.results["verdicts"]) > len(data["variables"]),
        "cross": len(data["variables"]) > 1,
        "families": seeds > 1 or any(len(r.get("families") or ()) > 1 for r in reading.results["records"]),
    }


def index_page(rows: Sequence[Json]) -> str:
    """The list of runs that `plot-ot view` opens with."""
    text = to_json(list(rows))
    for sign in ("<", ">", "&", "\u2028", "\u2029"):  # nothing in it can end the script element it stands in
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    own = {"css": "".join(map(_asset, STYLES)), "theme": _asset("theme.js"), "script": _asset("index.js"), "rows": text}
    trusted = {name: Markup(part) for name, part in own.items()}  # noqa: S704
    nonce = hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()[:32]
    return _environment().get_template("index.html.j2").render(**trusted, nonce=nonce, version=__version__)


def fragment(
    records: Sequence[Json],
    verdicts: Sequence[Json] = (),
    runtimes: Sequence[Json] = (),
    selection: Sequence[Json] = (),
    notes: Sequence[Json] = (),
) -> str:
    """Verdicts and accuracies as a piece of HTML without scripts: what a result shows of itself in a notebook.

    The lists are those of a run's results; without `selection` nothing says where variables were found.
    """
    lists: Json = {name: [] for name in SHAPES}
    lists |= {"records": list(records), "verdicts": list(verdicts), "runtimes": list(runtimes)}
    lists |= {"selection": list(selection), "notes": list(notes)}
    reading = Reading(Path(), {}, lists, [])
    judged = list(dict.fromkeys(v["method"] for v in verdicts))
    cards = [f for m in judged for f in findings(reading, m)]
    css = _asset("fragment.css") + ".plot-ot-result {\n" + _asset("parts.css") + "}\n"
    context = {"cards": cards, "accuracy": sections.accuracy(reading), "css": Markup(css)}  # noqa: S704
    return _environment().get_template("fragment.html.j2").render(**context)


def _try(reading: Reading, what: str, make: Callable[[], T]) -> T | None:
    """Make one part of the page; a damaged file must not cost the reader the other parts."""
    try:
        return make()
    except UNEXPECTED as e:
        reading.problems.append(
            f"{what} cannot be shown: the files hold something unexpected ({type(e).__name__}: {e})."
        )
        return None


# -- from values to HTML --------------------------------------------------------------------------------------


def _render(template: str, context: Json, scripts: Sequence[str]) -> str:
    data = to_json(context["data"]).encode("utf-8", "replace")
    body = "\n".join(_asset(name) for name in scripts)
    script = f'"use strict";\n{_asset("unpack.js")}\n(async () => {{\n{body}\n}})().catch(sayWhy);\n'
    carried = {
        "css": "".join(map(_asset, STYLES)),
        "theme": _asset("theme.js"),
        "script": script,
        "library": _library(),
        "data": _packed(data),
        "nonce": hashlib.sha256(data + script.encode()).hexdigest()[:32],
    }
    own = {name: Markup(text) for name, text in carried.items()}  # noqa: S704
    return _environment().get_template(template).render(**{**context, **own}, version=__version__)


def _packed(content: bytes) -> str:
    """Compress text to base64, whose letters and digits cannot end the HTML element they stand in."""
    return base64.b64encode(gzip.compress(content, 6, mtime=0)).decode()


@lru_cache(maxsize=1)
def _library() -> str:
    """The source of plotly.js, which the page carries with it, and its licence."""
    licence = f"/*! plotly.js\n\n{_asset('plotly-licence.txt')}*/\n".encode()
    return _packed(licence + unwrapped((files("plotly") / "package_data" / "plotly.min.js").read_bytes()))


def unwrapped(library: bytes) -> bytes:
    """The library without the wrapper that offers it to module loaders, which makes browsers parse it three times.

    A library that is wrapped in another way stays as it is.
    """
    head, opening, body = library.partition(b"() => {\n")
    closing = b"return Plotly;\n}));"
    if len(head) > 1000 or not opening or not body.rstrip().endswith(closing):
        return library
    return head[: head.find(b"*/") + 2] + b"\n" + body.rstrip().removesuffix(closing)


@lru_cache
def _asset(name: str) -> str:
    return (files("plot_ot.report") / "assets" / name).read_text(encoding="utf-8")


@lru_cache(maxsize=1)
def _environment() -> Environment:
    made = Environment(
        loader=PackageLoader("plot_ot.report", "assets"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters["n3"] = lambda x: f"{x:.3f}" if isinstance(x, (int, float)) else "–"
    made.filters["status"] = STATUS_CLASSES.__getitem__
    made.filters["percent"] = percent
    return made


STATUS_CLASSES = {
    Status.COMPACT: "s-compact",
    Status.PLACED: "s-placed",
    Status.IN_PART: "s-part",
    Status.OUTPUT: "s-output",
    Status.UNDECIDED: "s-undecided",
    Status.DECODABLE: "s-no",
    Status.ABSENT: "s-no",
}
