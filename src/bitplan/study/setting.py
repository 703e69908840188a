"""What the jobs of one run share: its task, its graph, and the networks that trials start from."""

from __future__ import annotations

import copy
import itertools
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

import bitplan
from bitplan.adapters.torch import device_of
from bitplan.core.budget import Budget
from bitplan.core.records import Costs, Graph, Plan
from bitplan.core.registry import MODELS
from bitplan.core.runs import RunFolder
from bitplan.core.studies import Study
from bitplan.core.trials import Recipe
from bitplan.core.trust import check_code, check_engine
from bitplan.costs.base import add_limited, price
from bitplan.engines.base import Engine, make_engine
from bitplan.graph.trace import trace
from bitplan.models.zoo import load_model
from bitplan.quant.checkpoint import load_checkpoint
from bitplan.quant.integer_copy import integer
from bitplan.quant.root import is_quantized
from bitplan.selection.budget_constraint import BudgetConstraint
from bitplan.study.trials import all_starts
from bitplan.tasks.base import Task, load_task
from bitplan.tasks.choosing import choosing_task
from bitplan.tune.log import LogLine
from bitplan.tune.loop import evaluate_each

_KEPT_LINES = 100
CALIBRATION = 512
"""Training samples that set the first input steps."""


@dataclass(frozen=True)
class Setting:
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
        """The task, with its data read at most once per process."""
        check_code(self.study.task, f"the study {self.study.name}", trust=self.trust)
        return _task(self.study.task, json.dumps(self.study.task_options, sort_keys=True))

    @property
    def choosing_task(self) -> Task:
        """The task as methods may see it while they choose."""
        return choosing_task(self.task, self.study.choosing.hold_out)

    @property
    def spec(self) -> str | None:
        """The model's name in the zoo, if it has one: what a checkpoint may say."""
        return self.study.model if self.study.model in MODELS else None

    def network(self, seed: int) -> nn.Module:
        """The float network with the random weights of a seed."""
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            return self.bare_network()

    def bare_network(self, *, weightless: bool = False) -> nn.Module:
        """The network as its factory makes it; the one way to the code that a study may name."""
        self._check_code()
        return load_model(self.study.model, weightless=weightless)[0]

    @property
    def graph(self) -> Graph:
        """The graph that the run is about."""
        graph = self.run.graph
        assert graph is not None, "a sweep writes it down before any job starts"
        return graph

    def trace(self) -> Graph:
        """The network traced on the task's example, under the study's rules."""
        return trace(
            self.bare_network(weightless=True), self.task.example(), rules=self.study.rules, name=self.study.model
        )

    def costs(self, graph: Graph) -> list[Costs]:
        """The study's cost, then those that a budget names."""
        own = price(self.study.cost, graph, self.study.choices)
        budgets = [Budget.parse(budget) for budget in self.study.budgets]
        return add_limited([own], budgets, graph, self.study.choices)

    def aim(self, budgets: tuple[str, ...], graph: Graph | None = None) -> BudgetConstraint | None:
        """What a method that chooses within these budgets must meet; None without budgets."""
        if not budgets:
            return None
        traced = graph or self.graph
        return BudgetConstraint.of(traced, self.study.choices, self.costs(traced), budgets)

    def start(self, trial: str) -> nn.Module:
        """A copy of the network that a start's trial left."""
        self._check_code()
        return copy.deepcopy(_checkpoint(str(self.run.starts.path(trial)), self.study.model))

    def teacher(self, recipe: Recipe | None, start: str) -> nn.Module | None:
        """Where a recipe distills, the float network that the start of this id was made from."""
        if recipe is None or not recipe.distills:
            return None
        return self.start(_float_starts(self.study.to_json())[start])

    def plan(self, precisions: dict[str, Any]) -> Plan:
        """A plan of nothing but precisions and links, the same for all that choose alike."""
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


def engine_of(study: Study, *, trust: bool) -> Engine:
    """Where a study's jobs run; elsewhere than on this machine only where that is trusted."""
    check_engine(study, f"the study {study.name}", trust=trust)
    return make_engine(study.engine, study.engine_options)


def some_batches(task: Task, batch_size: int, seed: int, samples: int) -> list[Any]:
    """The first batches of a shuffled pass over the training split, as many as hold that many samples."""
    size = min(batch_size, task.size("train"))
    return list(itertools.islice(task.batches("train", size, seed=seed), -(-samples // size)))


def scored(
    model: nn.Module, task: Task, lines: Sequence[LogLine], begin: float, *, in_integers: bool
) -> dict[str, Any]:
    """What a result says of a network that was trained: its score, its log, and what it took since `begin`."""
    judged = integer(model, task.example()) if in_integers and is_quantized(model) else model
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
    """A training log in at most a hundred lines, each the mean over some steps."""
    width = -(-len(lines) // _KEPT_LINES) if lines else 1
    return tuple(_mean_line(lines[begin : begin + width]) for begin in range(0, len(lines), width))


def versions() -> dict[str, str]:
    """With what a result was made."""
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
    """Start → the float network that it was made from; once per process, since it hashes the file of weights."""
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
