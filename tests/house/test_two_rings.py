"""Ring 1 knows nothing of `bitplan.plugins`, and each file there is reached by an entry point.

`tests_all/test_rings.py` deletes each plugin and runs the tests of ring 1.
"""

import ast
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src"
PLUGINS = SOURCE / "bitplan" / "plugins"
TESTS = ROOT / "tests"
GROUPS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
# tests of the whole: every page, and the house
OF_BOTH_RINGS = ("plugins", "docs", "house")
# Until `bitplan.commands` finds the commands of plugins.
RING_1 = sorted(
    [path for path in (SOURCE / "bitplan").rglob("*.py") if PLUGINS not in path.parents]
    + [path for path in TESTS.rglob("*.py") if path.relative_to(TESTS).parts[0] not in OF_BOTH_RINGS]
)


def imported(path):
    """Return the names of all modules of plugins that a file may import, wherever in it."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return {name for name in names if name.startswith("bitplan.plugins")}


def module_of(path):
    return ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__")


@pytest.mark.parametrize("path", RING_1, ids=lambda path: str(path.relative_to(ROOT)))
def test_ring_1_imports_no_plugin(path):
    assert imported(path) == set()


def test_every_file_of_a_plugin_is_reached_by_an_entry_point():
    """Or by the reference: a class that users give to another library's trainer, `measure`."""
    files = {module_of(path): path for path in PLUGINS.rglob("*.py") if path.stem != "__init__"}
    named = {value.partition(":")[0] for group in GROUPS.values() for value in group.values()}
    pages = "".join(path.read_text() for path in (ROOT / "docs" / "api").glob("*.md"))
    named |= {module for module in files if re.search(rf"^::: {re.escape(module)}\.\w+$", pages, re.MULTILINE)}
    reached, left = set(), named & set(files)
    while left:
        reached |= left
        left = {module for one in left for module in imported(files[one])} & set(files) - reached
    assert sorted(set(files) - reached) == []


def test_every_plugin_has_tests_of_its_own():
    folders = {path.parent.name for path in PLUGINS.glob("*/__init__.py")}
    assert {path.name for path in (TESTS / "plugins").iterdir() if list(path.glob("test_*.py"))} == folders
