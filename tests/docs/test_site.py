"""`make docs`: the site is built whole, fetches nothing from elsewhere, and answers strangers within two clicks."""

import json
import os
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from urllib.parse import unquote, urljoin, urlsplit

import pytest
from pages import ROOT

ASKED = {
    "which method": "which-method.html",
    "how long": "how-long.html",
    "GPU": "gpu.html",
    "my own data": "data.html",
    "what does this error mean": "faq.html",
    "is it faster": "targets/speed.html",
    "how do I install it": "install.html",
    "how do I call it": "api/choose.html",
    "how is it done from start to end": "tutorials/own-cnn.html",
    "what may a budget be": "budgets.html",
    "which file for which program": "targets/onnx.html",
    "phones": "targets/elsewhere.html",
    "language models": "language.html",
    "is my architecture supported": "architectures.html",
    "does the paper hold": "paper.html",
    "how does it compare with other tools": "comparison.html",
    "why": "decisions/two-rings.html",
}
FETCHES = {"script": "src", "img": "src", "link": "href", "iframe": "src", "source": "src"}


class Tags(HTMLParser):
    """Links in the text of a page, which are not those of the navigation, and what it loads by itself."""

    def __init__(self, text):
        super().__init__()
        self.links, self.loads, self.within = set(), set(), False
        self.feed(text)

    def handle_endtag(self, tag):
        self.within = self.within and tag != "article"

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        self.within = self.within or tag == "article"
        if tag == "a" and self.within and given.get("href"):
            self.links.add(given["href"])
        elif tag in FETCHES and given.get(FETCHES[tag]) and given.get("rel") not in ("canonical", "next", "prev"):
            self.loads.add(given[FETCHES[tag]])


def build(root, site):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    done = build(ROOT, folder)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def pages(site):
    return {path.relative_to(site).as_posix(): Tags(path.read_text()) for path in site.rglob("*.html")}


def test_nothing_is_fetched_from_elsewhere(site, pages):
    for name, page in pages.items():
        assert not [load for load in page.loads if re.match(r"(https?:)?//", load)], name
        for load in page.loads:
            path = site / unquote(urlsplit(urljoin(f"/{name}", load)).path).lstrip("/")
            assert path.exists(), f"{name} → {load}"
    for path in site.rglob("*.css"):
        assert not re.search(r"(url\(|@import )[\"']?(https?:)?//", path.read_text()), path.name


def test_what_strangers_ask_is_two_clicks_away(pages):
    reached, new = {"index.html"}, {"index.html"}
    for _ in range(2):
        targets = {urlsplit(urljoin(f"/{name}", link)).path.lstrip("/") for name in new for link in pages[name].links}
        new = {name for name in targets if name in pages} - reached
        reached |= new
    assert {question: page for question, page in ASKED.items() if page not in reached} == {}


def test_search_knows_every_part(site):
    index = json.loads((site / "search" / "search_index.json").read_text())
    found = {entry["location"].partition("#")[0] for entry in index["docs"]}
    assert {"index.html", "methods.html", "changelog.html", "tutorials/cluster.html", "api/choose.html"} <= found
    assert any("provably best precision" in entry["text"] for entry in index["docs"])
    assert (site / "search" / "search_index.js").exists(), "which is what a page in a folder searches"


def test_a_broken_link_ends_the_build(tmp_path):
    for name in ("docs", "studies"):
        shutil.copytree(ROOT / name, tmp_path / name)
    for name in ("mkdocs.yml", "README.md", "CHANGELOG.md", "CONTRIBUTING.md"):
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "src").symlink_to(ROOT / "src")
    (tmp_path / "docs" / "commands.md").write_text(
        "# Commands\n\n[gone](nowhere.md), [no such place](flow.md#nowhere)\n"
    )
    done = build(tmp_path, tmp_path / "site")
    assert done.returncode != 0
    assert "nowhere.md" in done.stderr
    assert "#nowhere" in done.stderr
