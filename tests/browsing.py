"""Debian's Chromium without a window, driven by Selenium: what tests of the report in a browser share."""

import base64
import os
import shutil
from pathlib import Path

import pytest

selenium = pytest.importorskip("selenium", reason="Selenium is not installed: pip install selenium")
from selenium import webdriver  # noqa: E402
from selenium.webdriver.common.action_chains import ActionChains  # noqa: E402
from selenium.webdriver.common.by import By  # noqa: E402
from selenium.webdriver.support.ui import Select, WebDriverWait  # noqa: E402

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
needs_browser = pytest.mark.skipif(
    not (CHROMIUM and DRIVER), reason="No chromium and chromedriver: `make browser` installs Debian's"
)
SHOTS = Path(os.environ.get("PLOT_OT_SCREENSHOTS") or Path(__file__).parent.parent / "build" / "screenshots")


def open_browser():
    """Chromium, without a window."""
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for word in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"):
        options.add_argument(word)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    driver.set_page_load_timeout(300)
    driver.set_script_timeout(300)
    return driver


def look(browser, width=1280, height=900, dark=False):
    """A window of this size, in this theme."""
    scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)


def visit(browser, path, **window):
    """Open a page and wait until its charts are drawn."""
    look(browser, **window)
    for kind in ("browser", "performance"):
        browser.get_log(kind)  # forget what came before
    browser.get(path if str(path).startswith("http") else Path(path).as_uri())
    WebDriverWait(browser, 180).until(lambda b: b.execute_script("return document.documentElement.dataset.ready"))


def keep(browser, name):
    """Keep a picture of what is in the window."""
    SHOTS.mkdir(parents=True, exist_ok=True)
    browser.save_screenshot(str(SHOTS / f"{name}.png"))


def shoot(browser, name):
    """Keep a picture of the whole page."""
    SHOTS.mkdir(parents=True, exist_ok=True)
    shot = browser.execute_cdp_cmd(
        "Page.captureScreenshot",
        {
            "captureBeyondViewport": True,
            "clip": {
                "x": 0,
                "y": 0,
                "width": browser.execute_script("return document.documentElement.clientWidth"),
                "height": browser.execute_script("return document.documentElement.scrollHeight"),
                "scale": 1,
            },
        },
    )
    (SHOTS / f"{name}.png").write_bytes(base64.b64decode(shot["data"]))


def complaints(browser):
    return [entry["message"] for entry in browser.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")]


def one(browser, selector):
    return browser.find_element(By.CSS_SELECTOR, selector)


def every(browser, selector):
    return browser.find_elements(By.CSS_SELECTOR, selector)


def soon(browser, condition):
    return WebDriverWait(browser, 60).until(lambda _: condition())


def click(browser, selector):
    """Click in the middle of the screen, as a reader would after scrolling there."""
    e = one(browser, selector)
    browser.execute_script("arguments[0].scrollIntoView({block: 'center', behavior: 'instant'})", e)
    ActionChains(browser).move_to_element(e).click().perform()


def pick(browser, what, value):
    Select(one(browser, f"[data-pick={what}]")).select_by_value(value)
