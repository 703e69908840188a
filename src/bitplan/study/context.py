"""Setting: the task, the graph and the starting networks that the jobs of one run share."""

from __future__ import annotations

import copy
import itertools
import json
import statistics
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, final

import torch
from torch import nn

import bitplan
from bitplan.adapters.torch import device_of
from bitplan.core.budget import Budget
from bitplan.core.errors import Damaged, FileError, InputError
from bitplan.core.records import ABOUT, TENSORS, Checkpoint, Costs, Graph, Plan
from bitplan.core.registry import EXECUTIONS, MODELS
from bitplan.core.studies import FLOAT, Study
from bitplan.core.trials import Recipe, Result, Trial
from bitplan.core.trust import check_code, check_engine
from bitplan.costs.base import add_limited, price
from bitplan.graph.trace import trace
from bitplan.models.zoo import load_model
from bitplan.quant.calibrate import calibrate_
from bitplan.quant.checkpoint import load_checkpoint, load_weights_, save_checkpoint
from bitplan.quant.convert import plan_of, quantize
from bitplan.quant.sites import is_quantized
from bitplan.selection.budget_constraint import BudgetConstraint
from bitplan.store.engines import Engine, Failure, make_engine
from bitplan.store.files import ASIDE, load
from bitplan.store.jobs import run_jobs
from bitplan.store.record_store import RecordStore
from bitplan.store.run_folder import RunFolder
from bitplan.study.trials import all_starts, starts
from bitplan.tasks.base import Task, choosing_task, load_task
from bitplan.tune.log import LogLine, TrainLog
from bitplan.tune.loop import evaluate_each, finetune_
from bitplan.tune.resume import train_or_restart
from bitplan.weights.opened import check_weights

_KEPT_LINES = 100
CALIBRATION = 512
"""Training samples that set the first input steps."""


@dataclass(frozen=True)
class RunContext:
    """A study and the folder of its run; small, so that it can travel to another process.

    `trust` says that the user allowed the code that the study names.
    """

    study: Study
    run: RunFolder
    trust: bool = False

    def __post_init__(self) -> None:
        self.run.refuse_links()

    @property
    def task(self) -> Task:
        """Return the task, whose data is read at most once per process."""
        check_code(self.study.task, f"the study {self.study.name}", trust=self.trust)
        return _task(self.study.task, json.dumps(self.study.task_options, sort_keys=True))

    @property
    def choosing_task(self) -> Task:
        """Return the task as methods may see it while they choose."""
        return choosing_task(self.task, self.study.choosing.hold_out)

    @property
    def spec(self) -> str | None:
        """Return the model's name in the zoo for checkpoints, if it has one."""
        return self.study.model if self.study.model in MODELS else None

    def network(self, seed: int) -> nn.Module:
        """Return the float network with the random weights of a seed."""
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            return self.bare_network()

    def bare_network(self, *, weightless: bool = False) -> nn.Module:
        """Return the network as its factory makes it; this is the one way to the code that a study may name."""
        self._check_code()
        return load_model(self.study.model, weightless=weightless)[0]

    @property
    def graph(self) -> Graph:
        """Return the graph that the run is about."""
        graph = self.run.graph
        assert graph is not None, "a sweep writes it down before any job starts"
        return graph

    def trace(self) -> Graph:
        """Return the graph of the network on the task's example, under the study's rules."""
        return trace(
            self.bare_network(weightless=True), self.task.example(), rules=self.study.rules, name=self.study.model
        )

    def costs(self, graph: Graph) -> list[Costs]:
        """Return the study's cost, then those that a budget names."""
        own = price(self.study.cost, graph, self.study.choices)
        budgets = [Budget.parse(budget) for budget in self.study.budgets]
        return add_limited([own], budgets, graph, self.study.choices)

    def aim(self, budgets: tuple[str, ...], graph: Graph | None = None) -> BudgetConstraint | None:
        """Return the constraint for a method that chooses within these budgets; None without budgets."""
        if not budgets:
            return None
        traced = graph or self.graph
        return BudgetConstraint.of(traced, self.study.choices, self.costs(traced), budgets)

    def start(self, trial: str) -> nn.Module:
        """Return a copy of the network that a start's trial left."""
        self._check_code()
        return copy.deepcopy(_checkpoint(str(self.run.starts.path(trial)), self.study.model))

    def teacher(self, recipe: Recipe | None, start: str) -> nn.Module | None:
        """Return the float network that this start was made from if the recipe distills, else None."""
        if recipe is None or not recipe.distills:
            return None
        return self.start(_float_starts(self.study.to_json())[start])

    def plan(self, precisions: dict[str, Any]) -> Plan:
        """Return a plan of precisions and links alone, the same for all trials that choose alike."""
        links = tuple(link.layers for link in self.graph.links)
        return Plan(
            model=self.study.model,
            precisions=precisions,
            links=links,
            method="",
            selector="",
            uses=self.graph.uses,
            integers=self.graph.integers,
        )

    def _check_code(self) -> None:
        check_code(self.study.model, f"the study {self.study.name}", trust=self.trust)


