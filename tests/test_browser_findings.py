"""What readers stumbled over in the report (FINDINGS, B1 to B10), in a real browser: none of it may come back."""

import json
import threading

import pytest
import torch
from torch import nn

pytest.importorskip("selenium", reason="Selenium is not installed: pip install selenium")
import plot_ot
import report_runs
from browsing import complaints, every, look, needs_browser, one, open_browser, soon, visit
from plot_ot.files.seals import sealed
from plot_ot.report.page import write_page
from plot_ot.report.serve import Server
from plot_ot.subjects import Place
from report_runs import PLACES, POSITIONS, WIDTH, records, text_run

pytestmark = needs_browser

OVERLAPS = """
const boxes = [...document.querySelectorAll(arguments[0])].map((e) => [e.textContent, e.getBoundingClientRect()]);
const crossing = (a, b) => a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 2 && b.top < a.bottom - 2;
return boxes.flatMap(([s, a], i) => boxes.slice(i + 1).filter(([, b]) => crossing(a, b)).map(([t]) => [s, t]));
"""
OUTSIDE = """
return [...document.querySelectorAll(arguments[0])].filter((e) => {
  const box = e.getBoundingClientRect();
  return box.left < -1 || box.right > document.documentElement.clientWidth + 1;
}).map((e) => e.textContent);
"""


@pytest.fixture(scope="module")
def browser():
    driver = open_browser()
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """Two seeds of a study; the layer that calibration chose is not the one with most mass."""
    path = text_run(tmp_path_factory.mktemp("runs") / "text").path
    couplings = json.loads((path / "couplings.json").read_text())
    for c in couplings:
        if c["stage"] == 0:
            for row in c["plan"]:
                row[c["sites"].index("block_output.5@-1")] += 0.4
    (path / "couplings.json").write_text(json.dumps(couplings))
    results = json.loads((path / "results.json").read_text())
    last = {p.name: p for p in PLACES if p.position == -1}
    scores = {"block_output.3@-1": 0.95, "block_output.4@-1": 0.95, "block_output.5@-1": 0.4}
    for r in list(results["profile"]):
        if r["place"] == "block_output.0@2":
            results["profile"] += [
                {**r, "place": n, "layer": last[n].layer, "token": last[n].token, "score": s, "low": s - 0.1, "high": s}
                for n, s in scores.items()
            ]
    (path / "results.json").write_text(json.dumps(sealed(results)))
    return write_page([path])


@pytest.fixture(scope="module")
def localized(tmp_path_factory):
    """What `localize` writes for a network of one's own: the README's, whose handles are directions."""
    causal = plot_ot.CausalModel(
        inputs=list("abcdefgh"),
        mechanisms={
            "left": lambda a, b, c, d: (a & b) | (c & d),
            "right": lambda e, f, g, h: (e & f) | (g & h),
            "differ": lambda left, right: left != right,
        },
        output="differ",
    )
    rows = torch.cartesian_prod(*[torch.arange(2)] * 8)
    torch.manual_seed(4)
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 2))
    optimiser = torch.optim.Adam(net.parameters(), lr=1e-2)
    for _ in range(1000):
        optimiser.zero_grad()
        nn.functional.cross_entropy(net(rows.float()), causal.answer(rows).long()).backward()
        optimiser.step()
    patch = pytest.MonkeyPatch()
    patch.setattr("plot_ot.judging.bench.RANDOM_HANDLES", 3)
    result = plot_ot.localize(plot_ot.MLPSubject(net), causal, rows, size=300, progress=False)
    patch.undo()
    return result.save(tmp_path_factory.mktemp("own") / "localized")


def words(browser, selector):
    return " ".join(one(browser, selector).text.split())


def test_b1_the_cards_answer_where_how_much_and_how_well(browser, report):
    """B1: with two or more seeds no card named a place, and the place was in the small print."""
    visit(browser, report)
    card = one(browser, "#summary .cards:not([hidden]) .card")
    headline = card.find_element("css selector", "h3")
    assert headline.text == "4 principal components of block 3, last token"
    assert headline.location["y"] < 450
    assert float(headline.value_of_css_property("font-size").removesuffix("px")) > 20
    assert card.find_element("css selector", ".badge").text == "placed and compact in 2 of 2 seeds"
    said = " ".join(card.text.split())
    assert "Right on 73 % of the 90 test pairs that can tell on average [72–74]" in said
    assert "copying the source's answer 10 %, random handles 30 %" in said


