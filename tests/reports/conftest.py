"""The page is tried in a real browser where one is installed (`.ci/run` installs it); where not, pytest says so."""

import pytest
from report_browser import CHROMIUM, DRIVER
from report_runs import digits_run, write_additivity, write_failure

from bitplan.store.run_folder import RunFolder

collect_ignore = [] if CHROMIUM and DRIVER else ["test_page_in_browser.py"]


def pytest_terminal_summary(terminalreporter):
    if collect_ignore:
        terminalreporter.write_line(
            "The report page was not tried in a browser: install chromium and chromium-driver, as .ci/run does.",
            yellow=True,
        )


@pytest.fixture(scope="session")
def run(tmp_path_factory):
    """A run with everything: three methods, four budgets, five seeds, a failure, both additivity experiments."""
    folder = digits_run(tmp_path_factory.mktemp("digits"))
    found = RunFolder(folder)
    write_additivity(folder, found.graph)
    write_failure(folder, found.study, "uniform", "60%", 3, "Diverged: the loss is NaN at step 120")
    return found
