"""One network on the same batches again and again, a few groups lowered each time: what has not changed is kept."""

from __future__ import annotations

import hashlib
import time
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, partial, wraps
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._pytree import tree_flatten, tree_unflatten

from bitplan.adapters.torch import device_of, free_memory
from bitplan.core.jobs import Dropped
from bitplan.core.precision import Precision
from bitplan.forward.operations import tensors_in
from bitplan.gains.lowering import lower
from bitplan.quant.calibrate import set_steps_
from bitplan.quant.convert import quantizers_of
from bitplan.quant.other_precisions import Fresh, can_switch, remember_weights_, switched
from bitplan.quant.proof import awaits_proof
from bitplan.quant.quantizers import InputQuantizer
from bitplan.tasks.base import Batch, Task, draw, judged_by

Seen = TypeVar("Seen")
_SHARE = 16  # of the memory that is free, one part in so many may be taken: several workers may do the same


class Rerun(Generic[Seen]):
    """A copy of a quantized network whose groups are lowered in place.

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


# --- Run a network again without what has not changed: the part before the first changed module is remembered.

Result = TypeVar("Result")
Call = tuple[int, int]
"""A module, by its number, and which call of it in the pass."""

_WORTH = 0.01  # of the time of a pass: what takes less is run again rather than kept
_DEPTH = 3  # containers and objects inside each other that are looked into
_FIXED = (bool, int, float, str, bytes, type(None), type, FunctionType, BuiltinFunctionType, MethodType, nn.Module)
_PLAIN = (Tensor, bool, int, float, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)


@dataclass(frozen=True)
class _Given:
    """What a call gave out, where in the pass it ended, and how often each module inside it had been called then."""

    leaves: tuple[Any, ...]
    shape: Any
    end: int
    inside: dict[int, int]

    @property
    def bytes(self) -> int:
        """What it takes."""
        return sum(leaf.nbytes for leaf in self.leaves if isinstance(leaf, Tensor))

    def again(self) -> Any:
        """A copy, which whoever takes it may write to."""
        copies = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in self.leaves]
        return tree_unflatten(copies, self.shape)


@dataclass
class Recording:
    """One pass: what its calls gave out, as far as there was room, and where the watched modules first ran."""

    given: dict[Call, _Given] = field(default_factory=dict)
    first: dict[int, int] = field(default_factory=dict)
    bytes: int = 0
    full: bool = False

    def keep_only(self, calls: frozenset[Call]) -> None:
        """Let go of what other calls gave out."""
        self.given = {call: given for call, given in self.given.items() if call in calls}
        self.bytes, self.full = sum(given.bytes for given in self.given.values()), False


class Prefix:
    """A network whose passes can be recorded and taken up again; it is changed, so give a copy, and copy it no more.

    `watched` are the modules that will differ. `record` and `rerun` take a function that runs the network.
    """

    def __init__(self, model: nn.Module, watched: Iterable[nn.Module]) -> None:
        self._watched = {id(module): module for module in watched}
        self._now: _Pass | None = None
        self._worth: frozenset[Call] | None = None
        inside = {id(part) for module in self._watched.values() for part in module.modules()}
        for number, module in enumerate(model.modules()):
            if id(module) not in inside and not isinstance(module, torch.jit.ScriptModule):
                module.__dict__["forward"] = self._followed(number, module, module.forward)

    def record(self, run: Callable[[], Result], room: float = float("inf")) -> tuple[Result, Recording]:
        """Run as it is, keeping at most so many bytes; by the first pass it is seen what takes long."""
        recorder = _Recorder(self._worth, room, self._watched.keys())
        hooks = [module.register_forward_pre_hook(recorder.see) for module in self._watched.values()]
        try:
            result = self._during(recorder, run)
        finally:
            for hook in hooks:
                hook.remove()
        if self._worth is None:
            self._worth = recorder.worth()
            recorder.made.keep_only(self._worth)
        return result, recorder.made

    def rerun(self, recording: Recording, changed: Iterable[nn.Module], run: Callable[[], Result]) -> Result:
        """Run with these of the watched modules changed; those that a recorded pass never reached are never run."""
        places = [recording.first[id(module)] for module in changed if id(module) in recording.first]
        return self._during(_Again(recording, min(places, default=0)), run)

    def _during(self, now: _Pass, run: Callable[[], Result]) -> Result:
        self._now = now
        try:
            return run()
        finally:
            self._now = None

    def _followed(self, number: int, module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(forward)  # whose arguments a batch is read by
        def follow(*args: Any, **kwargs: Any) -> Any:
            if self._now is None:
                return forward(*args, **kwargs)
            return self._now.call(number, module, lambda: forward(*args, **kwargs), (args, kwargs))

        return follow


class _Pass:
    """One pass of the network; counts the calls of its modules."""

    def __init__(self) -> None:
        self.calls: Counter[int] = Counter()

    def call(self, number: int, module: nn.Module, run: Callable[[], Any], given: Any) -> Any:
        """Do what is to be done where a module is called."""
        key = number, self.calls[number]
        self.calls[number] += 1
        return self.called(key, module, run, given)

    def called(self, key: Call, module: nn.Module, run: Callable[[], Any], given: Any) -> Any:
        """The same, for the call that it is."""
        raise NotImplementedError


class _Recorder(_Pass):
    """Keeps what the larger calls give out; of all calls, where it is not known yet which these are."""

    def __init__(self, worth: frozenset[Call] | None, room: float, watched: Collection[int]) -> None:
        super().__init__()
        self.made = Recording()
        self._watched = watched
        self._worth, self._room, self._place = worth, room, 0
        self._seconds: dict[Call, float] = {}

    def see(self, module: nn.Module, _: Any) -> None:
        """A watched module is called."""
        self.made.first.setdefault(id(module), self._place)
        self._place += 1

    def called(self, key: Call, module: nn.Module, run: Callable[[], Any], given: Any) -> Any:
        if _seen_by_a_mode() or (self._worth is not None and key not in self._worth):
            return run()
        before, calls, start = _Looked.at(module, given, self._watched), Counter(self.calls), time.perf_counter()
        out = run()
        self._seconds[key] = time.perf_counter() - start
        if before is None or not before.unchanged(_Looked.at(module, given, self._watched)):
            return out
        leaves, shape = tree_flatten(out)
        if _is_plain(leaves) and before.apart(leaves):
            inside = {number: count for number, count in self.calls.items() if count != calls[number]}
            self._keep(key, leaves, shape, inside)
        return out

    def worth(self) -> frozenset[Call]:
        """The calls that take a noticeable part of the longest, which is that of the network itself, number 0."""
        longest = max(self._seconds.values(), default=0.0)
        return frozenset(key for key, seconds in self._seconds.items() if key[0] and seconds >= _WORTH * longest)

    def _keep(self, key: Call, leaves: list[Any], shape: Any, inside: dict[int, int]) -> None:
        size = sum(leaf.nbytes for leaf in leaves if isinstance(leaf, Tensor))
        self.made.full = self.made.full or self.made.bytes + size > self._room
        if not self.made.full:
            kept = tuple(leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves)
            self.made.given[key] = _Given(kept, shape, self._place, inside)
            self.made.bytes += size


class _Again(_Pass):
    """Gives what was given before, up to the first change."""

    def __init__(self, recording: Recording, change: int) -> None:
        super().__init__()
        self._given, self._change = recording.given, change

    def called(self, key: Call, module: nn.Module, run: Callable[[], Any], given: Any) -> Any:
        known = self._given.get(key)
        if known is None or known.end > self._change:
            return run()
        self.calls.update({number: count - self.calls[number] for number, count in known.inside.items()})
        return known.again()


@dataclass(frozen=True)
class _Looked:
    """What a call could change beside giving something out: its arguments, and what its modules hold."""

    leaves: tuple[Any, ...]
    shape: Any
    versions: tuple[int, ...]
    held: tuple[Any, ...]

    @classmethod
    def at(cls, module: nn.Module, given: Any, watched: Collection[int]) -> _Looked | None:
        """How they are now; None where that cannot be told: of arguments of other kinds, or where somebody looks on."""
        leaves, shape = tree_flatten(given)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if not _is_plain(leaves) or any(tensor.is_inference() for tensor in tensors):
            return None
        parts = [part for part in module.modules() if id(part) not in watched]
        if any(part._forward_hooks or part._forward_pre_hooks for part in parts):
            return None
        known: dict[int, Any] = {}
        held = tuple(_state(part, known) for part in parts)
        return cls(tuple(leaves), shape, tuple(tensor._version for tensor in tensors), held)

    def unchanged(self, now: _Looked | None) -> bool:
        """Whether all is still as it was."""
        if now is None or len(now.leaves) != len(self.leaves) or now.shape != self.shape:
            return False
        same = all(one is other for one, other in zip(now.leaves, self.leaves, strict=True))
        return same and now.versions == self.versions and now.held == self.held

    def apart(self, out: list[Any]) -> bool:
        """Whether what was given out is nothing of what was given in."""
        inputs = {tensor.untyped_storage()._cdata for tensor in tensors_in(self.leaves)}
        return not any(tensor.untyped_storage()._cdata in inputs for tensor in tensors_in(out))


def _state(part: nn.Module, known: dict[int, Any]) -> tuple[Any, ...]:
    """What a module holds, by identity, and how often its tensors were written to.

    The statistics of norms do not count: in inference nobody reads them, and in training nobody but the norm.
    """
    counted = {name: value for name, value in vars(part).items() if name not in ("_parameters", "_modules", "forward")}
    if isinstance(part, _NormBase):
        counted.pop("_buffers", None)
    return tuple((name, _signature(value, _DEPTH, known)) for name, value in counted.items())


def _signature(value: Any, depth: int, known: dict[int, Any]) -> Any:
    """What would differ if a value, or something in it, had changed: as deep as things usually hold each other."""
    if isinstance(value, Tensor):
        return id(value), 0 if value.is_inference() else value._version
    if not depth or isinstance(value, _FIXED):
        return id(value)
    if id(value) not in known:
        known[id(value)] = id(value), tuple(_signature(one, depth - 1, known) for one in _contents(value))
    return known[id(value)]


def _contents(value: Any) -> Iterable[Any]:
    """What is in a container, or hangs on an object."""
    if isinstance(value, Mapping):
        return [*value.keys(), *value.values()]
    if isinstance(value, list | tuple | set | frozenset | deque):
        return list(value)
    return list(getattr(value, "__dict__", {}).values())


def _is_plain(leaves: Iterable[Any]) -> bool:
    return all(isinstance(leaf, _PLAIN) for leaf in leaves)


def _seen_by_a_mode() -> bool:
    """Whether somebody around counts the functions that are called: then all of them must be called."""
    return bool(torch._C._len_torch_function_stack())
