"""The tables of a run, as rich tables for the terminal. Spread over seeds is the population standard deviation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import fmean, median, pstdev

from rich import box
from rich.table import Table

from plot_ot.abstract.banks import Bank
from plot_ot.files.writing import Json
from plot_ot.judging.status import Status
from plot_ot.report.flags import kinds_of


def plain_table(title: str) -> Table:
    """An empty table in the style all tables share: one rule under the head, little padding."""
    return Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))


CONTROLS = ("no-edit", "copy-source")


def mean_sd(values: Sequence[float], digits: int = 3) -> str:
    """Write `mean ± population sd`; a single seed has no spread."""
    if not values:
        return "-"
    spread = f" ± {pstdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{fmean(values):.{digits}f}{spread}"


def methods_in(results: Json) -> list[str]:
    """Methods with records, controls last, otherwise in the order of the results."""
    names = list(dict.fromkeys(r["method"] for r in results["records"]))
    return [n for n in names if n not in CONTROLS] + [n for n in CONTROLS if n in names]


def banks_in(results: Json) -> list[tuple[str, str]]:
    """The pairs (variable, bank) that have records, in the order of the results."""
    return list(dict.fromkeys((r["variable"], r["bank"]) for r in results["records"]))


def average_by_seed(results: Json, method: str, field: str = "accuracy") -> dict[int, float]:
    """Per seed, the mean over all sensitivity and invariance banks ("avg. exact")."""
    by_seed: dict[int, list[float]] = {}
    for r in results["records"]:
        if r["method"] == method and r.get(field) is not None:
            by_seed.setdefault(r["seed"], []).append(r[field])
    return {seed: fmean(values) for seed, values in by_seed.items()}


def stretch_of(results: Json, method: str) -> str:
    """How far a method's edits push states, natural = 1: the median over seeds and variables."""
    told = [s.get("evidence") or {} for s in results.get("selection", []) if s["method"] == method]
    found = [e["stretch"] for e in told if e.get("stretch") is not None]
    return f"{median(found):.2f}" if found else "-"


def accuracy_table(results: Json, width: int = 120) -> Table:
    """Mean ± sd over seeds, per bank and on average, with controls and seconds; fewer spreads where space is short."""
    seeds = sorted({r["seed"] for r in results["records"]})
    wide = len(seeds) > 1 and width >= 50 + 16 * len(banks_in(results))
    table = plain_table(f"Exact counterfactual accuracy, {len(seeds)} seed{'s' if len(seeds) != 1 else ''}")
    table.add_column("method", style="bold", no_wrap=True)
    banks = banks_in(results)
    for variable, bank in banks:
        table.add_column(f"{variable}\n{bank[:4]}.", justify="right", no_wrap=True)
    table.add_column("average", justify="right", style="bold", no_wrap=True)
    table.add_column("whole\nplace", justify="right", no_wrap=True)
    table.add_column("stretch", justify="right", no_wrap=True)
    table.add_column("seconds", justify="right", no_wrap=True)
    for method in methods_in(results):
        if method == CONTROLS[0]:
            table.add_section()
        cells = []
        for variable, bank in banks:
            wanted = (method, variable, bank)
            hits = [r["accuracy"] for r in results["records"] if (r["method"], r["variable"], r["bank"]) == wanted]
            cells.append(mean_sd(hits) if wide or not hits else f"{fmean(hits):.3f}")
        average = mean_sd(list(average_by_seed(results, method).values()))
        patches = list(average_by_seed(results, method, "full_patch").values())
        spent = [t["seconds"] for t in results["runtimes"] if t["method"] == method]
        seconds = mean_sd(spent, 2) if wide or not spent else f"{fmean(spent):.2f}"
        patch = f"{fmean(patches):.3f}" if patches else "-"
        table.add_row(method, *cells, average, patch, stretch_of(results, method), seconds)
    return table


def runtime_table(results: Json) -> Table:
    """Seconds per part, each method charged what it would cost alone and cold."""
    every = dict.fromkeys(p for t in results["runtimes"] for p in t["parts"])
    parts = [p for p in every if any(t["parts"].get(p) for t in results["runtimes"])]
    table = plain_table("Seconds per part (mean over seeds)")
    table.add_column("method", style="bold", no_wrap=True)
    for part in [*parts, "total"]:
        table.add_column(part, justify="right")
    for method in methods_in(results):
        rows = [t for t in results["runtimes"] if t["method"] == method]
        if rows:
            cells = [f"{fmean(t['parts'].get(p, 0.0) for t in rows):.3f}" for p in parts]
            table.add_row(method, *cells, f"{fmean(t['seconds'] for t in rows):.3f}")
    return table


def verdict_table(results: Json) -> Table:
    """How many seeds got each verdict, per method and variable."""
    table = plain_table("Verdicts (seeds)")
    variables = list(dict.fromkeys(v["variable"] for v in results["verdicts"]))
    for column in ("method", *variables):
        table.add_column(column)
    for method in dict.fromkeys(v["method"] for v in results["verdicts"]):
        cells = []
        for variable in variables:
            said = [
                Status(v["status"]) for v in results["verdicts"] if (v["method"], v["variable"]) == (method, variable)
            ]
            cells.append(", ".join(f"{status} ({said.count(status)})" for status in dict.fromkeys(said)))
        table.add_row(method, *cells)
    return table


