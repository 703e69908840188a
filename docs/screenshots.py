"""Pictures of a run's report page for the documents, taken in headless Chromium.

python docs/screenshots.py RUN [FOLDER]        FOLDER is docs/images unless given
"""

from __future__ import annotations

import base64
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

from bitplan.reports.document import report


@dataclass(frozen=True)
class Shot:
    """A picture: which section is at the top, how large, in which colours, and what is done before."""

    name: str
    section: str
    width: int
    height: int
    dark: bool = False
    before: str = ""


OPEN_A_LAYER = """
const rows = [...document.querySelectorAll('.layer')].filter((row) => !row.textContent.includes('fixed'));
rows[Math.floor(rows.length / 2)].click();
document.activeElement.blur();
"""
SHOTS = (
    Shot("report-answer", "title", 1100, 860),
    Shot("report-frontier", "frontier", 1100, 720),
    Shot("report-layers", "layers", 1100, 1080, before=OPEN_A_LAYER),
    Shot("report-dark", "layers", 1100, 860, dark=True),
    Shot("report-phone", "title", 390, 844),
    Shot("report-phone-layers", "layers", 390, 844),
)


def main(run: Path, folder: Path) -> None:
    """Make the page, open it, take every picture."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch, chromium() as browser:
        page = report(run, Path(scratch) / "report.html")
        for shot in SHOTS:
            path = folder / f"{shot.name}.png"
            path.write_bytes(take(browser, page, shot))
            sys.stdout.write(f"{path} ({path.stat().st_size / 1e3:.0f} kB)\n")


@contextmanager
def chromium() -> Iterator[webdriver.Chrome]:
    """A browser without a window."""
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"):
        options.add_argument(flag)
    browser = webdriver.Chrome(options=options, service=webdriver.ChromeService(shutil.which("chromedriver")))
    try:
        yield browser
    finally:
        browser.quit()


def take(browser: webdriver.Chrome, page: Path, shot: Shot) -> bytes:
    """Open the page afresh and photograph it from the given section on."""
    media = {"prefers-color-scheme": "dark" if shot.dark else "light", "prefers-reduced-motion": "reduce"}
    features = [{"name": name, "value": value} for name, value in media.items()]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    size = {"width": shot.width, "height": shot.height, "deviceScaleFactor": 1.5, "mobile": shot.width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    browser.get(page.as_uri())
    WebDriverWait(browser, 20).until(lambda driver: driver.find_elements(By.CSS_SELECTOR, "html[data-ready]"))
    browser.execute_script(shot.before)
    top = (
        "const top = document.getElementById(arguments[0]).getBoundingClientRect().top + scrollY; scrollTo(0, top - 48)"
    )
    browser.execute_script(top, shot.section)
    browser.execute_async_script("requestAnimationFrame(() => requestAnimationFrame(arguments[0]))")
    return base64.b64decode(browser.execute_cdp_cmd("Page.captureScreenshot", {"format": "png"})["data"])


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    main(Path(sys.argv[1]), Path(sys.argv[2]) if len(sys.argv) > 2 else Path(__file__).parent / "images")
