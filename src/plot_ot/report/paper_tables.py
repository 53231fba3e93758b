"""The paper's tables from run directories, row by row, as LaTeX, Markdown, CSV or JSON.

HEQ: metrics by methods, and one seed with its best settings. Binary addition: methods by widths. MCQA: methods with the
layer and size of their handles, and the layers that balanced and unbalanced transport select. Other tasks: methods by
test banks. Spread over seeds is the population standard deviation.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from statistics import fmean, pstdev

from plot_ot.errors import PlotError, unknown
from plot_ot.files.run_reading import Reading, numbers
from plot_ot.files.writing import Json, to_json
from plot_ot.report.payload import setting
from plot_ot.report.tables import CONTROLS, average_by_seed, banks_in, methods_in

NAMES = {
    "plot": "PLOT",
    "plot-native": "PLOT-native",
    "plot-pca": "PLOT-pca",
    "plot-das": "PLOT-DAS",
    "plot-native-das": "PLOT-native-DAS",
    "plot-pca-das": "PLOT-pca-DAS",
    "das": "Full DAS",
}
"""The methods of the paper's tables and what they are called there, in its order."""


@dataclass(frozen=True)
class Number:
    """A mean with its spread over seeds."""

    mean: float
    sd: float | None
    digits: int
    best: bool = False


Cell = str | Number


@dataclass(frozen=True)
class PaperTable:
    """Rows and columns; `groups` are headings over several columns."""

    caption: str
    head: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    groups: tuple[tuple[str, int], ...] = ()


def paper_tables(readings: Sequence[Reading], every: bool = False) -> list[PaperTable]:
    """The tables of the runs' task: the paper's methods, or `every` method of the runs."""
    tasks = {str(r.results.get("task")) for r in readings}
    if len(tasks) > 1:
        raise PlotError(
            f"These runs are of different tasks ({', '.join(sorted(tasks))}): give one task's runs at a time."
        )
    task = tasks.pop()
    if not any(r.results["records"] for r in readings):
        raise PlotError("There is no test accuracy in these runs yet, so there is no table to write.")
    makers: dict[str, Callable[[Sequence[Reading], bool], list[PaperTable]]] = {
        "heq": _heq,
        "addition": _addition,
        "mcqa": _mcqa,
    }
    return makers.get(task, _plain)(readings, every)


def methods_of(reading: Reading, every: bool) -> list[str]:
    """The run's methods, the paper's first and in its order; only those, unless there is none or all are wanted."""
    found = [m for m in methods_in(reading.results) if m not in CONTROLS]
    first = [m for m in NAMES if m in found]
    return first + [m for m in found if m not in first] if every or not first else first


def number(values: Sequence[float], digits: int) -> Cell:
    """Mean and spread of some seeds; a dash without any."""
    return Number(fmean(values), pstdev(values) if len(values) > 1 else None, digits) if values else "-"


def _seconds(reading: Reading, method: str, digits: int = 1) -> Cell:
    return number([t["seconds"] for t in reading.rows("runtimes", method=method)], digits)


def _accuracies(reading: Reading, digits: int, **where: object) -> Cell:
    return number([r["accuracy"] for r in reading.rows("records", **where)], digits)


def _name(readings: Sequence[Reading], method: str) -> str:
    """A method's name in the paper; with how many seeds it has, where others have more."""
    named = NAMES.get(method, method)
    for r in readings:
        if method in r.gaps:
            every = len(r.distinct("seed", "records"))
            return f"{named} ({every - len(r.gaps[method])} of {every} seeds)"
    return named


def _seeds(reading: Reading) -> str:
    n = len(reading.distinct("seed", "records"))
    return f"{n} seed{'s' if n != 1 else ''}"


# -- hierarchical equality ------------------------------------------------------------------------------------