def test_b2_a_rotated_handle_ends_in_what_its_directions_read_and_write(browser, localized):
    """B2: all neurons were red, "after calibration" was an empty panel, titles were cut and ran into each other."""
    visit(browser, localized)
    stages = every(browser, "#zoom-drawing .stage")
    strips = every(browser, "#zoom-drawing .strip")
    assert 0 < len(strips) <= 6
    size = json.loads((localized.parent / "results.json").read_text())["selection"][0]["size"]
    assert stages[-1].text.startswith(f"{len(stages)} · {size} direction")
    assert {"reads"} <= {e.get_attribute("class") for e in every(browser, "#zoom-drawing .strip rect")}
    for stage in stages[:-1]:
        rows = stage.find_elements("css selector", "[data-item]")
        assert not all("on" in (r.get_attribute("class") or "").split() for r in rows)
    drawn = browser.execute_script(
        "return [...document.querySelectorAll('#zoom-drawing text')].map(t => t.textContent)"
    )
    assert not [t for t in drawn if t.endswith("…")]
    assert browser.execute_script(OVERLAPS, "#zoom-drawing .stage > text") == []
    titles = browser.execute_script("return [...document.querySelectorAll('.annotation-text')].map(t => t.textContent)")
    assert titles
    assert not [t for t in titles if "…" in t or "calibration" in t]
    assert not every(browser, "figure .empty")
    assert complaints(browser) == []


def test_b3_calibration_accuracy_stands_beside_the_mass_and_the_choice_is_explained(browser, report):
    """B3: the layer with most mass was not the red one, and nothing said why."""
    visit(browser, report)
    layers = one(browser, "#zoom-drawing [data-stage='1']")
    assert "although block 5, last token has more mass" in " ".join(layers.text.split())
    assert "best on calibration pairs (95 %)" in " ".join(layers.text.split())
    scored = layers.find_elements("css selector", "circle.score")
    assert len(scored) == 3  # of six layers three were tried
    assert layers.find_element("css selector", ".on").text.split()[-2:] == ["95", "%"]


def test_b4_a_word_has_one_value_or_names_its_pairs(browser, report):
    """B4: "full patch" had three values, and a handle two intervals."""
    visit(browser, report)
    page = words(browser, "main")
    assert "full patch" not in page
    seed_one = json.loads((report.parent / "results.json").read_text())["verdicts"]
    mine = next(v for v in seed_one if (v["seed"], v["method"]) == (1, "plot-pca"))["evidence"]
    card = words(browser, "#zoom-drawing .handle-card")
    assert f"right on {100 * mine['handle']:.0f} % of the 90 test pairs that can tell" in card
    assert f"95 % interval {100 * mine['handle_low']:.0f} % to {100 * mine['handle_high']:.0f} %" in card
    assert "whole place swapped 40 %" in card
    assert "on all test pairs, not only on those that can tell" in words(browser, "#accuracy")


def test_b5_published_points_stand_beside_the_papers_model_only(browser, report, tmp_path):
    """B5: a toy of six blocks stood beside Gemma-2-2B on an H100."""
    visit(browser, report)
    assert "ublished" not in words(browser, "#cost")
    path = text_run(tmp_path / "gemma").path
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["config"]["model"] = "google/gemma-2-2b"
    (path / "manifest.json").write_text(json.dumps(manifest))
    visit(browser, write_page([path]))
    assert "published numbers (4 seeds, Gemma-2-2B" in words(browser, "#cost")


def test_b6_one_telling_pair_comes_early_and_telling_pairs_come_first(browser, report):
    """B6: examples began 7,300 pixels down, the first five being pairs that copying gets right as well."""
    visit(browser, report)
    example = one(browser, "#example-one .example")
    assert example.location["y"] < 3000
    assert "copying the source would wrongly say" in words(browser, "#example-one")
    assert "doing nothing and copying the source would both get wrong" in words(browser, "#example-why")
    told = ["wrongly say" in e.text for e in every(browser, "#example-list .example")]
    assert told[0]
    assert told == sorted(told, reverse=True)


def test_b7_a_localized_network_gets_no_boilerplate_of_a_study(browser, localized):
    """B7: one-row tables, one-dot charts, placeholders, class names, sentences about seeds and training."""
    visit(browser, localized)
    parts = [s for s in every(browser, "header, section") if s.get_attribute("id") != "provenance"]
    page = " ".join(s.text for s in parts)
    for said in ("One seed only", "Training the network", "MLPSubject", "seeds"):
        assert said not in page
    assert "a multilayer perceptron" in words(browser, "header")
    assert not every(browser, "[data-pick]")
    charts = {f.get_attribute("data-chart") for f in every(browser, "figure[data-chart]")}
    assert not charts & {"accuracy", "frontier", "runtime", "scatter", "stretch", "sweep"}
    bodies = [len(t.find_elements("css selector", "tbody tr")) for t in every(browser, "table") if t.is_displayed()]
    assert min(bodies) > 1


