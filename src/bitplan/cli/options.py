"""Arguments and options that several verbs share, as the terminal explains them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bitplan.core.defaults import END, NARROW

Target = Annotated[
    str, typer.Argument(help="A zoo name, package.module:factory, a checkpoint, or a graph file (.json).")
]
Files = Annotated[list[Path], typer.Argument(help="Record files (.json).")]
Input = Annotated[str | None, typer.Option("--input", help="Example input, such as 1x3x224x224 or 1x128:int64.")]
WithValues = Annotated[
    bool,
    typer.Option(
        "--values", help="Run the model to trace it, for one that decides by values: the example's, or drawn."
    ),
]
ForTarget = Annotated[
    str | None,
    typer.Option("--for", help="Whose file the budget counts, and what is stored in it: gguf, vllm:size=64, packed …"),
]
Fix = Annotated[list[str], typer.Option(help="Fix layers: 'stem.*=w8a8'. Repeats.")]
Free = Annotated[list[str], typer.Option(help="Exempt layers from the rules: 'fc'. Repeats.")]
Link = Annotated[
    list[str],
    typer.Option(
        help="For checkpoints: layers whose names differ only in what REGEX matches are linked; 'none'. Repeats."
    ),
]
_UNSAID = f"[default: {END}, inputs alone where all choices leave them alone]"
First = Annotated[str | None, typer.Option(help=f"Precision of the first layer, or 'free'. {_UNSAID}")]
Last = Annotated[str | None, typer.Option(help=f"Precision of the last layer, or 'free'. {_UNSAID}")]
Narrow = Annotated[
    int | None,
    typer.Option(
        min=0, help=f"Fix layers with fewer input features at the highest choice; 0 for none. [default: {NARROW}]"
    ),
]
Choices = Annotated[str, typer.Option(help="Precisions to choose from, ascending.")]
Cost = Annotated[list[str], typer.Option(help="A cost by name, or a table (.csv, .json). Repeats.")]
Budgets = Annotated[
    list[str],
    typer.Option(help="70%, memory=60%, 3.2bpw, 12ms or 2MB (whole network), or units. Repeats: all hold at once."),
]
BudgetsOfSearches = Annotated[
    list[str], typer.Option("--budget", help="What a search or relaxation chooses within; others need none. Repeats.")
]
Gain = Annotated[
    str, typer.Option(help="A method by name, or a table of gains (.csv, .json); auto: the best for what is there.")
]
Option = Annotated[list[str], typer.Option("--option", help="An option of the method: KEY=VALUE. Repeats.")]
Selector = Annotated[str | None, typer.Option(help="exact or greedy; the method's own unless said.")]
Levels = Annotated[int | None, typer.Option(min=1, help="Round gains to this many levels first (paper: 10000).")]
Seed = Annotated[int, typer.Option(help="For methods that draw random numbers.")]
Output = Annotated[Path | None, typer.Option("--output", "-o", help="Write the record to this file.")]
Json = Annotated[bool, typer.Option("--json", help="Print the record as JSON instead of a table.")]
Threads = Annotated[int | None, typer.Option(min=1, help="How many CPU threads to use.")]
Device = Annotated[str, typer.Option(help="Where the model runs: cpu, cuda, …")]
TrainDevice = Annotated[
    str | None,
    typer.Option("--device", help="Where to train: cpu, cuda, cuda:1, mps. [default: what accelerate finds]"),
]
TaskName = Annotated[
    str | None, typer.Option("--task", help="The task: its data, loss and score; a name, or package.module:factory.")
]
Data = Annotated[
    str | None,
    typer.Option("--data", help="Your own batches instead of a task: package.module:loader, or a function giving it."),
]
TaskOption = Annotated[
    list[str], typer.Option("--task-option", help="An option of the task: KEY=VALUE, such as data=FOLDER. Repeats.")
]
TextFile = Annotated[
    Path | None,
    typer.Option("--text", help="A text for a language model: short for --task text --task-option data=FILE."),
]
RecipeFile = Annotated[Path | None, typer.Option("--recipe", help="How to train: a .toml file with a recipe's keys.")]
Set = Annotated[list[str], typer.Option("--set", help="A value of the recipe, over the file's: epochs=6. Repeats.")]
Unreached = Annotated[str, typer.Option(help="Layers of the plan that the task never runs: raise, or warn.")]
Weights = Annotated[str | None, typer.Option(help="Float weights: .pth, .safetensors, a Hugging Face folder.")]
Fresh = Annotated[list[str], typer.Option(help="Tensors that --weights may lack: 'qa_outputs.*'. Repeats.")]
ModelName = Annotated[str | None, typer.Option("--model", help="The network of a checkpoint folder that names none.")]
Teacher = Annotated[str | None, typer.Option(help="The float network, for recipes that distill: a name or a folder.")]
TeacherWeights = Annotated[str | None, typer.Option(help="The teacher's weights, where it is given by name.")]
EngineName = Annotated[
    str, typer.Option("--engine", help="Where jobs run: local, local:workers=2, cluster:address=auto.")
]
Trust = Annotated[
    bool, typer.Option("--trust", help="Let files name code to import, and where jobs go: only where you know it.")
]
QuantizerName = Annotated[
    str | None,
    typer.Option(
        "--method", help="How the plan will be quantized: groups:size=64,zeros=true. [lsq; for weights alone, groups]"
    ),
]
Store = Annotated[Path | None, typer.Option(help="A folder that keeps finished jobs: a killed estimate goes on there.")]