def _heq(readings: Sequence[Reading], every: bool) -> list[PaperTable]:
    found = []
    for r in readings:
        methods = [m for m in methods_of(r, every) if every or m in ("plot", "das")] or methods_of(r, every)
        rows: list[tuple[Cell, ...]] = []
        for variable, bank in banks_in(r.results):
            cells = [_accuracies(r, 3, method=m, variable=variable, bank=bank) for m in methods]
            rows.append((f"{variable} {bank}", *cells))
        averages = [number(list(average_by_seed(r.results, m).values()), 3) for m in methods]
        rows += [("Avg. exact", *averages), ("Runtime (s)", *(_seconds(r, m) for m in methods))]
        inputs = f", {r.config['sampler']} banks" if r.config.get("sampler") else ""
        caption = f"HEQ comparison over {_seeds(r)}{inputs}. Values are mean ± standard deviation."
        found.append(PaperTable(caption, ("Metric", *(_heq_name(r, m) for m in methods)), tuple(rows)))
        found.append(_heq_seed(r, methods))
    return found


def _heq_name(reading: Reading, method: str) -> str:
    return "DAS" if method == "das" and not reading.gaps else _name([reading], method)


def _heq_seed(reading: Reading, methods: Sequence[str]) -> PaperTable:
    """The first seed, with what calibration chose."""
    seed = min(reading.distinct("seed", "records"))
    variables = reading.distinct("variable", "records")
    rows = []
    for m in methods:
        by_variable = [
            number([fmean(x)], 4) if (x := [q["accuracy"] for q in _of(reading, seed, m, v)]) else "-"
            for v in variables
        ]
        average = average_by_seed(reading.results, m).get(seed)
        seconds = [t["seconds"] for t in reading.rows("runtimes", seed=seed, method=m)]
        settings = [
            f"{s['variable']}: {setting(s['chosen'])} in {', '.join(s['places'])}"
            for s in reading.rows("selection", seed=seed, method=m)
        ]
        cells = (*by_variable, number([average] if average is not None else [], 4), number(seconds, 2))
        rows.append((_heq_name(reading, m), *cells, "; ".join(settings)))
    head = ("Method", *variables, "Average", "Runtime (s)", "Best setting")
    return PaperTable(f"Seed {seed}: accuracies, runtime and what calibration chose.", head, tuple(rows))


def _of(reading: Reading, seed: int, method: str, variable: str) -> list[Json]:
    return reading.rows("records", seed=seed, method=method, variable=variable)


# -- binary addition ------------------------------------------------------------------------------------------


def _addition(readings: Sequence[Reading], every: bool) -> list[PaperTable]:
    """One pair of columns per width, as in the paper's figure."""
    methods = list(dict.fromkeys(m for r in readings for m in methods_of(r, every) if every or m != "plot"))
    if not methods:
        methods = list(dict.fromkeys(m for r in readings for m in methods_of(r, True)))
    rows: list[tuple[Cell, ...]] = []
    for m in methods:
        cells: list[Cell] = []
        for r in readings:
            cells += [number(list(average_by_seed(r.results, m).values()), 3), _seconds(r, m)]
        rows.append((_name(readings, m), *cells))
    groups = (("", 1), *((f"d = {r.config.get('width', '?')}", 2) for r in readings))
    head = ("Method", *(("Accuracy", "Runtime (s)") * len(readings)))
    highest = tuple(k % 2 == 1 for k in range(1, len(head)))
    caption = f"Binary-addition comparison over {', '.join(dict.fromkeys(map(_seeds, readings)))}. " + (
        "Values are mean ± standard deviation; accuracy is averaged over the internal carries."
    )
    return [PaperTable(caption, head, _bold(rows, highest), groups)]


# -- multiple-choice questions --------------------------------------------------------------------------------


def _mcqa(readings: Sequence[Reading], every: bool) -> list[PaperTable]:
    found = []
    for r in readings:
        methods = [m for m in methods_of(r, every) if every or m != "plot"] or methods_of(r, True)
        variables = r.distinct("variable", "records")
        rows: list[tuple[Cell, ...]] = []
        for m in methods:
            scores = [_accuracies(r, 4, method=m, variable=v, bank="sensitivity") for v in variables]
            where = [_layer_and_size(r, m, v) for v in variables]
            rows.append((_name([r], m), *scores, _sensitive_average(r, m), _seconds(r, m), *where))
        head = ("Method", *variables, "Avg.", "Runtime (s)", *(f"{v} layer/dim" for v in variables))
        highest = (*(True for _ in variables), True, False)
        model = f" of {r.config['model']}" if r.config.get("model") else ""
        caption = (
            f"MCQA results{model} over {_seeds(r)}. Accuracy is exact counterfactual accuracy on sensitive pairs; "
            "layer/dim columns show the first seed."
        )
        found.append(PaperTable(caption, head, _bold(rows, highest)))
        found += _stage_a(r)
    return found


