"""Arguments and options that several commands share, and how their texts become values.

Options of a named thing stand behind its name: `--gain eagl:steps=mse`, `--task imagenet:data=DIR`. Rules and recipes
come from a file, from KEY=VALUE, or from both: `--recipe recipe.toml --recipe epochs=6`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bitplan.core.defaults import AUTO, END, NARROW
from bitplan.core.errors import InputError, UnknownName
from bitplan.core.option_parsing import read_named, read_options, split_options

if TYPE_CHECKING:
    from bitplan.cli.inputs import Input, MustRun
    from bitplan.core.rules import Rules
    from bitplan.core.trials import Recipe
    from bitplan.store.engines import Engine

_SIZE = re.compile(r"[1-9][0-9]{0,8}")
_LISTS = ("fix", "free", "link")  # rules that repeat
_VALUES = "values"  # a word of --input

Target = Annotated[
    str, typer.Argument(help="A zoo name, package.module:factory, a checkpoint, or a graph file (.json).")
]
Files = Annotated[list[Path], typer.Argument(help="Record files (.json).")]
RunPath = Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run, which `bitplan sweep` made.")]
RunOrFile = Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run, or the file of its results.")]
StudyFile = Annotated[Path, typer.Argument(metavar="STUDY", help="A study (.toml).")]
InputShape = Annotated[
    str | None,
    typer.Option(
        "--input",
        show_default="the model's own",
        help="Example input: 1x3x224x224 or 1x128:int64. The word values, alone or behind a comma, traces the model "
        "with values, if it decides by them.",
    ),
]
FileTarget = Annotated[
    str | None,
    typer.Option(
        "--target",
        show_default="none",
        help="Whose file the budget counts, and how it stores weights: gguf, vllm:size=64, packed …",
    ),
]
RuleWords = Annotated[
    list[str],
    typer.Option(
        "--rules",
        show_default=f"first={END}, last={END} (inputs as the choices have them), narrow={NARROW}",
        help="Which layers are fixed: a .toml file, or KEY=VALUE. first, last: a precision or free; narrow: layers "
        "with fewer input features get the highest choice, 0 for none; fix: 'stem.*=w8a8'; free: 'fc'; link: for "
        "checkpoints, layers are linked if their names differ only where this REGEX matches, or none. Repeats.",
    ),
]
Bits = Annotated[str, typer.Option(help="Precisions to choose from, ascending.")]
CostNames = Annotated[list[str], typer.Option("--cost", help="A cost by name, or a table (.csv, .json). Repeats.")]
Budgets = Annotated[
    list[str],
    typer.Option(help="70%, memory=60%, 3.2bpw, 12ms or 2MB (whole network), or units. Repeats: all hold at once."),
]
Gain = Annotated[
    str,
    typer.Option(
        help="A method with its options, NAME:KEY=VALUE, or a table of gains (.csv, .json); auto: the best for your "
        "inputs."
    ),
]
Selector = Annotated[
    str | None,
    typer.Option(
        show_default="the method's own",
        help="exact or greedy. exact:levels=10000 rounds gains to so many levels first, as the paper does.",
    ),
]
Seed = Annotated[int, typer.Option(help="For methods that draw random numbers.")]
Output = Annotated[
    Path | None, typer.Option("--output", "-o", show_default="the terminal alone", help="Write the record here.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Threads = Annotated[int | None, typer.Option(min=1, show_default="torch's own", help="How many CPU threads to use.")]
Workers = Annotated[
    int | None,
    typer.Option(min=0, show_default="the study's engine", help="Processes on this machine, one thread each."),
]
Device = Annotated[str, typer.Option(help="Where the model runs: cpu, cuda, …")]
TaskName = Annotated[
    str | None,
    typer.Option(
        "--task",
        show_default="none",
        help="The task (data, loss and score) with its options: digits, imagenet:data=DIR, text:data=FILE, or "
        "package.module:factory.",
    ),
]
Data = Annotated[
    str | None,
    typer.Option(
        show_default="none", help="Your own batches instead of a task: package.module:loader, or a function giving it."
    ),
]
RecipeWords = Annotated[
    list[str],
    typer.Option(
        "--recipe",
        show_default="the method's own",
        help="How to train: a .toml file with a recipe's keys, or KEY=VALUE over it, such as epochs=6. teacher=NAME "
        "(with teacher_weights=FILE) is the float network for recipes that distill. Repeats.",
    ),
]
Unreached = Annotated[str, typer.Option(help="Layers of the plan that the task never runs: raise, or warn.")]
Weights = Annotated[
    str | None,
    typer.Option(show_default="the model's own", help="Float weights: .pth, .safetensors, a Hugging Face folder."),
]
Fresh = Annotated[
    list[str], typer.Option(show_default="none", help="Tensors that --weights may lack: 'qa_outputs.*'. Repeats.")
]
ModelName = Annotated[
    str | None,
    typer.Option(
        "--model",
        show_default="the one that the file names",
        help="The network of a graph file or a checkpoint folder: package.module:factory.",
    ),
]
EngineName = Annotated[
    str,
    typer.Option("--engine", help="Where jobs run: local:threads=4, local:workers=2,threads=1, cluster:address=auto."),
]
Trust = Annotated[
    bool, typer.Option("--trust", help="Let files name code to import, and where jobs go: only if you know it.")
]
QuantizerName = Annotated[
    str | None,
    typer.Option(
        "--quantizer",
        show_default="the target's, or lsq, or groups for weights alone",
        help="How weights and inputs are quantized, with options: pact:decay=0.01, groups:size=64 "
        "(`bitplan list quantizers`).",
    ),
]
Store = Annotated[
    Path | None,
    typer.Option(
        show_default="none", help="A folder that keeps finished jobs: an estimate that was killed goes on from there."
    ),
]


def read_shape(shape: str) -> Any:
    """Return tensors without data for "1x3x224x224" or, for several inputs, "1x3x224x224,1x10:int64"."""
    import torch

    tensors = []
    for part in shape.split(","):
        sizes, _, kind = part.partition(":")
        dtype = getattr(torch, kind or "float32", None)
        if not isinstance(dtype, torch.dtype) or not all(_SIZE.fullmatch(size) for size in sizes.split("x")):
            raise InputError(f"--input {shape!r} cannot be read: write 1x3x224x224, or 1x128:int64 for whole numbers")
        tensors.append(torch.empty([int(size) for size in sizes.split("x")], dtype=dtype, device="meta"))
    return tuple(tensors)


def split_input(typed: str | None) -> tuple[str | None, bool]:
    """Return the shapes in --input, and True if it has the word `values`."""
    parts = [] if typed is None else typed.split(",")
    shapes = [part for part in parts if part != _VALUES]
    return ",".join(shapes) or None, len(shapes) < len(parts)


def fill_example(example: Any) -> Any:
    """Return an example with values where it has only shapes: normally distributed, always the same; integers are 0."""
    import torch
    from torch.utils._pytree import tree_map_only

    generator = torch.Generator().manual_seed(0)

    def fill(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_meta:
            return tensor
        if not tensor.is_floating_point():
            return torch.zeros(tensor.shape, dtype=tensor.dtype)
        return torch.randn(tensor.shape, generator=generator).to(tensor.dtype)

    return tree_map_only(torch.Tensor, fill, example)


def read_task(typed: str, network: Input | None = None) -> Any:
    """Return the task with its options; one without a tokenizer gets that of the network typed."""
    import dataclasses

    from bitplan.tasks.base import load_task

    name, options = read_named(typed, "--task") if re.search(r":\w+=", typed) else (typed, {})
    task = load_task(name, **options)
    pretrained = None if network is None else network.pretrained
    if pretrained is None or getattr(task, "tokenizer", "its own") is not None or not dataclasses.is_dataclass(task):
        return task
    return dataclasses.replace(task, tokenizer=str(pretrained))


def read_data(task: str | None, data: str | None, network: Input | None = None) -> Any:
    """Return the task that --task names, or one of the batches that --data names, or None."""
    if data is None:
        return None if task is None else read_task(task, network)
    if task is not None:
        raise InputError("--data and --task are both what the network is run on: give one of them")
    from bitplan.core.trust import import_data, names_code
    from bitplan.gains.base import Context
    from bitplan.gains.start_network import add_data

    if not names_code(data):
        raise InputError(f"--data {data!r} is not package.module:loader, a DataLoader, Dataset or batches in your code")
    return add_data(Context(), import_data(data), None).task


def read_rules(bits: str, typed: Sequence[str], usual: Mapping[str, str] | None = None) -> tuple[Rules, list[str]]:
    """Return the rules as typed, for these choices, and the patterns that link layers of a checkpoint.

    `usual` are rules that hold unless others are typed.
    """
    from bitplan.core.rules import Rules

    values: dict[str, Any] = dict(usual or {})
    known = (*Rules.model_fields, "link")
    files = [word for word in typed if not _is_pair(word)]
    for path in files:
        values |= _read_toml(Path(path), "rules")
    pairs = [split_pair(pair) for word in typed if _is_pair(word) for pair in split_options(word)]
    for key, text in pairs:
        if key in _LISTS:
            listed = values.get(key, [])
            values[key] = [*([f"{a}={b}" for a, b in listed.items()] if isinstance(listed, dict) else listed), text]
        else:
            values |= read_options([f"{key}={text}"], "--rules")
    for key in values:
        if key not in known:
            raise UnknownName("rule", key, known)
    links = list(values.pop("link", []))
    rules = Rules.read(**values)
    return rules.for_choices(bits) if bits else rules, links


def split_pair(text: str) -> tuple[str, str]:
    """Return the key and the value of KEY=VALUE."""
    key, _, value = text.partition("=")
    return key, value


def refuse_rules(rules: Rules, why: str, *, but: Sequence[str] = ()) -> None:
    """Refuse the rules that were typed and would have no effect."""
    idle = sorted(name for name in rules.model_fields_set if name not in but)
    if idle:
        raise InputError(f"--rules {', '.join(idle)} would have no effect: {why}")


def read_recipe(typed: Sequence[str], *, trust: bool = False) -> tuple[Recipe | None, dict[str, str]]:
    """Return the recipe as typed, or None; and its teacher's name and weights. Single values go over those of files."""
    from bitplan.core.parsing import explain_failures
    from bitplan.core.trials import Recipe, merge_recipes
    from bitplan.core.trust import check_code

    if not typed:
        return None, {}
    files = [Path(word) for word in typed if not _is_pair(word)]
    content: dict[str, Any] = {}
    for path in files:
        content |= _read_toml(path, "recipe")
        if "teacher" in content:
            check_code(str(content["teacher"]), path, trust=trust)
    values = read_options([pair for word in typed if _is_pair(word) for pair in split_options(word)], "--recipe")
    teacher = {name: str({**content, **values}[name]) for name in _TEACHER if name in content or name in values}
    content, values = ({key: value for key, value in one.items() if key not in _TEACHER} for one in (content, values))
    if not content and not values:
        return None, teacher
    with explain_failures(files[-1], "a recipe", "write it again") if files else nullcontext():
        return Recipe(**merge_recipes(values, content)), teacher


