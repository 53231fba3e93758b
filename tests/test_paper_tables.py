"""The paper's tables: its rows and columns, the run's numbers, well-formed LaTeX, Markdown and CSV."""

import csv
import io
import json
import re
from statistics import fmean, pstdev

import pytest

from plot_ot.errors import PlotError
from plot_ot.files.run_directory import RunDirectory
from plot_ot.files.run_reading import read_run
from plot_ot.files.writing import write_json
from plot_ot.report.paper_tables import paper_tables, render
from report_runs import text_run

HEQ = ("z_WX", "z_YZ")
ADDER = {"plot-native": 0.8, "plot-pca": 0.9, "plot-das": 0.95, "das": 0.9506, "plot": 0.7, "random": 0.3}


def write_run(path, task, methods, variables, seeds=(3, 4), **config):
    """A run with a different number in every record."""
    run = RunDirectory.open(path, {"task": task, "methods": list(methods), "seeds": list(seeds), **config}, {})
    results: dict = {"task": task, "records": [], "runtimes": [], "selection": [], "verdicts": []}
    for seed in seeds:
        for k, (method, level) in enumerate(methods.items()):
            key = {"seed": seed, "method": method, "subject": "net"}
            for n, v in enumerate(variables):
                for bank, more in (("sensitivity", 0.001), ("invariance", 0.01)):
                    accuracy = level + more + 0.002 * n + 0.003 * (seed - 3)
                    results["records"].append({**key, "variable": v, "bank": bank, "accuracy": accuracy})
                chosen = {"K": 2, "strength": 1.5, "epsilon": 4.0, "calibration_score": 0.5 + 0.01 * k + 0.1 * n}
                place = f"block_output.{10 + k + n + seed}" if task == "mcqa" else "layer1"
                results["selection"].append({**key, "variable": v, "size": 5 + k, "places": [place], "chosen": chosen})
            results["runtimes"].append(
                {**key, "seconds": 10.0 * (k + 1) + seed, "parts": {"das": 10.0 * (k + 1) + seed}}
            )
    write_json(path / "results.json", results)
    return run.path, results


def spelled(values, digits):
    return f"{fmean(values):.{digits}f} ± {pstdev(values):.{digits}f}"


def cells(markdown):
    lines = [line for line in markdown.splitlines() if line.startswith("|")]
    head, _, *rows = [[c.strip().strip("*") for c in line.strip("|").split(" | ")] for line in lines]
    return head, {row[0]: row[1:] for row in rows}


def test_heq_has_the_papers_rows_and_columns(tmp_path):
    path, results = write_run(tmp_path / "heq", "heq", {"plot": 0.9, "das": 0.95, "random": 0.5}, HEQ)
    main, seed = paper_tables([read_run(path)])
    head, rows = cells(render(main, "markdown"))
    assert head == ["Metric", "PLOT", "DAS"]
    assert list(rows) == [f"{v} {b}" for v in HEQ for b in ("sensitivity", "invariance")] + [
        "Avg. exact",
        "Runtime (s)",
    ]
    for column, method in enumerate(("plot", "das")):
        mine = [r for r in results["records"] if r["method"] == method]
        for v in HEQ:
            for b in ("sensitivity", "invariance"):
                hits = [r["accuracy"] for r in mine if (r["variable"], r["bank"]) == (v, b)]
                assert rows[f"{v} {b}"][column] == spelled(hits, 3)
        averages = [fmean(r["accuracy"] for r in mine if r["seed"] == s) for s in (3, 4)]
        assert rows["Avg. exact"][column] == spelled(averages, 3)
        seconds = [t["seconds"] for t in results["runtimes"] if t["method"] == method]
        assert rows["Runtime (s)"][column] == spelled(seconds, 1)
    head, rows = cells(render(seed, "markdown"))
    assert head == ["Method", *HEQ, "Average", "Runtime (s)", "Best setting"]
    first = [r["accuracy"] for r in results["records"] if (r["method"], r["seed"]) == ("plot", 3)]
    assert rows["PLOT"][:3] == [f"{fmean(x):.4f}" for x in (first[:2], first[2:], first)]
    assert rows["PLOT"][4] == "z_WX: K = 2, λ = 1.5, ε = 4 in layer1; z_YZ: K = 2, λ = 1.5, ε = 4 in layer1"


