"""Many independent jobs: what an engine must be, and jobs whose outcome is a file."""

from __future__ import annotations

import hashlib
import logging
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any, Protocol, Self, TypeVar, final

from bitplan.core.errors import Fault, InputError, fault_of
from bitplan.core.escaping import log_to_terminal
from bitplan.core.malloc_tuning import keep_freed_memory
from bitplan.core.registry import ENGINES
from bitplan.core.worker_payload import pack_payload, unpack_payload

# --- Many independent jobs: what an engine must be, and jobs whose outcome is a file.

Item = TypeVar("Item")
Outcome = TypeVar("Outcome")


@dataclass(frozen=True)
class Failure:
    """What went wrong with one item: one line, the traceback, whose fault it is, and what the error itself says."""

    error: str
    traceback: str = ""
    fault: Fault = "code"
    message: str = field(default="", compare=False)


class Engine(Protocol):
    """A frozen dataclass whose fields are its options: where, and how many at once.

    An item that fails gives a `Failure` and does not stop the others. `work` and the items must be picklable for
    engines with other processes: a module-level function, a `functools.partial` of one, or a frozen dataclass with
    `__call__`.
    """

    def run(self, work: Callable[[Item], Outcome], items: Iterable[Item]) -> Iterator[tuple[Item, Outcome | Failure]]:
        """Do the work on every item, giving each outcome as it is ready, in any order."""


def attempt(work: Callable[[Item], Outcome], item: Item) -> Outcome | Failure:
    """Do the work on one item; what it raises becomes a Failure."""
    try:
        return work(item)
    except Exception as error:
        return Failure(f"{type(error).__name__}: {error}", traceback.format_exc(), fault_of(error), str(error))


def make_engine(name: str, options: Mapping[str, Any]) -> Engine:
    """The engine of that name with its options."""
    engine: Engine = ENGINES.make(name, options)
    return engine


# --- This machine: in this process one item after the other, or in several processes of its own.
_log = logging.getLogger(__name__)


@final
@dataclass(frozen=True)
class Local:
    """In this process, in turn; or, with `workers`, in that many others with `threads` threads each.

    An item whose worker dies is given to another, `retries` times at most.
    """

    workers: int = 0
    threads: int = 1
    retries: int = 2

    def __post_init__(self) -> None:
        if self.workers < 0 or self.threads < 1 or self.retries < 0:
            raise InputError(
                f"local engine: workers ({self.workers}) and retries ({self.retries}) must be at least 0, "
                f"threads ({self.threads}) at least 1"
            )

    def run(self, work: Callable[[Item], Outcome], items: Iterable[Item]) -> Iterator[tuple[Item, Outcome | Failure]]:
        """Do the work on every item; what one raises becomes its Failure."""
        if not self.workers:
            for item in items:
                yield item, attempt(work, item)
            return
        yield from self._in_processes(work, list(items))

    def _in_processes(
        self, work: Callable[[Item], Outcome], items: list[Item]
    ) -> Iterator[tuple[Item, Outcome | Failure]]:
        waiting = list(range(len(items)))[::-1]
        lost, packed = [0] * len(items), SentWork(work)
        with _pool(self.threads, min(self.workers, len(items))) as pool:
            while waiting or pool.busy:
                while waiting and pool.idle:
                    index = waiting.pop()
                    pool.give(packed, index, items[index])
                for index, outcome, death in pool.wait():
                    if death is None:
                        yield items[index], outcome
                        continue
                    lost[index] += 1
                    if lost[index] > self.retries:
                        line = f"its worker died ({death}), {lost[index]} times in all"
                        yield items[index], Failure(line, fault="worker")
                    else:
                        _log.warning("a worker died (%s): its item is tried again", death)
                        waiting.append(index)


@contextmanager
def _pool(threads: int, most: int) -> Iterator[Pool]:
    """The pool that is kept, unless somebody uses it at the same time; else one for the block alone."""
    kept = KEPT_POOLS.get()
    pool = None if kept is None else kept.setdefault(threads, Pool(threads))
    if pool is not None and not pool.taken:
        with pool.taken_for(most):
            yield pool
        return
    pool = Pool(threads)
    try:
        with pool.taken_for(most):
            yield pool
    finally:
        pool.close()


# --- Worker processes on this machine, any of which may die without harm to the others.

_SAFE_PATH = "PYTHONSAFEPATH"
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS")


_WORK, _ITEM = b"work", b"item"


class SentWork:
    """What workers are to do, as it is sent to them; the same work has the same `key`."""

    def __init__(self, do: Callable[[Any], Any]) -> None:
        try:
            self.packed = pack_payload(do)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise InputError(
                f"this work cannot be sent to another process ({error}): run it with the local engine's workers = 0"
            ) from None
        self.key = hashlib.sha256(self.packed).hexdigest()


