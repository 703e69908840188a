"""What was not tried is said at the end: nothing is skipped in silence."""

from __future__ import annotations

from typing import Any


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """One line for each entry that could not be tried, and why."""
    for report in terminalreporter.stats.get("skipped", ()):
        if "test_registered" in report.nodeid:
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
            terminalreporter.write_line(f"not tried: {reason.removeprefix('Skipped: ')}", yellow=True)
