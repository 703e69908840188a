"""trained_network: return the network of a result, kept from the sweep or trained again just as the sweep did."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from torch import nn

from bitplan.core.errors import Damaged, FileError, InputError
from bitplan.core.progress import Progress
from bitplan.core.studies import Training
from bitplan.core.trials import Result
from bitplan.quant.checkpoint import load_checkpoint
from bitplan.store.lease import hold_lease
from bitplan.store.run_folder import RunFolder
from bitplan.study.context import RunContext, remake_missing_starts
from bitplan.study.scheduling import Train, training_for

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainedNetwork:
    """A trained network, its checkpoint folder, its own score and the score that the run recorded."""

    model: nn.Module
    folder: Path
    score: float
    recorded: float

    @property
    def as_recorded(self) -> bool:
        """Return True if the network scores as the run recorded."""
        return self.score == self.recorded


def is_kept(run: RunFolder, result: Result) -> bool:
    """Return True if the network of a result is there, whole and with its score."""
    return bool(result.training) and run.networks.has(result.training) and run.kept.has(result.training)


def trained_network(
    run: RunFolder, result: Result, *, progress: Progress | None = None, trust: bool = False
) -> TrainedNetwork:
    """Return the network of a trained trial; one that is missing or damaged is trained again, then kept.

    On the same machine, with the same versions and number of threads, training again gives the same network; check
    `as_recorded`. `trust` allows the code that the run's study may name.
    """
    setting = RunContext(run.study.model_copy(update={"keep_networks": True}), run, trust)
    job = training_of(run, result)
    try:
        if is_kept(run, result):
            return _load_kept(setting, job, result)
    except Damaged as error:
        _log.warning("%s; it is kept under another name, and the network trained again", error)
        run.networks.set_aside(job.id)
    _train_again(setting, job, progress)
    return _load_kept(setting, job, result)


def _load_kept(setting: RunContext, job: Training, result: Result) -> TrainedNetwork:
    """Return the network in the run's folder, with the score beside it."""
    run = setting.run
    score = run.kept.read(job.id).score
    place = run.networks.path(job.id)
    model = load_checkpoint(place, setting.bare_network(), of=job.id)
    return TrainedNetwork(model, place, score, result.score)


def training_of(run: RunFolder, result: Result) -> Training:
    """Return the training that gave a result, from its plan, its start, its recipe and its seed."""
    words, plan, recipe = run.study.words(result.trial), run.plans.get(result.plan), result.trial.recipe
    if not result.training or recipe is None:
        raise InputError(f"{words} was not trained from a plan: its network is in {run.starts.path(result.trial.id)}")
    if plan is None:
        raise FileError(f"{run.path} no longer has the plan of {words} ({result.plan}): go on with `bitplan sweep`")
    trial = result.trial
    job = training_for(trial, recipe, plan.precisions)
    if job.id != result.training:
        raise FileError(
            f"{words} is of training {result.training}, which its plan and recipe do not make ({job.id}): "
            "the run is of another version of bitplan; sweep it again"
        )
    return job


def _train_again(setting: RunContext, job: Training, progress: Progress | None) -> None:
    """Train the network once more, under the lease that a sweep would take for it."""
    run, tell = setting.run, progress or (lambda *_: None)
    with hold_lease(run.trained.lease(job.id)) as mine:
        if not mine:
            lease = run.trained.lease(job.id)
            raise FileError(
                f"another process trains this network right now: try again later; if none does, delete {lease}"
            )
        remake_missing_starts(setting, {job.start}, None, partial(tell, 0, 1))
        Train(setting, progress)(job)
        run.running.clear(job.id)