def test_widths_of_the_adder_stand_side_by_side_with_the_best_in_bold(tmp_path):
    paths = [
        write_run(tmp_path / f"d{d}", "addition", ADDER, ("C1", "C2", "C3"), width=d)[0] for d in (8, 16)
    ]  # fmt: skip
    [table] = paper_tables([read_run(p) for p in paths])
    assert table.groups == (("", 1), ("d = 8", 2), ("d = 16", 2))
    latex = render(table, "latex")
    body = latex.split("\\midrule")[1].split("\\bottomrule")[0]
    lines = [line.split(" & ") for line in body.strip().splitlines()]
    assert [line[0] for line in lines] == ["PLOT-native", "PLOT-pca", "PLOT-DAS", "Full DAS"]
    assert [["\\mathbf" in c for c in line[1:3]] for line in lines] == [
        [False, True],
        [False, False],
        [False, False],
        [True, False],
    ]
    assert "\\multicolumn{2}{c}{d = 16}" in latex
    assert "\\cmidrule(lr){4-5}" in latex


def test_mcqa_shows_layers_and_sizes_and_what_the_two_transports_select(tmp_path):
    methods = {"plot-native": 0.8, "plot-pca-das": 0.7, "das": 0.9, "plot": 0.6, "plot-eot": 0.1}
    path, results = write_run(tmp_path / "mcqa", "mcqa", methods, ("AP", "AT"), model="tiny")
    main, selected = paper_tables([read_run(path)])
    head, rows = cells(render(main, "markdown"))
    assert head == ["Method", "AP", "AT", "Avg.", "Runtime (s)", "AP layer/dim", "AT layer/dim"]
    assert list(rows) == ["PLOT-native", "PLOT-pca-DAS", "Full DAS"]
    assert rows["PLOT-native"][-2:] == ["L13/5", "L14/5"]
    mine = [r for r in results["records"] if r["method"] == "plot-native" and r["bank"] == "sensitivity"]
    assert rows["PLOT-native"][0] == spelled([r["accuracy"] for r in mine if r["variable"] == "AP"], 4)
    assert rows["PLOT-native"][2] == spelled([fmean(r["accuracy"] for r in mine if r["seed"] == s) for s in (3, 4)], 4)
    head, rows = cells(render(selected, "markdown"))
    assert head == ["Seed", "OT: AP", "OT: AT", "UOT: AP", "UOT: AT"]
    assert rows["3"] == ["L17 (0.540)", "L18 (0.640)", "L16 (0.530)", "L17 (0.630)"]


def test_other_tasks_get_methods_by_banks(tmp_path):
    path, _ = write_run(tmp_path / "own", "localize", {"plot-layered": 0.9}, ("a",))
    head, rows = cells(render(paper_tables([read_run(path)])[0], "markdown"))
    assert head == ["Method", "a sensitivity", "a invariance", "Avg. exact", "Runtime (s)"]
    assert list(rows) == ["plot-layered"]


def test_all_methods_can_be_asked_for(tmp_path):
    path, _ = write_run(tmp_path / "heq", "heq", {"random": 0.5, "plot": 0.9, "das": 0.95}, HEQ)
    head, _ = cells(render(paper_tables([read_run(path)], every=True)[0], "markdown"))
    assert head == ["Metric", "PLOT", "DAS", "random"]


