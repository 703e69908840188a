"""Worker processes on this machine, any of which may die without harm to the others."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import pickle
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any, Self

from bitplan.core.arrivals import packed, unpacked
from bitplan.core.errors import InputError
from bitplan.core.freed import keep_freed_memory
from bitplan.core.shown import log_to_terminal
from bitplan.engines.base import attempt

_SAFE_PATH = "PYTHONSAFEPATH"
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS")


_WORK, _ITEM = b"work", b"item"


class SentWork:
    """What workers are to do, as it is sent to them; the same work has the same `key`."""

    def __init__(self, do: Callable[[Any], Any]) -> None:
        try:
            self.packed = packed(do)
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
                work = unpacked(sent)
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