class Pool:
    """Workers that do one kind of work after the other; each has its own pipe, so none can block another.

    They are started when they are needed. One that is given the work that it had before keeps what it has of it.
    """

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._workers: list[_Worker] = []
        self._most = 0
        self.taken = False

    @contextmanager
    def taken_for(self, most: int) -> Iterator[Self]:
        """Use so many workers at most until the block ends; those that are not done then are ended."""
        self.taken, self._most = True, most
        try:
            yield self
        finally:
            self.taken = False
            for worker in self._workers:
                if worker.item is not None:
                    worker.stop(at_once=True)
            self._workers = [worker for worker in self._workers if worker.item is None]

    def close(self) -> None:
        """End all workers."""
        for worker in self._workers:
            worker.stop(at_once=worker.item is not None)
        self._workers.clear()

    @property
    def idle(self) -> bool:
        """Whether one more item can be given."""
        return sum(worker.item is not None for worker in self._workers) < self._most

    @property
    def busy(self) -> bool:
        """Whether a worker has something to do."""
        return any(worker.item is not None for worker in self._workers)

    def give(self, work: SentWork, index: int, item: Any) -> None:
        """Give an item, by its number, to an idle worker; one that died meanwhile is replaced first."""
        idle = [worker for worker in self._workers if worker.item is None]
        for worker in [worker for worker in idle if not worker.process.is_alive()]:
            worker.stop(at_once=True)
            self._workers.remove(worker)
            idle.remove(worker)
        same = [worker for worker in idle if worker.key == work.key]
        if not idle:
            self._workers.append(_Worker(self._threads))
        next(iter([*same, *idle, *self._workers[-1:]])).give(work, index, item)

    def wait(self) -> Iterator[tuple[int, Any, str | None]]:
        """Wait until something happened: numbers of items with their outcome, or with how their worker died."""
        busy = [worker for worker in self._workers if worker.item is not None]
        ready = set(wait([worker.pipe for worker in busy] + [worker.process.sentinel for worker in busy]))
        for worker in busy:
            if worker.pipe not in ready and worker.process.sentinel not in ready:
                continue
            index, worker.item = worker.item, None
            assert index is not None
            try:
                yield index, pickle.loads(worker.pipe.recv_bytes()), None  # from our own worker
            except (EOFError, ConnectionError):
                yield index, None, worker.death()


class _Worker:
    """One process, its pipe, the number of the item it has, and the key of the work that it was given last."""

    def __init__(self, threads: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, other = context.Pipe()
        told = (other, threads, os.environ.get(_SAFE_PATH))
        self.process: SpawnProcess = context.Process(target=_serve, args=told, daemon=True)
        with _safe_path():
            self.process.start()
        other.close()
        self.item: int | None = None
        self.key = ""

    def give(self, work: SentWork, index: int, item: Any) -> None:
        """Send an item, and before it what is to be done with it, where that is not what it did before."""
        self.item = index
        try:
            if self.key != work.key:
                self.pipe.send_bytes(_WORK)
                self.pipe.send_bytes(work.packed)
                self.key = work.key
            self.pipe.send_bytes(_ITEM)
            self.pipe.send_bytes(pickle.dumps(item))
        except ConnectionError:
            pass  # it died: `wait` will find out

    def death(self) -> str:
        """How the process ended."""
        self.process.join()
        code = self.process.exitcode or 0
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"

    def stop(self, *, at_once: bool) -> None:
        """End the process."""
        self.pipe.close()
        if at_once:
            self.process.terminate()
        self.process.join()
        self.process.close()


@contextmanager
def _safe_path() -> Iterator[None]:
    """Have a new Python import nothing from the current folder, which may be anybody's, before it has our own path."""
    before = os.environ.get(_SAFE_PATH)
    os.environ[_SAFE_PATH] = "1"
    try:
        yield
    finally:
        _put_back(before)


def _put_back(before: str | None) -> None:
    os.environ.pop(_SAFE_PATH)
    if before is not None:
        os.environ[_SAFE_PATH] = before


def _serve(pipe: Connection, threads: int, safe_path: str | None) -> None:
    """A worker's life: what to do, and item after item, until the other end is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _put_back(safe_path)
    os.environ.update(dict.fromkeys(_THREAD_VARIABLES, str(threads)))
    keep_freed_memory()
    log_to_terminal()
    work: Any = None
    try:
        while True:
            kind, sent = pipe.recv_bytes(), pipe.recv_bytes()
            if kind == _WORK:
                work = None  # before the next one takes its room
                work = unpack_payload(sent)
                if "torch" in sys.modules:
                    sys.modules["torch"].set_num_threads(threads)
            else:
                pipe.send_bytes(pickle.dumps(attempt(work, pickle.loads(sent))))
            del sent
    except (EOFError, ConnectionError):
        return


def _end_with_parent() -> None:
    """End at once when the parent is gone, in the middle of an item too: nobody would take its outcome."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


# --- Worker processes that stay from one round of jobs to the next.

KEPT_POOLS: ContextVar[dict[int, Pool] | None] = ContextVar("KEPT", default=None)
"""Pools that stay open, by the threads of their workers; None where none is to."""


@contextmanager
def keep_workers() -> Iterator[None]:
    """Let every local engine keep its worker processes until the block ends: what comes in rounds starts them once.

    A worker that gets the same work again still has what it read and made for it.
    """
    if KEPT_POOLS.get() is not None:  # whoever asked first keeps them
        yield
        return
    pools: dict[int, Pool] = {}
    token = KEPT_POOLS.set(pools)
    try:
        yield
    finally:
        KEPT_POOLS.reset(token)
        for pool in pools.values():
            pool.close()
