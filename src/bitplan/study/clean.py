"""clean_: find and remove the files of a run that no study needs any more, and those that killed processes left."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bitplan.core.studies import Study
from bitplan.store.files import ASIDE, list_left_behind, remove_paths
from bitplan.store.lease import list_left_markers, read_lease
from bitplan.store.run_folder import LeaseFile, RunFolder, RunPart
from bitplan.study.trials import all_starts, estimations, trials, trials_of_starts, with_controls

Needed = dict[RunPart, set[str]]
"""Part of the run → the ids in it that somebody needs."""


@dataclass(frozen=True)
class Waste:
    """Files and folders that none of the studies needs, and their bytes."""

    paths: tuple[Path, ...]
    bytes: int


def find_waste(folder: str | Path, studies: Iterable[Study]) -> Waste:
    """Return everything in a run's folder that none of these studies needs, now or to go on.

    Files on the way to a result are waste once all trials of these studies are done. Files that a killed process was
    writing always are; those of other machines are once they are a day old, if nobody holds a lease.
    """
    run, given = RunFolder(Path(folder)), [with_controls(study) for study in studies]
    held, abandoned = _sort_leases(run)
    needed = _find_needed(run, given) | _find_needed_later(run, given, held)
    paths = [
        path for part, there in run.parts().items() if part in needed for path in there if _is_waste(path, needed[part])
    ]
    paths += [lease.path for lease in abandoned]
    paths += left_by_killed(run, by_others=not held)
    return Waste(tuple(paths), sum(map(_count_bytes, paths)))


def clean_(waste: Waste) -> None:
    """Remove the waste."""
    remove_paths(waste.paths)


def left_by_killed(run: RunFolder, *, by_others: bool = False) -> list[Path]:
    """Return the files that dead processes were writing; with `by_others`, old ones of other machines too."""
    left = [path for folder in run.folders() for path in list_left_behind(folder, by_others=by_others)]
    return left + list_left_markers(run.trials.leases)


def _find_needed(run: RunFolder, studies: Sequence[Study]) -> Needed:
    """Return the ids that the studies need in each part of the run, whatever their state; other parts are left out."""
    wanted = {trial.id for study in studies for trial in trials(study)}
    own = [trial for study in studies for trial in trials_of_starts(study)]
    needed = {
        RunPart.TRIALS: wanted,
        RunPart.FAILURES: wanted,
        RunPart.STARTS: {trial.id for trial in own},
    }
    graph = run.graph
    if graph is not None:
        needed[RunPart.ESTIMATES] = {
            job.id
            for study in studies
            for first in all_starts(study)
            for method in study.methods
            for job in estimations(study, graph.id, method, first)
        }
    return needed


def _find_needed_later(run: RunFolder, studies: Sequence[Study], held: Sequence[LeaseFile]) -> Needed:
    """Return the needed ids of the parts on the way to a result; nothing while a trial may go on from them."""
    wanted = {trial.id for study in studies for trial in trials(study)}
    if not wanted <= run.trials.ids():
        return {}
    results = [run.trials.read(name) for name in sorted(wanted)]
    trainings = {result.training for result in results}
    for found in run.ceilings.read_all().values():
        trainings |= {one.training for one in found.judged}
        trainings |= {score.training for one in found.finalists for score in one.scores}
    return {
        RunPart.PLANS: {result.plan for result in results},
        RunPart.TRAINED: trainings,
        RunPart.NETWORKS: trainings,
        RunPart.JOBS: set(),
        RunPart.RUNNING: {lease.job for lease in held},  # an export may be training a network again
    }


def _sort_leases(run: RunFolder) -> tuple[list[LeaseFile], list[LeaseFile]]:
    """Return the leases that somebody holds, and those whose holder is known to be gone."""
    seen = [(lease, read_lease(lease.path)) for lease in run.leases()]
    held = [lease for lease, sign in seen if sign is not None and not sign.holder.gone]
    return held, [lease for lease, sign in seen if sign is not None and sign.holder.gone]


def _is_waste(path: Path, needed: set[str]) -> bool:
    """Return True if nobody needs a path; a file set aside is needed until its original is there again."""
    original = path.with_name(path.name.partition(ASIDE)[0])
    return original.stem not in needed or (path != original and original.exists())


def _count_bytes(path: Path) -> int:
    files = [path] if path.is_file() else path.rglob("*")
    return sum(file.stat().st_size for file in files if file.is_file())
