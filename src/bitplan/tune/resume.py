"""The folder of a training: its owner, its log, and the checkpoint from which a killed run goes on.

run.json              everything that the weights depend on; a run that differs is refused
log.jsonl             one line per step
resume.safetensors    weights and optimizer state as tensors, the rest as JSON in the header; no pickle
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bitplan.core.errors import Damaged, FileError
from bitplan.core.parsing import explain_failures, first_line, parse_json
from bitplan.core.trials import Recipe, Run
from bitplan.quant.checkpoint import fingerprint, hash_of_weights, put_state_, unique_state
from bitplan.store.files import atomic_file, clear_left, load, save
from bitplan.store.record_store import FolderStore
from bitplan.tasks.base import Task, title_of
from bitplan.tune.log import LOG, THEN, TrainLog, hash_of_lines, read_log
from bitplan.tune.validation import Judge, Look
from bitplan.weights.torch_tensors import hash_of_tensors, read_safetensors, write_tensors

SAVE_SECONDS = 30.0  # the least time between two checkpoints
SAVE_SHARE = 0.05  # the most of the time that goes into writing them

_RUN, _STATE = "run.json", "resume.safetensors"


@dataclass(frozen=True)
class Mark:
    """The place of a checkpoint: after how many steps and seconds."""

    step: int = 0
    seconds: float = 0.0


class TrainingFolder:
    """The files of one run."""

    def __init__(self, path: str | Path, run: Run, *, main: bool = True) -> None:
        """Take over the folder if it is new or this run's; only the main process writes."""
        self.path = Path(path)
        self.log = self.path / LOG
        self._state = self.path / _STATE
        self._run = run
        self._claim(main)
        self._saved = time.perf_counter()
        self._cost = 0.0

    def _claim(self, main: bool) -> None:
        if main:
            clear_left(self.path)
        if (self.path / _RUN).exists():
            _refuse_other(self.path, load(self.path / _RUN, Run, sealed=True), self._run)
        elif self._state.exists() or self.log.exists():
            raise Damaged(f"{self.path} has a checkpoint or a log but no {_RUN}: choose another folder")
        elif main:
            save(self._run, self.path / _RUN)

    def due(self) -> bool:
        """Return True if it is time for a checkpoint."""
        return time.perf_counter() - self._saved >= max(SAVE_SECONDS, self._cost / SAVE_SHARE)

    def save(self, model: nn.Module, optimizer: torch.optim.Optimizer, point: Mark, judge: Judge) -> None:
        """Write a checkpoint, whole or not at all; the one before it stays until then."""
        start = time.perf_counter()
        tensors, scalars = _optimizer_state(optimizer)
        tensors |= {f"model/{name}": value for name, value in unique_state(model)[0].items()}
        tensors |= {f"best/{name}": value for name, value in judge.best.items()}
        stored = {name: tensor.detach().to("cpu").contiguous() for name, tensor in tensors.items()}
        about = {
            "run": self._run.id,
            "step": point.step,
            "seconds": point.seconds,
            "optimizer": scalars,
            "looks": [[look.step, *look.scores] for look in judge.looks],
            "tensors": hash_of_tensors(dict(sorted(stored.items()))),
            "log": hash_of_lines(self.log, point.step),
        }
        about["checksum"] = _checksum(about)
        _write(stored, {"bitplan": json.dumps(about)}, self._state)
        self._saved = time.perf_counter()
        self._cost = self._saved - start

    def restore_(self, model: nn.Module, optimizer: torch.optim.Optimizer, judge: Judge) -> Mark:
        """Put model, optimizer and judge where the checkpoint was taken; without one, leave them."""
        if not self._state.exists():
            return Mark()
        about, tensors = _read(self._state)
        _check_belonging(self.path, about, self._run)
        _check_unchanged(self.path, about, tensors)
        with explain_failures(self._state, "a checkpoint of this run", f"delete {self.path} to begin anew"):
            own, tied = unique_state(model)
            weights = {name: tensors[f"model/{name}"] for name in own}
            put_state_(model, weights | {name: weights[first] for name, first in tied.items()})
            _restore_optimizer_(optimizer, tensors, about["optimizer"])
            judge.best = {name: tensors[f"best/{name}"] for name in own if f"best/{name}" in tensors}
            judge.looks = [Look(step, tuple(scores)) for step, *scores in about.get("looks", ())]
            return Mark(int(about["step"]), float(about["seconds"]))


def check_training(folder: Path) -> None:
    """Refuse what a killed training left, in any stage, where it is not as it was written."""
    run = load(folder / _RUN, Run, sealed=True)
    if (folder / _STATE).exists():
        about, tensors = _read(folder / _STATE)
        _check_belonging(folder, about, run)
        _check_unchanged(folder, about, tensors)
    if (folder / THEN).is_dir():
        check_training(folder / THEN)


