"""docs/extend.md as it stands: its package is installed beside bitplan, tested by its own tests and by `--pyargs`."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "extend.md"
NAMES = (
    "widths", "climbing", "frugal", "cycles", "in_turn", "perceptron", "sides", "listing", "gated", "shifts",
    "threaded", "squares",
)  # fmt: skip


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    """A folder with the files that the page shows, and what an installation would write of its entry points."""
    home, text = tmp_path_factory.mktemp("extended"), PAGE.read_text()
    for name, code in re.findall(r"```python\n# (\S+)\n(.*?)```", text, re.DOTALL):
        (home / name).parent.mkdir(exist_ok=True)
        (home / name).write_text(code)
    written = tomllib.loads("\n".join(re.findall(r"```toml\n(.*?)```", text, re.DOTALL)))
    groups = written["project"]["entry-points"]
    (home / "mypackage-1.0.dist-info").mkdir()
    (home / "mypackage-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: mypackage\nVersion: 1.0\n")
    lines = [line for group, names in groups.items() for line in (f"[{group}]", *map(" = ".join, names.items()))]
    (home / "mypackage-1.0.dist-info" / "entry_points.txt").write_text("\n".join(lines))
    return home


def run(home, *words):
    """pytest in a fresh process, in which the package is installed; nothing of this repository's settings."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(home), *filter(None, sys.path)])}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", os.devnull, *words]
    done = subprocess.run(command, cwd=home, env=environment, capture_output=True, text=True, check=False)
    return done.stdout


def test_the_page_shows_every_kind(package):
    from bitplan.core.registry import REGISTRIES

    groups = re.findall(r"\[bitplan\.(\w+)\]", (package / "mypackage-1.0.dist-info" / "entry_points.txt").read_text())
    assert sorted(groups) == sorted(REGISTRIES)
    assert sorted(path.stem for path in (package / "mypackage").glob("*.py")) == sorted([*NAMES, "own"])


def test_its_own_tests_pass(package):
    assert "13 passed" in run(package, "tests")


def test_everything_that_is_registered_is_tested_and_the_broken_one_is_said(package):
    path = package / "mypackage" / "widths.py"
    right = path.read_text()
    path.write_text(right.replace("step * layer", "(1 + step) * layer"))
    said = run(package, "--pyargs", "bitplan.testing", "-k", " or ".join(NAMES))
    path.write_text(right)
    assert "1 failed, 11 passed" in said, said
    clause = "gain widths breaks its contract: the value at the lowest choice is 0 (a has (256.0, 512.0))"
    assert clause in said
