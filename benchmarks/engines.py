"""Engines: what one costs per job, how two workers scale, and whether a driver keeps up with thousands on Ray."""

from __future__ import annotations

import tempfile
import time

from benchmarks.rows import Row
from bitplan.core.record import Record
from bitplan.store.engines import Engine, Failure, Local
from bitplan.store.jobs import run_jobs
from bitplan.store.ray_cluster import Cluster
from bitplan.store.record_store import Shelf

MANY = 2_000  # jobs, of which each should take as long as among a hundred


class Turn(Record):
    """A job: the number it has, and how long it computes."""

    number: int
    seconds: float = 0.0


class Turned(Record):
    """Its outcome."""

    number: int


def turn(job: Turn) -> Turned:
    """Compute for a while, on one core."""
    until = time.process_time() + job.seconds
    while time.process_time() < until:
        pass
    return Turned(number=job.number)


def seconds_of(engine: Engine, jobs: int, seconds: float = 0.0) -> float:
    """Seconds from the first outcome to the last, so that starting processes is left out; outcomes are files."""
    with tempfile.TemporaryDirectory() as folder:
        todo = [Turn(number=number, seconds=seconds) for number in range(jobs + 2)]
        found = run_jobs(turn, todo, shelf=Shelf.at(folder).holding(Turned), engine=engine)
        times = []
        for _, outcome in found:
            assert not isinstance(outcome, Failure), outcome.traceback
            times.append(time.perf_counter())
        return times[-1] - times[1]


def rows() -> list[Row]:
    """What an engine costs per job, whether that stays so with many, and what a second worker brings."""
    cluster = Cluster()
    seconds_of(cluster, 10)  # starts Ray
    made = []
    engines: list[tuple[str, Engine, float]] = [("here", Local(), 50), ("2 workers", Local(workers=2), 50)]
    for title, engine, most in (*engines, ("on Ray", cluster, 200)):
        each = 1000 * seconds_of(engine, 300) / 300
        made.append(Row(f"a job that does nothing, {title}", each, unit="ms", target=most))
    few, many = (1000 * seconds_of(Local(), jobs) / jobs for jobs in (100, MANY))
    made.append(Row(f"time per job among {MANY:,}", many, few, "among 100", "ms", 1.2))
    one, two = (seconds_of(Local(workers=workers), 20, 0.5) for workers in (1, 2))
    return [*made, Row("20 jobs of half a second, 2 workers", two, one, "1 worker", target=0.6)]


def main() -> None:
    local, cluster = Local(workers=2), Cluster()
    seconds_of(cluster, 10)  # starts Ray
    for title, engine, jobs in (("here", Local(), 300), ("local, 2 workers", local, 300), ("Ray", cluster, 300)):
        each = seconds_of(engine, jobs) / jobs
        print(f"{title:>18}: {1000 * each:7.2f} ms per job that does nothing (lease, outcome on disk and all)")
    few, many = (seconds_of(Local(), jobs) / jobs for jobs in (100, MANY))
    print(f"      100 → {MANY:,}: {many / few:.2f} × the time per job (1.00 would be constant), here, in one folder")
    one, two = (seconds_of(Local(workers=workers), 20, 0.5) for workers in (1, 2))
    print(f"    1 → 2 workers: {one / two:.2f} × the jobs per hour (linear would be 2.00), jobs of half a second")
    count = 5000
    took = seconds_of(cluster, count)
    rate = count / took
    print(f"{count} jobs on Ray: {rate:.0f} a second: a driver keeps up with jobs of {100 / rate:.2f} s on 100 GPUs")


if __name__ == "__main__":
    main()
