"""One network on the same batches again and again, with a few groups lowered in place each time."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, Generic, TypeVar

import torch
from torch import nn

from bitplan.adapters.torch import device_of, free_memory
from bitplan.core.jobs import Job
from bitplan.core.precision import Precision
from bitplan.forward.operations import tensors_in
from bitplan.gains.jobs import BatchWork
from bitplan.gains.lowering import lower
from bitplan.quant.calibrate import set_steps_
from bitplan.quant.convert import quantizers_of
from bitplan.quant.other_precisions import FreshQuantizers, can_switch, remember_weights_, with_precisions
from bitplan.quant.proof import awaits_proof
from bitplan.quant.quantizers import InputQuantizer
from bitplan.tasks.base import Batch, Task

Seen = TypeVar("Seen")
_SHARE = 16  # one part in so many of the free memory may be taken: several workers may do the same


class FixedCopy:
    """A copy of a quantized network whose weights stay as they are, so that each is quantized once.

    `quantizers` are those of its layers; `fresh` makes quantizers for the weights of a float network.
    """

    def __init__(self, model: nn.Module, prepare: Callable[[nn.Module], nn.Module]) -> None:
        self.network = prepare(lower(model, {}))
        remember_weights_(self.network)
        self.quantizers = quantizers_of(self.network)
        self.fresh = FreshQuantizers(self.network)


class Rerun(Generic[Seen]):
    """A copy of a quantized network whose groups are lowered in place, on some batches.

    `prepare` puts the copy into the mode that it runs in; `see` returns what is wanted of a batch's outputs. Values are
    those of a copy that is lowered by `quantize`, bit for bit.
    """

    def __init__(
        self, model: nn.Module, task: Task, batches: Sequence[Batch], prepare: Callable[[nn.Module], nn.Module],
        see: Callable[[Any, Batch], Seen],
    ) -> None:  # fmt: skip
        self._model, self._task, self._batches = model, task, batches
        self._prepare, self._see = prepare, see
        self._copy = FixedCopy(model, self._proven)
        self._room = free_memory(device_of(model)) / _SHARE
        self._reference: dict[int, Seen] = {}

    @torch.no_grad()
    def pairs(self, layers: Mapping[str, Precision]) -> Iterator[tuple[Seen, Seen]]:
        """Yield what is seen of every batch as the network is, and with these layers at other precisions."""
        with self._lowered(layers) as run:
            for number in range(len(self._batches)):
                yield self._as_it_is(number), run(number)

    @torch.no_grad()
    def lowered(self, layers: Mapping[str, Precision]) -> Iterator[Seen]:
        """Yield what is seen of every batch with these layers at other precisions."""
        with self._lowered(layers) as run:
            for number in range(len(self._batches)):
                yield run(number)

    @contextmanager
    def _lowered(self, layers: Mapping[str, Precision]) -> Iterator[Callable[[int], Seen]]:
        """Yield a function that runs a batch with layers at other precisions."""
        if not can_switch(self._model, layers):
            other = self._calibrated(lower(self._model, layers))
            yield lambda number: self._run(other, number)
            return

        def run(number: int) -> Seen:
            with with_precisions(self._copy.network, self._copy.quantizers, layers, self._copy.fresh):
                return self._run(self._copy.network, number)

        yield run

    def _proven(self, copy: nn.Module) -> nn.Module:
        """Return the prepared copy. Its plan is proven now: a proof copies the network, which is not possible later."""
        network = self._prepare(copy)
        if awaits_proof(network):
            with torch.no_grad():
                self._run(network, 0)
        return network

    def _calibrated(self, lowered: nn.Module) -> nn.Module:
        """Return a lowered copy, ready to run: inputs that it alone quantizes get their steps from the batches."""
        fresh = [one for one in lowered.modules() if isinstance(one, InputQuantizer) and one.range is None]
        if fresh:
            set_steps_(fresh, lowered, self._batches, self._task.forward)
        return self._prepare(lowered)

    def _as_it_is(self, number: int) -> Seen:
        """Return what is seen of a batch as the network is; kept while there is room."""
        if number in self._reference:
            return self._reference[number]
        seen = self._run(self._copy.network, number)
        self._room -= sum(tensor.nbytes for tensor in tensors_in(seen))
        if self._room >= 0:
            self._reference[number] = seen
        return seen

    def _run(self, network: nn.Module, number: int) -> Seen:
        batch = self._batches[number]
        return self._see(self._task.forward(network, batch), batch)


@dataclass(frozen=True)
class RerunWork(BatchWork, ABC, Generic[Seen]):
    """The base of functions that lower some groups and run; the copy in which they do is made once per process."""

    @abstractmethod
    def prepare(self, network: nn.Module, batch_size: int) -> nn.Module:
        """Put a copy of the network into the mode that it is to run in."""

    @abstractmethod
    def see(self, outputs: Any, batch: Batch) -> Seen:
        """Return what is wanted of the outputs of a batch."""

    def rerun(self, job: Job) -> Rerun[Seen]:
        """Return the network on the batches of a job. That of other batches, with all that it keeps, is let go."""
        key = job.batches, job.batch_size, job.seed
        if key not in self._reruns:
            self._reruns.clear()
            self._batches.clear()
            apart = replace(self)  # does not hold what is made here, so that no cycle keeps it alive
            prepare = partial(apart.prepare, batch_size=job.batch_size)
            self._reruns[key] = Rerun(self.model, self.task, self.drawn(job), prepare, apart.see)
        return self._reruns[key]

    @cached_property
    def _reruns(self) -> dict[tuple[int, int, int], Rerun[Seen]]:
        return {}
