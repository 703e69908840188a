"""Jobs whose outcome is a file: what was finished before a kill is not done again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from bitplan.core.record import Record
from bitplan.core.store import load, save
from bitplan.engines.base import Engine, Failure
from bitplan.engines.local import Local

Job = TypeVar("Job", bound=Record)
Outcome = TypeVar("Outcome", bound=Record)


def run_jobs(
    work: Callable[[Job], Outcome],
    jobs: Sequence[Job],
    kind: type[Outcome],
    *,
    folder: Path | None = None,
    engine: Engine | None = None,
) -> Iterator[tuple[Job, Outcome | Failure]]:
    """Do each job once: one whose outcome is in the folder, under the job's id, is read instead.

    Without a folder nothing is kept; without an engine the jobs run here, one after the other.
    """
    waiting = []
    for job in jobs:
        path = None if folder is None else folder / f"{job.id}.json"
        if path is not None and path.is_file():
            yield job, load(path, kind)
        else:
            waiting.append(job)
    if waiting:
        yield from (engine or Local()).run(_Kept(work, folder), waiting)


@dataclass(frozen=True)
class _Kept(Generic[Job, Outcome]):
    """Work whose outcome is written before it is returned, by whoever did it."""

    work: Callable[[Job], Outcome]
    folder: Path | None

    def __call__(self, job: Job) -> Outcome:
        outcome = self.work(job)
        if self.folder is not None:
            save(outcome, self.folder / f"{job.id}.json")
        return outcome
