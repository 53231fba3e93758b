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
from pathlib import Path

from PIL import Image
from selenium import webdriver
from selenium.webdriver.support.ui import WebDriverWait

COLOURS = 96
"""Colours of a picture: text and flat bars need no more."""


def main(folder: Path, wanted: list[str]) -> None:
    """Take every picture."""
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or shutil.which("google-chrome") or ""
    for word in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"):
        options.add_argument(word)
    browser = webdriver.Chrome(options=options, service=webdriver.ChromeService(shutil.which("chromedriver")))
    folder.mkdir(parents=True, exist_ok=True)
    try:
        for picture in wanted:
            name, _, what = picture.partition("=")
            run, width, theme, *height = what.split(":")
            target = folder / f"{name}.png"
            target.write_bytes(take(browser, Path(run) / "report.html", int(width), theme, *map(int, height)))
            print(f"{target}: {target.stat().st_size / 1000:.0f} kB")
    finally:
        browser.quit()


def take(browser: webdriver.Chrome, page: Path, width: int, theme: str, height: int = 1650) -> bytes:
    """The top of a page, as a PNG with few colours."""
    scheme = {"name": "prefers-color-scheme", "value": theme}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    browser.get(page.resolve().as_uri())
    WebDriverWait(browser, 120).until(lambda b: b.execute_script("return document.documentElement.dataset.ready"))
    clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
    shot = browser.execute_cdp_cmd("Page.captureScreenshot", {"captureBeyondViewport": True, "clip": clip})
    image = Image.open(io.BytesIO(base64.b64decode(shot["data"]))).convert("RGB")
    file = io.BytesIO()
    image.quantize(COLOURS, dither=Image.Dither.NONE).save(file, "PNG", optimize=True)
    return file.getvalue()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
