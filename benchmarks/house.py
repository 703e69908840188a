"""Measure the shape of the source: how much of it there is, and how much of it one task reaches.

`python -m benchmarks.house` prints each figure beside its limit and ends with code 1 if one is above it.
`make check` runs it. Limits and goals stand in `house.toml`. A limit only goes down, to the figure that was reached;
a feature that raises one says why in the same commit.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "bitplan"
PLUGINS = SOURCE / "plugins"
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
DOCUMENTED = (ast.Module, ast.ClassDef, *DEFINITIONS)

LAYOUT_TOKENS = frozenset(
    {
        tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT,
        tokenize.DEDENT, tokenize.ENCODING, tokenize.ENDMARKER,
    }
)  # fmt: skip

LOOK_UP = "import bitplan; bitplan.{name}"
FROM_TRACE_TO_ONNX = """
import tempfile, warnings, torch, bitplan
warnings.simplefilter("ignore")
model = torch.nn.Sequential(
    torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.Conv2d(8, 8, 3), torch.nn.ReLU(),
    torch.nn.Conv2d(8, 8, 3), torch.nn.Flatten(), torch.nn.LazyLinear(10),
).eval()
example = torch.randn(2, 3, 12, 12)
model(example)
graph = bitplan.trace(model, example, rules=bitplan.Rules(narrow=0))
gains = bitplan.estimate("eagl", model, graph, choices="w2a2,w4a4", steps="mse")
plan = bitplan.select(graph, gains, bitplan.price("bmac", graph), budget="70%")
mixed = bitplan.quantize(model, plan)
bitplan.calibrate_(mixed, [example])
with tempfile.TemporaryDirectory() as folder:
    bitplan.export(mixed, folder + "/net.onnx", to="onnx", example=example)
"""
COUNT_MODULES = "\nimport sys\nprint(len([name for name in sys.modules if name.split('.')[0] == 'bitplan']))"

COUNT_OPTIONS = """
import typer
from bitplan.cli.app import app
def leaves(command, path=()):
    inner = getattr(command, "commands", None)
    if not inner:
        yield path, len([p for p in command.params if p.param_type_name == "option" and p.name != "help"])
    for name, one in (inner or {}).items():
        yield from leaves(one, (*path, name))