@pytest.mark.parametrize("kind", ["latex", "markdown", "csv", "json"])
def test_every_format_is_well_formed(tmp_path, kind):
    for table in paper_tables([read_run(text_run(tmp_path / "text").path)]):
        text = render(table, kind)
        if kind == "csv":
            rows = list(csv.reader(io.StringIO(text)))
            assert len({len(r) for r in rows}) == 1
        elif kind == "latex":
            plain = re.sub(r"\\[{}]", "", text)
            assert plain.count("{") == plain.count("}")
            for part in text.split("\\begin{tabular}")[1:]:
                columns = len(re.sub(r"p\{\w+\}", "p", part[1 : part.index("\n") - 1]))
                lines = [line for line in part.splitlines() if line.endswith("\\\\") and "multicolumn" not in line]
                assert {line.count("&") for line in lines} == {columns - 1}
        elif kind == "json":
            found = json.loads(text)
            assert found["columns"][0] == table.head[0]
            assert len(found["rows"]) == len(table.rows)
        else:
            assert len({line.count(" | ") for line in text.splitlines() if line.startswith("|")}) == 1


def points(line: str) -> float:
    """About how wide a line of a tabular is in ten-point type, by the widths of Computer Modern's letters."""
    shown = re.sub(r"\\(mathbf|multicolumn)|\\varepsilon|\\lambda|[${}\\]", "", line).replace("pm", "±")
    widths = {"m": 8.3, "w": 7.2, "±": 12.2, " ": 3.3, "i": 2.8, "l": 2.8, "t": 3.9, ".": 2.8, ",": 2.8, "1": 5.0}
    cells = shown.split("&")
    return sum(sum(widths.get(c, 5.0) for c in cell.strip()) for cell in cells)


def test_b10_latex_tables_fit_a_line(tmp_path):
    """B10: two of them were more than 200 points too wide."""
    many = {f"a-method-with-a-name-{k}": 0.5 + 0.01 * k for k in range(12)}
    heq, _ = write_run(tmp_path / "heq", "heq", many | {"plot": 0.9}, HEQ)
    for run in (text_run(tmp_path / "text").path, heq):
        for table in paper_tables([read_run(run)], every=True):
            text = render(table, "latex")
            small, space = (0.8, 6) if "footnotesize" in text else (1.0, 12)
            names = [row[0] for row in table.rows]
            for part in text.split("\\begin{tabular}")[1:]:
                lines = [line for line in part.splitlines() if line.endswith("\\\\")]
                widest = max(small * points(line) + space * (line.count("&") + 1) for line in lines)
                assert widest < 410 or "p{" in part
                assert len(lines) >= len(names)  # every tabular names all rows


def test_csv_is_not_rounded(tmp_path):
    path, results = write_run(tmp_path / "heq", "heq", {"plot": 1 / 3, "das": 0.95}, HEQ)
    rows = list(csv.DictReader(io.StringIO(render(paper_tables([read_run(path)])[0], "csv"))))
    hits = [r["accuracy"] for r in results["records"][:1] + results["records"][8:9]]
    assert float(rows[0]["PLOT"]) == fmean(hits)
    assert float(rows[0]["PLOT sd"]) == pstdev(hits)


def test_latex_signs_in_names_are_only_signs(tmp_path):
    path, _ = write_run(tmp_path / "own", "localize", {"100%_$x & {y}": 0.9, "z_WX": 0.8}, ("a_b",))
    latex = render(paper_tables([read_run(path)])[0], "latex")
    assert "100\\%\\_\\$x \\& \\{y\\}" in latex
    assert "$z_{WX}$" in latex


def test_what_makes_no_table_is_said(tmp_path):
    heq, _ = write_run(tmp_path / "heq", "heq", {"plot": 0.9}, HEQ)
    own, _ = write_run(tmp_path / "own", "localize", {"plot": 0.9}, HEQ)
    with pytest.raises(PlotError, match="different tasks"):
        paper_tables([read_run(heq), read_run(own)])
    (own / "results.json").write_text(json.dumps({"task": "heq", "records": [], "runtimes": []}))
    with pytest.raises(PlotError, match="no test accuracy"):
        paper_tables([read_run(own)])
    with pytest.raises(PlotError, match="Unknown table format 'html'"):
        render(paper_tables([read_run(heq)])[0], "html")
