"""The report page: its numbers are the results', its text is only text, and damage is named instead of hidden."""

import base64
import gzip
import json
import random
from html.parser import HTMLParser
from statistics import fmean, pstdev

import pytest

import report_runs
from plot_ot.errors import PlotError
from plot_ot.files.run_directory import RunDirectory
from plot_ot.files.run_reading import read_run
from plot_ot.files.seals import sealed
from plot_ot.report import payload as payloads
from plot_ot.report.findings import finding
from plot_ot.report.page import fragment, page, unwrapped, write_page
from plot_ot.report.summary import best_method, warnings, why_best
from plot_ot.report.words import percent
from report_runs import NASTY, VARIABLES, text_run

METHODS = ("plot-native", "plot-pca", "das", "full-vector", "no-edit", "copy-source")
BANKS = [(v, b) for v in VARIABLES for b in ("sensitivity", "invariance")]


class Document(HTMLParser):
    """What a browser would see: tables by heading row, scripts, tags, and the text outside scripts."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tables: list[list[list[str]]] = []
        self.scripts: list[dict] = []
        self.tags: list[tuple[str, dict]] = []
        self.text: list[str] = []
        self._cell: list[str] | None = None
        self._inside = ""
        self.feed(html)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag == "table":
            self.tables.append([])
        elif tag == "tr" and self.tables:
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self._cell = []
        elif tag == "br" and self._cell is not None:
            self._cell.append(" ")
        elif tag in ("script", "style"):
            self._inside = tag
            if tag == "script":
                self.scripts.append({**dict(attrs), "text": ""})

    def handle_endtag(self, tag):
        if tag in ("td", "th") and self._cell is not None:
            self.tables[-1][-1].append(" ".join("".join(self._cell).split()))
            self._cell = None
        elif tag in ("script", "style"):
            self._inside = ""

    def handle_data(self, data):
        if self._inside == "script":
            self.scripts[-1]["text"] += data
        elif not self._inside:
            self.text.append(data)
            if self._cell is not None:
                self._cell.append(data)

    def table(self, *head: str) -> list[list[str]]:
        """The rows of the first table whose heading starts so."""
        return next(t[1:] for t in self.tables if t and t[0][: len(head)] == list(head))

    def data(self) -> dict:
        packed = next(s["text"] for s in self.scripts if s.get("id") == "data")
        return json.loads(gzip.decompress(base64.b64decode(packed)))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return text_run(tmp_path_factory.mktemp("runs") / "text").path


@pytest.fixture(scope="module")
def results(run):
    return json.loads((run / "results.json").read_text())


@pytest.fixture(scope="module")
def html(run):
    return page([run])


@pytest.fixture(scope="module")
def document(html):
    return Document(html)


def spelled(values, digits=3):
    return f"{fmean(values):.{digits}f} ± {pstdev(values):.{digits}f}"


def rows_of(results, name, **fields):
    return [r for r in results[name] if all(r[k] == v for k, v in fields.items())]


# -- numbers --------------------------------------------------------------------------------------------------


def test_the_accuracy_table_holds_the_means_and_spreads_of_the_records(document, results):
    shown = {row[0]: row[1:] for row in document.table("method", "AnswerPointer sensitivity")}
    assert set(shown) == set(METHODS)
    for method, cells in shown.items():
        mine = rows_of(results, "records", method=method)
        wanted = [spelled([r["accuracy"] for r in mine if (r["variable"], r["bank"]) == b]) for b in BANKS]
        wanted.append(spelled([fmean(r["accuracy"] for r in mine if r["seed"] == s) for s in (1, 2)]))
        seconds = [t["seconds"] for t in rows_of(results, "runtimes", method=method)]
        wanted += ["0.400", spelled(seconds, 2)] if seconds else ["–", "–"]
        assert cells == wanted


def test_every_seed_and_family_is_in_its_table(document, results):
    per_seed = [t for t in document.tables if t[0][0] == "seed"]
    families = [t for t in document.tables if t[0][:3] == ["variable", "bank", "family"]]
    assert len(per_seed) == len(families) == len(METHODS)
    for method, seeds, kinds in zip(METHODS, per_seed, families, strict=True):
        for seed, *cells in seeds[1:]:
            for (v, b), cell in zip(BANKS, cells, strict=True):
                [r] = rows_of(results, "records", method=method, variable=v, bank=b, seed=int(seed))
                low, high = r["interval"]
                assert cell == f"{r['accuracy']:.3f} [{low:.3f}, {high:.3f}]"
        for v, b, family, accuracy, pairs in kinds[1:]:
            some = [r["families"][family] for r in rows_of(results, "records", method=method, variable=v, bank=b)]
            assert accuracy == spelled([a["value"] for a in some])
            assert pairs == f"{sum(a['pairs'] for a in some):,}"


def test_the_cross_table_holds_every_handle_on_every_variables_labels(document, results):
    shown = [t for t in document.tables if t[0] == ["handle", *VARIABLES]]
    assert len(shown) == 4
    for method, table in zip(METHODS, shown, strict=False):
        for handle, *scores in table[1:]:
            for label, score in zip(VARIABLES, scores, strict=True):
                hits = [c["accuracy"] for c in rows_of(results, "cross", method=method, handle=handle, labels=label)]
                assert score == f"{fmean(hits):.3f}"


def test_the_runtime_table_splits_by_part(document, results):
    parts = ["recording", "signatures", "calibration", "das", "test"]
    for method, *cells in document.table("method", *parts):
        mine = rows_of(results, "runtimes", method=method)
        wanted = [f"{fmean(t['parts'][p] for t in mine):.3f}" for p in parts]
        assert cells == [*wanted, spelled([t["seconds"] for t in mine])]


def test_cards_say_where_how_well_and_beside_what(document, results):
    """B1: with two seeds no card named a place."""
    said = " ".join(" ".join(document.text).split())
    where = {"plot-native": "4 neurons", "plot-pca": "4 principal components", "das": "8 directions"}
    for method, taken in where.items():
        for k, v in enumerate(VARIABLES):
            mine = rows_of(results, "verdicts", method=method, variable=v)
            handles = [m["evidence"]["handle"] for m in mine]
            low, high = min(handles), max(handles)
            reach = (
                f"right on {100 * fmean(handles):.0f} % of the 90 test pairs that can tell on average [{100 * low:.0f}"
            )
            assert reach.replace("right", "Right" if method != "plot-native" else "right") in said
            assert f"{taken} of block {3 + k}, last token" in said.replace("(", "")
            assert f"–{100 * high:.0f}]; copying the source's answer 10 %, random handles 30 %." in said
            assert all(m["sentence"] in said for m in mine)
    assert "weak invariance in 2 of 2 seeds: the lower bound is 85 % of the pairs that keep the variable" in said
    assert "calibration has only 30 pairs that change it" in said
    assert "saturated" in said


def test_charts_get_the_results_as_they_are(document, results, run):
    data = document.data()
    assert data["results"] == {k: v for k, v in results.items() if k not in ("format", "surfaces", "examples")} | {
        "transfer": []
    }
    for seed in ("1", "2"):
        examples = data["examples"][seed]
        assert examples == rows_of(results, "examples", seed=int(seed))
        for method, by_variable in data["surfaces"][seed].items():
            for v, surface in by_variable.items():
                [s] = rows_of(results, "surfaces", seed=int(seed), method=method, variable=v)
                assert all(surface[k] == s[k] for k in ("sizes", "strengths", "scores", "K", "strength"))
    for m in data["methods"]:
        mine = rows_of(results, "records", method=m["name"])
        by_seed = [fmean(r["accuracy"] for r in mine if r["seed"] == s) for s in (1, 2)]
        assert m["accuracy"]["mean"] == fmean(by_seed)
        assert list(m["accuracy"]["seeds"].values()) == by_seed
    couplings = json.loads((run / "couplings.json").read_text())
    for method in ("plot-native", "plot-pca"):
        for v in VARIABLES:
            stages = data["couplings"]["1"][method][v]["stages"]
            assert len(stages) == 2
            for n, stage in enumerate(stages):
                names = data["menus"][stage["menu"]]["names"]
                [c] = [c for c in rows_of({"c": couplings}, "c", seed=1, method=method, stage=n) if c["sites"] == names]
                assert stage["before"] == pytest.approx(c["plan"][VARIABLES.index(v)], rel=1e-5)
                assert stage["norms"] == pytest.approx(c["raw_norms"], rel=1e-5)


def test_the_zoom_goes_from_tokens_to_layers_to_components(document):
    levels = document.data()["zoom"]["1"]["plot-pca"]["AnswerPointer"]["levels"]
    assert [v["title"] for v in levels] == ["tokens", "layers", "principal components"]
    taken = [[i[0] for i in v["items"] if i[4]] for v in levels]
    place = "block_output.3@-1"
    assert taken == [["last token"], [place], [f"{place}.pc[0:2]", f"{place}.pc[0:4]"]]
    tokens, layers, _ = levels
    assert sum(i[1] for i in tokens["items"]) == pytest.approx(tokens["total"])
    last = next(i[1] for i in tokens["items"] if i[0] == "last token")
    assert sum(i[1] for i in layers["items"]) == pytest.approx(last, rel=1e-5)


def test_weights_after_calibration_are_the_handles_gains(document):
    data = document.data()
    stage = data["couplings"]["1"]["plot-pca"]["AnswerToken"]["stages"][1]
    assert sum(stage["after"]) == pytest.approx(1.2)
    assert [w > 0 for w in stage["after"]] == [False, True, True, False]
    assert data["handles"]["1"]["plot-pca"]["AnswerToken"]["edits"][0]["own"] == pytest.approx(
        [1.2, 1.2, 0.6, 0.6, 0, 0, 0, 0]
    )


def test_the_best_method_is_chosen_on_calibration(run):
    assert best_method(read_run(run)) == "plot-pca"  # das does better on test, and fits no coupling


def test_a_method_that_did_better_without_a_coupling_is_named(run):
    def score(method: str, calibration: float) -> None:
        for s in reading.results["selection"]:
            if s["method"] == method:
                s["chosen"]["calibration_score"] = calibration

    reading = read_run(run)
    score("plot-pca", 0.9)
    score("das", 0.95)
    assert why_best(reading, "plot-pca") == (
        "plot-pca did best on calibration pairs of the methods that fit a coupling; das, which fits none, did better "
        "still."
    )
    score("das", 0.9)  # no better
    assert why_best(reading, "plot-pca") == "plot-pca did best on calibration pairs of the methods that fit a coupling."
    reading.couplings.clear()
    assert why_best(reading, "plot-pca") == "plot-pca did best on calibration pairs."


def test_a_caption_speaks_only_of_what_is_there(tmp_path, html):
    said = "Marked tokens are where the swap happens", "The dashed line is the same search on shuffled values"
    assert all(part in html for part in said)
    path = text_run(tmp_path / "plain").path
    results = json.loads((path / "results.json").read_text())
    for e in results["examples"]:
        e.pop("position", None)
    for s in results["selection"]:
        if "capacity" in s:
            s["capacity"].pop("shuffled")
    (path / "results.json").write_text(json.dumps(sealed(results)))
    assert not any(part in page([path]) for part in said)


# -- text is only text ----------------------------------------------------------------------------------------


def test_names_and_prompts_cannot_become_markup(tmp_path, monkeypatch):
    monkeypatch.setattr("report_runs.VARIABLES", (NASTY, "AnswerToken"))
    run = text_run(tmp_path / "nasty")
    results = json.loads((run.path / "results.json").read_text())
    for r in [*results["verdicts"], *results["records"]]:
        r["method"] = NASTY if r["method"] == "das" else r["method"]
    results["verdicts"][0]["sentence"] = NASTY
    (run.path / "results.json").write_text(json.dumps(sealed(results)))
    document = Document(page([run.path]))
    assert len(document.scripts) == 4
    assert sum("nonce" in s for s in document.scripts) == 2
    assert not [a for tag, a in document.tags if tag == "img" or any(k.startswith("on") for k in a)]
    assert NASTY in "".join(document.text)
    assert document.data()["examples"]["1"] == [e for e in results["examples"] if e["seed"] == 1]


def test_the_policy_allows_no_request_and_only_the_pages_own_scripts(html, document):
    [policy] = [a["content"] for tag, a in document.tags if a.get("http-equiv") == "Content-Security-Policy"]
    rules = dict(part.strip().split(" ", 1) for part in policy.split(";"))
    assert rules["default-src"] == "'none'"
    [nonce] = {s["nonce"] for s in document.scripts if "nonce" in s}
    assert rules["script-src"] == f"'nonce-{nonce}'"
    linked = [a.get("src") or a.get("href") for _, a in document.tags if a.get("src") or a.get("href")]
    assert not [x for x in linked if not x.startswith(("#", "figures/"))]


def test_the_same_run_gives_the_same_page(run, html):
    assert page([run]) == html


# -- size -----------------------------------------------------------------------------------------------------


def test_seeds_that_do_not_fit_are_left_out_and_named(run, monkeypatch):
    monkeypatch.setattr(payloads, "ROOM", 20_000)
    document = Document(page([run]))
    data = document.data()
    assert data["left_out"]
    assert all(f"Left out to keep the page small: {x}." in " ".join(document.text) for x in data["left_out"])
    kept = {part: data[part] for part in ("zoom", "examples", "couplings", "handles", "surfaces")}
    assert len(json.dumps(kept)) < 25_000


def test_ten_seeds_stay_below_six_megabytes(tmp_path, monkeypatch):
    draw = random.Random(0)

    def surface(seed, method, variable, small=report_runs.surface):
        scores = [[round(draw.random(), 4) for _ in range(152)] for _ in range(20)]  # HEQ's grid, incompressible
        return small(seed, method, variable) | {
            "sizes": list(range(20)),
            "strengths": list(range(152)),
            "scores": scores,
        }

    monkeypatch.setattr("report_runs.surface", surface)
    run = text_run(tmp_path / "large", seeds=tuple(range(1, 11)))
    results = json.loads((run.path / "results.json").read_text())
    more = [{**s, "method": f"{s['method']}-{k}"} for k in range(4) for s in results["surfaces"]]
    (run.path / "results.json").write_text(json.dumps(sealed(results | {"surfaces": results["surfaces"] + more})))
    target = write_page([run.path])
    assert target == run.path / "report.html"
    assert target.stat().st_size <= 6_000_000


# -- unfinished and damaged runs ------------------------------------------------------------------------------


def test_a_run_that_is_going_on_shows_what_is_done(tmp_path, results):
    text_run(tmp_path / "text")
    unit = {name: rows_of(results, name, seed=1) for name in ("records", "runtimes", "selection", "verdicts")}
    path = tmp_path / "text"
    (path / "results.json").unlink()
    with RunDirectory.open(path, read_run(path).config, {"plot_ot": "0.1.0"}) as run:
        run.finish(1, "plot-pca", unit)
    document = Document(page([path]))
    assert "The run is not finished: this page shows the 1 units of work done so far." in " ".join(document.text)
    cell = document.table("method", "AnswerPointer sensitivity")[0][1]
    [r] = rows_of(results, "records", method="plot-native", variable="AnswerPointer", bank="sensitivity", seed=1)
    assert cell == f"{r['accuracy']:.3f} [{r['interval'][0]:.3f}, {r['interval'][1]:.3f}]"


DAMAGES = {
    "results.json is missing": lambda p: (p / "results.json").unlink(),
    "results.json cannot be read": lambda p: (p / "results.json").write_text('{"records": [1, 2'),
    "results.json is damaged": lambda p: (p / "results.json").write_text("[]"),
    "couplings.json is missing": lambda p: (p / "couplings.json").unlink(),
    "couplings.json cannot be read": lambda p: (p / "couplings.json").write_bytes(b"\xff\xfe\x00"),
    "manifest.json is missing": lambda p: (p / "manifest.json").unlink(),
    "manifest.json cannot be read": lambda p: (p / "manifest.json").write_text("}"),
    "A handle is not shown": lambda p: next(p.glob("handles/seed-1/plot-pca*")).write_bytes(b"nothing"),
    "entries of 'records' are damaged": lambda p: change(p, "records", lambda r: r.pop("accuracy")),
    "'verdicts' in the results is damaged": lambda p: change(p, "verdicts", None),
    "The results have no list 'runtimes'": lambda p: change(p, "runtimes", "gone"),
    "of 12 couplings are damaged": lambda p: cut_a_plan(p / "couplings.json"),
}


def change(path, name, what):
    results = json.loads((path / "results.json").read_text())
    if what is None:
        results[name] = "words"
    elif what == "gone":
        del results[name]
    else:
        what(results[name][0])
    (path / "results.json").write_text(json.dumps(sealed(results)))


def cut_a_plan(path):
    couplings = json.loads(path.read_text())
    couplings[0]["plan"][0].pop()
    path.write_text(json.dumps(couplings))


@pytest.mark.parametrize("said", DAMAGES)
def test_a_damaged_run_gives_a_page_that_says_so(tmp_path, said):
    path = text_run(tmp_path / "text").path
    if said == "results.json is missing":
        (path / "units" / "seed-1").mkdir(parents=True)
        (path / "units" / "seed-1" / "plot-pca.json").write_text("{")
        DAMAGES[said](path)
        said = "plot-pca.json is left out: it cannot be read"
    else:
        DAMAGES[said](path)
    document = Document(page([path]))
    assert said in " ".join(" ".join(document.text).split())
    assert ("section", {"id": "provenance"}) in document.tags


def test_no_change_of_the_files_costs_the_whole_page(tmp_path):
    path = text_run(tmp_path / "text", seeds=(1,), spoken={"plain": "What?"}).path
    sound = {name: (path / name).read_text() for name in ("results.json", "couplings.json", "manifest.json")}
    draw = random.Random(1)
    for _ in range(60):
        for name, text in sound.items():
            (path / name).write_text(text)
        name = draw.choice(list(sound))
        value = json.loads(sound[name])
        spoil(value, draw)
        (path / name).write_text(json.dumps(value))
        document = Document(page([path]))
        assert ("section", {"id": "provenance"}) in document.tags
        document.data()


def spoil(value, draw):
    """Replace one random leaf or branch by something that should not be there."""
    while True:
        keys = list(value) if isinstance(value, dict) else list(range(len(value)))
        key = draw.choice(keys)
        if not isinstance(value[key], (dict, list)) or not value[key] or draw.random() < 0.15:
            value[key] = draw.choice([None, "x", -1, [], {}, [None], 1e308, True])
            return
        value = value[key]


@pytest.mark.parametrize("make", [lambda p: p / "nowhere", lambda p: p], ids=["no directory", "not a run"])
def test_what_is_not_a_run_is_refused(tmp_path, make):
    with pytest.raises(PlotError, match="run directory"):
        page([make(tmp_path)])


def test_a_run_without_a_finished_unit_says_so(tmp_path):
    path = text_run(tmp_path / "text").path
    for name in ("results.json", "couplings.json"):
        (path / name).unlink()
    assert "No unit of work is finished yet." in page([path])


# -- comparison and notebook ----------------------------------------------------------------------------------


def test_a_comparison_shows_every_run_and_what_differs(tmp_path, run, results):
    other = text_run(tmp_path / "other", seeds=(1, 2, 3)).path
    document = Document(page([run, other]))
    shown = {row[0]: row[1:] for row in document.table("method", "text", "other")}
    for method, (first, _) in shown.items():
        by_seed = [fmean(r["accuracy"] for r in rows_of(results, "records", method=method, seed=s)) for s in (1, 2)]
        assert first == spelled(by_seed)
    assert document.table("setting", "text", "other") == [["seeds", "1, 2", "1, 2, 3"]]
    assert [r["name"] for r in document.data()["runs"]] == ["text", "other"]


def test_runs_of_the_same_name_are_told_apart(tmp_path):
    paths = [text_run(tmp_path / folder / "run", seeds=(1,)).path for folder in ("a", "b")]
    assert Document(page(paths)).table("run")[0][0] == "a/run"


def test_a_fragment_shows_verdicts_and_accuracies_without_scripts(results):
    one = {name: [r for r in results[name] if r["seed"] == 1] for name in ("records", "verdicts", "runtimes")}
    one["verdicts"][0]["sentence"] = NASTY
    document = Document(fragment(**one))
    assert document.scripts == []
    assert NASTY in "".join(document.text)
    r = one["records"][0]
    cell = next(row[1] for row in document.table("method") if row[0] == r["method"])
    assert cell.startswith(f"{r['accuracy']:.3f} [{r['interval'][0]:.3f}")


def test_the_library_loses_its_wrapper_and_nothing_else():
    loader = b"/** licence */\n(\n function(root, factory) { x } (self, () => {\n"
    inside = b'"use strict";var Plotly=(()=>{return 1})();\nwindow.Plotly = Plotly;\n'
    assert unwrapped(loader + inside + b"return Plotly;\n}));\n") == b"/** licence */\n" + inside
    for other in (inside, loader + inside, b"define(() => {\nreturn Plotly;\n});"):
        assert unwrapped(other) == other


# -- words ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("share", "said"),
    [(0.925, "93 %"), (0.125, "13 %"), (0.575, "57 %"), (0.0125, "1.3 %"), (0.9996, ">99.9 %"), (1.0, "100 %")],
)
def test_shares_are_rounded_as_browsers_round_them(share, said):
    """Half to even gave 92 % in a sentence beside 93 % in the chart; 0.575 is a little less in binary."""
    assert percent(share) == said


def test_what_is_said_of_several_variables_is_said_once(run):
    caveats = warnings(read_run(run), "plot-native")
    assert [c for c in caveats if "weak invariance" in c] == [
        "AnswerPointer and AnswerToken: weak invariance in 2 of 2 seeds: the lower bound is 85 % of the pairs that "
        "keep the variable, below 90 %."
    ]


def test_an_undecided_variable_says_what_is_open_beside_what_fails(run):
    reading = read_run(run)
    gates = [
        {"name": "works", "answer": "fails", "sentence": "right on 0.650 of the discriminating pairs, below 80%"},
        {"name": "leaves the rest alone", "answer": "cannot say", "sentence": "whether that is 90% or more is open"},
        {"name": "beats random places", "answer": "holds", "sentence": "beats random places by +0.4"},
    ]
    of = {"seed": 1, "variable": "x", "sentence": "x: said.", "evidence": {}, "gates": gates}
    undecided, absent = (
        finding(reading, "m", "x", [{**of, "status": status}]).reasons for status in ("undecided", "not localized")
    )
    assert undecided == (
        "right on 0.650 of the pairs that can tell, below 80%",
        "whether that is 90% or more is open",
    )
    assert absent == undecided[:1]
