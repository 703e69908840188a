"""Each folder of plugins can be deleted: the tests of ring 1 pass without it. Ten minutes for each folder."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import bitplan

ROOT = Path(__file__).parents[1]
PLUGINS = ROOT / "src" / "bitplan" / "plugins"
OF_BOTH_RINGS = ("plugins", "docs", "house", "paper")
"""Folders of tests that look at plugins, at every page, or at the whole tree."""


def entries_without(folder):
    """Return the text of entry_points.txt without a plugin, and without entries of others that import it."""
    pattern = re.compile(rf"bitplan\.plugins\.{folder}\b")
    lines = []
    for group, entries in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"].items():
        lines.append(f"[{group}]")
        for name, value in entries.items():
            path = ROOT / "src" / Path(*value.partition(":")[0].split(".")).with_suffix(".py")
            if not pattern.search(value) and not pattern.search(path.read_text()):
                lines.append(f"{name} = {value}")
    return "\n".join(lines) + "\n"


@pytest.fixture
def deleted(tmp_path):
    """Copy the tree without a plugin and without the tests of plugins."""

    def make(folder):
        tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        for name in tracked.splitlines():
            parts = Path(name).parts
            if parts[:4] != ("src", "bitplan", "plugins", folder) and parts[:2] != ("tests", "plugins"):
                (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / name, tmp_path / name)
        about = tmp_path / "src" / f"bitplan-{bitplan.__version__}.dist-info"  # found before the installed one
        about.mkdir()
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: bitplan\nVersion: {bitplan.__version__}\n")
        (about / "entry_points.txt").write_text(entries_without(folder))
        return tmp_path

    return make


@pytest.mark.parametrize("folder", sorted(path.parent.name for path in PLUGINS.glob("*/__init__.py")))
def test_ring_1_needs_no_plugin(deleted, folder):
    tree = deleted(folder)
    left_out = [f"--ignore=tests/{name}" for name in OF_BOTH_RINGS]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-n", "2", "--dist", "loadfile", *left_out, "tests"],
        cwd=tree, env=os.environ | {"PYTHONPATH": str(tree / "src"), "CI": "1"}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-5000:]
