"""The report page of a large run: 1,000 layers × 8 methods × 100 budgets, opened in headless Chromium.

python -m benchmarks.page          needs chromium and chromium-driver
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from pathlib import Path

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


def main() -> None:
    """Print how long the page takes to make and to open, its size, and how long a step of the slider takes."""
    if not shutil.which("chromium") or not shutil.which("chromedriver"):
        print("  left out: chromium and chromium-driver are not installed")
        return
    sys.path[:0] = [str(ROOT / "tests" / "reports"), str(ROOT / "docs")]
    from report_runs import large_run
    from screenshots import chromium

    from bitplan.reports.document import report

    with tempfile.TemporaryDirectory() as scratch, chromium() as browser:
        run = large_run(Path(scratch) / "run")
        start = time.perf_counter()
        page = report(run, Path(scratch) / "page.html")
        print(f"  made in    {time.perf_counter() - start:6.1f} s, {page.stat().st_size / 1e6:.2f} MB (limit: 6)")
        start = time.perf_counter()
        browser.get(page.as_uri())
        while not browser.execute_script("return document.documentElement.dataset.ready"):
            time.sleep(0.01)
        print(f"  opens in   {time.perf_counter() - start:6.2f} s (limit: 3)")
        browser.set_script_timeout(120)
        took = browser.execute_async_script(SLIDE)
        print(f"  a step of the slider {took[len(took) // 2]:.0f} ms, the slowest of {len(took)}: {took[-1]:.0f} ms")


if __name__ == "__main__":
    main()
