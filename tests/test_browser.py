"""The report in a real browser: Debian's Chromium without a window, driven by Selenium.

Screenshots and the measured opening times are kept in build/screenshots (or $PLOT_OT_SCREENSHOTS), to be looked at.
"""

import base64
import json
import threading
import time

import pytest

pytest.importorskip("selenium", reason="Selenium is not installed: pip install selenium")
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import Select, WebDriverWait

import plot_ot
from browsing import (
    SHOTS,
    click,
    complaints,
    every,
    keep,
    look,
    needs_browser,
    one,
    open_browser,
    pick,
    shoot,
    soon,
    visit,
)
from nets import PARITIES, PARITY_ROWS, random_parities
from plot_ot.files.locks import Lock
from plot_ot.files.seals import sealed
from plot_ot.report.page import write_page
from plot_ot.report.serve import Server
from report_runs import FAMILIES, NASTY, SPOKEN, VARIABLES, records, text_run

pytestmark = needs_browser
CHARTS = [
    "profile",
    "stretch",
    "capacity",
    "coupling",
    "sweep",
    "handle",
    "surface",
    "scatter",
    "accuracy",
    "frontier",
    "runtime",
]


@pytest.fixture(scope="module")
def browser():
    driver = open_browser()
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    return write_page([text_run(tmp_path_factory.mktemp("runs") / "text").path])


# -- every section, every look --------------------------------------------------------------------------------


LOOKS = {
    "desktop-light": (1280, False),
    "phone-dark": (390, True),
    "desktop-dark": (1280, True),
    "phone-light": (390, False),
}
LONG = ("desktop-dark", "phone-light")  # the first two show both widths and both themes


@pytest.mark.parametrize(
    ("width", "dark"),
    [pytest.param(*look, id=name, marks=[pytest.mark.long] * (name in LONG)) for name, look in LOOKS.items()],
)
def test_every_section_renders_without_complaint_or_request(browser, report, width, dark):
    visit(browser, report, width=width, dark=dark)
    first = ["summary", "zoom", "profile", "example", "natural"]
    sections = [*first, "couplings", "handles", "accuracy", "cost", "examples", "provenance"]
    assert [s.get_attribute("id") for s in every(browser, "section")] == sections
    assert one(browser, "html").get_attribute("data-ready") == "yes"
    drawn = {f.get_attribute("data-chart"): f for f in every(browser, "figure[data-chart]")}
    for name in CHARTS:
        assert drawn[name].find_elements(By.CSS_SELECTOR, ".plot svg.main-svg"), name
        assert drawn[name].find_element(By.CSS_SELECTOR, ".plot").size["height"] > 100
    assert len(every(browser, "#zoom-drawing .stage")) == 3
    assert every(browser, "#example-list .example")
    wide = browser.execute_script("return [document.documentElement.scrollWidth, document.documentElement.clientWidth]")
    assert wide[0] <= wide[1], "the page scrolls sideways"
    shown = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
    assert (shown == "rgb(255, 255, 255)") is not dark
    shoot(browser, f"{'phone' if width < 600 else 'desktop'}-{'dark' if dark else 'light'}")
    assert complaints(browser) == []
    events = [json.loads(e["message"])["message"] for e in browser.get_log("performance")]
    asked = [e["params"]["request"]["url"] for e in events if e["method"] == "Network.requestWillBeSent"]
    assert {url.split(":")[0] for url in asked} <= {"file", "data", "blob"}


def test_opening_a_large_run_is_measured(browser, tmp_path):
    """Seven methods, ten seeds; the time is kept with the screenshots, for a quiet machine to look at."""
    run = text_run(tmp_path / "large", seeds=tuple(range(1, 11)))
    results = json.loads((run.path / "results.json").read_text())
    for name in ("records", "runtimes", "selection", "verdicts", "cross", "surfaces"):
        results[name] += [
            {**r, "method": f"{r['method']}-2"} for r in results[name] if r["method"].startswith(("plot", "das"))
        ]
    (run.path / "results.json").write_text(json.dumps(sealed(results)))
    target = write_page([run.path])
    visit(browser, target)
    times = browser.execute_script(
        "return {readable: performance.getEntriesByName('first-contentful-paint')[0]?.startTime,"
        " drawn: performance.getEntriesByName('plot-ot drawn')[0]?.startTime}"
    )
    assert len(every(browser, "[data-pick=seed] option")) == 10
    assert len(every(browser, "[data-pick=method] option")) == 7
    assert times["drawn"]
    SHOTS.mkdir(parents=True, exist_ok=True)
    (SHOTS / "opening.json").write_text(json.dumps({**times, "bytes": target.stat().st_size}))


