"""A training whose folder may have been damaged since it was killed: it is set aside then, and begun anew."""

from __future__ import annotations

import logging
from collections.abc import Callable

from torch import nn

from bitplan.core.errors import Damaged
from bitplan.core.places import Places
from bitplan.tune.log import TrainLog

_log = logging.getLogger(__name__)
Tuned = tuple[nn.Module, TrainLog]


def begun_anew(
    tune: Callable[[nn.Module], TrainLog], make: Callable[[], nn.Module], running: Places, job: str
) -> Tuned:  # fmt: skip
    """Make a network and train it; where what a killed training left is damaged, it is set aside, and that said."""
    model = make()
    try:
        return model, tune(model)
    except Damaged as error:
        if not running.has(job):
            raise
        _log.warning("%s; it is kept under another name, and the training begins anew", error)
        running.set_aside(job)
    model = make()
    return model, tune(model)