top = typer.main.get_command(app)
shown = [name for name, one in top.commands.items() if not one.hidden]
most = max(leaves(top), key=lambda leaf: leaf[1])
print(len(shown), most[1], " ".join(most[0]))
"""


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Words that end like a participle and are verbs, nouns or the field's own terms.
NO_PARTICIPLE = _words(
    """
    embed need feed seed read spread speed shed breed exceed
    """
)
PARTICIPLES = _words(
    """
    kept made told said shown known taken given found left held laid written drawn seen begun built chosen lost
    meant met sent sold thrown worn brought bought done gone grown hidden spent stuck asked
    """
)
ADJECTIVES = _words(
    """
    lean wide whole own plain bare fresh free full empty even odd near far same void rare late early ready quiet
    short long big small narrow missing right wrong sure true false new old today ahead anew aloud still twice
    """
)

WHAT_IS_NO_NOUN = re.compile(r"\bwhat (?:is|was|are|were|do|does|did|can|should|to)\b[^.]*\?", re.IGNORECASE)
WHAT_CLAUSE = re.compile(r"\bwhat\b", re.IGNORECASE)


class Figure(NamedTuple):
    """One measured number; `was` is that of 19 November, before the code was made smaller."""

    name: str
    value: float
    was: float
    limit: float
    goal: float
    detail: str = ""


def main() -> None:
    """Print the table; exit with 1 if a figure is above its limit."""
    figures = measure()
    width = max(len(figure.name) for figure in figures)
    print(f"{'':<{width}}  {'was':>8} {'goal':>8} {'limit':>8} {'now':>8}")
    for name, value, was, limit, goal, detail in figures:
        notes = [f"({detail})"] if detail else []
        notes += ["ABOVE ITS LIMIT"] if value > limit else []
        print(f"{name:<{width}}  {was:>8,g} {goal:>8,g} {limit:>8,g} {value:>8,g}  {' '.join(notes)}".rstrip())
    above = [figure.name for figure in figures if figure.value > figure.limit]
    if above:
        sys.exit(f"above the limit: {'; '.join(above)}")


def measure() -> list[Figure]:
    """Return every figure; the processes that import bitplan run beside the reading."""
    limits = tomllib.loads((ROOT / "benchmarks" / "house.toml").read_text())
    with ThreadPoolExecutor(2) as pool:
        processes = {
            "modules after bitplan.quantize": pool.submit(_ask, LOOK_UP.format(name="quantize") + COUNT_MODULES),
            "modules after trace … ONNX": pool.submit(_ask, FROM_TRACE_TO_ONNX + COUNT_MODULES),
            "modules after bitplan.sweep": pool.submit(_ask, LOOK_UP.format(name="sweep") + COUNT_MODULES),
            "commands": pool.submit(_ask, COUNT_OPTIONS),
        }
        found = {**count_source(), **count_names(), **count_prose(), **count_files()}
        answers = {name: process.result().split(maxsplit=2) for name, process in processes.items()}
    commands, options, most = answers.pop("commands")
    found |= {name: (float(answer[0]), "") for name, answer in answers.items()}
    found |= {"commands in --help": (float(commands), ""), "most options of a command": (float(options), most)}
    assert found.keys() == limits.keys(), found.keys() ^ limits.keys()
    return [Figure(name, *found[name][:1], *limits[name], found[name][1]) for name in limits]


def count_source() -> dict[str, tuple[float, str]]:
    """Count tokens, lines and files of the source, and the files that only one other file imports."""
    lines = {path: len(path.read_text().splitlines()) for path in sources()}
    inner = sum(count for path, count in lines.items() if PLUGINS not in path.parents)
    longest = max(lines, key=lambda path: lines[path])
    lonely = imported_by_one()
    return {
        "tokens of Python in src": (sum(count_tokens(path) for path in sources()), ""),
        "lines of Python in src": (sum(lines.values()), ""),
        "lines of ring 1": (inner, ""),
        "files of Python in src": (len(lines), ""),
        "lines of the longest file": (lines[longest], str(longest.relative_to(SOURCE))),
        "files imported by one other": (len(lonely), ""),
        "ring 1 imports of ring 2": (len(list(_imports_of_plugins())), ""),
    }


def count_names() -> dict[str, tuple[float, str]]:
    """Count public names, and functions named by a bare participle or adjective, in percent."""
    functions = [node.name for path in sources() for node in ast.walk(parse(path)) if isinstance(node, DEFINITIONS)]
    named = [name for name in functions if not name.startswith("__")]
    bare = Counter(name for name in named if _is_bare(name))
    common = ", ".join(name for name, _ in bare.most_common(5))
    namespace: dict[str, object] = {}
    text = (SOURCE / "__init__.py").read_text()
    exec(compile(text, "bitplan", "exec"), namespace | {"__name__": "bitplan_names"}, namespace)
    public = namespace["__all__"]
    assert isinstance(public, list)
    return {
        "public names at top level": (len(public), ""),
        "function names that are a participle or adjective, %": (_percent(bare.total(), len(named)), common),
    }


def count_prose() -> dict[str, tuple[float, str]]:
    """Count docstrings with a clause "what …" used as a noun, and lines of code without words about them."""
    docstrings = [text for path in sources() for text in _docstrings(path)]
    clauses = [text for text in docstrings if WHAT_CLAUSE.search(WHAT_IS_NO_NOUN.sub("", text))]
    code = documented = comments = 0
    for path in sources():
        lines = path.read_text().splitlines()
        in_docstrings = sum(end - begin + 1 for begin, end in docstring_lines(path).items())
        only_comments = sum(line.lstrip().startswith("#") for line in lines)
        code += sum(bool(line.strip()) for line in lines) - in_docstrings - only_comments
        documented += in_docstrings
        comments += sum(token.type == tokenize.COMMENT for token in _tokens(path))
    return {
        'docstrings with a clause "what …", %': (_percent(len(clauses), len(docstrings)), ""),
        "lines of code per line of docstring": (round(code / documented, 2), ""),
        "lines of code per comment": (round(code / comments, 1), ""),
    }


def count_files() -> dict[str, tuple[float, str]]:
    """Count the tokens of the benchmarks and the files beside the Python source."""
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    beside = [name for name in tracked if name.startswith("src/") and not name.endswith(".py")]
    longer = [name for name in tracked if name.startswith(("studies/", "tests_all/"))]
    return {
        "tokens in benchmarks": (sum(map(count_tokens, (ROOT / "benchmarks").rglob("*.py"))), ""),
        "files of studies and tests_all": (len(longer), ""),
        "files in src that are not Python": (len(beside), ""),
    }


@cache
def sources() -> tuple[Path, ...]:
    """Return every Python file of the package."""
    return tuple(sorted(SOURCE.rglob("*.py")))


@cache
def parse(path: Path) -> ast.Module:
    """Return the syntax tree of a file."""
    return ast.parse(path.read_text())


def count_tokens(path: Path) -> int:
    """Return the number of tokens without comments, docstrings and layout."""
    starts = docstring_lines(path)
    return sum(
        token.type not in LAYOUT_TOKENS and not (token.type == tokenize.STRING and token.start[0] in starts)
        for token in _tokens(path)
    )


def docstring_lines(path: Path) -> dict[int, int]:
    """Return the first line → the last line of each text that stands alone as a statement."""
    return {
        statement.lineno: statement.end_lineno or statement.lineno
        for node in ast.walk(parse(path))
        if isinstance(node, DOCUMENTED)
        for statement in node.body
        if isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
    }


def imported_by_one() -> list[str]:
    """Return the modules that exactly one other file imports; plugins, adapters and packages apart."""
    modules = {_module_name(path): path for path in sources()}
    importers: dict[str, set[str]] = {name: set() for name in modules}
    for importer, path in modules.items():
        for name in _imported_modules(path, modules):
            if importer not in (name, "bitplan"):  # the top level only says where its names live
                importers[name].add(importer)
    return sorted(
        name
        for name, users in importers.items()
        if len(users) == 1 and modules[name].name != "__init__.py" and not _is_apart(name)
    )


def _imported_modules(path: Path, modules: dict[str, Path]) -> Iterator[str]:
    for node in ast.walk(parse(path)):
        names: Iterable[str] = ()
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        yield from (name for name in names if name in modules)


def _imports_of_plugins() -> Iterator[str]:
    modules = {_module_name(path): path for path in sources()}
    for name, path in modules.items():
        if PLUGINS not in path.parents:
            yield from (f"{name} → {one}" for one in _imported_modules(path, modules) if ".plugins" in one)


def _module_name(path: Path) -> str:
    parts = path.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _is_apart(name: str) -> bool:
    return name.startswith(("bitplan.plugins.", "bitplan.adapters.", "bitplan.testing."))


def _docstrings(path: Path) -> Iterator[str]:
    for node in ast.walk(parse(path)):
        if isinstance(node, DOCUMENTED) and (text := ast.get_docstring(node)):
            yield text


def _tokens(path: Path) -> Iterator[tokenize.TokenInfo]:
    return tokenize.generate_tokens(io.StringIO(path.read_text()).readline)


def _is_bare(name: str) -> bool:
    """Return True if a name is nothing but a participle or an adjective: `kept`, `_made`, `lean`."""
    word = name.strip("_")
    if "_" in word:
        return False
    is_regular = len(word) > 4 and word.endswith("ed") and word not in NO_PARTICIPLE
    return is_regular or word in PARTICIPLES or word in ADJECTIVES


def _percent(part: int, whole: int) -> float:
    return round(100 * part / whole, 1)


def _ask(code: str) -> str:
    """Return the last line that a fresh interpreter prints after some code."""
    command = [sys.executable, "-W", "ignore", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    if done.returncode:
        sys.exit(f"the measuring code failed:\n{done.stderr[-2000:]}")
    return done.stdout.splitlines()[-1]


if __name__ == "__main__":
    main()
