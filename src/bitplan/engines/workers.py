"""Worker processes on this machine, any of which may die without harm to the others."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from types import TracebackType
from typing import Any, Self

from bitplan.core.errors import InputError
from bitplan.core.shown import log_to_terminal
from bitplan.engines.base import attempt

_SAFE_PATH = "PYTHONSAFEPATH"
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS")


class Pool:
    """A number of workers that all do one kind of work; each has its own pipe, so none can block another."""

    def __init__(self, work: Callable[[Any], Any], workers: int, threads: int) -> None:
        try:
            self._work = pickle.dumps(work)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise InputError(
                f"this work cannot be sent to another process ({error}): run it with the local engine's workers = 0"
            ) from None
        self._threads = threads
        self._workers = [self._start() for _ in range(workers)]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        for worker in self._workers:
            worker.stop(at_once=worker.item is not None)

    @property
    def idle(self) -> bool:
        """Whether a worker has nothing to do."""
        return any(worker.item is None for worker in self._workers)

    @property
    def busy(self) -> bool:
        """Whether a worker has something to do."""
        return any(worker.item is not None for worker in self._workers)

    def give(self, index: int, item: Any) -> None:
        """Give an item, by its number, to an idle worker; one that died meanwhile is replaced first."""
        place = next(place for place, worker in enumerate(self._workers) if worker.item is None)
        if not self._workers[place].process.is_alive():
            self._workers[place] = self._start()
        self._workers[place].give(index, item)

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

    def _start(self) -> _Worker:
        return _Worker(self._work, self._threads)


class _Worker:
    """One process, its pipe, and the number of the item it has."""

    def __init__(self, work: bytes, threads: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, other = context.Pipe()
        told = (other, threads, os.environ.get(_SAFE_PATH))
        self.process: SpawnProcess = context.Process(target=_serve, args=told, daemon=True)
        with _safe_path():
            self.process.start()
        other.close()
        self.item: int | None = None
        self._work: bytes | None = work

    def give(self, index: int, item: Any) -> None:
        """Send an item, and before the first one what is to be done with it."""
        self.item = index
        try:
            if self._work is not None:
                self.pipe.send_bytes(self._work)
                self._work = None
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
    """A worker's life: what to do, then item after item, until the other end is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    _put_back(safe_path)
    os.environ.update(dict.fromkeys(_THREAD_VARIABLES, str(threads)))
    log_to_terminal()
    try:
        work = pickle.loads(pipe.recv_bytes())
        if "torch" in sys.modules:
            sys.modules["torch"].set_num_threads(threads)
        while True:
            item = pickle.loads(pipe.recv_bytes())
            pipe.send_bytes(pickle.dumps(attempt(work, item)))
    except (EOFError, ConnectionError):
        return
