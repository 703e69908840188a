"""What a method that runs a network is going to take, by a batch that is timed: said before anything long begins."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from bitplan.adapters.torch import inference
from bitplan.core.errors import InputError
from bitplan.core.jobs import Dropped
from bitplan.core.spend import uncharged
from bitplan.gains.base import Context
from bitplan.gains.finetuning import Expected
from bitplan.tasks.base import Batch, draw, judged_by

LONG = 60.0
"""Seconds from which on it is said beforehand what a method takes."""


def foreseen(
    jobs: Sequence[Dropped], context: Context, called: str, samples: int, seconds: Callable[[], float]
) -> Expected | None:
    """What those of these jobs take that no store has, by the samples and `seconds()` of one; None where it is little.

    `called` are jobs in words.
    """
    every = {job.id for job in jobs}
    done = every & (set() if context.shelf is None else context.shelf.ids())
    left = len(every) - len(done)
    return known(len(every), len(done), called, left * samples, left * seconds() if left else 0.0)


def known(jobs: int, done: int, called: str, samples: int, seconds: float) -> Expected | None:
    """The same where it is known what all of it takes."""
    return Expected(jobs, done, 0, samples, seconds, called) if seconds > LONG else None


def one_pass(model: nn.Module, context: Context, size: int, look: Callable[[Any, Batch], object]) -> float:
    """The seconds of a batch of so many samples through the network as it is; `look` is what is then done with it.

    The quicker of two, since the first may have things to set up.
    """
    (batch,) = draw(model, context.task, 1, size, None, judged_by(context.task))

    def run() -> None:
        look(context.task.forward(model, batch), batch)

    with inference(model), torch.no_grad(), uncharged():
        return min(timed(run) for _ in range(2))


def timed(run: Callable[[], object]) -> float:
    """The seconds of a call. Bad input is refused at once; what fails else is told where it counts."""
    begun = time.perf_counter()
    try:
        run()
    except InputError:
        raise
    except Exception:
        return 0.0
    return time.perf_counter() - begun
