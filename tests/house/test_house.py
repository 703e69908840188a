"""The house rules that a machine can hold."""

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import bitplan
from bitplan.core import errors

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "src" / "bitplan").rglob("*.py"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
IMPORTED_AS = {"pillow": "PIL"}


def imported(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.split(".")[0]


def after(code):
    """What a fresh interpreter has imported after some code."""
    code = f"import sys; {code}; print('\\n'.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_public_names_are_sorted_and_exist():
    assert bitplan.__all__ == sorted(bitplan.__all__)
    for name in bitplan.__all__:
        assert getattr(bitplan, name).__doc__, name
    assert set(bitplan.__all__) <= set(dir(bitplan))
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = bitplan.nonsense


def test_importing_bitplan_is_light():
    assert not {"torch", "numpy", "scipy", "pydantic", "rich"} & after("import bitplan")
    assert "torch" not in after("import bitplan; bitplan.select; bitplan.price; bitplan.Plan; bitplan.select_all")
    assert not {"torch", "numpy", "scipy", "pydantic"} & after("from bitplan.cli.app import app")


def test_what_only_imports_torch_does_not_import_its_compiler():
    """It takes as long as torch itself, and planning a file needs none of it."""
    assert "torch._dynamo" not in after("import bitplan; bitplan.trace; bitplan.quantize; bitplan.estimate")


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT / "src")))
def test_names_say_what_is_inside(path):
    assert not {"utils", "helpers", "manager", "common"} & set(path.with_suffix("").parts)


def test_the_tree_of_errors_is_drawn_as_it_is():
    """Every error that bitplan raises on purpose stands in the drawing, under the one that it is a kind of."""
    drawn, above = {}, []
    for indent, name in re.findall(r"^([│├└─ ]*)(\w+)", errors.__doc__.split("\n\n")[1], re.MULTILINE):
        depth = len(indent) // 4
        above[depth:] = [name]
        drawn[name] = above[depth - 1] if depth else None
    classes = [
        node for path in SOURCES for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ClassDef)
    ]
    bases = {node.name: node.bases[0].id for node in classes if node.bases and isinstance(node.bases[0], ast.Name)}
    real = {"BitplanError": None}
    while more := {name: base for name, base in bases.items() if base in real and name not in real}:
        real |= more
    assert drawn == real


def optional_libraries():
    """Library → what the comment beside it in pyproject.toml says."""
    text = (ROOT / "pyproject.toml").read_text().split("[project.optional-dependencies]")[1].split("\nbench = [")[0]
    return re.findall(r'^  "([a-z_-]+)[^"]*",\s*# (.*)$', text, re.MULTILINE)


@pytest.mark.parametrize(("library", "home"), optional_libraries())
def test_each_optional_library_is_imported_in_the_file_named_beside_it(library, home):
    users = [
        str(path.relative_to(ROOT / "src/bitplan"))
        for path in SOURCES
        if IMPORTED_AS.get(library, library) in imported(path)
    ]
    assert users == ([] if home == "not used yet" else [home])


def test_the_terminal_is_written_to_in_two_files():
    """So that what stands in names is escaped wherever it is shown."""
    writers = re.compile(r"(?<![\w.])print\(|\bConsole\(|\bProgress\(|std(?:out|err)\.write|click\.echo|typer\.echo")
    users = [str(path.relative_to(ROOT / "src/bitplan")) for path in SOURCES if writers.search(path.read_text())]
    assert users == ["cli/show.py", "cli/terminal.py"]


def test_modules_are_imported_by_a_written_name_in_one_file():
    """What a file names must not reach an import past `core/trust.py`; `__init__` imports our own."""
    doors = re.compile(r"import_module|__import__|\brunpy\b|sys\.path|\b(?:exec|eval)\(")
    users = [path for path in SOURCES if doors.search(path.read_text().replace(".eval()", ""))]
    assert [str(path.relative_to(ROOT / "src/bitplan")) for path in users] == [
        "__init__.py",
        "__main__.py",
        "core/trust.py",
    ]


def test_accelerate_is_imported_in_one_file():
    users = [str(path.relative_to(ROOT / "src/bitplan")) for path in SOURCES if "accelerate" in imported(path)]
    assert users == ["tune/loop.py"]