def test_it_prints(browser, report):
    visit(browser, report)
    printed = browser.execute_cdp_cmd("Page.printToPDF", {"printBackground": True})
    SHOTS.mkdir(parents=True, exist_ok=True)
    (SHOTS / "printed.pdf").write_bytes(base64.b64decode(printed["data"]))
    assert base64.b64decode(printed["data"]).startswith(b"%PDF")
    assert complaints(browser) == []


def test_a_result_in_a_notebook_shows_the_same_charts(browser, tmp_path, monkeypatch):
    monkeypatch.setattr("plot_ot.judging.bench.RANDOM_HANDLES", 3)
    net, _ = random_parities(1000, aligned=True)
    result = plot_ot.localize(plot_ot.MLPSubject(net), PARITIES, PARITY_ROWS, size=200)
    cell = tmp_path / "cell.html"
    cell.write_text(f"<!doctype html><meta charset=utf-8><body>{result._repr_html_()}", encoding="utf-8")
    look(browser)
    browser.get_log("browser")
    browser.get(cell.as_uri())
    assert "placed and compact" in one(browser, ".plot-ot-result").text
    assert "of layer 1" in one(browser, ".plot-ot-result .card h3").text
    click(browser, "body > details > summary")
    browser.switch_to.frame(one(browser, "details iframe"))
    try:
        soon(browser, lambda: every(browser, "figure[data-chart=coupling] .plot svg.main-svg"))
        assert len(every(browser, "#zoom-drawing .stage")) == 2
        assert "left" in one(browser, "#summary .cards:not([hidden])").text
    finally:
        browser.switch_to.default_content()
    keep(browser, "notebook")
    assert complaints(browser) == []


# -- hovering, zooming, picking -------------------------------------------------------------------------------


def test_hovering_a_bar_of_the_zoom_shows_mass_norm_and_calibration(browser, report):
    visit(browser, report)
    couplings = json.loads((report.parent / "couplings.json").read_text())
    coarse = next(c for c in couplings if (c["seed"], c["method"], c["stage"]) == (1, "plot-pca", 0))
    at = coarse["sites"].index("block_output.3@-1")
    mass, norm = coarse["plan"][0][at], coarse["raw_norms"][at]
    bar = one(browser, "#zoom-drawing [data-stage='1'] .on")
    browser.execute_script("arguments[0].scrollIntoView({block: 'center', behavior: 'instant'})", bar)
    ActionChains(browser).move_to_element(bar).perform()
    said = soon(browser, lambda: one(browser, "#zoom-drawing .tip").text)
    assert said.splitlines()[0] == "block_output.3@-1"
    assert f"mass {mass:.3g} ({100 * mass / sum(coarse['plan'][0]):.1f} % of the row)" in said
    assert f"raw signature norm {norm:.3g}" in said
    assert "calibration accuracy 0.900" in said
    keep(browser, "hover")


def test_a_stage_opens_by_click_and_by_keyboard_and_closes_again(browser, report):
    visit(browser, report)
    panel = one(browser, "#zoom-detail")
    assert not panel.is_displayed()
    click(browser, "#zoom-drawing [data-stage='2'] .on")
    soon(browser, lambda: panel.is_displayed() and panel.find_elements(By.CSS_SELECTOR, ".plot svg.main-svg"))
    assert panel.find_element(By.TAG_NAME, "h3").text == "Inside 3 · 4 principal components: OT, ε = 1"
    keep(browser, "stage")
    browser.switch_to.active_element.send_keys(Keys.ESCAPE)
    soon(browser, lambda: not panel.is_displayed())
    assert browser.switch_to.active_element.get_attribute("data-stage") == "2", "the focus is lost"
    browser.execute_script("document.querySelector('#zoom-drawing [data-stage=\"0\"]').focus()")
    browser.switch_to.active_element.send_keys(Keys.ARROW_RIGHT)
    browser.switch_to.active_element.send_keys(Keys.ENTER)
    soon(
        browser,
        lambda: (
            panel.is_displayed()
            and panel.find_element(By.TAG_NAME, "h3").text == "Inside 2 · 6 layers: UOT, ε = 1, β = 0.3"
        ),
    )
    click(browser, "#zoom-close")
    soon(browser, lambda: not panel.is_displayed())
    assert complaints(browser) == []


def test_hovering_a_heatmap_shows_the_value_itself(browser, report):
    visit(browser, report)
    plot = one(browser, "figure[data-chart=surface] .plot .nsewdrag")
    browser.execute_script("arguments[0].scrollIntoView({block: 'center', behavior: 'instant'})", plot)
    ActionChains(browser).move_to_element(plot).perform()
    said = soon(browser, lambda: [t.text for t in every(browser, "figure[data-chart=surface] .hoverlayer text")])
    assert "K = 2, λ = 1.2" in " ".join(said)
    assert "calibration 0.900" in " ".join(said)


