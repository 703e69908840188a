"""Jobs are shared by threads: the caller's own tells progress, and after a failure no job begins."""

import threading
import time

import numpy as np
import pytest

from bitplan.core.errors import InputError
from bitplan.gains.counting import pieces
from bitplan.gains.counting.pieces import reduce_pieces
from bitplan.weights.tensors import Tensor

TENSORS = [Tensor(f"w{i}", "F32", (8,), np.full(8, i, np.float32)) for i in range(30)]


@pytest.fixture(params=[1, 2, 5], autouse=True)
def cores(request, monkeypatch):
    monkeypatch.setattr(pieces, "threads", lambda: request.param)


def test_sums_and_progress():
    told, by = [], set()

    def progress(weights):
        told.append(weights)
        by.add(threading.get_ident())

    def work(index, start, stop):
        return TENSORS[index].data[start:stop].sum(keepdims=True)

    sums = reduce_pieces(TENSORS, work, lambda _, total: float(total[0]), piece=4, progress=progress)
    assert sums == [8.0 * index for index in range(30)]
    assert sum(told) == 8 * 30
    assert by == {threading.get_ident()}


@pytest.mark.parametrize("fails", [0, 1])
def test_after_a_failure_no_job_begins(fails):
    begun, failed = [], threading.Event()

    def work(index, start, stop):
        begun.append(index)
        if index == fails:
            failed.set()
            raise InputError("not a number")
        if index > fails:
            failed.wait()
            time.sleep(0.01)
        return np.zeros(1)

    with pytest.raises(InputError, match="not a number"):
        reduce_pieces(TENSORS, work, lambda _, total: total, piece=8)
    assert len(begun) < 30
