"""Jobs of methods that run a network: make them, draw their batches, and do those whose outcome is not stored yet."""

from __future__ import annotations

import dataclasses
import hashlib
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NoReturn

from torch import nn

from bitplan.core.errors import InputError, Unfinished, WriteError
from bitplan.core.jobs import Job, Numbers, Outcome
from bitplan.core.precision import Precision
from bitplan.core.records import Graph
from bitplan.core.spend import charge, meter_spend
from bitplan.gains.base import Context
from bitplan.gains.lowering import layers_of
from bitplan.quant.checkpoint import fingerprint
from bitplan.store.engines import Failure
from bitplan.store.jobs import run_jobs
from bitplan.tasks.base import Batch, Task, draw, measuring_split, title_of


@dataclass(frozen=True)
class MeasuredWork:
    """A function that does jobs, with the time and the passes of each job measured in the process that does it."""

    work: Callable[[Job], Numbers]

    def __call__(self, job: Job) -> Outcome:
        """Return the outcome of a job."""
        start = time.perf_counter()
        with meter_spend() as meter:
            numbers = self.work(job)
        seconds = time.perf_counter() - start
        return Outcome(numbers={name: tuple(row) for name, row in numbers.items()}, seconds=seconds, spend=meter.spent)


def do_jobs(
    work: Callable[[Job], Numbers], jobs: Sequence[Job], context: Context, method: str
) -> dict[str, Outcome]:  # fmt: skip
    """Do all jobs on the context's engine and return their outcomes by job id. Stored outcomes are read instead.

    The passes of all jobs are charged, also of those that were done before. If a job fails and outcomes are stored, the
    other jobs are finished before the error is raised.
    """
    by_id = {job.id: job for job in jobs}
    shelf = None if context.shelf is None else context.shelf.holding(Outcome)
    done: dict[str, Outcome] = {}
    failed: list[tuple[Job, Failure]] = []
    for job, outcome in run_jobs(MeasuredWork(work), list(by_id.values()), shelf=shelf, engine=context.engine):
        if isinstance(outcome, Failure):
            failed.append((job, outcome))
            if shelf is None:
                break
        else:
            done[job.id] = outcome
            charge(outcome.spend)
        if context.progress is not None:
            context.progress(len(done) + len(failed), len(by_id), job.words)
    if failed and not done and failed[0][1].fault == "input":  # the data or the network, not this job
        raise InputError(failed[0][1].message)
    if failed:
        _raise_failure(failed, len(by_id), None if shelf is None else str(shelf.folder), method)
    return done


def _raise_failure(failed: Sequence[tuple[Job, Failure]], total: int, folder: str | None, method: str) -> NoReturn:
    """Raise an error about the first failed job. If the disk cannot be written, that is the error."""
    job, failure = failed[0]
    if failure.fault == "store":
        raise WriteError(failure.message)
    many = "" if len(failed) == 1 else f", and {len(failed) - 1} more of {total} jobs"
    then = (
        "nothing was kept, for there is no store"
        if folder is None
        else f"the other outcomes are kept in {folder}, so that only what failed is done again"
    )
    error = Unfinished(f"{method} failed with {job.words} (seed {job.seed}){many}: {failure.error}; {then}")
    error.add_note(failure.traceback)
    raise error


def seconds_of(outcomes: Iterable[Outcome]) -> float:
    """Return the seconds of all outcomes together."""
    return math.fsum(outcome.seconds for outcome in outcomes)


def lowered_jobs(
    work: str, model: nn.Module, graph: Graph, context: Context, every: Sequence[Mapping[str, Precision]],
    samples: int, batch_size: int, **fields: Any,
) -> list[Job]:  # fmt: skip
    """Return a job for each set of lowered groups, all on the same whole batches of at most so many samples."""
    batches, size = batches_within(context.task, samples, batch_size)
    hashes = fingerprint(model)
    first = Job(
        work=work, network=hashes.network, weights=hashes.weights, task=title_of(context.task), seed=context.seed,
        task_options=options_of_task(context.task), batches=batches, batch_size=size, **fields,
    )  # fmt: skip
    return [with_lowered(first, graph, lowered) for lowered in every]


def with_lowered(job: Job, graph: Graph, lowered: Mapping[str, Precision]) -> Job:
    """Return the same job with these groups lowered; the network is not hashed again."""
    return job.model_copy(update={"groups": tuple(lowered), "layers": layers_of(graph, lowered)})


def one_at_a_time(graph: Graph, lowered: Sequence[Precision]) -> list[dict[str, Precision]]:
    """Return each group at each of these choices, in this order."""
    return [{group.name: choice} for group in graph.selectable for choice in lowered]


def members_of(graph: Graph) -> dict[str, tuple[str, ...]]:
    """Return the layers of each selectable group."""
    return {group.name: tuple(layer.name for layer in group.layers) for group in graph.selectable}


def batches_within(task: Task, samples: int, batch_size: int) -> tuple[int, int]:
    """Return how many whole batches there are within so many samples, and their size."""
    available = min(samples, task.size(measuring_split(task)))
    size = min(batch_size, available)
    return available // size, size


def options_of_task(task: Task) -> dict[str, str]:
    """Return a task's options, such as the size of its images, if it is a dataclass."""
    if not dataclasses.is_dataclass(task):
        return {}
    return {field.name: repr(getattr(task, field.name)) for field in dataclasses.fields(task)}


def check_samples(method: str, samples: int, batch_size: int) -> None:
    """Refuse numbers of samples that leave nothing to run on."""
    if samples < 1 or batch_size < 1:
        raise InputError(
            f"{method} needs at least one sample and a batch_size of at least 1, not {samples} and {batch_size}"
        )


@dataclass(frozen=True)
class BatchWork:
    """The base of functions that do jobs on batches. The batches of a job are drawn once per process."""

    model: nn.Module
    task: Task

    def drawn(self, job: Job) -> list[Batch]:
        """Return the batches of a job."""
        key = job.batches, job.batch_size, job.seed
        if key not in self._batches:
            self._batches[key] = draw(
                self.model, self.task, job.batches, job.batch_size, mix_seed(job.seed), measuring_split(self.task)
            )
        return self._batches[key]

    @cached_property
    def _batches(self) -> dict[tuple[int, int, int], list[Batch]]:
        return {}

    def __getstate__(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}


def mix_seed(seed: int) -> int:
    """Return a seed for another order than that of a training with this seed."""
    return int.from_bytes(hashlib.sha256(f"drop {seed}".encode()).digest()[:4], "big") >> 1