_TEACHER = ("teacher", "teacher_weights")


def read_engine(typed: str) -> Engine | None:
    """Return the engine of "local:workers=2,threads=1"; None for this process, whose threads are limited as said."""
    from bitplan.store.engines import make_engine

    name, options = read_named(typed, "--engine")
    engine = make_engine(name, options)
    if name == "local" and not options.get("workers"):
        limit_threads(options.get("threads"))
        return None
    return engine


def limit_threads(threads: int | None) -> None:
    """Let torch use so many CPU threads, if that was asked for."""
    if threads is not None:
        import torch

        torch.set_num_threads(threads)


def read_selector(typed: str | None) -> dict[str, Any]:
    """Return the arguments of `select` for "exact:levels=10000"."""
    if typed is None:
        return {"selector": None, "levels": None}
    name, options = read_named(typed, "--selector")
    for option, value in options.items():
        if option != "levels":
            raise UnknownName(f"option of {name}", option, ("levels",))
        if type(value) is not int or value < 1:
            raise InputError(f"--selector {typed}: levels is {value!r}, and must be a whole number of at least 1")
    return {"selector": name, "levels": options.get("levels")}


def must_run(gain: str, data: str | None) -> MustRun:
    """Return whether the network itself is run on data; some methods take it from its file, block by block."""
    from bitplan.core.registry import CHOOSERS

    if data is None:
        return "no"
    name = gain.partition(":")[0]
    streams = "large" if name == AUTO else getattr(CHOOSERS.get(name), "streams", "") if name in CHOOSERS else ""
    return "no" if streams == "always" else "small" if streams == "large" else "yes"


def _is_pair(word: str) -> bool:
    return bool(re.match(r"\w+=", word)) and not Path(word).is_file()


def _read_toml(path: Path, table: str) -> dict[str, Any]:
    """Return the keys of a file, or of its table of this name."""
    from bitplan.core.parsing import explain_failures, parse_toml
    from bitplan.store.files import read_text

    if path.suffix != ".toml" and not path.exists():
        raise InputError(f"--{table} {str(path)!r} is neither a .toml file nor KEY=VALUE")
    with explain_failures(path, "a recipe" if table == "recipe" else table, "write it again"):
        content = parse_toml(read_text(path))
    return dict(content.get(table, content))