def test_picking_a_method_and_seed_changes_what_follows_it(browser, report):
    visit(browser, report)
    assert "placed and compact" in one(browser, "#summary .cards:not([hidden])").text
    pick(browser, "method", "plot-native")
    assert "not localized" in one(browser, "#summary .cards:not([hidden])").text
    assert "weak invariance" in one(browser, "#summary .notes:not([hidden])").text
    assert {r.get_attribute("data-method") for r in every(browser, "#accuracy tr.picked")} == {"plot-native"}
    pick(browser, "seed", "2")
    assert "plot-native, seed 2" in one(browser, "#example-count").text
    pick(browser, "method", "das")
    soon(browser, lambda: "das fits no coupling" in one(browser, "figure[data-chart=coupling]").text)
    assert "searches no grid" in one(browser, "figure[data-chart=surface]").text
    pick(browser, "method", "plot-pca")
    soon(browser, lambda: every(browser, "figure[data-chart=coupling] svg.main-svg"))
    click(browser, "figure[data-chart=coupling] .stages button")
    soon(browser, lambda: "mass" in one(browser, "figure[data-chart=coupling]").text)
    assert complaints(browser) == []


def test_the_theme_can_be_switched(browser, report):
    visit(browser, report)
    before = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
    one(browser, "#theme").click()
    assert browser.execute_script("return getComputedStyle(document.body).backgroundColor") != before
    one(browser, "#theme").click()
    assert browser.execute_script("return getComputedStyle(document.body).backgroundColor") == before
    browser.execute_script("localStorage.clear()")


def test_everything_can_be_reached_with_the_keyboard(browser, report):
    visit(browser, report)
    reached = set()
    for _ in range(120):
        ActionChains(browser).send_keys(Keys.TAB).perform()
        e = browser.switch_to.active_element
        reached |= {e.get_attribute("id"), e.get_attribute("data-pick"), e.get_attribute("data-stage"), e.text}
    assert {"theme", "method", "seed", "0", "1", "2", "Table", "CSV", "SVG"} <= reached


# -- numbers and files ----------------------------------------------------------------------------------------


def test_the_table_under_a_chart_holds_the_results(browser, report):
    visit(browser, report)
    results = json.loads((report.parent / "results.json").read_text())
    button = one(browser, "figure[data-chart=scatter] .tools button")
    browser.execute_script("arguments[0].click()", button)
    rows = [r.text.split() for r in every(browser, "figure[data-chart=scatter] .numbers tbody tr")]
    wanted = {(r["seed"], r["method"], r["variable"], r["bank"]): r["accuracy"] for r in results["records"]}
    assert len(rows) == len(wanted) // 2
    for seed, method, variable, sensitivity, invariance in rows:
        assert float(sensitivity) == pytest.approx(wanted[int(seed), method, variable, "sensitivity"], rel=1e-5)
        assert float(invariance) == pytest.approx(wanted[int(seed), method, variable, "invariance"], rel=1e-5)


def test_numbers_and_figures_can_be_downloaded(browser, report, tmp_path):
    visit(browser, report)
    where = {"behavior": "allow", "downloadPath": str(tmp_path)}
    browser.execute_cdp_cmd("Browser.setDownloadBehavior", where)
    for button in every(browser, "figure[data-chart=frontier] .tools button")[1:]:
        browser.execute_script("arguments[0].click()", button)
    for name in ("results", "records"):
        browser.execute_script("arguments[0].click()", one(browser, f"[data-save={name}]"))
    wanted = [tmp_path / f"text-{n}" for n in ("frontier.csv", "frontier.svg", "results.json", "records.csv")]
    soon(browser, lambda: all(p.exists() and p.stat().st_size for p in wanted))
    results = json.loads((report.parent / "results.json").read_text())
    saved = json.loads((tmp_path / "text-results.json").read_text())
    assert saved["records"] == results["records"]
    lines = (tmp_path / "text-records.csv").read_text().splitlines()
    assert len(lines) == 1 + len(results["records"])
    assert (tmp_path / "text-frontier.svg").read_text().startswith("<svg")
    points = (tmp_path / "text-frontier.csv").read_text()
    assert points.startswith("source,method,accuracy,sd,seconds,sd of seconds\nthis run,plot-native,")


# -- examples, text and damage --------------------------------------------------------------------------------