def _sensitive_average(reading: Reading, method: str) -> Cell:
    by_seed: dict[int, list[float]] = {}
    for x in reading.rows("records", method=method, bank="sensitivity"):
        by_seed.setdefault(x["seed"], []).append(x["accuracy"])
    return number([fmean(values) for values in by_seed.values()], 4)


def _layer_and_size(reading: Reading, method: str, variable: str) -> str:
    """L18/768: where the first seed's handle is, and how many directions it has."""
    chosen = reading.rows("selection", method=method, variable=variable)
    if not chosen:
        return "-"
    first = min(chosen, key=lambda s: int(s["seed"]))
    return f"{'+'.join(layer(p) for p in first['places'])}/{first['size']}"


def layer(place: str) -> str:
    """`block_output.18` is L18; other places keep their name."""
    found = re.fullmatch(r"block_output\.(\d+)(.*)", place)
    return f"L{found[1]}{found[2]}" if found else place


def _stage_a(reading: Reading) -> list[PaperTable]:
    """The layer that balanced (OT) and unbalanced (UOT) transport select, with its calibration score, per seed."""
    kinds = {"plot-eot": "OT", "plot": "UOT"}
    chosen = {m: reading.rows("selection", method=m) for m in kinds}
    if not all(chosen.values()):
        return []
    variables = reading.distinct("variable", "records")
    rows = []
    for seed in sorted({s["seed"] for some in chosen.values() for s in some}):
        cells = []
        for some in chosen.values():
            for v in variables:
                mine = [s for s in some if (s["seed"], s["variable"]) == (seed, v)]
                score = numbers(mine[0]["chosen"].get("calibration_score")) if mine else []
                cells.append(f"{layer(mine[0]['places'][0])} ({score[0]:.3f})" if score else "-")
        rows.append((str(seed), *cells))
    head = ("Seed", *(variables * 2))
    groups = (("", 1), *((name, len(variables)) for name in kinds.values()))
    return [PaperTable("Layers selected in Stage A, with their calibration scores.", head, tuple(rows), groups)]


# -- any other task -------------------------------------------------------------------------------------------


def _plain(readings: Sequence[Reading], every: bool) -> list[PaperTable]:
    found = []
    for r in readings:
        banks = banks_in(r.results)
        rows: list[tuple[Cell, ...]] = []
        for m in methods_of(r, every):
            scores = [_accuracies(r, 3, method=m, variable=v, bank=b) for v, b in banks]
            rows.append(
                (_name([r], m), *scores, number(list(average_by_seed(r.results, m).values()), 3), _seconds(r, m))
            )
        head = ("Method", *(f"{v} {b}" for v, b in banks), "Avg. exact", "Runtime (s)")
        highest = (*(True for _ in banks), True, False)
        found.append(PaperTable(f"Results over {_seeds(r)}.", head, _bold(rows, highest)))
    return found


def _bold(rows: Sequence[tuple[Cell, ...]], highest: Sequence[bool]) -> tuple[tuple[Cell, ...], ...]:
    """The best number of every column, as printed: the highest accuracy, the lowest runtime."""
    columns = list(zip(*rows, strict=True))
    for k, high in enumerate(highest, 1):
        shown = [round(c.mean, c.digits) for c in columns[k] if isinstance(c, Number)]
        if len(shown) > 1:
            best = max(shown) if high else min(shown)
            columns[k] = tuple(
                replace(c, best=round(c.mean, c.digits) == best) if isinstance(c, Number) else c for c in columns[k]
            )
    return tuple(zip(*columns, strict=True))


# -- as text --------------------------------------------------------------------------------------------------


