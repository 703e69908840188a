"""Jobs whose outcome is a file: what was finished before a kill is not done again, nor what somebody else does."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from bitplan.core.record import Record
from bitplan.core.store import load, save
from bitplan.engines.base import Engine, Failure
from bitplan.engines.lease import SilentHolders, held
from bitplan.engines.local import Local

Job = TypeVar("Job", bound=Record)
Outcome = TypeVar("Outcome", bound=Record)
_POLL = 0.2


def run_jobs(
    work: Callable[[Job], Outcome],
    jobs: Sequence[Job],
    kind: type[Outcome],
    *,
    folder: Path | None = None,
    engine: Engine | None = None,
) -> Iterator[tuple[Job, Outcome | Failure]]:
    """Do each job once: one whose outcome is in the folder, under the job's id, is read instead.

    A job that another process has leased is waited for. Without a folder nothing is kept; without an engine the jobs
    run here, one after the other.
    """
    here = engine or Local()
    if folder is None:
        yield from here.run(work, jobs)
        return
    kept = _Kept(work, kind, folder)
    todo = [_Claim(job) for job in {job.id: job for job in jobs}.values()]
    elsewhere: list[_Claim[Job]] = []
    watch = SilentHolders()
    while todo or elsewhere:
        done = [claim for claim in (*todo, *elsewhere) if kept.path(claim.job).is_file()]
        yield from ((claim.job, load(kept.path(claim.job), kind)) for claim in done)
        todo, elsewhere = ([claim for claim in claims if claim not in done] for claims in (todo, elsewhere))
        for claim, outcome in here.run(kept, todo) if todo else ():
            if outcome is None:
                elsewhere.append(claim)
            else:
                yield claim.job, outcome
        todo = [_Claim(claim.job, watch.stale(kept.lease(claim.job))) for claim in elsewhere]
        todo = [claim for claim in todo if claim.stale or not kept.lease(claim.job).exists()]
        elsewhere = [claim for claim in elsewhere if claim.job.id not in {free.job.id for free in todo}]
        if elsewhere and not todo:
            time.sleep(_POLL)


@dataclass(frozen=True)
class _Claim(Generic[Job]):
    """A job to do, and the token of a silent holder from whom it may be taken over."""

    job: Job
    stale: str | None = None


@dataclass(frozen=True)
class _Kept(Generic[Job, Outcome]):
    """Work under a lease, whose outcome is written before it is returned, by whoever did it; None: somebody else's."""

    work: Callable[[Job], Outcome]
    kind: type[Outcome]
    folder: Path

    def path(self, job: Job) -> Path:
        """The file of a job's outcome."""
        return self.folder / f"{job.id}.json"

    def lease(self, job: Job) -> Path:
        """The file of who works on a job."""
        return self.folder.parent / "leases" / f"{self.folder.name}-{job.id}"

    def __call__(self, claim: _Claim[Job]) -> Outcome | None:
        path = self.path(claim.job)
        with held(self.lease(claim.job), stale=claim.stale) as mine:
            if path.is_file():  # somebody finished it since we looked
                return load(path, self.kind)
            if not mine:
                return None
            outcome = self.work(claim.job)
            save(outcome, path)
            return outcome
