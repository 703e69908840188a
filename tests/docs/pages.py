"""The pages of the documentation, cut into blocks, and a reader who does what they say.

Fences are told by what they are: `python` is run, all blocks of a page one after the other in one namespace; a block
without a language, or of `console`, has commands; `text` right behind a block that was run shows what it said. A block
whose first line is a comment with the name of a file is that file. Comments above a block say more:

    <!-- not run: why -->                it cannot run here
    <!-- run by tests/a/test_b.py -->    on top of a page: a test of its own runs it
    <!-- short: A → B -->                in the short version B stands for A
"""

from __future__ import annotations

import contextlib
import io
import re
import shlex
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from bitplan.cli import main

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "studies/README.md")]
    + list((ROOT / "docs").rglob("*.md"))
)
FENCE = re.compile(r"((?:^<!-- [^\n]* -->\n)*)^```([\w-]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NUMBERS = re.compile(r"[-+−]?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?")


@dataclass(frozen=True)
class Block:
    """What stands between two fences of a page, and what the comments above it say."""

    page: Path
    line: int
    language: str
    code: str
    comments: tuple[str, ...]
    start: int
    end: int

    def __str__(self) -> str:
        return f"{name_of(self.page)}:{self.line}"

    @property
    def not_run(self) -> str | None:
        """Why it cannot run here; None where it can."""
        reasons = [words for comment in self.comments for words in re.findall(r"^not run: (.+)$", comment)]
        return reasons[0] if reasons else None

    @property
    def file(self) -> str | None:
        """The file that it is, if its first line says so."""
        named = re.match(r"# ([\w./-]+\.(?:py|toml|txt))\n", self.code)
        return named[1] if named else None

    @property
    def commands(self) -> list[str]:
        """The lines that somebody types, without prompt and remark, continued lines as one."""
        if self.language not in ("", "console", "sh", "bash"):
            return []
        lines = self.code.replace("\\\n", " ").splitlines()
        typed = [line for line in lines if line.startswith("$ ")] or lines
        return [re.split(r"\s+# ", line.removeprefix("$ "))[0].strip() for line in typed]

    def shortened(self) -> str:
        """The code of the short version."""
        code = self.code
        for comment in self.comments:
            for old, new in re.findall(r"^short: (.+) → (.+)$", comment):
                assert old in code, f"{self}: there is no {old} to be shortened"
                code = code.replace(old, new)
        return code


def name_of(page: Path) -> str:
    """A page as it is called in the repository."""
    return page.relative_to(ROOT).as_posix()


def blocks_of(page: Path) -> list[Block]:
    """All blocks of a page in their order."""
    text = page.read_text()
    found = []
    for fence in FENCE.finditer(text):
        comments = tuple(re.findall(r"<!-- (.*) -->", fence[1]))
        line = text.count("\n", 0, fence.start(2)) + 1
        found.append(Block(page, line, fence[2], fence[3], comments, fence.start(), fence.end()))
    return found


def runner_of(page: Path) -> str | None:
    """The test that runs a page, if it names one at its top."""
    named = re.search(r"^<!-- run by (\S+) -->$", page.read_text(), re.MULTILINE)
    return named[1] if named else None


class Reader:
    """Somebody who follows a page in a folder: writes its files, runs its Python, types its commands."""

    def __init__(self, folder: Path, names: dict | None = None, *, short: bool = False) -> None:
        self.folder, self.names, self.short = folder, names if names is not None else {}, short
        self.names.setdefault("__name__", "__page__")

    def follow(self, block: Block) -> str:
        """What the block says as it is run."""
        code = block.shortened() if self.short else block.code
        if block.file:
            (self.folder / block.file).parent.mkdir(parents=True, exist_ok=True)
            (self.folder / block.file).write_text(code)
            return ""
        if block.language == "python":
            return self.run(code, str(block))
        changed = Block(block.page, block.line, block.language, code, block.comments, block.start, block.end)
        return "".join(self.type(command) for command in changed.commands if command)

    def run(self, code: str, where: str) -> str:
        said = io.StringIO()
        with contextlib.redirect_stdout(said), contextlib.chdir(self.folder), on_path(self.folder):
            exec(compile(code, where, "exec"), self.names)
        return said.getvalue()

    def type(self, command: str) -> str:
        words = shlex.split(command)
        assert words[0] in ("bitplan", "python"), f"a page may type bitplan and python only: {command}"
        if self.short and words[0] == "bitplan" and words[1] != "sweep":  # which may start Ray
            return self.call(words)
        called = [sys.executable, *(["-m", "bitplan"] if words[0] == "bitplan" else []), *words[1:]]
        with tempfile.TemporaryFile("w+") as said:
            done = subprocess.run(called, cwd=self.folder, stdout=said, stderr=subprocess.STDOUT)
            said.seek(0)
            output = said.read()
        assert done.returncode == 0, f"{command}\n{output}"
        return output

    def call(self, words: list[str]) -> str:
        """The same in this process, which has imported everything already."""
        said, before = io.StringIO(), (sys.argv, sys.excepthook)
        sys.argv = words
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said), contextlib.chdir(self.folder):
            try:
                main()
                code: object = 0
            except SystemExit as end:
                code = end.code
            finally:
                sys.argv, sys.excepthook = before
        assert not code, f"{shlex.join(words)}\n{said.getvalue()}"
        return said.getvalue()


@contextlib.contextmanager
def on_path(folder: Path):
    """The folder's modules can be imported, as in a script that lies there."""
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))


def lasting(output: str) -> str:
    """An output without lines that tell how far long work is, and without what libraries miss on this machine."""
    passing = (
        r" *\d+:\d\d  \d+/\d+",
        "WARNING: Warning: Detected no triton",
        r".*torchao.*\.so",
        r"[IWE]\d{4} ",
        r".*it/s\]",
    )
    kept = (line for line in output.splitlines(keepends=True) if not re.match("|".join(passing), line))
    return "".join(kept)


def shape_of(output: str) -> list[str]:
    """An output without its figures, and without what bars and columns leave blank."""
    bare = (re.sub(r"[━─█]+", "─", NUMBERS.sub("#", line)) for line in lasting(output).splitlines())
    return [" ".join(line.split()) for line in bare if line.strip()]