def test_examples_are_filtered_by_outcome_family_and_variable(browser, report):
    visit(browser, report)
    results = json.loads((report.parent / "results.json").read_text())
    mine = [e for e in results["examples"] if (e["method"], e["seed"]) == ("plot-pca", 1)]
    wrong = [e for e in mine if not e["right"] and e["family"] == FAMILIES[1] and e["variable"] == VARIABLES[0]]
    assert 0 < len(wrong) < len(mine)
    for what, value in (("right", "wrong"), ("family", FAMILIES[1]), ("variable", VARIABLES[0])):
        Select(one(browser, f"[data-filter={what}]")).select_by_value(value)
    assert f"{len(wrong)} of {len(wrong)} examples" in one(browser, "#example-count").text
    assert len(every(browser, "#example-list .example.wrong")) == len(wrong)
    assert not every(browser, "#example-list .example.right")
    Select(one(browser, "[data-filter=right]")).select_by_value("right")
    assert not every(browser, "#example-list .example.wrong")


def test_prompts_are_shown_as_text_with_the_right_token_marked(browser, report):
    visit(browser, report)
    while every(browser, "#example-list > button"):
        browser.execute_script("arguments[0].click()", one(browser, "#example-list > button"))
    shown = browser.execute_script("return [...document.querySelectorAll('.example pre')].map(p => p.textContent)")
    for said in SPOKEN.values():
        assert any(said in text for text in shown)
    marked = browser.execute_script("return [...document.querySelectorAll('.example mark')].map(m => m.textContent)")
    assert set(marked) == {":", "Question"}
    assert browser.execute_script("return window.hacked") is None
    assert not every(browser, ".example b:not(.head b), .example img, .example script")


def test_hostile_names_are_shown_as_text_in_charts_too(browser, tmp_path, monkeypatch):
    monkeypatch.setattr("report_runs.VARIABLES", (NASTY, "AnswerToken"))
    target = write_page([text_run(tmp_path / "nasty").path])
    visit(browser, target)
    click(browser, "#zoom-drawing [data-stage='1'] .on")
    soon(browser, lambda: every(browser, "#zoom-detail svg.main-svg"))
    assert NASTY in one(browser, "#summary .cards:not([hidden]) .card .variable").text
    assert browser.execute_script("return window.hacked") is None
    assert not every(browser, "main img, main b[onerror]")
    assert complaints(browser) == []


def test_a_damaged_run_still_opens(browser, tmp_path):
    path = text_run(tmp_path / "text").path
    (path / "couplings.json").write_text("{")
    (path / "manifest.json").unlink()
    visit(browser, write_page([path]))
    assert "couplings.json cannot be read" in one(browser, "#problems").text
    assert every(browser, "figure[data-chart=accuracy] svg.main-svg")
    (path / "results.json").write_text("{}")
    visit(browser, write_page([path]))
    assert "this page shows the 0 units of work done so far" in one(browser, "#problems").text
    assert not every(browser, "figure[data-chart], #zoom")
    assert complaints(browser) == []


def test_a_comparison_opens(browser, report, tmp_path):
    other = text_run(tmp_path / "other", seeds=(3,)).path
    visit(browser, write_page([report.parent, other], tmp_path / "comparison.html"))
    assert len(every(browser, "figure[data-chart] svg.main-svg")) >= 2
    shoot(browser, "comparison")
    assert complaints(browser) == []


# -- the live view --------------------------------------------------------------------------------------------


def test_the_index_refreshes_by_itself(browser, report, tmp_path):
    folder = tmp_path / "runs"
    text_run(folder / "first")
    with Server(folder) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            look(browser)
            browser.get_log("browser")
            browser.get(server.url)
            assert [r.text.split()[0] for r in every(browser, "#runs tr")] == ["first"]
            run = folder / "second"
            (run / "units" / "seed-1").mkdir(parents=True)
            config = {"task": "heq", "methods": ["das", "plot"], "seeds": [1]}
            manifest = {"format": "plot-ot run 1", "config": config, "started": time.strftime("%Y-%m-%dT%H:%M")}
            (run / "manifest.json").write_text(json.dumps(manifest))
            soon(browser, lambda: "interrupted" in one(browser, "#runs").text)  # nobody holds its lock
            lock = Lock(run)
            soon(browser, lambda: "running" in one(browser, "#runs").text)
            (run / "units" / "seed-1" / "das.json").write_text(json.dumps({"records": records(1, "das")}))
            soon(browser, lambda: "33 %" in one(browser, "#runs").text)
            lock.release()
            keep(browser, "index")
            one(browser, "#runs a[href='run/first/']").click()
            WebDriverWait(browser, 180).until(lambda b: one(b, "html").get_attribute("data-ready"))
            assert "AnswerPointer" in browser.title
            assert complaints(browser) == []
        finally:
            server.shutdown()
            thread.join()
