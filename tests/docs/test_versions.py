"""What says a version says the same: the package, the changelog, the citation, the page on versions."""

import re
import tomllib

import yaml
from pages import ROOT

import bitplan

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PAGE = (ROOT / "docs" / "versions.md").read_text()


def test_the_release_is_the_same_everywhere():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    newest = re.findall(r"^## (\d[\w.]*) \((\S+)\)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[0]
    assert citation["version"] == newest[0]
    assert str(citation["date-released"]) == newest[1]
    assert bitplan.__version__.startswith(newest[0]) or ".dev" in bitplan.__version__


def test_the_page_on_versions_has_every_library_and_what_was_installed():
    pinned = dict(line.lower().split("==") for line in (ROOT / "constraints.txt").read_text().split() if "==" in line)
    extras = PROJECT["optional-dependencies"]
    named = {name for name in extras if name not in ("all", "bench", "dev", "docs", "testing")}
    wanted = [*PROJECT["dependencies"], *(requirement for name in sorted(named) for requirement in extras[name])]
    for requirement in wanted:
        library, least = re.fullmatch(r"([\w-]+)>=([\w.]+)", requirement).groups()
        row = re.search(rf"^\| {library} \| ([\w.]+) \| ([\w.]+) \|", PAGE, re.MULTILINE)
        assert row, f"docs/versions.md has no row of {library}"
        assert row.groups() == (least, pinned[library]), library


def test_the_lowest_versions_that_are_tested_are_those_that_are_asked_for():
    lowest = dict(re.findall(r"^(\w+)==([\w.]+)", (ROOT / "constraints-lowest.txt").read_text(), re.MULTILINE))
    for requirement in PROJECT["dependencies"]:
        library, least = requirement.split(">=")
        if library != "torch":  # the pinned one is the lowest
            assert lowest[library].startswith(f"{least}."), library


def test_python_is_declared_as_it_ran():
    declared = [
        entry.rpartition(" :: ")[2] for entry in PROJECT["classifiers"] if re.search(r"Python :: 3\.\d+$", entry)
    ]
    assert declared == ["3.11"]
    assert re.search(r"^\| 3\.11 \| the whole of `make test` \|", PAGE, re.MULTILINE)