def _check_belonging(folder: Path, about: dict[str, Any], run: Run) -> None:
    if about.get("run") != run.id:
        raise Damaged(f"{folder / _STATE} belongs to another run than {_RUN} beside it: choose another folder")


def _check_unchanged(folder: Path, about: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Refuse tensors or a log that are not as they were written."""
    advice = f"is damaged: delete {folder} to begin anew"
    sound = about.get("checksum") == _checksum(about)
    if not sound or about.get("tensors") != hash_of_tensors(dict(sorted(tensors.items()))):
        raise Damaged(f"{folder / _STATE} {advice}")
    with explain_failures(folder / _STATE, "a checkpoint of a run", f"delete {folder} to begin anew"):
        step = int(about["step"])
    # One who was frozen while another went on with a log of its own lacks what the other has not written yet.
    short = len(read_log(folder / LOG, up_to=step)) < step
    if short or about.get("log") != hash_of_lines(folder / LOG, step):
        raise Damaged(f"{folder / LOG} {advice}")


def _checksum(about: dict[str, Any]) -> str:
    """Return a hash of everything else in the header."""
    told = {key: value for key, value in about.items() if key != "checksum"}
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:32]


def describe_run(model: nn.Module, task: Task, recipe: Recipe, teacher: nn.Module | None, seed: int) -> Run:
    """Return everything that the weights at the end depend on; call it before training."""
    own = fingerprint(model)
    return Run(
        recipe=recipe,
        seed=seed,
        task=title_of(task),
        network=own.network,
        weights=own.weights,
        teacher=None if teacher is None else hash_of_weights(teacher),
    )


def _refuse_other(path: Path, there: Run, here: Run) -> None:
    what = {
        "recipe": "recipe",
        "seed": "seed",
        "task": "task",
        "network": "model (its layers or its plan)",
        "weights": "model (its first weights)",
        "teacher": "teacher",
        "processes": "number of processes",
    }
    for field, words in what.items():
        old, new = getattr(there, field), getattr(here, field)
        if old == new:
            continue
        if isinstance(old, Recipe):
            field = next(name for name in Recipe.model_fields if getattr(old, name) != getattr(new, name))
            old, new = f"{field} = {getattr(old, field)}", f"{field} = {getattr(new, field)}"
        raise FileError(f"{path} belongs to a run with another {words} ({old}, not {new}): choose another folder")


def _parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _optimizer_state(optimizer: torch.optim.Optimizer) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the state of an optimizer as tensors and as scalars; options of groups come from the recipe instead."""
    remembered = {
        f"state/{index}/{key}": value
        for index, parameter in enumerate(_parameters(optimizer))
        for key, value in optimizer.state.get(parameter, {}).items()
    }
    tensors = {name: value for name, value in remembered.items() if isinstance(value, Tensor)}
    scalars = {name: value for name, value in remembered.items() if not isinstance(value, Tensor)}
    for index, group in enumerate(optimizer.param_groups):  # timm's LAMB counts its steps there
        tensors |= {f"group/{index}/{key}": value for key, value in group.items() if isinstance(value, Tensor)}
    return tensors, scalars


def _restore_optimizer_(optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor], scalars: dict[str, Any]) -> None:
    parameters = _parameters(optimizer)
    for name, value in (tensors | scalars).items():
        kind, index, key = name.split("/", 2) if not name.startswith(("model/", "best/")) else ("model", "0", "")
        if kind == "group":
            optimizer.param_groups[int(index)][key] = value
        elif kind == "state":
            parameter = parameters[int(index)]
            # A memory layout other than the parameter's would sum norms in another order.
            like = isinstance(value, Tensor) and key != "step" and value.shape == parameter.shape
            optimizer.state[parameter][key] = torch.empty_like(parameter).copy_(value) if like else value


def _write(tensors: dict[str, Tensor], header: dict[str, str], path: Path) -> None:
    with atomic_file(path) as temporary:
        write_tensors(tensors, temporary, header)


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the JSON of the header, and the tensors."""
    try:
        tensors, texts = read_safetensors(path)
        return dict(parse_json(texts["bitplan"])), tensors
    except (FileError, KeyError, TypeError, ValueError) as error:  # of dict: it is no object
        line = first_line(error)
        raise Damaged(f"{path} is no checkpoint of a run ({line}): delete {path.parent} to begin anew") from None


_log = logging.getLogger(__name__)
Tuned = tuple[nn.Module, TrainLog]


def train_or_restart(
    tune: Callable[[nn.Module], TrainLog], make: Callable[[], nn.Module], running: FolderStore, job: str
) -> Tuned:  # fmt: skip
    """Make a network and train it; if files of a killed training are damaged, set them aside, warn and start again."""
    model = make()
    try:
        return model, tune(model)
    except Damaged as error:
        if not running.has(job):
            raise
        _log.warning("%s; it is kept under another name, and the training begins anew", error)
        running.set_aside(job)
    model = make()
    return model, tune(model)
