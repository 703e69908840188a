"""Links lead somewhere: to a file that is there, and to a heading that it has."""

import re

import pytest
import yaml
from pages import PAGES, ROOT, name_of

LINK = re.compile(r"!?\[(?:[^\[\]]|\[[^\]]*\])*\]\(([^)\s]+)\)")
FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


class Loader(yaml.SafeLoader):
    """Reads mkdocs.yml; what names a function of Python is left alone."""


Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, suffix, node: suffix)
SETTINGS = yaml.load((ROOT / "mkdocs.yml").read_text(), Loader)


def text_of(page):
    return FENCED.sub("", page.read_text())


def anchors_of(page):
    """The names of its headings, as GitHub and the site make them."""
    headings = re.findall(r"^#+ (.*)$", text_of(page), re.MULTILINE)
    bare = (re.sub(r"[`*]|\[([^\]]*)\]\([^)]*\)", r"\1", heading) for heading in headings)
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in bare}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_link_leads_to_a_file_and_a_heading(page):
    for target in LINK.findall(text_of(page)):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        path = (page.parent / name).resolve() if name else page
        assert path.exists(), target
        if anchor and path.suffix == ".md":
            assert anchor in anchors_of(path), target


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_file_that_a_page_names_is_there(page):
    for path in re.findall(r"`((?:src|tests|docs|benchmarks|studies)/[\w./-]+\.\w+)`", page.read_text()):
        assert (ROOT / path).exists(), path


def test_every_page_is_in_the_navigation():
    def listed(entry):
        if isinstance(entry, str):
            yield entry
        elif isinstance(entry, list):
            for part in entry:
                yield from listed(part)
        else:
            yield from listed(next(iter(entry.values())))

    names = list(listed(SETTINGS["nav"]))
    folders = tuple(name for name in names if name.endswith("/"))
    pages = [path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")]
    assert [page for page in pages if page not in names and not page.startswith(folders)] == []
    assert len(names) == len(set(names))


def test_headings_are_named_as_on_github(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# A `code` & more\n\n```\n# none\n```\n\n## [0037](x.md): fair, or not?\n")
    assert anchors_of(page) == {"a-code--more", "0037-fair-or-not"}
