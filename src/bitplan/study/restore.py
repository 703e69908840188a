"""restore: put what was kept of a run (`bitplan run results`) into a run's folder, so that a study goes on from there.

A study whose folder was lost, or that got another start, budget or seed since, then trains only what is new: estimates
and trainings are found by their own ids. Networks are not among what was kept. Where one is needed to start from, it is
made again, and refused if it does not score as it did (`study/context.py`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from bitplan.core.errors import FileError
from bitplan.core.records import Gains
from bitplan.core.studies import Estimation, Study, Trained
from bitplan.core.trials import Result, Trial
from bitplan.store.record_store import Kept, RecordStore
from bitplan.store.run_folder import RunFolder, title_of_gains
from bitplan.study.scheduling import estimates_for, trained_of, training_for
from bitplan.study.trials import agenda, with_controls


class Restored(NamedTuple):
    """The number of trials, estimates and trainings of the study that were put into its run."""

    trials: int
    estimates: int
    trainings: int


class _Known(NamedTuple):
    """A trial of the study and its kept result."""

    trial: Trial
    kept: Result


def restore(study: Study, run_folder: str | Path, kept: RunFolder) -> Restored:
    """Put all trials of this study that another run, or its file of results, has into the folder."""
    study, run = with_controls(study), RunFolder(Path(run_folder))
    run.refuse_links()
    before = kept.study  # where it is no run, that is said first
    own = {_id_without_start(trial): trial for trial in agenda(study).trials}
    by_id = {_id_without_start(result.trial): result for result in kept.results}
    known = [_Known(trial, by_id[name]) for name, trial in own.items() if name in by_id]
    if kept.graph is None or not known:
        raise FileError(
            f"{kept.path} has no trial of the study {study.name}: its network, task, precisions, recipe or start is "
            "another"
        )
    estimates = dict(_list_estimates(study, kept, before, kept.graph.id, known))
    trainings = {one.training: one for one in _list_trainings(kept, known)}
    _refuse_other_starts(run, kept, known)
    plans = kept.plans
    run.keep_plans(plans[one.kept.plan] for one in known if one.kept.plan in plans)
    _add_missing(run.estimates, estimates)
    _add_missing(run.trained, trainings)
    _add_missing(run.trials, {one.trial.id: one.kept.model_copy(update={"trial": one.trial}) for one in known})
    for one in known:
        run.failed.remove(one.trial.id)
    return Restored(len(known), len(estimates), len(trainings))


def is_finished(run: RunFolder, own: Sequence[Trial], wanted: Sequence[Trial]) -> bool:
    """Return True if a start's network is neither there nor needed: its trials and all that start from it are scored.

    The float network may be another start's as well: it is looked at only where trials have no other.
    """
    networks = [trial for trial in own if trial.role == "start"] or own
    if any(run.starts.has(trial.id) for trial in networks):
        return False
    names = {trial.id for trial in own}
    return names | {trial.id for trial in wanted if trial.start in names} <= run.trials.ids()


def is_needless(run: RunFolder, job: Estimation, trials: Sequence[Trial], scored: Collection[str]) -> bool:
    """Return True if all trials of an estimate are scored, and neither it nor its network was kept whole."""
    done = all(trial.id in scored for trial in trials)
    return done and not run.starts.has(job.start) and not run.estimates.read_sound([job.id])[0]


def _refuse_other_starts(run: RunFolder, kept: RunFolder, known: list[_Known]) -> None:
    """Raise FileError if a trained start scores differently here and there: then it is another network."""
    trained = {one.trial.id: one for one in known if one.trial.role in ("float", "start") and one.trial.recipe}
    for name, here in run.trials.read_sound(trained)[0].items():
        trial, there = trained[name]
        if there.score != here.score:
            raise FileError(
                f"{trial.method} scores {there.score} in {kept.path} and {here.score} in {run.path}: trials begin with "
                "another network there, and would not compare. Sweep into a new folder, or leave one of them out"
            )


def _add_missing(shelf: RecordStore[Kept], records: Mapping[str, Kept]) -> None:
    """Keep the records that are not there; those that are there say more, since kept ones have no logs."""
    there = shelf.ids()
    for name, record in records.items():
        if name not in there:
            shelf.keep(name, record)


def _id_without_start(trial: Trial) -> str:
    return trial.model_copy(update={"start_seed": None}).id


def _list_estimates(
    study: Study, kept: RunFolder, before: Study, graph: str, known: list[_Known]
) -> Iterator[tuple[str, Gains]]:
    """Yield the id and the gains of each estimate of these trials; files of results have those of one start."""
    trials = {one.trial.id: one.kept.trial for one in known}
    for job, served in estimates_for(study, graph, [one.trial for one in known]):
        for trial in served.trials[:1]:
            gains = kept.gains_of(_name_gains(before, trials[trial.id], job))
            if gains is not None:
                yield job.id, gains


def _name_gains(study: Study, trial: Trial, job: Estimation) -> str:
    """Return the run's name for the gains that a trial chose by; those from the first start have no suffix."""
    first = trial.start_seed in (None, *study.start.seeds[:1])
    return title_of_gains(study.title_of(trial), job.budgets, job.seed, start=None if first else trial.start_seed)


def _list_trainings(kept: RunFolder, known: list[_Known]) -> Iterator[Trained]:
    """Yield the outcomes of trainings for ceilings and their finalists, then of trials, which say more."""
    for ceiling in kept.found_ceilings:
        scored = [(plan.training, plan.score) for plan in ceiling.judged]
        scored += [(score.training, score.score) for finalist in ceiling.finalists for score in finalist.scores]
        for training, score in scored:
            better = ceiling.higher_is_better
            yield Trained(training=training, score=score, metric=ceiling.metric, higher_is_better=better)
    plans, study = kept.plans, kept.study
    for _, result in known:
        if not result.training:
            continue
        trial, plan, words = result.trial, plans.get(result.plan), study.words(result.trial)
        if plan is None or trial.recipe is None:
            lacks = "plan" if plan is None else "recipe"
            raise FileError(f"{kept.path} lacks the {lacks} that {words} was trained by: make it again")
        if training_for(trial, trial.recipe, plan.precisions).id != result.training:
            raise FileError(f"{kept.path} says of {words} what is another network's: make it again")
        yield trained_of(result)