def test_numba_is_imported_in_one_file():
    """That file keeps away settings from the current folder, and caches that others can write to."""
    users = [str(path.relative_to(ROOT / "src/bitplan")) for path in SOURCES if "numba" in imported(path)]
    assert users == ["adapters/numba.py"]


def test_every_optional_library_is_looked_at():
    extras = PROJECT["project"]["optional-dependencies"]
    looked_at = {library for library, _ in optional_libraries()}
    for extra in ("vision", "text", "llama", "lightning", "cluster", "export", "openvino", "report", "testing"):
        assert {re.match(r"[a-z_-]+", requirement)[0] for requirement in extras[extra]} <= looked_at
    assert set(extras) == {
        "vision",
        "text",
        "llama",
        "lightning",
        "cluster",
        "export",
        "openvino",
        "report",
        "testing",
        "bench",
        "docs",
        "dev",
        "all",
    }


SKIPPING = {
    "skip",
    "skipif",
    "skipIf",
    "skipUnless",
    "skipTest",
    "SkipTest",
    "importorskip",
    "xfail",
    "expectedFailure",
}
LEAVING_OUT = {"collect_ignore", "collect_ignore_glob", "pytest_ignore_collect", "pytest_collection_modifyitems"}


def names_in(path):
    """Every name that a file uses: variables, attributes, what it imports and defines."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Name | ast.Attribute):
            yield node.id if isinstance(node, ast.Name) else node.attr
        elif isinstance(node, ast.ImportFrom | ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.FunctionDef):
            yield node.name


@pytest.mark.parametrize("path", sorted((ROOT / "tests").rglob("*.py")), ids=lambda path: str(path.relative_to(ROOT)))
def test_no_test_is_skipped_in_silence(path):
    """Not in a test, not by a mark or a condition, not in a conftest; a folder that leaves a file out must say so."""
    used = set(names_in(path))
    assert not used & SKIPPING
    if used & LEAVING_OUT:
        assert "pytest_terminal_summary" in used


def test_the_rule_on_skips_sees_every_way_to_skip(tmp_path):
    ways = [
        "pytest.skip('x')", "pytest.mark.skipif(True, reason='x')", "from pytest import skip",
        "pytest.importorskip('x')", "item.add_marker(pytest.mark.skip)", "raise unittest.SkipTest",
        "pytestmark = pytest.mark.xfail",
    ]  # fmt: skip
    for way in ways:
        (tmp_path / "conftest.py").write_text(way)
        assert set(names_in(tmp_path / "conftest.py")) & SKIPPING, way
    (tmp_path / "conftest.py").write_text("collect_ignore = ['test_x.py']")
    assert set(names_in(tmp_path / "conftest.py")) & LEAVING_OUT


def test_what_users_run_says_what_it_could_not_try():
    shipped = {path.name: set(names_in(path)) for path in (ROOT / "src" / "bitplan" / "testing").glob("*.py")}
    assert [name for name, used in shipped.items() if used & SKIPPING] == ["test_registered.py"]
    assert "pytest_terminal_summary" in shipped["conftest.py"]


def test_the_set_up_takes_the_torch_that_is_at_hand():
    constraints = (ROOT / "constraints.txt").read_text().splitlines()
    assert "torch==2.13.0" in constraints
    assert all(re.fullmatch(r"#.*|[\w.-]+==[\w.+!-]+", line) for line in constraints)


def test_the_readme_shows_public_names_only():
    text = (ROOT / "README.md").read_text()
    assert set(re.findall(r"bitplan\.([a-zA-Z_]\w*)\(", text)) <= set(bitplan.__all__)


def test_the_page_of_the_architecture_names_every_folder():
    packages = {path.parent for path in (ROOT / "src" / "bitplan").rglob("__init__.py")}
    plugins = {path.name for path in packages if path.parent.name == "plugins"}
    folders = {path.name for path in packages if path.parent == ROOT / "src" / "bitplan"}
    tree = (ROOT / "docs" / "flow.md").read_text().split("\nsrc/bitplan/\n")[1].split("\ntests/")[0]
    assert set(re.findall(r"^  (\w+)/ ", tree, re.MULTILINE)) == folders - {"plugins"}
    assert set(re.findall(r"^    (\w+)/ ", tree, re.MULTILINE)) == plugins
