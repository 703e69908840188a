"""clean_: find and remove what no study needs any more from the folder of a run, and what killed processes left."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bitplan.core.studies import Study
from bitplan.store.files import ASIDE, left_behind, remove
from bitplan.store.lease import left_markers, read_lease
from bitplan.store.run_folder import LeaseFile, RunFolder, RunPart
from bitplan.study.trials import all_starts, estimations, made_by, trials, with_controls

Needed = dict[RunPart, set[str]]
"""Part of the run → the ids in it that somebody needs."""


@dataclass(frozen=True)
class Waste:
    """Files and folders that none of the studies needs, and their bytes."""

    paths: tuple[Path, ...]
    bytes: int


def find_waste(folder: str | Path, studies: Iterable[Study]) -> Waste:
    """Everything in a run's folder that none of these studies needs, now or to go on.

    What methods and trainings left on the way is waste once all trials of these studies are done. What killed processes
    were writing always is; that of other machines once it is a day old, if nobody holds a lease.
    """
    run, given = RunFolder(Path(folder)), [with_controls(study) for study in studies]
    held, abandoned = _leases(run)
    needed = _needed(run, given) | _needed_when_done(run, given, held)
    paths = [
        path for part, there in run.parts().items() if part in needed for path in there if _is_waste(path, needed[part])
    ]
    paths += [lease.path for lease in abandoned]
    paths += left_by_killed(run, by_others=not held)
    return Waste(tuple(paths), sum(map(_size, paths)))


def clean_(waste: Waste) -> None:
    """Remove what was found."""
    remove(waste.paths)


def left_by_killed(run: RunFolder, *, by_others: bool = False) -> list[Path]:
    """What processes that are gone were writing in a run, never what one may still write; `by_others`: see there."""
    left = [path for folder in run.folders() for path in left_behind(folder, by_others=by_others)]
    return left + left_markers(run.trials.leases)


def _needed(run: RunFolder, studies: Sequence[Study]) -> Needed:
    """Part of the run → ids that the studies need whatever their state; other parts are not judged here."""
    wanted = {trial.id for study in studies for trial in trials(study)}
    own = [trial for study in studies for trial in made_by(study)]
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


def _needed_when_done(run: RunFolder, studies: Sequence[Study], held: Sequence[LeaseFile]) -> Needed:
    """The same for what lies on the way to a result; nothing is judged as long as a trial may go on from it."""
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


def _leases(run: RunFolder) -> tuple[list[LeaseFile], list[LeaseFile]]:
    """Those that somebody holds, and those whose holder is known to be gone."""
    seen = [(lease, read_lease(lease.path)) for lease in run.leases()]
    held = [lease for lease, sign in seen if sign is not None and not sign.holder.gone]
    return held, [lease for lease, sign in seen if sign is not None and sign.holder.gone]


def _is_waste(path: Path, needed: set[str]) -> bool:
    """Whether nobody needs it; what was set aside is needed until what it was is there again."""
    original = path.with_name(path.name.partition(ASIDE)[0])
    return original.stem not in needed or (path != original and original.exists())


def _size(path: Path) -> int:
    files = [path] if path.is_file() else path.rglob("*")
    return sum(file.stat().st_size for file in files if file.is_file())
