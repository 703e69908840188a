"""What export and verify work on: a plan, a checkpoint, or a network of a run, trained again where it is not kept."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bitplan.core.errors import FileError, InputError

if TYPE_CHECKING:
    from bitplan.core.runs import RunFolder
    from bitplan.core.trials import Result


@dataclass(frozen=True)
class Pick:
    """Which network of a run, as typed; what is not said is as the run's page recommends."""

    method: str | None = None
    budget: str | None = None
    seed: int | None = None
    threads: int | None = None


@dataclass(frozen=True)
class Opened:
    """A model or a plan to write, and what is known beside it; `task` is the run's."""

    source: Any
    example: Any = None
    spec: str | None = None
    graph: Any = None
    task: Any = None


def is_run(path: Path) -> bool:
    """Tell whether a folder is that of a run."""
    from bitplan.core.runs import RunFolder

    return RunFolder.is_one(path)


def open_source(path: Path, pick: Pick, own: str | None, shape: str | None, *, plan_only: bool = False) -> Opened:
    """Read what was named; of a run and for a recipe only the plan, without training."""
    from bitplan.core.records import Plan
    from bitplan.core.store import load

    if is_run(path):
        return _of_run(path, pick, shape, plan_only)
    for name in ("method", "budget", "seed"):
        if getattr(pick, name) is not None:
            raise InputError(f"--{name} is for the folder of a run (with a study.json), which {path} is not")
    return Opened(load(path, Plan)) if path.suffix == ".json" else _of_checkpoint(path, own, shape)


def _of_checkpoint(folder: Path, own: str | None, shape: str | None) -> Opened:
    """The model of a checkpoint, an example of its input, and its name in the zoo."""
    from bitplan.cli.inputs import example_of, spec_of
    from bitplan.models.zoo import load_model
    from bitplan.quant.checkpoint import load_checkpoint

    if not (folder / "checkpoint.json").is_file():
        raise FileError(
            f"{folder} is neither a plan (.json), nor a checkpoint folder (with a checkpoint.json), nor that of a run "
            "(with a study.json)"
        )
    spec = spec_of(folder)
    base, example = load_model(own) if own else load_model(spec, weightless=True) if spec else (None, None)
    model = load_checkpoint(folder, base if own else None)
    return Opened(model, example_of(shape) if shape else example, spec)


def _of_run(path: Path, pick: Pick, shape: str | None, plan_only: bool) -> Opened:
    from bitplan.core.runs import RunFolder
    from bitplan.reports.choice import choose

    run = RunFolder(path)
    result = choose(run, method=pick.method, budget=pick.budget, seed=pick.seed)
    words = run.study.words(result.trial)
    if plan_only:
        _tell(f"the plan of {words.rpartition(' seed')[0]}")
        if result.plan not in run.plans:
            raise FileError(f"{path} no longer has the plan of {words} ({result.plan}): go on with `bitplan sweep`")
        return Opened(run.plans[result.plan], graph=run.graph)
    from bitplan.cli.inputs import example_of
    from bitplan.study.setting import Setting

    model, setting = _trained(run, result, words, pick.threads), Setting(run.study, run)
    example = example_of(shape) if shape else setting.task.example()
    return Opened(model, example, setting.spec, run.graph, setting.task)


def _trained(run: RunFolder, result: Result, words: str, threads: int | None) -> Any:
    """The network of a result; says what is trained, and where it scores otherwise than recorded."""
    from bitplan.cli.steps import limit_threads, progress_bar
    from bitplan.core.progress import clock
    from bitplan.study.networks import is_kept, trained_network

    if is_kept(run, result):
        _tell(f"{words}, scored {result.score:.4g}")
    else:
        _tell(f"{words}, scored {result.score:.4g}: not kept, so it is trained again; about {clock(result.seconds)}")
        limit_threads(threads or _threads_of(run))
    with progress_bar("training again") as progress:
        found = trained_network(run, result, progress=progress)
    if not found.as_recorded:
        _tell(
            f"warning: this is not the network that the run had: it scores {found.score:.6g}, recorded is "
            f"{found.recorded:.6g}. Another machine, version or number of --threads (1 where the sweep had workers) "
            f"trains otherwise; remove {found.folder} to train it again"
        )
    _tell(f"its checkpoint is {found.folder}")
    return found.model


def _threads_of(run: RunFolder) -> int | None:
    """How many threads each worker of the run had, where its study says that there were workers."""
    options = run.study.engine_options
    return int(str(options.get("threads", 1))) if run.study.engine == "local" and options.get("workers") else None


def _tell(text: str) -> None:
    print(text, file=sys.stderr)
