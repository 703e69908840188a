"""The report page of a large run: 1,000 layers × 8 methods × 100 budgets, opened in headless Chromium.

It needs chromium and chromium-driver.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.rows import Row

ROOT = Path(__file__).parents[1]
SLIDE = """
const done = arguments[0];
const slider = document.getElementById('budget');
const took = [];
const step = (place) => {
  if (place > Number(slider.max)) { done(took.sort((one, other) => one - other)); return; }
  slider.value = place;
  const start = performance.now();
  slider.dispatchEvent(new Event('input'));
  requestAnimationFrame(() => { document.body.offsetHeight; took.push(performance.now() - start); step(place + 1); });
};
step(0);
"""


def rows() -> list[Row]:
    """Return the time to make and to open the page, its size, and the time of a step of the slider."""
    if not shutil.which("chromium") or not shutil.which("chromedriver"):
        raise FileNotFoundError("chromium and chromium-driver are not installed")
    sys.path[:0] = [str(ROOT / "tests" / "reports"), str(ROOT / "docs")]
    from report_runs import large_run
    from screenshots import chromium

    from bitplan.reports.document import report

    with tempfile.TemporaryDirectory() as scratch, chromium() as browser:
        run = large_run(Path(scratch) / "run")
        start = time.perf_counter()
        page = report(run, Path(scratch) / "page.html")
        made = [Row("the page made", time.perf_counter() - start, target=15)]
        made.append(Row("its size", page.stat().st_size / 1e6, unit="MB", target=6))
        start = time.perf_counter()
        browser.get(page.as_uri())
        while not browser.execute_script("return document.documentElement.dataset.ready"):
            time.sleep(0.01)
        made.append(Row("opened", time.perf_counter() - start, target=3))
        browser.set_script_timeout(120)
        took = browser.execute_async_script(SLIDE)
        made.append(Row("a step of the slider, the median", took[len(took) // 2], unit="ms"))
        return [*made, Row(f"the slowest of {len(took)} steps", took[-1], unit="ms", target=100)]