def make_study_engine(study: Study, *, trust: bool) -> Engine:
    """Return the engine of a study's jobs; raise if it is not on this machine and not trusted."""
    check_engine(study, f"the study {study.name}", trust=trust)
    return make_engine(study.engine, study.engine_options)


def some_batches(task: Task, batch_size: int, seed: int, samples: int) -> list[Any]:
    """Return the first batches of a shuffled pass over the training split, enough for that many samples."""
    size = min(batch_size, task.size("train"))
    return list(itertools.islice(task.batches("train", size, seed=seed), -(-samples // size)))


def describe_training(
    model: nn.Module, task: Task, lines: Sequence[LogLine], begin: float, *, in_integers: bool
) -> dict[str, Any]:
    """Return the fields of a result for a trained network: score, log, seconds since `begin`, versions."""
    judged = EXECUTIONS.get("integer")(model, task.example()) if in_integers and is_quantized(model) else model
    score, losses = evaluate_each(judged, task)
    return {
        "score": score,
        "losses": losses,
        "metric": task.metric,
        "higher_is_better": task.higher_is_better,
        "log": summarize(lines),
        "seconds": time.perf_counter() - begin,
        "device": str(device_of(model)),
        "versions": versions(),
    }


def summarize(lines: Sequence[LogLine]) -> tuple[dict[str, Any], ...]:
    """Return a training log in at most a hundred lines, each the mean over some steps."""
    width = -(-len(lines) // _KEPT_LINES) if lines else 1
    return tuple(_mean_line(lines[begin : begin + width]) for begin in range(0, len(lines), width))


def versions() -> dict[str, str]:
    """Return the versions of bitplan and torch."""
    return {"bitplan": bitplan.__version__, "torch": str(torch.__version__)}


def _mean_line(lines: Sequence[LogLine]) -> dict[str, Any]:
    scores = [line.score for line in lines if line.score is not None]
    return {
        "step": lines[-1].step,
        "epoch": lines[-1].epoch,
        "loss": statistics.fmean(line.loss for line in lines),
        "score": statistics.fmean(scores) if scores else None,
        "lr": lines[-1].lr,
    }


@lru_cache(maxsize=2)
def _float_starts(study: str) -> dict[str, str]:
    """Return start → its float network; once per process, since it hashes the file of weights."""
    found: dict[str, str] = {}
    for one in all_starts(Study.from_json(study)):
        assert one.floating is not None, "starts() refuses a study that distills without a float network"
        found |= {trial.id: one.floating.id for trial in one.all}
    return found


@lru_cache(maxsize=2)
def _task(name: str, options: str) -> Task:
    return load_task(name, **json.loads(options))


@lru_cache(maxsize=4)
def _checkpoint(path: str, model: str) -> nn.Module:
    return load_checkpoint(path, load_model(model)[0], of=Path(path).name)


# The networks that all trials start from: the float one, and from it the one at the highest choice.


@final
@dataclass(frozen=True)
class MakeStart:
    """Make the network of a start's trial, keep it as a checkpoint of the run, and return its Result."""

    setting: RunContext

    def __call__(self, trial: Trial) -> Result:
        """Make the network, train it if the trial has a recipe, score and keep it."""
        begin = time.perf_counter()
        setting = self.setting
        model, log = train_or_restart(
            lambda model: self._train(model, trial) if trial.recipe else TrainLog((), complete=True),
            lambda: self._make_float(trial.seed) if trial.role == "float" else self._make_high(trial),
            setting.run.running,
            trial.id,
        )
        measured = describe_training(model, setting.task, log.lines, begin, in_integers=setting.study.in_integers)
        self._refuse_another(trial, measured["score"])
        place = setting.run.starts.path(trial.id)
        save_checkpoint(model, place, spec=setting.spec, graph_id=setting.graph.id, of=trial.id)
        plan = plan_of(model).id if is_quantized(model) else FLOAT
        return Result(trial=trial, plan=plan, **measured)

    def _refuse_another(self, trial: Trial, score: float) -> None:
        """Raise InputError if a start is made again and scores differently than its result says.

        Given weights are left out: they are the same wherever they are loaded, and machines may score them differently.
        """
        run = self.setting.run
        before = None if trial.recipe is None else run.trials.read_sound([trial.id])[0].get(trial.id)
        if before is not None and not run.starts.has(trial.id) and score != before.score:
            raise InputError(
                f"{trial.method} was made again, since its network was not kept, and scores {score:.4g}, not "
                f"{before.score:.4g} as before: results of before and from now on would not compare. Go on on a "
                "machine like the one before, or sweep into a new folder"
            )

    def _make_float(self, seed: int) -> nn.Module:
        start = self.setting.study.start
        network = self.setting.network(seed)
        if start.weights is None:
            return network
        if (Path(start.weights) / ABOUT).is_file():  # bitplan's own
            return load_checkpoint(start.weights, network)
        load_weights_(network, start.weights, fresh=start.fresh)
        return network

    def _make_high(self, trial: Trial) -> nn.Module:
        study, setting = self.setting.study, self.setting
        known = starts(study, trial.seed)
        if study.start.checkpoint is not None and trial.id == known.high.id:
            return self._load_checkpoint(study.start.checkpoint)
        floating = known.floating
        assert floating is not None, "read_study wants weights, a float recipe or a checkpoint"
        options = {name: value for name, value in trial.options.items() if name != "rules"}
        highest = Plan.uniform(setting.graph, study.choices[-1])
        model = quantize(setting.start(floating.id), highest, **options)  # type: ignore[arg-type]
        recipe = study.start.recipe or study.recipe
        batches = some_batches(setting.task, recipe.batch_size, trial.seed, CALIBRATION)
        calibrate_(model, batches, forward=setting.task.forward)
        return model

    def _load_checkpoint(self, checkpoint: str) -> nn.Module:
        """Load a given checkpoint; it must follow the graph and the highest choice of this study."""
        model = load_checkpoint(checkpoint, self.setting.network(self.setting.study.start.seed))
        wanted = Plan.uniform(self.setting.graph, self.setting.study.choices[-1]).precisions
        found = plan_of(model).precisions if is_quantized(model) else {}
        for layer, precision in wanted.items():
            if found.get(layer) != precision:
                raise InputError(
                    f"the start {checkpoint} has {layer} at {found.get(layer, 'full precision')}, this study at "
                    f"{precision}: take one of its highest choice, under the same rules"
                )
        return model

    def _train(self, model: nn.Module, trial: Trial) -> TrainLog:
        recipe: Recipe | None = trial.recipe
        assert recipe is not None
        return finetune_(
            model,
            self.setting.task,
            recipe,
            teacher=self.setting.teacher(recipe, trial.id),
            seed=trial.seed,
            folder=self.setting.run.running.path(trial.id),
        )


@final
@dataclass(frozen=True)
class StartStore(RecordStore[Result]):
    """The starts of a run: a result counts only with its network, and both are sound or refused."""

    run: RunFolder = field(kw_only=True)

    @classmethod
    def of(cls, run: RunFolder) -> StartStore:
        """Return the starts of a run."""
        trials = run.trials
        return cls(trials.folder, trials.kind, trials.leases, run=run)

    def has(self, name: str) -> bool:
        """Return True if result and network are there."""
        return super().has(name) and self.run.starts.has(name)

    def ids(self) -> set[str]:
        """Return all starts that are there."""
        return {name for name in super().ids() if self.run.starts.has(name)}

    def read(self, name: str) -> Result:
        """The result of a start, once its network was seen to be as it was written, and its own."""
        result = super().read(name)
        check_network(self.run.starts.path(name), name)
        return result

    def set_aside(self, name: str) -> Path:
        """Keep both under other names: one without the other is of no use."""
        self.run.starts.set_aside(name)
        return super().set_aside(name)


def make_start(setting: RunContext, trial: Trial, engine: Engine | None) -> Result | Failure:
    """Return the result of a start, and make its network unless it is there; refuse another network than before."""
    [(_, outcome)] = run_jobs(MakeStart(setting), [trial], shelf=StartStore.of(setting.run), engine=engine)
    if not isinstance(outcome, Failure):
        setting.run.running.clear(trial.id)
        check_same(setting.run, trial)
    return outcome


def remake_missing_starts(
    setting: RunContext, needed: Collection[str], engine: Engine | None, tell: Callable[[str], None]
) -> None:
    """Make the missing networks of these starts again, as in a run that was restored without them."""
    for trial in find_missing_starts(setting, needed):
        tell(f"{trial.method}: making the network that others start from")
        made = make_start(setting, trial, engine)
        if isinstance(made, Failure):
            raise InputError(made.message)


def find_missing_starts(setting: RunContext, needed: Collection[str]) -> list[Trial]:
    """Return the trials whose networks are missing among these starts and their origins, in the order of making."""
    run = setting.run
    if all(run.starts.has(name) for name in needed):
        return []
    found = [one.all for one in all_starts(setting.study)]
    behind = [trial for own in found if any(trial.id in needed for trial in own) for trial in own]
    lost = {trial.id: trial for trial in behind if trial.role == "float" or trial.id in needed}
    return [trial for trial in lost.values() if not run.starts.has(trial.id)]


def check_network(folder: Path, name: str) -> None:
    """Raise Damaged if a checkpoint of a run is not as it was written, or is another than its folder's name says."""
    for file in (ABOUT, TENSORS):
        if not (folder / file).is_file():
            raise Damaged(f"{folder} has no {file}")
    check_weights(folder, load(folder / ABOUT, Checkpoint, of=name, sealed=True))


def check_same(run: RunFolder, trial: Trial) -> None:
    """Raise InputError if a start was made again and differs from the one that finished trainings began with.

    On the same machine, with the same versions and number of threads, it is the same bit for bit.
    """
    here, place = run.starts.path(trial.id), run.starts.folder
    for old in sorted(place.glob(f"{trial.id}{ASIDE}*")) if run.trained.ids() else ():
        try:
            before = load(old / ABOUT, Checkpoint, of=trial.id, sealed=True).sha256
        except FileError:
            continue  # that was damaged too: nothing is known
        if before != load(here / ABOUT, Checkpoint, of=trial.id, sealed=True).sha256:
            raise InputError(
                f"{here} was damaged and made again, and is not the network that it was: results from before and "
                f"from now on would not compare. Sweep into a new folder, or delete {old} to go on all the same"
            )