def render(table: PaperTable, format: str) -> str:
    """The table in LaTeX (booktabs), Markdown, CSV or JSON."""
    if format not in FORMATS:
        unknown("table format", format, FORMATS)
    return FORMATS[format](table)


def render_all(tables: Sequence[PaperTable], format: str) -> str:
    """All tables one after the other; as JSON, one list of them."""
    made = [render(t, format) for t in tables]
    return f"[{', '.join(text.strip() for text in made)}]\n" if format == "json" else "\n".join(made)


TEXT_WIDTH = 390.0
"""Points that a line of a paper in one column has, a little less than in the usual styles."""
SIZES = {"": (1.0, 12.0), "\\footnotesize\\setlength{\\tabcolsep}{3pt}": (0.8, 6.0)}
"""Sizes of print: how wide letters are against ten-point type, and the space of a column."""


def _latex(table: PaperTable) -> str:
    """One tabular where it fits a line, in small print if need be; else several, each with the names of the rows."""
    every = list(range(len(table.head)))
    size = next((s for s, room in SIZES.items() if _points(table, every, *room) <= TEXT_WIDTH), list(SIZES)[-1])
    lines = ["\\begin{table}[t]", "\\centering", f"\\caption{{{_tex(table.caption)}}}", *([size] if size else [])]
    groups = _column_groups(table, *SIZES[size])
    for k, columns in enumerate(groups):
        lines += (["\\par\\medskip"] if k else []) + _tabular(table, columns, *SIZES[size])
    return "\n".join([*lines, "\\end{table}"]) + "\n"


def _points(table: PaperTable, columns: Sequence[int], letters: float, space: float) -> float:
    """About how wide a tabular of some columns is; a digit of ten-point type is five points wide."""
    texts = [[table.head[k], *(_markdown_cell(row[k]).strip("*") for row in table.rows)] for k in columns]
    return sum(5.3 * letters * max(map(len, column)) + space for column in texts)


def _column_groups(table: PaperTable, letters: float, space: float) -> list[list[int]]:
    """Columns by tabular: as many as fit a line beside the first; columns under one heading stay together."""
    over = [k for k, (_, span) in enumerate(table.groups) for _ in range(span)] or list(range(len(table.head)))
    units = [list(some) for _, some in groupby(range(1, len(table.head)), key=lambda k: over[k])]
    found: list[list[int]] = [[0]]
    for unit in units:
        if len(found[-1]) > 1 and _points(table, [*found[-1], *unit], letters, space) > TEXT_WIDTH:
            found.append([0])
        found[-1] += unit
    return found


def _tabular(table: PaperTable, columns: Sequence[int], letters: float, space: float) -> list[str]:
    numeric = [all(not isinstance(r[k], str) or r[k] == "-" for r in table.rows) for k in columns]
    kinds = ["c" if n else "l" for n in numeric]
    over_wide = _points(table, columns, letters, space) - TEXT_WIDTH
    if over_wide > 0 and kinds[-1] == "l":  # a column of words that is too long by itself is set as a paragraph
        kinds[-1] = f"p{{{_points(table, columns[-1:], letters, 0.0) - over_wide:.0f}pt}}"
    lines = [f"\\begin{{tabular}}{{{''.join(kinds)}}}", "\\toprule"]
    if table.groups:
        over = [title for title, span in table.groups for _ in range(span)]
        heads, rules, at = [], [], 1
        for title, run in groupby(over[k] for k in columns):
            span = len(list(run))
            heads.append(f"\\multicolumn{{{span}}}{{c}}{{{_tex(title)}}}" if title else "")
            rules += [f"\\cmidrule(lr){{{at}-{at + span - 1}}}"] if title else []
            at += span
        lines += [" & ".join(heads) + " \\\\", "".join(rules)]
    lines += [" & ".join(_tex(table.head[k]) for k in columns) + " \\\\", "\\midrule"]
    lines += [" & ".join(_tex_cell(row[k]) for k in columns) + " \\\\" for row in table.rows]
    return [*lines, "\\bottomrule", "\\end{tabular}"]


