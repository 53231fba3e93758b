"""Make docs/figures/pointer.png, the picture of the README: what the report says about examples/pointer.py.

Also pointer-phone.png, the card alone as a phone shows it, for the site's first page.

    python scripts/readme_picture.py [RUN]      (about half a CPU minute; RUN is a run of the example that is there)

It needs Selenium, Chromium and chromedriver (`make browser`).
"""

from __future__ import annotations

import runpy
import sys
import tempfile
from pathlib import Path

import torch
from PIL import Image
from report_pictures import clip, open_browser, show, write_small
from selenium import webdriver
from selenium.webdriver.common.by import By

import plot_ot

ROOT = Path(__file__).parent.parent
WIDTH, PHONE, MARGIN = 1120, 390, 12
CARD = ".cards:not([hidden]) .card"


def main(run: Path | None) -> None:
    """Run the example, then take the card of its variable and the zoom below it."""
    with tempfile.TemporaryDirectory() as folder, open_browser() as browser:
        page = (run or localized(Path(folder) / "run")) / "report.html"
        show(browser, page, WIDTH, "light")
        parts = [part(browser, CARD), part(browser, "#zoom-drawing")]
        show(browser, page, PHONE, "light")
        write_small(part(browser, CARD), ROOT / "docs" / "figures" / "pointer-phone.png")
    height = sum(p.height for p in parts) + 3 * MARGIN
    picture = Image.new("RGB", (max(p.width for p in parts) + 2 * MARGIN, height), parts[1].getpixel((0, 0)))
    top = MARGIN
    for p in parts:
        picture.paste(p, (MARGIN, top))
        top += p.height + MARGIN
    write_small(picture, ROOT / "docs" / "figures" / "pointer.png")


def localized(run: Path) -> Path:
    """A run directory of the example."""
    torch.set_num_threads(1)
    example = runpy.run_path(str(ROOT / "examples" / "pointer.py"))
    result = plot_ot.localize(plot_ot.load_subject("tiny"), example["hypothesis"], example["inputs"])
    print(result)
    result.save(run)
    return run


def part(browser: webdriver.Chrome, selector: str) -> Image.Image:
    """One element of the page."""
    script = "const r = arguments[0].getBoundingClientRect(); return [r.x + scrollX, r.y + scrollY, r.width, r.height]"
    return clip(browser, *browser.execute_script(script, browser.find_element(By.CSS_SELECTOR, selector)))


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else None)