def test_b8_options_stand_under_provenance_and_stretch_before_decoding(browser, report):
    """B8: "phi stack · grid own" stood above the fold; decoding, high for every method, came first."""
    visit(browser, report)
    assert "100" not in words(browser, "header")
    assert "size 100" in words(browser, "#provenance")
    table = next(t for t in every(browser, "#handles table") if "decoding" in t.get_attribute("textContent"))
    heads = [h.get_attribute("textContent") for h in table.find_elements("css selector", "thead th")]
    assert heads.index("stretch") < heads.index("decoding")


def test_b9_a_phone_keeps_titles_and_labels_and_noise_is_no_cliff(browser, report, localized, tmp_path):
    """B9: clipped titles, a zoom without labels, an axis title over a tick, an axis from 0.999 to 1.000."""
    visit(browser, report, width=400)
    assert browser.execute_script(OUTSIDE, ".annotation-text, #zoom-drawing text") == []
    assert browser.execute_script(OVERLAPS, "#zoom-drawing .stage > text, #zoom-drawing .slab ~ text") == []
    assert len(every(browser, "#zoom-drawing [data-stage='1'] text.name")) == 6
    visit(browser, localized, width=400)
    assert browser.execute_script(OUTSIDE, ".annotation-text") == []
    visit(browser, report, width=400)
    low, high = browser.execute_script(
        "return document.querySelector('figure[data-chart=sweep] .plot')._fullLayout.yaxis.range"
    )
    assert high - low >= 0.19
    path = text_run(tmp_path / "one", seeds=(1, 2, 3)).path
    results = json.loads((path / "results.json").read_text())
    for name, rows in results.items():
        if isinstance(rows, list):
            results[name] = [r for r in rows if r.get("method") in ("das", "no-edit", "copy-source", "controls")]
    for s in results["selection"]:
        s["capacity"] = {"sizes": [*range(1, 21)], "accuracy": [0.9] * 20, "shuffled": [0.1] * 20}
    (path / "results.json").write_text(json.dumps(sealed(results)))
    visit(browser, write_page([path]))
    assert len(every(browser, "figure[data-chart=capacity] .xtick text")) > 5
    assert browser.execute_script(OVERLAPS, "figure[data-chart=capacity] .xtick text") == []
    chart = "figure[data-chart=accuracy] "
    assert every(browser, chart + ".xtitle")
    assert browser.execute_script(OVERLAPS, f"{chart}.xtitle, {chart}.xtick text, {chart}.ytick text") == []


def test_b10_an_interrupted_run_is_called_interrupted(browser, tmp_path):
    """B10: `view` showed it as "going on 6 %", with a bar. (LaTeX widths: tests/test_paper_tables.py.)"""
    run = tmp_path / "runs" / "cut"
    (run / "units" / "seed-1").mkdir(parents=True)
    config = {"task": "heq", "methods": ["das", "plot"], "seeds": [1]}
    (run / "manifest.json").write_text(json.dumps({"format": "plot-ot run 1", "config": config, "started": "2026"}))
    (run / "units" / "seed-1" / "das.json").write_text(json.dumps({"records": records(1, "das")}))
    with Server(tmp_path / "runs") as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            look(browser)
            browser.get(server.url)
            soon(browser, lambda: every(browser, "#runs tr"))
            assert "interrupted at 33 %" in words(browser, "#runs")
            assert not every(browser, "#runs progress")
        finally:
            server.shutdown()
            thread.join()


def test_a_zoom_over_many_layers_names_some_and_cuts_no_name(browser, tmp_path, monkeypatch):
    """With 28 blocks no row had a name but the red one, and on a phone that one was cut."""
    layers = 28
    places = [Place(f"block_output.{n}@{p}", WIDTH, n, p) for p in POSITIONS for n in range(layers)]
    monkeypatch.setattr(report_runs, "LAYERS", layers)
    monkeypatch.setattr(report_runs, "PLACES", places)
    page = write_page([text_run(tmp_path / "deep", seeds=(1,)).path])
    for width in (1280, 390):
        visit(browser, page, width=width)
        stage = next(s for s in every(browser, "#zoom-drawing .stage") if "28 layers" in s.text)
        named = [t.text for t in stage.find_elements("css selector", "[data-item] text")]
        assert len([t for t in named if t.isdigit()]) >= 10
        [taken] = stage.find_elements("css selector", "[data-item].on")
        assert taken.text.split()[0] == "3"
        assert "%" in taken.text
        assert browser.execute_script(OUTSIDE, "#zoom-drawing svg text") == []
