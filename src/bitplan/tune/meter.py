"""The line that progress shows while a network is trained."""

from __future__ import annotations

import time

from bitplan.core.progress import Progress
from bitplan.tune.log import LogLine

_PAUSE = 0.1  # seconds between two calls of progress


class Meter:
    """Tells `progress` about steps, not more often than an eye can follow."""

    def __init__(self, progress: Progress | None, total: int, begin: int, batch_size: int) -> None:
        self._progress = progress
        self._total = total
        self._begin = begin
        self._batch_size = batch_size
        self._start = time.perf_counter()
        self._next = 0.0

    def tell(self, line: LogLine) -> None:
        """Loss, score and speed since the start."""
        now = time.perf_counter()
        if self._progress is None or (now < self._next and line.step < self._total):
            return
        self._next = now + _PAUSE
        pace = max(now - self._start, 1e-9) / (line.step - self._begin)
        score = "" if line.score is None else f" · score {line.score:.4g}"
        self._progress(line.step, self._total, f"loss {line.loss:.4g}{score} · {self._batch_size / pace:.4g} samples/s")
