"""The one door for what users type: `what_is` says what a thing is, and the thing gives what a verb asks for.

typed                                           is                what it has
resnet50 · timm/NAME · package.module:factory   BuiltModel        graph · model · example · its name in the zoo
a folder with a checkpoint.json                 OwnCheckpoint     the same, with weights, and a plan
FILE.gguf · a folder with transformers' config  PretrainedModel   graph · model · example · tokenizer
FILE.safetensors, .pth … · a folder of them     WeightsFile       graph, by names and shapes · the opened file
FILE.json                                       RecordFile        a graph or a plan
a folder with a study.json                      RunNetwork        all of it, and a task
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bitplan.cli.checkpoints import OwnCheckpoint, PretrainedModel, WeightsFile
from bitplan.cli.run_networks import Pick as Pick
from bitplan.cli.run_networks import RunNetwork as RunNetwork
from bitplan.cli.things import Beside as Beside
from bitplan.cli.things import BuiltModel, RecordFile, Typed
from bitplan.core.errors import InputError
from bitplan.core.records import ABOUT, ENDINGS
from bitplan.store.files import open_file
from bitplan.store.run_folder import RunFolder
from bitplan.weights.pretrained_folders import is_pretrained

_PICKLE = b"\x80"  # what a pickle begins with
_WEIGHTS = (*ENDINGS, ".index.json")


def what_is(written: str | Path, beside: Beside | None = None, pick: Pick | None = None) -> Typed:
    """Tell what a thing is by its name and by what lies there; `pick` says which network of a run."""
    typed, path, about = str(written), Path(written), beside or Beside()
    own = (path / ABOUT).is_file()
    if about.model is not None and not own:
        raise InputError(f"--model names the network of a checkpoint folder, and {typed} is none")
    if RunFolder.is_one(path):
        return RunNetwork(typed, about, pick or Pick())
    _refuse_pick(typed, pick or Pick())
    if own:
        return OwnCheckpoint(typed, about)
    if is_pretrained(path):
        return PretrainedModel(typed, about)
    if path.is_dir() or typed.endswith(_WEIGHTS):
        return WeightsFile(typed, about)
    if path.suffix == ".json" and not _holds_bytes(path):
        return RecordFile(typed, about)
    if path.is_file():  # of whatever name: PyTorch's files have many
        return WeightsFile(typed, about)
    return BuiltModel(typed, about)


def teacher_of(written: str | None, weights: str | None, model: str | None = None, *, trust: bool = False) -> Any:
    """The float network that teaches, with its weights; None where none was typed."""
    if written is None:
        if weights is not None:
            raise InputError("--teacher-weights are those of --teacher: name it too, or leave them out")
        return None
    own = (Path(written) / ABOUT).is_file()  # --model is about the network of such a folder
    teacher = what_is(written, Beside(weights=weights, model=model if own else None, trust=trust))
    if teacher.has_random_weights:
        raise InputError(f"{written} from the zoo has random weights, which teach nothing: add --teacher-weights")
    return teacher.model


def _holds_bytes(path: Path) -> bool:
    """Whether a file is no text, whatever its name says: archives and safetensors have zeros in their first bytes."""
    try:
        with open_file(path) as file:
            start = file.read(16)
    except OSError:  # who reads it says why
        return False
    return b"\0" in start or start[:1] == _PICKLE


def _refuse_pick(typed: str, pick: Pick) -> None:
    for name in ("method", "budget", "seed"):
        if getattr(pick, name) is not None:
            raise InputError(f"--{name} is for the folder of a run (with a study.json), which {typed} is not")
