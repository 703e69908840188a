"""One network on the same batches again and again, a few groups lowered each time: what has not changed is kept."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import cached_property, partial
from typing import Any, Generic, TypeVar

import torch
from torch import nn

from bitplan.adapters.torch import device_of, free_memory
from bitplan.core.jobs import Dropped
from bitplan.core.precision import Precision
from bitplan.forward.operations import tensors_in
from bitplan.forward.prefix import Prefix, Recording
from bitplan.gains.lowering import lower
from bitplan.quant.calibrate import set_steps_
from bitplan.quant.convert import quantizers_of
from bitplan.quant.proof import awaits_proof
from bitplan.quant.quantizers import InputQuantizer
from bitplan.quant.switching import Fresh, can_switch, remember_weights_, switched
from bitplan.tasks.base import Batch, Task
from bitplan.tasks.choosing import judged_by
from bitplan.tasks.measured import draw

Seen = TypeVar("Seen")
_SHARE = 16  # of the memory that is free, one part in so many may be taken: several workers may do the same


class Rerun(Generic[Seen]):
    """A copy of a quantized network whose groups are lowered in place (docs/decisions/0040).

    `ready` puts the copy into the mode that it is to run in, `see` says what is wanted of a batch's outputs. Values are
    those of a copy that is lowered by `quantize`, bit for bit: every weight is quantized once, each batch runs once as
    it is, and what lies before the first lowered layer is taken from there, as far as a part of the memory holds it.
    """

    def __init__(
        self, model: nn.Module, task: Task, batches: Sequence[Batch], ready: Callable[[nn.Module], nn.Module],
        see: Callable[[Any, Batch], Seen],
    ) -> None:  # fmt: skip
        self._model, self._task, self._batches = model, task, batches
        self._ready, self._see = ready, see
        self._network = ready(lower(model, {}))
        if awaits_proof(self._network):  # by a copy, as long as the network is one that can be copied
            with torch.no_grad():
                self._run(self._network, 0)
        remember_weights_(self._network)
        self._found = quantizers_of(self._network)
        watched = {id(one): one for found in self._found.values() for one in (found.weight, *found.inputs) if one}
        self._prefix = Prefix(self._network, watched.values())
        self._fresh = Fresh(self._network)
        self._room = free_memory(device_of(model)) / _SHARE
        self._known: dict[int, tuple[Seen, Recording]] = {}
        self._around: tuple[Mapping[str, Precision], dict[int, Recording]] = {}, {}

    @torch.no_grad()
    def pairs(
        self, layers: Mapping[str, Precision], around: Mapping[str, Precision] | None = None
    ) -> Iterator[tuple[Seen, Seen]]:
        """What is seen of every batch as it is, and with these layers at other precisions.

        `around` are the precisions of many layers from which these differ in a few: the part before those is then
        taken from a pass with them.
        """
        with self._lowered(layers) as rerun:
            for number in range(len(self._batches)):
                before, recording = self._recorded(number)
                if around and can_switch(self._model, {**around, **layers}):
                    yield before, self._rerun_around(number, layers, around)
                else:
                    yield before, rerun(number, recording)

    def _rerun_around(self, number: int, layers: Mapping[str, Precision], around: Mapping[str, Precision]) -> Seen:
        """One batch, with what comes before the first difference from other lowered layers taken from there."""
        if self._around[0] != around:
            self._around = around, {}
        run, known = (lambda: self._run(self._network, number)), self._around[1]
        if number not in known:
            left = max(0.0, self._room - sum(recording.bytes for recording in known.values()))
            with switched(self._network, self._found, around, self._fresh):
                _, known[number] = self._prefix.record(run, left)
        moved = [name for name in {**around, **layers} if layers.get(name) != around.get(name)]
        changed = [one for name in moved for one in (self._found[name].weight, *self._found[name].inputs) if one]
        with switched(self._network, self._found, layers, self._fresh):
            return self._prefix.rerun(known[number], changed, run)

    @torch.no_grad()
    def lowered(self, layers: Mapping[str, Precision], *, record: bool = True) -> Iterator[Seen]:
        """What is seen of every batch with these layers at other precisions.

        `record` says to run each batch as it is first, where there is room: for a plan that lowers most layers it would
        not be worth it.
        """
        with self._lowered(layers) as rerun:
            for number in range(len(self._batches)):
                known = number in self._known or (record and self._room > 0)
                if known and not layers:
                    yield self._recorded(number)[0]
                else:
                    yield rerun(number, self._recorded(number)[1] if known else Recording())

    @contextmanager
    def _lowered(self, layers: Mapping[str, Precision]) -> Iterator[Callable[[int, Recording], Seen]]:
        """A function that runs a batch of which there is a recording, with layers at other precisions."""
        if not can_switch(self._model, layers):
            other = self._calibrated(lower(self._model, layers))
            yield lambda number, _: self._run(other, number)
            return

        def rerun(number: int, recording: Recording) -> Seen:
            with switched(self._network, self._found, layers, self._fresh) as changed:
                return self._prefix.rerun(recording, changed, lambda: self._run(self._network, number))

        yield rerun

    def _calibrated(self, lowered: nn.Module) -> nn.Module:
        """Return a lowered copy, ready to run: inputs that it alone quantizes get their steps from the batches."""
        fresh = [one for one in lowered.modules() if isinstance(one, InputQuantizer) and one.range is None]
        if fresh:
            set_steps_(fresh, lowered, self._batches, self._task.forward)
        return self._ready(lowered)

    def _recorded(self, number: int) -> tuple[Seen, Recording]:
        """A batch as it is; kept as long as there is room."""
        if number in self._known:
            return self._known[number]
        seen, recording = self._prefix.record(lambda: self._run(self._network, number), self._room)
        left = self._room - recording.bytes - sum(tensor.nbytes for tensor in tensors_in(seen))
        if left >= 0:
            self._known[number] = seen, recording
        self._room = 0 if recording.full else max(0, left)
        return seen, recording

    def _run(self, network: nn.Module, number: int) -> Seen:
        batch = self._batches[number]
        return self._see(self._task.forward(network, batch), batch)


@dataclass(frozen=True)
class Draws:
    """The work of jobs that run a network on batches, which are drawn once per process."""

    model: nn.Module
    task: Task

    def drawn(self, job: Dropped) -> list[Batch]:
        """The batches that a job asks for."""
        key = job.batches, job.batch_size, job.seed
        if key not in self._batches:
            self._batches[key] = draw(
                self.model, self.task, job.batches, job.batch_size, mixed(job.seed), judged_by(self.task)
            )
        return self._batches[key]

    @cached_property
    def _batches(self) -> dict[tuple[int, int, int], list[Batch]]:
        return {}

    def __getstate__(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self)}


@dataclass(frozen=True)
class Reruns(Draws, ABC, Generic[Seen]):
    """The work of jobs that lower some groups first; the copy of which they are lowered is made once per process."""

    @abstractmethod
    def ready(self, network: nn.Module, batch_size: int) -> nn.Module:
        """Put a copy of the network into the mode that it is to run in."""

    @abstractmethod
    def see(self, outputs: Any, batch: Batch) -> Seen:
        """What is wanted of the outputs of a batch."""

    def rerun(self, job: Dropped) -> Rerun[Seen]:
        """The network on the batches that a job asks for; one on other batches, with all that it keeps, is given up."""
        key = job.batches, job.batch_size, job.seed
        if key not in self._made:
            self._made.clear()
            self._batches.clear()
            apart = replace(self)  # which has no part in what is made here: with this work all that it keeps is let go
            ready = partial(apart.ready, batch_size=job.batch_size)
            self._made[key] = Rerun(self.model, self.task, self.drawn(job), ready, apart.see)
        return self._made[key]

    @cached_property
    def _made(self) -> dict[tuple[int, int, int], Rerun[Seen]]:
        return {}


def mixed(seed: int) -> int:
    """Another order than that of a training with the same seed."""
    return int.from_bytes(hashlib.sha256(f"drop {seed}".encode()).digest()[:4], "big") >> 1
