"""Blocks that run one after the other, each on what the one before made: a later one can be run alone, from there."""

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


class Chain:
    """The blocks of a list, and for each batch with what they were called, and what the next one is to be given."""

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        self.blocks = list(blocks)
        self.next = 0
        self._calls: list[list[tuple[tuple[Any, ...], dict[str, Any]]]] = []
        self._made: list[Tensor] = []

    def place(self, module: nn.Module) -> int | None:
        """The number of the block that a module is in."""
        inside = (number for number, block in enumerate(self.blocks) if any(one is module for one in block.modules()))
        return next(inside, None)

    def record_(self, run: Run, batches: Sequence[Any]) -> bool:
        """Run every batch up to the last block; tell whether each was given what the one before made, and ran once.

        No other thing that blocks are given may be made by one of them, and nothing that they are given or make may be
        written to: what is kept of a call would not be what it is called with later.
        """
        self._calls, self._made, self.next = [], [], 0
        for batch in batches:
            calls: list[tuple[nn.Module, tuple[Any, ...], dict[str, Any]]] = []
            results: list[Any] = []
            written: list[tuple[Tensor, float]] = []
            with _noting(self.blocks, calls, results, written), suppress(Enough):
                run(batch)
            if [block for block, *_ in calls] != self.blocks or len(results) != len(calls):
                return False
            if not all(isinstance(one, _PLAIN) for _, *arguments in calls for one in tree_leaves(arguments)):
                return False  # such as a cache of keys, to which every run adds
            given = [_given(args, kwargs) for _, args, kwargs in calls]
            passed = all(one is first(made) for one, made in zip(given[1:], results[:-1], strict=True))
            if not passed or given[0] is None or any(_version(one) != version for one, version in written):
                return False
            opened = [_opened(call, one) for call, one in zip(calls, given, strict=True)]
            if _leans_on_results(calls, opened, results):
                return False
            copies: dict[int, Tensor] = {}
            self._calls.append(tree_map_only(Tensor, partial(_copied, copies), opened))
            self._made.append(given[0].clone())
        return True

    def reach_(self, number: int) -> None:
        """Run what is in front of a block on every batch, as far as it has not been since it was recorded."""
        assert number >= self.next, "what came before is not kept"
        while self.next < number:
            self._made = [self.made(self.next, batch) for batch in range(len(self._made))]
            self.next += 1

    def run_(self, number: int) -> None:
        """Run one block on every batch, after `reach_`; it may end early with `Enough`."""
        for batch in range(len(self._made)):
            with suppress(Enough):
                self.made(number, batch)

    def made(self, number: int, batch: int) -> Tensor:
        """What one block makes of a batch, after `reach_`."""
        args, kwargs = self._calls[batch][number]
        made = self._made[batch]
        given = (made if one is _HERE else one for one in args)
        named = {name: made if one is _HERE else one for name, one in kwargs.items()}
        result = first(self.blocks[number](*given, **named))
        assert result is not None
        return result


def find_chains(model: nn.Module) -> list[Chain]:
    """Lists of modules of which several have quantized weights, the outermost ones."""
    found: list[Chain] = []
    inside: set[nn.Module] = set()
    for module in model.modules():
        if not isinstance(module, nn.ModuleList | nn.Sequential) or module in inside:
            continue
        blocks = list(module.children())
        if len(set(blocks)) == len(blocks) and sum(map(_is_quantized, blocks)) > 1:
            found.append(Chain(blocks))
            inside.update(module.modules())
    return found


def first(made: Any) -> Tensor | None:
    """The tensor that a block makes, or the first of several things."""
    one = made[0] if isinstance(made, tuple | list) and made else made
    return one if isinstance(one, Tensor) else None


def _is_quantized(block: nn.Module) -> bool:
    return any(isinstance(module, WeightQuantizer) for module in block.modules())


def _given(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """The tensor of numbers that a block is called with first."""
    tensors = (one for one in (*args, *kwargs.values()) if isinstance(one, Tensor) and one.is_floating_point())
    return next(tensors, None)


def _opened(
    call: tuple[nn.Module, tuple[Any, ...], dict[str, Any]], given: Tensor | None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call without what the block before made."""
    _, args, kwargs = call
    return tuple(_HERE if one is given else one for one in args), {
        name: _HERE if one is given else one for name, one in kwargs.items()
    }


def _leans_on_results(calls: Sequence[Any], opened: Sequence[Any], results: Sequence[Any]) -> bool:
    """Tell whether a block is given anything else that an earlier one made, and did not only hand on."""
    made: set[int] = set()
    for (_, *arguments), others, result in zip(calls, opened, results, strict=True):
        if made & _memory(others):
            return True
        made |= _memory(result) - _memory(arguments)
    return False


def _memory(tree: Any) -> set[int]:
    """Where the tensors in a tree lie; a view lies where the tensor does."""
    return {one.untyped_storage().data_ptr() for one in _tensors(tree)} - {0}


def _tensors(tree: Any) -> list[Tensor]:
    return [one for one in tree_leaves(tree) if isinstance(one, Tensor)]


def _version(tensor: Tensor) -> float:
    """How often a tensor was written to; NaN, which equals nothing, where torch does not count it."""
    return math.nan if tensor.is_inference() else tensor._version


def _copied(copies: dict[int, Tensor], tensor: Tensor) -> Tensor:
    """A copy of a tensor, the same for all blocks that share it; parameters stay, since they change."""
    if isinstance(tensor, nn.Parameter):
        return tensor
    if id(tensor) not in copies:
        copies[id(tensor)] = tensor.clone()
    return copies[id(tensor)]


@contextmanager
def _noting(
    blocks: Sequence[nn.Module], calls: list[Any], results: list[Any], written: list[tuple[Tensor, float]]
) -> Iterator[None]:
    """Note what blocks are called with and what they make, until the last one has; and how often it was written to."""

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
