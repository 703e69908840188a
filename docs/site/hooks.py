"""What mkdocs is told beside mkdocs.yml: folders in the navigation, pages outside docs/, parts of the README, links."""

from __future__ import annotations

import os
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
OUTSIDE = {"changelog.md": "CHANGELOG.md", "contributing.md": "CONTRIBUTING.md", "studies.md": "studies/README.md"}
PAGES = {path: page for page, path in OUTSIDE.items()} | {"README.md": "index.md"}
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
FENCED = re.compile(r"(^```.*?^```[^\n]*$)", re.MULTILINE | re.DOTALL)
TABLE = re.compile(r"<table>.*?</table>", re.DOTALL)
INLINE_CODE = re.compile(r"<pre.*?</pre>|<code>([^<]*)</code>", re.DOTALL)
WORD = re.compile(r"[^\s]*-[^\s]*")
LONGEST_WORD = 28  # characters that fit on a phone's line


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Expand folders in the navigation."""
    config.nav = [expanded(part) for part in config.nav or []]
    return config


def expanded(entry: Any) -> Any:
    """An entry of the navigation with files instead of folders."""
    if isinstance(entry, str):
        return entry
    ((title, value),) = entry.items()
    if isinstance(value, list):
        return {title: [expanded(item) for item in value]}
    if value.endswith("/"):
        pages = sorted((ROOT / "docs" / value).glob("*.md"), key=lambda path: (path.name != "index.md", path.name))
        return {title: [numbered(path, f"{value}{path.name}") for path in pages]}
    return entry


def numbered(path: Path, uri: str) -> str | dict[str, str]:
    """The page, called by its number and its heading where its file has a number."""
    number = re.match(r"\d{4}", path.name)
    if not number:
        return uri
    heading = re.sub(r"^# (\d{4}[:.]? )?", "", path.read_text().splitlines()[0])
    return {f"{number[0]} {heading}": uri}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that lie outside docs/, and the files of the repository that pages link to."""
    for page, path in OUTSIDE.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / path)))
    for page in [file for file in files if file.is_documentation_page()]:
        home = Path(str(page.abs_src_path)).parent
        for _, _, target in LINK.findall(FENCED.sub("", page.content_string)):
            path = repository_path(home, target.partition("#")[0])
            if path and not path.startswith("docs/") and path not in PAGES and (ROOT / path).is_file():
                uri = f"sources/{path}"
                if uri not in files.src_uris:
                    files.append(File.generated(config, uri, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Put in what stands in the README, and turn links of the repository into links of the site."""
    if page.file.src_uri.startswith("decisions/"):
        page.meta["search"] = {"boost": 0.5}  # they say why; what is searched for is mostly how
    home = Path(OUTSIDE.get(page.file.src_uri, f"docs/{page.file.src_uri}")).parent
    readme = (ROOT / "README.md").read_text()
    text = relinked(markdown, ROOT / home, page)
    for title in re.findall(r"^<!-- README: (.*) -->$", markdown, re.MULTILINE):
        section = readme.split(f"\n## {title}\n")[1].split("\n## ")[0]
        text = text.replace(f"<!-- README: {title} -->", relinked(f"## {title}\n{section}", ROOT, page))
    return text


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Say how long the cells of a table are, for site.css, and keep options such as --budget whole."""
    return INLINE_CODE.sub(kept_whole, TABLE.sub(measured, html))


def measured(table: re.Match[str]) -> str:
    """The table, each of whose columns says how many characters its longest cell has."""
    rows = [
        re.findall(r"<t[hd]>(.*?)</t[hd]>", row, re.DOTALL) for row in re.findall(r"<tr>.*?</tr>", table[0], re.DOTALL)
    ]
    lengths = iter(max(len(re.sub(r"<[^>]+>", "", cell)) for cell in column) for column in zip(*rows, strict=False))
    return re.sub(r"<th>", lambda _: f'<th style="--longest: {next(lengths, 0)}">', table[0])


def kept_whole(code: re.Match[str]) -> str:
    """Code within a line, whose words with a hyphen are not broken at it."""
    if code[1] is None:
        return code[0]

    def whole(word: re.Match[str]) -> str:
        return f'<span class="whole">{word[0]}</span>' if len(word[0]) <= LONGEST_WORD else word[0]

    return f"<code>{WORD.sub(whole, code[1])}</code>"


def relinked(markdown: str, home: Path, page: Page) -> str:
    """The text with every link to a file as the site has it."""

    def link(found: re.Match[str]) -> str:
        picture, words, target = found.groups()
        name, mark, anchor = target.partition("#")
        path = repository_path(home, name)
        if path is None:
            return found[0]
        uri = path.removeprefix("docs/") if path.startswith("docs/") else PAGES.get(path, f"sources/{path}")
        relative = posixpath.relpath(uri, posixpath.dirname(page.file.src_uri) or ".")
        return f"{picture}[{words}]({relative}{mark}{anchor})"

    parts = FENCED.split(markdown)
    return "".join(part if part.startswith("```") else LINK.sub(link, part) for part in parts)


def repository_path(home: Path, target: str) -> str | None:
    """Where a link leads within the repository; None for addresses elsewhere and places on the same page."""
    if not target or re.match(r"[a-z]+:", target):
        return None
    return os.path.relpath(home / target, ROOT).replace(os.sep, "/")
