"""The networks that all trials start from: the float one, and from it the one at the highest choice."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import final

from torch import nn

from bitplan.core.checkpoints import ABOUT, TENSORS, Checkpoint
from bitplan.core.errors import Damaged, FileError, InputError
from bitplan.core.records import Plan
from bitplan.core.runs import RunFolder
from bitplan.core.shelf import Shelf
from bitplan.core.store import ASIDE, load
from bitplan.core.studies import FLOAT
from bitplan.core.trials import Recipe, Result, Trial
from bitplan.engines.base import Engine, Failure
from bitplan.engines.jobs import run_jobs
from bitplan.quant.calibrate import calibrate_
from bitplan.quant.checkpoint import load_checkpoint, save_checkpoint
from bitplan.quant.convert import is_quantized, plan_of, quantize
from bitplan.quant.loading import load_weights_
from bitplan.study.setting import CALIBRATION, Setting, scored, some_batches
from bitplan.study.trials import all_starts, starts
from bitplan.tune.anew import begun_anew
from bitplan.tune.log import TrainLog
from bitplan.tune.loop import finetune_
from bitplan.weights.opened import check_weights


@final
@dataclass(frozen=True)
class MakeStart:
    """Work of an engine: the trial of a start → its Result; the network is kept as a checkpoint of the run."""

    setting: Setting

    def __call__(self, trial: Trial) -> Result:
        """Make, train where the trial has a recipe, keep and score."""
        begin = time.perf_counter()
        setting = self.setting
        model, log = begun_anew(
            lambda model: self._train(model, trial) if trial.recipe else TrainLog((), complete=True),
            lambda: self._float(trial.seed) if trial.role == "float" else self._high(trial),
            setting.run.running,
            trial.id,
        )
        measured = scored(model, setting.task, log.lines, begin, in_integers=setting.study.in_integers)
        self._refuse_another(trial, measured["score"])
        place = setting.run.starts.path(trial.id)
        save_checkpoint(model, place, spec=setting.spec, graph_id=setting.graph.id, of=trial.id)
        plan = plan_of(model).id if is_quantized(model) else FLOAT
        return Result(trial=trial, plan=plan, **measured)

    def _refuse_another(self, trial: Trial, score: float) -> None:
        """Where a result is there without its network, which was not kept, the new network must score the same.

        Weights that were given are the same wherever they are loaded, though not what every machine scores with them.
        """
        run = self.setting.run
        before = None if trial.recipe is None else run.trials.read_sound([trial.id])[0].get(trial.id)
        if before is not None and not run.starts.has(trial.id) and score != before.score:
            raise InputError(
                f"{trial.method} was made again, since its network was not kept, and scores {score:.4g}, not "
                f"{before.score:.4g} as before: results of before and from now on would not compare. Go on on a "
                "machine like the one before, or sweep into a new folder"
            )

    def _float(self, seed: int) -> nn.Module:
        start = self.setting.study.start
        network = self.setting.network(seed)
        if start.weights is None:
            return network
        if (Path(start.weights) / ABOUT).is_file():  # bitplan's own
            return load_checkpoint(start.weights, network)
        load_weights_(network, start.weights, fresh=start.fresh)
        return network

    def _high(self, trial: Trial) -> nn.Module:
        study, setting = self.setting.study, self.setting
        known = starts(study, trial.seed)
        if study.start.checkpoint is not None and trial.id == known.high.id:
            return self._ready(study.start.checkpoint)
        floating = known.floating
        assert floating is not None, "read_study wants weights, a float recipe or a checkpoint"
        options = {name: value for name, value in trial.options.items() if name != "rules"}
        highest = Plan.uniform(setting.graph, study.choices[-1])
        model = quantize(setting.start(floating.id), highest, **options)  # type: ignore[arg-type]
        recipe = study.start.recipe or study.recipe
        batches = some_batches(setting.task, recipe.batch_size, trial.seed, CALIBRATION)
        calibrate_(model, batches, forward=setting.task.forward)
        return model

    def _ready(self, checkpoint: str) -> nn.Module:
        """A checkpoint that somebody trained: it must follow the graph and the highest choice of this study."""
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
class Started(Shelf[Result]):
    """The starts of a run: a result is there only with its network, and both are sound or refused."""

    run: RunFolder = field(kw_only=True)

    @classmethod
    def of(cls, run: RunFolder) -> Started:
        """Those of a run."""
        trials = run.trials
        return cls(trials.folder, trials.kind, trials.leases, run=run)

    def has(self, name: str) -> bool:
        """Whether result and network are there."""
        return super().has(name) and self.run.starts.has(name)

    def ids(self) -> set[str]:
        """All starts that are there."""
        return {name for name in super().ids() if self.run.starts.has(name)}

    def read(self, name: str, *, without: str = "") -> Result:
        """The result of a start, once its network was seen to be as it was written, and its own."""
        result = super().read(name, without=without)
        check_network(self.run.starts.path(name), name)
        return result

    def set_aside(self, name: str) -> Path:
        """Keep both under other names: one without the other is of no use."""
        self.run.starts.set_aside(name)
        return super().set_aside(name)


def make_start(setting: Setting, trial: Trial, engine: Engine | None) -> Result | Failure:
    """The result of a start, whose network is made unless it is there; another one than it was is refused."""
    [(_, outcome)] = run_jobs(MakeStart(setting), [trial], shelf=Started.of(setting.run), engine=engine)
    if not isinstance(outcome, Failure):
        setting.run.running.clear(trial.id)
        check_same(setting.run, trial)
    return outcome


def make_lost(setting: Setting, needed: Collection[str], engine: Engine | None, tell: Callable[[str], None]) -> None:
    """Make the networks of these starts again that are not there, as in a run that was restored without them."""
    for trial in lost_starts(setting, needed):
        tell(f"{trial.method}: making the network that others start from")
        made = make_start(setting, trial, engine)
        if isinstance(made, Failure):
            raise InputError(made.message)


def lost_starts(setting: Setting, needed: Collection[str]) -> list[Trial]:
    """Those of these starts, and what they are made from, whose networks are not there, in the order of making."""
    run = setting.run
    if all(run.starts.has(name) for name in needed):
        return []
    found = [one.all for one in all_starts(setting.study)]
    behind = [trial for own in found if any(trial.id in needed for trial in own) for trial in own]
    lost = {trial.id: trial for trial in behind if trial.role == "float" or trial.id in needed}
    return [trial for trial in lost.values() if not run.starts.has(trial.id)]


def check_network(folder: Path, name: str) -> None:
    """Refuse a checkpoint of a run that is not as it was written, or another one than its folder's name says."""
    for file in (ABOUT, TENSORS):
        if not (folder / file).is_file():
            raise Damaged(f"{folder} has no {file}")
    check_weights(folder, load(folder / ABOUT, Checkpoint, of=name, sealed=True), sealed=True)


def check_same(run: RunFolder, trial: Trial) -> None:
    """Refuse to go on from a start that was made again and is not the network that finished trainings began with.

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
