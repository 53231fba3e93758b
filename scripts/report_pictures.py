"""Pictures of reports for docs/report.md: the top of each page in Chromium, as small PNG files.

    python scripts/report_pictures.py docs/figures/report heq=runs/heq:1280:light adder=runs/addition:400:dark

Each picture is NAME=RUN:WIDTH:THEME[:HEIGHT], RUN being a run directory with a report.html. It needs Selenium, Chromium
and chromedriver (`make browser`).
"""

from __future__ import annotations

import base64
import io
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from PIL import Image
from selenium import webdriver
from selenium.webdriver.support.ui import WebDriverWait

COLOURS = 96
"""Colours of a picture: text and flat bars need no more."""


def main(folder: Path, wanted: list[str]) -> None:
    """Take every picture."""
    folder.mkdir(parents=True, exist_ok=True)
    with open_browser() as browser:
        for picture in wanted:
            name, _, what = picture.partition("=")
            run, width, theme, *height = what.split(":")
            show(browser, Path(run) / "report.html", int(width), theme)
            top = clip(browser, 0, 0, int(width), *map(int, height or ["1650"]))
            write_small(top, folder / f"{name}.png")


@contextmanager
def open_browser() -> Iterator[webdriver.Chrome]:
    """Chromium without a window."""
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or shutil.which("google-chrome") or ""
    for word in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"):
        options.add_argument(word)
    browser = webdriver.Chrome(options=options, service=webdriver.ChromeService(shutil.which("chromedriver")))
    try:
        yield browser
    finally:
        browser.quit()


def show(browser: webdriver.Chrome, page: Path, width: int, theme: str) -> None:
    """Open a report and wait until it is drawn."""
    scheme = {"name": "prefers-color-scheme", "value": theme}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    browser.get(page.resolve().as_uri())
    WebDriverWait(browser, 120).until(lambda b: b.execute_script("return document.documentElement.dataset.ready"))


def clip(browser: webdriver.Chrome, x: float, y: float, width: float, height: float) -> Image.Image:
    """A part of the open page."""
    part = {"x": x, "y": y, "width": width, "height": height, "scale": 1}
    shot = browser.execute_cdp_cmd("Page.captureScreenshot", {"captureBeyondViewport": True, "clip": part})
    return Image.open(io.BytesIO(base64.b64decode(shot["data"]))).convert("RGB")


def write_small(image: Image.Image, target: Path) -> None:
    """A PNG file with few colours."""
    image.quantize(COLOURS, dither=Image.Dither.NONE).save(target, "PNG", optimize=True)
    print(f"{target}: {target.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
