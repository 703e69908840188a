"""Jobs whose outcome is a file. A finished job is not done again, nor one that another process works on."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from bitplan.core.errors import Damaged
from bitplan.core.record import Record
from bitplan.store.engines import Engine, Failure, Local
from bitplan.store.lease import SilentHolders, hold_lease, read_lease
from bitplan.store.record_store import RecordStore

Job = TypeVar("Job", bound=Record)
Outcome = TypeVar("Outcome", bound=Record)
_log = logging.getLogger(__name__)
_POLL = 0.2  # seconds between two looks at what others do


def run_jobs(
    work: Callable[[Job], Outcome],
    jobs: Sequence[Job],
    *,
    shelf: RecordStore[Outcome] | None = None,
    engine: Engine | None = None,
    remake: bool = True,
) -> Iterator[tuple[Job, Outcome | Failure]]:
    """Do each job once, and yield it with its outcome. If the store has an outcome under the job's id, read it instead.

    A job that another process has leased is waited for. A damaged outcome is set aside and the job done again, or
    failed without `remake`. Without a store nothing is kept. Without an engine the jobs run here, one after the other.
    """
    here = engine or Local()
    if shelf is None:
        yield from here.run(work, jobs)
        return
    kept_work = _Kept(work, shelf, remake)
    silent = SilentHolders()
    waiting = {job.id: job for job in jobs}  # neither done nor known to have failed
    claims = [_Claim(job) for job in waiting.values()]
    while waiting:
        there = shelf.ids()  # one look for all of them
        for name in [name for name in waiting if name in there]:
            sound, _ = shelf.read_sound([name])  # a damaged one is claimed below, and looked at again under its lease
            if sound:
                yield waiting.pop(name), sound[name]
        to_do = [claim for claim in claims if claim.job.id in waiting]
        for claim, outcome in here.run(kept_work, to_do) if to_do else ():
            if outcome is not None:  # else somebody else holds it
                yield waiting.pop(claim.job.id), outcome
        claims = _free(list(waiting.values()), shelf, silent)
        if waiting and not claims:
            time.sleep(_POLL)


@dataclass(frozen=True)
class _Claim(Generic[Job]):
    """A job to do, and the token of a silent holder from whom it may be taken over."""

    job: Job
    stale: str | None = None


@dataclass(frozen=True)
class _Kept(Generic[Job, Outcome]):
    """Work under a lease. The outcome is written before it is returned; None: another process has the lease."""

    work: Callable[[Job], Outcome]
    shelf: RecordStore[Outcome]
    remake: bool

    def __call__(self, claim: _Claim[Job]) -> Outcome | None:
        name = claim.job.id
        with hold_lease(self.shelf.lease(name), stale=claim.stale) as mine:
            if self.shelf.has(name):  # somebody finished it since we looked
                sound, damaged = self.shelf.read_sound([name])
                if sound:
                    return sound[name]
                if damaged and mine:
                    self._set_aside(name, damaged[name])
            if not mine:
                return None
            try:
                outcome = self.work(claim.job)
            except Exception:
                if self._overtaken(name):  # whoever finished it cleared away what this one was writing to
                    return None
                raise
            if self.shelf.has(name):  # a process that took over was quicker, and what is finished stays as it is
                return None
            self.shelf.keep(name, outcome)
            return outcome

    def _overtaken(self, name: str) -> bool:
        """Return True if this process lost its lease meanwhile; a frozen process cannot notice earlier."""
        sign = read_lease(self.shelf.lease(name))
        if sign is not None and sign.holder.here:
            return False
        _log.warning(
            "another process took over %s while this one gave no sign of life (frozen, or cut off from the disk): "
            "what that one finds is taken",
            name,
        )
        return True

    def _set_aside(self, name: str, error: Damaged) -> None:
        """Keep a damaged outcome under another name. Raise the error if it must not be remade."""
        aside = self.shelf.set_aside(name)
        _log.warning("%s; it is kept as %s%s", error, aside.name, ", and made again" if self.remake else "")
        if not self.remake:
            raise error


def _free(waiting: Sequence[Job], shelf: RecordStore[Outcome], silent: SilentHolders) -> list[_Claim[Job]]:
    """Return a claim for each job whose lease is free or whose holder has gone silent."""
    claims = [_Claim(job, silent.stale(shelf.lease(job.id))) for job in waiting]
    return [claim for claim in claims if claim.stale or read_lease(shelf.lease(claim.job.id)) is None]
