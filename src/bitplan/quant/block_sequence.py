"""Blocks that run one after the other, each on the output of the one before: a later block can be run alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from bitplan.quant.moments import Enough
from bitplan.quant.quantizers import WeightQuantizer

Run = Callable[[Any], Any]
"""Runs the network on a batch."""
_PLAIN = (Tensor, bool, int, float, str, type(None), torch.dtype, torch.device)
_HERE = object()  # where in its arguments a block is given what the one before made


class BlockSequence:
    """The blocks of a list, and for each batch the arguments of their calls and the input of the next block."""

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        self.blocks = list(blocks)
        self.next = 0
        self._calls: list[list[tuple[tuple[Any, ...], dict[str, Any]]]] = []
        self._inputs: list[Tensor] = []

    def place(self, module: nn.Module) -> int | None:
        """Return the index of the block that contains a module, or None."""
        inside = (number for number, block in enumerate(self.blocks) if any(one is module for one in block.modules()))
        return next(inside, None)

    def record_(self, run: Run, batches: Sequence[Any]) -> bool:
        """Run every batch up to the last block; tell whether each block ran once, on the output of the one before.

        No other argument of a block may come from an earlier block, and no argument or result may be written to: a
        recorded call would differ from the call that is made later.
        """
        self._calls, self._inputs, self.next = [], [], 0
        for batch in batches:
            calls: list[tuple[nn.Module, tuple[Any, ...], dict[str, Any]]] = []
            results: list[Any] = []
            written: list[tuple[Tensor, float]] = []
            with _record_calls(self.blocks, calls, results, written), suppress(Enough):
                run(batch)
            if [block for block, *_ in calls] != self.blocks or len(results) != len(calls):
                return False
            if not all(isinstance(one, _PLAIN) for _, *arguments in calls for one in tree_leaves(arguments)):
                return False  # such as a cache of keys, to which every run adds
            given = [_find_input(args, kwargs) for _, args, kwargs in calls]
            passed = all(one is first_tensor(made) for one, made in zip(given[1:], results[:-1], strict=True))
            if not passed or given[0] is None or any(_version(one) != version for one, version in written):
                return False
            opened = [_without_input(call, one) for call, one in zip(calls, given, strict=True)]
            if _reads_earlier_results(calls, opened, results):
                return False
            copies: dict[int, Tensor] = {}
            self._calls.append(tree_map_only(Tensor, partial(_copy, copies), opened))
            self._inputs.append(given[0].clone())
        return True

    def reach_(self, number: int) -> None:
        """Run the blocks before this one on every batch, except those that ran since the recording."""
        assert number >= self.next, "what came before is not kept"
        while self.next < number:
            self._inputs = [self.made(self.next, batch) for batch in range(len(self._inputs))]
            self.next += 1

    def run_(self, number: int) -> None:
        """Run one block on every batch, after `reach_`; it may end early with `Enough`."""
        for batch in range(len(self._inputs)):
            with suppress(Enough):
                self.made(number, batch)

    def made(self, number: int, batch: int) -> Tensor:
        """Return the output of one block for a batch, after `reach_`."""
        args, kwargs = self._calls[batch][number]
        made = self._inputs[batch]
        given = (made if one is _HERE else one for one in args)
        named = {name: made if one is _HERE else one for name, one in kwargs.items()}
        result = first_tensor(self.blocks[number](*given, **named))
        assert result is not None
        return result


def find_block_sequences(model: nn.Module) -> list[BlockSequence]:
    """Return the outermost lists of modules of which several have quantized weights."""
    found: list[BlockSequence] = []
    inside: set[nn.Module] = set()
    for module in model.modules():
        if not isinstance(module, nn.ModuleList | nn.Sequential) or module in inside:
            continue
        blocks = list(module.children())
        if len(set(blocks)) == len(blocks) and sum(map(_is_quantized, blocks)) > 1:
            found.append(BlockSequence(blocks))
            inside.update(module.modules())
    return found


def first_tensor(made: Any) -> Tensor | None:
    """Return the tensor that a block returns, or the first of several results."""
    one = made[0] if isinstance(made, tuple | list) and made else made
    return one if isinstance(one, Tensor) else None


def _is_quantized(block: nn.Module) -> bool:
    return any(isinstance(module, WeightQuantizer) for module in block.modules())


def _find_input(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """Return the first float tensor among the arguments of a block."""
    tensors = (one for one in (*args, *kwargs.values()) if isinstance(one, Tensor) and one.is_floating_point())
    return next(tensors, None)


def _without_input(
    call: tuple[nn.Module, tuple[Any, ...], dict[str, Any]], given: Tensor | None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a call without the output of the block before."""
    _, args, kwargs = call
    return tuple(_HERE if one is given else one for one in args), {
        name: _HERE if one is given else one for name, one in kwargs.items()
    }


def _reads_earlier_results(calls: Sequence[Any], opened: Sequence[Any], results: Sequence[Any]) -> bool:
    """Tell whether a block reads any other tensor that an earlier block computed."""
    made: set[int] = set()
    for (_, *arguments), others, result in zip(calls, opened, results, strict=True):
        if made & _storages(others):
            return True
        made |= _storages(result) - _storages(arguments)
    return False


def _storages(tree: Any) -> set[int]:
    """Return the addresses of the storages in a tree; a view has the storage of its tensor."""
    return {one.untyped_storage().data_ptr() for one in _tensors(tree)} - {0}


def _tensors(tree: Any) -> list[Tensor]:
    return [one for one in tree_leaves(tree) if isinstance(one, Tensor)]


def _version(tensor: Tensor) -> float:
    """Return how often a tensor was written to; NaN, which equals nothing, if torch does not count it."""
    return math.nan if tensor.is_inference() else tensor._version


def _copy(copies: dict[int, Tensor], tensor: Tensor) -> Tensor:
    """Return a copy of a tensor, the same for all blocks that share it; parameters stay, since they change."""
    if isinstance(tensor, nn.Parameter):
        return tensor
    if id(tensor) not in copies:
        copies[id(tensor)] = tensor.clone()
    return copies[id(tensor)]


@contextmanager
def _record_calls(
    blocks: Sequence[nn.Module], calls: list[Any], results: list[Any], written: list[tuple[Tensor, float]]
) -> Iterator[None]:
    """Record arguments and results of the blocks until the last one has run, with the versions of all tensors."""

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls.append((module, args, kwargs))
        written.extend((one, _version(one)) for one in _tensors((args, kwargs)))

    def after(last: bool, module: nn.Module, args: Any, out: Any) -> None:
        results.append(out)
        written.extend((one, _version(one)) for one in _tensors(out))
        if last:
            raise Enough

    hooks = [block.register_forward_pre_hook(before, with_kwargs=True) for block in blocks]
    hooks += [block.register_forward_hook(partial(after, block is blocks[-1])) for block in blocks]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