def selection_table(results: Json) -> Table:
    """What calibration chose, for the first seed."""
    table = plain_table("Chosen on calibration (first seed)")
    for column in ("method", "variable", "places", "size", "setting", "calibration"):
        table.add_column(column, overflow="fold")
    first = min((s["seed"] for s in results["selection"]), default=None)
    for s in results["selection"]:
        if s["seed"] == first:
            c = s["chosen"]
            found = {"k": c.get("k"), "K": c.get("K"), "λ": c.get("strength")}
            setting = c.get("form") or ""
            setting = ", ".join([setting] * bool(setting) + [f"{n} = {x}" for n, x in found.items() if x is not None])
            if c.get("epsilon") is not None:
                setting += f", ε = {c['epsilon']}"
            score = f"{c['calibration_score']:.3f}"
            table.add_row(s["method"], s["variable"], ", ".join(s["places"]), str(s["size"]), setting, score)
    return table


def coupling_flags(couplings: Sequence[Json]) -> list[str]:
    """Each degeneracy once, with the methods and how many couplings it concerns."""
    found = Counter((c["method"], kind) for c in couplings for kind in kinds_of(c))
    return [f"{method}: {flag} ({n} coupling{'s' if n > 1 else ''})" for (method, flag), n in found.items()]


def power_table(tests: Mapping[tuple[str, str], Bank]) -> Table:
    """What the test banks can show: pairs that tell a variable's swap from each confusion."""
    table = plain_table("Sensitivity test banks: pairs whose counterfactual label differs from")
    for column in ("variable", "pairs", "the base's answer", "the source's answer", "another variable's swap"):
        table.add_column(column, justify="left" if column == "variable" else "right")
    for (variable, kind), bank in tests.items():
        if kind == "sensitivity":
            p = bank.power(variable)
            others = ", ".join(f"{o}: {n}" for o, n in p.against_others.items())
            table.add_row(variable, str(p.pairs), str(p.against_base), str(p.against_source), others)
    return table


def cross_table(results: Json) -> Table:
    """Handle i scored on the labels of variable j, on i's sensitivity pairs: mean over seeds."""
    labels = list(dict.fromkeys(c["labels"] for c in results["cross"]))
    table = plain_table("Handles on other variables' labels (sensitivity pairs, mean over seeds)")
    for column in ("method", "handle", *labels):
        table.add_column(column, justify="left" if column in ("method", "handle") else "right")
    for method, handle in dict.fromkeys((c["method"], c["handle"]) for c in results["cross"]):
        mine = [c for c in results["cross"] if (c["method"], c["handle"]) == (method, handle)]
        table.add_row(
            method, handle, *(f"{fmean(c['accuracy'] for c in mine if c['labels'] == j):.3f}" for j in labels)
        )
    return table


def inputs_said(results: Json) -> list[str]:
    """Which inputs count, how many are answered right and what is held out, as sentences."""
    kept = [n.get("inputs") for n in results["notes"]]
    told = [s for some in kept if isinstance(some, list) for s in some if isinstance(s, str) and s]
    return list(dict.fromkeys(f"{s[:1].upper()}{s[1:]}." for s in told))


def bank_lines(results: Json) -> list[str]:
    """What the banks are made of: pass rates, shared inputs, and pairs that tell a handle from copying the source."""
    lines = []
    rates = [n["pass_rates"] for n in results["notes"] if n.get("pass_rates")]
    if rates and all(isinstance(cell, dict) for r in rates for cell in r.values()):  # text tasks: split -> family
        for split in rates[0]:
            found = {f: [r[split][f] for r in rates if f in r.get(split, {})] for f in rates[0][split]}
            shown = ", ".join(f"{family} {mean_sd(rate)}" for family, rate in found.items())
            lines.append(f"Pairs with both prompts answered correctly, {split}: {shown}.")
    elif rates:
        cells = {cell: [r[cell] for r in rates if r.get(cell) is not None] for cell in rates[0]}
        shown = ", ".join(f"{cell} {mean_sd(found, 4)}" for cell, found in cells.items())
        lines.append(f"Inputs the network answers correctly, by cell: {shown}; only these are paired.")
    lines += inputs_said(results)
    shared = [n["shared_sources"] for n in results["notes"] if n.get("shared_sources")]
    if shared:
        most = {pair: max(s[pair] for s in shared) for pair in shared[0]}
        lines.append("Source inputs shared between splits, at most: " + ", ".join(f"{p} {c}" for p, c in most.items()))
    powers = [n for n in results["notes"] if n.get("power")]
    for variable in dict.fromkeys(n["variable"] for n in powers):
        share = [n["power"]["against_source"] / n["power"]["pairs"] for n in powers if n["variable"] == variable]
        lines.append(f"{variable}: copying the source is wrong on {mean_sd(share)} of the test pairs that change it.")
    return lines