def _tex_cell(cell: Cell) -> str:
    if isinstance(cell, str):
        return _tex(cell)
    text = f"{cell.mean:.{cell.digits}f}" + (f" \\pm {cell.sd:.{cell.digits}f}" if cell.sd is not None else "")
    return f"$\\mathbf{{{text}}}$" if cell.best else f"${text}$"


FORMULA = ("=", "+", "-", "@")
"""What the cells begin with that spreadsheets compute."""
TEX = {"\\": "\\textbackslash{}", "~": "\\textasciitilde{}", "^": "\\textasciicircum{}", "±": "$\\pm$"}
TEX |= {c: f"\\{c}" for c in "&%$#{}"} | {"ε": "$\\varepsilon$", "λ": "$\\lambda$", "β": "$\\beta$"}


def _tex(text: str) -> str:
    """Text for LaTeX; `z_WX` is a variable with a subscript, other underscores are only underscores."""
    parts = re.split(r"(?<![\w\\])([A-Za-z])_(\w+)", text)
    plain = ["".join(TEX.get(c, c) for c in p).replace("_", "\\_") for p in parts[::3]]
    subscripted = [f"${a}_{{{b}}}$" for a, b in zip(parts[1::3], parts[2::3], strict=True)]
    return "".join(x for pair in zip(plain, [*subscripted, ""], strict=True) for x in pair)


def _markdown(table: PaperTable) -> str:
    head = list(table.head)
    if table.groups:
        over = [title for title, span in table.groups for _ in range(span)]
        head = [f"{o}: {h}" if o else h for o, h in zip(over, head, strict=True)]
    rows = [[_markdown_cell(c) for c in row] for row in table.rows]
    align = ["---" if all(isinstance(r[k], str) for r in table.rows) else "---:" for k in range(len(head))]
    lines = [head, align, *rows]
    return "\n".join([table.caption, "", *("| " + " | ".join(line) + " |" for line in lines)]) + "\n"


def _markdown_cell(cell: Cell) -> str:
    if isinstance(cell, str):
        return cell.replace("|", "\\|")
    text = f"{cell.mean:.{cell.digits}f}" + (f" ± {cell.sd:.{cell.digits}f}" if cell.sd is not None else "")
    return f"**{text}**" if cell.best else text


def _csv(table: PaperTable) -> str:
    """Unrounded; a column with spreads is followed by one that holds them."""
    over = [title for title, span in table.groups for _ in range(span)] or [""] * len(table.head)
    heads = [f"{o} {h}" if o else h for o, h in zip(over, table.head, strict=True)]
    spread = [any(isinstance(r[k], Number) and r[k].sd is not None for r in table.rows) for k in range(len(heads))]  # type: ignore[union-attr]
    file = io.StringIO()
    out = csv.writer(file, lineterminator="\n")
    heads = [_cell_text(h) for h in heads]
    out.writerow([x for h, s in zip(heads, spread, strict=True) for x in ([h, f"{h} sd"] if s else [h])])
    for row in table.rows:
        line: list[object] = []
        for c, s in zip(row, spread, strict=True):
            spreads = [c.sd if isinstance(c, Number) else ""] if s else []
            line += [c.mean if isinstance(c, Number) else _cell_text(c), *spreads]
        out.writerow(line)
    return file.getvalue()


def _cell_text(text: str) -> str:
    """Text on one line that no spreadsheet takes for a formula; a lone dash is none."""
    line = re.sub(r"\s", " ", text)
    return f"'{line}" if line.lstrip()[:1] in FORMULA and line != "-" else line


def _json(table: PaperTable) -> str:
    """Caption, column names and rows; a number with its spread, unrounded."""
    rows = [[c if isinstance(c, str) else {"mean": c.mean, "sd": c.sd} for c in row] for row in table.rows]
    over = [title for title, span in table.groups for _ in range(span)] or [""] * len(table.head)
    columns = [f"{o}: {h}" if o else h for o, h in zip(over, table.head, strict=True)]
    return to_json({"caption": table.caption, "columns": columns, "rows": rows})


FORMATS: dict[str, Callable[[PaperTable], str]] = {
    "latex": _latex,
    "markdown": _markdown,
    "csv": _csv,
    "json": _json,
}
